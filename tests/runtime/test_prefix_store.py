"""The store of evaluated prompts: stored prompts are found and shared, the size is limited, and results are correct."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine
import pytest
from compiled import CXX, ROOT, linked, objects
from each import each
from engine import C, session
from stores import (
    BLOCK,
    IDENTITY,
    LEAST,
    LIB,
    Point,
    Prompt,
    Store,
    forged,
    head_name,
    opened,
    program,
    prompt,
    size,
    state,
    text,
    tokens_of,
)

WINDOW = (4, 16, 8)
PARTIAL = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
BANDS = [(8, 8), (8, 5), (16, 3)]
OTHER = bytes(32)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with opened(tmp_path / "store") as opening:
        yield opening


def test_stored_prompts_are_found(store: Store) -> None:
    """By the process that put it and by another one, byte for byte, checkpoints in order."""
    tokens = text(0, 3 * BLOCK + 17)
    given = prompt(tokens, points=(200, 400, 700))
    assert store.put(given)
    with opened(store.folder) as other:
        for reader in (store, other):
            found = reader.get([*tokens, 1, 2, 3])
            assert found
            assert (found.prompt, found.reach) == (given, len(tokens))
            assert (reader.stats.hits, reader.stats.restored) == (1, len(tokens))


@pytest.mark.parametrize("n", [1, LEAST - 1, LEAST, LEAST + 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_lengths(store: Store, n: int) -> None:
    """Fewer tokens than are worth it are not kept; the last token of a prompt is evaluated always."""
    tokens = text(1, n)
    given = prompt(tokens)
    assert store.put(given) == (n >= LEAST)
    found = store.get([*tokens, 5])
    assert (found.prompt if found else None) == (given if n >= LEAST else None)
    found = store.get(tokens)
    assert (found.reach if found else 0) == (n - 1 if n > LEAST else 0)


def test_states_of_any_bytes(store: Store) -> None:
    """A state without recognizable rows, an empty one, and one that only begins like a state."""
    rng = random.Random(2)
    for i, data in enumerate((b"", rng.randbytes(1), rng.randbytes(100_000), state(text(9, 400))[:4000])):
        tokens = text(10 + i, 400)
        given = Prompt(tokens, (data, b"x" * i))
        assert store.put(given)
        found = store.get([*tokens, 0])
        assert found and found.prompt == given


def test_equal_beginnings_share_their_blocks(store: Store) -> None:
    """Ten conversations with a common prefix take a third of their separate sizes; a draft model's states are shared,
    too.
    """
    begin = text(3, 20 * BLOCK)
    sizes = []
    for i in range(10):
        tokens = begin + text(100 + i, 30)
        assert store.put(prompt(tokens))
        sizes.append(sum(path.stat().st_size for path in store.files()))
    assert 3 * sizes[-1] < 10 * sizes[0]  # of so small rows the cells of a state, which differ, are an eighth
    assert len(store.files(".prefix")) == 10
    for i in range(10):
        tokens = begin + text(100 + i, 30)
        found = store.get([*tokens, 7])
        assert found and found.prompt == prompt(tokens)


def cells_of(how: str, n: int) -> list[int]:
    """Positions of n tokens by cell, as caches with one or several sequences hold them."""
    rng = random.Random(n)
    if how == "in order":
        return list(range(n))
    if how == "around the end":
        return [*range(100, n), *range(100)]
    if how == "in batches":
        batches = [list(range(i, min(i + 60, n))) for i in range(0, n, 60)]
        rng.shuffle(batches)
        return sum(batches, [])
    return rng.sample(range(n), n)  # one by one


@each("is_long", [False, True])
@each("how", ["in order", "around the end", "in batches", "one by one"])
def test_blocks_are_shared_whatever_cells_hold_them(tmp_path: Path, how: str, is_long: bool) -> None:
    """The folder grows by the new tokens, and every state comes back byte for byte, also from another process."""
    with opened(tmp_path / f"{how} {is_long}") as store:
        tokens = text(13, 9 * BLOCK + 50)
        n_blocks, last = 0, 0
        for turn, n in enumerate((3 * BLOCK + 10, 6 * BLOCK + 200, 9 * BLOCK + 50)):
            held = cells_of("in order" if turn == 0 else how, n)
            given = Prompt(tokens[:n], (state(tokens[:n], order=held, seq=turn, is_long=is_long), b""))
            assert store.put(given)
            for path in store.files(".piece"):  # earlier turns leave what only they had
                os.utime(path, (time.time() - 100,) * 2)
            assert store.put(Prompt(text(900 + turn, 40), (b"x", b"")))
            blocks = [path for path in store.files(".piece") if path.stat().st_size == 4 * 40 * BLOCK]
            assert len(blocks) == n // BLOCK > n_blocks
            assert size(store) - last < (n // BLOCK - n_blocks) * 4 * 40 * BLOCK + 4 * 40 * BLOCK + n * 50
            n_blocks, last = n // BLOCK, size(store)
            with opened(store.folder) as other:
                for reader in (store, other):
                    found = reader.get([*tokens[:n], 1])
                    assert found and found.prompt == given


def test_cells_of_two_caches(store: Store) -> None:
    """A model with a second cache of the same cells, such as an indexer's, shares its rows, too."""
    begin = text(15, 4 * BLOCK)
    for turn, n in enumerate((2 * BLOCK + 5, 4 * BLOCK)):
        held = cells_of("in batches" if turn else "in order", n)
        rows = [state(begin[:n], order=held), state(begin[:n], 1, 24, b"end", order=held)]
        assert store.put(Prompt(begin[:n], (b"".join(rows), b"")))
    blocks = [path for path in store.files(".piece") if path.stat().st_size == (4 * 40 + 2 * 24) * BLOCK]
    assert len(blocks) == 4


def test_identities_are_apart(store: Store) -> None:
    """Of another model, window or owner: not found, no piece shared, also where the first digits are the same."""
    near = IDENTITY[:16] + bytes(16)
    tokens = text(4, 2 * BLOCK)
    for i, identity in enumerate((IDENTITY, OTHER, near)):
        assert store.get([*tokens, 1], identity) is None
        assert store.put(Prompt(tokens, (state(tokens), bytes([i]))), identity)
    assert store.get([*tokens, 1], OTHER).prompt.states[1] == b"\1"  # type: ignore[union-attr]
    assert len(store.files(".piece")) == 3 * len({path.name for path in store.files(".piece")}) // 3
    assert store.stats.entries >= 2


def test_the_longest_useful_beginning(store: Store) -> None:
    """The usable length depends on the positions to which the cache can return, not on the common prefix."""
    begin = text(5, 400)
    short, long = begin[:300] + text(6, 100), begin + text(7, 100)
    assert store.put(prompt(short, n_removable=0))
    assert store.put(prompt(long, points=(120, 350), n_removable=0))
    prompt_tokens = [*begin, *text(8, 200)]
    for n_removable, n_reached in ((-1, 400), (100, 400), (99, 350), (0, 350)):
        found = store.get(prompt_tokens, n_removable=n_removable)
        assert found and found.reach == n_reached, n_removable
    assert store.get(prompt_tokens, n_held=350 - LEAST, n_removable=0)
    assert store.get(prompt_tokens, n_held=351 - LEAST, n_removable=0) is None
    assert store.get(prompt_tokens, n_removable=-1, n_max=399) is None
    found = store.get([*short, 1], n_removable=16)
    assert found and found.prompt.tokens == short
    assert [store.common(tokens) for tokens in (prompt_tokens, short, short[:5], [])] == [400, 400, 5, 0]
    assert store.common(short, OTHER) == 0


def test_slow_disks_are_not_read(store: Store) -> None:
    """After reads have been timed, tokens that evaluate faster than they load are evaluated."""
    tokens = text(11, 2 * BLOCK)
    assert store.put(prompt(tokens))
    assert store.get([*tokens, 1], seconds_per_token=1e-12)  # not known yet
    assert store.get([*tokens, 1], seconds_per_token=1e-12) is None
    assert store.get([*tokens, 1], seconds_per_token=1.0)
    assert store.get([*tokens, 1])


A, B, X = text(20, 300), text(21, 900), text(22, 50)  # runs of tokens, and other ones
COST = 48  # tokens of a run that are evaluated again
RUNS = {  # a stored prompt, a prompt, leading tokens that need no evaluation, tokens that a move saves (0: no prompt)
    "another beginning": ([1, *B, 2], [*X, *B, 3], 0, [900]),
    "no beginning": ([*X, *B], [*B, 3], 0, [900]),
    "a part": ([*X, *B], [*B[100:500], 3], 0, [400]),
    "the last token is evaluated": ([*X, *B], [*B[:257]], 0, [256]),
    "too short": ([*X, *B], [*B[:256]], 0, []),
    "several": ([*X, *A, *B], [1, *A, *X, *B, 3], 0, [300, 900]),
    "in another order": ([*A, *X, *B], [1, *B, *A, 3], 0, [900]),
    "one of two in another order": ([1, *B, *X, *A, 2], [*A, *B, 3], 0, [300]),
    "behind what is held": ([*X, *B], [9, *B, 3], 301, [600]),
    "behind the common beginning": ([*A, *X, *B], [*A, *B, 3], 300, [900]),
    "the common beginning, again": ([*B, *X], [*B, *A, *B, 3], 900, []),
    "repeated tokens": ([7] * 2000, [*X, *[7] * 900, 3], 0, [900]),
    "repeated tokens, too few": ([7] * 255 + [8], [*X, *[7] * 900, 3], 0, []),
    "a period": ([*X, *list(range(64)) * 9], [1, *list(range(64)) * 8, 3], 0, [512]),
}


@each("name", list(RUNS))
def test_text_that_may_move(tmp_path: Path, name: str) -> None:
    """Runs in the order of the stored prompt, which only have another text before them."""
    stored, asked, n_held, runs = RUNS[name]
    saved = sum(n - COST for n in runs)
    with opened(tmp_path / name) as store:
        assert store.put(prompt(stored))
        found = store.get(asked, n_held=n_held, n_moved=0)
        assert bool(found) == bool(runs)
        assert not found or (found.reach, found.prompt.tokens) == (n_held + saved, stored)
        assert bool(store.get(asked, n_held=n_held, n_moved=max(0, saved - LEAST))) == bool(runs)
        assert store.get(asked, n_held=n_held, n_moved=max(0, saved - LEAST + 1)) is None


@pytest.mark.parametrize("seed", range(5))
def test_random_text_that_may_move(store: Store, seed: int) -> None:
    """As many tokens as a slow search finds."""
    rng = random.Random(seed)
    parts = [text(100 * seed + i, rng.randrange(200, 500)) for i in range(6)]
    stored = [token for part in parts for token in part]
    asked = list(text(100 * seed + 50, rng.randrange(100)))
    kept = [part for part in parts if rng.random() < 0.7]
    for part in kept:
        asked += [*part[rng.randrange(40) :], *text(rng.randrange(1000, 2000), rng.randrange(1, 30))]
    expected, first = 0, 0
    at = 0
    while at < len(asked) - 1:  # greedy, as in find_runs
        n, where = max(
            (
                (len(os.path.commonprefix([stored[i:], asked[at:-1]])), -i)
                for i in range(first, len(stored))
                if stored[i] == asked[at]
            ),
            default=(0, 0),
        )
        if n >= 256:
            expected, first, at = expected + n - COST, -where + n, at + n
        else:
            at += 1
    assert store.put(prompt(stored))
    found = store.get(asked, n_moved=0)
    assert (found.reach if found else 0) == expected


def test_the_same_prompt_and_its_beginnings(store: Store) -> None:
    """Written once; a longer prompt replaces its prefixes if it serves them equally well."""
    tokens = text(12, 3 * BLOCK)
    for _ in range(2):
        assert store.put(prompt(tokens[:BLOCK]))
    assert store.put(prompt(tokens))
    assert store.put(prompt(tokens[: 2 * BLOCK]))
    assert len(store.files(".prefix")) == 1
    assert store.get([*tokens[:BLOCK], 1]).reach == BLOCK  # type: ignore[union-attr]
    short = Prompt(tokens[:40], (state(tokens[:40]), b""), n_removable=0)
    assert store.put(short)  # the long one cannot go back to it
    assert len(store.files(".prefix")) == 2
    longer = [*tokens, 1]
    assert store.put(Prompt(longer, (state(longer), b""), n_removable=0))  # nor can this one
    assert store.get([*tokens[:40], 1], n_removable=0)


@pytest.mark.parametrize(
    "points, n_removable, kept",
    [
        ([10, 200, 205, 400, 600, 800, 1000, 1195, 1199], -1, [200, 400, 600, 800, 1000, 1199]),
        ([10, 200, 205, 400, 600, 800, 1000, 1195, 1199], 5, [200, 400, 600, 800, 1000]),
        ([200, 400, 500, 600, 800, 1000, 1200], 0, [200, 400, 600, 800, 1000, 1200]),
        ([700, 1190, 1199], 16, [700]),
        ([10, 20], 0, [20]),
        ([10], 0, [10]),
        ([1190], 16, []),
        ([400, 200], 0, [200, 400]),
    ],
)
def test_checkpoints_are_thinned(store: Store, points: list[int], n_removable: int, kept: list[int]) -> None:
    """Checkpoints that save the most evaluation stay, and always the last one; invalid ones are dropped."""
    tokens = text(13, 1200)
    given = prompt(tokens, points, n_removable=n_removable)
    given.points.extend([Point(1201), Point(-1)])
    assert store.put(given)
    found = store.get([*tokens, 1])
    assert found and [point.n_tokens for point in found.prompt.points] == kept


def test_a_refused_prompt_is_skipped(store: Store) -> None:
    tokens = text(14, 100)
    assert store.put(prompt(tokens))
    assert store.get([*tokens, 1], refused=True)
    assert store.get([*tokens, 1]) is None
    assert store.put(prompt(tokens))
    assert store.get([*tokens, 1])


def test_damaged_pieces_are_replaced(store: Store) -> None:
    """All pieces of a prompt, even if its head is lost."""
    tokens = text(16, 600)
    given = prompt(tokens)
    for with_head in (True, False):
        store.put(given)
        for path in store.files(".piece"):
            path.write_bytes(bytes(path.stat().st_size))
        if with_head:
            assert store.get([*tokens, 1]) is None
            assert not store.files(".piece")
        else:
            store.files(".prefix")[0].unlink()
        store.put(given)
        found = store.get([*tokens, 1])
        assert found and found.prompt == given


def test_files_are_private(store: Store) -> None:
    store.put(prompt(text(15, 300)))
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in store.files()} == {0o600}


@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda path: path.write_text(""), "expected a folder, found something else"),
        *(
            (
                lambda path, mode=mode: path.mkdir() or path.chmod(mode),
                f"only this user can write to, found mode {mode:04o}",
            )
            for mode in (0o777, 0o775, 0o770, 0o702)
        ),
        (lambda path: path.symlink_to(path.parent / "nowhere" / "at all"), "cannot read .*: No such file or directory"),
    ],
)
def test_folders_that_cannot_be_used(tmp_path: Path, make: Callable[[Path], Any], sentence: str) -> None:
    make(tmp_path / "store")
    with pytest.raises(OSError, match=sentence):
        Store(tmp_path / "store")
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "store", tmp_path / "file" / "folder" / "store"):
        with pytest.raises(OSError, match=rf"cannot make the folder {tmp_path}/file.*: Not a directory"):
            Store(path)


#
# real states
#


IN_FOLDER_OF = """
import os, sys
from pathlib import Path
from stores import opened, prompt, text
user = int(sys.argv[2])
os.setgid(user)
os.setuid(user)
try:
    with opened(Path(sys.argv[1])) as store:
        print("found" if store.get([*text(90, 100), 1]) else "nothing found")
except OSError as refused:
    print(refused)
"""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
@each("owner", [0, 1234])
@each("user", [0, 1234, 4321])
def test_owners(owner: int, user: int) -> None:
    """A folder is this user's, or root's; so is every file in it."""
    with tempfile.TemporaryDirectory() as free:  # pytest's folders are root's alone
        os.chmod(free, 0o755)
        folder = Path(free) / "store"
        with opened(folder) as store:
            store.put(prompt(text(90, 100)))

        def seen(of_folder: int, of_files: int) -> str:
            for path in [folder, *folder.iterdir()]:
                os.chown(path, *((of_folder,) * 2 if path == folder else (of_files,) * 2))
                path.chmod(0o755 if path == folder else 0o644)
            process = program(IN_FOLDER_OF, folder, user)
            printed, errors = process.communicate()
            assert process.returncode == 0, errors[-3000:]
            return printed.strip()

        if owner in (0, user):
            assert seen(owner, owner) == "found"
            assert seen(owner, 1000) == "nothing found"
        else:
            sentence = (
                f"expected a folder that only this user can write to, found owner {owner} (chown it to user {user})"
            )
            assert seen(owner, 0) == f"SUBKV_STORE: {sentence}: {folder}"


def partial(s: engine.Session) -> bytes:
    size = C.llama_state_seq_get_size_ext(s.ctx, 0, PARTIAL)
    data = (ctypes.c_uint8 * size)()
    assert C.llama_state_seq_get_data_ext(s.ctx, data, size, 0, PARTIAL) == size
    return bytes(data)


ADAPT = "kv,block=8,length=16,warm=16,max_chunks=3,gain=100,reuse=0,merge=1"


@pytest.mark.parametrize(
    "arch, kind",
    [
        ("llama", "ordinary"),
        ("gemma2", "ordinary"),
        ("lfm2", "ordinary"),
        ("qwen2vl", "ordinary"),
        ("llama", "coded"),
        ("llama", "adaptive"),
    ],
)
def test_states_of_models(
    tiny_model: Callable[..., Path], make_layout: Callable[..., Any], store: Store, arch: str, kind: str
) -> None:
    """A context that restores a stored prompt continues like the one that stored it; blocks of rows are shared."""
    model = engine.Model(tiny_model(arch))
    layout = None if kind == "ordinary" else make_layout(BANDS, BANDS)
    adapt = ADAPT if kind == "adaptive" else None
    tokens = model.random_tokens(2 * BLOCK + 50, seed=3)
    options = {"window": WINDOW, "n_ctx": 1024, "flash_attn": 1, "adapt": adapt}
    with session(model, layout, **options) as s:
        s.decode(tokens[:BLOCK])
        points = [
            Point(BLOCK, 0, BLOCK - 1, (b"" if adapt else partial(s), b"", b""))
        ]  # adaptive bases have no such tail
        s.decode(tokens[BLOCK:], BLOCK)
        given = Prompt(tokens, (s.state(0), b""), points, n_removable=8)
        assert store.put(given)
        expected = s.decode([5, 6, 7], len(tokens))
    if arch in ("llama", "qwen2vl"):  # others keep some of their rows elsewhere
        assert len(store.files(".piece")) == 2 + 1 + (not adapt)
    with session(model, layout, **options) as s, opened(store.folder) as other:
        found = other.get([*tokens, 5, 6, 7], n_removable=8)
        assert found and found.prompt == Prompt(tokens, given.states, points, 8)
        assert s.set_state(found.prompt.states[0], 0) == len(found.prompt.states[0])
        assert engine.agree(s.decode([5, 6, 7], len(tokens)), expected)
    model.free()


@pytest.mark.parametrize("kind", ["ordinary", "coded"])
def test_sequences_of_one_cache_share_their_blocks(
    tiny_model: Callable[..., Path], make_layout: Callable[..., Any], store: Store, kind: str
) -> None:
    """Of a text whose cells lie around those of another sequence and before its beginning: only new blocks are written,
    and a context restores it.
    """
    model = engine.Model(tiny_model())
    layout = None if kind == "ordinary" else make_layout(BANDS, BANDS)
    options = {"window": WINDOW, "n_ctx": 1536, "flash_attn": 1, "n_seq_max": 2, "unified": True}
    tokens = model.random_tokens(1200, seed=4)
    steps = (300, 700, 1100)
    with session(model, layout, **options) as s:
        s.decode(tokens[:200], 0, 1)
        written: set[Path] = set()
        for turn, (begin, end) in enumerate(zip((0, *steps), steps, strict=False)):
            s.decode(tokens[begin:end], begin)
            if turn == 0:
                s.decode(tokens[200:800], 200, 1)  # the next turn begins behind them, and ends before them
            else:
                assert s.rm(1, 100 if turn == 1 else 0)
            given = Prompt(tokens[:end], (s.state(0), b""))
            assert store.put(given)
            new = set(store.files(".piece")) - written
            assert len(new) == end // BLOCK - begin // BLOCK + 1  # and the rest
            written |= new
        assert store.files(".prefix")[0].read_bytes().startswith(b"subkvPX2")
        expected = s.decode([5, 6, 7], steps[-1])
    with session(model, layout, **options) as s, opened(store.folder) as other:
        found = other.get([*tokens[: steps[-1]], 5])
        assert found and found.prompt == given
        assert s.set_state(found.prompt.states[0], 0) == len(found.prompt.states[0])
        assert engine.agree(s.decode([5, 6, 7], steps[-1]), expected)
    model.free()


#
# bounds
#


def test_the_least_useful_is_removed_first(tmp_path: Path) -> None:
    """The least recently used is removed first if size and length are equal; shared pieces stay."""
    one = prompt(text(50, BLOCK + 40))
    n = len(one.states[0]) + len(one.states[1])
    with opened(tmp_path / "store", 4 * n) as store:
        texts = [text(50 + i, BLOCK + 40) for i in range(6)]
        for i, tokens in enumerate(texts):
            store.put(prompt(tokens))
            for path in store.files():
                age = path.stat().st_mtime - 100
                os.utime(path, (age, age))
            if i == 1:
                assert store.get([*texts[0], 1])
            assert size(store) <= 4 * n
            assert store.stats.bytes == size(store)
        held = [bool(store.get([*tokens, 1])) for tokens in texts]
        assert held[-1] and not held[1] and 2 <= sum(held) < 6


@pytest.fixture(scope="module")
def eviction(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which(CXX) is None:
        pytest.skip(f"needs {CXX}")
    native = ROOT / "runtime" / "native"
    sources = [Path(__file__).with_name("eviction.cpp")]
    sources += [native / name for name in ("store/prefix_eviction.cpp", "store/prefix_blocks.cpp", "base/sha256.cpp")]
    flags = ["-std=c++17", "-O1", f"-I{native}/store", f"-I{native}/base"]
    folder = tmp_path_factory.mktemp("eviction")
    return linked(folder / "eviction", objects(sources, flags, folder))


def test_eviction_follows_its_definition(eviction: Path) -> None:
    """The next prompt is the one with the highest cost, after any removals, with pieces that prompts share."""
    for seed in range(8):
        subprocess.run([eviction, "40", str(seed), "1"], check=True)


def test_the_work_of_eviction_is_linear(eviction: Path) -> None:
    """Each piece of each prompt is visited twice at most, whatever number of prompts is removed."""
    for n in (50, 500, 5000):
        printed = subprocess.run([eviction, str(n), "1", "0"], check=True, capture_output=True, text=True).stdout
        n_pieces, n_visits = map(int, printed.split())
        assert n <= n_pieces <= n_visits <= 2 * n_pieces


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can make a file immutable")
def test_files_that_cannot_be_removed(tmp_path: Path) -> None:
    """They count toward the limit, one line names one of them, and others are removed instead."""
    one = prompt(text(57, 300))
    n = len(one.states[0]) + len(one.states[1])
    with opened(tmp_path / "store", 5 * n) as store:
        for i in range(2):
            assert store.put(prompt(text(57 + i, 300)))
        stuck = store.files()
        try:
            if any(subprocess.run(["chattr", "+i", str(path)], capture_output=True).returncode for path in stuck):
                pytest.skip("no immutable files here")
            for i in range(2, 12):
                assert store.put(prompt(text(57 + i, 300)))
                assert store.stats.bytes == size(store) <= 5 * n
            assert set(stuck) < set(store.files())
            assert all(store.get([*text(57 + i, 300), 1]) for i in (0, 1, 11))
            line = LIB.subkv_store_failure(store.handle).decode()
            assert line.startswith(f"cannot remove {store.folder}/")
            assert line.endswith("Operation not permitted; files that cannot be removed count toward the limit")
            assert not LIB.subkv_store_failure(store.handle)
            store.close()
            store.handle = LIB.subkv_store_open(str(store.folder).encode(), n)  # the limit is below what stays
            assert store.put(prompt(text(80, 40)))
            assert store.stats.bytes == size(store) > n
            assert store.stats.dropped == 1
            assert "cannot remove" in LIB.subkv_store_failure(store.handle).decode()
        finally:
            for path in stuck:
                subprocess.run(["chattr", "-i", str(path)], capture_output=True)


def test_pieces_of_earlier_turns_are_removed(tmp_path: Path) -> None:
    """Pieces of one turn only are removed a minute after the next turn is stored, when no reader can need them."""
    with opened(tmp_path / "store") as store:
        tokens = text(55, 3 * BLOCK + 10)
        names = []
        for n in (BLOCK + 10, 2 * BLOCK + 10, 3 * BLOCK + 10):
            assert store.put(prompt(tokens[:n], points=(n - 200,)))
            names.append({path.name for path in store.files()})
        assert len(store.files(".prefix")) == 1
        for path in store.files():
            os.utime(path, (time.time() - 100,) * 2)
        other = text(56, 40)
        assert store.put(prompt(other))
        with opened(tmp_path / "alone") as alone:
            for given in (prompt(tokens, points=(3 * BLOCK - 190,)), prompt(other)):
                assert alone.put(given)
            assert {path.name for path in store.files()} == {path.name for path in alone.files()}
        assert names[0] - {path.name for path in store.files()}
        assert store.get([*tokens, 1])


def test_one_that_is_too_large(tmp_path: Path) -> None:
    with opened(tmp_path / "store", 20_000) as store:
        assert (store.room(20_000), store.room(20_001)) == (1, -1)
        assert store.put(prompt(text(60, 40)))
        assert not store.put(prompt(text(61, 400)))
        assert store.stats.dropped == 1
        assert store.get([*text(60, 40), 1])


def test_many_prompts(tmp_path: Path) -> None:
    """More than there are places: the number of files is bounded, too."""
    with opened(tmp_path / "store") as store:
        store.put(Prompt(text(1, 40), (b"s", b"")))
        head = store.files(".prefix")[0].read_bytes()
        body = head[72:]
        for i in range(1100):
            tokens = [*text(1, 39), i + 2000]
            forged_body = body[:64] + tokens_of(tokens) + body[64 + 4 + 160 :]
            path = store.folder / head_name(IDENTITY, tokens)
            path.write_bytes(forged(forged_body))
            os.utime(path, (1000 + i, 1000 + i))
        store.put(Prompt(text(2, 40), (b"t", b"")))
        assert len(store.files(".prefix")) <= 1024 + 1
        assert store.get([*text(2, 40), 1])


def test_leftover_files_of_killed_processes(tmp_path: Path) -> None:
    """Files older than an hour are removed; younger ones may be in use."""
    with opened(tmp_path / "store") as store:
        store.put(prompt(text(70, 40)))
        names = [f".{'0' * 64}.piece.1.0123456789abcdef.tmp", f"{'1' * 64}.piece"]
        old = [store.folder / f"{name}" for name in names]
        young = [store.folder / name.replace("0" * 64, "2" * 64).replace("1" * 64, "3" * 64) for name in names]
        for path in (*old, *young):
            path.write_bytes(b"x")
        for path in old:
            os.utime(path, (time.time() - 4000,) * 2)
        store.put(prompt(text(71, 40)))
        assert not any(path.exists() for path in old)
        assert all(path.exists() for path in young)
