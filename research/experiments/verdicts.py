"""The papers' falsifiers (papers/online-subspace-projection.md §11), answered from results alone."""

from __future__ import annotations

from typing import Any

from research.experiments.grids import Rows

Results = dict[str, dict[str, Any]]  # experiment -> what it returned

MUCH_LESS = 0.5  # r ≪ d: at most this share of all coefficients
MOST_PPL = 1.0  # percent
SURE = 2.0  # standard errors that make a difference
SHARP = 2.0  # KLD of the last quarter over the second's: more is a sharp degradation
TARGET = -0.45  # what the project asks of adaptive bases on a shifted text
STATIC, BEST = "static PCA", "the text's own best"
PREDICTS = 0.5  # rank correlation from which a quantity predicts another


def rank_verdict(found: dict[str, Any]) -> str:
    """(1) is there r ≪ d with at most 1% more PPL?"""
    parts = []
    for n_recent in sorted({row["n_recent"] for row in found["rows"]}):
        own = sorted((row for row in found["rows"] if row["n_recent"] == n_recent), key=lambda row: float(row["share"]))
        good = [row for row in own if row["delta_percent"] <= MOST_PPL]
        answer = "yes" if good and good[0]["share"] <= MUCH_LESS else "no"
        where = f"with the last {n_recent} tokens exact" if n_recent else "with no recent token exact"
        least = f"with {_kept(good[0])}" if good else f"none that was tried reaches it, with {_kept(own[-1])}"
        if own[0] is not (good or [None])[0]:
            least += f", with {_kept(own[0])}"
        parts.append(f"{answer} {where}: {least}")
    return (
        f"{'; '.join(parts)} (r ≪ d: at most {100 * MUCH_LESS:g}% kept; plain PCA, int8, {found['rows'][0]['text']})."
    )


def _kept(row: dict[str, Any]) -> str:
    return (
        f"{100 * row['share']:.0f}% of the coefficients ({100 * row['energy']:g}% energy, mean rank K {row['rank_k']}, "
        f"V {row['rank_v']}) ΔPPL is {row['delta_percent']:+.2f}%"
    )


def matched_verdict(pairs: Rows) -> str:
    """(2) does adaptive beat static at matched bytes?"""
    better = [pair for pair in pairs if pair["gain"] > SURE * pair["gain_stderr"]]
    worse = [pair for pair in pairs if pair["gain"] < -SURE * pair["gain_stderr"]]
    if better and worse:
        answer = "in part"
    elif better or worse:
        answer = "yes" if better else "no"
    else:
        answer = "undecided"
    best, worst = (choose(pairs, key=_change) for choose in (min, max))
    return (
        f"{answer}: adaptive has less KLD in {len(better)} of {len(pairs)} comparisons, more in {len(worse)}, "
        f"no difference beyond {SURE:g} standard errors in {len(pairs) - len(better) - len(worse)}; "
        f"from {_named(best)} to {_named(worst)}."
    )


def _change(pair: dict[str, Any]) -> float:
    """KLD relative to static's, less 1."""
    return float(pair["kld"] / pair["kld_static"] - 1.0) if pair["kld_static"] > 0.0 else 0.0


def _named(pair: dict[str, Any]) -> str:
    return f"{100 * _change(pair):+.0f}% ({pair['adaptive']}, {pair['text']}, {pair['bpe']:.2f} bits)"


def length_verdict(found: dict[str, Any]) -> str:
    """(3) does quality degrade sharply with length despite chunking?"""
    parts, sharp = [], False
    for name in dict.fromkeys(row["name"] for row in found["rows"]):
        own = [row for row in found["rows"] if row["name"] == name]
        ratio = own[-1]["mean_kld"] / own[1]["mean_kld"] if own[1]["mean_kld"] > 0.0 else float("nan")
        sharp = sharp or ratio > SHARP
        parts.append(
            f"{name}: {ratio:.2f} times ({own[1]['mean_kld']:.3g} to {own[-1]['mean_kld']:.3g}, "
            f"ΔPPL {own[1]['delta_percent']:+.2f}% to {own[-1]['delta_percent']:+.2f}%)"
        )
    return (
        f"{'yes' if sharp else 'no'}: KLD of the last quarter of {found['n_ctx']} tokens over that of the second "
        f"(sharp: above {SHARP:g}): {'; '.join(parts)}."
    )


def bound_verdict(found: dict[str, Any]) -> str:
    """(4) do FD ε and operator residuals predict measured errors?"""
    value = {(row["mode"], row["predictor"]): row["spearman"] for row in found["correlations"]}
    parts, known = [], []
    for mode in dict.fromkeys(mode for mode, _ in value):
        for predictor, words in (
            ("residual_k", "‖ΔK‖ to logit error"),
            ("epsilon_k", "ε of K to logit error"),
            ("residual_v", "‖ΔV‖ to output error"),
            ("epsilon_v", "ε of V to output error"),
        ):
            rho = value[mode, predictor]
            known.append(rho is not None and rho >= PREDICTS)
            parts.append(f"{words} {'none' if rho is None else format(rho, '.2f')} ({mode})")
    answer = "yes" if all(known) else "in part" if any(known) else "no"
    broken = found["logit_violations"] + found["output_violations"]
    return (
        f"{answer}: Spearman over {found['correlations'][0]['heads']} heads (predicts: from {PREDICTS:g}): "
        f"{', '.join(parts)}. Bounds violated {broken} times in {2 * found['checks']} checks at γ = 1; the paper's "
        f"logit bound at γ = √(r/d) {found['gamma_paper_violations']} times in {found['gamma_checks']}, with the "
        f"term that it leaves out {found['gamma_violations']} times."
    )


def domain_verdict(rows: Rows) -> list[str]:
    """Values behind r directions against static PCA, a line per text; all but the first are shifted."""
    lines = []
    texts = list(dict.fromkeys(row["text"] for row in rows))
    for text in texts:
        own = {row["name"]: row for row in rows if row["text"] == text and row["name"] != STATIC}
        static = next(row for row in rows if row["text"] == text and row["name"] == STATIC)
        parts = ", ".join(f"{name} {100 * row['change']:+.0f}%" for name, row in own.items())
        line = f"{text}: error of values behind {static['r']} directions, {static['error']:.3f} with {STATIC}: {parts}"
        if text != texts[0]:
            good = [name for name, row in own.items() if row["change"] <= TARGET and name != BEST]
            line += f"; {100 * TARGET:g}% or better: {', '.join(good) or 'none'}"
        lines.append(f"{line}.")
    return lines


QUESTIONS = (
    ("1", "is there r ≪ d with at most 1% more perplexity?"),
    ("2", "do adaptive bases beat static ones at matched bytes?"),
    ("3", "does quality degrade sharply with length despite chunking?"),
    ("4", "do FD ε and operator residuals predict measured errors?"),
)


def verdicts(results: Results) -> list[str]:
    """A line per falsifier: its question and the answer, or which experiment would give it; then a line per text."""
    pairs = [pair for name in ("matched", "domain") if name in results for pair in results[name]["pairs"]]
    answers = (
        rank_verdict(results["ranks"]) if "ranks" in results else _missing("ranks"),
        matched_verdict(pairs) if pairs else _missing("matched, domain"),
        length_verdict(results["length"]) if "length" in results else _missing("length"),
        bound_verdict(results["bounds"]) if "bounds" in results else _missing("bounds"),
    )
    lines = [f"({n}) {question} {answer}" for (n, question), answer in zip(QUESTIONS, answers, strict=True)]
    return lines + (domain_verdict(results["domain"]["reconstruction"]) if "domain" in results else [])


def _missing(name: str) -> str:
    return f"not measured here (experiments {name})."
