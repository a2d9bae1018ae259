"""After close(), every public method and property of a public class raises one sentence; nothing crashes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from opening import opened

from subkv.base.errors import CacheError, ClosedError
from subkv.engine.llama import Llama

# attributes of the object, or of its class, that need nothing that was freed
PLAIN = {("CheckedDrafts", name) for name in ("num_pred_tokens", "evaluated", "count")}


@pytest.mark.parametrize("where", ["here", "thread", "fork"])
def test_every_method_and_property(where: str, coded_model: Callable[..., Path], tmp_path: Path) -> None:
    if where == "fork" and not hasattr(os, "fork"):
        pytest.skip("needs fork")
    model = coded_model()
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("closing.py")), str(model), str(model), where],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (done.stdout.splitlines()[-1:], done.stderr[-2000:])
    (closable, *lines) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    lines = [line for line in lines if "class" in line]
    counts = Counter(line["class"] for line in lines)
    assert {*closable["closable"]} <= counts.keys(), "a class without a case in closing.py"
    assert counts["Llama"] > 60 and counts["Model"] > 15 and counts["Gguf"] > 8
    for line in lines:
        if (line["class"], line["name"]) not in PLAIN:
            assert "closed" in line["error"] and "expected a" in line["error"], line
            assert "\n" not in line["error"]


def test_a_closed_llama_keeps_what_it_was_given(coded_model: Callable[..., Path]) -> None:
    with opened(coded_model()) as llm:
        stream = llm.create_completion("once", max_tokens=50, stream=True)
        next(iter(stream))
    assert isinstance(llm, Llama) and llm.n_tokens > 0 and llm.model_path
    assert not hasattr(llm, "no_such_method")
    for use in (lambda: llm.kv_stats(), lambda: list(stream)):
        with pytest.raises(CacheError, match="^expected an open Llama, found one that was closed$"):
            use()
    with pytest.raises(ClosedError):
        llm.draft_model = None
    llm.close()
