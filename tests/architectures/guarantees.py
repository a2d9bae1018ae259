"""The engine's guarantees, checked for one architecture on a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import engine
import numpy as np
import virtual
from engine import SUBKV, C, Logits, Refused, Session, session
from families import FLASH_ONLY, NOT_BUILT
from test_variants import shape_of

WINDOW = (4, 16, 8)  # sinks, recent, rollback
N_TOKENS, N_PROMPT = 100, 80  # more than a tile of 64 cells
N_JUNK = 6
EARLY = 10  # a token that is no sink; in the end only coded cells have it
GUARANTEES = ("equals f16", "splits", "rollback", "state", "sequences")


@dataclass(frozen=True)
class Support:
    """The result for one architecture.

    status: supported, refused, no cache (llama.cpp builds no K/V cache for it) or not built; reason: why, except for
    supported. The other fields are for supported architectures.
    floor: distance of logits caused by f16 rounding: flash attention or not, an f16 or an f32 cache.
    reach: distance of the last logits after a change of an early token; coarse: of all logits with codes of 3 bits.
    distances: by guarantee; NaN where the f16 cache refuses or fails, too.
    """

    status: str
    reason: str = ""
    n_layer: int = 0
    n_layer_coded: int = 0
    floor: float = 0.0
    reach: float = 0.0
    coarse: float = 0.0
    distances: dict[str, float] = field(default_factory=dict)


class Trial:
    """One model, and the f16 cache's logits of its tokens."""

    def __init__(self, model: virtual.Model) -> None:
        self.model = model
        self.options: dict[str, Any] = {"flash_attn": 1} if model.arch in FLASH_ONLY else {}
        rng = np.random.default_rng(11)
        self.tokens, self.others = (rng.integers(2, model.n_vocab, N_TOKENS).tolist() for _ in range(2))
        with self.plain() as s:
            self.expected = s.decode(self.tokens)
        self.used = np.abs(self.expected[0]) < 1e9  # some models suppress logits of pictures or sounds

    def plain(self, **options: Any) -> Any:
        return session(self.model, threads=1, **self.options | options)

    def coded(self, layout: Any, **options: Any) -> Any:
        return session(self.model, layout, window=WINDOW, threads=1, **self.options | options)

    def distance(self, a: Logits, b: Logits) -> float:
        """engine.distance of the logits that the model does not suppress."""
        a, b = a[:, self.used], b[:, self.used]
        assert np.isfinite(a).all() and np.isfinite(b).all()
        return engine.distance(a, b)

    def floor(self) -> float:
        rounded = []
        for options in ({"flash_attn": 1}, {"type_k": 0, "type_v": 0}):
            with self.plain(**options) as s:
                rounded.append(self.distance(self.expected, s.decode(self.tokens)))
        return max(rounded)

    def reach(self) -> float:
        changed = list(self.tokens)
        changed[EARLY] = 2 + (changed[EARLY] - 1) % (self.model.n_vocab - 2)
        with self.plain() as s:
            return self.distance(self.expected[-1:], s.decode(changed)[-1:])

    def coarse(self, layout: Any) -> float:
        with self.coded(layout) as s:
            return self.distance(self.expected, s.decode(self.tokens))

    def guarantees(self, layout: Any, floor: float) -> dict[str, float]:
        """Distances of logits of the coded path, by guarantee."""
        with self.coded(layout) as s:
            whole = s.decode(self.tokens)
            s.clear()
            pieces = [N_PROMPT - 20, 1, 1, 18, 1, N_TOKENS - N_PROMPT - 1]
            split = s.decode(self.tokens, pieces=pieces)
            s.clear()
            other = s.decode(self.others)
            rolled = self.rolled_back(s)
            with self.plain() as stock:
                assert (rolled is None) == (self.rolled_back(stock) is None), engine.last_error()
                stock.clear()
                others_stock = stock.decode(self.others)
        company = self.sequences(partial(self.coded, layout), whole, other)
        if company > 2 * floor and self.sequences(self.plain, self.expected, others_stock) > 2 * floor:
            company = float("nan")  # llama.cpp itself mixes up sequences of this architecture
        rest = whole[N_PROMPT:]
        return {
            "equals f16": self.distance(self.expected, whole),
            "splits": self.distance(whole, split),
            "rollback": float("nan") if rolled is None else self.distance(rest, rolled),
            "state": max(self.distance(rest, self.restored(layout, seq)) for seq in (0, None)),
            "sequences": company,
        }

    def rolled_back(self, s: Session) -> Logits | None:
        """Logits after the prompt, with other tokens decoded and removed in between; None if that is refused."""
        s.clear()
        s.decode(self.tokens[:N_PROMPT])
        s.decode(self.others[:N_JUNK], pos=N_PROMPT)
        return s.decode(self.tokens[N_PROMPT:], pos=N_PROMPT) if s.rm(0, N_PROMPT) else None

    def restored(self, layout: Any, seq: int | None) -> Logits:
        """Logits after the prompt, which comes from a state: of one sequence, or None for the whole context."""
        with self.coded(layout) as s:
            s.decode(self.tokens[:N_PROMPT])
            state = s.state(seq)
        with self.coded(layout) as s:
            assert s.set_state(state, seq) == len(state), engine.last_error()
            return s.decode(self.tokens[N_PROMPT:], pos=N_PROMPT)

    def sequences(self, open_session: Callable[..., Any], whole: Logits, other: Logits) -> float:
        """Distance caused by other sequences in the batch; `whole`, `other`: logits of each sequence alone."""
        # with an encoder and separate sequences llama.cpp ends the process
        ways = (True,) if C.llama_model_has_encoder(self.model.handle) else (False, True)
        return max(self._sequences(open_session, whole, other, unified) for unified in ways)

    def _sequences(self, open_session: Callable[..., Any], whole: Logits, other: Logits, unified: bool) -> float:
        """Two sequences in the same batches, then one that continues next to its copy."""
        with open_session(n_seq_max=2, unified=unified, n_ctx=512) as s:
            both = [(t, i, seq) for seq, text in enumerate((self.tokens, self.others)) for i, t in enumerate(text)]
            prompts = s.decode_batch([item for item in both if item[1] < N_PROMPT])
            steps = [s.decode_batch([item for item in both if item[1] == i]) for i in range(N_PROMPT, N_TOKENS)]
            s.clear()
            s.decode(self.tokens[:N_PROMPT])
            s.cp(0, 1)
            rest = [(t, N_PROMPT + i, seq) for seq in (0, 1) for i, t in enumerate(self.tokens[N_PROMPT:])]
            copies = np.split(s.decode_batch(rest), 2)
        joint = [np.concatenate([prompts[:N_PROMPT], *(step[:1] for step in steps)])]
        joint.append(np.concatenate([prompts[N_PROMPT:], *(step[1:] for step in steps)]))
        pairs = [(whole, joint[0]), (other, joint[1]), *((whole[N_PROMPT:], copy) for copy in copies)]
        return max(self.distance(a, b) for a, b in pairs)


def bases(model: virtual.Model, folder: Path, bits: int) -> Any:
    """Bases of full rank for every layer that an observer reports; of any shape if it reports none.

    For latent attention, where all layers of a model are equal, they have two blocks.
    """
    d_k, d_v = (int(model.keys.get(f"attention.{name}", 0)) for name in ("key_length", "kv_lora_rank"))
    if "attention.key_length_mla" in model.keys and d_k >= d_v:
        n = model.keys["block_count"]
        blocks = [(d_v, bits), (d_k - d_v, bits)][: 1 + (d_k > d_v)]
        layers = engine.latent_layers(blocks, d_k, d_v, n)
        handle = engine.load_latent(folder / f"{bits}.gguf", layers, arch=model.arch, block_count=n)
        assert handle, engine.last_error()
        return handle
    try:
        shapes = shape_of(model)
    except Refused:
        shapes = []
    if not shapes and C.llama_model_has_encoder(model.handle):  # the observer does not see its decoder
        shapes = [(il, model.keys["attention.head_count_kv"], 32, 32) for il in range(model.keys["block_count"])]
    shapes = shapes or [(0, 2, 32, 32)]
    d_k, d_v = shapes[0][2:]
    return engine.signed_permutations(
        shapes,
        [(d_k, bits)],
        [(d_v, bits)],
        arch=model.arch,
        block_count=model.keys["block_count"],
        path=folder / f"{bits}.gguf",
    )


def _without_cache(model: virtual.Model) -> str:
    if C.llama_model_is_recurrent(model.handle):
        return "recurrent: no K/V cache"
    return "diffusion: no K/V cache" if C.llama_model_is_diffusion(model.handle) else "encoder: no K/V cache"


def examine(arch: str, folder: Path) -> Support:
    """Check all guarantees of an architecture; `folder`: for layouts."""
    if arch in NOT_BUILT:
        return Support("not built", NOT_BUILT[arch])
    with virtual.model(arch) as model:
        exact, coarse = (bases(model, folder, bits) for bits in (16, 3))
        try:
            with session(model, exact, threads=1) as s:
                if SUBKV.subkv_context_fingerprint(s.ctx) is None:
                    return Support("no cache", _without_cache(model))
                n_layer_coded = s.stats().n_layer_coded
            trial = Trial(model)
            floor = trial.floor()
            return Support(
                "supported",
                n_layer=model.keys["block_count"],
                n_layer_coded=n_layer_coded,
                floor=floor,
                reach=trial.reach(),
                coarse=trial.coarse(coarse),
                distances=trial.guarantees(exact, floor),
            )
        except Refused as refused:
            return Support("refused", str(refused))
        finally:
            SUBKV.subkv_attach(None, None)
            for layout in (exact, coarse):
                SUBKV.subkv_layout_free(layout)
