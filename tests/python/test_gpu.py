"""Programs and Llama with all layers on a GPU: their reports, and states that a later CPU run restores."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from opening import prompt
from test_prompt_cache import answer

from runtime.perplexity import main
from subkv.engine.llama import Llama
from subkv.engine.stats import cache_line
from subkv.native.binding import C

Models = Callable[..., Path]

pytestmark = pytest.mark.skipif(
    not C.llama_supports_gpu_offload(), reason="no GPU, nor an emulated one (-DSUBKV_EMULATE_CUDA=ON)"
)


def opened(model: Path, n_gpu_layers: int, **options: Any) -> Llama:
    options = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False} | options
    return Llama(model, n_gpu_layers=n_gpu_layers, **options)


def test_the_cache_line_names_the_device(coded_model: Models) -> None:
    with opened(coded_model(), -1) as on_gpu, opened(coded_model(), 0) as on_cpu, opened(coded_model(), 2) as on_both:
        lines = [cache_line(llm.kv_stats()).rpartition("kernel ")[2] for llm in (on_gpu, on_cpu, on_both)]
    assert all(" on " in line and "(" in line for line in (lines[0], lines[2]))
    assert "(" not in lines[1]
    assert lines[2] == f"{lines[1]} and {lines[0]}"


def test_perplexity_is_the_cpus(coded_model: Models, text_file: Path) -> None:
    found = {}
    for n in (0, 99):
        arguments = ["-m", coded_model(), "-f", text_file, "-c", 64, "--chunks", 2, "-t", 1, "-ngl", n, "-o", "json"]
        result = CliRunner().invoke(main, [str(a) for a in [*arguments, "--compare", "f16,subkv"]])
        assert result.exit_code == 0, result.output
        found[n] = json.loads(result.stdout)
    for cpu, gpu in zip(found[0], found[99], strict=True):
        assert gpu["ppl"] == pytest.approx(cpu["ppl"], rel=5e-3), (cpu, gpu)


@pytest.mark.parametrize("layers", [(-1, 0), (0, -1)])
@pytest.mark.parametrize(("recent_bits", "evaluated"), [(16, 1), (10, 300)])
def test_gpu_and_cpu_share_prompt_caches_of_halves(
    coded_model: Models, tmp_path: Path, layers: tuple[int, int], recent_bits: int, evaluated: int
) -> None:
    model = coded_model("--codec", "int8", "--n-recent", "16", "--recent-bits", str(recent_bits))
    found = []
    for n_gpu_layers in (*layers, layers[0]):
        with opened(model, n_gpu_layers, n_ctx=1024, prompt_cache=tmp_path / "cache") as llm:
            found.append(answer(llm, prompt(300))[1])
    # the second one restores all but the last token from the first one's entry, or writes its own
    assert found == [300, evaluated, 1]
