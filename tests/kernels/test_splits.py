"""Over how many blocks of a GPU attention splits the cells of a sequence (kernels/include/subkv/splits.h)."""

from __future__ import annotations

from itertools import product

import cuda_ops as c
import layers
import ops as o
import pytest
from each import each

START, WAIT, WAVES = 1, 6, 8
DEPTHS = (2048, 8192, 32768, 131072)
HEADS = 8  # of keys and values


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, c.Library]:
    options: dict[str, tuple[str, ...]] = {"blocks": (), "pairs": (c.WARP_PAIRS,)}
    return {name: c.build_emulated(tmp_path_factory.mktemp(name), *of) for name, of in options.items()}


def estimated(of: c.BlockSteps, n_kv: int, n_blocks: int, cells: int) -> int:
    """The time of attention, wave by wave."""
    steps = -(-cells // of.cells)
    left, time = -(-n_kv // cells) * n_blocks, 0
    while left > 0:
        wave = min(left, of.n_processors * of.resident)
        time += (START + -(-steps // of.steps)) * (WAIT + -(-wave // of.n_processors))
        left -= wave
    return time


def card(n_processors: int, steps: int = 1) -> c.BlockSteps:
    return c.BlockSteps(n_processors, 4, 2 * o.TILE, steps, WAVES)


@each(
    "n_processors,n_stream,steps,expected",
    [
        (132, 1, 1, (16, 64, 64, 64)),
        (128, 1, 1, (16, 64, 64, 64)),
        (28, 1, 1, (8, 13, 14, 14)),
        (132, 16, 1, (4, 4, 4, 4)),
        (128, 16, 1, (4, 4, 4, 4)),
        (28, 16, 1, (4, 5, 7, 7)),
        (132, 1, 4, (16, 16, 64, 64)),
        (128, 1, 4, (16, 16, 64, 64)),
        (28, 1, 4, (4, 8, 14, 14)),
        (132, 16, 4, (4, 4, 4, 4)),
        (128, 16, 4, (4, 4, 4, 4)),
        (28, 16, 4, (2, 4, 5, 7)),
    ],
)
def test_splits_of_cards(
    libraries: dict[str, c.Library], n_processors: int, n_stream: int, steps: int, expected: tuple[int, ...]
) -> None:
    """The table of research/notes/kernels.md: H100, RTX 4090 and RTX 3060; steps 4: a pair of tiles per warp."""
    of = card(n_processors, steps)
    cells = [libraries["blocks"].cells_of_split(of, n, HEADS * n_stream, n) for n in DEPTHS]
    assert tuple(-(-n // each) for n, each in zip(DEPTHS, cells, strict=True)) == expected


def test_the_estimate_is_least(libraries: dict[str, c.Library]) -> None:
    """No other number of splits is estimated to be 6% faster, and the former rule's never faster."""
    depths = (1, 63, 129, 500, 2048, 5000, 8192, 33000)
    for n_processors, n_blocks, steps, n_kv in product((16, 28, 58, 132), (1, 5, 8, 40, 128, 300), (1, 4), depths):
        of = card(n_processors, steps)
        cells = libraries["blocks"].cells_of_split(of, n_kv, n_blocks, n_kv)
        assert cells % of.cells == 0 and cells < n_kv + of.cells
        time = estimated(of, n_kv, n_blocks, cells)
        assert time <= 1.06 * min(
            estimated(of, n_kv, n_blocks, at * of.cells) for at in range(1, -(-n_kv // of.cells) + 1)
        )
        n = max(1, min(4 * n_processors // n_blocks, n_kv // (2 * o.TILE)))
        assert time <= estimated(of, n_kv, n_blocks, -(-n_kv // n // o.TILE) * o.TILE)


def test_results_fit_their_memory(libraries: dict[str, c.Library]) -> None:
    for most, expected in ((-1, 1), (0, 1), (1, 1), (3, 3), (20, 20), (500, 64)):
        cells = libraries["blocks"].cells_of_split(card(132), 32768, HEADS, most)
        assert -(-32768 // cells) == expected


def test_steps_of_layers(libraries: dict[str, c.Library]) -> None:
    """Large tiles leave room for fewer blocks; the tile kernel's blocks stay in one wave."""

    def steps(kernel: str, name: str, n_group: int, latent: bool = False) -> tuple[int, ...]:
        library = libraries[kernel]
        bands = (layers.LAYERS | layers.WIDE_HEADS)[name]
        sides = [layers.Side.make(b, max(map(layers.head_size, bands)), i) for i, b in enumerate(bands)]
        heads = c.Heads(library, library.memory(), sides[0], sides[1], n_group)
        heads.layer.latent = latent
        of = library.block_steps(heads.layer)
        return of.n_processors, of.resident, of.cells, of.steps, of.waves

    assert steps("blocks", "planned", 3) == (30, 4, 128, 1, WAVES)
    assert steps("pairs", "planned", 3) == (30, 4, 128, 4, WAVES)
    assert steps("pairs", "planned", 5) == steps("blocks", "planned", 5) == (30, 4, 128, 1, WAVES)
    assert steps("blocks", "planned", 3, latent=True) == (30, 4, 128, 1, 1)
    assert steps("blocks", "large", 4) == (30, 3, 128, 1, WAVES)
    assert steps("blocks", "large", 8) == (30, 2, 128, 1, WAVES)
    assert steps("blocks", "widest", 8) == (30, 2, 64, 1, WAVES)
