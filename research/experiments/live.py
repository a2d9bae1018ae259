"""What attention over a coefficient cache loses while a text is read, measured in the engine (program: tracker.py).

Exact attention and the bounds (bounds.py) are computed in float64.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
from tqdm import tqdm

from converter.plots import figure as plots
from converter.scoring import I32
from research.experiments import bounds
from research.experiments.bounds import F64
from research.experiments.grids import Column, Rows, framed, grid, grouped
from research.float32.adaptive import ResearchLayout
from runtime import options
from subkv.base.errors import CacheError, SubkvError
from subkv.engine.cache import MIB, CacheChoice, also_attach
from subkv.engine.context import Context, ContextOptions
from subkv.engine.model import Model
from subkv.engine.observer import SAMPLE, UBATCH, ObservedLayer, Observer
from subkv.engine.stats import cache_line
from subkv.format import adapt as adaptive
from subkv.format.adapt import Adapt
from subkv.native.library import Signatures, declare, last_error, load

_HEAD = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_bool, ctypes.c_int32]  # of a context and sequence
SIGNATURES: Signatures = {  # of runtime/native/capi/subkv_research.h
    "subkv_read_rows": (ctypes.c_int64, [*_HEAD, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]),
}
SKETCH: Signatures = {  # of runtime/native/include/subkv_adapt.h
    "subkv_get_sketch_rows": (ctypes.c_int64, [*_HEAD, ctypes.c_void_p, ctypes.c_int64]),
}

# error, its bound, what it is called; weights and outputs have another bound, from what was measured a step before
STEPS = {"weight_error": "weight_step", "output_error": "output_step"}
MEASURED = (
    ("logit_error", "logit_bound", "logits, ‖l − l̂‖∞"),
    ("weight_error", "weight_bound", "weights, ‖a − â‖₁"),
    ("output_error", "output_bound", "output, ‖o − ô‖"),
    ("sketch_error_k", "epsilon_k", "sketch of K, ‖AᵀA − SᵀS‖"),
    ("sketch_error_v", "epsilon_v", "sketch of V, ‖AᵀA − SᵀS‖"),
)
# what is to predict an error
PREDICTORS = (
    ("residual_k", "logit_error"),
    ("epsilon_k", "logit_error"),
    ("residual_v", "output_error"),
    ("epsilon_v", "output_error"),
)
SKETCH_ROUNDING = 1e-5  # of ‖A‖²: a sketch is held in single precision


COLUMNS: list[Column] = [
    ("error", "error", ""),
    ("median", "median", ".3g"),
    ("largest", "most", ".3g"),
    ("median bound", "bound", ".3g"),
    ("largest share of its bound", "share", ".2g"),
]


class Tracker:
    """Measures one sequence of a context that an observer in mode SAMPLE watches."""

    def __init__(
        self, context: Context, observer: Observer, layout: ResearchLayout, adapting: tuple[str, Adapt] | None
    ) -> None:
        """adapting: sides with adaptive bases and their settings; None if all bases are static."""
        self._context, self._observer, self._layout = context, observer, layout
        self._sides: str = adapting[0] if adapting else ""
        self._adapt = adapting[1] if adapting else None

    def lines(self, position: int) -> Iterator[dict[str, Any]]:
        """A line per layer and KV head, for the position decoded last; none while all positions are exact.

        Lengths are those of the model's own vectors, errors and bounds the largest of the head's queries.
        logit_error, weight_error, output_error: of attention over the stored rows, and logit_bound … theirs, from
        residuals alone. weight_step, output_step: bounds from the error that was measured a step before.
        kernel_error: ‖·‖ of what the engine's attention gave less attention over the same rows in float64.
        residual_k, residual_v: ‖K_j − K̂_j‖ of the worst chunk j (largest singular value), bounds' ‖ΔK‖, ‖ΔV‖.
        sketch_error_k, epsilon_k, …: of the head's Frequent Directions sketch, in coefficients; None without one.
        violations: of a bound by one of the queries, or by a sketch. Raises SubkvError, SubkvError.
        """
        for layer in self._observer.layers():
            if not layer.coded:
                continue
            if not layer.plain:
                raise SubkvError(
                    "model",
                    f"expected attention by softmax of q·k alone, found soft-capping, ALiBi or attention sinks in "
                    f"layer {layer.il}",
                )
            q, k, v, o = (self._observer.get(layer, what) for what in ("qs", "ks", "vs", "os"))
            group = layer.n_head // layer.n_head_kv
            for head in range(layer.n_head_kv):
                own = slice(head * group, (head + 1) * group)
                line = self._head(layer, head, position, q[-1, own], k[:, head], v[:, head], o[-1, own])
                if line:
                    yield line

    def _head(
        self, layer: ObservedLayer, head: int, position: int, q: F64, k: F64, v: F64, o: F64
    ) -> dict[str, Any] | None:
        """q, o [n_group, d], k, v [position + 1, d]."""
        stats = self._context.stats
        at = np.arange(position + 1)
        coded = (at >= stats.n_sink) & (at <= position - stats.n_recent)
        if not coded.any():
            return None
        k_coded, k_chunk = self._rows(layer, head, False, k, coded)
        v_coded, v_chunk = self._rows(layer, head, True, v, coded)
        found = bounds.compare(layer.scale, q, np.full(len(q), position), k, v, k_coded, v_coded)
        residual_k, residual_v = _residual(k - k_coded, k_chunk), _residual(v - v_coded, v_chunk)
        logit = np.array([bounds.logit_bound(layer.scale, 1.0, x, residual_k, 0.0) for x in np.linalg.norm(q, axis=1)])
        weight = np.array([bounds.softmax_bound(x) for x in logit])
        largest = float(np.linalg.norm(v, axis=1).max())
        output = np.array([bounds.output_bound(x, largest, residual_v) for x in logit])
        weight_step = np.array([bounds.softmax_bound(x) for x in found.logit])
        output_step = found.weight * largest + residual_v
        pairs = ((found.logit, logit), (found.weight, weight_step), (found.output, output_step))
        sketches: dict[str, float | None] = {}
        broken = 0
        for side, x, chunk in (("k", k, k_chunk), ("v", v, v_chunk)):
            held = self._sketch(layer, head, side, x[chunk >= 0])
            sketches[f"sketch_error_{side}"], sketches[f"epsilon_{side}"] = held[:2] if held else (None, None)
            broken += held is not None and held[0] > held[1] + held[2]
        return {
            "position": position,
            "layer": layer.il,
            "head": head,
            "coded": int(coded.sum()),
            "chunks_k": len(set(k_chunk[coded])),
            "chunks_v": len(set(v_chunk[coded])),
            "residual_k": residual_k,
            "residual_v": residual_v,
            "logit_error": float(found.logit.max()),
            "logit_bound": float(logit.max()),
            "weight_error": float(found.weight.max()),
            "weight_bound": float(weight.max()),
            "weight_step": float(weight_step.max()),
            "output_error": float(found.output.max()),
            "output_bound": float(output.max()),
            "output_step": float(output_step.max()),
            "kernel_error": float(np.linalg.norm(o - found.coded_output, axis=1).max()),
            **sketches,
            "violations": broken + sum(int(np.sum(error > bound * bounds.SLACK)) for error, bound in pairs),
        }

    def _rows(self, layer: ObservedLayer, head: int, value: bool, x: F64, coded: Any) -> tuple[F64, Any]:
        """Rows as attention reads them, decoded where `coded` [n], else x [n, d]; chunk of each row, −1 if exact."""
        decoded, chunk = np.empty(x.shape, np.float32), np.empty(len(x), np.int32)
        n = declare(load(), SIGNATURES).subkv_read_rows(
            self._context.handle, layer.il, head, value, 0, 0, len(x), decoded.ctypes.data, chunk.ctypes.data
        )
        if n < 0:
            raise CacheError("kv_cache", last_error())
        if (chunk[coded] < 0).any():
            raise CacheError("kv_cache", f"expected rows of all positions past the window, found {n} of {coded.sum()}")
        return np.where(coded[:, None], decoded, x), chunk

    def _sketch(self, layer: ObservedLayer, head: int, side: str, x: F64) -> tuple[float, float, float] | None:
        """‖AᵀA − SᵀS‖ of the head's sketch of rows x, its bound, and what rounding may add; None without a sketch.

        x: all rows stored in blocks, of which the window may still have some.
        """
        from research.experiments import bounds

        adapt = self._adapt
        if adapt is None or side not in self._sides or adapt.kind != "fd" or adapt.decay != 1.0:
            return None  # the bound is of a sketch that forgets nothing
        value = side == "v"
        a = self._layout.project(layer.il, head, value, x.astype(np.float16)).astype(np.float64)  # as the window has it
        r = adapt.rank or a.shape[1]
        rows = adapt.rows or 2 * r
        if rows == r:
            return None
        s = np.empty((2 * rows, a.shape[1]), np.float32)
        n = declare(load(), SKETCH).subkv_get_sketch_rows(
            self._context.handle, layer.il, head, value, 0, s.ctypes.data, s.size
        )
        if n < 0:
            raise CacheError("kv_cache", last_error())
        if n == 0:
            return None
        held = s[:n].astype(np.float64)
        error = float(np.abs(np.linalg.eigvalsh(a.T @ a - held.T @ held)).max())
        return error, bounds.fd_epsilon(a, r, rows), SKETCH_ROUNDING * bounds.norm(a) ** 2


def _residual(lost: F64, chunk: Any) -> float:
    """Largest singular value of the rows lost [n, d] of the worst chunk; chunk [n], −1: not stored."""
    return bounds.chunked([bounds.norm(lost[chunk == j]) for j in set(chunk[chunk >= 0])])


#
# results
#


def summary(lines: Rows) -> str:
    """A Markdown table of what was measured, and rank correlations over lines of what is to predict it."""
    rows: Rows = []
    steps = [(error, STEPS[error], f"{name}, from the step before") for error, _, name in MEASURED if error in STEPS]
    for error, bound, name in (*MEASURED, *steps):
        pairs = [(line[error], line[bound]) for line in lines if line[error] is not None]
        if pairs:
            x, y = np.array(pairs).T
            share = max((e / b for e, b in pairs if b > 0.0), default=0.0)
            row = {"error": name, "median": np.median(x), "most": x.max(), "bound": np.median(y), "share": share}
            rows.append(row)
    kernel = np.array([line["kernel_error"] for line in lines])
    rows.append(
        {
            "error": "output, rounding of the kernels",
            "median": np.median(kernel),
            "most": kernel.max(),
            "bound": None,
            "share": None,
        }
    )
    broken = sum(line["violations"] for line in lines)
    out = [grid(rows, COLUMNS), "", f"{len(lines)} lines; bounds violated {broken} times. Rank correlations:"]
    for predictor, measured in PREDICTORS:
        known = [(line[predictor], line[measured]) for line in lines if line[predictor] is not None]
        if known:
            out.append(f"  {predictor} with {measured}: {bounds.spearman(*np.array(known).T):.2f}")
    return "\n".join(out)


def figure(lines: Rows) -> Any:
    """Errors (points, and their medians) and bounds (medians) by layer, on log axes: logits, weights, outputs."""
    picture = plots.new_figure(8, 9)
    layers = grouped(sorted(lines, key=lambda line: line["layer"]), lambda line: line["layer"])
    for axis, (error, bound, name) in zip(picture.subplots(3, 1, sharex=True), MEASURED[:3], strict=True):
        framed(axis, ylabel=name, yscale="log")
        axis.plot([line["layer"] for line in lines], [line[error] for line in lines], ".", color="tab:blue", alpha=0.3)
        curves = [(error, "tab:blue", "measured"), (bound, "tab:red", "bound")]
        if error in STEPS:
            curves.append((STEPS[error], "tab:orange", "bound from the measured step before"))
        for key, colour, label in curves:
            medians = [np.median([line[key] for line in own]) for own in layers.values()]
            axis.plot(list(layers), medians, color=colour, label=label)
    picture.axes[-1].set_xlabel("layer")
    picture.legend(*picture.axes[1].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    return picture


def measure(model: Model, choice: CacheChoice, tokens: I32, every: int, n_threads: int) -> Rows:
    """Read the tokens on a coefficient cache and measure on the way. Raises SubkvError."""
    assert choice.layout is not None
    n = len(tokens)
    ends = [*range(every, n, every), n]
    options_ = ContextOptions(n, every, UBATCH, n_threads)
    with contextlib.closing(ResearchLayout(choice.layout)) as layout, contextlib.closing(Observer(0)) as observer:
        with also_attach(observer.attach):
            context = model.context(choice, options_)
        with context:
            options.note(cache_line(context.stats))
            options.note(f"exact copies of keys and values: {2 * context.stats.bytes_f16 / MIB:.1f} MiB")
            observer.mode(SAMPLE, range(n), [end - 1 for end in ends])
            how = adaptive.parse(str(choice.window.adapt)) if choice.window.adapts else None
            tracker = Tracker(context, observer, layout, how)
            lines: Rows = []
            for start, end in zip([0, *ends], ends, strict=False):
                context.decode(tokens[start:end], start, end - start - 1)
                context.synchronize()
                lines.extend(tqdm(tracker.lines(end - 1), unit="head", desc=f"position {end - 1}", disable=None))
    if not lines:
        raise SubkvError("n_ctx", f"expected more tokens than the exact window holds, found {n}")
    return lines
