"""Perplexity and Kullback-Leibler divergence of next-token distributions.

Per scored token: nll = −ln p(token); KLD = Σ_t p_base(t) (ln p_base(t) − ln p(t)); same top: both distributions have
the same most likely token. All sums in float64.
PPL = exp(mean nll), its error exp(mean)·sd/√(n−1), as llama-perplexity.
"""

from __future__ import annotations

import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from subkv.base.command import show
from subkv.base.progress import progress_bar
from subkv.format.arrays import F32, F64

if TYPE_CHECKING:
    from subkv.engine.context import Context
    from subkv.engine.model import Model

I32 = npt.NDArray[np.int32]

# These members of a summary compare with a base.
AGAINST_BASE = (
    *("ppl_base", "ppl_ratio", "ppl_ratio_stderr", "delta_percent"),
    *("mean_kld", "mean_kld_stderr", "median_kld", "kld_999", "max_kld"),
    *("same_top", "same_top_stderr"),
)
ROWS = 16  # rows per piece of work: 16 x 49152 float64 fit into the processor's caches


def log_softmax(logits: F32) -> F64:
    """ln softmax over the last axis of logits [n, n_vocab] f32, as f64."""
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
    """Per-token results of one cache so far. Columns that compare with a base are empty without one."""

    nll: list[F64] = dataclasses.field(default_factory=list)
    nll_base: list[F64] = dataclasses.field(default_factory=list)
    kld: list[F64] = dataclasses.field(default_factory=list)
    same: list[npt.NDArray[np.bool_]] = dataclasses.field(default_factory=list)

    def add(self, part: Scores) -> None:
        for name, column in vars(self).items():
            column += getattr(part, name)

    def summary(self) -> dict[str, Any]:
        """Numbers under the names of the JSON output. Without a base those of AGAINST_BASE are None."""
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

    def kld_over(self, other: Scores) -> dict[str, float]:
        """Mean KLD over that of another cache with the same tokens, and the standard error of this ratio."""
        kld, base = np.concatenate(self.kld), np.concatenate(other.kld)
        ratio = float(kld.mean() / base.mean())
        return {"kld_over_own": ratio, "kld_over_own_stderr": _stderr(kld - ratio * base) / float(base.mean())}


def _stderr(x: F64) -> float:
    """Standard error of a mean with llama-perplexity's √(var/(n−1)), var over n."""
    return float(np.sqrt(x.var() / (len(x) - 1))) if len(x) > 1 else 0.0


def perplexity(nll: F64) -> tuple[float, float]:
    """exp(mean) and its standard error exp(mean)·se(mean). Of differences of nll it is a ratio of perplexities."""
    ppl = float(np.exp(nll.mean()))
    return ppl, ppl * _stderr(nll)


def score(logits: F32, targets: I32, base: F32 | None, pool: ThreadPoolExecutor, n_threads: int) -> Scores:
    """Score rows of logits [n, n_vocab] f32 against the tokens that follow, targets [n].

    base: the base cache's logits of the same rows, or None if only nll is computed.
    """

    def piece(rows: slice) -> Scores:
        log_p = log_softmax(logits[rows])
        index = np.arange(len(log_p))
        part = Scores(nll=[-log_p[index, targets[rows]]])
        if base is not None:
            log_base = log_softmax(base[rows])
            part.nll_base = [-log_base[index, targets[rows]]]
            part.same = [log_p.argmax(axis=1) == log_base.argmax(axis=1)]
            np.subtract(log_base, log_p, out=log_p)
            part.kld = [np.einsum("ij,ij->i", np.exp(log_base), log_p)]
        return part

    n = len(targets)
    slices = [slice(i, min(i + ROWS, n)) for i in range(0, n, ROWS)]
    out = Scores()
    for part in pool.map(piece, slices) if n_threads > 1 else map(piece, slices):
        out.add(part)
    return out


def evaluate(model: Model, contexts: list[Context], chunks: Any, n_threads: int) -> list[Scores]:
    """Score the chunks with every cache, batch by batch. The first is the base, of which one batch is in memory."""
    n_ctx = chunks.shape[1]
    n_batch = min(context.n_batch for context in contexts)
    scores = [Scores() for _ in contexts]
    with ThreadPoolExecutor(n_threads) as pool, progress_bar("perplexity", chunks.size * len(contexts), "tok") as bar:
        for i, part in enumerate(chunks):
            feed = part.copy()
            if model.add_bos:
                feed[0] = model.bos
            for context in contexts:
                context.clear()
            for start in range(0, n_ctx, n_batch):
                end = min(start + n_batch, n_ctx)
                low = max(start, n_ctx // 2)
                n_rows = max(min(end, n_ctx - 1) - low, 0)  # the last token predicts one of the next chunk
                base = None
                for context, scored in zip(contexts, scores, strict=True):
                    n_logits = context.decode(feed[start:end], start, low - start)
                    context.synchronize()
                    bar.update(end - start)
                    if n_rows:
                        logits = context.logits(n_logits)[:n_rows]
                        scored.add(score(logits, part[low + 1 : low + 1 + n_rows], base, pool, n_threads))
                        base = np.array(logits) if base is None else base
            progress = f"[{i + 1}/{len(chunks)}] PPL {perplexity(np.concatenate(scores[0].nll))[0]:.4f}"
            bar.set_postfix_str(progress)
            if bar.disable:  # not a terminal
                show(progress, err=True)
    return scores
