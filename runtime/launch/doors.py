"""How a program gets the coded cache: by our libllama, or by the plug-in that its own llama.cpp loads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runtime.launch import programs
from runtime.launch.arguments import ProgramArguments, is_llama_cpp_program, program_name, split_devices
from runtime.launch.bundled import PYTHON, bundled_libllama, interpreter_of, pinned, python_command, script_of
from runtime.launch.variables import LIBRARY_PATH
from subkv.base.errors import SubkvError
from subkv.base.folders import COMMAND

PLUGIN = "libggml-subkv.so"
BACKEND_PATH = "GGML_BACKEND_PATH"
DEVICE, DEVICES = "SUBKV", "LLAMA_ARG_DEVICE"  # the plug-in's device; the variable of --device
OLLAMA_FLASH, OLLAMA_TYPE = "OLLAMA_FLASH_ATTENTION", "OLLAMA_KV_CACHE_TYPE"
_LATER = f"; {DEVICES}: all layers on the CPU"
IN_PYTHON = Path(__file__).resolve().parent / "in_python"  # for PYTHONPATH
OURS = "SUBKV_LLAMA_CPP"  # for in_python: the version of llama-cpp-python that our libraries fit, and their folder
_GPUS = "cuda|hip|musa|vulkan|sycl|opencl|openvino|cann|metal|webgpu|hexagon|et"
_MISFIT = """
import ctypes, sys
base, registry, plugin = (ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL) for name in sys.argv[1:])
plugin.subkv_plugin_misfit.restype = ctypes.c_char_p
misfit = plugin.subkv_plugin_misfit().decode()
print(f"its ggml{misfit}" if misfit else "")
"""


@dataclass(frozen=True)
class Door:
    """The way by which a program gets the coded cache."""

    plugin: Path | None  # the file of the plug-in, or None if the program uses our libllama
    why: str  # what the user reads behind the program's name
    by_name: bool = False  # its ggml has a CPU backend inside, so libllama loads the plug-in only for --device
    gpu: bool = False  # a GPU's backend is inside as well
    variables: Mapping[str, str] = field(default_factory=dict)  # what else the plug-in needs in this program
    search: bool = False  # our libraries must be in the folders that the linker searches


def _beside_a_gpu(listed: str) -> str:
    """What a user has to know whose ggml loads a GPU's backend from its own folder, or "" if it has none there."""
    registry = programs.library_in(listed, "libggml")
    names = os.listdir(registry[1].parent) if registry and registry[1].parent.is_dir() else []
    gpus = sorted(name for name in names if re.fullmatch(rf"libggml-({_GPUS})\.so", name))
    return f"; layers on a GPU ({gpus[0]}) keep f16 caches: --device {DEVICE} codes them, on the CPU" if gpus else ""


def plugin_file(libraries: Path) -> Path:
    """The plug-in beside our libraries. Raises SubkvError about `plugin`."""
    path = libraries / PLUGIN
    if not path.is_file():
        raise SubkvError("plugin", f"expected {path}, found none; it is built on Linux, unless -DSUBKV_PLUGIN=OFF")
    return path


def ggml_misfit(base: Path, registry: Path, plugin: Path) -> str:
    """Why a ggml does not fit the plug-in, found in a process of its own, or "" if it does."""
    # an empty entry would be the current folder; -I: without modules of that folder
    folders = os.pathsep.join(filter(None, [str(base.parent), str(registry.parent), os.environ.get(LIBRARY_PATH)]))
    command = [sys.executable, "-I", "-c", _MISFIT, *map(str, (base, registry, plugin))]
    environment = {**os.environ, LIBRARY_PATH: folders}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode == 0:
        return done.stdout.strip()
    lines = done.stderr.strip().splitlines()
    return f"its ggml does not fit the plug-in ({lines[-1] if lines else f'exit code {done.returncode}'})"


def our_door(libraries: Path, listed: str | None, alone: str | None, environment: Mapping[str, str]) -> Door:
    """The door of a program that uses our libraries. listed: its libraries with our folder in the search path, alone:
    without it; None: unknown, "": it has none, as a script. environment: the user's.

    Another program does not get the search path, because a llama.cpp that it loads later would find our libraries.
    """
    if listed is not None and programs.library_in(listed, "libllama") is None:
        return Door(
            None,
            f"loads no llama.cpp when it starts; a llama-cpp-python of version {pinned()} in it uses our libraries in "
            f"{libraries}, one of another version the plug-in; if it is no Python and loads another llama.cpp later, "
            f"start it by `{COMMAND} run --plugin`",
            variables=guard_variables(libraries, environment),
        )
    found = programs.library_in(alone or "", "libllama")  # by a path of the program
    return Door(None, f"finds our libraries in {libraries}", search=not found or found[1].parent.resolve() != libraries)


def _later_door(libllama: Path, libraries: Path, path: Path, environment: Mapping[str, str]) -> Door:
    """The door of a program that loads a llama.cpp of its own while it runs. Raises SubkvError about `program`."""
    loader = programs.linker(Path(sys.executable))
    listed = programs.listed_by(loader, libllama, environment) if loader else None
    reason = "a shared library that it needs is missing" if listed is None else _misfit(listed, libraries)
    if reason:
        raise SubkvError(
            "program",
            f"expected one that loads {libraries}/libllama.so, or a llama.cpp that can load the plug-in, found {path}, "
            f"which brings {libllama}: {reason}",
        )
    assert listed is not None
    why = f"brings {libllama}, whose ggml loads the plug-in{_LATER}{_beside_a_gpu(listed)}"
    return Door(plugin_file(libraries), why, by_name=True, variables=python_variables(environment))


def guard_variables(libraries: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with which a llama-cpp-python of another version than ours, which a program starts or imports in a way
    that we cannot see, loads its own llama.cpp with the plug-in instead of our libraries.
    """
    version = pinned()
    return {OURS: f"{version}:{libraries}", **python_variables(environment)} if version else {}


def _require_variables(path: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raises SubkvError about a Python that would not read PYTHONPATH, by which the plug-in gets into it."""
    interpreter = interpreter_of(path, environment)
    if interpreter is None or interpreter.kind != PYTHON:
        return
    if python_command([*interpreter.options, *(() if interpreter.script else arguments)]).isolated:
        raise SubkvError(
            "program",
            f"expected a Python that imports a sitecustomize of PYTHONPATH, which loads the plug-in, found {path} with "
            "-E, -I or -S",
        )


def python_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with which llama-cpp-python loads the plug-in, also in a Python that the program starts."""
    own = environment.get("PYTHONPATH")
    of_ours = os.path.join("launch", IN_PYTHON.name)  # of any installation
    folders = [folder for folder in own.split(os.pathsep) if not folder.endswith(of_ours)] if own else []
    return {"PYTHONPATH": os.pathsep.join([str(IN_PYTHON), *folders])}


def choose_door(
    program: str,
    path: Path,
    libraries: Path,
    environment: Mapping[str, str],
    with_libraries: Mapping[str, str],
    plugin: bool,
    arguments: Sequence[str] = (),
) -> Door:
    """The door of a program. environment: the user's without our libraries; with_libraries: with them.

    plugin: not our libraries. arguments: of the program, to find the llama.cpp that it loads while it runs. Raises
    SubkvError about `program` if it has no door.
    """
    if program_name(program) == "ollama":
        return _ollama_door(path, libraries, environment)
    listed = programs.listed_libraries(path, environment)
    other = programs.other_llama_cpp(program, path, libraries, listed)
    if plugin and _is_patched(listed):
        found = f"{path}, which has the coefficient cache already and needs no plug-in"
        raise SubkvError("program", f"expected one that loads an unpatched llama.cpp, found {found}")
    if plugin and not other:  # as node and Python, which load a llama.cpp later
        _require_variables(path, arguments, environment)
        why = "gets the plug-in, which the llama.cpp that it loads must be able to load"
        variables = python_variables(environment)
        return Door(plugin_file(libraries), f"{why}{_LATER}", by_name=True, variables=variables)
    if not (plugin or is_llama_cpp_program(program)) and programs.library_in(listed or "", "libllama") is None:
        bundled = bundled_libllama(path, arguments, environment)
        if bundled and bundled.parent.resolve() != libraries:
            _require_variables(path, arguments, environment)
            return _later_door(bundled, libraries, path, environment)
        if script_of(path) is not None:
            return our_door(libraries, "", "", environment)
    # llama.cpp's programs need the libraries of their own version, also where ours have the same names
    if not plugin and (not (other and is_llama_cpp_program(program)) or _is_patched(listed)):
        with_ours = programs.listed_libraries(path, with_libraries)
        if not programs.other_llama_cpp(program, path, libraries, with_ours):
            return our_door(libraries, with_ours, listed, environment)
    if listed is None:
        other, reason = "does not start", "a shared library that it needs is missing"
    else:
        reason = _misfit(listed, libraries)
    if not reason:
        assert listed is not None
        static, known = programs.library_in(listed, "libggml-cpu") is not None, is_llama_cpp_program(program)
        why = f"{other}, whose ggml loads the plug-in"
        if static and not known:
            why += ", if the program calls ggml_backend_load_all"
        gpu = re.search(rf"^\s*libggml-({_GPUS})\.so", listed, re.M) is not None
        return Door(plugin_file(libraries), why + ("" if gpu else _beside_a_gpu(listed)), static and known, gpu)
    remedy = f"; {programs.INSTALL}" if is_llama_cpp_program(program) and not plugin else ""
    raise SubkvError(
        "program",
        f"expected a program that loads {libraries}/libllama.so, or a llama.cpp that can load the plug-in, "
        f"found {path}, which {other}: {reason}{remedy}",
    )


def _ollama_door(path: Path, libraries: Path, environment: Mapping[str, str]) -> Door:
    """The door of Ollama, which starts a llama-server of its own for each model.

    Raises SubkvError about `program`, or about a variable of Ollama that excludes the plug-in.
    """
    folders = [folder / "lib" / "ollama" for folder in (path.resolve().parent.parent, path.resolve().parent)]
    server = next((folder / "llama-server" for folder in folders if (folder / "llama-server").is_file()), None)
    if server is None:
        raise SubkvError("program", f"expected llama-server in {folders[0]}, as newer versions have it, found none")
    listed = programs.listed_libraries(server, {**environment, LIBRARY_PATH: str(server.parent)})
    reason = "it does not start" if listed is None else _misfit(listed, libraries)
    if listed is None or reason:
        raise SubkvError("program", f"expected a llama-server that can load the plug-in, found {server}: {reason}")
    if environment.get(OLLAMA_FLASH, "").lower() in ("0", "f", "false"):  # Ollama takes other values for true
        raise SubkvError(OLLAMA_FLASH, f"expected 1, which the plug-in needs, found {environment[OLLAMA_FLASH]}")
    if environment.get(OLLAMA_TYPE, "f16") not in ("", "f16"):
        reason = "expected none, because the plug-in codes every cache that has bases"
        raise SubkvError(OLLAMA_TYPE, f"{reason}, found {environment[OLLAMA_TYPE]}")
    why = f"starts {server}, whose ggml loads the plug-in, unless Ollama finds a GPU"
    static = programs.library_in(listed, "libggml-cpu") is not None
    # without the variable, Ollama switches flash attention off where it does not know a device
    return Door(plugin_file(libraries), why, static, variables={OLLAMA_FLASH: "1"})


def _is_patched(listed: str | None) -> bool:
    """Whether the libllama of a program is that of another subkv."""
    found = programs.library_in(listed or "", "libllama")
    try:
        return found is not None and b"llama_subkv_store_on" in found[1].read_bytes()
    except OSError:
        return False


def _misfit(listed: str, libraries: Path) -> str:
    """Why a program with the libraries `listed` cannot load the plug-in, or "" if it can."""
    if _is_patched(listed):
        return "it has the coefficient cache already"
    base, registry = (programs.library_in(listed, name) for name in ("libggml-base", "libggml"))
    if base is None or registry is None:
        return "its ggml is no shared library"
    try:
        if BACKEND_PATH.encode() not in registry[1].read_bytes():
            return f"its ggml does not read {BACKEND_PATH}"
    except OSError:
        return f"{registry[1]} cannot be read"
    return ggml_misfit(base[1], registry[1], plugin_file(libraries))


def plugin_variables(plugin: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with which a llama.cpp loads the plug-in. Raises SubkvError if the user's name another backend."""
    other = environment.get(BACKEND_PATH, "")
    if other and os.path.basename(other) != PLUGIN:
        raise SubkvError(
            BACKEND_PATH, f"expected no other backend, because ggml loads one by it, found {other}; unset it"
        )
    return {BACKEND_PATH: os.path.abspath(plugin)}


def without_plugin(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what `subkv env --plugin` has set for other programs."""
    if os.path.basename(environment.get(BACKEND_PATH, "")) != PLUGIN:
        return dict(environment)
    kept = {name: value for name, value in environment.items() if name not in (BACKEND_PATH, DEVICES)}
    devices = [name for name in split_devices(environment.get(DEVICES, "")) if name and name.upper() != DEVICE]
    return kept | ({DEVICES: ",".join(devices)} if devices else {})


def device_variables(door: Door, devices: Sequence[str]) -> dict[str, str]:
    """Variables with which a program of llama.cpp gives its layers to the plug-in. devices: of its arguments.

    Raises SubkvError about `--device`.
    """
    if devices and DEVICE not in map(str.upper, devices):
        reason = f"expected {DEVICE}, the device of the plug-in, among the devices, found {','.join(devices)}"
        raise SubkvError("--device", reason)
    if devices or not door.by_name:
        return {}
    if door.gpu:
        raise SubkvError(
            "--device",
            f"expected {DEVICE} (all layers on the CPU), because this ggml does not load the plug-in otherwise, "
            "found none",
        )
    return {DEVICES: DEVICE}


def door_environment(door: Door, read: ProgramArguments) -> dict[str, str]:
    """The environment of a program with these arguments: with the plug-in's variables only if a cache may be coded.

    Raises as plugin_variables() and device_variables().
    """
    if door.plugin is None:
        return {**read.environment, **door.variables}
    if read.ordinary:  # the plug-in's device would take its layers
        return without_plugin(read.environment)
    devices = {} if read.prints else device_variables(door, read.devices)
    return {**read.environment, **door.variables, **plugin_variables(door.plugin, read.environment), **devices}
