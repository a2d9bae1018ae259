"""Tiny seeded GGUF models of many architectures, for tests: no downloads, a few hundred kB, built in milliseconds.

    path = tiny.build(tmp_path / "model.gguf", "gemma2", seed=1, n_layer=4)

Weights are random, scaled so that attention is far from uniform and the last logits depend on far tokens. A tensor's
values depend on the seed and on its own name and shape only. The vocabulary is byte-level BPE (any text can be
tokenized) with ChatML's special tokens and template. Names: llama.cpp's src/llama-arch.cpp and src/models/*.cpp.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from tiny_hybrids import lfm2, mamba, qwen35
from tiny_shared import gemma3n, gemma4

Array = npt.NDArray[np.float32]

# Merges of byte-level BPE (Ġ is a space), by descending priority.
MERGES = "Ġ t|h e|Ġ a|i n|r e|Ġt he|o n|e r|Ġ s|a t|o u|i s|n d|e n|o r|e s|Ġa nd|in g|a l|i t|a n|Ġo f|Ġ o|e d"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE: 256 bytes, the merged pairs, the special tokens."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    by_byte = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    tokens = [by_byte[b] for b in range(256)]
    merges = []
    for merge in MERGES.split("|"):
        joined = merge.replace(" ", "")
        if all(part in tokens for part in merge.split(" ")) and joined not in tokens:
            merges.append(merge)
            tokens.append(joined)
    return tokens + SPECIAL, merges


N_VOCAB = len(vocabulary()[0])


@dataclass
class Model:
    """Filled by an architecture's function: metadata keys and tensors, from its dimensions `dims`."""

    arch: str
    seed: int
    dims: dict[str, Any]
    keys: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    blocks: dict[Any, npt.NDArray[np.uint8]] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["dims"][name]
        except KeyError:
            raise AttributeError(name) from None

    def normal(self, name: str, shape: tuple[int, ...], std: float = 1.0, mean: float = 0.0) -> None:
        """Adds a tensor (numpy order) of normal values."""
        rng = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        self.tensors[name] = (mean + std * rng.standard_normal(shape)).astype(np.float32)

    def matrix(self, name: str, n_in: int, n_out: int, gain: float = 1.0, stack: tuple[int, ...] = ()) -> None:
        """Adds a weight that maps unit-variance input to outputs of standard deviation `gain`."""
        shape, std = (*stack, n_out, n_in), gain / np.sqrt(n_in)
        if self.dtype == "q4_0":
            self.tensors[f"{name}.weight"] = self.quantized(shape, std)
        else:
            self.normal(f"{name}.weight", shape, std)

    def quantized(self, shape: tuple[int, ...], std: float) -> npt.NDArray[np.uint8]:
        """Random blocks of Q4_0, U8 [..., n_in / 32 * 18]; one array for all of a shape, so that large models fit."""
        if (shape, std) not in self.blocks:
            rng = np.random.default_rng([self.seed, *shape])
            blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // 32, 18), np.uint8)
            step = std / np.sqrt((16**2 - 1) / 12)  # codes are uniform over 16
            blocks[..., :2] = np.frombuffer(np.float16(step).tobytes(), np.uint8)
            self.blocks[shape, std] = blocks.reshape(*shape[:-1], -1)
        return self.blocks[shape, std]

    def norm(self, name: str, n: int, bias: bool = False) -> None:
        """Adds a normalization weight near 1 and, on request, a small bias."""
        self.normal(f"{name}.weight", (n,), 0.1, 1.0)
        if bias:
            self.bias(name, n)

    def bias(self, name: str, *shape: int, std: float = 0.1) -> None:
        """Adds a small bias."""
        self.normal(f"{name}.bias", shape, std)

    def embedding(self, std: float = 1.0, output: bool = True) -> None:
        """Adds token embeddings, the final norm and, unless tied, the output matrix."""
        self.normal("token_embd.weight", (N_VOCAB, self.n_embd), std)
        self.norm("output_norm", self.n_embd)
        if output:
            self.matrix("output", self.n_embd, N_VOCAB, 2.0)

    def attention(self, blk: str, qk_gain: float = 1.5, bias: bool = False, gain_out: float = 1.0) -> None:
        """Adds Q, K, V and the output projection; qk_gain² is the standard deviation of q·k/√d."""
        d, n_kv = self.head_size, self.n_head_kv
        for name, n, gain in (("q", self.n_head * d, qk_gain), ("k", n_kv * d, qk_gain), ("v", n_kv * d, 1.0)):
            self.matrix(f"{blk}.attn_{name}", self.n_embd, n, gain)
            if bias:
                self.bias(f"{blk}.attn_{name}", n, std=0.5)
        self.matrix(f"{blk}.{self.dims.get('attn_out', 'attn_output')}", self.n_head * d, self.n_embd, gain_out)

    def ffn(self, blk: str, gate: bool = True, bias: bool = False) -> None:
        """Adds a dense feed-forward block."""
        for name in ("ffn_gate", "ffn_up") if gate else ("ffn_up",):
            self.matrix(f"{blk}.{name}", self.n_embd, self.n_ff)
            if bias:
                self.bias(f"{blk}.{name}", self.n_ff)
        self.matrix(f"{blk}.ffn_down", self.n_ff, self.n_embd)
        if bias:
            self.bias(f"{blk}.ffn_down", self.n_embd)

    def experts(self, blk: str, bias: bool = False) -> None:
        """Adds a router and its experts."""
        n, n_ff = self.n_expert, self.n_ff
        self.matrix(f"{blk}.ffn_gate_inp", self.n_embd, n)
        self.matrix(f"{blk}.ffn_gate_exps", self.n_embd, n_ff, stack=(n,))
        self.matrix(f"{blk}.ffn_up_exps", self.n_embd, n_ff, stack=(n,))
        self.matrix(f"{blk}.ffn_down_exps", n_ff, self.n_embd, stack=(n,))
        if bias:
            self.bias(f"{blk}.ffn_gate_inp", n)
            for name, size in (("gate", n_ff), ("up", n_ff), ("down", self.n_embd)):
                self.bias(f"{blk}.ffn_{name}_exps", n, size)

    def layers(self, prefix: str = "blk") -> list[str]:
        """Name prefixes of all layers."""
        return [f"{prefix}.{il}" for il in range(self.n_layer)]


def llama(m: Model) -> None:
    """Rotary pairs of neighbours, grouped queries."""
    m.embedding()
    for blk in m.layers():
        m.norm(f"{blk}.attn_norm", m.n_embd)
        m.attention(blk)
        m.norm(f"{blk}.ffn_norm", m.n_embd)
        m.ffn(blk)


def qwen2(m: Model) -> None:
    """Rotary pairs half a head apart; biases on Q, K and V give the keys a mean."""
    m.embedding()
    for blk in m.layers():
        m.norm(f"{blk}.attn_norm", m.n_embd)
        m.attention(blk, bias=True)
        m.norm(f"{blk}.ffn_norm", m.n_embd)
        m.ffn(blk)


def qwen2vl(m: Model) -> None:
    """As qwen2, but a token has a position in time, height and width each (M-RoPE), equal ones where it is text."""
    m.keys["rope.dimension_sections"] = [m.head_size // 4, m.head_size // 8, m.head_size // 8, 0]
    qwen2(m)


def gemma3(m: Model) -> None:
    """As gemma2, but five of six layers have a sliding window and a rotary base of their own; norms on Q and K."""
    gemma2(m)
    for il, blk in enumerate(m.layers()):
        m.norm(f"{blk}.attn_q_norm", m.head_size)
        m.norm(f"{blk}.attn_k_norm", m.head_size)
        m.tensors[f"{blk}.attn_q_norm.weight"] *= 2
        if il % 6 == 5:  # full attention
            m.tensors[f"{blk}.post_attention_norm.weight"] *= 8


def gemma2(m: Model) -> None:
    """Every other layer has a sliding window; attention logits are soft-capped if `softcap` is not 0."""
    m.keys["attention.sliding_window"] = m.n_swa
    if m.softcap:
        m.keys |= {"attn_logit_softcapping": float(m.softcap), "final_logit_softcapping": 30.0}
    m.embedding(std=1 / np.sqrt(m.n_embd), output=False)
    m.tensors["output_norm.weight"] *= 3
    for blk in m.layers():
        m.norm(f"{blk}.attn_norm", m.n_embd)
        m.attention(blk, qk_gain=2.0)
        m.norm(f"{blk}.post_attention_norm", m.n_embd)
        m.norm(f"{blk}.ffn_norm", m.n_embd)
        m.ffn(blk)
        m.norm(f"{blk}.post_ffw_norm", m.n_embd)


def bloom(m: Model) -> None:
    """ALiBi slopes instead of rotation; Q, K and V come from one fused matrix."""
    n = m.n_embd
    n_qkv = n + 2 * m.n_head_kv * m.head_size
    m.embedding()
    m.bias("output_norm", n)
    m.norm("token_embd_norm", n, bias=True)
    for blk in m.layers():
        m.norm(f"{blk}.attn_norm", n, bias=True)
        m.matrix(f"{blk}.attn_qkv", n, n_qkv, 1.5)
        m.bias(f"{blk}.attn_qkv", n_qkv)
        m.matrix(f"{blk}.attn_output", n, n)
        m.bias(f"{blk}.attn_output", n)
        m.norm(f"{blk}.ffn_norm", n, bias=True)
        m.ffn(blk, gate=False, bias=True)


def gpt2(m: Model) -> None:
    """Learned positions are added to the embeddings; nothing turns Q and K, which come with V from one fused matrix."""
    n = m.n_embd
    m.embedding(output=False)
    m.normal("position_embd.weight", (m.n_ctx_train, n))
    m.tensors["output_norm.weight"] *= 3 / np.sqrt(n)  # tied output
    m.bias("output_norm", n)
    for blk in m.layers():
        m.norm(f"{blk}.attn_norm", n, bias=True)
        m.matrix(f"{blk}.attn_qkv", n, 3 * n, 1.5)
        m.bias(f"{blk}.attn_qkv", 3 * n)
        m.matrix(f"{blk}.attn_output", n, n)
        m.bias(f"{blk}.attn_output", n)
        m.norm(f"{blk}.ffn_norm", n, bias=True)
        m.ffn(blk, gate=False, bias=True)


def gpt_oss(m: Model) -> None:
    """Learned attention sinks, sliding-window layers, experts."""
    m.keys |= {"attention.sliding_window": m.n_swa, "expert_feed_forward_length": m.n_ff}
    m.embedding()
    for blk in m.layers():
        m.norm(f"{blk}.attn_norm", m.n_embd)
        m.attention(blk, bias=True)
        m.bias(f"{blk}.attn_output", m.n_embd)
        m.normal(f"{blk}.attn_sinks.weight", (m.n_head,), 1.0, 2.0)
        m.norm(f"{blk}.post_attention_norm", m.n_embd)
        m.experts(blk, bias=True)


def grok(m: Model) -> None:
    """Attention logits pass through cap·tanh(scale·q·k/cap); experts."""
    m.keys |= {
        "attention.output_scale": 1 / np.sqrt(m.head_size),
        "attn_logit_softcapping": float(m.softcap),
        "embedding_scale": 1.0,
        "logit_scale": 1.0,
    }
    m.embedding()
    for blk in m.layers():
        m.norm(f"{blk}.attn_norm", m.n_embd)
        m.attention(blk, qk_gain=2.0)
        m.norm(f"{blk}.attn_output_norm", m.n_embd)
        m.norm(f"{blk}.ffn_norm", m.n_embd)
        m.experts(blk)
        m.norm(f"{blk}.post_ffw_norm", m.n_embd)


def t5(m: Model) -> None:
    """Encoder and decoder; a learned relative-position bias is added to attention logits; no softmax scale."""
    m.keys |= {"attention.relative_buckets_count": 32, "decoder_start_token_id": N_VOCAB - 1}
    m.normal("token_embd.weight", (N_VOCAB, m.n_embd))
    m.matrix("output", m.n_embd, N_VOCAB, 2.0)
    gain = 1.5 / m.head_size**0.25
    m.dims["attn_out"] = "attn_o"
    for side in ("enc", "dec"):
        m.norm(f"{side}.output_norm", m.n_embd)
        for blk in m.layers(f"{side}.blk"):
            m.norm(f"{blk}.attn_norm", m.n_embd)
            m.attention(blk, qk_gain=gain)
            m.normal(f"{blk}.attn_rel_b.weight", (32, m.n_head))
            m.norm(f"{blk}.ffn_norm", m.n_embd)
            m.ffn(blk)
            if side == "dec":
                m.norm(f"{blk}.cross_attn_norm", m.n_embd)
                for name, part_gain in (("q", gain), ("k", gain), ("v", 1.0), ("o", 1.0)):
                    m.matrix(f"{blk}.cross_attn_{name}", m.n_embd, m.n_embd, part_gain)


def deepseek2(m: Model) -> None:
    """Multi-head latent attention: the cache holds one compressed row per token, no K and V heads.

    kv_decay: how fast the latent's elements get smaller.
    """
    n_rot, n_nope, n_lora = m.head_size // 2, m.head_size - m.head_size // 2, m.n_lora
    m.keys |= {
        "attention.q_lora_rank": n_lora,
        "attention.kv_lora_rank": n_lora,
        "attention.key_length": n_lora + n_rot,
        "attention.value_length": n_lora,
        "attention.key_length_mla": m.head_size,
        "attention.value_length_mla": m.head_size,
        "rope.dimension_count": n_rot,
        "leading_dense_block_count": m.n_layer,
        "expert_feed_forward_length": m.n_ff,
        "expert_shared_count": 1,
    }
    m.embedding()
    for blk in m.layers():
        m.norm(f"{blk}.attn_norm", m.n_embd)
        m.matrix(f"{blk}.attn_q_a", m.n_embd, n_lora)
        m.norm(f"{blk}.attn_q_a_norm", n_lora)
        m.matrix(f"{blk}.attn_q_b", n_lora, m.n_head * m.head_size, 1.5)
        m.matrix(f"{blk}.attn_kv_a_mqa", m.n_embd, n_lora + n_rot)
        m.norm(f"{blk}.attn_kv_a_norm", n_lora)
        m.tensors[f"{blk}.attn_kv_a_norm.weight"] *= np.exp(-m.kv_decay * np.arange(n_lora, dtype=np.float32))
        m.matrix(f"{blk}.attn_k_b", n_nope, n_lora, 1.5, stack=(m.n_head,))
        m.matrix(f"{blk}.attn_v_b", n_lora, m.head_size, stack=(m.n_head,))
        m.matrix(f"{blk}.attn_output", m.n_head * m.head_size, m.n_embd)
        m.norm(f"{blk}.ffn_norm", m.n_embd)
        m.ffn(blk)


def bert(m: Model) -> None:
    """Encoder only: bidirectional, no cache, embeddings instead of logits."""
    n = m.n_embd
    m.keys |= {"attention.causal": False, "pooling_type": 1, "tokenizer.ggml.token_type_count": 1}
    m.normal("token_embd.weight", (N_VOCAB, n))
    m.normal("token_types.weight", (1, n))
    m.normal("position_embd.weight", (m.n_ctx_train, n))
    m.norm("token_embd_norm", n, bias=True)
    for blk in m.layers():
        m.attention(blk, bias=True)
        m.bias(f"{blk}.attn_output", n)
        m.norm(f"{blk}.attn_output_norm", n, bias=True)
        m.ffn(blk, gate=False, bias=True)
        m.norm(f"{blk}.layer_output_norm", n, bias=True)


@dataclass(frozen=True)
class Arch:
    """A function that fills a Model, dimensions that differ from DIMS, and whether n_embd is n_head * head_size."""

    fill: Callable[[Model], None]
    dims: dict[str, Any] = field(default_factory=dict)
    square: bool = False


# dtype: f32, f16 or q4_0, for matrices. template: of chats.
DIMS: dict[str, Any] = {
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "n_head_kv": 2,
    "head_size": 32,
    "n_ff": 128,
    "n_ctx_train": 4096,
    "rope_freq_base": 10000.0,
    "rope_factor": 1.0,  # of linear scaling
    "dtype": "f32",
    "template": TEMPLATE,
}
EXPERTS = {"n_expert": 4, "n_expert_used": 2, "n_ff": 64}
MHA = {"n_head": 2, "n_head_kv": 2}

ARCHS: dict[str, Arch] = {
    "llama": Arch(llama),
    "qwen2": Arch(qwen2, square=True),
    "qwen2vl": Arch(qwen2vl, square=True),
    "gemma2": Arch(gemma2, {"n_layer": 4, "n_swa": 16, "softcap": 5.0}),
    # heads of 256: transformers reads no scale from a GGUF, and takes that of this size
    "gemma3": Arch(
        gemma3,
        {
            "n_layer": 7,
            "n_head": 2,
            "n_head_kv": 1,
            "head_size": 256,
            "rope_freq_base": 1e6,
            "n_swa": 16,
            "softcap": 0.0,
        },
    ),
    "gemma3n": Arch(gemma3n, {"n_layer": 25, "n_embd": 32, "n_head": 2, "n_head_kv": 1, "n_ff": 32, "n_swa": 16}),
    "gemma4": Arch(gemma4, {"n_layer": 8, "n_shared": 4, "n_swa": 16, "n_head_kv": 1, "head_size": 64}),
    "bloom": Arch(bloom, MHA, square=True),
    "gpt2": Arch(gpt2, MHA | {"n_ctx_train": 512}, square=True),
    "gpt-oss": Arch(gpt_oss, EXPERTS | {"n_swa": 16}),
    "grok": Arch(grok, EXPERTS | {"n_head": 2, "n_head_kv": 1, "softcap": 5.0}, square=True),
    "t5": Arch(t5, MHA, square=True),
    "deepseek2": Arch(deepseek2, {"n_head_kv": 1, "n_lora": 32, "kv_decay": 0.0}),
    "mamba": Arch(mamba, {"n_head": 0, "n_head_kv": 0, "n_ff": 0}),
    "lfm2": Arch(lfm2, {"n_layer": 4, "n_head": 2, "n_head_kv": 1}, square=True),
    "qwen35": Arch(qwen35, {"n_layer": 4, "n_head": 2, "n_head_kv": 1, "n_state": 16}, square=True),
    "bert": Arch(bert, MHA | {"n_ctx_train": 256}, square=True),
}


def build(path: Path, arch: str = "llama", seed: int = 0, split_tensors: int = 0, **overrides: Any) -> Path:
    """Writes a tiny model and returns its path.

    arch: a key of ARCHS, also llama.cpp's name of it. overrides: dimensions of DIMS or of the architecture's own.
    split_tensors: most tensors per file, 0 for one file of all; the path is then the first file's.
    Raises KeyError for an unknown architecture, TypeError for a dimension it does not have.
    """
    dims = DIMS | ARCHS[arch].dims
    unknown = set(overrides) - set(dims) | ({"n_embd"} & set(overrides) if ARCHS[arch].square else set())
    if unknown:
        raise TypeError(f"tiny.build: expected dimensions of {arch}, found {sorted(unknown)}")
    dims |= overrides
    if ARCHS[arch].square:
        dims["n_embd"] = dims["n_head"] * dims["head_size"]
    m = Model(arch, seed, dims)
    m.keys |= {
        "context_length": m.n_ctx_train,
        "embedding_length": m.n_embd,
        "block_count": m.n_layer,
        "feed_forward_length": m.n_ff,
        "attention.head_count": m.n_head,
        "attention.head_count_kv": m.n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,
    }
    if m.n_head:
        m.keys |= {
            "attention.key_length": m.head_size,
            "attention.value_length": m.head_size,
            "rope.dimension_count": m.head_size,
            "rope.freq_base": float(m.rope_freq_base),
        }
    if m.rope_factor != 1.0:
        m.keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(m.rope_factor)}
    if "n_expert" in m.dims:
        m.keys |= {"expert_count": m.n_expert, "expert_used_count": m.n_expert_used}
    ARCHS[arch].fill(m)
    return write(path, m, split_tensors)


def write(path: Path, m: Model, split_tensors: int) -> Path:
    """Writes metadata, vocabulary and tensors."""
    writer = GGUFWriter(path, m.arch, split_max_tensors=split_tensors)
    writer.add_name(f"tiny-{m.arch}-{m.seed}")
    for key, value in m.keys.items():
        name = key if key.startswith("tokenizer.") else f"{m.arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_float32(name, float(value))
    tokens, merges = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    special = [TokenType.CONTROL if t in SPECIAL else TokenType.NORMAL for t in tokens]
    writer.add_token_types(special)
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|pad|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(m.dims.get("template", TEMPLATE))
    for name, data in m.tensors.items():
        if data.dtype == np.uint8:
            writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType.Q4_0)
            continue
        half = m.dtype == "f16" and data.ndim > 1
        writer.add_tensor(name, data.astype(np.float16) if half else data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if path.exists() else min(path.parent.glob(f"{path.stem}-*-of-*.gguf"))
