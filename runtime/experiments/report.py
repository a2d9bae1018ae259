"""Results as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from converter import tables
from runtime.experiments import verdicts
from runtime.experiments.lab import Rows

Column = tuple[str, Callable[[dict[str, Any]], str]]  # title, cell

TITLES = {
    "ranks": "Rank per head by energy: plain PCA, int8 coefficients",
    "matched": "Static against adaptive at matched bytes",
    "sides": "Keys only, values only",
    "coefficients": "int8 against 16-bit coefficients",
    "chunks": "Chunk length, thresholds, sketches",
    "domain": "Domain shift",
    "rotary": "Keys behind bases of rotary pairs",
    "oja": "OjaKV against static bases of the same rank",
    "length": "Quality by position",
    "bounds": "Measured errors against the bounds",
}


def grid(rows: Rows, columns: Sequence[Column]) -> str:
    """A Markdown table, first column to the left."""
    lines = [
        "| " + " | ".join(title for title, _ in columns) + " |",
        "|---|" + "---:|" * (len(columns) - 1),
    ]
    lines += ["| " + " | ".join(cell(row) for _, cell in columns) + " |" for row in rows]
    return "\n".join(lines)


def _n(key: str, form: str = ".3g") -> Callable[[dict[str, Any]], str]:
    return lambda row: "" if row[key] is None else format(row[key], form)


def _s(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: str(row[key])


def _quality() -> list[Column]:
    return [
        ("bpe", _n("bpe", ".2f")),
        ("Δ PPL", lambda row: f"{row['delta_percent']:+.2f}% ± {100 * row['ppl_ratio_stderr']:.2f}%"),
        ("mean KLD", lambda row: f"{row['mean_kld']:.3g} ± {row['mean_kld_stderr']:.1g}"),
        ("median KLD", _n("median_kld", ".2g")),
        ("same top-1", lambda row: f"{100 * row['same_top']:.2f}%"),
    ]


def _ranks(found: dict[str, Any]) -> str:
    return grid(
        found["rows"],
        [
            ("energy, exact recent tokens", _s("name")),
            ("rank K, mean (range)", _s("rank_k")),
            ("rank V", _s("rank_v")),
            ("coefficients kept, in groups of 8", lambda row: f"{100 * row['share']:.0f}%"),
            *_quality(),
        ],
    )


PAIRS: list[Column] = [
    ("adaptive", _s("adaptive")),
    ("text", _s("text")),
    ("bpe", _n("bpe", ".3f")),
    ("bpe static", _n("bpe_static", ".3f")),
    ("KLD", _n("kld")),
    ("KLD static", _n("kld_static")),
    ("static less adaptive", lambda row: f"{row['gain']:.2g} ± {row['gain_stderr']:.1g}"),
]


def _plain(found: dict[str, Any]) -> str:
    return grid(found["rows"], [("cache", _s("name")), *_quality()])


def _matched(found: dict[str, Any]) -> str:
    return f"{tables.scores(found['rows'])}\n\nAt equal bytes:\n\n{grid(found['pairs'], PAIRS)}"


def _domain(found: dict[str, Any]) -> str:
    values = grid(
        found["reconstruction"],
        [
            ("text", _s("text")),
            ("basis", _s("name")),
            ("directions", _s("r")),
            ("error", _n("error", ".3f")),
            ("against static", lambda row: f"{100 * row['change']:+.0f}%"),
        ],
    )
    return f"{_matched(found)}\n\nSquared relative error of raw values behind r directions:\n\n{values}"


def _chunks(found: dict[str, Any]) -> str:
    columns: list[Column] = [
        ("text", _s("text")),
        ("variant", _s("name")),
        ("opened per head", _n("opened", ".2f")),
        ("refused", _n("refused", ".2f")),
        ("bits for bases and sketches", _n("bits", ".3f")),
        ("V's squared relative error", _n("error", ".4f")),
        (f"predicted cost of V [{found['unit']}]", _n("cost")),
    ]
    return grid(found["rows"], columns)


def _rotary(found: dict[str, Any]) -> str:
    if not found["rows"]:
        return str(found["note"])
    about = (
        "Static bases are those of the first half of the in-domain text (after RoPE: averaged over all positions), "
        "adaptive ones those of the text so far."
    )
    columns: list[Column] = [
        ("text", _s("text")),
        ("basis", lambda row: f"{row['basis']}, {row['space']}"),
        (f"error with {100 * found['share']:g}% of the coefficients", _n("rank", ".4f")),
        (f"at {found['bits']:g} bits (Gaussian)", _n("bits", ".5f")),
    ]
    return f"{about}\n\n{grid(found['rows'], columns)}"


def _oja(found: dict[str, Any]) -> str:
    errors: list[Column] = [
        ("text", _s("text")),
        ("bases", _s("name")),
        ("rank", _s("r")),
        ("K, prompt", _n("k_prompt", ".4f")),
        ("K, after it", _n("k_text", ".4f")),
        ("V, prompt", _n("v_prompt", ".4f")),
        ("V, after it", _n("v_text", ".4f")),
    ]
    return (
        f"Squared relative errors, mean over heads:\n\n{grid(found['errors'], errors)}\n\n"
        f"With {found['r']} of {found['d']} coefficients of K and V, the first and last 32 tokens exact, bases not "
        f"counted:\n\n{grid(found['rows'], [('text', _s('text')), ('bases', _s('name')), *_quality()])}"
    )


def _length(found: dict[str, Any]) -> str:
    return grid(
        found["rows"],
        [
            ("cache", _s("name")),
            ("positions", lambda row: f"{row['from']}-{row['to']}"),
            ("mean KLD", lambda row: f"{row['mean_kld']:.3g} ± {row['mean_kld_stderr']:.1g}"),
            ("median KLD", _n("median_kld", ".2g")),
            ("Δ PPL", _n("delta_percent", "+.2f")),
        ],
    )


def _bounds(found: dict[str, Any]) -> str:
    table = grid(
        found["correlations"],
        [
            ("projectors", _s("mode")),
            ("predictor", _s("predictor")),
            ("measured", _s("measured")),
            ("Spearman", _n("spearman", ".2f")),
        ],
    )
    return (
        f"Rank {found['r']}, sketches of {2 * found['r']} rows, {found['text']}. Violated: logit bound "
        f"{found['logit_violations']}, output bound {found['output_violations']} of {found['checks']} each (γ = 1); "
        f"errors reach {100 * found['logit_tightness']:.2g}% and {100 * found['output_tightness']:.2g}% of them "
        f"(median). At γ = √(r/d) the paper's logit bound "
        f"{found['gamma_paper_violations']} of {found['gamma_checks']}, "
        f"the completed one {found['gamma_violations']}. Residuals behind a sketch: √(σ² + ε) violated "
        f"{found['fd_violations']} of {found['fd_checks']}, above the paper's √ε without its perturbation term "
        f"{found['fd_above_root_epsilon']}.\n\n{table}"
    )


SECTIONS = {
    "ranks": _ranks,
    "matched": _matched,
    "sides": _plain,
    "coefficients": _plain,
    "chunks": _chunks,
    "domain": _domain,
    "rotary": _rotary,
    "oja": _oja,
    "length": _length,
    "bounds": _bounds,
}


def markdown(
    command: str,
    settings: dict[str, Any],
    results: verdicts.Results,
    notes: Sequence[str],
    pictures: dict[str, str],
    about: dict[str, str],
) -> str:
    """The whole report. about: a sentence per experiment; pictures: file name per experiment that has one."""
    lines = ["# Low-rank KV caches: experiments", "", "```", command, "```", ""]
    lines += [f"- {key}: {_value(value)}" for key, value in settings.items()]
    lines += [f"- {note}" for note in notes]
    lines += ["", "## Verdicts", ""]
    lines += [f"- {line}" for line in verdicts.verdicts(results)]
    for name, found in results.items():
        lines += ["", f"## {TITLES[name]}", "", f"`{name}`, {found['seconds']:.0f} s. {about[name]}", ""]
        lines += [SECTIONS[name](found)]
        if name in pictures:
            lines += ["", f"![{TITLES[name]}]({pictures[name]})"]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
