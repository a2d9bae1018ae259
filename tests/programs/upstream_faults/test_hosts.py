"""SUBKV_ALLOW_HOST protects llama-server from pages that reach it through the user's browser."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from each import each
from servers import Server, serving

Serve = Callable[..., Any]
HERE = [
    "localhost",
    "localhost:1",
    "LOCALHOST",
    "localhost.",
    "127.0.0.1",
    "127.0.0.1:80",
    "127.9.8.7",
    "[::1]",
    "[::1]:80",
]
ELSEWHERE = [
    "evil.example",
    "localhost.evil.example:80",
    "127.0.0.1.evil.example",
    "evil.localhost",
    "128.0.0.1",
    "127.0.0.256",
    "127.0.0",
    "127.0.0.1.1",
    "0.0.0.0",
    "[::2]",
    "[::1",
    ":80",
    "",
]


def ask(server: Server, method: str, path: str, **headers: str) -> tuple[int, Any, http.client.HTTPMessage]:
    """Status, JSON and headers of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, "{}" if method == "POST" else None, headers)
        response = connection.getresponse()
        text = response.read()
    return response.status, json.loads(text) if text else None, response.headers


def refusal(status: int, answer: Any) -> str:
    assert status == 403
    error = answer["error"]
    assert (error["code"], error["type"]) == (403, "permission_error")
    assert error["message"].count("expected") == error["message"].count("found") == 1
    return str(error["message"])


@pytest.fixture(scope="module")
def local(request: pytest.FixtureRequest, words: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("local")
    with serving(words, "-c", 256, "-np", 1, subkv="off", folder=folder, SUBKV_ALLOW_HOST="localhost") as server:
        yield server


@each("host", HERE)
def test_names_of_this_machine_are_accepted(local: Server, host: str) -> None:
    """By name or any loopback address, with any port; for pages of this server and of other local servers."""
    assert ask(local, "GET", "/health", Host=host)[0] == 200
    for scheme in ("http", "https", "tauri"):
        assert ask(local, "POST", "/tokenize", Host=host, Origin=f"{scheme}://{host}")[0] == 200


@each("host", ELSEWHERE)
def test_other_names_are_refused(local: Server, host: str) -> None:
    for method, path in (("GET", "/health"), ("GET", "/"), ("POST", "/v1/chat/completions"), ("DELETE", "/x")):
        status, answer, _ = ask(local, method, path, Host=host)
        assert refusal(status, answer).startswith("Host: ") and f"'{host}'" in answer["error"]["message"]
    assert ask(local, "OPTIONS", "/tokenize", Host=host)[0] == 403


@each("origin", [*(f"https://{host}" for host in ELSEWHERE), "null", "file://", "chrome-extension://x"])
def test_foreign_pages_are_refused(local: Server, origin: str) -> None:
    """Also preflight requests; no header allows the page to read the answer."""
    for method in ("POST", "OPTIONS", "GET"):
        status, answer, headers = ask(local, method, "/tokenize", Origin=origin)
        assert refusal(status, answer).startswith("Origin: ")
        assert "Access-Control-Allow-Origin" not in headers
    assert ask(local, "OPTIONS", "/tokenize", Origin="http://localhost:3000")[2]["Access-Control-Allow-Origin"]


def test_long_and_odd_headers(local: Server) -> None:
    assert len(refusal(*ask(local, "GET", "/health", Host="x" * 5000)[:2])) < 200
    assert refusal(*ask(local, "GET", "/health", Host="\xff\xfe")[:2])


def test_no_host_at_all(local: Server) -> None:
    with socket.create_connection(("127.0.0.1", local.port), 60) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 403 ")


def test_a_refused_body_is_no_request(local: Server) -> None:
    """The body of a refused request is not parsed as another request."""
    inner = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n"
    head += f"Content-Length: {len(inner)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", local.port), 60) as connection:
        connection.sendall(head.encode() + inner)
        connection.shutdown(socket.SHUT_WR)
        data = b"".join(iter(lambda: connection.recv(65536), b""))
    assert data.count(b"HTTP/1.1 ") == data.count(b"HTTP/1.1 403 ") == 1


def test_names_of_its_own(serve: Serve, words: Path) -> None:
    names = " Chat.Example.org ,app, http://ports.example:8080,null,"
    with serve("-c", 256, "-np", 1, model=words, SUBKV_ALLOW_HOST=names) as server:
        for name in ("chat.example.org", "CHAT.example.org:443", "app", "ports.example", "localhost", "127.0.0.1"):
            assert ask(server, "GET", "/health", Host=name, Origin=f"https://{name}")[0] == 200
        assert ask(server, "GET", "/health", Origin="null")[0] == 200
        for name in ("example.org", "chat.example.org.evil.example", "apps"):
            assert ask(server, "GET", "/health", Host=name)[0] == 403


@pytest.mark.parametrize("variables", [{}, {"SUBKV_ALLOW_HOST": ""}, {"SUBKV_ALLOW_HOST": "app, *"}], ids=str)
def test_everybody_is_answered(serve: Serve, words: Path, variables: dict[str, str]) -> None:
    """All hosts are allowed as in upstream's server, unless the variable lists names; * allows all."""
    with serve("-c", 256, "-np", 1, model=words, **variables) as server:
        for host in ("evil.example", "localhost"):
            status, _, headers = ask(server, "GET", "/health", Host=host, Origin="http://evil.example")
            assert status == 200
            assert headers["Access-Control-Allow-Origin"] in ("*", "http://evil.example")


def test_a_list_without_a_name(serve: Serve, words: Path) -> None:
    """Only localhost and loopback addresses remain allowed."""
    with serve("-c", 256, "-np", 1, model=words, SUBKV_ALLOW_HOST=" ,") as server:
        assert ask(server, "GET", "/health", Host="localhost")[0] == 200
        assert ask(server, "GET", "/health", Host="evil.example")[0] == 403


def test_a_router_and_its_servers(serve: Serve, words: Path, tmp_path: Path) -> None:
    """Requests for a listed name reach the server of a model."""
    folder = tmp_path / "models"
    folder.mkdir()
    shutil.copy(words, folder / "one.gguf")
    arguments = ["--models-dir", folder, "-c", 256, "-np", 1]
    with serve(*arguments, model=None, SUBKV_ALLOW_HOST="chat.example") as server:
        for host, status in (("chat.example", 200), ("localhost", 200), ("evil.example", 403)):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            with contextlib.closing(connection):
                body = json.dumps({"model": "one", "prompt": "a", "n_predict": 2})
                headers = {"Host": host, "Origin": f"http://{host}", "Content-Type": "application/json"}
                connection.request("POST", "/completion", body, headers)
                assert connection.getresponse().status == status
