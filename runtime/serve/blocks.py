"""What a slot held, in pieces: blocks of rows, which equal beginnings of texts have in common, and the rest.

A state lists the rows of a tensor one after the other, tensor after tensor. A block is the rows of ROWS tokens of all
of them. It is addressed by its content, so ten conversations that begin alike share their first blocks, whoever
evaluated them, and a damaged one is noticed. Where a state has no rows that are found, it is all rest: nothing is
shared, nothing is lost.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from subkv.base.container import ContainerError, Tokens
from subkv.engine.checkpoints import Checkpoint
from subkv.engine.entries import Entry

ROWS = 256  # tokens of a block
HEADER = struct.Struct("<iQ")  # of a tensor's rows: its type, bytes of a row
MAX_TYPE, MAX_ROW, MAX_LAYERS = 256, 1 << 24, 1 << 12
MAX_BLOCKS, MAX_POINTS = 1 << 16, 1 << 6
CELLS = (12, 20)  # bytes of a cell: position, sequences; of models whose positions have three numbers

Region = tuple[int, int]  # offset of the rows of a tensor, bytes of one
Blobs = dict[str, bytes]


@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    """What a slot held: tokens [n] i32, llama.cpp's state of the sequence, and checkpoints before its end."""

    tokens: Tokens
    state: bytes | memoryview
    points: tuple[Checkpoint, ...] = ()

    @property
    def n_bytes(self) -> int:
        return len(self.state) + sum(len(point.state) for point in self.points)

    def reach(self, n: int, n_removable: int | None) -> int:
        """How many of its first n tokens are left when the later ones are removed."""
        return reach(len(self.tokens), n, (point.n_tokens for point in self.points), n_removable)


def reach(n_held: int, n: int, points: Iterable[int], n_removable: int | None) -> int:
    """How many of n_held tokens stay when those from n on are removed. points: positions of checkpoints.

    n_removable: the longest tail that can be removed without one, None: any.
    """
    if n_removable is None or n_held - n <= n_removable:
        return n
    return max((point for point in points if point <= n), default=0)


def pack(identity: bytes, prefix: Prefix) -> tuple[Entry, Blobs]:
    """An entry, whose state is the rest, and what it refers to, by address."""
    state = memoryview(prefix.state).cast("B")
    n = len(prefix.tokens)
    layout = regions(state, n)
    n_blocks = n // ROWS if layout else 0
    blobs: Blobs = {}

    def stored(data: bytes) -> str:
        name = address(identity, data)
        blobs[name] = data
        return name

    blocks = []
    for i in range(n_blocks):
        first, last = i * ROWS, (i + 1) * ROWS
        blocks.append(stored(b"".join(state[at + first * row : at + last * row] for at, row in layout)))
    points = [[point.n_tokens, stored(bytes(point.state))] for point in prefix.points]
    rest, end = [], 0
    for at, row in layout if n_blocks else []:
        rest.append(state[end:at])
        end = at + n_blocks * ROWS * row
    rest.append(state[end:])
    more = {"layout": [list(region) for region in layout], "blocks": blocks, "points": points, "bytes": prefix.n_bytes}
    return Entry(identity, prefix.tokens, b"".join(rest), more), blobs


def unpack(entry: Entry, blob: Callable[[str], bytes], max_bytes: int) -> Prefix:
    """The prefix again. blob: finds one by its address. Raises ContainerError, also for more than max_bytes."""
    layout, names, points = references(entry.more)
    blocks = [blob(name) for name in names]
    size = sum(row for _, row in layout) * ROWS
    if any(len(block) != size for block in blocks):
        raise ContainerError(f"expected blocks of {size} bytes, found others")
    total = len(entry.state) + size * len(blocks)
    if total > max_bytes:
        raise ContainerError(f"expected a state of at most {max_bytes} bytes, found {total}")
    state = bytearray(total)
    rest, taken, end = memoryview(entry.state), 0, 0
    within = 0  # a block
    for at, row in layout if blocks else []:
        n = at - end
        if n < 0 or at + row * ROWS * len(blocks) > total:
            raise ContainerError("expected rows one after the other, found others")
        state[end:at] = rest[taken : taken + n]
        taken, end = taken + n, at
        for block in blocks:
            state[end : end + row * ROWS] = memoryview(block)[within : within + row * ROWS]
            end += row * ROWS
        within += row * ROWS
    state[end:] = rest[taken:]
    if len(state) != total:
        raise ContainerError("expected a state as long as its pieces, found another")
    held = [Checkpoint(n, _array(blob(name))) for n, name in points]
    return Prefix(entry.tokens, memoryview(state), tuple(held))


def _array(data: bytes) -> ctypes.Array[ctypes.c_uint8]:
    return (ctypes.c_uint8 * len(data)).from_buffer_copy(data)


def references(more: Mapping[str, Any]) -> tuple[list[Region], list[str], list[tuple[int, str]]]:
    """Regions, addresses of blocks and of checkpoints, as an entry's head lists them. Raises ContainerError."""
    try:
        layout = [(_count(at), _count(row)) for at, row in more["layout"]]
        blocks = [_address(name) for name in more["blocks"]]
        points = [(_count(n), _address(name)) for n, name in more["points"]]
        _count(more["bytes"])
    except (KeyError, TypeError, ValueError) as error:
        raise ContainerError("its head does not say what it consists of") from error
    if len(layout) > 2 * MAX_LAYERS or len(blocks) > MAX_BLOCKS or len(points) > MAX_POINTS:
        raise ContainerError("its head lists more than any state has")
    return layout, blocks, points


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 48:
        raise ValueError
    return value


def _address(value: Any) -> str:
    if not isinstance(value, str) or len(bytes.fromhex(value)) != hashlib.sha256().digest_size:
        raise ValueError
    return value.lower()


def address(identity: bytes, data: bytes) -> str:
    """Of a blob of one kind of context and one owner."""
    digest = hashlib.sha256(identity)
    digest.update(data)
    return digest.hexdigest()


def regions(state: memoryview, n: int) -> list[Region]:
    """Where the rows of n cells lie in a state; empty where it has none that are found.

    llama.cpp writes: the number of cells, the cells from position 0 on, whether values are by element, the number of
    layers, and for the keys and then the values of each: type, bytes of a row, n rows.
    """
    if n < ROWS:
        return []
    start = bytes(state[: 1 << 20]).find(struct.pack("<Iii", n, 0, 1))
    for cell in CELLS if start >= 0 else ():
        at = start + 4 + n * cell
        if at + 8 > len(state):
            continue
        by_element, n_layer = struct.unpack_from("<II", state, at)
        if by_element <= 1 and 0 < n_layer <= MAX_LAYERS and (found := _chain(state, at + 8, n, 2 * n_layer)):
            return found
    return []


def _chain(state: memoryview, at: int, n: int, most: int) -> list[Region]:
    """Rows of n cells behind one header after another, from an offset on."""
    found: list[Region] = []
    while len(found) < most and at + HEADER.size <= len(state):
        kind, row = HEADER.unpack_from(state, at)
        at += HEADER.size
        if not (0 <= kind < MAX_TYPE and 0 < row < MAX_ROW and at + n * row <= len(state)):
            break
        found.append((at, row))
        at += n * row
    return found


def own_bytes(entries: Mapping[str, Sequence[str]], sizes: Mapping[str, int]) -> dict[str, int]:
    """Bytes that would be free without each of the entries: of the blobs it lists that no other does."""
    counts: dict[str, int] = {}
    for names in entries.values():
        for name in set(names):
            counts[name] = counts.get(name, 0) + 1
    return {key: sum(sizes.get(name, 0) for name in set(names) if counts[name] == 1) for key, names in entries.items()}
