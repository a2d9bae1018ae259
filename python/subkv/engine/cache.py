"""Choosing and attaching a KV cache: what `subkv.Llama` and the programs share."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from subkv.base.errors import CacheError, SubkvError, concerning
from subkv.engine import sidecars
from subkv.format import adapt as adaptive
from subkv.format.layout import Layout, present
from subkv.format.window import Window
from subkv.native import library
from subkv.native.binding import C, LogLines, last_error, last_log_error, native
from subkv.native.gguf import check_model_file

MIB = 1024 * 1024

# name -> (ggml type, bits per element); the cache types of llama.cpp's -ctk
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
CODED = "subkv"
AUTO = "auto"
CACHE_TYPES = (AUTO, CODED, *STOCK_TYPES)


@dataclasses.dataclass(frozen=True)
class CacheOptions:
    """What a user asks of a KV cache; names are those of subkv.Llama's arguments, which says what they mean."""

    kv_cache: str = AUTO
    type_k: str | int | None = None
    type_v: str | int | None = None
    bases: Path | None = None
    window: Window = Window()
    adapt: str | None = None
    sidecar: bool = True

    def arguments(self) -> dict[str, Any]:
        """As arguments of subkv.Llama."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "window"]
        return {**{name: getattr(self, name) for name in names}, **self.window.asked()}


@dataclasses.dataclass(frozen=True)
class CacheChoice:
    """A KV cache by name. `type_k`, `type_v` are ggml's numbers; `layout` is the file with a coded cache's bases.

    adapt: how its bases follow the text, as subkv.format.adapt.parse reads it, or "none"; None: an ordinary cache.
    told: where the bases come from, one line for the user, where that was not asked for by name; else empty.
    """

    name_k: str
    name_v: str
    type_k: int
    type_v: int
    layout: Path | None = None
    window: Window = Window()
    adapt: str | None = None
    told: str = ""

    @property
    def coded(self) -> bool:
        return self.layout is not None

    @property
    def follows_text(self) -> bool:
        """Whether bases follow the text; then every sequence needs cells of its own."""
        return self.adapt not in (None, adaptive.NONE)

    def identity(self) -> dict[str, Any]:
        """What of it decides what a cell holds, besides what libsubkv reports (KVStats)."""
        return {"adapt": self.adapt}

    @property
    def name(self) -> str:
        return self.name_k if self.name_k == self.name_v else f"{self.name_k}/{self.name_v}"

    def with_rollback(self, n_rollback: int) -> CacheChoice:
        """A coded cache that keeps so many exact rows beyond n_recent; an ordinary one needs none."""
        return dataclasses.replace(self, window=self.window.with_rollback(n_rollback)) if self.coded else self


#
# choosing
#


def _stock_type(value: str | int, key: str) -> str:
    for name, (number, _) in STOCK_TYPES.items():
        if value == name or (not isinstance(value, str) and value == number):
            return name
    raise CacheError(key, f"expected one of {', '.join(CACHE_TYPES)}, found {value!r}")


def _stock(name_k: str, name_v: str, asked: CacheOptions) -> CacheChoice:
    """An ordinary cache. Raises CacheError for what only coded ones have."""
    choice = CacheChoice(name_k, name_v, STOCK_TYPES[name_k][0], STOCK_TYPES[name_v][0])
    for key in (*asked.window.asked(), *(["adapt"] if asked.adapt is not None else [])):
        raise CacheError(key, f"expected a coefficient cache ('subkv'), found {choice.name}")
    return choice


def choose_cache(model: Path, asked: CacheOptions = CacheOptions()) -> CacheChoice:
    """Resolve what the user asked for.

    `bases`, the subkv.* keys of `model` or else its sidecar (subkv.engine.sidecars) make "auto" a coefficient cache;
    "subkv" makes bases of the weights where there are none. type_k and type_v (names or ggml numbers) choose ordinary
    types for K and V apart. Raises CacheError or ModelFileError.
    """
    kv_cache, bases = asked.kv_cache, asked.bases
    types = [(key, kind) for key, kind in (("type_k", asked.type_k), ("type_v", asked.type_v)) if kind is not None]
    if {CODED, AUTO} & {kind for _, kind in types}:
        if len(types) == 2 and asked.type_k != asked.type_v:
            raise CacheError(
                "type_v", f"expected the same cache for K and V with {asked.type_k!r}, found {asked.type_v!r}"
            )
        kv_cache, types = str(types[0][1]), []
    if types:
        if kv_cache == CODED:
            raise CacheError("type_k", "expected no type_k or type_v with kv_cache='subkv', found both")
        default = "f16" if kv_cache == AUTO else kv_cache
        name_k = _stock_type(default if asked.type_k is None else asked.type_k, "type_k")
        name_v = _stock_type(default if asked.type_v is None else asked.type_v, "type_v")
        return _stock(name_k, name_v, asked)
    if kv_cache not in (AUTO, CODED):
        name = _stock_type(kv_cache, "kv_cache")
        return _stock(name, name, asked)
    if bases is not None:
        with concerning(model="bases"):
            check_model_file(bases, weights=False)
        with concerning(path="bases"):
            if not present(bases):
                reason = f"expected subkv.* keys (a converted model or a sidecar), found none in {bases}"
                raise CacheError("bases", reason)
        return _coded(bases, asked)
    with concerning(path="model_path"):
        if present(model):
            return _coded(model, asked)
    found = sidecars.calibrated(model) if asked.sidecar else None
    if found is None and kv_cache == CODED:
        found = sidecars.of_weights(model, asked.sidecar)
    if found is not None:
        return _coded(found.path, asked, found.told)
    told = sidecars.nothing_found(model) if asked.sidecar else ""
    return dataclasses.replace(_stock("f16", "f16", asked), told=told)


def or_of_weights(model: Path, asked: CacheOptions) -> tuple[CacheOptions, str]:
    """What `asked` is for someone who chats with a model: where `auto` finds no bases, those of the weights.

    Then: why none could be made and the cache is f16, one line; else "". Raises about what was prepared, as
    choose_cache() does.
    """
    if asked.bases is not None or {asked.kv_cache, asked.type_k, asked.type_v} - {AUTO, None}:
        return asked, ""
    plain = CacheOptions(sidecar=asked.sidecar)
    if choose_cache(model, plain).coded:
        return asked, ""
    try:
        choose_cache(model, dataclasses.replace(plain, kv_cache=CODED))
    except CacheError as error:
        return f16_instead(asked, error)
    return dataclasses.replace(asked, kv_cache=CODED, type_k=None, type_v=None), ""


def f16_instead(asked: CacheOptions, error: CacheError) -> tuple[CacheOptions, str]:
    """An ordinary cache in place of a coded one that nobody has asked for by name, and why in one line."""
    reason = re.sub(r"; (choose f16|use an ordinary cache type)[^;]*$", "", error.reason)
    return dataclasses.replace(asked, kv_cache="f16", type_k=None, type_v=None), f"cache: f16; {reason}"


def _coded(layout: Path, asked: CacheOptions, told: str = "") -> CacheChoice:
    with concerning(path="bases"), Layout(layout) as read:
        default = read.description["adapt"] or adaptive.NONE
    number = STOCK_TYPES["f16"][0]
    adapt = default if asked.adapt is None else asked.adapt
    return CacheChoice(CODED, CODED, number, number, layout, asked.window, adapt, told)


def parse_cache(spec: str, model: Path, asked: CacheOptions = CacheOptions()) -> CacheChoice:
    """`f16`, `q8_0/q4_0` (K/V), `subkv`, `subkv:FILE` → CacheChoice. Raises CacheError about `kv_cache` or `bases`.

    A coded cache may end with bases that follow the text: `subkv+v`, `subkv+v;length=256` (as --adapt, commas as ;).
    What only coded caches have (asked.bases, window, adapt) is left out for others, as a list may name both.
    """
    name, plus, sides = spec.rpartition("+")
    if plus and sides.split(";")[0] in adaptive.SIDES:
        choice = parse_cache(name, model, asked)
        if not choice.coded:
            raise CacheError("kv_cache", f"expected a coefficient cache before '+{sides}', found {spec!r}")
        return choice if asked.adapt is not None else dataclasses.replace(choice, adapt=sides.replace(";", ","))
    kind, _, file = spec.partition(":")
    type_k, slash, type_v = kind.partition("/")
    with concerning(type_k="kv_cache", type_v="kv_cache", path="model"):
        if file:
            if kind != CODED:
                raise CacheError("kv_cache", f"expected a file only after 'subkv:', found {spec!r}")
            try:
                return choose_cache(model, dataclasses.replace(asked, kv_cache=kind, bases=Path(file)))
            except SubkvError as error:  # of one in a list: which
                raise CacheError("kv_cache", f"{spec}: {error.reason}") from error
        if slash:
            return choose_cache(model, CacheOptions(type_k=type_k, type_v=type_v))
        bases = asked.bases if kind in (AUTO, CODED) else None
        choice = choose_cache(model, CacheOptions(kind, bases=bases, sidecar=asked.sidecar))
        if not choice.coded:
            return choice
        adapt = choice.adapt if asked.adapt is None else asked.adapt
        return dataclasses.replace(choice, window=asked.window, adapt=adapt)


def flash_attention(value: str | bool | int | None, choice: CacheChoice) -> int:
    """llama.cpp's LLAMA_FLASH_ATTN_TYPE_* for "auto", "on"/True, "off"/False. Raises CacheError."""
    if value is None or value in ("auto", -1) and not isinstance(value, bool):
        return C.LLAMA_FLASH_ATTN_TYPE_AUTO
    if value is True or value in ("on", 1):
        return C.LLAMA_FLASH_ATTN_TYPE_ENABLED
    if value is False or value in ("off", 0):
        if not choice.coded and STOCK_TYPES[choice.name_v][1] < 16:
            raise CacheError("flash_attn", f"expected 'on' or 'auto' for a {choice.name_v} V cache, found 'off'")
        return C.LLAMA_FLASH_ATTN_TYPE_DISABLED
    raise CacheError("flash_attn", f"expected 'auto', 'on' or 'off', found {value!r}")


#
# attaching
#


# what else this thread wants of the next context
_beside: contextvars.ContextVar[Callable[[], None] | None] = contextvars.ContextVar("beside", default=None)


@contextlib.contextmanager
def beside(attach: Callable[[], None]) -> Iterator[None]:
    """attach() is called in every attached() that this thread enters inside the block, those of dry runs included.

    For observers, which libsubkv gives to the next context that is made, and which subkv_attach forgets.
    """
    _beside.set(attach)
    try:
        yield
    finally:
        _beside.set(None)
        native().subkv_attach(None, None)  # nothing to cancel when a context consumed it


@contextlib.contextmanager
def attached(choice: CacheChoice) -> Iterator[None]:
    """Contexts that this thread creates inside the block have this cache, whatever SUBKV says.

    A layout is for the first of them; ordinary caches are for all.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(native().subkv_attach, None, None)  # nothing to cancel when a context consumed it
        if choice.layout is None:
            native().subkv_attach_ordinary()
        else:
            with concerning(path=""):
                layout = stack.enter_context(Layout(choice.layout))
            window = choice.window
            adapt = choice.adapt.encode() if choice.adapt is not None else None
            params = library.CacheParams(window.n_sink, window.n_recent, window.n_rollback, adapt)
            if not native().subkv_attach(layout.handle, ctypes.byref(params)):
                raise _refused(last_error())
        if attach := _beside.get():
            attach()
        yield


def _refused(sentence: str) -> CacheError:
    """libsubkv's sentence, which names the argument `adapt` where it is about that one."""
    key, colon, rest = sentence.partition(": ")
    return CacheError(key, rest) if colon and key == "adapt" else CacheError("kv_cache", sentence)


def creation_error(choice: CacheChoice, log: LogLines, otherwise: str) -> SubkvError:
    """Why llama.cpp did not make a context: libsubkv's reason or the one in the log."""
    if not choice.coded:
        return CacheError("kv_cache", last_log_error(log) or otherwise)
    reason = last_error() or last_log_error(log) or otherwise
    error = _refused(reason)
    if error.key != "kv_cache" or "f16" in reason:
        return error
    return CacheError("kv_cache", f"{reason}; choose f16 to run without coefficients")
