"""Measure what errors in the cache do to a model's next-token distributions and add it to a calibration.

    python -m converter.sensitivity -m M.gguf --bases calib.safetensors -f TEXT -o calib.safetensors

Method and units: fisher.py. The result lets `convert` choose bases and bits by their effect on the output (kld-aware)
and predict the KLD of a layout. Needs the extra `torch` and memory for the model in float32.
"""

from __future__ import annotations

from pathlib import Path

import click

from converter.atomic import check_writable
from converter.calib_io import Calibration, read_calibration, write_calibration
from converter.calibrate import MIN_TOKENS, default_threads, read_text
from converter.errors import ConverterError, exit_on_error
from converter.layout import DEFAULT_N_RECENT
from converter.reference import Reference

DEFAULT_CHUNKS = 16


def check_shapes(flag: str, reference: Reference, calibration: Calibration) -> None:
    """Refuse a calibration of other attention shapes than the model's. Raises ConverterError."""
    expected = (reference.n_layer, reference.n_head, reference.n_head_kv, reference.d)
    shapes = {
        (len(calibration.layers), s.n_head, s.n_head_kv, s.d_k)
        for s in (layer.shape for layer in calibration.layers)
        if s.d_k == s.d_v
    }
    if shapes != {expected}:
        raise ConverterError(
            f"{flag}: expected {expected[0]} layers, {expected[1]} heads, {expected[2]} KV heads of size {expected[3]} "
            f"as in the model, found another calibration"
        )


def cut(reference: Reference, files: tuple[Path, ...], n_ctx: int, chunks: int, flag: str = "-f") -> list[list[int]]:
    """The first `chunks` chunks of n_ctx tokens, an equal share from every text; BOS first where the model wants one.

    Raises ConverterError for a text without a whole chunk.
    """
    start = [] if reference.bos is None else [reference.bos]
    step = n_ctx - len(start)
    out: list[list[int]] = []
    for i, path in enumerate(files):
        quota = -(-(chunks - len(out)) // (len(files) - i))
        # a token is rarely longer than 16 bytes; a short prefix spares tokenizing megabytes
        text = read_text(path).data[: 16 * quota * step].decode("utf-8", "ignore")
        tokens = reference.tokenize(text)
        if len(tokens) < step:
            raise ConverterError(
                f"{flag}: {path.name}: expected at least {step} tokens for a chunk, found {len(tokens)}"
            )
        out += [start + tokens[j : j + step] for j in range(0, len(tokens) - step + 1, step)][:quota]
    return out


@click.command(name="sensitivity", context_settings={"help_option_names": ["-h", "--help"]})
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
    default=DEFAULT_N_RECENT,
    show_default=True,
    type=click.IntRange(0),
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
        calibration = read_calibration("--bases", bases)
        for path in files:
            read_text(path)
        check_writable("-o", output)
        if ctx_size <= n_recent + calibration.n_skip:
            raise ConverterError(f"-c: expected more than the exact window of {n_recent} tokens, found {ctx_size}")
        reference = Reference("-m", model, threads or default_threads())
        check_shapes("--bases", reference, calibration)
        pieces = cut(reference, files, ctx_size, chunks)
        reference.match("--bases", [layer.k2 for layer in calibration.layers], pieces[0], calibration.n_skip)
        result = fisher.measure(reference, calibration, pieces, n_recent, progress=True)
        write_calibration("-o", output, result)
        assert result.sensitivity is not None
        click.echo(
            f"wrote {output}: sensitivities of {len(result.layers)} layers from {result.sensitivity.tokens} tokens"
        )


def main() -> None:
    """Entry point of `python -m converter.sensitivity`."""
    command()


if __name__ == "__main__":
    main()
