"""Drafts of a model's own layers (MTP) on a coded cache: the same answers and drafts as with f16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import derived_numpy
import pytest
import virtual
from families import NEXTN
from servers import CODED

from subkv.native.bases import sidecar_path
from subkv.plan.pipeline import Options

KINDS = {  # whether the drafting layer's rows are coded, too
    "hy_v3": True,  # plain attention
    "qwen35": True,  # with recurrent layers, whose state is rolled back after a rejected draft
    "deepseek2": False,  # latent attention
    "deepseek32": False,  # over selected cells
}
PROMPT = [40 + 7 * i % 90 for i in range(60)]


@pytest.mark.parametrize("arch", KINDS)
def test_drafts_as_with_f16(arch: str, serve: Callable[..., Any], tmp_path: Path) -> None:
    model = virtual.write(tmp_path / "model.gguf", arch, context_length=8192, drafting=True, **NEXTN)
    derived_numpy.sidecar(model, sidecar_path(model), Options(kv_bits=12.0))
    answers = []
    for coded in (False, True):
        with serve("-np", 1, "-c", 512, "--spec-type", "draft-mtp", coded=coded, model=model) as server:
            answers.append([server.complete(PROMPT[:n], 48) for n in (60, 30)])
            assert server.log.count(CODED) == (1 + KINDS[arch] if coded else 0), server.log[-3000:]
    for f16, ours in zip(*answers, strict=True):
        assert f16["tokens"][:16] == ours["tokens"][:16]  # later two tokens may be about as probable
        assert f16["timings"]["draft_n"] > 30
        if f16["tokens"] == ours["tokens"]:
            accepted, ours_accepted = (answer["timings"]["draft_n_accepted"] for answer in (f16, ours))
            assert abs(accepted - ours_accepted) <= 1
