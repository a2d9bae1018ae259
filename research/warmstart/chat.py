"""The chat with --warm-start: from flags to answers that may begin warm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from research.warmstart import MAX_KL, MODES, THRESHOLD
from runtime import options
from runtime.chat.cli import chat_options, run
from subkv.base.command import command, group
from subkv.base.errors import concerning

if TYPE_CHECKING:
    from research.warmstart.start import WarmStart
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
    def opened(self, open_llm: Callable[[], Llama]) -> Iterator[tuple[Llama, WarmStart]]:
        """The model that open_llm() opens, made so that answers may begin warm.

        Raises click.UsageError for flags that miss each other, SubkvError for files that cannot be used.
        """
        if self.warm_file is None or self.warm_library is None:
            given = {"--warm-file": self.warm_file, "--warm-library": self.warm_library}
            missing = " and ".join(flag for flag, path in given.items() if path is None)
            raise click.UsageError(f"--warm-start: expected {missing} beside it, found none")
        # numpy and the native libraries: not for a --help
        from research.warmstart.planting import Planting
        from research.warmstart.start import WarmStart
        from research.warmstart.summaries import Library
        from research.warmstart.trained import Trained

        with contextlib.closing(Planting()) as planting, contextlib.ExitStack() as stack:
            with planting.attach():
                llm = stack.enter_context(open_llm())
            with concerning(path="warm_file", folder="warm_library"):
                trained = Trained.load(self.warm_file, llm.loaded_model)
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
        help="what research.warmstart trained for -m",
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


@command("chat")
@chat_options
@warm_options
def main(warm: WarmOptions, **arguments: Any) -> None:
    """Chat with a model as `subkv chat` does; answers may begin warm."""
    run(**arguments, open_model=None if warm.warm_start == "off" else warm.opened)
