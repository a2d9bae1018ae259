"""Writes layout and bases as GGUF keys (FORMAT.md §1 to §3). libsubkv reads and validates them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subkv.base.version import __version__
from subkv.format.bases import CodedHead, CodedLayer, SharedHead, StoredBasis, first_values
from subkv.format.calibration import Calibration
from subkv.format.layout import Layout
from subkv.format.window import Window
from subkv.native import library
from subkv.native.digest import Value
from subkv.native.gguf import Gguf

VERSION = 5
PREDICTED_KEY = "subkv.predicted"
STORED_NAMES = {"calibrated": "calibrated", "sqrt": "sqrt_r_d", "one": "one"}  # gamma in files, FORMAT.md §1


@dataclass(frozen=True)
class Account:
    """The parts of the budget, in bits per K/V element at `context` tokens."""

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
    """Settings that the header keys store, except n_rollback. Methods have the names of the command line."""

    codec: str
    basis_k: str
    basis_v: str
    gamma: str
    window: Window


@dataclass(frozen=True)
class Plan:
    """A layout for one budget in bits per element. narrow: D is in bytes; predicted: nats of KLD per token."""

    budget: float
    layers: tuple[CodedLayer, ...]
    counted: Account
    recent_bits: int
    narrow: bool
    predicted: float | None


@dataclass(frozen=True)
class Plans:
    """Plans for further budgets, and the bases that they share: heads of every coded layer by `il`.

    budget: that of the file's own layout.
    """

    budget: float
    plans: tuple[Plan, ...]
    shared: Mapping[int, Sequence[SharedHead]]

    def keys(self) -> dict[str, Value]:
        """FORMAT.md §3.3."""
        values: dict[str, Value] = {"subkv.budget": ("f32", self.budget)}
        if not self.plans:
            return values
        values["subkv.plans"] = ("u32", len(self.plans))
        for i, plan in enumerate(self.plans):
            factors = b"".join(part.tobytes() for layer in plan.layers for part in _factors(layer))
            named: dict[str, Value] = {
                "budget": ("f32", plan.budget),
                "bits_per_element": ("f32", plan.counted.total),
                "bits_per_element.rows": ("f32", plan.counted.rows),
                "recent_bits": ("u32", plan.recent_bits),
                "decode_in_bytes": ("u32", int(plan.narrow)),
                "layout": ("str", layout_json(plan.layers)),
                "factors": ("str", base64.b64encode(factors).decode("ascii")),
            }
            if plan.predicted:
                named["predicted"] = ("f32", plan.predicted)
            values |= {f"subkv.plan.{i}.{name}": value for name, value in named.items()}
        for il, heads in self.shared.items():
            block = b"".join(head.mean.astype("<f2").tobytes() + head.k.stored() + head.v.stored() for head in heads)
            values[f"subkv.blk.{il}.encode"] = ("str", base64.b64encode(block).decode("ascii"))
        return values


def _factors(layer: CodedLayer) -> Iterator[NDArray[Any]]:
    """gamma and ratios of every head, as in basis_block()."""
    for head in layer.heads:
        yield np.array([head.gamma], dtype="<f4")
        yield head.k.ratio.astype("<f4")
        yield head.v.ratio.astype("<f4")


def generator() -> str:
    """Program and version, stored in files."""
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
    plans: Plans | None = None,
) -> dict[str, Value]:
    """All subkv.* keys except subkv.base.sha256 and subkv.keys.sha256, which are computed while the base is copied.

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
    if settings.window.adapt is not None:
        values["subkv.adapt"] = ("str", settings.window.adapt)
    if predicted:
        values[PREDICTED_KEY] = ("str", json.dumps({name: float(f"{kld:.4g}") for name, kld in predicted.items()}))
    if plans is not None:
        values |= plans.keys()
    for layer in layers:
        values[f"subkv.blk.{layer.shape.il}.basis"] = ("str", base64.b64encode(basis_block(layer)).decode("ascii"))
    return values


def read_predicted(path: Path) -> dict[str, float] | None:
    """The `predicted` of keys(); None if missing or invalid (FORMAT.md §1)."""
    with Gguf(path, split=False) as file:
        text = file.get(PREDICTED_KEY)
    try:
        values = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or not all(isinstance(kld, float | int) for kld in values.values()):
        return None
    return {name: float(kld) for name, kld in values.items()} if "subkv" in values else None


def predicted_of(described: Mapping[str, Any], of_default: Mapping[str, float] | None) -> dict[str, float] | None:
    """The predictions for a layout, default or a plan, from its description and those for the file's default."""
    own = next((plan["predicted"] for plan in described["plans"] if plan["budget"] == described["budget"]), None)
    if of_default is None or own == 0:
        return None
    return dict(of_default) if own is None else {**of_default, "subkv": own}


def read_heads(path: Path) -> dict[int, tuple[CodedHead, ...]]:
    """Bands and bases of every coded layer of a converted model or sidecar.

    Raises CacheError as read().
    """
    with Layout(path) as layout:
        return heads_of(layout)


def heads_of(layout: Layout) -> dict[int, tuple[CodedHead, ...]]:
    """Bands and bases of every coded layer, by `il`."""
    layers = layout.description["layers"]
    return {layer["il"]: tuple(_head(layout, layer, h) for h in range(layer["n_head_kv"])) for layer in layers}


def _head(layout: Layout, layer: dict[str, Any], h: int) -> CodedHead:
    keys = _basis(layout, layer, h, value=False)
    values = _basis(layout, layer, h, value=True) if layer["v"] else first_values(keys, layer["d_v"])
    return CodedHead(keys, values, float(np.float32(layer["k"][h]["gamma"])))


def _basis(layout: Layout, layer: dict[str, Any], h: int, value: bool) -> StoredBasis:
    side, lib = "v" if value else "k", library.load()
    head, d = layer[side][h], layer[f"d_{side}"]
    place = layout.handle, layer["il"], h
    matrices, mean = np.empty((2, head["rank"], d), np.float32), np.zeros(d, np.float32)
    for is_decode, matrix in enumerate(matrices):
        lib.subkv_layout_basis(*place, value, bool(is_decode), matrix.ctypes.data, matrix.size)
    if not value:
        lib.subkv_layout_mean(*place, mean.ctypes.data, d)
    bands = tuple((band["n"], band["bits"]) for band in head["bands"])
    ratio = np.array([band["ratio"] for band in head["bands"]], np.float32)
    encode, decode = matrices.astype(np.float16)
    return StoredBasis(bands, encode, decode, ratio, mean.astype(np.float16))


def read(path: Path) -> dict[str, Any]:
    """The description of a converted model or sidecar, without matrices (fields: subkv.h).

    Raises CacheError about `path`, with libsubkv's sentence, if a key is missing or damaged.
    """
    with Layout(path) as layout:
        return layout.description
