"""calib.safetensors: statistics in memory, strict reader, writer and merging (FORMAT.md §4)."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from subkv.base.errors import SubkvError, system_reason
from subkv.base.files import atomic_file
from subkv.format import sealed
from subkv.format.arrays import F16, F32, F64

VERSION = "1"
PREFIX = "subkv.calibration."
DIGEST = f"{PREFIX}digest"  # of the whole file (subkv.format.sealed)
PSD_TOLERANCE = 1e-4  # smallest eigenvalue may be −1e-4 × the largest
MAX_SAMPLES = 32  # stored rows per layer and kind
MAX_HEAD_SIZE = 576
MAX_LAYERS = 1024
MAX_HEADS = 1024


@dataclass(frozen=True)
class LayerShape:
    """Attention shape of one layer. scale: softmax scale. tokens: rows in its moments."""

    il: int
    n_head: int
    n_head_kv: int
    d_k: int
    d_v: int
    scale: float
    tokens: int

    @property
    def n_group(self) -> int:
        return self.n_head // self.n_head_kv


@dataclass(frozen=True)
class LayerSensitivity:
    """Effect of errors in one layer's cache on the next-token distributions; float64, after RoPE.

    k, v: [n_head_kv, d, d] symmetric. Independent errors of covariance C in the coded keys (values) of one head cost
    ½ tr(k C) nats of KLD per token (second order). Only coded cells count, beyond the exact window of
    Sensitivity.n_recent. k0, v0: the same without a recent window.
    """

    k: F64
    v: F64
    k0: F64
    v0: F64


@dataclass(frozen=True)
class Sensitivity:
    """How the layers' sensitivities were measured.

    tokens: number of measured positions. n_ctx: tokens of a chunk. correction: measured over predicted KLD of a layout
    with this window, on other text; correction0: the same for q8_0 without a window.
    """

    method: str
    tokens: int
    n_recent: int
    n_ctx: int
    correction: float = 1.0
    correction0: float = 1.0


@dataclass(frozen=True)
class Rotation:
    """A rotation R_p of keys and queries by position p: maps x to x·cos(omega·p) + x[partner]·sin(omega·p).

    partner: [d] int64, its own inverse; omega: [d] float64, radians per position, 0 for coordinates that are not
    rotated, and negative for one of two partners.
    """

    partner: NDArray[np.int64]
    omega: F64


@dataclass(frozen=True)
class LayerStats:
    """Statistics of one layer after RoPE, float64 unless noted.

    k2, q2: [n_head_kv, d_k, d_k]; v2: [n_head_kv, d_v, d_v] symmetric second moments (not centred; q2 is the mean over
    the group's heads). k1, q1: [n_head_kv, d_k]; v1: [n_head_kv, d_v] means. ks: [n_key, n_head_kv, d_k],
    vs: [n_key, n_head_kv, d_v], qs: [n_query, n_head, d_k] float16 rows of held-out text, possibly empty. rotation: if
    it was measured.
    """

    shape: LayerShape
    k2: F64
    q2: F64
    v2: F64
    k1: F64
    q1: F64
    v1: F64
    ks: F16
    vs: F16
    qs: F16
    sensitivity: LayerSensitivity | None = None
    rotation: Rotation | None = None

    @property
    def has_samples(self) -> bool:
        return len(self.ks) > 0 and len(self.qs) > 0


@dataclass(frozen=True)
class TextSource:
    name: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Calibration:
    """A calibration file. sha256: of the file, "" if it was not read from one."""

    arch: str
    name: str
    block_count: int
    n_ctx: int
    n_skip: int
    tokens: int
    texts: tuple[TextSource, ...]
    model_sha256: str
    generator: str
    layers: tuple[LayerStats, ...]
    sensitivity: Sensitivity | None = None  # None: no layer has one; else all have
    sha256: str = field(default="", compare=False)


# FORMAT.md §4: metadata keys with the names of members of Calibration; integers with limits
_TEXTS = ("arch", "name", "model_sha256", "generator")
_NUMBERS = {"block_count": (1, MAX_LAYERS), "n_ctx": (1, 2**31 - 1), "n_skip": (0, 2**31 - 1), "tokens": (1, 2**63 - 1)}
# members of the JSON objects in `texts`, `sensitivity` and `layers`, and their types
_SOURCE, _MEASURED, _SHAPE = map(get_type_hints, (TextSource, Sensitivity, LayerShape))
METHODS = ("fisher", "engine")
# tensors of a layer (members of LayerStats, the last of LayerSensitivity) and the members of LayerShape with their size
_MOMENTS = {"k2": "d_k", "q2": "d_k", "v2": "d_v"}
_MEANS = {"k1": "d_k", "q1": "d_k", "v1": "d_v"}
_SAMPLES = {"ks": ("n_head_kv", "d_k"), "vs": ("n_head_kv", "d_v"), "qs": ("n_head", "d_k")}
_SENSITIVITY = {"ek": ("k", "d_k"), "ev": ("v", "d_v"), "ek0": ("k0", "d_k"), "ev0": ("v0", "d_v")}


def pack(moments: F64) -> F32:
    """[n, d, d] symmetric -> [n, d(d+1)/2] float32, upper triangle by rows."""
    row, column = np.triu_indices(moments.shape[-1])
    return np.ascontiguousarray(moments[:, row, column], dtype=np.float32)


def unpack(packed: NDArray[Any], d: int) -> F64:
    """[n, d(d+1)/2] -> [n, d, d] float64, symmetric."""
    row, column = np.triu_indices(d)
    full = np.zeros((packed.shape[0], d, d), dtype=np.float64)
    full[:, row, column] = packed
    full[:, column, row] = packed
    return full


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write atomically. Raises SubkvError about `output` if the file cannot be written."""
    tensors: dict[str, NDArray[Any]] = {}
    for layer in calibration.layers:
        blk = f"blk.{layer.shape.il}."
        tensors |= {blk + key: pack(getattr(layer, key)) for key in _MOMENTS}
        tensors |= {blk + key: np.ascontiguousarray(getattr(layer, key), dtype=np.float32) for key in _MEANS}
        if layer.has_samples:
            tensors |= {blk + key: np.ascontiguousarray(getattr(layer, key), dtype=np.float16) for key in _SAMPLES}
        if layer.rotation is not None:
            tensors[f"{blk}partner"] = np.ascontiguousarray(layer.rotation.partner, dtype=np.int32)
            tensors[f"{blk}omega"] = np.ascontiguousarray(layer.rotation.omega, dtype=np.float64)
        if layer.sensitivity is not None:
            tensors |= {blk + key: pack(getattr(layer.sensitivity, name)) for key, (name, _) in _SENSITIVITY.items()}
    values = {
        "version": VERSION,
        **{key: str(getattr(calibration, key)) for key in (*_TEXTS, *_NUMBERS)},
        "texts": json.dumps([vars(text) for text in calibration.texts]),
        "layers": json.dumps([vars(layer.shape) for layer in calibration.layers]),
    }
    if calibration.sensitivity is not None:
        values["sensitivity"] = json.dumps(vars(calibration.sensitivity))
    metadata = {PREFIX + key: value for key, value in values.items()}
    with atomic_file(path) as handle:
        for part in sealed.pieces(tensors, metadata, DIGEST):
            handle.write(part)


def parsed(key: str, text: str, form: str) -> Any:
    """Parse JSON in a file's metadata. Raises SubkvError about `key` if it is invalid JSON or Unicode."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # rejects escaped lone surrogates
    except (ValueError, RecursionError) as error:
        raise SubkvError(key, f"expected {form}, found text that does not parse ({error})") from error
    return value


def read_calibration(path: Path) -> Calibration:
    """Read and validate a calibration file.

    Raises SubkvError about `calibration`, a key or a tensor: not a safetensors file, missing or unknown tensors, wrong
    shape or dtype, NaN or infinity, moments that are not positive semi-definite, unknown version, invalid metadata.
    """
    if not path.is_file():
        raise SubkvError("calibration", f"expected a calibration file, found no file at {path}")
    try:
        with open(path, "rb"), safe_open(path, framework="numpy") as handle:
            metadata = handle.metadata() or {}
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (not a dict)
        blob = path.read_bytes()
    except (OSError, MemoryError) as error:
        raise SubkvError("calibration", f"cannot read {path}: {system_reason(error)}") from error
    except (SafetensorError, TypeError, ValueError) as error:
        raise SubkvError("calibration", f"{path} is not a readable safetensors file: {error}") from error
    header = _Header(metadata)
    members = header.members()
    sensitivity = header.sensitivity()
    layers = tuple(
        _read_layer(tensors, shape, sensitivity is not None) for shape in header.shapes(members["block_count"])
    )
    if tensors:
        raise SubkvError(min(tensors), "expected only tensors of FORMAT.md §4 for the listed layers, found this one")
    texts = header.texts()
    sealed.check(blob, metadata, DIGEST)  # last, so that a defect that has a name is reported by it
    digest = hashlib.sha256(blob).hexdigest()
    return Calibration(**members, texts=texts, layers=layers, sensitivity=sensitivity, sha256=digest)


def _has(item: dict[str, Any], members: dict[str, type]) -> bool:
    """Whether the object has exactly these members, of these types."""
    return set(item) == set(members) and all(type(item[key]) is kind for key, kind in members.items())


class _Header:
    """Typed access to __metadata__. Methods raise SubkvError about the key."""

    def __init__(self, metadata: dict[str, str]) -> None:
        self._metadata = metadata
        version = self._text("version")
        if version != VERSION:
            raise SubkvError(
                f"{PREFIX}version", f"expected {VERSION}, found {version!r}; calibrate again with this version of subkv"
            )

    def _text(self, key: str) -> str:
        if PREFIX + key not in self._metadata:
            raise SubkvError(PREFIX + key, "expected this metadata string, found none")
        return self._metadata[PREFIX + key]

    def members(self) -> dict[str, Any]:
        """The string and integer members of Calibration."""
        values: dict[str, Any] = {key: self._text(key) for key in (*_TEXTS, *_NUMBERS)}
        for key, (low, high) in _NUMBERS.items():
            text = values[key]
            values[key] = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
            if not low <= values[key] <= high:
                raise SubkvError(PREFIX + key, f"expected an integer from {low} to {high}, found {text!r}")
        digest = values["model_sha256"]
        if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise SubkvError(f"{PREFIX}model_sha256", f"expected 64 lower-case hex digits, found {digest!r}")
        return values

    def _objects(self, key: str) -> list[dict[str, Any]]:
        text = self._text(key)
        value = parsed(PREFIX + key, text, "a JSON list")
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise SubkvError(PREFIX + key, f"expected a JSON list of objects, found {text[:80]!r}")
        return value

    def texts(self) -> tuple[TextSource, ...]:
        items = self._objects("texts")
        for item in items:
            if not _has(item, _SOURCE):
                raise SubkvError(f"{PREFIX}texts", f"expected objects {{{', '.join(_SOURCE)}}}, found {item!r}")
        return tuple(TextSource(**item) for item in items)

    def sensitivity(self) -> Sensitivity | None:
        """None if the file has none."""
        if PREFIX + "sensitivity" not in self._metadata:
            return None
        text = self._text("sensitivity")
        try:
            item = json.loads(text)
        except (ValueError, RecursionError):
            item = None
        if (
            not isinstance(item, dict)
            or not _has(item, _MEASURED)
            or item["method"] not in METHODS
            or item["n_recent"] < 0
            or not all(0 < item[key] < math.inf for key in ("tokens", "n_ctx", "correction", "correction0"))
        ):
            raise SubkvError(
                f"{PREFIX}sensitivity",
                f"expected a JSON object of {', '.join(_MEASURED)} (method {' or '.join(METHODS)}, "
                f"numbers positive), found {text[:80]!r}",
            )
        return Sensitivity(**item)

    def shapes(self, block_count: int) -> list[LayerShape]:
        """Shapes of the listed layers, in ascending order."""
        shapes = [_read_shape(item, block_count) for item in self._objects("layers")]
        if not shapes:
            raise SubkvError(f"{PREFIX}layers", "expected at least one layer, found none")
        order = [shape.il for shape in shapes]
        if order != sorted(set(order)):
            raise SubkvError(f"{PREFIX}layers", f"expected ascending distinct il, found {order}")
        return shapes


def _read_shape(item: dict[str, Any], block_count: int) -> LayerShape:
    key = f"{PREFIX}layers"
    if set(item) != set(_SHAPE):
        raise SubkvError(key, f"expected the members {', '.join(_SHAPE)}, found {', '.join(sorted(item))}")
    limits = {
        "il": (0, block_count - 1, 1),
        "n_head": (1, 65536, 1),
        "n_head_kv": (1, MAX_HEADS, 1),
        "d_k": (8, MAX_HEAD_SIZE, 8),
        "d_v": (8, MAX_HEAD_SIZE, 8),
        "tokens": (1, 2**63 - 1, 1),
    }
    for name, (low, high, step) in limits.items():
        if type(item[name]) is not int or not low <= item[name] <= high:
            raise SubkvError(key, f"expected {name} to be an integer from {low} to {high}, found {item[name]!r}")
        if item[name] % step:
            raise SubkvError(key, f"expected {name} to be a multiple of {step}, found {item[name]}")
    if item["n_head"] % item["n_head_kv"]:
        raise SubkvError(
            key, f"expected n_head to be a multiple of n_head_kv, found {item['n_head']} and {item['n_head_kv']}"
        )
    scale = item["scale"]
    if type(scale) not in (int, float) or not 0 < scale <= sys.float_info.max:
        raise SubkvError(key, f"expected scale to be a positive number, found {scale!r}")
    return LayerShape(**{**item, "scale": float(scale)})


def _read_layer(tensors: dict[str, NDArray[Any]], shape: LayerShape, sensitive: bool) -> LayerStats:
    """Remove the layer's tensors from `tensors` and validate them. sensitive: the file has sensitivities."""
    blk = f"blk.{shape.il}."

    def take(key: str, dtype: type[np.generic], expected: tuple[int | None, ...]) -> NDArray[Any]:
        name = blk + key
        if name not in tensors:
            raise SubkvError(name, "expected this tensor, found none")
        tensor = tensors.pop(name)
        fits = tensor.ndim == len(expected) and all(
            n is None or n == m for n, m in zip(expected, tensor.shape, strict=True)
        )
        if tensor.dtype != dtype or not fits:
            dims = ", ".join("n" if n is None else str(n) for n in expected)
            raise SubkvError(name, f"expected {np.dtype(dtype)} [{dims}], found {tensor.dtype} {list(tensor.shape)}")
        if not np.isfinite(tensor).all():
            raise SubkvError(name, "expected finite values, found NaN or infinity")
        return tensor

    def moments(key: str, d: int) -> F64:
        full = unpack(take(key, np.float32, (shape.n_head_kv, d * (d + 1) // 2)), d)
        for head, values in enumerate(np.linalg.eigvalsh(full)):
            if values[-1] < 0 or values[0] < -PSD_TOLERANCE * values[-1]:
                raise SubkvError(
                    blk + key,
                    f"expected a positive semi-definite matrix for head {head}, "
                    f"found eigenvalues from {values[0]:.3g} to {values[-1]:.3g}",
                )
        return full

    stats: dict[str, Any] = {key: moments(key, getattr(shape, d)) for key, d in _MOMENTS.items()}
    for key, d in _MEANS.items():
        stats[key] = take(key, np.float32, (shape.n_head_kv, getattr(shape, d))).astype(np.float64)
    sampled = any(blk + key in tensors for key in _SAMPLES)
    for key, (heads, d) in _SAMPLES.items():
        size = getattr(shape, heads), getattr(shape, d)
        stats[key] = take(key, np.float16, (None, *size)) if sampled else np.zeros((0, *size), dtype=np.float16)
    if len(stats["ks"]) != len(stats["vs"]):
        raise SubkvError(f"{blk}vs", f"expected {len(stats['ks'])} rows as in ks, found {len(stats['vs'])}")
    if f"{blk}partner" in tensors:
        partner = take("partner", np.int32, (shape.d_k,)).astype(np.int64)
        omega = take("omega", np.float64, (shape.d_k,))
        _check_rotation(blk, partner, omega)
        stats["rotation"] = Rotation(partner, omega)
    if sensitive:
        measured = {name: moments(key, getattr(shape, d)) for key, (name, d) in _SENSITIVITY.items()}
        stats["sensitivity"] = LayerSensitivity(**measured)
    return LayerStats(shape=shape, **stats)


def _check_rotation(blk: str, partner: NDArray[np.int64], omega: F64) -> None:
    """Raises SubkvError about a tensor unless it is a rotation by at most π per position."""
    d = len(partner)
    if not ((partner >= 0) & (partner < d)).all() or (partner[partner] != np.arange(d)).any():
        raise SubkvError(f"{blk}partner", f"expected numbers below {d} that are pairs, found others")
    if (np.abs(omega) > np.pi).any() or (omega != -omega[partner]).any():
        raise SubkvError(f"{blk}omega", "expected angles up to π that differ in sign between partners, found others")


def thin(rows: F16) -> F16:
    """At most MAX_SAMPLES of the rows, evenly spread."""
    n = min(len(rows), MAX_SAMPLES)
    return rows[np.linspace(0, len(rows) - 1, n).round().astype(np.int64)]


def check_mergeable(earlier: Calibration, arch: str, name: str, block_count: int, n_skip: int) -> None:
    """Reject a file of another model. Raises SubkvError. merge() checks the layers' shapes."""
    expected = {"arch": arch, "name": name, "block_count": block_count, "n_skip": n_skip}
    for key, value in expected.items():
        stored = getattr(earlier, key)
        if stored != value:
            raise SubkvError("calibration", f"{PREFIX}{key}: expected {value!r} as in this run, found {stored!r}")


def merge(earlier: Calibration, later: Calibration) -> Calibration:
    """Combine two runs of one model: moments are weighted by tokens, samples thinned to MAX_SAMPLES.

    n_ctx is the smaller one (positions.py spreads from there). model_sha256 and generator are those of `later`, also
    its sensitivities, if any. Raises SubkvError if the models differ.
    """
    check_mergeable(earlier, later.arch, later.name, later.block_count, later.n_skip)
    shapes, expected = ([replace(layer.shape, tokens=0) for layer in run.layers] for run in (earlier, later))
    for pair in zip(expected, shapes, strict=False):
        if pair[0] != pair[1]:
            raise SubkvError("calibration", f"{PREFIX}layers: expected {pair[0]}, found {pair[1]}")
    if len(shapes) != len(expected):
        reason = f"{PREFIX}layers: expected {len(expected)} layers, found {len(shapes)}"
        raise SubkvError("calibration", reason)
    return replace(
        later,
        layers=tuple(_merge_layer(a, b) for a, b in zip(earlier.layers, later.layers, strict=True)),
        tokens=earlier.tokens + later.tokens,
        texts=tuple(dict.fromkeys(earlier.texts + later.texts)),
        n_ctx=min(earlier.n_ctx, later.n_ctx),
        sensitivity=later.sensitivity or earlier.sensitivity,
        sha256="",
    )


def _merge_layer(a: LayerStats, b: LayerStats) -> LayerStats:
    total = a.shape.tokens + b.shape.tokens
    share = a.shape.tokens / total
    stats: dict[str, Any] = {
        key: share * getattr(a, key) + (1 - share) * getattr(b, key) for key in (*_MOMENTS, *_MEANS)
    }
    stats |= {key: thin(np.concatenate([getattr(a, key), getattr(b, key)])) for key in _SAMPLES}
    measured = {name: getattr(b, name) or getattr(a, name) for name in ("sensitivity", "rotation")}
    return LayerStats(replace(a.shape, tokens=total), **stats, **measured)
