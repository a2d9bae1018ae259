"""The Vulkan ops against the reference, with the tests of the CUDA ops; f32 bounds without integer dot products.

Without a GPU the tests run on lavapipe. They then check data flow, indexing and arithmetic, and with the validation
layer barriers, but not speed or other compilers.
"""

from __future__ import annotations

import ctypes as ct
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cuda_ops
import layers
import numpy as np
import pytest
import test_cuda as t
import vulkan_ops as v
from cuda_calls import Call, Shape
from each import each
from test_cuda import (
    test_a_cell_that_could_not_be_coded,
    test_a_window_stores_the_rows_of_its_slots,
    test_attend_latent,
    test_attend_layouts,
    test_attend_shapes,
    test_combine,
    test_combine_latent,
    test_encode,
    test_encode_latent,
    test_prompt,
    test_prompt_layouts,
    test_prompts_with_rows_that_are_not_finite,
    test_queries_and_exact_rows_that_are_not_finite,
    test_sums_do_not_overflow,
)

__all__ = [
    "test_a_cell_that_could_not_be_coded",
    "test_a_window_stores_the_rows_of_its_slots",
    "test_attend_latent",
    "test_attend_layouts",
    "test_attend_shapes",
    "test_combine",
    "test_combine_latent",
    "test_encode",
    "test_encode_latent",
    "test_prompt",
    "test_prompt_layouts",
    "test_prompts_with_rows_that_are_not_finite",
    "test_queries_and_exact_rows_that_are_not_finite",
    "test_sums_do_not_overflow",
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := v.missing():
        pytest.skip(reason)
    return v.build(tmp_path_factory.mktemp("vulkan"))


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "dot"])
def opened(request: pytest.FixtureRequest, built: Path) -> v.Library:
    """On a device without any feature, and on one with integer dot products."""
    path = built.with_name(f"libvulkan_ops_{int(request.param)}.so")  # its own device
    shutil.copy(built, path)
    try:
        return v.Library(path, True, request.param)
    except RuntimeError:  # the layer is a separate package
        try:
            return v.Library(path, False, request.param)
        except RuntimeError as error:
            pytest.skip(f"no Vulkan device: {error}")


@pytest.fixture
def library(opened: v.Library) -> Iterator[v.Library]:
    """The device, checked at the end for messages of the validation layer."""
    yield opened
    assert opened.messages()[0] == 0, opened.messages()[1]


LARGE = {
    "320": ([((160, 4), (88, 3)), ((320, 2),)], [((64, 8), (64, 5), (32, 16)), ((320, 4),)]),
    "576": ([((64, 8), (256, 4), (256, 3))], [((64, 16), (256, 5), (256, 6))]),
}


@pytest.fixture(params=LARGE)
def large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Heads that are too large for CUDA's decode kernel."""
    monkeypatch.setitem(layers.LAYERS, request.param, LARGE[request.param])
    return str(request.param)


@each("shape", [Shape(group=2, n_kv=130), Shape(n_tps=9, group=2, n_kv=70, n_split=1)])
def test_large_heads(library: v.Library, large: str, shape: Shape) -> None:
    t.check_attend(library, large, shape)


@each("orthonormal", [True, False])
def test_encode_large_heads(library: v.Library, large: str, orthonormal: bool) -> None:
    t.check_encode_layout(library, large, orthonormal)


@each("shape", [Shape(group=71, n_kv=65), Shape(group=128, n_kv=65, n_split=1)])
def test_large_groups(library: v.Library, shape: Shape) -> None:
    t.check_attend(library, "one_head", shape)


@each(
    "shape",
    [
        Shape(group=18, n_kv=150),
        Shape(group=3, n_kv=100, blind=True),
        Shape(n_tps=2, group=4, n_kv=200, n_split=1, mask_half=True, softcap=20),
    ],
)
def test_attend_latent_of_deepseek(library: v.Library, monkeypatch: pytest.MonkeyPatch, shape: Shape) -> None:
    """512 elements and 64 rotated ones, in bands that end inside a chunk of coefficients."""
    monkeypatch.setitem(layers.LATENT, "deepseek", (((8, 16), (240, 4), (256, 3), (64, 8)), 3, 576, 512))
    t.check_attend(library, "deepseek", shape)


def test_combine_large_heads(library: v.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(layers.LAYERS, "planned", LARGE["576"])
    t.check_combine(library, "planned", Shape(n_tps=3, group=2, n_kv=100), True)


def test_a_missing_barrier_is_reported(opened: v.Library) -> None:
    """attend reads the result of its first dispatch, the projected queries."""
    if not opened.validates:
        pytest.skip("no validation layer (Debian: vulkan-validationlayers)")
    call = Call(opened, "planned", Shape())
    opened.run("attend", call.args)
    assert opened.messages()[0] == 0, opened.messages()[1]
    opened.lib.test_set_barriers(False)
    try:
        opened.run("attend", call.args)
    finally:
        opened.lib.test_set_barriers(True)
    n, last = opened.messages()
    assert n > 0
    assert "SYNC-HAZARD-READ-AFTER-WRITE" in last


@each("shader", v.SHADERS)
def test_shaders_need_no_optional_feature(shader: Path) -> None:
    """The shaders need no subgroup width, halves or small integers, so all devices run the same instructions. Only one
    shader uses integer dot products, and it has a variant without them.
    """
    if reason := v.missing():
        pytest.skip(reason)
    dot = shader.stem == "attend_dot"
    # Shader, which every device has; DotProductInput4x8BitPacked, DotProduct
    assert v.requirements(shader) == (([1, 6018, 6019], ["SPV_KHR_integer_dot_product"]) if dot else ([1], []))


def test_places_are_checked(opened: v.Library) -> None:
    call = Call(opened, "one_head", Shape())
    call.args.k_stride += 1
    expected = "places and strides that are multiples of their unit, and fit 32 bits"
    with pytest.raises(RuntimeError, match=expected):
        opened.run("attend", call.args)
    call.args.k_stride += (1 << 34) - 1
    with pytest.raises(RuntimeError, match=expected):
        opened.run("attend", call.args)
    assert np.isnan(call.m()).all()


def test_more_workgroups_than_every_device_has_are_refused(opened: v.Library) -> None:
    call = Call(opened, "one_head", Shape())
    at, read = call.memory.put(np.full(64, 7, np.float32))
    places = dict.fromkeys(("k", "v", "k_tiles", "v_tiles", "cells", "fresh"), at)
    with pytest.raises(RuntimeError, match="at most 65535 workgroups in a dimension"):
        opened.run("encode", cuda_ops.Encode(layer=call.heads.layer, n_tok=1 << 16, **places))
    assert (read() == 7).all()


@pytest.mark.parametrize("n_tps", [1, 8])
def test_calls_of_the_timing_script(
    library: v.Library, n_tps: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """research/gpu/gpu_vulkan.py on a small workload prints a line for the copy and for every op."""
    monkeypatch.syspath_prepend(str(v.VULKAN.parents[1] / "research" / "gpu"))
    import gpu_vulkan

    for name, value in (("N_HEAD", 1), ("GROUP", 2)):
        monkeypatch.setattr(gpu_vulkan, name, value)
    workloads: list[gpu_vulkan.Workload] = []

    class Kept(gpu_vulkan.Workload):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            workloads.append(self)

    monkeypatch.setattr(gpu_vulkan, "Workload", Kept)
    copy = gpu_vulkan.time_copy(library, 1)
    gpu_vulkan.time_shape(library, "4.3 bits", (2, n_tps, 1024), copy, 2)
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    shape = f"4.3 bits, 2 x {n_tps} tokens, 1024 cells"
    ops = [f"Vulkan {op}: {shape}" for op in ("project_queries", "attend", "combine", "encode")]
    assert [line["step"] for line in printed] == ["device", *ops]
    assert all(len(line["samples_ms"]) == 2 and line["ms"] > 0 for line in printed[1:])
    assert printed[2]["bytes"] == 2 * 1024 * (71 + 67)  # a row of keys, one of values
    assert f"{printed[2]['gbs']:.1f} GB/s of codes" in printed[2]["result"]
    (work,) = workloads
    shape_out = (2 * n_tps, 2 * gpu_vulkan.D)
    size = 4 * shape_out[0] * shape_out[1]
    out = np.frombuffer(ct.string_at(work.combine.out, size), np.float32).reshape(shape_out)
    assert np.isfinite(out).all()
    assert (out.std(1) > 0.1).all()
