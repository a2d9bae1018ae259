"""Measure what errors in the cache do to a model's next-token distributions and add it to a calibration.

    python -m converter.sensitivity -m M.gguf --bases calib.safetensors -f TEXT -o calib.safetensors

Method and units: fisher.py. The result lets `convert` choose bases and bits by their effect on the output (kld-aware)
and predict the KLD of a layout. Needs the extra `torch` and memory for the model in float32.
"""

from __future__ import annotations

from pathlib import Path

import click

from converter.corpus import INTERRUPTED, PATH, Corpus, bases_option, corpus_options, cut, model_option
from subkv.base.command import command
from subkv.base.errors import SubkvError
from subkv.base.files import check_writable
from subkv.format.window import MAX_RECENT, N_RECENT

HELD_BACK = 2  # further chunks, on which predictions are corrected


@command("sensitivity", interrupted=INTERRUPTED)
@model_option("GGUF model or Hugging Face folder.")
@bases_option("Calibration of the model to add to.")
@corpus_options("UTF-8 text.", "Most chunks.", 16)
@click.option("-o", "--output", required=True, type=PATH, help="May be the same as --bases.")
@click.option(
    "--n-recent",
    default=N_RECENT,
    type=click.IntRange(0, MAX_RECENT),
    help="Exact window that convert will be given, or a smaller one.",
)
def main(model: Path, bases: Path, corpus: Corpus, output: Path, n_recent: int) -> None:
    """Add measured sensitivities to a calibration."""
    from converter import fisher  # this and the following: numpy and the native libraries, not for a --help
    from converter.reference import Reference, check_length, check_shapes
    from subkv.format.calibration import read_calibration, write_calibration
    from subkv.native.gguf import Gguf

    calibration, texts = read_calibration(bases), corpus.read()
    check_writable(output)
    if corpus.n_ctx <= n_recent + calibration.n_skip:
        raise SubkvError("n_ctx", f"expected more than the exact window of {n_recent} tokens, found {corpus.n_ctx}")
    if not model.is_dir():  # before minutes are spent on what could not be used
        with Gguf(model) as base:
            fisher.probe(base, calibration, n_recent)
    reference = Reference(model, corpus.n_threads)
    check_length(reference, corpus.n_ctx)
    check_shapes(reference, calibration)
    assert corpus.chunks is not None  # it has a default
    pieces = cut(reference, texts, corpus.n_ctx, corpus.chunks + HELD_BACK)
    if len(pieces) <= HELD_BACK:
        raise SubkvError(
            "files", f"expected more than {HELD_BACK} chunks of {corpus.n_ctx} tokens, found {len(pieces)}"
        )
    reference.match(calibration, pieces[0])
    result = fisher.measure(reference, calibration, pieces[:-HELD_BACK], n_recent, progress=True)
    if model.is_dir():
        click.echo("note: predictions stay uncorrected: that needs the model as a GGUF", err=True)
    else:
        with Gguf(model) as base:
            result = fisher.with_corrections(reference, base, result, pieces[-HELD_BACK:], corpus.n_threads)
    write_calibration(output, result)
    assert result.sensitivity is not None
    click.echo(f"wrote {output}: sensitivities of {len(result.layers)} layers from {result.sensitivity.tokens} tokens")


if __name__ == "__main__":
    main()
