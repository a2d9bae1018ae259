"""One request: llama_cpp's chat handlers and samplers, with the tokens of the engine.

llama_cpp's own completion loop is not used: it detokenizes the whole answer anew for every token, and its logprobs need
the logits of every position, [n_ctx, n_vocab] floats for each slot.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import jinja2
import numpy as np

from runtime.serve.batching import Engine
from runtime.serve.chain import Tuning, chain
from runtime.serve.grammars import Grammar
from runtime.serve.native import Native
from runtime.serve.refusals import ApiError, bad_field
from runtime.serve.sampling import Processor, Sampler, Scored
from runtime.serve.slots_llama import SlotsLlama
from runtime.serve.task import CancelledError, Task
from runtime.serve.text import StopText

# isort: split
from llama_cpp.llama_chat_format import get_chat_completion_handler

Chunk = dict[str, Any]
TUNED = {field.name for field in dataclasses.fields(Tuning)} - {"temp", "seed", "exact"}  # others are llama_cpp's

CONTEXTS = 16  # of its slot, that an answer may take with --context-shift: a client alone does not hold a slot for ever


class Logprobs:
    """Tokens as the completions API lists them, with offsets into the text."""

    def __init__(self, llm: SlotsLlama, offset: int) -> None:
        self.llm = llm
        self.offset = offset
        self.pending: list[Scored] = []

    def _text(self, token: int) -> str:
        piece: bytes = self.llm.opened.piece(token, special=True)
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError:  # OpenAI's notation for a part of a character
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def take(self) -> dict[str, Any] | None:
        """What is pending, which it then is no more; None for nothing."""
        if not self.pending:
            return None
        texts = [self._text(found.token) for found in self.pending]
        *offsets, self.offset = itertools.accumulate(map(len, texts), initial=self.offset)
        fields = {
            "tokens": texts,
            "text_offset": offsets,
            "token_logprobs": [found.logprob for found in self.pending],
            "top_logprobs": [
                {**{self._text(token): logprob for token, logprob in found.top}, text: found.logprob}  # always listed
                for text, found in zip(texts, self.pending, strict=True)
            ],
        }
        self.pending = []
        return fields


class RequestLlama:
    """What llama_cpp's chat handlers take for a Llama: everything is the model's, completions run on the engine.

    n_predict: most tokens of an answer, negative: what the slot's context holds. name: the model's name in answers.
    space: whose request it is. choice: which of several answers to one request. id: of the request's answer. asked:
    what the handlers do not pass on.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        n_predict: int,
        space: str = "",
        choice: int = 0,
        id: str = "",
        asked: Native | None = None,
    ) -> None:
        self.llm = engine.llm
        self.engine = engine
        self.name = name
        self.n_predict = n_predict
        self.space = space
        self.choice = choice
        self.id = id or f"cmpl-{uuid.uuid4()}"
        self.tasks: list[Task] = []
        self._grammars: list[Grammar] = []
        self.usage: dict[str, Any] = {}
        self.cancelled = False
        self.asked = asked or Native.model_validate({})
        self.at_stop = ""  # the stop string that the answer ended with
        self.seed = 0
        self.predicted: list[Scored] = []
        self._n_told = 0  # of them

    def __getattr__(self, name: str) -> Any:
        return getattr(self.llm, name)

    def cancel(self) -> None:
        """Nobody waits any more: give the slot back."""
        self.cancelled = True
        for grammar in self._grammars:
            grammar.close()
        for task in self.tasks:
            task.cancel()

    def create_chat_completion(self, **request: Any) -> Any:
        """The answer or its chunks, by the model's chat handler. Raises ApiError."""
        llm = self.llm
        name = llm.chat_format
        handler = llm.chat_handler or llm._chat_handlers.get(name) or get_chat_completion_handler(name)
        try:
            return handler(llama=self, **request)
        except (ValueError, TypeError, KeyError, jinja2.TemplateError) as error:
            if self.tasks:
                raise
            raise bad_field("messages", f"the model's chat template refuses them: {error}") from error

    def create_completion(
        self,
        prompt: str | Sequence[int | str],
        *,
        stream: bool = False,
        max_tokens: int | None = 16,
        stop: str | list[str] | None = None,
        seed: int | None = None,
        logprobs: int | None = None,
        echo: bool = False,
        temperature: float = 0.8,
        grammar: Any = None,
        logit_bias: dict[str, float] | None = None,
        logits_processor: Sequence[Processor] | None = None,
        stopping_criteria: Any = None,
        n_probs: int | None = None,
        post: bool = False,
        **sampling: Any,
    ) -> Any:
        """As llama_cpp.Llama.create_completion: the answer, or with `stream` its chunks. Raises ApiError.

        n_probs: how many likely tokens taken() tells of, too; post: after the samplers.
        """
        tokens = self._prompt_tokens(prompt)
        self.check_room(len(tokens))
        room = self.engine.n_ctx - len(tokens)
        if self.engine.context_shift:  # one context is enough of an answer, unless more is asked for
            room = self.engine.n_ctx * (CONTEXTS if max_tokens is not None and max_tokens >= 0 else 1)
        asked = [limit for limit in (max_tokens, self.n_predict) if limit is not None and limit >= 0]
        limit = min([room, *asked])
        rules = self._grammar(grammar)
        self.seed = random.getrandbits(32) if seed is None or seed < 0 else (seed + self.choice) & 0xFFFFFFFF
        bias = {int(token): score for token, score in (logit_bias or {}).items()}
        if self.asked.ignore_eos:
            bias |= dict.fromkeys(self.llm.ends, -math.inf)
        tuning = Tuning(temperature, self.seed, exact=post, **{key: sampling[key] for key in TUNED & sampling.keys()})
        samplers = chain(self.llm, tuning, self.asked, tokens, self.engine.n_ctx)
        sampler = Sampler(samplers, rules, bias, logits_processor or (), logprobs if n_probs is None else n_probs, post)
        task = Task(
            tokens,
            sampler,
            max(limit, 1),
            scores_prompt=echo and logprobs is not None,
            fresh=not self.asked.cache_prompt,
            space=self.space,
            id_slot=-1 if self.choice else self.asked.id_slot,
        )
        recall = self.engine.recall
        if recall is not None and not task.anew:
            task.found = recall.prefixes.find(tokens, self.space, recall.held(tokens, self.space))
        self.tasks.append(task)
        if self.cancelled:  # between the check here and the engine's there is nobody to cancel it
            task.cancel()
        self.engine.submit(task)
        shown = prompt if isinstance(prompt, str) else self.llm.text(tokens)
        stops = [stop] if isinstance(stop, str) else stop or []
        texts = (shown, "") if echo else ("", shown)
        listed = None if logprobs is None else Logprobs(self.llm, len(texts[1]))
        chunks = self._chunks(task, StopText(stops), limit, texts[0], listed, stopping_criteria)
        return chunks if stream else self._whole(chunks)

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """The model's tokens. A text that cannot fit is refused first: megabytes take minutes. Raises ApiError."""
        longest = self.llm.longest_piece
        if longest is not None:
            self.check_room(len(text) // longest, "at least ")
        return self.llm.tokenize(text, add_bos=add_bos, special=special)

    def check_room(self, n_tokens: int, bound: str = "") -> None:
        """Refuse a prompt of so many tokens, or of `bound` so many. Raises ApiError."""
        n_ctx = self.engine.n_ctx
        if n_tokens >= n_ctx:
            raise ApiError(
                400,
                f"prompt: expected fewer than {n_ctx} tokens, found {bound}{n_tokens}; a slot holds {n_ctx} (-c, "
                "divided by -np)",
                kind="exceed_context_size_error",
                n_prompt_tokens=n_tokens,
                n_ctx=n_ctx,
            )

    def _prompt_tokens(self, prompt: str | Sequence[int | str]) -> list[int]:
        llm, n_vocab = self.llm, self.llm.n_vocab()
        tokens: list[int] = []
        for i, part in enumerate([prompt] if isinstance(prompt, str) else prompt):
            if isinstance(part, int):
                tokens.append(part)
            else:
                tokens += self.tokenize(part.encode("utf-8", "replace"), add_bos=not i, special=True)
                self.check_room(len(tokens), "at least ")  # of many texts the rest is not read
        wrong = next((token for token in tokens if not 0 <= token < n_vocab), None)
        if wrong is not None:
            raise bad_field("prompt", f"expected tokens from 0 to {n_vocab - 1}, found {wrong}")
        if not tokens and llm.token_bos() >= 0:
            tokens = [llm.token_bos()]
        if not tokens:
            raise bad_field("prompt", "expected at least one token, found none")
        return tokens

    def _grammar(self, grammar: Any) -> Grammar | None:
        """A LlamaGrammar at work in its process. Raises ApiError; cancel() ends the wait for it."""
        if grammar is None:
            return None
        grammars = self.engine.grammars
        made = grammars.begin()
        self._grammars.append(made)
        try:
            if self.cancelled:
                raise CancelledError
            grammars.compile(made, grammar._grammar)
        except BaseException:
            made.close()
            if self.cancelled:
                raise CancelledError from None
            raise
        return made

    def _chunks(
        self, task: Task, text: StopText, limit: int, echo: str, logprobs: Logprobs | None, criteria: Any
    ) -> Iterator[Chunk]:
        """Chunks of text, which begins with `echo`, then an empty one with the reason of the end."""
        llm = self.llm
        head = {
            "id": self.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.name,
        }

        def chunk(shown: str, reason: str | None = None) -> Chunk:
            taken = logprobs.take() if logprobs else None
            return head | {"choices": [{"text": shown, "index": 0, "logprobs": taken, "finish_reason": reason}]}

        n, reason = 0, "length"
        n_prompt = len(task.prompt)
        seen = np.zeros(n_prompt + task.limit, dtype=np.intc)
        seen[:n_prompt] = task.prompt  # the task's own list is ahead of this loop
        try:
            for found in task:
                if task.prompt_scores and logprobs and not n:
                    logprobs.pending += [Scored(task.prompt[0]), *task.prompt_scores]
                if not n and echo:
                    yield chunk(echo)
                if limit == 0:
                    break
                if llm.opened.is_end(found.token):
                    reason = "stop"
                    break
                seen[n_prompt + n] = found.token
                n += 1
                self.predicted.append(found)
                if logprobs:
                    logprobs.pending.append(found)
                if shown := text.feed(llm.opened.piece(found.token)):
                    yield chunk(shown)
                if text.stopped or (criteria is not None and criteria(seen[: n_prompt + n], None)):
                    reason = "stop"
                    break
            self.at_stop = text.found
            if rest := text.end():
                yield chunk(rest)
            self.usage = {"prompt_tokens": n_prompt, "completion_tokens": n, "total_tokens": n_prompt + n}
            self.usage["prompt_tokens_details"] = {"cached_tokens": task.n_cached}
            yield chunk("", reason)
        finally:
            task.cancel()

    def _whole(self, chunks: Iterator[Chunk]) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        texts: list[str] = []
        logprobs: dict[str, list[Any]] = {}
        for chunk in chunks:
            answer = chunk
            choice = chunk["choices"][0]
            texts.append(choice["text"])
            for key, values in (choice["logprobs"] or {}).items():
                logprobs.setdefault(key, []).extend(values)
        answer["choices"][0] |= {"text": "".join(texts), "logprobs": logprobs or None}
        return answer | {"usage": self.usage}

    def taken(self) -> list[Scored]:
        """Tokens of the answer that this has not told of yet."""
        found = self.predicted[self._n_told :]
        self._n_told = len(self.predicted)
        return found

    def timings(self) -> dict[str, float]:
        """Of the last completion."""
        return self.tasks[-1].timings()
