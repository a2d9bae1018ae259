"""subkv.Llama: choice of the cache, its sizes, states, and errors."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each import each
from opening import N_CTX, last_logits, opened, prompt

from subkv.base.errors import CacheError, ModelFileError, StateError, SubkvError
from subkv.engine.keywords import STALE
from subkv.engine.llama import Llama
from subkv.engine.prompt_cache import PromptCache
from subkv.native.library import cache_types

Models = Callable[..., Path]


def test_unknown_keyword_arguments_are_named(tiny_model: Models) -> None:
    with pytest.raises(TypeError) as error:
        Llama(tiny_model("llama"), n_batches=5, kv_cahce="f16", zzz=1, kwargs=1)
    names = "kv_cahce (did you mean kv_cache?), kwargs, n_batches (did you mean n_batch?), zzz"
    assert str(error.value) == f"Llama: unknown keyword arguments: {names}"


def test_arguments_of_older_versions_are_ignored(tiny_model: Models) -> None:
    old = {
        "device": None,
        "f16_kv": False,
        "n_parts": -1,
        "low_vram": True,
        "mul_mat_q": True,
        "n_gqa": 8,
        "rms_norm_eps": 1e-6,
    }
    with (
        opened(tiny_model("llama"), kv_cache="f16", **old) as llm,
        opened(tiny_model("llama"), kv_cache="f16") as plain,
    ):
        assert set(old) == STALE
        assert llm.kv_stats() == plain.kv_stats()
        assert np.array_equal(last_logits(llm, prompt(8)), last_logits(plain, prompt(8)))


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
def test_stock_types_report_their_allocation(tiny_model: Models, kind: str) -> None:
    with opened(tiny_model("llama"), kv_cache=kind) as llm:
        stats = llm.kv_stats()
        meta = {key.removeprefix("llama."): value for key, value in llm.metadata.items()}
        head = int(meta["embedding_length"]) // int(meta["attention.head_count"])
        widths = [int(meta.get(f"attention.{side}_length", head)) for side in ("key", "value")]
        width = int(meta["attention.head_count_kv"]) * sum(widths)
        per_token = int(meta["block_count"]) * width * cache_types()[kind][1] / 8
        assert stats.bytes_per_token == per_token
        assert stats.bytes_kv == per_token * N_CTX
        assert stats.bpe == pytest.approx(cache_types()[kind][1])
        assert stats.bytes_f16 == pytest.approx(stats.bytes_kv * 16 / stats.bpe)


def test_k_and_v_apart(tiny_model: Models) -> None:
    with opened(tiny_model("llama"), type_k="q8_0", type_v=cache_types()["q4_0"][0]) as llm:
        stats = llm.kv_stats()
        assert (stats.type_k, stats.type_v) == ("q8_0", "q4_0")
        assert stats.bpe == pytest.approx((8.5 + 4.5) / 2)


def test_auto_follows_the_file(tiny_model: Models, coded_model: Models) -> None:
    with opened(coded_model()) as coded, opened(tiny_model("llama"), kv_cache="f16") as plain:
        assert coded.kv_stats().type_k == "subkv"
        assert coded.kv_stats().fingerprint is not None
        assert plain.kv_stats().type_k == "f16"
        assert plain.kv_stats().fingerprint is None
        assert coded.kv_stats().bytes_f16 == plain.kv_stats().bytes_f16
    with opened(coded_model(), kv_cache="f16") as stock, opened(tiny_model("llama"), bases=coded_model()) as sidecar:
        assert stock.kv_stats().type_k == "f16"
        assert sidecar.kv_stats().type_k == "subkv"


def test_window_arguments_reach_the_cache(coded_model: Models) -> None:
    with opened(coded_model(), n_sink=2, n_recent=24, n_rollback=8) as llm:
        stats = llm.kv_stats()
        assert (stats.n_sink, stats.n_recent, stats.n_rollback) == (2, 24, 8)


@each(
    ("options", "message"),
    [
        ({"kv_cache": "q3_k"}, "kv_cache: expected one of auto, subkv, f32"),
        ({"type_k": "q8_0", "kv_cache": "subkv"}, "type_k: expected no type_k or type_v with kv_cache='subkv'"),
        ({"kv_cache": "q4_0", "flash_attn": False}, "flash_attn: expected 'on' or 'auto' for a q4_0 V cache"),
        ({"flash_attn": "maybe"}, "flash_attn: expected 'auto', 'on' or 'off', found 'maybe'"),
        ({"n_recent": 8, "kv_cache": "f16"}, "n_recent: expected a coefficient cache"),
        ({"n_ctx": -1}, "n_ctx: expected 0 to 2147483647 tokens, found -1"),
        ({"n_ctx": 2**32 + 64}, "n_ctx: expected 0 to 2147483647 tokens, found 4294967360"),
        ({"n_batch": 0}, "n_batch: expected 1 to 2147483647 tokens, found 0"),
        ({"bases": Path("missing.gguf")}, "bases: expected a GGUF file, found no file"),
    ],
)
def test_refusals(tiny_model: Models, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SubkvError) as error:
        Llama(tiny_model("llama"), verbose=False, **options)
    assert str(error.value).startswith(message)


WRONG = ["x", float("nan"), True, 1.5, 10**5000, [1], object()]
WHOLE = (
    "n_ctx",
    "n_batch",
    "n_ubatch",
    "n_threads",
    "n_threads_batch",
    "n_gpu_layers",
    "split_mode",
    "main_gpu",
    "seed",
)
WHOLE += ("rope_scaling_type", "pooling_type", "attention_type", "yarn_orig_ctx", "last_n_tokens_size")
WHOLE += ("n_sink", "n_recent", "n_rollback")
REAL = ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")
REAL += ("lora_scale", "kv_bits")
OTHERS = ("kv_cache", "type_k", "type_v", "bases", "adapt", "prompt_cache", "draft_model", "tensor_split", "kv_memory")
OTHERS += ("flash_attn", "kv_overrides", "lora_path", "chat_format")


@each("name", [*WHOLE, *REAL, *OTHERS])
def test_keywords_of_another_type(name: str, tiny_model: Models) -> None:
    """Every keyword that is no switch is known by one of these names, and refused in one sentence about it."""
    text = {"kv_cache", "type_k", "type_v", "bases", "adapt", "prompt_cache", "kv_memory", "flash_attn"}
    right = {
        "flash_attn": [True],
        "lora_path": ["x"],
        "chat_format": ["x"],
        "prompt_cache": ["x"],
        "tensor_split": [[1]],
    }
    for value in WRONG:
        if value in right.get(name, []) or (name in REAL and value == 1.5) or (name == "kv_memory" and value == 1.5):
            continue
        with pytest.raises(SubkvError) as error:
            Llama(tiny_model("llama"), verbose=False, **{name: value})
        assert error.value.key == name, value
        found = str(value) if isinstance(value, (float, bool)) else repr(value) if value != 10**5000 else "a number of"
        assert found in error.value.reason or name == "draft_model" or name in text, error.value.reason
        assert len(str(error.value)) < 300


@each(
    ("name", "wrong", "right"),
    [
        ("n_threads", [0, -1, 513], [1, np.int64(2), None]),
        ("n_ctx", [None, -1, 2**31], [64, np.int32(64)]),
        ("n_gpu_layers", [None, 2**31], [0]),
        ("seed", [2**32], [-1, None, 0, 2**32 - 1]),
        ("rope_freq_base", [None, -1.0, float("inf"), 1e300], [0, 1, 10000.0, np.float32(2)]),
        ("n_sink", [-1], [None, 0, np.int64(3)]),
    ],
)
def test_ranges_of_keywords(name: str, wrong: list[Any], right: list[Any], coded_model: Models) -> None:
    for value in wrong:
        with pytest.raises(SubkvError) as error:
            Llama(coded_model(), verbose=False, **{"n_ctx": N_CTX, name: value})
        assert error.value.key == name
    for value in right:
        Llama(coded_model(), verbose=False, **{"n_ctx": N_CTX, name: value}).close()


@each(
    "bad",
    [
        b"\xf5\x80\x80\x80",
        b"\xf7\xbf\xbf\xbf",
        b"\xf4\x90\x80\x80",
        b"\xf4\xbf",
        b"\xf8\x88",
        b"\xff\xfe",
        b"\xed\xa0\x80",
    ],
)
def test_bytes_that_are_no_text(bad: bytes, tiny_model: Models) -> None:
    """llama.cpp's tokenizers end the process at characters beyond Unicode."""
    with opened(tiny_model("llama"), kv_cache="f16") as llm:
        text = b"ab" + bad + b"cd \xf4\x8f\xbf\xbf"
        tokens = llm.tokenize(text, add_bos=False)
        assert tokens == llm.loaded_model.tokenize(text, special=False).tolist()
        assert tokens[:1] == llm.tokenize(b"ab", add_bos=False)[:1] and len(tokens) > 3


@each(
    ("act", "message"),
    [
        (lambda llm: llm.keep(-1), "n: expected 0 to 3 tokens, as the context has, found -1"),
        (lambda llm: llm.keep(4), "n: expected 0 to 3 tokens, as the context has, found 4"),
        (lambda llm: llm.set_cache("folder"), "cache: expected a PromptCache or a cache of llama_cpp, found 'folder'"),
        (lambda llm: llm.load_state(None), "state: expected a LlamaState, found None"),
        (lambda _: Llama.from_pretrained(5), "repo_id: expected USER/MODEL or USER/MODEL:QUANT, found 5"),
        (lambda _: Llama("a\0b"), "model_path: expected the path of a file, found 'a\\x00b'"),
        (lambda _: PromptCache("x", capacity_bytes=-1), "capacity_bytes: expected 0 or more bytes, found -1"),
        (lambda _: PromptCache(5), "prompt_cache: expected the path of a folder or file, found 5"),
    ],
)
def test_objects_of_another_type(act: Callable[[Llama], Any], message: str, tiny_model: Models) -> None:
    with opened(tiny_model("llama"), kv_cache="f16") as llm:
        llm.eval([5, 6, 7])
        with pytest.raises(SubkvError) as error:
            act(llm)
        assert str(error.value) == message and llm.n_tokens == 3


def test_statistics_are_json(tiny_model: Models, coded_model: Models) -> None:
    for path in (tiny_model("llama"), coded_model()):
        with opened(path, kv_cache="auto") as llm:
            stats = llm.kv_stats()
            assert json.loads(json.dumps(vars(stats))) == vars(stats) and stats == pickle.loads(pickle.dumps(stats))


def test_bases_without_keys_are_refused(tiny_model: Models, calibration: Path) -> None:
    with pytest.raises(CacheError, match=r"bases: expected subkv\.\* keys"):
        Llama(tiny_model("llama"), bases=tiny_model("llama"), verbose=False)
    with pytest.raises(ModelFileError, match="bases: expected a GGUF file.*safetensors"):
        Llama(tiny_model("llama"), bases=calibration, verbose=False)


def test_bad_model_files(tiny_model: Models, tmp_path: Path) -> None:
    good = tiny_model("llama").read_bytes()
    cases = {
        "text.gguf": (b"hello, world, this is text", "expected a GGUF file, found b'hell'"),
        "empty.gguf": (b"", "expected a GGUF file, found b''"),
        "head.gguf": (good[:9], "expected a complete GGUF of version 2 or 3, found 9 bytes"),
        "version.gguf": (
            good[:4] + b"\x63\0\0\0" + good[8:],
            "expected a complete GGUF of version 2 or 3, found version 99",
        ),
        "keys.gguf": (good[:2000], "damaged or truncated header"),
        "data.gguf": (good[:-1000], f"expected {len(good)} bytes of GGUF, found {len(good) - 1000}"),
    }
    for name, (data, message) in cases.items():
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(ModelFileError) as error:
            Llama(path, verbose=False)
        assert str(error.value).startswith("model_path: "), name
        assert message in str(error.value), name
    with pytest.raises(ModelFileError, match="found the folder"):
        Llama(tmp_path, verbose=False)


def test_bases_of_another_model_are_refused_and_do_not_linger(tiny_model: Models, coded_model: Models) -> None:
    other = tiny_model("llama", n_layer=5)
    with pytest.raises(SubkvError) as error:
        Llama(other, bases=coded_model(), n_ctx=N_CTX, verbose=False)
    assert str(error.value) == (
        f"bases: expected bases of this model, found others in {coded_model()} (subkv.block_count: the model's 5 "
        "layers expected, 2 found); leave the file out to use the model's own bases"
    )
    with opened(other, kv_cache="f16") as plain:  # the failed attempt left nothing attached to this thread
        assert plain.kv_stats().type_k == "f16"


def test_a_model_without_a_kv_cache_is_refused(tiny_model: Models, coded_model: Models) -> None:
    with pytest.raises(CacheError, match="kv_cache: expected a model with a K/V cache, .* choose f16"):
        Llama(tiny_model("mamba"), bases=coded_model(), n_ctx=N_CTX, verbose=False)


def test_a_state_continues_where_it_was_saved(coded_model: Models) -> None:
    with opened(coded_model()) as llm:
        llm.eval(prompt(80))
        state = llm.save_state()
        assert state.scores.size == 0
        expected = last_logits(llm, [33, 44])
        llm.reset()
        llm.eval(prompt(20))
        llm.load_state(state)
        assert llm.n_tokens == 80
        assert llm._input_ids.tolist() == prompt(80)
        np.testing.assert_array_equal(last_logits(llm, [33, 44]), expected)
    with opened(coded_model()) as fresh:
        fresh.load_state(state)
        np.testing.assert_array_equal(last_logits(fresh, [33, 44]), expected)


@pytest.mark.parametrize("named", [True, False])
def test_a_state_of_another_cache_is_refused(tiny_model: Models, coded_model: Models, named: bool) -> None:
    with opened(coded_model()) as llm:
        llm.eval(prompt(40))
        state = llm.save_state()
    if not named:
        del state.identity  # as saved by the parent class: libllama itself has to notice
    other = coded_model("--codec", "int8", "--n-recent", "16", "--basis-k", "pca")
    with opened(other) as llm:
        with pytest.raises(StateError, match=r"state: .*fingerprint"):
            llm.load_state(state)
        assert last_logits(llm, prompt(8)).shape == (llm.n_vocab(),)
    with opened(tiny_model("llama"), kv_cache="f16") as plain:
        with pytest.raises(StateError, match="^state: "):
            plain.load_state(state)
        plain.n_tokens = 0
        assert np.isfinite(last_logits(plain, prompt(8))).all()


def test_going_back_gives_the_same_result_as_never_having_been_there(coded_model: Models) -> None:
    with opened(coded_model(), n_rollback=8) as llm:
        llm.eval(prompt(100))
        llm.n_tokens -= 3
        got = last_logits(llm, [50, 60, 70])
    with opened(coded_model(), n_rollback=8) as fresh:
        fresh.eval(prompt(97))
        expected = last_logits(fresh, [50, 60, 70])
    np.testing.assert_allclose(got, expected, atol=2e-3 * float(np.abs(expected).max()))


def counted_batches(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of every later batch."""
    batches: list[int] = []
    decode = llm._ctx.decode

    def count(batch: Any) -> None:
        batches.append(batch.n_tokens())
        decode(batch)

    monkeypatch.setattr(llm._ctx, "decode", count)
    return batches


@pytest.mark.parametrize("again", [None, 8, 0])
def test_going_back_far_evaluates_few_tokens_again(
    coded_model: Models, tiny_model: Models, again: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removed tail takes the exact rows with it: the last SUBKV_RESUME tokens, at most the window, get new ones."""
    if again is not None:
        monkeypatch.setenv("SUBKV_RESUME", str(again))
    of_coded = 15 if again is None else again
    for path, cache, n_again in ((coded_model(), "subkv", of_coded), (tiny_model("llama"), "f16", 0)):
        with opened(path, kv_cache=cache) as llm:
            llm.eval(prompt(250))
            batches = counted_batches(llm, monkeypatch)
            llm.n_tokens = 50
            llm.eval([50, 60, 70])
            assert (sum(batches), llm.n_tokens) == (3 + n_again, 53)
            assert llm.input_ids[:53].tolist() == [*prompt(250)[:50], 50, 60, 70]
            del batches[:]
            for question in (61, 62, 63):  # about the same document
                list(itertools.islice(llm.generate([*prompt(200), question], temp=0.0), 2))
                evaluated, batches[:] = sum(batches), []
                assert evaluated <= (200 if question == 61 else 3 + n_again)


def test_generate_reuses_a_prefix(coded_model: Models) -> None:
    with opened(coded_model()) as llm:
        first = [token for token, _ in zip(llm.generate(prompt(60), temp=0.0), range(5), strict=False)]
        again = [token for token, _ in zip(llm.generate(prompt(60), temp=0.0), range(5), strict=False)]
        assert first == again


def test_shift(tiny_model: Models, coded_model: Models) -> None:
    with opened(coded_model()) as llm:
        llm.eval(prompt(20))
        with pytest.raises(CacheError, match="kv_cache_seq_shift: seq_add: .* two tokens at position 0"):
            llm._ctx.kv_cache_seq_shift(0, 5, 20, -5)
        assert np.isfinite(last_logits(llm, [11])).all()
    for path, cache in ((coded_model(), "subkv"), (tiny_model("llama"), "f16")):
        with opened(path, kv_cache=cache) as llm:
            llm.eval(prompt(200))
            llm.discard(10, 50)
            assert llm.n_tokens == 150
            assert np.isfinite(last_logits(llm, [11])).all()
            assert llm.input_ids[:151].tolist() == [*prompt(200)[:10], *prompt(200)[60:], 11]
            with pytest.raises(CacheError, match="n_discard: expected tokens after 10 of 151 in the context, found 0"):
                llm.discard(10, 0)


def test_too_many_tokens(tiny_model: Models) -> None:
    sentence = f"n_ctx: expected at most {N_CTX} tokens"
    with opened(tiny_model("llama"), kv_cache="f16") as llm, pytest.raises(CacheError, match=sentence):
        llm.eval(prompt(N_CTX + 1))


def test_close_twice_and_context_manager(tiny_model: Models) -> None:
    with Llama(tiny_model("llama"), kv_cache="f16", n_ctx=64, verbose=False) as llm:
        pass
    llm.close()


def test_copies_through_getstate_keep_the_cache(coded_model: Models) -> None:
    with opened(coded_model(), n_recent=24) as llm:
        state = llm.__getstate__()
    copy = Llama(**state)
    assert copy.kv_stats().type_k == "subkv"
    assert copy.kv_stats().n_recent == 24
    copy.close()


def test_verbose_prints_one_line_about_the_cache(coded_model: Models, capfd: pytest.CaptureFixture[str]) -> None:
    with opened(coded_model(), verbose=True):
        pass
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("KV cache: subkv, ")]
    assert len(lines) == 1
    assert "bits per element" in lines[0]
    assert "kernel " in lines[0]


def test_states_whose_bytes_changed_are_refused(coded_model: Callable[..., Path]) -> None:
    """llama.cpp would accept most of them, with wrong keys."""
    with opened(coded_model()) as llm:
        llm.eval(prompt(40))
        state = llm.save_state()
        data, tokens = state.llama_state, state.input_ids.copy()
        for at in range(0, len(data), len(data) // 16):
            changed = bytearray(data)
            changed[at] ^= 16
            state.llama_state = bytes(changed)
            with pytest.raises(StateError, match="checksum"):
                llm.load_state(state)
        state.llama_state = data
        state.input_ids[3] += 1
        with pytest.raises(StateError, match="checksum"):
            llm.load_state(state)
        state.input_ids = tokens
        llm.load_state(state)
        assert llm.n_tokens == 40


def test_a_state_of_more_tokens_than_the_context(coded_model: Callable[..., Path]) -> None:
    with opened(coded_model(), n_ctx=512) as llm:
        llm.eval(prompt(300))
        state = llm.save_state()
    with opened(coded_model(), n_ctx=256) as llm:
        llm.eval(prompt(8))
        with pytest.raises(StateError, match="^state: expected at most 256 tokens, found 300$"):
            llm.load_state(state)
        assert llm.n_tokens == 8


def test_a_state_of_fewer_cells_than_tokens(coded_model: Callable[..., Path]) -> None:
    with opened(coded_model()) as llm:
        llm.eval(prompt(40))
        state = llm.save_state()
        del state.checksum  # as one of the parent class
        state.input_ids = np.append(state.input_ids, 1)
        state.n_tokens += 1
        with pytest.raises(StateError, match="expected cells of its 41 tokens, found 40"):
            llm.load_state(state)
        llm.eval(prompt(40))  # it can be used
