"""The codecs by name, and their rows in the table of research.evaluate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from research.float32.reference import Coder
from research.rivals import exl3, kivi, kvarn, kvquant, oscar, turboquant
from research.rivals.rival import Knowledge, Make, Rival
from subkv.base.errors import SubkvError
from subkv.format.arrays import F32
from subkv.native.gguf import Base
from subkv.plan import stock
from subkv.plan.pipeline import Fit
from subkv.plan.positions import pairs

MOST_BITS = 8
# how each is made, and the least and most bits of its codes
CODECS: dict[str, tuple[Make, int, int]] = {
    "exl3": (exl3.make, 2, MOST_BITS),
    "turboquant": (turboquant.make, 2, MOST_BITS),
    "kivi": (kivi.make, 2, MOST_BITS),
    "kvquant": (kvquant.make, 2, MOST_BITS),
    "kvarn": (kvarn.make, 2, MOST_BITS),
    "oscar": (oscar.make, 2, 2),
}
ROTATED = "rotated-"  # before a type of llama.cpp, which rotates by itself: the same as that type


@dataclass(frozen=True)
class Spec:
    """A codec that was asked for: `text` as given, a name of CODECS or a type of llama.cpp, bits of K and V codes."""

    text: str
    name: str
    bits_k: int = 0
    bits_v: int = 0


def known_codecs() -> str:
    """What parse() takes, in words."""
    own = (f"{name}:{least}…{most}" if least < most else f"{name}:{least}" for name, (_, least, most) in CODECS.items())
    return ", ".join((*own, *(ROTATED + kind for kind in stock.KINDS if kind != "f16")))


def parse(text: str) -> Spec:
    """name:bits, name:bits of K/bits of V, or rotated-TYPE. Raises SubkvError about `codecs`."""
    kind = text.removeprefix(ROTATED)
    if kind != text and kind in stock.KINDS and kind != "f16":
        return Spec(text, kind)
    name, _, bits = text.partition(":")
    numbers = bits.split("/") if "/" in bits else [bits, bits]
    if name in CODECS and len(numbers) == 2 and all(n.isascii() and n.isdigit() and len(n) == 1 for n in numbers):
        _, least, most = CODECS[name]
        bits_k, bits_v = map(int, numbers)
        if least <= min(bits_k, bits_v) and max(bits_k, bits_v) <= most:
            return Spec(text, name, bits_k, bits_v)
    raise SubkvError("codecs", f"expected codecs out of {known_codecs()} (bits of K and V: kvarn:4/2), found {text!r}")


def knowledge(fit: Fit, base: Base) -> Knowledge:
    """What codecs may know of a fitted model, all of whose layers have one shape."""
    shape = fit.calibration.layers[0].shape
    queries = [stats.q2 for stats in fit.calibration.layers]
    costs = [layer.cost for layer in fit.layers]
    return Knowledge(
        shape.n_head_kv, shape.d_k, queries, [c.k for c in costs], [c.v for c in costs], pairs(base, shape.d_k)
    )


def _rotated(kind: str) -> Rival:
    def quantize(il: int, k: F32, v: F32, first: int) -> tuple[F32, F32]:
        return stock.round_trip(kind, k, keys=True), stock.round_trip(kind, v, keys=False)

    return Rival(quantize, stock.bits(kind))


def rival(spec: Spec, known: Knowledge) -> Rival:
    """Raises SubkvError about `codecs` where a codec does not fit the model."""
    if spec.name in CODECS:
        return CODECS[spec.name][0](known, spec.bits_k, spec.bits_v)
    known.blocks(32)
    return _rotated(spec.name)


def coder(codec: Rival, n_sink: int, sides: str) -> Coder:
    """What attention sees with n_sink exact tokens before the first coded one."""

    def quantize(il: int, k: F32, v: F32) -> tuple[F32, F32]:
        read_k, read_v = codec.round_trip(il, k[:, n_sink:], v[:, n_sink:], n_sink)
        if "k" in sides:
            k = np.concatenate([k[:, :n_sink], read_k], axis=1)
        if "v" in sides:
            v = np.concatenate([v[:, :n_sink], read_v], axis=1)
        return k, v

    return quantize


def check_window(codecs: Sequence[Spec], rivals: Sequence[Rival], n_recent: int) -> None:
    """Refuse a window that reads tiles before they are whole. Raises SubkvError about `n_recent`."""
    for spec, codec in zip(codecs, rivals, strict=True):
        if codec.tile > max(n_recent, 1):
            raise SubkvError(
                "n_recent",
                f"expected at least the {codec.tile} tokens that {spec.text} codes together, found {n_recent}",
            )
