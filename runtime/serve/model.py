"""The model of a server: one context, a sequence with cells of its own for every slot."""

from __future__ import annotations

import os
from typing import Any

from subkv.llama import Llama


class SlotsLlama(Llama):
    """subkv.Llama whose context has n_slots sequences; n_ctx is divided among them."""

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        n_slots: int,
        pooling_type: int = -1,
        embedding: bool = False,
        **kwargs: Any,
    ) -> None:
        self._n_slots = n_slots
        super().__init__(model_path, embedding=embedding, pooling_type=pooling_type, **kwargs)

    def _context_params_of_slots(self) -> Any:
        params = Llama.context_params.fget(self)  # type: ignore[attr-defined]
        if params.embeddings:  # they bring sequences of their own; llama.cpp wants a text in one ubatch
            params.n_ubatch = params.n_batch
        else:
            params.n_seq_max = self._n_slots
            params.kv_unified = False
        return params

    context_params = Llama.context_params.getter(_context_params_of_slots)  # type: ignore[attr-defined]
