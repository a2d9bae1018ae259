"""What llama-server's completions have beside OpenAI's: probabilities, samplers, slots; /embedding, /lora-adapters."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Served, ask, running, waited

GREEDY = {"prompt": "The house on the hill", "temperature": 0, "n_predict": 6}


def complete(served: Served, **fields: Any) -> dict[str, Any]:
    answer = served.client.post("/completion", json=GREEDY | fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def streamed(served: Served, path: str = "/completion", **fields: Any) -> list[dict[str, Any]]:
    with served.client.stream("POST", path, json=GREEDY | fields | {"stream": True}) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def refusal(served: Served, path: str = "/completion", **fields: Any) -> str:
    answer = served.client.post(path, json=GREEDY | fields)
    assert answer.status_code == 400, answer.text
    message: str = answer.json()["error"]["message"]
    return message


#
# what is told
#


@pytest.mark.parametrize("name", ["n_probs", "logprobs"])
def test_probabilities_of_each_token(served: Served, name: str) -> None:
    openai = served.client.post("/v1/completions", json=GREEDY | {"logprobs": 3}).json()["choices"][0]
    whole = complete(served, **{name: 3})
    listed = whole["completion_probabilities"]
    assert [found["logprob"] for found in listed] == pytest.approx(openai["logprobs"]["token_logprobs"])
    for found in listed:
        assert bytes(found["bytes"]).decode("utf-8", "ignore") == found["token"]
        assert len(found["top_logprobs"]) == 3
        assert found["top_logprobs"][0] == {key: found[key] for key in ("id", "token", "bytes", "logprob")}
    pieces = streamed(served, **{name: 3})
    assert [found for piece in pieces for found in piece.get("completion_probabilities", [])] == listed
    assert "completion_probabilities" not in complete(served)


def test_probabilities_after_the_samplers(served: Served) -> None:
    how = {"n_probs": 5, "n_predict": 1, "temperature": 0.5, "samplers": ["top_k", "temperature"], "top_k": 3}
    before = complete(served, **how)["completion_probabilities"][0]["top_logprobs"][:3]
    found = complete(served, **how, post_sampling_probs=True)["completion_probabilities"][0]
    weights = [math.exp(likely["logprob"] / 0.5) for likely in before]
    assert [likely["id"] for likely in found["top_probs"]] == [likely["id"] for likely in before]
    assert [likely["prob"] for likely in found["top_probs"]] == pytest.approx(
        [weight / sum(weights) for weight in weights], rel=1e-4
    )
    assert found["prob"] in [likely["prob"] for likely in found["top_probs"]]
    certain = complete(served, n_probs=5, post_sampling_probs=True)
    assert certain["content"] == complete(served)["content"]
    assert all(len(found["top_probs"]) == 1 and found["prob"] == 1 for found in certain["completion_probabilities"])
    under = complete(served, n_probs=5, post_sampling_probs=True, grammar='root ::= "q" "z"')
    assert under["content"] == "qz" and len(under["completion_probabilities"]) == under["tokens_predicted"]


def test_tokens_and_timings(served: Served) -> None:
    assert complete(served)["tokens"] == []
    whole, pieces = complete(served, return_tokens=True), streamed(served, timings_per_token=True)
    assert [token for piece in pieces for token in piece["tokens"]] == whole["tokens"]
    text = served.client.post("/detokenize", json={"tokens": whole["tokens"]}).json()["content"]
    assert text == whole["content"] and len(whole["tokens"]) == whole["tokens_predicted"] == 6
    assert all(piece["timings"]["prompt_n"] > 0 for piece in pieces)
    assert [piece["tokens_predicted"] for piece in pieces][-1] == 6
    assert ["timings" in piece for piece in streamed(served)] == [False] * (len(pieces) - 1) + [True]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    pieces = streamed(served, "/v1/chat/completions", **chat, timings_per_token=True)
    assert len(pieces) > 2 and all("timings" in piece for piece in pieces)


def test_how_it_was_sampled(served: Served) -> None:
    whole = complete(served, mirostat=2, temperature=0.7, seed=5, top_k=9)
    settings = whole["generation_settings"]
    assert (settings["mirostat"], settings["seed"], settings["top_k"], settings["n_predict"]) == (2, 5, 9, 6)
    assert settings["samplers"][0] == "penalties" and whole["prompt"].endswith(GREEDY["prompt"])
    stop = complete(served)["content"][2:4]
    ended = complete(served, stop=["never", stop])
    assert (ended["stop_type"], ended["stopping_word"]) == ("word", stop)
    assert not complete(served)["truncated"] and complete(served, n_predict=-1, ignore_eos=True)["truncated"]
    assert len({complete(served, temperature=1.5, seed=-1)["generation_settings"]["seed"] for _ in range(3)}) == 3
    params = served.client.get("/props").json()["default_generation_settings"]["params"]
    assert (params["temperature"], params["top_k"], params["n_predict"]) == (0.8, 40, -1)


#
# samplers
#


def left(served: Served, **fields: Any) -> dict[int, float]:
    """Probabilities after the samplers, of the first token."""
    found = complete(served, n_probs=100, post_sampling_probs=True, n_predict=1, **fields)
    return {likely["id"]: likely["prob"] for likely in found["completion_probabilities"][0]["top_probs"]}


def test_samplers_in_their_order(served: Served) -> None:
    hot = {"temperature": 5.0, "min_p": 0.3}
    late, early = left(served, samplers=["min_p", "temperature"], **hot), left(served, samplers="tm", **hot)
    assert len(early) > len(late) > 0  # what is hot is flat: more of it is near the best
    spelled = left(served, samplers=["Min-P", "temp"], **hot)
    assert spelled == late
    free = left(served, samplers=[], temperature=0, top_k=1)  # neither is asked for
    assert len(free) == 100
    assert len(left(served, samplers=["temperature"], temperature=0)) == 1
    assert len(left(served, samplers=["top_k"], top_k=7)) == 7
    assert len(left(served, temperature=1.0, top_n_sigma=0.1)) < len(left(served, temperature=1.0))


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"samplers": ["top_k", "heat"]}, "'heat'"),
        ({"samplers": "kz"}, "'z'"),
        ({"samplers": ["top_k"] * 33}, "33"),
        ({"samplers": {"top_k": 1}}, "samplers"),
        ({"typical_p": 1.5}, "typical_p"),
        ({"dry_base": 0.5}, "dry_base"),
        ({"dry_sequence_breakers": []}, "dry_sequence_breakers"),
        ({"dry_sequence_breakers": [""]}, "1 to 40 bytes"),
        ({"dry_sequence_breakers": ["x" * 41]}, "1 to 40 bytes"),
        ({"dry_sequence_breakers": ["x"] * 17}, "16"),
        ({"xtc_probability": -0.1}, "xtc_probability"),
        ({"mirostat": 3}, "mirostat"),
        ({"n_probs": 101}, "n_probs"),
        ({"id_slot": 4}, "from 0 to 3"),
        ({"id_slot": -2}, "id_slot"),
        ({"lora": [{"id": 0, "scale": 1.0}]}, "no adapters"),
        ({"logit_bias": [["x", 1]]}, "pairs"),
        ({"logit_bias": [[3, True]]}, "pairs"),
        ({"prompt": ["a", "b"]}, "one prompt, found 2"),
        ({"prompt": [1, "x" * 9000]}, "fewer than 512"),
    ],
)
def test_what_cannot_be_asked(served: Served, fields: dict[str, Any], found: str) -> None:
    message = refusal(served, **fields)
    assert next(iter(fields)) in message and found in message and "Value error" not in message


def test_repetition_counts_the_prompt(served: Served) -> None:
    token = complete(served, n_predict=1, return_tokens=True)["tokens"][0]
    prompt = [1, *[token, 7, 8] * 12]
    how = {"prompt": prompt, "temperature": 1.0, "samplers": ["penalties", "dry", "temperature"]}
    seen = [token, 7, 8]
    how["logit_bias"] = [[one, 8] for one in seen]  # so that they are among the first hundred
    plain = left(served, **how)
    assert set(seen) <= plain.keys()
    fewer = left(served, **how, presence_penalty=2.0)
    assert all(fewer[one] < plain[one] for one in seen)
    assert left(served, **how, presence_penalty=2.0, repeat_last_n=0) == pytest.approx(plain, rel=1e-2)
    dry = left(served, **how, dry_multiplier=2.0)
    assert dry.get(token, 0.0) < plain[token] and dry[7] > plain[7]  # only the token that goes on is held back
    assert left(served, **how, dry_multiplier=2.0, dry_penalty_last_n=0) == pytest.approx(plain, rel=1e-2)


def test_the_next_answer_does_not_see_the_samplers_of_the_last(served: Served) -> None:
    before = complete(served)["content"]
    for fields in ({"xtc_probability": 1.0, "xtc_threshold": 0.001}, {"typical_p": 0.2}, {"dynatemp_range": 0.5}):
        complete(served, temperature=1.0, **fields)
        assert complete(served)["content"] == before
    assert complete(served, temperature=1.0, xtc_probability=1.0, xtc_threshold=0.001, n_predict=40)


def test_ends_and_biases(served: Served) -> None:
    bias = [[served.service.llm.token_eos(), 100]]
    assert complete(served, logit_bias=bias)["stop_type"] == "eos"
    assert complete(served, logit_bias=bias, ignore_eos=True)["tokens_predicted"] == 6
    first = complete(served, return_tokens=True)["tokens"][0]
    assert complete(served, return_tokens=True, logit_bias=[[first, False]])["tokens"][0] != first


def test_texts_and_tokens_in_one_prompt(served: Served) -> None:
    tokens = served.client.post("/tokenize", json={"content": "one", "add_special": True}).json()["tokens"]
    more = served.client.post("/tokenize", json={"content": "two"}).json()["tokens"]
    mixed, plain = complete(served, prompt=["one", 5, "two"]), complete(served, prompt=[*tokens, 5, *more])
    assert mixed["content"] == plain["content"] and mixed["tokens_evaluated"] == plain["tokens_evaluated"]
    assert complete(served, prompt=[[5, 6]])["tokens_evaluated"] == 2


#
# slots
#


def test_a_slot_by_its_number(served: Served) -> None:
    for wanted in (2, 0, 3):
        prompt = f"A conversation of slot {wanted}"
        assert complete(served, prompt=prompt, id_slot=wanted)["id_slot"] == wanted
        assert served.client.get("/slots").json()[wanted]["n_tokens"] > 0
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "id_slot": 1, "n": 2}
    assert len(served.client.post("/v1/chat/completions", json=chat).json()["choices"]) == 2
    assert complete(served, prompt="A conversation of slot 3")["id_slot"] == 3  # where most of it is
    anew = complete(served, prompt="A conversation of slot 3", cache_prompt=False)
    assert anew["timings"]["cache_n"] == 0 and anew["timings"]["prompt_n"] == anew["tokens_evaluated"]


@contextlib.contextmanager
def at_work(served: Served, **fields: Any) -> Iterator[None]:
    """A slot is in the middle of an answer, and its engine does nothing, meanwhile."""
    release = threading.Event()
    long = GREEDY | {"stream": True, "n_predict": -1, "ignore_eos": True}
    with served.client.stream("POST", "/completion", json=long | fields) as stream:
        pieces = stream.iter_lines()
        next(pieces)
        held = served.service.engine.call(release.wait)
        assert waited(held.running)
        assert served.service.engine.n_busy == 1
        try:
            yield
        finally:
            release.set()
        list(pieces)


def test_who_waits_for_a_slot_holds_nobody_else_up(coded_model: Callable[..., Path]) -> None:
    with running(coded_model(), n_slots=2, n_ctx=1024) as served:
        found: list[int] = []

        def pinned() -> None:
            found.append(complete(served, id_slot=0)["id_slot"])

        with at_work(served, id_slot=0):
            threads = [threading.Thread(target=pinned) for _ in range(3)]
            for thread in threads:
                thread.start()
            assert waited(lambda: served.service.places.n_waiting >= 2)
            assert served.client.get("/slots?fail_on_no_slot=1").status_code == 200
            assert found == []
        for thread in threads:
            thread.join(30)
        assert found == [0, 0, 0]
        assert ask(served, "free again")[0]


def test_no_slot_is_free(coded_model: Callable[..., Path]) -> None:
    with running(coded_model(), n_slots=1, n_ctx=512) as served, at_work(served):
        assert served.client.get("/slots").status_code == 200
        answer = served.client.get("/slots?fail_on_no_slot=1")
        assert answer.status_code == 503 and "every slot is at work" in answer.text


#
# other routes
#


def test_adapters(served: Served) -> None:
    assert served.client.get("/lora-adapters").json() == []
    answer = served.client.post("/lora-adapters", json=[{"id": 0, "scale": 0.5}])
    assert answer.status_code == 501 and "no adapters" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("POST", "/v1/chat/completion", 404, "expected a path that this server has, found POST /v1/chat/completion"),
        ("GET", "/completion", 405, "expected POST, found GET /completion"),
    ],
)
def test_paths_that_are_not_there(served: Served, method: str, path: str, status: int, message: str) -> None:
    answer = served.client.request(method, path)
    assert (answer.status_code, answer.json()["error"]["message"]) == (status, message)


def test_vectors_as_llama_server_has_them(tiny_model: Callable[..., Path]) -> None:
    with running(tiny_model("bert"), n_slots=1, n_ctx=256, embeddings=True, kv_cache="f16") as served:
        texts = ["one", "another text"]
        openai = [
            one["embedding"] for one in served.client.post("/v1/embeddings", json={"input": texts}).json()["data"]
        ]

        def vectors(path: str = "/embedding", **body: Any) -> list[Any]:
            answer = served.client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert [one["index"] for one in answer.json()] == list(range(len(answer.json())))
            assert all(len(one["embedding"]) == 1 for one in answer.json())
            return [one["embedding"][0] for one in answer.json()]

        assert vectors(content=texts) == openai == vectors("/embeddings", input=texts)
        assert vectors(content="one")[0] == pytest.approx(openai[0], abs=1e-5)
        assert sum(value**2 for value in openai[0]) == pytest.approx(1)
        raw = vectors(content="one", embd_normalize=-1)[0]
        assert sum(map(abs, vectors(content="one", embd_normalize=1)[0])) == pytest.approx(1)
        assert max(map(abs, vectors(content="one", embd_normalize=0)[0])) == pytest.approx(32760)
        norm = sum(abs(value) ** 3 for value in raw) ** (1 / 3)
        assert vectors(content="one", embd_normalize=3)[0] == pytest.approx([value / norm for value in raw])
        coded = vectors(content="one", encoding_format="base64")[0]
        assert struct.unpack(f"<{len(raw)}f", base64.b64decode(coded)) == pytest.approx(openai[0], abs=1e-5)
        for wrong in ({}, {"content": []}, {"content": 3}, {"content": "one", "embd_normalize": -2}):
            assert served.client.post("/embedding", json=wrong).status_code == 400


def test_vectors_of_each_token(tiny_model: Callable[..., Path]) -> None:
    more: dict[str, Any] = {"n_slots": 1, "n_ctx": 256, "embeddings": True, "kv_cache": "f16", "pooling_type": 0}
    with running(tiny_model("bert"), **more) as served:
        n = len(served.service.llm.tokenize(b"another text"))
        found = served.client.post("/embedding", json={"content": "another text"}).json()[0]["embedding"]
        assert len(found) == n and {len(row) for row in found} == {served.service.llm.n_embd()}
        answer = served.client.post("/v1/embeddings", json={"input": "another text"})
        assert answer.status_code == 400 and "--pooling" in answer.text


def test_no_vectors_without_the_flag(served: Served) -> None:
    answer = served.client.post("/embedding", json={"content": "x"})
    assert answer.status_code == 501 and "--embeddings" in answer.text
