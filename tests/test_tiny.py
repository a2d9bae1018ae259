"""The tiny models have the properties that other tests assume: they load, decode, and attend to far tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tiny
from each import each
from gguf import GGUFReader, quants

from subkv.native import library as _lib

TEXT = b"The quick brown fox jumps over the lazy dog, and then it sleeps in the sun all day."


@pytest.fixture(scope="module")
def llama() -> Any:
    """llama_cpp's low-level functions, bound to our libllama."""
    _lib.load()
    from llama_cpp import llama_cpp

    llama_cpp.llama_backend_init()
    return llama_cpp


def outputs(c: Any, path: Path, encoder_only: bool, change: int = 0) -> npt.NDArray[np.float32]:
    """Logits of the last token of TEXT (pooled embedding of an encoder), after adding `change` to its second token."""
    model = c.llama_model_load_from_file(str(path).encode(), c.llama_model_default_params())
    assert model
    vocab = c.llama_model_get_vocab(model)
    tokens = (c.llama_token * len(TEXT))()
    n = c.llama_tokenize(vocab, TEXT, len(TEXT), tokens, len(TEXT), False, True)
    assert 0 < n < len(TEXT), "some pairs are merged"
    tokens[1] += change
    params = c.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 256
    params.embeddings = encoder_only
    ctx = c.llama_init_from_model(model, params)
    assert ctx
    batch = c.llama_batch_get_one(tokens, n)
    if encoder_only or c.llama_model_has_encoder(model):
        assert c.llama_encode(ctx, batch) == 0
    if not encoder_only and c.llama_model_has_encoder(model):
        start = (c.llama_token * 3)(c.llama_model_decoder_start_token(model), 5, 6)
        batch = c.llama_batch_get_one(start, 3)
    if encoder_only:
        found, size = c.llama_get_embeddings_seq(ctx, 0), c.llama_model_n_embd(model)
    else:
        assert c.llama_decode(ctx, batch) == 0
        found, size = c.llama_get_logits_ith(ctx, -1), c.llama_vocab_n_tokens(vocab)
    values = np.array(ctypes.cast(found, ctypes.POINTER(ctypes.c_float * size)).contents, np.float32)
    c.llama_free(ctx)
    c.llama_model_free(model)
    return values


@each("arch", tiny.ARCHS)
def test_far_tokens_matter(arch: str, tiny_model: Callable[..., Path], llama: Any) -> None:
    path = tiny_model(arch)
    encoder_only = arch == "bert"
    before = outputs(llama, path, encoder_only)
    assert np.isfinite(before).all()
    assert before.std() > 0.5
    assert np.array_equal(outputs(llama, path, encoder_only), before)
    assert np.abs(outputs(llama, path, encoder_only, change=7) - before).max() > 0.01


def test_seed_and_dimensions(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    first, again, other = (tiny.build(tmp_path / f"{i}.gguf", "llama", seed) for i, seed in enumerate((3, 3, 4)))
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()
    assert tiny_model("llama", 3) == tiny_model("llama", 3) != tiny_model("llama", 4)
    assert tiny_model("llama", n_layer=1).stat().st_size < first.stat().st_size < 2**20
    with pytest.raises(TypeError, match=r"expected dimensions of bloom, found \['n_embd', 'n_swa'\]"):
        tiny.build(tmp_path / "x.gguf", "bloom", n_swa=8, n_embd=64)


def test_quantized_weights_are_as_large_as_others(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    paths = tiny_model("llama"), tiny.build(tmp_path / "q.gguf", dtype="q4_0")
    names = ("blk.1.attn_q.weight", "blk.0.ffn_down.weight", "output.weight")
    for name in names:
        exact, coded = (next(t for t in GGUFReader(path).tensors if t.name == name) for path in paths)
        weights = quants.dequantize(coded.data, coded.tensor_type)
        assert (coded.tensor_type.name, weights.shape) == ("Q4_0", exact.data.shape)
        assert weights.std() == pytest.approx(exact.data.std(), rel=0.1)
