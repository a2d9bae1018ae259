"""llama-server's own routes beside OpenAI's: /props, /apply-template, /completion, /infill, /lora-adapters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from runtime.serve import schema
from runtime.serve.batching import Engine
from runtime.serve.completion import Chunk, RequestLlama
from runtime.serve.native import ORDER, Native
from runtime.serve.refusals import ApiError, bad_field
from runtime.serve.runs import EventStream
from runtime.serve.sampling import Scored
from runtime.serve.service import SAMPLING, Service, sampling
from runtime.serve.slots_llama import SlotsLlama
from subkv import __version__
from subkv.base.errors import SubkvError
from subkv.engine.template import Template
from subkv.native.binding import C

STOP_TYPES = {"length": "limit", "stop": "eos"}
# fields of a request that say how its answer is sampled
SETTINGS = {*SAMPLING, *Native.model_fields, "max_tokens", "n_probs", "post_sampling_probs", "grammar"} - {"id_slot"}


def kv_cache(engine: Engine) -> dict[str, Any]:
    """The cache of all slots: bytes, bits per element."""
    stats = engine.llm.kv_stats()
    return {
        "type": stats.type_k if stats.type_k == stats.type_v else f"{stats.type_k}/{stats.type_v}",
        "bits": stats.bpe,
        "bytes": stats.bytes_kv,
        "bytes_f16": stats.bytes_f16,
        "n_cells": engine.n_ctx * len(engine.slots),
        "kernel": stats.kernel,
    }


def properties(service: Service) -> dict[str, Any]:
    """What a client may want to know before it asks."""
    engine, llm = service.engine, service.engine.llm
    try:
        template = llm.opened.chat_template()
    except SubkvError:
        template = ""

    def piece(token: int) -> str:
        return llm.opened.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""

    return {
        "default_generation_settings": {
            "n_ctx": engine.n_ctx,
            "n_predict": service.limits.n_predict,
            "params": settings(schema.NativeRequest.model_validate({"prompt": ""})),
        },
        "total_slots": len(engine.slots),
        "model_alias": service.name,
        "modalities": {"vision": False, "audio": False},
        "chat_template": template,
        "bos_token": piece(llm.token_bos()),
        "eos_token": piece(llm.token_eos()),
        "build_info": f"subkv {__version__}",
        "max_body": service.limits.max_body,
        "kv_cache": kv_cache(engine),
    }


def settings(body: schema.NativeRequest) -> dict[str, Any]:
    """How an answer is sampled, under llama-server's names."""
    found = body.model_dump(include=SETTINGS)
    n_predict, mirostat = found.pop("max_tokens"), found.pop("mirostat_mode")
    return found | {"n_predict": n_predict, "mirostat": mirostat, "samplers": body.samplers or list(ORDER)}


def probabilities(llm: SlotsLlama, found: Scored, post: bool) -> dict[str, Any]:
    """A token and the likely ones in its place, as llama-server lists them; post: those that the samplers left."""
    name = "prob" if post else "logprob"

    def one(token: int, logprob: float | None) -> dict[str, Any]:
        piece: bytes = llm.opened.piece(token, special=True)
        value = logprob if logprob is None or not post else math.exp(logprob)
        return {"id": token, "token": piece.decode("utf-8", "ignore"), "bytes": list(piece), name: value}

    return one(found.token, found.logprob) | {f"top_{name}s": [one(*likely) for likely in found.top]}


def as_llama_server(chunk: Chunk, made: RequestLlama, body: schema.NativeRequest) -> dict[str, Any]:
    """A chunk of create_completion, or its whole answer, with llama-server's fields."""
    choice, task, taken = chunk["choices"][0], made.tasks[-1], made.taken()
    answer = {
        "index": 0,
        "content": choice["text"],
        "tokens": [found.token for found in taken] if body.return_tokens or body.stream else [],
        "id_slot": task.id_slot,
        "stop": choice["finish_reason"] is not None,
        "tokens_predicted": len(made.predicted),
        "tokens_evaluated": len(task.prompt),
    }
    if taken and body.n_probs:
        listed = [probabilities(made.llm, found, body.post_sampling_probs) for found in taken]
        answer["completion_probabilities"] = listed
    if answer["stop"] or body.timings_per_token:
        answer["timings"] = made.timings()
    if not answer["stop"]:
        return answer
    n_tokens = made.usage["total_tokens"]
    return answer | {
        "model": chunk["model"],
        "prompt": made.llm.text(task.prompt, special=True),
        "generation_settings": settings(body) | {"seed": made.seed, "n_ctx": made.engine.n_ctx},
        "tokens_cached": n_tokens,
        "truncated": n_tokens >= made.engine.n_ctx,
        "stop_type": "word" if made.at_stop else STOP_TYPES[choice["finish_reason"]],
        "stopping_word": made.at_stop,
    }


@dataclasses.dataclass(frozen=True)
class Marks:
    """Tokens around the parts of a text with a gap; those of files may be -1: none."""

    prefix: int
    suffix: int
    middle: int
    project: int
    file: int


def marks_of(llm: SlotsLlama) -> Marks:
    """Raises ApiError where the vocabulary has none."""
    vocab = llm._model.vocab
    names = ("pre", "suf", "mid", "rep", "sep")
    found = [getattr(C, f"llama_vocab_fim_{name}")(vocab) for name in names]
    if min(found[:3]) < 0:
        raise ApiError(501, "this model fills no gaps: its vocabulary has no tokens for what is before and after one")
    return Marks(*found)


def gap(made: RequestLlama, body: schema.InfillRequest, marks: Marks) -> list[int]:
    """The prompt of /infill: other files, what is before the gap and after it. Raises ApiError.

    As Qwen's coders were trained; without tokens for files these come as text.
    """

    n = 0

    def plain(text: str) -> list[int]:
        nonlocal n
        found = made.tokenize(text.encode("utf-8", "replace"), add_bos=False) if text else []
        n += len(found)
        made.check_room(n, "at least ")  # of many files the rest is not read
        return found

    tokens = [made.llm.token_bos()] if C.llama_vocab_get_add_bos(made.llm._model.vocab) else []
    if body.input_extra and marks.file >= 0:
        tokens += [marks.project, *plain("project\n")] if marks.project >= 0 else []
        for file in body.input_extra:
            tokens += [marks.file, *plain(f"{file.filename}\n"), *plain(file.text)]
        tokens += [marks.file, *plain("filename\n")]
    else:
        tokens += [token for file in body.input_extra for token in plain(f"{file.filename}\n{file.text}\n\n")]
    before = [marks.prefix, *plain(body.input_prefix), *plain(body.prompt)]
    return [*tokens, *before, marks.suffix, *plain(body.input_suffix), marks.middle]


def add_llama_server(app: FastAPI, service: Service) -> None:
    llm = service.engine.llm

    @app.get("/props")
    async def props() -> Any:
        return properties(service)

    @app.get("/lora-adapters")
    async def adapters() -> Any:
        return []

    @app.post("/lora-adapters")
    async def set_adapters() -> Any:
        raise ApiError(501, "this server has no adapters; llama.cpp's llama-export-lora puts one into a model's file")

    @app.post("/apply-template")
    def apply_template(body: schema.TemplateRequest) -> Any:
        try:
            return {"prompt": Template(llm.opened).render(body.messages, tools=body.tools)}
        except SubkvError as error:
            raise bad_field("messages", str(error)) from error

    def answer(made: RequestLlama, prompt: Any, body: schema.NativeRequest, grammar: Any) -> Any:
        arguments = sampling(llm, body) | {"max_tokens": body.max_tokens, "grammar": grammar}
        arguments |= {"n_probs": body.n_probs or None, "post": body.post_sampling_probs and body.n_probs > 0}
        found = made.create_completion(prompt, **arguments)
        if not isinstance(found, Iterator):
            return as_llama_server(found, made, body)
        return (as_llama_server(chunk, made, body) for chunk in found)

    async def respond(request: Request, body: schema.NativeRequest, work: Callable[[RequestLlama], Any]) -> Response:
        run, answers = await service.begin(request, work, body)
        return EventStream(run, run.chunks()) if body.stream else JSONResponse(answers[0])

    @app.post("/completion")
    @app.post("/completions", include_in_schema=False)
    async def completion(request: Request, body: schema.NativeRequest) -> Response:
        grammar = schema.native_grammar(body)
        return await respond(request, body, lambda made: answer(made, body.prompt, body, grammar))

    @app.post("/infill")
    async def infill(request: Request, body: schema.InfillRequest) -> Response:
        grammar, marks = schema.native_grammar(body), marks_of(llm)
        return await respond(request, body, lambda made: answer(made, gap(made, body, marks), body, grammar))
