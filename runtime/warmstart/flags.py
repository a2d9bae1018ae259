"""--warm-start of the chat: from flags to what its conversation asks for first tokens."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runtime import options
from runtime.warmstart import MAX_KL, MODES, THRESHOLD
from subkv.base.command import group

if TYPE_CHECKING:
    from runtime.warmstart.start import WarmStart
    from subkv.engine.llama import Llama


@dataclasses.dataclass(frozen=True)
class WarmOptions:
    """The flags; fields are named as they are."""

    warm_start: str = "off"
    warm_file: str | None = None
    warm_library: str | None = None
    warm_threshold: float = THRESHOLD
    warm_kl: float = MAX_KL

    @contextlib.contextmanager
    def opened(
        self, open_llm: Callable[[], contextlib.AbstractContextManager[Llama]]
    ) -> Iterator[tuple[Llama, Begin | None]]:
        """The model that open_llm opens, made so that answers may begin warm; None with --warm-start off.

        Raises UsageError, WarmStartError and SubkvError.
        """
        if self.warm_start == "off":
            with open_llm() as llm:
                yield llm, None
            return
        needed = {"--warm-file": self.warm_file, "--warm-library": self.warm_library}
        missing = [flag for flag, given in needed.items() if not given]
        if missing:
            raise click.UsageError(f"--warm-start: expected {' and '.join(missing)} beside it, found none")
        assert self.warm_file and self.warm_library
        from runtime.warmstart.library import Library
        from runtime.warmstart.planting import Planting
        from runtime.warmstart.start import WarmStart
        from runtime.warmstart.trained import Trained

        with contextlib.closing(Planting()) as planting:
            with planting.attach():
                opening = open_llm()
            with opening as llm:
                trained = Trained.load(Path(self.warm_file), Path(llm.model_path))
                library = Library(
                    Path(self.warm_library),
                    trained.identity,
                    trained.digest,
                    trained.centre,
                    embedding=trained.embedding,
                )
                start = WarmStart(llm, planting, trained, library, self.warm_start, self.warm_threshold, self.warm_kl)
                with start:
                    options.note(
                        f"warm start (experimental): {len(library.entries())} prompts in {library.folder.path}; first "
                        "tokens may come from a similar prompt, and cannot be taken back"
                    )
                    yield llm, Begin(start)


class Begin:
    """The first tokens of a WarmStart, as runtime.chat.conversation asks for them (Opening)."""

    n_cells = 0

    def __init__(self, start: WarmStart) -> None:
        self.start = start
        self._n_first = 0

    def begin(self, prompt: list[int], n_held: int, sampler: Any) -> Iterator[int]:
        self._n_first = 0
        decision = self.start.begin(prompt, n_held)
        if decision.warm:
            self.n_cells = decision.n_cells
            for token in self.start.head(prompt, sampler):
                self._n_first += 1
                yield token

    def reading(self, prompt: list[int]) -> contextlib.AbstractContextManager[None]:
        return self.start.remembering(prompt)

    def told(self) -> tuple[str, list[str]]:
        decision, mark, others = self.start.decision, "", []
        assert decision is not None
        if decision.warm:
            head = "first token" if self._n_first == 1 else f"first {self._n_first} tokens"
            mark = f"warm start: {decision.similarity:.2f} similar, {head}"
        elif decision.cause != "prefix":
            others.append(f"warm start: cold; {decision.reason}")
        if self.start.problem:
            others.append(f"warm start: {self.start.problem}")
        return mark, others


warm_options = group(
    "warm",
    WarmOptions,
    click.option(
        "--warm-start",
        type=click.Choice(MODES),
        default="off",
        envvar="LLAMA_ARG_WARM_START",
        help="experimental: begin answers from the summary of a similar prompt; auto: if they are predicted to agree",
    ),
    click.option(
        "--warm-file",
        default=None,
        envvar="LLAMA_ARG_WARM_FILE",
        metavar="FILE",
        help="what converter.warmstart trained for -m",
    ),
    click.option(
        "--warm-library",
        default=None,
        envvar="LLAMA_ARG_WARM_LIBRARY",
        metavar="FOLDER",
        help="summaries of earlier prompts, read and written",
    ),
    click.option(
        "--warm-threshold",
        type=click.FloatRange(-1, 1),
        default=THRESHOLD,
        envvar="LLAMA_ARG_WARM_THRESHOLD",
        help="least cosine of two prompts",
    ),
    click.option(
        "--warm-kl",
        type=click.FloatRange(min=0),
        default=MAX_KL,
        envvar="LLAMA_ARG_WARM_KL",
        help="auto: most nats predicted between warm and cold",
    ),
)
