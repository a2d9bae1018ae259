"""`subkv`: all commands under one name; each is the same code as its `python -m` form."""

from __future__ import annotations

import importlib

import click

# command -> (module of its main, line of help); modules are imported when their command runs
COMMANDS = {
    "convert": ("converter.cli", "write bases and layout into a copy of a GGUF"),
    "calibrate": ("converter.calibrate", "statistics of a model on text"),
    "sensitivity": ("converter.sensitivity", "add measured sensitivities to a calibration"),
    "evaluate": ("converter.evaluate", "KL divergence of layouts in float32"),
    "chat": ("runtime.chat.cli", "chat with a model"),
    "bench": ("runtime.bench", "measure speed under different KV caches"),
    "serve": ("runtime.serve.cli", "answer OpenAI requests over HTTP"),
    "run": ("runtime.launch.cli", "run a program on llama.cpp's libraries with a compressed cache"),
    "env": ("runtime.launch.env", "print the variables that run sets, for shells, services, containers"),
    "perplexity": ("runtime.perplexity", "measure perplexity and KL divergence"),
    "tasks": ("runtime.tasks.cli", "retrieval, recall and tool calls under several caches, scored exactly"),
    "plot": ("runtime.plot", "draw saved results: bits against KL divergence"),
    "inspect": ("runtime.inspect", "show the layout a file carries"),
    "doctor": ("runtime.doctor.cli", "versions, libraries, devices, cache folder: what a bug report needs"),
    "cmake-dir": ("runtime.cmake_dir", "where CMake finds the libraries and headers for C and C++"),
}


class Group(click.Group):
    """Imports a command's module when it is needed, so that `subkv --help` is instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name][0]).main
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.command(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="subkv")
def main() -> None:
    """llama.cpp with a KV cache of calibrated, quantized coefficients."""


if __name__ == "__main__":
    main(prog_name="subkv")
