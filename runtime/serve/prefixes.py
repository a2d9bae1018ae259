"""What the server remembers: prefixes that slots held, in memory and on disk, each found by its owner only.

The engine gives copies of slots (keep) and never waits: a thread cuts them into blocks for the memory, another writes
them to the folder, and each takes a few at a time. A request's thread looks up (find), before its task waits for a
slot, and waits for a disk at most as long as the tokens would take to be evaluated.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from pathlib import Path
from typing import Any

import numpy as np

from runtime.serve.blocks import Blobs, Prefix, pack, reach, unpack
from runtime.serve.shared_store import Store
from runtime.serve.tiers import Disk, Ram
from subkv.base.container import ContainerError, Tokens
from subkv.engine import checkpoints
from subkv.engine.entries import Entry, Head
from subkv.engine.prompt_cache import common_prefix

MIB = 1 << 20
N_QUEUED = 2  # copies of slots that wait to be taken in, and entries that wait to be written
LEAST = 32  # tokens: nothing is kept of fewer
MEASURE_SECONDS = 60.0  # that a request waits for the first measurement; the engine takes none before it anyway
CLOSE_SECONDS = 5.0  # for what is still to be written at the end
SMOOTHING = 0.2  # weight of the newest of several measurements
TRIES = 3  # entries that are tried for a request


class Pace:
    """Seconds per unit as measured, the latest counting most. Takes measurements from any thread."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def took(self, seconds: float, n: int) -> None:
        if n > 0:
            new = seconds / n
            self.seconds = new if not self.seconds else (1 - SMOOTHING) * self.seconds + SMOOTHING * new


Tier = Ram | Disk | Store


@dataclasses.dataclass
class Counts:
    """What has happened since the start, by where prefixes came from: "ram", "disk" or "slot", a busy one's."""

    hits: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(("ram", "disk", "slot"), 0))
    n_restored: int = 0  # tokens
    n_kept: int = 0  # prefixes
    n_dropped: int = 0  # that came too fast to be kept, or did not fit
    n_damaged: int = 0
    n_failures: int = 0  # of the disk


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """A prefix and how much of it a request has use for; where: of Counts.hits; name: of its entry."""

    prefix: Prefix
    n_reached: int
    where: str
    name: str


class Worker:
    """A thread that carries out what is put, a few at a time."""

    def __init__(self, name: str, work: Callable[[Any], None], after: Callable[[], None] = lambda: None) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(N_QUEUED)
        self._work, self._after = work, after
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: Any) -> bool:
        """False: there is no room; nothing waits."""
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            return False
        return True

    @property
    def room(self) -> bool:
        return not self._queue.full()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._work(item)
            except Exception as error:  # ours; what is remembered is never worth a server
                print(f"subkv serve: a prefix was not kept: {type(error).__name__}: {error}", file=sys.stderr)
            finally:
                self._queue.task_done()
                self._after()

    def drained(self, deadline: float) -> bool:
        """Wait until everything is done, at most until time.monotonic() is `deadline`."""
        while self._queue.unfinished_tasks and time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(0.01)
        return not self._queue.unfinished_tasks

    def close(self, deadline: float) -> None:
        self.drained(deadline)
        self.put(None)


class Prefixes:
    """identity: what states are bound to. n_removable: of blocks.reach. max_bytes: more than any copy of a slot takes.
    n_ctx: tokens of a slot.

    ram, disk_bytes: bounds in bytes; folder: or the URL of a store that others share, None: none. Raises nothing: one
    that cannot be used is reported once, on stderr, and costs time only.
    """

    def __init__(
        self,
        identity: dict[str, Any],
        n_removable: int | None,
        max_bytes: int,
        ram: int,
        folder: Path | str | None = None,
        disk_bytes: int = 0,
        n_ctx: int = 1 << 31,
    ) -> None:
        self._identity = json.dumps({"program": "subkv prefix", "version": 1} | identity, sort_keys=True).encode()
        self.n_removable = n_removable
        self.max_bytes, self.n_ctx = max_bytes, n_ctx
        self.ram = Ram(ram)
        self.disk: Disk | Store | None = None
        if isinstance(folder, str):
            self.disk = Store(folder, disk_bytes, max_bytes)
        elif folder is not None:
            self.disk = Disk(folder, disk_bytes, max_bytes)
        self.counts = Counts()
        self.measured = threading.Event()  # what follows is known
        self.evaluating, self.setting = Pace(), Pace()  # a token; a byte of a state
        self.reading = {"ram": Pace(), "disk": Pace()}  # a byte
        self.notify: Callable[[], None] = lambda: None  # there is room again
        self._late: threading.Thread | None = None  # still reads what nobody waits for
        self._told: set[str] = set()
        self._taker = Worker("prefixes", self._take_in, lambda: self.notify())
        self._writer = Worker("prefix writer", self._write)
        if isinstance(self.disk, Disk):  # a store is looked at when something is written: it may take minutes
            self._with_disk("read", lambda disk: disk.make_room(0), "")

    def allow(self, n: int) -> None:
        """Copies of slots may take n bytes more."""
        self.max_bytes += n
        if self.disk is not None:
            self.disk.max_bytes += n

    def close(self) -> None:
        deadline = time.monotonic() + CLOSE_SECONDS
        self._taker.close(deadline)
        self._writer.close(deadline)

    def settle(self, seconds: float = 10.0) -> bool:
        """Wait until what was given is kept; whether it is."""
        deadline = time.monotonic() + seconds
        return self._taker.drained(deadline) and self._writer.drained(deadline)

    def identity(self, space: str) -> bytes:
        """Of the entries of one owner, 32 bytes."""
        digest = hashlib.sha256(self._identity)
        digest.update(space.encode())
        return digest.digest()

    #
    # keeping
    #

    @property
    def keeps(self) -> bool:
        """Whether anything is remembered beside what slots hold."""
        return self.ram.capacity > 0 or self.disk is not None

    @property
    def room(self) -> bool:
        """Whether keep() would take something."""
        return self._taker.room

    def keep(self, prefix: Prefix, space: str) -> bool:
        """Take over a copy of a slot; False: there are too many at once."""
        taken = self._taker.put((prefix, space))
        if not taken:
            self.counts.n_dropped += 1
        return taken

    def _take_in(self, given: tuple[Prefix, str]) -> None:
        prefix, space = given
        identity = self.identity(space)
        if self._covered(self.ram, identity, prefix.tokens):
            return
        entry, blobs = pack(identity, prefix)
        stored = self.ram.store(entry, blobs)
        if stored:
            self._forget_covered(self.ram, entry)
        if self.disk is not None and not self._writer.put((entry, blobs)):
            self.counts.n_dropped += 1
        elif stored or self.disk is not None:
            self.counts.n_kept += 1

    def _covered(self, tier: Tier, identity: bytes, tokens: Tokens) -> bool:
        """Whether an entry serves as well as one of these tokens would; it is then marked as used."""
        for name, head in tier.near(identity, tokens).items():
            if self._reach(head, tokens) == len(tokens) and tier.touch(name):
                return True
        return False

    def _forget_covered(self, tier: Tier, entry: Entry) -> None:
        """Remove the beginnings of a new entry that it serves as well for, but for tokens between two checkpoints."""
        head, name = Head(entry.tokens, entry.more), entry.name()
        for other, held in tier.heads(entry.identity).items():
            begins = other != name and common_prefix(head.tokens, held.tokens) == len(held.tokens)
            if begins and len(held.tokens) - self._reach(head, held.tokens) < checkpoints.SPACING:
                tier.remove(other)

    def _write(self, given: tuple[Entry, Blobs] | str) -> None:
        """given: what is to be written, or the name of an entry that is to go."""
        if isinstance(given, str):
            name = given
            self._with_disk("write", lambda disk: disk.discard(name), None)
            return
        entry, blobs = given

        def write(disk: Disk | Store) -> None:
            if self._covered(disk, entry.identity, entry.tokens):
                return
            if disk.store(entry, blobs):
                self._forget_covered(disk, entry)
            else:
                self.counts.n_dropped += 1

        self._with_disk("write", write, "")

    def _with_disk(self, what: str, work: Callable[[Disk | Store], Any], default: Any) -> Any:
        """work(disk); where it fails, `default`, and somebody hears of it once."""
        assert self.disk is not None
        try:
            return work(self.disk)
        except FileNotFoundError:  # nothing stored yet, or all of it removed
            return default
        except OSError as error:
            self.counts.n_failures += 1
            if what not in self._told:
                self._told.add(what)
                reason = error.strerror or error
                print(f"subkv serve: cannot {what} {self.disk.path}: {reason}; going on without", file=sys.stderr)
            return default

    #
    # finding
    #

    def _reach(self, head: Head, tokens: Tokens) -> int:
        """How many of `tokens` need not be evaluated by who holds an entry."""
        n = common_prefix(head.tokens, tokens)
        points = (point for point, _ in head.more["points"])
        return reach(len(head.tokens), n, points, self.n_removable)

    def find(self, prompt: Sequence[int], space: str, n_held: int) -> Found | None:
        """What saves most of a prompt's evaluation, if it is faster. n_held: tokens that a slot holds of it anyway."""
        tokens = np.asarray(prompt, np.int32)[:-1]  # the last gives the logits
        if len(tokens) - n_held < LEAST or not self.keeps:
            return None
        self.measured.wait(MEASURE_SECONDS)
        identity = self.identity(space)
        found = self._best(self.ram, "ram", identity, tokens, n_held)
        if self.disk is None or (self._late is not None and self._late.is_alive()):
            return found
        least = max(n_held, found.n_reached if found else 0)
        if len(tokens) - least < LEAST:
            return found
        seconds = (len(tokens) - least) * self.evaluating.seconds
        return self._within(seconds, identity, tokens, least) or found

    def _within(self, seconds: float, identity: bytes, tokens: Tokens, n_held: int) -> Found | None:
        """The best of the disk, if it is read within that time; the disk is left alone until it has been."""
        future: Future[Found | None] = Future()
        disk = self.disk
        assert disk is not None

        def read() -> None:
            try:
                future.set_result(
                    self._with_disk("read", lambda disk: self._best(disk, "disk", identity, tokens, n_held), None)
                )
            except Exception as error:
                future.set_exception(error)

        thread = threading.Thread(target=read, name="prefix reader", daemon=True)
        thread.start()
        try:
            return future.result(seconds)
        except LateError:
            self._late = thread
            self.counts.n_failures += 1
            return None

    def _best(self, tier: Tier, where: str, identity: bytes, tokens: Tokens, n_held: int) -> Found | None:
        """The entry of a tier that saves most time, loaded."""
        heads = tier.near(identity, tokens)
        gains = []
        for name, head in heads.items():
            if len(head.tokens) > self.n_ctx:  # of a server with larger slots
                continue
            n = self._reach(head, tokens)
            cost = head.more["bytes"] * (self.reading[where].seconds + self.setting.seconds)
            gain = (n - n_held) * self.evaluating.seconds - cost
            if n - n_held >= LEAST and gain > 0 and head.more["bytes"] <= self.max_bytes:
                gains.append((gain, n, name))
        for _, n, name in sorted(gains, reverse=True)[:TRIES]:
            start = time.perf_counter()
            try:
                loaded = tier.load(name)
                if loaded is None:
                    continue
                entry, blobs = loaded
                prefix = unpack(entry, blobs.__getitem__, self.max_bytes)
            except ContainerError as error:
                self.counts.n_damaged += 1
                tier.discard(name)
                print(f"subkv serve: dropped the damaged prefix {name}: {error}", file=sys.stderr)
                continue
            self.reading[where].took(time.perf_counter() - start, prefix.n_bytes)
            if where == "disk":
                self.ram.store(entry, blobs)
            return Found(prefix, n, where, name)
        return None

    def common(self, prompt: Sequence[int], space: str) -> int:
        """How many tokens a prompt has in common with one in memory."""
        tokens = np.asarray(prompt, np.int32)
        heads = self.ram.heads(self.identity(space)).values()
        return max((common_prefix(head.tokens, tokens) for head in heads), default=0)

    def restored(self, found: Found, n_gained: int) -> None:
        """A slot holds what was found."""
        self.counts.hits[found.where] += 1
        self.counts.n_restored += n_gained

    def refused(self, found: Found) -> None:
        """The cache does not take what was found, although nothing has changed it: it is not to be found again."""
        self.counts.n_damaged += 1
        self.ram.remove(found.name)
        if self.disk is not None and found.name:
            self._writer.put(found.name)
