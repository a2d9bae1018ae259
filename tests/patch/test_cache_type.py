"""`-ctk subkv` of llama.cpp's programs without any preparation, and the memory that they report."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from test_upstream_programs import environment, program

from subkv.engine.cache import choose_cache
from subkv.engine.request import CacheRequest


def complete(model: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [program("llama-completion"), "-m", model, "-p", "Hi", "-n", "2", "-c", "1024", "-t", "1", "-no-cnv"]
    return subprocess.run(
        [*map(str, command), "--no-warmup", "-lv", "4", *arguments],
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_bases_are_derived(demo_model: Path) -> None:
    """A program of llama.cpp alone needs no Python, no home folder and no file."""
    for name in ("subkv", "auto"):
        done = complete(demo_model, "-ctk", name, HOME="", XDG_CACHE_HOME="")
        assert done.returncode == 0, done.stderr
        assert re.search(r"subkv: coded K/V cache, .*; bases: from the weights, 6\.50 bits per element", done.stderr)


def test_off_contradicts_it(demo_model: Path) -> None:
    done = complete(demo_model, "-ctk", "subkv", SUBKV="off")
    assert done.returncode != 0
    assert "cache type subkv: SUBKV=auto, a file, or no SUBKV expected, SUBKV=off found" in done.stderr


def test_help_lists_it() -> None:
    done = subprocess.run([program("llama-completion"), "--help"], capture_output=True, text=True, check=True)
    assert re.search(r"allowed values: subkv, subkv:BITS, auto, f32, f16,", done.stdout)


def test_bits(demo_model: Path) -> None:
    """`subkv:BITS` and SUBKV_BITS choose a plan of the model's bases."""
    lines = []
    for name, variables in (
        ("subkv:4.25", {}),
        ("subkv", {"SUBKV_BITS": "4.25"}),
        ("subkv:5.2", {"SUBKV_BITS": "4.25"}),
    ):
        done = complete(demo_model, "-ctk", name, **variables)
        assert done.returncode == 0, done.stderr
        lines.append(re.findall(r"subkv: (coded K/V cache, .*)", done.stderr)[-1])
    assert lines[0] == lines[1] and "from the weights, 4.25 bits per element at " in lines[0]
    assert "from the weights, 5.20 bits per element at " in lines[2] and "q8_0's quality" not in lines[0]
    for arguments, variables, sentence in (
        (
            ["-ctk", "subkv:3.1"],
            {},
            r"bits per element: expected 3\.442 to 16\.441 for bases from the weights of this model",
        ),
        (
            ["-ctk", "subkv"],
            {"SUBKV_BITS": "few"},
            "SUBKV_BITS: expected bits per element, .*, found 'few'",
        ),
        (["-ctk", "subkv:few"], {}, "Unsupported cache type: subkv:few"),
        (["-ctk", "subkv:4.25", "-ctv", "subkv:5.2"], {}, "one number of bits per element, found 4.25 and 5.2"),
    ):
        done = complete(demo_model, *arguments, **variables)
        assert done.returncode != 0 and re.search(sentence, done.stderr), done.stderr


def test_the_dry_run_and_the_context_report_the_same_memory(demo_model: Path) -> None:
    """llama.cpp fits models to memory by a dry run. Both count cells and the exact window; the line has bases, too."""
    ordinary, coded = (complete(demo_model, "-ctk", name) for name in ("f16", "subkv"))
    for done in (ordinary, coded):
        assert done.returncode == 0, done.stderr
    tables = [re.findall(r"- Host .*= +\d+ \+ +(\d+) \+ +\d+", done.stderr) for done in (ordinary, coded)]
    assert [len(set(found)) for found in tables] == [1, 1]
    assert min(map(len, tables)) >= 2  # the dry run's and the context's
    (line,) = re.findall(r"subkv: coded K/V cache, .*", coded.stderr)
    mib, f16 = map(float, re.findall(r"([\d.]+) MiB \(f16: ([\d.]+)\)", line)[0])
    assert abs(int(tables[0][0]) - f16) <= 1
    bases = choose_cache(demo_model, CacheRequest("subkv")).description["bytes_bases"] / (1 << 20)
    assert abs(int(tables[1][0]) + bases - mib) <= 1
    assert mib < 0.55 * f16
    assert "ordinary" not in coded.stderr.split("subkv: ")[1].split("\n")[0]
    assert "subkv:" not in ordinary.stderr
