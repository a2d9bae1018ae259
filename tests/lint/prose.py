"""Pages: links resolve, paths exist, lines are short, marks of results are whole."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

from lint.files import REPO, shown

SKIPPED = {"build", "dist", "wheels", "node_modules"}
ALL = sorted(
    path
    for path in REPO.rglob("*.md")
    if not any(part in SKIPPED or part.startswith(".") for part in path.relative_to(REPO).parts)
)
GUIDES = [path for path in ALL if path.parent in (REPO, REPO / "docs")]
PAGES = [*GUIDES, REPO / "models" / "README.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
MARK = re.compile(r"^<!-- (results: \w+|/results) -->$")
WIDEST = 100
README_LINES = 150


@functools.cache
def anchors(path: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6} (.+)$", FENCE.sub("", path.read_text("utf-8")), re.M):
        text = LINK.sub(lambda link: re.sub(r"!?\[(.*)\]\(.*", r"\1", link[0]), heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {f"{slug}-{i}" if i else slug for slug, last in found.items() for i in range(last + 1)}


def links() -> Iterator[str]:
    for page in ALL:
        for target in LINK.findall(CODE.sub("", FENCE.sub("", page.read_text("utf-8")))):
            file, _, anchor = target.partition("#")
            path = (page.parent / file).resolve() if file else page
            if re.match(r"[a-z]+:", target):
                continue
            if not path.exists() or not path.is_relative_to(REPO) or (anchor and anchor not in anchors(path)):
                yield f"{shown(page)}: the link {target} leads nowhere"


def paths() -> Iterator[str]:
    """A path in backticks that begins with a folder of the repository."""
    folders = "|".join(sorted(path.name for path in REPO.iterdir() if path.is_dir() and path.name != "build"))
    for page in GUIDES:
        for path in re.findall(rf"`((?:{folders})/[\w./-]*)`", FENCE.sub("", page.read_text("utf-8"))):
            if "NAME" not in path and not (REPO / path).exists():
                yield f"{shown(page)}: {path} does not exist"


def one_line(line: str) -> bool:
    """Lines that cannot be wrapped: rows of tables, lone images or links, README's two commands."""
    return line.startswith(("|", "  |")) or " " not in line.strip() or "CMAKE_ARGS=" in line


def widths() -> Iterator[str]:
    for page in PAGES:
        for i, line in enumerate(page.read_text("utf-8").splitlines(), 1):
            if len(line) > WIDEST and not one_line(line):
                yield f"{shown(page, i)}: {len(line)} columns, expected at most {WIDEST}"
    if (n := len((REPO / "README.md").read_text("utf-8").splitlines())) > README_LINES:
        yield f"README.md: {n} lines, expected at most {README_LINES}"


def marks() -> Iterator[str]:
    """Marks of generated numbers: blocks open and close alternately; no other comment begins a line of a paragraph."""
    for page in GUIDES:
        lines = page.read_text("utf-8").splitlines()
        found = [match[1] for line in lines if (match := MARK.match(line))]
        if len(found) % 2 or any(mark.startswith("results: ") != (i % 2 == 0) for i, mark in enumerate(found)):
            yield f"{shown(page)}: blocks of results do not open and close alternately"
        for i, line in enumerate(lines, 1):
            if line.startswith("<!-- ") and not MARK.match(line):
                yield f"{shown(page, i)}: a comment begins a line of a paragraph"


RULES = {"links": links, "paths": paths, "widths": widths, "marks": marks}
