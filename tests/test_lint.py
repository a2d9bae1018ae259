"""The lint (tests/lint) says what is wrong, and fails then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from each import each
from lint.__main__ import RULES, run
from lint.files import REPO
from lint.functions import lengths


def test_a_broken_rule_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run({"good": list, "bad": lambda: ["a.py:1: it is wrong"]}) == 1
    assert capsys.readouterr().out == "lint: bad\n    a.py:1: it is wrong\nlint: 2 rules, 1 broken\n"


@each("name, body", [("long.py", "def f():\n{}    pass\n"), ("long.cpp", "void N::f() {{\n{}}}\n")])
def test_long_functions(name: str, body: str, tmp_path: Path) -> None:
    for n in (78, 79):
        path = tmp_path / f"{n}-{name}"
        path.write_text(body.format("    x = g(x);\n" * n))
        assert [text.split(": ")[1] for text in lengths([path])] == ["f has 81 lines, expected at most 80"] * (n == 79)


def test_the_program() -> None:
    command = [sys.executable, "tests/lint"]
    done = subprocess.run([*command, "scripts"], cwd=REPO, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "lint: 1 rules, 0 broken\n")
    done = subprocess.run([*command, "spelling"], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "found spelling" in done.stderr and all(rule in done.stderr for rule in RULES)
