"""An unprepared model: `subkv chat` derives bases from its weights, or gives the reason for its f16 cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import virtual
from click.testing import CliRunner, Result

import subkv
from runtime import cli
from runtime.model import open_coded
from subkv.base.errors import CacheError, SubkvError
from subkv.engine.cache import CacheOptions, choose_cache, with_weight_bases
from subkv.engine.context import ContextOptions
from subkv.engine.llama import Llama
from subkv.format import metadata
from subkv.format.layout import Layout
from subkv.format.window import Window
from subkv.plan import datafree
from subkv.plan.pipeline import Options

Models = Callable[..., Path]
SHORT = ContextOptions(256, n_batch=64, n_ubatch=64, n_threads=1)


def chat(model: Path, *flags: Any) -> Result:
    arguments = ["chat", "-m", model, "-p", "Hi", "-st", "-n", 1, "-c", 512, *flags]
    return CliRunner().invoke(cli.main, [str(a) for a in arguments])


def test_chat_makes_bases(tiny_model: Models, cache_home: Path) -> None:
    model = tiny_model()
    first = chat(model)
    assert first.exit_code == 0, first.output
    cache, bases = first.stderr.splitlines()[:2]
    assert cache.startswith("KV cache: subkv, ")
    assert bases.startswith("bases: from the weights, 6.")
    assert "predicted as good as q8_0" in bases
    assert "; -ctk f16 uses none; " in bases
    assert f"`subkv convert {model}`" in bases
    (made,) = (cache_home / "subkv" / "sidecars").glob("*.weights.gguf")
    before = made.stat().st_mtime_ns
    assert chat(model, "-ctk", "auto").stderr.splitlines()[1] == bases
    assert chat(model, "-ctk", "subkv").stderr.splitlines()[1] == bases
    assert made.stat().st_mtime_ns == before
    with Layout(made) as layout:
        assert datafree.KV_BITS - 0.25 < layout.description["bits_per_element"] <= datafree.KV_BITS


def test_flags_of_the_window_are_for_them(tiny_model: Models) -> None:
    result = chat(tiny_model(), "--n-recent", 16)
    assert result.exit_code == 0, result.output
    assert "KV cache: subkv, " in result.stderr
    assert chat(tiny_model(), "--n-recent", 16, "-ctk", "f16").exit_code == 1


@pytest.mark.parametrize("flags", [("-ctk", "f16"), ("-ctk", "q8_0", "-ctv", "f16")])
def test_ordinary_caches_make_none(tiny_model: Models, cache_home: Path, flags: tuple[str, ...]) -> None:
    result = chat(tiny_model(), *flags)
    assert result.exit_code == 0, result.output
    assert "bases" not in result.stderr
    assert not cache_home.exists()


def test_bases_of_another_version_are_derived_again(
    tiny_model: Models, cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat(tiny_model())
    (made,) = (cache_home / "subkv" / "sidecars").glob("*.weights.gguf")
    with monkeypatch.context() as patch:
        patch.setattr(metadata, "generator", lambda: "subkv 0.0.1")
        datafree.sidecar(tiny_model(), made, Options(kv_bits=4.75, bpe_context=8192))
    assert "bases: from the weights, 6." in chat(tiny_model()).stderr


def test_a_model_that_has_no_use_for_them(tiny_model: Models) -> None:
    result = chat(tiny_model("mamba"))
    assert result.exit_code == 0, result.output
    why, cache, *rest = result.stderr.splitlines()
    assert why.startswith(
        "cache: f16; model mamba: subkv cannot hold its K/V cache because no layer of it has K/V heads"
    )
    assert "; use an ordinary cache type" not in why
    assert cache.startswith("KV cache: f16, ")
    assert "bases" not in "".join(rest)
    refused = chat(tiny_model("mamba"), "-ctk", "subkv")
    assert refused.exit_code == 1 and refused.stderr.startswith("-ctk: model mamba: subkv cannot hold its K/V cache")


def test_a_model_that_the_engine_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = virtual.write(tmp_path / "model.gguf", "llama-embed")
    with open_coded(model, 0, CacheOptions(), SHORT, Llama) as llm:
        assert llm.cache_choice.name == "f16"
    logged = capsys.readouterr().err.splitlines()[-1]
    assert logged.startswith(
        "cache: f16; model llama-embed: subkv cannot hold its K/V cache because its attention does"
    )
    with pytest.raises(CacheError, match="cannot hold its K/V cache because"):
        open_coded(model, 0, CacheOptions(type_k="subkv", type_v="subkv"), SHORT, Llama)


def test_errors_about_anything_else_are_errors(tiny_model: Models, tmp_path: Path) -> None:
    with pytest.raises(SubkvError) as error:
        open_coded(tiny_model(), 0, CacheOptions(), ContextOptions(1 << 30), Llama)
    assert error.value.key == "n_ctx"
    with pytest.raises(SubkvError) as error:
        open_coded(tmp_path / "none.gguf", 0, CacheOptions(), SHORT, Llama)
    assert error.value.key == "model_path"


def test_explicit_choices_stay(tiny_model: Models, coded_model: Models) -> None:
    for model, choice in (
        (tiny_model(), CacheOptions("q8_0")),
        (tiny_model(), CacheOptions(type_k="f16")),
        (tiny_model(), CacheOptions(bases=coded_model())),
        (coded_model(), CacheOptions(window=Window(n_recent=16))),
    ):
        assert with_weight_bases(model, choice) == (choice, "")


def test_other_programs_stay_with_f16(tiny_model: Models, cache_home: Path) -> None:
    with subkv.Llama(tiny_model(), n_ctx=256, verbose=False) as llm:
        assert llm.cache_choice.name == "f16"
    assert choose_cache(tiny_model()).name == "f16"
    assert not cache_home.exists()
