"""M-RoPE with text, which has one position per token. Images: test_pictures.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine import agree
from test_hybrids import Coded


@pytest.fixture(scope="module")
def vision(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coded]:
    coded = Coded(tiny_model("qwen2vl"), tmp_path_factory.mktemp("vision"))
    yield coded
    coded.model.free()


def test_text_may_skip_positions(vision: Coded) -> None:
    """As after an image: the next position is the image's height further."""
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
