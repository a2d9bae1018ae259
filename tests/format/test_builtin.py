"""The built-in calibration text: whole, mixed from its start, and read through a chat template where there is one."""

from __future__ import annotations

import re
from typing import Any

import pytest

from converter import builtin
from converter.corpus import HELD_OUT, Text, cut
from subkv.engine.template import TemplateError


class Tagged:
    """A template that writes <role>content</role>, or refuses."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses

    def render(self, messages: list[dict[str, str]], answer: bool = True) -> str:
        assert not answer
        if self.refuses:
            raise TemplateError("tokenizer.chat_template", "no")
        return "".join(f"<{m['role']}>{m['content']}</{m['role']}>" for m in messages)


class Recorder:
    """A tokenizer of bytes that records whether control tokens were enabled."""

    bos = None

    def __init__(self) -> None:
        self.special: list[bool] = []

    def tokenize(self, text: bytes, special: bool = False) -> list[int]:
        self.special.append(special)
        return list(text)


def chat(template: Any) -> Text:
    return builtin.read(template)[12]


def test_every_block_is_clean_text_of_some_length() -> None:
    texts = builtin.read()
    assert len({text.source.sha256 for text in texts}) == len(texts) >= 2 * HELD_OUT
    for text in texts:
        assert text.source.bytes == len(text.data) > 3500, text.source.name
        assert not set(text.data.decode()) & set("\f\r\0\ufffd"), text.source.name


def test_no_piece_is_there_twice() -> None:
    data = "".join(text.data.decode() for text in builtin.read())
    for path in builtin.FOLDER.glob("*.txt"):
        for piece in path.read_text("utf-8").split("\f\n"):
            whole = builtin.render(None, piece) if piece.startswith("@") else piece
            assert data.count(whole) == 1, (path.name, whole[:40])


def test_first_blocks_differ_in_kind_and_held_out_blocks_are_mixed() -> None:
    kinds = [re.sub(r"built-in \d+-(.*)\.txt", r"\1", text.source.name) for text in builtin.read()]
    assert len(set(kinds[:HELD_OUT])) == HELD_OUT
    assert {kinds[i] for i in range(HELD_OUT - 1, len(kinds), HELD_OUT)} == {"mixed"}
    assert kinds[-1] == "mixed"


def test_measured_and_unmeasured_blocks_are_both_of_many_kinds() -> None:
    texts = builtin.read()
    unmeasured = builtin.unmeasured(texts)
    assert len(unmeasured) == builtin.BLOCKS and "mixed" in unmeasured[HELD_OUT - 1].source.name
    for blocks in (texts[: builtin.MEASURED], unmeasured):
        assert len({text.source.name.split("-")[1] for text in blocks}) == len(blocks)
    assert not set(texts[: builtin.MEASURED]) & set(unmeasured)


def test_chat_goes_through_the_template() -> None:
    text = chat(Tagged())
    assert text.special
    data = text.data.decode()
    assert data.count("<user>") == data.count("</user>") > 10
    assert "<system>You are a careful assistant who answers briefly.</system><user>" in data
    assert "@user" not in data


@pytest.mark.parametrize("template", [None, Tagged(refuses=True)])
def test_chat_without_a_template_is_plain(template: Any) -> None:
    data = chat(template).data.decode()
    assert "\nUser: And if it starts to flower?\n\nAssistant: Pinch" in data
    assert "@" not in data.replace("@example", "")


def test_only_chat_may_hold_control_tokens() -> None:
    tokenizer = Recorder()
    chunks = cut(tokenizer, builtin.read(Tagged()), 256, None, whole=False)
    assert {len(chunk) for chunk in chunks} == {256}
    assert [i for i, special in enumerate(tokenizer.special, 1) if special] == [3, 8, 13, 16]
