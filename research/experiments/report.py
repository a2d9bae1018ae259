"""Results as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from research.experiments import verdicts
from research.experiments.grids import Column, Row, grid, heading
from research.float32 import tables

Found = dict[str, Any]  # what an experiment returned

TITLES = {
    "ranks": "Rank per head by energy: plain PCA, int8 coefficients",
    "matched": "Static against adaptive at matched bytes",
    "sides": "Keys only, values only",
    "coefficients": "int8 against 16-bit coefficients",
    "chunks": "Chunk length, thresholds, sketches",
    "domain": "Domain shift",
    "rotary": "Keys behind bases of rotary pairs",
    "anchoring": "Streaming bases, a trailing window, look-ahead",
    "oja": "OjaKV against static bases of the same rank",
    "length": "Quality by position",
    "bounds": "Measured errors against the bounds",
}


def _ppl(row: Row) -> str:
    return f"{row['delta_percent']:+.2f}% ± {100 * row['ppl_ratio_stderr']:.2f}%"


QUALITY: list[Column] = [
    ("bpe", "bpe", ".2f"),
    ("Δ PPL", _ppl, ""),
    ("mean KLD", "mean_kld", "±"),
    ("median KLD", "median_kld", ".2g"),
    ("same top-1", "same_top", ".2%"),
]
RANKS: list[Column] = [
    ("energy, exact recent tokens", "name", ""),
    ("rank K, mean (range)", "rank_k", ""),
    ("rank V", "rank_v", ""),
    ("coefficients kept, in groups of 8", "share", ".0%"),
    *QUALITY,
]
PAIRS: list[Column] = [
    ("adaptive", "adaptive", ""),
    ("text", "text", ""),
    ("bpe", "bpe", ".3f"),
    ("bpe static", "bpe_static", ".3f"),
    ("KLD", "kld", ".3g"),
    ("KLD static", "kld_static", ".3g"),
    ("static less adaptive", lambda row: f"{row['gain']:.2g} ± {row['gain_stderr']:.1g}", ""),
]
DIRECTIONS: list[Column] = [
    ("text", "text", ""),
    ("basis", "name", ""),
    ("directions", "r", ""),
    ("error", "error", ".3f"),
    ("against static", "change", "+.0%"),
]
OJA: list[Column] = [
    ("text", "text", ""),
    ("bases", "name", ""),
    ("rank", "r", ""),
    ("K, prompt", "k_prompt", ".4f"),
    ("K, after it", "k_text", ".4f"),
    ("V, prompt", "v_prompt", ".4f"),
    ("V, after it", "v_text", ".4f"),
]
LENGTH: list[Column] = [
    ("cache", "name", ""),
    ("positions", lambda row: f"{row['from']}-{row['to']}", ""),
    ("mean KLD", "mean_kld", "±"),
    ("median KLD", "median_kld", ".2g"),
    ("Δ PPL", "delta_percent", "+.2f"),
]
CORRELATIONS: list[Column] = [
    ("projectors", "mode", ""),
    ("predictor", "predictor", ""),
    ("measured", "measured", ""),
    ("Spearman", "spearman", ".2f"),
]


def _plain(found: Found) -> str:
    return grid(found["rows"], [("cache", "name", ""), *QUALITY])


def _matched(found: Found) -> str:
    return f"{tables.scores(found['rows'])}\n\nAt equal bytes:\n\n{grid(found['pairs'], PAIRS)}"


def _domain(found: Found) -> str:
    values = grid(found["reconstruction"], DIRECTIONS)
    return f"{_matched(found)}\n\nSquared relative error of raw values behind r directions:\n\n{values}"


def _chunks(found: Found) -> str:
    columns: list[Column] = [
        ("text", "text", ""),
        ("variant", "name", ""),
        ("opened per head", "opened", ".2f"),
        ("refused", "refused", ".2f"),
        ("bits for bases and sketches", "bits", ".3f"),
        ("V's squared relative error", "error", ".4f"),
        (f"predicted cost of V [{found['unit']}]", "cost", ".3g"),
    ]
    return grid(found["rows"], columns)


def _rotary(found: Found) -> str:
    if not found["rows"]:
        return str(found["note"])
    about = (
        "Static bases are those of the first half of the in-domain text (after RoPE: averaged over all positions), "
        "adaptive ones those of the text so far, or anchored as they say."
    )
    columns: list[Column] = [
        ("text", "text", ""),
        ("basis", lambda row: f"{row['basis']}, {row['space']}", ""),
        (f"error with {100 * found['share']:g}% of the coefficients", "rank", ".4f"),
        (f"at {found['bits']:g} bits (Gaussian)", "bits", ".5f"),
    ]
    return f"{about}\n\n{grid(found['rows'], columns)}"


def _oja(found: Found) -> str:
    return (
        f"Squared relative errors, mean over heads:\n\n{grid(found['errors'], OJA)}\n\n"
        f"With {found['r']} of {found['d']} coefficients of K and V, the first and last 32 tokens exact, bases not "
        f"counted:\n\n{grid(found['rows'], [*OJA[:2], *QUALITY])}"
    )


def _bounds(found: Found) -> str:
    return (
        f"Rank {found['r']}, sketches of {2 * found['r']} rows, {found['text']}. Violated: logit bound "
        f"{found['logit_violations']}, output bound {found['output_violations']} of {found['checks']} each (γ = 1); "
        f"errors reach {100 * found['logit_tightness']:.2g}% and {100 * found['output_tightness']:.2g}% of them "
        f"(median). At γ = √(r/d) the paper's logit bound "
        f"{found['gamma_paper_violations']} of {found['gamma_checks']}, "
        f"the completed one {found['gamma_violations']}. Residuals behind a sketch: √(σ² + ε) violated "
        f"{found['fd_violations']} of {found['fd_checks']}, above the paper's √ε without its perturbation term "
        f"{found['fd_above_root_epsilon']}.\n\n{grid(found['correlations'], CORRELATIONS)}"
    )


SECTIONS = {
    "ranks": lambda found: grid(found["rows"], RANKS),
    "matched": _matched,
    "sides": _plain,
    "coefficients": _plain,
    "chunks": _chunks,
    "domain": _domain,
    "rotary": _rotary,
    "anchoring": lambda found: grid(found["rows"], [("text", "text", ""), ("cache", "name", ""), *QUALITY]),
    "oja": _oja,
    "length": lambda found: grid(found["rows"], LENGTH),
    "bounds": _bounds,
}


def markdown(
    settings: Row, results: verdicts.Results, notes: Sequence[str], pictures: dict[str, str], about: dict[str, str]
) -> str:
    """The whole report. about: a sentence per experiment; pictures: file name per experiment that has one."""
    lines = heading("Low-rank KV caches: experiments", "python -m research.experiments", settings)
    lines += [f"- {note}" for note in notes]
    lines += ["", "## Verdicts", ""]
    lines += [f"- {line}" for line in verdicts.verdicts(results)]
    for name, found in results.items():
        lines += ["", f"## {TITLES[name]}", "", f"`{name}`, {found['seconds']:.0f} s. {about[name]}", ""]
        lines += [SECTIONS[name](found)]
        if name in pictures:
            lines += ["", f"![{TITLES[name]}]({pictures[name]})"]
    return "\n".join(lines) + "\n"
