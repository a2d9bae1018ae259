"""Where libsubkv, libllama and ggml lie, and how llama_cpp is told of it. No native library is loaded here."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from subkv.base.folders import package_folders

LIB_PATH = "LLAMA_CPP_LIB_PATH"  # llama_cpp's variables: the folder of libllama,
MTMD_LIB_PATH = "MTMD_CPP_LIB"  # and that of libmtmd, which reads pictures
SUBKV_LIB_PATH = "SUBKV_LIB_PATH"  # ours: libraries built by hand instead of the installed ones
SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")

_own_path: str | None = None  # the value of LIB_PATH that is of this module


def lib_dir() -> Path:
    """The folder that holds libsubkv, libllama and ggml: $SUBKV_LIB_PATH, else the installed package's `lib`.

    Raises ImportError when libsubkv is not there.
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
    """Have `import llama_cpp` take the libllama of this folder, here and in processes that are started from here.

    Raises ImportError where the user's environment names another folder.
    """
    global _own_path
    found = os.environ.get(LIB_PATH)
    if found is not None and found != _own_path and Path(found).resolve() != folder:
        raise ImportError(f"{LIB_PATH}: expected {folder} or no value, found {found}; unset it to use subkv")
    os.environ[LIB_PATH] = _own_path = str(folder)
    os.environ.update({name: value for name, value in mtmd_variable(folder).items() if name not in os.environ})


def mtmd_variable(folder: Path) -> dict[str, str]:
    """The variable that has `import llama_cpp.mtmd_cpp` take the libmtmd of this folder, if there is one."""
    return {MTMD_LIB_PATH: str(folder)} if (folder / f"libmtmd{SUFFIX}").is_file() else {}


def own_library_path() -> str | None:
    """The value of LLAMA_CPP_LIB_PATH that set_library_path() has set in this process, if it has."""
    return _own_path


def set_library_path_early() -> None:
    """set_library_path() on `import subkv`; what stands in the way is said when the libraries are loaded."""
    if "llama_cpp.llama_cpp" not in sys.modules and LIB_PATH not in os.environ:
        with contextlib.suppress(ImportError):
            set_library_path(lib_dir())
