"""Rows of the exact window in integers (recent.h): every version against numpy, and numpy against its own bounds."""

from __future__ import annotations

import numpy as np
import ops as o
from each import each
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

MOST, HALF_MAX = 511, np.float32(65504.0)


def recent_bytes(d: int) -> int:
    return 2 + d + d // 4


def packed(x: o.F32, mean: o.F32 | None) -> o.U8:
    """A row [d], finite, by the definition in recent.h."""
    y = np.clip(x, -HALF_MAX, HALF_MAX) - (0 if mean is None else mean)
    half = np.float16(np.abs(y).max() / np.float32(MOST))
    step = np.float32(half)
    q = np.clip(np.rint(y / step), -MOST, MOST) if step > 0 else np.zeros_like(y)
    u = q.astype(np.int32) + 512
    low = (u & 3).reshape(4, -1)
    planes = low[0] | low[1] << 2 | low[2] << 4 | low[3] << 6
    return np.concatenate([np.array([half]).view(np.uint8), (u >> 2).astype(np.uint8), planes.astype(np.uint8)])


def unpacked(row: o.U8, mean: o.F32 | None) -> o.U16:
    d = (len(row) - 2) * 4 // 5
    step, high, low = np.float32(row[:2].view(np.float16)[0]), row[2 : 2 + d].astype(np.int32), row[2 + d :]
    u = high << 2 | np.concatenate([low >> 2 * part & 3 for part in range(4)])
    x = (0 if mean is None else mean) + step * (u - 512).astype(np.float32)
    return np.clip(x, -HALF_MAX, HALF_MAX).astype(np.float16).view(np.uint16)


def pack(table: o.Ops, x: o.F32, mean: o.F32 | None) -> tuple[o.U8, bool]:
    row = np.full(recent_bytes(len(x)) + 1, 0xAB, np.uint8)
    finite = table.pack_recent(o.ptr(x), None if mean is None else o.ptr(mean), len(x), o.ptr(row))
    assert row[-1] == 0xAB
    return row[:-1], bool(finite)


def unpack(table: o.Ops, row: o.U8, mean: o.F32 | None, d: int) -> o.U16:
    out = np.full(d + 1, 0xABCD, np.uint16)
    table.unpack_recent(o.ptr(np.ascontiguousarray(row)), None if mean is None else o.ptr(mean), d, o.ptr(out))
    assert out[-1] == 0xABCD
    return out[:-1]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    d=st.sampled_from([8, 16, 24, 64, 80, 128, 192, 256, 576]),
    power=st.integers(-34, 20),
    outliers=st.integers(0, 3),
    centred=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@example(d=256, power=14, outliers=0, centred=True, seed=67108864)  # a mean beyond the largest half
def test_bytes_and_halves_match_the_definition(
    table: o.Ops, d: int, power: int, outliers: int, centred: bool, seed: int
) -> None:
    """Rows range from steps below the smallest half to saturation, with outliers and means."""
    rng = np.random.default_rng(seed)
    x = (2.0**power * rng.standard_normal(d)).astype(np.float32)
    x[rng.integers(0, d, outliers)] *= 100
    mean = None
    if centred:  # halves, which layouts hold to be finite
        mean = (
            (2.0 ** min(power, 14) * rng.standard_normal(d)).clip(-65504, 65504).astype(np.float16).astype(np.float32)
        )
    row, finite = pack(table, x, mean)
    assert finite
    assert row.tolist() == packed(x, mean).tolist()
    restored = unpack(table, row, mean, d)
    assert restored.tolist() == unpacked(row, mean).tolist()
    step = float(row[:2].view(np.float16)[0])
    within = np.clip(x, -65504, 65504).astype(np.float64)
    error = np.abs(restored.view(np.float16).astype(np.float64) - within)
    assert np.all(error <= 0.5 * step + np.abs(within) * 2.0**-10 + 2.0**-15)


@each("bad", [np.nan, np.inf, -np.inf])
@each("d", [24, 64])
def test_a_row_that_is_not_finite(table: o.Ops, bad: float, d: int) -> None:
    """Its bytes are the same in every version; it is NaN in every element."""
    x = np.linspace(-3, 3, d).astype(np.float32)
    x[17] = bad
    mean = np.linspace(-1, 1, d).astype(np.float16).astype(np.float32)
    row, finite = pack(table, x, mean)
    assert not finite
    assert row.tolist() == [0x00, 0x7E] + d * [512 >> 2] + d // 4 * [0]
    assert unpack(table, row, mean, d).tolist() == d * [o.HALF_NAN]


def test_rows_of_any_bytes(table: o.Ops) -> None:
    """Damaged rows are finite, or NaN in every element if their step is not."""
    rng = np.random.default_rng(4)
    for i in range(200):
        row = rng.integers(0, 256, recent_bytes(64), dtype=np.uint8)
        row[1] |= 0x7C * (i % 4 == 0)
        restored = unpack(table, row, None, 64)
        if np.isfinite(row[:2].view(np.float16)[0]):
            assert np.all(np.isfinite(restored.view(np.float16)))
            assert restored.tolist() == unpacked(row, None).tolist()
        else:
            assert restored.tolist() == 64 * [o.HALF_NAN]


def test_the_laboratory_sees_the_same(table: o.Ops) -> None:
    from subkv.format.recent import rounded

    rng = np.random.default_rng(5)
    x = (rng.standard_normal((20, 64)) * 2.0 ** rng.integers(-30, 18, (20, 1))).astype(np.float32)
    x[3], mean = 0.0, rng.standard_normal(64).astype(np.float16)
    rows = [pack(table, one, mean.astype(np.float32))[0] for one in x]
    restored = [unpack(table, row, mean.astype(np.float32), 64).view(np.float16) for row in rows]
    assert np.array_equal(rounded(x, mean), np.array(restored).astype(np.float32))
