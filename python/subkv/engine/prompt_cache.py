"""A prompt cache on disk, for llama_cpp's set_cache.

    llm = subkv.Llama("model.subkv.gguf", n_ctx=8192, prompt_cache="~/.cache/my-app")
    llm.set_cache(subkv.PromptCache("folder", capacity_bytes=2 << 30))  # for a Llama that exists

llama_cpp stores the context after an answer, for the next message of a conversation and for another question about the
same document: any tail of a stored state can be removed. With recurrent state or adaptive bases it cannot, so that
checkpoints of a prompt are stored, too: at the last multiples of 512 and 128 tokens, which are usually in the document,
and where the prompt differs from an earlier one. There, evaluation starts at the end of the document from the third
question on.

A lookup lists the folder, reads the heads of new files (4 bytes per token), and compares tokens in memory: 0.1 s for
5,000 entries of 3,000 tokens each, one second the first time in a process. A hit reads one file and checks its SHA-256.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from subkv.base.container import ContainerError, Tokens
from subkv.base.errors import CacheError, StateError, system_reason
from subkv.engine.entries import Entry, Folder
from subkv.native.binding import llama_cpp

BLOCK = 128  # tokens; checkpoints are at multiples of it, and shorter prompts have none
LARGE_BLOCK = 512
MIN_GAIN = 64  # tokens that a new checkpoint must have beyond stored ones


class PromptCache(llama_cpp.llama_cache.BaseLlamaCache):
    """Stores states of contexts in a folder, across restarts and for several processes.

    folder: created on the first store; other files in it are ignored. capacity_bytes: beyond it, the least recently
    used entries are removed. Several contexts may use one object; each uses only entries of its own model, cache and
    parameters (subkv.engine.states.identity). If the folder cannot be read or written, it warns once and generation
    continues. Entries with a wrong checksum or format are removed with a warning; no other error removes an entry.

    Raises CacheError if the path is not a folder or other users may write to it, without a subkv.Llama, and with
    logits_all, because the logits of earlier tokens are not stored.
    """

    def __init__(self, folder: str | os.PathLike[str], capacity_bytes: int = 2 << 30) -> None:
        super().__init__(capacity_bytes)
        path = Path(folder).expanduser()
        with contextlib.suppress(OSError):  # reported at the first use
            status = os.stat(path)
            mode = stat.S_IMODE(status.st_mode)
            if not stat.S_ISDIR(status.st_mode):
                raise CacheError("prompt_cache", f"expected a folder, found the file {path}")
            if os.name == "posix" and mode & (stat.S_IWGRP | stat.S_IWOTH):
                only = "a folder that only its owner can write to"
                raise CacheError("prompt_cache", f"expected {only}, found mode {mode:04o} (chmod go-w): {path}")
        self.entries = Folder(path)
        self._llm: Any = None  # the subkv.Llama that uses this object
        self._identity = b""
        self._n_removable: int | None = None
        self._warned: set[str] = set()  # shared by all contexts that use this object

    def bound_to(self, llm: llama_cpp.Llama) -> PromptCache:
        """A PromptCache on the same folder for one subkv.Llama."""
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
        """Bytes of all files, including those of other contexts."""
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
        except FileNotFoundError:  # nothing is stored yet
            return {}
        except (OSError, MemoryError) as error:
            self._warn("read", error)
            return {}

    def _usable(self, evaluated: Tokens, tokens: Tokens) -> int:
        """How many of the first `tokens` a context can reuse that has the cells of the text `evaluated`."""
        n_common = common_prefix(evaluated, tokens)
        return n_common if self._n_removable is None or len(evaluated) - n_common <= self._n_removable else 0

    def _best(self, tokens: Tokens, heads: dict[str, Tokens]) -> tuple[int, str]:
        """The number of `tokens` that the best entry has, from the first one on, and its name; 0 without an entry."""
        n_ctx = self._context().n_ctx()
        usable = [(self._usable(stored, tokens), name) for name, stored in heads.items() if len(stored) <= n_ctx]
        return max(usable, default=(0, ""))

    def __contains__(self, key: Sequence[int]) -> bool:
        return self._best(_prompt(key), self._heads())[0] > 0

    def __getitem__(self, key: Sequence[int]) -> llama_cpp.LlamaState:
        """Load the state with the most tokens of a prompt into the context, and return it.

        llama_cpp, the caller, cannot load it, because it expects that any tail can be removed. Raises KeyError if no
        state has more of the prompt than the context already holds.
        """
        llm = self._context()
        tokens = _prompt(key)
        n_own = max(self._usable(llm._input_ids, tokens), llm.restorable(common_prefix(llm._input_ids, tokens)))
        unreadable: set[str] = set()
        while True:
            heads = {name: stored for name, stored in self._heads().items() if name not in unreadable}
            n_stored, name = self._best(tokens, heads)
            if n_stored <= n_own:
                raise KeyError("no entry has more of the prompt than the context")
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
            except ContainerError as error:
                self.entries.discard(name)
                warnings.warn(
                    f"prompt cache {self.entries.path}: skipped the damaged entry {name}: {error}", stacklevel=2
                )
            except StateError as error:  # its checksum is right: the context may lack memory
                self.entries.skip(name)
                warnings.warn(
                    f"prompt cache {self.entries.path}: the context rejects the entry {name}: {error}", stacklevel=2
                )
            except (OSError, MemoryError) as error:
                unreadable.add(name)
                self._warn("read", error)

    #
    # store
    #

    def __setitem__(self, key: Sequence[int], value: llama_cpp.LlamaState) -> None:
        """Store a state, with its own tokens as the key (llama_cpp's key has one more, not evaluated yet)."""
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
            for other, stored in heads.items():
                if self._usable(entry.tokens, stored) == len(stored):  # the new entry replaces it
                    self.entries.remove(other)
            self.entries.trim(self.capacity_bytes)
        except (OSError, MemoryError) as error:
            self._warn("write", error)

    def checkpoints(self, n_cells: int, tokens: Sequence[int]) -> list[int]:
        """Positions, in order, at which to store a state while tokens from n_cells on are evaluated."""
        n = len(tokens)
        if self._n_removable is None or n - n_cells < BLOCK:
            return []
        array = _tokens(tokens)
        heads = self._heads()
        n_common = max((common_prefix(stored, array) for stored in heads.values()), default=0)
        positions: list[int] = []
        for end in (n_common, n // BLOCK * BLOCK, n // LARGE_BLOCK * LARGE_BLOCK):
            is_near = any(abs(end - other) < MIN_GAIN for other in positions)
            gain = end - max(self._best(array[:end], heads)[0], n_cells)
            if BLOCK <= end < n and not is_near and gain >= MIN_GAIN:
                positions.append(end)
        return sorted(positions)

    def _warn(self, action: str, error: OSError | MemoryError) -> None:
        if action not in self._warned:
            self._warned.add(action)
            warnings.warn(
                f"prompt cache {self.entries.path}: cannot {action}: {system_reason(error)}; continuing without it",
                stacklevel=2,
            )


def _tokens(key: Any) -> Tokens:
    return np.asarray(key, dtype=np.int32)


def _prompt(key: Sequence[int]) -> Tokens:
    """The part of a prompt to look up: all but the last token, which must be evaluated for its logits."""
    return _tokens(key)[:-1]


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Length of the common prefix of two sequences."""
    n = min(len(a), len(b))
    differing = a[:n] != b[:n]
    first = int(differing.argmax()) if n else 0
    return first if n and differing[first] else n
