"""Times of the ops on a Vulkan device. A part of gpu.py --backend vulkan.

    python research/gpu/gpu_vulkan.py --library LIB.so --bands "4.3 bits" --batch 1,16 --cells 131072 [--prefill]

Times are from the device's clock, with a cold cache. Attention over an f16 cache is not timed: `of_f16` is the time in
which the measured copy would read that cache, divided by ours.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / d) for d in ("tests/kernels", "tests", "kernels/triton", "research/gpu")]
os.environ.setdefault("SUBKV_CACHE", str(ROOT / "build" / "cache"))  # compiled.py keeps files beside it

import cuda_ops as c  # noqa: E402
import layers  # noqa: E402
import numpy as np  # noqa: E402
import vulkan_ops as v  # noqa: E402
from gpu_ops import BANDS, GROUP, N_HEAD, N_RECENT, N_SINK, PREFILL, PREFILL_CELLS, SLOTS, D, batch_rows  # noqa: E402
from gpu_report import emit, failed  # noqa: E402

DISTINCT = 1024  # distinct cells; further cells repeat them


class Workload:
    """Coded cells of n_stream sequences, queries of n_tps further tokens, and the arguments of every op.

    Raises ValueError if the cells exceed the device's maximum binding.
    """

    def __init__(self, library: v.Library, bands: Any, n_stream: int, n_tps: int, n_cells: int) -> None:
        self.n_tps, self.n_cells = n_tps, n_cells
        rng, memory, n_tok = np.random.default_rng(0), library.memory(), n_stream * n_tps
        sides = [layers.Side.make([b] * N_HEAD, D, i) for i, b in enumerate(bands)]
        self.heads = c.Heads(library, memory, sides[0], sides[1], GROUP)
        layer = self.heads.layer
        tiles = []
        for side in sides:
            one = side.to_tiles(side.random_rows(DISTINCT, rng, 0))
            if one.nbytes * n_stream * n_cells // DISTINCT > library.max_range:
                raise ValueError(
                    f"{n_stream} x {n_cells} cells expected to be bound at once: {library.max_range} bytes"
                )
            tiles.append(np.tile(one, (1, n_stream * n_cells // DISTINCT, 1))[0])
        self.bytes = sum(int(part.nbytes) for part in tiles)
        (k_tiles, v_tiles) = (memory.put(part)[0] for part in tiles)
        (k_stride, v_stride) = (part.strides[0] for part in tiles)

        def floats(*shape: int) -> int:
            return memory.put(rng.standard_normal(shape).astype(np.float32))[0]

        def halves(*shape: int) -> int:
            return memory.put(rng.standard_normal(shape).astype(np.float16))[0]

        blocks = N_HEAD * n_stream * -(-n_tps * GROUP // 8)
        n_split = max(1, min(1024 // blocks, n_cells // 128))  # the engine's rule
        n_rows = n_split * N_HEAD * n_tok * GROUP
        tokens, slots = batch_rows(n_stream, n_tps, n_cells)
        strides = {"k_head": D, "k_token": N_HEAD * D, "v_head": D, "v_token": N_HEAD * D}
        at = {"k_tiles": k_tiles, "v_tiles": v_tiles, "k_stride": k_stride, "v_stride": v_stride}
        fresh = halves(n_tok, 2 * N_HEAD * D)
        self.encode = c.Encode(layer=layer, k=floats(n_tok, N_HEAD, D), v=floats(n_tok, N_HEAD, D), **strides, **at,
                               cells=memory.put(np.arange(n_tok, dtype=np.int64))[0], fresh=fresh,
                               n_tok=n_tok)  # fmt: skip
        self.attend = c.Attend(layer=layer, q=floats(n_tok, N_HEAD * GROUP, D), q_head=D, q_token=N_HEAD * GROUP * D,
                               **at, k_stream=k_stride * (n_cells // 64), v_stream=v_stride * (n_cells // 64),
                               mask=memory.put(np.zeros((n_tok, n_cells), np.float16))[0], mask_half=True,
                               cell_pos=memory.put(np.tile(np.arange(n_cells, dtype=np.int32), n_stream))[0],
                               tokens=memory.put(tokens)[0], n_sink=N_SINK, n_recent=N_RECENT, n_kv=n_cells,
                               n_stream=n_stream, n_tps=n_tps, n_split=n_split,
                               split=-(-n_cells // n_split // 64) * 64, m=floats(n_rows), z=floats(n_rows),
                               acc=floats(n_rows, layer.width_v))  # fmt: skip
        self.combine = c.Combine(a=self.attend, fresh=fresh, window=halves(n_stream * SLOTS, 2 * N_HEAD * D),
                                 slots=memory.put(slots)[0], slots_of_seq=SLOTS,
                                 sinks=None, out=floats(n_tok, N_HEAD * GROUP * D),
                                 out_stride=N_HEAD * GROUP * D)  # fmt: skip


def time_copy(library: v.Library, n: int) -> float:
    """GB/s, bytes read and written, of a copy within the device's memory."""
    import ctypes as ct

    size = min(library.max_range, 1 << 30)
    ms = statistics.median(library.time("copy", ct.c_size_t(size), n))
    gbs = 2 * size / ms / 1e6
    emit("device", f"{library.device}: copy {gbs:.0f} GB/s", copy_gbs=gbs, max_range=library.max_range)
    return gbs


def time_shape(library: v.Library, name: str, shape: tuple[int, int, int], copy_gbs: float, n: int) -> None:
    """Time all ops. name: key of BANDS; shape: (sequences, tokens per sequence, cells); n: repetitions."""
    work = Workload(library, BANDS[name], *shape)
    what = f"{name}, {shape[0]} x {shape[1]} tokens, {shape[2]} cells"
    parts = {"project_queries": work.attend, "attend": work.attend, "combine": work.combine, "encode": work.encode}
    samples = {op: library.time(op, args, n) for op, args in parts.items()}
    ms = {op: statistics.median(times) for op, times in samples.items()}
    f16_ms = 4 * D * N_HEAD * shape[0] * shape[2] / copy_gbs / 1e6
    for op, time in ms.items():
        numbers: dict[str, Any] = {"ms": time, "samples_ms": samples[op]}
        result = f"{1000 * time:.0f} us"
        if op == "attend":  # includes the projection of queries
            numbers |= {
                "gbs": work.bytes / time / 1e6,
                "bytes": work.bytes,
                "of_f16": f16_ms / (time + ms["combine"]),
            }
            result += (
                f" with project, {numbers['gbs']:.1f} GB/s of codes, {100 * numbers['gbs'] / copy_gbs:.0f}% of the copy"
            )
            result += f"; with combine {numbers['of_f16']:.2f} times the speed at which the copy reads an f16 cache"
        emit(f"Vulkan {op}: {what}", result, **numbers)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--library", type=Path, required=True, help="compiled kernels/vulkan (vulkan_ops.build)")
    parser.add_argument("--bands", choices=BANDS, default="4.3 bits")
    parser.add_argument("--batch", default="1", help="numbers of parallel sequences, N,N,…")
    parser.add_argument("--cells", type=int, default=131072)
    parser.add_argument("--prefill", action="store_true", help="the tokens of a prompt instead")
    parser.add_argument("-r", "--repetitions", type=int, default=20)
    given = parser.parse_args()
    library = v.Library(given.library, validate=False)
    copy = time_copy(library, given.repetitions)
    shapes = [(int(batch), 1, given.cells) for batch in given.batch.split(",")]
    ok = True
    for shape in [(1, PREFILL, min(given.cells, PREFILL_CELLS))] if given.prefill else shapes:
        try:
            time_shape(library, given.bands, shape, copy, given.repetitions)
        except ValueError as error:
            emit(f"Vulkan: {given.bands}, {shape}", f"skipped: {error}")
        except Exception as error:
            ok = False
            emit(f"Vulkan: {given.bands}, {shape}", failed(error))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
