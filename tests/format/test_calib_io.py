"""calib.safetensors: round trip, every malformation by name, merging."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import damage
import numpy as np
import pytest
from calib_synthetic import random_calibration
from each import each
from hypothesis import given
from safetensors import safe_open
from safetensors.numpy import save_file

from subkv.base.errors import SubkvError
from subkv.base.files import atomic_file, check_writable
from subkv.format.calibration import (
    PREFIX,
    Calibration,
    LayerSensitivity,
    Rotation,
    Sensitivity,
    merge,
    pack,
    read_calibration,
    thin,
    unpack,
    write_calibration,
)

MOMENTS = ("k2", "q2", "v2", "k1", "q1", "v1")
SAMPLES = ("ks", "vs", "qs")
METADATA = (
    *("version", "arch", "name", "block_count", "n_ctx", "n_skip"),
    *("tokens", "texts", "model_sha256", "layers", "generator", "digest"),
)


def test_round_trip(tmp_path: Path) -> None:
    calibration = random_calibration(n_layer=3)
    path = tmp_path / "c.safetensors"
    write_calibration(path, calibration)
    back = read_calibration(path)
    assert replace(back, layers=(), sha256="") == replace(calibration, layers=())
    assert len(back.sha256) == 64
    for old, new in zip(calibration.layers, back.layers, strict=True):
        assert new.shape == old.shape
        for key in MOMENTS:
            np.testing.assert_array_equal(getattr(new, key), getattr(old, key).astype(np.float32))
        for key in SAMPLES:
            np.testing.assert_array_equal(getattr(new, key), getattr(old, key))


def test_writing_is_reproducible(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_calibration(tmp_path / name, random_calibration())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_layer_without_samples_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    write_calibration(path, random_calibration(samples=0))
    assert not read_calibration(path).layers[0].has_samples


def test_file_has_the_tensors_of_the_format(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    write_calibration(path, random_calibration(n_layer=1))
    with safe_open(path, framework="numpy") as handle:
        found = {name: (handle.get_tensor(name).dtype.name, handle.get_tensor(name).shape) for name in handle.keys()}  # noqa: SIM118 (not a dict)
        metadata = handle.metadata()
    triangle = 32 * 33 // 2
    assert found == {
        **{f"blk.0.{key}": ("float32", (2, triangle)) for key in ("k2", "q2", "v2")},
        **{f"blk.0.{key}": ("float32", (2, 32)) for key in ("k1", "q1", "v1")},
        "blk.0.ks": ("float16", (32, 2, 32)),
        "blk.0.vs": ("float16", (32, 2, 32)),
        "blk.0.qs": ("float16", (32, 4, 32)),
    }
    assert set(metadata) == {PREFIX + name for name in METADATA}


def test_packing_is_the_upper_triangle_by_rows() -> None:
    matrix = np.array([[[1.0, 2.0, 3.0], [2.0, 4.0, 5.0], [3.0, 5.0, 6.0]]])
    np.testing.assert_array_equal(pack(matrix), [[1, 2, 3, 4, 5, 6]])
    np.testing.assert_array_equal(unpack(pack(matrix), 3), matrix)


Tensors = dict[str, np.ndarray]


@pytest.fixture
def damaged(tmp_path: Path) -> Callable[..., str]:
    """damaged(change) applies change(tensors, metadata) to a good file and returns the reader's sentence."""

    def sentence(change: Callable[[Tensors, dict[str, str]], Any]) -> str:
        path = tmp_path / "c.safetensors"
        write_calibration(path, random_calibration())
        with safe_open(path, framework="numpy") as handle:
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (not a dict)
            metadata = handle.metadata()
        change(tensors, metadata)
        save_file(tensors, path, metadata=metadata)
        with pytest.raises(SubkvError) as caught:
            read_calibration(path)
        return str(caught.value)

    return sentence


def test_hostile_files(tmp_path: Path) -> None:
    """Refused with a sentence that can be printed, or read and written again as they were."""
    path = tmp_path / "c.safetensors"
    write_calibration(path, with_rotation(with_sensitivities(random_calibration(n_layer=1))))
    whole, n_read = damage.without_digest(path.read_bytes()), 0

    @damage.SETTINGS
    @given(damage.safetensors(whole))
    def check(data: bytes) -> None:
        nonlocal n_read
        path.write_bytes(data)
        try:
            found = read_calibration(path)
        except SubkvError as error:
            assert str(error).encode()
            return
        n_read += 1
        write_calibration(path, found)
        again = read_calibration(path)
        assert replace(again, layers=(), sha256="") == replace(found, layers=(), sha256="")
        assert [layer.shape for layer in again.layers] == [layer.shape for layer in found.layers]

    check()
    assert n_read > 0


@each("key", [*MOMENTS, *SAMPLES])
def test_missing_tensor(damaged: Callable[..., str], key: str) -> None:
    assert damaged(lambda t, m: t.pop(f"blk.1.{key}")) == f"blk.1.{key}: expected this tensor, found none"


@each("key", [*MOMENTS, *SAMPLES])
def test_wrong_shape_dtype_and_values(damaged: Callable[..., str], key: str) -> None:
    name = f"blk.0.{key}"
    short = damaged(lambda t, m: t.update({name: t[name][..., :-1].copy()}))
    assert short.startswith(f"{name}: expected float")
    assert ", found float" in short
    assert damaged(lambda t, m: t.update({name: t[name].astype(np.float64)})).startswith(f"{name}: expected float")
    for bad in (np.nan, np.inf):

        def poison(t: Tensors, m: dict[str, str], bad: float = bad) -> None:
            t[name].flat[3] = bad

        assert damaged(poison) == f"{name}: expected finite values, found NaN or infinity"


@pytest.mark.parametrize("key", ["k2", "q2", "v2"])
def test_indefinite_moments(damaged: Callable[..., str], key: str) -> None:
    def break_it(t: Tensors, m: dict[str, str]) -> None:
        matrix = unpack(t[f"blk.0.{key}"], 32)
        values, vectors = np.linalg.eigh(matrix[1])
        values[0] = -1e-3 * values[-1]
        matrix[1] = (vectors * values) @ vectors.T
        t[f"blk.0.{key}"] = pack(matrix)

    sentence = damaged(break_it)
    assert sentence.startswith(
        f"blk.0.{key}: expected a positive semi-definite matrix for head 1, found eigenvalues from -"
    )


def test_rounding_is_not_called_indefinite(tmp_path: Path) -> None:
    calibration = random_calibration(n_layer=1)
    layer = calibration.layers[0]
    flat = np.zeros_like(layer.k2)
    flat[:, :4, :4] = np.ones((4, 4))  # rank one: eigenvalues of either sign after rounding
    path = tmp_path / "c.safetensors"
    write_calibration(path, replace(calibration, layers=(replace(layer, k2=flat),)))
    assert read_calibration(path).layers[0].k2.shape == (2, 32, 32)


@each(
    ("key", "value", "expected"),
    [
        ("version", "2", "expected 1, found '2'"),
        ("block_count", "0", "expected an integer from 1 to 1024, found '0'"),
        ("block_count", "x", "expected an integer from 1 to 1024, found 'x'"),
        ("n_skip", "-1", "expected an integer from 0"),
        ("n_ctx", "²", "expected an integer from 1"),
        ("tokens", "0", "expected an integer from 1"),
        ("tokens", "9" * 40, "expected an integer from 1"),
        ("model_sha256", "ABC", "expected 64 lower-case hex digits, found 'ABC'"),
        ("texts", "[1]", "expected a JSON list of objects"),
        ("texts", '[{"name": "a"}]', "expected objects {name, sha256, bytes}"),
        ("texts", '[{"name": "\\ud800"}]', "expected a JSON list, found text that does not parse ('utf-8' codec"),
        ("layers", "{", "expected a JSON list, found text that does not parse"),
        ("layers", "[" * 5000, "expected a JSON list, found text that does not parse"),
        ("layers", "[]", "expected at least one layer, found none"),
        ("layers", "[{}]", "expected the members il, n_head"),
    ],
)
def test_metadata_defects(damaged: Callable[..., str], key: str, value: str, expected: str) -> None:
    sentence = damaged(lambda t, m: m.update({PREFIX + key: value}))
    assert sentence.startswith(f"{PREFIX}{key}: {expected}")


@each(
    "key",
    [
        "version",
        "arch",
        "name",
        "block_count",
        "n_ctx",
        "n_skip",
        "tokens",
        "texts",
        "model_sha256",
        "layers",
        "generator",
    ],
)
def test_missing_metadata(damaged: Callable[..., str], key: str) -> None:
    assert damaged(lambda t, m: m.pop(PREFIX + key)) == f"{PREFIX}{key}: expected this metadata string, found none"


@each(
    ("field", "value", "expected"),
    [
        ("il", 2, "expected il to be an integer from 0 to 1, found 2"),
        ("il", 1, "expected ascending distinct il, found [1, 1]"),
        ("n_head_kv", 0, "expected n_head_kv to be an integer from 1 to 1024, found 0"),
        ("n_head_kv", True, "expected n_head_kv to be an integer"),
        ("n_head", 3, "expected n_head to be a multiple of n_head_kv, found 3 and 2"),
        ("d_k", 12, "expected d_k to be a multiple of 8, found 12"),
        ("d_v", 640, "expected d_v to be an integer from 8 to 576, found 640"),
        ("tokens", 0, "expected tokens to be an integer from 1"),
        ("scale", 0, "expected scale to be a positive number, found 0"),
        ("scale", float("nan"), "expected scale to be a positive number, found nan"),
        ("scale", 10**400, "expected scale to be a positive number, found 1000"),
        ("scale", "1", "expected scale to be a positive number, found '1'"),
    ],
)
def test_layer_defects(damaged: Callable[..., str], field: str, value: Any, expected: str) -> None:
    def change(t: Tensors, m: dict[str, str]) -> None:
        layers = json.loads(m[PREFIX + "layers"])
        layers[0][field] = value
        m[PREFIX + "layers"] = json.dumps(layers)

    assert damaged(change).startswith(f"{PREFIX}layers: {expected}")


def test_unknown_tensors_and_unequal_samples(damaged: Callable[..., str]) -> None:
    extra = damaged(lambda t, m: t.update({"blk.7.k2": np.zeros(3, np.float32)}))
    assert extra.startswith("blk.7.k2: expected only tensors of FORMAT.md §4")
    unequal = damaged(lambda t, m: t.update({"blk.0.vs": t["blk.0.vs"][:5].copy()}))
    assert unequal == "blk.0.vs: expected 32 rows as in ks, found 5"


@pytest.mark.parametrize("content", [b"", b"hello", b"\xff" * 100, (2**62).to_bytes(8, "little") + b"{}"])
def test_not_a_safetensors_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.safetensors"
    path.write_bytes(content)
    with pytest.raises(SubkvError, match=r"^calibration: .* is not a readable safetensors file"):
        read_calibration(path)


def test_truncated_and_missing_files(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    write_calibration(path, random_calibration())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SubkvError, match=r"^calibration: .* is not a readable safetensors file"):
        read_calibration(path)
    with pytest.raises(SubkvError, match=r"^calibration: expected a calibration file, found no file at "):
        read_calibration(tmp_path / "none")


#
# merging
#


def test_merge_weights_by_tokens() -> None:
    a, b = random_calibration(seed=1), random_calibration(seed=2)
    b = replace(
        b, layers=tuple(replace(layer, shape=replace(layer.shape, tokens=3000)) for layer in b.layers), tokens=3000
    )
    both = merge(a, b)
    assert both.tokens == 4000
    assert both.layers[0].shape.tokens == 4000
    for key in MOMENTS:
        want = 0.25 * getattr(a.layers[1], key) + 0.75 * getattr(b.layers[1], key)
        np.testing.assert_allclose(getattr(both.layers[1], key), want, rtol=1e-12)
    for key in SAMPLES:
        assert len(getattr(both.layers[0], key)) == 32


@each(
    ("change", "expected"),
    [
        ({"arch": "qwen2"}, "arch: expected 'llama' as in this run, found 'qwen2'"),
        ({"name": "other"}, "name: expected 'tiny' as in this run, found 'other'"),
        ({"block_count": 5}, "block_count: expected 2 as in this run, found 5"),
        ({"n_skip": 0}, "n_skip: expected 4 as in this run, found 0"),
        ({"d_k": 64}, "layers: expected LayerShape("),
        ({"n_head_kv": 4}, "layers: expected LayerShape("),
    ],
)
def test_merge_refuses_other_models(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(SubkvError) as caught:
        merge(random_calibration(**change), random_calibration())
    assert str(caught.value).startswith(f"calibration: {PREFIX}{expected}")


def test_thinning_spreads() -> None:
    rows = np.arange(100, dtype=np.float16)[:, None]
    kept = thin(rows)
    assert len(kept) == 32
    assert kept[0] == 0
    assert kept[-1] == 99
    assert (np.diff(kept[:, 0].astype(float)) > 2).all()


#
# writing
#


def test_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """A file size limit replaces a full disk: write() fails in the same way."""
    path = tmp_path / "c.safetensors"
    path.write_bytes(b"earlier")
    resource = pytest.importorskip("resource")  # not on Windows
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(SubkvError, match=r"^output: cannot write .*; no file was left behind$"):
            write_calibration(path, random_calibration())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]
    assert path.read_bytes() == b"earlier"


def test_interrupt_while_writing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), atomic_file(tmp_path / "x") as handle:
        handle.write(b"abc")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_unwritable_outputs_are_refused_early(tmp_path: Path) -> None:
    with pytest.raises(SubkvError, match=r"^output: expected a file name, found the folder "):
        check_writable(tmp_path)
    with pytest.raises(SubkvError, match=r"^output: cannot write .*: No such file or directory$"):
        check_writable(tmp_path / "none" / "x")
    with pytest.raises(SubkvError, match=r"^output: cannot write .*: Not a directory$"):
        (tmp_path / "file").write_bytes(b"")
        check_writable(tmp_path / "file" / "x")
    check_writable(tmp_path / "x")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


#
# rotations
#


def with_rotation(calibration: Calibration) -> Calibration:
    """Neighbours are partners; the last two coordinates do not rotate."""
    partner = np.arange(32) ^ 1
    omega = np.where(np.arange(32) % 2, 1.0, -1.0) * 0.5 ** np.arange(32).repeat(2)[:32]
    omega[-2:] = 0.0
    layers = tuple(replace(layer, rotation=Rotation(partner, omega)) for layer in calibration.layers)
    return replace(calibration, layers=layers)


def test_a_rotation_survives_the_file_and_merging(tmp_path: Path) -> None:
    plain, turned = random_calibration(), with_rotation(random_calibration(seed=1))
    write_calibration(tmp_path / "c.safetensors", turned)
    read = read_calibration(tmp_path / "c.safetensors")
    for found in (read, merge(plain, turned), merge(turned, plain)):
        for a, b in zip(found.layers, turned.layers, strict=True):
            assert a.rotation is not None and b.rotation is not None
            np.testing.assert_array_equal(a.rotation.partner, b.rotation.partner)
            np.testing.assert_array_equal(a.rotation.omega, b.rotation.omega)


@each(
    ("name", "index", "value", "sentence"),
    [
        ("partner", 3, 32, "blk.0.partner: expected numbers below 32 that are pairs"),
        ("partner", 3, -1, "blk.0.partner: expected numbers below 32 that are pairs"),
        ("partner", 3, 5, "blk.0.partner: expected numbers below 32 that are pairs"),
        ("omega", 3, 0.25, "blk.0.omega: expected angles up to π that differ in sign"),
        ("omega", slice(0, 2), [-4.0, 4.0], "blk.0.omega: expected angles up to π that differ in sign"),
        ("omega", 3, np.nan, "blk.0.omega: expected finite values"),
    ],
)
def test_bad_rotations(tmp_path: Path, name: str, index: Any, value: Any, sentence: str) -> None:
    good = with_rotation(random_calibration())
    rotation = good.layers[0].rotation
    assert rotation is not None
    array = getattr(rotation, name).copy()
    array[index] = value
    layer = replace(good.layers[0], rotation=replace(rotation, **{name: array}))
    write_calibration(tmp_path / "c.safetensors", replace(good, layers=(layer, *good.layers[1:])))
    with pytest.raises(SubkvError, match=re.escape(sentence)):
        read_calibration(tmp_path / "c.safetensors")


def test_half_a_rotation_is_refused(damaged: Callable[..., str]) -> None:
    partner, omega = np.arange(32, dtype=np.int32), np.zeros(32)
    assert damaged(lambda t, m: t.update({"blk.0.partner": partner})) == "blk.0.omega: expected this tensor, found none"
    assert damaged(lambda t, m: t.update({"blk.0.omega": omega})).startswith("blk.0.omega: expected only tensors")


#
# sensitivities
#


def with_sensitivities(calibration: Calibration) -> Calibration:
    layers = tuple(
        replace(layer, sensitivity=LayerSensitivity(layer.k2, layer.v2, 2.0 * layer.k2, 2.0 * layer.v2))
        for layer in calibration.layers
    )
    return replace(calibration, layers=layers, sensitivity=Sensitivity("fisher", 4096, 128, 2048, 2.5, 1.1))


def test_sensitivities_survive_the_file(tmp_path: Path) -> None:
    written = with_sensitivities(random_calibration())
    write_calibration(tmp_path / "c.safetensors", written)
    read = read_calibration(tmp_path / "c.safetensors")
    assert read.sensitivity == written.sensitivity
    for a, b in zip(read.layers, written.layers, strict=True):
        assert a.sensitivity is not None and b.sensitivity is not None
        for key in ("k", "v", "k0", "v0"):
            np.testing.assert_allclose(getattr(a.sensitivity, key), getattr(b.sensitivity, key), rtol=1e-6)


def test_merging_keeps_the_later_sensitivities() -> None:
    plain, measured = random_calibration(), with_sensitivities(random_calibration(seed=1))
    for a, b in ((plain, measured), (measured, plain)):
        merged = merge(a, b)
        assert merged.sensitivity == measured.sensitivity
        assert all(layer.sensitivity is not None for layer in merged.layers)


@each(
    ("change", "sentence"),
    [
        ({"method": "guess"}, "subkv.calibration.sensitivity: expected a JSON object of method"),
        ({"tokens": 0}, "subkv.calibration.sensitivity: expected"),
        ({"correction": 0.0}, "subkv.calibration.sensitivity: expected"),
        ({"correction": float("nan")}, "subkv.calibration.sensitivity: expected"),
        ({"n_ctx": 0}, "subkv.calibration.sensitivity: expected"),
        ({"n_recent": -1}, "subkv.calibration.sensitivity: expected"),
    ],
)
def test_bad_sensitivity_headers(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    good = with_sensitivities(random_calibration())
    assert good.sensitivity is not None
    write_calibration(tmp_path / "c.safetensors", replace(good, sensitivity=replace(good.sensitivity, **change)))
    with pytest.raises(SubkvError, match=re.escape(sentence)):
        read_calibration(tmp_path / "c.safetensors")


def test_incomplete_sensitivities_are_rejected(tmp_path: Path) -> None:
    good = with_sensitivities(random_calibration())
    broken = replace(good, layers=(good.layers[0], replace(good.layers[1], sensitivity=None)))
    write_calibration(tmp_path / "c.safetensors", broken)
    with pytest.raises(SubkvError, match=r"blk\.1\.ek: expected this tensor, found none"):
        read_calibration(tmp_path / "c.safetensors")
    write_calibration(tmp_path / "c.safetensors", replace(good, sensitivity=None))
    with pytest.raises(SubkvError, match="expected only tensors of FORMAT.md"):
        read_calibration(tmp_path / "c.safetensors")
