"""Every command of a page or an example is run here, by another test, or is listed with the reason why it is not."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import hub
import page_commands as commands
import pytest
from each import each

from subkv.native.library import lib_dir

REPO = commands.REPO
SKIPPED = {"build", "dist", "wheels", "node_modules"}
SERVER = re.compile(r"subkv (serve|run .*llama-server) (?!--help)")
SECONDS = 120
APP = """
import argparse, llama_cpp
parser = argparse.ArgumentParser()
parser.add_argument("--model", default="model.gguf")
llm = llama_cpp.Llama(parser.parse_args().model, n_ctx=256, verbose=False)
print(llm("the", max_tokens=2)["choices"][0]["text"])
"""


def sources() -> list[Path]:
    """Pages and examples, without records."""
    found = [*REPO.rglob("*.md"), *(path for path in (REPO / "examples").rglob("*") if path.is_file())]
    return [
        path
        for path in sorted(found)
        if not any(part in SKIPPED or part.startswith((".", "__")) for part in path.relative_to(REPO).parts)
        and not path.relative_to(REPO).as_posix().startswith(commands.RECORDS)
    ]


LISTED = [*commands.RUN, *commands.ELSEWHERE, *(line for lines in commands.NOT_RUN.values() for line in lines)]


def test_every_command_is_listed_once() -> None:
    assert len(LISTED) == len(set(LISTED))
    shown = {line: path.relative_to(REPO) for path in sources() for line in commands.commands_of(path)}
    missing = {line: str(path) for line, path in shown.items() if line not in LISTED}
    assert missing == {}, "add them to a list of page_commands.py"
    assert [line for line in LISTED if line not in shown] == [], "no page has them: remove them from page_commands.py"


@each("test", sorted({*commands.ELSEWHERE.values()}))
def test_other_tests_exist(test: str) -> None:
    path, _, name = test.partition("::")
    assert f"def {name}(" in (REPO / "tests" / path).read_text("utf-8")


#
# a folder with all files that the commands name
#


@pytest.fixture(scope="module")
def folder(
    coded_model: Callable[..., Path],
    calibration: Path,
    text_file: Path,
    tiny_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    import tiny_vision

    path = tmp_path_factory.mktemp("pages")
    for name, source in (
        ("model.gguf", tiny_model("llama")),
        ("FILE", coded_model()),
        ("calib.safetensors", calibration),
        ("text.txt", text_file),
    ):
        shutil.copy(source, path / name)
    for name in ("models", "bin", "home"):
        (path / name).mkdir()
    shutil.copy(path / "model.gguf", path / "models" / "model.gguf")
    tiny_vision.build(path / "mmproj.gguf", "janus_pro", 64)
    (path / "photo.jpg").write_bytes(tiny_vision.picture(40))
    (path / "app.py").write_text(APP)
    (path / "app.service.d").mkdir()
    for name, module in (("subkv", "-m runtime.cli"), ("python", "")):
        script = path / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        script.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def environment(folder: Path) -> Iterator[dict[str, str]]:
    """Variables of a shell in that folder, with a hub that has user/model-GGUF."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LLAMA_", "SUBKV", "HF_"))}
    python_path = os.pathsep.join([str(REPO), str(REPO / "python"), os.environ.get("PYTHONPATH", "")])
    model = folder / "model.gguf"
    repo: dict[str, Path | bytes] = {"model-Q4_K_M.gguf": model, "model-Q6_K.gguf": model}
    with hub.serving({"user/model-GGUF": repo}) as served:
        yield kept | {
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": python_path,
            "SUBKV_LIB_PATH": str(lib_dir()),
            "HOME": str(folder / "home"),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "HF_ENDPOINT": served.url,
            "LLAMA_ARG_PORT": "0",
            "LLAMA_ARG_THREADS": "1",
        }


def answers(process: subprocess.Popen[bytes], log: Path) -> str:
    """The health of a server, once it listens."""
    end = time.monotonic() + SECONDS
    while True:
        text = log.read_text("utf-8", "replace")
        assert process.poll() is None and time.monotonic() < end, text[-3000:]
        found = re.search(r"listening on (http://\S+:\d+)", text)
        if found:
            with urllib.request.urlopen(f"{found[1]}/health") as answer:
                return str(json.loads(answer.read())["status"])
        time.sleep(0.05)


@pytest.mark.skipif(os.name == "nt", reason="needs bash")
@pytest.mark.parametrize("command", commands.RUN)
def test_it_runs(folder: Path, environment: dict[str, str], command: str, tmp_path: Path) -> None:
    if re.search("llama-|serve", command) and not (lib_dir() / "llama-server").is_file():
        pytest.skip("llama.cpp's programs: not built (SUBKV_PROGRAMS=ON)")
    if "-hf" in command:
        pytest.importorskip("huggingface_hub")
    log = tmp_path / "log"
    check = ' && test "$SUBKV" = auto' if command.startswith("eval") else ""  # eval hides the status of its words
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["bash", "-c", command + check],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        if SERVER.search(command):
            assert answers(process, log) == "ok"
            os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(SECONDS) == 0, log.read_text("utf-8", "replace")[-3000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
