"""From what `convert` is given to a GGUF and its calibration: Hugging Face folders become GGUFs, texts calibrations."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from converter import hf
from converter.corpus import Corpus
from converter.observe import calibrate_file
from subkv.base.errors import SubkvError
from subkv.base.files import check_not_input, check_writable
from subkv.format.calibration import write_calibration


@dataclass(frozen=True)
class Sources:
    """model: a GGUF or a Hugging Face folder. bases: a calibration; None: one is made of `corpus`.

    n_sink: first positions that it leaves out. outtype, quantize: of a folder's weights; None: auto, not quantized.
    """

    model: Path
    bases: Path | None
    corpus: Corpus
    n_sink: int
    outtype: str | None = None
    quantize: str | None = None


@contextlib.contextmanager
def prepared(sources: Sources, output: Path, copy: bool) -> Iterator[tuple[Path, Path]]:
    """Paths of the GGUF and of the calibration. What had to be made lies beside `output` and is removed at the end.

    copy: a copy of the GGUF will be written as `output`. Says every step on stderr. Raises SubkvError.
    """
    if not sources.model.is_dir():
        for name in ("outtype", "quantize"):
            if getattr(sources, name) is not None:
                raise SubkvError(name, f"expected a Hugging Face folder as MODEL, found {sources.model}")
        if sources.bases is not None:
            yield sources.model, sources.bases
            return
    texts = sources.corpus.read()
    check_not_input(output, (("-f", path) for path in sources.corpus.files))
    check_writable(output)
    if sources.model.is_dir():
        _check_folder(sources, output, copy)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", suffix=".tmp", dir=output.parent) as work:
        total = 1 + sources.model.is_dir() + (sources.quantize is not None) + (sources.bases is None)
        done = itertools.count(1)

        def say(what: str) -> None:
            click.echo(f"step {next(done)} of {total}: {what}", err=True)

        model = _gguf(sources, Path(work), say) if sources.model.is_dir() else sources.model
        bases = sources.bases
        if bases is None:
            say(f"calibrate on {', '.join(text.source.name for text in texts)}")
            calibration, notes = calibrate_file(model, sources.corpus, texts, sources.n_sink)
            for note in notes:
                click.echo(note, err=True)
            bases = Path(work) / "calib.safetensors"
            write_calibration(bases, calibration)
        say("bases and layout")
        yield model, bases


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
    hf.to_quantized(made, sources.quantize, sources.corpus.n_threads, quantized)
    made.unlink()
    return quantized
