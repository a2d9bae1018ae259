"""Calls libllama and libsubkv directly, so that tests control batches, sequences and states."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import capi
import numpy as np
import numpy.typing as npt
import pytest
from adaptive_build import skip_without

from subkv.native import library as _lib

SUBKV = capi.load()
from llama_cpp import llama_cpp as C  # noqa: E402  (after the library path is set)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "format"))
import writer  # noqa: E402

Logits = npt.NDArray[np.float32]
Bands = Sequence[tuple[int, int]]

# CUDA's kernels for many tokens and for one round differently, the former to halves (measured: up to 8e-3).
AGREEMENT = 1e-2 if os.environ.get("SUBKV_TEST_HALVES") else 1e-3

LOG: list[str] = []


@C.llama_log_callback
def _collect(level: int, text: bytes, _user: Any) -> None:
    if level >= 3:
        LOG.append(text.decode(errors="replace"))


C.llama_backend_init()
C.llama_log_set(_collect, None)


def peak() -> Callable[[], int]:
    """From now on: the increase of peak resident memory in bytes. Skips the test on systems that do not report it."""
    status, marks = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def most() -> int:
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1])  # type: ignore[index]

    try:
        marks.write_text("5")  # resets the peak
    except OSError as e:
        pytest.skip(f"/proc/self/clear_refs: {e}")
    before = most()
    return lambda: most() - before


def last_error() -> str:
    """The reason of the last refusal."""
    return _lib.last_error()


class Model:
    """A loaded GGUF, on all GPUs unless n_gpu_layers says otherwise."""

    def __init__(self, path: Path, n_gpu_layers: int = -1, split_mode: int = C.LLAMA_SPLIT_MODE_LAYER) -> None:
        self.path = path
        params = C.llama_model_default_params()
        params.n_gpu_layers, params.split_mode = n_gpu_layers, split_mode
        self.handle = C.llama_model_load_from_file(str(path).encode(), params)
        assert self.handle, f"{path} does not load: {''.join(LOG[-3:])}"
        self.vocab = C.llama_model_get_vocab(self.handle)
        self.n_vocab = C.llama_vocab_n_tokens(self.vocab)

    def free(self) -> None:
        C.llama_model_free(self.handle)

    def random_tokens(self, n: int, seed: int) -> list[int]:
        """Random tokens, without those that end a text."""
        rng = random.Random(seed)
        return [rng.randrange(10, self.n_vocab - 2) for _ in range(n)]

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        buf = (C.llama_token * (len(data) + 8))()
        n = C.llama_tokenize(self.vocab, data, len(data), buf, len(buf), True, False)
        assert n >= 0
        return list(buf[:n])


class Refused(Exception):
    """llama_init_from_model gave no context; the text is subkv_last_error()."""


SOURCE = (5, 9, 2, 31, 7, 16)  # of models with an encoder


class Session:
    """One context. Positions and sequences are the caller's business."""

    def __init__(
        self,
        model: Model,
        layout: Any = None,
        *,
        window: tuple[int, int, int] = (-1, -1, -1),
        n_ctx: int = 256,
        n_ubatch: int = 64,
        n_seq_max: int = 1,
        n_rs_seq: int = 0,
        unified: bool = False,
        flash_attn: int = 0,
        threads: int = 2,
        type_k: int = 1,
        type_v: int = 1,
        observer: Any = None,
        adapt: str | None = None,
        offload_kqv: bool = True,
        on_node: Any = None,
    ) -> None:
        """on_node: called with every node that runs, a ggml_backend_sched_eval_callback."""
        if adapt is not None:
            skip_without()
        C.llama_log_set(_collect, None)  # other tests of the process set theirs
        params = C.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = n_ctx
        params.n_ubatch = n_ubatch
        params.n_seq_max = n_seq_max
        params.n_rs_seq = n_rs_seq
        params.kv_unified = unified
        params.flash_attn_type = flash_attn
        params.n_threads = params.n_threads_batch = threads
        params.type_k = type_k
        params.type_v = type_v
        params.offload_kqv = offload_kqv
        if on_node:
            params.cb_eval = on_node
        if layout:
            cache = _lib.CacheParams(*window, adapt.encode() if adapt is not None else None)
            assert SUBKV.subkv_attach(layout, cache), last_error()
        if observer:
            assert SUBKV.subkv_observe(observer), last_error()
        self.model = model
        self.ctx = C.llama_init_from_model(model.handle, params)
        if not self.ctx:
            raise Refused(last_error())
        self.memory = C.llama_get_memory(self.ctx)
        if C.llama_model_has_encoder(model.handle):
            self._fill(
                C.llama_encode, SOURCE, 0, range(n_seq_max)
            )  # the encoder's output, to which the decoder attends

    def close(self) -> None:
        if self.ctx:
            C.llama_free(self.ctx)
        self.ctx = None

    def try_decode(self, tokens: Sequence[int], pos: int, seq: int | Sequence[int] = 0, logits: bool = True) -> int:
        """llama_decode's status; `seq` may name several sequences that share the tokens."""
        return self._fill(C.llama_decode, tokens, pos, [seq] if isinstance(seq, int) else list(seq), logits)

    def _fill(
        self, run: Callable[..., int], tokens: Sequence[int], pos: int, seqs: Sequence[int], logits: bool = True
    ) -> int:
        batch = C.llama_batch_init(len(tokens), 0, len(seqs))
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = pos + i
            batch.n_seq_id[i] = len(seqs)
            for j, s in enumerate(seqs):
                batch.seq_id[i][j] = s
            batch.logits[i] = logits
        status = run(self.ctx, batch)
        C.llama_batch_free(batch)
        return int(status)

    def decode(
        self, tokens: Sequence[int], pos: int = 0, seq: int | Sequence[int] = 0, pieces: Sequence[int] | None = None
    ) -> Logits:
        """Logits [len(tokens), n_vocab], decoded in calls of `pieces` tokens (default: one call)."""
        out = []
        at = 0
        for n in pieces or [len(tokens)]:
            status = self.try_decode(tokens[at : at + n], pos + at, seq)
            assert status == 0, f"llama_decode gives {status}: {last_error()} {''.join(LOG[-2:])}"
            out.append(self._logits(n))
            at += n
        assert at == len(tokens)
        return np.concatenate(out)

    def decode_batch(self, items: Sequence[tuple[int, int, int]]) -> Logits:
        """One call with (token, pos, seq) items, e.g. one token of each of several sequences."""
        batch = C.llama_batch_init(len(items), 0, 1)
        batch.n_tokens = len(items)
        for i, (token, pos, seq) in enumerate(items):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, pos, 1, True
            batch.seq_id[i][0] = seq
        status = C.llama_decode(self.ctx, batch)
        C.llama_batch_free(batch)
        assert status == 0, last_error()
        return self._logits(len(items))

    def _logits(self, n: int) -> Logits:
        return np.ctypeslib.as_array(C.llama_get_logits(self.ctx), (n, self.model.n_vocab)).copy()

    def rm(self, seq: int, p0: int, p1: int = -1) -> bool:
        return bool(C.llama_memory_seq_rm(self.memory, seq, p0, p1))

    def cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        C.llama_memory_seq_cp(self.memory, src, dst, p0, p1)

    def take_refusal(self, seq: int = 0) -> bool:
        """Whether the last operation on a sequence was refused; its tokens can be decoded again then."""
        return bool(SUBKV.subkv_take_refusal(self.ctx, seq))

    def assert_refused(self, seq: int = 0) -> None:
        """A refused operation that returns nothing: no token of the sequence is decoded, no state is written, until the
        caller takes note of it; nothing has changed then."""
        last, reason = C.llama_memory_seq_pos_max(self.memory, seq), last_error()
        assert self.try_decode([10], last + 1, seq) == -2
        assert last_error().startswith(f"decode: positions of sequence {seq} as the program has them"), last_error()
        assert self.state(seq) == b""
        assert self.take_refusal(seq) and not self.take_refusal(seq), reason
        assert C.llama_memory_seq_pos_max(self.memory, seq) == last

    def clear(self) -> None:
        C.llama_memory_clear(self.memory, True)

    def state(self, seq: int | None = None) -> bytes:
        if seq is None:
            buf = (ctypes.c_uint8 * C.llama_state_get_size(self.ctx))()
            n = C.llama_state_get_data(self.ctx, buf, len(buf))
        else:
            buf = (ctypes.c_uint8 * C.llama_state_seq_get_size(self.ctx, seq))()
            n = C.llama_state_seq_get_data(self.ctx, buf, len(buf), seq)
        return bytes(buf[:n])

    def set_state(self, data: bytes, seq: int | None = None) -> int:
        """Bytes read, 0 when refused."""
        buf = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        if seq is None:
            return int(C.llama_state_set_data(self.ctx, buf, len(data)))
        return int(C.llama_state_seq_set_data(self.ctx, buf, len(data), seq))

    def stats(self) -> _lib.Stats:
        out = _lib.Stats()
        assert SUBKV.subkv_get_stats(self.ctx, out), last_error()
        return out


@contextmanager
def session(model: Model, layout: Any = None, **options: Any) -> Iterator[Session]:
    """A Session that is freed on the way out."""
    s = Session(model, layout, **options)
    try:
        yield s
    finally:
        s.close()


def two_states(s: Session, tokens: Sequence[int]) -> tuple[bytes, bytes]:
    """States of sequence 0 with two texts; the second one stays in the sequence."""
    s.decode(tokens[:60])
    first = s.state(0)
    s.clear()
    s.decode(tokens[100:150])
    return first, s.state(0)


def check_sequences_apart(opened: Callable[..., Any], tokens: Sequence[int], unified: bool) -> None:
    """Three texts evaluated together get the logits that each gets alone. opened(**options): a session.

    A GPU has another kernel for few tokens than for a prompt: there, each alone is evaluated in the same pieces.
    """
    texts = [tokens[:90], tokens[90:150], tokens[20:95]]
    alone = []
    for text in texts:
        pieces = [len(text) - 20, *[1] * 20] if C.llama_supports_gpu_offload() else None
        with opened() as s:
            alone.append(s.decode(text, pieces=pieces))
    with opened(n_seq_max=3, unified=unified, n_ctx=768) as s:
        for seq, text in enumerate(texts):
            s.decode(text[:-20], 0, seq)
        for i in range(20, 0, -1):  # one token of each sequence per call
            found = s.decode_batch([(text[-i], len(text) - i, seq) for seq, text in enumerate(texts)])
            for seq in range(3):
                assert agree(alone[seq][-i][None], found[seq][None])


def signed_permutations(
    shape: Sequence[tuple[int, int, int, int]],
    bands_k: Bands,
    bands_v: Bands,
    *,
    arch: str,
    block_count: int,
    path: Path,
    n_sink: int = 4,
    n_recent: int = 8,
    recent_bits: int = 16,
    mean: float = 0.0,
    scale: float = 1.0,
    gamma: float = 1.0,
    seed: int = 0,
) -> Any:
    """A layout whose bases are exact in half precision: coefficients are permuted, sign-flipped elements.

    shape: (il, n_head_kv, d_k, d_v) of every coded layer. With 16-bit bands of full rank the coded path then holds
    the same half-precision numbers as an f16 cache. mean: size of the means that are subtracted from coded keys; the
    numbers are then equal up to rounding to half. scale: of the coefficients; values other than powers of two cause
    rounding. gamma: of keys. Returns the loaded layout handle.
    """
    rng = np.random.default_rng(seed)
    centre = np.random.default_rng([seed, 1])

    def head(d: int, bands: Bands) -> Any:
        rank = sum(n for n, _ in bands)
        basis = np.zeros((rank, d), np.float16)
        basis[np.arange(rank), rng.permutation(d)[:rank]] = rng.choice([-1.0, 1.0], rank)
        # steps for elements of the size of one: 4 over the levels
        ratios = [1.0 if bits == 16 else 2.0 ** (8 - bits) for _, bits in bands]
        means = (mean * centre.standard_normal(d)).astype(np.float16)
        encode, decode = (basis * scale).astype(np.float16), (basis / scale).astype(np.float16)
        return writer.Head(list(bands), ratios, encode, decode, gamma, means)

    layers = [
        writer.Layer(
            il=il, d_k=d_k, d_v=d_v, k=[head(d_k, bands_k) for _ in range(n)], v=[head(d_v, bands_v) for _ in range(n)]
        )
        for il, n, d_k, d_v in shape
    ]
    window = {"n_sink": n_sink, "n_recent": n_recent, "recent_bits": recent_bits}
    writer.write(path, writer.metadata(layers, arch=arch, block_count=block_count, **window))
    handle = SUBKV.subkv_layout_load(str(path).encode())
    assert handle, last_error()
    return handle


def latent_layers(bands: Bands, d_k: int, d_v: int, n_layer: int, seed: int = 0) -> list[writer.Layer]:
    """As signed_permutations(), of a latent's first d_v elements and of the rest apart; bands: of the former first."""
    rng = np.random.default_rng(seed)

    def layer(il: int) -> writer.Layer:
        basis = np.zeros((d_k, d_k), np.float16)
        order = [*rng.permutation(d_v), *(d_v + rng.permutation(d_k - d_v))]
        basis[np.arange(len(order)), order] = rng.choice([-1.0, 1.0], len(order))
        ratios = [1.0 if bits == 16 else 2.0 ** (8 - bits) for _, bits in bands]
        return writer.Layer(il, d_k, d_v, [writer.Head(list(bands), ratios, basis, basis)], [])

    return [layer(il) for il in range(n_layer)]


def load_latent(path: Path, layers: Sequence[writer.Layer], *, arch: str, block_count: int) -> Any:
    """The layout handle, None with an error where it is refused."""
    writer.write(path, writer.metadata(layers, arch=arch, block_count=block_count))
    return SUBKV.subkv_layout_load(str(path).encode())


def distance(a: Logits, b: Logits) -> float:
    """Largest difference of logits relative to their spread."""
    return float(np.abs(a - b).max() / a.std())


def differences(a: Logits, b: Logits) -> Logits:
    """The largest of every token, relative to the spread of all."""
    found: Logits = np.abs(a - b).max(1) / a.std()
    return found


def nearly_all(found: Logits) -> float:
    return float(np.quantile(found, 0.75))


def agree(a: Logits, b: Logits, flips: tuple[float, float] | None = None) -> bool:
    """Two runs of the coded path that may differ in the order of float sums only.

    Nearly every token's logits then differ by less than AGREEMENT of their spread (measured: 1e-6 to 1e-4). If a
    coefficient is near a rounding border its code flips, and the few tokens that attend to it differ by up to its step
    (measured: 1e-2). flips: allowed differences instead of these, see flips().
    """
    found = differences(a, b)
    most, any_ = flips or flips_here()
    return nearly_all(found) < max(AGREEMENT, most) and float(found.max()) < max(0.05, any_)


def flips(moved: Logits, coding: Logits) -> tuple[float, float]:
    """Allowed differences of coded logits, of nearly all tokens and of any, if rounding moves every coefficient.

    A coefficient that moves by x crosses a border of its code with the probability x / step, and its code then moves
    by the step: in the mean square by x * step. So logits move by the geometric mean of the effect of rounding without
    codes and the effect of coding (measured on lavapipe: 0.5 to 1.3 times that, any token's up to 2.9 times).
    moved: differences() of two such runs of an uncoded cache; coding: of that cache from the coded one.
    """
    return 2 * math.sqrt(nearly_all(moved) * nearly_all(coding)), 4 * math.sqrt(float(moved.max() * coding.max()))


@functools.cache
def flips_here() -> tuple[float, float]:
    """flips() of a GPU, whose products for many tokens may round to halves, in a tiny llama; none on a CPU."""
    if not C.llama_supports_gpu_offload():
        return 0.0, 0.0
    import tiny  # of a folder that is not on the path of scripts that drive this module

    with tempfile.TemporaryDirectory() as folder:
        model = Model(tiny.build(Path(folder) / "model.gguf"))
        n_layer, n_head_kv = C.llama_model_n_layer(model.handle), C.llama_model_n_head_kv(model.handle)
        bands, shape = [(8, 8), (8, 6), (16, 4)], [(il, n_head_kv, 32, 32) for il in range(n_layer)]
        path = Path(folder) / "layout.gguf"
        layout = signed_permutations(shape, bands, bands, arch="llama", block_count=n_layer, path=path)
        tokens = [int(token) for token in np.random.default_rng(1).integers(10, model.n_vocab - 2, 120)]
        pieces = [60, *[1] * 20, 40]
        runs = []
        for cache, n in ((None, None), (None, pieces), (layout, None)):
            with session(model, cache) as s:
                runs.append(s.decode(tokens, pieces=n))
        model.free()
    return flips(differences(runs[0], runs[1]), differences(runs[0], runs[2]))


def observed(obs: Any, il: int) -> _lib.Observed:
    """An observer's statistics of a layer."""
    out = _lib.Observed()
    assert SUBKV.subkv_observer_layer(obs, il, out)
    return out


def observe_values(obs: Any, il: int, what: str, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """One statistic of subkv_observer_get as an array."""
    out = np.empty(shape)
    pointer = out.ctypes.data_as(ctypes.POINTER(ctypes.c_double))
    n = SUBKV.subkv_observer_get(obs, il, what.encode(), pointer, out.size)
    assert n == out.size, (n, last_error())
    return out


def architecture(path: Path) -> str:
    """general.architecture of a GGUF."""
    from gguf import GGUFReader

    field = GGUFReader(path).get_field("general.architecture")
    assert field
    return str(field.contents())
