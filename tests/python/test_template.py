"""Chat templates: the model's, a given one, llama.cpp's built-in ones, and ChatML if the model has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from runtime import cli
from runtime.chat.conversation import Conversation, Sampling, Turn
from subkv.base.errors import SubkvError
from subkv.engine.llama import Llama
from subkv.engine.model import Model
from subkv.engine.template import Ends, Template, TemplateError, built_in, for_chat

Models = Callable[..., Path]
TALK = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "again, ж"},
]
CHATML = (
    "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n"
    "<|im_start|>user\nagain, ж<|im_end|>\n<|im_start|>assistant\n"
)
OURS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "


@pytest.fixture
def bare(tiny_model: Models, tmp_path: Path) -> Path:
    """A model without a template: its key has another name."""
    path = tmp_path / "bare.gguf"
    whole = tiny_model().read_bytes()
    assert whole.count(b"tokenizer.chat_template") == 1
    path.write_bytes(whole.replace(b"tokenizer.chat_template", b"tokenizer.chat_templatE"))
    return path


def chat(model: Path, *flags: Any, n: int | None = 2, **env: str) -> Result:
    length = [] if n is None else ["-n", n]
    arguments = ["chat", "-m", model, "-p", "Hi", "-st", *length, "-c", 256, "-ctk", "f16", "--temp", 0, *flags]
    return CliRunner().invoke(cli.main, [str(a) for a in arguments], env=env)


def test_names_are_llama_cpps() -> None:
    assert {"chatml", "llama2", "llama3", "gemma", "mistral-v7", "deepseek3", "gpt-oss"} <= set(built_in())


def test_rendered(tiny_model: Models) -> None:
    with Model(tiny_model()) as model:
        assert Template(model).render(TALK) == Template(model, "chatml").render(TALK) == CHATML
        assert Template(model, "chatml").render(TALK[:3], answer=False).endswith("hi<|im_end|>\n")
        assert Template(model, "llama2").render(TALK).startswith("[INST]")
        assert Template(model, "zephyr").render(TALK).endswith("<|user|>\nagain, ж<|endoftext|>\n<|assistant|>\n")
        assert Template(model, OURS).render(TALK).endswith("[user] again, ж\n[assistant] ")
        long = [{"role": "user", "content": "x" * 5000}] * 30  # vicuna's name of a role is longer than the role
        assert Template(model, "vicuna").render(long).count("x") == 150000
        for name in built_in():
            assert "again, ж" in Template(model, name).render(TALK)


def test_refused(tiny_model: Models) -> None:
    with Model(tiny_model()) as model:
        with pytest.raises(SubkvError) as error:
            Template(model, "chatlm")
        assert error.value.key == "chat_template"
        assert error.value.reason.startswith("expected a Jinja template or one of bailing, ")
        assert error.value.reason.endswith(", found 'chatlm'")
        with pytest.raises(TemplateError, match="chat_template: invalid Jinja template"):
            Template(model, "{% for m in messages %}")
        with pytest.raises(TemplateError, match="chat_template: the template rejects the conversation: no"):
            Template(model, "{{ raise_exception('no') }}").render(TALK)


def test_a_model_without_one(bare: Path, tiny_model: Models) -> None:
    with Model(bare) as model:
        with pytest.raises(SubkvError, match="expected a chat template in the model's metadata, found none"):
            Template(model)
        template, message = for_chat(model, None)
        assert template.render(TALK) == CHATML
        assert message == "chat template: the model has none, using ChatML; --chat-template selects another"
        assert template.ends == Ends()
        assert for_chat(model, "gemma")[1] == ""
    with Model(tiny_model()) as model:
        template, message = for_chat(model, None)
        assert (template.name, message) == (None, "")


def test_a_base_model(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its vocabulary lacks the marks of ChatML, so they end an answer as text."""
    bare.write_bytes(bare.read_bytes().replace(b"<|im_", b"<|xx_"))
    with Model(bare) as model:
        template, message = for_chat(model, None)
        assert template.ends == Ends("<|im_end|>")
        assert message == (
            "chat template: the model has none, using ChatML; it looks like a base model, which continues texts and "
            "may not answer; --chat-template selects another"
        )
    given: list[int] = []
    monkeypatch.setattr(Conversation, "ask", lambda _1, _2, n, *_: iter(given.append(n) or ()))
    chat(bare, n=None)
    chat(bare, "-n", 7, n=None)
    assert given == [256, 7]


@pytest.mark.parametrize("given", ["llama3", "gemma", OURS])
def test_later_turns(tiny_model: Models, given: str) -> None:
    """The text after an answer is located in the output of any template."""
    with Llama(tiny_model(), kv_cache="f16", n_ctx=512, verbose=False) as llm:
        template = Template(llm.loaded_model, given)
        conversation = Conversation(llm, "be short", Sampling(temp=0.0), template=template)
        for text in ("Hello.", "Why?"):
            "".join(conversation.ask(text, 4, lambda: False, Turn()))
        rendered = template.render([*conversation.messages[:-1]])
        shown = b"".join(llm.loaded_model.piece(token, special=True) for token in conversation.tokens).decode(
            "utf-8", "replace"
        )
        assert rendered.split("Why?")[1] in shown
        assert shown.count("Hello.") == shown.count("Why?") == 1


@pytest.mark.parametrize(
    ("given", "ends"),
    [
        ("chatml", Ends()),  # a token that ends an answer
        ("zephyr", Ends()),
        (OURS.replace("[", "<<").replace("]", ">>"), Ends("<<user>>")),
        ("vicuna", Ends("</s>")),
        (OURS, Ends("[user]")),  # only the next message tells where an answer ends
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}", Ends()),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", Ends()),
        ("{{ raise_exception('no') }}", Ends()),
    ],
)
def test_ends_of_answers(tiny_model: Models, given: str, ends: Ends) -> None:
    with Model(tiny_model()) as model:
        assert Template(model, given).ends == ends


def test_chat(bare: Path, tiny_model: Models, tmp_path: Path) -> None:
    own = chat(tiny_model())
    assert own.exit_code == 0 and "chat template" not in own.stderr
    assert chat(bare).stdout == own.stdout
    assert "chat template: the model has none, using ChatML" in chat(bare).stderr
    assert chat(tiny_model(), "--chat-template", "chatml").stdout == own.stdout
    file = tmp_path / "template.jinja"
    file.write_text(OURS)
    ours = chat(bare, "--chat-template-file", file)
    assert ours.exit_code == 0 and "chat template" not in ours.stderr
    assert ours.stdout == chat(bare, LLAMA_ARG_CHAT_TEMPLATE=OURS).stdout != own.stdout


def test_chat_refuses(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "latin.jinja").write_bytes(b"{{ '\xff' }}")
    for flags, code, message in (
        (("--chat-template", "nonsense"), 1, "--chat-template: expected a Jinja template or one of "),
        (("--chat-template", "{{ x"), 1, "--chat-template: invalid Jinja template"),
        (("--chat-template-file", tmp_path / "none"), 1, "--chat-template-file: cannot read "),
        (
            ("--chat-template-file", tmp_path / "latin.jinja"),
            1,
            "--chat-template-file: expected UTF-8 text, found an invalid byte at 4",
        ),
    ):
        result = chat(bare, *flags)
        assert result.exit_code == code
        assert result.stderr.splitlines()[-1].startswith(message)
    both = chat(bare, "--chat-template", "chatml", "--chat-template-file", tmp_path / "none")
    assert both.exit_code == 2 and "expected either it or --chat-template-file, found both" in both.stderr
