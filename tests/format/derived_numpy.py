"""The definition of bases from the weights, in numpy, for tests. libsubkv computes the same bytes (derive.cpp).

Coordinates of keys are sorted by the estimated cost of their errors (weights_numpy.py) and mixed inside bands; a mean
known from biases is subtracted. Values are mixed evenly, because no estimate from weights was reliable. All layers and
heads have equal budgets, and every coefficient at least LEAST bits. All bases are invertible, so an unusual model only
loses quality. The entries of a row of E or D have equal magnitude or are 0, so both matrices are stored and counted as
bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from weights_numpy import WHY, Energies, Weights

from subkv.base.errors import CacheError, SubkvError, concerning
from subkv.base.threads import default_threads, one_blas_thread
from subkv.format import metadata
from subkv.format.arrays import F16, F64
from subkv.format.bases import Bands, CodedHead, CodedLayer, SharedHead, SharedMatrix, StoredBasis, first_values
from subkv.format.calibration import MAX_HEAD_SIZE, Calibration, LayerShape, TextSource
from subkv.format.window import RECENT_BITS
from subkv.native.gguf import SHA256_KEY, Base, Gguf, write_sidecar
from subkv.plan import budget, latent, mla
from subkv.plan.basis import N_HALVES, gains, half, in_bytes, slices
from subkv.plan.derived import mixed_ratios, shared_matrix
from subkv.plan.hadamard import spreading
from subkv.plan.pipeline import (
    CALIBRATED_CONTEXT,
    Options,
    Result,
    check_latent,
    check_plans,
    default_context,
    largest_context,
    recent_bits,
)
from subkv.plan.shared import owner

PLANS = (3.5, 4.25, 5.2)  # budgets of further plans
# Default budgets (derive.h has the same), at which the divergence is at most q8_0's: 6.5 on the demo model
# (research/notes/quality.md), 7.25 beside sliding layers on Gemma 3 270M (research/notes/sliding.md). The few layers
# that do not slide see all distant cells alone, and their bits are a small part of the whole cache, which stays below
# q8_0's.
KV_BITS, KV_BITS_BESIDE_SLIDING = 6.5, 7.25
LEAST = 3  # bits of any coefficient
WIDEST = 16  # a bias can be a thousand times the variation around it
# weight of a value's coefficient relative to the geometric mean of a head's keys
VALUE_WEIGHT = 0.7
SLOPE = 1e-3  # decrease of equal importance per group
FROM_WEIGHTS = "weights"  # subkv.calibration.text of bases derived from the weights
UNCALIBRATED = ("window", "kv_bits", "bpe_context", "center_k", "plans")  # options that apply without a calibration
NOT_READ = "0" * 64  # placeholder for hashes of a missing calibration, and of weights that were not read completely


def equal_importance(n: int) -> F64:
    """[n] importance of equal coefficients. It decreases slightly: a budget ends at the same group in all heads."""
    return np.asarray(1.0 - SLOPE * (np.arange(n) // budget.GROUP), dtype=np.float64)


def shapes(base: Base) -> tuple[LayerShape, ...]:
    """Shapes of the layers whose K/V heads can be coded. Raises CacheError if there is none."""
    arch = base.get("general.architecture")

    def of_layer(key: str, il: int) -> int:
        value = base.get(f"{arch}.attention.{key}")
        value = value[il] if isinstance(value, list) and il < len(value) else value
        return value if isinstance(value, int) else 0

    def rows(name: str) -> int:
        return base.matrix(name, "its shape is a head's").shape[0] if base.has_tensor(name) else 0

    layers, is_latent = [], mla.is_latent(base)
    pattern = base.get(f"{arch}.attention.sliding_window_pattern")
    slides = pattern if isinstance(pattern, list) else []
    n_draft = int(base.get(f"{arch}.nextn_predict_layers") or 0) if is_latent else 0  # layers that are not used
    for il in range(int(base.get(f"{arch}.block_count") or 0) - n_draft):
        n_head = of_layer("head_count", il)
        n_head_kv = of_layer("head_count_kv", il) if base.get(f"{arch}.attention.head_count_kv") else n_head
        if not n_head or not n_head_kv or n_head % n_head_kv or owner(base, il) != il:
            continue
        if base.has_tensor(f"blk.{il}.ssm_out.weight") and not base.has_tensor(f"blk.{il}.attn_k.weight"):
            continue  # linear attention, with a state instead of K/V
        if is_latent and il < len(slides) and slides[il]:
            continue  # an ordinary cache has its rows, which have other sizes
        width = int(base.get(f"{arch}.embedding_length") or 0) // n_head
        # sliding-window layers may have other sizes, which are those of their matrices
        d_k, d_v = (
            rows(f"blk.{il}.attn_{side}.weight") // n_head_kv or of_layer(f"{name}_length", il) or width
            for side, name in (("k", "key"), ("v", "value"))
        )
        d_k, d_v = mla.sizes(base) if is_latent else (d_k, d_v)
        if all(8 <= d <= MAX_HEAD_SIZE and d % 8 == 0 for d in (d_k, d_v)):
            layers.append(LayerShape(il, n_head, n_head_kv, d_k, d_v, d_k**-0.5, 0))
    other_latent = base.get(f"{arch}.attention.key_length_mla") is not None and not is_latent
    if other_latent or not layers:
        reason = f"no layer of it has K/V heads of 8 to {MAX_HEAD_SIZE} elements in multiples of 8"
        if other_latent:
            reason = f"its attention is multi-head latent (MLA) of another form than that of {', '.join(mla.SUPPORTED)}"
        raise CacheError(
            "kv_cache",
            f"model {arch}: subkv cannot hold its K/V cache because {reason}",
            "use an ordinary cache type (-ctk f16)",
        )
    return tuple(layers)


@one_blas_thread()  # the pool's threads compute, each with small matrices
def plan(base: Base, options: Options, sliding: Collection[int] = ()) -> Result:
    """Layout and bases from the weights. options: those of UNCALIBRATED; default kv_bits: at largest_context().

    sliding: layers that need none, unless all are. Raises SubkvError for an option that needs a calibration, an
    impossible budget, or an unsupported model.
    """
    for field in fields(Options):
        if field.name not in UNCALIBRATED and getattr(options, field.name) != field.default:
            raise SubkvError(field.name, "expected none with bases from the weights, found one; calibrate first")
    options.window.with_defaults().check()
    check_plans(base, options)
    every = shapes(base)
    layers = tuple(shape for shape in every if shape.il not in sliding) or every
    default = KV_BITS if layers == every else KV_BITS_BESIDE_SLIDING
    kv_bits = default if options.kv_bits is None else options.kv_bits
    is_latent = mla.is_latent(base)
    halves = is_latent or options.window.adapts or kv_bits > KV_BITS  # recent rows
    window = options.window.with_defaults(recent_bits=16 if halves else RECENT_BITS)
    context = largest_context(base) if options.kv_bits is None else default_context(base)
    overhead = budget.Overhead(options.bpe_context or context, window)
    if is_latent:
        check_latent(options)
        coded, account = _latent(base, layers, kv_bits, overhead)
        settings = options.settings("pca", "pca", "one", window)
        plans = None if options.plans == () else metadata.Plans(kv_bits, (), {})
        return Result(coded, settings, account, {"formula": len(coded)}, plans=plans)
    with ThreadPoolExecutor(default_threads()) as pool:
        weights = Weights(base, every, CALIBRATED_CONTEXT, pool.map)
        estimates = list(pool.map(weights.energies, layers))
    centred = options.center_k and window.n_sink > 0
    keys = [_keys(shape, energies, centred) for shape, energies in zip(layers, estimates, strict=True)]
    heads = []
    for shape, of_layer in zip(layers, keys, strict=True):
        bits_k, bits_v = (budget.coefficient_bits(d, decode_in_bytes=True) for d in (shape.d_k, shape.d_v))
        of_v = budget.Head(shape.d_v, VALUE_WEIGHT * equal_importance(shape.d_v), basis_bits=bits_v)
        for key in of_layer:
            heads += [budget.Head(shape.d_k, key.importance, bool(key.mean.any()), bits_k), of_v]
    planned = budget.plan_banded(heads, kv_bits, overhead, LEAST, WIDEST)
    coded = _coded(layers, keys, planned)
    plans = _plans(options, kv_bits, overhead, layers, keys, heads)
    known = all(energies is not None for energies in estimates)
    settings = options.settings("query-aware" if known else "pca", "pca", "one", window)
    sources = {"formula": len(heads) // 2}
    counted = budget.account(heads, planned, overhead)
    return Result(coded, settings, counted, sources, notes=_notes(layers, estimates), plans=plans)


def _plans(
    options: Options,
    kv_bits: float,
    overhead: budget.Overhead,
    layers: Sequence[LayerShape],
    keys: Sequence[list[_Keys]],
    heads: Sequence[budget.Head],
) -> metadata.Plans | None:
    """Plans for the other budgets that are possible. kv_bits: the file's own. heads: K and V of all heads."""
    if options.plans == ():
        return None
    narrow = 8 * N_HALVES
    plans: list[metadata.Plan] = []
    heads = [replace(head, more_bits=narrow * head.d - 16 * N_HALVES) for head in heads]  # first rows of D in halves
    for budget_ in PLANS if options.plans is None else options.plans:
        if any(budget.same(budget_, other) for other in (kv_bits, *(plan.budget for plan in plans))):
            continue
        window = replace(overhead.window, recent_bits=recent_bits(replace(options, kv_bits=budget_), is_latent=False))
        own = replace(overhead, window=window)
        try:
            with concerning(kv_bits="plans"):
                planned = budget.plan_banded(heads, budget_, own, LEAST, WIDEST)
        except SubkvError:
            if options.plans is not None:
                raise
            continue  # every coefficient has LEAST bits
        counted, bands = budget.account(heads, planned, own), iter(planned)
        coded = [
            CodedLayer(shape, tuple(CodedHead(*_factors(key, next(bands), next(bands)), 1.0) for key in of_layer))
            for shape, of_layer in zip(layers, keys, strict=True)
        ]
        plans.append(metadata.Plan(budget_, tuple(coded), counted, window.recent_bits, narrow=True, predicted=None))
    shared_heads = {
        shape.il: [SharedHead(key.mean, _shared_keys(key), _shared_evenly(shape.d_v)) for key in of_layer]
        for shape, of_layer in zip(layers, keys, strict=True)
    }
    return metadata.Plans(kv_bits, tuple(plans), shared_heads if plans else {})


def _factors(key: _Keys, of_k: Bands, of_v: Bands) -> tuple[StoredBasis, StoredBasis]:
    """Bands and ratios of a head's keys and values, without matrices, which libsubkv derives."""
    none, d_v = np.zeros((0, 0), dtype=np.float16), sum(n for n, _ in of_v)
    variances = ((of_k, key.variance), (of_v, np.ones(d_v)))
    k, v = (StoredBasis(bands, none, none, mixed_ratios(bands, of), none) for bands, of in variances)
    return k, v


def _shared_keys(key: _Keys) -> SharedMatrix:
    """Coordinates in the order of their importance, or evenly mixed ones."""
    d = len(key.variance)
    return _shared_evenly(d) if key.order is None else shared_matrix(np.eye(d)[key.order])


@functools.cache
def _shared_evenly(d: int) -> SharedMatrix:
    """Evenly mixed coordinates."""
    return replace(shared_matrix(spreading(d)), mixed=True)


def sidecar(model: Path, output: Path, options: Options | None = None, sliding: Collection[int] = ()) -> Result:
    """Write a sidecar with bases from the weights, atomically. sliding: as in plan(). Raises SubkvError as plan()."""
    with Gguf(model) as base:
        result = plan(base, options or Options(plans=None), sliding)
        write_sidecar(base, output, keys(base, result))
    return result


def weights_generator() -> str:
    """The same of bases from the weights; increase the number when they change.

    derive.cpp, which derives them in memory, has it, too.
    """
    return f"{metadata.generator()}, weights 3"


def keys(base: Base, result: Result) -> dict[str, Any]:
    """The metadata of a result, which state that no text was used (FORMAT.md §1)."""
    arch = str(base.get("general.architecture"))
    no_calibration = Calibration(
        arch=arch,
        name="",
        block_count=int(base.get(f"{arch}.block_count")),
        n_ctx=0,
        n_skip=0,
        tokens=0,
        texts=(TextSource(FROM_WEIGHTS, NOT_READ, 0),),
        model_sha256=NOT_READ,
        generator=metadata.generator(),
        layers=(),
        sha256=NOT_READ,
    )
    values = metadata.keys(result.layers, no_calibration, result.settings, result.counted, plans=result.plans)
    return {**values, "subkv.generator": ("str", weights_generator()), SHA256_KEY: ("str", NOT_READ)}


def _notes(layers: Sequence[LayerShape], estimates: Sequence[Energies | None]) -> tuple[SubkvError, ...]:
    unknown = [shape.il for shape, energies in zip(layers, estimates, strict=True) if energies is None]
    if not unknown:
        return ()
    reason = f"no estimate of keys from the weights in {len(unknown)} of {len(layers)} layers, which are coded evenly"
    return (SubkvError("model", reason),)


def _normalized(cost: F64, without_bias: F64) -> F64:
    """A head's costs, divided by the geometric mean of its costs without biases."""
    floor = max(float(without_bias.max()), 1e-300) * 1e-12
    mean = float(np.exp(np.mean(np.log(np.maximum(without_bias, floor)))))
    return cost / mean * equal_importance(len(cost))


@dataclass(frozen=True)
class _Keys:
    """A head's keys. order: [d] coordinates by importance, None: evenly mixed; variance, importance: [d] in this order.

    mean: [d] as stored, subtracted before encoding.
    """

    order: NDArray[np.int64] | None
    variance: F64
    importance: F64
    mean: F16


def _keys(shape: LayerShape, energies: Energies | None, centred: bool) -> list[_Keys]:
    """The keys of a layer's heads, evenly mixed without an estimate."""
    d = shape.d_k
    if energies is None:
        keys = _Keys(None, np.ones(d), equal_importance(d), np.zeros(d, dtype=np.float16))
        return [keys] * shape.n_head_kv
    heads = []
    for k, q, mean, rest in zip(energies.k, energies.q, energies.mean, energies.rest, strict=True):
        variance = k + rest if centred else k + rest + mean**2
        cost = variance * q
        order = np.argsort(-cost, kind="stable")
        heads.append(_Keys(order, variance[order], _normalized(cost[order], k * q), half(mean * centred + 0.0, "mean")))
    return heads


def _stored(order: NDArray[np.int64], variance: F64, bands: Bands, mean: F16) -> StoredBasis:
    """Sorted coordinates, mixed in every band with integers."""
    encode, decode = np.zeros((2, len(order), len(order)))
    for part, (n, bits) in zip(slices(bands), bands, strict=True):
        encode[part, order[part]], decode[part, order[part]] = (
            (np.eye(n), np.eye(n)) if bits == 16 else spread_in_bytes(n)
        )
    ratios = mixed_ratios(bands, variance)
    return StoredBasis(bands, half(encode, "E"), half(decode / gains(bands)[:, None], "D"), ratios, mean)


def _latent(
    base: Base, layers: Sequence[LayerShape], kv_bits: float, overhead: budget.Overhead
) -> tuple[tuple[CodedLayer, ...], metadata.Account]:
    """Bands and bases of all layers within a budget, from the weights; the same for all layers.

    Raises SubkvError as plan_banded().
    """
    parts_of_rows = []
    for shape in layers:
        of_latent, rotated = (equal_importance(d) for d in (shape.d_v, shape.d_k - shape.d_v))
        parts_of_rows += latent.heads(shape, of_latent, rotated, narrow=True)
    planned = latent.joined(parts_of_rows, budget.plan_banded(parts_of_rows, kv_bits, overhead, LEAST))
    out, bands = [], iter(planned)
    for shape in layers:
        parts = [
            (d, variance)
            for d, variance in zip((shape.d_v, shape.d_k - shape.d_v), latent_variances(base, shape), strict=True)
            if d
        ]
        of_parts = [next(bands) for _ in parts]
        blocks = [even(d, of_part) for (d, _), of_part in zip(parts, of_parts, strict=True)]
        keys = latent._joined(blocks, of_parts, np.concatenate([np.full(*part) for part in parts]))
        out.append(CodedLayer(shape, (CodedHead(keys, first_values(keys, shape.d_v), 1.0),), latent=True))
    return tuple(out), budget.account(parts_of_rows, planned, overhead)


def latent_variances(base: Base, shape: LayerShape) -> tuple[float, float]:
    """Mean squares of the latent's and of the rotary part's elements, estimated from weights; 1 if unknown.

    Those of the latent are the squares of its norm's weights. The residual stream is assumed to be white.
    """
    names = [f"blk.{shape.il}.{name}.weight" for name in ("attn_kv_a_norm", "attn_norm", "attn_kv_a_mqa")]
    if not all(base.has_tensor(name) for name in names):
        return 1.0, 1.0
    of_latent, norm = (base.tensor(name, WHY).ravel().astype(np.float64) for name in names[:2])
    matrix = base.matrix(names[2], WHY)
    if len(of_latent) != shape.d_v or matrix.shape != (shape.d_k, len(norm)):
        return 1.0, 1.0
    rotated = matrix.rows(slice(shape.d_v, shape.d_k)).astype(np.float64) * norm
    estimates = float(np.mean(of_latent**2)), float(np.mean(np.sum(rotated**2, axis=1))) if len(rotated) else 1.0
    return estimates if all(0.0 < x < np.inf for x in estimates) else (1.0, 1.0)


@functools.cache
def spread_in_bytes(n: int) -> tuple[F64, F64]:
    """E of n evenly mixed coordinates, rounded to bytes, and D, the transpose of its inverse: rows are orthogonal."""
    encode = in_bytes(spreading(n))
    return encode, encode / np.sum(encode**2, axis=1)[:, None]


@functools.cache
def even(d: int, bands: Bands, variance: float = 1.0) -> StoredBasis:
    """A basis with equal coefficients."""
    encode, decode = spread_in_bytes(d)
    ratios = mixed_ratios(bands, np.full(d, variance))
    mean = np.zeros(d, dtype=np.float16)
    return StoredBasis(bands, half(encode, "E"), half(decode / gains(bands)[:, None], "D"), ratios, mean)


def _coded(
    layers: Sequence[LayerShape], keys: Sequence[list[_Keys]], planned: Iterable[Bands]
) -> tuple[CodedLayer, ...]:
    """Rounded bases. planned: bands of K and V of all heads, alternating."""
    bands = iter(planned)
    coded = []
    for shape, of_layer in zip(layers, keys, strict=True):
        heads = []
        for key in of_layer:
            of_k, of_v = next(bands), next(bands)
            if key.order is None:
                k = even(shape.d_k, of_k)
            else:
                k = _stored(key.order, key.variance, of_k, key.mean)
            heads.append(CodedHead(k, even(shape.d_v, of_v), 1.0))
        coded.append(CodedLayer(shape, tuple(heads)))
    return tuple(coded)
