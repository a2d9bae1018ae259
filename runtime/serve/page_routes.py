"""The page at /: its files, and headers that let it load nothing else."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
NAMES = ("index.html", "page.css", "page.js", "markdown.js", "server.js", "talks.js")
PATHS = {"/" if name == "index.html" else f"/{name}" for name in NAMES}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Routes of the page's files, which everybody may read: they hold nothing, and ask for the key themselves."""
    folder = files("runtime.serve") / "page"
    for name in NAMES:
        path = "/" if name == "index.html" else f"/{name}"
        app.add_route(path, _route((folder / name).read_bytes(), KINDS[name.rpartition(".")[2]]))


def _route(content: bytes, kind: str) -> Callable[[Request], Response]:
    return lambda _: Response(content, media_type=kind, headers=HEADERS)
