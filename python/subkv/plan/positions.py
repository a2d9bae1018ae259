"""Spreads the statistics of short chunks over all positions of the trained context.

Rotary attention depends only on relative positions: the same text `o` positions later gives the same output, with keys
and queries rotated by o. So the rotated statistics of a chunk at positions [0, n_ctx) hold at every offset. Their
average over offsets up to the trained context is exact for the calibrated text. Without it, the bases have no bits for
some directions of keys at other positions: SmolLM2-135M, calibrated at 2048 tokens, has a KLD of 0.2 at 8192 tokens
with 5 bits per element.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from subkv.base.errors import SubkvError
from subkv.format.arrays import F16, F64
from subkv.format.calibration import Calibration, LayerStats, Rotation
from subkv.native.gguf import Base
from subkv.plan import mla

# Architectures by the place of rotary pairs in llama.cpp: neighbours, or half of the rotated dimensions apart.
NEIGHBOURS = ("llama",)
# M-RoPE: a token has positions in time, height and width, equal in text; pairs use them in sections or interleaved.
SECTIONS = ("qwen2vl",)
INTERLEAVED = ("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe")
HALVES = (
    *("qwen2", "qwen3", "gemma", "stablelm", "phi2", "gptneox", "starcoder2", "lfm2", "lfm2moe", "qwen3next"),
    *("gemma2", "gemma3", "qwen3moe"),  # of gemma3 the layers without a sliding window
    *(*SECTIONS, *INTERLEAVED),
)
# Learned positions are added to the embeddings; queries and keys are not rotated.
ABSOLUTE = ("gpt2",)
# Latent attention: the elements after the latent are rotated in neighbours, or not at all.
ROTATED_LATENT = ("deepseek2", "deepseek32", "glm-dsa", "hy_v4", "dots3note")
UNROTATED_LATENT = ("kimi-linear", "kimi-k3", "glm5-next")
# Architectures whose keys have the same order in transformers and llama.cpp.
SAME_ORDER = (*HALVES, *ABSOLUTE, "gpt-oss", "olmo2", "phi3", "qwen2moe")


def halves_of_neighbours(d: int) -> NDArray[np.int64]:
    """[d] for every coordinate of a key with neighbouring pairs: its index in a key with pairs half a head apart."""
    return np.arange(d).reshape(2, d // 2).T.ravel()


def transformers_order(arch: str, d: int) -> NDArray[np.int64]:
    """[d] for every coordinate of llama.cpp's keys: its index in a key of transformers.

    Raises SubkvError about `arch` if its order is unknown.
    """
    if arch in NEIGHBOURS:
        return halves_of_neighbours(d)
    if arch in SAME_ORDER:
        return np.arange(d)
    raise SubkvError(
        "arch",
        f"expected an architecture whose order of keys in transformers is known "
        f"({', '.join(sorted(NEIGHBOURS + SAME_ORDER))}), found {arch}",
    )


class Pairs(Rotation):
    """A rotation, applied."""

    @classmethod
    def none(cls, d: int) -> Pairs:
        """Pairs for keys without rotation."""
        return cls(np.arange(d), np.zeros(d))

    def rotate(self, x: NDArray[np.floating], position: NDArray[np.floating | np.integer] | float) -> F64:
        """R_p x of rows x [..., d] float64; position: p of the rows, broadcast to [...]."""
        angle = np.multiply.outer(np.asarray(position, dtype=np.float64), self.omega)
        return np.asarray(x * np.cos(angle) + x[..., self.partner] * np.sin(angle))

    def matrix(self, moments: F64, span: float) -> F64:
        """Mean of R_o M R_oᵀ over offsets o in [0, span], symmetric moments [n, d, d]."""
        cos_d, sin_d = _mean_cos_sin(self.omega[:, None] - self.omega[None, :], span)
        cos_s, sin_s = _mean_cos_sin(self.omega[:, None] + self.omega[None, :], span)
        rows, columns = moments[:, self.partner], moments[:, :, self.partner]  # at the partners of row and column
        mean = (cos_d + cos_s) * moments + (cos_d - cos_s) * rows[:, :, self.partner]
        mean += (sin_s + sin_d) * rows + (sin_s - sin_d) * columns
        return 0.25 * (mean + mean.transpose(0, 2, 1))

    def vector(self, means: F64, span: float) -> F64:
        """Mean of R_o x over offsets o in [0, span], means [n, d]."""
        cos, sin = _mean_cos_sin(self.omega, span)
        return means * cos + means[:, self.partner] * sin

    def rows(self, rows: F16, span: float) -> F16:
        """Sampled rows [n, heads, d], each rotated by its own offset; offsets are evenly spread."""
        offset = span * (np.arange(len(rows)) + 0.5) / max(len(rows), 1)
        return self.rotate(rows.astype(np.float64), offset[:, None]).astype(np.float16)


def _mean_cos_sin(omega: F64, span: float) -> tuple[F64, F64]:
    """Means of cos(omega·o) and sin(omega·o) over o in [0, span]."""
    middle = omega * span / 2
    scale = np.sinc(middle / np.pi)
    return np.cos(middle) * scale, np.sin(middle) * scale


def pairs(base: Base, d: int) -> Pairs | None:
    """The rotary pairs of keys of size d; None if the model's kind of rotation is unknown."""
    arch, latent = base.get("general.architecture"), mla.is_latent(base)
    if latent and arch in UNROTATED_LATENT:
        return Pairs.none(d)
    neighbours = arch in NEIGHBOURS or (latent and arch in ROTATED_LATENT)
    scaling = base.get(f"{arch}.rope.scaling.type")
    if not (neighbours or arch in HALVES) or scaling not in (None, "none", "linear"):
        return None
    n_rot = int(base.get(f"{arch}.rope.dimension_count") or d)
    if n_rot > d or n_rot % 2:
        return None
    half = n_rot // 2
    theta = float(base.get(f"{arch}.rope.freq_base") or 10000.0) ** (-2.0 * np.arange(half) / n_rot)
    if scaling == "linear":
        theta = theta / float(base.get(f"{arch}.rope.scaling.factor") or 1.0)
    if base.has_tensor("rope_freqs.weight"):
        theta = theta / base.tensor("rope_freqs.weight", "it scales the rotary frequencies").ravel()[:half]
    sections = base.get(f"{arch}.rope.dimension_sections")
    if arch in SECTIONS + INTERLEAVED and isinstance(sections, list) and len(sections) == 4:
        theta[_unrotated_pairs(sections, half, arch in INTERLEAVED)] = 0.0
    rotary = Pairs.none(d)
    first, second = _paired(n_rot, d - n_rot if latent else 0, neighbours)
    rotary.partner[first], rotary.partner[second] = second, first
    rotary.omega[first], rotary.omega[second] = -theta, theta
    return rotary


def _paired(n_rot: int, start: int, neighbours: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first and the second coordinates [n_rot/2] of rotary pairs in n_rot coordinates from `start` on."""
    half = n_rot // 2
    first = start + (2 * np.arange(half) if neighbours else np.arange(half))
    return first, first + (1 if neighbours else half)


def candidates(base: Base, d: int) -> list[NDArray[np.int64]]:
    """Possible partners [d] of the coordinates of a key of size d: neighbours, or half of the rotated dimensions apart.
    All dimensions rotate, or the first or the last ones."""
    arch, out = base.get("general.architecture"), []
    counts = [base.get(f"{arch}.rope.dimension_count{suffix}") for suffix in ("", "_swa")]
    for n_rot in sorted({n for n in (*counts, d, d // 2, d // 4) if isinstance(n, int) and 0 < n <= d and n % 2 == 0}):
        for start in sorted({0, d - n_rot}):
            for neighbours in (True, False):
                first, second = _paired(n_rot, start, neighbours)
                partner = np.arange(d)
                partner[first], partner[second] = second, first
                out.append(partner)
    return out


def _unrotated_pairs(sections: list[int], half: int, interleaved: bool) -> NDArray[np.bool_]:
    """[half] the pairs that depend on a token's fourth position, which is 0 in text."""
    pair = np.arange(half) % max(sum(sections), 1)
    if not interleaved:
        return np.asarray(pair >= sum(sections[:3]))
    return np.asarray(pair >= 3 * np.take(sections, pair % 3))


def head_size(base: Base) -> int | None:
    """Head size of keys from the metadata; None if it is not the same in all layers."""
    arch = base.get("general.architecture")
    n_head, n_embd = (base.get(f"{arch}.{key}") for key in ("attention.head_count", "embedding_length"))
    d = base.get(f"{arch}.attention.key_length")
    if d is None and isinstance(n_head, int) and isinstance(n_embd, int) and n_head:
        d = n_embd // n_head
    return d if isinstance(d, int) else None


def is_known(base: Base) -> bool:
    """Whether the metadata tell the rotation of the keys."""
    d = head_size(base)
    return d is not None and pairs(base, d) is not None


def average_over_positions(base: Base, calibration: Calibration) -> tuple[Calibration, SubkvError | None]:
    """The calibration spread over all trained positions, and a remark if that is needed but not supported.

    The rotation is the one that the calibration holds, else the one of the metadata.
    """
    trained = base.get(f"{base.get('general.architecture')}.context_length")
    n_ctx, sensitivity = calibration.n_ctx, calibration.sensitivity
    n_ctx_sensitivity = sensitivity.n_ctx if sensitivity else n_ctx
    shortest = min(n_ctx, n_ctx_sensitivity)
    if trained is None or shortest >= trained:
        return calibration, None
    spans, layers = [float(max(trained - n, 0)) for n in (n_ctx, n_ctx_sensitivity)], []
    for layer in calibration.layers:
        measured = layer.rotation
        rotary = pairs(base, layer.shape.d_k) if measured is None else Pairs(measured.partner, measured.omega)
        if rotary is None:
            return calibration, SubkvError(
                "calibration",
                f"expected a calibration at the trained context of {trained} tokens, found {shortest}: quality beyond "
                f"is unknown; calibrate with -c {trained}",
            )
        layers.append(_spread_layer(layer, rotary, *spans))
    return replace(calibration, layers=tuple(layers)), None


def _spread_layer(layer: LayerStats, rotary: Pairs, span: float, span_sensitivity: float) -> LayerStats:
    measured = layer.sensitivity
    if measured is not None:
        k, k0 = (rotary.matrix(matrices, span_sensitivity) for matrices in (measured.k, measured.k0))
        measured = replace(measured, k=k, k0=k0)
    return replace(
        layer,
        k2=rotary.matrix(layer.k2, span),
        q2=rotary.matrix(layer.q2, span),
        k1=rotary.vector(layer.k1, span),
        q1=rotary.vector(layer.q1, span),
        ks=rotary.rows(layer.ks, span),
        qs=rotary.rows(layer.qs, span),
        sensitivity=measured,
    )
