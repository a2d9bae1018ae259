"""docs/architectures.md: support of a coded cache for every architecture of the pinned llama.cpp.

python tests/architectures/report.py    rewrites it (SUBKV_LIB_PATH names the libraries)
"""

from __future__ import annotations

import ctypes
import math
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
PAGE = TESTS.parent / "docs" / "architectures.md"
if __name__ == "__main__":
    sys.path[:0] = [str(TESTS), *(str(TESTS / room) for room in ("runtime", "format")), str(TESTS.parent / "python")]

from guarantees import GUARANTEES, Support, examine  # noqa: E402

from subkv.native import library  # noqa: E402

TEXT = """# Architectures: for users who ask whether a model works

All architectures of the pinned llama.cpp, tested with tiny models of random weights
(`python tests/architectures/report.py` writes this page).

| guarantee of a supported architecture | meaning |
|---|---|
| equals f16 | 16-bit codes of full rank give the logits of an f16 cache, within twice the effect of its rounding |
| splits | a prompt in pieces gives the same logits as in one batch |
| rollback | a removed tail leaves no trace in later logits |
| state | a state of a sequence, or of the whole context, is saved and restored |
| sequences | two sequences run in one batch, with separate and with shared cells; one is copied |

*as f16*: an f16 cache of the pinned llama.cpp also refuses this guarantee, or fails. Where *some
layers* are coded, the others keep ordinary caches: sliding windows in q8_0
([limits.md](limits.md#models)), recurrent layers their state.

DeepSeek-V2, V2-Lite, V3 and R1, Kimi-K2 and GLM-4.7-Flash are `deepseek2` in llama.cpp; Ling 3.0 is
`bailingmoe3`.

"""

SPARSE = """
## Sparse attention

An indexer chooses the cells that a token attends to: single cells in deepseek32, glm-dsa, hy_v4 and
dots3note, pools or blocks of cells in glm5-next, qwen4exp and minimax-m3. The K/V rows are coded.
The indexer's keys have a separate cache in f16; with `SUBKV_INDEXER=q8_0`, which halves it, 97.7 to
100% of the chosen cells are the same (random weights). DeepSeek-V3.2, bytes per token and layer,
K/V row + indexer's key, and their ratio to f16:

| f16 | 4.25 bits | 4.25 bits, indexer q8_0 | 3.75 bits, indexer q8_0 |
|---:|---:|---:|---:|
| 1152 + 256 | 306 + 256 (0.40) | 306 + 136 (0.31) | 270 + 136 (0.29) |

- If two cells differ by less than the rounding, another split of the prompt, or a GPU, may choose
  the other cell, with every cache type. So different splits are not bit-identical here.
- minimax-m3 attends to all cells if flash attention is off, or if sequences share cells (`-kvu`),
  as with f16. GPU backends refuse minimax-m3 and t5, whose KV heads have separate masks.
"""


def architectures() -> list[str]:
    """Names of all architectures that libllama knows, in its order."""
    llama = ctypes.CDLL(str(library.lib_dir() / f"libllama{library.SUFFIX}"))
    name_of = llama._Z13llm_arch_name8llm_arch  # llm_arch_name(llm_arch)
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.c_int]
    names: list[str] = []
    while (name := name_of(len(names)).decode()) != "(unknown)":
        names.append(name)
    return names


def row(arch: str, support: Support) -> tuple[str, str, str]:
    """An architecture, its group, and its reason or its exceptions."""
    if support.status != "supported":
        reason = support.reason.partition(" because ")[2].partition("; use ")[0] or support.reason
        return arch, support.status, reason
    layers = "every layer coded" if support.n_layer_coded == support.n_layer else "some layers coded"
    exceptions = [guarantee for guarantee in GUARANTEES if math.isnan(support.distances[guarantee])]
    return arch, layers, f"as f16: {', '.join(exceptions)}" if exceptions else ""


def is_supported(group: str) -> bool:
    return group.endswith("coded")


def summary(rows: Iterable[tuple[str, str, str]]) -> str:
    """A sentence with the number of supported architectures among those with a K/V cache."""
    groups = [group for _, group, _ in rows]
    n, refused = sum(map(is_supported, groups)), groups.count("refused")
    return (
        f"Of {n + refused} architectures with a K/V cache {n} are supported ({100 * n / (n + refused):.0f} %),"
        f" {refused} are refused.\n{groups.count('no cache')} others have no such cache,"
        f" {groups.count('not built')} are not separate models or do not run.\n"
    )


def page(rows: list[tuple[str, str, str]]) -> str:
    """The whole page. Architectures of a group have llama.cpp's order."""
    groups: dict[tuple[str, str], list[str]] = {}
    for arch, group, note in rows:
        groups.setdefault((group, note), []).append(arch)
    order = ("every layer coded", "some layers coded", "refused", "no cache", "not built")
    table = ["| | exceptions, reason | architectures |", "|---|---|---|"]
    for key in sorted(groups, key=lambda key: order.index(key[0])):
        table.append(f"| {key[0]} | {key[1] or 'none'} | {', '.join(groups[key])} |")
    return TEXT + summary(rows) + "\n" + "\n".join(table) + "\n" + SPARSE


def written() -> list[tuple[str, str, str]]:
    """The rows of the page, in llama.cpp's order."""
    table = PAGE.read_text("utf-8").partition("| | exceptions, reason |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = []
    for line in table:
        group, note, listed = line.strip("| ").split(" | ")
        rows += [(arch, group, "" if note == "none" else note) for arch in listed.split(", ")]
    order = architectures()
    return sorted(rows, key=lambda row: order.index(row[0]))


def main() -> None:
    rows = []
    for arch in architectures():
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(arch, examine(arch, Path(folder))))
        print(rows[-1], flush=True)
    PAGE.write_text(page(rows), "utf-8")


if __name__ == "__main__":
    main()
