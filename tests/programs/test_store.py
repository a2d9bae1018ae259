"""Prompts that outlive llama-server (SUBKV_STORE): a restart, several servers, broken folders."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from programs import calibration, coded_model, text_file

from subkv.native import library as _lib

__all__ = ["calibration", "coded_model", "text_file"]

SERVER = _lib.lib_dir() / ("llama-server.exe" if os.name == "nt" else "llama-server")
pytestmark = [
    pytest.mark.skipif(not SERVER.is_file(), reason="llama-server: not built (SUBKV_PROGRAMS=ON)"),
    pytest.mark.skipif(os.name == "nt", reason="SIGTERM"),
]
N = 700  # tokens of a prompt
KINDS = {"coded": "auto", "ordinary": "off"}

Tokens = list[int]


class Server:
    """A llama-server at work."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self._port, self._log = process, port, log

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def ask(self, prompt: Sequence[int], n: int = 8, **options: Any) -> tuple[Tokens, int, int]:
        """The answer to a prompt, and how many of its tokens were restored or held, and evaluated."""
        body = {"prompt": list(prompt), "n_predict": n, "temperature": 0, "return_tokens": True, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/completion",
            json.dumps(body | options).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            said = json.load(answer)
        return said["tokens"], said["timings"]["cache_n"], said["timings"]["prompt_n"]

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health") as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, self.log[-3000:]


Serve = Callable[..., contextlib.AbstractContextManager[Server]]


@pytest.fixture
def serve(coded_model: Callable[..., Path], tmp_path: Path) -> Serve:
    """serve("-np", 1, kind="ordinary", SUBKV_STORE=…): ended by SIGTERM, as services are."""
    number = iter(range(100))

    @contextlib.contextmanager
    def start(*arguments: Any, kind: str = "coded", **variables: Any) -> Iterator[Server]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = tmp_path / f"{next(number)}.log"
        command: list[Any] = [SERVER, "-m", coded_model(), "--host", "127.0.0.1", "--port", port, "-t", 1, "-c", 2048]
        command += ["-b", 256, "-ub", 256, "--no-warmup", *(arguments or ("-np", 1))]
        env = {name: value for name, value in os.environ.items() if not name.startswith(("SUBKV", "LLAMA"))}
        env |= {"SUBKV": KINDS[kind], **{name: str(value) for name, value in variables.items()}}
        with log.open("wb") as out:
            process = subprocess.Popen(list(map(str, command)), env=env, stdout=out, stderr=out)
        server = Server(process, port, log)
        try:
            for _ in range(600):
                assert process.poll() is None, server.log
                if server.healthy():
                    break
                time.sleep(0.05)
            yield server
            if process.poll() is None:
                server.stop()
        finally:
            process.kill()
            process.wait()

    return start


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def text(seed: int, n: int = N) -> Tokens:
    rng = random.Random(seed)
    return [rng.randrange(20, 250) for _ in range(n)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_gets_a_prompt_back(serve: Serve, store: Path, kind: str) -> None:
    """Few tokens are evaluated, and the answer is the one without the restart."""
    prompt = text(1)
    with serve(kind=kind) as server:
        answer, _, _ = server.ask(prompt)
        more = [*prompt, *answer, *text(2, 20)]
        expected, n_held, _ = server.ask(more)
    assert n_held >= N
    with serve(kind=kind, SUBKV_STORE=store) as server:
        assert server.ask(prompt)[0] == answer
        assert "prompts are stored in" in server.log
    with serve(kind=kind, SUBKV_STORE=store) as server:
        again, n_restored, n_evaluated = server.ask(more)
    assert again == expected
    assert n_restored >= N
    assert n_restored + n_evaluated == len(more)


@pytest.mark.parametrize("kind", KINDS)
def test_an_edited_prompt_after_a_restart(serve: Serve, store: Path, kind: str) -> None:
    """Checkpoints were stored, too: a coded cache goes back to one, an ordinary one to where texts part."""
    prompt = text(3)
    edited = [*prompt[: N - 40], *text(4, 60)]
    with serve(kind=kind) as server:
        expected, _, _ = server.ask(edited)
    with serve(kind=kind, SUBKV_STORE=store) as server:
        server.ask(prompt)
    with serve(kind=kind, SUBKV_STORE=store) as server:
        answer, n_restored, _ = server.ask(edited)
    assert answer == expected
    assert N - 40 - 256 - 4 <= n_restored <= N - 40


def test_servers_share_a_folder(serve: Serve, store: Path) -> None:
    """At the same time: a prompt that one has given up is found by the other, which was there before."""
    prompt = text(5)
    with serve(SUBKV_STORE=store) as one, serve(SUBKV_STORE=store) as other:
        expected, _, _ = one.ask(prompt)
        one.ask(text(6))
        for _ in range(200):
            if any(store.glob("*.prefix")):
                break
            time.sleep(0.05)
        answer, n_restored, _ = other.ask(prompt)
        assert n_restored >= N - 256
        assert answer == expected


def test_conversations_that_begin_alike(serve: Serve, store: Path) -> None:
    """They take one slot from each other, which would keep the last one only: all of them come back."""
    begin = text(90, 1000)
    prompts = [begin + text(91 + i, 200) for i in range(4)]
    with serve(SUBKV_STORE=store) as server:
        answers = [server.ask(prompt)[0] for prompt in prompts]
    with serve(SUBKV_STORE=store) as server:
        for prompt, answer in zip(prompts, answers, strict=True):
            again, n_restored, _ = server.ask(prompt)
            assert n_restored > 1100
            assert again == answer
    assert len(list(store.glob("*.prefix"))) == len(prompts)


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "apart"])
def test_several_slots(serve: Serve, store: Path, unified: bool) -> None:
    """All of them are kept at the end, whatever slot finds them; of another number of slots where these share cells."""
    cells = ["--kv-unified"] if unified else ["--no-kv-unified"]
    prompts = [text(10 + i) for i in range(4)]
    with serve("-np", 4, "-c", 8192, *cells, SUBKV_STORE=store) as server:
        answers = [server.ask(prompt, id_slot=i)[0] for i, prompt in enumerate(prompts)]
    with serve("-np", 3 if unified else 4, "-c", 8192, *cells, SUBKV_STORE=store) as server:
        for prompt, answer in zip(reversed(prompts), reversed(answers), strict=True):
            again, n_restored, _ = server.ask(prompt)
            assert n_restored >= N - 256
            assert again == answer


def test_another_cache_finds_nothing(serve: Serve, store: Path) -> None:
    """Of another window, of ordinary cells, of other metadata."""
    prompt = text(20)
    with serve(SUBKV_STORE=store) as server:
        expected, _, _ = server.ask(prompt)
    for options in (
        {"SUBKV_RECENT": 32},
        {"SUBKV_SINK": 8},
        {"kind": "ordinary"},
        {"arguments": ("-np", 2, "--no-kv-unified")},
        {"arguments": ("-np", 1, "--rope-freq-base", 5000)},
        {"arguments": ("-np", 1, "--override-kv", "llama.attention.layer_norm_rms_epsilon=float:0.001")},
    ):
        arguments: Any = options.pop("arguments", ())
        with serve(*arguments, SUBKV_STORE=store, **options) as server:
            assert server.ask(prompt)[1] == 0
    with serve(SUBKV_STORE=store) as server:
        again, n_restored, _ = server.ask(prompt)
        assert (again, n_restored > N - 256) == (expected, True)


@pytest.mark.parametrize("how", ["cut", "bit", "empty"])
def test_a_damaged_folder(serve: Serve, store: Path, how: str) -> None:
    """It costs the evaluation, and is whole again at the end."""
    prompt = text(30)
    with serve(SUBKV_STORE=store) as server:
        expected, _, _ = server.ask(prompt)
    files = list(store.iterdir())
    assert len(files) > 3
    for path in files:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes({"cut": data[: len(data) // 2], "bit": data, "empty": b""}[how])
    with serve(SUBKV_STORE=store) as server:
        answer, n_restored, _ = server.ask(prompt)
        assert (answer, n_restored) == (expected, 0)
    with serve(SUBKV_STORE=store) as server:
        answer, n_restored, _ = server.ask(prompt)
        assert (answer, n_restored > N - 256) == (expected, True)


@pytest.mark.parametrize(
    "variables, sentence",
    [
        ({"SUBKV_STORE": __file__}, "expected a folder, found something else"),
        ({"SUBKV_STORE_MIB": "many"}, "SUBKV_STORE_MIB: a number from 1 to 1073741824 expected, 'many' found"),
        ({"SUBKV_STORE_MIB": "0"}, "'0' found"),
        ({"SUBKV_STORE_MIB": "-1"}, "'-1' found"),
    ],
)
def test_a_store_that_cannot_be_used(serve: Serve, store: Path, variables: dict[str, str], sentence: str) -> None:
    """One line at the start; the server answers."""
    with serve(**{"SUBKV_STORE": store, **variables}) as server:
        assert len(server.ask(text(40, 50))[0]) == 8
        assert server.log.count(sentence) == 1
        assert server.log.count("prompts are not stored") == 1


def test_a_store_that_is_full(serve: Serve, store: Path) -> None:
    """Files stay below the bound; what does not fit is evaluated."""
    with serve(SUBKV_STORE=store, SUBKV_STORE_MIB=1) as server:
        for seed in range(50, 56):
            assert len(server.ask(text(seed))[0]) == 8
    assert sum(path.stat().st_size for path in store.iterdir()) <= 1 << 20


def test_the_end_of_a_server_at_work(serve: Serve, store: Path) -> None:
    """SIGTERM in the middle of an answer: what was evaluated until then is kept."""
    prompt = text(60)
    with serve(SUBKV_STORE=store) as server:
        server.ask(prompt, 1)

        def ask() -> None:
            with contextlib.suppress(OSError, json.JSONDecodeError, urllib.error.HTTPError):
                server.ask(prompt, 1200)

        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(0.3)
        server.stop()
        asking.join()
    with serve(SUBKV_STORE=store) as server:
        assert server.ask(prompt)[1] >= N - 256


def test_a_server_that_sleeps(serve: Serve, store: Path) -> None:
    """Its context is freed meanwhile; what slots held comes back from the folder."""
    prompt = text(65)
    with serve("-np", 1, "--sleep-idle-seconds", 1, SUBKV_STORE=store) as server:
        expected, _, _ = server.ask(prompt)
        for _ in range(600):
            if "entering sleeping state" in server.log:
                break
            time.sleep(0.05)
        answer, n_restored, _ = server.ask(prompt)
        assert (answer, n_restored >= N - 256) == (expected, True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
def test_without_a_store(serve: Serve, store: Path) -> None:
    """Nothing is written, nothing said; without coefficients libsubkv is not even loaded."""
    with serve(kind="ordinary") as server:
        server.ask(text(70))
        assert "libsubkv" not in Path(f"/proc/{server.process.pid}/maps").read_text()
        assert "subkv:" not in server.log
    with serve(kind="ordinary") as server:
        assert server.ask(text(70))[1] == 0
    assert not store.exists()


def test_no_prompt_of_an_adapter(serve: Serve, store: Path, coded_model: Callable[..., Path], tmp_path: Path) -> None:
    """Keys and values under a LoRA adapter are another model's: nothing is stored, nothing restored."""
    import gguf
    import numpy as np

    adapter = tmp_path / "lora.gguf"
    writer = gguf.GGUFWriter(adapter, "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    reader = gguf.GGUFReader(coded_model())
    tensor = next(t for t in reader.tensors if t.name == "blk.0.attn_k.weight")
    n_in, n_out = map(int, tensor.shape)
    rng = np.random.default_rng(0)
    writer.add_tensor(f"{tensor.name}.lora_a", rng.normal(size=(4, n_in)).astype(np.float32))
    writer.add_tensor(f"{tensor.name}.lora_b", rng.normal(size=(n_out, 4)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    prompt = text(80)
    with serve(SUBKV_STORE=store) as server:
        server.ask(prompt)
    files = set(store.iterdir())
    with serve("-np", 1, "--lora", adapter, SUBKV_STORE=store) as server:
        assert server.ask(prompt)[1] == 0
        server.ask(text(81))
    assert set(store.iterdir()) == files
