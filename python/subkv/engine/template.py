"""Chat templates: the model's own (GGUF metadata), a Jinja text, or a built-in one of llama.cpp."""

from __future__ import annotations

import ctypes
import functools

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

    template: a Jinja text, or a name of built_in(), in place of the model's own template. Raises SubkvError about KEY
    if the model has no valid template, or about `chat_template` if `template` is neither.
    """

    def __init__(self, model: Model, template: str | None = None) -> None:
        names = [] if template is None else built_in()
        self.key = KEY if template is None else "chat_template"
        self.name = template if template in names else None
        if self.name is not None:
            return
        if template is not None and "{" not in template:
            raise SubkvError(
                self.key, f"expected a Jinja template or one of {', '.join(names)}, found {template[:40]!r}"
            )
        bos, eos = (
            model.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""
            for token in (model.bos, C.llama_vocab_eos(model.vocab))
        )
        text = model.chat_template() if template is None else template
        try:
            self.formatter = Jinja2ChatFormatter(text, eos, bos)
        except jinja2.TemplateError as error:
            reason = f"invalid Jinja template: {error}"
            raise TemplateError(self.key, reason) from error

    def render(self, messages: list[Message], answer: bool = True) -> str:
        """The prompt, which ends with the start of the assistant's answer, or (answer False) with the last message.

        Raises TemplateError.
        """
        if self.name is not None:
            return self._built_in(self.name, messages, answer)
        self.formatter.add_generation_prompt = answer
        try:
            return str(self.formatter(messages=messages).prompt)  # type: ignore[arg-type]
        except Exception as error:  # templates raise anything for messages of unknown form
            name = "the model's template" if self.key == KEY else "the template"
            raise TemplateError(self.key, f"{name} rejects the conversation: {error}") from error

    def _built_in(self, name: str, messages: list[Message], answer: bool) -> str:
        encoded = [[message[part].encode("utf-8", "replace") for part in ("role", "content")] for message in messages]
        chat = (C.llama_chat_message * len(encoded))(*(C.llama_chat_message(*message) for message in encoded))
        apply = functools.partial(C.llama_chat_apply_template, name.encode(), chat, len(encoded), answer)
        size = apply(None, 0)
        if size < 0:
            raise TemplateError(self.key, f"llama.cpp's template {name} rejects the conversation")
        buffer = ctypes.create_string_buffer(size)
        apply(buffer, size)
        return buffer.raw.decode("utf-8", "replace")


def for_chat(model: Model, template: str | None) -> tuple[Template, str]:
    """The template of a chat, and a line for the user if it is neither the model's own nor requested.

    Raises SubkvError as Template.
    """
    if template is not None or C.llama_model_chat_template(model.handle, None):
        return Template(model, template), ""
    note = "chat template: the model has none, using ChatML; --chat-template selects another"
    return Template(model, DEFAULT), note
