"""Reading metadata and single tensors of a GGUF and writing a copy with other metadata, through ggml's own functions.

gguf-py reads the whole file into Python objects (seconds); ggml's parser takes milliseconds. The data section of a copy
is copied as raw bytes, so tensors keep their bytes, order and alignment.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from converter import native
from converter.atomic import atomic_file
from converter.errors import ConverterError

BLOCK = 4 << 20  # bytes copied at once
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TYPE_STRING, _TYPE_ARRAY = 8, 9
_SETTERS = {"u32": "gguf_set_val_u32", "u64": "gguf_set_val_u64", "f32": "gguf_set_val_f32", "str": "gguf_set_val_str"}

Value = tuple[str, int | float | str]  # type name of _SETTERS, value
SHA256_KEY = "subkv.base.sha256"


class Gguf:
    """One GGUF opened for reading. Use as a context manager.

    Raises ConverterError (starting with `flag`) for a missing file, one that is not a GGUF, a damaged or truncated one.
    """

    def __init__(self, flag: str, path: Path) -> None:
        self.flag, self.path = flag, path
        _check_header(flag, path)
        self._c = native.gguf()
        with native.captured_log() as log:
            self._ctx = self._c.gguf_init_from_file(str(path).encode(), native.GgufInitParams(True, None))
        if not self._ctx:
            detail = f" ({log[0]})" if log else ""
            raise ConverterError(
                f"{flag}: {path}: expected a complete GGUF, found damaged or truncated metadata{detail}"
            )
        try:
            self._check_data()
        except ConverterError:
            self.close()
            raise

    def close(self) -> None:
        if self._ctx:
            self._c.gguf_free(self._ctx)
            self._ctx = None

    def __enter__(self) -> Gguf:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def data_offset(self) -> int:
        return int(self._c.gguf_get_data_offset(self._ctx))

    def _check_data(self) -> None:
        """The file must reach to the end of its last tensor."""
        end = 0
        for i in range(self._c.gguf_get_n_tensors(self._ctx)):
            end = max(end, self._c.gguf_get_tensor_offset(self._ctx, i) + self._c.gguf_get_tensor_size(self._ctx, i))
        expected, found = self.data_offset + end, self.path.stat().st_size
        if end and found < expected:
            raise ConverterError(
                f"{self.flag}: {self.path}: expected {expected} bytes, found a file truncated to {found}"
            )

    def keys(self) -> list[str]:
        n_kv = self._c.gguf_get_n_kv(self._ctx)
        return [self._c.gguf_get_key(self._ctx, i).decode("utf-8", "replace") for i in range(n_kv)]

    def get(self, key: str) -> Any:
        """Value of a key: int, float, bool, str, or a list of numbers; None when absent. Arrays of strings: None."""
        index = self._c.gguf_find_key(self._ctx, key.encode())
        if index < 0:
            return None
        kind = self._c.gguf_get_kv_type(self._ctx, index)
        if kind == _TYPE_STRING:
            return self._c.gguf_get_val_str(self._ctx, index).decode("utf-8", "replace")
        if kind == _TYPE_ARRAY:
            code = _SCALARS.get(self._c.gguf_get_arr_type(self._ctx, index))
            if code is None:
                return None
            n = self._c.gguf_get_arr_n(self._ctx, index)
            raw = ctypes.string_at(self._c.gguf_get_arr_data(self._ctx, index), n * struct.calcsize(code)) if n else b""
            return list(struct.unpack(f"={n}{code}", raw))
        code = _SCALARS[kind]
        raw = ctypes.string_at(self._c.gguf_get_val_data(self._ctx, index), struct.calcsize(code))
        return struct.unpack(f"={code}", raw)[0]

    def has_tensor(self, name: str) -> bool:
        return bool(self._c.gguf_find_tensor(self._ctx, name.encode()) >= 0)

    def tensor(self, name: str, why: str) -> NDArray[np.float32]:
        """A two-dimensional tensor dequantized to float32, [ne1, ne0]. `why` ends the error sentence.

        Raises ConverterError when it is missing, not a matrix, or of a type gguf-py cannot dequantize.
        """
        index = self._c.gguf_find_tensor(self._ctx, name.encode())
        if index < 0:
            raise ConverterError(f"{name}: expected this tensor in {self.path}, found none; {why}")
        ne = [self._c.gguf_get_tensor_ne(self._ctx, index)[i] for i in range(4)]
        if ne[2] != 1 or ne[3] != 1:
            raise ConverterError(f"{name}: expected a matrix, found shape {ne}; {why}")
        offset = self.data_offset + self._c.gguf_get_tensor_offset(self._ctx, index)
        size = self._c.gguf_get_tensor_size(self._ctx, index)
        raw = np.fromfile(self.path, dtype=np.uint8, count=size, offset=offset)
        kind = self._c.gguf_get_tensor_type(self._ctx, index)
        try:
            rows = raw.reshape(ne[1], size // ne[1])
            values = dequantize(rows, GGMLQuantizationType(kind))
        except (NotImplementedError, ValueError, KeyError) as error:
            raise ConverterError(
                f"{name}: expected a tensor type that can be dequantized, found type {kind}; {why}"
            ) from error
        return values.astype(np.float32, copy=False).reshape(ne[1], ne[0])

    def metadata_with(self, values: Mapping[str, Value]) -> bytes:
        """The file's metadata (header, keys, tensor infos, padding) with `values` added or replaced."""
        with self._copy() as ctx:
            _set_values(self._c, ctx, values)
            return _metadata(self._c, ctx)

    @contextlib.contextmanager
    def _copy(self) -> Iterator[int]:
        """A second context of the same file, free to be changed."""
        ctx = self._c.gguf_init_from_file(str(self.path).encode(), native.GgufInitParams(True, None))
        if not ctx:
            raise ConverterError(f"{self.flag}: {self.path}: cannot be read a second time")
        try:
            yield ctx
        finally:
            self._c.gguf_free(ctx)


def _check_header(flag: str, path: Path) -> None:
    if not path.is_file():
        raise ConverterError(f"{flag}: expected a GGUF file, found no file at {path}")
    try:
        with open(path, "rb") as handle:
            head = handle.read(24)
    except OSError as error:
        raise ConverterError(f"{flag}: cannot read {path}: {error.strerror}") from error
    if head[:4] != b"GGUF":
        raise ConverterError(f"{flag}: {path}: expected a GGUF file, found first bytes {head[:4]!r}")
    if len(head) < 24:
        raise ConverterError(f"{flag}: {path}: expected a complete GGUF, found a file truncated to {len(head)} bytes")


def _set_values(c: Any, ctx: int, values: Mapping[str, Value]) -> None:
    for key, (kind, value) in values.items():
        getattr(c, _SETTERS[kind])(ctx, key.encode(), value.encode() if isinstance(value, str) else value)


def _metadata(c: Any, ctx: int) -> bytes:
    buffer = ctypes.create_string_buffer(c.gguf_get_meta_size(ctx))
    c.gguf_get_meta_data(ctx, buffer)
    return buffer.raw


def write_copy(flag: str, base: Gguf, output: Path, values: Mapping[str, Value]) -> None:
    """Atomically write a copy of `base` with `values` in its metadata and the same tensor data, byte for byte.

    SHA256_KEY is filled in here: the hash is computed while the data is copied, and the metadata, whose size does not
    depend on it, is written again at the end. Raises ConverterError when the file cannot be written.
    """
    draft = base.metadata_with({**values, SHA256_KEY: ("str", "0" * 64)})
    with _reading(base) as source, atomic_file(flag, output) as handle:
        handle.write(draft)
        digest = hashlib.sha256(_read(base, source, base.data_offset))
        while block := _read(base, source, BLOCK):
            digest.update(block)
            handle.write(block)
        final = base.metadata_with({**values, SHA256_KEY: ("str", digest.hexdigest())})
        if len(final) != len(draft):
            raise RuntimeError("the metadata changed its size with the hash")
        handle.seek(0)
        handle.write(final)


def write_sidecar(flag: str, base: Gguf, output: Path, values: Mapping[str, Value]) -> None:
    """Atomically write a GGUF without tensors: general.architecture, general.name (when the base has one), `values`."""
    digest = hashlib.sha256()
    with _reading(base) as source:
        while block := _read(base, source, BLOCK):
            digest.update(block)
    named = {key: base.get(key) for key in ("general.architecture", "general.name")}
    general: dict[str, Value] = {key: ("str", value) for key, value in named.items() if isinstance(value, str)}
    c = native.gguf()
    ctx = c.gguf_init_empty()
    try:
        _set_values(c, ctx, {**general, **values, SHA256_KEY: ("str", digest.hexdigest())})
        blob = _metadata(c, ctx)
    finally:
        c.gguf_free(ctx)
    with atomic_file(flag, output) as handle:
        handle.write(blob)


@contextlib.contextmanager
def _reading(base: Gguf) -> Iterator[BinaryIO]:
    try:
        handle = open(base.path, "rb")  # noqa: SIM115 (closed below; only opening is guarded)
    except OSError as error:
        raise ConverterError(f"{base.flag}: cannot read {base.path}: {error.strerror}") from error
    with handle:
        yield handle


def _read(base: Gguf, handle: BinaryIO, n: int) -> bytes:
    """read() whose errors name the input, so that the writer's guard does not blame the output."""
    try:
        return handle.read(n)
    except OSError as error:
        raise ConverterError(f"{base.flag}: cannot read {base.path}: {error.strerror}") from error
