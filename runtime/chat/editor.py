"""The chat's editor with prompt_toolkit (extra `chat`): several lines, history search (Ctrl-R), completion."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completion
from prompt_toolkit.completion import Completer as MenuCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.shortcuts import CompleteStyle

from runtime.chat.completer import MORE, PROMPT, Completer


class History(FileHistory):
    """Ignores errors when it writes the file."""

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):
            super().store_string(string)


class Menu(MenuCompleter):
    def __init__(self, completer: Completer) -> None:
        self.completer = completer

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        line = document.text_before_cursor
        for text in self.completer.lines(line):
            yield Completion(text, -len(line))


def key_bindings() -> KeyBindings:
    """Enter sends the message; a trailing backslash or Alt-Enter starts a new line."""
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


class Editor:
    """An Input of terminal.py. history: file, None for a history of this session only."""

    interactive = True

    def __init__(self, completer: Completer, history: Path | None) -> None:
        self.session: PromptSession[str] = PromptSession(
            multiline=True,
            key_bindings=key_bindings(),
            completer=Menu(completer),
            complete_style=CompleteStyle.READLINE_LIKE,
            complete_while_typing=False,
            history=History(history) if history else InMemoryHistory(),
            prompt_continuation=MORE,
            output=create_output(always_prefer_tty=True),
        )

    def read(self) -> str | None:
        try:
            return self.session.prompt(PROMPT)
        except EOFError:
            return None
