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

from engine import SUBKV  # noqa: E402
from guarantees import GUARANTEES, Support, examine  # noqa: E402

TEXT = """# Architectures

This page lists every architecture of the pinned llama.cpp. Tests run each on a tiny model with
random weights. `python tests/architectures/report.py` writes the page from their results, and a
test compares both.

- **equals f16**: 16-bit codes of full rank give the logits of an f16 cache, within twice what f16's
  own roundings move them (flash attention or not, f16 or f32).
- **splits**: a prompt in pieces gives the same logits as the prompt in one batch.
- **rollback**: after a tail is removed and another text decoded, logits are those of a sequence
  without that tail.
- **state**: a state of a sequence, or of the whole context, is saved and restored.
- **sequences**: two sequences run in one batch, with separate and with shared cells, and one is
  copied.

The column *coded* counts the layers that hold coefficients; sliding-window and recurrent layers
keep ordinary caches. *as f16* means that an f16 cache of the pinned llama.cpp also refuses this, or
fails.

Some models have other names in llama.cpp: DeepSeek-V2, V2-Lite, V3 and R1, Kimi-K2 and
GLM-4.7-Flash are `deepseek2`, Ling 3.0 is `bailingmoe3`. These architectures, `mistral4`,
`kimi-linear` and `kimi-k3` have latent attention (MLA). Their bases can be derived from the
weights, and `convert` calibrates them.

## Sparse attention

In these architectures an indexer chooses the cells that a token attends to. The K/V rows are coded.
The indexer's keys have a separate cache in f16; `SUBKV_INDEXER=q8_0` halves its size. The table
gives sizes in elements per token and layer. r: elements of a latent; t: its rotated elements; g: KV
heads; d: size of a head; i: size of an indexer's key.

| architecture | K/V row | indexer's keys | selected by | cells that a token reads |
|---|---|---|---|---|
| deepseek32 | r + t | i in every layer | the layer, for all heads | the k best cells |
| glm-dsa | r + t | i, in layers with an indexer | ditto | ditto |
| hy_v4 | r + t | ditto | the layer, or one before it | ditto |
| dots3note | r + t in full layers | ditto | ditto | ditto; sliding layers: their window |
| glm5-next | r, beside recurrent layers | 3 i: key, gate, mean of a pool | ditto | pools of cells, and the rest |
| qwen4exp | 2 g d, beside recurrent layers | i | the layer, for all heads | blocks of cells, and the rest |
| minimax-m3 | 2 g d | i | every KV head | blocks of positions, always the last blocks |
| deepseek4 | a window, and compressed rows | i of compressed rows | the layer | refused: special cache |

DeepSeek-V3.2 has r 512, t 64, i 128 and k 2048. K/V row and indexer's key take these bytes per
token and layer: 1152 + 256 in f16, 306 + 256 at 4.25 bits (0.40 of f16), 306 + 136 with an indexer
in q8_0 (0.31), 270 + 136 at 3.75 bits (0.29). In tests that choose 256 of 2048 or 4096 cells, an
indexer in q8_0 chooses 97.7 to 100% of the cells that it chooses in f16 (deepseek32, glm-dsa,
hy_v4, dots3note with random weights).

- Rows of latent attention are stored one after another, other rows in tiles. With few tokens, or
  many query heads per row, a token's cells are copied into tiles, and only these are attended to.
  Otherwise attention reads all tiles under a mask, and skips tiles without a chosen cell
  ([NOTES](../kernels/NOTES.md#chosen-cells)).
- llama.cpp makes the choice. If two cells differ by less than the rounding, another split of the
  prompt may choose the other cell, with every cache type. So different splits are not bit-identical
  here.
- minimax-m3 attends to all cells if flash attention is off, or if sequences share cells (`-kvu`,
  *as f16* below). llama.cpp does the same with f16.
- GPU backends refuse minimax-m3 and t5, because their KV heads have separate masks. CUDA and Vulkan
  attend under a mask over all cells. Their rounding differs from the CPU's, so they may choose
  other cells.

"""


def architectures() -> list[str]:
    """Names of all architectures that libllama knows, in its order."""
    name_of = SUBKV._Z13llm_arch_name8llm_arch  # llm_arch_name(llm_arch)
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.c_int]
    names: list[str] = []
    while (name := name_of(len(names)).decode()) != "(unknown)":
        names.append(name)
    return names


def row(arch: str, support: Support) -> str:
    """An architecture's line of the table."""
    if support.status != "supported":
        reason = support.reason.partition(" because ")[2].partition("; use ")[0] or support.reason
        return f"| {arch} | {support.status} |" + " |" * (1 + len(GUARANTEES)) + f" {reason} |"
    marks = ["as f16" if math.isnan(support.distances[guarantee]) else "yes" for guarantee in GUARANTEES]
    return f"| {arch} | supported | {support.n_layer_coded} of {support.n_layer} | {' | '.join(marks)} | |"


def summary(rows: Iterable[str]) -> str:
    """A sentence with the number of supported architectures among those with a K/V cache."""
    status = [line.split(" | ")[1] for line in rows]
    n, refused = status.count("supported"), status.count("refused")
    return (
        f"Of {n + refused} architectures with a K/V cache {n} are supported ({100 * n / (n + refused):.0f} %),"
        f" {refused} are refused.\n{status.count('no cache')} others have no such cache,"
        f" {status.count('not built')} are not separate models or do not run.\n"
    )


def page(rows: list[str]) -> str:
    """The whole page."""
    head = ["architecture", "", "coded", *GUARANTEES, "reason"]
    table = [f"| {' | '.join(head)} |".replace("|  |", "| |"), "|" + "---|" * len(head), *rows]
    return TEXT + summary(rows) + "\n" + "\n".join(table) + "\n"


def written() -> list[str]:
    """The lines of the page's last table, without its heading."""
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
