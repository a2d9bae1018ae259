"""The strict diff applier against diffs of difflib, and against all invalid input that it must refuse."""

from __future__ import annotations

import difflib

import pytest
import unified_diff as u
from each import each
from hypothesis import given
from hypothesis import strategies as st

OLD = b"".join(b"line %d\n" % i for i in range(1, 31))
NEW = OLD.replace(b"line 3\n", b"three\n").replace(b"line 20\n", b"line 20\nmore\n").replace(b"line 28\n", b"")


def diff(old: bytes, new: bytes, path: str = "src/x.cpp") -> bytes:
    """A unified diff in git's format, missing line ends included."""
    out: list[bytes] = []
    lines = difflib.diff_bytes(
        difflib.unified_diff,
        old.splitlines(keepends=True),
        new.splitlines(keepends=True),
        b"a/" + path.encode(),
        b"b/" + path.encode(),
    )
    for line in lines:
        out.append(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n")
    return b"".join(out)


texts = st.lists(st.sampled_from(["a", "b", "", " ", "-", "+", "@@ -1 +1 @@"]), max_size=12).flatmap(
    lambda lines: st.sampled_from(["\n".join(lines), "\n".join(lines) + "\n"])
)


@given(texts, texts)
def test_apply_and_reverse(old_text: str, new_text: str) -> None:
    old, new = old_text.encode(), new_text.encode()
    data = diff(old, new)
    if not data:
        assert old == new
        return
    parsed = u.parse("p", data)
    assert u.apply(parsed, old) == new
    assert u.apply(parsed, new, reverse=True) == old


def test_several_hunks_and_text_before() -> None:
    parsed = u.parse("p", b"From: somebody\n\nwhy\n" + diff(OLD, NEW))
    assert parsed.path == "src/x.cpp"
    assert len(parsed.hunks) == 3
    assert u.apply(parsed, OLD) == NEW


@each(
    "data",
    [
        b"first\n" + OLD,  # an offset
        OLD.replace(b"line 2\n", b"line  2\n"),  # context
        OLD.replace(b"line 28\n", b"line 28 \n"),  # a removed line
        OLD.replace(b"\n", b"\r\n"),
        OLD[: OLD.index(b"line 25\n")],
        NEW,  # applied already
        b"",
    ],
)
def test_no_fuzz(data: bytes) -> None:
    with pytest.raises(u.DiffError, match=r"p: hunk \d: .*expected .*found"):
        u.apply(u.parse("p", diff(OLD, NEW)), data)


@each(
    ("data", "message"),
    [
        (b"", "no '--- a/' line"),
        (diff(OLD, NEW) + diff(OLD, NEW, "src/y.cpp"), "expected '@@ -'"),
        (diff(OLD, NEW).replace(b"+++ b/src/x.cpp", b"+++ b/src/y.cpp"), "expected one file"),
        (diff(OLD, NEW).replace(b"--- a/src/x.cpp", b"--- /dev/null"), "expected a line starting with"),
        (diff(OLD, NEW, "../x.cpp"), "expected a path below the tree"),
        (diff(OLD, NEW).split(b"@@")[0], "expected at least one hunk"),
        (diff(OLD, NEW).replace(b"\n+three", b""), "expected .* old and .* new lines"),
        (diff(OLD, NEW).rstrip(b"\n").rsplit(b"\n", 1)[0] + b"\n", "expected .* old and .* new lines"),
    ],
)
def test_malformed(data: bytes, message: str) -> None:
    with pytest.raises(u.DiffError, match="p: .*" + message):
        u.parse("p", data)


def test_inconsistent_new_line_number() -> None:
    data = diff(OLD, NEW).replace(b" +18,7 ", b" +19,7 ")
    assert data != diff(OLD, NEW)
    with pytest.raises(u.DiffError, match="hunk 2: expected new line 18, found 19"):
        u.apply(u.parse("p", data), OLD)
