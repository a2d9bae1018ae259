"""Patches on another version of llama.cpp: three-way merge, hunk by hunk, only on request."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import llama_source as s
import patch_merge as m
import pytest
from test_llama_source import FILES, PROGRAMS, archive, fill, pin, source
from unified_diff import DiffError, parse

__all__ = ["archive", "pin", "source"]

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git: a merge needs it")

BASE = b"".join(b"line %d\n" % i for i in range(1, 21))
DIFF = parse(
    "x.patch",
    b"--- a/src/x.cpp\n+++ b/src/x.cpp\n"
    b"@@ -2,3 +2,4 @@\n line 2\n line 3\n+added\n line 4\n"
    b"@@ -14,3 +15,3 @@\n line 14\n-line 15\n+changed\n line 16\n",
)


def test_hunks_follow_lines_that_moved() -> None:
    merged, conflicts = m.merge_diff(DIFF, BASE, b"new\nnew\n" + BASE.replace(b"line 9\n", b""))
    assert conflicts == []
    assert merged is not None
    lines = merged.decode().splitlines()
    assert lines[:2] == ["new", "new"]
    assert lines[lines.index("added") - 1] == "line 3"
    assert lines[lines.index("changed") - 1] == "line 14"
    assert "line 9" not in lines
    assert "line 15" not in lines


def test_a_conflict_names_hunk_row_and_reason_and_the_others_merge() -> None:
    merged, conflicts = m.merge_diff(DIFF, BASE, BASE.replace(b"line 15\n", b"line fifteen\n"))
    assert [str(conflict) for conflict in conflicts] == [
        "x.patch: hunk 2, row `x.patch` | 14: src/x.cpp: expected 'line 15', found 'line fifteen'"
    ]
    assert merged == BASE.replace(b"line 3\n", b"line 3\nadded\n").replace(b"line 15\n", b"line fifteen\n")


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        (BASE.replace(b"line 15\n", b""), "expected 'line 15', but the line was removed"),
        (BASE.replace(b"line 3\n", b"line 3\nupstream's\n"), 'found "upstream\'s" where the hunk adds lines'),
        (None, "expected the file, found none"),
    ],
)
def test_reasons(theirs: bytes | None, reason: str) -> None:
    assert reason in [conflict.reason for conflict in m.merge_diff(DIFF, BASE, theirs)[1]]


def test_a_hunk_that_upstream_took_is_no_conflict() -> None:
    taken = BASE.replace(b"line 15\n", b"changed\n")
    merged, conflicts = m.merge_diff(DIFF, BASE, taken)
    assert conflicts == []
    assert merged == taken.replace(b"line 3\n", b"line 3\nadded\n")


def test_a_hunk_of_another_file_is_refused() -> None:
    with pytest.raises(DiffError, match="pinned lines of a hunk at line 14"):
        m.spliced(BASE.replace(b"line 16\n", b"x\n"), DIFF.hunks)


def test_missing_git_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DiffError, match="needs git"):
        m.merge_file(BASE, BASE, BASE)


def test_another_version_only_on_request(pin: Path, source: Path, tmp_path: Path) -> None:
    moved = b"zero\nzero\n" + FILES["src/llama.cpp"]
    fill(source, {"src/llama.cpp": moved, "src/new.cpp": b"int n;\n"})
    with pytest.raises(s.SourceError, match="SUBKV_MERGE=ON"):
        s.prepare(pin, tmp_path / "tree", None, source)
    arguments = ["--pin", str(pin), "--tree", str(tmp_path / "tree"), "--stock", str(tmp_path / "stock")]
    command = ["prepare", *arguments, "--source", str(source), "--merge"]
    assert s.main(command) == 0
    expected = FILES | {"src/llama.cpp": moved.replace(b"two", b"TWO"), "src/new.cpp": b"int n;\n"}
    assert s.read_dir(tmp_path / "tree") == expected
    assert (tmp_path / "stock/src/llama.cpp").read_bytes() == moved
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "tree").rglob("*")}
    assert s.main(command) == 0
    assert times == {path: path.stat().st_mtime_ns for path in (tmp_path / "tree").rglob("*")}


def test_merging_onto_the_pin_equals_strict_patching(pin: Path, source: Path, tmp_path: Path) -> None:
    s.prepare(pin, tmp_path / "strict", None, source, programs=True)
    s.prepare_merged(pin, tmp_path / "merged", None, source, programs=True)
    strict = s.read_dir(tmp_path / "strict", programs=True)
    assert s.read_dir(tmp_path / "merged", programs=True) == strict
    assert set(PROGRAMS) <= set(strict)


def test_a_conflict_stops_before_anything_is_written(
    pin: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(source, {"src/llama.cpp": b"one\nzwei\nthree\n"})
    command = ["prepare", "--pin", str(pin), "--tree", str(tmp_path / "tree"), "--source", str(source), "--merge"]
    assert s.main(command) == 1
    logged = capsys.readouterr().err
    assert "1 that do not" in logged
    assert "row `cache/llama.cpp.patch` | 1: src/llama.cpp: expected 'two', found 'zwei'" in logged
    assert not (tmp_path / "tree").exists()
    assert s.main(command[:5] + ["--merge"]) == 1
    assert "SUBKV_MERGE: expected -DSUBKV_LLAMA_CPP_SOURCE=DIR" in capsys.readouterr().err


def test_the_dry_canary_names_conflicts(repo: Path, pristine: s.Tree, tmp_path: Path) -> None:
    tree = fill(tmp_path / "other", {path: data for path, data in pristine.items() if s.is_needed(path)})
    command = [sys.executable, str(repo / "cmake" / "canary.py"), "--dry", "--no-programs", str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(rf"{re.escape(str(tree))}: 0 of \d+ hunks do not merge\n", done.stdout)
    path = tree / "src" / "llama-context.h"
    path.write_bytes(path.read_bytes().replace(b"    bool set_sampler(", b"    int set_sampler("))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert re.search(r": 1 of \d+ hunks do not merge: llama-context.h 1\n", done.stdout)
    assert "found 'int set_sampler(" in done.stdout
