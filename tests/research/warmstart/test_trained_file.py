"""Every damage to warm.safetensors has a sentence that names the key or tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import damage
import numpy as np
import pytest
from each import each
from hypothesis import given
from safetensors import safe_open
from safetensors.numpy import save_file
from starting import trained_without

from research.warmstart.frame import Frame
from research.warmstart.pooled import Plan
from research.warmstart.trained import PREFIX, HeadShape, read
from subkv.base.errors import SubkvError
from subkv.plan.positions import Pairs

FRAME = Frame(Pairs.none(8))
TENSORS = {
    "centre": [6],
    **{
        f"blk.{il}.{name}": shape
        for il in (0, 1)
        for name, shape in {
            "adapter_k.weight": [2, 8, 8],
            "adapter_k.bias": [2, 8],
            "adapter_v.weight": [2, 4, 4],
            "adapter_v.bias": [2, 4],
            "projector": [3, 3],
            "prefix_k": [2, 3, 8],
            "prefix_v": [2, 3, 4],
        }.items()
    },
}
KEYS = ("version", "identity", "n_slots", "n_sink", "n_last", "layers", "embedding", "guard", "provenance")
SHAPES = [{"n_head_kv": 2, "d_k": 8, "d_v": 4}] * 2

Damage = Callable[[dict[str, np.ndarray], dict[str, str]], Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "warm.safetensors"
    shapes, centre = [HeadShape(2, 8, 4)] * 2, np.ones(6, np.float32)
    trained_without("a" * 64, Plan(3, 1, 2), shapes, FRAME, centre).save(path)
    return path


def damaged(whole: Path, path: Path, damage: Damage) -> str:
    """The error message about a file whose tensors and metadata (keys without prefix) `damage` has changed."""
    with safe_open(whole, framework="numpy") as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (not a dict)
        metadata = {key.removeprefix(PREFIX): value for key, value in handle.metadata().items()}
    damage(tensors, metadata)
    save_file(tensors, path, {PREFIX + key: value for key, value in metadata.items()})
    with pytest.raises(SubkvError) as caught:
        read(path, FRAME)
    return str(caught.value)


def test_the_file_follows_the_format(whole: Path) -> None:
    with safe_open(whole, framework="numpy") as handle:
        assert {name: list(handle.get_tensor(name).shape) for name in handle.keys()} == TENSORS  # noqa: SIM118
        assert set(handle.metadata()) == {PREFIX + key for key in (*KEYS, "digest")}
    assert read(whole, FRAME).layers[1].shape == HeadShape(2, 8, 4)


def test_hostile_files(whole: Path, tmp_path: Path) -> None:
    """Refused with a sentence that can be printed, or read and written again as they were."""
    path, n_read = tmp_path / "warm.safetensors", 0

    @damage.SETTINGS
    @given(damage.safetensors(damage.without_digest(whole.read_bytes())))
    def check(data: bytes) -> None:
        nonlocal n_read
        path.write_bytes(data)
        try:
            found = read(path, FRAME)
        except SubkvError as error:
            assert str(error).encode()
            return
        n_read += 1
        found.save(path)
        first = path.read_bytes()
        read(path, FRAME).save(path)
        assert path.read_bytes() == first

    check()
    assert n_read > 0


@each("name", TENSORS)
def test_tensors(name: str, whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    assert damaged(whole, path, lambda t, _: t.pop(name)) == f"{name}: expected this tensor, found none"

    def nan(tensors: dict[str, np.ndarray], _: Any) -> None:
        tensors[name].flat[-1] = np.nan

    assert damaged(whole, path, nan) == f"{name}: expected finite values, found NaN or infinity"
    half = damaged(whole, path, lambda t, _: t.update({name: t[name].astype(np.float16)}))
    assert half.startswith(f"{name}: expected float32 [") and "found float16" in half
    flat = damaged(whole, path, lambda t, _: t.update({name: t[name][None]}))
    assert flat.startswith(f"{name}: expected float32 [") and flat.endswith(f"found float32 {[1, *TENSORS[name]]}")


@each("key", KEYS)
def test_missing_metadata(key: str, whole: Path, tmp_path: Path) -> None:
    found = damaged(whole, tmp_path / "bad.safetensors", lambda _, m: m.pop(key))
    assert found == f"{PREFIX}{key}: expected this metadata string, found none"


@each(
    ("key", "value", "message"),
    [
        ("version", "2", "expected 1, found '2'"),
        ("identity", "A" * 64, "expected 64 lower-case hex digits, found 'AAA"),
        ("n_slots", "0", "expected a number of tokens from 1 to 4096, found 0"),
        ("n_slots", "three", "expected an integer, found 'three'"),
        ("n_sink", "-1", "expected an integer, found '-1'"),
        ("n_last", "0", "expected a number of tokens from 1 to 4096, found 0"),
        ("layers", "[", "expected JSON, found text that does not parse"),
        ("layers", "[]", "expected a JSON list of 1 to 1024 layers"),
        ("layers", "{}", "expected a JSON list of 1 to 1024 layers"),
        (
            "layers",
            json.dumps([{**SHAPES[0], "d_k": 16}] * 2),
            "expected objects {n_head_kv, d_k, d_v} with the",
        ),
        ("layers", json.dumps([{**SHAPES[0], "d_v": True}] * 2), "expected objects {n_head_kv, d_k, d_v}"),
        ("layers", json.dumps([{"d_k": 8}]), "expected objects {n_head_kv, d_k, d_v}"),
        ("guard", '{"a": "b"}', "expected a JSON object of finite numbers"),
        ("guard", '{"a": NaN}', "expected a JSON object of finite numbers"),
        ("guard", f'{{"a": 1{"0" * 400}}}', "expected a JSON object of finite numbers"),
        ("guard", "[1]", "expected a JSON object of finite numbers"),
        ("provenance", '{"a": 1}', "expected a JSON object of strings"),
    ],
)
def test_bad_metadata(key: str, value: str, message: str, whole: Path, tmp_path: Path) -> None:
    found = damaged(whole, tmp_path / "bad.safetensors", lambda _, m: m.update({key: value}))
    assert found.startswith(f"{PREFIX}{key}: {message}")


def test_layers_and_tensors_that_do_not_fit(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    extra = damaged(whole, path, lambda t, _: t.update({"blk.2.projector": np.eye(3, dtype=np.float32)}))
    assert extra == "blk.2.projector: expected only the tensors of the listed layers, found this one"
    fewer = damaged(whole, path, lambda _, m: m.update(layers=json.dumps(SHAPES[:1])))
    assert fewer.startswith("blk.1.adapter_k.bias: expected only the tensors of the listed layers")


def test_no_file_and_no_safetensors(tmp_path: Path) -> None:
    with pytest.raises(SubkvError, match=r"^path: expected a file of python -m research.warmstart train, found"):
        read(tmp_path / "none.safetensors", FRAME)
    (tmp_path / "text").write_text("not a safetensors file at all, but long enough")
    with pytest.raises(SubkvError, match=r"^path: .* is not a readable safetensors file: "):
        read(tmp_path / "text", FRAME)
