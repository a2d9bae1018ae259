"""OpenAI's /v1/responses, answered as a chat: a text or messages in, one message out, nothing kept on the server."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field, ValidationError

from runtime.serve import schema
from runtime.serve.refusals import bad_field
from runtime.serve.runs import EventStream, Run
from runtime.serve.service import Service, chat_work

TEXTS = ("input_text", "output_text", "text")  # parts of a message
# what would change the answer, and is not there; everything else that is not known is ignored, as by the other routes
NOT_THERE = ("tools", "previous_response_id", "conversation", "prompt", "background")


class TextConfig(BaseModel):
    format: dict[str, Any] | None = None


class ResponseRequest(schema.Common):
    """POST /v1/responses. The fields of schema.Common mean what they mean for a chat."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextConfig | None = None
    stream: bool = False
    n: schema.One | None = 1
    top_p: float = Field(0.95, ge=0.0, le=1.0)
    tools: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    background: Any = None

    def chat(self) -> schema.ChatRequest:
        """The same as a chat. Raises ApiError, RequestValidationError."""
        for name in NOT_THERE:
            if found := getattr(self, name):
                raise bad_field(name, "expected none, as this server keeps no responses and has no tools, found one")
        same = self.model_dump(exclude_unset=True, include={*schema.Common.model_fields, "top_p", "stream"} - {"n"})
        messages = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else _messages(self.input)
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        more = {"messages": messages, "max_tokens": self.max_output_tokens, "response_format": self._format()}
        try:
            return schema.ChatRequest.model_validate(same | more)
        except ValidationError as error:
            found = [fault | {"loc": ("body", "input", *fault["loc"][1:])} for fault in error.errors()]
            raise RequestValidationError(found) from error

    def _format(self) -> dict[str, Any] | None:
        form = self.text.format if self.text is not None else None
        kind = None if form is None else form.get("type")
        if kind not in (None, "text", "json_object", "json_schema"):
            raise bad_field("text.format", f"expected text, json_object or json_schema, found {kind!r:.80}")
        return {"type": kind, "json_schema": form} if kind == "json_schema" else form


def _messages(items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for item in items:
        if item.get("type", "message") != "message":
            raise bad_field("input", f"expected messages, found an item of type {item['type']!r:.80}")
        content = item.get("content")
        if isinstance(content, list):
            known = [isinstance(part, dict) and part.get("type") in TEXTS for part in content]
            content = [part | {"type": "text"} if text else part for part, text in zip(content, known, strict=True)]
        found.append({"role": item.get("role"), "content": content})
    return found


class Answer:
    """A response as it grows. model: its name."""

    def __init__(self, model: str, body: ResponseRequest) -> None:
        self.text = ""
        self.item = f"msg_{uuid.uuid4().hex}"
        self.head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "parallel_tool_calls": False,
            "tool_choice": "none",
            "tools": [],
            "error": None,
            "incomplete_details": None,
        }

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def message(self, status: str) -> dict[str, Any]:
        parts = [] if status == "in_progress" else [self.part()]
        return {"type": "message", "id": self.item, "role": "assistant", "status": status, "content": parts}

    def begun(self) -> dict[str, Any]:
        return self.head | {"status": "in_progress", "output": [], "usage": None}

    def ended(self, reason: str | None, usage: dict[str, Any]) -> dict[str, Any]:
        """The whole of it. reason, usage: a chat's."""
        status = "incomplete" if reason == "length" else "completed"
        details = {"reason": "max_output_tokens"} if reason == "length" else None
        n_cached = usage["prompt_tokens_details"]["cached_tokens"]
        counts = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": n_cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        more = {"status": status, "incomplete_details": details, "output": [self.message(status)], "usage": counts}
        return self.head | more


async def events(run: Run, answer: Answer) -> AsyncIterator[dict[str, Any] | str | None]:
    """A chat's chunks as events of a response, numbered."""
    n = 0

    def event(kind: str, **fields: Any) -> dict[str, Any]:
        nonlocal n
        n += 1
        return {"type": f"response.{kind}", "sequence_number": n - 1} | fields

    where = {"item_id": answer.item, "output_index": 0, "content_index": 0}
    yield event("created", response=answer.begun())
    yield event("in_progress", response=answer.begun())
    yield event("output_item.added", output_index=0, item=answer.message("in_progress"))
    yield event("content_part.added", part=answer.part(), **where)
    reason = None
    async for chunk in run.chunks():
        if chunk is None:
            yield None
            continue
        choice = chunk["choices"][0]
        reason = choice["finish_reason"] or reason
        if delta := choice["delta"].get("content"):
            answer.text += delta
            yield event("output_text.delta", delta=delta, logprobs=[], **where)
    whole = answer.ended(reason, run.llms[0].usage)
    yield event("output_text.done", text=answer.text, logprobs=[], **where)
    yield event("content_part.done", part=answer.part(), **where)
    yield event("output_item.done", output_index=0, item=whole["output"][0])
    yield event(whole["status"], response=whole)


def add_responses(app: FastAPI, service: Service) -> None:
    @app.post("/v1/responses")
    @app.post("/responses", include_in_schema=False)
    async def responses(request: Request, body: ResponseRequest) -> Response:
        chat, answer = body.chat(), Answer(service.name, body)
        run, (found, *_) = await service.begin(request, chat_work(service.llm, chat), chat)
        if body.stream:
            return EventStream(run, events(run, answer))
        choice = found["choices"][0]
        answer.text = choice["message"]["content"] or ""
        return JSONResponse(answer.ended(choice["finish_reason"], found["usage"]))
