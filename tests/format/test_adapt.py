"""The adaptive coder (runtime/native/adapt/adapt.h) over streams of rows: equality with the static codec, chunks,
merges, independence of how rows arrive, states, bad input.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import capi
import numpy as np
import pytest
import writer
from adaptive_build import adaptive_only
from calib_synthetic import draw, random_moment
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st

from research.float32.adaptive import Replayed, ResearchLayout, anchored, native_params
from subkv.base.errors import SubkvError
from subkv.format.adapt import Adapt
from subkv.format.bases import StoredBasis
from subkv.native import library as _lib
from subkv.plan.basis import fit_metric, gains, store
from subkv.plan.predict import reconstructed

pytestmark = adaptive_only
F32 = np.ndarray[Any, np.dtype[np.float32]]
D = 32
N_SINK = 4
GAMMA = 1.125
# head 0: every width and a truncation; head 1: full rank, a DCT-mixed band
BANDS = [((8, 8), (8, 4), (8, 2)), ((8, 6), (24, 3))]
STATIC = Adapt(length=0, tau=1.0)
# the latest basis only, merged at the cap for any gain
EAGER = Adapt(length=64, warm=64, block=32, max_chunks=3, gain=1.0, reuse=0, merge=1)


def stored(head: int, value: bool) -> StoredBasis:
    """A basis like the converter's, with a mean for keys."""
    rng = np.random.default_rng([head, value])
    moment, metric = random_moment(rng, D, 5.0), random_moment(rng, D, 2.0)
    mean = None if value else rng.standard_normal(D).astype(np.float16)
    return store(fit_metric(moment, metric), moment, BANDS[head], mean)


def rows(seed: int, head: int, value: bool, n: int, drift: int | None = None) -> F32:
    """Rows with the distribution of the basis; from position `drift` on, with another distribution."""
    rng = np.random.default_rng([head, value])
    moment, _ = random_moment(rng, D, 5.0), random_moment(rng, D, 2.0)
    other = random_moment(np.random.default_rng([seed, 99]), D, 8.0)
    rng = np.random.default_rng(seed)
    x = draw(rng, moment, n)
    if drift is not None:
        x[drift:] = draw(rng, other, n - drift)
    if not value:
        x += stored(head, value).mean.astype(np.float64)
    return np.asarray(x, np.float32)


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ResearchLayout]:
    def head(i: int, value: bool) -> writer.Head:
        s = stored(i, value)
        return writer.Head(
            list(s.bands), [float(r) for r in s.ratio], s.encode, s.decode, GAMMA, None if value else s.mean
        )

    heads = range(len(BANDS))
    layers = [writer.Layer(0, D, D, [head(i, False) for i in heads], [head(i, True) for i in heads])]
    path = writer.write(
        tmp_path_factory.mktemp("adapt") / "layout.gguf", writer.metadata(layers, block_count=1, n_sink=N_SINK)
    )
    opened = ResearchLayout(path)
    yield opened
    opened.close()


class Stream:
    """subkv_adapt: rows handed over a few at a time."""

    def __init__(self, layout: ResearchLayout, params: Adapt, head: int, value: bool) -> None:
        self.lib = capi.load()
        self.handle = self.lib.subkv_adapt_new(layout.handle, native_params(params), 0, head, value)
        assert self.handle, _lib.last_error()

    def __del__(self) -> None:
        self.lib.subkv_adapt_free(self.handle)

    def push(self, x: F32) -> None:
        x = np.ascontiguousarray(x)
        assert self.lib.subkv_adapt_push(self.handle, x.ctypes.data, len(x))

    def read(self) -> tuple[F32, Any, F32]:
        n = self.lib.subkv_adapt_read(self.handle, None, None, None)
        out = np.empty((n, D), np.float32), np.empty(n, np.int32), np.empty(n, np.float32)
        assert self.lib.subkv_adapt_read(self.handle, *(a.ctypes.data for a in out)) == n
        return out

    def through(self, name: str, slot: int, x: F32) -> F32 | None:
        """subkv_adapt_query or subkv_adapt_lift; None where refused."""
        out = np.empty_like(x)
        function = getattr(self.lib, f"subkv_adapt_{name}")
        return out if function(self.handle, slot, x.ctypes.data, out.ctypes.data) else None

    def save(self) -> bytes:
        size = self.lib.subkv_adapt_save(self.handle, None, 0)
        state = ctypes.create_string_buffer(size)
        assert self.lib.subkv_adapt_save(self.handle, state, size) == size
        return state.raw

    def restore(self, state: bytes) -> str:
        """The sentence of a refusal, "" if there was none."""
        return "" if self.lib.subkv_adapt_restore(self.handle, state, len(state)) else _lib.last_error()


def relative(x: F32, y: F32) -> float:
    """Squared error relative to the energy."""
    return float(((x - y).astype(np.float64) ** 2).sum() / (x.astype(np.float64) ** 2).sum())


@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize("head", [0, 1])
def test_static_equals_the_codec(layout: ResearchLayout, head: int, value: bool) -> None:
    """Without triggers: γ Dᵀ ĉ + μ of subkv/plan/predict.py for every row, the last of an incomplete block."""
    x = rows(1, head, value, 203)
    out = layout.replay(STATIC, 0, head, value, x)
    expected = reconstructed(x, stored(head, value), 1.0 if value else GAMMA)
    # a coefficient half way between two codes may go either way: two orders of summation
    close = np.abs(out.seen - expected).max(axis=1) < 1e-4 * np.abs(expected).max()
    assert close.mean() > 0.97
    assert relative(expected, out.seen) < 1e-3
    assert not out.chunk_of.any()
    assert out.stats["n_opened"] == out.stats["n_refused"] == out.stats["bytes_bases"] == 0
    assert out.stats["n_blocks"] == 203 // 32


@each("kind", ["covariance", "fd", "oja"])
@each("value", [False, True])
@each("head", [0, 1])
def test_rho_is_the_residual_of_the_coefficients(layout: ResearchLayout, head: int, value: bool, kind: str) -> None:
    """‖x' − x̂'‖ / ‖x'‖ over the block, x̂' from the decoded rows: x̂ = Dᵀ keep x̂', where D has full row rank."""
    x = rows(2, head, value, 256, drift=96)
    out = layout.replay(replace(EAGER, kind=kind, max_chunks=100), 0, head, value, x)
    basis = stored(head, value)
    space = basis.coefficients(x).astype(np.float64)
    decoded = out.seen.astype(np.float64)
    if not value:
        decoded = (decoded - basis.mean.astype(np.float64)) / GAMMA
    back = np.linalg.pinv(basis.decode.astype(np.float64) * gains(basis.bands)[:, None])
    error = space - decoded @ back
    for first in range(0, 256, 32):
        part = slice(max(first, N_SINK), first + 32)
        assert len(set(out.rho[part])) == len(set(out.chunk_of[part])) == 1
        rho = np.sqrt((error[part] ** 2).sum() / (space[part] ** 2).sum())
        assert out.rho[part][0] == pytest.approx(rho, rel=2e-3)
    assert not out.rho[:N_SINK].any()


@pytest.mark.parametrize("kind", ["covariance", "fd"])
@pytest.mark.parametrize("head", [0, 1])
def test_adapting_reduces_the_error_of_changing_rows(layout: ResearchLayout, kind: str, head: int) -> None:
    x = rows(3, head, True, 1024, drift=256)
    space = stored(head, True).coefficients(x)
    params = replace(EAGER, kind=kind, decay=0.99)
    static = layout.replay(STATIC, 0, head, True, x)
    out = layout.replay(params, 0, head, True, x)
    assert out.stats["n_opened"] >= 1
    assert np.isfinite(out.seen).all()
    # head 0's static basis drops a quarter of the directions; rho measures the rest of x'
    assert out.rho[-256:].mean() < 0.9 * static.rho[-256:].mean()
    assert len(space) == 1024


def test_rows_do_not_depend_on_later_rows(layout: ResearchLayout) -> None:
    x = rows(4, 1, True, 640, drift=200)
    params = replace(EAGER, max_chunks=100)
    whole = layout.replay(params, 0, 1, True, x)
    for n in (64, 200, 320, 512):
        part = layout.replay(params, 0, 1, True, x[:n])
        done = n // 32 * 32
        assert np.array_equal(part.seen[:done], whole.seen[:done])
        assert np.array_equal(part.chunk_of[:done], whole.chunk_of[:done])


ANCHORS = [(0, 0), (96, 0), (0, 64), (128, 64)]  # window, lookahead


@each(("window", "lookahead"), ANCHORS)
@each("value", [False, True])
@each("head", [0, 1])
def test_bases_are_those_of_the_anchoring_window(
    layout: ResearchLayout, head: int, value: bool, window: int, lookahead: int
) -> None:
    """Every band of a chunk's basis spans the reference's directions; the last rows wait for their look-ahead."""
    params = replace(EAGER, max_chunks=100, gain=1000.0, merge=0, window=window, lookahead=lookahead)
    x = rows(16, head, value, 400, drift=150)
    stream = Stream(layout, params, head, value)
    stream.push(x)
    _, chunk_of, rho = stream.read()
    n_coded = (400 - lookahead) // 32 * 32
    assert rho[N_SINK:n_coded].all() and not rho[n_coded:].any()
    basis = stored(head, value)
    keep = gains(basis.bands)
    space = basis.coefficients(x).astype(np.float64)[N_SINK:]
    slots = sorted(set(chunk_of) - {0})
    assert len(slots) >= 4
    for slot in slots:
        lifted = [stream.through("lift", int(slot), e) for e in np.eye(len(keep), dtype=np.float32)]
        found = np.array(lifted, np.float64) / keep[None, :] * keep[:, None]  # R: lift is keep Rᵀ (e / keep)
        end = int(np.argmax(chunk_of == slot)) // 32 * 32 + 32
        expected, _ = anchored(space, end - N_SINK, window, lookahead)
        first = 0
        for n, _ in basis.bands:
            band = slice(first, first + n)
            assert np.abs(found[band].T @ found[band] - expected[band].T @ expected[band]).max() < 0.02
            first += n


def test_a_trailing_window_fits_a_changed_text_better(layout: ResearchLayout) -> None:
    """After a change of distribution all rows so far are the wrong ones; look-ahead sees the change before it comes."""
    x = rows(17, 1, True, 1200, drift=600)
    params = replace(EAGER, max_chunks=100, merge=0)
    after = slice(640, 896)
    streaming = layout.replay(params, 0, 1, True, x).rho[after].mean()
    trailing = layout.replay(replace(params, window=96), 0, 1, True, x).rho[after].mean()
    ahead = layout.replay(replace(params, window=128, lookahead=64), 0, 1, True, x).rho[after].mean()
    assert trailing < 0.95 * streaming and ahead < trailing


@given(
    st.lists(st.integers(0, 400), max_size=8),
    st.sampled_from([1, 2, 100]),
    st.sampled_from(["covariance", "oja"]),
    st.sampled_from(ANCHORS),
)
@settings(max_examples=20, deadline=None)
def test_any_split_gives_the_same(cuts: list[int], max_chunks: int, kind: str, anchor: tuple[int, int]) -> None:
    layout = _LAYOUT[0]
    x = rows(5, 0, False, 400, drift=150)
    params = replace(EAGER, max_chunks=max_chunks, kind=kind, window=anchor[0], lookahead=anchor[1])
    whole = layout.replay(params, 0, 0, False, x)
    stream = Stream(layout, params, 0, False)
    for part in np.split(x, sorted(cuts)):
        stream.push(part)
    for one, other in zip((whole.seen, whole.chunk_of, whole.rho), stream.read(), strict=True):
        assert np.array_equal(one, other)
    assert capi.load().subkv_adapt_read(stream.handle, None, None, None) == 400


_LAYOUT: list[ResearchLayout] = []


@pytest.fixture(scope="module", autouse=True)
def _keep(layout: ResearchLayout) -> None:
    """Stores the layout in a global, because hypothesis rejects fixtures of a narrower scope."""
    _LAYOUT[:] = [layout]


@pytest.mark.parametrize("max_chunks", [1, 2, 3])
def test_merges_keep_the_number_of_chunks(layout: ResearchLayout, max_chunks: int) -> None:
    rng = np.random.default_rng(6)
    x = np.concatenate([draw(rng, random_moment(rng, D, 8.0), 200) for _ in range(6)]).astype(np.float32)
    params = replace(EAGER, max_chunks=max_chunks, decay=0.98)
    out = layout.replay(params, 0, 1, True, x)
    free = layout.replay(replace(params, max_chunks=100), 0, 1, True, x)
    s = out.stats
    # opened chunks depend only on new rows
    assert s["n_opened"] == free.stats["n_opened"] > max_chunks + 1
    assert s["n_chunks"] == max_chunks
    assert s["n_merged"] == s["n_opened"] - max_chunks
    assert s["bytes_bases"] == max_chunks * (2 * D * D + 4 * len(BANDS[1]))
    assert set(out.chunk_of) == set(range(max_chunks + 1))
    assert np.array_equal(out.chunk_of == 0, free.chunk_of == 0)
    assert np.array_equal(out.rho, free.rho)
    static = out.chunk_of == 0
    assert np.array_equal(out.seen[static], free.seen[static])
    last = free.chunk_of == free.chunk_of[-1]
    assert np.array_equal(out.seen[last], free.seen[last])
    # every merge quantizes a row again: 24 of 32 coefficients have 3 bits, of distortion 0.037
    assert relative(free.seen, out.seen) < 0.06 * s["n_merged"]
    if max_chunks == 1:
        assert s["n_recoded"] >= (~static).sum() - last.sum()


def test_without_merges_the_first_bases_stay(layout: ResearchLayout) -> None:
    rng = np.random.default_rng(6)
    x = np.concatenate([draw(rng, random_moment(rng, D, 8.0), 200) for _ in range(6)]).astype(np.float32)
    params = replace(EAGER, max_chunks=2, decay=0.98, merge=0)
    out = layout.replay(params, 0, 1, True, x)
    free = layout.replay(replace(params, max_chunks=100), 0, 1, True, x)
    assert out.stats["n_opened"] == out.stats["n_chunks"] == 2
    assert (
        out.stats["n_merged"] == out.stats["n_recoded"] == out.stats["bytes_sketch"] == 0 < free.stats["bytes_sketch"]
    )
    same = int(np.argmax(free.chunk_of > 2))
    assert np.array_equal(out.seen[:same], free.seen[:same])
    assert (out.chunk_of[same:] == 2).all()


@pytest.mark.parametrize("value", [False, True])
def test_reuse_takes_the_best_of_the_bases(layout: ResearchLayout, value: bool) -> None:
    """The text returns to the distribution of the static basis; no block is worse than with that basis."""
    x = rows(13, 1, value, 1200, drift=300)
    x[700:] = rows(14, 1, value, 500)
    params = replace(EAGER, merge=0, max_chunks=2, decay=0.98)
    static = layout.replay(STATIC, 0, 1, value, x)
    latest = layout.replay(params, 0, 1, value, x)
    best = layout.replay(replace(params, reuse=1), 0, 1, value, x)
    assert np.all(best.rho <= static.rho * (1 + 1e-6))
    assert set(best.chunk_of[750:1184]) >= {0}
    assert best.rho.mean() < min(static.rho.mean(), latest.rho.mean())


def test_a_new_basis_must_gain(layout: ResearchLayout) -> None:
    x = rows(7, 1, True, 512, drift=128)
    out = layout.replay(replace(EAGER, gain=1e-3), 0, 1, True, x)
    assert out.stats["n_opened"] == 0 and out.stats["n_refused"] == 7  # before tokens 96, 160, ..
    kept = layout.replay(STATIC, 0, 1, True, x)
    assert np.array_equal(out.seen, kept.seen)


def test_residuals_trigger(layout: ResearchLayout) -> None:
    """No length: only blocks above tau are reconsidered, and none before the sketch is warm."""
    x = rows(8, 1, True, 512, drift=256)
    before = layout.replay(STATIC, 0, 1, True, x).rho
    tau = 1.001 * float(before[N_SINK:256].max())
    assert before[256:].max() > tau
    out = layout.replay(replace(EAGER, length=0, tau=tau, warm=0, decay=0.98), 0, 1, True, x)
    assert not out.chunk_of[:256].any() and out.chunk_of[256:].any()
    assert out.stats["n_opened"] + out.stats["n_refused"] <= (before > tau).sum() // 32
    late = layout.replay(replace(EAGER, length=0, tau=tau, warm=400), 0, 1, True, x)
    assert not late.chunk_of[:384].any()


@pytest.mark.parametrize("head", [0, 1])
def test_logits_equal_those_of_lifted_vectors(layout: ResearchLayout, head: int) -> None:
    """q̃(chunk) · c = q̃ · lift(c) for every basis in use: logits on coefficients equal those on vectors."""
    rank = sum(n for n, _ in BANDS[head])
    stream = Stream(layout, EAGER, head, True)
    stream.push(rows(15, head, True, 500, drift=100))
    rng = np.random.default_rng(0)
    for slot in range(EAGER.max_chunks + 1):
        q, c = rng.standard_normal((2, rank)).astype(np.float32)
        query, lifted = stream.through("query", slot, q), stream.through("lift", slot, c)
        assert query is not None and lifted is not None
        assert float(query @ c) == pytest.approx(float(q @ lifted), abs=1e-4 * rank)
        assert (slot == 0) == (np.array_equal(query, q) and np.array_equal(lifted, c))
        assert np.linalg.norm(lifted) == pytest.approx(np.linalg.norm(c), rel=0.2)  # gains are at most 1.13
    assert stream.through("query", EAGER.max_chunks + 1, q) is None
    assert "slot: expected 0 or a chunk in use, found 4" in _lib.last_error()


@pytest.mark.parametrize("value", [False, True])
def test_rows_that_are_not_finite(layout: ResearchLayout, value: bool) -> None:
    x = rows(9, 1, value, 300, drift=100)
    x[50, 3], x[170, 0], x[171, 31] = np.nan, np.inf, -np.inf
    out = layout.replay(EAGER, 0, 1, value, x)
    assert out.stats["n_nonfinite"] == 3
    bad = np.isin(np.arange(len(x)), [50, 170, 171])
    assert np.isnan(out.seen[bad]).all() and np.isfinite(out.seen[~bad]).all() and np.isfinite(out.rho).all()
    assert out.stats["n_opened"] >= 1


def test_nothing_but_zeros(layout: ResearchLayout) -> None:
    out = layout.replay(EAGER, 0, 1, True, np.zeros((200, D), np.float32))
    assert not out.seen.any() and not out.rho.any() and out.stats["n_opened"] == 0


@each(("reuse", "max_chunks"), [(0, 100), (1, 100), (1, 1)])
@each("kind", ["covariance", "fd", "oja"])
@each(("window", "lookahead"), [(0, 0), (128, 64)])
def test_a_restored_state_continues_identically(
    layout: ResearchLayout, window: int, lookahead: int, kind: str, reuse: int, max_chunks: int
) -> None:
    x = rows(10, 0, True, 700, drift=200)
    params = replace(EAGER, kind=kind, max_chunks=max_chunks, decay=0.99, reuse=reuse, merge=0)  # merges need rows
    params = replace(params, window=window, lookahead=lookahead)
    one = Stream(layout, params, 0, True)
    one.push(x[:410])
    other = Stream(layout, params, 0, True)
    assert other.restore(one.save()) == ""
    assert other.save() == one.save()
    one.push(x[410:])
    other.push(x[410:])
    assert other.save() == one.save()
    held = one.read()[2][(410 - lookahead) // 32 * 32 :]  # rows before the block in progress are the host's
    assert np.array_equal(other.read()[2], held)


@each(("window", "lookahead"), [(0, 0), (96, 32)])
def test_a_damaged_state_is_refused(layout: ResearchLayout, window: int, lookahead: int) -> None:
    params = replace(EAGER, window=window, lookahead=lookahead)
    stream = Stream(layout, params, 0, True)
    stream.push(rows(11, 0, True, 320, drift=64))
    state = stream.save()
    fresh = Stream(layout, params, 0, True)
    assert "at least 16 bytes, found 3" in fresh.restore(state[:3])
    assert "chunks that fill it" in fresh.restore(state[:-1])
    assert "of the same parameters" in Stream(layout, replace(params, gain=0.9), 0, True).restore(state)
    assert "of the same parameters" in Stream(layout, replace(params, window=200), 0, True).restore(state)
    assert "of the same parameters" in Stream(layout, replace(params, lookahead=16), 0, True).restore(state)
    assert "of this head" in Stream(layout, params, 1, True).restore(state)
    assert "before any row" in stream.restore(state)
    rng = np.random.default_rng(0)
    for _ in range(300):
        bad = bytearray(state)
        for at in rng.integers(0, len(bad), rng.integers(1, 4)):
            bad[at] = rng.integers(0, 256)
        victim = Stream(layout, params, 0, True)
        victim.restore(bytes(bad))
        victim.push(rows(12, 0, True, 128))
        victim.read()


@each(
    ("changes", "message"),
    [
        ({"kind": "svd"}, "kind: expected one of covariance, fd, oja, found 'svd'"),
        ({"kind": "fd", "rank": 16, "rows": 15}, r"rows: expected 16\.\.1024, found 15"),
        ({"kind": "oja", "rank": 33}, r"rank: expected 0\.\.32, found 33"),
        ({"block": 0}, r"block: expected 1\.\.1024, found 0"),
        ({"length": -1}, r"length: expected 0\.\.2147483647, found -1"),
        ({"warm": -1}, r"warm: expected 0\.\."),
        ({"max_chunks": 0}, r"max_chunks: expected 1\.\.255, found 0"),
        ({"tau": 0.0}, "tau: expected a residual above 0, found 0"),
        ({"tau": float("nan")}, "tau: expected a residual above 0, found -?nan"),
        ({"gain": 0.0}, "gain: expected a factor above 0, found 0"),
        ({"reuse": 2}, r"reuse: expected 0\.\.1, found 2"),
        ({"lookahead": -1}, r"lookahead: expected 0\.\.1024, found -1"),
        ({"lookahead": 1025}, r"lookahead: expected 0\.\.1024, found 1025"),
        ({"window": 31}, r"window: expected 32\.\.4096, found 31"),
        ({"window": 256, "lookahead": 256}, r"window: expected 288\.\.4096, found 256"),
        ({"gain": float("inf")}, "gain: expected a factor above 0, found inf"),
        ({"decay": 0.1}, r"decay: expected 0\.5\.\.1 per token"),
        ({"kind": "oja", "rate": 0.0}, "rate: expected above 0 and below 1"),
    ],
)
def test_bad_parameters(layout: ResearchLayout, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((SubkvError, ValueError), match=message):
        layout.replay(replace(EAGER, **changes), 0, 1, True, np.zeros((4, D), np.float32))


def test_bad_heads(layout: ResearchLayout) -> None:
    x = np.zeros((4, D), np.float32)
    with pytest.raises(SubkvError, match="il: expected a coded layer, found 7"):
        layout.replay(EAGER, 7, 0, True, x)
    with pytest.raises(SubkvError, match=r"head_kv: expected 0\.\.1, found 2"):
        layout.replay(EAGER, 0, 2, True, x)
    with pytest.raises(SubkvError, match="nowhere.gguf: expected a GGUF file"):
        ResearchLayout(Path("nowhere.gguf"))


def test_replayed_is_complete(layout: ResearchLayout) -> None:
    out: Replayed = layout.replay(EAGER, 0, 0, True, np.zeros((0, D), np.float32))
    assert out.seen.shape == (0, D) and out.stats["bytes_sketch"] == 40 + 4 * 24 * 25 // 2
