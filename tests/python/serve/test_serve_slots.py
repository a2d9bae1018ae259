"""Slots on disk: a restored conversation goes on as if never interrupted; what does not fit changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import Served, running

from runtime.serve.settings import Remembering
from subkv.base import container

PROMPT = "It was a dark and stormy night; " * 4


def generate(served: Served, prompt: str, n: int = 12) -> dict[str, Any]:
    answer = served.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": n, "temperature": 0})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def act(served: Served, action: str, filename: str | None = "night", slot: int = 0) -> Any:
    body = None if filename is None else {"filename": filename}
    return served.client.post(f"/slots/{slot}?action={action}", json=body)


def held(served: Served) -> list[int]:
    return [slot["n_tokens"] for slot in served.client.get("/slots").json()]


@pytest.mark.parametrize("cache", ["subkv", "f16", "q8_0"])
def test_saved_and_restored_in_another_server(coded_model: Callable[..., Path], tmp_path: Path, cache: str) -> None:
    with running(coded_model(), n_slots=2, n_ctx=1024, folder=tmp_path, kv_cache=cache) as served:
        generate(served, PROMPT)
        saved = act(served, "save").json()
        assert saved["n_saved"] == held(served)[0]
        assert saved["n_written"] == (tmp_path / "night").stat().st_size
        expected = generate(served, PROMPT + "and then", 24)
    with running(coded_model(), n_slots=2, n_ctx=1024, folder=tmp_path, kv_cache=cache) as served:
        generate(served, "another conversation", 40)
        restored = act(served, "restore", slot=1).json()
        assert "error" not in restored
        assert restored["n_restored"] == saved["n_saved"] and restored["id_slot"] == 1
        other = held(served)[0]
        assert held(served) == [other, saved["n_saved"]]
        found = generate(served, PROMPT + "and then", 24)
        assert found["choices"][0]["text"] == expected["choices"][0]["text"]
        assert found["timings"]["cache_n"] == expected["timings"]["cache_n"] > 32
        now = held(served)[1]
        assert act(served, "erase", None, slot=1).json() == {"id_slot": 1, "n_erased": now}
        assert held(served) == [other, 0]


def test_files_that_do_not_fit_change_nothing(
    coded_model: Callable[..., Path], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    with running(coded_model(), n_slots=1, n_ctx=512, folder=tmp_path) as served:
        generate(served, PROMPT * 3)
        assert act(served, "save").status_code == 200
    data = (tmp_path / "night").read_bytes()
    (tmp_path / "half").write_bytes(data[: len(data) // 2])
    (tmp_path / "empty").write_bytes(b"")
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    (tmp_path / "flipped").write_bytes(flipped)
    refusals = dict.fromkeys(("half", "empty", "flipped"), "written by action=save") | {"absent": "No such file"}
    others = [
        (coded_model("--kv-bits", "8"), 512, {}, {"night": "fingerprint"} | refusals),
        (coded_model(), 512, {"n_recent": 24}, {"night": "n_recent: expected 24"}),
        (coded_model(), 512, {"kv_cache": "f16"}, {"night": "type_k"}),
        (coded_model(), 256, {}, {"night": "at most 256 tokens"}),
        (coded_model(), 1024, {}, {"night": "n_seq_max: expected 2"}),
        (tiny_model("llama", seed=5, n_layer=2), 512, {}, {"night": "model: expected"}),
    ]
    for model, n_ctx, kwargs, reasons in others:
        n_slots = 2 if n_ctx == 1024 else 1
        with running(model, n_slots=n_slots, n_ctx=n_ctx, folder=tmp_path, **kwargs) as served:
            generate(served, "what was here before", 8)
            before = held(served)
            for name, reason in reasons.items():
                answer = act(served, "restore", name)
                assert answer.status_code == 400, (name, reason)
                assert reason in answer.json()["error"]["message"]
            assert held(served) == before
            # and its cells are still the right ones
            again = generate(served, "what was here before", 8)
            assert act(served, "erase", None).status_code == 200
            assert generate(served, "what was here before", 8)["choices"] == again["choices"]


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "a/b", "", ".hidden", "a\0b", "x" * 500, "..", "a b"])
def test_names_stay_in_the_folder(served: Served, name: str) -> None:
    for action in ("save", "restore"):
        answer = act(served, action, name)
        assert answer.status_code == 400
        assert "filename" in answer.json()["error"]["message"]


def test_a_busy_slot_is_left_alone(served: Served) -> None:
    with served.client.stream(
        "POST", "/v1/completions", json={"prompt": "busy", "stream": True, "max_tokens": 400, "temperature": 0}
    ) as stream:
        next(stream.iter_lines())
        busy = [slot["id"] for slot in served.client.get("/slots").json() if slot["is_processing"]]
        answers = [act(served, "erase", None, slot) for slot in busy]
        # it may have come to its end in between
        assert all(answer.status_code == 409 or served.idle(0.1) for answer in answers)
    assert served.idle()


def test_no_folder_no_files(tiny_model: Callable[..., Path]) -> None:
    with running(tiny_model("llama"), n_slots=1, n_ctx=256) as served:
        answer = act(served, "save")
        assert answer.status_code == 501
        assert "--slot-save-path" in answer.json()["error"]["message"]


def test_a_pipe_in_the_folder(coded_model: Callable[..., Path], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with running(coded_model(), n_slots=1, n_ctx=256, folder=tmp_path) as served:
        answer = act(served, "restore", "pipe")
        assert answer.status_code == 400
        assert "expected a regular file" in answer.json()["error"]["message"]
        generate(served, "it goes on", 2)


def test_tokens_of_other_cells(coded_model: Callable[..., Path], tmp_path: Path) -> None:
    with running(coded_model(), n_slots=1, n_ctx=512, folder=tmp_path) as served:
        generate(served, PROMPT)
        assert act(served, "save").status_code == 200
        saved = container.load(tmp_path / "night")
        for tokens in (saved.tokens[:-1], np.append(saved.tokens, 1), saved.tokens[:0]):
            container.write(tmp_path / "other", container.Container(saved.head, tokens.astype(np.int32), saved.state))
            before = held(served)
            answer = act(served, "restore", "other")
            assert answer.status_code == 400
            assert f"cells of its {len(tokens)} tokens" in answer.json()["error"]["message"]
            assert held(served) == before


def test_what_was_erased_is_in_no_file(coded_model: Callable[..., Path], tmp_path: Path) -> None:
    """The exact window holds rows of the text: they must not leave with the next one's file."""
    with running(coded_model(), n_slots=1, n_ctx=512, folder=tmp_path) as served:
        generate(served, "x", 1)
        assert act(served, "save", "before").status_code == 200
        assert act(served, "erase", None).status_code == 200
        generate(served, "my secret is " + "very secret " * 8)
        assert act(served, "erase", None).status_code == 200
        generate(served, "x", 1)
        assert act(served, "save", "after").status_code == 200
    assert (tmp_path / "after").read_bytes() == (tmp_path / "before").read_bytes()


@pytest.mark.parametrize("shared", [False, True])
def test_each_key_has_files_of_its_own(coded_model: Callable[..., Path], tmp_path: Path, shared: bool) -> None:
    """Of one name: neither is read, replaced or shown to be there by the other key's."""
    kind: dict[str, Any] = {"n_slots": 1, "n_ctx": 512, "folder": tmp_path, "keys": ("one", "two")}
    with running(coded_model(), remembering=Remembering(shared_cache=shared), **kind) as served:

        def as_key(key: str, path: str, body: dict[str, Any]) -> Any:
            return served.client.post(path, json=body, headers={"Authorization": f"Bearer {key}"})

        def write(key: str, prompt: str) -> int:
            answer = as_key(key, "/v1/completions", {"prompt": prompt, "max_tokens": 4, "temperature": 0})
            assert answer.status_code == 200
            return held(served)[0]

        name = {"filename": "kept"}
        n_one = write("one", PROMPT)
        assert as_key("two", "/slots/0?action=save", name).status_code == (200 if shared else 403)
        assert as_key("one", "/slots/0?action=save", name).status_code == 200
        missing = as_key("two", "/slots/0?action=restore", name)
        assert missing.status_code == (200 if shared else 400) and ("No such file" in missing.text) != shared
        n_two = write("two", "another's")
        assert as_key("two", "/slots/0?action=save", name).status_code == 200
        expected = {"one": n_two if shared else n_one, "two": n_two}
        for key, n in expected.items():
            assert as_key(key, "/slots/0?action=restore", name).json()["n_restored"] == n
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert len(files) == (1 if shared else 2) and all(path.parent != tmp_path for path in files) != shared
        if not shared:  # moved to where the other looks, or served without keys, it is refused all the same
            mine, other = sorted(files, key=lambda path: path.stat().st_size)
            mine.write_bytes(other.read_bytes())
            answers = [as_key(key, "/slots/0?action=restore", name) for key in ("one", "two")]
            assert sorted(answer.status_code for answer in answers) == [200, 400]
            assert any("another's in kept" in answer.text for answer in answers)
