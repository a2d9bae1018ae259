"""The model of a server: one context, a sequence with cells of its own for every slot."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from subkv.engine.checkpoints import BYTES, Checkpoints
from subkv.engine.llama import Llama
from subkv.native.binding import C
from subkv.native.gguf import Gguf

RANKING = ("cls.weight", "cls.output.weight")  # either makes a score of a vector


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

    @functools.cached_property
    def ends(self) -> list[int]:
        """Tokens that end an answer."""
        return [token for token in range(self.n_vocab()) if self.opened.is_end(token)]

    @functools.cached_property
    def ranks(self) -> bool:
        """Whether it gives a score for a text in place of a vector; llama.cpp would take any number for one."""
        if self.pooling_type() != C.LLAMA_POOLING_TYPE_RANK:
            return False
        with Gguf(Path(self.model_path)) as file:
            return any(file.has_tensor(name) for name in RANKING)

    @functools.cached_property
    def sliding(self) -> bool:
        """Whether some layers have a window: the state of a sequence leaves out what has left it."""
        return bool(C.llama_model_n_swa(self._model.model) > 0)

    def checkpoints(self, slot: int, remembering: bool = False) -> Checkpoints | None:
        """Those of a slot, where the model has recurrent state or windows; each slot has its share of the bytes.

        remembering: and where only a short tail of a coded cache can be removed.
        """
        adaptive = self.cache_choice.adaptive
        wanted = self._ctx.checkpoints is not None or (
            not adaptive and (self.sliding or (remembering and self.n_removable is not None))
        )
        return Checkpoints(self.ctx, slot, BYTES // self.n_slots, self.sliding) if wanted else None

    @property
    def n_removable(self) -> int | None:
        """How many cells at the end of a slot can always be removed; None: any number."""
        stats = self.kv_stats()
        return super().n_removable if stats.n_recent or not stats.n_layer_coded else None

    @property
    def n_removable_restored(self) -> int | None:
        """The same of a slot that was restored."""
        return 0 if self.sliding else self.n_removable

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
