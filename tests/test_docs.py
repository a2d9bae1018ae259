"""The commands, flags and addresses of the pages exist. The lint checks links and form (tests/lint/prose.py)."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from each import each
from lint.files import REPO
from lint.prose import CODE, FENCE, GUIDES, PAGES

from runtime.cli import COMMANDS, LAB
from runtime.cli import main as subkv
from subkv.native.library import lib_dir

PACKAGES = ("runtime", "research", "converter", "subkv")
RESEARCH = (
    "research.evaluate",
    "research.experiments.cli",
    "research.experiments.tracker",
    "research.fisher",
    "research.load",
    "research.soak",
    "research.speculation",
    "research.tasks.cli",
    "research.warmstart.chat",
)
HELP = {"-h", "--help", "--version"}


def commands(text: str) -> Iterator[list[str]]:
    """Words of every command in a shell text: comments dropped, lines joined, pipelines and substitutions apart."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        command: list[str] = []
        for word in words:
            if re.fullmatch(r"[();&|<>]+", word):
                yield command
                command = []
            elif command or not re.match(r"\w+=", word):  # NAME=value in front of a command
                command.append(word)
        yield command


def shown(page: Path) -> Iterator[list[str]]:
    """Commands of a page: those in shell blocks, and those alone in backticks."""
    text = page.read_text("utf-8")
    for language, block in FENCE.findall(text):
        if language == "sh":
            yield from commands(block)
    for code in CODE.findall(FENCE.sub("", text)):
        line = " ".join(code.split()).replace("'", "" if code.count("'") % 2 else "'").replace('"', "")
        if re.match(r"(subkv|convert|python -m|python) ", line):
            yield from commands(line.replace(";", ","))


def program(module: str) -> click.Command | None:
    """The click command of `python -m module`; None if it has none, or one of its extras is not installed."""
    for candidate in (module, f"{module}.program", f"{module}.cli"):
        try:
            if not importlib.util.find_spec(candidate):
                continue
            found = importlib.import_module(candidate)
        except ModuleNotFoundError:
            return None
        for attribute in ("main", "command", "convert"):
            if isinstance(command := getattr(found, attribute, None), click.Command):
                return command
    return None


def own(command: click.Command, words: list[str]) -> list[str]:
    """A command's own words, without a program behind them and its arguments."""
    try:
        found, _, _ = command.make_parser(click.Context(command, **command.context_settings)).parse_args(list(words))
    except click.UsageError:
        return words
    program = [found.get(str(parameter.name)) for parameter in command.params if isinstance(parameter, click.Argument)]
    n = sum(len(value) if isinstance(value, tuple) else value is not None for value in program)
    return words[: len(words) - n]


@functools.cache
def server_flags() -> frozenset[str]:
    """llama-server's own, as its help lists them; nothing where it was not built."""
    server = lib_dir() / "llama-server"
    if not server.is_file():
        return frozenset()
    done = subprocess.run([server, "--help"], capture_output=True, text=True, check=True)
    return frozenset(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", done.stdout))


def wrong(command: click.Command | None, words: list[str]) -> list[str]:
    """Words after a command that it does not accept: unknown subcommands and flags."""
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        context = click.Context(command)
        if (inner := command.get_command(context, words[0])) is None:
            return words[:1]
        command, words = inner, words[1:]
    if command is None:
        return []
    if not command.context_settings.get("allow_interspersed_args", True):
        words = own(command, words)
    known = HELP | {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    if command.context_settings.get("ignore_unknown_options"):  # subkv serve
        if not server_flags():
            return []
        known |= server_flags()
    return [word for word in words if re.match(r"--?[a-zA-Z]", word) and word.partition("=")[0] not in known]


def unknown(words: list[str]) -> list[str]:
    """Unknown parts of one command. Other projects' programs are not checked."""
    match words:
        case ["subkv", *rest]:
            return wrong(subkv, rest)
        case ["convert", *rest]:
            return wrong(program("converter.cli"), rest)
        case ["python" | "python3", "-m", module, *rest] if module.split(".")[0] in PACKAGES:
            spec = importlib.util.find_spec(module)
            package = spec is not None and spec.submodule_search_locations is not None
            if spec is None or (package and not importlib.util.find_spec(f"{module}.__main__")):
                return [module]
            return wrong(program(module), rest)
        case ["python" | "python3", script, *flags] if script.endswith(".py"):
            if not (REPO / script).is_file():
                return [script]
            text = (REPO / script).read_text("utf-8")
            return [flag for flag in flags if flag.startswith("--") and f'"{flag}"' not in text]
        case ["pytest", *paths]:
            return [path for path in paths if path[0] != "-" and path != "auto" and not (REPO / path).exists()]
        case ["pip", _, *rest]:
            extras = re.findall(r"\[([\w,]+)\]", " ".join(rest))
            declared = re.findall(r"^(\w+) = \[", (REPO / "pyproject.toml").read_text("utf-8"), re.M)
            return [extra for given in extras for extra in given.split(",") if extra not in declared]
    return []


@each("page", [page for page in PAGES if page.name != "CHANGELOG.md"])
def test_commands_exist(page: Path) -> None:
    assert {" ".join(words): bad for words in shown(page) if (bad := unknown(words))} == {}


@each("page", [page for page in GUIDES if page.name != "CHANGELOG.md"])
def test_flags_exist(page: Path) -> None:
    """A flag in backticks, without its command, is a flag of some program, or of a script that the page names."""
    if not server_flags():
        pytest.skip("llama-server: not built (SUBKV_PROGRAMS=ON)")
    text = FENCE.sub("", page.read_text("utf-8"))
    modules = [*(module for module, _ in (COMMANDS | LAB).values()), *RESEARCH]
    every = {flag for module in modules for flag in flags_of(module)} | server_flags()
    scripts = [REPO / script for script in re.findall(r"[\w/]+\.py", page.read_text("utf-8"))]
    sources = "".join(script.read_text("utf-8") for script in scripts if script.is_file())
    single = [re.split(r"[ =|]", code)[0] for code in CODE.findall(text) if re.match(r"--[a-z]", code)]
    assert [flag for flag in single if flag not in every | HELP and f'"{flag}"' not in sources] == []


def test_the_servers_port() -> None:
    """Addresses in the pages have the default port of the pinned server."""
    server = lib_dir() / "llama-server"
    if not server.is_file():
        pytest.skip("llama-server: not built (SUBKV_PROGRAMS=ON)")
    printed = subprocess.run([server, "--help"], capture_output=True, text=True, check=True).stdout
    default = re.search(r"port to listen \(default: (\d+)\)", printed)
    assert default
    text = "".join((REPO / page).read_text("utf-8") for page in ("docs/server.md", "research/README.md"))
    assert set(re.findall(r"127\.0\.0\.1:(\d+)", text)) == {default[1]}


@functools.cache
def flags_of(module: str) -> set[str]:
    params = importlib.import_module(module).main.params
    return {flag for parameter in params for flag in (*parameter.opts, *parameter.secondary_opts)}


@each("command", [*COMMANDS, *(f"lab {name}" for name in LAB)])
def test_every_command_is_documented(command: str) -> None:
    text = "".join(page.read_text("utf-8") for page in GUIDES)
    assert re.search(rf"(subkv|python -m runtime\.) ?{command}\b", text)
