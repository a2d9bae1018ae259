"""The prompt cache on disk: lookups, stored entries, and failures."""

from __future__ import annotations

import io
import os
import pickle
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each import each
from hypothesis import given
from hypothesis import strategies as st
from opening import prompt
from refused import REASONS, unreadable

from subkv import PromptCache
from subkv.base.container import Container, ContainerError, load, read, read_head, read_whole
from subkv.base.errors import CacheError, StateError
from subkv.engine.entries import TEMPORARY, Entry, Folder
from subkv.engine.llama import Llama
from subkv.engine.prompt_cache import common_prefix

Models = Callable[..., Path]

N_CTX = 1024
DOCUMENT = prompt(560)
QUESTIONS = [prompt(30, seed) for seed in (1, 2, 3)]


def answer(llm: Llama, tokens: list[int], n: int = 8) -> tuple[Any, int]:
    """Tokens' answer, and how many tokens were evaluated before its first."""
    evaluated, sampled = [0], []
    decode_batch, sample = llm._ctx.decode, llm.sample
    llm._ctx.decode = lambda batch: (evaluated.append(evaluated[-1] + batch.n_tokens()), decode_batch(batch))
    llm.sample = lambda **options: (sampled.append(evaluated[-1]), sample(**options))[1]
    try:
        out = llm.create_completion(tokens, max_tokens=n, temperature=0.0)
    finally:
        del llm._ctx.decode, llm.sample
    return out["choices"][0]["text"], sampled[0]


def named(path: Path) -> Entry:
    """The entry in a file of any name."""
    found = load(path)
    return Entry(bytes.fromhex(found.head["identity"]), found.tokens, found.state)


def own_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.prompt"))


@pytest.fixture
def cached(coded_model: Models, tmp_path: Path) -> Iterator[Callable[..., Llama]]:
    """A context with the cache in tmp_path / "cache"; each call is a restart."""
    made: list[Llama] = []

    def make(path: Path | None = None, **options: Any) -> Llama:
        options = {"n_ctx": N_CTX, "n_threads": 1, "n_threads_batch": 1, "verbose": False} | options
        made.append(Llama(path or coded_model(), **{"prompt_cache": tmp_path / "cache"} | options))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


#
# savings
#


def test_questions_about_a_document(cached: Callable[..., Llama]) -> None:
    """The state after "document, question, answer" serves other questions: their tail is removed."""
    first, second, third = (DOCUMENT + question for question in QUESTIONS)
    text, n_cold = answer(cached(), first)
    assert n_cold == len(first)
    again, n_same = answer(cached(), first)
    assert (again, n_same) == (text, 1)
    for question in (second, third):
        _, n_evaluated = answer(cached(), question)
        assert n_evaluated <= len(question) - len(DOCUMENT) + 32


def test_the_last_token_of_a_prompt_is_not_looked_up(cached: Callable[..., Llama], tiny_model: Models) -> None:
    """It is always evaluated for its logits, so an entry with only this token is useless."""
    first, path = prompt(100), tiny_model("llama")
    answer(cached(path), first)
    lookup = cached(path).cache
    assert lookup is not None
    assert first[:2] in lookup
    assert first[:1] not in lookup


def test_the_end_of_a_common_prefix_is_stored(cached: Callable[..., Llama]) -> None:
    shared = prompt(700)
    ends = [prompt(200, seed) for seed in (1, 2, 3)]
    counts = [answer(cached(), shared + end)[1] for end in ends]
    assert counts[0] == 900 and max(counts[1:]) <= 200 + 32


def test_own_cells_serve_other_questions(cached: Callable[..., Llama]) -> None:
    llm = cached()
    counts = [answer(llm, DOCUMENT + question, n=40)[1] for question in QUESTIONS]
    assert counts[0] == 590 and max(counts[1:]) <= len(QUESTIONS[0]) + 32


def test_a_conversation_continues_after_a_restart(cached: Callable[..., Llama]) -> None:
    llm = cached()
    llm.create_completion(prompt(100), max_tokens=8, temperature=0.0)
    held = llm._input_ids.tolist()
    text, n_evaluated = answer(cached(), held + prompt(20, 5))
    assert n_evaluated == 20
    expected, _ = answer(cached(prompt_cache=None), held + prompt(20, 5))
    assert text == expected


def test_ordinary_cells_need_no_checkpoints(cached: Callable[..., Llama], tiny_model: Models, tmp_path: Path) -> None:
    """Any tail can be removed, so one entry serves all prompts with its prefix; a longer one replaces it."""
    path = tiny_model("llama")
    first, second, _ = (DOCUMENT + question for question in QUESTIONS)
    answer(cached(path), first)
    assert len(own_files(tmp_path / "cache")) == 1
    llm = cached(path)
    _, n_second = answer(llm, second)
    assert n_second == 30
    assert len(own_files(tmp_path / "cache")) == 2
    answer(llm, llm._input_ids.tolist() + prompt(10, 4))
    assert len(own_files(tmp_path / "cache")) == 2


def test_streams_store_as_well(cached: Callable[..., Llama], tmp_path: Path) -> None:
    for _ in cached().create_completion(prompt(60), max_tokens=4, stream=True):
        pass
    assert len(own_files(tmp_path / "cache")) == 1


def test_entries_serve_their_own_kind_only(
    cached: Callable[..., Llama], tiny_model: Models, coded_model: Models
) -> None:
    tokens = prompt(100)
    cached().create_completion(tokens, max_tokens=4, temperature=0.0)
    others: list[tuple[Path | None, dict[str, Any]]] = [
        (tiny_model("llama", seed=7), {"bases": coded_model()}),  # weights
        (coded_model("--codec", "int8", "--n-recent", "16", "--basis-k", "pca"), {}),  # layout
        (None, {"kv_cache": "q8_0"}),
        (None, {"n_recent": 24}),
        (None, {"rope_freq_base": 5000.0}),
    ]
    for path, options in others:
        assert tokens not in cached(path, **options).cache
    assert tokens in cached(n_ctx=512, n_batch=64).cache


def test_set_cache_after_construction(cached: Callable[..., Llama], tmp_path: Path) -> None:
    cache = PromptCache(str(tmp_path / "other"), capacity_bytes=1 << 30)
    llms = [cached(prompt_cache=None) for _ in range(2)]
    for llm in llms:
        llm.set_cache(cache)  # one object for two contexts
    answer(llms[0], DOCUMENT)
    assert answer(llms[1], DOCUMENT + [5])[1] < 100
    assert cache.cache_size == sum(path.stat().st_size for path in own_files(tmp_path / "other"))
    llms[1].set_cache(None)
    llms[1].reset()
    assert answer(llms[1], DOCUMENT + [5])[1] == len(DOCUMENT) + 1


def test_pickled_with_its_context(cached: Callable[..., Llama]) -> None:
    llm = cached()
    answer(llm, DOCUMENT)
    with pickle.loads(pickle.dumps(llm)) as copy:
        assert answer(copy, DOCUMENT + [5])[1] < 100


def test_refusals(cached: Callable[..., Llama], tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="prompt_cache: expected logits_all=False"):
        cached(logits_all=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CacheError, match="prompt_cache: expected a folder, found the file"):
        PromptCache(tmp_path / "file")
    with pytest.raises(CacheError, match=r"prompt_cache: expected a subkv\.Llama"):
        PromptCache(tmp_path)[[1, 2, 3]]


#
# failures
#


@each("where", ["head", "tokens", "state", "end", "cut", "empty"])
def test_damaged_entries_are_dropped(cached: Callable[..., Llama], tmp_path: Path, where: str) -> None:
    text, _ = answer(cached(), DOCUMENT)
    for path in own_files(tmp_path / "cache"):
        data = bytearray(path.read_bytes())
        at = {"head": 3, "tokens": 100, "state": len(data) // 2, "end": len(data) - 1}
        if where in at:
            data[at[where]] ^= 4
        path.write_bytes(data[: len(data) // 2] if where == "cut" else b"" if where == "empty" else data)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again, n_evaluated = answer(cached(), DOCUMENT)
    assert (again, n_evaluated) == (text, len(DOCUMENT))
    # objects of other tests may be collected here, with their ResourceWarning
    reports = [str(warning.message) for warning in caught if warning.category is UserWarning]
    assert [report for report in reports if "skipped the damaged entry" not in report] == []
    for path in own_files(tmp_path / "cache"):  # stored again
        assert named(path).name() == path.name


def test_damaged_entries_that_stay_are_not_used(
    cached: Callable[..., Llama], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a folder that cannot be written."""
    answer(cached(), DOCUMENT)
    for path in own_files(tmp_path / "cache"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")

    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    for name in ("unlink", "replace", "utime"):
        monkeypatch.setattr(os, name, refused)
    with pytest.warns(UserWarning) as caught:
        assert answer(cached(), DOCUMENT)[1] == len(DOCUMENT)
    messages = [str(warning.message).split(": ", 1)[1].split(" ", 3)[:3] for warning in caught]
    assert messages[:-1] == [["skipped", "the", "damaged"]] * len(own_files(tmp_path / "cache"))
    assert messages[-1] == ["cannot", "write:", "Operation"]


def test_a_state_that_the_context_rejects_is_skipped(cached: Callable[..., Llama], tmp_path: Path) -> None:
    """With a right checksum: it is evaluated again, and its file stays until it is replaced."""
    text, _ = answer(cached(), DOCUMENT)
    folder = Folder(tmp_path / "cache")
    for path in own_files(tmp_path / "cache"):
        entry = named(path)
        folder.write(Entry(entry.identity, entry.tokens, entry.state[: len(entry.state) // 2]))
    names = {path.name for path in own_files(folder.path)}
    llm = cached()
    with pytest.warns(UserWarning, match="the context rejects the entry"):
        for tokens in (DOCUMENT[:-1], DOCUMENT):
            with pytest.raises(KeyError):
                _ = llm.cache[tokens]
    assert {path.name for path in own_files(folder.path)} == names
    again, n_evaluated = answer(llm, DOCUMENT)
    assert (again, n_evaluated) == (text, len(DOCUMENT))
    assert answer(cached(), DOCUMENT) == (text, 1)


@each("reason", REASONS)
def test_entries_that_cannot_be_read_now(reason: str, cached: Callable[..., Llama], tmp_path: Path) -> None:
    """Nothing is removed, another entry is used, and later all are."""
    answer(cached(), DOCUMENT[:300])  # its entry has the answer, too, so that the longer one does not replace it
    text, _ = answer(cached(), DOCUMENT)
    files = own_files(tmp_path / "cache")
    (n_shorter, _), (_, longest) = sorted((len(named(path).tokens), path) for path in files)
    llm = cached()
    assert DOCUMENT in llm.cache  # it knows the heads
    llm.cache._warned.clear()
    with unreadable(lambda path: path == longest, REASONS[reason]), pytest.warns(UserWarning, match="cannot read: "):
        assert llm.cache[DOCUMENT].n_tokens == n_shorter
    with unreadable(lambda path: path in files, REASONS[reason]):
        assert DOCUMENT not in cached().cache
    assert own_files(tmp_path / "cache") == files
    assert answer(cached(), DOCUMENT) == (text, 1)


@pytest.mark.skipif(os.name != "posix", reason="modes of folders")
@each("mode", [0o777, 0o775, 0o770, 0o702])
def test_a_folder_that_others_can_write_to(mode: int, tmp_path: Path) -> None:
    folder = tmp_path / f"{mode:o}"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(CacheError, match=f"only its owner can write to, found mode {mode:04o} .chmod go-w.: {folder}"):
        PromptCache(folder)
    folder.chmod(0o755)
    PromptCache(folder)


def test_an_entry_under_another_name_is_not_used(cached: Callable[..., Llama], tmp_path: Path) -> None:
    answer(cached(), DOCUMENT)
    paths = own_files(tmp_path / "cache")
    for path in paths:
        path.rename(path.with_name(path.name[:25] + path.name[:24:-1][7:] + ".prompt"))
    for path in own_files(tmp_path / "cache"):
        assert path not in paths
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert answer(cached(), DOCUMENT)[1] == len(DOCUMENT)


def test_files_of_others_are_left_alone(cached: Callable[..., Llama], tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    for name in ("notes.txt", "my.prompt", "a.tmp"):
        (folder / name).write_text("mine")
        os.utime(folder / name, (0, 0))
    answer(cached(prompt_cache=PromptCache(folder, capacity_bytes=1)), DOCUMENT)
    assert sorted(path.name for path in folder.iterdir()) == ["a.tmp", "my.prompt", "notes.txt"]


def test_a_full_disk_is_one_warning(cached: Callable[..., Llama], tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")  # not on Windows
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    llm = cached()
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.warns(UserWarning, match="prompt cache .*: cannot write: .*; continuing without it") as caught:
            texts = [answer(llm, DOCUMENT + question)[0] for question in QUESTIONS]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(caught) == 1
    assert list((tmp_path / "cache").iterdir()) == []
    plain = cached(prompt_cache=None)
    for question, text in zip(QUESTIONS, texts, strict=True):
        plain.reset()
        assert answer(plain, DOCUMENT + question)[0] == text


def test_a_folder_that_cannot_be_created_is_one_warning(cached: Callable[..., Llama], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    llm = cached(prompt_cache=tmp_path / "file" / "cache")
    with pytest.warns(UserWarning, match="prompt cache") as caught:
        answer(llm, DOCUMENT)
        answer(llm, prompt(300, 4))
    assert {str(warning.message).split(": ")[1] for warning in caught} <= {"cannot read", "cannot write"}
    assert len(caught) <= 2


def test_a_read_only_folder(cached: Callable[..., Llama], tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("read-only folder: root may write everywhere")
    answer(cached(), DOCUMENT)
    folder = tmp_path / "cache"
    folder.chmod(0o500)
    try:
        with pytest.warns(UserWarning, match="cannot write: Permission denied"):
            assert answer(cached(), DOCUMENT + QUESTIONS[0])[1] < 100  # it still serves
    finally:
        folder.chmod(0o700)


def test_the_least_recently_used_is_removed_first(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    entries = [Entry(b"i" * 32, np.array(prompt(10, seed), np.int32), bytes(1000)) for seed in range(4)]
    size = sum(map(len, entries[0].container().pieces()))
    for age, entry in enumerate(entries[:3]):
        folder.write(entry)
        os.utime(tmp_path / entry.name(), (1000 + age, 1000 + age))
    assert folder.read(entries[0].name()) is not None  # used now
    folder.write(entries[3])
    folder.trim(2 * size)
    assert set(folder.heads(b"i" * 32)) == {entries[0].name(), entries[3].name()}
    assert folder.size() == 2 * size
    assert folder.read(entries[1].name()) is None


#
# the format
#

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40).map(lambda tokens: np.array(tokens, np.int32))


HEADS = st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(max_size=5), max_size=3)


@given(HEADS, TOKENS, st.binary(max_size=200))
def test_containers_round_trip(head: dict[str, Any], tokens: Any, state: bytes) -> None:
    data = b"".join(Container(head, tokens, state).pieces())
    back = read_whole(io.BytesIO(data))
    assert (back.head, back.tokens.tolist(), back.state) == (head, tokens.tolist(), state)
    found, listed, n_state = read_head(io.BytesIO(data))
    assert (found, listed.tolist(), n_state) == (head, tokens.tolist(), len(state))


@given(TOKENS, st.binary(max_size=200), st.data())
def test_every_damage_is_noticed(tokens: Any, state: bytes, data: st.DataObject) -> None:
    good = b"".join(Container({"identity": "x"}, tokens, state).pieces())
    at = data.draw(st.integers(0, len(good) - 1))
    flipped = bytearray(good)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    for bad in (bytes(flipped), good[:at], good + b"\0"):
        with pytest.raises(ContainerError):
            read_whole(io.BytesIO(bad))


def test_a_container_that_is_none(tmp_path: Path) -> None:
    """A state of an earlier version is a ZIP file; it is refused like any other invalid file."""
    (tmp_path / "old").write_bytes(b"PK\x03\x04" + bytes(60))
    with pytest.raises(StateError, match=r"path: expected a file written by /save, found another format in .*b'PK"):
        read(tmp_path / "old", "/save")
    with pytest.raises(StateError, match="path: cannot read"):
        read(tmp_path / "none", "/save")


@given(TOKENS, TOKENS)
def test_common_prefix(a: Any, b: Any) -> None:
    n = common_prefix(a, b)
    assert a[:n].tolist() == b[:n].tolist()
    assert n == min(len(a), len(b)) or a[n] != b[n]


#
# several processes
#

WRITER = """
import sys
import numpy as np
from pathlib import Path
from subkv.engine.entries import Entry, Folder
folder, rng = Folder(Path(sys.argv[1])), np.random.default_rng(int(sys.argv[2]))
identity, n_rounds = b"i" * 32, int(sys.argv[3])
print("ready", flush=True)
for _ in range(n_rounds):
    seed = int(rng.integers(20))  # few: processes write, read and remove the same entries
    tokens = np.arange(seed, seed + 50, dtype=np.int32)
    folder.write(Entry(identity, tokens, bytes([seed]) * 300_000))
    folder.trim(2_000_000)
    for name, held in folder.heads(identity).items():
        entry = folder.read(name)
        assert entry is None or entry.state == bytes([held.tokens[0]]) * 300_000
"""


def writer(folder: Path, seed: int, n_rounds: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(seed), str(n_rounds)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_processes_at_once(tmp_path: Path) -> None:
    processes = [writer(tmp_path, seed, 25) for seed in range(3)]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert (process.returncode, errors) == (0, "")
    assert 0 < Folder(tmp_path).size() <= 2_000_000
    assert not list(tmp_path.glob(f".*{TEMPORARY}"))


def test_kill_while_writing(tmp_path: Path) -> None:
    rng = random.Random(0)
    for seed in range(6):
        process = writer(tmp_path, seed, 10_000)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0.0, 0.15))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        for path in own_files(tmp_path):
            assert named(path).name() == path.name
    left = tmp_path / f".{'0' * 24}-{'0' * 32}.prompt.7.00000000{TEMPORARY}"
    left.write_bytes(b"half an entry")
    os.utime(left, (0, 0))
    Folder(tmp_path).trim(1 << 40)
    assert not left.exists()
