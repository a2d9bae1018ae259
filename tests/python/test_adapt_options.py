"""--adapt and related options: valid and invalid values, and the same effect in every program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from adaptive_build import adaptive_only
from each import each

from subkv.base.errors import SubkvError
from subkv.format import adapt
from subkv.format.adapt import Adapt, parse


@adaptive_only
def test_parsed_values() -> None:
    assert parse("v") == ("v", Adapt())
    assert parse("v,window=256,lookahead=128") == ("v", Adapt(window=256, lookahead=128))
    assert parse("kv,length=256,gain=0.5,kind=fd") == ("kv", Adapt(length=256, gain=0.5, kind="fd"))


@adaptive_only
@each(
    ("text", "message"),
    [
        ("", "expected k, v or kv, found ''"),
        ("q", "expected k, v or kv, found 'q'"),
        ("v,size=3", "expected one of kind, rank, .*, found 'size'"),
        ("v,length=x", "length: expected a number, found 'x'"),
        ("v,length=0", "length: expected at least 1 token, found 0"),
        ("v,window=0", "window: expected at least 1 token, found 0"),
        ("v,lookahead=-1", "lookahead: expected at least 1 token, found -1"),
        ("v,lookahead=x", "lookahead: expected a number, found 'x'"),
        ("v,tau=0", "tau: expected a relative residual between 0 and 1, found 0"),
        ("v,tau=1", "tau: expected a relative residual between 0 and 1, found 1"),
        ("v,tau=nan", "tau: expected a number, found 'nan'"),
        ("v,kind=svd", "kind: expected one of covariance, fd, oja, found 'svd'"),
    ],
)
def test_bad_text(text: str, message: str) -> None:
    with pytest.raises(SubkvError, match=message):
        parse(text)


LONG = [10 + (7 * i + i * i) % 200 for i in range(300)]


def chunks(path: Path, **options: str) -> tuple[int, int]:
    """Adaptive bases alive and their bytes after a text, in subkv.Llama."""
    from subkv.engine.llama import Llama

    llm = Llama(path, n_ctx=512, n_threads=2, n_threads_batch=2, n_recent=32, n_rollback=8, verbose=False, **options)
    try:
        llm.eval(LONG)
        stats, layers = llm.kv_stats(), llm.adapt_stats()
        assert stats.n_chunks == sum(layer.n_chunks for layer in layers)
        assert all(layer.side == "v" and 0.0 < min(layer.residuals) < 1.0 for layer in layers)
        return stats.n_chunks, stats.bytes_chunks
    finally:
        llm.close()


ADAPT = "v,block=16,length=64,warm=64,gain=100"


@adaptive_only
def test_llama_follows_the_text(coded_model: Callable[..., Path]) -> None:
    path = coded_model("--n-recent", "32", "--kv-bits", "8")
    assert chunks(path) == (0, 0)
    found, n_bytes = chunks(path, adapt=ADAPT)
    assert found > 0 and n_bytes > 0


@adaptive_only
def test_an_option_overrides_the_files_default(coded_model: Callable[..., Path]) -> None:
    path = coded_model("--n-recent", "32", "--kv-bits", "8", "--adapt", ADAPT)
    assert chunks(path)[0] > 0
    assert chunks(path, adapt="none") == (0, 0)


@adaptive_only
def test_refusals_name_the_argument(coded_model: Callable[..., Path], tiny_model: Callable[..., Path]) -> None:
    from subkv.base.errors import CacheError
    from subkv.engine.llama import Llama

    with pytest.raises(CacheError, match="adapt: expected k, v or kv, found 'x'"):
        chunks(coded_model("--n-recent", "32", "--kv-bits", "8"), adapt="x")
    with pytest.raises(CacheError, match="block: expected at most n_recent less n_rollback, 24, .* found 32"):
        chunks(coded_model("--n-recent", "32", "--kv-bits", "8"), adapt="v")
    with pytest.raises(CacheError, match="adapt: expected a coefficient cache"):
        Llama(tiny_model("llama"), kv_cache="f16", adapt="v", verbose=False)


def test_a_cache_by_name(coded_model: Callable[..., Path], tiny_model: Callable[..., Path]) -> None:
    from subkv.base.errors import CacheError
    from subkv.engine.cache import parse_cache

    path = coded_model("--n-recent", "32", "--kv-bits", "8")
    assert parse_cache("subkv", path).window.adapt == "none"
    assert parse_cache("subkv+v;length=64", path).window.adapt == "v,length=64"
    assert parse_cache(f"subkv:{path}+kv", tiny_model("llama")).window.adapt == "kv"
    with pytest.raises(CacheError, match="kv_cache: expected a coefficient cache before '\\+v', found 'f16\\+v'"):
        parse_cache("f16+v", path)


def test_a_build_without_adaptive_bases(
    coded_model: Callable[..., Path], tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence for --adapt, static bases otherwise."""
    if adapt.has_adaptive_bases():  # Python's part
        adapt._subkv.cache_clear()
        monkeypatch.setattr(adapt, "has_adaptive_bases", lambda: False)
        with pytest.raises(SubkvError, match=r"adapt: expected a build with adaptive bases, found one without \(-DSUB"):
            parse("v")
        assert adapt.adapt_stats(None, 3) == []
        return
    path = coded_model("--n-recent", "32", "--kv-bits", "8")
    assert chunks(path) == chunks(path, adapt="none") == (0, 0)
    with pytest.raises(SubkvError, match="adapt: expected none, since this build has no adaptive bases .* found 'v'"):
        chunks(path, adapt="v")
    with pytest.raises(AssertionError, match="--adapt: expected a build with adaptive bases"):  # convert ends with 1
        coded_model("--n-recent", "32", "--kv-bits", "8", "--adapt", "v")
