"""Measure what errors in the cache do to a model's next-token distributions and add it to a calibration.

    python -m converter.sensitivity -m M.gguf --bases calib.safetensors -f TEXT -o calib.safetensors

Method and units: fisher.py. The result lets `convert` choose bases and bits by their effect on the output (kld-aware)
and predict the KLD of a layout. Needs the extra `torch` and memory for the model in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from converter.calibrate import MIN_TOKENS, read_text
from converter.evaluate import Cache, coded_cache, run, stock_coder
from converter.reference import Reference, check_length, check_shapes, cut
from subkv.base.command import command as command_of
from subkv.base.errors import SubkvError, exit_on_error
from subkv.base.files import check_writable
from subkv.base.threads import default_threads
from subkv.format.calibration import Calibration, read_calibration, write_calibration
from subkv.format.window import MAX_RECENT, N_RECENT, Window
from subkv.native.gguf import Gguf
from subkv.plan.pipeline import TARGET, Fit, Options

DEFAULT_CHUNKS = 16
HELD_OUT = 2  # further chunks, on which predictions are corrected
PROBE_BITS = 4.5  # bits per element of the layout that is run for it
ROWS_ONLY = 1 << 40  # a context in which window and bases count nothing


def probe(base: Gguf, calibration: Calibration, n_recent: int) -> Fit:
    """The calibration's bases as `convert` would fit them. Raises SubkvError for what convert would refuse."""
    options = Options(window=Window(calibration.n_skip, n_recent), bpe_context=ROWS_ONLY)
    return Fit(base, calibration, options, progress=True)


def with_corrections(
    reference: Reference, base: Gguf, calibration: Calibration, chunks: Sequence[Sequence[int]], n_threads: int
) -> Calibration:
    """The calibration with its predictions corrected by what is measured on `chunks`, text that did not enter it.

    Second order, with errors taken as independent of how much a cell is attended, predicts too little where attention
    is rare and decisive (SmolLM2: 2.0 times beyond a window of 128 tokens, right without a window). One layout and q8_0
    are therefore run for real. A factor that cannot be measured (a KLD of zero, a head size that q8_0 refuses) stays 1.
    """
    assert calibration.sensitivity is not None
    fit = probe(base, calibration, calibration.sensitivity.n_recent)
    caches = [coded_cache(fit, PROBE_BITS, "kv")]
    predicted = fit.stock_error(TARGET)
    if predicted is not None:
        caches.append(Cache(TARGET, stock_coder(TARGET), 0.0, 0.0, predicted=predicted))
    run(reference, caches, chunks, n_threads, progress=True)
    found = [1.0, 1.0]
    for i, cache in enumerate(caches):
        kld = cache.scores.summary()["mean_kld"]
        if kld > 0.0 and cache.predicted:
            found[i] = kld / cache.predicted
    return replace(
        calibration, sensitivity=replace(calibration.sensitivity, correction=found[0], correction0=found[1]), sha256=""
    )


@command_of("sensitivity")
@click.option(
    "-m", "--model", required=True, type=click.Path(path_type=Path), help="GGUF model or Hugging Face folder."
)
@click.option("--bases", required=True, type=click.Path(path_type=Path), help="Calibration of the model to add to.")
@click.option(
    "-f", "--file", "files", required=True, multiple=True, type=click.Path(path_type=Path), help="UTF-8 text."
)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="May be the same as --bases.")
@click.option(
    "-c", "--ctx-size", default=2048, show_default=True, type=click.IntRange(MIN_TOKENS), help="Tokens per chunk."
)
@click.option("--chunks", default=DEFAULT_CHUNKS, show_default=True, type=click.IntRange(1), help="Most chunks.")
@click.option(
    "--n-recent",
    default=N_RECENT,
    show_default=True,
    type=click.IntRange(0, MAX_RECENT),
    help="Exact window that convert will be given, or a smaller one.",
)
@click.option("-t", "--threads", type=click.IntRange(1), help="[default: all processors]")
def command(
    model: Path,
    bases: Path,
    files: tuple[Path, ...],
    output: Path,
    ctx_size: int,
    chunks: int,
    n_recent: int,
    threads: int | None,
) -> None:
    """Add measured sensitivities to a calibration."""
    from converter import fisher

    with exit_on_error():
        calibration = read_calibration(bases)
        for path in files:
            read_text(path)
        check_writable(output)
        if ctx_size <= n_recent + calibration.n_skip:
            raise SubkvError("n_ctx", f"expected more than the exact window of {n_recent} tokens, found {ctx_size}")
        n_threads = threads or default_threads()
        if not model.is_dir():  # before minutes are spent on what could not be used
            with Gguf(model) as base:
                probe(base, calibration, n_recent)
        reference = Reference(model, n_threads)
        check_length(reference, ctx_size)
        check_shapes(reference, calibration)
        pieces = cut(reference, files, ctx_size, chunks + HELD_OUT)
        if len(pieces) <= HELD_OUT:
            raise SubkvError("files", f"expected more than {HELD_OUT} chunks of {ctx_size} tokens, found {len(pieces)}")
        reference.match([layer.k2 for layer in calibration.layers], pieces[0], calibration.n_skip)
        result = fisher.measure(reference, calibration, pieces[:-HELD_OUT], n_recent, progress=True)
        if model.is_dir():
            click.echo("note: predictions stay uncorrected: that needs the model as a GGUF", err=True)
        else:
            with Gguf(model) as base:
                result = with_corrections(reference, base, result, pieces[-HELD_OUT:], n_threads)
        write_calibration(output, result)
        assert result.sensitivity is not None
        click.echo(
            f"wrote {output}: sensitivities of {len(result.layers)} layers from {result.sensitivity.tokens} tokens"
        )


def main() -> None:
    """Entry point of `python -m converter.sensitivity`."""
    command()


if __name__ == "__main__":
    main()
