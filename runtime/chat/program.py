"""Chat with a model in the terminal or through a pipe; the answer goes to stdout, everything else to stderr.

python -m runtime.chat                                   the demo model on a compressed cache
python -m runtime.chat -m model.subkv.gguf
echo "What is a sonnet?" | python -m runtime.chat --temp 0
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runtime import options
from runtime.chat.terminal import Completer, Interrupts, open_input
from runtime.warmstart import flags
from subkv.base.command import command, sentence
from subkv.base.threads import default_threads

if TYPE_CHECKING:
    from runtime.chat.conversation import Conversation, Turn
    from runtime.warmstart.planting import Planting

MIB = 1024 * 1024

HELP = """\
/exit, /bye    leave (also Ctrl-D)
/regen         answer the last message again
/clear         forget the conversation and what was read
/read FILE     put a text file in front of the next message
/save FILE     write the conversation and its cells
/load FILE     go on with a saved conversation
/stats         sizes of the KV cache
/help          this list
A line that ends with \\ goes on in the next one, as one does that ends with Alt-Enter in the editor (extra `chat`).
A pasted text is one message. Ctrl-C stops an answer; at the prompt it drops what was typed, twice in a row it leaves.
A full context ends the answer. A message that does not fit is refused and changes nothing: /clear makes room."""

LEAVE = ("/exit", "/bye")
WITH_FILE = ("/read", "/save", "/load")


class Chat:
    """Reads messages, runs commands, prints answers."""

    def __init__(self, conversation: Conversation, n_predict: int) -> None:
        self.conversation = conversation
        self.n_predict = n_predict
        self.read_text = ""
        self.interrupts = Interrupts()
        self.commands: dict[str, Callable[[str], None]] = {
            "/regen": self.regenerate,
            "/clear": self.clear,
            "/read": self.read,
            "/save": self.save,
            "/load": self.load,
            "/stats": self.stats,
            "/help": lambda _: options.note(HELP),
        }

    def loop(self, simple: bool) -> None:
        """Until /exit or the end of the input; simple: as in open_input."""
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
        """Do what one message or command asks for."""
        name, argument = command_of(text)
        if name is None:
            if text.strip():
                self.guarded(self.say, text)
        elif name in self.commands:
            self.guarded(self.commands[name], argument)
        else:
            options.note(f"{name}: unknown command; /help lists them")

    def guarded(self, action: Callable[[str], None], argument: str) -> bool:
        """Run one command; what goes wrong is said and the chat goes on. Returns whether it went well."""
        from subkv.base.errors import SubkvError

        try:
            action(argument)
        except SubkvError as error:
            options.note(sentence(error))
            return False
        return True

    def say(self, text: str) -> None:
        from runtime.chat.conversation import Turn

        if self.read_text:
            text = f"{self.read_text}\n\n{text}"
        turn = Turn()
        self.print_answer(self.conversation.ask(text, self.n_predict, self.interrupts.stop, turn), turn)
        if turn.n_answer:
            self.read_text = ""

    def regenerate(self, _: str) -> None:
        from runtime.chat.conversation import Turn

        turn = Turn()
        self.print_answer(self.conversation.regenerate(self.n_predict, self.interrupts.stop, turn), turn)

    def print_answer(self, pieces: Iterator[str], turn: Turn) -> None:
        from runtime.chat.conversation import MORE_ROOM

        with self.interrupts.watch():
            for piece in pieces:
                sys.stdout.write(piece)
                sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
        conversation = self.conversation
        if turn.stopped == "interrupt":
            options.note("stopped")
        elif turn.stopped == "full":
            options.note(f"-c: the context of {conversation.llm.n_ctx()} tokens is full; {MORE_ROOM}")
        mark = ""
        if turn.warm is not None and conversation.warm is not None:
            if turn.warm.warm:
                head = "first token" if turn.n_warm == 1 else f"first {turn.n_warm} tokens"
                mark = f" | warm start: {turn.warm.similarity:.2f} similar, {head}"
            elif turn.warm.cause != "prefix":
                options.note(f"warm start: cold; {turn.warm.reason}")
            if conversation.warm.problem:
                options.note(f"warm start: {conversation.warm.problem}")
        stats = conversation.llm.kv_stats()
        options.note(
            f"[ Prompt: {turn.prompt_speed:.1f} t/s | Generation: {turn.answer_speed:.1f} t/s | "
            f"KV: {stats.bytes_kv / MIB:.1f} MiB (f16: {stats.bytes_f16 / MIB:.1f}){mark} ]"
        )

    def clear(self, _: str) -> None:
        self.conversation.clear()
        self.read_text = ""
        options.note("the conversation is empty")

    def read(self, name: str) -> None:
        from subkv.base.errors import SubkvError

        path = named_file("/read", name)
        try:
            text = path.read_text("utf-8")
        except OSError as error:
            raise SubkvError("/read", f"cannot read {path}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise SubkvError(
                "/read", f"expected UTF-8 text, found byte {error.start} of {path} to be something else"
            ) from error
        text = f"{self.read_text}\n\n{text}" if self.read_text else text
        n_tokens = self.conversation.count(text)
        self.conversation.check_room("/read", "what was read", n_tokens)
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
        conversation = self.conversation
        stats = conversation.llm.kv_stats()
        rows = [
            ("cache", stats.type_k if stats.type_k == stats.type_v else f"{stats.type_k}/{stats.type_v}"),
            ("kernel", stats.kernel),
            ("tokens", f"{len(conversation.tokens)} of {conversation.llm.n_ctx()}"),
            ("bits per element", f"{stats.bpe:.3f}"),
            ("bytes per token", f"{stats.bytes_per_token}"),
            ("KV", f"{stats.bytes_kv / MIB:.2f} MiB (f16: {stats.bytes_f16 / MIB:.2f} MiB)"),
        ]
        if stats.n_layer_coded:
            rows += [
                ("  coefficient rows", f"{stats.bytes_codes / MIB:.2f} MiB in {stats.n_layer_coded} layers"),
                (
                    "  exact window",
                    f"{stats.bytes_window / MIB:.2f} MiB ({stats.n_sink} first, {stats.n_recent} last tokens)",
                ),
                ("  ordinary layers", f"{stats.bytes_stock / MIB:.2f} MiB"),
                ("  adaptive bases", f"{stats.bytes_adapt / MIB:.2f} MiB, {stats.n_chunks} of all heads"),
                ("bases", f"{stats.bytes_bases / MIB:.2f} MiB"),
                ("zero rows", f"{stats.n_zero_rows}"),
                ("fingerprint", stats.fingerprint or ""),
            ]
        for layer in conversation.llm.adapt_stats():
            rest = sorted(layer.residuals)
            rows.append(
                (
                    f"  layer {layer.il} {layer.side}",
                    f"{layer.n_chunks} bases, {layer.n_opened} opened, {layer.n_refused} refused, "
                    f"residual {rest[0]:.3f} to {rest[-1]:.3f}",
                )
            )
        options.note("\n".join(f"{name:<18} {value}" for name, value in rows))


def command_of(text: str) -> tuple[str | None, str]:
    """Command and argument of a line; None for a message: several lines, or a word that a path could begin with."""
    name, _, argument = text.strip().partition(" ")
    return (name if re.fullmatch(r"/[a-z]+", name) and "\n" not in text.strip() else None), argument.strip()


def named_file(command: str, name: str) -> Path:
    from subkv.base.errors import SubkvError

    if not name:
        raise SubkvError(command, "expected a file name, found none")
    return Path(name).expanduser()


@command()
@options.model_option(required=False, text="model file (GGUF); default: the demo model")
@click.option("-p", "--prompt", default=None, metavar="TEXT", help="first message")
@click.option("-st", "--single-turn", is_flag=True, help="one answer, then leave (the message: -p, or all of stdin)")
@click.option("--simple-io", is_flag=True, help="a plain terminal: no editor for messages")
@click.option("-sys", "--system-prompt", "system", default=None, metavar="TEXT", help="system message")
@options.context_option(4096)
@options.predict_option("most tokens per answer, -1: no limit")
@options.cache_options
@options.window_options
@options.rollback_option
@options.flash_option
@click.option(
    "--temp",
    "--temperature",
    "temp",
    type=float,
    default=0.8,
    envvar="LLAMA_ARG_TEMPERATURE",
    help="temperature, 0: greedy",
)
@click.option("--top-k", type=int, default=40, envvar="LLAMA_ARG_TOP_K", help="sample among the k most likely, 0: all")
@click.option(
    "--top-p", type=click.FloatRange(0, 1), default=0.95, envvar="LLAMA_ARG_TOP_P", help="sample among this mass"
)
@click.option(
    "--min-p",
    type=click.FloatRange(0, 1),
    default=0.05,
    envvar="LLAMA_ARG_MIN_P",
    help="least share of the top probability",
)
@click.option(
    "--repeat-penalty",
    type=float,
    default=1.0,
    envvar="LLAMA_ARG_REPEAT_PENALTY",
    help="penalty on repeated tokens, 1: none",
)
@click.option("-s", "--seed", type=int, default=-1, help="random seed, -1: random")
@options.threads_option
@options.batch_options()
@options.gpu_option
@flags.warm_options
def main(**given: Any) -> None:
    """Chat with a model; without -m the demo model, SmolLM2-135M-Instruct, on a compressed cache."""
    if given["temp"] < 0:
        raise click.UsageError(f"--temp: expected 0 or more, found {given['temp']}")
    stdin_tty = sys.stdin is not None and sys.stdin.isatty()
    for stream in (sys.stdin, sys.stdout):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")
    prompt = given["prompt"]
    if given["single_turn"] and prompt is None:
        if stdin_tty:
            raise click.UsageError("--single-turn: expected -p TEXT or a text on stdin, found neither")
        prompt = sys.stdin.read()
    with (
        flags.planted(given) as planting,
        open_model(given, planting=planting) as llm,
        flags.started(given, llm, planting) as warm,
    ):
        from runtime.chat.conversation import Conversation, Sampling
        from subkv.engine.stats import cache_line

        options.note(cache_line(llm.kv_stats()))
        sampling = Sampling(given["temp"], given["top_k"], given["top_p"], given["min_p"], given["repeat_penalty"])
        chat = Chat(Conversation(llm, given["system"], sampling, given["seed"], warm), given["n_predict"])
        if prompt is not None and not chat.guarded(chat.say, prompt) and given["single_turn"]:
            raise click.exceptions.Exit(1)
        if not given["single_turn"]:
            chat.loop(given["simple_io"])


@contextlib.contextmanager
def open_model(
    given: dict[str, Any], kind: Callable[..., Any] | None = None, planting: Planting | None = None, **more: Any
) -> Iterator[Any]:
    """subkv.Llama for the flags; the demo model when there is no -m.

    kind: a subclass; more: for its constructor; planting: what its context is made with.
    """
    cache = options.cache_arguments(given["type_k"], given["type_v"])
    if given["model"]:
        model = Path(given["model"])
    else:
        from runtime import demo

        # an ordinary cache asked for by name needs no bases
        coded = cache.get("kv_cache") in ("auto", "subkv") and not given["bases"]
        model = demo.converted() if coded else demo.model_path()
    from subkv.engine.llama import Llama

    n_threads = default_threads(given["n_threads"])
    window = {key: given[key] for key in ("n_sink", "n_recent", "n_rollback", "adapt")}
    with contextlib.nullcontext() if planting is None else planting.attach():
        llm = (kind or Llama)(
            os.fspath(model),
            bases=given["bases"],
            n_ctx=given["n_ctx"],
            n_batch=given["n_batch"],
            n_ubatch=given["n_ubatch"],
            n_threads=n_threads,
            n_threads_batch=n_threads,
            n_gpu_layers=options.gpu_layers(given["n_gpu_layers"]),
            flash_attn=options.FLASH[given["flash_attn"]],
            verbose=False,
            progress=True,
            **window,
            **cache,
            **more,
        )
    try:
        yield llm
    finally:
        llm.close()


if __name__ == "__main__":
    main()
