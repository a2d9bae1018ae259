"""Bits that are chosen when a cache opens, from one file with several plans: Python, programs, states, errors."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from each import each

import subkv
from converter.cli import main as convert
from runtime.launch.arguments import read
from runtime.launch.doors import Door
from runtime.launch.programs import ENDING
from runtime.launch.start import Program, _variables
from runtime.launch.variables import cache_variables
from subkv.base.errors import CacheError, SubkvError
from subkv.engine.cache import choose_cache, parse_cache
from subkv.engine.fitting import memory_size
from subkv.engine.request import CacheRequest
from subkv.format.metadata import read as described
from subkv.native.bases import DERIVED_BUDGETS
from subkv.native.paths import lib_dir

Models = Callable[..., Path]
TOKENS = list(range(3, 90))


@pytest.fixture(scope="session")
def planned(tiny_model: Models, calibration: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama with a layout of 8 bits and plans for 4.5 and 6."""
    path = tmp_path_factory.mktemp("planned") / "m.gguf"
    common = ["--kv-bits", "8", "--plans", "4.5,6", "--n-recent", "16", "--bpe-context", "8192"]
    arguments = [str(tiny_model()), "--bases", str(calibration), "-o", str(path), *common]
    result = CliRunner().invoke(convert, arguments)
    assert result.exit_code == 0, result.output
    return path


def opened(path: Path, **options: object) -> subkv.Llama:
    return subkv.Llama(path, n_ctx=256, n_threads=1, verbose=False, **options)  # type: ignore[arg-type]


def row_bytes(path: Path, **options: object) -> int:
    llm = opened(path, **options)
    n = llm.kv_stats().bytes_per_token
    llm.close()
    return n


def test_llama_takes_the_bits(planned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [row_bytes(planned, kv_bits=bits) for bits in (4.5, 6, 8)]
    assert sizes == sorted(set(sizes)) and row_bytes(planned) == sizes[2]
    assert row_bytes(planned, kv_cache="subkv:4.5") == row_bytes(planned, type_k="subkv:4.5") == sizes[0]
    monkeypatch.setenv("SUBKV_BITS", "6")
    assert row_bytes(planned) == sizes[1]
    assert row_bytes(planned, kv_bits=4.5) == sizes[0]  # more specific


def test_a_plan_answers_nearly_as_f16(planned: Path) -> None:
    """The matrices belong together: with wrong ones the errors would be as large as the logits."""
    errors = []
    for bits in (4.5, 6, 8):
        exact, coded = opened(planned, kv_cache="f16", logits_all=True), opened(planned, kv_bits=bits, logits_all=True)
        for llm in (exact, coded):
            llm.eval(TOKENS)
        a, b = (llm.scores[: len(TOKENS)] for llm in (exact, coded))
        errors.append(float(((a - b) ** 2).mean() / a.var()))
        exact.close()
        coded.close()
    assert errors[0] < 0.05 and errors[0] > errors[1] > 0


@each(
    ("options", "key", "reason"),
    [
        ({"kv_bits": 3}, "kv_bits", "expected 4.5, 6 or 8, for which "),
        *(
            ({"kv_bits": bits}, "kv_bits", f"expected bits per element, more than 0 and at most 64, found {bits:g}")
            for bits in (-1, 0, 65, float("nan"))
        ),
        ({"kv_cache": "subkv:3.25"}, "kv_bits", "found 3.25; `subkv convert MODEL --plans 3.25,4.5,6` adds it"),
        ({"kv_cache": "subkv:many"}, "kv_cache", "expected subkv:BITS with bits per element, such as subkv:3"),
        ({"kv_cache": "subkv:"}, "kv_cache", "expected subkv:BITS"),
        ({"kv_cache": "subkv:1e1"}, "kv_cache", "expected subkv:BITS"),
        ({"kv_cache": "subkv:6", "kv_bits": 8}, "kv_bits", "expected one number of bits per element, found 8 and 6"),
        ({"kv_cache": "f16", "kv_bits": 6}, "kv_bits", "expected a coefficient cache ('subkv'), found f16"),
        ({"type_k": "q8_0", "kv_bits": 6}, "kv_bits", "expected a coefficient cache ('subkv'), found q8_0"),
    ],
)
def test_refused(options: dict[str, object], key: str, reason: str, planned: Path) -> None:
    with pytest.raises(CacheError) as e:
        opened(planned, **options)
    assert e.value.key == key and reason in e.value.reason


def test_invalid_variable(planned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBKV_BITS", "three")
    with pytest.raises(CacheError, match="expected bits per element, such as 3 or 4.25, found 'three'") as e:
        choose_cache(planned)
    assert e.value.key == "SUBKV_BITS"


def test_bases_without_plans(tiny_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits that bases from the weights cannot have are refused, in a chat as well: f16 does not replace them."""
    model = Path(shutil.copy(tiny_model(), tmp_path / "m.gguf"))
    for options in (CacheRequest(kv_bits=3), CacheRequest("subkv:3")):
        with pytest.raises(CacheError, match="for bases from the weights of this model .*, found 3") as e:
            choose_cache(model, options)
        assert e.value.key == "kv_bits"
    monkeypatch.setenv("SUBKV_BITS", "3")
    with pytest.raises(CacheError, match="for bases from the weights of this model .*, found 3"):
        choose_cache(model)


def test_least_bits_of_derived_bases(tiny_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reason = r"expected \d+\.\d+ to \d+\.\d+ for bases from the weights of this model at 32768 tokens, found 3"
    with pytest.raises(CacheError, match=reason):
        choose_cache(tiny_model("deepseek2"), CacheRequest("subkv:3"))


def test_lists_of_caches(planned: Path) -> None:
    assert [parse_cache(name, planned).budget for name in ("subkv", "subkv:6", "subkv:4.5")] == [8.0, 6.0, 4.5]
    requested = CacheRequest(kv_bits=6)
    assert [parse_cache(name, planned, requested).budget for name in ("subkv", "f16")] == [6.0, 0.0]
    with pytest.raises(CacheError, match="expected 4.5, 6 or 8"):
        parse_cache("subkv:5", planned)


def test_states_of_another_budget(planned: Path) -> None:
    """The sentence names both budgets."""
    one, other = opened(planned, kv_bits=4.5), opened(planned)
    one.eval(TOKENS)
    state = one.save_state()
    with pytest.raises(SubkvError) as e:
        other.load_state(state)
    assert str(e.value) == "state: kv_bits: expected 8, found 4.5"
    del state.identity, state.checksum  # as saved by the parent class: libsubkv compares
    with pytest.raises(SubkvError) as e:
        other.load_state(state)
    expected = "a state of a cache of 8 bits per element expected, one of 4.5 bits found"
    assert expected in str(e.value) and "SUBKV_BITS=4.5" in str(e.value)
    other.close()
    again = opened(planned, kv_cache="subkv:4.5")
    again.load_state(state)
    again.close()
    one.close()


def test_variables_of_run(planned: Path) -> None:
    variables, notes = cache_variables([planned], CacheRequest(kv_bits=4.5))
    assert variables == {"SUBKV": "auto", "SUBKV_BITS": "4.5"} and "4.49 bits per element" in notes[0]
    with pytest.raises(CacheError, match="expected 4.5, 6 or 8"):
        cache_variables([planned], CacheRequest(kv_bits=5))
    for models in ([], [planned]):
        with pytest.raises(CacheError, match="more than 0 and at most 64, found 0"):
            cache_variables(models, CacheRequest(kv_bits=0))


def test_arguments_of_run() -> None:
    found = read("llama-server", ["-m", "m.gguf", "-ctk", "subkv:4.5"], {}, ["f16"])
    assert found.strict and not found.ordinary and found.coded_type == "subkv:4.5"
    assert read("llama-bench", ["-ctk", "f16,subkv,subkv:3,subkv:6"], {}, ["f16"]).coded_type == "subkv:3"
    assert read("llama-server", ["-ctk", "subkv"], {}, ["f16"]).coded_type == "subkv"


def test_description_names_the_plans(planned: Path) -> None:
    found = described(planned)
    assert [plan["budget"] for plan in found["plans"]] == [4.5, 6.0] and found["budget"] == 8.0
    for plan in found["plans"]:
        assert plan["budget"] - 0.1 < plan["bits_per_element"] <= plan["budget"]


def test_memory_chooses_the_budget(planned: Path) -> None:
    """The largest budget that fits, within the promised bytes; less memory gives fewer bits; too little is refused."""
    totals = []
    for bits in (8, 6, 4.5):
        llm = opened(planned, kv_bits=bits)
        stats = llm.kv_stats()
        totals.append(stats.bytes_kv + stats.bytes_bases)
        llm.close()
    for most, bits in ((totals[0], 8), (totals[0] - 1, 6), (totals[1], 6), (totals[1] - 1, 4.5), (totals[2], 4.5)):
        llm = opened(planned, kv_memory=most)
        stats = llm.kv_stats()
        assert llm.cache_choice.budget == bits and stats.bytes_kv + stats.bytes_bases <= most
        assert f"KV memory: {bits:g} bits per element, " in llm.cache_choice.fit
        assert llm.cache_choice.note == choose_cache(planned, CacheRequest("subkv", kv_bits=bits)).note
        llm.close()
    with pytest.raises(CacheError, match=r"for 256 tokens at the smallest budget of the bases, 4\.5 bits") as e:
        opened(planned, kv_memory=totals[2] - 1)
    assert e.value.key == "kv_memory" and e.value.reason.endswith("; the exact window and the bases alone take more")


@pytest.mark.parametrize("arch", ["gemma2", "gpt-oss", "deepseek2"])
def test_memory_of_other_caches(arch: str, tiny_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sliding windows and latent rows are counted to the byte, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, totals = tiny_model(arch), []
    for bits in DERIVED_BUDGETS:
        try:
            llm = opened(model, kv_cache="subkv", kv_bits=bits)
        except CacheError as error:
            assert error.key == "kv_bits" and bits == min(DERIVED_BUDGETS)
            continue  # less than the least of this model
        totals.append((llm.kv_stats().bytes_kv + llm.kv_stats().bytes_bases, llm.cache_choice.budget))
        llm.close()
    for i, (n_bytes, budget) in enumerate(totals):
        llm = opened(model, kv_memory=n_bytes)
        assert (llm.kv_stats().bytes_kv + llm.kv_stats().bytes_bases, llm.cache_choice.budget) == (n_bytes, budget)
        llm.close()
        if i == len(totals) - 1:
            with pytest.raises(CacheError, match="at the smallest budget of the bases"):
                opened(model, kv_memory=n_bytes - 1)


def test_memory_refusal_names_the_context(planned: Path) -> None:
    def opened_with(n_ctx: int, **options: object) -> subkv.Llama:
        return subkv.Llama(planned, n_ctx=n_ctx, n_threads=1, verbose=False, **options)  # type: ignore[arg-type]

    llm = opened_with(1024, kv_bits=4.5)
    stats = llm.kv_stats()
    llm.close()
    memory = stats.bytes_kv + stats.bytes_bases + 100
    with pytest.raises(CacheError, match="; -c 1024 would fit$"):
        opened_with(2048, kv_memory=memory)
    llm = opened_with(1024, kv_memory=memory)
    assert llm.cache_choice.budget == 4.5
    llm.close()


def test_memory_refusal_beside_sliding_layers(tiny_model: Callable[..., Path]) -> None:
    """Their cells are as many in a shorter context: the named one is the longest that fits."""
    model = tiny_model("gemma2", head_size=64, n_layer=4)

    def n_bytes(n_ctx: int) -> int:
        with subkv.Llama(model, n_ctx=n_ctx, n_batch=32, n_threads=1, verbose=False, kv_bits=least) as llm:
            return int(llm.kv_stats().bytes_all)

    least = DERIVED_BUDGETS[-2]  # fewer are impossible for this model
    memory = n_bytes(1024) + 100
    with pytest.raises(CacheError, match="at the smallest budget of the bases") as e:
        subkv.Llama(model, n_ctx=8192, n_batch=32, n_threads=1, verbose=False, kv_memory=memory)
    longest = int(re.search(r"; -c (\d+) would fit$", str(e.value))[1])  # type: ignore[index]
    assert n_bytes(longest) <= memory < n_bytes(longest + 256)


@each(
    ("value", "n_bytes"),
    [("2GiB", 2 << 30), ("1.5g", 3 << 29), ("512 MiB", 512 << 20), (4096, 4096), ("64kb", 1 << 16)],
)
def test_memory_sizes(value: str | int, n_bytes: int) -> None:
    assert memory_size(value) == n_bytes


@each("value", ["", "GiB", "-1", "0", "2 giga", "nan", "1e9", str(1 << 70), "9" * 400 + "g"])
def test_invalid_memory_sizes(value: str) -> None:
    with pytest.raises(CacheError, match="expected a size, such as 2GiB or 512MiB"):
        memory_size(value)


def test_memory_and_other_options(planned: Path) -> None:
    for options, reason in (
        ({"kv_bits": 6}, "expected either it or bits per element, found both"),
        ({"kv_cache": "subkv:6"}, "expected either it or bits per element, found both"),
        ({"kv_cache": "q8_0"}, "expected a coefficient cache ('subkv'), found q8_0"),
    ):
        with pytest.raises(CacheError) as e:
            opened(planned, kv_memory="1MiB", **options)
        assert (e.value.key, e.value.reason) == ("kv_memory", reason)


def test_memory_of_a_program(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`subkv run --kv-memory` sets SUBKV_BITS for the program's context."""

    def variables(*arguments: str, memory: str = "1GiB", name: str = "llama-server") -> dict[str, str]:
        given = read(name, ["-m", str(planned), *arguments], {}, ["f16"])
        program = Program(name, Path(name), {}, Door(None, ""))
        return _variables(program, given, CacheRequest(kv_memory=memory), False)

    assert variables("-c", "256")["SUBKV_BITS"] == "8"
    assert "KV memory: 8 bits per element, " in capsys.readouterr().err
    assert variables("-c", "4096", "-np", "1", memory="700KiB")["SUBKV_BITS"] in ("4.5", "6")
    with pytest.raises(CacheError, match="expected -m with one model and -c with its context size"):
        variables()
    with pytest.raises(CacheError, match="expected either it or bits per element"):
        variables("-c", "256", "-ctk", "subkv:6")
    with pytest.raises(CacheError, match=r"expected a coefficient cache \(-ctk subkv\), found f16"):
        variables("-c", "256", "-ctk", "f16", "-ctv", "f16", "-md", str(planned), "-ctkd", "subkv")
    with pytest.raises(CacheError, match="expected one of llama-server, .*, found llama-perplexity"):
        variables("-c", "256", name="llama-perplexity")


def test_lists_of_llama_bench(planned: Path) -> None:
    bench = lib_dir() / f"llama-bench{ENDING}"
    if not bench.is_file():
        pytest.skip("llama-bench: this build has none of llama.cpp's programs (-DSUBKV_PROGRAMS=ON)")
    command = [bench, "-m", planned, "-p", "32", "-n", "0", "-r", "1", "-t", "1", "-o", "json", "--no-warmup"]

    def run(*types: str) -> subprocess.CompletedProcess[str]:
        arguments = [*command, "-ctk", ",".join(types)]
        return subprocess.run(list(map(str, arguments)), capture_output=True, text=True, check=False)

    done = run("subkv:4.5", "subkv", "subkv:6", "f16")
    assert done.returncode == 0, done.stderr
    assert [row["type_k"] for row in json.loads(done.stdout)] == ["subkv:4.5", "subkv", "subkv:6", "f16"]
    done = run(*(f"subkv:{bits}" for bits in range(2, 8)))
    assert done.returncode != 0 and "at most 5 budgets (subkv:BITS) in one process expected" in done.stderr
