"""Renders results of make.py as Markdown: a page per table, and the blocks and numbers that documents quote.

A result is the JSON object of one table. This module needs only the standard library, so that tests can render.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Rows = list[Row]
Result = dict[str, Any]
Numbers = dict[str, str]  # key → text that documents quote
Column = tuple[str, Callable[[Row], str]]  # title, cell

DEFAULT = "default.gguf"  # bases at convert's default budget
RANDOM = "subkv random"  # bases of research.shapes
COLUMNS = 100  # of a document's lines; rows of tables may be longer
FIELDS = {
    "name": str,
    "commands": list,
    "commit": str,
    "dirty": bool,
    "quick": bool,
    "date": str,
    "machine": dict,
    "versions": dict,
    "seconds": (int, float),
    "skipped": list,
    "rows": list,
}
BLOCK = re.compile(r"^<!-- results: (\w+) -->\n(.*?)^<!-- /results -->$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"<!-- number: (\w+)\.([\w.]+) -->(.*?)<!-- /number -->", re.DOTALL)


def grid(rows: Sequence[Row], columns: Sequence[Column], left: int = 1) -> str:
    """A Markdown table; the first `left` columns are aligned left."""
    lines = [
        "| " + " | ".join(title for title, _ in columns) + " |",
        "|" + "---|" * left + "---:|" * (len(columns) - left),
    ]
    lines += ["| " + " | ".join(cell(row).replace("|", "\\|") for _, cell in columns) + " |" for row in rows]
    return "\n".join(lines)


def label(name: str) -> str:
    """A cache's name in tables; subkv's are bold."""
    name = name.split(" fa=")[0]
    named = {"subkv": "subkv `--kv-bits 4.5`", f"subkv:{DEFAULT}": "subkv, the default", RANDOM: "subkv, 4.2 bits"}
    if name in named:
        return f"**{named[name]}**"
    found = re.fullmatch(r"subkv(?: |:s)([\d.]+?)(?:\.gguf)?( uncalibrated)?", name)
    return f"**subkv `--kv-bits {found[1]}`{', uncalibrated' if found[2] else ''}**" if found else name


def plain(value: float) -> str:
    """Two significant digits."""
    return f"{value:#.2g}" if value >= 1e-3 else f"{value:.1e}" if value < 1e-4 else f"{value:.5f}"


def text(key: str) -> Callable[[Row], str]:
    """A cell with an unformatted value."""
    return lambda row: str(row[key])


def wrapped(prose: str, indent: str = "") -> str:
    """Prose in lines of at most COLUMNS, all but the first indented."""
    return textwrap.fill(prose, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def command_lines(command: str) -> str:
    """A shell command, wrapped at COLUMNS."""
    lines, line = [], ""
    for word in map(shlex.quote, shlex.split(command)):
        if line and len(line) + len(word) + 3 > COLUMNS:
            lines.append(line + " \\")
            line = "   "
        line += f" {word}" if line else word
    return "\n".join([*lines, line])


def _machine(result: Result) -> str:
    machine = result["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['kernel']} kernels"


def _body(table: Any, result: Result) -> str:
    """The table, then the reasons of skipped parts."""
    parts = [table.markdown(result["rows"])] if result["rows"] else []
    parts += [wrapped(f"Skipped: {reason}.") for reason in result["skipped"]]
    return "\n\n".join(parts)


def block(table: Any, result: Result, folder: str) -> str:
    """The text between the marks of a table. folder: the path from the document to the results."""
    source = f"at commit {result['commit'][:9]} on {result['date'][:10]}, {_machine(result)}"
    line = f"Measured {source}: `make.py --only {table.name}`, [commands]({folder}{table.name}.md)."
    return f"{_body(table, result)}\n\n{wrapped(line)}"


def page(table: Any, result: Result) -> str:
    """NAME.md: the table, and the commands and versions that reproduce it."""
    machine = result["machine"]
    changed = ", with uncommitted changes" if result["dirty"] else ""
    facts = [
        f"commit: {result['commit']}{changed}",
        f"date: {result['date']}, {result['seconds']:.0f} s",
        f"machine: {_machine(result)}, {machine['memory_gib']:.1f} GiB of memory, "
        f"read bandwidth {machine['read_bandwidth_gbs']:.1f} GB/s",
        "versions: " + ", ".join(f"{name} {version}" for name, version in result["versions"].items()),
    ]
    commands = "\n".join(command_lines(command) for command in result["commands"])
    numbers = table.numbers(result["rows"])
    parts = [
        f"<!-- written by docs/results/make.py --only {table.name} -->",
        f"# {table.title}",
        wrapped(table.about),
        _body(table, result),
        *([f"![{table.title}]({table.picture})"] if table.picture and result["rows"] else []),
        "\n".join(wrapped(f"- {fact}", "  ") for fact in facts),
    ]
    if commands:
        about = (
            "`M.gguf` is the demo model, `calib.safetensors` its calibration out of `models/`; `subkv` and `python` "
            "are those of the environment."
        )
        parts.append(f"{wrapped(about)}\n\n```sh\n{commands}\n```")
    if numbers:
        parts.append(
            "Numbers that documents quote:\n\n" + "\n".join(f"- `{key}`: {value}" for key, value in numbers.items())
        )
    return "\n\n".join(part for part in parts if part) + "\n"


def documents(repo: Path) -> list[Path]:
    """README.md and the pages of docs/, without those of results."""
    return [repo / "README.md", *sorted(p for p in (repo / "docs").rglob("*.md") if p.parent.name != "results")]


def folder(document: Path, repo: Path) -> str:
    """The path from a document to the folder of results."""
    return (
        "docs/results/" if document.parent == repo else "results/" if document.parent.name == "docs" else "../results/"
    )


def filled(document: str, tables: dict[str, Any], results: dict[str, Result], folder: str) -> str:
    """A document with blocks and numbers from `results`; those without a result stay unchanged.

    folder: the path from the document to the results, "" or ending in "/". Raises KeyError for an unknown name.
    """

    def table(found: re.Match[str]) -> str:
        name = found[1]
        if name not in tables:
            raise KeyError(f"results: expected one of {', '.join(tables)}, found {name}")
        if name not in results:
            return found[0]
        return f"<!-- results: {name} -->\n\n{block(tables[name], results[name], folder)}\n\n<!-- /results -->"

    def number(found: re.Match[str]) -> str:
        name, key = found[1], found[2]
        if name not in tables:
            raise KeyError(f"number: expected one of {', '.join(tables)}, found {name}")
        if name not in results:
            return found[0]
        numbers = tables[name].numbers(results[name]["rows"])
        if key not in numbers:
            raise KeyError(f"number: expected one of {', '.join(numbers)} of {name}, found {key}")
        return f"<!-- number: {name}.{key} -->{numbers[key]}<!-- /number -->"

    return NUMBER.sub(number, BLOCK.sub(table, document))
