"""research.shapes: models and bases of a shape load and run, and have the requested sizes and metadata."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from each import each
from gguf import GGMLQuantizationType, GGUFReader

from research import shapes
from subkv.engine.llama import Llama
from subkv.format import metadata
from subkv.format.window import DEFAULT
from subkv.plan import budget
from subkv.plan.basis import in_bytes

SMALL = ("--layers", 2, "--heads", 4, "--kv-heads", 2, "--embd", 128, "--ff", 160, "--vocab", 300)
N_CTX = 384  # beyond the exact window


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(shapes.main, [str(a) for a in arguments])


def written(folder: Path, *arguments: Any) -> tuple[Path, Path]:
    model = folder / "m.gguf"
    result = run(*arguments, *SMALL, "-o", model)
    assert result.exit_code == 0, result.output
    return model, folder / "m.subkv-sidecar.gguf"


@contextlib.contextmanager
def evaluated(model: Path, bases: Path, kind: str) -> Iterator[tuple[Llama, Any]]:
    """A model that has evaluated tokens beyond the exact window, and its logits, which have a plausible spread."""
    tokens = [1 + i % 255 for i in range(N_CTX - 16)]
    given = {"bases": bases} if kind.startswith("subkv") else {}
    llm = Llama(model, **given, kv_cache=kind, n_ctx=N_CTX, n_threads=1, logits_all=True, verbose=False)
    llm.eval(tokens)
    scores = np.array(llm.scores[: len(tokens)])
    assert np.isfinite(scores).all() and 0.1 < scores.std() < 10
    yield llm, scores
    llm.close()


@each("name", list(shapes.SHAPES))
def test_side_costs_vanish_in_long_contexts(name: str) -> None:
    """Exact window and bases at 128k tokens; a layer of latent attention has one row per token besides its bases."""
    shape = shapes.SHAPES[name]
    most = 0.2 if shape.latent else 0.05 * max(1.0, shape.head_size / 128)  # a basis has its square
    counted = budget.account(*shapes.planned(shape), budget.Overhead(131072, DEFAULT))
    assert 0.0 < counted.window + counted.bases < most


@pytest.mark.parametrize(
    ("name", "options", "d"),
    [
        ("llama-3.2-1b", (), 64),
        ("qwen3-0.6b", ("--type", "q8_0"), 128),
        ("llama-3.1-8b", ("--head-size", 192), 192),
    ],
)
def test_loads_and_generates(tmp_path: Path, name: str, options: tuple[Any, ...], d: int) -> None:
    model, bases = written(tmp_path, name, *options)
    for kind in ("f16", "subkv"):
        with evaluated(model, bases, kind) as (llm, scores):
            assert scores.shape[1] == 300
            assert len(list(zip(range(8), llm.generate([2], reset=False, top_k=1), strict=False))) == 8
            stats = llm.kv_stats()
            assert stats.type_k == kind
            assert stats.bytes_per_token == 2 * 2 * (4 * d if kind == "f16" else 2 + (34 + 32) * d // 64)


def test_latent_attention(tmp_path: Path) -> None:
    model, bases = tmp_path / "m.gguf", tmp_path / "m.subkv-sidecar.gguf"
    small = [*SMALL, "--kv-heads", 1, "--head-size", 64]
    assert run("deepseek-v2-lite", *small, "-o", model).exit_code == 0
    scores = []
    for kind in ("f16", "subkv"):
        with evaluated(model, bases, kind) as (llm, found):
            scores.append(found)
            row = 2 * (512 + 64) if kind == "f16" else 1 + 512 * 17 // 32 + 64 // 2
            assert llm.kv_stats().bytes_per_token == 2 * row
    assert 0.0 < np.abs(scores[0] - scores[1]).mean() < 0.3 * scores[0].std()
    described = metadata.read(bases)
    assert described["bytes_per_token"] == 2 * (1 + 272 + 32) and described["version"] == 5
    refused = run("deepseek-v2-lite", *SMALL, "-o", tmp_path / "other.gguf")
    assert refused.stderr.startswith("--kv-heads: expected 1 with latent attention")


def test_chosen_cells(tmp_path: Path) -> None:
    """The shape has all of an indexer's tensors, and its rows are coded."""
    model, bases = tmp_path / "m.gguf", tmp_path / "m.subkv-sidecar.gguf"
    small = [*SMALL, "--kv-heads", 1, "--head-size", 64]
    assert run("deepseek-v3.2", *small, "-o", model).exit_code == 0
    scores = []
    for kind in ("f16", "subkv"):
        with evaluated(model, bases, kind) as (llm, found):
            scores.append(found)
            stats = llm.kv_stats()
            assert stats.bytes_per_token == 2 * (2 * (512 + 64 + 128) if kind == "f16" else 1 + 272 + 32), stats
            assert stats.bytes_kv >= 2 * 512 * (2 * 128 + 305), stats  # the indexer's keys among them
    assert 0.0 < np.abs(scores[0] - scores[1]).mean() < 0.3 * scores[0].std()


def test_hybrid(tmp_path: Path) -> None:
    """Of four layers the third attends and has rows; a shape without any is refused."""
    model, bases = tmp_path / "m.gguf", tmp_path / "m.subkv-sidecar.gguf"
    assert run("lfm2-350m", *SMALL, "--layers", 4, "--embd", 256, "-o", model).exit_code == 0
    scores = []
    for kind in ("f16", "subkv"):
        with evaluated(model, bases, kind) as (llm, found):
            scores.append(found)
            row = 2 * 64 if kind == "f16" else 1 + 33  # llama.cpp prints the first in hundredths of a MiB
            assert llm.kv_stats().bytes_per_token == pytest.approx(2 * 2 * row, rel=0.05 if kind == "f16" else 1e-9)
    assert 0.0 < np.abs(scores[0] - scores[1]).mean() < 0.3 * scores[0].std()
    refused = run("lfm2-350m", *SMALL, "--layers", 4, "-o", tmp_path / "other.gguf")
    assert refused.stderr.startswith("--embd: expected 256, all heads together, found 128")
    refused = run("lfm2-350m", *SMALL, "-o", tmp_path / "other.gguf")
    assert refused.stderr.startswith("--layers: expected more than 2, the first that attends to all cells, found 2")


@pytest.mark.parametrize(
    ("name", "options", "row_f16", "row"),
    [  # of one layer in four, or six, or of two in four
        ("qwen3.6-27b", (), 2 * 2 * 64, 2 * (2 + 66)),
        ("qwen3.6-35b-a3b", (), 2 * 2 * 64, 2 * (2 + 66)),
        ("gemma-4-31b", ("--kv-heads", 1, "--head-size", 512), 2 * 512, 2 + 66 * 8),
        ("gpt-oss-20b", (), 2 * 2 * 2 * 64, 2 * 2 * (2 + 66)),
    ],
)
def test_layers_of_two_kinds(tmp_path: Path, name: str, options: tuple[Any, ...], row_f16: int, row: int) -> None:
    """Full-attention layers are coded, recurrent layers have no rows, and layers of sliding windows hold q8_0 rows.

    Attention of random weights without a scale (Gemma 4) changes with q8_0 rows by more than it does elsewhere.
    """
    model, bases = tmp_path / "m.gguf", tmp_path / "m.subkv-sidecar.gguf"
    whole = shapes.SHAPES[name]
    result = run(name, *SMALL, "--head-size", 64, "--layers", whole.layers, *options, "-o", model)
    assert result.exit_code == 0, result.output
    scores = []
    for kind in ("f16", "subkv", *(["q8_0"] if whole.window else [])):
        with evaluated(model, bases, kind) as (llm, found):
            scores.append(found)
            stats = llm.kv_stats()
            bits = {"f16": 16.0, "q8_0": 8.5}.get(kind)
            per_token = row if bits is None else 2 * row_f16 * bits / 16
            assert stats.bytes_per_token == pytest.approx(per_token, rel=0.02), stats
            assert stats.n_layer_coded == (len(whole.coded) if bits is None else 0)
            assert bool(stats.bytes_stock) == (bits is not None or whole.window is not None)
    moved, *of_q8_0 = (np.abs(scores[0] - other).mean() for other in scores[1:])
    assert 0.0 < moved < max(0.3 * scores[0].std(), *(1.1 * x for x in of_q8_0), 0.0)
    assert [layer["il"] for layer in metadata.read(bases)["layers"]] == whole.coded
    refused = run(name, *SMALL, *options, "--layers", 1, "-o", tmp_path / "other.gguf")
    assert refused.stderr.startswith(f"--layers: expected more than {whole.period - 1}, the first that attends to all")
    if whole.window and whole.window.kv_heads > 1:
        refused = run(name, *SMALL, "-o", tmp_path / "other.gguf")
        assert refused.stderr == "--heads: expected a multiple of 8 KV heads of sliding layers, found 4\n"


@each("name", list(shapes.SHAPES))
def test_values_of_tensors(tmp_path: Path, name: str) -> None:
    """Matrices have the requested type; all other tensors are float32 with one value."""
    model = tmp_path / "m.gguf"
    small = [*SMALL, "--embd", 256, "--head-size", 64, "--layers", min(shapes.SHAPES[name].layers, 6)]
    assert run(name, *small, "--kv-heads", 1, "-o", model).exit_code == 0
    types: dict[bool, set[GGMLQuantizationType]] = {True: set(), False: set()}
    for tensor in GGUFReader(model).tensors:
        size = tuple(int(n) for n in reversed(tensor.shape))
        types[shapes.is_matrix(tensor.name, size)].add(tensor.tensor_type)
        if tensor.tensor_type == GGMLQuantizationType.F32:
            assert (tensor.data == shapes.constant(tensor.name)).all(), tensor.name
    assert types == {True: {GGMLQuantizationType.Q4_0}, False: {GGMLQuantizationType.F32}}


@pytest.mark.parametrize("d", [64, 128])
def test_bands_are_as_documented(tmp_path: Path, d: int) -> None:
    eighth = d // 8
    _, bases = written(tmp_path, "llama-3.2-1b", "--head-size", d)
    described = metadata.read(bases)
    assert described["calibration"]["text"] == shapes.NO_CALIBRATION
    assert [layer["il"] for layer in described["layers"]] == [0, 1]
    for layer in described["layers"]:
        for k, v in zip(layer["k"], layer["v"], strict=True):
            assert k["centred"]
            of_k, of_v = ([(band["n"], band["bits"]) for band in side["bands"]] for side in (k, v))
            assert of_k == [(eighth, 8), (eighth, 6), (2 * eighth, 4), (4 * eighth, 3)]
            assert of_v == [(eighth, 6), (5 * eighth, 4), (2 * eighth, 3)]
    heads = [head for layer in metadata.read_heads(bases).values() for head in layer]
    for side in (basis for head in heads for basis in (head.k, head.v)):
        encode, decode = side.encode.astype(np.float64), side.decode.astype(np.float64)
        assert np.abs(encode @ decode.T - np.eye(d)).max() < 2e-3
        assert np.abs(encode @ encode.T - np.eye(d)).max() < 0.05  # a rotation in bytes
        assert np.array_equal(in_bytes(encode), encode)
    assert len({head.k.encode.tobytes() for head in heads}) == len(heads)


@pytest.mark.parametrize("kind", list(shapes.TYPES))
def test_matrices_are_of_one_type(tmp_path: Path, kind: str) -> None:
    model, _ = written(tmp_path, "llama-3.1-8b", "--type", kind)
    reader = GGUFReader(model)
    matrices = {tensor.name: tensor for tensor in reader.tensors if len(tensor.shape) > 1}
    assert {tensor.tensor_type for tensor in matrices.values()} == {GGMLQuantizationType[kind.upper()]}
    assert {"token_embd.weight", "output.weight", "blk.1.ffn_down.weight"} <= set(matrices)
    assert list(matrices["blk.1.ffn_down.weight"].shape) == [160, 128]


@each(
    ("name", "whole", "millions"),
    [
        ("llama-3.2-1b", {}, 1236),
        ("qwen3-0.6b", {}, 596),
        ("llama-3.1-8b", {"layers": 32, "vocab": 128256}, 8030),
        ("lfm2-350m", {}, 354),
        ("qwen3.6-27b", {"layers": 64, "vocab": 248320}, 26896),
        ("qwen3.6-35b-a3b", {"layers": 40, "vocab": 248320, "experts": 256}, 34661),
        ("gemma-4-31b", {"layers": 60, "vocab": 262144}, 30697),
        ("gpt-oss-20b", {"layers": 24, "vocab": 201088, "experts": 32}, 20915),
    ],
)
def test_shapes_are_those_of_the_models(name: str, whole: dict[str, Any], millions: int) -> None:
    shape = dataclasses.replace(shapes.SHAPES[name], **whole)
    assert round(sum(map(math.prod, shape.tensors().values())) / 1e6) == millions


@each(
    ("options", "sentence"),
    [
        (("--heads", 3), "--heads: expected a multiple of 2 KV heads, found 3"),
        (("--head-size", 96), "--head-size: expected 64, 128, 192, 256 or 512, found 96"),
        (("--embd", 100), "--embd: expected a multiple of 32, found 100"),
        (("--ff", 33), "--ff: expected a multiple of 32, found 33"),
        (("--bases", "m.gguf"), "--bases: expected another file than the model, found m.gguf"),
        (("-o", "none/m.gguf"), "-o: cannot write none/m.gguf: No such file or directory"),
    ],
)
def test_bad_input_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[Any, ...], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("qwen3-0.6b", "-o", "m.gguf", *SMALL, *options)
    assert (result.exit_code, result.output.strip()) == (1, sentence)
    assert list(tmp_path.iterdir()) == []


def test_wrong_usage_is_reported() -> None:
    assert run("gpt-5", "-o", "m.gguf").exit_code == 2
    assert run("qwen3-0.6b").exit_code == 2
    assert run("qwen3-0.6b", "-o", "m.gguf", "--vocab", 257).exit_code == 2
