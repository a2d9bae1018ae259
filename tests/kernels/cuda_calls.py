"""Inputs of the GPU ops' tests: attention of a shape over coded cells, and exact rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cuda_ops as c
import layers
import numpy as np
import numpy.typing as npt
import ops as o

N_SINK, N_RECENT = 2, 6

NO_POSITION = 1 << 30  # of a picture's cell (cell_reader.h)


@dataclass
class Shape:
    n_stream: int = 1
    n_tps: int = 1
    group: int = 3
    n_kv: int = 70
    n_split: int = 2
    softcap: float = 0.0
    means: bool = False
    mask_half: bool = False
    picture: bool = False  # the last half of the tokens is one's: they share a position, no window has them
    blind: bool = False  # the mask hides all cells of the last tile


def _sides(name: str, alike: bool) -> list[layers.Side]:
    """Keys and values of a layer. alike: with bases that are identities."""
    if name in layers.LATENT:
        return list(layers.Side.latent(name, 5))
    bands = (layers.LAYERS | layers.WIDE_HEADS)[name]
    size = max(map(layers.head_size, bands))
    return [layers.Side.make(b, size, 5 + i, alike, value=i == 1) for i, b in enumerate(bands)]


class Call:
    """Inputs of attend for a shape: the first and the newest cells are exact, some are masked."""

    def __init__(
        self,
        library: c.Library,
        name: str,
        shape: Shape,
        codes: int | None = None,
        change: Callable[[Call], None] | None = None,
    ) -> None:
        """codes: every byte of codes; keys and queries then have one sign, and bases are identities.

        change: changes rows, queries or the mask before they are copied; some rows then count as not finite.
        """
        self.library = library
        self.latent = name in layers.LATENT
        self.rng = np.random.default_rng(shape.n_kv)
        self.shape = s = shape
        alike = codes is not None
        self.sides = _sides(name, alike)
        d = self.sides[0].d
        few = shape.n_tps <= c.DECODE_TOKENS and shape.group <= c.DECODE_GROUP
        self.decodes = few and d <= c.DECODE_HEAD and not self.latent
        self.memory = library.memory()
        self.heads = c.Heads(library, self.memory, self.sides[0], self.sides[1], s.group, s.means, change is not None)
        self.heads.layer.latent = self.latent
        self.n_head, self.n_tok = len(self.sides[0].heads), s.n_stream * s.n_tps
        self._make_rows(codes)
        self._make_mask()
        if change:
            change(self)
        self.heads.layer.scale = np.float32(1 / 127 / d if alike else 4 / np.sqrt(d) / 3)
        self.heads.layer.softcap = s.softcap
        self._copy()

    def _stored(self) -> list[layers.Side]:
        return self.sides[:1] if self.latent else self.sides

    def _make_rows(self, codes: int | None) -> None:
        """Codes of all cells, and queries."""
        s, rng = self.shape, self.rng
        self.rows = [np.stack([side.random_rows(s.n_kv, rng, 3) for _ in range(s.n_stream)]) for side in self._stored()]
        self.q = rng.standard_normal((self.n_tok, self.n_head * s.group, self.sides[0].d)).astype(np.float32)
        if codes is not None:
            for rows in self.rows:
                rows[:], rows[:, :, 0] = codes, o.SCALE_ONE
            self.q[:] = 1

    def _make_mask(self) -> None:
        """Positions of cells and tokens, and which cells a token sees."""
        s, rng = self.shape, self.rng
        self.cell_pos = np.stack([rng.permutation(s.n_kv) for _ in range(s.n_stream)]).astype(np.int32)
        self.pos = np.tile(np.arange(s.n_kv - s.n_tps, s.n_kv), s.n_stream)
        self.places = self.cell_pos.copy()
        in_picture = s.picture & (self.pos >= s.n_kv - (s.n_tps + 1) // 2)
        mask = rng.uniform(-2, 0, (self.n_tok, s.n_kv)).astype(np.float16)
        mask[rng.random(mask.shape) < 0.2] = -np.inf
        mask[self.cell_pos.repeat(s.n_tps, axis=0) > self.pos[:, None]] = -np.inf
        mask[:, s.n_kv // 2] = -np.inf
        if s.blind:
            mask[:, (s.n_kv - 1) // o.TILE * o.TILE :] = -np.inf
        for rows in self.rows:
            rows[:, s.n_kv // 2] = 255  # masked, with any bytes
        self.mask = mask
        self.tokens = np.zeros((self.n_tok, 3), np.int32)
        self.tokens[:, 0] = np.where(in_picture, -1, self.pos)
        if s.picture:
            self.cell_pos[self.places >= s.n_kv - (s.n_tps + 1) // 2] = NO_POSITION

    def _copy(self) -> None:
        """Copies the inputs to the device."""
        s, memory = self.shape, self.memory
        n_rows = self.n_head * self.n_tok * s.group
        split = -(-s.n_kv // s.n_split // o.TILE) * o.TILE
        partial = s.n_split * n_rows
        layer = self.heads.layer
        tiles = [
            np.stack([side.to_tiles(r) for r in rows]) for side, rows in zip(self._stored(), self.rows, strict=True)
        ]
        self.tiles = [memory.put(of) for of in tiles]
        m, self.m = memory.put(np.full(partial, np.nan, np.float32))
        z, self.z = memory.put(np.full(partial, np.nan, np.float32))
        acc, self.acc = memory.put(np.full((partial, layer.width_v), np.nan, np.float32))
        self.args = c.Attend(
            layer=layer,
            q=memory.put(self.q)[0],
            q_head=self.sides[0].d,
            q_token=self.n_head * s.group * self.sides[0].d,
            k_tiles=self.tiles[0][0],
            v_tiles=self.tiles[-1][0],
            k_stride=tiles[0].shape[2],
            v_stride=tiles[-1].shape[2],
            k_stream=tiles[0][0].size,
            v_stream=tiles[-1][0].size,
            mask=memory.put(self.mask if s.mask_half else self.mask.astype(np.float32))[0],
            mask_half=s.mask_half,
            cell_pos=memory.put(self.cell_pos)[0],
            tokens=memory.put(self.tokens)[0],
            n_sink=N_SINK,
            n_recent=N_RECENT,
            n_kv=s.n_kv,
            n_stream=s.n_stream,
            n_tps=s.n_tps,
            split=split,
            n_split=s.n_split,
            m=m,
            z=z,
            acc=acc,
            qt=memory.put(np.zeros((n_rows, layer.width_k), np.float32))[0],
            shift=memory.put(np.zeros(n_rows, np.float32))[0],
            words=memory.put(np.zeros((n_rows // s.group, self.library.query_words(layer)), np.uint32))[0],
        )

    def coded_bias(self, stream: int) -> o.F32:
        """[n_tps][n_kv]"""
        s = self.shape
        bias = self.mask[stream * s.n_tps : (stream + 1) * s.n_tps].astype(np.float32)
        for t in range(s.n_tps):
            pos = int(self.tokens[stream * s.n_tps + t, 0])
            bias[t, c.exact_positions(self.cell_pos[stream], pos, N_SINK, N_RECENT)] = -np.inf
        return bias

    def queries(self, stream: int, h: int) -> tuple[o.F32, o.F32 | None]:
        """Projected queries [n_tps * G][rank] and shifts of a KV head."""
        s, head = self.shape, self.sides[0].heads[h]
        q = self.q[stream * s.n_tps : (stream + 1) * s.n_tps, h * s.group : (h + 1) * s.group].reshape(-1, head.codec.d)
        scale = float(self.heads.layer.scale)
        qt = scale * float(self.heads.gamma[h]) * (q.astype(np.float64) @ head.encode.astype(np.float64).T)
        mean = self.heads.mean[h]
        shift = None if mean is None else (scale * (q.astype(np.float64) @ mean.astype(np.float64))).astype(np.float32)
        return qt.astype(np.float32), shift

    def slopes(self, h: int) -> o.F32:
        return self.heads.slope[h * self.shape.group : (h + 1) * self.shape.group]

    def vectors(self, value: bool, stream: int, h: int) -> o.F64:
        """Coefficients of a head's cells; zeros in cells that no token sees."""
        stored = value and not self.latent
        side = self.sides[stored]
        rows = self.rows[stored][stream].copy()
        rows[self.shape.n_kv // 2] = 0
        coefficients = o.dequantize(side.heads[h], rows[:, side.parts()[h]])
        return coefficients[:, : self.sides[value].heads[h].rank]

    def merged(self, stream: int, h: int, m: o.F64) -> tuple[o.F64, o.F64, o.F64]:
        """Largest m over the splits, z and acc relative to the given m, of a head's query rows."""
        s = self.shape
        shape = (s.n_split, self.n_head, s.n_stream, s.n_tps * s.group)
        part_m = self.m().reshape(shape)[:, h, stream].astype(np.float64)
        with np.errstate(invalid="ignore"):
            weight = np.where(np.isneginf(part_m), 0, np.exp(part_m - np.where(np.isfinite(m), m, 0)))
        z = (weight * self.z().reshape(shape)[:, h, stream]).sum(axis=0)
        rank = self.sides[1].heads[h].rank
        acc = self.acc().reshape(*shape, -1)[:, h, stream, :, :rank]
        return part_m.max(axis=0), z, (weight[..., None] * acc).sum(axis=0)


N_SLOTS = 20


class Exact:
    """Window rows and the ubatch's own rows; completes the tokens of a call, which see some of them exactly."""

    def __init__(self, call: Call, change: Callable[[Exact], None] | None = None) -> None:
        """change: changes rows before they are copied."""
        s, rng, memory = call.shape, call.rng, call.memory
        width = call.sides[0].d if call.latent else call.n_head * 2 * call.sides[0].d
        window = rng.standard_normal((s.n_stream * N_SLOTS, width)).astype(np.float16)
        fresh = rng.standard_normal((call.n_tok, width)).astype(np.float16)
        slots = np.full((len(window), 3), -1, np.int32)  # SlotRow: pos, cell, token
        self.rows: list[dict[int, npt.NDArray[np.float16]]] = []  # of every stream: row by position
        for stream in range(s.n_stream):
            cells = np.argsort(call.places[stream])
            own = call.pos[stream * s.n_tps : (stream + 1) * s.n_tps]
            rows = {}
            stored = [*range(N_SINK), *range(max(N_SINK, own[0] - N_RECENT - 2), own[0])]
            for slot, pos in enumerate(p for p in stored if p < own[0]):
                at = stream * N_SLOTS + slot
                slots[at, :2] = pos, cells[pos]
                rows[pos] = window[at]
            for t, pos in enumerate(own):
                token = stream * s.n_tps + t
                call.tokens[token, 1:] = cells[pos], stream * N_SLOTS
                if call.tokens[token, 0] >= 0:
                    rows[int(pos)] = fresh[token]
            self.rows.append(rows)
        call.args.tokens = memory.put(call.tokens)[0]
        self.window, self.fresh, self.slots = window, fresh, slots
        if change:
            change(self)
        self.args: Any = c.Combine(
            a=call.args,
            fresh=memory.put(fresh)[0],
            window=memory.put(window)[0],
            slots=memory.put(slots)[0],
            slots_of_seq=N_SLOTS,
        )
        n_rows = call.n_head * call.n_tok * s.group
        n_floats = call.library.exact_floats(call.heads.layer, n_rows, s.n_tps, N_SLOTS)
        self.args.a.exact = memory.put(np.full(n_floats, np.nan, np.float32))[0]
