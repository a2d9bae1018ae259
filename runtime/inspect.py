"""`subkv inspect M.gguf`: the bases and the layout of a file as a table, JSON or plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from converter.tables import Cost, budgets, elements, mean_bits, sentences, shortened, span
from runtime import options
from subkv.base.command import command, show
from subkv.base.errors import concerning


def layer_table(layout: dict[str, Any]) -> list[str]:
    """One line per layer: heads, ranks, bits per element, bytes per token."""
    lines = [
        f"{'layer':>5} {'heads':>5} {'d K/V':>9} {'rank K':>7} {'bits K':>6} "
        f"{'rank V':>7} {'bits V':>6} {'bytes/token':>11}"
    ]
    for layer in layout["layers"]:
        k, v = layer["k"], layer["v"]
        size = f"{layer['d_k']}/{layer['d_v']}"
        ranks, bits = [span([head["rank"] for head in side]) if side else "-" for side in (k, v)], ["-", "-"]
        for i, (side, d) in enumerate(((k, "d_k"), (v, "d_v"))):
            if side:  # a latent layer has no V, because its values are a part of its keys
                bits[i] = f"{mean_bits([head['row_bytes'] for head in side], layer[d]):.2f}"
        lines.append(
            f"{layer['il']:>5} {layer['n_head_kv']:>5} {size:>9} {ranks[0]:>7} {bits[0]:>6} "
            f"{ranks[1]:>7} {bits[1]:>6} {layer['k_row_bytes'] + layer['v_row_bytes']:>11}"
        )
    return lines


def band_table(layout: dict[str, Any]) -> list[str]:
    """One line per head: bands as coefficients x bits, in order: 8x6 24x3 8x2."""
    lines = [f"{'layer':>5} {'head':>4} {'gamma':>6}  {'bands K':<36} bands V"]
    for layer in layout["layers"]:
        for i, k in enumerate(layer["k"]):
            heads = [k, *layer["v"][i : i + 1]]
            bands = [" ".join(f"{band['n']}x{band['bits']}" for band in head["bands"]) for head in heads]
            lines.append(f"{layer['il']:>5} {i:>4} {k['gamma']:>6.3f}  {bands[0]:<36} {' '.join(bands[1:]) or '-'}")
    return lines


def _provenance(calibration: dict[str, Any]) -> str:
    """The source of the bases."""
    if not calibration["tokens"]:
        return "bases derived from the weights, without a calibration"
    names = calibration["text"].split(",")
    built_in = all(name.startswith("built-in ") for name in names)
    return (
        f"calibrated on {calibration['tokens']} tokens of {'the built-in texts' if built_in else calibration['text']}"
    )


def summary(layout: dict[str, Any]) -> list[str]:
    return [
        f"codec {layout['codec']}, basis K {layout['basis_k']}, basis V {layout['basis_v']}, gamma {layout['gamma']}",
        f"coded layers: {len(layout['layers'])} of {layout['block_count']} ({layout['arch']})",
        f"exact window: {layout['n_sink']} first and {layout['n_recent']} last tokens",
        f"bytes per token: {layout['bytes_per_token']} (f16: {2 * elements(layout)}); "
        f"bases: {layout['bytes_bases'] / 2**20:.2f} MiB",
        f"bits per element at {layout['bpe_context']} tokens: {layout['bits_per_element']:.3f} everything counted, "
        f"{layout['bits_per_element_rows']:.3f} rows alone",
        _provenance(layout["calibration"]),
        f"fingerprint {layout['fingerprint']}",
    ]


@command()
@click.argument("model", metavar="M.gguf")
@click.option(
    "--bases",
    type=options.PATH,
    metavar="FILE",
    help="calibration (calib.safetensors); --plot also shows its spectra and sensitivities",
)
@options.bits_option
@options.context_option(None, "context in tokens for the cost [default: the context that the file was planned for]")
@click.option("--bands", is_flag=True, help="one line per head with its bands")
@click.option("-v", "--verbose", is_flag=True, help="all layers")
@click.option("--plot", type=options.PATH, metavar="FILE.png", help="plot the bits per coefficient")
@options.form_option("text", "json")
def main(
    model: str,
    bases: Path | None,
    kv_bits: float | None,
    n_ctx: int | None,
    bands: bool,
    verbose: bool,
    plot: Path | None,
    form: str,
) -> None:
    """Show bases, layout and memory of a converted model or a sidecar.

    For any other model: those of the bases that -ctk subkv would use, and their source.
    """
    # numpy and the native libraries: not for a --help
    from subkv.engine.cache import CODED, choose_cache
    from subkv.engine.memory import available_memory, simulated_cache, trained_context
    from subkv.engine.request import CacheRequest
    from subkv.format import metadata
    from subkv.native.gguf import Gguf, check_model_file

    path = check_model_file(model, weights=False)
    with concerning(path="model", bases="model", kv_cache="model"):
        choice = choose_cache(path, CacheRequest(CODED, kv_bits=kv_bits))
        if choice.derived or choice.layout != path:
            options.note(f"{choice.note}; {choice.gain}" if choice.gain else choice.note)
        layout = choice.description
        assert choice.layout is not None
        path = choice.layout
    if bases is not None and plot is None:
        raise click.UsageError("--bases: expected --plot FILE.png with it, found none")
    if plot is not None:
        from converter.plots import figure, layers
        from subkv.format.calibration import read_calibration

        calibration = read_calibration(bases) if bases else None
        context = n_ctx or layout["bpe_context"]
        n_bytes = Cost.of_layout(layout).bytes(context)
        bits = 8 * n_bytes / (elements(layout) * context)
        title = f"{Path(model).name}: {bits:.2f} bits per element, {n_bytes / 2**20:.1f} MiB with {context} tokens"
        figure.write_figure(layers.layout_figure(layout, calibration, title), plot)
        options.note(f"wrote {plot}")
    if form == "json":
        click.echo(json.dumps({"path": None if choice.derived else str(path), **layout}, indent=2))
        return
    head, *rows = (band_table if bands else layer_table)(layout)
    show(head)
    for line in (*shortened(rows, verbose or bands), *summary(layout)):
        show(line)
    with Gguf(model) as gguf:
        weights = gguf.n_bytes if gguf.n_tensors else 0
    klds, plans = metadata.read_predicted(path), {plan["budget"]: plan for plan in layout["plans"]}
    predicted = metadata.predicted_of(layout, klds)
    n_tokens = n_ctx or layout["bpe_context"]
    cost, trained = Cost.of_layout(layout), 0
    if weights:
        stats = simulated_cache(Path(model), choice, n_tokens)
        cost, trained = cost.beside(stats), trained_context(Path(model))
    for line in sentences(cost, n_tokens, predicted, weights, available_memory(), trained):
        show(line)
    by_budget = {budget: plan["predicted"] or None for budget, plan in plans.items()}
    for line in budgets(choice.budget_default, by_budget, klds["subkv"] if klds else None):
        show(line)


if __name__ == "__main__":
    main()
