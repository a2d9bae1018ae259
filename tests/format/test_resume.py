"""Interrupted calibrations: the sums of two runs equal those of one, wherever the first run ended."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calib_synthetic import FakeSession, text_bytes
from each import each
from refused import REASONS, unreadable

from converter import resume
from converter.corpus import Text
from converter.resume import Checkpoints
from converter.statistics_stage import plan_batches, plan_chunks, statistics_of
from subkv.base.errors import SubkvError
from subkv.format.calibration import Calibration, TextSource, read_calibration

N_CTX = 600  # two batches


def text(n: int) -> Text:
    return Text(TextSource("a.txt", "0" * 64, n), text_bytes(n))


class Cut:
    """Keeps sums in memory and stops the run after batch `last`, if it may be cut there."""

    def __init__(self, last: int, kept: tuple[int, Calibration | None] = (0, None)) -> None:
        self.last, self.kept = last, kept

    def load(self, total: int) -> tuple[int, Calibration | None]:
        return self.kept

    def reached(self, done: int, sums: Callable[[], Calibration] | None) -> None:
        if sums is not None:
            self.kept = done, sums()
        if done == self.last:
            raise KeyboardInterrupt


def run(checkpoints: Any = None) -> tuple[FakeSession, Calibration]:
    session = FakeSession()
    return session, statistics_of(session, [text(5 * (N_CTX - 1))], N_CTX, 4, held_out=2, checkpoints=checkpoints)[0]


def same(found: Calibration, expected: Calibration) -> None:
    assert (found.tokens, found.texts) == (expected.tokens, expected.texts)
    for a, b in zip(found.layers, expected.layers, strict=True):
        assert a.shape == b.shape
        for name in ("k2", "q2", "v2", "k1", "q1", "v1", "ks", "vs", "qs"):
            np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=1e-5, atol=1e-6, err_msg=name)


def test_positions_of_cuts() -> None:
    chunks, _ = plan_chunks([(1,) * N_CTX] * 5, 4, 2)  # every second one is sampled
    assert [cut for *_, cut in plan_batches(chunks)] == [False, True, True, False, True, True, True, False, True, True]
    chunks, _ = plan_chunks([(1,) * N_CTX] * 2, 4, 2)
    assert [cut for *_, cut in plan_batches(chunks)] == [False, True, False, False]  # the last has no moments


def test_two_runs_are_one() -> None:
    whole, expected = run()
    total = len(whole.batches)
    for last in range(1, total):
        first = Cut(last)
        with pytest.raises(KeyboardInterrupt):
            run(first)
        session, found = run(Cut(total + 1, first.kept))
        same(found, expected)
        again = first.kept[0] and len(session.batches) - (total - first.kept[0])
        assert again <= 1, "of what was done, only the start of its chunk is decoded again"


def test_sums_of_another_file_are_not_resumed() -> None:
    whole, expected = run()
    first = Cut(4)
    with pytest.raises(KeyboardInterrupt):
        run(first)
    done, sums = first.kept
    assert sums is not None
    session, found = run(Cut(99, (done, replace(sums, model_sha256="1" * 64))))
    same(found, expected)
    assert len(session.batches) == len(whole.batches)


def test_interrupts_save_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = FakeSession.decode
    presses = iter([False] * 4 + [True])

    def pressed(self: FakeSession, tokens: tuple[int, ...], first_pos: int) -> None:
        decode(self, tokens, first_pos)
        if next(presses, False):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(FakeSession, "decode", pressed)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Checkpoints(tmp_path / "c") as checkpoints:
        run(checkpoints)
    assert signal.getsignal(signal.SIGINT) is before
    (part,) = tmp_path.iterdir()
    assert part.name == "c.000005-of-000010.part"
    assert read_calibration(part).tokens == (N_CTX - 4) + (512 - 4)  # chunk 0 and the first batch of chunk 2
    with Checkpoints(tmp_path / "c") as checkpoints:
        _, found = run(checkpoints)
        checkpoints.clear()
    same(found, run()[1])
    assert not list(tmp_path.iterdir())


def test_checkpoints_are_written_at_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "EVERY", 0.0)
    with Checkpoints(tmp_path / "c") as checkpoints:
        run(checkpoints)
    assert [path.name for path in tmp_path.iterdir()] == ["c.000009-of-000010.part"]


@pytest.mark.parametrize("damage", [b"", b"no checkpoint"])
def test_damaged_checkpoints_are_done_again(
    damage: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.000009-of-000010.part").write_bytes(damage)
    (tmp_path / "c.000005-of-000099.part").write_bytes(b"of another plan")
    with Checkpoints(tmp_path / "c") as checkpoints:
        session, found = run(checkpoints)
    assert len(session.batches) == 10
    same(found, run()[1])
    assert "cannot be resumed" in capsys.readouterr().err


@each("reason", REASONS)
def test_a_checkpoint_that_cannot_be_read_now(
    reason: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends, and a later one resumes: no progress is lost."""
    folder, error = tmp_path_factory.mktemp(reason), REASONS[reason]
    monkeypatch.setattr(resume, "EVERY", 0.0)
    with Checkpoints(folder / "c") as checkpoints:
        run(checkpoints)
    (part,) = folder.iterdir()
    before = part.read_bytes()
    sentence = f"calibration: cannot read {part}: {os.strerror(error)}"
    with (
        unreadable(part.__eq__, error),
        pytest.raises(SubkvError, match=f"^{re.escape(sentence)}$"),
        Checkpoints(folder / "c") as checkpoints,
    ):
        run(checkpoints)
    assert list(folder.iterdir()) == [part] and part.read_bytes() == before
    with Checkpoints(folder / "c") as checkpoints:
        session, _ = run(checkpoints)
    assert len(session.batches) < 4


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
def test_checkpoints_that_others_can_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing protects the sums against whoever can write them: they are measured again."""
    monkeypatch.setattr(resume, "EVERY", 0.0)
    with Checkpoints(tmp_path / "c") as checkpoints:
        run(checkpoints)
    (part,) = tmp_path.iterdir()
    for mode, is_resumed in ((0o664, True), (0o646, False)):
        part.chmod(mode)
        with Checkpoints(tmp_path / "c") as checkpoints:
            done, _ = checkpoints.load(10)
        assert (done == 9) == is_resumed
    assert "only this user can write to, found mode 0646 (chmod go-w)" in capsys.readouterr().err
