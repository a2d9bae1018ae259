"""The lines that `subkv.Llama` prints about its cache, and when."""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from subkv.base.text import filled, printable
from subkv.engine.cache import CacheChoice
from subkv.engine.stats import KVStats, cache_line, smaller_type

_silent: contextvars.ContextVar[bool] = contextvars.ContextVar("silent", default=False)
_announced: dict[str, object] = {}  # files of this process's models


@contextlib.contextmanager
def unannounced() -> Iterator[None]:
    """Inside the block, this thread announces no cache: for programs, which print lines of their own."""
    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)


def report_cache(path: Path, choice: CacheChoice, stats: KVStats, verbose: bool) -> None:
    """Print the cache of a model to stderr if verbose; else only one that the user has not chosen, once per process."""
    if verbose and not (choice.automatic and choice.coded):
        lines = [cache_line(stats), choice.note, choice.fit]
    elif verbose or (choice.automatic and not _silent.get() and _is_first(path)):
        lines = [announcement(choice, stats)]
    else:
        return
    if sys.stderr is None:
        return
    with contextlib.suppress(Exception):  # it is closed, or an object of the user's that fails
        for line in filter(None, lines):
            print(filled(printable(line), sys.stderr), file=sys.stderr)


def _is_first(path: Path) -> bool:
    """Whether this process has announced no cache of the file yet. True for one of several threads."""
    mine = object()
    return _announced.setdefault(os.path.realpath(path), mine) is mine


def announcement(choice: CacheChoice, stats: KVStats) -> str:
    """Source, bits and size of a cache that the user has not chosen, and how to choose another one, in one line."""
    if not choice.coded:
        return choice.note
    smaller = smaller_type(stats)
    few = f"{smaller} takes less at {stats.n_cells} tokens" if smaller else ""
    return "; ".join(filter(None, [cache_line(stats), few, choice.note, "kv_cache='f16' uses none", choice.gain]))
