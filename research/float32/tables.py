"""Markdown tables of what caches.result() returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def scores(results: Sequence[dict[str, Any]]) -> str:
    """Results as a Markdown table; columns for the bound and for chunks where a cache has any."""
    bound = any(r.get("bound_bpe") is not None for r in results)
    chunks = any(r["chunks_opened"] is not None for r in results)
    plans = any("kld_over_own" in r for r in results)
    lines = [
        "| text | cache | bpe | rows alone | Δ PPL | mean KLD | median KLD | 99.9% KLD | same top-1 | predicted KLD |"
        + (" over own file |" if plans else "")
        + (" above the bound |" if bound else "")
        + (" opened | refused | merged |" if chunks else ""),
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
        + ("---:|" if plans else "")
        + ("---:|" if bound else "")
        + ("---:|---:|---:|" if chunks else ""),
    ]
    for r in results:
        predicted = "" if r["predicted_kld"] is None else f"{r['predicted_kld']:.2g}"
        lines.append(
            f"| {r['text']} | {r['name']} | {r['bpe']:.2f} | {r['bpe_rows']:.2f} "
            f"| {r['delta_percent']:+.2f}% ± {100 * r['ppl_ratio_stderr']:.2f}% "
            f"| {r['mean_kld']:.3g} ± {r['mean_kld_stderr']:.1g} | {r['median_kld']:.2g} | {r['kld_999']:.2g} "
            f"| {100 * r['same_top']:.2f}% | {predicted} |{_over(r) if plans else ''}"
            f"{_above(r) if bound else ''}{_chunks(r) if chunks else ''}"
        )
    return "\n".join(lines)


def over_texts(results: Sequence[dict[str, Any]]) -> str:
    """A line per cache: mean KLD over the texts, each counted once, and the text on which it is worst."""
    lines = [
        "| cache | bpe | mean KLD of all texts | worst KLD | on | worst same top-1 |",
        "|---|---:|---:|---:|---|---:|",
    ]
    for name in dict.fromkeys(r["name"] for r in results):
        rows = [r for r in results if r["name"] == name]
        mean, worst = sum(r["mean_kld"] for r in rows) / len(rows), max(rows, key=lambda r: r["mean_kld"])
        lines.append(
            f"| {name} | {rows[0]['bpe']:.2f} | {mean:.3g} | {worst['mean_kld']:.3g} ± {worst['mean_kld_stderr']:.1g} "
            f"| {worst['text']} | {100 * min(r['same_top'] for r in rows):.2f}% |"
        )
    return "\n".join(lines)


def _over(r: dict[str, Any]) -> str:
    return f" {r['kld_over_own']:.3f} ± {r['kld_over_own_stderr']:.3f} |" if "kld_over_own" in r else " |"


def _above(r: dict[str, Any]) -> str:
    return " |" if r.get("bound_bpe") is None else f" {r['bpe'] - r['bound_bpe']:+.2f} |"


def _chunks(r: dict[str, Any]) -> str:
    counts = (r["chunks_opened"], r["chunks_refused"], r["chunks_merged"])
    return "".join(" |" if count is None else f" {count:.1f} |" for count in counts)
