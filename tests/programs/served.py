"""Fixtures: a model whose output consists of words, and llama-server on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stand_ins
import tiny
from servers import CODED, Server, serving

CODED_SUBKV, F16 = "auto", "off"


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose greedy texts consist of words and do not end."""
    folder = tmp_path_factory.mktemp("words")
    return stand_ins.with_words(folder / "words.gguf", tiny.build(folder / "tiny.gguf"))


@pytest.fixture(scope="session")
def model(words: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`words` with its bases: 8 bits, the last 16 tokens exact."""
    from click.testing import CliRunner

    from converter.cli import main

    path = tmp_path_factory.mktemp("model") / "model.gguf"
    arguments = [words, "-f", text_file, "-o", path, "-c", 256, "--chunks", 16, "--codec", "int8", "--n-recent", 16]
    result = CliRunner().invoke(main, [str(word) for word in arguments])
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture
def serve(model: Path, tmp_path: Path) -> Callable[..., contextlib.AbstractContextManager[Server]]:
    """serve("-np", 4, coded=True, model=…, SUBKV_STORE=…): llama-server of `model` on coefficients, or on f16."""
    default = model

    @contextlib.contextmanager
    def start(*arguments: Any, coded: bool = True, model: Path | None = default, **variables: Any) -> Iterator[Server]:
        more = {name: str(value) for name, value in variables.items()}
        with serving(model, *arguments, subkv=CODED_SUBKV if coded else F16, folder=tmp_path, **more) as server:
            if model == default:
                assert (CODED in server.log) == coded
            yield server

    return start


@pytest.fixture(scope="session")
def text(text_file: Path) -> str:
    return text_file.read_text("utf-8")
