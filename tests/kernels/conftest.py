"""Kernel tests run every version of every op that this processor supports."""

from __future__ import annotations

import ops
import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "version" in metafunc.fixturenames:
        names = list(ops.versions()) if ops.library_name() else ["no library"]
        metafunc.parametrize("version", names)


@pytest.fixture(scope="session")
def tables() -> dict[str, ops.Ops]:
    if ops.library_name() is None:
        pytest.skip("needs the built library: install the package, or set SUBKV_TEST_LIB to libsubkv")
    return ops.versions()


@pytest.fixture
def table(tables: dict[str, ops.Ops], version: str) -> ops.Ops:
    return tables[version]


@pytest.fixture
def ref(tables: dict[str, ops.Ops]) -> ops.Ops:
    return tables["ref"]
