"""Programs write their log to its end before they end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from compiled import preloaded
from program_paths import program


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs LD_PRELOAD")
@pytest.mark.parametrize(
    ("name", "options", "ending"),
    [
        ("llama-completion", "-m MODEL -c 64 -p the -n 8 -no-cnv --ignore-eos", "graphs reused"),
        ("llama-completion", "-m missing.gguf", "unable to create context"),
        ("llama-perplexity", "-m MODEL -c 32 --chunks 2 -f TEXT", "Final estimate"),
        ("llama-mtmd-cli", "-m MODEL", "Missing --mmproj argument"),
    ],
)
def test_the_last_lines_are_written(
    tiny_model: Callable[..., Path], tmp_path: Path, name: str, options: str, ending: str
) -> None:
    """The thread that writes the log is slower than the program."""
    slow = preloaded(Path(__file__).with_name("slow_log.cpp"), tmp_path)
    (tmp_path / "text").write_text("The quick brown fox jumps over the lazy dog. " * 8)
    files = {"MODEL": str(tiny_model()), "TEXT": str(tmp_path / "text")}
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SUBKV", "LLAMA"))}
    command = [str(program(name)), "-t", "1", *(files.get(word, word) for word in options.split())]
    done = subprocess.run(
        command,
        env={**environment, "LD_PRELOAD": slow},
        capture_output=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    text = (done.stdout + done.stderr).decode("utf-8", "replace")
    assert ending in text, text[-1000:]
