"""SubspaceCache through Triton against itself in torch: prompts, decoding, padding, cropping; choice of kernels.

Without a GPU the kernels are interpreted, which takes a tenth of a second per encoded row of a head, so most tests here
encode in torch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton")

import test_subspace  # noqa: E402
from test_subspace import IDS, TOKENS, logits, rms  # noqa: E402

from subkv import SubspaceCache  # noqa: E402
from subkv.base.errors import CacheError  # noqa: E402
from subkv.format.window import Window  # noqa: E402
from subkv.torch import cache as subspace  # noqa: E402
from subkv.torch import kernels as torch_kernels  # noqa: E402
from subkv.torch import triton_kernels  # noqa: E402

build, llama = test_subspace.build, test_subspace.llama
CPU = torch.device("cpu")


def choose(device: Any, name: str | None = None) -> Any:
    """torch_kernels.choose without a trial."""
    return torch_kernels.choose(device, (None, None), name)


@pytest.fixture
def small(llama: tuple[Any, SubspaceCache]) -> tuple[Any, Any]:
    """A model, and bases with a window so small that short texts have coded cells."""
    model, cache = llama
    return model, dataclasses.replace(cache.bases, window=Window(1, 3).with_defaults())


@pytest.fixture
def encoding_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(codec: Any, x: Any, rows: Any, first: int) -> Any:
        ordinary = rows.new_empty(len(x), x.shape[2], codec.row_bytes)
        n_bad = torch_kernels.encode(codec, x, ordinary, 0)
        rows[:, first : first + x.shape[2]] = triton_kernels.tables(codec).from_rows(ordinary)
        return n_bad

    both = torch_kernels.side_by_side(encode)
    kernels = dataclasses.replace(choose(CPU, "triton"), encode=both)
    monkeypatch.setattr(subspace, "choose", lambda device, codecs, name: kernels if name else torch_kernels.IN_TORCH)


def in_both(model: Any, bases: Any, *arguments: Any) -> tuple[Any, Any, SubspaceCache]:
    """Logits through Triton and in torch, and the first one's cache."""
    cache = SubspaceCache(bases, kernel="triton")
    actual = logits(model, cache, *arguments)
    return actual, logits(model, SubspaceCache(bases), *arguments), cache


def check_close(actual: Any, expected: Any, exact: Any) -> None:
    """Rounding to halves changes logits far less than the codec does, although one change can affect a whole path."""
    assert rms(actual - expected) < 0.05 * rms(expected - exact)


def test_every_kernel_of_triton(small: tuple[Any, Any]) -> None:
    """Two rows, one padded; one of two layers is coded. Other tests crop, decode, and encode in torch."""
    model, bases = small[0], dataclasses.replace(small[1], layers={0: small[1].layers[0]})
    pad = 3
    ids = torch.tensor([TOKENS[:10], [0] * pad + TOKENS[: 10 - pad]])
    mask = torch.tensor([[1] * 10, [0] * pad + [1] * (10 - pad)])
    actual, expected, cache = in_both(model, bases, ids[:, :8], None, mask[:, :8])
    exact = logits(model, None, ids[:1, :8])
    check_close(actual[:1], expected[:1], exact)
    check_close(actual[1:, pad:], expected[1:, pad:], logits(model, None, ids[1:, pad:8]))
    assert cache.kv_stats().kernel == "triton"
    assert cache.kv_stats().n_zero_rows == 0
    other = SubspaceCache(bases)
    logits(model, other, ids[:, :8], None, mask[:, :8])
    for ours, theirs in zip(cache._coded, other._coded, strict=True):
        for name, codec in zip(("rows_k", "rows_v"), ours.codecs, strict=True):
            a, b = ours._tensors[name][:, :8], theirs._tensors[name][:, :8]
            a = triton_kernels.tables(codec).to_rows(a)
            assert float((a == b).float().mean()) > 0.97


def test_a_prompt_and_decoding(llama: tuple[Any, SubspaceCache], encoding_in_torch: None) -> None:
    model, cache = llama
    ids = IDS[:, :36]
    actual, expected, _ = in_both(model, cache.bases, ids, [30, 1, 1, 4])
    check_close(actual, expected, logits(model, None, ids))


def test_left_padding_and_a_tail_cropped(llama: tuple[Any, SubspaceCache], encoding_in_torch: None) -> None:
    model, cache = llama
    n, pads = 40, (9, 0)
    ids = torch.tensor([[0] * pad + TOKENS[: n - pad] for pad in pads])
    mask = torch.tensor([[0] * pad + [1] * (n - pad) for pad in pads])
    actual, expected, ours = in_both(model, cache.bases, ids, [n], mask)
    for row, other, pad in zip(actual, expected, pads, strict=True):
        check_close(row[pad:], other[pad:], logits(model, None, IDS[:, : n - pad])[0])
    ours.crop(-12)
    assert rms(logits(model, ours, ids[:, 28:], None, mask) - actual[:, 28:]) < 2e-3


def test_soft_caps_and_sliding_windows(build: Any, encoding_in_torch: None) -> None:
    model, cache, _ = build("gemma2")
    ids = IDS[:, 20:52]  # no rounding changes a whole path there, as it does for the first 32
    actual, expected, _ = in_both(model, cache.bases, ids)
    check_close(actual, expected, logits(model, None, ids))


def test_a_row_with_nan_has_the_scale_nan(small: tuple[Any, Any]) -> None:
    layer = SubspaceCache(small[1], kernel="triton").layers[0]
    k = torch.randn(1, layer.codecs[0].mean.shape[0], 2, layer.codecs[0].d)
    k[0, 0, 1, 0] = torch.nan
    layer.update(k, k)
    scales = layer._tensors["rows_k"][0, :, triton_kernels.tables(layer.codecs[0]).scales_at]
    assert scales[1] == 255
    assert 0 < scales[0] < 255
    assert layer.n_zero_rows == 2  # as key and as value


def test_choice_of_kernels(small: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SubspaceCache(small[1])
    assert cache.kv_stats().kernel == "none yet"
    logits(small[0], cache, IDS[:, :3])
    assert cache.kv_stats().kernel == "torch"
    with pytest.raises(CacheError, match="^kernel: expected 'torch', 'triton', 'cuda' or None, found 'opencl'$"):
        SubspaceCache(small[1], kernel="opencl")

    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    chosen: dict[Any, Any] = {}
    monkeypatch.setattr(torch_kernels, "_TRIED", chosen)
    monkeypatch.setattr(torch_kernels, "trial", lambda kernels, codecs, device: None)
    assert choose(gpu).name == "triton"
    assert choose(gpu, "torch").name == "torch"
    assert choose(CPU).name == "torch"
    chosen.clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    assert choose(gpu).name == "torch"
    with pytest.raises(CacheError, match="kernel: expected a device of compute capability 7.5 for 'triton', .* 6.1"):
        choose(gpu, "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(CacheError, match="expected a CUDA device or TRITON_INTERPRET=1 for 'triton', found device cpu"):
        choose(CPU, "triton")
    chosen.clear()
    monkeypatch.setattr(torch_kernels.importlib.util, "find_spec", lambda name: None)
    assert choose(gpu).name == "torch"
    with pytest.raises(CacheError, match="kernel: expected package triton for 'triton', found none"):
        choose(gpu, "triton")
