"""Arguments of llama_cpp.Llama: which there are, and which of its older versions it still takes."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from typing import Any

from subkv.native.binding import llama_cpp

# Now, as applications put a class of ours in place of it.
_KNOWN = {
    name: parameter.default
    for name, parameter in inspect.signature(llama_cpp.Llama.__init__).parameters.items()
    if name not in ("self", "kwargs", "model_path")
}
# Of earlier versions of llama-cpp-python, and LangChain's `device`: it takes and ignores them. What they meant is gone
# from llama.cpp, or it decides by itself.
STALE = frozenset({"device", "f16_kv", "low_vram", "mul_mat_q", "n_gqa", "n_parts", "rms_norm_eps"})


def checked(given: dict[str, Any], ours: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments for llama_cpp.Llama, and those together with its defaults. ours: further names, to suggest.

    Raises TypeError for names that no version knew, with those that may be meant; llama_cpp ignores them.
    """
    passed = {name: value for name, value in given.items() if name not in STALE}
    unknown = sorted(passed.keys() - _KNOWN.keys())
    if unknown:
        names = [*_KNOWN, *ours]
        meant = [next(iter(difflib.get_close_matches(name, names, 1)), None) for name in unknown]
        said = [f"{name} (did you mean {near}?)" if near else name for name, near in zip(unknown, meant, strict=True)]
        raise TypeError(f"Llama: unknown keyword argument{'s' if len(unknown) > 1 else ''}: {', '.join(said)}")
    return passed, {**_KNOWN, **passed}
