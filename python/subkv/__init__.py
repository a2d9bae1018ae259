"""subkv: llama.cpp with a KV cache of coefficients.

`import subkv` loads no library; it only sets the folder of libllama for llama_cpp. `subkv.Llama` loads the native
libraries; `subkv.SubspaceCache` needs the extra `torch`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from subkv.base.errors import SubkvError, install
from subkv.base.version import __version__
from subkv.native.paths import set_library_path_early

if TYPE_CHECKING:
    from subkv.engine.llama import Llama
    from subkv.engine.prompt_cache import PromptCache
    from subkv.torch.cache import SubspaceCache

__all__ = ["Llama", "PromptCache", "SubkvError", "SubspaceCache", "__version__"]

# `import llama_cpp` loads a libllama. Without this call, it would be another one than libsubkv's.
set_library_path_early()

_LAZY = {
    "Llama": "subkv.engine.llama",
    "PromptCache": "subkv.engine.prompt_cache",
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
