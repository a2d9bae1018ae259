"""The built-in texts, on which `convert MODEL` calibrates by default. Each file of texts/ is a block.

A calibration fits its kind of text, and users have all kinds. So every block is of another kind, and the first ones
differ most. Kinds matter more than tokens (numbers: research/notes/quality.md). A block has at least 2000 tokens.

- The first MEASURED blocks are documents: sensitivities are measured on them. Each is a single text, because distant
  cells matter for names and habits of the same text. Their cells also enter the statistics.
- The other blocks are for statistics. With sensitivities, statistics read few tokens besides the documents.
- statistics_stage.plan_chunks() holds out every HELD_OUT-th block. Gamma depends on held-out blocks alone, so these
  consist of short pieces of every kind.

The texts are our own, under the MIT licence, except passages in the public domain everywhere: of Shakespeare, Bacon,
Austen, Melville, Lincoln, Darwin, Kant, Goethe, Eichendorff, La Fontaine, Cervantes, Tolstoy, Confucius and Li Bai.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from converter.corpus import Text
from subkv.engine.template import Message, Template, TemplateError
from subkv.format.calibration import TextSource

FOLDER = Path(__file__).resolve().parent / "texts"
MEASURED = 7  # the first blocks, for sensitivities
LONGER = (3, 5)  # indices of the blocks from which longer chunks are cut
TOKENS = 2048  # of the statistics stage, an equal number from each of BLOCKS blocks
BLOCKS = 8  # the first ones, or with sensitivities the ones after them
_TURN = re.compile(r"^@(system|user|assistant)\n", re.M)


def read(template: Template | None = None) -> list[Text]:
    """The blocks in the order of use. The first few are always a mixture of kinds.

    template: the model's, which renders chat turns. Without one, or if it rejects a conversation, turns are plain text.
    """
    return [read_file(path, f"built-in {path.name}", template) for path in sorted(FOLDER.glob("*.txt"))]


def read_file(path: Path, name: str, template: Template | None = None) -> Text:
    """One text of this provenance, whose pieces are separated by form feeds. template is that of read()."""
    pieces = path.read_text("utf-8").split("\f\n")
    chat = any(_TURN.match(piece) for piece in pieces)
    data = "\n".join(render(template, piece) if _TURN.match(piece) else piece for piece in pieces).encode()
    return Text(TextSource(name, hashlib.sha256(data).hexdigest(), len(data)), data, special=chat)


def unmeasured(texts: Sequence[Text]) -> list[Text]:
    """The blocks of read() that are only for statistics. The last one, a mixture, is held out."""
    return list(texts[BLOCKS:])


def render(template: Template | None, piece: str) -> str:
    """A conversation in the model's format. Each turn of the piece begins with a line such as @user."""
    _, *turns = _TURN.split(piece)
    messages: list[Message] = [
        {"role": role, "content": content.strip()} for role, content in zip(turns[::2], turns[1::2], strict=True)
    ]
    if template is not None:
        try:
            return template.render(messages, answer=False)
        except TemplateError:
            pass
    return "\n".join(f"{message['role'].capitalize()}: {message['content']}\n" for message in messages)
