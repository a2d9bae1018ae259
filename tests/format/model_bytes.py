"""A model's bytes as its identities hash them, by an independent reader (converter/FORMAT.md §1.1, model_file.h)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFWriter


def metadata_of(path: Path, scratch: Path) -> bytes:
    """The keys of a model, in order, as a GGUF without tensors. scratch: a file to write."""
    keys_only = GGUFWriter(scratch, arch="")
    keys_only.kv_data[0].clear()
    for field in GGUFReader(path).fields.values():
        if not field.name.startswith("GGUF."):
            sub = field.types[1] if len(field.types) > 1 else None
            keys_only.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub)
    keys_only.write_header_to_file()
    keys_only.write_kv_data_to_file()
    keys_only.close()
    metadata = scratch.read_bytes()
    return metadata + bytes(-len(metadata) % 32)


def head_of(tensor: Any) -> bytes:
    """What is hashed before a tensor's data. tensor: of a GGUFReader."""
    ne = [*map(int, tensor.shape), 1, 1, 1][:4]
    fields = [tensor.name, int(tensor.tensor_type), ",".join(map(str, ne)), int(tensor.n_bytes)]
    return "".join(f"{field}\0" for field in fields).encode()
