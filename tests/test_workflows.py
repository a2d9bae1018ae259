"""Hosted CI: its steps are scripts of the repository, and GitHub's own checks accept the workflows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((REPO / ".github" / "workflows").glob("*.yml"))
CHECKS = {
    "actionlint": ["actionlint"],
    "check-jsonschema": ["check-jsonschema", "--builtin-schema", "vendor.github-workflows"],
    "zizmor": ["zizmor", "--offline", "--no-progress"],
}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_steps_are_scripts_that_exist(workflow: Path) -> None:
    named = re.findall(r"^ *- run: (\.ci/\w+)", workflow.read_text(), re.M)
    assert named
    assert [script for script in named if not os.access(REPO / script, os.X_OK)] == []


def test_scripts_parse() -> None:
    for script in (REPO / ".ci").iterdir():
        done = subprocess.run(["sh", "-n", script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("tool", CHECKS)
def test_workflows_are_valid(tool: str) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool}: not installed")
    command = [*CHECKS[tool], *map(str, WORKFLOWS)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_bug_report_asks_for_doctor() -> None:
    assert "`subkv doctor`" in (REPO / ".github/ISSUE_TEMPLATE/bug.yml").read_text()
