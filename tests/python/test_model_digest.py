"""Which model do saved prompts and states belong to? The digest of its bytes as they were loaded."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from each import each
from gguf import GGUFReader
from model_bytes import head_of, metadata_of
from opening import prompt

from subkv import PromptCache
from subkv.base.errors import CacheError, StateError
from subkv.engine.llama import Llama
from subkv.native.bases import model_content
from subkv.native.gguf import Gguf
from subkv.native.store import identity_parts, prepare

Models = Callable[..., Path]
LEAF = 4 << 20
WIDE = {"n_embd": 256, "n_ff": 512}  # tensors of which §1.1 of FORMAT.md takes samples


def opened(path: Path, **options: Any) -> Llama:
    return Llama(path, **{"kv_cache": "f16", "n_ctx": 512, "n_threads": 1, "verbose": False} | options)


def model_digest(context: Any) -> str:
    return identity_parts(context)["model"]


def digest_of(path: Path) -> str:
    llm = opened(path)
    try:
        return model_digest(llm.ctx)
    finally:
        llm.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.build(tmp_path / "m.gguf", "llama", **WIDE)


def replace(path: Path, other: Path) -> None:
    """Another model gets the name `path`, as mv does it."""
    Path(shutil.copy(other, path.with_name("new.gguf"))).replace(path)


def stored_digests(cache_home: Path) -> list[Path]:
    return sorted((cache_home / "subkv" / "sidecars").glob("*.model-digest"))


def test_it_follows_its_definition(tmp_path: Path) -> None:
    """model_file.h; an independent reader of metadata and tensors. One tensor has several leaves."""
    path = tiny.build(tmp_path / "m.gguf", "llama", n_embd=1024, n_ff=1040)
    digest, whole = hashlib.sha256(metadata_of(path, tmp_path / "keys.gguf")), path.read_bytes()
    tensors = sorted(GGUFReader(path).tensors, key=lambda t: t.name.encode())
    assert max(int(t.n_bytes) for t in tensors) > LEAF
    for tensor in tensors:
        digest.update(head_of(tensor))
        data = whole[int(tensor.data_offset) :][: int(tensor.n_bytes)]
        for start in range(0, len(data), LEAF):
            digest.update(hashlib.sha256(data[start : start + LEAF]).digest())
    assert digest_of(path) == digest.hexdigest()


def test_every_byte_counts(model: Path, tmp_path: Path) -> None:
    """Of every tensor at every place, and of metadata; not the name of the file, nor in how many files it is."""
    whole, expected = bytearray(model.read_bytes()), digest_of(model)
    content = model_content(model)
    alike = 0
    for i, tensor in enumerate(GGUFReader(model).tensors):
        start, size = int(tensor.data_offset), int(tensor.n_bytes)
        offset = (7919 * i * i + 5000) % size
        changed = tmp_path / f"{i}.gguf"
        whole[start + offset] ^= 1
        changed.write_bytes(whole)
        whole[start + offset] ^= 1
        assert digest_of(changed) != expected, tensor.name
        alike += model_content(changed) == content
    assert alike > 3  # the samples miss these
    with Gguf(model) as reader:
        keys = reader.metadata_with({"general.name": ("str", "another")}), reader.data_offset
    (tmp_path / "keys.gguf").write_bytes(keys[0] + bytes(whole)[keys[1] :])
    assert digest_of(tmp_path / "keys.gguf") != expected
    renamed = Path(shutil.copy(model, tmp_path / "other name.gguf"))
    split = tiny.build(tmp_path / "split.gguf", "llama", split_tensors=6, **WIDE)
    assert digest_of(renamed) == digest_of(split) == expected


def changed_outside_samples(model: Path, path: Path) -> Path:
    """Another model with the same model_content: values of layer 0 are halved where §1.1 takes no samples."""
    data = bytearray(model.read_bytes())
    tensor = next(t for t in GGUFReader(model).tensors if t.name == "blk.0.attn_v.weight")
    begin, middle = int(tensor.data_offset), int(tensor.data_offset) + (int(tensor.n_bytes) - 4096) // 2
    assert middle - begin > 4096 + 8192
    data[begin + 4096 : middle] = bytes(middle - begin - 4096)
    path.write_bytes(data)
    assert model_content(path) == model_content(model)
    return path


@each("when", ["before the first prompt", "after it"])
def test_prompts_of_a_replaced_model(model: Path, tmp_path: Path, when: str) -> None:
    """The file gets other bytes while a process runs: no later process takes its prompts for the new model's."""
    folder = tmp_path / when
    other = changed_outside_samples(model, tmp_path / "other.gguf")
    path = Path(shutil.copy(model, tmp_path / f"{when}.gguf"))
    tokens = prompt(200)
    llm = opened(path, prompt_cache=folder)
    model_digest(llm.ctx)
    if when == "before the first prompt":
        replace(path, other)
    llm.create_completion(tokens, max_tokens=2, temperature=0.0)
    llm.cache.flush()
    llm.close()
    assert list(folder.glob("*.prefix"))
    if when == "after it":
        replace(path, other)
    again = {}
    for name, file in (("new", path), ("old", model)):
        llm = opened(file, prompt_cache=folder)
        again[name] = tokens in llm.cache
        llm.close()
    assert again == {"new": False, "old": True}


def test_a_model_that_is_replaced_before_its_digest(model: Path, tmp_path: Path) -> None:
    """Nothing is known of the loaded bytes: one warning, nothing is stored, and states stay in the process."""
    other = changed_outside_samples(model, tmp_path / "other.gguf")
    llm = opened(model)
    replace(model, other)
    with pytest.raises(CacheError, match="expected the file that was loaded, found one that was replaced or changed"):
        model_digest(llm.ctx)
    llm.set_cache(PromptCache(tmp_path / "cache"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            llm.create_completion(prompt(100), max_tokens=2, temperature=0.0)
    found = [str(warning.message) for warning in caught if "prompt cache" in str(warning.message)]
    assert len(found) == 1 and "replaced or changed since then; continuing without it" in found[0]
    assert not list((tmp_path / "cache").iterdir())
    llm.eval(prompt(20))
    state = llm.save_state()
    llm.load_state(state)
    second = opened(model)
    with pytest.raises(StateError, match="model: expected"):
        second.load_state(state)
    second.close()
    llm.close()


def test_states_of_a_model_that_differs_outside_the_samples(model: Path, tmp_path: Path) -> None:
    one, other = opened(model), opened(changed_outside_samples(model, tmp_path / "other.gguf"))
    one.eval(prompt(20))
    with pytest.raises(StateError, match="model: expected"):
        other.load_state(one.save_state())
    one.close()
    other.close()


def test_a_file_that_is_written_in_place(model: Path) -> None:
    """Same inode and size, another time."""
    llm = opened(model)
    status = model.stat()
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(CacheError, match="replaced or changed"):
        model_digest(llm.ctx)
    llm.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
def test_a_fork_computes_it_again(model: Path) -> None:
    """It has none of the threads that may be at it; what is known stays known."""
    llm = opened(model)
    prepare(llm.ctx)  # as a prompt cache does it; a thread is at it now
    for is_known in (False, True):
        if is_known:
            model_digest(llm.ctx)
        process = os.fork()
        if not process:
            try:
                os._exit(0 if re.fullmatch("[0-9a-f]{64}", model_digest(llm.ctx)) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    llm.close()


def test_it_is_computed_once(model: Path, tmp_path: Path, cache_home: Path) -> None:
    """A later process reads it beside the bases, unless the model has changed, or the digest is damaged or foreign."""
    expected = digest_of(model)
    assert not stored_digests(cache_home)  # the file may still change within the resolution of its time
    while time.time() - model.stat().st_ctime < 2.1:
        time.sleep(0.1)

    def digest_by(name: str) -> str:  # of another name, for which this process knows nothing
        (tmp_path / name).symlink_to(model)
        return digest_of(tmp_path / name)

    assert digest_by("a.gguf") == expected
    (path,) = stored_digests(cache_home)
    sound = path.read_text()
    assert expected in sound

    def sealed(text: str) -> str:
        return f"{text}{hashlib.sha256(text.encode()).hexdigest()}\n"

    assert sealed("\n".join(sound.split("\n")[:-2]) + "\n") == sound
    forged = sealed("\n".join(sound.split("\n")[:-2]).replace(expected, "f" * 64) + "\n")
    path.write_text(forged)
    assert digest_by("b.gguf") == "f" * 64
    path.write_text(sound.replace(expected, "f" * 64))
    assert digest_by("c.gguf") == expected
    assert path.read_text() == sound
    for damaged in ("", sound[:-1], sound + "\n", "\0" * len(sound)):
        path.write_text(damaged)
        assert digest_by(f"d{len(damaged)}.gguf") == expected
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        path.write_text(forged)
        os.chown(path, 1234, 1234)
        assert digest_by("e.gguf") == expected
    path.write_text(forged)
    model.chmod(0o600)  # the inode changes
    assert digest_by("f.gguf") == expected
