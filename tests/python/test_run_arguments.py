"""The command lines of llama.cpp's programs as `subkv run` reads them, and which file a program's name means."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from each import each

from runtime.launch import programs
from runtime.launch.arguments import ProgramArguments, is_llama_cpp_program, read, with_hub_models
from runtime.launch.doors import Door
from runtime.launch.start import Program, read_arguments
from subkv.base import hub
from subkv.base.errors import SubkvError

STOCK = ("f16", "q8_0", "q4_0")
GET = "-DSUBKV_PROGRAMS=ON"


def found(program: str, *arguments: str, **environment: str) -> ProgramArguments:
    return read(program, arguments, environment, STOCK)


@each(
    "name, theirs",
    [
        ("llama-server", True),
        ("/opt/bin/llama-server", True),
        ("C:\\tools\\llama-cli.exe", True),
        ("llama", True),
        ("llamafile", False),
        ("python", False),
        ("my-llama-server", False),
    ],
)
def test_names_of_llama_cpp(name: str, theirs: bool) -> None:
    assert is_llama_cpp_program(name) is theirs


#
# cache types
#


@each(
    ("given", "types"),
    [
        (["-ctk", "subkv"], ("subkv",)),
        (["-ctv", "subkv"], ("subkv",)),
        (["--cache-type-k", "subkv"], ("subkv",)),
        (["--cache_type_k", "subkv"], ("subkv",)),
        (["--cache-type-k=subkv"], ("subkv",)),
        (["-ctk=subkv", "-ctv=subkv"], ("subkv", "subkv")),
        (["-ctk", "q8_0", "-ctk", "subkv"], ("subkv",)),  # the last one counts
        (["-ctk", "subkv", "-ctk", "f16"], ("f16",)),
        (["-ctk", "subkv", "--cache-type-v", "q8_0"], ("subkv", "q8_0")),
        (["-ctk", "auto"], ("auto",)),
        (["-ctv", "q8_0"], ("q8_0",)),
        ([], ()),
        (["-ctk", "subkv2"], ()),  # the program refuses it
        (["-ctk", "f16,subkv"], ()),
        (["-ctk"], ()),
        (["-p", "-ctk=none"], ()),
    ],
)
@each("program", ["llama-server", "nice"])
@each("of", ["", "d"])
def test_cache_types(program: str, of: str, given: list[str], types: tuple[str, ...]) -> None:
    """They stay among the arguments. of: "d" is a draft model."""
    if of:
        names = {"-ctk": "-ctkd", "-ctv": "-ctvd", "--cache-type-k": "--cache-type-k-draft"}
        names |= {"--cache_type_k": "--spec_draft_type_k", "--cache-type-v": "--spec-draft-type-v"}
        given = [word.replace(word.split("=")[0], names.get(word.split("=")[0], word.split("=")[0])) for word in given]
    parsed = found(program, "-c", "64", *given)
    assert parsed.arguments == ("-c", "64", *given)
    assert (parsed.draft_types if of else parsed.types) == types
    if of:
        assert parsed.types == () and parsed.codes_draft == bool({"subkv", "auto"}.intersection(types))
    else:
        assert parsed.strict == ("subkv" in types) and parsed.draft_types == ()
        assert parsed.ordinary == (bool(types) and not {"subkv", "auto"}.intersection(types))


def test_types_of_the_environment() -> None:
    variables = {"LLAMA_ARG_CACHE_TYPE_K": "subkv", "LLAMA_ARG_CACHE_TYPE_V": "subkv", "A": "b"}
    parsed = found("llama-server", "-c", "64", **variables)
    assert parsed.strict and parsed.environment == variables
    assert found("llama-server", LLAMA_ARG_CACHE_TYPE_K="q8_0").ordinary
    assert found("llama-server", "-ctk", "subkv", LLAMA_ARG_CACHE_TYPE_K="q8_0").types == ("subkv",)
    assert found("llama-server", "-ctk", "q8_0", LLAMA_ARG_CACHE_TYPE_K="subkv").types == ("q8_0",)
    assert found("llama-server", LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K="subkv").draft_types == ("subkv",)


def test_lists_of_llama_bench() -> None:
    for given in (["-ctk", "f16,subkv"], ["-ctk", "f16", "-ctk", "subkv"]):
        parsed = found("llama-bench", *given)
        assert parsed.types == ("f16", "subkv") and parsed.strict and not parsed.ordinary
    assert found("llama-bench", "-ctk", "f16,q8_0").ordinary


#
# models
#


def test_models_of_llama_cpps_programs() -> None:
    def models(program: str, *arguments: str, **environment: str) -> list[str]:
        return [str(path) for path in found(program, *arguments, **environment).models]

    assert models("llama-server", "-m", "a.gguf", "-c", "64") == ["a.gguf"]
    assert models("llama-server", "--model=a.gguf") == models("llama-server", "-m=a.gguf") == ["a.gguf"]
    assert models("llama-server", "-m", "a.gguf", "-m", "b.gguf") == ["b.gguf"]
    assert models("llama-server", "-m", "a,b.gguf") == ["a,b.gguf"]
    assert models("llama-server", "-m") == models("llama-server", "-m", "") == []
    assert models("llama-server", LLAMA_ARG_MODEL="a.gguf") == ["a.gguf"]
    assert models("llama-server", "-m", "b.gguf", LLAMA_ARG_MODEL="a.gguf") == ["b.gguf"]
    assert models("llama-bench", "-m", "a.gguf,b.gguf", "-m", "c.gguf") == ["a.gguf", "b.gguf", "c.gguf"]
    assert models("llama", "bench", "-m", "a.gguf,b.gguf") == ["a.gguf", "b.gguf"]
    # -m is the name of a download
    assert models("llama-server", "-m", "a.gguf", "-mu", "https://example.com/a.gguf") == []
    assert found("llama-server", "-md", "a.gguf", "--model-draft=b.gguf").draft == Path("b.gguf")
    assert found("llama-server", LLAMA_ARG_SPEC_DRAFT_MODEL="a.gguf").draft == Path("a.gguf")
    assert found("llama-server", "-md", "").draft is None


def test_models_of_other_programs_are_files(tmp_path: Path) -> None:
    model, text = tmp_path / "a.gguf", tmp_path / "b.gguf"
    model.write_bytes(b"GGUF....")
    text.write_text("this is text")
    parsed = found("python", "-m", "llama_cpp.server", "--model", str(model), LLAMA_ARG_MODEL=str(model))
    assert parsed.models == (model,)
    assert parsed.arguments == ("-m", "llama_cpp.server", "--model", str(model))
    for value in (str(text), str(tmp_path / "none.gguf"), str(tmp_path), "a\0b", ""):
        assert found("python", "--model", value).models == ()


def test_sources_of_models() -> None:
    assert found("llama-server", "-mu", "https://example.com/a.gguf").from_url
    assert found("llama-server", "-dr", "ai/a").from_url
    assert found("llama-server", "--models-dir", "models").folder == "models"
    assert found("llama-server", LLAMA_ARG_MODELS_DIR="models").folder == "models"
    assert found("llama-server", "-hf", "me/a:Q4_0", "-hff", "b.gguf").repos == ("me/a:Q4_0",)
    assert found("llama-bench", "-hf", "me/a,me/b").repos == ("me/a", "me/b")
    assert found("python", "-hf", "me/a").repos == ()


def test_a_model_of_the_hub_becomes_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "fetch", lambda repo, file: Path("/hub") / repo.replace(":", "-") / (file or "a.gguf"))

    def got(program: str, *arguments: str, **environment: str) -> ProgramArguments:
        made = with_hub_models(found(program, *arguments, **environment))
        assert made.repos == ()
        return made

    # -m is the name of a download
    parsed = got("llama-server", "-m", "gone", "-c", "8", "-hf", "me/a:Q4_0", "-np", "2", LLAMA_ARG_MODEL="gone", A="b")
    assert parsed.arguments == ("-c", "8", "-m", "/hub/me/a-Q4_0/a.gguf", "-np", "2")
    assert parsed.models == (Path("/hub/me/a-Q4_0/a.gguf"),) and parsed.environment == {"A": "b"}
    parsed = got("llama-server", "-c", "8", "-hff", "b.gguf", "-hf=me/a", "-np", "2")
    assert parsed.arguments == ("-c", "8", "-m", "/hub/me/a/b.gguf", "-np", "2")
    parsed = got("llama-server", "-c", "8", LLAMA_ARG_HF_REPO="me/a", LLAMA_ARG_HF_FILE="b.gguf")
    assert parsed.arguments == ("-m", "/hub/me/a/b.gguf", "-c", "8") and parsed.environment == {}
    parsed = got("llama-bench", "-m", "c.gguf", "-hf", "me/a,me/b")
    assert parsed.arguments == ("-m", "c.gguf", "-m", "/hub/me/a/a.gguf", "-m", "/hub/me/b/a.gguf")
    assert [str(model) for model in parsed.models] == ["c.gguf", "/hub/me/a/a.gguf", "/hub/me/b/a.gguf"]


#
# programs
#


def executable(path: Path, text: str | bytes = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(0o755)
    return path


@each("flag, name", [("--mlock", "--load-mode mlock"), ("--no-mmap", "--load-mode none")])
def test_flags_that_llama_cpp_has_renamed(flag: str, name: str) -> None:
    """They are known from other versions. Only ours is refused: another llama.cpp may have them."""
    ours, theirs = Door(None, ""), Door(Path("libggml-subkv.so"), "")
    with pytest.raises(SubkvError, match=f"^{flag}: expected {name}, its name in this version of llama.cpp$"):
        read_arguments(Program("llama-server", Path("llama-server"), {}, ours), ["-c", "512", flag])
    for program, door in (("llama-server", theirs), ("llama-bench", ours), ("app", ours)):
        assert read_arguments(Program(program, Path(program), {}, door), [flag]).arguments == (flag,)


@each(
    ("program", "arguments", "message"),
    [
        ("llama-server", ["-t", "0"], "-t: expected 1 to 512 threads, or -1 for all processors, found 0"),
        ("llama-cli", ["--threads-batch", "513"], "--threads-batch: expected 1 to 512 threads, or -1 for all"),
        ("llama-server", ["-m", ""], "-m: expected a model, found an empty name"),
        ("llama-server", ["--hf-repo="], "--hf-repo: expected a model, found an empty name"),
        ("llama-server", ["-t", "-1"], ""),
        ("llama-bench", ["-t", "0"], ""),
        ("app", ["-m", ""], ""),
    ],
)
def test_values_that_nobody_means(program: str, arguments: list[str], message: str) -> None:
    """Our own programs refuse the same."""
    started = Program(program, Path(program), {}, Door(None, ""))
    if not message:
        assert read_arguments(started, arguments).arguments == tuple(arguments)
        return
    with pytest.raises(SubkvError) as error:
        read_arguments(started, arguments)
    assert str(error.value).startswith(message)


def test_programs_next_to_the_libraries_come_first(tmp_path: Path) -> None:
    libraries, folder = tmp_path / "lib", tmp_path / "path"
    elsewhere = executable(folder / "llama-server")
    other = executable(folder / "tool")
    executable(libraries / "tool")  # only llama.cpp's programs are looked for there
    assert programs.find("llama-server", libraries, str(folder)) == elsewhere
    installed = executable(tmp_path / "bin" / "llama-server")
    assert programs.find("llama-server", libraries, str(folder)) == installed
    beside = executable(libraries / "llama-server")
    assert programs.find("llama-server", libraries, str(folder)) == beside
    assert programs.find(str(elsewhere), libraries, "") == elsewhere
    assert programs.find("tool", libraries, str(folder)) == other


def test_programs_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(
        SubkvError, match="expected one of llama.cpp's programs in .*, found no llama-server; in a clone"
    ) as at:
        programs.find("llama-server", tmp_path, str(tmp_path))
    assert GET in at.value.reason
    (tmp_path / "llama-cli").write_text("not to be executed")
    text = str(tmp_path / "llama-cli")
    for name, found in (
        ("tool", "no tool"),
        (text, f"{text}, which is no program (its mode has no x)"),
        (str(tmp_path), f"the folder {tmp_path}"),
        ("", "no "),
    ):
        with pytest.raises(SubkvError) as at:
            programs.find(name, tmp_path, str(tmp_path))
        assert at.value.reason == f"expected a program that can be executed, found {found}"


def elf(*headers: tuple[int, bytes]) -> bytes:
    """A 64-bit ELF file with these program headers: type and contents."""
    at = 64 + 56 * len(headers)
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHH", 2, 62, 1, 0, 64, 0, 0, 64, 56, len(headers)
    )
    table, data = b"", b""
    for kind, contents in headers:
        table += struct.pack("<IIQQQQQQ", kind, 4, at + len(data), 0, 0, len(contents), len(contents), 1)
        data += contents
    return head.ljust(64, b"\0") + table + data


def test_dynamic_linkers(tmp_path: Path) -> None:
    def of(contents: bytes) -> str | None:
        return programs.linker(executable(tmp_path / "program", contents))

    assert of(elf((1, b"code"), (3, b"/lib/ld-x.so.2\0"))) == "/lib/ld-x.so.2"
    assert of(elf((1, b"code"))) == ""
    assert of(b"#!/bin/sh\n" * 10) is None
    assert of(b"") is None
    whole = elf((1, b"code"), (3, b"/lib/ld-x.so.2\0"))
    for n in range(len(whole)):
        assert of(whole[:n]) in (None, "", *("/lib/ld-x.so.2"[:i] for i in range(15)))
    with pytest.raises(ValueError, match="offset"):
        of(whole[:32] + b"\xff" * 8 + whole[40:])
    programs.check("llama-cli", tmp_path / "program", tmp_path / "lib", {})  # left to the system


def test_programs_with_a_llama_cpp_of_their_own(tmp_path: Path) -> None:
    def check(name: str, contents: bytes) -> None:
        programs.check(name, executable(tmp_path / name, contents), tmp_path / "lib", os.environ)

    static = elf((1, b"code"))
    with pytest.raises(
        SubkvError, match="expected a program that loads .*libllama.so, found .*llama-server, which"
    ) as at:
        check("llama-server", static)
    assert "contains its own llama.cpp" in at.value.reason and GET in at.value.reason
    check("tool", static)
    check("llama-server", b"#!/bin/sh\n")
    check("llama-server", elf((3, b"/lib/ld-musl-x86_64.so.1\0")))  # its linker cannot be queried


@pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("cc"), reason="a C compiler and Linux's linker: not here"
)
def test_programs_that_load_another_libllama(tmp_path: Path) -> None:
    def build(path: Path, source: str, *flags: str | Path) -> Path:
        path.parent.mkdir(exist_ok=True)
        command = ["cc", "-x", "c", "-", "-o", path, *flags]
        subprocess.run(list(map(str, command)), input=source, text=True, check=True)
        return path

    ours, theirs = (
        build(
            tmp_path / name / "libllama.so",
            "int llama(void) { return 0; }",
            "-shared",
            "-fPIC",
            "-Wl,-soname,libllama.so",
        )
        for name in ("ours", "theirs")
    )
    main = "int llama(void); int main(void) { return llama(); }"
    search = {"LD_LIBRARY_PATH": str(ours.parent)}

    def program(name: str, *flags: str) -> Path:
        return build(tmp_path / name, main, "-x", "none", "-L", ours.parent, "-lllama", *flags)

    for name in ("llama-tool", "tool"):
        path = program(name)
        programs.check(name, path, ours.parent, search)
        programs.check(name, path, ours.parent, {})  # the program finds none, and reports it
        path = program(name, "-Wl,--disable-new-dtags", f"-Wl,-rpath,{theirs.parent}")
        with pytest.raises(SubkvError, match=f"which loads libllama.so from {theirs}") as at:
            programs.check(name, path, ours.parent, search)
        assert (GET in at.value.reason) == (name == "llama-tool")
    plain = build(tmp_path / "plain", "int main(void) { return 0; }")
    programs.check("plain", plain, ours.parent, search)
    with pytest.raises(SubkvError, match="which contains its own llama.cpp"):
        programs.check("llama-plain", plain, ours.parent, search)
