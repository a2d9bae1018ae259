"""research.speculation: the gain of drafts, as a table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from research import speculation

Models = Callable[..., Path]


def run(main: Any, *arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_a_row_for_every_cache_task_and_draft(coded_model: Models, text_file: Path) -> None:
    path = coded_model()
    sizes = ("-d", 64, "-n", 12, "-r", 1, "--lookup", "4,40", "--ngram", 1, "-md", path, "-t", 1)
    result = run(speculation.main, "-m", path, "-f", text_file, *sizes, "-o", "json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    drafts = ["none", "lookup 4", "lookup 40", "model 3"]
    expected = [(task, cache, draft) for task in ("copy", "go on") for cache in ("f16", "subkv") for draft in drafts]
    assert [(row["task"], row["cache"], row["draft"]) for row in rows] == expected
    for row in rows:
        assert row["same_answer"]
        assert row["median_ts"] > 0
        assert (row["n_drafted"] == 0) == (row["accepted_share"] is None)
        assert row["draft"] != "none" or row["n_drafted"] == 0
        assert row["draft"] != "model 3" or row["n_accepted"] > 0


def test_a_table_for_people(coded_model: Models, text_file: Path) -> None:
    sizes = ("-d", 64, "-n", 4, "-r", 2, "--lookup", "4", "-t", 1, "-ctk", "f16")
    result = run(speculation.main, "-m", coded_model(), "-f", text_file, *sizes)
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 2 + 4


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("-d", 10**6), "-f: expected at least 1000000 tokens (-d), found"),
        (("-f", "missing.txt"), "-f: cannot read missing.txt"),
    ],
)
def test_texts_that_do_not_do(coded_model: Models, text_file: Path, arguments: tuple[Any, ...], sentence: str) -> None:
    result = run(speculation.main, "-m", coded_model(), "-f", text_file, "-ctk", "f16", *arguments)
    assert result.exit_code == 1
    assert sentence in result.stderr
