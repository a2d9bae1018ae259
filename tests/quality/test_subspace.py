"""SubspaceCache on tiny models: against the float32 reference, the native engine, and itself in other splits."""

from __future__ import annotations

import copy
import dataclasses
import os
import pydoc_data.topics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from converter.conversion import convert_file  # noqa: E402
from converter.scoring import log_softmax  # noqa: E402
from subkv import SubspaceCache  # noqa: E402
from subkv.base.errors import CacheError, SubkvError  # noqa: E402
from subkv.engine.cache import parse_cache  # noqa: E402
from subkv.engine.context import ContextOptions  # noqa: E402
from subkv.engine.model import Model  # noqa: E402
from subkv.format import metadata  # noqa: E402
from subkv.format.calibration import read_calibration  # noqa: E402
from subkv.format.layout import Layout  # noqa: E402
from subkv.format.window import N_ROLLBACK, N_SINK, Window  # noqa: E402
from subkv.native.gguf import Gguf  # noqa: E402
from subkv.plan.pipeline import Fit, Options  # noqa: E402

TOKENS = [10 + 7 * i % 200 for i in range(160)]
IDS = torch.tensor([TOKENS])
N_RECENT = 16
OPTIONS = Options(kv_bits=3.0, window=Window(N_SINK, N_RECENT), bpe_context=100_000)
# settings that transformers does not read from a GGUF, as in tests/tiny.py
CONFIG: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 32, "attn_implementation": "eager"}
}


def load(path: Path, arch: str, **kwargs: Any) -> Any:
    """A new model, because from_file changes its model."""
    kwargs = {"dtype": torch.float32, **CONFIG.get(arch, {}), **kwargs}
    return transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **kwargs).eval()


@pytest.fixture(scope="module")
def build(
    tiny_model: Callable[..., Path], calibration: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Any, SubspaceCache, Path]]:
    """build(arch): a model with subkv's attention, an empty cache for it, and the sidecar."""
    pytest.importorskip("accelerate")
    folder, built = tmp_path_factory.mktemp("sidecars"), {}

    def make(arch: str) -> tuple[Any, SubspaceCache, Path]:
        if arch not in built:
            path = folder / f"{arch}.gguf"
            convert_file(tiny_model(arch), calibration(arch), path, OPTIONS, sidecar=True)
            model = load(tiny_model(arch), arch)
            built[arch] = model, SubspaceCache.from_file(path, model).bases, path
        model, bases, path = built[arch]
        return model, SubspaceCache(bases), path

    return make


@pytest.fixture
def llama(build: Callable[[str], tuple[Any, SubspaceCache, Path]]) -> tuple[Any, SubspaceCache]:
    return build("llama")[:2]


@torch.inference_mode()
def logits(model: Any, cache: Any, ids: Any = IDS, splits: list[int] | None = None, mask: Any = None) -> Any:
    """Logits [batch, n, n_vocab] of a prompt in parts; mask as transformers' attention_mask."""
    out, done = [], cache.get_seq_length() if cache is not None else 0
    for part in ids.split(splits or ids.shape[1], 1):
        high = done + part.shape[1]
        positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)[:, done:high]
        visible = None if mask is None else mask[:, :high]
        out.append(model(part, attention_mask=visible, position_ids=positions, past_key_values=cache).logits)
        done = high
    return torch.cat(out, 1)


def rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.asarray(x) ** 2)))


@pytest.mark.parametrize("arch", ["llama", "qwen2"])  # neighbouring rotary pairs, and pairs half a head apart
def test_logits_are_the_references(
    arch: str,
    build: Callable[[str], tuple[Any, SubspaceCache, Path]],
    reference: Callable[[str], Any],
    calibration: Callable[[str], Path],
    tiny_model: Callable[..., Path],
    text: Path,
) -> None:
    """The codec of research.float32.caches, where every vector is reconstructed, against attention on coefficients."""
    from research.float32.caches import layer_coder

    model, cache, _ = build(arch)
    stats = read_calibration(calibration(arch))
    with Gguf(tiny_model(arch)) as base:
        fit = Fit(base, stats, OPTIONS)
        layers, _ = fit.code(fit.plan(3.0))
    r = reference(arch)
    r.match(stats, r.tokenize(text.read_bytes())[:255])
    expected = r.coded_logits(TOKENS, 0, layer_coder(layers), 4, N_RECENT)
    assert rms(expected - r.logits(TOKENS, 0)) > 0.05
    np.testing.assert_allclose(logits(model, cache)[0], expected, atol=1e-4)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma2"])  # gemma2: sliding windows, soft-capped logits
def test_logits_match_the_engine(
    arch: str, build: Callable[[str], tuple[Any, SubspaceCache, Path]], tiny_model: Callable[..., Path]
) -> None:
    """Within a fifth of the codec's effect: the engine's other layers and window are half precision, and a path changes
    in more places than the changed coefficient.
    """
    model, cache, sidecar = build(arch)
    with Model(str(tiny_model(arch))) as m:
        choice = parse_cache(f"subkv:{sidecar}", m.path)
        context = m.context(choice, ContextOptions(256, n_batch=256, n_ubatch=256, n_threads=1, flash_attn="off"))
        theirs = context.logits(context.decode(TOKENS, 0, 0)).copy()
        native = context.stats
        context.close()
    ours = logits(model, cache)[0]
    assert rms(ours.numpy() - theirs) < 0.2 * rms(ours - logits(model, None)[0])
    stats = cache.kv_stats()
    same = ("bytes_codes", "bytes_per_token", "n_layer_coded", "n_cells", "n_sink", "n_recent", "fingerprint")
    assert {name: getattr(stats, name) for name in same} == {name: getattr(native, name) for name in same}


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
def test_other_caches_are_unchanged(
    arch: str, build: Callable[[str], tuple[Any, SubspaceCache, Path]], tiny_model: Callable[..., Path]
) -> None:
    expected = logits(load(tiny_model(arch), arch), None)
    model = build(arch)[0]
    torch.testing.assert_close(logits(model, None), expected, atol=1e-4, rtol=0.0)
    cache = transformers.DynamicCache(config=model.config)
    torch.testing.assert_close(logits(model, cache, splits=[100, 1, 59]), expected, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("splits", [[1] * 20 + [140], [50, 1, 1, 30, 78], [7] * 22 + [6]])
def test_splits_do_not_show(splits: list[int], llama: tuple[Any, SubspaceCache]) -> None:
    model, cache = llama
    whole = logits(model, SubspaceCache(cache.bases))
    torch.testing.assert_close(logits(model, cache, splits=splits), whole, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("splits", [[160], [10, 12, 1, 137]])
def test_left_padding_has_no_effect(splits: list[int], llama: tuple[Any, SubspaceCache]) -> None:
    """A row that is all padding in the first part, a row whose sinks arrive in two parts, and one without padding."""
    model, cache = llama
    pads = (13, 8, 0)
    ids = torch.tensor([[0] * pad + TOKENS[: 160 - pad] for pad in pads])
    mask = torch.tensor([[0] * pad + [1] * (160 - pad) for pad in pads])
    whole = logits(model, SubspaceCache(cache.bases))[0]
    padded = logits(model, cache, ids, splits, mask)
    for row, pad in zip(padded, pads, strict=True):
        torch.testing.assert_close(row[pad:], whole[: 160 - pad], atol=1e-4, rtol=0.0)


def test_a_tail_can_be_cropped_while_exact_cells_are_left(llama: tuple[Any, SubspaceCache]) -> None:
    model, cache = llama
    whole = logits(model, cache)
    cache.crop(-14)
    torch.testing.assert_close(logits(model, cache, IDS[:, 146:]), whole[:, 146:], atol=1e-4, rtol=0.0)
    short = SubspaceCache(cache.bases)
    logits(model, short, IDS[:, :20])
    short.crop(-19)  # all of it is exact; the sinks go, too
    torch.testing.assert_close(logits(model, short, IDS[:, 1:]), whole[:, 1:], atol=1e-4, rtol=0.0)
    short.reset()
    torch.testing.assert_close(logits(model, short), whole, atol=1e-4, rtol=0.0)


def test_rows_of_a_batch_can_be_moved(llama: tuple[Any, SubspaceCache]) -> None:
    model, cache = llama
    ids = torch.stack([IDS[0], IDS[0].flip(0)])
    whole = logits(model, SubspaceCache(cache.bases), ids)
    logits(model, cache, ids[:, :100])
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 2, 3]))
    actual = logits(model, cache, ids[[1, 0, 0], 100:])
    torch.testing.assert_close(actual, whole[[1, 0, 0], 100:], atol=1e-4, rtol=0.0)


def test_a_copy_is_independent(llama: tuple[Any, SubspaceCache]) -> None:
    model, cache = llama
    whole = logits(model, SubspaceCache(cache.bases))
    logits(model, cache, IDS[:, :100])
    other = copy.deepcopy(cache)
    logits(model, other, IDS[:, :60])
    torch.testing.assert_close(logits(model, cache, IDS[:, 100:]), whole[:, 100:], atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("how", [{}, {"prompt_lookup_num_tokens": 32}, {"prefill_chunk_size": 13}, {"num_beams": 2}])
def test_generate(how: dict[str, int], llama: tuple[Any, SubspaceCache]) -> None:
    """Greedily the most likely tokens of the cache's own logits; beams find a text at least as likely."""
    model, cache = llama
    ids = model.generate(IDS[:, :60], past_key_values=cache, max_new_tokens=24, do_sample=False, **how)
    assert cache.get_seq_length() == ids.shape[1] - 1

    def likelihood(text: Any) -> float:
        log_probabilities = logits(model, SubspaceCache(cache.bases), text)[0, 59:-1].log_softmax(-1)
        return float(log_probabilities.gather(1, text[0, 60:, None]).sum())

    own = logits(model, SubspaceCache(cache.bases), ids)[0, 59:-1].argmax(-1)
    if "num_beams" not in how:
        assert own.tolist() == ids[0, 60:].tolist()
        return
    greedy = model.generate(IDS[:, :60], past_key_values=SubspaceCache(cache.bases), max_new_tokens=24, do_sample=False)
    assert likelihood(ids) > likelihood(greedy)


def test_bytes_are_those_allocated(llama: tuple[Any, SubspaceCache]) -> None:
    model, cache = llama
    assert cache.kv_stats().bytes_kv == 0
    logits(model, cache, IDS.repeat(3, 1))
    cache.crop(-5)
    stats, config = cache.kv_stats(), model.config
    names = ("rows_k", "rows_v", "sink_k", "sink_v", "recent_k", "recent_v")
    tensors = [layer._tensors[name] for layer in cache.layers for name in names]
    assert stats.bytes_kv == sum(x.untyped_storage().nbytes() for x in tensors)
    per_token = config.num_hidden_layers * config.num_key_value_heads * 2 * config.head_dim
    assert stats.bytes_f16 == 2 * 3 * stats.n_cells * per_token
    assert stats.bytes_codes == 3 * stats.n_cells * stats.bytes_per_token
    assert stats.bpe == pytest.approx(16 * stats.bytes_kv / stats.bytes_f16)
    n_exact = 4 + N_RECENT + N_ROLLBACK
    assert stats.bytes_window == 3 * n_exact * per_token * 4  # a float32 model has a float32 window


def test_half_precision_models(
    tiny_model: Callable[..., Path], calibration: Callable[[str], Path], llama: tuple[Any, SubspaceCache]
) -> None:
    """With many bits, the cache changes logits little more than the model's own rounding does."""
    half = load(tiny_model("llama"), "llama", dtype=torch.bfloat16)
    actual = logits(half, SubspaceCache.from_file(calibration("llama"), half, kv_bits=14.0, n_recent=N_RECENT))
    assert actual.dtype == torch.bfloat16
    rounded = logits(half, None).float()
    assert rms(actual.float() - rounded) < 2 * rms(rounded - logits(llama[0], None))


def test_a_row_with_nan_decodes_to_nan(llama: tuple[Any, SubspaceCache]) -> None:
    model, cache = llama
    layer = cache.layers[0]
    k = torch.randn(1, layer.codecs[0].mean.shape[0], 3, layer.codecs[0].d)
    k[0, 0, 1, 0] = torch.nan
    layer.update(k, k)
    codec = layer.codecs[0]
    assert layer._tensors["rows_k"][0, 1, codec._scale_byte[0]] == 255
    assert codec.decode(layer._tensors["rows_k"])[0, 0, :3].isnan().all(-1).tolist() == [False, True, False]
    assert cache.kv_stats().n_zero_rows == 2  # as key and as value


def test_planned_as_convert_does(
    tiny_model: Callable[..., Path], calibration: Callable[[str], Path], build: Callable[..., Any]
) -> None:
    """A calibration alone gives the layout and the bases of `convert`, up to the rounding of stored weights."""
    from subkv.torch.bases import ModelFacts

    model, _, sidecar = build("qwen2")
    stats = read_calibration(calibration("qwen2"))
    fit = Fit(ModelFacts(model, stats.arch), stats, OPTIONS)
    layers, _ = fit.code(fit.plan(3.0))
    for layer in layers:
        for ours, stored in zip(layer.heads, metadata.read_heads(sidecar)[layer.shape.il], strict=True):
            assert (ours.k.bands, ours.v.bands) == (stored.k.bands, stored.v.bands)
            assert ours.gamma == pytest.approx(stored.gamma, rel=1e-6)
            for a, b in ((ours.k, stored.k), (ours.v, stored.v)):
                for name in ("encode", "decode", "ratio", "mean"):
                    np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=1e-3, atol=1e-6)
    planned = SubspaceCache.from_file(calibration("qwen2"), model, kv_bits=14.0, n_recent=N_RECENT)
    assert rms(logits(model, planned) - logits(model, None)) < 0.1
    assert planned.kv_stats().fingerprint is None


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma2"])
def test_planned_from_the_weights_alone(tiny_model: Callable[..., Path], arch: str) -> None:
    """The bytes are those of the GGUF, and the model runs."""
    from subkv.torch.bases import ModelFacts

    pytest.importorskip("accelerate")
    model = load(tiny_model(arch), arch)
    with (
        ModelFacts(model, arch).derived(5.0, Window(4, 128)) as ours,
        Layout(tiny_model(arch), 5.0, derived=True) as theirs,
    ):
        assert ours.description == theirs.description
    exact = logits(model, None)
    cache = SubspaceCache.from_model(model, kv_bits=16.0, n_recent=N_RECENT)
    assert rms(logits(model, cache) - exact) < 0.1 * rms(exact)
    assert cache.kv_stats().fingerprint is None
    with pytest.raises(SubkvError, match="kv_bits"):
        SubspaceCache.from_model(model, kv_bits=1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("arch", ["llama", "gemma2"])  # another order of rows, norms of 1 + weight
def test_weights_of_any_type(tiny_model: Callable[..., Path], arch: str, dtype: Any) -> None:
    from subkv.torch.bases import ModelFacts

    model, found = torch.nn.Module.to(load(tiny_model(arch), arch), dtype), []
    for _ in range(2):
        with ModelFacts(model, arch).derived(None, Window(4, 128)) as layout:
            found.append(layout.description)
        torch.nn.Module.float(model)
    assert found[0] == found[1] and found[0]["basis_k"] == "query-aware"


def test_bases_that_would_follow_the_text_do_not(
    tiny_model: Callable[..., Path],
    calibration: Callable[[str], Path],
    llama: tuple[Any, SubspaceCache],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, cache = llama
    sidecar = tmp_path / "adapt.gguf"
    options = dataclasses.replace(OPTIONS, window=dataclasses.replace(OPTIONS.window, adapt="v"))
    convert_file(tiny_model("llama"), calibration("llama"), sidecar, options, sidecar=True)
    other = SubspaceCache.from_file(sidecar, model)
    assert caplog.messages == ["subkv.adapt: ignored with transformers, whose bases are static, found v"]
    assert torch.equal(logits(model, other), logits(model, cache))


def test_bad_input_is_named(
    tiny_model: Callable[..., Path], build: Callable[..., Any], llama: tuple[Any, SubspaceCache], tmp_path: Path
) -> None:
    model, cache = llama
    sidecar = build("llama")[2]
    with pytest.raises(CacheError, match="path: cannot read .*none.gguf: No such file"):
        SubspaceCache.from_file(tmp_path / "none.gguf", model)
    with pytest.raises(CacheError, match="kv_bits: expected none with a converted file"):
        SubspaceCache.from_file(sidecar, model, kv_bits=4.0)
    with pytest.raises(SubkvError, match=r"subkv.version: "):
        SubspaceCache.from_file(tiny_model("llama"), model)
    with pytest.raises(CacheError, match="path: expected bases of a llama model, found those of qwen2"):
        SubspaceCache.from_file(build("qwen2")[2], model)
    (tmp_path / "bad").write_bytes(b"nothing")
    with pytest.raises(SubkvError, match="^path: "):
        SubspaceCache.from_file(tmp_path / "bad", model)
    with pytest.raises(CacheError, match="expected causal attention"):
        model(IDS, attention_mask=torch.ones(1, 1, 160, 160, dtype=torch.bool), past_key_values=cache)
    with pytest.raises(CacheError, match="expected the attention function 'subkv' after every update"):
        logits(model, cache)
    other = load(tiny_model("llama"), "llama")
    stray = SubspaceCache.from_file(sidecar, other)
    other.set_attn_implementation("sdpa")
    with pytest.raises(CacheError, match="expected the attention function 'subkv', .* found 'sdpa'"):
        logits(other, stray)


def test_import_needs_no_torch_and_changes_nothing() -> None:
    code = (
        "import sys, subkv; assert 'torch' not in sys.modules; "
        "import transformers; before = set(transformers.AttentionInterface._global_mapping); "
        "subkv.SubspaceCache; assert set(transformers.AttentionInterface._global_mapping) == before"
    )
    path = os.pathsep.join(p for p in sys.path if p)
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})


@pytest.mark.quality
def test_the_demo_model_matches_the_engine(demo_model: Path, tmp_path: Path) -> None:
    """Within twice the noise floor, which is the effect of the engine's quantized activations without any codec."""
    calibration = Path(__file__).resolve().parents[2] / "models" / "smollm2-135m-instruct.calib.safetensors"
    sidecar, n = tmp_path / "bases.gguf", 192
    convert_file(demo_model, calibration, sidecar, Options(kv_bits=4.25), sidecar=True)
    theirs = {}
    with Model(str(demo_model)) as m:
        tokens = m.tokenize("\n".join(pydoc_data.topics.topics.values())[:4000].encode())[:n].tolist()
        for name in ("f16", f"subkv:{sidecar}"):
            options = ContextOptions(n, n_batch=n, n_ubatch=n, n_threads=2, flash_attn="off")
            context = m.context(parse_cache(name, demo_model), options)
            theirs[name[:5]] = context.logits(context.decode(tokens, 0, n // 2)).copy()
            context.close()
    model = load(demo_model, "llama")
    ids = torch.tensor([tokens])
    exact = logits(model, None, ids)[0, n // 2 :].numpy()
    cache = SubspaceCache.from_file(sidecar, model)
    ours = logits(model, cache, ids)[0, n // 2 :].numpy()

    def kld(base: Any, other: Any) -> float:
        p, q = log_softmax(base), log_softmax(other)
        return float((np.exp(p) * (p - q)).sum(-1).mean())

    floor = kld(theirs["f16"], exact)
    assert 1e-5 < kld(exact, ours) < 0.002
    assert kld(theirs["subkv"], ours) < 2.0 * floor
    dynamic = transformers.DynamicCache(config=model.config)
    logits(model, dynamic, ids[:, :1])
    n_bytes = n * sum(x.nbytes for layer in dynamic.layers for x in (layer.keys, layer.values))
    assert cache.kv_stats().bytes_per_token * n < 0.14 * n_bytes  # rows of less than 4.25 bits for float32
