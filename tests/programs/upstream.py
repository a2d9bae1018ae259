"""Runs upstream's tests of llama-server on a cache, and compares two runs.

    python tests/programs/upstream.py [-m model.gguf] [--stock FOLDER] [--unit test_slot_save.py …] FOLDER

runs them on f16 and on coefficients, and prints the table of research/notes/upstream-tests.md. FOLDER keeps reports
and logs. --stock names the folder of a llama-server without our patch; it codes by the plug-in.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2] / name) for name in ("", "cmake", "tests")]

import stand_ins
import tiny_vision
import upstream_source
from program_paths import program

from runtime.launch import doors
from subkv.native.library import lib_dir

Results = dict[str, dict[str, Any]]
SECONDS = 3600
NOWHERE = "http://127.0.0.1:9"  # the port that discards: nothing listens


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Pictures(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        data = tiny_vision.picture(200 if "truck" in self.path else 40)
        known = self.path.endswith(".png")
        self.send_response(200 if known else 404)
        self.send_header("Content-Type", "image/png")
        self.send_header("Content-Length", str(len(data) if known else 0))
        self.end_headers()
        if known:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def pictures() -> Iterator[str]:
    """The address of a server that has a picture for every name."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Pictures)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


@dataclass
class Upstream:
    """Upstream's tests in a separate folder, with replacements for the files that they name."""

    server: Path
    folder: Path
    home: Path
    cache: Path

    @classmethod
    @contextlib.contextmanager
    def prepared(cls, server: Path, model: Path, home: Path) -> Iterator[Upstream]:
        """server: llama-server; model: the replacement of the text models."""
        with pictures() as images:
            folder = upstream_source.extract(home / "llama.cpp", images)
            stand_ins.hub_cache(home / "hub", model)
            stand_ins.downloads(folder / "tmp", model)
            suite = cls(server, folder, home, home / "cache")
            yield suite

    def run(self, name: str, subkv: str, tests: Iterable[str], expected: str = "", **more: str) -> Results:
        """The outcome of each test. name: of this run's files; subkv: the variable; expected: the earlier run.

        more: other variables.
        """
        report = self.home / f"{name}.json"
        env = {key: value for key, value in os.environ.items() if not key.startswith(("LLAMA_", "SUBKV", "PYTEST_"))}
        env |= {
            "DOCKER_HOST": NOWHERE.replace("http", "tcp"),
            "HF_ENDPOINT": NOWHERE,
            "LLAMA_ARG_THREADS": "1",
            "LLAMA_CACHE": str(self.home / "hub"),
            "LLAMA_SERVER_BIN_PATH": str(self.server),
            "NO_PROXY": "*",
            "PORT": str(free_port()),
            "PYTHONPATH": str(Path(__file__).parent),
            "SUBKV": subkv,
            "UPSTREAM_EXPECTED": str(self.home / f"{expected}.json") if expected else "",
            "UPSTREAM_REPORT": str(report),
            "XDG_CACHE_HOME": str(self.cache),
            **more,
        }
        command = [sys.executable, "-m", "pytest", "-p", "upstream_plugin", "-p", "no:cacheprovider", "-m", "not slow"]
        with (self.home / f"{name}.log").open("wb") as log:
            command += ["-q", "-rA", "--tb=short", *tests]
            done = subprocess.run(
                command, cwd=self.folder, env=env, stdout=log, stderr=log, timeout=SECONDS, check=False
            )
        assert done.returncode in (0, 1), (self.home / f"{name}.log").read_text("utf-8", "replace")[-3000:]
        results: Results = json.loads(report.read_text("utf-8"))
        return results


def plugin_door() -> dict[str, str]:
    """Variables with which an unpatched llama-server loads the plug-in."""
    return doors.plugin_variables(doors.plugin_file(lib_dir()), {}) | {doors.DEVICES: doors.DEVICE}


def counts(results: Results) -> Counter[str]:
    """Number of tests by outcome; `as in the run`: passed with values that differ from those in the test."""
    actual: Counter[str] = Counter()
    for entry in results.values():
        as_written = all(value[1] for value in entry["values"].values())
        actual[entry["outcome"] if entry["outcome"] != "passed" or as_written else "as in the run"] += 1
    return actual


def lost(before: Results, after: Results) -> list[str]:
    """Tests that passed before and do not pass any more."""
    return [name for name, entry in before.items() if entry["outcome"] == "passed" != after[name]["outcome"]]


def other_texts(results: Results) -> tuple[int, int]:
    """Number of texts and values that differ from the earlier run, and their total."""
    return sum(len(entry["other"]) for entry in results.values()), sum(len(e["values"]) for e in results.values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("-m", "--model", type=Path)
    parser.add_argument("--stock", type=Path)
    parser.add_argument("--unit", nargs="*", default=["unit"])
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    model = args.model or stand_ins.with_words(
        args.folder / "words.gguf", stand_ins.tiny.build(args.folder / "tiny.gguf")
    )
    tests = [unit if unit == "unit" else f"unit/{unit}" for unit in args.unit]
    server = args.stock / "llama-server" if args.stock else program("llama-server")
    door = plugin_door() if args.stock else {}
    with Upstream.prepared(server.resolve(), model.resolve(), args.folder.resolve()) as suite:
        runs = {
            "f16": suite.run("f16", "off", tests),
            "f16, no flash attention": suite.run("plain", "off", tests, "f16", LLAMA_ARG_FLASH_ATTN="off"),
            "coefficients": suite.run("coded", "auto", tests, "f16", **door),
            "coefficients, the last 16 tokens exact": suite.run(
                "deep", "auto", tests, "f16", SUBKV_RECENT="16", **door
            ),
        }
    for title, results in runs.items():
        contexts = [sum(entry["caches"][i] for entry in results.values()) for i in (0, 1)]
        print(f"{title}: {dict(counts(results))}; coded and ordinary contexts {contexts}")
        print(f"    texts and values other than on f16: {other_texts(results)}")
        for name in lost(runs["f16"], results):
            print(f"    lost: {name[:160]}: {results[name]['why'][:200]}")
        for name, entry in results.items():
            for line, expected, actual in entry["other"]:
                print(f"    other: {name[:100]}, line {line}: {str(expected)[:60]!r}, {str(actual)[:60]!r}")
            if results is runs["f16"] and entry["outcome"] != "passed":
                print(f"    {entry['outcome']}: {name[:160]}: {entry['why'][:200]}")
            for line in entry["aborts"]:
                print(f"    abort: {name[:160]}: {line}")


if __name__ == "__main__":
    main()
