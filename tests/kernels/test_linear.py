"""project, reconstruct and moment of every version against numpy in double; choice of a version."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import ops as o
from each import each

SHAPES = [(8, 8), (16, 64), (64, 64), (24, 40), (128, 128), (72, 80), (256, 256), (5, 12)]


@dataclass
class Matrix:
    """An op's argument, its entries in double, and the underlying arrays."""

    given: o.Matrix
    entries: npt.NDArray[np.float64]
    arrays: tuple[npt.NDArray[Any], ...]


def random_matrix(rng: np.random.Generator, r: int, d: int, n_halves: int | None) -> Matrix:
    """n_halves: rows before the byte rows; None: all rows."""
    first = r if n_halves is None else min(n_halves, r // 8 * 8)
    m = rng.standard_normal((first, d)).astype(np.float16)
    if n_halves is None:
        return Matrix(o.halves(m), m.astype(np.float64), (m,))
    codes = rng.integers(-127, 128, (r - first, d), dtype=np.int8)
    step = rng.uniform(0.005, 0.02, r - first).astype(np.float16)
    given = o.Matrix(o.ptr(m), o.ptr(codes), o.ptr(step), first)
    return Matrix(given, np.concatenate([m, step[:, None].astype(np.float64) * codes]), (m, codes, step))


@each("n_halves", [None, 0, 8])
@each(("r", "d"), SHAPES)
@each("n", [0, 1, 2, 3, 17])
def test_project(table: o.Ops, r: int, d: int, n: int, n_halves: int | None) -> None:
    rng = np.random.default_rng(r + n)
    m = random_matrix(rng, r, d, n_halves)
    x = rng.standard_normal((n, d + 5)).astype(np.float32)
    x[:, d:] = np.nan
    y = np.full((n, r + 3), 7.0, np.float32)
    table.project(m.given, r, d, o.ptr(x), d + 5, n, 0.125, o.ptr(y), r + 3)
    want = 0.125 * x[:, :d].astype(np.float64) @ m.entries.T
    size = 0.125 * np.abs(x[:, :d]) @ np.abs(m.entries).T
    assert np.all(np.abs(y[:, :r] - want) <= 8 * o.EPS * size)
    assert np.all(y[:, r:] == 7.0)


@each("n_halves", [None, 0, 8])
@each(("r", "d"), SHAPES)
def test_reconstruct(table: o.Ops, r: int, d: int, n_halves: int | None) -> None:
    rng = np.random.default_rng(r)
    m = random_matrix(rng, r, d, n_halves)
    e = rng.standard_normal(r).astype(np.float32)
    out = rng.standard_normal(d + 1).astype(np.float32)
    start = out.copy()
    table.reconstruct(m.given, r, d, o.ptr(e), o.ptr(out))
    want = start[:d] + e.astype(np.float64) @ m.entries
    size = np.abs(start[:d]) + np.abs(e) @ np.abs(m.entries)
    assert np.all(np.abs(out[:d] - want) <= r / 4 * o.EPS * size + 2 * o.EPS * size)
    assert out[d] == start[d]


@each("d", [8, 24, 64, 80, 128, 256])
@each("n", [0, 1, 63, 64, 65, 200])
def test_moment(table: o.Ops, n: int, d: int) -> None:
    rng = np.random.default_rng(n + d)
    x = rng.standard_normal((n, d + 2)).astype(np.float32)
    x[:, d:] = np.nan
    s = rng.standard_normal((d, d))
    total = rng.standard_normal(d)
    s0, t0 = s.copy(), total.copy()
    table.moment(o.ptr(x), d + 2, n, d, o.ptr(s), o.ptr(total))
    y = x[:, :d].astype(np.float64)
    # f32 inside blocks of at most 64 tokens
    assert np.all(np.abs(s - (s0 + y.T @ y)) <= 16 * o.EPS * (np.abs(y).T @ np.abs(y)) + 1e-12)
    assert np.all(np.abs(total - (t0 + y.sum(0))) <= 1e-12 * (1 + np.abs(y).sum(0)))


def test_reference_is_first(tables: dict[str, o.Ops]) -> None:
    assert next(iter(tables)) == "ref"


CHILD = """
import ctypes, ops
lib = ops.load_library()
lib.subkv_kernel_name.restype = lib.subkv_last_error.restype = ctypes.c_char_p
name = lib.subkv_kernel_name()
print(name.decode() if name else "error: " + lib.subkv_last_error().decode())
"""


def chosen(kernel: str | None) -> str:
    env = {k: v for k, v in os.environ.items() if k != "SUBKV_KERNEL"}
    if kernel is not None:
        env["SUBKV_KERNEL"] = kernel
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run([sys.executable, "-c", CHILD], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_override(tables: dict[str, o.Ops]) -> None:
    assert chosen(None) == list(tables)[-1]
    for name in tables:
        assert chosen(name) == name


def test_unknown_override_is_refused(tables: dict[str, o.Ops]) -> None:
    message = chosen("sse9")
    assert message.startswith("error: ")
    for part in ("SUBKV_KERNEL", "sse9", *tables):
        assert part in message
