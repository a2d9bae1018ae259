"""--warm-start of chat and server: from flags to a WarmStart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runtime import options
from runtime.warmstart import MAX_KL, MODES, THRESHOLD

if TYPE_CHECKING:
    from runtime.warmstart.planting import Planting
    from runtime.warmstart.start import WarmStart
    from subkv.engine.llama import Llama

warm_options = options.stack(
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


@contextlib.contextmanager
def planted(given: dict[str, Any]) -> Iterator[Planting | None]:
    """What the model's context has to be made with; None with --warm-start off. Open the model inside the block."""
    if given["warm_start"] == "off":
        yield None
        return
    missing = [flag for flag in ("--warm-file", "--warm-library") if not given[flag[2:].replace("-", "_")]]
    if missing:
        raise click.UsageError(f"--warm-start: expected {' and '.join(missing)} beside it, found none")
    from runtime.warmstart.planting import Planting

    planting = Planting()
    try:
        yield planting
    finally:
        planting.close()


@contextlib.contextmanager
def started(given: dict[str, Any], llm: Llama, planting: Planting | None) -> Iterator[WarmStart | None]:
    """Warm starts of a model opened inside planting.attach(). Raises WarmStartError and SubkvError."""
    if planting is None:
        yield None
        return
    from runtime.warmstart.library import Library
    from runtime.warmstart.start import WarmStart
    from runtime.warmstart.trained import Trained

    trained = Trained.load(Path(given["warm_file"]), Path(llm.model_path))
    library = Library(
        given["warm_library"], trained.identity, trained.digest, trained.centre, embedding=trained.embedding
    )
    with WarmStart(
        llm,
        planting,
        trained,
        library,
        mode=given["warm_start"],
        threshold=given["warm_threshold"],
        max_kl=given["warm_kl"],
    ) as warm:
        options.note(
            f"warm start (experimental): {len(library.entries())} prompts in {library.folder.path}; first tokens may "
            "come from a similar prompt, and cannot be taken back"
        )
        yield warm
