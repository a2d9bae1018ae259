"""Tests of faults and limits of llama.cpp itself, which patches/upstream mend: skipped if the build left them out."""

from __future__ import annotations

import pytest

from subkv.native import library


@pytest.fixture(scope="session", autouse=True)
def fixes() -> None:
    """The library has a sentence of these patches."""
    libllama = next(library.lib_dir().glob(f"*llama{library.SUFFIX}"))
    if b"the grammar is too ambiguous or too large" not in libllama.read_bytes():
        pytest.skip("patches/upstream: left out of this build (SUBKV_UPSTREAM_FIXES=OFF)")
