"""Prefixes in a store that replicas share, behind fsspec: a folder, memory, S3, whatever has a plugin.

What lies there, side by side, never changes but for the marks:

    <context>-<tokens>.prompt   an entry, as in a server's folder (subkv.engine.entries)
    <content>.rows              a blob, addressed by its content (runtime.serve.blocks)
    <beginning>.mark            name of the newest entry whose tokens begin so

There is no listing to read and no lock to take: a prompt's marks are asked for all at once, the longest one that
is there names an entry, and this its blobs. Everything is checked when it is read. Blobs are written first, marks last,
so a replica that stops anywhere leaves nothing that misleads; two that write one entry both write what they name.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any

from runtime.serve.blocks import ROWS, Blobs, address, references
from runtime.serve.deadline import Deadline
from runtime.serve.tiers import looked
from subkv.base.container import FIXED, N_DIGEST, START, ContainerError, Tokens, read_whole
from subkv.base.errors import SubkvError, install
from subkv.base.files import STALE_SECONDS, TEMPORARY, mark_used, replacing
from subkv.engine.entries import OWN, Entry, Head, prefix

NAMED = re.compile(r"[0-9a-f]{64}\.(rows|mark)")
GRAIN, N_LATEST = 32, 128  # tokens between marks, and how many of a prompt's latest are asked for
SECONDS = 10.0  # for each call
CALL_BYTES = 8 << 20  # that one call moves, but for a blob that is larger
N_AT_ONCE = 256  # files that one call asks for: some stores answer one by one
TRIES = 2  # entries that are read for a prompt
N_KNOWN = 4096  # heads and names that are kept in mind
PRESENT_SECONDS = 600.0  # that what was seen is taken to be there
LOOK_SHARE = 16  # of the capacity: after so much is written the store is listed again
LOOK_CALLS = 60  # the time of so many calls is given to a listing
DATES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")


def marked(n: int) -> list[int]:
    """Lengths of beginnings of n tokens that a mark is left at: close at first, then a quarter apart, and the end."""
    found, at = [], GRAIN
    while at <= n:
        found.append(at)
        at += max(GRAIN, 1 << max(at.bit_length() - 3, 0))
    last = n // GRAIN * GRAIN
    return found if not last or last in found else [*found, last]


def asked(n: int) -> list[int]:
    """Lengths at which a prompt of n tokens looks for marks, longest first: also where a turn before may have ended."""
    last = n // GRAIN
    latest = {at * GRAIN for at in range(max(last - N_LATEST, 0) + 1, last + 1)}
    return sorted(latest.union(marked(n)), reverse=True)


class Store:
    """A tier of Prefixes, as tiers.Disk is, that other machines read and write, too. Methods raise OSError.

    capacity: bytes, 0: the store bounds itself. Several replicas look at different times, so there may be a bit more.
    """

    def __init__(self, url: str, capacity: int, max_bytes: int, seconds: float = SECONDS) -> None:
        """max_bytes: more than any state of this context takes. Raises SubkvError for a URL that nothing is behind."""
        try:
            import fsspec  # of the extra `cluster`
        except ImportError as error:
            raise SubkvError("cache_store", f"expected package fsspec, found none; {install('cluster')}") from error
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise SubkvError("cache_store", f"expected a URL of fsspec, found {url!r} ({error})") from error
        protocols = self._fs.protocol
        self._local = "file" in ((protocols,) if isinstance(protocols, str) else protocols)
        self.path = url  # for messages
        self.capacity, self.max_bytes = capacity, max_bytes
        self.n_bytes = 0  # as of the last look
        self.deadline = Deadline(seconds)
        self._looking = Deadline(LOOK_CALLS * seconds, pause=0.0)  # a listing takes longer than a file, and may be late
        self._lock = threading.RLock()
        self._known: OrderedDict[str, tuple[bytes, Head]] = OrderedDict()  # identities and heads of entries
        self._present: OrderedDict[str, float] = OrderedDict()  # names, and when they were last seen
        self._read: OrderedDict[str, Entry] = OrderedDict()  # the latest, about to be loaded
        self._damaged: set[str] = set()  # that could not be removed
        self._astray: dict[str, str] = {}  # marks, and the entries they named that were gone
        self._n_written: int | None = None  # bytes since the last look
        self._made = False

    #
    # calls
    #

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _cat(self, names: Sequence[str], start: int, ends: Sequence[int]) -> list[bytes | None]:
        """A range of each file; None: there is no such file."""
        if not names:
            return []
        answers: list[bytes | None] = []
        for at in range(0, len(names), N_AT_ONCE):
            group = slice(at, at + N_AT_ONCE)
            paths = [self._path(name) for name in names[group]]
            answers += self._cat_now(paths, start, list(ends[group]))
        return answers

    def _cat_now(self, paths: list[str], start: int, ends: list[int]) -> list[bytes | None]:
        """In one call."""
        found = self.deadline.call(lambda: self._fs.cat_ranges(paths, [start] * len(paths), ends, on_error="return"))
        return [self._answer(path, start, one) for path, one in zip(paths, found, strict=True)]

    def _answer(self, path: str, start: int, found: Any) -> bytes | None:
        """What a file has from `start` on; some stores refuse a range behind its end."""
        if not isinstance(found, Exception):
            return bytes(found)
        if isinstance(found, FileNotFoundError):
            return None
        with contextlib.suppress(OSError):
            size = self.deadline.call(lambda: self._fs.info(path)).get("size")
            if size is not None and size <= start:
                return b""
        raise OSError(f"{type(found).__name__}: {found}") from found

    def _pipe(self, files: dict[str, bytes]) -> None:
        self.deadline.call(lambda: self._write_now(files))
        with self._lock:
            for name in files:
                self._see(name)
            self._n_written = (self._n_written or 0) + sum(map(len, files.values()))

    def _write_now(self, files: dict[str, bytes]) -> None:
        if self._local:  # appears whole or not at all, as an object store's does
            Path(self._root).mkdir(mode=0o700, parents=True, exist_ok=True)
            for name, data in files.items():
                with replacing(Path(self._path(name))) as handle:
                    handle.write(data)
            return
        if not self._made:
            with contextlib.suppress(Exception):  # a store without folders
                self._fs.makedirs(self._root, exist_ok=True)
            self._made = True
        self._fs.pipe({self._path(name): data for name, data in files.items()})

    def _see(self, name: str) -> None:
        self._present[name] = time.monotonic()
        self._present.move_to_end(name)
        while len(self._present) > 16 * N_KNOWN:
            self._present.popitem(last=False)

    def touch(self, name: str) -> bool:
        """Mark an entry and what belongs to it as used now; False: some of what it holds is gone."""
        with self._lock:
            identity, head = self._known.get(name, (b"", None))
        if head is None:
            return False
        held = [name, *_blobs(head.more)]
        if None in self._cat(held, 0, [1] * len(held)):
            self._forget(held)
            return False
        self._use([*held, *self._marks(identity, head.tokens)])
        return True

    def _use(self, names: Sequence[str]) -> None:
        """Mark files as used now, where the store has a time for that: else their order is that of writing."""

        def mark() -> None:
            for name in names:
                with contextlib.suppress(OSError):
                    mark_used(Path(self._path(name)))

        if self._local:
            with contextlib.suppress(OSError):
                self.deadline.call(mark)

    def _forget(self, names: Sequence[str]) -> None:
        """What is not there, or may not be, is looked for again."""
        with self._lock:
            for name in names:
                self._known.pop(name, None)
                self._present.pop(name, None)
                self._read.pop(name, None)

    def remove(self, name: str) -> None:
        self._forget([name])
        with contextlib.suppress(OSError):
            self.deadline.call(lambda: self._fs.rm_file(self._path(name)))

    def discard(self, name: str) -> None:
        """Remove a damaged entry, or at least never read it again."""
        self._damaged.add(name)
        self.remove(name)

    #
    # reading
    #

    @staticmethod
    def _mark(identity: bytes, tokens: Tokens) -> str:
        digest = hashlib.sha256(identity)
        digest.update(tokens.astype("<i4").tobytes())
        return f"{digest.hexdigest()}.mark"

    def _marks(self, identity: bytes, tokens: Tokens) -> list[str]:
        """Of an entry of these tokens."""
        return [self._mark(identity, tokens[:n]) for n in marked(len(tokens))]

    def heads(self, identity: bytes) -> dict[str, Head]:
        """Of entries that this replica has seen, by name."""
        begin = prefix(identity)
        with self._lock:
            return {name: head for name, (_, head) in self._known.items() if name.startswith(begin)}

    def near(self, identity: bytes, tokens: Tokens) -> dict[str, Head]:
        """Heads of the entries that have the longest beginnings in common with these tokens, by name."""
        marks = [self._mark(identity, tokens[:n]) for n in asked(len(tokens))]
        named: dict[str, list[str]] = {}  # and the marks that name it
        begin = prefix(identity)
        for mark, found in zip(marks, self._cat(marks, 0, [128] * len(marks)), strict=True):
            name = (found or b"").decode("latin-1")
            if OWN.fullmatch(name) and name.startswith(begin) and name not in self._damaged:
                named.setdefault(name, []).append(mark)
        heads: dict[str, Head] = {}
        left = list(named)
        while left and len(heads) < TRIES:
            name = left.pop(0)
            with self._lock:
                _, head = self._known.get(name, (b"", None))
            if head is None:
                try:
                    head = None if (entry := self._entry(name)) is None else Head(entry.tokens, entry.more)
                except ContainerError:
                    self.discard(name)
                    continue
            if head is not None:
                heads[name] = head
                continue
            lost = {name}
            if left:  # where one is gone others may be, too: they are asked for at once
                there = self._cat(left, 0, [1] * len(left))
                lost |= {name for name, found in zip(left, there, strict=True) if found is None}
                left = [name for name in left if name not in lost]
            with self._lock:
                self._astray |= {mark: name for name in lost for mark in named[name]}
        return heads

    def _sweep(self) -> None:
        """Remove the marks that were seen to lead nowhere, but for those that lead somewhere now."""
        with self._lock:
            astray, self._astray = self._astray, {}
        marks = self._cat(list(astray), 0, [128] * len(astray))
        still = [mark for mark, found in zip(astray, marks, strict=True) if found == astray[mark].encode()]
        entries = list(dict.fromkeys(astray[mark] for mark in still))
        there = self._cat(entries, 0, [1] * len(entries))
        gone = {name for name, found in zip(entries, there, strict=True) if found is None}
        for mark in still:
            if astray[mark] in gone:
                self.remove(mark)

    def _know(self, entry: Entry) -> None:
        name = entry.name()
        with self._lock:
            self._known[name] = entry.identity, Head(entry.tokens, entry.more)
            self._known.move_to_end(name)
            while len(self._known) > N_KNOWN:
                self._known.popitem(last=False)

    def _entry(self, name: str) -> Entry | None:
        """An entry, checked as a whole; None: it is gone. Raises ContainerError."""
        data = self._cat([name], 0, [CALL_BYTES])[0]
        if data is None:
            return None
        if len(data) < START:
            raise ContainerError("it is cut")
        _, n_head, n_tokens, n_state = FIXED.unpack_from(data)
        size = START + n_head + 4 * n_tokens + n_state + N_DIGEST
        if size > 2 * self.max_bytes:
            raise ContainerError("it is larger than any state")
        pieces = [data]
        for at in range(len(data), size, CALL_BYTES):
            pieces.append(self._cat([name], at, [min(at + CALL_BYTES, size)])[0] or b"")
        found = read_whole(io.BytesIO(b"".join(pieces)))
        more = dict(found.head)
        try:
            entry = Entry(bytes.fromhex(more.pop("identity")), found.tokens, found.state, more)
        except (KeyError, TypeError, ValueError) as error:
            raise ContainerError("it is bound to no context") from error
        references(entry.more)
        if entry.name() != name:
            raise ContainerError("its name belongs to other tokens")
        self._know(entry)
        with self._lock:
            self._read[name] = entry
            while len(self._read) > TRIES:
                self._read.popitem(last=False)
        return entry

    def load(self, name: str) -> tuple[Entry, Blobs] | None:
        """An entry and what it refers to, all of it checked; None: it is gone, or a part of it is.

        Raises ContainerError for a damaged one.
        """
        with self._lock:
            entry = self._read.pop(name, None)
        entry = entry or self._entry(name)
        if entry is None:
            self.remove(name)
            return None
        with self._lock:
            self._read.pop(name, None)
        layout, blocks, points = references(entry.more)
        size = sum(row for _, row in layout) * ROWS
        found: Blobs = {}
        left = self.max_bytes
        sizes = dict.fromkeys((f"{blob}.rows" for blob in blocks), size)
        sizes |= dict.fromkeys((f"{blob}.rows" for _, blob in points), 0)
        for batch in _batches(sizes):
            most = [(sizes[blob] or left) + 1 for blob in batch]
            for blob, data in zip(batch, self._cat(batch, 0, most), strict=True):
                if data is None:  # what was used at the same time may be gone at the same time
                    self._forget(list(sizes))
                    self.remove(name)
                    return None
                left -= len(data)
                if left < 0:
                    raise ContainerError("its pieces are larger than any state")
                if address(entry.identity, data) != blob.removesuffix(".rows"):
                    self.remove(blob)
                    raise ContainerError("checksum of a block differs")
                found[blob.removesuffix(".rows")] = data
        self._use([name, *sizes, *self._marks(entry.identity, entry.tokens)])
        return entry, found

    #
    # writing
    #

    def store(self, entry: Entry, blobs: Blobs) -> bool:
        """Write an entry: its blobs, itself, its marks. False where it is larger than everything may be."""
        n = len(entry.state) + sum(map(len, blobs.values()))
        if self.capacity and n > self.capacity:
            return False
        if entry.name() in self._known:  # and yet it is not there: what it refers to may have gone with it
            self._forget([f"{name}.rows" for name in blobs])
        missing = self._missing({f"{name}.rows": data for name, data in blobs.items()})
        self.make_room(len(entry.state) + sum(map(len, missing.values())), {f"{name}.rows" for name in blobs})
        for batch in _batches({name: len(data) for name, data in missing.items()}):
            self._pipe({name: missing[name] for name in batch})
        name, data = entry.name(), b"".join(entry.container().pieces())
        self._pipe({name: data})
        self._know(entry)
        self._damaged.discard(name)
        self._pipe(dict.fromkeys(self._marks(entry.identity, entry.tokens), name.encode()))
        with contextlib.suppress(OSError):  # what was to be written is there
            self._sweep()
        return True

    def _missing(self, files: dict[str, bytes]) -> dict[str, bytes]:
        """Those that the store lacks, or holds at another length."""
        since = time.monotonic() - PRESENT_SECONDS
        with self._lock:
            unsure = [name for name in files if self._present.get(name, since) <= since]
        by_length: dict[int, list[str]] = {}
        for name in unsure:
            by_length.setdefault(len(files[name]), []).append(name)
        missing, there = dict[str, bytes](), list[str]()
        for length, names in by_length.items():  # a byte where the file should end, and none after it
            for name, found in zip(names, self._cat(names, max(length - 1, 0), [length + 1] * len(names)), strict=True):
                if found is None or len(found) != min(length, 1):
                    missing[name] = files[name]
                else:
                    there.append(name)
        self._use(there)
        with self._lock:
            for name in there:
                self._see(name)
        return missing

    def make_room(self, n: int, spared: Set[str] = frozenset()) -> None:
        """Give up what was used longest ago until n bytes more are within the bound; looks now and then only.

        spared: names of blobs that are in use.
        """
        if not self.capacity:
            return
        with self._lock:
            written = self._n_written
            if written is not None and written + n < self.capacity // LOOK_SHARE:
                self.n_bytes += n
                return
        files = dict(self._look())
        with self._lock:  # what could not be looked at is looked at next time
            self._n_written = (self._n_written or 0) - (written or 0)
        total = sum(size for size, _ in files.values())
        newest = max((used for _, used in files.values()), default=0.0)  # the store's clock, not ours
        for name in sorted(files.keys() - spared, key=lambda name: files[name][1]):
            size, used = files[name]
            stale = TEMPORARY.fullmatch(name) and newest - used > STALE_SECONDS
            if stale or total + n > self.capacity - self.capacity // LOOK_SHARE:
                self.remove(name)
                total -= size
        self.n_bytes = total + n

    def _look(self) -> Iterator[tuple[str, tuple[int, float]]]:
        """Name, bytes and time of the latest use or writing of all that was written here; others are left alone."""
        for name, size, used in self._looking.call(self._listed):
            temporary = TEMPORARY.fullmatch(name)
            own = temporary["name"] if temporary else name
            if OWN.fullmatch(own) or NAMED.fullmatch(own):
                yield name, (size, used)

    def _listed(self) -> list[tuple[str, int, float]]:
        """Name, bytes and time of every file; folders beside them are others'."""
        try:
            if self._local:
                return [(name, file.n_bytes, file.used) for name, file in looked(Path(self._root)).items()]
            self._fs.invalidate_cache()
            found = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:  # nothing was written yet
            return []
        files = (about for about in found if about.get("type") == "file")
        return [(about["name"].rsplit("/", 1)[-1], about.get("size") or 0, _seconds(about)) for about in files]

    @property
    def n_entries(self) -> int:
        return len(self._known)


def _blobs(more: dict[str, Any]) -> list[str]:
    """Names of what an entry refers to."""
    _, blocks, points = references(more)
    return list(dict.fromkeys(f"{blob}.rows" for blob in (*blocks, *(blob for _, blob in points))))


def _batches(sizes: dict[str, int]) -> Iterator[list[str]]:
    """Names in groups of at most CALL_BYTES together; of size 0: that nobody knows, one by one."""
    batch: list[str] = []
    total = 0
    for name, size in sizes.items():
        if batch and (not size or total + size > CALL_BYTES):
            yield batch
            batch, total = [], 0
        batch.append(name)
        total += size or CALL_BYTES
    if batch:
        yield batch


def _seconds(about: dict[str, Any]) -> float:
    """When a file was used or written last, as its store tells it; 0: it does not."""
    value: Any = next((about[key] for key in DATES if about.get(key) is not None), 0.0)
    with contextlib.suppress(AttributeError):
        value = value.timestamp()
    return float(value) if isinstance(value, (int, float)) else 0.0
