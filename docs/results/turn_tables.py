"""How many tokens llama-server evaluates twice in long conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from render import Column, Numbers, Rows, grid, text

PROGRAM = Path("tests/programs/turns.py")
DEPTH = 32000
STEPS = {  # name of a step in the results: title of its column
    "a turn edited": "turn 8 edited",
    "gone on": "turn after the edit",
    "a branch": "branch after turn 5",
    "the way back": "return to turn 10",
    "a restart": "restart",
    "edited behind it": "edit after the restart",
}


def turns(lab: Any) -> Rows:
    """Needs a build of llama.cpp's programs; SUBKV_LIB_PATH names its folder."""
    words = ("--depth", str(lab.pick(DEPTH, 2000)), "-o", "json")
    program = Path(__file__).resolve().parents[2] / PROGRAM
    done = lab.run("python", str(program), *words, shown=("python", str(PROGRAM), *words))
    steps: Rows = json.loads(done.stdout)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for step in steps:
        row = rows.setdefault((step["shape"], step["cache"]), {"shape": step["shape"], "cache": step["cache"]})
        name = "ten turns" if step["step"].startswith("turn ") else step["step"]
        for key in ("new", "again"):
            row[f"{name} {key}"] = row.get(f"{name} {key}", 0) + step[key]
            row[key] = row.get(key, 0) + step[key]
    return list(rows.values())


def _share(row: dict[str, Any]) -> str:
    return f"{100 * row['again'] / row['new']:.1f}%"


def markdown(rows: Rows) -> str:
    def again(name: str, title: str) -> Column:
        return title, lambda row: str(row[f"{name} again"])

    columns: list[Column] = [
        ("shape", text("shape")),
        ("cache", lambda row: "**subkv**" if row["cache"] == "subkv" else row["cache"]),
        ("new tokens", text("new")),
        again("ten turns", "ten turns"),
        *(again(name, title) for name, title in STEPS.items()),
        ("all steps", text("again")),
        ("share of new tokens", _share),
    ]
    return grid(rows, columns, left=2)


def numbers(rows: Rows) -> Numbers:
    """The largest share of every cache."""
    shares = {cache: [row for row in rows if row["cache"] == cache] for cache in ("subkv", "f16")}
    return {
        f"worst_{cache}": f"{max(100 * row['again'] / row['new'] for row in of_cache):.1f}"
        for cache, of_cache in shares.items()
        if of_cache
    }
