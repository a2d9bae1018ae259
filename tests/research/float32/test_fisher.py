"""Sensitivities by backpropagation predict the KLD that small errors cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each import each
from references import N_RECENT, REFUSED_TEXTS, check_refused_text

from converter.scoring import log_softmax
from research import fisher
from subkv.format.calibration import read_calibration


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


@each(("arguments", "sentence"), REFUSED_TEXTS)
def test_fisher_refuses(
    arguments: list[str],
    sentence: str,
    calibration: Callable[[str], Path],
    tiny_model: Callable[..., Path],
    text: Path,
    tmp_path: Path,
    reference: Callable[[str], Any],
) -> None:
    reference("llama")
    output = tmp_path / "o.safetensors"
    check_refused_text(fisher.main, tiny_model("llama"), calibration("llama"), text, output, arguments, sentence)
