"""Bases from the weights alone: energies against brute force, layouts, provenance, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import derived_numpy
import numpy as np
import pytest
import weights_numpy as weights
from each import each
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray
from weights_numpy import Energies, Weights, partners

from subkv.base.errors import CacheError, SubkvError
from subkv.format import metadata
from subkv.format.bases import CodedLayer
from subkv.format.layout import Layout
from subkv.format.window import Window
from subkv.native.gguf import Gguf
from subkv.plan import mla, predict
from subkv.plan.pipeline import Options, Result

F64 = NDArray[np.float64]
Models = Callable[..., Path]
SPAN = 512
SHIFT = 600.0  # norm of a bias, as Qwen2's largest


def of_model(model: Path, options: Options) -> Result:
    with Gguf(model) as base:
        return derived_numpy.plan(base, options)


class Changed:
    """A model with some tensors and keys replaced; None: the tensor is missing. A subkv.native.gguf.Base."""

    def __init__(self, base: Gguf, tensors: dict[str, Any] | None = None, **values: Any) -> None:
        self.base, self.tensors, self.values, self.path = base, tensors or {}, values, base.path

    def keys(self) -> list[str]:
        return self.base.keys()

    def get(self, key: str) -> Any:
        return self.values.get(key.rpartition(".")[2], self.base.get(key))

    def has_tensor(self, name: str) -> bool:
        return self.tensors[name] is not None if name in self.tensors else self.base.has_tensor(name)

    def tensor(self, name: str, why: str) -> Any:
        return self.matrix(name, why).rows(slice(None))

    def matrix(self, name: str, why: str, stacked: bool = False) -> Any:
        return Rows(self.tensors[name]) if name in self.tensors else self.base.matrix(name, why, stacked)


class Rows:
    def __init__(self, values: Any) -> None:
        self.values = np.atleast_2d(values).astype(np.float32)
        self.shape = self.values.shape

    def rows(self, which: Any) -> Any:
        return self.values[which].copy()


def energies(base: Any, il: int = 0, span: int = SPAN) -> Energies:
    layers = derived_numpy.shapes(base)
    found = Weights(base, layers, span).energies(layers[il])
    assert found is not None
    return found


def rotated(x: F64, position: F64, n_rot: int, neighbours: bool, base: float = 10000.0) -> F64:
    """Rows [n, d] as RoPE turns them, written down from its definition."""
    half = n_rot // 2
    angle = position[:, None] * base ** (-2.0 * np.arange(half) / n_rot)
    first = 2 * np.arange(half) if neighbours else np.arange(half)
    second = first + (1 if neighbours else half)
    out = x.copy()
    out[:, first] = x[:, first] * np.cos(angle) - x[:, second] * np.sin(angle)
    out[:, second] = x[:, first] * np.sin(angle) + x[:, second] * np.cos(angle)
    return out


@pytest.mark.parametrize("arch", ["llama", "qwen2"])  # neighbours without biases, halves with them
def test_predicted_energies_match_keys(tiny_model: Models, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """Keys and queries of a white stream, rotated at random positions, have the predicted means and energies."""
    monkeypatch.setattr(weights, "WHITE", 1.0)
    rng = np.random.default_rng(0)
    with Gguf(tiny_model(arch)) as base:
        plain = Changed(base, context_length=SPAN)
        found, shape = energies(plain), derived_numpy.shapes(base)[0]
        norm = base.tensor("blk.0.attn_norm.weight", "").ravel()
        position = rng.uniform(0.0, SPAN, 20000)
        x = rng.standard_normal((len(position), len(norm))) * norm

        def rows(side: str, head: int) -> F64:
            of_head = slice(head * shape.d_k, (head + 1) * shape.d_k)
            bias = base.tensor(f"blk.0.attn_{side}.bias", "").ravel()[of_head] if arch == "qwen2" else 0.0
            values = x @ base.tensor(f"blk.0.attn_{side}.weight", "")[of_head].T
            return rotated(values + bias, position, shape.d_k, arch == "llama")

        for h in range(shape.n_head_kv):
            k = rows("k", h)
            np.testing.assert_allclose(found.mean[h], k.mean(0), atol=0.1)
            k -= found.mean[h]
            known_energy = found.k[h] + found.rest[h]
            q = np.concatenate([rows("q", h * shape.n_group + g) for g in range(shape.n_group)])
            assert known_energy.sum() == pytest.approx(np.sum(k**2) / len(k), rel=0.03)
            assert found.q[h].sum() == pytest.approx(np.sum(q**2) / len(q), rel=0.03)
            if arch == "llama":  # else biases are added to the common part of keys and queries
                both = np.sqrt(np.mean(k**2, 0) * np.mean(q**2, 0))
                np.testing.assert_allclose(known_energy / known_energy.sum(), both / both.sum(), rtol=0.25)


def test_stream_energy_follows_large_weights(tiny_model: Models) -> None:
    """Directions in which the matrices are large get the energy of the stream that is not white."""
    rng = np.random.default_rng(1)
    with Gguf(tiny_model("llama")) as base:
        n = int(base.get("llama.embedding_length"))
        few = np.linalg.qr(rng.standard_normal((n, 3)))[0]
        names = [f"blk.{il}.attn_{side}.weight" for il in range(2) for side in "qk"]
        changed = {name: base.tensor(name, "") @ (np.eye(n) + 9.0 * few @ few.T) for name in names}
        changed |= {f"blk.{il}.attn_norm.weight": np.ones(n) for il in range(2)}
        stream = Weights(Changed(base, changed), derived_numpy.shapes(base), SPAN)._stream
    assert stream is not None
    assert np.sum(stream**2) == pytest.approx(1.0 - weights.WHITE, rel=1e-4)
    assert np.sum((few.T @ stream) ** 2) == pytest.approx(1.0 - weights.WHITE, rel=0.01)


@each(("arch", "apart"), [("llama", 1), ("qwen2", 16), ("gemma2", 16), ("gpt-oss", 16), ("bloom", 0)])
def test_coordinates_that_turn_together_share_their_energy(tiny_model: Models, arch: str, apart: int) -> None:
    with Gguf(tiny_model(arch)) as base:
        partner, found = partners(base, 32), energies(base)
    assert partner is not None
    assert set(abs(partner - np.arange(32))) == {apart}
    rest = found.k[:, partner]
    if arch != "bloom":
        np.testing.assert_allclose(found.k, rest)
        np.testing.assert_allclose(found.q, found.q[:, partner])


def test_partial_rotation(tiny_model: Models) -> None:
    with Gguf(tiny_model("qwen2")) as base:
        partner = partners(Changed(base, dimension_count=8), 32)
        assert partners(Changed(base, dimension_count=7), 32) is None
        assert partners(Changed(base, architecture="unheard of"), 32) is None
    assert partner is not None
    assert partner.tolist() == [4, 5, 6, 7, 0, 1, 2, 3, *range(8, 32)]


def test_head_norms_cancel_the_scale_of_the_projection(tiny_model: Models) -> None:
    """Qwen3 normalizes and weights keys after their projection, so the projection's size does not matter."""
    rng = np.random.default_rng(2)
    weight = rng.uniform(0.5, 2.0, 32)
    with Gguf(tiny_model("qwen2")) as base:
        normed = {f"blk.0.attn_{side}_norm.weight": weight for side in "qk"}
        without = {f"blk.0.attn_{side}.bias": None for side in "qk"}
        large = {"blk.0.attn_k.weight": 100.0 * base.tensor("blk.0.attn_k.weight", "")}
        one = energies(Changed(base, normed | without))
        other = energies(Changed(base, normed | without | large))
        whole = energies(Changed(base, without | {"blk.0.attn_k_norm.weight": np.tile(weight, 2)}))
        with pytest.raises(AssertionError):
            energies(Changed(base, {"blk.0.attn_k_norm.weight": weight[:5]}))
    np.testing.assert_allclose(one.k, other.k, rtol=1e-3)
    assert one.k.sum() == pytest.approx(2 * np.sum(weight**2), rel=0.3)
    assert whole.k.shape == one.k.shape and np.isfinite(whole.k).all()


def test_fused_matrices_are_those_apart(tiny_model: Models) -> None:
    with Gguf(tiny_model("qwen2")) as base:
        parts: dict[str, Any] = {}
        for il in range(2):
            for kind in ("weight", "bias"):
                names = [f"blk.{il}.attn_{side}.{kind}" for side in "qkv"]
                values = [base.tensor(name, "") for name in names]
                parts[f"blk.{il}.attn_qkv.{kind}"] = np.concatenate(values, axis=0 if kind == "weight" else 1)
                parts |= dict.fromkeys(names)
        want, found = energies(base), energies(Changed(base, parts))
    for name in ("k", "q", "mean"):
        np.testing.assert_allclose(getattr(found, name), getattr(want, name), rtol=1e-5, atol=1e-8)


#
# plans
#


def options(kv_bits: float | None = 4.75, **others: Any) -> Options:
    return Options(kv_bits=kv_bits, window=Window(4, 16), bpe_context=1 << 20, **others)


def invertible(layers: tuple[CodedLayer, ...]) -> None:
    """Every basis keeps all coefficients, with at least LEAST bits, and D undoes E up to the quantizers' gains."""
    for layer in layers:
        for head in layer.heads:
            for side in (head.k, head.v):
                assert min(bits for _, bits in side.bands) >= derived_numpy.LEAST
                product = side.encode.astype(np.float64) @ side.decode.astype(np.float64).T
                assert np.allclose(product, np.diag(np.diag(product)), atol=2e-3)
                assert np.diag(product).min() > 0.99
            assert head.gamma == 1.0


@pytest.mark.parametrize("arch", ["lfm2", "qwen35"])
def test_layers_that_keep_a_state_have_no_bases(tiny_model: Models, arch: str) -> None:
    assert [layer.shape.il for layer in of_model(tiny_model(arch), options()).layers] == [1, 3]


@each("arch", ["llama", "qwen2", "gemma2", "gemma4", "gpt-oss", "bloom", "gpt2", "grok", "t5", "lfm2", "qwen2vl"])
def test_any_model_gets_bases(tiny_model: Models, arch: str) -> None:
    result = of_model(tiny_model(arch), options())
    invertible(result.layers)
    assert 4.5 < result.counted.total <= 4.75
    assert [note.key for note in result.notes] == (["model"] if arch == "t5" else [])  # its tensors have other names


@each("kv_bits", [4.0, 4.75, 5.3, 7.1, 12.0])
@each(
    ("arch", "dims"),
    [("llama", {}), ("llama", {"head_size": 56}), ("qwen2", {"head_size": 80}), ("gemma4", {}), ("deepseek2", {})],
)
def test_bytes_of_bases_match_libsubkv(
    tiny_model: Models, tmp_path: Path, arch: str, dims: dict[str, Any], kv_bits: float
) -> None:
    """In bytes, as libsubkv reports them after loading."""
    context = 1 << 20
    result = derived_numpy.sidecar(tiny_model(arch, **dims), tmp_path / "out.gguf", options(kv_bits))
    elements = sum(layer.shape.n_head_kv * layer.shape.d_k for layer in result.layers)
    elements += sum(layer.shape.n_head_kv * layer.shape.d_v for layer in result.layers if not layer.latent)
    held = 8 * metadata.read(tmp_path / "out.gguf")["bytes_bases"]
    assert result.counted.bases * context * elements == pytest.approx(held, rel=1e-9)


def test_unknown_rotation_or_damaged_weights_are_coded_evenly(tiny_model: Models) -> None:
    with Gguf(tiny_model("qwen2")) as base:
        bad = np.full((64, 128), np.nan)
        for changed in (
            Changed(base, architecture="unheard of", block_count=2),
            Changed(base, {"blk.0.attn_k.weight": bad, "blk.1.attn_k.weight": bad}),
            Changed(base, {f"blk.{il}.attn_{side}.weight": None for il in range(2) for side in "qk"}),
        ):
            known = {"head_count": 4, "head_count_kv": 2, "key_length": 32, "value_length": 32}
            changed.values |= known
            result = derived_numpy.plan(changed, options())
            invertible(result.layers)
            assert len(result.notes) == 1
            assert result.settings.basis_k == "pca"
            assert len({np.asarray(h.k.encode).tobytes() for layer in result.layers for h in layer.heads}) == 1


@pytest.mark.parametrize("side", "qk")
def test_weights_of_zeros(tiny_model: Models, side: str) -> None:
    with Gguf(tiny_model("llama")) as base:
        name = f"blk.1.attn_{side}.weight"
        result = derived_numpy.plan(Changed(base, {name: np.zeros_like(base.tensor(name, ""))}), options())
    invertible(result.layers)
    assert not result.notes


def test_all_heads_get_equal_budgets(tiny_model: Models) -> None:
    """No head is known to matter more: the narrowest and the widest differ by at most one group of bits."""
    result = of_model(tiny_model("llama", n_layer=4), options(5.0))
    bits = [sum(n * b for n, b in head.v.bands) for layer in result.layers for head in layer.heads]
    assert max(bits) - min(bits) <= 8


def with_biases(base: Gguf, d: int, size: float, pairs: list[int]) -> Changed:
    """Keys of all layers shifted by biases of this norm, in these rotary pairs."""
    rng = np.random.default_rng(3)
    tensors = {}
    for il in range(2):
        bias = np.zeros((2, d))
        for pair in pairs:
            bias[:, [pair, pair + d // 2]] = rng.standard_normal((2, 2))
        tensors[f"blk.{il}.attn_k.bias"] = (size / np.linalg.norm(bias) * bias).reshape(-1)
    return Changed(base, tensors, context_length=8192)


@pytest.mark.parametrize("pairs", [[31], [30, 31], [27, 31], [24]])  # which turn by 1 to 8 radians in 8192 positions
def test_large_key_biases_cost_little(tiny_model: Models, pairs: list[int]) -> None:
    """Keys shifted by 600: the rest of them loses less than one bit fewer would cost, a factor of 4."""
    d = 64
    position = np.sort(np.random.default_rng(4).uniform(0.0, 8192.0, 256))
    lost = []
    with Gguf(tiny_model("qwen2", head_size=d)) as base:
        for size in (1e-3, SHIFT):
            model = with_biases(base, d, size, pairs)
            layer = derived_numpy.plan(model, options(5.0)).layers[0]
            norm = base.tensor("blk.0.attn_norm.weight", "").ravel()
            x = np.random.default_rng(5).standard_normal((len(position), len(norm))) * norm
            keys = x @ base.tensor("blk.0.attn_k.weight", "").T + model.tensors["blk.0.attn_k.bias"]
            lost.append(0.0)
            for h, head in enumerate(layer.heads):
                k = rotated(keys[:, d * h : d * h + d], position, d, False).astype(np.float32)
                lost[-1] += float(np.mean((k - predict.reconstructed(k, head.k)) ** 2))
    assert lost[1] < 4.0 * lost[0]


#
# files
#


def test_sidecar_names_its_origin(tiny_model: Models, tmp_path: Path) -> None:
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    result = derived_numpy.sidecar(tiny_model("llama"), first)
    derived_numpy.sidecar(tiny_model("llama"), second)
    assert first.read_bytes() == second.read_bytes()
    with Layout(first) as layout:
        described = layout.description
    zeros = "0" * 64
    assert described["calibration"] == {"sha256": zeros, "tokens": 0, "text": derived_numpy.FROM_WEIGHTS}
    assert described["base_sha256"] == zeros
    assert described["bpe_context"] == 8192
    assert described["bits_per_element"] == pytest.approx(result.counted.total)
    assert 4.6 < result.counted.total <= derived_numpy.KV_BITS
    heads = metadata.read_heads(first)
    for layer in result.layers:
        for ours, stored in zip(layer.heads, heads[layer.shape.il], strict=True):
            assert ours.k.bands == stored.k.bands
            np.testing.assert_array_equal(ours.k.encode, stored.k.encode)


@each(
    ("others", "key"),
    [
        ({"codec": "int8"}, "codec"),
        ({"basis_k": "pca"}, "basis_k"),
        ({"rank_v": 16}, "rank_v"),
        ({"kv_bits": 2.5}, "kv_bits"),
        ({"window": Window(4, 1 << 20)}, "n_recent"),
    ],
)
def test_refused_options(tiny_model: Models, tmp_path: Path, others: dict[str, Any], key: str) -> None:
    with pytest.raises(SubkvError) as refused:
        derived_numpy.sidecar(tiny_model("llama"), tmp_path / "out.gguf", replace(options(), **others))
    assert refused.value.key == key
    assert "expected" in refused.value.reason
    assert not list(tmp_path.iterdir())


def test_refused_models(tiny_model: Models, tmp_path: Path) -> None:
    with pytest.raises(CacheError) as refused:
        derived_numpy.sidecar(tiny_model("mamba"), tmp_path / "out.gguf")
    assert "model mamba: subkv cannot hold its K/V cache because no layer of it has K/V heads" in str(refused.value)
    assert "-ctk f16" in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_latent_attention(tiny_model: Models, tmp_path: Path) -> None:
    """One row per token, whose first bands cover only the latent; the file reads back unchanged."""
    result = derived_numpy.sidecar(tiny_model("deepseek2"), tmp_path / "out.gguf", options(5.0))
    described = metadata.read(tmp_path / "out.gguf")
    assert described["version"] == 5
    assert described["bytes_per_token"] == result.counted.bytes_per_token
    assert described["bits_per_element_rows"] == pytest.approx(8 * described["bytes_per_token"] / (2 * 48))
    read = metadata.read_heads(tmp_path / "out.gguf")
    for layer in result.layers:
        (ours,), (stored,) = layer.heads, read[layer.shape.il]
        assert layer.latent and ours.v.bands == stored.v.bands
        assert not ours.k.encode[:32, 32:].any() and not ours.k.decode[32:, :32].any()
        np.testing.assert_array_equal(stored.v.decode, ours.k.decode[:32, :32])
        np.testing.assert_array_equal(stored.v.ratio, ours.v.ratio)
        product = ours.k.encode.astype(np.float64) @ ours.k.decode.astype(np.float64).T
        assert np.allclose(product, np.diag(np.diag(product)), atol=2e-3)


@each("arch", mla.SUPPORTED)
def test_latent_attention_of_every_form(tiny_model: Models, arch: str) -> None:
    """Linear layers have no rows, drafting ones are not coded, and not every file tells the size of values."""
    with Gguf(tiny_model("deepseek2", n_layer=3)) as base:
        known = {key.rpartition(".")[2]: base.get(key) for key in base.keys() if key.startswith("deepseek2.")}  # noqa: SIM118
        other = Changed(base, **known | {"architecture": arch, "head_count_kv": [0, 1, 1], "value_length": 40})
        other.values["nextn_predict_layers"] = 1
        (layer,) = derived_numpy.plan(other, options(6.0)).layers
        assert (layer.shape.il, layer.shape.d_k, layer.shape.d_v, layer.latent) == (1, 48, 32, True)


def test_latent_rows_as_large_as_real_ones(tiny_model: Models) -> None:
    """The default budget has room for the bases of rows of 512 + 64 elements."""
    with Gguf(tiny_model("deepseek2", n_lora=512, head_size=128)) as base:
        result = derived_numpy.plan(base, Options())
    assert result.counted.context == 32768 and result.counted.total <= derived_numpy.KV_BITS
    bits = [width for layer in result.layers for _, width in layer.heads[0].k.bands]
    assert min(bits) >= 6


def test_latent_attention_that_is_not_hooked(tiny_model: Models) -> None:
    with Gguf(tiny_model("deepseek2")) as base:
        other = Changed(base, architecture="deepseek4", block_count=2)
        other.values |= {"head_count": 4, "head_count_kv": 1, "key_length_mla": 32}
        with pytest.raises(CacheError, match=r"multi-head latent \(MLA\) of another form than that of deepseek2, "):
            derived_numpy.plan(other, options())


@each("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "F16", "BF16", "F32"])
def test_rows_are_ggufs(tmp_path: Path, kind: str) -> None:
    """Dequantized by ggml as gguf-py does it, bit by bit; any choice of rows."""
    from gguf import GGUFWriter

    values = np.random.default_rng(6).standard_normal((24, 64)).astype(np.float32)
    dtype = GGMLQuantizationType[kind]
    raw = values if kind == "F32" else quants.quantize(values, dtype)
    writer = GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("x.weight", raw, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with Gguf(tmp_path / "one.gguf") as file:
        matrix = file.matrix("x.weight", "")
        assert matrix.shape == (24, 64)
        for which in (slice(None), slice(3, 20, 5), np.array([7, 7, 0])):
            want = quants.dequantize(raw, dtype).reshape(24, 64)[which]
            np.testing.assert_array_equal(matrix.rows(which), want)
