"""`convert`: the command line of conversion.py. Also `python -m converter.cli` and `python -m converter`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from converter import hf, tables
from converter.corpus import PATH, Corpus, corpus_options, yes_option
from converter.quantize import TYPES
from subkv.base.command import Command, command, group, sentence, show
from subkv.base.errors import SubkvError
from subkv.base.files import check_new, check_not_input
from subkv.base.hub import hf_option, requested_model
from subkv.format.window import AS_FILE, MAX_RECENT, MAX_SINK, N_RECENT, N_SINK, RECENT_BITS, Window
from subkv.native.bases import MAX_BUDGET
from subkv.plan.methods import BASES_K, BASES_V, GAMMAS

if TYPE_CHECKING:
    from converter.conversion import Conversion, Converted
    from subkv.plan.pipeline import Options

MAX_PLANS = 16  # FORMAT.md §3.3


def options_from_flags(
    n_sink: int, n_recent: int, recent_bits: int | None, adapt: str | None = None, **methods: Any
) -> Options:
    """Options from the flags of `convert`. methods: fields of Options. Raises SubkvError or click.UsageError."""
    from subkv.plan.pipeline import Options  # numpy and the native libraries are not needed for a --help

    window = Window(n_sink, n_recent, recent_bits=AS_FILE if recent_bits is None else recent_bits, adapt=adapt)
    options = Options(window=window, **methods)
    if options.codec == "int8" and options.kv_bits is not None:
        raise click.UsageError("--kv-bits: codec int8 has 8 bits per coefficient; choose --rank-k and --rank-v instead")
    if options.bpe_context is not None and options.bpe_context < 1:
        raise click.UsageError(f"--bpe-context: expected at least 1, found {options.bpe_context}")
    window.check_adapt()
    return options


def budgets(text: str | None) -> tuple[float, ...] | None:
    """The value of --plans, or None for the default. Raises click.UsageError."""
    if text in (None, "none"):
        return None if text is None else ()
    try:
        values = tuple(float(item) for item in str(text).split(","))
    except ValueError:
        values = ()
    if not values or not all(0.0 < value <= MAX_BUDGET for value in values) or len(values) > MAX_PLANS:
        raise click.UsageError(
            f"--plans: expected none, or at most {MAX_PLANS} numbers of bits separated by commas, found {text!r}"
        )
    return values


recent_bits_option = click.option(
    "--recent-bits",
    type=click.Choice([str(RECENT_BITS), "16"]),
    callback=lambda _context, _option, value: value and int(value),
    help="bits per element of the last positions; 16: f16 [default: 10; 16 for budgets of 6.5 or more]",
)


class Rank(click.ParamType):  # type: ignore[type-arg]
    """A number of coefficients, which is checked before a calibration starts."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        n = int(click.INT.convert(value, param, ctx))
        if n < 8 or n % 8:
            self.fail(f"expected a positive multiple of 8, found {n}", param, ctx)
        return n


plan_options = group(
    "options",
    options_from_flags,
    click.option("--kv-bits", type=float, help="bits per K/V element, everything counted [default: as good as q8_0]"),
    click.option(
        "--plans",
        metavar="BITS,…",
        callback=lambda _context, _option, value: budgets(value),
        help="further budgets, for programs' --kv-bits; none [default: 2.5, 3, 3.5, 4.25, 6.5, as good as q8_0]",
    ),
    click.option("--codec", type=click.Choice(["banded", "int8"]), default="banded", help="bits by budget, or 8 each"),
    click.option("--rank-k", type=Rank(), help="maximum K coefficients per head [default: the head size]"),
    click.option("--rank-v", type=Rank(), help="maximum V coefficients per head [default: the head size]"),
    click.option(
        "--basis-k",
        type=click.Choice(BASES_K),
        help=f"bases of keys [default: {BASES_K[2]} with sensitivities, else {BASES_K[1]}]",
    ),
    click.option(
        "--basis-v",
        type=click.Choice(BASES_V),
        help=f"bases of values [default: {BASES_V[2]} with sensitivities, else {BASES_V[1]}]",
    ),
    click.option("--gamma", type=click.Choice(GAMMAS), default="calibrated", help="source of each head's logit factor"),
    click.option("--center-k/--no-center-k", default=True, help="subtract the keys' mean; needs --n-sink"),
    click.option("--n-sink", type=click.IntRange(0, MAX_SINK), default=N_SINK, help="first positions kept exact"),
    click.option("--n-recent", type=click.IntRange(0, MAX_RECENT), default=N_RECENT, help="last positions kept exact"),
    recent_bits_option,
    click.option("--bpe-context", type=int, help="context of the bit count [default: trained context, at most 8192]"),
    click.option(
        "--adapt",
        metavar="SIDES[,NAME=VALUE…]",
        help="adaptive bases by default for k, v or kv: v or v,length=512 [default: none]",
    ),
)


PICTURES = frozenset({".gif", ".jpeg", ".jpg", ".pdf", ".png", ".ps", ".svg", ".tif", ".tiff", ".webp"})


class Convert(Command):
    """ImageMagick has a program of the same name. A line that names pictures was meant for it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        picture = next((word for word in args if Path(word.lower()).suffix in PICTURES), None)
        if picture is not None:
            raise click.UsageError(
                f"{picture}: expected a GGUF model, found a picture; this is `subkv convert`, which is before "
                "ImageMagick's `convert` on the PATH: call that one by its path, or as `magick`"
            )
        return super().parse_args(ctx, args)


@command("convert", cls=Convert, interrupted="interrupted: no bases were written")
@click.argument("model", type=PATH, required=False)
@hf_option
@click.option("--bases", type=PATH, metavar="FILE", help="calibration (calib.safetensors) to use, instead of a new one")
@corpus_options(
    "UTF-8 text to calibrate on; may be repeated [default: built-in texts]",
    "maximum chunks, distributed over the texts [default: all; of the built-in texts 8 or more]",
    required=False,
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0),
    help="time limit for sensitivities; 0: none; a later run with a larger limit resumes [default: no limit]",
)
@click.option(
    "--outtype", type=click.Choice(list(hf.OUTTYPES)), help="weights of a folder's GGUF [default: auto, 16 bits]"
)
@click.option(
    "--quantize",
    type=click.Choice(TYPES, case_sensitive=False),
    metavar="TYPE",
    help=f"quantize a folder's weights with llama.cpp: {', '.join(TYPES)}",
)
@click.option(
    "-o",
    "--output",
    type=PATH,
    metavar="FILE",
    help="copy of the model to write, with bases; with --sidecar only the bases",
)
@click.option("--embed", is_flag=True, help="write the copy as MODEL.subkv.gguf; the default with --bases")
@click.option("--sidecar", is_flag=True, help="write the sidecar beside the model: MODEL.subkv-sidecar.gguf")
@yes_option
@plan_options
@click.option("--dry-run", is_flag=True, help="report size and quality; write no bases")
@click.option("-v", "--verbose", is_flag=True, help="all layers")
def main(
    model: Path | None,
    hf_repo: str | None,
    bases: Path | None,
    corpus: Corpus,
    minutes: float | None,
    outtype: str | None,
    quantize: str | None,
    output: Path | None,
    embed: bool,
    sidecar: bool,
    yes: bool,
    options: Options,
    dry_run: bool,
    verbose: bool,
) -> None:
    """Prepare MODEL for a cache of coefficients: calibrate, plan, and store the bases where all programs find them.

    With -o, --embed or --bases they are written into the metadata of a copy of MODEL, whose weights stay
    byte-identical.

    MODEL is a GGUF, its name on the Hugging Face hub (-hf) or, with the extra torch, a Hugging Face folder, which is
    converted to a GGUF first.
    """
    from converter.conversion import Conversion  # numpy and the native libraries are not needed for a --help
    from converter.request import CalibrationRequest

    is_file = sidecar or embed or bases is not None
    refuse_contradictions(corpus, bases, minutes, sidecar and embed, bool(hf_repo) and output is None and is_file)
    named = f"-hf {hf_repo}" if hf_repo else f"-m {shlex.quote(str(model))}"
    model = requested_model(model, hf_repo)
    if model is None:
        raise click.UsageError("expected MODEL or -hf USER/MODEL, found neither")
    if sidecar and model.is_dir():
        raise SubkvError("sidecar", f"expected a GGUF as MODEL for a sidecar, found {model}")
    target = output
    if output is None and (is_file or model.is_dir()):
        target = default_output(model, sidecar, quantize)
    if target is not None:
        check_not_input(target, [("the model", model), *([("--bases", bases)] if bases else [])])
        check_new(target, yes or dry_run)
    request = CalibrationRequest(corpus, options.window.n_sink, options.window.n_recent, minutes)
    conversion = Conversion(model, bases, request, options, target, sidecar, outtype, quantize, dry_run)
    report(conversion, conversion.run(), verbose)
    if dry_run:
        stored = "" if bases is not None else "; the calibration is kept for the next run"
        show(f"dry run: no bases were written{stored}")
    elif target is None:
        show(f"programs find it for {model} automatically: subkv chat {named}")


def refuse_contradictions(
    corpus: Corpus, bases: Path | None, minutes: float | None, both_files: bool, nameless: bool
) -> None:
    """Refuse flags that exclude each other. nameless: a file of a model from the hub, without -o."""
    if bases is not None and corpus.files:
        raise click.UsageError("expected --bases with a calibration or -f with text to calibrate on, found both")
    if bases is not None and minutes is not None:
        raise click.UsageError("expected --bases with a calibration or --minutes for sensitivities, found both")
    if both_files:
        raise click.UsageError("expected --sidecar or --embed, found both")
    if nameless:
        raise click.UsageError("-hf: expected -o FILE with --sidecar, --embed or --bases, found none")


def report(conversion: Conversion, done: Converted, verbose: bool) -> None:
    """Print the layout, its cost against other caches, the further budgets and the notes of a conversion."""
    from subkv.engine.cache import coded_by
    from subkv.engine.memory import available_memory, simulated_cache

    result, path = done.result, done.path
    for line in tables.layout(result, verbose):
        show(line)
    cost, n_ctx = tables.Cost.of_result(result), result.counted.context
    of_weights = path if conversion.copies else conversion.model
    if len(result.layers) < done.n_layer and not conversion.dry_run and not of_weights.is_dir():
        cost = cost.beside(simulated_cache(of_weights, coded_by(path), n_ctx))
    for line in tables.sentences(cost, n_ctx, result.compared, done.n_bytes, available_memory(), done.n_ctx_train):
        show(line)
    if result.plans is not None:
        plans = {plan.budget: plan.predicted for plan in result.plans.plans}
        for line in tables.budgets(result.plans.budget, plans, result.predicted):
            show(line)
    for note in result.notes:
        key = "files" if note.key == "calibration" and conversion.bases is None else note.key
        show(sentence(SubkvError(key, note.reason)), err=True)
    if not conversion.dry_run:
        show(f"wrote {path}")


def default_output(model: Path, sidecar: bool = False, quantize: str | None = None) -> Path:
    """M.subkv.gguf or M.subkv-sidecar.gguf for M.gguf, M-00001-of-00002.gguf or a folder M."""
    if model.is_dir():
        folder = model.resolve()
        return folder.with_name(f"{folder.name}{f'-{quantize}' if quantize else ''}.subkv.gguf")
    from subkv.native.bases import SIDECAR_ENDING, sidecar_path  # not needed for a --help

    path = sidecar_path(model)
    return path if sidecar else path.with_name(f"{path.name.removesuffix(SIDECAR_ENDING)}.subkv.gguf")


if __name__ == "__main__":
    main()
