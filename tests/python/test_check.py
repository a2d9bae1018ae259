"""runtime.check: its block, resumed and interrupted runs, damaged results, models that it leaves out or refuses."""

from __future__ import annotations

import copy
import errno
import functools
import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from click.testing import CliRunner, Result
from each import each

from converter import held_out, scoring
from runtime import bench, check
from runtime.busy import Busy
from runtime.doctor import report
from subkv.base import files
from subkv.engine.cache import parse_cache
from subkv.engine.context import ContextOptions
from subkv.engine.model import Model
from subkv.engine.stats import KVStats

Models = Callable[..., Path]
TEXTS = ["chat", "chinese", "code"]  # of all


def run(model: Path, *arguments: Any) -> Result:
    """One text."""
    return CliRunner().invoke(check.main, ["-m", str(model), "-c", "512", "-t", "1", "--minutes", "0", *arguments])


def rows(result: Result) -> dict[str, list[str]]:
    """The cells of the block's table by cache."""
    assert result.exit_code == 0, result.output
    lines = [line.split("|")[1:-1] for line in result.stdout.splitlines() if line.startswith("|")]
    return {cells[0].strip(): [cell.strip() for cell in cells] for cells in lines[2:]}


def texts(result: Result) -> list[str]:
    found = re.search(r"^- texts: ([\w, ]+);", result.stdout, re.M)
    assert found is not None, result.output
    return found[1].split(", ")


facts = functools.cache(report.report)  # starts a process


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle machine, few repetitions and texts."""
    some = [text for text in held_out.read() if text.source.name in TEXTS]
    monkeypatch.setattr(held_out, "read", lambda: some)
    monkeypatch.setattr(report, "report", lambda: copy.deepcopy(facts()))
    monkeypatch.setattr(Busy, "others", lambda self: 0.0)
    monkeypatch.setattr(check, "REPETITIONS", 1)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often speeds were measured and texts scored."""
    counts = {"measure": 0, "evaluate": 0}

    def count(module: Any, name: str) -> None:
        function = getattr(module, name)

        def spy(*arguments: Any) -> Any:
            counts[name] += 1
            return function(*arguments)

        monkeypatch.setattr(module, name, spy)

    count(bench, "measure")
    count(scoring, "evaluate")
    return counts


def test_the_block(tiny_model: Models, counted: dict[str, int]) -> None:
    model = tiny_model("llama")
    first = run(model)
    table = rows(first)
    ours = [name for name in table if name.startswith("subkv")]
    assert list(table) == ["f16", "q8_0", "q4_0", *ours, check.FLOOR]
    assert ours == ["subkv, 6.5 bits, the default", "subkv, 4.25 bits"]
    bits = {name: float(cells[1]) for name, cells in table.items()}
    assert (bits["f16"], bits["q8_0"], bits["q4_0"]) == (16.0, 8.5, 4.5) and bits[ours[0]] > bits[ours[1]]
    assert table["q8_0"][3:5] == ["1.88", "1.00"]
    with Model(model) as opened, opened.context(parse_cache("subkv", model), ContextOptions(512)) as context:
        assert table[ours[0]][1] == f"{context.stats.bpe:.2f}", "of one sequence, as programs have it"
    klds = {name: float(cells[6].split()[0]) for name, cells in table.items() if cells[6]}
    assert klds[check.FLOOR] < klds["q8_0"] < klds["q4_0"] and klds[ours[0]] < klds[ours[1]]
    assert re.search(r"KLD of \d+ tokens .* tokens/s at 128 \| tokens/s at 508 \|", first.stdout)
    assert table["f16"][-1].endswith("(1.00 × f16)") and table[check.FLOOR][-1] == ""
    assert "- model: tiny-llama-0; " in first.stdout and "- bases: from the weights; " in first.stdout
    for private in (str(model.parent), model.name, str(Path.home()), ".gguf"):
        assert private not in first.stdout
    assert texts(first) == TEXTS[:1] and "the same command measures the others" in first.stderr
    again = run(model)
    assert counted == {"measure": 1, "evaluate": 2} and texts(again) == TEXTS[:2]
    assert rows(again)["q8_0"][-2:] == table["q8_0"][-2:], "speeds are those of the first run"
    whole = run(model, "--minutes", "9")
    assert texts(run(model)) == texts(whole) == TEXTS and counted == {"measure": 1, "evaluate": 3}


def test_an_interrupted_check_resumes(
    tiny_model: Models, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate, calls = scoring.evaluate, itertools.count(1)

    def interrupted(*arguments: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return evaluate(*arguments)

    monkeypatch.setattr(scoring, "evaluate", interrupted)
    stopped = run(tiny_model("llama"), "--minutes", "9")
    assert (stopped.exit_code, stopped.stdout) == (130, "")
    assert stopped.stderr.splitlines()[-1] == "interrupted: finished texts are saved; the same command resumes"
    resumed = run(tiny_model("llama"))
    assert texts(resumed) == TEXTS[:2] and counted == {"measure": 1, "evaluate": 2}


def test_damaged_results_are_not_used(tiny_model: Models, cache_home: Path, counted: dict[str, int]) -> None:
    model, other = tiny_model("llama"), tiny_model("llama", seed=1)
    for path in (model, other):
        assert run(path).exit_code == 0
    files = sorted((cache_home / "subkv").glob("check-*.json"))
    assert len(files) == 2
    whole = [file.read_bytes() for file in files]
    forged = json.loads(whole[0].split(b"\n", 1)[1])
    forged["texts"]["chinese"] = forged["texts"]["chat"]
    bad = [b"", whole[0][:-9], whole[1], b"\0" * 99, whole[0].split(b"\n")[0] + b"\n" + json.dumps(forged).encode()]
    for content in bad:
        for file in files:
            file.write_bytes(content if content != whole[1] else whole[file == files[0]])
        result = run(model)
        assert texts(result) == TEXTS[:1], content[:99]
        assert "is damaged or of another model or version; starting over" in result.stderr
    for file in files:
        file.unlink()
    assert "starting over" not in run(model).stderr and counted["measure"] == 2 + len(bad) + 1


def test_speeds_beside_other_work_are_measured_again(
    tiny_model: Models, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Busy, "others", lambda self: 1.25)
    busy = run(tiny_model("llama"))
    assert "- busy with other work: 1.2 cores; the speeds are too low: measure again when idle" in busy.stdout
    monkeypatch.setattr(Busy, "others", lambda self: 0.0)
    assert "- busy with other work: 0.0 cores\n" in run(tiny_model("llama")).stdout
    run(tiny_model("llama"))
    assert counted["measure"] == 2


def test_without_a_model_it_is_the_demo(tiny_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check.demo, "converted", lambda: tiny_model("llama"))
    result = CliRunner().invoke(check.main, ["-c", "512", "-t", "1", "--minutes", "0"])
    assert "- model: tiny-llama-0; " in result.stdout


def test_variables_that_change_the_cache_are_told(tiny_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBKV_BITS", "4.25")
    monkeypatch.setenv("SUBKV_RECENT", "64")
    result = run(tiny_model("llama"))
    assert [name for name in rows(result) if name.startswith("subkv")] == ["subkv, 4.25 bits"]
    assert "\n- SUBKV_RECENT: 64\n" in result.stdout and "\n- SUBKV_BITS: 4.25\n" in result.stdout


@each("arch", ["lfm2", "gemma2"])
def test_cells_that_cannot_be_copied(tiny_model: Models, arch: str) -> None:
    assert check.FLOOR in rows(run(tiny_model(arch)))


def test_adaptive_bases(coded_model: Models) -> None:
    result = run(coded_model("--adapt", "v", "--kv-bits", "6.1"))
    assert "subkv, 6.1 bits, the default" in rows(result) and "of other texts" in result.stdout
    assert "topics.txt" not in result.stdout  # the text of the calibration


def test_caches_that_do_not_fit_are_left_out(tiny_model: Models, coded_model: Models) -> None:
    latent = run(tiny_model("deepseek2"))
    assert list(rows(latent))[0] == "f16" and not {"q8_0", "q4_0"} & set(rows(latent))
    assert re.search(r"^q8_0: left out, K cache type q8_0 ", latent.stderr, re.M)
    one = run(coded_model())
    assert [name for name in rows(one) if name.startswith("subkv")] and "4.25 bits" not in one.stdout
    assert re.search(r"^4.25 bits: left out, expected .*4.25", one.stderr, re.M)


@each(
    ("model", "arguments", "message"),
    [
        ("mamba", [], "-m: model mamba: subkv cannot hold its K/V cache because "),
        ("bert", [], "-m: expected a model trained on at least 512 tokens, found 256: the exact window holds"),
        ("llama", ["-c", "100"], "-c: expected at least 512 tokens, found 100"),
        ("llama", ["--bases", "missing.gguf"], "--bases: expected a GGUF file, found no file"),
        ("none", [], "-m: expected a GGUF file, found no file"),
    ],
)
def test_refusals(tiny_model: Models, tmp_path: Path, model: str, arguments: list[str], message: str) -> None:
    path = tmp_path / "none.gguf" if model == "none" else tiny_model(model)
    result = run(path, *arguments)
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    assert result.stderr.splitlines()[-1].startswith(message)


def test_results_without_a_cache_folder(
    tiny_model: Models, cache_home: Path, monkeypatch: pytest.MonkeyPatch, counted: dict[str, int]
) -> None:
    """They are printed, and measured again the next time."""
    cache_home.mkdir(parents=True, exist_ok=True)
    (cache_home / "subkv").write_text("")
    result = run(tiny_model("llama"))
    assert (
        "f16" in rows(result)
        and "XDG_CACHE_HOME: results are not stored for another run: cannot create " in result.stderr
    )
    (cache_home / "subkv").unlink()

    def full(_: Path) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "replacing", full)
    result = run(tiny_model("llama"), "--minutes", "9")
    assert len(texts(result)) == len(TEXTS)
    assert result.stderr.count("results are not stored for another run: cannot write ") == 1


def test_a_name_cannot_leave_its_line() -> None:
    sizes = {"f16": KVStats("f16", "f16", 8, 100, 100, 10, 16.0, "ref")}
    saved = {
        "n_ctx": 512,
        "texts": {"chat": {check.FLOOR: [2, 0.5, 0.1, 0.5]}},
        "speed": {"others": None, "depths": [1, 2], "caches": {"f16": [2.0, 1.0]}},
    }
    facts = {
        "processor": {"name": "A", "cores": 1, "features": None},
        "versions": {"subkv": "1", "commit": None},
        "threads": 1,
        "date": "2026-01-01",
    }
    text = check.block(saved, {}, sizes, {"model": "a\n# b | `c` <img> \x1b[31m"}, facts)
    assert text.splitlines()[0].startswith("- model: a\\n# b  c img ") and "\x1b" not in text


def test_work_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    stat = tmp_path / "stat"
    stat.write_text("cpu 100 0 0 500 0 0 0 0 0 0\n")
    busy = Busy(stat)
    busy._start = (busy._start[0] - 1000.0, busy._start[1])
    stat.write_text("cpu 200100 0 0 500 0 0 0 0 0 0\n")  # 2,000 seconds more
    assert busy.others() == pytest.approx(2.0, abs=0.05)
    assert Busy(tmp_path / "none").others() is None
