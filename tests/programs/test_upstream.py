"""Upstream's own tests of llama-server: all that pass on an f16 cache pass on coefficients.

A few files run always, all of them with SUBKV_UPSTREAM=1 (research/notes/upstream-tests.md).
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import pytest
import upstream
import upstream_source
from program_paths import program

from subkv.native.library import lib_dir

SHORT = ["test_slot_save.py", "test_ctx_shift.py", "test_kv_keep_only_active.py"]

# They count tokens of an edited prompt: with 16 exact tokens it is evaluated from a checkpoint, or from its beginning.
EDITS = {
    "unit/test_chat_completion.py::test_chat_completion_cached_tokens",
    "unit/test_slot_save.py::test_slot_save_restore",
    "unit/test_slot_save.py::test_slot_restore_legacy_token_list",
}


def check(f16: upstream.Results, coded: upstream.Results, but: Collection[str] = ()) -> None:
    """Every test that passes on f16 passes on coefficients, with a coded cache in use; nothing aborts on either."""
    assert sum(entry["caches"][0] for entry in f16.values()) == 0
    assert sum(entry["caches"][0] for entry in coded.values()) > len(coded) / 2
    assert {name: coded[name]["why"] for name in upstream.lost(f16, coded) if name not in but} == {}
    assert [name for name, entry in coded.items() if entry["aborts"]] == []
    print(dict(upstream.counts(f16)), dict(upstream.counts(coded)))


@pytest.mark.parametrize("stock", [False, True])
def test_a_few_of_upstreams_tests(stock: bool, words: Path, tmp_path: Path) -> None:
    """stock: the unpatched server, with the plug-in and the default window."""
    server = lib_dir() / "stock" / "llama-server" if stock else program("llama-server")
    if not server.is_file():
        pytest.skip("unpatched programs: not built (SUBKV_STOCK, SUBKV_PROGRAMS)")
    more = upstream.plugin_door() if stock else {"SUBKV_RECENT": "16"}
    with upstream.Upstream.prepared(server, words, tmp_path) as suite:
        tests = [f"unit/{name}" for name in SHORT]
        f16 = suite.run("f16", "off", tests)
        check(f16, suite.run("coded", "auto", tests, "f16", **more), but=() if stock else EDITS)
        # a busy machine exceeds some of their deadlines
        assert sum(entry["outcome"] == "passed" for entry in f16.values()) > 12


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("SUBKV_UPSTREAM"), reason="upstream's tests: ten minutes, set SUBKV_UPSTREAM=1")
def test_all_of_upstreams_tests(words: Path, tmp_path: Path) -> None:
    with upstream.Upstream.prepared(program("llama-server"), words, tmp_path) as suite:
        f16 = suite.run("f16", "off", ["unit"])
        check(f16, suite.run("coded", "auto", ["unit"], "f16"))
        # their contexts are short: most of each would be exact
        check(f16, suite.run("deep", "auto", ["unit"], "f16", SUBKV_RECENT="16"), but=EDITS)
        assert sum(entry["outcome"] == "passed" for entry in f16.values()) > 350


def test_only_values_of_a_model_are_relaxed() -> None:
    text = (
        "def test_it(n, words):\n"
        "    assert res.body['n'] == n, 'é'\n"
        "    assert res.status_code == 200\n"
        "    assert res.body['flag'] == True\n"
        "    assert a.body['text'] == b.body['text']\n"
        "    assert len(x) == 3 and y\n"
        "    seq = [(1, 2)]\n"
        "    for a, b in seq:\n"
        "        assert (res['a'] ==\n"
        "                '<s>' + b)\n"
        "    assert n == 4\n"
        "    assert res.body['k'] > n\n"
    )
    lines = upstream_source.relaxed(text).splitlines()
    assert lines[1] == "    assert expects((res.body['n']), (n)), 'é'"
    assert lines[8] == "        assert (expects((res['a']), ('<s>' + b)))"
    original = text.splitlines()
    assert lines[2:8] == original[2:8] and lines[-2:] == original[-2:]
