"""The installed libraries and their ctypes declarations."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import capi
import llama_cpp
import pytest
from each import each

from research.experiments.sketch import SketchParams
from subkv.format.adapt import HeadStats, Params
from subkv.native import library as _lib

REPO = Path(__file__).resolve().parents[2]
HAS_LIB = (Path(llama_cpp.__file__).parent / "lib").is_dir()
TYPES = {
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "const char *": ctypes.c_char_p,
}
STRUCTURES = {
    "subkv_cache_params": _lib.CacheParams,
    "subkv_stats": _lib.Stats,
    "subkv_observed": _lib.Observed,
    "subkv_sketch_params": SketchParams,
    "subkv_adapt_params": Params,
    "subkv_adapt_stats": HeadStats,
}


LOAD = "from subkv.native import library as _lib; _lib.load()"
HEADERS = {"include/subkv": _lib.SIGNATURES, "capi/subkv_research": capi.research(), "capi/subkv_test": capi.TEST}
HEADERS |= {"include/subkv_adapt": capi.adapt(), "capi/adapt/subkv_adapt_test": capi.ADAPT_TEST}


def header(name: str) -> str:
    """One of runtime/native without its comments."""
    path = REPO / "runtime" / "native" / f"{name}.h"
    return re.sub(r"//.*", "", path.read_text(encoding="utf-8"))


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a new interpreter without variables for llama_cpp, except those in `env`."""
    base = {k: v for k, v in os.environ.items() if k != _lib.LIB_PATH}
    return subprocess.run([sys.executable, "-c", code], env=base | env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", HEADERS)
def test_every_function_is_declared(name: str) -> None:
    declared = re.findall(r"SUBKV_API\s[^;]*?(\w+)\s*\(([^;]*?)\)\s*;", header(name))
    found = {name: 0 if args.strip() in ("", "void") else args.count(",") + 1 for name, args in declared}
    assert found == {name: len(arguments) for name, (_, arguments) in HEADERS[name].items()}


@each("name", STRUCTURES)
def test_structures(name: str) -> None:
    match = re.search(rf"struct {name} \{{(.*?)\}} {name};", "".join(map(header, HEADERS)), re.S)
    assert match
    fields = []
    for kind, names in re.findall(r"((?:const )?\w+(?: \*)?)\s+([\w\s,]+);", match[1]):
        fields += [(field.strip(), TYPES[kind]) for field in names.split(",")]
    assert fields == STRUCTURES[name]._fields_


def test_import_names_the_folder_and_loads_nothing() -> None:
    done = run(
        "import os, sys, subkv, subkv.native.library as l;"
        "print('llama_cpp' in sys.modules, 'ctypes' in sys.modules and 'numpy' in sys.modules);"
        "print(os.environ[l.LIB_PATH] == str(l.lib_dir()))"
    )
    assert done.stdout.split() == ["False", "False", "True"], done.stderr


def test_llama_cpp_may_be_imported_before_the_class_is_used() -> None:
    done = run("import subkv, llama_cpp; print(issubclass(subkv.Llama, llama_cpp.Llama))")
    assert done.stdout.split() == ["True"], done.stderr


@pytest.fixture
def site(tmp_path: Path) -> str:
    """Code that makes a folder with what the wheel installs for `import llama_cpp` one of Python's site folders."""
    for name in ("subkv_finder.py", "subkv.pth"):
        shutil.copy(REPO / "python" / name, tmp_path)
    return f"import site; site.addsitedir({str(tmp_path)!r}); "


@pytest.mark.skipif(HAS_LIB, reason="llama_cpp has libraries (install it with CMAKE_ARGS=-DLLAMA_BUILD=OFF)")
def test_llama_cpp_without_libraries_loads_ours(site: str) -> None:
    """It needs no `import subkv` first, and children get no variable."""
    show = "print(llama_cpp.llama_cpp._lib._name, 'LLAMA_CPP_LIB_PATH' in os.environ)"
    done = run(f"{site} import os, llama_cpp; {show}; {LOAD}")
    assert done.stdout.split() == [str(_lib.lib_dir() / f"libllama{_lib.SUFFIX}"), "False"], done.stderr


@each(
    "file, variable, expected",
    [
        (None, None, "ours ours"),
        ("cached.txt", None, "ours ours"),  # left over
        ("libllama.so", None, "None None"),
        (None, "/theirs", "/theirs None"),  # their llama.cpp needs its own libmtmd
    ],
)
def test_the_folder_of_llama_cpps_libraries(
    site: str, tmp_path: Path, file: str | None, variable: str | None, expected: str
) -> None:
    package = tmp_path / "llama_cpp"
    package.mkdir(exist_ok=True)
    shutil.rmtree(package / "lib", ignore_errors=True)
    if file:
        (package / "lib").mkdir()
        (package / "lib" / file).touch()
    (package / "__init__.py").write_text("from . import llama_cpp, mtmd_cpp\n")
    for name, read in (("llama_cpp", "LLAMA_CPP_LIB_PATH"), ("mtmd_cpp", "MTMD_CPP_LIB")):
        (package / f"{name}.py").write_text(f"import os; print(os.environ.get('{read}'))\n")
    without = "os.environ.pop('MTMD_CPP_LIB', None)"  # of this process
    code = f"{site} import os, sys; {without}; sys.path.insert(0, {str(tmp_path)!r}); import llama_cpp"
    done = run(code, **({} if variable is None else {"LLAMA_CPP_LIB_PATH": variable}))
    assert done.stdout.split() == expected.replace("ours", str(_lib.lib_dir())).split(), done.stderr


def test_python_starts_when_subkv_is_half_removed(site: str, tmp_path: Path) -> None:
    if not HAS_LIB:
        done = run(f"{site} import sys; sys.modules['subkv'] = None; import llama_cpp")
        assert "Shared library with base name 'llama' not found" in done.stderr.splitlines()[-1]
    (tmp_path / "subkv_finder.py").unlink()
    done = run(f"{site} print('started')")
    assert (done.stdout, done.stderr) == ("started\n", "")


def test_import_works_without_libraries(tmp_path: Path) -> None:
    done = run("import os, subkv; print('LLAMA_CPP_LIB_PATH' in os.environ)", SUBKV_LIB_PATH=str(tmp_path))
    assert (done.stdout.split(), done.stderr) == (["False"], "")
    folder = str(_lib.lib_dir())  # named after the import, in place of the installed ones
    code = f"import os, subkv; os.environ['SUBKV_LIB_PATH'] = {folder!r}; {LOAD}; print(_lib.lib_dir())"
    done = run(code, SUBKV_LIB_PATH=str(tmp_path))
    assert done.stdout.strip() == folder, done.stderr


def test_import_keeps_the_users_variables(tmp_path: Path) -> None:
    done = run("import os, subkv; print(os.environ['LLAMA_CPP_LIB_PATH'])", LLAMA_CPP_LIB_PATH=str(tmp_path))
    assert done.stdout.strip() == str(tmp_path)


def test_one_libllama() -> None:
    """The process maps one libllama and one of every ggml library, all from one folder."""
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc/self/maps")
    done = run(LOAD + "; print(_lib.lib_dir()); print(open('/proc/self/maps').read())")
    assert done.returncode == 0, done.stderr
    folder, maps = done.stdout.split("\n", 1)
    mapped = {Path(p) for p in re.findall(r"(/\S+\.so\S*)", maps) if re.match(r"lib(llama|ggml|subkv)", Path(p).name)}
    assert {p.parent for p in mapped} == {Path(folder)}
    assert {"libllama.so", "libsubkv.so", "libggml.so", "libggml-base.so"} <= {p.name for p in mapped}


def test_other_libllama_is_refused(tmp_path: Path) -> None:
    done = run(LOAD, LLAMA_CPP_LIB_PATH=str(tmp_path))
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith("ImportError: LLAMA_CPP_LIB_PATH: expected ")


def test_other_libraries_of_llama_cpp_are_refused() -> None:
    stock = _lib.lib_dir() / "stock"
    if not stock.is_dir():
        pytest.skip("stock library: not built (SUBKV_STOCK=ON)")
    for code, remedy in (
        (f"import subkv, llama_cpp; {LOAD}", "unset LLAMA_CPP_LIB_PATH"),
        (f"import llama_cpp, os; del os.environ['LLAMA_CPP_LIB_PATH']; {LOAD}", "import subkv first"),
    ):
        done = run(code, LLAMA_CPP_LIB_PATH=str(stock))
        assert done.returncode != 0
        assert "ImportError: llama_cpp: expected libllama" in done.stderr.splitlines()[-1]
        assert remedy in done.stderr.splitlines()[-1]


def test_missing_library_is_named(tmp_path: Path) -> None:
    done = run(LOAD, SUBKV_LIB_PATH=str(tmp_path))
    assert done.returncode != 0
    assert f"ImportError: SUBKV_LIB_PATH: expected libsubkv{_lib.SUFFIX} in {tmp_path}" in done.stderr.splitlines()[-1]


@pytest.mark.skipif(not shutil.which("cc") or sys.platform != "linux", reason="needs a compiler and ELF libraries")
@pytest.mark.parametrize(
    ("needed", "sentence"),
    [
        ("libcuda.so.0", "libggml-cuda.so: expected NVIDIA's driver (libcuda.so.1), found none; install"),
        ("libvulkan.so.0", "libggml-vulkan.so: expected the Vulkan loader (libvulkan.so.1), found none; install"),
        ("libother.so.0", "libllama.so: expected a library that loads, found "),
    ],
)
def test_missing_driver_is_named(tmp_path: Path, needed: str, sentence: str) -> None:
    """As in a build for GPUs on a machine without their driver."""
    shutil.copy(_lib.lib_dir() / "libsubkv.so", tmp_path)
    build = ["cc", "-shared", "-x", "c", "/dev/null", "-x", "none", "-Wl,--no-as-needed"]
    subprocess.run([*build, f"-Wl,-soname,{needed}", "-o", "needed.so"], cwd=tmp_path, check=True)
    subprocess.run([*build, "needed.so", "-o", "libllama.so"], cwd=tmp_path, check=True)
    (tmp_path / "needed.so").unlink()
    done = run(LOAD, SUBKV_LIB_PATH=str(tmp_path))
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: {sentence}")


@pytest.mark.skipif(not shutil.which("objdump"), reason="needs objdump")
def test_glibc_2_34_is_enough() -> None:
    """Libraries built on Debian 12 load on RHEL 9, because subkv needs no newer glibc symbols than ggml."""
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(map(int, version.split("."))) > (2, 36):
        pytest.skip(f"glibc: what is built on {name} {version} is not for older ones")
    for path in sorted([*_lib.lib_dir().glob("*.so"), *_lib.lib_dir().glob("llama-*")]):
        symbols = subprocess.run(["objdump", "-T", path], capture_output=True, text=True, check=True).stdout
        newer = [line for line in symbols.splitlines() if int(*re.findall(r"GLIBC_2\.(\d+)", line) or "0") > 34]
        assert not newer, path.name


@pytest.mark.skipif(not shutil.which("objdump"), reason="needs objdump")
def test_libsubkv_needs_no_libllama() -> None:
    """libllama loads libsubkv, and both exchange tables of functions (contract/calls.h)."""

    def lines(option: str) -> list[str]:
        path = _lib.lib_dir() / "libsubkv.so"
        return subprocess.run(["objdump", option, path], capture_output=True, text=True, check=True).stdout.splitlines()

    needed = [line.split()[-1] for line in lines("-p") if "NEEDED" in line]
    assert "libggml-base.so" in needed and not [name for name in needed if "llama" in name]
    undefined = [line.split()[-1] for line in lines("-T") if "*UND*" in line]
    assert "ggml_init" in undefined and not [name for name in undefined if re.search("llama(?!_context)", name)]


@pytest.mark.skipif(not shutil.which("objdump"), reason="needs objdump")
def test_the_plugin_needs_ggml_alone() -> None:
    """One small file for another llama.cpp: it looks up ggml's functions, whatever name that library has."""
    path = _lib.lib_dir() / "libggml-subkv.so"
    if not path.is_file():
        pytest.skip("the plug-in: not built (Linux, SUBKV_PLUGIN=ON)")

    def lines(*options: str) -> list[str]:
        return subprocess.run(
            ["objdump", *options, path], capture_output=True, text=True, check=True
        ).stdout.splitlines()

    needed = [line.split()[-1] for line in lines("-p") if "NEEDED" in line]
    assert not [name for name in needed if re.search("ggml|llama|subkv", name)]
    symbols = lines("-T")
    undefined = [line.split()[-1] for line in symbols if "*UND*" in line and "(" not in line and "GLIBC" not in line]
    assert not [name for name in undefined if not re.match("_ITM_|__gmon_start__", name)]
    names = path.read_bytes()
    assert b"\0ggml_init\0" in names
    assert b"\0gguf_get_tensor_ne\0" not in names  # new in ggml 0.20; the plug-in runs with 0.16, too
    assert sorted(line.split()[-1] for line in symbols if " .text" in line) == [
        "ggml_backend_init",
        "subkv_plugin_misfit",
    ]
    assert path.stat().st_size < 5 << 20


def test_stock_library_is_stock() -> None:
    """The hook's functions are in our libllama and not in the stock one."""
    ours = _lib.lib_dir() / f"libllama{_lib.SUFFIX}"
    stock = _lib.lib_dir() / "stock" / ours.name
    if not stock.is_file():
        pytest.skip("stock library: not built (SUBKV_STOCK=ON)")
    assert b"llama_subkv" in ours.read_bytes()
    assert b"llama_subkv" not in stock.read_bytes()  # "subkv" may be a folder that it was built in


def test_llama_cpps_converter_is_installed_with_its_licence() -> None:
    folder = _lib.lib_dir() / "llama.cpp"
    names = {path.name for path in folder.iterdir()}
    names -= {"__pycache__", "page-licenses.txt"}  # made by pip; of the page of llama-server
    assert names == {"LICENSE", "convert_hf_to_gguf.py", "conversion", "gguf-py"}
    assert (folder / "conversion" / "base.py").is_file() and (folder / "gguf-py" / "gguf" / "constants.py").is_file()


def test_no_links_and_no_versions() -> None:
    """A wheel stores a symbolic link as a second copy, and llama_cpp opens the plain name."""
    names = sorted(p.name for p in _lib.lib_dir().iterdir() if p.is_file())
    assert all(re.fullmatch(r"lib[\w-]+\.(so|dylib)|llama-[a-z-]+", name) for name in names), names
    assert not any(p.is_symlink() for p in _lib.lib_dir().iterdir())
