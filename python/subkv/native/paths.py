"""The folder of libsubkv, libllama and ggml, and its environment variables. Loads no native library."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from subkv.base.folders import PLUGIN_ONLY, package_folders

LIB_PATH = "LLAMA_CPP_LIB_PATH"  # llama_cpp's variable for the folder of libllama
MTMD_LIB_PATH = "MTMD_CPP_LIB"  # the same for libmtmd, which reads pictures
SUBKV_LIB_PATH = "SUBKV_LIB_PATH"  # ours: replaces the installed libraries
SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")

_own_path: str | None = None  # the value to which this module has set LIB_PATH


def lib_dir() -> Path:
    """The folder of libsubkv, libllama and ggml: $SUBKV_LIB_PATH, else `lib` of the installed package.

    Raises ImportError if libsubkv is missing there.
    """
    name = f"libsubkv{SUFFIX}"
    override = os.environ.get(SUBKV_LIB_PATH)
    folders = [Path(override)] if override else package_folders("lib")
    for folder in folders:
        if (folder / name).is_file():
            return folder.resolve()
    raise ImportError(
        f"{SUBKV_LIB_PATH if override else 'subkv'}: expected {name} in {' or '.join(map(str, folders))}, found none;"
        " install the package with pip install ."
    )


def set_library_path(folder: Path) -> None:
    """Make `import llama_cpp` load the libllama of this folder, in this process and its children.

    Raises ImportError if the user's environment names another folder.
    """
    global _own_path
    value = os.environ.get(LIB_PATH)
    if value is not None and value != _own_path and Path(value).resolve() != folder:
        raise ImportError(f"{LIB_PATH}: expected {folder} or no value, found {value}; unset it to use subkv")
    os.environ[LIB_PATH] = _own_path = str(folder)
    os.environ.update({name: value for name, value in mtmd_variable(folder).items() if name not in os.environ})


def mtmd_variable(folder: Path) -> dict[str, str]:
    """The variable that makes `import llama_cpp.mtmd_cpp` load the libmtmd of this folder, if there is one."""
    return {MTMD_LIB_PATH: str(folder)} if (folder / f"libmtmd{SUFFIX}").is_file() else {}


def own_library_path() -> str | None:
    """The value of LLAMA_CPP_LIB_PATH that set_library_path() has set in this process, if any."""
    return _own_path


def set_library_path_early() -> None:
    """set_library_path() on `import subkv`; errors are reported later, when the libraries are loaded."""
    if not PLUGIN_ONLY and "llama_cpp.llama_cpp" not in sys.modules and LIB_PATH not in os.environ:
        with contextlib.suppress(ImportError):
            set_library_path(lib_dir())
