"""Reads facts from the native libraries in a separate process, because a library may crash.

`python -m runtime.doctor.probe` loads them and prints one JSON object.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from typing import Any

from subkv.base.errors import system_reason
from subkv.base.folders import PLUGIN_ONLY

SECONDS = 120  # timeout; a driver may start slowly or hang
KINDS = ("cpu", "gpu", "integrated gpu", "accelerator", "meta")  # enum ggml_backend_dev_type


def probe() -> dict[str, Any]:
    """The output of main() in a child process; only `error`, one sentence, if the child fails."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "runtime.doctor.probe"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
    except subprocess.TimeoutExpired:
        return {"error": f"libraries: expected them to load within {SECONDS} s, found no answer"}
    except OSError as error:
        return {"error": f"libraries: expected a Python that starts, found {system_reason(error)}"}
    with contextlib.suppress(ValueError):
        facts = json.loads(done.stdout.splitlines()[-1] if done.stdout.strip() else "")
        if isinstance(facts, dict) and done.returncode == 0:
            return facts
    return {"error": f"libraries: expected them to load, found that the process {_ended(done)}"}


def _ended(done: subprocess.CompletedProcess[str]) -> str:
    """How a child ended, in words."""
    if done.returncode < 0:
        try:
            name = signal.Signals(-done.returncode).name
        except ValueError:
            name = f"signal {-done.returncode}"
        built = "; they were built for another processor" if name == "SIGILL" else ""
        return f"was ended by {name}{built}"
    last = [line for line in done.stderr.splitlines() if line.strip()]
    return f"ended with {done.returncode}" + (f": {last[-1].strip()}" if last else "")


def _devices(registry: ctypes.CDLL) -> tuple[list[dict[str, Any]], list[str]]:
    """Devices and backends as llama.cpp lists them. registry: libggml."""
    from subkv.native import library

    base = library.ggml()
    pointer, text, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    counts: library.Signatures = {
        "ggml_backend_dev_count": (size, []),
        "ggml_backend_dev_get": (pointer, [size]),
        "ggml_backend_reg_count": (size, []),
        "ggml_backend_reg_get": (pointer, [size]),
    }
    of_one: library.Signatures = {
        "ggml_backend_dev_name": (text, [pointer]),
        "ggml_backend_dev_description": (text, [pointer]),
        "ggml_backend_dev_type": (ctypes.c_int, [pointer]),
        "ggml_backend_dev_memory": (None, [pointer, ctypes.POINTER(size), ctypes.POINTER(size)]),
        "ggml_backend_reg_name": (text, [pointer]),
    }
    library.declare(registry, counts)
    library.declare(base, of_one)
    devices = []
    for i in range(registry.ggml_backend_dev_count()):
        device, free, total = registry.ggml_backend_dev_get(i), size(), size()
        base.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        kind = base.ggml_backend_dev_type(device)
        devices.append(
            {
                "name": base.ggml_backend_dev_name(device).decode("utf-8", "replace"),
                "description": base.ggml_backend_dev_description(device).decode("utf-8", "replace").strip(),
                "kind": KINDS[kind] if 0 <= kind < len(KINDS) else str(kind),
                "bytes_free": free.value,
                "bytes": total.value,
            }
        )
    backends = [
        base.ggml_backend_reg_name(registry.ggml_backend_reg_get(i)).decode("utf-8", "replace")
        for i in range(registry.ggml_backend_reg_count())
    ]
    return devices, backends


def _facts() -> dict[str, Any]:
    """Raises ImportError with a sentence if a library is missing or does not load."""
    from subkv.native import library

    lib, base = library.load(), library.ggml()
    versions: library.Signatures = {
        "subkv_ops_count": (ctypes.c_int32, []),
        "subkv_ops_name": (ctypes.c_char_p, [ctypes.c_int32]),
    }
    library.declare(lib, versions)
    base.ggml_version.restype = ctypes.c_char_p
    facts = {} if PLUGIN_ONLY else _facts_of_llama_cpp()
    kernel, error = lib.subkv_kernel_name(), None
    if kernel is None:
        error = library.last_error()
    device_kernels = lib.subkv_device_kernel_name()
    return {
        "ggml": base.ggml_version().decode(),
        "llama_cpp_commit": library.llama_cpp_commit(),
        "kernel": kernel.decode() if kernel else None,
        "kernel_error": error,
        "kernels": [lib.subkv_ops_name(i).decode() for i in range(lib.subkv_ops_count())],
        "device_kernels": device_kernels.decode() if device_kernels else None,
        **facts,
    }


def _facts_of_llama_cpp() -> dict[str, Any]:
    from subkv.engine.memory import available_memory
    from subkv.native import library
    from subkv.native.binding import C

    C.llama_backend_init()  # loads backends that are separate libraries
    devices, backends = _devices(ctypes.CDLL(str(library.lib_dir() / f"libggml{library.SUFFIX}")))
    return {
        "features": C.llama_print_system_info().decode("utf-8", "replace").strip(" |"),
        "backends": backends,
        "devices": devices,
        "bytes_available": available_memory(),
    }


def main() -> None:
    """Print _facts(), or the reason why the libraries do not load."""
    try:
        facts = _facts()
    except ImportError as error:
        facts = {"error": str(error)}
    print(f"\n{json.dumps(facts)}")


if __name__ == "__main__":
    main()
