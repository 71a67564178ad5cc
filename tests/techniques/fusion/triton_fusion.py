"""Run by test_fusion_triton.py in a separate process, interpreted: regions equal torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from test_fusion import MAPS, PARTS, Layer, both
from torch import nn
from torch.nn import functional

from slipstream.codegen import CompileError, rows_kernels, rows_triton
from slipstream.codegen.prelude import threshold_and_scale
from slipstream.codegen.rows import Nest
from slipstream.codegen.rows_kernels import cpp_kernels, triton_kernels
from slipstream.techniques.dropout import _triton as dropout
from slipstream.techniques.dropout import kernels as door
from slipstream.techniques.fusion.backend import FusionBackend
from slipstream.techniques.fusion.lowering import Region


class Mapped(nn.Module):
    """A function of a tensor."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def untuned() -> FusionBackend:
    """Every region in Triton."""
    return FusionBackend(tuned=False, make=triton_kernels)


def regions_of(model: nn.Module, x: torch.Tensor) -> list[Region]:
    """Return the regions of the forward and backward pass."""
    backend = untuned()
    both(model, x, backend)
    return [region for traced in backend.passes for region in traced.planned.regions]


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_outputs_and_gradients_are_those_of_autograd(dtype: torch.dtype, close: float) -> None:
    backend = untuned()
    model, x = Layer().to(dtype), torch.randn(2, 64, 64, dtype=dtype)
    plain, fused = both(model, x, backend)
    assert not backend.reasons
    assert sum(traced.regions for traced in backend.passes) >= 5
    for ours, theirs in zip(fused, plain, strict=True):
        assert (ours - theirs).abs().max() <= close * theirs.abs().max()


@pytest.mark.parametrize("name", MAPS)
def test_functions_equal_torchs(name: str) -> None:
    backend = untuned()
    plain, fused = both(Mapped(MAPS[name]), torch.randn(8, 20, 50), backend)
    assert sum(traced.regions for traced in backend.passes) >= 1
    for ours, theirs in zip(fused, plain, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tanh_is_torchs_near_and_far(dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-30, 30, 4001), torch.logspace(-20, 0, 4191)]).to(dtype)
    plain, fused = both(Mapped(lambda x: torch.tanh(x) * 1.5), x, untuned())
    close = 4 * torch.finfo(dtype).eps
    assert torch.allclose(plain[0], fused[0], rtol=close, atol=0)


@pytest.mark.parametrize("columns", [64, 48])
@pytest.mark.parametrize("p", [0.25, 0.1])
def test_a_mask_is_the_operators_own_and_drawn_again_in_the_backward(
    p: float, columns: int
) -> None:
    x = torch.randn(40, 8, columns, requires_grad=True)
    model = Mapped(lambda x: functional.dropout(x * 2.0, p) + 0.0)
    torch.manual_seed(5)
    made = torch.compile(model, backend=untuned(), dynamic=False)(x)
    made.backward(torch.ones_like(made))
    torch.manual_seed(5)
    expected = door.dropout(x.detach() * 2.0, door.draw_seed(), p)
    assert torch.equal(made, expected)
    assert torch.equal(x.grad != 0, expected != 0)


@pytest.mark.parametrize(("dtype", "count"), [(torch.float32, 200_001), (torch.float64, 2_000)])
def test_the_operator_on_a_device_is_that_of_a_processor(dtype: torch.dtype, count: int) -> None:
    # One element in 65,536 is decided by further bits: some of these are.
    x, seed = torch.randn(count).to(dtype), door.draw_seed()
    for p in (0.1, 0.5):
        threshold, scale = threshold_and_scale(p)
        factor = 1 / (1 - p) if dtype is torch.float64 else float(scale)
        assert torch.equal(dropout.drop(x, seed, threshold, factor), door.dropout(x, seed, p))


def test_what_is_infinite_and_masked_stays_what_it_is_in_torch() -> None:
    x = torch.randn(64, 100)
    x[:, 5] = float("-inf")
    x[3] = float("nan")
    model = Mapped(lambda x: torch.softmax(x * 2, -1))
    with torch.no_grad():
        ours = torch.compile(model, backend=untuned(), dynamic=False)(x)
    assert torch.allclose(ours, torch.softmax(x * 2, -1), atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("model", [*PARTS, lambda: nn.RMSNorm(128)])
def test_parts_of_rows_and_numbers_of_rows_are_torchs(model: Callable[[], nn.Module]) -> None:
    backend = untuned()
    plain, fused = both(model(), torch.randn(4, 40, 128), backend)
    assert sum(traced.regions for traced in backend.passes) >= 2
    for ours, theirs in zip(fused, plain, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=3e-6)


def test_rows_longer_than_a_program_holds_are_read_for_every_stage() -> None:
    model = Mapped(lambda x: functional.log_softmax(x * 2, -1) + x)
    backend = untuned()
    plain, fused = both(model, torch.randn(3, 20_001), backend)
    assert not backend.reasons
    for ours, theirs in zip(fused, plain, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_sums_over_such_rows_too_stay_torchs_with_a_reason() -> None:
    backend = untuned()
    both(nn.LayerNorm(20_000), torch.randn(3, 20_000), backend)
    assert any("20,000 columns" in reason for reason in backend.reasons)


def test_sums_over_rows_are_those_of_all_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_triton, "_MAX_SUMMING_PROGRAMS", 4)
    # Each program has four or five tiles of four rows, the last one of two.
    plain, fused = both(nn.LayerNorm(400), torch.randn(70, 400), untuned())
    for ours, theirs in zip(fused, plain, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def converted(region: Region, dtype: str) -> Region:
    """The region with tensors of another floating-point type."""
    nest = region.nest

    def convert(nest: Nest) -> Nest:
        specs = [
            [spec.as_dtype(dtype) if "float" in spec.dtype else spec for spec in some]
            for some in (nest.inputs, nest.outputs)
        ]
        return replace(nest, inputs=specs[0], outputs=specs[1])

    return replace(region, nest=convert(nest))


def inputs_of(region: Region) -> list[torch.Tensor]:
    """Numbers that any region can take."""
    return [
        torch.empty_strided(spec.shape, spec.strides, dtype=getattr(torch, spec.dtype)).copy_(
            torch.rand(spec.shape) + 0.1 if "float" in spec.dtype
            else torch.randint(0, 2, spec.shape)
        )
        for spec in region.nest.inputs
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_the_same_rounded_once(dtype: str) -> None:
    for region in regions_of(Layer(0.1), torch.randn(2, 64, 64)):
        half = converted(region, dtype)
        inputs = inputs_of(half)
        exact = [x.float() if x.is_floating_point() else x for x in inputs]
        pairs = zip(
            triton_kernels([half.nest])[0](*inputs),
            cpp_kernels([region.nest])[0](*exact),
            strict=True,
        )
        for ours, theirs in pairs:
            wide = theirs.to(ours.dtype).float()
            step = torch.finfo(ours.dtype).eps if ours.is_floating_point() else 0.0
            close = wide.abs() * step + 1e-6 * theirs.abs().max().float()
            assert ((ours.float() - wide).abs() <= close).all()


FAULTS = {
    "a row's end": ("in_c = c < 50", "in_c = c < 49"),
    "another reduction": ("tl.max(", "tl.min("),
    "another column": (" + c * 1", " + c * 0"),
    "no exponential": ("f_exp(", "f_sqrt("),
    "does not compile": ("f_exp(", "f_nothing("),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_corrupted_kernel_is_found_before_it_is_used(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, changed = rows_kernels.triton_source, []

    def corrupted(nests: Sequence[Nest]) -> str:
        text = whole(nests).replace(*FAULTS[fault])
        changed.append(text != whole(nests))
        return text

    monkeypatch.setattr(rows_kernels, "triton_source", corrupted)
    backend = FusionBackend(make=triton_kernels)
    plain, fused = both(
        Mapped(lambda x: torch.softmax(x * 3, -1) + 1), torch.randn(8, 20, 50), backend
    )
    for ours, theirs in zip(fused[:1], plain[:1], strict=True):
        assert torch.equal(ours, theirs)
    assert any(changed)
    reason = "f_nothing" if "compile" in fault else "results differ from those of its operators"
    assert any(reason in message for message in backend.reasons)


def test_what_does_not_compile_is_an_error_with_its_words() -> None:
    (region,) = regions_of(Mapped(lambda x: torch.tanh(x) * 2), torch.randn(64, 64))[:1]
    kernel = triton_kernels([region.nest])[0]
    kernel._launch = None  # type: ignore[assignment]
    with pytest.raises(CompileError, match="NoneType"):
        kernel(*inputs_of(region))
