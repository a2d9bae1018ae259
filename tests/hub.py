"""A small Hugging Face hub on loopback for tests: it lists and serves files of repositories like the real one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """repos: name -> file -> contents, as a path or bytes. gated: names without access.

    broken: files whose transfer ends after half of their bytes; requests: "METHOD path" of all so far.
    """

    def __init__(self, repos: dict[str, dict[str, Path | bytes]]) -> None:
        self.repos = repos
        self.gated: set[str] = set()
        self.broken: set[str] = set()
        self.requests: list[str] = []
        self.tokens: list[str] = []
        self.url = ""

    def contents(self, repo: str, file: str) -> bytes:
        given = self.repos[repo][file]
        return given if isinstance(given, bytes) else given.read_bytes()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        self.hub.tokens.append(self.headers.get("authorization", ""))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._describe("/".join(parts[2:4]), parts[4:])
        elif "resolve" in parts:
            self._serve("/".join(parts[:2]), "/".join(parts[4:]), body)
        else:
            self._send(404, b"{}")

    def _refused(self, repo: str) -> bool:
        if repo in self.hub.gated:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "restricted"})
        elif repo not in self.hub.repos:
            self._send(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
        else:
            return False
        return True

    def _describe(self, repo: str, rest: list[str]) -> None:
        if self._refused(repo):
            return
        files = self.hub.repos[repo]
        if rest[:1] == ["tree"]:
            listed: object = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(self.hub.contents(repo, name)),
                    "oid": hashlib.sha1(self.hub.contents(repo, name)).hexdigest(),
                }
                for name in files
            ]
        else:
            siblings = [{"rfilename": name} for name in files]
            listed = {"id": repo, "modelId": repo, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}
        self._send(200, json.dumps(listed).encode())

    def _serve(self, repo: str, file: str, body: bool) -> None:
        if self._refused(repo):
            return
        if file not in self.hub.repos[repo]:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        data = self.hub.contents(repo, file)
        more = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        self._send(200, data, more, body, file in self.hub.broken)

    def _send(
        self, status: int, data: bytes, more: dict[str, str] | None = None, body: bool = True, broken: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **(more or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if broken else data)
            self.close_connection = self.close_connection or broken


@contextlib.contextmanager
def serving(repos: dict[str, dict[str, Path | bytes]]) -> Iterator[Hub]:
    """A hub with these repositories, at `url`."""
    hub = Hub(repos)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
