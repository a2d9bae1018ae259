"""Chooses a KV cache and attaches it to a context; used by `subkv.Llama` and the programs."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from subkv.base.errors import CacheError, ModelFileError, NoCodedCacheError, SubkvError, concerning
from subkv.base.folders import PLUGIN_ONLY
from subkv.base.numbers import shown
from subkv.engine.request import AUTOMATIC, CacheRequest
from subkv.format.layout import Layout
from subkv.format.window import STATIC, Window
from subkv.native import library
from subkv.native.bases import AUTO, CODED, NAMED, NONE, WEIGHTS, check_budget
from subkv.native.gguf import check_model_file
from subkv.native.library import INVALID, MEMORY, NO_ERROR, UNAVAILABLE, UNSUPPORTED, Failure, cache_types, last_failure
from subkv.native.library import load as native
from subkv.native.log import LogLines, captured_log, last_log_error

T = TypeVar("T")
MIB = 1024 * 1024

FIELDS = {"type": "kv_cache", "bits": "kv_bits", "memory": "kv_memory"}  # of subkv_cache_request -> our argument


@dataclasses.dataclass(frozen=True)
class CacheChoice:
    """A chosen KV cache. type_k, type_v: ggml's numbers; layout: file with the bases, None for an ordinary cache.

    bases: the layout, which this choice keeps in memory. source: of subkv.native.bases; with WEIGHTS, `layout` is the
    model. note: one line about the source of the bases, or why there are none. budget: of the layout, in bits per
    element; budget_default: of the same bases without a request. gain: how the user gets better bases. fit: one line
    about the budget that fits in a given memory. automatic: nobody has requested a coded cache.
    """

    name_k: str
    name_v: str
    type_k: int
    type_v: int
    layout: Path | None = None
    bases: Layout | None = dataclasses.field(default=None, repr=False, compare=False)
    source: int = NONE
    window: Window = Window()
    note: str = ""
    budget: float = 0.0
    budget_default: float = 0.0
    fit: str = ""
    gain: str = ""
    automatic: bool = False

    @property
    def coded(self) -> bool:
        return self.layout is not None

    @property
    def derived(self) -> bool:
        return self.source == WEIGHTS

    @property
    def name(self) -> str:
        return self.name_k if self.name_k == self.name_v else f"{self.name_k}/{self.name_v}"

    @property
    def line(self) -> str:
        """The note, with remedies for the user of a program."""
        return f"{self.note}; -ctk f16 uses none; {self.gain}" if self.gain else self.note

    @property
    def description(self) -> dict[str, Any]:
        """Of the bases of a coded cache (Layout.description)."""
        assert self.bases is not None
        return self.bases.description

    def with_rollback(self, n_rollback: int) -> CacheChoice:
        """This choice with n_rollback exact rows beyond n_recent; an ordinary cache is unchanged."""
        if not self.coded:
            return self
        return dataclasses.replace(self, window=dataclasses.replace(self.window, n_rollback=n_rollback))


#
# choosing
#


def ordinary(kind: str = "f16") -> CacheChoice:
    """An ordinary cache of one type for K and V, regardless of the model's bases."""
    return choose_cache(None, CacheRequest(kind))


def choose_cache(model: Path | None, requested: CacheRequest = AUTOMATIC, derive: bool = True) -> CacheChoice:
    """Choose the cache that the user requests, as libsubkv decides it for the contexts of all programs (subkv_resolve).

    "auto" and "subkv" are a coded cache with the bases that are found, or derived from the weights. If these cannot be
    derived, "auto" is f16, with the reason in the note, and "subkv" raises. type_k and type_v (names or ggml numbers)
    choose separate ordinary types for K and V. derive: False: without calibrated bases, "auto" is f16. Without a model
    only the request is checked, and a coded cache has no bases.

    Raises CacheError, and ModelFileError about `model_path`.
    """
    check_budget(requested.kv_bits)
    window = requested.window
    slides, failures = _sliding(model)
    given, choice = (
        library.Request(
            None if model is None else os.fsencode(model),
            *(_type_name(key, getattr(requested, key)) for key in ("kv_cache", "type_k", "type_v")),
            os.fsencode(requested.bases) if requested.bases is not None else None,
            requested.kv_bits or 0.0,
            requested.kv_memory is not None,
            requested.sidecar,
            derive,
            slides,
            window.n_sink,
            window.n_recent,
            window.n_rollback,
            (window.adapt or "").encode(),
        ),
        library.Choice(),
    )
    # The reason says what ggml would log about a wrong file.
    with captured_log(forward=False) if model is not None else contextlib.nullcontext():
        done = native().subkv_resolve(ctypes.byref(given), ctypes.byref(choice))
    if failures:
        raise failures[0]
    if not done:
        failure = last_failure()
        if failure.key == "bases" and requested.bases is not None:
            with concerning(model="bases"):  # tells which other file it is
                check_model_file(requested.bases, weights=False)
        raise _unresolved(failure)
    return _choice(model, choice, derive)


def _choice(model: Path | None, choice: library.Choice, derive: bool) -> CacheChoice:
    words, coded = os.fsdecode(choice.words), bool(choice.layout)
    note = f"bases: {words}" if coded else f"cache: f16; {words}"
    if not (coded or derive):
        note = f"cache: f16: {words}; kv_cache='subkv' codes it"
    path = Path(os.fsdecode(choice.path) or model or "")  # without a model there is no layout
    return CacheChoice(
        choice.type_k.decode(),
        choice.type_v.decode(),
        choice.ggml_type_k,
        choice.ggml_type_v,
        path if coded else None,
        Layout.of_handle(choice.layout, path) if coded else None,
        choice.source,
        Window(choice.n_sink, choice.n_recent, choice.n_rollback, adapt=choice.adapt.decode()) if coded else Window(),
        note if words else "",
        choice.bits,
        choice.bits_default,
        gain=os.fsdecode(choice.gain),
        automatic=choice.automatic,
    )


def _type_name(key: str, value: Any) -> bytes | None:
    """The name of a cache type, for libsubkv, which checks it. Raises CacheError about `key` for other objects."""
    if value is None:
        return None
    if not isinstance(value, (str, bool)):
        value = next((name for name, (number, _) in cache_types().items() if number == value), value)
    if not isinstance(value, str) or not value or not value.isprintable():
        raise CacheError(key, f"expected one of {', '.join((AUTO, CODED, *cache_types()))}, found {shown(value)}")
    return value.encode()


def _sliding(model: Path | None) -> tuple[Any, list[BaseException]]:
    """The function `slides` of subkv_cache_request, and a list for what it raises.

    With the plug-in alone the sliding layers are unknown, and their bases are not used.
    """
    failures: list[BaseException] = []
    if PLUGIN_ONLY or model is None:
        return library.SLIDES(), failures
    known: list[frozenset[int]] = []

    def slides(il: int) -> bool:
        from subkv.engine.sliding import sliding_layers  # our libllama, which package subkv-plugin does not have

        try:
            known.extend([] if known else [sliding_layers(model)])
        except BaseException as error:  # which cannot pass through the library
            failures.append(error)
            known.append(frozenset())
        return il in known[0]

    return library.SLIDES(slides), failures


def _unresolved(failure: Failure) -> SubkvError:
    """The error for a failure of subkv_resolve."""
    if failure.key == "model":
        return ModelFileError("model_path", failure.sentence("model"))
    if failure.key == "sidecar":
        remedy = "make it readable" if failure.kind == UNAVAILABLE else "convert the model again"
        return CacheError("bases", failure.reason, f"{remedy}, or ignore it with --no-sidecar")
    if failure.key == "derive":
        return CacheError("kv_cache", failure.reason, failure.remedy or "choose f16")
    return CacheError(FIELDS.get(failure.key, failure.key), failure.reason, failure.remedy)


def open_or_f16(choice: CacheChoice, requested: CacheRequest, opens: Callable[[CacheChoice], T]) -> T:
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


def f16_instead(requested: CacheRequest, error: CacheError) -> CacheChoice:
    """The f16 cache of a model for which "auto" finds no coded one; the note has the reason.

    Raises `error` if there are options that only coded caches have.
    """
    if requested.window.requested():
        raise error
    return dataclasses.replace(ordinary(), note=f"cache: f16; {error.cause}", automatic=True)


def coded_by(path: Path) -> CacheChoice:
    """A coded cache with the bases of a file, at its own budget."""
    layout, plain = Layout(path), ordinary()
    window = Window(adapt=layout.description["adapt"] or STATIC)
    return CacheChoice(CODED, CODED, plain.type_k, plain.type_v, path, layout, NAMED, window)


def parse_cache(spec: str, model: Path, requested: CacheRequest = AUTOMATIC) -> CacheChoice:
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
    kind, colon, own = spec.partition(":")
    type_k, slash, type_v = kind.partition("/")
    with concerning(type_k="kv_cache", type_v="kv_cache"):
        if slash:
            return choose_cache(model, CacheRequest(type_k=type_k, type_v=type_v))
        if kind not in (AUTO, CODED):
            return choose_cache(model, CacheRequest(spec))
        asked = dataclasses.replace(requested, kv_cache=spec, window=Window())
        if not colon:
            choice = choose_cache(model, asked)
        else:
            try:  # bits of all caches are for those without their own
                kv_bits = asked.kv_bits if Path(own).exists() else None
                choice = choose_cache(model, dataclasses.replace(asked, kv_bits=kv_bits))
            except SubkvError as error:  # name the entry of the list
                raise CacheError("kv_cache", f"{spec}: {error.cause}", error.remedy) from error
    return dataclasses.replace(choice, window=choice.window.overridden(requested.window)) if choice.coded else choice


def flash_attention(value: str | bool | int | None, choice: CacheChoice) -> int:
    """llama.cpp's LLAMA_FLASH_ATTN_TYPE_* for "auto", "on"/True, "off"/False. Raises CacheError."""
    from subkv.native.binding import C  # which package subkv-plugin does not have

    if value is None or value in ("auto", -1) and not isinstance(value, bool):
        return C.LLAMA_FLASH_ATTN_TYPE_AUTO
    if value is True or value in ("on", 1):
        return C.LLAMA_FLASH_ATTN_TYPE_ENABLED
    if value is False or value in ("off", 0):
        if not choice.coded and cache_types()[choice.name_v][1] < 16:
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
    try:
        if not choice.coded:
            native().subkv_attach_ordinary()
        else:
            assert choice.bases is not None
            values = [getattr(choice.window, name) for name, *_ in library.CacheParams._fields_]
            params = library.CacheParams(*(v.encode() if isinstance(v, str) else v for v in values))
            if not native().subkv_attach(choice.bases.handle, ctypes.byref(params)):
                raise _refused(choice, last_failure())
        if attach := _also_attach.get():
            attach()
        yield
    finally:
        native().subkv_attach(None, None)  # has no effect if a context has it


def _refused(choice: CacheChoice, failure: Failure, remedy: str = "") -> CacheError:
    """The error for a failure of libsubkv: about `adapt`, the user's `bases`, or `kv_cache` with a remedy."""
    if failure.key == "adapt":
        return CacheError("adapt", failure.reason)
    if choice.source == NAMED and failure.kind == INVALID and failure.without_remedy().startswith("subkv."):  # a key
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
