"""The checkout's files, and how a complaint names them."""

from __future__ import annotations

from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
NATIVE = REPO / "runtime/native"
CPP_FOLDERS = ("examples", "research", "runtime/native", "kernels", "tests")
CPP_ENDINGS = ("*.h", "*.c", "*.cpp", "*.cu", "*.cuh")
CPP = sorted(p for d in CPP_FOLDERS for e in CPP_ENDINGS for p in (REPO / d).rglob(e))
PYTHON = sorted(
    p
    for p in REPO.rglob("*.py")
    if not any(part in ("build", "dist") or part.startswith(".") for part in p.relative_to(REPO).parts)
)


def shown(path: Path, line: int = 0) -> str:
    name = path.relative_to(REPO).as_posix()
    return f"{name}:{line}" if line else name
