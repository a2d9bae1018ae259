"""The settings of a calibration, as the user requests them and completed from the model."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from converter import builtin
from converter.corpus import HELD_OUT, Corpus, Text
from converter.decoded_chunk import SCORED
from converter.sensitivity_trials import FULL, Scope
from subkv.format.metadata import generator
from subkv.plan.pipeline import TOKENS_PER_RANK

SHORT = 512  # tokens of most built-in chunks for sensitivities, because many kinds of text matter more than long ones
ALONE = 1280  # tokens of the built-in chunks without sensitivities, which is less work than with them
CHUNKS, LONG = 5, 1088  # chunks of the user's text for sensitivities, and tokens of each


@dataclass(frozen=True)
class CalibrationRequest:
    """How to calibrate. corpus without files: the built-in texts. n_sink: positions left out at the start of a chunk.

    n_recent: of the exact window. minutes: limit for sensitivities, or 0 to measure none, or None for no limit.
    short: chunks of the built-in texts may be shorter than requested, because statistics hold at all positions.
    head_size: short chunks still have enough tokens for heads of this size, unless it is 0.
    scope: of sensitivities, for the size of the model.
    resumes: an earlier run without a limit has left statistics, complete or not, which this one uses.
    """

    corpus: Corpus
    n_sink: int
    n_recent: int
    minutes: float | None = None
    short: bool = True
    head_size: int = 0
    scope: Scope = FULL
    resumes: bool = False

    def texts(self) -> list[Text] | None:
        """The given texts, or None for the built-in ones. Raises SubkvError as read_text()."""
        return self.corpus.read() or None

    @property
    def separate(self) -> bool:
        """Whether statistics leave out the texts of sensitivities, whose cells are added by that stage."""
        measures = self.minutes != 0 or self.resumes
        return self.short and measures and not self.corpus.files and self.corpus.chunks is None

    @property
    def observed(self) -> Corpus:
        """The text of the statistics, as requested or else blocks of the built-in texts."""
        if self.corpus.files or self.corpus.chunks is not None:
            return self.corpus
        # one block is held out, and each block loses its first n_sink positions
        least = TOKENS_PER_RANK * self.head_size // (builtin.BLOCKS - 1) + self.n_sink + 1
        n_ctx = self.corpus.n_ctx
        if self.separate or (self.short and self.minutes == 0):
            n_ctx = min(max(builtin.TOKENS // builtin.BLOCKS if self.separate else ALONE, least), n_ctx)
        return replace(self.corpus, n_ctx=n_ctx, chunks=max(builtin.TOKENS // n_ctx, builtin.BLOCKS))

    def key(self, texts: list[Text] | None) -> str:
        """A hash of everything that statistics depend on, except the model and its chat template."""
        observed = self.observed
        corpus = [self.corpus.n_ctx, observed.n_ctx, observed.chunks]
        digest = hashlib.sha256(repr([generator(), *corpus, self.separate, self.n_sink, HELD_OUT]).encode())
        for text in texts or builtin.read():
            digest.update(repr((text.source.name, len(text.data), text.special)).encode())
            digest.update(text.data)
        return digest.hexdigest()[:8]

    @property
    def lengths(self) -> list[int]:
        """Maximum tokens of every chunk for sensitivities."""
        least = 2 * self.n_recent + 4 * SCORED
        short, long, far = (min(max(n, least), self.corpus.n_ctx) for n in (SHORT, LONG, self.scope.far))
        if self.corpus.files:
            return [long] * max(CHUNKS, len(self.corpus.files))
        if not self.short:
            return [long] * builtin.MEASURED
        return [short] * (builtin.MEASURED - len(builtin.LONGER)) + [far] * len(builtin.LONGER)
