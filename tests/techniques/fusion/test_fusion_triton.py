"""Regions of models on CUDA devices: interpreted and compiled everywhere, run where one is."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_fusion import Layer, both
from torch import nn

from slipstream import codegen
from slipstream.codegen import CompileError, load_triton, why_no_compiler
from slipstream.codegen.rows import UnsupportedError
from slipstream.codegen.rows_kernels import row_kernels
from slipstream.graph import Call, TensorSpec
from slipstream.techniques.fusion.backend import FusionBackend
from slipstream.techniques.fusion.lowering import Region, RegionOp, can_lower, lower
from triton_children import run_tests

TESTS = Path(__file__).with_name("triton_fusion.py")
Require = Callable[[str, bool, str], None]


def test_interpreted_kernels_are_torchs(tmp_path: Path, require: Require) -> None:
    run_tests(TESTS, tmp_path, require, interpreted=True)


@pytest.mark.full  # a minute of one core
def test_kernels_compile_for_a_device_that_is_not_here(tmp_path: Path, require: Require) -> None:
    file = TESTS.with_name("triton_fusion_compiled.py")
    run_tests(file, tmp_path, require, interpreted=False)


@pytest.mark.full
def test_every_workloads_regions_are_torchs(tmp_path: Path, require: Require) -> None:
    run_tests(TESTS.with_name("triton_fusion_all.py"), tmp_path, require, interpreted=True)


def test_kernels_on_a_device_are_torchs(require: Require) -> None:
    require("cuda", torch.cuda.is_available(), "no CUDA device")
    torch._dynamo.reset()
    backend = FusionBackend(tuned=False)
    plain, fused = both(Layer().cuda(), torch.randn(4, 64, 64, device="cuda"), backend)
    assert sum(traced.regions for traced in backend.passes) >= 5
    for ours, theirs in zip(fused, plain, strict=True):
        assert (ours - theirs).abs().max() <= 1e-3 * theirs.abs().max()


def regions_of(model: nn.Module, x: torch.Tensor) -> list[Region]:
    """Return the regions of the passes on a CPU."""
    torch._dynamo.reset()
    backend = FusionBackend(tuned=False)
    both(model, x, backend)
    return [region for traced in backend.passes for region in traced.planned.regions]


def moved(step: RegionOp, device: str = "cuda", dtype: str = "float32") -> RegionOp:
    """An operator of tensors that are elsewhere, perhaps of another floating-point type."""

    def elsewhere(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return replace(value, device=device, dtype=dtype if "float" in value.dtype else
                           value.dtype)  # fmt: skip
        return value

    call = step.call
    arguments, outputs = (tuple(map(elsewhere, some)) for some in (call.arguments, call.outputs))
    return replace(step, call=Call(call.op, arguments, outputs))


needs_compiler = pytest.mark.skipif(why_no_compiler() is not None, reason=str(why_no_compiler()))


@needs_compiler
def test_regions_of_a_device_are_those_of_a_processor() -> None:
    for region in regions_of(Layer(0.1), torch.randn(4, 64, 64)):
        steps = [moved(step, dtype="float16") for step in region.steps]
        assert all(can_lower(step) for step in steps)
        assert not all(can_lower(moved(step, "cpu", "float16")) for step in region.steps)
        nest = lower(steps, region.makes).nest
        assert nest.device == "cuda"
        assert nest.statements == region.nest.statements


@needs_compiler
def test_what_has_no_kernel_of_a_device_says_why() -> None:
    (*_, region) = regions_of(nn.LayerNorm(20_000), torch.randn(3, 20_000))
    steps = [moved(step) for step in region.steps]
    with pytest.raises(UnsupportedError, match="20,000 columns"):
        lower(steps, region.makes)
    with pytest.raises(UnsupportedError, match="on two devices"):
        lower([*region.steps, *steps], region.makes)


@needs_compiler
def test_without_triton_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    (region, *_) = regions_of(Layer(), torch.randn(4, 64, 64))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CompileError, match=r"slipstream\[triton\]"):
        row_kernels([replace(region.nest, device="cuda")])
    assert "not installed" in str(codegen.why_no_triton())


def test_a_damaged_file_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, require: Require
) -> None:
    require("triton", importlib.util.find_spec("triton") is not None, "triton is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_triton("answer = 42\n").answer == 42
    (path,) = tmp_path.glob("slipstream/generated/*.py")
    path.write_text("answer = 4")
    assert load_triton("answer = 42\n").answer == 42
    with pytest.raises(CompileError, match="cannot be imported"):
        load_triton("answer = \n")
    path.parent.chmod(0o777)
    with pytest.raises(CompileError, match="writable by others"):
        load_triton("answer = 42\n")
