"""The list of seeded faults matches this checkout. try_faults.py runs the tests on each fault, which takes an hour."""

from __future__ import annotations

from collections import Counter

import pytest
from each import each
from mutations import Always, Argument, Change, Left, Negated, Never, NoPlaceError, Omit, Result, Right, Swap
from seeded import FAULTS, REPO, Fault
from syntax import parsed


@each("fault", FAULTS)
def test_every_fault_has_a_place(fault: Fault) -> None:
    try:
        path, changed = fault.changed()
    except NoPlaceError as error:
        raise AssertionError(f"seeded fault {fault.name!r}: {error}; say where its meaning is now") from None
    text = path.read_bytes()
    assert changed != text
    assert parsed(text, path.suffix).has_error or not parsed(changed, path.suffix).has_error


FUNCTION = """
int f(int a, int b) {
    int total = 0;
    if (a < b && (b < 9 || g(a))) {
        total += h(a + 1, b - a);
    }
    return total < 2 ? 1 : total;
}
"""


@each(
    "change, old, new",
    [
        (Swap("<", "<=", beside="9"), "b < 9", "b <= 9"),
        (Swap("<", "<=", beside="b", nth=0), "a < b", "a <= b"),
        (Omit("total"), "total += h(a + 1, b - a);", ";"),
        (Always(beside="g"), "|| g(a)", "|| (0 == 0)"),
        (Never(beside="2"), "total < 2 ?", "(0 != 0) ?"),
        (Negated(beside="9"), "b < 9", "!(b < 9)"),
        (Left("-"), "b - a", "b"),
        (Right("+"), "a + 1", "1"),
        (Argument("h", 1, "7"), "b - a", "7"),
        (Result("g", "0"), "g(a)", "0"),
    ],
)
def test_changes(change: Change, old: str, new: str) -> None:
    start, end, text = change.edit(parsed(FUNCTION.encode(), ".cpp"))
    assert FUNCTION.count(old) == 1
    assert (FUNCTION.encode()[:start] + text + FUNCTION.encode()[end:]).decode() == FUNCTION.replace(old, new)


@each("change", [Swap("<", "<="), Swap("<", "<=", beside="h"), Omit("h"), Left("-", nth=1), Result("f", "0")])
def test_no_place_or_several(change: Change) -> None:
    with pytest.raises(NoPlaceError, match="expected one place for"):
        change.edit(parsed(FUNCTION.encode(), ".cpp"))


def test_names_differ_and_tests_exist() -> None:
    assert [name for name, n in Counter(fault.name for fault in FAULTS).items() if n > 1] == []
    assert sorted({path for fault in FAULTS for path in fault.tests.split() if not (REPO / path).is_file()}) == []
    assert len(FAULTS) >= 60
