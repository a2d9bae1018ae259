"""The list of seeded faults matches this checkout. try_faults.py runs the tests on each fault, which takes an hour."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from seeded import FAULTS

REPO = Path(__file__).resolve().parents[2]


def test_every_fault_is_one_place() -> None:
    counts = {fault.name: (REPO / fault.file).read_text("utf-8").count(fault.before) for fault in FAULTS}
    assert {name: n for name, n in counts.items() if n != 1} == {}
    assert [fault.name for fault in FAULTS if fault.before == fault.after] == []


def test_names_differ_and_tests_exist() -> None:
    assert [name for name, n in Counter(fault.name for fault in FAULTS).items() if n > 1] == []
    assert sorted({path for fault in FAULTS for path in fault.tests.split() if not (REPO / path).is_file()}) == []
    assert len(FAULTS) >= 60
