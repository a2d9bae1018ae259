"""Statistics of a model on text: second moments of queries, keys and values, and sampled rows.

Every HELD_OUT-th chunk is held out: it does not enter the moments. Rows are sampled from it, to calibrate gamma.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from converter import builtin, rotation
from converter.corpus import HELD_OUT, MIN_TOKENS, Corpus, Text, cut
from converter.resume import Checkpoints
from converter.session import Session
from converter.source import Source
from subkv.base.errors import SubkvError, concerning
from subkv.base.progress import duration, expect, note, progress_bar
from subkv.engine.observer import ACCUMULATE, PAUSE, SAMPLE, UBATCH, ObservedLayer
from subkv.format.calibration import (
    MAX_HEAD_SIZE,
    MAX_SAMPLES,
    Calibration,
    LayerShape,
    LayerStats,
    check_mergeable,
    merge,
    thin,
)
from subkv.format.metadata import generator

MAX_SAMPLED_CHUNKS = 8  # more held-out chunks enter the moments


@dataclass(frozen=True)
class Chunk:
    """Tokens decoded from an empty cache. They enter the moments; with key_pos, only these positions are sampled."""

    tokens: tuple[int, ...]
    key_pos: tuple[int, ...] = ()
    query_pos: tuple[int, ...] = ()


def evenly_spaced(low: int, high: int, n: int) -> tuple[int, ...]:
    """At most n distinct positions, evenly spaced over [low, high)."""
    return tuple(int(p) for p in np.unique(np.linspace(low, high - 1, min(n, high - low)).round()))


def plan_chunks(token_chunks: Sequence[tuple[int, ...]], n_skip: int, held_out: int) -> tuple[list[Chunk], str | None]:
    """Assign chunks to moments or samples. Returns the chunks in the order to run, and a note for the user or None.

    held_out: every held_out-th chunk is held out, 0: none. A single chunk runs twice: for the moments, then for the
    samples.
    """
    n = len(token_chunks)
    if held_out == 0:
        return [Chunk(tokens) for tokens in token_chunks], "note: nothing held out; gamma will come from the moments"
    candidates = list(range(held_out - 1, n, held_out)) or [n - 1]
    sampled_chunks = [candidates[i] for i in evenly_spaced(0, len(candidates), MAX_SAMPLED_CHUNKS)]
    rows = -(-MAX_SAMPLES // len(sampled_chunks))

    def sampled(tokens: tuple[int, ...]) -> Chunk:
        middle = max(len(tokens) // 2, n_skip + 1)
        return Chunk(tokens, evenly_spaced(n_skip, middle, rows), evenly_spaced(middle, len(tokens), rows))

    if n == 1:
        note = "note: only one chunk of text; gamma is calibrated on text that is also in the moments"
        return [Chunk(token_chunks[0]), sampled(token_chunks[0])], note
    return [sampled(tokens) if i in sampled_chunks else Chunk(tokens) for i, tokens in enumerate(token_chunks)], None


def plan_batches(chunks: Sequence[Chunk]) -> list[tuple[int, int, bool]]:
    """(chunk, first token, whether a run can resume before it) of every batch, in order.

    No run resumes inside a sampled chunk, whose keys and queries belong together, nor where the part before or after
    has no moments.
    """
    summed = [i for i, chunk in enumerate(chunks) if not chunk.key_pos]
    batches = []
    for i, chunk in enumerate(chunks):
        for start in range(0, len(chunk.tokens), UBATCH):
            inside_samples = start > 0 and bool(chunk.key_pos)
            moments = bool(summed) and (i, start) > (summed[0], 0) and i <= summed[-1]
            batches.append((i, start, moments and not inside_samples))
    return batches


def observe(
    session: Session,
    chunks: Sequence[Chunk],
    first: int = 0,
    after: Callable[[int, bool], None] = lambda done, can_resume: None,
) -> None:
    """Decode all chunks, each from an empty cache.

    first: batches of plan_batches() that an earlier run has done. after(done, can_resume) is called after each batch.
    """
    total = sum(len(chunk.tokens) for chunk in chunks)
    batches, moments = plan_batches(chunks), False
    done = sum(len(chunk.tokens) for chunk in chunks[: batches[first][0]]) + batches[first][1]
    with progress_bar("calibrate", total, "tok", done=done) as bar:
        for n, (i, start, _) in enumerate(batches[first:], first + 1):
            chunk = chunks[i]
            if start == 0 or n == first + 1:
                session.clear()
                if start:
                    session.mode(PAUSE)
                for begin in range(0, start, UBATCH):
                    session.decode(chunk.tokens[begin : begin + UBATCH], begin)
                session.mode(SAMPLE if chunk.key_pos else ACCUMULATE, chunk.key_pos, chunk.query_pos)
            batch = chunk.tokens[start : start + UBATCH]
            session.decode(batch, start)
            bar.update(len(batch))
            moments = moments or not chunk.key_pos  # a file needs moments of this run
            after(n, moments and n < len(batches) and batches[n][2])
        session.mode(PAUSE)


def collect_layers(session: Session) -> tuple[LayerStats, ...]:
    """Statistics of all observed layers. Raises SubkvError if there are none, or one of them cannot be coded."""
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
    scale = float(np.float32(layer.scale))
    shape = LayerShape(layer.il, layer.n_head, layer.n_head_kv, layer.d_k, layer.d_v, scale, layer.n_tokens)
    stats: dict[str, Any] = {name: session.get(layer, name) for name in ("k2", "q2", "v2", "k1", "q1", "v1")}
    limit = float(np.finfo(np.float16).max)
    for name in ("ks", "vs", "qs"):
        stats[name] = thin(np.clip(session.get(layer, name), -limit, limit).astype(np.float16))
    return LayerStats(shape, **stats)


def statistics_of(
    session: Session,
    texts: Sequence[Text],
    n_ctx: int,
    n_sink: int,
    chunks: int | None = None,
    held_out: int = HELD_OUT,
    model_sha256: str = "0" * 64,
    checkpoints: Checkpoints | None = None,
    announce: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Calibration, list[str]]:
    """Run the texts. Returns the statistics, without the first n_sink positions of each chunk, and notes for the user.

    checkpoints: where partial sums are saved, and those of an earlier run. announce(done, total): called before the
    run, with numbers of tokens.
    """
    token_chunks = cut(session, texts, n_ctx, chunks, whole=False)
    shortest = min(len(tokens) for tokens in token_chunks)
    if n_sink > shortest - 2:
        raise SubkvError("n_sink", f"expected at most {shortest - 2} (shortest chunk less two), found {n_sink}")
    planned, remark = plan_chunks(token_chunks, n_sink, held_out)
    batches = plan_batches(planned)
    first, earlier = checkpoints.load(len(batches)) if checkpoints else (0, None)
    if earlier and earlier.model_sha256 != model_sha256:
        note("note: the progress of an earlier run is of a file with other bytes; starting over")
        first, earlier = 0, None
    done = sum(len(chunk.tokens) for chunk in planned[: batches[first][0]]) + batches[first][1]
    announce(done, sum(len(chunk.tokens) for chunk in planned))

    def sums() -> Calibration:
        layers = collect_layers(session)
        own = Calibration(
            arch=session.arch,
            name=session.name,
            block_count=session.block_count,
            n_ctx=n_ctx,
            n_skip=n_sink,
            tokens=max(layer.shape.tokens for layer in layers),
            texts=tuple(text.source for text in texts),
            model_sha256=model_sha256,
            generator=generator(),
            layers=layers,
        )
        return merge(earlier, own) if earlier else own

    def after(done: int, can_resume: bool) -> None:
        if checkpoints:
            checkpoints.reached(done, sums if can_resume else None)

    observe(session, planned, first, after)
    calibration = sums()
    notes = [remark] if remark else []
    bad = sum(layer.n_nonfinite for layer in session.layers())
    if bad:
        notes.append(f"note: left out {bad} rows (tokens times layers) that held NaN or infinity")
    return calibration, notes


def _announce(session: Session, later: Callable[[float], float], done: int, total: int) -> None:
    """Report how long the run takes, if more than 10 seconds. later: as in collect_statistics()."""
    speed = session.speed()
    seconds, seconds_later = (total - done) / speed, later(speed)
    expect("calibrate", seconds)
    if done:
        note(f"resuming after {done} of {total} tokens")
    if seconds > 10:
        after = f", sensitivities {duration(seconds_later)} more" if seconds_later else ""
        note(f"calibrating on {total - done} tokens takes {duration(seconds)}, at {speed:.0f} tokens per second{after}")


def collect_statistics(
    source: Source,
    corpus: Corpus,
    texts: Sequence[Text] | None,
    n_sink: int,
    held_out: int = HELD_OUT,
    earlier: Calibration | None = None,
    checkpoints: Checkpoints | None = None,
    later: Callable[[float], float] = lambda speed: 0.0,
    separate: bool = False,
) -> tuple[Calibration, list[str]]:
    """statistics_of() a GGUF on at most corpus.chunks chunks of `texts`, with progress bars and an expected time.

    texts None: the built-in ones, a chunk of each; separate: without those on which sensitivities are measured.
    earlier: a calibration of the same model, to which the texts are added. later(speed): seconds of the stages after
    this one at `speed` tokens per second.
    """
    digest = source.sha256
    with Session(source, corpus.n_ctx, corpus.n_threads, n_sink) as session:
        if texts is None:
            blocks = builtin.read(session.template)
            texts = (builtin.unmeasured(blocks) if separate else blocks)[: corpus.chunks]
        if earlier:
            with concerning(calibration="earlier"):
                check_mergeable(earlier, session.arch, session.name, session.block_count, n_sink)
        result, notes = statistics_of(
            session,
            texts,
            corpus.n_ctx,
            n_sink,
            corpus.chunks,
            held_out,
            digest,
            checkpoints=checkpoints,
            announce=functools.partial(_announce, session, later),
        )
        if not (source.knows_rotation or source.has_learned):
            result = _with_rotation(session, result, texts[0])
    with concerning(calibration="earlier"):
        return merge(earlier, result) if earlier else result, notes


def _with_rotation(session: Session, calibration: Calibration, text: Text) -> Calibration:
    """The calibration with the measured rotation of every layer's keys, as far as they rotate.

    Models that rotate at lower frequencies in long contexts (Phi-3, Phi-4) get the frequencies of short ones: a mean
    over all their trained positions has bits in every direction that a key has at the lower frequencies.
    """
    (tokens,) = cut(session, [text], MIN_TOKENS, 1, whole=False)
    rotations = rotation.measure(session, tokens, session.source.n_ctx_train or 0)
    layers = (replace(layer, rotation=rotations.get(layer.shape.il)) for layer in calibration.layers)
    return replace(calibration, layers=tuple(layers))
