"""`convert` from a Hugging Face folder: llama.cpp's converter and quantizer, calibration in one command, refusals."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import pydoc_data.topics
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from gguf import GGMLQuantizationType, GGUFReader
from safetensors.numpy import save_file

from converter import hf
from converter.cli import default_output
from converter.cli import main as convert
from converter.quantize import TYPES
from subkv.base.errors import SubkvError
from subkv.engine.llama import Llama
from subkv.native.binding import C

N_VOCAB, N_EMBD, N_FF, N_LAYER, N_HEAD, N_HEAD_KV, HEAD = 400, 64, 128, 2, 4, 2, 32
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": N_VOCAB,
    "hidden_size": N_EMBD,
    "intermediate_size": N_FF,
    "num_hidden_layers": N_LAYER,
    "num_attention_heads": N_HEAD,
    "num_key_value_heads": N_HEAD_KV,
    "head_dim": HEAD,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def weights() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def matrix(n_out: int, n_in: int) -> Any:
        return (1.5 * rng.standard_normal((n_out, n_in)) / np.sqrt(n_in)).astype(np.float32)

    out = {"model.embed_tokens.weight": matrix(N_VOCAB, N_EMBD), "lm_head.weight": matrix(N_VOCAB, N_EMBD)}
    out["model.norm.weight"] = np.ones(N_EMBD, np.float32)
    for il in range(N_LAYER):
        sides = {"q": N_HEAD, "k": N_HEAD_KV, "v": N_HEAD_KV}
        layer = {f"self_attn.{name}_proj": matrix(n * HEAD, N_EMBD) for name, n in sides.items()}
        layer["self_attn.o_proj"] = matrix(N_EMBD, N_HEAD * HEAD)
        layer |= {f"mlp.{name}_proj": matrix(N_FF, N_EMBD) for name in ("gate", "up")}
        layer["mlp.down_proj"] = matrix(N_EMBD, N_FF)
        layer |= {f"{name}_layernorm": np.ones(N_EMBD, np.float32) for name in ("input", "post_attention")}
        out |= {f"model.layers.{il}.{name}.weight": value for name, value in layer.items()}
    return out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder without a tokenizer: enough for everything that is checked before a program runs."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights(), path / "model.safetensors")
    return path


@pytest.fixture
def complete(folder: Path) -> Path:
    """The folder with a SentencePiece tokenizer, since llama.cpp's converter accepts byte-level BPE only with known
    vocabularies.
    """
    for package in ("torch", "transformers", "sentencepiece"):
        pytest.importorskip(package, reason="extra torch")
    import sentencepiece

    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(pydoc_data.topics.topics.values())[:60000].split("\n")),
        model_writer=trained,
        vocab_size=N_VOCAB,
        byte_fallback=True,
        model_type="bpe",
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(trained.getvalue())
    return folder


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(convert, [str(a) for a in arguments])


def refused(result: Result, sentence: str, code: int = 1) -> None:
    assert result.exit_code == code, result.output
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(sentence), last
    assert "Traceback" not in result.output


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_one_command_from_folder_to_a_running_model(complete: Path, text_file: Path, tmp_path: Path) -> None:
    before = left(tmp_path)
    arguments = ["--quantize", "Q4_0", "-c", 128, "--chunks", 16, "--n-recent", 16, "-t", 1]
    result = run(complete, "-f", text_file, *arguments)
    assert result.exit_code == 0, result.output
    made = tmp_path / "model-Q4_0.subkv.gguf"
    assert left(tmp_path) == before | {made.name}
    steps = [line for line in result.stderr.splitlines() if line.startswith("step ")]
    assert steps == [
        f"step 1 of 4: llama.cpp's converter: {complete} to a GGUF, auto",
        "step 2 of 4: llama.cpp's quantizer: Q4_0",
        f"step 3 of 4: calibrate on {text_file.name}",
        "step 4 of 4: bases and layout",
    ]
    tensors = {t.name: t for t in GGUFReader(made).tensors}
    assert tensors["blk.0.attn_q.weight"].tensor_type == GGMLQuantizationType.Q4_0
    with Llama(made, n_ctx=256, verbose=False) as llm:
        assert llm.kv_stats().type_k == "subkv"
        assert llm.tokenize(b"The statement", add_bos=False)
        assert llm("The statement", max_tokens=4)["choices"][0]["text"]


def test_weights_arrive_as_they_are(complete: Path, calibration: Path, tmp_path: Path) -> None:
    """The calibration is another model's of the same shapes: only its shapes are looked at."""
    result = run(complete, "--bases", calibration, "--outtype", "f32", "--n-recent", 16, "-o", tmp_path / "o.gguf")
    assert result.exit_code == 0, result.output
    assert "step 2 of 2: bases and layout" in result.stderr
    tensors = {t.name: t.data for t in GGUFReader(tmp_path / "o.gguf").tensors}
    expected = weights()
    np.testing.assert_array_equal(tensors["output.weight"], expected["lm_head.weight"])
    np.testing.assert_array_equal(tensors["blk.1.ffn_up.weight"], expected["model.layers.1.mlp.up_proj.weight"])


def test_the_converters_own_sentence(complete: Path, calibration: Path, tmp_path: Path) -> None:
    (complete / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["NobodysForCausalLM"]}))
    before = left(tmp_path)
    result = run(complete, "--bases", calibration)
    refused(result, f"llama.cpp's converter refuses {complete}: Model NobodysForCausalLM is not supported")
    assert left(tmp_path) == before


def test_the_quantizers_own_sentence(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(tiny_model("llama").read_bytes()[:-1000])
    with pytest.raises(SubkvError, match="^quantize: llama.cpp's quantizer refuses Q8_0: failed to quantize: .*"):
        hf.to_quantized(damaged, "Q8_0", 1, tmp_path / "out.gguf")


def test_a_plain_model_is_calibrated_too(tiny_model: Callable[..., Path], text_file: Path, tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    shutil.copy(tiny_model("llama"), model)
    result = run(model, "-f", text_file, "-c", 128, "--chunks", 16, "--n-recent", 16, "-t", 1, "--embed")
    assert result.exit_code == 0, result.output
    assert left(tmp_path) == {"m.gguf", "m.subkv.gguf"}
    result = run(tiny_model("mamba"), "-f", text_file, "-c", 128, "--chunks", 2, "-o", tmp_path / "o.gguf")
    refused(
        result, f"{tiny_model('mamba')}: expected layers with an ordinary K/V cache, found none in this mamba model"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--quantize", "Q8_0", "--outtype", "q8_0"], "--quantize: expected weights of 16 or 32 bits to quantize, "),
        (["--sidecar"], "--sidecar: expected a GGUF as MODEL for a sidecar, found "),
        (["-o", "none/o.gguf"], "-o: cannot write none/o.gguf: "),
        (["-f", "none.txt"], "-f: expected a text file, found no file at none.txt"),
    ],
)
def test_refusals_before_any_program_runs(
    folder: Path, text_file: Path, arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "_run", None)
    monkeypatch.setattr(hf, "need_packages", lambda extra, names: None)
    given = [] if "-f" in arguments else ["-f", str(text_file)]
    refused(run(folder, *given, *arguments), sentence)
    assert left(folder.parent) == {"model"}


def test_texts_or_bases(folder: Path, text_file: Path, calibration: Path, tiny_model: Callable[..., Path]) -> None:
    both = "Error: expected --bases with a calibration or -f with text to calibrate on, found both"
    refused(run(folder, "-f", text_file, "--bases", calibration), both, code=2)
    assert run(folder, "-f", text_file, "--quantize", "Q9_K").exit_code == 2
    for flag, value in (("--outtype", "f16"), ("--quantize", "Q4_0")):
        result = run(tiny_model("llama"), "--bases", calibration, flag, value)
        refused(result, f"{flag}: expected a Hugging Face folder as MODEL, found ")


def test_folders_that_are_none(folder: Path, calibration: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not a header....")
    refused(run(folder, "--bases", calibration), f"{folder}/model.safetensors: expected a safetensors file, ")
    (folder / "model.safetensors").unlink()
    refused(run(folder, "--bases", calibration), "expected weights (model*.safetensors or pytorch_model*.bin) ")
    (folder / "config.json").unlink()
    sentence = f"expected a Hugging Face folder with config.json, found none in {folder}"
    refused(run(folder, "--bases", calibration), sentence)


def test_missing_packages_name_the_extra(folder: Path, calibration: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    result = run(folder, "--bases", calibration)
    refused(result, "expected the packages of the extra `torch`, found no torch")
    assert result.stderr.strip().endswith("pip install '.[torch]' in the clone of subkv")


def test_missing_disk_space_is_reported_with_sizes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * hf.MIB))
    n = 1 << 20  # weights: 2 MiB of 16 bits, 0.75 of Q4
    assert hf.count_weights(folder) == sum(value.size for value in weights().values())
    hf.check_space(folder / "o.gguf", n, "f16", "Q4_K_M", copy=True)  # 2.75 MiB
    hf.check_space(folder / "o.gguf", n, "f16", None, copy=False)
    for outtype, kind, copy, terms in (
        ("f16", None, True, "4 MiB free in DIR for 1.0 million weights (2 MiB as f16 + 2 MiB with bases)"),
        ("f32", "Q4_K_M", True, "5 MiB free in DIR for 1.0 million weights (4 MiB as f32 + 1 MiB as Q4_K_M)"),
        ("f16", "Q8_0", False, "3 MiB free in DIR for 1.0 million weights (2 MiB as f16 + 1 MiB as Q8_0)"),
    ):
        with pytest.raises(SubkvError) as error:
            hf.check_space(folder / "o.gguf", n, outtype, kind, copy)
        expected = f"output: expected about {terms}, found 3 MiB".replace("DIR", str(folder))
        assert str(error.value) == expected


def test_interrupts_leave_nothing(folder: Path, calibration: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(command: list[str], *_: str) -> None:
        Path(command[command.index("--outfile") + 1]).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(hf, "_run", interrupted)
    monkeypatch.setattr(hf, "need_packages", lambda extra, names: None)
    result = run(folder, "--bases", calibration)
    assert result.exit_code == 130
    assert result.stderr.strip().splitlines()[-1] == "interrupted: no bases were written"
    assert left(folder.parent) == {"model"}


PROGRAM = """
import os, sys, time
print(os.getpid(), "\\nWriting:  10%|#", file=sys.stderr, flush=True)
time.sleep(600)
"""


def test_an_interrupt_ends_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    class Bar:
        n = 0

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, n: int) -> None:
            raise KeyboardInterrupt

    popen = hf.subprocess.Popen

    def remember(*arguments: Any, **options: Any) -> Any:
        process = popen(*arguments, **options)
        started.append(process.pid)
        return process

    monkeypatch.setattr(hf.subprocess, "Popen", remember)
    monkeypatch.setattr(hf, "progress_bar", lambda *_: Bar())
    with pytest.raises(KeyboardInterrupt):
        hf._run([sys.executable, "-c", PROGRAM], "waiting", "model", "refused")
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ValueError('no such tensor')", "ValueError: no such tensor"),
        ("import os; os.kill(os.getpid(), 9)", "it was ended by signal 9"),
        ("raise SystemExit(3)", "exit status 3 without a reason"),
    ],
)
def test_reasons_of_programs(code: str, reason: str) -> None:
    with pytest.raises(SubkvError) as error:
        hf._run([sys.executable, "-c", code], "failing", "model", "refused")
    assert str(error.value) == f"model: refused: {reason}"


def test_quantizer_types_are_known_to_llama_cpp() -> None:
    assert all(hasattr(C, f"LLAMA_FTYPE_MOSTLY_{kind}") for kind in TYPES)


def test_default_names(tmp_path: Path) -> None:
    (tmp_path / "Model-1B").mkdir()
    assert default_output(tmp_path / "Model-1B") == tmp_path / "Model-1B.subkv.gguf"
    assert default_output(tmp_path / "Model-1B", quantize="Q4_K_M") == tmp_path / "Model-1B-Q4_K_M.subkv.gguf"
