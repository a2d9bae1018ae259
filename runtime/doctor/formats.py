"""Which versions of every kind of file this version reads and writes; docs/format.md has the same table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """reads: versions, ascending; the last is written. otherwise: what becomes of a file of another version."""

    files: str
    versions: tuple[int, ...]
    otherwise: str


# Literals, as this must be readable where the libraries do not load; tests hold them to the readers' own constants.
FORMATS = {
    "model": Format("converted models, sidecars", (4,), "refused: convert again"),
    "calibration": Format("calib.safetensors", (1,), "refused: calibrate again; made again in the cache folder"),
    "measurements": Format("interrupted sensitivities of convert", (1,), "measured again"),
    "state": Format("states of a coded cache, slots' files", (6,), "refused: evaluate the prompt again"),
    "container": Format("files of the next two", (1,), "refused: evaluate the prompt again"),
    "chat": Format("/save of chat", (3,), "refused: start a new conversation"),
    "prompt cache": Format("entries of PromptCache", (1,), "never found: evaluated again"),
    "store": Format("prompts of SUBKV_STORE", (1,), "never found: evaluated again"),
    "warm start": Format("warm.safetensors", (1,), "refused: train again"),
    "warm library": Format("summaries of the warm start", (2,), "never found: made again"),
}
