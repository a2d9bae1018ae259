"""Long conversations: llama-server evaluates few tokens twice on any kind of model memory."""

from __future__ import annotations

from typing import Any

import pytest
import turns
from program_paths import program

SHARE = 0.05  # of the new tokens
DEPTH = 2400
# as small for messages of 200 tokens as a server's, and those of models, are for messages of thousands
BATCHES, WINDOW = ("-b", 64, "-ub", 16), {"attention.sliding_window": 64}
WIDTHS = ("key_length", "value_length", "length_swa", "dimension_count", "dimension_count_swa")


def narrow(shape: str) -> dict[str, Any]:
    """Heads of 64 elements: the tokens that are evaluated do not depend on their size."""
    return {key: min(value, 64) for key, value in turns.SHAPES[shape][1].items() if key.endswith(WIDTHS)} | WINDOW


@pytest.fixture(scope="module", params=turns.SHAPES)
def steps(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Tokens evaluated in each step of a shape, by cache."""
    program("llama-server")
    folder = tmp_path_factory.mktemp("turns")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        return {
            cache: rows
            for _, cache, rows in turns.examined([request.param], DEPTH, folder, BATCHES, **narrow(request.param))
        }


def test_few_tokens_are_evaluated_twice(steps: dict[str, list[dict[str, Any]]]) -> None:
    again, new = (sum(row[key] for row in steps["subkv"]) for key in ("again", "new"))
    print([(row["step"], row["again"]) for row in steps["subkv"]])
    assert again <= SHARE * new
    assert all(row["again"] == 0 for row in steps["subkv"] if row["step"].startswith("turn "))


def test_no_more_than_with_f16(steps: dict[str, list[dict[str, Any]]]) -> None:
    again = {cache: sum(row["again"] for row in rows) for cache, rows in steps.items()}
    assert again["subkv"] <= again["f16"], again


def test_length_of_common_prefixes() -> None:
    assert [turns.common([1, 2, 3], text) for text in ([], [1], [1, 2, 4], [1, 2, 3, 4], [2])] == [0, 1, 2, 3, 0]


def test_messages_differ() -> None:
    client = turns.Talker()
    assert client.message(40) != client.message(40)
