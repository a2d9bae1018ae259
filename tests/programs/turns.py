"""Counts the tokens that llama-server evaluates twice in a long conversation, with a coded cache and with f16.

python tests/programs/turns.py --depth 32000 -o json    (SUBKV_LIB_PATH names the libraries and the server)

Ten turns, an edited turn, a branch, the return to the first conversation, a restart. Models are tiny and have random
weights: the count depends on recurrent layers, sliding windows and heads, not on widths or weights. With -m FILE it is
that model, and the conversation is also one of subkv.Llama.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

TESTS = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    rooms = ("programs", "runtime", "format", "architectures")
    sys.path[:0] = [str(TESTS), *(str(TESTS / room) for room in rooms), str(TESTS.parent / "python"), str(TESTS.parent)]

import tiny  # noqa: E402
import virtual  # noqa: E402
from servers import CODED, Server, serving  # noqa: E402

N_TURNS, EDITED, BRANCHED = 10, 8, 5  # turns; the edited one; the one after which another text continues
N_ANSWER = 32
CACHES = ("subkv", "f16")
IN_PYTHON = "subkv.Llama"
DELTA = {  # gated delta rule in three of four layers; heads and states as large as theirs
    "block_count": 4,
    "full_attention_interval": 4,
    "attention.key_length": 256,
    "attention.value_length": 256,
    "rope.dimension_count": 64,
    "rope.dimension_sections": [11, 11, 10, 0],
    "ssm.state_size": 128,
    "ssm.inner_size": 512,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {  # llama.cpp's architecture, and its part of the model's shape
    "Qwen3.6-35B-A3B": ("qwen35moe", DELTA | {"attention.head_count": 8, "attention.head_count_kv": 1}),
    "Qwen3.6-27B": ("qwen35", DELTA | {"attention.head_count": 6, "attention.head_count_kv": 1}),
    "Gemma-4": (
        "gemma4",
        {
            "block_count": 6,
            "attention.sliding_window": 1024,
            "attention.sliding_window_pattern": [True] * 5 + [False],
            "attention.shared_kv_layers": 0,
            "attention.head_count": 4,
            "attention.head_count_kv": 1,
            "attention.key_length": 512,
            "attention.value_length": 512,
            "attention.key_length_swa": 256,
            "attention.value_length_swa": 256,
            "rope.dimension_count": 512,
            "rope.dimension_count_swa": 256,
        },
    ),
    "gpt-oss": (
        "gpt-oss",
        {
            "attention.sliding_window": 128,
            "attention.head_count": 8,
            "attention.head_count_kv": 1,
            "attention.key_length": 64,
            "attention.value_length": 64,
            "rope.dimension_count": 64,
        },
    ),
}
LETTERS = [tiny.vocabulary()[0].index(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]
USER = "<|im_start|>user\n"  # text at which the server detects the start of a message


@dataclass
class Talker:
    """One client: sends prompts, and counts the tokens that are evaluated again."""

    seed: int = 0
    histories: list[list[int]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def message(self, n: int) -> list[int]:
        """n tokens of a user, different in every call."""
        self.seed += 1
        return random.Random(self.seed).choices(LETTERS, k=n)

    def ask(self, server: Server | InProcess, step: str, talk: Sequence[int], message: Sequence[int]) -> list[int]:
        """The talk with this message and its answer."""
        prompt = [*talk, *server.tokens(USER), *message, *server.tokens("<|im_end|>\n<|im_start|>assistant\n")]
        delimiters = [{"role": "user", "delimiter": USER}]
        answer = server.complete(prompt, N_ANSWER, message_delimiters=delimiters)
        evaluated, cached = (answer["timings"][key] for key in ("prompt_n", "cache_n"))
        assert evaluated + cached == len(prompt), answer["timings"]
        known = max((common(prompt, text) for text in self.histories), default=0)
        new = max(1, len(prompt) - known)  # at least the last token is evaluated
        self.rows.append({"step": step, "tokens": len(prompt), "new": new, "again": evaluated - new})
        text = prompt + answer["tokens"]
        self.histories.append(text[:-1])  # the last token of an answer is not evaluated
        return [*text, *server.tokens("<|im_end|>\n")]


class InProcess:
    """The part of a Server that a Talker uses, on subkv.Llama with its checkpoints and a prompt store."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def tokens(self, text: str) -> list[int]:
        return list(self.llm.tokenize(text.encode(), add_bos=False, special=True))

    def complete(self, prompt: list[int], n: int, **_: Any) -> dict[str, Any]:
        """The last of the answer's n tokens is not evaluated, as in a server."""
        lengths: list[int] = []
        decode = self.llm._ctx.decode
        self.llm._ctx.decode = lambda batch: (lengths.append(batch.n_tokens()), decode(batch))
        try:
            ends = {str(self.llm.token_eos()): -100.0}
            self.llm.create_completion(prompt, max_tokens=n, temperature=0.0, logit_bias=ends)
        finally:
            del self.llm._ctx.decode
        answer = self.llm.input_ids[len(prompt) : self.llm.n_tokens].tolist()
        evaluated = sum(lengths) - len(answer)
        return {
            "tokens": [*answer, LETTERS[0]],
            "timings": {"prompt_n": evaluated, "cache_n": len(prompt) - evaluated},
        }


@contextlib.contextmanager
def in_process(model: Path, folder: Path, depth: int) -> Iterator[InProcess]:
    from subkv.engine.llama import Llama

    with Llama(
        model, n_ctx=2 * depth, kv_cache="subkv", prompt_cache=folder / "store", n_threads=2, verbose=False
    ) as llm:
        yield InProcess(llm)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def write_model(folder: Path, shape: str, **other: Any) -> Path:
    """A model of a shape, with data-free bases where the library looks for them (XDG_CACHE_HOME).

    other: changes of the shape's metadata.
    """
    from subkv.engine.cache import choose_cache
    from subkv.engine.request import CacheRequest

    arch, keys = SHAPES[shape]
    model = virtual.write(folder / f"{shape}.gguf", arch, **keys | {"context_length": 1 << 17} | other)
    assert choose_cache(model, CacheRequest("subkv")).coded
    return model


@contextlib.contextmanager
def served(model: Path, cache: str, folder: Path, depth: int, arguments: Sequence[Any]) -> Iterator[Server]:
    """A server with the memory of an earlier one: subkv's store, or for f16 the file of its slot.

    One slot with room for twice the depth, because the conversation continues beyond it.
    """
    more = {"SUBKV_STORE": str(folder / "store")} if cache == "subkv" else {}
    options = ("-c", 2 * depth, "-np", 1, "--no-warmup", "--slot-save-path", folder, *arguments)
    saved = folder / "slot.bin"
    with serving(model, *options, subkv="auto" if more else "off", folder=folder, **more) as server:
        assert (CODED in server.log) == (cache == "subkv")
        if saved.exists():
            server.request("POST", "/slots/0?action=restore", {"filename": saved.name})
        yield server
        if cache == "f16":
            server.request("POST", "/slots/0?action=save", {"filename": saved.name})


def measure(model: Path, cache: str, folder: Path, depth: int, arguments: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """Tokens evaluated in each step. depth: tokens of the ten turns."""
    folder.mkdir()
    client = Talker()

    def opened() -> contextlib.AbstractContextManager[Server | InProcess]:
        if cache == IN_PYTHON:
            return in_process(model, folder, depth)
        return served(model, cache, folder, depth, arguments)

    n_message = depth // N_TURNS - N_ANSWER
    talks: list[list[int]] = [[]]
    with opened() as server:
        for turn in range(1, N_TURNS + 1):
            talks.append(client.ask(server, f"turn {turn}", talks[-1], client.message(n_message)))
        edited = client.ask(server, "a turn edited", talks[EDITED - 1], client.message(n_message))
        client.ask(server, "gone on", edited, client.message(n_message))
        client.ask(server, "a branch", talks[BRANCHED], client.message(n_message))
        talks.append(client.ask(server, "the way back", talks[-1], client.message(n_message)))
    with opened() as server:
        talks.append(client.ask(server, "a restart", talks[-1], client.message(n_message)))
        client.ask(server, "edited behind it", talks[N_TURNS], client.message(n_message))  # the turn before the restart
    return client.rows


def examined(
    shapes: Sequence[str], depth: int, folder: Path, arguments: Sequence[Any] = (), **other: Any
) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """Shape, cache and its steps."""
    for shape in shapes:
        model = write_model(folder, shape, **other)
        for cache in CACHES:
            yield shape, cache, measure(model, cache, folder / f"{shape}-{cache}", depth, arguments)


@click.command()
@click.option("-m", "--model", type=click.Path(path_type=Path, exists=True), help="a model instead of the shapes")
@click.option("--depth", type=click.IntRange(1000, 60000), default=32000, show_default=True, help="tokens of ten turns")
@click.option("--shape", "shapes", type=click.Choice(list(SHAPES)), multiple=True, help="default: all")
@click.option("-t", "--threads", type=click.IntRange(1, 1024), default=2, show_default=True)
@click.option("-o", "--output", type=click.Choice(["md", "json"]), default="md", show_default=True)
@click.option("--keep", type=click.Path(path_type=Path), help="folder for models and logs of servers")
@click.argument("arguments", nargs=-1)
def main(
    model: Path | None,
    depth: int,
    shapes: tuple[str, ...],
    threads: int,
    output: str,
    keep: Path | None,
    arguments: Any,
) -> None:
    """Count the tokens that llama-server evaluates twice. ARGUMENTS: more of them for the server, behind --."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        options = ("-t", threads, "-tb", threads, *arguments)
        rows = []
        found = examined(shapes or list(SHAPES), depth, folder, options)
        if model is not None:
            from subkv.engine.cache import choose_cache
            from subkv.engine.request import CacheRequest

            path = model
            assert choose_cache(path, CacheRequest("subkv")).coded  # stores bases for the server
            kinds = ("f16", "subkv", IN_PYTHON)
            found = ((path.stem, kind, measure(path, kind, folder / kind, depth, options)) for kind in kinds)
        for shape, cache, steps in found:
            for row in steps:
                rows.append({"shape": shape, "cache": cache, **row})
                if output == "md":
                    click.echo("| " + " | ".join(map(str, rows[-1].values())) + " |")
        if output == "json":
            click.echo(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
