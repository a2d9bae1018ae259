"""llama_cpp and libsubkv, linked to the same libllama; their logs and errors."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from subkv.base.progress import progress_bar
from subkv.base.text import printable
from subkv.native import library

library.load()  # binds llama_cpp to our libllama; must come before llama_cpp is imported

import llama_cpp  # noqa: E402
from llama_cpp import _internals as internals  # noqa: E402
from llama_cpp import _logger  # noqa: E402
from llama_cpp import llama_cpp as C  # noqa: E402

__all__ = ["C", "LogLines", "captured_log", "internals", "last_error", "last_log_error", "llama_cpp", "native"]

# enum ggml_log_level; llama_cpp's own table is of an older version
LOG_ERROR = 4
LOG_CONT = 5


native = library.load  # libsubkv
last_error = library.last_error  # reason of this thread's latest libsubkv failure, "" if none

LogLines = list[tuple[int, str]]


class _Logging:
    """The process's receiver of llama.cpp's log. Threads that capture the log wait for each other."""

    def __init__(self) -> None:
        self.reset()
        if hasattr(os, "register_at_fork"):  # in a child, a thread that does not exist there may hold the lock
            os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        self.lock = threading.RLock()
        self.callback = _logger.llama_log_callback


_logging = _Logging()


@contextlib.contextmanager
def captured_log(forward: bool) -> Iterator[LogLines]:
    """Collect (level, line) of llama.cpp's log inside the block; `forward` also prints it to stderr."""
    lines: LogLines = []

    def collect(level: int, text: bytes, _user: Any) -> None:
        line = text.decode("utf-8", "replace")
        if forward:
            print(printable(line, keep="\n\t"), end="", file=sys.stderr, flush=True)  # it may quote the model's file
        if level == LOG_CONT and lines:
            lines[-1] = (lines[-1][0], lines[-1][1] + line.rstrip("\n"))
        else:
            lines.append((level, line.rstrip("\n")))

    with _logging.lock:
        outer, _logging.callback = _logging.callback, C.llama_log_callback(collect)
        C.llama_log_set(_logging.callback, ctypes.c_void_p(0))
        try:
            yield lines
        finally:
            _logging.callback = outer
            C.llama_log_set(outer, ctypes.c_void_p(0))


def last_log_error(lines: LogLines) -> str:
    """The most specific error in a captured log, without the name of the C function; "" if there is none."""
    errors = [line for level, line in lines if level == LOG_ERROR and line.strip()]
    of_model = [line for line in errors if "error loading model" in line]
    line = (of_model or errors or [""])[0]  # the first is the cause; later ones come from its callers
    line = re.sub(r"^\w+: ", "", line)
    return re.sub(r"^(error loading \w+: )?(\w+: )?", "", line).strip()


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
