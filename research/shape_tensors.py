"""Shapes of models: which tensors a GGUF of each has, of which sizes, and which metadata.

A table names the tensors of a part of a layer and what their sizes are called in Shape.sizes(); an architecture is the
tables of each kind of its layers.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from subkv.base.errors import SubkvError

BLOCK = 32  # weights of a quantized block
MOST_GROUP = 128  # query heads that share one KV head, as of kernels/include/subkv/ops.h
CONVOLVED = 3  # tokens of a short convolution
HEAD_SIZES = (64, 128, 192, 256, 512)  # eighths of them are bands
SIGMOID = 2  # how experts are weighed, as of llama.cpp

Table = dict[str, str]  # of a tensor: what its sizes are called, that of rows last

NORM: Table = {"attn_norm.weight": "embd"}
HEAD_NORMS: Table = {"attn_q_norm.weight": "head", "attn_k_norm.weight": "head"}
FFN_NORM: Table = {"ffn_norm.weight": "embd"}
POST_NORM: Table = {"post_attention_norm.weight": "embd"}  # also what some feed-forward layers begin with
KEYS_ALONE: Table = {  # values are the keys before their norm and turn
    "attn_q.weight": "q embd",
    "attn_k.weight": "kv embd",
    "attn_output.weight": "embd q",
}
ATTENTION: Table = {
    "attn_q.weight": "q embd",
    "attn_k.weight": "kv embd",
    "attn_v.weight": "kv embd",
    "attn_output.weight": "embd q",
}
GATED: Table = ATTENTION | {"attn_q.weight": "gated_q embd"}  # a gate for each element of the output
BIASES: Table = {
    "attn_q.bias": "q",
    "attn_k.bias": "kv",
    "attn_v.bias": "kv",
    "attn_output.bias": "embd",
    "attn_sinks.weight": "heads",
}
LATENT_ROWS: Table = {
    "attn_kv_a_mqa.weight": "row embd",
    "attn_k_b.weight": "heads latent head",
    "attn_v_b.weight": "heads head latent",
    "attn_output.weight": "embd q",
    "attn_kv_a_norm.weight": "latent",
}
LATENT: Table = {"attn_q.weight": "rotated_q embd"} | LATENT_ROWS
CHOOSING: Table = {
    "attn_q_a.weight": "query embd",
    "attn_q_b.weight": "rotated_q query",
    "indexer.attn_q_b.weight": "index_q query",
    "indexer.attn_k.weight": "index_key embd",
    "indexer.proj.weight": "index_heads embd",
    "attn_q_a_norm.weight": "query",
    "indexer.k_norm.weight": "index_key",
    "indexer.k_norm.bias": "index_key",
} | LATENT_ROWS
CONVOLUTION: Table = {
    "shortconv.in_proj.weight": "convolved embd",
    "shortconv.out_proj.weight": "embd embd",
    "shortconv.conv.weight": "embd taps",
}
DELTA: Table = {  # the gated delta rule
    "attn_qkv.weight": "delta_qkv embd",
    "attn_gate.weight": "delta_v embd",
    "ssm_conv1d.weight": "delta_qkv delta_taps",
    "ssm_dt.bias": "delta_heads",
    "ssm_a": "delta_heads",
    "ssm_beta.weight": "delta_heads embd",
    "ssm_alpha.weight": "delta_heads embd",
    "ssm_norm.weight": "delta_size",
    "ssm_out.weight": "embd delta_v",
}
FEED_FORWARD: Table = {"ffn_gate.weight": "ff embd", "ffn_up.weight": "ff embd", "ffn_down.weight": "embd ff"}
EXPERTS: Table = {
    "ffn_gate_inp.weight": "experts embd",
    "ffn_gate_exps.weight": "experts ff embd",
    "ffn_up_exps.weight": "experts ff embd",
    "ffn_down_exps.weight": "experts embd ff",
}
EXPERT_BIASES: Table = {
    "ffn_gate_inp.bias": "experts",
    "ffn_gate_exps.bias": "experts ff",
    "ffn_up_exps.bias": "experts ff",
    "ffn_down_exps.bias": "experts embd",
}
SHARED_EXPERT: Table = {
    "ffn_gate_inp_shexp.weight": "embd",
    "ffn_gate_shexp.weight": "ff embd",
    "ffn_up_shexp.weight": "ff embd",
    "ffn_down_shexp.weight": "embd ff",
}
GEMMA: Table = {"post_ffw_norm.weight": "embd", "layer_output_scale.weight": "one"}
TURNS: Table = {"rope_freqs.weight": "half"}

FULL, OTHER = "full", "other"  # kinds of layers: that attend to all cells, the rest
_PLAIN = NORM | FFN_NORM | FEED_FORWARD
_QWEN_MOE = NORM | POST_NORM | EXPERTS | SHARED_EXPERT
_GEMMA = NORM | HEAD_NORMS | POST_NORM | FFN_NORM | FEED_FORWARD | GEMMA
_GPT_OSS = NORM | ATTENTION | BIASES | POST_NORM | EXPERTS | EXPERT_BIASES
ARCHITECTURES: dict[str, dict[str, Table]] = {
    "llama": {FULL: ATTENTION | _PLAIN},
    "qwen3": {FULL: ATTENTION | HEAD_NORMS | _PLAIN},
    "lfm2": {FULL: ATTENTION | HEAD_NORMS | _PLAIN, OTHER: CONVOLUTION | _PLAIN},
    "deepseek2": {FULL: LATENT | _PLAIN},
    "deepseek32": {FULL: CHOOSING | _PLAIN},
    "qwen35": {
        FULL: GATED | HEAD_NORMS | NORM | POST_NORM | FEED_FORWARD,
        OTHER: DELTA | NORM | POST_NORM | FEED_FORWARD,
    },
    "qwen35moe": {FULL: GATED | HEAD_NORMS | _QWEN_MOE, OTHER: DELTA | _QWEN_MOE},
    "gemma4": {FULL: KEYS_ALONE | _GEMMA, OTHER: ATTENTION | _GEMMA},
    "gpt-oss": {FULL: _GPT_OSS, OTHER: _GPT_OSS},
}
ENDS: dict[str, Table] = {  # what differs of the tensors that belong to no layer
    "lfm2": {"token_embd_norm.weight": "embd"},
    "gemma4": {"output_norm.weight": "embd"} | TURNS,
}


class Window(NamedTuple):
    """Of sliding layers. kv_heads: as many for each KV head of a full layer. parts: a full layer's head divided by it
    is the size of a head.
    """

    cells: int
    rope_base: float
    kv_heads: int = 1
    parts: int = 1


class Delta(NamedTuple):
    """Of layers with a gated delta rule: heads of keys, heads of values, elements of each, tokens convolved."""

    groups: int
    heads: int
    size: int = 128
    taps: int = 4


@dataclasses.dataclass(frozen=True)
class Shape:
    """arch: llama.cpp's name. tied: the embeddings are the output matrix, too. context: tokens trained with.

    latent, rotated: elements of a row of latent attention (MLA), and those behind them, which positions turn; 0: none.
    attending: the layers that attend to all cells; empty: the last of every `period` layers. The others are short
    convolutions, or have a window, or a gated delta rule.
    indexer: heads, elements of a key and cells that are chosen, where a token attends to some alone; empty: to all.
    query: elements that all queries are made from then.
    experts: all are used, ff is the size of one; 0: a layer has no experts.
    """

    arch: str
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    embd: int
    ff: int
    vocab: int
    tied: bool
    rope_base: float
    context: int
    latent: int = 0
    rotated: int = 0
    attending: tuple[int, ...] = ()
    indexer: tuple[int, int, int] | None = None
    query: int = 0
    period: int = 1
    window: Window | None = None
    delta: Delta | None = None
    experts: int = 0

    def kind(self, il: int) -> str:
        """FULL or OTHER."""
        return FULL if (il in self.attending if self.attending else (il + 1) % self.period == 0) else OTHER

    @property
    def coded(self) -> list[int]:
        """Layers whose K/V rows are coded: those that attend to all cells."""
        return [il for il in range(self.layers) if self.kind(il) == FULL]

    def check(self) -> None:
        """Raises SubkvError about a dimension that does not fit the others."""
        for kind, which in ((FULL, ""), (OTHER, " of sliding layers")):
            kv_heads, _ = self.heads_of(kind)
            if kv_heads and self.heads % kv_heads:
                raise SubkvError("heads", f"expected a multiple of {kv_heads} KV heads{which}, found {self.heads}")
        if self.heads > MOST_GROUP * self.kv_heads:
            raise SubkvError("heads", f"expected at most {MOST_GROUP} for each KV head, found {self.heads}")
        if self.head_size not in HEAD_SIZES:
            *sizes, last = HEAD_SIZES
            raise SubkvError("head_size", f"expected {', '.join(map(str, sizes))} or {last}, found {self.head_size}")
        if self.latent and self.kv_heads != 1:
            raise SubkvError("kv_heads", f"expected 1 with latent attention (MLA), found {self.kv_heads}")
        if not self.coded:
            first = min(self.attending, default=self.period - 1)
            raise SubkvError(
                "layers", f"expected more than {first}, the first that attends to all cells, found {self.layers}"
            )
        if self.attending and self.embd != self.heads * self.head_size:
            raise SubkvError("embd", f"expected {self.heads * self.head_size}, all heads together, found {self.embd}")
        for key, n in (("embd", self.embd), ("ff", self.ff)):
            if n % BLOCK:
                raise SubkvError(key, f"expected a multiple of {BLOCK}, found {n}")

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Sizes of all tensors, that of rows last, by name."""
        ends = {"token_embd.weight": "vocab embd"} | ({} if self.tied else {"output.weight": "vocab embd"})
        ends |= ENDS.get(self.arch, {"output_norm.weight": "embd"})
        tables = {"": (FULL, ends)}
        for il in range(self.layers):
            kind = self.kind(il)
            tables[f"blk.{il}."] = kind, ARCHITECTURES[self.arch][kind]
        found: dict[str, tuple[int, ...]] = {}
        for place, (kind, table) in tables.items():
            sizes = self.sizes(kind)
            found |= {place + name: tuple(sizes[word] for word in words.split()) for name, words in table.items()}
        return found

    def heads_of(self, kind: str) -> tuple[int, int]:
        """KV heads of a layer of this kind, and the size of a head."""
        if kind == OTHER and self.window:
            return self.kv_heads * self.window.kv_heads, self.head_size // self.window.parts
        return (self.kv_heads if kind == FULL else 0), self.head_size

    def sizes(self, kind: str) -> dict[str, int]:
        """What tables call by name, in layers of this kind."""
        kv_heads, head = self.heads_of(kind)
        delta, (n_index, index_key, _) = self.delta or Delta(0, 0), self.indexer or (0, 0, 0)
        return {
            **{key: getattr(self, key) for key in ("embd", "ff", "vocab", "heads", "latent", "query", "experts")},
            "one": 1,
            "head": head,
            "half": head // 2,
            "q": self.heads * head,
            "kv": kv_heads * head,
            "gated_q": 2 * self.heads * head,
            "rotated_q": self.heads * (head + self.rotated),
            "row": self.latent + self.rotated,
            "index_heads": n_index,
            "index_key": index_key,
            "index_q": n_index * index_key,
            "convolved": 3 * self.embd,
            "taps": CONVOLVED,
            "delta_heads": delta.heads,
            "delta_size": delta.size,
            "delta_v": delta.heads * delta.size,
            "delta_qkv": (2 * delta.groups + delta.heads) * delta.size,
            "delta_taps": delta.taps,
        }

    def keys(self) -> dict[str, Any]:
        """Metadata by their names behind the architecture's."""
        kv_heads = [self.heads_of(self.kind(il))[0] for il in range(self.layers)]
        varied = len(set(kv_heads)) > 1 and not self.delta  # those tell by full_attention_interval
        found = {
            "context_length": self.context,
            "embedding_length": self.embd,
            "block_count": self.layers,
            "feed_forward_length": self.ff,
            "attention.head_count": self.heads,
            "attention.head_count_kv": kv_heads if varied else self.kv_heads,
            "attention.key_length": self.latent + self.rotated or self.head_size,
            "attention.value_length": self.latent or self.head_size,
            "rope.dimension_count": self.rotated or self.head_size,
            "rope.freq_base": self.rope_base,
            "attention.layer_norm_rms_epsilon": 1e-5,
        }
        found |= {"shortconv.l_cache": CONVOLVED} if self.attending else {}
        found |= self._latent_keys() if self.latent else {}
        found |= _delta_keys(self.delta, self.head_size, self.period) if self.delta else {}
        found |= self._window_keys(self.window) if self.window else {}
        if self.indexer:
            names = ("head_count", "key_length", "top_k")
            found |= {f"attention.indexer.{name}": n for name, n in zip(names, self.indexer, strict=True)}
            found["expert_gating_func"] = SIGMOID
        if self.experts:
            found |= dict.fromkeys(("expert_count", "expert_used_count"), self.experts)
            found |= dict.fromkeys(("expert_feed_forward_length", "expert_shared_feed_forward_length"), self.ff)
        return found

    def _latent_keys(self) -> dict[str, Any]:
        return {
            "attention.q_lora_rank": self.query,
            "attention.kv_lora_rank": self.latent,
            "attention.key_length_mla": self.head_size + self.rotated,
            "attention.value_length_mla": self.head_size,
            "leading_dense_block_count": self.layers,  # as many weights as a token's experts have
            "expert_feed_forward_length": self.ff,
            "expert_shared_count": 1,
        }

    def _window_keys(self, window: Window) -> dict[str, Any]:
        _, head = self.heads_of(OTHER)
        return {
            "attention.sliding_window": window.cells,
            "attention.sliding_window_pattern": [self.kind(il) == OTHER for il in range(self.layers)],
            "attention.key_length_swa": head,
            "attention.value_length_swa": head,
            "attention.shared_kv_layers": 0,
            "embedding_length_per_layer_input": 0,
            "rope.dimension_count_swa": head,
            "rope.freq_base_swa": window.rope_base,
        }


def _delta_keys(delta: Delta, head: int, period: int) -> dict[str, Any]:
    rotated = head // 4  # of the layers that attend
    third = -(-rotated // 6)  # pairs that each of three coordinates turns
    return {
        "full_attention_interval": period,
        "rope.dimension_count": rotated,
        "rope.dimension_sections": [third, third, rotated // 2 - 2 * third, 0],
        "ssm.conv_kernel": delta.taps,
        "ssm.inner_size": delta.heads * delta.size,
        "ssm.state_size": delta.size,
        "ssm.time_step_rank": delta.heads,
        "ssm.group_count": delta.groups,
    }


def is_matrix(name: str, size: tuple[int, ...]) -> bool:
    """Whether a tensor is made of random blocks: not what has too short rows, and no biases."""
    return len(size) > 1 and size[-1] % BLOCK == 0 and not name.endswith(".bias")


def constant(name: str) -> float:
    """The value of all elements of another tensor: normalizations and convolutions are ones."""
    if name.endswith(".ssm_a"):
        return -1.0  # states decay
    return 0.0 if name.endswith((".bias", ".attn_sinks.weight")) else 1.0


SHAPES = {  # `--help` lists what each lacks
    "smollm2-135m": Shape("llama", 30, 9, 3, 64, 576, 1536, 49152, True, 1e5, 131072),
    "llama-3.2-1b": Shape("llama", 16, 32, 8, 64, 2048, 8192, 128256, True, 5e5, 131072),
    "qwen3-0.6b": Shape("qwen3", 28, 16, 8, 128, 1024, 3072, 151936, True, 1e6, 40960),
    "llama-3.1-8b": Shape("llama", 4, 32, 8, 128, 4096, 14336, 32000, False, 5e5, 131072),
    "lfm2-350m": Shape("lfm2", 16, 16, 8, 64, 1024, 4608, 65536, True, 1e6, 128000, attending=(2, 5, 8, 10, 12, 14)),
    "deepseek-v2-lite": Shape("deepseek2", 4, 16, 1, 128, 2048, 10944, 32000, False, 1e4, 163840, 512, 64),
    "deepseek-v3.2": Shape(
        *("deepseek32", 2, 128, 1, 128, 7168, 18432, 32000, False, 1e4, 163840, 512, 64),
        indexer=(64, 128, 2048),
        query=1536,
    ),
    "qwen3.6-27b": Shape(
        *("qwen35", 4, 24, 4, 256, 5120, 17408, 32000, False, 1e7, 262144), period=4, delta=Delta(16, 48)
    ),
    "qwen3.6-35b-a3b": Shape(
        *("qwen35moe", 4, 16, 2, 256, 2048, 512, 32000, False, 1e7, 262144), period=4, delta=Delta(16, 32), experts=8
    ),
    "gemma-4-31b": Shape(
        *("gemma4", 6, 32, 4, 512, 5376, 21504, 32000, True, 1e6, 262144), period=6, window=Window(1024, 1e4, 4, 2)
    ),
    "gpt-oss-20b": Shape(
        *("gpt-oss", 4, 64, 8, 64, 2880, 2880, 32000, False, 1.5e5, 131072),
        period=2,
        window=Window(128, 1.5e5),
        experts=4,
    ),
}
