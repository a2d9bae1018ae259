"""How the build gets, checks and patches the llama.cpp source, on a small tree with its own pin."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import llama_source as s
import pytest

FILES = {
    "CMakeLists.txt": b"project(x)\n",
    "LICENSE": b"MIT\n",
    "cmake/a.cmake": b"set(a 1)\n",
    "conversion/base.py": b"x = 1\n",
    "convert_hf_to_gguf.py": b"import conversion\n",
    "ggml/src/g.c": b"int g;\n",
    "include/llama.h": b"int h;\n",
    "src/llama.cpp": b"one\ntwo\nthree\n",
    "src/other.cpp": b"int other;\n",
    "vendor/hash/h.c": b"int v;\n",
}
# files that only a build with SUBKV_PROGRAMS uses
PROGRAMS = {
    "common/common.cpp": b"int common;\nint last;\n",
    "scripts/ui-assets.cmake": b"set(ui 1)\n",
    "tools/server/server.cpp": b"int server;\n",
    "tools/ui/src/page.svelte": b"page\n",
    "vendor/cpp-httplib/x.h": b"int x;\n",
}
UNWANTED = {
    "README.md": b"no\n",
    "common/__pycache__/x.pyc": b"no\n",
    "conversion/__pycache__/base.pyc": b"no\n",
    "gguf-py/tests/t.py": b"no\n",
    "scripts/x.sh": b"no\n",
    "srcs/x": b"no\n",
    "tools/mtmd/test-2.mp3": b"no\n",
    "tools/quantize/q.cpp": b"no\n",
    "tools/server/tests/t.py": b"no\n",
    "tools/t.cpp": b"no\n",
    "tools/ui/dist/index.html": b"no\n",
    "tools/ui/node_modules/x/i.js": b"no\n",
}
PATCH = b"--- a/src/llama.cpp\n+++ b/src/llama.cpp\n@@ -1,3 +1,3 @@\n one\n-two\n+TWO\n three\n"
COMMON_PATCH = (
    b"--- a/common/common.cpp\n+++ b/common/common.cpp\n@@ -1,2 +1,2 @@\n-int common;\n+int COMMON;\n int last;\n"
)
COMMON_PATCHED = {"common/common.cpp": b"int COMMON;\nint last;\n"}
PATCHED = b"one\nTWO\nthree\n"


def fill(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source archive in the cache; pip is never called."""
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv("SUBKV_CACHE", str(cache))
    path = cache / "llama_cpp_python-9.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, data in (FILES | PROGRAMS | UNWANTED).items():
            info = tarfile.TarInfo(f"llama_cpp_python-9/vendor/llama.cpp/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture
def pin(tmp_path: Path, archive: Path) -> Path:
    folder = tmp_path / "pin"
    (folder / "patches" / "cache").mkdir(parents=True)
    (folder / "patches" / "cache" / "llama.cpp.patch").write_bytes(PATCH)
    (folder / "VERSION").write_text(
        f"package llama-cpp-python\nversion 9\nsha256 {s.file_hash(archive)}\ncommit abc\n"
        f"tree {s.tree_hash(FILES)}\nprograms {s.tree_hash(FILES | PROGRAMS)}\n",
        encoding="utf-8",
    )
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return fill(tmp_path / "source", FILES | PROGRAMS | UNWANTED)


Prepare = Callable[..., Path]


@pytest.fixture
def prepare(tmp_path: Path, pin: Path) -> Prepare:
    def run(source: Path | None = None, stock: Path | None = None, programs: bool = False) -> Path:
        s.prepare(pin, tmp_path / "tree", stock, source, programs)
        return tmp_path / "tree"

    return run


def snapshot(root: Path) -> dict[str, tuple[bytes, int]]:
    return {
        p.relative_to(root).as_posix(): (p.read_bytes(), p.stat().st_mtime_ns) for p in root.rglob("*") if p.is_file()
    }


@pytest.mark.parametrize("from_dir", [False, True])
def test_copies_needed_files_and_patches_them(prepare: Prepare, source: Path, tmp_path: Path, from_dir: bool) -> None:
    before = snapshot(source)
    tree = prepare(source if from_dir else None, tmp_path / "stock")
    assert s.read_dir(tree) == FILES | {"src/llama.cpp": PATCHED}
    assert set(snapshot(tree)) == set(FILES) | {s.STAMP}
    assert s.read_dir(tmp_path / "stock") == {
        p: FILES[p] for p in ("include/llama.h", "src/llama.cpp", "src/other.cpp")
    }
    assert snapshot(source) == before


@pytest.mark.parametrize("from_dir", [False, True])
def test_files_of_programs_follow_the_option(
    prepare: Prepare, pin: Path, source: Path, tmp_path: Path, from_dir: bool
) -> None:
    """A plain build has none of the programs' files and patches, even after a build with programs."""
    (pin / "patches" / "cache" / "common.cpp.patch").write_bytes(COMMON_PATCH)
    given = source if from_dir else None
    plain = FILES | {"src/llama.cpp": PATCHED}
    for _ in range(2):
        tree = prepare(given)
        assert set(snapshot(tree)) == set(plain) | {s.STAMP}
        assert s.read_dir(tree) == plain
        before = snapshot(tree)
        tree = prepare(given, tmp_path / "stock", programs=True)
        assert s.read_dir(tree, programs=True) == plain | PROGRAMS | COMMON_PATCHED
        assert set(snapshot(tree)) == set(plain) | set(PROGRAMS) | {s.STAMP}
        after = snapshot(tree)
        assert {path for path in before if after[path] != before[path]} == {s.STAMP}
        prepare(given, programs=True)
        assert snapshot(tree) == after


def test_programs_need_their_files_and_a_plain_build_does_not(prepare: Prepare, source: Path) -> None:
    (source / "tools/server/server.cpp").write_bytes(b"int edited;\n")
    with pytest.raises(s.SourceError, match="differs from pristine in tools/server/server.cpp$"):
        prepare(source, programs=True)
    assert s.read_dir(prepare(source), programs=True) == FILES | {"src/llama.cpp": PATCHED}


def test_programs_of_a_patched_build_copy_are_taken(prepare: Prepare, pin: Path, source: Path) -> None:
    (pin / "patches" / "cache" / "common.cpp.patch").write_bytes(COMMON_PATCH)
    fill(source, COMMON_PATCHED | {"src/llama.cpp": PATCHED})
    tree = prepare(source, programs=True)
    assert s.read_dir(tree, programs=True) == FILES | PROGRAMS | {"src/llama.cpp": PATCHED} | COMMON_PATCHED


def test_edited_program_of_the_build_copy_is_refused(prepare: Prepare) -> None:
    tree = prepare(programs=True)
    (tree / "tools/server/server.cpp").write_bytes(b"int edited;\n")
    with pytest.raises(s.SourceError, match="found edited files"):
        prepare()


def test_wrong_hash_of_the_programs_is_refused(prepare: Prepare, pin: Path, tmp_path: Path) -> None:
    version = (pin / "VERSION").read_text(encoding="utf-8")
    (pin / "VERSION").write_text(version.replace("programs ", "programs 0"), encoding="utf-8")
    with pytest.raises(s.SourceError, match="llama_cpp_python-9.tar.gz: expected tree 0"):
        prepare(programs=True)
    assert not (tmp_path / "tree").exists()
    prepare()


def test_patched_source_of_the_same_digest_is_accepted(prepare: Prepare, source: Path) -> None:
    (source / "src/llama.cpp").write_bytes(PATCHED)
    assert (prepare(source) / "src/llama.cpp").read_bytes() == PATCHED


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("src/llama.cpp", b"one\ntwo\nthree\nfour\n"),
        ("src/llama.cpp", PATCHED + b"four\n"),
        ("src/llama.cpp", b"one\nother patch\nthree\n"),
        ("src/other.cpp", b"int edited;\n"),
        ("ggml/src/new.c", b"int n;\n"),
    ],
)
def test_dirty_source_is_refused(prepare: Prepare, source: Path, tmp_path: Path, path: str, data: bytes) -> None:
    fill(source, {path: data})
    with pytest.raises(
        s.SourceError, match=f"^SUBKV_LLAMA_CPP_SOURCE: expected llama.cpp abc, .*differs .* in {path}$"
    ):
        prepare(source)
    assert not (tmp_path / "tree").exists()


def test_missing_file_and_wrong_folder_are_refused(prepare: Prepare, source: Path, tmp_path: Path) -> None:
    (source / "ggml/src/g.c").unlink()
    with pytest.raises(s.SourceError, match="differs from pristine in ggml/src/g.c"):
        prepare(source)
    with pytest.raises(s.SourceError, match="found no src/llama.cpp"):
        prepare(tmp_path / "nowhere")


def test_up_to_date_tree_is_not_touched_and_needs_no_archive(prepare: Prepare, archive: Path) -> None:
    before = snapshot(prepare())
    archive.unlink()
    assert snapshot(prepare()) == before


def test_changed_patch_rewrites_only_its_file(prepare: Prepare, pin: Path) -> None:
    tree = prepare()
    before = snapshot(tree)
    (pin / "patches" / "cache" / "llama.cpp.patch").write_bytes(PATCH.replace(b"TWO", b"2"))
    prepare()
    after = snapshot(tree)
    assert after["src/llama.cpp"][0] == b"one\n2\nthree\n"
    assert {p for p in after if after[p] != before[p]} == {"src/llama.cpp", s.STAMP}


def test_removed_patch_restores_the_file(prepare: Prepare, pin: Path) -> None:
    prepare()
    (pin / "patches" / "cache" / "llama.cpp.patch").unlink()
    assert s.read_dir(prepare()) == FILES


def test_edited_build_copy_is_refused_and_kept(prepare: Prepare, pin: Path) -> None:
    tree = prepare()
    (tree / "src/other.cpp").write_bytes(b"int edited;\n")
    (pin / "patches" / "cache" / "llama.cpp.patch").write_bytes(PATCH.replace(b"TWO", b"2"))
    with pytest.raises(s.SourceError, match="found edited files"):
        prepare()
    assert (tree / "src/other.cpp").read_bytes() == b"int edited;\n"


def test_foreign_folder_is_refused(prepare: Prepare, tmp_path: Path) -> None:
    fill(tmp_path / "tree", {"notes.txt": b"mine\n"})
    with pytest.raises(s.SourceError, match="expected a tree written by this build"):
        prepare()
    assert (tmp_path / "tree/notes.txt").read_bytes() == b"mine\n"


def test_interrupted_write_is_repaired(prepare: Prepare, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write, calls = s._write, 0

    def failing(path: Path, data: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(path.name + ".tmp").write_bytes(data[:1])
            raise KeyboardInterrupt
        write(path, data)

    monkeypatch.setattr(s, "_write", failing)
    with pytest.raises(KeyboardInterrupt):
        prepare()
    monkeypatch.setattr(s, "_write", write)
    assert s.read_dir(prepare()) == FILES | {"src/llama.cpp": PATCHED}


def test_patch_that_does_not_fit_writes_nothing(prepare: Prepare, pin: Path, tmp_path: Path) -> None:
    (pin / "patches" / "cache" / "llama.cpp.patch").write_bytes(PATCH.replace(b"-two", b"-zwei"))
    with pytest.raises(s.DiffError, match=r"src/llama.cpp line 2: expected 'zwei\\n', found 'two\\n'"):
        prepare()
    assert not (tmp_path / "tree").exists()


def test_two_patches_of_one_file_in_a_queue_are_refused(prepare: Prepare, pin: Path) -> None:
    (pin / "patches" / "cache" / "z.patch").write_bytes(PATCH)
    with pytest.raises(s.SourceError, match="one patch per upstream file in a queue"):
        prepare()


def test_queues_change_one_file(prepare: Prepare, pin: Path, tmp_path: Path) -> None:
    """Line numbers are those of the pristine file, in each queue; a queue can be left out; both can be reverted."""
    (pin / "patches" / "upstream").mkdir()
    other = pin / "patches" / "upstream" / "llama.cpp.patch"
    other.write_bytes(PATCH.replace(b"@@ -1,3 +1,3 @@\n one\n-two\n+TWO\n", b"@@ -1,3 +1,4 @@\n one\n+1.5\n two\n"))
    with pytest.raises(s.DiffError, match=r"hunk 1: expected other lines than those of upstream/llama.cpp.patch"):
        prepare()
    other.write_bytes(PATCH.replace(b"@@ -1,3 +1,3 @@\n one\n-two\n+TWO\n three\n", b"@@ -3 +3,2 @@\n three\n+4\n"))
    tree = prepare()
    assert (tree / "src/llama.cpp").read_bytes() == b"one\nTWO\nthree\n4\n"
    assert s.pristine_from_dir(tree, pin) == FILES
    s.prepare(pin, tmp_path / "without", None, None, without=["upstream"])
    assert (tmp_path / "without" / "src/llama.cpp").read_bytes() == PATCHED


def test_patches_outside_a_queue_are_refused(prepare: Prepare, pin: Path) -> None:
    (pin / "patches" / "z.patch").write_bytes(PATCH)
    with pytest.raises(s.SourceError, match=r"z.patch: expected patches in cache, gpu, upstream, found one elsewhere"):
        prepare()


def test_digest_depends_on_pin_and_patches(pin: Path) -> None:
    digests = [s.digest(pin)]
    (pin / "patches" / "cache" / "llama.cpp.patch").write_bytes(PATCH.replace(b"TWO", b"2"))
    digests.append(s.digest(pin))
    (pin / "patches" / "cache" / "llama.cpp.patch").rename(pin / "patches" / "cache" / "b.patch")
    digests.append(s.digest(pin))
    version = (pin / "VERSION").read_text(encoding="utf-8")
    (pin / "VERSION").write_text(version.replace("abc", "abd"), encoding="utf-8")
    digests.append(s.digest(pin))
    assert len(set(digests)) == 4


def test_damaged_archive_is_fetched_again(
    prepare: Prepare, archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = archive.read_bytes()
    archive.write_bytes(good[:-1])

    def download(version: dict[str, str], folder: Path) -> Path:
        (folder / s.archive_name(version)).write_bytes(good)
        return folder / s.archive_name(version)

    monkeypatch.setattr(s, "pip_download", download)
    assert s.read_dir(prepare()) == FILES | {"src/llama.cpp": PATCHED}
    assert archive.read_bytes() == good
    assert [p.name for p in archive.parent.iterdir()] == [archive.name]
    assert "does not have the pinned SHA-256" in capsys.readouterr().out


def test_wrong_download_is_refused_and_not_kept(
    prepare: Prepare, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive.unlink()

    def download(version: dict[str, str], folder: Path) -> Path:
        (folder / s.archive_name(version)).write_bytes(b"something else")
        return folder / s.archive_name(version)

    monkeypatch.setattr(s, "pip_download", download)
    with pytest.raises(s.SourceError, match="llama_cpp_python-9.tar.gz: expected SHA-256"):
        prepare()
    assert list(archive.parent.iterdir()) == []


def test_unwritable_cache_falls_back_to_the_build_folder(
    prepare: Prepare, archive: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = archive.read_bytes()
    blocked = tmp_path / "blocked"
    blocked.write_bytes(b"a file where the cache folder should be")
    monkeypatch.setenv("SUBKV_CACHE", str(blocked))

    def download(version: dict[str, str], folder: Path) -> Path:
        (folder / s.archive_name(version)).write_bytes(good)
        return folder / s.archive_name(version)

    monkeypatch.setattr(s, "pip_download", download)
    assert s.read_dir(prepare()) == FILES | {"src/llama.cpp": PATCHED}
    assert f"cache {blocked} is not writable" in capsys.readouterr().out
    assert (tmp_path / "sdist" / archive.name).read_bytes() == good


def test_pip_downloads_the_pin_and_errors_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    version = {"package": "llama-cpp-python", "version": "9", "sha256": "0" * 64}
    with pytest.raises(
        s.SourceError, match=r"pip could not download llama-cpp-python==9 (?s:.*)SUBKV_LLAMA_CPP_SOURCE"
    ):
        s.pip_download(version, tmp_path)


def test_main_reports_one_sentence(pin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (pin / "VERSION").write_text("package x\n", encoding="utf-8")
    assert s.main(["prepare", "--pin", str(pin), "--tree", str(tmp_path / "tree")]) == 1
    assert "expected the keys package version sha256 commit tree programs, found package" in capsys.readouterr().err
