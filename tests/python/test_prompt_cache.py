"""The prompt cache on disk: what is evaluated again, and failures. Its store: tests/runtime/test_prefix_store.py."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import subprocess
import sys
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

from subkv import PromptCache
from subkv.base.errors import CacheError, ClosedError
from subkv.engine.llama import Llama
from subkv.engine.prompt_cache import common_prefix

Models = Callable[..., Path]

N_CTX = 1024
RESUME = 32  # tokens that a coded cache evaluates again before an edit
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
    if isinstance(llm.cache, PromptCache):
        llm.cache.flush()
    return out["choices"][0]["text"], sampled[0]


def stored(folder: Path, suffix: str = "prefix") -> list[Path]:
    return sorted(folder.glob(f"*.{suffix}"))


@contextlib.contextmanager
def reported() -> Iterator[list[str]]:
    """Sentences of warnings in the block."""
    sentences: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield sentences
    # objects of other tests may be collected here, with their ResourceWarning
    sentences += [str(warning.message) for warning in caught if warning.category is UserWarning]


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


def test_questions_about_a_document(cached: Callable[..., Llama], tmp_path: Path) -> None:
    """The state after "document, question, answer" serves other questions: their tail is removed."""
    first, second, third = (DOCUMENT + question for question in QUESTIONS)
    text, n_cold = answer(cached(), first)
    assert n_cold == len(first)
    again, n_same = answer(cached(), first)
    assert (again, n_same) == (text, 1)
    for question in (second, third):
        _, n_evaluated = answer(cached(), question)
        assert n_evaluated <= len(question) - len(DOCUMENT) + RESUME
    assert len(stored(tmp_path / "cache")) == 3  # one for each answer


def test_50_edits(cached: Callable[..., Llama], tmp_path: Path) -> None:
    """Beginnings kept, tails replaced, restarts between: only new tokens and those before an edit are evaluated."""
    rng, llm, texts = random.Random(5), cached(), [prompt(300)]
    answer(llm, texts[0], n=1)
    for i in range(50):
        n_kept, is_last = rng.randrange(40, 300), rng.random() < 0.7
        begin = (texts[-1] if is_last else rng.choice(texts))[:n_kept]
        text = begin + [rng.randrange(10, 200) for _ in range(rng.randrange(1, 300 - n_kept + 1))]
        if rng.random() < 0.4:
            llm = cached()
        n_new = len(text) - max(common(text, other) for other in texts)
        n_evaluated = answer(llm, text, n=1)[1]
        # the store reads no prompt for fewer than 32 tokens more than the context has
        assert n_evaluated <= max(n_new, 1) + RESUME + (0 if is_last else 31), i
        texts.append(text)


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_own_cells_serve_other_questions(cached: Callable[..., Llama]) -> None:
    llm = cached()
    counts = [answer(llm, DOCUMENT + question, n=40)[1] for question in QUESTIONS]
    assert counts[0] == 590 and max(counts[1:]) <= len(QUESTIONS[0]) + RESUME


def test_a_conversation_continues_after_a_restart(cached: Callable[..., Llama], tmp_path: Path) -> None:
    """In one prompt: a longer one replaces its beginnings."""
    llm = cached()
    answer(llm, prompt(100))
    held = llm._input_ids.tolist()
    llm = cached()
    text, n_evaluated = answer(llm, held + prompt(20, 5))
    assert n_evaluated == 20
    expected, _ = answer(cached(prompt_cache=None), held + prompt(20, 5))
    assert text == expected
    assert len(stored(tmp_path / "cache")) == 1


ADAPTIVE = {"kv_cache": "subkv", "adapt": "v,warm=32,length=64,gain=100", "n_recent": 64}


@each(
    "arch, options",
    [
        ("lfm2", {"kv_cache": "subkv"}),
        ("lfm2", {"kv_cache": "f16"}),
        ("mamba", {"kv_cache": "f16"}),
        ("llama", ADAPTIVE),
    ],
)
@each("n_document", [400, 560])
def test_caches_that_cannot_go_back(
    cached: Callable[..., Llama], tiny_model: Models, arch: str, options: dict[str, Any], n_document: int
) -> None:
    """The second question starts at a multiple of 128 or 512, the third at the end of the document."""
    path, document = tiny_model(arch), prompt(n_document, 4 if n_document > 512 else 0)
    counts = []
    for question in QUESTIONS:
        text, n_evaluated = answer(cached(path, **options), document + question)
        counts.append(n_evaluated)
        assert text == answer(cached(path, prompt_cache=None, **options), document + question)[0]
    n_last = n_document % 512 if n_document > 512 else n_document % 128
    assert counts[:2] == [n_document + 30, n_last + 30]
    assert counts[2] == (n_last if n_last < 64 else 0) + 30  # a beginning that has little more is not stored


def test_own_cells_that_cannot_go_back(cached: Callable[..., Llama], tiny_model: Models) -> None:
    """A stored beginning replaces them."""
    llm = cached(tiny_model("llama"), **ADAPTIVE)
    counts = [answer(llm, DOCUMENT + question, n=20)[1] for question in QUESTIONS]
    assert counts == [590, 78, 78]


def test_streams_store_as_well(cached: Callable[..., Llama], tmp_path: Path) -> None:
    llm = cached()
    for _ in llm.create_completion(prompt(60), max_tokens=4, stream=True):
        pass
    llm.cache.flush()
    assert len(stored(tmp_path / "cache")) == 1


def test_prompts_serve_their_own_kind_only(
    cached: Callable[..., Llama], tiny_model: Models, coded_model: Models
) -> None:
    tokens = prompt(100)
    answer(cached(), tokens)
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
    assert answer(llms[1], DOCUMENT + [5])[1] == 1
    files = [*stored(tmp_path / "other"), *stored(tmp_path / "other", "piece")]
    assert cache.cache_size == sum(path.stat().st_size for path in files)
    llms[1].set_cache(None)
    llms[1].reset()
    assert answer(llms[1], DOCUMENT + [5])[1] == len(DOCUMENT) + 1


def test_the_capacity(cached: Callable[..., Llama], tmp_path: Path) -> None:
    llm = cached()
    answer(llm, prompt(200))
    capacity = 2 * llm.cache.cache_size
    llm.set_cache(PromptCache(tmp_path / "cache", capacity))
    for seed in (1, 2, 3):
        answer(llm, prompt(200, seed))
    assert 0 < llm.cache.cache_size <= capacity
    assert prompt(200, 3) in llm.cache and prompt(200, 0) not in llm.cache


def test_pickled_with_its_context(cached: Callable[..., Llama]) -> None:
    llm = cached()
    answer(llm, DOCUMENT)
    with pickle.loads(pickle.dumps(llm)) as copy:
        assert answer(copy, DOCUMENT + [5])[1] == 1


def test_a_context_after_a_shift_is_not_stored(cached: Callable[..., Llama], tmp_path: Path) -> None:
    """Its values depend on tokens that it no longer has."""
    llm = cached()
    llm.eval(prompt(200))
    llm.discard(4, 50)
    text = llm._input_ids.tolist()
    llm.cache[text] = llm.save_state()
    llm.cache.flush()
    assert stored(tmp_path / "cache") == []


def test_refusals(cached: Callable[..., Llama], tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="prompt_cache: expected logits_all=False"):
        cached(logits_all=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CacheError, match="prompt_cache: expected a folder, found something else: .*file"):
        PromptCache(tmp_path / "file")
    with pytest.raises(CacheError, match=r"prompt_cache: expected a subkv\.Llama"):
        PromptCache(tmp_path)[[1, 2, 3]]
    llm = cached()
    llm.eval(prompt(60))
    state = llm.save_state()
    llm.eval([5])
    with pytest.raises(CacheError, match="prompt_cache: expected the present state of its subkv.Llama, found another"):
        llm.cache[prompt(60)] = state
    cache = llm.cache
    llm.close()
    with pytest.raises(ClosedError):
        _ = cache[prompt(60)]


@pytest.mark.skipif(os.name != "posix", reason="modes of folders")
@each("mode", [0o777, 0o770])
def test_a_folder_that_others_can_write_to(mode: int, tmp_path: Path) -> None:
    tmp_path.chmod(mode)
    sentence = f"prompt_cache: expected a folder that only this user can write to, found mode {mode:04o} .chmod go-w.: "
    with pytest.raises(CacheError, match=f"{sentence}{tmp_path}"):
        PromptCache(tmp_path)


#
# failures
#


def test_damaged_prompts_are_dropped(cached: Callable[..., Llama], tmp_path: Path) -> None:
    text, _ = answer(cached(), DOCUMENT)
    for path in stored(tmp_path / "cache", "piece"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    with reported() as sentences:
        assert answer(cached(), DOCUMENT) == (text, len(DOCUMENT))
    assert sentences == [f"prompt cache {tmp_path / 'cache'}: removed 1 damaged prompt(s)"]
    assert answer(cached(), DOCUMENT) == (text, 1)  # stored again


def test_a_state_that_the_context_rejects_is_skipped(
    cached: Callable[..., Llama], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a right checksum: its tokens are evaluated again, and its files stay."""
    text, _ = answer(cached(), DOCUMENT)
    files, llm = stored(tmp_path / "cache"), cached()
    with monkeypatch.context() as patch, reported() as sentences:
        patch.setattr("subkv.native.binding.C.llama_state_seq_set_data", lambda *_: 0)
        for tokens in (DOCUMENT[:-1], DOCUMENT):
            with pytest.raises(KeyError):
                _ = llm.cache[tokens]
    assert [sentence.split(": ")[1] for sentence in sentences] == ["the context rejects a prompt"]
    assert stored(tmp_path / "cache") == files
    assert answer(llm, DOCUMENT) == (text, len(DOCUMENT))
    assert answer(cached(), DOCUMENT) == (text, 1)


def test_files_of_others_are_left_alone(cached: Callable[..., Llama], tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    names = {"notes.txt", "my.prompt", "a.tmp"}
    for name in names:
        (folder / name).write_text("mine")
        os.utime(folder / name, (0, 0))
    answer(cached(prompt_cache=PromptCache(folder, capacity_bytes=1)), DOCUMENT)
    assert {path.name for path in folder.iterdir()} == names


def test_a_full_disk_is_one_warning(cached: Callable[..., Llama], tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")  # not on Windows
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    llm = cached()
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with reported() as sentences:
            texts = [answer(llm, DOCUMENT + question)[0] for question in QUESTIONS]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (sentence,) = sentences
    assert sentence.startswith(f"prompt cache {tmp_path / 'cache'}: cannot write ")
    assert sentence.endswith("File too large; prompts are no longer stored")
    assert list((tmp_path / "cache").iterdir()) == []
    plain = cached(prompt_cache=None)
    for question, text in zip(QUESTIONS, texts, strict=True):
        assert answer(plain, DOCUMENT + question)[0] == text


def test_a_folder_that_cannot_be_created_is_one_warning(cached: Callable[..., Llama], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with reported() as sentences:
        llm = cached(prompt_cache=tmp_path / "file" / "cache")
        assert answer(llm, DOCUMENT)[1] == len(DOCUMENT)
        assert DOCUMENT not in llm.cache and llm.cache.cache_size == 0
    reason = f"cannot make the folder {tmp_path}/file: Not a directory; continuing without it"
    assert sentences == [f"prompt cache {tmp_path}/file/cache: {reason}"]


def test_a_read_only_folder(cached: Callable[..., Llama], tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("read-only folder: root may write everywhere")
    answer(cached(), DOCUMENT)
    folder = tmp_path / "cache"
    folder.chmod(0o500)
    try:
        with reported() as sentences:
            # it still serves; the first answer is shorter than n_rollback, so no token before it is evaluated again
            assert answer(cached(), DOCUMENT + QUESTIONS[0])[1] == 30
    finally:
        folder.chmod(0o700)
    assert len(sentences) == 1 and "Permission denied; prompts are no longer stored" in sentences[0]


#
# several processes
#

WRITER = """
import os, sys
from subkv.engine.llama import Llama
llm = Llama(sys.argv[1], kv_cache="subkv", n_ctx=512, n_threads=1, verbose=False, prompt_cache=sys.argv[2])
for seed in map(int, sys.argv[3:]):
    llm.create_completion([10 + seed + i % 150 for i in range(100)], max_tokens=1, temperature=0.0)
"""


def test_processes_at_once(cached: Callable[..., Llama], coded_model: Models, tmp_path: Path) -> None:
    """What they have stored in the background is there when they have ended."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(coded_model()), str(tmp_path / "cache"), *seeds],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for seeds in (("1", "2"), ("2", "3"))
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert (process.returncode, errors) == (0, "")
    llm = cached()
    for seed in (1, 2, 3):
        assert [10 + seed + i % 150 for i in range(100)] in llm.cache
    assert stored(tmp_path / "cache", "tmp") == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
def test_a_fork_opens_the_folder_again(cached: Callable[..., Llama]) -> None:
    """It has none of the store's threads: it must neither wait for them nor close what its parent uses."""
    llm = cached()
    answer(llm, DOCUMENT)
    child = os.fork()
    if child == 0:
        found = False
        try:
            found = DOCUMENT in llm.cache
            del llm
        finally:
            os._exit(0 if found else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert answer(cached(), DOCUMENT + [5])[1] == 1
    answer(llm, prompt(200, 4))
    assert prompt(200, 4) in llm.cache


TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40).map(lambda tokens: np.array(tokens, np.int32))


@given(TOKENS, TOKENS)
def test_common_prefix(a: Any, b: Any) -> None:
    n = common_prefix(a, b)
    assert a[:n].tolist() == b[:n].tolist()
    assert n == min(len(a), len(b)) or a[n] != b[n]
