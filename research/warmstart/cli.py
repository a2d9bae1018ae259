"""Warm starts by hand: prompts to train and test on, training, the guard, the evaluation, a library, and the chat.

python -m research.warmstart prompts -m M.gguf -f TEXT -o prompts.jsonl
python -m research.warmstart train -m M.gguf -f prompts.jsonl -o warm.safetensors
python -m research.warmstart guard -m M.gguf --warm-file warm.safetensors -f prompts.jsonl
python -m research.warmstart evaluate -m M.gguf --warm-file warm.safetensors -f prompts.jsonl -o report/
python -m research.warmstart build -m M.gguf --warm-file warm.safetensors -f prompts.jsonl --warm-library DIR
python -m research.warmstart list -m M.gguf --warm-file warm.safetensors --warm-library DIR
python -m research.warmstart chat -m M.gguf --warm-start on --warm-file warm.safetensors --warm-library DIR
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from research.warmstart.chat import main as chat
from runtime import options
from subkv.base.command import command, group, show
from subkv.base.errors import SubkvError, concerning, need_packages
from subkv.base.threads import default_threads

# what runs is imported by the commands: numpy, torch and the native libraries are not for a --help
if TYPE_CHECKING:
    from research.warmstart.prompts import Prompt
    from research.warmstart.summaries import Library
    from research.warmstart.trained import Trained
    from subkv.engine.model import Model

FILE = click.Path(path_type=Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
def main() -> None:
    """A first token from the summarised cache of a similar prompt. Experimental."""


_model = options.model_option(required=True)
_prompts = click.option(
    "-f", "--file", "file", required=True, type=FILE, help="prompts, as the command `prompts` writes them"
)
_trained = click.option("--warm-file", "warm_file", required=True, type=FILE, help="trained file")
_library = click.option("--warm-library", "warm_library", required=True, type=FILE, help="folder of the library")
_targets = click.option(
    "--targets", type=click.IntRange(1), default=None, help="at most so many prompts of each length"
)


@contextlib.contextmanager
def _files() -> Iterator[None]:
    """Errors of what is read here, under the names of the options."""
    with concerning(path="file", prompts="file", text="file"):
        yield


def _read(file: Path, purpose: str, without: str) -> list[Prompt]:
    """Prompts but those of a split, some with neighbours."""
    from research.warmstart import prompts as made

    with _files():
        found = [prompt for prompt in made.read(file) if prompt.split != without]
    if not any(prompt.neighbours for prompt in found):
        raise SubkvError("file", f"expected prompts to {purpose} on, with neighbours, found none")
    return found


@dataclass(frozen=True)
class Passages:
    """What prompts are made about: n passages of each number of words, a share of the text's for tests only."""

    words: list[int]
    n: int
    test_share: float
    seed: int

    def __post_init__(self) -> None:
        if not self.words or min(self.words) < 10:
            raise SubkvError("words", f"expected lengths of 10 words or more, found {self.words}")


@command("prompts")
@_model
@click.option("-f", "--file", "file", required=True, type=FILE, help="UTF-8 text that passages are cut from")
@click.option("-o", "--output", "output", required=True, type=FILE, help="prompts, one JSON object a line")
@group(
    "passages",
    Passages,
    click.option("--words", type=options.NUMBERS, default="60,180,600", help="lengths of the passages"),
    click.option("-n", "--passages", "n", type=click.IntRange(1), default=24, help="passages of each length"),
    click.option("--test-share", type=click.FloatRange(0, 1), default=0.25, help="of the text, for testing only"),
    click.option("--seed", type=int, default=0, help="of all choices"),
)
def prompts(model: str, file: Path, output: Path, passages: Passages) -> None:
    """Make prompts and their paraphrases from a text, chat template of the model applied."""
    from research.warmstart import prompts as made
    from subkv.base.files import atomic_file, check_not_input, check_writable
    from subkv.engine.model import Model
    from subkv.engine.template import Template

    check_writable(output)
    check_not_input(output, [("-m", Path(model)), ("-f", file)])
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SubkvError("file", f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error
    with Model(model) as opened, _files():
        template = Template(opened)
        words = sorted(set(passages.words))
        found = made.make(
            text,
            lambda message: template.render([{"role": "user", "content": message}]),
            words,
            passages.n,
            passages.test_share,
            passages.seed,
        )
    with atomic_file(output) as handle:
        handle.write(made.dumps(found).encode("utf-8"))
    n_test = sum(prompt.split == made.TEST for prompt in found)
    options.note(f"wrote {output}: {len(found) - n_test} prompts to train on, {n_test} to test on")


@dataclass(frozen=True)
class Shape:
    """What a prompt is summarised in, and found by."""

    n_slots: int
    n_sink: int
    n_last: int
    embedding: str


@command("train")
@_model
@_prompts
@click.option("-o", "--output", "output", required=True, type=FILE, help="warm.safetensors to write")
@group(
    "shape",
    Shape,
    click.option("--slots", "n_slots", type=click.IntRange(1, 4096), default=16, help="slots per layer and KV head, m"),
    click.option("--n-sink", type=click.IntRange(0, 4096), default=4, help="first tokens kept exact"),
    click.option("--n-last", type=click.IntRange(1, 4096), default=8, help="last tokens kept exact"),
    click.option(
        "--embedding", type=click.Choice(["tokens", "hidden"]), default="tokens", help="what prompts are found by"
    ),
)
@group(
    "settings",
    dict,  # of research.warmstart.learn.Settings, which needs torch
    click.option("--epochs", type=click.IntRange(0), default=15, help="passes over the prompts"),
    click.option("--lr", type=click.FloatRange(0, min_open=True), default=1e-3, help="learning rate of AdamW"),
    click.option("--ridge", type=click.FloatRange(0, min_open=True), default=1e-3, help="ridge of the projector"),
    click.option("--shared", is_flag=True, help="one adapter for all heads of a layer"),
    click.option("--seed", type=int, default=0, help="order of the prompts"),
)
@options.threads_option
def train(model: str, file: Path, output: Path, shape: Shape, settings: dict[str, Any], n_threads: int | None) -> None:
    """Learn what warm starts of a model need, from prompts of `python -m research.warmstart prompts`. Experimental."""
    need_packages("torch", ["torch"])
    from research.warmstart import prompts as made
    from research.warmstart.learn import Settings
    from research.warmstart.pooled import Plan
    from research.warmstart.train import How, learn, summary_line
    from subkv.base.files import check_not_input, check_writable
    from subkv.engine.model import Model

    with _files():
        found = made.read(file)
        check_writable(output)
        check_not_input(output, (("-m", Path(model)), ("-f", file)))
        how = How(Plan(shape.n_slots, shape.n_sink, shape.n_last), shape.embedding, default_threads(n_threads), True)
        provenance = {"prompts": file.name, "prompts_sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        with Model(model) as loaded:
            trained, losses = learn(loaded, found, how, Settings(**settings), provenance)
    trained.save(output)
    click.echo(f"wrote {output}: {summary_line(trained, losses)}")


@dataclass(frozen=True)
class Measured:
    """What prompts are compared in, and how often each is timed."""

    type_k: str
    bases: Path | None
    flash_attn: str
    repetitions: int
    targets: int | None


@command("evaluate")
@_model
@click.option(
    "--warm-file", "warm_files", required=True, multiple=True, type=FILE, help="trained file; several: compared"
)
@_prompts
@group(
    "measured",
    Measured,
    click.option("-ctk", "--cache-type-k", "type_k", default="f16", metavar="T,T,…", help="caches, as of bench"),
    click.option("--bases", type=FILE, default=None, help="bases of 'subkv': a sidecar or a converted model"),
    options.flash_option,
    click.option("-r", "--repetitions", type=click.IntRange(0), default=5, help="of every timing, 0: time nothing"),
    _targets,
)
@options.threads_option
@click.option("-o", "--output", "output", required=True, type=FILE, help="folder of the report")
def evaluate(
    model: str, warm_files: tuple[Path, ...], file: Path, measured: Measured, n_threads: int | None, output: Path
) -> None:
    """Compare warm starts with cold ones and with simpler ways; answer the paper's criteria."""
    from research.experiments.grids import made_folder
    from research.warmstart import comparison, report
    from research.warmstart import prompts as made

    found = _read(file, "test", made.TRAIN)
    made_folder(output)
    settings = comparison.Settings(
        model=Path(model),
        warm_files=warm_files,
        caches=tuple(name.strip() for name in measured.type_k.split(",")),
        bases=measured.bases,
        flash_attn=measured.flash_attn,
        n_threads=default_threads(n_threads),
        repetitions=measured.repetitions,
        targets=measured.targets,
    )
    with _files():
        results = comparison.run(settings, found)
    report.write(output, {"prompts": file.name, **results.about}, results.outcomes, results.latencies)
    for line in report.conclusion(results.outcomes, results.latencies):
        click.echo(line)
    options.note(f"wrote {output / 'report.md'}")


@command("guard")
@_model
@_trained
@_prompts
@_targets
@options.threads_option
def guard(model: str, warm_file: Path, file: Path, targets: int | None, n_threads: int | None) -> None:
    """Learn from the training prompts how far warm starts go astray, and write it into the trained file."""
    from research.warmstart import comparison
    from research.warmstart import prompts as made
    from subkv.base.files import check_writable

    with concerning(output="warm_file"):
        check_writable(warm_file)
    found = _read(file, "train", made.TEST)
    settings = comparison.Settings(Path(model), (warm_file,), n_threads=default_threads(n_threads), targets=targets)
    with _files(), concerning(warm_files="warm_file"), comparison.opened(settings, found) as lab:
        (coefficients,) = lab.fit_guards("f16")
        trained = dataclasses.replace(lab.sides[0].trained, guard=coefficients)
    with concerning(output="warm_file"):
        trained.save(warm_file)
    options.note(f"wrote {warm_file}: {', '.join(f'{name} {value:.3g}' for name, value in coefficients.items())}")


@command("build")
@_model
@_trained
@_prompts
@_library
@options.threads_option
def build(model: str, warm_file: Path, file: Path, warm_library: Path, n_threads: int | None) -> None:
    """Put the summaries of prompts into a library; those that are there already stay."""
    from research.warmstart import prompts as made
    from research.warmstart.contexts import capturing
    from research.warmstart.embedding import embedder
    from research.warmstart.pooled import summarise
    from subkv.base.progress import tracked
    from subkv.engine.model import Model

    with _files():
        found = made.read(file)
    with Model(model) as opened, concerning(folder="warm_library"):
        trained, library = _opened(opened, warm_file, warm_library)
        tokens = [opened.tokenize_chat(prompt.text) for prompt in found]
        shortest, longest = trained.plan.shortest, opened.n_ctx_train
        usable = [own for own in tokens if shortest <= len(own) <= longest]
        if not usable:
            raise SubkvError("file", f"expected prompts of {shortest} to {longest} tokens, found none")
        new = [own for own in usable if own not in library]
        embed = embedder(trained.embedding, opened, default_threads(n_threads))
        with capturing(opened, max(map(len, usable)), default_threads(n_threads)) as context:
            for own in tracked("build", new, "prompt"):
                rows = context.capture(own)
                library.add(own, embed(own), summarise(rows.k, rows.v, trained.plan, trained.frame))
    left = len(tokens) - len(usable)
    short = f", {left} not {shortest} to {longest} tokens long" if left else ""
    options.note(f"wrote {warm_library}: {len(new)} prompts, {len(usable) - len(new)} were there{short}")


@command("list")
@_model
@_trained
@_library
@click.option("--width", type=click.IntRange(10), default=80, help="characters of each prompt, from its end")
def entries(model: str, warm_file: Path, warm_library: Path, width: int) -> None:
    """Show what a library holds for a model and a trained file."""
    from subkv.engine.model import Model

    with Model(model) as opened, concerning(folder="warm_library"):
        _, library = _opened(opened, warm_file, warm_library)
        for entry in library.entries():
            text = b"".join(opened.piece(int(token)) for token in entry.tokens).decode("utf-8", "replace")
            name = entry.name.rpartition("-")[2][:12]  # what comes before is the same for all
            show(f"{name}  {len(entry.tokens):5d} tokens  …{' '.join(text.split())[-width:]}")


def _opened(model: Model, warm_file: Path, folder: Path) -> tuple[Trained, Library]:
    """The trained file, checked against the model, and its library."""
    from research.warmstart.summaries import Library
    from research.warmstart.trained import Trained

    with concerning(path="warm_file"):
        trained = Trained.load(warm_file, model)
    return trained, Library(folder, trained)


for _one in (prompts, train, guard, evaluate, build, entries, chat):
    main.add_command(_one)


if __name__ == "__main__":
    main()
