"""runtime.perplexity: llama-perplexity's numbers, KLD between caches, JSON fields, refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from each import each

from runtime.perplexity import main
from subkv.engine.llama import Llama

Models = Callable[..., Path]
N_CTX, CHUNKS = 64, 3
FIELDS = {"ppl", "ppl_stderr", "ppl_base", "mean_kld", "median_kld", "kld_999", "same_top", "type_k", "type_v", "bpe"}


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def ok(*arguments: Any) -> Any:
    result = run(*arguments, "-o", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def common(model: Path, text: Path) -> list[Any]:
    return ["-m", model, "-f", text, "-c", N_CTX, "--chunks", CHUNKS, "-t", 2]


@pytest.mark.parametrize("n_batch", [N_CTX, 24])
def test_perplexity_is_the_definition(tiny_model: Models, text_file: Path, n_batch: int) -> None:
    got, floor = ok(*common(tiny_model("llama"), text_file), "-b", n_batch, "--compare", "f16")
    assert (floor["name"], floor["flash_attn"]) == ("f16 (flash attention off)", "off")
    nll = []
    model = tiny_model("llama")
    with Llama(model, kv_cache="f16", n_ctx=N_CTX, n_batch=N_CTX, logits_all=True, verbose=False) as llm:
        tokens = llm.tokenize(text_file.read_bytes().removesuffix(b"\n"), add_bos=True, special=False)
        for chunk in range(CHUNKS):
            part = tokens[chunk * N_CTX : (chunk + 1) * N_CTX]
            feed = [llm.token_bos(), *part[1:]] if llm._model.add_bos_token() else part
            llm.reset()
            llm.eval(feed)
            for i in range(N_CTX // 2, N_CTX - 1):  # the second half predicts the tokens that follow
                row = llm.scores[i].astype(np.float64)
                nll.append(math.log(np.exp(row - row.max()).sum()) + row.max() - row[part[i + 1]])
    assert got["n_scored"] == len(nll) == CHUNKS * (N_CTX // 2 - 1)
    assert got["ppl"] == pytest.approx(math.exp(np.mean(nll)), rel=1e-3)
    assert got["ppl_stderr"] == pytest.approx(got["ppl"] * np.std(nll) / math.sqrt(len(nll) - 1), rel=1e-2)
    assert got["mean_kld"] is None
    assert got.keys() >= FIELDS
    assert (got["n_ctx"], got["chunks"], got["bpe"]) == (N_CTX, CHUNKS, 16)


def test_compare(tiny_model: Models, coded_model: Models, text_file: Path) -> None:
    caches = f"f16,f16,q8_0/q4_0,subkv,subkv:{coded_model('--kv-bits', '5', '--n-recent', '16')}"
    rows = ok(*common(coded_model(), text_file), "--compare", caches)
    base, same, mixed, int8, narrow, floor = rows
    assert base["mean_kld"] is None
    assert same["mean_kld"] == 0
    assert same["same_top"] == 1
    assert same["ppl"] == base["ppl"] == same["ppl_base"]
    assert (mixed["type_k"], mixed["type_v"]) == ("q8_0", "q4_0")
    assert int8["type_k"] == narrow["type_k"] == "subkv"
    assert 0 < int8["mean_kld"] < narrow["mean_kld"]
    assert int8["kv_bytes_per_token"] > narrow["kv_bytes_per_token"]
    assert floor["name"] == "f16 (flash attention off)"
    assert floor["mean_kld"] < 1e-3
    for row in rows[1:]:
        assert row["ppl_base"] == base["ppl"]
        assert row["delta_percent"] == pytest.approx(100 * (row["ppl"] / base["ppl"] - 1), abs=1e-6)
    (alone,) = ok(*common(coded_model(), text_file), "--compare", "subkv")
    assert alone["ppl"] == pytest.approx(int8["ppl"], rel=1e-6)


def test_compare_prints_a_table(tiny_model: Models, text_file: Path) -> None:
    result = run(*common(tiny_model("llama"), text_file), "--compare", "f16,q8_0")
    lines = result.stdout.splitlines()
    assert [line.split("|")[1].strip() for line in lines] == [
        "cache",
        "---",
        "f16",
        "q8_0",
        "f16 (flash attention off)",
    ]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert {len(row) for row in cells} == {9}
    assert [all(row[3:]) for row in cells[2:]] == [False, True, True], "the base has no KLD"
    assert "f16: KV cache: f16" in result.stderr


@each(
    ("arguments", "message"),
    [
        (["-f", "missing.txt"], "-f: expected a text file, found no file at missing.txt"),
        (["-f", "TEXT", "-c", "100000"], "-f: expected at least 200000 tokens for a context of 100000, found "),
        (["-f", "TEXT", "-c", "4"], "-c: expected a context of at least 8 tokens, found 4"),
        (["-f", "TEXT", "--compare", "q9"], "--compare: expected one of auto, subkv"),
        (["-f", "TEXT", "--compare", "q4_0", "-fa", "off"], "-fa: expected 'on' or 'auto'"),
        (
            ["-f", "TEXT", "--compare", "f16,subkv:missing.gguf"],
            "--compare: subkv:missing.gguf: missing.gguf: expected a GGUF file, found no such file",
        ),
        (["-f", "TEXT", "--bases", "MODEL"], "--bases: expected subkv.* keys"),
    ],
)
def test_errors(tiny_model: Models, text_file: Path, arguments: list[str], message: str) -> None:
    model = str(tiny_model("llama"))
    given = [{"TEXT": str(text_file), "MODEL": model}.get(a, a) for a in arguments]
    result = run("-m", model, *given)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith(message)


@pytest.mark.parametrize("arguments", [[], ["-f", "x", "--compare", "f16", "-ctk", "q8_0"]])
def test_usage(tiny_model: Models, arguments: list[str]) -> None:
    result = run("-m", tiny_model("llama"), *arguments)
    assert result.exit_code == 2


def test_a_file_that_is_no_text(tiny_model: Models, tmp_path: Path) -> None:
    file = tmp_path / "binary"
    file.write_bytes(b"text \xf5\x80\x80\x80" * 2000)
    result = run(*common(tiny_model("llama"), file))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"-f: {file}: expected UTF-8 text, found byte 0xf5 at 5\n"
