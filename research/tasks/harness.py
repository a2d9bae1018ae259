"""Writes the samples as tasks of lm-evaluation-harness, which runs them on any model (ours by research.lm_eval)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from research.tasks.kinds import Sample, Task
from research.tasks.run import counter
from subkv.base.errors import SubkvError
from subkv.base.files import atomic_file
from subkv.engine.model import Model

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
"""


def questions_and_answers(sample: Sample) -> Iterator[tuple[str, str]]:
    """(text before, right answer) of every question: then the harness's `acc` equals our share of right answers."""
    for i in range(1, len(sample.pieces), 2):
        yield "".join(sample.pieces[:i]), sample.pieces[i]


def write(
    folder: Path, model: Model, tasks: Sequence[Task], lengths: Sequence[int], samples: int, seed: int
) -> list[Path]:
    """Write a task subkv_KIND_DIFFICULTY_LENGTH for each task and length in tokens. Returns its files.

    Raises SubkvError.
    """
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for length in lengths:
            for task in tasks:
                name = f"subkv_{task.kind}_{task.difficulty}_{length}"
                data = folder.resolve() / f"{name}.jsonl"
                with atomic_file(data) as file:
                    for i in range(samples):
                        for text, answer in questions_and_answers(task.sample(seed + i, length, counter(model))):
                            file.write(json.dumps({"text": text, "answer": answer}).encode() + b"\n")
                with atomic_file(data.with_suffix(".yaml")) as file:
                    file.write(TASK.format(name=name, data=json.dumps(str(data))).encode())
                written.append(data.with_suffix(".yaml"))
    except OSError as error:
        raise SubkvError("folder", f"cannot write {folder}: {error.strerror or error}") from error
    return written
