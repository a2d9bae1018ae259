"""A three-way merge of the patches onto another version of llama.cpp, hunk by hunk, by `git merge-file`.

The pinned file is the base, the other version's file is one side, and the pinned file with a hunk the other side. Hunks
with conflicts are skipped and reported.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from unified_diff import DiffError, FileDiff, Hunk, lines_of

THEIRS, BASE, OURS = "other version", "pinned", "patch"


@dataclass(frozen=True)
class Conflict:
    """A hunk that does not merge. `line` names its row in the table of runtime/llama.cpp/README.md."""

    patch: str
    path: str
    hunk: int
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.patch}: hunk {self.hunk}, row `{self.patch}` | {self.line}: {self.path}: {self.reason}"


def spliced(data: bytes, hunks: Iterable[Hunk]) -> bytes:
    """The pinned file with only these hunks."""
    lines = lines_of(data)
    out: list[bytes] = []
    done = 0
    for hunk in hunks:
        first = hunk.old_start - 1 if hunk.old else hunk.old_start
        if tuple(lines[first : first + len(hunk.old)]) != hunk.old or first < done:
            raise DiffError(f"expected the pinned lines of a hunk at line {hunk.old_start}, found others")
        out += lines[done:first]
        out += hunk.new
        done = first + len(hunk.old)
    return b"".join(out + lines[done:])


def merge_file(theirs: bytes, base: bytes, ours: bytes) -> tuple[bytes, int]:
    """The merged content, with conflict markers of style diff3, and the number of conflicts."""
    with tempfile.TemporaryDirectory(prefix="subkv-merge-") as folder:
        paths = [Path(folder) / name for name in ("theirs", "base", "ours")]
        for path, data in zip(paths, (theirs, base, ours), strict=True):
            path.write_bytes(data)
        labels = [word for label in (THEIRS, BASE, OURS) for word in ("-L", label)]
        command = ["git", "merge-file", "-p", "--diff3", *labels, *map(str, paths)]
        try:
            done = subprocess.run(command, capture_output=True, check=False)
        except FileNotFoundError:
            raise DiffError("merging onto another version of llama.cpp needs git: expected it, found none") from None
    if not 0 <= done.returncode <= 127:
        raise DiffError(f"git merge-file: exit status {done.returncode}: {done.stderr.decode(errors='replace')}")
    return done.stdout, done.returncode


def why(merged: bytes) -> str:
    """The first conflict as a sentence: the line that the hunk expects, and the one in the file."""
    sides: dict[str, list[str]] = {"<": [], "|": [], "=": []}
    side = ""
    for line in merged.decode("utf-8", "replace").splitlines():
        if line == f"<<<<<<< {THEIRS}":
            side = "<"
        elif line == f"||||||| {BASE}" and side:
            side = "|"
        elif line == "=======" and side == "|":
            side = "="
        elif line == f">>>>>>> {OURS}" and side:
            break
        elif side:
            sides[side].append(line.strip())
    present, expected = ([line for line in sides[key] if line] for key in "<|")
    missing = [line for line in expected if line not in present]
    new = [line for line in present if line not in expected]
    if missing and new:
        return f"expected {missing[0]!r}, found {new[0]!r}"
    if missing:
        return f"expected {missing[0]!r}, but the line was removed"
    return f"found {new[0]!r} where the hunk adds lines" if new else "found lines in another order"


def merge_diff(diff: FileDiff, base: bytes, theirs: bytes | None) -> tuple[bytes | None, list[Conflict]]:
    """The other version's file with all hunks that merge, and the hunks that do not."""

    def conflict(hunk: Hunk, reason: str) -> Conflict:
        return Conflict(hunk.patch, diff.path, hunk.number, hunk.line, reason)

    if theirs is None:
        return None, [conflict(hunk, "expected the file, found none") for hunk in diff.hunks]
    merged, failed = merge_file(theirs, base, spliced(base, diff.hunks))
    if not failed:
        return merged, []
    conflicts: list[Conflict] = []
    good: list[Hunk] = []
    for hunk in diff.hunks:
        # together with those that merged, to detect hunks that conflict with each other
        merged, failed = merge_file(theirs, base, spliced(base, [*good, hunk]))
        if failed:
            conflicts.append(conflict(hunk, why(merged)))
        else:
            good.append(hunk)
    return merge_file(theirs, base, spliced(base, good))[0], conflicts


def merge(
    pristine: Mapping[str, bytes], theirs: Mapping[str, bytes], diffs: Iterable[FileDiff]
) -> tuple[dict[str, bytes], list[Conflict]]:
    """The other version's tree with all hunks that merge, and the hunks that do not."""
    tree = dict(theirs)
    conflicts: list[Conflict] = []
    for diff in diffs:
        merged, failed = merge_diff(diff, pristine[diff.path], theirs.get(diff.path))
        if merged is not None:
            tree[diff.path] = merged
        conflicts += failed
    return tree, conflicts
