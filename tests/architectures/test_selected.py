"""Attention over selected cells, from a list of them and under a mask over all: both keep the guarantees."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import virtual
from engine import LOG, SUBKV, Refused, session
from families import HEAD
from guarantees import WINDOW, Trial, bases
from llama_cpp import llama_cpp as C

from subkv.native.library import Signatures, declare

ON_NODE = C.ggml_backend_sched_eval_callback
_FUNCTIONS: Signatures = {
    "ggml_get_name": (ctypes.c_char_p, [ctypes.c_void_p]),
    "ggml_nbytes": (ctypes.c_size_t, [ctypes.c_void_p]),
    "ggml_backend_tensor_get": (None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]),
}
GGML = declare(ctypes.CDLL(C._lib._name), _FUNCTIONS)


def listed(trial: Trial, layout: Any, tokens: list[int]) -> bool:
    """Whether each of these tokens, a prompt, reads a list of cells, rather than all tiles."""
    names: list[bytes] = []

    @ON_NODE
    def see(node: Any, ask: bool, _: Any) -> bool:
        names.append(GGML.ggml_get_name(node))
        return not ask

    with trial.coded(layout, on_node=see) as s:
        s.decode(tokens)
    return b"subkv_selected_cells" in names


@pytest.mark.parametrize(("heads", "n_selected", "of_a_list"), [(4, 16, False), (64, 8, True)])
def test_by_a_list_and_under_a_mask(heads: int, n_selected: int, of_a_list: bool, tmp_path: Path) -> None:
    """A prompt gathers cells where many query heads share a row; where few do, that costs more than it saves."""
    keys = {"attention.head_count": heads, "attention.indexer.top_k": n_selected}
    with virtual.model("deepseek32", **keys) as model:
        layout = bases(model, tmp_path, 16)
        try:
            trial = Trial(model)
            assert listed(trial, layout, trial.tokens[:64]) == of_a_list
            floor = trial.floor()
            distances = trial.guarantees(layout, floor)
            assert trial.reach() > 4 * floor
            assert max(distances[name] for name in ("equals f16", "splits", "rollback", "state")) < 2 * floor, distances
        finally:
            SUBKV.subkv_layout_free(layout)


def choices(model: virtual.Model, layout: Any, tokens: list[int]) -> dict[bytes, set[int]]:
    """The cells that the last of these tokens reads, by layer."""
    by_layer: dict[bytes, set[int]] = {}

    @ON_NODE
    def see(node: Any, ask: bool, _: Any) -> bool:
        name = GGML.ggml_get_name(node)
        if name.startswith(b"top_k") and not ask:
            cells = np.empty(GGML.ggml_nbytes(node) // 4, np.int32)
            GGML.ggml_backend_tensor_get(node, cells.ctypes.data, 0, cells.nbytes)
            by_layer[name] = set(cells.tolist())
        return bool(name.startswith(b"top_k"))

    with session(model, layout, window=WINDOW, n_ctx=1024, on_node=see) as s:
        s.decode(tokens[:-1])
        s.decode(tokens[-1:], pos=len(tokens) - 1)
    return by_layer


@pytest.fixture
def sparse(tmp_path: Path) -> Iterator[tuple[virtual.Model, Any]]:
    """A model with sizes in multiples of 32, and 16-bit bases for it."""
    keys = {"attention.key_length": 96, "rope.dimension_count": 32, "attention.key_length_mla": HEAD + 32}
    with virtual.model("deepseek32", **keys | {"attention.indexer.top_k": 64}) as model:
        layout = bases(model, tmp_path, 16)
        yield model, layout
        SUBKV.subkv_layout_free(layout)


def test_an_indexer_in_q8_0(sparse: tuple[virtual.Model, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """q8_0 halves the memory and chooses nearly the same cells; its states do not mix with those of f16."""
    model, layout = sparse
    tokens = np.random.default_rng(3).integers(2, model.n_vocab, 800).tolist()
    plain = choices(model, layout, tokens)
    with session(model, layout, window=WINDOW, n_ctx=1024) as s:
        s.decode(tokens[:100])
        state, size = s.state(0), s.stats().bytes_stock
    monkeypatch.setenv("SUBKV_INDEXER", "q8_0")
    small = choices(model, layout, tokens)
    assert sorted(plain) == sorted(small) and len(plain) == 2
    assert [name for name in plain if len(plain[name] & small[name]) < 0.9 * len(plain[name])] == []
    with session(model, layout, window=WINDOW, n_ctx=1024) as s:
        assert s.set_state(state, 0) == 0
        assert 32 * s.stats().bytes_stock == 17 * size > 0


def test_unsupported_indexer_types_are_refused(
    sparse: tuple[virtual.Model, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, layout = sparse
    for value, message in (("q4_0", "SUBKV_INDEXER: f16 or q8_0 expected, 'q4_0' found"), ("", ""), ("f16", "")):
        monkeypatch.setenv("SUBKV_INDEXER", value)
        if not message:
            with session(model, layout, window=WINDOW) as s:
                s.decode([5, 6, 7])
            continue
        with pytest.raises(Refused):
            session(model, layout, window=WINDOW).__enter__()
        assert message in "".join(LOG)
