"""Layout + bases to GGUF keys (FORMAT.md §1 to §3). Reading and validating them is libsubkv's job; `read` asks it."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subkv.base.version import __version__
from subkv.format.bases import CodedHead, CodedLayer, StoredBasis, first_values
from subkv.format.calibration import Calibration
from subkv.format.layout import Layout
from subkv.format.window import Window
from subkv.native.gguf import Gguf, Value

VERSION = 4
FROM_WEIGHTS = "weights"  # subkv.calibration.text of bases that were made without text
PREDICTED_KEY = "subkv.predicted"
STORED_NAMES = {"calibrated": "calibrated", "sqrt": "sqrt_r_d", "one": "one"}  # of gamma, FORMAT.md §1


@dataclass(frozen=True)
class Account:
    """Everything counted, in bits per K/V element at `context`."""

    rows: float
    window: float
    bases: float
    bytes_per_token: int
    context: int

    @property
    def total(self) -> float:
        return self.rows + self.window + self.bases


@dataclass(frozen=True)
class Settings:
    """Choices that go into the header keys; method names as the command line spells them, of the window no rollback."""

    codec: str
    basis_k: str
    basis_v: str
    gamma: str
    window: Window
    adapt: str | None = None  # how contexts follow the text by default, subkv.format.adapt.parse


def generator() -> str:
    """Program and version, for the files' provenance."""
    return f"subkv {__version__}"


def layout_json(layers: Sequence[CodedLayer]) -> str:
    """FORMAT.md §2, without spaces."""
    items = [
        {
            **{name: getattr(layer.shape, name) for name in ("il", "n_head_kv", "d_k", "d_v")},
            "k": [head.k.bands for head in layer.heads],
            "v": [] if layer.latent else [head.v.bands for head in layer.heads],
        }
        for layer in layers
    ]
    return json.dumps({"layers": items}, separators=(",", ":"))


def basis_block(layer: CodedLayer) -> bytes:
    """FORMAT.md §3: for each head K then V, little-endian, no padding."""
    parts: list[NDArray[Any]] = []
    for head in layer.heads:
        parts.append(np.array([head.gamma], dtype="<f4"))
        sides = [
            (head.k.ratio, head.k.mean, head.k.encode, head.k.decode),
            (head.v.ratio, head.v.encode, head.v.decode),
        ]
        for ratio, *halves in sides[: 1 if layer.latent else 2]:
            parts += [ratio.astype("<f4"), *(half.astype("<f2") for half in halves)]
    return b"".join(part.tobytes() for part in parts)


def keys(
    layers: Sequence[CodedLayer],
    calibration: Calibration,
    settings: Settings,
    counted: Account,
    predicted: Mapping[str, float] | None = None,
) -> dict[str, Value]:
    """Every subkv.* key except subkv.base.sha256, which is known once the base has been read.

    predicted: nats per token of this layout ("subkv") and of llama.cpp's cache types.
    """
    values: dict[str, Value] = {
        "subkv.version": ("u32", VERSION),
        "subkv.codec": ("str", settings.codec),
        "subkv.arch": ("str", calibration.arch),
        "subkv.block_count": ("u32", calibration.block_count),
        "subkv.n_sink": ("u32", settings.window.n_sink),
        "subkv.n_recent": ("u32", settings.window.n_recent),
        "subkv.recent_bits": ("u32", settings.window.recent_bits),
        "subkv.bits_per_element": ("f32", counted.total),
        "subkv.bits_per_element.rows": ("f32", counted.rows),
        "subkv.bpe_context": ("u32", counted.context),
        "subkv.gamma": ("str", STORED_NAMES[settings.gamma]),
        "subkv.basis_k": ("str", settings.basis_k),
        "subkv.basis_v": ("str", settings.basis_v),
        "subkv.calibration.sha256": ("str", calibration.sha256),
        "subkv.calibration.tokens": ("u64", calibration.tokens),
        "subkv.calibration.text": ("str", ",".join(text.name for text in calibration.texts)),
        "subkv.generator": ("str", generator()),
        "subkv.layout": ("str", layout_json(layers)),
    }
    if settings.adapt is not None:
        values["subkv.adapt"] = ("str", settings.adapt)
    if predicted:
        values[PREDICTED_KEY] = ("str", json.dumps({name: float(f"{kld:.4g}") for name, kld in predicted.items()}))
    for layer in layers:
        values[f"subkv.blk.{layer.shape.il}.basis"] = ("str", base64.b64encode(basis_block(layer)).decode("ascii"))
    return values


def read_predicted(path: Path) -> dict[str, float] | None:
    """What keys() was given as `predicted`; None where the file does not say, or not as FORMAT.md §1 has it."""
    with Gguf(path, split=False) as file:
        text = file.get(PREDICTED_KEY)
    try:
        found = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not all(isinstance(kld, float | int) for kld in found.values()):
        return None
    return {name: float(kld) for name, kld in found.items()} if "subkv" in found else None


def read_heads(path: Path) -> dict[int, tuple[CodedHead, ...]]:
    """Bands and bases of every coded layer of a converted model or sidecar: basis_block read back.

    Raises SubkvError as read() does; what libsubkv accepts needs no further checks.
    """
    described = read(path)
    with Gguf(path) as file:
        return {
            layer["il"]: _heads(layer, base64.b64decode(file.get(f"subkv.blk.{layer['il']}.basis")))
            for layer in described["layers"]
        }


def _heads(layer: dict[str, Any], block: bytes) -> tuple[CodedHead, ...]:
    at = 0

    def take(dtype: str, *shape: int) -> NDArray[Any]:
        nonlocal at
        values = np.frombuffer(block, dtype, int(np.prod(shape)), at).reshape(shape)
        at += values.nbytes
        return values

    def stored(head: dict[str, Any], d: int, key: bool) -> StoredBasis:
        ratio = take("<f4", len(head["bands"]))
        mean = take("<f2", d) if key else np.zeros(d, dtype=np.float16)
        encode, decode = take("<f2", head["rank"], d), take("<f2", head["rank"], d)
        return StoredBasis(tuple((b["n"], b["bits"]) for b in head["bands"]), encode, decode, ratio, mean)

    heads = []
    for i, k in enumerate(layer["k"]):
        gamma, keys = float(take("<f4", 1)[0]), stored(k, layer["d_k"], True)
        latent = not layer["v"]
        values = first_values(keys, layer["d_v"]) if latent else stored(layer["v"][i], layer["d_v"], False)
        heads.append(CodedHead(keys, values, gamma))
    return tuple(heads)


def read(path: Path) -> dict[str, Any]:
    """Everything about a converted model or sidecar except the matrices (fields: FORMAT.md §5).

    Raises CacheError about `path`, with libsubkv's sentence, when any key is missing or damaged.
    """
    with Layout(path) as layout:
        return layout.description
