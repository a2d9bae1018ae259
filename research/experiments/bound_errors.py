"""The experiment `bounds`: measured errors of projected attention against the bounds of bounds.py, per head.

No quantizer and no exact window: what the bounds speak of. The sinks that the calibration left out stay exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from research.experiments import bounds
from research.experiments.bounds import F64
from research.experiments.grids import Rows
from research.experiments.lab import Lab
from research.experiments.sketch import Sketch
from subkv.base.progress import progress_bar
from subkv.format.calibration import LayerStats
from subkv.format.codec import F32
from subkv.plan.gamma import sqrt_gamma

LENGTH = 512  # tokens of a chunk with its own projectors
QUERIES = 32  # positions in the second half of the text
# predictor, what it is to predict
PREDICTED = (
    ("residual_k", "logit_error"),
    ("epsilon_k", "logit_error"),
    ("logit_bound", "logit_error"),
    ("residual_v", "output_error"),
    ("epsilon_v", "output_error"),
    ("output_bound", "output_error"),
)


def _projected(x: F64, pieces: Sequence[slice], bases: Sequence[F64]) -> tuple[F64, float]:
    """Rows x [n, d] behind the projector of their piece, and the largest ‖X_j(I − P_j)‖. Rows in no piece are exact."""
    projected, residuals = x.copy(), []
    for piece, basis in zip(pieces, bases, strict=True):
        projected[piece] = x[piece] @ basis.T @ basis
        residuals.append(bounds.residual(x[piece], basis))
    return projected, bounds.chunked(residuals)


def _streamed(x: F32, first: F64, pieces: Sequence[slice], r: int) -> list[F64]:
    """A basis per piece: `first`, then those of a Frequent Directions sketch (ℓ = 2r) of all rows before the piece."""
    sketch, out = Sketch("fd", x.shape[1], 2 * r), [first]
    for before in pieces[:-1]:
        sketch.absorb(x[before])
        out.append(sketch.top(r))
    return out


def _head(stats: LayerStats, h: int, q: F32, k: F32, v: F32, n_sink: int, r: int) -> Rows:
    """One line per mode. q [n_group, n, d], k, v [n, d]."""
    n, d = k.shape
    shape = stats.shape
    at = np.unique(np.linspace(n // 2, n - 1, QUERIES).astype(int))
    queries = q[:, at].reshape(-1, d).astype(np.float64)
    position = np.tile(at, len(q))
    norm_q = np.linalg.norm(queries, axis=1)
    rows_k, rows_v = k.astype(np.float64), v.astype(np.float64)
    tail_k, tail_v = rows_k[n_sink:], rows_v[n_sink:]
    largest = float(np.linalg.norm(rows_v, axis=1).max())
    static = bounds.top(stats.k2[h], r), bounds.top(stats.v2[h], r)
    whole = [slice(n_sink, n)]
    parts = [slice(low, min(low + LENGTH, n)) for low in range(n_sink, n, LENGTH)]
    modes = {
        "static": (whole, [static[0]], [static[1]]),
        "chunks": (parts, _streamed(k, static[0], parts, r), _streamed(v, static[1], parts, r)),
    }
    common = {
        "layer": shape.il,
        "head": h,
        "r": r,
        "rows": 2 * r,
        "epsilon_k": bounds.fd_epsilon(tail_k, r, 2 * r),
        "epsilon_v": bounds.fd_epsilon(tail_v, r, 2 * r),
        **_sketched("k", k[n_sink:], r),
        **_sketched("v", v[n_sink:], r),
    }
    lines = []
    for mode, (pieces, bases_k, bases_v) in modes.items():
        k_coded, residual_k = _projected(rows_k, pieces, bases_k)
        v_coded, residual_v = _projected(rows_v, pieces, bases_v)
        found = bounds.compare(shape.scale, queries, position, rows_k, rows_v, k_coded, v_coded)
        logit_bound = np.array([bounds.logit_bound(shape.scale, 1.0, x, residual_k, 0.0) for x in norm_q])
        output_bound = np.array([bounds.output_bound(x, largest, residual_v) for x in logit_bound])
        lines.append(
            {
                "mode": mode,
                **common,
                "residual_k": residual_k,
                "residual_v": residual_v,
                "logit_error": float(found.logit.max()),
                "logit_bound": float(logit_bound.max()),
                "output_error": float(found.output.max()),
                "output_bound": float(output_bound.max()),
                "queries": len(queries),
                "logit_violations": int(np.sum(found.logit > logit_bound * bounds.SLACK)),
                "output_violations": int(np.sum(found.output > output_bound * bounds.SLACK)),
            }
        )
    # γ = √(r/d), one projector: the paper's bound as printed, and the one that holds
    gamma = sqrt_gamma(r, d)
    projected, residual_k = _projected(rows_k, whole, [static[0]])
    projected[whole[0]] *= gamma
    logit = bounds.compare(shape.scale, queries, position, rows_k, rows_v, projected, rows_v).logit
    kept = bounds.kept(tail_k, static[0])
    printed = np.array([bounds.paper_logit_bound(shape.scale, gamma, x, residual_k) for x in norm_q])
    true = np.array([bounds.logit_bound(shape.scale, gamma, x, residual_k, kept) for x in norm_q])
    lines[0].update(
        gamma=gamma,
        gamma_paper_violations=int(np.sum(logit > printed * bounds.SLACK)),
        gamma_violations=int(np.sum(logit > true * bounds.SLACK)),
    )
    return lines


def _sketched(side: str, x: F32, r: int) -> dict[str, Any]:
    """‖A(I − P)‖ behind the top r of a sketch of all of x [n, d], its bound, and the paper's √ε alone."""
    sketch, a = Sketch("fd", x.shape[1], 2 * r), x.astype(np.float64)
    sketch.absorb(x)
    return {
        f"fd_residual_{side}": bounds.residual(a, sketch.top(r)),
        f"fd_bound_{side}": bounds.fd_residual_bound(a, r, 2 * r),
        f"fd_root_epsilon_{side}": float(np.sqrt(bounds.fd_epsilon(a, r, 2 * r))),
    }


def bound_errors(lab: Lab) -> dict[str, Any]:
    """Measured errors against the bounds on the in-domain text, with one projector and with one per LENGTH tokens."""
    stats = {layer.shape.il: layer for layer in lab.calibration.layers}
    tokens = lab.texts[0].chunks[0]
    r = max(1, lab.reference.d // 4)  # ℓ = 2r < d: the sketch does lose something
    lines: Rows = []
    with progress_bar("bounds", lab.reference.n_layer, "layer", lab.progress) as bar:

        def visitor(il: int, q: F32, k: F32, v: F32) -> None:
            group = stats[il].shape.n_group
            for h in range(len(k)):
                own = q[h * group : (h + 1) * group]
                lines.extend(_head(stats[il], h, own, k[h], v[h], lab.calibration.n_skip, r))
            bar.update()

        lab.visit(tokens, visitor)
    return {"text": lab.texts[0].name, "r": r, "length": LENGTH, **summary(lines), "lines": lines}


def _share(measured: float, bound: float) -> float:
    return measured / bound if bound > 0.0 else 1.0


def summary(lines: Rows) -> dict[str, Any]:
    """Violations counted, rank correlations over heads per mode, median of the largest error over the largest bound."""
    rows = []
    for mode in dict.fromkeys(line["mode"] for line in lines):
        own = [line for line in lines if line["mode"] == mode]
        for predictor, measured in PREDICTED:
            x, y = (np.array([line[name] for line in own]) for name in (predictor, measured))
            value = bounds.spearman(x, y)
            rows.append(
                {
                    "mode": mode,
                    "predictor": predictor,
                    "measured": measured,
                    "spearman": None if np.isnan(value) else value,
                    "heads": len(own),
                }
            )
    static = [line for line in lines if "gamma" in line]
    fd = [
        (line[f"fd_residual_{s}"], line[f"fd_bound_{s}"], line[f"fd_root_epsilon_{s}"]) for line in static for s in "kv"
    ]
    names = ("logit_violations", "output_violations")
    return {
        "correlations": rows,
        **{
            f"{what}_tightness": float(
                np.median([_share(line[f"{what}_error"], line[f"{what}_bound"]) for line in lines])
            )
            for what in ("logit", "output")
        },
        "checks": sum(line["queries"] for line in lines),
        **{name: sum(line[name] for line in lines) for name in names},
        "gamma_checks": sum(line["queries"] for line in static),
        "gamma_violations": sum(line["gamma_violations"] for line in static),
        "gamma_paper_violations": sum(line["gamma_paper_violations"] for line in static),
        "fd_checks": len(fd),
        "fd_violations": sum(residual > bound * (1.0 + 1e-3) for residual, bound, _ in fd),
        "fd_above_root_epsilon": sum(residual > root for residual, _, root in fd),
    }
