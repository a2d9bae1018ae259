"""The tracker of errors on the tiny model: measured errors are within the bounds, and vanish with exact codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from each import each

from research.experiments import live, tracker

N_RECENT = 48
PAIRS = [(error, bound) for error, bound, _ in live.MEASURED[:3]] + list(live.STEPS.items())
CONVERT = ("--n-recent", str(N_RECENT), "--kv-bits", "4")
FD = "kv,block=16,length=32,warm=32,kind=fd,rank=8,rows=16,max_chunks=40,gain=1"  # its sketches are never freed
MERGED = "kv,block=16,length=32,warm=32,gain=100,max_chunks=2,reuse=0,merge=1"


@pytest.fixture
def measure(tiny_model: Callable[..., Path], text_file: Path, tmp_path: Path) -> Callable[..., Result]:
    """measure(BASES, …): the program on the tiny model, lines to errors.jsonl."""

    def run(bases: Path, *arguments: str) -> Result:
        given = ["-m", str(tiny_model("llama")), "--bases", str(bases), "-f", str(text_file), "-t", "1"]
        return CliRunner().invoke(
            tracker.main, [*given, "-c", "320", "--every", "100", "-o", str(tmp_path / "errors.jsonl"), *arguments]
        )

    return run


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "errors.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("adapt", [None, FD, MERGED])
def test_errors_lie_within_their_bounds(
    adapt: str | None, measure: Callable[..., Result], coded_model: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "errors.png"
    more = [] if adapt is None else ["--adapt", adapt]
    result = measure(coded_model(*CONVERT), "--plot", str(picture), *more)
    assert result.exit_code == 0, result.output
    found = lines(tmp_path)
    assert [(line["position"], line["layer"], line["head"]) for line in found] == [
        (position, layer, head) for position in (99, 199, 299, 319) for layer in range(2) for head in range(2)
    ]
    for line in found:
        assert line["coded"] == line["position"] + 1 - 4 - N_RECENT
        assert line["violations"] == 0
        for error, bound in PAIRS:
            assert 0.0 < line[error] <= line[bound] * 1.000001
        assert 0.0 < line["kernel_error"] < 0.1 * line["output_error"]
        for side in "kv":
            if adapt == FD:
                assert 0.0 < line[f"sketch_error_{side}"] <= line[f"epsilon_{side}"]
            else:
                assert line[f"sketch_error_{side}"] is line[f"epsilon_{side}"] is None
    chunks = {line["chunks_v"] for line in found if line["position"] == 319}
    assert chunks == {1} if adapt is None else max(chunks) > 1
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert "16 lines; bounds violated 0 times" in result.stdout
    assert ("epsilon_k with logit_error" in result.stdout) == (adapt == FD)


def test_exact_codes_have_no_errors(
    measure: Callable[..., Result], coded_model: Callable[..., Path], tmp_path: Path
) -> None:
    """16-bit coefficients: only the rounding to halves remains."""
    bases = coded_model("--n-recent", str(N_RECENT), "--kv-bits", "16", "--bpe-context", "1000000")
    assert measure(bases).exit_code == 0
    for line in lines(tmp_path):
        assert line["logit_error"] < 0.02 and line["weight_error"] < 0.01
        assert line["output_error"] < 1e-3 * line["output_bound"] / line["weight_bound"] + 0.01


def test_adaptive_default_of_the_file(
    measure: Callable[..., Result], coded_model: Callable[..., Path], tmp_path: Path
) -> None:
    assert measure(coded_model(*CONVERT, "--adapt", FD)).exit_code == 0
    assert lines(tmp_path)[0]["epsilon_v"] is not None
    assert measure(coded_model(*CONVERT, "--adapt", FD), "--adapt", "none").exit_code == 0
    assert lines(tmp_path)[0]["epsilon_v"] is None


@each(
    ("given", "sentence"),
    [
        (["-c", "100000"], "-f: expected at least 100000 tokens, found "),
        (["-c", "40"], "-c: expected more tokens than the exact window holds, found 40"),
        (["-f", "no.txt"], "-f: expected a text file, found no file at no.txt"),
        (["--adapt", "q"], "--adapt: expected k, v or kv, found 'q'"),
        (["-o", "no/such/errors.jsonl"], "-o: "),
    ],
)
def test_refuses(
    given: list[str],
    sentence: str,
    measure: Callable[..., Result],
    coded_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    result = measure(coded_model(*CONVERT), *given)
    assert result.exit_code == 1, result.output
    assert sentence in result.stderr and "Traceback" not in result.output
    assert not (tmp_path / "errors.jsonl").exists()


def test_refuses_without_bases(tiny_model: Callable[..., Path], text_file: Path, tmp_path: Path) -> None:
    model = str(tiny_model("llama"))
    given = ["-m", model, "--bases", model, "-f", str(text_file), "-o", str(tmp_path / "errors.jsonl")]
    result = CliRunner().invoke(tracker.main, given)
    assert result.exit_code == 1 and "expected subkv.* keys " in result.stderr
