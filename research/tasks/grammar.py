"""The grammar of a JSON schema: the tokens that may come next in a text that fits the schema."""

from __future__ import annotations

import ctypes
import json
from typing import Any

import numpy as np
import numpy.typing as npt

from subkv.native.binding import C, internals

# isort: split
from llama_cpp.llama_grammar import json_schema_to_gbnf


class Grammar:
    """llama.cpp's grammar of a schema, and its state after the accepted tokens. `with` frees it. Raises ValueError."""

    def __init__(self, vocab: Any, schema: dict[str, Any]) -> None:
        text = json_schema_to_gbnf(json.dumps(schema))
        self._sampler = C.llama_sampler_init_grammar(vocab, text.encode(), b"root")
        if not self._sampler:
            raise ValueError(f"expected GBNF that llama.cpp can read, found {text!r}")
        self._row = internals.LlamaTokenDataArray(n_vocab=C.llama_vocab_n_tokens(vocab))
        self._zeros = np.zeros(self._row.n_vocab, np.float32)

    def allowed(self) -> npt.NDArray[np.bool_]:
        """For each token, whether it may come next: [n_vocab]."""
        self._row.copy_logits(self._zeros)
        C.llama_sampler_apply(self._sampler, ctypes.byref(self._row.candidates))
        allowed: npt.NDArray[np.bool_] = self._row.candidates_data.logit == 0
        return allowed

    def admits(self, token: int) -> bool:
        """Whether this token may come next, without computing that for all tokens."""
        alone = C.llama_token_data(id=token, logit=1.0, p=0.0)
        array = C.llama_token_data_array(data=ctypes.pointer(alone), size=1, selected=-1, sorted=False)
        C.llama_sampler_apply(self._sampler, ctypes.byref(array))
        return bool(np.isfinite(alone.logit))

    def accept(self, token: int) -> None:
        """Advance by a token."""
        C.llama_sampler_accept(self._sampler, token)

    def __enter__(self) -> Grammar:
        return self

    def __exit__(self, *_: object) -> None:
        C.llama_sampler_free(self._sampler)
