"""Forged states: changed values with a valid checksum.

A state, of one sequence or of all: llama.cpp's beginning, subkv's head, size of the body u64, body, checksum u64
(runtime/native/hook/state.cpp), and the last three again for a sliding half.
"""

from __future__ import annotations

import struct

MAGIC, FINGERPRINT, BOUND = b"subkvst6", 64, "<6iQ"  # our head; then a u64 of each sequence, how its positions moved
HEAD = 8 + len(MAGIC) + FINGERPRINT + struct.calcsize(BOUND) + 8
"""Bytes before the size in a state of one sequence, with llama.cpp's magic and sequence."""


def checksum(body: bytes) -> int:
    """FNV-1a, 64 bits; a first body's is one with the head's."""
    total = 0xCBF29CE484222325
    for byte in body:
        total = (total ^ byte) * 0x100000001B3 % 2**64
    return total


def _head(state: bytes) -> tuple[int, int]:
    """Where our head begins and ends."""
    first = state.index(MAGIC)
    at = first + len(MAGIC) + FINGERPRINT
    n_seq = struct.unpack_from(BOUND, state, at)[3]  # 0: of one sequence
    return first, at + struct.calcsize(BOUND) + 8 * max(1, n_seq)


def _body(state: bytes, half: int) -> tuple[int, int]:
    """Offset of the size of a body, and that size; half 1: the sliding half's."""
    at = _head(state)[1]
    for _ in range(half):
        at += 8 + int(struct.unpack_from("<Q", state, at)[0]) + 8
    return at, int(struct.unpack_from("<Q", state, at)[0])


def body(state: bytes, half: int = 0) -> bytes:
    at, size = _body(state, half)
    return state[at + 8 :][:size]


def with_body(state: bytes, body: bytes, half: int = 0) -> bytes:
    """`state` with another body, of any size; half 1: the sliding, or recurrent, half's."""
    at, size = _body(state, half)
    first, last = _head(state)
    covered = b"" if half else state[first:last]
    parts = struct.pack("<Q", len(body)), body, struct.pack("<Q", checksum(covered + body))
    return state[:at] + b"".join(parts) + state[at + 8 + size + 8 :]


def body_value(state: bytes, offset: int, half: int = 0) -> int:
    """The i32 at an offset of a body."""
    return int(struct.unpack_from("<i", state, _body(state, half)[0] + 8 + offset)[0])


def forged(state: bytes, values: dict[int, int], half: int = 0) -> bytes:
    """`state` with i32 values at these offsets of its body; half 1: of the sliding half's."""
    changed = bytearray(body(state, half))
    for offset, value in values.items():
        struct.pack_into("<i", changed, offset, value)
    return with_body(state, bytes(changed), half)


def window_at(state: bytes, n_slots: int) -> int:
    """Offset in the body of the positions of the window of one sequence: i32 [n_slots], after their number."""
    return body(state).rindex(struct.pack("<2i", n_slots, 0)) + 4  # a window's first slot is that of position 0


def without_recent_rows(state: bytes, window: tuple[int, int, int]) -> bytes:
    """The state of a sequence whose window (sinks, recent rows, rollback) has lost all its rows except sinks."""
    n_slots = sum(window)
    at = window_at(state, n_slots)
    return forged(state, {at + 4 * slot: -1 for slot in range(window[0], n_slots)})
