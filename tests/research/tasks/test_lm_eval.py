"""lm-evaluation-harness on a tiny model: its own command line on a local task, and each request on its own."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from each import each

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed (pip install '.[eval]')")

from lm_eval.tasks import TaskManager  # noqa: E402

from converter.scoring import log_softmax  # noqa: E402
from research.lm_eval import N_ROLLBACK, SubkvLM, main  # noqa: E402
from subkv.base.errors import CacheError, SubkvError  # noqa: E402
from subkv.engine.cache import parse_cache  # noqa: E402
from subkv.engine.context import ContextOptions  # noqa: E402
from subkv.engine.model import Model  # noqa: E402

TASKS = {
    "choice": 'output_type: multiple_choice\ndoc_to_text: "{{text}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: 0\n'
    "metric_list:\n  - metric: acc\n",
    "rolling": 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
    "metric_list:\n  - metric: bits_per_byte\n",
    "answer": 'output_type: generate_until\ndoc_to_text: "{{text}}"\ndoc_to_target: "the"\n'
    'generation_kwargs:\n  until: ["."]\n  max_gen_toks: 4\nmetric_list:\n  - metric: exact_match\n',
}
LONG = " ".join(["the cat sat on an old mat and then it ran over the hills"] * 4)


@pytest.fixture(scope="module")
def lm(coded_model: Callable[..., Path]) -> Any:
    return SubkvLM(model=str(coded_model()), n_ctx=256, threads=1)


def instance(*arguments: Any) -> Any:
    """A request in lm_eval's form."""
    return SimpleNamespace(args=arguments)


def logits_of(model: Path, tokens: list[int]) -> Any:
    with Model(str(model)) as m:
        context = m.context(parse_cache("auto", model), ContextOptions(256, 256, 256, n_threads=1))
        out = context.logits(context.decode(tokens, 0, 0)).copy()
        context.close()
    return out


def test_loglikelihood(lm: Any, coded_model: Callable[..., Path]) -> None:
    """In any order, after other texts, and past a tail that cannot be removed: the results of an empty cache."""
    pairs = [(LONG, " and then"), ("a cat", " ran over"), (LONG, " it sat"), ("", "the hills"), (LONG + "a", " mat")]
    found = lm.loglikelihood([instance(*pair) for pair in pairs], disable_tqdm=True)
    again = lm.loglikelihood([instance(*pair) for pair in reversed(pairs)], disable_tqdm=True)
    np.testing.assert_allclose([nll for nll, _ in found], [nll for nll, _ in reversed(again)], atol=1e-3)
    for (context, continuation), (nll, greedy) in zip(pairs, found, strict=True):
        start = lm.tok_encode(context) if context else [lm.prefix_token_id]
        tokens = [*start, *lm.tok_encode(context + continuation)[len(lm.tok_encode(context)) :]]
        rows = logits_of(coded_model(), tokens)[len(start) - 1 : -1]
        want = log_softmax(rows)[np.arange(len(rows)), tokens[len(start) :]].sum()
        assert nll == pytest.approx(want, abs=1e-2)
        assert greedy == (rows.argmax(-1) == tokens[len(start) :]).all()
    assert N_ROLLBACK + 20 < len(lm.tok_encode(LONG)) < 240


def test_rolling_scores_every_token_once(lm: Any, coded_model: Callable[..., Path]) -> None:
    tokens = lm.tok_encode(LONG)
    rows = logits_of(coded_model(), [lm.prefix_token_id, *tokens])[:-1]
    want = log_softmax(rows)[np.arange(len(tokens)), tokens].sum()
    (found,) = lm.loglikelihood_rolling([instance(LONG)], disable_tqdm=True)
    assert found == pytest.approx(want, rel=1e-3)
    (longer,) = lm.loglikelihood_rolling([instance(3 * LONG)], disable_tqdm=True)  # in windows
    assert longer < found


def test_answers_are_greedy_and_end_at_a_stop(lm: Any) -> None:
    long, short = ({"max_gen_toks": n, "until": []} for n in (12, 5))
    (text,) = lm.generate_until([instance(LONG, long)], disable_tqdm=True)
    tokens = lm.tok_encode(LONG)
    (first,) = lm.generate_until([instance(LONG, short)], disable_tqdm=True)
    assert text.startswith(first)
    assert first.startswith(
        lm._model.piece(int(lm._logits(tokens, len(tokens) - 1)[0].argmax())).decode("utf-8", "replace")
    )
    stop = text[3:5]
    (cut,) = lm.generate_until([instance(LONG, long | {"until": [stop]})], disable_tqdm=True)
    assert cut == text[: text.index(stop)]
    with pytest.raises(CacheError, match="gen_kwargs: expected greedy generation"):
        lm.generate_until([instance(LONG, long | {"temperature": 0.7})], disable_tqdm=True)
    with pytest.raises(CacheError, match="n_ctx: expected more than the 256 tokens of an answer, found 256"):
        lm.generate_until([instance(LONG, {"max_gen_toks": 256})], disable_tqdm=True)


def test_chats_use_the_models_template(lm: Any) -> None:
    prompt = lm.apply_chat_template([{"role": "user", "content": "hello"}])
    assert prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert lm.tok_encode("<|im_start|>") == lm.tok_encode(prompt)[:1]
    assert "im_start" in lm.chat_template(True)


@each(
    ("arguments", "message"),
    [
        ({}, "--model_args: expected model=FILE and cache, n_ctx or threads, found no model"),
        ({"model": "M", "bases": "x"}, "--model_args: expected .*, found bases=x"),
        ({"model": "M", "n_ctx": -1}, "--model_args n_ctx: expected a positive number, found -1"),
        ({"model": "none.gguf", "device": "cpu"}, "none.gguf"),
        ({"model": "M", "cache": "q9"}, "--model_args cache: expected one of .*, found 'q9'"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str, coded_model: Callable[..., Path]) -> None:
    given = {name: str(coded_model()) if value == "M" else value for name, value in arguments.items()}
    with pytest.raises(SubkvError, match=message):
        SubkvLM(**given)


def test_a_local_task_runs(lm: Any, tmp_path: Path) -> None:
    rows = [{"text": f"a cat and {word} old", "choices": [" mat", " house"]} for word in ("an", "the", "it")]
    (tmp_path / "data.json").write_text("\n".join(json.dumps(row) for row in rows))
    for name, body in TASKS.items():
        source = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path / 'data.json'}\n"
        (tmp_path / f"{name}.yaml").write_text(f"task: local_{name}\n{source}test_split: test\n{body}")
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = lm_eval.simple_evaluate(lm, tasks=[f"local_{name}" for name in TASKS], task_manager=tasks)["results"]
    assert 0.0 <= found["local_choice"]["acc,none"] <= 1.0
    (whole,) = zip(*[lm.loglikelihood_rolling([instance(row["text"])]) for row in rows], strict=True)
    bits = -sum(whole) / math.log(2.0) / sum(len(row["text"]) for row in rows)
    assert found["local_rolling"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-3)
    assert found["local_answer"]["exact_match,none"] == 0.0


def test_the_command_ends_with_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluate() -> None:
        assert lm_eval.api.registry.get_model("subkv") is SubkvLM
        SubkvLM(model="none.gguf")

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", evaluate)
    with pytest.raises(SystemExit, match="--model_args model: expected a GGUF file, found no file none.gguf"):
        main()
