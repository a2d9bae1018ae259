"""llama-server's own routes beside OpenAI's: /props, /apply-template, /completion."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from runtime.serve import schema
from runtime.serve.completion import Chunk, RequestLlama
from runtime.serve.refusals import bad_field
from runtime.serve.runs import EventStream
from runtime.serve.service import Service, sampling
from subkv.base.errors import SubkvError
from subkv.engine.template import Template

STOP_TYPES = {"length": "limit", "stop": "eos"}


def properties(service: Service) -> dict[str, Any]:
    """What a client may want to know before it asks. kv_cache: of all slots, in bytes; bits per element."""
    engine, llm = service.engine, service.engine.llm
    stats = llm.kv_stats()
    kind = stats.type_k if stats.type_k == stats.type_v else f"{stats.type_k}/{stats.type_v}"
    try:
        template = llm.opened.chat_template()
    except SubkvError:
        template = ""

    def piece(token: int) -> str:
        return llm.opened.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""

    return {
        "default_generation_settings": {"n_ctx": engine.n_ctx, "n_predict": service.limits.n_predict},
        "total_slots": len(engine.slots),
        "model_alias": service.name,
        "modalities": {"vision": False, "audio": False},
        "chat_template": template,
        "bos_token": piece(llm.token_bos()),
        "eos_token": piece(llm.token_eos()),
        "build_info": f"subkv {version('subkv')}",
        "max_body": service.limits.max_body,
        "kv_cache": {
            "type": kind,
            "bits": stats.bpe,
            "bytes": stats.bytes_kv,
            "bytes_f16": stats.bytes_f16,
            "n_cells": engine.n_ctx * len(engine.slots),
            "kernel": stats.kernel,
        },
    }


def as_llama_server(chunk: Chunk, made: RequestLlama, text: str) -> dict[str, Any]:
    """A chunk of create_completion, or its whole answer, with llama-server's fields. text: what the fields tell of."""
    choice = chunk["choices"][0]
    answer = {"index": 0, "content": text, "stop": choice["finish_reason"] is not None}
    if not answer["stop"]:
        return answer
    return answer | {
        "model": chunk["model"],
        "tokens_predicted": made.usage["completion_tokens"],
        "tokens_evaluated": made.usage["prompt_tokens"],
        "tokens_cached": made.usage["total_tokens"],
        "truncated": False,
        "stop_type": "word" if made.at_stop else STOP_TYPES[choice["finish_reason"]],
        "timings": made.timings(),
    }


def add_llama_server(app: FastAPI, service: Service) -> None:
    llm = service.engine.llm

    @app.get("/props")
    async def props() -> Any:
        return properties(service)

    @app.post("/apply-template")
    def apply_template(body: schema.TemplateRequest) -> Any:
        try:
            return {"prompt": Template(llm.opened).render(body.messages)}
        except SubkvError as error:
            raise bad_field("messages", str(error)) from error

    @app.post("/completion")
    @app.post("/completions", include_in_schema=False)
    async def completion(request: Request, body: schema.NativeRequest) -> Response:
        grammar = schema.native_grammar(body)

        def work(made: RequestLlama) -> Any:
            arguments = sampling(llm, body) | {"max_tokens": body.max_tokens, "grammar": grammar}
            found = made.create_completion(body.text, **arguments)
            if not isinstance(found, Iterator):
                return as_llama_server(found, made, found["choices"][0]["text"])
            return (as_llama_server(chunk, made, chunk["choices"][0]["text"]) for chunk in found)

        run, answer = await service.begin(request, work)
        return EventStream(run, run.chunks()) if body.stream else JSONResponse(answer)
