"""Contents and metadata of source archive and wheel."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

import subkv
from subkv.native.library import lib_dir

REPO = Path(__file__).resolve().parents[2]
LICENSES = ("LICENSE", "THIRD_PARTY.md")


def test_commands_that_need_torch_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "subkv.torch.cache", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"SubspaceCache: expected package torch, .*: pip .*\[torch\]"):
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


def test_licences_are_declared() -> None:
    """The wheel's metadata has one own licence file and one of third-party texts, including the pinned source's."""
    project = (REPO / "pyproject.toml").read_text("utf-8")
    assert re.search(r'^license = "MIT"$', project, re.M)
    assert re.search(rf"^license-files = {re.escape(json.dumps(LICENSES))}$", project, re.M)
    ours, others = (" ".join((REPO / name).read_text("utf-8").split()) for name in LICENSES)
    permission = ours[ours.index("Permission is hereby granted") :]
    assert permission in others
    upstream = lib_dir() / "llama.cpp" / "LICENSE"
    if not upstream.is_file():
        pytest.skip(f"licence of llama.cpp: a build without {upstream}")
    copyright_line, text = upstream.read_text("utf-8").strip().removeprefix("MIT License").strip().split("\n\n", 1)
    assert copyright_line in others and " ".join(text.split()) in others


def test_installed_files() -> None:
    """Programs, libraries, headers, licences and the demo calibration, and nothing that only a build needs."""
    try:
        files = {str(path) for path in metadata.files("subkv") or []}
    except metadata.PackageNotFoundError:
        pytest.skip("wheel: subkv is not installed, only on the path")
    if "subkv/__init__.py" not in files:
        pytest.skip("wheel: an editable install has no file list")
    upstream = "subkv/lib/llama.cpp/"  # its converter and its licence, unchanged
    expected = {"runtime/chat/cli.py", "converter/cli.py", "subkv/py.typed", f"{upstream}LICENSE"}
    expected |= {"subkv.pth", "subkv_finder.py"}  # for `import llama_cpp`
    expected |= {"subkv/commit.txt"}  # for `subkv doctor`
    expected |= {"subkv/include/subkv.h", "subkv/include/llama.h", "subkv/cmake/subkvConfig.cmake"}
    expected |= {f"subkv-{subkv.__version__}.dist-info/licenses/{name}" for name in LICENSES}
    assert expected <= files
    assert {name for name in files if name.startswith("research/")} == set()
    # SUBKV_PROGRAMS: all of llama.cpp's own programs or none
    own = {f"subkv/lib/llama-{name}" for name in ("server", "cli", "completion", "bench", "perplexity", "mtmd-cli")}
    assert own & files in (set(), own)
    # SUBKV_STOCK
    stock = {f"subkv/lib/stock/llama-{name}" for name in ("server", "cli", "completion", "bench", "perplexity")}
    kinds = {Path(name).suffix for name in files - own - stock if not name.startswith(("..", "subkv-", upstream))}
    programs = {".py", ".pyc", ".typed", ".so", ".dylib", ".h", ".cmake"}
    assert kinds <= programs | {".safetensors", ".json", ".txt", ".pth"}
