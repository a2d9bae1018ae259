"""Chooses a KV cache and attaches it to a context; used by `subkv.Llama` and the programs."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import dataclasses
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from subkv.base.errors import CacheError, NoCodedCacheError, SubkvError, concerning
from subkv.base.folders import PLUGIN_ONLY
from subkv.base.numbers import shown
from subkv.format.layout import Layout
from subkv.format.window import Window
from subkv.native import library
from subkv.native.bases import (
    AUTO,
    CODED,
    EMBEDDED,
    NAMED,
    NO_SIDECAR,
    NONE,
    STORED,
    WEIGHTS,
    FoundBases,
    budget_of,
    check_budget,
    find_bases,
)
from subkv.native.gguf import Gguf, check_model_file
from subkv.native.library import INVALID, MEMORY, NO_ERROR, UNSUPPORTED, Failure, last_failure
from subkv.native.library import load as native
from subkv.native.log import LogLines, last_log_error

T = TypeVar("T")
MIB = 1024 * 1024

# llama.cpp's cache types: name -> (ggml type, bits per element)
STOCK_TYPES: dict[str, tuple[int, float]] = {
    "f32": (0, 32.0),
    "f16": (1, 16.0),
    "bf16": (30, 16.0),
    "q8_0": (8, 8.5),
    "q5_1": (7, 6.0),
    "q5_0": (6, 5.5),
    "q4_1": (3, 5.0),
    "q4_0": (2, 4.5),
    "iq4_nl": (20, 4.5),
}
CACHE_TYPES = (AUTO, CODED, *STOCK_TYPES)


@dataclasses.dataclass(frozen=True)
class CacheOptions:
    """The requested KV cache. The members are arguments of subkv.Llama, which documents them."""

    kv_cache: str = AUTO
    type_k: str | int | None = None
    type_v: str | int | None = None
    bases: Path | None = None
    window: Window = Window()
    sidecar: bool = True
    kv_bits: float | None = None
    kv_memory: str | int | None = None

    def arguments(self) -> dict[str, Any]:
        """The members as arguments of subkv.Llama."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "window"]
        return {**{name: getattr(self, name) for name in names}, **self.window.requested()}


@dataclasses.dataclass(frozen=True)
class CacheChoice:
    """A chosen KV cache. type_k, type_v: ggml's numbers; layout: file with the bases, None for an ordinary cache.

    derived: bases from the weights, in memory; `layout` is the model. sliding: layers without such bases. note: one
    line about the source of the bases, or why there are none. budget: of the layout, in bits per element. gain: how the
    user gets better bases. fit: one line about the budget that fits in a given memory. automatic: chosen by "auto",
    without bases or bits of the user.
    """

    name_k: str
    name_v: str
    type_k: int
    type_v: int
    layout: Path | None = None
    derived: bool = False
    sliding: frozenset[int] = frozenset()
    window: Window = Window()
    note: str = ""
    budget: float = 0.0
    fit: str = ""
    gain: str = ""
    automatic: bool = False
    named: bool = False

    @property
    def coded(self) -> bool:
        return self.layout is not None

    @property
    def name(self) -> str:
        return self.name_k if self.name_k == self.name_v else f"{self.name_k}/{self.name_v}"

    @property
    def line(self) -> str:
        """The note, with remedies for the user of a program."""
        return f"{self.note}; -ctk f16 uses none; {self.gain}" if self.gain else self.note

    def opened(self, budget: float | None = None) -> Layout:
        """The layout of a coded cache, to be closed. budget: another one of its bases, 0: their default.

        Raises CacheError about `path`.
        """
        assert self.layout is not None
        return Layout(self.layout, self.budget if budget is None else budget, self.derived, self.sliding)

    def with_rollback(self, n_rollback: int) -> CacheChoice:
        """This choice with n_rollback exact rows beyond n_recent; an ordinary cache is unchanged."""
        if not self.coded:
            return self
        return dataclasses.replace(self, window=dataclasses.replace(self.window, n_rollback=n_rollback))


#
# choosing
#


def _stock_type(value: str | int, key: str) -> str:
    for name, (number, _) in STOCK_TYPES.items():
        if value == name or (not isinstance(value, (str, bool)) and value == number):
            return name
    raise CacheError(key, f"expected one of {', '.join(CACHE_TYPES)}, found {value!r}")


def _stock(name_k: str, name_v: str, requested: CacheOptions) -> CacheChoice:
    """An ordinary cache. Raises CacheError for options that only coded caches have."""
    choice = CacheChoice(name_k, name_v, STOCK_TYPES[name_k][0], STOCK_TYPES[name_v][0])
    for key in requested.window.requested():
        raise CacheError(key, f"expected a coefficient cache ('subkv'), found {choice.name}")
    return choice


def ordinary(kind: str) -> CacheChoice:
    """An ordinary cache of one of STOCK_TYPES for K and V, regardless of the model's bases."""
    return _stock(kind, kind, CacheOptions())


ORDINARY = ordinary("f16")


def _with_budget(requested: CacheOptions) -> CacheOptions:
    """The options with the bits of `subkv:BITS` in kv_bits. kv_bits and kv_memory request a coded cache.

    Raises CacheError.
    """
    named: dict[str, Any] = {}
    bits = {} if requested.kv_bits is None else {"kv_bits": requested.kv_bits}
    for name in ("kv_cache", "type_k", "type_v"):
        kind, colon, text = str(getattr(requested, name)).partition(":")
        if kind == CODED and colon:
            budget = budget_of(text)
            if budget is None:
                reason = f"expected subkv:BITS with bits per element, such as subkv:3, found {kind}:{text}"
                raise CacheError(name, reason)
            named[name], bits[name] = CODED, budget
        elif kind == AUTO:
            named[name] = CODED
    key = "kv_bits" if requested.kv_memory is None else "kv_memory"
    if not bits and key == "kv_bits":
        return requested
    if len(set(bits.values())) > 1:
        found = " and ".join(f"{value:g}" for value in dict.fromkeys(bits.values()))
        raise CacheError("kv_bits", f"expected one number of bits per element, found {found}")
    if bits and key == "kv_memory":
        raise CacheError(key, "expected either it or bits per element, found both")
    requested = dataclasses.replace(requested, **named, kv_bits=next(iter(bits.values()), None))
    kinds = {requested.type_k, requested.type_v} - {None} or {requested.kv_cache}
    if kinds != {CODED}:
        raise CacheError(key, f"expected a coefficient cache ('subkv'), found {sorted(map(str, kinds))[0]}")
    return requested


def choose_cache(model: Path, requested: CacheOptions = CacheOptions(), derive: bool = True) -> CacheChoice:
    """Choose the cache that the user requests: the one decision of subkv.Llama and of all programs.

    "auto" and "subkv" are a coded cache with the bases that find_bases() finds or derives from the weights.
    If these cannot be derived, "auto" is f16, with the reason in the note, and "subkv" raises. type_k and type_v (names
    or ggml numbers) choose separate ordinary types for K and V. derive: False: without calibrated bases, "auto" is f16.

    Raises CacheError or ModelFileError.
    """
    numbers = [number for number, _ in STOCK_TYPES.values()]
    for key in ("kv_cache", "type_k", "type_v"):
        kind = getattr(requested, key)
        if isinstance(kind, bool) or not (kind is None or isinstance(kind, str) or kind in numbers):
            raise CacheError(key, f"expected one of {', '.join(CACHE_TYPES)}, found {shown(kind)}")
    check_budget(requested.kv_bits)
    requested = _with_budget(requested)
    kv_cache, bases = requested.kv_cache, requested.bases
    types = [
        (key, kind) for key, kind in (("type_k", requested.type_k), ("type_v", requested.type_v)) if kind is not None
    ]
    if {CODED, AUTO} & {kind for _, kind in types}:
        if len(types) == 2 and requested.type_k != requested.type_v:
            raise CacheError(
                "type_v", f"expected the same cache for K and V with {requested.type_k!r}, found {requested.type_v!r}"
            )
        kv_cache, types = str(types[0][1]), []
    if types:
        if kv_cache == CODED:
            raise CacheError("type_k", "expected no type_k or type_v with kv_cache='subkv', found both")
        default = "f16" if kv_cache == AUTO else kv_cache
        name_k = _stock_type(default if requested.type_k is None else requested.type_k, "type_k")
        name_v = _stock_type(default if requested.type_v is None else requested.type_v, "type_v")
        return _stock(name_k, name_v, requested)
    if kv_cache not in (AUTO, CODED):
        name = _stock_type(kv_cache, "kv_cache")
        return _stock(name, name, requested)
    if bases is not None:
        with concerning(model="bases"):
            check_model_file(bases, weights=False)
    derive = derive or kv_cache == CODED
    automatic = kv_cache == AUTO and bases is None
    sliding: frozenset[int] = frozenset()
    with concerning(model="model_path"):
        found = find_bases(model, bases, STORED if requested.sidecar else EMBEDDED, requested.kv_bits)
        if derive and found.source == NONE:
            sliding, last = _sliding_layers(model), WEIGHTS if requested.sidecar else NO_SIDECAR
            found = find_bases(model, bases, last, requested.kv_bits, sliding)
    if found.source != NONE:
        _check_usable(found)
        choice = _coded(model, requested, found, sliding)
        return dataclasses.replace(choice, automatic=automatic, named=bases is not None)
    if not derive:
        why = found.failure.sentence() if found.is_unavailable else "a cache that is read once is not coded by default"
        note = f"cache: f16: {why}; kv_cache='subkv' codes it"
        return dataclasses.replace(_stock("f16", "f16", requested), note=note)
    error = CacheError("kv_cache", found.failure.without_remedy(), found.failure.remedy or "choose f16")
    if not automatic:
        raise error
    return f16_instead(requested, error)


def _sliding_layers(model: Path) -> frozenset[int]:
    """Layers that stay ordinary. With the plug-in alone they are unknown, and their bases are not used."""
    with Gguf(model, split=False) as file:
        slides = file.get(f"{file.get('general.architecture')}.attention.sliding_window")
    if PLUGIN_ONLY or not slides:
        return frozenset()
    from subkv.engine.sliding import sliding_layers  # our libllama, which package subkv-plugin does not have

    return sliding_layers(model)


def _check_usable(found: FoundBases) -> None:
    """Raises CacheError about `bases` if those that a search has found cannot be used."""
    if found.is_usable:
        return
    if found.source in (NAMED, EMBEDDED):
        raise CacheError("bases", found.failure.without_remedy(), found.failure.remedy)
    remedy = "make it readable" if found.is_unavailable else "convert the model again"
    raise CacheError("bases", found.failure.without_remedy(), f"{remedy}, or ignore it with --no-sidecar")


def open_or_f16(choice: CacheChoice, requested: CacheOptions, opens: Callable[[CacheChoice], T]) -> T:
    """Return opens(choice), or opens(f16) if the engine does not support the model and nobody requested a coded cache.

    Bases that somebody has prepared are not replaced, nor a cache that does not fit in memory. Raises what opens()
    raises.
    """
    try:
        return opens(choice)
    except NoCodedCacheError as error:
        if not choice.automatic or not choice.gain:
            raise
        instead = f16_instead(requested, error)
    return opens(instead)


def f16_instead(requested: CacheOptions, error: CacheError) -> CacheChoice:
    """The f16 cache of a model for which "auto" finds no coded one; the note has the reason.

    Raises `error` if there are options that only coded caches have.
    """
    if requested.window.requested():
        raise error
    note = f"cache: f16; {error.cause}"
    return dataclasses.replace(_stock("f16", "f16", requested), note=note, automatic=True)


def coded_by(layout: Path) -> CacheChoice:
    """A coded cache with the bases of a file, at its own budget."""
    return _with_window(_coded_in(layout), Window())


def _coded(model: Path, requested: CacheOptions, found: FoundBases, sliding: frozenset[int]) -> CacheChoice:
    choice = dataclasses.replace(_coded_in(found.path or model), note=found.note, budget=found.budget)
    if found.source == WEIGHTS:
        gain = f"`subkv convert {shlex.quote(str(model))}`: smaller at the same quality"
        choice = dataclasses.replace(choice, derived=True, sliding=sliding, gain=gain)
    return _with_window(choice, requested.window)


def _coded_in(layout: Path) -> CacheChoice:
    number = STOCK_TYPES["f16"][0]
    return CacheChoice(CODED, CODED, number, number, layout)


def _with_window(choice: CacheChoice, requested: Window) -> CacheChoice:
    with concerning(path="bases"), choice.opened() as layout:
        return dataclasses.replace(choice, window=requested.as_in(layout.description))


def parse_cache(spec: str, model: Path, requested: CacheOptions = CacheOptions()) -> CacheChoice:
    """`f16`, `q8_0/q4_0` (K/V), `subkv`, `subkv:BITS`, `subkv:FILE` → CacheChoice.

    Raises CacheError about `kv_cache`, `kv_bits` or `bases`. A suffix (`subkv+v`) is of Window.of_suffix(). Options of
    coded caches (requested.bases, window) are ignored for others, because a list may contain both.
    """
    name, plus, suffix = spec.rpartition("+")
    if plus and (window := Window.of_suffix(suffix)) is not None:
        choice = parse_cache(name, model, requested)
        if not choice.coded:
            raise CacheError("kv_cache", f"expected a coefficient cache before '+{suffix}', found {spec!r}")
        return dataclasses.replace(choice, window=choice.window.overridden(window).overridden(requested.window))
    kind, _, file = spec.partition(":")
    type_k, slash, type_v = kind.partition("/")
    with concerning(type_k="kv_cache", type_v="kv_cache", path="model"):
        if file:
            if kind != CODED:
                raise CacheError("kv_cache", f"expected a file only after 'subkv:', found {spec!r}")
            try:
                if (bits := budget_of(file)) is not None:
                    return choose_cache(model, dataclasses.replace(requested, kv_cache=kind, kv_bits=bits))
                return choose_cache(model, dataclasses.replace(requested, kv_cache=kind, bases=Path(file)))
            except SubkvError as error:  # name the entry of the list
                raise CacheError("kv_cache", f"{spec}: {error.cause}", error.remedy) from error
        if slash:
            return choose_cache(model, CacheOptions(type_k=type_k, type_v=type_v))
        bases, bits = (requested.bases, requested.kv_bits) if kind in (AUTO, CODED) else (None, None)
        choice = choose_cache(model, CacheOptions(kind, bases=bases, sidecar=requested.sidecar, kv_bits=bits))
        if not choice.coded:
            return choice
        return dataclasses.replace(choice, window=choice.window.overridden(requested.window))


def flash_attention(value: str | bool | int | None, choice: CacheChoice) -> int:
    """llama.cpp's LLAMA_FLASH_ATTN_TYPE_* for "auto", "on"/True, "off"/False. Raises CacheError."""
    from subkv.native.binding import C  # which package subkv-plugin does not have

    if value is None or value in ("auto", -1) and not isinstance(value, bool):
        return C.LLAMA_FLASH_ATTN_TYPE_AUTO
    if value is True or value in ("on", 1):
        return C.LLAMA_FLASH_ATTN_TYPE_ENABLED
    if value is False or value in ("off", 0):
        if not choice.coded and STOCK_TYPES[choice.name_v][1] < 16:
            raise CacheError("flash_attn", f"expected 'on' or 'auto' for a {choice.name_v} V cache, found 'off'")
        return C.LLAMA_FLASH_ATTN_TYPE_DISABLED
    raise CacheError("flash_attn", f"expected 'auto', 'on' or 'off', found {shown(value)}")


#
# attaching
#


# a function that attached() calls in this thread
_also_attach: contextvars.ContextVar[Callable[[], None] | None] = contextvars.ContextVar("also_attach", default=None)


@contextlib.contextmanager
def also_attach(attach: Callable[[], None]) -> Iterator[None]:
    """Inside the block, every attached() of this thread calls attach(), also that of a simulated context.

    For observers: libsubkv gives an observer to the next context, and subkv_attach() removes it.
    """
    _also_attach.set(attach)
    try:
        yield
    finally:
        _also_attach.set(None)
        native().subkv_attach(None, None)  # has no effect if a context has it


@contextlib.contextmanager
def attached(choice: CacheChoice) -> Iterator[None]:
    """Contexts that this thread creates inside the block have this cache, regardless of the variable SUBKV.

    A coded cache applies to the first context only, an ordinary one to all.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(native().subkv_attach, None, None)  # has no effect if a context has it
        if choice.layout is None:
            native().subkv_attach_ordinary()
        else:
            with concerning(path="bases"):  # the file was there when they were looked up
                layout = stack.enter_context(choice.opened())
            values = [getattr(choice.window, name) for name, *_ in library.CacheParams._fields_]
            params = library.CacheParams(*(v.encode() if isinstance(v, str) else v for v in values))
            if not native().subkv_attach(layout.handle, ctypes.byref(params)):
                raise _refused(choice, last_failure())
        if attach := _also_attach.get():
            attach()
        yield


def _refused(choice: CacheChoice, failure: Failure, remedy: str = "") -> CacheError:
    """The error for a failure of libsubkv: about `adapt`, the user's `bases`, or `kv_cache` with a remedy."""
    if failure.key == "adapt":
        return CacheError("adapt", failure.reason)
    if choice.named and failure.kind == INVALID and failure.without_remedy().startswith("subkv."):  # a key
        reason = f"expected bases of this model, found others in {choice.layout} ({failure.without_remedy()})"
        return CacheError("bases", reason, "leave the file out to use the model's own bases")
    kind = NoCodedCacheError if failure.kind == UNSUPPORTED else CacheError
    return kind("kv_cache", failure.without_remedy(), failure.remedy or remedy)


def creation_error(choice: CacheChoice, log: LogLines, otherwise: str) -> SubkvError:
    """The error for a context that llama.cpp did not create, with the reason of libsubkv or of the log."""
    failure = last_failure()
    if not choice.coded or failure.kind == NO_ERROR:
        return CacheError("kv_cache", last_log_error(log) or otherwise)
    remedy = "" if failure.kind == MEMORY else "choose f16 to run without coefficients"  # f16 takes more memory
    return _refused(choice, failure, remedy)
