"""Numbers are read and written with a decimal point, also in a process whose locale has a comma."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from adaptive_build import skip_without

from subkv.native import library

PROGRAM = """
import ctypes, locale, sys
import engine
from pathlib import Path
from engine import C, SUBKV
if sys.argv[3] != "C":
    locale.setlocale(locale.LC_ALL, sys.argv[3])
    assert locale.localeconv()["decimal_point"] == ","
model, bases = engine.Model(Path(sys.argv[1])), Path(sys.argv[2])
params = C.llama_context_default_params()
params.n_ctx = 256
context = C.llama_init_from_model(model.handle, params)
print("".join(line for line in engine.LOG if "subkv" in line))
C.llama_free(context)
ratio = (ctypes.c_float * 1)(-0.5)
bands = (ctypes.c_int32 * 2)(8, 8)
SUBKV.subkv_encode_rows(bands, ratio, 1, None, 0, None)
print(engine.last_error())
print(C.llama_init_from_model(model.handle, params) is not None)
"""


@pytest.fixture
def german(tmp_path: Path) -> str:
    """LOCPATH of a folder with de_DE.UTF-8."""
    if not (sys.platform.startswith("linux") and shutil.which("localedef")):
        pytest.skip("localedef, which makes a locale with a comma: not found")
    command = ["localedef", "-i", "de_DE", "-f", "UTF-8", str(tmp_path / "de_DE.UTF-8")]
    made = subprocess.run(command, capture_output=True, text=True)
    if not (tmp_path / "de_DE.UTF-8").is_dir():
        pytest.skip(f"localedef cannot make de_DE.UTF-8: {made.stderr.strip()[:200]}")
    if not _loads(tmp_path):
        pytest.skip(f"localedef made a de_DE.UTF-8 that does not load: {made.stderr.strip()[:200]}")
    return str(tmp_path)


def _loads(folder: Path) -> bool:
    """Whether Python can use it: the C library and localedef may differ."""
    code = 'import locale; locale.setlocale(locale.LC_ALL, "de_DE.UTF-8")'
    env = {**os.environ, "LOCPATH": str(folder)}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True).returncode == 0


def test_a_comma_locale_changes_nothing(tiny_model: Callable[..., Path], tmp_path: Path, german: str) -> None:
    skip_without()
    from test_plugin import write_bases

    model, bases = tiny_model("llama"), tmp_path / "bases.gguf"
    write_bases(bases, model)

    def run(name: str) -> str:
        env = {key: value for key, value in os.environ.items() if not key.startswith(("SUBKV_A", "LC_", "LANG"))}
        env |= {"LOCPATH": german, "SUBKV": str(bases), "LLAMA_CPP_LIB_PATH": str(library.lib_dir())}
        env |= {"SUBKV_ADAPT": "v,length=64,decay=0.97,block=16", "SUBKV_RECENT": "64"}
        env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        command = [sys.executable, "-c", PROGRAM, str(model), str(bases), name]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr[-2000:]
        return done.stdout

    said = run("de_DE.UTF-8")
    assert "coded K/V cache, " in said and " bits per element" in said
    assert "expected a positive finite number, found -0.5" in said
    assert said == run("C")
