"""The exact window: which tokens of a sequence are attended to exactly instead of from codes.

Sinks are held in half precision, recent tokens in `recent_bits`: 16, half precision, too, or 10, integers with a step
for every head (FORMAT.md §3.2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from subkv.base.errors import CacheError, SubkvError

AS_FILE = -1  # a number that was not requested: what the file (n_sink, n_recent) or libsubkv (n_rollback) says
N_SINK, N_RECENT, N_ROLLBACK = 4, 128, 16  # defaults; N_ROLLBACK is libsubkv's
MAX_SINK, MAX_RECENT = 4096, 65536  # FORMAT.md §1
RECENT_BITS, STEP_BITS = 10, 16  # of an element, and of a head's row besides


@dataclass(frozen=True)
class Window:
    """First tokens, last tokens, and rows kept beyond these so that a tail of as many tokens can be removed."""

    n_sink: int = AS_FILE
    n_recent: int = AS_FILE
    n_rollback: int = AS_FILE
    recent_bits: int = AS_FILE

    @classmethod
    def of(cls, n_sink: int | None = None, n_recent: int | None = None, n_rollback: int | None = None) -> Window:
        """None: not requested. Raises CacheError for what is no number of tokens."""
        given = {"n_sink": n_sink, "n_recent": n_recent, "n_rollback": n_rollback}
        for key, n in given.items():
            if n is not None and not 0 <= n < 2**31:
                raise CacheError(key, f"expected 0 or more tokens, found {n}")
        return cls(**{key: AS_FILE if n is None else n for key, n in given.items()})

    def with_defaults(
        self,
        n_sink: int = N_SINK,
        n_recent: int = N_RECENT,
        n_rollback: int = N_ROLLBACK,
        recent_bits: int = RECENT_BITS,
    ) -> Window:
        """With these numbers where none was requested."""
        return Window(**{**vars(Window(n_sink, n_recent, n_rollback, recent_bits)), **self.requested()})

    def requested(self) -> dict[str, int]:
        """The numbers that were requested, by name."""
        return {name: n for name, n in vars(self).items() if n != AS_FILE}

    def with_rollback(self, n_rollback: int) -> Window:
        return replace(self, n_rollback=n_rollback)

    def check(self) -> None:
        """Raises SubkvError where a number of a file's window does not fit its limits."""
        for name, n, most in (("n_recent", self.n_recent, MAX_RECENT), ("n_sink", self.n_sink, MAX_SINK)):
            if not 0 <= n <= most:
                raise SubkvError(name, f"expected 0 to {most}, found {n}")
        if self.recent_bits not in (AS_FILE, RECENT_BITS, 16):
            raise SubkvError("recent_bits", f"expected {RECENT_BITS} or 16, found {self.recent_bits}")

    def bits(self, elements: int, n_heads: int) -> int:
        """Of a sequence's rows. elements: of a token's rows, of all heads; n_heads: these, K and V apart."""
        recent = 16 * elements if self.recent_bits == 16 else self.recent_bits * elements + STEP_BITS * n_heads
        return 16 * elements * self.n_sink + recent * (self.n_recent + self.n_rollback)


DEFAULT = Window().with_defaults()
