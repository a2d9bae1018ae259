"""Where keys are before the model turns them by their positions: the frame in which tokens far apart can be pooled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from converter.scoring import F32
from subkv.base.errors import SubkvError
from subkv.native.gguf import Base, Gguf
from subkv.plan.positions import ABSOLUTE, HALVES, NEIGHBOURS, Pairs, pairs

# Of attention that is more than softmax(scale q·k): what a model of a known architecture must not have.
_UNPLAIN = ("attn_logit_softcapping", "attention.max_alibi_bias")


@dataclass(frozen=True)
class Frame:
    """The rotation of one model's keys, the same in all of its layers."""

    pairs: Pairs

    @classmethod
    def of(cls, model: Path) -> Frame:
        """Of a GGUF. Raises SubkvError about `model`: its positions are not understood here, or it cannot be read."""
        with Gguf(model) as base:
            return cls.read(base)

    @classmethod
    def read(cls, base: Base) -> Frame:
        """Of an open GGUF; as of()."""
        arch = str(base.get("general.architecture"))
        known = NEIGHBOURS + HALVES + ABSOLUTE
        if arch not in known:
            raise SubkvError(
                "model",
                f"expected an architecture whose positions are known ({', '.join(sorted(known))}), found {arch}",
            )
        for key in _UNPLAIN:
            if base.get(f"{arch}.{key}"):
                raise SubkvError("model", f"expected attention by the softmax of q·k alone, found {arch}.{key}")
        n_head = base.get(f"{arch}.attention.head_count")
        if not isinstance(n_head, int):  # a number for each layer
            raise SubkvError("model", f"{arch}.attention.head_count: expected one number, found {n_head}")
        d = int(base.get(f"{arch}.attention.key_length") or int(base.get(f"{arch}.embedding_length")) // n_head)
        turn = Pairs.none(d) if arch in ABSOLUTE else pairs(base, d)
        if turn is None:
            scaling = base.get(f"{arch}.rope.scaling.type")
            raise SubkvError(
                "model", f"expected keys rotated without scaling, found {arch}.rope.scaling.type {scaling}"
            )
        return cls(turn)

    @property
    def d_k(self) -> int:
        """Size of a key."""
        return len(self.pairs.partner)

    @property
    def rotated(self) -> bool:
        """False: the model adds its positions to the embeddings, and keys stay where they are."""
        return bool(self.pairs.omega.any())

    def rotate(self, k: NDArray[np.floating], pos: NDArray[np.floating | np.integer], sign: float = 1.0) -> F32:
        """Keys k [n, heads, d_k], as they are at position 0, at the positions [n], which need not be whole."""
        return self.pairs.rotate(k, sign * np.asarray(pos, dtype=np.float64)[:, None]).astype(np.float32)

    def unrotate(self, k: NDArray[np.floating], pos: NDArray[np.floating | np.integer]) -> F32:
        """The inverse of rotate."""
        return self.rotate(k, pos, sign=-1.0)
