"""llama_cpp and libsubkv, linked to the same libllama; their logs and errors."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from subkv.base.folders import PLUGIN_ONLY
from subkv.base.progress import progress_bar
from subkv.native import library

if PLUGIN_ONLY:
    raise ImportError(
        f"libllama{library.SUFFIX}: expected that of package subkv (pip install subkv), because this needs our "
        "llama.cpp, found package subkv-plugin, which has none"
    )
library.load()  # binds llama_cpp to our libllama; must come before llama_cpp is imported

import llama_cpp  # noqa: E402
from llama_cpp import _internals as internals  # noqa: E402
from llama_cpp import llama_cpp as C  # noqa: E402

from subkv.native.log import LogLines, captured_log, last_log_error  # noqa: E402

__all__ = ["C", "LogLines", "captured_log", "internals", "last_error", "last_log_error", "llama_cpp", "native"]

native = library.load  # libsubkv
last_error = library.last_error  # reason of this thread's latest libsubkv failure, "" if none


def model_meta(handle: Any, key: str) -> str:
    """A value of a loaded model's metadata as text, "" if missing."""
    return text_of(functools.partial(C.llama_model_meta_val_str, handle, key.encode()))


def text_of(read: Callable[[Any, int], int]) -> str:
    """Text from a C function that writes to a buffer and returns the length; repeated if the buffer is too small."""
    buffer = ctypes.create_string_buffer(4096)
    n = read(buffer, len(buffer))
    if n >= len(buffer):
        buffer = ctypes.create_string_buffer(n + 1)
        n = read(buffer, len(buffer))
    return buffer.value.decode("utf-8", "surrogateescape") if n >= 0 else ""


@contextlib.contextmanager
def loading(path: str | os.PathLike[str], show: bool = True) -> Iterator[Any]:
    """A progress bar while llama.cpp loads `path`; yields its llama_model_params.progress_callback.

    Ctrl-C stops the loading and raises KeyboardInterrupt at the end of the block.
    """
    with progress_bar(f"loading {os.path.basename(path)}", 100, "%", show) as bar:
        if bar.disable:
            yield C.llama_progress_callback(0)
            return
        interrupted = False

        def report(fraction: float, _: Any) -> bool:
            nonlocal interrupted
            try:
                bar.update(int(100 * fraction) - bar.n)
            except KeyboardInterrupt:  # the C caller would drop it
                interrupted = True
            return not interrupted

        try:
            yield C.llama_progress_callback(report)
        finally:
            if interrupted:
                raise KeyboardInterrupt
