"""The server with all layers on a GPU: slots saved there are restored on the CPU, and the other way round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from serving import running
from test_serve_slots import PROMPT, act, generate, held

from subkv.native.binding import C

pytestmark = pytest.mark.skipif(
    not C.llama_supports_gpu_offload(), reason="no GPU, nor an emulated one (-DSUBKV_EMULATE_CUDA=ON)"
)


@pytest.mark.parametrize("layers", [(-1, 0), (0, -1)])
def test_slots_move_between_gpu_and_cpu(
    coded_model: Callable[..., Path], tmp_path: Path, layers: tuple[int, int]
) -> None:
    first, then = layers
    with running(coded_model(), n_slots=2, n_ctx=512, folder=tmp_path, n_gpu_layers=first) as served:
        generate(served, PROMPT)
        n_held = act(served, "save").json()["n_saved"]
        expected = generate(served, PROMPT + "and then")
    with running(coded_model(), n_slots=2, n_ctx=512, folder=tmp_path, n_gpu_layers=then) as served:
        assert act(served, "restore", slot=1).json()["n_restored"] == n_held
        assert held(served) == [0, n_held]
        found = generate(served, PROMPT + "and then")
    assert found["timings"]["cache_n"] == expected["timings"]["cache_n"] > 32
    assert found["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
