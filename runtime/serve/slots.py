"""Slots: what each sequence of the context holds, which one a prompt goes to, and files of them."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runtime.serve.blocks import Prefix, reach
from runtime.serve.task import Task
from subkv.base import container
from subkv.base.errors import StateError, concerning
from subkv.engine import checkpoints
from subkv.engine.checkpoints import Checkpoints
from subkv.engine.llama import Llama, forgettable
from subkv.native.binding import C, captured_log, last_error, last_log_error, llama_cpp


@dataclasses.dataclass
class Slot:
    """One sequence of the context: `tokens` are those that its cells hold, `used` grows with every use."""

    id: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    task: Task | None = None
    used: int = 0
    checkpoints: Checkpoints | None = None  # of recurrent state, where the model has some
    shifted: bool = False  # later cells have seen tokens that are gone: of use to nobody else
    space: str = ""  # whose tokens they are: of use to nobody else
    unsaved: bool = False  # what it holds is kept nowhere else


def held(slot: Slot, prompt: Sequence[int], n_removable: int | None, space: str) -> int:
    """How many of a prompt's tokens a slot holds and would keep: n_removable: of blocks.reach."""
    if slot.space != space or slot.shifted:
        return 0
    n_common = llama_cpp.Llama.longest_token_prefix(slot.tokens, prompt)
    if slot.checkpoints is None:
        return reach(len(slot.tokens), n_common, (), n_removable)
    points = (point.n_tokens for point in slot.checkpoints.held)
    return reach(len(slot.tokens), n_common, points, n_removable if n_common >= slot.checkpoints.floor else 0)


def choose(slots: Iterable[Slot], prompt: Sequence[int], n_removable: int | None, space: str = "") -> Slot:
    """The idle slot that serves a prompt best: it keeps most of its cells, or is empty, or was not used for longest.

    n_removable: the longest tail that the cache can remove without a checkpoint, None: any. A slot that would lose more
    cells than the prompt finds there is left to the conversation it belongs to.
    """

    def kept(slot: Slot) -> int:
        n_common = llama_cpp.Llama.longest_token_prefix(slot.tokens, prompt)
        return 0 if len(slot.tokens) - n_common > n_common else held(slot, prompt, n_removable, space)

    idle = (slot for slot in slots if slot.task is None)
    return max(idle, key=lambda slot: (kept(slot), not slot.tokens, -slot.used))


#
# cells
#

N_POINTS = 6  # checkpoints in what is kept of a slot: each is as large as the exact window, or recurrent state


def truncate(memory: Any, slot: Slot, n_keep: int) -> None:
    """Remove the cells from n_keep on; more of them, or all, where the cache cannot give up just those."""
    if slot.checkpoints is not None:
        n_keep = slot.checkpoints.cut(n_keep)
    elif not C.llama_memory_seq_rm(memory, slot.id, n_keep, -1):
        n_keep = 0
        C.llama_memory_seq_rm(memory, slot.id, -1, -1)
    del slot.tokens[n_keep:]


def shift(memory: Any, slot: Slot, n_keep: int, n_recent: int) -> bool:
    """Forget half of the tokens after the first n_keep, and not the last n_recent; the later ones move up.

    False where the cache refuses: then it is as it was, or empty.
    """
    n = len(slot.tokens)
    n_discard = forgettable(n - n_keep, n_recent)
    if n_discard <= 0 or not C.llama_memory_seq_rm(memory, slot.id, n_keep, n_keep + n_discard):
        return False
    C.llama_memory_seq_add(memory, slot.id, n_keep + n_discard, n, -n_discard)
    if C.llama_memory_seq_pos_max(memory, slot.id) != n - n_discard - 1:
        truncate(memory, slot, 0)
        return False
    del slot.tokens[n_keep : n_keep + n_discard]
    slot.shifted = True
    if slot.checkpoints is not None:
        slot.checkpoints.moved(len(slot.tokens))
    return True


def _cells(llm: Llama, slot: Slot) -> ctypes.Array[ctypes.c_uint8]:
    size = C.llama_state_seq_get_size(llm.ctx, slot.id)
    data = (ctypes.c_uint8 * size)()
    n = C.llama_state_seq_get_data(llm.ctx, data, size, slot.id)
    if n != size:
        raise StateError("slot", f"expected {size} bytes of state, found {n}")
    return data


def _set_cells(llm: Llama, slot: Slot, data: ctypes.Array[ctypes.c_uint8]) -> None:
    with captured_log(forward=False) as log:
        n = C.llama_state_seq_set_data(llm.ctx, data, len(data), slot.id)
    if n != len(data):
        raise StateError("slot", last_log_error(log) or last_error() or f"read {n} of {len(data)} bytes")


def copied(llm: Llama, slot: Slot) -> Prefix:
    """A copy of what a slot holds, at work or idle. Raises StateError."""
    points = () if slot.checkpoints is None else slot.checkpoints.held
    return Prefix(np.array(slot.tokens, np.int32), memoryview(_cells(llm, slot)), points)


def thinned(prefix: Prefix, n_removable: int | None) -> Prefix:
    """With those checkpoints only that save enough for their bytes. n_removable: of blocks.reach."""
    n = len(prefix.tokens)
    points = [] if n_removable is None else [p for p in prefix.points if n - p.n_tokens > n_removable]
    while points:
        at = [0, *(point.n_tokens for point in points)]
        saved = [at[i + 1] - at[i] for i in range(len(points))]  # tokens, while the others are there
        if min(saved) < checkpoints.SPACING // 4:
            del points[saved.index(min(saved))]
        elif len(points) > N_POINTS:  # the last two are where texts mostly go on
            del points[saved.index(min(saved[:-2]))]
        else:
            break
    return dataclasses.replace(prefix, points=tuple(points))


def replace(llm: Llama, slot: Slot, prefix: Prefix) -> None:
    """Put a copy in place of what a slot holds. Raises StateError; then the slot is empty."""
    memory = C.llama_get_memory(llm.ctx)
    truncate(memory, slot, 0)
    state = (ctypes.c_uint8 * len(prefix.state)).from_buffer(prefix.state)
    try:
        _set_cells(llm, slot, state)
        n_cells = C.llama_memory_seq_pos_max(memory, slot.id) + 1
        if n_cells != len(prefix.tokens):
            raise StateError("slot", f"expected cells of {len(prefix.tokens)} tokens, found {n_cells}")
    except StateError:
        C.llama_memory_seq_rm(memory, slot.id, -1, -1)
        raise
    slot.tokens = prefix.tokens.tolist()
    if slot.checkpoints is not None:
        slot.checkpoints.adopt(prefix.points, len(slot.tokens))


#
# files
#

CELL_BYTES, HEAD_BYTES = 64, 16 << 20  # more than llama.cpp writes of a cell, and of everything once


def _identity(llm: Llama) -> dict[str, Any]:
    """What a slot's file is bound to; the number of streams is among it, as llama.cpp wants it."""
    return {"program": "subkv slot", "version": 2} | llm.identity()


def most_bytes(llm: Llama, n_ctx: int) -> int:
    """What no copy of a slot exceeds, recurrent state aside: twice the whole cache (adaptive bases come and go), its
    checkpoints, each of a part of it, and what describes them.
    """
    stats = llm.kv_stats()
    return (2 + N_POINTS) * max(stats.bytes_kv, stats.bytes_f16) + CELL_BYTES * n_ctx + HEAD_BYTES


def save(llm: Llama, slot: Slot, path: Path) -> int:
    """Write a slot's tokens and cells, completely or not at all; returns the size in bytes. Raises StateError."""
    head = _identity(llm) | ({"space": slot.space} if slot.space else {})  # whose it is
    saved = container.Container(head, np.array(slot.tokens, np.int32), bytes(_cells(llm, slot)))
    with contextlib.suppress(OSError):  # a key's; what is wrong with it, writing tells
        path.parent.mkdir(mode=0o700)
    with concerning(path="filename"):
        return container.write(path, saved)


def restore(llm: Llama, slot: Slot, path: Path, n_ctx: int, space: str = "") -> int:
    """Replace what a slot holds by a file's, if it was saved for the same `space`; returns the file's size in bytes.

    Raises StateError; then the slot is as it was.
    """
    with concerning(path="filename"):
        saved = container.read(path, "action=save", most_bytes(llm, n_ctx))
        container.check(saved, _identity(llm), path)
        if saved.head.get("space", "") != space:
            raise StateError("path", f"expected a conversation of this API key, found another's in {path.name}")
    tokens = saved.tokens.tolist()
    if not np.all((saved.tokens >= 0) & (saved.tokens < llm.n_vocab())):
        raise StateError("filename", f"expected tokens of this model, found others in {path}")
    if len(tokens) > n_ctx:
        raise StateError("filename", f"expected at most {n_ctx} tokens, found {len(tokens)} in {path}")
    before, points = _cells(llm, slot), () if slot.checkpoints is None else slot.checkpoints.held
    if slot.checkpoints is not None:
        slot.checkpoints.forget()
    try:
        _set_cells(llm, slot, (ctypes.c_uint8 * len(saved.state)).from_buffer_copy(saved.state))
        n_cells = C.llama_memory_seq_pos_max(C.llama_get_memory(llm.ctx), slot.id) + 1
        if n_cells != len(tokens):
            raise StateError("filename", f"expected cells of its {len(tokens)} tokens, found {n_cells}")
    except StateError as error:
        _set_cells(llm, slot, before)
        if slot.checkpoints is not None:
            slot.checkpoints.adopt(points, len(slot.tokens))
        raise StateError("filename", f"{error.reason} ({path})") from error
    slot.tokens, slot.space, slot.unsaved = tokens, space, False
    if slot.checkpoints is not None:
        slot.checkpoints.adopt((), len(tokens))
    return path.stat().st_size
