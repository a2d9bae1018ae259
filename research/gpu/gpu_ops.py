"""Times of the CUDA and Triton ops on a GPU, compared with torch's attention over f16. A part of gpu.py.

    python research/gpu/gpu_ops.py --bands "4.3 bits" --batch 1,16 --cells 131072 [--library libnative.so] [--prefill]

All calls of a shape are interleaved, so ratios are valid on a busy machine. The device's cache is cold. Cells are
random.
"""

from __future__ import annotations

import argparse
import ctypes as ct
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
sys.path[:0] = [str(path) for path in (TESTS / "kernels", TESTS, ROOT / "kernels" / "triton", Path(__file__).parent)]
os.environ.setdefault("SUBKV_CACHE", str(ROOT / "build" / "cache"))  # compiled.py keeps files beside it

import cuda_ops as c  # noqa: E402
import layers  # noqa: E402
import numpy as np  # noqa: E402
from gpu_report import emit, failed, interleaved_ms, missing  # noqa: E402

# The shape of an 8B Llama: 8 KV heads of 128, groups of 4. Mixed bands take 71 + 67 bytes per cell and head.
N_HEAD, GROUP, D = 8, 4, 128
BANDS = {
    "4.3 bits": (((16, 8), (48, 5), (64, 3)), ((16, 6), (96, 4), (16, 3))),
    "8 bits": (((128, 8),), ((128, 8),)),
    "3 bits": (((128, 3),), ((128, 3),)),
}
N_SINK, N_RECENT, N_ROLLBACK = 4, 128, 16
SLOTS = N_SINK + N_RECENT + N_ROLLBACK  # of a sequence's window
PREFILL, PREFILL_CELLS = 512, 8192
BASELINE = "torch SDPA f16"
DEVICE = "cuda"

Calls = dict[str, Callable[[], Any]]


def batch_rows(n_stream: int, n_tps: int, n_cells: int) -> tuple[Any, Any]:
    """TokenRow and SlotRow of batch.h, I32 [n_tok][3] and [n_stream * SLOTS][3]: n_tps tokens of each sequence follow
    its n_cells cells, and its window has the first and the last ones.
    """
    token = np.arange(n_stream * n_tps, dtype=np.int32)
    tokens = np.stack([n_cells + token % n_tps, 0 * token, SLOTS * (token // n_tps)], axis=1)
    slot = np.arange(SLOTS, dtype=np.int32)
    position = np.tile(np.where(slot < N_SINK, slot, n_cells - SLOTS + slot), n_stream)
    return tokens.astype(np.int32), np.stack([position, 0 * position, 0 * position - 1], axis=1).astype(np.int32)


class Workload:
    """Coded cells of n_stream sequences, and queries of n_tps further tokens."""

    def __init__(self, bands: tuple[Any, Any], n_stream: int, n_tps: int, n_cells: int) -> None:
        import torch

        self.n_stream, self.n_tps, self.n_cells = n_stream, n_tps, n_cells
        self.sides = [layers.Side.make([b] * N_HEAD, D, i) for i, b in enumerate(bands)]
        self.rows, self.tiles = [], []  # Triton reads rows, CUDA tiles
        for side in self.sides:
            one = side.random_rows(1024, np.random.default_rng(0), 0)
            for target, part in ((self.rows, one), (self.tiles, side.to_tiles(one))):
                target.append(torch.from_numpy(part).to(DEVICE).repeat(n_stream, n_cells // 1024, 1))
        self.q = torch.randn(n_stream * n_tps, N_HEAD * GROUP, D, device=DEVICE)
        self.k, self.v = (torch.randn(n_stream * n_tps, N_HEAD, D, device=DEVICE) for _ in range(2))
        self.bytes = sum(int(rows.numel()) for rows in self.rows)


class Cuda:
    """The CUDA ops on a workload. Calls run on torch's stream."""

    def __init__(self, library: c.Library, work: Workload) -> None:
        import torch

        self.library, self.work = library, work
        self.stream = ct.c_void_p(torch.cuda.current_stream().cuda_stream) if DEVICE == "cuda" else None
        self.heads = c.Heads(library, library.memory(), work.sides[0], work.sides[1], GROUP)
        n_tok, layer = work.n_stream * work.n_tps, self.heads.layer
        few = work.n_tps <= c.DECODE_TOKENS
        blocks = N_HEAD * work.n_stream * (work.n_tps if few else max(1, work.n_tps * GROUP // 64))
        split = library.cells_of_split(library.block_steps(layer), work.n_cells, blocks, work.n_cells)
        n_split = -(-work.n_cells // split)
        n_rows = N_HEAD * n_tok * GROUP
        part = n_split * n_rows
        halves = {"dtype": torch.float16, "device": DEVICE}
        integers = {"dtype": torch.int32, "device": DEVICE}
        floats = torch.zeros(part * (2 + layer.width_v) + n_rows * (layer.width_k + 1), device=DEVICE)
        words = torch.zeros(n_rows // GROUP * library.query_words(layer), **integers)
        exact = torch.zeros(library.exact_floats(layer, n_rows, work.n_tps, SLOTS), device=DEVICE)
        mask = torch.zeros(n_tok, work.n_cells, **halves)
        cell_pos = torch.arange(work.n_cells, **integers).repeat(work.n_stream, 1)
        rows = batch_rows(work.n_stream, work.n_tps, work.n_cells)
        tokens, slot_rows = (torch.from_numpy(part).to(DEVICE) for part in rows)
        fresh, window = (torch.randn(len(part), 2 * N_HEAD * D, **halves) for part in rows)
        self.out = torch.empty(n_tok, N_HEAD * GROUP * D, device=DEVICE)
        cells = torch.arange(n_tok, dtype=torch.int64, device=DEVICE)
        self.tensors = [
            floats,
            words,
            exact,
            mask,
            cell_pos,
            tokens,
            slot_rows,
            fresh,
            window,
            cells,
        ]  # keep them allocated
        k_tiles, v_tiles = (tiles.data_ptr() for tiles in work.tiles)
        k_stride, v_stride = (tiles.stride(1) for tiles in work.tiles)
        k_stream, v_stream = (tiles.stride(0) for tiles in work.tiles)
        at = floats.data_ptr()
        qt = at + 4 * part * (2 + layer.width_v)
        strides = {"k_head": D, "k_token": N_HEAD * D, "v_head": D, "v_token": N_HEAD * D}
        self.encode = c.Encode(layer=layer, k=work.k.data_ptr(), v=work.v.data_ptr(), **strides, k_tiles=k_tiles,
                               v_tiles=v_tiles, k_stride=k_stride, v_stride=v_stride, cells=cells.data_ptr(),
                               fresh=fresh.data_ptr(), n_tok=n_tok)  # fmt: skip
        self.attend = c.Attend(layer=layer, q=work.q.data_ptr(), q_head=D, q_token=N_HEAD * GROUP * D, k_tiles=k_tiles,
                               v_tiles=v_tiles, k_stride=k_stride, v_stride=v_stride, k_stream=k_stream,
                               v_stream=v_stream, mask=mask.data_ptr(), mask_half=True, cell_pos=cell_pos.data_ptr(),
                               tokens=tokens.data_ptr(), n_sink=N_SINK, n_recent=N_RECENT, n_kv=work.n_cells,
                               n_stream=work.n_stream, n_tps=work.n_tps, n_split=n_split,
                               split=split, m=at, z=at + 4 * part,
                               acc=at + 8 * part, qt=qt, shift=qt + 4 * n_rows * layer.width_k,
                               words=words.data_ptr(), exact=exact.data_ptr())  # fmt: skip
        self.combine = c.Combine(a=self.attend, fresh=fresh.data_ptr(), window=window.data_ptr(),
                                 slots=slot_rows.data_ptr(), slots_of_seq=SLOTS, sinks=None,
                                 out=self.out.data_ptr(), out_stride=N_HEAD * GROUP * D)  # fmt: skip

    def run(self, name: str, args: ct.Structure) -> Callable[[], None]:
        return lambda: self.library.run(name, args, self.stream)

    def calls(self) -> Calls:
        """In this order: project writes the input of attend, attend that of combine."""
        decode = ["attend_decode"] if self.work.n_tps <= c.DECODE_TOKENS else []
        attend, combine = self.run("attend", self.attend), self.run("combine", self.combine)
        return {
            "CUDA project": self.run("project_queries", self.attend),
            **{f"CUDA {name}": self.run(name, self.attend) for name in (*decode, "attend_tiles")},
            "CUDA combine": combine,
            "CUDA project, attend and combine": lambda: (attend(), combine()),
        }


class Triton:
    """The Triton ops on a workload; torch projects the queries."""

    def __init__(self, work: Workload) -> None:
        import torch

        import subkv_triton.ops as st

        self.st, self.work, self.codecs = st, work, []
        for side in work.sides:
            bands = [[(b.n, b.bits, b.ratio) for b in h.codec.bands[: h.codec.n_bands]] for h in side.heads]
            bases = [h.encode for h in side.heads]
            self.codecs.append(st.Codecs.make(bands, bases, bases, None, DEVICE))
        self.rows = [
            codecs.from_rows(rows[:, :1024]).repeat(1, work.n_cells // 1024, 1)
            for codecs, rows in zip(self.codecs, work.rows, strict=True)
        ]
        shape = (work.n_stream, work.n_tps, N_HEAD, GROUP, D)
        self.q = work.q.reshape(shape)
        self.scale = torch.full((N_HEAD,), D**-0.5, device=DEVICE)
        self.bias = torch.zeros(work.n_stream, work.n_tps, work.n_cells, device=DEVICE)
        n_keys = N_SINK + N_RECENT + work.n_tps
        k, v = (torch.randn(work.n_stream, n_keys, N_HEAD, D, dtype=torch.float16, device=DEVICE) for _ in range(2))
        bias = torch.zeros(work.n_stream, work.n_tps, n_keys, device=DEVICE)
        self.exact = st.Exact(k, v, self.q * D**-0.5, bias)

    def project(self) -> Any:
        return self.st.project_queries(self.codecs[0], self.q, self.scale)

    def attend(self, qt: Any) -> Any:
        return self.st.attend(*self.codecs, *self.rows, qt, self.bias)

    def combine(self, partial: Any) -> Any:
        return self.st.combine(self.codecs[1], partial, self.exact)

    def encode(self) -> None:
        import torch

        cells = torch.arange(len(self.work.k), device=DEVICE)
        for codecs, x, rows in zip(self.codecs, (self.work.k, self.work.v), self.rows, strict=True):
            self.st.encode_rows(codecs, x, cells, rows.view(-1, rows.shape[2]))

    def calls(self) -> Calls:
        qt = self.project()
        partial = self.attend(qt)
        return {
            "Triton attend": lambda: self.attend(qt),
            "Triton combine": lambda: self.combine(partial),
            "Triton project, attend and combine": lambda: self.combine(self.attend(self.project())),
        }


def baseline(work: Workload) -> Calls:
    """torch's attention over as many f16 cells. The query heads of a group form one head, so each cell is read once."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    shape = (work.n_stream, N_HEAD, work.n_cells, D)
    k, v = (torch.randn(shape, dtype=torch.float16, device=DEVICE) for _ in range(2))
    q = work.q.half().view(work.n_stream, work.n_tps, N_HEAD, GROUP, D)
    q = q.permute(0, 2, 3, 1, 4).reshape(work.n_stream, N_HEAD, GROUP * work.n_tps, D)
    return {BASELINE: lambda: sdpa(q, k, v)}


def report(times: dict[str, list[float] | str], what: str, work: Workload | None, copy_gbs: float) -> None:
    """Emit a line for every call, with the ratio to the baseline."""
    medians = {name: statistics.median(ms) for name, ms in times.items() if isinstance(ms, list)}
    base = medians.get(BASELINE)
    for name, samples in times.items():
        if isinstance(samples, str):
            emit(f"{name}: {what}", samples)
            continue
        ms = medians[name]
        numbers: dict[str, Any] = {"ms": ms, "samples_ms": samples}
        result = f"{1000 * ms:.0f} us"
        if work is not None and " attend" in name:
            numbers |= {"gbs": work.bytes / ms / 1e6, "bytes": work.bytes}
            result += f", {numbers['gbs']:.0f} GB/s of codes"
            result += f", {100 * numbers['gbs'] / copy_gbs:.0f}% of the copy" if copy_gbs else ""
            if work.n_tps > 1:
                numbers["tflops"] = 4 * D * len(work.q) * N_HEAD * GROUP * work.n_cells / ms / 1e9
                result += f", {numbers['tflops']:.0f} TFLOP/s"
        if base is not None and "attend" in name:
            numbers["speed_of_sdpa"] = base / ms
            result += f", {base / ms:.2f} times the speed of {BASELINE}"
        emit(f"{name}: {what}", result, **numbers)


def time_shape(library: c.Library | None, name: str, shape: tuple[int, int, int], copy_gbs: float, n: int) -> None:
    """Time all ops. name: key of BANDS; shape: (sequences, tokens per sequence, cells); n: repetitions."""
    work = Workload(BANDS[name], *shape)
    what = f"{name}, {shape[0]} x {shape[1]} tokens, {shape[2]} cells"
    calls: Calls = baseline(work)
    encoding: Calls = {}
    if library is not None:
        cuda = Cuda(library, work)
        calls |= cuda.calls()
        encoding["CUDA encode"] = cuda.run("encode", cuda.encode)
    if not missing("triton"):
        try:
            triton = Triton(work)
            calls |= triton.calls()
            encoding["Triton encode"] = triton.encode
        except Exception as error:
            emit(f"Triton: {what}", failed(error))
    report(interleaved_ms(calls, n), what, work, copy_gbs)
    if encoding:  # last, because it overwrites rows
        report(interleaved_ms(encoding, n), f"{name}, {shape[0]} x {shape[1]} tokens", None, copy_gbs)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bands", choices=BANDS, default="4.3 bits")
    parser.add_argument("--batch", default="1", help="numbers of parallel sequences, N,N,…")
    parser.add_argument("--cells", default="131072", help="cells of each sequence, N,N,…")
    parser.add_argument("--prefill", action="store_true", help="the tokens of a prompt instead")
    parser.add_argument("--library", type=Path, help="compiled kernels/cuda")
    parser.add_argument("--copy", type=float, default=0.0, help="measured GB/s of a copy")
    parser.add_argument("-r", "--repetitions", type=int, default=20)
    given = parser.parse_args()
    library = c.Library(given.library, c.DeviceMemory) if given.library else None
    depths = [int(n) for n in given.cells.split(",")]
    shapes = [(int(batch), 1, depth) for batch in given.batch.split(",") for depth in depths]
    ok = True
    for shape in [(1, PREFILL, PREFILL_CELLS)] if given.prefill else shapes:
        try:
            time_shape(library, given.bands, shape, given.copy, given.repetitions)
        except Exception as error:
            ok = False
            emit(f"{given.bands}, {shape}", failed(error))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
