"""docs/features.md lists the actual features by kinds of architecture and by backends."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import features
import features_page
import pytest
from features import BACKENDS, FEATURES, KINDS, TABLE, backend, sentence, try_feature

REPO = Path(__file__).resolve().parents[2]
AGAIN = "python tests/architectures/features_page.py writes the page anew"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("feature", FEATURES)
def test_kinds(feature: str, kind: str, tmp_path: Path) -> None:
    entry = try_feature(feature, kind, tmp_path)
    assert entry == features_page.written()[feature][kind], AGAIN
    if entry.mark == "refused":
        assert len(entry.text) > 40 and entry.text[0].islower()


def test_page_is_up_to_date() -> None:
    kinds = features_page.written()
    assert list(kinds) == list(FEATURES) and all(list(row) == list(KINDS) for row in kinds.values())
    assert features_page.PAGE.read_text("utf-8") == features_page.page(kinds), AGAIN
    for feature in FEATURES:
        assert any(cell.mark == "yes" for cell in kinds[feature].values()), feature


@pytest.mark.parametrize("name", BACKENDS)
def test_named_tests_exist(name: str) -> None:
    assert list(TABLE[name]) == list(FEATURES)
    for cell in TABLE[name].values():
        assert cell.text or cell.mark == "not tried"
        if cell.mark == "yes":
            file, _, test = cell.text.partition("::")
            tree = ast.parse((REPO / file).read_text("utf-8"))
            assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, cell.text


@pytest.mark.skipif(not backend(), reason="no GPU, nor an emulated one (-DSUBKV_EMULATE_CUDA=ON)")
@pytest.mark.parametrize("feature", FEATURES)
def test_on_this_backend(feature: str, tmp_path: Path) -> None:
    kind = next(kind for kind in KINDS if features.applies(feature, kind))
    entry = try_feature(feature, kind, tmp_path, on_gpu=True)
    expected = TABLE[backend()][feature]
    if expected.mark == "not tried":
        pytest.skip(f"not known until now: {entry}; enter it in the table")
    assert entry.mark == expected.mark
    assert entry.mark == "yes" or sentence(entry.text) == expected.text


def test_pytorch() -> None:
    """Only checks the log; the tests of the transformers cache check the numbers."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from subkv import SubspaceCache
    from subkv.base.errors import CacheError

    folder, column = REPO / "tests" / "quality", TABLE["Triton, PyTorch"]
    assert f'"{column["adaptive bases"].text}"' in (folder / "test_subspace.py").read_text("utf-8")
    spec = importlib.util.spec_from_file_location("families_of_torch", folder / "test_subspace_families.py")
    assert spec and spec.loader
    families: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(families)
    name = "DeepseekV2ForCausalLM"
    with pytest.raises(CacheError) as refused:
        SubspaceCache.from_model(families.make(name, families.REFUSED[name][1]))
    assert column["latent rows"].text == column["sparse selection"].text == str(refused.value)
