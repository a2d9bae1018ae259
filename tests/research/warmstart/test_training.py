"""Training for warm starts: the closed form, the gain of gradient steps, the command and its errors."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from each import each

torch = pytest.importorskip("torch")

from research.warmstart import train as warmstart  # noqa: E402
from research.warmstart.cli import main  # noqa: E402
from research.warmstart.contexts import capturing  # noqa: E402
from research.warmstart.frame import Frame  # noqa: E402
from research.warmstart.learn import LayerRows, Places, Settings, projector, train_layer  # noqa: E402
from research.warmstart.pooled import Plan  # noqa: E402
from research.warmstart.trained import Trained, read  # noqa: E402
from subkv.base.errors import SubkvError  # noqa: E402
from subkv.engine.model import Model  # noqa: E402

WORDS = "the sun and a fox run over an old hill in the rain that sings of no end"


def text(n: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS.split()) for _ in range(n))


def prompts(n: int, length: int = 40) -> list[dict[str, Any]]:
    """Two prompts in each group, which share all words but the first few."""
    found = []
    for i in range(n):
        own = f"{text(4, 100 + i)} {text(length + i, i // 2)}"
        found.append({"id": f"p{i}", "group": f"g{i // 2}", "kind": "paraphrase", "split": "train", "text": own})
    return found


def write(path: Path, found: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in found))
    return path


#
# the projector
#


@pytest.mark.parametrize("ridge", [1e-6, 1e-2, 10.0])
def test_the_projector_is_the_ridge_regression(ridge: float) -> None:
    """Equals least squares over all ordered pairs, with the penalty as additional rows."""
    rng = np.random.default_rng(0)
    n, h, m, d_k, d_v = 7, 2, 4, 6, 3
    keys, values = rng.standard_normal((n, h, m, d_k)) * 30, rng.standard_normal((n, h, m, d_v))
    some, groups = [0, 1, 2, 4, 5, 6], ["a", "b", "a", "a", "b", "c"]
    found = projector(keys, values, groups, some, ridge)
    parts = []
    for x in (keys[some], values[some]):
        parts.append(x.transpose(0, 2, 1, 3).reshape(len(some), m, -1) / np.sqrt(np.mean(x**2)))
    slots = np.concatenate(parts, axis=2)
    pairs = [(s, t) for s in range(6) for t in range(6) if s != t and groups[s] == groups[t]]
    assert len(pairs) == 6 + 2
    source = np.concatenate([slots[s] for s, _ in pairs], axis=1)  # [m, pairs · features]
    target = np.concatenate([slots[t] for _, t in pairs], axis=1)
    penalty = np.sqrt(ridge * np.trace(source @ source.T) / m) * np.eye(m)
    expected = np.linalg.lstsq(np.hstack([source, penalty]).T, np.hstack([target, penalty]).T, rcond=None)[0].T
    np.testing.assert_allclose(found, expected, atol=1e-8)


def test_the_projector_without_evidence_changes_nothing() -> None:
    rng = np.random.default_rng(1)
    keys, values = rng.standard_normal((3, 2, 4, 8)), rng.standard_normal((3, 2, 4, 8))
    np.testing.assert_array_equal(projector(keys, values, ["a", "b", "c"], [0, 1, 2], 1e-3), np.eye(4))
    np.testing.assert_allclose(projector(keys, values, ["a"] * 3, [0, 1, 2], 1e9), np.eye(4), atol=1e-6)
    same = np.repeat(keys[:1], 3, axis=0)
    np.testing.assert_allclose(projector(same, same, ["a"] * 3, [0, 1, 2], 1e-3), np.eye(4), atol=1e-12)
    np.testing.assert_array_equal(projector(0 * keys, 0 * values, ["a"] * 3, [0, 1, 2], 1e-3), np.eye(4))


def test_the_projector_finds_a_known_map() -> None:
    """The second prompt's slots are those of the first in another order, and vice versa."""
    rng = np.random.default_rng(2)
    keys = rng.standard_normal((40, 2, 4, 16))
    keys[1::2] = keys[::2, :, ::-1]  # an involution: the same map both ways
    found = projector(keys, keys, [str(i // 2) for i in range(40)], range(40), 1e-9)
    np.testing.assert_allclose(found, np.eye(4)[::-1], atol=1e-6)


#
# adapters and prefix
#

N, TRAIN = 80, 64
GROUPS = [str(i // 2) for i in range(N)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads cost more than they give on matrices this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def collected(tiny_model: Callable[..., Path]) -> Callable[[Plan], tuple[LayerRows, Places, Frame]]:
    """Rows of the tiny llama's second layer for prompts of 44 to 80 tokens."""
    path = tiny_model("llama")

    def rows(plan: Plan) -> tuple[LayerRows, Places, Frame]:
        frame = Frame.of(path)
        rng = random.Random(0)
        found = [
            warmstart.Example(str(i), GROUPS[i], GROUPS[i], tuple(rng.choices(range(10, 250), k=44 + 36 * i // N)))
            for i in range(N)
        ]
        with Model(str(path)) as model:
            kept = warmstart.collect(model, found, warmstart.How(plan), frame, range(TRAIN))
        return kept.layer(1), warmstart.places(found, plan), frame

    return rows


def test_training_helps_held_out_prompts(collected: Callable[..., Any]) -> None:
    rows, places, frame = collected(Plan(6, 2, 4))
    arguments = (rows, places, frame.pairs, GROUPS, range(TRAIN), range(TRAIN, N))
    maps, losses = train_layer(*arguments, Settings(epochs=6, lr=1e-2))
    assert losses.adapted < 0.95 * losses.plain
    assert losses.fitted < 0.9 * losses.plain
    assert losses.prefix < losses.plain
    assert np.isfinite([losses.neighbour, losses.projected]).all()
    assert np.abs(maps.b_k).max() > 0.01, "slots weigh more than one token"
    assert not np.array_equal(maps.a_k[0], maps.a_k[1])


def test_training_is_seeded_and_heads_may_share(collected: Callable[..., Any]) -> None:
    rows, places, frame = collected(Plan(6, 2, 4))
    arguments = (rows, places, frame.pairs, GROUPS, range(16), range(16, 20))
    maps, losses = train_layer(*arguments, Settings(epochs=1))
    again, same = train_layer(*arguments, Settings(epochs=1))
    assert same == losses and np.array_equal(again.a_k, maps.a_k)
    other, _ = train_layer(*arguments, Settings(epochs=1, seed=1))
    train_layer(*arguments, Settings(epochs=1, seed=10**30))
    with pytest.raises(SubkvError, match="lr: expected a rate at which training converges, found 1e\\+30"):
        train_layer(*arguments, Settings(epochs=2, lr=1e30))
    assert not np.array_equal(other.a_k, maps.a_k)
    shared, _ = train_layer(*arguments, Settings(epochs=1, shared=True))
    assert np.array_equal(shared.a_k[0], shared.a_k[1]) and not np.array_equal(shared.a_k[0], np.eye(32))
    assert shared.shape == maps.shape and shared.projector.shape == (6, 6)


def test_no_epochs_and_a_slot_for_every_token_lose_nothing(collected: Callable[..., Any], tiny_model: Any) -> None:
    path, plan = tiny_model("llama"), Plan(38, 2, 4)
    rng = random.Random(1)
    found = [warmstart.Example(str(i), "g", "p", tuple(rng.randrange(10, 250) for _ in range(44))) for i in range(2)]
    frame = Frame.of(path)
    with Model(str(path)) as model:
        kept = warmstart.collect(model, found, warmstart.How(plan), frame, [0, 1])
    lie = warmstart.places(found, plan)
    for il in (0, 1):
        maps, losses = train_layer(kept.layer(il), lie, frame.pairs, ["g", "g"], [0, 1], [0, 1], Settings(epochs=0))
        assert 0 <= losses.plain < 1e-5 and losses.adapted == losses.plain
        assert losses.neighbour > 0.01, "another prompt's slots are not these"
        np.testing.assert_array_equal(maps.a_v, np.tile(np.eye(32, dtype=np.float32), (2, 1, 1)))
        assert not maps.b_k.any() and not maps.b_v.any()


def test_passages_are_held_out_as_a_whole() -> None:
    passages = [str(i // 3) for i in range(60)]
    train, held_out = warmstart.split(passages)
    assert sorted(train + held_out) == list(range(60))
    assert {passages[i] for i in held_out} == {"7", "15"}
    assert {passages[i] for i in train}.isdisjoint({"7", "15"})
    assert warmstart.split(["a", "b", "a"]) == ([0, 2], [1])
    assert warmstart.split(["a", "a"]) == ([0, 1], [0, 1])


#
# the command
#


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["train", *map(str, arguments)])


def test_the_command_writes_a_file_for_its_model(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model, out = tiny_model("qwen2"), tmp_path / "warm.safetensors"
    given = write(tmp_path / "prompts.jsonl", prompts(8) + [{**prompts(1)[0], "id": "t", "split": "test", "text": "a"}])
    options = ("--slots", 6, "--n-sink", 2, "--n-last", 3, "--epochs", 2, "-t", 1)
    done = run("-m", model, "-f", given, "-o", out, *options)
    assert done.exit_code == 0, done.output
    assert "2 layers, 6 slots" in done.output and "2 held-out of 8 prompts" in done.output
    with Model(model) as loaded:
        found = Trained.load(out, loaded)
        with capturing(loaded, 64) as context:
            assert [layer.shape for layer in found.layers] == context.capture([5, 6]).shapes
    assert found.centre.shape == (128,)
    assert found.plan == Plan(6, 2, 3) and found.guard == {} and found.embedding == "tokens"
    assert found.provenance["n_prompts"] == "8" and "adapted" in json.loads(found.provenance["losses"])
    assert not np.array_equal(found.layers[0].a_k[0], np.eye(32)) and found.layers[1].prefix_k.any()
    assert run("-m", model, "-f", given, "-o", tmp_path / "again", *options).exit_code == 0
    assert read(tmp_path / "again", found.frame).digest == found.digest


@each(
    ("change", "options", "message"),
    [
        ({"text": "short"}, (), "-f: p3: expected 28 (4 sinks, 16 slots, 8 last tokens) to 4096 tokens, found"),
        ({"text": text(6000, 0)}, (), "-f: p3: expected 28 (4 sinks, 16 slots, 8 last tokens) to 4096 tokens, found"),
        ({}, ("--slots", "2000"), "-f: p0: expected 2012 (4 sinks, 2000 slots, 8 last tokens) to 4096 tokens, found"),
        ({"id": 3}, (), "-f: expected"),
        ({"id": "p1"}, (), "-f: expected every id once, found 'p1' again"),
    ],
)
def test_prompts_that_cannot_be_used(
    change: dict[str, Any], options: Sequence[str], message: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    found = prompts(6)
    found[3] |= change
    given, out = write(tmp_path / "prompts.jsonl", found), tmp_path / "warm.safetensors"
    done = run("-m", tiny_model("llama"), "-f", given, "-o", out, *options)
    assert done.exit_code == 1 and done.stderr.startswith(message), done.output
    assert done.stderr.count("\n") == 1 and not out.exists()


def test_files_and_packages_that_are_not_there(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, out = tmp_path / "empty.jsonl", tmp_path / "warm.safetensors"
    empty.write_text("\n")
    given = write(tmp_path / "prompts.jsonl", prompts(4))
    tests = write(tmp_path / "tests.jsonl", [{**prompt, "split": "test"} for prompt in prompts(4)])
    llama, bloom = tiny_model("llama"), tiny_model("bloom")
    cases = [
        ((llama, empty, out), "-f: expected prompts, one JSON object a line, found none in empty.jsonl"),
        ((llama, tmp_path / "none", out), "-f: cannot read"),
        ((llama, tests, out), "-f: expected prompts to learn from, found only such with the split 'test'"),
        ((tmp_path / "none.gguf", given, out), "-m: "),
        ((bloom, given, out), "-m: expected an architecture whose positions are known"),
        ((llama, given, tmp_path), "-o: expected a file name, found the folder"),
        ((llama, given, given), "-o: expected another file than -f, found"),
    ]
    for (model, file, output), message in cases:
        done = run("-m", model, "-f", file, "-o", output)
        assert done.exit_code == 1 and done.stderr.startswith(message), done.output
    missing = importlib.util.find_spec

    def find_spec(name: str, *rest: Any) -> Any:
        return None if name == "torch" else missing(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    done = run("-m", llama, "-f", given, "-o", out)
    assert done.exit_code == 1
    assert done.stderr.startswith("expected the packages of the extra `torch`, found no torch: pip install")
    assert not out.exists()
