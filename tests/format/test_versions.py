"""Every version of a file that subkv has written is read, and one of a later version is refused with a remedy."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
import stores
import versioned
from gguf import GGUFReader
from safetensors import safe_open
from safetensors.numpy import save_file
from versioned import FILES, IDENTITY, TOKENS

from converter.sensitivity_trials import VERSION as MEASUREMENTS
from research.warmstart.trained import VERSION as WARM
from runtime.chat.conversation import STATE
from runtime.doctor.formats import FORMATS
from subkv.base.container import MAGIC, ContainerError, load, read, read_head
from subkv.base.errors import StateError, SubkvError
from subkv.format import calibration, metadata
from subkv.format.layout import WITHOUT_DIGEST, Layout

REPO = Path(__file__).resolve().parent.parent.parent


def test_doctor_tells_the_readers_versions() -> None:
    """runtime/doctor/formats.py has literals; these are the readers' own."""
    native = (REPO / "runtime/native").joinpath
    state = native("engine/cache_state.cpp").read_text().partition("STATE_MAGIC[8] = ")[2].partition(";")[0]
    store = native("store/prefix_blocks.cpp").read_text()
    library = (REPO / "research/warmstart/summaries.py").read_text().partition('"version": ')[2].partition(",")[0]
    own = {
        "model": (WITHOUT_DIGEST, metadata.VERSION),
        "calibration": (int(calibration.VERSION),),
        "measurements": (MEASUREMENTS,),
        "state": (int(state.rstrip(" }").split("'")[-2]),),
        "container": (int(MAGIC[-1:]),),
        "chat": (STATE["version"],),
        "store": tuple(int(store.partition(f" {name} ")[2].split("'")[1]) for name in ("UNORDERED", "ORDERED")),
        "warm start": (int(WARM),),
        "warm library": (int(library),),
    }
    assert {name: kind.versions for name, kind in FORMATS.items()} == own


def test_the_page_has_the_same_table() -> None:
    rows = [line.split("|") for line in (REPO / "docs/format.md").read_text().splitlines() if line.startswith("| ")]
    reported = {row[1].strip(): row[3].strip() for row in rows if len(row) > 5}
    assert {name: reported.get(name) for name in FORMATS} == {
        name: ", ".join(map(str, kind.versions)) for name, kind in FORMATS.items()
    }


def test_files_are_small() -> None:
    files = [path for path in FILES.rglob("*") if path.is_file()]
    assert files and all(path.stat().st_size < 100_000 for path in files)


@pytest.mark.parametrize("latent", [False, True])
def test_models(latent: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal bases have equal fingerprints, so states outlive the version of the file. An old file is noted once."""
    found = {}
    for version in FORMATS["model"].versions:
        path = FILES / f"model-{version}{'-latent' * latent}.gguf.fixture"
        path = shutil.copyfile(path, tmp_path / path.name)  # no other test has read it
        for _ in range(2):
            with Layout(path) as layout:
                found[version] = layout.description
        note = f"note: {path}: format version 4 has no checksum; convert the model again to add one\n"
        assert capsys.readouterr().err == (note if version == 4 else "")
    assert [found[version].pop("version") for version in found] == [4, 5]
    assert found[4] == found[5]
    assert [layer["il"] for layer in found[5]["layers"]] == [0]
    assert bool(found[5]["layers"][0]["v"]) != latent


@pytest.mark.parametrize("version", [2, 3])
def test_earlier_models(version: int) -> None:
    """Their rows were coded without a trellis."""
    sentence = rf"subkv\.version: expected 4 or 5, found {version}; convert the base model again"
    with pytest.raises(SubkvError, match=sentence):
        Layout(FILES / f"model-{version}.gguf.fixture")


def test_a_later_model(tmp_path: Path) -> None:
    path = FILES / "model-5.gguf.fixture"
    field = GGUFReader(path).fields["subkv.version"]
    data = bytearray(path.read_bytes())
    begin = int(field.offset) + sum(len(part.tobytes()) for part in field.parts[:-1])
    assert data[begin : begin + 4] == b"\5\0\0\0"
    data[begin] = 6
    (tmp_path / "later.gguf").write_bytes(data)
    with pytest.raises(SubkvError, match=r"subkv\.version: expected 4 or 5, found 6; convert the base model again"):
        Layout(tmp_path / "later.gguf")


@pytest.mark.parametrize("name", ["calibration-1", "calibration-1-digest"])
def test_calibrations(name: str, tmp_path: Path) -> None:
    path = FILES / f"{name}.safetensors"
    found = calibration.read_calibration(path)
    made = versioned.calibration()
    assert (found.arch, found.tokens, len(found.layers)) == (made.arch, made.tokens, 1)
    np.testing.assert_allclose(found.layers[0].k2, made.layers[0].k2, rtol=1e-6, atol=1e-6)
    with safe_open(path, framework="numpy") as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (not a dict)
        values = handle.metadata()
    save_file(tensors, tmp_path / "later", values | {f"{calibration.PREFIX}version": "2"})
    with pytest.raises(SubkvError, match=r"version: expected 1, found '2'; calibrate again with this version"):
        calibration.read_calibration(tmp_path / "later")


def test_containers(tmp_path: Path) -> None:
    found = load(FILES / "container-1")
    assert found.head == {"identity": IDENTITY.hex()}
    assert found.tokens.tolist() == TOKENS
    assert found.state == versioned.state_of()
    later = bytearray((FILES / "container-1").read_bytes())
    later[len(MAGIC) - 1] = ord("2")
    sentence = "expected version 1, found '2', which another version of subkv writes: evaluate its text again"
    with pytest.raises(ContainerError, match=sentence):
        read_head(io.BytesIO(later))
    (tmp_path / "saved").write_bytes(later)
    with pytest.raises(StateError, match=rf"expected a file written by /save, found another format in .*{sentence}"):
        read(tmp_path / "saved", "/save")


@pytest.mark.parametrize("version", [1, 2])
def test_stores(tmp_path: Path, version: int) -> None:
    shutil.copytree(FILES / f"store-{version}", tmp_path / "store")
    (tmp_path / "store").chmod(0o700)
    with stores.opened(tmp_path / "store") as store:
        found = store.get([*TOKENS, 1])
        assert found is not None and found.reach == len(TOKENS)
        state = versioned.state_of() if version == 1 else stores.state(TOKENS, 1, 8, order=versioned.MOVED)
        assert found.prompt.states == (state, b"")


def test_a_later_store_is_left_alone(tmp_path: Path) -> None:
    """It may be shared with a newer version: not found, not removed, not called damaged."""
    shutil.copytree(FILES / "store-1", tmp_path / "store")
    (tmp_path / "store").chmod(0o700)
    (head,) = (tmp_path / "store").glob("*.prefix")
    data = bytearray(head.read_bytes())
    assert data[:8] == b"subkvPX1"
    data[7] = ord("3")
    head.write_bytes(data)
    with stores.opened(tmp_path / "store") as store:
        assert store.get([*TOKENS, 1]) is None
        assert (store.stats.damaged, store.stats.entries) == (0, 0)
        assert head.read_bytes() == data
