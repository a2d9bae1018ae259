"""Models of the Hugging Face hub: choice of the file, downloads, and messages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hub
import pytest

pytest.importorskip("huggingface_hub")

# huggingface_hub reads its settings at import, so each test uses a new process.
PROGRAM = """
import json, sys
from subkv.base.errors import SubkvError
from subkv.base.hub import fetch
out = []
for repo, pattern, more in json.loads(sys.argv[1]):
    try:
        out.append(str(fetch(repo, pattern, **more)))
    except SubkvError as error:
        assert error.key == ("hf_repo" if pattern is None else "pattern")
        out.append(error.reason)
print(json.dumps(out))
"""

FILES: dict[str, Path | bytes] = {
    "README.md": b"# tiny",
    "mmproj-model-F16.gguf": b"pictures",
    "model-BF16.gguf": b"bf16",
    "model-F16.gguf": b"f16",
    "model-Q8_0.gguf": b"q8",
    "model.imatrix.gguf": b"statistics",
    "split/model-Q6_K-00001-of-00003.gguf": b"1",
    "split/model-Q6_K-00002-of-00003.gguf": b"22",
    "split/model-Q6_K-00003-of-00003.gguf": b"333",
}


@pytest.fixture
def a_hub() -> Iterator[hub.Hub]:
    with hub.serving({"me/model-GGUF": dict(FILES)}) as served:
        yield served


@pytest.fixture
def fetched(a_hub: hub.Hub, tmp_path: Path) -> Callable[..., Any]:
    """fetched("me/model-GGUF", ("me/model-GGUF", "*F16*")): paths or errors, and stderr."""

    def run(*calls: Any, prelude: str = "", **env: str) -> tuple[list[str], str]:
        given = [(call, None, {}) if isinstance(call, str) else (*call, {})[:3] for call in calls]
        done = subprocess.run(
            [sys.executable, "-c", prelude + PROGRAM, json.dumps(given)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "HF_ENDPOINT": a_hub.url, "HF_HOME": str(tmp_path / "home"), **env},
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr

    return run


def test_quants(a_hub: hub.Hub, fetched: Callable[..., Any]) -> None:
    repo = "me/model-GGUF"
    a_hub.repos["me/Q4"] = {"a-F32.gguf": b"32", "b.q4_k_m.gguf": b"4", "c-Q8_0.gguf": b"8"}
    a_hub.repos["me/other"] = {"b-Q2_K.gguf": b"2", "a-IQ4_NL.gguf": b"4", "mtp-a-Q4_K_M.gguf": b"5"}
    found, log = fetched(repo, f"{repo}:bf16", f"{repo}:F16", f"{repo}:Q6_K", "me/Q4", "me/other", HF_TOKEN="hf_abc")
    names = ["Q8_0", "BF16", "F16", "Q6_K-00001-of-00003"]
    assert [Path(path).name for path in found[:4]] == [f"model-{name}.gguf" for name in names]
    assert [Path(path).name for path in found[4:]] == ["b.q4_k_m.gguf", "a-IQ4_NL.gguf"]
    assert [Path(path).read_bytes() for path in found] == [b"q8", b"bf16", b"f16", b"1", b"4", b"4"]
    folder = Path(found[3]).parent
    assert sorted(path.name[-19:] for path in folder.iterdir()) == [f"-0000{i}-of-00003.gguf"[-19:] for i in (1, 2, 3)]
    assert "Bearer hf_abc" in a_hub.tokens
    assert "Fetching" not in log  # no bars where there is no terminal


def test_patterns(fetched: Callable[..., Any], tmp_path: Path) -> None:
    repo, folder = "me/model-GGUF", str(tmp_path / "here")
    found, _ = fetched(
        (repo, "*-Q8_0.gguf", {"local_dir": folder}), (repo, "split/*", {"more": ["mmproj*"]}), (repo, "model-*16*"),
        (repo, "nothing*"),
    )  # fmt: skip
    assert found[0] == str(tmp_path / "here" / "model-Q8_0.gguf")
    assert found[1].endswith("split/model-Q6_K-00001-of-00003.gguf")
    assert (Path(found[1]).parent.parent / "mmproj-model-F16.gguf").read_bytes() == b"pictures"
    assert found[2] == f"expected one file like model-*16* in {repo}, found 2: model-BF16.gguf, model-F16.gguf"
    assert found[3].startswith(f"expected one file like nothing* in {repo}, found 0: mmproj-model-F16.gguf, model-BF16")


def test_refusals(a_hub: hub.Hub, fetched: Callable[..., Any], tmp_path: Path) -> None:
    a_hub.repos |= {
        "me/text": {"README.md": b"#"},
        "me/gated": {"a.gguf": b"a"},
        "me/parts": {"a-00001-of-00002.gguf": b"a"},
    }
    a_hub.gated.add("me/gated")
    (tmp_path / "file").write_text("in the way")
    found, _ = fetched(
        "me/none", "me/text", "me/gated", "me/parts", "me/model-GGUF:Q3_K_S", "model", "me/model-GGUF:", "a/b/c",
        "me/..x",
        ("me/model-GGUF", None, {"cache_dir": str(tmp_path / "file" / "below")}),
        ("me/model-GGUF:Q8_0", "*Q8_0*"),
    )  # fmt: skip
    starts = [
        "unknown repository me/none; a private one needs HF_TOKEN",
        "expected GGUF files in me/text, found none",
        "me/gated is gated; request access there and set HF_TOKEN",
        "expected all 2 files of a split model, found no a-00002-of-00002.gguf",
        "expected quant Q3_K_S in me/model-GGUF, found BF16, F16, Q6_K, Q8_0",
        "expected USER/MODEL or USER/MODEL:QUANT, found 'model'",
        "expected USER/MODEL or USER/MODEL:QUANT, found 'me/model-GGUF:'",
        "expected USER/MODEL or USER/MODEL:QUANT, found 'a/b/c'",
        "invalid repository name me/..x: ",
        "cannot download model-Q8_0.gguf of me/model-GGUF: ",
        "expected a pattern or the quant of me/model-GGUF:Q8_0, found both",
    ]
    assert [reason[: len(start)] for reason, start in zip(found, starts, strict=True)] == starts


@pytest.mark.parametrize("offline", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}], ids=str)
def test_without_the_hub(a_hub: hub.Hub, fetched: Callable[..., Any], offline: dict[str, str]) -> None:
    repo = "me/model-GGUF"
    fetched(f"{repo}:Q8_0", f"{repo}:F16")
    a_hub.requests.clear()
    found, log = fetched(f"{repo}:F16", f"{repo}:Q6_K", "me/never", **offline)
    assert Path(found[0]).read_bytes() == b"f16"
    why = "HF_HUB_OFFLINE is set" if "HF_HUB_OFFLINE" in offline else "the hub cannot be reached ("
    assert log.startswith(f"{repo}:F16: {why}") and log.endswith("; using an earlier download of model-F16.gguf\n")
    assert found[1].startswith(f"expected quant Q6_K in the earlier download of {repo} ({why}")
    assert found[1].endswith("found F16, Q8_0")
    assert found[2].startswith(f"cannot list me/never: {why}")
    assert a_hub.requests == []


def test_without_the_package(fetched: Callable[..., Any]) -> None:
    found, _ = fetched("me/model-GGUF", prelude="import sys; sys.modules['huggingface_hub'] = None\n")
    assert found == [
        "expected package huggingface_hub, found none: pip install '.[hub]' in the clone of subkv",
    ]


#
# the programs, and subkv.Llama
#


@pytest.fixture
def with_model(a_hub: hub.Hub, tiny_model: Callable[..., Path], tmp_path: Path) -> dict[str, str]:
    """The environment of a hub with me/tiny, in one file and in several."""
    split = tiny_model("llama", split_tensors=6)
    count = len(list(split.parent.glob(f"{split.name[:-20]}*")))
    a_hub.repos["me/tiny"] = {"tiny-F32.gguf": tiny_model(), "tiny-F16.gguf": b"not this one"}
    a_hub.repos["me/split"] = {
        f"tiny-Q8_0-{i:05d}-of-{count:05d}.gguf": split.with_name(f"{split.name[:-20]}-{i:05d}-of-{count:05d}.gguf")
        for i in range(1, count + 1)
    }
    return {"HF_ENDPOINT": a_hub.url, "HF_HOME": str(tmp_path / "home")}


def test_chat(program: Callable[..., Any], with_model: dict[str, str], a_hub: hub.Hub) -> None:
    talk = ("-p", "Hi", "-st", "-n", 2, "-c", 256, "--temp", 0)
    for repo in ("me/tiny:F32", "me/split"):
        done = program("runtime.chat", "-hf", repo, *talk, **with_model)
        assert done.returncode == 0, done.stderr
        assert "KV cache: subkv, " in done.stderr and "bases: from the weights, " in done.stderr
    done = program("runtime.chat", *talk, **with_model, LLAMA_ARG_HF_REPO="me/nobody")
    assert done.returncode == 1
    assert done.stderr == "-hf: unknown repository me/nobody; a private one needs HF_TOKEN\n"
    done = program("runtime.chat", "-hf", "me/tiny", "-m", "m.gguf", *talk, **with_model)
    assert done.returncode == 2 and "-hf: expected a model file or -hf, found both m.gguf and me/tiny" in done.stderr
    a_hub.requests.clear()
    done = program("runtime.chat", "-hf", "me/tiny:F32", *talk, **with_model, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert "me/tiny:F32: HF_HUB_OFFLINE is set; using an earlier download of tiny-F32.gguf" in done.stderr
    assert not a_hub.requests


def test_convert(program: Callable[..., Any], with_model: dict[str, str], calibration: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    flags = ("--bases", calibration, "--kv-bits", 9)
    done = program("converter", "-hf", "me/tiny:F32", *flags, "-o", out, **with_model)
    assert done.returncode == 0 and out.is_file(), done.stderr
    done = program("converter", "-hf", "me/tiny:F32", *flags, **with_model)
    assert done.returncode == 2 and "-hf: expected -o FILE" in done.stderr
    assert program("converter", *flags).returncode == 2
    done = program("converter", "-hf", "me/tiny:Q2_K", **with_model)
    assert (done.returncode, done.stderr) == (1, "-hf: expected quant Q2_K in me/tiny, found F16, F32\n")


LLAMA = """
import json, os, sys
import subkv
out = []
for repo, arguments in json.loads(sys.argv[1]):
    try:
        with subkv.Llama.from_pretrained(repo, n_ctx=256, verbose=False, **arguments) as llm:
            out.append([llm.cache_choice.name, os.path.basename(llm.model_path)])
    except subkv.SubkvError as error:
        out.append(str(error))
print(json.dumps(out))
"""


def test_llama(with_model: dict[str, str], coded_model: Callable[..., Path], tmp_path: Path) -> None:
    bases = str(coded_model())
    calls = [
        ("me/tiny", {"filename": "*F32.gguf", "kv_cache": "subkv"}),
        (
            "me/tiny",
            {"filename": "tiny-F32.gguf", "type_k": "q8_0", "type_v": "q8_0", "local_dir": str(tmp_path / "l")},
        ),
        ("me/tiny:F32", {"bases": bases, "additional_files": ["*F16*"], "cache_dir": str(tmp_path / "c")}),
        ("me/split", {}),
        ("me/tiny", {"filename": "*.gguf"}),
        ("me/tiny:Q4_0", {}),
    ]
    command = [sys.executable, "-c", LLAMA, json.dumps(calls)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **with_model}
    )
    assert done.returncode == 0, done.stderr
    *found, two, none = json.loads(done.stdout)
    assert found[:3] == [["subkv", "tiny-F32.gguf"], ["q8_0", "tiny-F32.gguf"], ["subkv", "tiny-F32.gguf"]]
    assert found[3][0] == "subkv" and found[3][1].startswith("tiny-Q8_0-00001-of-")
    assert (tmp_path / "l" / "tiny-F32.gguf").is_file()
    assert two == "filename: expected one file like *.gguf in me/tiny, found 2: tiny-F16.gguf, tiny-F32.gguf"
    assert none == "repo_id: expected quant Q4_0 in me/tiny, found F16, F32"
