"""Computes coded layers from a calibration and a base model: costs, bases, plan, rounding, gamma, predicted KLD."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from subkv.base.errors import SubkvError, concerning
from subkv.base.progress import progress_bar, tracked
from subkv.base.threads import one_blas_thread
from subkv.format.arrays import F16, F64
from subkv.format.bases import Bands, CodedHead, CodedLayer, SharedHead
from subkv.format.calibration import PREFIX, Calibration, LayerShape, LayerStats
from subkv.format.metadata import Account, Plan, Plans, Settings
from subkv.format.window import DEFAULT, RECENT_BITS, Window
from subkv.native.gguf import Base
from subkv.plan import budget, latent, mla, predict, stock
from subkv.plan.basis import N_HALVES, FullBasis, centred_moment, half, store
from subkv.plan.budget import Head, Overhead
from subkv.plan.costs import LayerCost, fit_heads, layer_cost, near_cost, near_share, resolve_bases, value_metrics
from subkv.plan.derived import derived, shared
from subkv.plan.gamma import gamma_of
from subkv.plan.positions import average_over_positions

CALIBRATED_CONTEXT = 8192  # largest default for --bpe-context
LATENT_CONTEXT = 32768  # the same for latent attention, whose rows are small compared with its bases
TARGET = "q8_0"  # the stock type whose quality the default budget matches
# Nats per token, the largest predicted cost of a default budget. Keys of some models have a few large elements, where
# q8_0 itself changes tokens (0.005 on Qwen2.5-Coder-0.5B). Rounding alone, flash attention or not, costs 0.001 there.
MOST_COST = 0.002
FALLBACK_KV_BITS = 4.5  # default budget if that quality cannot be predicted
MOST_ESTIMATED = 6.5  # largest default budget without sensitivities: even bases from the weights equal q8_0 there
TOKENS_PER_RANK = 16  # tokens per coefficient below which small eigenvalues of the moments are unreliable
BUDGET_STEP = 0.05  # default budgets are multiples of it
PLANS = (2.5, 3.0, 3.5, 4.25, 6.5)  # budgets of further plans, besides the one of TARGET's quality

# D is stored in bytes if that saves at least NARROW_FROM bits per element at NARROW_AT bits in rows, and 4 times as
# many for every further bit, because all cells share D's error. SmolLM2-135M, KLD at 8192 tokens before the 0.05 saved
# bits are spent: +2% at 3.0 bits, +6% at 4.25. Spent on rows, they reduce it by 8%.
NARROW_FROM, NARROW_AT = 0.05, 4.0

# Budget from which recent rows are halves. SmolLM2-135M: recent rows as integers of 10 bits cause a KLD of 0.00002, the
# rest of the cache 0.00013 at a budget of 5.25 and 0.00004 at 6.5.
HALVES_FROM = 6.5

# The error of a stock type does not measure quality if it exceeds this share of the cost of replacing all keys and
# values by their means: a constant part (random weights, large biases) then determines its steps. q8_0: 2e-5 on
# SmolLM2, with and without sensitivities; 0.016 on random Q4_0 weights, whose rows are nearly constant.
MEANINGLESS = 1e-3


@dataclass(frozen=True)
class Options:
    """Options of `convert`.

    kv_bits None: the default budget, or codec int8. Ranks None: the head size. Basis kinds None: the best for the
    calibration. bpe_context None: the trained context, at most CALIBRATED_CONTEXT. center_k: subtract the mean from
    keys, if there are sinks. window: its recent_bits is by default recent_bits(). plans: budgets of further plans in
    the same file; None: PLANS and TARGET's.
    """

    codec: str = "banded"
    basis_k: str | None = None
    basis_v: str | None = None
    gamma: str = "calibrated"
    window: Window = DEFAULT
    kv_bits: float | None = None
    rank_k: int | None = None
    rank_v: int | None = None
    bpe_context: int | None = None
    center_k: bool = True
    plans: tuple[float, ...] | None = ()

    def settings(self, basis_k: str, basis_v: str, gamma: str, window: Window) -> Settings:
        """The settings that the file records: these choices, and the options that apply to them."""
        return Settings(self.codec, basis_k, basis_v, gamma, window)


@dataclass(frozen=True)
class Result:
    """A layout with its bases. predicted: nats of KLD per token, None if unknown.

    stock: predicted nats for llama.cpp's cache types, without a recent window. notes: remarks for the user.
    """

    layers: tuple[CodedLayer, ...]
    settings: Settings
    counted: Account
    gamma_sources: dict[str, int]  # heads per source of gamma
    predicted: float | None = None
    stock: dict[str, float] | None = None
    notes: tuple[SubkvError, ...] = ()
    plans: Plans | None = None

    @property
    def compared(self) -> dict[str, float] | None:
        """Predicted nats of this layout ("subkv") and of llama.cpp's cache types; None if unknown."""
        return None if self.predicted is None else {"subkv": self.predicted, **(self.stock or {})}


@dataclass(frozen=True)
class _Fitted:
    """A layer's full bases, with importance in the planner's units, and its costs. Lists are per KV head.

    mean: [n_head_kv, d_k] float16, subtracted from keys; k2: [n_head_kv, d_k, d_k] second moments of the difference.
    """

    k: list[FullBasis]
    v: list[FullBasis]
    cost: LayerCost
    mean: F16
    k2: F64

    @property
    def bases(self) -> list[FullBasis]:
        """All bases in the order of the planner's heads."""
        return [basis for pair in zip(self.k, self.v, strict=True) for basis in pair]

    def code(
        self, stats: LayerStats, h: int, bands_k: Bands, bands_v: Bands, method: str, narrow: bool, derive: bool
    ) -> tuple[CodedHead, str]:
        """Head h with rounded bases, and the source of gamma. narrow: D in bytes, if E is.

        derive: from shared bases.
        """
        if derive:
            k = derived(self.k[h], bands_k, self.mean[h], narrow)
            v = derived(self.v[h], bands_v, np.zeros(stats.shape.d_v, dtype=np.float16), narrow)
        else:
            k = store(self.k[h], self.k2[h], bands_k, self.mean[h], narrow=narrow)
            v = store(self.v[h], stats.v2[h], bands_v, narrow=narrow)
        gamma, source = gamma_of(method, stats, h, k, self.k2[h])
        return CodedHead(k, v, gamma), source


def recent_bits(options: Options, is_latent: bool) -> int:
    """Default bits of recent rows: halves for large budgets, for latent attention (where integers are not measured),
    and for bases that are computed from halves.
    """
    rich = options.kv_bits is not None and options.kv_bits >= HALVES_FROM
    return 16 if is_latent or rich or options.window.adapts else RECENT_BITS


def check_plain(base: Base) -> None:
    """Reject a model that is already converted."""
    if any(key.startswith("subkv.") for key in base.keys()):  # noqa: SIM118 (not a dict)
        raise SubkvError("subkv.version", f"expected a base model without subkv keys, found them in {base.path}")


def check_model(base: Base, calibration: Calibration) -> None:
    """Reject a calibration of another model, or a converted model."""
    check_plain(base)
    arch = base.get("general.architecture")
    if arch != calibration.arch:
        raise SubkvError(f"{PREFIX}arch", f"expected {arch!r} as in the model, found {calibration.arch!r}")
    blocks = base.get(f"{arch}.block_count")
    if blocks != calibration.block_count:
        raise SubkvError(
            f"{PREFIX}block_count", f"expected {blocks} layers as in the model, found {calibration.block_count}"
        )
    for layer in calibration.layers:
        _check_shape(base, str(arch), layer.shape)


def _check_shape(base: Base, arch: str, shape: LayerShape) -> None:
    def per_layer(key: str) -> Any:
        value = base.get(f"{arch}.{key}")
        return value[shape.il] if isinstance(value, list) and shape.il < len(value) else value

    n_head = per_layer("attention.head_count")
    embedding = base.get(f"{arch}.embedding_length")
    default_size = embedding // n_head if embedding and n_head else None
    # sliding-window layers may have other sizes, and not every architecture has *_swa keys
    sizes_vary = base.get(f"{arch}.attention.key_length_swa") is not None
    latent_k, latent_v = mla.sizes(base) if mla.is_latent(base) else (None, None)
    expected = {
        "n_head": n_head,
        "n_head_kv": per_layer("attention.head_count_kv") or n_head,
        "d_k": None if sizes_vary else latent_k or base.get(f"{arch}.attention.key_length") or default_size,
        "d_v": None if sizes_vary else latent_v or base.get(f"{arch}.attention.value_length") or default_size,
    }
    for key, value in expected.items():
        if value is not None and value != getattr(shape, key):
            raise SubkvError(
                f"{PREFIX}layers",
                f"expected {key} {value} in layer {shape.il} as in the model, found {getattr(shape, key)}",
            )


def largest_context(base: Base) -> int:
    """The upper limit of default_context()."""
    return LATENT_CONTEXT if mla.is_latent(base) else CALIBRATED_CONTEXT


def check_latent(options: Options) -> None:
    """Reject options that latent attention does not support."""
    given = {"rank_k": options.rank_k, "rank_v": options.rank_v, "adapt": options.window.adapt}
    for key, value in given.items():
        if value is not None:
            raise SubkvError(key, "expected none with latent attention (MLA), found one")
    if options.basis_k != options.basis_v and "pca" in (options.basis_k, options.basis_v):
        raise SubkvError(
            "basis_v",
            f"expected one kind for both with latent attention (MLA), whose keys and values share a row, found "
            f"{options.basis_k or 'the best'} for keys and {options.basis_v or 'the best'} for values",
        )


def check_plans(base: Base, options: Options) -> None:
    """Reject further budgets for a file that has one."""
    reason = "latent attention (MLA)" if mla.is_latent(base) else "codec int8" if options.codec == "int8" else None
    if options.plans and reason is not None:
        found = ", ".join(f"{value:g}" for value in options.plans)
        raise SubkvError("plans", f"expected none with {reason}, whose files have one budget, found {found}")


def default_context(base: Base) -> int:
    """Default of --bpe-context: the context for which bits per element are computed."""
    trained = base.get(f"{base.get('general.architecture')}.context_length")
    return min(int(trained), largest_context(base)) if trained else largest_context(base)


class Fit:
    """Bases and costs of all layers, for planning and coding at any budget. progress: show bars.

    Raises SubkvError for invalid or inconsistent input.
    """

    def __init__(self, base: Base, calibration: Calibration, options: Options, progress: bool = False) -> None:
        check_model(base, calibration)
        check_plans(base, options)
        self.progress, self.latent = progress, mla.is_latent(base)
        if self.latent:
            check_latent(options)
        basis_k, basis_v = resolve_bases(options.basis_k, options.basis_v, calibration)
        check_window(options.window, calibration)
        window = options.window.with_defaults(recent_bits=recent_bits(options, self.latent))
        self.settings = options.settings(basis_k, basis_v, options.gamma, window)
        self.notes: list[SubkvError] = []
        # sinks attract much attention, and their keys are far from the mean of the others, so they need exact rows
        center_k = options.center_k and window.n_sink > 0 and not self.latent  # values are not centred
        if options.center_k and not self.latent and not center_k:
            reason = "off, because centring needs exact sinks, found --n-sink 0; --no-center-k omits this note"
            self.notes.append(SubkvError("center_k", reason))
        self.calibration, note = average_over_positions(base, calibration)
        self.notes += [note] if note else []
        context = default_context(base) if options.bpe_context is None else options.bpe_context
        self.overhead = Overhead(context, window)
        measured = calibration.sensitivity
        self.near = near_share(window.n_recent, measured.n_recent) if measured else 1.0
        if measured is not None and self.near > 0.0:
            reason = (
                f"expected at least {measured.n_recent}, for which sensitivities were measured, found "
                f"{window.n_recent}: the effect of the smaller window is estimated"
            )
            self.notes.append(SubkvError("n_recent", reason))
        self.layers: list[_Fitted | latent.Fitted] = []
        self._stock_costs: list[LayerCost] = []  # over all cells, because llama.cpp's caches have no window
        self._stock_errors: dict[str, float | None] = {}
        self._lost = 0.0  # cost of replacing all keys and values by their means, without a window
        self.heads: list[Head] = []  # K, V of every head of every layer
        for stats in tracked("bases", self.calibration.layers, "layer", progress):
            with concerning(rank="rank_k"):
                rank_k = budget.check_rank(options.rank_k, stats.shape.d_k, stats.shape.il)
            with concerning(rank="rank_v"):
                rank_v = budget.check_rank(options.rank_v, stats.shape.d_v, stats.shape.il)
            output = value_metrics(base, stats.shape, basis_v)
            cost = layer_cost(stats, output, self.near)
            self._stock_costs.append(layer_cost(stats, output, 1.0))
            self._lost += _cost_of_means(stats, self._stock_costs[-1])
            if self.latent:
                with _of_head(stats.shape.il, 0):
                    joint = latent.Fitted.of(stats, cost, basis_k)
                self.layers.append(joint)
                self.heads += joint.heads(stats.shape)
                continue
            mean, k2 = _centre(stats, center_k)
            k = fit_heads(basis_k, k2, cost.k, cost.query)
            v = fit_heads(basis_v, stats.v2, cost.v, cost.output)
            self.layers.append(_Fitted(k, v, cost, mean, k2))
            for h in range(stats.shape.n_head_kv):
                self.heads.append(_head(k[h], rank_k, centred=bool(mean[h].any())))
                self.heads.append(_head(v[h], rank_v))
        self._narrow = self.heads if self.latent else [_narrowed(head) for head in self.heads]

    def plan(self, kv_bits: float) -> list[Bands]:
        """Bands of all heads within kv_bits bits per element; codec int8 ignores the budget."""
        if self.settings.codec == "int8":
            return budget.plan_int8(self.heads)
        widest = latent.WIDEST if self.latent else None
        planned = budget.plan_banded(self.heads_in_memory(self.narrow(kv_bits)), kv_bits, self.overhead, widest=widest)
        return latent.joined(self.heads, planned) if self.latent else planned

    def narrow(self, kv_bits: float) -> bool:
        """Whether D is also in bytes at this budget: if that saves enough (NARROW_FROM) and rows can use it."""
        if self.settings.codec == "int8":
            return False
        (_, wide), (_, narrow) = (budget.budget_range(heads, self.overhead) for heads in (self.heads, self._narrow))
        if kv_bits > narrow.total:
            return False
        rows = kv_bits - wide.window - wide.bases
        return wide.bases - narrow.bases >= NARROW_FROM * 4.0 ** (rows - NARROW_AT)

    def account(self, plan: Sequence[Bands], narrow: bool = False) -> Account:
        return budget.account(self.heads_in_memory(narrow), plan, self.overhead)

    def heads_in_memory(self, narrow: bool) -> list[Head]:
        """The heads, with the memory of their bases."""
        return self._narrow if narrow else self.heads

    def code(
        self, plan: Sequence[Bands], narrow: bool = False, derive: bool = False
    ) -> tuple[tuple[CodedLayer, ...], dict[str, int]]:
        """Rounded bases and gammas for a plan, and the number of heads per source of gamma. narrow: D in bytes.

        derive: as libsubkv derives them from shared bases, not for latent attention.
        """
        sources: Counter[str] = Counter()
        bands, method = iter(plan), self.settings.gamma
        layers = []
        for stats, fit in zip(self.calibration.layers, self.layers, strict=True):
            coded = []
            for h in range(stats.shape.n_head_kv):
                with _of_head(stats.shape.il, h):
                    if isinstance(fit, latent.Fitted):
                        head, source = fit.code(stats, [next(bands) for _ in fit.bases], method)
                    else:
                        head, source = fit.code(stats, h, next(bands), next(bands), method, narrow, derive)
                sources[source] += 1
                coded.append(head)
            layers.append(CodedLayer(stats.shape, tuple(coded), self.latent))
        return tuple(layers), dict(sources)

    def shared(self) -> dict[int, list[SharedHead]]:
        """The bases that plans share, not for latent attention."""
        return {
            stats.shape.il: [
                SharedHead(mean, shared(k), shared(v)) for mean, k, v in zip(fit.mean, fit.k, fit.v, strict=True)
            ]
            for stats, fit in zip(self.calibration.layers, self.layers, strict=True)
            if isinstance(fit, _Fitted)
        }

    def for_budget(self, options: Options, kv_bits: float | None) -> Fit:
        """This fit with the bits of recent rows that are the default of a budget."""
        own = recent_bits(replace(options, kv_bits=kv_bits), self.latent)
        bits = options.window.with_defaults(recent_bits=own).recent_bits
        if bits == self.settings.window.recent_bits:
            return self
        fit = copy.copy(self)
        fit.settings = replace(self.settings, window=replace(self.settings.window, recent_bits=bits))
        fit.overhead = replace(self.overhead, window=fit.settings.window)
        fit.__dict__.pop("_recent_error", None)  # cached
        return fit

    def error(self, layers: Sequence[CodedLayer]) -> float | None:
        """Cost per token of coded layers on the held-out samples, including the rounding of recent rows.

        In nats of KLD with sensitivities; None without samples.
        """
        error = predict.layout_error(self.calibration, [fit.cost for fit in self.layers], layers)
        return None if error is None else error * self.correction(self.near) + self._recent_error

    @functools.cached_property
    def _recent_error(self) -> float:
        """Cost per token of rounding recent rows: 0 for halves, and without sensitivities."""
        if self.settings.window.recent_bits == 16 or self.calibration.sensitivity is None:
            return 0.0
        plain = [fit for fit in self.layers if isinstance(fit, _Fitted)]  # latent attention has halves
        costs = [near_cost(whole, fit.cost) for whole, fit in zip(self._stock_costs, plain, strict=True)]
        error = predict.recent_error(self.calibration, costs, [fit.mean for fit in plain])
        return (error or 0.0) * self.correction(1.0)

    def stock_error(self, kind: str) -> float | None:
        """Cost per token of a cache type of llama.cpp, without a recent window; None if unknown."""
        error = self._uncorrected_stock_error(kind)
        return None if error is None else error * self.correction(1.0)

    def _uncorrected_stock_error(self, kind: str) -> float | None:
        """stock_error() before the correction; cached."""
        if kind not in self._stock_errors:
            self._stock_errors[kind] = predict.stock_error(self.calibration, self._stock_costs, kind, self.latent)
        return self._stock_errors[kind]

    def correction(self, near: float) -> float:
        """Measured over predicted KLD for this near_share(); 1 without sensitivities."""
        measured = self.calibration.sensitivity
        if measured is None:
            return 1.0
        return float(measured.correction ** (1.0 - near) * measured.correction0**near)

    def is_meaningful(self, kind: str) -> bool:
        """Whether a stock type's error is a measure of quality (MEANINGLESS). False if the error is unknown."""
        error = self._uncorrected_stock_error(kind)
        return error is not None and 0.0 < error <= MEANINGLESS * self._lost

    def budget_like(self, kind: str, ceiling: float = math.inf) -> float | None:
        """The smallest budget, in steps of BUDGET_STEP, with at most a stock type's error and at most `ceiling`.

        Infinity if rows would need more bits than the type; None if the type's error is unknown or meaningless.
        """
        target = self.stock_error(kind)
        if target is None or not self.is_meaningful(kind):
            return None
        target = min(target, ceiling)
        least, most = budget.budget_range(self.heads, self.overhead)
        high = most.total - max(most.rows - stock.bits(kind), 0.0)
        first, last = int(np.ceil(least.total / BUDGET_STEP)), int(np.floor(high / BUDGET_STEP))
        with progress_bar(f"budget of {kind}'s quality", (last - first + 1).bit_length(), "step", self.progress) as bar:

            def error(step: int) -> float | None:
                bits = step * BUDGET_STEP
                cost = self.error(self.code(self.plan(bits), self.narrow(bits))[0])
                bar.update()
                return cost

            # one bit more divides errors by four
            step = budget.first_within(target, first, last, 4.0**BUDGET_STEP, error)
        if step is None:
            return None
        return math.inf if step * BUDGET_STEP > high else round(step * BUDGET_STEP, 6)


@one_blas_thread()  # the matrices are small
def convert(base: Base, calibration: Calibration, options: Options, progress: bool = False) -> Result:
    """Fit, plan and round all layers, and compute gammas. progress: show bars.

    Raises SubkvError for invalid or inconsistent input.
    """
    fit = Fit(base, calibration, options, progress)
    notes = [*fit.notes, *_token_notes(fit)]
    kv_bits = options.kv_bits
    if kv_bits is None and fit.settings.codec != "int8":
        kv_bits, reason = _default_budget(fit, options)
        notes.append(SubkvError("kv_bits", f"{kv_bits:g} by default, {reason}"))
        fit = fit.for_budget(options, kv_bits)
    plan, narrow = fit.plan(kv_bits or 0.0), fit.narrow(kv_bits or 0.0)
    layers, sources = fit.code(plan, narrow)
    predicted, stock_types = None, None
    if calibration.sensitivity is not None:
        predicted = fit.error(layers)
        errors = {kind: fit.stock_error(kind) for kind in ("q8_0", "q5_0", "q4_0")}
        stock_types = {kind: error for kind, error in errors.items() if error is not None}
    counted, plans = fit.account(plan, narrow), None
    if kv_bits is not None and options.plans != ():
        plans = Plans(kv_bits, (), {}) if fit.latent else _further_plans(fit, options, kv_bits)
    return Result(layers, fit.settings, counted, sources, predicted, stock_types, tuple(notes), plans)


def _further_plans(fit: Fit, options: Options, kv_bits: float) -> Plans:
    """Plans for the budgets of Options.plans that are possible; kv_bits: the budget of the file's layout."""
    budgets = options.plans
    if budgets is None:
        like = _like_target(fit, options)[0] if options.kv_bits is not None else None
        budgets = (*PLANS, *([like] if like is not None and math.isfinite(like) else []))
    plans: list[Plan] = []
    for budget_ in tracked("plans", sorted(budgets), "budget", fit.progress):
        if any(budget.same(budget_, other) for other in (kv_bits, *(plan.budget for plan in plans))):
            continue
        own = fit.for_budget(options, budget_)
        narrow = own.narrow(budget_)
        try:
            with concerning(kv_bits="plans"):
                bands = own.plan(budget_)
        except SubkvError:
            if options.plans is not None:
                raise
            continue  # the window or the bases alone take more, or rows cannot use so many
        layers, _ = own.code(bands, narrow, derive=True)
        predicted = own.error(layers) if fit.calibration.sensitivity is not None else None
        plans.append(
            Plan(budget_, layers, own.account(bands, narrow), own.settings.window.recent_bits, narrow, predicted)
        )
    return Plans(kv_bits, tuple(plans), fit.shared() if plans else {})


def _like_target(fit: Fit, options: Options) -> tuple[float | None, str]:
    """The budget of TARGET's quality, as budget_like(), or of MOST_COST if that is better and possible; its bound."""
    kv_bits, bound = _like_target_of(fit)
    own = fit.for_budget(options, kv_bits)
    if own is not fit and kv_bits is not None and math.isfinite(kv_bits):
        kv_bits, bound = _like_target_of(own)  # the window of this budget has other bits, and another error
        if kv_bits is not None and own.settings.window.recent_bits == 16:
            kv_bits = max(kv_bits, HALVES_FROM)
    return kv_bits, bound


def _like_target_of(fit: Fit) -> tuple[float | None, str]:
    """_like_target() with the window of `fit`."""
    error = fit.stock_error(TARGET)
    if fit.calibration.sensitivity is not None and error is not None and error > MOST_COST:
        kv_bits = fit.budget_like(TARGET, MOST_COST)
        if kv_bits is not None and math.isfinite(kv_bits):
            return kv_bits, f"{MOST_COST:g}, below {TARGET}'s {error:.2g}"
    return fit.budget_like(TARGET), f"{TARGET}'s"


def _default_budget(fit: Fit, options: Options) -> tuple[float, str]:
    """The default of kv_bits, and the reason for the user."""
    kv_bits, bound = _like_target(fit, options)
    if kv_bits is None and fit.stock_error(TARGET) is None:
        return FALLBACK_KV_BITS, (
            f"because {TARGET}'s quality cannot be predicted: that needs held-out samples in the calibration "
            f"and head sizes in multiples of 32"
        )
    if kv_bits is None:
        return FALLBACK_KV_BITS, (
            f"because quality cannot be predicted: {TARGET}'s rounding is as large as the variation of this "
            f"model's keys and values, as with random weights"
        )
    if math.isfinite(kv_bits):
        measured, (least, _) = fit.calibration.sensitivity is not None, budget.budget_range(fit.heads, fit.overhead)
        if not measured and kv_bits > MOST_ESTIMATED >= least.total:
            return MOST_ESTIMATED, f"the most without sensitivities; {kv_bits:g} are estimated to equal {TARGET}"
        error = "predicted KLD" if measured else "estimated attention error"
        return kv_bits, f"the smallest whose {error} is at most {bound}"
    if options.rank_k is not None or options.rank_v is not None:
        raise SubkvError(
            "kv_bits",
            f"expected a budget, because none reaches the quality of {TARGET} with these ranks, found none",
        )
    return FALLBACK_KV_BITS, (
        f"because no smaller budget is predicted to be as good as {TARGET}: held-out rows differ from the "
        f"calibrated ones; a longer or more varied text (-f) may help"
    )


def _token_notes(fit: Fit) -> list[SubkvError]:
    """A warning if there are too few tokens for the rank."""
    rank = max(len(head.importance) for head in fit.heads)
    tokens = min(stats.shape.tokens for stats in fit.calibration.layers)
    if tokens >= TOKENS_PER_RANK * rank:
        return []
    reason = (
        f"expected at least {TOKENS_PER_RANK * rank} calibrated tokens for rank {rank}, found {tokens}: "
        f"the bases may fit only this text"
    )
    return [SubkvError("calibration", reason)]


@contextlib.contextmanager
def _of_head(il: int, head: int) -> Iterator[None]:
    """Prefixes errors about a head's statistics with the head."""
    try:
        yield
    except SubkvError as error:
        raise SubkvError(f"layer {il} head {head}", f"{error}") from error
    except np.linalg.LinAlgError as error:
        raise SubkvError(f"layer {il} head {head}", f"statistics give no usable basis ({error})") from error


def _centre(stats: LayerStats, center_k: bool) -> tuple[F16, F64]:
    """Per head, the mean to subtract from keys (zeros if not center_k) and the second moments after that."""
    if not center_k:
        return np.zeros(stats.k1.shape, dtype=np.float16), stats.k2
    means, moments = [], []
    for h in range(stats.shape.n_head_kv):
        with _of_head(stats.shape.il, h):
            means.append(half(stats.k1[h], "mean"))
            moments.append(centred_moment(stats.k2[h], stats.k1[h], means[h]))
    return np.stack(means), np.stack(moments)


def _head(basis: FullBasis, rank: int, centred: bool = False) -> Head:
    """A basis for the planner, with at most `rank` coefficients."""
    d = len(basis.importance)
    return Head(d, basis.importance[:rank], centred, budget.coefficient_bits(d, basis.fits_bytes))


def _narrowed(head: Head) -> Head:
    """The head with D in bytes after its first rows, if E is in bytes."""
    if head.basis_bits != budget.coefficient_bits(head.d):
        return head
    narrow = budget.coefficient_bits(head.d, decode_in_bytes=True)
    return replace(head, basis_bits=narrow, more_bits=N_HALVES * (head.basis_bits - narrow))


def _cost_of_means(stats: LayerStats, cost: LayerCost) -> float:
    """The cost of replacing a layer's keys and values by their means."""
    k = stats.k2 - stats.k1[:, :, None] * stats.k1[:, None, :]
    v = stats.v2 - stats.v1[:, :, None] * stats.v1[:, None, :]
    return float(np.sum(cost.k * k) + np.sum(cost.v * v))


def check_window(window: Window, calibration: Calibration) -> None:
    """Check the limits of the window, and that it covers the positions that calibration skipped. Raises SubkvError."""
    window.check()
    if window.n_sink < calibration.n_skip:
        raise SubkvError(
            "n_sink",
            f"expected at least {calibration.n_skip}, found {window.n_sink}: "
            f"the calibration skipped the first {calibration.n_skip} positions, so the bases do not fit them",
        )
