"""How well texts answer a query, by a model that was made to say that: Jina's and llama-server's /v1/rerank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, Field

from runtime.serve.completion import RequestLlama
from runtime.serve.refusals import ApiError, bad_field
from runtime.serve.schema import N_INPUTS
from runtime.serve.service import Service
from runtime.serve.slots_llama import SlotsLlama
from runtime.serve.task import CancelledError
from subkv.native.binding import C

MOST_LETTERS = 64  # of a text for each token that a batch holds: more is refused before it is cut into tokens


class RerankRequest(BaseModel):
    """POST /v1/rerank. top_n: how many of the best to tell, default: all."""

    query: str
    documents: Annotated[list[str], Field(min_length=1, max_length=N_INPUTS)]
    top_n: int | None = Field(None, ge=1)


def pairs(made: RequestLlama, query: str, documents: Iterable[str]) -> Iterator[list[int]]:
    """Tokens of a query and each text, by the model's own template or as cross-encoders have them. Raises ApiError."""
    opened, vocab = made.llm.opened, made.llm._model.vocab
    template = C.llama_model_chat_template(opened.handle, b"rerank")
    if template:
        form = template.decode("utf-8", "replace")
        for document in documents:
            given = {"{query}": query, "{document}": document}
            text = re.sub(r"\{query\}|\{document\}", lambda found: given[found[0]], form)  # noqa: B023
            yield made.tokenize(text.encode("utf-8", "replace"), special=True)
        return

    def plain(text: str) -> list[int]:
        return made.tokenize(text.encode("utf-8", "replace"), add_bos=False)

    sep = C.llama_vocab_sep(vocab)
    eos = C.llama_vocab_eos(vocab) if C.llama_vocab_eos(vocab) >= 0 else sep
    begin = [C.llama_vocab_bos(vocab)] if C.llama_vocab_get_add_bos(vocab) else []
    end = [eos] if C.llama_vocab_get_add_eos(vocab) else []
    between = [*end, *([sep] if C.llama_vocab_get_add_sep(vocab) else [])]
    asked = [*begin, *plain(query), *between]
    for document in documents:
        yield [*asked, *plain(document), *end]


def scores(llm: SlotsLlama, pairs: Sequence[Sequence[int]]) -> list[float]:
    """One for each pair; on the engine's thread."""
    found = []
    for tokens in pairs:
        llm._ctx.kv_cache_clear()
        llm._batch.reset()
        llm._batch.add_sequence(tokens, 0, True)
        llm._ctx.decode(llm._batch)
        found.append(float(C.llama_get_embeddings_seq(llm.ctx, 0)[0]))
    return found


def rank(made: RequestLlama, query: str, documents: Sequence[str]) -> tuple[list[float], int]:
    """A score for each text, and how many tokens they took. Raises ApiError."""
    llm = made.llm
    if not llm.ranks:
        raise ApiError(400, "this model ranks no texts; start the server with --pooling rank and one that does")
    most = MOST_LETTERS * llm.n_batch
    if len(query) + max(map(len, documents)) > most:
        raise bad_field("documents", f"expected at most {most} letters with the query, found one of more")
    found = []
    for tokens in pairs(made, query, documents):
        if made.cancelled:
            raise CancelledError
        if not 1 <= len(tokens) <= llm.n_batch:
            raise bad_field(
                "documents", f"expected 1 to {llm.n_batch} tokens with the query (-b, -c), found {len(tokens)}"
            )
        found.append(tokens)
    return made.engine.call(lambda: scores(llm, found)).result(), sum(map(len, found))


def add_rerank(app: FastAPI, service: Service) -> None:
    @app.post("/v1/rerank")
    @app.post("/rerank", include_in_schema=False)
    @app.post("/v1/reranking", include_in_schema=False)
    @app.post("/reranking", include_in_schema=False)
    async def rerank(request: Request, body: RerankRequest) -> Any:
        if not service.embeddings:
            raise ApiError(
                501, "this server ranks no texts; start it with --embeddings --pooling rank and a model that does"
            )
        run = service.run(request, lambda made: rank(made, body.query, body.documents))
        found, n_tokens = await run.event(request.receive)
        best = sorted(range(len(found)), key=lambda i: -found[i])[: body.top_n]
        results = [{"index": i, "relevance_score": found[i]} for i in best]
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return {"object": "list", "model": service.name, "results": results, "usage": usage}
