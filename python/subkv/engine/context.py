"""A llama.cpp context for programs that measure: it decodes batches and returns logits. Applications use Llama."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from subkv.base.closed import mark_closed
from subkv.base.errors import CacheError
from subkv.base.threads import default_threads
from subkv.engine.cache import CacheChoice, attached, creation_error, flash_attention
from subkv.engine.checkpoints import Checkpoints, of_window
from subkv.engine.memory import require_memory
from subkv.engine.stats import context_stats, count_zero_rows
from subkv.native.binding import C, captured_log, last_error

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ContextOptions:
    """Parameters of a context, except its cache. Sizes in tokens; n_threads None: all processors."""

    n_ctx: int
    n_batch: int = 512
    n_ubatch: int = 512
    n_threads: int | None = None
    flash_attn: str = "auto"
    n_seq_max: int = 1


def decode_batch(
    handle: Any, batch: Any, tokens: Any, pos: Any, seqs: Sequence[int], logits: Any, coded: bool = False
) -> None:
    """llama_decode of tokens at their positions and sequences; logits: whether each token gives logits.

    batch: a llama_batch with room for the tokens. coded: the cache is coded, so libsubkv has the reason of a failure.
    Raises CacheError.
    """
    n = len(tokens)
    batch.n_tokens = n
    np.ctypeslib.as_array(batch.token, (n,))[:] = tokens
    np.ctypeslib.as_array(batch.pos, (n,))[:] = pos
    np.ctypeslib.as_array(batch.n_seq_id, (n,))[:] = 1
    np.ctypeslib.as_array(batch.logits, (n,))[:] = logits
    for i, seq in enumerate(seqs):
        batch.seq_id[i][0] = seq
    code = C.llama_decode(handle, batch)
    if code != 0:
        reason = (last_error() if coded else "") or (
            "no room in the cache" if code == 1 else f"llama_decode returned {code}"
        )
        raise CacheError("n_ctx", f"cannot evaluate {n} tokens at position {np.min(pos)}: {reason}")


class Context:
    """The result of Model.context(). The default sequence is 0; sequences share cells if the window allows it."""

    def __init__(
        self, path: Path, model: Any, n_vocab: int, n_gpu_layers: int, choice: CacheChoice, options: ContextOptions
    ) -> None:
        """path: of the weights; model: their handle."""
        params = C.llama_context_default_params()
        params.n_ctx = options.n_ctx
        params.n_seq_max = options.n_seq_max
        params.kv_unified = options.n_seq_max > 1 and not choice.window.adapts  # False if sequences have separate cells
        params.n_batch = min(options.n_batch, options.n_ctx)
        params.n_ubatch = min(options.n_ubatch, params.n_batch)
        params.n_threads = params.n_threads_batch = default_threads(options.n_threads)
        params.flash_attn_type = flash_attention(options.flash_attn, choice)
        params.type_k, params.type_v = choice.type_k, choice.type_v
        params.swa_full = False
        params.no_perf = True
        require_memory(path, choice, params, n_gpu_layers, model)
        with captured_log(forward=False) as log, attached(choice):
            self.handle = C.llama_init_from_model(model, params)
            if not self.handle:
                raise creation_error(choice, log, "llama.cpp created no context")
        self.stats = context_stats(model, self.handle, choice, log)
        self.choice, self.n_vocab, self.n_batch = choice, n_vocab, int(params.n_batch)
        self.flash_attn = options.flash_attn
        self.memory = C.llama_get_memory(self.handle)
        self.recurrent: bool = C.llama_model_is_recurrent(model) or C.llama_model_is_hybrid(model)
        self._model = model
        self._slides = bool(C.llama_model_n_swa(model))
        self._checkpoints: dict[int, Checkpoints] = {}  # by sequence
        plain = not (choice.window.adapts or self._slides or self.recurrent)
        self.can_repeat = bool(plain and options.n_seq_max > 1 and C.llama_memory_can_shift(self.memory))
        self.batch = C.llama_batch_init(self.n_batch, 0, 1)

    @property
    def n_zero_rows(self) -> int:
        """KVStats.n_zero_rows now; `stats` are those of the new context."""
        return count_zero_rows(self.handle) if self.choice.coded else 0

    def decode(self, tokens: Sequence[int] | npt.NDArray[np.int32], pos: int, first_logits: int, seq: int = 0) -> int:
        """Evaluate at most n_batch tokens at positions pos, pos+1, …; those at index ≥ first_logits give logits.

        Returns the number of rows of logits. Raises CacheError for more tokens, or if llama.cpp cannot decode.
        """
        n = len(tokens)
        self._decode(tokens, np.arange(pos, pos + n), [seq] * n, np.arange(n) >= first_logits)
        return max(n - max(first_logits, 0), 0)

    def decode_each(self, tokens: Sequence[int] | npt.NDArray[np.int32], pos: int) -> None:
        """Evaluate one token for each sequence 0, 1, … at position pos; all give logits. Raises as decode()."""
        self._decode(tokens, pos, range(len(tokens)), True)

    def _decode(self, tokens: Any, pos: Any, seqs: Sequence[int], logits: Any) -> None:
        if len(tokens) > self.n_batch:  # llama.cpp would write past the end of the batch
            raise CacheError("n_batch", f"expected at most {self.n_batch} tokens at once, found {len(tokens)}")
        decode_batch(self.handle, self.batch, tokens, pos, seqs, logits, self.choice.coded)

    def logits(self, n_rows: int) -> Logits:
        """Logits of the last decode, [n_rows, n_vocab] f32, a view; the next decode overwrites it."""
        return np.ctypeslib.as_array(C.llama_get_logits(self.handle), (n_rows, self.n_vocab))

    def synchronize(self) -> None:
        C.llama_synchronize(self.handle)

    def clear(self) -> None:
        C.llama_memory_clear(self.memory, True)
        self._checkpoints.clear()

    def length(self, seq: int = 0) -> int:
        """The position after a sequence's last cell."""
        return int(C.llama_memory_seq_pos_max(self.memory, seq)) + 1

    def move_sequence(self, seq: int, to: int) -> None:
        """Move the cells of a sequence to another one."""
        C.llama_memory_seq_cp(self.memory, seq, to, -1, -1)
        C.llama_memory_seq_rm(self.memory, seq, -1, -1)

    def repeat(self, n: int, pos: int, seq: int, spare: int) -> None:
        """Append copies of the n cells before position `pos` to a sequence that ends there; only if can_repeat.

        spare: an empty sequence, which is empty again afterwards. The copies are separate cells at the next positions.
        Coded keys are rotated to these before the next decode, other keys are not. Raises CacheError; then the sequence
        is unchanged.
        """
        C.llama_memory_seq_cp(self.memory, seq, spare, pos - n, pos)
        state = np.empty(C.llama_state_seq_get_size(self.handle, spare), np.uint8)
        data = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        with captured_log(forward=False):
            size = C.llama_state_seq_get_data(self.handle, data, len(state), spare)
            if not self.choice.coded:  # llama.cpp cannot rotate quantized keys of every head size
                head = 16  # magic, sequence, streams, cells; then for each cell 12 bytes that start with its position
                state[head : head + 12 * n].view(np.int32)[::3] += n
            if size and C.llama_state_seq_set_data(self.handle, data, size, spare) and self.choice.coded:
                C.llama_memory_seq_add(self.memory, spare, -1, -1, n)
        reason = last_error() if self.choice.coded else ""  # before another call clears it
        self.move_sequence(spare, seq)
        if self.length(seq) != pos + n:
            reason = reason or (last_error() if self.choice.coded else "") or "llama.cpp copied no cells"
            raise CacheError("n_ctx", f"cannot repeat {n} cells before position {pos}: {reason}")

    def mark(self, pos: int, seq: int = 0) -> None:
        """Make drop_tail(pos) possible later: copies recurrent state and sliding windows. The sequence must end at
        `pos` now.
        """
        if pos and (checkpoints := self._checkpoints_of(seq)) is not None:
            checkpoints.take(pos)

    def _checkpoints_of(self, seq: int) -> Checkpoints | None:
        """Returns None if cells are all that its tokens depend on."""
        if seq not in self._checkpoints and (self.recurrent or self._slides):
            own = Checkpoints(self.handle, seq) if self.recurrent else of_window(self.handle, self._model, seq)
            self._checkpoints[seq] = own
        return self._checkpoints.get(seq)

    def drop_tail(self, pos: int, seq: int = 0) -> None:
        """Remove the cells at positions ≥ pos. Raises CacheError, and removes nothing, if the next token's exact rows
        would not be complete, or if recurrent state or a sliding window that has moved on has no mark there:
        measurements do not depend on earlier ones.
        """
        checkpoints = self._checkpoints_of(seq) if self._slides else self._checkpoints.get(seq)
        n_removed = self.length(seq) - pos
        if checkpoints is not None:
            removed = checkpoints.rewind(pos, exactly=True) == pos
        elif self.choice.coded and pos > 0 and n_removed > self.stats.n_rollback:
            removed = False
        else:
            removed = C.llama_memory_seq_rm(self.memory, seq, pos, -1)
        if not removed:
            raise CacheError(
                "n_rollback", f"expected a tail that can be removed exactly, found the cells from position {pos} on"
            )

    def close(self) -> None:
        if self.handle:
            with captured_log(forward=False):  # llama.cpp logs buffer sizes
                C.llama_batch_free(self.batch)
                C.llama_free(self.handle)
            self.handle = self.memory = None
        for checkpoints in self._checkpoints.values():
            mark_closed(checkpoints, "Context")
        mark_closed(self)

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
