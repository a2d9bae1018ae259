"""`convert`: the written file against gguf-py, libsubkv and the base; options; every refusal; nothing half-written."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calib_synthetic import random_calibration, with_key_means
from click.testing import CliRunner, Result
from each import each
from format import writer
from gguf import GGUFReader, GGUFWriter

from converter.cli import default_output
from converter.cli import main as convert
from subkv.base.errors import SubkvError
from subkv.format.calibration import Calibration, write_calibration
from subkv.format.codec import row_bytes
from subkv.format.metadata import read
from subkv.format.window import DEFAULT, Window
from subkv.native.bases import model_weights
from subkv.native.gguf import Gguf
from subkv.plan import pipeline
from subkv.plan.basis import gains
from subkv.plan.budget import Head, Overhead, account, budget_range
from subkv.plan.costs import output_metrics
from subkv.plan.pipeline import Fit, Options


@pytest.fixture
def base(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of the tiny llama model that a test may damage."""
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny_model("llama").read_bytes())
    return path


@pytest.fixture
def run(base: Path, tmp_path: Path) -> Callable[..., Result]:
    """run(*args, calibration=…) converts `base` with a random calibration that fits it."""

    def invoke(*args: str, calibration: Calibration | None = None, model: Path | None = None) -> Result:
        bases = tmp_path / "calib.safetensors"
        write_calibration(bases, calibration or random_calibration())
        return CliRunner().invoke(convert, ["--bases", str(bases), str(model or base), "--kv-bits", "6", "-y", *args])

    return invoke


def weights_digest(path: Path, first: int, last: int) -> str:
    """FORMAT.md §1.3."""
    names = [f"blk.{first}.attn_{part}.weight" for part in ("k", "v", "qkv", "kv_a_mqa") if first != last]
    names += [f"blk.{last}.attn_{part}.weight" for part in ("k", "qkv", "kv_a_mqa")]
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    digest = hashlib.sha256()
    for tensor in (tensors[name] for name in names if name in tensors):
        data = tensor.data.tobytes()
        shape = ",".join(str(n) for n in [*map(int, tensor.shape), 1, 1, 1][:4])
        digest.update("".join(f"{x}\0" for x in (tensor.name, int(tensor.tensor_type), shape, len(data))).encode())
        starts = [i * ((len(data) - 4096) // 63) for i in range(64)]
        digest.update(data if len(data) <= 262144 else b"".join(data[at : at + 4096] for at in starts))
    return digest.hexdigest()


def fields(path: Path) -> dict[str, Any]:
    """The subkv keys of a file as gguf-py reads them."""
    reader = GGUFReader(path)
    return {name: field.contents() for name, field in reader.fields.items() if name.startswith("subkv.")}


def test_large_weights_are_sampled(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    weights = np.random.default_rng(1).standard_normal((300, 300)).astype(np.float32)
    digests = []
    for change in (0, 1):
        weights[0, 0] += change
        file = GGUFWriter(path, "llama")
        file.add_tensor("blk.3.attn_k.weight", weights)
        file.add_tensor("blk.2.attn_v.weight", weights[:50])
        file.write_header_to_file()
        file.write_kv_data_to_file()
        file.write_tensors_to_file()
        file.close()
        digests.append([model_weights(path, first, 3) for first in (2, 3)])
        assert digests[-1] == [weights_digest(path, first, 3) for first in (2, 3)]
    assert len({*digests[0], *digests[1]}) == 4
    assert model_weights(path, 0, 1) == ""


def test_copy_keeps_every_tensor_and_key(run: Callable[..., Result], base: Path) -> None:
    result = run()
    assert result.exit_code == 0, result.output
    old, new = GGUFReader(base), GGUFReader(base.with_name("m.subkv.gguf"))
    assert [t.name for t in new.tensors] == [t.name for t in old.tensors]
    for a, b in zip(old.tensors, new.tensors, strict=True):
        assert (a.tensor_type, list(a.shape)) == (b.tensor_type, list(b.shape))
        np.testing.assert_array_equal(a.data, b.data)
    for name, field in old.fields.items():
        if not name.startswith("GGUF."):
            assert new.fields[name].contents() == field.contents()
    with Gguf(base) as g, Gguf(base.with_name("m.subkv.gguf")) as h:
        assert base.read_bytes()[g.data_offset :] == h.path.read_bytes()[h.data_offset :]


def test_keys_are_those_of_the_format(run: Callable[..., Result], base: Path, tmp_path: Path) -> None:
    assert run("--plans", "none").exit_code == 0
    found = fields(base.with_name("m.subkv.gguf"))
    layout = json.loads(found.pop("subkv.layout"))
    blocks = [base64.b64decode(found.pop(f"subkv.blk.{il}.basis"), validate=True) for il in range(2)]
    keys = {
        name: (field.types[0], field.contents())
        for name, field in GGUFReader(base.with_name("m.subkv.gguf")).fields.items()
    }
    assert found.pop("subkv.keys.sha256") == writer.keys_digest(keys)
    generator = found.pop("subkv.generator")
    rows, total = found.pop("subkv.bits_per_element.rows"), found.pop("subkv.bits_per_element")
    assert generator.startswith("subkv ")
    assert found == {
        "subkv.version": 5,
        "subkv.codec": "banded",
        "subkv.arch": "llama",
        "subkv.block_count": 2,
        "subkv.n_sink": 4,
        "subkv.n_recent": 128,
        "subkv.recent_bits": 10,
        "subkv.bpe_context": 4096,
        "subkv.gamma": "calibrated",
        "subkv.basis_k": "query-aware",
        "subkv.basis_v": "output-aware",
        "subkv.base.sha256": hashlib.sha256(base.read_bytes()).hexdigest(),
        "subkv.base.weights": weights_digest(base, 0, 1),
        "subkv.calibration.sha256": hashlib.sha256((tmp_path / "calib.safetensors").read_bytes()).hexdigest(),
        "subkv.calibration.tokens": 1000,
        "subkv.calibration.text": "a.txt",
    }
    heads, bands = [], []
    for il, (layer, block) in enumerate(zip(layout["layers"], blocks, strict=True)):
        assert {key: layer[key] for key in ("il", "n_head_kv", "d_k", "d_v")} == {
            "il": il,
            "n_head_kv": 2,
            "d_k": 32,
            "d_v": 32,
        }
        offset = 0
        for head in range(2):
            for kind in ("k", "v"):
                plan = tuple(map(tuple, layer[kind][head]))
                r = sum(n for n, _ in plan)
                numbers = np.frombuffer(block, "<f4", (kind == "k") + len(plan), offset)
                assert (numbers > 0).all()
                offset += 4 * len(numbers)
                if kind == "k":
                    assert not np.frombuffer(block, "<f2", 32, offset).any()  # the means of this calibration are zeros
                    offset += 2 * 32
                encode, decode = np.frombuffer(block, "<f2", 2 * r * 32, offset).reshape(2, r, 32).astype(np.float64)
                offset += 4 * r * 32
                np.testing.assert_allclose(encode @ decode.T * gains(plan), np.eye(r), atol=0.02)
                heads.append(Head(32, np.ones(32)))
                bands.append(plan)
        assert offset == len(block)
    counted = account(heads, bands, Overhead(4096, DEFAULT))
    assert rows == pytest.approx(counted.rows)
    assert total == pytest.approx(counted.total)
    assert 0.98 * 6 <= counted.total <= 6


def test_files_are_overwritten_only_on_request(base: Path, tmp_path: Path) -> None:
    bases, target = tmp_path / "calib.safetensors", base.with_name("m.subkv.gguf")
    write_calibration(bases, random_calibration())
    target.write_bytes(b"earlier")
    given = ["--bases", str(bases), str(base), "--kv-bits", "6"]
    refused(CliRunner().invoke(convert, given), f"-o: expected a file that does not exist yet, found {target}; -y ")
    assert CliRunner().invoke(convert, [*given, "--dry-run"]).exit_code == 0
    assert target.read_bytes() == b"earlier"
    assert CliRunner().invoke(convert, [*given, "-y"]).exit_code == 0
    assert target.read_bytes() != b"earlier"


def test_libsubkv_reads_the_written_file(run: Callable[..., Result], base: Path) -> None:
    result = run()
    described = read(base.with_name("m.subkv.gguf"))
    stored = json.loads(fields(base.with_name("m.subkv.gguf"))["subkv.layout"])
    assert described["codec"] == "banded"
    for got, want in zip(described["layers"], stored["layers"], strict=True):
        for kind in ("k", "v"):
            assert [[[b["n"], b["bits"]] for b in head["bands"]] for head in got[kind]] == want[kind]
            assert [head["row_bytes"] for head in got[kind]] == [row_bytes(tuple(map(tuple, b))) for b in want[kind]]
    assert f"bytes per token: {described['bytes_per_token']} (f16: 512)" in result.output


def test_reading_a_plain_model_names_the_key(base: Path) -> None:
    with pytest.raises(SubkvError, match=r"subkv\.version"):
        read(base)


def test_sidecar_has_the_same_keys_and_no_tensors(run: Callable[..., Result], base: Path, tmp_path: Path) -> None:
    assert run().exit_code == 0
    result = run("--sidecar")
    assert result.exit_code == 0, result.output
    side = base.with_name("m.subkv-sidecar.gguf")
    found = fields(side)
    with Gguf(base) as opened:
        assert found.pop("subkv.base.content") == opened.content()
    copied = fields(base.with_name("m.subkv.gguf"))
    assert found.pop("subkv.keys.sha256") != copied.pop("subkv.keys.sha256")  # that of a sidecar covers one key more
    assert found == copied
    reader = GGUFReader(side)
    assert len(reader.tensors) == 0
    assert reader.fields["general.architecture"].contents() == "llama"
    assert read(side)["fingerprint"] == read(base.with_name("m.subkv.gguf"))["fingerprint"]


def test_conversion_is_reproducible(run: Callable[..., Result], tmp_path: Path) -> None:
    assert run("-o", str(tmp_path / "a")).exit_code == 0
    assert run("-o", str(tmp_path / "b")).exit_code == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_dry_run_prints_and_writes_nothing(run: Callable[..., Result], tmp_path: Path) -> None:
    result = run("--dry-run", "-o", "/none/such/place")
    assert result.exit_code == 0, result.output
    assert "dry run: no bases were written" in result.output
    assert "bits per element at 4096 tokens: rows " in result.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["calib.safetensors", "m.gguf"]


@each("codec", ["int8", "banded"])
@each("basis", [("pca", "pca"), ("query-aware", "output-aware")])
@each("gamma", ["calibrated", "sqrt", "one"])
def test_every_method(
    run: Callable[..., Result], base: Path, tmp_path: Path, codec: str, basis: tuple[str, str], gamma: str
) -> None:
    bases = tmp_path / "calib.safetensors"
    write_calibration(bases, random_calibration())
    budget = ["--kv-bits", "5"] if codec == "banded" else []
    args = ["--codec", codec, "--basis-k", basis[0], "--basis-v", basis[1], "--gamma", gamma, *budget]
    args += ["--rank-k", "24", "--rank-v", "16", "--n-sink", "8", "--n-recent", "64", "--bpe-context", "5000"]
    result = CliRunner().invoke(convert, ["--bases", str(bases), str(base), "-y", *args])
    assert result.exit_code == 0, result.output
    described = read(base.with_name("m.subkv.gguf"))
    names = {"calibrated": "calibrated", "sqrt": "sqrt_r_d", "one": "one"}
    assert [described[key] for key in ("codec", "basis_k", "basis_v", "gamma")] == [codec, *basis, names[gamma]]
    assert [described[key] for key in ("n_sink", "n_recent", "bpe_context")] == [8, 64, 5000]
    for layer in described["layers"]:
        for head in layer["k"]:
            assert head["rank"] <= 24
            if gamma != "calibrated":
                assert head["gamma"] == pytest.approx(1.0 if gamma == "one" else np.sqrt(head["rank"] / 32))
        assert all(head["rank"] <= 16 for head in layer["v"])
        if codec == "int8":
            ranks = [[(b["n"], b["bits"]) for b in head["bands"]] for kind in "kv" for head in layer[kind]]
            assert ranks == [[(24, 8)]] * 2 + [[(16, 8)]] * 2


def centred_calibration(size: float = 2.0, **overrides: Any) -> Calibration:
    calibration = random_calibration(**overrides)
    return replace(calibration, layers=tuple(with_key_means(layer, size) for layer in calibration.layers))


@pytest.mark.parametrize(("kv_bits", "row"), [("6", 2 * 32), ("4", 32 + 2)])
def test_keys_are_coded_less_their_mean(run: Callable[..., Result], base: Path, kv_bits: str, row: int) -> None:
    """row: bytes of a row of D behind its first 8, which a small budget holds in bytes."""
    calibration = centred_calibration()
    result = run("--kv-bits", kv_bits, calibration=calibration)
    assert result.exit_code == 0, result.output
    target = base.with_name("m.subkv.gguf")
    described, found = read(target), fields(target)
    layout = json.loads(found["subkv.layout"])
    for il, layer in enumerate(layout["layers"]):
        block = base64.b64decode(found[f"subkv.blk.{il}.basis"])
        at = 4 + 4 * len(layer["k"][0])
        mean = np.frombuffer(block, "<f2", 32, at)
        np.testing.assert_allclose(mean, calibration.layers[il].k1[0], rtol=1e-3, atol=1e-6)
        assert [head["centred"] for head in described["layers"][il]["k"]] == [True, True]
        assert all("centred" not in head for head in described["layers"][il]["v"])
    # window and bases count as allocated: the rest of the total equals libsubkv's report
    window = (16 * 4 + (10 + 16 / 32) * (128 + 16)) / 4096
    bases = found["subkv.bits_per_element"] - found["subkv.bits_per_element.rows"] - window
    assert bases * 4096 * 2 * 2 * (32 + 32) / 8 == pytest.approx(described["bytes_bases"], rel=1e-4)
    ranks = [head["rank"] for layer in described["layers"] for side in "kv" for head in layer[side]]
    encoders, means = sum(ranks) * (32 + 2), sum(2 * 32 + 4 * rank for rank in ranks) / 2
    decoders = sum(8 * 2 * 32 + (rank - 8) * row for rank in ranks)
    assert described["bytes_bases"] == pytest.approx(encoders + decoders + means, rel=0.02)


def test_every_budget_between_two_is_planned(base: Path) -> None:
    """Also in a context so short that decoders in bytes leave bits that no rows can spend."""
    with Gguf(base) as opened:
        fit = Fit(opened, random_calibration(), Options(window=Window(4, 16, 8), bpe_context=16))
    low, high = budget_range(fit.heads, fit.overhead)
    found = []
    for kv_bits in np.linspace(low.total, high.total, 40):
        narrow = fit.narrow(kv_bits)
        assert fit.account(fit.plan(kv_bits), narrow).total <= kv_bits * (1.0 + 1e-9)
        found.append(narrow)
    assert found == sorted(found, reverse=True) and set(found) == {True, False}


def test_centring_is_as_good_as_keys_without_a_mean(run: Callable[..., Result], base: Path) -> None:
    """The layout of keys around a mean is that of the keys alone, and without centring it is another."""
    layouts = {}
    for name, calibration, args in (
        ("none", random_calibration(), ["--codec", "int8"]),
        ("on", centred_calibration(), ["--codec", "int8"]),
        ("off", centred_calibration(), ["--codec", "int8", "--no-center-k"]),
    ):
        write_calibration(base.with_name("c.safetensors"), calibration)
        result = CliRunner().invoke(convert, ["--bases", str(base.with_name("c.safetensors")), str(base), "-y", *args])
        assert result.exit_code == 0, result.output
        layouts[name] = read(base.with_name("m.subkv.gguf"))["layers"]
    gammas = {name: [head["gamma"] for layer in layers for head in layer["k"]] for name, layers in layouts.items()}
    assert gammas["on"] == pytest.approx(gammas["none"], rel=1e-2)
    assert not any(head["centred"] for name in ("none", "off") for layer in layouts[name] for head in layer["k"])


def test_centring_is_off_without_sinks(run: Callable[..., Result], base: Path) -> None:
    result = run("--n-sink", "0", calibration=centred_calibration(n_skip=0))
    assert result.exit_code == 0, result.output
    assert "--center-k: off, because centring needs exact sinks, found --n-sink 0" in result.stderr
    assert not any(head["centred"] for layer in read(base.with_name("m.subkv.gguf"))["layers"] for head in layer["k"])
    quiet = run("--n-sink", "0", "--no-center-k", calibration=centred_calibration(n_skip=0))
    assert quiet.exit_code == 0 and "--center-k" not in quiet.stderr


def test_partial_coverage_codes_the_calibrated_layers_only(run: Callable[..., Result], base: Path) -> None:
    calibration = random_calibration()
    result = run(calibration=replace(calibration, layers=calibration.layers[1:]))
    assert result.exit_code == 0, result.output
    assert [layer["il"] for layer in read(base.with_name("m.subkv.gguf"))["layers"]] == [1]


def test_output_metric_is_the_gram_matrix_of_the_group(base: Path) -> None:
    weights = {t.name: np.array(t.data) for t in GGUFReader(base).tensors}["blk.1.attn_output.weight"]
    with Gguf(base) as g:
        metrics = output_metrics(g, random_calibration().layers[1].shape)
    for head in range(2):
        slices = [weights[:, h * 32 : (h + 1) * 32].astype(np.float64) for h in (2 * head, 2 * head + 1)]
        np.testing.assert_allclose(metrics[head], sum(w.T @ w for w in slices), rtol=1e-5, atol=1e-5)


#
# refusals
#


def refused(result: Result, sentence: str, code: int = 1) -> None:
    assert result.exit_code == code, result.output
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(sentence), result.output
    assert "Traceback" not in result.output


@each(
    ("change", "sentence"),
    [
        ({"arch": "qwen2"}, "subkv.calibration.arch: expected 'llama' as in the model, found 'qwen2'"),
        ({"n_layer": 3}, "subkv.calibration.block_count: expected 2 layers as in the model, found 3"),
        ({"d_k": 64}, "subkv.calibration.layers: expected d_k 32 in layer 0 as in the model, found 64"),
        ({"d_v": 16}, "subkv.calibration.layers: expected d_v 32 in layer 0 as in the model, found 16"),
        ({"n_head_kv": 4}, "subkv.calibration.layers: expected n_head_kv 2 in layer 0 as in the model, found 4"),
        ({"n_head": 8}, "subkv.calibration.layers: expected n_head 4 in layer 0 as in the model, found 8"),
    ],
)
def test_calibration_of_another_model(
    run: Callable[..., Result], tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    refused(run(calibration=random_calibration(**change)), sentence)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["calib.safetensors", "m.gguf"]


@each(
    ("args", "sentence"),
    [
        (["--kv-bits", "1"], "--kv-bits: expected "),
        (["--kv-bits", "40"], "--kv-bits: expected "),
        (["--kv-bits", "nan"], "--kv-bits: expected "),
        (["--rank-k", "40"], "--rank-k: expected at most the head size 32 of layer 0, found 40"),
        (["--n-sink", "2"], "--n-sink: expected at least 4, found 2: the calibration skipped the first 4 positions"),
        (["-o", "/none/such/place/x.gguf"], "-o: cannot write "),
        (["-o", "."], "-o: expected a file name, found the folder ."),
        (["-o", "MODEL"], "-o: expected another file than the model, found "),
        (["-o", "BASES"], "-o: expected another file than --bases, found "),
    ],
)
def test_bad_options(run: Callable[..., Result], base: Path, tmp_path: Path, args: list[str], sentence: str) -> None:
    names = {"MODEL": str(base), "BASES": str(tmp_path / "calib.safetensors")}
    before = base.read_bytes()
    refused(run(*(names.get(arg, arg) for arg in args)), sentence)
    assert base.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["calib.safetensors", "m.gguf"]


@each(
    ("args", "sentence"),
    [
        (["--rank-v", "12"], "'--rank-v': expected a positive multiple of 8, found 12"),
        (["--n-sink", "5000"], "'--n-sink': 5000 is not in the range 0<=x<=4096"),
        (["--n-recent", "-1"], "'--n-recent': -1 is not in the range 0<=x<=65536"),
    ],
)
def test_options_out_of_range(run: Callable[..., Result], base: Path, args: list[str], sentence: str) -> None:
    """Wrong usage, which is refused before a calibration starts."""
    refused(run(*args), f"Error: Invalid value for {sentence}", code=2)


def test_links_to_the_model_are_the_model(run: Callable[..., Result], base: Path, tmp_path: Path) -> None:
    (tmp_path / "link.gguf").symlink_to(base)
    refused(run("-o", str(tmp_path / "link.gguf")), "-o: expected another file than the model")


@pytest.mark.parametrize("args", [["--codec", "int8"], ["--codec", "x"], ["--bpe-context", "0"], ["--nonsense"]])
def test_bad_usage_exits_with_two(run: Callable[..., Result], args: list[str]) -> None:
    assert run(*args).exit_code == 2


def test_damaged_models(run: Callable[..., Result], base: Path, tmp_path: Path) -> None:
    whole = base.read_bytes()
    bad = tmp_path / "bad.gguf"
    refused(run(model=tmp_path / "none.gguf"), "expected a GGUF file, found no file ")
    for content in (b"", b"GGML" + whole[4:], whole[:20], whole[:2000], whole[:-1]):
        bad.write_bytes(content)
        result = run(model=bad)
        refused(result, "expected ")
        assert str(bad) in result.stderr


def test_converted_models_are_not_converted_again(run: Callable[..., Result], base: Path) -> None:
    assert run().exit_code == 0
    refused(run(model=base.with_name("m.subkv.gguf")), "subkv.version: expected a base model without subkv keys")


def test_missing_output_weight_is_named(run: Callable[..., Result], base: Path) -> None:
    """The output projection has another name: output-aware is refused, pca works."""
    renamed = base.read_bytes().replace(b"blk.1.attn_output.weight", b"blk.1.attn_outpuu.weight")
    base.write_bytes(renamed)
    refused(run(), "blk.1.attn_output.weight: expected this tensor in ")
    assert "--basis-v pca does not" in run().stderr
    assert run("--basis-v", "pca").exit_code == 0


def test_bad_calibration_names_the_tensor(run: Callable[..., Result]) -> None:
    calibration = random_calibration()
    layer = calibration.layers[1]
    poisoned = replace(layer, v2=np.where(np.arange(32) == 3, np.nan, layer.v2))
    result = run(calibration=replace(calibration, layers=(calibration.layers[0], poisoned)))
    refused(result, "blk.1.v2: expected finite values, found NaN or infinity")


def test_a_mean_that_no_keys_can_have_is_refused(run: Callable[..., Result]) -> None:
    calibration = centred_calibration()
    layer = calibration.layers[1]
    wrong = replace(calibration, layers=(calibration.layers[0], replace(layer, k1=-layer.k1)))
    assert run(calibration=wrong).exit_code == 0  # a mean has no sign that the second moment knows
    wrong = replace(calibration, layers=(calibration.layers[0], replace(layer, k1=2 * layer.k1)))
    refused(run(calibration=wrong), "layer 1 head 0: k1: expected a mean whose square is within the second moment k2")
    assert run("--no-center-k", calibration=wrong).exit_code == 0
    huge = replace(layer, k1=1e6 * np.ones_like(layer.k1), k2=layer.k2 + 1e12)
    result = run(calibration=replace(calibration, layers=(calibration.layers[0], huge)))
    refused(result, "layer 1 head 0: basis mean: expected values within half precision, found 1e+06")


def test_full_disk_leaves_the_earlier_file(run: Callable[..., Result], base: Path, tmp_path: Path) -> None:
    """A file size limit replaces a full disk; it is reached within the tensor data."""
    target = base.with_name("m.subkv.gguf")
    target.write_bytes(b"earlier")
    write_calibration(tmp_path / "calib.safetensors", random_calibration())
    resource = pytest.importorskip("resource")  # not on Windows
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    runner, args = CliRunner(), ["--bases", str(tmp_path / "calib.safetensors"), str(base), "--kv-bits", "6", "-y"]
    resource.setrlimit(resource.RLIMIT_FSIZE, (base.stat().st_size, hard))
    try:
        result = runner.invoke(convert, args)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    refused(result, "-o: cannot write ")
    assert "no file was left behind" in result.stderr
    assert target.read_bytes() == b"earlier"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["calib.safetensors", "m.gguf", "m.subkv.gguf"]


def test_default_names() -> None:
    assert default_output(Path("a/m.gguf")) == Path("a/m.subkv.gguf")
    assert default_output(Path("m.bin"), sidecar=True) == Path("m.bin.subkv-sidecar.gguf")


@pytest.mark.parametrize("module", ["converter", "converter.cli", "converter.calibrate"])
def test_modules_are_commands(module: str) -> None:
    found = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, env=dict(os.environ), check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("Usage: ")


#
# the default budget and its message
#


def bare(base: Path, folder: Path, calibration: Calibration, *args: str) -> Result:
    """convert without a budget."""
    bases = folder / "bare.safetensors"
    write_calibration(bases, calibration)
    return CliRunner().invoke(convert, ["--bases", str(bases), str(base), "--dry-run", *args])


def test_default_budget_equals_q8_0_by_estimate(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sensitivities, structural metrics replace them: the budget is still the smallest that equals q8_0, but
    at most the one at which bases from the weights do."""
    result = bare(base, tmp_path, random_calibration())
    assert result.exit_code == 0, result.output
    assert (
        "--kv-bits: 6.5 by default, the most without sensitivities; 8.65 are estimated to equal q8_0" in result.stderr
    )
    monkeypatch.setattr(pipeline, "MOST_ESTIMATED", 16.0)
    result = bare(base, tmp_path, random_calibration())
    assert result.exit_code == 0, result.output
    assert "by default, the smallest whose estimated attention error is at most q8_0's" in result.stderr
    assert "predicted KLD" not in result.stdout


def test_default_budget_without_samples_is_noted(base: Path, tmp_path: Path) -> None:
    result = bare(base, tmp_path, random_calibration(samples=0))
    assert result.exit_code == 0, result.output
    assert "--kv-bits: 4.5 by default, because q8_0's quality cannot be predicted" in result.stderr


def test_no_default_budget_from_a_type_that_tells_nothing(base: Path, tmp_path: Path) -> None:
    """Keys around means of 500: q8_0's steps follow these, and any budget would be as good."""
    result = bare(base, tmp_path, centred_calibration(500.0))
    assert result.exit_code == 0, result.output
    assert (
        "--kv-bits: 4.5 by default, because quality cannot be predicted: q8_0's rounding is as large as"
        in result.stderr
    )


def test_too_few_tokens_for_the_rank_are_noted(base: Path, tmp_path: Path) -> None:
    scant = random_calibration()
    layers = tuple(replace(layer, shape=replace(layer.shape, tokens=500)) for layer in scant.layers)
    result = bare(base, tmp_path, replace(scant, layers=layers), "--kv-bits", "6")
    assert result.exit_code == 0, result.output
    assert "--bases: expected at least 512 calibrated tokens for rank 32, found 500" in result.stderr
    fewer = bare(base, tmp_path, replace(scant, layers=layers), "--kv-bits", "6", "--rank-k", "16", "--rank-v", "16")
    assert "calibrated tokens" not in fewer.stderr
