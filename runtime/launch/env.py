"""`subkv env`: prints the variables that `subkv run` sets, for shells, services and containers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import click

from runtime import options
from runtime.launch.arguments import split_devices
from runtime.launch.bundled import other_package, pinned
from runtime.launch.doors import (
    DEVICES,
    Door,
    device_variables,
    guard_variables,
    plugin_file,
    plugin_variables,
    python_variables,
)
from runtime.launch.variables import (
    ANY_MODEL,
    cache_variables,
    library_variables,
    program_path,
    request_options,
)
from subkv.base.command import command
from subkv.base.errors import SubkvError, concerning
from subkv.base.folders import PLUGIN_ONLY
from subkv.engine.request import CacheRequest


def _sh(name: str, value: str) -> str:
    quoted = value.replace("'", "'\\''")
    return f"export {name}='{quoted}'"


def _fish(name: str, value: str) -> str:
    quoted = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"set -gx {name} '{quoted}'"


def _check(name: str, value: str) -> None:
    """Reject a value that does not fit on one line. Raises SubkvError about `form`."""
    if any(character < " " or character == "\x7f" for character in value):
        reason = f"expected a value without line ends and control characters, found {value!r}"
        raise SubkvError("form", f"{name}: {reason}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise SubkvError("form", f"{name}: expected a value in UTF-8, found {os.fsencode(value)!r}") from error


def _systemd(name: str, value: str) -> str:
    _check(name, value)
    quoted = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'Environment="{name}={quoted}"'


def _docker(name: str, value: str) -> str:
    _check(name, value)
    return f"{name}={value}"


LINES: dict[str, Callable[[str, str], str]] = {"sh": _sh, "fish": _fish, "systemd": _systemd, "docker": _docker}


def format_variables(variables: dict[str, str], form: str) -> bytes:
    """The variables in a format: a name of LINES, or json. Raises SubkvError about `form`."""
    if form == "json":
        return json.dumps(variables, indent=2).encode()
    return os.fsencode("\n".join(LINES[form](name, value) for name, value in variables.items()))


def _other_python(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """A Python of the PATH whose llama-cpp-python does not fit our libraries, and its version."""
    for name in ("python", "python3"):
        path = shutil.which(name, path=environment.get("PATH"))
        if path and (other := other_package(Path(path), Path.cwd(), environment)):
            return path, other[1]
    return None


@command()
@options.model_option(required=False, text="model file (GGUF); its bases are looked up, or derived from its weights")
@request_options
@click.option("--plugin", is_flag=True, help="for a llama.cpp that others built, which loads the cache as a plug-in")
@click.option("--format", "form", type=click.Choice([*LINES, "json"]), default="sh", help="syntax")
def main(model: str | None, request: CacheRequest, plugin: bool, form: str) -> None:
    """Print the variables that give programs a coded cache: eval "$(subkv env -m model.gguf)".

    For systemd and docker, the variables name the file with the bases, because services and containers have another
    cache folder.
    """
    from subkv.native.library import lib_dir  # native libraries: not for a --help

    if request.kv_memory is not None:
        raise SubkvError("kv_memory", "expected --kv-bits, because the context size is not known here, found it")
    plugin = plugin or PLUGIN_ONLY
    service = form in ("systemd", "docker")
    models = [Path(model)] if model else []
    with concerning(model_path="model", kv_cache="model"):
        variables, notes = cache_variables(models, request, name_bases=service or plugin)
    libraries = lib_dir()
    path = {} if service or plugin else program_path(libraries, os.environ)
    if plugin:
        file, devices = plugin_file(libraries), os.environ.get(DEVICES)
        variables = plugin_variables(file, os.environ) | variables
        if not service:
            variables |= python_variables(os.environ)
        notes = [line.replace("-ctk f16 uses none", "SUBKV=off: f16") for line in notes]
        variables |= device_variables(Door(file, "", by_name=True), split_devices(devices) if devices else ())
    elif service or (other := _other_python(os.environ | path)) is None:
        guard = {} if service else guard_variables(libraries, os.environ)
        variables = path | library_variables(libraries) | guard | variables
    else:
        variables = path | variables
        notes.append(
            f"{other[0]}: its llama-cpp-python is {other[1]}, not {pinned()}: it keeps its own libraries and cache; "
            "`subkv run` gives it the plug-in"
        )
    notes = notes or [ANY_MODEL]
    if DEVICES in variables:
        notes.append(f"{DEVICES}: all layers on the CPU")
    if not service and not plugin:
        own = f"llama-cli and others of {path['PATH'].split(os.pathsep)[0]}" if path else "this build has none"
        notes.append(f"llama.cpp's programs: {own}; those of other builds have ordinary caches")
    for line in notes:
        options.note(line)
    click.echo(format_variables(variables, form))


if __name__ == "__main__":
    main()
