"""What a user sets about the server's requests."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Limits:
    """n_predict: tokens per answer, negative: the context. n_queue: requests that wait. Bytes and seconds."""

    n_predict: int = -1
    n_queue: int = 256
    max_body: int = 8 * 1024 * 1024
    timeout: float = 600.0
