"""subkv.Llama behaves like llama_cpp.Llama on the same cache, with the same arguments and results."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from gguf import GGUFWriter
from opening import N_CTX, last_logits, opened, prompt

from subkv import PromptCache
from subkv.base.errors import SubkvError
from subkv.engine.llama import Llama
from subkv.format.window import N_ROLLBACK, Window
from subkv.native.binding import llama_cpp

from llama_cpp.llama_speculative import LlamaPromptLookupDecoding  # isort: skip  (subkv has to bind llama_cpp first)

Models = Callable[..., Path]

TEXT = "the cat and the dog and the cat and"
MESSAGES = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hello there"}]
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"hot": {"type": "boolean"}}}},
}
SCHEMA = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16}


def grammar() -> llama_cpp.LlamaGrammar:
    return llama_cpp.LlamaGrammar.from_string('root ::= ("yes" | "no") " " [a-c]+', verbose=False)


def json_answer(llm: llama_cpp.Llama) -> Any:
    form = {"type": "json_object", "schema": SCHEMA}
    return llm.create_chat_completion(MESSAGES, response_format=form, **GREEDY)


CALLS: dict[str, Callable[[llama_cpp.Llama], Any]] = {
    "completion": lambda llm: llm(TEXT, **GREEDY),
    "stop": lambda llm: llm(TEXT, stop=["e"], **GREEDY),
    "echo": lambda llm: llm(TEXT, echo=True, **GREEDY),
    "logprobs": lambda llm: llm(TEXT, logprobs=3, **GREEDY),
    "sampled": lambda llm: llm(TEXT, seed=3, temperature=1.0, max_tokens=12, repeat_penalty=1.1),
    "bias": lambda llm: llm(TEXT, logit_bias={70: 5.0}, **GREEDY),
    "stream": lambda llm: list(llm(TEXT, stream=True, **GREEDY)),
    "grammar": lambda llm: llm(TEXT, grammar=grammar(), **GREEDY),
    "chat": lambda llm: llm.create_chat_completion(MESSAGES, **GREEDY),
    "chat stream": lambda llm: list(llm.create_chat_completion(MESSAGES, stream=True, **GREEDY)),
    "json": json_answer,
    "tool": lambda llm: llm.create_chat_completion(
        MESSAGES, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "weather"}}, **GREEDY
    ),
    "tools": lambda llm: llm.create_chat_completion(MESSAGES, tools=[TOOL], tool_choice="auto", **GREEDY),
}


def plain(answer: Any) -> Any:
    """An answer without the parts that differ between calls: identifiers and the time."""
    if isinstance(answer, dict):
        return {key: plain(value) for key, value in answer.items() if key not in ("id", "created")}
    return [plain(item) for item in answer] if isinstance(answer, list) else answer


@pytest.mark.parametrize("format", [None, "chatml", "chatml-function-calling"])
def test_same_answers_as_the_parent(tiny_model: Models, format: str | None) -> None:
    options = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "logits_all": True, "chat_format": format}
    path = tiny_model("llama")
    parent = llama_cpp.Llama(str(path), flash_attn=True, verbose=False, **options)
    with opened(path, kv_cache="f16", flash_attn=True, **options) as ours:
        for name, call in CALLS.items():
            assert plain(call(ours)) == plain(call(parent)), name
    parent.close()


def test_every_call_works_on_coded_cells(coded_model: Models) -> None:
    with opened(coded_model(), n_ctx=512, logits_all=True) as llm:
        answers = {name: call(llm) for name, call in CALLS.items()}
    streamed = "".join(piece["choices"][0]["text"] for piece in answers["stream"])
    assert streamed == answers["completion"]["choices"][0]["text"] != ""
    assert answers["grammar"]["choices"][0]["text"].split(" ")[0] in ("yes", "no")
    assert answers["json"]["choices"][0]["message"]["content"].startswith("{")
    assert answers["tool"]["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    logprobs = answers["logprobs"]["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 16
    assert all(value <= 0 for value in logprobs["token_logprobs"])


@pytest.mark.parametrize("pooling", [llama_cpp.LLAMA_POOLING_TYPE_NONE, llama_cpp.LLAMA_POOLING_TYPE_MEAN])
def test_embeddings(tiny_model: Models, coded_model: Models, pooling: int) -> None:
    texts = ["hello there", "the cat and the dog " * 20, "on"]
    options = {"n_ctx": 512, "embedding": True, "pooling_type": pooling}
    parent = llama_cpp.Llama(str(tiny_model("llama")), flash_attn=True, verbose=False, n_threads=1, **options)
    expected = [parent.embed(text, normalize=True) for text in texts]  # several at once: unpooled ones are mixed up
    parent.close()
    with opened(tiny_model("llama"), kv_cache="f16", n_threads=1, flash_attn=True, **options) as ours:
        for vector, expected_vector in zip(ours.embed(texts, normalize=True), expected, strict=True):
            np.testing.assert_allclose(vector, expected_vector, atol=1e-4)
    with opened(coded_model(), **options) as coded:
        got = coded.embed(texts, normalize=True)
        assert coded.kv_stats().bpe < 24  # one exact window, not one for each of 256 sequences
        assert coded.create_embedding(texts)["usage"]["prompt_tokens"] > len(texts)
    for vector, expected_vector in zip(got, expected, strict=True):
        np.testing.assert_allclose(vector, expected_vector, atol=0.15)  # coded past 16 tokens, at 8 bits


def test_embeddings_need_the_option(coded_model: Models) -> None:
    with opened(coded_model()) as llm, pytest.raises(RuntimeError, match="embedding=True"):
        llm.embed("hello")


@pytest.mark.parametrize("n_draft", [4, 40])
def test_a_draft_model_changes_speed_only(coded_model: Models, n_draft: int) -> None:
    """Rejected drafts have no effect: every token is the most probable one within rounding."""
    tokens = prompt(20) * 5
    with opened(coded_model(), draft_model=LlamaPromptLookupDecoding(num_pred_tokens=n_draft)) as llm:
        decoded: list[int] = []
        decode = llm._ctx.decode
        llm._ctx.decode = lambda batch: (decoded.append(batch.n_tokens()), decode(batch))
        drafted = [token for token, _ in zip(llm.generate(tokens, temp=0.0), range(80), strict=False)]
        assert llm.kv_stats().n_rollback == max(n_draft, N_ROLLBACK)
    assert max(decoded[1:]) > 1  # drafts were tried
    assert sum(decoded) <= len(tokens) + (1 + n_draft) * len(decoded)  # and nothing was evaluated again
    with opened(coded_model()) as llm:
        logits = last_logits(llm, tokens)
        for token in drafted:
            assert logits[token] >= logits.max() - 0.05 * np.abs(logits).max()
            logits = last_logits(llm, [token])


def test_a_draft_longer_than_the_rollback(coded_model: Models) -> None:
    tokens = prompt(20) * 5
    draft = LlamaPromptLookupDecoding(num_pred_tokens=12)
    with pytest.warns(UserWarning, match="n_rollback: expected at least the 12 tokens .* found 2; a rejected"):
        slow = Llama(coded_model(), n_ctx=N_CTX, n_batch=32, n_rollback=2, draft_model=draft, verbose=False)
    with slow, opened(coded_model(), draft_model=draft, n_batch=32) as fast:
        first, second = (
            [token for token, _ in zip(llm.generate(tokens, temp=0.0), range(30), strict=False)] for llm in (slow, fast)
        )
    assert first == second


def test_a_draft_longer_than_a_batch_is_refused(coded_model: Models) -> None:
    with pytest.raises(SubkvError, match="draft_model: expected drafts shorter than n_batch, 8 tokens, found 10"):
        Llama(coded_model(), n_batch=8, draft_model=LlamaPromptLookupDecoding(), verbose=False)


def test_a_draft_model_keeps_no_logits(coded_model: Models) -> None:
    with opened(coded_model(), draft_model=LlamaPromptLookupDecoding(), n_batch=32) as llm:
        llm.eval(prompt(100))  # more than the parent has rows for
        assert llm.save_state().scores.size == 0
        with pytest.raises(ValueError, match="logits_all=False"):
            llm(TEXT, logprobs=1)


def write_lora(path: Path) -> Path:
    """An adapter of rank 2 for the first layer's queries of the tiny llama."""
    d_in, d_out = tiny.DIMS["n_embd"], tiny.DIMS["n_head"] * tiny.DIMS["head_size"]
    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 2.0)
    writer.add_tensor("blk.0.attn_q.weight.lora_a", rng.standard_normal((2, d_in)).astype(np.float32))
    writer.add_tensor("blk.0.attn_q.weight.lora_b", rng.standard_normal((d_out, 2)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_lora(tiny_model: Models, coded_model: Models, tmp_path: Path) -> None:
    lora = {"lora_path": str(write_lora(tmp_path / "lora.gguf")), "lora_scale": 0.5}
    parent = llama_cpp.Llama(str(tiny_model("llama")), flash_attn=True, verbose=False, n_threads=1, **lora)
    expected = parent(TEXT, **GREEDY)
    parent.close()
    with opened(tiny_model("llama"), kv_cache="f16", flash_attn=True, n_threads=1, **lora) as ours:
        assert plain(ours(TEXT, **GREEDY)) == plain(expected)
    with opened(coded_model(), **lora) as adapted, opened(coded_model()) as base:
        assert np.abs(last_logits(adapted, prompt(40)) - last_logits(base, prompt(40))).max() > 0.1
        with pytest.raises(SubkvError, match="state: lora: expected None"):
            base.load_state(adapted.save_state())
        for llm in (adapted, base):
            llm.set_cache(PromptCache(tmp_path / "cache"))
        adapted.cache.store()
        assert prompt(40) in adapted.cache and prompt(40) not in base.cache
    with pytest.raises(SubkvError, match="lora_path: "):
        Llama(coded_model(), lora_path=str(tmp_path / "missing.gguf"), verbose=False)


def test_pickling_keeps_every_argument(coded_model: Models) -> None:
    draft = LlamaPromptLookupDecoding(num_pred_tokens=5)
    with opened(coded_model(), n_recent=24, draft_model=draft, seed=5, n_batch=64) as llm:
        data = pickle.dumps(llm)
        text = llm(TEXT, **GREEDY)["choices"]
    with pickle.loads(data) as copy:
        assert copy.kv_stats().n_recent == 24
        assert (copy.n_ctx(), copy.n_batch, copy._seed, copy._logits_all) == (N_CTX, 64, 5, False)
        assert copy.draft_model.num_pred_tokens == 5
        assert copy(TEXT, **GREEDY)["choices"] == text


@pytest.mark.parametrize(
    "given", [{"kv_cache": "subkv:4.5"}, {"type_k": "subkv:4.5"}, {"kv_bits": 4.5}, {"kv_cache": "subkv"}]
)
def test_pickling_keeps_the_bits(tiny_model: Models, given: dict[str, Any]) -> None:
    with opened(tiny_model(), **given) as llm, pickle.loads(pickle.dumps(llm)) as copy:
        assert copy.identity() == llm.identity()
        assert (copy.identity()["kv_bits"] == "4.5") == (given != {"kv_cache": "subkv"})
        llm.eval(prompt(20))
        copy.load_state(llm.save_state())


def test_bases_without_a_coded_cache_are_refused(coded_model: Models, tiny_model: Models) -> None:
    with pytest.raises(SubkvError, match=r"^bases: expected a coefficient cache \('subkv'\), found f16$"):
        Llama(tiny_model(), kv_cache="f16", bases=coded_model(), verbose=False)
    with opened(coded_model(), kv_cache=None) as llm:  # as without the argument
        assert llm.cache_choice.coded


def test_a_context_size_that_is_rounded_up(coded_model: Models) -> None:
    with opened(coded_model(), n_ctx=300, logits_all=True) as llm, opened(coded_model(), n_ctx=512) as whole:
        assert (llm.n_ctx(), llm.kv_stats().n_cells) == (512, 512)
        np.testing.assert_allclose(last_logits(llm, prompt(400)), last_logits(whole, prompt(400)), atol=1e-2)
        assert llm.scores.shape == (512, llm.n_vocab())


def test_a_vocabulary_alone(coded_model: Models) -> None:
    with Llama(coded_model(), vocab_only=True, verbose=False) as llm:
        assert llm.detokenize(llm.tokenize(b"the cat")) == b"the cat"
        text = [{"role": "user", "content": "the cat"}]
        needs_weights: list[Callable[[], Any]] = [
            llm.kv_stats,
            llm.adapt_stats,
            llm.bases_report,
            llm.fingerprint,
            lambda: llm.eval([1, 2]),
            lambda: llm("the cat"),
            lambda: next(iter(llm.generate([1, 2]))),
            lambda: llm.create_chat_completion(text),
        ]
        for call in needs_weights:
            with pytest.raises(SubkvError, match="^vocab_only: expected a model with its weights, found its vocab"):
                call()
    with (
        Llama(coded_model(), vocab_only=True, embedding=True, verbose=False) as llm,
        pytest.raises(SubkvError, match="^vocab_only: expected a model with its weights, found its vocabulary alone$"),
    ):
        llm.embed("the cat")


def test_reset_forgets(coded_model: Models) -> None:
    with opened(coded_model()) as llm:
        expected = last_logits(llm, prompt(70))
        llm.reset()
        assert llm.n_tokens == 0
        np.testing.assert_array_equal(last_logits(llm, prompt(70)), expected)


@pytest.mark.parametrize("coded", [True, False])
def test_the_ram_cache_of_llama_cpp(tiny_model: Models, coded_model: Models, coded: bool) -> None:
    texts = [TEXT, TEXT + " a bird", "something else", TEXT]
    with opened(coded_model() if coded else tiny_model("llama"), kv_cache="subkv" if coded else "f16") as llm:
        expected = []
        for text in texts:
            llm.reset()
            expected.append(llm(text, **GREEDY)["choices"])
        llm.set_cache(llama_cpp.LlamaRAMCache())
        for _ in range(2):
            assert [llm(text, **GREEDY)["choices"] for text in texts] == expected


def test_sizes_of_a_coded_cache(coded_model: Models) -> None:
    with opened(coded_model()) as llm:
        stats = llm.kv_stats()
        n_elements = tiny.DIMS["n_layer"] * 2 * tiny.DIMS["n_head_kv"] * tiny.DIMS["head_size"]
        assert stats.n_cells == N_CTX
        assert stats.bytes_f16 == 2 * n_elements * N_CTX
        assert stats.bytes_codes == stats.bytes_per_token * N_CTX
        window = Window(stats.n_sink, stats.n_recent, stats.n_rollback).with_defaults()
        assert stats.bytes_window == window.bits(n_elements, n_elements // tiny.DIMS["head_size"]) // 8
        assert stats.bytes_kv == stats.bytes_codes + stats.bytes_window
        assert stats.bpe == pytest.approx(8 * stats.bytes_kv / (n_elements * N_CTX))
        assert (stats.n_chunks, stats.bytes_chunks) == (0, 0)
        assert stats.n_layer_coded == tiny.DIMS["n_layer"]
        assert llm.fingerprint() == stats.fingerprint


def test_chunks_are_counted(coded_model: Models) -> None:
    with opened(coded_model(), n_recent=64, n_rollback=8, n_ctx=512, adapt="v,warm=32,length=64,gain=100") as llm:
        assert llm.kv_stats().n_chunks == 0
        llm.eval(prompt(400))
        stats = llm.kv_stats()
        assert stats.n_chunks == sum(side.n_chunks for side in llm.adapt_stats()) > 0
        assert stats.bytes_kv == stats.bytes_codes + stats.bytes_window + stats.bytes_chunks


def test_a_state_costs_its_cells_and_the_window(coded_model: Models) -> None:
    with opened(coded_model()) as llm:
        stats, sizes = llm.kv_stats(), []
        for n in (40, 200):
            llm.reset()
            llm.eval(prompt(n))
            state = llm.save_state()
            sizes.append(len(state.llama_state))
            assert len(state.input_ids) == n
            assert stats.bytes_window <= len(state.llama_state) - n * stats.bytes_per_token - stats.bytes_window + 2e6
        per_cell = (sizes[1] - sizes[0]) / 160
        assert stats.bytes_per_token <= per_cell <= stats.bytes_per_token + 24


def test_a_state_of_another_model_is_refused(tiny_model: Models, coded_model: Models) -> None:
    """The same shape, vocabulary and bases: only the weights tell them apart."""
    with opened(coded_model()) as llm:
        llm.eval(prompt(40))
        state = llm.save_state()
        identity = llm.identity()
    with opened(tiny_model("llama"), bases=coded_model()) as same:
        assert same.identity() == identity
        same.load_state(state)
    other = tiny_model("llama", seed=7)
    with opened(other, bases=coded_model()) as llm:
        assert {key for key, value in llm.identity().items() if value != identity[key]} == {"model"}
        with pytest.raises(SubkvError, match="state: model: expected"):
            llm.load_state(state)


def test_a_state_of_other_parameters_is_refused(coded_model: Models) -> None:
    with opened(coded_model()) as llm:
        llm.eval(prompt(40))
        state = llm.save_state()
    with opened(coded_model(), rope_freq_base=5000.0) as llm:
        with pytest.raises(SubkvError, match="state: rope_freq_base: expected 5000, found 10000"):
            llm.load_state(state)
        assert llm.n_tokens == 0


# An application that knows llama_cpp alone, as LangChain calls it.
PATCHED = """
import subkv, llama_cpp, sys
llama_cpp.Llama = subkv.Llama
def application():
    from llama_cpp import Llama
    return Llama(model_path=sys.argv[1], n_ctx=256, n_parts=-1, f16_kv=True, n_threads=None, verbose=False)
llm = application()
print(type(llm).__module__, llm.kv_stats().type_k, llm("the cat", max_tokens=3, temperature=0.0)["usage"])
import pickle
print(pickle.loads(pickle.dumps(llm)).kv_stats() == llm.kv_stats())
try:
    llama_cpp.Llama(sys.argv[1], n_contexts=5)
except TypeError as error:
    print(error)
"""


def test_in_place_of_the_class_of_llama_cpp(coded_model: Models) -> None:
    env = {name: value for name, value in os.environ.items() if name != "LLAMA_CPP_LIB_PATH"}
    command = [sys.executable, "-c", PATCHED, str(coded_model())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert done.returncode == 0, done.stderr
    first, again, refused = done.stdout.splitlines()
    assert first.startswith("subkv.engine.llama subkv {'prompt_tokens': ")
    assert again == "True"
    assert refused.startswith("Llama: unknown keyword argument: n_contexts")
