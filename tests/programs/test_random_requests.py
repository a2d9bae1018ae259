"""Random requests to every route of llama-server: each is answered or refused, and other clients are served."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile import Server, binary
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servers import CODED

pytestmark = [
    pytest.mark.skipif(binary() is None, reason="llama-server: not built (SUBKV_PROGRAMS=ON)"),
    pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads a process's memory in /proc"),
]
N_REQUESTS = int(os.environ.get("SUBKV_REQUESTS", "0"))

SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "n_predict", "max_tokens", "seed", "n_keep", "n_discard",
    "repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty", "mirostat", "mirostat_tau", "n_probs",
    "dry_multiplier", "dry_base", "xtc_probability", "logit_bias", "samplers", "stop", "grammar", "json_schema",
    "cache_prompt", "ignore_eos", "stream", "id_slot", "t_max_predict_ms", "return_tokens", "lora", "n", "min_keep",
)  # fmt: skip
CHATS = ("messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "add_generation_prompt",
         "chat_template_kwargs", "reasoning_format", "logprobs", "top_logprobs")  # fmt: skip
ROUTES: dict[str, tuple[str, ...]] = {
    "/completion": ("prompt", *SAMPLING),
    "/v1/completions": ("prompt", *SAMPLING),
    "/v1/chat/completions": (*CHATS, *SAMPLING),
    "/v1/chat/completions/input_tokens": CHATS,
    "/v1/chat/completions/control": ("id", "action"),
    "/v1/responses": ("input", "instructions", "max_output_tokens", "text", "tools", "tool_choice"),
    "/v1/messages": ("messages", "system", "max_tokens", "tools", "tool_choice", "thinking", "stop_sequences"),
    "/v1/messages/count_tokens": ("messages", "system", "tools"),
    "/apply-template": CHATS,
    "/infill": ("input_prefix", "input_suffix", "input_extra", "prompt", *SAMPLING),
    "/embedding": ("content", "input"),
    "/v1/embeddings": ("input", "encoding_format"),
    "/rerank": ("query", "documents", "top_n"),
    "/tokenize": ("content", "add_special", "parse_special", "with_pieces"),
    "/detokenize": ("tokens",),
    "/lora-adapters": ("id", "scale"),
    "/props": ("x",),
    "/slots/0?action=save": ("filename",),
    "/slots/0?action=restore": ("filename",),
    "/slots/0?action=erase": ("filename",),
    "/slots/7?action=nothing": ("filename",),
    "/v1/streams/lookup": ("conversation_ids",),
}

TEXTS = st.text(max_size=12) | st.sampled_from(
    ["", "a", "\ud800", "\0", "user", "json_object", 'root ::= "a"', "]", "é" * 300, "<|im_start|>", "required"]
)
NUMBERS = st.integers() | st.floats() | st.sampled_from([0, -1, 1, 2**31, 2**63, 10**400, 0.5, -0.0, True])
VALUES = st.recursive(
    st.none() | TEXTS | NUMBERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url", "tool_result", "tool_use", "x"])},
    optional={"text": TEXTS, "content": VALUES, "image_url": VALUES, "input": VALUES},
)
MESSAGES = st.just([{"role": "user", "content": "a"}]) | st.lists(
    st.fixed_dictionaries(
        {}, optional={"role": TEXTS, "content": VALUES | st.lists(PARTS, max_size=2), "tool_calls": VALUES}
    )
    | VALUES,
    max_size=3,
)
SCHEMAS = st.dictionaries(st.sampled_from(["type", "pattern", "minLength", "items", "enum", "anyOf", "$ref"]), VALUES)
FUNCTIONS = st.fixed_dictionaries({}, optional={"name": TEXTS, "description": VALUES, "parameters": SCHEMAS})
TOOLS = st.lists(
    st.fixed_dictionaries({"type": st.just("function")}, optional={"function": FUNCTIONS, "name": TEXTS,
                                                                   "input_schema": SCHEMAS}),
    max_size=2,
)  # fmt: skip
# values that pass the check of a field's type
LIKELY: dict[str, Any] = {
    "prompt": TEXTS,
    "messages": MESSAGES,
    "input": TEXTS | MESSAGES,
    "content": TEXTS,
    "tools": TOOLS,
    "tool_choice": st.sampled_from(["auto", "required", "none", {"type": "any"}]),
    "tokens": st.lists(st.integers(-1, 500), max_size=4),
    "filename": st.sampled_from(["a", "../a", ".", "a" * 200]),
    "stop": st.lists(TEXTS, max_size=3),
    "grammar": TEXTS,
    "json_schema": SCHEMAS,
    "response_format": st.fixed_dictionaries({"type": TEXTS, "schema": SCHEMAS}),
    "logit_bias": st.dictionaries(TEXTS | st.integers().map(str), NUMBERS, max_size=3),
    "n_predict": st.integers(-2, 50),
    "max_tokens": st.integers(-2, 50),
    "stream": st.booleans(),
    "samplers": st.lists(st.sampled_from(["top_k", "dry", "penalties", "xtc", "temperature", "x"]), max_size=5),
    "id_slot": st.integers(-1, 2),
    "n_probs": st.integers(0, 5),
}


@pytest.fixture(scope="module")
def server(coded_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("random")
    template = Path(__file__).with_name("tools.jinja")
    options = ("-np", "2", "-c", "1024", "--slot-save-path", f"{folder}/", "--chat-template-file", str(template))
    with Server(coded_model(), folder, *options, env={"SUBKV": "auto"}) as running:
        assert CODED in running.log_tail(1 << 20)
        yield running


@st.composite
def requests(draw: Any) -> tuple[str, Any]:
    """A route, and a body of some of its fields, most of them with valid types."""
    path = draw(st.sampled_from(sorted(ROUTES)))
    if not draw(st.integers(0, 15)):
        return path, draw(VALUES)
    first, *others = ROUTES[path]
    names = [first, *draw(st.lists(st.sampled_from(others or [first]), max_size=4, unique=True))]
    body = {name: draw(LIKELY.get(name, VALUES) if draw(st.integers(0, 7)) else VALUES) for name in names}
    return path, body


def test_any_request(server: Server) -> None:
    """SUBKV_REQUESTS: number of further requests that differ in every run."""

    @settings(
        max_examples=N_REQUESTS or 300,
        derandomize=not N_REQUESTS,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(requests())
    def run(request: tuple[str, Any]) -> None:
        path, body = request
        answer = server.ask("POST", path, json.dumps(body).encode())
        assert answer.status in (200, 400, 403, 404, 413, 500, 501), (answer.status, answer.text)
        if answer.status != 200:
            assert json.loads(answer.body)["error"]["message"]

    run()
    server.check_health()
