"""Memory runs out while a context is created: an error is raised, and the process continues."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Prints, for every limit, the bytes allowed beyond those in use, and the result.
LIMITED = """
import resource, sys
from pathlib import Path
import subkv
path = sys.argv[1]
llm = subkv.Llama(path, kv_cache="subkv", n_ctx=256, n_threads=1, verbose=False)
expected = llm("a b c", max_tokens=4, temperature=0)["choices"][0]["text"]
def pages():
    return int(Path("/proc/self/statm").read_text().split()[0])
def make(n_ctx):
    try:
        subkv.Llama(path, kv_cache="subkv", n_ctx=n_ctx, n_threads=1, verbose=False).close()
        return "made"
    except subkv.SubkvError as error:
        return str(error)
for n_ctx in (512, 131072):
    sizes = []
    for printed in (False, False, False, True):
        for more in (32, 64, 128, 192, 194, 200, 224, 256, 320, 512, 1024):
            limit = pages() * resource.getpagesize() + (more << 20)
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
            said = make(n_ctx)
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            assert llm("a b c", max_tokens=4, temperature=0)["choices"][0]["text"] == expected
            if printed:
                print(n_ctx, more, said, sep="|")
        sizes.append(pages() * resource.getpagesize() >> 10)
    grown = [b - a for a, b in zip(sizes, sizes[1:])]  # a leak grows every time, an arena once
    assert min(grown) < 1 << 10, f"memory stays: KiB in four rounds {sizes}"
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_a_context_under_a_tight_limit(coded_model: Callable[..., Path]) -> None:
    """RLIMIT_AS; without the check llama.cpp would end the process."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(coded_model())],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [line.split("|") for line in done.stdout.splitlines()]
    assert len(found) == 22 and done.stderr == ""
    for n_ctx, more, outcome in found:
        assert outcome == "made" or outcome.startswith("n_ctx: expected "), (n_ctx, more, outcome)
        assert n_ctx in outcome or outcome == "made"
    made = [(n_ctx, int(more)) for n_ctx, more, outcome in found if outcome == "made"]
    assert ("512", 1024) in made and ("131072", 1024) in made and min(more for _, more in made) > 192
