"""`python -m converter.calibrate`: runs a GGUF on text and writes its statistics (statistics_stage.py) to a file."""

from __future__ import annotations

from pathlib import Path

import click

from converter.corpus import HELD_OUT, INTERRUPTED, PATH, Corpus, corpus_options, model_option, yes_option
from subkv.base.command import command, show
from subkv.base.errors import concerning
from subkv.base.files import check_new, check_not_input, check_writable
from subkv.format.window import MAX_SINK, N_SINK


@command("calibrate", interrupted=INTERRUPTED)
@model_option()
@corpus_options()
@click.option(
    "-o", "--output", required=True, type=PATH, metavar="FILE", help="calibration to write (calib.safetensors)"
)
@yes_option
@click.option("--in-file", type=PATH, metavar="FILE", help="earlier calibration of the same model to add to")
@click.option(
    "--n-sink", default=N_SINK, type=click.IntRange(0, MAX_SINK), help="first positions of a chunk to leave out"
)
@click.option("--held-out", default=HELD_OUT, type=click.IntRange(0), help="hold out every N-th chunk, 0: none")
def main(
    model: Path, corpus: Corpus, output: Path, yes: bool, in_file: Path | None, n_sink: int, held_out: int
) -> None:
    """Collect the statistics of a model on text, for `subkv convert --bases`."""
    # numpy and the native libraries are not needed for a --help
    from converter.source import Source
    from converter.statistics_stage import collect_statistics
    from subkv.format.calibration import read_calibration, write_calibration

    texts = corpus.read()
    with concerning(calibration="in_file"):
        earlier = read_calibration(in_file) if in_file else None
    check_writable(output)
    check_not_input(output, (("-m", model), *(("-f", path) for path in corpus.files)))
    check_new(output, yes or output == in_file)
    with concerning(earlier="in_file"), Source(model) as source:
        result, notes = collect_statistics(source, corpus, texts, n_sink, held_out, earlier)
    write_calibration(output, result)
    for note in notes:
        show(note, err=True)
    show(f"wrote {output}: {len(result.layers)} layers, {result.tokens} tokens")


if __name__ == "__main__":
    main()
