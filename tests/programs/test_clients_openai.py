"""OpenAI's client, and the other APIs that agents use, against llama-server with a coded cache."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stand_ins
import tiny
from click.testing import CliRunner
from servers import CODED, Server, serving

openai = pytest.importorskip("openai", reason="extra test")
pydantic = pytest.importorskip("pydantic", reason="extra test")

MESSAGES = [{"role": "user", "content": "Say something."}]
CALL = "<tool_call>"


def parameters(name: str, *values: str) -> dict[str, Any]:
    """A schema of one field with few values, so that a random model ends soon."""
    field = {"type": "string", "enum": values}
    return {"type": "object", "properties": {name: field}, "required": [name], "additionalProperties": False}


CITY, ZONE = parameters("city", "Oslo", "Paris"), parameters("zone", "CET", "UTC")
FUNCTIONS = {"get_weather": CITY, "get_time": ZONE}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": p}} for name, p in FUNCTIONS.items()]


def is_call(name: str, arguments: str) -> bool:
    """Whether the name is in TOOLS and the arguments match its schema."""
    schema = FUNCTIONS[name]
    (field,) = schema["properties"]
    parsed = json.loads(arguments)
    return list(parsed) == [field] and parsed[field] in schema["properties"][field]["enum"]


@pytest.fixture(scope="module")
def agent(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with bases; the marks around a call are tokens."""
    from converter.cli import main

    folder = tmp_path_factory.mktemp("agent")
    plain = stand_ins.with_words(
        folder / "plain.gguf", tiny.build(folder / "tiny.gguf", n_ctx_train=4096), (CALL, CALL.replace("<", "</"))
    )
    arguments = [plain, "-f", text_file, "-o", folder / "agent.gguf", "-c", 256, "--chunks", 8, "--codec", "int8"]
    done = CliRunner().invoke(main, [str(word) for word in [*arguments, "--n-recent", 16]])
    assert done.exit_code == 0, done.output
    return folder / "agent.gguf"


@pytest.fixture(scope="module")
def serve_agent(agent: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    template = Path(__file__).with_name("tools.jinja")

    @contextlib.contextmanager
    def start(*arguments: Any) -> Iterator[Server]:
        chats = ("-np", 2, "-c", 4096, "--jinja", "--chat-template-file", template, "--alias", "tiny", *arguments)
        with serving(agent, *chats, subkv="auto", folder=tmp_path_factory.mktemp("server")) as running:
            assert CODED in running.log
            yield running

    return start


@pytest.fixture(scope="module")
def server(serve_agent: Callable[..., Any]) -> Iterator[Server]:
    with serve_agent() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as api:
        yield api


@pytest.fixture
def chat(client: Any) -> Callable[..., Any]:
    """chat(seed=1): an answer to MESSAGES."""

    def ask(messages: Any = MESSAGES, max_tokens: int = 12, **more: Any) -> Any:
        return client.chat.completions.create(model="tiny", messages=messages, max_tokens=max_tokens, **more)

    return ask


@pytest.fixture
def complete(client: Any) -> Callable[..., Any]:
    """complete("one two"): a greedy completion of 12 tokens."""

    def ask(prompt: Any, max_tokens: int = 12, temperature: float = 0, **more: Any) -> Any:
        return client.completions.create(
            model="tiny", prompt=prompt, max_tokens=max_tokens, temperature=temperature, **more
        )

    return ask


#
# chats and completions
#


def test_models(client: Any) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny" and model.object == "model"


def test_a_chat_and_its_stream_say_the_same(chat: Callable[..., Any]) -> None:
    answer = chat(temperature=0)
    chunks = list(chat(temperature=0, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert answer.choices[0].message.content == text != ""
    assert answer.choices[0].message.role == chunks[0].choices[0].delta.role == "assistant"
    assert answer.model == "tiny"
    assert answer.usage.completion_tokens == 12 and answer.choices[0].finish_reason == "length"
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (answer.usage.prompt_tokens, 12)
    assert usage.prompt_tokens_details.cached_tokens > 0
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == "length" and not any(reasons[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_parts_of_text_are_a_text(chat: Callable[..., Any]) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Say"}, {"type": "text", "text": "more."}]}]
    whole = [{"role": "user", "content": "Say\nmore."}]
    first, second = (chat(messages, temperature=0).choices[0].message for messages in (parts, whole))
    assert first.content == second.content


def test_completions_of_texts_and_of_tokens(complete: Callable[..., Any], server: Server) -> None:
    tokens = server.tokens("one two three")
    answers = [complete(prompt) for prompt in ("one two three", tokens, ["one two three"])]
    assert len({answer.choices[0].text for answer in answers}) == 1
    assert {answer.usage.prompt_tokens for answer in answers} == {len(tokens)}


@pytest.mark.parametrize("stream", [False, True])
def test_lists_of_prompts(complete: Callable[..., Any], stream: bool) -> None:
    prompts = ["one two three", "four five", "six"]
    alone = [complete(prompt).choices[0].text for prompt in prompts]
    answer = complete(prompts, stream=stream)
    texts = [""] * len(prompts)
    for chunk in filter(None, answer) if stream else [answer]:  # upstream's stream begins with a null
        for choice in chunk.choices:
            texts[choice.index] += choice.text or ""
    assert texts == alone


def test_a_stop_string(complete: Callable[..., Any]) -> None:
    free = complete("stop", 40).choices[0].text
    stop = free[10:13]
    stopped = complete("stop", 40, stop=[stop]).choices[0]
    assert stopped.text == free[: free.index(stop)] and stopped.finish_reason == "stop"
    chunks = complete("stop", 40, stop=[stop], stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == stopped.text


def test_a_seed_decides(complete: Callable[..., Any]) -> None:
    texts = [complete("dice", 24, 1.5, seed=seed).choices[0].text for seed in (7, 7, 8, 9)]
    assert texts[0] == texts[1] and len(set(texts)) > 1


def test_logprobs(chat: Callable[..., Any]) -> None:
    steps = chat(max_tokens=4, temperature=0, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert len(steps) == 4
    for step in steps:
        assert step.logprob == max(top.logprob for top in step.top_logprobs) <= 0
        assert len(step.top_logprobs) == 3


def test_biases_and_grammars(complete: Callable[..., Any], chat: Callable[..., Any], server: Server) -> None:
    (token,) = server.tokens("x")
    assert complete("bias", 6, logit_bias={str(token): 1000}).choices[0].text == "xxxxxx"
    answer = chat(seed=1, extra_body={"grammar": 'root ::= "yes" | "no"'})
    assert answer.choices[0].message.content in ("yes", "no")


class Reply(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    n: int
    ok: bool


def test_json_schemas(client: Any, chat: Callable[..., Any]) -> None:
    for form in ({"type": "json_schema", "json_schema": {"name": "reply", "schema": Reply.model_json_schema()}},
                 {"type": "json_object", "schema": Reply.model_json_schema()}):  # fmt: skip
        answer = chat(max_tokens=200, seed=1, response_format=form).choices[0]
        assert Reply.model_validate_json(answer.message.content) and answer.finish_reason == "stop"
    parsed = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, max_tokens=200, seed=1, response_format=Reply
    )
    assert isinstance(parsed.choices[0].message.parsed, Reply)


def test_refusals(client: Any, chat: Callable[..., Any]) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        chat([{"role": "user", "content": "word " * 9000}])
    assert raised.value.body["type"] == "exceed_context_size_error"
    assert raised.value.body["n_ctx"] < raised.value.body["n_prompt_tokens"]
    with pytest.raises(openai.BadRequestError):
        chat(extra_body={"grammar": "root ::= ["})
    with pytest.raises(openai.APIStatusError) as refused:
        client.embeddings.create(model="tiny", input="x")
    assert refused.value.status_code == 501


#
# tools
#


@pytest.fixture(scope="module")
def call_biases(server: Server) -> dict[str, float]:
    """Logit biases that make the tiny model begin a call at once."""
    (token,) = server.request("POST", "/tokenize", {"content": CALL, "parse_special": True})["tokens"]
    return {str(token): 1000}


@pytest.fixture(scope="module")
def caller(serve_agent: Callable[..., Any], call_biases: dict[str, float]) -> Iterator[Server]:
    """A server whose model calls a function whenever possible."""
    ((token, bias),) = call_biases.items()
    with serve_agent("--logit-bias", f"{token}+{bias}") as running:
        yield running


@pytest.fixture
def call(chat: Callable[..., Any], call_biases: dict[str, float]) -> Callable[..., Any]:
    """call("required"): an answer that is a call."""

    def ask(choice: Any, parallel: bool = False, seed: int = 1, **more: Any) -> Any:
        more = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel, "seed": seed, **more}
        return chat(max_tokens=200, logit_bias=call_biases, **more)

    return ask


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}, "auto"])
def test_a_tool_is_called(call: Callable[..., Any], choice: Any) -> None:
    for seed in range(3):
        answer = call(choice, seed=seed).choices[0]
        assert answer.finish_reason == "tool_calls"
        (tool_call,) = answer.message.tool_calls
        assert tool_call.id and tool_call.type == "function"
        assert is_call(tool_call.function.name, tool_call.function.arguments)
        assert not answer.message.content
        assert choice in ("required", "auto") or tool_call.function.name == "get_time"


@pytest.mark.parametrize("parallel", [False, True], ids=["one", "several"])
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_calls_in_a_stream(call: Callable[..., Any], choice: str, parallel: bool) -> None:
    """Id and name of each come once; clients join the pieces of the arguments."""
    chunks = list(call(choice, parallel, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    pieces = [piece for delta in deltas for piece in delta.tool_calls or []]
    numbers = sorted({piece.index for piece in pieces})
    assert numbers == list(range(len(numbers))) and (len(numbers) > 1) == parallel
    for number in numbers:
        assert sum(bool(piece.id) for piece in pieces if piece.index == number) == 1
        (name,) = [piece.function.name for piece in pieces if piece.index == number and piece.function.name]
        arguments = "".join(piece.function.arguments or "" for piece in pieces if piece.index == number)
        assert number == numbers[-1] > 0 or is_call(name, arguments)  # the last of several is cut
    assert parallel or chunks[-1].choices[0].finish_reason == "tool_calls"


def test_no_tool_is_called(chat: Callable[..., Any]) -> None:
    answer = chat(tools=TOOLS, tool_choice="none", temperature=0).choices[0]
    assert not answer.message.tool_calls and answer.message.content


def test_tool_history(call: Callable[..., Any], chat: Callable[..., Any], server: Server) -> None:
    """The prompt contains the call and its result, and the arguments as an object, not as its text."""
    reply = call("required").choices[0].message
    (tool_call,) = reply.tool_calls
    result = {"role": "tool", "tool_call_id": tool_call.id, "content": "noon"}
    messages = [*MESSAGES, reply.model_dump(exclude_none=True), result]
    prompt = server.request("POST", "/apply-template", {"messages": messages, "tools": TOOLS})["prompt"]
    arguments = json.dumps(json.loads(tool_call.function.arguments))
    assert f"{CALL}{tool_call.function.name}\n{arguments}\n</tool_call>" in prompt
    assert "<tool_response>\nnoon\n</tool_response>" in prompt
    after = chat(messages, tools=TOOLS, tool_choice="none", temperature=0)
    assert after.choices[0].message.content
    assert after.usage.prompt_tokens_details.cached_tokens > 0


#
# other APIs
#


def test_responses(client: Any, caller: Server) -> None:
    body = {"model": "tiny", "input": "Say something.", "max_output_tokens": 12, "temperature": 0}
    answer = client.responses.create(**body)
    assert answer.output_text and answer.usage.output_tokens == 12
    events = list(client.responses.create(**body, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == answer.output_text
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    tools = [{"type": "function", "name": name, "parameters": p} for name, p in FUNCTIONS.items()]
    with openai.OpenAI(base_url=f"http://127.0.0.1:{caller.port}/v1", api_key="none") as calling:
        answer = calling.responses.create(**{**body, "max_output_tokens": 200}, tools=tools, tool_choice="required")
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert is_call(call.name, call.arguments)
    after = [
        {"role": "user", "content": "Say something."},
        {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
        {"type": "function_call_output", "call_id": call.call_id, "output": "noon"},
    ]
    answer = client.responses.create(**{**body, "input": after}, tools=tools)
    assert answer.usage.output_tokens > 0


ANTHROPIC = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
ANTHROPIC_TOOLS = [{"name": name, "input_schema": schema} for name, schema in FUNCTIONS.items()]


def test_messages_of_anthropic(server: Server, chat: Callable[..., Any]) -> None:
    answer = server.request("POST", "/v1/messages", ANTHROPIC)
    assert (answer["type"], answer["role"], answer["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert answer["content"] == [{"type": "text", "text": chat(temperature=0).choices[0].message.content}]
    assert answer["usage"]["output_tokens"] == 12
    counted = server.request("POST", "/v1/messages/count_tokens", ANTHROPIC)["input_tokens"]
    usage = answer["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_a_stream_of_messages(server: Server) -> None:
    whole = server.request("POST", "/v1/messages", ANTHROPIC)["content"][0]["text"]
    events = _events(server.request("POST", "/v1/messages", {**ANTHROPIC, "stream": True}))
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == whole


def _events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def test_tools_of_messages(server: Server, caller: Server) -> None:
    body = {**ANTHROPIC, "max_tokens": 200, "tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "any"}}
    answer = caller.request("POST", "/v1/messages", body)
    assert answer["stop_reason"] == "tool_use"
    (use,) = [block for block in answer["content"] if block["type"] == "tool_use"]
    assert is_call(use["name"], json.dumps(use["input"]))
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "noon"}
    history = [*MESSAGES, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    after = server.request("POST", "/v1/messages", {**ANTHROPIC, "messages": history, "tools": ANTHROPIC_TOOLS})
    assert after["usage"]["output_tokens"] > 0
    events = _events(caller.request("POST", "/v1/messages", {**body, "stream": True}))
    started = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    (use,) = [block for block in started if block["type"] == "tool_use"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert is_call(use["name"], "".join(delta.get("partial_json", "") for delta in deltas))


def test_embeddings(agent: Path, tmp_path: Path) -> None:
    arguments = ("-np", 1, "-c", 1024, "--embedding", "--pooling", "mean")
    with serving(agent, *arguments, subkv="auto", folder=tmp_path) as server:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
            response = client.embeddings.create(model="tiny", input=["one", "two three", "one"])  # base64 by default
        assert [entry.index for entry in response.data] == [0, 1, 2]
        first, second, third = (entry.embedding for entry in response.data)
        assert first == pytest.approx(third, abs=1e-5) and first != pytest.approx(second, abs=1e-2)
        assert sum(x * x for x in first) == pytest.approx(1, abs=1e-3)
