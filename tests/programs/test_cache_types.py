"""Cache types: each context gets the one that the user gives, by the program itself, `subkv run` and `subkv serve`."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import stand_ins
import tiny
from each import each
from program_paths import program
from servers import CODED, Server, free_port, wait_until

from runtime.launch.start import Start, find_program, prepare_start, read_arguments
from runtime.launch.variables import prepare
from runtime.serve.cli import serve_start
from subkv.engine.request import CacheRequest

pytestmark = pytest.mark.skipif(os.name == "nt", reason="no bases are derived here under wine")
OPTIONS = ["-c", "256", "-np", "1", "-t", "1", "--no-warmup", "--no-ui", "--offline", "-lv", "4"]


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the vocabulary of `words`."""
    folder = tmp_path_factory.mktemp("draft")
    return stand_ins.with_words(folder / "draft.gguf", tiny.build(folder / "tiny.gguf", seed=1))


def environment() -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("LLAMA_ARG", "SUBKV", "XDG_CONF"))
    }


def by_itself(name: str, *arguments: str) -> Start:
    return Start(program(name), [name, *arguments], environment())


def by_run(name: str, *arguments: str) -> Start:
    located = find_program(name, environment())
    return prepare_start(located, read_arguments(located, arguments), CacheRequest())


def by_serve(_name: str, *arguments: str) -> Start:
    return serve_start(arguments)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(os.environ) - set(environment()) - {"SUBKV_LIB_PATH", "SUBKV_CACHE"}:
        monkeypatch.delenv(name)


@contextmanager
def started(start: Start, folder: Path) -> Iterator[Server]:
    """llama-server, which may have ended."""
    port = free_port()
    log = folder / f"{port}.log"
    arguments = [*start.arguments, *OPTIONS, "--port", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(arguments, executable=start.path, env=start.environment, stdout=out, stderr=out)
    server = Server(process, port, log)
    try:
        wait_until("a server", lambda: process.poll() is not None or "listening on http" in server.log)
        yield server
    finally:
        process.kill()
        process.wait()


def types_in(log: str) -> list[str]:
    """The types of keys of the contexts, in order."""
    return re.findall(r"K \((\w+)\): ", log)


def types_of_preset(log: str, name: str) -> list[str]:
    """The same for a model of a router, whose log has the lines of its models' processes behind their ports."""
    port = re.search(rf"name={name} on port (\d+)", log)
    return re.findall(rf"^\[{port[1]}\].* K \((\w+)\): ", log, re.MULTILINE) if port else []


def types(start: Start, folder: Path) -> list[str]:
    """The types of keys of a server's contexts: the target's, the draft model's."""
    with started(start, folder) as server:
        return types_in(server.log)


def flags(*pairs: tuple[str, Any]) -> list[str]:
    return [str(word) for flag, value in pairs if value is not None for word in (flag, value)]


TYPES = (None, "f16", "q8_0", "subkv", "auto")


@each("start", [by_itself, by_run, by_serve])
@each("of_target", TYPES)
@each("of_draft", TYPES)
def test_each_context_gets_its_type(
    start: Callable[..., Start],
    of_target: str | None,
    of_draft: str | None,
    words: Path,
    draft: Path,
    tmp_path: Path,
) -> None:
    """Without a type: f16 by the program itself; else a coded cache, unless the target's type is ordinary."""
    for model in (words, draft):
        prepare(model)
    given = flags(("-m", words), ("-ctk", of_target), ("-md", draft), ("-ctkd", of_draft))
    default = "f16" if start is by_itself or of_target in ("f16", "q8_0") else "subkv"
    expected = [{None: default, "auto": "subkv"}.get(name, name) for name in (of_target, of_draft)]
    assert types(start("llama-server", *given), tmp_path) == expected


@each("start", [by_itself, by_run, by_serve])
def test_one_file_as_target_and_draft(start: Callable[..., Start], words: Path, tmp_path: Path) -> None:
    prepare(words)
    for given in (["subkv", "q8_0"], ["f16", "subkv"], ["subkv", "subkv"], ["q8_0", "f16"]):
        arguments = flags(("-m", words), ("-ctk", given[0]), ("-md", words), ("-ctkd", given[1]))
        assert types(start("llama-server", *arguments), tmp_path) == given
        values = flags(("-m", words), ("-ctk", given[0]), ("-ctv", given[0]), ("-md", words))
        values += flags(("-ctkd", given[1]), ("-ctvd", given[1]))
        assert types(start("llama-server", *values), tmp_path) == given


@pytest.mark.parametrize("start", [by_run, by_serve])
def test_drafts_have_bases_too(start: Callable[..., Start], words: Path, draft: Path, tmp_path: Path) -> None:
    """Derived as those of the target, with a type and without one."""
    models = flags(("-m", words), ("-md", draft))
    assert types(start("llama-server", *models), tmp_path) == ["subkv", "subkv"]
    for name in ("auto", "subkv"):
        assert types(by_itself("llama-server", *models, "-ctkd", name), tmp_path) == ["f16", "subkv"]
    assert types(start("llama-server", *models, "-ctk", "f16", "-ctkd", "subkv"), tmp_path) == ["f16", "subkv"]


@each("start", [by_itself, by_run, by_serve])
def test_types_of_variables_and_configuration_files(start: Callable[..., Start], words: Path, tmp_path: Path) -> None:
    """llama.cpp's own: a flag beats a variable, a variable a file; all beat our defaults."""
    prepare(words)
    file = tmp_path / "llama.cpp" / "config.ini"
    file.parent.mkdir(exist_ok=True)
    for in_file, variable, flag, expected in (
        ("f16", None, None, "f16"),
        ("subkv", "q8_0", None, "q8_0"),
        ("q8_0", "f16", "subkv", "subkv"),
        ("subkv", "subkv", "f16", "f16"),
    ):
        file.write_text(f"[default]\ncache-type-k = {in_file}\n")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CONFIG_HOME", str(tmp_path))
            if variable:
                patch.setenv("LLAMA_ARG_CACHE_TYPE_K", variable)
            made = start("llama-server", *flags(("-m", words), ("-ctk", flag)))
            own = {
                name: os.environ[name] for name in ("XDG_CONFIG_HOME", "LLAMA_ARG_CACHE_TYPE_K") if name in os.environ
            }
        made.environment.update(own)
        assert types(made, tmp_path) == [expected], (in_file, variable, flag)


@each("start", [by_itself, by_run, by_serve])
def test_types_of_presets(start: Callable[..., Start], words: Path, tmp_path: Path) -> None:
    """Each model of a router gets the type of its preset."""
    prepare(words)
    given = {"none": None, "f16": "f16", "q8_0": "q8_0", "subkv": "subkv", "auto": "auto"}
    lines = [
        f"[{name}]\nmodel = {words}\n" + (f"cache-type-k = {kind}\n" if kind else "") for name, kind in given.items()
    ]
    preset = tmp_path / "presets.ini"
    preset.write_text("\n".join(lines))
    expected = given | {"none": "f16" if start is by_itself else "subkv", "auto": "subkv"}
    with started(start("llama-server", "--models-preset", str(preset)), tmp_path) as server:
        for name, kind in expected.items():
            server.request("POST", "/completion", {"model": name, "prompt": "a", "n_predict": 1})
            wait_until(f"the cache of {name}", lambda name=name: types_of_preset(server.log, name) != [])
            assert types_of_preset(server.log, name) == [kind], name


@each("start", [by_itself, by_run])
def test_types_of_llama_bench(start: Callable[..., Start], words: Path) -> None:
    """One run compares them."""
    prepare(words)
    made = start("llama-bench", *flags(("-m", words), ("-ctk", "f16,subkv,q8_0"), ("-p", 16), ("-n", 0), ("-r", 1)))
    done = subprocess.run(
        [*made.arguments, "-t", "1", "-o", "json", "-v"],
        executable=made.path,
        env=made.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    rows = json.loads(done.stdout)
    assert [(row["type_k"], row["type_v"]) for row in rows] == [("f16", "f16"), ("subkv", "subkv"), ("q8_0", "f16")]
    assert types_in(done.stderr) == ["f16", "subkv", "q8_0"]
    assert done.stderr.count(CODED) == 1


def test_types_that_the_program_refuses(words: Path, tmp_path: Path) -> None:
    prepare(words)
    for arguments, why in (
        (
            ["-ctk", "subkv", "-ctv", "q8_0"],
            "cache types: expected the same cache for K and V with 'subkv', found",
        ),
        (["-ctk", "subkv2"], "Unsupported cache type: subkv2"),
    ):
        for start in (by_itself, by_run, by_serve):
            with started(start("llama-server", "-m", str(words), *arguments), tmp_path) as server:
                assert why in server.log and server.process.poll() == 1
    with started(by_itself("llama-server", "-m", str(words), "-ctk", "subkv:4,25"), tmp_path) as server:
        assert "expected subkv:BITS with bits per element, such as subkv:4.25, found subkv:4,25" in server.log
        assert server.process.poll() == 1
