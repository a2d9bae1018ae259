"""A strict unified-diff applier for one file: no fuzz, no offsets, exact context.

It replaces `patch` and `git apply`, which may be missing on a machine, and rejects diffs that they would apply fuzzily.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class DiffError(Exception):
    """The diff is malformed, or does not fit the file; the message names patch, hunk, expected and found."""


@dataclass(frozen=True)
class Hunk:
    """Lines with their line ends. `old` is replaced by `new` at line number `old_start` (1-based, as in the diff).

    patch, number, line: the name of its patch file, its place there, and its first line as that file has it.
    """

    old_start: int
    new_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]
    patch: str
    number: int
    line: int

    def trimmed(self) -> Hunk:
        """Without context, so that hunks of other patches fit beside it. new_start is that of the diff."""
        same = 0
        while same < min(len(self.old), len(self.new)) and self.old[same] == self.new[same]:
            same += 1
        end = 0
        while end < min(len(self.old), len(self.new)) - same and self.old[-1 - end] == self.new[-1 - end]:
            end += 1
        old, new = (side[same : len(side) - end] for side in (self.old, self.new))
        return replace(self, old_start=self.old_start + same - (not old), old=old, new=new)


@dataclass(frozen=True)
class FileDiff:
    """All hunks for one file; `path` is relative to the root of the tree. name: of its patch, or of several."""

    name: str
    path: str
    hunks: tuple[Hunk, ...]


def lines_of(data: bytes) -> list[bytes]:
    """Split at \\n only, keeping it; the last line may have none."""
    parts = data.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _path(name: str, line: bytes, prefix: bytes) -> str:
    """The path of a `--- a/...` or `+++ b/...` line."""
    text = line.rstrip(b"\n").split(b"\t")[0]
    if not text.startswith(prefix):
        raise DiffError(f"{name}: expected a line starting with {prefix.decode()!r}, found {text.decode()!r}")
    path = text[len(prefix) :].decode()
    if path.startswith("/") or ".." in path.split("/") or not path:
        raise DiffError(f"{name}: expected a path below the tree, found {path!r}")
    return path


def parse(name: str, data: bytes) -> FileDiff:
    """Read a unified diff that changes exactly one existing file.

    name: used in messages. Text before the `---` line is ignored.
    Raises DiffError for anything that is not such a diff, in particular a second file or a wrong line count.
    """
    lines = lines_of(data)
    at = next((i for i, line in enumerate(lines) if line.startswith(b"--- ")), None)
    if at is None or at + 1 >= len(lines):
        raise DiffError(f"{name}: expected a unified diff, found no '--- a/' line")
    old_path = _path(name, lines[at], b"--- a/")
    new_path = _path(name, lines[at + 1], b"+++ b/")
    if old_path != new_path:
        raise DiffError(f"{name}: expected one file, found {old_path!r} and {new_path!r}")
    at += 2
    hunks: list[Hunk] = []
    while at < len(lines):
        match = _HUNK.match(lines[at])
        if match is None:
            raise DiffError(
                f"{name}: line {at + 1}: expected '@@ -', found {lines[at].rstrip()[:60].decode('latin1')!r}"
            )
        old_start, old_count, new_start, new_count = (1 if g is None else int(g) for g in match.groups())
        at += 1
        old: list[bytes] = []
        new: list[bytes] = []
        sides: list[list[bytes]] = []
        while at < len(lines) and (len(old) < old_count or len(new) < new_count or lines[at].startswith(b"\\")):
            tag, text = lines[at][:1], lines[at][1:]
            if tag == b"\\":
                for side in sides:
                    side[-1] = side[-1][:-1]
            elif tag in (b" ", b"-", b"+"):
                sides = [old] if tag == b"-" else [new] if tag == b"+" else [old, new]
                for side in sides:
                    side.append(text)
            else:
                break
            at += 1
        if len(old) != old_count or len(new) != new_count:
            raise DiffError(
                f"{name}: hunk {len(hunks) + 1}: expected {old_count} old and {new_count} new lines,"
                f" found {len(old)} and {len(new)}"
            )
        hunks.append(Hunk(old_start, new_start, tuple(old), tuple(new), name, len(hunks) + 1, old_start))
    if not hunks:
        raise DiffError(f"{name}: expected at least one hunk, found none")
    return FileDiff(name, old_path, tuple(hunks))


def combined(diffs: Sequence[FileDiff]) -> FileDiff:
    """The hunks of all patches of one file; of several, without context. Raises DiffError if they overlap."""
    if len(diffs) == 1:
        return diffs[0]
    hunks: list[Hunk] = []
    grown = 0
    end = 0  # of the hunk before, in the old file
    for hunk in sorted((hunk.trimmed() for diff in diffs for hunk in diff.hunks), key=lambda h: (h.old_start, h.patch)):
        first = hunk.old_start - 1 if hunk.old else hunk.old_start
        if hunks and first <= end:
            raise DiffError(
                f"{hunk.patch}: hunk {hunk.number}: expected other lines than those of {hunks[-1].patch},"
                f" hunk {hunks[-1].number}; found line {hunk.old_start} in both"
            )
        hunks.append(replace(hunk, new_start=first + grown + bool(hunk.new)))
        grown += len(hunk.new) - len(hunk.old)
        end = first + len(hunk.old)
    return FileDiff(" and ".join(diff.name for diff in diffs), diffs[0].path, tuple(hunks))


def apply(diff: FileDiff, data: bytes, reverse: bool = False) -> bytes:
    """The file `data` with all hunks applied (or reverted), at exactly the line numbers of the diff.

    Raises DiffError if the file differs from a hunk in any byte.
    """
    lines = lines_of(data)
    out: list[bytes] = []
    done = 0
    for number, hunk in enumerate(diff.hunks, 1):
        start, new_start = (hunk.new_start, hunk.old_start) if reverse else (hunk.old_start, hunk.new_start)
        old, new = (hunk.new, hunk.old) if reverse else (hunk.old, hunk.new)
        # a side without lines names the line before it
        first = start - 1 if old else start
        if first < done:
            raise DiffError(f"{diff.name}: hunk {number}: expected to start after line {done}, found line {first + 1}")
        out += lines[done:first]
        if len(out) != (new_start - 1 if new else new_start):
            raise DiffError(f"{diff.name}: hunk {number}: expected new line {len(out) + 1}, found {new_start}")
        for i, line in enumerate(old):
            present = lines[first + i] if first + i < len(lines) else b"end of file"
            if present != line:
                raise DiffError(
                    f"{diff.name}: hunk {number}: {diff.path} line {first + i + 1}:"
                    f" expected {line.decode('latin1')!r}, found {present.decode('latin1')!r}"
                )
        out += new
        done = first + len(old)
    return b"".join(out + lines[done:])
