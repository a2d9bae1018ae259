"""Requests that nobody would send, at random, to every route that takes one: refused or answered, never a fault."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import Served, running

from runtime.serve import schema
from runtime.serve.native import NAMES

N_REQUESTS = int(os.environ.get("SUBKV_REQUESTS", "0"))
ROUTES = {
    "/v1/completions": schema.CompletionRequest,
    "/completion": schema.NativeRequest,
    "/v1/chat/completions": schema.ChatRequest,
    "/v1/embeddings": schema.EmbeddingRequest,
    "/apply-template": schema.TemplateRequest,
    "/tokenize": schema.TokenizeRequest,
    "/detokenize": schema.DetokenizeRequest,
    "/slots/0?action=save": schema.SlotFile,
    "/slots/0?action=restore": schema.SlotFile,
    "/slots/0?action=erase": schema.SlotFile,
    "/slots/7?action=nothing": schema.SlotFile,
}

TEXTS = st.text(max_size=12) | st.sampled_from(
    ["", "a", "\ud800", "\0", "user", "json_object", 'root ::= "a"', "]", "é" * 300]
)
NUMBERS = st.integers() | st.floats() | st.sampled_from([0, -1, 1, 2**31, 2**63, 10**400, 0.5, -0.0, True])
VALUES = st.recursive(
    st.none() | TEXTS | NUMBERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.just([{"role": "user", "content": "a"}]) | st.lists(
    st.fixed_dictionaries({}, optional={"role": TEXTS, "content": VALUES}) | VALUES, max_size=3
)
SCHEMAS = st.dictionaries(st.sampled_from(["type", "pattern", "minLength", "items", "enum", "anyOf", "$ref"]), VALUES)
# what a field may hold if it is to get further than its type
LIKELY: dict[str, Any] = {
    "prompt": TEXTS,
    "messages": MESSAGES,
    "input": TEXTS,
    "content": TEXTS,
    "tokens": st.lists(st.integers(-1, 500), max_size=4),
    "filename": st.sampled_from(["a", "../a", ".", "a" * 200]),
    "stop": st.lists(TEXTS, max_size=3),
    "grammar": TEXTS,
    "json_schema": SCHEMAS,
    "response_format": st.fixed_dictionaries({"type": TEXTS, "schema": SCHEMAS}),
    "logit_bias": st.dictionaries(TEXTS | st.integers().map(str), NUMBERS, max_size=3),
    "stream": st.booleans(),
    "samplers": st.lists(st.sampled_from([*NAMES, "top-k"]), max_size=5),
    "id_slot": st.integers(-1, 0),
    "n_probs": st.integers(0, 5),
}

SELDOM = {"grammar", "json_schema", "response_format", "samplers", "id_slot", "n_probs"}


@pytest.fixture(scope="module")
def served(coded_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("slots")
    with running(coded_model(), n_slots=1, n_ctx=512, folder=folder) as served:
        yield served


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, Any]:
    route = draw(st.sampled_from(sorted(ROUTES)))
    if draw(st.integers(0, 9)) == 0:
        return route, draw(VALUES)
    names = sorted(ROUTES[route].model_fields)
    needed = [name for name in names if name in LIKELY and name not in SELDOM]
    body = {name: draw(LIKELY[name]) for name in needed}
    for name in draw(st.lists(st.sampled_from(names), max_size=3)):
        body[name] = draw(LIKELY.get(name, VALUES) | VALUES)
    return route, body | {"max_tokens": draw(st.integers(-1, 4)) % 5}


def test_random_requests(served: Served) -> None:
    seen = set()

    @settings(
        max_examples=N_REQUESTS or 250,
        deadline=None,
        database=None,
        derandomize=not N_REQUESTS,
        suppress_health_check=list(HealthCheck),
    )
    @given(requests())
    def one(request: tuple[str, Any]) -> None:
        route, body = request
        try:
            data = json.dumps(body).encode()
        except ValueError:  # a number of more digits than Python writes
            return
        answer = served.client.post(route, content=data, headers={"Content-Type": "application/json"})
        seen.add((route, answer.status_code))
        assert answer.status_code < 500 or answer.status_code == 501, (route, body, answer.text)
        if answer.status_code != 200:
            assert answer.json()["error"]["message"], (route, body, answer.text)

    one()
    assert served.client.get("/health").status_code == 200
    assert served.idle()
    answered = {route for route, status in seen if status == 200}
    refused = {route for route, status in seen if status == 400}
    assert refused == ROUTES.keys() and len(answered) >= 7, (ROUTES.keys() - refused, sorted(answered))
