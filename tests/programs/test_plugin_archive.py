"""The archive of the plug-in: its files, and a stock llama-server with it in an empty environment."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import plugin_archive
import pytest
from servers import serving

from subkv.native.library import lib_dir

LIBRARIES = lib_dir()
STOCK = LIBRARIES / "stock"
LIBRARY = LIBRARIES / plugin_archive.LIBRARY
MOST = 3 << 20  # bytes
VARIABLES = {"GGML_BACKEND_PATH", "LLAMA_ARG_DEVICE", "SUBKV", "SUBKV_BITS", "OLLAMA_FLASH_ATTENTION"}
pytestmark = pytest.mark.skipif(not LIBRARY.is_file(), reason="the plug-in: not built")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked archive, whose file has the limits of its size and the same bytes each time."""
    folder = tmp_path_factory.mktemp("archive")
    packed = plugin_archive.write(LIBRARY, folder, platform.machine())
    again = plugin_archive.write(LIBRARY, tmp_path_factory.mktemp("again"), "x86_64")
    assert packed.stat().st_size <= MOST
    assert platform.machine() != "x86_64" or packed.read_bytes() == again.read_bytes()
    with tarfile.open(packed) as opened:
        assert {(one.uid, one.gid, one.mode, one.isfile()) for one in opened} == {(0, 0, 0o644, True)}
        opened.extractall(folder, filter="data")
    return folder / packed.name.removesuffix(".tar.gz")


def test_files_of_the_archive(archive: Path) -> None:
    """Every text is complete, names only files that are there, and its variables are those that `subkv env` prints."""
    names = {path.name for path in archive.iterdir()}
    assert names == {LIBRARY.name, "LICENSE", "THIRD_PARTY.md"} | {p.name for p in plugin_archive.TEXTS.iterdir()}
    readme = (archive / "README.md").read_text()
    assert len(readme.splitlines()) <= 30 and "@" not in readme
    assert {name for name in re.findall(r"`([\w.-]+\.\w+)`", readme) if not name.startswith("lib")} <= names
    for path in set(archive.iterdir()) - {archive / LIBRARY.name, archive / "LICENSE"}:
        assert set(re.findall(r"\b(?:GGML|LLAMA|SUBKV|OLLAMA)_[A-Z_]+|\bSUBKV\b(?==)", path.read_text())) <= VARIABLES
    for name in names - {LIBRARY.name, "LICENSE", "THIRD_PARTY.md", "README.md"}:
        assert "/opt/subkv/libggml-subkv.so" in (archive / name).read_text()
    if shutil.which("systemd-analyze"):
        unit = f"[Unit]\nDescription=x\n{(archive / 'ollama.conf').read_text()}ExecStart=/bin/true\n"
        (archive.parent / "ollama.service").write_text(unit)
        checked = ["systemd-analyze", "verify", "--man=no", str(archive.parent / "ollama.service")]
        assert subprocess.run(checked, capture_output=True, text=True, check=False).stderr == ""


def test_the_archive_needs_only_the_system(archive: Path) -> None:
    """Of libraries; and no glibc that is newer than the page says."""
    listed = subprocess.run(["ldd", archive / LIBRARY.name], capture_output=True, text=True, check=True)
    assert "not found" not in listed.stdout and "ggml" not in listed.stdout and "llama" not in listed.stdout
    oldest = re.search(r"glibc (2\.\d+)", (archive / "README.md").read_text())
    assert oldest and oldest[1] == plugin_archive.glibc_of(LIBRARY.read_bytes())


@pytest.mark.skipif(not (STOCK / "llama-server").is_file(), reason="unpatched programs: not built")
@pytest.mark.parametrize(("bits", "found"), [("", "6."), ("4.5", "4.4")])
def test_a_server_with_the_archive_alone(
    archive: Path, tiny_model: Callable[..., Path], tmp_path: Path, bits: str, found: str
) -> None:
    """The commands of its page in an empty environment: no Python, no home folder, no stored bases."""
    exported = re.search(r"^export (.*)$", (archive / "README.md").read_text(), re.M)
    assert exported
    variables = exported[1].replace("$PWD", str(archive)).split() + ([f"SUBKV_BITS={bits}"] if bits else [])
    by = ["env", "-i", *variables, STOCK / "llama-server"]
    with serving(tiny_model(), "-c", 512, subkv="", folder=tmp_path, by=by) as server:
        answer = server.complete([3, 4, 5, 6] * 40, 8)
        assert answer["tokens_predicted"] == 8
        coded = rf"subkv: coded K/V cache, .*; bases: from the weights, {found}"
        assert re.search(coded, server.log), server.log
