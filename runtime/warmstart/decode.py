"""One model, cold and warm: what a prompt's first token would be with its own cache and with slots in its place."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from converter.scoring import F64, log_softmax
from runtime.warmstart.capture import attention
from runtime.warmstart.planting import Planting
from runtime.warmstart.shapes import F32, Plan
from subkv.engine.cache import CacheChoice
from subkv.engine.model import Context, Model
from subkv.native.binding import C

if TYPE_CHECKING:
    from runtime.warmstart.trained import Placed

N_BATCH = 512


def prompt_tokens(model: Model, text: str) -> list[int]:
    """Tokens of a whole prompt, markup of its chat template read as such; one BOS where both text and model have it."""
    tokens: list[int] = model.tokenize(text.encode("utf-8", "replace"), markup=True).tolist()
    return tokens[1:] if tokens[1:2] == [model.bos] and tokens[:1] == [model.bos] else tokens


class Continued:
    """A context that holds a prompt, and the logits of its last token [n_vocab] f32: everything that can follow."""

    def __init__(self, context: Context, n_tokens: int, logits: F32) -> None:
        self.context, self.n_tokens = context, n_tokens
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
        vocab = self.context.model.vocab
        out: list[int] = []
        token = self.first if first is None else first
        while len(out) < n and not C.llama_vocab_is_eog(vocab, token):
            out.append(token)
            if len(out) < n:
                self.context.decode([token], self.n_tokens + len(out) - 1, 0)
                token = int(self.context.logits(1)[0].argmax())
        self.context.drop_tail(self.n_tokens)
        return out


class ColdContext:
    """An ordinary context of a model; a context manager. Raises CacheError where it cannot be made."""

    def __init__(self, model: Model, choice: CacheChoice, n_ctx: int, n_threads: int, flash_attn: str = "auto") -> None:
        self.context = _context(model, choice, n_ctx, n_threads, flash_attn)

    def __enter__(self) -> ColdContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def decode(self, tokens: Sequence[int]) -> Continued:
        """Evaluate a whole prompt, and forget what was there before."""
        C.llama_memory_seq_rm(self.context.memory, 0, -1, -1)  # clear() would also write zeros, which is timed
        n = self.context.n_batch
        for start in range(0, len(tokens), n):
            piece = list(tokens[start : start + n])
            self.context.decode(piece, start, len(piece) - 1)
        return Continued(self.context, len(tokens), self.context.logits(1)[0])

    def again(self, tokens: Sequence[int]) -> Continued:
        """Evaluate the last token of the prompt that is there once more: what a reused exact prefix costs."""
        self.context.drop_tail(len(tokens) - 1)
        self.context.decode(list(tokens[-1:]), len(tokens) - 1, 0)
        return Continued(self.context, len(tokens), self.context.logits(1)[0])


class WarmContext:
    """A context whose prompts can begin with planted slots; a context manager. Raises CacheError."""

    def __init__(self, model: Model, choice: CacheChoice, n_ctx: int, n_threads: int, flash_attn: str = "auto") -> None:
        self._cleanup = contextlib.ExitStack()
        self.planting = Planting()
        self._cleanup.callback(self.planting.close)
        try:
            with self.planting.attach():
                self.context = _context(model, choice, n_ctx, n_threads, flash_attn)
            self._cleanup.callback(self.context.close)
            self.planting.bind(self.context.handle, self.context.batch, choice.coded)
        except BaseException:
            self._cleanup.close()
            raise

    def __enter__(self) -> WarmContext:
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def decode(self, tokens: Sequence[int], plan: Plan, placed: list[Placed]) -> Continued:
        """Sinks and last tokens of a prompt exact, the slots `placed` between them; []: sinks and last tokens only."""
        self.planting.decode(tokens, plan, placed)
        return Continued(self.context, len(tokens), self.planting.logits(self.context.model.n_vocab))

    def attention(self, tokens: Sequence[int], plan: Plan, placed: list[Placed]) -> list[F32]:
        """As decode: outputs of attention at the last position by layer, [n_head, d_v]; of the rows as they are before
        they are stored."""
        if plan.n_sink:
            self.planting.sinks(tokens[: plan.n_sink])  # evaluated now, if need be: they record, too
        n = len(tokens)
        n_cells = plan.n_sink + plan.n_last + (plan.n_slots if placed else 0)
        observer = self.planting.observer
        out = []
        with self.planting.recording(range(n - n_cells, n), [n - 1]):
            self.planting.decode(tokens, plan, placed)
            for layer in observer.layers():
                q, k, v = (observer.get(layer, what).astype(np.float32) for what in ("qs", "ks", "vs"))
                out.append(attention(q, k, v, layer.scale)[-1])
        return out


def _context(model: Model, choice: CacheChoice, n_ctx: int, n_threads: int, flash_attn: str) -> Context:
    return model.context(
        choice, n_ctx=n_ctx, n_batch=N_BATCH, n_ubatch=N_BATCH, n_threads=n_threads, flash_attn=flash_attn
    )
