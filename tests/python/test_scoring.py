"""The mathematics of perplexity and KLD against definitions written out token by token, and the base file."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st

from converter import scoring
from subkv.base.errors import SubkvError

F32 = npt.NDArray[np.float32]


def logits(seed: int, n: int, n_vocab: int, spread: float = 3.0) -> F32:
    return (spread * np.random.default_rng(seed).standard_normal((n, n_vocab))).astype(np.float32)


def plain_log_softmax(row: F32) -> list[float]:
    top = max(float(x) for x in row)
    total = math.fsum(math.exp(float(x) - top) for x in row)
    return [float(x) - top - math.log(total) for x in row]


@pytest.mark.parametrize("n_threads", [1, 3])
def test_scores_follow_the_definitions(n_threads: int) -> None:
    n, n_vocab = 37, 50  # more than two pieces of work, the last one short
    x, base = logits(1, n, n_vocab), logits(2, n, n_vocab)
    targets = np.random.default_rng(3).integers(0, n_vocab, n).astype(np.int32)
    with ThreadPoolExecutor(n_threads) as pool:
        scores = scoring.score(x, targets, base, pool, n_threads)
    for i in range(n):
        p, q = plain_log_softmax(base[i]), plain_log_softmax(x[i])
        assert np.concatenate(scores.nll)[i] == pytest.approx(-q[targets[i]], rel=1e-12)
        assert np.concatenate(scores.nll_base)[i] == pytest.approx(-p[targets[i]], rel=1e-12)
        kld = math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
        assert np.concatenate(scores.kld)[i] == pytest.approx(kld, rel=1e-9)
        assert np.concatenate(scores.same)[i] == (np.argmax(p) == np.argmax(q))


def test_summary() -> None:
    rng = np.random.default_rng(5)
    nll, base, kld = rng.random(101) + 2, rng.random(101) + 2, rng.random(101)
    same = np.arange(101) % 4 > 0
    got = scoring.Scores([nll[:50], nll[50:]], [base], [kld], [same]).summary()
    assert got["ppl"] == pytest.approx(math.exp(nll.sum() / 101))
    variance = (nll**2).mean() - nll.mean() ** 2  # llama-perplexity: sqrt(var / (count - 1)) of the mean, times PPL
    assert got["ppl_stderr"] == pytest.approx(got["ppl"] * math.sqrt(variance / 100))
    assert got["ppl_ratio"] == pytest.approx(got["ppl"] / got["ppl_base"])
    errors = [(x**2).mean() - x.mean() ** 2 for x in (nll, base)]
    covariance = (nll * base).mean() - nll.mean() * base.mean()
    ratio_error = math.sqrt((errors[0] + errors[1] - 2 * covariance) / 100)  # llama-perplexity's error of the ratio
    assert got["ppl_ratio_stderr"] == pytest.approx(got["ppl_ratio"] * ratio_error)
    assert got["mean_kld"] == pytest.approx(kld.mean())
    assert got["median_kld"] == sorted(kld)[50]
    order = sorted(kld)
    assert got["kld_999"] == pytest.approx(order[99] + 0.9 * (order[100] - order[99]))
    assert got["same_top"] == same.mean()


def test_without_a_base_only_perplexity_is_known() -> None:
    got = scoring.Scores([np.array([1.0, 2.0])]).summary()
    assert got["ppl"] == pytest.approx(math.exp(1.5))
    assert got["ppl_base"] is got["mean_kld"] is got["same_top"] is None


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(2, 61), st.floats(0.0, 40.0))
def test_base_rows_keep_log_probabilities_within_half_a_step(seed: int, n: int, n_vocab: int, spread: float) -> None:
    x = logits(seed, n, n_vocab, spread)
    rows = scoring.encode_rows(x)
    assert rows.shape == (n, 2 * ((n_vocab + 1) // 2) + 4)
    exact = scoring.log_softmax(x)
    decoded = scoring.decode_rows(rows, n_vocab)
    reach = np.minimum(x.max(axis=1) - x.min(axis=1), scoring.CLIP)[:, None]
    near = x >= x.max(axis=1, keepdims=True) - scoring.CLIP
    step = reach / 65535
    assert (np.abs(decoded - exact)[near] <= np.broadcast_to(0.51 * step + 2e-5, exact.shape)[near]).all()
    assert (decoded[~near] >= exact[~near]).all()  # clipped from below


def test_rows_against_themselves() -> None:
    x = logits(9, 40, 300)
    targets = np.arange(40, dtype=np.int32)
    with ThreadPoolExecutor(1) as pool:
        got = scoring.score(x, targets, scoring.encode_rows(x), pool, 1).summary()
    assert abs(got["mean_kld"]) < 1e-5
    assert got["same_top"] == 1.0
    assert got["ppl_ratio"] == pytest.approx(1.0, abs=1e-4)


def write_base(path: Path, n_ctx: int = 16, n_vocab: int = 7, n_chunk: int = 2) -> bytes:
    tokens = np.arange(n_ctx * n_chunk, dtype=np.int32) % n_vocab
    n_rows = n_chunk * (n_ctx - 1 - n_ctx // 2)
    with open(path, "wb") as file:
        scoring.write_header(file, tokens, n_ctx, n_vocab, n_chunk)
        file.write(scoring.encode_rows(logits(1, n_rows, n_vocab)).tobytes())
    return path.read_bytes()


def test_base_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "base"
    write_base(path)
    reader = scoring.BaseReader(path)
    assert (reader.n_ctx, reader.n_vocab, reader.n_chunk, reader.n_rows) == (16, 7, 2, 7)
    assert reader.tokens.tolist() == [i % 7 for i in range(32)]
    np.testing.assert_array_equal(reader.read(14), scoring.encode_rows(logits(1, 14, 7)))
    reader.close()


@each(
    ("damage", "message"),
    [
        (lambda b: b"", "expected a file written by --kl-divergence-base"),
        (lambda b: b"_logitz_" + b[8:], "expected a file written by --kl-divergence-base, found b'_logitz_'"),
        (lambda b: b[:-1], "bytes, found"),
        (lambda b: b + b"x", "bytes, found"),
        (lambda b: b[:12] + b"\xff\xff\xff\xff" + b[16:], "n_ctx, n_vocab, n_chunk: expected positive"),
    ],
)
def test_damaged_base_files(tmp_path: Path, damage: object, message: str) -> None:
    path = tmp_path / "base"
    data = write_base(path)
    path.write_bytes(damage(data))  # type: ignore[operator]
    with pytest.raises(SubkvError, match=message):
        scoring.BaseReader(path)
