"""Requests: llama_cpp.server's models, with OpenAI's newer fields and limits that keep a request from doing harm."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    FailFast,
    Field,
    field_validator,
    model_validator,
)

from subkv.native.binding import llama_cpp

# isort: split
from llama_cpp.llama_grammar import JSON_GBNF, LlamaGrammar
from llama_cpp.server import types

from runtime.serve.grammar_limits import check_grammar, check_schema
from runtime.serve.grammars import SchemaText
from runtime.serve.native import Native
from runtime.serve.refusals import bad_field

N_MESSAGES = 8192
N_STOPS, N_STOP = 64, 4096  # how many, and the characters of one
N_LOGPROBS = 100
N_BIAS, N_BIAS_TEXT = 4096, 256  # how many, and the characters of one
N_TOOLS, NAME = 128, re.compile(r"[A-Za-z0-9_-]{1,64}")  # and functions; as OpenAI has it
N_FILES = 1024  # of /infill
N_INPUTS = 2048  # texts of an embeddings request, as OpenAI has it

# OpenAI's two names and llama.cpp's
MAX_TOKENS = AliasChoices("max_completion_tokens", "max_tokens", "n_predict")
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Count = Annotated[int, Field(ge=1, le=128)]  # OpenAI's; the slots allow fewer
One = Annotated[int, Field(ge=1, le=1)]
Texts = str | Annotated[list[str], Field(min_length=1, max_length=N_INPUTS)]
Stop = Annotated[str, Field(max_length=N_STOP)]
MOST_BIAS = 1e6  # more than any two logits differ by
Bias = Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]


def whole_characters(value: Any) -> Any:
    """Parsed JSON without halves of surrogate pairs. Not recursive: it may be nested as deeply as the parser goes."""

    def text(found: Any) -> Any:
        if not isinstance(found, str) or found.isascii():
            return found
        return found.encode("utf-8", "replace").decode()

    with contextlib.suppress(UnicodeEncodeError, RecursionError):
        json.dumps(value, ensure_ascii=False).encode()
        return value  # as nearly always, and a hundred times faster
    top = [value]
    todo: list[Any] = [top]
    while todo:
        into = todo.pop()
        for key in list(into) if isinstance(into, dict) else range(len(into)):
            inner = into.pop(key) if isinstance(into, dict) else into[key]
            into[text(key)] = inner = text(inner)
            if isinstance(inner, (dict, list)):
                todo.append(inner)
    return top[0]


class StreamOptions(BaseModel):
    include_usage: bool = False


class Common(Native):
    """What both kinds of completion share."""

    n: Count | None = Field(1, description="Answers to make, at most as many as there are slots.")
    # float32 logits divided by a temperature below 1e-4 may overflow: such a temperature is greedy
    temperature: Annotated[float, Field(ge=0.0, le=1e4), AfterValidator(lambda t: t if t >= 1e-4 else 0.0)] = 0.8
    top_k: int = Field(40, ge=0, lt=2**31)
    repeat_penalty: float = Field(1.0, gt=1e-3, le=1e3)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    mirostat_mode: int = Field(0, ge=0, le=2, validation_alias=AliasChoices("mirostat", "mirostat_mode"))
    stop: Stop | Annotated[list[Stop], Field(max_length=N_STOPS)] | None = None
    seed: Seed | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=N_BIAS)] | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, fields: Any) -> Any:
        """A null field is one that was not given; halves of surrogate pairs, which are no text, become "?"."""
        if not isinstance(fields, dict):
            return fields
        return {key: v for key, v in whole_characters(fields).items() if v is not None}

    @field_validator("logit_bias", mode="before")
    @classmethod
    def by_token(cls, given: Any) -> Any:
        """llama-server's [[token, number], …] as OpenAI has it; false: never that token."""
        if not isinstance(given, list):
            return given
        for pair in given:
            if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int) and pair[1] is not True):
                raise ValueError(f"expected pairs of a token and a number or false, found {pair!r:.80}")
        return {str(token): -MOST_BIAS if score is False else score for token, score in given}


class CompletionRequest(Common, types.CreateCompletionRequest):  # type: ignore[misc]
    """POST /v1/completions: a text, its tokens, or both in one list."""

    max_tokens: int | None = Field(16, ge=-1, validation_alias=MAX_TOKENS)
    prompt: str | list[int | str]
    logprobs: int | None = Field(None, ge=0, le=N_LOGPROBS)
    suffix: None = Field(None, description="Not supported.")
    best_of: One | None = 1

    @field_validator("prompt", mode="before")
    @classmethod
    def one(cls, given: Any) -> Any:
        """OpenAI's lists of one prompt stand for it."""
        if not isinstance(given, list) or not all(isinstance(part, (str, list)) for part in given):
            return given
        if len(given) > 1:
            raise ValueError(f"expected one prompt, found {len(given)}; ask for each")
        return given[0] if given else given


class NativeRequest(CompletionRequest):
    """POST /completion, as llama-server has it: no limit of tokens unless one is given, a schema beside the prompt."""

    max_tokens: int | None = Field(-1, ge=-1, validation_alias=MAX_TOKENS)
    n: One | None = 1
    json_schema: Any = None
    n_probs: int = Field(0, ge=0, le=N_LOGPROBS, validation_alias=AliasChoices("n_probs", "logprobs"))
    post_sampling_probs: bool = Field(False, description="n_probs as the samplers left them.")
    return_tokens: bool = Field(False, description="The answer's tokens as numbers, too, as in every stream.")


class InfillFile(BaseModel):
    filename: str = Field("", max_length=4096)
    text: str


class InfillRequest(NativeRequest):
    """POST /infill, as llama-server has it: what belongs between two texts.

    prompt: what follows input_prefix, as the line before a cursor. input_extra: other files of the project.
    """

    prompt: str = ""
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[InfillFile], Field(max_length=N_FILES)] = []


class ChatRequest(Common, types.CreateChatCompletionRequest):  # type: ignore[misc]
    """POST /v1/chat/completions."""

    messages: Annotated[list[llama_cpp.ChatCompletionRequestMessage], Field(min_length=1), FailFast()]
    max_tokens: int | None = Field(None, ge=-1, validation_alias=MAX_TOKENS)
    top_logprobs: int | None = Field(None, ge=0, le=N_LOGPROBS)
    response_format: dict[str, Any] | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def plain(cls, messages: Any) -> Any:
        """Messages as llama_cpp's types and most templates know them; content may only be text."""
        if not isinstance(messages, list):
            return messages
        if len(messages) > N_MESSAGES:
            raise ValueError(f"expected at most {N_MESSAGES} messages, found {len(messages)}")
        return [_plain(message) if isinstance(message, dict) else message for message in messages]

    @field_validator("tools", mode="before")
    @classmethod
    def with_parameters(cls, tools: Any) -> Any:
        """A function that takes nothing may leave out its parameters; llama_cpp's types want them."""
        if isinstance(tools, list):
            for function in (tool.get("function") for tool in tools if isinstance(tool, dict)):
                if isinstance(function, dict):
                    function.setdefault("parameters", {"type": "object", "properties": {}})
        return tools


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """developer is system; no content, as beside tool calls, is an empty text; parts that are texts become one."""
    if message.get("role") == "developer":
        message = message | {"role": "system"}
    if "content" in message and message["content"] is None:
        message = message | {"content": ""}
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError("expected content that is text, found a part of another kind")
    return message | {"content": "\n".join(part["text"] for part in parts)}


class EmbeddingRequest(types.CreateEmbeddingRequest):  # type: ignore[misc]
    """POST /v1/embeddings."""

    input: Texts
    encoding_format: Literal["float", "base64"] = "float"


class NativeEmbeddingRequest(BaseModel):
    """POST /embedding, as llama-server has it. embd_normalize: of embeddings.normalized."""

    content: Texts = Field(validation_alias=AliasChoices("content", "input"))
    embd_normalize: int = Field(2, ge=-1, le=1000)
    encoding_format: Literal["float", "base64"] = "float"


class TemplateRequest(BaseModel):
    """POST /apply-template."""

    messages: Annotated[list[Any], Field(max_length=N_MESSAGES)]
    tools: Annotated[list[dict[str, Any]], Field(max_length=N_TOOLS)] | None = None

    @field_validator("tools", mode="before")
    @classmethod
    def as_in_chat(cls, tools: Any) -> Any:
        return ChatRequest.with_parameters(whole_characters(tools))

    @field_validator("messages", mode="after")
    @classmethod
    def plain(cls, messages: list[Any]) -> list[Any]:
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("expected objects with role and content")
        return [_plain(message) for message in whole_characters(messages)]


class TokenizeRequest(BaseModel):
    """POST /tokenize."""

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]


class SlotFile(BaseModel):
    """Body of POST /slots/{id}: a name inside --slot-save-path."""

    filename: str = Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$", max_length=128)


#
# grammars
#


def text_grammar(text: str | None) -> Any:
    """A request's GBNF, checked, as llama_cpp has it. Raises ApiError."""
    if not text:
        return None
    check_grammar(text)
    return LlamaGrammar.from_string(text, verbose=False)


def _schema_grammar(schema: Any, param: str) -> Any:
    text = SchemaText(check_schema(schema, param))
    text.param = param
    return LlamaGrammar.from_string(text, verbose=False)


def native_grammar(request: NativeRequest) -> Any:
    """The grammar of /completion, None: any text. Raises ApiError."""
    if request.json_schema is None:
        return text_grammar(request.grammar)
    if request.grammar:
        raise bad_field("grammar", "expected none beside json_schema, found one")
    return _schema_grammar(request.json_schema, "json_schema")


def check_tools(request: ChatRequest) -> None:
    """Refuse tools beyond the limits: a chat handler may make grammars of names and schemas. Raises ApiError."""
    tools: list[Any] = [tool["function"] for tool in request.tools or []]
    for functions, param in ((tools, "tools"), (request.functions or [], "functions")):
        if len(functions) > N_TOOLS:
            raise bad_field(param, f"expected at most {N_TOOLS}, found {len(functions)}")
        for function in functions:
            name = function["name"]
            if not NAME.fullmatch(name):
                raise bad_field(param, f"expected names of 1 to 64 characters A-Z a-z 0-9 _ -, found {name!r:.80}")
            check_schema(function.get("parameters"), param)


def chat_grammar(request: ChatRequest) -> Any:
    """The grammar a chat answer must follow, None: any text. Raises ApiError.

    llama_cpp's handlers replace a schema that they cannot read by "any JSON"; here it is an error.
    """
    form = request.response_format or {"type": "text"}
    kind = form.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise bad_field("response_format", f"expected text, json_object or json_schema, found {kind!r}")
    if kind == "text":
        return text_grammar(request.grammar)
    if request.grammar:
        raise bad_field("grammar", "expected none beside response_format, found one")
    inner = form.get("json_schema") if kind == "json_schema" else form
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if schema is None and kind == "json_schema":
        raise bad_field("response_format", "expected json_schema.schema, found none")
    if schema is None:
        return LlamaGrammar.from_string(JSON_GBNF, verbose=False)
    return _schema_grammar(schema, "response_format")


def tool_choice(request: ChatRequest) -> Any:
    """The request's choice; "required" with one tool names that tool. Raises ApiError."""
    tools, choice = request.tools or [], request.tool_choice
    if choice == "required":
        if len(tools) != 1:
            raise bad_field("tool_choice", f"expected one tool for 'required', found {len(tools)}; name one")
        choice = {"type": "function", "function": {"name": tools[0]["function"]["name"]}}
    if isinstance(choice, dict):
        chosen = [tool for tool in tools if tool["function"]["name"] == choice["function"]["name"]]
        if not chosen:
            raise bad_field("tool_choice", f"expected a tool of the request, found {choice}")
    return choice
