"""Upstream's tests of llama-server: read from the pinned source archive, and adapted to another model.

They name files on a hub, and texts and counts of those models. stand_ins.py replaces the files; `expects`
(upstream_plugin.py), which has the values of an earlier run, compares the values in assertions.
"""

from __future__ import annotations

import ast
import tarfile
from pathlib import Path

import llama_source as source
import pytest

REPO = Path(__file__).resolve().parents[2]
TESTS = "tools/server/tests"
PARTS = (TESTS, "models/templates", "tools/mtmd/test-1.jpeg")  # the tests read templates and a picture beside them
HUB = "https://huggingface.co/"


def archive() -> Path:
    """The pinned source archive that the build fetched; skips if it is missing."""
    version = source.read_version(REPO / "runtime" / "llama.cpp")
    name = source.archive_name(version)
    for folder in (source.cache_dir(), *sorted((REPO / "build").glob("*/sdist"))):
        if (folder / name).is_file() and source.file_hash(folder / name) == version["sha256"]:
            return folder / name
    pytest.skip(f"upstream's tests: the build left no {name} in {source.cache_dir()} (another source was given)")


def extract(root: Path, images: str) -> Path:
    """Writes upstream's tests below `root`, and returns their folder. images: the address that replaces the hub's."""
    with tarfile.open(archive(), "r:gz") as tar:
        for member in tar:
            parts = member.name.split("/", 3)
            if len(parts) < 4 or parts[1:3] != ["vendor", "llama.cpp"] or not member.isfile():
                continue
            if not any(f"{parts[3]}/".startswith(f"{part}/") for part in PARTS):
                continue
            stream = tar.extractfile(member)
            assert stream is not None
            path = root / parts[3]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(stream.read())
    folder = root / TESTS
    for path in (folder / "unit").glob("test_*.py"):
        text = path.read_text("utf-8").replace(f'"{HUB}', f'"{images}')
        path.write_text(relaxed(text), "utf-8")
    (folder / "tmp").mkdir()
    return folder


def relaxed(text: str) -> str:
    """`assert found == given` becomes `assert expects(found, given)` where `given` is a constant or a parameter.

    Assertions of a status stay, and those that compare two values from the server.
    """
    tree = ast.parse(text)
    edits = []
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            given = _given(function)
            for node in ast.walk(function):
                if isinstance(node, ast.Assert) and _is_of_the_model(node.test, given):
                    edits.append(node.test)
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    data = b"".join(lines)
    # columns count bytes; from the end, so that earlier offsets stay; once for a function inside a function
    spans = {(starts[e.lineno - 1] + e.col_offset, starts[e.end_lineno - 1] + e.end_col_offset): e for e in edits}
    for (start, end), edit in sorted(spans.items(), reverse=True):
        left, right = edit.left, edit.comparators[0]
        a, b = (
            data[starts[part.lineno - 1] + part.col_offset : starts[part.end_lineno - 1] + part.end_col_offset]
            for part in (left, right)
        )
        data = data[:start] + b"expects((" + a + b"), (" + b + b"))" + data[end:]
    return data.decode()


def _given(function: ast.FunctionDef) -> set[str]:
    """Names that hold constants of the test: parameters, loops over them, and locals set to constants."""
    names = {argument.arg for argument in function.args.args}
    constants = {
        target.id: node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    names |= {name for name, value in constants.items() if _constant(value, names)}
    for node in ast.walk(function):
        if isinstance(node, ast.For) and _constant(node.iter, names):
            names |= {name.id for name in ast.walk(node.target) if isinstance(name, ast.Name)}
    return names


def _constant(node: ast.expr, names: set[str]) -> bool:
    found = (ast.Call, ast.Attribute, ast.Subscript, ast.Await)
    parts = list(ast.walk(node))
    return not any(isinstance(part, found) or (isinstance(part, ast.Name) and part.id not in names) for part in parts)


def _is_of_the_model(test: ast.expr, names: set[str]) -> bool:
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        return False
    left, right = test.left, test.comparators[0]
    if "status_code" in ast.unparse(left) or _constant(left, names):
        return False
    truth = isinstance(right, ast.Constant) and (right.value is None or isinstance(right.value, bool))
    return not truth and _constant(right, names)
