"""The text that `convert MODEL` calibrates on when it is given none: texts/*.txt, a block each, mixed on purpose.

A calibration fits the kind of text that it saw, and users bring every kind, so every block is of another one and the
first few are as different as can be: many kinds count for more than many tokens. A block has 2000 tokens or more, and
the first ones are a single document each: what attention looks for far back are the names and habits of the text at
hand. Sensitivities are measured on such documents, and the statistics are of all blocks: their own need few tokens, as
the cells of the measured ones are there anyway. converter/NOTES.md has numbers.

Every HELD_OUT-th of all blocks, and of those that are not measured on, is held out by observe.plan_chunks, and gamma
rests on it alone: those are of short pieces of every kind.

The texts are our own, under the MIT licence, but for passages in the public domain everywhere: of Shakespeare, Bacon,
Austen, Melville, Lincoln, Darwin, Kant, Goethe, Eichendorff, La Fontaine, Cervantes, Tolstoy, Confucius and Li Bai.

texts/held-out/ is for evaluating: a text of each of seven kinds, of 1000 to 2800 tokens, that no calibration sees.
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
TOKENS = 2048  # that other statistics are made of, of BLOCKS blocks alike
BLOCKS = 8  # the first ones, or the others where sensitivities add to them
_TURN = re.compile(r"^@(system|user|assistant)\n", re.M)


def read(template: Template | None = None) -> list[Text]:
    """The blocks in the order in which they should be used: any first few of them are a mixture.

    template: the model's, through which chat turns go; None, or where it refuses a conversation: turns as plain text.
    """
    return [_text(path, f"built-in {path.name}", template) for path in sorted(FOLDER.glob("*.txt"))]


def held_out(template: Template | None = None) -> list[Text]:
    """Texts to evaluate on, named by their kinds. template: as of read()."""
    return [_text(path, path.stem, template) for path in sorted((FOLDER / "held-out").glob("*.txt"))]


def _text(path: Path, name: str, template: Template | None) -> Text:
    pieces = path.read_text("utf-8").split("\f\n")
    chat = any(_TURN.match(piece) for piece in pieces)
    data = "\n".join(render(template, piece) if _TURN.match(piece) else piece for piece in pieces).encode()
    return Text(TextSource(name, hashlib.sha256(data).hexdigest(), len(data)), data, special=chat)


def spared(texts: Sequence[Text]) -> list[Text]:
    """Of read(): BLOCKS blocks of other texts than what is MEASURED; a mixed one comes last and is held out."""
    return list(texts[BLOCKS:])


def render(template: Template | None, piece: str) -> str:
    """A conversation, turns that begin with a line @user and so on, as the model reads it."""
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
