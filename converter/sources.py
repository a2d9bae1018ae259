"""From what `convert` is given to a GGUF and its calibration: a Hugging Face folder becomes a GGUF first."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from converter import hf, prepare
from converter.prepare import CalibrationRequest
from subkv.base.errors import SubkvError
from subkv.base.files import check_not_input, check_writable
from subkv.native.gguf import Gguf
from subkv.plan.pipeline import check_plain


@dataclass(frozen=True)
class Sources:
    """model: a GGUF or a Hugging Face folder. bases: a calibration; None: one is made as wished.

    outtype, quantize: of a folder's weights; None: auto, not quantized.
    """

    model: Path
    bases: Path | None
    request: CalibrationRequest
    outtype: str | None = None
    quantize: str | None = None


@contextlib.contextmanager
def prepared(sources: Sources, output: Path | None, copy: bool) -> Iterator[tuple[Path, Path]]:
    """Paths of the GGUF and of the calibration; of a folder, the GGUF lies beside `output` and is removed at the end.

    output None: in the store. copy: a copy of the GGUF will be written as `output`. Says every step on stderr. Raises
    SubkvError.
    """
    if output is not None and sources.bases is None:
        check_not_input(output, (("-f", path) for path in sources.request.corpus.files))
        check_writable(output)
    with contextlib.ExitStack() as stack:
        model = sources.model
        say: Callable[[str], None] = _quiet
        if not model.is_dir():
            for name in ("outtype", "quantize"):
                if getattr(sources, name) is not None:
                    raise SubkvError(name, f"expected a Hugging Face folder as MODEL, found {model}")
        else:
            assert output is not None  # there is no other GGUF that bases could go with
            texts = sources.request.texts()
            check_writable(output)
            _check_folder(sources, output, copy)
            made = tempfile.TemporaryDirectory(prefix=f".{output.name}.", suffix=".tmp", dir=output.parent)
            say = _counted(2 + (sources.quantize is not None) + (sources.bases is None))
            model = _gguf(sources, Path(stack.enter_context(made)), say)
            if sources.bases is None:
                given = ", ".join(text.source.name for text in texts) if texts else "built-in texts"
                say(f"calibrate on {given}")
        with Gguf(model) as base:  # before minutes are spent on what could not be written
            check_plain(base)
            if copy and len(base.files) > 1:
                raise SubkvError(
                    "model",
                    f"expected one file to copy, found a model split into {len(base.files)}; "
                    "without --embed or with --sidecar only its bases are written",
                )
        bases = sources.bases
        if bases is None:
            bases = stack.enter_context(prepare.prepared(model, sources.request))
        say("bases and layout")
        yield model, bases


def _quiet(what: str) -> None:
    """Where there are no steps worth counting."""


def _counted(total: int) -> Callable[[str], None]:
    """Says steps with their numbers."""
    done = itertools.count(1)
    return lambda what: click.echo(f"step {next(done)} of {total}: {what}", err=True)


def _check_folder(sources: Sources, output: Path, copy: bool) -> None:
    """Everything about a folder that can be refused before minutes are spent on it."""
    n_weights = hf.count_weights(sources.model)
    hf.check_packages(sources.model)
    hf.converter_path()
    outtype = sources.outtype or "auto"
    if sources.quantize is not None and hf.OUTTYPES[outtype] < 2:
        raise SubkvError("quantize", f"expected weights of 16 or 32 bits to quantize, found --outtype {outtype}")
    hf.check_space(output, n_weights, outtype, sources.quantize, copy)


def _gguf(sources: Sources, work: Path, say: Callable[[str], None]) -> Path:
    """The folder's GGUF; of two, only the last stays on the disk. say: of a step."""
    outtype = sources.outtype or "auto"
    say(f"llama.cpp's converter: {sources.model} to a GGUF, {outtype}")
    made = work / "model.gguf"
    hf.to_gguf(sources.model, outtype, made)
    if sources.quantize is None:
        return made
    say(f"llama.cpp's quantizer: {sources.quantize}")
    quantized = work / f"model-{sources.quantize}.gguf"
    hf.to_quantized(made, sources.quantize, sources.request.corpus.n_threads, quantized)
    made.unlink()
    return quantized
