"""Unchanged programs on llama-cpp-python under `subkv run`: each gets a coded cache and logs it in one line.

The packages are those of the extra `clients`; missing ones are skipped.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Models = Callable[..., Path]
REPO = Path(__file__).resolve().parents[2]

# llama_cpp does not report coded caches, so libsubkv, which it loads, is called
PLAIN = """
import ctypes, json, os, sys
import llama_cpp
from llama_cpp import llama_cpp as C

llm = llama_cpp.Llama(sys.argv[1], n_ctx=256, verbose="quiet" not in sys.argv)
story = "the sea and the wind " * 6
texts = []
for prompt in (story + "one", story + "two" + story, story + "three"):  # edited further back than the window reaches
    texts.append(llm(prompt, max_tokens=4, temperature=0)["choices"][0]["text"])
library = ctypes.CDLL(os.path.join(os.environ["LLAMA_CPP_LIB_PATH"], "libsubkv" + os.path.splitext(C._lib._name)[1]))
library.subkv_context_fingerprint.restype = ctypes.c_char_p
found = library.subkv_context_fingerprint(ctypes.c_void_p(llm.ctx))
print(json.dumps({"texts": texts, "fingerprint": (found or b"").decode()}))
"""
LANGCHAIN = """
import json, sys
from langchain_community.chat_models import ChatLlamaCpp
from langchain_community.llms import LlamaCpp

chat = ChatLlamaCpp(model_path=sys.argv[1], n_ctx=256, max_tokens=4, temperature=0)
text = LlamaCpp(model_path=sys.argv[1], n_ctx=256, max_tokens=4, temperature=0)
print(json.dumps([chat.invoke("Say hello.").content, text.invoke("One two"), *text.stream("One two")]))
"""
LLAMA_INDEX = """
import json, sys
from llama_index.core.llms import ChatMessage
from llama_index.llms.llama_cpp import LlamaCPP

llm = LlamaCPP(model_path=sys.argv[1], context_window=256, max_new_tokens=4, temperature=0.0)
said = llm.chat([ChatMessage(role="user", content="Say hello.")]).message.content
print(json.dumps([said, llm.complete("One two").text]))
"""
GUIDANCE = """
import json, sys
from guidance import gen, models, select

llm = models.LlamaCpp(sys.argv[1], n_ctx=256, echo=False, verbose=True)
found = llm + "One two " + gen("digits", regex="[0-9]{3}", temperature=0) + select(["yes", "no"], name="choice")
assert found["digits"].isdigit() and found["choice"] in ("yes", "no")
print(json.dumps([found["digits"], found["choice"]]))
"""
OUTLINES = """
import json, sys
from typing import Literal
import llama_cpp, outlines

llm = outlines.from_llamacpp(llama_cpp.Llama(sys.argv[1], n_ctx=256))
choice = llm("Is it warm? ", Literal["yes", "no"], max_tokens=4)
assert choice in ("yes", "no")
print(json.dumps([choice]))
"""
# name -> packages, the program, and how many contexts it makes
CLIENTS = {
    "langchain": (["langchain_community"], LANGCHAIN, 2),
    "llama-index": (["llama_index.llms.llama_cpp"], LLAMA_INDEX, 1),
    "guidance": (["guidance"], GUIDANCE, 1),
    "outlines": (["outlines", "numba"], OUTLINES, 1),
}
SERVER = ["fastapi", "pydantic_settings", "sse_starlette", "starlette_context", "uvicorn", "yaml"]


def need(*packages: str) -> None:
    for package in packages:
        try:
            missing = importlib.util.find_spec(package) is None
        except ModuleNotFoundError:  # the package that it is part of
            missing = True
        if missing:
            pytest.skip(f"clients: package {package} is not installed (pip install '.[clients]')")


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA")}
    return {**kept, "PYTHONPATH": path, "PYTHONUTF8": "1"}


def launched(*arguments: Any) -> list[str]:
    return [sys.executable, "-m", "runtime.cli", "run", *map(str, arguments)]


@pytest.fixture
def model(tiny_model: Models, tmp_path: Path) -> Path:
    return Path(shutil.copy(tiny_model(), tmp_path / "m.gguf"))


@pytest.fixture
def client(tmp_path: Path, model: Path) -> Callable[..., tuple[Any, str]]:
    """client(text, *options): the program's output, and stderr; options: of `subkv run`."""

    def run(text: str, *options: Any, arguments: tuple[str, ...] = ()) -> tuple[Any, str]:
        script = tmp_path / "client.py"
        script.write_text(text)
        command = launched(*options, sys.executable, script, model, *arguments)
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1]), done.stderr

    return run


def caches(logged: str) -> list[str]:
    """The log lines about the caches of contexts."""
    return [line for line in logged.splitlines() if line.startswith("subkv: ")]


def test_llama_cpp_alone(client: Callable[..., tuple[Any, str]], model: Path) -> None:
    coded, logged = client(PLAIN)
    (line,) = caches(logged)
    assert line.startswith("subkv: coded K/V cache, ") and "; bases: from the weights, 6." in line
    assert coded["fingerprint"]
    quiet, logged = client(PLAIN, arguments=("quiet",))
    assert quiet == coded and caches(logged) == [line]  # a warning, which llama_cpp does not hide


@pytest.mark.parametrize("name", CLIENTS)
def test_clients(name: str, client: Callable[..., tuple[Any, str]], model: Path) -> None:
    packages, text, n_contexts = CLIENTS[name]
    need(*packages)
    got, logged = client(text)
    lines = caches(logged)
    assert len(lines) == n_contexts
    assert all(line.startswith("subkv: coded K/V cache, ") for line in lines)
    assert got and all(isinstance(answer, str) for answer in got)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextlib.contextmanager
def serving(model: Path, log: Path) -> Iterator[str]:
    """llama-cpp-python's own server; its address."""
    port = free_port()
    command = launched(sys.executable, "-m", "llama_cpp.server", "--model", model, "--n_ctx", 256, "--port", port)
    with open(log, "w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env=environment())
    try:
        address = f"http://127.0.0.1:{port}"
        end = time.monotonic() + 120
        while True:
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{address}/v1/models").close()
                break
            except OSError:
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def test_the_server_of_llama_cpp_python(model: Path, tmp_path: Path) -> None:
    need(*SERVER)
    log = tmp_path / "log"
    with serving(model, log) as address:
        body = json.dumps({"prompt": "One two", "max_tokens": 4, "temperature": 0}).encode()
        request = urllib.request.Request(
            f"{address}/v1/completions", body, {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request) as response:
            answer = json.load(response)
    assert answer["choices"][0]["text"] and answer["choices"][0]["finish_reason"] == "length"
    (line,) = caches(log.read_text())
    assert line.startswith("subkv: coded K/V cache, ")
    assert log.read_text().startswith("bases: from the weights")  # --model was understood
