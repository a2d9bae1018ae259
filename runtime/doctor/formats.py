"""The versions of each file format that this version reads and writes (same table in docs/format.md)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """versions: ascending, the last one is written. otherwise: the effect on files of other versions."""

    files: str
    versions: tuple[int, ...]
    otherwise: str


# Literals, because the libraries may not load; tests compare them with the readers' constants.
FORMATS = {
    "model": Format("converted models, sidecars", (4, 5), "refused: convert again"),
    "calibration": Format("calib.safetensors", (1,), "refused: calibrate again; made again in the cache folder"),
    "measurements": Format("interrupted sensitivities of convert", (1,), "measured again"),
    "state": Format("states of a coded cache, slots' files", (6,), "refused: evaluate the prompt again"),
    "container": Format("files of the next one", (1,), "refused: evaluate the prompt again"),
    "chat": Format("/save of chat", (4,), "refused: start a new conversation"),
    "store": Format("prompts of SUBKV_STORE and PromptCache", (1, 2), "never found: evaluated again"),
    "warm start": Format("warm.safetensors", (1,), "refused: train again"),
    "warm library": Format("summaries of the warm start", (2,), "never found: made again"),
}
