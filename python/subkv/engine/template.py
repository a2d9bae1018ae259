"""Chat templates: the model's own (GGUF metadata), a Jinja text, or a built-in one of llama.cpp."""

from __future__ import annotations

import ctypes
from typing import Any

import jinja2

from subkv.base.errors import SubkvError
from subkv.engine.model import Model
from subkv.native.binding import C

# isort: split
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

Message = dict[str, str]
KEY = "tokenizer.chat_template"
DEFAULT = "chatml"  # for models without a template, as in llama-server


class TemplateError(SubkvError):
    """The chat template is invalid, or rejects the conversation."""


def built_in() -> list[str]:
    """Names of llama.cpp's built-in templates."""
    n = C.llama_chat_builtin_templates(None, 0)
    names = (ctypes.c_char_p * n)()
    C.llama_chat_builtin_templates(names, n)
    return [name.decode() for name in names if name]


class Template:
    """Renders conversations.

    given: a Jinja text or a name of built_in() that replaces the model's own template. Raises SubkvError about KEY if
    the model has no valid template, or about `chat_template` if `given` is neither.
    """

    def __init__(self, model: Model, given: str | None = None) -> None:
        names = [] if given is None else built_in()
        self.key = KEY if given is None else "chat_template"
        self.name = given if given in names else None
        if self.name is not None:
            return
        if given is not None and "{" not in given:
            raise SubkvError(self.key, f"expected a Jinja template or one of {', '.join(names)}, found {given[:40]!r}")
        bos, eos = (
            model.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""
            for token in (model.bos, C.llama_vocab_eos(model.vocab))
        )
        text = model.chat_template() if given is None else given
        try:
            self.formatter = Jinja2ChatFormatter(text, eos, bos)
        except jinja2.TemplateError as error:
            reason = f"invalid Jinja template: {error}"
            raise TemplateError(self.key, reason) from error

    def render(self, messages: list[Message], answer: bool = True, tools: list[Any] | None = None) -> str:
        """The prompt, up to the start of the assistant's answer or the end of the last message. Raises TemplateError.

        tools: in OpenAI's format; built-in templates ignore them.
        """
        if self.name is not None:
            return self._built_in(self.name, messages, answer)
        self.formatter.add_generation_prompt = answer
        try:
            return str(self.formatter(messages=messages, tools=tools).prompt)  # type: ignore[arg-type]
        except Exception as error:  # templates raise anything for messages of unknown form
            whose = "model's " if self.key == KEY else ""
            raise TemplateError(self.key, f"the {whose}template rejects the conversation: {error}") from error

    def _built_in(self, name: str, messages: list[Message], answer: bool) -> str:
        parts = ("role", "content")
        encoded = [tuple(message[part].encode("utf-8", "replace") for part in parts) for message in messages]
        chat = (C.llama_chat_message * len(encoded))(*(C.llama_chat_message(*message) for message in encoded))
        size = 256 + 2 * sum(len(part) for message in encoded for part in message)
        for _ in range(2):
            buffer = ctypes.create_string_buffer(size)
            n = C.llama_chat_apply_template(name.encode(), chat, len(encoded), answer, buffer, size)
            if n < 0:
                break
            if n <= size:
                return buffer.raw[:n].decode("utf-8", "replace")
            size = n
        raise TemplateError(self.key, f"llama.cpp's template {name} rejects the conversation")


def for_chat(model: Model, given: str | None) -> tuple[Template, str]:
    """The template of a chat, and a line for the user if it is neither the model's own nor requested.

    Raises SubkvError as Template.
    """
    if given is not None or C.llama_model_chat_template(model.handle, None):
        return Template(model, given), ""
    note = "chat template: the model has none, using ChatML; --chat-template selects another"
    return Template(model, DEFAULT), note
