"""The bases of `subkv.SubspaceCache`: from a converted file, or planned from a calibration for the model at hand."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subkv.base.errors import CacheError, SubkvError, concerning
from subkv.format import metadata
from subkv.format.bases import CodedHead
from subkv.format.calibration import read_calibration
from subkv.format.window import DEFAULT, Window
from subkv.plan.pipeline import Options, convert
from subkv.plan.positions import SAME_ORDER, transformers_order
from subkv.torch.rows import RowCodec

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bases:
    """What all caches of one model share. layers: (keys, values) of every coded layer; config: of the decoder."""

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
    config = model.config.get_text_config(decoder=True)
    try:
        with open(path, "rb") as handle:
            converted = handle.read(4) == b"GGUF"
    except OSError as error:
        raise CacheError("path", f"expected a GGUF or a calibration, found none at {path}: {error.strerror}") from error
    asked = {name: n for name, n in (("n_sink", n_sink), ("n_recent", n_recent)) if n is not None}
    if converted:
        for name, value in {"kv_bits": kv_bits, **asked}.items():
            if value is not None:
                raise CacheError(name, f"expected none with a converted file, which has its layout, found {value}")
        described = metadata.read(Path(path))
        if described["adapt"]:
            LOG.warning("subkv.adapt: bases stay as calibrated with transformers, found %s", described["adapt"])
        heads, arch, fingerprint = metadata.read_heads(Path(path)), described["arch"], described["fingerprint"]
        n_layer, window = described["block_count"], Window(described["n_sink"], described["n_recent"]).filled()
    else:
        window = replace(DEFAULT, **asked)
        with concerning(calibration="path"):
            calibration = read_calibration(Path(path))
            result = convert(ModelFacts(model, calibration.arch), calibration, Options(kv_bits=kv_bits, window=window))
        for note in result.notes:
            LOG.warning("%s", note)
        heads = {layer.shape.il: layer.heads for layer in result.layers}
        arch, fingerprint, n_layer = calibration.arch, None, calibration.block_count
    if n_layer != config.num_hidden_layers:
        raise CacheError("path", f"expected {config.num_hidden_layers} layers as in the model, found {n_layer}")
    _check_kind(arch, config.model_type)
    with concerning(arch="path"):
        layers = {il: _codecs(arch, of_layer) for il, of_layer in heads.items()}
    return Bases(layers, window, fingerprint, config)


def _check_kind(arch: str, model_type: str) -> None:
    """Refuse bases of another architecture, as far as the two naming schemes tell."""
    known = {name.replace("-", "") for name in SAME_ORDER} - {"phi2"}  # transformers' phi
    ours, theirs = arch.replace("-", ""), model_type.replace("_", "").removesuffix("text")
    if ours != theirs and (ours in known or theirs in known):
        raise CacheError("path", f"expected bases of a {model_type} model, found those of {arch}")


def _codecs(arch: str, heads: tuple[CodedHead, ...]) -> tuple[RowCodec, RowCodec]:
    d_k, d_v = heads[0].k.encode.shape[1], heads[0].v.encode.shape[1]
    return (
        RowCodec([head.k for head in heads], transformers_order(arch, d_k), [head.gamma for head in heads]),
        RowCodec([head.v for head in heads], np.arange(d_v), [1.0] * len(heads)),
    )


class ModelFacts:
    """A model of transformers as planning sees it: GGUF's names for its numbers; a subkv.native.gguf.Base."""

    def __init__(self, model: Any, arch: str) -> None:
        self.path = Path(str(model.config.name_or_path))
        self._layers = _attention_modules(model)
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

    def keys(self) -> list[str]:
        return list(self._values)

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def has_tensor(self, name: str) -> bool:
        return False  # rope_freqs.weight: a rope_type other than default says so here

    def tensor(self, name: str, why: str) -> NDArray[np.float32]:
        """blk.N.attn_output.weight, [n_embd, n_head·d_v]. Raises SubkvError where the model names it otherwise."""
        il = name.removeprefix("blk.").removesuffix(".attn_output.weight")
        weight = getattr(getattr(self._layers.get(int(il)), "o_proj", None), "weight", None)
        if weight is None:
            raise SubkvError(name, f"expected an output projection o_proj in layer {il}, found none; {why}")
        return weight.detach().float().cpu().numpy()


def _attention_modules(model: Any) -> dict[int, Any]:
    """The attention of every layer."""
    return {m.layer_idx: m for m in model.get_decoder().modules() if hasattr(m, "layer_idx") and hasattr(m, "o_proj")}
