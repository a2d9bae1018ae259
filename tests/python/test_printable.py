"""Text of files never reaches a terminal unescaped: programs, errors of Python and of libsubkv, logs, bars, plots."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import derived_numpy
import pytest
from calib_synthetic import random_calibration
from click.testing import CliRunner, Result
from each import each
from format import native, writer
from gguf import GGUFValueType

from converter.plots import figure
from runtime import cli, options
from subkv.base import progress
from subkv.base.errors import SubkvError
from subkv.base.text import filled, printable
from subkv.format import store
from subkv.format.calibration import TextSource, write_calibration
from subkv.native.binding import C, captured_log

# sets the title, clears the line, colours; C1's CSI; turns the text's direction; has no width
HOSTILE = "a\x1b]0;x\x07\x1b[2K\x1b[31mb\r\nc\x08\x7f\x9b2Jd\u202ee\u200bf\u2028g\ufeffh"
PLAIN = "plain ü 語 🙂 → “quoted” … \\n"
TEXT = GGUFValueType.STRING


def is_printed(text: str) -> bool:
    """Whether a terminal prints every character; lines end with a line feed."""
    return all(c.isprintable() for c in text.replace("\n", ""))


def run(*arguments: Any, **more: Any) -> Result:
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments], prog_name="subkv", **more)


def test_both_languages_escape_alike() -> None:
    hidden = [*range(1, 32), *range(0x7F, 0xA0), 0xAD, 0x61C, 0x180E, *range(0x200B, 0x2010), *range(0x2028, 0x202F)]
    hidden += [*range(0x2060, 0x2065), *range(0x2066, 0x2070), 0xFEFF, 0xFFF9, 0xE0001, 0xE0041]
    for text in (HOSTILE, PLAIN, *(f"<{chr(code)}>" for code in hidden)):
        with pytest.raises(native.MetadataError) as caught:
            native.load(Path(text))
        assert str(caught.value) == f"{printable(text)}: expected a GGUF file, found no such file"
        assert is_printed(printable(text)) and "\n" not in printable(text)
        assert (printable(text) == text) == (text == PLAIN)
    assert printable("a\nb\tc", keep="\n") == "a\nb\\tc"
    assert printable("\udc80") == "\\udc80"
    with pytest.raises(native.MetadataError, match=r"^<\\xff\\xc3>: expected"):  # not UTF-8
        native.load(Path("<\udcff\udcc3>"))


def hostile_layouts() -> dict[str, writer.Keys]:
    """Files whose texts are hostile: valid ones first, then one per key that is refused for its text."""
    keys = writer.metadata(writer.random_layers())
    good = keys | {f"subkv.{name}": (TEXT, HOSTILE) for name in ("arch", "calibration.text", "generator")}
    good |= {"general.architecture": (TEXT, HOSTILE), "general.name": (TEXT, HOSTILE)}
    files = {"valid": writer.sealed(good)}
    for key, (kind, value) in keys.items():
        if kind == TEXT and key not in ("subkv.calibration.text", "subkv.generator"):
            files[key] = keys | {key: (kind, HOSTILE if "layout" not in key else value.replace('"il"', f'"{HOSTILE}"'))}
    files["adapt"] = writer.sealed(keys | {"subkv.adapt": (TEXT, HOSTILE)})
    files["a basis"] = writer.sealed(keys) | {f"subkv.blk.{HOSTILE}.basis": (TEXT, "")}
    files["twice"] = keys
    return files


@each("name", hostile_layouts())
@each("flags", [[], ["--bands"], ["-v"], ["-o", "json"], ["-c", "512"]])
def test_inspect(name: str, flags: list[str], tmp_path: Path) -> None:
    path = writer.write(tmp_path / "a.gguf", hostile_layouts()[name])
    result = run("inspect", path, *flags)
    assert is_printed(result.output), result.output
    valid = name in ("valid", "twice", "adapt")
    assert result.exit_code == (0 if valid else 1)
    if valid and name == "valid" and not flags:
        assert printable(HOSTILE) in result.stdout and len(result.stdout.splitlines()) < 20
    if not valid:
        assert result.stderr.count("\n") == 1 and "found" in result.stderr


@each("name", hostile_layouts())
def test_errors_of_a_cache(name: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Of Python and of libsubkv, which names the file's architecture beside the model's."""
    path = writer.write(tmp_path / "a.gguf", hostile_layouts()[name])
    result = run("chat", "-m", tiny_model("llama"), "--bases", path, "-p", "Hi", "-st", "-n", "1", "-c", "128")
    assert result.stderr and is_printed(result.stderr), result.stderr  # stdout is the model's answer


def hostile_calibration(path: Path) -> Path:
    texts = (TextSource(HOSTILE, "0" * 64, 5),)
    made = random_calibration(1, arch="llama", name=HOSTILE, generator=HOSTILE, texts=texts)
    write_calibration(path, made)
    return path


def test_plots_and_calibrations(tmp_path: Path) -> None:
    calibration = hostile_calibration(tmp_path / "calib.safetensors")
    layout = writer.write(tmp_path / "a.gguf", hostile_layouts()["valid"])
    results = tmp_path / "results.json"
    row = {"name": HOSTILE, "bpe": 4.5, "mean_kld": 0.01, "mean_kld_stderr": 0.001, "text": HOSTILE, "n_ctx": 512}
    results.write_text(json.dumps([row]))
    pytest.importorskip("matplotlib")
    for arguments in (
        ("inspect", layout, "--bases", calibration, "--plot", tmp_path / "a.png"),
        ("lab", "plot", calibration, "-o", tmp_path / "b.png"),
        ("lab", "plot", results, "-o", tmp_path / "c.svg"),
        ("convert", layout, "--bases", calibration, "-o", tmp_path / "d.gguf"),
    ):
        result = run(*arguments)
        assert is_printed(result.output), result.output
    drawn = (tmp_path / "c.svg").read_text()
    assert is_printed(drawn) and "\x1b" not in drawn
    assert figure.plain(f"$x${HOSTILE}") == rf"\$x\${printable(HOSTILE)}"


def test_names_in_the_cache_folder(cache_home: Path, tiny_model: Callable[..., Path]) -> None:
    folder = cache_home / "subkv" / "sidecars"
    folder.mkdir(parents=True)
    name = HOSTILE.replace("/", "")
    (folder / f"{name}-{'0' * 12}.gguf").write_bytes(b"x" * 100)
    for flags in ([], ["-o", "json"], ["--clear-cache"]):
        result = run("doctor", *flags, input="n\n")
        assert is_printed(result.output), result.output


def test_a_sidecar_that_a_program_finds(cache_home: Path, tiny_model: Callable[..., Path]) -> None:
    """Its name in the store is in the line about the bases."""
    model = tiny_model("llama")
    stored = store.entry(model)
    stored.prepare()
    derived_numpy.sidecar(
        model, stored.sidecar.with_name(f"{HOSTILE}{stored.sidecar.name[-len('-0123456789ab.gguf') :]}")
    )
    for arguments in (("chat", "-m", model, "-ctk", "subkv", "-p", "Hi", "-st", "-n", "1"), ("inspect", model)):
        result = run(*arguments)
        assert printable(HOSTILE) in result.stderr or arguments[0] == "chat"
        assert result.stderr and is_printed(result.stderr), result.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@each(
    "arguments",
    [("inspect", "a missing model.gguf"), ("chat", "--bits", "4"), ("chat", "-c", "no"), ("chat", "x", "-m", "y")],
)
def test_errors_wrap_at_words(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    plain, terminal = run(*arguments).stderr, Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(SystemExit):
        cli.main(list(arguments), prog_name="subkv")
    lines = terminal.getvalue().splitlines()
    assert lines and all(len(line) <= 40 or " " not in line for line in lines)
    assert terminal.getvalue().split() == plain.split()


def test_commands_stay_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied; a stream without isatty() is no terminal."""
    monkeypatch.setenv("COLUMNS", "40")
    text = "install it: `CMAKE_ARGS='-DA=1 -DB=2' pip install .` or 'a b c'; the model's words wrap"
    lines = filled(text, Terminal()).split("\n")
    assert len(lines) > 1 and "`CMAKE_ARGS='-DA=1 -DB=2' pip install .`" in lines
    assert any("'a b c'" in line for line in lines) and " ".join(lines) == text
    assert filled(text, object()) == filled(text, None) == text


def test_errors_notes_and_logs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(SubkvError(HOSTILE, HOSTILE)) == f"{printable(HOSTILE)}: {printable(HOSTILE)}"
    options.note(HOSTILE)
    progress.note(HOSTILE)
    assert capsys.readouterr().err == 2 * f"{printable(HOSTILE)}\n"
    with captured_log(forward=True):
        assert not C.llama_model_load_from_file(f"/none/{HOSTILE}".encode(), C.llama_model_default_params())
    logged = capsys.readouterr().err
    assert "/none/a\\x1b]0;x" in logged and all(c.isprintable() or c in "\n\t" for c in logged)

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "DELAY", 0.0)
    with progress.progress_bar(HOSTILE, 3, "B") as bar:
        bar.update(1)
        bar.refresh()
    with progress.overall({}), progress.progress_bar(HOSTILE, 3, "B") as bar:
        bar.update(1)
    for hidden in set(HOSTILE) - set(printable(HOSTILE)) - {"\r", "\n", "\x1b"}:  # a bar itself moves the cursor
        assert hidden not in terminal.getvalue()
    assert printable(HOSTILE) in terminal.getvalue()
    monkeypatch.setenv("COLUMNS", "40")
    terminal.truncate(0)
    path = "/models/" + "long" * 12 + "-name.gguf"
    options.note(f"bases: of {path}, 4.25 bits per element at 8192 tokens")
    lines = terminal.getvalue().lstrip("\0").splitlines()
    assert lines == ["bases: of", f"{path},", "4.25 bits per element at 8192 tokens"]
