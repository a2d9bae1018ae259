"""models/train_gpt2.py: the exported model equals torch's, for llama.cpp and for transformers."""

from __future__ import annotations

import importlib.util
import os
import pydoc_data.topics
import subprocess
import sys
from pathlib import Path
from typing import Any

import engine
import numpy as np
import pytest
from click.testing import CliRunner

SCRIPT = Path(__file__).resolve().parents[2] / "models" / "train_gpt2.py"
PROMPT = "It's 1,024 tokens — isn't it?\n\n  The class  statement, def f(x):\n\treturn x² # naïve 漢字\n" * 4
F32 = 0  # ggml's number of the type, for an exact cache


def run(*arguments: Any, blocked: str = "", ok: bool = True) -> str:
    """Runs the script in a new process, without the module `blocked`. Returns stdout, or stderr of a failure."""
    code = f"import sys, runpy\nif {blocked!r}: sys.modules[{blocked!r}] = None\n"
    code += f"sys.argv[0] = {str(SCRIPT)!r}\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONUTF8": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=600)
    assert (done.returncode == 0) == ok, done.stderr
    assert ok or done.returncode == 1, done.stderr
    return done.stdout if ok else done.stderr


@pytest.fixture(scope="module")
def torch() -> Any:
    """torch; skips where the extra `torch` is not installed."""
    for name in ("tokenizers", "transformers"):
        pytest.importorskip(name, reason=f"second model: {name} is not installed (pip install '.[torch]')")
    return pytest.importorskip("torch", reason="second model: torch is not installed (pip install '.[torch]')")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    topics = pydoc_data.topics.topics
    path.write_text("\n".join(topics[key] for key in sorted(topics))[:20_000], "utf-8")
    return path


@pytest.fixture(scope="module")
def trained(torch: Any, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """The GGUF, the folder for transformers and the summary of a training of two steps: one short, one full window."""
    folder = tmp_path_factory.mktemp("gpt2")
    summary = run("-f", text, "-o", folder / "m.gguf", "--hf", folder / "hf", "--steps", 2, "-t", 1)
    return folder / "m.gguf", folder / "hf", summary


@pytest.fixture(scope="module")
def script(torch: Any) -> Any:
    """The script as a module of this process."""
    spec = importlib.util.spec_from_file_location("train_gpt2", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt2"] = module  # where dataclasses look for a class's module
    spec.loader.exec_module(module)
    return module


def logits_of(path: Path, tokens: list[int]) -> engine.Logits:
    model = engine.Model(path)
    with engine.session(model, n_ctx=512, type_k=F32, type_v=F32) as s:
        out = s.decode(tokens)
    model.free()
    return out


def assert_same(torch: Any, ours: engine.Logits, model: Any, tokens: list[int]) -> None:
    """llama.cpp looks GELU up in a table of half-precision numbers: measured differences are 2e-4 of the spread."""
    with torch.inference_mode():
        theirs = model(input_ids=torch.tensor([tokens])).logits[0].float().numpy()
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).mean() < 1e-3 * theirs.std()
    assert np.abs(ours - theirs).max() < 2e-2 * theirs.std()


def test_llama_cpp_and_transformers_read_the_trained_model(torch: Any, trained: tuple[Path, Path, str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf, folder, summary = trained
    assert "held-out loss" in summary
    model = engine.Model(gguf)
    tokens = model.tokenize(PROMPT)
    model.free()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokens == tokenizer.encode(PROMPT)
    assert tokenizer.decode(tokens) == PROMPT
    assert_same(torch, logits_of(gguf, tokens), AutoModelForCausalLM.from_pretrained(folder).eval(), tokens)


def test_every_tensor_is_in_its_place(torch: Any, script: Any, trained: tuple[Path, Path, str], tmp_path: Path) -> None:
    """Weights as after a long training: attention is far from uniform, and every bias and norm is different."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(trained[1]).backend_tokenizer
    model = script.new_model(tokenizer.get_vocab_size()).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            mean, std = (1.0, 0.2) if ".ln_" in name and weight.ndim == 1 and name.endswith("weight") else (0.0, 0.08)
            weight.copy_(mean + std * torch.randn(weight.shape, generator=generator))
    script.write_gguf(tmp_path / "m.gguf", model, tokenizer, "random")
    tokens = torch.randint(tokenizer.get_vocab_size(), (300,), generator=generator).tolist()
    assert_same(torch, logits_of(tmp_path / "m.gguf", tokens), model, tokens)


def test_refusals(script: Any, text: Path, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine").touch()
    short = tmp_path / "short.txt"
    short.write_text("a few words\n" * 20)
    for arguments, expected in [
        (["-f", text, "--hf", tmp_path / "hf"], "--hf: expected a new or empty folder"),
        (["-f", tmp_path / "none"], "-f: expected a text file"),
        (["-f", short], "-f: expected at least 1025 tokens in the training part"),
    ]:
        done = CliRunner().invoke(script.main, [*map(str, arguments), "-o", str(tmp_path / "m.gguf")])
        assert done.exit_code == 1
        assert done.stderr.startswith(expected)
        assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize("missing", ["torch", "tokenizers", "transformers"])
def test_missing_packages_are_named(missing: str) -> None:
    error = run("-h", blocked=missing, ok=False)
    assert error.startswith("train_gpt2: expected torch, transformers and tokenizers")
    assert "pip install '.[torch]'" in error
    assert len(error.splitlines()) == 1
