"""warm.safetensors: what training found for one model, a strict reader, a writer, and what it makes of a summary.

Tensors, float32, of every layer blk.N: adapter_k.weight [n_head_kv, d_k, d_k], adapter_k.bias [n_head_kv, d_k], the
same for adapter_v with d_v, projector [m, m], prefix_k [n_head_kv, m, d_k] and prefix_v [n_head_kv, m, d_v]; and centre
[n], the mean embedding of the training prompts. Metadata: the fields of Trained under PREFIX, structured ones as JSON.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from converter.scoring import F32
from research.warmstart.frame import Frame
from research.warmstart.pooled import Plan, Slots, placed
from subkv.base.errors import SubkvError, concerning
from subkv.base.files import atomic_file
from subkv.format import sealed
from subkv.format.calibration import MAX_HEADS, MAX_LAYERS, parsed

if TYPE_CHECKING:
    from subkv.engine.model import Model

VERSION = "1"
PREFIX = "subkv.warm_start."
DIGEST = f"{PREFIX}digest"  # of the whole file (subkv.format.sealed)
MAX_SIZE = 4096  # of a head

Placed = tuple[F32, F32]  # rows to plant in one layer: k [m, n_head_kv, d_k], v [m, n_head_kv, d_v]

# field of LayerMaps -> name of its tensor, and its sizes: KV heads, keys' and values' size, slots (m)
TENSORS = {
    "a_k": ("adapter_k.weight", "hkk"),
    "b_k": ("adapter_k.bias", "hk"),
    "a_v": ("adapter_v.weight", "hvv"),
    "b_v": ("adapter_v.bias", "hv"),
    "projector": ("projector", "mm"),
    "prefix_k": ("prefix_k", "hmk"),
    "prefix_v": ("prefix_v", "hmv"),
}


@dataclass(frozen=True)
class HeadShape:
    """K/V heads of one layer."""

    n_head_kv: int
    d_k: int
    d_v: int

    def sizes(self, letters: str, n_slots: int) -> tuple[int, ...]:
        """Of a tensor, by its letters in TENSORS."""
        known = {"h": self.n_head_kv, "k": self.d_k, "v": self.d_v, "m": n_slots}
        return tuple(known[letter] for letter in letters)


@dataclass(frozen=True, eq=False)
class LayerMaps:
    """Everything trained for one layer. A slot x becomes x·a + b; of keys, b counts as often as log n says.

    a_k [n_head_kv, d_k, d_k], b_k [n_head_kv, d_k], a_v and b_v likewise. projector [m, m]: what slots of a similar
    prompt are multiplied with. prefix_k [n_head_kv, m, d_k], prefix_v: slots that suit the training prompts on average.
    """

    a_k: F32
    b_k: F32
    a_v: F32
    b_v: F32
    projector: F32
    prefix_k: F32
    prefix_v: F32

    @property
    def shape(self) -> HeadShape:
        return HeadShape(len(self.a_k), self.a_k.shape[-1], self.a_v.shape[-1])


@dataclass(frozen=True, eq=False)
class Trained:
    """identity: subkv.native.bases.model_content of the model. embedding: kind of the embedding whose mean is
    `centre` [n].

    guard: coefficients of the predictor, none: automatic warm starts never happen. provenance: for readers.
    """

    identity: str
    plan: Plan
    layers: tuple[LayerMaps, ...]
    frame: Frame
    embedding: str
    centre: F32
    guard: dict[str, float] = field(default_factory=dict)
    provenance: dict[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Hex SHA-256 of all that decides what a library made with this file holds: not of guard and provenance."""
        digest = hashlib.sha256()
        values = {"identity": self.identity, "plan": asdict(self.plan), "embedding": self.embedding}
        digest.update(json.dumps(values, sort_keys=True).encode())
        for name, tensor in sorted(self._tensors().items()):
            digest.update(f"{name}\0{tensor.shape}\0".encode() + tensor.astype("<f4").tobytes())
        return digest.hexdigest()

    #
    # use
    #

    def slots(self, summary: Slots, project: bool) -> Slots:
        """Adapt a summary; project: it is that of a similar prompt. Raises SubkvError for one of another shape."""
        if len(summary.k) != len(self.layers) or len(summary.v) != len(self.layers):
            raise SubkvError("summary", f"expected {len(self.layers)} layers, found {len(summary.k)}")
        out = Slots([], [])
        for il, (layer, keys, values) in enumerate(zip(self.layers, summary.k, summary.v, strict=True)):
            expected = tuple(layer.shape.sizes(letters, self.plan.n_slots) for letters in ("hmk", "hmv"))
            if (keys.shape, values.shape) != expected:
                raise SubkvError(
                    "summary", f"layer {il}: expected slots of {expected}, found {(keys.shape, values.shape)}"
                )
            adapted = (keys @ layer.a_k, values @ layer.a_v + layer.b_v[:, None])
            for side, slots in zip((out.k, out.v), adapted, strict=True):
                side.append((layer.projector @ slots if project else slots).astype(np.float32))
        return out

    def static(self) -> Slots:
        """The learned prefix, for any prompt."""
        return Slots([layer.prefix_k for layer in self.layers], [layer.prefix_v for layer in self.layers])

    def place(self, slots: Slots, n_tokens: int) -> list[Placed]:
        """Adapted slots as rows to plant for a prompt of n_tokens, keys rotated for the slots' mean positions t̂.

        What a key is rotated for need not be where its cell lies. Raises SubkvError for a prompt shorter than its
        summary.
        """
        where, mass = placed(self.plan, n_tokens)
        out: list[Placed] = []
        for layer, keys, values in zip(self.layers, slots.k, slots.v, strict=True):
            weighted = keys + layer.b_k[:, None] * mass.astype(np.float32)[:, None]
            k = self.frame.rotate(weighted.transpose(1, 0, 2), where)
            out.append((k, np.ascontiguousarray(values.transpose(1, 0, 2), dtype=np.float32)))
        return out

    #
    # file
    #

    def _tensors(self) -> dict[str, NDArray[Any]]:
        tensors: dict[str, NDArray[Any]] = {"centre": self.centre}
        for il, layer in enumerate(self.layers):
            tensors |= {f"blk.{il}.{tensor}": getattr(layer, name) for name, (tensor, _) in TENSORS.items()}
        return tensors

    def save(self, path: Path) -> None:
        """Write the file completely or not at all. Raises SubkvError about `output`."""
        values = {
            "version": VERSION,
            "identity": self.identity,
            **{name: str(value) for name, value in asdict(self.plan).items()},
            "layers": json.dumps([asdict(layer.shape) for layer in self.layers]),
            "embedding": self.embedding,
            "guard": json.dumps(self.guard, sort_keys=True),
            "provenance": json.dumps(self.provenance, sort_keys=True),
        }
        tensors = {name: np.ascontiguousarray(value, dtype=np.float32) for name, value in self._tensors().items()}
        metadata = {PREFIX + key: value for key, value in values.items()}
        with atomic_file(path) as handle:
            for part in sealed.pieces(tensors, metadata, DIGEST):
                handle.write(part)

    @classmethod
    def load(cls, path: Path, model: Model) -> Trained:
        """Read a file for a model. Raises SubkvError about `path` for one that was trained for another model, and as
        read() and Frame.of."""
        from subkv.native.bases import model_content  # loads the native libraries, which the format does not need

        found, own = read(path, Frame.of(model.path)), model_content(model.path)
        if own != found.identity:
            raise SubkvError(
                "path", f"expected a file trained for this model ({own[:12]}…), found one for {found.identity[:12]}…"
            )
        return found


def read(path: Path, frame: Frame) -> Trained:
    """Read and validate a file for a model with this frame.

    Raises SubkvError naming `path`, the metadata key or the tensor, what was expected and what was found.
    """
    if not path.is_file():
        raise SubkvError("path", f"expected a file of python -m research.warmstart train, found no file at {path}")
    try:
        with safe_open(path, framework="numpy") as handle:
            metadata = handle.metadata() or {}
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (not a dict)
        blob = path.read_bytes()
    except (SafetensorError, OSError, TypeError, ValueError) as error:
        raise SubkvError("path", f"{path} is not a readable safetensors file: {error}") from error
    header = _Header(metadata)
    plan = header.plan()
    layers = []
    for il, shape in enumerate(header.shapes(frame)):
        taken = {
            name: _take(tensors, f"blk.{il}.{tensor}", shape.sizes(letters, plan.n_slots))
            for name, (tensor, letters) in TENSORS.items()
        }
        layers.append(LayerMaps(**taken))
    centre = _take(tensors, "centre", None)
    if tensors:
        raise SubkvError(min(tensors), "expected only the tensors of the listed layers, found this one")
    trained = Trained(
        identity=header.matching("identity", r"[0-9a-f]{64}", "64 lower-case hex digits"),
        plan=plan,
        layers=tuple(layers),
        frame=frame,
        embedding=header.text("embedding"),
        centre=centre,
        guard=header.members("guard", _is_number, "finite numbers"),
        provenance=header.members("provenance", lambda value: isinstance(value, str), "strings"),
    )
    sealed.check(blob, metadata, DIGEST)
    return trained


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _take(tensors: dict[str, NDArray[Any]], name: str, shape: tuple[int, ...] | None) -> F32:
    """Take a tensor out of `tensors` and validate it. shape None: any [n]."""
    if name not in tensors:
        raise SubkvError(name, "expected this tensor, found none")
    tensor = tensors.pop(name)
    fits = tensor.ndim == 1 if shape is None else tensor.shape == shape
    if tensor.dtype != np.float32 or not fits or not tensor.size:
        expected = "[n]" if shape is None else list(shape)
        raise SubkvError(name, f"expected float32 {expected}, found {tensor.dtype} {list(tensor.shape)}")
    if not np.isfinite(tensor).all():
        raise SubkvError(name, "expected finite values, found NaN or infinity")
    return tensor


class _Header:
    """Typed access to __metadata__; every defect names the key."""

    def __init__(self, metadata: dict[str, str]) -> None:
        self.metadata = metadata
        version = self.text("version")
        if version != VERSION:
            raise SubkvError(
                f"{PREFIX}version", f"expected {VERSION}, found {version!r}; train again with this version of subkv"
            )

    def text(self, key: str) -> str:
        if PREFIX + key not in self.metadata:
            raise SubkvError(PREFIX + key, "expected this metadata string, found none")
        return self.metadata[PREFIX + key]

    def matching(self, key: str, pattern: str, expected: str) -> str:
        text = self.text(key)
        if not re.fullmatch(pattern, text):
            raise SubkvError(PREFIX + key, f"expected {expected}, found {text[:80]!r}")
        return text

    def plan(self) -> Plan:
        names = ("n_slots", "n_sink", "n_last")
        sizes = [int(self.matching(name, "[0-9]{1,9}", "an integer")) for name in names]
        with concerning(**{name: PREFIX + name for name in names}):
            return Plan(*sizes)

    def _json(self, key: str, fits: Callable[[Any], bool], expected: str) -> Any:
        text = self.text(key)
        value = parsed(PREFIX + key, text, "JSON")
        if not fits(value):
            raise SubkvError(PREFIX + key, f"expected {expected}, found {text[:80]!r}")
        return value

    def members(self, key: str, fits: Callable[[Any], bool], what: str) -> dict[str, Any]:
        found: dict[str, Any] = self._json(
            key,
            lambda value: isinstance(value, dict) and all(map(fits, value.values())),
            f"a JSON object of {what}",
        )
        return found

    def shapes(self, frame: Frame) -> list[HeadShape]:
        """Shapes of all layers. Keys must be of the size that the frame turns."""
        items = self._json(
            "layers",
            lambda value: isinstance(value, list) and 1 <= len(value) <= MAX_LAYERS,
            f"a JSON list of 1 to {MAX_LAYERS} layers",
        )
        limits = {"n_head_kv": MAX_HEADS, "d_k": MAX_SIZE, "d_v": MAX_SIZE}
        for item in items:
            if (
                not isinstance(item, dict)
                or set(item) != set(limits)
                or not all(type(item[name]) is int and 1 <= item[name] <= high for name, high in limits.items())
                or item["d_k"] != frame.d_k
            ):
                raise SubkvError(
                    f"{PREFIX}layers",
                    f"expected objects {{n_head_kv, d_k, d_v}} with the model's d_k of {frame.d_k}, found {item!r}",
                )
        return [HeadShape(**item) for item in items]
