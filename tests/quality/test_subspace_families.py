"""SubspaceCache on model families other than plain decoders: it codes supported layers, or names the obstacle."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from subkv import SubspaceCache  # noqa: E402
from subkv.base.errors import CacheError  # noqa: E402

DIMS: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TURNS = ["sliding_attention", "full_attention"] * 2
GEMMA = {
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 16,
    "layer_types": TURNS,
    "sliding_window": 16,
}
SECTIONS = {"rope_type": "default", "mrope_section": [6, 5, 5]}
TAKEN: dict[str, tuple[int, dict[str, Any]]] = {  # coded layers; the rest of a config
    "Lfm2ForCausalLM": (2, {"full_attn_idxs": [1, 3]}),
    "GraniteMoeHybridForCausalLM": (
        2,
        {
            "layer_types": ["mamba", "attention"] * 2,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
        },
    ),
    "Qwen3NextForCausalLM": (
        2,
        {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_experts": 0,
            "mlp_only_layers": [0, 1, 2, 3],
            **{f"linear_num_{side}_heads": 2 for side in ("key", "value")},
            **{f"linear_{side}_head_dim": 16 for side in ("key", "value")},
        },
    ),
    "Qwen2VLForConditionalGeneration": (
        4,
        {
            "text_config": DIMS | {"rope_parameters": SECTIONS},
            "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
        },
    ),
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepseekV2ForCausalLM": (
        "latent attention",
        {"num_key_value_heads": 2, "kv_lora_rank": 32, "q_lora_rank": None, "first_k_dense_replace": 4}
        | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32},
    ),
    "Gemma3nForCausalLM": ("2 that share those of other layers", GEMMA | {"num_kv_shared_layers": 2, "laurel_rank": 8}),
    "Gemma4ForCausalLM": ("2 that share those of other layers", GEMMA | {"num_kv_shared_layers": 2}),
}


def make(name: str, config: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**(config if "text_config" in config else DIMS | config))).eval()


@pytest.mark.parametrize("name", TAKEN)
def test_attention_layers_are_coded(name: str) -> None:
    """Recurrent layers keep their own cache; compares 8 bits in pieces with no cache."""
    n_coded, config = TAKEN[name]
    model = make(name, config)
    cache = SubspaceCache.from_model(model, kv_bits=15.0)
    ids = torch.randint(5, 90, (1, 220), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        actual = torch.cat([model(part, past_key_values=cache).logits for part in ids.split([200, 1, 19], 1)], 1)
    assert cache.kv_stats().n_layer_coded == n_coded
    assert float((actual - expected).abs().max() / expected.std()) < 0.05


@pytest.mark.parametrize("name", REFUSED)
def test_layers_without_rows_of_their_own_are_refused(name: str) -> None:
    reason, config = REFUSED[name]
    with pytest.raises(CacheError, match=reason):
        SubspaceCache.from_model(make(name, config))
