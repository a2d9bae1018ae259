"""Collects the facts for a bug report as one JSON object, and a sentence for each problem."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from runtime.doctor.cache_folder import KINDS, cached
from runtime.doctor.formats import FORMATS
from runtime.doctor.probe import probe
from runtime.launch.arguments import is_llama_cpp_program
from runtime.launch.bundled import REPO, pinned
from runtime.launch.variables import READ
from subkv.base.errors import SubkvError, system_reason
from subkv.base.folders import PLUGIN_ONLY, cache_folder, home_folder, package_folders
from subkv.base.version import __version__
from subkv.native.paths import LIB_PATH, SUBKV_LIB_PATH, SUFFIX, lib_dir, own_library_path

OURS = {
    *READ,
    *("SUBKV_STORE", "SUBKV_STORE_MIB", "SUBKV_STORE_MOVED", "SUBKV_INDEXER", "SUBKV_SLIDING", "SUBKV_KERNEL"),
    *("SUBKV_CACHE", "SUBKV_RESUME", "SUBKV_DEFER", "SUBKV_ALLOW_HOST", "SUBKV_SEQUENCES"),
    SUBKV_LIB_PATH,
}
OTHERS = (
    rf"{LIB_PATH}|XDG_(CACHE|STATE)_HOME|HF_\w+|(DY)?LD_(LIBRARY_PATH|PRELOAD)|OMP_\w+|(LLAMA|GGML|CUDA|VK|MESA|LP)_\w+"
)
SECRET = re.compile(r"TOKEN|KEY|PASSWORD|SECRET|CREDENTIAL|HEADER")
LIBRARIES = ("libsubkv", *(("libggml-subkv",) if PLUGIN_ONLY else ("libllama", "libggml")), "libggml-base")
LEAST_FREE = 16 << 20  # bytes; of a file with bases and its temporary copy
LIMITS = {
    "address space": "RLIMIT_AS",
    "data": "RLIMIT_DATA",
    "locked memory": "RLIMIT_MEMLOCK",
    "files": "RLIMIT_NOFILE",
}


def report() -> tuple[dict[str, Any], list[str]]:
    """The facts, and one sentence for each problem. The home folder is `~` in both."""
    broken: list[str] = []
    facts: dict[str, Any] = {"versions": _versions(broken), "libraries": _libraries(broken)}
    native = probe()
    for key in ("error", "kernel_error"):
        if reason := native.pop(key, None):
            broken += [] if reason in broken else [reason]
    versions = facts["versions"]
    versions["llama.cpp"] = native.pop("llama_cpp_commit", None)
    versions["ggml"] = native.pop("ggml", None)
    available = native.pop("bytes_available", None)
    facts["processor"] = _processor(native)
    facts["devices"] = [device for device in native.get("devices", []) if device["kind"] != "cpu"]
    facts["backends"] = native.get("backends", [])
    facts["device_kernels"] = native.get("device_kernels")
    facts["memory"] = {"bytes": _memory(), "bytes_available": available, "limits": _limits()}
    facts["environment"] = environment()
    facts["cache"] = _cache(broken)
    facts["formats"] = {
        name: {"files": kind.files, "reads": list(kind.versions), "writes": [kind.versions[-1]]}
        for name, kind in FORMATS.items()
    }
    facts["broken"] = broken
    shortened: dict[str, Any] = json.loads(hide_home(json.dumps(facts)))
    return shortened, shortened["broken"]


def hide_home(text: str) -> str:
    """Replace the home folder by `~` in all paths of a text."""
    folder = home_folder()
    for home in sorted({str(folder), os.path.realpath(folder)}, key=len, reverse=True) if folder else []:
        if len(home) > 1:
            text = re.sub(rf"(?<![\w/]){re.escape(home)}(?![\w.-])", "~", text)
    return text


def _versions(broken: list[str]) -> dict[str, str | None]:
    versions: dict[str, str | None] = {"subkv": __version__, "commit": _commit()}
    for package in ("llama-cpp-python", "numpy", "gguf", "safetensors"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    required = pinned()
    if required and versions["llama-cpp-python"] not in (required, None):
        broken.append(
            f"llama-cpp-python: expected {required}, found {versions['llama-cpp-python']}; "
            f"pip install llama-cpp-python=={required}"
        )
    if not PLUGIN_ONLY and importlib.util.find_spec("llama_cpp") is None:
        broken.append("llama-cpp-python: expected the package llama_cpp, found none; install subkv again")
    versions["Python"] = platform.python_version()
    versions["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    if hasattr(os, "confstr") and "CS_GNU_LIBC_VERSION" in os.confstr_names:
        versions["C library"] = os.confstr("CS_GNU_LIBC_VERSION")
    return versions


def _commit() -> str | None:
    """Commit of the checkout, of the clone that was built, or of the repository that pip installed from."""
    if (REPO / ".git").exists():
        try:
            command = ["git", "-C", str(REPO), "describe", "--always", "--dirty", "--abbrev=9"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
            return done.stdout.strip() or None
        except (OSError, subprocess.SubprocessError):
            return None
    for path in package_folders("commit.txt"):
        with contextlib.suppress(OSError):
            if built := path.read_text("utf-8").strip():
                return built
    try:
        url = importlib.metadata.distribution("subkv").read_text("direct_url.json")
        return str(json.loads(url or "{}")["vcs_info"]["commit_id"])
    except (importlib.metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        return None


def _libraries(broken: list[str]) -> dict[str, Any]:
    try:
        folder = lib_dir()
    except ImportError as error:
        broken.append(str(error))
        return {"folder": None, "files": [], "programs": []}
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    for name in LIBRARIES:
        if f"{name}{SUFFIX}" not in names:
            broken.append(f"{name}{SUFFIX}: expected it in {folder}, found none; install subkv again")
    return {
        "folder": str(folder),
        "files": [name for name in names if name.endswith(SUFFIX)],
        "programs": [name for name in names if is_llama_cpp_program(name) and not name.endswith(SUFFIX)],
    }


def _processor(native: dict[str, Any]) -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    try:
        match = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text("utf-8", "replace"), re.M)
        model = match[1] if match else model
    except OSError:
        pass
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "name": model,
        "cores": os.cpu_count(),
        "cores_usable": usable,
        "kernel": native.get("kernel"),
        "kernels": native.get("kernels", []),
        "features": native.get("features"),
    }


def _memory() -> int | None:
    """Bytes of the machine's memory."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _limits() -> dict[str, int]:
    """Resource limits of this process."""
    try:
        import resource
    except ImportError:  # Windows
        return {}
    limits = {}
    for name, limit in LIMITS.items():
        soft = resource.getrlimit(getattr(resource, limit))[0]
        if soft != resource.RLIM_INFINITY:
            limits[name] = soft
    return limits


def environment() -> dict[str, str]:
    """Relevant variables that are set; values of secrets are hidden."""
    variables = {}
    for name, value in sorted(os.environ.items()):
        if name == LIB_PATH and value == own_library_path():
            continue
        ours = name == "SUBKV" or name.startswith("SUBKV_")
        if ours or re.fullmatch(OTHERS, name):
            variables[name] = "(set)" if SECRET.search(name) else value
            if ours and name not in OURS:
                variables[name] += "  (unknown to this version)"
    return variables


def _why_unwritable(folder: Path) -> str:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return "Permission denied"  # to this user, whose processes may have further rights
    except OSError as error:
        return system_reason(error)


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return LEAST_FREE


def _cache(broken: list[str]) -> dict[str, Any]:
    sizes: dict[str, dict[str, Any]] = {
        kind: {"files": 0, "bytes": 0, "about": about} for kind, (about, _) in KINDS.items()
    }
    try:
        folder = cache_folder()
    except SubkvError as error:
        broken.append(str(error))
        return {"folder": None, "kinds": sizes}
    existing = folder
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        broken.append(f"XDG_CACHE_HOME: cannot write to {existing}: {_why_unwritable(existing)}")
    elif (free := _free(existing)) < LEAST_FREE:
        reason = f"expected {LEAST_FREE >> 20} MiB of free space for bases, found {free / (1 << 20):.1f} MiB"
        broken.append(f"XDG_CACHE_HOME: {reason} in {existing}")
    try:
        for file in cached(folder):
            sizes[file.kind]["files"] += 1
            sizes[file.kind]["bytes"] += file.size
    except OSError as error:
        broken.append(f"XDG_CACHE_HOME: cannot read {folder}: {system_reason(error)}")
    return {"folder": str(folder), "kinds": sizes}
