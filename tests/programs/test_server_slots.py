"""llama-server on coefficients: slots, states of slots, prompts in memory, edits, a context that is full."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from servers import Refused, assert_same

Serve = Callable[..., Any]


def test_a_slot_is_chosen(serve: Serve, text: str) -> None:
    with serve("-c", 2048, "-np", 4, "--no-kv-unified") as server:
        first = server.complete(text[:500], id_slot=2)
        assert first["id_slot"] == 2
        again = server.complete(text[:500], id_slot=2)
        other = server.complete(text[:500], id_slot=0)
        assert first["tokens"] == again["tokens"] == other["tokens"]
        assert again["timings"]["prompt_n"] == 1
        slots = server.request("GET", "/slots")
        assert [slot["n_ctx"] for slot in slots] == [512] * 4 and not any(slot["is_processing"] for slot in slots)
        with pytest.raises(Refused, match="400"):
            server.complete(text, 4)  # longer than a slot


@pytest.mark.parametrize(
    ("arguments", "shares"), [((), True), (("-np", 4), False), (("-np", 4, "--kv-unified"), True)], ids=str
)
def test_slots_share_the_context_or_have_parts(serve: Serve, arguments: tuple[Any, ...], shares: bool) -> None:
    with serve("-c", 2048, *arguments) as server:
        assert [slot["n_ctx"] for slot in server.request("GET", "/slots")] == [2048 if shares else 512] * 4


@pytest.mark.parametrize("unified", ["--kv-unified", "--no-kv-unified"])
def test_slots_do_not_see_each_other(serve: Serve, text: str, unified: str) -> None:
    prompts = [text[1000 * i : 1000 * i + 300 + 100 * i] for i in range(8)]
    with serve("-c", 4096, "-np", 4, unified, "--cache-ram", 0) as server:
        bodies = [{"prompt": prompt, "n": 24, "cache_prompt": False, "n_probs": 2} for prompt in prompts]
        together = server.together(bodies)
        alone = [server.complete(**body) for body in bodies]
    for one, other in zip(together, alone, strict=True):
        assert_same(one, other)
    assert len({answer["id_slot"] for answer in together}) == 4


def test_probabilities_are_those_of_one_slot(serve: Serve, text: str) -> None:
    def top_tokens(answer: Any) -> list[tuple[int, float]]:
        steps = answer["completion_probabilities"]
        return [(top["id"], top["logprob"]) for step in steps for top in step["top_logprobs"]]

    body = {"prompt": text[:900], "n": 8, "n_probs": 5, "cache_prompt": False}
    with serve("-c", 1024, "-np", 1) as server:
        alone = top_tokens(server.complete(**body))
    with serve("-c", 4096, "-np", 4) as server:
        for answer in server.together([body] * 4):
            assert [token for token, _ in top_tokens(answer)] == [token for token, _ in alone]
            assert [p for _, p in top_tokens(answer)] == pytest.approx([p for _, p in alone], abs=1e-4)


@pytest.mark.parametrize("unified", ["--kv-unified", "--no-kv-unified"])
def test_a_saved_slot_outlives_the_server(serve: Serve, text: str, unified: str, tmp_path: Path) -> None:
    arguments = ("-c", 4096, "-np", 2, unified, "--slot-save-path", tmp_path)
    with serve(*arguments) as server:
        before = server.complete(text[:2000], 16, id_slot=1)
        saved = server.request("POST", "/slots/1?action=save", {"filename": "a.bin"})
        continued = server.complete(text[:2000] + before["content"] + " and", 16, id_slot=1)
    with serve(*arguments) as server:
        restored = server.request("POST", "/slots/0?action=restore", {"filename": "a.bin"})
        assert restored["n_restored"] == saved["n_saved"]
        after = server.complete(text[:2000] + before["content"] + " and", 16, id_slot=0)
        assert after["tokens"] == continued["tokens"]
        assert after["timings"]["prompt_n"] == continued["timings"]["prompt_n"] < 32
        server.request("POST", "/slots/0?action=erase")
        assert server.complete(text[:2000], 16, id_slot=0)["tokens"] == before["tokens"]


def test_a_saved_slot_of_another_layout_is_refused(
    serve: Serve, text: str, words: Path, coded_model: Callable[..., Path], tmp_path: Path
) -> None:
    arguments = ("-c", 2048, "-np", 1, "--slot-save-path", tmp_path)
    with serve(*arguments) as server:
        server.complete(text[:1500])
        server.request("POST", "/slots/0?action=save", {"filename": "coded.bin"})
    data = bytearray((tmp_path / "coded.bin").read_bytes())
    data[len(data) // 2] ^= 255
    (tmp_path / "damaged.bin").write_bytes(data)
    (tmp_path / "short.bin").write_bytes(data[: len(data) // 2])
    with serve(*arguments, coded=False) as server:
        fresh = server.complete(text[:1500])
        server.request("POST", "/slots/0?action=save", {"filename": "f16.bin"})
        with pytest.raises(Refused, match="(?i)restore"):
            server.request("POST", "/slots/0?action=restore", {"filename": "coded.bin"})
        assert server.complete(text[:1500])["tokens"] == fresh["tokens"]
    with serve(*arguments) as server:
        fresh = server.complete(text[:1500])
        for name in ("f16.bin", "damaged.bin", "short.bin"):
            with pytest.raises(Refused, match="(?i)restore"):
                server.request("POST", "/slots/0?action=restore", {"filename": name})
            assert server.complete(text[:1500])["tokens"] == fresh["tokens"], name


def test_prompts_in_memory_are_restored(serve: Serve, text: str) -> None:
    evaluated = {}
    for coded in (True, False):
        with serve("-c", 2048, "-np", 1, "--cache-ram", 64, coded=coded) as server:
            first = server.complete(text[:2500])
            server.complete(text[20000:22500])  # the only slot continues with another text
            again = server.complete(text[:2500])
            assert again["tokens"] == first["tokens"]
            evaluated[coded] = again["timings"]["prompt_n"]
    assert evaluated[True] == evaluated[False] == 1


@pytest.mark.parametrize("checkpoints", [0, 32])
def test_an_edited_prompt_needs_no_checkpoint(serve: Serve, text: str, checkpoints: int) -> None:
    edited = text[:1900] + " and nothing of what followed"
    with serve("-c", 2048, "-np", 1, "--ctx-checkpoints", checkpoints) as server:
        server.complete(text[:2000], cache_prompt=False)
        again = server.complete(edited)
        n = len(server.tokens(edited)) - len(server.tokens(text[:1900]))
        assert again["timings"]["prompt_n"] <= n + 34
        assert "created context checkpoint" not in server.log


def test_a_slot_file_serves_another_question(serve: Serve, text: str, tmp_path: Path) -> None:
    arguments = ("-c", 4096, "-np", 1, "--slot-save-path", tmp_path)
    with serve(*arguments) as server:
        server.complete(text[:4000] + "What is that?", 100)
        server.request("POST", "/slots/0?action=save", {"filename": "document.bin"})
    with serve(*arguments) as server:
        server.request("POST", "/slots/0?action=restore", {"filename": "document.bin"})
        answer = server.complete(text[:4000] + "And how is it done?", 8)
        assert answer["timings"]["prompt_n"] <= 36 + 32


def test_a_full_context_ends_the_answer(serve: Serve, text: str) -> None:
    with serve("-c", 256, "-np", 1) as server:
        answer = server.complete(text[:300], 1000)
        assert answer["truncated"] and answer["stop_type"] == "limit"
        assert answer["tokens_evaluated"] + answer["tokens_predicted"] in (256, 257)
        assert server.complete(text[:300], 8)["tokens"] == answer["tokens"][:8]


@pytest.mark.parametrize("keep", [0, 4, 40])
@pytest.mark.parametrize("coded", [True, False], ids=["coded", "f16"])
def test_a_context_is_shifted(serve: Serve, text: str, coded: bool, keep: int) -> None:
    with serve("-c", 256, "-np", 1, "--context-shift", coded=coded) as server:
        answer = server.complete(text[:300], 600, n_keep=keep)
        assert (answer["tokens_predicted"], answer["truncated"]) == (600, True)
        assert "slot context shift" in server.log
        server.complete(text[:200], 8)


def test_a_file_that_is_no_state_is_refused(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "none.bin").write_bytes(struct.pack("<III", 0, 0, 0) + bytes(1000))
    with serve("-c", 512, "-np", 1, "--slot-save-path", tmp_path) as server:
        for name in ("none.bin", "missing.bin"):
            with pytest.raises(Refused):
                server.request("POST", "/slots/0?action=restore", {"filename": name})
        with pytest.raises(Refused):
            server.request("POST", "/slots/0?action=restore", {"filename": "../none.bin"})
        assert len(server.complete("It is")["tokens"]) == 16
