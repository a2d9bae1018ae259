"""The programs in examples/, run with the commands in their first lines."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.launch import programs
from runtime.serve.cli import main as serve
from subkv.base.errors import SubkvError
from subkv.engine.llama import Llama
from subkv.native import paths
from subkv.native.binding import C

Models = Callable[..., Path]
REPO = Path(__file__).resolve().parents[2]
EXAMPLES = REPO / "examples"
STORE_SECONDS = 30  # the folder to which a server writes its slots at its end


def run(*command: Any) -> subprocess.CompletedProcess[bytes]:
    path = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUTF8": "1"}
    return subprocess.run(
        [str(part) for part in command], capture_output=True, timeout=300, check=False, env=environment
    )


def example(name: str, *arguments: Any) -> subprocess.CompletedProcess[bytes]:
    return run(sys.executable, EXAMPLES / name, *arguments)


def test_embed(coded_model: Models) -> None:
    done = example("embed.py", coded_model(), "Hello")
    assert done.returncode == 0, done.stderr
    with Llama(coded_model(), n_ctx=2048, verbose=False) as llm:
        stats = llm.kv_stats()
        answer = llm.create_chat_completion([{"role": "user", "content": "Hello"}], max_tokens=100, temperature=0.0)
    text = answer["choices"][0]["message"]["content"]
    line = f"KV cache: {stats.bytes_kv} bytes, {stats.bpe:.2f} bits per element; f16: {stats.bytes_f16} bytes"
    assert done.stdout.decode("utf-8") == f"{text}\n{line}\n"


@pytest.mark.parametrize("name", ["embed.py", "serve_and_call.py", "summarise.py"])
def test_examples_name_missing_arguments(name: str) -> None:
    if name == "serve_and_call.py":
        pytest.importorskip("openai", reason="extra test")
    done = example(name)
    assert done.returncode == 2
    assert b"the following arguments are required: model, " in done.stderr


def test_summarise(coded_model: Models, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("The sea is blue. " * 10)
    done = example("summarise.py", coded_model(), tmp_path / "text", "--max-tokens", 4)
    assert done.returncode == 0, done.stderr
    assert re.search(rb"\d+ tokens in [\d.]+ MiB of KV cache, [\d.]+ bits per element, f16: ", done.stderr)
    (tmp_path / "text").write_text("The sea is blue. " * 10000)
    done = example("summarise.py", coded_model(), tmp_path / "text")
    assert done.returncode == 1
    assert re.fullmatch(rb"\S+text: expected at most \d+ tokens .*, found \d+\n", done.stderr)


def llama_server() -> Path:
    """The program of this build; skips if it is missing."""
    try:
        return programs.find("llama-server", paths.lib_dir(), "")
    except SubkvError:
        pytest.skip("llama-server: not built (SUBKV_PROGRAMS=ON)")


def test_serve_and_call(coded_model: Models) -> None:
    pytest.importorskip("openai", reason="extra test")
    llama_server()
    done = example("serve_and_call.py", coded_model(), "Hello")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_recipe_and_the_unit() -> None:
    """They are not run here: their flags and options of the build exist, and the store has time to be written."""
    folder = EXAMPLES / "server"
    recipe, unit = ((folder / name).read_text("utf-8") for name in ("Containerfile", "subkv.service"))
    entry = json.loads(next(line for line in recipe.splitlines() if line.startswith("ENTRYPOINT")).partition(" ")[2])
    install = re.search(r"CMAKE_ARGS='(.*?)' \S*pip install .* /src$", recipe, re.M)
    cmake = (REPO / "CMakeLists.txt").read_text("utf-8") + (REPO / "docs" / "programs.md").read_text("utf-8")
    assert install and all(option in cmake for option in install[1].split())
    stop = re.search(r"TimeoutStopSec=(\d+)", unit)
    assert stop and int(stop[1]) > STORE_SECONDS and f"--stop-timeout {stop[1]}" in recipe
    known = {flag for option in serve.params for flag in option.opts}
    known |= set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", run(llama_server(), "--help").stdout.decode()))
    service = re.search(r"ExecStart=(.*)", unit)
    assert service
    for called in (entry, service[1].split()):
        assert [Path(called[0]).name, called[1]] == ["subkv", "serve"]
        assert {word for word in called if word.startswith("-")} <= known


@pytest.fixture(scope="module")
def generate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C example, built with the CMake package of the installed wheel or of the build tree in SUBKV_LIB_PATH."""
    for tool in ("cmake", "cc"):
        if shutil.which(tool) is None:
            pytest.skip(f"C example: {tool} is not installed")
    folder = tmp_path_factory.mktemp("c")
    if os.environ.get(paths.SUBKV_LIB_PATH):
        build = paths.lib_dir().parent
        if not (build / "package" / "subkvConfig.cmake").is_file():
            pytest.skip(f"C example: {paths.SUBKV_LIB_PATH} is not in a build tree that can be installed")
        moved = folder / "moved"
        done = run("cmake", "--install", build, "--prefix", folder / "prefix")
        assert done.returncode == 0, done.stderr
        (folder / "prefix").rename(moved)  # the folder must not matter
        where = f"-DCMAKE_PREFIX_PATH={moved}"
    else:
        done = run(sys.executable, "-m", "runtime.cmake_dir")
        assert done.returncode == 0, done.stderr
        where = f"-Dsubkv_DIR={done.stdout.decode().strip()}"
    flags = "-DCMAKE_C_FLAGS=-Wall -Wextra -Wpedantic -Werror"
    for command in (
        ["cmake", "-S", EXAMPLES / "c", "-B", folder / "build", where, flags],
        ["cmake", "--build", folder / "build"],
    ):
        done = run(*command)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "build" / "generate"


def test_c_program_prints_the_text_of_python(generate: Path, coded_model: Models) -> None:
    prompt = "the cat and the hat"
    done = run(generate, coded_model(), prompt)
    assert done.returncode == 0, done.stderr
    with Llama(coded_model(), n_ctx=2048, n_batch=2048, verbose=False) as llm:
        stats = llm.kv_stats()
        tokens: list[int] = []
        for token in llm.generate(llm.tokenize(prompt.encode(), special=True), temp=0.0):
            if C.llama_vocab_is_eog(llm._model.vocab, token) or len(tokens) == 20:
                break
            tokens.append(token)
        text = llm.detokenize(tokens)
    line = (
        f"KV cache: {stats.bytes_kv} bytes (f16: {stats.bytes_f16}), {stats.bpe:.2f} bits per element, "
        f"kernel {stats.kernel}"
    )
    assert done.stdout == text + b"\n" + line.encode() + b"\n"


def test_c_program_refuses(generate: Path, coded_model: Models, tiny_model: Models) -> None:
    for arguments, message in (
        ([], b"usage: generate MODEL.subkv.gguf PROMPT"),
        ([tiny_model(), "Hello"], str(tiny_model()).encode() + b": expected a model with bases, found none; `subkv "),
        ([coded_model(), "word " * 5000], b"the prompt is empty or longer than the context"),
    ):
        done = run(generate, *arguments)
        assert done.returncode == 1
        assert done.stdout == b""
        assert done.stderr.startswith(message)


def test_c_program_uses_the_environment(generate: Path, tiny_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBKV", "auto")
    done = run(generate, tiny_model(), "Hello")
    assert done.returncode == 0, done.stderr
    assert b"bits per element" in done.stdout
