"""The table of converter.evaluate, with other projects' codecs and eviction policies beside our rows.

    python -m research.evaluate -m M.gguf --bases calib.safetensors -f TEXT --kv-bits 4.25 --codecs kvarn:4/2,kivi:2
    python -m research.evaluate -m M.gguf --bases calib.safetensors -f TEXT --kv-bits 4,5 --evictions h2o:25,h2o:75@5

--codecs adds codecs (research/rivals), each with its own window and with ours. --evictions adds policies that keep a
share of the tokens (research/evictions), in f16 or in our cells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from converter.corpus import INTERRUPTED
from converter.evaluate import evaluate_options, run
from subkv.base.command import command
from subkv.base.errors import SubkvError

if TYPE_CHECKING:
    from converter.caches import Cache
    from research.evictions.keeping import Spec as Eviction
    from research.rivals.registry import Spec
    from subkv.native.gguf import Gguf
    from subkv.plan.pipeline import Fit


def _codecs(context: click.Context, parameter: click.Parameter, text: str) -> list[Spec]:
    if not text:
        return []
    from research.rivals import registry  # numpy: not for a --help

    try:
        return [registry.parse(part) for part in text.split(",")]
    except SubkvError as error:
        raise click.BadParameter(error.reason) from error


def _evictions(context: click.Context, parameter: click.Parameter, text: str) -> list[Eviction]:
    if not text:
        return []
    from research.evictions import keeping  # numpy: not for a --help

    try:
        return [keeping.parse(part) for part in text.split(",")]
    except SubkvError as error:
        raise click.BadParameter(error.reason) from error


@command("evaluate", interrupted=INTERRUPTED)
@evaluate_options
@click.option("--codecs", default="", callback=_codecs, help="Other projects' codecs: exl3:4,kvarn:4/2,kivi:2…")
@click.option(
    "--evictions", default="", callback=_evictions, help="Policies and the percentage they keep: h2o:25,snapkv:50@5…"
)
def main(codecs: list[Spec], evictions: list[Eviction], **arguments: Any) -> None:
    """KLD of layouts, of llama.cpp's cache types, and of other projects' codecs and policies, in float32."""

    def others(fit: Fit, base: Gguf, sides: str, n_ctx: int) -> list[Cache]:
        from research.compared import evicting_caches, rival_caches  # numpy: not for a --help

        found = rival_caches(codecs, fit, base, sides) if codecs else []
        return [*found, *evicting_caches(evictions, fit, n_ctx)]

    run(**arguments, others=others if codecs or evictions else None)


if __name__ == "__main__":
    main()
