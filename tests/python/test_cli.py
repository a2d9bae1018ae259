"""The `subkv` command, inspect, the demo model and the shared options."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import derived_numpy
import pytest
from click.testing import CliRunner, Result
from each import each
from gguf import GGUFWriter
from refused import REASONS, unreadable

from runtime import cli, demo, options
from subkv.base import files
from subkv.base.errors import SubkvError
from subkv.base.folders import cache_folder
from subkv.engine.cache import choose_cache
from subkv.native.bases import sidecar_path
from subkv.native.gguf import check_model_file

Models = Callable[..., Path]
REPO = Path(__file__).resolve().parents[2]


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(cli.main, [str(a) for a in arguments], prog_name="subkv")


def test_every_command_has_help() -> None:
    listing = run("--help")
    assert listing.exit_code == 0
    for name in (*cli.COMMANDS, "lab"):
        assert f"\n  {name} " in listing.stdout
        result = run(name, "--help")
        assert result.exit_code == 0
        assert result.stdout.startswith(f"Usage: subkv {name} ")
    for name in cli.LAB:
        assert f"\n  {name} " not in listing.stdout
        assert f"\n  {name} " in run("lab", "--help").stdout
        result = run("lab", name, "--help")
        assert result.exit_code == 0
        assert result.stdout.startswith(f"Usage: subkv lab {name} ")


@pytest.mark.parametrize("name", ["frobnicate", "experiments", "errors", "warmstart"])
def test_unknown_command(name: str) -> None:
    result = run(name)
    assert result.exit_code == 2
    assert f"No such command '{name}'" in result.stderr and "Did you mean" not in result.stderr


def test_first_words() -> None:
    """What a new user types: nothing, a slip, a model. Lines fit in a terminal of 80 columns."""
    nothing = run()
    assert nothing.exit_code == 0 and nothing.stdout.startswith("subkv chat  ")
    assert max(map(len, nothing.stdout.splitlines())) < 80
    slip, model = run("conver"), run("model.gguf")
    assert slip.exit_code == model.exit_code == 2
    assert slip.stderr.endswith("Error: No such command 'conver'. Did you mean 'convert'?\n")
    assert "expected a command before the model model.gguf, such as chat, found none" in model.stderr


@pytest.mark.parametrize("command", [["chat", "-m"], ["bench", "-m"], ["perplexity", "-f", "x", "-m"]])
def test_programs_refuse_the_same_way(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("this is text, no model")
    for path, message in ((tmp_path / "none.gguf", "found no file"), (tmp_path / "text.gguf", "found b'this'")):
        result = run(*command, path)
        assert result.exit_code == 1
        assert result.stdout == ""
        assert result.stderr.startswith("-m: expected a GGUF file, ")
        assert message in result.stderr
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "-m", "M"], "No such option '-m'; the model stands alone: subkv inspect M.gguf"),
        (["convert", "--model", "M"], "No such option '--model'; the model stands alone: subkv convert MODEL"),
        (["chat", "-m", ""], "-m: expected a model file, found an empty name"),
        (["bench", "-m", ""], "-m: expected a model file, found an empty name"),
        (["bench"], "Missing option '-m' / '--model'."),
        (["bench", "-p", "8"], "Missing option '-m' / '--model'."),
        (["convert", "M", "--n-sink", "-5"], "'--n-sink': -5 is not in the range 0<=x<=4096."),
        (["convert", "M", "--n-recent", "65537"], "'--n-recent': 65537 is not in the range 0<=x<=65536."),
        (["convert", "M", "--rank-k", "12"], "'--rank-k': expected a positive multiple of 8, found 12"),
    ],
)
def test_mistakes_of_typing(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and message in result.stderr, result.output


def test_libraries_that_do_not_load_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise ImportError("libsubkv.so: expected a library that loads, found none")

    monkeypatch.setattr("runtime.options.gpu_layers", lambda _: load())
    result = run("bench", "-m", "model.gguf")
    assert (result.exit_code, result.stderr) == (1, "libsubkv.so: expected a library that loads, found none\n")


def test_inspect_table(coded_model: Models) -> None:
    result = run("inspect", coded_model())
    assert result.exit_code == 0, result.output
    layout = json.loads(run("inspect", coded_model(), "-o", "json").stdout)
    lines = result.stdout.splitlines()
    layers = layout["layers"]
    assert [int(line.split()[0]) for line in lines[1 : 1 + len(layers)]] == [layer["il"] for layer in layers]
    first = layers[0]
    assert lines[1].split()[-1] == str(first["k_row_bytes"] + first["v_row_bytes"])
    total = sum(layer["k_row_bytes"] + layer["v_row_bytes"] for layer in layers)
    assert f"bytes per token: {total} (f16: " in result.stdout
    assert layout["fingerprint"] in result.stdout


def test_inspect_bands(coded_model: Models) -> None:
    lines = run("inspect", coded_model(), "--bands").stdout.splitlines()
    assert lines[1].split()[:2] == ["0", "0"]
    assert lines[1].split()[-1] == "32x8"  # codec int8: one band of all coefficients


def test_inspect_refuses(tiny_model: Models, tmp_path: Path) -> None:
    assert run("inspect", tmp_path / "none").stderr.startswith("expected a GGUF file, found no file")
    result = run("inspect", tiny_model("mamba"))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"{tiny_model('mamba')}: model mamba: subkv cannot hold its K/V cache because ")
    empty = tmp_path / "empty.gguf"
    GGUFWriter(empty, "llama").close()
    result = run("inspect", empty)
    assert result.exit_code == 1 and result.stderr.count("\n") == 1


def test_inspect_names_the_bases_of_a_model(tiny_model: Models, cache_home: Path, coded_model: Models) -> None:
    """Bases that -ctk subkv derives, a sidecar, a converted model."""
    model = tiny_model("llama")
    result = run("inspect", model)
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("bases: from the weights, 6.")
    assert result.stderr.endswith(f"near q8_0's quality; `subkv convert {model}`: smaller at the same quality\n")
    assert "bases derived from the weights, without a calibration" in result.stdout
    preview = json.loads(run("inspect", model, "-o", "json").stdout)
    assert preview["path"] is None
    assert not cache_home.exists()  # nothing was kept
    beside = sidecar_path(model)
    derived_numpy.sidecar(model, beside)
    try:
        assert run("inspect", model).stderr.startswith("bases: derived without a calibration for this model, ")
        assert json.loads(run("inspect", model, "-o", "json").stdout)["path"] == str(beside)
    finally:
        beside.unlink()
    assert json.loads(run("inspect", coded_model(), "-o", "json").stdout)["path"] == str(coded_model())


@each(
    ("flags", "names"),
    [
        ((None, None), ("subkv", "subkv")),
        (("q8_0", None), ("q8_0", "q8_0")),
        ((None, "q4_0"), ("f16", "q4_0")),
        (("q8_0", "q8_0"), ("q8_0", "q8_0")),
        (("q8_0", "f16"), ("q8_0", "f16")),
    ],
)
def test_cache_flags(flags: tuple[str | None, str | None], names: tuple[str, str], tiny_model: Models) -> None:
    choice = choose_cache(tiny_model("llama"), options.requested_cache(*flags))
    assert (choice.name_k, choice.name_v) == names


@each("flags", [(None, None), ("auto", None), ("subkv", None), ("subkv", "subkv"), (None, "subkv")])
def test_flags_of_coded_caches(flags: tuple[str | None, str | None], coded_model: Models) -> None:
    request = options.requested_cache(*flags, adapt="v", n_sink=3)
    choice = choose_cache(coded_model(), request)
    assert (choice.name, choice.window.n_sink, choice.window.adapt) == ("subkv", 3, "v")


def test_first_steps() -> None:
    """Three commands, which exist."""
    result = run()
    assert result.exit_code == 0
    named = re.findall(r"^subkv (\w+) ", result.stdout, re.M)
    assert named == ["chat", "run", "convert"] and set(named) <= set(cli.COMMANDS)
    assert result.stdout.endswith("`subkv --help` lists all commands.\n")


def test_demo_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PACKAGE", "no_such_package_anywhere")
    result = run("chat", "-p", "Hi", "-st")
    assert result.exit_code == 1
    assert result.stderr.startswith("-m: expected a model or the demo extra, found neither")


def test_demo_is_converted_once(
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: Models,
    calibration: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo, "model_path", lambda: tiny_model("llama"))
    monkeypatch.setattr(demo, "calibration_path", lambda: calibration)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stale = tmp_path / "subkv" / f"{demo.NAME}-0123456789abcdef.subkv.gguf"
    stale.parent.mkdir()
    stale.write_text("an older version's copy")
    first = demo.converted()
    assert "first use: converting the demo model" in capsys.readouterr().err
    assert first.parent == tmp_path / "subkv"
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    before = first.stat().st_mtime_ns
    assert demo.converted() == first
    assert first.stat().st_mtime_ns == before
    for error in REASONS.values():
        sentence = f"XDG_CACHE_HOME: cannot read {first}: {os.strerror(error)}"
        with unreadable(lambda path: path == first, error), pytest.raises(SubkvError, match=sentence):
            demo.converted()
    assert first.stat().st_mtime_ns == before
    first.write_bytes(first.read_bytes()[:-100])  # damaged: made again
    assert check_model_file(demo.converted()) == first
    assert "truncated; converting it again" in capsys.readouterr().err
    whole = first.read_bytes()
    first.write_bytes(whole.replace(b"calibrated", b"calibratex", 1))
    assert demo.converted() == first and first.read_bytes() == whole
    assert "subkv.gamma: expected " in (said := capsys.readouterr().err) and said.count("; converting it again") == 1


@pytest.mark.parametrize("state", ["file", "full"])
def test_the_demo_without_a_cache_folder(
    state: str, monkeypatch: pytest.MonkeyPatch, tiny_model: Models, calibration: Path, tmp_path: Path
) -> None:
    """It runs on bases from the weights."""
    monkeypatch.setattr(demo, "model_path", lambda: tiny_model("llama"))
    monkeypatch.setattr(demo, "calibration_path", lambda: calibration)
    blocked, expected = tmp_path / "file", "cannot create "
    blocked.write_text("")
    write = files.replacing

    def full() -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if state == "file":
        monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    else:
        monkeypatch.setattr(files, "replacing", lambda path: full() if path.parent == cache_folder() else write(path))
        expected = "cannot write .*: No space left on device; no file was left behind"
    result = run("chat", "-p", "Hi", "-st", "-n", 2, "-c", 256)
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("XDG_CACHE_HOME: ")]
    assert len(lines) == 1 and re.search(
        f"{expected}.*; the demo model runs on bases from its weights instead of calibrated ones", lines[0]
    ), result.stderr
    assert "KV cache: subkv, " in result.stderr


@pytest.mark.slow
def test_demo_model_chats(demo_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: Any) -> None:
    try:
        demo.calibration_path()
    except SubkvError:
        pytest.skip(f"demo calibration: {demo.CALIBRATION} is not in models/")
    question = "What is the capital of France?"
    for _ in range(2):  # its defaults make the same answer each time
        done = program("runtime.chat", "-p", question, "-st", "-c", 512, XDG_CACHE_HOME=str(tmp_path))
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == "The capital of France is Paris."
    assert "KV cache: subkv, " in done.stderr
    assert len(list((tmp_path / "subkv").iterdir())) == 1
