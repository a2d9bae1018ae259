"""llama.cpp's own programs (SUBKV_PROGRAMS): which are built, that they run, and that they compute as on stock."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import llama_source as s
import pytest
from compiled import preloaded
from each import each

from subkv.native import library as _lib

NAMES = ("llama-server", "llama-cli", "llama-completion", "llama-bench", "llama-perplexity", "llama-mtmd-cli")
LIBRARIES = ("libllama-common", "libsubkv-server", "libmtmd")
EXE = ".exe" if os.name == "nt" else ""
STOCK = _lib.lib_dir() / "stock"
PROMPT = "The quick brown fox jumps over the lazy dog. " * 8


def program(name: str) -> Path:
    path = _lib.lib_dir() / f"{name}{EXE}"
    if not path.is_file():
        pytest.skip(f"{name}: not built (SUBKV_PROGRAMS=ON)")
    return path


def environment() -> dict[str, str]:
    """The environment without anything that attaches a coded cache."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("SUBKV", "LLAMA"))}


def run(path: Path, options: str, *arguments: str, preload: str = "") -> str:
    """The program's standard output."""
    done = subprocess.run(
        [path, *options.split(), *arguments],
        env=environment() | ({"LD_PRELOAD": preload} if preload else {}),
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs a compiler and ninja")
def test_programs_are_compiled_only_with_the_option(repo: Path, pristine: s.Tree, tmp_path: Path) -> None:
    """Without the option no program exists; with it the programs are compiled, but no other tool."""
    if not all(map(shutil.which, ("cmake", "ninja", "c++"))):
        pytest.skip("needs cmake, ninja and a compiler on the PATH")
    folder = tmp_path / "source"
    for path, data in pristine.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)

    def built(option: str) -> tuple[set[str], set[str]]:
        """Configures -> folders of llama.cpp that files are compiled in, and files that are linked."""
        options = [f"-DSUBKV_PROGRAMS={option}", "-DSUBKV_PAGE=OFF", f"-DSUBKV_LLAMA_CPP_SOURCE={folder}"]
        command = ["cmake", "-S", str(repo), "-B", str(tmp_path / "build"), "-G", "Ninja", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr
        command = ["ninja", "-C", str(tmp_path / "build"), "-t", "commands", "all"]
        commands = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        sources = re.findall(r" -c \S*?/build/llama\.cpp/(\S+)", commands)
        folders = {re.match(r"(tools/)?[^/]+", path)[0] for path in sources}  # type: ignore[index]
        werror = [line for line in commands.splitlines() if " -Werror " in line and "/build/llama.cpp/" in line]
        assert not any(re.search(r" -c \S*?/build/llama\.cpp/", line) for line in werror)
        return folders, set(re.findall(r" -o bin/([^/\s]+)", commands))

    off, linked = built("OFF")
    assert off == {"ggml", "src"}
    assert not any((tmp_path / "build" / "llama.cpp" / name).exists() for name in ("common", "tools"))
    on, all_linked = built("ON")
    tools = {f"tools/{name}" for name in ("cli", "completion", "llama-bench", "mtmd", "perplexity", "server")}
    assert on == off | {"common", "vendor"} | tools
    assert {name.partition(".")[0] for name in all_linked - linked} == {*NAMES, *LIBRARIES}


@each("name", NAMES)
def test_version(repo: Path, name: str) -> None:
    """Every program runs from another folder, without help of the environment, and names the pinned commit."""
    path = program(name)
    done = subprocess.run([path, "--version"], cwd="/", env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    commit = s.read_version(repo / "runtime" / "llama.cpp")["commit"]
    assert f"commit {commit})" in done.stdout + done.stderr


def test_files_beside_the_libraries() -> None:
    """Plain names: a wheel holds no links."""
    folder = program("llama-server").parent
    files = [path for path in folder.iterdir() if path.name.startswith(("llama-", "libllama-", "libmtmd", "libsubkv-"))]
    assert {path.name for path in files} == {f"{name}{EXE}" for name in NAMES} | {
        f"{name}{_lib.SUFFIX}" for name in LIBRARIES
    }
    assert not any(path.is_symlink() for path in files)


@pytest.mark.skipif(not shutil.which("readelf"), reason="needs readelf")
def test_libraries_are_found_beside_the_programs() -> None:
    folder = program("llama-server").parent
    for path in [*map(program, NAMES), *(folder / f"{name}{_lib.SUFFIX}" for name in LIBRARIES)]:
        dynamic = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
        assert re.findall(r"\(R(?:UN)?PATH\).*\[(.*)\]", dynamic) == ["$ORIGIN"], path.name
        for needed in re.findall(r"\(NEEDED\).*\[(lib(?:llama|ggml|mtmd|subkv).*)\]", dynamic):
            assert (folder / needed).is_file(), f"{path.name}: {needed}"


def test_bench(demo_model: Path) -> None:
    printed = run(program("llama-bench"), "-t 1 -p 16 -n 4 -r 1 -o json", "-m", str(demo_model))
    rows = json.loads(printed)
    assert [(row["n_prompt"], row["n_gen"]) for row in rows] == [(16, 0), (0, 4)]
    assert all(row["avg_ts"] > 0 for row in rows)


def test_perplexity(demo_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(PROMPT)
    printed = run(program("llama-perplexity"), "-t 1 -c 32 --chunks 2", "-m", str(demo_model), "-f", str(text))
    values = [float(value) for value in re.findall(r"\[\d\]([\d.]+),", printed)]
    assert len(values) == 2
    assert all(1 < value < 100 for value in values)


def completion(path: Path, model: Path, cache: str, preload: str = "") -> str:
    # an f16 that is given is a type of our libllama, which the stock one does not know; it is the default there
    types = "" if cache == "f16" else f"-ctk {cache} -ctv {cache} "
    options = f"-n 16 -c 256 -t 1 --temp 0 --seed 1 -no-cnv {types}-fa on --no-warmup"
    return run(path, options, "-m", str(model), "-p", PROMPT, preload=preload)


@pytest.fixture(scope="module")
def on_stock(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """on_stock(name): the program in a folder where libllama is the stock one."""
    if not STOCK.is_dir():
        pytest.skip(f"stock libllama: {STOCK} is missing (build with -DSUBKV_STOCK=ON)")
    program("llama-server")
    folder = tmp_path_factory.mktemp("stock")
    for path in _lib.lib_dir().iterdir():
        if path.is_file() and not path.name.startswith(("libllama.", "libsubkv.")):
            shutil.copy2(path, folder)
    for path in STOCK.iterdir():
        shutil.copy2(path, folder)
    assert (folder / f"libllama{_lib.SUFFIX}").read_bytes() != (_lib.lib_dir() / f"libllama{_lib.SUFFIX}").read_bytes()
    return lambda name: folder / f"{name}{EXE}"


@pytest.mark.parametrize("cache", ["f16", "q8_0"])
def test_completion_is_stocks(
    demo_model: Path, on_stock: Callable[[str], Path], pristine: s.Tree, cache: str, tmp_path: Path
) -> None:
    ours = completion(program("llama-completion"), demo_model, cache)
    assert PROMPT.strip() in ours
    assert len(ours) > len(PROMPT) + 20
    # the stock libllama lacks the function that reads names of types: every name is one of ggml's
    header = next(data for path, data in pristine.items() if path.endswith("ggml/include/ggml.h")).decode()
    count = re.findall(r"GGML_TYPE_COUNT\s*=\s*(\d+)", header)[0]
    source = tmp_path / "types.cpp"
    source.write_text(f"#include <string>\nint llama_subkv_type(const std::string &) {{ return {count}; }}\n")
    assert ours == completion(on_stock("llama-completion"), demo_model, cache, preloaded(source, tmp_path))


def test_logits_are_stocks(demo_model: Path, on_stock: Callable[[str], Path], tmp_path: Path) -> None:
    """The file of logits that llama-perplexity writes is the same, byte for byte."""
    text = tmp_path / "text.txt"
    text.write_text(PROMPT)
    found = []
    for number, path in enumerate((program("llama-perplexity"), on_stock("llama-perplexity"))):
        logits = tmp_path / f"logits{number}"
        files = ["-m", str(demo_model), "-f", str(text), "--kl-divergence-base", str(logits)]
        run(path, "-t 1 -c 32 --chunks 2", *files)
        found.append(logits.read_bytes())
    assert len(found[0]) > 100_000
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a llama-server with the demo model."""
    path = program("llama-server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    options = ["-m", str(demo_model), "-c", "512", "--host", "127.0.0.1", "--port", str(port), "-t", "1", "--no-warmup"]
    with log.open("wb") as out:
        process = subprocess.Popen([path, *options], env=environment(), stdout=out, stderr=out)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, log.read_text(errors="replace")
            try:
                with urllib.request.urlopen(f"{address}/health") as answer:
                    if answer.status == 200:
                        break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        else:
            pytest.fail(log.read_text(errors="replace"))
        yield address
    finally:
        process.terminate()
        process.wait()


def test_server_answers(repo: Path, server: str) -> None:
    version = s.read_version(repo / "runtime" / "llama.cpp")
    body = {"messages": [{"role": "user", "content": "Count to ten."}], "temperature": 0, "max_tokens": 8}
    request = urllib.request.Request(
        f"{server}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        printed = json.loads(answer.read())
    assert printed["usage"]["completion_tokens"] == 8
    assert printed["choices"][0]["message"]["content"].strip()
    assert printed["system_fingerprint"].endswith(f"-{version['commit']}")


def test_server_has_a_page(server: str) -> None:
    """The chat page and its licences, if npm built it; else a page that says how to get it, not compressed."""
    licenses = _lib.lib_dir() / "llama.cpp" / "page-licenses.txt"
    request = urllib.request.Request(server, headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(request) as answer:
        content = answer.read()
        assert answer.headers["Content-Type"].startswith("text/html")
        packed = answer.headers["Content-Encoding"] == "gzip"
    page = (gzip.decompress(content) if packed else content).decode()
    if not packed:
        assert "This build has no chat page" in page and "/v1/models" in page and "Node.js" in page
        assert not licenses.exists()
        return
    assert "<!doctype html>" in page
    scripts = re.findall(r'href="\./(_app/\S+?\.js)"', page)
    assert scripts
    for name in scripts:
        script = urllib.request.Request(f"{server}/{name}", headers={"Accept-Encoding": "gzip"})
        with urllib.request.urlopen(script) as answer:
            assert answer.headers["Content-Type"] == "application/javascript"
            assert len(gzip.decompress(answer.read())) > 1_000_000
    if _lib.lib_dir().name != "bin":  # installed, not a build folder
        assert "MIT" in licenses.read_text("utf-8")
