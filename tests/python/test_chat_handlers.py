"""subkv.Llama with llama_cpp's chat handlers for images, which use the libmtmd next to the libraries."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine
import pictures
import pytest
import tiny
import tiny_vision

import subkv
from subkv.base.errors import CacheError
from subkv.native.library import lib_dir
from subkv.native.paths import mtmd_variable

if not mtmd_variable(lib_dir()):
    pytest.skip("libmtmd is built with llama.cpp's programs (-DSUBKV_PROGRAMS=ON)", allow_module_level=True)

from llama_cpp import LlamaRAMCache, llama_chat_format

CASES = {  # handler, projector, text model
    "a position each": ("Llava15ChatHandler", "janus_pro", "llama"),
    "seen whole": ("MTMDChatHandler", "gemma3", "llama"),
    "one position": ("Qwen25VLChatHandler", "qwen2vl_merger", "qwen2vl"),
    "beside recurrent state": ("Llava15ChatHandler", "qwen2vl_merger", "qwen35"),
}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}"
    "{{ part['image_url']['url'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}assistant: "
)


@dataclass(frozen=True)
class Case:
    handler: str
    model: Path
    projector: Path
    bases: Path  # of full rank and 16 bits, the last 8 tokens exact

    @contextlib.contextmanager
    def open(self, coded: bool = True, **options: Any) -> Iterator[subkv.Llama]:
        handler = getattr(llama_chat_format, self.handler)(clip_model_path=str(self.projector), verbose=False)
        cache: dict[str, Any] = {"bases": self.bases, "kv_cache": "subkv"} if coded else {"kv_cache": "f16"}
        with subkv.Llama(
            self.model,
            n_ctx=1024,
            n_threads=1,
            n_threads_batch=1,
            chat_handler=handler,
            verbose=False,
            **cache,
            **options,
        ) as llm:
            yield llm


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    handler, projector, arch = CASES[request.param]
    folder = tmp_path_factory.mktemp("handlers")
    path = tiny.build(folder / "model.gguf", arch, template=TEMPLATE)
    model = engine.Model(path)
    n_embd = int(engine.C.llama_model_n_embd(model.handle))
    engine.SUBKV.subkv_layout_free(pictures.exact_bases(model, folder / "bases.gguf"))
    model.free()
    return Case(handler, path, tiny_vision.build(folder / "mmproj.gguf", projector, n_embd), folder / "bases.gguf")


def reply_to(llm: subkv.Llama, red: int = 40, n: int = 24) -> str:
    url = "data:image/png;base64," + base64.b64encode(tiny_vision.picture(red, 96, 64)).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is this? " * 8}]
    reply: Any = llm.create_chat_completion([{"role": "user", "content": content}], max_tokens=n, temperature=0)
    return str(reply["choices"][0]["message"]["content"])


def logits(llm: subkv.Llama) -> engine.Logits:
    """Logits of the prompt's last token."""
    return llm.scores[llm.n_tokens - 1 : llm.n_tokens].copy()


def test_answers_are_those_on_f16(case: Case) -> None:
    """Of one picture, and of another one after it."""
    found = {}
    for coded in (False, True):
        with case.open(coded, logits_all=True) as llm:
            assert (llm.kv_stats().fingerprint is not None) == coded
            found[coded] = [(reply_to(llm, red, n=1), logits(llm))[1] for red in (40, 230, 40)]
    for expected, logits_found in zip(found[False], found[True], strict=True):
        assert engine.distance(expected, logits_found) < 0.02
    first, other, again = found[True]
    assert engine.distance(first, other) > 0.05
    assert engine.distance(first, again) < 1e-4


def test_longer_answers_and_text_between(case: Case) -> None:
    with case.open() as llm:
        expected = reply_to(llm)
        text = llm("The quick brown fox", max_tokens=8, temperature=0)["choices"][0]["text"]
        assert reply_to(llm) == expected
        assert llm("The quick brown fox", max_tokens=8, temperature=0)["choices"][0]["text"] == text


@pytest.mark.parametrize("case", ["beside recurrent state"], indirect=True)
def test_text_after_an_image_returns_to_a_checkpoint(case: Case) -> None:
    """Which there is behind every picture."""
    found = []
    for coded in (False, True):
        with case.open(coded, logits_all=True) as llm:
            reply_to(llm)
            llm.n_tokens -= 40
            llm.eval([70])
            found.append(logits(llm))
    assert engine.distance(*found) < 0.02


@pytest.mark.parametrize("case", [name for name in CASES if "recurrent" not in name], indirect=True)
def test_a_tail_after_an_image_is_removed(case: Case) -> None:
    """Longer than the window keeps rows for: the image stays. Cells of sliding windows may be gone; then all is."""
    with case.open(n_rollback=4) as llm:
        expected = reply_to(llm)
        n = llm.n_tokens
        llm.n_tokens = n - 20
        try:
            llm.eval([70])
        except CacheError as error:
            assert "pictures: the cells of a picture were removed" in str(error)
            assert llm.n_tokens == 0 and "gemma3" in case.projector.name
        else:
            assert llm.n_tokens == n - 19 and llm._pictures.any_after(0)
            llm.reset()
        assert reply_to(llm) == expected


def test_an_image_never_matches_tokens_of_a_prompt(case: Case) -> None:
    """An image occupies token positions, here with the tokens of the prompt."""
    with case.open(logits_all=True) as llm:
        reply_to(llm, n=1)
        first, n = llm._pictures.tokens_before(llm.n_tokens), llm.n_tokens
        assert 0 < first < n - 1
        tokens = [*llm.input_ids[: n - 1].tolist(), 70]
        next(llm.generate(tokens, temp=0.0))
        found = logits(llm)
    with case.open(logits_all=True) as llm:
        next(llm.generate(tokens, temp=0.0))
        assert engine.distance(logits(llm), found) < 0.02
        reply_to(llm, n=1)
        assert llm.n_tokens == n


def test_functions_of_tokens_refuse_images(case: Case) -> None:
    with case.open() as llm:
        expected = reply_to(llm)
        for refused in (llm.save_state, lambda: llm.discard(4, 4)):
            with pytest.raises(CacheError, match="no picture in the context"):
                refused()
        llm.set_cache(LlamaRAMCache())
        with pytest.raises(CacheError, match="cache: expected no picture in the context with a prompt cache"):
            reply_to(llm)
        llm.reset()
        assert llm("The quick brown fox", max_tokens=8)["choices"][0]["text"]
        llm.set_cache(None)
        assert reply_to(llm) == expected
