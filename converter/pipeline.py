"""From a calibration file and a base model to coded layers: metrics, bases, plan, rounding, gamma."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from converter import layout
from converter.basis import F64, FullBasis, fit_metric, fit_pca, store
from converter.calib_io import PREFIX, Calibration, LayerShape, LayerStats
from converter.codec import Bands
from converter.errors import ConverterError
from converter.gamma import gamma_of
from converter.gguf_io import Gguf
from converter.layout import Account, Head, Overhead
from converter.metadata import CodedHead, CodedLayer, Settings

# Weight of K against V in the plan. To first order a logit error δ and a value error ε change the attention output by
# Σ α² (δ²·E‖W(v − o)‖² + E‖W ε‖²), so in units of the layer's centred value energy the weight would be 1. But keys that
# draw much attention hold values close to the output o, so K weighs less. Measured on SmolLM2-135M at 3.2 bits per
# element (WikiText-2 test, 2 x 1024 tokens, KLD to f16): 0.033 at weight 2, 0.025 at 1, 0.022 at 0.5 and at 0.35.
KEY_WEIGHT = 0.4
CALIBRATED_CONTEXT = 8192  # largest default for --bpe-context

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What `convert` was asked for. kv_bits is None for codec int8; ranks are None for the head size."""

    settings: Settings
    kv_bits: float | None
    rank_k: int | None
    rank_v: int | None
    bpe_context: int | None


@dataclass(frozen=True)
class Result:
    layers: tuple[CodedLayer, ...]
    counted: Account
    gamma_sources: dict[str, int]  # heads per source of gamma


@dataclass(frozen=True)
class _Fitted:
    """One layer's full bases and the prices the planner uses. Lists are per KV head."""

    k: list[FullBasis]
    v: list[FullBasis]
    k_weight: list[float]  # importance of K coefficients times this is in the planner's units
    v_weight: list[float]


def check_model(base: Gguf, calibration: Calibration) -> None:
    """Refuse a calibration made for another model, a split file, or a file that is already converted."""
    if any(key.startswith("subkv.") for key in base.keys()):  # noqa: SIM118 (not a dict)
        raise ConverterError(f"subkv.version: expected a base model without subkv keys, found them in {base.path}")
    if (base.get("split.count") or 1) > 1:
        raise ConverterError(
            f"split.count: expected one file, found a model split into {base.get('split.count')}; merge it first"
        )
    arch = base.get("general.architecture")
    if arch != calibration.arch:
        raise ConverterError(f"{PREFIX}arch: expected {arch!r} as in the model, found {calibration.arch!r}")
    blocks = base.get(f"{arch}.block_count")
    if blocks != calibration.block_count:
        raise ConverterError(
            f"{PREFIX}block_count: expected {blocks} layers as in the model, found {calibration.block_count}"
        )
    for layer in calibration.layers:
        _check_shape(base, str(arch), layer.shape)


def _check_shape(base: Gguf, arch: str, shape: LayerShape) -> None:
    def per_layer(key: str) -> Any:
        value = base.get(f"{arch}.{key}")
        return value[shape.il] if isinstance(value, list) and shape.il < len(value) else value

    n_head = per_layer("attention.head_count")
    embedding = base.get(f"{arch}.embedding_length")
    default_size = embedding // n_head if embedding and n_head else None
    # sliding-window layers may have their own sizes, and the *_swa keys are not in every architecture
    sizes_vary = base.get(f"{arch}.attention.key_length_swa") is not None
    expected = {
        "n_head": n_head,
        "n_head_kv": per_layer("attention.head_count_kv") or n_head,
        "d_k": None if sizes_vary else base.get(f"{arch}.attention.key_length") or default_size,
        "d_v": None if sizes_vary else base.get(f"{arch}.attention.value_length") or default_size,
    }
    for key, value in expected.items():
        if value is not None and value != getattr(shape, key):
            raise ConverterError(
                f"{PREFIX}layers: expected {key} {value} in layer {shape.il} as in the model, "
                f"found {getattr(shape, key)}"
            )


def output_metrics(base: Gguf, shape: LayerShape) -> F64:
    """Σ over the group's heads of W_o,hᵀ W_o,h, per KV head: [n_head_kv, d_v, d_v].

    W_o is blk.N.attn_output.weight, [n_embd, n_head·d_v]; query head h reads columns h·d_v … (h+1)·d_v.
    Raises ConverterError when the model has no such tensor.
    """
    name = f"blk.{shape.il}.attn_output.weight"
    weights = base.tensor(name, "basis output-aware needs it, --basis-v pca does not")
    columns = shape.n_head * shape.d_v
    if weights.shape[1] != columns:
        raise ConverterError(
            f"{name}: expected {columns} columns (heads × head size), found {weights.shape[1]}; "
            f"--basis-v pca does not need it"
        )
    metrics = np.zeros((shape.n_head_kv, shape.d_v, shape.d_v))
    for head in range(shape.n_head):
        slice_ = weights[:, head * shape.d_v : (head + 1) * shape.d_v]
        metrics[head // shape.n_group] += (slice_.T @ slice_).astype(np.float64)
    return metrics


def _fit_layer(base: Gguf, stats: LayerStats, settings: Settings) -> _Fitted:
    shape = stats.shape
    if settings.basis_v == "output-aware":
        metrics = output_metrics(base, shape)
    else:
        metrics = np.broadcast_to(np.eye(shape.d_v), (shape.n_head_kv, shape.d_v, shape.d_v))
    fit_k = fit_metric if settings.basis_k == "query-aware" else fit_pca
    fit_v = fit_metric if settings.basis_v == "output-aware" else fit_pca
    k = [fit_k(stats.k2[h], stats.q2[h]) for h in range(shape.n_head_kv)]
    v = [fit_v(stats.v2[h], metrics[h]) for h in range(shape.n_head_kv)]
    centred = stats.v2 - stats.v1[:, :, None] * stats.v1[:, None, :]
    energy = np.maximum(np.einsum("hde,hde->h", metrics, centred), 0.0)
    total = float(energy.sum())
    if total <= 0.0:
        return _Fitted(k, v, [0.0] * shape.n_head_kv, [0.0] * shape.n_head_kv)
    k_weight = [KEY_WEIGHT * shape.scale**2 * float(e) / total for e in energy]
    return _Fitted(k, v, k_weight, [1.0 / total] * shape.n_head_kv)


def default_context(base: Gguf) -> int:
    """Context at which bits per element are stated unless --bpe-context says otherwise."""
    trained = base.get(f"{base.get('general.architecture')}.context_length")
    return min(int(trained), CALIBRATED_CONTEXT) if trained else CALIBRATED_CONTEXT


def convert(base: Gguf, calibration: Calibration, options: Options, progress: Progress = lambda _: None) -> Result:
    """Fit, plan, round and calibrate all layers. Raises ConverterError for anything in the input that does not fit."""
    settings = options.settings
    check_model(base, calibration)
    check_window(settings, calibration)
    overhead = Overhead(options.bpe_context or default_context(base), settings.n_sink, settings.n_recent)
    ranks = [
        (
            layout.check_rank("--rank-k", options.rank_k, layer.shape.d_k, layer.shape.il),
            layout.check_rank("--rank-v", options.rank_v, layer.shape.d_v, layer.shape.il),
        )
        for layer in calibration.layers
    ]
    fitted = []
    for stats in calibration.layers:
        progress(f"basis of layer {stats.shape.il}")
        fitted.append(_fit_layer(base, stats, settings))

    heads: list[Head] = []
    for stats, fit, (rank_k, rank_v) in zip(calibration.layers, fitted, ranks, strict=True):
        for h in range(stats.shape.n_head_kv):
            heads.append(Head(stats.shape.d_k, fit.k_weight[h] * fit.k[h].importance[:rank_k]))
            heads.append(Head(stats.shape.d_v, fit.v_weight[h] * fit.v[h].importance[:rank_v]))
    if settings.codec == "int8":
        plan = layout.plan_int8(heads)
    else:
        kv_bits = layout.DEFAULT_KV_BITS if options.kv_bits is None else options.kv_bits
        plan = layout.plan_banded(heads, kv_bits, overhead)

    sources: Counter[str] = Counter()
    bands = iter(plan)
    layers = []
    for stats, fit in zip(calibration.layers, fitted, strict=True):
        progress(f"coding of layer {stats.shape.il}")
        coded = []
        for h in range(stats.shape.n_head_kv):
            head, source = _code_head(stats, fit, h, next(bands), next(bands), settings.gamma)
            sources[source] += 1
            coded.append(head)
        layers.append(CodedLayer(stats.shape, tuple(coded)))
    return Result(tuple(layers), layout.account(heads, plan, overhead), dict(sources))


def _code_head(
    stats: LayerStats, fit: _Fitted, h: int, bands_k: Bands, bands_v: Bands, method: str
) -> tuple[CodedHead, str]:
    try:
        k = store(fit.k[h], stats.k2[h], bands_k)
        v = store(fit.v[h], stats.v2[h], bands_v)
    except ConverterError as error:
        raise ConverterError(f"layer {stats.shape.il} head {h}: {error}") from error
    except np.linalg.LinAlgError as error:
        raise ConverterError(f"layer {stats.shape.il} head {h}: statistics give no usable basis ({error})") from error
    gamma, source = gamma_of(method, stats, h, k)
    return CodedHead(k, v, gamma), source


def check_window(settings: Settings, calibration: Calibration) -> None:
    """The exact window must fit its limits and cover the positions that calibration left out."""
    if not 0 <= settings.n_recent <= layout.MAX_RECENT:
        raise ConverterError(f"--n-recent: expected 0 to {layout.MAX_RECENT}, found {settings.n_recent}")
    if not 0 <= settings.n_sink <= layout.MAX_SINK:
        raise ConverterError(f"--n-sink: expected 0 to {layout.MAX_SINK}, found {settings.n_sink}")
    if settings.n_sink < calibration.n_skip:
        raise ConverterError(
            f"--n-sink: expected at least {calibration.n_skip}, found {settings.n_sink}: "
            f"the calibration left out the first {calibration.n_skip} positions, so the bases do not describe them"
        )
