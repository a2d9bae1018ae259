"""What slots give to the server's memory and get from it, on the engine's thread: before a prompt, and when idle."""

from __future__ import annotations

import time
from collections.abc import Sequence

from runtime.serve import slots as cells
from runtime.serve.prefixes import LEAST, MIB, Found, Prefixes
from runtime.serve.settings import Remembering
from runtime.serve.slots import Slot
from runtime.serve.slots_llama import SlotsLlama
from runtime.serve.task import Awaited, Task
from subkv.base.errors import StateError, SubkvError
from subkv.engine.context import decode_batch
from subkv.native.binding import C

N_MEASURED = 16  # tokens that are evaluated at the start to know what one costs


def prefixes_of(llm: SlotsLlama, remembering: Remembering) -> Prefixes:
    """What is to be remembered of a model's slots."""
    return Prefixes(
        llm.identity(),
        llm.n_removable_restored,
        cells.most_bytes(llm, C.llama_n_ctx_seq(llm.ctx)),
        remembering.cache_ram * MIB,
        remembering.lower,
        remembering.cache_disk_size * MIB,
        C.llama_n_ctx_seq(llm.ctx),
    )


class Recall:
    """The slots of an engine and what is remembered of them."""

    def __init__(self, llm: SlotsLlama, slots: Sequence[Slot], prefixes: Prefixes) -> None:
        self.llm, self.slots, self.prefixes = llm, slots, prefixes
        self._n_removable = llm.n_removable
        self._n_token_bytes = llm.kv_stats().bytes_kv / (len(slots) * C.llama_n_ctx_seq(llm.ctx))

    def measure(self) -> None:
        """What a token costs to evaluate and a byte to restore, on an empty slot. Later measurements go on from it."""
        llm, slot = self.llm, self.slots[0]
        n = min(N_MEASURED, llm.context_params.n_batch, C.llama_n_ctx_seq(llm.ctx) - 1)
        token = max(llm.token_bos(), 0)
        start = time.perf_counter()
        try:
            decode_batch(llm.ctx, llm._batch.batch, [token] * n, range(n), [slot.id] * n, [False] * (n - 1) + [True])
            C.llama_synchronize(llm.ctx)
            self.prefixes.evaluating.took(time.perf_counter() - start, n)
            slot.tokens = [token] * n
            cells.replace(llm, slot, prefix := cells.copied(llm, slot))
            start = time.perf_counter()
            cells.replace(llm, slot, prefix)
            self.prefixes.setting.took(time.perf_counter() - start, prefix.n_bytes)
            if llm._ctx.checkpoints is not None:  # recurrent state, of one size always: a slot's and its checkpoints'
                size = C.llama_state_seq_get_size_ext(llm.ctx, slot.id, C.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
                self.prefixes.allow((1 + cells.N_POINTS) * size)
        except SubkvError:  # what cannot be saved is never kept
            pass
        cells.truncate(C.llama_get_memory(llm.ctx), slot, 0)
        self.prefixes.measured.set()

    def prepare(self, slot: Slot, task: Task) -> None:
        """An idle slot is about to take a prompt: what it loses is kept, and what serves better is put in its place."""
        prefixes = self.prefixes
        wanted = task.prompt[:-1]
        n_held = 0 if task.anew else cells.held(slot, wanted, self._n_removable, task.space)
        if len(slot.tokens) - n_held >= LEAST:
            self.save(slot)
        found = None if task.found is None or task.found.n_reached < n_held + LEAST else task.found
        if not task.anew:
            found = self._of_another(slot, wanted, task.space, found.n_reached if found else n_held) or found
        task.found = None
        if found is None:
            return
        start = time.perf_counter()
        try:
            cells.replace(self.llm, slot, found.prefix)
        except StateError:  # it fits by its checksums and its identity: a fault of ours; the prompt is evaluated
            prefixes.refused(found)
            return
        prefixes.setting.took(time.perf_counter() - start, found.prefix.n_bytes)
        slot.space = task.space
        prefixes.restored(found, found.n_reached - n_held)

    def _of_another(self, taker: Slot, wanted: Sequence[int], space: str, n_held: int) -> Found | None:
        """A copy of another slot, at work or not, where it holds more of a prompt than n_held tokens."""
        prefixes = self.prefixes
        n, _, slot = max(
            ((cells.held(slot, wanted, prefixes.n_removable, space), -slot.id, slot) for slot in self.slots),
            key=lambda found: found[:2],
        )
        if slot is taker or n - n_held < LEAST:
            return None
        size = C.llama_state_seq_get_size(self.llm.ctx, slot.id)
        if 2 * size * prefixes.setting.seconds > (n - n_held) * prefixes.evaluating.seconds:  # it is read and written
            return None
        try:
            return Found(cells.copied(self.llm, slot), n, "slot", "")
        except StateError:
            return None

    def awaited(self, task: Task) -> Awaited | None:
        """The task that is about to evaluate most of what this one would, too; None: none, or copying costs more."""
        prefixes, wanted = self.prefixes, task.prompt[:-1]
        copying = 2 * self._n_token_bytes * prefixes.setting.seconds
        if task.anew or not prefixes.measured.is_set() or copying > prefixes.evaluating.seconds:
            return None
        n, other = max((self._ahead(slot, wanted, task.space) for slot in self.slots), key=lambda found: found[0])
        if other is None:
            return None
        n_held = max(self._within_reach(slot, wanted, task.space) for slot in self.slots)
        n_held = max(n_held, task.found.n_reached if task.found else 0)
        return Awaited(other, n) if n - n_held >= LEAST else None

    @staticmethod
    def _ahead(slot: Slot, wanted: Sequence[int], space: str) -> tuple[int, Task | None]:
        """How many tokens of a prompt a slot that reads will hold, more than it does; and for which task."""
        task = slot.task
        if task is None or not task.reading or slot.space != space:
            return 0, None
        n = SlotsLlama.longest_token_prefix(task.prompt, wanted)
        return (n, task) if n > len(slot.tokens) else (0, None)

    def _within_reach(self, slot: Slot, wanted: Sequence[int], space: str) -> int:
        """How many tokens of a prompt a slot gives to it now, itself or as a copy."""
        return cells.held(slot, wanted, self._n_removable if slot.task is None else self.prefixes.n_removable, space)

    def part(self, slot: Slot, task: Task) -> None:
        """A checkpoint is to be taken where the prompt leaves what others have in common with it."""
        if slot.checkpoints is not None:
            others = (other.tokens for other in self.slots if other is not slot and other.space == task.space)
            n = max((SlotsLlama.longest_token_prefix(tokens, task.prompt) for tokens in others), default=0)
            if n := max(n, self.prefixes.common(task.prompt, task.space)):
                slot.checkpoints.part(n)

    def held(self, prompt: Sequence[int], space: str) -> int:
        """How many of a prompt's tokens an idle slot holds now. From any thread: a guess, as slots change."""
        idle = [slot for slot in self.slots if slot.task is None]
        return max((cells.held(slot, prompt[:-1], self._n_removable, space) for slot in idle), default=0)

    def save(self, slot: Slot) -> None:
        """Keep what a slot holds, unless it is kept already."""
        if not slot.unsaved or not self.prefixes.keeps:
            return
        slot.unsaved = False
        n = len(slot.tokens)
        size = C.llama_state_seq_get_size(self.llm.ctx, slot.id)
        cost = size * self.prefixes.setting.seconds
        if n < LEAST or n * self.prefixes.evaluating.seconds < cost or size > self.prefixes.max_bytes:
            return
        try:
            prefix = cells.thinned(cells.copied(self.llm, slot), self.prefixes.n_removable)
        except StateError:
            self.prefixes.counts.n_dropped += 1
            return
        if prefix.n_bytes <= self.prefixes.max_bytes:  # else it would never be found
            self.prefixes.keep(prefix, slot.space)

    def save_one(self) -> bool:
        """Keep an idle slot's prefix while nobody waits; whether there was one, and room for it."""
        for slot in self.slots:
            if slot.task is None and slot.unsaved and self.prefixes.keeps and self.prefixes.room:
                self.save(slot)
                return True
        return False
