"""Tiny seeded vision towers for libmtmd, and a picture: no downloads, 100 kB, built in milliseconds.

    path = tiny_vision.build(tmp_path / "mmproj.gguf", "gemma3", n_embd=64)

Names: llama.cpp's tools/mtmd/clip-impl.h.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import gguf
import numpy as np

N_BLOCK, N, N_FF, PATCH = 2, 32, 64, 8

# libmtmd's name of a projector: the side of its pictures in pixels (of M-RoPE: the largest), and how many patches of a
# row become one token.
#   janus_pro:      a token a position, causal
#   gemma3:         a token a position, and each sees the whole picture
#   qwen2vl_merger: for text models with M-RoPE; all tokens of a picture share a time position
KINDS = {"janus_pro": (48, 1), "gemma3": (96, 2), "qwen2vl_merger": (96, 2)}
MARKS = ("<start_of_image>", "<end_of_image>")  # of gemma3


def seeded(*shape: int, seed: int = 0, std: float = 1.0) -> np.ndarray:
    """Normal values."""
    return (std * np.random.default_rng([seed, *shape]).standard_normal(shape)).astype(np.float32)


def build(path: Path, kind: str, n_embd: int) -> Path:
    """Writes a vision tower of two layers, whose output are tokens of `n_embd` numbers."""
    size, merge = KINDS[kind]
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    writer.add_string("clip.projector_type", kind)
    dims = {"image_size": size, "patch_size": PATCH, "embedding_length": N, "feed_forward_length": N_FF}
    dims |= {"block_count": N_BLOCK, "projection_dim": n_embd, "attention.head_count": 2}
    dims |= {"projector.scale_factor": merge}
    for name, value in dims.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    tensors = {"v.patch_embd.weight": seeded(N, 3, PATCH, PATCH, std=(3 * PATCH * PATCH) ** -0.5)}
    tensors |= {"v.post_ln.weight": np.ones(N, np.float32), "v.post_ln.bias": np.zeros(N, np.float32)}
    if kind == "qwen2vl_merger":  # of two frames, which a picture alone is both of
        tensors["v.patch_embd.weight.1"] = seeded(N, 3, PATCH, PATCH, seed=1, std=(3 * PATCH * PATCH) ** -0.5)
    else:
        tensors["v.patch_embd.bias"] = np.zeros(N, np.float32)
        tensors["v.position_embd.weight"] = seeded((size // PATCH) ** 2, N)
    for il in range(N_BLOCK):
        for name in ("ln1", "ln2"):
            tensors[f"v.blk.{il}.{name}.weight"] = np.ones(N, np.float32)
            tensors[f"v.blk.{il}.{name}.bias"] = np.zeros(N, np.float32)
        for i, name in enumerate(("attn_q", "attn_k", "attn_v", "attn_out")):
            tensors[f"v.blk.{il}.{name}.weight"] = seeded(N, N, seed=10 * il + i, std=N**-0.5)
            tensors[f"v.blk.{il}.{name}.bias"] = np.zeros(N, np.float32)
        tensors[f"v.blk.{il}.ffn_up.weight"] = seeded(N_FF, N, seed=il, std=N**-0.5)
        tensors[f"v.blk.{il}.ffn_up.bias"] = np.zeros(N_FF, np.float32)
        tensors[f"v.blk.{il}.ffn_down.weight"] = seeded(N, N_FF, seed=il, std=N_FF**-0.5)
        tensors[f"v.blk.{il}.ffn_down.bias"] = np.zeros(N, np.float32)
    if kind == "gemma3":
        tensors["mm.input_projection.weight"] = seeded(N, n_embd, std=N**-0.5)
        tensors["mm.soft_emb_norm.weight"] = np.ones(N, np.float32)
    else:
        n_in, second = N * merge**2, {"janus_pro": 1, "qwen2vl_merger": 2}[kind]
        for i, width in ((0, n_in), (second, n_embd)):
            tensors[f"mm.{i}.weight"] = seeded(width, n_in, seed=i, std=n_in**-0.5)
            tensors[f"mm.{i}.bias"] = seeded(width, seed=i, std=0.1)
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def picture(red: int, width: int = 64, height: int = 64) -> bytes:
    """A PNG, a ramp."""
    lines = (bytes(v for x in range(width) for v in (red, 4 * x % 256, 4 * y % 256)) for y in range(height))
    rows = b"".join(b"\0" + line for line in lines)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
