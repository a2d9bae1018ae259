"""Sensitivities by backpropagation, added to a calibration: a check of `subkv lab sensitivity`, which needs no PyTorch.

    python -m research.fisher -m M.gguf --bases calib.safetensors -f TEXT -o calib.safetensors

Method: float32/fisher.py. Extra `torch`; memory for the model in float32. `convert` reads the result as the engine's.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from converter.corpus import INTERRUPTED, Corpus, bases_option, corpus_options, cut, model_option
from converter.sensitivity import check_number, n_recent_option, output_option, read_inputs, write_result
from subkv.base.command import command

CHUNKS = 16
HELD_BACK = 2  # further chunks, on which predictions are corrected


@command("fisher", interrupted=INTERRUPTED)
@model_option("model file (GGUF) or Hugging Face folder")
@bases_option("calibration of the model to add to")
@corpus_options("UTF-8 text; may be repeated", f"maximum chunks [default: {CHUNKS}]")
@output_option
@n_recent_option
def main(model: Path, bases: Path, corpus: Corpus, output: Path, n_recent: int) -> None:
    """Add sensitivities that backpropagation in float32 measures to a calibration."""
    calibration, texts = read_inputs(bases, corpus, output, n_recent)

    from research.float32 import fisher  # numpy and torch: not for a --help
    from research.float32.reference import Reference, check_length, check_shapes
    from subkv.native.gguf import Gguf

    with contextlib.ExitStack() as opened:
        base = None if model.is_dir() else opened.enter_context(Gguf(model))
        if base is not None:  # before minutes are spent on a calibration that cannot be used
            fisher.probe(base, calibration, n_recent)
        reference = Reference(model, corpus.n_threads)
        check_length(reference, corpus.n_ctx)
        check_shapes(reference, calibration)
        pieces = cut(reference, texts, corpus.n_ctx, (corpus.chunks or CHUNKS) + HELD_BACK)
        check_number(pieces, corpus, HELD_BACK)
        reference.match(calibration, pieces[0])
        pieces, held_back = pieces[:-HELD_BACK], pieces[-HELD_BACK:]
        result = fisher.measure(reference, calibration, pieces, n_recent, progress=True)
        if base is None:
            click.echo("note: predictions are not corrected: that needs the model as a GGUF", err=True)
        else:
            result = fisher.with_corrections(reference, base, result, held_back, corpus.n_threads)
    write_result(output, result)


if __name__ == "__main__":
    main()
