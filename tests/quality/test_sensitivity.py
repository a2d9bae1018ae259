"""Sensitivities predict the KLD that small errors cause, and everything that is built on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from each import each
from references import N_RECENT, evaluating

from converter import caches, evaluate, sensitivity
from converter.cli import main as convert
from converter.corpus import cut, read_text
from converter.scoring import log_softmax
from subkv.format.calibration import Calibration, read_calibration, write_calibration
from subkv.format.window import N_SINK, Window
from subkv.native.gguf import Gguf
from subkv.plan.pipeline import Fit, Options


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("n_recent", [0, N_RECENT])
def test_predicts_the_kld_of_small_noise(
    side: str, n_recent: int, measured: Path, reference: Callable[[str], Any], text: Path
) -> None:
    """Independent noise on every coded key (or value) of one head of each layer: ½ tr(S C) against the KLD caused."""
    r = reference("llama")
    stats = read_calibration(measured)
    chunk = r.tokenize(text.read_bytes())[-256:]
    r.match(stats, chunk)
    exact = log_softmax(r.logits(chunk, 128))
    for il in range(2):
        rng = np.random.default_rng(il)
        field = side if n_recent else f"{side}0"
        metric = getattr(stats.layers[il].sensitivity, field)[1]
        sigma = np.sqrt(0.02 / np.trace(metric))  # ½ tr = 0.01 nats

        def noisy(layer: int, k: Any, v: Any, il: int = il, sigma: float = sigma, rng: Any = rng) -> Any:
            x = (k if side == "k" else v).copy()
            if layer == il:
                x[1] += sigma * rng.standard_normal(x[1].shape).astype(np.float32)
            return (x, v) if side == "k" else (k, x)

        found = []
        for _ in range(4):
            disturbed = log_softmax(r.coded_logits(chunk, 128, noisy, stats.n_skip, n_recent))
            found.append(float(np.mean(np.sum(np.exp(exact) * (exact - disturbed), axis=1))))
        # one gradient per cell, another text and a finite error: agreement within a factor
        assert 0.5 < np.mean(found) / 0.01 < 2.0, (side, il, found)


def test_values_beyond_the_window_matter_less(measured: Path) -> None:
    stats = read_calibration(measured)
    assert stats.sensitivity is not None and stats.sensitivity.method == "fisher"
    assert stats.sensitivity.n_recent == N_RECENT
    assert stats.sensitivity.tokens == 12 * 128
    assert 0.3 < stats.sensitivity.correction < 4.0 and 0.3 < stats.sensitivity.correction0 < 4.0
    near = sum(np.trace(layer.sensitivity.v0.sum(axis=0)) for layer in stats.layers if layer.sensitivity)
    far = sum(np.trace(layer.sensitivity.v.sum(axis=0)) for layer in stats.layers if layer.sensitivity)
    assert 0.0 < far < near


def fit_of(model: Path, calibration: Calibration, **options: Any) -> Fit:
    with Gguf(model) as base:
        return Fit(base, calibration, Options(window=Window(N_SINK, N_RECENT), bpe_context=10_000_000, **options))


def test_measured_bases_beat_structural_ones(
    measured: Path, reference: Callable[[str], Any], tiny_model: Callable[..., Path], text: Path
) -> None:
    """At equal bits, kld-aware bases and bits give less KLD than a calibration without sensitivities."""
    r = reference("llama")
    stats = read_calibration(measured)
    blind = replace(stats, sensitivity=None, layers=tuple(replace(layer, sensitivity=None) for layer in stats.layers))
    pieces = cut(r, [read_text(text)], 256, 4)
    tried = []
    for name, calib in (("measured", stats), ("blind", blind)):
        fit = fit_of(tiny_model("llama"), calib)
        tried.append(caches.coded_cache(fit, 2.5, "kv", name))
    caches.run(r, tried, pieces, 1, progress=False)
    good, bad = (cache.scores.summary()["mean_kld"] for cache in tried)
    assert good < bad
    assert tried[0].predicted is not None and 0.3 < good / tried[0].predicted < 3.0
    assert tried[1].predicted is None


def test_predicts_the_rounding_of_recent_rows(
    measured: Path, reference: Callable[[str], Any], tiny_model: Callable[..., Path], text: Path
) -> None:
    """Recent rows as integers, all others exact: predicts their KLD, and 0 if recent rows are halves."""
    r, stats = reference("llama"), read_calibration(measured)
    chunk = r.tokenize(text.read_bytes())[-256:]
    r.match(stats, chunk)
    with Gguf(tiny_model("llama")) as base:
        ints, halves = (
            Fit(base, stats, Options(window=Window(N_SINK, N_RECENT, recent_bits=bits), bpe_context=10_000_000))
            for bits in (10, 16)
        )
    layers, _ = ints.code(ints.plan(4.0))
    predicted, without = ints.error(layers), halves.error(layers)
    assert predicted is not None and without is not None and predicted > without
    rounded = caches.recent_coder(ints)
    assert rounded is not None and caches.recent_coder(halves) is None
    exact = log_softmax(r.logits(chunk, 128))
    coded_rows = log_softmax(r.coded_logits(chunk, 128, lambda il, k, v: (k, v), N_SINK, N_RECENT, rounded))
    found = float(np.mean(np.sum(np.exp(exact) * (exact - coded_rows), axis=1)))
    assert 0.3 < found / (predicted - without) < 3.0


def test_default_budget_equals_q8_0(measured: Path, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """`convert` without a budget chooses the smallest whose predicted KLD is at most q8_0's, and prints that."""
    fit = fit_of(tiny_model("llama"), read_calibration(measured))
    target = fit.stock_error("q8_0")
    budget = fit.budget_like("q8_0")
    assert target is not None and budget is not None
    error, worse = (fit.error(fit.code(fit.plan(bits), fit.narrow(bits))[0]) for bits in (budget, budget - 0.05))
    assert error is not None and worse is not None and error <= target < worse

    result = run_convert(tiny_model("llama"), measured, tmp_path, "--n-recent", str(N_RECENT), "--dry-run")
    assert result.exit_code == 0, result.output
    assert "predicted KLD: " in result.output and "q8_0" in result.output
    assert "by default, the smallest whose predicted KLD is at most q8_0's" in result.output


def run_convert(model: Path, bases: Path, folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(convert, ["--bases", str(bases), "-o", str(folder / "o.gguf"), *arguments, str(model)])


def test_an_unreachable_default_is_refused(measured: Path, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """The ranks are too low for q8_0's quality at any budget, so the command is refused."""
    result = run_convert(tiny_model("llama"), measured, tmp_path, "--rank-k", "8", "--rank-v", "8")
    assert result.exit_code == 1
    assert "--kv-bits: expected a budget, because none reaches the quality of q8_0 with these ranks" in result.output


def test_an_unreachable_quality_keeps_the_usual_budget(
    measured: Path, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Held-out values of the first layer are unlike the statistics: they have energy in new directions."""
    stats = read_calibration(measured)
    first, d = stats.layers[0], stats.layers[0].shape.d_v
    half = np.diag([1.0] * (d // 2) + [0.0] * (d // 2))
    unseen = first.vs.copy()
    unseen[0, :, d // 2 :] = 30.0
    layer = replace(first, v2=np.stack([s * half for s in np.trace(first.v2, axis1=1, axis2=2)]) / d, vs=unseen)
    path = tmp_path / "unseen.safetensors"
    write_calibration(path, replace(stats, layers=(layer, *stats.layers[1:])))
    result = run_convert(tiny_model("llama"), path, tmp_path, "--n-recent", str(N_RECENT), "--dry-run")
    assert result.exit_code == 0, result.output
    assert "4.5 by default, because no smaller budget is predicted to be as good as q8_0" in result.output


def test_a_window_that_was_not_measured_is_noted(
    measured: Path, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    result = run_convert(tiny_model("llama"), measured, tmp_path, "--n-recent", "8", "--kv-bits", "6")
    assert result.exit_code == 0, result.output
    assert "--n-recent: expected at least 16, for which sensitivities were measured, found 8" in result.output


@each("method", ["engine", "fisher"])
@each(
    ("arguments", "sentence"),
    [
        (["-c", "100000"], "-c: expected at most the trained 4096 tokens, found 100000"),
        (["-c", "128"], "-c: expected more than the exact window of 128 tokens, found 128"),
        (["-f", "no.txt"], "-f: expected a text file, found no file at no.txt"),
    ],
)
def test_sensitivity_refuses(
    arguments: list[str],
    sentence: str,
    method: str,
    calibration: Callable[[str], Path],
    tiny_model: Callable[..., Path],
    text: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if method == "fisher":
        request.getfixturevalue("reference")("llama")
    given = ["-m", str(tiny_model("llama")), "--bases", str(calibration("llama")), "-f", str(text), "-t", "1"]
    given += ["--method", method]
    result = CliRunner().invoke(sensitivity.main, [*given, "-o", str(tmp_path / "o.safetensors"), *arguments])
    assert result.exit_code == 1
    assert sentence in result.output
    assert not (tmp_path / "o.safetensors").exists()


def test_written_file_names_the_bases(measured: Path, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    from subkv.format.metadata import read

    result = run_convert(tiny_model("llama"), measured, tmp_path, "--kv-bits", "5")
    assert result.exit_code == 0, result.output
    layout = read(tmp_path / "o.gguf")
    assert (layout["basis_k"], layout["basis_v"]) == ("kld-aware", "kld-aware")


def test_a_smaller_window_than_the_planned_one_is_refused(
    measured: Path, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Inside the window such bases may be anything, so running without it would be silently wrong."""
    from subkv.engine.cache import CacheOptions, choose_cache
    from subkv.engine.context import ContextOptions
    from subkv.engine.model import Model

    result = run_convert(tiny_model("llama"), measured, tmp_path, "--kv-bits", "5", "--n-recent", str(N_RECENT))
    assert result.exit_code == 0, result.output
    with Model(str(tmp_path / "o.gguf")) as model:
        options = ContextOptions(256, 64, 64, 1, "off")
        caches = [choose_cache(model.path, CacheOptions(window=Window(n_recent=n))) for n in (8, 32)]
        with pytest.raises(Exception, match="n.recent: at least 16 expected, for which the kld-aware bases were made"):
            model.context(caches[0], options)
        model.context(caches[1], options).close()


def test_kld_aware_needs_sensitivities(
    calibration: Callable[[str], Path], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    result = run_convert(tiny_model("llama"), calibration("llama"), tmp_path, "--basis-k", "kld-aware")
    assert result.exit_code == 1
    assert "--basis-k: kld-aware expects a calibration with sensitivities, found none" in result.output
    assert not (tmp_path / "o.gguf").exists()


def test_evaluate_command(
    measured: Path, tiny_model: Callable[..., Path], text: Path, reference: Callable[[str], Any]
) -> None:
    reference("llama")
    arguments = evaluating(tiny_model, measured, text, 256)
    arguments += ["--n-recent", str(N_RECENT), "--kv-bits", "4,6", "--stock", "q8_0,q4_0", "-t", "1"]
    result = CliRunner().invoke(evaluate.main, [*arguments, "-o", "json"])
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    assert list(rows) == ["subkv 4", "subkv 6", "q8_0", "q8_0 + window", "q4_0", "q4_0 + window"]
    assert rows["subkv 6"]["mean_kld"] < rows["subkv 4"]["mean_kld"]
    assert rows["q4_0 + window"]["mean_kld"] < rows["q4_0"]["mean_kld"]
    assert rows["q4_0"]["bpe"] == 4.5 and rows["q4_0 + window"]["bpe"] > 4.5
    assert abs(rows["subkv 6"]["bpe"] - 6.0) < 0.2
    table = CliRunner().invoke(evaluate.main, arguments)
    assert table.exit_code == 0 and "| words.txt | subkv 4 |" in table.output


def test_evaluate_adaptive_bases(
    measured: Path, tiny_model: Callable[..., Path], text: Path, reference: Callable[[str], Any]
) -> None:
    """A coder that never adapts equals the static one; one that adapts pays for its bases and sketches."""
    reference("llama")
    arguments = [*evaluating(tiny_model, measured, text, 256, chunks=2), "-t", "1"]
    arguments += ["--n-recent", str(N_RECENT), "--kv-bits", "4", "--stock", "q4_0", "--bpe-context", "1024"]
    arguments += [
        "--adapt",
        "kv,warm=1000000",
        "--adapt",
        "v,length=32,warm=32,gain=1",
        "--adapt",
        "k,warm=1000000,kind=oja",
    ]
    result = CliRunner().invoke(evaluate.main, [*arguments, "-o", "json"])
    assert result.exit_code == 0, result.output
    static, never, values, oja, *_ = rows = json.loads(result.stdout)
    assert [row["name"] for row in rows[:2]] == ["subkv 4", "subkv 4 adapt kv,warm=1000000"]
    assert never["mean_kld"] == pytest.approx(static["mean_kld"], rel=0.02)
    assert static["chunks_opened"] is None and static["bpe_adapt"] == 0.0
    assert never["chunks_opened"] == oja["chunks_opened"] == 0.0
    assert values["chunks_opened"] > 0.0 and values["mean_kld"] < 1.1 * static["mean_kld"]
    assert values["bpe"] == pytest.approx(static["bpe"] + values["bpe_adapt"], abs=2e-4)
    # sketches alone: a triangle of at most 32 x 33 / 2 numbers, f32, and 40 bytes, per 32 elements of 1024 tokens
    assert 0.0 < never["bpe_adapt"] <= 8 * (40 + 4 * 32 * 33 / 2) / (32 * 1024) + 1e-4
    table = CliRunner().invoke(evaluate.main, arguments)
    assert table.exit_code == 0 and " opened | refused | merged |" in table.output


@each(
    ("arguments", "sentence"),
    [
        (["--kv-bits", "x"], "expected numbers separated by commas, found 'x'"),
        (["--stock", "q3_9"], "expected types out of f16, q8_0"),
        (["-c", "100000"], "-c: expected at most the trained 4096 tokens, found 100000"),
        (["-f", "no.txt"], "-f: expected a text file, found no file at no.txt"),
        (["--bpe-context", "0"], "0 is not in the range"),
        (["--kv-bits", "", "--stock", ""], "--kv-bits: expected a budget or --stock types to evaluate, found none"),
        (["--kv-bits", "0.2"], "--kv-bits: expected "),
        (["--adapt", "q"], "--adapt: expected k, v or kv, found 'q'"),
        (["--adapt", "v,size=3"], "--adapt: expected one of kind, rank, rows, "),
        (["--adapt", "v,gain=x"], "--adapt: gain: expected a number, found 'x'"),
        (["--adapt", "v,gain=0", "-c", "256"], "gain: expected a factor above 0, found 0"),
    ],
)
def test_evaluate_refuses(
    arguments: list[str],
    sentence: str,
    measured: Path,
    tiny_model: Callable[..., Path],
    text: Path,
    reference: Callable[[str], Any],
) -> None:
    reference("llama")
    given = ["-m", str(tiny_model("llama")), "--bases", str(measured), "-f", str(text), "-t", "1", *arguments]
    result = CliRunner().invoke(evaluate.main, given)
    assert result.exit_code in (1, 2)
    assert sentence in result.output
