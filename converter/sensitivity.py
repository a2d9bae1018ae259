"""Measure the effect of errors in the cache on a model's next-token distributions, and add it to a calibration.

    python -m converter.sensitivity -m M.gguf --bases calib.safetensors -f TEXT -o calib.safetensors

Methods and units: sensitivity_trials.py (in the engine, the default), fisher.py (by backpropagation, to check the
former; extra `torch`, memory for the model in float32). With the result, `convert` chooses bases and bits by their
effect on the output (kld-aware) and predicts the KLD of a layout.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from converter.corpus import INTERRUPTED, PATH, Corpus, Text, bases_option, corpus_options, cut, model_option
from subkv.base.command import command
from subkv.base.errors import SubkvError
from subkv.base.files import check_writable
from subkv.format.window import MAX_RECENT, N_RECENT

if TYPE_CHECKING:
    from subkv.format.calibration import Calibration

ENGINE, FISHER = "engine", "fisher"
CHUNKS = {ENGINE: 3, FISHER: 16}
HELD_BACK = {ENGINE: 2, FISHER: 2}  # further chunks, on which predictions are corrected
TOO_FEW = {ENGINE: 1, FISHER: 2}  # chunks in all


@command("sensitivity", interrupted=INTERRUPTED)
@model_option("GGUF model; a Hugging Face folder with method fisher.")
@bases_option("Calibration of the model to add to.")
@corpus_options("UTF-8 text.", f"Maximum chunks. [default: {CHUNKS[ENGINE]}; fisher: {CHUNKS[FISHER]}]")
@click.option("-o", "--output", required=True, type=PATH, help="May be the same as --bases.")
@click.option("--method", type=click.Choice([ENGINE, FISHER]), default=ENGINE, help="fisher needs the extra torch.")
@click.option("--minutes", type=click.FloatRange(0.0, min_open=True), help="Time for method engine. [default: all]")
@click.option(
    "--n-recent",
    default=N_RECENT,
    type=click.IntRange(0, MAX_RECENT),
    help="Exact window of the later conversion, or a smaller one.",
)
def main(
    model: Path, bases: Path, corpus: Corpus, output: Path, method: str, minutes: float | None, n_recent: int
) -> None:
    """Add measured sensitivities to a calibration."""
    # numpy and the native libraries, not for a --help
    from subkv.format.calibration import read_calibration, write_calibration

    calibration, texts = read_calibration(bases), corpus.read()
    check_writable(output)
    if corpus.n_ctx <= n_recent + calibration.n_skip:
        raise SubkvError("n_ctx", f"expected more than the exact window of {n_recent} tokens, found {corpus.n_ctx}")
    if method == ENGINE:
        result = _engine(model, calibration, corpus, texts, n_recent, minutes)
    elif minutes is None:
        result = _fisher(model, calibration, corpus, texts, n_recent)
    else:
        raise click.UsageError("--minutes: expected no time limit with --method fisher, found one")
    write_calibration(output, result)
    assert result.sensitivity is not None
    click.echo(f"wrote {output}: sensitivities of {len(result.layers)} layers from {result.sensitivity.tokens} tokens")


def _pieces(corpus: Corpus, pieces: list[tuple[int, ...]], method: str) -> list[tuple[int, ...]]:
    if len(pieces) <= TOO_FEW[method]:
        raise SubkvError(
            "files",
            f"expected more than {TOO_FEW[method]} chunks of {corpus.n_ctx} tokens, found {len(pieces)}",
        )
    return pieces


def _engine(
    model: Path, calibration: Calibration, corpus: Corpus, texts: list[Text], n_recent: int, minutes: float | None
) -> Calibration:
    """In the engine."""
    from converter.sensitivity_stage import measure_sensitivities
    from converter.session import Session
    from converter.source import Source
    from subkv.plan.pipeline import check_model

    if model.is_dir():
        raise SubkvError("model", f"expected a GGUF for method {ENGINE}, found a folder: --method {FISHER} takes it")
    with Source(model) as source:
        check_model(source.gguf, calibration)
        if source.n_ctx_train and corpus.n_ctx > source.n_ctx_train:
            raise SubkvError("n_ctx", f"expected at most the trained {source.n_ctx_train} tokens, found {corpus.n_ctx}")
        chunks = corpus.chunks or CHUNKS[ENGINE]
        chunks += min(chunks, HELD_BACK[ENGINE])
        with Session(source, corpus.n_ctx, corpus.n_threads, calibration.n_skip) as session:
            pieces = _pieces(corpus, cut(session, texts, corpus.n_ctx, chunks), ENGINE)
            return measure_sensitivities(
                session, calibration, pieces, n_recent, corpus.n_threads, minutes, progress=True
            )


def _fisher(model: Path, calibration: Calibration, corpus: Corpus, texts: list[Text], n_recent: int) -> Calibration:
    """By backpropagation in float32."""
    from converter import fisher
    from converter.reference import Reference, check_length, check_shapes
    from subkv.native.gguf import Gguf

    with contextlib.ExitStack() as opened:
        base = None if model.is_dir() else opened.enter_context(Gguf(model))
        if base is not None:  # before minutes are spent on a calibration that cannot be used
            fisher.probe(base, calibration, n_recent)
        reference = Reference(model, corpus.n_threads)
        check_length(reference, corpus.n_ctx)
        check_shapes(reference, calibration)
        chunks = (corpus.chunks or CHUNKS[FISHER]) + HELD_BACK[FISHER]
        pieces = _pieces(corpus, cut(reference, texts, corpus.n_ctx, chunks), FISHER)
        reference.match(calibration, pieces[0])
        pieces, held_back = pieces[: -HELD_BACK[FISHER]], pieces[-HELD_BACK[FISHER] :]
        result = fisher.measure(reference, calibration, pieces, n_recent, progress=True)
        if base is None:
            click.echo("note: predictions are not corrected: that needs the model as a GGUF", err=True)
            return result
        return fisher.with_corrections(reference, base, result, held_back, corpus.n_threads)


if __name__ == "__main__":
    main()
