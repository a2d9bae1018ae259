"""The exact window: the tokens of a sequence whose keys and values are stored exactly instead of as codes.

Sinks have half precision. Recent tokens have `recent_bits`: 16 for half precision, or 10 for integers with a step for
every head (FORMAT.md §3.2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from subkv.base.errors import CacheError, SubkvError
from subkv.base.numbers import whole

AS_FILE = -1  # not requested: the default of the file (n_sink, n_recent) or of libsubkv (n_rollback)
N_SINK, N_RECENT, N_ROLLBACK = 4, 128, 16  # defaults; N_ROLLBACK is libsubkv's
MAX_SINK, MAX_RECENT = 4096, 65536  # FORMAT.md §1
RECENT_BITS, STEP_BITS = 10, 16  # bits of an element, and of the step of a head's row
STATIC = "none"  # as `adapt`: static bases, regardless of the file
VARIABLES = {  # of the environment, which libsubkv reads
    "n_sink": "SUBKV_SINK",
    "n_recent": "SUBKV_RECENT",
    "n_rollback": "SUBKV_ROLLBACK",
    "adapt": "SUBKV_ADAPT",
}


@dataclass(frozen=True)
class Window:
    """Exact tokens: the first, the last, and n_rollback more rows, so that as many tokens can be removed.

    adapt: adaptive bases for the tokens that leave the window, in the syntax of subkv.format.adapt.parse(), or STATIC;
    None: as the file.
    """

    n_sink: int = AS_FILE
    n_recent: int = AS_FILE
    n_rollback: int = AS_FILE
    recent_bits: int = AS_FILE
    adapt: str | None = None

    @classmethod
    def of(
        cls,
        n_sink: int | None = None,
        n_recent: int | None = None,
        n_rollback: int | None = None,
        adapt: str | None = None,
    ) -> Window:
        """None: not requested. Raises CacheError for invalid numbers."""
        numbers = {"n_sink": n_sink, "n_recent": n_recent, "n_rollback": n_rollback}
        for key, n in numbers.items():
            numbers[key] = AS_FILE if n is None else whole(key, n, 0, expected="0 or more tokens", kind=CacheError)
        return cls(**{key: n for key, n in numbers.items() if n is not None}, adapt=adapt)

    @classmethod
    def of_suffix(cls, text: str) -> Window | None:
        """The window of a cache's suffix: `v`, `v;length=256` (as --adapt, with ; for commas), or None if there is no
        such suffix."""
        return cls(adapt=text.replace(";", ",")) if text.split(";")[0] in ("k", "v", "kv") else None

    @property
    def adapts(self) -> bool:
        """Whether bases are adaptive. They belong to a sequence, so that sequences share no cells."""
        return self.adapt not in (None, STATIC)

    def overridden(self, other: Window) -> Window:
        """This window with the members that `other` requests."""
        return replace(self, **other.requested())

    def with_defaults(self, recent_bits: int = RECENT_BITS) -> Window:
        """This window with the defaults for members that were not requested."""
        return Window(N_SINK, N_RECENT, N_ROLLBACK, recent_bits).overridden(self)

    def requested(self) -> dict[str, Any]:
        """The requested members by name."""
        return {name: value for name, value in vars(self).items() if value not in (AS_FILE, None)}

    def check_adapt(self) -> None:
        """Raises CacheError about `adapt`."""
        from subkv.format import adapt  # native libraries: not for a --help

        if self.adapts:
            adapt.parse(str(self.adapt))

    def check(self) -> None:
        """Raises SubkvError if a number exceeds the limits of the file format."""
        for name, n, n_max in (("n_recent", self.n_recent, MAX_RECENT), ("n_sink", self.n_sink, MAX_SINK)):
            if not 0 <= n <= n_max:
                raise SubkvError(name, f"expected 0 to {n_max}, found {n}")
        if self.recent_bits not in (AS_FILE, RECENT_BITS, 16):
            raise SubkvError("recent_bits", f"expected {RECENT_BITS} or 16, found {self.recent_bits}")

    def bits(self, elements: int, n_heads: int) -> int:
        """Bits of a sequence's window. elements: per token, over all heads; n_heads: heads, K and V separately."""
        recent = 16 * elements if self.recent_bits == 16 else self.recent_bits * elements + STEP_BITS * n_heads
        return 16 * elements * self.n_sink + recent * (self.n_recent + self.n_rollback)


DEFAULT = Window().with_defaults()
