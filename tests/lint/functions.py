"""No function has more than 80 lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lint.files import CPP, PYTHON, REPO
from syntax import functions

MOST = 80
# Those that have more. A function that gets shorter leaves this list, and none enters it.
LONG = {
    "kernels/triton/subkv_triton/attend.py": {"_attend": 112, "attend": 85},
    "kernels/triton/subkv_triton/combine.py": {"_combine": 88},
    "runtime/native/bases/derive.cpp": {"planned": 83},
    "tests/kernels/cuda_calls.py": {"__init__": 96},
    "tests/kernels/vulkan/device.cpp": {"Device": 120},
    "tests/runtime/eviction.cpp": {"main": 96},
}


def lengths(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        allowed = LONG.get(path.relative_to(REPO).as_posix(), {}) if REPO in path.parents else {}
        found = {}
        for function in functions(path):
            if function.node.type == "function_definition" and function.n_lines > MOST:
                name = function.name.split("::")[-1]
                found[name] = function.n_lines
                if function.n_lines > allowed.get(name, MOST):
                    yield f"{path}:{function.line}: {name} has {function.n_lines} lines, expected at most {MOST}"
        for name in allowed.keys() - found.keys():
            yield f"{path}: {name} has no more than {MOST} lines now; remove it from LONG of tests/lint/functions.py"


def exceptions() -> Iterator[str]:
    for name in LONG:
        if not (REPO / name).is_file():
            yield f"{name} does not exist; remove it from LONG of tests/lint/functions.py"


RULES = {"function-length": lambda: [*lengths([*CPP, *PYTHON]), *exceptions()]}
