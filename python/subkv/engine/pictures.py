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
    """The positions of pictures in a sequence. A chat handler evaluates a picture with libmtmd, and adds its positions
    to n_tokens.
    """

    def __init__(self, input_ids: npt.NDArray[np.intc]) -> None:
        """input_ids: of the context; llama_cpp does not set them for pictures."""
        self._ids = input_ids
        self._n_tokens = 0  # at the last call of evaluated() or update()
        self._pictures: list[range] = []

    def evaluated(self, n: int) -> None:
        """n_tokens is n now, and new positions have tokens."""
        self._n_tokens = n
        self._pictures = [positions for positions in self._pictures if positions.stop <= n]

    def update(self, n: int) -> None:
        """n_tokens is n now, and new positions are those of a picture."""
        first = self._n_tokens
        self.evaluated(n)
        if n > first:
            self._pictures.append(range(first, n))
            self._ids[first:n] = 0  # samplers and handlers expect valid tokens

    def any_after(self, n: int) -> bool:
        """Whether there is a picture at position n or later."""
        return any(positions.stop > n for positions in self._pictures)

    def tokens_before(self, n: int) -> int:
        """How many of n tokens precede all pictures."""
        self.update(n)
        return min([n, *(positions.start for positions in self._pictures)])

    def require_none(self, n: int, key: str, beside: str) -> None:
        """Raises CacheError about `key` if there is a picture among n tokens."""
        self.update(n)
        if self._pictures:
            raise CacheError(key, f"expected no picture in the context with {beside}, found one; reset() removes it")

    def last_cell(self, n: int) -> int:
        """Smallest possible position of the last of n tokens: with M-RoPE, a whole picture is at its first position."""
        return next((positions.start for positions in self._pictures if positions.stop == n), n - 1)
