"""Small replacements for the files that upstream's tests of llama-server download."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny
import tiny_vision
from tiny_vision import seeded

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FIM = {"fim_pre_token_id": ord("{"), "fim_suf_token_id": ord("}"), "fim_mid_token_id": ord("|")}


# Words of upstream's prompts, so that the prompts have about as many tokens as with the original vocabulary.
WORDS = "Hello ĠHello Ġhello Ġquick Ġbrown Ġfox Ġjumps Ġover Ġlazy Ġdog What Ġthis Ġis Ġb Ġc Ġd"
WORDS += " Ġdolor Ġut Ġconsectetur Ġexercitation Ġullamco Ġmagna"


def vocabulary(marks: Sequence[str] = tiny_vision.MARKS) -> tuple[list[str], list[str], list[int]]:
    """Tokens, merges and types: those of tests/tiny.py, WORDS and their prefixes, and punctuation."""
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


def with_words(path: Path, source: Path, marks: Sequence[str] = tiny_vision.MARKS, **more: Any) -> Path:
    """A tiny model of tests/tiny.py with `vocabulary`, whose output does not end and stays in ASCII.

    One dimension of the embeddings is the same in every token and bypasses every layer, so its column of the output
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
        is_allowed = [
            t == 1 and all("!" <= c <= "~" or c == "Ġ" for c in token) for t, token in zip(types, tokens, strict=True)
        ]
        changed["token_embd.weight"][:, 0] = 1.5
        changed["output.weight"][:, 0] = np.where(is_allowed, 0, -30)
        for name, data in tensors.items():
            if name.endswith(("attn_norm.weight", "ffn_norm.weight", "attn_output.weight", "ffn_down.weight")):
                data[0] = 0
                changed[name] = data
    keys = {"tokens": tokens, "merges": merges, "token_type": types, **more}
    return copied(path, source, {f"tokenizer.ggml.{name}": value for name, value in keys.items()}, changed)


def copied(path: Path, source: Path, keys: Mapping[str, Any], tensors: Mapping[str, Any] | None = None) -> Path:
    """A copy of a GGUF with changed keys, and changed or added tensors."""
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
    """An encoder that returns one number for a pair of texts."""
    keys = {"bert.pooling_type": int(gguf.PoolingType.RANK)}
    return copied(path, source, keys, {"cls.output.weight": seeded(1, tiny.DIMS["n_embd"])})


def hub_cache(root: Path, model: Path) -> None:
    """The cache folder of a hub with the files of upstream's presets. model: the replacement of their text models."""
    sources = root / "sources"
    sources.mkdir(parents=True)
    # seed: else its keys and values have the weights of `model`, and the plug-in cannot tell these models apart
    letters = tiny.build(sources / "letters.gguf", "bert", seed=1, n_ctx_train=1024)
    bert = with_words(sources / "bert.gguf", letters, add_bos_token=True)
    split = tiny.build(sources / "split.gguf", "llama", split_tensors=8)
    parts = sorted(sources.glob(f"{split.name[: -len('-00001-of-00003.gguf')]}-*-of-*.gguf"))
    fields = gguf.GGUFReader(model).fields
    n_embd = int(fields[f"{fields['general.architecture'].contents()}.embedding_length"].contents())
    fim = copied(sources / "fim.gguf", model, {f"tokenizer.ggml.{name}": value for name, value in FIM.items()})
    files: dict[str, dict[str, Path]] = {
        "ggml-org/test-model-stories260K": {"stories260K-F32.gguf": model},
        "ggml-org/test-model-stories260K-infill": {"stories260K-infill-F32.gguf": fim},
        "ggml-org/models": {
            "bert-bge-small/ggml-model-f16.gguf": bert,
            "jina-reranker-v1-tiny-en/ggml-model-f16.gguf": reranker(sources / "rank.gguf", bert),
            **{f"tinyllamas/split/stories15M-q8_0-0000{i + 1}-of-00003.gguf": part for i, part in enumerate(parts)},
        },
        "ggml-org/stories15M_MOE": {"stories15M_MOE-F16.gguf": model},
        "ggml-org/tinygemma3-GGUF": {
            "tinygemma3-Q8_0.gguf": model,
            "mmproj-tinygemma3-f16.gguf": tiny_vision.build(sources / "mmproj.gguf", "gemma3", n_embd),
        },
    }
    preset = sources / "preset.ini"
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
    """The files that upstream's tests download by URL, already in the download folder."""
    (tmp / "stories15M-q4_0.gguf").symlink_to(model)
    adapter(tmp / "moe_shakespeare15M.gguf", model)
