"""Replicas on several nodes of one machine: who answers whom, and what the loss of a node or of the store costs."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("ray.serve", reason="needs the extra `cluster`")
cluster_utils = pytest.importorskip("ray.cluster_utils")

from subkv.base.errors import SubkvError  # noqa: E402

pytestmark = pytest.mark.slow

TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. "
SECONDS, KEY = 60.0, "secret"


class Front:
    """The cluster's address, and what its nodes are called."""

    def __init__(self, url: str, cluster: Any, nodes: dict[str, Any], folder: Path) -> None:
        self.client = httpx.Client(base_url=url, timeout=SECONDS, headers={"Authorization": f"Bearer {KEY}"})
        self.url, self.cluster, self.nodes, self.folder = url, cluster, nodes, folder

    def tokens(self, text: str) -> list[int]:
        found: list[int] = self.client.post("/tokenize", json={"content": text}).json()["tokens"]
        return found

    def ask(self, prompt: str | list[int], who: str | None = None, n: int = 8) -> tuple[dict[str, Any], str]:
        """The answer, and who gave it: REPLICA@NODE."""
        body = {"prompt": prompt, "max_tokens": n, "min_tokens": n, "temperature": 0}
        answer = self.client.post("/v1/completions", json=body, headers={} if who is None else {"x-session-id": who})
        assert answer.status_code == 200, answer.text
        return answer.json(), answer.headers["x-replica"]

    @contextlib.contextmanager
    def stream(self, prompt: str | list[int], who: str, n: int) -> Iterator[tuple[Iterator[str], str]]:
        body = {"prompt": prompt, "max_tokens": n, "min_tokens": n, "temperature": 0, "stream": True}
        with self.client.stream("POST", "/v1/completions", json=body, headers={"x-session-id": who}) as answer:
            assert answer.status_code == 200
            yield answer.iter_lines(), answer.headers["x-replica"]

    def of_each(self) -> dict[str, str]:
        """By replica: a session that it answers."""
        found: dict[str, str] = {}
        for i in range(64):
            found.setdefault(self.ask("x", f"session {i}", 1)[1], f"session {i}")
        return found

    def idle(self, who: str) -> bool:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            slots = self.client.get("/slots", headers={"x-session-id": who}).json()
            if not any(slot["is_processing"] for slot in slots):
                return True
            time.sleep(0.1)
        return False

    def entries(self) -> set[str]:
        """What the store holds when nothing is added to it any more."""
        found: list[set[str]] = [set()]
        while len(found) < 6 or any(names != found[-1] for names in found[-5:]):
            time.sleep(0.3)
            found.append({path.name for path in self.folder.glob("*.prompt")})
        return found[-1]


@pytest.fixture(scope="module")
def front(coded_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """A head with the ingress, and two nodes with a replica of two slots each."""
    import ray
    from ray import serve

    from runtime.serve.cluster import build

    folder = tmp_path_factory.mktemp("shared") / "store"
    keys = folder.with_name("keys")
    keys.write_text(KEY)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    head = {
        "num_cpus": 1,
        "resources": {"front": 1},
        "include_dashboard": False,
        "_system_config": {"health_check_period_ms": 500, "health_check_timeout_ms": 2000},
    }
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = [cluster.add_node(num_cpus=1, resources={"engine": 1}) for _ in range(2)]
        ray.init(address=cluster.address, log_to_driver=False)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        flags = ["-m", str(coded_model()), "-np", "2", "-c", "16384", "-t", "1"]
        given = {
            "flags": [*flags, "-cram", "0", "--cache-store", f"file://{folder}"],
            "api_key_file": str(keys),
            "min_replicas": 2,
            "max_replicas": 2,
            "max_queued_requests": 6,
            "replica_resource": "engine",
            "ingress_resource": "front",
        }
        serve.run(build(given), name="subkv")
        made = Front(f"http://127.0.0.1:{port}", cluster, {node.node_id: node for node in nodes}, folder)
        with made.client:
            yield made
    finally:
        with contextlib.suppress(Exception):
            serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def test_a_conversation_has_one_replica(front: Front) -> None:
    assert front.client.get("/health").json() == {"status": "ok"}
    assert len(front.of_each()) == 2
    for i in range(4):
        assert len({front.ask(TEXT * j, f"same {i}", 1)[1] for j in range(1, 4)}) == 1
        opening = f"Conversation {i}. " + TEXT * 10
        assert len({front.ask(opening + "more " * j, None, 1)[1] for j in range(3)}) == 1


def test_refusals_are_the_server_s(front: Front) -> None:
    answer = front.client.post("/v1/completions", json={"prompt": [1], "temperature": "hot"})
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    assert front.client.get("/nothing").status_code == 404
    assert front.client.post("/v1/completions", content=b" " * (9 << 20)).status_code == 413
    with httpx.Client(base_url=front.url) as stranger:
        refused = stranger.post("/v1/completions", json={"prompt": [1]})
        assert refused.status_code == 401 and "x-replica" not in refused.headers  # nobody was asked
        assert stranger.get("/health").status_code == 200


def test_streams_and_who_leaves_them(front: Front) -> None:
    whole, _ = front.ask(TEXT, "stream", 24)
    with front.stream(TEXT, "stream", 24) as (lines, _):
        data = [line.removeprefix("data: ") for line in lines if line]
    assert data[-1] == "[DONE]"
    assert "".join(json.loads(d)["choices"][0]["text"] for d in data[:-1]) == whole["choices"][0]["text"]
    with front.stream(TEXT, "stream", 8000) as (lines, _):
        assert next(lines)
    assert front.idle("stream")  # long before 8000 tokens


def test_more_than_all_can_take(front: Front) -> None:
    """Beyond what may wait there is 503 with Retry-After; everybody else is answered."""

    def one(i: int) -> httpx.Response:
        body = {"prompt": TEXT, "max_tokens": 200, "min_tokens": 200}
        return front.client.post("/v1/completions", json=body, timeout=4 * SECONDS)

    with ThreadPoolExecutor(48) as pool:
        answers = list(pool.map(one, range(48)))
    kinds = {answer.status_code for answer in answers}
    assert kinds == {200, 503}
    assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 503)
    assert sum(answer.status_code == 200 for answer in answers) >= 8


def test_a_node_is_lost(front: Front) -> None:
    """Streams of others end as ever; the lost conversation goes on elsewhere, from what the store holds."""
    (lost, who_lost), (kept, who_kept) = front.of_each().items()
    before = front.tokens(TEXT * 80)
    expected, _ = front.ask(TEXT * 2, who_kept, 3000)
    entries = front.entries()
    first, at = front.ask(before, who_lost, 8)
    assert at == lost and front.entries() - entries
    turn = before + front.tokens(first["choices"][0]["text"] + " Go on.")
    results: dict[str, list[str]] = {}
    reading = threading.Event()

    def follow(who: str, prompt: str | list[int]) -> None:
        results[who] = got = []
        with contextlib.suppress(httpx.HTTPError), front.stream(prompt, who, 3000) as (lines, _):
            for line in lines:
                if line.startswith("data: "):
                    got.append(line.removeprefix("data: "))
                    if len(got) > 5:
                        reading.set()

    asked: list[tuple[str, str | list[int]]] = [(who_kept, TEXT * 2), (who_lost, turn)]
    threads = [threading.Thread(target=follow, args=given) for given in asked]
    for thread in threads:
        thread.start()
    assert reading.wait(SECONDS)
    while any(len(got) < 5 for got in results.values()) or len(results) < 2:
        time.sleep(0.01)
    front.cluster.remove_node(front.nodes[lost.partition("@")[2]], allow_graceful=False)
    for thread in threads:
        thread.join()
    assert results[who_kept][-1] == "[DONE]"
    text = "".join(json.loads(d)["choices"][0]["text"] for d in results[who_kept][:-1])
    assert text == expected["choices"][0]["text"]
    assert results[who_lost][-1] != "[DONE]"

    again, at = front.ask(turn, who_lost, 8)
    assert at == kept
    n_cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert len(before) - 1 <= n_cached < len(turn)  # all that was stored, and no more
    alone = front.ask([turn[0] + 1, *turn[1:]], who_lost, 8)[0]
    assert alone["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_the_store_is_down(front: Front) -> None:
    """What follows is evaluated, and the answers are the same."""
    prompt = "Once more: " + TEXT * 60
    expected, _ = front.ask(prompt, "down", 16)
    front.entries()
    front.folder.rename(front.folder.with_name("gone"))
    front.folder.write_bytes(b"no folder")
    for i in range(3):
        front.ask(f"{i} drives what is there out of its slots. " + TEXT * 20, "down", 4)
    again, _ = front.ask(prompt, "down", 16)
    assert again["choices"][0]["text"] == expected["choices"][0]["text"]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"replicas": 3}, "replicas: expected one of flags"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas: expected at least min_replicas, 3"),
        ({"cpus": "many"}, "cpus: expected a number, found 'many'"),
        ({"tokens_per_replica": "0"}, "tokens_per_replica: expected at least 1, found 0"),
    ],
)
def test_wrong_arguments(args: dict[str, Any], sentence: str) -> None:
    from runtime.serve.cluster import build

    with pytest.raises(SubkvError, match=sentence):
        build(args)
