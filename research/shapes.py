"""A model of a given shape with random weights, and bases for it: to measure time and memory, never quality.

    python -m research.shapes llama-3.2-1b -o model.gguf
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

from research.shape_tensors import BLOCK, HEAD_SIZES, SHAPES, Shape, constant, is_matrix
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
TYPES = {"q4_0": 4, "q8_0": 8}  # bits of a code
NO_CALIBRATION = "none: random bases, for time and memory only"
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
    tensors = shape.tensors()
    matrices = {name: size for name, size in tensors.items() if is_matrix(name, size)}
    others = {name: size for name, size in tensors.items() if name not in matrices}
    with atomic_file(path) as handle:
        writer = GGUFWriter(handle.name, shape.arch)  # it opens its file by name
        try:
            _write_keys(writer, shape)
            for name, size in others.items():
                writer.add_tensor_info(name, size, np.dtype(np.float32), 4 * math.prod(size))
            for name, (*rows, columns) in matrices.items():
                size = *rows, block_bytes(columns, kind)
                writer.add_tensor_info(name, size, np.dtype(np.uint8), math.prod(size), raw)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, size in others.items():
                writer.write_tensor_data(np.full(size, constant(name), np.float32))
            random = np.random.default_rng(SEED)
            for *rows, columns in tracked(f"writing {path.name}", list(matrices.values()), "matrix"):
                writer.write_tensor_data(random_blocks(random, math.prod(rows), columns, kind))
        finally:
            writer.close()


def _write_keys(writer: GGUFWriter, shape: Shape) -> None:
    from gguf import GGUFValueType, TokenType

    types = {int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, list: GGUFValueType.ARRAY}
    writer.add_name("random weights")
    for key, value in shape.keys().items():
        writer.add_key_value(f"{shape.arch}.{key}", value, types[type(value)])
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
        row = LayerShape(0, shape.heads, 1, shape.latent + shape.rotated, shape.latent, 1.0, 0)
        heads = latent.heads(row, np.ones(shape.latent), np.ones(shape.rotated))
        plan: list[Bands] = [bands(shape.latent)[0], bands(shape.rotated)[1]]
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
            sizes = shape.latent + shape.rotated, shape.latent
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

    turns = [np.linalg.qr(random.standard_normal((d, d)))[0] for d in (shape.latent, shape.rotated)]
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
@_size("head-size", HEAD_SIZES[0], HEAD_SIZES[-1], "elements of a head")
@_size("embd", BLOCK, 2**20, "embedding length")
@_size("ff", BLOCK, 2**20, "feed-forward length, of one expert where there are some")
@_size("vocab", SMALLEST_VOCABULARY, 2**20, "tokens of the vocabulary")
def main(shape: str, output: Path, bases: Path | None, kind: str, **sizes: int | None) -> None:
    """Write a model of SHAPE with random weights, and bases for it, to measure time and memory.

    llama-3.1-8b has 4 of its 32 layers and 32000 of its 128256 tokens; --layers 32 --vocab 128256 is all of it.
    deepseek-v2-lite has 4 of its 27 layers and 32000 of its 102400 tokens, and no experts. deepseek-v3.2 has 2 of
    its 61 layers and 32000 of its 129280 tokens, and no experts.

    The others have 32000 tokens, too, and of experts those that a token passes: qwen3.6-27b 4 of 64 layers;
    qwen3.6-35b-a3b 4 of 40 layers and 8 of 256 experts; gemma-4-31b 6 of 60 layers; gpt-oss-20b 4 of 24 layers and 4
    of 32 experts. Of 248320, 248320, 262144 and 201088 tokens. Rows of sliding windows stay f16: bases are those of
    layers that attend to all cells.
    """
    from converter.cli import default_output  # numpy: not for a --help
    from subkv.base.files import check_writable

    given: dict[str, Any] = {key: n for key, n in sizes.items() if n is not None}
    chosen = dataclasses.replace(SHAPES[shape], **given)
    chosen.check()
    sidecar = bases or default_output(output, sidecar=True)
    if sidecar.resolve() == output.resolve():
        raise SubkvError("bases", f"expected another file than the model, found {sidecar}")
    for path in (output, sidecar):
        check_writable(path)
    write_model(output, chosen, kind)
    write_bases(output, sidecar, chosen)
    click.echo(f"wrote {output} and {sidecar}: random, for time and memory only")


if __name__ == "__main__":
    main()
