"""The shared memory of a block for ptx.py, which finds races.

A race is two accesses to a byte, one of which writes, with nothing that orders them: a barrier of the block if two
warps make them, that or bar.warp.sync if two lanes of a warp do. Shuffles order no memory. A copy (cp.async) writes
at some time between its start and the wait of its warp; no lane may read or write the bytes in between.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]  # of bytes, [lanes][bytes of a lane]
NOBODY = -1
SOME_LANE = -1  # of an instruction that does not tell which of its lanes accesses a byte


def bits_of(lane: Places) -> npt.NDArray[np.uint32]:
    """A mask of the lanes that may be meant."""
    return np.where(lane == SOME_LANE, np.uint32(0xFFFFFFFF), np.uint32(1) << np.maximum(lane, 0).astype(np.uint32))


class Race(AssertionError):
    """Two accesses that nothing orders. `before` is the instruction of the first one, or NOBODY."""

    def __init__(self, what: str, before: int) -> None:
        super().__init__(what)
        self.before = before


class SharedMemory:
    def __init__(self, size: int) -> None:
        self.bytes = np.full(size, 0xFF, np.uint8)
        self.writer = np.full(size, NOBODY, np.int8)  # the warp that wrote a byte since the last barrier
        self.readers = np.zeros(size, np.uint32)  # a bit for each warp that read it since then
        # Of the last access of a warp: when (by its synchronisations), the lane that wrote, a bit for each that read.
        self.written_at, self.read_at = (np.full(size, NOBODY, np.int64) for _ in range(2))
        self.lane = np.full(size, NOBODY, np.int8)
        self.lanes = np.zeros(size, np.uint32)
        self.wrote, self.did_read = (np.full(size, NOBODY, np.int32) for _ in range(2))  # the last instructions
        self.instruction = NOBODY  # the one that runs
        self.copied = np.zeros(size, bool)  # bytes of copies that are not waited for
        self.now: dict[int, int] = {}  # by warp: the number of its last synchronisation, which are counted together
        self.n_synced = 0
        self.copies: dict[int, list[list[tuple[Places, Bytes, Places]]]] = {}  # by warp, in groups; the last is open

    def barrier(self) -> None:
        """All warps have reached a barrier."""
        self.writer[:] = NOBODY
        self.readers[:] = 0
        self.now.clear()

    def synchronise(self, warp: int) -> None:
        self.now.pop(warp, None)

    def moment(self, warp: int) -> int:
        if warp not in self.now:
            self.n_synced += 1
            self.now[warp] = self.n_synced
        return self.now[warp]

    def expect(self, right: npt.NDArray[np.bool_], places: Places, what: str, before: Places) -> None:
        if not right.all():
            first = int(places[~right].min())
            raise Race(f"shared memory at {first}: {what}", int(before[first]))

    def access(self, what: str, warp: int, lanes: Places, places: Places) -> tuple[int, Places]:
        """These lanes read or write these bytes after all writes -> the moment, and the lane of each byte."""
        assert places.max() < len(self.bytes), f"shared: {len(self.bytes)} bytes expected, {places.max() + 1} {what}"
        now, lane = self.moment(warp), np.broadcast_to(lanes[:, None], places.shape)
        self.expect(~self.copied[places], places, f"{what} before the wait for its copy", self.wrote)
        writer = self.writer[places]
        self.expect((writer == NOBODY) | (writer == warp), places, f"{what} after a write of another warp", self.wrote)
        mine = (self.written_at[places] != now) | (self.lane[places] == lane) & (lane != SOME_LANE)
        self.expect(mine, places, f"{what} after a write of another lane", self.wrote)
        return now, lane

    def read(self, warp: int, lanes: Places, places: Places) -> Bytes:
        now, lane = self.access("read", warp, lanes, places)
        old = self.read_at[places] != now
        self.lanes[places[old]] = 0
        self.read_at[places] = now
        np.bitwise_or.at(self.lanes, places, bits_of(lane))
        self.did_read[places] = self.instruction
        self.readers[places] |= np.uint32(1 << warp)
        return self.bytes[places]

    def write(self, warp: int, lanes: Places, places: Places, data: Bytes) -> None:
        self.claim(warp, lanes, places)
        self.bytes[places] = data
        self.expect(self.bytes[places] == data, places, "written by two lanes at once", self.wrote)

    def claim(self, warp: int, lanes: Places, places: Places) -> None:
        """These lanes write these bytes."""
        now, lane = self.access("written", warp, lanes, places)
        others = self.readers[places] & ~np.uint32(1 << warp)
        self.expect(others == 0, places, "written after a read of another warp", self.did_read)
        mine = (self.read_at[places] != now) | (self.lanes[places] == bits_of(lane)) & (lane != SOME_LANE)
        self.expect(mine, places, "written after a read of another lane", self.did_read)
        self.writer[places], self.wrote[places] = warp, self.instruction
        self.written_at[places] = now
        self.lane[places] = lane

    def copy(self, warp: int, lanes: Places, places: Places, data: Bytes) -> None:
        """Starts copies, which the warp's next group includes."""
        self.claim(warp, lanes, places)
        self.copied[places] = True
        self.bytes[places] = 0xFF
        self.copies.setdefault(warp, [[]])[-1].append((lanes, data, places))

    def commit(self, warp: int) -> None:
        self.copies.setdefault(warp, [[]]).append([])

    def wait(self, warp: int, pending: int) -> None:
        """Completes all of a warp's groups but the last `pending`."""
        groups = self.copies.setdefault(warp, [[]])
        while len(groups) - 1 > pending:
            for lanes, data, places in groups.pop(0):
                self.copied[places] = False
                self.claim(warp, lanes, places)
                self.bytes[places] = data

    def end(self) -> None:
        """The block ends; its warps have waited for all copies."""
        assert not self.copied.any(), "a copy is not waited for"
