"""Chat templates: the model's own (GGUF metadata), a Jinja text, or a built-in one of llama.cpp."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os

import jinja2

from subkv.base.errors import SubkvError
from subkv.engine.model import Model
from subkv.native.binding import C

# isort: split
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

Message = dict[str, str]
KEY = "tokenizer.chat_template"
DEFAULT = "chatml"  # for models without a template, as in llama-server
MARK = "\x01answer\x01"  # placeholder for an answer while a template is rendered
N_MARK = 3  # characters of the shortest mark that ends an answer


class TemplateError(SubkvError):
    """The chat template is invalid, or rejects the conversation."""


@dataclasses.dataclass(frozen=True)
class Ends:
    """The end of an answer. text: "": none; token: -1: none."""

    text: str = ""
    token: int = -1

    def n_held(self, answer: str) -> int:
        """The characters at the end of a text that may become the mark."""
        return next(
            (n for n in range(min(len(self.text) - 1, len(answer)), 0, -1) if self.text.startswith(answer[-n:])), 0
        )


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].strip()


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
        self.model = model
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

    @functools.cached_property
    def ends(self) -> Ends:
        """What ends an answer besides the model's own tokens for that: the mark that this template writes after
        answers, or the start of the next message.
        """
        user, answer = ({"role": role, "content": text} for role, text in (("user", "\x02"), ("assistant", MARK)))
        try:
            alone = self.render([user, answer], answer=False).rpartition(MARK)[2]
            _, mark, after = self.render([user, answer, user]).rpartition(MARK)
        except TemplateError:
            return Ends()
        text = _first_line(os.path.commonprefix([alone, after]))
        if len(text) < N_MARK:
            text = _first_line(after.partition("\x02")[0])
        if not mark or len(text) < N_MARK or text.isalnum():
            return Ends()
        first = int(self.model.tokenize(text.encode("utf-8", "replace"), special=False, markup=True)[0])
        if self.model.is_end(first):
            return Ends()
        return Ends(text=text) if self.model.piece(first) else Ends(token=first)  # control tokens have no text

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
    chosen = Template(model, DEFAULT)
    base = "; it looks like a base model, which continues texts and may not answer" if chosen.ends != Ends() else ""
    return chosen, f"chat template: the model has none, using ChatML{base}; --chat-template selects another"
