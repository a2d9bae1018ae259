"""The model that `convert` reads: its GGUF, opened once, and its weights, loaded once, for all stages."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from subkv.base.errors import SubkvError
from subkv.engine.cache import ordinary
from subkv.engine.memory import require_beside
from subkv.engine.model import Model
from subkv.format import store
from subkv.native.binding import C
from subkv.native.gguf import Gguf, check_weights, sha256
from subkv.plan import positions


class Source:
    """An open GGUF; a context manager.

    gguf: metadata and tensors. files, n_bytes: all files of a split model. arch, n_layer, n_ctx_train: from the
    metadata; None if missing. head_size: of keys, 0: unknown. knows_rotation: whether the metadata tell how keys rotate
    with the position. has_learned: whether positions are learned, and added to the embeddings. Raises ModelFileError
    about `model` if the file is not a whole GGUF.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.gguf = path, Gguf(path)
        self.files, self.n_bytes = self.gguf.files, self.gguf.n_bytes
        self.arch = self.gguf.get("general.architecture")
        self.n_layer, self.n_ctx_train = (self._number(key) for key in ("block_count", "context_length"))
        self.head_size, self.knows_rotation = positions.head_size(self.gguf) or 0, positions.is_known(self.gguf)
        self.has_learned = self.gguf.has_tensor("position_embd.weight")
        self._model: Model | None = None

    def _number(self, key: str) -> int | None:
        value = self.gguf.get(f"{self.arch}.{key}")
        return value if isinstance(value, int) else None

    def close(self) -> None:
        self.unload()
        self.gguf.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @functools.cached_property
    def entry(self) -> store.Entry:
        """The model's files in the store. Raises ModelFileError about `model`."""
        return store.entry(self.path)

    @functools.cached_property
    def sha256(self) -> str:
        """Hex SHA-256 of all files, computed once. Raises SubkvError about `model`."""
        return sha256(self.files, progress=True)

    #
    # weights
    #

    def weights(self, params: Any) -> Model:
        """The loaded weights. The first call reads them into memory; unload() frees them.

        params: llama_context_params of the context that the caller will open. Raises SubkvError about `model` if
        weights, statistics and that context together exceed the memory, or if the model has an encoder.
        """
        sizes = {} if self._model else {"weights": float(self.n_bytes)}
        require_beside(self.gguf, ordinary(), params, {**sizes, "statistics": self._statistics()})
        if self._model is None:
            check_weights(self.gguf)
            self._model = Model(self.path, mapped=False, checked=True)
        if C.llama_model_has_encoder(self._model.handle):
            raise SubkvError("model", f"{self.path}: expected a decoder-only model, found one with an encoder")
        return self._model

    def unload(self) -> None:
        """Free the weights, after all contexts on them."""
        if self._model is not None:
            self._model.close()
            self._model = None

    def check_positions(self, n_ctx: int) -> None:
        """Reject chunks beyond a model's learned positions, at which llama.cpp would end the process."""
        if self.has_learned and self.n_ctx_train and n_ctx > self.n_ctx_train:
            raise SubkvError(
                "n_ctx", f"expected at most the {self.n_ctx_train} positions that the model has, found {n_ctx}"
            )

    def _statistics(self) -> float:
        """Bytes of second moments in the observer and in the calibration; an estimate if heads differ by layer."""
        n_embd, n_head = (self._number(key) for key in ("embedding_length", "attention.head_count"))
        if not (self.n_layer and n_embd and n_head):
            return 0.0
        n_head_kv = self._number("attention.head_count_kv")
        heads = n_head if n_head_kv is None else n_head_kv
        return float(self.n_layer * heads * 3 * (n_embd // n_head) ** 2 * 8 * 2)
