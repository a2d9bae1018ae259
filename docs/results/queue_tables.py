"""A simulation of queues in a cluster, with the hash ring of Ray's own router and the measured speed of a machine."""

from __future__ import annotations

import dataclasses
import heapq
import importlib.util
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean, quantiles
from typing import Any

from render import Column, Numbers, Rows, grid, text

N_USERS, EVERY, N_READ, N_WRITTEN = 10_000, 60.0, 200, 150  # per user: seconds between turns, tokens of a turn
N_SLOTS, SHARES, PLANNED = 4, (0.4, 0.55, 0.7, 0.85), 0.7  # shares of a machine's time; the planned share
AGAIN = 0.5  # seconds until Ray's router tries again if all candidates are full

Ranked = Callable[[int], Sequence[int]]  # a user's candidate machines, in order of preference


def ring(n_replicas: int) -> Callable[[str], list[int]]:
    """The machines that Ray's own router tries for a session, in order."""
    from ray.serve._private.common import DeploymentID, ReplicaID
    from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

    router = ConsistentHashRouter.__new__(ConsistentHashRouter)
    router._num_virtual_nodes, router._num_fallback_replicas = 100, 2
    router._deployment_id = DeploymentID("Replica")
    numbers = {ReplicaID(f"replica{i}", router._deployment_id): i for i in range(n_replicas)}
    router._rebuild_ring(frozenset(numbers))
    return lambda session: [numbers[replica] for replica in router._lookup_ranked_replicas(session)]


@dataclasses.dataclass(frozen=True)
class Machine:
    """work: seconds for a turn; takes: additional seconds to take over a conversation from another machine.

    rates: speed of the machine with 1, 2, … busy slots. It queues at most as many requests as it has slots.
    """

    rates: Sequence[float]
    work: float
    takes: float


class Replica:
    """Requests that share a machine's time equally."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.waiting: list[Request] = []
        self.busy: list[tuple[float, int, Request]] = []  # ordered by the value of `given` when they end
        self.given, self.at = 0.0, 0.0  # seconds of work per busy slot so far; time of the last update
        self.used = 0.0  # seconds with at least one busy slot

    @property
    def n(self) -> int:
        return len(self.busy) + len(self.waiting)

    def _share(self) -> float:
        return self.machine.rates[len(self.busy) - 1] / len(self.busy)

    def advance(self, now: float) -> None:
        if self.busy:
            self.given += (now - self.at) * self._share()
            self.used += now - self.at
        self.at = now

    def fill(self) -> None:
        while self.waiting and len(self.busy) < len(self.machine.rates):
            request = self.waiting.pop(0)
            request.begun = self.at
            heapq.heappush(self.busy, (self.given + request.work, request.number, request))

    def next(self) -> float:
        return self.at + max(self.busy[0][0] - self.given, 0.0) / self._share()


@dataclasses.dataclass(eq=False)
class Request:
    number: int
    user: int
    arrived: float
    work: float = 0.0
    begun: float = 0.0
    ended: float = 0.0
    elsewhere: bool = False


def simulated(
    machine: Machine, n_users: int, every: float, n_replicas: int, ranked: Ranked, seconds: float
) -> tuple[list[Request], list[float]]:
    """All answered requests, and the share of time that each machine was busy.

    Turns arrive independently of each other; a user sends one every `every` seconds on average.
    """
    chance = random.Random(0)
    replicas = [Replica(machine) for _ in range(n_replicas)]
    places: dict[int, Sequence[int]] = {}
    holder: dict[int, int] = {}
    done: list[Request] = []
    events: list[tuple[float, int, Any]] = []  # time, number, an arriving request or a finishing replica
    stamps = [0] * n_replicas  # number of the current event of a replica
    n_events = 0

    def put(when: float, what: Any) -> int:
        nonlocal n_events
        n_events += 1
        heapq.heappush(events, (when, n_events, what))
        return n_events

    def arrivals() -> Iterator[Request]:
        now, number = 0.0, 0
        while (now := now + chance.expovariate(n_users / every)) < seconds:
            number += 1
            yield Request(number, chance.randrange(n_users), now)

    def place(request: Request, now: float) -> int | None:
        preferred = places.setdefault(request.user, ranked(request.user))
        for i in preferred:
            if replicas[i].n < 2 * len(machine.rates):
                request.work = machine.work + (machine.takes if holder.get(request.user, i) != i else 0.0)
                request.elsewhere = i != preferred[0]
                holder[request.user] = i
                replicas[i].advance(now)
                replicas[i].waiting.append(request)
                return i
        put(now + AGAIN, request)
        return None

    turns = arrivals()
    if first := next(turns, None):
        put(first.arrived, first)
    while events:
        now, stamp, what = heapq.heappop(events)
        if isinstance(what, Request):
            if what.arrived == now and (following := next(turns, None)):
                put(following.arrived, following)
            placed = place(what, now)
            if placed is None:
                continue
            i = placed
        elif stamp != stamps[i := what]:
            continue
        else:
            replicas[i].advance(now)
            _, _, request = heapq.heappop(replicas[i].busy)
            request.ended = now
            done.append(request)
        replicas[i].fill()
        if replicas[i].busy:
            stamps[i] = put(replicas[i].next(), i)
    end = max((request.ended for request in done), default=1.0)
    return done, [replica.used / end for replica in replicas]


def _measured() -> Machine:
    """The demo model on the machine of the other tables."""

    def rows(name: str) -> Rows:
        stored: Rows = json.loads(Path(__file__).with_name(f"{name}.json").read_text("utf-8"))["rows"]
        return stored

    prefix = next(row for row in rows("server_prefixes") if row["cache"].startswith("coefficients"))
    one, four = (
        next(row["tokens/s"] for row in rows("server_load") if row["name"].startswith(n)) for n in ("one", "four")
    )
    work = N_READ * prefix["evaluated s"] / prefix["tokens"] + N_WRITTEN / four
    rates = [one / four + (1 - one / four) * i / (N_SLOTS - 1) for i in range(N_SLOTS)]
    return Machine(rates, work, prefix["restarted s"])


def cluster_queues(lab: Any) -> Rows:
    if importlib.util.find_spec("ray") is None:
        lab.skipped.append("no package ray (extra `cluster`)")
        return []
    machine = _measured()
    n_users, seconds = lab.pick((N_USERS, 1200.0), (400, 600.0))
    rows = []
    for share in SHARES:
        per_machine = round(share * EVERY / machine.work)
        n_replicas = round(n_users / per_machine)
        chosen = ring(n_replicas)
        arrived, used = simulated(
            machine, n_users, EVERY, n_replicas, lambda user, chosen=chosen: chosen(f"session {user}"), seconds
        )
        arrived = [request for request in arrived if request.arrived > seconds / 10]  # machines start idle
        slots = [request.begun - request.arrived for request in arrived]
        answers = [request.ended - request.arrived for request in arrived]
        users = [0] * n_replicas
        for user in range(n_users):
            users[chosen(f"session {user}")[0]] += 1
        rows.append(
            {
                "planned": share,
                "users": per_machine,
                "machines": n_replicas,
                "fullest": max(users) * n_replicas / n_users,
                "used": mean(used),
                "fullest used": max(used),
                "elsewhere": mean(request.elsewhere for request in arrived),
                **{f"slot p{p} s": quantiles(slots, n=100)[p - 1] for p in (50, 99)},
                **{f"answer p{p} s": quantiles(answers, n=100)[p - 1] for p in (50, 99)},
                "requests": len(arrived),
                "work s": machine.work,
                "alone s": machine.work / machine.rates[0],
            }
        )
    return rows


def markdown(rows: Rows) -> str:
    columns: list[Column] = [
        ("planned load", lambda row: f"{row['planned']:.0%}"),
        ("users per machine", text("users")),
        ("machines", text("machines")),
        ("most users of a machine, × mean", lambda row: f"{row['fullest']:.2f}"),
        ("mean load", lambda row: f"{row['used']:.0%}"),
        ("highest load", lambda row: f"{row['fullest used']:.0%}"),
        ("answered by another machine", lambda row: f"{row['elsewhere']:.1%}"),
        ("wait for a slot, p50 s", lambda row: f"{row['slot p50 s']:.1f}"),
        ("p99 s", lambda row: f"{row['slot p99 s']:.1f}"),
        ("answer, p50 s", lambda row: f"{row['answer p50 s']:.1f}"),
        ("p99 s", lambda row: f"{row['answer p99 s']:.1f}"),
    ]
    return grid(rows, columns, left=0)


def numbers(rows: Rows) -> Numbers:
    if not rows:
        return {}
    plan = next(row for row in rows if row["planned"] == PLANNED)
    return {
        "work": f"{plan['work s']:.1f}",
        "alone": f"{plan['alone s']:.1f}",
        "users": f"{plan['users']}",
        "machines": f"{plan['machines']}",
        "fullest": f"{plan['fullest']:.2f}",
        "slot_p99": f"{plan['slot p99 s']:.1f}",
        "answer_p50": f"{plan['answer p50 s']:.1f}",
        "answer_p99": f"{plan['answer p99 s']:.1f}",
        "elsewhere": f"{100 * plan['elsewhere']:.1f}",
    }
