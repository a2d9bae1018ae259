"""lm-evaluation-harness as a client of llama-server with a coded cache: the command of research/README.md."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from page_commands import REPO, commands_of

TASK = """
task: local_answer
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "the"
generation_kwargs:
  until: ["."]
  max_gen_toks: 4
metric_list:
  - metric: exact_match
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval (pip install '.[eval]')")
def test_the_command_of_the_page(serve: Callable[..., Any], tmp_path: Path) -> None:
    (command,) = [line for line in commands_of(REPO / "docs" / "python.md") if line.startswith("lm_eval ")]
    data = tmp_path / "data.json"
    data.write_text("\n".join(json.dumps({"text": f"a cat and {word} old"}) for word in ("an", "the", "it")))
    (tmp_path / "answer.yaml").write_text(TASK.format(data=data))
    with serve("-c", 1024, "-np", 1) as server:
        command = re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{server.port}", command)
        command = re.sub(r"--tasks \S+", f"--tasks local_answer --include_path {tmp_path}", command)
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(command)],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
        )
        n_answered = server.log.count("stop processing")
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"\|local_answer\|.*\|exact_match\|", done.stdout), done.stdout
    assert n_answered == 3


def test_no_probabilities_of_a_prompt(serve: Callable[..., Any]) -> None:
    """What the harness's clients `gguf` and `local-completions` need for a task with given answers."""
    body = {"prompt": "The river is near", "logprobs": 2, "temperature": 0, "max_tokens": 1, "echo": True}
    with serve("-c", 256, "-np", 1) as server:
        (choice,) = server.request("POST", "/v1/completions", body)["choices"]
    assert list(choice["logprobs"]) == ["content"] and len(choice["logprobs"]["content"]) == 1
