"""Loads the plug-in for another llama-cpp-python: `subkv run` puts this folder at the front of PYTHONPATH.

A ggml with a CPU backend inside reads GGML_BACKEND_PATH only for --device of llama.cpp's own programs, and
`llama_cpp.Llama` by default leaves all layers on the CPU and flash attention off. So the plug-in is loaded when
llama_cpp is imported, its device gets the layers of a model that is to have none on a device (n_gpu_layers=0), and
flash attention that is off is automatic. Python imports only the first sitecustomize; this one runs the next.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

MODULE = "llama_cpp.llama_cpp"
PLUGIN, DEVICE = "libggml-subkv.so", b"SUBKV"
CONTEXTS = ("llama_init_from_model", "llama_new_context_with_model")
LOADERS = ("llama_model_load_from_file", "llama_model_load_from_splits", "llama_load_model_from_file")
ALL_LAYERS = 0x7FFFFFFF
AUTO, OFF = -1, 0  # enum llama_flash_attn_type


def _with_layers(load: "Callable[..., Any]", devices: "Any") -> "Callable[..., Any]":
    """A function of llama_cpp that loads a model, whose last argument has the parameters."""

    def load_on_device(*arguments: "Any") -> "Any":
        params = arguments[-1]
        if getattr(params, "n_gpu_layers", None) == 0 and hasattr(params, "devices"):
            import ctypes

            params.n_gpu_layers, params.devices = ALL_LAYERS, ctypes.addressof(devices)
        return load(*arguments)

    return load_on_device


def _with_flash_attention(init: "Callable[..., Any]") -> "Callable[..., Any]":
    """A function of llama_cpp that makes a context, whose last argument has the parameters."""

    def init_with_flash_attention(*arguments: "Any") -> "Any":
        if getattr(arguments[-1], "flash_attn_type", None) == OFF:
            arguments[-1].flash_attn_type = AUTO
        return init(*arguments)

    return init_with_flash_attention


def _load_plugin(module: "ModuleType", path: str) -> None:
    """Load the plug-in into the ggml of a llama_cpp.llama_cpp. Raises AttributeError or OSError."""
    import ctypes

    lib = module._lib
    lib.ggml_backend_reg_count.restype = ctypes.c_size_t
    for name in ("ggml_backend_load", "ggml_backend_dev_by_name"):
        function = getattr(lib, name)
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_void_p
    if not lib.ggml_backend_dev_by_name(DEVICE):
        if lib.ggml_backend_reg_count() == 0:  # all are loadable, and llama.cpp would load them, this one too
            lib.ggml_backend_load_all()
        else:
            lib.ggml_backend_load(os.fsencode(path))
    device = lib.ggml_backend_dev_by_name(DEVICE)
    if not device:
        raise OSError(f"expected that this ggml loads {path}, found that it does not")
    devices = (ctypes.c_void_p * 2)(device, None)
    for names, wrap in ((LOADERS, lambda load: _with_layers(load, devices)), (CONTEXTS, _with_flash_attention)):
        for name in names:
            if hasattr(module, name):
                setattr(module, name, wrap(getattr(module, name)))


class PluginFinder:
    """Finds llama_cpp.llama_cpp, and loads the plug-in behind it."""

    @staticmethod
    def find_spec(
        name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        plugin = os.environ.get("GGML_BACKEND_PATH", "")
        if name != MODULE or os.path.basename(plugin) != PLUGIN:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not PluginFinder)
        spec = next(filter(None, others), None)
        run = getattr(spec and spec.loader, "exec_module", None)
        if spec is None or run is None:
            return spec

        def exec_module(module: "ModuleType") -> None:
            run(module)
            try:
                _load_plugin(module, plugin)
            except (AttributeError, OSError) as error:
                print(f"subkv: plug-in: ordinary K/V cache: {error}", file=sys.stderr)

        spec.loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]
        return spec


def _run_next() -> None:
    """The sitecustomize that this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


sys.meta_path.insert(0, PluginFinder)  # type: ignore[arg-type]
_run_next()
