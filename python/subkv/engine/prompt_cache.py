"""A prompt cache on disk, for llama_cpp's set_cache.

    llm = subkv.Llama("model.subkv.gguf", n_ctx=8192, prompt_cache="~/.cache/my-app")
    llm.set_cache(subkv.PromptCache("folder", capacity_bytes=2 << 30))  # the same later on

Two kinds of states are stored. What llama_cpp stores: the context after an answer, which the next turn of a
conversation continues. And, where cells are coded, checkpoints while a prompt is read: of such a cache only a short
tail can be removed (n_rollback), so the state after "document, question, answer" is of no use to another question. They
are taken at the last multiples of 512 and of 128 tokens, which usually lie in the document, and where the prompt leaves
one that was seen before: from the third question on reading starts where the document ends.

Looking up lists the folder, reads the heads of files not seen before (4 bytes per token), and compares tokens in
memory: 0.1 s for 5,000 entries of 3,000 tokens each, and a second the first time in a process. A hit reads one file and
checks its SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from subkv.base.container import ContainerError, Tokens
from subkv.base.errors import CacheError, StateError
from subkv.engine.entries import Entry, Folder
from subkv.native.binding import llama_cpp

BLOCK = 128  # tokens; checkpoints lie at multiples of it, and shorter prompts get none
LARGE_BLOCK = 512
MIN_GAIN = 64  # tokens by which a checkpoint is ahead of what is stored already


class PromptCache(llama_cpp.llama_cache.BaseLlamaCache):
    """States of contexts in a folder that survive restarts and serve several processes at once.

    folder: made on the first store; files of others in it are left alone. capacity_bytes: beyond it the entries used
    longest ago are removed. One object may be given to several contexts; each finds only what a context of its own
    model, cache and parameters stored (subkv.states.identity). A folder that cannot be written is reported once, as a
    warning, and generation goes on; damaged entries are removed with a warning and never used.

    Raises CacheError for a path that is not a folder, when used without a subkv.Llama, and for one with logits_all,
    whose logits of earlier tokens would be missing.
    """

    def __init__(self, folder: str | os.PathLike[str], capacity_bytes: int = 2 << 30) -> None:
        super().__init__(capacity_bytes)
        path = Path(folder).expanduser()
        if os.path.exists(path) and not os.path.isdir(path):  # False, not an error, where it cannot be looked at
            raise CacheError("prompt_cache", f"expected a folder, found the file {path}")
        self.entries = Folder(path)
        self._llm: Any = None  # the subkv.Llama it is attached to
        self._identity = b""
        self._n_removable: int | None = None
        self._warned: set[str] = set()  # shared by all contexts that use this object

    def attached(self, llm: llama_cpp.Llama) -> PromptCache:
        """This cache for one subkv.Llama."""
        if llm._logits_all:
            raise CacheError("prompt_cache", "expected logits_all=False (no logits are stored), found True")
        bound = PromptCache(self.entries.path, self.capacity_bytes)
        bound.entries, bound._warned = self.entries, self._warned
        bound._llm = weakref.proxy(llm)
        bound._n_removable = llm.n_removable
        bound._identity = hashlib.sha256(json.dumps(llm.identity(), sort_keys=True).encode()).digest()
        return bound

    def __reduce__(self) -> tuple[Any, ...]:
        return PromptCache, (self.entries.path, self.capacity_bytes)

    def _context(self) -> llama_cpp.Llama:
        if self._llm is None:
            raise CacheError("prompt_cache", "expected a subkv.Llama that has it (set_cache), found none")
        return self._llm

    @property
    def cache_size(self) -> int:
        """Bytes of all files, those of other contexts included."""
        try:
            return self.entries.size()
        except OSError:
            return 0

    #
    # lookup
    #

    def _heads(self) -> dict[str, Tokens]:
        try:
            return {name: head.tokens for name, head in self.entries.heads(self._identity).items()}
        except FileNotFoundError:  # nothing stored yet
            return {}
        except OSError as error:
            self._warn("read", error)
            return {}

    def _usable(self, held: Tokens, tokens: Tokens) -> int:
        """How many of the first `tokens` need not be evaluated by a context that holds `held`."""
        same = common_prefix(held, tokens)
        return same if self._n_removable is None or len(held) - same <= self._n_removable else 0

    def _best(self, tokens: Tokens, heads: dict[str, Tokens]) -> tuple[int, str]:
        """How many of the first `tokens` the best of the entries saves, and its name; 0 where there is none."""
        n_ctx = self._context().n_ctx()
        found = [(self._usable(held, tokens), name) for name, held in heads.items() if len(held) <= n_ctx]
        return max(found, default=(0, ""))

    def __contains__(self, key: Sequence[int]) -> bool:
        return self._best(_prompt(key), self._heads())[0] > 0

    def __getitem__(self, key: Sequence[int]) -> llama_cpp.LlamaState:
        """The state that saves most of a prompt's evaluation, which the context now holds.

        It is loaded here: llama_cpp, the caller, would keep a longer prefix and does not know that a coded tail behind
        it stays. Raises KeyError where none saves more than the context's own cells do.
        """
        llm = self._context()
        tokens = _prompt(key)
        own = max(self._usable(llm._input_ids, tokens), llm.restorable(common_prefix(llm._input_ids, tokens)))
        while True:
            saved, name = self._best(tokens, self._heads())
            if saved <= own:
                raise KeyError("no entry saves more than the context holds")
            try:
                entry = self.entries.read(name)
                if entry is None:  # another process removed it
                    continue
                scores = np.empty((0, llm.n_vocab()), dtype=np.single)
                state = llama_cpp.LlamaState(
                    entry.tokens, scores, len(entry.tokens), entry.state, len(entry.state), llm._seed
                )
                llm.load_state(state)
                return state
            except (ContainerError, StateError) as error:
                self.entries.discard(name)
                warnings.warn(
                    f"prompt cache {self.entries.path}: dropped the damaged entry {name}: {error}", stacklevel=2
                )
            except OSError as error:
                self._warn("read", error)
                raise KeyError("the entry cannot be read") from error

    #
    # store
    #

    def __setitem__(self, key: Sequence[int], value: llama_cpp.LlamaState) -> None:
        """Store a state under the tokens that it holds (llama_cpp's key also has a last token not evaluated yet)."""
        self._context()
        entry = Entry(self._identity, _tokens(value.input_ids[: value.n_tokens]), value.llama_state)
        heads = self._heads()
        name = entry.name()
        if name in heads:
            self.entries.touch(name)
            return
        if len(entry.state) > self.capacity_bytes:
            return
        try:
            self.entries.write(entry)
            for other, held in heads.items():
                if self._usable(entry.tokens, held) == len(held):  # the new entry serves as well
                    self.entries.remove(other)
            self.entries.trim(self.capacity_bytes)
        except OSError as error:
            self._warn("write", error)

    def checkpoints(self, n_held: int, tokens: Sequence[int]) -> list[int]:
        """Where to store a state while a context that holds the first n_held tokens evaluates the others, in order."""
        n = len(tokens)
        if self._n_removable is None or n - n_held < BLOCK:
            return []
        array = _tokens(tokens)
        heads = self._heads()
        shared = max((common_prefix(held, array) for held in heads.values()), default=0)
        taken: list[int] = []
        for end in (shared, n // BLOCK * BLOCK, n // LARGE_BLOCK * LARGE_BLOCK):
            near = any(abs(end - other) < MIN_GAIN for other in taken)
            ahead = end - max(self._best(array[:end], heads)[0], n_held)
            if BLOCK <= end < n and not near and ahead >= MIN_GAIN:
                taken.append(end)
        return sorted(taken)

    def _warn(self, what: str, error: OSError) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(
                f"prompt cache {self.entries.path}: cannot {what}: {error.strerror or error}; going on without",
                stacklevel=2,
            )


def _tokens(key: Any) -> Tokens:
    return np.asarray(key, dtype=np.int32)


def _prompt(key: Sequence[int]) -> Tokens:
    """What of a prompt can be found: its last token has to be evaluated, it gives the logits."""
    return _tokens(key)[:-1]


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many tokens two sequences have in common at their start."""
    n = min(len(a), len(b))
    differing = a[:n] != b[:n]
    first = int(differing.argmax()) if n else 0
    return first if n and differing[first] else n
