"""The text that `convert MODEL` calibrates on when it is given none: texts/*.txt, mixed on purpose.

A calibration fits the kind of text that it saw, and users bring every kind. So every block below is about a chunk of
2048 tokens of one kind, in an order in which the first few are as different as can be. Kinds do not mix within a
block but for one: what attention looks for far back is text of the same kind. converter/NOTES.md has the numbers.

The texts are our own, under the MIT licence, but for passages in the public domain everywhere: of Shakespeare, Bacon,
Austen, Melville, Lincoln, Darwin, Kant, Goethe, Eichendorff, La Fontaine, Cervantes, Tolstoy, Confucius and Li Bai.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from converter.corpus import Text
from subkv.engine.template import Message, Template, TemplateError
from subkv.format.calibration import TextSource

FOLDER = Path(__file__).resolve().parent / "texts"
# A kind that stands here twice has its pieces split in two. Every HELD_OUT-th block is held out by observe.plan_chunks:
# gamma and predictions rest on it alone, so those are of short pieces of every kind.
ORDER = (
    *("prose", "python", "chat", "german", "data", "fiction", "docs", "mixed"),
    *("languages", "code", "prose", "python", "chat", "german", "data", "mixed"),
)
TOKENS = 16384  # the knee: more bought nothing (converter/NOTES.md)
_TURN = re.compile(r"^@(system|user|assistant)\n", re.M)


def read(template: Template | None = None) -> list[Text]:
    """The blocks in the order in which they should be used: any first few of them are a mixture.

    template: the model's, through which chat turns go; None, or where it refuses a conversation: turns as plain text.
    """
    parts: dict[str, list[str]] = {}
    used = dict.fromkeys(ORDER, 0)
    texts = []
    for kind in ORDER:
        if kind not in parts:
            parts[kind] = (FOLDER / f"{kind}.txt").read_text("utf-8").split("\f\n")
        pieces, i, n = parts[kind], used[kind], ORDER.count(kind)
        used[kind] += 1
        own = pieces[len(pieces) * i // n : len(pieces) * (i + 1) // n]
        chat = any(_TURN.match(piece) for piece in own)
        data = "\n".join(render(template, piece) if _TURN.match(piece) else piece for piece in own).encode()
        name = f"built-in {kind}" + (f" {i + 1}" if n > 1 else "")
        texts.append(Text(TextSource(name, hashlib.sha256(data).hexdigest(), len(data)), data, special=chat))
    return texts


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
