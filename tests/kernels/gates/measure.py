"""Compiler figures of the GPU kernels without a GPU: RADV's, ptxas's, and Triton's.

measure_* returns {(kernel, target): numbers}. missing_* returns the reason if a group cannot be measured: a tool is
missing, or its version differs from that of the recorded bounds.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import cuda_ops as c
import vulkan_ops as v

HERE = Path(__file__).resolve().parent
Numbers = dict[str, int]
Figures = dict[tuple[str, str], Numbers]

MESA, NVCC, TRITON = "22.3.6", "13.0", "3.9.0"
"""Versions of the recorded bounds."""


def run(command: list[str | Path], folder: Path, **environment: str) -> tuple[str, str]:
    """Run a command; returns stdout and stderr. Raises RuntimeError with both if it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        raise RuntimeError(f"{command[0]}: {done.stdout}{done.stderr}")
    return done.stdout, done.stderr


#
# Vulkan
#


def manifest() -> Path | None:
    """RADV's loader manifest; with it the Vulkan loader uses no other driver."""
    return next(iter(sorted(Path("/usr/share/vulkan/icd.d").glob("radeon_icd*.json"))), None)


@functools.cache
def missing_vulkan() -> str | None:
    if reason := v.missing():
        return reason
    if manifest() is None or shutil.which("dpkg-query") is None:
        return "no RADV of Debian's (mesa-vulkan-drivers)"
    command = ["dpkg-query", "-W", "-f", "${Version}", "mesa-vulkan-drivers"]
    installed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return None if installed.startswith(MESA) else f"mesa-vulkan-drivers: {MESA} expected, {installed or 'none'} found"


def measure_vulkan(folder: Path, targets: list[str]) -> Figures:
    """Every pipeline of the ops for typical heads."""
    for shader in v.SHADERS:
        run(["glslc", *v.GLSLC_FLAGS, "-mfmt=c", "-o", f"{shader.stem}.inc", shader], folder)
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Werror", *c.INCLUDE, "-I."]
    ref = [source for source in c.REF if source.parent.parent.name == "kernels"]
    sources = [HERE / "pipelines.cpp", *sorted(v.VULKAN.glob("*.cpp")), *ref]
    run(["c++", *flags, *sources, "-o", "pipelines", "-lvulkan"], folder)
    figures: Figures = {}
    for family in targets:
        environment = {"RADV_FORCE_FAMILY": family, "VK_ICD_FILENAMES": str(manifest())}
        out, _ = run([folder / "pipelines"], folder, MESA_SHADER_CACHE_DISABLE="1", **environment)
        for line in out.splitlines():
            name, *fields = line.split("\t")
            all_ = {key: int(value) for key, value in (field.split("=") for field in fields)}
            figures[name, family] = {
                "registers": all_["VGPRs"],
                "spilled": all_["Spilled VGPRs"] + all_["Spilled SGPRs"],
                "shared": all_["LDS size"],
                "size": all_["Instructions"],
                "resident": all_["Subgroups per SIMD"],
            }
    return figures


#
# CUDA
#

CARDS = {  # registers, KiB of shared memory, maximum KiB of a block, warps, blocks, reserved bytes of a block
    "sm_75": (65536, 64, 64, 32, 16, 0),
    "sm_80": (65536, 164, 163, 64, 32, 1024),
    "sm_86": (65536, 100, 99, 48, 16, 1024),
    "sm_89": (65536, 100, 99, 48, 24, 1024),
    "sm_90": (65536, 228, 227, 64, 32, 1024),
    "sm_120": (65536, 100, 99, 48, 24, 1024),
}
"""Limits of a multiprocessor."""
WARPS_OF_BLOCK = {"combine": 16, "project_decode": 16}  # by the first word of a kernel's name; others have 4
ENTRIES = {  # part of the mangled name: names of kernels, one per size of shared memory
    "13decode_kernelILi1EE": ["decode d 64 G 3", "decode d 128 G 4"],
    "13decode_kernelILi2EE": ["decode d 128 G 8"],
    "tiles_kernel": ["tiles d 64", "tiles d 128", "tiles latent"],
    "combine_kernelILi1E": ["combine"],
    "combine_kernelILi5E": ["combine latent"],
    "encode_kernelILb0E": ["encode"],
    "encode_kernelILb1E": ["encode latent"],
    "project_kernel": ["project"],
    "project_decode_kernelILi1ELi1EE": ["project_decode d 128 G 4"],
    "project_decode_kernelILi2ELi1EE": ["project_decode d 128 G 8"],
    "store_kernel": ["store"],
}


def blocks(arch: str, name: str, registers: int, shared: int) -> int:
    """Concurrent blocks of a multiprocessor, by CUDA's rules of allocation."""
    of_block = WARPS_OF_BLOCK.get(name.split()[0], 4)
    all_registers, kib, _, warps, most, reserved = CARDS[arch]
    warp_registers = -(-registers * 32 // 256) * 256
    block_bytes = -(-(shared + reserved) // 256) * 256
    by_shared = (kib << 10) // block_bytes if block_bytes else most
    return min(all_registers // warp_registers // of_block, by_shared, warps // of_block, most)


@functools.cache
def missing_cuda() -> str | None:
    if (nvcc := c.nvcc()) is None:
        return "no nvcc on the PATH, in CUDACXX or /usr/local/cuda"
    out, _ = run([nvcc, "--version"], HERE)
    installed = re.findall(r"release ([\d.]+)", out)
    return None if installed == [NVCC] else f"nvcc: {NVCC} expected, {' '.join(installed) or out} found"


def section_sizes(elf: bytes) -> dict[str, int]:
    """Size in bytes of every section of a 64-bit ELF file."""
    at, n, names = struct.unpack_from("<Q10xHHH", elf, 40)[0], *struct.unpack_from("<HH", elf, 60)
    headers = [struct.unpack_from("<II4Q", elf, at + 64 * i) for i in range(n)]
    strings = headers[names][4]
    text = {i: elf[strings + header[0] :].split(b"\0", 1)[0].decode() for i, header in enumerate(headers)}
    return {text[i]: header[5] for i, header in enumerate(headers)}


def shared_bytes(folder: Path) -> dict[tuple[int, str], int]:
    """Dynamic shared memory in bytes, by maximum of the device (KiB) and kernel."""
    emulated = c.ROOT / "tests/kernels/emulated"
    cuda = [source for source in c.SOURCES if source.suffix == ".cu"]
    flags = ["-std=c++17", "-O0", "-Wno-unknown-pragmas", f"-I{emulated}", *c.INCLUDE, "-x", "c++"]
    run(["c++", *flags, HERE / "shared.cpp", emulated / "emulated.cpp", *cuda, "-o", "shared"], folder)
    out, _ = run([folder / "shared"], folder)
    lines = [line.split("\t") for line in out.splitlines()]
    return {(int(most) >> 10, name): int(n) for most, name, n in lines}


def measure_cuda(folder: Path, targets: list[str]) -> Figures:
    nvcc = c.nvcc()
    assert nvcc is not None
    shared = shared_bytes(folder)
    figures: Figures = {}
    for arch in targets:
        for source in sorted(c.ROOT.glob("kernels/cuda/*.cu")):
            virtual = arch.replace("sm", "compute")
            run([nvcc, "-std=c++17", "-O3", *c.INCLUDE, "-ptx", f"-arch={virtual}", source, "-o", "k.ptx"], folder)
            entries = re.findall(r"\.entry (\w+)", (folder / "k.ptx").read_text())
            entries_of = {entry: names for entry in entries for part, names in ENTRIES.items() if part in entry}
            if not entries_of:
                continue
            only = ",".join(f"-e,{entry}" for entry in entries_of)
            _, output = run([nvcc, "-cubin", f"-arch={arch}", f"-Xptxas=-v,{only}", "k.ptx", "-o", "k.cubin"], folder)
            sizes = section_sizes((folder / "k.cubin").read_bytes())
            for entry, names in entries_of.items():
                part = output[output.index(f"Function properties for {entry}") :]
                registers = int(re.findall(r"Used (\d+) registers", part)[0])
                for name in names:
                    n = shared[CARDS[arch][2], name]
                    figures[name, arch] = {
                        "registers": registers,
                        "spilled": int(re.findall(r"(\d+) bytes spill stores", part)[0]),
                        "shared": n,
                        "size": sizes[f".text.{entry}"],
                        "resident": blocks(arch, name, registers, n),
                    }
    return figures


#
# Triton
#


@functools.cache
def missing_triton() -> str | None:
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"package {package} is not installed"
    installed = importlib.metadata.version("triton")
    return None if installed == TRITON else f"triton: {TRITON} expected, {installed} found"


def measure_triton(folder: Path, targets: list[str]) -> Figures:
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache"), "TRITON_DEFAULT_FP_FUSION": "1"}
    command: list[str | Path] = [sys.executable, HERE / "triton_compile.py", *targets]
    out, _ = run(command, folder, PYTHONPATH=str(c.ROOT / "kernels/triton"), **environment)
    figures: Figures = {}
    for line in out.splitlines():
        numbers = json.loads(line)
        figures[numbers.pop("kernel"), numbers.pop("target")] = numbers
    return figures
