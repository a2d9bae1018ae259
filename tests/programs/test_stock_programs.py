"""Programs of llama.cpp as others build them, started by `subkv run`: the plug-in codes as the patch does.

They are those of this build (SUBKV_STOCK and SUBKV_PROGRAMS), or of a folder that SUBKV_STOCK_PROGRAMS names.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from program_paths import program
from servers import CODED, Server, assert_same, serving

from subkv.native.library import lib_dir

FOLDER = Path(os.environ.get("SUBKV_STOCK_PROGRAMS", lib_dir() / "stock"))
pytestmark = pytest.mark.skipif(
    not (FOLDER / "llama-server").is_file(), reason="unpatched programs: not built (SUBKV_STOCK, SUBKV_PROGRAMS)"
)

N_TRIES = 10  # upstream's programs may end before their log is written (docs/upstream/log-at-exit.md)
Serve = Callable[..., contextlib.AbstractContextManager[Server]]


def by_subkv(bases: Path, name: str) -> list[Any]:
    return [sys.executable, "-m", "runtime.cli", "run", "--bases", bases, FOLDER / name]


@pytest.fixture(scope="session")
def bases(words: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sidecar of `words`: 8 bits, the last 16 tokens exact."""
    from click.testing import CliRunner

    from converter.cli import main

    path = tmp_path_factory.mktemp("bases") / "words.subkv.gguf"
    options = ["--sidecar", "-c", 256, "--chunks", 16, "--codec", "int8", "--n-recent", 16]
    result = CliRunner().invoke(main, [str(word) for word in [words, "-f", text_file, "-o", path, *options]])
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture
def serve(words: Path, bases: Path, tmp_path: Path) -> Serve:
    """serve("-np", 4): the stock server with the plug-in; patched=True: ours on the same bases."""

    @contextlib.contextmanager
    def start(*arguments: Any, patched: bool = False) -> Iterator[Server]:
        by = [] if patched else by_subkv(bases, "llama-server")
        library = {"SUBKV_LIB_PATH": os.environ["SUBKV_LIB_PATH"]} if "SUBKV_LIB_PATH" in os.environ else {}
        with serving(words, *arguments, subkv=str(bases), folder=tmp_path, by=by, **library) as server:
            yield server
            assert server.log.count(CODED) >= 1, server.log[-3000:]
            assert ("whose ggml loads the plug-in" in server.log) != patched

    return start


def run(words: Path, bases: Path, name: str, *arguments: Any, patched: bool = False) -> str:
    """What a program writes, on one thread."""
    command = [program(name)] if patched else by_subkv(bases, name)
    environment = {**os.environ, "SUBKV": str(bases)}
    command = list(map(str, [*command, "-m", words, "-t", 1, *arguments]))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "subkv: coded K/V cache" in done.stderr, done.stderr[-3000:]
    return done.stdout + "\n" + done.stderr


def test_completion_and_bench(words: Path, bases: Path) -> None:
    options = ["-c", 512, "-n", 24, "--temp", 0, "-no-cnv", "--ignore-eos", "-p", "The import statement"]
    text = re.compile(r"The import statement.*")
    found, *_ = text.findall(run(words, bases, "llama-completion", *options, patched=True))
    stock = (text.findall(run(words, bases, "llama-completion", *options)) for _ in range(N_TRIES))
    assert any(one == [found] for one in stock)
    assert "tg8" in run(words, bases, "llama-bench", "-p", 16, "-n", 8, "-d", 64, "-r", 1)


def test_cli(words: Path, bases: Path) -> None:
    if not (FOLDER / "llama-cli").is_file():
        pytest.skip(f"llama-cli: not in {FOLDER}")
    options = ["-c", 512, "-n", 24, "--temp", 0, "--single-turn", "--ignore-eos", "-v", "-p", "The import statement"]
    answer = re.compile(r"^> The import statement\n(.*?)^\[ Prompt: ", re.M | re.S)
    found, stock = (answer.findall(run(words, bases, "llama-cli", *options, patched=which)) for which in (True, False))
    assert len(found) == 1 and found == stock and found[0].strip()


def test_divergence_is_that_of_the_patch(words: Path, bases: Path, text_file: Path, tmp_path: Path) -> None:
    base = tmp_path / "base.kld"
    common = ["-f", text_file, "-c", 256, "--chunks", 2, "--kl-divergence-base", base]
    stock = [FOLDER / "llama-perplexity", "-m", words, *common]
    off = {name: value for name, value in os.environ.items() if not name.startswith(("SUBKV", "GGML"))}
    subprocess.run(list(map(str, stock)), env=off, capture_output=True, check=True)
    mean = re.compile(r"Mean\s+KLD:\s*([-\d.]+)")
    options = [*common, "--kl-divergence"]
    found, *_ = mean.findall(run(words, bases, "llama-perplexity", *options, patched=True))
    plugged = (mean.findall(run(words, bases, "llama-perplexity", *options)) for _ in range(N_TRIES))
    assert next(filter(None, plugged)) == [found] and 0 < float(found) < 0.01


@pytest.mark.parametrize("unified", ["--kv-unified", "--no-kv-unified"])
def test_slots(serve: Serve, text: str, unified: str, tmp_path: Path) -> None:
    """Together and alone; saved by a server that is then killed, and restored by another one."""
    prompts = [text[1000 * i : 1000 * i + 300 + 100 * i] for i in range(6)]
    arguments = ("-c", 8192, "-np", 4, unified, "--cache-ram", 0, "--slot-save-path", tmp_path)
    bodies = [{"prompt": prompt, "n": 16, "cache_prompt": False, "n_probs": 2} for prompt in prompts]
    with serve(*arguments) as server:
        together, alone = server.together(bodies), [server.complete(**body) for body in bodies]
        before = server.complete(text[:2000], 16, id_slot=1)
        saved = server.request("POST", "/slots/1?action=save", {"filename": "a.bin"})
        continued = server.complete(text[:2000] + before["content"] + " and", 16, id_slot=1, n_probs=2)
        state = (tmp_path / "a.bin").read_bytes()
        server.kill()
    assert (tmp_path / "a.bin").read_bytes() == state
    with serve(*arguments, patched=True) as server:
        ours = [server.complete(**body) for body in bodies]
    for one, same, other in zip(alone, ours, together, strict=True):
        assert one["tokens"] == same["tokens"]
        assert_same(one, other)
    with serve(*arguments) as server:
        restored = server.request("POST", "/slots/0?action=restore", {"filename": "a.bin"})
        assert restored["n_restored"] == saved["n_saved"]
        after = server.complete(text[:2000] + before["content"] + " and", 16, id_slot=0)
        assert after["timings"]["prompt_n"] == continued["timings"]["prompt_n"] < 32
        assert_same(continued, after, tie=0.1)


def test_edits(serve: Serve, text: str) -> None:
    """A prompt in memory, an edited one, moved parts, a context that is shifted."""
    answers = {}
    for patched in (False, True):
        with serve("-c", 2048, "-np", 1, "--cache-reuse", 64, patched=patched) as server:
            prompt, another = server.tokens(text[:1500]), server.tokens(text[20000:21500])
            edited = prompt[:300] + prompt[400:]
            first = server.complete(prompt)
            reused = server.complete(edited)
            assert reused["timings"]["prompt_n"] < 50
            other = server.complete(another)
            again = server.complete(prompt, n_probs=2)
            assert again["timings"]["prompt_n"] < 50
            assert_same(again, first, tie=0.1)
            answers[patched] = [answer["tokens"] for answer in (first, reused, other)]
    assert answers[False] == answers[True]
    with serve("-c", 256, "-np", 1, "--context-shift") as server:
        answer = server.complete(text[:300], 600, n_keep=4)
        assert (answer["tokens_predicted"], answer["truncated"]) == (600, True)
        assert "slot context shift" in server.log
        assert len(server.complete(text[:200], 8)["tokens"]) == 8


def test_the_plugin_alone(words: Path) -> None:
    """In an empty environment: no Python, no home folder, no stored bases."""
    plugin = {"GGML_BACKEND_PATH": str(lib_dir() / "libggml-subkv.so"), "LLAMA_ARG_DEVICE": "SUBKV", "SUBKV": "auto"}
    command = [FOLDER / "llama-completion", "-m", words, "-p", "Hi", "-n", "2", "-c", "512", "-t", "1", "-no-cnv"]
    for _ in range(N_TRIES):
        done = subprocess.run(command, env=plugin, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
        if "subkv: " in done.stderr:
            break
    assert re.search(r"subkv: coded K/V cache, .*; bases: from the weights, 6\.", done.stderr), done.stderr[-2000:]
