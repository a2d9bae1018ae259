"""Sensitivities measured in the engine: matrices by arithmetic, factors by noise in a saved state. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from converter import residual, sensitivity, sensitivity_stage
from converter.corpus import cut, read_text
from converter.decoded_chunk import SCORED
from converter.sensitivity_stage import compare, measure_sensitivities, n_measured, tokens_to_decode
from converter.sensitivity_trials import (
    CORRECTING,
    LEAST,
    MOMENTS,
    REPEATED,
    Measurements,
    SensitivityTrials,
    evened,
    n_trials,
    smoothed,
)
from converter.session import Session
from converter.source import Source
from converter.statistics_stage import Chunk, collect_layers, observe
from subkv.base.errors import SubkvError
from subkv.engine.cache import CacheChoice, choose_cache, ordinary
from subkv.engine.context import ContextOptions
from subkv.engine.model import Model
from subkv.engine.request import CacheRequest
from subkv.format import metadata
from subkv.format.calibration import Calibration, LayerShape, TextSource, read_calibration
from subkv.format.window import Window
from subkv.native.gguf import SHA256_KEY, Gguf, write_sidecar
from subkv.plan.pipeline import Fit, Options

N_RECENT, N_CTX, DRAWS = 16, 320, 50
SHAPE = LayerShape(il=0, n_head=4, n_head_kv=2, d_k=16, d_v=8, scale=0.3, tokens=1)


def some_rows(rng: np.random.Generator, n: int = 48) -> residual.Rows:
    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    return residual.Rows(normal(12, 4, 16), np.arange(n - 12, n, dtype=np.float64), normal(n, 2, 16), normal(n, 2, 8))


def sizes_of(rows: residual.Rows, side: str) -> Any:
    """Of the rows beyond two sinks, [n − 2, 2]; keys are coded less their mean."""
    coded = (rows.k - rows.k[2:].mean(axis=0) if side == "k" else rows.v)[2:]
    return np.stack([residual.sizes(coded[:, h]) for h in range(2)], axis=1)


@pytest.mark.parametrize("n_recent", [0, 20])
@pytest.mark.parametrize("side", ["k", "v"])
def test_metrics_are_the_energy_of_small_errors(side: str, n_recent: int) -> None:
    """Compares tr(M C) with the effect of errors in the cells outside the window, one KV head at a time.

    The window moves with the query, so each query is compared separately.
    """
    rng = np.random.default_rng(1)
    rows, output = some_rows(rng), rng.standard_normal((24, 32)).astype(np.float32)
    d, size = 16 if side == "k" else 8, sizes_of(rows, side)
    energy = np.zeros(2)
    for h in range(2):
        for t in range(len(rows.q)):
            one = residual.Rows(rows.q[t : t + 1], rows.pos[t : t + 1], rows.k, rows.v)
            n_coded = int(rows.pos[t]) + 1 - max(n_recent, 0)
            for _ in range(DRAWS):
                error = np.zeros((len(rows.k), 2, d), dtype=np.float32)
                error[2:n_coded, h] = 1e-2 * rng.standard_normal((n_coded - 2, d)) * size[: n_coded - 2, h, None]
                energy[h] += (
                    residual.energy(one, SHAPE, output, *((error, None) if side == "k" else (None, error))) / DRAWS
                )
    metric = residual.metrics(rows, SHAPE, residual.gram_of(output, SHAPE.n_head), Window(2, n_recent))[side]
    assert energy == pytest.approx(1e-4 * np.trace(metric, axis1=1, axis2=2), rel=0.15)
    assert np.linalg.eigvalsh(metric).min() > -1e-6 * np.linalg.eigvalsh(metric).max()


@pytest.mark.parametrize("side", ["k", "v"])
def test_equal_tokens_have_equal_errors(side: str) -> None:
    rng = np.random.default_rng(3)
    rows, output = some_rows(rng), rng.standard_normal((24, 32)).astype(np.float32)
    kinds, d = rng.integers(0, 4, len(rows.v)), 16 if side == "k" else 8
    rows = replace(rows, v=rows.v[kinds])
    energy = 0.0
    for _ in range(4 * DRAWS):
        error = np.zeros((len(rows.v), 2, d), dtype=np.float32)
        error[2:] = 1e-2 * rng.standard_normal((4, 2, d))[kinds[2:]] * sizes_of(rows, side)[..., None]
        errors = (error, None) if side == "k" else (None, error)
        energy += residual.energy(rows, SHAPE, output, *errors) * len(rows.q) / (4 * DRAWS)
    metric = residual.metrics(rows, SHAPE, residual.gram_of(output, SHAPE.n_head), Window(2, 0))[f"{side}0"]
    assert energy == pytest.approx(1e-4 * np.trace(metric, axis1=1, axis2=2).sum(), rel=0.15)


def test_equal_tokens_are_merged_once_per_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once per head and kind of error, not for every pair of heads."""
    rng, merged, calls = np.random.default_rng(3), residual._merged, []
    rows, output = some_rows(rng), rng.standard_normal((24, 32)).astype(np.float32)
    monkeypatch.setattr(residual, "_merged", lambda *arguments: calls.append(arguments) or merged(*arguments))
    residual.metrics(
        replace(rows, v=rows.v[rng.integers(0, 4, len(rows.v))]),
        SHAPE,
        residual.gram_of(output, SHAPE.n_head),
        Window(2, 0),
    )
    assert len(calls) == SHAPE.n_head * len(residual.SIDES)


def test_without_a_window_more_counts() -> None:
    rng = np.random.default_rng(2)
    rows, output = some_rows(rng), rng.standard_normal((24, 32)).astype(np.float32)
    with_window = residual.metrics(rows, SHAPE, residual.gram_of(output, SHAPE.n_head), Window(2, 20))
    same = residual.metrics(rows, SHAPE, residual.gram_of(output, SHAPE.n_head), Window(2, 0))
    for side in "kv":
        assert np.trace(with_window[side][0]) < np.trace(with_window[f"{side}0"][0])
        assert with_window[f"{side}0"] == pytest.approx(same[f"{side}0"])
        assert same[side] == pytest.approx(same[f"{side}0"])


@pytest.fixture(scope="module")
def measured_calibration(
    calibration: Callable[[str], Path],
    tiny_model: Callable[..., Path],
    text: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The tiny llama's calibration with the engine's sensitivities, by the command line."""
    path = tmp_path_factory.mktemp("measured") / "calib.safetensors"
    arguments = ["-m", str(tiny_model("llama")), "--bases", str(calibration("llama")), "-f", str(text), "-o", str(path)]
    result = CliRunner().invoke(
        sensitivity.main, [*arguments, "-c", str(N_CTX), "--n-recent", str(N_RECENT), "-t", "1"]
    )
    assert result.exit_code == 0, result.output
    assert "sensitivities of 2 layers from 256 tokens" in result.output
    return path


def test_predicts_the_cost_of_a_layout_in_the_engine(
    measured_calibration: Path, tiny_model: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    stats = read_calibration(measured_calibration)
    assert stats.sensitivity is not None
    assert stats.sensitivity.method == "engine"
    stats = replace(stats, sensitivity=replace(stats.sensitivity, n_ctx=N_CTX))
    with Gguf(tiny_model("llama")) as base:
        fit = Fit(base, stats, Options(window=Window(stats.n_skip, N_RECENT), bpe_context=1 << 31))
        plan = fit.plan(4.0)
        layers, _ = fit.code(plan)
        predicted = fit.error(layers)
        values = metadata.keys(layers, stats, fit.settings, fit.account(plan))
        write_sidecar(base, tmp_path / "layout.gguf", {**values, SHA256_KEY: ("str", "0" * 64)})
    with Source(tiny_model("llama")) as source, Session(source, N_CTX, 1, stats.n_skip) as session:
        chunk = cut(session, [read_text(text)], N_CTX, 8)[-1]
        cache = choose_cache(source.path, CacheRequest("subkv", bases=tmp_path / "layout.gguf"))
        (kld,) = compare(session.model, [cache], chunk, 1)
    assert predicted is not None
    assert 0.5 < kld / predicted < 2.0


def trials_of(
    session: Session, calibration: Calibration, text: Path, measured: Measurements | None
) -> SensitivityTrials:
    chunks = cut(session, [read_text(text)], N_CTX, 2)
    return SensitivityTrials(session, calibration, chunks, N_RECENT, measured)


def test_resumes_after_any_step(
    calibration: Callable[[str], Path], tiny_model: Callable[..., Path], text: Path
) -> None:
    """Saved after any number of steps, read and finished, the result equals that of an uninterrupted run."""
    stats = read_calibration(calibration("llama"))
    with Source(tiny_model("llama")) as source, Session(source, N_CTX, 1, stats.n_skip) as session:
        whole = trials_of(session, stats, text, None)
        assert sum(whole.steps()) >= sum(map(len, whole.chunks)) + SCORED * len(whole.plan())
        for stop in (1, 3, 7):
            part = trials_of(session, stats, text, None)
            for _ in zip(range(stop), part.steps(), strict=False):
                pass
            rest = trials_of(session, stats, text, Measurements.restored(part.measured.arrays(), stats))
            for _ in rest.steps():
                pass
            assert rest.measured.trials == whole.measured.trials
            assert (rest.measured.queries, rest.measured.cells) == (whole.measured.queries, whole.measured.cells)
            own, expected = rest.measured, whole.measured
            for a, b in zip(own.sums + own.moments, expected.sums + expected.moments, strict=True):
                assert all(np.array_equal(a[name], b[name]) for name in b)
        assert not list(trials_of(session, stats, text, whole.measured).steps())


def test_measured_cells_enter_the_moments_once(
    calibration: Callable[[str], Path], tiny_model: Callable[..., Path], text: Path
) -> None:
    """Like cells that the observer records; a calibration that names their text already includes them."""
    stats = read_calibration(calibration("llama"))
    other = TextSource("other", "1" * 64, 1)
    with Source(tiny_model("llama")) as source, Session(source, N_CTX, 1, stats.n_skip) as session:
        chunk = cut(session, [read_text(text)], N_CTX, 2)[1]
        trials = SensitivityTrials(session, stats, [chunk], N_RECENT, texts=[other])
        for _ in trials.steps():
            pass
        result = trials.result()
        again = SensitivityTrials(session, result, [chunk], N_RECENT, trials.measured, [other]).result()
    with Source(tiny_model("llama")) as source, Session(source, N_CTX, 1, stats.n_skip) as session:
        observe(session, [Chunk(chunk[:-SCORED])])
        collected = collect_layers(session)
    assert result.texts == (*stats.texts, other)
    assert result.tokens == stats.tokens + collected[0].shape.tokens
    for before, own, after, same in zip(stats.layers, collected, result.layers, again.layers, strict=True):
        share = before.shape.tokens / after.shape.tokens
        assert after.shape.tokens == before.shape.tokens + own.shape.tokens == same.shape.tokens
        for name in MOMENTS:
            expected = share * getattr(before, name) + (1.0 - share) * getattr(own, name)
            assert getattr(after, name) == pytest.approx(expected, rel=1e-2, abs=1e-3 * np.abs(expected).max())
            assert np.array_equal(getattr(same, name), getattr(after, name))
        assert np.array_equal(after.q2, before.q2)


def test_texts_measured_later_enter_the_moments_too(
    calibration: Callable[[str], Path], tiny_model: Callable[..., Path], text: Path
) -> None:
    """A run that ends early for lack of time writes its results; the run that resumes adds the other texts."""
    stats = read_calibration(calibration("llama"))
    sources = [TextSource(name, name * 64, 1) for name in "012"]
    with Source(tiny_model("llama")) as source, Session(source, N_CTX, 1, stats.n_skip) as session:
        chunks = cut(session, [read_text(text)], N_CTX, 3)

        def run(
            start: Calibration, n_chunks: int, saved: Measurements | None = None
        ) -> tuple[Calibration, Measurements]:
            measured = None if saved is None else Measurements.restored(saved.arrays(), start)
            trials = SensitivityTrials(session, start, chunks, N_RECENT, measured, sources)
            for _ in trials.steps():
                if len(trials.measured.done) == n_chunks and trials.measured.factors():
                    break
            return trials.result(), trials.measured

        whole, _ = run(stats, 3)
        first, measured = run(stats, 1)
        _, interrupted = run(first, 2, measured)
        resumed, last = run(first, 3, interrupted)
        lost, _ = run(first, 3)
        assert first.texts == (*stats.texts, sources[0])
        for result in (resumed, lost):
            assert (result.texts, result.tokens) == (whole.texts, whole.tokens)
            for one, other in zip(result.layers, whole.layers, strict=True):
                for name in MOMENTS:
                    assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-4)
        with pytest.raises(ValueError, match="the cells of 1 texts, found 0"):
            last.forget_entered(stats, sources)


def test_longer_texts_scale_the_matrices(
    calibration: Callable[[str], Path], tiny_model: Callable[..., Path], text: Path
) -> None:
    """One factor per layer and side, because their last queries read more cells than those of other chunks.

    Random weights read cells about evenly, so errors in values cancel more with more cells.
    """
    stats = read_calibration(calibration("llama"))
    with Source(tiny_model("llama")) as source, Session(source, 3 * N_CTX, 1, stats.n_skip) as session:
        longer = cut(session, [read_text(text)], 3 * N_CTX, 1)[0]
        trials = SensitivityTrials(session, stats, [longer[:N_CTX], longer], N_RECENT)
        assert trials.longer == [1]
        for _ in trials.steps():
            pass
        assert trials.measured.cells == 2 * (N_CTX - SCORED - stats.n_skip), "both texts count alike"
        assert list(trials.decoded_chunks) == [1]
        scaled = trials.result()
        again = Measurements.restored(trials.measured.arrays(), stats)
        assert np.array_equal(again.stretches.pop(1), trials.measured.stretches[1])
        same = SensitivityTrials(session, stats, trials.chunks, N_RECENT, again).result()
    for one, other in zip(same.layers, scaled.layers, strict=True):
        assert one.sensitivity is not None and other.sensitivity is not None
        for side in residual.SIDES:
            before, after = (getattr(layer, side) for layer in (one.sensitivity, other.sensitivity))
            gain = np.trace(after[0]) / np.trace(before[0])
            assert np.allclose(after, gain * before)
            assert side != "v0" or 0.1 < gain < 1.0


def test_beginnings_of_longer_chunks_are_measured_as_others_are(
    calibration: Callable[[str], Path], tiny_model: Callable[..., Path], text: Path
) -> None:
    stats = read_calibration(calibration("llama"))
    measured = []
    with Source(tiny_model("llama")) as source, Session(source, 3 * N_CTX, 1, stats.n_skip) as session:
        longer = cut(session, [read_text(text)], 3 * N_CTX, 1)[0]
        for chunks in ([longer[:N_CTX]], [longer[:N_CTX], longer]):
            trials = SensitivityTrials(session, stats, chunks, N_RECENT)
            trials.decode(len(chunks) - 1)
            measured.append(trials.measured)
    one, other = measured
    assert one.queries == other.queries
    for first, second in zip(one.sums, other.sums, strict=True):
        for side in residual.SIDES:
            assert first[side] == pytest.approx(second[side], rel=1e-2, abs=1e-2 * float(np.abs(first[side]).max()))


def test_longer_chunks_wait_in_a_file(
    calibration: Callable[[str], Path], tiny_model: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    stats, results = read_calibration(calibration("llama")), []
    with Source(tiny_model("llama")) as source, Session(source, 3 * N_CTX, 1, stats.n_skip) as session:
        longer = cut(session, [read_text(text)], 3 * N_CTX, 2)
        for folder in (None, tmp_path):
            trials = SensitivityTrials(session, stats, [longer[0][:N_CTX], *longer], N_RECENT, folder=folder)
            assert trials.longer == [1, 2]
            for _ in trials.steps():
                pass
            results.append(sensitivity_stage.corrected(trials, [], 1).sensitivity)
        chunk, at = trials.decode(1), (stats.layers[0].shape.il, "v")
        noisy = 1.5 * chunk.view(*at).astype(np.float32)
        with pytest.raises(SubkvError, match="cannot write to .*: No such file"):
            chunk.spill(tmp_path / "none")
        klds = [chunk.kld(at, noisy)]
        chunk.spill(tmp_path)
        klds += [chunk.kld(at, noisy), chunk.kld(at, noisy), chunk.final_kld([(at, noisy)])]
        assert klds == [klds[0]] * 4 and klds[0] > 0.0
        with pytest.raises(AssertionError, match="has discarded the state"):
            chunk.kld(at, noisy)
    assert results[0] == results[1]
    assert not list(tmp_path.iterdir())


def test_sliding_layers_stay_exact_while_a_stock_type_is_measured(
    calibration: Callable[[str], Path], tiny_model: Callable[..., Path], text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no bases, so a prediction does not count their errors, and its correction must not, either."""
    stats, sizes = read_calibration(calibration("gemma2")), []
    assert 0 < len(stats.layers) < stats.block_count

    def bytes_of(model: Model, caches: Sequence[CacheChoice], *_: Any) -> list[float]:
        for cache in caches:
            with model.context(cache, ContextOptions(4096, n_batch=512, n_ubatch=512)) as context:
                sizes.append(context.stats.bytes_kv)
        return [0.1]

    monkeypatch.setattr(sensitivity_stage, "compare", bytes_of)
    with Source(tiny_model("gemma2")) as source, Session(source, N_CTX, 1, stats.n_skip) as session:
        trials = SensitivityTrials(session, stats, cut(session, [read_text(text)], N_CTX, 1), N_RECENT)
        for _ in trials.steps():
            pass
        sensitivity_stage.corrected(trials, [], 1)
        bytes_of(session.model, [ordinary(sensitivity_stage.STOCK), ordinary("f16")])
    measured, every, f16 = sizes
    assert every < measured < f16


def test_corrected_on_other_chunks_or_the_longer_ones() -> None:
    assert n_measured([320] * 5) == 3 and n_measured([320] * 2) == 1
    assert n_measured([512] * 5 + [2048] * 2) == 7
    for lengths in ([320] * 5, [512] * 5 + [2048] * 2):
        assert sum(lengths) < tokens_to_decode(lengths, 2) < tokens_to_decode(lengths, 30)
    trials = int(REPEATED * n_trials(2)) * SCORED
    correction = 2 * (CORRECTING + SCORED) + 2 * sensitivity_stage.n_stock(320)
    assert tokens_to_decode([320] * 5, 2) == 5 * 320 + trials + correction


def test_layers_are_evened_with_their_neighbours() -> None:
    assert evened(np.array([9.0, 0.0, 4.0, 0.0])) == pytest.approx([9.0, 1.0, 2.0, 1.0])
    for n in (1, 2):
        assert evened(np.ones((n, 4))) == pytest.approx(np.ones((n, 4)))


def test_little_time_gives_fewer_trials(
    calibration: Callable[[str], Path], tiny_model: Callable[..., Path], text: Path
) -> None:
    """The saved state grows at every step and stays smaller than the plan; every layer still gets its matrices."""
    stats = read_calibration(calibration("llama"))
    counts: list[int] = []

    def save(measured: Measurements) -> None:
        counts.append(len(measured.trials))

    with Source(tiny_model("llama")) as source, Session(source, N_CTX, 1, stats.n_skip) as session:
        chunks = cut(session, [read_text(text)], N_CTX, 3)
        result = measure_sensitivities(session, stats, chunks, N_RECENT, 1, 1e-9, save=save)
    assert counts == sorted(counts)
    assert counts[-1] == LEAST
    assert result.sensitivity is not None
    assert result.sensitivity.tokens == (LEAST - 2) * SCORED
    assert all(np.trace(layer.sensitivity.k[0]) > 0.0 for layer in result.layers if layer.sensitivity)


def test_time_is_left_for_longer_chunks_and_the_correction(
    calibration: Callable[[str], Path],
    tiny_model: Callable[..., Path],
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a clock that ticks once per token, the scheduled work ends in time, and trials are dropped first."""
    stats, now = read_calibration(calibration("llama")), [0]

    def ticking(name: str) -> None:
        decode = getattr(Session, name)

        def counted(self: Session, tokens: Any, first_pos: int) -> Any:
            now[0] += len(tokens)
            return decode(self, tokens, first_pos)

        monkeypatch.setattr(Session, name, counted)

    def compared(model: Any, caches: Any, chunk: Any, n_threads: int, on_decoded: Callable[[int], None]) -> list[float]:
        now[0] += 2 * len(chunk)
        on_decoded(2 * len(chunk))
        return [0.1]

    ticking("decode")
    ticking("logits")
    monkeypatch.setattr("converter.sensitivity_stage.time.monotonic", lambda: now[0])
    monkeypatch.setattr(sensitivity_stage, "compare", compared)
    monkeypatch.setattr("converter.sensitivity_trials.LEAST", 3)
    done = []
    with Source(tiny_model("llama")) as source, Session(source, 3 * N_CTX, 1, stats.n_skip) as session:
        longer = cut(session, [read_text(text)], 3 * N_CTX, 1)[0]
        chunks = [*(longer[i : i + N_CTX] for i in (0, 200, 400, 500, 600)), longer]
        whole = tokens_to_decode([len(chunk) for chunk in chunks], 2)
        for tokens in (1, whole * 3 // 4, 2 * whole):
            now[0], measured = 0, Measurements.empty(stats)
            result = measure_sensitivities(session, stats, chunks, N_RECENT, 1, tokens / 60, measured)
            assert result.sensitivity is not None and result.sensitivity.correction != 1.0
            assert now[0] < tokens or tokens == 1
            done.append(measured)
    least, some, every = done
    assert len(least.trials) == 3 and not least.stretches
    assert 3 <= len(some.trials) < len(every.trials) == 6
    assert list(some.stretches) == list(every.stretches) == [5]
    assert len(every.done) == 6


def test_factors_are_filled_in_between_layers() -> None:
    factors, _ = smoothed({(0, 0, "k"): 100.0, (0, 2, "k"): 1.0, (0, 2, "v"): 1.0, (0, 6, "v"): 0.01}, 8)
    assert factors["k"][0] == pytest.approx(100.0, rel=0.1)
    assert factors["v"][0] == pytest.approx(100.0, rel=0.3)  # as the keys' in the same layer
    assert 0.01 < factors["v"][4] < 1.0
    assert factors["v"][7] == pytest.approx(factors["v"][6], rel=0.5)


def test_factors_of_texts_are_separated_from_those_of_layers() -> None:
    """Three texts whose noise differs by factors of 4; each layer is measured on one of them."""
    own = {(i, side): float(np.exp(-0.1 * i - 0.3 * (side == "v"))) for i in range(12) for side in "kv"}
    trials = {(j % 3, *at): factor * 4.0 ** (j % 3) for j, (at, factor) in enumerate(own.items())}
    factors, texts = smoothed(trials, 12)
    assert texts[1] / texts[0] == pytest.approx(4.0, rel=0.25)
    assert texts[2] / texts[1] == pytest.approx(4.0, rel=0.25)
    scale = factors["k"][6] / own[6, "k"]
    for (i, side), factor in own.items():
        assert factors[side][i] == pytest.approx(scale * factor, rel=0.3)


def test_unpredictable_models_are_reported() -> None:
    with pytest.raises(SubkvError, match="the same with noise in it, as with random weights: nothing can be predicted"):
        smoothed({}, 2)


def test_folders_are_for_research_fisher(calibration: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    arguments = ["-m", str(tmp_path), "--bases", str(calibration("llama")), "-f", str(text), "-c", "256"]
    result = CliRunner().invoke(sensitivity.main, [*arguments, "-o", str(tmp_path / "o.safetensors")])
    assert result.exit_code == 1
    assert "-m: expected a GGUF, found a folder; `python -m research.fisher`, in a checkout" in result.output
