"""The CUDA ops against the reference: always compiled for the CPU, and for the GPU if this machine has one and nvcc.

Tolerances as in kernels/cuda/ops.h: queries rounded to QUERY_STEP and weights to WEIGHT_STEP in the decode kernel;
queries, coefficients and weights rounded to halves in the tile kernel.
"""

from __future__ import annotations

import ctypes as ct
import functools
import os
from pathlib import Path
from typing import Any

import cuda_ops as c
import interpreted
import layers
import numpy as np
import numpy.typing as npt
import ops as o
import pytest
from cases import Rounded
from cuda_calls import N_RECENT, N_SINK, N_SLOTS, Call, Exact, Shape
from each import each

QUERY_STEP, WEIGHT_STEP = 1 / 32639, 1 / 65535
HALF_ERROR = 2.0**-10
LAYERS = each("name", layers.LAYERS | layers.WIDE_HEADS)


def has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


NVCC = pytest.mark.skipif(c.nvcc() is None, reason="no nvcc on the PATH, in CUDACXX or /usr/local/cuda")


@pytest.fixture(
    scope="module", params=["emulated", pytest.param("interpreted", marks=[pytest.mark.slow, NVCC]), "native"]
)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> c.Library:
    folder = tmp_path_factory.mktemp("cuda")
    if request.param == "emulated":
        return c.build_emulated(folder)
    if request.param == "interpreted":
        return interpreted.build(folder, "compute_80")
    if built := os.environ.get("SUBKV_TEST_NATIVE"):  # research/gpu/decide.py
        return c.Library(Path(built), c.DeviceMemory if has_gpu() else c.HostMemory)
    compiler = c.nvcc()
    if compiler is None or not has_gpu():
        pytest.skip(f"no {'nvcc' if compiler is None else 'GPU that PyTorch sees'}: the kernels run on the CPU only")
    return c.build_native(folder, compiler)


@LAYERS
@each("orthonormal", [True, False])
def test_encode(library: c.Library, name: str, orthonormal: bool) -> None:
    check_encode_layout(library, name, orthonormal)


def check_encode_layout(library: c.Library, name: str, orthonormal: bool) -> None:
    bands = (layers.LAYERS | layers.WIDE_HEADS)[name]
    d = max(map(layers.head_size, bands))
    sides = [
        layers.Side.make(b, d, 1 + i, orthonormal, not orthonormal and i == 0, i == 1) for i, b in enumerate(bands)
    ]
    check_encode(library, sides, orthonormal)


@each("name", layers.LATENT)
@each("orthonormal", [True, False])
def test_encode_latent(library: c.Library, name: str, orthonormal: bool) -> None:
    check_encode(library, list(layers.Side.latent(name, 1, orthonormal)), orthonormal, latent=True)


def check_encode(library: c.Library, both: list[layers.Side], orthonormal: bool, latent: bool = False) -> None:
    """The bytes equal the reference's; nearly all of them if coefficients are sums in another order."""
    sides = both[:1] if latent else both
    rng = np.random.default_rng(3)
    n_head, n, n_cells, d = len(both[0].heads), 40, 2 * o.TILE, both[0].d
    x = [layers.inputs_to_encode(n, n_head, d, rng) for _ in sides]
    rounded = [library.encoded(a) for a in x]
    cells = [int(i) for i in rng.permutation(n_cells)[:n]]  # many share bytes
    exact = [
        [layers.encode_with(ref, side, a, cells, n_cells, 3) for side, a in zip(sides, rounded, strict=True)]
        for ref in library.exact()
    ]
    want = exact[0]
    before = [side.to_tiles(np.full_like(w, 0xAA)) for side, (w, _) in zip(sides, want, strict=True)]

    memory = library.memory()
    heads = c.Heads(library, memory, both[0], both[1], n_group=1, means=not orthonormal and not latent)
    heads.layer.latent = latent
    tiles = [memory.put(of) for of in before]
    fresh_at, fresh = memory.put(np.zeros((n, len(sides) * n_head * d), np.uint16))
    args = c.Encode(
        layer=heads.layer,
        k=memory.put(x[0])[0],
        v=memory.put(x[-1])[0],
        k_head=d,
        k_token=n_head * d,
        v_head=d,
        v_token=n_head * d,
        k_tiles=tiles[0][0],
        v_tiles=tiles[-1][0],
        k_stride=before[0].shape[1],
        v_stride=before[-1].shape[1],
        cells=memory.put(np.array(cells, np.int64))[0],
        fresh=fresh_at,
        n_tok=n,
    )
    library.run("encode", args)
    assert int(heads.n_bad()[0]) == sum(bad for _, bad in want)
    for i, (side, (_, read), (expected, _), old) in enumerate(zip(sides, tiles, want, before, strict=True)):
        got = side.to_rows(read())
        assert np.array_equal(read()[:, o.TILE * side.row_bytes :], old[:, o.TILE * side.row_bytes :])
        others = np.setdiff1d(np.arange(n_cells), cells)
        assert (got[others] == 0xAA).all()
        if orthonormal:
            assert any(np.array_equal(got, of[i][0][:, : side.row_bytes]) for of in exact)
            continue
        for head, part in zip(side.heads, side.parts(), strict=True):
            a, b = (o.dequantize(head, r[cells][:, part]) for r in (got, expected))
            lost = np.isnan(b).any(axis=1)
            assert np.array_equal(np.isnan(a), np.isnan(b))
            a, b = a[~lost], b[~lost]
            assert np.mean(a == b) > 0.98
            assert np.all(np.abs(a - b).max(axis=1) <= 0.3 * np.abs(b).max(axis=1))
    halves = fresh().view(np.float16).reshape(n, len(sides), n_head, d)
    for i, a in enumerate(x):
        expected_halves = np.clip(a, -65504, 65504).astype(np.float16)
        for t, h in np.argwhere(~np.isfinite(a).all(axis=2)):
            expected_halves.view(np.uint16)[t, h] = o.HALF_NAN
        assert np.array_equal(halves[:, i].view(np.uint16), expected_halves.view(np.uint16))


@each("name", ["planned", "widest"])
def test_encode_rows_of_a_block(library: c.Library, name: str) -> None:
    """A row's bytes do not depend on those that the call, and so the block, has beside it."""
    bands, n, n_cells = layers.LAYERS[name], 125, 3 * o.TILE
    d = max(map(layers.head_size, bands))
    sides = [layers.Side.make(b, d, 1 + i) for i, b in enumerate(bands)]
    rng = np.random.default_rng(4)
    n_head = len(sides[0].heads)
    x = [layers.inputs_to_encode(n, n_head, d, rng) for _ in sides]
    cells = rng.permutation(n_cells)[:n].astype(np.int64)
    memory = library.memory()
    heads = c.Heads(library, memory, *sides, n_group=1)
    found = []
    for counts in ([n], [1, 2, 5, 30, n - 38]):
        put = [memory.put(np.zeros((n_cells // o.TILE, o.TILE * side.row_bytes), np.uint8)) for side in sides]
        for first, count in zip(np.cumsum([0, *counts[:-1]]), counts, strict=True):
            part = slice(first, first + count)
            args = c.Encode(layer=heads.layer, k_head=d, k_token=n_head * d, v_head=d, v_token=n_head * d, n_tok=count)
            args.k, args.v = (memory.put(a[part])[0] for a in x)
            args.k_tiles, args.v_tiles = (at for at, _ in put)
            args.k_stride, args.v_stride = (o.TILE * side.row_bytes for side in sides)
            args.cells = memory.put(cells[part])[0]
            args.fresh = memory.put(np.zeros((count, 2 * n_head * d), np.uint16))[0]
            library.run("encode", args)
        found.append([read().copy() for _, read in put])
    for whole, parts in zip(*found, strict=True):
        assert whole.any() and np.array_equal(whole, parts)


SHAPES = [
    Shape(),
    Shape(n_kv=1, group=1, n_split=1),
    Shape(n_stream=2, group=8, n_kv=150, means=True),
    Shape(n_kv=300, n_split=1, softcap=30.0, mask_half=True),
    Shape(group=4, n_kv=64, n_split=4),
    Shape(n_stream=2, n_kv=700, n_split=3),
    Shape(group=9),
    Shape(n_tps=7, n_kv=65),
    Shape(n_stream=2, n_tps=11, group=2, n_kv=129, n_split=3, softcap=5.0, means=True),
    Shape(n_tps=40, group=2, n_kv=100, n_split=1, mask_half=True),
    Shape(n_kv=100, blind=True),
    Shape(n_stream=2, n_tps=8, group=5, n_kv=129, n_split=3, softcap=5.0, means=True),
    Shape(n_tps=9, group=2, n_kv=100, picture=True),
    Shape(n_tps=8, group=2, n_kv=100, picture=True),
    Shape(n_stream=2, group=8, n_kv=90, picture=True),
]


@each("shape", SHAPES)
def test_attend_shapes(library: c.Library, shape: Shape) -> None:
    check_attend(library, "planned", shape)


@LAYERS
@each("shape", [Shape(group=2, n_kv=45), Shape(n_tps=3, group=2, n_kv=45)])
def test_attend_layouts(library: c.Library, name: str, shape: Shape) -> None:
    check_attend(library, name, shape)


@each("name", layers.LATENT)
@each("shape", [Shape(group=16, n_kv=150), Shape(n_stream=2, n_tps=3, group=4, n_kv=70)])
def test_attend_latent(library: c.Library, name: str, shape: Shape) -> None:
    """Values are the first coefficients of a tile's keys."""
    check_attend(library, name, shape)


def test_a_token_attends_alike_beside_others(library: c.Library) -> None:
    """Up to DECODE_TOKENS of a stream have the bits that each has alone."""
    s = Shape(n_stream=2, n_tps=c.DECODE_TOKENS // 2, group=3, n_kv=200, n_split=2, mask_half=True, means=True)
    call = Call(library, "planned", s)
    library.run("attend", call.args)
    rank = min(head.rank for head in call.sides[1].heads)

    def results(n_tok: int) -> list[o.F32]:
        shape = (s.n_split, call.n_head, n_tok * s.group)
        n = int(np.prod(shape))
        return [call.m()[:n].reshape(shape), call.z()[:n].reshape(shape), call.acc()[:n, :rank].reshape(*shape, rank)]

    together = [part.copy() for part in results(call.n_tok)]
    for token in range(call.n_tok):
        stream, one = token // s.n_tps, c.Attend.from_buffer_copy(call.args)
        one.n_stream = one.n_tps = 1
        one.q += 4 * token * one.q_token
        one.mask += 2 * token * s.n_kv
        one.tokens += call.tokens.itemsize * call.tokens.shape[1] * token
        one.cell_pos += call.cell_pos.itemsize * stream * s.n_kv
        one.k_tiles += stream * one.k_stream
        one.v_tiles += stream * one.v_stream
        library.run("attend", one)
        for alone, of in zip(results(1), together, strict=True):
            assert np.isfinite(alone).any()
            assert np.array_equal(alone, of[:, :, token * s.group :][:, :, : s.group])


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[c.Library, c.Library]:
    """The emulated kernels, and those where warps own pairs of tiles."""
    both = (), (c.WARP_PAIRS,)
    one, other = (c.build_emulated(tmp_path_factory.mktemp("pairs"), *defines) for defines in both)
    return one, other


PAIRS_OF_TILES = [
    ("planned", Shape(n_kv=300, n_split=1, softcap=30.0, mask_half=True, means=True)),
    ("planned", Shape(n_stream=2, n_tps=3, group=4, n_kv=1300, n_split=1)),
    ("planned", Shape(n_kv=100, blind=True, n_split=4)),
    ("widest", Shape(group=4, n_kv=1100, n_split=2)),
    *((name, Shape(group=4, n_kv=n_kv, n_split=1)) for name in layers.LAYERS for n_kv in (120, 330)),
]


@each("name,shape", PAIRS_OF_TILES)
def test_a_warp_owns_pairs_of_tiles(pairs: tuple[c.Library, c.Library], name: str, shape: Shape) -> None:
    """Maxima have the bits of the decode kernel; of a split's only pair sums of values have them, too."""
    check_attend(pairs[1], name, shape)
    found = []
    for library in pairs:
        call = Call(library, name, shape)
        library.run("attend", call.args)
        found.append((call.m(), call.z(), call.acc()))
    (m, z, acc), (other_m, other_z, other_acc) = found
    assert np.isfinite(m).any() and np.array_equal(m, other_m)
    assert np.allclose(z, other_z, rtol=1e-6, atol=0)
    one_pair = shape.n_kv <= 2 * o.TILE
    assert np.allclose(acc, other_acc, rtol=0, atol=0 if one_pair else 1e-6 * np.nanmax(np.abs(acc)), equal_nan=True)


LARGE: o.Layout = ((184, 16), (16, 8), (56, 4))


@each("group", [2, 5])
@each("bands", [LARGE, ((128, 8), (120, 5)), ((40, 3), (8, 8), (40, 6), (24, 2))])
def test_attend_tiles_of_all_sizes(
    library: c.Library, bands: o.Layout, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tile in shared memory, two tiles, and two tiles each of keys and values; octets in pairs and single."""
    monkeypatch.setitem(layers.LAYERS, "sized", ([bands], [bands[::-1]]))
    check_attend(library, "sized", Shape(group=group, n_kv=330))


@each("codes", [0, 255])
@each("group", [1, 8])
def test_sums_do_not_overflow(library: c.Library, codes: int, group: int) -> None:
    """Products of the largest numbers with equal signs."""
    check_attend(library, "widest", Shape(group=group, n_kv=300, n_split=1), codes)


@each("name", ["planned", "widest"])
@each("shape", [Shape(), Shape(n_stream=2, group=8, n_kv=150, means=True), Shape(group=4, n_kv=64, n_split=1)])
def test_codes_of_the_window(library: c.Library, name: str, shape: Shape) -> None:
    """store_and_attend, combine, and later encode_window, give the bits of attend, encode, combine and store_window.

    Until then the cells' scales are SCALE_NAN, and no other byte of the tiles has changed.
    """
    results = []
    for later in (True, False):
        call = Call(library, name, shape)
        exact = Exact(call)
        n, d, memory = call.n_tok, call.sides[0].d, call.memory
        k, v = (40 * call.rng.standard_normal((n, call.n_head, d)).astype(np.float32) for _ in range(2))
        k[0, 0, 0] = 1e6  # beyond halves
        k[-1, -1, 1], v[0, -1, 2] = np.nan, np.inf
        own = [int(np.flatnonzero(call.cell_pos[i] == call.pos[i])[0]) for i in range(n)]
        n_tiles = -(-shape.n_kv // o.TILE)
        cells = [i * n_tiles * o.TILE + cell for i, cell in enumerate(own)]
        slots = exact.slots.copy()
        slots[N_SLOTS - 1 :: N_SLOTS, 2] = range(n)
        slots[N_SLOTS - 3, 2] = 0  # another sequence of the first token
        taken = np.flatnonzero(slots[:, 2] >= 0)
        fresh_at, fresh = memory.put(np.zeros((n, 2 * call.n_head * d), np.uint16))
        window_at, window = memory.put(exact.window.view(np.uint16))
        rows = dict(
            k=memory.put(k)[0],
            v=memory.put(v)[0],
            **{f"{side}_{name}": size for side in "kv" for name, size in (("head", d), ("token", call.n_head * d))},
            k_tiles=call.args.k_tiles,
            v_tiles=call.args.v_tiles,
            fresh=fresh_at,
        )
        strides = {"k_stride": call.args.k_stride, "v_stride": call.args.v_stride}
        slots_at = memory.put(slots)[0]
        n_out = call.n_head * shape.group * d
        out_at, out = memory.put(np.full((n, n_out), 1, np.float32))
        exact.args.fresh, exact.args.window, exact.args.slots = fresh_at, window_at, slots_at
        exact.args.out, exact.args.out_stride, exact.args.has_exact = out_at, n_out, later
        if later:
            before = [read().copy() for _, read in call.tiles]
            store = c.StoreRows(**rows, window=window_at, slots=slots_at, n_slots=len(slots))
            library.run("store_and_attend", c.StoreAndAttend(store=store, args=exact.args))
            for old, (_, read), side in zip(before, call.tiles, call.sides, strict=True):
                for i, cell in enumerate(own):
                    of_tile = old[i, cell // o.TILE]
                    of_tile[[o.TILE * part.start + cell % o.TILE for part in side.parts()]] = o.SCALE_NAN
                assert np.array_equal(read(), old)
            library.run("combine", exact.args)
            numbers = [x for slot in taken for x in (slot, cells[slots[slot, 2]])]
            numbers += [0] * (2 * c.WINDOW_ROWS - len(numbers))
            encode = c.Encode(
                layer=call.args.layer, k_tiles=rows["k_tiles"], v_tiles=rows["v_tiles"], **strides, n_tok=len(taken)
            )
            held = c.EncodeWindow(encode=encode, window=window_at, rows=(ct.c_int32 * len(numbers))(*numbers))
            library.run("encode_window", held)
        else:
            cells_at = memory.put(np.array(cells, np.int64))[0]
            library.run("attend", call.args)
            library.run("encode", c.Encode(layer=call.args.layer, **rows, **strides, cells=cells_at, n_tok=n))
            library.run("combine", exact.args)
            stored = c.Store(
                window=window_at, fresh=fresh_at, slots=slots_at, n_slots=len(slots), width=2 * call.n_head * d
            )
            library.run("store_window", stored)
        assert (window()[taken] == fresh()[slots[taken, 2]]).all()
        tiles = [read() for _, read in call.tiles]
        results.append([call.m(), call.z(), call.acc(), fresh(), window(), call.heads.n_bad(), out(), *tiles])
    assert int(results[0][5][0]) == 2
    assert (results[0][6] != 1).all()
    for one, other in zip(*results, strict=True):
        assert np.array_equal(one.view(np.uint8), other.view(np.uint8))


def check_attend(library: c.Library, name: str, shape: Shape, codes: int | None = None) -> None:
    call = Call(library, name, shape, codes)
    library.run("attend", call.args)
    width = max(head.rank for side in call.sides for head in side.heads)
    rounding = library.rounding(call.decodes, call.latent, width)
    for stream in range(shape.n_stream):
        bias = call.coded_bias(stream)
        for h in range(call.n_head):
            keys, values = (call.vectors(value, stream, h) for value in (False, True))
            q, shift = call.queries(stream, h)
            m, z, acc, size, weight_v, weights = o.attention(
                q, keys, values, bias, call.slopes(h), shape.softcap, shift
            )
            live = np.isfinite(m)
            tolerance = 32 * o.EPS * (size + 1)
            extra = np.zeros_like(acc)
            if rounding == "bytes":
                k, v = (side.heads[h] for side in call.sides)
                rounded = Rounded.of(k, v, keys, values, call.rows[1][stream][:, call.sides[1].parts()[h]])
                tolerance += 1.01 * QUERY_STEP * rounded.logits(q, weights > 0)
                extra = 1.01 * WEIGHT_STEP * rounded.sums(weights)
            elif rounding == "halves":
                tolerance += 1.5 * HALF_ERROR * size
                extra = 1e-6 * weight_v.max(initial=0) + HALF_ERROR * weight_v
            got_m, got_z, got_acc = call.merged(stream, h, m)
            assert np.array_equal(np.isfinite(got_m), live)
            assert np.all(np.abs(got_m[live] - m[live]) <= tolerance[live])
            relative = np.expm1(2 * tolerance[live]) + 32 * o.EPS + (HALF_ERROR if rounding == "halves" else 0)
            assert np.all(np.abs(got_z[live] - z[live]) <= relative * z[live])
            bound = relative[:, None] * (weight_v[live] + 1e-30) + extra[live] + o.EPS * weight_v[live].max(initial=0)
            assert np.all(np.abs(got_acc[live] - acc[live]) <= bound)


WITH_EXACT_ROWS = [SHAPES[0], SHAPES[7], Shape(n_tps=3, group=2, n_kv=200, means=True), *SHAPES[-2:]]


@each("sinks", [False, True])
@each("shape", WITH_EXACT_ROWS)
def test_combine(library: c.Library, shape: Shape, sinks: bool) -> None:
    check_combine(library, "planned", shape, sinks)


@each("name", layers.LATENT)
def test_combine_latent(library: c.Library, name: str) -> None:
    check_combine(library, name, Shape(n_tps=3, group=9, n_kv=100), sinks=False)


def check_combine(library: c.Library, name: str, shape: Shape, sinks: bool) -> None:
    """Coded cells, window rows and the ubatch's own keys share one softmax, computed in double for comparison."""
    call = Call(library, name, shape)
    exact_rows = Exact(call)
    s, rng, memory, exact = shape, call.rng, call.memory, exact_rows.rows
    d, d_v, n_head = call.sides[0].d, call.sides[1].d, call.n_head
    first_value = 0 if call.latent else n_head * d
    sink = rng.standard_normal(n_head * s.group).astype(np.float32)
    out_at, out = memory.put(np.zeros((call.n_tok, n_head * s.group * d_v + 5), np.float32))
    exact_rows.args.sinks = memory.put(sink)[0] if sinks else None
    exact_rows.args.out, exact_rows.args.out_stride = out_at, n_head * s.group * d_v + 5
    library.run("attend", call.args)
    library.run("combine", exact_rows.args)
    got = out()
    assert not got[:, -5:].any()
    for stream in range(s.n_stream):
        for h in range(n_head):
            m, z, acc = call.merged(stream, h, np.zeros(s.n_tps * s.group))
            coded = acc @ call.sides[1].heads[h].encode.astype(np.float64)
            for t in range(s.n_tps):
                token = stream * s.n_tps + t
                pos = int(call.tokens[token, 0])
                keys = [p for p in exact[stream] if c.exact_positions(np.array([p]), pos, N_SINK, N_RECENT)[0]]
                for g in range(s.group):
                    hq, row = h * s.group + g, t * s.group + g
                    total, vector = z[row], coded[row].copy()
                    for p in keys:
                        cell = int(np.flatnonzero(call.places[stream] == p)[0])
                        k = exact[stream][p][h * d : (h + 1) * d].astype(np.float64)
                        dot = float(call.heads.layer.scale) * float(call.q[token, hq].astype(np.float64) @ k)
                        if s.softcap:
                            dot = s.softcap * np.tanh(dot / s.softcap)
                        weight = np.exp(dot + float(call.heads.slope[hq]) * float(call.mask[token, cell]))
                        total += weight
                        at = first_value + h * d_v
                        vector += weight * exact[stream][p][at : at + d_v].astype(np.float64)
                    total += np.exp(sink[hq]) if sinks else 0
                    want = vector / total if total > 0 else 0 * vector
                    scale = max(1.0, float(np.abs(want).max()))
                    assert np.abs(got[token, hq * d_v : (hq + 1) * d_v] - want).max() <= 2e-4 * scale


@each("shape", [*WITH_EXACT_ROWS, *SHAPES[8:10]])
def test_prompt(library: c.Library, shape: Shape) -> None:
    check_prompt(library, "planned", shape)


@each("name", ["one_head", "large", "widest"])
def test_prompt_layouts(library: c.Library, name: str) -> None:
    check_prompt(library, name, Shape(n_tps=3, group=2, n_kv=70, means=True))


def check_prompt(library: c.Library, name: str, shape: Shape) -> None:
    """Rows equal the decoded rows in double, or the exact rows; masks show each key to a token once."""
    call = Call(library, name, shape)
    exact_rows = Exact(call)
    s, memory = shape, call.memory
    d, n_head = call.sides[0].d, call.n_head
    n_rows = (s.n_kv + N_SLOTS + s.n_tps + 5) // 2 * 2
    library.lib.test_suits_prompt.restype = ct.c_bool
    assert library.lib.test_suits_prompt(ct.byref(call.heads.layer)) == (d % 16 == 0)
    mask_at, mask = memory.put(np.full((s.n_stream, s.n_tps, n_rows), np.nan, np.float16))
    args: Any = c.Prompt(c=exact_rows.args, n_slots=N_SLOTS, n_rows=n_rows, mask=mask_at)
    library.run("prompt_mask", args)
    sides: tuple[list[npt.NDArray[Any]], ...] = ([], [])
    for args.first, args.n_heads in [(0, 1), (1, n_head - 1)][: min(2, n_head)]:  # rows of some heads at a time
        shape_of = (s.n_stream, args.n_heads, n_rows, d)
        args.k, k = memory.put(np.full(shape_of, np.nan, np.float16))
        args.v, v = memory.put(np.full(shape_of, np.nan, np.float16))
        library.run("prompt_rows", args)
        sides[0].append(k())
        sides[1].append(v())
    first_fresh = s.n_kv + N_SLOTS
    for stream in range(s.n_stream):
        own = slice(stream * s.n_tps, (stream + 1) * s.n_tps)
        slots = slice(stream * N_SLOTS, (stream + 1) * N_SLOTS)
        for value, parts in enumerate(sides):
            got = np.concatenate(parts, axis=1)
            for h in range(n_head):
                head = call.sides[value].heads[h]
                basis = head.encode.astype(np.float64)
                coefficients = call.vectors(value, stream, h)
                gamma, mean = (1.0, None) if value else (float(call.heads.gamma[h]), call.heads.mean[h])
                want = gamma * (coefficients @ basis) + (0 if mean is None else mean.astype(np.float64))
                bound = np.abs(coefficients).max(axis=1) * np.abs(basis).sum(axis=0).max() * gamma
                visible = np.arange(s.n_kv) != s.n_kv // 2
                error = np.abs(got[stream, h, : s.n_kv].astype(np.float64) - want)
                assert np.all(error[visible] <= HALF_ERROR * (bound[visible, None] + np.abs(want[visible])) + 1e-6)
                assert np.isfinite(got[stream, h]).all()
                first = (n_head * value + h) * d
                assert np.array_equal(got[stream, h, s.n_kv : first_fresh], exact_rows.window[slots, first : first + d])
                last = first_fresh + s.n_tps
                assert np.array_equal(got[stream, h, first_fresh:last], exact_rows.fresh[own, first : first + d])
                assert not got[stream, h, last:].any()
        coded, bias = call.coded_bias(stream), mask()[stream].astype(np.float32)
        assert np.array_equal(bias[:, : s.n_kv], coded)
        exact = np.full((s.n_tps, n_rows - s.n_kv), -np.inf, np.float32)
        for t in range(s.n_tps):
            token = stream * s.n_tps + t
            pos = np.concatenate([exact_rows.slots[slots, 0], call.tokens[own, 0]])
            cell = np.concatenate([exact_rows.slots[slots, 1], call.tokens[own, 1]])
            is_exact = (pos >= 0) & c.exact_positions(pos, int(call.tokens[token, 0]), N_SINK, N_RECENT)
            exact[t, : len(pos)][is_exact] = call.mask[token, cell[is_exact]]
        assert np.array_equal(bias[:, s.n_kv :], exact)
        assert np.isfinite(exact).any()


CODED = 10  # position of the cell that could not be coded, which some tokens see


def combined(call: Call, exact_rows: Exact, library: c.Library) -> npt.NDArray[np.float32]:
    """Output [n_tok][query heads][d_v]."""
    n = call.n_head * call.shape.group
    exact_rows.args.out, out = call.memory.put(np.zeros((call.n_tok, n, call.sides[1].d), np.float32))
    exact_rows.args.out_stride = n * call.sides[1].d
    library.run("attend", call.args)
    library.run("combine", exact_rows.args)
    return out()


def coded_cell(call: Call) -> int:
    return int(np.flatnonzero(call.places[0] == CODED)[0])


def seeing(call: Call) -> npt.NDArray[np.bool_]:
    """[n_tok] every other token of the first stream"""
    return (np.arange(call.n_tok) % 2 == 0) & (np.arange(call.n_tok) < call.shape.n_tps)


def some_see(call: Call) -> None:
    """These tokens alone see the cell."""
    own = slice(0, call.shape.n_tps)
    call.mask[own, coded_cell(call)] = np.where(seeing(call)[own], 0, -np.inf)
    for rows, side in zip(call.rows, call.sides, strict=False):
        rows[0, coded_cell(call), [part.start for part in side.parts()]] = 150


def damage_cell(call: Call, side: int, value: float | None = None) -> None:
    """Of the first head. value: of its 16-bit coefficients."""
    some_see(call)
    row, head = call.rows[side][0, coded_cell(call)], call.sides[side].heads[0]
    if value is None:
        row[0] = o.SCALE_NAN
    for band in head.codec.bands[: head.codec.n_bands]:
        if value is not None and band.bits == 16:
            row[band.offset : band.offset + 2 * band.n] = np.full(band.n, value, "<f2").view(np.uint8)


def damage_query(call: Call, value: float) -> None:
    call.q[0, 1, 3] = value


def damage_fresh(exact_rows: Exact, value: float, side: int, n_head: int) -> None:
    """The first element of the first token's first head."""
    exact_rows.fresh.reshape(len(exact_rows.fresh), 2, n_head, -1)[0, side, 0, 0] = value


NOT_FINITE = [Shape(n_stream=2, n_kv=50), Shape(n_stream=2, n_tps=7, group=2, n_kv=141, softcap=5.0)]


@each("name", ["planned", "16_bits", "latent_small"])
@each("shape", NOT_FINITE)
def test_a_cell_that_could_not_be_coded(library: c.Library, shape: Shape, name: str) -> None:
    """The result of query rows that see it is NaN; others do not change."""
    clean = Call(library, name, shape, change=some_see)
    before = combined(clean, Exact(clean), library)
    assert np.isfinite(before).all()
    for side in range(len(clean.rows)):
        halves = any(bits == 16 for _, bits in clean.sides[side].heads[0].layout)
        for value in [None, *([np.nan, np.inf] if halves else [])]:
            call = Call(library, name, shape, change=functools.partial(damage_cell, side=side, value=value))
            after = combined(call, Exact(call), library)
            lost = np.zeros(after.shape[:2], bool)
            lost[seeing(call), : shape.group] = True  # of the first KV head
            assert np.array_equal(~np.isfinite(after).all(axis=2), lost)
            assert np.allclose(after[~lost], before[~lost], rtol=2e-2, atol=2e-2)


@each("name", ["planned", "latent_small"])
@each("shape", NOT_FINITE)
@each("bad", [np.nan, np.inf, -np.inf])
def test_queries_and_exact_rows_that_are_not_finite(library: c.Library, shape: Shape, name: str, bad: float) -> None:
    call = Call(library, name, shape, change=functools.partial(damage_query, value=bad))
    after = combined(call, Exact(call), library)
    lost = np.zeros(after.shape[:2], bool)
    lost[0, 1] = True
    assert np.array_equal(np.isnan(after).all(axis=2), lost) and np.isfinite(after[~lost]).all()
    for side in range(0 if call.latent else 2):
        call = Call(library, name, shape)
        exact_rows = Exact(call, functools.partial(damage_fresh, value=bad, side=side, n_head=call.n_head))
        after = combined(call, exact_rows, library)
        own = slice(0, shape.n_tps)
        near = np.array([c.exact_positions(call.pos[:1], int(pos), N_SINK, N_RECENT)[0] for pos in call.pos[own]])
        lost[:] = False
        lost[own, : shape.group] = (near & np.isfinite(call.mask[own, int(call.tokens[0, 1])]))[:, None]
        assert lost.any()
        assert np.array_equal(~np.isfinite(after).all(axis=2), lost)


@each("shape", [Shape(n_stream=2, n_tps=7, group=2, n_kv=90, mask_half=True), Shape(n_tps=4, n_kv=70)])
def test_prompts_with_rows_that_are_not_finite(library: c.Library, shape: Shape) -> None:
    """Flash attention reads finite rows; the output of tokens that see others is NaN."""

    call = Call(library, "planned", shape, change=functools.partial(damage_cell, side=1))
    exact_rows = Exact(call, lambda rows: rows.fresh.view(np.uint16)[-1].fill(o.HALF_NAN))
    s, memory, d = shape, call.memory, call.sides[0].d
    n_rows = (s.n_kv + N_SLOTS + s.n_tps + 5) // 2 * 2
    args: Any = c.Prompt(c=exact_rows.args, n_slots=N_SLOTS, n_rows=n_rows, n_heads=1)
    args.k, k = memory.put(np.full((s.n_stream, 1, n_rows, d), np.nan, np.float16))
    args.v, v = memory.put(np.full((s.n_stream, 1, n_rows, d), np.nan, np.float16))
    args.c.out, out = memory.put(np.ones((call.n_tok, s.group * d), np.float32))
    args.c.out_stride = s.group * d
    library.run("prompt_rows", args)
    library.run("prompt_lost", args)
    assert np.isfinite(k()).all() and np.isfinite(v()).all()
    lost = seeing(call)
    last, cell = call.n_tok - 1, int(call.tokens[-1, 1])
    lost[last] |= bool(np.isfinite(call.mask[last, cell]))  # it is the only one that sees itself
    assert np.array_equal(np.isnan(out()), np.repeat(lost[:, None], s.group * d, axis=1))
    assert 0 < lost.sum() < len(lost)


def test_a_window_stores_the_rows_of_its_slots(library: c.Library) -> None:
    rng = np.random.default_rng(0)
    memory = library.memory()
    window, fresh = (rng.integers(0, 2**16, shape).astype(np.uint16) for shape in ((5, 300), (3, 300)))
    token = np.array([-1, 2, -1, 0, 2], np.int32)
    slots = np.stack([0 * token, 0 * token, token], axis=1)  # SlotRow: pos, cell, token
    at, read = memory.put(window)
    args: Any = c.Store(
        window=at, fresh=memory.put(fresh)[0], slots=memory.put(slots)[0], n_slots=len(window), width=300
    )
    library.run("store_window", args)
    want = np.where((token >= 0)[:, None], fresh[token], window)
    assert np.array_equal(read(), want)


@pytest.mark.parametrize("n_tps", [1, 8])
def test_calls_of_the_timing_script(library: c.Library, n_tps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of research/gpu/gpu_ops.py runs on a small workload, and the output is finite."""
    torch = pytest.importorskip("torch")
    if isinstance(library, interpreted.Interpreted):
        pytest.skip("the tensors are PyTorch's, whose memory the interpreter does not know")
    monkeypatch.syspath_prepend(str(c.ROOT / "research" / "gpu"))
    import gpu_ops

    device = "cuda" if library.memory is c.DeviceMemory else "cpu"
    for name, value in (("DEVICE", device), ("N_HEAD", 1), ("GROUP", 2)):
        monkeypatch.setattr(gpu_ops, name, value)
    work = gpu_ops.Workload(gpu_ops.BANDS["4.3 bits"], 2, n_tps, 1024)
    timed = gpu_ops.Cuda(library, work)
    assert [name for name in timed.calls() if "attend_decode" in name] == ["CUDA attend_decode"]
    for call in timed.calls().values():
        timed.out.fill_(torch.nan)
        call()
    assert torch.isfinite(timed.out).all()
    assert (timed.out.std(1) > 0.1).all()
    if n_tps == 1:  # research/gpu/decide.py
        import decide

        timed.out.fill_(torch.nan)
        for name, args in decide.token_calls(c, timed):
            library.run(name, args)
        assert torch.isfinite(timed.out).all()
        for n in (1, 2):
            for name, args in decide.encode_calls(c, timed, n):
                library.run(name, args)
    before = work.tiles[0].clone()
    timed.run("encode", timed.encode)()
    assert (work.tiles[0] != before).any()
    assert int(timed.heads.n_bad()[0]) == 0
