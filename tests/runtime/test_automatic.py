"""Caches chosen by the environment, in processes that import llama_cpp but not subkv."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import derived_numpy
import engine
import pytest
from each import each
from format import writer
from gguf import GGUFReader, GGUFValueType

from subkv.format import metadata, store
from subkv.native import library as _lib
from subkv.native.bases import STORED, sidecar_path, stored_path
from subkv.native.gguf import Gguf

Models = Callable[..., Path]

# One context of each model, in this order. A model may be followed by =TYPE, a cache type, or =kTYPE, of one side
# (both: =kTYPEvTYPE); by =dry, a dry run; or by =made: nothing is evaluated. Between them: !CODE, executed.
PROGRAM = """
import ctypes, hashlib, json, os, re, shutil, sys
import numpy as np
from llama_cpp import llama_cpp as C
lines = []
collect = C.llama_log_callback(lambda level, text, _: lines.append((level, text.decode())))
C.llama_log_set(collect, None)
C.llama_backend_init()
out = []
for name in sys.argv[1:]:
    if name.startswith("!"):
        exec(name[1:])
        continue
    path, _, kind = name.partition("=")
    of_model = C.llama_model_default_params()
    of_model.no_alloc, of_model.load_mode = kind == "dry", C.LLAMA_LOAD_MODE_NONE
    model = C.llama_model_load_from_file(path.encode(), of_model)
    assert model, path
    lines.clear()
    params = C.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads = 512, 512, 512, 1
    if kind.isdigit():
        params.type_k = params.type_v = int(kind)
    for side, type in re.findall("([kv])([0-9]+)", kind):
        setattr(params, "type_" + side, int(type))
    ctx = C.llama_init_from_model(model, params)
    said = [text.strip() for level, text in lines if level >= 3 and re.search("subkv|SUBKV|cache type", text)]
    kv = [text.split("size =")[1].strip() for _, text in lines if "cells" in text and "K (" in text]
    found = {"made": bool(ctx), "log": said, "kv": kv[0] if kv else ""}
    if ctx and kind not in ("dry", "made"):
        n = 40
        n_vocab = C.llama_vocab_n_tokens(C.llama_model_get_vocab(model))
        batch = C.llama_batch_init(n, 0, 1)
        batch.n_tokens = n
        for i in range(n):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = 10 + 3 * i, i, 1, 1
            batch.seq_id[i][0] = 0
        assert C.llama_decode(ctx, batch) == 0
        logits = np.ctypeslib.as_array(C.llama_get_logits(ctx), (n, n_vocab))
        found["logits"] = hashlib.sha256(logits.tobytes()).hexdigest()
        memory = C.llama_get_memory(ctx)
        found["n_rs_seq"], found["pos_min"] = C.llama_n_rs_seq(ctx), C.llama_memory_seq_pos_min(memory, 0)
    out.append(found)
print(json.dumps(out))
"""


CODED, AUTO, F16, Q8_0 = 4, 5, 36, 8  # llama-subkv-programs.h; ggml.h


def run(*models: Path | str, subkv: str | None = "auto", **variables: str) -> list[dict[str, Any]]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SUBKV", "LLAMA"))}
    env |= {"LLAMA_CPP_LIB_PATH": str(_lib.lib_dir()), **variables}
    if subkv is not None:
        env["SUBKV"] = subkv
    command = [sys.executable, "-c", PROGRAM, *map(str, models)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.fixture
def model(tiny_model: Models, tmp_path: Path) -> Path:
    """A copy of the tiny llama in a separate folder."""
    return Path(shutil.copy(tiny_model(), tmp_path / "m.gguf"))


@pytest.fixture
def bases(tmp_path: Path, model: Path) -> Path:
    """A file with bases of the tiny llama that is not where `auto` looks."""
    return sidecar(tmp_path / "elsewhere.gguf", model)


def kind(found: dict[str, Any]) -> str:
    """The type of the context's K/V cache; "none": there is no context."""
    types = dict.fromkeys(re.findall(r"[KV] \((\w+)\)", found["kv"]))
    return "/".join(types) if found["made"] else "none"


def sidecar(path: Path, model: Path, n_recent: int = 8, content: str | None = None, **more: Any) -> Path:
    """Bases for a tiny llama, 8 bits, with the digest of `model` or another one."""
    with Gguf(model) as opened:
        digest, n_layer = opened.content(), opened.get("llama.block_count")
    layout = engine.signed_permutations(
        [(il, 2, 32, 32) for il in range(n_layer)],
        [(32, 8)],
        [(32, 8)],
        arch="llama",
        block_count=n_layer,
        path=path,
        n_recent=n_recent,
        **more,
    )
    engine.SUBKV.subkv_layout_free(layout)
    named = {"subkv.base.content": (GGUFValueType.STRING, digest if content is None else content)}
    return writer.write(path, writer.sealed(writer.read(path) | named))


def stored(model: Path, source: int = STORED, **options: Any) -> Path:
    """The same in the user's cache folder."""
    entry = store.entry(model)
    entry.prepare()
    return sidecar(stored_path(model, entry.content, source), model, **options)


def test_off_is_ordinary(model: Path) -> None:
    stored(model)
    unset, empty, off = (run(model, subkv=value)[0] for value in (None, "", "off"))
    assert unset == empty == off
    assert unset["log"] == [] and "(f16)" in unset["kv"] and unset["n_rs_seq"] == unset["pos_min"] == 0


def test_bases_are_derived_where_none_are_stored(model: Path, tmp_path: Path) -> None:
    """By each request, from the weights, without a folder of the user, which is not written either."""
    home, none = tmp_path / "home", {"XDG_CACHE_HOME": "", "HOME": str(tmp_path / "home")}
    (automatic,) = run(model, **none)
    (line,) = automatic["log"]
    assert line.startswith("subkv: coded K/V cache, ")
    assert re.search(r"; bases: from the weights, 6\.\d+ bits per element at 8192 tokens, near q8_0's quality", line)
    for value, context in (("subkv", str(model)), (None, f"{model}={CODED}"), (None, f"{model}={AUTO}")):
        assert run(context, subkv=value, **none)[0] == automatic
    assert not home.exists()
    (fewer,) = run(model, SUBKV_BITS="4.6")
    assert "from the weights, 4." in fewer["log"][0] and "q8_0's quality" not in fewer["log"][0]


def test_a_model_without_bases_is_ordinary_and_logged(tiny_model: Models) -> None:
    """With 4 elements, no head of it can be coded."""
    model = tiny_model(head_size=4)
    (found,) = run(model)
    why = "model llama: subkv cannot hold its K/V cache because no layer of it has K/V heads of 8 to 576 elements"
    assert found["log"][0].startswith(f"subkv: ordinary f16 K/V cache: {why}")
    assert found["logits"] == run(model, subkv=None)[0]["logits"]
    (refused,) = run(f"{model}={CODED}", subkv=None)
    assert not refused["made"] and f"cache type subkv: {why}" in refused["log"][0]
    assert refused["log"][0].endswith("; cache type f16 runs with an ordinary cache")


def test_places_searched_by_auto(model: Path) -> None:
    """Each place takes precedence over the earlier ones; their windows differ."""
    for n_recent, place in enumerate(["store", "beside"], 8):
        path = {
            "store": lambda n: stored(model, n_recent=n),
            "beside": lambda n: sidecar(sidecar_path(model), model, n_recent=n),
        }[place](n_recent)
        (found,) = run(model)
        (line,) = found["log"]
        assert line.startswith("subkv: coded K/V cache, ") and line.endswith(f" ({path})")
        origin = "calibrated on 123456789012 tokens for this model, "
        assert f" layers; bases: {origin}" in line
        assert found["kv"].count("(subkv)") == 2
        assert "x smaller than f16, not smaller than q8_0, " in line
        (named,) = run(model, subkv=str(path))
        assert f" layers; bases: of {path}, " in named["log"][0] and found == {**named, "log": [line]}


def of_version(path: Path, generator: str, tokens: int = 0) -> Path:
    """The file as if this program had derived its bases from the weights, or from `tokens` of a text of this name."""
    texts = {"subkv.generator": generator, "subkv.calibration.text": derived_numpy.FROM_WEIGHTS}
    keys = {name: (GGUFValueType.STRING, text) for name, text in texts.items()}
    keys["subkv.calibration.tokens"] = (GGUFValueType.UINT64, tokens)
    return writer.write(path, writer.sealed(writer.read(path) | keys))


def test_derived_bases_that_older_builds_stored_are_not_used(model: Path) -> None:
    """Unless the user names the file."""
    path = stored(model)
    path = path.rename(path.with_name(path.name.replace(".gguf", ".weights.gguf")))
    of_version(path, derived_numpy.weights_generator())
    assert "from the weights, 6." in run(model)[0]["log"][0]
    of_version(path, f"{metadata.generator()}, weights")
    (named,) = run(model, subkv=str(path))
    assert named["made"] and named["log"][0].endswith(" tokens, derived by another version of subkv")
    of_version(path, "another program", tokens=2048)
    assert not run(model, subkv=str(path))[0]["log"][0].endswith("another version of subkv")


def test_own_keys_take_precedence(model: Path, bases: Path) -> None:
    sidecar(sidecar_path(model), model)
    kinds = {4: "u32", 10: "u64", 6: "f32", 8: "str"}
    fields = [field for field in GGUFReader(bases).fields.values() if field.name.startswith("subkv.")]
    with Gguf(model) as plain:
        keys = plain.metadata_with({field.name: (kinds[field.types[0]], field.contents()) for field in fields})
        data = model.read_bytes()[plain.data_offset :]
    model.write_bytes(keys + data)
    (found,) = run(model)
    assert f" layers; bases: of {model}, " in found["log"][0] and len(found["log"]) == 1


def test_split_models_find_their_bases(tiny_model: Models) -> None:
    model = tiny_model("llama", split_tensors=6)
    path = stored(model)
    assert run(model)[0]["log"][0].endswith(f"({path})")


def test_explicit_attach_gives_the_same_numbers(model: Path, bases: Path) -> None:
    """An attached layout, or an explicit ordinary cache, takes precedence over the environment."""
    program = PROGRAM.replace(
        "    ctx = C.llama_init",
        "    from subkv.engine.cache import attached, coded_by, ordinary\n"
        "    import os, pathlib\n"
        "    file = os.environ['BASES']\n"
        "    choice = coded_by(pathlib.Path(file)) if file else ordinary()\n"
        "    hold = attached(choice); hold.__enter__()\n"
        "    ctx = C.llama_init",
    )
    env = {**os.environ, "SUBKV": "/no/such/file", "LLAMA_CPP_LIB_PATH": str(_lib.lib_dir())}
    found = []
    for file in (str(bases), ""):
        command = [sys.executable, "-c", program, str(model)]
        done = subprocess.run(command, env={**env, "BASES": file}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1])[0])
    assert found[0]["logits"] == run(model, subkv=str(bases))[0]["logits"]
    assert found[1] == run(model, subkv=None)[0]


def test_two_contexts_of_one_model(model: Path) -> None:
    stored(model)
    first, second = run(model, model)
    assert first == second and "(subkv)" in first["kv"]


def test_dry_runs_see_coded_sizes(model: Path, bases: Path) -> None:
    dry, real = run(f"{model}=dry", model, subkv=str(bases))
    assert dry["made"] and dry["log"] == [] and dry["kv"] == real["kv"]


@pytest.mark.parametrize("other", ["gemma2", "qwen2", "llama"])
def test_other_models_do_not_use_a_files_bases(other: str, model: Path, bases: Path, tiny_model: Models) -> None:
    """They have bases of their own, also if the file's bases have the same shapes."""
    stored(model)
    draft = tiny_model(other, seed=1)
    alone = run(draft)[0]
    for value in ("auto", str(bases)):
        first, second = run(model, draft, subkv=value)
        assert kind(first) == kind(second) == "subkv"
        *notes, line = second["log"]
        assert all("sliding layers stay in f16" in note for note in notes) and "; bases: from the weights, " in line
        assert second["logits"] == alone["logits"]
    own = stored(draft) if other == "llama" else None
    if own:
        for found in run(model, draft, subkv=str(bases))[1], run(model, f"{draft}={CODED}", subkv=str(bases))[1]:
            assert found["log"][0].endswith(f"({own})")


def test_subkv_is_required_by_the_first_model(model: Path, tiny_model: Models) -> None:
    """As by its type. Other models, such as drafts, may have no bases; their contexts are as with `auto`."""
    draft = tiny_model(head_size=4)
    (refused,) = run(draft, subkv="subkv")
    assert not refused["made"] and "SUBKV=subkv: model llama: subkv cannot hold its K/V cache" in refused["log"][0]
    path = stored(model)
    first, second, typed, again = run(model, draft, f"{model}={F16}", model, subkv="subkv")
    assert [kind(found) for found in (first, second, typed, again)] == ["subkv", "f16", "f16", "subkv"]
    assert first == again == run(model)[0] and first["log"][0].endswith(f"({path})")
    first, derived, other = run(model, f"!os.remove({str(path)!r})", model, draft, subkv="subkv")
    assert first["made"] and "; bases: from the weights, " in derived["log"][0] and kind(other) == "f16"


def test_a_file_belongs_to_the_first_model_that_it_fits(model: Path, bases: Path, tiny_model: Models) -> None:
    link = model.with_name("link.gguf")
    link.symlink_to(model)
    copy = shutil.copy(model, model.with_name("copy.gguf"))
    first, *others = run(tiny_model("gemma2"), model, link, copy, subkv=str(bases))
    assert [kind(found) for found in (first, *others)] == ["none", "subkv", "subkv", "subkv"]
    assert "subkv.arch" in first["log"][0]


#
# types
#


# types -> caches: without SUBKV, with SUBKV=off, auto, a file
CACHES = {
    "": ("f16", "f16", "subkv", "subkv"),
    F16: ("f16",) * 4,
    f"k{F16}": ("f16",) * 4,
    Q8_0: ("q8_0",) * 4,
    f"k{F16}v{Q8_0}": ("f16/q8_0",) * 4,
    CODED: ("subkv", "none", "subkv", "subkv"),
    f"k{CODED}": ("subkv", "none", "subkv", "subkv"),
    f"v{CODED}": ("subkv", "none", "subkv", "subkv"),
    AUTO: ("subkv", "f16", "subkv", "subkv"),
}


@each("value", [None, "off", "auto", "file"])
def test_types_have_precedence(value: str | None, model: Path, bases: Path) -> None:
    """Every context of a process gets its own, in any order; SUBKV is for contexts that request nothing."""
    stored(model)
    column = [None, "off", "auto", "file"].index(value)
    contexts = [f"{model}={types}" for types in CACHES]
    of_environment = str(bases) if value == "file" else value
    found = run(*contexts, *reversed(contexts), subkv=of_environment)
    expected = [caches[column] for caches in CACHES.values()]
    assert [kind(one) for one in found] == [*expected, *reversed(expected)]
    for types, one, cache in zip(CACHES, found, expected, strict=False):
        if types and cache not in ("subkv", "none") and column > 1:
            assert one["log"] == [f"subkv: ordinary {cache} K/V cache: its type was requested"]
        elif cache == "none":
            assert "cache type subkv: SUBKV=auto, a file, or no SUBKV expected, SUBKV=off found" in one["log"][0]
        elif cache != "subkv":
            assert one["log"] == []


def test_types_that_do_not_go_together(model: Path) -> None:
    stored(model)
    pairs = f"k{CODED}v{F16}", f"k{Q8_0}v{CODED}", f"k{AUTO}v{Q8_0}", f"k{CODED}v{AUTO}"
    for value in (None, "auto"):
        for found in run(*(f"{model}={pair}" for pair in pairs), subkv=value):
            assert not found["made"]
            assert "cache types: expected the same cache for K and V with " in found["log"][0]


def test_a_required_cache_is_required_again(model: Path, bases: Path, tiny_model: Models) -> None:
    """Each time that the process opens the model: its bases may have vanished, changed or been damaged meanwhile."""
    path = stored(model)
    for context, file, value in ((f"{model}={CODED}", path, None), (str(model), bases, str(bases))):
        name, copy = str(file), f"{file}.copy"
        shutil.copy(file, copy)
        removed = {} if value is None else {f"!os.remove({name!r})": "no such file"}  # else they are derived
        changes = {
            **removed,
            f"!os.truncate({name!r}, 1000)": "truncated or damaged",
            f"!shutil.copy({str(tiny_model('gemma2'))!r}, {name!r})": "subkv.\\* keys|a sidecar of this model",
        }
        steps = [step for change in changes for step in (change, context, f"!shutil.copy({copy!r}, {name!r})", context)]
        first, *found = run(context, *steps, subkv=value)
        for refused, again, why in zip(found[::2], found[1::2], changes.values(), strict=True):
            assert not refused["made"] and re.search(why, refused["log"][0]), refused
            assert again == first and kind(first) == "subkv"


NONE = {
    "mamba": "no K/V cache: its layers keep a recurrent state instead",
    "bert": "no K/V cache: its tokens attend to their batch only",
}


@pytest.mark.parametrize("arch", NONE)
def test_models_without_a_cache_are_reported(arch: str, model: Path, bases: Path, tiny_model: Models) -> None:
    """`auto` logs one line, also with another model; a named file refuses the context; otherwise nothing is logged."""
    stored(model)
    path = tiny_model(arch)
    made = f"{path}=made"
    (alone,) = run(made)
    assert alone == {"made": True, "log": [f"subkv: {NONE[arch]}"], "kv": ""}
    assert run(f"{path}=dry")[0]["log"] == []
    for value in ("auto", str(bases)):
        first, second = run(model, made, subkv=value)
        assert "(subkv)" in first["kv"] and second == alone
    (refused,) = run(made, subkv=str(bases))
    assert not refused["made"] and f"SUBKV={bases}: {NONE[arch]}; SUBKV=off runs" in refused["log"][0]
    for off in ("off", None):
        assert run(made, subkv=off)[0] == {"made": True, "log": [], "kv": ""}


@each(
    ("variables", "why"),
    [
        ({"SUBKV_RECENT": "x"}, "SUBKV_RECENT: expected a number from 0 to 65536, found 'x'"),
        ({"SUBKV_RECENT": "-1"}, "SUBKV_RECENT: expected a number from 0 to 65536, found '-1'"),
        ({"SUBKV_RECENT": "65537"}, "SUBKV_RECENT: expected a number from 0 to 65536, found '65537'"),
        ({"SUBKV_SINK": "99999999999999999999"}, "SUBKV_SINK: expected a number from 0 to 4096, found '9"),
        ({"SUBKV_ROLLBACK": "16 "}, "SUBKV_ROLLBACK: expected a number from 0 to 65536, found '16 '"),
        ({"SUBKV_ADAPT": "q"}, "SUBKV_ADAPT: adapt: expected k, v or kv, found 'q'"),
    ],
)
def test_bad_values_make_no_context(variables: dict[str, str], why: str, model: Path) -> None:
    stored(model)
    (found,) = run(model, **variables)
    assert not found["made"]
    assert f"SUBKV=auto: {why}" in found["log"][0]
    assert found["log"][0].endswith("SUBKV=off runs with an ordinary cache")
    (unused,) = run(model, subkv="off", **variables)
    assert unused["made"] and unused["log"] == []


def test_files_that_cannot_be_used_make_no_context(
    model: Path, bases: Path, tiny_model: Models, tmp_path: Path
) -> None:
    text, damaged = tmp_path / "text", tmp_path / "damaged.gguf"
    text.write_text("no bases at all")
    damaged.write_bytes(bases.read_bytes()[:-200])
    gemma = tiny_model("gemma2")
    for file, used_by, why in (
        (tmp_path / "none.gguf", model, "no such file"),
        (tmp_path, model, "a directory"),
        (text, model, "other first bytes than 'GGUF'"),
        (damaged, model, "truncated or damaged"),
        (model, model, "expected subkv.* keys"),
        (bases, gemma, "subkv.arch"),
    ):
        (found,) = run(used_by, subkv=str(file))
        assert not found["made"] and why in found["log"][0], (file, found)


@pytest.mark.skipif(os.name == "nt", reason="links")
def test_places_that_cannot_be_searched(model: Path, tmp_path: Path) -> None:
    """A sidecar beside the model: the system cannot tell whether there is one, and another cache would be used
    silently. A cache folder that is not this user's has no bases of this user, and the line about the cache says it.
    """
    for path, variables in (
        (sidecar_path(model), {}),
        (tmp_path / "cache" / "subkv" / "sidecars", {"XDG_CACHE_HOME": str(tmp_path / "cache")}),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(path)
        (found,) = run(model, **variables)
        assert found["made"] == bool(variables)
        why = f"{path}: expected a readable path, found {os.strerror(errno.ELOOP)}"
        assert (f"; no stored bases: {why}" if variables else why) in found["log"][0]
        path.unlink()


@pytest.mark.parametrize("content", ["", "0" * 64])
def test_sidecars_of_other_models_are_refused(content: str, model: Path) -> None:
    sidecar(sidecar_path(model), model, content=content)
    (found,) = run(model)
    assert not found["made"] and "expected a sidecar of this model" in found["log"][0]


def test_the_window_follows_the_variables(model: Path, bases: Path) -> None:
    usual = run(model, subkv=str(bases))[0]
    assert (usual["n_rs_seq"], usual["pos_min"]) == (0, 0)
    exact = run(model, subkv=str(bases), SUBKV_SINK="4", SUBKV_RECENT="100")[0]
    assert exact["logits"] != usual["logits"]
    adapt = {"SUBKV_ADAPT": "v,block=4,warm=8,length=16", "SUBKV_RECENT": "24"}
    adaptive, longer = (run(model, subkv=str(bases), **adapt, **more)[0] for more in ({}, {"SUBKV_ROLLBACK": "20"}))
    assert adaptive["made"] and adaptive["logits"] != usual["logits"]
    assert (adaptive["n_rs_seq"], longer["n_rs_seq"]) == (16, 20)


def test_names_are_escaped_in_the_log(model: Path, bases: Path, tmp_path: Path) -> None:
    hostile = bases.rename(tmp_path / "a\x1b[31mb\nc\u202e.gguf")
    (found,) = run(model, subkv=str(hostile))
    assert found["made"] and len(found["log"]) == 1
    assert "/a\\x1b[31mb\\nc\\u202e.gguf, 8." in found["log"][0]
    (found,) = run(model, subkv=f"{hostile}none")
    assert not found["made"] and all(line.isprintable() for line in found["log"])


def test_an_old_file_is_noted_once(model: Path, bases: Path) -> None:
    """It is used: only the checksum of its keys is missing."""
    keys = writer.read(bases) | {"subkv.version": (GGUFValueType.UINT32, 4)}
    del keys[writer.KEYS_DIGEST]
    writer.write(bases, keys)
    found = run(model, model, subkv=str(bases))
    assert all(entry["made"] for entry in found)
    notes = [line for entry in found for line in entry["log"] if "format version 4 has no checksum" in line]
    assert len(notes) == 1 and str(bases) in notes[0]
