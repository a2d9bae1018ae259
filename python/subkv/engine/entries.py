"""The folder of the prompt cache: one file per state, named by what it holds.

An entry (format: subkv.base.container) never changes: it appears under its name complete. So there is no index to lose
and no lock to wait for; whoever reads a file that another process removes keeps reading it. The modification time is
the time of the latest use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import time
from pathlib import Path
from typing import Any

from subkv.base.container import Container, ContainerError, OtherVersionError, Tokens, load, read_head
from subkv.base.files import STALE_SECONDS, is_regular, open_regular, replacing

SUFFIX = ".prompt"
TEMPORARY = ".tmp"
NAME = rf"[0-9a-f]{{24}}-[0-9a-f]{{32}}{re.escape(SUFFIX)}"
OWN = re.compile(rf"{NAME}|\.{NAME}\.\d+(\.[0-9a-f]{{8}})?{re.escape(TEMPORARY)}")  # the latter of base.files.replacing


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """identity: 32 bytes that tell kinds of contexts apart; tokens [n] i32; more: of the file's head."""

    identity: bytes
    tokens: Tokens
    state: bytes
    more: dict[str, Any] = dataclasses.field(default_factory=dict)

    def name(self) -> str:
        """Name of its file; starts with prefix(identity)."""
        digest = hashlib.sha256(self.tokens.astype("<i4").tobytes()).hexdigest()
        return f"{prefix(self.identity)}{digest[:32]}{SUFFIX}"

    def container(self) -> Container:
        return Container({**self.more, "identity": self.identity.hex()}, self.tokens, self.state)


@dataclasses.dataclass(frozen=True, eq=False)
class Head:
    """What is known of an entry without reading its state."""

    tokens: Tokens
    more: dict[str, Any]


def prefix(identity: bytes) -> str:
    """How the names of all entries of one kind of context begin."""
    return f"{identity.hex()[:24]}-"


class Folder:
    """The entries in one folder. Methods raise OSError where it cannot be read or written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, Head] = {}  # by name; entries never change
        self._damaged: set[str] = set()  # names not to look at again: a folder may refuse to have them removed

    def heads(self, identity: bytes) -> dict[str, Head]:
        """Heads of every entry of one kind of context, by name. Reads the heads of files not seen before.

        A damaged head removes its file.
        """
        begin = prefix(identity)
        known: dict[str, Head] = {}
        for name in os.listdir(self.path):
            if not name.startswith(begin) or not name.endswith(SUFFIX) or name in self._damaged:
                continue
            head = self._known.get(name)
            if head is None and OWN.fullmatch(name):
                head = self._read_head(name, identity)
            if head is not None:
                known[name] = head
        self._known = {name: head for name, head in self._known.items() if not name.startswith(begin)} | known
        return known

    def _read_head(self, name: str, identity: bytes) -> Head | None:
        if not is_regular(self.path / name):  # somebody else's pipe or link, or removed meanwhile
            return None
        try:
            with open_regular(self.path / name) as handle:
                more, tokens, _ = read_head(handle)
            if more.pop("identity", None) != identity.hex():
                raise ContainerError("it belongs to another context")
        except OSError:  # removed by another process meanwhile, or on a part of the disk that fails: others can be read
            return None
        except OtherVersionError:  # it goes when the folder is full
            return None
        except ContainerError:
            self.discard(name)
            return None
        return Head(tokens, more)

    def discard(self, name: str) -> None:
        """Remove a damaged entry; where that fails never list it again. Another process may write it anew."""
        self._unlist(name)
        try:
            os.unlink(self.path / name)
        except FileNotFoundError:
            pass
        except OSError:
            self._damaged.add(name)

    def read(self, name: str) -> Entry | None:
        """An entry, checked as a whole, and marked as used now. None where another process removed it.

        Raises ContainerError for a damaged one.
        """
        try:
            found = load(self.path / name)
        except FileNotFoundError:
            self._unlist(name)
            return None
        more = dict(found.head)
        try:
            entry = Entry(bytes.fromhex(more.pop("identity")), found.tokens, found.state, more)
        except (KeyError, TypeError, ValueError) as error:
            raise ContainerError("it is bound to no context") from error
        if entry.name() != name:
            raise ContainerError("its name belongs to other tokens")
        self._used_now(name)
        return entry

    def touch(self, name: str) -> bool:
        """Mark an entry, and what belongs to it, as used now; False: it is gone."""
        return self._used_now(name)

    def _used_now(self, name: str) -> bool:
        """Mark an entry's file; False: it is gone. Where nothing can be written the order of use is not kept."""
        try:
            os.utime(self.path / name)
        except FileNotFoundError:
            return False
        except OSError:
            pass
        return True

    def _unlist(self, name: str) -> None:
        self._known = {other: head for other, head in self._known.items() if other != name}  # others may read it now

    def remove(self, name: str) -> None:
        self._unlist(name)
        with contextlib.suppress(OSError):
            os.unlink(self.path / name)

    def write(self, entry: Entry) -> None:
        """Store an entry completely or not at all, also when the process or the machine stops at any moment."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # entries tell what was requested
        name = entry.name()
        with replacing(self.path / name) as handle:
            for piece in entry.container().pieces():
                handle.write(piece)
        self._known = self._known | {name: Head(entry.tokens, entry.more)}
        self._damaged.discard(name)

    def _files(self) -> list[tuple[float, int, str]]:
        """(time of the latest use, bytes, name) of the files that were written here; others are left alone."""
        found = []
        with os.scandir(self.path) as files:
            for file in files:
                if OWN.fullmatch(file.name):
                    with contextlib.suppress(FileNotFoundError):
                        status = file.stat()
                        found.append((status.st_mtime, status.st_size, file.name))
        return found

    def size(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size, _ in self._files())

    def trim(self, capacity: int, begin: str = "") -> None:
        """Remove what processes that were killed left behind, then the entries used longest ago beyond `capacity`.

        begin: only files whose names begin so are counted and removed, those of one kind of context (prefix).
        """
        now = time.time()
        files = sorted(file for file in self._files() if file[2].removeprefix(".").startswith(begin))
        total = sum(size for _, size, _ in files)
        for used, size, name in files:
            stale = name.endswith(TEMPORARY) and now - used > STALE_SECONDS
            if stale or (total > capacity and name.endswith(SUFFIX)):
                self.remove(name)
                total -= size
