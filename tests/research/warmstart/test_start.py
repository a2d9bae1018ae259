"""Warm starts in Python: decisions, first tokens, the way back to exact cells."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starting import N_CTX, PLAN, answer, cold, logits, opened, prompt, remember, untrained, warm

from research.warmstart import predictor
from research.warmstart.embedding import N_BATCH, embedder
from research.warmstart.pooled import Plan
from research.warmstart.start import WarmStart
from research.warmstart.summaries import Library
from research.warmstart.trained import Trained
from subkv.base.errors import SubkvError
from subkv.engine.llama import Llama

Models = Callable[..., Path]
T = 60
A, B = prompt(T), prompt(T + 9, 1)
COEFS = {"constant": 0.0, "distance": 0.0, "log_check": 1.0, "margin": 0.0}  # predicts the self-check itself


@pytest.fixture(params=["coded", "adaptive", "f16", "q8_0"])
def path(request: pytest.FixtureRequest, coded_model: Models, tiny_model: Models) -> tuple[Path, dict[str, Any]]:
    if request.param == "coded":
        return coded_model(), {}
    if request.param == "adaptive":
        adapt = "kv,block=8,length=16,warm=16,gain=100"
        return coded_model("--n-recent", "48", "--kv-bits", "8"), {"adapt": adapt}
    return tiny_model("llama"), {"kv_cache": request.param}


def test_a_slot_for_every_token_is_the_exact_prompt(path: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    plan = Plan(T - 2 - 3, 2, 3)
    with warm(path[0], tmp_path, plan, n_batch=40, n_ubatch=16, **path[1]) as start:
        remember(start, A)
        expected = logits(start.llm)
        # a summary has 16 bits
        decision = start.first(A)
        assert decision.error is None and decision.similarity == pytest.approx(1.0, abs=1e-5)
        assert decision.logits is not None
        bound = 0.02 if start.llm.cache_choice.name == "f16" else 0.1
        assert np.abs(decision.logits - expected).max() < bound * np.abs(expected).max()
        assert start.llm.n_tokens == 0  # these cells must not be used for the prompt


def test_absolute_positions(tiny_model: Models, tmp_path: Path) -> None:
    """The first tokens are in other cells; their rows are those of positions 0, 1, …"""
    with warm(tiny_model("gpt2"), tmp_path, Plan(T - 2 - 3, 2, 3)) as start:
        remember(start, A)
        expected = logits(start.llm)
        found = start.first(A).logits
        assert found is not None
        assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()
        no_slots = start.planting
        no_slots.decode(A, start.trained.plan, [])
        assert np.abs(no_slots.logits(start.llm.n_vocab()) - expected).max() > 0.1 * np.abs(expected).max()


def test_a_head_start_continues_exactly(path: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    with warm(path[0], tmp_path, n_warm=2, **path[1]) as start:
        remember(start, A)
        generated = answer(start, B, 8)
        assert start.decision.error is None
        mark, sentences = start.report()
        assert mark.endswith(" similar, first 2 tokens") and not sentences
        held = start.llm.input_ids[: start.llm.n_tokens].tolist()
        assert held == [*B, *generated[:7]]
        assert B in start.library  # read exactly, so it is remembered
        assert cold(start.llm, [*B, *generated[:2]], 6) == generated[2:]
        with opened(path[0], **path[1]) as (other, _):
            other.eval([*B, *generated[:7]])
            start.llm.reset()
            start.llm.eval([*B, *generated[:7]])
            np.testing.assert_array_equal(logits(other), logits(start.llm))


def test_an_answer_that_ends_warm_leaves_no_prefix(tiny_model: Models, tmp_path: Path) -> None:
    with warm(tiny_model("llama"), tmp_path, n_warm=4) as start:
        expected = cold(start.llm, B, 5)
        remember(start, A)
        for n in (1, 3):
            start.llm.reset()
            stream = start.begin(B, 0, start.llm._init_sampler(temp=0.0))
            first = [next(stream) for _ in range(n)]
            assert start.decision.logits is not None and int(start.decision.logits.argmax()) == first[0]
            stream.close()  # type: ignore[attr-defined]
            assert start.llm.n_tokens == 0
            state = start.llm.save_state()
            assert state.n_tokens == 0
            assert cold(start.llm, B, 5) == expected
            start.llm.load_state(state)
            assert cold(start.llm, B, 5) == expected


def test_bad_input_is_a_cold_start(tiny_model: Models, tmp_path: Path) -> None:
    with warm(tiny_model("llama"), tmp_path) as start:
        cases = [
            ([], "prompt", "expected at least one token, found none"),
            (prompt(N_CTX), "prompt", f"expected fewer than {N_CTX} tokens (the context), found {N_CTX}"),
            (prompt(PLAN.shortest - 1), "prompt", f"expected at least {PLAN.shortest} tokens"),
            (A, "library", "expected summaries of earlier prompts, found none yet"),
        ]
        for tokens, cause, reason in cases:
            decision = start.first(tokens)
            assert decision.error is not None and decision.cause == cause
            assert decision.error.reason.startswith(reason)
            assert start.report() == ("", [f"warm start: cold; {decision.error}"])
        remember(start, A)
        start.threshold = 0.999999
        decision = start.first(B)
        assert str(decision.error).startswith("similarity: expected at least 0.999999, found ")
        assert start.llm.n_tokens == len(A)  # untouched
        start.threshold = -1.0
        file = next(tmp_path.iterdir())
        data = bytearray(file.read_bytes())
        data[-100] ^= 1
        file.write_bytes(data)
        decision = start.first(B)
        dropped = f"skipped the damaged entry {file.name}: checksum of the state differs"
        assert str(decision.error) == f"warm_library: {dropped}"
        assert not file.exists()
        expected = cold(start.llm, B, 3)
        start.llm.reset()
        assert answer(start, B, 3) == expected


def test_another_model_is_refused_and_its_library_a_cold_start(tiny_model: Models, tmp_path: Path) -> None:
    with warm(tiny_model("llama"), tmp_path / "library") as start:
        remember(start, A)
        start.trained.save(tmp_path / "file")
        assert Trained.load(tmp_path / "file", start.llm.loaded_model).digest == start.trained.digest
    with opened(tiny_model("llama", seed=1)) as (llm, planting):
        trained = untrained(llm, planting)
        library = Library(tmp_path / "library", trained)
        decision = WarmStart(llm, planting, trained, library, threshold=-1.0).first(B)
        assert decision.cause == "warm_library"
        assert "expected prompts summarised for this model and trained file, found 1 of others" in str(decision.error)
        with pytest.raises(SubkvError, match="path: expected a file trained for this model"):
            Trained.load(tmp_path / "file", llm.loaded_model)
        for mode in ("off", "maybe"):
            with pytest.raises(SubkvError, match=f"mode: expected on or auto, found '{mode}'"):
                WarmStart(llm, planting, trained, library, mode=mode)


def test_auto_asks_the_guard(tiny_model: Models, tmp_path: Path) -> None:
    with warm(tiny_model("llama"), tmp_path, mode="auto") as start:
        remember(start, A)
        decision = start.first(B)
        assert str(decision.error) == (
            "guard: expected coefficients in the trained file (python -m research.warmstart guard), found none"
        )
        assert start.llm.n_tokens == len(A)  # untouched
    with warm(tiny_model("llama"), tmp_path, guard={**COEFS}, mode="auto", max_kl=1e3) as start:
        alone = start.first(B)  # checked against first and last tokens only
        assert alone.error is None and alone.predicted_kl == pytest.approx(alone.self_check)
        remember(start, prompt(T, 3))
        both = start.first(B)
        assert both.error is None and both.self_check != alone.self_check
        assert both.logits is not None
        start.max_kl = 1e-9
        decision = start.first(B)
        assert decision.logits is None
        assert str(decision.error).startswith("guard: expected KL up to 1e-09 nats, found ")
        assert start.llm.n_tokens == 0
        start.trained.guard["constant"] = 1e4
        endless = start.first(B)
        assert (endless.cause, endless.predicted_kl) == ("guard", math.inf)
        expected = cold(start.llm, B, 4)
        start.llm.reset()
        assert answer(start, B, 4) == expected


def test_a_prefix_in_exact_cells_is_better(tiny_model: Models, tmp_path: Path) -> None:
    with warm(tiny_model("llama"), tmp_path) as start:
        remember(start, A)
        longer = [*A, *prompt(20, 5)]
        start.problem = "of an earlier prompt"
        answer(start, longer, 2)
        assert str(start.decision.error) == f"prefix: {T} of {T + 20} tokens are in the cache already"
        assert start.report() == ("", [])


def test_hidden_states_embed(tiny_model: Models) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 60  # more than one batch
    sizes = {"n_ctx": 2560, "n_batch": 2560, "n_ubatch": 2560}
    with Llama(tiny_model("llama"), kv_cache="f16", embedding=True, pooling_type=1, verbose=False, **sizes) as llm:
        tokens = llm.tokenize(text.encode())
        assert len(tokens) > N_BATCH
        expected = np.array(llm.embed(text, truncate=False))
        found = embedder("hidden", llm.loaded_model)(tokens)
        with pytest.raises(SubkvError, match="embedding: expected tokens or hidden, found 'callable'"):
            embedder("callable", llm.loaded_model)
        with pytest.raises(SubkvError, match="prompt: expected at least one token"):
            embedder("tokens", llm.loaded_model)([])
    np.testing.assert_allclose(found, expected, atol=1e-4 * float(np.abs(expected).max()))


def test_recorded_rows_are_those_of_one_block(tiny_model: Models) -> None:
    with opened(tiny_model("llama")) as (llm, planting):
        found = []
        for tokens in (A, A, B):
            llm.reset()
            with planting.recording(range(20)):
                llm.eval(tokens)
                found.append(planting.rows())
        assert {len(x) for rows in found for x in (*rows.k, *rows.v)} == {20}
        np.testing.assert_array_equal(found[0].k[1], found[1].k[1])
        assert not np.array_equal(found[0].k[1], found[2].k[1])
        assert planting.observer.layers()[0].n_key == 0  # nothing piles up


def test_an_attached_planter_changes_nothing_when_cold(path: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    with Llama(path[0], n_ctx=N_CTX, n_threads=1, n_threads_batch=1, verbose=False, **path[1]) as llm:
        expected = cold(llm, B, 8)
        bits = logits(llm)
    with warm(path[0], tmp_path, **path[1]) as start:
        assert answer(start, B, 8) == expected
        np.testing.assert_array_equal(logits(start.llm), bits)


def test_the_guard_finds_a_law() -> None:
    rng = np.random.default_rng(0)
    similarity, check = rng.uniform(0.5, 1, 400), np.exp(rng.uniform(-8, 1, 400))
    noise = rng.normal(0, 0.3, 400)
    kl = np.exp(-1.0 + 4.0 * (1 - similarity) + 0.7 * np.log(check) + noise)
    found = predictor.fit(np.stack([similarity, check], axis=1), kl)
    assert found["constant"] == pytest.approx(-1.0, abs=0.1)
    assert found["distance"] == pytest.approx(4.0, abs=0.3)
    assert found["log_check"] == pytest.approx(0.7, abs=0.03)
    covered = [k <= predictor.predict(found, s, c) for s, c, k in zip(similarity, check, kl, strict=True)]
    assert np.mean(covered) == pytest.approx(0.9, abs=0.02)
    assert predictor.predict({}, 1.0, 0.0) == np.inf
    with pytest.raises(SubkvError, match="guard: expected 8 pairs or more, found 3 and 3"):
        predictor.fit(np.ones((3, 2)), np.ones(3))
    with pytest.raises(SubkvError, match="guard: expected finite features"):
        predictor.fit(np.full((9, 2), np.nan), np.ones(9))
    with pytest.raises(SubkvError, match="found no margin"):
        predictor.predict(dict.fromkeys(predictor.NAMES[:3], 0.0), 1.0, 0.0)
    p, q = np.log([0.5, 0.5]), np.log([0.9, 0.1])
    assert predictor.self_check(p, q) == pytest.approx(0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1))
    assert predictor.self_check(p, p) == 0.0
