"""No client can stop llama-server: every request is answered or refused in time, and other clients are served."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from attacks import GROUPS, Attack
from each import each
from hostile import SECONDS, Failed, Server, binary, parse, receive

pytestmark = [
    pytest.mark.skipif(binary() is None, reason="llama-server: not built (SUBKV_PROGRAMS=ON)"),
    pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads a process's memory in /proc"),
]
TEMPLATE = str(Path(__file__).parents[1] / "tools.jinja")
OPTIONS = ("-np", "2", "-c", "4096", "--metrics", "--jinja", "--chat-template-file", TEMPLATE)
HEAD = b"POST /completion HTTP/1.1\r\nHost: x\r\nX-"
BODY = b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{"
SMALL = {"prompt": "the", "n_predict": 2, "temperature": 0, "ignore_eos": True}


class SharedServer:
    """A server shared by several attacks; a new one starts after an attack that breaks it."""

    def __init__(self, start: Callable[[], Server]) -> None:
        self.start = start
        self.server: Server | None = None

    def get(self) -> Server:
        if self.server is None:
            self.server = self.start().__enter__()
        return self.server

    def drop(self) -> None:
        if self.server is not None:
            self.server.__exit__()
        self.server = None


@pytest.fixture(scope="module")
def shared(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    model = tiny_model("llama", n_ctx_train=32768)

    def start() -> Server:
        folder = tmp_path_factory.mktemp("server")
        return Server(model, folder, *OPTIONS, "--slot-save-path", f"{folder}/")

    shared_server = SharedServer(start)
    yield shared_server
    shared_server.drop()


@contextlib.contextmanager
def unharmed_server(shared: SharedServer) -> Iterator[Server]:
    """The server; it must be healthy at the end. Otherwise the next attack gets a new one."""
    server = shared.get()
    try:
        yield server
        server.check_health()
    except BaseException:
        shared.drop()
        raise


@pytest.fixture(scope="module")
def three_thousand_files() -> Iterator[None]:
    """Raise this process's limit of open files to 3000."""
    resource = pytest.importorskip("resource")  # not on Windows
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 3000:
        pytest.skip("needs three thousand files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (3000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def behind_a_thousand(server: Server, firsts: list[bytes]) -> int:
    """The status of a request after 1100 open connections, each of which sent one of `firsts`."""
    with contextlib.ExitStack() as stack:
        for i in range(1100):
            stack.enter_context(server.connect()).sendall(firsts[i % len(firsts)])
        return server.ask("POST", "/completion", SMALL, seconds=3 * SECONDS).status


@pytest.fixture(scope="module")
def after_a_minute(
    three_thousand_files: None, tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Future[int]]:
    """The status of a request after connections with an incomplete head or body.

    It takes a minute. The first test of this file starts it, and other tests run meanwhile.
    """
    folder = tmp_path_factory.mktemp("patient")
    with Server(tiny_model("llama"), folder, *OPTIONS) as server, ThreadPoolExecutor(1) as pool:
        yield pool.submit(behind_a_thousand, server, [HEAD, BODY])
        server.process.kill()  # ends a request whose test is not selected


SLOW = [attack for attacks in GROUPS.values() for attack in attacks if attack.slow]


@pytest.mark.parametrize("group", GROUPS)
def test_an_attack_ends_and_the_others_go_on(
    shared: SharedServer, after_a_minute: Future[int], group: str, subtests: pytest.Subtests
) -> None:
    for attack in GROUPS[group]:
        if not attack.slow:
            with subtests.test(attack.name):
                run_attack(shared, attack)


@pytest.mark.slow
@pytest.mark.parametrize("attack", SLOW, ids=lambda attack: attack.name)
def test_a_slow_attack_ends_and_the_others_go_on(shared: SharedServer, attack: Attack) -> None:
    run_attack(shared, attack)


def run_attack(shared: SharedServer, attack: Attack) -> None:
    with unharmed_server(shared) as server:
        results: list[int | Failed] = []

        def send() -> None:
            try:
                results.append(server.ask("POST", attack.path, attack.content()).status)
            except Failed as error:
                results.append(error)

        thread = threading.Thread(target=send)
        thread.start()
        try:
            answer = server.ask("POST", "/completion", SMALL)  # at the same time
            assert answer.status == 200, answer.text
        finally:
            thread.join()
        if isinstance(results[0], Failed):
            raise results[0]
        assert results[0] in attack.statuses


def test_a_grammar_within_the_limits_is_followed(shared: SharedServer) -> None:
    with unharmed_server(shared) as server:
        for grammar, length in (
            ('root ::= ("a"? "b"?)* "z"', None),
            ("root ::= " + "x? " * 10 + '"z"\nx ::= "a"?', None),
            ('root ::= "a"{3,30} "b"', None),
            ("root ::= ([0-9]{4})", 4),
        ):
            answer = server.ask("POST", "/completion", {"prompt": "x", "n_predict": 60, "grammar": grammar, "seed": 1})
            assert answer.status == 200, answer.text
            text = json.loads(answer.body)["content"]
            assert length is None or (len(text) == length and text.isdigit())
            assert not text.strip("abz0123456789")


def test_refusals_name_the_reason(shared: SharedServer) -> None:
    with unharmed_server(shared) as server:
        for body, sentence in (
            ({"grammar": "root ::= " + "x? " * 200 + '"z"\nx ::= "a"?'}, "the grammar is too ambiguous or too large"),
            ({"json_schema": {"properties": {str(i): {} for i in range(600)}}}, "too many optional properties"),
            ({"grammar_triggers": [{"type": 2, "value": "a"}]}, "grammar_triggers is set by the server"),
            ({"prompt": ["x"] * 3000}, "too many prompts in one request: at most 2048"),
        ):
            answer = server.ask("POST", "/completion", {"prompt": "x", "n_predict": 4} | body)
            assert answer.status in (400, 500)
            assert sentence in json.loads(answer.body)["error"]["message"]


#
# connections
#


@pytest.fixture(scope="module")
def impatient(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    """A server that drops clients that neither send nor read for two seconds."""
    model = tiny_model("llama", n_ctx_train=32768)
    shared_server = SharedServer(
        lambda: Server(model, tmp_path_factory.mktemp("impatient"), *OPTIONS, "--timeout", "2", "--context-shift")
    )
    yield shared_server
    shared_server.drop()


@each(
    "data",
    [
        b"GET /health HTTP/1.1\r\nX: " + b"a" * 10_000_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"".join(b"X%d: a\r\n" % i for i in range(200_000)) + b"\r\n",
        b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /health\r\n\r\n",
        bytes(range(256)) * 4000,
        bytes.fromhex("1603010200010001fc0303") + bytes(500),
        b"POST /completion HTTP/1.1\r\nContent-Length: -5\r\n\r\n{}",
        b"POST /completion HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n{}",
        b"POST /completion HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n",
        b"POST /completion HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\n{}",
        b"POST /completion HTTP/1.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /completion HTTP/1.1\r\nContent-Type: multipart/form-data; boundary=a\r\nContent-Length: 20\r\n\r\n"
        + b"--a\r\n" * 4,
        b"GET /health HTTP/1.1\r\nRange: bytes=" + b",".join([b"0-1"] * 2000) + b"\r\n\r\n",
    ],
)  # fmt: skip
def test_invalid_requests(impatient: SharedServer, data: bytes) -> None:
    """The request is refused or the connection is closed, in time."""
    with unharmed_server(impatient) as server, server.connect() as sock:
        with contextlib.suppress(OSError):  # the server may close the connection early
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        received = receive(sock, time.monotonic() + SECONDS)
        assert not received or received.startswith(b"HTTP/1.1 4")


def test_a_body_without_end_is_cut(impatient: SharedServer) -> None:
    with unharmed_server(impatient) as server, server.connect() as sock:
        sock.sendall(b"POST /completion HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        with pytest.raises(OSError):
            for _ in range(1000):
                sock.sendall(b"100000\r\n" + b" " * (1 << 20) + b"\r\n")


@pytest.mark.parametrize("first", [b"", HEAD, BODY], ids=["silent", "head", "body"])
def test_idle_connections(impatient: SharedServer, first: bytes) -> None:
    """Five hundred idle connections: a later client is answered when they time out."""
    with unharmed_server(impatient) as server, contextlib.ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(server.connect()).sendall(first)
        assert server.ask("POST", "/completion", SMALL).status == 200


@pytest.mark.parametrize("first", [HEAD, BODY], ids=["head", "body"])
def test_clients_that_send_a_byte_at_a_time(impatient: SharedServer, first: bytes) -> None:
    """Each byte arrives before the timeout. With two hundred such clients, each has a thread, and other clients are
    served.
    """
    ended = threading.Event()

    def drip(socks: list[socket.socket]) -> None:
        while not ended.wait(0.5):
            for sock in socks:
                with contextlib.suppress(OSError):
                    sock.sendall(b" ")

    with unharmed_server(impatient) as server, contextlib.ExitStack() as stack:
        socks = [stack.enter_context(server.connect()) for _ in range(200)]
        for sock in socks:
            sock.sendall(first.replace(b"Content-Length: 10", b"Content-Length: 1000"))
        dripping = threading.Thread(target=drip, args=(socks,))
        dripping.start()
        try:
            assert server.ask("POST", "/completion", SMALL).status == 200
        finally:
            ended.set()
            dripping.join()


def test_connections_that_stay_after_an_answer(impatient: SharedServer) -> None:
    """Two hundred connections, each answered while the earlier ones stay open."""
    with unharmed_server(impatient) as server, contextlib.ExitStack() as stack:
        for _ in range(200):
            sock = stack.enter_context(server.connect())
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert sock.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_thousand_silent_connections(shared: SharedServer, three_thousand_files: None) -> None:
    with unharmed_server(shared) as server:
        assert behind_a_thousand(server, [b""]) == 200


@pytest.mark.slow
def test_a_thousand_connections_within_a_head_or_a_body(after_a_minute: Future[int]) -> None:
    """Without --timeout the server drops them after a minute."""
    assert after_a_minute.result() == 200


def test_clients_that_never_read_lose_their_slots(impatient: SharedServer) -> None:
    """Two clients request endless answers on two slots and do not read them."""
    endless = {"prompt": "x", "n_predict": -1, "stream": True, "ignore_eos": True, "n_probs": 100}
    data = json.dumps(endless).encode()
    with unharmed_server(impatient) as server, contextlib.ExitStack() as stack:
        for _ in range(2):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.connect(server.address)
            sock.sendall(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        assert server.ask("POST", "/completion", SMALL).status == 200


def test_clients_that_leave_free_their_slots(impatient: SharedServer) -> None:
    with unharmed_server(impatient) as server:
        for stream in (False, True):
            body = json.dumps({"prompt": "x", "n_predict": -1, "stream": stream, "ignore_eos": True}).encode()
            for _ in range(2):
                server.send("POST", "/completion", body).close()
            assert server.ask("POST", "/completion", SMALL).status == 200


@pytest.mark.parametrize("reset", [False, True], ids=["closes", "resets"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_clients_that_leave_while_their_prompts_are_read(shared: SharedServer, stream: bool, reset: bool) -> None:
    """A prompt that fills the slot, and an endless answer."""
    prompt = [20 + i % 200 for i in range(2000)]
    body = json.dumps({"prompt": prompt, "n_predict": -1, "stream": stream, "ignore_eos": True}).encode()
    with unharmed_server(shared) as server:
        for _ in range(4):
            sock = server.send("POST", "/completion", body)
            if reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        assert server.ask("POST", "/completion", SMALL).status == 200
        end = time.monotonic() + SECONDS
        while any(slot["is_processing"] for slot in json.loads(server.ask("GET", "/slots").body)):
            assert time.monotonic() < end
            time.sleep(0.05)


def test_many_requests_at_once(impatient: SharedServer) -> None:
    """A hundred requests on two slots: each answer equals that of a single request."""
    with unharmed_server(impatient) as server:
        bodies = [{"prompt": f"{i % 5} {i % 5}", "n_predict": 3, "temperature": 0} for i in range(100)]
        alone = [json.loads(server.ask("POST", "/completion", body).body)["content"] for body in bodies[:5]]
        with contextlib.ExitStack() as stack:
            socks = [
                stack.enter_context(server.send("POST", "/completion", json.dumps(body).encode())) for body in bodies
            ]
            end = time.monotonic() + SECONDS
            for i, sock in enumerate(socks):
                answer = parse(receive(sock, end))
                assert answer.status == 200
                assert json.loads(answer.body)["content"] == alone[i % 5]


#
# access
#


@pytest.fixture(scope="module")
def protected(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    """A server with API keys that allows only pages of this machine."""
    model = tiny_model("llama")
    options = (*OPTIONS, "--api-key", "plain,clé-ключ", "--cors-origins", "localhost")
    shared_server = SharedServer(lambda: Server(model, tmp_path_factory.mktemp("protected"), *options))
    yield shared_server
    shared_server.drop()


def test_keys(protected: SharedServer) -> None:
    server = protected.get()
    assert server.ask("GET", "/health").status == 200
    for header in ("Authorization: Bearer plain", "X-Api-Key: plain", "Authorization: Bearer clé-ключ"):
        assert server.ask("GET", "/v1/models", headers=f"{header}\r\n").status == 200
    wrong = (
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Basic plain",
        "Bearer plain,clé-ключ",
        "Bearer plai",
        "Bearer plainx",
    )
    for value in ("", *wrong):
        header = f"Authorization: {value}\r\n" if value else ""
        for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/slots"), ("GET", "/props"),
                             ("POST", "/completion"), ("POST", "/slots/0?action=erase"), ("GET", "/nowhere"),
                             ("GET", "//slots"), ("POST", "/v1/messages"), ("GET", "/health/../slots")):  # fmt: skip
            answer = server.ask(method, path, SMALL if method == "POST" else b"", header)
            assert answer.status == 401, (value, path)
            assert json.loads(answer.body)["error"]["type"] == "authentication_error"


def test_pages_of_other_servers(protected: SharedServer) -> None:
    """A browser lets a page read answers and send JSON only if headers allow its origin."""
    server = protected.get()
    for origin, allowed in (
        ("http://localhost:3000", True),
        ("http://127.0.0.1", True),
        ("https://evil.example", False),
        ("https://localhost.evil.example", False),
        ("https://localhost@evil.example", False),
        ("null", False),
    ):
        for method in ("OPTIONS", "GET"):
            headers = f"Origin: {origin}\r\nAuthorization: Bearer plain\r\n"
            with server.send(method, "/v1/models", headers=headers) as sock:
                received = receive(sock, time.monotonic() + SECONDS).decode().lower()
            origin_header = (
                received.partition("\r\n\r\n")[0].partition("access-control-allow-origin: ")[2].partition("\r\n")[0]
            )
            assert origin_header == (origin if allowed else ""), (method, origin)
