"""Calls every function of libsubkv's headers with NULL, with numbers, and with valid objects beside NULL.

    python exported.py MODEL FOLDER [ALLOCATION]

Prints one JSON object per call: the function, its numbers, whether it got objects, and the error that it set. A line is
printed before the call, so that the last line names the function that ended the process. ALLOCATION: that many calls of
`operator new` later, memory is exhausted (failing_new.cpp).
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NATIVE = Path(__file__).resolve().parents[2] / "runtime" / "native"
HEADERS = sorted(path for folder in ("include", "capi", "capi/adapt") for path in NATIVE.glob(f"{folder}/subkv*.h"))
NUMBERS = (0, 1, -1, 2**31 - 1)
SENTINELS = ("subkv_layout_json", "subkv_observer_forget")  # they set an error for NULL
SCALARS = {
    "bool": ctypes.c_bool,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "double": ctypes.c_double,
    "float": ctypes.c_float,
}


@dataclass(frozen=True)
class Function:
    """A declaration. result: C type; arguments: their C types."""

    name: str
    result: str
    arguments: tuple[str, ...]

    @property
    def frees(self) -> bool:
        return self.name.endswith(("_free", "_close"))


def functions() -> list[Function]:
    """All functions that the headers export, in order."""
    found = []
    for header in HEADERS:
        text = re.sub(r"//[^\n]*", "", header.read_text())
        for result, name, arguments in re.findall(r"\bSUBKV_API\s+([^;()]*?)\b(subkv_\w+)\s*\(([^;]*?)\)\s*;", text):
            kinds = [] if arguments.strip() == "void" else [_type(argument) for argument in arguments.split(",")]
            found.append(Function(name, _type(result + " x"), tuple(kinds)))
    return found


def _type(declaration: str) -> str:
    """`const subkv_layout * layout` -> `subkv_layout *`."""
    words = re.sub(r"\b(const|struct)\b", "", declaration.replace("*", " * ")).split()
    if "*" in words or "[" in declaration:
        return f"{words[0]} *"
    return words[0]


def ctype(kind: str, result: bool = False) -> Any:
    if kind.endswith("*"):
        return ctypes.c_char_p if result and kind == "char *" else ctypes.c_void_p
    return None if kind == "void" else SCALARS[kind]


def calls(objects: dict[str, int]) -> Iterator[tuple[Function, int, bool]]:
    """Function, value of all numbers, whether objects are passed instead of NULL."""
    for function in functions():
        for number in NUMBERS:
            yield function, number, False
        if not function.frees and objects.keys() & set(function.arguments):
            for number in NUMBERS:
                yield function, number, True


def main(model: Path, folder: Path, allocation: int) -> None:
    import capi
    import engine

    lib = ctypes.CDLL(capi.load()._name)  # declarations of its own
    for function in functions():
        getattr(lib, function.name).restype = ctype(function.result, result=True)
    exhaust: Any = ctypes.CDLL(None).fail_new if allocation else lambda _: 0
    exhaust.argtypes = [ctypes.c_long]

    loaded = engine.Model(model)
    bands, n_layer = [(8, 8), (8, 6), (16, 4)], engine.C.llama_model_n_layer(loaded.handle)
    shapes = [(il, 2, 32, 32) for il in range(n_layer)]
    layout = engine.signed_permutations(
        shapes, bands, bands, arch="llama", block_count=n_layer, path=folder / "layout.gguf"
    )
    with engine.session(loaded, layout, window=(4, 32, 8), threads=1) as session:
        sketch = (ctypes.c_int32 * 5)(1, 8, 4, 0, 0)
        sketch[3:5] = [0x3F800000, 0]  # decay 1.0, rate 0
        params, sides = (ctypes.c_int32 * 13)(), ctypes.c_int32()
        assert lib.subkv_adapt_parse(b"v", ctypes.byref(sides), params)
        objects = {
            "subkv_layout *": layout,
            "subkv_observer *": lib.subkv_observer_new(ctypes.c_int32(0)),
            "subkv_store *": lib.subkv_store_open(str(folder / "store").encode(), ctypes.c_uint64(1 << 20)),
            "subkv_sketch *": lib.subkv_sketch_new(sketch),
            "subkv_adapt *": lib.subkv_adapt_new(ctypes.c_void_p(layout), params, 0, 0, ctypes.c_bool(True)),
            "llama_context *": ctypes.cast(session.ctx, ctypes.c_void_p).value,
        }
        assert all(objects.values()), (objects, lib.subkv_last_error())
        for function, number, valid in calls(objects):
            print(json.dumps({"before": function.name, "number": number, "valid": valid}), flush=True)
            arguments = []
            for kind in function.arguments:
                value: Any = objects.get(kind) if valid else None
                if not kind.endswith("*"):
                    value = bool(number) if kind == "bool" else number
                arguments.append(ctype(kind)(value))
            sentinel = next(name for name in SENTINELS if name != function.name)
            getattr(lib, sentinel)(None)
            before = lib.subkv_last_error()
            exhaust(allocation)
            getattr(lib, function.name)(*arguments)
            exhaust(0)
            after = lib.subkv_last_error()
            error = after.decode() if after != before else ""
            print(json.dumps({"name": function.name, "number": number, "valid": valid, "error": error}), flush=True)
            lib.subkv_attach(None, None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
