"""Tiny seeded towers for libmtmd that see or hear, a picture and a sound: no downloads, 100 kB, built in milliseconds.

    path = tiny_vision.build(tmp_path / "mmproj.gguf", "gemma3", n_embd=64)

Names: llama.cpp's tools/mtmd/clip-impl.h.
"""

from __future__ import annotations

import io
import struct
import wave
import zlib
from pathlib import Path
from typing import Any

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
    """Writes a vision tower of two layers with output tokens of `n_embd` numbers."""
    size, merge = KINDS[kind]
    keys: dict[str, Any] = {"image_size": size, "patch_size": PATCH, "projector.scale_factor": merge}
    keys |= {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    tensors = {"v.patch_embd.weight": seeded(N, 3, PATCH, PATCH, std=(3 * PATCH * PATCH) ** -0.5)}
    if kind == "qwen2vl_merger":  # of two frames, which a picture alone is both of
        tensors["v.patch_embd.weight.1"] = seeded(N, 3, PATCH, PATCH, seed=1, std=(3 * PATCH * PATCH) ** -0.5)
    else:
        tensors["v.patch_embd.bias"] = np.zeros(N, np.float32)
        tensors["v.position_embd.weight"] = seeded((size // PATCH) ** 2, N)
    if kind == "gemma3":
        tensors["mm.input_projection.weight"] = seeded(N, n_embd, std=N**-0.5)
        tensors["mm.soft_emb_norm.weight"] = np.ones(N, np.float32)
    else:
        n_in, second = N * merge**2, {"janus_pro": 1, "qwen2vl_merger": 2}[kind]
        for i, width in ((0, n_in), (second, n_embd)):
            tensors[f"mm.{i}.weight"] = seeded(width, n_in, seed=i, std=n_in**-0.5)
            tensors[f"mm.{i}.bias"] = seeded(width, seed=i, std=0.1)
    return _write(path, "vision", kind, n_embd, keys, tensors)


def build_sound(path: Path, n_embd: int) -> Path:
    """The same for sound: a token for a fifth of a second, in pieces of 30 s."""
    n_mel, stack, n_out = 80, 10, 64
    keys = {"num_mel_bins": n_mel, "projector.stack_factor": stack}
    tensors: dict[str, np.ndarray] = {"a.position_embd.weight": seeded(1500, N)}
    for i, n_in in ((1, n_mel), (2, N)):
        tensors[f"a.conv1d.{i}.weight"] = seeded(N, n_in, 3, seed=i, std=(3 * n_in) ** -0.5).astype(np.float16)
        tensors[f"a.conv1d.{i}.bias"] = np.zeros((N, 1), np.float32)
    tensors["mm.a.norm_pre.weight"] = np.ones(stack * N, np.float32)
    tensors["mm.a.mlp.1.weight"] = seeded(2 * n_out, stack * N, std=(stack * N) ** -0.5)
    tensors["mm.a.norm_mid.weight"] = np.ones(n_out, np.float32)
    tensors["mm.a.mlp.2.weight"] = seeded(n_embd, n_out, std=n_out**-0.5)
    return _write(path, "audio", "ultravox", n_embd, keys, tensors)


def _write(
    path: Path, sense: str, kind: str, n_embd: int, keys: dict[str, Any], tensors: dict[str, np.ndarray]
) -> Path:
    """The file of a tower with these keys and tensors, and the layers of a transformer."""
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool(f"clip.has_{sense}_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    writer.add_string("clip.projector_type", kind)
    dims = {"embedding_length": N, "feed_forward_length": N_FF, "block_count": N_BLOCK, "projection_dim": n_embd}
    for name, value in (keys | dims | {"attention.head_count": 2}).items():
        if isinstance(value, list):
            writer.add_array(f"clip.{sense}.{name}", value)
        else:
            writer.add_uint32(f"clip.{sense}.{name}", value)
    writer.add_float32(f"clip.{sense}.attention.layer_norm_epsilon", 1e-6)
    for name, data in (tensors | _layers(sense[0])).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _layers(prefix: str) -> dict[str, np.ndarray]:
    tensors = {f"{prefix}.post_ln.weight": np.ones(N, np.float32), f"{prefix}.post_ln.bias": np.zeros(N, np.float32)}
    for il in range(N_BLOCK):
        blk = f"{prefix}.blk.{il}"
        for name in ("ln1", "ln2"):
            tensors[f"{blk}.{name}.weight"] = np.ones(N, np.float32)
            tensors[f"{blk}.{name}.bias"] = np.zeros(N, np.float32)
        for i, name in enumerate(("attn_q", "attn_k", "attn_v", "attn_out")):
            tensors[f"{blk}.{name}.weight"] = seeded(N, N, seed=10 * il + i, std=N**-0.5)
            if (prefix, name) != ("a", "attn_k"):
                tensors[f"{blk}.{name}.bias"] = np.zeros(N, np.float32)
        tensors[f"{blk}.ffn_up.weight"] = seeded(N_FF, N, seed=il, std=N**-0.5)
        tensors[f"{blk}.ffn_up.bias"] = np.zeros(N_FF, np.float32)
        tensors[f"{blk}.ffn_down.weight"] = seeded(N, N_FF, seed=il, std=N_FF**-0.5)
        tensors[f"{blk}.ffn_down.bias"] = np.zeros(N, np.float32)
    return tensors


def picture(red: int, width: int = 64, height: int = 64) -> bytes:
    """A PNG, a ramp."""
    lines = (bytes(v for x in range(width) for v in (red, 4 * x % 256, 4 * y % 256)) for y in range(height))
    rows = b"".join(b"\0" + line for line in lines)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def sound(pitch: float = 440.0, seconds: float = 1.0) -> bytes:
    """A WAV file, a rising tone."""
    t = np.arange(int(16000 * seconds)) / 16000
    samples = (20000 * np.sin(2 * np.pi * pitch * t * (1 + t))).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16000)
        out.writeframes(samples.tobytes())
    return file.getvalue()
