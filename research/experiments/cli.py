"""The papers' experiments on one model, in float32, and what they say about the falsifiers.

    python -m research.experiments --all -m M.gguf --bases calib.safetensors -f IN_DOMAIN.txt -f OTHER.txt -o report/

Writes report.md, results.json, bounds.jsonl and (extra plot) PNGs after every experiment; another run with the same
settings reuses the finished ones. Needs the extra torch.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runtime import options
from subkv.base.command import command, group, sentence
from subkv.base.errors import SubkvError, concerning
from subkv.base.threads import default_threads
from subkv.format.window import N_RECENT, N_SINK, Window

# what runs is imported by the command: numpy, torch and the native libraries are not for a --help
if TYPE_CHECKING:
    from converter.corpus import Text as Read
    from research.experiments.lab import Lab, Text
    from research.float32.reference import Reference

MIN_TOKENS = 256  # the last quarter of a chunk still has a few blocks of the adaptive coder
FORMAT = 3  # of results.json; raised when an experiment's results change, so that older ones are not reused
PACKAGES = ("subkv", "torch", "transformers", "numpy")
NAMES = (
    "ranks",
    "matched",
    "sides",
    "coefficients",
    "chunks",
    "domain",
    "rotary",
    "anchoring",
    "oja",
    "length",
    "bounds",
)
FILE = click.Path(path_type=Path)


def experiments() -> dict[str, Callable[[Lab], dict[str, Any]]]:
    """The function of every name."""
    from research.experiments import bound_errors, oja, quality, rotary, subspaces

    functions = (
        quality.ranks,
        quality.matched,
        quality.sides,
        quality.coefficients,
        subspaces.chunks,
        quality.domain,
        rotary.rotary,
        quality.anchoring,
        oja.oja,
        quality.length,
        bound_errors.bound_errors,
    )
    return dict(zip(NAMES, functions, strict=True))


def _names(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[str, ...] | None:
    names = None if text is None else tuple(text.split(","))
    for name in names or ():
        if name not in NAMES:
            raise click.BadParameter(f"expected names out of {', '.join(NAMES)}, found {name!r}")
    return names


@dataclass(frozen=True)
class Chosen:
    """Which experiments."""

    every: bool
    only: tuple[str, ...] | None

    @property
    def names(self) -> tuple[str, ...]:
        if self.every == (self.only is not None):
            raise click.UsageError("expected --all or --only NAME,…, one of them")
        return self.only or NAMES


@dataclass(frozen=True)
class Corpus:
    """Texts, the first one like that of the calibration, in chunks of n_ctx tokens."""

    files: tuple[Path, ...]
    n_ctx: int
    chunks: int

    def __post_init__(self) -> None:
        if len({path.name for path in self.files}) < len(self.files):
            raise SubkvError("files", "expected texts of different names, which the report tells them apart by")


@dataclass(frozen=True)
class Budget:
    """Of the coded caches."""

    kv_bits: float
    bpe_context: int | None


def _window(n_sink: int | None, n_recent: int | None) -> Window:
    return Window(N_SINK if n_sink is None else n_sink, N_RECENT if n_recent is None else n_recent, recent_bits=16)


class Results:
    """A folder with the results so far. Raises SubkvError about `output` for a folder that cannot be used."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        from research.experiments.grids import made_folder
        from subkv.base.files import check_writable

        self.folder, self.settings = folder, settings
        self.found: dict[str, dict[str, Any]] = {}
        self._drawn: dict[str, str] = {}
        self._undrawn = ""
        made_folder(folder)
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
            self.found = {name: results[name] for name in NAMES if name in results}
        else:
            options.note("-o: results of other settings are replaced")

    def add(self, name: str, found: dict[str, Any]) -> None:
        found = {**self.found, name: found}
        self.found = {known: found[known] for known in NAMES if known in found}

    def _draw(self) -> None:
        """Pictures of what has none yet; a note, once, where that is not possible."""
        from research.experiments import figures

        for name, found in self.found.items():
            if name in self._drawn or self._undrawn:
                continue
            try:
                with concerning(plot="output"):
                    picture = figures.draw(name, found, self.folder)
            except SubkvError as error:
                self._undrawn = f"no plots: {sentence(error)}"
                options.note(self._undrawn)
            else:
                self._drawn |= {name: picture} if picture else {}

    def write(self) -> None:
        """All files, each whole or not at all."""
        from research.experiments import report
        from research.experiments.grids import write_files

        self._draw()
        notes = [self._undrawn] if self._undrawn else []
        about = {name: (function.__doc__ or "").strip() for name, function in experiments().items()}
        whole = {"settings": self.settings, "experiments": self.found}
        files = {
            "results.json": json.dumps(whole, indent=1),
            "report.md": report.markdown(self.settings, self.found, notes, self._drawn, about),
        }
        if "bounds" in self.found:
            files["bounds.jsonl"] = "".join(f"{json.dumps(line)}\n" for line in self.found["bounds"]["lines"])
        write_files(self.folder, files)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


@command(name="experiments")
@group(
    "chosen",
    Chosen,
    click.option("--all", "every", is_flag=True, help="all experiments"),
    click.option("--only", callback=_names, metavar="NAME,…", help=f"some of {', '.join(NAMES)}"),
)
@click.option("-m", "--model", required=True, type=FILE, help="GGUF model")
@click.option("--bases", required=True, type=FILE, help="calibration file (calib.safetensors)")
@group(
    "corpus",
    Corpus,
    click.option(
        "-f",
        "--file",
        "files",
        required=True,
        multiple=True,
        type=FILE,
        help="UTF-8 text, the first one like that of the calibration",
    ),
    click.option("-c", "--ctx-size", "n_ctx", type=click.IntRange(MIN_TOKENS), default=2048, help="tokens per chunk"),
    click.option("--chunks", type=click.IntRange(1), default=1, help="chunks of every text"),
)
@group(
    "budget",
    Budget,
    click.option("--kv-bits", type=float, default=4.25, help="budget in bits per element, as of convert"),
    click.option("--bpe-context", type=click.IntRange(1), help="context of the bit count; default: as of convert"),
)
@group(
    "window",
    _window,
    click.option("--n-sink", type=int, help="first positions exact; default: as of convert"),
    click.option("--n-recent", type=int, help="last positions exact; default: as of convert"),
)
@options.threads_option
@click.option("-o", "--output", "output", required=True, type=FILE, help="folder of the report")
def main(
    chosen: Chosen,
    model: Path,
    bases: Path,
    corpus: Corpus,
    budget: Budget,
    window: Window,
    n_threads: int | None,
    output: Path,
) -> None:
    """Run the papers' experiments and answer their falsifiers."""
    from converter.corpus import read_text
    from research.experiments.lab import Lab
    from research.experiments.verdicts import verdicts
    from research.float32.reference import Reference, check_length, check_shapes
    from subkv.format.calibration import read_calibration
    from subkv.native.gguf import Gguf, sha256
    from subkv.plan.pipeline import Options

    names = chosen.names
    with contextlib.ExitStack() as stack:
        calibration = read_calibration(bases)
        read = [read_text(path) for path in corpus.files]
        base = stack.enter_context(Gguf(model))
        settings = {
            "model": f"{model.name} ({sha256(base.files, progress=True)[:16]})",
            "bases": f"{bases.name} ({calibration.sha256[:16]})",
            "texts": [f"{text.source.name} ({text.source.sha256[:16]})" for text in read],
            "n_ctx": corpus.n_ctx,
            "chunks": corpus.chunks,
            "kv_bits": budget.kv_bits,
            "n_sink": window.n_sink,
            "n_recent": window.n_recent,
            "bpe_context": budget.bpe_context or "as of convert",
            "versions": {name: _version(name) for name in PACKAGES},
            "format": FORMAT,
        }
        results = Results(output, settings)
        pending = [name for name in names if name not in results.found]
        if results.found:
            options.note(f"reused: {', '.join(results.found)}")
        if pending:
            reference = Reference(model, default_threads(n_threads))
            check_shapes(reference, calibration)
            check_length(reference, corpus.n_ctx)
            texts = _texts(reference, corpus, read)
            reference.match(calibration, texts[0].chunks[0])
            plan_options = Options(window=window, bpe_context=budget.bpe_context)
            threads = default_threads(n_threads)
            lab = Lab(base, calibration, reference, texts, plan_options, budget.kv_bits, corpus.n_ctx, threads, stack)
            for note in lab.fit().notes:
                options.note(sentence(note))
            lab.fit().plan(budget.kv_bits)  # refuses a budget that cannot be had
            for i, name in enumerate(pending):
                options.note(f"{name} ({i + 1} of {len(pending)})")
                start = time.monotonic()
                found = experiments()[name](lab)
                results.add(name, {"seconds": time.monotonic() - start, **found})
                results.write()
        results.write()
    for line in verdicts(results.found):
        click.echo(line)


def _texts(reference: Reference, corpus: Corpus, read: list[Read]) -> list[Text]:
    """Their chunks, and one of twice the length of the in-domain text, if it has so many tokens."""
    from converter.corpus import cut
    from research.experiments.lab import Text

    found: list[Text] = []
    for text in read:
        own = cut(reference, [text], corpus.n_ctx, corpus.chunks)
        longest = own[0]
        if not found:
            with contextlib.suppress(SubkvError):
                longest = cut(reference, [text], min(2 * corpus.n_ctx, reference.n_ctx_train), 1)[0]
        found.append(Text(text.source.name, own, longest))
    return found
