"""Lets `import llama_cpp` load subkv's libraries if it has none (CMAKE_ARGS=-DLLAMA_BUILD=OFF).

subkv.pth imports this module at every start of Python. The variables are set during the imports only, because child
processes may belong to other environments.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

# the modules of llama_cpp that load a library, and the variables for its folder
_VARIABLES = {"llama_cpp.llama_cpp": "LLAMA_CPP_LIB_PATH", "llama_cpp.mtmd_cpp": "MTMD_CPP_LIB"}


def _has_library(package: str) -> bool:
    """Whether llama_cpp has libraries of its own; pip leaves folders that hold other files."""
    try:
        names = os.listdir(os.path.join(package, "lib"))
    except OSError:
        return False
    return any(name.startswith(("libllama.", "llama.")) for name in names)


class LibraryFinder:
    """Finds the modules in _VARIABLES if neither llama_cpp nor the user has libraries for one of them."""

    @staticmethod
    def find_spec(name: str, path: "Sequence[str] | None" = None, target: object = None) -> "ModuleSpec | None":
        variable = _VARIABLES.get(name, "")
        of_user = any(known in os.environ for known in (variable, "LLAMA_CPP_LIB_PATH"))  # their libmtmd, too
        if not variable or not path or of_user or _has_library(path[0]):
            return None
        from importlib.machinery import PathFinder, SourceFileLoader

        class Loader(SourceFileLoader):
            def exec_module(self, module: "ModuleType") -> None:
                try:
                    from subkv.native.paths import lib_dir

                    folder = str(lib_dir())
                except ImportError:  # subkv is half removed: llama_cpp says that it finds no library
                    return super().exec_module(module)
                os.environ[variable] = folder
                try:
                    return super().exec_module(module)
                finally:
                    os.environ.pop(variable, None)

        spec = PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = Loader(name, spec.loader.path)
        return spec


sys.meta_path.insert(0, LibraryFinder)
