"""The build's helper scripts are not installed: these tests import them from cmake/."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "cmake"))

import llama_source as s  # noqa: E402


@pytest.fixture
def repo() -> Path:
    """Root of the checkout."""
    return REPO


@pytest.fixture(scope="session")
def pristine() -> s.Tree:
    """The pinned source, with the files of its programs, from the cache that the build filled."""
    pin = REPO / "runtime" / "llama.cpp"
    version = s.read_version(pin)
    archive = s.cache_dir() / s.archive_name(version)
    if not archive.is_file():
        pytest.skip(f"pinned source: {archive} does not exist (built with SUBKV_LLAMA_CPP_SOURCE?)")
    assert s.file_hash(archive) == version["sha256"]
    tree = s.read_sdist(archive, programs=True)
    assert s.tree_hash(tree) == version["programs"]
    assert s.tree_hash({path: data for path, data in tree.items() if s.is_needed(path)}) == version["tree"]
    return tree
