"""How many tokens llama-server evaluates twice in long conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from render import Column, Numbers, Rows, grid, text

PROGRAM = Path("tests/programs/turns.py")
DEPTH = 32000
STEPS = ("a turn edited", "gone on", "a branch", "the way back", "a restart", "edited behind it")


def turns(lab: Any) -> Rows:
    """Needs a build with llama.cpp's programs, named by SUBKV_LIB_PATH."""
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
    def again(name: str) -> Column:
        return name, lambda row: str(row[f"{name} again"])

    columns: list[Column] = [
        ("shape", text("shape")),
        ("cache", lambda row: "**subkv**" if row["cache"] == "subkv" else row["cache"]),
        ("new", text("new")),
        again("ten turns"),
        *(again(name) for name in STEPS),
        ("all", text("again")),
        ("of the new", _share),
    ]
    return grid(rows, columns, left=2)


def numbers(rows: Rows) -> Numbers:
    """The largest share of every cache."""
    shares = {cache: [row for row in rows if row["cache"] == cache] for cache in ("subkv", "f16")}
    return {
        f"worst_{cache}": f"{max(100 * row['again'] / row['new'] for row in found):.1f}"
        for cache, found in shares.items()
        if found
    }
