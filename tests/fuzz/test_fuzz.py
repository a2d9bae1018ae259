"""Every target of targets.cpp and state.cpp on mutations of valid inputs, under AddressSanitizer and UBSan.

state.cpp uses the package's engine, which has sanitizers only in a sanitizer build.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import state_models
import writer
from compiled import CXX, headers, linked, objects
from gguf import GGUFValueType

from subkv.base.folders import package_folders
from subkv.native.library import lib_dir

ROOT = Path(__file__).resolve().parents[2]
CMAKE = (ROOT / "tests/fuzz/CMakeLists.txt").read_text()
N = 1000


def listed(pattern: str) -> list[str]:
    """Names in CMakeLists.txt, which has the one list of them."""
    found = re.search(pattern, CMAKE)
    assert found
    return found[1].split()


def built(folder: Path, program: str, sources: list[Path], libraries: list[str]) -> Path:
    """A program, built with the headers and libraries of the package or of a build tree."""
    if shutil.which(CXX) is None:
        pytest.skip(f"needs {CXX}")
    tree = lib_dir().parent / "llama.cpp"
    folders = [*package_folders("include"), tree / "include", tree / "ggml/include"]
    if not any((folder / "ggml-cpp.h").is_file() for folder in folders):
        pytest.skip("needs the headers of ggml, which a folder of libraries alone does not have")
    flags = [*listed(r"SUBKV_FUZZ_OPTIONS ([^)]*)\)"), "-std=c++17", "-O1", "-g", *headers(folders)]
    own_folders = ("include", "base", "contract", "bases", "engine", "adapt")
    flags += [*(f"-I{ROOT}/runtime/native/{name}" for name in own_folders), f"-I{ROOT}/kernels/include"]
    parts = [f"-L{lib_dir()}", f"-Wl,-rpath,{lib_dir()}", *(f"-l{name}" for name in libraries)]
    return linked(folder / program, [*objects(sources, flags, folder), *parts], flags)


def own(*names: str) -> list[Path]:
    return [ROOT / f"tests/fuzz/{name}.cpp" for name in names]


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver of targets.cpp."""
    sources = [ROOT / f"runtime/native/{name}.cpp" for name in listed(r"foreach\(name ([^)]*)\)")]
    sources += [*ROOT.glob("kernels/ref/*.cpp"), *ROOT.glob("kernels/sketch/*.cpp")]
    sources += [ROOT / "kernels/cpu/tiles.cpp", *own("targets", "driver")]
    return built(tmp_path_factory.mktemp("fuzz"), "fuzz", sources, ["ggml-base"])


@pytest.fixture(scope="module")
def fuzz_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver of state.cpp."""
    libraries = ["subkv", "llama", "ggml", "ggml-cpu", "ggml-base"]
    return built(tmp_path_factory.mktemp("fuzz-engine"), "fuzz-engine", own("state", "driver"), libraries)


def mutate(program: Path, target: str, folder: Path, files: list[Path], **environment: str) -> None:
    """A failure leaves its input in fuzz.last of the folder."""
    command = [program, "run", target, str(N), "1", *files]
    environ = {**os.environ, **environment}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", env=environ)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert f"{target}: {N} inputs" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("target", listed(r"foreach\(target ([^)]*)\)"))
def test_target(fuzz: Path, target: str, tmp_path: Path) -> None:
    files = []
    if target == "file":
        keys = writer.metadata(writer.random_layers())
        old = {key: value for key, value in keys.items() if key != writer.KEYS_DIGEST}  # refused by a parser alone
        old["subkv.version"] = (GGUFValueType.UINT32, 4)
        files = [writer.write(tmp_path / f"{len(file)}.gguf", file) for file in (keys, old)]
    mutate(fuzz, target, tmp_path, files)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "adapt"), [*((arch, "0") for arch in state_models.ARCHS), ("llama", "1")])
def test_states(fuzz_engine: Path, arch: str, adapt: str, tmp_path: Path) -> None:
    folder = state_models.write(tmp_path / arch, arch)
    options = {"SUBKV_FUZZ_MODEL": str(folder), "SUBKV_FUZZ_ADAPT": adapt}
    # the engine lives as long as the process
    mutate(fuzz_engine, "state", tmp_path, [], **options, ASAN_OPTIONS="detect_leaks=0")
