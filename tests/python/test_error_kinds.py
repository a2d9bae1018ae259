"""libsubkv says what failed (subkv_error): in C, and as the errors of Python, which reads no sentences."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from compiled import ROOT, linked, objects
from gguf import GGUFReader

from subkv.base.errors import CacheError, NoCodedCacheError, SubkvError
from subkv.engine.cache import choose_cache, creation_error, parse_cache
from subkv.engine.request import CacheRequest
from subkv.format.layout import Layout
from subkv.native import library
from subkv.native.bases import stored_path
from subkv.native.store import Store

Models = Callable[..., Path]
HERE = Path(__file__).resolve().parent


def damaged(model: Path, folder: Path) -> Path:
    """A copy whose bases differ in one character, behind an unchanged digest."""
    copied = folder / "damaged.gguf"
    shutil.copy(model, copied)
    field = GGUFReader(copied, "r+").fields["subkv.calibration.text"]
    field.parts[field.data[0]][0] ^= np.uint8(1)
    return copied


def test_texts_of_a_file_are_escaped(coded_model: Models, tmp_path: Path) -> None:
    copied = shutil.copy(coded_model(), tmp_path / "hostile.gguf")
    field = GGUFReader(copied, "r+").fields["subkv.codec"]
    field.parts[field.data[0]][:2] = np.frombuffer(b"\x1b\xff", np.uint8)
    with pytest.raises(CacheError, match="codec") as refused:
        Layout(Path(copied))
    failure = library.last_failure()
    for text in (failure.reason, failure.sentence(), refused.value.reason, refused.value.cause):
        assert text.isprintable() and "expected" in text


def test_in_c(tiny_model: Models, coded_model: Models, tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("needs cc")
    flags = ["-std=c99", "-Wall", "-Werror", f"-I{ROOT / 'runtime' / 'native' / 'include'}"]
    built = objects([HERE / "errors.c"], flags, tmp_path, compiler="cc")
    libraries = library.lib_dir()
    subkv = str(libraries / f"libsubkv{library.SUFFIX}")
    paths = [f"-Wl,-rpath,{libraries}", f"-Wl,-rpath-link,{libraries}"]
    program = linked(tmp_path / "errors", [*built, subkv, *paths], compiler="cc")
    model = coded_model()
    done = subprocess.run(
        [program, tiny_model("llama"), damaged(model, tmp_path), model], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_kinds(tiny_model: Models, coded_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = coded_model(), tiny_model("llama")
    with pytest.raises(CacheError) as bad:
        Layout(damaged(model, tmp_path))
    failure = library.last_failure()
    assert (failure.kind, failure.key) == (library.INVALID, "subkv.keys.sha256")
    assert bad.value.reason == library.last_error() == f"{bad.value.cause}; convert the base model again"
    assert "convert" not in bad.value.cause and failure.sentence("subkv.keys.sha256").startswith("expected the digest")
    with pytest.raises(CacheError, match="^kv_bits: expected .* has a plan, found 64; `subkv convert MODEL"):
        choose_cache(plain, CacheRequest(bases=model, kv_bits=64))
    monkeypatch.setenv("SUBKV_BITS", "four")
    with pytest.raises(CacheError, match="^SUBKV_BITS: expected bits per element, such as 3 or 4.25, found 'four'$"):
        choose_cache(plain, CacheRequest("subkv"))
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", "")
    with pytest.raises(SubkvError, match="^XDG_CACHE_HOME: expected an absolute path, .* found 'here'$"):
        stored_path(plain, "0" * 64)
    seen: list[library.Failure] = []
    thread = threading.Thread(target=lambda: seen.append(library.last_failure()))
    thread.start()
    thread.join()
    assert seen == [library.Failure()], "errors belong to their thread"


def test_a_store_that_the_system_refuses_is_not_used(tmp_path: Path) -> None:
    """A path that is no folder is the user's error; one that cannot be created is the system's."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="^prompt_cache: expected a folder, found something else"):
        Store(tmp_path / "file", 1 << 20)
    assert library.last_failure().kind == library.INVALID
    with pytest.warns(UserWarning, match="; continuing without it"):
        Store(Path("/proc/nothing/here"), 1 << 20)
    assert library.last_failure().kind == library.UNAVAILABLE


def test_errors_of_a_context(coded_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a model that cannot be coded raises NoCodedCacheError, and only memory gets no advice to take f16."""
    model = coded_model()
    choice, log = parse_cache("subkv", model), list[tuple[int, str]]()
    advice = "choose f16 to run without coefficients"
    no_model, no_layer = library.Failure(library.UNSUPPORTED, "model x", "no cache", "use y"), "its cache is on X"
    for failure, kind, expected in (
        (no_model, NoCodedCacheError, "model x: no cache; use y"),
        (
            library.Failure(library.UNSUPPORTED, "layer 3", no_layer),
            NoCodedCacheError,
            f"layer 3: {no_layer}; {advice}",
        ),
        (library.Failure(library.MEMORY, "exact window", "no memory"), CacheError, "exact window: no memory"),
        (library.Failure(library.INVALID, "n_ctx", "expected z"), CacheError, f"n_ctx: expected z; {advice}"),
    ):
        monkeypatch.setattr("subkv.engine.cache.last_failure", lambda found=failure: found)
        error = creation_error(choice, log, "")
        assert (type(error), error.key, error.reason) == (kind, "kv_cache", expected)
    adapt = library.Failure(library.INVALID, "adapt", "expected k")
    monkeypatch.setattr("subkv.engine.cache.last_failure", lambda: adapt)
    assert str(creation_error(choice, log, "")) == "adapt: expected k"
