"""Tables of memory and speed: chat, bench, kernel-bench and the server under load."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import click
from render import DEFAULT, Column, Numbers, Row, Rows, grid, label, text

STOCK = ("f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
MODEL = ("-m", "M.gguf", "--bases", "s4.5.gguf")
BENCH = ("subkv", "bench", "-t", "2", "-o", "json")


def memory(lab: Any) -> Rows:
    rows = []
    sidecar, default = lab.sidecar("4.5"), lab.sidecar("")
    chosen = [("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("subkv", sidecar), (f"subkv:{default}", default)]
    for name, bases in chosen:
        coded = ("--bases", bases, "-ctk", "subkv") if name.startswith("subkv") else ("-ctk", name)
        done = lab.run(
            *("subkv", "chat", "-m", "M.gguf", "-c", "8192", *coded),
            *("-p", "Say hello.", "--single-turn", "-n", "8"),
        )
        kv = re.search(r"KV cache: .*? ([\d.]+) MiB(?:.* ([\d.]+) MiB of it bases)?", done.stderr)
        if kv is None or (kv[2] is None) == name.startswith("subkv"):
            raise click.ClickException(f"chat: expected a line with the cache's MiB, found {done.stderr[-400:]!r}")
        rows.append(
            {"name": name, "kv_mib": float(kv[1]), "bases_mib": float(kv[2] or 0), "rss_mib": done.peak_rss_mib}
        )
    return rows


def memory_markdown(rows: Rows) -> str:
    columns: list[Column] = [
        ("cache", lambda row: label(row["name"])),
        ("KV cache with bases, MiB", lambda row: f"{row['kv_mib']:.1f}"),
        ("share of f16", lambda row: f"{row['kv_mib'] / rows[0]['kv_mib']:.2f}"),
        ("bases alone, MiB", lambda row: f"{row['bases_mib']:.1f}" if row["bases_mib"] else ""),
        ("peak RSS of the process, MiB", lambda row: f"{row['rss_mib']:.0f}"),
    ]
    return grid(rows, columns)


def memory_numbers(rows: Rows) -> Numbers:
    short = {"subkv": "4.5", f"subkv:{DEFAULT}": "default"}
    found: Numbers = {}
    for row in rows:
        name = short.get(row["name"], row["name"])
        found |= {f"kv_{name}": f"{row['kv_mib']:.1f}", f"rss_{name}": f"{row['rss_mib']:.0f}"}
    return found


def bench(lab: Any, *words: str, model: Sequence[str] = MODEL, env: dict[str, str] | None = None) -> Rows:
    """Rows of one interleaved run without samples; of flash attention on and off the faster one, if both ran."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in lab.json(*BENCH, *model, *words, env=env):
        row = {key: value for key, value in row.items() if not key.startswith("samples")}
        row["cache"] = row["cache"].split(" fa=")[0]
        key = (row["cache"], row["n_depth"], row["n_prompt"], row["n_gen"], row["n_parallel"])
        if key not in best or row["median_ts"] > best[key]["median_ts"]:
            best[key] = row
    return list(best.values())


def best_stock(rows: Sequence[Row], like: Row) -> float:
    """Tokens/s of the fastest stock cache in the same test."""
    keys = ("n_depth", "n_prompt", "n_gen", "n_parallel")
    return float(
        max(row["median_ts"] for row in rows if row["cache"] in STOCK and all(row[key] == like[key] for key in keys))
    )


def ts(row: Row) -> str:
    speed = f"{row['median_ts']:.1f} ± {row['stddev_ts']:.1f}"
    return speed if row["cache"] in STOCK else f"**{speed}**"


def by_depth(rows: Rows) -> str:
    """A line per cache, a column per depth, ratios at the largest depth; machines side by side."""
    depths = sorted({row["n_depth"] for row in rows})
    found = {(row.get("machine"), row["cache"], row["n_depth"]): row for row in rows}
    machines = list(dict.fromkeys(row.get("machine") for row in rows))
    deepest = {
        name: [row for row in rows if (row.get("machine"), row["n_depth"]) == (name, depths[-1])] for name in machines
    }
    columns: list[Column] = [
        ("cache, tokens/s", lambda row: label(row["cache"])),
        ("KV bytes per token", lambda row: str(row["kv_bytes_per_token"])),
    ]

    def speed(machine: str | None, depth: int) -> Callable[[Row], str]:
        return lambda row: ts(found[machine, row["cache"], depth]) if (machine, row["cache"], depth) in found else ""

    def ratio(machine: str | None) -> Callable[[Row], str]:
        def cell(row: Row) -> str:
            own = found.get((machine, row["cache"], depths[-1]))
            return "" if own is None else f"{own['median_ts'] / best_stock(deepest[machine], own):.2f}"

        return cell

    for machine in machines:
        name = f"{machine}, " if machine else ""
        columns += [(f"{name}depth {depth}", speed(machine, depth)) for depth in depths]
        columns.append((f"{name}× best stock at {depths[-1]}", ratio(machine)))
    return grid(deepest[machines[0]], columns)


def numbers(rows: Rows, name: str = "subkv") -> Numbers:
    """Numbers of the cache `name` at each depth D.

    best_stock_D, KIND_D: its speed divided by that of the best stock cache, or of another kind. kept_D: its speed in
    percent of that at the smallest depth. cell_D: microseconds per token and cell between the previous depth and D
    (generation only).
    """
    found = {(row["cache"], row["n_depth"]): row for row in rows}
    depths = sorted({row["n_depth"] for row in rows})
    numbers = {}
    for depth, before in zip(depths, [0, *depths], strict=False):
        ours = found[name, depth]
        if before and ours["n_gen"]:
            seconds = 1 / ours["median_ts"] - 1 / found[name, before]["median_ts"]
            numbers[f"cell_{depth}"] = f"{1e6 * seconds / (depth - before):.2f}"
        numbers[f"best_stock_{depth}"] = f"{ours['median_ts'] / best_stock(rows, ours):.1f}"
        numbers[f"kept_{depth}"] = f"{100 * ours['median_ts'] / found[name, depths[0]]['median_ts']:.0f}"
        for kind in STOCK:
            if (kind, depth) in found:
                numbers[f"{kind}_{depth}"] = f"{ours['median_ts'] / found[kind, depth]['median_ts']:.1f}"
    return numbers


def decode(lab: Any) -> Rows:
    lab.sidecar("4.5")
    caches = f"f16,q8_0,q4_0,subkv,subkv:{lab.sidecar('')}"
    size = lab.pick(("-n", "16", "-d", "64,2048,8000", "-r", "5"), ("-n", "4", "-d", "64,256", "-r", "2"))
    return bench(lab, "-ctk", caches, "-fa", "on,off", "-p", "0", *size)


def prefill(lab: Any) -> Rows:
    lab.sidecar("4.5")
    size = lab.pick(("-p", "512", "-d", "0,8000", "-r", "3"), ("-p", "32", "-d", "0,256", "-r", "2"))
    return bench(lab, "-ctk", "f16,q8_0,subkv", "-fa", "on,off", "-n", "0", *size)


def parallel(lab: Any) -> Rows:
    lab.sidecar("4.5")
    two = lab.pick(("-np", "2", "-n", "16", "-d", "64,4000", "-r", "3"), ("-np", "2", "-n", "4", "-d", "64", "-r", "2"))
    four = lab.pick(
        ("-np", "4", "-n", "16", "-d", "64,2000", "-r", "3"), ("-np", "4", "-n", "4", "-d", "64", "-r", "2")
    )
    rows = bench(lab, "-ctk", "f16,subkv", "-fa", "on,off", "-p", "0", *two)
    return rows + bench(lab, "-ctk", "f16,q8_0,subkv", "-fa", "on", "-p", "0", *four)


def by_test(rows: Rows) -> str:
    """A line per measurement."""
    columns: list[Column] = [
        ("test", lambda row: row["test"].split(" @")[0]),
        ("depth", lambda row: str(row["n_depth"])),
        ("cache", lambda row: label(row["cache"])),
        ("kernels", text("kernel")),
        ("tokens/s", ts),
        ("× best stock", lambda row: f"{row['median_ts'] / best_stock(rows, row):.2f}"),
    ]
    return grid(rows, columns, left=4)


def parallel_numbers(rows: Rows) -> Numbers:
    words = {2: "two", 4: "four"}
    ours = [row for row in rows if row["cache"] == "subkv"]
    return {
        f"{words[row['n_parallel']]}_{row['n_depth']}": f"{row['median_ts'] / best_stock(rows, row):.1f}"
        for row in ours
    }


def drafts(lab: Any) -> Rows:
    size = lab.pick(("-d", "2000", "-n", "64", "-r", "3"), ("-d", "64", "-n", "8", "-r", "1"))
    command = ("python", "-m", "research.speculation", *MODEL[:2], "--bases", lab.sidecar("4.5"), "-t", "2")
    rows = lab.json(*command, "-f", lab.text("argparse.py"), *size, "-o", "json")
    return [{key: value for key, value in row.items() if not key.startswith("samples")} for row in rows]


def _gains(rows: Rows) -> dict[tuple[str, str, str], str]:
    """Speed over that without drafts, by cache, task and drafts."""
    plain = {(row["cache"], row["task"]): row["median_ts"] for row in rows if row["draft"] == "none"}
    return {
        (row["cache"], row["task"], row["draft"]): f"{row['median_ts'] / plain[row['cache'], row['task']]:.2f}"
        for row in rows
    }


def drafts_markdown(rows: Rows) -> str:
    gains = _gains(rows)
    columns: list[Column] = [
        ("task", text("task")),
        ("cache", lambda row: label(row["cache"])),
        ("drafts", text("draft")),
        ("accepted", lambda row: f"{row['n_accepted']} of {row['n_drafted']}" if row["n_drafted"] else ""),
        ("tokens/s", ts),
        ("× without drafts", lambda row: gains[row["cache"], row["task"], row["draft"]]),
        ("same answer", lambda row: "yes" if row["same_answer"] else "no"),
    ]
    return grid(rows, columns, left=3)


def drafts_numbers(rows: Rows) -> Numbers:
    return {"_".join(key).replace(" ", "_"): gain for key, gain in _gains(rows).items() if key[-1] != "none"}


def deep(lab: Any) -> Rows:
    lab.sidecar("4.5")
    size = lab.pick(("-n", "16", "-d", "8000,16000,32000", "-r", "3"), ("-n", "4", "-d", "64,512", "-r", "2"))
    return bench(lab, "-ctk", "f16,subkv", "-fa", "on", "-p", "0", *size)


def kernels(lab: Any) -> Rows:
    """kernel-bench's figures: a heading with the versions, then lines that end with 18 columns per version."""
    lines = lab.run(lab.built("kernel-bench"), lab.pick("200", "2")).stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("ns (GB/s of codes)"))
    versions = lines[at].split(")", 1)[1].split()
    rows = []
    for line in lines[at + 1 :]:
        start = len(line) - 18 * len(versions)  # long words push the numbers to the right
        cells = [line[start + 18 * i : start + 18 * (i + 1)].strip() for i in range(len(versions))]
        if line.strip():
            rows.append({"figure": line[:start].strip(), **dict(zip(versions, cells, strict=True))})
    return rows


def kernels_markdown(rows: Rows) -> str:
    return grid(rows, [("op" if key == "figure" else key, text(key)) for key in rows[0]])


def server_load(lab: Any) -> Rows:
    serve = ("subkv", "serve", "-m", "M.gguf", "--bases", lab.sidecar("4.5"), "-c", "16384", "-np", "4", "-t", "2")
    n = lab.pick(1000, 12)
    with lab.server(*serve) as server:
        name = f"{n:,} requests at once, 8 tokens each"
        rows = [{"name": name, **server.load("-r", str(n), "-j", str(n), "-n", "8")}]
    clients = {"one client": "1", "four clients": "4"}
    speeds: dict[str, Rows] = {name: [] for name in clients}
    with lab.server(*serve) as server:
        for _ in range(lab.pick(3, 1)):  # interleaved, so that a busy machine slows both alike
            for name, parallel in clients.items():
                speeds[name].append(server.load("-r", lab.pick("8", "4"), "-j", parallel, "-n", "64"))
    for name, found in speeds.items():
        middle = median(row["tokens/s"] for row in found)
        rows.append({"name": f"{name}, 64 tokens each", **next(row for row in found if row["tokens/s"] == middle)})
    return rows


def server_markdown(rows: Rows) -> str:
    plain = ("requests", "answered", "errors")
    columns: list[Column] = [
        ("load on 4 slots", text("name")),
        *((key, text(key)) for key in plain),
        ("p50 s", lambda row: f"{row['p50 s']:.1f}"),
        ("p99 s", lambda row: f"{row['p99 s']:.1f}"),
        ("tokens/s", lambda row: f"{row['tokens/s']:.0f}"),
        ("RSS MiB before → after", text("RSS MiB")),
    ]
    return grid(rows, columns)


def server_numbers(rows: Rows) -> Numbers:
    one, four = (next(row["tokens/s"] for row in rows if row["name"].startswith(name)) for name in ("one", "four"))
    return {"tokens_one": f"{one:.0f}", "tokens_four": f"{four:.0f}", "tokens_ratio": f"{four / one:.1f}"}
