"""What a source archive and a wheel contain, and what they call themselves."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

import subkv

REPO = Path(__file__).resolve().parents[2]


def test_what_needs_torch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "subkv.subspace", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"SubspaceCache: expected package torch, .*subkv\[torch\]"):
        _ = subkv.SubspaceCache


def test_one_version() -> None:
    found = {"subkv.__version__": subkv.__version__}
    for name, pattern in (
        ("pyproject.toml", r'^version = "(.+)"$'),
        ("CMakeLists.txt", r"^project\(subkv VERSION (\S+) "),
        ("CHANGELOG.md", r"^## ([\d.]+)"),
    ):
        match = re.search(pattern, (REPO / name).read_text("utf-8"), re.M)
        assert match, name
        found[name] = match[1]
    assert set(found.values()) == {subkv.__version__}, found


def test_source_archive_is_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = pytest.importorskip("scikit_build_core.build")
    if not (REPO / ".git").exists():
        pytest.skip("source archive: this is no git checkout to compare with")
    monkeypatch.chdir(REPO)
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    tracked = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()
    with tarfile.open(tmp_path / build.build_sdist(str(tmp_path))) as archive:
        packed = [member.name.partition("/")[2] for member in archive if not member.isdir()]
    assert sorted(packed) == sorted(["PKG-INFO", *(name for name in tracked if Path(name).exists())])


def test_installed_files() -> None:
    """Programs, libraries, headers and the demo calibration, and nothing that only a build needs."""
    try:
        files = {str(path) for path in metadata.files("subkv") or []}
    except metadata.PackageNotFoundError:
        pytest.skip("wheel: subkv is not installed, only on the path")
    if "subkv/__init__.py" not in files:
        pytest.skip("wheel: an editable install has no file list")
    upstream = "subkv/lib/llama.cpp/"  # its converter and its licence, as they are
    expected = {"runtime/chat.py", "converter/cli.py", "subkv/py.typed", f"{upstream}LICENSE"}
    expected |= {"subkv/include/subkv.h", "subkv/include/llama.h", "subkv/cmake/subkvConfig.cmake"}
    assert expected <= files
    kinds = {Path(name).suffix for name in files if not name.startswith(("..", "subkv-", upstream))}
    assert kinds <= {".py", ".pyc", ".typed", ".so", ".dylib", ".h", ".cmake", ".safetensors", ".json", ".txt"}
