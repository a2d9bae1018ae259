"""Bytes of the KV cache of models, computed from their shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from render import Column, Numbers, Rows, grid

from subkv.format.window import DEFAULT
from subkv.plan.budget import coefficient_bits

GIB = 8 << 30  # bits
CONTEXTS = {"8k": 8192, "32k": 32768, "128k": 131072}
STATED = 8192  # tokens at which bits per element are counted
Q8_0 = 8.5
N_UBATCH, GRANULE = 512, 256  # llama-server's tokens computed at once; llama.cpp's of the cells of sliding layers
SUBKV = {"subkv": 5.2, "4.25 bits": 4.25}  # bits per element: the demo model's default, and a smaller plan


@dataclass(frozen=True)
class Shape:
    """A model's layers with a growing cache, their KV heads, and the size of a head (its config.json).

    n_sliding: layers with a sliding window, of n_swa tokens.
    """

    name: str
    n_layer: int
    n_head_kv: int
    d: int
    n_sliding: int = 0
    n_swa: int = 0

    @property
    def rows(self) -> int:
        """Rows per token: one of each layer, KV head and side."""
        return 2 * self.n_layer * self.n_head_kv

    def bits(self, n: int, kv_bits: float, n_seq: int = 1) -> float:
        """Bits of n tokens of n_seq sequences: rows, plus the exact windows and the bases, which do not grow."""
        elements = self.rows * self.d
        window = DEFAULT.bits(elements, self.rows)
        fixed = window + elements * coefficient_bits(self.d)
        return fixed + (n_seq - 1) * window + (kv_bits * elements - fixed / STATED) * n

    def sliding(self, n: int, n_seq: int = 1) -> int:
        """Elements of the sliding layers: llama.cpp gives each sequence of n / n_seq tokens cells of its window and of
        a ubatch, in multiples of 256.
        """
        cells = min(n // n_seq, -(-(self.n_swa + N_UBATCH) // GRANULE) * GRANULE)
        return 2 * self.n_sliding * self.n_head_kv * self.d * cells * n_seq

    def of_caches(self, n: int, n_seq: int = 1) -> dict[str, float]:
        """Bits by cache. Sliding layers beside coded ones are q8_0."""
        elements, sliding = self.rows * self.d * n, self.sliding(n, n_seq)
        ours = {name: self.bits(n, kv_bits, n_seq) + Q8_0 * sliding for name, kv_bits in SUBKV.items()}
        return {"f16": 16 * (elements + sliding), "q8_0": Q8_0 * (elements + sliding), **ours}


SHAPES = (
    Shape("Llama-3.2-3B", 28, 8, 128),
    Shape("Llama-3.1-8B", 32, 8, 128),
    Shape("Qwen3-32B", 64, 8, 128),
    Shape("Qwen3.6-27B, hybrid", 16, 4, 256),
    Shape("Qwen3.6-35B-A3B, hybrid", 10, 2, 256),
    Shape("Gemma-3-12B, sliding", 8, 8, 256, 40, 1024),
)
SLIDING = (
    Shape("Gemma-3-270M", 3, 1, 256, 15, 512),
    Shape("Gemma-3-4B", 5, 4, 256, 29, 1024),
    Shape("Gemma-3-12B", 8, 8, 256, 40, 1024),
    Shape("gpt-oss-20b", 12, 8, 64, 12, 128),
)
SLOTS = (1, 4)


def sizes(_: Any) -> Rows:
    """GiB by model and context."""
    rows = []
    for shape in SHAPES:
        for label, n in CONTEXTS.items():
            bits_of = shape.of_caches(n)
            rows.append({"name": shape.name, "context": label, **{key: bits / GIB for key, bits in bits_of.items()}})
    return rows


def sliding_sizes(_: Any) -> Rows:
    """GiB by model with sliding windows, slots and context."""
    return [
        {
            "name": f"{shape.name}, -np {n_seq}",
            "context": label,
            **{key: bits / GIB for key, bits in shape.of_caches(n, n_seq).items()},
        }
        for shape in SLIDING
        for n_seq in SLOTS
        for label, n in CONTEXTS.items()
    ]


def sizes_markdown(rows: Rows) -> str:
    found = {(row["name"], row["context"]): row for row in rows}

    def cell(context: str) -> Column:
        caches = ("f16", "q8_0", *SUBKV)
        digits = 3 if min(row["f16"] for row in rows) < 0.1 else 2
        return context, lambda row: " · ".join(f"{found[row['name'], context][key]:.{digits}f}" for key in caches)

    models = [row for row in rows if row["context"] == "8k"]
    return grid(
        models, [(f"GiB: f16 · q8_0 · {' · '.join(SUBKV)}", lambda row: row["name"]), *(cell(c) for c in CONTEXTS)]
    )


def sizes_numbers(rows: Rows) -> Numbers:
    return {f"{row['name']}.{row['context']}": f"{row['subkv']:.2f}" for row in rows}
