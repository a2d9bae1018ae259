"""Promise 4: remove a tail and decode again, copy a sequence, save and restore: same logits as never having done it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import engine
import forge
import numpy as np
import pytest
from each import each
from engine import C, Refused, agree, check_sequences_apart, distance, last_error, session
from gguf import GGUFReader

BANDS = [(8, 8), (8, 6), (16, 4)]
WINDOW = (4, 16, 8)


@pytest.fixture(scope="module", params=[16, 10])
def layout(make_layout: Callable[..., Any], request: pytest.FixtureRequest) -> Any:
    return make_layout(BANDS, BANDS, recent_bits=request.param)


def test_remove_a_tail_and_decode_again(model: engine.Model, tokens: list[int], layout: Any) -> None:
    with session(model, layout, window=WINDOW) as s:
        expected = s.decode(tokens[:120])
        s.clear()
        s.decode(tokens[:100])
        s.decode([t ^ 1 for t in tokens[100:108]], 100)
        assert s.rm(0, 100)
        found = s.decode(tokens[100:120], 100, pieces=[1] * 20)
    assert agree(expected[100:], found)


def decoded_from_codes(model: engine.Model, tokens: list[int], layout: Any, n: int, end: int) -> Any:
    """Logits of tokens [n, end), one at a time, after n tokens of which only sinks have exact rows: the definition of
    a sequence that has lost its window.
    """
    with session(model, layout, window=WINDOW) as s:
        s.decode(tokens[:n])
        state = forge.without_recent_rows(s.state(0), WINDOW)
        assert s.set_state(state, 0) == len(state), last_error()
        return s.decode(tokens[n:end], n, pieces=[1] * (end - n))


def test_lost_rows_are_read_through_their_codes(
    model: engine.Model, tokens: list[int], make_layout: Callable[..., Any]
) -> None:
    """With exact codes it makes no difference."""
    with session(model, make_layout(), window=WINDOW) as s:
        expected = s.decode(tokens[:100])[80:]
    assert distance(expected, decoded_from_codes(model, tokens, make_layout(), 80, 100)) < 1e-2


def test_any_tail_can_be_removed(model: engine.Model, tokens: list[int], layout: Any) -> None:
    """The rest is read through its codes where the removed tail has taken the exact rows."""
    for n in (60, 90):
        expected = decoded_from_codes(model, tokens, layout, n, 120)
        with session(model, layout, window=WINDOW) as s:
            complete = s.decode(tokens[:120])[n:]
            assert s.rm(0, n)
            found = s.decode(tokens[n:120], n, pieces=[1] * (120 - n))
        assert agree(expected, found)
        assert not agree(complete, found), "the window changes nothing: the test proves nothing"


def test_a_split_does_not_matter_after_a_removal(model: engine.Model, tokens: list[int], layout: Any) -> None:
    found = []
    for pieces in ([40], [1] * 40, [3, 30, 7]):
        with session(model, layout, window=WINDOW) as s:
            s.decode([*tokens[:70], *tokens[100:140]])
            assert s.rm(0, 70)
            found.append(s.decode(tokens[70:110], 70, pieces=pieces))
    assert agree(found[0], found[1]) and agree(found[0], found[2])


@pytest.mark.parametrize("n", [60, 120])
def test_a_short_tail_takes_no_exact_row(model: engine.Model, tokens: list[int], layout: Any, n: int) -> None:
    """Codes are coarse: without one exact row the logits would not agree.

    On a GPU that rounds more, they may agree without one row, but not without several.
    """
    n_complete, alike = [], []
    with session(model, layout, window=WINDOW) as s:
        expected = s.decode(tokens[:n])
        for length in range(1, 40):
            s.clear()
            s.decode(tokens[:n])
            assert s.rm(0, n - length)
            resumed = engine.SUBKV.subkv_resume(s.ctx, 0, n - length)
            found = s.decode(tokens[n - length : n], n - length)
            if resumed == n - length:
                n_complete.append(length)
            if length in n_complete or length > WINDOW[2] + 4:
                alike.append(agree(expected[n - length :], found))
                assert alike[-1] == (length in n_complete) or C.llama_supports_gpu_offload(), length
    assert all(alike[: len(n_complete)]) and not all(alike[len(n_complete) :])
    assert n_complete == list(range(1, len(n_complete) + 1))
    assert len(n_complete) >= WINDOW[2]


def test_evaluation_resumes_where_exact_rows_end(
    model: engine.Model, tokens: list[int], layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most SUBKV_RESUME tokens before the cut, and no more than the window has."""
    for setting, n_again in (("", 15), ("5", 5), ("0", 0), ("100", 15)):
        monkeypatch.setenv("SUBKV_RESUME", setting)
        with session(model, layout, window=WINDOW) as s:
            s.decode(tokens[:120])
            assert engine.SUBKV.subkv_resume(s.ctx, 0, 60) == 60 - n_again
            assert engine.SUBKV.subkv_resume(s.ctx, 0, 112) == 112
            assert s.rm(0, 60 - n_again)
            s.decode(tokens[60 - n_again : 60], 60 - n_again) if n_again else None
            assert engine.SUBKV.subkv_resume(s.ctx, 0, 60) == 60
            for seq, pos in ((-1, 60), (7, 60), (0, -5), (0, 2**31 - 1)):
                assert engine.SUBKV.subkv_resume(s.ctx, seq, pos) in (pos, 60, max(pos, 0))
    for setting in ("x", "-1", "9" * 20):
        monkeypatch.setenv("SUBKV_RESUME", setting)
        with pytest.raises(Refused, match="SUBKV_RESUME"), session(model, layout, window=WINDOW):
            pass


def test_exact_rows_return_from_a_sequence_that_shares_their_cells(
    model: engine.Model, tokens: list[int], layout: Any
) -> None:
    """A long tail takes the window; the copy, which stayed where the tail began, still has it."""
    with session(model, layout, window=WINDOW) as s:
        expected = s.decode(tokens[:80])[60:]
    with session(model, layout, window=WINDOW, n_seq_max=2, unified=True, n_ctx=512) as s:
        s.decode(tokens[:60])
        s.cp(0, 1)
        s.decode(tokens[100:160], 60)
        assert s.rm(0, 60)
        assert agree(expected, s.decode(tokens[60:80], 60))
        assert agree(expected, s.decode(tokens[60:80], 60, 1))


def test_any_tail_may_go_without_a_recent_window(model: engine.Model, tokens: list[int], layout: Any) -> None:
    with session(model, layout, window=(4, 0, 0)) as s:
        expected = s.decode(tokens[:120])
        assert s.rm(0, 30)
        assert agree(expected[30:], s.decode(tokens[30:120], 30))


def test_a_token_that_is_not_finite(
    tiny_model: Callable[..., Path], tokens: list[int], make_layout: Callable[..., Any], tmp_path: Path
) -> None:
    """From there on its sequence gives NaN, as with an f16 cache, until the token is removed. Others stay."""
    path = tmp_path / "nan.gguf"
    path.write_bytes(tiny_model("llama").read_bytes())
    spoiled = max(tokens) + 1
    table = next(tensor for tensor in GGUFReader(path, "r+").tensors if tensor.name == "token_embd.weight")
    table.data[spoiled] = np.nan
    table.data.flush()
    model = engine.Model(path)
    for layout, pieces in itertools.product((None, make_layout(BANDS, BANDS)), ([60], [48, *[1] * 12])):
        if layout is None and pieces == [60]:
            continue  # llama.cpp spreads it to earlier tokens of the batch
        with session(model, layout, n_seq_max=2, unified=True, **({"window": WINDOW} if layout else {})) as s:
            found = s.decode([*tokens[:50], spoiled, *tokens[51:60]], pieces=pieces)
            assert np.all(np.isfinite(found[:50])) and np.all(np.isnan(found[50:]))
            if layout is None:
                continue
            assert s.stats().n_zero_rows > 0
            expected = s.decode(tokens[:30], 0, 1)
            assert np.all(np.isfinite(expected))
            assert np.all(np.isnan(s.decode(tokens[60:62], 60, 0)))
    model.free()


def test_clear_forgets_everything(model: engine.Model, tokens: list[int], layout: Any) -> None:
    with session(model, layout, window=WINDOW) as s:
        expected = s.decode(tokens[50:110])
        s.clear()
        s.decode(tokens[:60])
        s.clear()
        assert agree(expected, s.decode(tokens[50:110]))


@pytest.mark.parametrize("unified", [False, True])
def test_sequences_do_not_see_each_other(model: engine.Model, tokens: list[int], layout: Any, unified: bool) -> None:
    check_sequences_apart(partial(session, model, layout, window=WINDOW), tokens, unified)


@pytest.mark.parametrize("unified", [False, True])
def test_copy_a_sequence(model: engine.Model, tokens: list[int], layout: Any, unified: bool) -> None:
    with session(model, layout, window=WINDOW) as s:
        expected = s.decode(tokens[:120])
    with session(model, layout, window=WINDOW, n_seq_max=2, unified=unified, n_ctx=512) as s:
        s.decode(tokens[:90], 0, 0)
        s.cp(0, 1)
        # the source goes another way; the copy must not notice
        s.decode([t ^ 1 for t in tokens[90:120]], 90, 0)
        found = s.decode(tokens[90:120], 90, 1)
        assert agree(expected[90:], found)
        assert s.rm(0, -1)
        assert s.rm(1, 115)
        assert agree(expected[115:], s.decode(tokens[115:120], 115, 1))


def test_a_sequence_takes_over_cells_beside_its_own(
    model: engine.Model, tokens: list[int], make_layout: Callable[..., Any]
) -> None:
    """Exact codes against llama.cpp's own cache: the rows of both parts are there afterwards, sinks among them."""
    found = []
    for layout in (None, make_layout()):
        with session(model, layout, window=WINDOW if layout else (-1, -1, -1), n_seq_max=2, unified=True) as s:
            for first, last in ((0, 60), (60, 100)):
                s.decode(tokens[first:last], first, seq=1)
                s.cp(1, 0)
                assert s.rm(1, -1)
            found.append(s.decode(tokens[100:120], 100))
    assert distance(found[0], found[1]) < 1e-2


def test_a_part_is_copied_behind_a_sequence(model: engine.Model, tokens: list[int], layout: Any) -> None:
    """Later exact rows take the places of earlier ones."""
    with session(model, layout, window=WINDOW) as s:
        expected = s.decode(tokens[:120])
    with session(model, layout, window=WINDOW, n_seq_max=2, unified=True, n_ctx=512) as s:
        s.decode(tokens[:60], 0, (0, 1))
        s.decode(tokens[60:100], 60, 1)
        s.cp(1, 0, 60, 100)
        assert agree(expected[100:], s.decode(tokens[100:120], 100, 0))


def test_rows_of_a_removed_tail_are_not_reused_after_a_copy(
    model: engine.Model, tokens: list[int], layout: Any
) -> None:
    """Sequence 0 had rows of positions that sequence 1 no longer has, because its window has moved on."""
    with session(model, layout, window=WINDOW, n_seq_max=2, unified=True) as s:
        s.decode(tokens[:60])
        assert s.rm(0, 52)
        s.decode(tokens[100:200], seq=1)
        s.cp(1, 0, 52, 60)
        found = s.decode(tokens[60:70], 60)
    with session(model, layout, window=WINDOW, n_seq_max=2, unified=True) as s:
        s.decode(tokens[:52])
        s.decode(tokens[100:200], seq=1)
        s.cp(1, 0, 52, 60)
        assert agree(s.decode(tokens[60:70], 60), found)


def test_neighbours_in_a_batch_change_no_window(model: engine.Model, tokens: list[int], layout: Any) -> None:
    """Two sequences at the same positions in one call and one cache: each decodes as it does alone."""
    other = [t ^ 1 for t in tokens]
    with session(model, layout, window=WINDOW, n_seq_max=2, unified=True, n_ctx=512) as s:
        together = [
            s.decode_batch([(text[i], i, seq) for i in range(at, at + 30) for seq, text in enumerate((tokens, other))])
            for at in range(0, 120, 30)
        ]
    for seq, text in enumerate((tokens, other)):
        with session(model, layout, window=WINDOW) as s:
            assert agree(np.concatenate(together)[seq::2], s.decode(text[:120], pieces=[30] * 4))


def test_tokens_shared_by_two_sequences(model: engine.Model, tokens: list[int], layout: Any) -> None:
    with session(model, layout, window=WINDOW) as s:
        expected = s.decode(tokens[:100])
    with session(model, layout, window=WINDOW, n_seq_max=2, unified=True, n_ctx=512) as s:
        s.decode(tokens[:80], 0, (0, 1))
        assert agree(expected[80:], s.decode(tokens[80:100], 80, 1))
        assert agree(expected[80:], s.decode(tokens[80:100], 80, 0))


def test_a_copy_without_its_window_is_read_through_codes(model: engine.Model, tokens: list[int], layout: Any) -> None:
    expected = decoded_from_codes(model, tokens, layout, 60, 100)
    with session(model, layout, window=WINDOW) as s:
        uncopied = s.decode(tokens[:121])[120:]
    with session(model, layout, window=WINDOW, n_seq_max=2, unified=True, n_ctx=512) as s:
        s.decode(tokens[:120], 0, 0)
        s.cp(0, 1, 0, 60)
        assert agree(expected, s.decode(tokens[60:100], 60, 1))
        assert agree(uncopied, s.decode(tokens[120:121], 120, 0))


@pytest.mark.parametrize("seq", [None, 0])
def test_save_and_restore(model: engine.Model, tokens: list[int], layout: Any, seq: int | None) -> None:
    with session(model, layout, window=WINDOW) as s:
        expected = s.decode(tokens[:120])
        s.clear()
        s.decode(tokens[:100])
        state = s.state(seq)
    with session(model, layout, window=WINDOW) as s:
        s.decode(tokens[30:60])
        assert s.set_state(state, seq) == len(state)
        found = s.decode(tokens[100:120], 100)
        assert agree(expected[100:], found)
        assert s.rm(0, 115)
        assert agree(expected[115:], s.decode(tokens[115:120], 115))


def test_a_sequence_moves_to_another_slot_through_a_state(model: engine.Model, tokens: list[int], layout: Any) -> None:
    with session(model, layout, window=WINDOW) as s:
        expected = s.decode(tokens[:110])
    with session(model, layout, window=WINDOW, n_seq_max=2, unified=True, n_ctx=512) as s:
        s.decode(tokens[100:140], 0, 1)
        s.decode(tokens[:90], 0, 0)
        state = s.state(0)
        assert s.rm(0, -1) and s.rm(1, -1)
        assert s.set_state(state, 1) == len(state)
        assert agree(expected[90:], s.decode(tokens[90:110], 90, 1))


def test_a_state_of_another_layout_is_refused(
    model: engine.Model, tokens: list[int], layout: Any, make_layout: Callable[..., Any]
) -> None:
    other = make_layout(BANDS, BANDS, seed=1)  # rows of equal size, other bases
    with session(model, layout, window=WINDOW) as s:
        s.decode(tokens[:60])
        state = s.state()
    with session(model, other, window=WINDOW) as s:
        expected = s.decode(tokens[:40])
        s.rm(0, -1)
        s.decode(tokens[:39])
        assert s.set_state(state) == 0
        assert "fingerprint" in last_error() and "expected" in last_error() and "found" in last_error()
        # the earlier contents are unchanged
        assert agree(expected[39:], s.decode(tokens[39:40], 39))
    with session(model, layout, window=(4, 12, 8)) as s:
        assert s.set_state(state) == 0
        assert "n_recent" in last_error()


def test_states_do_not_cross_cache_types(model: engine.Model, tokens: list[int], layout: Any) -> None:
    with session(model) as s:
        s.decode(tokens[:60])
        stock = s.state()
    with session(model, layout, window=WINDOW) as s:
        s.decode(tokens[:60])
        coded = s.state()
        assert s.set_state(stock) == 0
        assert "state" in last_error()
    with session(model) as s:
        assert s.set_state(coded) == 0


@each("cut", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_state_is_refused(model: engine.Model, tokens: list[int], layout: Any, cut: float) -> None:
    with session(model, layout, window=WINDOW) as s:
        s.decode(tokens[:60])
        state = s.state()
        assert s.set_state(state[: int(len(state) * cut)]) == 0
        assert s.rm(0, -1)
        s.decode(tokens[:10])


def test_positions_cannot_be_divided(model: engine.Model, tokens: list[int], layout: Any) -> None:
    with session(model, layout, window=WINDOW) as s:
        expected = s.decode(tokens[:61])
        s.clear()
        s.decode(tokens[:60])
        C.llama_memory_seq_div(s.memory, 0, 10, -1, 2)
        assert "seq_div" in last_error() and "-ctk f16" in last_error()
        s.assert_refused()
        assert agree(expected[60:], s.decode(tokens[60:61], 60))


def test_an_ordinary_type_is_expected_beside_bases(model: engine.Model, layout: Any) -> None:
    with pytest.raises(Refused, match="type_k"), session(model, layout, type_k=8, type_v=8, flash_attn=1):
        pass


def test_a_token_of_two_sequences_has_the_window_of_the_first(
    model: engine.Model, tokens: list[int], layout: Any
) -> None:
    with session(model, layout, window=WINDOW, n_seq_max=3, unified=True, n_ctx=512) as s:
        s.decode(tokens[:120], 0, 0)
        s.cp(0, 1, 0, 60)  # cells whose exact rows left the window
        assert s.rm(0, -1)
        s.cp(1, 2)
        expected = decoded_from_codes(model, tokens, layout, 60, 61)
        assert agree(expected, s.decode(tokens[60:61], 60, [2, 1]))
