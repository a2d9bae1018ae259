"""`subkv run`, `env` and `doctor` choose between our libraries and the plug-in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from runtime import cli
from runtime.launch import doors, start
from runtime.launch.variables import CacheRequest
from subkv.base.errors import SubkvError
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


def another(folder: Path, version: str | None = None, variable: str = doors.BACKEND_PATH) -> Path:
    """A program `llama-server` on another llama.cpp, whose ggml has our version, or another one."""
    version = version or doors.ggml_version(OURS / "libggml-base.so")
    library = ["-shared", "-fPIC", "-Wl,--no-as-needed", "-L", folder]
    build(folder / "libggml-base.so", f'char * ggml_version(void) {{ return "{version}"; }}', *library)
    named = f'char name[] = "{variable}"; char * ggml(void) {{ return name; }}'
    build(folder / "libggml.so", named, *library, "-lggml-base")
    build(folder / "libllama.so.0", "int llama(void) { return 0; }", *library, "-lggml", "-Wl,-soname,libllama.so.0")
    main = "int llama(void); int main(void) { return llama(); }"
    flags = ["-Wl,--disable-new-dtags", f"-Wl,-rpath,{folder}", f"-Wl,-rpath-link,{folder}"]
    return build(folder / "llama-server", main, folder / "libllama.so.0", *flags)


def test_another_llama_cpp_loads_the_plugin(tmp_path: Path, tiny_model: object) -> None:
    program = another(tmp_path / "theirs")
    found = start.find_program(str(program), dict(os.environ))
    assert found.door.plugin == OURS / doors.PLUGIN
    assert (
        found.door.why == f"loads libllama.so.0 from {program.parent / 'libllama.so.0'}, whose ggml loads the plug-in"
    )
    assert found.environment[doors.BACKEND_PATH] == str(OURS / doors.PLUGIN)
    assert str(OURS) not in found.environment.get("LD_LIBRARY_PATH", "").split(":") or "LD_LIBRARY_PATH" in os.environ
    model = tiny_model()  # type: ignore[operator]
    ready = start.prepare_start(found, start.read_arguments(found, ["-m", str(model)]), CacheRequest())
    assert Path(ready.environment["SUBKV"]).is_file(), "a plug-in does not know where the model's file is"


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("another version", "its ggml has version 0.1.2, and the plug-in is for "),
        ("no variable", "its ggml does not read GGML_BACKEND_PATH"),
        ("static", "which contains its own llama.cpp: its ggml is no shared library"),
    ],
)
def test_programs_without_a_door(how: str, sentence: str, tmp_path: Path) -> None:
    program = {
        "another version": lambda: another(tmp_path, version="0.1.2"),
        "no variable": lambda: another(tmp_path, variable="none"),
        "static": lambda: build(tmp_path / "llama-server", "int main(void) { return 0; }"),
    }[how]()
    with pytest.raises(SubkvError, match="expected a program that loads .*, or a llama.cpp that can load") as at:
        start.find_program(str(program), dict(os.environ))
    assert sentence in at.value.reason and "pip install ." in at.value.reason


def test_a_program_that_lacks_a_library(tmp_path: Path) -> None:
    program = another(tmp_path)
    (tmp_path / "libggml.so").unlink()  # the linker finds ours only if it looks there
    with pytest.raises(SubkvError) as at:
        start.find_program(str(program), dict(os.environ))
    assert f"found {program}, which does not start: a shared library that it needs is missing; " in at.value.reason


def test_serve_needs_our_libraries(tmp_path: Path) -> None:
    with pytest.raises(SubkvError, match="expected a program that loads "):
        start.find_program(str(another(tmp_path)), dict(os.environ), ours=True)


def test_doctor_tells_the_door(tmp_path: Path) -> None:
    program = another(tmp_path)
    said = CliRunner().invoke(cli.main, ["doctor", str(program)], prog_name="subkv")
    assert said.exit_code == 0 and said.output.endswith("whose ggml loads the plug-in\n")
    ours = CliRunner().invoke(cli.main, ["doctor", "true"], prog_name="subkv")
    assert ours.output == f"{shutil.which('true')} finds our libraries in {OURS}\n"
    none = CliRunner().invoke(cli.main, ["doctor", str(another(tmp_path, "0.1.2"))], prog_name="subkv")
    assert none.exit_code == 1 and "version 0.1.2" in none.output


def test_env_of_the_plugin(tiny_model: object) -> None:
    model = tiny_model()  # type: ignore[operator]
    said = CliRunner().invoke(cli.main, ["env", "--plugin", "-m", str(model), "--format", "json"], prog_name="subkv")
    variables = json.loads(said.stdout)
    assert variables[doors.BACKEND_PATH] == str(OURS / doors.PLUGIN)
    assert Path(variables["SUBKV"]).is_file() and "LD_LIBRARY_PATH" not in variables
