"""M-RoPE, whose text has one position per token and whose pictures do not: text is coded, pictures are refused."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import engine
import pytest
from engine import C, agree, last_error, session
from test_hybrids import WINDOW, Coded


@pytest.fixture(scope="module")
def vision(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coded]:
    coded = Coded(tiny_model("qwen2vl"), tmp_path_factory.mktemp("vision"))
    yield coded
    coded.model.free()


def picture(s: engine.Session, n: int, pos: int) -> int:
    """llama_decode's status for embeddings at 4 positions each (time, height, width, none), as a picture has them."""
    n_embd = C.llama_model_n_embd(s.model.handle)
    batch = C.llama_batch_init(n, n_embd, 1)
    positions = (ctypes.c_int32 * (4 * n))()
    for i in range(n):
        positions[i], positions[n + i], positions[2 * n + i] = pos, pos + i // 2, pos + i % 2
        batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, False
    for i in range(n * n_embd):
        batch.embd[i] = 0.1
    own = ctypes.cast(batch.pos, ctypes.c_void_p).value  # of n positions, which is freed with the batch
    batch.pos = positions
    batch.n_tokens = n
    status = int(C.llama_decode(s.ctx, batch))
    batch.pos = ctypes.cast(own, ctypes.POINTER(ctypes.c_int32))
    C.llama_batch_free(batch)
    return status


@pytest.mark.parametrize("window", [WINDOW, (0, 0, 0)])
def test_a_picture_is_refused_and_text_goes_on(vision: Coded, window: tuple[int, int, int]) -> None:
    tokens = vision.tokens
    with session(vision.model) as s:
        assert picture(s, 4, 0) == 0  # an ordinary cache takes it
    with session(vision.model, vision.layout, window=window) as s:
        expected = s.decode(tokens[:61])
        s.clear()
        s.decode(tokens[:60])
        before = s.state(0)
        assert picture(s, 4, 60) != 0
        assert "picture" in last_error() and "-ctk f16" in last_error()
        assert picture(s, 1, 59) != 0  # a second token where one is
        assert "position 59" in last_error()
        assert s.state(0) == before
        assert agree(expected[60:], s.decode(tokens[60:61], 60))


def test_text_may_leave_positions_out(vision: Coded) -> None:
    """As it does behind a picture: positions go on after the picture's height."""
    tokens = vision.tokens
    with vision.session() as s:
        s.decode(tokens[:40])
        expected = s.decode(tokens[40:80], 60)
        s.clear()
        s.decode(tokens[:40], pieces=[7, 33])
        found = s.decode(tokens[40:80], 60, pieces=[1, 25, 14])
        assert agree(expected, found)
        assert s.rm(0, 95)
        assert agree(expected[35:], s.decode(tokens[75:80], 95))


def test_a_sequence_of_text(vision: Coded) -> None:
    """Remove a tail, copy, save and restore: as with positions of one number."""
    tokens = vision.tokens
    with vision.session(n_seq_max=2, unified=True, n_ctx=512) as s:
        expected = s.decode(tokens[:120])
        s.clear()
        s.decode(tokens[:100])
        s.decode([t ^ 1 for t in tokens[100:108]], 100)
        assert s.rm(0, 100)
        s.cp(0, 1)
        state = s.state(0)
        assert agree(expected[100:], s.decode(tokens[100:120], 100, 1))
        assert s.rm(1, -1)
        s.decode([t ^ 1 for t in tokens[100:130]], 100)
        assert s.set_state(state, 0) == len(state)
        assert agree(expected[100:], s.decode(tokens[100:120], 100))
