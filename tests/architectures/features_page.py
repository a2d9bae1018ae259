"""docs/features.md: features by backends and by kinds of architecture.

python tests/architectures/features_page.py    writes it anew (SUBKV_LIB_PATH names the libraries of a CPU build)
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

HEAD = """# Features

What a coded cache can do, by backend and by kind of architecture. This page is written by
`python tests/architectures/features_page.py`;
[test_features.py](../tests/architectures/test_features.py) tries every cell that a build can try,
and compares it with the page. All architectures: [architectures.md](architectures.md).

- **adaptive bases**: bases follow the text (`--adapt`).
- **latent rows**: one row per token holds keys and values (MLA).
- **context shift**: the oldest tokens go, the others move (`--context-shift`).
- **sparse selection**: an indexer chooses the cells that a token attends to.
- **several sequences**: in one batch, with separate and with shared cells.
- **states**: saved and restored, of a sequence and of the whole context.
- **prefix restore**: an evaluated prompt comes back from a file (`SUBKV_STORE`).
- **heads above 256**: of 320 elements, or a latent of 320.
- **drafts**: tokens that were guessed are evaluated together, and the wrong ones taken back.
- **pictures**: batches of embeddings, at the positions and under the masks of their kind.

Cells: *yes*, and a test shows it; *refused*, with the sentence of that number below; *as f16*: an
f16 cache of the pinned llama.cpp refuses that, or fails at it, too; *not tried*; –: there is no
such thing.

## Backends

CUDA's kernels ran in an emulation, Vulkan's on lavapipe, Triton's in its interpreter
([gpu.md](gpu.md)): no GPU has run any of them.

"""
KINDS_HEAD = """
## Kinds of architecture

Tiny models, on the CPU: {models}.
"Heads above 256" of MLA and sparse are latents. `test_features.py::test_kinds` shows every *yes*:
exact codes give what an f16 cache gives. Drafts in the server: where a recurrent state keeps no
snapshots (as f16) it goes back to a checkpoint.

"""


def _wrapped(line: str) -> str:
    return textwrap.fill(line, 100, subsequent_indent="   ", break_long_words=False, break_on_hyphens=False)


def table(title: str, columns: Iterable[str], cell: Callable[[str, str], Cell]) -> str:
    """A table of all features, the tests that show a yes where they are named, and the sentences of refusals."""
    names = list(columns)
    lines = [f"| {title} | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    reasons: list[str] = []
    for feature in FEATURES:
        marks = []
        for column in names:
            found = cell(feature, column)
            mark = "–" if found.mark == "none" else found.mark
            if found.mark == "yes" and found.text:
                mark = f"[yes](../{found.text.partition('::')[0]})"
            elif found.text:
                if found.text not in reasons:
                    reasons.append(found.text)
                mark += f" ({reasons.index(found.text) + 1})"
            marks.append(mark)
        lines.append(f"| {feature} | {' | '.join(marks)} |")
    listed = [_wrapped(f"{i}. {reason}") for i, reason in enumerate(reasons, 1)]
    return "\n".join(lines) + "\n" + ("\n" + "\n".join(listed) + "\n" if listed else "")


def page(kinds: dict[str, dict[str, Cell]]) -> str:
    """The whole page. kinds: what was found, by feature and kind."""
    models = ", ".join(f"`{arch}`" for arch in KINDS.values())
    return (
        HEAD
        + table("by backend", BACKENDS, lambda feature, backend: TABLE[backend][feature])
        + KINDS_HEAD.format(models=models)
        + table("by kind", KINDS, lambda feature, kind: kinds[feature][kind])
    )


def written() -> dict[str, dict[str, Cell]]:
    """What the page says of kinds, by feature and kind."""
    head, _, text = PAGE.read_text("utf-8").partition("| by kind |")[2].partition("\n")
    sentences = {
        n: " ".join(said.split()) for n, said in re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |\Z)", text, re.M | re.S)
    }
    kinds = [name.strip() for name in head.split("|")[:-1]]
    found: dict[str, dict[str, Cell]] = {}
    for line in re.findall(r"^\| (.*) \|$", text, re.M):
        feature, *marks = line.split(" | ")
        for kind, mark in zip(kinds, marks, strict=True):
            name, _, number = mark.rstrip(")").partition(" (")
            cell = Cell("none" if name == "–" else name, sentences.get(number, ""))
            found.setdefault(feature, {})[kind] = cell
    return found


def main() -> None:
    found: dict[str, dict[str, Cell]] = {}
    for feature in FEATURES:
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as folder:
                found.setdefault(feature, {})[kind] = try_feature(feature, kind, Path(folder))
            print(feature, kind, found[feature][kind], flush=True)
    PAGE.write_text(page(found), "utf-8")


if __name__ == "__main__":
    main()
