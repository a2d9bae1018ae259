"""What drafts gain: tokens per second with them and without, caches and drafts taking turns in one process.

python -m research.speculation -m model.gguf --bases bases.gguf -f code.py
python -m research.speculation -m model.gguf --bases bases.gguf -f code.py -md small.gguf

Two tasks: `copy` writes the text that the context holds once more, as an edited file does; `go on` continues it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runtime import options
from subkv.base.command import command
from subkv.base.errors import SubkvError

if TYPE_CHECKING:
    from llama_cpp.llama_speculative import LlamaDraftModel

    from subkv.engine.llama import Llama

AGAIN = "\n\n# the same file once more\n\n"
N_FIRST = 2  # tokens that are not timed: the prompt's, and the one before which a draft model reads the prompt
N_BEGUN = 64  # tokens of the copy that are given


@dataclass
class Measured:
    """One task of one cache with one kind of drafts; seconds of every repetition."""

    cache: str
    task: str
    draft: str
    n_depth: int
    n_gen: int
    n_drafted: int = 0
    n_accepted: int = 0
    answer: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def row(self, plain: Measured) -> dict[str, Any]:
        """For -o json; plain: the same without drafts. accepted_share: of what was drafted, null: nothing was."""
        speeds = [(self.n_gen - N_FIRST) / seconds for seconds in self.seconds]
        named = {key: getattr(self, key) for key in ("cache", "task", "draft", "n_depth", "n_gen")}
        return named | {
            "n_drafted": self.n_drafted,
            "n_accepted": self.n_accepted,
            "accepted_share": self.n_accepted / self.n_drafted if self.n_drafted else None,
            "same_answer": self.answer == plain.answer,
            "median_ts": statistics.median(speeds),
            "stddev_ts": statistics.stdev(speeds) if len(speeds) > 1 else 0.0,
            "samples_ts": speeds,
        }


def generate(llm: Llama, prompt: Sequence[int], n_gen: int) -> tuple[list[int], float]:
    """A greedy answer, and the seconds of its tokens after the first ones."""
    stream = llm.generate(prompt, temp=0.0)
    answer = list(itertools.islice(stream, N_FIRST))
    start = time.perf_counter()
    answer += itertools.islice(stream, n_gen - N_FIRST)
    return answer, time.perf_counter() - start


def measure(
    models: dict[str, Llama],
    drafts: dict[str, LlamaDraftModel | None],
    text: Sequence[int],
    again: Sequence[int],
    n_gen: int,
    n_rep: int,
) -> list[Measured]:
    """All caches, tasks and drafts; they take turns inside every repetition."""
    tasks = {"copy": [*text, *again, *text[:N_BEGUN]], "go on": [*text]}
    done: list[Measured] = []
    for task, prompt in tasks.items():
        states = {}
        for name, llm in models.items():
            llm.reset()
            llm.eval(prompt)
            states[name] = llm.save_state()
        runs = [Measured(cache, task, draft, len(prompt), n_gen) for cache in models for draft in drafts]
        for repetition in range(n_rep):
            shift = repetition % len(runs)  # nobody always comes first
            for run in runs[shift:] + runs[:shift]:
                llm = models[run.cache]
                llm.draft_model = drafts[run.draft]
                llm.load_state(states[run.cache])
                run.answer, seconds = generate(llm, prompt, n_gen)
                run.seconds.append(seconds)
                stats = llm.draft_stats()
                run.n_drafted, run.n_accepted = stats.n_drafted, stats.n_accepted
                llm.draft_model = None  # free for the next one
        done += runs
    return done


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = ["| task | cache | drafts | right | tokens/s | same answer |", "|---|---|---|---:|---:|---|"]
    for row in rows:
        share = "" if row["accepted_share"] is None else f"{row['n_accepted']} of {row['n_drafted']}"
        speed = f"{row['median_ts']:.1f} ± {row['stddev_ts']:.1f}"
        same = "yes" if row["same_answer"] else "no"
        lines.append(f"| {row['task']} | {row['cache']} | {row['draft']} | {share} | {speed} | {same} |")
    return "\n".join(lines)


@command()
@options.model_option(required=True)
@click.option("-f", "--file", "text_file", required=True, type=options.PATH, help="the text that the context holds")
@click.option("-ctk", "--cache-type-k", "caches", type=options.ListOf(), default="f16,subkv", help="KV caches")
@click.option("--bases", type=options.PATH, metavar="FILE", help="bases for -m: a sidecar or a converted model")
@click.option("-d", "--n-depth", type=click.IntRange(min=64), default=2000, help="tokens of the text in the context")
@click.option("-n", "--n-gen", type=click.IntRange(min=N_FIRST + 1), default=128, help="tokens of an answer")
@click.option("-r", "--repetitions", type=click.IntRange(min=1), default=3)
@click.option("--lookup", "lookups", type=options.NUMBERS, default="10,48", help="lengths of drafts from the text")
@click.option("--ngram", type=click.IntRange(min=1), default=3, help="tokens that must repeat for them")
@click.option("-md", "--spec-draft-model", "draft_model", type=options.PATH, metavar="FILE", help="a model that drafts")
@click.option("--spec-draft-n-max", "n_draft", type=click.IntRange(min=1), default=3, help="its drafts' length")
@options.threads_option
@options.form_option("md", "json")
def main(
    model: str,
    text_file: Path,
    caches: list[str],
    bases: Path | None,
    n_depth: int,
    n_gen: int,
    repetitions: int,
    lookups: list[int],
    ngram: int,
    draft_model: Path | None,
    n_draft: int,
    n_threads: int | None,
    form: str,
) -> None:
    """Measure what drafts gain on different KV caches."""
    # numpy and the native libraries: not for a --help
    from research.drafts import DraftModel, PromptLookup
    from subkv.base.threads import default_threads
    from subkv.engine.llama import Llama
    from subkv.format.window import N_ROLLBACK

    drafts: dict[str, LlamaDraftModel | None] = {"none": None}
    drafts |= {f"lookup {n}": PromptLookup(ngram, n) for n in lookups}
    longest = max([*lookups, n_draft if draft_model is not None else 0])
    threads = default_threads(n_threads)
    try:
        source = text_file.read_bytes()
    except OSError as error:
        raise SubkvError("text_file", f"cannot read {text_file}: {error.strerror}") from error
    with contextlib.ExitStack() as cleanup:
        models: dict[str, Llama] = {}
        for name in caches:
            coded: dict[str, Any] = {"bases": bases, "n_rollback": max(longest, N_ROLLBACK)} if name == "subkv" else {}
            llm = Llama(
                model,
                kv_cache=name,
                n_ctx=n_depth + n_gen + longest + 256,
                n_threads=threads,
                n_threads_batch=threads,
                verbose=False,
                **coded,
            )
            models[name] = cleanup.enter_context(llm)
        first = next(iter(models.values()))
        text = first.tokenize(source)[:n_depth]
        if len(text) < n_depth:
            raise SubkvError("text_file", f"expected at least {n_depth} tokens (-d), found {len(text)} in {text_file}")
        again = first.tokenize(AGAIN.encode(), add_bos=False)
        if draft_model is not None:
            small = DraftModel(first, draft_model, n_draft)
            drafts[f"model {n_draft}"] = cleanup.enter_context(contextlib.closing(small))
        done = measure(models, drafts, text, again, n_gen, repetitions)
    plain = {(run.cache, run.task): run for run in done if run.draft == "none"}
    rows = [run.row(plain[run.cache, run.task]) for run in done]
    click.echo(json.dumps(rows, indent=1) if form == "json" else markdown(rows))


if __name__ == "__main__":
    main()
