"""Helpers of the tests of `convert MODEL`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from converter.cli import main as convert
from subkv.native.bases import sidecar_folder

# small: four chunks of the built-in text, one of them sampled
SMALL = ["-c", "128", "--chunks", "4", "-t", "1", "--n-recent", "16"]


def run(model: Path, *arguments: Any) -> Result:
    return CliRunner().invoke(convert, [str(model), *SMALL, *map(str, arguments)])


def refused(result: Result, sentence: str) -> None:
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith(sentence), result.stderr
    assert result.stderr.count("\n") == 1


def left(cache_home: Path) -> list[str]:
    """Endings of the files in the store."""
    return sorted(
        re.sub(r"^(.*-)?[0-9a-f]{12}\.([0-9a-f]{8}\.)?", "", path.name) for path in sidecar_folder().iterdir()
    )
