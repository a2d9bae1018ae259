"""Captures ggml's and llama.cpp's log, and finds the error in it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

from subkv.base.folders import PLUGIN_ONLY
from subkv.base.text import printable
from subkv.native import library

library.load()  # binds llama_cpp to our libllama; must come before llama_cpp is imported

_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_set: Any
_default: Any
if PLUGIN_ONLY:
    _set, _default = library.ggml().ggml_log_set, _CALLBACK(0)  # ggml's own
else:
    from llama_cpp import _logger, llama_cpp

    _set, _default = llama_cpp.llama_log_set, _logger.llama_log_callback

# enum ggml_log_level; llama_cpp's own table is of an older version
LOG_ERROR = 4
LOG_CONT = 5

LogLines = list[tuple[int, str]]


class _Logging:
    """The process's receiver of the log. Threads that capture the log wait for each other."""

    def __init__(self) -> None:
        self.reset()
        if hasattr(os, "register_at_fork"):  # in a child, a thread that does not exist there may hold the lock
            os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        self.lock = threading.RLock()
        self.callback = _default


_logging = _Logging()


@contextlib.contextmanager
def captured_log(forward: bool) -> Iterator[LogLines]:
    """Collect (level, line) of the log inside the block; `forward` also prints it to stderr."""
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
        outer, _logging.callback = _logging.callback, _CALLBACK(collect)
        _set(_logging.callback, ctypes.c_void_p(0))
        try:
            yield lines
        finally:
            _logging.callback = outer
            _set(outer, ctypes.c_void_p(0))


def last_log_error(lines: LogLines) -> str:
    """The most specific error in a captured log, without the name of the C function; "" if there is none."""
    errors = [line for level, line in lines if level == LOG_ERROR and line.strip()]
    of_model = [line for line in errors if "error loading model" in line]
    line = (of_model or errors or [""])[0]  # the first is the cause; later ones come from its callers
    line = re.sub(r"^\w+: ", "", line)
    return re.sub(r"^(error loading \w+: )?(\w+: )?", "", line).strip()
