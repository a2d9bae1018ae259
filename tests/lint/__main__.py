"""Lint of code and prose: every rule runs, and says file, line and what is wrong. Exits with 1 if a rule is broken.

    python tests/lint [RULE]...

Needs the extra `test`. CI runs it beside the tests (.ci/run).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lint import cpp, functions, hosted, prose, tools

Rule = Callable[[], Iterable[str]]
RULES: dict[str, Rule] = {**tools.RULES, **cpp.RULES, **functions.RULES, **prose.RULES, **hosted.RULES}


def run(rules: dict[str, Rule]) -> int:
    """How many rules are broken. The tools are programs: they run beside each other."""
    with ThreadPoolExecutor(2) as threads:
        found = {name: threads.submit(lambda rule=rule: list(rule())) for name, rule in rules.items()}
    broken = 0
    for name, future in found.items():
        if complaints := future.result():
            broken += 1
            print(f"lint: {name}", *(f"    {line}" for text in complaints for line in text.splitlines()), sep="\n")
    print(f"lint: {len(rules)} rules, {broken} broken")
    return broken


def main(names: list[str]) -> None:
    if unknown := sorted({*names} - {*RULES}):
        raise SystemExit(f"lint: expected rules of {', '.join(RULES)}; found {', '.join(unknown)}")
    raise SystemExit(run({name: rule for name, rule in RULES.items() if not names or name in names}) > 0)


if __name__ == "__main__":
    main(sys.argv[1:])
