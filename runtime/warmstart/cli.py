"""Warm starts by hand: prompts to train and test on, the guard, a library, and the evaluation.

python -m runtime.warmstart prompts -m M.gguf -f TEXT -o prompts.jsonl
python -m converter.warmstart -m M.gguf -f prompts.jsonl -o warm.safetensors
python -m runtime.warmstart guard -m M.gguf --warm-file warm.safetensors -f prompts.jsonl
python -m runtime.warmstart evaluate -m M.gguf --warm-file warm.safetensors -f prompts.jsonl -o report/
python -m runtime.warmstart build -m M.gguf --warm-file warm.safetensors -f prompts.jsonl --warm-library DIR
python -m runtime.warmstart list -m M.gguf --warm-file warm.safetensors --warm-library DIR
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runtime import options
from runtime.bench import IntList
from subkv.base.command import command as program_command
from subkv.base.errors import SubkvError
from subkv.base.threads import default_threads

if TYPE_CHECKING:
    from runtime.warmstart.library import Library
    from runtime.warmstart.trained import Trained
    from subkv.engine.model import Model

FILE = click.Path(path_type=Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
def main() -> None:
    """A first token from the summarised cache of a similar prompt. Experimental."""


def _command(name: str) -> Callable[[Callable[..., Any]], click.Command]:
    """A command of the group, with errors as one sentence."""

    def add(function: Callable[..., Any]) -> click.Command:
        command = program_command(name=name)(function)
        main.add_command(command)
        return command

    return add


_model = options.model_option(required=True)
_prompts = click.option(
    "-f", "--file", "file", required=True, type=FILE, help="prompts, as the command `prompts` writes them"
)
_trained = click.option("--warm-file", "warm_file", required=True, type=FILE, help="trained file")
_library = click.option("--warm-library", "folder", required=True, type=FILE, help="folder of the library")
_warm = click.option(
    "--warm-file", "warm_files", required=True, multiple=True, type=FILE, help="trained file; several: compared"
)


@_command("prompts")
@_model
@click.option("-f", "--file", "file", required=True, type=FILE, help="UTF-8 text that passages are cut from")
@click.option("-o", "--output", "target", required=True, type=FILE, help="prompts, one JSON object a line")
@click.option("--words", type=IntList(), default="60,180,600", help="lengths of the passages")
@click.option("-n", "--passages", "n", type=click.IntRange(1), default=24, help="passages of each length")
@click.option("--test-share", type=click.FloatRange(0, 1), default=0.25, help="of the text, for testing only")
@click.option("--seed", type=int, default=0, help="of all choices")
def prompts(model: str, file: Path, target: Path, words: list[int], n: int, test_share: float, seed: int) -> None:
    """Make prompts and their paraphrases from a text, chat template of the model applied."""
    from runtime.template import Template
    from runtime.warmstart import prompts as made
    from subkv.base.files import atomic_file, check_not_input, check_writable
    from subkv.engine.llama import Llama

    if not words or min(words) < 10:
        raise SubkvError("words", f"expected lengths of 10 words or more, found {words}")
    check_writable(target)
    check_not_input(target, [("-m", Path(model)), ("-f", file)])
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SubkvError("files", f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error
    with Llama(model, n_ctx=64, kv_cache="f16", verbose=False) as llm:
        template = Template(llm)
        found = made.make(
            text,
            lambda message: template.render([{"role": "user", "content": message}]),
            sorted(set(words)),
            n,
            test_share,
            seed,
        )
    with atomic_file(target) as handle:
        handle.write(made.dumps(found).encode("utf-8"))
    n_test = sum(prompt.split == made.TEST for prompt in found)
    options.note(f"wrote {target}: {len(found) - n_test} prompts to train on, {n_test} to test on")


@_command("evaluate")
@_model
@_warm
@_prompts
@click.option("-ctk", "--cache-type-k", "caches", default="f16", metavar="T,T,…", help="caches, as of bench")
@click.option("--bases", type=FILE, default=None, help="bases of 'subkv': a sidecar or a converted model")
@options.flash_option
@options.threads_option
@click.option("-r", "--repetitions", type=click.IntRange(0), default=5, help="of every timing, 0: time nothing")
@click.option("--targets", type=click.IntRange(1), default=None, help="at most so many prompts of each length")
@click.option("-o", "--output", "folder", required=True, type=FILE, help="folder of the report")
def evaluate(
    model: str,
    warm_files: tuple[Path, ...],
    file: Path,
    caches: str,
    bases: Path | None,
    flash_attn: str,
    n_threads: int | None,
    repetitions: int,
    targets: int | None,
    folder: Path,
) -> None:
    """Compare warm starts with cold ones and with simpler ways; answer the paper's criteria."""
    from runtime.warmstart import evaluate as evaluation
    from runtime.warmstart import prompts as made
    from runtime.warmstart import report

    found = [prompt for prompt in made.read(file) if prompt.split != made.TRAIN]
    if not any(prompt.neighbours for prompt in found):
        raise SubkvError("files", "expected prompts to test on, with neighbours, found none")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SubkvError("output", f"cannot write {folder}: {error.strerror or error}") from error
    settings = evaluation.Settings(
        model=Path(model),
        warm_files=warm_files,
        caches=tuple(name.strip() for name in caches.split(",")),
        bases=bases,
        flash_attn=options.FLASH[flash_attn],
        n_threads=default_threads(n_threads),
        repetitions=repetitions,
        targets=targets,
    )
    results = evaluation.run(settings, found)
    report.write(folder, _line(), {"prompts": file.name, **results.about}, results.outcomes, results.latencies)
    for line in report.conclusion(results.outcomes, results.latencies):
        click.echo(line)
    options.note(f"wrote {folder / 'report.md'}")


@_command("guard")
@_model
@_trained
@_prompts
@click.option("--targets", type=click.IntRange(1), default=None, help="at most so many prompts of each length")
@options.threads_option
def guard(model: str, warm_file: Path, file: Path, targets: int | None, n_threads: int | None) -> None:
    """Learn from the training prompts how far warm starts go astray, and write it into the trained file."""
    from runtime.warmstart import evaluate as evaluation
    from runtime.warmstart import prompts as made
    from subkv.base.files import check_writable

    check_writable(warm_file)
    found = [prompt for prompt in made.read(file) if prompt.split != made.TEST]
    if not any(prompt.neighbours for prompt in found):
        raise SubkvError("files", "expected prompts to train on, with neighbours, found none")
    settings = evaluation.Settings(Path(model), (warm_file,), n_threads=default_threads(n_threads), targets=targets)
    with evaluation.Evaluation(settings, found) as lab:
        lab.capture()
        (coefficients,) = lab.fit_guards("f16")
        dataclasses.replace(lab.sides[0].trained, guard=coefficients).save(warm_file)
    options.note(f"wrote {warm_file}: {', '.join(f'{name} {value:.3g}' for name, value in coefficients.items())}")


@_command("build")
@_model
@_trained
@_prompts
@_library
@options.threads_option
def build(model: str, warm_file: Path, file: Path, folder: Path, n_threads: int | None) -> None:
    """Put the summaries of prompts into a library; those that are there already stay."""
    from runtime.warmstart import prompts as made
    from runtime.warmstart.capture import Capture
    from runtime.warmstart.decode import prompt_tokens
    from runtime.warmstart.embedding import embedder
    from runtime.warmstart.summary import summarise
    from subkv.base.progress import tracked
    from subkv.engine.model import Model

    found = made.read(file)
    with Model(model) as opened:
        trained, library = _opened(opened, warm_file, folder)
        tokens = [prompt_tokens(opened, prompt.text) for prompt in found]
        shortest, longest = trained.plan.shortest, opened.n_ctx_train
        usable = [own for own in tokens if shortest <= len(own) <= longest]
        if not usable:
            raise SubkvError("files", f"expected prompts of {shortest} to {longest} tokens, found none")
        new = [own for own in usable if own not in library]
        embedding = embedder(trained.embedding, opened.path, opened.handle, default_threads(n_threads))
        with Capture(opened, max(map(len, usable)), default_threads(n_threads)) as capture:
            for own in tracked("build", new, "prompt"):
                rows = capture.prompt(own)
                library.add(own, embedding.embed(own), summarise(rows.k, rows.v, trained.plan, trained.frame))
        embedding.close()
    short = (
        f", {len(tokens) - len(usable)} not {shortest} to {longest} tokens long" if len(usable) < len(tokens) else ""
    )
    options.note(f"wrote {folder}: {len(new)} prompts, {len(usable) - len(new)} were there{short}")


@_command("list")
@_model
@_trained
@_library
@click.option("--width", type=click.IntRange(10), default=80, help="characters of each prompt, from its end")
def entries(model: str, warm_file: Path, folder: Path, width: int) -> None:
    """Show what a library holds for a model and a trained file."""
    from subkv.engine.model import Model, token_piece

    with Model(model) as opened:
        _, library = _opened(opened, warm_file, folder)
        for entry in library.entries():
            text = b"".join(token_piece(opened.vocab, int(token)) for token in entry.tokens).decode("utf-8", "replace")
            name = entry.name.rpartition("-")[2][:12]  # what comes before is the same for all
            click.echo(f"{name}  {len(entry.tokens):5d} tokens  …{' '.join(text.split())[-width:]}")


def _opened(model: Model, warm_file: Path, folder: Path) -> tuple[Trained, Library]:
    """The trained file, checked against the model, and its library."""
    from runtime.warmstart.library import Library
    from runtime.warmstart.trained import Trained, identity_of

    trained = Trained.load(warm_file, model.path)
    identity = identity_of(model)
    trained.check(identity)
    return trained, Library(folder, identity, trained.digest, trained.centre, embedding=trained.embedding)


def _line() -> str:
    """The command line, files without their folders."""
    return " ".join(["python -m runtime.warmstart", *(re.sub(r"[^\s=,]*/(?=.)", "", a) for a in sys.argv[1:])])


if __name__ == "__main__":
    main()
