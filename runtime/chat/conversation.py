"""A conversation whose history lives in the KV cache: every turn evaluates its new tokens only.

`tokens` is what the cache should hold; what it does hold is its first `llm.n_tokens`. Whatever a turn does (a new
message, an answer that was stopped, a regenerated one, a restored file) changes `tokens`; the next evaluation closes
the gap.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from subkv.base import container as statefile
from subkv.base.errors import StateError, SubkvError
from subkv.engine.llama import Llama
from subkv.engine.model import token_piece
from subkv.native.binding import C, llama_cpp

if TYPE_CHECKING:
    from runtime.warmstart.start import Decision, WarmStart

Message = dict[str, str]

MARK = "\x01answer\x01"  # stands for an answer while a template is rendered; control characters are in no text
STATE_VERSION = 2
MORE_ROOM = "/clear starts over, a larger -c gives more room"


class ContextFullError(SubkvError):
    """The context has no room for what should be evaluated."""


class TemplateError(SubkvError):
    """The model's chat template is missing or refuses the conversation."""


@dataclasses.dataclass
class Turn:
    """What one answer took. Times in seconds. stopped: "end", "length", "full" or "interrupt".

    warm: what was decided where an answer may begin warm; n_warm: its tokens that did.
    """

    n_prompt: int = 0
    prompt_seconds: float = 0.0
    n_answer: int = 0
    answer_seconds: float = 0.0
    stopped: str = "end"
    warm: Decision | None = None
    n_warm: int = 0

    @property
    def prompt_speed(self) -> float:
        return self.n_prompt / self.prompt_seconds if self.prompt_seconds > 0 else 0.0

    @property
    def answer_speed(self) -> float:
        """Tokens per second after the first, whose time belongs to the prompt."""
        return (self.n_answer - 1) / self.answer_seconds if self.answer_seconds > 0 and self.n_answer > 1 else 0.0


@dataclasses.dataclass
class Sampling:
    """llama.cpp's samplers and defaults; temperature 0 is greedy."""

    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0

    def arguments(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Template:
    """The model's own chat template (GGUF metadata)."""

    def __init__(self, llm: Llama) -> None:
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        text = llm.metadata.get("tokenizer.chat_template")
        if not text:
            raise TemplateError(
                "tokenizer.chat_template", "expected a chat template in the model's metadata, found none"
            )
        eos, bos = (
            llm._model.token_get_text(token) if token >= 0 else "" for token in (llm.token_eos(), llm.token_bos())
        )
        self.formatter = Jinja2ChatFormatter(template=text, eos_token=eos, bos_token=bos)

    def render(self, messages: list[Message]) -> str:
        """Prompt that ends where the assistant's answer begins. Raises TemplateError."""
        try:
            return str(self.formatter(messages=messages).prompt)  # type: ignore[arg-type]
        except (ValueError, jinja2.TemplateError) as error:
            raise TemplateError(
                "tokenizer.chat_template", f"the model's template refuses the conversation: {error}"
            ) from error


class Conversation:
    """Messages, their tokens and the cells that hold them.

    warm: the first answer may begin with tokens from a similar prompt's summary; the prompt is evaluated after them.
    """

    def __init__(
        self, llm: Llama, system: str | None, sampling: Sampling, seed: int, warm: WarmStart | None = None
    ) -> None:
        self.llm = llm
        self.warm = warm
        self.template = Template(llm)
        self.sampling = sampling
        self.seed = seed
        self.n_regenerated = 0
        self.system = system
        self.messages: list[Message] = []
        self.tokens: list[int] = []
        self.answer_start = 0  # index in tokens where the last answer begins
        self.clear()

    def clear(self) -> None:
        """Forget everything but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.tokens = []
        self.answer_start = 0

    @property
    def room(self) -> int:
        return self.llm.n_ctx() - len(self.tokens)

    def check_room(self, key: str, what: str, n_tokens: int) -> None:
        """Raises ContextFullError when so many tokens leave no room for an answer; key and what: what to call them."""
        if n_tokens >= self.room:
            raise ContextFullError(
                key,
                f"{what} needs {n_tokens} of the {max(self.room, 0)} tokens left in a context of {self.llm.n_ctx()}; "
                f"{MORE_ROOM}",
            )

    def _prompt_tokens(self, text: str) -> list[int]:
        """Tokens to append so that the model answers `text`."""
        user: Message = {"role": "user", "content": text}
        answers = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        if not answers or not self.tokens:
            return self._tokenize(self.template.render([*self.messages, user]), first=True)
        # What follows the last answer in the rendered conversation: the end of that answer and the new message. The
        # answer itself stays as generated, in its cells.
        past = [dict(message) for message in self.messages]
        past[answers[-1]]["content"] = MARK
        before, mark, after = self.template.render([*past, user]).rpartition(MARK)
        if not mark:
            raise TemplateError(
                "tokenizer.chat_template", "expected earlier answers in the rendered conversation, found none"
            )
        return self._tokenize(after, first=False)

    def count(self, text: str) -> int:
        """Tokens of a text, the template around it left out."""
        return len(self._tokenize(text, first=False))

    def _tokenize(self, text: str, first: bool) -> list[int]:
        tokens = self.llm.tokenize(text.encode("utf-8", "replace"), add_bos=first, special=True)
        bos = self.llm.token_bos()
        if first and len(tokens) > 1 and tokens[0] == tokens[1] == bos:  # the template writes it, too
            tokens = tokens[1:]
        return tokens

    def ask(self, text: str, n_predict: int, stop: Callable[[], bool], turn: Turn) -> Iterator[str]:
        """Yield the answer to `text` piece by piece and fill `turn`.

        stop() is asked between batches and tokens. Raises ContextFullError or TemplateError before anything changes.
        """
        new = self._prompt_tokens(text)
        self.check_room("-c", "the message", len(new))
        tokens, messages, answer_start = self.tokens[:], self.messages[:], self.answer_start
        self.tokens += new
        self.answer_start = len(self.tokens)
        answer = None
        try:
            answer = yield from self._answer(n_predict, stop, turn)
        finally:
            if answer is None:  # stopped while the prompt was read, or failed: the turn never happened
                self._restore(tokens, messages, answer_start)
            else:
                self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def _restore(self, tokens: list[int], messages: list[Message], answer_start: int) -> None:
        same = next((i for i, (a, b) in enumerate(zip(tokens, self.tokens, strict=False)) if a != b), len(tokens))
        self.llm.n_tokens = min(self.llm.n_tokens, same)
        self.tokens, self.messages, self.answer_start = tokens, messages, answer_start

    def regenerate(self, n_predict: int, stop: Callable[[], bool], turn: Turn) -> Iterator[str]:
        """Answer the last message anew, with other random numbers. Raises SubkvError when there is no answer yet."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise SubkvError("/regen", "expected an answer to replace, found none")
        self.n_regenerated += 1
        tokens, messages = self.tokens[:], self.messages[:]
        del self.tokens[self.answer_start :]
        answer = None
        try:
            answer = yield from self._answer(n_predict, stop, turn)
        finally:
            if answer is None:
                self._restore(tokens, messages, self.answer_start)
            else:
                self.messages = [*messages[:-1], {"role": "assistant", "content": answer}]

    def _answer(self, n_predict: int, stop: Callable[[], bool], turn: Turn) -> Any:
        """Evaluate what is missing, then sample. Returns the text, or None when stopped before the first token."""
        llm = self.llm
        start = time.perf_counter()
        llm.set_seed(self.seed if self.seed < 0 else (self.seed + self.n_regenerated) & 0x7FFFFFFF)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        answer = ""
        stream = self._stream(stop, turn)
        first = 0.0
        while True:
            if turn.n_answer and self.room <= 0:
                turn.stopped = "full"
                break
            token = next(stream)
            if token is None:
                turn.stopped = "interrupt"
                if turn.n_answer:
                    break
                stream.close()
                return None
            if not turn.n_answer:
                first = time.perf_counter()
                turn.prompt_seconds = first - start
            turn.n_answer += 1
            turn.answer_seconds = time.perf_counter() - first
            if C.llama_vocab_is_eog(llm._model.vocab, token):
                break
            self.tokens.append(token)
            piece = decoder.decode(self.piece(token))
            answer += piece
            if piece:
                yield piece
            if 0 <= n_predict <= turn.n_answer:
                turn.stopped = "length"
                break
            if stop():
                turn.stopped = "interrupt"
                break
        stream.close()
        tail = decoder.decode(b"", final=True)
        if tail:
            yield tail
        return answer + tail

    def _stream(self, stop: Callable[[], bool], turn: Turn) -> Generator[int | None, None, None]:
        """Tokens of the answer, without end; None, and no more, when stopped while a prompt is read."""
        llm, warm = self.llm, self.warm
        common = llm.longest_token_prefix(llm._input_ids, self.tokens)  # after /clear the cells are of other tokens
        held = min(common, len(self.tokens) - 1)  # the last token is evaluated again if need be: it gives the logits
        if any(message["role"] == "assistant" for message in self.messages):  # earlier turns are in exact cells
            warm = None
        prompt, sampler = self.tokens[:], None
        if warm is not None:
            turn.warm = warm.begin(prompt, held)
            held = 0 if turn.warm.touched else held
            sampler = llm._init_sampler(**self.sampling.arguments())
            if turn.warm.warm:
                turn.n_prompt = turn.warm.n_cells
                for token in warm.head(prompt, sampler):
                    turn.n_warm += 1
                    yield token
        llm.n_tokens = held if llm._ctx.kv_cache_seq_rm(-1, held, -1) else 0  # 0: coded cells, all is evaluated again
        if not turn.n_warm:
            turn.n_prompt = len(self.tokens) - llm.n_tokens
        with contextlib.ExitStack() as memory:
            if warm is not None and not llm.n_tokens:
                memory.enter_context(warm.remembering(prompt))
            n_left = 1 if sampler is None else 0  # left to generate(), which needs its logits
            while len(self.tokens) - llm.n_tokens > n_left:
                if stop():
                    yield None
                    return
                end = min(llm.n_tokens + llm.n_batch, len(self.tokens) - n_left)
                llm.eval(self.tokens[llm.n_tokens : end])
        if sampler is None:
            yield from llm.generate(self.tokens[-1:], reset=False, **self.sampling.arguments())
            return
        while True:  # the same sampler for warm and other tokens
            token = int(sampler.sample(llm._ctx, -1))
            yield token
            llm.eval([token])

    def piece(self, token: int) -> bytes:
        """The bytes of one token as shown to the user; control tokens show nothing."""
        return token_piece(self.llm._model.vocab, token)

    #
    # files
    #

    def save(self, path: Path) -> None:
        """Write messages and cells to one file, completely or not at all. Raises StateError."""
        state = self.llm.save_state()
        head = {
            "version": STATE_VERSION,
            **self.llm.identity(),
            "n_cells": state.n_tokens,
            "messages": self.messages,
            "tokens": [int(token) for token in self.tokens],
            "answer_start": self.answer_start,
        }
        statefile.write(path, head, bytes(state.llama_state), "/save")

    def load(self, path: Path) -> None:
        """Replace this conversation by a saved one. Raises StateError; then this one goes on unchanged."""
        head, cells = statefile.read(path, "/load", "/save")
        try:
            tokens, messages = [int(t) for t in head["tokens"]], [dict(m) for m in head["messages"]]
            n_cells, answer_start = int(head["n_cells"]), int(head["answer_start"])
        except (KeyError, ValueError, TypeError) as error:
            raise StateError(
                "/load", f"expected a file written by /save, found something else in {path} ({error})"
            ) from error
        statefile.check(head, {"version": STATE_VERSION} | self.llm.identity(), "/load", path)
        if not 0 <= n_cells <= len(tokens) <= self.llm.n_ctx() or not 0 <= answer_start <= len(tokens):
            raise StateError("/load", f"expected at most {self.llm.n_ctx()} tokens, found {len(tokens)} in {path}")
        input_ids = np.array(tokens[:n_cells], dtype=np.intc)
        scores = np.empty((0, self.llm.n_vocab()), dtype=np.single)
        self.llm.load_state(llama_cpp.LlamaState(input_ids, scores, n_cells, cells, len(cells), self.llm._seed))
        self.tokens, self.messages, self.answer_start = tokens, messages, answer_start
