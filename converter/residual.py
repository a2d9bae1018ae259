"""The effect of errors in cached keys and values on the residual stream, by exact attention over one text in numpy.

A query with softmax weights α_i over the cells reads o = Σ α_i v_i. To first order, errors ε_i of values add Σ α_i ε_i
to o, and errors κ_i of keys add Σ α_i s (q·κ_i)(v_i − o). W_o maps both to the stream. Heads of a group share cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from subkv.format.arrays import F32, F64
from subkv.format.calibration import LayerShape
from subkv.format.window import Window

SIDES = ("k", "v", "k0", "v0")  # members of LayerSensitivity
Gram = Callable[[int, int], F32]  # [d, d] of two heads


@dataclass(frozen=True)
class Rows:
    """One text in one layer: queries q [T, n_head, d_k] at pos [T]; cells k, v [n, n_head_kv, d] at 0, 1, …"""

    q: F32
    pos: F64
    k: F32
    v: F32

    def until(self, pos: int) -> Rows:
        """Queries before a position, and the cells that they attend to."""
        near = self.pos < pos
        return Rows(self.q[near], self.pos[near], self.k[:pos], self.v[:pos])

    def beyond(self, pos: int) -> Rows:
        """Queries from a position on, and all cells."""
        return Rows(self.q[self.pos >= pos], self.pos[self.pos >= pos], self.k, self.v)

    @property
    def mask(self) -> F32:
        """[T, n]: 0 for cells that a query attends to, −inf for others."""
        return np.where(np.arange(len(self.k)) <= self.pos[:, None], np.float32(0.0), np.float32(-np.inf))


def weights(q: F32, k: F32, mask: F32, scale: float) -> F32:
    """Softmax weights [T, n] of the queries [T, d] of one head. mask: Rows.mask."""
    logits = np.float32(scale) * (q @ k.T) + mask
    logits -= logits.max(axis=1, keepdims=True)
    np.exp(logits, out=logits)
    logits /= logits.sum(axis=1, keepdims=True)
    return logits


def gram_of(output: F32, n_head: int) -> Gram:
    """The Gram of W_o [n_embd, n_head·d]."""
    heads = np.split(output, n_head, axis=1)
    return lambda i, j: heads[i].T @ heads[j]


def metrics(
    rows: Rows, shape: LayerShape, gram: Gram, window: Window, values: F32 | None = None, joint: bool = False
) -> dict[str, F64]:
    """Matrices M per KV head, [n_head_kv, d, d] for each of SIDES: errors of covariance C in every coded cell add
    tr(M C) to the squared norm of the stream, summed over the queries.

    k, v count errors in cells outside the exact window; k0, v0 in all cells except the sinks. Every row has its own
    quantization steps, so a row's error is proportional to its norm; C is the mean. Errors of different cells are
    independent, with one exception: equal tokens of the first layer, recognised by equal values, have equal errors.

    gram: W_o,hᵀ W_o,h' of two heads of a group. values: [n_head, d, d_v], by which heads multiply a row to get its
    value, or None if the row is the value. joint: a value is a part of its key's row, with the same steps.
    """
    d_k, d_v, group = shape.d_k, shape.d_v, shape.n_group
    sums = {side: np.zeros((shape.n_head_kv, *(2 * [d_k if side[0] == "k" else d_v]))) for side in SIDES}
    mask, coded = rows.mask, slice(window.n_sink, None)
    far = (np.arange(len(rows.k))[coded] <= rows.pos[:, None] - window.n_recent).astype(np.float32)
    for g in range(shape.n_head_kv):
        heads = range(g * group, (g + 1) * group)
        v = np.ascontiguousarray(rows.v[:, g])
        size = {"k": sizes(rows.k[coded, g] - rows.k[coded, g].mean(axis=0)), "v": sizes(v[coded])}
        if joint:
            size["v"] = size["k"]
        read = [weights(rows.q[:, h], rows.k[:, g], mask, shape.scale) for h in heads]
        own = [v] * group if values is None else [v @ values[h].T for h in heads]  # values as the heads read them
        out = [a @ u for a, u in zip(read, own, strict=True)]
        kinds = equal_rows(v[coded])
        first = slice(None) if kinds is None else kinds[0][kinds[1]]
        own = [u[coded][first] for u in own]
        parts, shared = {}, {}
        for suffix, near in (("", far), ("0", None)):
            of_v = parts[suffix] = _coded_parts(read, coded, size["k"], near, kinds)
            if not joint:
                of_v = _coded_parts(read, coded, size["v"], near, kinds)
            shared[suffix] = [[float(np.vdot(a, b)) for b in of_v[i:]] for i, a in enumerate(of_v)]
        for i, hi in enumerate(heads):
            for j, hj in enumerate(heads):
                if j < i:
                    continue
                metric = gram(hi, hj)
                norms = np.einsum("nd,nd->n", own[i] @ metric, own[j])
                both_read = metric if values is None else values[hi].T @ (metric @ values[hj])
                for suffix in ("", "0"):
                    w = parts[suffix][i] * parts[suffix][j]
                    # Σ w (v_i − o_i)ᵀ A (v_j − o_j) for every query
                    mean, total = w @ own[i], w.sum(axis=1)
                    cost = w @ norms - np.einsum("td,td->t", mean @ metric, out[j])
                    cost -= np.einsum("td,td->t", out[i] @ metric, mean if values is None else w @ own[j])
                    cost += total * np.einsum("td,td->t", out[i] @ metric, out[j])
                    k = np.float32(shape.scale**2) * (rows.q[:, hi] * cost[:, None]).T @ rows.q[:, hj]
                    for side, part in (("k", k), ("v", both_read * shared[suffix][i][j - i])):
                        sums[side + suffix][g] += part if i == j else part + part.T
    return sums


def sizes(rows: F32) -> F32:
    """Norms [n] of rows [n, d], scaled to a mean square of 1."""
    squares = np.einsum("nd,nd->n", rows, rows)
    norms: F32 = np.sqrt(squares / max(float(squares.mean()), float(np.finfo(np.float32).tiny)))
    return norms


def equal_rows(v: F32) -> tuple[NDArray[np.intp], NDArray[np.intp]] | None:
    """An order of the rows in which equal ones are adjacent, and the start of each group; None if no two are equal."""
    _, kind = np.unique(v, axis=0, return_inverse=True)
    kind = kind.reshape(-1)
    order = np.argsort(kind, kind="stable")
    starts = np.flatnonzero(np.diff(kind[order], prepend=-1))
    return None if len(starts) == len(v) else (order, starts)


def _coded_parts(
    read: Sequence[F32],
    coded: slice,
    size: F32,
    near: F32 | None,
    kinds: tuple[NDArray[np.intp], NDArray[np.intp]] | None,
) -> list[F32]:
    """Weights of errors in the coded cells, per head. read: softmax weights [T, n]; size: of the cells; near [T, n]: 1
    for cells that count, None: all do; kinds: of equal_rows()."""
    out = []
    for a in read:
        part = a[:, coded] * size
        if near is not None:
            part *= near
        out.append(part if kinds is None else _merged(part, *kinds))
    return out


def _merged(read: F32, order: NDArray[np.intp], starts: NDArray[np.intp]) -> F32:
    """Weights [T, n], summed over equal cells: [T, kinds]."""
    merged: F32 = np.add.reduceat(read[:, order], starts, axis=1)
    return merged


def energy(rows: Rows, shape: LayerShape, output: F32, error_k: F32 | None, error_v: F32 | None) -> float:
    """The exact squared norm that errors [n, n_head_kv, d] of the cells add to the stream, averaged over queries."""
    mask = rows.mask
    change = np.zeros((len(rows.q), output.shape[0]), dtype=np.float32)
    for h in range(shape.n_head):
        g = h // shape.n_group
        k, v = rows.k[:, g], rows.v[:, g]
        exact = weights(rows.q[:, h], k, mask, shape.scale) @ v
        read = weights(rows.q[:, h], k if error_k is None else k + error_k[:, g], mask, shape.scale)
        moved = read @ (v if error_v is None else v + error_v[:, g]) - exact
        change += moved @ output[:, h * shape.d_v : (h + 1) * shape.d_v].T
    return float(np.einsum("te,te->", change, change)) / len(rows.q)
