"""`subkv run`, `env` and `doctor` choose between our libraries and the plug-in."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import runpy
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from each import each

from runtime import cli
from runtime.launch import bundled, doors, start
from subkv.base.errors import SubkvError
from subkv.engine.request import CacheRequest
from subkv.native.library import lib_dir

OURS = lib_dir()
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("cc") or not (OURS / doors.PLUGIN).is_file(),
    reason="a C compiler, Linux's linker, the plug-in: not here",
)


def build(path: Path, source: str, *flags: str | Path) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    command = ["cc", "-x", "c", "-", "-x", "none", "-o", path, *flags]
    subprocess.run(list(map(str, command)), input=source, text=True, check=True)
    return path


def another(
    folder: Path,
    variable: str = doors.BACKEND_PATH,
    gpu: bool = False,
    name: str = "llama-server",
    libllama: str = "libllama.so.0",
    tags: str = "disable",
) -> Path:
    """A program on another libllama, with ggml's libraries. variable: that its ggml reads.

    tags: "disable" writes DT_RPATH, which the linker reads before LD_LIBRARY_PATH, "enable" DT_RUNPATH, as CMake does.
    """
    folder.mkdir(exist_ok=True, parents=True)
    for library in OURS.glob("libggml*.so"):
        shutil.copy(library, folder)
    ggml = folder / "libggml.so"
    ggml.write_bytes(ggml.read_bytes().replace(doors.BACKEND_PATH.encode(), variable.encode()))
    library_flags = ["-shared", "-fPIC", "-Wl,--no-as-needed", "-L", folder, "-lggml", "-lggml-base"]
    if gpu:
        build(folder / "libggml-cuda.so", "int none;", "-shared", "-fPIC", "-Wl,-soname,libggml-cuda.so")
        library_flags.append("-lggml-cuda")
    flags = [f"-Wl,--{tags}-new-dtags", f"-Wl,-rpath,{folder}", f"-Wl,-rpath-link,{folder}"]
    build(folder / libllama, "int llama(void) { return 0; }", *library_flags, f"-Wl,-soname,{libllama}", *flags)
    main = "int llama(void); int main(void) { return llama(); }"
    return build(folder / name, main, folder / libllama, *flags)


def without_functions(folder: Path) -> Path:
    """The same with an empty libggml-base."""
    program = another(folder)
    build(folder / "libggml-base.so", "int none;", "-shared", "-fPIC")
    return program


def test_a_gpu_beside_the_plugin(tmp_path: Path) -> None:
    """A backend that ggml loads from its folder may get all layers, which then have f16 caches without a line."""
    program = another(tmp_path / "theirs")
    assert "GPU" not in start.find_program(str(program), dict(os.environ)).door.why
    (program.parent / "libggml-vulkan.so").write_bytes(b"")
    why = start.find_program(str(program), dict(os.environ)).door.why
    assert why.endswith("; layers on a GPU (libggml-vulkan.so) keep f16 caches: --device SUBKV codes them, on the CPU")


def test_another_llama_cpp_loads_the_plugin(tmp_path: Path, tiny_model: object) -> None:
    program = another(tmp_path / "theirs")
    found = start.find_program(str(program), dict(os.environ))
    assert found.door.plugin == OURS / doors.PLUGIN
    assert (
        found.door.why == f"loads libllama.so.0 from {program.parent / 'libllama.so.0'}, whose ggml loads the plug-in"
    )
    assert str(OURS) not in found.environment.get("LD_LIBRARY_PATH", "").split(":")
    model = tiny_model()  # type: ignore[operator]
    ready = start.prepare_start(found, start.read_arguments(found, ["-m", str(model)]), CacheRequest())
    assert ready.environment[doors.BACKEND_PATH] == str(OURS / doors.PLUGIN)
    assert ready.environment["SUBKV"] == "auto", "the plug-in derives bases from the file that the process opens"


def test_libraries_of_the_same_names(tmp_path: Path) -> None:
    """An older release has libllama.so; a newer one has libllama.so.0, but libllama-server-impl.so."""
    older = another(tmp_path / "older", libllama="libllama.so", tags="enable")
    found = start.find_program(str(older), dict(os.environ))
    assert found.door.why.startswith(f"loads libllama.so from {older.parent}") and found.door.plugin
    found = start.find_program(str(older), {**os.environ, "LD_LIBRARY_PATH": f"{OURS}:/nowhere"})  # of subkv env
    assert found.door.plugin and found.environment["LD_LIBRARY_PATH"] == "/nowhere"
    own = another(tmp_path / "own", name="program", libllama="libllama.so", tags="enable")
    assert start.find_program(str(own), dict(os.environ)).door.plugin is None
    shutil.copy(OURS / "libllama.so", older.parent)  # of another subkv
    assert start.find_program(str(older), dict(os.environ)).door.plugin is None
    kept = another(tmp_path / "kept", libllama="libllama.so")
    shutil.copy(OURS / "libllama.so", kept.parent)
    with pytest.raises(SubkvError, match="it has the coefficient cache already"):
        start.find_program(str(kept), dict(os.environ))
    assert not list(OURS.glob("libllama-*-impl.*"))


def without_one_function(folder: Path) -> Path:
    """The same with a libggml-base that has another name for a function, as an older one may not have it."""
    program = another(folder)
    base = folder / "libggml-base.so"
    base.write_bytes(base.read_bytes().replace(b"\0gguf_set_kv\0", b"\0gguf_set_xx\0"))
    return program


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("no function", "its ggml has no function gguf_set_kv"),
        ("no functions", "its ggml does not fit the plug-in (OSError: "),
        ("no variable", "its ggml does not read GGML_BACKEND_PATH"),
        ("static", "which contains its own llama.cpp: its ggml is no shared library"),
    ],
)
def test_programs_without_a_door(how: str, sentence: str, tmp_path: Path) -> None:
    program = {
        "no functions": lambda: without_functions(tmp_path),
        "no function": lambda: without_one_function(tmp_path),
        "no variable": lambda: another(tmp_path, variable="GGML_BACKEND_NONE"),
        "static": lambda: build(tmp_path / "llama-server", "int main(void) { return 0; }"),
    }[how]()
    with pytest.raises(SubkvError, match="expected a program that loads .*, or a llama.cpp that can load") as at:
        start.find_program(str(program), dict(os.environ))
    assert sentence in at.value.reason and "pip install --no-cache-dir ." in at.value.reason


def test_a_program_that_loads_a_llama_cpp_later(tmp_path: Path) -> None:
    """As node and Python do: only the user knows which. Our libraries are not named."""
    assert start.find_program(sys.executable, dict(os.environ)).door.plugin is None
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    command = [sys.executable, "-m", "runtime.cli", "run", "--plugin", sys.executable, "-c", show]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    variables = json.loads(done.stdout)
    assert variables[doors.BACKEND_PATH] == str(OURS / doors.PLUGIN) and variables["SUBKV"] == "auto"
    assert "LLAMA_CPP_LIB_PATH" not in variables and "MTMD_CPP_LIB" not in variables
    assert str(OURS) not in variables.get("LD_LIBRARY_PATH", "").split(":")
    assert "gets the plug-in, which the llama.cpp that it loads must be able to load" in done.stderr
    (tmp_path / "llama-server").symlink_to(build(tmp_path / "own", "int main(void) { return 0; }"))
    with pytest.raises(SubkvError, match="contains its own llama.cpp: its ggml is no shared library"):
        start.find_program(str(tmp_path / "llama-server"), dict(os.environ), plugin=True)
    flags = ("-Wl,--no-as-needed", OURS / "libllama.so", f"-Wl,-rpath,{OURS}")
    ours = build(tmp_path / "ours", "int main(void) { return 0; }", *flags)
    with pytest.raises(SubkvError, match="which has the coefficient cache already and needs no plug-in"):
        start.find_program(str(ours), dict(os.environ), plugin=True)
    other = another(tmp_path / "llama-bench-of-others")
    other = other.rename(other.with_name("llama-bench"))
    assert start.find_program("llama-bench", {**os.environ, "PATH": str(other.parent)}, plugin=True).path == other


def library_of_others(folder: Path, name: str = "libllama.so") -> Path:
    """A libllama of others with its ggml, which finds it beside itself, as in packages of node and Python."""
    another(folder, libllama=name, tags="enable")
    return folder / name


def variables_of(program: Path, *arguments: str | Path, **more: str) -> dict[str, str]:
    """The variables with which `subkv run` starts a program that prints them as JSON, and its stderr."""
    command = [sys.executable, "-m", "runtime.cli", "run", program, *arguments]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env={**os.environ, **more}, check=True
    )
    return {**json.loads(done.stdout), "stderr": done.stderr}


SHOWS = "#!/bin/sh\nexec %s -c 'import json, os; print(json.dumps(dict(os.environ)))'\n"


def shows(path: Path) -> Path:
    """A program that prints its environment."""
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(SHOWS % sys.executable)
    path.chmod(0o755)
    return path


def has_plugin(variables: dict[str, str]) -> bool:
    """Whether a program gets the plug-in and finds none of our libraries."""
    ours = str(OURS) in variables.get("LD_LIBRARY_PATH", "").split(":") or "LLAMA_CPP_LIB_PATH" in variables
    return variables.get(doors.BACKEND_PATH) == str(OURS / doors.PLUGIN) and not ours


@pytest.mark.parametrize("how", ["script", "current folder", "NODE_PATH", "first line"])
def test_node_brings_a_llama_cpp(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node, app = shows(tmp_path / "node" / "node"), tmp_path / "app" / "src" / "app.mjs"
    app.parent.mkdir(parents=True)
    app.write_text("#!/usr/bin/env node\n")
    app.chmod(0o755)
    package = tmp_path / "app" / "node_modules" / "@node-llama-cpp" / "linux-x64" / "bins"
    libllama = library_of_others(package, "libllama.v0.5.0.so")
    foreign = package.parents[1] / "linux-arm64" / "libllama.so"  # of another processor
    foreign.parent.mkdir()
    foreign.write_bytes(libllama.read_bytes()[:18] + b"\xff\xff" + libllama.read_bytes()[20:])
    monkeypatch.setenv("PATH", f"{node.parent}:{os.environ['PATH']}")
    variables = {
        "script": lambda: variables_of(node, app),
        "current folder": lambda: (monkeypatch.chdir(app.parent), variables_of(node, "--eval", "1"))[1],
        "NODE_PATH": lambda: variables_of(node, NODE_PATH=str(tmp_path / "app" / "node_modules")),
        "first line": lambda: variables_of(app),
    }[how]()
    assert has_plugin(variables), variables
    assert f"brings {libllama}, whose ggml loads the plug-in" in variables["stderr"]
    monkeypatch.chdir(tmp_path)
    without = variables_of(shows(tmp_path / "other" / "node"))
    assert doors.BACKEND_PATH not in without and "LD_LIBRARY_PATH" not in without


def test_python_of_another_version_brings_its_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "packages" / "llama_cpp"
    libllama = library_of_others(package / "lib")
    (package / "__init__.py").write_text('__version__ = "0.2.1"\n')
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")]))
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    found = start.find_program(sys.executable, dict(os.environ), arguments=["-c", code])
    assert has_plugin({**found.environment, doors.BACKEND_PATH: str(found.door.plugin)}) and found.door.by_name
    assert f"brings {libllama}" in found.door.why
    assert found.door.variables["PYTHONPATH"].split(os.pathsep)[:2] == [str(doors.IN_PYTHON), str(package.parent)]
    (tmp_path / "json.py").write_text("raise SystemExit(1)")  # no module of the current folder is run
    monkeypatch.chdir(tmp_path)
    assert start.find_program(sys.executable, dict(os.environ)).door == found.door
    (package / "lib" / "libggml-base.so").write_bytes(b"")
    with pytest.raises(SubkvError, match=f"found {sys.executable}, which brings {libllama}: a shared library that it"):
        start.find_program(sys.executable, dict(os.environ))
    (package / "__init__.py").write_text(f'__version__ = "{bundled.pinned()}"\n')
    assert start.find_program(sys.executable, dict(os.environ)).door.plugin is None


def test_python_named_relative_to_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "packages" / "llama_cpp"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "0.2.1"\n')
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    found = bundled.python_package(Path("bin/python"), tmp_path, {**os.environ, "PYTHONPATH": "packages"})
    assert found == (package, "0.2.1")


@each(
    "command,folder,isolated",
    [
        ("app/x.py y.txt", "app", False),
        ("-W error -Xdev -X dev -Bu app/x.py", "app", False),
        ("-m x app/x.py", ".", False),
        ("-Ic pass app/x.py", ".", True),
        ("--check-hash-based-pycs always -E app", "app", True),
        ("-um x", ".", False),
        ("- app/x.py", ".", False),
        ("", ".", False),
    ],
)
def test_arguments_of_python(
    command: str, folder: str, isolated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path)
    expected = bundled.PythonCommand((tmp_path / folder).resolve(), isolated)
    assert bundled.python_command(command.split()) == expected


def test_a_wrapper_starts_python_of_another_version(tmp_path: Path) -> None:
    """It imports its own llama.cpp, not our libraries, whose structures it may not know, and the plug-in."""
    package = tmp_path / "llama_cpp"
    (package / "lib").mkdir(parents=True)
    (package / "lib" / "libllama.so").write_bytes(b"")  # else subkv_finder would give it ours
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    (package / "llama_cpp.py").write_text(show)
    app = tmp_path / "app.py"
    app.write_text("import os, llama_cpp\nassert os.environ['LLAMA_CPP_LIB_PATH'], 'for processes that it starts'")
    for version in ("0.2.1", bundled.pinned()):
        (package / "__init__.py").write_text(f'__version__ = "{version}"\nfrom .llama_cpp import *\n')
        variables = variables_of(Path("/usr/bin/env"), sys.executable, app, GGML_BACKEND_PATH="/opt/other.so")
        said = (
            f"llama-cpp-python {version} is not {bundled.pinned()} and loads its own llama.cpp, which gets the plug-in"
        )
        assert ("LLAMA_CPP_LIB_PATH" not in variables) == (said in variables["stderr"]) == (version == "0.2.1")
        ordinary = variables_of(Path("/usr/bin/env"), sys.executable, app, "-ctk", "q8_0")
        assert "plug-in" not in ordinary["stderr"].partition("KV cache: q8_0")[2]
        assert ("LLAMA_CPP_LIB_PATH" not in ordinary) == (version == "0.2.1")
    assert variables["LLAMA_CPP_LIB_PATH"] == str(OURS)


def test_python_that_reads_no_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "packages" / "llama_cpp"
    library_of_others(package / "lib")
    (package / "__init__.py").write_text('__version__ = "0.2.1"\n')
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")]))
    text = tmp_path / "app"
    text.write_text(f"#!{sys.executable} -E\n")
    text.chmod(0o755)
    by_env = tmp_path / "by_env"
    by_env.write_text(f"#!/usr/bin/env -S A=b {sys.executable} -I\n")
    by_env.chmod(0o755)
    isolated: list[tuple[str, list[str]]] = [(sys.executable, ["-S", "x.py"]), (str(text), []), (str(by_env), [])]
    for program, arguments in isolated:
        with pytest.raises(SubkvError, match="expected a Python that imports a sitecustomize .* with -E, -I or -S"):
            start.find_program(program, dict(os.environ), arguments=arguments)
        with pytest.raises(SubkvError, match="expected a Python that imports a sitecustomize .* with -E, -I or -S"):
            start.find_program(program, dict(os.environ), plugin=True, arguments=arguments)


@pytest.mark.parametrize("where", ["resources/app.asar.unpacked/node_modules/x", "."])
def test_an_application_with_a_llama_cpp(where: str, tmp_path: Path) -> None:
    app = shows(tmp_path / "app" / "app")
    library_of_others(app.parent / where)
    (app.parent / "resources").mkdir(exist_ok=True)
    (app.parent / "resources" / "app.asar").write_bytes(b"")
    link = tmp_path / "link"
    link.symlink_to(app)
    assert has_plugin(variables_of(link))


def test_programs_of_others_do_not_find_our_libraries(tmp_path: Path) -> None:
    """Their own come after those of LD_LIBRARY_PATH, which only a program that is linked with ours needs."""
    assert "LD_LIBRARY_PATH" not in variables_of(shows(tmp_path / "tool"))
    assert variables_of(shows(tmp_path / "tool"), LD_LIBRARY_PATH=f"{OURS}:/a")["LD_LIBRARY_PATH"] == "/a"
    linked = build(
        tmp_path / "linked",
        "int main(void) { return 0; }",
        "-Wl,--no-as-needed,--allow-shlib-undefined",
        OURS / "libllama.so",
    )
    knows = build(
        tmp_path / "knows",
        "int main(void) { return 0; }",
        "-Wl,--no-as-needed",
        OURS / "libllama.so",
        f"-Wl,-rpath,{OURS}",
    )
    needs, finds = (start.find_program(str(path), {}).environment.get("LD_LIBRARY_PATH") for path in (linked, knows))
    assert (needs, finds) == (str(OURS), None)


def test_a_program_that_lacks_a_library(tmp_path: Path) -> None:
    program = another(tmp_path)
    (tmp_path / "libggml.so").unlink()  # the linker finds ours only if it looks there
    with pytest.raises(SubkvError) as at:
        start.find_program(str(program), dict(os.environ))
    assert f"found {program}, which does not start: a shared library that it needs is missing; " in at.value.reason


CHANGED = {
    "ggml_backend_device": "void * ggml_backend_dev_backend_reg(void * dev) { return dev; }",
    "ggml_backend_device_i": "int ggml_backend_dev_type(void * dev) { return 0; }",
    "ggml_backend_dev_props": "void ggml_backend_dev_get_props(void ** dev, char * props) "
    "{ *props = 0; ((void (*)(void)) dev[4])(); }",
    "ggml_backend_dev_props ": "void ggml_backend_dev_get_props(void ** dev, char * props) "  # a larger one
    "{ for (int i = 0; i < 99; ++i) props[i] = 0; ((void (*)(void)) dev[4])(); }",
    "ggml_backend_i": "int ggml_backend_graph_compute_async(void * backend, void * graph) { return 0; }",
    "ggml_backend_buffer_type": "int ggml_backend_buft_is_host(void * type) { return 0; }",
    "ggml_backend_buffer_type_i": "long ggml_backend_buft_get_alloc_size(void * type, void * t) { return 0; }",
    "ggml_backend_buffer_i": "void ggml_backend_tensor_get(void * t, void * to, long at, long n) { }",
    "flash_attn_ext": "void ggml_flash_attn_ext_add_sinks(void * t, void * sinks) { }",
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_ggml_with_other_structures(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that does not find what it looks for, as in a ggml with other fields."""
    program = another(tmp_path)
    preloaded = build(tmp_path / "changed.so", CHANGED[name], "-shared", "-fPIC")
    monkeypatch.setenv("LD_PRELOAD", str(preloaded))
    with pytest.raises(SubkvError) as at:
        start.find_program(str(program), dict(os.environ))
    assert f", has another {name.strip()} than the plug-in knows" in at.value.reason


def test_serve_needs_our_libraries(tmp_path: Path) -> None:
    with pytest.raises(SubkvError, match="expected a program that loads "):
        start.find_program(str(another(tmp_path)), dict(os.environ), ours=True)


def test_another_backend_of_the_user_is_kept(tmp_path: Path) -> None:
    program, theirs = another(tmp_path), {doors.BACKEND_PATH: "/opt/libggml-other.so"}
    with pytest.raises(SubkvError, match="expected no other backend, .* found /opt/libggml-other.so; unset it") as at:
        start_with(program, **theirs)
    assert at.value.key == doors.BACKEND_PATH
    assert start_with(program, "-ctk", "q8_0", **theirs).items() >= theirs.items()
    by_env = {doors.BACKEND_PATH: f"/opt/{doors.PLUGIN}", doors.DEVICES: doors.DEVICE}  # of another version
    for other in (program, another(tmp_path / "gpu", gpu=True)):
        ready = start_with(other, **by_env)
        assert (ready[doors.BACKEND_PATH], ready[doors.DEVICES]) == (str(OURS / doors.PLUGIN), doors.DEVICE)
    assert not by_env.keys() & start_with(program, "-ctk", "q8_0", **by_env).keys()


def start_with(program: Path, *arguments: str, **variables: str) -> dict[str, str]:
    without = {name: value for name, value in os.environ.items() if name != doors.DEVICES}
    found = start.find_program(str(program), {**without, **variables})
    return start.prepare_start(found, start.read_arguments(found, arguments), CacheRequest()).environment


def test_a_ggml_with_a_cpu_backend_loads_others_by_name(tmp_path: Path) -> None:
    """libllama calls ggml_backend_load_all only if ggml contains no backend; --device always does."""
    program = another(tmp_path)
    assert start_with(program)[doors.DEVICES] == "SUBKV"
    for arguments in (["--device", "CUDA0,SUBKV"], ["--device", "subkv"], ["-ctk", "q8_0"], ["--version"]):
        assert doors.DEVICES not in start_with(program, *arguments)
    assert doors.BACKEND_PATH in start_with(program) and doors.BACKEND_PATH not in start_with(program, "-ctk", "q8_0")
    with pytest.raises(SubkvError, match="expected SUBKV, the device of the plug-in, .* found none"):
        start_with(program, "--device", "none")
    with_gpu = another(tmp_path / "gpu", gpu=True)
    with pytest.raises(SubkvError, match="expected SUBKV .all layers on the CPU.* found none") as at:
        start_with(with_gpu)
    assert at.value.key == "--device" and doors.DEVICES not in start_with(with_gpu, "-dev", "SUBKV")
    own = another(tmp_path / "own", name="program")
    assert doors.DEVICES not in start_with(own)
    why = start.find_program(str(own), dict(os.environ)).door.why
    assert why.endswith("whose ggml loads the plug-in, if the program calls ggml_backend_load_all")


@pytest.mark.parametrize(("flag", "name"), [("-ctk", "subkv"), ("-ctk", "auto"), ("-ctkd", "subkv:4")])
def test_cache_types_that_another_llama_cpp_lacks(flag: str, name: str, tmp_path: Path, tiny_model: object) -> None:
    found = start.find_program(str(another(tmp_path)), dict(os.environ))
    arguments = ["-m", str(tiny_model()), flag, name]  # type: ignore[operator]
    with pytest.raises(SubkvError, match=f"expected none, because the plug-in codes every cache .* found {name}") as at:
        start.prepare_start(found, start.read_arguments(found, arguments), CacheRequest())
    assert at.value.key == flag


def test_doctor_tells_the_door(tmp_path: Path) -> None:
    program = another(tmp_path)
    said = CliRunner().invoke(cli.main, ["doctor", str(program)], prog_name="subkv")
    assert said.exit_code == 0 and said.output.endswith("whose ggml loads the plug-in\n")
    ours = CliRunner().invoke(cli.main, ["doctor", "true"], prog_name="subkv")
    assert ours.output == (
        f"{shutil.which('true')} loads no llama.cpp when it starts; a llama-cpp-python of version {bundled.pinned()} "
        f"in it uses our libraries in {OURS}, one of another version the plug-in; if it is no Python and loads another "
        "llama.cpp later, start it by `subkv run --plugin`\n"
    )
    other = {doors.BACKEND_PATH: "/opt/libggml-other.so"}
    other_backend = CliRunner().invoke(cli.main, ["doctor", str(program)], prog_name="subkv", env=other)
    assert other_backend.exit_code == 1 and "unset it" in other_backend.output
    none = CliRunner().invoke(cli.main, ["doctor", str(without_functions(tmp_path))], prog_name="subkv")
    assert none.exit_code == 1 and "does not fit the plug-in" in none.output


def ollama_in(folder: Path) -> Path:
    """As Ollama's archive: a program that starts llama-server of lib/ollama."""
    another(folder / "lib" / "ollama")
    return build(folder / "bin" / "ollama", "int main(void) { return 0; }")


def test_ollama_starts_a_llama_server_of_its_own(tmp_path: Path, tiny_model: object) -> None:
    program = ollama_in(tmp_path)
    (tmp_path / "link").symlink_to(program.parent)
    found = start.find_program(str(tmp_path / "link" / "ollama"), dict(os.environ))
    server = tmp_path / "lib" / "ollama" / "llama-server"
    assert found.door.why == f"starts {server}, whose ggml loads the plug-in, unless Ollama finds a GPU"
    variables = start_with(program, "serve")
    expected = {doors.BACKEND_PATH: str(OURS / doors.PLUGIN), doors.OLLAMA_FLASH: "1", "SUBKV": "auto"}
    assert variables.items() >= expected.items()
    assert str(OURS) not in variables.get("LD_LIBRARY_PATH", "").split(":")
    for value in ("", "true"):
        assert start_with(program, "serve", **{doors.OLLAMA_FLASH: value})[doors.OLLAMA_FLASH] == "1"
    with pytest.raises(SubkvError, match="expected 1, which the plug-in needs, found false") as at:
        start_with(program, "serve", **{doors.OLLAMA_FLASH: "false"})
    assert at.value.key == doors.OLLAMA_FLASH
    with pytest.raises(SubkvError, match="expected none, because the plug-in codes every cache .* found q8_0") as at:
        start_with(program, "serve", **{doors.OLLAMA_TYPE: "q8_0"})
    assert at.value.key == doors.OLLAMA_TYPE
    (tmp_path / "lib" / "ollama" / "libggml.so").unlink()
    with pytest.raises(SubkvError, match="expected a llama-server that can load the plug-in, found .*not start"):
        start.find_program(str(program), dict(os.environ))
    server.unlink()
    with pytest.raises(SubkvError, match="expected llama-server in .*/lib/ollama, as newer versions .* found none"):
        start.find_program(str(program), dict(os.environ))


def test_two_installations_load_the_plugin_once(tmp_path: Path) -> None:
    """Into an unpatched llama.cpp; ours needs none, and says nothing."""
    other = Path(shutil.copytree(doors.IN_PYTHON, tmp_path / "launch" / "in_python"))
    variables = doors.plugin_variables(OURS / doors.PLUGIN, {})
    variables["LLAMA_CPP_LIB_PATH"] = str(OURS)
    variables["PYTHONPATH"] = os.pathsep.join([str(doors.IN_PYTHON), str(other), os.environ.get("PYTHONPATH", "")])
    names = "[getattr(finder, '__name__', '') for finder in sys.meta_path]"
    show = [sys.executable, "-c", f"import sys, llama_cpp; print({names}.count('PluginFinder'))"]
    done = subprocess.run(show, env={**os.environ, **variables}, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n" and "plug-in" not in done.stderr
    kept = doors.python_variables(variables)["PYTHONPATH"].split(os.pathsep)
    assert str(other) not in kept and kept.count(str(doors.IN_PYTHON)) == 1


def test_models_of_python_beside_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The GPU keeps its layers, and the plug-in's device gets those of a model that has none on a GPU."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "_subkv_plugin", True, raising=False)
    hook = runpy.run_path(str(doors.IN_PYTHON / "sitecustomize.py"))

    class Params(ctypes.Structure):
        _fields_ = [("devices", ctypes.c_void_p), ("n_gpu_layers", ctypes.c_int), ("flash_attn_type", ctypes.c_int)]

    class Function:
        def __init__(self, call: Callable[..., Any]) -> None:
            self.call = call

        def __call__(self, *arguments: Any) -> Any:
            return self.call(*arguments)

    def loaded(kinds: dict[int, int], n_gpu_layers: int) -> tuple[list[int], int]:
        """Devices and layers of a model beside devices with these numbers and types, of which 7 is the plug-in's."""
        ggml = {
            "reg_count": lambda: 1,
            "load": lambda path: 1,
            "dev_by_name": lambda name: 7,
            "dev_count": lambda: len(kinds),
            "dev_get": lambda i: list(kinds)[i],
            "dev_type": lambda device: kinds[device],
        }
        library = types.SimpleNamespace(**{f"ggml_backend_{name}": Function(call) for name, call in ggml.items()})
        module = types.SimpleNamespace(_lib=library, llama_model_load_from_file=lambda path, params: params)
        hook["_load_plugin"](module, "plugin")
        given = Params(n_gpu_layers=n_gpu_layers)
        found = module.llama_model_load_from_file(b"model", given)
        assert given.n_gpu_layers == n_gpu_layers and not given.devices  # a copy is changed
        listed = (ctypes.c_void_p * 4).from_address(found.devices) if found.devices else [None]
        return list(itertools.takewhile(bool, listed)), found.n_gpu_layers

    cpu, gpu, integrated = 0, 1, 2
    assert loaded({1: cpu, 7: gpu}, 0) == ([7], hook["ALL_LAYERS"])
    assert loaded({1: cpu, 7: gpu}, -1) == ([], -1) and "layers are on a GPU" not in capsys.readouterr().err
    assert loaded({1: cpu, 7: gpu, 8: gpu, 9: integrated}, 20) == ([8], 20)
    assert "n_gpu_layers=0 codes them, on the CPU" in capsys.readouterr().err
    assert loaded({9: integrated, 7: gpu}, -1) == ([9], -1)
    assert loaded({8: gpu, 7: gpu}, 0) == ([7], hook["ALL_LAYERS"])


def test_env_of_the_plugin(tiny_model: object, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()  # type: ignore[operator]
    said = CliRunner().invoke(cli.main, ["env", "--plugin", "-m", str(model), "--format", "json"], prog_name="subkv")
    variables = json.loads(said.stdout)
    assert variables[doors.BACKEND_PATH] == str(OURS / doors.PLUGIN)
    assert variables[doors.DEVICES] == doors.DEVICE
    assert variables["SUBKV"] == "auto" and "LD_LIBRARY_PATH" not in variables
    assert variables["PYTHONPATH"].split(os.pathsep)[0] == str(doors.IN_PYTHON)
    assert doors.python_variables(variables) == {"PYTHONPATH": variables["PYTHONPATH"]}  # once
    container = CliRunner().invoke(cli.main, ["env", "--plugin", "--format", "docker"], prog_name="subkv")
    assert "PYTHONPATH" not in container.stdout
    assert "; SUBKV=off: f16; " in said.stderr and "-ctk f16" not in said.stderr
    ours = start.find_program("llama-server", {**os.environ, **variables}).environment
    assert not {doors.BACKEND_PATH, doors.DEVICES} & ours.keys()
    monkeypatch.setenv(doors.DEVICES, "CUDA0")
    said = CliRunner().invoke(cli.main, ["env", "--plugin", "-m", str(model)], prog_name="subkv")
    assert said.exit_code != 0 and "expected SUBKV, the device of the plug-in, among the devices" in said.stderr
