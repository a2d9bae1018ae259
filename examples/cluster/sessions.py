"""Identifies the conversation of a request, counts waiting work, and computes the number of replicas."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import parse_qs

# headers that name a conversation; llama-server's page resumes streams by the second one
NAMES = ("x-session-id", "x-conversation-id")
NAME_IN_QUERY = "conv_id"
OWNERS = ("authorization", "x-api-key")
N_OPENING = 512  # characters that identify the conversation of a prompt without messages
BYTES_PER_TOKEN = 4  # of a body, approximately
PING = b":"  # starts a comment in a stream, sent before the answer


def session(headers: Iterable[tuple[bytes, bytes]], body: bytes, query: bytes = b"") -> str:
    """A key shared by all requests of one conversation, "" if unknown.

    It is derived from the name that the client sends (NAMES), else from API key, system prompt and first message.
    """
    fields = {name.decode("latin-1").lower(): value for name, value in headers}
    owner = b"\0".join(fields.get(name, b"") for name in OWNERS)
    names = [fields[name] for name in NAMES if fields.get(name)]
    names += [name.encode() for name in parse_qs(query.decode("latin-1")).get(NAME_IN_QUERY, [])]
    if names:
        return _digest(owner, b"id", names[0])
    opening = _opening(body)
    return _digest(owner, b"opening", opening.encode("utf-8", "replace")) if opening else ""


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]


def _opening(body: bytes) -> str:
    """The start of the conversation in a request's body, "" for bodies of other forms."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(request, dict):
        return ""
    messages = request.get("messages") or request.get("input") or request.get("prompt") or request.get("content")
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        users = [i for i, message in enumerate(messages) if message.get("role") == "user"]
        messages = messages[: users[0] + 1] if users else messages[:1]
        system = request.get("system") or request.get("instructions")  # Anthropic's and the responses API's
        return json.dumps([system, [[message.get("role"), message.get("content")] for message in messages]])
    return json.dumps(messages[:N_OPENING]) if isinstance(messages, (str, list)) and messages else ""


class Load:
    """Counts the prompt tokens of a replica's requests whose answers have not started."""

    def __init__(self) -> None:
        self.n_tokens = 0

    @contextlib.contextmanager
    def waiting(self, body: bytes) -> Iterator[Callable[[bytes], None]]:
        """Counts a request until the block ends, or until the yielded function gets the first piece of the answer."""
        n = len(body) // BYTES_PER_TOKEN
        self.n_tokens += n

        def ended() -> None:
            nonlocal n
            self.n_tokens -= n
            n = 0

        def received(piece: bytes) -> None:
            if piece and not piece.startswith(PING):
                ended()

        try:
            yield received
        finally:
            ended()


class QueuedTokens:
    """The number of replicas for Ray's autoscaler, which adds bounds and delays (AutoscalingPolicy).

    tokens, requests: maximum waiting prompt tokens and maximum running requests per replica.
    """

    def __init__(self, tokens: float, requests: float) -> None:
        self.tokens, self.requests = tokens, requests

    def __call__(self, now: Any) -> tuple[float, dict[str, Any]]:
        """now: ray.serve.config.AutoscalingContext."""
        reported = (now.aggregated_metrics or {}).get("queued_tokens", {})
        return math.ceil(max(sum(reported.values()) / self.tokens, now.total_num_requests / self.requests)), {}
