"""Checks keyword arguments for llama_cpp.Llama."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from subkv.base.errors import CacheError, SubkvError
from subkv.base.numbers import INT32_MAX, real, shown, whole
from subkv.base.threads import MAX_THREADS
from subkv.native.binding import llama_cpp

# Read on import: applications may later replace llama_cpp.Llama by our class.
_KNOWN = {
    name: parameter.default
    for name, parameter in inspect.signature(llama_cpp.Llama.__init__).parameters.items()
    if name not in ("self", "kwargs", "model_path")
}
_ANY = 3.4e38  # of a float in C
# least and largest value of the numbers, and what is expected
_TOKENS = f"%d to {INT32_MAX} tokens"
_WHOLE = {
    "n_ctx": (0, INT32_MAX, _TOKENS % 0),
    "n_batch": (1, INT32_MAX, _TOKENS % 1),
    "n_ubatch": (1, INT32_MAX, _TOKENS % 1),
    "n_threads": (1, MAX_THREADS, f"1 to {MAX_THREADS} threads, or None"),
    "n_threads_batch": (1, MAX_THREADS, f"1 to {MAX_THREADS} threads, or None"),
    "n_gpu_layers": (-INT32_MAX, INT32_MAX, "a number of layers, -1: all"),
    "split_mode": (0, 3, ""),
    "main_gpu": (0, INT32_MAX, ""),
    "seed": (-INT32_MAX, 2**32 - 1, ""),
    "rope_scaling_type": (-1, 3, ""),
    "pooling_type": (-1, 4, ""),
    "attention_type": (-1, 1, ""),
    "yarn_orig_ctx": (0, INT32_MAX, _TOKENS % 0),
    "last_n_tokens_size": (0, INT32_MAX, _TOKENS % 0),
}
_REAL = {
    "rope_freq_base": (0.0, _ANY, "0 or more"),
    "rope_freq_scale": (0.0, _ANY, "0 or more"),
    "yarn_ext_factor": (-_ANY, _ANY, "a finite number"),
    "yarn_attn_factor": (-_ANY, _ANY, "a finite number"),
    "yarn_beta_fast": (-_ANY, _ANY, "a finite number"),
    "yarn_beta_slow": (-_ANY, _ANY, "a finite number"),
    "lora_scale": (-_ANY, _ANY, "a finite number"),
}
_OR_NONE = ("n_threads", "n_threads_batch", "seed", "rope_scaling_type")
# Ignored: LangChain's `device`, and arguments of earlier versions of llama-cpp-python that llama.cpp has removed
STALE = frozenset({"device", "f16_kv", "low_vram", "mul_mat_q", "n_gqa", "n_parts", "rms_norm_eps"})


def checked(arguments: dict[str, Any], ours: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments for llama_cpp.Llama, and the same with its defaults. ours: further names to suggest.

    Raises TypeError, with suggestions, for unknown names, which llama_cpp would ignore, and SubkvError about a number
    of another type or outside its range.
    """
    known = {name: value for name, value in arguments.items() if name not in STALE}
    unknown = sorted(known.keys() - _KNOWN.keys())
    if unknown:
        names = [*_KNOWN, *ours]
        similar = {name: next(iter(difflib.get_close_matches(name, names, 1)), None) for name in unknown}
        terms = [f"{name} (did you mean {near}?)" if near else name for name, near in similar.items()]
        raise TypeError(f"Llama: unknown keyword argument{'s' if len(unknown) > 1 else ''}: {', '.join(terms)}")
    known = {name: _number(name, value) for name, value in known.items()}
    return known, {**_KNOWN, **known}


def _number(name: str, value: Any) -> Any:
    """The value of a keyword. Raises SubkvError about it if it should be another number."""
    if value is None and (name in _OR_NONE or name not in {**_WHOLE, **_REAL}):
        return None
    if name in ("lora_path", "lora_base", "chat_format") and not isinstance(value, str):
        raise SubkvError(name, f"expected a text, found {shown(value)}")
    if name == "kv_overrides" and not isinstance(value, dict):
        raise SubkvError(name, f"expected a dict of metadata, found {shown(value)}")
    if name == "tensor_split":
        if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
            raise SubkvError(name, f"expected a list of shares, found {shown(value)}")
        return [real(name, share, 0.0, _ANY, "shares of 0 or more") for share in value]
    if name in _WHOLE:
        least, most, expected = _WHOLE[name]
        return whole(name, value, least, most, expected)
    if name in _REAL:
        return real(name, value, *_REAL[name])
    return value


def checked_path(name: str, value: Any) -> Path:
    """A path of the user. Raises SubkvError about `name` for another object, or a path that no system has."""
    try:
        path = os.fsdecode(value)
    except TypeError:
        path = "\0"
    if "\0" in path:
        raise SubkvError(name, f"expected the path of a file, found {shown(value)}")
    return Path(path)


def checked_text(name: str, value: Any) -> None:
    """Reject an object that is neither text nor None. Raises CacheError about `name`."""
    if not (value is None or isinstance(value, str)):
        raise CacheError(name, f"expected a text, found {shown(value)}")
