"""Text to calib.safetensors: run a GGUF on text and keep the second moments of queries, keys and values.

Every HELD_OUT-th chunk is held out: instead of entering the moments it gives a few sampled rows, on which gamma is
calibrated. CLI: python -m converter.calibrate
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from converter.session import NativeSession, Session
from subkv.base.command import command as command_of
from subkv.base.errors import SubkvError, exit_on_error
from subkv.base.files import check_not_input, check_writable
from subkv.base.progress import progress_bar
from subkv.engine.observer import ACCUMULATE, PAUSE, SAMPLE, UBATCH, ObservedLayer
from subkv.format.calibration import (
    F16,
    MAX_HEAD_SIZE,
    MAX_SAMPLES,
    Calibration,
    LayerShape,
    LayerStats,
    TextSource,
    check_mergeable,
    merge,
    read_calibration,
    thin,
    write_calibration,
)
from subkv.format.metadata import generator
from subkv.native.gguf import Gguf, sha256

MIN_TOKENS = 64  # shortest text worth a chunk
HELD_OUT = 8  # every 8th chunk
MAX_SAMPLED_CHUNKS = 8  # held-out chunks that give samples; further ones enter the moments
PIECE = 1 << 18  # bytes of text tokenized at once


@dataclass(frozen=True)
class Text:
    """A text read from disk. source: provenance for the file."""

    source: TextSource
    data: bytes


@dataclass(frozen=True)
class Chunk:
    """Tokens decoded from an empty cache. Empty key_pos: enters the moments; else only these rows are sampled."""

    tokens: tuple[int, ...]
    key_pos: tuple[int, ...] = ()
    query_pos: tuple[int, ...] = ()


#
# text to chunks
#


def read_text(path: Path) -> Text:
    """Raises SubkvError for a missing or unreadable file and for bytes that are not UTF-8."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise SubkvError("files", f"expected a text file, found no file at {path}") from error
    except OSError as error:
        raise SubkvError("files", f"cannot read {path}: {error.strerror}") from error
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SubkvError(
            "files", f"{path}: expected UTF-8 text, found byte {data[error.start]:#04x} at {error.start}"
        ) from error
    name = path.name.encode("utf-8", "replace").decode("utf-8")
    return Text(TextSource(name, hashlib.sha256(data).hexdigest(), len(data)), data)


def tokenize(session: Session, data: bytes, limit: int | None) -> list[int]:
    """Tokens of a text, at least `limit` if it has as many. Long texts are tokenized in pieces that end with a line."""
    tokens: list[int] = []
    start = 0
    while start < len(data) and (limit is None or len(tokens) < limit):
        end = data.find(b"\n", start + PIECE) + 1 or len(data)
        tokens += session.tokenize(data[start:end])
        start = end
    return tokens


def cut(session: Session, texts: Sequence[Text], n_ctx: int, limit: int | None) -> list[tuple[int, ...]]:
    """Chunks of n_ctx tokens (BOS included when the model adds one), text after text; `limit` is shared by the texts.

    A text shorter than one chunk gives one short chunk if it has MIN_TOKENS tokens; else ends of texts are left out.
    Raises SubkvError for a text that is too short and a limit that leaves a text out.
    """
    if limit is not None and limit < len(texts):
        raise SubkvError("chunks", f"expected at least one for each of the {len(texts)} texts, found {limit}")
    start = () if session.bos is None else (session.bos,)
    step = n_ctx - len(start)
    chunks: list[tuple[int, ...]] = []
    for i, text in enumerate(texts):
        # an equal share of what is left, so that a short text's unused share goes to the later ones
        quota = None if limit is None else -(-(limit - len(chunks)) // (len(texts) - i))
        tokens = tokenize(session, text.data, None if quota is None else quota * step)
        if len(tokens) + len(start) < min(MIN_TOKENS, n_ctx):
            raise SubkvError("files", f"{text.source.name}: expected at least {MIN_TOKENS} tokens, found {len(tokens)}")
        pieces = [start + tuple(tokens[j : j + step]) for j in range(0, max(len(tokens) - step, 0) + 1, step)]
        chunks += pieces if quota is None else pieces[:quota]
    return chunks


def _spread(low: int, high: int, n: int) -> tuple[int, ...]:
    """At most n distinct positions spread over [low, high)."""
    return tuple(int(p) for p in np.unique(np.linspace(low, high - 1, min(n, high - low)).round()))


def plan_chunks(token_chunks: Sequence[tuple[int, ...]], n_skip: int, held_out: int) -> tuple[list[Chunk], str | None]:
    """Decide what every chunk is for. Returns the chunks in the order to run and a note for the user, if any.

    held_out: every how many chunks one is held out, 0 never. A single chunk is run twice: for
    the moments, then for the samples.
    """
    n = len(token_chunks)
    if held_out == 0:
        return [Chunk(tokens) for tokens in token_chunks], "note: nothing held out; gamma will come from the moments"
    chosen = list(range(held_out - 1, n, held_out)) or [n - 1]
    chosen = [chosen[i] for i in _spread(0, len(chosen), MAX_SAMPLED_CHUNKS)]
    rows = -(-MAX_SAMPLES // len(chosen))

    def sampled(tokens: tuple[int, ...]) -> Chunk:
        middle = max(len(tokens) // 2, n_skip + 1)
        return Chunk(tokens, _spread(n_skip, middle, rows), _spread(middle, len(tokens), rows))

    if n == 1:
        note = "note: only one chunk of text; gamma is calibrated on text that is also in the moments"
        return [Chunk(token_chunks[0]), sampled(token_chunks[0])], note
    return [sampled(tokens) if i in chosen else Chunk(tokens) for i, tokens in enumerate(token_chunks)], None


#
# the run
#


def observe(session: Session, chunks: Sequence[Chunk], progress: bool) -> None:
    """Decode all chunks, each from an empty cache. progress: a bar."""
    total = sum(len(chunk.tokens) for chunk in chunks)
    with progress_bar("calibrate", total, "tok", progress) as bar:
        for chunk in chunks:
            session.clear()
            session.mode(SAMPLE if chunk.key_pos else ACCUMULATE, chunk.key_pos, chunk.query_pos)
            for start in range(0, len(chunk.tokens), UBATCH):
                batch = chunk.tokens[start : start + UBATCH]
                session.decode(batch, start)
                bar.update(len(batch))
        session.mode(PAUSE)


def collect(session: Session) -> tuple[LayerStats, ...]:
    """All observed layers. Raises SubkvError when there is nothing to code, or a layer cannot be coded."""
    layers = session.layers()
    if not layers:
        raise SubkvError(
            "model", f"expected layers with an ordinary K/V cache, found none in this {session.arch} model"
        )
    return tuple(_collect_layer(session, layer) for layer in layers)


def _collect_layer(session: Session, layer: ObservedLayer) -> LayerStats:
    for name, d in (("key", layer.d_k), ("value", layer.d_v)):
        if d % 8 or not 8 <= d <= MAX_HEAD_SIZE:
            raise SubkvError(
                "model",
                f"layer {layer.il}: expected a {name} head size in multiples of 8 up to {MAX_HEAD_SIZE}, found {d}",
            )
    if layer.n_tokens == 0:
        raise SubkvError(
            "model",
            f"layer {layer.il}: expected finite queries, keys and values, found NaN or infinity in every token "
            f"({layer.n_nonfinite} tokens)",
        )
    shape = LayerShape(
        layer.il, layer.n_head, layer.n_head_kv, layer.d_k, layer.d_v, float(np.float32(layer.scale)), layer.n_tokens
    )
    limit = float(np.finfo(np.float16).max)

    def rows(what: str) -> F16:
        return thin(np.clip(session.get(layer, what), -limit, limit).astype(np.float16))

    return LayerStats(
        shape,
        k2=session.get(layer, "k2"),
        q2=session.get(layer, "q2"),
        v2=session.get(layer, "v2"),
        k1=session.get(layer, "k1"),
        q1=session.get(layer, "q1"),
        v1=session.get(layer, "v1"),
        ks=rows("ks"),
        vs=rows("vs"),
        qs=rows("qs"),
    )


def calibrate(
    session: Session,
    texts: Sequence[Text],
    n_ctx: int,
    n_skip: int,
    chunks: int | None = None,
    held_out: int = HELD_OUT,
    model_sha256: str = "0" * 64,
    progress: bool = False,
) -> tuple[Calibration, list[str]]:
    """Run the texts and return the statistics and notes for the user. Nothing is written."""
    token_chunks = cut(session, texts, n_ctx, chunks)
    shortest = min(len(tokens) for tokens in token_chunks)
    if n_skip > shortest - 2:
        raise SubkvError("n_sink", f"expected at most {shortest - 2} (shortest chunk less two), found {n_skip}")
    planned, note = plan_chunks(token_chunks, n_skip, held_out)
    observe(session, planned, progress)
    layers = collect(session)
    notes = [note] if note else []
    bad = sum(layer.n_nonfinite for layer in session.layers())
    if bad:
        notes.append(f"note: left out {bad} rows (tokens times layers) that held NaN or infinity")
    calibration = Calibration(
        arch=session.arch,
        name=session.name,
        block_count=session.block_count,
        n_ctx=n_ctx,
        n_skip=n_skip,
        tokens=max(layer.shape.tokens for layer in layers),
        texts=tuple(text.source for text in texts),
        model_sha256=model_sha256,
        generator=generator(),
        layers=layers,
    )
    return calibration, notes


def calibrate_file(
    model: Path,
    texts: Sequence[Text],
    n_ctx: int,
    n_skip: int,
    n_threads: int,
    chunks: int | None = None,
    held_out: int = HELD_OUT,
    earlier: Calibration | None = None,
) -> tuple[Calibration, list[str]]:
    """calibrate() of a GGUF with progress bars. earlier: a calibration of the same model, which the texts add to."""
    with Gguf(model) as base:  # refuses what is not a whole GGUF with a better sentence than the loader's
        digest = sha256(base.files, progress=True)
    with NativeSession(model, n_ctx, n_threads, n_skip) as session:
        if earlier:
            check_mergeable(earlier, session.arch, session.name, session.block_count, n_skip)
        result, notes = calibrate(session, texts, n_ctx, n_skip, chunks, held_out, digest, progress=True)
    return merge(earlier, result) if earlier else result, notes


def default_threads() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def text_options(required: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """-f, -c, --chunks and -t of every command that calibrates."""
    options = (
        click.option(
            "-f",
            "--file",
            "files",
            required=required,
            multiple=True,
            type=click.Path(path_type=Path),
            help="UTF-8 text to calibrate on.",
        ),
        click.option(
            "-c",
            "--ctx-size",
            default=2048,
            show_default=True,
            type=click.IntRange(MIN_TOKENS),
            help="Tokens per chunk.",
        ),
        click.option("--chunks", type=click.IntRange(1), help="Most chunks, shared among the texts. [default: all]"),
        click.option("-t", "--threads", type=click.IntRange(1), help="[default: all processors]"),
    )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


@command_of("calibrate")
@click.option("-m", "--model", required=True, type=click.Path(path_type=Path), help="GGUF model.")
@text_options(required=True)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="calib.safetensors to write.")
@click.option("--in-file", type=click.Path(path_type=Path), help="Earlier calibration of the same model to add to.")
@click.option(
    "--n-sink", default=4, show_default=True, type=click.IntRange(0, 4096), help="Positions left out per chunk."
)
@click.option(
    "--held-out",
    default=HELD_OUT,
    show_default=True,
    type=click.IntRange(0),
    help="Hold out every N-th chunk, 0: none.",
)
def command(
    model: Path,
    files: tuple[Path, ...],
    output: Path,
    ctx_size: int,
    chunks: int | None,
    threads: int | None,
    in_file: Path | None,
    n_sink: int,
    held_out: int,
) -> None:
    """Collect the statistics of MODEL on text, for `convert --bases`."""
    with exit_on_error():
        texts = [read_text(path) for path in files]
        earlier = read_calibration(in_file) if in_file else None
        check_writable(output)
        check_not_input(output, (("-m", model), *(("-f", path) for path in files)))
        result, notes = calibrate_file(
            model, texts, ctx_size, n_sink, threads or default_threads(), chunks, held_out, earlier
        )
        write_calibration(output, result)
        for note in notes:
            click.echo(note, err=True)
        click.echo(f"wrote {output}: {len(result.layers)} layers, {result.tokens} tokens")


def main() -> None:
    """Entry point of `python -m converter.calibrate`."""
    command()


if __name__ == "__main__":
    main()
