"""The real pin: patches fit the pristine source, and the README lists exactly their hunks."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import llama_source as s
import pytest
from unified_diff import Hunk

ROW = re.compile(r"^\| `([^`]+\.patch)` \| ([\d, ]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$")


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


def only_includes(hunk: Hunk) -> bool:
    """Whether a hunk adds nothing but lines with `#include`."""
    added = [line for line in hunk.new if line not in hunk.old]
    return 0 < len(added) == len(hunk.new) - len(hunk.old) and all(line.startswith(b"#include") for line in added)


def test_readme_lists_exactly_the_hunks(pin: Path) -> None:
    lines = (pin / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [m.groups() for m in map(ROW.match, lines) if m]
    start = lines.index("| patch | lines | what | why | upstream |") + 2
    table = [line for line in lines[start:] if line.startswith("|")]
    assert len(table) == len(rows), "a row of the table is not `patch` | lines | what | why | upstream"
    listed = [(name, [int(line) for line in lines.split(", ")]) for name, lines, *_ in rows]
    assert listed == sorted(listed)
    found = [(d.name, h.line) for d in s.read_patches(pin) for h in d.hunks if not only_includes(h)]
    assert sorted((name, line) for name, lines in listed for line in lines) == sorted(found)
    assert all(text.strip() for row in rows for text in row)


def test_readme_counts_hunks_and_files(pin: Path) -> None:
    text = (pin / "README.md").read_text(encoding="utf-8")
    for queue in s.QUEUES:
        diffs = s.read_patches(pin, [other for other in s.QUEUES if other != queue])
        row = re.search(rf"^\| `patches/{queue}/` \| (\d+) \| (\d+) \|", text, re.MULTILINE)
        assert row is not None
        assert (int(row[1]), int(row[2])) == (sum(len(d.hunks) for d in diffs), len(diffs)), queue


@pytest.mark.parametrize("without", [["gpu", "upstream"], ["upstream"], ["cache", "gpu"]])
def test_queues_apply_alone(pin: Path, pristine: s.Tree, without: list[str]) -> None:
    diffs = s.read_patches(pin, without)
    assert s.patched(s.patched(pristine, diffs), diffs, reverse=True) == pristine


def test_memories_are_decorated_not_patched(pin: Path) -> None:
    """All operations on the parts of a memory pass through runtime/native/hook/memory.cpp."""
    changed = {Path(d.path).name for d in s.read_patches(pin)}
    memories = {name for name in changed if name.startswith(("llama-memory", "llama-kv-cache"))}
    assert memories == {"llama-kv-cache.cpp", "llama-kv-cache.h"}


def test_a_backend_gets_few_lines(pin: Path) -> None:
    """runtime/native has the GPU code; the patched backend only calls it."""
    for name in ("ggml-cuda.cu.patch", "ggml-vulkan.cpp.patch"):
        patch = (pin / "patches" / "gpu" / name).read_text(encoding="utf-8").splitlines()
        assert sum(line.startswith("+") and not line.startswith("+++") for line in patch) <= 90, name


def test_pin_is_the_dependency(repo: Path, pin: Path) -> None:
    version = s.read_version(pin)
    assert f'"{version["package"]}=={version["version"]}"' in (repo / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_proposals_to_upstream_apply(repo: Path, pristine: s.Tree, tmp_path: Path) -> None:
    """Each alone, to the pinned source with its tests."""
    archive = s.cache_dir() / s.archive_name(s.read_version(repo / "runtime" / "llama.cpp"))
    with tarfile.open(archive) as files:
        for member in files:
            path = member.name.partition("/vendor/llama.cpp/")[2]
            if member.isfile() and re.match("(ggml/(include|src)/ggml|src/llama-|tests/test-)[^/]*$", path):
                (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / path).write_bytes(files.extractfile(member).read())  # type: ignore[union-attr]
    patches = sorted((repo / "docs" / "upstream" / "backend").glob("*.patch"))
    assert len(patches) == 6
    subprocess.run(["git", "init", "-q", tmp_path], check=True)  # else git would look at the checkout around it
    for patch in patches:
        done = subprocess.run(
            ["git", "apply", "--check", patch], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{patch.name}: {done.stderr}"
