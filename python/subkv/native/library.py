"""ctypes over runtime/native/include/subkv.h.

libsubkv, libllama and ggml are in one folder. `import llama_cpp` loads a libllama, which must be the one there, so
`import subkv` sets its path (paths.py). Importing this module loads no library.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subkv.base.folders import PLUGIN_ONLY
from subkv.native.forks import survive_forks
from subkv.native.paths import LIB_PATH, SUFFIX, lib_dir, set_library_path

_str = ctypes.c_char_p
_ptr = ctypes.c_void_p
_i32 = ctypes.c_int32
_i64 = ctypes.c_int64
_u32 = ctypes.c_uint32
_u64 = ctypes.c_uint64
_float = ctypes.c_float


def layers(numbers: Collection[int]) -> tuple[Any, int]:
    """Layers as two arguments of a function: an array and its length."""
    return (_i32 * len(numbers))(*sorted(numbers)), len(numbers)


def members(kind: Any, *names: str) -> list[tuple[str, Any]]:
    """Consecutive members of one type in a struct."""
    return [(name, kind) for name in names]


class ErrorParts(ctypes.Structure):
    """subkv_error."""

    _fields_ = [("kind", _i32), *members(_str, "key", "reason", "remedy")]


class CacheParams(ctypes.Structure):
    """subkv_cache_params."""

    _fields_ = [*members(_i32, "n_sink", "n_recent", "n_rollback"), ("adapt", _str)]


class Stats(ctypes.Structure):
    """subkv_stats."""

    _fields_ = [
        *members(_u64, "bytes_codes", "bytes_window", "bytes_stock", "bytes_kv", "bytes_f16", "bytes_bases"),
        *members(_u64, "bytes_per_token", "n_zero_rows", "bytes_chunks", "n_chunks"),
        *members(_u32, "n_layer_coded", "n_layer_device", "n_layer_sliding", "n_layer_other", "n_swa"),
        *members(_u32, "n_cells", "n_stream"),
        *members(_i32, "n_sink", "n_recent", "n_rollback"),
        ("bpe", _float),
    ]


SLIDES = ctypes.CFUNCTYPE(ctypes.c_bool, _i32)


class Request(ctypes.Structure):
    """subkv_cache_request."""

    _fields_ = [
        *members(_str, "model", "type", "type_k", "type_v", "bases"),
        ("bits", _float),
        *members(ctypes.c_bool, "memory", "sidecar", "derive"),
        ("slides", SLIDES),
        *members(_i32, "n_sink", "n_recent", "n_rollback"),
        ("adapt", _str),
    ]


class Choice(ctypes.Structure):
    """subkv_cache_choice."""

    _fields_ = [
        *members(_str, "type_k", "type_v"),
        *members(_i32, "ggml_type_k", "ggml_type_v"),
        ("automatic", ctypes.c_bool),
        ("source", _i32),
        ("path", _str),
        ("layout", _ptr),
        *members(_float, "bits", "bits_default"),
        *members(_i32, "n_sink", "n_recent", "n_rollback"),
        *members(_str, "adapt", "words", "gain"),
    ]


class Matrix(ctypes.Structure):
    """subkv_matrix."""

    _fields_ = [
        ("name", _str),
        ("data", _ptr),
        *members(_i64, "n_rows", "n"),
        ("order", _ptr),
        *members(_i32, "n_order", "type"),
    ]


class Observed(ctypes.Structure):
    """subkv_observed."""

    _fields_ = [
        *members(_i32, "n_head", "n_head_kv", "d_k", "d_v"),
        ("scale", _float),
        ("n_tokens", _u64),
        *members(_i32, "n_key", "n_query"),
        ("n_nonfinite", _u64),
        *members(_i32, "coded", "plain"),
    ]


_i32_p = ctypes.POINTER(_i32)

Signatures = Mapping[str, tuple[Any, list[Any]]]  # function -> (result type, argument types)

# in the order of subkv.h; functions of other headers are declared at their callers
SIGNATURES: Signatures = {
    "subkv_last_error": (_str, []),
    "subkv_last_error_parts": (ctypes.POINTER(ErrorParts), []),
    "subkv_kernel_name": (_str, []),
    "subkv_device_kernel_name": (_str, []),
    "subkv_constants": (_str, []),
    "subkv_available_memory": (_i64, [_str, _str]),
    "subkv_encode_rows": (_i64, [_ptr, _ptr, _i32, _ptr, _i64, _ptr]),
    "subkv_decode_rows": (ctypes.c_bool, [_ptr, _ptr, _i32, _ptr, _i64, _ptr]),
    "subkv_layout_present": (_i32, [_str]),
    "subkv_layout_load": (_ptr, [_str]),
    "subkv_layout_load_budget": (_ptr, [_str, _float]),
    "subkv_layout_derive": (_ptr, [_str, _float, _ptr, _i32]),
    "subkv_layout_derive_matrices": (_ptr, [_ptr, _ptr, _i32, _float, _i32, _i32]),
    "subkv_layout_free": (None, [_ptr]),
    "subkv_layout_basis": (_i64, [_ptr, _i32, _i32, ctypes.c_bool, ctypes.c_bool, _ptr, _i64]),
    "subkv_layout_mean": (_i64, [_ptr, _i32, _i32, _ptr, _i64]),
    "subkv_layout_json": (_str, [_ptr]),
    "subkv_model_content": (ctypes.c_bool, [_str, ctypes.c_char_p]),
    "subkv_model_weights": (ctypes.c_bool, [_str, ctypes.c_int32, ctypes.c_int32, ctypes.c_char_p]),
    "subkv_resolve": (ctypes.c_bool, [ctypes.POINTER(Request), ctypes.POINTER(Choice)]),
    "subkv_sidecar_path": (_str, [_str, _str, _i32]),
    "subkv_sidecar_folder": (_str, []),
    "subkv_attach": (ctypes.c_bool, [_ptr, ctypes.POINTER(CacheParams)]),
    "subkv_attach_ordinary": (None, []),
    "subkv_get_stats": (ctypes.c_bool, [_ptr, ctypes.POINTER(Stats)]),
    "subkv_context_fingerprint": (_str, [_ptr]),
    "subkv_context_devices": (_str, [_ptr]),
    "subkv_resume": (_i32, [_ptr, _i32, _i32]),
    "subkv_take_refusal": (ctypes.c_bool, [_ptr, _i32]),
    "subkv_observer_new": (_ptr, [_i32]),
    "subkv_observer_free": (None, [_ptr]),
    "subkv_observe": (ctypes.c_bool, [_ptr]),
    "subkv_observer_mode": (ctypes.c_bool, [_ptr, _i32, _i32_p, _i32, _i32_p, _i32]),
    "subkv_observer_forget": (None, [_ptr]),
    "subkv_observer_n_layer": (_i32, [_ptr]),
    "subkv_observer_layer": (ctypes.c_bool, [_ptr, _i32, ctypes.POINTER(Observed)]),
    "subkv_observer_get": (_i64, [_ptr, _i32, _str, ctypes.POINTER(ctypes.c_double), _i64]),
}


def _unloadable(reason: str) -> str:
    """An error message for the dynamic linker's reason about libllama or its dependencies."""
    if "libcuda.so" in reason:
        return (
            f"libggml-cuda{SUFFIX}: expected NVIDIA's driver (libcuda.so.1), found none;"
            " install the driver, or subkv without -DGGML_CUDA=ON"
        )
    if "libvulkan.so" in reason:
        return (
            f"libggml-vulkan{SUFFIX}: expected the Vulkan loader (libvulkan.so.1), found none;"
            " install it with the GPU's driver, or subkv without -DGGML_VULKAN=ON"
        )
    return f"libllama{SUFFIX}: expected a library that loads, found {reason}"


def _bind_llama(folder: Path) -> ctypes.CDLL:
    """Import llama_cpp with libllama of `folder`; returns llama_cpp's handle of it."""
    loaded = sys.modules.get("llama_cpp.llama_cpp")
    if loaded is None:
        set_library_path(folder)
        try:
            from llama_cpp import llama_cpp as loaded  # type: ignore[no-redef]
        except RuntimeError as error:  # the library exists but does not load
            raise ImportError(_unloadable(str(error))) from error
    handle: ctypes.CDLL = loaded._lib  # type: ignore[union-attr]
    if Path(handle._name).resolve() != folder / f"libllama{SUFFIX}":
        variable = os.environ.get(LIB_PATH)
        is_cause = variable is not None and Path(variable).resolve() == Path(handle._name).resolve().parent
        remedy = f"unset {LIB_PATH}" if is_cause else "import subkv first, which makes llama_cpp take it"
        raise ImportError(
            f"llama_cpp: expected libllama{SUFFIX} of {folder}, found it already bound to {handle._name}; {remedy}"
        )
    return handle


def declare(lib: ctypes.CDLL, signatures: Signatures) -> ctypes.CDLL:
    """Declare the functions in `lib`; returns it."""
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments
    return lib


@functools.cache
def load() -> ctypes.CDLL:
    """libsubkv with all functions of subkv.h declared; llama_cpp uses the same libllama.

    Raises ImportError if the library is missing, llama_cpp has loaded another libllama, or LLAMA_CPP_LIB_PATH names
    another folder.
    """
    folder = lib_dir()
    lib_path = str(folder / f"libsubkv{SUFFIX}")
    if PLUGIN_ONLY:
        return declare(ctypes.CDLL(lib_path), SIGNATURES)
    llama = _bind_llama(folder)
    lib = ctypes.CDLL(lib_path)
    # Both must use one ggml. dlsym also searches the libraries that a library links; Windows does not, and links the
    # libggml-base.dll that the process has loaded.
    if sys.platform != "win32" and len({ctypes.cast(of.ggml_init, _ptr).value for of in (lib, llama)}) > 1:
        raise ImportError(f"libsubkv{SUFFIX}: expected ggml_init of {folder}, found it bound to another library")
    survive_forks(llama)
    return declare(lib, SIGNATURES)


@functools.cache
def ggml() -> ctypes.CDLL:
    """The libggml-base of libsubkv and libllama. Raises ImportError as load()."""
    load()
    return ctypes.CDLL(str(lib_dir() / f"libggml-base{SUFFIX}"))


def constants() -> dict[str, Any]:
    """The constants of the formats (subkv_constants)."""
    return dict(json.loads(load().subkv_constants()))


@functools.cache
def cache_types() -> dict[str, tuple[int, float]]:
    """The ordinary cache types: name -> number in ggml, and bits per element."""
    return {name: (number, bits) for name, (number, bits) in constants()["cache_types"].items()}


def llama_cpp_commit() -> str:
    """The commit of llama.cpp in the loaded libraries."""
    return str(declare(ggml(), {"ggml_commit": (_str, [])}).ggml_commit().decode())


# subkv.h
NO_ERROR, INVALID, UNSUPPORTED, MEMORY, UNAVAILABLE, BUDGET = range(6)


@dataclass(frozen=True)
class Failure:
    """subkv_error. Programs react to the kind and the key; the other texts are for the user."""

    kind: int = NO_ERROR
    key: str = ""
    reason: str = ""
    remedy: str = ""

    @classmethod
    def of(cls, parts: ErrorParts) -> Failure:
        texts = (parts.key, parts.reason, parts.remedy)
        return cls(parts.kind, *(text.decode("utf-8", "replace") for text in texts))

    def without_remedy(self, key: str = "") -> str:
        """The sentence for an error about `key`, without the remedy."""
        return f"{self.key}: {self.reason}" if self.key not in ("", key) else self.reason

    def sentence(self, key: str = "") -> str:
        """The sentence for an error about `key`."""
        return f"{self.without_remedy(key)}; {self.remedy}" if self.remedy else self.without_remedy(key)


def last_failure() -> Failure:
    """This thread's latest failure of libsubkv."""
    return Failure.of(load().subkv_last_error_parts().contents)


def last_error() -> str:
    """The sentence of this thread's latest failure of libsubkv, "" if none."""
    return (load().subkv_last_error() or b"").decode("utf-8", "replace")
