"""The CUDA ops on a CPU, with some blocks of each launch also run by the PTX interpreter.

It finds races in shared memory, and accesses beside the arrays of global memory.

The interpreted blocks run first, so that the results are those of the emulated ones.
"""

from __future__ import annotations

import ctypes as ct
import re
import subprocess
import weakref
from pathlib import Path

import cuda_ops as c
import ptx

# of a mangled name in an anonymous namespace: the kernel's, and its numbers
KERNEL = re.compile(r"[a-z_]+_kernel(?:I(?:L[a-z]\d+E)+E)?E")
LAUNCH = ct.CFUNCTYPE(None, ct.c_void_p, ct.POINTER(ct.c_uint), ct.c_uint)
CUDA = c.ROOT / "kernels/cuda"


def compiled(name: str, architecture: str, folder: Path, *defines: str) -> str:
    """The PTX of a source of kernels/cuda."""
    out = folder / f"{name}.ptx"
    flags = ["-std=c++17", "-O3", *defines, *c.INCLUDE, "-lineinfo", "-ptx", f"-arch={architecture}"]
    subprocess.run([str(c.nvcc()), *flags, str(CUDA / name), "-o", str(out)], check=True)
    return out.read_text("utf-8")


def last_launch(lib: ct.CDLL) -> tuple[bytes, int]:
    """Arguments and shared memory of the emulation's last launch."""
    lib.emulated_last_args.restype = ct.c_void_p
    lib.emulated_last_shared.restype = lib.emulated_last_args_size.restype = ct.c_size_t
    return ct.string_at(lib.emulated_last_args(), lib.emulated_last_args_size()), lib.emulated_last_shared()


class Interpreted(c.Library):
    def __init__(self, emulated: c.Library, modules: list[str]) -> None:
        """modules: PTX with all kernels. Two blocks of a launch are interpreted, the first and the last."""
        self.lib, self.memory = emulated.lib, self._new_memory
        self.memories: weakref.WeakSet[c.HostMemory] = weakref.WeakSet()
        self.modules = {found[0]: text for text in modules for found in KERNEL.finditer(text)}
        self.kernels: dict[str, ptx.Kernel] = {}
        path = str(self.lib._name)
        listed = subprocess.run(["nm", path], capture_output=True, text=True, check=True).stdout
        self.symbols = {
            int(at, 16): name for at, _, name in (line.split() for line in listed.splitlines() if line[0] != " ")
        }
        here = next(at for at, name in self.symbols.items() if name == "emulated_last_args")
        self.base = (ct.cast(self.lib.emulated_last_args, ct.c_void_p).value or 0) - here
        self.failure: BaseException | None = None
        self.hook = LAUNCH(self._before_launch)

    def _new_memory(self) -> c.HostMemory:
        memory = c.HostMemory()
        self.memories.add(memory)
        return memory

    def run(self, name: str, args: ct.Structure, stream: ct.c_void_p | None = None) -> None:
        self.failure = None
        self.lib.emulated_before_launch(self.hook)
        try:
            super().run(name, args, stream)
        finally:
            self.lib.emulated_before_launch(None)
        if self.failure is not None:
            raise self.failure

    def _before_launch(self, kernel: int, grid: ct.Array[ct.c_uint], n_threads: int) -> None:
        try:
            found = KERNEL.search(self.symbols[kernel - self.base])
            assert found is not None, self.symbols[kernel - self.base]
            name = found[0]
            if name not in self.kernels:
                self.kernels[name] = ptx.Kernel(self.modules[name], name)
                self.kernels[name].adds = False
            arguments, shared = last_launch(self.lib)
            self.kernels[name].allow([of for memory in self.memories for of in memory.ranges])
            last = (grid[0] - 1, grid[1] - 1, grid[2] - 1)
            for block in {(0, 0, 0), last}:
                self.kernels[name].run(block, arguments, shared, n_threads)
        except BaseException as e:  # which ctypes would drop
            self.failure = e


def build(folder: Path, architecture: str, *defines: str) -> Interpreted:
    modules = [compiled(path.name, architecture, folder, *defines) for path in sorted(CUDA.glob("*.cu"))]
    return Interpreted(c.build_emulated(folder, *defines), modules)
