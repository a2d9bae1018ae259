"""Tables of quality: KLD and perplexity of caches, in float32 and in the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from render import Column, Numbers, Row, Rows, grid, label, plain

WIKI, NOVEL, CODE = "wikitext2.test.txt", "sherlock.txt", "argparse.py"
EVALUATE = ("python", "-m", "research.evaluate", "-m", "M.gguf", "--bases", "calib.safetensors", "-o", "json")
PERPLEXITY = ("subkv", "perplexity", "-m", "M.gguf", "-f", WIKI, "-o", "json")


def kld(row: Row) -> str:
    return f"{plain(row['mean_kld'])} ± {row['mean_kld_stderr']:.1g}"


QUALITY: tuple[Column, ...] = (
    ("Δ PPL", lambda row: f"{row['delta_percent']:+.2f}% ± {100 * row['ppl_ratio_stderr']:.2f}%"),
    ("mean KLD", kld),
    ("median", lambda row: f"{row['median_kld']:.2g}"),
    ("99.9%", lambda row: f"{row['kld_999']:.2g}"),
    ("same top-1", lambda row: f"{100 * row['same_top']:.1f}%"),
)


def frontier(lab: Any) -> Rows:
    """At the same context as the count of bits."""
    return _frontier(lab, "2.5,3,3.5,4.25,5,5.2,7", "8192", "1", "frontier.png")


def frontier_short(lab: Any) -> Rows:
    """In a short context, where the exact window and the bases take the largest share."""
    return _frontier(lab, "4.25,4.75,5.5,6.25,7", "2048", "2")


def frontier_gemma(lab: Any) -> Rows:
    """With rows from the weights alone."""
    return _frontier(lab, "3,4.25,5.4,6.5", "8192", "1", uncalibrated="4.25,6.5")


def frontier_short_gemma(lab: Any) -> Rows:
    return _frontier(lab, "4.25,5.4,6.5,7.25", "2048", "2")


def _frontier(lab: Any, bits: str, n_ctx: str, chunks: str, picture: str = "", uncalibrated: str = "") -> Rows:
    bits, kinds = lab.pick((bits, "q8_0,q5_1,q5_0,q4_1,q4_0"), ("4.25", "q4_0"))
    size = ("--bpe-context", lab.pick(n_ctx, "8192"), *lab.pick(("-c", n_ctx, "--chunks", chunks), ("-c", "256")))
    more = ("--uncalibrated", uncalibrated) if uncalibrated else ()
    chosen = ("-f", lab.text(WIKI), "--kv-bits", bits, *more, "--stock", kinds, *size)
    rows: Rows = lab.json(*EVALUATE, *chosen, *(("--plot", picture) if picture else ()))
    if picture:
        lab.keep(picture)
    return rows


def frontier_markdown(rows: Rows) -> str:
    columns: list[Column] = [
        ("cache", lambda row: label(row["name"])),
        (f"bits per element at {rows[0]['n_ctx']}", lambda row: f"{row['bpe']:.2f}"),
        *QUALITY,
        ("predicted KLD", lambda row: "" if row["predicted_kld"] is None else plain(row["predicted_kld"])),
    ]
    return grid(rows, columns)


def klds(rows: Rows) -> dict[str, float]:
    """Mean KLD of all texts by cache."""
    by_cache: dict[str, list[float]] = {}
    for row in rows:
        by_cache.setdefault(row["name"].removeprefix("subkv ").replace(" + ", "_"), []).append(row["mean_kld"])
    return {name: sum(values) / len(values) for name, values in by_cache.items()}


def frontier_numbers(rows: Rows) -> Numbers:
    kld = klds(rows)
    numbers = {f"kld_{name}": plain(value) for name, value in kld.items()}
    over = {f"{name}_over_4.25": kld[name] / kld["4.25"] for name in ("q4_0", "q4_0_window") if name in kld}
    return numbers | {name: f"{value:.0f}" for name, value in over.items()}


def klds_of(rows: Rows) -> Numbers:
    return {f"kld_{name.replace(' ', '_')}": plain(value) for name, value in klds(rows).items()}


def other_texts(lab: Any) -> Rows:
    return _other_texts(lab, "2.5,3,3.5,4.25,5,5.2,7", "q8_0,q5_0,q4_0")


def other_texts_gemma(lab: Any) -> Rows:
    return _other_texts(lab, "3,4.25,5.4,6.5", "q8_0,q4_0")


def _other_texts(lab: Any, bits: str, kinds: str) -> Rows:
    bits, kinds = lab.pick((bits, kinds), ("4.25", "q4_0"))
    files = lab.texts(NOVEL, CODE)
    size = lab.pick(("-c", "2048", "--chunks", "1"), ("-c", "256", "--chunks", "1"))
    chosen = ("--held-out", "--kv-bits", bits, "--stock", kinds, *size)
    rows: Rows = lab.json(*EVALUATE, *(f"-f{file}" for file in files), *chosen)
    return rows


def by_text(rows: Rows) -> str:
    """A line per cache, a column per text, then their mean and the worst."""
    bits: Column = ("bits", lambda row: f"{row['bpe']:.2f}")
    return grid(_caches(rows), [("cache", lambda row: label(row["name"])), bits, *_per_text(rows)])


def _caches(rows: Rows) -> Rows:
    """One row of every cache, that of the first text."""
    return [row for row in rows if row["text"] == rows[0]["text"]]


def _per_text(rows: Rows) -> list[Column]:
    """KLD on every text, their mean and the worst."""
    texts = list(dict.fromkeys(row["text"] for row in rows))
    found = {(row["name"], row["text"]): row["mean_kld"] for row in rows}

    def klds(row: Row) -> list[float]:
        return [found[row["name"], text] for text in texts]

    return [
        *((text, lambda row, text=text: plain(found[row["name"], text])) for text in texts),
        ("mean", lambda row: plain(sum(klds(row)) / len(texts))),
        ("worst", lambda row: plain(max(klds(row)))),
    ]


def rivals(lab: Any) -> Rows:
    """Other projects' codecs, with their own exact window and with ours."""
    codecs = "kvarn:2,kvarn:4/2,kvarn:4,oscar:2,kivi:2,kivi:4,kvquant:2,kvquant:3,kvquant:4"
    codecs += ",turboquant:2,turboquant:3,turboquant:4,exl3:2,exl3:3,exl3:4"
    size = lab.pick(("-c", "2048", "--chunks", "1"), ("-c", "256", "--chunks", "1"))
    bits, codecs = lab.pick(("2.5,3,3.5,4.25,5", codecs), ("4.25", "kvarn:4/2,exl3:3"))
    texts = [f"-f{text}" for text in lab.texts(WIKI, NOVEL, CODE)]
    chosen = ("--kv-bits", bits, "--stock", "q4_0", "--codecs", codecs, "--bpe-context", "8192", *size)
    rows: Rows = lab.json(*EVALUATE, *texts, *chosen, "--plot", "rivals.png")
    lab.keep("rivals.png")
    return rows


def rivals_markdown(rows: Rows) -> str:
    """Ordered by bits: a line of ours beats all lines below it with a higher KLD."""

    def bits(row: Row) -> float:
        return float(row["bpe"])

    columns: list[Column] = [
        ("cache", lambda row: label(row["name"])),
        ("bits per element", lambda row: f"{row['bpe']:.2f}"),
        ("rows only", lambda row: f"{row['bpe_rows']:.2f}"),
        *_per_text(rows),
        ("above the bound", lambda row: "" if row["bound_bpe"] is None else f"{row['bpe'] - row['bound_bpe']:.2f}"),
    ]
    return grid(sorted(_caches(rows), key=bits), columns)


def uncalibrated(lab: Any) -> Rows:
    bits, kinds = lab.pick("4.25,4.75,5.5,6.5", "4.75"), lab.pick("q8_0,q5_1,q5_0,q4_1,q4_0", "q4_0")
    size = lab.pick(("-c", "8192", "--chunks", "1"), ("-c", "256", "--chunks", "1"))
    chosen = ("-f", lab.text(WIKI), "--kv-bits", "4.75", "--uncalibrated", bits, "--stock", kinds, *size)
    rows: Rows = lab.json(*EVALUATE, *chosen)
    return rows


def engine_kld(lab: Any) -> Rows:
    size = lab.pick(("-c", "2048", "--chunks", "2"), ("-c", "256", "--chunks", "1"))
    ours = [lab.sidecar(bits) for bits in lab.pick(("3.5", "4.25", "5", ""), ("4.25",))]
    lab.text(WIKI)
    caches = ",".join(
        [*lab.pick(("f16", "q8_0", "q5_0", "q4_0"), ("f16", "q4_0")), *(f"subkv:{file}" for file in ours)]
    )
    rows: Rows = lab.json(*PERPLEXITY, *size, "--compare", caches)
    return rows


def engine_markdown(rows: Rows) -> str:
    def scored(cell: Callable[[Row], str]) -> Callable[[Row], str]:
        return lambda row: "" if row is rows[0] else cell(row)

    columns: list[Column] = [
        ("cache", lambda row: label(row["name"])),
        ("bits per element allocated", lambda row: f"{row['bpe']:.2f}"),
        ("PPL", lambda row: f"{row['ppl']:.3f}"),
        *((title, scored(cell)) for title, cell in QUALITY),
    ]
    return grid(rows, columns)


TASKS = "needles,recall,variables,copy,induction,tools"


def tasks(lab: Any) -> Rows:
    caches = ["f16", *lab.pick(("q8_0", "q4_0"), ("q4_0",))]
    caches += [f"subkv:{lab.sidecar(bits)}" for bits in lab.pick(("2.5", "3", "4.25"), ("4.25",))]
    kinds, samples = lab.pick((TASKS, "4"), ("recall", "1"))
    chosen = ("--compare", ",".join(caches), "--tasks", kinds, "-c", "1024", "--samples", samples, "-t", "2")
    rows: Rows = lab.json("python", "-m", "research.tasks", "-m", "M.gguf", *chosen, "-o", "json")
    return rows


def tasks_markdown(rows: Rows) -> str:
    """A line per cache, a column per task; for tools the share of calls equal to f16's."""
    kinds = list(dict.fromkeys(row["task"] for row in rows))
    found = {(row["name"], row["task"]): row for row in rows}

    def right(row: Row, kind: str) -> str:
        row = found[row["name"], kind]
        if row["name"] == rows[0]["name"]:
            return f"{100 * row['right']:.0f}% ± {100 * row['right_stderr']:.0f}"
        if kind.startswith("tools"):
            return f"{100 * row['same']:.0f}% ± {100 * row['same_stderr']:.0f} as f16"
        return f"{100 * row['change']:+.0f} ± {100 * row['change_stderr']:.0f}"

    def worst(row: Row) -> str:
        if row["name"] == rows[0]["name"]:
            return ""
        least = min((found[row["name"], kind] for kind in kinds if kind[:5] != "tools"), key=lambda r: r["change"])
        return f"{100 * least['change']:+.0f} ({least['task'].split(':')[0]})"

    def nll(row: Row) -> str:
        changes = [r["nll_change"] for r in (found[row["name"], kind] for kind in kinds) if "nll_change" in r]
        return "" if row["name"] == rows[0]["name"] else f"{sum(changes) / len(changes):+.3f}"

    columns: list[Column] = [
        ("cache", lambda row: label(row["name"])),
        *((kind, lambda row, kind=kind: right(row, kind)) for kind in kinds),
        ("worst", worst),
        ("−ln p of answers", nll),
    ]
    return grid([found[name, kinds[0]] for name in dict.fromkeys(row["name"] for row in rows)], columns)
