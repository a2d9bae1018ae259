"""Texts and their chunks of tokens, for calibration, sensitivities and evaluation.

runtime.perplexity cuts texts as llama-perplexity does, so that their numbers can be compared: it tokenizes all bytes
except the last newline at once, cuts at least two chunks without gaps, and replaces the first token of each by BOS.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from subkv.base.command import group
from subkv.base.errors import SubkvError, system_reason
from subkv.base.threads import MAX_THREADS, default_threads

if TYPE_CHECKING:
    from subkv.format.calibration import TextSource

MIN_TOKENS = 64  # of the shortest chunk
PIECE = 1 << 18  # bytes of text tokenized at once
HELD_OUT = 8  # calibration holds out every 8th chunk
INTERRUPTED = "interrupted: nothing was written"  # message of programs that write one file


@dataclass(frozen=True)
class Text:
    """A text and its provenance, for the calibration's file. special says that it has names of control tokens."""

    source: TextSource
    data: bytes
    special: bool = False


class Tokenizer(Protocol):
    """A model as cut() uses it."""

    @property
    def bos(self) -> int | None:
        """The token in front of every chunk, or None if the model adds none."""

    def tokenize(self, text: bytes, special: bool = False) -> list[int]:
        """Tokens of UTF-8 text, without BOS. special turns names of control tokens into these tokens."""


def read_bytes(path: Path) -> bytes:
    """Raises SubkvError about `files` if a file is missing or cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise SubkvError("files", f"expected a text file, found no file at {path}") from error
    except OSError as error:
        raise SubkvError("files", f"cannot read {path}: {system_reason(error)}") from error


def read_text(path: Path) -> Text:
    """Raises SubkvError about `files` if a file is missing, cannot be read, or is not UTF-8."""
    from subkv.format.calibration import TextSource  # numpy is not needed for a --help

    data = read_bytes(path)
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SubkvError(
            "files", f"{path}: expected UTF-8 text, found byte {data[error.start]:#04x} at {error.start}"
        ) from error
    name = path.name.encode("utf-8", "replace").decode("utf-8")
    return Text(TextSource(name, hashlib.sha256(data).hexdigest(), len(data)), data)


def tokenize(tokenizer: Tokenizer, text: Text, limit: int | None) -> list[int]:
    """Tokens of a text, at least `limit` if it has so many. Long texts are tokenized in pieces that end with a line."""
    tokens: list[int] = []
    data = text.data
    start = 0
    while start < len(data) and (limit is None or len(tokens) < limit):
        end = data.find(b"\n", start + PIECE) + 1 or len(data)
        tokens += tokenizer.tokenize(data[start:end], text.special)
        start = end
    return tokens


def cut(
    tokenizer: Tokenizer, texts: Sequence[Text], n_ctx: int, chunks: int | None, whole: bool = True
) -> list[tuple[int, ...]]:
    """At most `chunks` chunks of n_ctx tokens, an equal share from the start of every text, text after text.

    The first token is BOS if the model adds one. Tokens at the end of a text that do not fill a chunk are left out. A
    text shorter than a chunk becomes one short chunk of at least MIN_TOKENS tokens; whole: it is an error.
    Raises SubkvError about `files` for a text that is too short, about `chunks` for fewer chunks than texts.
    """
    if chunks is not None and chunks < len(texts):
        raise SubkvError("chunks", f"expected at least one for each of the {len(texts)} texts, found {chunks}")
    start = () if tokenizer.bos is None else (tokenizer.bos,)
    step = n_ctx - len(start)
    out: list[tuple[int, ...]] = []
    for i, text in enumerate(texts):
        # A text gets an equal share of the remaining chunks, so later texts get what a short one does not use.
        quota = None if chunks is None else -(-(chunks - len(out)) // (len(texts) - i))
        tokens = tokenize(tokenizer, text, None if quota is None else quota * step)
        if len(tokens) < (step if whole else min(MIN_TOKENS, n_ctx) - len(start)):
            least = f"{step} tokens for a chunk" if whole else f"{MIN_TOKENS} tokens"
            raise SubkvError("files", f"{text.source.name}: expected at least {least}, found {len(tokens)}")
        pieces = [start + tuple(tokens[j : j + step]) for j in range(0, max(len(tokens) - step, 0) + 1, step)]
        out += pieces[:quota]
    return out


#
# flags
#


PATH = click.Path(path_type=Path)


def model_option(text: str = "model file (GGUF)") -> Callable[..., Any]:
    return click.option("-m", "--model", required=True, type=PATH, metavar="FILE", help=text)


def bases_option(text: str = "calibration (calib.safetensors)") -> Callable[..., Any]:
    return click.option("--bases", required=True, type=PATH, metavar="FILE", help=text)


yes_option = click.option("-y", "--yes", is_flag=True, help="overwrite an existing file")


@dataclass(frozen=True)
class Corpus:
    """Texts, cut into at most `chunks` chunks of n_ctx tokens, and threads to run a model. None means all."""

    files: tuple[Path, ...]
    n_ctx: int
    chunks: int | None
    threads: int | None

    def read(self) -> list[Text]:
        """Raises SubkvError as read_text()."""
        return [read_text(path) for path in self.files]

    @property
    def n_threads(self) -> int:
        return default_threads(self.threads)


def corpus_options(
    text: str = "UTF-8 text to calibrate on; may be repeated",
    chunks: str = "maximum chunks, distributed over the texts [default: all]",
    n_chunks: int | None = None,
    required: bool = True,
) -> Callable[..., Any]:
    """-f, -c, --chunks and -t as one argument `corpus`, with help texts for two of them and the default n_chunks."""
    return group(
        "corpus",
        Corpus,
        click.option("-f", "--file", "files", required=required, multiple=True, type=PATH, metavar="FILE", help=text),
        click.option(
            "-c", "--ctx-size", "n_ctx", default=2048, type=click.IntRange(MIN_TOKENS), help="tokens per chunk"
        ),
        click.option("--chunks", default=n_chunks, type=click.IntRange(1), help=chunks),
        click.option("-t", "--threads", type=click.IntRange(1, MAX_THREADS), help="threads [default: all processors]"),
    )
