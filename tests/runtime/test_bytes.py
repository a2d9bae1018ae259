"""Promise 7: reported KV bytes are the bytes allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import engine
import pytest
from engine import session


@pytest.mark.parametrize("recent_bits", [16, 10])
@pytest.mark.parametrize(("n_seq_max", "unified"), [(1, False), (3, False), (3, True)])
def test_bytes(
    model: engine.Model, make_layout: Callable[..., Any], n_seq_max: int, unified: bool, recent_bits: int
) -> None:
    n_layer = engine.C.llama_model_n_layer(model.handle)
    n_head_kv = engine.C.llama_model_n_head_kv(model.handle)
    bands_k, bands_v = [(8, 8), (8, 6), (16, 4)], [(8, 6), (16, 3)]
    row_k = 1 + (8 * 8 + 8 * 6 + 16 * 4) // 8
    row_v = 1 + (8 * 6 + 16 * 3) // 8
    engine.LOG.clear()
    layout = make_layout(bands_k, bands_v, recent_bits=recent_bits)
    with session(model, layout, window=(4, 16, 8), n_ctx=768, n_seq_max=n_seq_max, unified=unified) as s:
        stats = s.stats()
        n_cells = 768 if unified or n_seq_max == 1 else 256
        n_stream = 1 if unified or n_seq_max == 1 else n_seq_max
        assert (stats.n_cells, stats.n_stream) == (n_cells, n_stream)
        assert stats.bytes_per_token == n_layer * n_head_kv * (row_k + row_v)
        assert stats.bytes_codes == 768 * stats.bytes_per_token
        halves = recent_bits == 16 or engine.C.llama_supports_gpu_offload()
        recent = 2 * 32 if halves else 2 + 32 + 32 // 4
        assert stats.bytes_window == n_layer * n_seq_max * n_head_kv * 2 * (4 * 2 * 32 + (16 + 8) * recent)
        assert stats.bytes_f16 == 768 * n_layer * n_head_kv * 64 * 2
        assert stats.bytes_stock == 0
        assert stats.bpe == pytest.approx(8 * (stats.bytes_codes + stats.bytes_window) / (stats.bytes_f16 / 2))
        # llama.cpp's report of its allocation agrees: codes are its own tensors
        assert (stats.n_sink, stats.n_recent, stats.n_rollback, stats.n_layer_coded) == (4, 16, 8, n_layer)


def test_an_ordinary_context_has_no_statistics(model: engine.Model) -> None:
    with session(model) as s:
        assert not engine.SUBKV.subkv_get_stats(s.ctx, None)
        assert "ordinary" in engine.last_error()
        assert engine.SUBKV.subkv_context_fingerprint(s.ctx) is None
