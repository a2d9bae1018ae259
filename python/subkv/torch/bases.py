"""The bases of `subkv.SubspaceCache`: from a converted file, a calibration, or the model's weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from subkv.base.errors import CacheError, SubkvError, concerning, system_reason
from subkv.format import metadata
from subkv.format.bases import CodedHead
from subkv.format.calibration import read_calibration
from subkv.format.layout import Layout
from subkv.format.window import DEFAULT, Window
from subkv.native import library
from subkv.native.bases import check_budget
from subkv.plan.pipeline import Options, Result, convert
from subkv.plan.positions import NEIGHBOURS, SAME_ORDER, transformers_order
from subkv.torch.rows import RowCodec

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bases:
    """Bases shared by all caches of a model. layers: (keys, values) of every coded layer; config: of the decoder."""

    layers: Mapping[int, tuple[RowCodec, RowCodec]]
    window: Window
    fingerprint: str | None
    config: Any

    def __deepcopy__(self, memo: Any) -> Bases:
        return self


def load(
    path: str, model: Any, kv_bits: float | None = None, n_sink: int | None = None, n_recent: int | None = None
) -> Bases:
    """Arguments and errors of SubspaceCache.from_file."""
    config = _config(model)
    try:
        with open(path, "rb") as handle:
            converted = handle.read(4) == b"GGUF"
    except OSError as error:
        raise CacheError("path", f"cannot read {path}: {system_reason(error)}") from error
    if converted:
        for name, value in (("kv_bits", kv_bits), ("n_sink", n_sink), ("n_recent", n_recent)):
            if value is not None:
                raise CacheError(name, f"expected none with a converted file, which contains its layout, found {value}")
        described = metadata.read(Path(path))
        if described["adapt"]:
            LOG.warning("subkv.adapt: ignored with transformers, whose bases are static, found %s", described["adapt"])
        heads, arch, fingerprint = metadata.read_heads(Path(path)), described["arch"], described["fingerprint"]
        n_layer, window = described["block_count"], Window(described["n_sink"], described["n_recent"]).with_defaults()
    else:
        window = _window(n_sink, n_recent)
        with concerning(calibration="path"):
            calibration = read_calibration(Path(path))
            result = convert(ModelFacts(model, calibration.arch), calibration, Options(kv_bits=kv_bits, window=window))
        heads = _heads(result)
        arch, fingerprint, n_layer = calibration.arch, None, calibration.block_count
    if n_layer != config.num_hidden_layers:
        raise CacheError("path", f"expected {config.num_hidden_layers} layers as in the model, found {n_layer}")
    _check_kind(arch, config.model_type)
    with concerning(arch="path"):
        layers = {il: _codecs(of_layer, arch) for il, of_layer in heads.items()}
    return Bases(layers, window, fingerprint, config)


def from_weights(
    model: Any, kv_bits: float | None = None, n_sink: int | None = None, n_recent: int | None = None
) -> Bases:
    """Arguments and errors of SubspaceCache.from_model."""
    config = _config(model)
    arch, window = _arch(config.model_type), _window(n_sink, n_recent)
    window.check()
    check_budget(kv_bits)
    with ModelFacts(model, arch or config.model_type).derived(kv_bits, window) as layout:
        heads = metadata.heads_of(layout)
        if layout.description["basis_k"] == "pca":
            LOG.warning("model: no estimate of keys from the weights in some layers, which are coded evenly")
    layers = {il: _codecs(of_layer, arch) for il, of_layer in heads.items()}
    return Bases(layers, window, None, config)


def _window(n_sink: int | None, n_recent: int | None) -> Window:
    requested: dict[str, Any] = {name: n for name, n in (("n_sink", n_sink), ("n_recent", n_recent)) if n is not None}
    return replace(DEFAULT, **requested)


def _heads(result: Result) -> dict[int, tuple[CodedHead, ...]]:
    """Heads by layer; logs the notes."""
    for note in result.notes:
        LOG.warning("%s", note)
    return {layer.shape.il: layer.heads for layer in result.layers}


def _config(model: Any) -> Any:
    """The decoder's config. Raises CacheError unless all layers have their own keys and values of one size."""
    config = model.config.get_text_config(decoder=True)
    unsupported = None
    if getattr(config, "kv_lora_rank", None):
        unsupported = "latent attention (MLA)"
    elif shared := getattr(config, "num_kv_shared_layers", None):
        unsupported = f"{shared} that share those of other layers"
    elif getattr(config, "is_heterogeneous", False):
        unsupported = "heads of several sizes"
    if unsupported:
        raise CacheError(
            "model",
            f"expected layers with their own keys and values of one head size, found {unsupported}; for a GGUF of it, "
            f"use subkv.Llama(kv_cache='subkv')",
        )
    return config


def _arch(model_type: str) -> str | None:
    """GGUF's name of an architecture of transformers; None if the order of its keys is unknown."""
    names = {name.replace("-", ""): name for name in (*NEIGHBOURS, *SAME_ORDER)} | {"mistral": "llama", "phi": "phi2"}
    return names.get(model_type.replace("_", "").removesuffix("text"))


def _check_kind(arch: str, model_type: str) -> None:
    """Reject bases of another architecture, if its names in GGUF and transformers can be compared."""
    known = {name.replace("-", "") for name in SAME_ORDER} - {"phi2"}  # transformers' phi
    ours, theirs = arch.replace("-", ""), model_type.replace("_", "").removesuffix("text")
    if ours != theirs and (ours in known or theirs in known):
        raise CacheError("path", f"expected bases of a {model_type} model, found those of {arch}")


def _codecs(heads: tuple[CodedHead, ...], arch: str | None) -> tuple[RowCodec, RowCodec]:
    """Codecs of keys and values. arch: architecture of the bases; None if transformers' keys have the same order.

    Raises SubkvError about `arch` if the order of its keys in transformers is unknown.
    """
    d_k, d_v = heads[0].k.encode.shape[1], heads[0].v.encode.shape[1]
    order = np.arange(d_k) if arch is None else transformers_order(arch, d_k)
    return (
        RowCodec([head.k for head in heads], order, [head.gamma for head in heads]),
        RowCodec([head.v for head in heads], np.arange(d_v), [1.0] * len(heads)),
    )


# weights of a layer's attention: GGUF's name -> transformers'
WEIGHTS = {
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_qkv": "qkv_proj",
    "attn_output": "o_proj",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "attn_norm": "input_layernorm",  # of the layer
}
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}  # enum ggml_type
NORMS_PLUS_1 = ("gemma", "qwen3next", "qwen35")  # in transformers their norms multiply by 1 + weight


@dataclass(frozen=True, eq=False)
class _Rows:
    """A parameter [rows, columns], or a vector [rows, 1], in GGUF's order; a subkv.native.gguf.Rows.

    index: [rows] order of the rows in GGUF. plus: constant that GGUF adds to the values.
    """

    weight: Any
    index: NDArray[np.int64]
    plus: float

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.weight.shape
        return int(rows), int(columns)

    def rows(self, which: Any) -> NDArray[np.float32]:
        rows: NDArray[np.float32] = self.weight[self.index[which]].detach().float().cpu().numpy()
        return rows + np.float32(self.plus)

    def in_memory(self, name: str) -> library.Matrix:
        """For libsubkv. The matrix holds references to its data."""
        weight = self.weight.detach().float() + self.plus if self.plus else self.weight.detach()
        weight = (weight if weight.dtype in TYPES else weight.float()).cpu().contiguous()
        order = np.ascontiguousarray(self.index, dtype=np.int32)
        matrix = library.Matrix(name.encode(), weight.data_ptr(), *weight.shape)
        matrix.order, matrix.n_order, matrix.type = order.ctypes.data, len(order), TYPES[weight.dtype]
        matrix.owners = weight, order
        return matrix


class ModelFacts:
    """A model of transformers for the planner, with GGUF's names: a subkv.native.gguf.Base."""

    def __init__(self, model: Any, arch: str) -> None:
        self.path = Path(str(model.config.name_or_path))
        self._arch = arch
        modules = list(model.get_decoder().modules())
        self._attention = {m.layer_idx: m for m in modules if hasattr(m, "layer_idx") and hasattr(m, "o_proj")}
        self._norms = {
            m.self_attn.layer_idx: m.input_layernorm
            for m in modules
            if hasattr(m, "input_layernorm") and hasattr(getattr(m, "self_attn", None), "layer_idx")
        }
        config = model.config.get_text_config(decoder=True)
        rope = getattr(config, "rope_parameters", None) or {}
        n_head = config.num_attention_heads
        d = getattr(config, "head_dim", None) or config.hidden_size // n_head
        kind = rope.get("rope_type", "default")
        self._values = {
            "general.architecture": arch,
            f"{arch}.block_count": config.num_hidden_layers,
            f"{arch}.context_length": getattr(config, "max_position_embeddings", None),
            f"{arch}.embedding_length": config.hidden_size,
            f"{arch}.attention.head_count": n_head,
            f"{arch}.attention.head_count_kv": getattr(config, "num_key_value_heads", None) or n_head,
            f"{arch}.attention.key_length": d,
            f"{arch}.attention.value_length": d,
            f"{arch}.rope.scaling.type": None if kind == "default" else kind,
            f"{arch}.rope.freq_base": rope.get("rope_theta"),
            f"{arch}.rope.dimension_count": int(d * rope.get("partial_rotary_factor", 1.0)),
        }

    def derived(self, kv_bits: float | None, window: Window) -> Layout:
        """Bases from the weights. Raises as Layout.of_weights()."""
        kinds = {int: "u32", float: "f32", str: "str"}
        keys = {key: (kinds[type(value)], value) for key, value in self._values.items() if value is not None}
        names = [
            f"blk.{il}.{part}.{kind}"
            for il in range(self._values[f"{self._arch}.block_count"])
            for part in WEIGHTS
            if part not in ("attn_v", "attn_output")
            for kind in ("weight", "bias")
        ]
        found = [(name, self._find(name)) for name in names]
        return Layout.of_weights(keys, [rows.in_memory(name) for name, rows in found if rows], kv_bits, window)

    def keys(self) -> list[str]:
        return list(self._values)

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def _find(self, name: str) -> _Rows | None:
        """blk.N.X.weight or .bias, X out of WEIGHTS."""
        blk, _, rest = name.removeprefix("blk.").partition(".")
        part, _, kind = rest.partition(".")
        if not blk.isdigit() or part not in WEIGHTS:
            return None
        if part == "attn_norm":
            module = self._norms.get(int(blk))
        else:
            module = getattr(self._attention.get(int(blk)), WEIGHTS[part], None)
        weight = getattr(module, kind, None)
        if weight is None or not weight.is_floating_point():  # or a packed, quantized weight
            return None
        index = np.arange(weight.shape[0])
        d = int(self._values[f"{self._arch}.attention.key_length"])
        if part in ("attn_q", "attn_k", "attn_q_norm", "attn_k_norm") and self._arch in NEIGHBOURS:
            index = index.reshape(-1, d)[:, transformers_order(self._arch, d)].ravel()
        plus = 1.0 if part.endswith("_norm") and self._arch.startswith(NORMS_PLUS_1) else 0.0
        return _Rows(weight if weight.ndim == 2 else weight[:, None], index, plus)

    def has_tensor(self, name: str) -> bool:
        return self._find(name) is not None  # there is no rope_freqs.weight; a rope_type replaces it

    def matrix(self, name: str, why: str, stacked: bool = False) -> _Rows:
        """A weight of a layer's attention. Raises SubkvError if the model has no weight of this name."""
        rows = self._find(name)
        if rows is None:
            part = name.split(".")[2] if name.count(".") > 1 else name
            raise SubkvError(
                name, f"expected weights {WEIGHTS.get(part, part)} in the model's attention, found none; {why}"
            )
        return rows

    def tensor(self, name: str, why: str) -> NDArray[np.float32]:
        """All rows of matrix()."""
        return self.matrix(name, why).rows(slice(None))
