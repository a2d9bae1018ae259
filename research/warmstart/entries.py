"""A folder of entries: one file per state, named by a hash of its content.

An entry (format: subkv.base.container) is written atomically and never changes, so the folder needs no index and no
lock, and a process can still read a file that another one removes. The modification time is the time of the last use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import stat
import time
from pathlib import Path
from typing import Any

from subkv.base.container import Container, ContainerError, OtherVersionError, Tokens, load, read_head
from subkv.base.files import STALE_SECONDS, open_regular, replacing

SUFFIX = ".prompt"
TEMPORARY = ".tmp"
NAME = rf"[0-9a-f]{{24}}-[0-9a-f]{{32}}{re.escape(SUFFIX)}"
OWN = re.compile(rf"{NAME}|\.{NAME}\.\d+\.[0-9a-f]{{8}}{re.escape(TEMPORARY)}")  # an entry or its temporary file


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """A state. identity: 32 bytes, equal for compatible contexts; tokens: [n] i32; more: other members of the head."""

    identity: bytes
    tokens: Tokens
    state: bytes
    more: dict[str, Any] = dataclasses.field(default_factory=dict)

    def name(self) -> str:
        """The file name; starts with prefix(identity)."""
        digest = hashlib.sha256(self.tokens.astype("<i4").tobytes()).hexdigest()
        return f"{prefix(self.identity)}{digest[:32]}{SUFFIX}"

    def container(self) -> Container:
        return Container({**self.more, "identity": self.identity.hex()}, self.tokens, self.state)


@dataclasses.dataclass(frozen=True, eq=False)
class Head:
    """An entry without its state."""

    tokens: Tokens
    more: dict[str, Any]


def prefix(identity: bytes) -> str:
    """Common prefix of the file names of all entries with this identity."""
    return f"{identity.hex()[:24]}-"


class Folder:
    """The entries in one folder. Methods raise OSError if it cannot be read or written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, Head] = {}  # by name; entries never change
        self._skipped: set[str] = set()  # names

    def heads(self, identity: bytes) -> dict[str, Head]:
        """Heads of all entries with this identity, by name; only heads of new files are read.

        Removes files whose heads have a wrong checksum or format, and skips those that cannot be read now.
        """
        begin = prefix(identity)
        heads: dict[str, Head] = {}
        for name in os.listdir(self.path):
            if not name.startswith(begin) or not name.endswith(SUFFIX) or name in self._skipped:
                continue
            head = self._known.get(name)
            if head is None and OWN.fullmatch(name):
                head = self._read_head(name, identity)
            if head is not None:
                heads[name] = head
        self._known = {name: head for name, head in self._known.items() if not name.startswith(begin)} | heads
        return heads

    def _read_head(self, name: str, identity: bytes) -> Head | None:
        try:
            if not stat.S_ISREG(os.lstat(self.path / name).st_mode):  # a pipe or a link
                return None
            with open_regular(self.path / name) as handle:
                more, tokens, _ = read_head(handle)
            if more.pop("identity", None) != identity.hex():
                raise ContainerError("it belongs to another context")
        except (OSError, MemoryError, OtherVersionError):  # trim() removes other versions
            return None
        except ContainerError:
            self.discard(name)
            return None
        return Head(tokens, more)

    def discard(self, name: str) -> None:
        """Remove a damaged entry; if that fails, do not list it again. Another process may write it again."""
        self._unlist(name)
        try:
            os.unlink(self.path / name)
        except FileNotFoundError:
            pass
        except OSError:
            self._skipped.add(name)

    def read(self, name: str) -> Entry | None:
        """Read and check an entry, and mark it as used now. None if another process removed it.

        Raises ContainerError for a damaged one.
        """
        try:
            container = load(self.path / name)
        except FileNotFoundError:
            self._unlist(name)
            return None
        more = dict(container.head)
        try:
            entry = Entry(bytes.fromhex(more.pop("identity")), container.tokens, container.state, more)
        except (KeyError, TypeError, ValueError) as error:
            raise ContainerError("it has no valid identity") from error
        if entry.name() != name:
            raise ContainerError("its name belongs to other tokens")
        self.touch(name)
        return entry

    def touch(self, name: str) -> None:
        """Mark an entry as used now, by its modification time; errors are ignored."""
        with contextlib.suppress(OSError):
            os.utime(self.path / name)

    def _unlist(self, name: str) -> None:
        # a copy, because another thread may read the dictionary
        self._known = {other: head for other, head in self._known.items() if other != name}

    def remove(self, name: str) -> None:
        self._unlist(name)
        with contextlib.suppress(OSError):
            os.unlink(self.path / name)

    def write(self, entry: Entry) -> None:
        """Store an entry atomically, even if the process or the machine stops meanwhile."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # private: entries contain prompts
        name = entry.name()
        with replacing(self.path / name) as handle:
            for piece in entry.container().pieces():
                handle.write(piece)
        self._known = self._known | {name: Head(entry.tokens, entry.more)}
        self._skipped.discard(name)

    def _files(self) -> list[tuple[float, int, str]]:
        """(time of the last use, bytes, name) of our files; other files are ignored."""
        own = []
        with os.scandir(self.path) as files:
            for file in files:
                if OWN.fullmatch(file.name):
                    with contextlib.suppress(FileNotFoundError):
                        status = file.stat()
                        own.append((status.st_mtime, status.st_size, file.name))
        return own

    def trim(self, capacity: int, begin: str) -> None:
        """Remove temporary files of killed processes, then the least recently used entries beyond `capacity` bytes.

        begin: count and remove only files with this name prefix, those of one identity.
        """
        now = time.time()
        files = sorted(file for file in self._files() if file[2].removeprefix(".").startswith(begin))
        total = sum(size for _, size, _ in files)
        for used, size, name in files:
            stale = name.endswith(TEMPORARY) and now - used > STALE_SECONDS
            if stale or (total > capacity and name.endswith(SUFFIX)):
                self.remove(name)
                total -= size
