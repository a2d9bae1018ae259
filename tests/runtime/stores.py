"""The store of evaluated prompts (subkv_store.h) through ctypes, and states of no meaning in llama.cpp's layout."""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import capi

from subkv.native.store import SIGNATURES, BytesStruct, PointStruct, PromptStruct, QueryStruct, StatsStruct

LIB = capi.load()
MIB = 1 << 20
IDENTITY = bytes(range(32))
BLOCK = 256  # tokens
LEAST = 32

_i32, _ptr = ctypes.c_int32, ctypes.c_void_p


capi.declare(LIB, SIGNATURES)


@dataclass(frozen=True)
class Point:
    """data: of the model, of a draft model, of its speculation."""

    n_tokens: int
    pos_min: int = 0
    pos_max: int = 0
    data: tuple[bytes, bytes, bytes] = (b"", b"", b"")


@dataclass(frozen=True)
class Prompt:
    """states: of the model, of a draft model."""

    tokens: list[int]
    states: tuple[bytes, bytes]
    points: list[Point] = field(default_factory=list)
    n_removable: int = -1


@dataclass(frozen=True)
class Found:
    prompt: Prompt
    reach: int


def _bytes(data: bytes) -> BytesStruct:
    return BytesStruct(ctypes.cast(ctypes.c_char_p(data), _ptr), len(data))


def _shown(given: BytesStruct) -> bytes:
    return ctypes.string_at(given.data, given.size) if given.size else b""


class Store:
    """An open store; its methods wait until everything is written."""

    def __init__(self, folder: Path, max_bytes: int = 256 * MIB) -> None:
        self.folder = folder
        self.handle = LIB.subkv_store_open(str(folder).encode(), max_bytes)
        if not self.handle:
            raise OSError(LIB.subkv_last_error().decode())

    def close(self) -> None:
        LIB.subkv_store_close(self.handle)

    def room(self, n_bytes: int) -> int:
        """1: a prompt of this many bytes is accepted, 0: not now, -1: never."""
        found: int = LIB.subkv_store_room(self.handle, n_bytes)
        return found

    def put(self, prompt: Prompt, identity: bytes = IDENTITY) -> bool:
        taken = self.queue(prompt, identity)
        assert self.flush()
        return taken

    def flush(self) -> bool:
        done: bool = LIB.subkv_store_flush(self.handle, 60.0)
        return done

    def queue(self, prompt: Prompt, identity: bytes = IDENTITY) -> bool:
        """As put(), without waiting."""
        points = [
            PointStruct(p.n_tokens, p.pos_min, p.pos_max, (BytesStruct * 3)(*map(_bytes, p.data)))
            for p in prompt.points
        ]
        given = PromptStruct(
            (_i32 * len(prompt.tokens))(*prompt.tokens),
            len(prompt.tokens),
            (BytesStruct * 2)(*map(_bytes, prompt.states)),
            (PointStruct * len(points))(*points),
            len(points),
            prompt.n_removable,
        )
        taken: bool = LIB.subkv_store_put(self.handle, identity, ctypes.byref(given), True)
        return taken

    def get(
        self,
        tokens: Sequence[int],
        identity: bytes = IDENTITY,
        *,
        n_held: int = 0,
        n_max: int = 1 << 20,
        n_removable: int = -1,
        seconds_per_token: float = 0.0,
        n_moved: int = -1,
        refused: bool = False,
    ) -> Found | None:
        """refused: the cache rejects the result."""
        listed = (_i32 * len(tokens))(*tokens)
        query = QueryStruct(listed, len(tokens), n_held, n_max, n_removable, seconds_per_token, 60.0, n_moved)
        found = LIB.subkv_store_get(self.handle, identity, ctypes.byref(query))
        if not found:
            return None
        p = LIB.subkv_store_found_prompt(found).contents
        points = [
            Point(q.n_tokens, q.pos_min, q.pos_max, tuple(map(_shown, q.data)))  # type: ignore[arg-type]
            for q in p.points[: p.n_points]
        ]
        prompt = Prompt(list(p.tokens[: p.n_tokens]), (_shown(p.state[0]), _shown(p.state[1])), points, n_removable)
        result = Found(prompt, LIB.subkv_store_found_reach(found))
        LIB.subkv_store_found_free(self.handle, found, refused)
        return result

    def common(self, tokens: Sequence[int], identity: bytes = IDENTITY) -> int:
        n: int = LIB.subkv_store_common(self.handle, identity, (_i32 * len(tokens))(*tokens), len(tokens))
        return n

    @property
    def stats(self) -> StatsStruct:
        stats = StatsStruct()
        LIB.subkv_store_get_stats(self.handle, ctypes.byref(stats))
        return stats

    def files(self, ending: str = "") -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if path.name.endswith(ending))


@contextmanager
def opened(folder: Path, max_bytes: int = 256 * MIB) -> Iterator[Store]:
    store = Store(folder, max_bytes)
    try:
        yield store
    finally:
        store.close()


def text(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(n)]


def state(
    tokens: Sequence[int],
    n_layer: int = 2,
    row: int = 40,
    tail: bytes = b"window",
    order: Sequence[int] | None = None,
    seq: int = 0,
    is_long: bool = False,
) -> bytes:
    """A state in llama.cpp's format: like a model's, rows are a function of the tokens up to theirs.

    order: positions of the tokens, by cell; seq: the sequence; is_long: cells with parts of a position and a token.
    """
    n = len(tokens)
    held = range(n) if order is None else order
    more = struct.pack("<iii", 5, 6, 7) if is_long else b""
    out = [
        b"head",
        struct.pack("<I", n),
        *(struct.pack("<iI", i, 1) + more + struct.pack("<i", seq) for i in held),
        struct.pack("<II", 0, n_layer),
    ]
    rows = []
    total = 0
    for token in tokens:
        total = (total * 31 + token + 1) % (1 << 61)
        rows.append(total)
    for tensor in range(2 * n_layer):
        out.append(struct.pack("<iQ", 24, row))
        out.extend(hashlib.shake_128(b"%d %d" % (tensor, rows[i])).digest(row) for i in held)
    return b"".join([*out, tail])


def prompt(tokens: list[int], points: Sequence[int] = (), **options: int) -> Prompt:
    """With a state, one of a draft model, and checkpoints."""
    held = [Point(n, 3, n - 1, (bytes([n % 256]) * 500, b"draft%d" % n, b"")) for n in points]
    return Prompt(tokens, (state(tokens), state(tokens, 1, 16, b"")), held, **options)


def forged(body: bytes, version: bytes = b"1") -> bytes:
    """A head with a valid checksum."""
    return b"subkvPX" + version + hashlib.sha256(body).hexdigest().encode() + body


def head_name(identity: bytes, tokens: list[int]) -> str:
    digest = hashlib.sha256(struct.pack(f"<{len(tokens)}i", *tokens)).hexdigest()
    return f"{identity.hex()[:24]}-{digest[:32]}.prefix"


def tokens_of(tokens: list[int]) -> bytes:
    return struct.pack(f"<I{len(tokens)}i", len(tokens), *tokens)


def size(store: Store) -> int:
    return sum(path.stat().st_size for path in store.files())


def program(text: str, *arguments: object, preload: str | None = None) -> subprocess.Popen[str]:
    """Runs Python code in a new process."""
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "GGML_NO_BACKTRACE": "1"}
    if preload:
        env["LD_PRELOAD"] = preload
    command = [sys.executable, "-c", text, *map(str, arguments)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
