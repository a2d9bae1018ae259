"""--warm-start of the chat: from flags to answers that may begin warm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from runtime import options
from runtime.warmstart import MAX_KL, MODES, THRESHOLD
from subkv.base.command import group
from subkv.base.errors import concerning

if TYPE_CHECKING:
    from runtime.warmstart.start import WarmStart
    from subkv.engine.llama import Llama


@dataclass(frozen=True)
class WarmOptions:
    """The flags, under their names."""

    warm_start: str
    warm_file: Path | None
    warm_library: Path | None
    warm_threshold: float
    warm_kl: float

    @contextlib.contextmanager
    def opened(self, open_llm: Callable[[], AbstractContextManager[Llama]]) -> Iterator[tuple[Llama, WarmStart | None]]:
        """The model that open_llm() opens, made so that answers may begin warm; None with --warm-start off.

        Raises click.UsageError for flags that miss each other, SubkvError for files that cannot be used.
        """
        if self.warm_start == "off":
            with open_llm() as llm:
                yield llm, None
            return
        if self.warm_file is None or self.warm_library is None:
            given = {"--warm-file": self.warm_file, "--warm-library": self.warm_library}
            missing = " and ".join(flag for flag, path in given.items() if path is None)
            raise click.UsageError(f"--warm-start: expected {missing} beside it, found none")
        # numpy and the native libraries: not for a --help
        from runtime.warmstart.planting import Planting
        from runtime.warmstart.start import WarmStart
        from runtime.warmstart.summaries import Library
        from runtime.warmstart.trained import Trained

        with contextlib.closing(Planting()) as planting, contextlib.ExitStack() as stack:
            with planting.attach():
                llm = stack.enter_context(open_llm())
            with concerning(path="warm_file", folder="warm_library"):
                trained = Trained.load(self.warm_file, llm.opened)
                library = Library(self.warm_library, trained)
                n_prompts = len(library.entries())
            warm = WarmStart(llm, planting, trained, library, self.warm_start, self.warm_threshold, self.warm_kl)
            options.note(
                f"warm start (experimental): {n_prompts} prompts in {library.folder.path}; first tokens may "
                "come from a similar prompt, and cannot be taken back"
            )
            yield llm, warm


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
        type=click.Path(path_type=Path),
        default=None,
        envvar="LLAMA_ARG_WARM_FILE",
        metavar="FILE",
        help="what runtime.warmstart trained for -m",
    ),
    click.option(
        "--warm-library",
        type=click.Path(path_type=Path),
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
