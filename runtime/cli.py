"""`subkv`: all commands under one name; each is the same code as its `python -m` form."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import click

from subkv.base.folders import COMMAND, PLUGIN_ONLY
from subkv.base.version import __version__

# command -> (module of its main, line of help); modules are imported when their command runs
COMMANDS = {
    "chat": ("runtime.chat.cli", "chat with a model"),
    "run": ("runtime.launch.cli", "run a program on llama.cpp's libraries with a compressed cache"),
    "serve": ("runtime.serve.cli", "answer OpenAI requests over HTTP"),
    "env": ("runtime.launch.env", "print the variables that run sets, for shells, services, containers"),
    "convert": ("converter.cli", "calibrate a model and write its bases"),
    "inspect": ("runtime.inspect", "show a model's bases and the memory that its cache needs"),
    "perplexity": ("runtime.perplexity", "measure perplexity and KL divergence"),
    "bench": ("runtime.bench", "measure speed under different KV caches"),
    "check": ("runtime.check", "measure your model: a block of results to paste into an issue"),
    "doctor": ("runtime.doctor.cli", "report versions, libraries and devices; clear the cache folder"),
    "cmake-dir": ("runtime.cmake_dir", "print the folder of the CMake package for C and C++"),
}
OF_PLUGIN = ("run", "env", "doctor")
LAB = {
    "calibrate": ("converter.calibrate", "collect statistics of a model on text"),
    "sensitivity": ("converter.sensitivity", "add measured sensitivities to a calibration"),
    "plot": ("runtime.plot", "draw saved results: bits against KL divergence"),
}


class Group(click.Group):
    """Imports a command's module when the command runs, which keeps `--help` fast."""

    def __init__(self, *args: Any, modules: dict[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(OF_PLUGIN) if PLUGIN_ONLY else [*self.modules, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if PLUGIN_ONLY and cmd_name not in OF_PLUGIN:
            return None
        if cmd_name not in self.modules:
            return super().get_command(ctx, cmd_name)
        command: click.Command = importlib.import_module(self.modules[cmd_name][0]).main
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        others = () if not PLUGIN_ONLY or ctx.resilient_parsing else {*COMMANDS, "lab"}.difference(OF_PLUGIN)
        if args[0] in others:
            ctx.fail(f"expected one of {', '.join(OF_PLUGIN)}; {args[0]} needs our llama.cpp: pip install subkv")
        if args[0].lower().endswith(".gguf") and not ctx.resilient_parsing:  # not while a shell completes
            ctx.fail(f"expected a command before the model {args[0]}, such as chat, found none")
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), 1)
            if near:
                ctx.fail(f"{error.message} Did you mean '{near[0]}'?")
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        known = {name: line for name, (_, line) in self.modules.items()}
        known |= {name: command.short_help or "" for name, command in self.commands.items()}
        lines = [(name, known[name]) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(lines)


SETTINGS = {"help_option_names": ["-h", "--help"]}


FIRST = (
    f"""\
{COMMAND} doctor llama-server               whether a llama.cpp that you have can load the cache
{COMMAND} run llama-server -m model.gguf    your model, with it
`{COMMAND} --help` lists all commands."""
    if PLUGIN_ONLY
    else """\
subkv chat                            a demo model on the compressed cache
subkv run llama-server -m model.gguf  your model, in any program of llama.cpp
subkv convert model.gguf              once, minutes: fewer bits, equal quality
`subkv --help` lists all commands."""
)


@click.command(
    cls=Group,
    modules=COMMANDS,
    context_settings=SETTINGS,
    invoke_without_command=True,
    no_args_is_help=False,
)
@click.version_option(__version__)
@click.pass_context
def main(context: click.Context) -> None:
    """llama.cpp with a KV cache of calibrated, quantized coefficients."""
    if context.invoked_subcommand is None:
        click.echo(FIRST)


@main.command(
    cls=Group,
    modules=LAB,
    context_settings=SETTINGS,
    short_help="experiments: calibrate, sensitivity, plot",
)
def lab() -> None:
    """Commands for experiments with calibrations and caches."""


if __name__ == "__main__":
    main(prog_name="subkv")
