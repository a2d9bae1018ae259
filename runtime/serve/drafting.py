"""Speculation in the slots: what is guessed for each of them, and what becomes of it once it is evaluated."""

from __future__ import annotations

from typing import Any

from runtime.serve.slots import Slot, truncate
from runtime.serve.slots_llama import SlotsLlama
from runtime.serve.task import Task
from subkv.base.errors import CacheError, SubkvError
from subkv.engine.drafts import seen
from subkv.native.binding import C


class SlotDrafts:
    """Asks the model's draft_model for every slot. n_removable: longest tail that the cache can remove, None: any.

    Raises SubkvError where a batch has no room for drafts.
    """

    def __init__(self, llm: SlotsLlama, n_removable: int | None) -> None:
        self._ask = llm.draft_model
        self._n_ctx: int = C.llama_n_ctx_seq(llm.ctx)
        self._n_share = llm.n_batch // llm.n_slots  # of a batch, for every slot
        self._n_removable = n_removable
        self._recurrent = llm._ctx.checkpoints is not None
        if self._ask is not None and self._n_share < 2:
            raise SubkvError(
                "n_batch",
                f"expected room for drafts, 2 tokens for each of {llm.n_slots} slots, found {llm.n_batch} for all",
            )

    def next(self, slot: Slot, task: Task) -> tuple[list[int], int]:
        """The tokens that a generating slot evaluates next, and how many of them, at the end, are guessed.

        Raises SubkvError.
        """
        new, n_held = task.tokens[-task.n_missing :], len(slot.tokens)
        room = min(self._n_ctx - n_held - len(new), self._n_share - len(new), task.limit - task.n_sampled - 1)
        if self._n_removable is not None:
            room = min(room, self._n_removable)
        if self._recurrent and task.n_missing > 1:  # first to where the next draft can be taken back to
            return new, 0
        if self._ask is None or room < 1 or not self._can_go_back(slot):
            return new, 0
        guess = self._ask(seen([*slot.tokens, *new]), seq=slot.id)[:room].tolist()
        task.n_drafted += len(guess)
        return new + guess, len(guess)

    def _can_go_back(self, slot: Slot) -> bool:
        """Recurrent state only does to a copy of it, which is made here."""
        if slot.checkpoints is None or not self._recurrent:
            return True
        slot.checkpoints.take_for_draft(len(slot.tokens))
        return slot.checkpoints.reach(len(slot.tokens)) == len(slot.tokens)

    def take_back(self, memory: Any, slot: Slot, task: Task) -> None:
        """Remove the cells of guesses behind slot.tokens, none of which was right.

        Raises CacheError where the cache gives up more than it has to; what it holds is then not known.
        """
        n = len(slot.tokens)
        truncate(memory, slot, n)
        n_lost = n - len(slot.tokens)
        task.n_missing = 1 + n_lost
        if n_lost and (slot.checkpoints is None or task.n_missing > self._n_share):
            raise CacheError("n_rollback", f"expected a rejected draft to be removed, found {n_lost} more tokens gone")
