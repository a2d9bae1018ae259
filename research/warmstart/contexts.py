"""Contexts of one model, cold and warm: what a prompt's first token would be with its own cache and with slots in its
place, and the rows and attention outputs behind it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from converter.scoring import F32, F64, log_softmax
from research.experiments.bounds import attention_weights
from research.warmstart.planting import Planting, Rows
from research.warmstart.pooled import Plan
from research.warmstart.trained import Placed
from subkv.base.errors import SubkvError
from subkv.engine.cache import CacheChoice, choose_cache
from subkv.engine.context import Context, ContextOptions
from subkv.engine.model import Model
from subkv.engine.request import CacheRequest
from subkv.native.binding import C


class Continued:
    """A context that holds a prompt, and the logits of its last token [n_vocab] f32: everything that can follow."""

    def __init__(self, model: Model, context: Context, n_tokens: int, logits: F32) -> None:
        self.model, self.context, self.n_tokens = model, context, n_tokens
        self.log_p: F64 = log_softmax(logits[None])[0]

    @property
    def first(self) -> int:
        """The most likely first token of the answer."""
        return int(self.log_p.argmax())

    def nll(self, answer: Sequence[int]) -> F64:
        """[n] −ln p of each token of an answer of at most a batch, given those before it; the prompt stays alone."""
        rows = self.log_p[None]
        if len(answer) > 1:
            n = self.context.decode(list(answer[:-1]), self.n_tokens, 0)
            rows = np.concatenate([rows, log_softmax(self.context.logits(n))])
            self.context.drop_tail(self.n_tokens)
        found: F64 = -rows[np.arange(len(answer)), list(answer)]
        return found

    def greedy(self, n: int, first: int | None = None) -> list[int]:
        """The most likely answer of at most n tokens, without the end of the turn; after `first`, if given."""
        out: list[int] = []
        token = self.first if first is None else first
        while len(out) < n and not self.model.is_end(token):
            out.append(token)
            if len(out) < n:
                self.context.decode([token], self.n_tokens + len(out) - 1, 0)
                token = int(self.context.logits(1)[0].argmax())
        self.context.drop_tail(self.n_tokens)
        return out


@dataclass(frozen=True)
class ColdContext:
    """An ordinary context of a model."""

    model: Model
    context: Context

    def decode(self, tokens: Sequence[int]) -> Continued:
        """Evaluate a whole prompt, and forget what was there before."""
        C.llama_memory_seq_rm(self.context.memory, 0, -1, -1)  # clear() would also write zeros, which is timed
        n = self.context.n_batch
        for start in range(0, len(tokens), n):
            piece = list(tokens[start : start + n])
            self.context.decode(piece, start, len(piece) - 1)
        return Continued(self.model, self.context, len(tokens), self.context.logits(1)[0])

    def again(self, tokens: Sequence[int]) -> Continued:
        """Evaluate the last token of the prompt that is there once more: what a reused exact prefix costs."""
        self.context.drop_tail(len(tokens) - 1)
        self.context.decode(list(tokens[-1:]), len(tokens) - 1, 0)
        return Continued(self.model, self.context, len(tokens), self.context.logits(1)[0])


@contextlib.contextmanager
def cold_context(model: Model, choice: CacheChoice, options: ContextOptions) -> Iterator[ColdContext]:
    """Raises CacheError where it cannot be made."""
    with model.context(choice, options) as context:
        yield ColdContext(model, context)


@dataclass(frozen=True)
class WarmContext:
    """A context whose prompts can begin with planted slots, and that shows what it computes."""

    model: Model
    context: Context
    planting: Planting
    n_ctx: int  # as asked for

    def decode(self, tokens: Sequence[int], plan: Plan, placed: list[Placed]) -> Continued:
        """Sinks and last tokens of a prompt exact, the slots `placed` between them; []: sinks and last tokens only."""
        self.planting.decode(tokens, plan, placed)
        return Continued(self.model, self.context, len(tokens), self.planting.logits(self.model.n_vocab))

    def attention(self, tokens: Sequence[int], plan: Plan, placed: list[Placed]) -> list[F32]:
        """As decode: outputs of attention at the last position by layer, [n_head, d_v]; of the rows as they are before
        they are stored."""
        if plan.n_sink:
            self.planting.sinks(tokens[: plan.n_sink])  # evaluated now, if need be: they record, too
        n = len(tokens)
        n_cells = plan.n_sink + plan.n_last + (plan.n_slots if placed else 0)
        with self.planting.recording(range(n - n_cells, n), [n - 1]):
            self.planting.decode(tokens, plan, placed)
            return last_outputs(self.planting.rows())

    def capture(self, tokens: Sequence[int], n_last: int = 0) -> Rows:
        """Decode a prompt from position 0 and return its rows. n_last: tokens whose queries are wanted.

        Raises SubkvError about `prompt` for an empty one and for one longer than the context, about `model` where not
        all layers have ordinary attention; CacheError when it cannot be decoded.
        """
        n = len(tokens)
        if not 1 <= n <= self.n_ctx:
            raise SubkvError("prompt", f"expected 1 to {self.n_ctx} tokens (the context), found {n}")
        self.context.clear()
        with self.planting.recording(range(n), range(n - min(n_last, n), n)):
            self.planting.follow(tokens, 0)
            layers = self.planting.observer.layers()
            found = [layer.il for layer in layers]
            if not layers or found != list(range(layers[-1].il + 1)):
                raise SubkvError("model", f"expected attention in every layer, found it in {found}")
            for layer in layers:
                if layer.n_key != n:
                    raise SubkvError("model", f"layer {layer.il}: expected {n} rows, found {layer.n_key}")
            return self.planting.rows()


@contextlib.contextmanager
def warm_context(model: Model, choice: CacheChoice, options: ContextOptions) -> Iterator[WarmContext]:
    """Raises CacheError where it cannot be made."""
    with contextlib.closing(Planting()) as planting, contextlib.ExitStack() as opened:
        with planting.attach():
            context = opened.enter_context(model.context(choice, options))
        planting.bind(context.handle, context.batch, choice.coded)
        yield WarmContext(model, context, planting, options.n_ctx)


@contextlib.contextmanager
def capturing(model: Model, n_ctx: int, n_threads: int | None = None) -> Iterator[WarmContext]:
    """A context with exact cells, to capture prompts of up to n_ctx tokens. Raises as warm_context."""
    choice = choose_cache(model.path, CacheRequest("f16"))
    with warm_context(model, choice, ContextOptions(n_ctx, n_threads=n_threads)) as context:
        yield context


def attention(q: F32, k: F32, v: F32, scale: float) -> F32:
    """[r, n_head, d_v]: attention of the last r of T tokens, q [r, n_head, d_k], over k and v [T, n_head_kv, d]."""
    r, n_head, _ = q.shape
    n_head_kv = k.shape[1]
    grouped = q.reshape(r, n_head_kv, n_head // n_head_kv, -1)
    logits = scale * np.einsum("rkgd,tkd->kgrt", grouped, k, optimize=True)
    weights = attention_weights(logits, np.arange(len(k) - r, len(k)))
    out: F32 = np.einsum("kgrt,tkd->rkgd", weights, v, optimize=True).reshape(r, n_head, -1)
    return out


def last_outputs(rows: Rows) -> list[F32]:
    """Attention outputs at the last position by layer, [n_head, d_v]. Its query is wanted."""
    parts = zip(rows.q, rows.k, rows.v, rows.scale, strict=True)
    return [attention(q, k, v, scale)[-1] for q, k, v, scale in parts]
