"""A prompt cache on disk, for llama_cpp's set_cache.

    llm = subkv.Llama("model.subkv.gguf", n_ctx=8192, prompt_cache="~/.cache/my-app")
    llm.set_cache(subkv.PromptCache("folder", capacity_bytes=2 << 30))  # for a Llama that exists

The folder is a store of libsubkv (include/subkv_store.h), which looks up prompts and shares their blocks;
llama-server's --store may have the same folder.

llama_cpp stores the context after an answer, for the next message of a conversation and for another question about the
same document: any tail of a stored prompt can be removed. With recurrent state, or bases that change, it cannot, so
that beginnings of a prompt are stored, too: at the last multiples of 512 and 128 tokens, which are usually in the
document, and where the prompt differs from an earlier one. There, evaluation starts at the end of the document from the
third question on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from subkv.base.errors import CacheError, StateError
from subkv.base.folders import expanded
from subkv.base.numbers import whole
from subkv.engine import states
from subkv.native import store
from subkv.native.binding import llama_cpp
from subkv.native.store import Store, Tokens

BLOCK = 128  # tokens; beginnings are stored at multiples of it, and none of shorter prompts
LARGE_BLOCK = 512
MIN_GAIN = 64  # tokens that a stored beginning must have beyond those before it


class PromptCache(llama_cpp.llama_cache.BaseLlamaCache):
    """Stores evaluated prompts in a folder, across restarts and for several processes.

    folder: created if missing; other files in it are ignored. capacity_bytes: limit of all prompts together; beyond it,
    the least useful ones are removed. Several contexts may use one object; each uses only prompts of its own model,
    cache and parameters. If the folder cannot be read or written, it warns once and generation continues. Prompts with
    a wrong checksum or format are removed with a warning; no other error removes a prompt. Prompts are written in the
    background, at the latest when the process ends. The first prompt waits for the hash of the model; if its file was
    replaced before all its bytes were hashed, the cache warns once and stores nothing.

    Raises CacheError if the path is not a folder or other users may write to it, without a subkv.Llama, and with
    logits_all, because the logits of earlier tokens are not stored.
    """

    def __init__(self, folder: str | os.PathLike[str], capacity_bytes: int = 2 << 30) -> None:
        capacity_bytes = whole("capacity_bytes", capacity_bytes, 0, 2**63 - 1, "0 or more bytes", CacheError)
        super().__init__(capacity_bytes)
        self._store = Store(expanded(folder, "prompt_cache"), capacity_bytes)
        self._llm: Any = None  # the subkv.Llama that uses this object
        self._known_identity: bytes | None = None  # b"" if it is unknown, and nothing is stored
        self._n_removable = -1

    def bound_to(self, llm: llama_cpp.Llama) -> PromptCache:
        """A PromptCache on the same folder for one subkv.Llama."""
        if llm._logits_all:
            raise CacheError("prompt_cache", "expected logits_all=False (no logits are stored), found True")
        bound = object.__new__(type(self))
        bound.__dict__.update(self.__dict__)
        bound._llm = weakref.proxy(llm)
        bound._n_removable = store.n_removable(llm.ctx)
        bound._known_identity = None
        store.prepare(llm.ctx)
        return bound

    def __reduce__(self) -> tuple[Any, ...]:
        return PromptCache, (self._store.folder, self.capacity_bytes)

    def _context(self) -> llama_cpp.Llama:
        if self._llm is None:
            raise CacheError("prompt_cache", "expected a subkv.Llama that has it (set_cache), found none")
        return self._llm

    @property
    def _identity(self) -> bytes:
        """The identity of the context's states; b"" with one warning if it is unknown. The first call may wait."""
        if self._known_identity is None:
            llm = self._context()
            context = llm.ctx
            try:
                known = store.identity(context)
                if lora := llm.lora_identity:
                    known = hashlib.sha256(known + json.dumps(lora).encode()).digest()
            except CacheError as error:
                known = b""
                warnings.warn(f"prompt cache {self._store.folder}: {error.reason}; continuing without it", stacklevel=2)
            self._known_identity = known
        return self._known_identity

    @property
    def cache_size(self) -> int:
        """Bytes of all prompts, including those of other contexts."""
        return self._store.n_bytes()

    def flush(self) -> None:
        """Wait until all prompts are written."""
        self._store.flush()

    #
    # lookup
    #

    def _found(self, tokens: Tokens, n_held: int) -> contextlib.AbstractContextManager[store.Found | None]:
        if not self._identity:
            return contextlib.nullcontext()
        return self._store.get(self._identity, tokens, n_held, self._context().n_ctx(), self._n_removable)

    def __contains__(self, key: Sequence[int]) -> bool:
        with self._found(_tokens(key), 0) as found:
            return found is not None

    def __getitem__(self, key: Sequence[int]) -> llama_cpp.LlamaState:
        """Load the stored prompt with the most tokens of a prompt into the context; returns its tokens, without data.

        llama_cpp, the caller, cannot load it, because it expects that any tail can be removed. Raises KeyError if no
        stored prompt has at least 32 tokens more of the prompt than the context.
        """
        llm, tokens = self._context(), _tokens(key)
        while True:
            with self._found(tokens, self._n_held(tokens[:-1])) as found:
                if found is None:
                    raise KeyError("no stored prompt has more of the prompt than the context")
                try:
                    llm.load_prompt(found)
                except StateError as error:  # its checksum is right, so the context may lack memory
                    found.is_refused = True
                    warnings.warn(
                        f"prompt cache {self._store.folder}: the context rejects a prompt: {error}", stacklevel=2
                    )
                    continue
                no_scores = np.empty((0, llm.n_vocab()), dtype=np.single)
                return llama_cpp.LlamaState(found.tokens, no_scores, len(found.tokens), b"", 0, llm._seed)

    def _n_held(self, tokens: Tokens) -> int:
        """How many of the first `tokens` the context has and can return to."""
        own: Tokens = self._llm._input_ids
        n_common = common_prefix(own, tokens)
        can_remove = self._n_removable < 0 or len(own) - n_common <= self._n_removable
        return n_common if can_remove else int(self._llm.restorable(n_common))

    #
    # store
    #

    def __setitem__(self, key: Sequence[int], value: llama_cpp.LlamaState) -> None:
        """Store the context, of which `value` is the state (llama_cpp's key has one more token, not evaluated yet)."""
        if self._context()._input_ids.tolist() != list(value.input_ids[: value.n_tokens]):
            raise CacheError("prompt_cache", "expected the present state of its subkv.Llama, found another one")
        self.store()

    def store(self) -> None:
        """Store the context, unless its cells may depend on tokens that it no longer has, as after discard()."""
        llm = self._context()
        if not llm._ctx.moved and self._identity:
            self._store.put(self._identity, _tokens(llm._input_ids), states.save_sequence(llm), self._n_removable)

    def positions(self, n_cells: int, tokens: Sequence[int]) -> list[int]:
        """Positions, in order, at which to store the context while tokens from n_cells on are evaluated."""
        n = len(tokens)
        if self._n_removable < 0 or n - n_cells < BLOCK or not self._identity:
            return []
        n_common = self._store.common(self._identity, _tokens(tokens))
        positions: list[int] = []
        for end in (n_common, n // BLOCK * BLOCK, n // LARGE_BLOCK * LARGE_BLOCK):
            is_near = any(abs(end - other) < MIN_GAIN for other in [n_cells, *positions])
            if max(BLOCK, n_cells) <= end < n and not is_near:
                positions.append(end)
        return sorted(positions)


def _tokens(key: Any) -> Tokens:
    return np.ascontiguousarray(key, dtype=np.int32)


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Length of the common prefix of two sequences."""
    n = min(len(a), len(b))
    differing = a[:n] != b[:n]
    first = int(differing.argmax()) if n else 0
    return first if n and differing[first] else n
