"""The model behind the routes, and what they share."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from runtime.serve import metrics, schema
from runtime.serve.batching import Engine
from runtime.serve.completion import RequestLlama
from runtime.serve.grammars import guard_thread
from runtime.serve.guard import Places
from runtime.serve.native import Native
from runtime.serve.refusals import ApiError, bad_field
from runtime.serve.runs import EventStream, Run
from runtime.serve.settings import Limits
from subkv.engine.llama import Llama
from subkv.native.binding import llama_cpp

TOKEN = re.compile(r"[0-9]{1,10}")

# fields of a request that create_completion takes under the same name
SAMPLING = {"temperature", "top_p", "min_p", "top_k", "repeat_penalty", "presence_penalty", "frequency_penalty"}
SAMPLING |= {"mirostat_mode", "mirostat_tau", "mirostat_eta", "stop", "stream", "seed"}


@dataclasses.dataclass
class Service:
    """The model behind the routes. save_folder: where slots are saved; None: nowhere.

    shared_cache: what is remembered for one key serves all.
    """

    engine: Engine
    name: str
    limits: Limits
    embeddings: bool
    save_folder: Path | None
    shared_cache: bool = False

    def __post_init__(self) -> None:
        self.llm = self.engine.llm
        self.created = int(time.time())
        n_slots = len(self.engine.slots)
        self.pool = ThreadPoolExecutor(n_slots, thread_name_prefix="request", initializer=guard_thread)
        self.places = Places(n_slots, self.limits.n_queue)
        self.metrics = metrics.EngineMetrics(self.engine, lambda: self.places.n_waiting)

    def slot_file(self, whose: str, name: str) -> Path:
        """Where a slot's file of one key lies: each key has names of its own. Raises ApiError."""
        if self.save_folder is None:
            raise ApiError(501, "this server keeps no files of slots; start it with --slot-save-path")
        return self.save_folder / whose / name

    def run(
        self, request: Request, work: Callable[[RequestLlama], Any], n: int = 1, asked: Native | None = None
    ) -> Run:
        """Queue a request for n answers. Raises ApiError when the queue is full."""
        llms: list[RequestLlama] = []
        for i in range(n):
            id = llms[0].id if i else ""
            llms.append(RequestLlama(self.engine, self.name, self.limits.n_predict, space(request), i, id, asked))
        request.scope["llms"] = llms  # for the log
        return Run(self.places, self.pool, llms, work)

    async def begin(
        self, request: Request, work: Callable[[RequestLlama], Any], asked: schema.Common
    ) -> tuple[Run, list[Any]]:
        """A completion at work, and its n answers, or STARTED where it streams. Raises ApiError."""
        if self.embeddings:
            raise ApiError(501, "this server makes embeddings; start it without --embeddings for completions")
        n, n_slots = asked.n or 1, len(self.engine.slots)
        if n > n_slots:
            raise bad_field("n", f"expected at most {n_slots}, the slots (-np), found {n}")
        if asked.id_slot >= n_slots:
            raise bad_field("id_slot", f"expected a slot from 0 to {n_slots - 1} or -1, found {asked.id_slot}")
        run = self.run(request, work, n, asked)
        return run, await run.answers(request.receive)

    async def complete(self, request: Request, body: schema.Common, work: Callable[[RequestLlama], Any]) -> Response:
        """OpenAI's answer or stream, with llama-server's timings."""
        run, answers = await self.begin(request, lambda made: as_choice(work(made), made), body)
        if body.stream:  # type: ignore[attr-defined]
            options = body.stream_options
            return EventStream(run, openai_events(run, options is not None and options.include_usage))
        choices = [choice for answer in answers for choice in answer["choices"]]
        timings = run.llms[0].timings()
        return JSONResponse(
            answers[0]
            | {"choices": choices, "usage": together([answer["usage"] for answer in answers]), "timings": timings}
        )


def space(request: Request) -> str:
    """Whose request it is, as the guard found."""
    found: str = request.scope.get("space", "")
    return found


def chat_work(llm: Llama, body: schema.ChatRequest) -> Callable[[RequestLlama], Any]:
    """What answers a chat. Raises ApiError."""
    schema.check_tools(body)
    grammar, choice = schema.chat_grammar(body), schema.tool_choice(body)

    def work(made: RequestLlama) -> Any:
        return made.create_chat_completion(
            messages=body.messages,
            functions=body.functions,
            function_call=body.function_call,
            tools=body.tools,
            tool_choice=choice,
            grammar=grammar,
            max_tokens=body.max_tokens,
            logprobs=body.logprobs,
            top_logprobs=body.top_logprobs or 0,
            **sampling(llm, body),
        )

    return work


def sampling(llm: Llama, body: Any) -> dict[str, Any]:
    """A request's fields as arguments of create_completion. Raises ApiError. Tokenizes: not for the event loop."""
    arguments: dict[str, Any] = body.model_dump(include=SAMPLING)
    if body.logit_bias:
        arguments["logit_bias"] = biases(llm, body.logit_bias, body.logit_bias_type == "tokens")
    if body.min_tokens:
        arguments["logits_processor"] = llama_cpp.LogitsProcessorList(
            [llama_cpp.MinTokensLogitsProcessor(body.min_tokens, llm.token_eos())]
        )
    return arguments


def biases(llm: Llama, scores: dict[str, float], texts: bool) -> dict[str, float]:
    """By token: what is added to its logit. texts: the keys are such, every token of one gets its score."""
    if any(len(key) > schema.N_BIAS_TEXT for key in scores):
        raise bad_field("logit_bias", f"expected keys of at most {schema.N_BIAS_TEXT} characters, found a longer one")
    if texts:
        return {
            str(token): score
            for text, score in scores.items()
            for token in llm.tokenize(text.encode("utf-8", "replace"), add_bos=False, special=True)
        }
    n_vocab = llm.n_vocab()
    if not all(TOKEN.fullmatch(key) and int(key) < n_vocab for key in scores):
        raise bad_field("logit_bias", f"expected tokens from 0 to {n_vocab - 1}, found others")
    return scores


def as_choice(found: Any, made: RequestLlama) -> Any:
    """An answer, or its chunks, as one of several choices; the last chunk, or each, with llama-server's timings."""
    if isinstance(found, Iterator):
        return (as_choice(chunk, made) for chunk in found)
    choice = found["choices"][0]
    timed = "usage" not in found and (choice["finish_reason"] is not None or made.asked.timings_per_token)
    return found | {"choices": [choice | {"index": made.choice}]} | ({"timings": made.timings()} if timed else {})


def together(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The usage of a request by those of its choices: the prompt counts once."""
    n = sum(usage["completion_tokens"] for usage in usages)
    first = usages[0]
    return first | {"completion_tokens": n, "total_tokens": first["prompt_tokens"] + n}


async def openai_events(run: Run, include_usage: bool) -> AsyncIterator[dict[str, Any] | str | None]:
    """A run's chunks as OpenAI streams them.

    include_usage: one more without choices that counts the tokens, as OpenAI's stream_options ask for it.
    """
    chunk: dict[str, Any] | None = None
    async for found in run.chunks():
        if found is None:
            yield None
            continue
        chunk = found
        yield chunk
    if include_usage and chunk is not None:
        yield chunk | {"choices": [], "usage": together([llm.usage for llm in run.llms])}
    yield "[DONE]"
