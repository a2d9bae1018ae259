"""Sidecars that are found automatically: hashes of models, the store, the choices `auto` and `subkv`, errors."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import re
import shlex
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from click.testing import CliRunner
from each import each
from format import writer
from gguf import GGUFReader, GGUFValueType
from model_bytes import head_of, metadata_of

import subkv
from converter.cli import main as convert
from runtime import cli
from subkv.base.errors import CacheError, ModelFileError, SubkvError
from subkv.engine.cache import choose_cache, parse_cache
from subkv.engine.request import CacheRequest
from subkv.format import store
from subkv.native.bases import (
    BESIDE,
    NAMED,
    STORED,
    WEIGHTS,
    model_content,
    sidecar_folder,
    sidecar_path,
    stored_path,
)
from subkv.native.gguf import CONTENT_KEY, Gguf

Models = Callable[..., Path]


@pytest.fixture(scope="session")
def made(tiny_model: Models, calibration: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sidecar of the tiny llama."""
    path = tmp_path_factory.mktemp("made") / "sidecar.gguf"
    arguments = [tiny_model(), "--bases", calibration, "--sidecar", "-o", path, "--kv-bits", 8, "--n-recent", 16]
    assert CliRunner().invoke(convert, [str(a) for a in arguments]).exit_code == 0
    return path


@pytest.fixture
def model(tiny_model: Models, tmp_path: Path) -> Path:
    """A copy of the tiny llama."""
    return Path(shutil.copy(tiny_model(), tmp_path / "m.gguf"))


@pytest.fixture
def stored(model: Path, made: Path) -> Path:
    """The sidecar where the store has that of `model`."""
    return put(made, model)


def put(sidecar: Path, model: Path) -> Path:
    entry = store.entry(model)
    entry.prepare()
    return Path(shutil.copy(sidecar, entry.sidecar))


#
# content
#


def test_copies_have_one_content(model: Path, tiny_model: Models, coded_model: Models, tmp_path: Path) -> None:
    (tmp_path / "link.gguf").symlink_to(model)
    renamed = Path(shutil.copy(model, tmp_path / "other name.gguf"))
    os.utime(renamed, (0, 0))
    split = tiny_model("llama", split_tensors=6)
    contents = {store.entry(path).content for path in (model, tmp_path / "link.gguf", renamed, split, coded_model())}
    assert len(contents) == 1


def test_other_models_have_another(model: Path, tiny_model: Models, tmp_path: Path) -> None:
    contents = [store.entry(path).content for path in (model, tiny_model(seed=1), tiny_model(n_layer=3))]
    with Gguf(model) as opened:
        keys = opened.metadata_with({"llama.rope.freq_base": ("f32", 5e5)}), opened.data_offset
    (tmp_path / "rope.gguf").write_bytes(keys[0] + model.read_bytes()[keys[1] :])
    data = bytearray(model.read_bytes())
    data[-40] ^= 1
    (tmp_path / "weight.gguf").write_bytes(data)
    contents += [store.entry(tmp_path / name).content for name in ("rope.gguf", "weight.gguf")]
    assert len(set(contents)) == len(contents)


def test_content_hash_matches_the_format(tmp_path: Path) -> None:
    """An independent reader of tensors and samples; the file has no keys beyond ggml's."""
    path = tiny.build(tmp_path / "m.gguf", "llama", n_embd=256, n_ff=512)
    with Gguf(path) as opened:
        table = [opened.data_offset, opened.metadata_with({})]
    tensors = GGUFReader(path).tensors
    digest = hashlib.sha256(metadata_of(path, tmp_path / "keys.gguf"))
    whole = path.read_bytes()
    assert len(table[1]) == table[0]
    for tensor in sorted(tensors, key=lambda t: t.name.encode()):
        digest.update(head_of(tensor))
        size, start = int(tensor.n_bytes), int(tensor.data_offset)
        places = [(0, size)] if size <= 12288 else [(at, 4096) for at in (0, (size - 4096) // 2, size - 4096)]
        for at, n in places:
            digest.update(whole[start + at : start + at + n])
    assert store.entry(path).content == digest.hexdigest()


def test_every_tensor_is_sampled(tmp_path: Path) -> None:
    path = tiny.build(tmp_path / "m.gguf", "llama", n_embd=256, n_ff=512)
    before = store.entry(path).content
    tensors = [(t.name, int(t.data_offset), int(t.n_bytes)) for t in GGUFReader(path).tensors]
    assert max(size for _, _, size in tensors) > 100_000
    whole = path.read_bytes()
    for name, start, size in tensors:
        for offset in (0, size // 2, size - 1):
            data = bytearray(whole)
            data[start + offset] ^= 1
            path.write_bytes(data)
            assert store.entry(path).content != before, name


def test_names_are_for_people(model: Path, tmp_path: Path, cache_home: Path) -> None:
    odd = Path(shutil.copy(model, tmp_path / "My model (2)-00001-of-00001.gguf"))
    path = store.entry(odd).sidecar
    assert path.parent == cache_home / "subkv" / "sidecars"
    assert path.name == f"My_model__2_-{store.entry(odd).content[:12]}.gguf"


#
# choice of bases
#


def test_auto_takes_the_stored_one(stored: Path, model: Path) -> None:
    choice = choose_cache(model)
    assert (choice.name, choice.layout) == ("subkv", stored)
    assert choice.note.startswith("bases: calibrated on ")
    assert re.search(
        r" tokens for this model, 20\d\d-\d\d-\d\d, [78]\.\d\d bits per element at 4096 tokens ", choice.note
    )
    renamed = model.rename(model.with_name("renamed.gguf"))
    assert choose_cache(renamed).layout == stored
    assert choose_cache(renamed, CacheRequest("subkv")).layout == stored
    assert parse_cache("subkv", renamed).layout == parse_cache("auto", renamed).layout == stored


def test_a_renamed_model_finds_the_sidecar_beside_it(model: Path, made: Path, tiny_model: Models) -> None:
    """By its content. A sidecar of the model's own name must be the model's; others may be of other models."""
    beside = Path(shutil.copy(made, sidecar_path(model)))
    sidecar_path(model.with_name("a.gguf")).write_bytes(b"GGUF and nothing else")
    sidecar_path(model.with_name("b.gguf")).mkdir()
    renamed = model.rename(model.with_name("renamed.gguf"))
    winding = sidecar_path(model.with_name("b.gguf")) / ".." / renamed.name  # the same file by another path
    for path in (renamed, winding, Path(os.path.relpath(renamed))):
        found = choose_cache(path, derive=False)
        assert found.source == BESIDE and found.layout is not None and os.path.samefile(found.layout, beside)
        assert choose_cache(path).note == found.note != ""
    other = Path(shutil.copy(tiny_model(seed=1), model.with_name("other.gguf")))
    assert choose_cache(other, derive=False).name == "f16"
    other.replace(model)  # now the model of the sidecar's name
    with pytest.raises(CacheError, match="found one of another model"):
        choose_cache(model)


def test_the_search_and_hostile_files(model: Path, made: Path, tmp_path: Path, cache_home: Path) -> None:
    """One sentence each. The model: nothing is known of its bases; the bases: where they are, and the reason."""
    empty, cut, text = (tmp_path / name for name in ("empty.gguf", "cut.gguf", "text.gguf"))
    empty.write_bytes(b"")
    cut.write_bytes(made.read_bytes()[:-100])
    text.write_text("a text")
    files = {
        tmp_path / "none.gguf": "no such file",
        tmp_path: "a directory",
        empty: "an empty file",
        cut: "a truncated or damaged header",
        text: "other first bytes than 'GGUF'",
        Path("x" * 5000): os.strerror(errno.ENAMETOOLONG),
    }
    for path, why in files.items():
        with pytest.raises(ModelFileError, match=f"^model_path: .*expected .*, found {re.escape(why)}$") as caught:
            choose_cache(path)
        assert str(caught.value).isprintable()
        with pytest.raises(SubkvError, match="^bases: (expected .*, found |cannot read )"):
            choose_cache(model, CacheRequest(bases=path))
    with pytest.raises(CacheError, match=r"^bases: expected subkv\.\* keys \(a converted model or a sidecar\), found"):
        choose_cache(model, CacheRequest(bases=model))
    path = stored_path(model, model_content(model))
    assert path.name.endswith(".gguf") and path.parent == cache_home / "subkv" / "sidecars"
    path.parent.mkdir(parents=True, exist_ok=True)
    cut.replace(path)
    with pytest.raises(CacheError, match=f"^bases: .*{re.escape(str(path))}.*; convert the model again, or ignore it"):
        choose_cache(model)
    older = path.with_name(path.name.replace(".gguf", ".weights.gguf"))  # older builds stored derived bases
    path.rename(older)
    found = choose_cache(model)
    assert (found.source, found.layout, found.budget) == (WEIGHTS, model, 6.5)
    for content in ("", "0" * 63, "../" * 30):
        with pytest.raises(SubkvError, match="subkv_sidecar_path: content: expected 64 hex digits, found"):
            stored_path(model, content)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
def test_bases_of_another_user(stored: Path, model: Path, made: Path) -> None:
    """Found, not named: those of this user, of root and, beside the model, of the model's owner."""

    def refused(path: Path) -> bool:
        try:
            assert choose_cache(model).layout == path
        except CacheError as error:
            owner = path.stat().st_uid
            assert error.cause == (
                f"{path}: expected a file that only this user can write to, found owner {owner} (chown it to user 0)"
            )
            return True
        return False

    assert not refused(stored)
    os.chown(stored, 1234, 1234)
    assert refused(stored)
    with pytest.raises(CacheError, match="expected a file that only this user can write to, found owner 1234"):
        choose_cache(model)
    assert choose_cache(model, CacheRequest(bases=stored)).source == NAMED
    beside = Path(shutil.copy(made, sidecar_path(model)))
    assert not refused(beside)
    os.chown(beside, 1234, 1234)
    assert refused(beside)
    os.chown(model, 1234, 1234)
    assert not refused(beside)
    os.chown(model, 4321, 4321)
    assert refused(beside)


def test_bases_that_everybody_can_write_to(stored: Path, model: Path) -> None:
    """Also the folder: nothing is stored there."""
    stored.chmod(0o646)
    with pytest.raises(
        CacheError, match="expected a file that only this user can write to, found mode 0646 .chmod go-w"
    ):
        choose_cache(model)
    stored.chmod(0o664)  # the group is the user's own with most umasks of 002
    assert choose_cache(model).source == STORED
    stored.parent.chmod(0o777)
    with pytest.raises(SubkvError, match="XDG_CACHE_HOME: expected a path that only this user can write to"):
        store.entry(model).prepare()


def test_choices_with_precedence_over_the_store(stored: Path, model: Path, made: Path, coded_model: Models) -> None:
    assert choose_cache(model, CacheRequest(bases=made)).layout == made
    assert choose_cache(model, CacheRequest("q8_0")).name == "q8_0"
    assert choose_cache(coded_model()).layout == coded_model()
    beside = Path(shutil.copy(made, sidecar_path(model)))
    assert choose_cache(model).layout == beside


def test_no_sidecar(stored: Path, model: Path) -> None:
    none = CacheRequest(sidecar=False)
    choice = choose_cache(model, none, derive=False)
    assert choice.name == "f16"
    for coded in (
        choose_cache(model, none),
        choose_cache(model, CacheRequest("subkv", sidecar=False)),
        parse_cache("auto", model, none),
    ):
        assert coded.derived and coded.layout == model
    assert list(stored.parent.iterdir()) == [stored]


def test_nothing_prepared(model: Path, cache_home: Path) -> None:
    choice = choose_cache(model, derive=False)
    assert choice.name == "f16"
    assert choice.note == "cache: f16: a cache that is read once is not coded by default; kv_cache='subkv' codes it"
    assert not cache_home.exists()


@pytest.mark.skipif(os.name == "nt", reason="links")
@pytest.mark.parametrize("obstacle", ["no home", "unreadable"])
def test_store_that_cannot_be_looked_into(
    obstacle: str, stored: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if obstacle == "unreadable":
        folder = sidecar_folder()
        shutil.rmtree(folder)
        folder.symlink_to(folder)
        why = f"{folder}: expected a readable path, found {os.strerror(errno.ELOOP)}"
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("USERPROFILE" if os.name == "nt" else "HOME", "")
        why = "expected an absolute path, as there is no home folder, found nothing"
    assert choose_cache(model, derive=False).name == "f16"
    for kind in ("auto", "subkv"):
        coded = choose_cache(model, CacheRequest(kind))
        assert "; no stored bases: " in coded.note and why in coded.note
        assert coded.derived


def test_bases_of_weights(model: Path, cache_home: Path) -> None:
    choice = choose_cache(model, CacheRequest("subkv"))
    assert (choice.layout, choice.derived, choice.budget) == (model, True, 6.5)
    assert choice.note.startswith("bases: from the weights, ")
    assert f"subkv convert {model}" in choice.line
    assert choose_cache(model) == dataclasses.replace(choice, automatic=True)
    assert choose_cache(model, derive=False).name == "f16"
    assert not cache_home.exists()


UNREADABLE = {"path": (errno.ELOOP, None), "disk": (errno.EIO, "/proc/self/mem")}  # error -> a link that has it


@contextlib.contextmanager
def unreadable(path: Path, reason: str) -> Iterator[str]:
    """Inside the block, the system cannot read this file. The end of the sentence about it."""
    error, target = UNREADABLE[reason]
    before = path.rename(path.with_suffix(".before"))
    path.symlink_to(target or path)
    try:
        yield f"found {os.strerror(error)}"
    finally:
        before.rename(path)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="/proc/self/mem")
@each("reason", UNREADABLE)
@each("cache", ["auto", "subkv"])
def test_calibrated_bases_that_cannot_be_read_now(reason: str, cache: str, model: Path, made: Path) -> None:
    """An error, not another cache: in the store, and beside the model."""
    for path in (put(made, model), sidecar_path(model)):
        shutil.copy(made, path)
        sentence = rf"^bases: {path}: expected a .*, found .*; make it readable, or ignore it with --no-sidecar$"
        with unreadable(path, reason) as why, pytest.raises(CacheError, match=sentence) as caught:
            choose_cache(model, CacheRequest(cache))
        assert f"{why}; " in str(caught.value)
    sidecar_path(model).unlink()


def test_calibrated_bases_take_precedence(model: Path, made: Path) -> None:
    choose_cache(model, CacheRequest("subkv"))
    stored = put(made, model)
    assert choose_cache(model, CacheRequest("subkv")).layout == stored


@pytest.mark.parametrize("obstacle", ["file", "read-only"])
def test_store_that_cannot_be_written(obstacle: str, model: Path, cache_home: Path) -> None:
    """Nothing is written."""
    if obstacle == "file":
        cache_home.parent.mkdir(exist_ok=True)
        cache_home.write_text("")
    else:
        cache_home.mkdir(parents=True)
        cache_home.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert choose_cache(model, CacheRequest("subkv")).derived
    with subkv.Llama(model, kv_cache="subkv", n_ctx=256, verbose=False) as llm:
        llm.eval([1, 2, 3])
        assert llm.kv_stats().type_k == "subkv"


def test_weights_that_give_no_bases(model: Path) -> None:
    """A matrix of integers cannot be dequantized."""
    name, kind = b"blk.0.attn_k.weight", 26  # GGML_TYPE_I32, as large as F32
    whole = bytearray(model.read_bytes())
    at = whole.index(name) + len(name) + 4 + 2 * 8
    whole[at : at + 4] = kind.to_bytes(4, "little")
    model.write_bytes(whole)
    reason = "no bases for this model, and none can be derived from its weights: blk.0.attn_k.weight: expected a tensor"
    why = f"^kv_cache: {reason} type that can be dequantized, found type i32"
    with pytest.raises(CacheError, match=why) as refused:
        choose_cache(model, CacheRequest("subkv"))
    assert str(refused.value).endswith("; choose f16")
    choice = choose_cache(model)
    assert (choice.name, choice.automatic) == ("f16", True)
    assert choice.note.startswith(f"cache: f16; {reason}")


#
# refusals
#


def stamped(sidecar: Path, output: Path, **values: tuple[GGUFValueType, Any]) -> None:
    writer.write(output, writer.sealed(writer.read(sidecar) | values))


@each("where", ["store", "beside"])
@each(
    ("damage", "found"),
    [
        ({CONTENT_KEY: (GGUFValueType.STRING, "0" * 64)}, "found one of another model"),
        ({CONTENT_KEY: (GGUFValueType.STRING, "")}, "found one that does not say which model it belongs to"),
        ({"subkv.version": (GGUFValueType.UINT32, 6)}, "subkv.version"),
        (None, "a truncated or damaged header"),
    ],
)
def test_sidecar_of_something_else(
    where: str, damage: dict[str, Any] | None, found: str, model: Path, made: Path
) -> None:
    path = sidecar_path(model) if where == "beside" else store.entry(model).sidecar
    path.parent.mkdir(parents=True, exist_ok=True)
    if damage is None:
        path.write_bytes(made.read_bytes()[:1000])
    else:
        stamped(made, path, **damage)
    for kind in ("auto", "subkv"):
        with pytest.raises(CacheError, match=found) as caught:
            choose_cache(model, CacheRequest(kind))
        assert caught.value.key == "bases"
        assert str(caught.value).count("convert the ") == 1
        assert "--no-sidecar" in str(caught.value)
    assert choose_cache(model, CacheRequest(sidecar=False)).derived
    result = CliRunner().invoke(cli.main, ["chat", "-m", str(model), "-p", "Hi", "-st"])
    assert result.exit_code == 1
    assert result.stderr.startswith("--bases: ") and found in result.stderr
    assert result.stderr.count("\n") == 1


def test_sidecar_without_weights_is_no_model(model: Path, made: Path) -> None:
    stamped(made, made.with_name("older.gguf"), **{CONTENT_KEY: (GGUFValueType.STRING, "")})
    assert choose_cache(model, CacheRequest(bases=made.with_name("older.gguf"))).name == "subkv"  # explicit choices


#
# the programs
#


def test_chat_names_the_bases_in_use(stored: Path, model: Path) -> None:
    for flags, name, message in (
        ([], "subkv", "bases: calibrated on "),
        (["--no-sidecar"], "subkv", "bases: from the weights, "),
        (["--no-sidecar", "-ctk", "f16"], "f16", ""),
        (["-ctk", "q8_0"], "q8_0", ""),
    ):
        arguments = ["chat", "-m", str(model), "-p", "Hi", "-st", "-n", "1", "-c", "256", *flags]
        result = CliRunner().invoke(cli.main, arguments)
        assert result.exit_code == 0, result.output
        assert f"KV cache: {name}, " in result.stderr
        assert (message in result.stderr) if message else ("bases" not in result.stderr)


def test_bench_and_perplexity_find_it(stored: Path, model: Path, text_file: Path) -> None:
    runner = CliRunner()
    result = runner.invoke(
        cli.main, ["bench", "-m", str(model), "-ctk", "f16,subkv", "-p", "0", "-n", "1", "-d", "8", "-r", "1"]
    )
    assert result.exit_code == 0, result.output
    assert result.stderr.count("bases: calibrated on") == 1
    result = runner.invoke(
        cli.main, ["perplexity", "-m", str(model), "-f", str(text_file), "-c", "128", "--chunks", "2"]
    )
    assert result.exit_code == 0, result.output
    assert result.stderr.count("bases: calibrated on") == 1


def test_llama_in_another_process_finds_the_same(stored: Path, model: Path) -> None:
    import pickle

    with subkv.Llama(model, n_ctx=256, verbose=False) as llm:
        assert llm.cache_choice.layout == stored
        copy = pickle.loads(pickle.dumps(llm))
    with copy:
        assert copy.cache_choice.layout == stored
    with subkv.Llama(model, n_ctx=256, sidecar=False, verbose=False) as llm:
        assert llm.cache_choice.derived
        with pickle.loads(pickle.dumps(llm)) as other:
            assert other.cache_choice.layout == llm.cache_choice.layout


def test_commands_can_be_copied(model: Path) -> None:
    odd = model.rename(model.with_name("it's a model.gguf"))
    command = f"`subkv convert {shlex.quote(str(odd))}`"
    assert command in choose_cache(odd).line
