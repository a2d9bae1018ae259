"""The contract: OpenAI's own client package against the server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import tiny
from serving import running

MESSAGES = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="module")
def client(served: Any) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_models(client: Any) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny" and model.object == "model"
    assert model.meta["n_ctx"] == 512 and 0 < model.meta["kv_cache"]["bytes"] < model.meta["kv_cache"]["bytes_f16"]


def test_chat_and_its_stream_say_the_same(client: Any) -> None:
    answer = client.chat.completions.create(model="any", messages=MESSAGES, max_tokens=12, temperature=0)
    stream = client.chat.completions.create(
        model="any",
        messages=MESSAGES,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert answer.choices[0].message.content == text != ""
    assert answer.choices[0].message.role == chunks[0].choices[0].delta.role == "assistant"
    assert answer.model == "tiny"
    assert answer.usage.completion_tokens == 12 and answer.choices[0].finish_reason == "length"
    usage = chunks[-1].usage
    assert usage.model_copy(update={"prompt_tokens_details": answer.usage.prompt_tokens_details}) == answer.usage
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-2:] == [None, "length"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_parts_of_text_are_one_text(client: Any) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Say"}, {"type": "text", "text": "more."}]}]
    whole = [{"role": "user", "content": "Say\nmore."}]
    first, second = (
        client.chat.completions.create(model="any", messages=m, max_tokens=8, temperature=0) for m in (parts, whole)
    )
    assert first.choices[0].message == second.choices[0].message


def test_a_conversation_with_tool_calls(client: Any) -> None:
    call = {"id": "call_0", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": "noon"},
    ]
    tools = [{"type": "function", "function": {"name": "now"}}]
    answer = client.chat.completions.create(model="any", messages=messages, tools=tools, max_tokens=4)
    assert answer.usage.completion_tokens <= 4
    messages[2]["tool_calls"] = "none"
    with pytest.raises(openai.BadRequestError, match="messages.2.tool_calls"):
        client.chat.completions.create(model="any", messages=messages)


def test_completion_of_text_and_of_tokens(client: Any, served: Any) -> None:
    tokens = served.client.post("/tokenize", json={"content": "one two three", "add_special": True}).json()["tokens"]
    first, second, third = (
        client.completions.create(model="any", prompt=prompt, max_tokens=12, temperature=0)
        for prompt in ("one two three", tokens, ["one two three"])
    )
    assert first.choices[0].text == second.choices[0].text == third.choices[0].text != ""
    assert first.usage.prompt_tokens == len(tokens)
    text = served.client.post("/detokenize", json={"tokens": tokens}).json()["content"]
    assert text.endswith("one two three")


def test_timings(client: Any) -> None:
    answer = client.completions.create(model="any", prompt="a b c d", max_tokens=6, temperature=0)
    timings = answer.model_extra["timings"]
    assert timings["predicted_n"] == 6
    assert timings["prompt_n"] + timings["cache_n"] == answer.usage.prompt_tokens
    assert timings["predicted_ms"] > 0 and timings["prompt_ms"] > 0


def test_stop_string(client: Any) -> None:
    free = client.completions.create(model="any", prompt="stop", max_tokens=40, temperature=0).choices[0].text
    stop = free[10:13]
    held = client.completions.create(model="any", prompt="stop", max_tokens=40, temperature=0, stop=[stop]).choices[0]
    assert held.text == free[: free.index(stop)]
    assert held.finish_reason == "stop"
    chunks = client.completions.create(
        model="any", prompt="stop", max_tokens=40, temperature=0, stop=[stop], stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == held.text


def test_seed_decides_and_neighbours_do_not(client: Any) -> None:
    def ask(seed: int) -> str:
        answer = client.completions.create(model="any", prompt="dice", max_tokens=24, temperature=1.5, seed=seed)
        return str(answer.choices[0].text)

    assert ask(7) == ask(7)
    assert len({ask(seed) for seed in range(4)}) > 1


def test_logprobs_of_a_completion(client: Any, served: Any) -> None:
    answer = client.completions.create(
        model="any", prompt="odds of this", max_tokens=5, temperature=0, logprobs=3, echo=True
    )
    found = answer.choices[0].logprobs
    n_prompt = answer.usage.prompt_tokens
    assert len(found.tokens) == n_prompt + 5
    assert found.token_logprobs[0] is None
    for logprob, top in list(zip(found.token_logprobs, found.top_logprobs, strict=True))[1:]:
        assert logprob <= 0 and 3 <= len(top) <= 4 and logprob in top.values()
    # greedy: what was generated is what was most likely
    for logprob, top in list(zip(found.token_logprobs, found.top_logprobs, strict=True))[n_prompt:]:
        assert logprob == max(top.values())
    # the prompt's logprobs do not depend on what a slot holds
    again = client.completions.create(
        model="any", prompt="odds of this", max_tokens=5, temperature=0, logprobs=3, echo=True
    )
    assert again.choices[0].logprobs.token_logprobs[1:] == pytest.approx(found.token_logprobs[1:], abs=1e-4)


def test_logprobs_of_a_chat(client: Any) -> None:
    answer = client.chat.completions.create(
        model="any", messages=MESSAGES, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 4
    assert all(len(token.top_logprobs) >= 2 for token in content)


def test_json_schema(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="any",
        messages=MESSAGES,
        max_tokens=200,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}},
    )
    found = json.loads(answer.choices[0].message.content)
    assert isinstance(found["ok"], bool) and isinstance(found["n"], int)
    assert answer.choices[0].finish_reason == "stop"


def test_grammar(client: Any) -> None:
    answer = client.chat.completions.create(
        model="any", messages=MESSAGES, seed=1, extra_body={"grammar": 'root ::= "yes" | "no"'}
    )
    assert answer.choices[0].message.content in ("yes", "no")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weigh"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_tool_call(client: Any, choice: Any, stream: bool) -> None:
    parameters = {"type": "object", "properties": {"kilos": {"type": "boolean"}}, "required": ["kilos"]}
    tools = [{"type": "function", "function": {"name": "weigh", "parameters": parameters}}]
    answer = client.chat.completions.create(
        model="any", messages=MESSAGES, tools=tools, tool_choice=choice, max_tokens=100, seed=1, stream=stream
    )
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
        assert {call.function.name for call in calls} == {"weigh"}
        text = "".join(call.function.arguments for call in calls)
        assert chunks[-1].finish_reason == "tool_calls"
    else:
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "weigh"
        text = call.function.arguments
        assert answer.choices[0].finish_reason == "tool_calls"
    assert isinstance(json.loads(text)["kilos"], bool)


@pytest.mark.parametrize("stream", [False, True])
def test_tools_by_a_chat_format_of_llama_cpp(coded_model: Callable[..., Path], stream: bool) -> None:
    parameters = {"type": "object", "properties": {"kilos": {"type": "boolean"}}, "required": ["kilos"]}
    tools = [{"type": "function", "function": {"name": "weigh", "parameters": parameters}}]
    with running(coded_model(), n_slots=2, n_ctx=2048, chat_format="chatml-function-calling") as served:
        body = {"messages": MESSAGES, "tools": tools, "tool_choice": "auto", "max_tokens": 60, "stream": stream}
        for seed in range(4):
            answer = served.client.post("/v1/chat/completions", json=body | {"seed": seed})
            assert answer.status_code == 200
            assert '"error"' not in answer.text
            assert '"finish_reason"' in answer.text
        assert served.idle()


def test_logit_bias_and_min_tokens(client: Any, served: Any) -> None:
    (token,) = served.client.post("/tokenize", json={"content": "x", "parse_special": False}).json()["tokens"]
    answer = client.completions.create(
        model="any",
        prompt="bias",
        max_tokens=6,
        temperature=0,
        logit_bias={str(token): 1000},
        extra_body={"min_tokens": 6},
    )
    assert answer.choices[0].text == "xxxxxx"


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("temperature", -1, 400),
        ("temperature", "hot", 400),
        ("top_k", 10**12, 400),
        ("n", 5, 400),
        ("seed", 10**30, 400),
        ("stop", ["s"] * 1000, 400),
        ("logit_bias", {"nonsense": 1.0}, 400),
        ("logit_bias", {str(10**9): 1.0}, 400),
        ("logprobs", 10**6, 400),
        ("suffix", "end", 400),
        ("grammar", "root ::= [", 400),
        ("grammar", "root ::= " + "(" * 100000 + '"a"' + ")" * 100000, 400),
        ("grammar", "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(10000)) + 'r10000 ::= "a"', 400),
        ("prompt", [10**9], 400),
        ("prompt", ["two", "prompts"], 400),
        ("prompt", "word " * 2000, 400),
    ],
)
def test_bad_values_are_named(client: Any, field: str, value: Any, status: int) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        client.completions.create(model="any", prompt="x", extra_body={field: value})
    assert raised.value.status_code == status
    assert field in raised.value.body["message"]
    assert raised.value.body["type"] in ("invalid_request_error", "exceed_context_size_error")


def test_null_is_not_given(served: Any) -> None:
    names = ("temperature", "top_p", "max_tokens", "stop", "n", "seed", "presence_penalty", "logprobs", "stream")
    body = {"prompt": "nothing", "user": None} | dict.fromkeys(names)
    answer = served.client.post("/v1/completions", json=body)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] <= 16


def test_a_prompt_longer_than_the_slot_gives_the_numbers(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="any", messages=[{"role": "user", "content": "word " * 2000}])
    body = raised.value.body
    assert body["type"] == "exceed_context_size_error"
    assert body["n_ctx"] == 512 < body["n_prompt_tokens"]
    assert str(body["n_prompt_tokens"]) in body["message"]


def test_megabytes_are_refused_before_they_are_tokenized(served: Any) -> None:
    answer = served.client.post("/v1/completions", json={"prompt": "a" * 7_000_000})
    assert answer.status_code == 400
    assert "found at least" in answer.json()["error"]["message"]


def test_absurd_limits_end_with_the_context(client: Any) -> None:
    never = {str(tiny.vocabulary()[0].index(token)): -1e6 for token in tiny.SPECIAL}
    answer = client.completions.create(
        model="any", prompt="on and on", max_tokens=10**12, temperature=0, logit_bias=never
    )
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


def test_bad_chats_are_refused(client: Any) -> None:
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    for messages in ([], [{"role": "nobody", "content": "x"}], picture, [{"role": "user"}] * 10000):
        with pytest.raises(openai.BadRequestError) as raised:
            client.chat.completions.create(model="any", messages=messages)
        assert "messages" in raised.value.body["message"]
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "https://example.invalid/x"}}}
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(model="any", messages=MESSAGES, response_format=bad)
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.chat.completions.create(model="any", messages=MESSAGES, tool_choice="required")


def test_no_embeddings_without_the_flag(client: Any) -> None:
    with pytest.raises(openai.APIStatusError, match="--embeddings") as raised:
        client.embeddings.create(model="any", input="x")
    assert raised.value.status_code == 501
