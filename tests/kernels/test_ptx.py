"""The decode kernel's PTX, run by an interpreter; sm_75 has different code than sm_80 and later."""

from __future__ import annotations

import ctypes as ct
import re
from pathlib import Path

import cuda_ops as c
import layers
import numpy as np
import ops as o
import ptx
import pytest
from cuda_calls import N_SLOTS, Call, Exact, Shape
from each import each
from interpreted import compiled, last_launch
from shared_memory import Race
from test_cuda import LARGE, check_attend

ARCHITECTURES = ["compute_75", "compute_80"]
PLANNED: tuple[o.Layout, o.Layout] = (((16, 8), (16, 6), (32, 4), (64, 3)), ((16, 6), (80, 4), (32, 3)))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(c.nvcc() is None, reason="no nvcc on the PATH, in CUDACXX or /usr/local/cuda"),
]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> c.Library:
    return c.build_emulated(tmp_path_factory.mktemp("emulated"))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def module(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return compiled("attend_decode.cu", request.param, tmp_path_factory.mktemp("ptx"))


class Decoding(c.Library):
    """Runs the decode kernel's PTX with the arguments of the emulated kernel."""

    def __init__(self, emulated: c.Library, module: str) -> None:
        self.emulated, self.module, self.memory, self.lib = emulated, module, emulated.memory, emulated.lib
        self.kernel: ptx.Kernel | None = None

    def run(self, name: str, args: ct.Structure, stream: ct.c_void_p | None = None) -> None:
        assert name == "attend" and isinstance(args, c.Attend)
        self.emulated.run("project_queries", args)
        self.emulated.run("attend_decode", args)
        n_rows = args.n_split * args.layer.n_head_kv * args.n_stream * args.layer.n_group
        for at, width in ((args.m, 1), (args.z, 1), (args.acc, args.layer.width_v)):
            ct.memset(at, 0xFF, 4 * n_rows * width)  # NaN
        job, shared = last_launch(self.lib)
        self.kernel = ptx.Kernel(self.module, f"decode_kernelILi{1 if args.layer.n_group <= 4 else 2}E")
        for x in range(args.layer.n_head_kv):
            for y in range(args.n_split):
                for z in range(args.n_stream):
                    self.kernel.run((x, y, z), job, shared, 128)


@each(
    "shape",
    [Shape(group=4, n_kv=150), Shape(group=7, n_kv=70, softcap=30.0, means=True), Shape(n_stream=2, group=1, n_kv=65)],
)
def test_attend(emulated: c.Library, module: str, shape: Shape) -> None:
    check_attend(Decoding(emulated, module), "planned", shape)


@each("bands", [LARGE, ((40, 3), (8, 8), (40, 6), (24, 2), (24, 5))])
def test_layouts(emulated: c.Library, module: str, bands: o.Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(layers.LAYERS, "sized", ([bands], [bands[::-1]]))
    check_attend(Decoding(emulated, module), "sized", Shape(group=4, n_kv=70))


def test_instructions_of_a_code(emulated: c.Library, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PTX instructions per thread and code in steady state; kernels/NOTES.md lists those of the machine code."""
    monkeypatch.setitem(layers.LAYERS, "sized", ([PLANNED[0]], [PLANNED[1]]))
    executed = []
    for n_kv in (256, 512):
        library = Decoding(emulated, module)
        call = Call(library, "sized", Shape(group=4, n_kv=n_kv, n_split=1))  # which holds the memory
        library.run("attend", call.args)
        assert library.kernel is not None
        executed.append(sum(library.kernel.executed.values()))
    most = 8.7 if ".target sm_75" in module else 8.2
    assert ptx.LANES * (executed[1] - executed[0]) / (256 * 256) <= most


def test_reads_in_a_row(emulated: c.Library, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block reads its plan, queries and keys at once, and then values, which share the keys' memory here.

    Copies of sm_75 pass through registers, so that each waits for the one before.
    """
    monkeypatch.setitem(layers.LAYERS, "sized", ([PLANNED[0]], [PLANNED[1]]))
    library = Decoding(emulated, module)
    call = Call(library, "sized", Shape(group=4, n_kv=256, n_split=2))
    library.run("attend", call.args)
    assert library.kernel is not None
    before, after = (9, 5) if ".target sm_75" in module else (1, 1)
    assert library.kernel.trips["mma"] <= before
    assert library.kernel.trips["ret"] <= before + after


def test_races(emulated: c.Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter finds a race if any barrier or wait for copies is missing; the last ones are for empty splits."""
    monkeypatch.setitem(layers.LAYERS, "sized", ([PLANNED[0]], [PLANNED[1]]))
    module = compiled("attend_decode.cu", ARCHITECTURES[-1], tmp_path)
    begin = module.index("decode_kernelILi1E")
    orders = re.compile(r"(?:bar\.(?:sync|warp\.sync)|cp\.async\.wait_group)[^;]*;")
    places = list(orders.finditer(module, begin, module.index("\n}", begin)))

    def run(text: str) -> ptx.Kernel:
        library = Decoding(emulated, text)
        call = Call(library, "sized", Shape(group=4, n_kv=300, n_split=1))  # which holds the memory
        library.run("attend", call.args)
        assert library.kernel is not None
        return library.kernel

    kernel = run(module)
    synchronises = [i for i, (_, name, _, _) in enumerate(kernel.instructions) if orders.match(f"{name};")]
    executed = [at for at, i in zip(places, synchronises, strict=True) if kernel.executed[i] > 0]
    unneeded = []
    for at in executed:
        try:
            run(module[: at.start()] + module[at.end() :])
            unneeded.append(" ".join(at[0].split()))
        except Race:
            pass
    assert len(executed) > 15
    assert unneeded == ["cp.async.wait_group 0;", "bar.sync 0;"]


def test_project(emulated: c.Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulation's bits; a block waits for what the first products need, then for the basis."""
    bands = ((16, 8), (16, 6), (32, 4), (48, 3))
    monkeypatch.setitem(layers.LAYERS, "sized", ([bands], [bands]))
    call = Call(emulated, "sized", Shape(group=4, n_kv=64, n_split=1, means=True))
    args, layer = call.args, call.heads.layer
    parts = [(args.words, emulated.query_words(layer)), (args.qt, 4 * layer.width_k), (args.shift, 4)]
    emulated.run("project_queries", args)
    expected = [ct.string_at(at, 4 * n) for at, n in parts]
    for at, n in parts:
        ct.memset(at, 0xFF, 4 * n)
    kernel = ptx.Kernel(compiled("project.cu", ARCHITECTURES[-1], tmp_path), "project_decode_kernelILi1ELi1E")
    job, shared = last_launch(emulated.lib)
    kernel.run((0, 0, 0), job, shared, 512)
    assert [ct.string_at(at, 4 * n) for at, n in parts] == expected
    assert kernel.trips["ret"] <= 2


def test_encode(emulated: c.Library, tmp_path: Path) -> None:
    """Eight rows of a block: the emulation's bytes, and instructions of a warp per row and side."""
    n, d = 512, 128  # enough rows for blocks of eight
    sides = [layers.Side.make([bands], d, i) for i, bands in enumerate(PLANNED)]
    memory, rng = emulated.memory(), np.random.default_rng(0)
    heads = c.Heads(emulated, memory, *sides, n_group=1)
    tiles = [memory.put(np.zeros((n // o.TILE, o.TILE * side.row_bytes), np.uint8)) for side in sides]
    args = c.Encode(layer=heads.layer, k_head=d, k_token=d, v_head=d, v_token=d, n_tok=n)
    args.k, args.v = (memory.put(rng.standard_normal((n, d)).astype(np.float32))[0] for _ in sides)
    args.k_tiles, args.v_tiles = (at for at, _ in tiles)
    args.k_stride, args.v_stride = (o.TILE * side.row_bytes for side in sides)
    args.cells = memory.put(np.arange(n, dtype=np.int64))[0]
    args.fresh = memory.put(np.zeros((n, 2 * d), np.uint16))[0]
    emulated.run("encode", args)
    cells = [side.to_rows(read())[:8].copy() for side, (_, read) in zip(sides, tiles, strict=True)]
    for _, read in tiles:
        read().fill(0)
    kernel = ptx.Kernel(compiled("encode.cu", ARCHITECTURES[-1], tmp_path), "encode_kernelILb0E")
    job, shared = last_launch(emulated.lib)
    for side in range(2):
        kernel.run((0, 0, side), job, shared, 128)
    for side, (_, read), expected in zip(sides, tiles, cells, strict=True):
        assert np.array_equal(side.to_rows(read())[:8], expected)
    assert sum(kernel.executed.values()) / (2 * 8) <= 9000


def test_combine(emulated: c.Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulation's bits, of exact keys, too; what combine reads at once waits for two other reads at most."""
    bands = ((16, 8), (16, 6), (32, 4), (56, 3))
    monkeypatch.setitem(layers.LAYERS, "sized", ([bands], [bands]))
    call = Call(emulated, "sized", Shape(group=4, n_kv=300, n_split=4))
    args, d = Exact(call).args, call.sides[1].d
    args.out, out = call.memory.put(np.zeros((1, 4 * d), np.float32))
    args.out_stride = 4 * d
    emulated.run("attend", call.args)
    emulated.run("combine", args)
    expected = out().copy()
    out().fill(np.nan)
    job, shared = last_launch(emulated.lib)
    n_floats = emulated.exact_floats(call.heads.layer, 4, 1, N_SLOTS)
    ct.memset(args.a.exact, 0xFF, 4 * n_floats)  # NaN
    kernel = ptx.Kernel(compiled("exact.cu", ARCHITECTURES[-1], tmp_path), "exact_kernel")
    for part in range(n_floats // (4 * (2 + d))):
        kernel.run((0, 0, part), job, 16 << 10, 128)
    kernel = ptx.Kernel(compiled("combine.cu", ARCHITECTURES[-1], tmp_path), "combine_kernelILi1E")
    for head in range(4):
        kernel.run((head, 0, 0), job, shared, 512)
    assert np.array_equal(out(), expected)
    assert kernel.trips["ret"] <= 2
