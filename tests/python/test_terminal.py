"""The chat's input: the editor and the plain terminal in a pseudo-terminal, and their parts."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from each import each

from runtime.chat import terminal
from runtime.chat.cli import command_of
from runtime.chat.completer import Completer
from subkv.base import container

pexpect = pytest.importorskip("pexpect")
pytest.importorskip("prompt_toolkit")

Models = Callable[..., Path]
REPO = Path(__file__).resolve().parents[2]
ENTER, ALT_ENTER, TAB, UP, CTRL_C, CTRL_D = "\r", "\x1b\r", "\t", "\x1b[A", "\x03", "\x04"
INPUT_ENDS = "\x1b[?2004l"  # no more bracketed paste
READY = r"\[ Prompt: .*\]"


def pasted(text: str) -> str:
    """The bytes that a terminal sends for a pasted text."""
    return f"\x1b[200~{text}\x1b[201~"


@pytest.fixture(params=["editor", "plain"])
def chat(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """chat("-m", path): the program in a pseudo-terminal, in the folder tmp_path, at its first prompt."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")]),
        "PYTHONUTF8": "1",
        "TERM": "xterm",
        "PROMPT_TOOLKIT_NO_CPR": "1",  # this terminal does not report the cursor position
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    simple = ["--simple-io"] if request.param == "plain" else []
    running = []

    def start(*arguments: Any) -> Any:
        command = ["-m", "runtime.chat", "--temp", "0", *simple, *map(str, arguments)]
        child = pexpect.spawn(
            sys.executable, command, encoding="utf-8", timeout=30, cwd=tmp_path, env=environment, dimensions=(40, 120)
        )
        running.append(child)
        child.expect_exact("/help lists the commands")
        child.expect_exact(">")
        return child

    yield start
    for child in running:
        child.close(force=True)


def messages(path: Path) -> list[str]:
    """The user's messages in a conversation written by /save."""
    saved = container.read(path, "/save").head["messages"]
    return [message["content"] for message in saved if message["role"] == "user"]


def test_a_session_and_the_next(
    chat: Callable[..., Any], coded_model: Models, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "some notes.txt").write_text("what the notes say")
    child = chat("-m", coded_model(), "-c", 1024, "-n", 5)
    editor = "editor" in request.node.callspec.id
    expected = ["first\nsecond", "pasted\ntext"]
    child.send("first\\" + ENTER)
    child.send("second" + ENTER)
    child.expect(READY)
    child.send(pasted("pasted\ntext"))
    child.send(ENTER)
    child.expect(READY)
    if editor:
        child.send("upper" + ALT_ENTER + "lower" + ENTER)
        child.expect(READY)
        expected.append("upper\nlower")
    child.send("/stat" + TAB + ENTER)
    child.expect("fingerprint")
    child.send("/read some" + TAB + ENTER)
    child.expect_exact("some notes.txt: ")
    child.expect("tokens go in front of the next message")
    child.send("go" + ENTER)
    child.expect(READY)
    child.send("/save first" + ENTER)
    child.expect("saved [0-9]+ cells")
    assert messages(tmp_path / "first") == [*expected, "what the notes say\n\ngo"]
    child.send("/bye" + ENTER)
    child.expect(pexpect.EOF)
    assert child.wait() == 0

    child = chat("-m", coded_model(), "-c", 1024, "-n", 5)
    for _ in range(3):  # past /bye and /save to the last message
        child.send(UP)
    child.send(ENTER)
    child.expect(READY)
    child.send("/save second" + ENTER)
    child.expect("saved [0-9]+ cells")
    assert messages(tmp_path / "second") == ["go"]
    child.send(CTRL_D)
    child.expect(pexpect.EOF)
    assert child.wait() == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "state" / "subkv").iterdir())


def test_ctrl_c_stops_the_turn_and_twice_the_program(
    chat: Callable[..., Any], tiny_model: Models, tmp_path: Path
) -> None:
    (tmp_path / "long").write_text("word and word again " * 3000)  # half a minute even for a tiny model
    child = chat("-m", tiny_model(), "-c", 65536, "-b", 64, "-t", 1)
    child.send("/read long" + ENTER)
    child.expect("long: 39000 tokens")
    child.expect_exact(">")
    child.send("go" + ENTER)
    child.expect_exact(INPUT_ENDS)
    time.sleep(1)  # nothing shows when reading begins
    child.send(CTRL_C)
    child.expect_exact("stopped")
    child.expect_exact(">")
    child.send("half a mess" + CTRL_C)
    child.expect_exact("Ctrl-C again or /exit leaves")
    child.expect_exact(">")
    child.send("/stats" + ENTER)
    child.expect("tokens +0 of 65536")
    child.expect_exact(">")
    child.send(CTRL_C)
    child.expect_exact("Ctrl-C again or /exit leaves")
    child.expect_exact(">")
    child.send(CTRL_C)
    child.expect(pexpect.EOF)
    assert child.wait() == 0


def test_a_history_that_cannot_be_written_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert terminal.history_file("chat_history") is None
    assert capsys.readouterr().err.startswith("XDG_STATE_HOME: the message history is not saved: cannot write ")


def test_no_editor_without_its_library_or_a_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert terminal.has_editor()
    monkeypatch.setenv("TERM", "dumb")
    assert not terminal.has_editor()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setitem(sys.modules, "prompt_toolkit.utils", None)
    assert not terminal.has_editor()


def test_completion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a folder").mkdir()
    for name in ("a folder/one", "a folder/two", "about", ".hidden"):
        (tmp_path / name).touch()
    lines = Completer(["/stats", "/save", "/read"], ["/save", "/read"]).lines
    assert lines("/s") == ["/save", "/stats"]
    assert lines("/read a") == ["/read a folder/", "/read about"]
    assert lines("/read a folder/t") == ["/read a folder/two"]
    assert lines("/read ~/a folder/o") == ["/read ~/a folder/one"]
    assert lines(f"/save {tmp_path}/ab") == [f"/save {tmp_path}/about"]
    assert lines("/read .h") == ["/read .hidden"]
    assert lines("/read ") == ["/read a folder/", "/read about"]
    for nothing in ("/stats a", "hello", "", "/read none/", "/read ~nobody-of-that-name/", "/x", "text\n/s"):
        assert lines(nothing) == []


@each(
    ("text", "command"),
    [
        ("/read my file ", ("/read", "my file")),
        (" /exit", ("/exit", "")),
        ("/nonsense", ("/nonsense", "")),
        ("/usr/bin is a folder", (None, "bin is a folder")),
        ("/read this\nand that", (None, "this\nand that")),
        ("hello", (None, "")),
    ],
)
def test_commands_and_messages(text: str, command: tuple[str | None, str]) -> None:
    assert command_of(text)[0] == command[0]
    if command[0]:
        assert command_of(text) == command


@each(
    ("width", "pieces", "expected"),
    [
        (None, ["one two", " three"], "one two three\n"),
        (10, ["one t", "wo th", "ree four"], "one two \nthree four\n"),
        (10, ["one\n\nt", "wo three four"], "one\n\ntwo three \nfour\n"),
        (5, ["a longer-than-the-line word"], "a \nlonger-than-the-line \nword\n"),
        (6, ["日本", "語 日本"], "日本語 \n日本\n"),
        (8, ["  indented", " text"], "  \nindented \ntext\n"),
        (10, [], "\n"),
    ],
)
def test_words_stay_whole(
    capsys: pytest.CaptureFixture[str], width: int | None, pieces: list[str], expected: str
) -> None:
    output = terminal.WordWrap(width)
    for piece in pieces:
        output.write(piece)
    output.end()
    assert capsys.readouterr().out == expected
