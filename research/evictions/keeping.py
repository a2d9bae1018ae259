"""Policies by name, attention over what they keep, and their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from research.evictions import h2o, quest, snapkv, streaming
from research.evictions.policy import Policy, Request
from research.float32.reference import Coder, Reference, attend
from subkv.base.errors import SubkvError
from subkv.format.arrays import F32

# policy, bits per K/V element of what it stores of the whole text, and per kept token and KV head
POLICIES: dict[str, tuple[Policy, float, float]] = {
    "streaming": (streaming.keep, 0.0, 0.0),
    "h2o": (h2o.keep, 0.0, 32.0),
    "snapkv": (snapkv.keep, 0.0, 0.0),
    "quest": (quest.keep, quest.BITS, 0.0),
}
LEAST = 256  # tokens: every policy has more room than its fixed parts take
PIECE = 256  # queries per piece: bounds the score matrix


@dataclass(frozen=True)
class Spec:
    """text: as given. share: of the tokens, kept or (quest) read. kv_bits: budget of our cells; None: kept in f16."""

    text: str
    name: str
    share: float
    kv_bits: float | None


def parse(text: str) -> Spec:
    """name:percent or name:percent@bits. Raises SubkvError about `evictions`."""
    name, _, rest = text.partition(":")
    percent, at, bits = rest.partition("@")
    try:
        share, kv_bits = float(percent) / 100.0, float(bits) if at else None
    except ValueError:
        share = 0.0
    if name not in POLICIES or not 0.0 < share <= 1.0:
        raise SubkvError(
            "evictions",
            f"expected policies out of {', '.join(POLICIES)} with the percentage of tokens that they keep, and the "
            f"budget of our cells if these hold them (h2o:25, h2o:50@5), found {text!r}",
        )
    return Spec(text, name, share, kv_bits)


def budget(spec: Spec, n_ctx: int) -> int:
    """Tokens that are kept of a chunk. Raises SubkvError where they are too few."""
    tokens = int(spec.share * n_ctx)
    if tokens < LEAST:
        raise SubkvError("evictions", f"expected at least {LEAST} kept tokens, found {tokens} of {n_ctx} ({spec.text})")
    return tokens


def bits(spec: Spec, rows: float, rest: float, d: int) -> float:
    """Stored bits per K/V element: rows of kept tokens, `rest` of the cells (window, bases), what the policy stores."""
    _, stored, of_token = POLICIES[spec.name]
    share = 1.0 if stored else spec.share  # quest keeps everything
    return share * (rows + of_token / (2 * d)) + rest + stored


def logits(
    reference: Reference, tokens: Sequence[int], first: int, spec: Spec, coder: Coder | None, n_sink: int, n_recent: int
) -> F32:
    """Reference.coded_logits() with a policy that rules from `first` on. coder None: kept cells are exact."""
    import torch

    order, back = reference.key_order, np.argsort(reference.key_order)
    keep, kept_tokens = POLICIES[spec.name][0], budget(spec, len(tokens))

    def hook(il: int, q: Any, k: Any, v: Any, scale: float) -> Any:
        n, group = q.shape[2], q.shape[1] // k.shape[1]
        kept = torch.from_numpy(keep(Request(q[0].numpy(), k[0].numpy(), first, kept_tokens, scale)).copy())
        coded = None
        if coder is not None:
            k_coded, v_coded = coder(il, k[0].numpy()[:, :, order], v[0].numpy())
            coded = torch.from_numpy(k_coded[:, :, back])[None], torch.from_numpy(v_coded)[None]
        read = None if coded is None else (coded[0][:, :, :first], coded[1][:, :, :first])
        prompt = attend(q[:, :, :first], k[:, :, :first], v[:, :, :first], read, scale, n_sink, n_recent)
        k_all, v_all = k[0].repeat_interleave(group, 0), v[0].repeat_interleave(group, 0)
        pieces = [prompt]
        for low in range(first, n, PIECE):
            high = min(low + PIECE, n)
            rows = q[0, :, low:high] * scale
            scores = rows @ k_all.transpose(1, 2)
            if coded is not None:
                query, key = torch.arange(low, high)[:, None], torch.arange(n)[None]
                exact = (key < n_sink) | (key > query - n_recent)
                k_each, v_each = (x[0].repeat_interleave(group, 0) for x in coded)
                scores = torch.where(exact, scores, rows @ k_each.transpose(1, 2))
            scores = scores.masked_fill(~kept[:, low - first : high - first], -torch.inf)
            weights = torch.softmax(scores, -1)
            if coded is None:
                out = weights @ v_all
            else:
                out = (weights * exact) @ v_all + (weights * ~exact) @ v_each
            pieces.append(out.transpose(0, 1)[None])
        return torch.cat(pieces, 1)

    with reference.hooked(hook):
        return reference.logits(tokens, first)
