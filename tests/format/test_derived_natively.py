"""libsubkv derives the bases that the planner's definition in numpy has, byte by byte."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import derived_numpy
import numpy as np
import pytest
import report
import tiny
import virtual
from each import each
from families import NOT_BUILT
from numpy.typing import NDArray

from subkv.base.errors import CacheError, SubkvError
from subkv.format import metadata
from subkv.format.layout import Layout
from subkv.format.window import Window
from subkv.native.digest import Value
from subkv.native.gguf import Gguf, write_sidecar
from subkv.native.library import Matrix
from subkv.plan import mla, stock
from subkv.plan.pipeline import Options

Models = Callable[..., Path]
CONTEXT, LATENT_CONTEXT = 8192, 32768


def native(model: Path, kv_bits: float = 0.0, sliding: Collection[int] = ()) -> dict[str, Any]:
    with Layout(model, kv_bits, derived=True, sliding=sliding) as layout:
        return layout.description


def oracle(model: Path, output: Path, kv_bits: float, sliding: Collection[int] = ()) -> dict[str, Any]:
    """The description of a sidecar that numpy has computed."""
    with Gguf(model) as base:
        context = LATENT_CONTEXT if mla.is_latent(base) else CONTEXT
    derived_numpy.sidecar(model, output, Options(kv_bits=kv_bits, window=Window(), bpe_context=context), sliding)
    return metadata.read(output)


def check_equal(model: Path, tmp_path: Path, kv_bits: float, sliding: Collection[int] = ()) -> None:
    want, found = oracle(model, tmp_path / "oracle.gguf", kv_bits, sliding), native(model, kv_bits, sliding)
    assert found["fingerprint"] == want["fingerprint"], "E, D, means and ratios of all heads"
    for other in (want, found):
        del other["budget"]  # a file with one plan has its size
    assert found == want


@each("kv_bits", [4.0, 5.2, 6.5, 11.0])
@each("arch", [arch for arch in tiny.ARCHS if arch not in ("mamba", "bert")])
def test_tiny_models(tiny_model: Models, tmp_path: Path, arch: str, kv_bits: float) -> None:
    check_equal(tiny_model(arch), tmp_path, kv_bits)


@each("sliding", [[0, 2], [1], [0, 1, 2, 3]])
@each("arch", ["gemma2", "gpt-oss"])
def test_sliding_layers_get_no_bases(tiny_model: Models, tmp_path: Path, arch: str, sliding: list[int]) -> None:
    """The other layers have the whole budget; if all layers slide, all have bases."""
    model = tiny_model(arch, n_layer=4)
    check_equal(model, tmp_path, 6.5, sliding)
    coded = [layer["il"] for layer in native(model, 6.5, sliding)["layers"]]
    assert coded == [il for il in range(4) if il not in sliding or len(sliding) == 4]


@each("sliding", [[], [0, 2], [1, 2, 3], [0, 1, 2, 3]])
@each("arch", ["gemma2", "llama"])
def test_default_budget(tiny_model: Models, tmp_path: Path, arch: str, sliding: list[int]) -> None:
    """It is higher beside sliding layers without bases, for libsubkv and for numpy."""
    model = tiny_model(arch, n_layer=4)
    beside = arch == "gemma2" and len(sliding) in (2, 3)
    with Layout(model, 0.0, derived=True, sliding=sliding) as layout:
        assert layout.description["budget"] == (
            derived_numpy.KV_BITS_BESIDE_SLIDING if beside else derived_numpy.KV_BITS
        )
    if arch == "gemma2":
        with Gguf(model) as base:
            plans = derived_numpy.plan(base, Options(plans=None), sliding).plans
        assert plans is not None and plans.budget == (
            derived_numpy.KV_BITS_BESIDE_SLIDING if beside else derived_numpy.KV_BITS
        )


@each("head_size", [64, 128, 256])
@each("arch", ["gemma2", "gpt-oss"])
def test_default_beside_sliding_layers_is_smaller_than_q8_0(tiny_model: Models, arch: str, head_size: int) -> None:
    """At 8192 tokens of four sequences, each with an exact window; sliding layers are q8_0 in both caches."""
    with Gguf(tiny_model(arch, n_layer=4, head_size=head_size)) as base:
        result = derived_numpy.plan(base, Options(), [0, 2])
    counted = result.counted
    assert counted.context == CONTEXT and counted.total + 3 * counted.window < stock.bits("q8_0")
    assert counted.total > derived_numpy.KV_BITS


def test_a_model_without_a_window_has_bases_in_all_layers(tiny_model: Models) -> None:
    assert native(tiny_model(), 6.5, [0]) == native(tiny_model(), 6.5)


@each("head_size", [56, 80, 96, 184, 256])  # several Hadamard matrices, or one of each construction
@each("arch", ["llama", "qwen2"])
def test_head_sizes(tiny_model: Models, tmp_path: Path, arch: str, head_size: int) -> None:
    check_equal(tiny_model(arch, head_size=head_size), tmp_path, 4.4)


@each("kv_bits", [4.4, 6.5, 8.0])
@each(("n_lora", "head_size"), [(512, 128), (128, 64)])
def test_latent_rows(tiny_model: Models, tmp_path: Path, n_lora: int, head_size: int, kv_bits: float) -> None:
    check_equal(tiny_model("deepseek2", n_lora=n_lora, head_size=head_size), tmp_path, kv_bits)


@pytest.mark.parametrize("arch", [arch for arch in report.architectures() if arch not in NOT_BUILT])
def test_architectures(arch: str, tmp_path: Path) -> None:
    """Layers, rotary pairs, norms, biases and fused matrices of every architecture; both refuse the same ones."""
    model = virtual.write(tmp_path / "model.gguf", arch)
    try:
        oracle(model, tmp_path / "oracle.gguf", 6.5)
    except CacheError as error:
        with pytest.raises(CacheError, match=f"model {arch}: subkv cannot hold its K/V cache because"):
            native(model)
        assert f"model {arch}: subkv cannot hold its K/V cache because" in str(error)
        return
    check_equal(model, tmp_path, 6.5)


def test_demo_model(demo_model: Path, tmp_path: Path) -> None:
    for kv_bits in (3.6, 4.25, 6.5):
        check_equal(demo_model, tmp_path, kv_bits)


def test_split_models(tiny_model: Models) -> None:
    models = tiny_model(), tiny_model(split_tensors=6)
    assert len({native(model)["fingerprint"] for model in models}) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="sched_setaffinity")
def test_any_number_of_threads(tiny_model: Models) -> None:
    """The number follows the processors that the process may use."""
    code = """
import os, sys
if sys.argv[2] == "one":
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
from subkv.format.layout import Layout
print(Layout(sys.argv[1], derived=True).description["fingerprint"])
"""
    model = str(tiny_model("llama", n_layer=6))
    found = {
        subprocess.run([sys.executable, "-c", code, model, n], capture_output=True, check=True).stdout
        for n in ("one", "all")
    }
    assert len(found) == 1


@each("kv_bits", [0.5, 2.9, 20.0])
def test_impossible_budgets(tiny_model: Models, kv_bits: float) -> None:
    with pytest.raises(SubkvError, match=rf"expected \d.* to \d.* for bases from the weights .*, found {kv_bits:g}"):
        native(tiny_model(), kv_bits)


#
# models in memory
#

WEIGHTS = ("attn_q", "attn_k", "attn_qkv", "attn_q_norm", "attn_k_norm", "attn_norm")


def matrix(name: str, rows: NDArray[np.float32]) -> Matrix:
    made = Matrix(name.encode(), rows.ctypes.data, *rows.shape)
    made.owner = rows
    return made


def in_memory(model: Path) -> tuple[dict[str, Value], list[Matrix]]:
    """Keys and weights of a model's file."""
    kinds = {int: "u32", float: "f32", str: "str"}
    with Gguf(model) as base:
        arch = base.get("general.architecture")
        values = {key: base.get(key) for key in base.keys() if key.startswith(("general.arch", arch))}  # noqa: SIM118
        keys: dict[str, Value] = {key: (kinds[type(x)], x) for key, x in values.items() if type(x) in kinds}
        names = [f"blk.{il}.{part}.{kind}" for il in range(8) for part in WEIGHTS for kind in ("weight", "bias")]
        return keys, [matrix(name, base.tensor(name, "")) for name in names if base.has_tensor(name)]


@each("window", [Window(4, 128), Window(0, 32), Window(8, 0)])
@each("arch", ["llama", "qwen2", "gemma2", "bloom"])
def test_weights_in_memory(tiny_model: Models, tmp_path: Path, arch: str, window: Window) -> None:
    """The bases of the file, for any window; without sinks, no mean is subtracted from keys with biases."""
    with Gguf(tiny_model(arch)) as base:
        result = derived_numpy.plan(base, Options(kv_bits=5.2, window=window, bpe_context=CONTEXT))
        write_sidecar(base, tmp_path / "oracle.gguf", derived_numpy.keys(base, result))
    want = metadata.read(tmp_path / "oracle.gguf")
    with Layout.of_weights(*in_memory(tiny_model(arch)), 5.2, window) as layout:
        assert layout.description == {**want, "budget": layout.description["budget"]}
    centred = [head["centred"] for layer in want["layers"] for head in layer["k"]]
    assert any(centred) == (arch in ("qwen2", "bloom") and window.n_sink > 0)


def test_rows_in_another_order(tiny_model: Models) -> None:
    """As of a model of transformers, whose heads are in another order."""
    keys, weights = in_memory(tiny_model())
    order = np.random.default_rng(0).permutation(32).astype(np.int32)
    other = []
    for one in weights:
        name, rows = one.name.decode(), one.owner
        if "attn_k." in name or "attn_q." in name:
            stored = rows.reshape(-1, 32, rows.shape[1])[:, np.argsort(order)].reshape(rows.shape)
            one = matrix(name, np.ascontiguousarray(stored))
            one.order, one.n_order = order.ctypes.data, len(order)
        other.append(one)
    found = []
    for some in (weights, other, other[::-1]):
        with Layout.of_weights(keys, some, None, Window(4, 128)) as layout:
            found.append(layout.description)
    assert found[0] == found[1] == found[2] == {**native(tiny_model()), "budget": 6.5}


@each(
    ("members", "reason"),
    [
        ({"data": None}, "expected a matrix in memory"),
        ({"type": 99}, "expected a matrix in memory"),
        ({"type": 2, "n": 33}, "expected a matrix in memory"),
        ({"n_rows": -1}, "expected a matrix in memory"),
        ({"n_rows": 1 << 62}, "expected a matrix in memory"),
        ({"n_order": 0}, "expected an order of rows within 64"),
        ({"n_order": 3}, "expected an order of rows within 64"),
        ({"n_order": 1}, "expected an order of rows within 64"),
    ],
)
def test_hostile_matrices(tiny_model: Models, members: dict[str, Any], reason: str) -> None:
    keys, weights = in_memory(tiny_model())
    (one,) = (one for one in weights if one.name == b"blk.0.attn_k.weight")
    order = np.array([7], np.int32)
    if "n_order" in members:
        one.order = order.ctypes.data
    for name, value in members.items():
        setattr(one, name, value)
    with pytest.raises(CacheError, match=f"blk.0.attn_k.weight: {reason}"):
        Layout.of_weights(keys, weights, None, Window(4, 128))


def test_models_in_memory_that_cannot_have_bases(tiny_model: Models) -> None:
    keys, weights = in_memory(tiny_model())
    with pytest.raises(CacheError, match=r"^kv_bits: expected \d.* to \d.*, found 0.5$"):
        Layout.of_weights(keys, weights, 0.5, Window(4, 128))
    with pytest.raises(CacheError, match="^model: model : subkv cannot hold its K/V cache because no layer"):
        Layout.of_weights({}, weights, None, Window(4, 128))
    with Layout.of_weights(keys, [], None, Window(4, 128)) as layout:
        assert layout.description["basis_k"] == "pca"  # coded evenly


#
# hostile files
#


def changed(model: Path, tmp_path: Path, name: bytes, at: int, value: bytes) -> Path:
    """A copy with other bytes behind the first place of `name`."""
    path = Path(shutil.copy(model, tmp_path / "changed.gguf"))
    whole = bytearray(path.read_bytes())
    start = whole.index(name) + len(name) + at
    whole[start : start + len(value)] = value
    path.write_bytes(whole)
    return path


@each(
    ("name", "value"),
    [
        (b"llama.block_count", 1 << 31),
        (b"llama.attention.head_count", 0),
        (b"llama.attention.head_count_kv", 3),
        (b"llama.attention.head_count", (1 << 32) - 4),
        (b"llama.embedding_length", 0),
    ],
)
def test_hostile_metadata(tiny_model: Models, tmp_path: Path, name: bytes, value: int) -> None:
    """One sentence, or bases of the sizes that the matrices have."""
    path = changed(tiny_model(), tmp_path, name, 4, value.to_bytes(4, "little"))
    try:
        layers = native(path)["layers"]
    except SubkvError as error:
        assert "expected at most 1024 layers" in str(error) or "subkv cannot hold its K/V cache" in str(error)
    else:
        assert all(8 <= layer["d_k"] <= 576 for layer in layers)


def test_weights_that_are_not_finite(tiny_model: Models, tmp_path: Path) -> None:
    """The layer's keys are coded evenly."""
    whole = bytearray(Path(tiny_model()).read_bytes())
    with Gguf(tiny_model()) as base:
        values = base.tensor("blk.0.attn_k.weight", "").tobytes()
    at = bytes(whole).index(values)
    whole[at : at + 4] = b"\x00\x00\xc0\x7f"
    path = tmp_path / "nan.gguf"
    path.write_bytes(whole)
    assert native(path)["basis_k"] == "pca" and native(tiny_model())["basis_k"] == "query-aware"
    check_equal(path, tmp_path, 6.5)
