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
SUBKV = {"subkv": 5.2, "4.25 bits": 4.25}  # bits per element: the demo model's default, and a smaller plan


@dataclass(frozen=True)
class Shape:
    """A model's layers with a growing cache, their KV heads, and the size of a head (its config.json)."""

    name: str
    n_layer: int
    n_head_kv: int
    d: int

    @property
    def rows(self) -> int:
        """Rows per token: one of each layer, KV head and side."""
        return 2 * self.n_layer * self.n_head_kv

    def bits(self, n: int, kv_bits: float) -> float:
        """Bits of n tokens of one sequence: rows, plus the exact window and the bases, which do not grow."""
        elements = self.rows * self.d
        fixed = DEFAULT.bits(elements, self.rows) + elements * coefficient_bits(self.d)
        return fixed + (kv_bits * elements - fixed / STATED) * n


SHAPES = (
    Shape("Llama-3.2-3B", 28, 8, 128),
    Shape("Llama-3.1-8B", 32, 8, 128),
    Shape("Qwen3-14B", 40, 8, 128),
    Shape("Qwen3-32B", 64, 8, 128),
    Shape("Qwen3.6-27B, hybrid", 16, 4, 256),
    Shape("Qwen3.6-35B-A3B, hybrid", 10, 2, 256),
)


def sizes(_: Any) -> Rows:
    """GiB by model and context."""
    rows = []
    for shape in SHAPES:
        for label, n in CONTEXTS.items():
            elements = shape.rows * shape.d * n
            bits_of = {"f16": 16 * elements, "q8_0": Q8_0 * elements}
            bits_of |= {name: shape.bits(n, kv_bits) for name, kv_bits in SUBKV.items()}
            rows.append({"name": shape.name, "context": label, **{key: bits / GIB for key, bits in bits_of.items()}})
    return rows


def sizes_markdown(rows: Rows) -> str:
    found = {(row["name"], row["context"]): row for row in rows}

    def cell(context: str) -> Column:
        caches = ("f16", "q8_0", *SUBKV)
        return context, lambda row: " · ".join(f"{found[row['name'], context][key]:.2f}" for key in caches)

    models = [row for row in rows if row["context"] == "8k"]
    return grid(
        models, [(f"GiB: f16 · q8_0 · {' · '.join(SUBKV)}", lambda row: row["name"]), *(cell(c) for c in CONTEXTS)]
    )


def sizes_numbers(rows: Rows) -> Numbers:
    return {f"{row['name']}.{row['context']}": f"{row['subkv']:.2f}" for row in rows}
