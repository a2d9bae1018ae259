"""Metadata that single architectures need in addition to the common keys."""

from __future__ import annotations

from typing import Any

N_VOCAB = 96
HEAD = 32

# Keys without the architecture's prefix. The loader ignores unknown keys.
DEFAULTS: dict[str, Any] = {
    "vocab_size": N_VOCAB,
    "context_length": 512,
    "embedding_length": 128,
    "block_count": 2,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": HEAD,
    "attention.value_length": HEAD,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.sliding_window": 16,
    "attention.sliding_window_pattern": 2,
    "rope.dimension_count": HEAD,
    "rope.dimension_sections": [6, 6, 4, 0],
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "use_parallel_residual": True,
    "attention.clamp_kqv": 8.0,
    "attention.relative_buckets_count": 32,
    "full_attention_interval": 2,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 128,
    "ssm.state_size": 32,
    "ssm.time_step_rank": 4,
    "ssm.group_count": 2,
    "kda.head_dim": 32,
    "kda.gate_lower_bound": -5.0,
    "wkv.head_size": 32,
    "shortconv.l_cache": 3,
    "xielu.alpha_n": 1.0,
    "xielu.alpha_p": 1.0,
    "xielu.beta": 1.0,
    "xielu.eps": 1e-7,
}
EXPERTS: dict[str, Any] = {
    "expert_count": 4,
    "expert_used_count": 4,  # all: a router that chooses would turn roundings into jumps
    "expert_feed_forward_length": 48,
    "expert_shared_feed_forward_length": 48,
    "expert_shared_count": 1,
    "expert_gating_func": 2,
    "expert_weights_scale": 1.0,
    "leading_dense_block_count": 1,
    "interleave_moe_layer_step": 2,
    "moe_every_n_layers": 2,
    "expert_group_scale": 1.0,
    "experts_per_group": 1,
}
MHA: dict[str, Any] = {"attention.head_count_kv": 4}
NEXTN: dict[str, Any] = {"block_count": 3, "nextn_predict_layers": 1}  # its layer only predicts further tokens
SWA: dict[str, Any] = {"attention.sliding_window_pattern": [True, False]}
RECURRENT_FIRST: dict[str, Any] = {"attention.head_count_kv": [0, 2], "ssm.inner_size": 256}
MLA: dict[str, Any] = {
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 48,
    "attention.kv_lora_rank": 64,
    "attention.key_length": 64 + 16,
    "attention.value_length": 64,
    "attention.key_length_mla": HEAD + 16,
    "attention.value_length_mla": HEAD,
    "rope.dimension_count": 16,
    "rope.dimension_sections": [3, 3, 2, 0],
}
NO_VALUE_LENGTH: dict[str, Any] = {
    "attention.value_length": 24
}  # files of these have no vocabulary, or another architecture's
INDEXER: dict[str, Any] = {
    "attention.indexer.head_count": 16,  # of few all may be below zero, and ties for a place are broken by cell
    "attention.indexer.key_length": 64,
    "attention.indexer.top_k": 8,
    "attention.indexer.block_size": 4,
    "attention.indexer.local_blocks": 1,
    "attention.indexer.types": [True, True],
}
HYPER: dict[str, Any] = {
    "hyper_connection.count": 4,
    "hyper_connection.epsilon": 1e-6,
    "hyper_connection.magnitude": 1.0,
    "hyper_connection.sinkhorn_iterations": 2,
    "hyper_connection.low_rank": 8,
}

RWKV: dict[str, Any] = {
    "attention.head_count": 0,
    "attention.head_count_kv": 0,
    "time_mix_extra_dim": 16,
    "time_decay_extra_dim": 16,
    **{f"attention.{name}_lora_rank": 16 for name in ("decay", "iclr", "value_residual_mix", "gate")},
}

_BERT = "bert nomic-bert jina-bert-v2 jina-bert-v3"
_MOE = """
    qwen2moe qwen3moe qwen3next qwen3vlmoe qwen35moe phimoe cohere2moe dbrx arctic deepseek glm4moe
    bailingmoe bailingmoe2 afmoe laguna ernie4_5-moe hunyuan-moe hy_v3 gpt-oss smallthinker llada-moe grovemoe
    minimax-01 minimax-m2 rnd1 mellum granitemoe grok
"""
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_MOE.split(), EXPERTS),
    "exaone-moe": EXPERTS,
    "mimo2": EXPERTS | NEXTN | {"attention.sliding_window_pattern": [True, False, False], "attention.value_length": 16},
    "deci": {  # a layer without attention, one with linear attention, one without feed-forward
        "block_count": 4,
        "attention.head_count": [4, 0, 4, 4],
        "attention.head_count_kv": [2, 0, 0, 1],
        "feed_forward_length": [0, 96, 96, 96],
    },
    "openelm": {
        "attention.head_count": [2, 4],
        "attention.head_count_kv": [1, 2],
        "feed_forward_length": [96, 64],
    },
    "falcon": {"attention.head_count_kv": 1},
    "granite": {"attention.scale": 0.25, "residual_scale": 0.5, "embedding_scale": 2.0, "logit_scale": 2.0},
    "llama4": EXPERTS | {"block_count": 4},
    "olmoe": EXPERTS | MHA,
    "dots1": EXPERTS | MHA,
    "deepseek2-ocr": EXPERTS | MHA,
    "maple": EXPERTS | SWA | {"swiglu_clamp_exp": 7.0},
    "step35": EXPERTS | SWA | {"attention.head_count": [2, 4]},
    "spark2_5": EXPERTS | SWA,
    "granite_swa": SWA,
    "gemma3n": {"block_count": 22, "embedding_length": 64},  # layers from the 20th on read the K/V of earlier ones
    "gemma4": {
        "block_count": 4,
        "attention.sliding_window_pattern": [True, False, True, False],
        "attention.shared_kv_layers": 2,
        "embedding_length_per_layer_input": 16,
        "attention.key_length_swa": 16,
        "attention.value_length_swa": 16,
        "rope.dimension_count_swa": 16,
    },
    "minicpm3": {"attention.q_lora_rank": 48, "attention.kv_lora_rank": 64, "rope.dimension_count": 16} | MHA,
    "t5": MHA,
    "nomic-bert-moe": EXPERTS | MHA | {"tokenizer.ggml.token_type_count": 1},
    "jamba": EXPERTS | RECURRENT_FIRST,
    "plamo2": RECURRENT_FIRST | {"ssm.group_count": 0},
    "lfm2": RECURRENT_FIRST | {"attention.sliding_window": 0},  # else all its layers slide
    "lfm2moe": EXPERTS | RECURRENT_FIRST,
    "granitehybrid": RECURRENT_FIRST,
    "nemotron_h": {"block_count": 3, "attention.head_count_kv": [0, 2, 0], "feed_forward_length": [0, 0, 96]},
    "nemotron_h_moe": EXPERTS
    | {"block_count": 3, "attention.head_count_kv": [0, 2, 0], "feed_forward_length": [0, 0, 96]},
    "mamba": {"ssm.inner_size": 256},
    "mamba2": {"ssm.inner_size": 256},
    "deepseek2": EXPERTS | MLA,
    # such that no two cells are as good for the last place as roundings are large, here and below
    "deepseek32": EXPERTS | MLA | INDEXER | {"attention.indexer.top_k": 16},
    "glm-dsa": EXPERTS | MLA | INDEXER,
    "mistral4": EXPERTS | MLA,
    "bailingmoe3": EXPERTS | MLA | NO_VALUE_LENGTH | {"attention.head_count_kv": [0, 1]},
    "kimi-linear": EXPERTS | MLA | NO_VALUE_LENGTH | {"attention.head_count_kv": [0, 1]},
    "kimi-k3": EXPERTS
    | MLA
    | {
        "attention.head_count_kv": [0, 1],
        "attn_res.block_size": 2,
        "activation.situ_beta": 1.0,
        "activation.situ_linear_beta": 1.0,
    },
    "glm5-next": EXPERTS
    | MLA
    | INDEXER
    | HYPER
    | {
        "attention.head_count_kv": [0, 1],
        "attention.indexer.kpool": 2,
        "attention.indexer.top_k": 32,
        "rope.dimension_count": 0,
        "attention.key_length": 64,
    },
    "dots3note": EXPERTS
    | MLA
    | INDEXER
    | SWA
    | {
        "attention.kv_lora_rank_swa": 64,
        "attention.key_length_mla_swa": HEAD + 16,
        "attention.value_length_mla_swa": HEAD,
        "rope.freq_base_swa": 10000.0,
        "attention.indexer.types": [False, True],  # the sliding layer lacks it
        "attention.indexer.top_k": 36,
    },
    "hy_v4": EXPERTS | MLA | INDEXER | HYPER | {"swiglu_clamp_exp": 7.0},
    "deepseek4": EXPERTS
    | MLA
    | INDEXER
    | HYPER
    | {
        "expert_weights_norm": True,
        "expert_gating_func": 4,
        "swiglu_clamp_exp": 7.0,
        "attention.output_group_count": 2,
        "attention.output_lora_rank": 16,
        "attention.compress_rope_freq_base": 10000.0,
        "attention.compress_ratios": [0, 4],
        "attention.key_length": 64,
        "hash_layer_count": 1,
    },
    "minimax-m3": EXPERTS | INDEXER | {"attention.indexer.head_count": 2},  # one of each KV head
    "qwen4exp": EXPERTS | INDEXER | HYPER,
    "hrm_text": {"block_count": 4, "hrm.layers_per_stack": 1, "hrm.h_cycles": 2, "hrm.l_cycles": 1},
    "graniteswitch": {
        "adapters.count": 1,
        "adapters.lora_rank": 4,
        "adapters.token_ids_activate": [90],
        "adapters.token_ids_substitute": [91],
    },
    "chameleon": {"vocab_size": 9216},
    "qwen3tts": {"vocab_size": 4096},
    "rwkv6": RWKV,
    "rwkv7": RWKV,
    "arwkv7": RWKV | {"token_shift_count": 1},
    **{arch: {"tokenizer.ggml.token_type_count": 1} | MHA for arch in _BERT.split()},
}

FLASH_ONLY = ("minimax-m3",)  # without flash attention llama.cpp lets all tokens see all cells

NOT_BUILT = {
    "clip": "not a text model: llama.cpp uses this name for quantizing only",
    "gptj": "llama.cpp has the name, but no code for it",
    "plm": "llama.cpp stops at its first token: its cache does not accept the shape of the values",
    "eagle3": "a draft head: it needs another model's hidden states",
    "dflash": "a draft head: it needs another model's hidden states",
    "gemma4-assistant": "a draft head: it needs another model's cache",
    "rwkv6qwen2": "recurrent; some of its optional tensors exclude others, and the test model has all",
    "wavtokenizer-dec": "not a text model: it converts codes to sound",
}
