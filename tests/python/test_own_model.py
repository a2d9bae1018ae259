"""An unprepared model: `subkv chat` and `subkv.Llama` derive bases from its weights, or say why its cache is f16."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import derived_numpy
import numpy as np
import pytest
import virtual
from click.testing import CliRunner, Result
from each import each
from opening import last_logits, opened, prompt

from runtime import cli
from runtime.model import open_llama
from subkv.base.errors import CacheError, NoCodedCacheError, SubkvError
from subkv.engine.cache import CacheChoice, choose_cache, open_or_f16
from subkv.engine.context import ContextOptions
from subkv.engine.llama import Llama
from subkv.engine.request import CacheRequest
from subkv.format.layout import Layout
from subkv.format.window import Window
from subkv.native.bases import sidecar_path

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
    assert first.stderr.count("bits per element, ") == 1
    assert cache.startswith("KV cache: subkv, ")
    assert bases.startswith("bases: from the weights, 6.")
    assert "near q8_0's quality" in bases
    assert "; -ctk f16 uses none; " in bases
    assert f"`subkv convert {model}`" in bases
    assert chat(model, "-ctk", "auto").stderr.splitlines()[1] == bases
    assert chat(model, "-ctk", "subkv").stderr.splitlines()[1] == bases
    assert not cache_home.exists()
    with Layout(model, derived=True) as layout:
        assert derived_numpy.KV_BITS - 0.25 < layout.description["bits_per_element"] <= derived_numpy.KV_BITS


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


def test_a_model_that_has_no_use_for_them(tiny_model: Models) -> None:
    result = chat(tiny_model("mamba"))
    assert result.exit_code == 0, result.output
    cache, why, *rest = result.stderr.splitlines()
    assert why.startswith(
        "cache: f16; model mamba: subkv cannot hold its K/V cache because no layer of it has K/V heads"
    )
    assert "; use an ordinary cache type" not in why
    assert cache.startswith("KV cache: f16, ")
    assert "bases" not in "".join(rest)
    refused = chat(tiny_model("mamba"), "-ctk", "subkv")
    assert refused.exit_code == 1 and refused.stderr.startswith("-ctk: model mamba: subkv cannot hold its K/V cache")


REFUSED = "cache: f16; model llama-embed: subkv cannot hold its K/V cache because its attention does"


def test_a_model_that_the_engine_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = virtual.write(tmp_path / "model.gguf", "llama-embed")
    capsys.readouterr()
    with open_llama(model, 0, CacheRequest(), SHORT, Llama) as llm:
        assert llm.cache_choice.name == "f16"
        assert llm.cache_choice.line.startswith(REFUSED)
    assert capsys.readouterr().err == "", "the program prints the line"
    with pytest.raises(CacheError, match="cannot hold its K/V cache because"):
        open_llama(model, 0, CacheRequest(type_k="subkv", type_v="subkv"), SHORT, Llama)


def test_lists_of_caches_get_f16_as_well(tmp_path: Path) -> None:
    """Of `bench` and `perplexity`."""
    model = virtual.write(tmp_path / "model.gguf", "llama-embed")
    arguments = ["bench", "-m", str(model), "-ctk", "auto", "-p", "0", "-n", "1", "-d", "8", "-r", "1", "-o", "json"]
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 0, result.output
    assert f"\n{REFUSED}" in result.stderr and json.loads(result.stdout)[0]["type_k"] == "f16"
    arguments[4] = "subkv"
    assert CliRunner().invoke(cli.main, arguments).exit_code == 1


def test_errors_about_anything_else_are_errors(tiny_model: Models, tmp_path: Path) -> None:
    with pytest.raises(SubkvError) as error:
        open_llama(tiny_model(), 0, CacheRequest(), ContextOptions(1 << 30), Llama)
    assert error.value.key == "n_ctx"
    with pytest.raises(SubkvError) as error:
        open_llama(tmp_path / "none.gguf", 0, CacheRequest(), SHORT, Llama)
    assert error.value.key == "model_path"


def test_explicit_choices_stay(tiny_model: Models, coded_model: Models) -> None:
    for model, choice, name in (
        (tiny_model(), CacheRequest("q8_0"), "q8_0"),
        (tiny_model(), CacheRequest(type_k="f16"), "f16"),
        (tiny_model(), CacheRequest(bases=coded_model()), "subkv"),
        (tiny_model(), CacheRequest("subkv"), "subkv"),
        (tiny_model(), CacheRequest(kv_bits=4.25), "subkv"),
    ):
        chosen = choose_cache(model, choice)
        assert (chosen.name, chosen.automatic) == (name, False)
    chosen = choose_cache(coded_model(), CacheRequest(window=Window(n_recent=16)))
    assert (chosen.layout, chosen.window.n_recent, chosen.automatic) == (coded_model(), 16, True)
    assert not chosen.gain, "bases that somebody has prepared are not replaced by f16"


#
# subkv.Llama
#


@pytest.fixture
def model(tiny_model: Models, tmp_path: Path) -> Path:
    """A path that no other test of this process has opened."""
    return Path(shutil.copy(tiny_model(), tmp_path / "m.gguf"))


def test_llama_makes_bases(model: Path, cache_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr, once for this process and model; all processes derive the same bases, and write nothing."""
    with opened(model) as llm:
        assert llm.cache_choice.name == "subkv"
        got, fingerprint = last_logits(llm, prompt(100)), llm.fingerprint()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("KV cache: subkv, ") and " bits per element, " in line and "× smaller than f16" in line
    assert "; q8_0 takes less at 256 tokens; bases: from the weights, 6." in line
    assert f"; kv_cache='f16' uses none; `subkv convert {model}`: " in line
    with opened(model, kv_cache="subkv") as llm:
        np.testing.assert_array_equal(last_logits(llm, prompt(100)), got)
    code = "import sys, subkv; print(subkv.Llama(sys.argv[1], n_ctx=4096, verbose=False).fingerprint())"
    other = subprocess.run([sys.executable, "-c", code, model], capture_output=True, text=True, check=True)
    assert other.stdout == f"{fingerprint}\n" and other.stderr.count("\n") == 1
    assert "× than q8_0" in other.stderr and "takes less" not in other.stderr
    with opened(model):
        pass
    assert capsys.readouterr().err == "" and not cache_home.exists()


def test_verbose_says_it_each_time(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with opened(model, verbose=True):
            pass
        lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("KV cache: ")]
        assert len(lines) == 1 and "kv_cache='f16' uses none" in lines[0]


def test_prepared_bases_are_named(coded_model: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(shutil.copy(coded_model(), tmp_path / "m.gguf"))
    with opened(path):
        pass
    line = capsys.readouterr().err
    assert f"; bases: of {path}, " in line and line.endswith("; kv_cache='f16' uses none\n")


@each("options", [{"kv_cache": "f16"}, {"kv_cache": "q8_0"}, {"type_k": "f16"}, {"type_k": 1, "type_v": 1}])
def test_other_caches_are_as_in_llama_cpp(
    options: dict[str, Any], model: Path, cache_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(model, **options) as llm:
        assert llm.cache_choice.name == options.get("kv_cache", "f16")
    assert capsys.readouterr().err == "" and not cache_home.exists()


@each("options", [{"kv_cache": "subkv"}, {"kv_bits": 4.25}, {"kv_cache": "subkv:4.25"}, {"kv_memory": "64MiB"}])
def test_requested_bases_print_nothing(
    options: dict[str, Any], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(model, **options) as llm:
        assert llm.cache_choice.name == "subkv"
    assert capsys.readouterr().err == ""


@each("options", [{"embedding": True}, {"vocab_only": True}])
def test_where_no_bases_are_derived(
    options: dict[str, Any], model: Path, cache_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Embeddings read a cache once, and a vocabulary has none."""
    with opened(model, **options) as llm:
        assert llm.cache_choice.name == "f16"
    assert capsys.readouterr().err == "" and not cache_home.exists()


def test_the_reason_for_f16(tiny_model: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No K/V heads; an attention that the engine does not know; a context without cells."""
    cases = {
        shutil.copy(tiny_model("mamba"), tmp_path / "mamba.gguf"): "model mamba: subkv cannot hold its K/V cache",
        virtual.write(tmp_path / "embed.gguf", "llama-embed"): REFUSED.removeprefix("cache: f16; "),
        shutil.copy(tiny_model("bert"), tmp_path / "bert.gguf"): "expected a model with a K/V cache, found one without",
    }
    capsys.readouterr()
    for path, reason in cases.items():
        with opened(Path(path)) as llm:
            assert (llm.cache_choice.name, llm.kv_stats().type_k) == ("f16", "f16")
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith(f"cache: f16; {reason}") and "choose f16" not in line
            with pickle.loads(pickle.dumps(llm)) as other:
                assert other.cache_choice.name == "f16"
        with opened(Path(path)):
            pass
        assert capsys.readouterr().err == ""
        with pytest.raises(CacheError):
            Llama(path, kv_cache="subkv", verbose=False)
    with opened(tmp_path / "mamba.gguf") as llm:
        assert np.isfinite(last_logits(llm, prompt(40))).all()
    with pytest.raises(CacheError, match="kv_cache: model mamba: subkv cannot hold its K/V cache"):
        Llama(tmp_path / "mamba.gguf", n_recent=8, verbose=False)


def test_prepared_bases_are_not_replaced(tmp_path: Path) -> None:
    """Somebody has requested these; f16 in their place would be silent."""
    model = virtual.write(tmp_path / "embed.gguf", "llama-embed")
    derived_numpy.sidecar(model, sidecar_path(model))
    with pytest.raises(CacheError, match="kv_cache: model llama-embed: subkv cannot hold its K/V cache"):
        Llama(model, verbose=False)


def test_the_window_of_llama_is_for_derived_bases(model: Path) -> None:
    with opened(model, n_recent=16) as llm:
        assert (llm.kv_stats().type_k, llm.kv_stats().n_recent) == ("subkv", 16)


def test_copies_have_the_same_cache(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(model) as llm:
        capsys.readouterr()
        for again in (pickle.loads(pickle.dumps(llm)), copy.deepcopy(llm)):
            with again:
                assert again.fingerprint() == llm.fingerprint() is not None
    assert capsys.readouterr().err == ""


def test_bits_of_the_environment(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBKV_BITS", "4.25")
    with opened(model) as llm:
        assert llm.cache_choice.budget == pytest.approx(4.25)
    monkeypatch.setenv("SUBKV_BITS", "3")
    with pytest.raises(CacheError, match="for bases from the weights of this model .*, found 3"), opened(model):
        pass


def test_a_cache_folder_that_cannot_be_read(model: Path, cache_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has no bases of this user. The line about the derived ones says so."""
    folder = cache_home / "subkv" / "sidecars"
    folder.parent.mkdir(parents=True)
    folder.symlink_to(folder)
    with opened(model) as llm:
        assert llm.cache_choice.name == "subkv"
    (line,) = capsys.readouterr().err.splitlines()
    assert f"; no stored bases: {folder}: expected a readable path, found " in line


def test_memory_is_no_reason_for_a_larger_cache() -> None:
    """Only a model that the engine cannot code gets f16."""
    choice = CacheChoice("subkv", "subkv", 1, 1, Path("bases.gguf"), automatic=True, gain="convert")
    for error, falls_back in (
        (CacheError("kv_cache", "insufficient memory"), False),
        (NoCodedCacheError("kv_cache", "model x: subkv cannot hold its K/V cache", "choose f16"), True),
    ):
        names = []

        def opens(chosen: CacheChoice, error: CacheError = error, names: list[str] = names) -> None:
            names.append(chosen.name)
            if chosen.coded:
                raise error

        with contextlib.nullcontext() if falls_back else pytest.raises(CacheError):
            open_or_f16(choice, CacheRequest(), opens)
        assert names == (["subkv", "f16"] if falls_back else ["subkv"])


def test_a_model_that_is_removed_while_it_opens(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that names the file, never another cache."""

    def removed(*_: Any) -> None:
        model.unlink()

    with monkeypatch.context() as patch:
        patch.setattr("subkv.engine.llama.require_memory", removed)
        with pytest.raises(SubkvError, match="does not exist") as error, opened(model):
            pass
    assert str(model) in str(error.value)


def test_one_file_is_announced_once(model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "link.gguf").symlink_to(model)
    for path in (model, tmp_path / "link.gguf", Path(os.path.relpath(model))):
        with opened(path):
            pass
    assert capsys.readouterr().err.count("\n") == 1


def test_a_stderr_that_fails(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def write(self, _: str) -> None:
            raise RuntimeError("closed")

    monkeypatch.setattr(sys, "stderr", Broken())
    with opened(model) as llm:
        assert llm.cache_choice.name == "subkv"


def test_split_models_share_their_bases(tiny_model: Models) -> None:
    whole, first = tiny_model(), tiny_model(split_tensors=6)
    with opened(whole) as one, opened(first) as other:
        assert one.fingerprint() == other.fingerprint() is not None
        np.testing.assert_array_equal(last_logits(one, prompt(60)), last_logits(other, prompt(60)))


def test_without_stderr(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As in a program of Windows without a console."""
    monkeypatch.setattr(sys, "stderr", None)
    with opened(model) as llm:
        assert llm.cache_choice.name == "subkv"
    assert capsys.readouterr().out == ""
