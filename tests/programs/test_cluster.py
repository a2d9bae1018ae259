"""Replicas on several nodes of one machine: routing of sessions, and the loss of a node or of the store."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import pytest
from each import each

httpx = pytest.importorskip("httpx", reason="needs the extra `cluster`")
pytest.importorskip("ray.serve", reason="needs the extra `cluster`")
cluster_utils = pytest.importorskip("ray.cluster_utils")

from program_paths import program  # noqa: E402
from servers import free_port  # noqa: E402

from subkv.base.errors import SubkvError  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")]

TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. "
SECONDS, KEY = 60.0, "secret"
Tokens = list[int]


class Front:
    """The cluster's address, and the names of its nodes."""

    def __init__(self, url: str, cluster: Any, nodes: dict[str, Any], folder: Path) -> None:
        self.client = httpx.Client(base_url=url, timeout=SECONDS, headers={"Authorization": f"Bearer {KEY}"})
        self.url, self.cluster, self.nodes, self.folder = url, cluster, nodes, folder

    def tokens(self, text: str) -> Tokens:
        ids: Tokens = self.client.post("/tokenize", json={"content": text}).json()["tokens"]
        return ids

    @staticmethod
    def _body(prompt: str | Tokens, n: int, **more: Any) -> dict[str, Any]:
        return {
            "prompt": prompt,
            "n_predict": n,
            "temperature": 0,
            "ignore_eos": True,
            "return_tokens": True,
            **more,
        }

    def complete(self, prompt: str | Tokens, session_id: str | None = None, n: int = 8) -> tuple[dict[str, Any], str]:
        """The answer, and the replica that gave it: REPLICA@NODE."""
        named = {} if session_id is None else {"x-session-id": session_id}
        answer = self.client.post("/completion", json=self._body(prompt, n), headers=named)
        assert answer.status_code == 200, answer.text
        return answer.json(), answer.headers["x-replica"]

    @contextlib.contextmanager
    def stream(self, prompt: str | Tokens, session_id: str, n: int) -> Iterator[Iterator[Any]]:
        """The events of a stream."""
        body = self._body(prompt, n, stream=True)
        with self.client.stream("POST", "/completion", json=body, headers={"x-session-id": session_id}) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"] == "text/event-stream" and "x-replica" in answer.headers
            yield (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))

    def sessions(self) -> dict[str, str]:
        """One session of each replica, by replica."""
        by_replica: dict[str, str] = {}
        for i in range(64):
            by_replica.setdefault(self.complete("x", f"session {i}", 1)[1], f"session {i}")
        return by_replica

    def slots(self, session_id: str, condition: Callable[[list[dict[str, Any]]], bool]) -> None:
        """Wait until the slots of a replica meet the condition."""
        end = time.monotonic() + SECONDS
        while not condition(slots := self.client.get("/slots", headers={"x-session-id": session_id}).json()):
            assert time.monotonic() < end, slots
            time.sleep(0.1)

    def entries(self) -> set[str]:
        """The store's entries, after the last one is written."""
        snapshots: list[set[str]] = [set()]
        while len(snapshots) < 8 or any(names != snapshots[-1] for names in snapshots[-7:]):
            time.sleep(0.3)
            snapshots.append({path.name for path in self.folder.glob("*.prefix")})
        return snapshots[-1]

    def servers(self) -> list[int]:
        """The processes of llama-server."""
        pids = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (path / "cmdline").read_bytes().split(b"\0")
                if command[0] == b"llama-server" and str(self.folder).encode() in (path / "environ").read_bytes():
                    pids.append(int(path.name))
        return pids


@pytest.fixture(scope="module")
def front(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """A head with the ingress, and two nodes with a replica of two slots each."""
    program("llama-server")
    import ray
    from cluster.deployment import build
    from ray import serve

    folder = tmp_path_factory.mktemp("shared") / "store"
    keys = folder.with_name("keys")
    keys.write_text(KEY)
    port = free_port()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    paths = [str(Path(__file__).resolve().parents[2] / "examples"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # of the nodes' processes
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
        flags = ["-m", str(model), "-np", "2", "-c", "8192", "-t", "1", "--context-shift", "--no-ui"]
        arguments = {
            "flags": [*flags, "--store", str(folder)],
            "api_key_file": str(keys),
            "min_replicas": 2,
            "max_replicas": 2,
            "max_queued_requests": 6,
            "replica_resource": "engine",
            "ingress_resource": "front",
        }
        serve.run(build(arguments), name="subkv")
        running = Front(f"http://127.0.0.1:{port}", cluster, {node.node_id: node for node in nodes}, folder)
        with running.client:
            yield running
    finally:
        with contextlib.suppress(Exception):
            serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def test_a_conversation_has_one_replica(front: Front) -> None:
    assert front.client.get("/health").json() == {"status": "ok"}
    assert len(front.sessions()) == len(front.servers()) == 2
    for i in range(4):
        assert len({front.complete(TEXT * j, f"same {i}", 1)[1] for j in range(1, 4)}) == 1
        opening = f"Conversation {i}. " + TEXT * 10
        assert len({front.complete(opening + "more " * j, None, 1)[1] for j in range(3)}) == 1


def test_refusals_are_the_server_s(front: Front) -> None:
    answer = front.client.post("/v1/completions", json={"prompt": [1], "temperature": "hot"})
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    assert front.client.get("/nothing").status_code == 404
    assert front.client.post("/v1/completions", content=b" " * (10 << 20)).status_code == 413
    with httpx.Client(base_url=front.url) as stranger:
        refused = stranger.post("/v1/completions", json={"prompt": [1]})
        assert refused.status_code == 401 and "x-replica" not in refused.headers  # no replica was called
        assert stranger.get("/health").status_code == 200


def test_chats(front: Front) -> None:
    """Chats with OpenAI's and Anthropic's routes."""
    talk = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    reply = front.client.post("/v1/chat/completions", json=talk).json()
    assert reply["choices"][0]["message"]["role"] == "assistant" and reply["usage"]["completion_tokens"] == 4
    reply = front.client.post("/v1/messages", json=talk).json()
    assert reply["type"] == "message" and reply["usage"]["output_tokens"] == 4


def test_streams_and_disconnects(front: Front) -> None:
    whole, _ = front.complete(TEXT, "stream", 24)
    with front.stream(TEXT, "stream", 24) as events:
        received = list(events)
    assert received[-1]["stop"] and "".join(event["content"] for event in received) == whole["content"]
    with front.stream(TEXT, "stream", -1) as events:  # without an end: the context shifts
        assert next(events)
        front.slots("stream", lambda slots: any(slot["is_processing"] for slot in slots))
    front.slots("stream", lambda slots: not any(slot["is_processing"] for slot in slots))


def test_more_requests_than_the_queue_holds(front: Front) -> None:
    """Requests beyond the queue get 503 with Retry-After; all others are answered."""

    def one(i: int) -> Any:
        body = front._body(TEXT, 200)
        return front.client.post("/completion", json=body, timeout=4 * SECONDS)

    with ThreadPoolExecutor(48) as pool:
        answers = list(pool.map(one, range(48)))
    kinds = {answer.status_code for answer in answers}
    assert kinds == {200, 503}
    assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 503)
    assert sum(answer.status_code == 200 for answer in answers) >= 8


def test_a_server_is_killed(front: Front) -> None:
    """Another replica answers its pending request; Ray starts a new one."""
    before = front.sessions()
    killed = front.servers()[0]
    os.kill(killed, signal.SIGKILL)
    for session_id in before.values():
        assert front.complete(TEXT, session_id, 4)[0]["tokens_predicted"] == 4
    end = time.monotonic() + 2 * SECONDS
    while len(front.servers()) < 2 or len(front.sessions()) < 2:
        assert time.monotonic() < end
        time.sleep(0.2)
    assert killed not in front.servers() and set(before) != set(front.sessions())


def test_a_node_is_lost(front: Front) -> None:
    """Other streams end normally; the lost conversation continues on another node, from the store."""
    (lost, lost_session), (remaining, remaining_session) = front.sessions().items()
    before = front.tokens(TEXT * 80)
    expected, _ = front.complete(TEXT * 2, remaining_session, 2000)
    entries = front.entries()
    first, at = front.complete(before, lost_session, 8)
    assert at == lost and front.entries() - entries
    turn = before + first["tokens"] + front.tokens(" Go on.")
    results: dict[str, list[Any]] = {remaining_session: [], lost_session: []}

    def follow(session_id: str, prompt: str | Tokens) -> None:
        with contextlib.suppress(httpx.HTTPError), front.stream(prompt, session_id, 2000) as events:
            for event in events:
                results[session_id].append(event)

    prompts: list[tuple[str, str | Tokens]] = [(remaining_session, TEXT * 2), (lost_session, turn)]
    threads = [threading.Thread(target=follow, args=given) for given in prompts]
    for thread in threads:
        thread.start()
    end = time.monotonic() + SECONDS
    while any(len(events) < 9 for events in results.values()):
        assert time.monotonic() < end
        time.sleep(0.01)
    front.cluster.remove_node(front.nodes[lost.partition("@")[2]], allow_graceful=False)
    for thread in threads:
        thread.join()
    assert results[remaining_session][-1]["stop"]
    assert "".join(event["content"] for event in results[remaining_session]) == expected["content"]
    last = results[lost_session][-1]
    assert last.get("error", {}).get("code", 503) == 503 and not last.get("stop")

    again, at = front.complete(turn, lost_session, 8)
    assert at == remaining
    begun = [token for event in results[lost_session] if "tokens" in event for token in event["tokens"]]
    assert again["tokens"] == begun[:8]
    assert again["timings"]["cache_n"] >= len(before)  # all that was stored
    alone = front.complete([turn[0] + 1, *turn[1:]], lost_session, 8)[0]
    assert alone["timings"]["cache_n"] == 0


def test_the_store_is_down(front: Front) -> None:
    """Lost slots are evaluated again, and the answers are the same."""
    prompt = "Once more: " + TEXT * 60
    expected, _ = front.complete(prompt, "down", 16)
    front.entries()
    front.folder.rename(front.folder.with_name("gone"))
    front.folder.write_bytes(b"no folder")
    for i in range(3):
        front.complete(f"{i} takes the slots of others. " + TEXT * 20, "down", 4)
    again, _ = front.complete(prompt, "down", 16)
    assert again["tokens"] == expected["tokens"]


@each(
    ("args", "sentence"),
    [
        ({"replicas": 3}, "replicas: unknown argument; expected one of flags"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas: expected at least min_replicas, 3"),
        ({"cpus": "many"}, "cpus: expected a number, found 'many'"),
        ({"tokens_per_replica": "0"}, "tokens_per_replica: expected at least 1, found 0"),
        ({"max_body": 0}, "max_body: expected at least 1, found 0"),
        ({"stall_timeout": "nan"}, "stall_timeout: expected more than 0 seconds, found nan"),
        ({"flags": "-m model.gguf --host 0.0.0.0"}, "flags: expected no --host, found one: each replica listens"),
        ({"flags": ["--api-key=secret"]}, "flags: expected no --api-key, found one: api_key_file is"),
        ({"flags": "--models-dir models"}, "flags: expected no --models-dir, found one: a cluster serves one model"),
        ({"flags": "--version"}, "flags: expected no --version, found one: it starts no server"),
        ({"flags": "-np many"}, "flags: -np: expected a number, found 'many'"),
        ({"flags": "--store"}, "store"),
        ({"flags": "--store a --store-mib none"}, "none"),
    ],
)
def test_wrong_arguments(args: dict[str, Any], sentence: str) -> None:
    from cluster.deployment import build

    with pytest.raises((SubkvError, click.ClickException), match=sentence):
        build(args)


def test_slots_of_a_replica() -> None:
    """The number equals llama-server's."""
    from cluster.deployment import Arguments

    assert [Arguments(flags=flags).n_slots() for flags in ("", "-np 2", ["--parallel", "8", "-np", "3"])] == [4, 2, 3]
    assert Arguments(flags="-np -1").n_slots() == 4
