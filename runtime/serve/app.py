"""The routes: OpenAI's, llama_cpp.server's extras and llama-server's."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import re
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio.to_thread
import numpy as np
from fastapi import Body, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from runtime.serve import metrics, refusals, schema, slots
from runtime.serve.batching import Engine
from runtime.serve.completion import RequestLlama
from runtime.serve.grammars import guard_thread
from runtime.serve.guard import Guard, Hosts, Places
from runtime.serve.refusals import ApiError, bad_field
from runtime.serve.runs import EventStream, Run
from runtime.serve.settings import Limits
from runtime.serve.task import CancelledError
from subkv.base.errors import SubkvError
from subkv.engine.llama import Llama
from subkv.native.binding import llama_cpp

# isort: split
from llama_cpp.server import types

TOKEN = re.compile(r"[0-9]{1,10}")
UNION_MEMBER = re.compile(r"[\[A-Z]|^constrained-")  # pydantic puts union members' types between the fields' names


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

    def run(self, request: Request, work: Callable[[RequestLlama], Any]) -> Run:
        """Queue a request. Raises ApiError when the queue is full."""
        llm = RequestLlama(self.engine, self.name, self.limits.n_predict, space(request))
        return Run(self.places, self.pool, llm, work)

    async def complete(self, request: Request, body: schema.Common, work: Callable[[RequestLlama], Any]) -> Response:
        """Run a completion and answer with it, or with its stream."""
        if self.embeddings:
            raise ApiError(501, "this server makes embeddings; start it without --embeddings for completions")
        run = self.run(request, work)
        answer = await run.event(request.receive)
        if body.stream:  # type: ignore[attr-defined]
            return EventStream(run, body.stream_options is not None and body.stream_options.include_usage)
        return JSONResponse(answer | {"timings": run.llm.timings()})


def space(request: Request) -> str:
    """Whose request it is, as the guard found."""
    found: str = request.scope.get("space", "")
    return found


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


async def refused(_: Request, error: Exception) -> Response:
    refusal = refusals.refusal(error)
    return JSONResponse(refusals.body(refusal), refusal.status_code, refusal.headers)


async def invalid(request: Request, error: RequestValidationError) -> Response:
    # of a union every member says what it misses: the one whose literals fit is the one that was meant
    first = min(error.errors(), key=lambda found: found["type"] == "literal_error")
    where = ".".join(f"{part!s:.64}" for part in first["loc"][1:] if not UNION_MEMBER.search(str(part)))
    message = f"{where}: {first['msg']}" if where else first["msg"]
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


def create_app(service: Service, keys: list[str], hosts: Hosts | None = None) -> FastAPI:
    """The application; its engine starts and ends with it. hosts: which names it answers to, None: to any."""
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
    app = FastAPI(title="subkv", lifespan=lifespan, middleware=[guard], exception_handlers=HANDLERS)

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
        }
        model = {"id": service.name, "object": "model", "created": service.created, "owned_by": "subkv", "meta": meta}
        return {"object": "list", "data": [model]}

    @app.post("/v1/completions")
    @app.post("/v1/engines/copilot-codex/completions", include_in_schema=False)
    async def completions(request: Request, body: schema.CompletionRequest) -> Response:
        prompt: Any = body.prompt  # OpenAI's lists of one prompt stand for it
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        arguments = body.model_dump(include={"max_tokens", "logprobs", "echo"})
        arguments["grammar"] = schema.text_grammar(body.grammar)

        def work(made: RequestLlama) -> Any:
            return made.create_completion(prompt, **arguments, **sampling(llm, body))

        return await service.complete(request, body, work)

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: schema.ChatRequest) -> Response:
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

        return await service.complete(request, body, work)

    @app.post("/v1/embeddings")
    async def embeddings(request: Request, body: schema.EmbeddingRequest) -> Any:
        if not service.embeddings:
            raise ApiError(501, "this server makes no embeddings; start it with --embeddings")
        texts = [body.input] if isinstance(body.input, str) else body.input
        texts = [text.encode("utf-8", "replace").decode() for text in texts]  # half a surrogate pair is no text
        run = service.run(request, lambda _: engine.call(lambda: embed(llm, texts)).result())
        coded, n_tokens = await run.event(request.receive)
        if body.encoding_format == "base64":
            coded = [base64.b64encode(np.array(v, dtype="<f4").tobytes()).decode() for v in coded]
        data = [{"object": "embedding", "embedding": v, "index": i} for i, v in enumerate(coded)]
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return {"object": "list", "data": data, "model": service.name, "usage": usage}

    #
    # tokens
    #

    @app.post("/tokenize")
    def tokenize(body: schema.TokenizeRequest) -> Any:
        text = body.content.encode("utf-8", "replace")
        return {"tokens": llm.tokenize(text, add_bos=body.add_special, special=body.parse_special)}

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
    async def list_slots() -> Any:
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
        path = service.save_folder
        if action != "erase":
            if path is None:
                raise ApiError(501, "this server keeps no files of slots; start it with --slot-save-path")
            if body is None:
                raise bad_field("filename", "expected a name, found none")
            path /= body.filename
        slot, whose = engine.slots[id_slot], space(request)
        return await asyncio.wrap_future(engine.call(lambda: acted(engine, slot, action, path, whose)))

    return app


def embed(llm: Llama, texts: list[str]) -> tuple[list[list[float]], int]:
    """Vectors of length 1, and how many tokens they took. Raises ApiError."""
    if llm.pooling_type() == llama_cpp.LLAMA_POOLING_TYPE_NONE:
        raise ApiError(400, "this model gives no vector for a whole text; start the server with --pooling mean or last")
    counts = [len(llm.tokenize(text.encode())) for text in texts]
    if max(counts) > llm.n_batch or not min(counts):
        raise ApiError(
            400, f"input: expected texts of 1 to {llm.n_batch} tokens (-b, -c), found {min(counts)} to {max(counts)}"
        )
    return llm.embed(texts, normalize=True, truncate=False), sum(counts)


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
