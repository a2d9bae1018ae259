"""ctypes mirror of kernels/include/subkv/ops.h and independent numpy definitions of rows and attention.

Cases consist of rows, [n][>= row_bytes]; the functions that call an op convert them to tiles (tiles.py).
"""

from __future__ import annotations

import ctypes as ct
import importlib
import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tiles
from tiles import TILE, Layout

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
F16 = npt.NDArray[np.float16]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]

MAX_BANDS = 8
EPS = float(np.finfo(np.float32).eps)
SCALES = np.array([0.0] + [2.0 ** ((u - 160) / 8) for u in range(1, 255)] + [np.nan], np.float32)
SCALE_ONE, SCALE_MOST, SCALE_NAN = 160, 254, 255
HALF_NAN = 0x7E00
LEAST_WEIGHT = 2.0**-126
"""Smaller weights may count as 0."""

# Paths through a trellis, trellis.h
PATH_NONE, PATH_CIRCLE, PATH_LANES = range(3)
LEAST, LEAST_LATENT = 24, 64
DOUBLE, TRIPLE = {2: 2, 3: 5, 4: 9, 5: 19, 6: 37}, {2: 4, 3: 6, 4: 12, 5: 25, 6: 50}
SHARE = {2: 0.411522634, 3: 0.40290088, 4: 0.358166188, 5: 0.353481798, 6: 0.329380765}
"""Distance of levels relative to the band's ratio."""


class Band(ct.Structure):
    _fields_ = [
        ("n", ct.c_int32),
        ("bits", ct.c_int32),
        ("first", ct.c_int32),
        ("offset", ct.c_int32),
        ("ratio", ct.c_float),
    ]


class Matrix(ct.Structure):
    """Halves; with bytes, the rows after the first n_halves are bytes with a step each."""

    _fields_ = [("halves", ct.c_void_p), ("bytes", ct.c_void_p), ("step", ct.c_void_p), ("n_halves", ct.c_int64)]


class HeadCodec(ct.Structure):
    _fields_ = [
        ("value", ct.c_int32),
        ("d", ct.c_int32),
        ("rank", ct.c_int32),
        ("row_bytes", ct.c_int32),
        ("n_bands", ct.c_int32),
        ("bands", Band * MAX_BANDS),
        ("path", ct.c_int32),
        ("encode", Matrix),
        ("decode", Matrix),
        ("offset", ct.c_void_p),
    ]


class AttendArgs(ct.Structure):
    _fields_ = [
        ("k", ct.POINTER(HeadCodec)),
        ("v", ct.POINTER(HeadCodec)),
        ("k_tiles", ct.c_void_p),
        ("v_tiles", ct.c_void_p),
        ("k_stride", ct.c_int64),
        ("v_stride", ct.c_int64),
        ("n_cells", ct.c_int64),
        ("n_tok", ct.c_int64),
        ("n_group", ct.c_int64),
        ("qt", ct.c_void_p),
        ("shift", ct.c_void_p),
        ("bias", ct.c_void_p),
        ("bias_stride", ct.c_int64),
        ("slope", ct.c_void_p),
        ("softcap", ct.c_float),
        ("m", ct.c_void_p),
        ("z", ct.c_void_p),
        ("acc", ct.c_void_p),
        ("acc_stride", ct.c_int64),
    ]


class ExactArgs(ct.Structure):
    _fields_ = [
        ("d_k", ct.c_int64),
        ("d_v", ct.c_int64),
        ("n_keys", ct.c_int64),
        ("k", ct.c_void_p),
        ("v", ct.c_void_p),
        ("n_tok", ct.c_int64),
        ("n_group", ct.c_int64),
        ("q", ct.c_void_p),
        ("bias", ct.c_void_p),
        ("bias_stride", ct.c_int64),
        ("slope", ct.c_void_p),
        ("softcap", ct.c_float),
        ("m", ct.c_void_p),
        ("z", ct.c_void_p),
        ("acc", ct.c_void_p),
        ("acc_stride", ct.c_int64),
    ]


_I64 = ct.c_int64
_P = ct.c_void_p


class Ops(ct.Structure):
    """References to Matrix, HeadCodec, AttendArgs and ExactArgs are pointers in the C++ ABI."""

    _fields_ = [
        ("name", ct.c_char_p),
        ("encode", ct.CFUNCTYPE(_I64, ct.POINTER(HeadCodec), _P, _I64, _I64, _P, _P, _I64)),
        ("dequantize", ct.CFUNCTYPE(None, ct.POINTER(HeadCodec), _P, _I64, _I64, _P, _P)),
        ("project", ct.CFUNCTYPE(None, ct.POINTER(Matrix), _I64, _I64, _P, _I64, _I64, ct.c_float, _P, _I64)),
        ("reconstruct", ct.CFUNCTYPE(None, ct.POINTER(Matrix), _I64, _I64, _P, _P)),
        ("attend", ct.CFUNCTYPE(None, ct.POINTER(AttendArgs))),
        ("attend_exact", ct.CFUNCTYPE(None, ct.POINTER(ExactArgs))),
        ("moment", ct.CFUNCTYPE(None, _P, _I64, _I64, _I64, _P, _P)),
        ("to_half", ct.CFUNCTYPE(None, _P, _P, _I64)),
        ("pack_recent", ct.CFUNCTYPE(ct.c_bool, _P, _P, _I64, _P)),
        ("unpack_recent", ct.CFUNCTYPE(None, _P, _P, _I64, _P)),
        ("rounding", ct.c_float),
    ]


FUNCTIONS = {
    "row_to_tile": ct.CFUNCTYPE(None, _P, _P, _P, _I64),
    "tile_to_row": ct.CFUNCTYPE(None, _P, _P, _I64, _P),
    "keys_to_values": ct.CFUNCTYPE(None, _P, _P, _P),
    "gather_cells": ct.CFUNCTYPE(None, _P, _P, _I64, _P, _I64, _P),
    "rows_to_tiles": ct.CFUNCTYPE(None, _P, _P, _I64, _P, _I64, _P),
    "encode_rows": ct.CFUNCTYPE(_I64, _P, _P, _P, _I64, _I64, _P),
    "dequantize_rows": ct.CFUNCTYPE(None, _P, _P, _P, _I64, _P),
    "find_path": ct.CFUNCTYPE(ct.c_float, _P, _P, ct.c_float, _P),
    "trellis_level": ct.CFUNCTYPE(ct.c_int32, ct.c_int32, ct.c_int32),
}
"""Of subkv_ops_function, by name (subkv/ops.h, subkv/trellis.h)."""


def library_name() -> str | None:
    """The library's path in SUBKV_TEST_LIB, or the module of the installed package; None: neither."""
    if path := os.environ.get("SUBKV_TEST_LIB"):
        return path
    try:
        return "subkv.native.library" if importlib.util.find_spec("subkv.native.library") is not None else None
    except ModuleNotFoundError:
        return None


def load_library() -> ct.CDLL:
    name = library_name()
    if name is None:
        raise RuntimeError("kernel tests: expected an installed subkv or SUBKV_TEST_LIB=libsubkv.so, found neither")
    lib: ct.CDLL = importlib.import_module(name).load() if name == "subkv.native.library" else ct.CDLL(name)
    lib.subkv_ops_count.restype = ct.c_int32
    lib.subkv_ops_name.argtypes = [ct.c_int32]
    lib.subkv_ops_name.restype = ct.c_char_p
    lib.subkv_ops_table.argtypes = [ct.c_int32]
    lib.subkv_ops_table.restype = ct.c_void_p
    lib.subkv_ops_function.argtypes = [ct.c_char_p]
    lib.subkv_ops_function.restype = ct.c_void_p
    for name, kind in FUNCTIONS.items():
        setattr(lib, name, kind(lib.subkv_ops_function(name.encode())))
    return lib


def versions() -> dict[str, Ops]:
    """Every version that runs here by name; "ref" is first."""
    lib = load_library()
    return {
        lib.subkv_ops_name(i).decode(): Ops.from_address(lib.subkv_ops_table(i)) for i in range(lib.subkv_ops_count())
    }


def halves(m: F16) -> Matrix:
    """m [r][d], which must outlive it."""
    return Matrix(halves=ptr(m))


def ptr(a: npt.NDArray[Any]) -> int:
    return int(a.ctypes.data)


@dataclass
class Head:
    """A HeadCodec with the arrays that it points to."""

    codec: HeadCodec
    encode: F16  # [rank][d]
    layout: Layout
    ratio: F32  # [n_bands]
    subtracted: F32 | None = None  # [rank], the codec's offset

    @property
    def rank(self) -> int:
        return int(self.codec.rank)

    @property
    def row_bytes(self) -> int:
        return int(self.codec.row_bytes)

    @property
    def value(self) -> bool:
        return bool(self.codec.value)

    def ref(self) -> Any:
        return ct.byref(self.codec)

    @property
    def coefficient_step(self) -> F32:
        """[rank] distance of neighbouring values, relative to the row's scale."""
        on = [self.codec.path != PATH_NONE and bits in SHARE for _, bits in self.layout]
        share = [np.float32(SHARE[bits] if path else 1) for path, (_, bits) in zip(on, self.layout, strict=True)]
        return np.repeat(self.ratio * np.array(share), [n for n, _ in self.layout])


def make_head(
    layout: Layout,
    d: int,
    rng: np.random.Generator,
    orthonormal: bool = False,
    subtracted: F32 | None = None,
    value: bool = False,
    latent: bool = False,
) -> Head:
    """Random basis and ratios; with `orthonormal`, E is the first rows of the identity (coefficients = inputs).

    subtracted: the codec's offset [rank]. value: the side. latent: of a latent layer, where every lane is a separate
    path.
    """
    rank = sum(n for n, _ in layout)
    assert rank <= d
    encode = (np.eye(d)[:rank] if orthonormal else rng.standard_normal((rank, d)) / np.sqrt(d)).astype(np.float16)
    ratio = (2.0 ** rng.uniform(-6, 0, len(layout))).astype(np.float32)
    codec = HeadCodec(value=value, d=d, rank=rank, n_bands=len(layout), encode=halves(encode), decode=halves(encode))
    first, offset = 0, 1
    for i, (n, bits) in enumerate(layout):
        codec.bands[i] = Band(n=n, bits=bits, first=first, offset=offset, ratio=float(ratio[i]))
        first, offset = first + n, offset + n * bits // 8
    codec.row_bytes = offset
    n_path = sum(n for n, bits in layout if bits in SHARE)
    if latent:
        codec.path = PATH_LANES if n_path >= LEAST_LATENT else PATH_NONE
    else:
        codec.path = PATH_CIRCLE if n_path >= LEAST else PATH_NONE
    if subtracted is not None:
        codec.offset = ptr(subtracted)
    return Head(codec, encode, layout, ratio, subtracted)


def codes_of(head: Head, rows: U8) -> F64:
    """Codes [n][rank] of rows [n][>= row_bytes] by FORMAT.md, as floats; a 16-bit coefficient appears as its value."""
    out = np.empty((len(rows), head.rank))
    bits = np.unpackbits(rows[:, : head.row_bytes], axis=1, bitorder="little")
    for band in head.codec.bands[: head.codec.n_bands]:
        at = 8 * band.offset + tiles.band_in_row(band.n, band.bits)
        codes = bits[:, at] @ (2 ** np.arange(band.bits))
        out[:, band.first : band.first + band.n] = codes.astype(np.uint16).view("<f2") if band.bits == 16 else codes
    return out


def alphabet(bits: int) -> F64:
    """[2^(bits+1)] the values of a band on a path (trellis.h), in steps."""
    magnitude = np.arange(2**bits, dtype=np.float64)
    far = np.maximum(magnitude - DOUBLE[bits], 0) + np.maximum(magnitude - TRIPLE[bits], 0)
    upper = magnitude + far + 0.5
    return np.concatenate([-upper[::-1], upper])


def path_of(head: Head) -> list[tuple[int, int]]:
    """(coefficient, bits) of the places of a row's path (trellis.h)."""
    bits = [b for n, b in head.layout for _ in range(n)]
    every = [(j, bits[j]) for lane in range(8) for j in range(lane, len(bits), 8) if bits[j] in SHARE]
    return every if head.codec.path != PATH_NONE else []


def dequantize(head: Head, rows: U8) -> F64:
    """Coefficients [n][rank] of rows [n][>= row_bytes], in double."""
    out = codes_of(head, rows)
    path, codes = path_of(head), np.where(np.isfinite(out), out, 0).astype(np.int64)  # halves may be infinite
    scale = SCALES[rows[:, 0]].astype(np.float64)[:, None]
    step = scale * head.coefficient_step.astype(np.float64)
    for band in head.codec.bands[: head.codec.n_bands]:
        if band.bits != 16:
            part = slice(band.first, band.first + band.n)
            out[:, part] = step[:, part] * (out[:, part] - (2**band.bits - 1) / 2)
    for t, (j, bits) in enumerate(path):
        one, two = (codes[:, path[t - back][0]] & 1 for back in (1, 2))
        if head.codec.path == PATH_LANES:
            before = [path[t - back][0] % 8 == j % 8 and t >= back for back in (1, 2)]
            one, two = one * before[0], two * before[1]
        out[:, j] = step[:, j] * alphabet(bits)[2 * codes[:, j] ^ 2 * two ^ one]
    out[rows[:, 0] == 0] = 0
    out[rows[:, 0] == SCALE_NAN] = np.nan
    return out


def random_rows(head: Head, n: int, rng: np.random.Generator) -> U8:
    """Rows of random codes with scales around 1, every seventh a zero row; 16-bit bands hold finite halves."""
    rows = rng.integers(0, 256, (n, head.row_bytes), np.uint8)
    rows[:, 0] = rng.integers(120, 165, n)
    rows[::7, 0] = 0
    for band in head.codec.bands[: head.codec.n_bands]:
        if band.bits == 16:
            h = rng.standard_normal((n, band.n)).astype("<f2").view(np.uint8)
            rows[:, band.offset : band.offset + 2 * band.n] = h
    return rows


def to_tiles(head: Head, rows: U8, extra: int = 0) -> U8:
    """Tiles [n_tiles][TILE * row_bytes + extra] of rows [n][>= row_bytes].

    Cells beyond n and the bytes between tiles, which may belong to other heads, are random.
    """
    n_tiles = -(-len(rows) // TILE)
    anything = np.random.default_rng(len(rows))
    every = anything.integers(0, 256, (n_tiles * TILE, head.row_bytes), np.uint8)
    every[: len(rows)] = rows[:, : head.row_bytes]
    out = anything.integers(0, 256, (n_tiles, TILE * head.row_bytes + extra), np.uint8)
    out[:, : TILE * head.row_bytes] = tiles.of_rows(head.layout, head.value, every)
    return out


def to_rows(head: Head, laid_out: U8) -> U8:
    """Rows [n_tiles * TILE][row_bytes] of tiles [n_tiles][>= TILE * row_bytes]."""
    return tiles.to_rows(head.layout, head.value, laid_out[:, : TILE * head.row_bytes])


def encode(ops: Ops, head: Head, x: F32, cells: list[int], rows: U8, ldx: int | None = None, extra: int = 0) -> int:
    """x [n][ldx] into rows [> max(cells)][>= row_bytes] through tiles that are `extra` bytes apart -> rows not finite.

    Other cells stay unchanged.
    """
    laid_out = to_tiles(head, rows, extra)
    before = laid_out.copy()
    index = np.array(cells, np.int64)
    bad = ops.encode(head.ref(), ptr(x), ldx or x.shape[1], len(cells), ptr(index), ptr(laid_out), laid_out.strides[0])
    after, unchanged = to_rows(head, laid_out), to_rows(head, before)
    others = np.setdiff1d(np.arange(len(unchanged)), index)
    assert np.array_equal(after[others], unchanged[others])
    assert np.array_equal(laid_out[:, TILE * head.row_bytes :], before[:, TILE * head.row_bytes :])
    rows[:, : head.row_bytes] = after[: len(rows)]
    return int(bad)


@dataclass
class State:
    """Online-softmax state of n rows; guard columns beyond d must stay untouched."""

    m: F32
    z: F32
    acc: F32

    @classmethod
    def start(cls, n: int, d: int, guard: int = 3) -> State:
        acc = np.zeros((n, d + guard), np.float32)
        acc[:, d:] = 12345.0
        return cls(np.full(n, -np.inf, np.float32), np.zeros(n, np.float32), acc)

    def copy(self) -> State:
        return State(self.m.copy(), self.z.copy(), self.acc.copy())


def attend(
    ops: Ops,
    k: Head,
    v: Head,
    k_rows: U8,
    v_rows: U8,
    q: F32,
    bias: F32,
    slope: F32,
    softcap: float,
    state: State,
    shift: F32 | None = None,
    extra: int = 0,
) -> None:
    """q [n_tok*n_group][rank]; shift [n_tok*n_group]; bias [n_tok][>= n_cells]; rows [n_cells][>= row_bytes].

    Updates state. extra: bytes between tiles of keys; twice that between tiles of values.
    """
    laid_out = to_tiles(k, k_rows, extra), to_tiles(v, v_rows, 2 * extra)
    attend_tiles(ops, k, v, *laid_out, len(k_rows), q, bias, slope, softcap, state, shift)


def attend_tiles(
    ops: Ops,
    k: Head,
    v: Head,
    k_tiles: U8,
    v_tiles: U8,
    n_cells: int,
    q: F32,
    bias: F32,
    slope: F32,
    softcap: float,
    state: State,
    shift: F32 | None = None,
) -> None:
    """As attend; tiles [n_tiles][..], one row of the array a tile."""
    args = AttendArgs(
        k=ct.pointer(k.codec),
        v=ct.pointer(v.codec),
        k_tiles=ptr(k_tiles),
        v_tiles=ptr(v_tiles),
        k_stride=k_tiles.strides[0],
        v_stride=v_tiles.strides[0],
        n_cells=n_cells,
        n_tok=len(bias),
        n_group=len(slope),
        qt=ptr(q),
        shift=None if shift is None else ptr(shift),
        bias=ptr(bias),
        bias_stride=bias.strides[0] // 4,
        slope=ptr(slope),
        softcap=softcap,
        m=ptr(state.m),
        z=ptr(state.z),
        acc=ptr(state.acc),
        acc_stride=state.acc.strides[0] // 4,
    )
    ops.attend(ct.byref(args))


def attend_exact(
    ops: Ops,
    keys: list[int],
    values: list[int],
    d_k: int,
    d_v: int,
    q: F32,
    bias: F32,
    slope: F32,
    softcap: float,
    state: State,
) -> None:
    """keys, values: addresses of half rows; the rest as attend."""
    k = (ct.c_void_p * max(1, len(keys)))(*keys)
    v = (ct.c_void_p * max(1, len(values)))(*values)
    args = ExactArgs(
        d_k=d_k,
        d_v=d_v,
        n_keys=len(keys),
        k=ct.addressof(k),
        v=ct.addressof(v),
        n_tok=len(bias),
        n_group=len(slope),
        q=ptr(q),
        bias=ptr(bias),
        bias_stride=bias.strides[0] // 4,
        slope=ptr(slope),
        softcap=softcap,
        m=ptr(state.m),
        z=ptr(state.z),
        acc=ptr(state.acc),
        acc_stride=state.acc.strides[0] // 4,
    )
    ops.attend_exact(ct.byref(args))


def attention(
    q: F32, k: F64, v: F64, bias: F32, slope: F32, softcap: float, shift: F32 | None = None
) -> tuple[F64, F64, F64, F64, F64, F64]:
    """Ordinary softmax in double, from a fresh state.

    q [n_tok*G][d_k], k [n][d_k], v [n][d_v], bias [n_tok][>= n] -> m, z [n_tok*G], acc [n_tok*G][d_v], and for
    tolerances: the largest |q|.|k| sum of any visible cell [n_tok*G], sum exp * |v| [n_tok*G][d_v], and the weights exp
    [n_tok*G][n]. A lost row (ops.h) has z NaN.
    """
    n, row = len(k), np.arange(len(q))
    b = bias[row // len(slope), :n].astype(np.float64)
    visible = ~np.isneginf(b)
    live, used = visible.any(axis=1), visible.any(axis=0)
    if not used.all():  # the other cells may hold anything
        k, v = np.where(used[:, None], k, 0.0), np.where(used[:, None], v, 0.0)
    b, queries = np.where(visible, b, 0.0), q.astype(np.float64)
    common = np.zeros(len(q)) if shift is None else shift.astype(np.float64)
    with np.errstate(invalid="ignore"):
        x = queries @ k.T + common[:, None]
    lost = (visible & ~np.isfinite(x + slope[row % len(slope), None] * b)).any(axis=1)
    if softcap > 0:
        x = softcap * np.tanh(x / softcap)
    x = np.where(visible, x + slope[row % len(slope), None] * b, -np.inf)
    x[lost] = -np.inf
    live &= ~lost
    m = x.max(axis=1, initial=-np.inf).astype(np.float32).astype(np.float64)
    weights = np.exp(x - np.where(live, m, 0.0)[:, None])
    size = np.where(visible, np.abs(queries) @ np.abs(k).T, 0.0).max(axis=1, initial=0.0)
    size += np.abs(b).max(axis=1, initial=0.0) + softcap + np.abs(common)
    bad = ~np.isfinite(v).all(axis=1)
    lost |= (weights[:, bad] >= LEAST_WEIGHT).any(axis=1)
    v = np.where(bad[:, None], 0.0, v)
    z, acc, weight_v = np.where(lost, np.nan, weights.sum(axis=1)), weights @ v, weights @ np.abs(v)
    return m, z, acc, size, weight_v, weights
