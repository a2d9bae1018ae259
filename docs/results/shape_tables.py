"""Tables of speed for models of other shapes: research.shapes writes random weights, bench measures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from render import RANDOM, Numbers, Rows, wrapped
from speed_tables import bench, by_depth, numbers

SHAPES = {  # file: name in numbers, description above the table
    "llama-3.2-1b": (
        "1b",
        "**Llama-3.2-1B**: 16 layers, 32 query heads, 8 KV heads of 64, the full vocabulary of 128256 tokens.",
    ),
    "qwen3-0.6b": (
        "0.6b",
        "**Qwen3-0.6B**: 28 layers, 16 query heads, 8 KV heads of 128, the full vocabulary of 151936 tokens.",
    ),
    "llama-3.1-8b": (
        "8b",
        "**Llama-3.1-8B**, 4 of its 32 layers: 32 query heads, 8 KV heads of 128, a vocabulary of 32000 instead of "
        "128256. The whole model computes 8 times the layers and 4 times the vocabulary for a token.",
    ),
    "lfm2-350m": (
        "350m",
        "**LFM2-350M**, a hybrid: 6 of its 16 layers attend, with 16 query heads and 8 KV heads of 64, the others are "
        "short convolutions; the full vocabulary of 65536 tokens.",
    ),
    "llama-3.1-8b-whole": (
        "8b_whole",
        "**Llama-3.1-8B**, complete: 32 layers and a vocabulary of 128256 tokens; 4.2 GiB of weights.",
    ),
    "deepseek-v2-lite": (
        "mla",
        "**DeepSeek-V2-Lite**, 4 of its 27 layers: latent attention (MLA), 16 query heads read one row of 512 + 64 "
        "elements; dense feed-forward layers with as many weights as a token uses in the original; a vocabulary of "
        "32000 instead of 102400.",
    ),
    "qwen3.6-27b": (
        "27b",
        "**Qwen3.6-27B**, 4 of its 64 layers: 1 attends, with 24 query heads and 4 KV heads of 256, 3 have a gated "
        "delta rule; a vocabulary of 32000 instead of 248320. The whole model computes 16 times the layers and 8 times "
        "the vocabulary for a token.",
    ),
    "qwen3.6-35b-a3b": (
        "35b_a3b",
        "**Qwen3.6-35B-A3B**, 4 of its 40 layers: 1 attends, with 16 query heads and 2 KV heads of 256, 3 have a gated "
        "delta rule; the 8 experts of a token and the shared one, without the other 248; a vocabulary of 32000 "
        "instead of 248320. The whole model computes 10 times the layers and 8 times the vocabulary for a token, and "
        "selects experts.",
    ),
    "gemma-4-31b": (
        "gemma",
        "**Gemma-4-31B**, 6 of its 60 layers: 1 attends to all cells, with 32 query heads and 4 KV heads of 512, 5 to "
        "the last 1024 (their rows are f16 or q8_0); a vocabulary of 32000 instead of 262144. The whole model computes "
        "10 times the layers and 8 times the vocabulary for a token. Bytes count the layer that attends to all cells.",
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        "**gpt-oss-20b**, 4 of its 24 layers: 2 attend to all cells, with 64 query heads and 8 KV heads of 64, 2 to "
        "the last 128 (their rows are f16 or q8_0); the 4 experts of a token, without the other 28, in "
        "Q4_0 instead of MXFP4; a vocabulary of 32000 instead of 201088. The whole model computes 6 times the layers "
        "and 6 times the vocabulary for a token, and selects experts. Bytes count the layers that attend to all cells.",
    ),
}
OTHERS = ["llama-3.2-1b", "qwen3-0.6b", "llama-3.1-8b"]
SIZES = {"llama-3.1-8b-whole": ("llama-3.1-8b", "--layers", "32", "--vocab", "128256")}  # others: research.shapes' own
SMALL = ("--layers", "3", "--embd", "1024", "--ff", "256", "--vocab", "512")  # to try the programs
QUICK = ("-n", "4", "-d", "64", "-r", "1")
# Kinds of layers alternate. With experts a token reads few weights, so filling a large depth takes minutes.
# gemma-4-31b is omitted: it takes 11 minutes for 8000 tokens.
WITH_EXPERTS = ["qwen3.6-35b-a3b", "gpt-oss-20b"]
WITHOUT = ["lfm2-350m", "qwen3.6-27b"]


DEEP = "llama-3.2-1b"  # trained with 131072 tokens


def _measure(lab: Any, *words: str, shapes: Iterable[str] = OTHERS, flash: str = "on,off") -> Rows:
    """Rows of some shapes, each with the name of its shape."""
    rows = []
    for name in shapes:
        shape, *sizes = SIZES.get(name, (name,))
        small = SMALL[2:] if name in (*WITH_EXPERTS, "qwen3.6-27b") else SMALL  # a complete period of kinds
        model = lab.shape(name, shape, *lab.pick(sizes, small))
        for row in bench(lab, *words, "-fa", lab.pick(flash, "on"), model=model):
            cache = RANDOM if row["cache"] == "subkv" else row["cache"]
            rows.append({**row, "cache": cache, "shape": name})
    return rows


def decode(lab: Any) -> Rows:
    size = lab.pick(("-n", "8", "-d", "64,2048,8000,32000", "-r", "3"), QUICK)
    return _measure(lab, "-ctk", "f16,q8_0,q4_0,subkv", "-p", "0", *size)


def hybrids(lab: Any) -> Rows:
    """Every token is evaluated, because cells of recurrent layers and of windows cannot be copied.

    Flash attention off and the larger depth of dense models are omitted: they take an hour each.
    """
    rows = []
    for shapes, depths in ((WITH_EXPERTS, "64,8000,32000"), (WITHOUT, "64,8000")):
        size = lab.pick(("-n", "8", "-d", depths, "-r", "3"), QUICK)
        rows += _measure(lab, "-ctk", "f16,q8_0,subkv", "-p", "0", *size, shapes=shapes, flash="on")
    return rows


def latent(lab: Any) -> Rows:
    size = lab.pick(("-n", "8", "-d", "64,8000,32000", "-r", "3"), QUICK)
    return _measure(lab, "-ctk", "f16,q8_0,subkv", "-p", "0", *size, shapes=["deepseek-v2-lite"])


def prefill(lab: Any) -> Rows:
    size = lab.pick(("-p", "512", "-d", "8000", "-r", "2"), ("-p", "32", "-d", "64", "-r", "1"))
    return _measure(lab, "-ctk", "f16,subkv", "-n", "0", *size)


def deep(lab: Any) -> Rows:
    size = lab.pick(("-n", "8", "-d", "32000,128000", "-r", "3"), QUICK)
    return _measure(lab, "-ctk", "f16,subkv", "-p", "0", *size, shapes=[DEEP])


def whole(lab: Any) -> Rows:
    size = lab.pick(("-n", "8", "-d", "64,2048,8000,32000", "-r", "2"), QUICK)
    return _measure(lab, "-ctk", "f16,subkv", "-p", "0", *size, shapes=["llama-3.1-8b-whole"])


def _by_shape(rows: Rows) -> dict[str, Rows]:
    """Rows of each measured shape."""
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
