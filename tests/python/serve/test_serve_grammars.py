"""Grammars and schemas that would stop a server: refused, or ended with their process."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import Served, running

from runtime.serve import grammar_limits
from runtime.serve import grammars as grammars_module
from runtime.serve.grammar_limits import N_BYTES, N_REPEAT, check_grammar, check_schema
from runtime.serve.grammar_worker import LENGTH
from runtime.serve.grammars import MIB, Grammars, SchemaText
from runtime.serve.refusals import ApiError
from runtime.serve.sampling import SamplingError
from runtime.serve.schema import whole_characters

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
# every character begins two ways: a state for each history
AMBIGUOUS = 'root ::= "a" root | "a" root "b" | "a" root "c" | "z"'
EXPLODING = {
    "prompt": "x",
    "grammar": AMBIGUOUS,
    "max_tokens": 500,
    "logit_bias": {"a": 1000.0},
    "logit_bias_type": "tokens",
}
ENDLESS = SchemaText('{"type": "string", "pattern": "^]$"}')  # llama_cpp's converter stays at the bracket
OPTIONAL = "root ::= " + "x? " * 400 + '"z"\nx ::= [a-z ]?'


@pytest.fixture(scope="module")
def strict(tiny_model: Callable[..., Path]) -> Iterator[Served]:
    with running(tiny_model("llama"), n_slots=2, n_ctx=1024, limits={"grammar_timeout": 1.0}) as made:
        yield made


@pytest.fixture(scope="module")
def grammars(tiny_model: Callable[..., Path]) -> Iterator[Grammars]:
    made = Grammars(str(tiny_model("llama")), tiny.N_VOCAB, 1.0, 64 * MIB)
    yield made
    made.close()


def refusal(grammars: Grammars, text: str) -> str:
    grammar = grammars.begin()
    try:
        with pytest.raises(ApiError) as raised:
            grammars.compile(grammar, text)
    finally:
        grammar.close()
    assert raised.value.status_code == 400
    return str(raised.value.detail)


#
# limits, before anything is compiled
#


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('root ::= "a"\n' + "[" * 70000, "bytes"),
        ('root ::= "a"\n' + "#\n" * 32 + "r ::= " + "(" * 300, "nested groups"),
        ('root ::= "a"{2000000000}', "repetitions"),
        ('root ::= "a"{1,' + "9" * 5000 + "}", "repetitions"),
        ("root ::= " + "|" * 20000, "alternatives"),
        ("root ::= r\n" + "r ::= r\n" * 5000, "rules"),
        ("root ::= \ud83d", "surrogate"),
    ],
)
def test_grammars_beyond_the_limits(grammar: str, reason: str) -> None:
    with pytest.raises(ApiError, match=reason):
        check_grammar(grammar)


def test_grammars_within_the_limits() -> None:
    check_grammar('root ::= ("{" [|({"\\]] "\\"{9999}" "}"){1,1000} # {5000} ((((\n')


@pytest.mark.parametrize("text", ["[" * 60000, '"' * 60001, '"\\' * 30000, "[\\" * 30000, "{" * 60000])
def test_the_check_of_a_grammar_reads_it_once(text: str) -> None:
    """Half a minute each where an unfinished class or string was looked for from every place it might begin at."""
    end = time.monotonic() + 60
    for _ in range(20):
        check_grammar('root ::= "a"\n' + text)
    assert time.monotonic() < end


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "string", "minLength": 2 * 10**8}, "minLength"),
        ({"type": "string", "maxLength": 10**8}, "maxLength"),
        ({"items": {"type": "array", "minItems": 10**8}}, "minItems"),
        ({"anyOf": [{"maxItems": 1e300}]}, "maxItems"),
        ({"minItems": -1}, "minItems"),
        ({"type": "string", "pattern": "^]$"}, "brackets"),
        ({"type": "string", "pattern": "^a}$"}, "brackets"),
        ({"type": "string", "pattern": "^[a]{1,100000000}$"}, "repetitions"),
        ({"type": "string", "pattern": "^" + "a" * 2000 + "$"}, "1024 characters"),
        ({"type": "string", "pattern": "^" + "(" * 300 + "$"}, "groups"),
        ({"properties": {str(i): {} for i in range(300)}}, "properties"),
        ({"enum": ["x" * 70000]}, "bytes"),
        ({"enum": [0] * 10000}, "values"),
        (json.loads('{"items":' * 100 + "{}" + "}" * 100), "levels"),
    ],
)
def test_schemas_beyond_the_limits(schema: Any, reason: str) -> None:
    with pytest.raises(ApiError, match=reason) as raised:
        check_schema(schema, "tools")
    assert raised.value.param == "tools"


def test_schemas_within_the_limits() -> None:
    pattern = r"^[\]}]{2,4}\]\}(a|[^\]])?$"
    check_schema({"properties": {"pattern": {"type": "string", "pattern": pattern, "maxLength": 1000}}}, "tools")


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "pattern", "minLength", "maxItems", "properties", "$ref"]), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text('"[]\\{}()|#:=a9,\n', max_size=60), JSON)
def test_whatever_comes_is_taken_or_refused(text: str, schema: Any) -> None:
    for check in (
        lambda: check_grammar(text),
        lambda: check_schema(schema, "x"),
        lambda: check_schema({"pattern": text}, "x"),
    ):
        with contextlib.suppress(ApiError):
            check()


#
# processes
#


def test_what_never_ends_is_ended(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_limits, "_check_object", lambda *_: None)  # as if the check had missed them
    for pattern in ("^]$", "^}$"):
        assert "--grammar-timeout" in refusal(grammars, SchemaText(json.dumps({"type": "string", "pattern": pattern})))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 2 * 10**8},
        {"type": "array", "items": {"type": "boolean"}, "minItems": 10**8},
        {"type": "string", "pattern": "^(a|b){200000000}$"},
    ],
)
def test_what_fills_the_memory_is_ended(grammars: Grammars, schema: dict[str, Any]) -> None:
    assert "memory" in refusal(grammars, SchemaText(json.dumps(schema))).lower()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 1, "maxLength": N_REPEAT},
        {"type": "array", "items": {"type": "boolean"}, "minItems": N_REPEAT},
        {"type": "array", "items": {"type": "boolean"}, "maxItems": N_REPEAT},
        {"type": "string", "pattern": f"^(ab){{1,{N_REPEAT}}}$"},
    ],
)
def test_what_the_limits_allow_becomes_a_grammar(tiny_model: Callable[..., Path], schema: dict[str, Any]) -> None:
    check_schema(schema, "tools")
    patient = Grammars(str(tiny_model("llama")), tiny.N_VOCAB, 60.0)
    try:
        patient.compile(patient.begin(), SchemaText(json.dumps(schema)))
    finally:
        patient.close()


def test_schemas_and_refusals_are_remembered(grammars: Grammars) -> None:
    schema = SchemaText(json.dumps({"type": "boolean"}))
    for _ in range(2):
        grammar = grammars.begin()
        grammars.compile(grammar, schema)
        grammar.ask(None)
        allowed = grammar.answer(10.0)
        assert allowed is not None and allowed is not True and allowed.sum() >= 2  # the beginnings of true and false
        grammar.close()
    good, found = next(reversed(grammars._known.values()))
    assert good and found.startswith("root ::=")
    assert refusal(grammars, "root ::= [") == refusal(grammars, "root ::= [")


def test_a_step_that_takes_too_long_ends_the_grammar(grammars: Grammars) -> None:
    """Its states double with every token: exponential however the first tokens do."""
    grammar = grammars.begin()
    grammars.compile(grammar, AMBIGUOUS)
    grammar.ask(None)
    allowed = grammar.answer(10.0)
    token = next(i for i in range(len(allowed)) if allowed[i])
    grammar.accept(token)
    with pytest.raises(SamplingError, match="--grammar-(timeout|memory)"):
        for _ in range(500):
            grammar.ask(token)
            assert grammar.answer(30.0) is True
    with pytest.raises(SamplingError):  # and it stays ended
        grammar.ask(token)


def test_closing_ends_a_compilation(grammars: Grammars) -> None:
    patient = Grammars(grammars._model, tiny.N_VOCAB, 60.0, 64 * MIB)
    try:
        grammar = patient.begin()
        threading.Timer(0.5, grammar.close).start()
        with pytest.raises(ApiError, match="ended"):
            patient.compile(grammar, ENDLESS)
    finally:
        patient.close()


def test_closing_does_not_wait(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """close() returns while another thread is inside a poll for the reply, however long that one takes."""
    polling, closed = threading.Event(), threading.Event()
    returned_first, reasons = [], []

    class Poll:
        def register(self, *_: Any) -> None:
            pass

        def poll(self, _: float) -> bool:
            polling.set()
            returned_first.append(closed.wait(60))
            return True

    patient = Grammars(grammars._model, tiny.N_VOCAB, 120.0, 64 * MIB)
    try:
        grammar = patient.begin()
        monkeypatch.setattr(grammars_module, "select", types.SimpleNamespace(poll=Poll, POLLIN=1))

        def compile_endless() -> None:
            with pytest.raises(ApiError) as raised:
                patient.compile(grammar, ENDLESS)
            reasons.append(raised.value.detail)

        thread = threading.Thread(target=compile_endless)
        thread.start()
        assert polling.wait(60)
        grammar.close()
        closed.set()
        thread.join(60)
        assert returned_first == [True]
        assert "ended" in reasons[0]
        assert grammar._sock.fileno() == -1  # closed by its reader
    finally:
        patient.close()


def test_the_cpu_time_of_a_step_is_limited(grammars: Grammars) -> None:
    """Also where the parent would wait for it for long."""
    patient = Grammars(grammars._model, tiny.N_VOCAB, 120.0, 64 * MIB)
    grammar = patient.begin()
    try:
        data = json.dumps(["schema", ENDLESS, 0.1]).encode()
        grammar._send(LENGTH.pack(len(data)) + data)
        with pytest.raises(SamplingError, match="ended its process"):
            grammar._wait(LENGTH.size)
    finally:
        grammar.close()
        patient.close()


def test_what_a_chat_handler_writes_is_checked(grammars: Grammars) -> None:
    assert "repetitions" in refusal(grammars, 'root ::= "a"{2000000000}')
    assert f"{N_BYTES} bytes" in refusal(grammars, 'root ::= "' + "a" * N_BYTES + '"')


def test_only_short_texts_are_remembered(grammars: Grammars) -> None:
    n = len(grammars._known)
    for text in ('root ::= "' + "a" * 1000 + '"', SchemaText(json.dumps({"type": "string", "maxLength": 3}))):
        grammar = grammars.begin()
        grammars.compile(grammar, text)
        grammar.close()
    assert len(grammars._known) == n + 1
    assert all(isinstance(key, bytes) and len(found[1]) <= N_BYTES for key, found in grammars._known.items())


def test_another_process_takes_the_place_of_one_that_ended(grammars: Grammars) -> None:
    grammar = grammars.begin()
    grammars.compile(grammar, 'root ::= "a"')  # its process holds the control socket no more
    grammar.close()
    assert grammars._process is not None
    grammars._process.kill()
    grammars._process.wait()
    grammar = grammars.begin()
    grammars.compile(grammar, 'root ::= "a"')
    grammar.close()


#
# the server
#


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "^]$"}}}},
        {"response_format": {"type": "json_object", "schema": {"type": "string", "minLength": 2 * 10**8}}},
        {"grammar": 'root ::= "a"\n' + "[" * 60000},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"minItems": 10**8}}}]},
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "https://x.invalid/"}}}],
            "tool_choice": "required",
        },
        {"tools": [{"type": "function", "function": {"name": "x" * 65}}]},
        {"tools": [{"type": "function", "function": {"name": 'f" | root "'}}]},
        {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]},
        {"functions": [{"name": "", "parameters": {}}]},
    ],
)
def test_requests_are_refused_with_the_field(served: Served, body: dict[str, Any]) -> None:
    answer = served.client.post(CHAT, json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 4} | body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(next(iter(body)))
    assert served.idle()


def test_a_grammar_that_explodes_leaves_the_others(strict: Served) -> None:
    statuses: list[int] = []

    def explode() -> None:
        statuses.append(strict.client.post(TEXT, json=EXPLODING).status_code)

    thread = threading.Thread(target=explode)
    thread.start()
    try:
        while thread.is_alive():
            answer = strict.client.post(TEXT, json={"prompt": "others", "max_tokens": 2})
            assert answer.status_code == 200
            assert strict.client.get("/health").status_code == 200
    finally:
        thread.join(60)
    assert statuses == [400]
    assert strict.idle()


def test_optional_parts_without_number(strict: Served) -> None:
    """Refused, or answered: in either case soon."""
    answer = strict.client.post(TEXT, json={"prompt": "x", "grammar": OPTIONAL, "max_tokens": 8}, timeout=60)
    assert answer.status_code in (200, 400), answer.text
    assert strict.idle()


def test_clients_that_leave_end_their_grammars(strict: Served) -> None:
    import httpx

    strict.service.engine.grammars.timeout = 60.0
    try:
        for _ in range(2):
            with pytest.raises(httpx.TimeoutException):
                strict.client.post(TEXT, json=EXPLODING, timeout=0.5)
        assert strict.idle(30)
        assert strict.client.post(TEXT, json={"prompt": "others", "max_tokens": 2}).status_code == 200
    finally:
        strict.service.engine.grammars.timeout = 1.0


def test_surrogates_are_no_fault_of_the_server(served: Served) -> None:
    content = (
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 40, "tool_choice": "required", '
        b'"tools": [{"type": "function", "function": {"name": "f", "description": "\\ud83d", '
        b'"parameters": {"type": "boolean"}}}]}'
    )
    headers = {"Content-Type": "application/json"}
    assert served.client.post(CHAT, content=content, headers=headers).status_code == 200
    content = b'{"prompt": "x", "max_tokens": 4, "grammar": "root ::= \\"\\ud83d\\""}'
    assert served.client.post(TEXT, content=content, headers=headers).status_code in (200, 400)


def test_whole_characters() -> None:
    found = {"a\ud83d": ["\ude00", {"b": ("ü\ud83d")}, 1, None], "c": "😀"}
    assert whole_characters(found) == {"a?": ["?", {"b": "ü?"}, 1, None], "c": "😀"}
    deep: Any = "\ud83d"
    for _ in range(100_000):
        deep = [deep]
    found = whole_characters(deep)
    for _ in range(100_000):
        (found,) = found
    assert found == "?"
