"""An independent writer of subkv metadata (converter/FORMAT.md §1-3), for tests only.

It shares no code with the converter or the native reader, so that the three can be tested against each other.

    layers = random_layers(n_layer=2, n_head_kv=2, d_k=32, d_v=32, seed=0)
    write(path, metadata(layers, arch="llama", block_count=2))
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFValueType, GGUFWriter

Bands = Sequence[tuple[int, int]]
Keys = dict[str, tuple[GGUFValueType, Any]]
Half = npt.NDArray[np.float16]

SHA = "0123456789abcdef" * 4
KEYS_DIGEST = "subkv.keys.sha256"


@dataclass
class Head:
    """K or V of one KV head. encode, decode: [rank, d] float16; ratios: one per band; gamma, mean [d]: K only."""

    bands: list[tuple[int, int]]
    ratios: list[float]
    encode: Half
    decode: Half
    gamma: float = 1.0
    mean: Half | None = None  # None: zeros

    @property
    def rank(self) -> int:
        """Coefficients kept."""
        return sum(n for n, _ in self.bands)

    @property
    def row_bytes(self) -> int:
        """Bytes of one cell's row: the scale byte and all codes."""
        return 1 + sum(n * bits // 8 for n, bits in self.bands)

    def held_bytes(self, key: bool) -> int:
        """Bytes in the native reader: E, D, and the mean and an offset of a key head with a mean."""
        centred = key and self.mean is not None and bool(self.mean.any())
        bases = matrix_bytes(self.encode) + matrix_bytes(self.decode)
        return bases + (2 * self.encode.shape[1] + 4 * self.rank) * centred

    def block(self, key: bool) -> bytes:
        """The head's part of the decoded basis string."""
        out = struct.pack("<f", self.gamma) if key else b""
        out += struct.pack(f"<{len(self.ratios)}f", *self.ratios)
        if key:
            mean = np.zeros(self.encode.shape[1]) if self.mean is None else self.mean
            out += mean.astype("<f2").tobytes()
        return out + self.encode.astype("<f2").tobytes() + self.decode.astype("<f2").tobytes()


@dataclass
class Layer:
    """One coded layer; k and v hold one Head per KV head. No v: a latent layer."""

    il: int
    d_k: int
    d_v: int
    k: list[Head]
    v: list[Head]

    def spec(self) -> dict[str, Any]:
        """This layer's entry of subkv.layout."""
        return {
            "il": self.il,
            "n_head_kv": len(self.k),
            "d_k": self.d_k,
            "d_v": self.d_v,
            "k": [[list(b) for b in h.bands] for h in self.k],
            "v": [[list(b) for b in h.bands] for h in self.v],
        }

    def block(self) -> bytes:
        """Decoded content of subkv.blk.N.basis."""
        values = self.v or [None] * len(self.k)
        return b"".join(k.block(True) + (v.block(False) if v else b"") for k, v in zip(self.k, values, strict=True))


def in_bytes(row: npt.NDArray[np.float16]) -> bool:
    """Whether its entries are whole multiples of one half, the largest 64 to 127 times it."""
    exact = row.astype(np.float64)
    steps = [float(np.float16(np.abs(exact).max() / times)) for times in range(64, 128)]
    return any(np.all(np.rint(exact / step) * step == exact) for step in steps)


def matrix_bytes(matrix: npt.NDArray[np.float16]) -> int:
    """Bytes in the native reader of E or D [r, d]: halves; its last groups of 8 rows use bytes where possible."""
    first = max((i + 1 for i, row in enumerate(matrix) if not in_bytes(row)), default=0)
    first = -(-first // 8) * 8
    return 2 * matrix[:first].size + matrix[first:].size + 2 * len(matrix[first:])


def orthonormal(rng: np.random.Generator, d: int) -> npt.NDArray[np.float64]:
    """A random orthonormal matrix [d, d]."""
    q, _ = np.linalg.qr(rng.standard_normal((d, d)))
    return np.asarray(q, dtype=np.float64)


def head(rng: np.random.Generator, d: int, bands: Bands, kind: str = "random") -> Head:
    """One head with bases of the given kind.

    random: unrelated E and D, random ratios, gamma and mean (for the reader's tests); bytes: the same, but E of whole
    multiples of a step; orthonormal: D = E = rows of a
    random rotation, ratios 1, gamma 1; identity: D = E = leading unit vectors.
    """
    rank = sum(n for n, _ in bands)
    ratios = [1.0] * len(bands)
    gamma = 1.0
    mean = None
    if kind in ("random", "bytes"):
        encode, decode = rng.standard_normal((2, rank, d))
        if kind == "bytes":
            codes = rng.integers(-127, 128, (rank, d))
            codes[:, 0] = rng.integers(64, 128, rank)
            encode = codes * 2.0 ** rng.integers(-12, 3, (rank, 1)) * rng.integers(8, 16, (rank, 1))
        ratios = [1.0 if bits == 16 else float(np.float32(rng.uniform(0.5, 2.0))) for _, bits in bands]
        gamma = float(np.float32(rng.uniform(0.5, 1.5)))
        mean = rng.standard_normal(d).astype(np.float16)
    elif kind == "orthonormal":
        encode = decode = orthonormal(rng, d)[:rank]
    elif kind == "identity":
        encode = decode = np.eye(d)[:rank]
    else:
        raise ValueError(f"kind: expected random, bytes, orthonormal or identity, found {kind!r}")
    return Head(list(bands), ratios, encode.astype(np.float16), decode.astype(np.float16), gamma, mean)


def random_layers(
    n_layer: int = 2,
    n_head_kv: int = 2,
    d_k: int = 32,
    d_v: int = 32,
    k_bands: Bands = ((8, 8), (8, 6), (16, 4)),
    v_bands: Bands = ((16, 6), (8, 3)),
    *,
    kind: str = "random",
    il: Sequence[int] | None = None,
    seed: int = 0,
) -> list[Layer]:
    """Layers `il` (default 0 .. n_layer-1) with the same bands in every head."""
    rng = np.random.default_rng(seed)
    return [
        Layer(
            i,
            d_k,
            d_v,
            [head(rng, d_k, k_bands, kind) for _ in range(n_head_kv)],
            [head(rng, d_v, v_bands, kind) for _ in range(n_head_kv)],
        )
        for i in (range(n_layer) if il is None else il)
    ]


def rows_bpe(layers: Sequence[Layer]) -> float:
    """Bits per K/V element of the coefficient rows alone."""
    bits = 8 * sum(h.row_bytes for layer in layers for h in [*layer.k, *layer.v])
    return bits / sum(len(layer.k) * (layer.d_k + layer.d_v) for layer in layers)


def metadata(
    layers: Sequence[Layer],
    arch: str = "llama",
    block_count: int | None = None,
    n_sink: int = 4,
    n_recent: int = 128,
    recent_bits: int = 16,
) -> Keys:
    """Every key of a converted model, as {key: (type, value)}; change entries to damage the file."""
    u32, f32, string = GGUFValueType.UINT32, GGUFValueType.FLOAT32, GGUFValueType.STRING
    keys: Keys = {
        "general.architecture": (string, arch),
        "subkv.version": (u32, 5),
        "subkv.codec": (string, "banded"),
        "subkv.arch": (string, arch),
        "subkv.block_count": (u32, layers[-1].il + 1 if block_count is None else block_count),
        "subkv.n_sink": (u32, n_sink),
        "subkv.n_recent": (u32, n_recent),
        **({"subkv.recent_bits": (u32, recent_bits)} if recent_bits != 16 else {}),
        "subkv.bits_per_element": (f32, rows_bpe(layers) + 0.25),
        "subkv.bits_per_element.rows": (f32, rows_bpe(layers)),
        "subkv.bpe_context": (u32, 8192),
        "subkv.gamma": (string, "calibrated"),
        "subkv.basis_k": (string, "query-aware"),
        "subkv.basis_v": (string, "output-aware"),
        "subkv.layout": (string, json.dumps({"layers": [layer.spec() for layer in layers]})),
        "subkv.base.sha256": (string, SHA),
        "subkv.calibration.sha256": (string, SHA[::-1]),
        "subkv.calibration.tokens": (GGUFValueType.UINT64, 123456789012),
        "subkv.calibration.text": (string, 'a.txt,"ü".txt'),
        "subkv.generator": (string, "tests/format/writer.py"),
    }
    for layer in layers:
        keys[f"subkv.blk.{layer.il}.basis"] = (string, base64.b64encode(layer.block()).decode())
    return sealed(keys)


def fingerprint(keys: Mapping[str, tuple[GGUFValueType, Any]]) -> str:
    """The definition in FORMAT.md §5."""
    layers = json.loads(keys["subkv.layout"][1])["layers"]
    members = ("il", "n_head_kv", "d_k", "d_v", "k", "v")
    canonical = {"layers": [{name: layer[name] for name in members} for layer in layers]}
    names = ("arch", "block_count", "n_sink", "n_recent", "recent_bits")
    values = [keys[f"subkv.{name}"][1] for name in names if f"subkv.{name}" in keys]
    if len(values) == len(names) and values[-1] == 16:
        values.pop()
    lines = ["subkv 4", *values, json.dumps(canonical, separators=(",", ":")), ""]
    digest = hashlib.sha256("\n".join(map(str, lines)).encode())
    for layer in layers:
        digest.update(base64.b64decode(keys[f"subkv.blk.{layer['il']}.basis"][1]))
    return digest.hexdigest()


def keys_digest(keys: Mapping[str, tuple[GGUFValueType, Any]]) -> str:
    """The definition in FORMAT.md §1.2."""
    digest, gguf = hashlib.sha256(), GGUFWriter("", arch="")
    for key in sorted(keys, key=str.encode):
        kind, value = keys[key]
        if key.startswith("subkv.") and not key.endswith(".basis") and key != KEYS_DIGEST:
            digest.update(struct.pack("<Q", len(key.encode())) + key.encode())
            digest.update(gguf._pack_val(value, kind, True, sub_type=_of_array(kind)))
    digest.update(fingerprint(keys).encode())
    return digest.hexdigest()


def _of_array(kind: GGUFValueType) -> GGUFValueType | None:
    return GGUFValueType.UINT32 if kind == GGUFValueType.ARRAY else None


def read(path: Path) -> Keys:
    """The keys of a sidecar."""
    fields = GGUFReader(path).fields
    return {name: (field.types[0], field.contents()) for name, field in fields.items() if not name.startswith("GGUF.")}


def sealed(keys: Keys) -> Keys:
    """The keys with their digest."""
    return {**keys, KEYS_DIGEST: (GGUFValueType.STRING, keys_digest(keys))}


def write(
    path: Path,
    keys: Mapping[str, tuple[GGUFValueType, Any]],
    tensors: Mapping[str, npt.NDArray[Any]] | None = None,
) -> Path:
    """Writes a GGUF with exactly these keys; without tensors it is a sidecar."""
    writer = GGUFWriter(path, arch="")
    writer.kv_data[0].clear()  # GGUFWriter adds general.architecture on its own
    for key, (vtype, value) in keys.items():
        writer.add_key_value(key, value, vtype, sub_type=_of_array(vtype))
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
