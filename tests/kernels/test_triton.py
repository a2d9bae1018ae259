"""Triton's encode, attend and combine against the reference: on a GPU if present, else in Triton's interpreter.

Tolerances follow from rounding to halves: queries times ratios (2^-11 of each, 2^-25 of a row's largest) and weights
times scales (the same).
"""

from __future__ import annotations

from typing import Any

import layers
import numpy as np
import numpy.typing as npt
import ops as o
import pytest
from each import each

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # tests/conftest.py chooses the interpreter there

import subkv_triton.ops as st  # noqa: E402
from subkv_triton import attend, launch  # noqa: E402

HALF_ERROR = 2.0**-10
LAYERS = each("name", layers.LAYERS)


def tensor(array: npt.NDArray[Any]) -> Any:
    return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)


def codecs_of(side: layers.Side) -> st.Codecs:
    bands = [[(b.n, b.bits, b.ratio) for b in h.codec.bands[: h.codec.n_bands]] for h in side.heads]
    bases = [h.encode for h in side.heads]
    offsets = [h.subtracted for h in side.heads if h.subtracted is not None]
    return st.Codecs.make(bands, bases, bases, offsets or None, DEVICE)


# the interpreter takes a tenth of a second for a coefficient on a path, and "large" has 128
@each("name", [name for name in layers.LAYERS if DEVICE == "cuda" or name != "large"])
def test_encode_writes_the_bytes_of_the_reference(ref: o.Ops, name: str) -> None:
    """Coefficients are the inputs, so every version writes the same bytes."""
    bands = layers.LAYERS[name][0]
    side = layers.Side.make(bands, layers.head_size(bands), 1, orthonormal=True)
    x = layers.inputs_to_encode(8, len(bands), side.d, np.random.default_rng(3))
    cells = [int(c) for c in np.random.default_rng(4).permutation(9)[:8]]
    want, n_bad = layers.encode_with(ref, side, x, cells, 9, extra=0)
    codecs = codecs_of(side)
    got = tensor(np.full((9, codecs.row_bytes + 3), 0xAA, np.uint8))
    bad = st.encode_rows(codecs, tensor(x), tensor(np.array(cells)), got)
    used = codecs.scales_at + codecs.n_head
    assert torch.equal(got[cells, :used], codecs.from_rows(tensor(want))[cells, :used])
    got[cells, :used] = 0xAA
    assert bool((got == 0xAA).all())
    assert int(bad.sum()) == n_bad


def test_encode_projects_and_subtracts(ref: o.Ops) -> None:
    bands = layers.LAYERS["planned"][0]
    side = layers.Side.make(bands, layers.head_size(bands), 1, centred=True)
    x = np.random.default_rng(3).standard_normal((6, len(bands), side.d)).astype(np.float32)
    want, _ = layers.encode_with(ref, side, x, list(range(6)), 6, extra=0)
    codecs = codecs_of(side)
    got = tensor(np.zeros((6, codecs.row_bytes), np.uint8))
    st.encode_rows(codecs, tensor(x), tensor(np.arange(6)), got)
    for head, part in zip(side.heads, side.parts(), strict=True):
        a, b = (o.dequantize(head, rows[:, part]) for rows in (codecs.to_rows(got).cpu().numpy(), want))
        # sums in another order: a coefficient next to a rounding boundary may take the other code
        assert np.mean(a == b) > 0.98
        assert np.abs(a - b).max() <= 0.2 * np.abs(b).max()


@each(
    ("n_tok", "group", "n", "n_split", "softcap", "shifted"),
    [(1, 3, 71, 2, 0.0, False), (1, 1, 1, 1, 5.0, True), (9, 2, 70, 3, 0.0, True), (1, 17, 40, 1, 30.0, False)],
)
@each("name", ["planned", "large"])
def test_attend_shapes(name: str, n_tok: int, group: int, n: int, n_split: int, softcap: float, shifted: bool) -> None:
    check_attend(name, n_tok, group, n, n_split, softcap, shifted)


@LAYERS
def test_attend_layouts(name: str) -> None:
    check_attend(name, 2, 3, 45, 2, 0.0, False)


@each("shapes", launch.EVERY)
@each(("n_tok", "group"), [(1, 3), (9, 2)])
def test_attend_in_the_shapes_of_every_gpu(
    monkeypatch: pytest.MonkeyPatch, shapes: launch.Shapes, n_tok: int, group: int
) -> None:
    monkeypatch.setattr(attend, "shapes_on", lambda device, width, halves: shapes)
    check_attend("planned", n_tok, group, 70, 2, 0.0, True)


def hide(bias: o.F32, rng: np.random.Generator) -> None:
    """Random holes, a causal edge, and a cell that no token sees."""
    bias[rng.random(bias.shape) < 0.2] = -np.inf
    n_tok, n = bias.shape[-2:]
    for t in range(n_tok):
        bias[..., t, max(1, n - n_tok + t + 1) :] = -np.inf
    bias[..., n // 2] = -np.inf


def check_attend(name: str, n_tok: int, group: int, n: int, n_split: int, softcap: float, shifted: bool) -> None:
    """Two streams; then combine against the merge of the splits times D_v in double."""
    rng = np.random.default_rng(n)
    sides = [layers.Side.make(b, layers.head_size(b), 5 + i) for i, b in enumerate(layers.LAYERS[name])]
    k, v = (codecs_of(side) for side in sides)
    n_head = len(sides[0].heads)
    k_rows, v_rows = (np.stack([side.random_rows(n, rng, 0) for _ in range(2)]) for side in sides)
    bias = rng.uniform(-2, 0, (2, n_tok, n)).astype(np.float32)
    hide(bias, rng)
    k_rows[:, n // 2], v_rows[:, n // 2] = 255, 255  # masked, with any bytes
    qt = rng.standard_normal((2, n_tok, n_head, group, k.width)).astype(np.float32)
    slope = rng.uniform(0, 1.5, (n_head, group)).astype(np.float32)
    shift = (3 * rng.standard_normal(qt.shape[:-1])).astype(np.float32) if shifted else None
    arrays = {}
    for h, (head, part) in enumerate(zip(sides[0].heads, sides[0].parts(), strict=True)):
        for stream in range(2):
            keys = o.dequantize(head, k_rows[stream][:, part])
            keys[n // 2] = 0
            q = qt[stream, :, h]
            q *= np.float32(4 / max(1e-3, float((q[..., : head.rank] @ keys.T).std())))
            arrays[stream, h] = keys
    partial = st.attend(
        k,
        v,
        torch.nn.functional.pad(k.from_rows(tensor(k_rows)), (0, 4)),
        v.from_rows(tensor(v_rows)),
        tensor(qt),
        tensor(bias),
        shift=None if shift is None else tensor(shift),
        slope=tensor(slope),
        softcap=softcap,
        n_split=n_split,
    )
    out = st.combine(v, partial).cpu().numpy()
    for (stream, h), keys in arrays.items():
        head = sides[1].heads[h]
        values = o.dequantize(head, v_rows[stream][:, sides[1].parts()[h]])
        values[n // 2] = 0
        q = qt[stream, :, h, :, : keys.shape[1]].reshape(-1, keys.shape[1])
        common = None if shift is None else shift[stream, :, h].reshape(-1)
        m, z, acc, size, weight_v, _ = o.attention(q, keys, values, bias[stream], slope[h], softcap, common)
        tolerance = np.where(np.isfinite(m), HALF_ERROR * size + 16 * o.EPS * (size + 1), 0)
        got_m = partial.m[:, stream, :, h].reshape(n_split, -1).cpu().numpy().astype(np.float64)
        top = got_m.max(axis=0)
        live = np.isfinite(m)
        assert np.array_equal(np.isfinite(top), live)
        assert np.all(np.abs(top[live] - m[live]) <= tolerance[live])
        merged = np.exp(got_m[:, live] - m[live])
        got_z = (merged * partial.z[:, stream, :, h].reshape(n_split, -1).cpu().numpy()[:, live]).sum(axis=0)
        relative = np.expm1(tolerance[live]) + HALF_ERROR
        assert np.all(np.abs(got_z - z[live]) <= relative * z[live])
        got_acc = partial.acc[:, stream, :, h].reshape(n_split, len(q), -1).cpu().numpy()[:, live, : head.rank]
        got_acc = (merged[:, :, None] * got_acc).sum(axis=0)
        error = np.abs(got_acc - acc[live])
        assert np.all(error <= relative[:, None] * weight_v[live] + 1e-6 * weight_v[live].max(initial=1.0))
        basis = head.encode.astype(np.float64)
        want = (got_acc @ basis) / got_z[:, None]
        got = out[stream, :, h].reshape(-1, sides[1].d)
        assert np.allclose(got[live], want, rtol=0, atol=1e-5 * max(1.0, float(np.abs(want).max(initial=0))))
        assert np.all(got[~live] == 0)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_combine_adds_exact_keys(sinks: bool, softcap: float) -> None:
    """Coded cells, exact keys and a sink share one softmax; a token without visible keys gets zeros."""
    rng = np.random.default_rng(8)
    n_tok, n_head, group, n, n_keys, d_k, d_v = 3, 2, 2, 20, 37, 24, 40
    v_side = layers.Side.make([layers.LAYERS["planned"][1][0]] * n_head, 64, 2)
    v = codecs_of(v_side)
    coded = rng.standard_normal((n_head, n, v.width))
    coded_logit = rng.standard_normal((n_tok, n_head, group, n))
    coded_logit[2] = -np.inf
    half = n // 2
    m, z = (np.zeros((2, 1, n_tok, n_head, group), np.float32) for _ in range(2))
    acc = np.zeros((*m.shape, v.width), np.float32)
    for i, part in enumerate((slice(0, half), slice(half, n))):
        m[i, 0] = coded_logit[..., part].max(axis=-1)
        p = np.exp(coded_logit[..., part] - np.where(np.isfinite(m[i, 0]), m[i, 0], 0)[..., None])
        z[i, 0] = p.sum(axis=-1)
        acc[i, 0] = np.einsum("thgc,hcr->thgr", p, coded[:, part])
    d_v = v.d
    q = rng.standard_normal((1, n_tok, n_head, group, d_k)).astype(np.float32)
    keys = rng.standard_normal((1, n_keys, n_head, d_k)).astype(np.float16)
    values = rng.standard_normal((1, n_keys, n_head, d_v)).astype(np.float16)
    bias = rng.uniform(-1, 0, (1, n_tok, n_keys)).astype(np.float32)
    hide(bias, rng)
    bias[0, 2] = -np.inf
    slope = rng.uniform(0, 1.5, (n_head, group)).astype(np.float32)
    sink = rng.standard_normal((n_head, group)).astype(np.float32)
    got = st.combine(
        v,
        st.Partial(tensor(m), tensor(z), tensor(acc)),
        st.Exact(tensor(keys), tensor(values), tensor(q), tensor(bias)),
        slope=tensor(slope),
        softcap=softcap,
        sinks=tensor(sink) if sinks else None,
    )
    exact = np.einsum("thgd,chd->thgc", q[0].astype(np.float64), keys[0])
    if softcap:
        exact = softcap * np.tanh(exact / softcap)
    exact += slope[None, :, :, None] * bias[0][:, None, None, :]
    weight = np.exp(np.concatenate([coded_logit, exact], axis=-1))
    basis = np.stack(
        [np.pad(head.encode.astype(np.float64), ((0, v.width - head.rank), (0, 0))) for head in v_side.heads]
    )
    vectors = np.concatenate([coded @ basis, values[0].astype(np.float64).transpose(1, 0, 2)], axis=1)
    total = weight.sum(axis=-1) + (np.exp(sink) if sinks else 0)
    want = np.einsum("thgc,hcd->thgd", weight, vectors) / np.where(total > 0, total, 1)[..., None]
    assert np.allclose(got.cpu().numpy()[0], want, rtol=1e-4, atol=1e-5)
    assert np.all(got.cpu().numpy()[0, 2] == 0)


def test_a_cache_of_full_precision_is_ordinary_attention() -> None:
    """All three ops in a row: 16-bit coefficients of a full orthonormal basis, half the keys coded, half exact."""
    rng = np.random.default_rng(9)
    n_head, group, d, n, n_exact = 2, 3, 16, 20, 10
    basis = [np.linalg.qr(rng.standard_normal((d, d)))[0].astype(np.float16) for _ in range(n_head)]
    codecs = st.Codecs.make([[(d, 16, 1.0)]] * n_head, basis, basis, None, DEVICE)
    k, v = (rng.standard_normal((n, n_head, d)).astype(np.float32) for _ in range(2))
    q = rng.standard_normal((1, 1, n_head, group, d)).astype(np.float32)
    n_coded = n - n_exact
    rows = [tensor(np.zeros((1, n_coded, codecs.row_bytes), np.uint8)) for _ in range(2)]
    for x, out in zip((k, v), rows, strict=True):
        st.encode_rows(codecs, tensor(x[:n_coded]), tensor(np.arange(n_coded)), out[0])
    scale = 1 / np.sqrt(d)
    qt = st.project_queries(codecs, tensor(q), tensor(np.full(n_head, scale)))
    partial = st.attend(codecs, codecs, rows[0], rows[1], qt, tensor(np.zeros((1, 1, n_coded), np.float32)))
    exact = st.Exact(
        tensor(k[None, n_coded:].astype(np.float16)),
        tensor(v[None, n_coded:].astype(np.float16)),
        tensor((scale * q).astype(np.float32)),
        tensor(np.zeros((1, 1, n_exact), np.float32)),
    )
    got = st.combine(codecs, partial, exact).cpu().numpy()[0, 0]
    logit = np.einsum("hgd,chd->hgc", q[0, 0], k) * scale
    weight = np.exp(logit) / np.exp(logit).sum(axis=-1, keepdims=True)
    assert np.abs(got - np.einsum("hgc,chd->hgd", weight, v)).max() < 4e-3


def test_rows_that_are_not_whole_words_are_refused() -> None:
    codecs = st.Codecs.make([[(16, 4, 1.0)]], *2 * [[np.zeros((16, 16), np.float16)]])
    rows, qt = torch.zeros(1, 8, codecs.row_bytes + 1, dtype=torch.uint8), torch.zeros(1, 1, 1, 1, 16)
    with pytest.raises(ValueError, match="k_rows: whole words expected, rows of 13 bytes"):
        st.attend(codecs, codecs, rows, rows, qt, torch.zeros(1, 1, 8))


def test_bad_bands_are_refused() -> None:
    basis = [np.zeros((7, 16), np.float16)]
    with pytest.raises(ValueError, match="head 0: bands of 8 k coefficients.* 7 of 4 bits"):
        st.Codecs.make([[(7, 4, 1.0)]], basis, basis)
    with pytest.raises(ValueError, match=r"head 0: E and D of shape \(8, 16\) expected, \(7, 16\)"):
        st.Codecs.make([[(8, 4, 1.0)]], basis, basis)
