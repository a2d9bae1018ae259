"""Loads the plug-in for another llama-cpp-python: `subkv run` puts this folder at the front of PYTHONPATH.

A ggml with a CPU backend inside reads GGML_BACKEND_PATH only for --device of llama.cpp's own programs, and
`llama_cpp.Llama` by default leaves all layers on the CPU and flash attention off. So the plug-in is loaded when
llama_cpp is imported, its device gets the layers of a model that is to have none on a device (n_gpu_layers=0), and
flash attention that is off is automatic. A model whose layers are to be on devices gets the GPUs, if there are any,
and not the plug-in's device, to which llama.cpp would give a part of the layers. Python imports only the first
sitecustomize; this one runs the next.

A llama_cpp of another version than our libraries fit, which a wrapper such as `timeout` has started, gets its own
llama.cpp and the plug-in instead of our libraries, whose structures may differ from those that it knows.
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
MODULES = (MODULE, "llama_cpp.mtmd_cpp")  # that load libraries
PLUGIN, DEVICE = "libggml-subkv.so", b"SUBKV"
PATCHED = "_Z20llama_subkv_store_onv"  # of our libllama, which needs no plug-in
CONTEXTS = ("llama_init_from_model", "llama_new_context_with_model")
LOADERS = ("llama_model_load_from_file", "llama_model_load_from_splits", "llama_load_model_from_file")
ALL_LAYERS = 0x7FFFFFFF
AUTO, OFF = -1, 0  # enum llama_flash_attn_type
GPU, INTEGRATED = 1, 2  # enum ggml_backend_dev_type
OURS = "SUBKV_LLAMA_CPP"  # VERSION:FOLDER of our libraries, and the llama-cpp-python that they fit
LIBRARIES = ("LLAMA_CPP_LIB_PATH", "MTMD_CPP_LIB")
MARK = "_subkv_plugin"  # of sys: another installation's sitecustomize has run before


def _say(why: str) -> None:
    print(f"subkv: plug-in: ordinary K/V cache: {why}", file=sys.stderr)


def _changed(function: "Callable[..., Any]", change: "Callable[[Any], None]") -> "Callable[..., Any]":
    """A function of llama_cpp whose last argument, a structure of parameters, is a changed copy of the caller's."""

    def call(*arguments: "Any") -> "Any":
        params = type(arguments[-1]).from_buffer_copy(arguments[-1])
        change(params)
        return function(*arguments[:-1], params)

    return call


def _devices(lib: "Any", device: int) -> "tuple[Any, Any]":
    """Arrays for llama_model_params.devices: the plug-in's device, and the GPUs; None if there are none."""
    import ctypes

    others: dict[int, list[int]] = {}
    for i in range(lib.ggml_backend_dev_count()):
        other = lib.ggml_backend_dev_get(i)
        if other != device:
            others.setdefault(lib.ggml_backend_dev_type(other), []).append(other)
    gpus = others.get(GPU) or others.get(INTEGRATED) or []  # as llama.cpp chooses
    return (ctypes.c_void_p * 2)(device, None), (ctypes.c_void_p * (len(gpus) + 1))(*gpus, None) if gpus else None


def _load_plugin(module: "ModuleType", path: str) -> None:
    """Load the plug-in into the ggml of a llama_cpp.llama_cpp. Raises AttributeError or OSError."""
    import ctypes

    lib = module._lib
    if hasattr(lib, PATCHED):
        return
    for name, argument, result in (
        ("reg_count", None, ctypes.c_size_t),
        ("load", ctypes.c_char_p, ctypes.c_void_p),
        ("dev_by_name", ctypes.c_char_p, ctypes.c_void_p),
        ("dev_count", None, ctypes.c_size_t),
        ("dev_get", ctypes.c_size_t, ctypes.c_void_p),
        ("dev_type", ctypes.c_void_p, ctypes.c_int),
    ):
        function = getattr(lib, f"ggml_backend_{name}")
        function.argtypes, function.restype = [argument] if argument else [], result
    if not lib.ggml_backend_dev_by_name(DEVICE):
        if lib.ggml_backend_reg_count() == 0:  # all are loadable, and llama.cpp would load them, this one too
            lib.ggml_backend_load_all()
        if not lib.ggml_backend_dev_by_name(DEVICE):
            lib.ggml_backend_load(os.fsencode(path))
    device = lib.ggml_backend_dev_by_name(DEVICE)
    if not device:
        raise OSError(f"expected that this ggml loads {path}, found that it does not")
    ours, gpus = _devices(lib, device)

    def choose_device(params: "Any") -> None:
        if params.devices:  # the program's choice
            return
        if params.n_gpu_layers == 0:
            params.n_gpu_layers, params.devices = ALL_LAYERS, ctypes.addressof(ours)
        elif gpus is not None:
            params.devices = ctypes.addressof(gpus)
            _say("layers are on a GPU; n_gpu_layers=0 codes them, on the CPU")

    def allow_flash_attention(params: "Any") -> None:
        if params.flash_attn_type == OFF:
            params.flash_attn_type = AUTO

    for names, change in ((LOADERS, choose_device), (CONTEXTS, allow_flash_attention)):
        for name in names:
            if hasattr(module, name):
                setattr(module, name, _changed(getattr(module, name), change))


def _other_version(package: str) -> str:
    """The version of a llama_cpp, whose folder is `package`, that would load our libraries, which do not fit it; or "".

    SUBKV_LLAMA_CPP: what they fit, and their folder.
    """
    import re

    ours, _, folder = os.environ.get(OURS, "").partition(":")
    if not folder or os.environ.get(LIBRARIES[0]) != folder:
        return ""
    try:
        with open(os.path.join(package, "__init__.py"), encoding="utf-8") as file:
            found = re.search(r"^__version__ *= *[\"']([^\"']*)", file.read(), re.M)
    except (OSError, ValueError):
        return ""
    return found[1] if found and found[1] != ours else ""


class _Libraries:
    """During an import llama_cpp finds our libraries only if they fit; processes that start later may need them."""

    def __init__(self, fit: bool) -> None:
        folder = os.environ.get(OURS, "").partition(":")[2] + os.sep
        ours = [name for name in LIBRARIES if (os.environ.get(name, "") + os.sep).startswith(folder)]
        self._hidden = [] if fit else ours

    def __enter__(self) -> None:
        self._kept = {name: os.environ.pop(name) for name in self._hidden}

    def __exit__(self, *_: object) -> None:
        os.environ.update(self._kept)


def _plugin_of(version: str) -> str:
    """The plug-in for a llama_cpp of another version, or "" if the user wants none. Says which llama.cpp it loads."""
    ours, _, folder = os.environ[OURS].partition(":")
    if os.environ.get("SUBKV", "") in ("", "off"):
        return ""
    plugin = os.path.join(folder, PLUGIN)
    why = f"llama-cpp-python {version} is not {ours} and loads its own llama.cpp"
    if not os.path.isfile(plugin):
        _say(f"{why}; expected the plug-in {plugin}, found none")
        return ""
    print(f"subkv: {why}, which gets the plug-in", file=sys.stderr)
    return plugin


class PluginFinder:
    """Finds llama_cpp.llama_cpp by the other finders, and loads the plug-in when the module has run."""

    @staticmethod
    def find_spec(
        name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name not in MODULES or not path:
            return None
        version = _other_version(path[0])
        plugin = os.environ.get("GGML_BACKEND_PATH", "")
        plugin = plugin if os.path.basename(plugin) == PLUGIN and name == MODULE else ""
        if not (version or plugin):
            return None
        libraries = _Libraries(fit=not version)
        finders = [finder for finder in sys.meta_path if finder is not PluginFinder and hasattr(finder, "find_spec")]
        with libraries:
            spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        run = getattr(spec and spec.loader, "exec_module", None)
        if spec is None or run is None:
            return spec

        def exec_module(module: "ModuleType") -> None:
            with libraries:
                run(module)
            file = plugin or (_plugin_of(version) if name == MODULE else "")
            try:
                if file:
                    _load_plugin(module, file)
            except (AttributeError, OSError) as error:
                _say(str(error))

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


if not hasattr(sys, MARK):
    setattr(sys, MARK, True)
    sys.meta_path.insert(0, PluginFinder)  # type: ignore[arg-type]
_run_next()
