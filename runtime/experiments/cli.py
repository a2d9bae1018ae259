"""The papers' experiments on one model, in float32, and what they say about the falsifiers.

    python -m runtime.experiments --all -m M.gguf --bases calib.safetensors -f IN_DOMAIN.txt -f OTHER.txt -o report/

Writes report.md, results.json, bounds.jsonl and (extra plot) PNGs after every experiment; another run with the same
settings reuses the finished ones. Needs the extra torch.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runtime import options
from subkv.base.command import command, sentence
from subkv.base.errors import SubkvError
from subkv.base.threads import default_threads

if TYPE_CHECKING:
    from runtime.experiments.lab import Lab

MIN_TOKENS = 256  # the last quarter of a chunk still has a few blocks of the adaptive coder
FORMAT = 2  # of results.json; raised when an experiment's results change, so that older ones are not reused
PACKAGES = ("subkv", "torch", "transformers", "numpy")
NAMES = ("ranks", "matched", "sides", "coefficients", "chunks", "domain", "rotary", "oja", "length", "bounds")


def experiments() -> dict[str, Callable[[Lab], dict[str, Any]]]:
    """The function of every name."""
    from runtime.experiments import errors, oja, quality, rotary, subspaces

    functions = (
        quality.ranks,
        quality.matched,
        quality.sides,
        quality.coefficients,
        subspaces.chunks,
        quality.domain,
        rotary.rotary,
        oja.oja,
        quality.length,
        errors.bound_errors,
    )
    return dict(zip(NAMES, functions, strict=True))


def _names(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(text.split(","))
    for name in names:
        if name not in NAMES:
            raise click.BadParameter(f"expected names out of {', '.join(NAMES)}, found {name!r}")
    return names


def _versions() -> dict[str, str]:
    out = {}
    for name in PACKAGES:
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            out[name] = "not installed"
    return out


class Report:
    """A folder with the results so far. Raises SubkvError or SubkvError for a folder that cannot be used."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        from subkv.base.files import check_writable

        self.folder, self.settings = folder, settings
        self.results: dict[str, dict[str, Any]] = {}
        self._drawn: dict[str, str] = {}
        self._undrawn = ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SubkvError("output", f"cannot write {folder}: {error.strerror or error}") from error
        self.path = folder / "results.json"
        check_writable(self.path)
        if self.path.exists():
            self._resume()

    def _resume(self) -> None:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            same, results = found["settings"] == self.settings, dict(found["experiments"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SubkvError(
                "output", f"expected results of this program in {self.path.name}, found something else; remove it"
            ) from error
        if same:
            self.results = {name: results[name] for name in NAMES if name in results}
        else:
            options.note("-o: results of other settings are replaced")

    def add(self, name: str, found: dict[str, Any]) -> None:
        found = {**self.results, name: found}
        self.results = {known: found[known] for known in NAMES if known in found}

    def write(self) -> None:
        """All files, each whole or not at all."""
        from runtime.experiments import figures, report
        from subkv.base.files import atomic_file

        notes = []
        for name, found in self.results.items():
            if name in self._drawn or self._undrawn:
                continue
            try:
                picture = figures.draw(name, found, self.folder)
            except SubkvError as error:
                self._undrawn = f"no plots: {error}"
                options.note(self._undrawn)
            else:
                self._drawn.update({name: picture} if picture else {})
        if self._undrawn:
            notes.append(self._undrawn)
        about = {name: (function.__doc__ or "").strip() for name, function in experiments().items()}
        text = report.markdown(_command(), self.settings, self.results, notes, self._drawn, about)
        whole = {"settings": self.settings, "experiments": self.results}
        files = {"results.json": json.dumps(whole, indent=1), "report.md": text}
        if "bounds" in self.results:
            files["bounds.jsonl"] = "".join(f"{json.dumps(line)}\n" for line in self.results["bounds"]["lines"])
        for name, content in files.items():
            with atomic_file(self.folder / name) as handle:
                handle.write(content.encode("utf-8"))


def _command() -> str:
    """The command line, files without their folders."""
    return " ".join(["python -m runtime.experiments", *(re.sub(r"[^\s=,]*/(?=.)", "", a) for a in sys.argv[1:])])


@command(name="experiments")
@click.option("--all", "every", is_flag=True, help="all experiments")
@click.option("--only", callback=_names, metavar="NAME,…", help=f"some of {', '.join(NAMES)}")
@click.option("-m", "--model", required=True, type=click.Path(path_type=Path), help="GGUF model")
@click.option("--bases", required=True, type=click.Path(path_type=Path), help="calibration file (calib.safetensors)")
@click.option(
    "-f",
    "--file",
    "files",
    required=True,
    multiple=True,
    type=click.Path(path_type=Path),
    help="UTF-8 text, the first one like that of the calibration",
)
@click.option("-c", "--ctx-size", "n_ctx", type=click.IntRange(MIN_TOKENS), default=2048, help="tokens per chunk")
@click.option("--chunks", type=click.IntRange(1), default=1, help="chunks of every text")
@click.option("--kv-bits", type=float, default=4.25, help="budget in bits per element, as of convert")
@click.option("--n-sink", type=int, default=None, help="first positions exact; default: as of convert")
@click.option("--n-recent", type=int, default=None, help="last positions exact; default: as of convert")
@click.option("--bpe-context", type=click.IntRange(1), help="context of the bit count; default: as of convert")
@options.threads_option
@click.option("-o", "--output", "folder", required=True, type=click.Path(path_type=Path), help="folder of the report")
def main(
    every: bool,
    only: tuple[str, ...] | None,
    model: Path,
    bases: Path,
    files: tuple[Path, ...],
    n_ctx: int,
    chunks: int,
    kv_bits: float,
    n_sink: int | None,
    n_recent: int | None,
    bpe_context: int | None,
    n_threads: int | None,
    folder: Path,
) -> None:
    """Run the papers' experiments and answer their falsifiers."""
    from converter.corpus import cut, read_text
    from converter.reference import Reference, check_length, check_shapes
    from runtime.experiments.lab import Lab, Text
    from subkv.format.calibration import read_calibration
    from subkv.format.window import N_RECENT, N_SINK, Window
    from subkv.native.gguf import Gguf, sha256
    from subkv.plan.pipeline import Options

    if every == (only is not None):
        raise click.UsageError("expected --all or --only NAME,…, one of them")
    if len({path.name for path in files}) < len(files):
        raise SubkvError("files", "expected texts of different names, which the report tells them apart by")
    with contextlib.ExitStack() as stack:
        calibration = read_calibration(bases)
        texts = [read_text(path) for path in files]
        base = stack.enter_context(Gguf(model))
        chosen = Options(
            window=Window(N_SINK if n_sink is None else n_sink, N_RECENT if n_recent is None else n_recent),
            bpe_context=bpe_context,
        )
        settings = {
            "model": f"{model.name} ({sha256(base.files, progress=True)[:16]})",
            "bases": f"{bases.name} ({calibration.sha256[:16]})",
            "texts": [f"{path.name} ({text.source.sha256[:16]})" for path, text in zip(files, texts, strict=True)],
            "n_ctx": n_ctx,
            "chunks": chunks,
            "kv_bits": kv_bits,
            "n_sink": chosen.window.n_sink,
            "n_recent": chosen.window.n_recent,
            "bpe_context": bpe_context or "as of convert",
            "versions": _versions(),
            "format": FORMAT,
        }
        report = Report(folder, settings)
        wanted = [name for name in (NAMES if only is None else only) if name not in report.results]
        if report.results:
            options.note(f"reused: {', '.join(report.results)}")
        if wanted:
            reference = Reference(model, default_threads(n_threads))
            check_shapes(reference, calibration)
            check_length(reference, n_ctx)
            long = min(2 * n_ctx, reference.n_ctx_train)
            pieces = []
            for i, text in enumerate(texts):
                own = cut(reference, [text], n_ctx, chunks)
                # only the in-domain text has to be long, and only if it can be
                longest = own[0] if i else _longest(reference, text, long, own[0])
                pieces.append(Text(text.source.name, own, longest))
            reference.match(calibration, pieces[0].chunks[0])
            lab = Lab(base, calibration, reference, pieces, chosen, kv_bits, n_ctx, default_threads(n_threads), stack)
            for note in lab.fit().notes:
                options.note(sentence(note))
            lab.fit().plan(kv_bits)  # refuses a budget that cannot be had
            for i, name in enumerate(wanted):
                options.note(f"{name} ({i + 1} of {len(wanted)})")
                start = time.monotonic()
                found = experiments()[name](lab)
                report.add(name, {"seconds": time.monotonic() - start, **found})
                report.write()
        report.write()
    from runtime.experiments.verdicts import verdicts

    for line in verdicts(report.results):
        click.echo(line)


def _longest(reference: Any, text: Any, n: int, otherwise: tuple[int, ...]) -> tuple[int, ...]:
    """The first n tokens of a text, or `otherwise` if it is shorter."""
    from converter.corpus import cut

    try:
        return cut(reference, [text], n, 1)[0]
    except SubkvError:
        return otherwise
