"""Messages of cmake/cuda.cmake about builds with -DGGML_CUDA=ON that cannot work."""

from __future__ import annotations

import shutil
import subprocess
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
    done = subprocess.run([CMAKE, *options, "-P", str(path)], capture_output=True, text=True, check=False)
    return done.returncode, " ".join(done.stderr.split())


def test_missing_toolkit_is_named(tmp_path: Path) -> None:
    status, output = script(tmp_path, "", "-DGGML_CUDA=ON", "-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON")
    assert status == 1
    assert "GGML_CUDA: expected NVIDIA's CUDA toolkit with nvcc on the PATH, in CUDACXX or below" in output


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
