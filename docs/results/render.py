"""Renders results of make.py as Markdown: a page per table, and the blocks and numbers that documents quote.

A result is the JSON object of one table, measured on one machine; a table that is measured by machine has several,
those with AVX-512 first. This module needs only the standard library and runtime.busy, so that tests can render.
"""

from __future__ import annotations

import os
import re
import shlex
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from runtime.busy import LIMIT

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
LATER = {"others"}  # fields that results of earlier commits do not have
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


def is_busy(table: Any, result: Result) -> bool:
    """Whether other processes disturbed a timed table."""
    return bool(table.timed and (result.get("others") or 0.0) > LIMIT)


def _names(results: Sequence[Result]) -> list[str]:
    """A name of each machine: its kernels, with the processor if another one has the same."""
    kernels = [result["machine"]["kernel"] for result in results]
    return [
        kernel if kernels.count(kernel) == 1 else f"{result['machine']['cpu']} {kernel}"
        for kernel, result in zip(kernels, results, strict=True)
    ]


def tagged(results: Sequence[Result]) -> Rows:
    """All rows; of several machines, with the name of each as `machine`."""
    if len(results) == 1:
        return list(results[0]["rows"])
    named = zip(_names(results), results, strict=True)
    return [{**row, "machine": name} for name, result in named for row in result["rows"]]


def numbers_of(table: Any, results: Sequence[Result]) -> Numbers:
    """The numbers of the first machine by their keys, those of the others as NAME.KEY."""
    numbers = dict(table.numbers(results[0]["rows"]))
    for name, result in list(zip(_names(results), results, strict=True))[1:]:
        numbers |= {f"{name}.{key}": value for key, value in table.numbers(result["rows"]).items()}
    return numbers


def _body(table: Any, results: Sequence[Result]) -> str:
    """The table, then the reasons of skipped parts."""
    rows = tagged(results)
    parts = [table.markdown(rows)] if rows else []
    parts += [wrapped(f"Skipped: {reason}.") for result in results for reason in result["skipped"]]
    parts += [
        wrapped(f"Other work kept {result['others']:.1f} cores busy ({_machine(result)}): speeds are too low.")
        for result in results
        if is_busy(table, result)
    ]
    return "\n\n".join(parts)


def block(table: Any, results: Sequence[Result], folder: str) -> str:
    """The text between the marks of a table. folder: the path from the document to the table's page."""
    sources = [f"at commit {result['commit'][:9]} on {result['date'][:10]}, {_machine(result)}" for result in results]
    line = f"Measured {', and '.join(sources)}: `make.py --only {table.name}`, [commands]({folder}{table.name}.md)."
    return f"{_body(table, results)}\n\n{wrapped(line)}"


def _core(result: Result) -> str:
    """Clock and additions per cycle beside the speeds. A core that another machine shares has fewer additions."""
    cores = [row for row in (result["machine"], *result["rows"]) if "additions_per_cycle" in row]
    if not cores:
        return ""
    additions = sorted(row["additions_per_cycle"] for row in cores)
    each = " to ".join(dict.fromkeys(f"{n:.1f}" for n in (additions[0], additions[-1])))
    return f", {cores[0]['clock_ghz']:.1f} GHz, {each} additions per cycle"


def _facts(result: Result) -> list[str]:
    machine = result["machine"]
    changed = ", with uncommitted changes" if result["dirty"] else ""
    others = result.get("others")
    return [
        f"commit: {result['commit']}{changed}",
        f"date: {result['date']}, {result['seconds']:.0f} s"
        + ("" if others is None else f", {others:.1f} cores busy with other work"),
        f"machine: {_machine(result)}, {machine['memory_gib']:.1f} GiB of memory, "
        f"read bandwidth {machine['read_bandwidth_gbs']:.1f} GB/s"
        + _core(result)
        + (f"; {machine['features']}" if "features" in machine else ""),
        "versions: " + ", ".join(f"{name} {version}" for name, version in result["versions"].items()),
    ]


def page(table: Any, results: Sequence[Result]) -> str:
    """NAME.md: the table, and the commands and versions that reproduce it."""
    facts = [fact for result in results for fact in _facts(result)]
    commands = "\n".join(command_lines(command) for command in results[0]["commands"])
    numbers = numbers_of(table, results)
    parts = [
        f"<!-- written by docs/results/make.py --only {table.name} -->",
        f"# {table.title}",
        wrapped(table.about),
        _body(table, results),
        *([f"![{table.title}]({table.picture})"] if table.picture and results[0]["rows"] else []),
        "\n".join(wrapped(f"- {fact}", "  ") for fact in facts),
    ]
    if commands:
        parts.append(f"{wrapped(table.files)}\n\n```sh\n{commands}\n```")
    if numbers:
        parts.append(
            "Numbers that documents quote:\n\n" + "\n".join(f"- `{key}`: {value}" for key, value in numbers.items())
        )
    return "\n\n".join(part for part in parts if part) + "\n"


def documents(repo: Path) -> list[Path]:
    """README.md, research/README.md and the pages of docs/ and examples/, without those of results."""
    pages = [p for folder in ("docs", "examples") for p in (repo / folder).rglob("*.md") if p.parent.name != "results"]
    return [repo / "README.md", repo / "research" / "README.md", *sorted(pages)]


def filled(document: str, tables: dict[str, Any], results: dict[str, list[Result]], start: str) -> str:
    """A document with blocks and numbers from `results`; those without a result stay unchanged.

    start: the folder of the document in the repository, "" for its root. Raises KeyError for an unknown name.
    """

    def table(found: re.Match[str]) -> str:
        name = found[1]
        if name not in tables:
            raise KeyError(f"results: expected one of {', '.join(tables)}, found {name}")
        if name not in results:
            return found[0]
        folder = Path(os.path.relpath(tables[name].folder, start or ".")).as_posix() + "/"
        return f"<!-- results: {name} -->\n\n{block(tables[name], results[name], folder)}\n\n<!-- /results -->"

    def number(found: re.Match[str]) -> str:
        name, key = found[1], found[2]
        if name not in tables:
            raise KeyError(f"number: expected one of {', '.join(tables)}, found {name}")
        if name not in results:
            return found[0]
        numbers = numbers_of(tables[name], results[name])
        if key not in numbers:
            raise KeyError(f"number: expected one of {', '.join(numbers)} of {name}, found {key}")
        return f"<!-- number: {name}.{key} -->{numbers[key]}<!-- /number -->"

    return NUMBER.sub(number, BLOCK.sub(table, document))
