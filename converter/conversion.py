"""`convert` in one direction. Each stage takes the result of the stage before it:

    MODEL ─▶ Source ─▶ statistics ─▶ sensitivities ─▶ plan ─▶ file

1. hf.py converts a Hugging Face folder to a GGUF. source.py opens the GGUF, once for all stages.
2. statistics_stage.py runs the model on text and sums the second moments of queries, keys and values. rotation.py
   measures how keys rotate with the position if the metadata do not tell it.
3. sensitivity_stage.py measures the cost of errors in the cache. sensitivity_trials.py makes the trials. Then the
   stage plans a trial layout, measures its cost and corrects the predictions.
4. subkv.plan.pipeline plans: bases, and bits within the budget.
5. subkv.native.gguf writes a copy of the model or a sidecar.

Stages 2 and 3 share the loaded weights, which are freed before stage 4. stored_calibration.py keeps their results in
the store and resumes them. With --bases both stages are left out.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from converter import hf
from converter.request import CalibrationRequest
from converter.source import Source
from converter.stored_calibration import calibrated
from subkv.base.command import show
from subkv.base.errors import CacheError, SubkvError
from subkv.base.files import check_not_input, check_writable
from subkv.format import metadata
from subkv.format.calibration import read_calibration
from subkv.format.layout import Layout
from subkv.format.metadata import Account
from subkv.format.window import RECENT_BITS
from subkv.native.gguf import SHA256_KEY, Gguf, write_copy, write_sidecar
from subkv.plan import budget, mla, pipeline
from subkv.plan.pipeline import Options, Result, check_plain, check_plans


@dataclass(frozen=True)
class Converted:
    """The outputs of a conversion: path is the file with the bases, n_bytes the size of the model's weights. n_layer
    and n_ctx_train are the model's, or 0 if unknown.
    """

    result: Result
    path: Path
    n_bytes: int
    n_layer: int
    n_ctx_train: int


@dataclass(frozen=True)
class Conversion:
    """The inputs of one conversion.

    model is a GGUF or a Hugging Face folder. bases is a calibration; without one, `request` says how to calibrate.
    Without output the model's sidecar in the store is written; sidecar leaves the weights out. outtype and quantize
    are for a folder's weights, which are by default of the type auto and not quantized. dry_run writes only the
    calibration.
    """

    model: Path
    bases: Path | None
    request: CalibrationRequest
    options: Options
    output: Path | None
    sidecar: bool
    outtype: str | None = None
    quantize: str | None = None
    dry_run: bool = False

    @property
    def copies(self) -> bool:
        """Whether a copy of the GGUF will be written."""
        return self.output is not None and not self.sidecar and not self.dry_run

    def run(self) -> Converted:
        """Convert. Raises SubkvError.

        For a folder, every step is logged to stderr, and its GGUF is removed at the end.
        """
        if self.output is not None and self.bases is None:
            check_not_input(self.output, (("-f", path) for path in self.request.corpus.files))
            check_writable(self.output)
        with contextlib.ExitStack() as opened:
            announce = self._steps()
            path = self._folder_as_gguf(opened, announce) if self.model.is_dir() else self._checked_gguf()
            source = opened.enter_context(Source(path))
            self._check(source)  # errors are reported before the long run
            bases = self.bases or opened.enter_context(calibrated(source, self.request))
            announce("bases and layout")
            output = self.output or source.entry.sidecar
            sidecar = self.sidecar or self.output is None
            result = convert_source(source, bases, None if self.dry_run else output, self.options, sidecar)
            return Converted(result, output, source.n_bytes, source.n_layer or 0, source.n_ctx_train or 0)

    def _steps(self) -> Callable[[str], None]:
        """A function that logs the steps of a folder with their numbers. For a GGUF it does nothing."""
        if not self.model.is_dir():
            return lambda step: None
        done, total = itertools.count(1), 2 + (self.quantize is not None) + (self.bases is None)
        return lambda step: show(f"step {next(done)} of {total}: {step}", err=True)

    def _checked_gguf(self) -> Path:
        for name in ("outtype", "quantize"):
            if getattr(self, name) is not None:
                raise SubkvError(name, f"expected a Hugging Face folder as MODEL, found {self.model}")
        return self.model

    def _folder_as_gguf(self, opened: contextlib.ExitStack, announce: Callable[[str], None]) -> Path:
        """Convert the folder to a GGUF in a temporary folder beside the output, which `opened` removes."""
        assert self.output is not None  # the command line sets it, because bases need a GGUF
        texts, outtype = self.request.texts(), self.outtype or "auto"
        check_writable(self.output)
        hf.check(self.model, outtype, self.quantize, self.output, self.copies)
        temporary = tempfile.TemporaryDirectory(prefix=f".{self.output.name}.", suffix=".tmp", dir=self.output.parent)
        work = Path(opened.enter_context(temporary))
        path = hf.convert(self.model, outtype, self.quantize, self.request.corpus.n_threads, work, announce)
        if self.bases is None:
            names = ", ".join(text.source.name for text in texts) if texts else "built-in texts"
            announce(f"calibrate on {names}")
        return path

    def _check(self, source: Source) -> None:
        check_plain(source.gguf)
        check_plans(source.gguf, self.options)
        with contextlib.suppress(CacheError):  # a model whose layers only a run of it shows
            _check_budget(source.gguf, self.options)
        if self.copies and len(source.files) > 1:
            raise SubkvError(
                "model",
                f"expected one file to copy, found a model split into {len(source.files)}; "
                "without --embed or with --sidecar only its bases are written",
            )


def _check_budget(base: Gguf, options: Options) -> None:
    """Reject a budget that no calibration of this model makes possible. Raises SubkvError."""
    if options.kv_bits is None or options.codec == "int8" or mla.is_latent(base):
        return
    options.window.with_defaults().check()
    context = options.bpe_context or pipeline.default_context(base)
    with Layout(base.path, derived=True) as layout:
        layers = layout.description["layers"]
    sizes = [layer[side] for layer in layers for side in ("d_k", "d_v") for _ in range(layer["n_head_kv"])]

    def limits(recent: int, in_bytes: bool) -> tuple[Account, Account]:
        bits = [budget.coefficient_bits(d, encode_in_bytes=in_bytes, decode_in_bytes=in_bytes) for d in sizes]
        heads = [budget.Head(d, np.ones(d), basis_bits=n) for d, n in zip(sizes, bits, strict=True)]
        window = options.window.with_defaults(recent_bits=recent)
        return budget.budget_range(heads, budget.Overhead(context, window))

    budget.check_range(options.kv_bits, limits(RECENT_BITS, in_bytes=True)[0], limits(16, in_bytes=False)[1])


def convert_file(model: Path, bases: Path, output: Path | None, options: Options, sidecar: bool = False) -> Result:
    """convert_source() of a GGUF."""
    with Source(model) as source:
        return convert_source(source, bases, output, options, sidecar)


def convert_source(source: Source, bases: Path, output: Path | None, options: Options, sidecar: bool) -> Result:
    """Plan with the calibration `bases`, and write the output; None: only plan. Raises SubkvError, and then writes no
    file."""
    calibration = read_calibration(bases)
    if output is not None:
        check_not_input(output, [*(("the model", file) for file in source.files), ("--bases", bases)])
        check_writable(output)
    result = pipeline.convert(source.gguf, calibration, options, progress=True)
    if output is not None:
        values = metadata.keys(
            result.layers, calibration, result.settings, result.counted, result.compared, result.plans
        )
        if sidecar:  # a copy is hashed as it is written
            values[SHA256_KEY] = ("str", source.sha256)
        (write_sidecar if sidecar else write_copy)(source.gguf, output, values, progress=True)
    return result
