"""SubspaceCache as a cache of transformers: drafts, edits of batches, and generation, beside DynamicCache.

With codes of 16 bits it computes almost the same as DynamicCache, so that random programs can compare the two.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from each import each

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import test_subspace  # noqa: E402
from test_subspace import IDS, N_RECENT, load, logits, rms  # noqa: E402

from subkv import SubspaceCache  # noqa: E402
from subkv.base.errors import CacheError  # noqa: E402
from subkv.torch.cache import N_RECORDED  # noqa: E402

build, llama = test_subspace.build, test_subspace.llama
TWICE = torch.cat(
    [IDS[:, :40], IDS[:, :40]], 1
)  # the second half is found in the first, so that lookup proposes drafts
GREEDY = {"do_sample": False, "max_new_tokens": 24}


@pytest.fixture(scope="module")
def fine(tiny_model: Callable[..., Path]) -> Callable[[str], tuple[Any, Callable[[], Any], Callable[[], Any]]]:
    """fine(arch): a model, and functions that create an empty SubspaceCache of 16 bits and an empty DynamicCache."""
    pytest.importorskip("accelerate")
    made: dict[str, tuple[Any, Any]] = {}

    def of(arch: str) -> tuple[Any, Callable[[], Any], Callable[[], Any]]:
        if arch not in made:
            model = load(tiny_model(arch), arch)
            made[arch] = model, SubspaceCache.from_model(model, kv_bits=16.0, n_recent=N_RECENT).bases
        model, bases = made[arch]
        return model, lambda: SubspaceCache(bases), lambda: transformers.DynamicCache(config=model.config)

    return of


#
# removed tails
#


def test_removed_drafts_leave_no_trace(llama: tuple[Any, SubspaceCache]) -> None:
    """After activate_past_recording, as in assisted generation; the number of recorded rows is bounded."""
    model, cache = llama
    whole = logits(model, SubspaceCache(cache.bases))
    cache.activate_past_recording()
    done = 70
    logits(model, cache, IDS[:, :done])
    cache.crop(0)
    for n_drafts, n_kept in ((33, 1), (90, 1), (24, 9), (1, 0)):
        drafts = IDS[:, :n_drafts].flip(1)
        drafts[:, :n_kept] = IDS[:, done : done + n_kept]
        actual = logits(model, cache, drafts)
        torch.testing.assert_close(actual[:, :n_kept], whole[:, done : done + n_kept], atol=1e-4, rtol=0.0)
        cache.crop(n_kept - n_drafts)
        done += n_kept
    torch.testing.assert_close(logits(model, cache, IDS[:, done:]), whole[:, done:], atol=1e-4, rtol=0.0)
    for _ in range(8):
        logits(model, cache, IDS)
    assert cache.layers[0]._tensors["recent_k"].shape[2] == N_RECENT + N_RECORDED
    cache.crop(0)
    assert cache.layers[0]._tensors["recent_k"].shape[2] == N_RECENT + cache.bases.window.n_rollback


def test_a_long_tail_can_be_removed(llama: tuple[Any, SubspaceCache]) -> None:
    """Without recording, tokens that enter the window again are read as codes; how they were removed has no effect."""
    model, cache = llama
    exact, whole = logits(model, None), logits(model, cache)
    cache.crop(-100)
    assert cache.get_seq_length() == 60
    actual = logits(model, cache, IDS[:, 60:], [1, 30, 69])
    assert 1e-3 < rms(actual - whole[:, 60:]) < rms(exact[:, 60:] - whole[:, 60:])
    assert rms((actual - whole[:, 60:])[:, N_RECENT:]) < 0.5 * rms((actual - whole[:, 60:])[:, :N_RECENT])
    other = SubspaceCache(cache.bases)
    logits(model, other)
    other.crop(-40)
    other.crop(-60)
    torch.testing.assert_close(logits(model, other, IDS[:, 60:]), actual, atol=1e-4, rtol=0.0)
    other.crop(-160)
    torch.testing.assert_close(logits(model, other), whole, atol=1e-4, rtol=0.0)


def test_impossible_removals_are_refused(llama: tuple[Any, SubspaceCache]) -> None:
    model, cache = llama
    logits(model, cache, IDS[:, :20])
    for n in (1, -21):
        with pytest.raises(CacheError, match=f"crop: expected to remove 0 to 20 tokens, .* negative number, found {n}"):
            cache.crop(n)
    assert cache.get_seq_length() == 20


#
# edits of batches
#


def edits(rng: random.Random, n_rows: int) -> tuple[str, Any, list[int]]:
    """A random edit: method, argument, and the old rows of the new ones."""
    kind = rng.choice(["reorder_cache", "batch_select_indices", "batch_repeat_interleave"])
    if kind == "batch_repeat_interleave":
        return kind, 2, [row for row in range(n_rows) for _ in range(2)]
    n = n_rows if kind == "reorder_cache" else rng.randint(1, 4)
    rows = [rng.randrange(n_rows) for _ in range(n)]
    return kind, torch.tensor(rows), rows


@each("seed", range(8))
@each("arch", ["llama", "gemma2"])  # gemma2: also layers with a sliding window, which stay ordinary
def test_random_programs(arch: str, seed: int, fine: Callable[[str], Any]) -> None:
    """Left-padded batches that grow, are reordered and shortened."""
    model, coded, ordinary = fine(arch)
    rng = random.Random(seed)
    caches = coded(), ordinary()
    if arch == "gemma2" or seed % 2:  # sliding windows lose earlier tokens otherwise
        for cache in caches:
            cache.activate_past_recording()
    pads = (rng.randrange(12), 0)
    ids = torch.zeros(2, 0, dtype=torch.long)
    mask = torch.tensor([[0] * pad + [1] * (400 - pad) for pad in pads])
    for _ in range(12):
        n = rng.choice([1, 2, 9, 40])
        new = torch.tensor([[rng.randrange(5, 250) for _ in range(n)] for _ in ids])
        if ids.shape[1] == 0:
            new = torch.cat([new, new + 1], 1)
        ids = torch.cat([ids, new], 1)
        n = new.shape[1]
        actual, expected = (logits(model, cache, new, None, mask[:, : ids.shape[1]]) for cache in caches)
        seen = mask[:, ids.shape[1] - n : ids.shape[1]] > 0
        assert not seen.any() or rms((actual - expected)[seen]) < 0.02 * rms(expected[seen]), (seed, ids.shape)
        kept = rng.randint(max(0, ids.shape[1] - (n if arch == "gemma2" else 60)), ids.shape[1])
        if rng.random() < 0.5:
            for cache in caches:
                cache.crop(kept - ids.shape[1])
            ids = ids[:, :kept]
        else:
            kind, argument, rows = edits(rng, len(ids))
            for cache in caches:
                cache.crop(0)
                getattr(cache, kind)(argument)
            ids, mask = ids[rows], mask[rows]
        if len(ids) > 4:
            for cache in caches:
                cache.batch_select_indices([0, 3])
            ids, mask = ids[[0, 3]], mask[[0, 3]]
        for layer in range(len(model.model.layers)):
            sizes = [(cache.get_seq_length(layer), cache.get_mask_sizes(3, layer)) for cache in caches]
            assert sizes[0] == sizes[1]


def test_rows_are_selected_by_any_index(llama: tuple[Any, SubspaceCache]) -> None:
    model, cache = llama
    ids = torch.cat([IDS[:, :90], IDS[:, :90].flip(1)])
    whole = logits(model, SubspaceCache(cache.bases), torch.cat([ids, ids], 1))[:, 90:]
    for index in ([1], torch.tensor([False, True]), slice(1, 2)):
        other = SubspaceCache(cache.bases)
        logits(model, other, ids)
        other.batch_select_indices(index)
        torch.testing.assert_close(logits(model, other, ids[1:]), whole[1:], atol=1e-4, rtol=0.0)


#
# generation
#


@each("arch", ["llama", "gemma2"])
@each(
    "how",
    [
        {"prompt_lookup_num_tokens": 32},
        {"assistant_model": 24},  # drafts of another model
        {"assistant_early_exit": 1},
        {"num_beams": 3, "num_return_sequences": 2},
        {"prefill_chunk_size": 13},
    ],
)
def test_generation_is_that_of_an_ordinary_cache(
    arch: str, how: dict[str, Any], fine: Callable[[str], Any], tiny_model: Callable[..., Path]
) -> None:
    """A draft is a prefix of the answer only by chance, so that most drafts are removed."""
    model, coded, ordinary = fine(arch)
    if "assistant_model" in how:
        other = load(tiny_model(arch, seed=1), arch)
        other.generation_config.num_assistant_tokens = how["assistant_model"]
        other.generation_config.num_assistant_tokens_schedule = "constant"
        other.generation_config.assistant_confidence_threshold = 0.0
        how = {"assistant_model": other}
    actual, expected = (model.generate(TWICE, past_key_values=new(), **GREEDY, **how) for new in (coded, ordinary))
    assert actual.tolist() == expected.tolist()


def test_padded_beams(fine: Callable[[str], Any]) -> None:
    model, coded, ordinary = fine("llama")
    pads = (13, 0)
    ids = torch.cat([IDS[:, :40], IDS[:, 40:80]])
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    how = {**GREEDY, "attention_mask": mask, "num_beams": 3, "num_return_sequences": 3}
    actual, expected = (model.generate(ids, past_key_values=new(), **how) for new in (coded, ordinary))
    assert actual.tolist() == expected.tolist()


def test_a_prompt_is_continued_twice(fine: Callable[[str], Any]) -> None:
    """As in transformers' documentation: a copy of the prompt's cache for each continuation."""
    model, coded, _ = fine("llama")
    prompt = coded()
    logits(model, prompt, IDS[:, :60])
    for end in (IDS[:, 60:75], IDS[:, 90:95]):
        ids = torch.cat([IDS[:, :60], end], 1)
        actual = model.generate(ids, past_key_values=copy.deepcopy(prompt), **GREEDY)
        assert actual.tolist() == model.generate(ids, past_key_values=coded(), **GREEDY).tolist()
    assert prompt.get_seq_length() == 60


#
# callers of other caches
#


def test_early_initialization(llama: tuple[Any, SubspaceCache]) -> None:
    """Callers of static caches allocate before the first token."""
    model, cache = llama
    config = model.config
    assert not cache.is_initialized
    cache.early_initialization(1, config.num_key_value_heads, config.head_dim, torch.float32, torch.device("cpu"))
    assert cache.is_initialized and cache.get_seq_length() == 0 and not cache.is_compileable
    cache.crop(0)
    expected = logits(model, SubspaceCache(cache.bases))
    torch.testing.assert_close(logits(model, cache), expected, atol=1e-4, rtol=0.0)


@each("arch", ["llama", "gemma2"])
def test_static_caches_of_the_model_are_unchanged(
    arch: str, fine: Callable[[str], Any], tiny_model: Callable[..., Path]
) -> None:
    how = {**GREEDY, "cache_implementation": "static"}
    expected = load(tiny_model(arch), arch).generate(IDS[:, :40], **how)
    assert fine(arch)[0].generate(IDS[:, :40], **how).tolist() == expected.tolist()


def test_offloading_is_refused(llama: tuple[Any, SubspaceCache]) -> None:
    model, cache = llama
    logits(model, cache, IDS[:, :20])
    with pytest.raises(
        CacheError, match="^offload: expected a cache that stays on the model's device, found offloading"
    ):
        cache.offload(0)
    torch.testing.assert_close(
        logits(model, cache, IDS[:, 20:]), logits(model, SubspaceCache(cache.bases))[:, 20:], atol=1e-4, rtol=0.0
    )
