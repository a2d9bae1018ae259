"""What a cache of coefficients costs and gives, in plain words: for `convert` and `inspect`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from subkv.plan.pipeline import Result

MIB = 1 << 20


@dataclass(frozen=True)
class Cost:
    """Bytes of the coded layers: rows of one token, the same in f16, bases, the exact window of one sequence."""

    row: int
    f16: int
    bases: int
    window: int

    @classmethod
    def of_result(cls, result: Result) -> Cost:
        counted = result.counted
        elements = sum(layer.elements for layer in result.layers)
        bases, window = (round(bits * counted.context * elements / 8) for bits in (counted.bases, counted.window))
        return cls(counted.bytes_per_token, 2 * elements, bases, window)

    @classmethod
    def of_layout(cls, layout: Mapping[str, Any]) -> Cost:
        """Of a file's layout, FORMAT.md §5."""
        from subkv.format.window import Window

        window = Window(layout["n_sink"], layout["n_recent"], recent_bits=layout["recent_bits"]).with_defaults()
        n_heads = sum(layer["n_head_kv"] * (1 + bool(layer["v"])) for layer in layout["layers"])
        bits = window.bits(elements(layout), n_heads)
        return cls(layout["bytes_per_token"], 2 * elements(layout), layout["bytes_bases"], bits // 8)

    def bytes(self, n_ctx: int) -> int:
        """Of a context with one sequence."""
        return n_ctx * self.row + self.fixed

    @property
    def fixed(self) -> int:
        return self.window + self.bases

    def longest(self, n_bytes: int) -> tuple[int, int]:
        """Tokens that fit into so much memory, and as f16."""
        return max(n_bytes - self.fixed, 0) // self.row, max(n_bytes, 0) // self.f16


def elements(layout: Mapping[str, Any]) -> int:
    """K/V elements of one token in the coded layers of a file's layout, FORMAT.md §5; latent layers have no V."""
    return sum(layer["n_head_kv"] * (layer["d_k"] + bool(layer["v"]) * layer["d_v"]) for layer in layout["layers"])


def sentences(
    cost: Cost, n_ctx: int, predicted: Mapping[str, float] | None, weights: int, available: int | None
) -> Iterator[str]:
    """predicted: nats per token of this layout ("subkv") and of llama.cpp's types. weights: bytes, 0 where not known.

    available: bytes of memory, None where the system does not say.
    """
    total, exact = cost.bytes(n_ctx), n_ctx * cost.f16
    yield (
        f"a context of {n_ctx} tokens takes {total / MIB:.1f} MiB instead of {exact / MIB:.1f} MiB in f16: "
        f"{16 * total / exact:.2f} bits per element instead of 16, {16 * cost.fixed / exact:.3f} of them for the exact "
        f"window and bases, which take {cost.fixed / MIB:.1f} MiB at any length"
    )
    if predicted:
        yield _quality(predicted)
    if available is not None:
        coded, f16 = (_round(n) for n in cost.longest(available - weights))
        beside = f" beside the weights of {weights / MIB:.0f} MiB" if weights else ", the weights not counted"
        yield (f"{available / MIB:.0f} MiB of memory are available: about {coded} tokens fit{beside}, {f16} in f16")


def _quality(predicted: Mapping[str, float]) -> str:
    own = predicted["subkv"]
    stock = sorted((error, kind) for kind, error in predicted.items() if kind != "subkv")
    better = [f"{kind}'s {error:.2g}" for error, kind in stock if error < own]
    worse = [f"{kind}'s {error:.2g}" for error, kind in stock if error >= own]
    parts = [f"at most {', '.join(worse)}"] * bool(worse) + [f"more than {', '.join(better)}"] * bool(better)
    return f"predicted KLD: {own:.2g} nats per token" + (f", {', '.join(parts)}" if parts else "")


def _round(n: int) -> int:
    """Two digits that count."""
    digits = max(len(str(n)) - 2, 0)
    return n // 10**digits * 10**digits
