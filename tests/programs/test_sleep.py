"""llama-server wakes from sleep with the bases that it finds then."""

from __future__ import annotations

import shutil
from pathlib import Path

import derived_numpy
import pytest
import stand_ins
import tiny
from servers import ORDINARY, Refused, serving, wait_until

from subkv.native.bases import model_content, stored_path
from subkv.plan.pipeline import Options


@pytest.mark.parametrize("of", ["target", "draft"])
def test_bases_that_are_gone_when_it_wakes(of: str, words: Path, text: str, tmp_path: Path) -> None:
    """Stored bases that are gone are none: it wakes with bases from the weights, which have no stored prompts."""
    draft = stand_ins.with_words(tmp_path / "draft.gguf", tiny.build(tmp_path / "tiny.gguf", seed=1))
    files = {"target": stored_bases(words), "draft": stored_bases(draft)}
    arguments = ["-c", 1024, "-np", 1, "-ctk", "subkv", "-md", draft, "-ctkd", "subkv", "--sleep-idle-seconds", 1]
    store = {"SUBKV_STORE": str(tmp_path / "store")}
    with serving(words, *arguments, subkv="", folder=tmp_path, **store) as server:

        def asleep() -> None:
            server.wait("sleep", "/props", lambda props: props["is_sleeping"])

        before = server.complete(text[:600])
        asleep()
        after = server.complete(text[:600])
        assert after["tokens"] == before["tokens"]
        assert after["timings"]["cache_n"] > before["timings"]["prompt_n"] - 64
        assert "bases: from the weights" not in server.log
        asleep()
        files[of].unlink()
        last = server.complete(text[:600])
        # a stored prompt has no cells of a draft model
        assert (last["timings"]["cache_n"] == 0) == (of == "target"), last["timings"]
        assert of == "target" or last["tokens"] == before["tokens"]
        assert "bases: from the weights" in server.log and ORDINARY not in server.log
    for path in files.values():
        path.unlink(missing_ok=True)


def stored_bases(model: Path) -> Path:
    """Bases in the cache folder, as `subkv convert` stores them."""
    path = stored_path(model, model_content(model))
    path.parent.mkdir(parents=True, exist_ok=True)
    derived_numpy.sidecar(model, path, Options(kv_bits=6.0))
    return path


def test_damaged_bases_end_a_server_that_wakes(words: Path, text: str, tmp_path: Path) -> None:
    """Upstream ends a server that cannot load its model again; the log says why. Stored prompts stay as they are."""
    file = stored_bases(words)
    bases = file.read_bytes()
    arguments = ["-c", 1024, "-np", 1, "-ctk", "subkv", "--sleep-idle-seconds", 1]
    store = {"SUBKV_STORE": str(tmp_path / "store")}
    with serving(words, *arguments, subkv="", folder=tmp_path, **store) as server:
        before = server.complete(text[:600])
        server.wait("sleep", "/props", lambda props: props["is_sleeping"])
        file.write_bytes(bases[:-100] + b"?" * 60)
        server.ended = True
        with pytest.raises(OSError):
            server.complete(text[:600])
        assert server.process.wait(60) != 0
        assert str(file) in server.log and ORDINARY not in server.log
    file.write_bytes(bases)
    with serving(words, *arguments, subkv="", folder=tmp_path, **store) as server:
        after = server.complete(text[:600])
        assert after["tokens"] == before["tokens"]
        assert after["timings"]["cache_n"] > before["timings"]["prompt_n"] - 64
    file.unlink()


def test_a_routers_model_that_cannot_wake(words: Path, text: str, tmp_path: Path) -> None:
    """The router passes an error on, and starts the model again at a later request."""
    folder = tmp_path / "models"
    folder.mkdir()
    model = Path(shutil.copy(words, folder / "one.gguf"))
    arguments = ["--models-dir", folder, "-c", 1024, "-np", 1, "-ctk", "subkv", "--sleep-idle-seconds", 1]
    with serving(None, *arguments, subkv="", folder=tmp_path) as server:
        before = server.complete(text[:600], model="one")

        def status() -> str:
            return str(server.request("GET", "/models")["data"][0]["status"]["value"])

        wait_until("sleep", lambda: status() == "sleeping")
        model.unlink()
        with pytest.raises(Refused):
            server.complete(text[:600], model="one")
        shutil.copy(words, model)
        wait_until("its end", lambda: status() not in ("sleeping", "loading", "loaded"))
        assert server.complete(text[:600], model="one")["tokens"] == before["tokens"]
        assert ORDINARY not in server.log
