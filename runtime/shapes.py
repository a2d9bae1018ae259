"""A model of a given shape with random weights, and bases for it: to measure time and memory, never quality.

    python -m runtime.shapes llama-3.2-1b -o model.gguf
    subkv bench -m model.gguf --bases model.subkv-sidecar.gguf -ctk f16,q8_0,subkv -fa on,off

Nothing is downloaded. What a token costs depends on the sizes and types of tensors and not on their values, as long as
activations stay finite. Weights are random blocks of one type; bases are random rotations; every head has one layout
of the kind that `subkv convert` plans at 4.25 bits per coefficient.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runtime import options
from subkv.base.command import command
from subkv.base.errors import SubkvError

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFWriter
    from numpy.typing import NDArray

    from subkv.format.bases import Bands, CodedHead, StoredBasis
    from subkv.plan.budget import Head

SEED = 1234
BLOCK = 32  # weights of a quantized block
CONVOLVED = 3  # tokens of a short convolution
MOST_GROUP = 128  # query heads that share one KV head, as of kernels/include/subkv/ops.h
TYPES = {"q4_0": 4, "q8_0": 8}  # bits of a code
NO_CALIBRATION = "none: random bases, for time and memory only"


@dataclasses.dataclass(frozen=True)
class Shape:
    """arch: llama.cpp's name. tied: the embeddings are the output matrix, too. context: tokens trained with.

    latent, turned: elements of a row of latent attention (MLA), and those behind them, which positions turn; 0: none.
    attending: the layers that attend, where others are short convolutions (a hybrid); empty: all of them.
    indexer: heads, elements of a key and cells that are chosen, where a token attends to some alone; empty: to all.
    query: elements that all queries are made from then.
    """

    arch: str
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    embd: int
    ff: int
    vocab: int
    tied: bool
    rope_base: float
    context: int
    latent: int = 0
    turned: int = 0
    attending: tuple[int, ...] = ()
    indexer: tuple[int, ...] = ()
    query: int = 0

    @property
    def coded(self) -> list[int]:
        """Layers that have K/V rows."""
        return [il for il in range(self.layers) if not self.attending or il in self.attending]

    def check(self) -> None:
        """Raises SubkvError about a dimension that does not fit the others."""
        if self.heads % self.kv_heads:
            raise SubkvError("heads", f"expected a multiple of {self.kv_heads} KV heads, found {self.heads}")
        if self.heads > MOST_GROUP * self.kv_heads:
            raise SubkvError("heads", f"expected at most {MOST_GROUP} for each KV head, found {self.heads}")
        if self.head_size not in (64, 128, 192, 256):  # eighths of it are bands
            raise SubkvError("head_size", f"expected 64, 128, 192 or 256, found {self.head_size}")
        if self.latent and self.kv_heads != 1:
            raise SubkvError("kv_heads", f"expected 1 with latent attention (MLA), found {self.kv_heads}")
        if not self.coded:
            raise SubkvError(
                "layers", f"expected more than {min(self.attending)}, the first that attends, found {self.layers}"
            )
        if self.attending and self.embd != self.heads * self.head_size:
            raise SubkvError("embd", f"expected {self.heads * self.head_size}, all heads together, found {self.embd}")
        for key, n in (("embd", self.embd), ("ff", self.ff)):
            if n % BLOCK:
                raise SubkvError(key, f"expected a multiple of {BLOCK}, found {n}")

    def matrices(self) -> dict[str, tuple[int, ...]]:
        """[rows, columns] of all matrices, or one more for each head, by name, in the order of the file."""
        ends = ["token_embd"] if self.tied else ["token_embd", "output"]
        found: dict[str, tuple[int, ...]] = dict.fromkeys(ends, (self.vocab, self.embd))
        coded = self.coded
        for il in range(self.layers):
            layer = self._mixing(il in coded) | {
                "ffn_gate": (self.ff, self.embd),
                "ffn_up": (self.ff, self.embd),
                "ffn_down": (self.embd, self.ff),
            }
            found |= {f"blk.{il}.{name}": size for name, size in layer.items()}
        return found

    def _mixing(self, attends: bool) -> dict[str, tuple[int, ...]]:
        """Matrices of a layer that take from other tokens."""
        if not attends:
            return {"shortconv.in_proj": (3 * self.embd, self.embd), "shortconv.out_proj": (self.embd, self.embd)}
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        queries = {"attn_q": (q + self.heads * self.turned, self.embd)}
        if self.indexer:
            n_head, n_key, _ = self.indexer
            queries = {
                "attn_q_a": (self.query, self.embd),
                "attn_q_b": (q + self.heads * self.turned, self.query),
                "indexer.attn_q_b": (n_head * n_key, self.query),
                "indexer.attn_k": (n_key, self.embd),
                "indexer.proj": (n_head, self.embd),
            }
        return {
            **queries,
            **self._rows(kv),
            "attn_output": (self.embd, q),
        }

    def _rows(self, kv: int) -> dict[str, tuple[int, ...]]:
        """Matrices of a layer that make its K/V rows and read them; kv: elements of K."""
        if not self.latent:
            return {"attn_k": (kv, self.embd), "attn_v": (kv, self.embd)}
        return {
            "attn_kv_a_mqa": (self.latent + self.turned, self.embd),
            "attn_k_b": (self.heads, self.latent, self.head_size),
            "attn_v_b": (self.heads, self.head_size, self.latent),
        }

    def vectors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors of ones, by name: normalizations and short convolutions."""
        found: dict[str, tuple[int, ...]] = {}
        coded = self.coded
        for il in range(self.layers):
            layer: dict[str, tuple[int, ...]] = {"attn_norm": (self.embd,), "ffn_norm": (self.embd,)}
            if il not in coded:
                layer["shortconv.conv"] = (self.embd, CONVOLVED)
            elif self.arch in ("qwen3", "lfm2"):
                layer |= {"attn_q_norm": (self.head_size,), "attn_k_norm": (self.head_size,)}
            if self.latent:
                layer["attn_kv_a_norm"] = (self.latent,)
            if self.indexer:
                layer |= {"attn_q_a_norm": (self.query,), "indexer.k_norm": (self.indexer[1],)}
            found |= {f"blk.{il}.{name}": size for name, size in layer.items()}
        return found | {"token_embd_norm" if self.arch == "lfm2" else "output_norm": (self.embd,)}

    def offsets(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors of zeros, by name: biases."""
        return {f"blk.{il}.indexer.k_norm": (self.indexer[1],) for il in self.coded if self.indexer}


SHAPES = {
    "llama-3.2-1b": Shape("llama", 16, 32, 8, 64, 2048, 8192, 128256, True, 5e5, 131072),
    "qwen3-0.6b": Shape("qwen3", 28, 16, 8, 128, 1024, 3072, 151936, True, 1e6, 40960),
    "llama-3.1-8b": Shape("llama", 4, 32, 8, 128, 4096, 14336, 32000, False, 5e5, 131072),  # --help tells what it lacks
    "lfm2-350m": Shape("lfm2", 16, 16, 8, 64, 1024, 4608, 65536, True, 1e6, 128000, attending=(2, 5, 8, 10, 12, 14)),
    "deepseek-v2-lite": Shape("deepseek2", 4, 16, 1, 128, 2048, 10944, 32000, False, 1e4, 163840, 512, 64),
    "deepseek-v3.2": Shape(
        *("deepseek32", 2, 128, 1, 128, 7168, 18432, 32000, False, 1e4, 163840, 512, 64),
        indexer=(64, 128, 2048),
        query=1536,
    ),
}
SMALLEST_VOCABULARY = 258  # of vocabulary()


def vocabulary(n: int) -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE of n tokens: bytes, one pair, names that no text holds, the end."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    start = [*(spelled[byte] for byte in range(256)), "th"]  # llama.cpp wants at least one merge
    return [*start, *(f"<unused{i}>" for i in range(n - len(start) - 1)), "<|endoftext|>"], ["t h"]


def write_model(path: Path, shape: Shape, kind: str) -> None:
    """A GGUF of this shape, one matrix at a time in memory. kind: one of TYPES. Raises SubkvError."""
    import numpy as np  # and gguf: not for a --help
    from gguf import GGMLQuantizationType, GGUFWriter

    from subkv.base.files import atomic_file
    from subkv.base.progress import tracked

    shape.check()
    raw = GGMLQuantizationType[kind.upper()]
    matrices, vectors = shape.matrices(), shape.vectors()
    with atomic_file(path) as handle:
        writer = GGUFWriter(handle.name, shape.arch)  # it opens its file by name
        try:
            _write_keys(writer, shape)
            for name, ones in vectors.items():
                writer.add_tensor_info(f"{name}.weight", ones, np.dtype(np.float32), 4 * math.prod(ones))
            for name, zeros in shape.offsets().items():
                writer.add_tensor_info(f"{name}.bias", zeros, np.dtype(np.float32), 4 * math.prod(zeros))
            for name, (*rows, columns) in matrices.items():
                size = *rows, block_bytes(columns, kind)
                writer.add_tensor_info(f"{name}.weight", size, np.dtype(np.uint8), math.prod(size), raw)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for ones in vectors.values():
                writer.write_tensor_data(np.ones(ones, np.float32))
            for zeros in shape.offsets().values():
                writer.write_tensor_data(np.zeros(zeros, np.float32))
            random = np.random.default_rng(SEED)
            for *rows, columns in tracked(f"writing {path.name}", list(matrices.values()), "matrix"):
                writer.write_tensor_data(random_blocks(random, math.prod(rows), columns, kind))
        finally:
            writer.close()


def _write_keys(writer: GGUFWriter, shape: Shape) -> None:
    from gguf import ExpertGatingFuncType, TokenType

    writer.add_name("random weights")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.embd)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ff)
    writer.add_head_count(shape.heads)
    if shape.attending:
        writer.add_head_count_kv([shape.kv_heads if il in shape.coded else 0 for il in range(shape.layers)])
        writer.add_shortconv_l_cache(CONVOLVED)
    else:
        writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.latent + shape.turned or shape.head_size)
    writer.add_value_length(shape.latent or shape.head_size)
    writer.add_rope_dimension_count(shape.turned or shape.head_size)
    if shape.latent:
        writer.add_q_lora_rank(shape.query)
        writer.add_kv_lora_rank(shape.latent)
        writer.add_key_length_mla(shape.head_size + shape.turned)
        writer.add_value_length_mla(shape.head_size)
        writer.add_leading_dense_block_count(shape.layers)  # as many weights as a token's experts have
        writer.add_expert_feed_forward_length(shape.ff)
        writer.add_expert_shared_count(1)
    if shape.indexer:
        for key, n in zip(("head_count", "key_length", "top_k"), shape.indexer, strict=True):
            writer.add_uint32(f"{shape.arch}.attention.indexer.{key}", n)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens, merges = vocabulary(shape.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types([*[TokenType.NORMAL] * (len(tokens) - 1), TokenType.CONTROL])
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_add_bos_token(False)


def block_bytes(n: int, kind: str) -> int:
    """Bytes of n weights: blocks of an f16 step and the codes."""
    return n // BLOCK * (2 + BLOCK * TYPES[kind] // 8)


def random_blocks(random: np.random.Generator, rows: int, columns: int, kind: str) -> NDArray[np.uint8]:
    """A matrix [rows, bytes] of random codes that maps inputs of variance 1 to outputs of variance 1."""
    import numpy as np

    size = block_bytes(BLOCK, kind)
    blocks = random.integers(0, 256, (rows * columns // BLOCK, size), np.uint8)
    step = (columns * (4 ** TYPES[kind] - 1) / 12) ** -0.5  # codes are uniform
    signs = random.choice(np.array([-1, 1], np.float16), len(blocks))  # the codes' mean is not zero, with signs it is
    blocks[:, :2] = (signs * np.float16(step)).astype("<f2").view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def bands(d: int) -> tuple[Bands, Bands]:
    """Of every head's K and V: 4.25 and 4 bits per coefficient."""
    eighth = d // 8
    return (
        ((eighth, 8), (eighth, 6), (2 * eighth, 4), (4 * eighth, 3)),
        ((eighth, 6), (5 * eighth, 4), (2 * eighth, 3)),
    )


def planned(shape: Shape) -> tuple[list[Head], list[Bands]]:
    """The heads of all layers as the planner sees them, and their bands."""
    import numpy as np  # not for a --help

    from subkv.format.calibration import LayerShape
    from subkv.plan import latent
    from subkv.plan.budget import Head

    if shape.latent:
        row = LayerShape(0, shape.heads, 1, shape.latent + shape.turned, shape.latent, 1.0, 0)
        heads = latent.heads(row, np.ones(shape.latent), np.ones(shape.turned))
        plan: list[Bands] = [bands(shape.latent)[0], bands(shape.turned)[1]]
        return heads * len(shape.coded), plan * len(shape.coded)
    heads = [Head(shape.head_size, np.ones(shape.head_size), centred=key) for key in (True, False)]
    n = len(shape.coded) * shape.kv_heads
    return heads * n, list(bands(shape.head_size)) * n


def write_bases(model: Path, path: Path, shape: Shape) -> None:
    """A sidecar of random bases for a model of write_model(). Raises SubkvError."""
    import numpy as np  # and the native libraries: not for a --help

    from subkv.format import metadata
    from subkv.format.bases import CodedLayer
    from subkv.format.calibration import Calibration, LayerShape, TextSource
    from subkv.format.window import DEFAULT
    from subkv.native.gguf import Gguf, write_sidecar
    from subkv.plan import budget
    from subkv.plan.basis import in_bytes
    from subkv.plan.pipeline import default_context

    d, n = shape.head_size, shape.kv_heads
    random = np.random.default_rng(SEED)
    encode = in_bytes(np.linalg.qr(random.standard_normal((d, d)))[0])
    decode = np.linalg.inv(encode).T.astype(np.float64)
    layers, joint = [], _random_latent(random, shape) if shape.latent else None
    for il in shape.coded:
        if joint:
            sizes = shape.latent + shape.turned, shape.latent
            layers.append(CodedLayer(LayerShape(il, shape.heads, 1, *sizes, 1.0, 0), (joint,), latent=True))
            continue
        layer = LayerShape(il, shape.heads, n, d, d, d**-0.5, 0)
        layers.append(CodedLayer(layer, tuple(_random_head(random, encode, decode) for _ in range(n))))
    text = TextSource(NO_CALIBRATION, "0" * 64, 0)
    nothing = Calibration(
        arch=shape.arch,
        name="",
        block_count=shape.layers,
        n_ctx=0,
        n_skip=0,
        tokens=0,
        texts=(text,),
        model_sha256="",
        generator="",
        layers=(),
        sha256="0" * 64,
    )
    with Gguf(model) as base:
        counted = budget.account(*planned(shape), budget.Overhead(default_context(base), DEFAULT))
        settings = metadata.Settings("banded", "pca", "pca", "one", DEFAULT)
        write_sidecar(base, path, metadata.keys(layers, nothing, settings, counted))


def _random_head(random: np.random.Generator, encode: NDArray[np.float64], decode: NDArray[np.float64]) -> CodedHead:
    """A head whose bases are rows of these, both in another order and with other signs of the columns."""
    import numpy as np

    from subkv.format.bases import CodedHead, StoredBasis

    def basis(widths: Bands, mean: Any) -> StoredBasis:
        signs, order = random.choice((-1.0, 1.0), d), random.permutation(d)  # decompositions of every head take minutes
        own, back = ((matrix[order] * signs).astype(np.float16) for matrix in (encode, decode))
        steps = np.array([1 / (2**bits - 1) for _, bits in widths])  # all bands reach as far
        return StoredBasis(widths, own, back, (steps / steps.max()).astype(np.float32), mean)

    d = len(encode)
    of_k, of_v = bands(d)
    mean = (0.1 * random.standard_normal(d)).astype(np.float16)  # centred keys cost more than others
    return CodedHead(basis(of_k, mean), basis(of_v, np.zeros(d, np.float16)), 1.0)


def _random_latent(random: np.random.Generator, shape: Shape) -> CodedHead:
    """The basis of a row of latent attention, the same for all layers."""
    import numpy as np

    from subkv.format.bases import CodedHead, first_values
    from subkv.plan.basis import FullBasis
    from subkv.plan.latent import stored

    turns = [np.linalg.qr(random.standard_normal((d, d)))[0] for d in (shape.latent, shape.turned)]
    parts = [FullBasis(turn, turn, np.ones(len(turn)), np.ones(len(turn))) for turn in turns]
    keys = stored(parts, [np.eye(len(turn)) for turn in turns], planned(shape)[1][:2])
    return CodedHead(keys, first_values(keys, shape.latent), 1.0)


def _size(name: str, least: int, most: int, text: str) -> options.Option:
    return click.option(f"--{name}", type=click.IntRange(least, most), help=text)


@command()
@click.argument("shape", type=click.Choice(list(SHAPES)))
@click.option("-o", "--output", type=options.PATH, required=True, help="the model (GGUF)")
@click.option("--bases", type=options.PATH, help="its bases [default: OUTPUT.subkv-sidecar.gguf beside it]")
@click.option("--type", "kind", type=click.Choice(list(TYPES)), default="q4_0", help="of all matrices")
@_size("layers", 1, 1024, "layers, instead of the shape's")
@_size("heads", 1, 1024, "query heads")
@_size("kv-heads", 1, 1024, "K/V heads")
@_size("head-size", 64, 256, "elements of a head")
@_size("embd", BLOCK, 2**20, "embedding length")
@_size("ff", BLOCK, 2**20, "feed-forward length")
@_size("vocab", SMALLEST_VOCABULARY, 2**20, "tokens of the vocabulary")
def main(shape: str, output: Path, bases: Path | None, kind: str, **sizes: int | None) -> None:
    """Write a model of SHAPE with random weights, and bases for it, to measure time and memory.

    llama-3.1-8b has 4 of its 32 layers and 32000 of its 128256 tokens; --layers 32 --vocab 128256 is all of it.
    deepseek-v2-lite has 4 of its 27 layers and 32000 of its 102400 tokens, and no experts. deepseek-v3.2 has 2 of
    its 61 layers and 32000 of its 129280 tokens, and no experts.
    """
    from converter.cli import default_output  # numpy: not for a --help
    from subkv.base.files import check_writable

    given: dict[str, Any] = {key: n for key, n in sizes.items() if n is not None}
    asked = dataclasses.replace(SHAPES[shape], **given)
    asked.check()
    sidecar = bases or default_output(output, sidecar=True)
    if sidecar.resolve() == output.resolve():
        raise SubkvError("bases", f"expected another file than the model, found {sidecar}")
    for path in (output, sidecar):
        check_writable(path)
    write_model(output, asked, kind)
    write_bases(output, sidecar, asked)
    click.echo(f"wrote {output} and {sidecar}: random, for time and memory only")


if __name__ == "__main__":
    main()
