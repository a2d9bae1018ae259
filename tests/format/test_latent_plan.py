"""`convert MODEL` of latent attention (MLA): bases of rows that are keys and values at once, found, and better."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import derived_numpy
import numpy as np
import pytest
from click.testing import CliRunner

from converter.cli import main as convert
from converter.decoded_chunk import DecodedChunk
from converter.residual import Rows, energy, gram_of, metrics
from converter.sensitivity_stage import compare
from converter.sensitivity_trials import SensitivityTrials
from converter.session import Session
from converter.source import Source
from runtime.inspect import main as inspect
from subkv.base.errors import SubkvError
from subkv.engine.cache import choose_cache
from subkv.engine.model import Model
from subkv.engine.observer import SAMPLE
from subkv.engine.request import CacheRequest
from subkv.format import metadata
from subkv.format.calibration import Calibration, LayerShape, read_calibration
from subkv.format.window import Window
from subkv.native.gguf import Gguf
from subkv.plan import latent, mla, predict
from subkv.plan.basis import fit_metric
from subkv.plan.budget import Overhead, plan_banded
from subkv.plan.pipeline import Fit, Options
from subkv.plan.positions import pairs

BITS = ("--kv-bits", "5", "--bpe-context", "1000000")
WINDOW = Window(4, 16, 8)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tiny_model("deepseek2", kv_decay=0.15)
    return Path(shutil.copy(source, tmp_path_factory.mktemp("latent") / "m.gguf"))


@pytest.fixture(scope="module")
def calibration(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    from converter.calibrate import main

    text, out = tmp_path_factory.mktemp("text") / "a.txt", model.with_name("calib.safetensors")
    text.write_bytes(np.random.default_rng(1).integers(32, 127, 4000, dtype=np.uint8).tobytes())
    result = CliRunner().invoke(main, ["-m", str(model), "-f", str(text), "-o", str(out), "-c", "256", "-t", "1"])
    assert result.exit_code == 0, result.output
    return read_calibration(out)


@pytest.fixture
def base(model: Path) -> Iterator[Gguf]:
    with Gguf(model) as opened:
        yield opened


def test_one_command_prepares(model: Path, cache_home: Path) -> None:
    """The command writes the sidecar, which is found automatically and costs less than data-free bases."""
    arguments = ["-c", "128", "--chunks", "6", "-t", "1", "--n-recent", "16", "--minutes", "0", *BITS]
    result = CliRunner().invoke(convert, [str(model), *arguments])
    assert result.exit_code == 0, result.output
    found = choose_cache(model).layout
    assert found is not None and f"wrote {found}" in result.stdout
    described = metadata.read(found)
    assert described["version"] == 5 and described["calibration"]["tokens"] > 0
    assert all(not layer["v"] and (layer["d_k"], layer["d_v"]) == (48, 32) for layer in described["layers"])
    check_bytes(result.stdout, found, described["bytes_per_token"])
    plain = model.with_name("weights.gguf")
    derived_numpy.sidecar(model, plain, Options(window=WINDOW, kv_bits=5.0, bpe_context=1000000))
    tokens = [int(t) for t in np.random.default_rng(2).integers(40, 130, 256)]
    caches = [choose_cache(model, CacheRequest("subkv", bases=path)) for path in (found, plain)]
    with Model(model) as opened:
        ours, theirs = compare(opened, caches, tokens, 1)
    assert 0.0 < ours < 0.5 * theirs


def check_bytes(table: str, sidecar: Path, row: int) -> None:
    """Both layers have one row of 48 elements per token, as with an f16 cache."""
    assert f"bytes per token: {row} (f16: {2 * 2 * 48})" in table
    assert f" instead of {1000000 * 2 * 2 * 48 / 2**20:.1f} MiB in f16" in table
    rows = [line.split() for line in table.splitlines() if line.split()[:1] in (["0"], ["1"])]
    assert sum(int(cells[5]) for cells in rows) == row and all(cells[3:5] == ["-", "-"] for cells in rows)
    sentence = next(line for line in table.splitlines() if line.startswith("a context of"))
    shown = CliRunner().invoke(inspect, [str(sidecar)])
    assert shown.exit_code == 0 and f"bytes per token: {row} (f16: 192)" in shown.output
    assert sentence.partition(" MiB in f16")[0].partition("instead")[2] in shown.output


def test_important_coefficients_get_more_bits(base: Gguf, calibration: Calibration) -> None:
    """The first coefficients of a decaying latent get more bits; a full-rank basis loses nothing but codes."""
    fit = Fit(base, calibration, Options(window=WINDOW, bpe_context=1000000))
    layers, _ = fit.code(fit.plan(4.0))
    assert abs(fit.account(fit.plan(4.0)).total - 4.0) < 0.3
    rows = [sum((n * bits + 7) // 8 for n, bits in layer.heads[0].k.bands) + 1 for layer in layers]
    assert fit.account(fit.plan(4.0)).bytes_per_token == sum(rows)
    for layer in layers:
        bands = layer.heads[0].v.bands
        assert bands[0][1] >= bands[-1][1] + 2
    exact, _ = fit.code([((32, 16),), ((16, 16),)] * 2)
    x = np.random.default_rng(3).standard_normal((5, 48)).astype(np.float32)
    for layer in exact:
        np.testing.assert_allclose(predict.reconstructed(x, layer.heads[0].k), x, atol=0.02)
        np.testing.assert_allclose(predict.reconstructed(x[:, :32], layer.heads[0].v), x[:, :32], atol=0.02)


def test_a_dominant_direction_gets_a_16_bit_band(base: Gguf, calibration: Calibration) -> None:
    """A direction with 10^6 times the energy, such as a latent's mean, would set the step of all others in an 8-bit
    band.
    """
    stats = calibration.layers[0]
    moment = stats.k2.copy()
    moment[0, 5, 5] += 1e6 * np.trace(moment[0])
    loud = replace(calibration, layers=(replace(stats, k2=moment, v2=moment[:, :32, :32]), *calibration.layers[1:]))
    fit = Fit(base, loud, Options(window=WINDOW, bpe_context=1000000))
    assert [bands[0][1] for bands in fit.plan(4.5)[::2]][0] == 16


def test_no_row_has_more_bands_than_fit() -> None:
    """Neighbours are joined where it costs least; coefficients stay, and no band gets wider."""
    shape = LayerShape(0, 4, 1, 320, 256, 0.1, 1)
    heads = latent.heads(shape, np.exp(-np.arange(256) / 20.0), np.exp(-np.arange(64) / 6.0)) * 2
    plan = plan_banded(heads, 4.0, Overhead(1 << 30, WINDOW))
    assert max(len(a) + len(b) for a, b in zip(plan[::2], plan[1::2], strict=True)) > 8
    fewer = latent.joined(heads, plan)
    for a, b in zip(fewer[::2], fewer[1::2], strict=True):
        assert len(a) + len(b) == 8
    for before, after in zip(plan, fewer, strict=True):
        old, new = (np.repeat([bits for _, bits in bands], [n for n, _ in bands]) for bands in (before, after))
        assert len(old) == len(new) and (new <= old).all() and (np.diff(new) <= 0).all()


def test_predictions_price_one_row_twice(base: Gguf, calibration: Calibration) -> None:
    """An error in the latent counts as a key and as a value; stock types are not rotated."""
    fit = Fit(base, calibration, Options(window=WINDOW, bpe_context=1000000))
    errors = [fit.error(fit.code(fit.plan(bits))[0]) for bits in (3.0, 4.0, 6.0)]
    assert errors[0] > 2 * errors[1] > 4 * errors[2] > 0
    one, joint = calibration.layers[0], fit.layers[0]
    row = one.ks[:, 0].astype(np.float64)
    split = np.einsum("ni,ij,nj->n", row, joint.cost.k[0], row)
    split += np.einsum("ni,ij,nj->n", row[:, :32], joint.cost.v[0], row[:, :32])
    both = np.einsum("ni,ij,nj->n", row[:, :32], joint.costs[0], row[:, :32])
    both += np.einsum("ni,ij,nj->n", row[:, 32:], joint.costs[1], row[:, 32:])
    cross = 2 * np.einsum("ni,ij,nj->n", row[:, :32], joint.cost.k[0][:32, 32:], row[:, 32:])
    np.testing.assert_allclose(split, both + cross, rtol=1e-6)
    assert fit.stock_error("q8_0") is None, "llama.cpp quantizes rows of 48 elements by no type of 32"


def test_output_weights_are_of_the_latent(base: Gguf, calibration: Calibration) -> None:
    shape = calibration.layers[0].shape
    found = mla.output_weights(base, shape)
    w_o = base.tensor("blk.0.attn_output.weight", "")
    w_v = base.matrix("blk.0.attn_v_b.weight", "", stacked=True).rows(slice(None)).reshape(4, 32, 32)
    for h in range(4):
        np.testing.assert_allclose(
            found[:, 32 * h : 32 * (h + 1)], w_o[:, 32 * h : 32 * (h + 1)] @ w_v[h], rtol=1e-4, atol=1e-5
        )


def test_metrics_are_those_of_the_product_of_both_weights(base: Gguf, calibration: Calibration) -> None:
    """In fewer multiplications: heads' own outputs are smaller than a latent."""
    shape, rng = calibration.layers[0].shape, np.random.default_rng(7)
    q, k = (rng.standard_normal(size).astype(np.float32) for size in ((6, shape.n_head, shape.d_k), (40, 1, shape.d_k)))
    k[9] = k[30]  # cells of equal values are coded alike
    rows = Rows(q, np.arange(34.0, 40.0), k, k[..., : shape.d_v])
    output, values = mla.read_weights(base, shape)
    found = metrics(rows, shape, gram_of(output, shape.n_head), WINDOW, values, joint=True)
    expected = metrics(rows, shape, gram_of(mla.output_weights(base, shape), shape.n_head), WINDOW, joint=True)
    for side, matrix in expected.items():
        np.testing.assert_allclose(found[side], matrix, rtol=1e-3, atol=1e-4 * np.abs(matrix).max())


def test_all_coefficients_of_a_row_cost_the_same(base: Gguf, calibration: Calibration) -> None:
    """Because a row has one scale, which minimizes the squared error."""
    joint = Fit(base, calibration, Options(window=WINDOW, bpe_context=1000000)).layers[0]
    assert isinstance(joint, latent.Fitted)
    prices = []
    for part in joint.bases:
        strong = part.importance > 1e-2 * part.importance.max()
        prices += (part.importance / part.variance)[strong].tolist()
    np.testing.assert_allclose(prices, np.median(prices), rtol=0.1)


def test_unread_directions_get_no_bits(base: Gguf, calibration: Calibration) -> None:
    """Directions of a latent that no head reads get no bits, whatever their energy."""
    fit = Fit(base, calibration, Options(window=WINDOW, bpe_context=1000000))
    cost, read = fit.layers[0].cost, np.arange(32) >= 8
    blind = replace(cost, k=cost.k.copy(), v=cost.v * read * read[:, None])
    blind.k[0, :8] = blind.k[0, :, :8] = 0.0
    stats = fit.calibration.layers[0]
    alone = np.diag(np.where(read, np.exp(-np.arange(32.0) / 4), 1e3))  # loud, and apart from the others
    k2 = stats.k2.copy()
    k2[0, :32, :32] = alone
    found = latent.Fitted.of(replace(stats, k2=k2), blind, "kld-aware").bases[0].importance
    ridged = fit_metric(alone, blind.k[0, :32, :32] + blind.v[0]).importance
    assert (np.diff(found) <= 0).all() and found[24:].max() < 1e-6 * found[0] < ridged[24:].max()


def test_noise_in_a_row_moves_keys_and_values(model: Path, base: Gguf, calibration: Calibration) -> None:
    """SensitivityTrials changes rows in a saved state, in which values are a part of keys."""
    tokens = [int(t) for t in np.random.default_rng(4).integers(40, 130, 250)]
    with Source(model) as source, Session(source, 256, 1, 4) as session:
        trials = SensitivityTrials(session, calibration, [tokens], 16)
        steps = trials.steps()
        next(steps)
        chunk = DecodedChunk(session, tokens, latent=True)
        il = calibration.layers[1].shape.il
        keys, values = chunk.view(il, "k"), chunk.view(il, "v")
        assert np.array_equal(keys[..., :32], values) and np.shares_memory(keys, values)
        rows = chunk.rows(il, True)
        np.testing.assert_array_equal(rows.k[..., :32], rows.v)
        output = mla.output_weights(base, calibration.layers[1].shape)
        shape = calibration.layers[1].shape
        error = 0.3 * np.random.default_rng(5).standard_normal(rows.k.shape).astype(np.float32)
        error[:4] = 0
        moved = energy(rows, shape, output, error, error[..., :32])
        priced = metrics(rows, shape, gram_of(output, shape.n_head), Window(4, 0))
        expected = 0.09 * (np.trace(priced["k0"][0]) + np.trace(priced["v0"][0])) / len(rows.q)
        assert 0.5 < moved / expected < 2.0
        assert chunk.kld((il, "k"), chunk.view(il, "k").astype(np.float32) + error[: chunk.start]) > 1e-4


def test_positions_rotate_the_part_after_the_latent(model: Path, base: Gguf) -> None:
    """A key 100 positions later is the same key, rotated like the calibration's keys."""
    tokens = [int(t) for t in np.random.default_rng(6).integers(40, 130, 8)]
    turn = pairs(base, 48)
    assert turn is not None and not turn.omega[:32].any() and turn.omega[32:].all()
    keys = []
    with Source(model) as source, Session(source, 256, 1, 0) as session:
        for first in (0, 100):
            session.clear()
            session.forget()
            session.mode(SAMPLE, range(first, first + 8))
            session.decode(tokens, first)
            keys.append(session.get(session.layers()[0], "ks")[:, 0])
    np.testing.assert_allclose(turn.rotate(keys[0], 100), keys[1], atol=1e-3)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"rank_k": 8}, "rank_k"),
        ({"rank_v": 8}, "rank_v"),
        ({"window": Window(adapt="v")}, "adapt"),
        ({"basis_k": "pca"}, "basis_v"),
    ],
)
def test_options_that_one_row_cannot_have(base: Gguf, calibration: Calibration, options: Any, key: str) -> None:
    with pytest.raises(SubkvError, match="latent attention") as refused:
        Fit(base, calibration, Options(**options))
    assert refused.value.key == key
