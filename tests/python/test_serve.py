"""`subkv serve`: which llama-server it starts, with which arguments and environment."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from each import each

from runtime import cli, demo
from runtime.launch import programs
from runtime.serve.cli import serve_start

FIND = programs.find
pytestmark = pytest.mark.skipif(os.name == "nt", reason="a script stands for llama-server")


@pytest.fixture(autouse=True)
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script that is found as llama-server and prints its arguments and its cache."""
    path = tmp_path / "llama-server"
    path.write_text('#!/bin/sh\necho "$@ SUBKV=$SUBKV STORE=$SUBKV_STORE"\nexit 7\n')
    path.chmod(0o755)
    monkeypatch.setattr(programs, "find", lambda *_: path)
    for name in [name for name in os.environ if name.startswith(("SUBKV", "LLAMA_ARG"))]:
        if name != "SUBKV_LIB_PATH":
            monkeypatch.delenv(name)
    return path


@pytest.fixture
def bases(coded_model: Callable[..., Path]) -> str:
    """A model that carries its bases."""
    return str(coded_model())


def test_coefficients_by_default(bases: str, server: Path) -> None:
    made = serve_start(["-m", bases, "-np", "2", "--port", "0", "-hff", "x"])
    assert made.path == server
    assert made.arguments == ["llama-server", "-m", bases, "-np", "2", "--port", "0", "-hff", "x"]
    assert made.environment["SUBKV"] == "subkv"  # or no context; the library finds the file


@each(
    ("given", "expected"),
    [
        (["-ctk", "q8_0"], None),
        (["-ctk", "f16"], None),
        (["-ctk", "auto"], "auto"),
        (["--cache-type-v=subkv"], "auto"),
        (["-ctkd", "q8_0"], "subkv"),
        (["--embeddings"], "auto"),
        (["--rerank", "--pooling", "rank"], "auto"),
    ],
)
def test_a_cache_that_was_chosen(bases: str, given: list[str], expected: str | None) -> None:
    made = serve_start(["-m", bases, *given])
    assert made.environment.get("SUBKV") == expected
    assert made.arguments == ["llama-server", "-m", bases, *given]


def test_the_demo_model(bases: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no model is named, with the chat's defaults; its weights alone for an ordinary cache."""
    monkeypatch.setenv("LLAMA_ARG_N_PREDICT", "9")
    monkeypatch.setattr(demo, "converted", lambda: Path(bases))
    monkeypatch.setattr(demo, "model_path", lambda: Path("weights.gguf"))
    made = serve_start(["-np", "1"])
    assert made.arguments == ["llama-server", "-m", bases, "-np", "1"]
    given = {
        "ALIAS": demo.NAME,
        "CHAT_TEMPLATE": "chatml",
        "TEMPERATURE": "0",
        "REPEAT_PENALTY": "1.1",
        "N_PREDICT": "9",
    }
    assert {name: made.environment[f"LLAMA_ARG_{name}"] for name in given} == given
    assert "LLAMA_ARG_TEMPERATURE" not in serve_start(["-m", bases]).environment
    named = serve_start(["--alias", "mine", "--temp=1"]).environment
    assert not {"LLAMA_ARG_ALIAS", "LLAMA_ARG_TEMPERATURE"} & set(named), "llama-server warns, and keeps both names"
    assert serve_start(["-ctk", "f16"]).arguments == ["llama-server", "-m", "weights.gguf", "-ctk", "f16"]


def test_a_model_without_its_flag(bases: str) -> None:
    made = serve_start([bases, "-np", "1"])
    assert made.arguments == ["llama-server", "-m", bases, "-np", "1"]
    assert made.environment["SUBKV"] == "subkv"
    assert serve_start(["-n", "-1", bases]).arguments == ["llama-server", "-n", "-1", "-m", bases]
    given = ["-m", bases, "--mmproj", "projector.gguf"]
    assert serve_start(given).arguments == ["llama-server", *given]
    for second in (["-m", "a.gguf", bases], ["-hf", "user/repo", "-np", "1", bases], [bases, "-m", "a.gguf"]):
        with pytest.raises(click.UsageError, match=f"-m: expected one model, found another one: {re.escape(bases)}"):
            serve_start(second)
    with pytest.raises(click.UsageError, match="expected -m in front of a model behind an option, found --jinja"):
        serve_start(["--jinja", bases])
    with pytest.raises(click.UsageError, match=r"model\.txt: expected a model file \(\*\.gguf\) or an option"):
        serve_start(["model.txt"])


def test_a_router_names_no_model(tmp_path: Path) -> None:
    made = serve_start(["--models-dir", str(tmp_path)])
    assert made.arguments == ["llama-server", "--models-dir", str(tmp_path)]
    assert made.environment["SUBKV"] == "auto"


def test_our_options_go_into_the_environment(bases: str, tmp_path: Path) -> None:
    """In any place among llama-server's."""
    own = [
        "--n-recent",
        "32",
        "-c",
        "512",
        "--store",
        str(tmp_path / "s"),
        "--store-mib",
        "5",
        "--n-sink=8",
        "--store-moved",
    ]
    made = serve_start(["--bases", bases, *own, "-m", bases, "--n-rollback", "4"])
    assert made.arguments == ["llama-server", "-c", "512", "-m", bases]
    expected = {"SUBKV": bases, "SUBKV_RECENT": "32", "SUBKV_SINK": "8", "SUBKV_ROLLBACK": "4"}
    expected |= {"SUBKV_STORE": str(tmp_path / "s"), "SUBKV_STORE_MIB": "5", "SUBKV_STORE_MOVED": "1"}
    assert {name: made.environment.get(name) for name in expected} == expected


def test_defaults_give_way(bases: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of the user's own come first, and llama-server's options before both."""
    monkeypatch.setenv("LLAMA_ARG_CACHE_RAM", "7")
    made = serve_start(["-m", bases]).environment
    assert (made["LLAMA_ARG_CACHE_RAM"], made["LLAMA_ARG_CORS_ORIGINS"]) == ("7", "localhost")


@each(
    ("given", "names"),
    [
        ([], "localhost"),
        (["--host", "127.0.0.1"], "localhost"),
        (["--host=localhost"], "localhost"),
        (["--host", "0.0.0.0"], None),
        (["--host", "server.sock"], None),
    ],
)
def test_names_of_a_server_on_this_machine(bases: str, given: list[str], names: str | None) -> None:
    assert serve_start(["-m", bases, *given]).environment.get("SUBKV_ALLOW_HOST") == names


@pytest.mark.parametrize("answer", ["-h", "--version", "--list-devices"])
def test_options_that_need_no_model(answer: str) -> None:
    assert serve_start([answer]).arguments == ["llama-server", answer]


def test_refusals(bases: str, tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(click.ClickException, match="--store: expected a folder, found the file"):
        serve_start(["-m", bases, "--store", bases])
    with pytest.raises(click.UsageError, match="--store-mib: expected --store with it, found none"):
        serve_start(["-m", bases, "--store-mib", "5"])
    with pytest.raises(click.ClickException, match="--bases: expected a coefficient cache"):
        serve_start(["-m", bases, "--bases", bases, "-ctk", "q8_0"])
    with pytest.raises(click.ClickException, match="-m: expected a GGUF file"):
        serve_start(["-m", str(tmp_path / "none.gguf")])


def test_without_llama_server(bases: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nowhere = tmp_path / "lib"
    monkeypatch.setattr(programs, "find", lambda name, *_: FIND(name, nowhere, str(nowhere)))
    result = CliRunner().invoke(cli.main, ["serve", "-m", bases])
    assert result.exit_code == 1
    assert "found no llama-server; in a clone of subkv, `CMAKE_ARGS='-DLLAMA_BUILD=OFF" in result.output


def test_the_help_names_both_sides() -> None:
    result = CliRunner().invoke(cli.main, ["serve", "--help"])
    assert result.exit_code == 0
    assert "--store FOLDER" in result.output and "llama-server --help" in result.output
