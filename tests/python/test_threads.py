"""The number of threads of numpy's BLAS, inside and after blocks that limit it to one."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from subkv.base import threads


def n_threads() -> int:
    blas = threads._openblas()
    if blas is None:
        pytest.skip("numpy has no OpenBLAS here")
    return blas[0]()


@pytest.fixture(autouse=True)
def three() -> Iterator[None]:
    """More than one, also on a machine of one core."""
    before = n_threads()
    _, set_threads = threads._openblas()  # type: ignore[misc]
    set_threads(3)
    yield
    set_threads(before)


def test_one_inside_and_as_many_as_before_after() -> None:
    with threads.one_blas_thread():
        assert n_threads() == 1
        with threads.one_blas_thread():
            assert n_threads() == 1
        assert n_threads() == 1
    assert n_threads() == 3


def test_an_error_gives_them_back() -> None:
    with pytest.raises(KeyError), threads.one_blas_thread():
        raise KeyError
    assert n_threads() == 3


def test_blocks_that_overlap() -> None:
    """The block that ends last gives them back, in whichever thread."""
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with threads.one_blas_thread():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with threads.one_blas_thread():
        thread.start()
        assert inside.wait(60)
    assert n_threads() == 1
    leave.set()
    thread.join()
    assert n_threads() == 3


def test_another_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_openblas", lambda: None)
    with threads.one_blas_thread():
        pass
