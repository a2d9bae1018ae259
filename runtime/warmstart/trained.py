"""warm.safetensors: what training found for one model, a strict reader, a writer, and what it makes of a summary.

Tensors, float32, of every layer blk.N: adapter_k.weight [n_head_kv, d_k, d_k], adapter_k.bias [n_head_kv, d_k], the
same for adapter_v with d_v, projector [m, m], prefix_k [n_head_kv, m, d_k] and prefix_v [n_head_kv, m, d_v]; and centre
[n], the mean embedding of the training prompts. Metadata: the fields of Trained under PREFIX, structured ones as JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from runtime.warmstart.errors import WarmStartError
from runtime.warmstart.frame import Frame
from runtime.warmstart.shapes import F32, Plan, counts, placed
from runtime.warmstart.summary import Summary
from subkv.base.files import atomic_file
from subkv.format.calibration import MAX_HEADS, MAX_LAYERS, canonical

if TYPE_CHECKING:
    from subkv.engine.model import Model

VERSION = "1"
PREFIX = "subkv.warm_start."
MAX_SIZE = 4096  # of a head

Placed = tuple[NDArray[np.int32], F32, F32]  # cells [m], k [m, n_head_kv, d_k], v [m, n_head_kv, d_v] of one layer


@dataclass(frozen=True)
class HeadShape:
    """K/V heads of one layer."""

    n_head_kv: int
    d_k: int
    d_v: int


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

    @classmethod
    def untrained(cls, shape: HeadShape, n_slots: int) -> LayerMaps:
        """Changes nothing; a prefix of zeros."""
        h, d_k, d_v = shape.n_head_kv, shape.d_k, shape.d_v

        def adapter(d: int) -> tuple[F32, F32]:
            return np.tile(np.eye(d, dtype=np.float32), (h, 1, 1)), np.zeros((h, d), np.float32)

        prefixes = (np.zeros((h, n_slots, d), np.float32) for d in (d_k, d_v))
        return cls(*adapter(d_k), *adapter(d_v), np.eye(n_slots, dtype=np.float32), *prefixes)

    @property
    def shape(self) -> HeadShape:
        return HeadShape(len(self.a_k), self.a_k.shape[-1], self.a_v.shape[-1])


# field of LayerMaps -> name of its tensor
_TENSORS = {
    "a_k": "adapter_k.weight",
    "b_k": "adapter_k.bias",
    "a_v": "adapter_v.weight",
    "b_v": "adapter_v.bias",
    "projector": "projector",
    "prefix_k": "prefix_k",
    "prefix_v": "prefix_v",
}


@dataclass(frozen=True, eq=False)
class Slots:
    """Adapted slots, by layer [n_head_kv, m, d]. Keys are as at position 0 and without the mass of the tokens that
    they stand for, which depends on the length of the prompt that they will be part of."""

    k: list[F32]
    v: list[F32]


@dataclass(frozen=True, eq=False)
class Trained:
    """identity: subkv.states.weights_digest of the model. embedding: kind of the embedding whose mean is `centre` [n].

    guard: coefficients of runtime.warmstart.guard, none: automatic warm starts never happen. provenance: for readers.
    """

    identity: str
    plan: Plan
    layers: tuple[LayerMaps, ...]
    frame: Frame
    embedding: str
    centre: F32
    guard: dict[str, float] = field(default_factory=dict)
    provenance: dict[str, str] = field(default_factory=dict)

    @classmethod
    def untrained(
        cls, identity: str, plan: Plan, shapes: list[HeadShape], frame: Frame, embedding: str, centre: F32
    ) -> Trained:
        """Slots are pooled tokens as they are: where every token has a slot of its own, the exact cache."""
        layers = tuple(LayerMaps.untrained(shape, plan.n_slots) for shape in shapes)
        return cls(identity, plan, layers, frame, embedding, centre)

    @property
    def digest(self) -> str:
        """Hex SHA-256 of all that decides what a library made with this file holds: not of guard and provenance."""
        digest = hashlib.sha256()
        values = {"identity": self.identity, "plan": asdict(self.plan), "embedding": self.embedding}
        digest.update(json.dumps(values, sort_keys=True).encode())
        for name, tensor in sorted(self._tensors().items()):
            digest.update(f"{name}\0{tensor.shape}\0".encode() + tensor.astype("<f4").tobytes())
        return digest.hexdigest()

    def check(self, identity: str, key: str = "--warm-file") -> None:
        """Refuse to serve another model. identity: of the one at hand. Raises WarmStartError."""
        if identity != self.identity:
            raise WarmStartError(
                key, f"expected a file trained for this model ({identity[:12]}…), found one for {self.identity[:12]}…"
            )

    #
    # use
    #

    def slots(self, summary: Summary, project: bool) -> Slots:
        """Adapt a summary; project: it is that of a similar prompt. Raises WarmStartError for one of another shape."""
        self._check_summary(summary)
        k, v = [], []
        for layer, keys, values in zip(self.layers, summary.k, summary.v, strict=True):
            adapted = (keys @ layer.a_k, values @ layer.a_v + layer.b_v[:, None])
            projected = [layer.projector @ slots if project else slots for slots in adapted]
            k.append(projected[0].astype(np.float32))
            v.append(projected[1].astype(np.float32))
        return Slots(k, v)

    def _check_summary(self, summary: Summary) -> None:
        m = self.plan.n_slots
        if len(summary.k) != len(self.layers) or len(summary.v) != len(self.layers):
            raise WarmStartError("summary", f"expected {len(self.layers)} layers, found {len(summary.k)}")
        for il, (layer, keys, values) in enumerate(zip(self.layers, summary.k, summary.v, strict=True)):
            shape = layer.shape
            expected = ((shape.n_head_kv, m, shape.d_k), (shape.n_head_kv, m, shape.d_v))
            if (keys.shape, values.shape) != expected:
                raise WarmStartError(
                    "summary", f"layer {il}: expected slots of {expected}, found {(keys.shape, values.shape)}"
                )

    def static(self) -> Slots:
        """The learned prefix, for any prompt."""
        return Slots([layer.prefix_k for layer in self.layers], [layer.prefix_v for layer in self.layers])

    def place(self, slots: Slots, n_tokens: int) -> list[Placed]:
        """Rows to plant for a prompt of n_tokens, by layer, keys rotated for the slots' mean positions t̂.

        The cells are the m before the last tokens: llama.cpp wants no gaps between positions, and what a key is rotated
        for need not be where its cell lies. Raises WarmStartError for a prompt shorter than its summary.
        """
        first, last = self.plan.span(n_tokens)
        m = self.plan.n_slots
        where = placed(self.plan, n_tokens)
        mass = np.log(counts(last - first, m)).astype(np.float32)
        cells = np.arange(last - m, last, dtype=np.int32)
        out: list[Placed] = []
        for layer, keys, values in zip(self.layers, slots.k, slots.v, strict=True):
            weighted = keys + layer.b_k[:, None] * mass[:, None]
            k = self.frame.rotate(weighted.transpose(1, 0, 2), where)
            out.append((cells, k, np.ascontiguousarray(values.transpose(1, 0, 2), dtype=np.float32)))
        return out

    #
    # file
    #

    def _tensors(self) -> dict[str, NDArray[Any]]:
        tensors: dict[str, NDArray[Any]] = {"centre": self.centre}
        for il, layer in enumerate(self.layers):
            for name, tensor in _TENSORS.items():
                tensors[f"blk.{il}.{tensor}"] = getattr(layer, name)
        return tensors

    def save(self, path: Path) -> None:
        """Write the file completely or not at all. Raises SubkvError that starts with `flag`."""
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
        blob = save(tensors, metadata={PREFIX + key: value for key, value in values.items()})
        with atomic_file(path) as handle:
            for part in canonical(blob):
                handle.write(part)

    @classmethod
    def load(cls, path: Path, model: Path, key: str = "--warm-file") -> Trained:
        """Read and validate a file for a model, whose frame is read, too; identity() tells whether it is the right one.

        Raises WarmStartError naming the key or tensor, what was expected and what was found, and as Frame.of.
        """
        return read(path, Frame.of(model), key)


def read(path: Path, frame: Frame, flag: str) -> Trained:
    """Trained.load with a frame at hand."""
    if not path.is_file():
        raise WarmStartError(flag, f"expected a file of python -m converter.warmstart, found no file at {path}")
    try:
        with safe_open(path, framework="numpy") as handle:
            metadata = handle.metadata() or {}
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, TypeError, ValueError) as error:
        raise WarmStartError(flag, f"{path} is not a readable safetensors file: {error}") from error
    header = _Header(metadata)
    plan = header.plan()
    layers = tuple(_read_layer(tensors, il, shape, plan) for il, shape in enumerate(header.shapes(frame)))
    centre = _take(tensors, "centre", (None,))
    if tensors:
        raise WarmStartError(min(tensors), "expected only the tensors of the listed layers, found this one")
    return Trained(
        identity=header.digest("identity"),
        plan=plan,
        layers=layers,
        frame=frame,
        embedding=header.text("embedding"),
        centre=centre,
        guard=header.members("guard", _is_number, "finite numbers"),
        provenance=header.members("provenance", lambda value: isinstance(value, str), "strings"),
    )


def identity_of(model: Model) -> str:
    """subkv.states.weights_digest of a model without a context."""
    from subkv.engine.states import weights_digest
    from subkv.native.binding import internals

    metadata = internals.LlamaModel.metadata(SimpleNamespace(model=model.handle))  # reads nothing but the handle
    return weights_digest(SimpleNamespace(model_path=str(model.path), model=model.handle, metadata=metadata))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _take(tensors: dict[str, NDArray[Any]], name: str, expected: tuple[int | None, ...]) -> F32:
    """Take a tensor out of `tensors` and validate it."""
    if name not in tensors:
        raise WarmStartError(name, "expected this tensor, found none")
    tensor = tensors.pop(name)
    fits = tensor.ndim == len(expected) and all(n in (None, m) for n, m in zip(expected, tensor.shape, strict=True))
    if tensor.dtype != np.float32 or not fits or not tensor.size:
        wanted = "[" + ", ".join("n" if n is None else str(n) for n in expected) + "]"
        raise WarmStartError(name, f"expected float32 {wanted}, found {tensor.dtype} {list(tensor.shape)}")
    if not np.isfinite(tensor).all():
        raise WarmStartError(name, "expected finite values, found NaN or infinity")
    return tensor


def _read_layer(tensors: dict[str, NDArray[Any]], il: int, shape: HeadShape, plan: Plan) -> LayerMaps:
    h, d_k, d_v, m = shape.n_head_kv, shape.d_k, shape.d_v, plan.n_slots
    shapes = {
        "a_k": (h, d_k, d_k),
        "b_k": (h, d_k),
        "a_v": (h, d_v, d_v),
        "b_v": (h, d_v),
        "projector": (m, m),
        "prefix_k": (h, m, d_k),
        "prefix_v": (h, m, d_v),
    }
    return LayerMaps(**{name: _take(tensors, f"blk.{il}.{_TENSORS[name]}", shape) for name, shape in shapes.items()})


class _Header:
    """Typed access to __metadata__; every defect names the key."""

    def __init__(self, metadata: dict[str, str]) -> None:
        self.metadata = metadata
        version = self.text("version")
        if version != VERSION:
            raise WarmStartError(f"{PREFIX}version", f"expected {VERSION}, found {version!r}")

    def text(self, key: str) -> str:
        if PREFIX + key not in self.metadata:
            raise WarmStartError(PREFIX + key, "expected this metadata string, found none")
        return self.metadata[PREFIX + key]

    def integer(self, key: str) -> int:
        text = self.text(key)
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise WarmStartError(PREFIX + key, f"expected an integer, found {text[:80]!r}")
        return int(text)

    def plan(self) -> Plan:
        try:
            return Plan(*(self.integer(name) for name in ("n_slots", "n_sink", "n_last")))
        except WarmStartError as error:
            key = error.key if error.key.startswith(PREFIX) else PREFIX + error.key
            raise WarmStartError(key, error.reason) from None

    def digest(self, key: str) -> str:
        text = self.text(key)
        if len(text) != 64 or set(text) - set("0123456789abcdef"):
            raise WarmStartError(PREFIX + key, f"expected 64 lower-case hex digits, found {text[:80]!r}")
        return text

    def _json(self, key: str) -> Any:
        text = self.text(key)
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise WarmStartError(PREFIX + key, f"expected JSON, found text that does not parse ({error})") from error

    def members(self, key: str, fits: Callable[[Any], bool], what: str) -> dict[str, Any]:
        value = self._json(key)
        if not isinstance(value, dict) or not all(fits(item) for item in value.values()):
            raise WarmStartError(PREFIX + key, f"expected a JSON object of {what}, found {self.text(key)[:80]!r}")
        return value

    def shapes(self, frame: Frame) -> list[HeadShape]:
        """Shapes of all layers. Keys must be of the size that the frame turns."""
        items = self._json("layers")
        if not isinstance(items, list) or not 1 <= len(items) <= MAX_LAYERS:
            raise WarmStartError(f"{PREFIX}layers", f"expected a JSON list of 1 to {MAX_LAYERS} layers")
        limits = {"n_head_kv": MAX_HEADS, "d_k": MAX_SIZE, "d_v": MAX_SIZE}
        for item in items:
            if (
                not isinstance(item, dict)
                or set(item) != set(limits)
                or not all(type(item[name]) is int and 1 <= item[name] <= high for name, high in limits.items())
                or item["d_k"] != frame.d_k
            ):
                raise WarmStartError(
                    f"{PREFIX}layers",
                    f"expected objects {{n_head_kv, d_k, d_v}} with the model's d_k of {frame.d_k}, found {item!r}",
                )
        return [HeadShape(**item) for item in items]
