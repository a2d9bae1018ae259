"""subkv: llama.cpp whose KV cache holds coefficients.

The import only tells llama_cpp the folder of our libllama. `subkv.Llama` loads the native libraries;
`subkv.SubspaceCache` needs the extra `torch`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from subkv.base.errors import SubkvError, install
from subkv.base.version import __version__
from subkv.native.paths import set_library_path_early

if TYPE_CHECKING:
    from subkv.engine.drafts import DraftModel, PromptLookup
    from subkv.engine.llama import Llama
    from subkv.engine.prompt_cache import PromptCache
    from subkv.torch.cache import SubspaceCache

__all__ = ["DraftModel", "Llama", "PromptCache", "PromptLookup", "SubkvError", "SubspaceCache", "__version__"]

# llama_cpp loads its libllama when it is imported. Without this call, `import subkv, llama_cpp` would load another one.
set_library_path_early()

_LAZY = {
    "DraftModel": "subkv.engine.drafts",
    "Llama": "subkv.engine.llama",
    "PromptCache": "subkv.engine.prompt_cache",
    "PromptLookup": "subkv.engine.drafts",
    "SubspaceCache": "subkv.torch.cache",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        try:
            return getattr(importlib.import_module(_LAZY[name]), name)
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "transformers"):
                raise
            reason = f"subkv.{name}: expected package {error.name}, found none: {install('torch')}"
            raise ModuleNotFoundError(reason, name=error.name) from error
    raise AttributeError(f"module 'subkv' has no attribute {name!r}")
