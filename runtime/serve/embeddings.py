"""Vectors of texts: OpenAI's /v1/embeddings and llama-server's own /embedding."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np
from fastapi import FastAPI, Request

from runtime.serve import schema
from runtime.serve.refusals import ApiError
from runtime.serve.service import Service
from subkv.engine.llama import Llama
from subkv.native.binding import llama_cpp

SHORTS = 32760.0  # what the largest number becomes by embd_normalize 0, as if for 16 bits; llama.cpp's number


def pooled(llm: Llama) -> bool:
    """Whether a text has one vector; else each of its tokens has one. Raises ApiError where it has a score instead."""
    if llm.pooling_type() == llama_cpp.LLAMA_POOLING_TYPE_RANK:
        raise ApiError(400, "this model gives no vector for a text, it ranks texts: ask /v1/rerank")
    return bool(llm.pooling_type() != llama_cpp.LLAMA_POOLING_TYPE_NONE)


def embed(llm: Llama, texts: list[str]) -> tuple[list[Any], int]:
    """Vectors as the model gives them, of each text or of each of its tokens, and how many tokens they took.

    Raises ApiError.
    """
    counts = [len(llm.tokenize(text.encode())) for text in texts]
    if max(counts) > llm.n_batch or not min(counts):
        raise ApiError(
            400, f"input: expected texts of 1 to {llm.n_batch} tokens (-b, -c), found {min(counts)} to {max(counts)}"
        )
    return llm.embed(texts, normalize=False, truncate=False), sum(counts)


def normalized(vector: list[float], norm: int) -> list[float]:
    """As llama.cpp counts them: -1 as it is, 0 by the largest number, 1 taxicab, 2 of length 1, n by the n-norm."""
    values = np.array(vector, np.float64)
    if norm < 0:
        size = 1.0
    elif norm == 0:
        size = float(np.abs(values).max()) / SHORTS
    else:
        largest = float(np.abs(values).max())  # a power of it may be more than any number
        size = largest * float(np.sum(np.abs(values / largest) ** norm)) ** (1 / norm) if largest else 0.0
    return list(map(float, values / size)) if size else vector


def add_embeddings(app: FastAPI, service: Service) -> None:
    engine, llm = service.engine, service.llm

    async def vectors(request: Request, given: str | list[str], one: bool) -> tuple[list[Any], int]:
        """one: of each text, or refused."""
        if not service.embeddings:
            raise ApiError(501, "this server makes no embeddings; start it with --embeddings")
        if not pooled(llm) and one:
            raise ApiError(
                400, "this model gives no vector for a whole text; start the server with --pooling mean or last"
            )
        texts = [given] if isinstance(given, str) else given
        texts = [text.encode("utf-8", "replace").decode() for text in texts]  # half a surrogate pair is no text
        run = service.run(request, lambda _: engine.call(lambda: embed(llm, texts)).result())
        found: tuple[list[Any], int] = await run.event(request.receive)
        return found

    def coder(form: str) -> Callable[[list[float]], Any]:
        return (lambda v: base64.b64encode(np.array(v, "<f4").tobytes()).decode()) if form == "base64" else list

    @app.post("/v1/embeddings")
    async def embeddings(request: Request, body: schema.EmbeddingRequest) -> Any:
        found, n_tokens = await vectors(request, body.input, True)
        code = coder(body.encoding_format)
        data = [{"object": "embedding", "embedding": code(normalized(v, 2)), "index": i} for i, v in enumerate(found)]
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return {"object": "list", "data": data, "model": service.name, "usage": usage}

    @app.post("/embedding")
    @app.post("/embeddings", include_in_schema=False)
    async def embedding(request: Request, body: schema.NativeEmbeddingRequest) -> Any:
        found, _ = await vectors(request, body.content, False)
        code = coder(body.encoding_format)
        # without pooling as the model gives them, as llama-server has it
        rows = [[code(normalized(v, body.embd_normalize))] if pooled(llm) else [code(v) for v in v] for v in found]
        return [{"index": i, "embedding": row} for i, row in enumerate(rows)]
