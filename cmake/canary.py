"""Tests the patches on other versions of llama.cpp: which hunks merge, and whether the main guarantees hold.

    python cmake/canary.py [--dry] [--no-programs] [--without upstream] VERSION|DIR …
    python cmake/canary.py --plugin [--dry] [--loadable] VERSION …

VERSION: a release of llama-cpp-python, whose source pip downloads; DIR: a llama.cpp tree. `--dry` only prints the hunks
that do not merge. Without it, every version is built (one job per core) and tested: bit identity of an ordinary context
with that version's stock library, exactness at full rank, splits, and a chat with the demo model. Patches of
architectures that a version does not have are left out. Exits with 1 if anything failed.

`--plugin` builds the unpatched ggml and libllama of a version, and runs test_plugin.py with the libggml-subkv.so of the
build that SUBKV_LIB_PATH names, one file for all versions; it also compiles the plug-in from this source against that
version's headers. It prints a row per version; finished builds are kept. `--loadable`: its ggml loads the CPU backend,
too, as those of ggml-org's releases do. `--dry`: only whether its ggml fits the file.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO / folder) for folder in ("cmake", "", "python")]
import llama_source as source  # noqa: E402
from patch_merge import merge  # noqa: E402
from unified_diff import DiffError  # noqa: E402

PIN = REPO / "runtime" / "llama.cpp"
PROMISES = {
    "hook off": ["tests/runtime/test_hook_off.py", "-k", "llama or gemma2 or demo"],
    "exactness": ["tests/runtime/test_exact.py"],
    "splits": ["tests/runtime/test_sequences.py"],
}
# libllama does not compute: without optimization and in few files it compiles in two minutes instead of ten
QUICK = """
function(subkv_quick)
    get_target_property(alone llama SOURCES)
    list(FILTER alone EXCLUDE REGEX "models/([^gqk]|granite|glm|gpt|grok)") # some have static functions of one name
    get_target_property(folder llama SOURCE_DIR)
    list(TRANSFORM alone REPLACE "^([^/])" "${folder}/\\\\1")
    set_source_files_properties(${alone} TARGET_DIRECTORY llama PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    set_target_properties(llama PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 12)
    target_compile_options(llama PRIVATE -O0)
endfunction()
cmake_language(DEFER DIRECTORY ${CMAKE_SOURCE_DIR} CALL subkv_quick)
"""
PARTS = ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER", "APP", "UI")
FEATURES = (
    "sse4_2",
    "avx",
    "avx2",
    "bmi2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512vbmi",
    "avx512_vnni",
    "avx512_bf16",
)
CHAT = """
import sys
from runtime.demo import model_path
from subkv import Llama
llama = Llama(str(model_path()), kv_cache="f16", n_ctx=512, verbose=False)
ask = [{"role": "user", "content": "Name the capital of France."}]
answer = llama.create_chat_completion(ask, max_tokens=24, temperature=0)["choices"][0]["message"]["content"]
sys.exit(0 if "Paris" in answer else f"expected Paris in the answer, found {answer!r}")
"""


def archive_of(version: str, folder: Path) -> Path:
    """The source archive of a release, from the cache or downloaded by pip; it has no pinned hash."""
    requirement = {"package": "llama-cpp-python", "version": version}
    name = source.archive_name(requirement)
    cached = source.cache_dir() / name
    if cached.is_file():
        return cached
    loaded = source.pip_download(requirement, folder)
    try:
        source.cache_dir().mkdir(parents=True, exist_ok=True)
        partial = cached.with_name(f"{name}.{os.getpid()}")
        partial.write_bytes(loaded.read_bytes())
        os.replace(partial, cached)
    except OSError:
        return loaded
    return cached


def write_bindings(archive: Path, folder: Path) -> None:
    """Write llama_cpp of the same release, whose structures match its llama.cpp."""
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            parts = member.name.split("/")
            if len(parts) > 2 and parts[1] == "llama_cpp" and ".." not in parts and member.isfile():
                stream = tar.extractfile(member)
                assert stream is not None
                target = folder.joinpath(*parts[1:])
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(stream.read())


def run(command: list[str], log: Path, env: dict[str, str] | None = None) -> bool:
    """Run a step at low priority, with its output in `log`."""
    with log.open("w", encoding="utf-8") as out:
        nice: Callable[[], object] | None = (lambda: os.nice(5)) if hasattr(os, "nice") else None
        done = subprocess.run(command, cwd=REPO, stdout=out, stderr=out, env=env, preexec_fn=nice, check=False)
    return done.returncode == 0


def tail(log: Path, n: int = 12) -> str:
    """The last lines of a failed step."""
    return "\n".join(f"    {line}" for line in log.read_text("utf-8", "replace").splitlines()[-n:])


def trial(build: Path, tree: Path, bindings: Path | None, programs: bool, without: list[str]) -> list[str]:
    """Build and test a tree onto which all hunks merge; returns the names of failed steps."""
    build.mkdir(parents=True, exist_ok=True)
    configure = ["cmake", "-S", str(REPO), "-B", str(build), "-G", "Ninja", "-DSUBKV_MERGE=ON", "-DSUBKV_STOCK=ON"]
    configure += [f"-DSUBKV_LLAMA_CPP_SOURCE={tree}", f"-DSUBKV_PROGRAMS={'ON' if programs else 'OFF'}"]
    configure += ["-DSUBKV_PAGE=OFF", f"-DSUBKV_WITHOUT_PATCHES={';'.join(without)}"]
    paths = [str(folder) for folder in (bindings, REPO / "python", REPO) if folder]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "SUBKV_LIB_PATH": str(build / "bin")}
    steps = {"configure": configure, "build": ["ninja", "-C", str(build), f"-j{os.cpu_count() or 1}"]}
    steps |= {name: [sys.executable, "-m", "pytest", "-q", *args] for name, args in PROMISES.items()}
    steps["chat"] = [sys.executable, "-c", CHAT]
    failed = []
    for name, command in steps.items():
        log, start = build / f"{name.replace(' ', '-')}.log", time.monotonic()
        passed = run(command, log, env)
        print(f"  {name}: {'passed' if passed else 'FAILED'} ({time.monotonic() - start:.0f} s)", flush=True)
        if not passed:
            print(f"{tail(log)}\n  full log: {log}")
            failed.append(name)
            if name in ("configure", "build"):
                break
    return failed


def write_source(archive: Path, build: Path) -> Path:
    """Write llama.cpp and the bindings of a release below `build`, unless they exist; returns llama.cpp's folder."""
    tree = build / "source"
    if not (build / "bindings").is_dir():
        source.write_tree(tree, source.read_sdist(archive), "")
        write_bindings(archive, build / "bindings")
    return tree


def loadable_options() -> list[str]:
    """A ggml with loadable backends, whose CPU backend rounds as the native one that it is compared with."""
    info = Path("/proc/cpuinfo")
    here = set(info.read_text().split()) if info.is_file() else set()
    names = {"sse4_2": "SSE42", "avx512f": "AVX512", "avx512vbmi": "AVX512_VBMI"}
    options = [f"-DGGML_{names.get(feature, feature.upper())}=ON" for feature in FEATURES if feature in here]
    return ["-DGGML_BACKEND_DL=ON", "-DGGML_NATIVE=OFF", *options]


def plugin_canary(version: str, loadable: bool, dry: bool, work: Path) -> bool:
    """Test the plug-in in an unpatched version; prints a row of the table. Returns whether all steps passed."""
    from runtime.launch.doors import PLUGIN, ggml_misfit
    from subkv.native.paths import lib_dir

    build = REPO / "build" / "canary" / f"plugin-{version}"
    build.mkdir(parents=True, exist_ok=True)
    tree = write_source(archive_of(version, work), build)
    stock = build / ("dry" if dry else "loadable" if loadable else "stock")
    (build / "quick.cmake").write_text(QUICK)
    configure = ["cmake", "-S", str(tree), "-B", str(stock), "-G", "Ninja", "-DBUILD_SHARED_LIBS=ON"]
    configure += ["-DGGML_CPU=OFF", "-DCMAKE_BUILD_TYPE=Debug"] if dry else ["-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={build / 'quick.cmake'}"]
    configure += [f"-DLLAMA_BUILD_{part}=OFF" for part in PARTS] + (loadable_options() if loadable else [])
    if shutil.which("ccache"):
        configure += [f"-DCMAKE_{language}_COMPILER_LAUNCHER=ccache" for language in ("C", "CXX")]
    shared = {**os.environ, "CCACHE_BASEDIR": str(build), "CCACHE_NOHASHDIR": "1"}  # files that versions have in common
    jobs, log = f"-j{len(os.sched_getaffinity(0))}", build / "log"
    for command in (configure, ["ninja", "-C", str(stock), jobs, *(["ggml"] if dry else ["llama", "ggml-cpu"])]):
        if not run(command, log, shared):
            print(f"{version}: cannot be built\n{tail(log)}\n  full log: {log}")
            return False
    base, registry = (stock / "bin" / f"lib{name}.so" for name in ("ggml-base", "ggml"))
    ggml = re.search(r"\.so\.([\d.]+)$", os.path.realpath(base))
    misfit = ggml_misfit(base, registry, lib_dir() / PLUGIN)
    cells, passed = [version + ", loadable" * loadable, ggml[1] if ggml else "?", misfit or "loads it"], not misfit
    if not dry:
        ours = REPO / "build" / "canary-plugin"  # as deep as build/dev, whose objects of the kernels ccache has
        configure = ["cmake", "-S", str(REPO), "-B", str(ours), "-G", "Ninja", f"-DSUBKV_LLAMA_CPP_SOURCE={tree}"]
        configure += ["-DSUBKV_MERGE=ON", f"-DSUBKV_WITHOUT_PATCHES={';'.join(source.QUEUES)}"]
        compiles = run(configure, log) and run(["ninja", "-C", str(ours), jobs, "ggml-subkv"], build / "ours.log")
        env = {**os.environ, "SUBKV_STOCK_LIBRARIES": str(base.parent), "SUBKV_STOCK_BINDINGS": str(build / "bindings")}
        tested = build / f"{stock.name}-test.log"
        tests_passed = run([sys.executable, "-m", "pytest", "-q", "tests/runtime/test_plugin.py"], tested, env)
        cells += ["compiles" if compiles else "does not compile", tail(tested, 1).strip()]
        passed = passed and compiles and tests_passed
    print(f"| {' | '.join(cells)} |", flush=True)
    return passed


def canary(name: str, pristine: source.Tree, dry: bool, programs: bool, without: list[str], work: Path) -> bool:
    """Merge one version, and unless `dry` build and test it. Returns whether all steps passed."""
    archive = None
    if Path(name).is_dir():
        theirs = source.read_dir(Path(name), programs)
    else:
        archive = archive_of(name, work)
        theirs = source.read_sdist(archive, programs)
    diffs = source.applied_patches(PIN, programs, without)
    absent = [diff for diff in diffs if diff.path.startswith("src/models/") and diff.path not in theirs]
    if absent:
        print(f"{name}: without the architectures of {', '.join(diff.name for diff in absent)}")
        without = [*without, *(diff.name for diff in absent)]
        diffs = [diff for diff in diffs if diff not in absent]
    merged, conflicts = merge(pristine, theirs, source.by_file(diffs))
    hunks = sum(len(diff.hunks) for diff in diffs)
    by_file = Counter(Path(conflict.path).name for conflict in conflicts)
    files = ", ".join(f"{file} {n}" for file, n in by_file.most_common())
    print(f"{name}: {len(conflicts)} of {hunks} hunks do not merge{': ' + files if files else ''}", flush=True)
    for conflict in conflicts:
        print(f"  {conflict}")
    if dry or conflicts:
        return not conflicts
    build = REPO / "build" / "canary" / Path(name).name
    tree = Path(name).resolve()
    if archive:
        tree = build / "source"
        source.write_tree(tree, theirs, "")
        write_bindings(archive, build / "bindings")
    return not trial(build, tree, build / "bindings" if archive else None, programs, without)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="merge the patches onto other versions of llama.cpp, and test them")
    parser.add_argument("versions", nargs="+", metavar="VERSION|DIR")
    parser.add_argument("--dry", action="store_true", help="print the hunks that do not merge; build nothing")
    parser.add_argument("--without", action="append", default=[], metavar="QUEUE|PATCH", help="leave these out")
    parser.add_argument("--no-programs", action="store_true", help="without llama.cpp's own programs")
    parser.add_argument("--plugin", action="store_true", help="test the plug-in in the unpatched versions instead")
    parser.add_argument("--loadable", action="store_true", help="with --plugin: ggml with loadable backends")
    args = parser.parse_args(argv)
    if args.loadable and not args.plugin or args.plugin and (args.without or args.no_programs):
        parser.error("expected --loadable with --plugin, and --without and --no-programs without it")
    passed = True
    try:
        with tempfile.TemporaryDirectory(prefix="subkv-canary-") as work:
            if args.plugin:
                for name in args.versions:
                    passed = plugin_canary(name, args.loadable, args.dry, Path(work)) and passed
                return 0 if passed else 1
            pristine = source.pinned_tree(PIN, Path(work), not args.no_programs)
            for name in args.versions:
                passed = canary(name, pristine, args.dry, not args.no_programs, args.without, Path(work)) and passed
    except (source.SourceError, DiffError, OSError, tarfile.TarError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
