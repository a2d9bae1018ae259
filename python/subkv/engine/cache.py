"""Choosing, attaching and measuring a KV cache: what `subkv.Llama` and the programs share."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from subkv.base.errors import CacheError, ModelFileError, SubkvError
from subkv.format import adapt as adaptive
from subkv.native import library as _lib
from subkv.native.binding import C, LogLines, captured_log, internals, last_error, last_log_error, llama_cpp, native
from subkv.native.split import COUNT, NUMBER, split_files

__all__ = [  # what subkv.native binds is taken from here by the programs
    "AUTO",
    "C",
    "CACHE_TYPES",
    "CODED",
    "CacheChoice",
    "LogLines",
    "MIB",
    "STOCK_TYPES",
    "attached",
    "beside",
    "captured_log",
    "check_model_file",
    "choose_cache",
    "creation_error",
    "flash_attention",
    "internals",
    "last_error",
    "last_log_error",
    "layout_json",
    "layout_present",
    "llama_cpp",
]

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


#
# libsubkv
#


def layout_present(path: Path, key: str) -> bool:
    """Whether a GGUF carries subkv.* keys. Raises CacheError when it cannot be read."""
    present: int = native().subkv_layout_present(os.fsencode(path))
    if present < 0:
        raise CacheError(key, last_error())
    return present > 0


def layout_json(path: Path, key: str) -> str:
    """subkv_layout_json of a converted model or sidecar. Raises CacheError."""
    layout = native().subkv_layout_load(os.fsencode(path))
    if not layout:
        raise CacheError(key, last_error())
    try:
        return (native().subkv_layout_json(layout) or b"").decode("utf-8")
    finally:
        native().subkv_layout_free(layout)


#
# model files
#

GGUF_TYPE_UINT32, GGUF_TYPE_STRING = 4, 8


class _GgufInit(ctypes.Structure):
    """struct gguf_init_params, passed by value."""

    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


_TYPE_U16 = 2  # GGUF_TYPE_UINT16


def _gguf(name: str, result: Any, *arguments: Any) -> Any:
    address = ctypes.cast(getattr(C._lib, name), ctypes.c_void_p).value
    return ctypes.CFUNCTYPE(result, *arguments)(address or 0)


def gguf_numbers(path: Path, *names: str) -> dict[str, int]:
    """Integers among the metadata keys `{architecture}.{name}` of a GGUF; others are left out."""
    void, i64, text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p
    found: dict[str, int] = {}
    with captured_log(forward=False):
        handle = _gguf("gguf_init_from_file", void, text, _GgufInit)(os.fsencode(path), _GgufInit(True, None))
    if not handle:
        return found
    try:
        find, kind = _gguf("gguf_find_key", i64, void, text), _gguf("gguf_get_kv_type", ctypes.c_int, void, i64)
        arch = find(handle, b"general.architecture")
        if arch < 0 or kind(handle, arch) != GGUF_TYPE_STRING:
            return found
        begin = _gguf("gguf_get_val_str", text, void, i64)(handle, arch)
        for name in names:
            key = find(handle, begin + b"." + name.encode())
            if key >= 0 and kind(handle, key) == GGUF_TYPE_UINT32:
                found[name] = _gguf("gguf_get_val_u32", ctypes.c_uint32, void, i64)(handle, key)
    finally:
        _gguf("gguf_free", None, void)(handle)
    return found


def check_model_file(path: str | os.PathLike[str], key: str, weights: bool = True) -> Path:
    """Refuse a file that llama.cpp could not load, with the reason, before anything is loaded.

    Reads headers only, those of all files of a split model, which `path` is the first of. weights: a model without
    tensors (a sidecar) is refused, too. Raises ModelFileError.
    """
    path = Path(path)
    n_tensors = 0

    def read(file: Path) -> tuple[int, int]:
        nonlocal n_tensors
        n, split = _check_file(file, key)
        n_tensors += n
        return split

    if not weights:
        read(path)
        return path
    try:
        split_files(path, read)
    except ModelFileError:
        raise
    except ValueError as error:
        raise ModelFileError(key, str(error)) from None
    if not n_tensors:
        raise ModelFileError(
            key, f"expected a model with weights, found a GGUF without tensors: {path} (a sidecar only gives bases)"
        )
    return path


def _check_file(path: Path, key: str) -> tuple[int, tuple[int, int]]:
    """Number of tensors of one GGUF, then its number in a split model and the number of files."""
    try:
        if path.is_dir():
            raise ModelFileError(key, f"expected a GGUF file, found the folder {path}")
        with open(path, "rb") as handle:
            head = handle.read(24)
            size = os.fstat(handle.fileno()).st_size
    except FileNotFoundError:
        raise ModelFileError(key, f"expected a GGUF file, found no file {path}") from None
    except OSError as error:
        raise ModelFileError(key, f"cannot read {path}: {error.strerror or error}") from error
    if head[:4] != b"GGUF":
        hint = ""
        if b'{"' in head[8:10] + head[8:]:
            hint = " (a safetensors file: bases come from `convert --bases` with it)"
        raise ModelFileError(key, f"expected a GGUF file, found {head[:4]!r} at the start of {path}{hint}")
    version = int.from_bytes(head[4:8], "little")
    if len(head) < 24 or version not in (2, 3):
        found = f"version {version}" if len(head) == 24 else f"{size} bytes"
        raise ModelFileError(key, f"expected a complete GGUF of version 2 or 3, found {found} in {path}")
    void, i64, word = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t
    with captured_log(forward=False) as log:
        handle_c = _gguf("gguf_init_from_file", void, ctypes.c_char_p, _GgufInit)(
            os.fsencode(path), _GgufInit(True, None)
        )
    if not handle_c:
        raise ModelFileError(key, f"expected a complete GGUF, found a damaged or truncated header in {path}: "
                                  f"{last_log_error(log) or 'no reason given'}")  # fmt: skip
    try:
        expected = _gguf("gguf_get_data_offset", word, void)(handle_c)
        count = _gguf("gguf_get_n_tensors", i64, void)(handle_c)
        if count:
            last = _gguf("gguf_get_tensor_offset", word, void, i64)(handle_c, count - 1)
            expected += last + _gguf("gguf_get_tensor_size", word, void, i64)(handle_c, count - 1)
        split = _u16(handle_c, NUMBER, 0), _u16(handle_c, COUNT, 1)
    finally:
        _gguf("gguf_free", None, void)(handle_c)
    if count and size < expected:
        raise ModelFileError(key, f"expected {expected} bytes of GGUF, found {size}: {path} is truncated")
    return count, split


def _u16(handle: int, key: str, absent: int) -> int:
    """Value of a key of an open GGUF; `absent` also for one of another type, which llama.cpp refuses by itself."""
    index = _gguf("gguf_find_key", ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p)(handle, key.encode())
    arguments = ctypes.c_void_p, ctypes.c_int64
    if index < 0 or _gguf("gguf_get_kv_type", ctypes.c_int, *arguments)(handle, index) != _TYPE_U16:
        return absent
    value: int = _gguf("gguf_get_val_u16", ctypes.c_uint16, *arguments)(handle, index)
    return value


#
# cache types
#


@dataclasses.dataclass(frozen=True)
class CacheChoice:
    """A KV cache by name. `type_k`, `type_v` are ggml's numbers; `layout` is the file with a coded cache's bases.

    adapt: how its bases follow the text, as subkv.adapt.parse reads it, or "none"; None: as its file says, which is
    `adapt_default`.
    """

    name_k: str
    name_v: str
    type_k: int
    type_v: int
    layout: Path | None = None
    adapt: str | None = None
    adapt_default: str | None = None

    def adapting(self, adapt: str | None) -> str | None:
        """How a context follows the text that was asked for `adapt`; None: an ordinary cache, asked for nothing."""
        return next((how for how in (adapt, self.adapt, self.adapt_default) if how is not None), None)

    @property
    def coded(self) -> bool:
        return self.layout is not None

    @property
    def name(self) -> str:
        return self.name_k if self.name_k == self.name_v else f"{self.name_k}/{self.name_v}"


def _stock_type(value: str | int, key: str) -> str:
    for name, (number, _) in STOCK_TYPES.items():
        if value == name or (not isinstance(value, str) and value == number):
            return name
    raise CacheError(key, f"expected one of {', '.join(CACHE_TYPES)}, found {value!r}")


def choose_cache(
    model: Path,
    kv_cache: str = AUTO,
    bases: Path | None = None,
    type_k: str | int | None = None,
    type_v: str | int | None = None,
) -> CacheChoice:
    """Resolve what the user asked for.

    `bases` or the subkv.* keys of `model` make "auto" a coefficient cache. type_k and type_v (names or ggml numbers)
    choose ordinary types for K and V apart. Raises CacheError or ModelFileError.
    """
    asked = [kind for kind in (type_k, type_v) if kind is not None]
    if CODED in asked or AUTO in asked:
        if len(asked) == 2 and type_k != type_v:
            raise CacheError("type_v", f"expected the same cache for K and V with {type_k!r}, found {type_v!r}")
        kv_cache, type_k, type_v, asked = str(asked[0]), None, None, []
    if asked:
        if kv_cache == CODED:
            raise CacheError("type_k", "expected no type_k or type_v with kv_cache='subkv', found both")
        default = AUTO if kv_cache == AUTO else kv_cache
        names = [_stock_type(kind if kind is not None else ("f16" if default == AUTO else default), key)
                 for kind, key in ((type_k, "type_k"), (type_v, "type_v"))]  # fmt: skip
        return CacheChoice(names[0], names[1], STOCK_TYPES[names[0]][0], STOCK_TYPES[names[1]][0])
    if kv_cache not in (AUTO, CODED):
        name = _stock_type(kv_cache, "kv_cache")
        return CacheChoice(name, name, STOCK_TYPES[name][0], STOCK_TYPES[name][0])
    if bases is not None:
        check_model_file(bases, "bases", weights=False)
    source = bases or model
    if layout_present(source, "bases" if bases else "model_path"):
        default = json.loads(layout_json(source, ""))["adapt"] or adaptive.NONE
        number = STOCK_TYPES["f16"][0]
        return CacheChoice(CODED, CODED, number, number, source, adapt_default=default)
    if bases is not None:
        raise CacheError("bases", f"expected subkv.* keys (a converted model or a sidecar), found none in {bases}")
    if kv_cache == CODED:
        raise CacheError(
            "kv_cache",
            f"expected bases for 'subkv', found no subkv.* keys in {model}; calibrate and convert the model, name a "
            "file with bases, or choose f16",
        )
    return CacheChoice("f16", "f16", STOCK_TYPES["f16"][0], STOCK_TYPES["f16"][0])


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


class _Beside(threading.local):
    """What else this thread wants of the next context."""

    attach: Callable[[], None] | None = None


_beside = _Beside()


@contextlib.contextmanager
def beside(attach: Callable[[], None]) -> Iterator[None]:
    """attach() is called in every attached() that this thread enters inside the block, those of dry runs included.

    For observers, which libsubkv gives to the next context that is made, and which subkv_attach forgets.
    """
    _beside.attach = attach
    try:
        yield
    finally:
        _beside.attach = None
        native().subkv_attach(None, None)  # nothing to cancel when a context consumed it


@contextlib.contextmanager
def attached(
    choice: CacheChoice,
    n_sink: int | None = None,
    n_recent: int | None = None,
    n_rollback: int | None = None,
    adapt: str | None = None,
) -> Iterator[None]:
    """The next context that this thread creates inside the block uses the choice's layout (none for ordinary types).

    adapt: as subkv.adapt.parse reads it, "none": static bases; None: what the choice or else the file says.
    """
    adapt = choice.adapting(adapt)
    if choice.layout is None:
        for key, given in (("n_sink", n_sink), ("n_recent", n_recent), ("n_rollback", n_rollback), ("adapt", adapt)):
            if given is not None:
                raise CacheError(key, f"expected a coefficient cache ('subkv'), found {choice.name}")
        if _beside.attach is not None:
            _beside.attach()
        yield
        return
    numbers = {"n_sink": n_sink, "n_recent": n_recent, "n_rollback": n_rollback}
    for key, given in numbers.items():
        if given is not None and not 0 <= given < 2**31:
            raise CacheError(key, f"expected 0 or more tokens, found {given}")
    layout = native().subkv_layout_load(os.fsencode(choice.layout))
    if not layout:
        raise CacheError("", last_error())
    try:
        params = _lib.CacheParams(*(-1 if given is None else given for given in numbers.values()))
        if adapt is not None and adapt != adaptive.NONE:
            try:
                sides, how = adaptive.parse(adapt)
            except ValueError as error:
                raise CacheError("adapt", str(error)) from error
            params.adapt, params.adaptive = adaptive.SIDES[sides], adaptive.native_params(how)
        if not native().subkv_attach(layout, ctypes.byref(params)):
            raise CacheError("kv_cache", last_error())
        if _beside.attach is not None:
            _beside.attach()
        yield
    finally:
        native().subkv_attach(None, None)  # nothing to cancel when the context consumed it
        native().subkv_layout_free(layout)


def creation_error(error: Exception, choice: CacheChoice, log: LogLines) -> SubkvError:
    """Name the reason of a failed model load or context creation (llama_cpp only says that it failed)."""
    if "load model" in str(error) or "vocab" in str(error):
        return ModelFileError("model_path", last_log_error(log) or str(error))
    if "context" not in str(error):
        return SubkvError("", str(error))
    reason = (last_error() if choice.coded else "") or last_log_error(log) or str(error)
    if choice.coded and reason.startswith("adapt: "):
        return CacheError("adapt", reason.removeprefix("adapt: "))
    wayless = choice.coded and "f16" not in reason
    return CacheError("kv_cache", f"{reason}; choose f16 to run without coefficients" if wayless else reason)
