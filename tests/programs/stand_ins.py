"""Small files in the places of those that upstream's tests of llama-server download."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FIM = {"fim_pre_token_id": ord("{"), "fim_suf_token_id": ord("}"), "fim_mid_token_id": ord("|")}


# Words of upstream's prompts, so that these have about as many tokens as in the vocabulary they were written for.
WORDS = "Hello ĠHello Ġhello Ġquick Ġbrown Ġfox Ġjumps Ġover Ġlazy Ġdog What Ġthis Ġis Ġb Ġc Ġd"
WORDS += " Ġdolor Ġut Ġconsectetur Ġexercitation Ġullamco Ġmagna"
MARKS = ("<start_of_image>", "<end_of_image>")  # taken as they are, not as letters


def vocabulary(marks: Sequence[str] = MARKS) -> tuple[list[str], list[str], list[int]]:
    """Tokens, merges and types: those of tests/tiny.py, WORDS and the beginnings of them, marks."""
    tokens, merges = (list(names) for names in tiny.vocabulary())
    types = [3 if token in tiny.SPECIAL else 1 for token in tokens]
    for word in WORDS.split():
        pieces = list(word)
        for merge in merges:
            for i in reversed(range(len(pieces) - 1)):
                if f"{pieces[i]} {pieces[i + 1]}" == merge:
                    pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
        while len(pieces) > 1:
            merges.append(f"{pieces[0]} {pieces[1]}")
            pieces[:2] = [pieces[0] + pieces[1]]
            tokens.append(pieces[0])
            types.append(1)
    return [*tokens, *marks], merges, types + [4] * len(marks)


def with_words(path: Path, source: Path, marks: Sequence[str] = MARKS, **more: Any) -> Path:
    """A tiny model of tests/tiny.py with `vocabulary`, which never ends a text or leaves ASCII by itself.

    One dimension of the embeddings is the same in every token and passes by every layer: its column of the output
    matrix is a bias. more: other keys.
    """
    tokens, merges, types = vocabulary(marks)
    tensors = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(source).tensors}
    changed = {}
    for i, name in enumerate(("token_embd.weight", "output.weight")):
        if name in tensors:
            known = tensors[name]
            new = seeded(len(tokens) - len(known), known.shape[1], seed=i, std=float(known.std()))
            changed[name] = np.concatenate([known, new])
    if "output.weight" in changed:
        says = [
            t == 1 and all("!" <= c <= "~" or c == "Ġ" for c in token) for t, token in zip(types, tokens, strict=True)
        ]
        changed["token_embd.weight"][:, 0] = 1.5
        changed["output.weight"][:, 0] = np.where(says, 0, -30)
        for name, data in tensors.items():
            if name.endswith(("attn_norm.weight", "ffn_norm.weight", "attn_output.weight", "ffn_down.weight")):
                data[0] = 0
                changed[name] = data
    keys = {"tokens": tokens, "merges": merges, "token_type": types, **more}
    return copied(path, source, {f"tokenizer.ggml.{name}": value for name, value in keys.items()}, changed)


def copied(path: Path, source: Path, keys: Mapping[str, Any], tensors: Mapping[str, Any] | None = None) -> Path:
    """A copy of a GGUF with other keys and other or more tensors."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture" or name in keys:
            continue
        kind, *inner = field.types
        writer.add_key_value(name, field.contents(), kind, inner[0] if inner else None)
    for name, value in keys.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        else:
            writer.add_uint32(name, value)
    for tensor in reader.tensors:
        if tensor.name in (tensors or {}):
            continue
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def seeded(*shape: int, seed: int = 0, std: float = 1.0) -> np.ndarray:
    """Normal values."""
    return (std * np.random.default_rng([seed, *shape]).standard_normal(shape)).astype(np.float32)


def adapter(path: Path, model: Path, rank: int = 4, std: float = 0.3) -> Path:
    """A LoRA adapter of random numbers for every matrix of attention of a model."""
    reader = gguf.GGUFReader(model)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for i, tensor in enumerate(t for t in reader.tensors if ".attn_" in t.name and "norm" not in t.name):
        n_in, n_out = int(tensor.shape[0]), int(tensor.shape[1])
        writer.add_tensor(f"{tensor.name}.lora_a", seeded(rank, n_in, seed=i, std=n_in**-0.5))
        writer.add_tensor(f"{tensor.name}.lora_b", seeded(n_out, rank, seed=i, std=std))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def reranker(path: Path, source: Path) -> Path:
    """An encoder that gives a pair of texts one number."""
    keys = {"bert.pooling_type": int(gguf.PoolingType.RANK)}
    return copied(path, source, keys, {"cls.output.weight": seeded(1, tiny.DIMS["n_embd"])})


def projector(path: Path, kind: str, n_embd: int) -> Path:
    """A vision tower of two layers, whose output is a token of `n_embd` numbers for every four patches."""
    n, n_ff, size, patch = 32, 64, 96, 8
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    writer.add_string("clip.projector_type", kind)
    dims = {"image_size": size, "patch_size": patch, "embedding_length": n, "feed_forward_length": n_ff}
    dims |= {"block_count": 2, "projection_dim": n_embd, "attention.head_count": 2, "projector.scale_factor": 2}
    for name, value in dims.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    tensors = {
        "v.patch_embd.weight": seeded(n, 3, patch, patch, std=(3 * patch * patch) ** -0.5),
        "v.patch_embd.bias": np.zeros(n, np.float32),
        "v.position_embd.weight": seeded((size // patch) ** 2, n),
        "v.post_ln.weight": np.ones(n, np.float32),
        "v.post_ln.bias": np.zeros(n, np.float32),
    }
    for il in range(2):
        for name in ("ln1", "ln2"):
            tensors[f"v.blk.{il}.{name}.weight"] = np.ones(n, np.float32)
            tensors[f"v.blk.{il}.{name}.bias"] = np.zeros(n, np.float32)
        for i, name in enumerate(("attn_q", "attn_k", "attn_v", "attn_out")):
            tensors[f"v.blk.{il}.{name}.weight"] = seeded(n, n, seed=10 * il + i, std=n**-0.5)
            tensors[f"v.blk.{il}.{name}.bias"] = np.zeros(n, np.float32)
        tensors[f"v.blk.{il}.ffn_up.weight"] = seeded(n_ff, n, seed=il, std=n**-0.5)
        tensors[f"v.blk.{il}.ffn_up.bias"] = np.zeros(n_ff, np.float32)
        tensors[f"v.blk.{il}.ffn_down.weight"] = seeded(n, n_ff, seed=il, std=n_ff**-0.5)
        tensors[f"v.blk.{il}.ffn_down.bias"] = np.zeros(n, np.float32)
    if kind == "gemma3":
        tensors["mm.input_projection.weight"] = seeded(n, n_embd, std=n**-0.5)
        tensors["mm.soft_emb_norm.weight"] = np.ones(n, np.float32)
    else:
        tensors["mm.model.fc.weight"] = seeded(n_embd, 4 * n, std=(4 * n) ** -0.5)
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def picture(red: int) -> bytes:
    """A PNG of 64 x 64 pixels, a ramp."""
    rows = b"".join(b"\0" + b"".join(bytes((red, 4 * x, 4 * y)) for x in range(64)) for y in range(64))

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", 64, 64, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def hub_cache(root: Path, model: Path) -> None:
    """The cache folder of a hub with what upstream's presets name. model: the one in the place of their text models."""
    made = root / "made"
    made.mkdir(parents=True)
    letters = tiny.build(made / "letters.gguf", "bert", n_ctx_train=1024)
    bert = with_words(made / "bert.gguf", letters, add_bos_token=True)
    split = tiny.build(made / "split.gguf", "llama", split_tensors=8)
    parts = sorted(made.glob(f"{split.name[: -len('-00001-of-00003.gguf')]}-*-of-*.gguf"))
    n_embd = int(gguf.GGUFReader(model).fields["llama.embedding_length"].contents())
    fim = copied(made / "fim.gguf", model, {f"tokenizer.ggml.{name}": value for name, value in FIM.items()})
    files: dict[str, dict[str, Path]] = {
        "ggml-org/test-model-stories260K": {"stories260K-F32.gguf": model},
        "ggml-org/test-model-stories260K-infill": {"stories260K-infill-F32.gguf": fim},
        "ggml-org/models": {
            "bert-bge-small/ggml-model-f16.gguf": bert,
            "jina-reranker-v1-tiny-en/ggml-model-f16.gguf": reranker(made / "rank.gguf", bert),
            **{f"tinyllamas/split/stories15M-q8_0-0000{i + 1}-of-00003.gguf": part for i, part in enumerate(parts)},
        },
        "ggml-org/stories15M_MOE": {"stories15M_MOE-F16.gguf": model},
        "ggml-org/tinygemma3-GGUF": {
            "tinygemma3-Q8_0.gguf": model,
            "mmproj-tinygemma3-f16.gguf": projector(made / "mmproj.gguf", "gemma3", n_embd),
        },
    }
    preset = made / "preset.ini"
    preset.write_text(
        "[tinygemma3-preset]\nhf-repo = ggml-org/tinygemma3-GGUF:Q8_0\n"
        "[stories260K-test]\nhf-repo = ggml-org/test-model-stories260K\n"
    )
    files["ggml-org/test-preset-ci"] = {"preset.ini": preset}
    for repo, contents in files.items():
        folder = root / f"models--{repo.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(COMMIT)
        for name, target in contents.items():
            path = folder / "snapshots" / COMMIT / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(target)


def downloads(tmp: Path, model: Path) -> None:
    """The files that upstream's tests load by address, as if they had been loaded before."""
    (tmp / "stories15M-q4_0.gguf").symlink_to(model)
    adapter(tmp / "moe_shakespeare15M.gguf", model)
