"""The built-in texts, on which `convert MODEL` calibrates by default: texts/*.txt, one block per file.

A calibration fits the kind of its text, and users have all kinds of text. So every block is of another kind, and the
first few differ most: many kinds matter more than many tokens. A block has at least 2000 tokens. Each of the first ones
is a single document, because attention far back looks for names and habits of the same text. Sensitivities are measured
on these documents. The statistics cover all blocks; they read few tokens of their own, because the cells of the
documents enter them, too. converter/NOTES.md has numbers.

statistics_stage.plan_chunks holds out every HELD_OUT-th block, of all or of those that are not documents. Gamma depends
on these alone, so they consist of short pieces of every kind.

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
MEASURED = 7  # the first blocks, for sensitivities; their cells enter the statistics, too
LONGER = (3, 5)  # indices of those of which more tokens scale matrices and correct predictions
TOKENS = 2048  # of the other statistics, an equal number from each of BLOCKS blocks
BLOCKS = 8  # the first ones, or the others where sensitivities add to them
_TURN = re.compile(r"^@(system|user|assistant)\n", re.M)


def read(template: Template | None = None) -> list[Text]:
    """The blocks in the order of their use: any first few of them are a mixture.

    template: the model's, which renders chat turns; without one, or where it rejects a conversation, turns are plain
    text.
    """
    return [read_file(path, f"built-in {path.name}", template) for path in sorted(FOLDER.glob("*.txt"))]


def read_file(path: Path, name: str, template: Template | None = None) -> Text:
    """One text, named for provenance. Pieces end with a form feed; template: as in read()."""
    pieces = path.read_text("utf-8").split("\f\n")
    chat = any(_TURN.match(piece) for piece in pieces)
    data = "\n".join(render(template, piece) if _TURN.match(piece) else piece for piece in pieces).encode()
    return Text(TextSource(name, hashlib.sha256(data).hexdigest(), len(data)), data, special=chat)


def unmeasured(texts: Sequence[Text]) -> list[Text]:
    """Of read(): BLOCKS blocks without the texts of those that are MEASURED; a mixed one is last and is held out."""
    return list(texts[BLOCKS:])


def render(template: Template | None, piece: str) -> str:
    """A conversation as the model reads it. piece: turns that begin with a line such as @user."""
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
