"""Chat with a model in the terminal or through a pipe; the answer goes to stdout, everything else to stderr.

python -m runtime.chat                                   the demo model on a compressed cache
python -m runtime.chat -m model.subkv.gguf
echo "What is a sonnet?" | python -m runtime.chat --temp 0
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runtime import demo, options
from runtime.chat.completer import Completer
from runtime.chat.terminal import WordWrap, open_input, terminal_width
from runtime.options import SHARE, llama_option
from subkv.base.command import command, group, sentence, stack
from subkv.base.errors import SubkvError
from subkv.base.folders import expanded
from subkv.base.hub import hf_option, requested_model
from subkv.base.interrupts import Interrupt

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from runtime.chat.conversation import Conversation, FirstTokens, Sampling, Stop, Turn
    from subkv.engine.context import ContextOptions
    from subkv.engine.llama import Llama
    from subkv.engine.request import CacheRequest

    OpenModel = Callable[[Callable[[], Llama]], AbstractContextManager[tuple[Llama, FirstTokens | None]]]

MIB = 1024 * 1024
N_PREDICT = int(demo.ANSWERS["n_predict"])  # of answers that may not end by themselves

HELP = """\
/exit, /bye    leave (also Ctrl-D)
/regen         answer the last message again
/clear         delete the conversation and the texts of /read
/read FILE     put a text file in front of the next message
/save FILE     save the conversation and its cells
/load FILE     resume a saved conversation
/stats         sizes of the KV cache
/help          this list
A line that ends with \\ continues on the next line; in the editor (extra `chat`), Alt-Enter starts a new line.
A pasted text is one message. Ctrl-C stops an answer; at the prompt it deletes the input, twice in a row it leaves.
A full context ends the answer. A message that does not fit is rejected; /clear makes room. With --context-shift a full
context drops its older half instead."""

DEMO_NOTE = f"{demo.NOTE}; try /read FILE, then a question about the file"
LEAVE = ("/exit", "/bye")
WITH_FILE = ("/read", "/save", "/load")


class Chat:
    """Reads messages, runs commands, prints answers."""

    def __init__(self, conversation: Conversation, n_predict: int) -> None:
        self.conversation = conversation
        self.n_predict = n_predict
        self.read_text = ""
        self.commands: dict[str, Callable[[str], None]] = {
            "/regen": self.regenerate,
            "/clear": self.clear,
            "/read": self.read,
            "/save": self.save,
            "/load": self.load,
            "/stats": self.stats,
            "/help": self.help,
        }

    def loop(self, simple: bool) -> None:
        """Handle messages until /exit or the end of the input. simple: as in open_input()."""
        source = open_input(Completer([*self.commands, *LEAVE], WITH_FILE), simple)
        if source.interactive:
            options.note("/help lists the commands")
        stopping = False
        while True:
            try:
                text = source.read()
            except KeyboardInterrupt:
                options.note("")
                if stopping:
                    return
                stopping = True
                options.note("Ctrl-C again or /exit leaves")
                continue
            stopping = False
            if text is None or command_of(text)[0] in LEAVE:
                return
            try:
                self.act(text)
            except KeyboardInterrupt:  # the second one, or one during a command
                options.note("stopped")
            if source.interactive:
                options.note("")

    def act(self, text: str) -> None:
        """Run one command, or answer one message."""
        name, argument = command_of(text)
        if name is None:
            if text.strip():
                self.report_errors(self.send, text)
        elif name in self.commands:
            self.report_errors(self.commands[name], argument)
        else:
            options.note(f"{name}: unknown command; /help lists them")

    def help(self, _: str) -> None:
        for line in HELP.splitlines():
            options.note(line)

    def report_errors(self, action: Callable[[str], None], argument: str) -> bool:
        """Run one command and log its error, if any. Returns whether it succeeded."""
        try:
            action(argument)
        except SubkvError as error:
            options.note(sentence(error))
            return False
        return True

    def send(self, text: str) -> None:
        turn = self.print_answer(functools.partial(self.conversation.ask, self.with_read_text(text)))
        if turn.n_answer:
            self.read_text = ""

    def regenerate(self, _: str) -> None:
        self.print_answer(self.conversation.regenerate)
        if self.conversation.sampling.temp == 0:
            options.note("--temp 0 gives the same answer again; start with --temp 0.5 for others")

    def print_answer(self, answer: Callable[[int, Stop, Turn], Iterator[str]]) -> Turn:
        # numpy and the native libraries: not for a --help
        from runtime.chat.conversation import MORE_ROOM, Turn
        from subkv.engine.stats import sizes

        turn = Turn()
        output = WordWrap(terminal_width())
        with Interrupt() as interrupt:
            for piece in answer(self.n_predict, lambda: interrupt.pressed, turn):
                output.write(piece)
        output.end()
        conversation = self.conversation
        if turn.stopped == "interrupt":
            options.note("stopped")
        elif turn.stopped == "loop":
            options.note("stopped: the answer repeats itself")
        elif turn.stopped == "full":
            options.note(f"-c: the context of {conversation.llm.n_ctx()} tokens is full; {MORE_ROOM}")
        mark, problems = turn.first_tokens.report() if turn.first_tokens is not None else ("", [])
        for problem in problems:
            options.note(problem)
        stats = conversation.llm.kv_stats()
        options.note_zero_rows(stats.n_zero_rows)
        mark = f" | {mark}" if mark else ""
        options.note(
            f"[ Prompt: {_speed(turn.n_prompt, turn.prompt_speed)} | "
            f"Generation: {_speed(turn.n_answer, turn.answer_speed)} | KV: {sizes(stats)}{mark} ]"
        )
        return turn

    def with_read_text(self, text: str) -> str:
        return f"{self.read_text}\n\n{text}" if self.read_text else text

    def clear(self, _: str) -> None:
        self.conversation.clear()
        self.read_text = ""
        options.note("the conversation is empty")

    def read(self, name: str) -> None:
        path = named_file("/read", name)
        text = self.with_read_text(options.read_utf8(path, "/read"))
        n_tokens = len(self.conversation.tokenize(text))
        self.conversation.check_room("/read", "the text", n_tokens)
        self.read_text = text
        options.note(f"{path}: {n_tokens} tokens go in front of the next message (room: {self.conversation.room})")

    def save(self, name: str) -> None:
        path = named_file("/save", name)
        self.conversation.save(path)
        options.note(f"saved {self.conversation.llm.n_tokens} cells to {path}")

    def load(self, name: str) -> None:
        self.conversation.load(named_file("/load", name))
        self.read_text = ""
        options.note(f"{len(self.conversation.messages)} messages, {self.conversation.llm.n_tokens} cells")

    def stats(self, _: str) -> None:
        from subkv.engine.stats import layers  # numpy and the native libraries: not for a --help

        conversation, llm = self.conversation, self.conversation.llm
        stats = llm.kv_stats()

        def mib(n_bytes: int) -> str:
            return f"{n_bytes / MIB:.2f} MiB"

        rows = {
            "cache": llm.cache_choice.name,
            "kernel": stats.kernel,
            "tokens": f"{len(conversation.tokens)} of {llm.n_ctx()}",
            "bits per element": f"{stats.bpe:.3f}",
            "bytes per token": f"{stats.bytes_per_token}",
            "KV": f"{mib(stats.bytes_all)} (f16: {mib(stats.bytes_f16)})",
        }
        if stats.n_layer_coded:
            rows |= {
                "  coefficient rows": f"{mib(stats.bytes_codes)} in {stats.n_layer_coded} layers",
                "  exact window": f"{mib(stats.bytes_window)} ({stats.n_sink} first, {stats.n_recent} last tokens)",
                "  ordinary layers": mib(stats.bytes_stock),
                "  bases": mib(stats.bytes_bases),
                **({"layers": words} if (words := layers(stats)) else {}),
                **llm.bases_report(),
                "rows not finite": f"{stats.n_zero_rows}",
                "fingerprint": stats.fingerprint or "",
            }
        for name, value in rows.items():
            options.note(f"{name:<18} {value}")


def command_of(text: str) -> tuple[str | None, str]:
    """Command and argument of a line; None for a message: several lines, or text that starts like a path."""
    name, _, argument = text.strip().partition(" ")
    return (name if re.fullmatch(r"/[a-z]+", name) and "\n" not in text.strip() else None), argument.strip()


def _speed(n: int, speed: float) -> str:
    """Tokens per second; of few tokens their number, because the time of so few is mostly overhead."""
    return f"{speed:.1f} t/s" if n >= 8 else f"{n} token{'s' * (n != 1)}"


def named_file(command: str, name: str) -> Path:
    if not name:
        raise SubkvError(command, "expected a file name, found none")
    return expanded(name, command)


@dataclasses.dataclass(frozen=True)
class ChatInput:
    """The first message, and the source of the others."""

    prompt: str | None
    single_turn: bool
    simple_io: bool
    system: str | None

    def first(self) -> str | None:
        """The first message, None: the user types it."""
        if not self.single_turn or self.prompt is not None:
            return self.prompt
        if sys.stdin is not None and sys.stdin.isatty():
            raise click.UsageError("--single-turn: expected -p TEXT or a text on stdin, found neither")
        return sys.stdin.read()


input_options = group(
    "chat_input",
    ChatInput,
    click.option("-p", "--prompt", metavar="TEXT", help="first message"),
    click.option(
        "-st", "--single-turn", is_flag=True, help="exit after one answer; the message is -p, or all of stdin"
    ),
    click.option("--simple-io", is_flag=True, help="plain terminal, without the message editor"),
    click.option(
        "-sys",
        "--system-prompt",
        "system",
        metavar="TEXT",
        help='system message; "": none [default: that of the chat template; none for the demo model]',
    ),
)


def _sampling(temp: float, **more: Any) -> Sampling:
    from runtime.chat.conversation import Sampling  # numpy and the native libraries: not for a --help

    return Sampling(temp, **more)


def _has_model() -> bool:
    """Whether the command line being parsed names a model; else the chat is with the demo model."""
    parameters = click.get_current_context().params  # may hold a marker of click, which is true, for a missing option
    return any(isinstance(parameters.get(name), str) for name in ("model", "hf_repo"))


def default_or_demo(name: str, default: float) -> dict[str, Any]:
    """Settings of an option whose default differs for the demo model, a small one. name: in demo.ANSWERS."""
    return {
        "default": lambda: default if _has_model() else demo.ANSWERS[name],
        "show_default": f"{default}; {demo.ANSWERS[name]:g} for the demo model",
    }


sampling_options = group(
    "sampling",
    _sampling,
    llama_option(
        "--temp --temperature temp",
        "TEMPERATURE",
        "temperature, 0: greedy",
        type=options.Number(min=0),
        **default_or_demo("temperature", 0.8),
    ),
    llama_option("--top-k", "TOP_K", "sample among the k most likely tokens, 0: all", type=int, default=40),
    llama_option("--top-p", "TOP_P", "sample among tokens with this total probability", type=SHARE, default=0.95),
    llama_option("--min-p", "MIN_P", "minimum probability relative to the most likely token", type=SHARE, default=0.05),
    llama_option(
        "--repeat-penalty",
        "REPEAT_PENALTY",
        "penalty on repeated tokens, 1: none",
        type=options.Number(min=0, min_open=True),
        **default_or_demo("repeat_penalty", 1.0),
    ),
    click.option("-s", "--seed", type=int, default=-1, help="random seed, -1: random"),
)


chat_options = stack(
    options.model_option(required=False, text="model file (GGUF) [default: the demo model]"),
    hf_option,
    input_options,
    options.template_options,
    llama_option(
        "-n --predict --n-predict n_predict",
        "N_PREDICT",
        "maximum tokens per answer, -1: no limit",
        type=int,
        default=None,
        show_default=f"no limit; {N_PREDICT} for the demo model and for a model without a chat template",
    ),
    options.cache_options(options.rollback_option),
    sampling_options,
    options.context_options(
        options.context_option(4096), options.flash_option, options.threads_option, options.batch_options()
    ),
    options.gpu_option,
    llama_option(
        "--context-shift/--no-context-shift",
        "CONTEXT_SHIFT",
        "a full context drops half of the tokens after the system message, instead of ending the answer",
        default=False,
    ),
    llama_option(
        "--swa-full",
        "SWA_FULL",
        "layers with a sliding window keep the cells of the whole context; --context-shift needs that",
        is_flag=True,
    ),
)


def run(
    model: str | None,
    hf_repo: str | None,
    chat_input: ChatInput,
    template: str | None,
    n_predict: int | None,
    cache: CacheRequest,
    sampling: Sampling,
    context: ContextOptions,
    n_gpu_layers: int,
    context_shift: bool,
    swa_full: bool,
    open_model: OpenModel | None = None,
) -> None:
    """Run the chat that chat_options request.

    open_model: calls the given function to open the model, and adds a source of first tokens.
    """
    for stream in (sys.stdin, sys.stdout):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")
    prompt = chat_input.first()
    # numpy and the native libraries: not for a --help
    from runtime.chat.conversation import Conversation
    from runtime.model import open_llama
    from subkv.engine.llama import Llama
    from subkv.engine.template import for_chat

    path = requested_model(model or None, hf_repo)

    def open_llm() -> Llama:
        return open_llama(path, n_gpu_layers, cache, context, Llama, swa_full)

    with (open_model or _only_model)(open_llm) as (llm, first_tokens):
        options.note_cache(llm.kv_stats(), llm.cache_choice)
        chosen, note = for_chat(llm.loaded_model, template)
        if note:
            options.note(note)
        is_demo = path is None
        if n_predict is None:
            n_predict = N_PREDICT if is_demo or note else -1
        if is_demo:
            options.note(DEMO_NOTE)
        system = "" if is_demo and chat_input.system is None else chat_input.system
        conversation = Conversation(llm, system, sampling, first_tokens, context_shift, chosen, stop_loops=is_demo)
        chat = Chat(conversation, n_predict)
        if prompt is not None and not chat.report_errors(chat.send, prompt) and chat_input.single_turn:
            raise click.exceptions.Exit(1)
        if not chat_input.single_turn:
            chat.loop(chat_input.simple_io)


@contextlib.contextmanager
def _only_model(open_llm: Callable[[], Llama]) -> Iterator[tuple[Llama, FirstTokens | None]]:
    """The model, without another source of first tokens."""
    with open_llm() as llm:
        yield llm, None


def _llama_cli_has(option: str) -> str:
    """A note that llama-cli has an option: an earlier name of one, or one that the installed llama-cli lists."""
    from runtime.launch import arguments, programs  # the native libraries: only for this error
    from subkv.native import library

    has_it = "llama.cpp's llama-cli has it: subkv run llama-cli "
    if option in arguments.FORMER:
        return has_it + arguments.FORMER[option]
    with contextlib.suppress(SubkvError, OSError, subprocess.SubprocessError, ImportError):
        path = programs.find("llama-cli", library.lib_dir(), None)
        listed = subprocess.run([path, "--help"], capture_output=True, text=True, errors="replace", timeout=10)
        if re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", listed.stdout):
            return has_it + option
    return ""


@command(foreign=_llama_cli_has)
@chat_options
def main(**arguments: Any) -> None:
    """Chat with a model; without -m the demo model, SmolLM2-135M-Instruct, on a compressed cache.

    For a model without bases, they are derived from its weights; -ctk f16 uses none.
    """
    run(**arguments)


if __name__ == "__main__":
    main()
