"""The routes: OpenAI's, llama_cpp.server's extras, and what concerns the server itself."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread
from fastapi import Body, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from runtime.serve import metrics, schema, slots
from runtime.serve.batching import Engine
from runtime.serve.completion import RequestLlama
from runtime.serve.embeddings import add_embeddings
from runtime.serve.guard import Guard, Hosts
from runtime.serve.llama_server import add_llama_server, kv_cache
from runtime.serve.page_routes import add_page
from runtime.serve.refusals import ApiError, bad_field, refused
from runtime.serve.requests import RequestLog
from runtime.serve.rerank import add_rerank
from runtime.serve.responses import add_responses
from runtime.serve.service import Service, chat_work, sampling, space
from runtime.serve.task import CancelledError
from subkv.base.errors import SubkvError

# isort: split
from llama_cpp.server import types

UNION_MEMBER = re.compile(r"[\[A-Z]|^constrained-")  # pydantic puts union members' types between the fields' names


async def invalid(request: Request, error: RequestValidationError) -> Response:
    # of a union every member says what it misses: the one whose literals fit is the one that was meant
    first = min(error.errors(), key=lambda found: found["type"] == "literal_error")
    if first["type"] == "json_invalid":
        what = f"expected JSON, found an error at character {first['loc'][-1]}: {first['ctx']['error']:.80}"
        return await refused(request, ApiError(400, what))
    kind = request.headers.get("content-type", "")
    if first["loc"] == ("body",) and "json" not in kind:
        return await refused(request, ApiError(400, f"expected Content-Type application/json, found {kind!r:.80}"))
    where = ".".join(f"{part!s:.64}" for part in first["loc"][1:] if not UNION_MEMBER.search(str(part)))
    reason = first["msg"].removeprefix("Value error, ")  # pydantic's, before a sentence of ours
    message = f"{where}: {reason}" if where else reason
    return await refused(request, ApiError(400, message, where or None))


async def gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)  # as proxies log it; nobody reads it


HANDLERS: dict[Any, Any] = {
    HTTPException: refused,
    RequestValidationError: invalid,
    SubkvError: refused,
    CancelledError: gone,
    Exception: refused,  # ours: uvicorn prints the traceback, too
}


def create_app(
    service: Service,
    keys: list[str],
    hosts: Hosts | None = None,
    origins: Sequence[str] = (),
    log: str = "none",
) -> FastAPI:
    """The application; its engine starts and ends with it.

    hosts: which names it answers to, None: to any. origins: names of other servers whose pages may ask, "*": any.
    log: of settings.LOG_FORMATS.
    """
    engine, llm = service.engine, service.llm

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        # texts are tokenized in such threads: more of them would only take processors away from the engine
        anyio.to_thread.current_default_thread_limiter().total_tokens = len(engine.slots)
        try:
            yield
        finally:
            await asyncio.to_thread(engine.close)
            await asyncio.to_thread(service.pool.shutdown)

    limits = service.limits
    guard = Middleware(
        Guard,
        keys=keys,
        max_body=limits.max_body,
        timeout=limits.timeout,
        hosts=hosts,
        shared=service.shared_cache,
    )
    names = "|".join(".*" if name == "*" else re.escape(name.lower()) for name in origins)
    # outermost: browsers ask without a key whether a page may ask, and show it a refusal only where it may
    cors = Middleware(
        CORSMiddleware,
        allow_origin_regex=rf"[a-z][a-z0-9+.-]*://(?:{names})(?::\d+)?" if names else None,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
    )
    stack = [Middleware(RequestLog, form=log), cors, guard]
    app = FastAPI(title="subkv", lifespan=lifespan, middleware=stack, exception_handlers=HANDLERS)

    add_page(app)
    add_llama_server(app, service)
    add_responses(app, service)
    add_rerank(app, service)
    add_embeddings(app, service)

    #
    # OpenAI
    #

    @app.get("/v1/models")
    @app.get("/models", include_in_schema=False)
    async def models() -> Any:
        meta = {
            "n_vocab": llm.n_vocab(),
            "n_ctx": engine.n_ctx,
            "n_ctx_train": llm.opened.n_ctx_train,
            "n_embd": llm.n_embd(),
            "kv_cache": kv_cache(engine),
        }
        model = {"id": service.name, "object": "model", "created": service.created, "owned_by": "subkv", "meta": meta}
        return {"object": "list", "data": [model]}

    @app.post("/v1/completions")
    @app.post("/v1/engines/copilot-codex/completions", include_in_schema=False)
    async def completions(request: Request, body: schema.CompletionRequest) -> Response:
        arguments = body.model_dump(include={"max_tokens", "logprobs", "echo"})
        arguments["grammar"] = schema.text_grammar(body.grammar)

        def work(made: RequestLlama) -> Any:
            return made.create_completion(body.prompt, **arguments, **sampling(llm, body))

        return await service.complete(request, body, work)

    @app.post("/v1/chat/completions")
    @app.post("/chat/completions", include_in_schema=False)
    async def chat(request: Request, body: schema.ChatRequest) -> Response:
        return await service.complete(request, body, chat_work(llm, body))

    #
    # tokens
    #

    def piece(token: int) -> str | list[int]:
        """A token's text, its bytes where they are a part of a character only."""
        found = llm.opened.piece(token, special=True)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return list(found)

    @app.post("/tokenize")
    def tokenize(body: schema.TokenizeRequest) -> Any:
        text = body.content.encode("utf-8", "replace")
        tokens = llm.tokenize(text, add_bos=body.add_special, special=body.parse_special)
        return {"tokens": [{"id": token, "piece": piece(token)} for token in tokens] if body.with_pieces else tokens}

    @app.post("/extras/tokenize")
    def extras_tokenize(body: types.TokenizeInputRequest) -> Any:
        return {"tokens": llm.tokenize(body.input.encode("utf-8", "replace"), special=True)}

    @app.post("/extras/tokenize/count")
    def extras_count(body: types.TokenizeInputRequest) -> Any:
        return {"count": len(extras_tokenize(body)["tokens"])}

    def text_of(tokens: list[int]) -> str:
        n_vocab = llm.n_vocab()
        if any(not 0 <= token < n_vocab for token in tokens):
            raise bad_field("tokens", f"expected numbers from 0 to {n_vocab - 1}, found others")
        return llm.text(tokens, special=True)

    @app.post("/detokenize")
    def detokenize(body: schema.DetokenizeRequest) -> Any:
        return {"content": text_of(body.tokens)}

    @app.post("/extras/detokenize")
    def extras_detokenize(body: types.DetokenizeInputRequest) -> Any:
        return {"text": text_of(body.tokens)}

    #
    # the server
    #

    @app.get("/health")
    @app.get("/v1/health", include_in_schema=False)
    async def health() -> Any:
        if reason := engine.stuck:
            raise ApiError(503, reason, retry_after=10)
        return {"status": "ok"}

    @app.get("/metrics")
    async def read_metrics() -> Response:
        return PlainTextResponse(generate_latest(service.metrics), media_type=metrics.CONTENT_TYPE)

    def state(slot: slots.Slot) -> dict[str, Any]:
        task = slot.task
        now = {"id": slot.id, "n_ctx": engine.n_ctx, "is_processing": task is not None, "n_tokens": len(slot.tokens)}
        now["speculative"] = llm.draft_model is not None
        if task is not None:
            now |= {"n_prompt_tokens": len(task.prompt), "n_decoded": task.n_sampled}
        return now

    @app.get("/slots")
    async def list_slots(fail_on_no_slot: bool = False) -> Any:
        if fail_on_no_slot and engine.n_busy == len(engine.slots):
            raise ApiError(503, "every slot is at work; come again later", retry_after=1)
        return [state(slot) for slot in engine.slots]

    @app.post("/slots/{id_slot}")
    async def act(
        request: Request,
        id_slot: int,
        action: str,
        body: schema.SlotFile | None = Body(None),  # noqa: B008
    ) -> Any:
        if not 0 <= id_slot < len(engine.slots):
            raise ApiError(404, f"expected a slot from 0 to {len(engine.slots) - 1}, found {id_slot}")
        if action not in ("save", "restore", "erase"):
            raise bad_field("action", f"expected save, restore or erase, found {action!r}")
        path, whose = None, space(request)
        if action != "erase":
            path = service.slot_file(whose, "" if body is None else body.filename)
            if body is None:
                raise bad_field("filename", "expected a name, found none")
        slot = engine.slots[id_slot]
        return await asyncio.wrap_future(engine.call(lambda: acted(engine, slot, action, path, whose)))

    return app


def acted(engine: Engine, slot: slots.Slot, action: str, path: Path | None, whose: str) -> dict[str, Any]:
    """On the engine's thread: erase an idle slot, save it or restore it; llama-server's answer. path: a slot's file.

    whose: the key's; what another key's requests left is not saved for it.
    """
    if slot.task is not None:
        raise ApiError(409, f"slot {slot.id} is at work; try again when it is idle", retry_after=1)
    n, start = len(slot.tokens), time.perf_counter()
    answer: dict[str, Any] = {"id_slot": slot.id}
    if action == "erase":
        engine.empty(slot)
        return answer | {"n_erased": n}
    assert path is not None
    answer["filename"] = path.name
    if action == "save":
        if slot.tokens and slot.space != whose:
            raise ApiError(403, f"slot {slot.id} holds a conversation of another key")
        answer |= {"n_saved": n, "n_written": slots.save(engine.llm, slot, path)}
    else:
        n_read = slots.restore(engine.llm, slot, path, engine.n_ctx, whose)
        engine.touch(slot)
        answer |= {"n_restored": len(slot.tokens), "n_read": n_read}
    return answer | {"timings": {f"{action}_ms": 1e3 * (time.perf_counter() - start)}}
