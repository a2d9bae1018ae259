"""What a chat handler of llama_cpp has put into a context by itself: pictures, which no tokens stand for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from subkv.base.errors import CacheError

LOST_PICTURE = (
    "pictures: expected cells of a picture that are still there, found them removed with what followed, and no tokens "
    "bring them back; ask the chat handler again"
)


class Pictures:
    """Positions of a sequence that others have filled. A handler calls libmtmd and moves n_tokens on."""

    def __init__(self, input_ids: npt.NDArray[np.intc]) -> None:
        """input_ids: of the context; llama_cpp leaves there what the memory had before."""
        self._ids = input_ids
        self._known = 0  # n_tokens, as far as we have moved it
        self._held: list[range] = []

    def told(self, n: int) -> None:
        """Here are n tokens now, the last ones evaluated from tokens."""
        self._known = n
        self._held = [places for places in self._held if places.stop <= n]

    def seen(self, n: int) -> None:
        """There are n tokens: more than before where somebody else has added some."""
        self._held = [places for places in self._held if places.stop <= n]
        if n > self._known:
            self._held.append(range(self._known, n))
            self._ids[self._known : n] = 0  # a token, as samplers and handlers expect one
        self._known = n

    def after(self, n: int) -> bool:
        """Is there a picture at position n or later?"""
        return any(places.stop > n for places in self._held)

    def before(self, n: int) -> int:
        """How many of n tokens are before any picture."""
        self.seen(n)
        return min([n, *(places.start for places in self._held)])

    def require_none(self, n: int, key: str, beside: str) -> None:
        """Raises CacheError about `key` where there is a picture among n tokens."""
        self.seen(n)
        if self._held:
            raise CacheError(key, f"expected no picture in the context beside {beside}, found one; reset() forgets it")

    def last_cell(self, n: int) -> int:
        """The position that the last of n tokens has at least: with M-RoPE, all of a picture's are at its first."""
        return next((places.start for places in self._held if places.stop == n), n - 1)
