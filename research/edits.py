"""How edits of a cached text change the output: removed tails, removed parts, other beginnings.

The rest of the text moves up behind a removed part, and to its new place behind another beginning.

python -m research.edits -m model.gguf -f text.txt [-o json]

Each row compares logits of the `N_AFTER` tokens behind an edit with those of an ordinary f16 cache: for a removed tail
with a fresh evaluation, for a moved part with the f16 cache after the same edit, so that only the codes count. `f16` is
the noise of the ordinary cache itself: another split of the same text, or the edit against a fresh evaluation.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from runtime import options
from subkv.base.command import command
from subkv.base.errors import SubkvError
from subkv.engine.cache import CacheChoice, choose_cache
from subkv.engine.context import Context, ContextOptions
from subkv.engine.model import Model
from subkv.engine.request import CacheRequest
from subkv.native.binding import C, captured_log, last_error

Logits = npt.NDArray[np.float64]

N_AGAIN = (0, 8, 16, 32, 64)  # tokens evaluated again
N_TAIL = 300  # tokens that are evaluated and removed; longer than the window
N_AFTER = 64  # tokens whose logits are compared
N_REMOVED = 50  # tokens of the removed part
BEGINNINGS = (  # of a text, and the one that replaces it
    "You are a helpful assistant. Today is Monday, 3 March 2025. Answer the user's questions about this text.\n\n",
    "You are a careful editor, and you work for a publisher. Today is Friday, 27 November 2026. The user asks "
    "questions about the following page. Answer in one sentence, and name the line that you have used.\n\n",
)
N_BEGINS = (0, 16, 64)  # tokens that are evaluated again behind another beginning
N_ENDS = 32  # and at the end of the text that moves
BUCKETS = {"first": (0, 1), "1-3": (1, 4), "4-15": (4, 16), "16-63": (16, 64), "all": (0, 64)}


@dataclass(frozen=True)
class Text:
    """A place in a text: the tokens before it, those behind it, and a tail that does not belong there."""

    before: list[int]
    after: list[int]
    tail: list[int]
    beginnings: tuple[list[int], list[int]]


def log_softmax(logits: npt.NDArray[np.float32]) -> Logits:
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def divergence(base: Logits, other: Logits) -> npt.NDArray[np.float64]:
    """KL(base || other) of each row, in nats."""
    kld: npt.NDArray[np.float64] = (np.exp(base) * (base - other)).sum(axis=1)
    return kld


def evaluate(context: Context, tokens: Sequence[int], pos: int, n_logits: int = 0) -> Logits:
    """Log-probabilities of the last n_logits of these tokens, which follow position pos - 1."""
    rows = [np.empty((0, context.n_vocab))]
    for start in range(0, len(tokens), context.n_batch):
        piece = tokens[start : start + context.n_batch]
        n = context.decode(piece, pos + start, len(tokens) - n_logits - start)
        if n > 0:
            rows.append(log_softmax(context.logits(n)))
    return np.concatenate(rows)


def fresh(context: Context, tokens: Sequence[int], n_first: int) -> Logits:
    """Log-probabilities of the last N_AFTER tokens; the first n_first are evaluated apart."""
    context.clear()
    evaluate(context, tokens[:n_first], 0)
    return evaluate(context, tokens[n_first:], n_first, N_AFTER)


class Held:
    """The cache after some tokens, to which a context returns at the beginning of every edit."""

    def __init__(self, context: Context, tokens: Sequence[int]) -> None:
        context.clear()
        evaluate(context, tokens, 0)
        size = C.llama_state_get_size(context.handle)
        self.context, self.state = context, (ctypes.c_uint8 * size)()
        C.llama_state_get_data(context.handle, self.state, size)

    def again(self) -> Context:
        if C.llama_state_set_data(self.context.handle, self.state, len(self.state)) != len(self.state):
            raise SubkvError("", f"the cache rejects its state: {last_error()}")
        return self.context


def remove(context: Context, first: int, last: int = -1) -> None:
    if not C.llama_memory_seq_rm(context.memory, 0, first, last):
        raise SubkvError("", f"cannot remove positions from {first} on: {last_error()}")


def after_removal(held: Held, text: Text, n_again: int) -> Logits:
    """held: with the tail, which is removed with the last n_again tokens before it; these are evaluated again."""
    context, first = held.again(), len(text.before) - n_again
    remove(context, first)
    return evaluate(context, [*text.before[first:], *text.after], first, N_AFTER)


def after_move(held: Held, text: Text, n_keep: int, times: int = 1) -> Logits:
    """N_REMOVED tokens behind the first n_keep are removed, and the rest moves up, in `times` equal steps."""
    context, end, by = held.again(), len(text.before), N_REMOVED // times
    for _ in range(times):
        remove(context, n_keep, n_keep + by)
        C.llama_memory_seq_add(context.memory, 0, n_keep + by, -1, -by)
        C.llama_state_get_size(context.handle)  # executes the shift, so that the next one rounds again
        end -= by
    return evaluate(context, text.after, end, N_AFTER)


def after_beginning(held: Held, text: Text, n_begins: int) -> Logits:
    """held: with another beginning, and with the tail, which has the exact rows.

    The text waits in a second sequence while the new beginning is evaluated.
    """
    context, n_old, n, begin = held.again(), len(text.beginnings[0]), len(text.before), text.beginnings[1]
    C.llama_memory_seq_cp(context.memory, 0, 1, n_old + n_begins, n_old + n)
    remove(context, 0)
    C.llama_memory_seq_add(context.memory, 1, n_old + n_begins, n_old + n, len(begin) - n_old)
    evaluate(context, [*begin, *text.before[:n_begins]], 0)
    context.move_sequence(1, 0)
    end = len(begin) + n - N_ENDS
    remove(context, end)
    return evaluate(context, [*text.before[n - N_ENDS :], *text.after], end, N_AFTER)


def measure(
    model: Model,
    plain_choice: CacheChoice,
    caches: dict[str, CacheChoice],
    texts: Sequence[Text],
    n_threads: int | None,
) -> list[dict[str, Any]]:
    """A row by edit and cache, with the mean KLD of every bucket over all texts."""
    n_ctx = max(len(text.before) + N_TAIL + N_AFTER for text in texts) + 128
    context_options = ContextOptions(-(-n_ctx // 256) * 256, n_threads=n_threads, n_seq_max=2)
    sums: dict[tuple[str, str], list[npt.NDArray[np.float64]]] = {}

    def add(edit: str, cache: str, base: Logits, found: Logits) -> None:
        sums.setdefault((edit, cache), []).append(divergence(base, found))

    for text in texts:
        whole, n = [*text.before, *text.after], len(text.before)
        edited = [*text.before[:32], *text.before[32 + N_REMOVED :], *text.after]
        begun = [*text.beginnings[0], *text.before, *text.tail]
        other = [*text.beginnings[1], *text.before, *text.after]
        with model.context(plain_choice, context_options) as plain:
            base, moved = fresh(plain, whole, n), after_move(Held(plain, text.before), text, 32)
            edited_base = fresh(plain, edited, n - N_REMOVED)
            add("none", "f16", base, fresh(plain, whole, n // 2))
            add("moved", "f16, from evaluating the edited text", edited_base, moved)
            other_base, begins = fresh(plain, other, len(other) - N_AFTER), Held(plain, begun)
            other_moved = {again: after_beginning(begins, text, again) for again in N_BEGINS}
            for again, logits in other_moved.items():
                add(f"another beginning, {again} again", "f16, from evaluating the edited text", other_base, logits)
        for name, choice in caches.items():
            with model.context(choice, context_options) as coded:
                add("none", name, base, fresh(coded, whole, n))
                with_tail = Held(coded, [*text.before, *text.tail])
                for n_again in N_AGAIN:
                    add(f"removed tail, {n_again} again", name, base, after_removal(with_tail, text, n_again))
                before = Held(coded, text.before)
                add("moved", name, moved, after_move(before, text, 32))
                add("moved in 5 steps", name, moved, after_move(before, text, 32, 5))
                add("moved, unmoved codes", name, edited_base, fresh(coded, edited, n - N_REMOVED))
                begins = Held(coded, begun)
                for again, base_moved in other_moved.items():
                    edit, found = f"another beginning, {again} again", after_beginning(begins, text, again)
                    add(edit, name, base_moved, found)
                    add(edit, f"{name}, from evaluating the edited text", other_base, found)
                add("another beginning, unmoved codes", name, other_base, fresh(coded, other, len(other) - N_AFTER))
    return [
        {"edit": edit, "cache": cache, "n": len(rows)}
        | {bucket: float(np.stack(rows)[:, first:last].mean()) for bucket, (first, last) in BUCKETS.items()}
        for (edit, cache), rows in sums.items()
    ]


def places(model: Model, files: Sequence[Path], n_places: int, n_before: int) -> list[Text]:
    """Evenly spaced places of every file."""
    texts = []
    old, new = (model.tokenize(begin.encode()).tolist() for begin in BEGINNINGS)
    for path in files:
        tokens = model.tokenize(options.read_utf8(path, "file")[: 40 * n_places * n_before].encode()).tolist()
        step = max(1, (len(tokens) - n_before - N_AFTER) // max(1, n_places))
        for i in range(n_places):
            first = i * step
            before, after = tokens[first : first + n_before], tokens[first + n_before :][:N_AFTER]
            tail = tokens[(first + 3 * n_before) % max(1, len(tokens) - N_TAIL) :][:N_TAIL]
            if len(before) < n_before or len(after) < N_AFTER or len(tail) < N_TAIL:
                raise SubkvError("file", f"expected {n_places} places of {n_before} tokens, found {path} too short")
            texts.append(Text(before, after, tail, (old, new)))
    return texts


@command()
@options.model_option(required=True)
@click.option("-f", "--file", "files", required=True, multiple=True, type=options.PATH, help="texts")
@click.option(
    "--bases", multiple=True, type=options.PATH, metavar="FILE", help="files with bases; default: the model's"
)
@click.option("--places", "n_places", type=click.IntRange(min=1), default=4, help="places in each text")
@click.option("--before", "n_before", type=click.IntRange(min=128), default=1024, help="tokens before an edit")
@options.threads_option
@options.form_option("md", "json")
def main(
    model: Path,
    files: tuple[Path, ...],
    bases: tuple[Path, ...],
    n_places: int,
    n_before: int,
    n_threads: int | None,
    form: str,
) -> None:
    """Measure how edits of a cached text change the output."""
    choices = {
        path.stem if path else "subkv": choose_cache(model, CacheRequest("subkv", bases=path))
        for path in bases or (None,)
    }
    plain = choose_cache(model, CacheRequest("f16"))
    with Model(model) as opened, captured_log(forward=False):  # llama.cpp logs every shift
        rows = measure(opened, plain, choices, places(opened, files, n_places, n_before), n_threads)
    if form == "json":
        click.echo(json.dumps(rows, indent=1))
        return
    click.echo("| edit | cache | " + " | ".join(BUCKETS) + " |\n|---|---|" + "---:|" * len(BUCKETS))
    for row in rows:
        click.echo(f"| {row['edit']} | {row['cache']} | " + " | ".join(f"{row[b]:.5f}" for b in BUCKETS) + " |")


if __name__ == "__main__":
    main()
