"""Random valid requests to two slots: a coded cache answers with the status of f16, with and without a prompt store.

SUBKV_VALID_REQUESTS: groups of requests per server of a longer run; SUBKV_SEED: its seed (a failure names it).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import engine
import pictures
import pytest
import stand_ins
import tiny
import upstream_source
import valid_requests
from program_paths import program
from servers import ANSWER, CODED, Server, serving
from valid_requests import Request

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
REPO = Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs" / "server.md").read_text("utf-8")

N_GROUPS = int(os.environ.get("SUBKV_VALID_REQUESTS", "0"))
SEED = int(os.environ.get("SUBKV_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
TWO_SLOTS = ("-np", 2, "-c", 1024, "--context-shift")
SERVERS: dict[str, tuple[Any, ...]] = {
    "shift": TWO_SLOTS,
    "full": ("-np", 2, "-c", 1024),
    "no checkpoints": (*TWO_SLOTS, "--ctx-checkpoints", 0),
    "no memory": (*TWO_SLOTS, "--cache-ram", 0),
    "small batches": (*TWO_SLOTS, "-b", 64, "-ub", 32),
    "keep": (*TWO_SLOTS, "--keep", 20, "--no-cache-prompt"),
    "unified": ("-np", 2, "-c", 2048, "--kv-unified", "--kv-unified-per-slot", 512, "--context-shift"),
    "reuse": (*TWO_SLOTS, "--cache-reuse", 16),
    "ngrams": (*TWO_SLOTS, "--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", 2),
}
# flags that do the same with every cache, or only name a type, a folder or metadata: the page has no row for them
SAME = {
    *("--ctx-size", "--fit-ctx", "--yarn-orig-ctx", "--override-kv", "--kv-offload", "--kv-unified-per-slot"),
    *("--cache-list", "--cache-prompt", "--cache-idle-slots", "--lookup-cache-static", "--lookup-cache-dynamic"),
    *("--cache-type-k", "--cache-type-v", "--cache-type-k-draft", "--cache-type-v-draft"),
    *("--slots", "--slot-prompt-similarity", "--slot-save-path", "--swa-full", "--swa-checkpoints"),
    *("--lora", "--lora-scaled", "--lora-init-without-apply"),
    *("--parallel", "--ctx-checkpoints", "--checkpoint-min-step"),
}
# errors that depend on the text of the answer, which quantization may change
OF_THE_TEXT = ("Unexpected empty grammar stack", "context shift cannot be used for shared prompt")


def status(server: Server, request: Request) -> tuple[int, str]:
    """Status of the answer and its error; 0: no answer. A stream's error counts as one of the whole."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER)
    with contextlib.closing(connection):
        try:
            connection.request("POST", request.path, json.dumps(request.body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if request.leaves:
                answer.read(10)
                return 200, ""
            text = answer.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            return 0, repr(error)
    error = re.search(r'"error":\s*{.*', text)
    return (answer.status, "") if error is None else (max(answer.status, 400), error[0])


def compare(servers: dict[str, Server], requests: Sequence[Request]) -> str:
    """What is wrong with the answers to requests that are sent at the same time; "": nothing."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name, server in servers.items():
        with ThreadPoolExecutor(len(requests)) as pool:
            found[name] = list(pool.map(lambda request: status(server, request), requests))  # noqa: B023
        if server.process.poll() is not None:
            return f"{name}: ended with {server.process.returncode}: {server.log[-1500:]}"
    for i, request in enumerate(requests):
        answers = {name: results[i] for name, results in found.items()}
        errors = " ".join(error for _, error in answers.values())
        if len({code for code, _ in answers.values()}) > 1 and not any(error in errors for error in OF_THE_TEXT):
            return f"{request}: {answers}"
    return ""


def run(serve: Serve, folder: Path, text: str, seed: int, n: int, options: Sequence[Any]) -> None:
    rng = random.Random(seed)
    with contextlib.ExitStack() as stack:
        servers = {}
        for name, coded, more in (
            ("f16", False, {}),
            ("coded", True, {}),
            ("stored", True, {"SUBKV_STORE": folder / "store"}),
        ):
            saved = folder / name
            saved.mkdir(parents=True)
            server = serve(*options, "--slot-save-path", saved, coded=coded, **more)
            servers[name] = stack.enter_context(server)
        tokens = servers["f16"].tokens(text[:6000])
        texts = [tokens[start : start + length] for start, length in valid_requests.TEXTS]
        for i in range(n):
            requests = valid_requests.requests(rng, texts)
            wrong = compare(servers, requests)
            assert not wrong, f"SUBKV_SEED={seed}, group {i} of {len(requests)} requests: {wrong}"
        for name, server in servers.items():
            assert server.request("GET", "/props")["kv_cache"]["type"] == ("f16" if name == "f16" else "subkv")
            assert server.complete("the", 2)["tokens_predicted"] == 2
            assert (CODED in server.log) == (name != "f16")


def test_statuses_are_those_of_f16(serve: Serve, text: str, tmp_path: Path) -> None:
    run(serve, tmp_path, text, seed=1, n=50, options=SERVERS["shift"])


def test_statuses_of_sliding_windows_with_all_cells(tmp_path: Path, text: str) -> None:
    """No checkpoints, and any prompt may be edited."""
    model = stand_ins.with_words(tmp_path / "model.gguf", tiny.build(tmp_path / "tiny.gguf", "gemma2", n_swa=16))
    opened = engine.Model(model)
    engine.SUBKV.subkv_layout_free(pictures.exact_bases(opened, tmp_path / "bases.gguf"))
    opened.free()

    def serve(*arguments: Any, coded: bool = True, **more: Any) -> contextlib.AbstractContextManager[Server]:
        bases = str(tmp_path / "bases.gguf") if coded else "off"
        return serving(
            model, *arguments, subkv=bases, folder=tmp_path, **{key: str(value) for key, value in more.items()}
        )

    run(serve, tmp_path, text, seed=2, n=25, options=(*TWO_SLOTS, "--swa-full"))


@pytest.mark.slow
@pytest.mark.skipif(not N_GROUPS, reason="a longer run: SUBKV_VALID_REQUESTS")
@pytest.mark.parametrize("name", SERVERS)
def test_statuses_for_longer(serve: Serve, text: str, tmp_path: Path, name: str) -> None:
    run(serve, tmp_path, text, SEED, N_GROUPS, SERVERS[name])


#
# the page, and upstream's fields and flags
#


def schema() -> set[str]:
    """Names of the fields of a completion in the pinned source, alternative names included."""
    with tarfile.open(upstream_source.archive(), "r:gz") as tar:
        member = next(member for member in tar if member.name.endswith("/tools/server/server-schema.cpp"))
        stream = tar.extractfile(member)
        assert stream is not None
        source = stream.read().decode()
    source = re.sub(r"^#if 0$.*?^#endif$|//[^\n]*", "", source, flags=re.M | re.S)
    return set(re.findall(r'(?:new field_\w+|add_alias)\("(\w+)"', source))


def test_every_field_has_values() -> None:
    """A new field of upstream needs values here, and a row in the page if it changes which cells are kept."""
    elsewhere = {"id_slot", "message_delimiters", "include_usage"}  # read beside the schema; part of stream_options
    named = {*valid_requests.CELLS, *valid_requests.OTHERS, *valid_requests.ALIASES, *valid_requests.REFUSED}
    assert named - elsewhere == schema() - elsewhere


def test_the_page_names_every_field_of_cells() -> None:
    assert [name for name in valid_requests.CELLS if f"`{name}`" not in PAGE] == []


def test_the_page_names_every_flag_of_cells() -> None:
    """Flags of llama-server that name a part of the cache; those of drafts are one family."""
    about = r"--(?!no-|spec-)[\w-]*(?:cache|ctx|slot|shift|keep|checkpoint|parallel|kv|swa|sleep|lora)[\w-]*"
    printed = subprocess.run([program("llama-server"), "--help"], capture_output=True, text=True, check=True).stdout
    flags = set(re.findall(rf"(?<![\w-]){about}", printed))
    assert len(flags) > 20 and flags >= SAME
    assert {flag for flag in flags if f"`{flag}`" not in PAGE} == SAME
