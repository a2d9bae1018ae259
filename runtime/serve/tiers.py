"""Where prefixes are kept: in memory, and in a folder. Both hold entries and, once, the blobs that these refer to.

Beyond its bound a tier gives up the entry that has cost most bytes for the longest time and saves fewest tokens: age ×
bytes of its own ÷ tokens. What the folder holds of other models, other versions and servers that were killed goes in
the order of its latest use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import threading
import time
from collections.abc import Set
from pathlib import Path

from runtime.serve.blocks import Blobs, address, own_bytes, references
from subkv.base.container import ContainerError, Tokens
from subkv.base.files import STALE_SECONDS, TEMPORARY, is_regular, mark_used, open_regular, replacing
from subkv.engine.entries import OWN, Entry, Folder, Head, prefix

BLOB = re.compile(r"[0-9a-f]{64}\.rows")


def _named(more: dict[str, object]) -> list[str]:
    """Addresses of an entry's blobs."""
    _, blocks, points = references(more)
    return [*blocks, *(name for _, name in points)]


def _worst(uses: dict[str, float], own: dict[str, int], n_tokens: dict[str, int], now: float) -> str:
    """Which of the entries to give up. uses: seconds of the latest; a clock may have been set back."""

    def cost(name: str) -> float:
        return max(now - uses[name], 1.0) * own[name] / max(n_tokens[name], 1)

    return max(uses, key=lambda name: (cost(name), -uses[name]))


class Ram:
    """Entries in memory, at most `capacity` bytes of them. Several threads may use it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.n_bytes = 0
        self._lock = threading.RLock()
        self._entries: dict[str, Entry] = {}
        self._used: dict[str, float] = {}
        self._blobs: Blobs = {}
        self._counts: dict[str, int] = {}

    def heads(self, identity: bytes) -> dict[str, Head]:
        """Of every entry of one kind of context and one owner, by name."""
        begin = prefix(identity)
        with self._lock:
            found = [(name, entry) for name, entry in self._entries.items() if name.startswith(begin)]
        return {name: Head(entry.tokens, entry.more) for name, entry in found}

    def near(self, identity: bytes, tokens: Tokens) -> dict[str, Head]:
        """Heads of the entries that may serve for these tokens: all of them."""
        return self.heads(identity)

    def load(self, name: str) -> tuple[Entry, Blobs] | None:
        """An entry and what it refers to, marked as used now; None: it is gone."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:
                return None
            self._used[name] = time.monotonic()
            return entry, {blob: self._blobs[blob] for blob in _named(entry.more)}

    def store(self, entry: Entry, blobs: Blobs) -> bool:
        """Take an entry in; False where it is larger than everything may be."""
        name = entry.name()
        with self._lock:
            self.remove(name)
            if len(entry.state) + sum(map(len, blobs.values())) > self.capacity:
                return False
            self._entries[name] = entry
            self._used[name] = time.monotonic()
            self.n_bytes += len(entry.state)
            for blob in _named(entry.more):
                if blob not in self._blobs:
                    self._blobs[blob] = blobs[blob]
                    self.n_bytes += len(blobs[blob])
                self._counts[blob] = self._counts.get(blob, 0) + 1
            while self.n_bytes > self.capacity:
                self.remove(self._worst())
        return True

    def _worst(self) -> str:
        sizes = {blob: len(data) for blob, data in self._blobs.items()}
        own = own_bytes({name: _named(entry.more) for name, entry in self._entries.items()}, sizes)
        own = {name: n + len(self._entries[name].state) for name, n in own.items()}
        n_tokens = {name: len(entry.tokens) for name, entry in self._entries.items()}
        return _worst(self._used, own, n_tokens, time.monotonic())

    def touch(self, name: str) -> bool:
        """Mark an entry as used now; False: it is gone."""
        with self._lock:
            if name in self._used:
                self._used[name] = time.monotonic()
            return name in self._used

    def remove(self, name: str) -> None:
        with self._lock:
            entry = self._entries.pop(name, None)
            if entry is None:
                return
            del self._used[name]
            self.n_bytes -= len(entry.state)
            for blob in _named(entry.more):
                self._counts[blob] -= 1
                if not self._counts[blob]:
                    del self._counts[blob]
                    self.n_bytes -= len(self._blobs.pop(blob))

    discard = remove

    @property
    def n_entries(self) -> int:
        return len(self._entries)


@dataclasses.dataclass
class _File:
    used: float
    n_bytes: int


def looked(folder: Path) -> dict[str, _File]:
    """The files of a folder, by name; others may remove some meanwhile. Raises OSError."""
    found = {}
    with os.scandir(folder) as files:
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                if file.is_file(follow_symlinks=False):
                    status = file.stat(follow_symlinks=False)
                    found[file.name] = _File(status.st_mtime, status.st_size)
    return found


class Disk(Folder):
    """Entries and blobs in a folder, at most `capacity` bytes, which servers may share. Methods raise OSError.

    Nothing is overwritten, and everything is checked as a whole when it is read: whoever removes, cuts or changes a
    file costs time. One thread writes; others may read.
    """

    def __init__(self, path: Path, capacity: int, max_bytes: int) -> None:
        """max_bytes: more than any state of this context takes."""
        super().__init__(path)
        self.capacity, self.max_bytes = capacity, max_bytes
        self.n_bytes = 0  # as of the last look
        self._lock = threading.RLock()
        self._sound: set[str] = set()  # names of entries whose heads can be used

    def heads(self, identity: bytes) -> dict[str, Head]:
        with self._lock:
            found = super().heads(identity)
            for name in found.keys() - self._sound:
                try:
                    references(found[name].more)
                    self._sound.add(name)
                except ContainerError:
                    self.discard(name)
                    del found[name]
            return found

    def near(self, identity: bytes, tokens: Tokens) -> dict[str, Head]:
        """Heads of the entries that may serve for these tokens: all of them."""
        return self.heads(identity) if self.path.is_dir() else {}

    def touch(self, name: str) -> bool:
        """Mark an entry and its blobs as used now; False: some of it is gone."""
        head = self._known.get(name)
        blobs = [self._path(blob) for blob in _named(head.more)] if head else []
        if not all(map(is_regular, blobs)):
            return False
        for path in blobs:
            self._mark(path)
        return super().touch(name)

    def load(self, name: str) -> tuple[Entry, Blobs] | None:
        """An entry and what it refers to, all of it checked; None: it is gone, or a part of it is.

        Raises ContainerError for a damaged one.
        """
        if not is_regular(self.path / name):
            return None
        if os.lstat(self.path / name).st_size > 2 * self.max_bytes:
            raise ContainerError("it is larger than any state")
        entry = self.read(name)
        if entry is None:
            return None
        found: Blobs = {}
        left = self.max_bytes
        try:
            for blob in _named(entry.more):
                if blob not in found:
                    found[blob] = self._blob(entry.identity, blob, left)
                    left -= len(found[blob])
        except FileNotFoundError:
            self.discard(name)
            return None
        return entry, found

    def _path(self, blob: str) -> Path:
        return self.path / f"{blob}.rows"

    def _blob(self, identity: bytes, name: str, most: int) -> bytes:
        path = self._path(name)
        if not is_regular(path):
            raise FileNotFoundError(name)
        with open_regular(path) as handle:
            size = os.fstat(handle.fileno()).st_size
            if size > most:
                raise ContainerError("its pieces are larger than any state")
            data = handle.read(size)
        if address(identity, data) != name:
            os.unlink(path)
            raise ContainerError("checksum of a block differs")
        self._mark(path)
        return data

    @staticmethod
    def _mark(path: Path) -> None:
        with contextlib.suppress(OSError):
            mark_used(path)

    def store(self, entry: Entry, blobs: Blobs) -> bool:
        """Write an entry, its blobs first; False where it is larger than everything may be."""
        if len(entry.state) + sum(map(len, blobs.values())) > self.capacity:
            return False
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        missing = []
        for name in blobs:
            path = self._path(name)
            if is_regular(path) and path.stat().st_size == len(blobs[name]):
                self._mark(path)
            else:
                missing.append(name)
        n = len(entry.state) + 8 * len(entry.tokens) + sum(len(blobs[name]) for name in missing)
        self.make_room(n, {self._path(name).name for name in blobs})
        for name in missing:
            with replacing(self._path(name)) as handle:
                handle.write(blobs[name])
        with self._lock:
            self.write(entry)
        self.make_room(0)
        return True

    def _look(self) -> dict[str, _File]:
        """The files that were written here, by name; others are left alone."""
        found = {}
        for name, file in looked(self.path).items():
            temporary = TEMPORARY.fullmatch(name)
            own = temporary["name"] if temporary else name
            if OWN.fullmatch(own) or BLOB.fullmatch(own):
                found[name] = file
        return found

    def make_room(self, n: int, spared: Set[str] = frozenset()) -> None:
        """Give up files until n bytes more are within the bound, and what was left half-written an hour ago.

        spared: names of blobs that are in use.
        """
        try:
            files = self._look()
        except FileNotFoundError:
            return
        now = time.time()
        for name in [name for name in files if name.endswith(".tmp")]:
            if abs(now - files[name].used) > STALE_SECONDS:
                self._drop(name, files)
        total = sum(file.n_bytes for file in files.values())
        if total + n > self.capacity:
            total = self._evict(files, self.capacity - n, now, spared)
        self.n_bytes = total

    def _evict(self, files: dict[str, _File], most: int, now: float, spared: Set[str]) -> int:
        """Remove the least useful of the files, until at most `most` bytes are left; returns how many are."""
        with self._lock:
            known = {name: head for name, head in self._known.items() if name in files}
        entries = {name: [f"{blob}.rows" for blob in _named(head.more)] for name, head in known.items()}
        listed = {file for names in entries.values() for file in names} | spared
        unknown = (name for name in files if name not in entries and name not in listed)
        others = sorted(unknown, key=lambda name: files[name].used)
        total = sum(file.n_bytes for file in files.values())
        while total > most and (entries or others):
            oldest = min((files[name].used for name in entries), default=float("inf"))
            if others and files[others[0]].used <= oldest:
                total -= self._drop(others.pop(0), files)
                continue
            sizes = {name: file.n_bytes for name, file in files.items()}
            own = {name: sizes[name] + n for name, n in own_bytes(entries, sizes).items()}
            uses = {name: files[name].used for name in entries}
            worst = _worst(uses, own, {name: len(known[name].tokens) for name in entries}, now)
            names = entries.pop(worst)
            kept = {file for listing in entries.values() for file in listing} | spared
            total -= self._drop(worst, files)
            total -= sum(self._drop(name, files) for name in set(names) - kept if name in files)
        return total

    def _drop(self, name: str, files: dict[str, _File]) -> int:
        """Remove a file; returns its bytes."""
        with self._lock:
            self.remove(name)
        return files.pop(name).n_bytes

    @property
    def n_entries(self) -> int:
        return len(self._known)
