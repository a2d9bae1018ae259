"""Numbers in README.md and docs/ equal the results of docs/results/make.py; compared results are of one commit."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import derived_numpy
import pytest
from each import each

from subkv.engine import memory
from subkv.engine.cache import choose_cache
from subkv.engine.model import Model
from subkv.engine.request import CacheRequest
from subkv.native.binding import C

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "docs" / "results"))
render: Any = importlib.import_module("render")
make: Any = importlib.import_module("make")
size_tables: Any = importlib.import_module("size_tables")
TABLES: dict[str, Any] = importlib.import_module("tables").TABLES
RESULTS: dict[str, list[dict[str, Any]]] = make.results(REPO)
MARK = re.compile(r"<!-- (/?)(results|number)\b")


def measured(name: str) -> list[dict[str, Any]]:
    if name not in RESULTS:
        pytest.skip(f"results: {name} is not measured yet; python docs/results/make.py --only {name}")
    return RESULTS[name]


@each("name", TABLES)
def test_result_is_whole(name: str) -> None:
    for found in measured(name):
        assert set(found) | render.LATER == set(render.FIELDS) | render.LATER
        assert {key for key, kind in render.FIELDS.items() if not isinstance(found[key], kind)} == set()
        assert found["name"] == name and not found["quick"]
        assert re.fullmatch("[0-9a-f]{40}", found["commit"]) and not found["dirty"]
        later = {"features", "clock_ghz", "additions_per_cycle"}
        assert set(found["machine"]) - later == {"cpu", "cores", "kernel", "memory_gib", "read_bandwidth_gbs"}
        assert found["rows"] or found["skipped"]


@each("name", TABLES)
def test_page_is_the_result(name: str) -> None:
    found, table = measured(name), TABLES[name]
    folder = REPO / table.folder
    assert (folder / f"{name}.md").read_text(encoding="utf-8") == render.page(table, found)
    assert not table.picture or not found[0]["rows"] or (folder / table.picture).is_file()


def test_tables_of_a_group_are_of_one_commit() -> None:
    commits: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name, results in RESULTS.items():
        for found in results:
            group = TABLES[name].group, found["machine"]["kernel"] if TABLES[name].by_machine else ""
            commits.setdefault(group, {}).setdefault(found["commit"], []).append(name)
    assert all(len(by_commit) == 1 for by_commit in commits.values()), commits


def test_no_result_without_a_table() -> None:
    for folder in {table.folder for table in TABLES.values()}:
        names = {
            path.name.split(".")[0] for kind in ("json", "md", "png") for path in (REPO / folder).glob(f"*.{kind}")
        }
        known = [(table.name, table.picture[:-4]) for table in TABLES.values() if table.folder == folder]
        assert names <= {"models", "stranger", *itertools.chain(*known)}


def test_tables_of_the_second_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is prepared once, every table lists the commands; without the packages tables say so."""
    lab = make.Lab(tmp_path, tmp_path, tmp_path, None, quick=True)
    monkeypatch.setattr(make.importlib.util, "find_spec", lambda name: None)
    assert lab.of("demo") is lab
    result = make.measured(TABLES["memory_gemma"], lab, {})
    assert (result["rows"], result["skipped"]) == ([], ["the second model is not installed (pip install '.[gemma]')"])

    ran: list[tuple[str, ...]] = []

    def run(self: Any, *words: str, env: Any = None, shown: tuple[str, ...] = ()) -> Any:
        ran.append(self._record(shown or words, env))
        if words[0] == "subkv":
            folder = Path(env["XDG_CACHE_HOME"]) / "subkv" / "sidecars"
            folder.mkdir(parents=True)
            (folder / "x.calib.safetensors").write_text("calibration")
        return make.Done(f"{tmp_path / 'joined.gguf'}\n", "", 0.0)

    (tmp_path / "joined.gguf").write_text("model")
    monkeypatch.setattr(make.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(make.Lab, "run", run)
    commands = ["python models/gemma3.py", "XDG_CACHE_HOME=FOLDER/cache subkv convert M.gguf"]
    for name in ("memory_gemma", "tasks_gemma"):
        read = dataclasses.replace(
            TABLES[name], measure=lambda own: [{x: own.read(x) for x in ("M.gguf", "calib.safetensors")}]
        )
        result = make.measured(read, lab, {})
        assert result["rows"] == [{"M.gguf": "model", "calib.safetensors": "calibration"}]
        assert (ran, result["commands"]) == (commands, commands)
    assert {table.model for name, table in TABLES.items() if name.endswith("_gemma")} == {"gemma"}
    page = render.page(TABLES["memory_gemma"], [synthetic("memory_gemma", [])])
    assert "Gemma 3 270M" in page and "`M.gguf` is the file of `models/gemma3.py`" in page


def test_sliding_windows_count_in_sizes() -> None:
    """Gemma 3 270M: 24 MiB of full layers and 15 of sliding ones at 8192 tokens, as llama.cpp allocates."""
    shape = next(shape for shape in size_tables.SLIDING if shape.name == "Gemma-3-270M")
    mib = {name: bits / (8 << 20) for name, bits in shape.of_caches(8192).items()}
    assert mib["f16"] == pytest.approx(39.0)
    assert mib["q8_0"] == pytest.approx(39.0 * 8.5 / 16)
    assert mib["subkv"] == pytest.approx(24.0 * 5.2 / 16 + 15.0 * 8.5 / 16)


@each("document", render.documents(REPO))
def test_document_quotes_the_results(document: Path) -> None:
    written = document.read_text(encoding="utf-8")
    assert render.filled(written, TABLES, RESULTS, document.parent.relative_to(REPO).as_posix()) == written
    marks = [f"{found[1]}{found[2]}" for found in MARK.finditer(written)]
    whole = len(render.BLOCK.findall(written)) + len(render.NUMBER.findall(written))
    assert len(marks) == 2 * whole, f"expected marks that open and close, found {marks}"


def test_results_are_read_in_ten_minutes() -> None:
    assert len((REPO / "docs" / "results.md").read_text(encoding="utf-8").split()) <= 1600


#
# the renderer, on made-up rows
#


def synthetic(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    machine = {"cpu": "CPU", "cores": 2, "kernel": "ref", "memory_gib": 1.0, "read_bandwidth_gbs": 10.0}
    return {
        "name": name,
        "commands": ["subkv bench -m M.gguf " + "--longest-option " * 10],
        "commit": "0" * 40,
        "dirty": False,
        "quick": False,
        "date": "2026-01-01 00:00 UTC",
        "machine": machine,
        "versions": {"python": "3"},
        "seconds": 1.0,
        "skipped": [],
        "rows": rows,
    }


def speed(cache: str, depth: int, tokens: float) -> dict[str, Any]:
    test = {"n_depth": depth, "n_prompt": 0, "n_gen": 16, "n_parallel": 1}
    return {"cache": cache, **test, "median_ts": tokens, "stddev_ts": 1.0, "kv_bytes_per_token": 100}


SPEED = synthetic(
    "speed_decode",
    [speed("f16", 64, 50.0), speed("subkv", 64, 100.0), speed("f16", 8000, 20.0), speed("subkv", 8000, 60.0)],
)


def test_ratios_are_to_the_best_stock_cache() -> None:
    lines = TABLES["speed_decode"].markdown(SPEED["rows"]).splitlines()
    assert lines[0].endswith("| depth 64 | depth 8000 | × best stock at 8000 |")
    assert lines[-1].endswith("| **100.0 ± 1.0** | **60.0 ± 1.0** | 3.00 |")
    numbers = TABLES["speed_decode"].numbers(SPEED["rows"])
    assert numbers["best_stock_8000"] == numbers["f16_8000"] == "3.0" and numbers["kept_8000"] == "60"


def test_additions_per_cycle_stand_beside_speeds() -> None:
    rows = [{**row, "clock_ghz": 3.2, "additions_per_cycle": row["median_ts"] / 25} for row in SPEED["rows"]]
    page = " ".join(render.page(TABLES["speed_decode"], [{**SPEED, "rows": rows}]).split())
    assert "read bandwidth 10.0 GB/s, 3.2 GHz, 0.8 to 4.0 additions per cycle" in page
    assert "additions" not in render.page(TABLES["speed_decode"], [SPEED])


def test_marks_are_filled_and_stay() -> None:
    text = (
        "a <!-- number: speed_decode.kept_8000 -->?<!-- /number --> b\n\n"
        "<!-- results: speed_decode -->\n<!-- /results -->\n\n<!-- results: memory -->\n<!-- /results -->\n"
    )
    once = render.filled(text, TABLES, {"speed_decode": [SPEED]}, "docs")
    assert "a <!-- number: speed_decode.kept_8000 -->60<!-- /number --> b" in once
    assert "\n\n| cache, tokens/s |" in once and "(results/speed_decode.md)" in once
    assert once.endswith("<!-- results: memory -->\n<!-- /results -->\n")
    assert render.filled(once, TABLES, {"speed_decode": [SPEED]}, "docs") == once
    assert all(len(line) <= render.COLUMNS for line in once.splitlines() if line[:1] != "|")


def test_machines_stand_side_by_side() -> None:
    other = {
        **SPEED,
        "machine": {**SPEED["machine"], "kernel": "avx2"},
        "rows": [speed("f16", 64, 5.0), speed("subkv", 64, 15.0)],
    }
    other["rows"] += [speed("f16", 8000, 4.0), speed("subkv", 8000, 16.0)]
    results = {"speed_decode": [SPEED, other]}
    lines = render.block(TABLES["speed_decode"], results["speed_decode"], "").splitlines()
    assert "| ref, depth 64 | ref, depth 8000 | ref, × best stock at 8000 | avx2, depth 64 |" in lines[0]
    assert lines[3].endswith("| **60.0 ± 1.0** | 3.00 | **15.0 ± 1.0** | **16.0 ± 1.0** | 4.00 |")
    assert " ".join(lines).count("Measured") == 1 and " ".join(lines).count("at commit 000000000") == 2
    number = "<!-- number: speed_decode.{}best_stock_8000 -->{}<!-- /number -->"
    text = render.filled(number.format("", "") + number.format("avx2.", ""), TABLES, results, "")
    assert text == number.format("", "3.0") + number.format("avx2.", "4.0")


def test_disturbed_speeds_are_marked_and_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The better of two runs is kept with its mark, the next run repeats it; other tables are complete."""
    others = iter([0.5, 0.4, 0.9, 0.1])
    monkeypatch.setattr(make.Busy, "others", lambda self: next(others))
    monkeypatch.setattr(make, "commit", lambda _: ("0" * 40, False))
    monkeypatch.setattr(make, "machine", lambda lab: SPEED["machine"])
    runs: list[str] = []
    for name, rows in (("speed_decode", SPEED["rows"]), ("sizes", [])):
        table = dataclasses.replace(TABLES[name], measure=lambda lab, n=name, r=rows: runs.append(n) or r)
        monkeypatch.setitem(make.TABLES, name, table)
    lab = make.Lab(tmp_path, tmp_path, tmp_path, None, quick=True)
    (tmp_path / "docs").mkdir()
    make.measure_all(lab, ["speed_decode", "sizes"], 60.0, False)
    assert runs == ["speed_decode", "speed_decode", "sizes"]
    page = tmp_path / "docs/results/speed_decode.md"
    assert "Other work kept 0.4 cores busy (CPU, 2 cores, ref kernels): speeds are too low." in page.read_text("utf-8")
    make.measure_all(lab, ["speed_decode", "sizes"], 60.0, False)
    assert runs[3:] == ["speed_decode"] and "Other work" not in page.read_text("utf-8")
    make.measure_all(lab, ["speed_decode", "sizes"], 0.0, True)
    make.measure_all(lab, ["speed_decode", "sizes"], 60.0, False)
    assert len(runs) == 4


def shaped(name: str, scale: float) -> list[dict[str, Any]]:
    rows = [speed("f16", 64, 50.0), speed("subkv random", 64, 50.0 * scale)]
    return [{**row, "shape": name} for row in rows]


def test_every_shape_has_its_table_and_numbers() -> None:
    table = TABLES["shapes_decode"]
    rows = shaped("llama-3.2-1b", 2.0) + shaped("qwen3-0.6b", 3.0) + shaped("llama-3.1-8b", 4.0)
    text = table.markdown(rows)
    assert text.count("| cache, tokens/s |") == 3 and text.count("| **subkv, 4.2 bits** |") == 3
    assert text.index("Llama-3.2-1B") < text.index("| 2.00 |") < text.index("Qwen3-0.6B") < text.index("| 3.00 |")
    numbers = table.numbers(rows)
    assert [numbers[f"{name}.best_stock_64"] for name in ("1b", "0.6b", "8b")] == ["2.0", "3.0", "4.0"]


@pytest.mark.slow
@each(
    ("name", "shapes"),
    [
        ("shapes_decode", {"llama-3.2-1b", "qwen3-0.6b", "llama-3.1-8b"}),
        ("shapes_prefill", {"llama-3.2-1b", "qwen3-0.6b", "llama-3.1-8b"}),
        ("shapes_deep", {"llama-3.2-1b"}),
        ("shapes_hybrids", {"lfm2-350m", "qwen3.6-27b", "qwen3.6-35b-a3b", "gpt-oss-20b"}),
        ("shapes_whole", {"llama-3.1-8b-whole"}),
        ("shapes_mla", {"deepseek-v2-lite"}),
    ],
)
def test_shapes_are_measured(name: str, shapes: set[str], tmp_path: Path) -> None:
    """With tiny settings; the programs are those of this environment."""
    lab = make.Lab(tmp_path, tmp_path, tmp_path, None, quick=True)
    rows = TABLES[name].measure(lab)
    assert {row["shape"] for row in rows} == shapes
    assert {"f16", "subkv random"} <= {row["cache"] for row in rows}
    assert sum(command.startswith("python -m research.shapes") for command in lab.commands) == len(shapes)
    page = render.page(TABLES[name], [{**synthetic(name, rows), "commands": lab.commands}])
    assert page.count("| cache, tokens/s |") == len(shapes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- number: speed_decode.none -->1<!-- /number -->", "best_stock_64.* of speed_decode, found none"),
        ("<!-- number: nothing.x -->1<!-- /number -->", "number: expected one of .*, found nothing"),
        ("<!-- results: nothing -->\n<!-- /results -->\n", "results: expected one of .*, found nothing"),
    ],
)
def test_unknown_names_are_refused(text: str, message: str) -> None:
    with pytest.raises(KeyError, match=message):
        render.filled(text, TABLES, {"speed_decode": [SPEED]}, "")


def test_page_lists_omitted_results() -> None:
    gap = {**synthetic("kernels", []), "skipped": ["kernel-bench is measured where a build folder is given (--build)"]}
    page = render.page(TABLES["kernels"], [gap])
    assert "Skipped: kernel-bench is measured where a build folder is given (--build)." in page
    assert "```sh\nsubkv bench" in page and " \\\n    --longest-option" in page
    assert all(len(line) <= render.COLUMNS for line in page.splitlines())


def test_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an archive of the repository."""
    monkeypatch.setattr(make, "REPO", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(
        make.click.ClickException, match="expected a clone made by git, .*--render, --quick and -m need"
    ):
        make.commit(tmp_path)
    assert make.commit(tmp_path / "build") == ("unknown", True)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(make.click.ClickException, match="found .*No such file or directory"):
        make.commit(tmp_path)


@pytest.mark.parametrize("n_seq", [1, 4])
def test_computed_sizes_are_those_of_a_context(tiny_model: Callable[..., Path], n_seq: int) -> None:
    """Of a model with sliding windows: llama.cpp's types exactly, ours within the rounding of rows to whole bits."""
    n_ctx, layers = 32768, 2
    model = tiny_model("gemma2", head_size=64, n_layer=2 * layers, n_swa=128)
    with Model(model) as opened:
        n_head_kv = int(opened.meta("gemma2.attention.head_count_kv"))
        shape = size_tables.Shape("tiny", layers, n_head_kv, 64, layers, 128)
        found = {}
        for name in ("f16", "q8_0", "subkv"):
            choice = choose_cache(model, CacheRequest(name))
            params = C.llama_context_default_params()
            params.n_seq_max, params.swa_full = n_seq, False
            params.type_k, params.type_v = choice.type_k, choice.type_v
            stats, _ = memory._simulated(model, choice, params, n_ctx)
            assert stats is not None
            found[name] = 8 * stats.bytes_all
    computed = shape.of_caches(n_ctx, n_seq)
    assert (found["f16"], found["q8_0"]) == (computed["f16"], computed["q8_0"])
    ours = shape.bits(n_ctx, derived_numpy.KV_BITS_BESIDE_SLIDING, n_seq) + size_tables.Q8_0 * shape.sliding(
        n_ctx, n_seq
    )
    assert found["subkv"] == pytest.approx(ours, rel=0.02)
