"""The Vulkan ops through ctypes: kernels/vulkan compiled by glslc, run on this machine's first Vulkan device.

That is usually Mesa's lavapipe on the CPU. The host can access its buffers, and addresses here are host addresses.
"""

from __future__ import annotations

import ctypes as ct
import shutil
import subprocess
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_ops as c
import layers
import numpy as np
import numpy.typing as npt
import ops as o
from compiled import linked, objects

VULKAN = c.ROOT / "kernels/vulkan"
HARNESS = c.ROOT / "tests/kernels/vulkan"
SHADERS = sorted(VULKAN.glob("*.comp"))
UNFUSED = "libunfused.so"
MAX_DOT = 256  # maximum rank for integer dot products
GLSLC_FLAGS = ["-O", "--target-env=vulkan1.1", "-Werror"]


def missing() -> str | None:
    """The requirement of the tests that this machine lacks."""
    if shutil.which("glslc") is None:
        return "no glslc: shaders are not compiled"
    source = "#include <vulkan/vulkan.h>\nint main() { return vkEnumeratePhysicalDevices(nullptr, nullptr, nullptr); }"
    command = ["c++", "-x", "c++", "-", "-o", "/dev/null", "-lvulkan"]
    if subprocess.run(command, input=source, text=True, capture_output=True, check=False).returncode:
        return "no Vulkan headers and loader (libvulkan-dev)"
    return None


class Memory:
    """Buffers of the device that the library has opened."""

    def __init__(self, lib: ct.CDLL) -> None:
        self.lib = lib
        self.buffers: list[int] = []
        weakref.finalize(self, Memory._free, lib, self.buffers)

    @staticmethod
    def _free(lib: ct.CDLL, buffers: list[int]) -> None:
        for at in buffers:
            lib.test_free(at)

    def put(self, array: npt.NDArray[Any]) -> tuple[int, Callable[[], npt.NDArray[Any]]]:
        array = np.ascontiguousarray(array)
        at = self.lib.test_allocate(array.nbytes)
        self.buffers.append(at)
        ct.memmove(at, array.ctypes.data, array.nbytes)

        def read(_keep: Memory = self) -> npt.NDArray[Any]:
            return np.frombuffer(ct.string_at(at, array.nbytes), array.dtype).reshape(array.shape).copy()

        return at, read


class Library(c.Library):
    """kernels/vulkan on a device; with integer_dot attend multiplies bytes."""

    def __init__(self, path: Path, validate: bool, integer_dot: bool = False) -> None:
        super().__init__(path, lambda: Memory(self.lib))
        self.lib.test_open.restype = self.lib.test_device.restype = self.lib.test_last_message.restype = ct.c_char_p
        self.lib.test_open.argtypes = [ct.c_bool, ct.c_bool]
        self.lib.test_set_barriers.argtypes = [ct.c_bool]
        self.lib.test_allocate.restype, self.lib.test_allocate.argtypes = ct.c_void_p, [ct.c_size_t]
        self.lib.test_free.argtypes = [ct.c_void_p]
        self.lib.test_messages.restype = self.lib.test_max_range.restype = ct.c_uint32
        self.lib.test_set_times.argtypes, self.lib.test_times.restype = [ct.c_uint32], ct.POINTER(ct.c_double)
        if error := self.lib.test_open(validate, integer_dot):
            raise RuntimeError(error.decode())
        self.integer_dot = integer_dot
        self.validates = validate
        self.path = path
        self.device = self.lib.test_device().decode()
        self.max_range = int(self.lib.test_max_range())  # bytes

    def exact_floats(self, layer: c.Layer, n_rows: int, n_tps: int, slots_of_seq: int) -> int:
        return 1  # combine attends to the exact keys; a buffer has bytes

    def rounding(self, decodes: bool, latent: bool, width: int) -> str | None:
        return "bytes" if self.integer_dot and not latent and width <= MAX_DOT else None

    def encoded(self, x: o.F32) -> o.F32:
        return x

    def query_words(self, layer: c.Layer) -> int:
        return 1  # no kernel reads them, nor plans

    def plans(self, k: layers.Side, v: layers.Side) -> npt.NDArray[np.uint8]:
        return np.zeros(1, np.uint8)

    def exact(self) -> list[o.Ops]:
        """With fused products and without."""
        return [self.ref(), c.Library(self.path.with_name(UNFUSED), c.HostMemory).ref()]

    def time(self, name: str, args: Any, n: int) -> list[float]:
        """Milliseconds of n runs of an op on the device's clock, with cold caches."""
        self.lib.test_set_times(n)
        try:
            self.run(name, args)
            return [float(ms) for ms in self.lib.test_times()[:n]]
        finally:
            self.lib.test_set_times(0)

    def messages(self) -> tuple[int, str]:
        """Number of messages of the validation layer since the last call, and its last message."""
        return int(self.lib.test_messages()), (self.lib.test_last_message() or b"").decode()


def build(folder: Path) -> Path:
    """Builds shaders, the ops' host side, the reference and the harness; also the reference without fused products."""
    for shader in SHADERS:
        command = ["glslc", *GLSLC_FLAGS, "-mfmt=c", "-o", str(folder / f"{shader.stem}.inc"), str(shader)]
        subprocess.run(command, check=True)
    sources = [*c.REF, *sorted(VULKAN.glob("*.cpp")), *sorted(HARNESS.glob("*.cpp"))]
    flags = ["-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror", *c.INCLUDE, f"-I{folder}"]
    linked(folder / "libvulkan_ops.so", [*objects(sources, flags, folder), "-lvulkan"], ["-shared"])
    c.build_ref(folder, UNFUSED, "-ffp-contract=off", "-include", str(HARNESS / "unfused.h"))
    return folder / "libvulkan_ops.so"


def requirements(shader: Path) -> tuple[list[int], list[str]]:
    """Capabilities and extensions that a shader's SPIR-V requires."""
    done = subprocess.run(["glslc", *GLSLC_FLAGS, "-o", "-", str(shader)], capture_output=True, check=True)
    words = np.frombuffer(done.stdout, "<u4")
    capabilities: list[int] = []
    extensions: list[str] = []
    at = 5  # behind the header
    while at < len(words):
        n, op = divmod(int(words[at]), 1 << 16)
        if op == 17:  # OpCapability
            capabilities.append(int(words[at + 1]))
        elif op == 10:  # OpExtension
            extensions.append(words[at + 1 : at + n].tobytes().partition(b"\0")[0].decode())
        at += n
    return sorted(capabilities), extensions
