"""Sources of the chat's messages: an editor in the terminal (editor.py), a plain terminal, or a pipe.

A message has several lines if they end with a backslash, are pasted at once, or are typed with Alt-Enter in the editor.
Prompts are never printed to a redirected stdout, which is for answers.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import unicodedata
from pathlib import Path
from typing import Any, Protocol

import click

from runtime import options
from runtime.chat.completer import MORE, PROMPT, Completer
from subkv.base import folders
from subkv.base.errors import SubkvError, system_reason


class Input(Protocol):
    """A source of messages. interactive: a user sees the prompts."""

    interactive: bool

    def read(self) -> str | None:
        """The next message, None at the end of input. Raises KeyboardInterrupt on Ctrl-C."""


class WordWrap:
    """Prints an answer piece by piece; in a terminal, words do not break at the end of a line.

    width: columns of the terminal, or None to print as it comes.
    """

    def __init__(self, width: int | None) -> None:
        self.width = width
        self.column = 0
        self.word = ""  # the last word, which may continue

    def write(self, piece: str) -> None:
        if self.width is None:
            print(piece, end="", flush=True)
            return
        *spaced, self.word = re.split(r"(?<=\s)", self.word + piece)
        print("".join(map(self._placed, spaced)), end="", flush=True)

    def end(self) -> None:
        """Print the last word and end the line."""
        print(self._placed(self.word), flush=True)
        self.column, self.word = 0, ""

    def _placed(self, word: str) -> str:
        """The word, with the space behind it, in this line or the next one."""
        assert self.width is not None or not word
        columns = sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in word.rstrip())
        breaks = self.width is not None and self.column and columns and self.column + columns > self.width
        self.column = (0 if breaks else self.column) + columns + len(word) - len(word.rstrip())
        if word.endswith("\n"):
            self.column = 0
        return f"\n{word}" if breaks else word


def terminal_width() -> int | None:
    """Columns of stdout, or None if it is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def history_file(name: str) -> Path | None:
    """A private file in the user's state folder; None, with a warning, if it cannot be written."""
    try:
        path = folders.state_folder() / name
    except SubkvError as error:
        options.note(f"{error.key}: the message history is not saved: {error.reason}")
        return None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
    except OSError as error:
        options.note(f"XDG_STATE_HOME: the message history is not saved: cannot write {path}: {system_reason(error)}")
        return None
    return path


class Pipe:
    """Lines of stdin."""

    interactive = False

    def read(self) -> str | None:
        parts: list[str] = []
        while True:
            try:
                text = self._line(MORE if parts else PROMPT)
            except EOFError:
                return "\n".join(parts) if parts else None
            if not text.endswith("\\"):
                return "\n".join([*parts, text])
            parts.append(text[:-1])

    def _line(self, prompt: str) -> str:
        """Raises EOFError at the end of the input."""
        text = sys.stdin.readline()
        if not text:
            raise EOFError
        return text.rstrip("\n")


class Plain(Pipe):
    """input() with line editing, history and completion by module readline, if Python has it."""

    interactive = True

    def __init__(self, completer: Completer) -> None:
        self.completer = completer
        self.history: Path | None = None
        self.readline: Any = None
        if sys.stdout.isatty():  # else input() does not use readline
            with contextlib.suppress(ImportError):
                import readline

                self.readline = readline
                self._set_up()

    def _set_up(self) -> None:
        self.readline.set_completer_delims("")  # complete the whole line
        self.readline.set_completer(self._complete)
        self.readline.parse_and_bind("tab: complete")
        # Python disables it; it keeps a pasted text in one message
        self.readline.parse_and_bind("set enable-bracketed-paste on")
        self.history = history_file("chat_history.readline")
        if self.history:
            with contextlib.suppress(OSError):  # libedit refuses an empty file
                self.readline.read_history_file(self.history)

    def _complete(self, line: str, index: int) -> str | None:
        return next(iter(self.completer.lines(line)[index:]), None)

    def read(self) -> str | None:
        message = super().read()
        if message is None:
            click.echo(err=True)
        return message

    def _line(self, prompt: str) -> str:
        if self.readline is None:
            click.echo(prompt, nl=False, err=True)
            return input()
        before = self.readline.get_current_history_length()
        try:
            return input(prompt)
        finally:
            added = self.readline.get_current_history_length() - before
            if self.history and added:
                with contextlib.suppress(OSError):  # for example a full disk
                    self.readline.append_history_file(added, self.history)


def has_editor() -> bool:
    """Whether the extra `chat` is installed and the terminal can move its cursor."""
    try:
        from prompt_toolkit.utils import is_dumb_terminal
    except ImportError:
        return False
    return not is_dumb_terminal() and (sys.stdout.isatty() or sys.stderr.isatty())


def open_input(completer: Completer, simple: bool) -> Input:
    """The best available source of messages; simple: no editor."""
    if not sys.stdin.isatty():
        return Pipe()
    if simple or not has_editor():
        return Plain(completer)
    from runtime.chat.editor import Editor  # the extra `chat`

    return Editor(completer, history_file("chat_history"))
