"""The model of a server: one context, a sequence with cells of its own for every slot."""

from __future__ import annotations

import functools
import os
from typing import Any

from subkv.engine.checkpoints import BYTES, Checkpoints
from subkv.engine.llama import Llama
from subkv.native.binding import C


class SlotsLlama(Llama):
    """subkv.Llama whose context has n_slots sequences; n_ctx is divided among them."""

    def __init__(self, model_path: str | os.PathLike[str], *, n_slots: int, **kwargs: Any) -> None:
        self.n_slots = self._n_texts = n_slots
        super().__init__(model_path, **kwargs)

    @functools.cached_property
    def longest_piece(self) -> int | None:
        """Most bytes of text that one token stands for; None where the tokenizer may drop text."""
        if C.llama_vocab_type(self._model.vocab) not in (C.LLAMA_VOCAB_TYPE_SPM, C.LLAMA_VOCAB_TYPE_BPE):
            return None
        return max(len(self.opened.piece(token, special=True)) for token in range(self.n_vocab()))

    def checkpoints(self, slot: int) -> Checkpoints | None:
        """Those of a slot, where the model has recurrent state; each slot has its share of the bytes."""
        return Checkpoints(self.ctx, slot, BYTES // self.n_slots) if self._ctx.checkpoints is not None else None

    def text(self, tokens: list[int], special: bool = False) -> str:
        """The text of tokens; what is no UTF-8 is replaced. The parent's detokenize() loses tokens of over 32 bytes."""
        return b"".join(self.opened.piece(token, special) for token in tokens).decode("utf-8", "replace")

    def _context_params_of_slots(self) -> Any:
        params = Llama.context_params.fget(self)  # type: ignore[attr-defined]
        if params.embeddings:  # they bring sequences of their own; llama.cpp wants a text in one ubatch
            params.n_ubatch = params.n_batch
        else:
            params.n_seq_max = self.n_slots
            params.kv_unified = False
        return params

    context_params = Llama.context_params.getter(_context_params_of_slots)  # type: ignore[attr-defined]
