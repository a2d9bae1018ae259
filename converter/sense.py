"""Sensitivities of a GGUF in one call: measured (sensing.py), then their predictions corrected (correcting.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from converter import correcting
from converter.correcting import PLANNED
from converter.decoded import SCORED
from converter.effort import WHOLE, Effort
from converter.sensing import CORRECTING, REPEATED, Sensing, n_trials
from converter.session import Session
from converter.trials import Found
from subkv.base.errors import SubkvError
from subkv.base.progress import progress_bar
from subkv.format.calibration import Calibration, TextSource
from subkv.native.gguf import Base


def n_measured(lengths: Sequence[int]) -> int:
    """How many of chunks of such lengths are measured on, the first ones: all of them where predictions are corrected
    on longer ones; else but for two of other text if there are enough."""
    if max(lengths) - CORRECTING >= 2 * (min(lengths) - SCORED):
        return len(lengths)
    return len(lengths) - 2 if len(lengths) > 3 else len(lengths) - 1


def ahead(lengths: Sequence[int], n_layer: int, found: Found | None = None, effort: Effort = WHOLE) -> int:
    """Tokens that sense() decodes on chunks of such lengths. found: what an earlier run had."""
    done, n = found.done if found else [], n_measured(lengths)
    again = max(lengths) if n == len(lengths) else 0  # the longer ones are corrected on, too
    chunks = sum(length for c, length in enumerate(lengths[:n]) if c not in done or length == again)
    trials = n_trials(n_layer, effort) - (len(found.trials) if found else 0)
    return chunks + int(REPEATED * trials) * SCORED + correcting.ahead(lengths[n:], lengths)


def sense(
    session: Session,
    base: Base,
    calibration: Calibration,
    chunks: Sequence[Sequence[int]],
    n_recent: int,
    n_threads: int,
    minutes: float | None = None,
    found: Found | None = None,
    keep: Callable[[Found], None] = lambda found: None,
    progress: bool = False,
    texts: Sequence[TextSource] = (),
    folder: Path | None = None,
    effort: Effort = WHOLE,
) -> Calibration:
    """The calibration of a GGUF with sensitivities measured on n_measured() `chunks`, and corrected on the others.

    Where some of them are more than twice as long these are measured, too, and predictions corrected there.

    session: with room for a chunk. minutes: time for all of it; after LEAST trials, what there is no time for is filled
    in from what is near. found: what an earlier run has kept; keep() is called whenever tokens were decoded, and may
    raise KeyboardInterrupt. texts, folder, effort: as Sensing. Raises SubkvError: about `n_ctx` for chunks too short,
    about `output` where `folder` is full, Unpredictable where nothing can be predicted.
    """
    start, n_ctx = time.monotonic(), min(map(len, chunks))
    least = n_recent + calibration.n_skip + 4 * SCORED
    if n_ctx < least:
        raise SubkvError("n_ctx", f"expected chunks of at least {least} tokens with this exact window, found {n_ctx}")
    lengths = [len(chunk) for chunk in chunks]
    n = n_measured(lengths)
    total, spent = ahead(lengths, len(calibration.layers), found, effort), 0
    with progress_bar("sensitivities", total, "tok", progress) as bar:

        def told(tokens: int) -> None:
            nonlocal spent
            spent += tokens
            bar.update(tokens)
            keep(sensing.found)

        def late(tokens: int) -> bool:
            if minutes is None or not spent:
                return False  # before anything is decoded nothing says how long it takes
            left = tokens + correcting.ahead(lengths[n:], lengths)
            passed = time.monotonic() - start
            needed = passed * (1.0 + left / spent) + len(calibration.layers) / PLANNED
            return needed > 60.0 * minutes

        sensing = Sensing(session, base, calibration, chunks[:n], n_recent, found, texts[:n], told, folder, effort)
        for _ in sensing.steps(late):
            pass
        return correcting.corrected(sensing, chunks[n:], n_threads, told)
