"""The native reader of subkv metadata on well-formed files (converter/FORMAT.md §1-3, §5)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from each import each
from format import native, writer
from format.writer import Bands, Layer
from gguf import GGUFValueType

LAYOUTS: dict[str, Callable[[], list[Layer]]] = {
    "banded": lambda: writer.random_layers(),
    "int8": lambda: writer.random_layers(3, 3, 64, 64, [(64, 8)], [(32, 8)]),
    "unequal heads sizes": lambda: writer.random_layers(1, 1, 192, 128, [(192, 3)], [(128, 2)]),
    "half": lambda: writer.random_layers(1, 2, 64, 64, [(64, 16)], [(8, 16), (56, 8)], kind="orthonormal"),
    "smallest": lambda: writer.random_layers(1, 1, 8, 8, [(8, 2)], [(8, 5)]),
    "largest head": lambda: writer.random_layers(1, 1, 256, 256, [(256, 16)], [(256, 2)]),
    "eight bands": lambda: writer.random_layers(
        1, 2, 64, 64, [(8, b) for b in (16, 8, 6, 5, 4, 3, 2, 2)], [(8, b) for b in (2, 3, 4, 5, 6, 8, 16, 8)]
    ),
    "some layers": lambda: writer.random_layers(il=[1, 4, 11]),
    "many heads": lambda: writer.random_layers(1, 65, 8, 8, [(8, 4)], [(8, 4)]),
    "a different layout in every head": lambda: mixed(),
    "E in bytes": lambda: writer.random_layers(2, 2, 64, 40, [(24, 8), (8, 3)], [(40, 4)], kind="bytes"),
    "E in bytes but for one entry": lambda: nearly_in_bytes(-1),
    "E in bytes of any step": lambda: steps(),
    "E and D in bytes from a row on": lambda: nearly_in_bytes(9),
}


def nearly_in_bytes(row: int) -> list[Layer]:
    layers = writer.random_layers(1, 1, 64, 64, [(40, 4)], [(8, 4)], kind="bytes")
    key = layers[0].k[0]
    key.decode[:] = key.encode
    for matrix in (key.encode, key.decode):
        of_row = matrix[row]
        of_row[-1] = np.nextafter(of_row[0] / 2, np.float16(0))  # of more bits than a whole multiple has
    return layers


def steps() -> list[Layer]:
    """Rows in multiples of halves, from the smallest to one that uses all bits; some have further common multiples."""
    layers = writer.random_layers(1, 1, 16, 16, [(16, 4)], [(8, 4)], kind="bytes")
    multiples = np.array([[64, 32], [90, 45], [100, 1], [120, 60], [126, 21], [127, 127], [105, 35], [96, 72]])
    half_steps = 2.0**-24 * np.array([1, 3]), np.array([1023 * 2.0**-10, 2047 * 2.0**-5])
    rows = [row * step for step in np.concatenate(half_steps) for row in multiples]
    layers[0].k[0].encode = np.tile(rows[::2], 8).astype(np.float16)
    layers[0].v[0].encode = np.tile(rows[1::4], 8).astype(np.float16)
    return layers


def mixed() -> list[Layer]:
    """Two layers with heads of different ranks and bands."""
    rng = np.random.default_rng(5)
    bands: list[Bands] = [[(8, 8)], [(16, 6), (8, 3)], [(64, 4)], [(8, 16), (24, 5), (32, 2)]]
    sides = [[[writer.head(rng, 64, b) for b in order] for order in (bands, bands[::-1])] for _ in range(2)]
    return [Layer(il, 64, 64, k, v) for il, (k, v) in enumerate(sides)]


@each("name", LAYOUTS)
def test_values(name: str, tmp_path: Path) -> None:
    layers = LAYOUTS[name]()
    layout = native.load(writer.write(tmp_path / "a.gguf", writer.metadata(layers)))
    shown = layout.json["layers"]
    assert [layer["il"] for layer in shown] == [layer.il for layer in layers]
    for got, want in zip(shown, layers, strict=True):
        assert (got["n_head_kv"], got["d_k"], got["d_v"]) == (len(want.k), want.d_k, want.d_v)
        for side, heads, d in (("k", want.k, want.d_k), ("v", want.v, want.d_v)):
            offset = 0
            for h, (head, expected) in enumerate(zip(got[side], heads, strict=True)):
                check_head(head, expected, offset, key=side == "k")
                for decode, matrix in ((False, expected.encode), (True, expected.decode)):
                    found = layout.basis(want.il, h, side == "v", decode, expected.rank * d)
                    assert np.array_equal(found.reshape(expected.rank, d), matrix.astype(np.float32))
                offset += expected.row_bytes
            assert got[f"{side}_row_bytes"] == offset
    sides = [h for layer in layers for h in layer.k + layer.v]
    assert layout.json["bytes_per_token"] == sum(h.row_bytes for h in sides)
    held = sum(
        h.held_bytes(key) for layer in layers for heads, key in ((layer.k, True), (layer.v, False)) for h in heads
    )
    assert layout.json["bytes_bases"] == held


def check_head(got: dict[str, Any], want: writer.Head, offset: int, key: bool) -> None:
    """Compares one head of the JSON; `offset` is where its row starts in the cell's row."""
    assert (got["rank"], got["row_bytes"], got["offset"]) == (want.rank, want.row_bytes, offset)
    assert got.get("gamma") == (pytest.approx(want.gamma, rel=1e-7) if key else None)
    assert got.get("centred") == (want.mean is not None and bool(want.mean.any()) if key else None)
    first, at = 0, 1
    for band, (n, bits), ratio in zip(got["bands"], want.bands, want.ratios, strict=True):
        assert (band["n"], band["bits"], band["first"], band["offset"]) == (n, bits, first, at)
        assert np.float32(band["ratio"]) == np.float32(ratio)
        first, at = first + n, at + n * bits // 8


def test_header(tmp_path: Path) -> None:
    keys = writer.metadata(writer.random_layers(), arch="llama", block_count=7, n_sink=0, n_recent=65536)
    keys["subkv.calibration.text"] = (GGUFValueType.STRING, 'quote " back \\ tab \t del \x7f ü 語 🙂')
    shown = native.load(writer.write(tmp_path / "a.gguf", writer.sealed(keys))).json
    calibration = shown.pop("calibration")
    for field, key in {
        "version": "version",
        "codec": "codec",
        "arch": "arch",
        "block_count": "block_count",
        "n_sink": "n_sink",
        "n_recent": "n_recent",
        "bpe_context": "bpe_context",
        "gamma": "gamma",
        "basis_k": "basis_k",
        "basis_v": "basis_v",
        "base_sha256": "base.sha256",
        "generator": "generator",
    }.items():
        assert shown[field] == keys[f"subkv.{key}"][1], field
    assert calibration == {
        "sha256": keys["subkv.calibration.sha256"][1],
        "tokens": keys["subkv.calibration.tokens"][1],
        "text": keys["subkv.calibration.text"][1],
    }
    assert np.float32(shown["bits_per_element"]) == np.float32(keys["subkv.bits_per_element"][1])
    assert np.float32(shown["bits_per_element_rows"]) == np.float32(keys["subkv.bits_per_element.rows"][1])


@each("name", LAYOUTS)
def test_fingerprint_follows_its_definition(name: str, tmp_path: Path) -> None:
    keys = writer.metadata(LAYOUTS[name](), block_count=40)
    layout = native.load(writer.write(tmp_path / "a.gguf", keys))
    assert layout.fingerprint == writer.fingerprint(keys)


def test_fingerprint_covers_all_decoding_data(tmp_path: Path) -> None:
    fingerprints = set()

    def add(keys: writer.Keys) -> int:
        fingerprints.add(native.load(writer.write(tmp_path / "a.gguf", writer.sealed(keys))).fingerprint)
        return len(fingerprints)

    layers = writer.random_layers()
    assert add(writer.metadata(layers)) == 1
    same = writer.metadata(layers)
    same["subkv.generator"] = (GGUFValueType.STRING, "another program")
    text = json.dumps({"layers": [dict(reversed(x.spec().items())) for x in layers]}, indent="\t\r\n ")
    same["subkv.layout"] = (GGUFValueType.STRING, text)
    assert add(same) == 1, "spaces, member order and provenance do not matter"
    assert add(writer.metadata(layers, n_sink=5)) == 2
    assert add(writer.metadata(layers, n_recent=5)) == 3
    assert add(writer.metadata(layers, arch="qwen2")) == 4
    layers[1].k[0].gamma *= 1.25
    assert add(writer.metadata(layers)) == 5
    layers[0].v[1].ratios[1] *= 1.25
    assert add(writer.metadata(layers)) == 6
    layers[1].v[1].decode[-1, -1] = 0
    assert add(writer.metadata(layers)) == 7
    layers[0].k[0].bands[0] = (8, 6)
    assert add(writer.metadata(layers)) == 8
    layers[0].k[1].mean = None
    assert add(writer.metadata(layers)) == 9


def test_unknown_keys_are_ignored(tmp_path: Path) -> None:
    keys = writer.metadata(writer.random_layers())
    before = native.load(writer.write(tmp_path / "a.gguf", keys)).json
    keys["subkv.version_of_something_else"] = (GGUFValueType.ARRAY, [1, 2, 3])
    keys["subkv.blk.0.more"] = (GGUFValueType.STRING, "x")
    assert native.load(writer.write(tmp_path / "b.gguf", writer.sealed(keys))).json == before


def test_model_with_tensors(tmp_path: Path) -> None:
    keys = writer.metadata(writer.random_layers())
    sidecar = native.load(writer.write(tmp_path / "a.gguf", keys))
    tensors: dict[str, npt.NDArray[Any]] = {"x": np.ones((3, 5), np.float32), "y": np.ones(7, np.float16)}
    assert native.load(writer.write(tmp_path / "b.gguf", keys, tensors)).json == sidecar.json


def test_present(tmp_path: Path) -> None:
    keys = writer.metadata(writer.random_layers())
    ordinary = {"general.architecture": keys["general.architecture"]}
    assert native.present(writer.write(tmp_path / "a.gguf", keys)) == 1
    assert native.present(writer.write(tmp_path / "b.gguf", ordinary)) == 0
    assert native.present(tmp_path / "missing.gguf") == -1
    assert "missing.gguf: expected a GGUF file, found no such file" in native.last_error()


def test_basis_arguments(tmp_path: Path) -> None:
    layout = native.load(writer.write(tmp_path / "a.gguf", writer.metadata(writer.random_layers(il=[1]))))
    for il, head, n, message in [
        (0, 0, 4096, "il: expected a coded layer, found 0"),
        (-1, 0, 4096, "il: expected a coded layer, found -1"),
        (1, 2, 4096, "head_kv: expected 0..1, found 2"),
        (1, -1, 4096, "head_kv: expected 0..1, found -1"),
        (1, 0, 1023, "n_out: expected room for 1024 values, found 1023"),
    ]:
        with pytest.raises(native.MetadataError, match=message):
            layout.basis(il, head, False, False, n)
