"""Messages of cmake/vulkan.cmake about builds with -DGGML_VULKAN=ON that cannot work."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from each import each
from test_cmake_cuda import CMAKE, MODULE, script

VULKAN = MODULE.with_name("vulkan.cmake")

pytestmark = pytest.mark.skipif(CMAKE is None, reason="no cmake on the PATH")


HEADERS = "Vulkan's headers (Debian: libvulkan-dev)"
LOADER = "Vulkan's loader (Debian: libvulkan-dev)"
GLSLC = "glslc (Debian: glslc)"
SPIRV = "the SPIR-V headers (Debian: spirv-headers)"


def configure(tmp_path: Path, without: list[str]) -> tuple[int, str]:
    """Configures a build in which only these files are missing -> exit status, and its output."""
    there = {HEADERS: "include", LOADER: "libvulkan.so", GLSLC: "bin/glslc", SPIRV: "spirv"}
    names = {HEADERS: "Vulkan_INCLUDE_DIR", LOADER: "Vulkan_LIBRARY", GLSLC: "Vulkan_GLSLC_EXECUTABLE"}
    for path in ("include/vulkan/vulkan.h", "libvulkan.so", "bin/glslc", "spirv/SPIRV-HeadersConfig.cmake"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    given = [f"-D{name}={'OFF' if what in without else tmp_path / there[what]}" for what, name in names.items()]
    if SPIRV in without:
        given.append("-DCMAKE_DISABLE_FIND_PACKAGE_SPIRV-Headers=ON")
    else:
        given.append(f"-DSPIRV-Headers_DIR={tmp_path / there[SPIRV]}")
    code = f"cmake_minimum_required(VERSION 3.21)\nproject(none NONE)\ninclude({VULKAN.as_posix()})\n"
    (tmp_path / "CMakeLists.txt").write_text(code)
    command = [str(CMAKE), "-S", str(tmp_path), "-B", str(tmp_path / "build"), "-DGGML_VULKAN=ON", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, " ".join(done.stderr.split())


@each("without", [[HEADERS], [LOADER], [GLSLC], [SPIRV], [GLSLC, SPIRV]])
def test_missing_parts_are_named(tmp_path: Path, without: list[str]) -> None:
    status, output = configure(tmp_path, without)
    assert status == 1
    expected = "GGML_VULKAN: expected Vulkan's headers and loader, glslc and the SPIR-V headers, did not find "
    assert f"{expected}{', '.join(without)} Call Stack" in output, output


def test_nothing_is_missing(tmp_path: Path) -> None:
    assert configure(tmp_path, []) == (0, "")


@pytest.mark.parametrize("other", ["GGML_CUDA", "SUBKV_EMULATE_CUDA"])
def test_one_kind_of_gpu(tmp_path: Path, other: str) -> None:
    status, output = script(tmp_path, "", "-DGGML_VULKAN=ON", f"-D{other}=ON", module=VULKAN)
    assert status == 1
    assert "GGML_VULKAN: expected a build for one kind of GPU, found GGML_CUDA or SUBKV_EMULATE_CUDA, too" in output


def test_nothing_is_expected_of_a_build_without_vulkan(tmp_path: Path) -> None:
    assert script(tmp_path, "", "-DCMAKE_DISABLE_FIND_PACKAGE_Vulkan=ON", module=VULKAN) == (0, "")
