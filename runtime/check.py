"""`subkv check -m M.gguf`: quality, memory and speed of a model's KV caches on this machine, as a block to paste.

Quality: every cache scores the built-in held-out texts (`evaluate` of converter.scoring), f16 as the base. Speed:
`measure` of runtime.bench. After each text the results are stored in the cache folder, so the same command resumes.
docs/results/models.md describes the block and collects blocks of users.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runtime import bench, demo, options
from runtime.busy import LIMIT, Busy
from subkv.base.command import command
from subkv.base.errors import CacheError, SubkvError, concerning
from subkv.base.files import atomic_file, open_regular
from subkv.base.folders import cache_folder
from subkv.base.text import printable
from subkv.base.threads import default_threads
from subkv.format import store

if TYPE_CHECKING:
    from subkv.engine.cache import CacheChoice
    from subkv.engine.context import ContextOptions
    from subkv.engine.model import Model
    from subkv.engine.stats import KVStats

Save = Callable[[], None]
Saved = dict[str, Any]  # n_ctx: tokens of a text; texts: name → cache → numbers; speed: None, or as measure_speed()
BITS = 4.25
FLOOR = "f16, noise floor"
N_GEN, REPETITIONS, N_BATCH = 4, 5, 32  # of the speeds: small, so that a large model takes a minute
SHORT, LONG = 512, 1024  # tokens of a text
LONG_SECONDS = 20.0  # for a text with all caches; beyond that texts are short, so that more kinds are scored
FILL_SECONDS = 60.0  # to fill the caches, if each cell must be evaluated
SHOWN = 16  # digits of a digest


def chosen(model: Path, bases: Path | None) -> tuple[dict[str, CacheChoice], dict[str, float], list[dict[str, Any]]]:
    """The caches by name, the predicted KLD of some, and the descriptions of the coded ones' layouts.

    Without a plan of BITS that cache is left out, with a note. Raises SubkvError.
    """
    from subkv.engine.cache import CODED, choose_cache, ordinary
    from subkv.engine.request import CacheRequest
    from subkv.format.metadata import predicted_of, read_predicted

    caches = {name: ordinary(name) for name in ("f16", "q8_0", "q4_0")}
    predicted: dict[str, float] = {}
    described: list[dict[str, Any]] = []
    for bits in (None, BITS):
        try:
            with concerning(kv_cache="model", model_path="model"):
                choice = choose_cache(model, CacheRequest(CODED, bases=bases, kv_bits=bits))
        except CacheError as error:
            if bits is None or error.key != "kv_bits":
                raise
            options.note(f"{BITS:g} bits: left out, {error.reason}")
            continue
        assert choice.layout is not None
        described.append(choice.description)
        if bits is not None and described[-1]["fingerprint"] == described[0]["fingerprint"]:
            continue  # the default is this plan
        is_default = math.isclose(choice.budget, choice.budget_default, rel_tol=1e-6)  # not with SUBKV_BITS
        name = f"subkv, {choice.budget:.3g} bits" + (", the default" if is_default else "")
        caches[name] = choice
        if klds := predicted_of(described[-1], read_predicted(choice.layout)):
            predicted = {**klds, **predicted, name: klds["subkv"]}
    return caches, predicted, described


def sizes_of(model: Model, caches: dict[str, CacheChoice], context: ContextOptions) -> dict[str, KVStats]:
    """Sizes of the caches for one sequence. llama.cpp's types that do not fit the model's heads are left out, with a
    note.
    """
    sizes = {}
    for name, choice in caches.items():
        try:
            with model.context(choice, context) as opened:
                sizes[name] = opened.stats
        except CacheError as error:
            if choice.coded or name == "f16":
                raise
            options.note(f"{name}: left out, {error.reason}")
    return sizes


def saved_file(key: str) -> Path | None:
    """Where results are stored; None, with a note, if the cache folder cannot be used."""
    try:
        store.prepare(folder := cache_folder())
    except SubkvError as error:
        not_saved(error)
        return None
    return folder / f"check-{key[:16]}.json"


def not_saved(error: SubkvError) -> None:
    """Log that results are not stored; they are printed all the same."""
    options.note(f"{error.key}: results are not stored for another run: {error.reason}")


def read_saved(path: Path | None, key: str) -> Saved:
    """The results of earlier runs with this key. A file that is damaged or has another key is ignored, with a note."""
    try:
        if path is None:
            raise FileNotFoundError
        with open_regular(path) as handle:
            digest, _, body = handle.read(1 << 20).partition(b"\n")
        if digest != _digest(key, body):
            raise ValueError("another digest")
        saved: Saved = json.loads(body)
        return saved
    except FileNotFoundError:
        pass
    except (OSError, ValueError):
        options.note(f"note: {path} is damaged or of another model or version; starting over")
    return {"n_ctx": 0, "texts": {}, "speed": None}


class Writer:
    """Stores results after each text; after an error, with a note, no more."""

    def __init__(self, path: Path | None, key: str, saved: Saved) -> None:
        self.path, self.key, self.saved = path, key, saved

    def __call__(self) -> None:
        if self.path is None:
            return
        body = json.dumps(self.saved).encode()
        try:
            with concerning(output="XDG_CACHE_HOME"), atomic_file(self.path) as handle:
                handle.write(_digest(self.key, body) + b"\n" + body)
        except SubkvError as error:
            not_saved(error)
            self.path = None


def _digest(key: str, body: bytes) -> bytes:
    return hashlib.sha256(key.encode() + body).hexdigest().encode()


def measure_speed(model: Model, caches: dict[str, CacheChoice], context: ContextOptions) -> dict[str, Any]:
    """Speeds at a quarter of the context and at its end.

    f16 runs with and without flash attention; the faster one counts. Where cells cannot be copied, depths are smaller.
    """
    depths = [context.n_ctx // 4, context.n_ctx - N_GEN]
    tests = bench.Tests([0], [N_GEN], depths, 1, REPETITIONS)
    done: list[bench.Measurement] = []
    settings, tokens = replace(context, n_batch=N_BATCH, n_ubatch=N_BATCH), bench.random_tokens(model)
    named = [(name, choice, "auto") for name, choice in caches.items()] + [(FLOOR, caches["f16"], "off")]
    with contextlib.ExitStack() as cleanup:
        contexts = [
            (name, bench.open_context(model, name, choice, replace(settings, flash_attn=flash), tests, cleanup))
            for name, choice, flash in named
        ]
        if not all(opened.can_repeat for _, opened in contexts):
            seconds = _seconds_per_token(contexts[0][1], tokens)
            depth = int(FILL_SECONDS / (seconds * len(contexts)))
            tests = replace(tests, depths=[min(depth // 4, depths[0]), min(max(depth, 4), depths[1])])
        busy = Busy()
        bench.measure(contexts, tokens, tests, done)
        speeds: dict[str, dict[int, float]] = {}
        for m in done:
            name = "f16" if m.cache == FLOOR else m.cache
            speed = statistics.median(1e9 * N_GEN / ns for ns in m.samples_ns)
            at = speeds.setdefault(name, {})
            at[m.n_depth] = max(at.get(m.n_depth, 0.0), speed)
        measured = {name: [at[depth] for depth in tests.depths] for name, at in speeds.items()}
        return {"others": busy.others(), "depths": tests.depths, "caches": measured}


def _seconds_per_token(context: Any, tokens: bench.Tokens) -> float:
    """Of a prompt; afterwards the context is empty."""
    bench.prompt(context, tokens, 0, N_BATCH)
    start = time.perf_counter()
    bench.prompt(context, tokens, N_BATCH, 2 * N_BATCH)
    seconds = time.perf_counter() - start
    context.clear()
    return seconds / (2 * N_BATCH)


def measure_texts(
    model: Model, caches: dict[str, CacheChoice], context: ContextOptions, saved: Saved, save: Save, end: float
) -> None:
    """Score texts that `saved` does not have, until `end` (time.monotonic()), at least one; save() after each."""
    from converter import held_out, scoring  # numpy: not for a --help

    texts = [text for text in held_out.read() if text.source.name not in saved["texts"]]
    if not texts:
        return
    n_ctx = min(LONG, model.n_ctx_train)
    named = [(name, choice, context) for name, choice in caches.items()]
    named.append((FLOOR, caches["f16"], replace(context, flash_attn="off", n_ubatch=64)))
    with contextlib.ExitStack() as cleanup:
        contexts = [
            options.open_context(model, choice, replace(settings, n_ctx=n_ctx), name, cleanup)
            for name, choice, settings in named
        ]
        if not saved["n_ctx"]:
            seconds = _seconds_per_token(contexts[0], bench.random_tokens(model)) * len(contexts)
            saved["n_ctx"] = n_ctx if seconds * n_ctx < LONG_SECONDS else SHORT
            options.note(f"a text takes about {seconds * saved['n_ctx']:.0f} seconds")
        took = 0.0
        for text in texts:
            start = time.monotonic()
            if took and start + took > end:
                options.note(f"--minutes: {len(saved['texts'])} texts are done; the same command measures the others")
                return
            tokens = model.tokenize(text.data)[None, : saved["n_ctx"]]
            scores = scoring.evaluate(model, contexts, tokens, default_threads(context.n_threads))
            saved["texts"][text.source.name] = {
                name: [s["n_scored"], s["mean_kld"], s["mean_kld_stderr"], s["same_top"]]
                for (name, *_), s in zip(named[1:], (scored.summary() for scored in scores[1:]), strict=True)
            }
            save()
            took = time.monotonic() - start


def table(saved: Saved, predicted: dict[str, float], sizes: dict[str, KVStats]) -> list[str]:
    """A line per cache."""
    from subkv.engine.stats import in_q8_0

    speed, texts = saved["speed"], saved["texts"]
    f16 = speed["caches"]["f16"]
    n = sum(by_cache[FLOOR][0] for by_cache in texts.values())
    titles = ["cache", "bits", "MiB", "× smaller than f16", "× than q8_0", "predicted KLD", f"KLD of {n} tokens"]
    titles += ["worst text", "same top-1", *(f"tokens/s at {depth}" for depth in speed["depths"])]
    lines = [f"| {' | '.join(titles)} |", "|---|" + "---:|" * (len(titles) - 1)]
    for name in [*speed["caches"], FLOOR]:
        stats, speeds = sizes["f16" if name == FLOOR else name], speed["caches"].get(name, f16)
        times = sizes["f16"].bytes_kv / stats.bytes_all
        cells = [name, f"{stats.bpe:.2f}", f"{stats.bytes_all / 2**20:.1f}"]
        cells += [f"{times:.2f}", f"{in_q8_0(times):.2f}"]
        cells.append(f"{predicted[name]:.2g}" if name in predicted else "")
        if scored := {text: by_cache[name] for text, by_cache in texts.items() if name in by_cache}:
            mean = sum(row[0] * row[1] for row in scored.values()) / n
            error = math.sqrt(sum((row[0] * row[2]) ** 2 for row in scored.values())) / n
            worst = max(scored, key=lambda text: scored[text][1])
            same = sum(row[0] * row[3] for row in scored.values()) / n
            cells += [f"{mean:.2g} ± {error:.1g}", f"{scored[worst][1]:.2g} ({worst})", f"{100 * same:.1f}%"]
        else:
            cells += ["", "", ""]
        ratios = zip(speeds, f16, strict=True)
        cells += ["", ""] if name == FLOOR else [f"{ts:.1f} ({ts / of_f16:.2f} × f16)" for ts, of_f16 in ratios]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def block(
    saved: Saved,
    predicted: dict[str, float],
    sizes: dict[str, KVStats],
    model: dict[str, str],
    facts: dict[str, Any],
) -> str:
    """The text to paste: facts, then the table."""
    speed, processor, versions = saved["speed"], facts["processor"], facts["versions"]
    others = "unknown" if speed["others"] is None else f"{speed['others']:.1f} cores"
    quiet = speed["others"] is None or speed["others"] <= LIMIT
    lines = [
        *(f"- {name}: {value}" for name, value in model.items()),
        f"- processor: {processor['name']}, {processor['cores']} cores, {facts['threads']} threads, kernel "
        f"{list(sizes.values())[-1].kernel}; {(processor['features'] or '').replace(' = 1', '')}",
        f"- subkv {versions['subkv']}, commit {versions['commit'] or 'unknown'}, {facts['date']}",
        f"- busy with other work: {others}" + ("" if quiet else "; the speeds are too low: measure again when idle"),
        f"- texts: {', '.join(saved['texts'])}; at most {saved['n_ctx']} tokens each",
    ]
    lines = [re.sub(r"[`|<>\[\]@]", "", printable(line)) for line in lines]
    return "\n".join([*lines, "", *table(saved, predicted, sizes)])


def identity(model: Model, content: str, layout: dict[str, Any]) -> dict[str, str]:
    """What a block says about a model: nothing about files, and no names of texts."""
    import ctypes

    from subkv.format.window import VARIABLES
    from subkv.native.binding import C

    text = ctypes.create_string_buffer(256)
    C.llama_model_desc(model.handle, text, len(text))
    heads = sorted({(layer["n_head_kv"], layer["d_k"], layer["d_v"]) for layer in layout["layers"]})
    calibration, name = layout["calibration"], re.split(r"[/\\]", model.name)[-1]
    built_in = all(name.startswith("built-in ") for name in calibration["text"].split(","))
    source = f"calibrated on {calibration['tokens']} tokens of {'the built-in' if built_in else 'other'} texts"
    return {
        "model": f"{name[:80]}; {text.value.decode('utf-8', 'replace')}; weights {content[:SHOWN]}",
        "shape": f"{model.n_layer} layers, {len(layout['layers'])} coded, KV heads of "
        + " and ".join(f"{n} × {k}/{v}" for n, k, v in heads)
        + f", trained on {model.n_ctx_train} tokens",
        "bases": (source if calibration["tokens"] else "from the weights")
        + f"; {layout['fingerprint'][:SHOWN]}"
        + (f"; adaptive ({layout['adapt']})" if layout["adapt"] else ""),
        **{
            name: os.environ[name] for name in (*VARIABLES.values(), "SUBKV_BITS", "SUBKV_KERNEL") if name in os.environ
        },
    }


@command(interrupted="interrupted: finished texts are saved; the same command resumes")
@options.model_option(required=False, text="model file (GGUF) [default: the demo model]")
@options.bases_option
@click.option("--minutes", type=click.FloatRange(0), default=3.0, help="start no further text after this time")
@options.context_options(options.context_option(8192, "cells of the deepest speed test"), options.threads_option)
def main(model: str | None, bases: Path | None, minutes: float, context: ContextOptions) -> None:
    """Measure the caches of a model on this machine: bits, memory, quality on built-in texts, speed.

    Prints a block to paste into an issue, without names of files. Run again, it measures the remaining texts.
    """
    from converter import held_out  # numpy and the native libraries: not for a --help
    from runtime.doctor.report import report
    from subkv.engine.model import Model
    from subkv.native.bases import model_content
    from subkv.native.paths import lib_dir

    end = time.monotonic() + 60 * minutes
    with Model(model or demo.usable()) as opened:
        opened.check_text()
        if opened.n_ctx_train < SHORT:
            reason = f"expected a model trained on at least {SHORT} tokens, found {opened.n_ctx_train}"
            raise SubkvError("model", f"{reason}: the exact window holds most of a shorter context")
        context = replace(context, n_ctx=min(context.n_ctx or opened.n_ctx_train, opened.n_ctx_train))
        if context.n_ctx < SHORT:
            raise SubkvError("n_ctx", f"expected at least {SHORT} tokens, found {context.n_ctx}")
        caches, predicted, described = chosen(opened.path, bases)
        sizes = sizes_of(opened, caches, context)
        caches = {name: caches[name] for name in sizes}
        facts, _ = report()
        facts["threads"] = default_threads(context.n_threads)
        content = model_content(opened.path)
        about = identity(opened, content, described[0])
        measured = (content, about, [layout["fingerprint"] for layout in described], list(caches), context.n_ctx)
        texts = [text.source.sha256 for text in held_out.read()]
        files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(lib_dir().iterdir())]
        here = (facts["versions"], facts["processor"], facts["threads"], files)
        key = hashlib.sha256(repr((*measured, texts, *here)).encode())
        path = saved_file(key.hexdigest())
        saved = read_saved(path, key.hexdigest())
        save = Writer(path, key.hexdigest(), saved)
        speed = saved["speed"]
        if speed is None or (speed["others"] or 0.0) > LIMIT:
            again = measure_speed(opened, caches, context)
            if speed is None or (again["others"] or 0.0) <= speed["others"]:
                saved["speed"] = again
            save()
        measure_texts(opened, caches, context, saved, save, end)
    facts["date"] = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    click.echo(block(saved, predicted, sizes, about, facts))


if __name__ == "__main__":
    main()
