"""Results derived from sensitivities: bases, predictions, the default budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from each import each
from references import N_RECENT, REFUSED_TEXTS, check_refused_text

from converter import sensitivity
from converter.cli import main as convert
from converter.corpus import cut, read_text
from converter.scoring import log_softmax
from research.float32 import caches
from subkv.format.calibration import Calibration, read_calibration, write_calibration
from subkv.format.window import N_SINK, Window
from subkv.native.gguf import Gguf
from subkv.plan.pipeline import Fit, Options


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
    measured_kld = float(np.mean(np.sum(np.exp(exact) * (exact - coded_rows), axis=1)))
    assert 0.3 < measured_kld / (predicted - without) < 3.0


def test_default_budget_equals_q8_0(measured: Path, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """`convert` without a budget chooses and prints the smallest one with a predicted KLD of at most q8_0's."""
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
    assert "nats per token, at most q8_0's" in result.output  # also with the window that this budget has


def test_default_budget_has_a_largest_cost(
    measured: Path, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where q8_0 costs more, the default costs less than q8_0; if no budget can, it is that of q8_0's quality."""
    fit = fit_of(tiny_model("llama"), read_calibration(measured))
    target, like = fit.stock_error("q8_0"), fit.budget_like("q8_0")
    assert target is not None and like is not None
    monkeypatch.setattr("subkv.plan.pipeline.MOST_COST", target / 1.5)
    capped = fit.budget_like("q8_0", target / 1.5)
    assert capped is not None and like < capped < like + 1.0
    result = run_convert(tiny_model("llama"), measured, tmp_path, "--n-recent", str(N_RECENT), "--dry-run")
    assert f"by default, the smallest whose predicted KLD is at most {target / 1.5:g}, below q8_0's" in result.output
    monkeypatch.setattr("subkv.plan.pipeline.MOST_COST", target / 1e9)
    result = run_convert(tiny_model("llama"), measured, tmp_path, "--n-recent", str(N_RECENT), "--dry-run")
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


@each(("arguments", "sentence"), REFUSED_TEXTS)
def test_sensitivity_refuses(
    arguments: list[str],
    sentence: str,
    calibration: Callable[[str], Path],
    tiny_model: Callable[..., Path],
    text: Path,
    tmp_path: Path,
) -> None:
    output = tmp_path / "o.safetensors"
    check_refused_text(sensitivity.main, tiny_model("llama"), calibration("llama"), text, output, arguments, sentence)


def test_written_file_names_the_bases(measured: Path, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    from subkv.format.metadata import read

    result = run_convert(tiny_model("llama"), measured, tmp_path, "--kv-bits", "5")
    assert result.exit_code == 0, result.output
    layout = read(tmp_path / "o.gguf")
    assert (layout["basis_k"], layout["basis_v"]) == ("kld-aware", "kld-aware")


def test_a_smaller_window_than_the_planned_one_is_refused(
    measured: Path, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Such bases are not fitted to rows inside the window, so a smaller window would be silently wrong."""
    from subkv.base.errors import CacheError
    from subkv.engine.cache import choose_cache
    from subkv.engine.context import ContextOptions
    from subkv.engine.model import Model
    from subkv.engine.request import CacheRequest

    result = run_convert(tiny_model("llama"), measured, tmp_path, "--kv-bits", "5", "--n-recent", str(N_RECENT))
    assert result.exit_code == 0, result.output
    with Model(str(tmp_path / "o.gguf")) as model:
        with pytest.raises(CacheError, match="n_recent: at least 16 expected, for which the kld-aware bases were made"):
            choose_cache(model.path, CacheRequest(window=Window(n_recent=8)))
        wider = choose_cache(model.path, CacheRequest(window=Window(n_recent=32)))
        model.context(wider, ContextOptions(256, 64, 64, 1, "off")).close()


def test_kld_aware_needs_sensitivities(
    calibration: Callable[[str], Path], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    result = run_convert(tiny_model("llama"), calibration("llama"), tmp_path, "--basis-k", "kld-aware")
    assert result.exit_code == 1
    assert "--basis-k: kld-aware expects a calibration with sensitivities, found none" in result.output
    assert not (tmp_path / "o.gguf").exists()
