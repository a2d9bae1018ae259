"""docs/features.md: features by backends and by kinds of architecture.

python tests/architectures/features_page.py    rewrites it (SUBKV_LIB_PATH names the libraries of a CPU build)
"""

from __future__ import annotations

import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
PAGE = TESTS.parent / "docs" / "features.md"
if __name__ == "__main__":
    sys.path[:0] = [str(TESTS), *(str(TESTS / room) for room in ("runtime", "format")), str(TESTS.parent / "python")]

from features import BACKENDS, FEATURES, KINDS, TABLE, Cell, try_feature  # noqa: E402

HEAD = """# Features: for users who ask what works with what

`python tests/architectures/features_page.py` writes this page, and
[test_features.py](../tests/architectures/test_features.py) compares it with every entry that a
build can test. *yes*: a test shows it. *refused (n)*: with sentence n below the table. *as f16*: an
f16 cache of the pinned llama.cpp also refuses it, or fails.

Adaptive bases change with the text (`--adapt`). A latent row holds keys and values (MLA). Sparse
selection: an indexer chooses the cells that a token attends to. Several sequences are in one batch,
with separate and with shared cells. Heads above 256 have 320 elements.

## Backends

[gpu.md](gpu.md) says where these ran.

"""
KINDS_HEAD = """
## Kinds of architecture

Tiny models on the CPU: {models}.
In the columns MLA and sparse, "heads above 256" are latents. Drafts in the server: a recurrent
state without snapshots (as f16) returns to a checkpoint.

"""


def _wrapped(line: str) -> str:
    return textwrap.fill(line, 100, subsequent_indent="   ", break_long_words=False, break_on_hyphens=False)


def table(title: str, columns: Iterable[str], cell: Callable[[str, str], Cell]) -> str:
    """A table of all features with links to tests, then the numbered sentences of refusals."""
    names = list(columns)
    lines = [f"| {title} | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    reasons: list[str] = []
    for feature in FEATURES:
        marks = []
        for column in names:
            entry = cell(feature, column)
            mark = "–" if entry.mark == "none" else entry.mark
            if entry.mark == "yes" and entry.text:
                mark = f"[yes](../{entry.text.partition('::')[0]})"
            elif entry.text:
                if entry.text not in reasons:
                    reasons.append(entry.text)
                mark += f" ({reasons.index(entry.text) + 1})"
            marks.append(mark)
        lines.append(f"| {feature} | {' | '.join(marks)} |")
    listed = [_wrapped(f"{i}. {reason}") for i, reason in enumerate(reasons, 1)]
    return "\n".join(lines) + "\n" + ("\n" + "\n".join(listed) + "\n" if listed else "")


def page(kinds: dict[str, dict[str, Cell]]) -> str:
    """The complete page. kinds: results by feature and kind."""
    models = ", ".join(f"`{arch}`" for arch in KINDS.values())
    return (
        HEAD
        + table("by backend", BACKENDS, lambda feature, backend: TABLE[backend][feature])
        + KINDS_HEAD.format(models=models)
        + table("by kind", KINDS, lambda feature, kind: kinds[feature][kind])
    )


def written() -> dict[str, dict[str, Cell]]:
    """The page's entries, by feature and kind."""
    head, _, text = PAGE.read_text("utf-8").partition("| by kind |")[2].partition("\n")
    sentences = {
        n: " ".join(note.split()) for n, note in re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |\Z)", text, re.M | re.S)
    }
    kinds = [name.strip() for name in head.split("|")[:-1]]
    by_feature: dict[str, dict[str, Cell]] = {}
    for line in re.findall(r"^\| (.*) \|$", text, re.M):
        feature, *marks = line.split(" | ")
        for kind, mark in zip(kinds, marks, strict=True):
            name, _, number = mark.rstrip(")").partition(" (")
            cell = Cell("none" if name == "–" else name, sentences.get(number, ""))
            by_feature.setdefault(feature, {})[kind] = cell
    return by_feature


def main() -> None:
    by_feature: dict[str, dict[str, Cell]] = {}
    for feature in FEATURES:
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as folder:
                by_feature.setdefault(feature, {})[kind] = try_feature(feature, kind, Path(folder))
            print(feature, kind, by_feature[feature][kind], flush=True)
    PAGE.write_text(page(by_feature), "utf-8")


if __name__ == "__main__":
    main()
