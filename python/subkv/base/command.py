"""Commands: error messages, and groups of flags as dataclasses.

An error is one sentence on stderr that starts with its flag or key. The exit code is 1, for wrong usage 2, for Ctrl-C
130. The library's errors name arguments; only this module maps arguments to flags.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

from subkv.base.errors import SubkvError
from subkv.base.text import filled, printable

# argument of the library -> parameter of the programs, where the names differ
PARAMETERS = {
    "model_path": "model",
    "kv_cache": "type_k",
    "calibration": "bases",
}


class Command(click.Command):
    """A command that reports invalid input in one sentence, with exit code 1.

    interrupted: its message on Ctrl-C. foreign: a note about an option that it does not have, "": none.
    """

    def __init__(
        self, *args: Any, interrupted: str = "", foreign: Callable[[str], str] = lambda _: "", **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.interrupted = interrupted
        self.foreign = foreign

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _wrapped(ctx):
            return self._parse(ctx, args)

    def _parse(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            # click also suggests options that have little in common with the word
            near = difflib.get_close_matches(error.option_name, error.possibilities or [], cutoff=0.8)
            note = "" if near else self._without_option(ctx, error.option_name) or self.foreign(error.option_name)
            message = f"{error.message.rstrip('.')}; {note}" if note else error.message
            raise click.NoSuchOption(error.option_name, message, near, ctx) from None

    def _without_option(self, ctx: click.Context, option: str) -> str:
        """A note about -m of a command whose model stands alone."""
        model = next((p for p in self.params if isinstance(p, click.Argument) and p.expose_value), None)
        if option not in ("-m", "--model") or model is None or model.name != "model":
            return ""
        return f"the model stands alone: {ctx.command_path} {model.metavar or model.name.upper()}"

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _wrapped(ctx):
                return super().invoke(ctx)
        except KeyboardInterrupt:
            if self.interrupted:
                show(self.interrupted, err=True)
            raise click.exceptions.Exit(130) from None
        except ImportError as error:
            if error.name:  # a missing Python module
                raise
            raise _Failure(str(error)) from error  # a missing native library
        except SubkvError as error:
            raise _Failure(sentence(error, self)) from error


class _Failure(click.ClickException):
    """One sentence on stderr."""

    exit_code = 1

    def show(self, file: Any = None) -> None:
        click.echo(filled(self.format_message(), sys.stderr), file=file, err=True)


@contextlib.contextmanager
def _wrapped(ctx: click.Context) -> Iterator[None]:
    """Inside the block, click's messages about wrong usage are wrapped at words on a terminal."""
    try:
        yield
    except click.UsageError as error:
        head = "Error: "  # of click
        text = filled(head + error.format_message(), sys.stderr)
        if "\n" not in text:
            raise
        raise click.UsageError(text.removeprefix(head), error.ctx or ctx) from error


def sentence(error: SubkvError, command: click.Command | None = None) -> str:
    """The error message. It starts with the flag of `command` (default: the running one) for the error's key.

    If the key is a positional argument, the message starts with the user's value, unless the reason contains it.
    """
    context = click.get_current_context(silent=True)
    command = command or (context.command if context else None)
    name = PARAMETERS.get(error.key, error.key)
    for parameter in command.params if command else []:
        if name == parameter.name:
            if isinstance(parameter, click.Option):
                return str(SubkvError(parameter.opts[0], error.reason))
            value = context.params.get(name) if context else None
            subject = "" if isinstance(value, tuple) or value is None or str(value) in error.reason else str(value)
            return str(SubkvError(subject, error.reason))
    return str(error)


def show(text: str, err: bool = False) -> None:
    """Print one line, which may quote a file: what a terminal does not print is escaped. Wrapped at words there."""
    click.echo(filled(printable(text), sys.stderr if err else sys.stdout), err=err)


def command(
    name: str | None = None, context_settings: dict[str, Any] | None = None, **kwargs: Any
) -> Callable[[Callable[..., Any]], Command]:
    """click.command with our error messages, -h, and defaults in --help."""
    settings = {"help_option_names": ["-h", "--help"], "show_default": True, **(context_settings or {})}
    return click.command(name, **{"cls": Command, **kwargs}, context_settings=settings)


def stack(*decorators: Callable[..., Any]) -> Callable[..., Any]:
    """Combine decorators; the first one comes first in --help."""

    def apply(function: Callable[..., Any]) -> Any:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


def group(name: str, build: Callable[..., Any], *options: Callable[..., Any]) -> Callable[..., Any]:
    """Pass several options to the command as one argument `name`: build(option=value, …), usually a dataclass.

    @command()
    @group("window", Window, click.option("--n-sink", …), click.option("--n-recent", …))
    def main(window: Window) -> None: …
    """

    def probe() -> None:
        pass

    decorated: Any = stack(*options)(probe)
    names = [parameter.name for parameter in decorated.__click_params__ if parameter.expose_value]

    def decorate(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def grouped(*args: Any, **values: Any) -> Any:
            return function(*args, **{name: build(**{key: values.pop(key) for key in names})}, **values)

        return stack(*options)(grouped)

    return decorate
