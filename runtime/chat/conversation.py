"""A conversation whose history is kept in the KV cache: every turn evaluates only its new tokens.

`tokens` are the tokens that the cache should hold; it holds the first `llm.n_tokens` of them. A new message, a stopped
or regenerated answer and a restored file change `tokens`; the next evaluation brings the cache up to date.
"""

from __future__ import annotations

import bisect
import codecs
import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from subkv.base import container
from subkv.base.errors import StateError, SubkvError, concerning
from subkv.base.progress import progress_bar
from subkv.engine.llama import Llama
from subkv.engine.template import MARK, Message, Template, TemplateError
from subkv.native.binding import llama_cpp

STATE = {"program": "subkv chat", "version": 4}
MORE_ROOM = "/clear starts over, a larger -c gives more room"
MAX_PERIOD, N_REPEATED = 64, 32  # tokens: the longest text whose repetition is a loop, the shortest loop

Stop = Callable[[], bool]  # called between batches and tokens
Answer = Generator[str, None, str | None]  # yields pieces, returns the text; None: no first token


class ContextFullError(SubkvError):
    """The context has no room for the tokens to evaluate."""


class FirstTokens(Protocol):
    """A source of the first tokens of a conversation's first answer, available before its prompt is evaluated."""

    n_cells: int  # cells evaluated for the first of these tokens

    def begin(self, prompt: list[int], n_held: int, sampler: Any) -> Iterator[int]:
        """The first tokens of the answer to `prompt`, often none; the context holds the prompt's first n_held tokens.

        sampler: llama_cpp's; it samples and accepts the tokens. If the source had to clear the cells, the Llama's
        n_tokens is 0 afterwards.
        """

    def reading(self, prompt: list[int]) -> contextlib.AbstractContextManager[None]:
        """The prompt is evaluated inside the block, from position 0."""

    def report(self) -> tuple[str, list[str]]:
        """After an answer: a mark for the status line, "" for none, and sentences about problems."""


@dataclasses.dataclass
class Turn:
    """Counts and times (seconds) of one answer. stopped: "end", "length", "loop", "full" or "interrupt".

    first_tokens: the source of first tokens, if used; n_first_tokens: how many it gave.
    """

    n_prompt: int = 0
    prompt_seconds: float = 0.0
    n_answer: int = 0
    answer_seconds: float = 0.0
    stopped: str = "end"
    first_tokens: FirstTokens | None = None
    n_first_tokens: int = 0

    @property
    def prompt_speed(self) -> float:
        return self.n_prompt / self.prompt_seconds if self.prompt_seconds > 0 else 0.0

    @property
    def answer_speed(self) -> float:
        """Tokens per second after the first, whose time belongs to the prompt."""
        return (self.n_answer - 1) / self.answer_seconds if self.answer_seconds > 0 and self.n_answer > 1 else 0.0


def is_loop(tokens: Sequence[int]) -> bool:
    """Whether the end of a text repeats at most MAX_PERIOD tokens, four times at least."""
    for period in range(1, min(MAX_PERIOD, len(tokens) // 4) + 1):
        tail = tokens[-max(4 * period, N_REPEATED) :]
        if len(tail) >= N_REPEATED and tail[period:] == tail[:-period]:
            return True
    return False


@dataclasses.dataclass(frozen=True)
class Sampling:
    """llama.cpp's samplers and defaults. Temperature 0: greedy; negative seed: random."""

    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    seed: int = -1

    def sampler(self, llm: Llama, n_regenerated: int) -> Any:
        """A sampler of llama_cpp; each regenerated answer gets other random numbers."""
        llm.set_seed(self.seed if self.seed < 0 else (self.seed + n_regenerated) & 0x7FFFFFFF)
        return llm._init_sampler(**{name: value for name, value in vars(self).items() if name != "seed"})


class Conversation:
    """Messages, their tokens and the cells that hold them.

    system: None: the template's own, if it has one; "": none. first_tokens: used before the first answer. shift: a full
    context drops half of the tokens after the system message. template: replaces the model's own. stop_loops: an answer
    that repeats itself ends.
    """

    def __init__(
        self,
        llm: Llama,
        system: str | None,
        sampling: Sampling,
        first_tokens: FirstTokens | None = None,
        shift: bool = False,
        template: Template | None = None,
        stop_loops: bool = False,
    ) -> None:
        if shift:
            llm.require_shift("context_shift")
        self.llm = llm
        self.shift = shift
        self.first_tokens = first_tokens
        self.template = template or Template(llm.loaded_model)
        self.sampling = sampling
        self.n_regenerated = 0
        self.system = system if system != "" or self._takes_system() else None
        self.stop_loops = stop_loops
        self.clear()

    def clear(self) -> None:
        """Drop all messages except the system message."""
        self.messages: list[Message] = self._system_message()
        self.tokens: list[int] = []
        if self.shift:  # cells of a shifted text depend on dropped tokens and cannot be reused
            self.llm.n_tokens = 0
        self.answer_start = 0  # index in tokens of the last answer's start, or -1 if it was shifted out

    def _takes_system(self) -> bool:
        try:
            self.template.render([{"role": "system", "content": ""}, {"role": "user", "content": "a"}])
        except TemplateError:
            return False
        return True

    def _system_message(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    @property
    def room(self) -> int:
        return self.llm.n_ctx() - len(self.tokens)

    def check_room(self, key: str, what: str, n_tokens: int) -> None:
        """Raises ContextFullError if n_tokens leave no room for an answer. key, what: names for the message."""
        if n_tokens >= self.room:
            raise ContextFullError(
                key,
                f"{what} needs {n_tokens} of the {max(self.room, 0)} tokens left in a context of {self.llm.n_ctx()}; "
                f"{MORE_ROOM}",
            )

    def _n_kept(self) -> int:
        """Tokens at the start that a shift keeps: the part before any first message, at least the exact sinks."""
        first, other = (
            self.llm.loaded_model.tokenize_chat(
                self.template.render([*self._system_message(), {"role": "user", "content": text}])
            )
            for text in ("1", "a")
        )
        return max(self.llm.longest_token_prefix(first, other), self.llm.kv_stats().n_sink)

    def _forget_tail(self, tokens: list[int]) -> None:
        """Count only the cells of a common prefix with `tokens`."""
        self.llm.n_tokens = self.llm.longest_token_prefix(self.llm._input_ids, tokens)

    def make_room(self, n_tokens: int) -> bool:
        """Shift until n_tokens and one token of an answer fit. Returns False, unchanged, if that is impossible."""
        if n_tokens < self.room or not self.shift:
            return n_tokens < self.room
        n_keep = self._n_kept()
        n_left, n_discard = len(self.tokens) - n_keep, 0
        while n_keep + n_left - n_discard + n_tokens >= self.llm.n_ctx():
            more = (n_left - n_discard) // 2
            if more == 0:
                return False
            n_discard += more
        self._forget_tail(self.tokens)
        if self.llm.n_tokens <= n_keep + n_discard:  # the tokens to move are not evaluated yet
            self.llm.n_tokens = min(self.llm.n_tokens, n_keep)
        try:
            if self.llm.n_tokens > n_keep:
                self.llm.discard(n_keep, n_discard)
        except SubkvError:  # refused; the cache is empty now, and all is evaluated again
            return False
        del self.tokens[n_keep : n_keep + n_discard]
        moved = self.answer_start - n_discard
        self.answer_start = moved if moved >= n_keep else -1
        return True

    def _answered(self) -> list[int]:
        """Indices of messages that are answers."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]

    def _prompt_tokens(self, user: Message) -> list[int]:
        """Tokens to append so that the model answers a message."""
        answers = self._answered()
        if not answers or not self.tokens:
            return self.llm.loaded_model.tokenize_chat(self.template.render([*self.messages, user]))
        # Render the text after the last answer: the end of that answer and the new message. The answer itself stays in
        # its cells, as it was generated.
        past = [dict(message) for message in self.messages]
        past[answers[-1]]["content"] = MARK
        before, mark, after = self.template.render([*past, user]).rpartition(MARK)
        if not mark:
            raise TemplateError(self.template.key, "expected earlier answers in the rendered conversation, found none")
        return self.tokenize(after)

    def tokenize(self, text: str) -> list[int]:
        """Tokens of a text inside a conversation, without the template."""
        tokens: list[int] = self.llm.loaded_model.tokenize(
            text.encode("utf-8", "replace"), special=False, markup=True
        ).tolist()
        return tokens

    def ask(self, text: str, n_predict: int, stop: Stop, turn: Turn) -> Answer:
        """Yield the answer to `text` in pieces and fill `turn`.

        Raises ContextFullError or TemplateError before it changes anything.
        """
        user: Message = {"role": "user", "content": text}
        new = self._prompt_tokens(user)
        if not self.make_room(len(new)):
            self.check_room("n_ctx", "the message", len(new))
        return (yield from self._turn([*self.tokens, *new], [*self.messages, user], n_predict, stop, turn))

    def regenerate(self, n_predict: int, stop: Stop, turn: Turn) -> Answer:
        """Answer the last message again, with other random numbers. Raises SubkvError if there is no answer yet."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise SubkvError("/regen", "expected an answer to replace, found none")
        if self.answer_start < 0:
            raise SubkvError("/regen", "expected the answer's question in the context, but it was shifted out")
        self.n_regenerated += 1
        return (yield from self._turn(self.tokens[: self.answer_start], self.messages[:-1], n_predict, stop, turn))

    def _turn(self, tokens: list[int], messages: list[Message], n_predict: int, stop: Stop, turn: Turn) -> Answer:
        """Answer `messages` with these tokens. Failed, or stopped before the first token, it changes nothing."""
        old_tokens, old_start = self.tokens, self.answer_start
        self.tokens, self.answer_start = tokens, len(tokens)
        answer = None
        try:
            answer = yield from self._answer(n_predict, stop, turn)
        finally:
            if answer is None:
                self._forget_tail(old_tokens)
                self.tokens, self.answer_start = old_tokens, old_start
            else:
                self.messages = [*messages, {"role": "assistant", "content": answer}]
        return answer

    def _answer(self, n_predict: int, stop: Stop, turn: Turn) -> Answer:
        """Evaluate the missing tokens, then sample."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        ends = self.template.ends
        answer, n_shown = "", 0
        lengths: list[int] = []  # of the answer before each of its tokens
        start = first = time.perf_counter()
        with contextlib.closing(self._stream(stop, turn)) as stream:
            while True:
                if turn.n_answer and self.room <= 0 and not self.make_room(0):
                    turn.stopped = "full"
                    break
                token = next(stream)
                if token is None:
                    turn.stopped = "interrupt"
                    if turn.n_answer:
                        break
                    return None
                if not turn.n_answer:
                    first = time.perf_counter()
                    turn.prompt_seconds = first - start
                turn.n_answer += 1
                turn.answer_seconds = time.perf_counter() - first
                if self.llm.loaded_model.is_end(token) or token == ends.token:
                    break
                self.tokens.append(token)
                lengths.append(len(answer))
                answer += decoder.decode(self.llm.loaded_model.piece(token))  # empty for control tokens
                end = answer.find(ends.text, n_shown) if ends.text else -1
                if end >= 0:
                    self._cut(answer[:end], lengths)
                    answer = answer[:end]
                    decoder.reset()
                    break
                n_ready = len(answer) - ends.n_held(answer)
                if n_ready > n_shown:
                    yield answer[n_shown:n_ready]
                    n_shown = n_ready
                if 0 <= n_predict <= turn.n_answer:
                    turn.stopped = "length"
                    break
                if self.stop_loops and is_loop(self.tokens[-turn.n_answer :]):
                    turn.stopped = "loop"
                    break
                if stop():
                    turn.stopped = "interrupt"
                    break
        answer += decoder.decode(b"", final=True)
        if len(answer) > n_shown:
            yield answer[n_shown:]
        return answer

    def _cut(self, answer: str, lengths: list[int]) -> None:
        """Keep only the answer's tokens, without those of a mark behind it. lengths: of the text before each token."""
        n_kept = bisect.bisect_right(lengths, len(answer), lo=1) - 1
        del self.tokens[max(len(self.tokens) - len(lengths) + n_kept, 0) :]
        if rest := answer[lengths[n_kept] :]:  # a token has the answer's end and the mark's start
            self.tokens += self.tokenize(rest)

    def _stream(self, stop: Stop, turn: Turn) -> Generator[int | None, None, None]:
        """Yield tokens of the answer endlessly; yields None and ends if stopped while a prompt is evaluated."""
        llm, prompt = self.llm, self.tokens[:]
        sampler = self.sampling.sampler(llm, self.n_regenerated)
        common = llm.longest_token_prefix(llm._input_ids, prompt)  # after /clear the cells hold other tokens
        held = min(common, len(prompt) - 1)  # at least the last token is evaluated, for its logits
        if not self._answered():  # else the cells hold earlier turns
            turn.first_tokens = self.first_tokens
        if turn.first_tokens is not None:
            for token in turn.first_tokens.begin(prompt, held, sampler):
                turn.n_first_tokens += 1
                turn.n_prompt = turn.first_tokens.n_cells
                yield token
            held = min(held, llm.n_tokens)
        llm.keep(held)  # may keep fewer tokens; the others are evaluated again
        if not turn.n_first_tokens:
            turn.n_prompt = len(prompt) - llm.n_tokens
        with contextlib.ExitStack() as reading:
            if turn.first_tokens is not None and not llm.n_tokens:
                reading.enter_context(turn.first_tokens.reading(prompt))
            bar = reading.enter_context(progress_bar("prompt", len(self.tokens) - llm.n_tokens, "tok"))
            # of a whole batch neither progress nor Ctrl-C is seen; every step of a recurrent model leaves a checkpoint
            n_step = llm.n_batch if llm._ctx.checkpoints is not None else llm.context_params.n_ubatch
            while (n_left := len(self.tokens) - llm.n_tokens) > 1:
                if stop():
                    yield None
                    return
                llm.eval(self.tokens[llm.n_tokens :][: min(n_step, n_left - 1)])
                bar.update(n_left - (len(self.tokens) - llm.n_tokens))
            llm.eval(self.tokens[llm.n_tokens :])
        while True:
            token = int(sampler.sample(llm._ctx, -1))
            yield token
            llm.eval([token])

    #
    # files
    #

    def save(self, path: Path) -> None:
        """Write messages and cells to a file atomically. Raises StateError."""
        state = self.llm.save_state()
        more = {"n_cells": state.n_tokens, "messages": self.messages, "answer_start": self.answer_start}
        head = {**STATE, **self.llm.identity(), **more}
        with concerning(path="/save"):
            container.write(path, container.Container(head, np.array(self.tokens, np.int32), bytes(state.llama_state)))

    def load(self, path: Path) -> None:
        """Replace this conversation by a saved one. Raises StateError and then changes nothing."""
        with concerning(path="/load"):
            saved = container.read(path, "/save")
            try:
                messages = [dict(message) for message in saved.head["messages"]]
                n_cells, answer_start = int(saved.head["n_cells"]), int(saved.head["answer_start"])
            except (KeyError, ValueError, TypeError) as error:
                raise StateError(
                    "path", f"expected a file written by /save, found another format in {path} ({error})"
                ) from error
            container.check(saved, STATE | self.llm.identity(), path)
            n_tokens, n_ctx = len(saved.tokens), self.llm.n_ctx()
            if not 0 <= n_cells <= n_tokens <= n_ctx or not -1 <= answer_start <= n_tokens:
                raise StateError("path", f"expected at most {n_ctx} tokens, found {n_tokens} in {path}")
        scores = np.empty((0, self.llm.n_vocab()), dtype=np.single)
        state, seed = saved.state, self.llm._seed
        self.llm.load_state(llama_cpp.LlamaState(saved.tokens[:n_cells], scores, n_cells, state, len(state), seed))
        self.tokens, self.messages, self.answer_start = saved.tokens.tolist(), messages, answer_start
