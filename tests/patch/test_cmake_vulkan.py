"""What cmake/vulkan.cmake says of a build with -DGGML_VULKAN=ON that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_cmake_cuda import CMAKE, MODULE, script

VULKAN = MODULE.with_name("vulkan.cmake")

pytestmark = pytest.mark.skipif(CMAKE is None, reason="no cmake on the PATH")


def test_missing_packages_are_named(tmp_path: Path) -> None:
    without = [f"-DCMAKE_DISABLE_FIND_PACKAGE_{name}=ON" for name in ("Vulkan", "SPIRV-Headers")]
    status, said = script(tmp_path, "", "-DGGML_VULKAN=ON", *without, module=VULKAN)
    assert status == 1
    assert "GGML_VULKAN: expected Vulkan's headers and loader, glslc and the SPIR-V headers" in said


@pytest.mark.parametrize("other", ["GGML_CUDA", "SUBKV_EMULATE_CUDA"])
def test_one_kind_of_gpu(tmp_path: Path, other: str) -> None:
    status, said = script(tmp_path, "", "-DGGML_VULKAN=ON", f"-D{other}=ON", module=VULKAN)
    assert status == 1
    assert "GGML_VULKAN: expected a build for one kind of GPU, found GGML_CUDA or SUBKV_EMULATE_CUDA, too" in said


def test_nothing_is_expected_of_a_build_without_vulkan(tmp_path: Path) -> None:
    assert script(tmp_path, "", "-DCMAKE_DISABLE_FIND_PACKAGE_Vulkan=ON", module=VULKAN) == (0, "")
