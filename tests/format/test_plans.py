"""Plans for several budgets in one file (FORMAT.md §3.3): derived matrices, the choice of a plan, hostile keys."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import derived_numpy
import numpy as np
import numpy.typing as npt
import pytest
from calib_synthetic import random_calibration
from click.testing import CliRunner
from each import each
from format import native, writer
from gguf import GGUFValueType as T

from converter.cli import main as convert
from converter.conversion import convert_file
from subkv.base.errors import SubkvError
from subkv.engine.cache import choose_cache
from subkv.engine.request import CacheRequest
from subkv.format.calibration import write_calibration
from subkv.format.metadata import read
from subkv.plan.budget import BUDGET_TOLERANCE, same
from subkv.plan.pipeline import PLANS, Options

Matrix = npt.NDArray[np.float64]
D_K, D_V, HEADS = 32, 24, 2
K_BANDS, V_BANDS = ((8, 16), (8, 5), (16, 2)), ((16, 4),)  # 16 bits; a power of two; V with dropped coefficients
NARROW_K, NARROW_V = ((32, 3),), ((24, 2),)  # the DCT
GAINS = {2: 0.9116, 3: 0.97555, 4: 0.99328, 5: 0.99818, 6: 0.9995}


def shared(rng: np.random.Generator, d: int, in_bytes: bool, mixed: bool) -> tuple[bytes, Matrix]:
    """A matrix X as stored, and its values."""
    form = bytes([in_bytes + 2 * mixed])
    if in_bytes:
        steps = rng.uniform(0.001, 0.01, d).astype(np.float16)
        codes = rng.integers(-127, 128, (d, d)).astype(np.int8)
        rows = b"".join(step.tobytes() + row.tobytes() for step, row in zip(steps, codes, strict=True))
        return form + rows, steps.astype(np.float64)[:, None] * codes
    halves = rng.standard_normal((d, d)).astype(np.float16)
    return form + halves.tobytes(), halves.astype(np.float64)


def mixing(n: int) -> Matrix:
    """H_n."""
    if n & (n - 1) == 0:
        matrix = np.ones((1, 1))
        while len(matrix) < n:
            matrix = np.block([[matrix, matrix], [matrix, -matrix]])
        return np.asarray(matrix / np.sqrt(n))
    i = np.arange(n)
    matrix = np.sqrt(2 / n) * np.cos(np.pi * np.outer(i, i + 0.5) / n)
    matrix[0] /= np.sqrt(2)
    return np.asarray(matrix)


def in_bytes(row: Matrix) -> Matrix:
    """Step 2."""
    largest = max(np.abs(row).max(), 2.0**-14)
    best = None
    for m in range(8, 16):
        e = next(e for e in range(-40, 40) if 127 * m * 2.0**e >= largest)
        rounded = m * 2.0**e * np.rint(row / (m * 2.0**e))
        if best is None or np.sum((rounded - row) ** 2) < np.sum((best - row) ** 2):
            best = rounded
    assert best is not None
    return best


def defined(x: Matrix, is_bytes: bool, mixed: bool, bands: Any, narrow: bool) -> tuple[Matrix, Matrix]:
    """E and D of FORMAT.md §3.3, before D is rounded to halves."""
    x, r, first = x.copy(), sum(n for n, _ in bands), 0
    gains = np.ones(r)
    for n, bits in bands:
        if bits != 16 and not mixed:
            x[first : first + n] = mixing(n) @ x[first : first + n]
        gains[first : first + n] = GAINS.get(bits, 1.0)
        first += n
    if is_bytes:
        x[:r] = [in_bytes(row) for row in x[:r]]
    x[:r] = x[:r].astype(np.float16)
    decode = np.linalg.inv(x).T[:r] / gains[:, None]
    if narrow and is_bytes:
        decode[8:] = [in_bytes(row) for row in decode[8:]]
    return x[:r], decode


class File:
    """A file with plans for 2 and 3.5 bits, besides its own 7; the first matrix of every layer is not in bytes, V of
    the first head is mixed."""

    def __init__(self) -> None:
        rng = np.random.default_rng(5)
        layers = writer.random_layers(2, HEADS, D_K, D_V, ((32, 8),), ((24, 6),))
        self.shared: dict[tuple[int, int, bool], tuple[Matrix, bool, bool]] = {}
        keys = writer.metadata(layers, recent_bits=10)
        f32, u32, string = T.FLOAT32, T.UINT32, T.STRING
        keys |= {"subkv.budget": (f32, 7.0), "subkv.plans": (u32, 2)}
        for layer in layers:
            block = b""
            for h in range(HEADS):
                block += rng.standard_normal(D_K).astype(np.float16).tobytes()
                for value, d in ((False, D_K), (True, D_V)):
                    as_bytes, mixed = bool(h or value), value and not h
                    stored, matrix = shared(rng, d, as_bytes, mixed)
                    self.shared[layer.il, h, value] = matrix, as_bytes, mixed
                    block += stored
            keys[f"subkv.blk.{layer.il}.encode"] = (string, base64.b64encode(block).decode())
        self.bands = {2.0: (NARROW_K, NARROW_V), 3.5: (K_BANDS, V_BANDS)}
        for i, (budget, (k, v)) in enumerate(self.bands.items()):
            spec = [layer.spec() | {"k": [k] * HEADS, "v": [v] * HEADS} for layer in layers]
            factors = rng.uniform(0.5, 1.5, len(layers) * HEADS * (1 + len(k) + len(v))).astype("<f4").tobytes()
            plan = {
                "budget": (f32, budget),
                "bits_per_element": (f32, budget - 0.01),
                "bits_per_element.rows": (f32, budget - 0.5),
                "recent_bits": (u32, 16 if budget == 3.5 else 10),
                "decode_in_bytes": (u32, int(budget == 2.0)),
                "layout": (string, json.dumps({"layers": spec})),
                "factors": (string, base64.b64encode(factors).decode()),
                "predicted": (f32, 0.25 / budget),
            }
            keys |= {f"subkv.plan.{i}.{name}": value for name, value in plan.items()}
        self.keys = writer.sealed(keys)


FILE = File()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return writer.write(tmp_path / "plans.gguf", FILE.keys)


@each("budget", [2.0, 3.5])
def test_matrices_are_those_of_the_format(budget: float, path: Path) -> None:
    layout = native.load(path, budget)
    for (il, h, value), (matrix, as_bytes, mixed) in FILE.shared.items():
        bands, d = FILE.bands[budget][value], D_V if value else D_K
        encode, decode = defined(matrix, as_bytes, mixed, bands, budget == 2.0)
        np.testing.assert_array_equal(layout.basis(il, h, value, False, d * d).reshape(-1, d), encode)
        np.testing.assert_allclose(layout.basis(il, h, value, True, d * d).reshape(-1, d), decode, rtol=2**-10)


@each("budget", [2.0, 3.5])
def test_plan_equals_the_file_that_has_it_as_its_layout(budget: float, path: Path, tmp_path: Path) -> None:
    layout, i = native.load(path, budget), list(FILE.bands).index(budget)
    keys = {name: FILE.keys[name] for name in FILE.keys if "plan" not in name and not name.endswith("encode")}
    keys["subkv.layout"] = FILE.keys[f"subkv.plan.{i}.layout"]
    keys["subkv.recent_bits"] = FILE.keys[f"subkv.plan.{i}.recent_bits"]
    factors = base64.b64decode(FILE.keys[f"subkv.plan.{i}.factors"][1])
    for il in range(2):
        encode, block = base64.b64decode(FILE.keys[f"subkv.blk.{il}.encode"][1]), b""
        for h in range(HEADS):
            n_k, n_v = (4 * len(bands) for bands in FILE.bands[budget])
            mean = encode[: 2 * D_K]
            for value, d in ((False, D_K), (True, D_V)):
                n = n_v if value else 4 + n_k
                block += factors[:n] + (b"" if value else mean)
                factors = factors[n:]
                for decode in (False, True):
                    block += layout.basis(il, h, value, decode, d * d).astype("<f2").tobytes()
            encode = encode[2 * D_K + sum(_stored_bytes(il, h, value) for value in (False, True)) :]
        keys[f"subkv.blk.{il}.basis"] = (T.STRING, base64.b64encode(block).decode())
    same = native.load(writer.write(tmp_path / "same.gguf", writer.sealed(keys)))
    assert layout.fingerprint == same.fingerprint != native.load(path).fingerprint
    for name in ("layers", "bytes_per_token", "bytes_bases", "recent_bits"):
        assert layout.json[name] == same.json[name]
    assert layout.json["budget"] == budget and abs(layout.json["bits_per_element"] - budget + 0.01) < 1e-6


def _stored_bytes(il: int, h: int, value: bool) -> int:
    matrix, as_bytes, _ = FILE.shared[il, h, value]
    return 1 + (matrix.size + 2 * len(matrix) if as_bytes else 2 * matrix.size)


def test_default_is_the_layout_of_a_file_without_plans(path: Path, tmp_path: Path) -> None:
    bare = {name: FILE.keys[name] for name in FILE.keys if "plan" not in name and not name.endswith("encode")}
    plain = native.load(writer.write(tmp_path / "plain.gguf", writer.sealed(bare)))
    for budget in (0.0, 7.0):
        layout = native.load(path, budget)
        assert layout.fingerprint == plain.fingerprint and layout.json["layers"] == plain.json["layers"]
    assert [plan["budget"] for plan in layout.json["plans"]] == [2.0, 3.5] and not plain.json["plans"]


def refused(path: Path, keys: writer.Keys, budget: float) -> str:
    """The sentence with which the reader refuses a file."""
    with pytest.raises(native.MetadataError) as e:
        native.load(writer.write(path, writer.sealed(keys)), budget)
    message = str(e.value)
    assert "expected" in message and "found" in message and "\n" not in message
    return message


def test_budget_without_a_plan(path: Path) -> None:
    for budget in (3.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(native.MetadataError, match="expected 2, 3.5 or 7, for which .* has a plan, found"):
            native.load(path, budget)


def test_remedy_keeps_the_plans(tmp_path: Path) -> None:
    """`convert --plans` replaces them; not every budget or file can have more."""
    int8 = FILE.keys | {"subkv.codec": (T.STRING, "int8")}
    for keys, budget, end in (
        (FILE.keys, 3.0, "found 3; `subkv convert MODEL --plans 2,3,3.5` adds it"),
        (int8, 3.0, "found 3; `subkv convert MODEL --kv-bits 3` writes bases with it instead"),
        (FILE.keys, 65.0, "found 65"),
    ):
        assert refused(tmp_path / "a.gguf", keys, budget).endswith(end)


@each(
    ("text", "budget", "shown"),
    [
        ('{"subkv": 0.0002, "q8_0": 2.3e-4}', None, ", predicted KLD 0.0002, q8_0's 0.00023"),
        ('{"subkv":0.0002,"q8_0":0.00023}', 3.5, ", predicted KLD 0.071, q8_0's 0.00023"),
        ('{"subkv": 0.0002}', None, ""),
        ('{"subkv": 0.0002, "q8_0": -1}', None, ""),
        ('{"subkv": "0.1", "q8_0": 1e999}', None, ""),
        ("", None, ""),
    ],
)
def test_predicted_quality_of_found_bases(text: str, budget: float | None, shown: str, tmp_path: Path) -> None:
    keys = FILE.keys | {"subkv.predicted": (T.STRING, text)}
    file = writer.write(tmp_path / "a.gguf", writer.sealed(keys))
    _, tokens, quality = choose_cache(file, CacheRequest("subkv", bases=file, kv_bits=budget)).note.partition(" tokens")
    assert (tokens, quality) == (" tokens", shown)


def test_nearest_plan(tmp_path: Path) -> None:
    """Within the planner's tolerance."""
    near = writer.write(tmp_path / "a.gguf", writer.sealed(FILE.keys | {"subkv.plan.1.budget": (T.FLOAT32, 2.025)}))
    budgets = [native.load(near, budget).json["budget"] for budget in (2.0, 2.012, 2.013, 2.025, 2.044)]
    assert budgets == pytest.approx([2.0, 2.0, 2.025, 2.025, 2.025])
    edge = writer.write(tmp_path / "b.gguf", writer.sealed(FILE.keys))
    for difference in (-BUDGET_TOLERANCE, BUDGET_TOLERANCE):
        for factor, is_same in ((0.99, True), (1.01, False)):
            budget = 3.5 + factor * difference
            assert same(budget, 3.5) == is_same
            if is_same:
                assert native.load(edge, budget).json["budget"] == 3.5
            else:
                with pytest.raises(native.MetadataError, match="has a plan, found"):
                    native.load(edge, budget)


@each("key", [key for key in FILE.keys if ".plan.1." in key and "predicted" not in key and "recent" not in key])
def test_missing_key(key: str, tmp_path: Path) -> None:
    keys = {name: value for name, value in FILE.keys.items() if name != key}
    assert refused(tmp_path / "a.gguf", keys, 3.5).startswith(f"{key}: ")


@each("key", [key for key in FILE.keys if ".plan.1." in key or key in ("subkv.plans", "subkv.budget")])
def test_wrong_type(key: str, tmp_path: Path) -> None:
    keys = FILE.keys | {key: (T.UINT64, 1)}
    assert refused(tmp_path / "a.gguf", keys, 3.5).startswith(f"{key}: expected type ")


def encode_of(change: Callable[[bytearray], object]) -> str:
    block = bytearray(base64.b64decode(FILE.keys["subkv.blk.1.encode"][1]))
    change(block)
    return base64.b64encode(block).decode()


def layout_of(**members: Any) -> str:
    layout = json.loads(FILE.keys["subkv.plan.1.layout"][1])
    layout["layers"][0] |= members
    return json.dumps(layout)


def factors_of(at: int, value: float) -> str:
    block = bytearray(base64.b64decode(FILE.keys["subkv.plan.1.factors"][1]))
    block[4 * at : 4 * at + 4] = struct.pack("<f", value)
    return base64.b64encode(block).decode()


K_MATRIX = 2 * D_K  # place of the first matrix
V_MATRIX = K_MATRIX + 1 + 2 * D_K * D_K
LEAST_ENCODE = (HEADS * (2 * D_K + 1 + D_K * (2 + D_K) + 1 + D_V * (2 + D_V)) + 2) // 3 * 4  # base64 characters


@each(
    ("key", "value", "reason"),
    [
        ("subkv.budget", 65.0, "expected at most 64 bits, found 65"),
        ("subkv.plans", 17, "expected at most 16, found 17"),
        ("subkv.plans", 3, "subkv.plan.2.budget: expected a value of type f32, found no such key"),
        ("subkv.plan.0.budget", -1.0, "expected a positive finite number, found -1"),
        ("subkv.plan.1.bits_per_element", float("nan"), "expected a positive finite number, found nan"),
        ("subkv.plan.1.bits_per_element.rows", 0.0, "expected a positive finite number, found 0"),
        ("subkv.plan.1.predicted", float("inf"), "expected a positive finite number, found inf"),
        ("subkv.plan.1.recent_bits", 12, "expected 10 or 16, found 12"),
        ("subkv.plan.1.decode_in_bytes", 2, "expected 0..1, found 2"),
        ("subkv.plan.1.layout", "{}", "top level: "),
        ("subkv.plan.1.layout", layout_of(d_k=40), "expected the layers and heads of subkv.layout, found other ones"),
        ("subkv.plan.1.layout", layout_of(v=[]), "layers[0]: expected bands of 2 heads in v, found 0"),
        ("subkv.plan.1.layout", layout_of(k=[[[40, 4]], [[32, 4]]]), "layers[0]: expected at most 32 coefficients"),
        ("subkv.plan.1.factors", "", "expected 80 bytes (as subkv.plan.1.layout requires), found 0"),
        ("subkv.plan.1.factors", "!!!!", "expected a base64 digit at character 0"),
        ("subkv.plan.1.factors", "=", "expected "),
        ("subkv.plan.1.factors", factors_of(0, -1.0), "gamma"),
        ("subkv.plan.1.factors", factors_of(2, float("nan")), "ratio of band 1"),
        ("subkv.blk.1.encode", "", f"expected at least {LEAST_ENCODE} base64 characters (as subkv.layout requires)"),
        ("subkv.blk.1.encode", "A" * (LEAST_ENCODE - 4), f"expected at least {LEAST_ENCODE} base64 characters"),
        ("subkv.blk.1.encode", encode_of(bytearray.pop), "expected at least "),
        ("subkv.blk.1.encode", encode_of(lambda b: b.append(0)), "bytes (as subkv.layout requires)"),
        (
            "subkv.blk.1.encode",
            encode_of(lambda b: b.__setitem__(K_MATRIX, 4)),
            "expected form 0 to 3 of a matrix, found",
        ),
        ("subkv.blk.1.encode", encode_of(lambda b: b.__setitem__(slice(1, 2), b"\x7c")), "mean of k head 0"),
        ("subkv.blk.1.encode", encode_of(lambda b: b.__setitem__(K_MATRIX + 2, 0x7E)), "expected finite values"),
        (
            "subkv.blk.1.encode",
            encode_of(lambda b: b.__setitem__(slice(V_MATRIX + 1, V_MATRIX + 1 + 24 * 26), bytes(24 * 26))),
            "expected an invertible matrix of each head",
        ),
        (
            "subkv.blk.1.encode",
            encode_of(lambda b: b.__setitem__(slice(V_MATRIX + 1, V_MATRIX + 3), b"\xff\x7b")),
            "expected matrices within half precision",
        ),
    ],
)
def test_hostile(key: str, value: Any, reason: str, tmp_path: Path) -> None:
    kind = FILE.keys[key][0]
    message = refused(tmp_path / "a.gguf", FILE.keys | {key: (kind, value)}, 3.5)
    assert reason in message
    assert message.startswith(("subkv.plan.", key))


def test_matrices_are_not_allocated_before_the_shared_ones_are_seen(tmp_path: Path) -> None:
    """A plan may have more coefficients than subkv.layout, whose bases the file has in full."""
    layers = writer.random_layers(1, 64, 576, 8, ((8, 8),), ((8, 8),))
    spec = [layers[0].spec() | {"k": [[[576, 16]]] * 64}]
    plan = {name.replace("plan.1.", "plan.0."): FILE.keys[name] for name in FILE.keys if "plan.1." in name}
    plan["subkv.plan.0.layout"] = (T.STRING, json.dumps({"layers": spec}))
    factors = np.ones(64 * 3, dtype="<f4").tobytes()
    plan["subkv.plan.0.factors"] = (T.STRING, base64.b64encode(factors).decode())
    keys = writer.metadata(layers) | plan | {"subkv.plans": (T.UINT32, 1), "subkv.budget": (T.FLOAT32, 7.0)}
    message = refused(tmp_path / "a.gguf", keys | {"subkv.blk.0.encode": (T.STRING, "AAAA")}, 3.5)
    assert message.startswith("subkv.blk.0.encode: expected at least 28") and message.endswith(", found 4")


def test_digest_covers_plans(tmp_path: Path) -> None:
    edited = FILE.keys | {"subkv.plan.1.budget": (T.FLOAT32, 3.0)}
    path = writer.write(tmp_path / "a.gguf", edited)  # without a new digest
    for budget in (0.0, 3.0):
        with pytest.raises(native.MetadataError, match=r"subkv\.keys\.sha256"):
            native.load(path, budget)


def test_convert_writes_plans(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    bases, model = tmp_path / "calib.safetensors", tmp_path / "m.gguf"
    model.write_bytes(tiny_model("llama").read_bytes())
    write_calibration(bases, random_calibration())
    common = ["--bases", str(bases), str(model), "-y", "--kv-bits", "6", "--bpe-context", "8192"]
    files = {name: tmp_path / f"{name}.gguf" for name in ("none", "some", "own")}
    for name, more in (("none", ["--plans", "none"]), ("some", ["--plans", "4,5"]), ("own", ["--kv-bits", "4"])):
        result = CliRunner().invoke(convert, [*common, *more, "-o", str(files[name])])
        assert result.exit_code == 0, result.output
    default, without = read(files["some"]), read(files["none"])
    assert {*PLANS} <= {plan["budget"] for plan in read(files["own"])["plans"]}  # by default
    assert [plan["budget"] for plan in default["plans"]] == [4.0, 5.0] and default["budget"] == 6.0
    assert default["fingerprint"] == without["fingerprint"] and not without["plans"]
    plan, own = native.load(files["some"], 4.0).json, read(files["own"])
    for name in ("bits_per_element", "bytes_per_token", "recent_bits", "bytes_bases"):
        assert plan[name] == own[name], name
    for a, b in zip(plan["layers"], own["layers"], strict=True):
        for side in ("k", "v"):
            for x, y in zip(a[side], b[side], strict=True):
                assert [(band["n"], band["bits"]) for band in x["bands"]] == [(o["n"], o["bits"]) for o in y["bands"]]


@each(
    ("plans", "sentence"),
    [
        ("", "--plans: expected none, or at most 16 numbers of bits separated by commas, found ''"),
        ("3,x", "--plans: expected none, or at most 16 numbers of bits separated by commas, found '3,x'"),
        ("nan", "--plans: expected none, or at most 16 numbers"),
        (",".join("3" * 17), "--plans: expected none, or at most 16 numbers"),
        ("0.5", "--plans: expected 0.967 to 16.516 bits per element in total"),
    ],
)
def test_refused_plans(plans: str, sentence: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    bases = tmp_path / "calib.safetensors"
    write_calibration(bases, random_calibration())
    common = ["--bases", str(bases), str(tiny_model("llama")), "-o", str(tmp_path / "m.gguf"), "--kv-bits", "6"]
    result = CliRunner().invoke(convert, [*common, "--bpe-context", "8192", "--plans", plans])
    assert result.exit_code and sentence in result.stderr, result.output


def test_requested_plans_near_the_default(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Budgets that a reader tells apart have plans of their own, once."""
    bases, path = tmp_path / "calib.safetensors", tmp_path / "s.gguf"
    write_calibration(bases, random_calibration())
    options = Options(kv_bits=4.25, bpe_context=8192, plans=(4.3, 4.31, 4.26))
    convert_file(tiny_model("llama"), bases, path, options, sidecar=True)
    assert [plan["budget"] for plan in read(path)["plans"]] == pytest.approx([4.3])
    for budget, expected in ((4.3, 4.3), (4.31, 4.3), (4.26, 4.25)):
        assert native.load(path, budget).json["budget"] == pytest.approx(expected)
    derived_numpy.sidecar(tiny_model("llama"), path, Options(kv_bits=5.0, bpe_context=8192, plans=(5.05, 5.05, 5.01)))
    assert [plan["budget"] for plan in read(path)["plans"]] == pytest.approx([5.05])


def test_files_with_one_budget_refuse_plans(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path, bases = tmp_path / "a.gguf", tmp_path / "calib.safetensors"
    with pytest.raises(SubkvError, match=r"expected none with latent attention \(MLA\), .*, found 3, 5") as e:
        derived_numpy.sidecar(tiny_model("deepseek2"), path, Options(plans=(3.0, 5.0)))
    assert e.value.key == "plans"
    derived_numpy.sidecar(tiny_model("deepseek2"), path)  # the default list
    assert not read(path)["plans"]
    write_calibration(bases, random_calibration())
    common = ["--bases", str(bases), str(tiny_model("llama")), "-y", "-o", str(path), "--codec", "int8"]
    result = CliRunner().invoke(convert, [*common, "--plans", "3"])
    assert result.exit_code and "--plans: expected none with codec int8, whose files have one" in result.stderr
    result = CliRunner().invoke(convert, common)
    assert result.exit_code == 0, result.output


def test_planner_and_reader_derive_the_same_matrices(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Else gamma, ratios and predictions would be those of other bases."""
    bases, path = tmp_path / "calib.safetensors", tmp_path / "s.gguf"
    write_calibration(bases, random_calibration())
    options = Options(kv_bits=6.0, bpe_context=8192, plans=(3.5, 5.0))
    result = convert_file(tiny_model("llama"), bases, path, options, sidecar=True)
    assert result.plans is not None
    for plan in result.plans.plans:
        layout = native.load(path, plan.budget)
        for layer in plan.layers:
            for h, head in enumerate(layer.heads):
                for value, stored in ((False, head.k), (True, head.v)):
                    n, d = stored.encode.size, stored.encode.shape[1]
                    encode = layout.basis(layer.shape.il, h, value, False, n).reshape(-1, d)
                    decode = layout.basis(layer.shape.il, h, value, True, n).reshape(-1, d)
                    np.testing.assert_array_equal(encode, stored.encode)
                    np.testing.assert_allclose(decode, stored.decode.astype(np.float32), rtol=2**-9, atol=1e-6)


def test_weights_have_plans(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Without a calibration; libsubkv derives what the planner has not computed."""
    path = tmp_path / "weights.gguf"
    derived_numpy.sidecar(tiny_model("llama"), path)
    default = native.load(path).json
    sizes = []
    for plan in default["plans"]:
        own = native.load(path, plan["budget"]).json
        sizes.append(own["bytes_per_token"])
        for layer in own["layers"]:
            for head in (*layer["k"], *layer["v"]):
                assert head["rank"] == 32 and min(band["bits"] for band in head["bands"]) >= 3
    assert sizes and sizes == sorted({*sizes, default["bytes_per_token"]})[:-1]


@pytest.mark.parametrize("head_size", [64, 96, 128])
def test_values_of_weights_are_mixed_once(head_size: int, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """As in a file of its own: mixed again, one large element of a value would fill one coefficient."""
    path = tmp_path / "weights.gguf"
    derived_numpy.sidecar(tiny_model("llama", head_size=head_size, n_layer=1), path)
    plans = native.load(path).json["plans"]
    assert plans
    for plan in plans:
        layout = native.load(path, plan["budget"])
        encode, decode = (
            layout.basis(0, 0, True, side, head_size**2).reshape(head_size, head_size) for side in (False, True)
        )
        np.testing.assert_allclose(np.abs(encode), head_size**-0.5, rtol=5e-3)
        gain = np.diag(decode @ encode.T)[:, None]
        np.testing.assert_allclose(decode, encode * gain, atol=1e-3)
