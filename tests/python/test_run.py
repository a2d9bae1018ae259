"""`subkv run`: bases, environment, and the program it replaces itself with; `subkv env`: prints the same variables."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hub
import pytest
from click.testing import CliRunner, Result
from each import each

from runtime import cli
from runtime.launch import env
from runtime.launch.doors import guard_variables
from runtime.launch.variables import LIBRARY_PATH
from subkv.base.errors import SubkvError
from subkv.native.bases import sidecar_folder, sidecar_path
from subkv.native.library import lib_dir
from subkv.native.paths import mtmd_variable

Models = Callable[..., Path]
REPO = Path(__file__).resolve().parents[2]
SHOWS = """#!/usr/bin/env python3
import json, os, sys
print(json.dumps({"pid": os.getpid(), "argv": sys.argv[1:], "env": dict(os.environ), "stdin": sys.stdin.read()}))
sys.exit(7)
"""
WAITS = """#!/usr/bin/env python3
import os, signal, sys, time
def said(number, frame):
    os.write(1, f"got {signal.Signals(number).name}\\n".encode())  # print may be interrupted itself
    sys.exit(40 + number)
for name in ("SIGINT", "SIGTERM"):
    signal.signal(getattr(signal, name), said)
os.write(1, b"ready\\n")
time.sleep(60)
"""


@pytest.fixture
def model(tiny_model: Models, tmp_path: Path) -> Path:
    return Path(shutil.copy(tiny_model(), tmp_path / "m.gguf"))


@pytest.fixture
def shows(tmp_path: Path) -> Path:
    """A program named like one of llama.cpp's. It prints its arguments and environment, and exits with 7."""
    return script(tmp_path / "llama-shows", SHOWS)


def script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def command(*arguments: Any) -> list[str]:
    return [sys.executable, "-m", "runtime.cli", "run", *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("LLAMA", "SUBKV_R", LIBRARY_PATH))
    }
    return {**clean, "PYTHONPATH": path, "PYTHONUTF8": "1", **more}


def run(*arguments: Any, stdin: str = "", **more: str) -> tuple[dict[str, Any], str]:
    """The program's arguments and environment, and `subkv run`'s stderr."""
    process = subprocess.Popen(
        command(*arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**more),
    )
    out, log = process.communicate(stdin, timeout=120)
    assert process.returncode == 7, log
    shown: dict[str, Any] = json.loads(out)
    if sys.platform != "win32":
        assert shown["pid"] == process.pid  # in its place
    return shown, log


def refused(*arguments: Any, **more: str) -> str:
    """The one-line error of `subkv run`; the program does not run."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, env=environment(**more), check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    return done.stderr


#
# the program
#


def test_the_program_gets_all_arguments(model: Path, shows: Path) -> None:
    given = ["-m", model, "", "a b", "--help", "--", "-c", "*", "ü"]
    shown, log = run(shows, *given, "-ctk", "subkv", stdin="a text\n", LLAMA_ARG_CACHE_TYPE_V="subkv", OTHER="as it is")
    assert shown["argv"] == [*map(str, given), "-ctk", "subkv"]
    assert shown["stdin"] == "a text\n"
    assert shown["env"]["LLAMA_ARG_CACHE_TYPE_V"] == "subkv" and shown["env"]["OTHER"] == "as it is"
    assert log.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="signals: Windows has others")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_signals_are_the_programs(tmp_path: Path, name: str) -> None:
    waits = script(tmp_path / "waits", WAITS)
    process = subprocess.Popen(
        command(waits), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment()
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(getattr(signal, name))
    assert process.communicate(timeout=60)[0] == f"got {name}\n"
    assert process.returncode == 40 + getattr(signal, name)


@pytest.mark.skipif(sys.platform == "win32", reason="signals: Windows has others")
def test_signals_that_python_ignores_are_not_ignored() -> None:
    dies = "kill -PIPE $$; echo alive"
    done = subprocess.run(command("sh", "-c", dies), stdout=subprocess.PIPE, env=environment(), check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGPIPE, b"")


def test_programs_that_cannot_run(tmp_path: Path) -> None:
    assert refused("no-such-program") == "expected a program that can be executed, found no no-such-program\n"
    assert "found no llama-none; in a clone of subkv, `CMAKE_ARGS=" in refused("llama-none")
    script(tmp_path / "broken", "#!/no/such/interpreter\n")
    broken = subprocess.run(
        command(tmp_path / "broken"), capture_output=True, text=True, env=environment(), check=False
    )
    assert broken.returncode == 1
    assert broken.stderr.splitlines()[-1] == f"cannot run {tmp_path}/broken: No such file or directory"
    done = subprocess.run(command(), capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 2 and "Missing argument 'PROGRAM'" in done.stderr


#
# the cache
#


def test_bases_are_derived_by_the_program(model: Path, shows: Path) -> None:
    """The library derives them; nothing is written here either."""
    for arguments in ((), ("-ctk", "subkv")):
        shown, log = run(shows, "-m", model, *arguments)
        assert log.startswith("bases: from the weights, ") and "bits per element" in log
        assert shown["env"]["SUBKV"] == "auto"
    assert not sidecar_folder().exists()


def test_libraries_are_found(shows: Path) -> None:
    shown, _ = run(shows, **{LIBRARY_PATH: "/a:/b"})
    assert shown["env"]["LLAMA_CPP_LIB_PATH"] == str(lib_dir())
    assert shown["env"][LIBRARY_PATH] == f"{lib_dir()}:/a:/b"
    again = {name: shown["env"][name] for name in (LIBRARY_PATH, "LLAMA_CPP_LIB_PATH")}
    shown, _ = run(shows, **again, SUBKV="off")
    assert shown["env"][LIBRARY_PATH] == f"{lib_dir()}:/a:/b"
    assert shown["env"]["SUBKV"] == "auto"


def test_a_model_and_a_file_with_bases(shows: Path, coded_model: Models, model: Path, tmp_path: Path) -> None:
    coded = coded_model()
    shown, log = run(shows, "-m", coded)
    assert shown["env"]["SUBKV"] == "auto"
    assert log.startswith(f"bases: of {coded}, ") and "bits per element at" in log
    shown, log = run("--bases", coded, shows, "-m", model)
    assert shown["env"]["SUBKV"] == str(coded)
    assert not sidecar_folder().exists()
    shown, log = run("--bases", os.path.relpath(coded), shows)
    assert shown["env"]["SUBKV"] == str(coded)
    assert (
        refused("--bases", model, shows)
        == f"--bases: expected subkv.* keys (a converted model or a sidecar), found none in {model}\n"
    )
    assert refused("--bases", tmp_path / "none.gguf", shows).startswith("--bases: expected a GGUF file, found no file")


def test_an_ordinary_cache(shows: Path, model: Path) -> None:
    """No default; types of other contexts still have an effect."""
    shown, log = run(shows, "-m", model, "-ctk", "q8_0", "-ctv", "q4_0", SUBKV="auto")
    assert "SUBKV" not in shown["env"] and shown["argv"][2:] == ["-ctk", "q8_0", "-ctv", "q4_0"]
    assert log == "KV cache: q8_0/q4_0, from the arguments\n"
    assert not sidecar_folder().exists()
    log = refused("--n-recent", 64, shows, "-ctk", "q8_0")
    assert log == "--n-recent: expected a coefficient cache (-ctk subkv), found q8_0\n"
    assert refused("--adapt", "v", shows, "-ctv", "q8_0").startswith("--adapt: expected a coefficient cache")


def test_the_cache_of_a_draft(shows: Path, model: Path, tiny_model: Models, tmp_path: Path) -> None:
    """Its bases are derived if its type needs them."""
    draft = tiny_model(seed=1)
    arguments = ["-m", model, "-ctk", "f16", "-md", draft]
    shown, log = run("--n-recent", 64, shows, *arguments, "-ctkd", "subkv")
    assert shown["argv"] == [*map(str, arguments), "-ctkd", "subkv"] and shown["env"]["SUBKV_RECENT"] == "64"
    assert log.startswith(f"KV cache: f16, from the arguments\ndraft {draft.name}: bases: from the weights, ")
    shown, log = run(shows, "-m", model, "-md", draft, "-ctkd", "q8_0")
    assert shown["env"]["SUBKV"] == "auto" and log.count("\n") == 1
    shown, log = run(shows, "-m", model, "-ctk", "subkv", "-md", draft, "-ctkd", "auto")
    assert shown["env"]["SUBKV"] == "auto" and f"draft {draft.name}: " in log
    mamba = tiny_model("mamba")
    _, log = run(shows, "-m", model, "-md", mamba, "-ctkd", "auto")
    assert f"draft {mamba.name}: cache: f16; model mamba: subkv cannot hold its K/V cache" in log
    failed = subprocess.run(
        command(shows, "-m", model, "-md", mamba, "-ctkd", "subkv"),
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert failed.returncode == 1 and failed.stderr.splitlines()[-1].startswith("-ctkd: ")


def test_window_and_adaptation(shows: Path) -> None:
    shown, _ = run("--n-sink", 0, "--n-recent", 64, "--n-rollback", 8, "--adapt", "v,length=256", shows)
    got = {name: value for name, value in shown["env"].items() if name.startswith("SUBKV_")}
    got.pop("SUBKV_LIB_PATH", None)
    got.pop("SUBKV_CACHE", None)
    expected = {"SUBKV_SINK": "0", "SUBKV_RECENT": "64", "SUBKV_ROLLBACK": "8", "SUBKV_ADAPT": "v,length=256"}
    assert got == expected
    shown, _ = run("--adapt", "none", shows, SUBKV_RECENT="32")
    assert (shown["env"]["SUBKV_ADAPT"], shown["env"]["SUBKV_RECENT"]) == ("none", "32")
    assert refused("--adapt", "sideways", shows) == "--adapt: expected k, v or kv, found 'sideways'\n"
    assert refused("--n-sink", 5000, shows) == "--n-sink: expected 0 to 4096 tokens, found 5000\n"


def test_models_that_are_refused(shows: Path, model: Path, tiny_model: Models, tmp_path: Path) -> None:
    assert refused(shows, "-m", tmp_path / "none.gguf").startswith("-m: expected a GGUF file, found no file")
    mamba = tiny_model("mamba")
    shown, log = run(shows, "-m", mamba)
    assert log.startswith("cache: f16; model mamba: subkv cannot hold its K/V cache") and log.count("\n") == 1
    assert "choose" not in log and "use an ordinary cache" not in log
    assert shown["env"]["SUBKV"] == "auto"
    assert refused(shows, "-m", mamba, "-ctk", "subkv").startswith("-ctk: ")
    shutil.copy(model, sidecar_path(model))  # the file next to a model must be its sidecar
    assert refused(shows, "-m", model).startswith(
        f"--bases: {sidecar_path(model)}: expected a sidecar of this model, found one that does not say which"
    )


def test_no_cache_folder_is_needed(shows: Path, model: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    shown, log = run(shows, "-m", model, XDG_CACHE_HOME=str(blocked))
    assert shown["env"]["SUBKV"] == "auto" and log.startswith("bases: from the weights, ")


def test_a_program_without_a_model(shows: Path) -> None:
    for given in ([], ["--models-dir", "models"], ["-mu", "https://example.com/a.gguf"]):
        shown, log = run(shows, *given)
        assert shown["env"]["SUBKV"] == "auto" and shown["argv"] == given
        assert log == "KV cache: subkv for every model that can have bases, f16 for others\n"


def test_several_models_of_llama_bench(model: Path, tiny_model: Models, tmp_path: Path) -> None:
    bench = script(tmp_path / "llama-bench", SHOWS)
    other = tiny_model("qwen2")
    shown, log = run(bench, "-m", f"{model},{other}", "-ctk", "subkv")
    assert [line.split(": ")[:2] for line in log.splitlines()] == [[model.name, "bases"], [other.name, "bases"]]
    assert shown["env"]["SUBKV"] == "auto" and shown["argv"] == ["-m", f"{model},{other}", "-ctk", "subkv"]


def test_a_split_model_is_its_first_file(tiny_model: Models, shows: Path, tmp_path: Path) -> None:
    import tiny

    first = tiny.build(tmp_path / "s.gguf", split_tensors=8)
    shown, log = run(shows, "-m", first)
    assert log.startswith("bases: from the weights")
    later = sorted(tmp_path.glob("s-*.gguf"))[1]
    assert refused(shows, "-m", later).startswith("-m: expected the first file of a split model")


def test_a_model_of_the_hub(model: Path, shows: Path, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="hub: package huggingface_hub is not installed")
    with hub.serving({"me/a": {"a-Q4_0.gguf": model, "a-Q8_0.gguf": b"GGUF"}}) as served:
        where = {"HF_ENDPOINT": served.url, "HF_HOME": str(tmp_path / "hub")}
        shown, log = run(shows, "-hf", "me/a:Q4_0", "-c", 64, **where)
        assert log.splitlines()[-1].startswith("bases: from the weights")
        flag, path, *rest = shown["argv"]
        assert flag == "-m" and Path(path).read_bytes() == model.read_bytes() and rest == ["-c", "64"]
        assert "-hf: expected quant Q2_K in me/a" in refused(shows, "-hf", "me/a:Q2_K", **where)


#
# env
#


def env_of(*arguments: Any) -> Result:
    return CliRunner().invoke(cli.main, ["env", *map(str, arguments)], prog_name="subkv")


NAMES = [
    "plain",
    "a b",
    "it's",
    'a "quoted" one',
    "back\\slash",
    "$HOME `id` $(id)",
    "new\nline",
    "100% of %h",
    "ü",
    "#!",
]


@each("name", NAMES)
def test_shells_read_the_output_of_env(name: str, coded_model: Models, tmp_path: Path) -> None:
    bases = tmp_path / name / "bases.gguf"
    bases.parent.mkdir()
    shutil.copy(coded_model(), bases)
    result = env_of("--bases", bases, "--n-recent", 64)
    assert result.exit_code == 0, result.output
    shows = shlex.join([sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"])
    read = subprocess.run(["sh", "-c", f'eval "$1"; {shows}', "sh", result.stdout], capture_output=True, check=True)
    got = json.loads(read.stdout)
    assert got["SUBKV"] == str(bases) and got["SUBKV_RECENT"] == "64" and got["LLAMA_CPP_LIB_PATH"] == str(lib_dir())
    assert json.loads(env_of("--bases", bases, "--format", "json").stdout)["SUBKV"] == str(bases)
    for form in ("systemd", "docker"):
        result = env_of("--bases", bases, "--format", form)
        if "\n" in name:
            assert result.exit_code == 1 and result.stdout == ""
            assert result.stderr.splitlines()[-1].startswith("--format: SUBKV: expected a value without line ends")
        else:
            (line,) = [line for line in result.stdout.splitlines() if "SUBKV=" in line]
            assert (unit(line) if form == "systemd" else line) == f"SUBKV={bases}"


def unit(line: str) -> str:
    """Parses a line as systemd does: C escapes in quotes, %% for a percent sign."""
    assert line.startswith('Environment="') and line.endswith('"')
    inner, text = iter(line[len('Environment="') : -1]), ""
    for character in inner:
        assert character != '"'
        if character in "\\%":
            following = next(inner)
            assert following in ('\\"' if character == "\\" else "%")
            character = following
        text += character
    return text


def test_fish_quotes() -> None:
    got = env.format_variables({"A": "it's a \\ and $HOME\n"}, "fish")
    assert got == b"set -gx A 'it\\'s a \\\\ and $HOME\n'"
    if shutil.which("fish"):
        done = subprocess.run(["fish", "-c", f"{got.decode()}; printf %s $A"], capture_output=True, check=True)
        assert done.stdout == b"it's a \\ and $HOME\n"


@pytest.mark.skipif(sys.platform == "win32", reason="names of files: Windows has text only")
def test_names_that_are_no_text() -> None:
    value = os.fsdecode(b"/models/\xff.gguf")
    assert env.format_variables({"A": value}, "sh") == b"export A='/models/\xff.gguf'"
    assert json.loads(env.format_variables({"A": value}, "json")) == {"A": value}
    for form in ("systemd", "docker"):
        with pytest.raises(SubkvError, match=r"form: A: expected a value in UTF-8, found b'/models/\\xff.gguf'"):
            env.format_variables({"A": value}, form)


def test_env_of_a_model(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIBRARY_PATH, "/before")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    has_programs = any(lib_dir().glob("llama-*"))
    result = env_of("-m", model)
    assert result.exit_code == 0 and result.stderr.startswith("bases: from the weights")
    assert result.stderr.splitlines()[-1].startswith("llama.cpp's programs: ")
    assert result.stdout.splitlines() == [
        *([f"export PATH='{lib_dir()}:/usr/bin:/bin'"] if has_programs else []),
        f"export LLAMA_CPP_LIB_PATH='{lib_dir()}'",
        *(f"export {name}='{value}'" for name, value in mtmd_variable(lib_dir()).items()),
        *(f"export {name}='{value}'" for name, value in guard_variables(lib_dir(), os.environ).items()),
        "export SUBKV='auto'",
    ]
    # a container has another library path
    result = env_of("-m", model, "--format", "docker")
    assert result.stdout.splitlines() == [
        f"LLAMA_CPP_LIB_PATH={lib_dir()}",
        *(f"{name}={value}" for name, value in mtmd_variable(lib_dir()).items()),
        "SUBKV=auto",
    ]


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("SUBKV_BITS", "1e1", "expected bits per element, such as 3 or 4.25, found '1e1'"),
        ("SUBKV_RECENT", "1.5", "expected a whole number, found '1.5'"),
        ("SUBKV_BITS", "99", "expected bits per element, more than 0 and at most 64, found 99.0"),
        ("SUBKV_RECENT", "-1", "expected 0 or more tokens, found -1"),
        ("SUBKV_ADAPT", "x", "expected k, v or kv, found 'x'"),
    ],
)
def test_inherited_variables_that_no_context_accepts(
    variable: str, value: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    done = CliRunner().invoke(cli.main, ["run", sys.executable, "-c", "pass"], prog_name="subkv")
    assert done.exit_code == 1 and done.stderr.splitlines()[-1] == f"{variable}: {reason}"


@pytest.mark.skipif(sys.platform == "win32", reason="links to programs: Windows has none")
def test_env_with_a_python_of_another_version(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its llama_cpp would load our libraries, whose structures are others."""
    package = tmp_path / "packages" / "llama_cpp"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "0.2.1"\n')
    script(tmp_path / "python3", f'#!/bin/sh\nPYTHONPATH={package.parent} exec {sys.executable} "$@"\n')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    result = env_of("-m", model)
    assert result.exit_code == 0 and "LLAMA_CPP_LIB_PATH" not in result.stdout and "SUBKV='auto'" in result.stdout
    assert f"{tmp_path / 'python3'}: its llama-cpp-python is 0.2.1, not " in result.stderr
    assert "LLAMA_CPP_LIB_PATH" in env_of("-m", model, "--format", "docker").stdout


def test_env_without_a_model_and_refusals(model: Path, tmp_path: Path) -> None:
    result = env_of()
    assert result.exit_code == 0 and "export SUBKV='auto'" in result.stdout and result.stderr.count("\n") == 2
    for given, sentence in (
        (["-m", tmp_path / "none.gguf"], "-m: expected a GGUF file, found no file"),
        (["--adapt", "x"], "--adapt: expected k, v or kv, found 'x'"),
        (["--kv-memory", "1GiB"], "--kv-memory: expected --kv-bits, because the context size is not known here"),
        (["--bases", model], "--bases: expected subkv.* keys"),
    ):
        result = env_of(*given)
        assert result.exit_code == 1 and result.stdout == "" and result.stderr.startswith(sentence)
    assert env_of("--format", "csh").exit_code == 2
