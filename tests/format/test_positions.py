"""Statistics spread over positions: against rotating by hand, and where it does not apply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from calib_synthetic import random_calibration

from converter import rotation
from converter.corpus import Corpus, Text
from converter.session import Session
from converter.source import Source
from converter.statistics_stage import collect_statistics
from subkv.engine.observer import SAMPLE
from subkv.format.calibration import LayerSensitivity, Sensitivity, TextSource, read_calibration, write_calibration
from subkv.native.gguf import Gguf
from subkv.plan.positions import average_over_positions, is_known, pairs

SLIDING = {"gemma3": range(5)}  # layers that rotate at another frequency


def turn(d: int, offset: float, neighbours: bool) -> np.ndarray:
    """R_o [d, d] written out, base 10000."""
    matrix = np.zeros((d, d))
    for i in range(d // 2):
        a, b = (2 * i, 2 * i + 1) if neighbours else (i, i + d // 2)
        angle = offset * 10000.0 ** (-2.0 * i / d)
        matrix[a, a] = matrix[b, b] = np.cos(angle)
        matrix[a, b], matrix[b, a] = -np.sin(angle), np.sin(angle)
    return matrix


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen2vl", "gemma2"])
def test_moments_are_the_mean_over_offsets(arch: str, tiny_model: Callable[..., Path]) -> None:
    """Fine midpoint sums over [0, 4096 − 256]; the tiny models are trained for 4096 positions."""
    stats = random_calibration(arch=arch, n_ctx=256)
    layers = tuple(
        replace(layer, k1=layer.k1 + 0.5, sensitivity=LayerSensitivity(layer.q2, layer.v2, layer.k2, layer.v2))
        for layer in stats.layers
    )
    stats = replace(stats, layers=layers, sensitivity=Sensitivity("fisher", 100, 16, 128))
    with Gguf(tiny_model(arch)) as base:
        wide, note = average_over_positions(base, stats)
    assert note is None
    offsets = (np.arange(20_000) + 0.5) / 20_000 * (4096 - 256)
    turns = np.stack([turn(32, o, arch == "llama") for o in offsets])
    wider = np.stack([turn(32, o, arch == "llama") for o in offsets * (4096 - 128) / (4096 - 256)])
    found, given = wide.layers[1], stats.layers[1]
    assert found.sensitivity is not None and given.sensitivity is not None
    moments = [
        (found.k2, given.k2, turns),
        (found.q2, given.q2, turns),
        (found.sensitivity.k, given.sensitivity.k, wider),  # measured in shorter chunks
    ]
    for a, b, by in moments:
        expected = np.einsum("oij,jk,olk->il", by, b[0], by, optimize=True) / len(offsets)
        np.testing.assert_allclose(a[0], expected, atol=2e-3 * np.trace(b[0]))
        assert np.trace(a[0]) == pytest.approx(np.trace(b[0]))
    np.testing.assert_allclose(found.k1[0], turns.mean(axis=0) @ given.k1[0], atol=5e-3)
    np.testing.assert_array_equal(found.v2, given.v2)
    np.testing.assert_allclose(  # rows are turned, not stretched
        np.linalg.norm(found.ks.astype(float), axis=-1), np.linalg.norm(given.ks.astype(float), axis=-1), rtol=5e-3
    )


@pytest.mark.parametrize(
    ("arch", "sections", "still"),
    [("qwen2vl", [8, 4, 4, 0], []), ("qwen2vl", [4, 4, 4, 4], [12, 13, 14, 15]), ("qwen3vl", [6, 5, 5, 0], [])]
    + [("qwen3vl", [6, 4, 4, 0], [13])],
)
def test_pairs_of_a_fourth_position_do_not_turn_in_text(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, arch: str, sections: list[int], still: list[int]
) -> None:
    with Gguf(tiny_model("qwen2vl")) as base:
        own = base.get
        known = {"general.architecture": arch, f"{arch}.rope.dimension_sections": sections}
        monkeypatch.setattr(base, "get", lambda key: known.get(key) or own(key))
        rotated = pairs(base, 32)
    assert rotated is not None
    assert np.flatnonzero(rotated.omega[16:] == 0.0).tolist() == still


def test_a_calibration_of_the_trained_context_stays(tiny_model: Callable[..., Path]) -> None:
    stats = random_calibration(n_ctx=4096)
    with Gguf(tiny_model("llama")) as base:
        assert average_over_positions(base, stats) == (stats, None)
        assert is_known(base)


@pytest.mark.parametrize(
    ("arch", "more"),
    [(arch, {}) for arch in ("llama", "qwen2", "qwen2vl", "qwen35", "lfm2", "gemma2", "gemma3", "bloom")]
    + [("gemma3", {"rope_factor": 8.0}), ("llama", {"rope_factor": 4.0})],
)
def test_the_engine_rotates_keys_so(arch: str, more: dict[str, float], tiny_model: Callable[..., Path]) -> None:
    """The same tokens 1000 positions later have the same keys, rotated by 1000, in layers without a sliding window."""
    n, offset, found = 12, 1000, []
    with Source(tiny_model(arch, **more)) as source:
        for first in (0, offset):
            with Session(source, 64, 1, 0) as session:
                positions = range(first, first + n)
                session.mode(SAMPLE, positions, positions)
                session.decode(list(range(3, 3 + n)), first)
                found.append({layer.il: session.get(layer, "ks") for layer in session.layers()})
        d = next(iter(found[0].values())).shape[-1]
        rotary = pairs(source.gguf, d)
    for il in found[0].keys() - set(SLIDING.get(arch, ())):
        near, far = (rows[il] for rows in found)
        expected = near if rotary is None else rotary.rotate(near, float(offset))
        assert np.abs(far - expected).max() < 1e-2 * np.abs(near).max(), il
        assert rotary is None or np.abs(far - near).max() > 0.1 * np.abs(near).max()


@pytest.mark.parametrize("arch", ["llama", "qwen2vl", "gemma3", "gpt-oss", "grok", "bloom"])
def test_a_measured_rotation_is_the_engines(arch: str, tiny_model: Callable[..., Path]) -> None:
    """It is that of the metadata, if they tell it, and it predicts the keys at the last trained positions."""
    n, tokens = 12, list(range(3, 15))
    with Source(tiny_model(arch)) as source, Session(source, 64, 1, 0) as session:
        last, found = source.n_ctx_train - n, []
        rotations = rotation.measure(session, tokens, source.n_ctx_train)
        for first in (0, last):
            session.clear()
            session.mode(SAMPLE, range(first, first + n), ())
            session.decode(tokens, first)
            found.append({layer.il: session.get(layer, "ks") for layer in session.layers()})
            session.forget()
        known = {il: pairs(source.gguf, rows.shape[-1]) for il, rows in found[0].items()}
    assert rotations.keys() == found[0].keys()
    for il, measured in rotations.items():
        near, far = (rows[il] for rows in found)
        assert np.abs(measured.rotate(near, float(last)) - far).max() < 2e-2 * np.abs(near).max(), il
        if (rotary := known[il]) is not None and il not in SLIDING.get(arch, ()):
            np.testing.assert_array_equal(measured.partner, rotary.partner)
            np.testing.assert_allclose(measured.omega * last, rotary.omega * last, atol=1e-2)


def test_a_trained_context_without_end_is_measured(tiny_model: Callable[..., Path]) -> None:
    with Source(tiny_model("gpt-oss")) as source, Session(source, 64, 1, 0) as session:
        near, far = (rotation.measure(session, range(3, 15), n) for n in (4096, 1 << 40))
    assert near.keys() == far.keys() != set()
    for il, measured in far.items():
        np.testing.assert_allclose(measured.omega, near[il].omega, atol=1e-5)


def test_a_calibration_of_an_unknown_rotation_is_spread(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """A converted model of such an architecture has no remark, and its calibration keeps the rotation."""
    path, text = tmp_path / "stats.safetensors", "The castle stood on a hill above the river. " * 200
    corpus = Corpus((), 128, 8, 1)
    with Source(tiny_model("gpt-oss")) as source:
        stats, _ = collect_statistics(source, corpus, [Text(TextSource("hill", "0" * 64, len(text)), text.encode())], 4)
        write_calibration(path, stats)
        read = read_calibration(path)
        wide, remark = average_over_positions(source.gguf, read)
    assert remark is None
    for layer, written, spread in zip(stats.layers, read.layers, wide.layers, strict=True):
        assert layer.rotation is not None and written.rotation is not None
        np.testing.assert_array_equal(written.rotation.partner, layer.rotation.partner)
        np.testing.assert_array_equal(written.rotation.omega, layer.rotation.omega)
        assert np.abs(spread.k2 - written.k2).max() > 0.05 * np.abs(written.k2).max()


def test_unknown_rotations_are_noted(tiny_model: Callable[..., Path]) -> None:
    stats = random_calibration(arch="gpt-oss", n_ctx=256)
    with Gguf(tiny_model("gpt-oss")) as base:
        assert pairs(base, 32) is None
        assert not is_known(base)
        same, note = average_over_positions(base, stats)
    assert same == stats
    assert note is not None and str(note).startswith(
        "calibration: expected a calibration at the trained context of 4096 tokens"
    )
