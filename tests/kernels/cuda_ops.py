"""The CUDA ops through ctypes: kernels/cuda compiled by nvcc for this machine's GPU, or for the CPU (emulated/)."""

from __future__ import annotations

import ctypes as ct
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import layers
import numpy as np
import numpy.typing as npt
import ops as o
from compiled import linked, objects

ROOT = Path(__file__).resolve().parents[2]
DECODE_GROUP, DECODE_HEAD, DECODE_TOKENS = 8, 256, 8
MATRIX_ROWS = 16
ALIGNED = 64  # bytes, as a device's memory is at least
_P, _I32, _I64, _F32 = ct.c_void_p, ct.c_int32, ct.c_int64, ct.c_float


def _fields(**types: Any) -> list[tuple[str, Any]]:
    """Fields by type: _fields(a=_P, ...); a name may hold several, separated by two underscores."""
    return [(name, type_) for names, type_ in types.items() for name in names.split("__")]


class Layer(ct.Structure):
    _fields_ = [
        *_fields(k__v__k_offset__v_offset__gamma__mean__plan__tiles__slope__n_bad=_P),
        *_fields(n_head_kv__n_group__d_k__d_v__width_k__width_v__row_bytes_k__row_bytes_v=_I32),
        *_fields(scale__softcap=_F32, latent=ct.c_bool),
    ]


class BlockSteps(ct.Structure):
    """subkv/splits.h"""

    _fields_ = _fields(n_processors__resident__cells__steps__waves=_I64)


class Encode(ct.Structure):
    _fields_ = [
        ("layer", Layer),
        *_fields(k__v=_P, k_head__k_token__v_head__v_token=_I64, k_tiles__v_tiles=_P, k_stride__v_stride=_I64),
        *_fields(cells__fresh=_P, n_tok=_I64),
    ]


class Attend(ct.Structure):
    _fields_ = [
        ("layer", Layer),
        *_fields(q=_P, q_head__q_token=_I64, k_tiles__v_tiles=_P, k_stride__v_stride__k_stream__v_stream=_I64),
        *_fields(mask=_P, mask_half=ct.c_bool, cell_pos__tokens=_P, n_sink__n_recent=_I32),
        *_fields(n_kv__n_stream__n_tps__split__n_split=_I64, m__z__acc__qt__shift__words__exact=_P),
    ]


class StoreRows(ct.Structure):
    _fields_ = [
        *_fields(k__v=_P, k_head__k_token__v_head__v_token=_I64, k_tiles__v_tiles__fresh__window__slots=_P),
        ("n_slots", _I64),
    ]


WINDOW_ROWS = 128


class EncodeWindow(ct.Structure):
    _fields_ = [("encode", Encode), ("window", _P), ("rows", _I32 * (2 * WINDOW_ROWS))]


class Combine(ct.Structure):
    _fields_ = [
        ("a", Attend),
        *_fields(fresh__window__slots=_P, slots_of_seq=_I32, sinks__out=_P, out_stride=_I64, has_exact=ct.c_bool),
    ]


class StoreAndAttend(ct.Structure):
    _fields_ = [("store", StoreRows), ("args", Combine)]


class Prompt(ct.Structure):
    _fields_ = [("c", Combine), *_fields(n_slots__n_rows=_I64, first__n_heads=_I32, k__v__mask=_P)]


class Store(ct.Structure):
    _fields_ = _fields(window__fresh__slots=_P, n_slots__width=_I64)


class Memory(Protocol):
    """Memory that a library's pointers refer to."""

    def put(self, array: npt.NDArray[Any]) -> tuple[int, Callable[[], npt.NDArray[Any]]]:
        """Copies an array -> its address, and a function that reads it back. Freed with the Memory."""


class HostMemory:
    def __init__(self) -> None:
        self.arrays: list[npt.NDArray[Any]] = []
        self.ranges: list[tuple[int, int]] = []  # of the copies: first byte, and the one behind the last

    def put(self, array: npt.NDArray[Any]) -> tuple[int, Callable[[], npt.NDArray[Any]]]:
        room = np.zeros(array.nbytes + ALIGNED, np.uint8)
        first = -o.ptr(room) % ALIGNED
        copy = room[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        self.arrays.append(room)
        self.ranges.append((o.ptr(copy), o.ptr(copy) + array.nbytes))
        return o.ptr(copy), lambda: copy


class DeviceMemory:
    """Memory of the current CUDA device, through PyTorch."""

    def __init__(self) -> None:
        self.arrays: list[Any] = []

    def put(self, array: npt.NDArray[Any]) -> tuple[int, Callable[[], npt.NDArray[Any]]]:
        import torch

        array = np.ascontiguousarray(array)
        bytes_ = torch.from_numpy(array.reshape(-1).view(np.uint8).copy()).cuda()
        self.arrays.append(bytes_)
        return int(bytes_.data_ptr()), lambda: bytes_.cpu().numpy().view(array.dtype).reshape(array.shape)


class Library:
    """kernels/cuda, built for the given kind of memory."""

    def __init__(self, path: Path, memory: Callable[[], Memory]) -> None:
        self.lib = ct.CDLL(str(path))
        self.memory = memory
        self.lib.subkv_ops_table.restype = ct.c_void_p

    def ref(self) -> o.Ops:
        """The scalar definition, which is compiled into the same library."""
        return o.Ops.from_address(self.lib.subkv_ops_table(0))

    def rounding(self, decodes: bool, latent: bool, width: int) -> str | None:
        """The form to which attend rounds queries and weights: "bytes" (two each) or "halves"; None: no rounding.

        decodes: CUDA's decode kernel runs the call. width: coefficients of the largest head.
        """
        return "bytes" if decodes else "halves"

    def encoded(self, x: o.F32) -> o.F32:
        """The rows that encode encodes: rounded to halves."""
        with np.errstate(over="ignore"):
            return np.where(np.isfinite(x), np.clip(x, -65504, 65504).astype(np.float16).astype(np.float32), x)

    def exact(self) -> list[o.Ops]:
        """References; encode's bytes equal those of one of them for the same coefficients."""
        return [self.ref()]

    def query_words(self, layer: Layer) -> int:
        """Of a token and KV head, in Attend.words."""
        self.lib.test_query_words.restype, self.lib.test_query_words.argtypes = ct.c_int64, [ct.c_void_p]
        return int(self.lib.test_query_words(ct.addressof(layer)))

    def exact_floats(self, layer: Layer, n_rows: int, n_tps: int, slots_of_seq: int) -> int:
        """Of Attend.exact, for n_rows query rows of all heads."""
        function = self.lib.test_exact_floats
        function.restype, function.argtypes = _I64, [_P, _I64, _I64, _I32]
        return int(function(ct.addressof(layer), n_rows, n_tps, slots_of_seq))

    def plans(self, k: layers.Side, v: layers.Side) -> npt.NDArray[np.uint8]:
        """Of all heads, for Layer.plan."""
        make = self.lib.test_make_plan
        make.restype, make.argtypes = ct.c_size_t, [_P, _P, _P]
        made = []
        for heads in zip(k.heads, v.heads, strict=True):
            codecs = [ct.addressof(head.codec) for head in heads]
            plan = np.zeros(make(*codecs, None), np.uint8)
            make(*codecs, o.ptr(plan))
            made.append(plan)
        return np.concatenate(made)

    def block_steps(self, layer: Layer) -> BlockSteps:
        """How attend's blocks work on device 0."""
        steps, function = BlockSteps(), self.lib.test_block_steps
        function.restype, function.argtypes = None, [_P, _P]
        function(ct.addressof(layer), ct.addressof(steps))
        return steps

    def cells_of_split(self, steps: BlockSteps, n_kv: int, n_blocks: int, most: int) -> int:
        function = self.lib.test_cells_of_split
        function.restype, function.argtypes = _I64, [_P, _I64, _I64, _I64]
        return int(function(ct.addressof(steps), n_kv, n_blocks, most))

    def run(self, name: str, args: ct.Structure, stream: ct.c_void_p | None = None) -> None:
        """Launches an op, by default on the stream that later copies from the device wait for."""
        function = self.lib[f"test_{name}"]
        function.restype, function.argtypes = ct.c_char_p, [ct.c_void_p, ct.c_void_p]
        if error := function(ct.addressof(args), stream):
            raise RuntimeError(f"{name}: {error.decode()}")


NATIVE = ROOT / "runtime/native"
SOURCES = [
    *sorted(ROOT.glob("kernels/cuda/*.cu")),
    *(NATIVE / name for name in ("cuda/layer_tables.cpp", "capi/cuda/capi_cuda.cpp", "capi/row_codec.cpp")),
    ROOT / "tests/kernels/cuda_capi.cpp",
]
REF = [
    *sorted((ROOT / "kernels/ref").glob("*.cpp")),
    *(ROOT / "kernels/cpu" / name for name in ("tiles.cpp", "gather.cpp")),
    *(NATIVE / name for name in ("capi/capi_ops.cpp", "base/error.cpp")),
    ROOT / "tests/kernels/ref_capi.cpp",
]
INCLUDE = [
    f"-I{ROOT}/kernels/include",
    *(f"-I{NATIVE}/{name}" for name in ("include", "base", "bases", "capi", "cuda", "engine")),
]


def build_emulated(folder: Path, *defines: str) -> Library:
    """Compiled for the CPU by c++, with these options of the compiler; needs no CUDA."""
    emulated = ROOT / "tests/kernels/emulated"
    flags = ["-std=c++17", "-O2", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    sources = [*SOURCES, *REF, emulated / "emulated.cpp"]
    built = objects(sources, [*flags, *defines, f"-I{emulated}", *INCLUDE, "-x", "c++"], folder)
    return Library(linked(folder / "libemulated.so", built, ["-shared"]), HostMemory)


def build_ref(folder: Path, name: str = "libref.so", *flags: str) -> Path:
    """Builds the reference kernels, which ops.py loads from SUBKV_TEST_LIB."""
    built = objects(REF, ["-std=c++17", "-O2", "-fPIC", *flags, *INCLUDE], folder)
    return linked(folder / name, built, ["-shared"])


WARP_PAIRS = "-DSUBKV_WARP_PAIRS"  # kernels/cuda/pairs.cuh


def nvcc() -> str | None:
    """CUDA's compiler: CUDACXX, from the PATH, or from the toolkit's usual folder."""
    usual = Path("/usr/local/cuda/bin/nvcc")
    return os.environ.get("CUDACXX") or shutil.which("nvcc") or (str(usual) if usual.exists() else None)


NVCC_FLAGS = ["-std=c++17", "-Xcompiler=-fPIC,-Wall,-Wextra", "-Werror=all-warnings", *INCLUDE]


def build_native(folder: Path, compiler: str, arch: str = "native") -> Library:
    """Compiled by nvcc for this machine's GPU. Raises subprocess.CalledProcessError."""
    flags = [*NVCC_FLAGS, "-O3", f"-arch={arch}"]
    built = objects([*SOURCES, *REF], flags, folder, compiler)
    subprocess.run([compiler, f"-arch={arch}", "-shared", "-o", "libnative.so", *built], cwd=folder, check=True)
    return Library(folder / "libnative.so", DeviceMemory)


class Heads:
    """A layer of a test in a library's memory."""

    def __init__(
        self,
        library: Library,
        memory: Memory,
        k: layers.Side,
        v: layers.Side,
        n_group: int,
        means: bool = False,
        n_bad: int = 0,
    ) -> None:
        rng = np.random.default_rng(len(k.heads))
        n_head = len(k.heads)
        self.memory, self.k, self.v, self.n_group = memory, k, v, n_group
        self.gamma = rng.uniform(0.5, 1.5, n_head).astype(np.float32)
        self.slope = rng.uniform(0, 1.5, n_head * n_group).astype(np.float32)
        self.mean = [rng.standard_normal(k.d).astype(np.float16) if means else None for _ in range(n_head)]
        n_bad_at, self.n_bad = memory.put(np.full(1, n_bad, np.uint64))
        parts = [[side.parts()[h] for side in (k, v)] for h in range(n_head)]
        sizes = [[part.start for part in of] + [part.stop - part.start for part in of] for of in parts]
        self.tiles = o.TILE * np.array(sizes, np.int32)
        self.layer = Layer(
            k=self._codecs(k),
            v=self._codecs(v),
            k_offset=memory.put(np.array([o.TILE * part.start for part in k.parts()], np.int64))[0],
            v_offset=memory.put(np.array([o.TILE * part.start for part in v.parts()], np.int64))[0],
            gamma=memory.put(self.gamma)[0],
            mean=memory.put(np.array([0 if m is None else memory.put(m)[0] for m in self.mean], np.uint64))[0],
            plan=memory.put(library.plans(k, v))[0],
            tiles=o.ptr(self.tiles),
            slope=memory.put(self.slope)[0],
            n_bad=n_bad_at,
            n_head_kv=n_head,
            n_group=n_group,
            d_k=k.d,
            d_v=v.d,
            width_k=max(head.rank for head in k.heads),
            width_v=max(head.rank for head in v.heads),
            row_bytes_k=max(head.row_bytes for head in k.heads),
            row_bytes_v=max(head.row_bytes for head in v.heads),
            scale=1.0,
            softcap=0.0,
        )

    def _codecs(self, side: layers.Side) -> int:
        """The codecs, with addresses in that memory."""
        copies = []
        for head in side.heads:
            codec = o.HeadCodec.from_buffer_copy(head.codec)
            matrix = np.pad(head.encode, ((0, -len(head.encode) % MATRIX_ROWS), (0, 0)))
            codec.encode = codec.decode = o.Matrix(self.memory.put(matrix)[0])
            codec.offset = None if head.subtracted is None else self.memory.put(head.subtracted)[0]
            copies.append(np.frombuffer(bytes(codec), np.uint8))
        return self.memory.put(np.concatenate(copies))[0]


def exact_positions(cell_pos: npt.NDArray[np.int32], pos: int, n_sink: int, n_recent: int) -> npt.NDArray[np.bool_]:
    """Which of the cells the token at `pos` attends to exactly."""
    return (cell_pos < n_sink) | ((cell_pos <= pos) & (cell_pos > pos - n_recent))
