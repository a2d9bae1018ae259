"""Measures the effect of cache errors on a model's next-token distributions, and adds it to a calibration.

    python -m converter.sensitivity -m M.gguf --bases calib.safetensors -f TEXT -o calib.safetensors

sensitivity_trials.py describes the method. With sensitivities, `convert` chooses bases and bits by their effect on the
output (kld-aware) and predicts a layout's KLD. research/fisher.py measures the same by backpropagation.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from converter.corpus import INTERRUPTED, PATH, Corpus, Text, bases_option, corpus_options, cut, model_option
from subkv.base.command import command, show
from subkv.base.errors import SubkvError
from subkv.base.files import check_writable
from subkv.format.window import MAX_RECENT, N_RECENT

if TYPE_CHECKING:
    from subkv.format.calibration import Calibration

CHUNKS = 3
HELD_BACK = 2  # additional chunks, on which predictions are corrected


output_option = click.option(
    "-o", "--output", required=True, type=PATH, metavar="FILE", help="calibration to write; may be that of --bases"
)
n_recent_option = click.option(
    "--n-recent",
    default=N_RECENT,
    type=click.IntRange(0, MAX_RECENT),
    help="exact window of the later conversion, or a smaller one",
)


@command("sensitivity", interrupted=INTERRUPTED)
@model_option()
@bases_option("calibration of the model to add to")
@corpus_options("UTF-8 text; may be repeated", f"maximum chunks [default: {CHUNKS}]")
@output_option
@click.option("--minutes", type=click.FloatRange(0.0, min_open=True), help="time limit [default: none]")
@n_recent_option
def main(model: Path, bases: Path, corpus: Corpus, output: Path, minutes: float | None, n_recent: int) -> None:
    """Add measured sensitivities to a calibration."""
    calibration, texts = read_inputs(bases, corpus, output, n_recent)
    if model.is_dir():
        reason = "expected a GGUF, found a folder; `python -m research.fisher`, in a checkout, takes folders"
        raise SubkvError("model", reason)

    # numpy and the native libraries, not for a --help
    from converter.sensitivity_stage import measure_sensitivities
    from converter.session import Session
    from converter.source import Source
    from subkv.plan.pipeline import check_model

    with Source(model) as source:
        check_model(source.gguf, calibration)
        if source.n_ctx_train and corpus.n_ctx > source.n_ctx_train:
            raise SubkvError("n_ctx", f"expected at most the trained {source.n_ctx_train} tokens, found {corpus.n_ctx}")
        chunks = corpus.chunks or CHUNKS
        chunks += min(chunks, HELD_BACK)
        with Session(source, corpus.n_ctx, corpus.n_threads, calibration.n_skip) as session:
            pieces = cut(session, texts, corpus.n_ctx, chunks)
            check_number(pieces, corpus, 1)
            n_threads, folder = corpus.n_threads, output.parent
            result = measure_sensitivities(session, calibration, pieces, n_recent, n_threads, minutes, folder=folder)
    write_result(output, result)


def read_inputs(bases: Path, corpus: Corpus, output: Path, n_recent: int) -> tuple[Calibration, list[Text]]:
    """The calibration and the texts. Raises SubkvError about them, about `output`, and if chunks fit in the window."""
    from subkv.format.calibration import read_calibration  # numpy is not needed for a --help

    calibration, texts = read_calibration(bases), corpus.read()
    check_writable(output)
    if corpus.n_ctx <= n_recent + calibration.n_skip:
        raise SubkvError("n_ctx", f"expected more than the exact window of {n_recent} tokens, found {corpus.n_ctx}")
    return calibration, texts


def check_number(pieces: Sequence[Any], corpus: Corpus, too_few: int) -> None:
    """Raises SubkvError about `files` unless there are more than `too_few` chunks."""
    if len(pieces) <= too_few:
        raise SubkvError("files", f"expected more than {too_few} chunks of {corpus.n_ctx} tokens, found {len(pieces)}")


def write_result(output: Path, result: Calibration) -> None:
    """Write a calibration with sensitivities, and print its size. Raises SubkvError."""
    from subkv.format.calibration import write_calibration  # numpy is not needed for a --help

    write_calibration(output, result)
    assert result.sensitivity is not None
    show(f"wrote {output}: sensitivities of {len(result.layers)} layers from {result.sensitivity.tokens} tokens")


if __name__ == "__main__":
    main()
