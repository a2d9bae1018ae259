"""Perplexity and Kullback-Leibler divergence of next-token distributions, and llama-perplexity's base file.

Per scored token: nll = −ln p(token); KLD = Σ_t p_base(t) (ln p_base(t) − ln p(t)); same top: both distributions have
the same most likely token. All sums in float64.
PPL = exp(mean nll), its error exp(mean)·sd/√(n−1), as llama-perplexity.
"""

from __future__ import annotations

import dataclasses
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from subkv.base.errors import SubkvError, system_reason
from subkv.format.arrays import F32, F64

I32 = npt.NDArray[np.int32]
U16 = npt.NDArray[np.uint16]

# members of a summary that compare with a base
AGAINST_BASE = (
    *("ppl_base", "ppl_ratio", "ppl_ratio_stderr", "delta_percent"),
    *("mean_kld", "mean_kld_stderr", "median_kld", "kld_999", "max_kld"),
    *("same_top", "same_top_stderr"),
)
ROWS = 16  # rows per piece of work: 16 x 49152 float64 fit into the processor's caches


def log_softmax(logits: F32) -> F64:
    """ln softmax over the last axis. logits [n, n_vocab] f32; returns f64."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return x


def mean_kld(exact: F32, other: F32) -> float:
    """Mean KLD of rows of logits [n, n_vocab] from the exact ones, nats."""
    total = 0.0
    for i in range(0, len(exact), ROWS):
        log_p = log_softmax(exact[i : i + ROWS])
        total += float(np.sum(np.exp(log_p) * (log_p - log_softmax(other[i : i + ROWS]))))
    return total / len(exact)


@dataclasses.dataclass
class Scores:
    """Per-token results of one cache so far; columns that compare with a base are empty without one."""

    nll: list[F64] = dataclasses.field(default_factory=list)
    nll_base: list[F64] = dataclasses.field(default_factory=list)
    kld: list[F64] = dataclasses.field(default_factory=list)
    same: list[npt.NDArray[np.bool_]] = dataclasses.field(default_factory=list)

    def add(self, part: Scores) -> None:
        for name, column in vars(self).items():
            column += getattr(part, name)

    def summary(self) -> dict[str, Any]:
        """Numbers under the names of the JSON output; without a base those of AGAINST_BASE are None."""
        nll = np.concatenate(self.nll)
        ppl, stderr = perplexity(nll)
        out: dict[str, Any] = {"ppl": ppl, "ppl_stderr": stderr, "n_scored": len(nll)}
        if not self.kld:
            return out | dict.fromkeys(AGAINST_BASE)
        base, kld = np.concatenate(self.nll_base), np.concatenate(self.kld)
        same = float(np.concatenate(self.same).mean())
        ratio, ratio_error = perplexity(nll - base)
        same_error = math.sqrt(same * (1.0 - same) / max(len(kld) - 1, 1))
        quality = (perplexity(base)[0], ratio, ratio_error, 100.0 * (ratio - 1.0))
        spread = (kld.mean(), _stderr(kld), np.median(kld), np.quantile(kld, 0.999), kld.max())
        numbers = map(float, (*quality, *spread, same, same_error))
        return out | dict(zip(AGAINST_BASE, numbers, strict=True))


def _stderr(x: F64) -> float:
    """Standard error of a mean with llama-perplexity's √(var/(n−1)), var over n."""
    return float(np.sqrt(x.var() / (len(x) - 1))) if len(x) > 1 else 0.0


def perplexity(nll: F64) -> tuple[float, float]:
    """exp(mean) and its standard error exp(mean)·se(mean); of differences of nll: the ratio of two perplexities."""
    ppl = float(np.exp(nll.mean()))
    return ppl, ppl * _stderr(nll)


def score(logits: F32, targets: I32, base: npt.NDArray[Any] | None, pool: ThreadPoolExecutor, n_threads: int) -> Scores:
    """Score rows of logits [n, n_vocab] f32 against the tokens that follow, targets [n].

    base: the base cache's logits of the same rows, or rows of a base file; None: only nll is computed. As in
    llama-perplexity, tokens with ln p ≤ −16 in a file add nothing to the KLD.
    """

    def piece(rows: slice) -> Scores:
        log_p = log_softmax(logits[rows])
        index = np.arange(len(log_p))
        part = Scores(nll=[-log_p[index, targets[rows]]])
        if base is not None:
            if base.dtype == np.uint16:
                log_base = decode_rows(base[rows], logits.shape[1]).astype(np.float64)
                weight = np.where(log_base > -CLIP, np.exp(log_base), 0.0)
            else:
                log_base = log_softmax(base[rows])
                weight = np.exp(log_base)
            part.nll_base = [-log_base[index, targets[rows]]]
            part.same = [log_p.argmax(axis=1) == log_base.argmax(axis=1)]
            np.subtract(log_base, log_p, out=log_p)
            part.kld = [np.einsum("ij,ij->i", weight, log_p)]
        return part

    n = len(targets)
    slices = [slice(i, min(i + ROWS, n)) for i in range(0, n, ROWS)]
    out = Scores()
    for part in pool.map(piece, slices) if n_threads > 1 else map(piece, slices):
        out.add(part)
    return out


#
# llama-perplexity's --kl-divergence-base file, byte for byte: "_logits_", n_ctx, n_vocab, n_chunk (i32), the tokens
# (i32 [n_chunk][n_ctx]), then per chunk n_ctx − 1 − n_ctx/2 rows of u16[2⌈n_vocab/2⌉ + 4]: scale f32, smallest ln p
# f32, codes. ln p = scale·code + smallest; logits more than 16 below the row's maximum are clipped.
#

MAGIC = b"_logits_"
CLIP = 16.0


def encode_rows(logits: F32) -> U16:
    """Rows of logits [n, n_vocab] f32 in the base file's 16-bit code, [n, 2⌈n_vocab/2⌉ + 4] u16."""
    n, n_vocab = logits.shape
    rows = np.zeros((n, 2 * ((n_vocab + 1) // 2) + 4), dtype=np.uint16)
    top = logits.max(axis=1, keepdims=True)
    low = np.maximum(logits.min(axis=1, keepdims=True), top - np.float32(CLIP))
    log_sum = np.log(np.exp((logits - top).astype(np.float64)).sum(axis=1, keepdims=True)).astype(np.float32)
    scale = ((top - low) / np.float32(65535.0)).astype(np.float32)
    rows[:, :4] = np.concatenate([scale, low - top - log_sum], axis=1).astype("<f4").view(np.uint16)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.rint((logits - low) / scale)
    rows[:, 4 : 4 + n_vocab] = np.where((logits > low) & (scale > 0), np.minimum(codes, 65535.0), 0.0)
    return rows


def decode_rows(rows: U16, n_vocab: int) -> F32:
    """Log-probabilities [n, n_vocab] f32 from rows of the base file."""
    head = np.ascontiguousarray(rows[:, :4]).view("<f4")
    log_p: F32 = head[:, :1] * rows[:, 4 : 4 + n_vocab].astype(np.float32) + head[:, 1:2]
    return log_p


class BaseReader:
    """A base file opened for reading. Raises SubkvError about `path`."""

    def __init__(self, path: Path) -> None:
        try:
            self.file: BinaryIO = open(path, "rb")  # noqa: SIM115  closed by close()
            size = os.fstat(self.file.fileno()).st_size
            head = self.file.read(20)
        except OSError as error:
            raise SubkvError("path", f"cannot read {path}: {system_reason(error)}") from error
        if head[:8] != MAGIC or len(head) < 20:
            raise SubkvError(
                "path", f"expected a file written by --kl-divergence-base, found {head[:8]!r} at the start of {path}"
            )
        self.n_ctx, self.n_vocab, self.n_chunk = (int(x) for x in np.frombuffer(head[8:], dtype="<i4"))
        if min(self.n_ctx - 3, self.n_vocab, self.n_chunk) <= 0:
            raise SubkvError(
                "path",
                f"n_ctx, n_vocab, n_chunk: expected positive, found {self.n_ctx}, {self.n_vocab}, {self.n_chunk}",
            )
        self.width = 2 * ((self.n_vocab + 1) // 2) + 4
        self.n_rows = self.n_ctx - 1 - self.n_ctx // 2
        expected = 20 + 4 * self.n_chunk * self.n_ctx + 2 * self.n_chunk * self.n_rows * self.width
        if size != expected:
            raise SubkvError("path", f"expected {expected} bytes, found {size}: {path} is incomplete")
        self.tokens = np.frombuffer(self.file.read(4 * self.n_chunk * self.n_ctx), dtype="<i4").astype(np.int32)

    def read(self, n: int) -> U16:
        """The next n rows, [n, width]."""
        data = self.file.read(2 * n * self.width)
        return np.frombuffer(data, dtype="<u2").reshape(n, self.width)

    def close(self) -> None:
        self.file.close()


def write_rows(file: BinaryIO, logits: F32) -> None:
    """Append logits [n, n_vocab] f32 to a base file."""
    for i in range(0, len(logits), ROWS):
        file.write(encode_rows(logits[i : i + ROWS]).astype("<u2").tobytes())


def write_header(file: BinaryIO, tokens: I32, n_ctx: int, n_vocab: int, n_chunk: int) -> None:
    file.write(MAGIC + np.array([n_ctx, n_vocab, n_chunk], dtype="<i4").tobytes())
    file.write(tokens[: n_chunk * n_ctx].astype("<i4").tobytes())
