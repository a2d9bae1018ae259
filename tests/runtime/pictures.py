"""Prompts with pictures, as libmtmd decodes them: text, then rows of embeddings at the positions of their kind."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine
import numpy as np
import numpy.typing as npt
import pytest
from engine import C, last_error
from test_variants import shape_of

WINDOW = (4, 16, 8)  # sinks, recent, rollback

# By how a picture's tokens are placed and seen: one position each, as text; the same, and all see each other; one
# position in time for all, and others in height and width; those of a sound with M-RoPE, as text. Each with an
# architecture of tests/tiny.py.
KINDS = {
    "causal": "llama",
    "whole": "llama",
    "whole beside sliding windows": "gemma2",
    "whole, rows shared": "gemma4",
    "mrope": "qwen2vl",
    "mrope, hybrid": "qwen35",
    "sound, mrope": "qwen2vl",
}


@dataclass(frozen=True)
class Picture:
    """A grid of embeddings."""

    rows: npt.NDArray[np.float32]  # [ny * nx, n_embd]
    nx: int
    ny: int


Part = Sequence[int] | Picture


def exact_bases(model: engine.Model, path: Path, bits: Sequence[int] = (16,)) -> Any:
    """The layout of a file that it writes: full rank, bands of equal width where there are several bits."""
    shapes = shape_of(model)
    bands = [(shapes[0][2] // len(bits), n) for n in bits]
    name, n_layer = engine.architecture(model.path), C.llama_model_n_layer(model.handle)
    return engine.signed_permutations(shapes, bands, bands, arch=name, block_count=n_layer, path=path)


class Vision:
    """A tiny model for images, layouts of full rank for it with 16 and with fewer bits, and a prompt."""

    @classmethod
    def of_file(cls, kind: str, path: Path, folder: Path) -> Vision:
        model = engine.Model(path)
        exact = exact_bases(model, folder / f"{kind}-exact.gguf")
        return cls(kind, model, exact, exact_bases(model, folder / f"{kind}-coarse.gguf", [8, 6, 5, 4]))

    def __init__(self, kind: str, model: engine.Model, exact: Any, coarse: Any = None) -> None:
        self.mrope = "mrope" in kind
        self.shared = kind.startswith("mrope")  # one position in time
        self.whole = kind.startswith("whole")
        self.hybrid = kind.endswith("hybrid")
        self.model, self.exact, self.coarse = model, exact, coarse
        self.slides = C.llama_model_n_swa(self.model.handle) > 0
        self.n_embd = int(C.llama_model_n_embd_inp(self.model.handle))
        rng = np.random.default_rng(5)
        words = [rng.integers(10, self.model.n_vocab - 4, n).tolist() for n in (70, 40, 30)]
        self.parts: list[Part] = [words[0], self.picture(8, 6), words[1], self.picture(2, 5, seed=1), words[2]]
        self.others: list[Part] = [words[2], self.picture(5, 5, seed=2), words[0], words[1]]

    def picture(self, nx: int, ny: int, seed: int = 0) -> Picture:
        rng = np.random.default_rng([seed, nx, ny])
        return Picture(rng.standard_normal((ny * nx, self.n_embd)).astype(np.float32), nx, ny)

    def session(self, layout: Any = None, **options: Any) -> Any:
        window = {"window": WINDOW} if layout else {}
        return engine.session(self.model, layout, **{"n_ctx": 512, "n_ubatch": 256} | window | options)

    def advance(self, part: Part) -> int:
        """By how many positions the next part begins later."""
        if not isinstance(part, Picture):
            return len(part)
        return max(part.nx, part.ny) if self.shared else part.nx * part.ny

    def positions(self, part: Picture, at: int) -> npt.NDArray[np.int32]:
        """Positions of its consecutive tokens: [1 or 4, n]."""
        i = np.arange(part.nx * part.ny, dtype=np.int32)
        if not self.shared:
            return np.stack([at + i] * (4 if self.mrope else 1))
        return np.stack([0 * i + at, at + i // part.nx, at + i % part.nx, 0 * i])

    def end(self, parts: Sequence[Part], at: int = 0) -> int:
        """The position behind them."""
        return at + sum(map(self.advance, parts))

    def decode(
        self, s: engine.Session, parts: Sequence[Part], at: int = 0, seq: int = 0, pieces: Iterator[int] | None = None
    ) -> engine.Logits:
        """Logits of every token. pieces: how many tokens go into one call, never of two parts (default: a part)."""
        found = []
        for part in parts:
            n = len(part.rows) if isinstance(part, Picture) else len(part)
            first = 0
            while first < n:
                whole = isinstance(part, Picture) and self.whole
                last = n if whole or pieces is None else min(n, first + next(pieces))
                if isinstance(part, Picture):
                    status = self.try_picture(s, part, at, seq, first, last)
                else:
                    status = s.try_decode(part[first:last], at + first, seq)
                assert status == 0, f"llama_decode gives {status}: {last_error()} {''.join(engine.LOG[-2:])}"
                found.append(s._logits(last - first))
                first = last
            at += self.advance(part)
        return np.concatenate(found)

    def try_picture(
        self, s: engine.Session, part: Picture, at: int, seq: int = 0, first: int = 0, last: int | None = None
    ) -> int:
        """llama_decode's status for a picture's tokens from `first` on and before `last`."""
        rows, positions = part.rows[first:last], self.positions(part, at)[:, first:last]
        batch = C.llama_batch_init(len(rows), self.n_embd, 1)
        given = (ctypes.c_int32 * positions.size)(*positions.ravel().tolist())
        ctypes.memmove(batch.embd, np.ascontiguousarray(rows).ctypes.data, rows.nbytes)
        for i in range(len(rows)):
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, seq, True
        own = ctypes.cast(batch.pos, ctypes.c_void_p).value  # of a position for each, which is freed with the batch
        batch.pos = given
        batch.n_tokens = len(rows)
        C.llama_set_causal_attn(s.ctx, not self.whole)
        status = int(C.llama_decode(s.ctx, batch))
        C.llama_set_causal_attn(s.ctx, True)
        batch.pos = ctypes.cast(own, ctypes.POINTER(ctypes.c_int32))
        C.llama_batch_free(batch)
        return status


@pytest.fixture(scope="module", params=list(KINDS))
def vision(
    request: pytest.FixtureRequest, tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Vision]:
    made = Vision.of_file(request.param, tiny_model(KINDS[request.param]), tmp_path_factory.mktemp("vision"))
    yield made
    made.model.free()
