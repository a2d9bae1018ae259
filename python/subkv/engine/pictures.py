"""Tracks pictures that a chat handler of llama_cpp has evaluated in a context; they have no tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from subkv.base.errors import CacheError

LOST_PICTURE = (
    "pictures: the cells of a picture were removed together with later tokens, and tokens cannot restore them; "
    "call the chat handler again"
)


class Pictures:
    """Positions of a sequence that hold pictures. A handler fills them with libmtmd and increases n_tokens."""

    def __init__(self, input_ids: npt.NDArray[np.intc]) -> None:
        """input_ids: of the context; llama_cpp does not set them for pictures."""
        self._ids = input_ids
        self._known = 0  # the last n_tokens that we have set
        self._held: list[range] = []

    def evaluated(self, n: int) -> None:
        """There are n tokens now; the last ones were evaluated from tokens."""
        self._known = n
        self._held = [positions for positions in self._held if positions.stop <= n]

    def update(self, n: int) -> None:
        """There are n tokens now; further ones than before are a picture."""
        self._held = [positions for positions in self._held if positions.stop <= n]
        if n > self._known:
            self._held.append(range(self._known, n))
            self._ids[self._known : n] = 0  # samplers and handlers expect valid tokens
        self._known = n

    def any_after(self, n: int) -> bool:
        """Whether there is a picture at position n or later."""
        return any(positions.stop > n for positions in self._held)

    def tokens_before(self, n: int) -> int:
        """How many of n tokens precede all pictures."""
        self.update(n)
        return min([n, *(positions.start for positions in self._held)])

    def require_none(self, n: int, key: str, beside: str) -> None:
        """Raises CacheError about `key` if there is a picture among n tokens."""
        self.update(n)
        if self._held:
            raise CacheError(key, f"expected no picture in the context with {beside}, found one; reset() removes it")

    def last_cell(self, n: int) -> int:
        """Smallest possible position of the last of n tokens: with M-RoPE, a whole picture is at its first position."""
        return next((positions.start for positions in self._held if positions.stop == n), n - 1)
