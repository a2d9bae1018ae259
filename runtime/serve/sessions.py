"""Which conversation a request belongs to, how much work waits for a replica, and how many replicas that takes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import parse_qs

# names that clients give to conversations; llama-server's page resumes streams by the second one
NAMES = ("x-session-id", "x-conversation-id")
NAME_IN_QUERY = "conv_id"
OWNERS = ("authorization", "x-api-key")
N_OPENING = 512  # characters of a prompt without turns that tell conversations apart
BYTES_PER_TOKEN = 4  # of a body, about
PING = b":"  # begins a comment of a stream that has no answer yet


def session(headers: Iterable[tuple[bytes, bytes]], body: bytes, query: bytes = b"") -> str:
    """A key that all requests of a conversation have in common, and other conversations have not; "": unknown.

    A name where the client gives one (NAMES); else a hash of the key, the system prompt and the first turn.
    """
    found = {name.decode("latin-1").lower(): value for name, value in headers}
    owner = b"\0".join(found.get(name, b"") for name in OWNERS)
    given = [found[name] for name in NAMES if found.get(name)]
    given += [name.encode() for name in parse_qs(query.decode("latin-1")).get(NAME_IN_QUERY, [])]
    if given:
        return _digest(owner, b"id", given[0])
    opening = _opening(body)
    return _digest(owner, b"opening", opening.encode("utf-8", "replace")) if opening else ""


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]


def _opening(body: bytes) -> str:
    """How the conversation of a request's body begins; llama-server answers other bodies."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(asked, dict):
        return ""
    turns = asked.get("messages") or asked.get("input") or asked.get("prompt") or asked.get("content")
    if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
        users = [i for i, turn in enumerate(turns) if turn.get("role") == "user"]
        turns = turns[: users[0] + 1] if users else turns[:1]
        system = asked.get("system") or asked.get("instructions")  # Anthropic's and the responses API's
        return json.dumps([system, [[turn.get("role"), turn.get("content")] for turn in turns]])
    return json.dumps(turns[:N_OPENING]) if isinstance(turns, (str, list)) and turns else ""


class Load:
    """The requests of a replica that have had nothing of their answer yet, in tokens to be read."""

    def __init__(self) -> None:
        self.n_tokens = 0

    @contextlib.contextmanager
    def waiting(self, body: bytes) -> Iterator[Callable[[bytes], None]]:
        """Counts until the block ends, or its value is called with something of an answer."""
        n = len(body) // BYTES_PER_TOKEN
        self.n_tokens += n

        def ended() -> None:
            nonlocal n
            self.n_tokens -= n
            n = 0

        def said(piece: bytes) -> None:
            if piece and not piece.startswith(PING):
                ended()

        try:
            yield said
        finally:
            ended()


class QueuedTokens:
    """How many replicas there should be, for Ray's autoscaler, which adds bounds and delays (AutoscalingPolicy).

    tokens: of prompts that wait, for each replica; requests: at work, for each. Neither is to be exceeded.
    """

    def __init__(self, tokens: float, requests: float) -> None:
        self.tokens, self.requests = tokens, requests

    def __call__(self, now: Any) -> tuple[float, dict[str, Any]]:
        """now: ray.serve.config.AutoscalingContext."""
        told = (now.aggregated_metrics or {}).get("queued_tokens", {})
        return math.ceil(max(sum(told.values()) / self.tokens, now.total_num_requests / self.requests)), {}
