"""Messages of cmake/cuda.cmake about builds with -DGGML_CUDA=ON that cannot work."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

CMAKE = shutil.which("cmake")
MODULE = Path(__file__).resolve().parents[2] / "cmake" / "cuda.cmake"

pytestmark = pytest.mark.skipif(CMAKE is None, reason="no cmake on the PATH")


def script(tmp_path: Path, code: str, *options: str, module: Path = MODULE) -> tuple[int, str]:
    """Runs CMake code after the module -> exit status, and its output with single spaces."""
    assert CMAKE is not None
    path = tmp_path / "script.cmake"
    path.write_text(f"cmake_minimum_required(VERSION 3.21)\ninclude({module.as_posix()})\n{code}\n")
    done = subprocess.run([CMAKE, *options, "-P", str(path)], capture_output=True, text=True, check=False, cwd=tmp_path)
    return done.returncode, " ".join(done.stderr.split())


def test_missing_toolkit_is_named(tmp_path: Path) -> None:
    status, output = script(tmp_path, "", "-DGGML_CUDA=ON", "-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON")
    assert status == 1
    assert "GGML_CUDA: expected NVIDIA's CUDA toolkit with nvcc beside this Python, on the PATH, in CUDACXX" in output
    assert "`pip install --group cuda`" in output


@pytest.mark.skipif(sys.platform != "linux", reason="pip's CUDA toolkit is looked for on Linux")
def test_toolkit_of_pips_packages(tmp_path: Path) -> None:
    """The newest toolkit beside Python is found, and linked as nvcc and CMake expect one; a named one comes first."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv/bin/python"
    packages = Path(
        subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))"], text=True)[
            :-1
        ]
    )
    for version in ("cu9", "cu13"):
        toolkit = packages / "nvidia" / version
        for name in (
            "bin/nvcc",
            "bin/ptxas",
            "include/cuda.h",
            "lib/libcublas.so.13",
            "lib/libcudart_static.a",
            "nvvm/x",
        ):
            (toolkit / name).parent.mkdir(parents=True, exist_ok=True)
            (toolkit / name).write_text(f"{version} {name}")
    of_python = f"-DPython3_EXECUTABLE={python}"
    code = f"subkv_find_pip_toolkit(found)\nsubkv_link_pip_toolkit(${{found}} {tmp_path}/cuda)"
    assert script(tmp_path, code, of_python) == (0, "")
    links = {
        "bin/nvcc": "bin/nvcc",
        "bin/ptxas": "bin/ptxas",
        "include/cuda.h": "include/cuda.h",
        "lib64/libcublas.so": "lib/libcublas.so.13",
        "lib64/libcudart_static.a": "lib/libcudart_static.a",
        "nvvm/x": "nvvm/x",
    }
    assert {name: (tmp_path / "cuda" / name).read_text() for name in links} == {
        name: f"cu13 {target}" for name, target in links.items()
    }
    absent = "-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON"
    for named, looked_for in (("", True), (f"-DCUDAToolkit_ROOT={tmp_path}", False)):
        folder = tmp_path / ("build" if looked_for else "named")
        folder.mkdir()
        status, _ = script(folder, "", "-DGGML_CUDA=ON", absent, of_python, *named.split())
        assert (status, (folder / "cuda/bin/nvcc").exists()) == (1, looked_for)


def test_nothing_is_expected_of_a_build_without_cuda(tmp_path: Path) -> None:
    assert script(tmp_path, "", "-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON") == (0, "")


@pytest.mark.parametrize(
    ("architectures", "found", "fine"),
    [
        ("native", "", False),
        ("native", "No CUDA Devices found.-real", False),
        ("native", "90-real", True),
        ("75-virtual;86-real", "", True),
    ],
)
def test_architectures_of_a_machine_without_a_gpu(tmp_path: Path, architectures: str, found: str, fine: bool) -> None:
    status, output = script(
        tmp_path,
        f'set(CMAKE_CUDA_ARCHITECTURES_NATIVE "{found}")\nsubkv_check_cuda_architectures("{architectures}")',
    )
    assert status == (0 if fine else 1)
    assert fine or "CMAKE_CUDA_ARCHITECTURES: expected the architectures to compile for" in output
