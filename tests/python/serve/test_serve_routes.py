"""Routes beside completions and chats: /infill, /v1/responses, /v1/rerank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import tiny
from serving import Served, running

#
# /infill
#

MARKS = {"pre": 1, "suf": 2, "mid": 3, "rep": 4, "sep": 5}  # tokens


def with_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str) -> Path:
    def llama(m: tiny.Model) -> None:
        tiny.llama(m)
        m.keys |= {f"tokenizer.ggml.fim_{name}_token_id": MARKS[name] for name in names.split()}

    monkeypatch.setitem(tiny.ARCHS, "llama", tiny.Arch(llama))
    return tiny.build(tmp_path / "marks.gguf", "llama")


@pytest.mark.parametrize("names", ["pre suf mid", "pre suf mid rep sep"])
def test_what_is_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str) -> None:
    files = [{"filename": "a.py", "text": "x = 1"}, {"filename": "b.py", "text": "y = 2"}]
    body = {"input_prefix": "def f(", "prompt": "a, ", "input_suffix": "):", "n_predict": 6, "temperature": 0}
    with running(with_marks(tmp_path, monkeypatch, names), n_slots=1, n_ctx=512) as served:

        def tokens(text: str) -> list[int]:
            found: list[int] = served.client.post("/tokenize", json={"content": text}).json()["tokens"]
            return found

        wanted = [1, *tokens("def f("), *tokens("a, "), 2, *tokens("):"), 3]
        if "sep" in names:
            of_files = [[5, *tokens(f"{file['filename']}\n"), *tokens(file["text"])] for file in files]
            extra = [4, *tokens("project\n"), *sum(of_files, []), 5, *tokens("filename\n")]
        else:
            extra = [token for file in files for token in tokens(f"{file['filename']}\n{file['text']}\n\n")]
        for more, prompt in (({}, wanted), ({"input_extra": files}, [*extra, *wanted])):
            found = served.client.post("/infill", json=body | more).json()
            expected = served.client.post(
                "/completion", json={"prompt": prompt, "n_predict": 6, "temperature": 0}
            ).json()
            assert found["content"] == expected["content"] and found["tokens_evaluated"] == len(prompt)
        stream = served.client.post("/infill", json=body | {"stream": True}).text
        assert stream.count("data: ") > 3 and '"stop": true' in stream
        for wrong in (
            {"input_prefix": 3},
            {"input_extra": [{}]},
            {"input_suffix": "x" * 9000},
            {"input_extra": files * 100},
        ):
            assert served.client.post("/infill", json=body | wrong).status_code == 400


def test_a_vocabulary_without_gaps(served: Served) -> None:
    answer = served.client.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
    assert answer.status_code == 501
    assert "its vocabulary has no tokens for what is before and after" in answer.json()["error"]["message"]


#
# /v1/responses
#


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


INPUTS: list[Any] = [
    "Say something.",
    [{"role": "user", "content": "Say something."}],
    [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Say something."}]}],
]


@pytest.mark.parametrize("asked", INPUTS, ids=["text", "message", "parts"])
def test_a_response_is_a_chat(client: Any, asked: Any) -> None:
    how: dict[str, Any] = {"model": "any", "temperature": 0}
    system = {"role": "system", "content": "Be brief."}
    messages = [system, {"role": "user", "content": "Say something."}]
    chat = client.chat.completions.create(messages=messages, max_tokens=8, **how)
    answer = client.responses.create(input=asked, instructions="Be brief.", max_output_tokens=8, **how)
    assert answer.output_text == chat.choices[0].message.content != ""
    assert answer.usage.input_tokens == chat.usage.prompt_tokens and answer.usage.output_tokens == 8
    assert answer.usage.input_tokens_details.cached_tokens > 0
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    turns = [*messages, {"role": "assistant", "content": answer.output_text}, {"role": "user", "content": "More."}]
    chat = client.chat.completions.create(messages=turns, max_tokens=8, **how)
    goes_on = [*answer.output, {"role": "user", "content": "More."}]  # as the client's guide has it
    first = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
    again = client.responses.create(input=[*first, *goes_on], instructions="Be brief.", max_output_tokens=8, **how)
    assert again.output_text == chat.choices[0].message.content


def test_events_of_a_response(client: Any) -> None:
    how: dict[str, Any] = {"model": "any", "input": "Say something.", "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(**how)
    events = list(client.responses.create(**how, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == whole.output_text == events[-1].response.output_text
    assert len({event.response.id for event in (events[0], events[1], events[-1])}) == 1


def test_a_response_of_a_schema(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "reply", "schema": schema}
    answer = client.responses.create(model="any", input="Is it?", text={"format": form}, extra_body={"seed": 1})
    assert answer.status == "completed" and answer.output_text.replace(" ", "") in ('{"ok":true}', '{"ok":false}')
    how: dict[str, Any] = {"model": "any", "input": "Is it?", "extra_body": {"seed": 1, "text": {"format": form}}}
    with client.responses.stream(**how) as stream:  # the client's own reader of events
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == answer.output_text


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]}, "input"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input"),
        ({"text": {"format": {"type": "rhyme"}}}, "text.format"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"n": 2}, "n"),
    ],
)
def test_responses_that_cannot_be(served: Served, fields: dict[str, Any], name: str) -> None:
    answer = served.client.post("/v1/responses", json={"input": "x"} | fields)
    assert answer.status_code == 400, answer.text
    assert name in answer.json()["error"]["message"]


#
# /v1/rerank
#


def ranking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cross-encoder: the tiny encoder with a head that makes one number of the first token's vector."""

    def bert(m: tiny.Model) -> None:
        tiny.bert(m)
        m.keys["pooling_type"] = 4
        m.matrix("cls.output", m.n_embd, 1)

    monkeypatch.setitem(tiny.ARCHS, "bert", tiny.Arch(bert, tiny.ARCHS["bert"].dims, square=True))
    return tiny.build(tmp_path / "rank.gguf", "bert")


def test_texts_by_their_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["one", "another text", "something else", "one"]
    with running(ranking(tmp_path, monkeypatch), n_slots=1, n_ctx=256, embeddings=True, kv_cache="f16") as served:
        body = {"query": "which?", "documents": texts}
        found = served.client.post("/v1/rerank", json=body).json()
        scores = {result["index"]: result["relevance_score"] for result in found["results"]}
        assert sorted(scores.values(), reverse=True) == list(scores.values()) and set(scores) == set(range(4))
        assert scores[0] == pytest.approx(scores[3], abs=1e-5) and len({round(s, 4) for s in scores.values()}) == 3
        alone = served.client.post("/rerank", json=body | {"documents": texts[1:2]}).json()["results"][0]
        assert alone["relevance_score"] == pytest.approx(scores[1], abs=1e-5)
        other = served.client.post("/rerank", json=body | {"query": "who?"}).json()["results"]
        assert {r["index"]: r["relevance_score"] for r in other}[1] != pytest.approx(scores[1], abs=1e-4)
        assert len(served.client.post("/v1/rerank", json=body | {"top_n": 2}).json()["results"]) == 2
        for wrong in ({"documents": []}, {"documents": ["x" * 5000]}, {"query": None}, {"top_n": 0}):
            assert served.client.post("/v1/rerank", json=body | wrong).status_code == 400
        vectors = served.client.post("/v1/embeddings", json={"input": "x"})  # there is one number, not n_embd
        assert vectors.status_code == 400 and "/v1/rerank" in vectors.json()["error"]["message"]


def test_a_query_is_no_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it holds is text, also where it looks like a place of the model's template; what is too long is not read."""
    monkeypatch.setattr("runtime.serve.rerank.C.llama_model_chat_template", lambda *_: b"{query} and {document}")
    with running(ranking(tmp_path, monkeypatch), n_slots=1, n_ctx=256, embeddings=True, kv_cache="f16") as served:

        def ask(query: str, document: str) -> Any:
            return served.client.post("/v1/rerank", json={"query": query, "documents": [document]})

        document = "many words " * 10
        n_short, n_long = (ask("a", text).json()["usage"]["total_tokens"] for text in ("a", document))
        found = ask("{document}" * 4, document).json()["usage"]["total_tokens"]
        assert n_short < n_long < found < n_long + 4 * len("{document}")
        monkeypatch.setattr("runtime.serve.rerank.pairs", None)  # nothing is cut into tokens
        answer = ask("x" * 200_000, "a")
        assert answer.status_code == 400 and "letters with the query" in answer.json()["error"]["message"]


def test_models_that_rank_nothing(tiny_model: Callable[..., Path], served: Served) -> None:
    body = {"query": "which?", "documents": ["one"]}
    answer = served.client.post("/v1/rerank", json=body)
    assert answer.status_code == 501 and "--embeddings --pooling rank" in answer.json()["error"]["message"]
    for pooling in (4, -1):  # asked to rank without a head, or not asked
        with running(
            tiny_model("bert"), n_slots=1, n_ctx=256, embeddings=True, pooling_type=pooling, kv_cache="f16"
        ) as made:
            answer = made.client.post("/v1/rerank", json=body)
            assert answer.status_code == 400 and "ranks no texts" in answer.json()["error"]["message"]
