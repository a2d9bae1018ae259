"""`convert`: bases and layout into a copy of a GGUF. Also `python -m converter.cli` and `python -m converter`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from converter import hf
from converter.calibrate import text_options
from converter.quantize import TYPES
from converter.sources import Sources, prepared
from subkv.base.command import command as command_of
from subkv.base.command import sentence
from subkv.base.errors import SubkvError, exit_on_error
from subkv.base.files import check_not_input, check_writable
from subkv.format import metadata
from subkv.format.adapt import parse as parse_adapt
from subkv.format.bases import CodedLayer, StoredBasis
from subkv.format.calibration import read_calibration
from subkv.format.window import N_RECENT, N_SINK, Window
from subkv.native.gguf import Gguf, write_copy, write_sidecar
from subkv.plan.costs import BASES_K, BASES_V
from subkv.plan.gamma import METHODS
from subkv.plan.pipeline import Options, Result
from subkv.plan.pipeline import convert as run_pipeline


@command_of("convert")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--bases", type=click.Path(path_type=Path), help="Calibration file (calib.safetensors); or give -f.")
@text_options(required=False)
@click.option(
    "--outtype", type=click.Choice(list(hf.OUTTYPES)), help="Weights made of a folder. [default: auto, 16 bits]"
)
@click.option(
    "--quantize",
    type=click.Choice(TYPES, case_sensitive=False),
    metavar="TYPE",
    help=f"Weights of a folder quantized by llama.cpp: {', '.join(TYPES)}.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Default: MODEL.subkv.gguf beside the model.")
@click.option(
    "--kv-bits", type=float, help="Bits per K/V element, everything counted. [default: what equals q8_0's quality]"
)
@click.option("--codec", type=click.Choice(["banded", "int8"]), default="banded", show_default=True)
@click.option("--rank-k", type=int, help="Most K coefficients per head. [default: the head size]")
@click.option("--rank-v", type=int, help="Most V coefficients per head. [default: the head size]")
@click.option(
    "--basis-k", type=click.Choice(BASES_K), help=f"[default: {BASES_K[2]} with sensitivities, else {BASES_K[1]}]"
)
@click.option(
    "--basis-v", type=click.Choice(BASES_V), help=f"[default: {BASES_V[2]} with sensitivities, else {BASES_V[1]}]"
)
@click.option("--gamma", type=click.Choice(METHODS), default="calibrated", show_default=True)
@click.option(
    "--center-k/--no-center-k", default=True, show_default=True, help="Code keys less their mean; needs sinks."
)
@click.option("--n-sink", type=int, default=N_SINK, show_default=True, help="First positions kept exact.")
@click.option("--n-recent", type=int, default=N_RECENT, show_default=True, help="Last positions kept exact.")
@click.option("--bpe-context", type=int, help="Context of the bit count. [default: trained context, at most 8192]")
@click.option("--adapt", help="How bases follow the text by default, of k, v or kv: v,length=512. [default: not]")
@click.option("--sidecar", is_flag=True, help="Write the keys to a GGUF without weights.")
@click.option("--dry-run", is_flag=True, help="Print the table, write nothing.")
def convert(
    model: Path,
    bases: Path | None,
    files: tuple[Path, ...],
    ctx_size: int,
    chunks: int | None,
    threads: int | None,
    outtype: str | None,
    quantize: str | None,
    output: Path | None,
    kv_bits: float | None,
    codec: str,
    rank_k: int | None,
    rank_v: int | None,
    basis_k: str | None,
    basis_v: str | None,
    gamma: str,
    center_k: bool,
    n_sink: int,
    n_recent: int,
    bpe_context: int | None,
    adapt: str | None,
    sidecar: bool,
    dry_run: bool,
) -> None:
    """Write MODEL with bases and a coefficient layout in its metadata; the weights stay byte-identical.

    MODEL is a GGUF or, with the extra torch, a Hugging Face folder, which becomes one first.
    """
    if (bases is None) == (not files):
        raise click.UsageError(
            "expected --bases with a calibration or -f with text to calibrate on, found "
            + ("neither" if bases is None else "both")
        )
    if codec == "int8" and kv_bits is not None:
        raise click.UsageError("--kv-bits: codec int8 has 8 bits per coefficient; choose --rank-k and --rank-v instead")
    if bpe_context is not None and bpe_context < 1:
        raise click.UsageError(f"--bpe-context: expected at least 1, found {bpe_context}")
    options = Options(
        codec=codec,
        basis_k=basis_k,
        basis_v=basis_v,
        gamma=gamma,
        window=Window(n_sink, n_recent),
        kv_bits=kv_bits,
        rank_k=rank_k,
        rank_v=rank_v,
        bpe_context=bpe_context,
        center_k=center_k,
        adapt=adapt,
    )
    with exit_on_error():
        if adapt is not None:
            parse_adapt(adapt)
        if sidecar and model.is_dir():
            raise SubkvError("sidecar", f"expected a GGUF as MODEL, which the sidecar goes with, found {model}")
        target = output or default_output(model, sidecar, quantize)
        sources = Sources(model, bases, files, ctx_size, chunks, threads, n_sink, outtype, quantize)
        with prepared(sources, target, copy=not sidecar and not dry_run) as (base, calibration):
            result = convert_file(base, calibration, None if dry_run else target, options, sidecar, progress=True)
        for line in table(result):
            click.echo(line)
        for note in result.notes:
            click.echo(sentence(note), err=True)
        click.echo("dry run: nothing was written" if dry_run else f"wrote {target}")


def default_output(model: Path, sidecar: bool = False, quantize: str | None = None) -> Path:
    """M.gguf -> M.subkv.gguf, or M.subkv-sidecar.gguf; M-00001-of-00002.gguf as M.gguf; folder M -> M.subkv.gguf."""
    if model.is_dir():
        folder = model.resolve()
        return folder.with_name(f"{folder.name}{f'-{quantize}' if quantize else ''}.subkv.gguf")
    stem = re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", model.name)
    return model.with_name(f"{stem}.subkv{'-sidecar' if sidecar else ''}.gguf")


def convert_file(
    model: Path, bases: Path, output: Path | None, options: Options, sidecar: bool = False, progress: bool = False
) -> Result:
    """Convert `model` with the calibration `bases`; output None: only plan. progress: bars.

    Raises SubkvError; then no file was written.
    """
    calibration = read_calibration(bases)
    with Gguf(model) as base:
        if output is not None:
            check_not_input(output, [*(("the model", file) for file in base.files), ("--bases", bases)])
            check_writable(output)
            if len(base.files) > 1 and not sidecar:
                raise SubkvError(
                    "model",
                    f"expected one file to copy, found a model split into {len(base.files)}; "
                    "--sidecar writes the bases to a file of their own",
                )
        result = run_pipeline(base, calibration, options, progress)
        if output is not None:
            values = metadata.keys(result.layers, calibration, result.settings, result.counted)
            (write_sidecar if sidecar else write_copy)(base, output, values, progress)
    return result


#
# the table
#


def _mean_bits(stored: list[StoredBasis], d: int) -> float:
    """Code bits per element of the full head, scale byte included."""
    return sum(8 + sum(n * bits for n, bits in s.bands) for s in stored) / (len(stored) * d)


def _span(values: list[int]) -> str:
    return str(values[0]) if min(values) == max(values) else f"{min(values)}-{max(values)}"


def _bytes(layer: CodedLayer) -> int:
    return sum(1 + sum(n * bits // 8 for n, bits in s.bands) for head in layer.heads for s in (head.k, head.v))


def table(result: Result) -> Iterator[str]:
    """Lines of the summary: ranks, bits and bytes per token of every layer, then the bits per element."""
    yield f"{'layer':>5} {'rank K':>8} {'bits K':>7} {'rank V':>8} {'bits V':>7} {'bytes/token':>12} {'gamma':>13}"
    for layer in result.layers:
        k, v = [head.k for head in layer.heads], [head.v for head in layer.heads]
        gammas = [head.gamma for head in layer.heads]
        yield (
            f"{layer.shape.il:>5} {_span([len(s.encode) for s in k]):>8} {_mean_bits(k, layer.shape.d_k):>7.2f} "
            f"{_span([len(s.encode) for s in v]):>8} {_mean_bits(v, layer.shape.d_v):>7.2f} {_bytes(layer):>12} "
            f"{min(gammas):>6.3f}-{max(gammas):.3f}"
        )
    counted = result.counted
    yield f"gamma from {', '.join(f'{source} ({n} heads)' for source, n in sorted(result.gamma_sources.items()))}"
    yield f"bytes per token: {counted.bytes_per_token} (f16: {_f16_bytes(result)})"
    yield (
        f"bits per element at {counted.context} tokens: rows {counted.rows:.3f} + exact window {counted.window:.3f} "
        f"+ bases {counted.bases:.3f} = {counted.total:.3f}"
    )
    if result.predicted is not None:
        stock = ", ".join(f"{kind} {error:.2g}" for kind, error in (result.stock or {}).items())
        yield f"predicted KLD: {result.predicted:.2g} nats per token" + (f" ({stock})" if stock else "")


def _f16_bytes(result: Result) -> int:
    return sum(2 * layer.shape.elements for layer in result.layers)


def main() -> None:
    """Entry point of the `convert` script."""
    convert()


if __name__ == "__main__":
    main()
