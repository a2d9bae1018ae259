"""The model's own chat template (GGUF metadata)."""

from __future__ import annotations

from typing import Any

from subkv.base.errors import SubkvError
from subkv.engine.model import Model
from subkv.native.binding import C

# isort: split
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

Message = dict[str, str]
KEY = "tokenizer.chat_template"


class TemplateError(SubkvError):
    """The model's chat template refuses the conversation."""


class Template:
    """Renders conversations. Raises SubkvError where the model has no template."""

    def __init__(self, model: Model) -> None:
        bos, eos = (
            model.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""
            for token in (model.bos, C.llama_vocab_eos(model.vocab))
        )
        self.formatter = Jinja2ChatFormatter(model.chat_template(), eos, bos)

    def render(self, messages: list[Message], answer: bool = True, tools: list[Any] | None = None) -> str:
        """The prompt; it ends where the assistant's answer begins, or with the last message. Raises TemplateError.

        tools: as OpenAI has them, for templates that tell the model of them.
        """
        self.formatter.add_generation_prompt = answer
        try:
            return str(self.formatter(messages=messages, tools=tools).prompt)  # type: ignore[arg-type]
        except Exception as error:  # whatever a template does with messages of a form that it does not know
            raise TemplateError(KEY, f"the model's template refuses the conversation: {error}") from error
