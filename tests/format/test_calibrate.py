"""Calibration: cutting of text, held-out chunks, statistics against numpy, the command and its errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calib_synthetic import FakeSession, text_bytes
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from converter import corpus
from converter.calibrate import main
from converter.corpus import Text, read_text
from converter.session import Session
from converter.statistics_stage import Chunk, observe, plan_chunks, statistics_of
from subkv.base.errors import SubkvError
from subkv.engine.observer import ACCUMULATE, PAUSE, SAMPLE
from subkv.format.calibration import MAX_SAMPLES, TextSource, merge, read_calibration, write_calibration

cut = partial(corpus.cut, whole=False)  # as calibration cuts


def text(n: int, seed: int = 0, name: str = "a.txt") -> Text:
    data = text_bytes(n, seed)
    return Text(TextSource(name, "0" * 64, n), data)


#
# cutting
#


def test_chunks_start_with_bos_and_lose_nothing_but_the_end() -> None:
    session = FakeSession(bos=7)
    source = text(1000)
    chunks = cut(session, [source], 128, None)
    assert [len(chunk) for chunk in chunks] == [128] * 7
    assert all(chunk[0] == 7 for chunk in chunks)
    assert b"".join(bytes(chunk[1:]) for chunk in chunks) == source.data[: 7 * 127]


def test_models_without_bos() -> None:
    chunks = cut(FakeSession(bos=None), [text(1000)], 128, None)
    assert [len(chunk) for chunk in chunks] == [128] * 7
    assert chunks[0] == tuple(text(1000).data[:128])


def test_long_texts_are_tokenized_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PIECE", 100)
    source = text(5000)
    assert cut(FakeSession(bos=None), [source], 5000, None) == [tuple(source.data)]
    assert len(cut(FakeSession(), [source], 128, 2)) == 2


@given(st.lists(st.integers(64, 4000), min_size=1, max_size=5), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_limit_is_shared_and_kept(sizes: list[int], limit: int) -> None:
    texts = [text(n, seed=i) for i, n in enumerate(sizes)]
    everything = cut(FakeSession(), texts, 128, None)
    if limit < len(texts):
        with pytest.raises(SubkvError, match=rf"^chunks: expected at least one for each of the {len(texts)} texts"):
            cut(FakeSession(), texts, 128, limit)
        return
    limited = cut(FakeSession(), texts, 128, limit)
    assert len(limited) <= limit
    assert set(limited) <= set(everything)
    firsts = [bytes(chunk[1:65]) for chunk in limited]
    assert all(t.data[:64] in firsts for t in texts), "every text has a part"
    if len(limited) < min(limit, len(everything)):
        assert len(texts) > 1, "only a short later text may leave a share unused"


def test_short_texts() -> None:
    assert [len(c) for c in cut(FakeSession(), [text(64)], 2048, None)] == [65]
    with pytest.raises(SubkvError, match=r"^files: a.txt: expected at least 64 tokens, found 50$"):
        cut(FakeSession(), [text(50)], 2048, None)


@given(st.integers(1, 200), st.integers(1, 12), st.integers(64, 300), st.integers(0, 40))
@settings(max_examples=80, deadline=None)
def test_held_out_chunks(n: int, every: int, length: int, n_skip: int) -> None:
    tokens = [tuple(range(i, i + length)) for i in range(n)]
    chunks, note = plan_chunks(tokens, n_skip, every)
    sampled = [chunk for chunk in chunks if chunk.key_pos]
    accumulated = [chunk for chunk in chunks if not chunk.key_pos]
    assert 1 <= len(sampled) <= 8
    if n == 1:
        assert note is not None
        assert [c.tokens for c in chunks] == [tokens[0]] * 2
    else:
        assert (note is None) == (len(accumulated) > 0) or every == 1
        assert [c.tokens for c in chunks] == tokens
    for chunk in sampled:
        assert n_skip <= min(chunk.key_pos)
        assert max(chunk.key_pos) < min(chunk.query_pos)
        assert max(chunk.query_pos) < length
        assert len(set(chunk.key_pos)) == len(chunk.key_pos)
    assert sum(len(c.key_pos) for c in sampled) >= min(MAX_SAMPLES, length // 2 - n_skip)


def test_nothing_held_out_on_request() -> None:
    chunks, note = plan_chunks([(1,) * 100] * 20, 4, 0)
    assert not any(chunk.key_pos for chunk in chunks)
    assert note is not None
    assert "moments" in note


#
# the run
#


def test_statistics_equal_numpy() -> None:
    session = FakeSession(nonfinite=[40])
    source = text(9 * 127 + 5)
    result, notes = statistics_of(session, [source], 128, 4)
    chunks = cut(FakeSession(), [source], 128, None)
    assert len(chunks) == 9
    held_out = 7
    positions = [p for p in range(4, 128) if p != 40]
    q, k, v = [], [], []
    for i, chunk in enumerate(chunks):
        if i != held_out:
            for p in positions:
                row = session.row(1, chunk[p], p)
                q.append(row[0].reshape(2, 2, 32))
                k.append(row[1])
                v.append(row[2])
    layer = result.layers[1]
    assert layer.shape.tokens == result.tokens == 8 * len(positions)
    np.testing.assert_allclose(layer.k2, np.einsum("thi,thj->hij", k, k) / len(k), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(layer.q2, np.einsum("thgi,thgj->hij", q, q) / (2 * len(q)), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(layer.v2, np.einsum("thi,thj->hij", v, v) / len(v), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(layer.k1, np.mean(k, axis=0), atol=1e-12)
    np.testing.assert_allclose(layer.q1, np.mean(q, axis=(0, 2)), atol=1e-12)
    assert layer.qs.shape == (32, 4, 32)
    key_pos = plan_chunks(chunks, 4, 8)[0][held_out].key_pos
    expected_rows = [session.row(1, chunks[held_out][p], p)[1] for p in key_pos if p != 40]
    np.testing.assert_array_equal(layer.ks, np.array(expected_rows, dtype=np.float16))
    assert any("NaN" in note for note in notes)


def test_batches_are_bounded_and_modes_follow_the_plan() -> None:
    session = FakeSession()
    observe(session, [Chunk((1,) * 1300), Chunk((2,) * 600, (10, 20), (400,))])
    assert session.batches == [(0, 512), (512, 512), (1024, 276), (0, 512), (512, 88)]
    assert session.modes == [ACCUMULATE, SAMPLE, PAUSE]


def test_merged_runs_equal_one_run(tmp_path: Path) -> None:
    """Two texts in one run against one run each, merged: same moments to float32 storage."""
    a, b = text(8 * 127, seed=1, name="a"), text(5 * 127, seed=2, name="b")
    one, _ = statistics_of(FakeSession(), [a, b], 128, 4, held_out=0)
    first, _ = statistics_of(FakeSession(), [a], 128, 4, held_out=0)
    write_calibration(tmp_path / "first", first)
    second, _ = statistics_of(FakeSession(), [b], 128, 4, held_out=0)
    both = merge(read_calibration(tmp_path / "first"), second)
    assert both.tokens == one.tokens
    assert both.texts == one.texts
    for got, want in zip(both.layers, one.layers, strict=True):
        assert got.shape == want.shape
        for key in ("k2", "q2", "v2", "k1", "q1", "v1"):
            np.testing.assert_allclose(getattr(got, key), getattr(want, key), rtol=1e-6, atol=1e-6)


def test_models_that_cannot_be_coded() -> None:
    class Nothing(FakeSession):
        def layers(self) -> list[Any]:
            return []

    with pytest.raises(SubkvError, match=r"^model: expected layers with an ordinary K/V cache, found none in this"):
        statistics_of(Nothing(), [text(500)], 128, 4)
    with pytest.raises(
        SubkvError, match=r"^model: layer 0: expected a key head size in multiples of 8 up to 576, found 12"
    ):
        statistics_of(FakeSession(d_k=12), [text(500)], 128, 4)
    with pytest.raises(
        SubkvError, match=r"^model: layer 0: expected finite queries.*found NaN or infinity in every token"
    ):
        statistics_of(FakeSession(nonfinite=range(128)), [text(500)], 128, 4)
    with pytest.raises(SubkvError, match=r"^n_sink: expected at most 126 .shortest chunk less two., found 128$"):
        statistics_of(FakeSession(), [text(500)], 128, 128)


def test_texts_are_read_strictly(tmp_path: Path) -> None:
    with pytest.raises(SubkvError, match=r"^files: expected a text file, found no file at "):
        read_text(tmp_path / "none")
    with pytest.raises(SubkvError, match=r"^files: cannot read .*: Is a directory$"):
        read_text(tmp_path)
    (tmp_path / "latin").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(SubkvError, match=r"expected UTF-8 text, found byte 0xe9 at 3$"):
        read_text(tmp_path / "latin")


#
# the command, on a tiny model in the native engine
#


@pytest.fixture
def run(tiny_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Result]:
    """run(*args, model="llama") calibrates a tiny model in tmp_path; text.txt and out.safetensors are there."""
    (tmp_path / "text.txt").write_bytes(text_bytes(3000))

    def invoke(*args: str, model: Path | None = None, file: str = "text.txt", out: str = "out.safetensors") -> Result:
        path = model or tiny_model("llama")
        fixed = ["-m", str(path), "-f", str(tmp_path / file), "-o", str(tmp_path / out), "-c", "256", "-t", "2"]
        return CliRunner().invoke(main, [*fixed, *args])

    return invoke


def test_command_writes_a_valid_file(run: Callable[..., Result], tmp_path: Path) -> None:
    result = run()
    assert result.exit_code == 0, result.output
    calibration = read_calibration(tmp_path / "out.safetensors")
    assert (calibration.arch, calibration.block_count, calibration.n_ctx, calibration.n_skip) == ("llama", 2, 256, 4)
    assert [vars(layer.shape) for layer in calibration.layers] == [
        {
            "il": il,
            "n_head": 4,
            "n_head_kv": 2,
            "d_k": 32,
            "d_v": 32,
            "scale": np.float32(32**-0.5),
            "tokens": calibration.tokens,
        }
        for il in range(2)
    ]
    assert [t.name for t in calibration.texts] == ["text.txt"]
    assert calibration.tokens % (256 - 4) == 0
    layer = calibration.layers[0]
    assert layer.ks.shape == (32, 2, 32)
    assert layer.qs.shape == (32, 4, 32)
    # held-out keys come from the same distribution: their energy agrees with the moments within sampling error
    energy = np.mean(layer.ks.astype(np.float64) ** 2)
    assert energy == pytest.approx(np.trace(layer.k2, axis1=1, axis2=2).mean() / 32, rel=0.3)


@pytest.mark.parametrize(("arch", "layers"), [("lfm2", [1, 3]), ("qwen35", [1, 3]), ("qwen2vl", [0, 1])])
def test_recurrent_layers_have_no_statistics(
    run: Callable[..., Result], tiny_model: Callable[..., Path], tmp_path: Path, arch: str, layers: list[int]
) -> None:
    result = run("--chunks", "4", model=tiny_model(arch))
    assert result.exit_code == 0, result.output
    calibration = read_calibration(tmp_path / "out.safetensors")
    assert calibration.block_count == (2 if arch == "qwen2vl" else 4)
    assert [layer.shape.il for layer in calibration.layers] == layers
    assert all(np.isfinite(layer.k2).all() and np.trace(layer.k2[0]) > 0 for layer in calibration.layers)


def test_command_adds_to_an_earlier_file(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_bytes(text_bytes(2000, seed=9))
    assert run(out="a.safetensors").exit_code == 0
    assert run(file="more.txt", out="b.safetensors").exit_code == 0
    result = run("--in-file", str(tmp_path / "a.safetensors"), file="more.txt", out="ab.safetensors")
    assert result.exit_code == 0, result.output
    a, b, ab = (read_calibration(tmp_path / f"{name}.safetensors") for name in ("a", "b", "ab"))
    assert ab.tokens == a.tokens + b.tokens
    assert [t.name for t in ab.texts] == ["text.txt", "more.txt"]
    want = merge(a, b)
    for key in ("k2", "q2", "v2", "k1", "q1", "v1"):
        got = getattr(ab.layers[1], key)
        np.testing.assert_allclose(got, getattr(want.layers[1], key), rtol=1e-4, atol=1e-5 * np.abs(got).max())


def test_results_do_not_depend_on_threads(run: Callable[..., Result], tmp_path: Path) -> None:
    assert run("-t", "1", "--chunks", "3", out="one").exit_code == 0
    assert run("-t", "3", "--chunks", "3", out="three").exit_code == 0
    one, three = (read_calibration(tmp_path / name) for name in ("one", "three"))
    for key in ("k2", "q2", "v2"):
        got, want = getattr(three.layers[1], key), getattr(one.layers[1], key)
        np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


def test_one_chunk_is_enough_and_noted(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_bytes(text_bytes(90))
    result = run(file="short.txt")
    assert result.exit_code == 0, result.output
    assert "note: only one chunk of text" in result.output
    assert read_calibration(tmp_path / "out.safetensors").layers[0].has_samples


def test_refusals_of_the_command(run: Callable[..., Result], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    whole = tiny_model("llama").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:-1000])
    (tmp_path / "head.gguf").write_bytes(whole[:3000])
    (tmp_path / "no.gguf").write_bytes(b"PK\3\4 not a model at all, really not")
    (tmp_path / "few.txt").write_bytes(b"too short")
    (tmp_path / "latin.txt").write_bytes(b"\xff" * 500)
    cases: list[tuple[Result, str]] = [
        (run(model=tmp_path / "none.gguf"), "-m: expected a GGUF file, found no file "),
        (run(model=tmp_path / "no.gguf"), "-m: "),
        (run(model=tmp_path / "cut.gguf"), "-m: "),
        (run(model=tmp_path / "head.gguf"), "-m: "),
        (run(file="none.txt"), "-f: expected a text file, found no file at "),
        (run(file="few.txt"), "-f: few.txt: expected at least 64 tokens, found "),
        (run(file="latin.txt"), "-f: "),
        (run(out="none/out"), "-o: cannot write "),
        (run(out="text.txt"), "-o: expected another file than -f, found "),
        (run("--in-file", str(tmp_path / "none")), "--in-file: expected a calibration file, found no file at "),
        (run("--in-file", str(tmp_path / "few.txt")), "--in-file: "),
    ]
    for result, sentence in cases:
        assert result.exit_code == 1, result.output
        assert result.stderr.strip().splitlines()[-1].startswith(sentence), result.output
    assert run("-c", "8").exit_code == 2
    assert not list(tmp_path.glob("*out*")) and not list(tmp_path.glob(".*"))
    assert (tmp_path / "text.txt").read_bytes() == text_bytes(3000)


def test_merging_another_model_is_refused_before_the_run(
    run: Callable[..., Result], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    assert run(out="a.safetensors").exit_code == 0
    result = run("--in-file", str(tmp_path / "a.safetensors"), model=tiny_model("llama", n_layer=3))
    assert result.exit_code == 1
    assert "subkv.calibration.block_count: expected 3 as in this run, found 2" in result.stderr
    assert "tok/s" not in result.stderr


def test_models_without_ordinary_attention_are_refused(
    run: Callable[..., Result], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    for arch in ("mamba", "bert", "t5"):
        result = run(model=tiny_model(arch))
        assert result.exit_code == 1, (arch, result.output)
        assert result.stderr.strip().splitlines()[-1].startswith("-m: "), (arch, result.output)
    assert not (tmp_path / "out.safetensors").exists()


def test_interrupt_leaves_no_file(run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(Session):
        def decode(self, tokens: Any, first_pos: int) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr("converter.statistics_stage.Session", Interrupted)
    result = run()
    assert result.exit_code == 130
    assert "interrupted: nothing was written" in result.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["text.txt"]


def test_sample_sets_of_several_runs_stay_bounded() -> None:
    result, _ = statistics_of(FakeSession(), [text(40 * 127)], 128, 4)
    merged = merge(result, replace(result, tokens=1))
    for calibration in (result, merged):
        assert all(len(layer.ks) == len(layer.vs) == len(layer.qs) == MAX_SAMPLES for layer in calibration.layers)


def test_chunks_beyond_learned_positions(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """llama.cpp would end the process."""
    (tmp_path / "a.txt").write_bytes(text_bytes(5000))
    given = ["-m", str(tiny_model("gpt2")), "-f", str(tmp_path / "a.txt"), "-o", str(tmp_path / "o"), "-c", "1024"]
    result = CliRunner().invoke(main, given)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "-c: expected at most the 512 positions that the model has, found 1024"


def test_calibrations_are_overwritten_only_on_request(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(text_bytes(500))
    (tmp_path / "o").write_bytes(b"earlier")
    given = ["-m", str(tiny_model("llama")), "-f", str(tmp_path / "a.txt"), "-o", str(tmp_path / "o"), "-c", "128"]
    result = CliRunner().invoke(main, given)
    assert result.exit_code == 1
    assert result.stderr.startswith("-o: expected a file that does not exist yet, found ")
    assert CliRunner().invoke(main, [*given, "-y"]).exit_code == 0
    assert CliRunner().invoke(main, [*given, "--in-file", str(tmp_path / "o")]).exit_code == 0
