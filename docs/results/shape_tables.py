"""Tables of speed for models of other shapes, with random weights: what runtime.shapes writes, measured by bench."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from render import RANDOM, Numbers, Rows, wrapped
from speed_tables import bench, by_depth, numbers

SHAPES = {  # file → name in numbers, what tables say of it
    "llama-3.2-1b": (
        "1b",
        "**Llama-3.2-1B**: 16 layers, 32 query heads, 8 KV heads of 64, its vocabulary of 128256 tokens.",
    ),
    "qwen3-0.6b": (
        "0.6b",
        "**Qwen3-0.6B**: 28 layers, 16 query heads, 8 KV heads of 128, its vocabulary of 151936 tokens.",
    ),
    "llama-3.1-8b": (
        "8b",
        "**Llama-3.1-8B**, 4 of its 32 layers: 32 query heads, 8 KV heads of 128, a vocabulary of 32000 instead of "
        "128256. The whole model computes 8 times the layers and 4 times the vocabulary for a token.",
    ),
    "lfm2-350m": (
        "350m",
        "**LFM2-350M**, a hybrid: 6 of its 16 layers attend, with 16 query heads and 8 KV heads of 64, the others are "
        "short convolutions; its vocabulary of 65536 tokens.",
    ),
    "llama-3.1-8b-whole": (
        "8b_whole",
        "**Llama-3.1-8B**, all of its 32 layers and 128256 tokens: 4.2 GiB of weights.",
    ),
    "deepseek-v2-lite": (
        "mla",
        "**DeepSeek-V2-Lite**, 4 of its 27 layers: latent attention (MLA), 16 query heads read one row of 512 + 64 "
        "elements; feed-forward layers with as many weights as a token's experts have, a vocabulary of 32000 instead "
        "of 102400.",
    ),
}
OTHERS = ["llama-3.2-1b", "qwen3-0.6b", "llama-3.1-8b"]
SIZES = {"llama-3.1-8b-whole": ("llama-3.1-8b", "--layers", "32", "--vocab", "128256")}  # others: runtime.shapes' own
SMALL = ("--layers", "3", "--embd", "1024", "--ff", "256", "--vocab", "512")  # to try the programs


DEEP = "llama-3.2-1b"  # trained with 131072 tokens


def _measure(lab: Any, *words: str, shapes: Iterable[str] = OTHERS) -> Rows:
    """Rows of some shapes, each with the name of its shape."""
    rows = []
    for name in shapes:
        shape, *sizes = SIZES.get(name, (name,))
        model = lab.shape(name, shape, *lab.pick(sizes, SMALL))
        for row in bench(lab, *words, "-fa", "on,off", model=model):
            cache = RANDOM if row["cache"] == "subkv" else row["cache"]
            rows.append({**row, "cache": cache, "shape": name})
    return rows


def decode(lab: Any) -> Rows:
    size = lab.pick(("-n", "8", "-d", "64,2048,8000,32000", "-r", "3"), ("-n", "4", "-d", "64,256", "-r", "2"))
    return _measure(lab, "-ctk", "f16,q8_0,q4_0,subkv", "-p", "0", *size)


def hybrids(lab: Any) -> Rows:
    """Every token is evaluated: cells are not copied where layers are recurrent."""
    size = lab.pick(("-n", "8", "-d", "64,2048,8000,32000", "-r", "3"), ("-n", "4", "-d", "64,256", "-r", "2"))
    return _measure(lab, "-ctk", "f16,q8_0,subkv", "-p", "0", *size, shapes=["lfm2-350m"])


def latent(lab: Any) -> Rows:
    size = lab.pick(("-n", "8", "-d", "64,8000,32000", "-r", "3"), ("-n", "4", "-d", "64,256", "-r", "2"))
    return _measure(lab, "-ctk", "f16,q8_0,subkv", "-p", "0", *size, shapes=["deepseek-v2-lite"])


def prefill(lab: Any) -> Rows:
    size = lab.pick(("-p", "512", "-d", "8000", "-r", "2"), ("-p", "32", "-d", "256", "-r", "2"))
    return _measure(lab, "-ctk", "f16,subkv", "-n", "0", *size)


def deep(lab: Any) -> Rows:
    size = lab.pick(("-n", "8", "-d", "32000,128000", "-r", "3"), ("-n", "4", "-d", "64,256", "-r", "2"))
    return _measure(lab, "-ctk", "f16,subkv", "-p", "0", *size, shapes=[DEEP])


def whole(lab: Any) -> Rows:
    size = lab.pick(("-n", "8", "-d", "64,2048,8000,32000", "-r", "2"), ("-n", "4", "-d", "64,256", "-r", "2"))
    return _measure(lab, "-ctk", "f16,subkv", "-p", "0", *size, shapes=["llama-3.1-8b-whole"])


def _by_shape(rows: Rows) -> dict[str, Rows]:
    """Rows of the shapes that were measured."""
    measured = {row["shape"] for row in rows}
    return {name: [row for row in rows if row["shape"] == name] for name in SHAPES if name in measured}


def markdown(rows: Rows) -> str:
    """A line about each shape and its table."""
    return "\n\n".join(f"{wrapped(SHAPES[name][1])}\n\n{by_depth(found)}" for name, found in _by_shape(rows).items())


def shape_numbers(rows: Rows) -> Numbers:
    """SHAPE.KEY: numbers() of each shape."""
    return {
        f"{SHAPES[name][0]}.{key}": value
        for name, found in _by_shape(rows).items()
        for key, value in numbers(found, RANDOM).items()
    }
