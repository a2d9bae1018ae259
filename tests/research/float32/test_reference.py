"""The float32 reference against the engine: the same model, the same codec, two implementations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from converter.conversion import convert_file
from subkv.base.errors import SubkvError
from subkv.engine.cache import parse_cache
from subkv.engine.context import ContextOptions
from subkv.engine.model import Model
from subkv.format.calibration import read_calibration
from subkv.format.window import N_SINK, Window
from subkv.native.gguf import Gguf
from subkv.plan.pipeline import Fit, Options

TOKENS = [10 + 7 * i % 200 for i in range(160)]


def engine_logits(model: Path, spec: str) -> Any:
    """Logits of all TOKENS under a cache of the native engine."""
    with Model(str(model)) as m:
        options = ContextOptions(256, 256, 256, 1, "off")
        with m.context(parse_cache(spec, model), options) as context:
            out = context.logits(context.decode(TOKENS, 0, 0)).copy()
    return out


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma3"])  # gemma3: layers with a sliding window
def test_exact_logits_are_the_engines(
    arch: str, reference: Callable[[str], Any], tiny_model: Callable[..., Path]
) -> None:
    ours = reference(arch).logits(TOKENS, 0)
    theirs = engine_logits(tiny_model(arch), "f16")
    assert np.abs(ours - theirs).max() < 0.04  # the engine's cache is f16, and so is gemma3's GELU; logits reach 8
    np.testing.assert_array_equal(reference(arch).logits(TOKENS, 100), ours[100:])


# neighbouring rotary pairs, pairs half a head apart, and layers with a sliding window, which are not coded
@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize("n_recent", [0, 16])
def test_coded_logits_match_the_engine(
    arch: str,
    n_recent: int,
    reference: Callable[[str], Any],
    calibration: Callable[[str], Path],
    tiny_model: Callable[..., Path],
    text: Path,
    tmp_path: Path,
) -> None:
    """With few bits, so that the codec's error exceeds every other difference between the two implementations."""
    from research.float32.caches import layer_coder

    model, bases = tiny_model(arch), calibration(arch)
    # gemma3: only the sixth layer is coded, so the noise of five others moves its codes
    kv_bits, share = (1.5, 0.4) if arch == "gemma3" else (3.0, 0.2)
    options = Options(kv_bits=kv_bits, window=Window(N_SINK, n_recent), bpe_context=100_000)
    sidecar = tmp_path / "s.gguf"
    convert_file(model, bases, sidecar, options, sidecar=True)
    stats = read_calibration(bases)
    with Gguf(model) as base:
        fit = Fit(base, stats, options)
        layers, _ = fit.code(fit.plan(kv_bits))
    r = reference(arch)
    tokens = r.tokenize(text.read_bytes())[:255]
    r.match(stats, tokens)
    exact = r.logits(TOKENS, 0)
    ours = r.coded_logits(TOKENS, 0, layer_coder(layers), 4, n_recent)
    theirs = engine_logits(model, f"subkv:{sidecar}")
    effect = np.sqrt(np.mean((ours - exact) ** 2))
    assert effect > 0.05
    # f16 noise moves single codes by a step, so the largest difference is not informative
    assert np.sqrt(np.mean((ours - theirs) ** 2)) < share * effect


def test_only_cells_outside_the_window_are_coded(reference: Callable[[str], Any]) -> None:
    """A coder that returns garbage changes nothing before the first query that has a coded key."""
    r = reference("llama")

    def garbage(il: int, k: Any, v: Any) -> Any:
        return np.full_like(k, 3.0), np.full_like(v, -2.0)

    exact = r.logits(TOKENS, 0)
    spoilt = r.coded_logits(TOKENS, 0, garbage, 4, 32)
    np.testing.assert_allclose(spoilt[:36], exact[:36], atol=1e-4)
    assert np.abs(spoilt[36:] - exact[36:]).max(axis=1).min() > 1e-2


def test_another_models_calibration_is_refused(
    reference: Callable[[str], Any], calibration: Callable[[str], Path], text: Path
) -> None:
    stats = read_calibration(calibration("qwen2"))
    tokens = reference("llama").tokenize(text.read_bytes())[:255]
    with pytest.raises(SubkvError, match=r"^calibration: expected a calibration of this model, found one of other"):
        reference("llama").match(stats, tokens)


def test_missing_model_is_refused(reference: Callable[[str], Any], tmp_path: Path) -> None:
    from research.float32.reference import Reference

    with pytest.raises(SubkvError, match="^model: expected a GGUF or a Hugging Face folder, found nothing at"):
        Reference(tmp_path / "none.gguf", 1)
    (tmp_path / "bad.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(SubkvError, match="^model: "):
        Reference(tmp_path / "bad.gguf", 1)


def test_attention_of_another_kind_is_refused(reference: Callable[[str], Any], tiny_model: Callable[..., Path]) -> None:
    """Soft-capped logits, and ALiBi in attention of the model's own: one sentence, no traceback."""
    from research.float32.reference import Reference

    reference("llama")
    for arch in ("gemma2", "bloom"):
        with pytest.raises(SubkvError, match="^model: "):
            Reference(tiny_model(arch), 1)
    for dims, reason in (({"head_size": 128}, "heads of 128 and a scale for 256"), ({"n_layer": 5}, "window in all 5")):
        with pytest.raises(SubkvError, match=f"^model: .*{reason}"):
            Reference(tiny_model("gemma3", **dims), 1)


def test_chunks_are_shared_among_texts(reference: Callable[[str], Any], text: Path, tmp_path: Path) -> None:
    from converter.corpus import cut, read_text

    r, whole = reference("llama"), read_text(text)
    (tmp_path / "short.txt").write_text("too short")
    short = read_text(tmp_path / "short.txt")
    assert [len(chunk) for chunk in cut(r, [whole, whole], 100, 3)] == [100, 100, 100]
    with pytest.raises(SubkvError, match="^chunks: expected at least one for each of the 3 texts, found 2"):
        cut(r, [whole] * 3, 100, 2)
    with pytest.raises(SubkvError, match="short.txt: expected at least 100 tokens for a chunk, found"):
        cut(r, [short], 100, 2)


def test_windows_of_a_layer(reference: Callable[[str], Any]) -> None:
    """A layer with a sliding window in pieces: as softmax written out, with sinks, recent and coded keys."""
    reference("llama")  # skips without torch
    import torch

    from research.float32 import reference as module

    n, window = 600, 37
    generator = torch.Generator().manual_seed(1)
    q, k, v, k_coded, v_coded = (torch.randn(1, heads, n, 8, generator=generator) for heads in (4, 2, 2, 2, 2))
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    for n_sink, n_recent, reach, coded in (
        (4, 9, window, True),
        (0, 0, window, True),
        (0, 0, window, False),
        (4, 9, n, True),
    ):
        exact = (j < n_sink) | (j > i - n_recent) if coded else torch.ones(n, n, dtype=torch.bool)
        scores = [torch.einsum("hgid,hjd->hgij", q[0].view(2, 2, n, 8), x[0]) for x in (k, k_coded)]
        visible = (j <= i) & (j > i - reach)
        weights = torch.where(exact, *scores).masked_fill(~visible, -torch.inf).softmax(-1)
        expected = (weights * exact) @ v[0][:, None] + (weights * ~exact) @ v_coded[0][:, None]
        how = ((k_coded, v_coded) if coded else None, 1.0, n_sink, n_recent, None if reach == n else reach)
        actual = module.attend(q, k, v, *how)[0].transpose(0, 1)
        torch.testing.assert_close(actual, expected.flatten(0, 1), atol=1e-4, rtol=1e-4)


def test_other_layers_than_its_own_are_refused(
    reference: Callable[[str], Any], calibration: Callable[[str], Path]
) -> None:
    """Bases of all layers do not fit a model in which some have a sliding window."""
    from dataclasses import replace

    from research.float32.reference import check_shapes

    stats, r = read_calibration(calibration("gemma3")), reference("gemma3")
    check_shapes(r, stats)
    layer = stats.layers[0]
    wrong = replace(stats, layers=(replace(layer, shape=replace(layer.shape, il=4)), layer))
    with pytest.raises(SubkvError, match="^calibration: expected 1 layers, 2 heads, 1 KV heads of size 256 as in the"):
        check_shapes(r, wrong)


def test_stock_types_quantize_the_chosen_layers(
    reference: Callable[[str], Any], calibration: Callable[[str], Path], tiny_model: Callable[..., Path]
) -> None:
    """As llama.cpp all of them, or those with full attention, or with a sliding window; `run` passes both coders on."""
    from research.float32.caches import run, stock_caches

    r = reference("gemma3")
    with Gguf(tiny_model("gemma3")) as base:
        fit = Fit(base, read_calibration(calibration("gemma3")), Options(window=Window(N_SINK, 16), bpe_context=512))
    caches = {layers: stock_caches(["q4_0"], fit, "kv", layers) for layers in ("all", "full", "sliding")}
    run(r, [cache for both in caches.values() for cache in both], [TOKENS], 1, progress=False)
    kld = {name: [cache.scores.summary()["mean_kld"] for cache in both] for name, both in caches.items()}
    assert kld["all"][0] > max(kld["full"][0], kld["sliding"][0]) > min(kld["full"][0], kld["sliding"][0]) > 1e-5
    assert all(with_window < without for without, with_window in kld.values())
    assert [both[0].predicted is None for both in caches.values()] == [False, False, True]
