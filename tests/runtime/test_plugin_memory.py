"""The plug-in's memory where the process or the system limits it: locked pages, limits of the address space."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from compiled import preloaded
from each import each
from test_plugin import MORE, TEXT, bases, decode, model, pytestmark, run, tokens, write_bases

__all__ = ["bases", "model", "pytestmark"]

LOCKS = """
#include <sys/mman.h>
__attribute__((constructor)) static void lock() { (void) mlockall(MCL_CURRENT | MCL_FUTURE); }
"""


def test_locked_memory(tmp_path: Path, model: Path, bases: Path) -> None:
    """As of a service that locks its memory: f16's address space takes none, and cleared rows are zeros."""
    (tmp_path / "locks.cpp").write_text(LOCKS)
    locks = preloaded(tmp_path / "locks.cpp", tmp_path)
    calls = [decode(TEXT), ["clear"], decode(TEXT), decode(MORE)]
    expected = run(tmp_path, model, bases, *calls, n_ctx=65536)
    coded, f16 = (run(tmp_path, model, subkv, *calls, n_ctx=65536, preload=locks) for subkv in (bases, "off"))
    if f16.facts["rss"] < expected.facts["rss"]:
        pytest.skip("mlockall: not permitted")
    assert "coded K/V cache" in coded.said
    assert coded.facts["rss"] < f16.facts["rss"] - (8 << 20)
    for one, other in zip(expected.logits, coded.logits, strict=True):
        assert np.array_equal(one, other)
    assert np.array_equal(coded.logits[0], coded.logits[1])


@each("n", [1, 4, 9])
def test_a_shift_without_memory(n: int, tmp_path: Path, model: Path, bases: Path) -> None:
    """The decode fails; the next one rotates the rest of the keys, and computes as without the failure."""
    failing = preloaded(Path(__file__).with_name("failing_new.cpp"), tmp_path)
    moved = [decode(TEXT), ["rm", 0, 4, 24], ["add", 0, 24, 90, -20]]
    batch = decode(tokens(8, 3, 70))
    options = {"n_threads": 2, "n_threads_batch": 2, "preload": failing}
    expected = run(tmp_path, model, bases, *moved, batch, **options)
    found = run(tmp_path, model, bases, *moved, ["lack", n], ["try", batch[1]], ["lack", 0], batch, **options)
    assert found.facts["tried"] != 0 and not found.facts["failed"]
    assert np.array_equal(expected.logits[-1], found.logits[-1])


@pytest.mark.parametrize("subkv", ["file", "auto"])
def test_a_limit_is_checked_before_the_context_exists(subkv: str, tmp_path: Path, model: Path, bases: Path) -> None:
    """Codes of 4 million tokens need 1.2 GiB beside f16's 2 GiB of address space."""
    setting = bases if subkv == "file" else "auto"
    if subkv == "auto":
        from subkv.format import store
        from subkv.native.bases import STORED, stored_path

        store.entry(model).prepare()
        write_bases(stored_path(model, store.entry(model).content, STORED), model)
    found = run(tmp_path, model, setting, decode(TEXT), n_ctx=1 << 22, limit=3000 << 10)
    assert not found.facts["context"]
    assert "MiB of memory available, found 4194304 tokens with subkv: cells " in found.log
    assert " tokens would fit" in found.log
