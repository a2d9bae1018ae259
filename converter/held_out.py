"""Built-in texts to evaluate on: of seven kinds, 1000 to 2800 tokens each, that no calibration reads.

`subkv check` scores a model on them. Their licence is that of the texts of builtin.py.
"""

from __future__ import annotations

from pathlib import Path

from converter.builtin import read_file
from converter.corpus import Text

FOLDER = Path(__file__).resolve().parent / "held-out"


def read() -> list[Text]:
    """The texts, named by their kinds. Turns of the chat are plain text."""
    return [read_file(path, path.stem) for path in sorted(FOLDER.glob("*.txt"))]
