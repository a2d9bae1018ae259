"""Who may ask: names, origins, keys; connections that never become requests."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import socket
import time
from collections.abc import Callable, Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from serving import Served, running
from starlette.datastructures import Headers

from runtime.serve import grammar_limits, native, schema
from runtime.serve.cli import _n_connections
from runtime.serve.guard import Hosts
from runtime.serve.refusals import ApiError
from runtime.serve.server import GRACE_SECONDS, LAST_SECONDS
from runtime.serve.settings import Limits, Listening


@pytest.mark.parametrize(
    ("host", "origin", "allowed"),
    [
        ("127.0.0.1:8080", None, True),
        ("localhost", None, True),
        ("LOCALHOST:80", None, True),
        ("[::1]:8080", None, True),
        ("127.8.8.8", None, True),
        ("mine.example:8080", None, True),
        ("evil.example", None, False),
        ("evil.example:8080", "http://evil.example:8080", False),
        ("127.0.0.1.evil.example", None, False),
        ("localhost@evil.example", None, False),
        ("192.168.0.1", None, False),
        ("", None, False),
        ("[", None, False),
        ("localhost:8080", "http://localhost:8080", True),
        ("localhost:8080", "http://localhost:3000", False),
        ("localhost:8080", "https://evil.example", False),
        ("localhost:8080", "null", False),
        ("localhost:8080", "http://mine.example", True),
        ("localhost:8080", "app://mine.example", True),
    ],
)
def test_names_and_origins(host: str, origin: str | None, allowed: bool) -> None:
    headers = Headers({"host": host} | ({} if origin is None else {"origin": origin}))
    with contextlib.nullcontext() if allowed else pytest.raises(ApiError):  # type: ignore[attr-defined]
        Hosts(["127.0.0.1", "Mine.example"]).check(headers)


def test_which_addresses_have_names() -> None:
    def names(host: str, *allowed: str) -> Any:
        return Listening(host, 0, (), None, allowed).names(host)

    assert names("127.0.0.1") == ["127.0.0.1"]
    assert names("::1", "a") == ["::1", "a"]
    assert names("0.0.0.0") is None
    assert names("0.0.0.0", "a") == ["0.0.0.0", "a"]
    assert names("127.0.0.1", "a", "*") is None


def test_another_page_cannot_ask(served: Served) -> None:
    before = served.client.get("/slots").json()
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        for method, path in (("POST", "/slots/0?action=erase"), ("GET", "/v1/models"), ("POST", "/v1/completions")):
            answer = served.client.request(method, path, headers=headers)
            assert answer.status_code == 403, (headers, path)
            assert answer.json()["error"]["type"] == "permission_error"
            assert "--allow-host" in answer.json()["error"]["message"]
    assert served.client.get("/slots").json() == before
    assert served.client.get("/v1/models", headers={"Origin": served.url}).status_code == 200


def test_keys_of_any_spelling(tiny_model: Callable[..., Path]) -> None:
    with running(tiny_model("llama"), n_slots=1, n_ctx=256, keys=("plain", "clé-ключ", "é")) as served:
        for value in (
            b"Bearer plain",
            b"bearer plain",
            b"BEARER  plain",
            b"plain",
            "Bearer clé-ключ".encode(),
            "bearer é".encode("latin-1"),
        ):
            assert httpx.get(f"{served.url}/v1/models", headers={b"Authorization": value}).status_code == 200, value
        for value in (b"Bearer", b"Basic plain", b"Bearer cl?-????", b"Bearer ?", b"\xff"):
            assert httpx.get(f"{served.url}/v1/models", headers={b"Authorization": value}).status_code == 401, value


@pytest.mark.parametrize(
    ("bias", "more"),
    [
        ({"9" * 5000: 1.0}, {}),
        ({"٣": 1.0}, {}),
        ({"x" * 100_000: 1.0}, {"logit_bias_type": "tokens"}),
        ({"-1": 1.0}, {}),
    ],
)
def test_biases_that_are_none(served: Served, bias: dict[str, float], more: dict[str, Any]) -> None:
    answer = served.client.post("/v1/completions", json={"prompt": "x", "logit_bias": bias} | more)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith("logit_bias") and len(message) < 300


def test_a_stop_string_has_a_limit(served: Served) -> None:
    answer = served.client.post("/v1/completions", json={"prompt": "x", "stop": ["a" * 5000]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stop"


def test_the_table_of_limits_has_the_numbers() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "server.md").read_text("utf-8")
    rows = [row.split(" | ") for row in text[text.index("## Limits") :].splitlines() if row.startswith("| ")]
    by_name = {row[0].removeprefix("| "): row[1] for row in rows}
    by_flag = {flag.strip("`"): limit for _, limit, flag, *_ in rows}
    limits = Limits()
    for flag, number in (
        ("--connections", limits.n_connections),
        ("--header-timeout", limits.header_timeout),
        ("--max-body", limits.max_body >> 20),
        ("--timeout", limits.timeout),
        ("--queue", limits.n_queue),
        ("--grammar-timeout", limits.grammar_timeout),
        ("--grammar-memory", limits.grammar_memory),
        ("--stall-timeout", limits.stall_timeout),
    ):
        assert re.search(rf"\b{number:g}\b", by_flag[flag]), flag
    g, s = grammar_limits, schema
    for name, numbers in {
        "messages": [s.N_MESSAGES],
        "stop strings": [s.N_STOPS, s.N_STOP],
        "`logit_bias`": [s.N_BIAS, s.N_BIAS_TEXT],
        "`logprobs`, `n_probs`": [s.N_LOGPROBS],
        "`samplers`": [native.N_SAMPLERS],
        "`dry_sequence_breakers`": [native.N_BREAKERS, native.N_BREAKER],
        "texts of an embeddings or rerank request": [s.N_INPUTS],
        "files of `/infill`": [s.N_FILES],
        "grammar": [g.N_BYTES >> 10, g.N_RULES, g.N_ALTERNATIVES, g.N_NESTED, g.N_REPEAT],
        "JSON schema": [g.N_BYTES >> 10, g.N_VALUES, g.N_DEPTH, g.N_PROPERTIES, g.N_PATTERN, g.N_REPEAT],
        "answers under way at SIGTERM": [GRACE_SECONDS],
        "the process after SIGTERM": [LAST_SECONDS],
    }.items():
        assert [int(n) for n in re.findall(r"\d+", by_name[name])] == numbers, name


#
# connections
#


@pytest.fixture(scope="module")
def hasty(tiny_model: Callable[..., Path]) -> Iterator[Served]:
    """A second for headers, and places for eight connections."""
    limits = {"header_timeout": 1.0, "n_connections": 8}
    with running(tiny_model("llama"), n_slots=1, n_ctx=256, limits=limits) as made:
        yield made


def connected(served: Served) -> socket.socket:
    parts = urlsplit(served.url)
    return socket.create_connection((str(parts.hostname), parts.port or 0), timeout=30)


def ended(sock: socket.socket) -> bool:
    """Whether the server closes the connection, after whatever it has sent."""
    try:
        while sock.recv(1000):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def test_headers_that_never_end(hasty: Served) -> None:
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connected(hasty)) for _ in range(5)]
        for sock in socks[1:]:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-")
        for _ in range(20):  # bytes that come do not move the deadline
            with contextlib.suppress(ConnectionError):
                socks[1].sendall(b"a")
            time.sleep(0.1)
        assert all(ended(sock) for sock in socks)
    assert hasty.client.get("/health").status_code == 200


def test_headers_that_never_end_after_an_answer(hasty: Served) -> None:
    with connected(hasty) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in sock.recv(4096)
        sock.sendall(b"GET /health HTTP/1.1\r\n")
        assert ended(sock)
    with connected(hasty) as sock:  # a body that was not asked for, byte by byte
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n")
        assert b" 200 " in sock.recv(4096)
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                sock.sendall(b"a")
                time.sleep(0.05)
            pytest.fail("it was read for ever")


def test_idle_connections_make_room(hasty: Served) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(12):
            sock = stack.enter_context(connected(hasty))
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 200 " in sock.recv(4096)  # the newest is always served


def test_a_thousand_connections(tiny_model: Callable[..., Path]) -> None:
    """Most say nothing, some begin and do not go on: who asks beside them is answered at once."""
    n = 1000
    with running(tiny_model("llama"), n_slots=1, n_ctx=256) as served, contextlib.ExitStack() as stack:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        if _n_connections(2 * n) < 2 * n:  # both ends are this process's
            pytest.skip("needs two thousand files")
        socks = [stack.enter_context(connected(served)) for _ in range(n)]
        for sock in socks[::10]:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
        answer = served.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 4, "temperature": 0})
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
        socks[1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in socks[1].recv(4096)  # nobody was sent away


def test_a_request_at_work_outlives_the_deadline_for_headers(tiny_model: Callable[..., Path]) -> None:
    limits = {"header_timeout": 0.2}
    with running(tiny_model("llama", n_ctx_train=32768), n_slots=1, n_ctx=8192, limits=limits) as served:
        body = {"prompt": "long", "max_tokens": 300, "temperature": 0, "stream": True}
        with served.client.stream("POST", "/v1/completions", json=body) as stream:
            lines = []
            for line in stream.iter_lines():
                lines.append(line)
                time.sleep(0.002)
        assert lines[-2] == "data: [DONE]"
        assert json.loads(lines[0].removeprefix("data: "))["object"] == "text_completion"


def test_what_is_asked_while_the_model_loads(tiny_model: Callable[..., Path]) -> None:
    """The port is taken before: a page that is opened then, and who asks for health, are answered once it is ready."""
    model = tiny_model("llama")
    sock = Listening("127.0.0.1", 0, (), None).listen(60.0, 64)
    with contextlib.ExitStack() as stack:
        clients = []
        for path in ("/", "/page.js", "/health", "/v1/health"):
            made = stack.enter_context(socket.create_connection(sock.getsockname(), timeout=30))
            made.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            clients.append(made)
        clients[2].settimeout(0.2)
        with pytest.raises(TimeoutError):
            clients[2].recv(100)
        clients[2].settimeout(30)
        with running(model, n_slots=1, n_ctx=256, listening=sock):
            for made in clients:
                assert made.recv(100).startswith(b"HTTP/1.1 200 ")


def test_a_refusal_is_read_before_its_body_is_sent(served: Served) -> None:
    """No reset may take the answer away: the body is dropped, and the connection serves the next request."""
    address = urlsplit(served.url)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: https://evil.example\r\nContent-Length: 9\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=30) as made:
        for _ in range(2):
            made.sendall(f"{head}\r\n".encode())
            assert _answer(made).status == 403
            made.sendall(b"x" * 9)
        made.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())  # then no body may come, and no next request
        assert _answer(made).getheader("connection") == "close"
        assert made.recv(1) == b""


def _answer(made: socket.socket) -> HTTPResponse:
    """One answer, read whole."""
    answer = HTTPResponse(made)
    answer.begin()
    assert answer.read()
    return answer


def test_pages_of_other_servers(coded_model: Callable[..., Path]) -> None:
    """Those of --allow-host may ask and read, with a key, too; others get no header that would let them."""
    with running(coded_model(), n_slots=1, n_ctx=256, keys=("secret",), hosts=("mine.example",)) as served:
        wanted = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        with httpx.Client(base_url=served.url) as page:
            path = "/v1/completions"
            for origin, allowed in (("https://mine.example:3000", True), ("https://evil.example", False)):
                asked = page.options(path, headers={"Origin": origin} | wanted)
                assert (asked.status_code == 200) == allowed
                assert asked.headers.get("access-control-allow-origin") == (origin if allowed else None)
                refused = page.post(path, json={}, headers={"Origin": origin})
                assert refused.status_code == (401 if allowed else 403)
                assert refused.headers.get("access-control-allow-origin") == (origin if allowed else None)
            asked = page.options(path, headers={"Origin": "https://mine.example.evil.example"} | wanted)
            assert "access-control-allow-origin" not in asked.headers


def test_a_body_that_curl_calls_a_form(served: Served) -> None:
    """`curl -d` names a form, and is asked for none; a page, which might be anybody's, must name JSON."""
    body = b'{"prompt": "a", "max_tokens": 1}'
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    for headers in (form, {}):
        assert served.client.post("/v1/completions", content=body, headers=headers).status_code == 200
    own = {"Origin": served.url}
    assert served.client.post("/v1/completions", content=body, headers=form | own).status_code == 400
    assert (
        served.client.post("/v1/completions", content=body, headers={"Content-Type": "text/plain"}).status_code == 400
    )


def test_a_line_for_every_request(coded_model: Callable[..., Path], capfd: pytest.CaptureFixture[str]) -> None:
    """What was asked, by whom, how it ended; nothing of a path can forge a line, nothing of a text is written."""
    with running(coded_model(), n_slots=1, n_ctx=256, log="json") as served:
        served.client.get("/health")
        served.client.get("/nothing%0A%7B%22forged%22")
        done = served.client.post("/v1/completions", json={"prompt": "a secret", "max_tokens": 2, "temperature": 0})
        timings = done.json()["timings"]
        assert served.idle()
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    first, second, *others = lines
    assert (first["path"], first["status"], first["method"]) == ("/nothing%0A%7B%22forged%22", 404, "GET")
    assert second["path"] == "/v1/completions" and second["client"] == "127.0.0.1" and second["ms"] >= 0
    assert {key: second[key] for key in ("cache_n", "prompt_n", "predicted_n")} == {
        key: timings[key] for key in ("cache_n", "prompt_n", "predicted_n")
    }
    assert {line["path"] for line in others} == {"/slots"}
    assert "secret" not in json.dumps(lines)
