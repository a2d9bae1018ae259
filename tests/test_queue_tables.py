"""The simulated queues of a cluster against known formulas of queueing theory."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "docs" / "results"))
queues: Any = importlib.import_module("queue_tables")


@pytest.mark.parametrize(("work", "answer"), [(1.0, 2.0), (1.6, 8.0)], ids=["half its time", "most of it"])
def test_a_machine_that_works(work: float, answer: float) -> None:
    """Requests that share its time take work / (1 - load)."""
    machine = queues.Machine([1.0] * 1000, work, 0.0)
    done, used = queues.simulated(machine, 100, 200.0, 1, lambda user: [0], 20_000.0)
    assert used[0] == pytest.approx(0.5 * work, rel=0.05)
    assert mean(request.ended - request.arrived for request in done) == pytest.approx(answer, rel=0.15)
    assert all(request.arrived <= request.begun <= request.ended for request in done)


def test_rejected_requests_cost_more_on_another_machine() -> None:
    machine = queues.Machine([1.0], 1.0, 0.5)
    done, used = queues.simulated(machine, 100, 100.0, 2, lambda user: [0, 1], 5_000.0)
    elsewhere = [request for request in done if request.elsewhere]
    assert 0.05 < len(elsewhere) / len(done) < 0.6 and used[0] > used[1] > 0
    assert {request.work for request in elsewhere} == {1.0, 1.5}
    alone, _ = queues.simulated(machine, 100, 1e5, 2, lambda user: [0, 1], 1e6)
    assert mean(request.ended - request.arrived for request in alone) == pytest.approx(1.0, abs=0.01)


def test_slots_make_a_machine_faster() -> None:
    """Every further slot adds throughput; a single request is not faster."""
    machine = queues.Machine([0.5, 1.0], 1.0, 0.0)
    done, _ = queues.simulated(machine, 10, 1e5, 1, lambda user: [0], 1e7)
    assert mean(request.ended - request.arrived for request in done) == pytest.approx(2.0, abs=0.01)
