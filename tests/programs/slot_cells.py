"""What a slot of llama-server claims (its tokens), what the cache holds, and what a fresh evaluation says.

A saved slot has both: its tokens, and the positions of its cells.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import forge
from servers import Server

Tokens = list[int]
TOP = 20


def saved(path: Path) -> tuple[Tokens, list[int]]:
    """The tokens of a saved slot, and the positions of its cells in ascending order."""
    data = path.read_bytes()
    _, _, n_packed = struct.unpack_from("<3I", data)
    packed = struct.unpack_from(f"<{n_packed}i", data, 12)
    n = packed[2]  # after a mark and a version; then the list of pictures, which is empty
    assert packed[0] == -1 and n_packed == n + 4 and packed[-1] == 0, packed[:3]
    state = data[12 + 4 * n_packed :]
    body = forge.body(state) if forge.MAGIC in state[:64] else state
    (n_stream,), at, positions = struct.unpack_from("<I", body), 4, []
    for _ in range(n_stream):  # those before the slot's have no cells of it
        (n_cells,), at = struct.unpack_from("<I", body, at), at + 4
        for _ in range(n_cells):
            pos, n_seq = struct.unpack_from("<iI", body, at)
            positions.append(pos)
            at += 8 + 4 * n_seq
        if n_cells:
            break
    return list(packed[3 : 3 + n]), sorted(positions)


def slots(server: Server, folder: Path, coded: bool = True) -> dict[int, Tokens]:
    """The tokens of every idle slot that has some; its cells are those of these tokens.

    f16: a slot that was restored from the file of an empty one keeps its old cells until its next request.
    """
    found = {}
    for slot in server.request("GET", "/slots"):
        at = slot["id"]
        server.request("POST", f"/slots/{at}?action=save", {"filename": "claimed.bin"})
        tokens, positions = saved(folder / "claimed.bin")
        if tokens or coded:
            assert positions == list(range(len(tokens))), (at, len(tokens), positions)
        if tokens:
            found[at] = tokens
    return found


def idle(server: Server) -> None:
    server.wait("idle slots", "/slots", lambda slots: not any(slot["is_processing"] for slot in slots))


def top(answer: Any, i: int = 0) -> dict[int, float]:
    return {top["id"]: top["logprob"] for top in answer["completion_probabilities"][i]["top_logprobs"]}


def apart(one: Any, other: Any) -> float:
    """The largest difference of log-probabilities that both answers' first tokens have."""
    a, b = top(one), top(other)
    return max(abs(a[token] - b[token]) for token in a.keys() & b.keys())


def divergence(one: Any, other: Any) -> float:
    """KLD of the first tokens of two answers; of the tokens that both have, as one token all others."""
    a, b = top(one), top(other)
    both = a.keys() & b.keys()
    p, q = ([math.exp(of[token]) for token in sorted(both)] for of in (a, b))
    p, q = ([*of, max(1 - sum(of), 1e-9)] for of in (p, q))
    return sum(x * math.log(x / y) for x, y in zip(p, q, strict=True))


def next_token(server: Server, tokens: Tokens, **more: Any) -> Any:
    return server.complete(tokens, 1, n_probs=TOP, n_cmpl=1, n_cache_reuse=0, **more)
