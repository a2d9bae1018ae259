"""What a state depends on, in named parts (docs/format.md): each part protects states and stored prompts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opening import opened, prompt

from subkv.base.errors import StateError
from subkv.engine.llama import Llama
from subkv.native import store

Models = Callable[..., Path]

CONVERT = ("--kv-bits", "8", "--n-recent", "32")
NOT_ALONE = {"yarn_ext_factor", "bases", "rope_scaling_type", "kv_bits"}  # they change others, too
CODED = {
    "model": {"seed": 7},
    "kv_overrides": {"kv_overrides": {"tokenizer.ggml.add_bos_token": True}},
    "rope_scaling_type": {"rope_scaling_type": 0},
    "rope_freq_base": {"rope_freq_base": 5000.0},
    "rope_freq_scale": {"rope_freq_scale": 0.5},
    "yarn_orig_ctx": {"yarn_orig_ctx": 64},
    "yarn_ext_factor": {"yarn_ext_factor": 0.5},
    "yarn_attn_factor": {"yarn_attn_factor": 1.5},
    "yarn_beta_fast": {"yarn_beta_fast": 16.0},
    "yarn_beta_slow": {"yarn_beta_slow": 2.0},
    "kv_bits": {"convert": ("--kv-bits", "6", "--n-recent", "32")},
    "fingerprint": {"convert": (*CONVERT, "--basis-k", "pca")},
    "bases": {"adapt": "kv,block=8,length=16,warm=16"},
    "n_sink": {"n_sink": 2},
    "n_recent": {"n_recent": 24},
    "n_rollback": {"n_rollback": 8},
}


def differing(one: Llama, other: Llama) -> list[str]:
    """The names of different parts, in their order."""
    expected, found = one.identity(), other.identity()
    return [name for name in {**expected, **found} if expected.get(name) != found.get(name)]


def check_refused(one: Llama, other: Llama, part: str) -> None:
    """Neither context reads the other one's states, and a store has no prompt of one for the other."""
    assert differing(one, other)[0] == part
    assert store.identity(one.ctx) != store.identity(other.ctx)
    for reader, writer in ((one, other), (other, one)):
        writer.eval(prompt(40))
        with pytest.raises(StateError, match=f"^state: {part}: expected "):
            reader.load_state(writer.save_state())


@pytest.mark.parametrize("part", CODED)
def test_a_part_that_differs(part: str, tiny_model: Models, coded_model: Models) -> None:
    options: dict[str, Any] = dict(CODED[part])
    bases = coded_model(*options.pop("convert", CONVERT))
    model = tiny_model("llama", **{"seed": options.pop("seed")} if part == "model" else {})
    common = {"n_recent": 32, "n_sink": 4}
    first = opened(tiny_model("llama"), bases=coded_model(*CONVERT), **common)
    with first as one, opened(model, bases=bases, **{**common, **options}) as other:
        check_refused(one, other, part)
        assert part in NOT_ALONE or differing(one, other) == [part]


@pytest.mark.parametrize(
    "architecture, part, options",
    [
        ("llama", "cells", {"kv_cache": "q8_0"}),
        ("gemma2", "sliding", {"swa_full": True}),
        ("llama", "attention_type", {"attention_type": 1}),
    ],
)
def test_rows_and_masks(architecture: str, part: str, options: dict[str, Any], tiny_model: Models) -> None:
    common = {"kv_cache": "f16", "swa_full": False, "n_ctx": 1024, "n_ubatch": 64, "flash_attn": True}
    path = tiny_model(architecture)
    with opened(path, **common) as one, opened(path, **{**common, **options}) as other:
        check_refused(one, other, part)


def test_types_of_sliding_layers_beside_coded_ones(tiny_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gemma2", head_size=64)
    with opened(model, kv_cache="subkv") as one:
        monkeypatch.setenv("SUBKV_SLIDING", "f16")
        with opened(model, kv_cache="subkv") as other:
            check_refused(one, other, "sliding")
            assert "q8_0" in one.identity()["sliding"] and "f16" in other.identity()["sliding"]


def test_a_coded_and_an_ordinary_cache(coded_model: Models) -> None:
    with opened(coded_model()) as coded, opened(coded_model(), kv_cache="f16") as ordinary:
        check_refused(coded, ordinary, "cells")


def test_equal_contexts(coded_model: Models) -> None:
    """Sizes of batches and of the context are no part: states and prompts serve both."""
    with opened(coded_model()) as one, opened(coded_model(), n_ctx=512, n_batch=64, n_threads=2) as other:
        assert differing(one, other) == []
        assert store.identity(one.ctx) == store.identity(other.ctx)
        one.eval(prompt(40))
        other.load_state(one.save_state())
        assert other.n_tokens == 40


def test_every_part_of_a_saved_state_counts(coded_model: Models) -> None:
    """Also those that one build cannot vary, and parts that an earlier release did not store."""
    with opened(coded_model()) as llm:
        llm.eval(prompt(40))
        state = llm.save_state()
        assert {*CODED, "versions", "long_rope", "context", "n_seq_max", "exact_rows", "lora"} <= set(state.identity)
        for part in state.identity:
            for change in ({part: "another"}, {part: None}):
                other = copy.copy(state)
                other.identity = {**state.identity, **change}
                if other.identity == state.identity:  # no LoRA weights
                    continue
                with pytest.raises(StateError, match=f"^state: {part}: expected "):
                    llm.load_state(other)
        llm.load_state(state)
        assert llm.n_tokens == 40
