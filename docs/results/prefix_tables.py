"""llama-server's store: time and size of restored prompts, and the bytes that conversations share."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from render import Column, Numbers, Rows, grid, text

N_PREFIX, N_SYSTEM, N_OWN, N_TALKS = 6000, 1000, 200, 10
CACHES = {"coefficients, 4.5 bits": (), "f16": ("-ctk", "f16"), "q8_0": ("-ctk", "q8_0", "-ctv", "q8_0")}
MIB = 1 << 20


class Client:
    """Requests to a server of the lab."""

    def __init__(self, port: int) -> None:
        self.port = port

    def _ask(self, path: str, body: Any) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return json.loads(connection.getresponse().read())

    def tokens(self, source: str) -> list[int]:
        tokens: list[int] = self._ask("/tokenize", {"content": source})["tokens"]
        return tokens

    def seconds(self, tokens: Sequence[int]) -> tuple[float, int]:
        """Time to the first token of an answer, and the number of cached tokens of the prompt."""
        body = {"prompt": list(tokens), "max_tokens": 1, "temperature": 0}
        start = time.perf_counter()
        answer = self._ask("/v1/completions", body)
        return time.perf_counter() - start, answer["timings"]["cache_n"]

    def slot(self, action: str, body: Any) -> dict[str, Any]:
        """The server's answer to an action on its first slot."""
        answer: dict[str, Any] = self._ask(f"/slots/0?action={action}", body)
        return answer


def _cold(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.iterdir():
        with open(path, "rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _bytes(folder: Path) -> int:
    """Size of the files of a store after its server has stopped."""
    return sum(path.stat().st_size for path in folder.iterdir())


def _restored(answer: tuple[float, int], n: int) -> float:
    """Seconds of a prompt with n cached tokens; tokens after the last checkpoint are evaluated again."""
    seconds, n_cached = answer
    assert n - n_cached <= 256, f"expected {n} cached tokens, found {n_cached}"
    return seconds


def server_prefixes(lab: Any) -> Rows:
    n_prefix, n_system, n_talks = lab.pick((N_PREFIX, N_SYSTEM, N_TALKS), (1200, 600, 3))
    bases = ("--bases", lab.sidecar("4.5"))
    lab.text("argparse.py")
    source = lab.read("argparse.py")
    rows = []
    for i, (name, cache) in enumerate(CACHES.items()):
        serve = ("subkv", "serve", "-m", "M.gguf", *(cache or bases), "-c", "8192", "-np", "1", "-t", "2")
        stored, talks = (lab.folder / f"{kind}{i}" for kind in ("prompts", "talks"))
        (lab.folder / "slots").mkdir(exist_ok=True)
        with lab.server(*serve, "--store", stored.name, "--slot-save-path", "slots") as server:
            client = Client(server.port)
            tokens = client.tokens(source)
            prompt, other = tokens[:n_prefix], tokens[n_prefix : n_prefix + 300]
            evaluated, _ = client.seconds(prompt)
            saved = client.slot("save", {"filename": "slot"})
            client.slot("erase", {})
            restored = client.slot("restore", {"filename": "slot"})
            assert restored["n_restored"] == saved["n_saved"] >= n_prefix
        n_stored = _bytes(stored)
        _cold(stored)
        with lab.server(*serve, "--store", stored.name) as server:
            client = Client(server.port)
            restarted = _restored(client.seconds(prompt), n_prefix)
            evicted = []
            for turn in range(3):
                client.seconds(other[turn:])
                evicted.append(_restored(client.seconds(prompt), n_prefix))
        sizes = []
        for first, last in ((0, 1), (1, n_talks)):  # the first one alone, then all of them
            with lab.server(*serve, "--store", talks.name) as server:
                for talk in range(first, last):
                    own = tokens[2000 + N_OWN * talk : 2000 + N_OWN * (talk + 1)]
                    Client(server.port).seconds([*tokens[:n_system], *own])
            sizes.append(_bytes(talks))
        rows.append(
            {
                "cache": name,
                "tokens": n_prefix,
                "evaluated s": evaluated,
                "evicted s": median(evicted),
                "restarted s": restarted,
                "disk MiB": n_stored / MIB,
                "slot MiB": saved["n_written"] / MIB,
                "slot saved s": saved["timings"]["save_ms"] / 1000,
                "slot restored s": restored["timings"]["restore_ms"] / 1000,
                "conversations": n_talks,
                "apart MiB": n_talks * sizes[0] / MIB,
                "together MiB": sizes[-1] / MIB,
            }
        )
    return rows


def server_handover(lab: Any) -> Rows:
    """A conversation that another server continues from a shared store."""
    n_prefix, n_turn = lab.pick((N_PREFIX, N_OWN), (1200, 100))
    bases = ("--bases", lab.sidecar("4.5"))
    lab.text("argparse.py")
    source = lab.read("argparse.py")
    rows = []
    for i, name in enumerate(("coefficients, 4.5 bits", "f16")):
        folder = lab.folder / f"store{i}"
        serve = ("subkv", "serve", "-m", "M.gguf", *(CACHES[name] or bases), "-c", "8192", "-np", "1", "-t", "2")
        serve = (*serve, "--store", folder.name)
        with lab.server(*serve) as server:
            client = Client(server.port)
            tokens = client.tokens(source)
            evaluated, _ = client.seconds(tokens[:n_prefix])
        moved = _bytes(folder)
        names = {path.name for path in folder.iterdir()}
        _cold(folder)
        with lab.server(*serve) as server:
            taken = _restored(Client(server.port).seconds(tokens[: n_prefix + n_turn]), n_prefix)
        added = sum(path.stat().st_size for path in folder.iterdir() if path.name not in names)
        saved = evaluated * (1 + n_turn / n_prefix) - taken  # both ways evaluate the turn
        rows.append(
            {
                "cache": name,
                "tokens": n_prefix,
                "turn": n_turn,
                "moved MiB": moved / MIB,
                "turn MiB": added / MIB,
                "evaluated s": evaluated,
                "taken over s": taken,
                "break-even Mbit/s": moved * 8e-6 / saved,
            }
        )
    return rows


def handover_markdown(rows: Rows) -> str:
    f16 = next(row["moved MiB"] for row in rows if row["cache"] == "f16")
    columns: list[Column] = [
        ("cache", text("cache")),
        ("tokens", text("tokens")),
        ("transferred, MiB", lambda row: f"{row['moved MiB']:.1f}"),
        ("share of f16", lambda row: f"{row['moved MiB'] / f16:.2f}"),
        ("next turn of 200 tokens, MiB", lambda row: f"{row['turn MiB']:.1f}"),
        ("full evaluation, s", lambda row: f"{row['evaluated s']:.2f}"),
        ("takeover with the next turn, s", lambda row: f"{row['taken over s']:.2f}"),
        ("break-even link, Mbit/s", lambda row: f"{row['break-even Mbit/s']:.0f}"),
    ]
    return grid(rows, columns)


def _share(row: dict[str, Any], key: str) -> str:
    return f"{row[key]:.2f} ({100 * row[key] / row['evaluated s']:.1f}%)"


def markdown(rows: Rows) -> str:
    columns: list[Column] = [
        ("cache", text("cache")),
        ("tokens", text("tokens")),
        ("full evaluation, s", lambda row: f"{row['evaluated s']:.2f}"),
        ("after an eviction, s", lambda row: _share(row, "evicted s")),
        ("after a restart, s", lambda row: _share(row, "restarted s")),
        ("on disk, MiB", lambda row: f"{row['disk MiB']:.1f}"),
        (
            "10 conversations, MiB",
            lambda row: f"{row['together MiB']:.1f} ({row['apart MiB']:.1f} without sharing)",
        ),
        ("slot file, MiB", lambda row: f"{row['slot MiB']:.1f}"),
        ("save, restore, s", lambda row: f"{row['slot saved s']:.2f}, {row['slot restored s']:.2f}"),
    ]
    return grid(rows, columns)


def numbers(rows: Rows) -> Numbers:
    worst = {key: max(row[key] / row["evaluated s"] for row in rows) for key in ("evicted s", "restarted s")}
    numbers = {
        "evicted": f"{100 * worst['evicted s']:.1f}",
        "restarted": f"{100 * worst['restarted s']:.1f}",
    }
    for suffix, name in (("", "coefficients, 4.5 bits"), ("_f16", "f16")):
        row = next(row for row in rows if row["cache"] == name)
        numbers |= {
            f"disk{suffix}": f"{row['disk MiB']:.1f}",
            f"users_gib{suffix}": f"{row['disk MiB'] * 10_000 / 1024:.0f}",
            f"read{suffix}": f"{row['tokens'] / row['evaluated s']:.0f}",
        }
    return numbers
