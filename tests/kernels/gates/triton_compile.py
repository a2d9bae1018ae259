"""Compiles Triton's kernels for GPUs that this machine lacks; prints a line of JSON per kernel and target.

A separate program, because tests interpret the kernels and Triton decides that at import. Arguments: targets.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from triton import compile as compile_kernel
from triton import next_power_of_2
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource

from subkv_triton import attend, combine, encode, launch, path

TYPES = {
    **dict.fromkeys(("qt_ptr", "shift_ptr", "bias_ptr", "slope_ptr", "scales_ptr", "sinks_ptr", "q_ptr"), "*fp32"),
    **dict.fromkeys(("m_ptr", "z_ptr", "acc_ptr", "out_ptr", "c_ptr", "k_steps", "v_steps"), "*fp32"),
    **dict.fromkeys(("ratios_ptr", "zeros_ptr", "off_path_ptr", "numbers_ptr"), "*fp32"),
    **dict.fromkeys(("decode_ptr", "k_ptr", "v_ptr"), "*fp16"),
    **dict.fromkeys(("rows_ptr", "codes_ptr"), "*u8"),
    **dict.fromkeys(("k_rows_ptr", "v_rows_ptr", "k_octets", "v_octets"), "*i32"),
    **dict.fromkeys(("k_table", "v_table", "coefficients_ptr", "packing_ptr", "bad_ptr"), "*i32"),
    **dict.fromkeys(("k_offsets", "v_offsets", "offsets_ptr", "lengths_ptr"), "*i32"),
    **dict.fromkeys(("chosen_ptr", "decisions_ptr", "places_ptr"), "*i32"),
    "cells_ptr": "*i64",
    "softcap": "fp32",
}
"""Types of arguments; all others are i32, not assumed to be multiples of 16."""


def kernels(target: GPUTarget) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(name, function, constants) of the package's launches, for heads of full rank without 16-bit bands."""
    plain = {"K_HALF": False, "V_HALF": False, "HAS_SHIFT": False, "HAS_CAP": False}
    plain |= dict.fromkeys(("K_PATH", "V_PATH", "K_HIGH", "V_HIGH"), True)
    for d, group, kind in ((64, 3, "G 3"), (128, 4, "G 4"), (128, 8, "G 8"), (64, 3, "prompt"), (128, 4, "prompt")):
        shapes = launch.shapes_of(target.backend, target.arch, d, False)
        prompt = kind == "prompt"
        shape = shapes.prompt if prompt else shapes.decode
        rows = shape.rows if prompt else max(shapes.least_rows, next_power_of_2(group))
        size = {"G": group, "RK": d, "RV": d, "M": rows, "C": shape.cells, "num_warps": shape.warps}
        yield f"attend d {d} {kind}", attend._attend, {**plain, **size, "CELLS": int(prompt), "SETTLED": shape.settled}
    for d, group in ((64, 3), (128, 4)):
        size = {"G": group, "RV": d, "DK": d, "DV": d, "R": min(d, combine.BLOCK_RANK), "D": min(d, combine.BLOCK_RANK)}
        blocks = {"M": combine.BLOCK_ROWS, "C": combine.BLOCK_KEYS}
        yield f"combine d {d}", combine._combine, {**size, **blocks, "HAS_CAP": False, "HAS_SINKS": False}
    for d, row_bytes in ((64, 36), (128, 71)):  # 4.3 bits per element
        yield f"encode scale d {d}", encode._choose, {"R": d, "ANY_PATH": True}
        yield f"encode path d {d}", path._find, {"R": d, "B": path.BLOCK}
        yield f"encode bytes d {d}", encode._pack, {"R": d, "B": next_power_of_2(row_bytes), "ANY_PATH": True}


def target_of(name: str) -> GPUTarget:
    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name[3:]), 32)
    return GPUTarget("hip", name, 32 if name.startswith(("gfx10", "gfx11", "gfx12")) else 64)


def longest_loop(text: str) -> int:
    """Instructions of the longest loop in PTX or in LLVM's assembly."""
    labels: dict[str, int] = {}
    n = longest = 0
    for line in map(str.strip, text.splitlines()):
        if label := re.match(r"([$.\w]+):", line):
            labels[label[1]] = n
        elif re.match(r"(@!?%\w+ )?[a-z]\w", line):
            n += 1
            for to in re.findall(r"bra\w*[\w.]*\s+([$.\w]+)", line):
                longest = max(longest, n - labels.get(to, n))
    return longest


def compiled(function: Any, constants: dict[str, Any], target: GPUTarget) -> dict[str, int]:
    """Registers and spilled bytes per thread, shared bytes per program, instructions of the longest loop.

    constants may include num_warps.
    """
    options = {name: constants[name] for name in ("num_warps",) if name in constants}
    constants = {name: x for name, x in constants.items() if name not in options}
    types = {p.name: "constexpr" if p.name in constants else TYPES.get(p.name, "i32") for p in function.params}
    aligned = {(i,): [["tt.divisibility", 16]] for i, p in enumerate(function.params) if types[p.name].startswith("*")}
    kernel = compile_kernel(ASTSource(function, types, constants, aligned), target=target, options=options)
    shared = int(kernel.metadata.shared)
    size = longest_loop(kernel.asm["amdgcn" if target.backend == "hip" else "ptx"])
    if target.backend == "hip":
        text = kernel.asm["amdgcn"]
        registers, spilled = (
            int(re.findall(rf"\.{key}:\s+(\d+)", text)[0]) for key in ("vgpr_count", "vgpr_spill_count")
        )
        return {"registers": registers, "spilled": 4 * spilled, "shared": shared, "size": size}
    with tempfile.NamedTemporaryFile(suffix=".ptx") as ptx:
        ptx.write(kernel.asm["ptx"].encode())
        ptx.flush()
        arch = sm_arch_from_capability(target.arch)
        command = [get_ptxas(target.arch).path, "-v", f"--gpu-name={arch}", ptx.name, "-o", "/dev/null"]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": int(re.findall(r"Used (\d+) registers", output)[0]),
        "spilled": int(re.findall(r"(\d+) bytes spill stores", output)[0]),
        "shared": shared,
        "size": size,
    }


def main() -> None:
    for name in sys.argv[1:]:
        target = target_of(name)
        for kernel, function, constants in kernels(target):
            numbers = compiled(function, constants, target)
            print(json.dumps({"kernel": kernel, "target": name, **numbers}), flush=True)


if __name__ == "__main__":
    main()
