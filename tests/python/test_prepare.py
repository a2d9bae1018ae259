"""`convert MODEL` without options: its files, bases that programs find, resuming after an interrupt, and all errors."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from each import each
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from preparing import left, refused, run

import subkv
from converter import builtin, resume, stored_calibration
from converter.cli import main as convert
from converter.corpus import Corpus, Text
from converter.request import CalibrationRequest
from converter.resume import SAVED
from converter.sensitivity_stage import tokens_to_decode
from converter.sensitivity_trials import FULL, REDUCED, Scope
from converter.session import Session
from runtime import cli
from subkv.base.errors import SubkvError
from subkv.base.locks import exclusive
from subkv.engine import memory
from subkv.engine.cache import choose_cache
from subkv.format import store
from subkv.format.calibration import TextSource
from subkv.format.metadata import read
from subkv.native import gguf
from subkv.native.bases import sidecar_folder
from subkv.native.binding import C
from subkv.native.gguf import Gguf

Models = Callable[..., Path]


@pytest.fixture
def model(tiny_model: Models, tmp_path: Path) -> Path:
    return Path(shutil.copy(tiny_model(), tmp_path / "m.gguf"))


def test_one_command_prepares(model: Path, cache_home: Path, tmp_path: Path) -> None:
    result = run(model)
    assert result.exit_code == 0, result.output
    choice = choose_cache(model)
    assert f"wrote {choice.layout}\n" in result.stdout
    assert f"subkv chat -m {model}" in result.stdout
    assert left(cache_home) == ["calib.safetensors", "gguf", "lock"]
    assert list(tmp_path.iterdir()) == [model], "nothing beside the model"
    assert choice.layout is not None
    assert read(choice.layout)["calibration"]["text"].startswith("built-in ")
    with subkv.Llama(model, n_ctx=256, verbose=False) as llm:
        assert llm.kv_stats().n_layer_coded == 2


@pytest.mark.parametrize("flags", [[], ["--embed"], ["--sidecar"]])
def test_the_model_is_opened_and_loaded_once(
    flags: list[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By all stages together, with sensitivities; and its bytes are hashed once."""
    opened, loaded, hashed = [], [], []
    open_one, load, blocks = Gguf._open, C.llama_model_load_from_file, gguf.blocks

    def counted_open(self: Gguf, path: Path) -> tuple[int, int]:
        if path == model:
            opened.append(path)
        return open_one(self, path)

    def counted_load(path: bytes, params: Any) -> Any:
        loaded.append(path)
        return load(path, params)

    def counted_blocks(files: list[Path], what: str, progress: bool) -> Any:
        hashed.append(what)
        return blocks(files, what, progress)

    monkeypatch.setattr(Gguf, "_open", counted_open)
    monkeypatch.setattr(C, "llama_model_load_from_file", counted_load)
    monkeypatch.setattr(gguf, "blocks", counted_blocks)
    arguments = [str(model), "-c", "320", "-t", "1", "--n-recent", "16", *flags]
    result = CliRunner().invoke(convert, arguments)
    assert result.exit_code == 0, result.output
    assert "predicted KLD" in result.stdout
    assert opened == [model]
    assert loaded == [os.fsencode(model)]
    assert hashed == ["hashing m.gguf", *(["writing m.subkv.gguf"] if "--embed" in flags else [])]


def test_another_budget_needs_no_calibration(model: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(model).exit_code == 0
    monkeypatch.setattr("converter.stored_calibration.collect_statistics", None)
    result = run(model, "--kv-bits", 5)
    assert result.exit_code == 0, result.output
    assert "by an earlier run" in result.stderr
    assert read(choose_cache(model).layout or Path())["bits_per_element"] == pytest.approx(5, abs=0.1)
    assert left(cache_home) == ["calib.safetensors", "gguf", "lock"]


def test_other_settings_replace_the_calibration(model: Path, text_file: Path, cache_home: Path) -> None:
    assert run(model).exit_code == 0
    result = run(model, "-f", text_file)
    assert result.exit_code == 0, result.output
    assert "earlier run" not in result.stderr
    assert read(choose_cache(model).layout or Path())["calibration"]["text"] == "topics.txt"
    assert left(cache_home) == ["calib.safetensors", "gguf", "lock"]


@pytest.mark.parametrize(
    ("flags", "name", "n_tensors"),
    [
        (["--embed"], "m.subkv.gguf", 21),
        (["-o", "mine.gguf"], "mine.gguf", 21),
        (["--sidecar"], "m.subkv-sidecar.gguf", 0),
        (["--sidecar", "-o", "mine.gguf"], "mine.gguf", 0),
    ],
)
def test_files_on_request(
    flags: list[str], name: str, n_tensors: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    assert run(model, *flags).exit_code == 0
    path = model.with_name(name)
    assert len(GGUFReader(path).tensors) == n_tensors
    assert not list(sidecar_folder().glob("*.gguf")), "one place, not two"
    refused(
        run(model, *flags),
        f"-o: expected a file that does not exist yet, found {path if '-o' not in flags else name}; -y",
    )
    assert run(model, *flags, "-y").exit_code == 0


def test_dry_run_keeps_the_calibration(model: Path, cache_home: Path) -> None:
    result = run(model, "--dry-run")
    assert result.exit_code == 0, result.output
    assert "dry run: no bases were written; the calibration is kept" in result.stdout
    assert left(cache_home) == ["calib.safetensors", "lock"]
    assert choose_cache(model, derive=False).name == "f16"


def test_an_impossible_budget_is_refused_before_the_long_run(model: Path, cache_home: Path) -> None:
    result = run(model, "--kv-bits", "40")
    assert result.exit_code == 1 and "--kv-bits: expected " in result.stderr and "found 40" in result.stderr
    assert not sidecar_folder().exists() or not left(cache_home)


#
# interrupts
#


def test_interrupted_runs_go_on(model: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Session.decode
    n = 0

    def pressed(self: Session, tokens: Any, first_pos: int) -> None:
        nonlocal n
        decode(self, tokens, first_pos)
        n += 1
        if n == 2 + 2:  # two measure the speed
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Session, "decode", pressed)
    result = run(model)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-2:] == [
        SAVED,
        "interrupted: no bases were written",
    ]
    assert left(cache_home) == ["calib.safetensors.000002-of-000004.part", "lock"]
    assert choose_cache(model, derive=False).name == "f16"
    result = run(model.rename(model.with_name("renamed.gguf")))
    assert result.exit_code == 0, result.output
    assert "resuming after 256 of 512 tokens" in result.stderr
    assert n == 4 + 2 + 2 + 2, "two more batches, and the speed, also for sensitivities"
    assert left(cache_home) == ["calib.safetensors", "gguf", "lock"]


def test_killed_runs_leave_nothing_that_is_used(model: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed leaves a lock file with its number, a checkpoint and perhaps a temporary file."""
    entry = store.entry(model)
    entry.prepare()
    lock = entry.lock
    program = "import os, sys, pathlib\nfrom subkv.base.locks import exclusive\n"
    program += "with exclusive(pathlib.Path(sys.argv[1]), ''): os._exit(9)"
    assert subprocess.run([sys.executable, "-c", program, str(lock)], check=False).returncode == 9
    assert lock.read_text().strip().isdigit()
    entry.sidecar.with_name(f".{entry.sidecar.name}.1.abcd.tmp").write_bytes(b"half")
    assert choose_cache(model, derive=False).name == "f16"
    assert run(model).exit_code == 0


def test_two_at_once(model: Path, tmp_path: Path) -> None:
    entry = store.entry(model)
    entry.prepare()
    linked = tmp_path / "other.gguf"
    linked.symlink_to(model)
    with exclusive(entry.lock, "prepare it"):
        expected = f"{linked}: cannot prepare other.gguf: process {os.getpid()} is doing that now"
        refused(run(linked), expected)
        assert choose_cache(model, derive=False).name == "f16", "programs run meanwhile, as before"
    assert run(linked).exit_code == 0


#
# refusals
#


def test_store_that_cannot_be_written(model: Path, cache_home: Path) -> None:
    cache_home.parent.mkdir(parents=True, exist_ok=True)
    cache_home.write_text("")
    refused(run(model), f"XDG_CACHE_HOME: cannot create {sidecar_folder()}: ")
    with subkv.Llama(model, n_ctx=256, verbose=False) as llm:
        assert llm.cache_choice.derived


def test_no_home(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("USERPROFILE" if os.name == "nt" else "HOME", "")
    refused(run(model), "XDG_CACHE_HOME: expected an absolute path, as there is no home folder, found nothing")


def test_full_store(model: Path, cache_home: Path) -> None:
    """A file size limit replaces a full disk."""
    resource = pytest.importorskip("resource")  # not on Windows
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        result = run(model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("XDG_CACHE_HOME: cannot write ")
    assert left(cache_home) == ["lock"]
    assert choose_cache(model, derive=False).name == "f16"


def without_vocabulary(model: Path, path: Path) -> Path:
    """The model less its tokens."""
    reader, writer = GGUFReader(model), GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        if name.startswith("llama."):
            add = writer.add_uint32 if field.types[0] == GGUFValueType.UINT32 else writer.add_float32
            add(name, field.contents())
    writer.add_tokenizer_model("no_vocab")
    writer.add_uint32("llama.vocab_size", int(reader.tensors[0].shape[1]))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_model_without_a_vocabulary(model: Path, tmp_path: Path, text_file: Path) -> None:
    path = without_vocabulary(model, tmp_path / "silent.gguf")
    sentence = "expected a model with a vocabulary of text, found "
    refused(run(path), f"{sentence}")
    for arguments in (["chat", "-p", "Hi", "-st"], ["perplexity", "-f", str(text_file), "-c", "64"]):
        refused(CliRunner().invoke(cli.main, [*arguments, "-m", str(path)]), f"-m: {sentence}")


def test_texts_that_are_too_short(model: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    refused(run(model, "-f", tmp_path / "short.txt"), "-f: short.txt: expected at least 64 tokens, found ")
    assert choose_cache(model, derive=False).name == "f16"


def test_contexts_shorter_than_the_window(model: Path) -> None:
    assert run(model).exit_code == 0
    arguments = ["chat", "-m", str(model), "-p", "Hi", "-st", "-n", "1", "-c", "256", "--n-recent", "300"]
    result = CliRunner().invoke(cli.main, arguments)
    assert "-c: 256 tokens are few beside the exact window of 320: at this size -ctk f16 takes less" in result.stderr


def test_memory_is_refused_with_the_sum(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 1 << 20)
    result = run(model)
    assert result.exit_code == 1
    assert re.match(
        rf"{model}: expected a model that fits in the 1 MiB of memory available, found weights", result.stderr
    )
    assert re.search(r"weights \d+ MiB \+ .* = \d+ MiB$", result.stderr.strip())
    monkeypatch.setenv(memory.FIT, "off")
    assert run(model).exit_code == 0


def test_a_converted_model(model: Path, coded_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("converter.stored_calibration.collect_statistics", None)
    refused(run(coded_model()), "subkv.version: expected a base model without subkv keys, found them in ")


def test_usage(model: Path, calibration: Path, text_file: Path) -> None:
    assert run(model, "--sidecar", "--embed").exit_code == 2
    assert run(model, "--bases", calibration, "-f", text_file).exit_code == 2
    assert run(model, "--bases", calibration, "--minutes", "1").exit_code == 2
    assert run(model, "--minutes", "-1").exit_code == 2


def test_locks_end_with_their_block(tmp_path: Path) -> None:
    for _ in range(2):
        with exclusive(tmp_path / "lock", "do it"):
            found = rf"^lock: cannot do it: process {os.getpid()}"
            with pytest.raises(SubkvError, match=found), exclusive(tmp_path / "lock", "do it"):
                pass


def test_an_estimate_is_printed_first(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "speed", lambda self: 1.0)
    result = run(model)
    assert "calibrating on 512 tokens takes about 9 minutes, at 1 tokens per second" in result.stderr
    assert resume.EVERY <= 60


def test_other_bytes_under_one_digest(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's digest sees samples of the weights only."""
    assert run(model).exit_code == 0
    monkeypatch.setattr("converter.source.sha256", lambda *_, **__: "1" * 64)
    result = run(model)
    assert result.exit_code == 0, result.output
    assert "is of a file with other bytes than " in result.stderr
    assert "earlier run" not in result.stderr


def test_leftovers_are_removed(model: Path, cache_home: Path) -> None:
    assert run(model).exit_code == 0
    (calibration,) = sidecar_folder().glob("*.calib.safetensors")
    old = [calibration.with_name(f"{calibration.name}.99.sensing.npz"), sidecar_folder() / ".x.part.7.01234567.tmp"]
    for path in old:
        path.write_bytes(b"old")
        os.utime(path, (0, 0))
    assert run(model).exit_code == 0
    assert left(cache_home) == ["calib.safetensors", "gguf", "lock"]


def test_every_kind_of_text_is_taken() -> None:
    for n_ctx, n, of in ((128, 16, 128), (2048, 8, 256), (8192, 8, 256)):
        observed = CalibrationRequest(Corpus((), n_ctx, None, 1), 4, 16).observed
        assert (observed.chunks, observed.n_ctx) == (n, of)
    assert 7 * (CalibrationRequest(Corpus((), 2048, None, 1), 4, 16, head_size=256).observed.n_ctx - 4) >= 16 * 256
    observed = CalibrationRequest(Corpus((), 2048, None, 1), 4, 16, short=False).observed
    assert (observed.chunks, observed.n_ctx) == (8, 2048)
    assert len(builtin.read()) > 8


def test_chunks_for_sensitivities_hold_the_exact_window() -> None:
    def lengths(
        n_recent: int, n_ctx: int = 2048, files: tuple[Path, ...] = (), short: bool = True, scope: Scope = FULL
    ) -> list[int]:
        return CalibrationRequest(Corpus(files, n_ctx, None, 1), 4, n_recent, short=short, scope=scope).lengths

    assert lengths(128) == [512] * 5 + [2048] * 2
    assert lengths(128, scope=REDUCED) == [512] * 5 + [REDUCED.far] * 2
    assert lengths(400) == [1056] * 5 + [2048] * 2
    assert lengths(128, short=False) == [1088] * 7 and set(lengths(128, 320)) == {320}
    assert lengths(128, files=(Path("a.txt"),)) == [1088] * 5


def test_settings_have_keys_of_their_own() -> None:
    request = CalibrationRequest(Corpus((Path("a.txt"),), 128, None, 1), 4, 16)

    def text(name: str, data: bytes, special: bool = False) -> Text:
        return Text(TextSource(name, "0" * 64, len(data)), data, special)

    given = [
        [text("a", b"xy")],
        [text("b", b"xy")],
        [text("a", b"xy", True)],
        [text("a", b"x"), text("a", b"y")],
        [text("a", b""), text("a", b"xy")],
    ]
    assert len({request.key(texts) for texts in given}) == len(given)


@pytest.mark.parametrize("ending", ["", ".000002-of-000016.part"])
def test_statistics_alone_use_saved_work(ending: str, model: Path) -> None:
    """--minutes 0 by itself evaluates more tokens for the statistics, but fewer than a run without a limit; and a limit
    must not add work to an earlier run's."""
    whole = CalibrationRequest(Corpus((), 2048, None, 1), 4, 128)
    limited = replace(whole, minutes=0)
    entry = store.entry(model)
    entry.prepare()
    assert stored_calibration._with_saved(limited, None, entry) == limited and not limited.separate
    alone, both = limited.observed, whole.observed
    for scope in (FULL, REDUCED):
        sensing = tokens_to_decode(replace(whole, scope=scope).lengths, 30, scope=scope)
        assert alone.n_ctx * (alone.chunks or 0) < both.n_ctx * (both.chunks or 0) + sensing
    entry.work(f".{whole.key(None)}.calib.safetensors{ending}").touch()
    resumed = stored_calibration._with_saved(limited, None, entry)
    assert resumed.separate and resumed.key(None) == whole.key(None) and resumed.observed == whole.observed
    assert stored_calibration._with_saved(whole, None, entry) == whole


@each("line", ["a.png b.jpg", "-resize 50% in.PNG out.webp", "page.pdf[0] page.svg"])
def test_pictures_are_meant_for_another_program(line: str) -> None:
    result = CliRunner().invoke(convert, line.split())
    assert result.exit_code == 2
    assert "found a picture; this is `subkv convert`" in result.output and "magick" in result.output
