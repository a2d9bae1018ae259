"""`subkv.SubspaceCache`: a coded KV cache for transformers. Extra `torch`.

    cache = subkv.SubspaceCache.from_file("model.subkv.gguf", model)     # or a sidecar, or calib.safetensors
    cache = subkv.SubspaceCache.from_model(model)    # bases from the weights
    model.generate(**inputs, past_key_values=cache)

Layout, codes and exact window are those of the native engine. On a CUDA device the kernels of libsubkv are used if it
was built with CUDA, whose rows are tiles, or with package triton those of subkv_triton, whose rows are whole words,
both after a trial (kernels.py); otherwise torch computes in float32 on the model's device (see kv_stats().kernel). The
window has the model's dtype. Layers without bases (sliding windows) keep transformers' own layer cache. Both functions
set the model's attention function to "subkv", which with any other cache, or none, computes the same as "sdpa".
Importing this module does not change transformers or other models.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from subkv.base.errors import CacheError
from subkv.engine.cache import CODED
from subkv.engine.stats import KVStats
from subkv.format.window import Window
from subkv.torch.attend import Cells, Logits, attend_exact
from subkv.torch.bases import Bases, from_weights, load
from subkv.torch.kernels import IN_TORCH, Kernels, check, choose
from subkv.torch.rows import RowCodec

NAME = "subkv"  # name of the attention and mask functions in transformers' registries
STEP = 256  # cells are allocated in multiples of this, as in llama.cpp
N_RECORDED = 512  # exact rows that are kept beyond the window while drafts may be removed
NEVER = 1 << 40  # start of a sequence that has only padding so far


class SubspaceLayer(CacheLayerMixin):  # type: ignore[misc]
    """One coded layer. Rows are written by update(); the exact window is updated after attention."""

    is_sliding = False
    is_croppable = True

    def __init__(self, il: int, codecs: tuple[RowCodec, RowCodec], window: Window, kernel: str | None = None) -> None:
        super().__init__()
        self.il, self.window = il, window
        self.codecs, self._kernel = codecs, kernel  # of keys and values; moved to the layer's device on first use
        self.kernels: Kernels | None = None  # chosen on first use
        self.record_past = False  # transformers' name: crop() follows the next updates
        self.reset()

    def activate_past_recording(self) -> None:
        """Keep N_RECORDED exact rows beyond the window from one crop() to the next. transformers calls it for drafts.

        After the removal of fewer tokens, the window is complete.
        """
        self.record_past = True

    def reset(self) -> None:
        """Remove and free all cells."""
        self.is_initialized = False
        self.n_cells = 0
        self._attended = True
        self._tensors: dict[str, Tensor] = {}  # [batch, …]: rows, sinks, recent of k and v; start; zero_rows

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Empty tensors of the shapes, dtype and device of the first keys and values."""
        batch, device = len(key_states), key_states.device
        self.codecs = (self.codecs[0].to(device), self.codecs[1].to(device))
        self.kernels = choose(device, self.codecs, self._kernel)
        for side, codec, x in zip("kv", self.codecs, (key_states, value_states), strict=True):
            if x.shape[1] != len(codec.mean) or x.shape[-1] != codec.d:
                raise CacheError(
                    "SubspaceCache",
                    f"expected {len(codec.mean)} KV heads of size {codec.d} in layer {self.il}, found {x.shape[1]} of "
                    f"{x.shape[-1]}: the bases are of another model",
                )
            self._tensors |= {
                f"rows_{side}": torch.empty(batch, 0, self.kernels.row_bytes(codec), dtype=torch.uint8, device=device),
                f"sink_{side}": x.new_zeros(batch, x.shape[1], self.window.n_sink, x.shape[-1]),
                f"recent_{side}": x.new_empty(batch, x.shape[1], 0, x.shape[-1]),
            }
        self._tensors["start"] = torch.full((batch,), NEVER, device=device)
        self._tensors["zero_rows"] = torch.zeros(batch, dtype=torch.int64, device=device)
        self._fill_until = NEVER  # later cells are not sinks
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Encode new keys and values [batch, n_head_kv, n, d]; returns them; the keys refer to this layer."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if not self._attended:
            raise CacheError(
                "SubspaceCache",
                f"expected the attention function {NAME!r} after every update, found none in layer {self.il}; "
                f"from_file and from_model set it; reset() the cache after a forward call that was interrupted",
            )
        n = key_states.shape[2]
        assert self.kernels is not None
        rows = self._reserve("rows_k", self.n_cells + n), self._reserve("rows_v", self.n_cells + n)
        new = key_states, value_states
        self._tensors["zero_rows"] += self.kernels.encode(self.codecs, new, rows, self.n_cells)
        for name, x in zip(("recent_k", "recent_v"), new, strict=True):
            self._tensors[name] = torch.cat([self._tensors[name], x], 2)
        self.n_cells += n
        self._attended = False
        keys: Any = key_states.view_as(key_states)
        keys.subkv_layer = self
        return keys, value_states

    def _reserve(self, name: str, n_cells: int) -> Tensor:
        rows = self._tensors[name]
        if n_cells > rows.shape[1]:
            grown = rows.new_empty(rows.shape[0], -(-n_cells // STEP) * STEP, rows.shape[2])
            grown[:, : rows.shape[1]] = rows  # all, because a tile has cells and room for more
            self._tensors[name] = grown
        return self._tensors[name]

    def attend(self, q: Tensor, mask: Tensor | None, params: Logits) -> Tensor:
        """Attention of the latest update's queries; arguments and result as in Kernels.attend."""
        if self._attended or self.kernels is None or q.shape[2] > self.n_cells:
            raise CacheError(
                "SubspaceCache", f"expected one attention per update, found another one in layer {self.il}"
            )
        first = self.n_cells - q.shape[2]
        if first < self._fill_until:
            self._find_starts(mask, first)
            self._fill_sinks(first)
        t = self._tensors
        tensors = {name: x for name, x in t.items() if name != "zero_rows"}
        cells = Cells(*self.codecs, **tensors, n_cells=self.n_cells, n_recent=self.window.n_recent)
        out = self.kernels.attend(q, cells, mask, params)
        self._shorten_recent(max(N_RECORDED, self.window.n_rollback) if self.record_past else self.window.n_rollback)
        self._attended = True
        return out

    def _shorten_recent(self, n_beyond: int) -> None:
        """Keep the window's recent rows and n_beyond older ones."""
        for name in ("recent_k", "recent_v"):
            recent = self._tensors[name]
            n_lost = recent.shape[2] - self.window.n_recent - n_beyond
            if n_lost > 0:
                self._tensors[name] = recent[:, :, n_lost:].clone()

    def _find_starts(self, mask: Tensor | None, first: int) -> None:
        """Set the start of sequences: the first cell, from `first` on, that any query sees."""
        start = self._tensors["start"]
        if mask is None:
            new, visible = torch.full_like(start, first), torch.ones_like(start, dtype=torch.bool)
        else:
            columns = mask.any(1)
            new, visible = columns.int().argmax(-1).clamp(min=first), columns.any(-1)
        self._tensors["start"] = torch.where((start == NEVER) & visible, new, start)
        self._fill_until = int(self._tensors["start"].max()) + self.window.n_sink

    def _fill_sinks(self, first: int) -> None:
        """Copy the sinks among the new cells, from `first` on."""
        t = self._tensors
        cell = t["start"][:, None] + torch.arange(self.window.n_sink, device=t["start"].device)
        new = ((cell >= first) & (cell < self.n_cells))[:, None, :, None]
        for side in "kv":
            recent, sink = t[f"recent_{side}"], t[f"sink_{side}"]
            at = (cell - (self.n_cells - recent.shape[2])).clamp(0, recent.shape[2] - 1)[:, None, :, None]
            t[f"sink_{side}"] = torch.where(new, recent.gather(2, at.expand_as(sink)), sink)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.n_cells + query_length, 0

    def get_seq_length(self) -> int:
        return self.n_cells

    def get_max_length(self) -> int:
        return -1

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raises CacheError unless the layer has as many tokens."""
        if not 0 <= -tokens_to_remove <= self.n_cells:
            raise CacheError(
                "crop",
                f"expected to remove 0 to {self.n_cells} tokens, given as a negative number, found {tokens_to_remove}",
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last −tokens_to_remove tokens. Raises CacheError as check_crop().

        Of the tokens that enter the window again, those without exact rows are read as codes.
        """
        self.check_crop(tokens_to_remove)
        if not self.is_initialized:
            return
        self.n_cells += tokens_to_remove
        if tokens_to_remove:
            for name in ("recent_k", "recent_v"):
                self._tensors[name] = self._tensors[name][:, :, :tokens_to_remove]
            start = self._tensors["start"]
            self._tensors["start"] = torch.where(start < self.n_cells, start, NEVER)
            self._fill_until = int(self._tensors["start"].max()) + self.window.n_sink
        self._shorten_recent(self.window.n_rollback)

    def offload(self) -> None:
        """Raises CacheError: transformers moves a layer before its attention, which reads the codes on the device."""
        raise CacheError(
            "offload", "expected a cache that stays on the model's device, found offloading; a lower kv_bits takes less"
        )

    def prefetch(self) -> None:
        """Does nothing: no layer is offloaded."""

    def batch_select_indices(self, indices: Any) -> None:
        """Select these rows of the batch, in this order. indices: any index of torch."""
        for name, x in self._tensors.items():
            self._tensors[name] = x[indices.to(x.device) if isinstance(indices, Tensor) else indices]

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch `repeats` times."""
        self._tensors = {name: x.repeat_interleave(repeats, dim=0) for name, x in self._tensors.items()}

    def n_bytes(self, kind: str) -> int:
        """Allocated bytes of a kind: rows, sink or recent."""
        tensors = [self._tensors[f"{kind}_{side}"] for side in "kv"] if self.is_initialized else []
        return sum(x.untyped_storage().nbytes() for x in tensors)

    @property
    def n_allocated(self) -> tuple[int, ...]:
        """Numbers of allocated sequences and cells per sequence."""
        return tuple(self._tensors["rows_k"].shape[:2]) if self.is_initialized else (0, 0)

    @property
    def n_zero_rows(self) -> int:
        return int(self._tensors["zero_rows"].sum()) if self.is_initialized else 0


class SubspaceCache(transformers.Cache):  # type: ignore[misc]
    """A coded cache for one model; SubspaceCache(cache.bases) creates another, empty one for the same model.

    Supports generate (greedy, sampling, beams, assisted), forward calls, prompts in parts, and batches with left
    padding. The first n_sink and last n_recent tokens of every sequence are exact. crop() removes any number of tokens:
    exact rows are left of 16 tokens before the window (of 512 after activate_past_recording(), which assisted
    generation calls), and earlier tokens are read as codes. Raises CacheError for unsupported operations.
    """

    def __init__(self, bases: Bases, *, kernel: str | None = None) -> None:
        """kernel: "torch", "triton" or "cuda" (libsubkv built with CUDA); default: by a trial on the device.

        Raises CacheError.
        """
        check(kernel)
        layers = transformers.DynamicCache(config=bases.config).layers
        for il, codecs in bases.layers.items():
            if type(layers[il]) is DynamicLayer:  # sliding-window layers stay ordinary
                layers[il] = SubspaceLayer(il, codecs, bases.window, kernel)
        super().__init__(layers=layers)
        self.bases = bases

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        model: Any,
        *,
        kv_bits: float | None = None,
        n_sink: int | None = None,
        n_recent: int | None = None,
        kernel: str | None = None,
    ) -> SubspaceCache:
        """An empty cache for `model`, a causal language model of transformers; sets its attention function.

        path: a converted GGUF, a sidecar, or a calibration (calib.safetensors), from which a layout is planned as in
        `convert`; only then kv_bits, n_sink and n_recent are allowed. kernel: as in SubspaceCache(). Raises SubkvError,
        usually CacheError, if file and model do not fit.
        """
        return cls._for(model, load(os.fspath(path), model, kv_bits, n_sink, n_recent), kernel)

    @classmethod
    def from_model(
        cls,
        model: Any,
        *,
        kv_bits: float | None = None,
        n_sink: int | None = None,
        n_recent: int | None = None,
        kernel: str | None = None,
    ) -> SubspaceCache:
        """As from_file() without a calibration: with bases from the model's weights (6.5 bits by default)."""
        return cls._for(model, from_weights(model, kv_bits, n_sink, n_recent), kernel)

    @classmethod
    def _for(cls, model: Any, bases: Bases, kernel: str | None) -> SubspaceCache:
        cache = cls(bases, kernel=kernel)
        if not cache._coded:
            raise CacheError("model", "expected a layer with ordinary full attention, found none")
        _set_attention(model)
        return cache

    @property
    def _coded(self) -> list[SubspaceLayer]:
        return [layer for layer in self.layers if isinstance(layer, SubspaceLayer)]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        attention = self.bases.config._attn_implementation
        if attention != NAME:
            raise CacheError(
                "model",
                f"expected the attention function {NAME!r}, which from_file and from_model set, found {attention!r}",
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last −tokens_to_remove tokens. Raises CacheError if a layer refuses, and then removes none."""
        for layer in self._coded:
            layer.check_crop(tokens_to_remove)
        for layer in sorted(self.layers, key=lambda layer: isinstance(layer, SubspaceLayer)):
            layer.crop(tokens_to_remove)  # ordinary layers first, which may refuse

    def kv_stats(self) -> KVStats:
        """Allocated bytes, counted as in the native engine; bases are float32 here.

        kernel: torch, triton or cuda, several on several devices; "none yet" before the first keys.
        """
        coded = self._coded
        sizes = [layer.n_allocated for layer in coded]
        n_cells = max(n for _, n in sizes)
        elements = [sum(c.d * len(c.mean) for c in layer.codecs) for layer in coded]
        in_coded = sum(batch * n * e for (batch, n), e in zip(sizes, elements, strict=True))
        rows = sum(layer.n_bytes("rows") for layer in coded)
        window = sum(layer.n_bytes("sink") + layer.n_bytes("recent") for layer in coded)
        tensors = [getattr(layer, name, None) for layer in self.layers for name in ("keys", "values")]
        ordinary = [x for x in tensors if isinstance(x, Tensor)]
        stock = sum(x.nbytes for x in ordinary)
        return KVStats(
            type_k=CODED,
            type_v=CODED,
            n_cells=n_cells,
            bytes_kv=rows + window + stock,
            bytes_f16=2 * (in_coded + sum(x.numel() for x in ordinary)),
            bytes_per_token=sum((layer.kernels or IN_TORCH).row_bytes(c) for layer in coded for c in layer.codecs),
            bpe=8.0 * (rows + window) / in_coded if in_coded else 0.0,
            kernel=" and ".join(sorted({layer.kernels.name for layer in coded if layer.kernels})) or "none yet",
            bytes_codes=rows,
            bytes_window=window,
            bytes_stock=stock,
            bytes_bases=sum(c.n_bytes for layer in coded for c in layer.codecs),
            n_layer_coded=len(coded),
            n_zero_rows=sum(layer.n_zero_rows for layer in coded),
            fingerprint=self.bases.fingerprint,
            **{name: getattr(self.bases.window, name) for name in ("n_sink", "n_recent", "n_rollback")},
        )


def _set_attention(model: Any) -> None:
    """Register our functions and set them in the model's decoder; other models are unchanged."""
    transformers.AttentionInterface.register(NAME, _attention)
    transformers.AttentionMaskInterface.register(NAME, sdpa_mask)
    decoder = model.get_decoder()
    decoder.set_attn_implementation(NAME)
    if decoder.config._attn_implementation != NAME:
        raise CacheError(
            "model", f"expected a model whose attention can be chosen, found {type(model).__name__} with a fixed one"
        )


def _attention(module: Any, q: Tensor, k: Any, v: Tensor, mask: Tensor | None, **rest: Any) -> tuple[Tensor, None]:
    """transformers' attention function: q [batch, n_head, n, d], k, v [batch, n_head_kv, n or all cells, d]."""
    scaling, softcap, sinks = rest.get("scaling"), rest.get("softcap"), rest.get("s_aux")
    layer: SubspaceLayer | None = getattr(k, "subkv_layer", None)
    if layer is None and softcap is None and sinks is None:
        return sdpa_attention_forward(module, q, k, v, mask, **rest)
    for name, absent in (("position_bias", None), ("dropout", 0.0)):
        if rest.get(name, absent) is not None and rest.get(name) != absent:
            raise CacheError("model", f"expected attention without {name}, found it in {type(module).__name__}")
    params = Logits(q.shape[-1] ** -0.5 if scaling is None else float(scaling), softcap, sinks)
    if mask is not None:
        if mask.dtype != torch.bool or mask.shape[1] != 1:
            raise CacheError(
                "attention_mask", f"expected one mask of bool for all heads, found {list(mask.shape)} of {mask.dtype}"
            )
        mask = mask[:, 0]
    if layer is None:
        return attend_exact(q, k, v, mask, params), None
    if mask is not None and q.shape[2] > 1 and bool(mask.triu(layer.n_cells - q.shape[2] + 1).any()):
        raise CacheError("attention_mask", "expected causal attention, found queries that see later tokens")
    return layer.attend(q, mask, params), None
