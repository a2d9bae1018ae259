"""The decision about a cache (subkv_resolve), as C programs ask for it; tests/python tests it through choose_cache."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from each import each

from subkv.native import library
from subkv.native.bases import EMBEDDED, NAMED, NONE, WEIGHTS

Models = Callable[..., Path]


def resolved(model: Path, **asked: Any) -> tuple[library.Choice, dict[str, Any]]:
    """The choice, and its text fields, which are valid until the next call."""
    texts = {name: value.encode() for name, value in asked.items() if isinstance(value, str)}
    unset = {"n_sink": -1, "n_recent": -1, "n_rollback": -1, "sidecar": True, "derive": True}
    request, choice = library.Request(model=str(model).encode(), **{**unset, **asked, **texts}), library.Choice()
    if not library.load().subkv_resolve(ctypes.byref(request), ctypes.byref(choice)):
        raise ValueError(library.last_failure())
    if choice.layout:
        library.load().subkv_layout_free(choice.layout)
    names = ("type_k", "type_v", "path", "adapt", "words", "gain")
    return choice, {name: getattr(choice, name).decode() for name in names}


@each(
    ("asked", "types", "automatic"),
    [
        ({}, ("f16", "f16"), False),
        ({"type": "auto"}, ("subkv", "subkv"), True),
        ({"type": "auto", "bits": 6.0}, ("subkv", "subkv"), False),
        ({"type": "subkv:6"}, ("subkv", "subkv"), False),
        ({"type": "subkv", "type_k": "subkv:6", "type_v": "subkv"}, ("subkv", "subkv"), False),
        ({"type": "auto", "type_v": "subkv"}, ("subkv", "subkv"), False),
        ({"type": "auto", "type_v": "q8_0"}, ("f16", "q8_0"), False),
        ({"type": "q4_0", "type_v": "q8_0"}, ("q4_0", "q8_0"), False),
        ({"type": "auto", "derive": False}, ("f16", "f16"), False),
    ],
)
def test_types(asked: dict[str, Any], types: tuple[str, str], automatic: bool, tiny_model: Models) -> None:
    choice, texts = resolved(tiny_model(), **asked)
    assert (texts["type_k"], texts["type_v"]) == types and choice.automatic == automatic
    assert bool(choice.layout) == (types == ("subkv", "subkv"))
    assert choice.source == (WEIGHTS if choice.layout else NONE) and bool(texts["gain"]) == bool(choice.layout)
    assert (choice.ggml_type_k, choice.ggml_type_v) == tuple({"q4_0": 2, "q8_0": 8}.get(name, 1) for name in types)


@each(
    ("asked", "key", "reason"),
    [
        ({"type": "q5"}, "type", "expected one of auto, subkv, f32, "),
        ({"type_v": "q5"}, "type_v", "expected one of auto, subkv, f32, "),
        ({"type_k": "subkv", "type_v": "f16"}, "type_v", "the same cache for K and V with 'subkv', found 'f16'"),
        ({"type": "subkv", "type_k": "f16"}, "type_k", "expected no type_k or type_v with kv_cache='subkv'"),
        ({"type": "subkv:6", "bits": 4.0}, "bits", "expected one number of bits per element, found 4 and 6"),
        ({"type": "f16", "bits": 4.0}, "bits", "expected a coefficient cache ('subkv'), found f16"),
        ({"type": "q8_0", "memory": True}, "memory", "expected a coefficient cache ('subkv'), found q8_0"),
        ({"type": "subkv:6", "memory": True}, "memory", "expected either it or bits per element, found both"),
        *(
            ({"type": "subkv", "bits": bits}, "bits", "more than 0 and at most 64, found")
            for bits in (-1.0, 65.0, float("nan"))
        ),
        ({"type": "subkv", "bits": 1.0}, "bits", "for bases from the weights of this model"),
        ({"type": "f16", "n_recent": 8}, "n_recent", "expected a coefficient cache ('subkv'), found f16"),
        ({"type": "subkv", "n_sink": 4097}, "n_sink", "expected 0 to 4096 tokens, found 4097"),
        ({"type": "subkv", "bases": "no such file"}, "bases", "found no such file"),
        ({"type": "subkv:no such file"}, "type", "or subkv:FILE, found subkv:no such file"),
    ],
)
def test_errors_name_the_field(asked: dict[str, Any], key: str, reason: str, tiny_model: Models) -> None:
    with pytest.raises(ValueError) as refused:
        resolved(tiny_model(), **asked)
    failure: library.Failure = refused.value.args[0]
    assert failure.key == key and reason in failure.reason


def test_a_model_without_bases(tiny_model: Models) -> None:
    """With 4 elements, no head of it can be coded."""
    model = tiny_model(head_size=4)
    choice, texts = resolved(model, type="auto")
    assert choice.automatic and not choice.layout and "no layer of it has K/V heads of 8 to 576" in texts["words"]
    for asked in ({"type": "subkv"}, {"type": "auto", "n_recent": 8}):
        with pytest.raises(ValueError) as refused:
            resolved(model, **asked)
        assert (refused.value.args[0].kind, refused.value.args[0].key) == (library.UNSUPPORTED, "derive")


def test_the_window(coded_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's, unless another one is asked; variables are for contexts."""
    monkeypatch.setenv("SUBKV_RECENT", "99")
    monkeypatch.setenv("SUBKV", "off")
    path = coded_model("--n-recent", "32", "--kv-bits", "8")
    choice, texts = resolved(path, type="auto")
    assert (choice.source, texts["path"], texts["adapt"]) == (EMBEDDED, str(path), "none")
    assert (choice.n_sink, choice.n_recent, choice.n_rollback) == (4, 32, 16)
    choice, texts = resolved(path, type="subkv", bases=str(path), n_sink=1, n_recent=2, n_rollback=3, adapt="v")
    assert (choice.source, choice.n_sink, choice.n_recent, choice.n_rollback) == (NAMED, 1, 2, 3)
    assert texts["adapt"] == "v" and f"of {path}, " in texts["words"]


def test_sliding_layers_are_asked_for_once_there_are_some(tiny_model: Models) -> None:
    """Only of a model whose file has a sliding window."""
    asked: list[int] = []

    def slides(il: int) -> bool:
        asked.append(il)
        return il % 2 == 0

    resolved(tiny_model(), type="subkv", slides=library.SLIDES(slides))
    assert not asked
    resolved(tiny_model("gemma2"), type="subkv", slides=library.SLIDES(slides))
    assert set(asked) == {0, 1, 2, 3}
