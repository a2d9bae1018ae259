"""Split models: calibrated, converted by sidecar and run like the whole model; every wrong file name."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from gguf import GGUFReader, GGUFWriter

from converter.calibrate import main as calibrate
from converter.cli import default_output
from converter.cli import main as convert
from research.float32.reference import Reference
from subkv.base.errors import CacheError, ModelFileError, SubkvError
from subkv.engine.cache import check_model_file
from subkv.engine.llama import Llama
from subkv.format.calibration import read_calibration
from subkv.native.gguf import Gguf

Models = Callable[..., Path]
BUDGET = ["--n-recent", "16", "--kv-bits", "8"]


@pytest.fixture
def first(tiny_model: Models, tmp_path: Path) -> Path:
    """First of the four files of a tiny model, which a test may damage."""
    made = tiny_model("llama", split_tensors=6)
    for path in made.parent.glob(made.name.replace("-00001-", "-*-")):
        shutil.copy(path, tmp_path / f"m{path.name[-20:]}")
    return tmp_path / "m-00001-of-00004.gguf"


def run(command: Any, *arguments: Any) -> Result:
    result = CliRunner().invoke(command, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    return result


def logits(model: Path, **arguments: Any) -> np.ndarray[Any, Any]:
    with Llama(model, n_ctx=256, logits_all=True, verbose=False, **arguments) as llm:
        llm.eval(list(range(40, 140)))
        return np.array(llm.scores[:100])


def test_calibrate_convert_and_run(first: Path, tiny_model: Models, text_file: Path, tmp_path: Path) -> None:
    whole, files = tiny_model("llama"), sorted(first.parent.glob("m-*.gguf"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    calibrations = []
    for model in (whole, first):
        path = tmp_path / f"{model.stem}.safetensors"
        run(calibrate, "-m", model, "-f", text_file, "-o", path, "-c", 128, "--chunks", 16, "-t", 1)
        calibrations.append(read_calibration(path))
    for a, b in zip(calibrations[0].layers, calibrations[1].layers, strict=True):
        for name in ("k2", "q2", "v2", "ks"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert calibrations[1].model_sha256 == digest
    assert calibrations[0].model_sha256 == hashlib.sha256(whole.read_bytes()).hexdigest()

    bases = tmp_path / f"{first.stem}.safetensors"
    run(convert, whole, "--bases", bases, "-o", tmp_path / "whole.gguf", *BUDGET)
    result = run(convert, first, "--bases", bases, "--sidecar", *BUDGET)
    sidecar = tmp_path / "m.subkv-sidecar.gguf"
    assert f"wrote {sidecar}" in result.stdout
    assert GGUFReader(sidecar).fields["subkv.base.sha256"].contents() == digest
    np.testing.assert_array_equal(logits(first, kv_cache="f16"), logits(whole, kv_cache="f16"))
    np.testing.assert_array_equal(logits(first, bases=sidecar), logits(tmp_path / "whole.gguf"))


def test_default_names() -> None:
    assert default_output(Path("a/m-00001-of-00012.gguf"), sidecar=True) == Path("a/m.subkv-sidecar.gguf")


def test_a_copy_is_refused_before_anything_is_computed(first: Path, calibration: Path) -> None:
    result = CliRunner().invoke(convert, [str(first), "--bases", str(calibration)])
    assert result.exit_code == 1
    assert CliRunner().invoke(convert, [str(first), "--embed"]).stderr == result.stderr
    assert result.stderr.strip() == (
        f"{first}: expected one file to copy, found a model split into 4; without --embed or with --sidecar only its "
        "bases are written"
    )


def test_tensors_are_found_in_all_files(first: Path, tiny_model: Models) -> None:
    with Gguf(first) as split, Gguf(tiny_model("llama")) as whole:
        assert len(split.files) == 4
        for name in ("output.weight", "blk.0.attn_q.weight", "blk.1.ffn_down.weight"):
            assert split.has_tensor(name)
            np.testing.assert_array_equal(split.tensor(name, "why"), whole.tensor(name, "why"))
        assert not split.has_tensor("nothing")


def rename_all(first: Path) -> Path:
    for path in first.parent.glob("m-*.gguf"):
        path.rename(path.with_name(path.name.replace("-of-", "_of_")))
    return first.with_name("m-00001_of_00004.gguf")


def truncate(first: Path) -> Path:
    last = first.with_name("m-00004-of-00004.gguf")
    last.write_bytes(last.read_bytes()[:-100])
    return first


def remove(first: Path) -> Path:
    first.with_name("m-00003-of-00004.gguf").unlink()
    return first


def swap(first: Path) -> Path:
    shutil.copy(first.with_name("m-00002-of-00004.gguf"), first.with_name("m-00003-of-00004.gguf"))
    return first


WRONG: dict[str, tuple[Callable[[Path], Path], str]] = {
    "later file": (
        lambda first: first.with_name("m-00002-of-00004.gguf"),
        "expected the first file of a split model, DIR/m-00001-of-00004.gguf, found file 2: DIR/m-00002-of-00004.gguf",
    ),
    "missing file": (remove, "expected all 4 files of a split model, found no DIR/m-00003-of-00004.gguf"),
    "wrong file": (swap, "expected file 3 of 4 of a split model, found file 2 of 4: DIR/m-00003-of-00004.gguf"),
    "other name": (
        rename_all,
        "expected a name that ends in -00001-of-00004.gguf, since the model is split into 4 files, "
        "found DIR/m-00001_of_00004.gguf",
    ),
    "truncated file": (truncate, "m-00004-of-00004.gguf"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files_are_named(first: Path, case: str) -> None:
    damage, sentence = WRONG[case]
    path = damage(first)
    sentence = sentence.replace("DIR", str(first.parent))
    with pytest.raises(ModelFileError) as runtime:
        check_model_file(path)
    with pytest.raises(SubkvError) as converter:
        Gguf(path)
    for error in (runtime, converter):
        message = str(error.value)
        assert message.startswith("model: ") and "\n" not in message
        assert "truncated" in message if case == "truncated file" else message == f"model: {sentence}"


def test_metadata_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=1, small_first_shard=True)
    for i in range(2):
        writer.add_tensor(f"t{i}", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first = min(tmp_path.glob("*.gguf"))
    assert not GGUFReader(first).tensors
    assert check_model_file(first) == first


def test_bases_of_a_plain_split_model_are_missed(first: Path) -> None:
    with pytest.raises(CacheError, match="^bases: expected subkv.\\* keys "):
        Llama(first, bases=first, verbose=False)


def test_the_float32_reference_wants_one_file(first: Path) -> None:
    pytest.importorskip("torch", reason="extra torch")
    pytest.importorskip("transformers", reason="extra torch")
    pytest.importorskip("accelerate", reason="extra torch")
    with pytest.raises(SubkvError, match="^model: expected a Hugging Face folder or a GGUF of one file"):
        Reference(first, 1)
