"""Sensitivities of `convert MODEL`: measured, interrupted, resumed, refused, within their time."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from each import each
from preparing import left, run
from refused import REASONS, unreadable

from converter import builtin, sensitivity_stage, sensitivity_trials
from converter.cli import main as convert
from converter.decoded_chunk import Unpredictable
from converter.resume import SAVED
from converter.sensitivity_stage import tokens_to_decode
from converter.sensitivity_trials import (
    FULL,
    LARGE,
    LEAST,
    REDUCED,
    VERSION,
    Measurements,
    SensitivityTrials,
    n_trials,
    scope_of,
)
from converter.session import Session
from runtime import cli
from subkv.base.errors import SubkvError
from subkv.engine.cache import choose_cache
from subkv.format.metadata import read
from subkv.native.bases import sidecar_folder

Models = Callable[..., Path]
SENSED = ["-c", "320", "--chunks", "4", "-t", "1", "--n-recent", "16"]  # of SMALL's chunks none is long enough


@pytest.fixture
def model(tiny_model: Models, tmp_path: Path) -> Path:
    return Path(shutil.copy(tiny_model(), tmp_path / "m.gguf"))


def test_sensitivities_are_measured(model: Path, cache_home: Path) -> None:
    result = CliRunner().invoke(convert, [str(model), *SENSED])
    assert result.exit_code == 0, result.output
    assert "predicted KLD: " in result.stdout
    assert read(choose_cache(model).layout or Path())["basis_k"] == "kld-aware"
    shown = CliRunner().invoke(cli.main, ["inspect", str(model), "-c", "32768"])
    assert shown.exit_code == 0, shown.output
    assert "a context of 32768 tokens takes " in shown.stdout
    assert re.search(r"of them for the exact window and bases, which take \S+ MiB at any length", shown.stdout)
    assert re.search(r"predicted KLD: \S+ nats per token, .*q8_0's", shown.stdout)
    fit = r"\d+ MiB of memory are available: all \d+ tokens of the trained context fit beside the weights"
    assert re.search(fit, shown.stdout)
    assert left(cache_home) == ["calib.safetensors", "gguf", "lock"]


def test_less_of_a_large_model_is_decoded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scope_of(LARGE) == FULL and scope_of(LARGE + 1) == REDUCED
    assert n_trials(2) == n_trials(2, REDUCED)
    assert n_trials(32) == 2 + 2 * 3 + 24 == n_trials(32, REDUCED) + 24 - REDUCED.layers
    far = [512] * 5 + [REDUCED.far] * 2
    assert tokens_to_decode([512] * 5 + [2048] * 2, 32) > tokens_to_decode(far, 32, scope=REDUCED)
    made, scopes = SensitivityTrials.__init__, []

    def noted(self: SensitivityTrials, *args: Any) -> None:
        made(self, *args)
        scopes.append(self.scope)

    monkeypatch.setattr(SensitivityTrials, "__init__", noted)
    monkeypatch.setattr(sensitivity_trials, "LARGE", 1)
    assert CliRunner().invoke(convert, [str(model), *SENSED]).exit_code == 0
    assert scopes == [REDUCED]


def test_no_chunk_is_longer_than_the_trained_context(tiny_model: Models) -> None:
    result = CliRunner().invoke(convert, [str(tiny_model("gpt2")), "--chunks", "2", "-t", "1"])
    assert result.exit_code == 0, result.output
    assert "chunks of 512 tokens (trained context) instead of 2048" in result.stderr


def test_chunks_too_short_for_sensitivities(model: Path) -> None:
    result = run(model)
    assert "no sensitivities: expected chunks of at least 276 tokens with this exact window, found 128" in result.stderr


def test_a_text_too_short_for_sensitivities(model: Path, tmp_path: Path) -> None:
    for n, why in (
        (6, "short.txt: expected at least 320 tokens for a chunk, found "),
        (28, "they need at least 2 chunks "),
    ):
        (tmp_path / "short.txt").write_text("Some words of text. " * n)
        result = CliRunner().invoke(convert, [str(model), *SENSED, "-f", str(tmp_path / "short.txt")])
        assert result.exit_code == 0, result.output
        assert f"no sensitivities: {why}" in result.stderr


def test_interrupted_sensitivities_go_on(model: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt, tried = SensitivityTrials._try, []

    def pressed(self: SensitivityTrials, chunk: Any, c: int, i: int, side: str) -> int:
        tried.append((c, i, side))
        if len(tried) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return attempt(self, chunk, c, i, side)

    monkeypatch.setattr(SensitivityTrials, "_try", pressed)
    result = CliRunner().invoke(convert, [str(model), *SENSED])
    assert result.exit_code == 130
    assert left(cache_home) == ["calib.safetensors", "calib.safetensors.16.sensing.npz", "lock"]
    result = CliRunner().invoke(convert, [str(model), *SENSED])
    assert result.exit_code == 0, result.output
    assert "resuming after 4 of 6 sensitivities" in result.stderr  # two of them measure rounding
    assert sorted(tried) == sorted(set(tried)), "nothing is measured twice"
    assert len(tried) == 4
    assert left(cache_home) == ["calib.safetensors", "gguf", "lock"]


@pytest.mark.parametrize(("n_tried", "enough"), [(2, False), (5, True)])
def test_no_minutes_after_interrupted_sensitivities(
    n_tried: int, enough: bool, tiny_model: Models, cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--minutes 0 uses what an interrupted run measured and decodes nothing; a run without a limit does the rest."""
    attempt, tried = SensitivityTrials._try, []

    def pressed(self: SensitivityTrials, chunk: Any, c: int, i: int, side: str) -> int:
        tried.append((c, i, side))
        if len(tried) == n_tried:
            os.kill(os.getpid(), signal.SIGINT)
        return attempt(self, chunk, c, i, side)

    monkeypatch.setattr(SensitivityTrials, "_try", pressed)
    command = [str(tiny_model(n_layer=4)), *SENSED]
    assert CliRunner().invoke(convert, command).exit_code == 130
    with monkeypatch.context() as patch:
        patch.setattr(Session, "decode", None)
        result = CliRunner().invoke(convert, [*command, "--minutes", "0"])
    assert result.exit_code == 0, result.output
    assert ("predicted KLD: " in result.stdout) == enough
    expected = f"{n_tried + 2} of 9 sensitivities; predictions are not corrected"  # two trials measure rounding
    assert (expected if enough else "no sensitivities: an interrupted run measured 4, 6 are needed") in result.stderr
    result = CliRunner().invoke(convert, command)
    assert result.exit_code == 0, result.output
    assert sorted(tried) == sorted(set(tried)) and len(tried) == 7
    assert left(cache_home) == ["calib.safetensors", "gguf", "lock"]


def test_interrupted_corrections_resume(model: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C during the correction of predictions, measurements are kept and not repeated."""
    cost, attempt, pressed, tried = sensitivity_stage._cost, SensitivityTrials._try, [], []

    def pressing(*arguments: Any) -> float:
        if not pressed:
            os.kill(os.getpid(), signal.SIGINT)
        pressed.append(arguments)
        return cost(*arguments)

    def counted(self: SensitivityTrials, chunk: Any, c: int, i: int, side: str) -> int:
        tried.append((c, i, side))
        return attempt(self, chunk, c, i, side)

    monkeypatch.setattr(sensitivity_stage, "_cost", pressing)
    monkeypatch.setattr(SensitivityTrials, "_try", counted)
    result = CliRunner().invoke(convert, [str(model), *SENSED])
    assert result.exit_code == 130
    assert SAVED in result.stderr and len(pressed) == 1, "at the next tokens, not at the end"
    assert left(cache_home) == ["calib.safetensors", "calib.safetensors.16.sensing.npz", "lock"]
    result = CliRunner().invoke(convert, [str(model), *SENSED])
    assert result.exit_code == 0, result.output
    assert "resuming after 6 of 6 sensitivities" in result.stderr and "predicted KLD" in result.stdout
    assert len(tried) == 4, "nothing is measured twice"
    assert left(cache_home) == ["calib.safetensors", "gguf", "lock"]


def test_sensitivities_of_other_chunks_are_measured_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an earlier version kept them."""
    assert CliRunner().invoke(convert, [str(model), *SENSED, "--minutes", "1e-9"]).exit_code == 0
    (kept,) = sidecar_folder().glob("*.sensing.npz")
    with np.load(kept) as arrays:
        old = {name: arrays[name] for name in arrays if name not in ("lengths", "done", "entered")}
    np.savez(kept, **old)
    result = CliRunner().invoke(convert, [str(model), *SENSED])
    assert result.exit_code == 0, result.output
    sentence = f"note: {kept} cannot be resumed (expected chunks of 320, 320"
    assert sentence in result.stderr and "predicted KLD" in result.stdout


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
def test_work_that_others_can_write_to_is_done_again(model: Path) -> None:
    assert CliRunner().invoke(convert, [str(model), *SENSED, "--minutes", "1e-9"]).exit_code == 0
    (kept,) = sidecar_folder().glob("*.sensing.npz")
    kept.chmod(0o666)
    result = CliRunner().invoke(convert, [str(model), *SENSED])
    sentence = "expected a file that only this user can write to, found mode 0666 (chmod go-w)"
    assert f"note: {kept} cannot be resumed ({sentence})" in result.stderr and "predicted KLD" in result.stdout
    (calibration,) = sidecar_folder().glob("*.calib.safetensors")
    calibration.chmod(0o666)
    result = CliRunner().invoke(convert, [str(model), *SENSED])
    assert f"note: {calibration} cannot be used (calibration: expected a path that only this user" in result.stderr
    assert "predicted KLD" in result.stdout


@pytest.mark.parametrize(("version", "found"), [(None, "none"), (VERSION + 1, VERSION + 1)])
def test_sensitivities_of_another_version_are_measured_again(
    model: Path, monkeypatch: pytest.MonkeyPatch, version: int | None, found: Any
) -> None:
    """Neither resumed, nor believed that there was no more time or that nothing can be predicted."""
    assert CliRunner().invoke(convert, [str(model), *SENSED, "--minutes", "1e-9"]).exit_code == 0
    (kept,) = sidecar_folder().glob("*.sensing.npz")
    with np.load(kept) as arrays:
        other = {name: arrays[name] for name in arrays if name != "version"}
    other["refused"] = np.array("it says the same")
    np.savez(kept, **other, **({} if version is None else {"version": np.array(version)}))
    result = CliRunner().invoke(convert, [str(model), *SENSED, "--minutes", "1e-9"])
    assert result.exit_code == 0, result.output
    sentence = f"note: {kept} cannot be resumed (expected measurements of version {VERSION}, found {found}); "
    assert sentence in result.stderr and "it says the same" not in result.stderr
    assert "there was time for" in result.stderr and "an earlier run had time for" not in result.stderr


@pytest.mark.parametrize("error", [b"PK no archive", IndexError, TypeError])
def test_damaged_sensitivities_are_measured_again(error: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CliRunner().invoke(convert, [str(model), *SENSED, "--minutes", "0"]).exit_code == 0
    (calibration,) = sidecar_folder().glob("*.calib.safetensors")
    kept = calibration.with_name(f"{calibration.name}.16.sensing.npz")
    if isinstance(error, bytes):
        kept.write_bytes(error)
    else:
        values = {"minutes": 0.0, "version": VERSION, "lengths": [320] * builtin.MEASURED}
        np.savez(kept, **{name: np.array(value) for name, value in values.items()})
        monkeypatch.setattr(Measurements, "restored", classmethod(lambda *_: (_ for _ in ()).throw(error("damaged"))))
    result = CliRunner().invoke(convert, [str(model), *SENSED])
    assert result.exit_code == 0, result.output
    why = "" if isinstance(error, bytes) else "(damaged)"
    assert f"cannot be resumed {why}" in result.stderr and "predicted KLD" in result.stdout


@each("kind", ["calib.safetensors", "sensing.npz"])
@each("reason", REASONS)
def test_work_that_cannot_be_read_now(kind: str, reason: str, model: Path) -> None:
    """The run ends with the system's reason, and nothing is measured again or replaced."""
    assert CliRunner().invoke(convert, [str(model), *SENSED, "--minutes", "1e-9"]).exit_code == 0
    before = {path: path.read_bytes() for path in sidecar_folder().iterdir()}
    error = REASONS[reason]
    with unreadable(lambda path: path.name.endswith(kind), error):
        result = CliRunner().invoke(convert, [str(model), *SENSED])
    assert result.exit_code == 1
    (path,) = (path for path in before if path.name.endswith(kind))
    assert f"cannot read {path}: {os.strerror(error)}" in result.stderr
    assert "again" not in result.stderr
    after = {path: path.read_bytes() for path in sidecar_folder().iterdir()}
    assert {path: data for path, data in before.items() if path.suffix != ".lock"}.items() <= after.items()


def test_minutes_are_a_budget(tiny_model: Models, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt, tried = SensitivityTrials._try, []

    def counted(self: SensitivityTrials, chunk: Any, c: int, i: int, side: str) -> int:
        tried.append((c, i, side))
        return attempt(self, chunk, c, i, side)

    monkeypatch.setattr(SensitivityTrials, "_try", counted)
    command = [str(tiny_model(n_layer=4)), *SENSED]
    for note in (f"there was time for {LEAST} of 9 sensitivities", "an earlier run had time for"):
        result = CliRunner().invoke(convert, [*command, "--minutes", "1e-9"])
        assert result.exit_code == 0, result.output
        assert len(tried) == LEAST - 2  # two trials measure rounding
        assert "predicted KLD: " in result.stdout
        assert note in result.stderr
        assert "calib.safetensors.16.sensing.npz" in left(cache_home)
    for _ in range(2):
        result = CliRunner().invoke(convert, command)
        assert result.exit_code == 0, result.output
        assert sorted(tried) == sorted(set(tried)) and len(tried) == 7, "the rest, once"
        assert left(cache_home) == ["calib.safetensors", "gguf", "lock"]


def test_sensitivities_that_fail_are_a_note(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise SubkvError("model", "decoding failed: no reason")

    monkeypatch.setattr(SensitivityTrials, "_try", failing)
    result = CliRunner().invoke(convert, [str(model), *SENSED])
    assert result.exit_code == 0, result.output
    assert "no sensitivities: decoding failed: no reason\n" in result.stderr
    assert "no sensitivities" not in CliRunner().invoke(convert, [str(model), *SENSED, "--minutes", "0"]).stderr


def test_a_model_that_cannot_be_predicted_is_tried_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again only where there is more time than there was."""
    tried = []

    def unpredictable(self: SensitivityTrials, *_: Any) -> None:
        tried.append(self)
        raise Unpredictable("model", "it says the same")

    monkeypatch.setattr(SensitivityTrials, "result", unpredictable)
    again = ", as an earlier run found"
    for minutes, tries, message in (("1e-9", 1, ""), ("1e-9", 1, again), ("9", 2, ""), ("8", 2, again)):
        found = CliRunner().invoke(convert, [str(model), *SENSED, "--minutes", minutes])
        assert found.exit_code == 0, found.output
        assert re.search(rf"no sensitivities{message}.*: it says the same", found.stderr)
        assert len(tried) == tries
    for tries in (3, 3):
        assert CliRunner().invoke(convert, [str(model), *SENSED]).exit_code == 0
        assert len(tried) == tries


#
# kept progress
#
