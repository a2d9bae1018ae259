"""Reads metadata and tensors of a GGUF and writes copies with other metadata, with ggml's functions.

ggml's parser takes milliseconds; gguf-py takes seconds, because it reads the whole file into Python objects. A copy
keeps the bytes, order and alignment of tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from subkv.base.closed import mark_closed
from subkv.base.errors import ModelFileError, SubkvError, system_reason
from subkv.base.files import atomic_file
from subkv.base.progress import progress_bar
from subkv.native.bases import model_content, model_weights
from subkv.native.digest import KEYS_DIGEST, UNKNOWN, Value, keys_digest, stored_key
from subkv.native.library import Signatures, declare, ggml
from subkv.native.split import COUNT, NUMBER, split_files

BLOCK = 4 << 20  # bytes copied at once
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TYPE_STRING, _TYPE_ARRAY = 8, 9
_F32 = 0  # GGML_TYPE_F32

SHA256_KEY = "subkv.base.sha256"
CONTENT_KEY = "subkv.base.content"  # of sidecars: the digest of their model
WEIGHTS_KEY = "subkv.base.weights"  # digest of some weights of the model

_str, _ptr, _size, _int, _i64 = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64


class _Traits(ctypes.Structure):
    """struct ggml_type_traits: to_float(from, to, elements) dequantizes; none for other types."""

    _fields_ = [
        ("type_name", _str),
        ("blck_size", _i64),
        ("blck_size_interleave", _i64),
        ("type_size", _size),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, _ptr, _ptr, _i64)),
        ("from_float_ref", _ptr),
    ]


class _InitParams(ctypes.Structure):
    """struct gguf_init_params, passed by value."""

    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


# ggml's functions, which llama_cpp does not bind
_GGUF: Signatures = {
    "ggml_get_type_traits": (ctypes.POINTER(_Traits), [_int]),
    "gguf_init_from_file": (_ptr, [_str, _InitParams]),
    "gguf_init_empty": (_ptr, []),
    "gguf_free": (None, [_ptr]),
    "gguf_get_data_offset": (_size, [_ptr]),
    "gguf_get_n_kv": (_i64, [_ptr]),
    "gguf_find_key": (_i64, [_ptr, _str]),
    "gguf_get_key": (_str, [_ptr, _i64]),
    "gguf_get_kv_type": (_int, [_ptr, _i64]),
    "gguf_get_arr_type": (_int, [_ptr, _i64]),
    "gguf_get_arr_n": (_size, [_ptr, _i64]),
    "gguf_get_arr_data": (_ptr, [_ptr, _i64]),
    "gguf_get_val_data": (_ptr, [_ptr, _i64]),
    "gguf_get_val_str": (_str, [_ptr, _i64]),
    "gguf_get_n_tensors": (_i64, [_ptr]),
    "gguf_find_tensor": (_i64, [_ptr, _str]),
    "gguf_get_tensor_offset": (_size, [_ptr, _i64]),
    "gguf_get_tensor_type": (_int, [_ptr, _i64]),
    "gguf_get_tensor_size": (_size, [_ptr, _i64]),
    "gguf_get_tensor_ne": (ctypes.POINTER(_i64), [_ptr, _i64]),
    "gguf_set_val_u32": (None, [_ptr, _str, ctypes.c_uint32]),
    "gguf_set_val_u64": (None, [_ptr, _str, ctypes.c_uint64]),
    "gguf_set_val_f32": (None, [_ptr, _str, ctypes.c_float]),
    "gguf_set_val_str": (None, [_ptr, _str, _str]),
    "gguf_get_meta_size": (_size, [_ptr]),
    "gguf_get_meta_data": (None, [_ptr, _ptr]),
}


@functools.cache
def _gguf() -> ctypes.CDLL:
    return declare(ggml(), _GGUF)


class Rows(Protocol):
    """A matrix of weights whose rows are read on demand."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def rows(self, which: Any) -> NDArray[np.float32]: ...


class Base(Protocol):
    """A model for the planner, with GGUF's names: a Gguf, or an object with the same methods."""

    @property
    def path(self) -> Path: ...

    def keys(self) -> list[str]: ...

    def get(self, key: str) -> Any: ...

    def has_tensor(self, name: str) -> bool: ...

    def tensor(self, name: str, why: str) -> NDArray[np.float32]: ...

    def matrix(self, name: str, why: str, stacked: bool = False) -> Rows: ...


@dataclass(frozen=True, eq=False)
class Matrix:
    """A tensor in its file; valid after the Gguf is closed.

    raw: [ne1, bytes of a row]; kind: ggml type; n: ne0; why: end of error messages.
    """

    name: str
    raw: NDArray[np.uint8]
    kind: int
    n: int
    why: str

    @property
    def shape(self) -> tuple[int, int]:
        """ne1, ne0."""
        return len(self.raw), self.n

    def rows(self, which: Any) -> NDArray[np.float32]:
        """Rows by index or slice, dequantized to a new float32 array [rows, ne0]. Raises SubkvError."""
        raw = np.ascontiguousarray(self.raw[which])
        if self.kind == _F32:
            return np.array(raw).view(np.float32).reshape(-1, self.n)
        to_float = _gguf().ggml_get_type_traits(self.kind).contents.to_float
        if not to_float:
            raise SubkvError(
                self.name, f"expected a tensor type that can be dequantized, found type {self.kind}; {self.why}"
            )
        values = np.empty((len(raw), self.n), dtype=np.float32)
        to_float(raw.ctypes.data, values.ctypes.data, values.size)
        return values


class Gguf:
    """A GGUF opened for reading, or all files of a split model, given the first. Use it as a context manager.

    Metadata are those of the first file; tensors are those of all files. Raises ModelFileError about `model` if a file
    is missing, not a GGUF, damaged or truncated.
    """

    def __init__(self, path: str | os.PathLike[str], split: bool = True) -> None:
        """split False: open only this file, even of a split model."""
        self.path = Path(path)
        self._opened: list[int] = []  # contexts of `files`
        self._content = ""
        try:
            self._c = _gguf()
            position = self._open(self.path)
            self.files = split_files(self.path, position, self._open) if split else [self.path]
        except BaseException:
            self.close()
            raise
        self._ctx = self._opened[0]

    def _open(self, path: Path) -> tuple[int, int]:
        """Open one file; returns its number in a split model, and the number of files."""
        size = _check_header(path)
        from subkv.native.log import captured_log, last_log_error  # loads the native libraries: not for a --help

        with captured_log(forward=False) as log:
            ctx = self._c.gguf_init_from_file(os.fsencode(path), _InitParams(True, None))
        if not ctx:
            reason = last_log_error(log) or "no reason given"
            raise ModelFileError(
                "model", f"expected a complete GGUF, found a damaged or truncated header in {path}: {reason}"
            )
        self._opened.append(ctx)
        tensors = range(self._c.gguf_get_n_tensors(ctx))
        end = max(
            (self._c.gguf_get_tensor_offset(ctx, i) + self._c.gguf_get_tensor_size(ctx, i) for i in tensors), default=0
        )
        expected = self._c.gguf_get_data_offset(ctx) + end
        if end and size < expected:
            raise ModelFileError("model", f"expected {expected} bytes of GGUF, found {size}: {path} is truncated")
        number, count = self._get(ctx, NUMBER), self._get(ctx, COUNT)
        return number if isinstance(number, int) else 0, count if isinstance(count, int) else 1

    def close(self) -> None:
        while self._opened:
            self._c.gguf_free(self._opened.pop())
        mark_closed(self)

    def __enter__(self) -> Gguf:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def n_tensors(self) -> int:
        """Number of tensors in all files."""
        return sum(self._c.gguf_get_n_tensors(ctx) for ctx in self._opened)

    @property
    def n_bytes(self) -> int:
        """Size of all files on disk."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def data_offset(self) -> int:
        """Offset of the tensor data in the first file."""
        return int(self._c.gguf_get_data_offset(self._ctx))

    def keys(self) -> list[str]:
        n_kv = self._c.gguf_get_n_kv(self._ctx)
        return [self._c.gguf_get_key(self._ctx, i).decode("utf-8", "replace") for i in range(n_kv)]

    def get(self, key: str) -> Any:
        """Value of a key: int, float, bool, str or a list of numbers; None if missing or an array of strings."""
        return self._get(self._ctx, key)

    def _get(self, ctx: int, key: str) -> Any:
        index = self._c.gguf_find_key(ctx, key.encode())
        if index < 0:
            return None
        kind = self._c.gguf_get_kv_type(ctx, index)
        if kind == _TYPE_STRING:
            return self._c.gguf_get_val_str(ctx, index).decode("utf-8", "replace")
        if kind != _TYPE_ARRAY:
            return _numbers(_SCALARS[kind], 1, self._c.gguf_get_val_data(ctx, index))[0]
        code = _SCALARS.get(self._c.gguf_get_arr_type(ctx, index))
        if code is None:
            return None
        n = self._c.gguf_get_arr_n(ctx, index)
        return _numbers(code, n, self._c.gguf_get_arr_data(ctx, index)) if n else []

    def _find(self, name: str) -> tuple[int, Path, int] | None:
        """Context and path of the file with a tensor, and the tensor's index."""
        for ctx, path in zip(self._opened, self.files, strict=True):
            index = self._c.gguf_find_tensor(ctx, name.encode())
            if index >= 0:
                return ctx, path, index
        return None

    def has_tensor(self, name: str) -> bool:
        return self._find(name) is not None

    def tensor(self, name: str, why: str) -> NDArray[np.float32]:
        """A two-dimensional tensor dequantized to float32, [ne1, ne0]. why: end of the error message.

        Raises SubkvError if it is missing, not a matrix, or of a type that ggml cannot dequantize.
        """
        return self.matrix(name, why).rows(slice(None))

    def matrix(self, name: str, why: str, stacked: bool = False) -> Matrix:
        """A two-dimensional tensor that is read on demand, as tensor(). stacked: it may have three dimensions; then the
        rows of all its matrices follow each other.
        """
        location = self._find(name)
        if location is None:
            raise SubkvError(name, f"expected this tensor in {self.path}, found none; {why}")
        ctx, path, index = location
        ne = [self._c.gguf_get_tensor_ne(ctx, index)[i] for i in range(4)]
        if (ne[2] != 1 and not stacked) or ne[3] != 1:
            raise SubkvError(name, f"expected a matrix, found shape {ne}; {why}")
        offset = self._c.gguf_get_data_offset(ctx) + self._c.gguf_get_tensor_offset(ctx, index)
        n_rows = ne[1] * ne[2]
        shape = n_rows, self._c.gguf_get_tensor_size(ctx, index) // n_rows
        raw = np.memmap(path, np.uint8, "r", offset, shape)
        return Matrix(name, raw, self._c.gguf_get_tensor_type(ctx, index), ne[0], why)

    def content(self) -> str:
        """subkv.native.bases.model_content of this model, computed once. Raises ModelFileError about `model`."""
        if not self._content:
            self._content = model_content(self.path)
        return self._content

    def metadata_with(self, values: Mapping[str, Value]) -> bytes:
        """The file's metadata section (header, keys, tensor infos, padding) with `values` set."""
        ctx = self._c.gguf_init_from_file(os.fsencode(self.path), _InitParams(True, None))
        if not ctx:
            raise SubkvError("model", f"{self.path}: cannot be read a second time")
        return _metadata(ctx, values)


def _numbers(code: str, n: int, address: int) -> list[Any]:
    layout = f"={n}{code}"
    return list(struct.unpack(layout, ctypes.string_at(address, struct.calcsize(layout))))


def _check_header(path: Path) -> int:
    """Size in bytes of a file with a GGUF header. Raises ModelFileError."""
    try:
        if path.is_dir():
            raise ModelFileError("model", f"expected a GGUF file, found the folder {path}")
        with open(path, "rb") as handle:
            head = handle.read(24)
            size = os.fstat(handle.fileno()).st_size
    except FileNotFoundError:
        raise ModelFileError("model", f"expected a GGUF file, found no file {path}") from None
    except OSError as error:
        raise ModelFileError("model", f"cannot read {path}: {system_reason(error)}") from error
    if head[:4] != b"GGUF":
        hint = " (a safetensors file: bases come from `convert --bases` with it)" if b'{"' in head[8:] else ""
        raise ModelFileError("model", f"expected a GGUF file, found {head[:4]!r} at the start of {path}{hint}")
    version = int.from_bytes(head[4:8], "little")
    if len(head) < 24 or version not in (2, 3):
        content = f"version {version}" if len(head) == 24 else f"{size} bytes"
        raise ModelFileError("model", f"expected a complete GGUF of version 2 or 3, found {content} in {path}")
    return size


def check_model_file(path: str | os.PathLike[str], weights: bool = True) -> Path:
    """Reject a file that llama.cpp cannot load, before anything is loaded.

    Reads only headers: of a split model, those of all files, given the first. weights: also reject files without
    tensors (sidecars). Raises ModelFileError about `model`.
    """
    with Gguf(path, split=weights) as file:
        if weights:
            check_weights(file)
        return file.path


def check_weights(file: Gguf) -> None:
    """Reject a GGUF without tensors. Raises ModelFileError about `model`."""
    if not file.n_tensors:
        raise ModelFileError(
            "model",
            f"expected a model with weights, found a GGUF without tensors: {file.path} (a sidecar only gives bases)",
        )


@contextlib.contextmanager
def metadata_of(values: Mapping[str, Value]) -> Iterator[int]:
    """A gguf_context in memory with these keys."""
    c = _gguf()
    ctx = c.gguf_init_empty()
    try:
        _set(ctx, values)
        yield ctx
    finally:
        c.gguf_free(ctx)


def _set(ctx: int, values: Mapping[str, Value]) -> None:
    for key, (kind, value) in values.items():
        setter = getattr(_gguf(), f"gguf_set_val_{kind}")
        setter(ctx, key.encode(), value.encode() if isinstance(value, str) else value)


def _metadata(ctx: int, values: Mapping[str, Value]) -> bytes:
    """The metadata section of a context with `values` set; frees the context."""
    c = _gguf()
    try:
        _set(ctx, values)
        buffer = ctypes.create_string_buffer(c.gguf_get_meta_size(ctx))
        c.gguf_get_meta_data(ctx, buffer)
        return buffer.raw
    finally:
        c.gguf_free(ctx)


def with_digest(values: Mapping[str, Value]) -> dict[str, Value]:
    """The keys of a layout with their digest; other keys as they are."""
    return {**values, **({KEYS_DIGEST: ("str", keys_digest(values))} if "subkv.layout" in values else {})}


def _weights(base: Gguf, values: Mapping[str, Value]) -> dict[str, Value]:
    """WEIGHTS_KEY of a model with the layout of `values`, if the model has such weights."""
    layers = json.loads(str(values["subkv.layout"][1]))["layers"] if "subkv.layout" in values else []
    digest = model_weights(base.path, layers[0]["il"], layers[-1]["il"]) if layers else ""
    return {WEIGHTS_KEY: ("str", digest)} if digest else {}


def write_copy(base: Gguf, output: Path, values: Mapping[str, Value], progress: bool = False) -> None:
    """Atomically write a copy of `base` (one file) with `values` in its metadata and the same tensor data.

    SHA256_KEY and KEYS_DIGEST are set here: the hash of the base is computed while the data is copied, and both are
    written into the metadata at the end. progress: show a bar. Raises SubkvError if the file cannot be written.
    """
    values = {**values, **_weights(base, values)}
    metadata = base.metadata_with(with_digest({**values, SHA256_KEY: ("str", UNKNOWN)}))
    digest = hashlib.sha256()
    skip = base.data_offset
    with atomic_file(output) as handle:
        handle.write(metadata)
        for block in blocks(base.files, f"writing {output.name}", progress):
            digest.update(block)
            handle.write(block[skip:])
            skip = max(skip - len(block), 0)
        known = with_digest({**values, SHA256_KEY: ("str", digest.hexdigest())})
        for key in {SHA256_KEY, KEYS_DIGEST} & known.keys():
            before = stored_key(key, "str") + struct.pack("<Q", len(UNKNOWN))
            handle.seek(metadata.index(before) + len(before))
            handle.write(str(known[key][1]).encode())


def write_sidecar(base: Gguf, output: Path, values: Mapping[str, Value], progress: bool = False) -> None:
    """Atomically write a GGUF without tensors: general.architecture, general.name (if the base has one), `values`.

    Adds SHA256_KEY, unless `values` has it, CONTENT_KEY, WEIGHTS_KEY and KEYS_DIGEST.
    """
    keys = _weights(base, values)
    for key in ("general.architecture", "general.name"):
        if isinstance(value := base.get(key), str):
            keys[key] = ("str", value)
    keys |= values
    if SHA256_KEY not in keys:
        keys[SHA256_KEY] = ("str", sha256(base.files, progress))
    keys[CONTENT_KEY] = ("str", base.content())
    blob = _metadata(_gguf().gguf_init_empty(), with_digest(keys))
    with atomic_file(output) as handle:
        handle.write(blob)


def sha256(files: Sequence[Path], progress: bool = False) -> str:
    """Hex SHA-256 of files, one after another. Raises SubkvError as blocks()."""
    digest = hashlib.sha256()
    for block in blocks(files, f"hashing {files[0].name}", progress):
        digest.update(block)
    return digest.hexdigest()


def blocks(files: Sequence[Path], name: str, progress: bool) -> Iterator[bytes]:
    """The bytes of files, one after another, with a progress bar `name`. Raises SubkvError about `model`."""
    path = files[0]
    try:
        with progress_bar(name, sum(file.stat().st_size for file in files), "B", progress) as bar:
            for path in files:
                with open(path, "rb") as handle:
                    while block := handle.read(BLOCK):
                        yield block
                        bar.update(len(block))
    except OSError as error:
        raise SubkvError("model", f"cannot read {path}: {system_reason(error)}") from error
