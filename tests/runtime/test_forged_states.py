"""Forged states with valid checksums: refused or restored, and decoding after that does not crash.

With sanitizer builds (docs/development.md) the tests also find accesses out of bounds.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import damage
import engine
import forge
import pytest
from each import each
from engine import C, agree, session
from held import WINDOW
from hypothesis import given, settings
from hypothesis import strategies as st
from machine import ADAPT, partial_state, set_partial_state
from test_variants import exact_layout

ODD = [0, 1, -1, 2, 3, 4, 7, 24, 28, 59, 60, 64, 127, 255, 256, 2**16, 2**24, 2**30 - 1, 2**30, 2**31 - 1, -(2**31)]


@st.composite
def numbers(draw: st.DrawFn, data: bytes) -> bytes:
    """Replaces integers at some offsets."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = 4 * draw(st.integers(0, len(data) // 4 - 1) | st.integers(0, min(63, len(data) // 4 - 1)))
        struct.pack_into("<i", changed, at, draw(st.sampled_from(ODD)))
    return bytes(changed)


@each("partial", [False, True])
@each("arch", ["llama", "adaptive", "gemma2", "lfm2"])
def test_hostile_states(tiny_model: Callable[..., Path], tmp_path: Path, arch: str, partial: bool) -> None:
    """gemma2 has a sliding half, lfm2 recurrent state."""
    adaptive = arch == "adaptive"
    if adaptive and partial:
        pytest.skip("adaptive bases have no partial states")
    arch = "llama" if adaptive else arch
    model = engine.Model(tiny_model(arch))
    layout = exact_layout(model, arch, tmp_path / "layout.gguf")
    tokens = [10 + i * 7 % (model.n_vocab - 20) for i in range(50)]
    options: dict[str, Any] = {"window": WINDOW, "adapt": ADAPT if adaptive else None, "offload_kqv": not adaptive}
    take, give = (partial_state, set_partial_state) if partial else (engine.Session.state, engine.Session.set_state)
    with session(model, layout, n_seq_max=2, n_ctx=512, **options) as s:
        expected = s.decode(tokens[:36])
        state = take(s, 0)
        bodies = [forge.body(state, half) for half in range(1 if arch == "llama" else 2)]
        anything = st.one_of(
            [
                make(body).map(lambda changed, half=half: forge.with_body(state, changed, half))
                for half, body in enumerate(bodies)
                for make in (numbers, numbers, damage.damaged)
            ]
        )

        @settings(damage.SETTINGS, max_examples=damage.N_FILES or 20)
        @given(anything)
        def check(forged: bytes) -> None:
            assert give(s, forged, 0) in (0, len(forged))
            last = C.llama_memory_seq_pos_max(s.memory, 0)
            assert -1 <= last < 2**30
            s.try_decode(tokens[:2], last + 1)
            assert s.rm(0, -1)
            if arch == "lfm2":  # llama.cpp empties recurrent state by a product with 0, which NaN outlives
                s.clear()
            assert agree(expected[:20], s.decode(tokens[:20]))
            if partial:
                s.decode(tokens[20:36], 20)

        check()
    model.free()


@each("place", ["a row of a 16-bit band", "a row of the window"])
def test_numbers_that_are_not_finite_are_refused(tiny_model: Callable[..., Path], tmp_path: Path, place: str) -> None:
    """Before a cell changes, or (the window) with the sequence empty."""
    model = engine.Model(tiny_model("llama"))
    layout = exact_layout(model, "llama", tmp_path / "layout.gguf")
    tokens = [10 + i * 7 % (model.n_vocab - 20) for i in range(50)]
    with session(model, layout, n_seq_max=2, n_ctx=512, window=WINDOW) as s:
        expected = s.decode(tokens[:36])
        state = s.state(0)
        body = bytearray(forge.body(state))
        first_row = 2 * 4 + 36 * 12 + 2 * 4 + 4 + 8  # streams, cells; positions; layout, layers; type, size of a row
        at = first_row + 1 if place.endswith("band") else len(body) - 4
        body[at : at + 4] = b"\x7c" * 4  # NaN, wherever a half begins
        assert s.set_state(forge.with_body(state, bytes(body)), 0) == 0
        assert "finite numbers expected, NaN or infinity found" in "".join(engine.LOG[-4:])
        assert s.rm(0, -1)
        assert agree(expected, s.decode(tokens[:36]))
        assert s.set_state(state, 0) == len(state)
    model.free()


@pytest.mark.parametrize("values", [{0: 2}, {0: -1}, {4: -1}, {4: 2**30}, {8: 1}])
def test_recurrent_state_is_checked_before_anything_changes(
    tiny_model: Callable[..., Path], tmp_path: Path, values: dict[int, int]
) -> None:
    """llama.cpp would end the process over a second cell of a sequence."""
    model = engine.Model(tiny_model("lfm2"))
    layout = exact_layout(model, "lfm2", tmp_path / "layout.gguf")
    with session(model, layout, window=WINDOW, n_seq_max=2, n_ctx=512) as s:
        s.decode(list(range(20, 50)), 0, 1)
        state = s.state(1)
        s.decode(list(range(50, 60)), 30, 1)
        before, recurrent = s.state(1), forge.body(state, 1)
        second = forge.with_body(state, struct.pack("<I", 2) + recurrent[4:12] + recurrent[4:], 1)
        for bad in (forge.forged(state, values, half=1), second):
            assert s.set_state(bad, 1) == 0
            assert s.state(1) == before
        assert s.set_state(forge.forged(state, {}, half=1), 1) == len(state)
        assert not s.rm(300, 0)  # no such sequence
    model.free()


@pytest.mark.parametrize(
    "values",
    [
        {0: 3},  # cells for more sequences than there are
        {4: -1},
        {8: 0},  # of no sequence
        {8: 3},
        {12: 2},  # of a missing one
        {12: -1},
        {24: 0},  # of the first cell's
    ],
)
def test_recurrent_state_of_all_sequences_is_checked_before_anything_changes(
    tiny_model: Callable[..., Path], tmp_path: Path, values: dict[int, int]
) -> None:
    """Its cells: how many; of each its position, how many sequences, which."""
    model = engine.Model(tiny_model("lfm2"))
    layout = exact_layout(model, "lfm2", tmp_path / "layout.gguf")
    with session(model, layout, window=WINDOW, n_seq_max=2, n_ctx=512) as s:
        s.decode(list(range(20, 50)), 0, 0)
        s.decode(list(range(60, 80)), 0, 1)
        state = s.state()
        assert struct.unpack_from("<7i", forge.body(state, 1)) == (2, 29, 1, 0, 19, 1, 1)
        s.decode(list(range(50, 60)), 30, 0)
        before = s.state()
        assert s.set_state(forge.forged(state, values, half=1)) == 0
        assert s.state() == before
        assert s.set_state(forge.forged(state, {}, half=1)) == len(state)
        assert s.state() == state
    model.free()
