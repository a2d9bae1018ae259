"""llama-server on coefficients: drafts, adapters, embeddings, rerankers, sleep, a router, clients that leave."""

from __future__ import annotations

import http.client
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stand_ins
import tiny
from servers import CODED, ORDINARY, assert_same, serving

Serve = Callable[..., Any]
DRAFTS = {
    "draft-simple": ["--spec-draft-n-max", 6],
    "ngram-simple": ["--spec-ngram-simple-size-n", 3, "--spec-ngram-simple-size-m", 6],
    "ngram-map-k": ["--spec-ngram-map-k-size-n", 3, "--spec-ngram-map-k-size-m", 6],
    "ngram-map-k4v": ["--spec-ngram-map-k4v-size-n", 3, "--spec-ngram-map-k4v-size-m", 6],
    "ngram-mod": ["--spec-ngram-mod-n-match", 3, "--spec-ngram-mod-n-min", 1, "--spec-ngram-mod-n-max", 6],
}


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("slots", [1, 2])
def test_drafts_change_no_token(serve: Serve, text: str, words: Path, kind: str, slots: int) -> None:
    arguments: list[Any] = ["-c", 1024 * slots, "-np", slots]
    bodies = [{"prompt": prompt, "n": 64} for prompt in ((text[:150] + "\n") * 4, text[:700])]
    with serve(*arguments) as server:
        plain = [server.complete(**body, n_probs=2) for body in bodies]
    drafts = [*arguments, "--spec-type", kind, *DRAFTS[kind]]
    if kind == "draft-simple":
        drafts += ["--model-draft", words]
    with serve(*drafts) as server:
        drafted = server.together(bodies) if slots > 1 else [server.complete(**body) for body in bodies]
        if kind == "draft-simple":  # the bases of its model are derived
            assert server.log.count(CODED) == 2 and ORDINARY not in server.log
    for one, other in zip(plain, drafted, strict=True):
        assert_same(one, other)
    assert sum(answer["timings"].get("draft_n", 0) for answer in drafted) > 0


def test_more_drafts_than_removable_tokens(serve: Serve, text: str, model: Path, words: Path) -> None:
    """A coded cache can remove 16 tokens; 24 drafts use checkpoints."""
    arguments = ["-c", 1024, "-np", 1]
    with serve(*arguments) as server:
        plain = server.complete(text[:700], 48, n_probs=2)
    for rates in ("0", "1", "0.5"):
        drafts = ["--spec-type", "draft-simple", "--model-draft", model]
        drafts += ["--spec-draft-n-max", 24, "--spec-draft-n-min", 24]
        with serve(*arguments, *drafts, "--spec-synth-rates", ",".join([rates] * 24)) as server:
            answer = server.complete(text[:700], 48)
            assert answer["timings"]["draft_n"] > 0
            if rates == "0":
                assert_same(plain, answer)
            assert len(answer["tokens"]) == 48


def test_adapters(serve: Serve, text: str, words: Path, tmp_path: Path) -> None:
    adapter = stand_ins.adapter(tmp_path / "adapter.gguf", words)
    with serve("-c", 4096, "-np", 4) as server:
        plain = server.complete(text[:600], n_probs=2, cache_prompt=False)
    with serve("-c", 4096, "-np", 4, "--lora", adapter) as server:
        same = {"prompt": text[:600], "n_probs": 2, "cache_prompt": False}
        bodies = [{**same, "lora": [{"id": 0, "scale": scale}]} for scale in (0, 1, 0, 1)]
        none, whole, none_again, whole_again = server.together(bodies)
        server.request("POST", "/lora-adapters", [{"id": 0, "scale": 1}])
        for all_ in (whole_again, server.complete(**same)):
            assert_same(whole, all_)
    assert_same(plain, none)
    assert_same(plain, none_again)
    assert plain["tokens"] != whole["tokens"]


def vectors(server: Any, texts: list[str]) -> np.ndarray:
    data = server.request("POST", "/v1/embeddings", {"input": texts})["data"]
    return np.array([entry["embedding"] for entry in sorted(data, key=lambda entry: entry["index"])])


def test_embeddings_of_a_language_model(serve: Serve, text: str) -> None:
    texts = [text[500 * i : 500 * i + 300] for i in range(6)]
    by_cache = {}
    for coded in (True, False):
        with serve("-c", 2048, "-np", 1, "--embedding", "--pooling", "mean", coded=coded) as server:
            by_cache[coded] = vectors(server, texts)
            assert vectors(server, texts[:1])[0] == pytest.approx(by_cache[coded][0], abs=1e-3)
    assert ((by_cache[True] * by_cache[False]).sum(1) > 0.999).all()


def test_encoders_have_no_cache(serve: Serve, text: str, tmp_path: Path) -> None:
    letters = tiny.build(tmp_path / "letters.gguf", "bert", n_ctx_train=1024)
    bert = stand_ins.with_words(tmp_path / "bert.gguf", letters, add_bos_token=True)
    texts = [text[100 * i : 100 * i + 90] for i in range(4)]
    by_cache = {}
    for coded in (True, False):
        with serve("--embedding", "-np", 1, model=bert, coded=coded) as server:
            by_cache[coded] = vectors(server, texts)
            assert CODED not in server.log
    assert (by_cache[True] == by_cache[False]).all()
    rank = stand_ins.reranker(tmp_path / "rank.gguf", bert)
    scores = {}
    for coded in (True, False):
        with serve("--reranking", "-np", 1, model=rank, coded=coded) as server:
            scores[coded] = server.request("POST", "/rerank", {"query": "What is it?", "documents": texts})["results"]
    assert scores[True] == scores[False] and len(scores[True]) == 4


def test_sleep_and_waking(serve: Serve, text: str) -> None:
    with serve("-c", 1024, "-np", 1, "--sleep-idle-seconds", 1) as server:
        before = server.complete(text[:600])
        server.wait("sleep", "/props", lambda props: props["is_sleeping"])
        after = server.complete(text[:600])
        assert after["tokens"] == before["tokens"]
        assert not server.request("GET", "/props")["is_sleeping"]
        assert server.log.count(CODED) == 2


def test_a_model_that_changes_while_it_sleeps(words: Path, text: str, tmp_path: Path) -> None:
    """The other model gets none of the stored prompts."""
    model = tmp_path / "model.gguf"
    other = stand_ins.with_words(tmp_path / "other.gguf", tiny.build(tmp_path / "tiny.gguf", seed=1))
    arguments = ["-c", 1024, "-np", 1]
    with serving(other, *arguments, subkv="off", folder=tmp_path) as server:
        expected = server.complete(text[:600])
    shutil.copy(words, model)
    store = {"SUBKV_STORE": str(tmp_path / "store")}
    with serving(model, *arguments, "--sleep-idle-seconds", 1, subkv="off", folder=tmp_path, **store) as server:
        before = server.complete(text[:600])
        server.wait("sleep", "/props", lambda props: props["is_sleeping"])
        shutil.copy(other, tmp_path / "new.gguf")
        (tmp_path / "new.gguf").replace(model)
        answer = server.complete(text[:600])
        assert answer["tokens"] == expected["tokens"] != before["tokens"]
        assert answer["timings"]["cache_n"] == 0


def test_a_router(serve: Serve, text: str, model: Path, words: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    for name, source in (("with", model), ("without", words)):
        shutil.copy(source, folder / f"{name}.gguf")
    with serve("-c", 1024, "-np", 1) as server:
        alone = server.complete(text[:600])
    with serve("--models-dir", folder, "--models-max", 1, "-c", 1024, "-np", 1, model=None) as server:
        assert {entry["id"] for entry in server.request("GET", "/models")["data"]} >= {"with", "without"}
        first = server.complete(text[:600], model="with")
        other = server.complete(text[:600], model="without")  # the first one is unloaded
        again = server.complete(text[:600], model="with")
        assert first["tokens"] == again["tokens"] == alone["tokens"]
        assert len(other["tokens"]) == 16
        assert server.log.count(CODED) == 3 and ORDINARY not in server.log


def test_clients_that_leave(serve: Serve, text: str) -> None:
    with serve("-c", 4096, "-np", 2, "--no-kv-unified") as server:
        fresh = server.complete(text[:900], cache_prompt=False)
        for prompt, chunks in ((text[:900], 3), (text[2000:3500], 1), (text[:900], 0)):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            body = {"prompt": prompt, "n_predict": 1500, "stream": True, "ignore_eos": True}
            connection.request("POST", "/completion", json.dumps(body))
            if chunks:
                response = connection.getresponse()
                for _ in range(2 * chunks):
                    response.readline()
            connection.close()
        server.wait("free slots", "/slots", lambda slots: not any(slot["is_processing"] for slot in slots))
        assert server.complete(text[:900])["tokens"] == fresh["tokens"]


def test_32_at_once(serve: Serve, text: str) -> None:
    prompts = [text[700 * i : 700 * i + 200 + 20 * (i % 7)] for i in range(32)]
    with serve("-c", 4096, "-np", 4) as server:
        bodies = [{"prompt": prompt, "n": 12, "n_probs": 2} for prompt in prompts]
        answers = server.together(bodies)
        for body, answer in zip(bodies, answers, strict=True):
            assert_same(answer, server.complete(**body, cache_prompt=False))
