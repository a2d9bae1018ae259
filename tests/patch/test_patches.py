"""The real pin: patches fit the pristine source, and the README lists exactly their hunks."""

from __future__ import annotations

import re
from pathlib import Path

import llama_source as s
import pytest

ROW = re.compile(r"^\| `([^`]+\.patch)` \| (\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$")


@pytest.fixture
def pin(repo: Path) -> Path:
    return repo / "runtime" / "llama.cpp"


def test_patches_apply_and_revert(pin: Path, pristine: s.Tree) -> None:
    diffs = s.read_patches(pin)
    patched = s.patched(pristine, diffs)
    assert {p for p in patched if patched[p] != pristine[p]} == {d.path for d in diffs}
    assert s.patched(patched, diffs, reverse=True) == pristine


def test_public_headers_are_not_patched(pin: Path) -> None:
    """ctypes mirrors the public structs by value, and the stock library shares ggml."""
    assert [d.path for d in s.read_patches(pin) if d.path.startswith(("include/", "ggml/include/"))] == []


def test_readme_lists_exactly_the_hunks(pin: Path) -> None:
    lines = (pin / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [m.groups() for m in map(ROW.match, lines) if m]
    table = [line for line in lines if line.startswith("| ") and not line.startswith("| patch |")]
    assert len(table) == len(rows), "a row of the table is not `patch` | line | what | why | upstream"
    listed = [(name, int(line)) for name, line, *_ in rows]
    found = [(d.name, h.old_start) for d in s.read_patches(pin) for h in d.hunks]
    assert listed == found
    assert all(text.strip() for row in rows for text in row)


def test_a_backend_gets_few_lines(pin: Path) -> None:
    """runtime/native has the GPU code; the patched backend only calls it."""
    for name in ("ggml-cuda.cu.patch", "ggml-vulkan.cpp.patch"):
        patch = (pin / "patches" / name).read_text(encoding="utf-8").splitlines()
        assert sum(line.startswith("+") and not line.startswith("+++") for line in patch) <= 90, name


def test_pin_is_the_dependency(repo: Path, pin: Path) -> None:
    version = s.read_version(pin)
    assert f'"{version["package"]}=={version["version"]}"' in (repo / "pyproject.toml").read_text(encoding="utf-8")
