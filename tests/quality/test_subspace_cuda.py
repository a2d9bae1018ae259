"""SubspaceCache on libsubkv's kernels for CUDA, on emulated GPUs (tests/kernels/emulated), against itself in torch."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import cuda_ops  # noqa: E402
import layers  # noqa: E402
import ops as o  # noqa: E402
import test_subspace  # noqa: E402
from test_subspace import IDS, TOKENS, rms  # noqa: E402

from subkv import SubspaceCache  # noqa: E402
from subkv.base.errors import CacheError  # noqa: E402
from subkv.format.window import Window  # noqa: E402
from subkv.native import library  # noqa: E402
from subkv.torch import cache as subspace  # noqa: E402
from subkv.torch import cuda_kernels  # noqa: E402
from subkv.torch import kernels as torch_kernels  # noqa: E402
from subkv.torch.attend import Logits  # noqa: E402

build, llama = test_subspace.build, test_subspace.llama
CPU = torch.device("cpu")
FEW = cuda_ops.DECODE_TOKENS
Build = Callable[[str], tuple[Any, SubspaceCache, Any]]


@pytest.fixture(scope="module", params=["emulated", "native"])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL | None:
    """The emulated kernels; None: those of libsubkv, on a GPU."""
    if request.param == "native":
        if not torch.cuda.is_available() or cuda_kernels.lacking():
            pytest.skip("no GPU that PyTorch sees, or libsubkv was built without CUDA: the kernels run on the CPU only")
        return None
    built = cuda_ops.build_emulated(tmp_path_factory.mktemp("subspace"))
    return library.declare(built.lib, {**cuda_kernels.SIGNATURES, "subkv_last_error": (ctypes.c_char_p, [])})


@pytest.fixture(autouse=True)
def device(kernels: ctypes.CDLL | None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of models and tensors. On the CPU "cuda" chooses the emulated kernels."""
    if kernels is None:
        return torch.device("cuda")
    ours = torch_kernels.Kernels(
        "cuda", cuda_kernels.row_bytes, lambda *arguments: cuda_kernels.encode(*arguments), cuda_kernels.attend
    )
    monkeypatch.setattr(cuda_kernels, "native", lambda: kernels)
    monkeypatch.setattr(library, "last_error", lambda: (kernels.subkv_last_error() or b"").decode())
    in_torch = torch_kernels.IN_TORCH
    monkeypatch.setattr(subspace, "choose", lambda device, codecs, name: ours if name == "cuda" else in_torch)
    return CPU


@pytest.fixture
def encoding_in_torch(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of torch's rows, because a difference of rounding may change a whole path."""

    def encode(codecs: Any, x: Any, rows: Any, first: int) -> Any:
        ordinary = tuple(
            part.new_empty(len(part), x[0].shape[2], codec.row_bytes) for codec, part in zip(codecs, rows, strict=True)
        )
        n_bad = torch_kernels.IN_TORCH.encode(codecs, x, ordinary, 0)
        for value, (codec, new, of_cells) in enumerate(zip(codecs, ordinary, rows, strict=True)):
            side = side_of(codec, bool(value))
            for sequence, cells in zip(new, of_cells, strict=True):
                all_rows = side.to_rows(cells.cpu().numpy().reshape(-1, o.TILE * codec.row_bytes))
                all_rows[first : first + len(sequence)] = sequence.cpu().numpy()
                cells[:] = torch.from_numpy(side.to_tiles(all_rows)).view_as(cells)
        return n_bad

    monkeypatch.setattr(cuda_kernels, "encode", encode)


@pytest.fixture
def small(llama: tuple[Any, SubspaceCache]) -> tuple[Any, Any]:
    """A model, and bases with a window so small that short texts have coded cells."""
    model, cache = llama
    return model, dataclasses.replace(cache.bases, window=Window(1, 3).with_defaults())


def logits(device: Any, model: Any, cache: Any, ids: Any, splits: Any = None, mask: Any = None) -> Any:
    """Those of test_subspace, on a device."""
    of_device = None if mask is None else mask.to(device)
    return test_subspace.logits(model.to(device), cache, ids.to(device), splits, of_device).cpu()


def check(device: Any, model: Any, bases: Any, ids: Any, splits: Any, mask: Any = None) -> SubspaceCache:
    """The kernels change logits far less than the codec does, although one change can affect a whole path."""
    cache = SubspaceCache(bases, kernel="cuda")
    actual = logits(device, model, cache, ids, splits, mask)
    expected = logits(device, model, SubspaceCache(bases, kernel="torch"), ids, splits, mask)
    exact = logits(device, model, None, ids, None, mask)
    seen = torch.tensor(True) if mask is None else mask[:, :, None].bool()
    assert torch.isfinite(actual).all()
    error, of_codec = (torch.where(seen, x - expected, 0.0) for x in (actual, exact))
    assert 0 < rms(error) < 0.05 * rms(of_codec)
    return cache


class Layers:
    """The same coded layer twice, on libsubkv's kernels and in torch, fed with the same random tensors."""

    def __init__(self, bases: Any, device: Any, batch: int) -> None:
        self.device, self.batch, self.n_cells = device, batch, 0
        self.layers = [SubspaceCache(bases, kernel=kernel)._coded[0] for kernel in ("cuda", "torch")]
        self.codec = self.layers[0].codecs[0]
        self.n_head_kv = len(self.codec.bands)
        self.rng = torch.Generator().manual_seed(batch)

    def random(self, n_head: int, n: int) -> Any:
        return torch.randn(self.batch, n_head, n, self.codec.d, generator=self.rng)

    def attend(self, n: int, params: Logits, pads: Sequence[int] = ()) -> None:
        """n more tokens, of whose sequences the first cells are padding: the outputs are equal, but for rounding."""
        k, v, q = self.random(self.n_head_kv, n), self.random(self.n_head_kv, n), self.random(2 * self.n_head_kv, n)
        self.n_cells += n
        mask = None
        if pads:
            j = torch.arange(self.n_cells)
            mask = (j <= j[-n:, None]) & (j >= torch.tensor(pads)[:, None, None])
        outputs = []
        for layer in self.layers:
            of_device = None if mask is None else mask.to(self.device)
            layer.update(k.to(self.device), v.to(self.device))
            outputs.append(layer.attend(q.to(self.device), of_device, params).cpu())
        actual, expected = outputs
        assert 0 < rms(actual - expected) < 1e-3 * rms(expected)

    def crop(self, n: int) -> None:
        self.n_cells -= n
        for layer in self.layers:
            layer.crop(-n)


def test_rows_are_those_of_torch(small: tuple[Any, Any], device: Any) -> None:
    """The same bytes in another order."""
    caches = [SubspaceCache(small[1], kernel=kernel) for kernel in ("cuda", "torch")]
    rng = np.random.default_rng(1)
    for layer, other in zip(*(cache._coded for cache in caches), strict=True):
        k, v = layer.codecs
        x = torch.tensor(rng.standard_normal((2, len(k.bands), 70, k.d)), dtype=torch.float16, device=device).float()
        for of in (layer, other):
            of.update(x, x)
        for codec, name in ((k, "rows_k"), (v, "rows_v")):
            found, expected = (of._tensors[name].cpu().numpy() for of in (layer, other))
            side = side_of(codec, name == "rows_v")
            found = np.stack([side.to_rows(of.reshape(-1, o.TILE * codec.row_bytes)) for of in found])
            assert np.mean(found[:, :70] == expected[:, :70]) > 0.97  # rounding moves some coefficients, and then paths
        assert layer.n_zero_rows == 0


def side_of(codec: Any, value: bool) -> layers.Side:
    """Converts between rows and tiles; with other bases than the codec's."""
    bands = [tuple((n, bits) for n, bits, _ in of_head) for of_head in codec.bands]
    return layers.Side.make(bands, codec.d, 0, value=value)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_prompts_and_decoding(arch: str, build: Build, device: Any) -> None:
    """Prompts by torch's attention on rows of halves, few tokens by the kernel that decodes."""
    model, cache, _ = build(arch)
    assert check(device, model, cache.bases, IDS[:, :76], [60, 1, 1, FEW, 6]).kv_stats().kernel == "cuda"


def test_left_padding(small: tuple[Any, Any], device: Any) -> None:
    n, pads = 40, (9, 0, 2)
    ids = torch.tensor([[0] * pad + TOKENS[: n - pad] for pad in pads])
    mask = torch.tensor([[0] * pad + [1] * (n - pad) for pad in pads])
    check(device, *small, ids, [30, 1, 9], mask)


def test_soft_caps(build: Build, device: Any) -> None:
    """libsubkv's kernel for many queries, beside layers with sliding windows that stay ordinary."""
    model, cache, _ = build("gemma2")
    check(device, model, cache.bases, IDS[:, 20:52], [24, 1, 7])


PLAIN = Logits(0.2)
WITH_SINKS = Logits(0.2, None, torch.linspace(-1, 3, 4))  # logits without a value, as gpt-oss has them


@pytest.mark.parametrize("params", [PLAIN, Logits(0.2, 3.0), WITH_SINKS], ids=["plain", "soft caps", "sinks"])
@pytest.mark.parametrize("pads", [(), (0,), (5, 0, 40)], ids=["", "a mask", "padding"])
def test_attention(
    small: tuple[Any, Any],
    device: Any,
    pads: tuple[int, ...],
    params: Logits,
    monkeypatch: pytest.MonkeyPatch,
    encoding_in_torch: None,
) -> None:
    """Prompts in pieces, single and few tokens, and removed tails, after which queries read codes in the window."""
    monkeypatch.setattr(cuda_kernels, "PIECE", 17)
    both = Layers(small[1], device, len(pads) or 2)
    if params.sinks is not None:
        params = Logits(params.scale, None, params.sinks.to(device))
    for n in (3, 45, 1, FEW, 22):
        both.attend(n, params, pads)
    both.crop(30)
    for n in (1, 1, 12):
        both.attend(n, params, pads)


def test_sequences_selected_and_more_cells(small: tuple[Any, Any], device: Any, encoding_in_torch: None) -> None:
    """Tiles move with their sequence, and when memory grows."""
    both = Layers(small[1], device, 3)
    both.attend(250, PLAIN)
    for layer in both.layers:
        layer.batch_select_indices(torch.tensor([2, 0]))
    both.batch = 2
    both.attend(10, PLAIN)


@pytest.mark.parametrize("n", [2, 20])  # few queries, and a prompt
def test_a_row_that_is_not_finite(small: tuple[Any, Any], device: Any, n: int) -> None:
    """Queries that see the cell give NaN, in the window and beyond it; others do not change."""
    both = [SubspaceCache(small[1], kernel="cuda")._coded[0] for _ in range(2)]
    codec = both[0].codecs[0]
    rng = torch.Generator().manual_seed(3)
    k = torch.randn(2, len(codec.bands), 20 + n, codec.d, generator=rng).to(device)
    q = torch.randn(2, 2 * len(codec.bands), 20 + n, codec.d, generator=rng).to(device)
    outputs = []
    for layer, bad in zip(both, (False, True), strict=True):
        x = k.clone()
        if bad:
            x[0, 0, 5, 3] = torch.nan  # a coded cell of the first sequence
            x[1, 0, -1, 0] = torch.inf  # the last one of the second
        for part in (slice(0, 20), slice(20, 20 + n)):
            layer.update(x[:, :, part], x[:, :, part])
            out = layer.attend(q[:, :, part], None, Logits(0.2))
        outputs.append(out.cpu())
    good, lost = outputs
    assert torch.isfinite(good).all()
    first_head = slice(0, 2)  # query heads of the KV head
    assert lost[0, :, first_head].isnan().all()
    assert lost[1, -1, first_head].isnan().any()
    assert torch.equal(lost[1, :-1], good[1, :-1])
    assert both[1].n_zero_rows == 4  # as key and as value


def test_choice(llama: tuple[Any, SubspaceCache], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, codecs = torch.device("cuda"), (None, None)
    with pytest.raises(CacheError, match="^kernel: expected a CUDA device for 'cuda', found device cpu$"):
        torch_kernels.choose(CPU, codecs, "cuda")
    monkeypatch.setattr(cuda_kernels, "lacking", lambda: "none")
    with pytest.raises(CacheError, match="expected a build with -DGGML_CUDA=ON for 'cuda', found kernels: none$"):
        torch_kernels.choose(gpu, codecs, "cuda")
    monkeypatch.setattr(cuda_kernels, "lacking", lambda: None)
    assert torch_kernels.choose(gpu, codecs, "cuda").name == "cuda"
    assert SubspaceCache(llama[1].bases, kernel="cuda").kv_stats().kernel == "none yet"


def test_trial(
    small: tuple[Any, Any], device: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kernels that were not requested run only if they agree with torch's; a warning names those that do not."""
    layer = SubspaceCache(small[1], kernel="cuda")._coded[0]
    codecs = layer.codecs[0].to(device), layer.codecs[1].to(device)
    kernels = torch_kernels._made("cuda")
    assert torch_kernels.trial(kernels, codecs, device) is None

    def attend(*arguments: Any) -> Any:
        return 1.2 * cuda_kernels.attend(*arguments)

    def failing(*_: Any) -> Any:
        raise RuntimeError("no kernel image")

    wrong, broken = (dataclasses.replace(kernels, attend=function) for function in (attend, failing))
    gpu, made = torch.device("cuda", 7), {"cuda": kernels, "triton": wrong}
    monkeypatch.setattr(torch_kernels, "_TRIED", {})
    monkeypatch.setattr(torch_kernels, "_lacking", lambda name, device: None)
    monkeypatch.setattr(torch_kernels, "_made", made.__getitem__)
    on_device = torch_kernels.trial
    monkeypatch.setattr(torch_kernels, "trial", lambda kernels, codecs, _: on_device(kernels, codecs, device))
    assert torch_kernels.choose(gpu, codecs) is kernels
    assert not caplog.messages
    made["cuda"] = dataclasses.replace(broken, refusal=lambda codecs: "too large")  # a second trial would fail
    assert torch_kernels.choose(gpu, codecs) is torch_kernels.IN_TORCH  # for this layer
    assert caplog.messages[0] == "kernel: cuda is not used for a layer on device cuda:7: too large"
    made["cuda"] = broken
    caplog.clear()
    assert torch_kernels.choose(torch.device("cuda", 8), codecs) is torch_kernels.IN_TORCH
    assert caplog.messages == [
        "kernel: cuda is not used on device cuda:8: RuntimeError: no kernel image",
        "kernel: triton is not used on device cuda:8: expected outputs within 0.1 of torch's, found a distance of 0.2",
    ]


def test_refusals() -> None:
    native = cuda_kernels.native()

    def message(expected: str) -> None:
        assert expected in library.last_error()

    assert native.subkv_cuda_layer_new(0, 64, 64, None, None, 0) is None
    message("expected 1 to 1024 KV heads, of multiples of 8 to 576 elements, found 0 of 64 and 64")
    assert native.subkv_cuda_layer_new(1, 64, 64, None, None, 0) is None
    message("k: expected a pointer, found NULL")
    heads = (cuda_kernels.Head * 1)(cuda_kernels.Head(n_bands=9))
    assert native.subkv_cuda_layer_new(1, 64, 64, heads, heads, 0) is None
    message("bands: expected 1..8 bands and a ratio of each, found 0")
    assert native.subkv_cuda_table_bytes(None) == -1
    assert native.subkv_cuda_scratch(None, cuda_kernels.Queries()) == -1
    message("layer: expected one with tables (subkv_cuda_place_tables), found NULL")
    assert not native.subkv_cuda_encode(None, None, None, None, None, 0, None, None)
