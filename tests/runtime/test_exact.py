"""Promises 2 and 3: exact codes give the exact cache; no split, number of threads or kernel changes the result."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine
import numpy as np
import pytest
from engine import C, agree, differences, distance, session

PIECES = [100, *[1] * 40, 60]


@pytest.fixture(scope="module")
def floor(model: engine.Model, tokens: list[int]) -> float:
    """Differences of stock from itself by rounding: flash attention on or off, one call or many."""
    with session(model, flash_attn=0) as s:
        one = s.decode(tokens)
    with session(model, flash_attn=0) as s:
        split = s.decode(tokens, pieces=PIECES)
    with session(model, flash_attn=1) as s:
        flash = s.decode(tokens)
    return max(distance(one, flash), distance(one, split))


@pytest.mark.parametrize("flash_attn", [0, 1])
@pytest.mark.parametrize("window", [(4, 8, 4), (0, 0, 0), (0, 8, 0), (4, 0, 0), (4, 128, 32)])
def test_full_rank_and_exact_codes_equal_the_f16_cache(
    model: engine.Model,
    tokens: list[int],
    make_layout: Callable[..., Any],
    window: tuple[int, int, int],
    flash_attn: int,
    floor: float,
) -> None:
    with session(model, flash_attn=flash_attn) as s:
        expected = s.decode(tokens)
    with session(model, make_layout(), window=window, flash_attn=flash_attn) as s:
        found = s.decode(tokens, pieces=[120, *[1] * 30, 50])
    assert distance(expected, found) < 2 * floor


def test_the_far_past_matters_in_this_model(model: engine.Model, tokens: list[int], floor: float) -> None:
    """The comparisons above would mean nothing in a model that ignores old tokens."""
    other = [tokens[0] ^ 1, *tokens[1:]]
    with session(model) as s:
        first = s.decode(tokens)[-1:]
        s.clear()
        assert distance(first, s.decode(other)[-1:]) > 10 * floor


Runs = list[tuple[int, list[int] | None, int]]  # n_ubatch, pieces, threads
Decode = Callable[[bool, int, tuple[int, ...] | None], engine.Logits]


@pytest.fixture(scope="module")
def uncoded(model: engine.Model, tokens: list[int], make_layout: Callable[..., Any]) -> Decode:
    """Logits of an f16 cache or of exact codes, by n_ubatch and pieces."""

    @functools.cache
    def decode(exact_codes: bool, n_ubatch: int, pieces: tuple[int, ...] | None) -> engine.Logits:
        with session(model, make_layout() if exact_codes else None, n_ubatch=n_ubatch) as s:
            return s.decode(tokens, pieces=pieces)

    return decode


def check_runs(
    model: engine.Model, tokens: list[int], layout: Any, window: tuple[int, int, int], runs: Runs, uncoded: Decode
) -> None:
    """Every run gives the logits of the whole prompt at once; on a GPU as nearly as without codes.

    A GPU has another kernel for up to 8 tokens than for a prompt: then those of one token at a time.
    """

    def whole(n_ubatch: int) -> engine.Logits:
        with session(model, layout, window=window, n_ubatch=n_ubatch) as s:
            return s.decode(tokens)

    expected = whole(256)
    for n_ubatch, pieces, threads in runs:
        with session(model, layout, window=window, n_ubatch=n_ubatch, threads=threads) as s:
            found = s.decode(tokens, pieces=pieces)
        flips = None
        if (
            C.llama_supports_gpu_offload()
        ):  # whose products, like the GPU kernels', may round differently for one token and for many
            several = tuple(pieces) if pieces else None
            moved = [differences(uncoded(e, 256, None), uncoded(e, n_ubatch, several)) for e in (False, True)]
            flips = engine.flips(np.maximum(*moved), differences(uncoded(False, 256, None), expected))
        few = flips is not None and n_ubatch <= 8
        assert agree(expected, found, flips) or (few and agree(whole(1), found, flips)), (
            *(n_ubatch, pieces, threads, flips),
            distance(expected, found),
        )


@pytest.mark.parametrize("bands", [[(32, 16)], [(32, 8)], [(8, 8), (8, 6), (16, 4)], [(8, 5), (8, 3), (8, 2)]])
@pytest.mark.parametrize(
    ("window", "recent_bits"), [((4, 8, 4), 16), ((4, 8, 4), 10), ((0, 0, 0), 16), ((3, 20, 0), 16), ((3, 20, 0), 10)]
)
def test_any_split_of_the_prompt_gives_the_same_result(
    model: engine.Model,
    tokens: list[int],
    make_layout: Callable[..., Any],
    bands: engine.Bands,
    window: tuple[int, int, int],
    recent_bits: int,
    uncoded: Decode,
) -> None:
    runs = [
        (16, None, 2),
        (7, None, 1),
        (64, [1, 1, 63, 64, 65, 6], 2),
        (256, [100, *[1] * 40, 60], 3),
    ]
    layout = make_layout(bands, bands, recent_bits=recent_bits, mean=0.5 if recent_bits == 10 else 0.0)
    check_runs(model, tokens, layout, window, runs, uncoded)


def test_a_narrow_layout_differs_and_the_window_protects_recent_tokens(
    model: engine.Model, tokens: list[int], make_layout: Callable[..., Any], floor: float
) -> None:
    """Codes of few bits must show (nothing is attended exactly in secret), and not inside the window."""
    layout = make_layout([(16, 2)], [(16, 2)])
    with session(model) as s:
        exact = s.decode(tokens)
    with session(model, layout, window=(0, 0, 0)) as s:
        coded = s.decode(tokens)
    with session(model, layout, window=(4, 64, 0)) as s:
        windowed = s.decode(tokens)
    assert distance(exact[1:64], coded[1:64]) > 5 * floor
    assert distance(exact[:64], windowed[:64]) < 2 * floor
    assert distance(exact[100:], windowed[100:]) > 2 * floor


def test_every_kernel_gives_the_same_result(model: engine.Model, tokens: list[int], tmp_path: Path) -> None:
    """SUBKV_KERNEL is read once per process, so each version runs in its own."""
    names = [engine.SUBKV.subkv_ops_name(i).decode() for i in range(engine.SUBKV.subkv_ops_count())]
    assert names[0] == "ref"
    script = tmp_path / "run.py"
    script.write_text(
        "import sys, numpy as np, engine\n"
        "from pathlib import Path\n"
        "model = engine.Model(Path(sys.argv[1]))\n"
        "layout = engine.signed_permutations([(il, engine.C.llama_model_n_head_kv(model.handle), 32, 32)"
        " for il in range(engine.C.llama_model_n_layer(model.handle))], [(8, 8), (8, 6), (16, 4)], [(8, 6), (24, 4)],"
        " arch='llama', block_count=engine.C.llama_model_n_layer(model.handle), path=Path(sys.argv[2] + '.gguf'))\n"
        "with engine.session(model, layout) as s:\n"
        "    np.save(sys.argv[2], s.decode([int(t) for t in sys.argv[3].split(',')], pieces=[90, 1, 1, 8]))\n"
    )
    results = []
    for name in names:
        out = tmp_path / name
        here = Path(__file__).resolve().parent
        env = {
            **os.environ,
            "SUBKV_KERNEL": name,
            "PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")]),
        }
        env.pop("LLAMA_CPP_LIB_PATH", None)
        subprocess.run(
            [sys.executable, str(script), str(model.path), str(out), ",".join(map(str, tokens[:100]))],
            check=True,
            env=env,
        )
        results.append(np.load(f"{out}.npy"))
    for name, result in zip(names[1:], results[1:], strict=True):
        assert agree(results[0], result), name


@pytest.mark.parametrize("bands", [[(32, 8)], [(8, 8), (8, 6), (16, 4)], [(8, 5), (8, 3)]])
@pytest.mark.parametrize("window", [(4, 8, 4), (4, 64, 0)])
def test_any_split_gives_the_same_result_for_centred_keys(
    model: engine.Model,
    tokens: list[int],
    make_layout: Callable[..., Any],
    bands: engine.Bands,
    window: tuple[int, int, int],
    uncoded: Decode,
) -> None:
    runs = [(16, None, 2), (7, None, 1), (256, PIECES, 3)]
    check_runs(model, tokens, make_layout(bands, bands, mean=0.7), window, runs, uncoded)


def test_bytes_of_the_means_are_counted(model: engine.Model, make_layout: Callable[..., Any]) -> None:
    n_layer = engine.C.llama_model_n_layer(model.handle)
    n_head_kv = engine.C.llama_model_n_head_kv(model.handle)
    found = []
    for mean in (0.0, 0.7):
        with session(model, make_layout([(24, 4)], [(32, 4)], mean=mean)) as s:
            found.append(s.stats().bytes_bases)
    assert found[1] - found[0] == n_layer * n_head_kv * (2 * 32 + 4 * 24)
