"""llama-mtmd-cli and llama-server's image_url and input_audio on a coded cache answer as with f16."""

from __future__ import annotations

import base64
import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine
import pictures
import pytest
import stand_ins
import tiny
import tiny_vision
from program_paths import program
from servers import CODED, Server, serving, wait_until

N = 24  # tokens of an answer
PICTURES = {  # projector and text model
    "a position each": ("janus_pro", "llama"),
    "seen whole": ("gemma3", "llama"),
    "seen whole, sliding windows": ("gemma3", "gemma2"),
    "M-RoPE": ("qwen2vl_merger", "qwen2vl"),
    "M-RoPE, hybrid": ("qwen2vl_merger", "qwen35"),
}
SOUNDS = {"sound": ("ultravox", "llama"), "sound, M-RoPE": ("ultravox", "qwen2vl")}


@dataclass(frozen=True)
class Files:
    model: Path
    projector: Path
    bases: Path  # of full rank and 16 bits, the last 8 tokens exact
    hears: bool
    model_type: str


@pytest.fixture(scope="module", params=list(PICTURES))
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("pictures")
    (kind, arch), hears = (PICTURES | SOUNDS)[request.param], request.param in SOUNDS
    path = stand_ins.with_words(folder / "model.gguf", tiny.build(folder / "tiny.gguf", arch))
    model = engine.Model(path)
    n_embd = int(engine.C.llama_model_n_embd(model.handle))
    engine.SUBKV.subkv_layout_free(pictures.exact_bases(model, folder / "bases.gguf"))
    model.free()
    projector = folder / "mmproj.gguf"
    if hears:
        tiny_vision.build_sound(projector, n_embd)
    else:
        tiny_vision.build(projector, kind, n_embd)
    return Files(path, projector, folder / "bases.gguf", hears, arch)


def environment(subkv: str) -> dict[str, str]:
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("LLAMA_", "SUBKV"))}
    return plain | {"SUBKV": subkv}


#
# llama-mtmd-cli
#


@pytest.mark.parametrize("files", [*PICTURES, *SOUNDS], indirect=True)
def test_mtmd_cli(files: Files, tmp_path: Path) -> None:
    flag, media = ("--audio", tiny_vision.sound()) if files.hears else ("--image", tiny_vision.picture(200, 96, 64))
    (tmp_path / "media").write_bytes(media)
    command = [program("llama-mtmd-cli"), "-m", files.model, "--mmproj", files.projector, flag, tmp_path / "media"]
    command += ["-p", "What is this quick brown fox", "-n", N, "--temp", 0, "-c", 1024, "-t", 1, "--offline"]

    def generate(subkv: str) -> str:
        most = ""
        for _ in range(5):  # upstream's programs may end before their whole log is written (common/log.cpp)
            done = subprocess.run(
                [str(word) for word in command], env=environment(subkv), capture_output=True, timeout=300, check=False
            )
            log = done.stderr.decode("utf-8", "replace")
            assert done.returncode == 0, log[-2000:]
            assert (CODED in log) == (subkv != "off")
            most = max(most, done.stdout.decode("utf-8", "replace").strip(), key=len)
        return most

    expected = generate("off")
    assert len(expected) >= N // 2
    # rounding decides between two words that are about as likely: the servers below tell how likely they are
    assert len(os.path.commonprefix([expected, generate(str(files.bases))])) >= 8


#
# llama-server
#


def url(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode()


def message(text: str, *media: bytes) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url(picture)}} for picture in media]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


@dataclass(frozen=True)
class Answer:
    text: str
    steps: list[dict[str, Any]]
    evaluated: int
    reason: str


def ask(server: Server, *messages: dict[str, Any], n: int = N, **more: Any) -> Answer:
    body = {"messages": messages, "max_tokens": n, "temperature": 0, "logprobs": True, "top_logprobs": 2, **more}
    reply = server.request("POST", "/v1/chat/completions", body)
    choice = reply["choices"][0]
    steps = choice["logprobs"]["content"]
    return Answer(choice["message"]["content"], steps, reply["timings"]["prompt_n"], choice["finish_reason"])


def assert_same(one: Answer, other: Answer, tie: float = 0.02) -> None:
    """Equal up to the first token with two nearly equal probabilities."""
    for step, other_step in zip(one.steps, other.steps, strict=True):
        if step["id"] != other_step["id"]:
            first, second = (top["logprob"] for top in step["top_logprobs"])
            assert first - second < tie, (one.text, other.text)
            return
        assert abs(step["logprob"] - other_step["logprob"]) < tie, (one.text, other.text)


@pytest.fixture
def serve(files: Files, tmp_path: Path) -> Callable[..., contextlib.AbstractContextManager[Server]]:
    @contextlib.contextmanager
    def start(*arguments: Any, coded: bool = True, **variables: Any) -> Iterator[Server]:
        options = ["--mmproj", files.projector, "-c", 2048, "-np", 1, "--no-warmup", *arguments]
        subkv = str(files.bases) if coded else "off"
        more = {name: str(value) for name, value in variables.items()}
        with serving(files.model, *options, subkv=subkv, folder=tmp_path, **more) as server:
            assert (CODED in server.log) == coded
            yield server

    return start


WORDS = "the quick brown fox jumps over the lazy dog and "


def story(*, red: int = 40) -> list[list[dict[str, Any]]]:
    """A growing conversation with two images, a regenerated answer, the last turn edited, the first image changed."""
    turns = [message(WORDS * 4, tiny_vision.picture(red)), message("what is this", tiny_vision.picture(200, 96, 48))]
    answer = {"role": "assistant", "content": WORDS}
    first, second = turns[:1], [turns[0], answer, turns[1]]
    third = [*second, answer, message(WORDS * 2)]
    edited = [*third[:-1], message("hello hello")]
    return [first, second, third, third, edited, second]


def test_image_url(serve: Callable[..., Any]) -> None:
    """Every turn equals that of f16, and of a server that reuses nothing; a changed image is detected."""
    answers = {}
    for coded in (False, True):
        with serve(coded=coded) as server:
            answers[coded] = [ask(server, *messages) for messages in story()]
            other = ask(server, *story(red=230)[1])
    with serve() as server:
        fresh = [ask(server, *messages, cache_prompt=False) for messages in story()]
    for expected, actual, alone in zip(answers[False], answers[True], fresh, strict=True):
        assert_same(expected, actual)
        assert_same(alone, actual)
    assert other.text != answers[True][1].text
    evaluated, whole = ([answer.evaluated for answer in some] for some in (answers[True], fresh))
    for turn in (1, 2):  # besides the new tokens
        assert whole[turn - 1] + evaluated[turn] < whole[turn] + 20
    assert max(evaluated[3:]) < 40


@pytest.mark.parametrize("files", list(SOUNDS), indirect=True)
def test_input_audio(serve: Callable[..., Any]) -> None:
    def transcribe(pitch: float) -> list[dict[str, Any]]:
        data = base64.b64encode(tiny_vision.sound(pitch)).decode()
        sound = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
        return [{"role": "user", "content": [sound, {"type": "text", "text": WORDS * 4}]}]

    answers = {}
    for coded in (False, True):
        with serve(coded=coded) as server:
            answers[coded] = [ask(server, *transcribe(pitch)) for pitch in (440.0, 1300.0, 440.0)]
    for expected, actual in zip(answers[False], answers[True], strict=True):
        assert_same(expected, actual)
    first, other, again = answers[True]
    assert max(abs(a["logprob"] - b["logprob"]) for a, b in zip(first.steps, other.steps, strict=True)) > 0.02
    assert_same(first, again)


def test_several_slots(serve: Callable[..., Any]) -> None:
    """Two conversations at once, with pictures at the same positions."""
    requests = [story()[1], story(red=230)[1]]
    with serve() as server:
        alone = [ask(server, *messages) for messages in requests]
    with serve("-np", 2) as server, ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda messages: ask(server, *messages), requests))
    for one, other in zip(alone, together, strict=True):
        assert_same(one, other)


def test_a_slot_with_a_picture_is_saved_and_restored(serve: Callable[..., Any], files: Files, tmp_path: Path) -> None:
    with serve("--slot-save-path", tmp_path) as server:
        expected = ask(server, *story()[1])
        ask(server, *story()[1], n=2)  # a file has no checkpoints, so only a short tail can be removed
        assert server.request("POST", "/slots/0?action=save", {"filename": "slot"})["n_saved"] > 150
    with serve("--slot-save-path", tmp_path) as server:
        server.request("POST", "/slots/0?action=restore", {"filename": "slot"})
        actual = ask(server, *story()[1])
        assert_same(expected, actual)
        # llama.cpp evaluates the whole prompt if it cannot shorten it without a checkpoint
        assert actual.evaluated < 20 or files.model_type in ("gemma2", "qwen35")


def test_prompts_with_pictures_are_not_stored(serve: Callable[..., Any], tmp_path: Path) -> None:
    """Prompts with images are neither stored nor restored; prompts of text are."""
    store = tmp_path / "store"
    with serve(SUBKV_STORE=store) as server:
        expected = ask(server, *story()[1])
        text = ask(server, message(WORDS * 20))
        wait_until("the prompt in the folder", lambda: len(list(store.glob("*.prefix"))) == 1)
    assert len(list(store.glob("*.prefix"))) == 1
    with serve(SUBKV_STORE=store) as server:
        actual = ask(server, *story()[1])
        assert_same(expected, actual)
        assert actual.evaluated == expected.evaluated
        again = ask(server, message(WORDS * 20))
        assert_same(text, again)
        assert again.evaluated < text.evaluated / 2


def test_a_full_context_does_not_shift(serve: Callable[..., Any]) -> None:
    """llama.cpp does not shift with a projector; the answer ends, and reports it."""
    for coded in (False, True):
        with serve("-c", 512, "--context-shift", coded=coded) as server:
            assert "shift" in server.log and "disabl" in server.log
            answer = ask(server, *story()[1], n=2000)
            assert answer.reason == "length"
            assert len(answer.steps) < 400
            assert ask(server, message("hello"), n=4).reason == "length"
