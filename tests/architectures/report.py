"""docs/architectures.md: what every architecture of the pinned llama.cpp does with a coded cache.

python tests/architectures/report.py    writes it anew (SUBKV_LIB_PATH names the libraries)
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

from engine import SUBKV  # noqa: E402
from promises import PROMISES, Finding, examine  # noqa: E402

TEXT = """# Architectures

Every architecture that the pinned llama.cpp names, tried on a tiny model of random weights. This
page is written by `python tests/architectures/report.py`; a test compares it with what it finds.

- **equals f16**: 16-bit codes of full rank give the logits of an f16 cache, within twice what f16's
  own roundings move them (flash attention or not, f16 or f32).
- **splits**: a prompt in pieces gives the logits of the prompt in one batch.
- **rollback**: a tail is removed and another decoded, as if it had never been there.
- **state**: saved and restored, of a sequence and of the whole context.
- **sequences**: two in one batch, with separate and with shared cells, and a copy.

*as f16*: an f16 cache of the pinned llama.cpp refuses that, or fails at it, too. *coded* are the
layers that hold coefficients; sliding-window and recurrent layers stay ordinary.

Some models go by another name: DeepSeek-V2, V2-Lite, V3 and R1, Kimi-K2 and GLM-4.7-Flash are
`deepseek2`, Ling 3.0 is `bailingmoe3`. These, `mistral4`, `kimi-linear` and `kimi-k3` have latent
attention (MLA): bases are made of their weights, and `convert` calibrates them.

## Sparse attention

In these architectures an indexer chooses the cells that a token attends to. Its keys have a cache
of their own, in f16 beside a coded cache; `SUBKV_INDEXER=q8_0` halves them. A coded cache holds the
K/V rows. Sizes are elements per token and layer: with a latent of r and t rotated elements, KV
heads g of d, an indexer's key of i.

| architecture | K/V row | indexer's keys | who chooses | what a token reads |
|---|---|---|---|---|
| deepseek32 | r + t | i in every layer | one choice for all heads | the k best cells |
| glm-dsa | r + t | i, in layers with an indexer | ditto | ditto |
| hy_v4 | r + t | ditto | the layer, or one before it | ditto |
| dots3note | r + t in full layers | ditto | ditto | ditto; sliding layers: their window |
| glm5-next | r, beside recurrent layers | 3 i: key, gate, mean of a pool | ditto | pools of cells, and the rest |
| qwen4exp | 2 g d, beside recurrent layers | i | one choice for all heads | blocks of cells, and the rest |
| minimax-m3 | 2 g d | i | every KV head | blocks of positions, the last ones always |
| deepseek4 | a window, and compressed rows | i of compressed rows | one choice | refused: its own cache |

DeepSeek-V3.2 has r 512, t 64, i 128 and k 2048. Bytes per token and layer: 1152 + 256 in f16,
306 + 256 at 4.25 bits (0.40 of it), 306 + 136 with an indexer in q8_0 (0.31), 270 + 136 at 3.75
bits (0.29). With q8_0, 97.7 to 100% of 256 chosen of 2048 or 4096 cells are those chosen in f16
(deepseek32, glm-dsa, hy_v4, dots3note of random weights).

- Rows of latent attention are stored one after the other, others in tiles. Few tokens, or many
  query heads on one row: a token's cells are copied into tiles, and attended to alone. Otherwise
  all tiles are read under a mask; those that hold no chosen cell are skipped
  ([NOTES](../kernels/NOTES.md#chosen-cells)).
- A choice is llama.cpp's own. Where two cells are as good as roundings are large, another way of
  splitting a prompt may choose the other one, with every cache type. Splits are not equal to the
  bit here.
- minimax-m3 attends to all cells unless flash attention is on, and where sequences share cells
  (`-kvu`, *as f16* below); so does llama.cpp with f16.
- On GPU backends minimax-m3 and t5 are refused, whose KV heads have masks of their own. CUDA and
  Vulkan attend under a mask over all cells; roundings that differ from the CPU's may choose another
  cell, too.

"""


def architectures() -> list[str]:
    """Names of all architectures that libllama knows, in its order."""
    name_of = SUBKV._Z13llm_arch_name8llm_arch  # llm_arch_name(llm_arch)
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.c_int]
    names: list[str] = []
    while (name := name_of(len(names)).decode()) != "(unknown)":
        names.append(name)
    return names


def row(arch: str, found: Finding) -> str:
    """An architecture's line of the table."""
    if found.status != "supported":
        reason = found.reason.partition(" because ")[2].partition("; use ")[0] or found.reason
        return f"| {arch} | {found.status} |" + " |" * (1 + len(PROMISES)) + f" {reason} |"
    marks = ["as f16" if math.isnan(found.distances[promise]) else "yes" for promise in PROMISES]
    return f"| {arch} | supported | {found.n_layer_coded} of {found.n_layer} | {' | '.join(marks)} | |"


def summary(rows: Iterable[str]) -> str:
    """How many of those with a K/V cache are supported, as a sentence."""
    status = [line.split(" | ")[1] for line in rows]
    n, refused = status.count("supported"), status.count("refused")
    return (
        f"Of {n + refused} architectures with a K/V cache {n} are supported ({100 * n / (n + refused):.0f} %),"
        f" {refused} are refused.\n{status.count('no cache')} others have no such cache,"
        f" {status.count('not built')} are no models of their own or do not run.\n"
    )


def page(rows: list[str]) -> str:
    """The whole page."""
    head = ["architecture", "", "coded", *PROMISES, "reason"]
    table = [f"| {' | '.join(head)} |".replace("|  |", "| |"), "|" + "---|" * len(head), *rows]
    return TEXT + summary(rows) + "\n" + "\n".join(table) + "\n"


def written() -> list[str]:
    """The lines of the page's last table, below its head."""
    table = PAGE.read_text("utf-8").rpartition("\n\n")[2]
    return table.splitlines()[2:]


def main() -> None:
    rows = []
    for arch in architectures():
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(arch, examine(arch, Path(folder))))
        print(rows[-1], flush=True)
    PAGE.write_text(page(rows), "utf-8")


if __name__ == "__main__":
    main()
