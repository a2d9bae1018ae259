"""subkv: llama.cpp whose KV cache holds coefficients.

Nothing happens on import; `subkv.Llama` binds the native libraries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from subkv.llama import Llama
    from subkv.prompt_cache import PromptCache

__all__ = ["Llama", "PromptCache", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Llama":
        from subkv.llama import Llama

        return Llama
    if name == "PromptCache":
        from subkv.prompt_cache import PromptCache

        return PromptCache
    raise AttributeError(f"module 'subkv' has no attribute {name!r}")
