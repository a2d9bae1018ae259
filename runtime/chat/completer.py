"""Prompts and completions, shared by all sources of messages."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

PROMPT, MORE = "> ", "… "


class Completer:
    """Completes commands, and file names after commands that take one."""

    def __init__(self, commands: Iterable[str], with_file: Iterable[str]) -> None:
        self.commands = sorted(commands)
        self.with_file = frozenset(with_file)

    def lines(self, line: str) -> list[str]:
        """Completions of the line; a file name extends to the end of the line, spaces included."""
        if not line.startswith("/") or "\n" in line:
            return []
        command, space, name = line.partition(" ")
        if not space:
            return [name for name in self.commands if name.startswith(command)]
        if command not in self.with_file:
            return []
        folder, slash, start = name.rpartition("/")
        try:
            with os.scandir(Path(folder + slash or ".").expanduser()) as entries:
                names = [f"{entry.name}{'/' if entry.is_dir() else ''}" for entry in entries]
        except (OSError, RuntimeError):  # no such folder or home folder
            return []
        names = [entry for entry in names if entry.startswith(start) and (start or not entry.startswith("."))]
        return sorted(f"{command} {folder}{slash}{entry}" for entry in names)
