"""What a user asks of a KV cache. Importing this module loads no library."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from subkv.format.window import Window
from subkv.native.bases import AUTO


@dataclasses.dataclass(frozen=True)
class CacheRequest:
    """The requested KV cache. The members are arguments of subkv.Llama, which documents them."""

    kv_cache: str = AUTO
    type_k: str | int | None = None
    type_v: str | int | None = None
    bases: Path | None = None
    window: Window = Window()
    sidecar: bool = True
    kv_bits: float | None = None
    kv_memory: str | int | None = None

    def arguments(self) -> dict[str, Any]:
        """The members as arguments of subkv.Llama."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "window"]
        return {**{name: getattr(self, name) for name in names}, **self.window.requested()}

    def only_coded(self) -> list[str]:
        """The requested members that only a coded cache has."""
        own = ("bases", "kv_bits", "kv_memory")
        return [*(name for name in own if getattr(self, name) is not None), *self.window.requested()]


AUTOMATIC = CacheRequest()
