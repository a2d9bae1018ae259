"""Chat and server take drafts by llama.cpp's flags."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner, Result

from runtime.chat import cli as chat
from runtime.options import draft_options
from subkv.engine.drafts import DraftModel, PromptLookup

Models = Callable[..., Path]


def run(main: Any, *arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def drafts_of(*arguments: Any) -> Any:
    """The drafts of a program that has only these flags."""
    made = []

    @click.command()
    @draft_options
    def program(drafts: Any) -> None:
        made.append(drafts.model(0))

    result = run(program, *arguments)
    if result.exit_code:
        return result.stderr
    return made[0]


def test_flags_are_drafts() -> None:
    assert drafts_of() is None
    assert drafts_of("--spec-type", "none") is None
    lookup = drafts_of("--spec-type", "ngram-simple", "--spec-ngram-simple-size-m", 99, "--draft-min", 5)
    assert isinstance(lookup, PromptLookup)
    assert (lookup.ngram, lookup.num_pred_tokens, lookup.n_min) == (12, 99, 5)
    model = drafts_of("-md", "m.gguf", "--draft-max", 7, "--draft-p-min", 0.5, "-ctkd", "q8_0")
    assert isinstance(model, DraftModel)
    assert (model.num_pred_tokens, model.p_min, model.kv_cache) == (7, 0.5, "q8_0")
    for wrong in (("--spec-type", "draft-simple"), ("--spec-type", "ngram-simple", "-md", "m.gguf")):
        assert "-md: expected a model with --spec-type draft-simple and no other, found" in drafts_of(*wrong)


def test_chat_reports_accepted_drafts(coded_model: Models, tmp_path: Path) -> None:
    path = coded_model()
    options = ("-m", path, "-p", "and again " * 20, "-st", "-n", 24, "--temp", 0, "-c", 512, "-t", 1)
    plain = run(chat.main, *options)
    drafted = run(chat.main, *options, "-md", path)
    assert plain.exit_code == drafted.exit_code == 0, drafted.output
    assert drafted.stdout == plain.stdout
    assert " | Drafts: " in drafted.stderr
    refused = run(chat.main, *options, "-md", tmp_path / "missing.gguf")
    assert refused.exit_code == 1
    assert refused.stderr.splitlines()[-1].startswith("-md: ")
