"""Features of a coded cache on a tiny model of each kind of architecture, and the table of backends.

try_feature("context shift", "plain", folder) returns "yes" or the refusal, on this build's CPU or GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine
import stores
import virtual
from engine import SUBKV, C, Refused, Session, last_error, session
from guarantees import N_PROMPT, WINDOW, Trial, bases
from pictures import Vision

KINDS = {
    "plain": "llama",
    "sliding": "gemma2",
    "hybrid": "qwen3next",
    "M-RoPE": "qwen2vl",
    "MLA": "deepseek2",
    "sparse": "deepseek32",
}
PICTURES = {"M-RoPE": "mrope", "sliding": "whole beside sliding windows"}  # others: as text, one position a token
LATENT = ("MLA", "sparse")
N_WIDE = 320  # elements of a head, more than CUDA's decode kernel takes
N_DRAFT = 6
KEEP, N_DISCARD = 8, 40  # tokens before the discarded ones, and discarded tokens
FOLLOWING = "kv,block=16,length=32,warm=32,max_chunks=12,gain=100,reuse=0,merge=1"  # a basis every 32 tokens
GPU_BOUND = 2e-2  # bound for products in halves, as in test_placement.py


@dataclass(frozen=True)
class Cell:
    """mark: yes, refused, as f16 (f16 is refused or fails, too), none (the kind lacks the feature's subject) or not
    tried.

    text: for yes in the table of backends, the test that checks it; for refused, the program's message; for none and
    not
    tried, the reason.
    """

    mark: str
    text: str = ""


YES, AS_F16, NONE = Cell("yes"), Cell("as f16"), Cell("none")


def sentence(text: str) -> str:
    """The message of a refusal without machine-dependent parts: devices and addresses."""
    return re.sub(r"\b(CUDA|EMULATED|Vulkan)\d+\b", "the GPU", text.strip())


class Attempt(Trial):
    """A model of a kind, the f16 cache's logits of its tokens, and bases of full rank and 16 bits."""

    def __init__(self, model: virtual.Model, folder: Path, on_gpu: bool) -> None:
        super().__init__(model)
        self.folder = folder
        self.layout = bases(model, folder, 16)
        rounded = self.floor()
        self.bound = max(2 * rounded, GPU_BOUND) if on_gpu else 2 * rounded

    def with_codes(self, window: tuple[int, int, int] = WINDOW, **options: Any) -> AbstractContextManager[Session]:
        coded: AbstractContextManager[Session] = session(
            self.model, self.layout, window=window, threads=1, **self.options | options
        )
        return coded

    def compared(self, distance: float) -> Cell:
        assert distance < self.bound, (distance, self.bound)
        return YES

    def equal(self, **options: Any) -> Cell:
        """Compare a prompt in pieces with an f16 cache."""
        with self.with_codes(**options) as s:
            logits = s.decode(self.tokens, pieces=[70, *[1] * 5, 25])
            assert s.stats().n_layer_coded > 0
        return self.compared(self.distance(self.expected, logits))


def _following(a: Attempt) -> Cell:
    a.bound *= 4  # coefficients are halves, and every new basis rotates them
    return a.equal(window=(4, 32, 8), adapt=FOLLOWING)


def _rows(a: Attempt) -> Cell:
    return a.equal()


def _shift(a: Attempt) -> Cell:
    def shifted(s: Session) -> engine.Logits | None:
        s.decode(a.tokens)
        if not C.llama_memory_can_shift(s.memory) or not s.rm(0, KEEP, KEEP + N_DISCARD):
            return None
        C.llama_memory_seq_add(s.memory, 0, KEEP + N_DISCARD, -1, -N_DISCARD)
        return s.decode(a.others[:30], len(a.tokens) - N_DISCARD)

    with a.plain() as s:
        expected = shifted(s)
    if expected is None:
        return AS_F16
    with a.with_codes() as s:
        actual = shifted(s)
        if actual is None:
            C.llama_memory_seq_add(s.memory, 0, KEEP, -1, 1)
            return Cell("refused", last_error())
    return a.compared(a.distance(expected, actual))


def _sequences(a: Attempt) -> Cell:
    wholes = []
    for open_session in (a.with_codes, a.plain):
        with open_session() as s:
            whole = s.decode(a.tokens)
            s.clear()
            wholes.append((whole, s.decode(a.others)))
    distance = a.sequences(a.with_codes, *wholes[0])
    if distance >= a.bound and a.sequences(a.plain, *wholes[1]) >= a.bound:
        return AS_F16
    return a.compared(distance)


def _states(a: Attempt) -> Cell:
    rest = a.expected[N_PROMPT:]
    return a.compared(max(a.distance(rest, a.restored(a.layout, seq)) for seq in (0, None)))


def _prefix(a: Attempt) -> Cell:
    """Through the store of evaluated prompts, like a restart of llama-server."""
    prompt = a.tokens[:N_PROMPT]
    with a.with_codes() as s, stores.opened(a.folder / "store") as store:
        s.decode(prompt)
        assert store.put(stores.Prompt(prompt, (s.state(0), b"")))
    with a.with_codes() as s, stores.opened(a.folder / "store") as store:
        entry = store.get(a.tokens)
        assert entry and entry.prompt.tokens == prompt
        state = entry.prompt.states[0]
        assert s.set_state(state, 0) == len(state), last_error()
        return a.compared(a.distance(a.expected[N_PROMPT:], s.decode(a.tokens[N_PROMPT:], N_PROMPT)))


def _drafts(a: Attempt) -> Cell:
    """Some tokens in one batch, the last of which are removed."""

    def drafted(s: Session) -> engine.Logits | None:
        s.decode(a.tokens[:N_PROMPT])
        s.decode([a.tokens[N_PROMPT], *a.others[: N_DRAFT - 1]], N_PROMPT)
        return s.decode(a.tokens[N_PROMPT + 1 :], N_PROMPT + 1) if s.rm(0, N_PROMPT + 1) else None

    with a.plain(n_rs_seq=N_DRAFT) as s:
        expected = drafted(s)
    if expected is None:
        return AS_F16
    with a.with_codes(n_rs_seq=N_DRAFT) as s:
        actual = drafted(s)
        return Cell("refused", last_error()) if actual is None else a.compared(a.distance(expected, actual))


def _pictures(a: Attempt) -> Cell:
    kind = next((kind for kind, arch in KINDS.items() if arch == a.model.arch), "plain")
    vision = Vision(PICTURES.get(kind, "causal"), a.model, a.layout)
    rounded = []
    for options in ({}, {"flash_attn": 1}, {"type_k": 0, "type_v": 0}):
        with vision.session(threads=1, **a.options | options) as s:
            rounded.append(vision.decode(s, vision.parts))
    a.bound = max(a.bound, *(2 * a.distance(rounded[0], other) for other in rounded[1:]))
    with vision.session(vision.exact, threads=1, **a.options) as s:
        return a.compared(a.distance(rounded[0], vision.decode(s, vision.parts)))


FEATURES: dict[str, Callable[[Attempt], Cell]] = {
    "adaptive bases": _following,
    "latent rows": _rows,
    "context shift": _shift,
    "sparse selection": _rows,
    "several sequences": _sequences,
    "states": _states,
    "prefix restore": _prefix,
    "heads above 256": _rows,
    "drafts": _drafts,
    "pictures": _pictures,
}


def applies(feature: str, kind: str) -> bool:
    """Whether a kind has the subject of the feature."""
    of = {"latent rows": LATENT, "sparse selection": ("sparse",)}
    return kind in of.get(feature, tuple(KINDS))


def _wide(kind: str) -> dict[str, Any]:
    """Metadata of heads of N_WIDE elements, or of a latent of N_WIDE elements."""
    if kind in LATENT:
        return {
            "attention.kv_lora_rank": N_WIDE,
            "attention.key_length": N_WIDE + 16,
            "attention.value_length": N_WIDE,
            "attention.indexer.top_k": 8,  # with 16, the last chosen cell and the next one differ only by rounding
        }
    wide = {"attention.key_length": N_WIDE, "attention.value_length": N_WIDE, "rope.dimension_count": N_WIDE}
    return wide | ({"embedding_length": 4 * N_WIDE} if kind == "M-RoPE" else {})  # its size of all heads together


def try_feature(feature: str, kind: str, folder: Path, on_gpu: bool = False) -> Cell:
    """The result on this machine. Raises AssertionError if the feature is neither refused nor correct."""
    if not applies(feature, kind):
        return NONE
    keys = _wide(kind) if feature == "heads above 256" else {}
    with virtual.model(KINDS[kind], n_gpu_layers=-1 if on_gpu else 0, **keys) as model:
        attempt = Attempt(model, folder, on_gpu)
        try:
            return FEATURES[feature](attempt)
        except Refused as refused:
            return Cell("refused", str(refused))
        finally:
            SUBKV.subkv_attach(None, None)
            SUBKV.subkv_layout_free(attempt.layout)


def backend() -> str:
    """The column of the table for this build's GPU; empty without a GPU."""
    if not C.llama_supports_gpu_offload():
        return ""
    return {b"cuda": "CUDA", b"vulkan": "Vulkan"}.get(SUBKV.subkv_device_kernel_name(), "")


#
# backends
#

BACKENDS = ("CPU", "CUDA", "Vulkan", "Triton, PyTorch")
_RUNTIME, _HERE = "tests/runtime/test_", "tests/architectures/test_"
_TORCH = "tests/quality/test_subspace"
_NO_SUCH = Cell("none", "transformers moves no positions, and keeps no states or prompts in files")
_NOT_LATENT = (
    "model: expected layers with their own keys and values of one head size, found latent attention (MLA); for a GGUF "
    "of it, use subkv.Llama(kv_cache='subkv')"
)


def _yes(test: str) -> Cell:
    return Cell("yes", test)


_ON_CPU = {
    "adaptive bases": f"{_RUNTIME}adaptive.py::test_exact_codes_in_any_chunks_equal_the_f16_cache",
    "latent rows": f"{_RUNTIME}latent.py::test_exact_codes_equal_the_f16_cache",
    "context shift": f"{_RUNTIME}shift.py::test_exact_codes_shift_as_the_f16_cache_does",
    "sparse selection": f"{_HERE}selected.py::test_by_a_list_and_under_a_mask",
    "several sequences": f"{_RUNTIME}sequences.py::test_sequences_do_not_see_each_other",
    "states": f"{_RUNTIME}sequences.py::test_save_and_restore",
    "prefix restore": f"{_RUNTIME}prefix_store.py::test_states_of_models",
    "heads above 256": f"{_HERE}features.py::test_kinds",
    "drafts": "tests/programs/test_mtp.py::test_drafts_as_with_f16",
    "pictures": f"{_RUNTIME}pictures.py::test_exact_codes_equal_the_f16_cache",
}
_GPU = {
    "adaptive bases": Cell(
        "refused",
        "adapt: layer 0 has its cache on the GPU, which does not support adaptive bases; keep it on the CPU (-ngl 0, "
        "or offload_kqv off), or use static bases",
    ),
    "latent rows": _yes(f"{_RUNTIME}placement.py::test_latent_attention_on_the_gpu"),
    "context shift": _yes(f"{_RUNTIME}placement.py::test_positions_on_the_gpu_shift_as_on_the_cpu"),
    "sparse selection": _yes(f"{_HERE}features.py::test_on_this_backend"),
    "several sequences": _yes(_ON_CPU["several sequences"]),
    "states": _yes(f"{_RUNTIME}placement.py::test_a_state_moves_between_gpu_and_cpu"),
    "prefix restore": _yes("tests/python/test_gpu.py::test_gpu_and_cpu_share_prompt_caches_of_halves"),
    "heads above 256": _yes(f"{_RUNTIME}placement.py::test_heads_above_256_elements"),
    "drafts": _yes(f"{_RUNTIME}sequences.py::test_remove_a_tail_and_decode_again"),
    "pictures": _yes(f"{_HERE}features.py::test_on_this_backend"),
}
TABLE: dict[str, dict[str, Cell]] = {
    "CPU": {feature: _yes(test) for feature, test in _ON_CPU.items()},
    "CUDA": _GPU,
    "Vulkan": _GPU,
    "Triton, PyTorch": {
        "adaptive bases": Cell("refused", "subkv.adapt: ignored with transformers, whose bases are static, found v"),
        "latent rows": Cell("refused", _NOT_LATENT),
        "context shift": _NO_SUCH,
        "sparse selection": Cell("refused", _NOT_LATENT),
        "several sequences": _yes(f"{_TORCH}.py::test_rows_of_a_batch_can_be_moved"),
        "states": _NO_SUCH,
        "prefix restore": _NO_SUCH,
        "heads above 256": Cell("not tried"),
        "drafts": _yes(f"{_TORCH}.py::test_generate"),
        "pictures": Cell("not tried"),
    },
}
