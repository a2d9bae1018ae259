"""Closed objects: their methods and properties raise one sentence instead of using freed memory."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from subkv.base.errors import ClosedError


def mark_closed(instance: Any, name: str = "") -> None:
    """From now on, public methods and properties of the object raise ClosedError, except close().

    Attributes of the object itself stay readable. name: of the object in the sentence; default: its class. The object
    changes its class, so that open objects need no checks.
    """
    kind: Any = type(instance)
    if not issubclass(kind, _Closed):
        object.__setattr__(instance, "__class__", _closed_class(kind, name or kind.__name__))


@functools.cache
def _closed_class(kind: Any, name: str) -> type:
    return type(kind.__name__, (_Closed, kind), {"_closed_name": name, "__module__": kind.__module__})


class _Closed:
    _closed_name: str

    def _refuse(self) -> NoReturn:
        raise ClosedError("", f"expected an open {self._closed_name}, found one that was closed")

    def __getattribute__(self, name: str) -> Any:
        get = functools.partial(object.__getattribute__, self)
        if name.startswith("_") or name == "close" or name in get("__dict__") or not hasattr(type(self), name):
            return get(name)
        return get("_refuse")()

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(getattr(type(self), name, None), property):
            self._refuse()
        object.__setattr__(self, name, value)

    def __enter__(self) -> Any:
        self._refuse()
