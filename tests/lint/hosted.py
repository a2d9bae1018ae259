"""Hosted CI: its steps are scripts of the repository, and GitHub's own checks accept the workflows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator

from lint.files import REPO, shown

WORKFLOWS = sorted((REPO / ".github" / "workflows").glob("*.yml"))
CHECKS = [
    ["actionlint"],
    ["check-jsonschema", "--builtin-schema", "vendor.github-workflows"],
    ["zizmor", "--offline", "--no-progress"],
]


def scripts() -> Iterator[str]:
    """Scripts of CI parse; steps of workflows are scripts that exist."""
    for script in (REPO / ".ci").iterdir():
        done = subprocess.run(["sh", "-n", script], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            yield f"{shown(script)}: {done.stderr}"
    for workflow in WORKFLOWS:
        named = re.findall(r"^ *- run: (\.ci/\w+)", workflow.read_text("utf-8"), re.M)
        if not named:
            yield f"{shown(workflow)}: expected a step that runs a script of .ci, found none"
        for script in named:
            if not os.access(REPO / script, os.X_OK):
                yield f"{shown(workflow)}: {script} is no program"


def workflows() -> Iterator[str]:
    for check in CHECKS:
        if shutil.which(check[0]) is not None:
            done = subprocess.run([*check, *WORKFLOWS], cwd=REPO, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                yield done.stdout + done.stderr
    if "`subkv doctor`" not in (REPO / ".github/ISSUE_TEMPLATE/bug.yml").read_text("utf-8"):
        yield ".github/ISSUE_TEMPLATE/bug.yml: a bug report asks for `subkv doctor`"


RULES = {"scripts": scripts, "workflows": workflows}
