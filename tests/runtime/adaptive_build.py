"""Tests of adaptive bases are skipped in a build without them."""

from __future__ import annotations

import pytest

from subkv.format.adapt import has_adaptive_bases

REASON = "adaptive bases: not built (-DSUBKV_ADAPT=OFF)"
adaptive_only = pytest.mark.skipif(not has_adaptive_bases(), reason=REASON)


def skip_without() -> None:
    """Skip the running test in such a build."""
    if not has_adaptive_bases():
        pytest.skip(REASON)
