"""One changed byte: a stored file is refused, or its content is unchanged (research/notes/hardening.md)."""

from __future__ import annotations

import dataclasses
import io
import pickle
import random
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import derived_numpy
import numpy as np
import pytest
import versioned
from calib_synthetic import random_calibration
from each import each
from format import native, writer
from gguf import GGUFReader, GGUFValueType

from converter import sensitivity_stage
from converter.sensitivity_trials import Measurements, Trial
from subkv.base.container import Container, load, write
from subkv.base.errors import SubkvError
from subkv.format import calibration, metadata
from subkv.native.digest import KEYS_DIGEST
from subkv.native.gguf import Gguf, write_copy

N_CHANGES = 60
BASES = random_calibration(1, seed=3, samples=2, n_head=2, n_head_kv=1, d_k=16, d_v=16)


@dataclasses.dataclass(frozen=True)
class Stored:
    """A kind of file. read: everything that programs take from it; raises an error for a damaged file."""

    make: Callable[[Path, Path], None]  # from a model
    read: Callable[[Path], Any]
    places: Callable[[bytes], range] = lambda data: range(len(data))  # that are changed


def make_copy(model: Path, path: Path) -> None:
    with Gguf(model) as base:
        write_copy(base, path, derived_numpy.keys(base, derived_numpy.plan(base, derived_numpy.Options())))


def read_layout(path: Path) -> Any:
    return metadata.read(path), metadata.read_heads(path), metadata.read_predicted(path)


def make_measurements(_: Path, path: Path) -> None:
    found = Measurements.empty(BASES)
    found.queries, found.cells, found.done = 5, 7, [0]
    found.trials = [Trial(0, 0, "k", 0.25, 1.5), Trial(0, 0, "", 0.001, 0.0)]
    sensitivity_stage._write(path, found, [64], 2.0, "none")


def read_measurements(path: Path) -> Any:
    with sensitivity_stage._opened(path) as arrays:
        whole = Measurements.restored(arrays, BASES)
        return whole, arrays["lengths"].tolist(), float(arrays["minutes"]), str(arrays["refused"])


def make_container(_: Path, path: Path) -> None:
    tokens = np.array(versioned.TOKENS, np.int32)
    write(path, Container({"identity": versioned.IDENTITY.hex()}, tokens, versioned.state_of()))


STORED = {
    "model": Stored(make_copy, read_layout, lambda data: range(data.index(b"subkv.version"), data.rindex(b"subkv."))),
    "sidecar": Stored(lambda model, path: derived_numpy.sidecar(model, path) and None, read_layout),
    "calibration": Stored(
        lambda _, path: calibration.write_calibration(path, BASES),
        lambda path: dataclasses.replace(calibration.read_calibration(path), sha256=""),
    ),
    "measurements": Stored(make_measurements, read_measurements),
    "container": Stored(make_container, lambda path: dataclasses.astuple(load(path))),
}


def plain(found: Any) -> bytes:
    """What was read, so that it can be compared."""
    out = io.BytesIO()
    pickler = pickle.Pickler(out)
    pickler.fast = True  # no references to equal objects, of which one may be shared
    pickler.dump(found)
    return out.getvalue()


def changes(data: bytes, places: range, seed: int) -> Iterator[bytes]:
    """Copies with one other byte: one bit flipped, or any other value."""
    rng = random.Random(seed)
    for _ in range(N_CHANGES):
        at = rng.choice(places)
        other = data[at] ^ (1 << rng.randrange(8)) if rng.random() < 0.5 else (data[at] + rng.randrange(1, 256)) % 256
        yield data[:at] + bytes([other]) + data[at + 1 :]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # llama_cpp's log, of a key's bytes
@each("kind", STORED)
def test_one_changed_byte(kind: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    stored, path = STORED[kind], tmp_path / "stored"
    stored.make(tiny_model("llama"), path)
    whole, before = path.read_bytes(), plain(stored.read(path))
    n_refused = 0
    for changed in changes(whole, stored.places(whole), seed=1):
        path.write_bytes(changed)
        try:
            assert plain(stored.read(path)) == before
        except AssertionError:
            raise
        except Exception:
            n_refused += 1
    assert n_refused > N_CHANGES / 2


def place_of(path: Path, key: str) -> range:
    """The bytes of a string value."""
    field = GGUFReader(path).fields[key]
    begin = int(field.offset) + sum(part.nbytes for part in field.parts[:-1])
    return range(begin, begin + field.parts[-1].nbytes)


@each("kind", ["model", "sidecar"])
@each("key", ["subkv.blk.0.basis", "subkv.base.sha256", "subkv.calibration.text", KEYS_DIGEST])
def test_one_changed_character_of_a_key(kind: str, key: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """The file stays well-formed: a character of base64 or a hex digit becomes another one."""
    path = tmp_path / "a.gguf"
    STORED[kind].make(tiny_model("llama"), path)
    whole, places, rng = path.read_bytes(), place_of(path, key), random.Random(2)
    characters = string.digits + "abcdef" + (string.ascii_uppercase if key.endswith("basis") else "")
    for _ in range(N_CHANGES):
        at = rng.choice(places[:-4])
        other = rng.choice([c for c in characters if ord(c) != whole[at]])
        path.write_bytes(whole[:at] + other.encode() + whole[at + 1 :])
        with pytest.raises(SubkvError) as caught:
            metadata.read(path)
        sentence = str(caught.value)
        assert sentence.startswith(
            (f"path: {KEYS_DIGEST}: expected the digest of the subkv.* keys, ", f"path: {key}: ")
        )
        assert "found" in sentence


def changed_keys(keys: writer.Keys) -> Iterator[writer.Keys]:
    """Every key changed, removed or new, in a way that only the digest can tell."""
    u32, text = GGUFValueType.UINT32, GGUFValueType.STRING
    others = {
        "subkv.version": (u32, 4),
        "subkv.codec": (text, "int8"),
        "subkv.bits_per_element": (GGUFValueType.FLOAT32, 3.0),
        "subkv.bits_per_element.rows": (GGUFValueType.FLOAT32, 3.0),
        "subkv.gamma": (text, "one"),
        "subkv.basis_k": (text, "pca"),
        "subkv.basis_v": (text, "pca"),
        "subkv.layout": (text, keys["subkv.layout"][1] + " "),
        "subkv.calibration.tokens": (GGUFValueType.UINT64, 1),
        "subkv.adapt": (text, "v"),
        "subkv.predicted": (text, '{"subkv": 1e-9}'),
        "subkv.base.content": (text, "0" * 64),
        "subkv.unknown": (GGUFValueType.ARRAY, [1, 2]),
        **{
            f"subkv.{name}": (u32, keys[f"subkv.{name}"][1] + 1)
            for name in ("block_count", "n_sink", "n_recent", "bpe_context")
        },
        **{f"subkv.{name}": (text, keys[f"subkv.{name}"][1] + "x") for name in ("calibration.text", "generator")},
        **{f"subkv.{name}.sha256": (text, "0" * 64) for name in ("base", "calibration", "keys")},
    }
    for key, value in others.items():
        yield keys | {key: value}


def test_the_digest_covers_every_key(tmp_path: Path) -> None:
    keys = writer.metadata(writer.random_layers())
    keys = writer.sealed(keys | {"subkv.recent_bits": (GGUFValueType.UINT32, 16)})
    native.load(writer.write(tmp_path / "a.gguf", keys))
    for changed in changed_keys(keys):
        with pytest.raises(native.MetadataError, match=f"{KEYS_DIGEST}: expected the digest of the subkv.. keys, "):
            native.load(writer.write(tmp_path / "a.gguf", changed))
        native.load(writer.write(tmp_path / "a.gguf", writer.sealed(changed)))


def test_keys_of_others_and_their_order_do_not_count(tmp_path: Path) -> None:
    keys = writer.metadata(writer.random_layers())
    more = dict(reversed(keys.items())) | {"general.name": (GGUFValueType.STRING, "a name")}
    assert native.load(writer.write(tmp_path / "a.gguf", more)).fingerprint == writer.fingerprint(keys)


def test_values_of_every_type_are_in_the_digest(tmp_path: Path) -> None:
    kinds: dict[GGUFValueType, Any] = {
        GGUFValueType.UINT8: 200,
        GGUFValueType.INT8: -2,
        GGUFValueType.UINT16: 60000,
        GGUFValueType.INT16: -3,
        GGUFValueType.INT32: -4,
        GGUFValueType.BOOL: True,
        GGUFValueType.INT64: -5,
        GGUFValueType.FLOAT64: 1.5,
        GGUFValueType.ARRAY: [7, 8, 9],
    }
    more = {f"subkv.more.{kind.name.lower()}": (kind, value) for kind, value in kinds.items()}
    native.load(writer.write(tmp_path / "a.gguf", writer.sealed(writer.metadata(writer.random_layers()) | more)))
