"""The engine: one thread that owns the context and evaluates all slots together.

Every step is one llama_decode over one token of each generating slot and pieces of the prompts that are being read;
then each slot that is due samples. Slots have streams of their own, so what a request gets does not depend on its
neighbours beyond the rounding of matrix products of another height.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

import numpy as np

from runtime.serve.drafting import SlotDrafts
from runtime.serve.grammars import Grammars
from runtime.serve.prefixes import Prefixes
from runtime.serve.recall import Recall
from runtime.serve.refusals import ApiError
from runtime.serve.sampling import scored
from runtime.serve.slots import Slot, choose, shift, truncate
from runtime.serve.slots_llama import SlotsLlama
from runtime.serve.task import CancelledError, Task
from runtime.serve.watchdog import Watchdog
from subkv.base.errors import SubkvError
from subkv.engine.context import Logits, decode_batch
from subkv.native.binding import C, internals, last_error

N_KEPT = 4  # tokens at the start that a shift keeps at least: models attend to them as to nothing
CANNOT = "expected a cache that can shift, found one that refused"
T = TypeVar("T")

STALL_SECONDS = 600.0
N_TELLING = 16  # tokens of a step that tell what one of a prompt costs
POLL_SECONDS = 0.002  # between two looks at slots that wait for nothing but their grammars


def stopping() -> ApiError:
    return ApiError(503, "the server is stopping", retry_after=10)


@dataclasses.dataclass
class Totals:
    """What the engine has done since it started; seconds are sums over requests, as in llama-server."""

    n_prompt: int = 0
    n_cached: int = 0
    prompt_seconds: float = 0.0
    n_predicted: int = 0
    predicted_seconds: float = 0.0
    n_decode: int = 0
    n_busy: int = 0  # busy slots, summed over decodes
    n_tokens_max: int = 0


@dataclasses.dataclass
class Piece:
    """What one slot gives to a step: tokens after those it holds; `start`: where they begin in the batch.

    n_draft: how many of them, at the end, are guessed.
    """

    slot: Slot
    task: Task
    tokens: list[int]
    n_draft: int = 0
    start: int = 0

    @property
    def complete(self) -> bool:
        """Whether a token can be sampled after it."""
        # a slot that was shifted holds fewer tokens than its task has
        return not self.task.reading or len(self.slot.tokens) + len(self.tokens) >= len(self.task.tokens)


class Engine:
    """Runs tasks on the slots of a model's context.

    stall: seconds that a step may take before callers are told. grammars: where those of requests are compiled.
    context_shift: a full slot forgets half of its tokens and goes on. Raises SubkvError where the cache cannot.
    prefixes: what slots held is kept there; the engine closes it.
    """

    def __init__(
        self,
        llm: SlotsLlama,
        stall: float = STALL_SECONDS,
        grammars: Grammars | None = None,
        context_shift: bool = False,
        prefixes: Prefixes | None = None,
    ) -> None:
        if context_shift:
            llm.require_shift("context_shift")
        self.llm = llm
        self.context_shift = context_shift
        self.grammars = grammars or Grammars(llm.model_path, llm.n_vocab())
        self.watchdog = Watchdog(stall, self._stalled)
        self.n_ctx: int = C.llama_n_ctx_seq(llm.ctx)
        keeps = prefixes is not None and prefixes.keeps
        self.slots = [Slot(i, checkpoints=llm.checkpoints(i, keeps)) for i in range(llm.n_slots)]
        self.totals = Totals()
        stats = llm.kv_stats()
        self._n_removable = llm.n_removable
        self._drafts = SlotDrafts(llm, stats.n_rollback if stats.n_layer_coded and stats.n_recent else None)
        self._n_kept, self._n_recent = max(stats.n_sink, N_KEPT), stats.n_recent
        least = self._n_kept + self._n_recent + 2
        if context_shift and self.n_ctx < least:
            raise SubkvError("context_shift", f"expected slots of at least {least} tokens, found {self.n_ctx}")
        self._coded = llm.cache_choice.coded
        self._memory = C.llama_get_memory(llm.ctx)
        self._candidates = internals.LlamaTokenDataArray(n_vocab=llm.n_vocab())
        self._n_vocab = llm.n_vocab()
        self._waiting: deque[Task] = deque()
        self._later: list[Task] = []  # out of it while others are admitted
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._job: Future[Any] | None = None  # at work
        self._stopping = False
        self._n_used = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.recall = None if prefixes is None else Recall(llm, self.slots, prefixes)
        if prefixes is not None:
            prefixes.notify = self._wake.set

    def start(self) -> None:
        self._thread.start()
        self.watchdog.start()

    def stop(self) -> None:
        """End what runs, take nothing more."""
        with self._lock:
            self._stopping = True
        self._wake.set()

    def close(self) -> None:
        """Stop, and wait for the thread. The model stays open."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join()
        self.watchdog.close()
        self.grammars.close()
        if self.recall is not None:
            self.recall.prefixes.close()

    #
    # from other threads
    #

    def submit(self, task: Task) -> None:
        """Queue a task for the next free slot. Its prompt is shorter than n_ctx."""
        task.notify = self._wake.set
        with self._open():
            self._waiting.append(task)

    def call(self, job: Callable[[], T]) -> Future[T]:
        """Run something between two steps, on the engine's thread."""
        future: Future[T] = Future()
        with self._open():
            self._jobs.append((job, future))
        return future

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        """Something is queued here; the thread, which has not ended, will see it. Raises ApiError."""
        with self._lock:
            if self._stopping:
                raise stopping()
            if reason := self.watchdog.stalled:
                raise ApiError(503, reason, retry_after=10)
            yield
        self._wake.set()

    def _stalled(self, reason: str) -> None:
        """From the watchdog: whoever waits for the step that does not end hears of it. The step itself goes on."""
        error = ApiError(503, reason, retry_after=10)
        for slot in self.slots:
            if (task := slot.task) is not None:
                task.cancel(error)
        for task in [*self._later, *self._waiting]:
            task.cancel(error)
        for future in (self._job, *(future for _, future in list(self._jobs))):
            with contextlib.suppress(InvalidStateError):  # it has just ended
                if future is not None:
                    future.set_exception(error)

    @property
    def stuck(self) -> str | None:
        """Why no request can be answered, a sentence; None: they can."""
        started = self._thread.ident is not None
        return "the engine has ended" if started and not self._thread.is_alive() else self.watchdog.stalled

    @property
    def n_busy(self) -> int:
        return sum(slot.task is not None for slot in self.slots)

    #
    # the engine's thread
    #

    def empty(self, slot: Slot) -> None:
        """Remove a slot's cells."""
        truncate(self._memory, slot, 0)

    def touch(self, slot: Slot) -> None:
        """It was used last."""
        self._n_used += 1
        slot.used = self._n_used

    def _run(self) -> None:
        if self.recall is not None:
            self.recall.measure()
        while not self._stopping:
            self._wake.wait()
            self._wake.clear()
            try:
                while not self._stopping:
                    with self.watchdog.step():
                        if not self._step() and not (self.recall is not None and self.recall.save_one()):
                            break
            except Exception as error:  # a fault of ours must not leave callers waiting for ever
                traceback.print_exc(file=sys.stderr)
                self._fail_all(error)
        self._fail_all(stopping())
        while self.recall is not None and self.recall.save_one():
            pass

    def _fail_all(self, error: Exception) -> None:
        for slot in self.slots:
            if slot.task is not None:
                self._fail(slot, error)
        while self._waiting:
            self._waiting.popleft().end(error)
        while self._jobs:
            future = self._jobs.popleft()[1]
            if not future.done():
                future.set_exception(error)

    def _step(self) -> bool:
        """Whether there was anything to evaluate."""
        self._work()
        for slot in self.slots:
            if slot.task is not None and slot.task.cancelled:
                self._end(slot, CancelledError())
        self._admit_waiting()
        choosing = [slot for slot in self.slots if slot.task is not None and slot.task.choosing]
        for slot in choosing:
            self._choose(slot)
        pieces = self._pieces()
        if pieces:
            self._evaluate(pieces)
        elif choosing:
            self._wake.wait(POLL_SECONDS)
            self._wake.clear()  # the next step looks at everything there is
        return bool(pieces or choosing)

    def _work(self) -> None:
        """Carry out what was given to call()."""
        while self._jobs:
            job, future = self._jobs.popleft()
            if future.done() or not future.set_running_or_notify_cancel():
                continue
            self._job = future
            result, error = None, None
            try:
                result = job()
            except Exception as raised:
                error = raised
            with contextlib.suppress(InvalidStateError):  # the watchdog has given it up
                future.set_result(result) if error is None else future.set_exception(error)
            self._job = None

    def _admit_waiting(self) -> None:
        """Give slots to those that wait, but for who will find more of its prompt in another slot soon."""
        later = self._later
        try:
            while self._waiting and self.n_busy < len(self.slots):
                task = self._waiting.popleft()
                if task.cancelled:
                    continue
                taken = task.id_slot >= 0 and self.slots[task.id_slot].task is not None
                if taken or self._awaits(task):
                    later.append(task)
                    continue
                try:
                    self._admit(task)
                except Exception as error:  # in no slot yet: nobody else would tell its caller
                    task.end(error)
                    raise
        finally:
            self._waiting.extendleft(reversed(later))
            later.clear()

    def _awaits(self, task: Task) -> bool:
        """Whether a task waits for another one, which reads what both begin with."""
        if self.recall is None:
            return False
        found = task.awaited
        if found is None or not any(
            slot.task is found.task and found.task.reading and len(slot.tokens) < found.n for slot in self.slots
        ):
            task.awaited = self.recall.awaited(task)
        return task.awaited is not None

    def _admit(self, task: Task) -> None:
        slot = (
            choose(self.slots, task.prompt, self._n_removable, task.space)
            if task.id_slot < 0
            else self.slots[task.id_slot]
        )
        if self.recall is not None:
            self.recall.prepare(slot, task)
        if slot.space != task.space:
            self.empty(slot)
        slot.space, slot.unsaved = task.space, True
        common = SlotsLlama.longest_token_prefix(slot.tokens, task.prompt)
        # the last token is evaluated again if need be: its logits are wanted
        truncate(self._memory, slot, 0 if task.anew else min(common, len(task.prompt) - 1))
        if self.recall is not None:
            self.recall.part(slot, task)
        if slot.checkpoints is not None:
            slot.checkpoints.take(len(slot.tokens))  # where a turn begins
        slot.task, task.id_slot = task, slot.id
        task.n_cached = len(slot.tokens)
        task.started = time.perf_counter()

    def _pieces(self) -> list[Piece]:
        """What the next step evaluates: a token of every slot that generates, and of the prompts what fits.

        While others generate, prompts get one ubatch per step, so that a long one does not stop their streams.
        """
        for slot in self.slots:
            full = slot.task is not None and slot.task.ready and len(slot.tokens) >= self.n_ctx
            if full and not shift(self._memory, slot, self._n_kept, self._n_recent):
                self._fail(slot, SubkvError("context_shift", (self._coded and last_error()) or CANNOT))
        pieces: list[Piece] = []
        for slot in self.slots:
            if (task := slot.task) is not None and task.ready:
                try:
                    pieces.append(Piece(slot, task, *self._drafts.next(slot, task)))
                except SubkvError as error:  # of what drafts for it
                    self._fail(slot, error)
        busy = [(slot, slot.task) for slot in self.slots if slot.task is not None]
        params = self.llm.context_params
        room = params.n_ubatch if pieces else params.n_batch
        room = min(room, params.n_batch - sum(len(piece.tokens) for piece in pieces))
        reading = [(slot, task) for slot, task in busy if task.reading]
        awaited = [task.awaited for task in list(self._waiting) if task.awaited is not None]
        for slot, task in sorted(reading, key=lambda pair: pair[1].started):
            n_held = len(slot.tokens)
            # every row of a scored prompt has logits, n_vocab floats each
            n = min(room, params.n_ubatch // 4 or 1) if task.scores_prompt else room
            if n > 0 and slot.checkpoints is not None:
                n = min([n, *(stop - n_held for stop in slot.checkpoints.stops(n_held, len(task.tokens)))])
            # where others go on otherwise, what the slot holds can be copied whatever the cache
            n = min([n, *(found.n - n_held for found in awaited if found.task is task and found.n > n_held)])
            if n > 0:
                pieces.append(Piece(slot, task, task.tokens[n_held : n_held + n]))
                room -= len(pieces[-1].tokens)
        return pieces

    def _evaluate(self, pieces: list[Piece]) -> None:
        tokens: list[int] = []
        pos: list[int] = []
        seqs: list[int] = []
        logits: list[bool] = []
        for piece in pieces:
            piece.start, n, n_held = len(tokens), len(piece.tokens), len(piece.slot.tokens)
            every = piece.task.scores_prompt and piece.task.reading
            tokens += piece.tokens
            pos += range(n_held, n_held + n)
            seqs += [piece.slot.id] * n
            n_last = 1 + piece.n_draft
            logits += [every] * (n - n_last) + [every or piece.complete] * n_last
        start = time.perf_counter()
        try:
            decode_batch(self.llm.ctx, self.llm._batch.batch, tokens, pos, seqs, logits, self._coded)
        except SubkvError as error:
            for piece in pieces:
                self._fail(piece.slot, error)
            return
        self.totals.n_decode += 1
        self.totals.n_busy += self.n_busy
        for piece in pieces:
            self._advance(piece)
        if self.recall is not None and len(tokens) >= N_TELLING:
            self.recall.prefixes.evaluating.took(time.perf_counter() - start, len(tokens))

    def _advance(self, piece: Piece) -> None:
        """Take in what a step gave one slot; sample when its prompt is read."""
        slot, task = piece.slot, piece.task
        complete, reading = piece.complete, task.reading
        n_held = len(slot.tokens)
        n_new = len(piece.tokens) - piece.n_draft
        slot.tokens += piece.tokens[:n_new]
        n, points = len(slot.tokens), slot.checkpoints
        if points is not None and not piece.n_draft and (points.due(n) or n in points.stops(n_held, len(task.tokens))):
            points.take(n)
        self.totals.n_tokens_max = max(self.totals.n_tokens_max, len(slot.tokens))
        try:
            if task.scores_prompt and reading:
                known = task.prompt[n_held + 1 : n_held + 1 + len(piece.tokens)]
                for i, token in enumerate(known, piece.start):
                    task.prompt_scores.append(scored(token, self._row(i), task.sampler.n_top))
            if not complete:
                return
        except Exception as error:  # of this request only
            self._end(slot, error)
            return
        row = piece.start + n_new - 1
        task.n_missing = 1
        self._choose(slot, self._row(row))
        for i, guess in enumerate(piece.tokens[n_new:], 1):
            if slot.task is not task or task.choosing or task.tokens[-1] != guess:
                self._take_back(slot, task)
                return
            slot.tokens.append(guess)
            task.n_accepted += 1
            self._choose(slot, self._row(row + i))

    def _take_back(self, slot: Slot, task: Task) -> None:
        """Remove the rest of a draft."""
        try:
            self._drafts.take_back(self._memory, slot, task)
        except SubkvError as error:
            if slot.task is not None:
                self._fail(slot, error)
            else:
                self.empty(slot)

    def _choose(self, slot: Slot, row: Logits | None = None) -> None:
        """Sample from a row of logits; None: from the one whose grammar had not answered."""
        task = slot.task
        assert task is not None
        try:
            sampler = task.sampler
            found = (
                sampler.resume(self._candidates) if row is None else sampler.sample(row, task.tokens, self._candidates)
            )
        except Exception as error:  # of this request only: its grammar, its processors
            self._end(slot, error)
            return
        task.choosing = found is None
        if found is None:
            return
        task.give(found)
        if task.n_sampled >= task.limit or self.llm.opened.is_end(task.tokens[-1]):
            self._end(slot)

    def _row(self, index: int) -> Logits:
        """Logits of the batch's token at `index`, [n_vocab] f32: a view that the next decode overwrites."""
        return np.ctypeslib.as_array(C.llama_get_logits_ith(self.llm.ctx, index), (self._n_vocab,))

    def _end(self, slot: Slot, error: Exception | None = None) -> None:
        """A slot is idle again, and whoever waits for its task hears of its end."""
        task = slot.task
        assert task is not None
        slot.task = None
        if slot.shifted:
            slot.unsaved = False
            truncate(self._memory, slot, min(self._n_kept, len(slot.tokens)))
            slot.shifted = False
        self.touch(slot)
        self.totals.n_cached += task.n_cached
        if task.n_sampled:
            self.totals.n_prompt += len(task.prompt) - task.n_cached
            self.totals.prompt_seconds += task.prompt_seconds
            self.totals.n_predicted += task.n_sampled
            self.totals.predicted_seconds += task.predicted_seconds
        task.end(error)

    def _fail(self, slot: Slot, error: Exception) -> None:
        """End a slot's task with an error; what its cells hold is not known any more."""
        self.empty(slot)
        self._end(slot, error)
