"""Checks keyword arguments for llama_cpp.Llama."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from typing import Any

from subkv.native.binding import llama_cpp

# Read on import: applications may later replace llama_cpp.Llama by our class.
_KNOWN = {
    name: parameter.default
    for name, parameter in inspect.signature(llama_cpp.Llama.__init__).parameters.items()
    if name not in ("self", "kwargs", "model_path")
}
# Ignored: LangChain's `device`, and arguments of earlier versions of llama-cpp-python that llama.cpp has removed
STALE = frozenset({"device", "f16_kv", "low_vram", "mul_mat_q", "n_gqa", "n_parts", "rms_norm_eps"})


def checked(arguments: dict[str, Any], ours: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments for llama_cpp.Llama, and the same with its defaults. ours: further names to suggest.

    Raises TypeError, with suggestions, for unknown names, which llama_cpp would ignore.
    """
    known = {name: value for name, value in arguments.items() if name not in STALE}
    unknown = sorted(known.keys() - _KNOWN.keys())
    if unknown:
        names = [*_KNOWN, *ours]
        similar = {name: next(iter(difflib.get_close_matches(name, names, 1)), None) for name in unknown}
        terms = [f"{name} (did you mean {near}?)" if near else name for name, near in similar.items()]
        raise TypeError(f"Llama: unknown keyword argument{'s' if len(unknown) > 1 else ''}: {', '.join(terms)}")
    return known, {**_KNOWN, **known}
