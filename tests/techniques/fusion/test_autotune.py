"""The step itself decides: kernels stay where it is faster with them, and only there."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._guards import TracingContext
from torch.fx import GraphModule
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from model_uses import gradients, process_group
from slipstream.codegen import rows_kernels, why_no_compiler
from slipstream.errors import SlipstreamWarning
from slipstream.techniques.fusion import autotune, backend
from slipstream.techniques.fusion.backend import FusionBackend, explain, use_fused

pytestmark = pytest.mark.skipif(why_no_compiler() is not None, reason=str(why_no_compiler()))


class Noisy(nn.Module):
    """Dropout and what is around it: a kernel takes a fifth of its operators' time."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(torch.tanh(x * self.scale + 1), 0.5) * torch.sigmoid(x) - 1


class Gate(nn.Module):
    """Without random numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + 1) * torch.sigmoid(x) - 1


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _compiled(model: nn.Module, backend: FusionBackend) -> Any:
    return torch.compile(model, backend=backend, dynamic=False)


def test_kernels_that_make_the_step_faster_stay() -> None:
    backend = FusionBackend(inductor=False)
    x = torch.randn(800, 512, requires_grad=True)
    _compiled(Noisy(), backend)(x).sum().backward()
    assert not backend.reasons
    assert all(traced.regions for traced in backend.passes)


@pytest.fixture
def _slow_within(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass around the kernels, whose speed is unchanged, loses more time than they save."""
    plain = autotune.replace_regions

    def with_a_delay(*arguments: Any) -> GraphModule:
        module = plain(*arguments)
        first = next(node for node in module.graph.nodes if node.op == "call_module")
        with module.graph.inserting_before(first):
            module.graph.call_function(_delay)
        module.recompile()
        return module

    monkeypatch.setattr(autotune, "replace_regions", with_a_delay)


def _delay() -> None:
    until = time.thread_time() + 0.05
    while time.thread_time() < until:
        pass


@pytest.mark.usefixtures("_slow_within")
def test_kernels_that_win_apart_and_lose_within_the_step_are_declined() -> None:
    backend = FusionBackend(inductor=False)
    model, x = Noisy(), torch.randn(800, 512, requires_grad=True)
    call = _compiled(model, backend)
    call(x).sum().backward()
    assert all(traced.regions for traced in backend.passes), "each kernel alone was faster"
    assert "too little" in backend.reasons[-1]
    # What is declined is torch's own again: also its random numbers.
    torch.manual_seed(7)
    ours = call(x)
    torch.manual_seed(7)
    assert torch.equal(ours, model(x))


def test_every_kernel_is_run_beside_its_operators_before_it_is_used() -> None:
    backend = FusionBackend(inductor=False)
    _compiled(Noisy(), backend)(torch.randn(800, 512, requires_grad=True)).sum().backward()
    for traced in backend.passes:
        assert not traced.comparison.wrong
        assert 0 < max(traced.comparison.differences.values()) < 1e-5


def test_kernels_with_other_numbers_are_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rows_kernels.source
    monkeypatch.setattr(
        rows_kernels, "source", lambda nests: whole(nests).replace("f_tanh(v", "f_erf(v")
    )
    backend = FusionBackend(inductor=False)
    _compiled(Noisy(), backend)(torch.randn(800, 512, requires_grad=True)).sum().backward()
    assert "results differ from those of its operators" in backend.reasons[0]
    forward, _ = backend.passes
    assert not forward.regions, "the backward pass has no tanh"


def test_choosing_leaves_no_trace() -> None:
    """Buffers, gradients, hooks and the generator are as if the model had run once."""
    calls: list[int] = []
    layers = nn.Linear(64, 512), nn.BatchNorm1d(512), nn.Tanh(), Noisy(), nn.Linear(512, 8)
    model, x = nn.Sequential(*layers), torch.randn(256, 64)
    twin, state = copy.deepcopy(model), torch.get_rng_state()
    model[0].weight.register_hook(lambda gradient: calls.append(1))
    for tuned, candidate in ((True, model), (False, twin)):
        torch.set_rng_state(state)
        backend = FusionBackend(tuned=tuned, inductor=False)
        call = _compiled(candidate, backend)
        checkpoint(lambda x, call=call: call(x), x, use_reentrant=False).sum().backward()
        if tuned:
            assert not backend.reasons
    assert calls == [1]
    for (name, ours), theirs in zip(
        model.state_dict().items(), twin.state_dict().values(), strict=True
    ):
        assert torch.allclose(ours, theirs, atol=1e-5), name
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-4, rtol=1e-4)


def test_what_is_called_without_gradients_is_chosen_without_them() -> None:
    backend = FusionBackend(inductor=False)
    x = torch.randn(800, 512)
    with torch.no_grad():
        made = _compiled(Noisy(), backend)(x)
    assert len(backend.passes) == 1
    assert not made.requires_grad


@pytest.mark.usefixtures("_slow_within")
def test_a_model_without_kernels_is_called_without_torch_compile() -> None:
    model, x = Noisy(), torch.randn(800, 512, requires_grad=True)
    use_fused(model)
    model(x).sum().backward()
    assert model._compiled_call_impl is None
    assert model(x).requires_grad


def test_a_model_with_kernels_is_called_with_them() -> None:
    model, x = Noisy(), torch.randn(800, 512, requires_grad=True)
    use_fused(model)
    model(x).sum().backward()
    assert model._compiled_call_impl is not None
    assert copy.deepcopy(model)._compiled_call_impl is None


@pytest.mark.parametrize("order", ["compiled replicas", "replicas of compiled"])
def test_replicas_whose_parameters_fill_two_buckets_are_fused(order: str) -> None:
    model = nn.Sequential(nn.Linear(768, 768), Gate(), nn.Linear(768, 768), Gate())
    plain, x = copy.deepcopy(model), torch.randn(64, 768)
    with process_group():
        if order == "compiled replicas":
            replicas = DistributedDataParallel(model, bucket_cap_mb=5)
            call = torch.compile(replicas, backend="slipstream_fusion")
        else:
            compiled = torch.compile(model, backend="slipstream_fusion")
            call = DistributedDataParallel(compiled, bucket_cap_mb=5)
        fused = gradients(model, call, x)
    for ours, theirs in zip(fused, gradients(plain, plain, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


class Normed(nn.Module):
    """Under autocast: a half-precision input and float32 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.layer(x)) + 1) * torch.sigmoid(x) - 1


def test_statistics_of_a_norm_under_autocast_keep_torchs_dtype() -> None:
    backend, model, x = (
        FusionBackend(inductor=False),
        nn.Sequential(Normed(), Normed()),
        torch.randn(512, 64),
    )
    call = _compiled(model, backend)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = call(x), model(x)
    assert not any("fail" in reason for reason in backend.reasons)
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.05, atol=0.05)


def test_a_piece_whose_kernels_fail_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*ignored: Any) -> Any:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(autotune, "_time_ratios", fail)
    backend, model, x = FusionBackend(inductor=False), Gate(), torch.randn(800, 512)
    torch.testing.assert_close(_compiled(model, backend)(x), model(x))
    assert backend.reasons == ["its kernels fail: no such instruction"]


def test_other_shapes_run_as_written_until_they_are_common() -> None:
    backend, model = FusionBackend(inductor=False), Gate()
    call, other = _compiled(model, backend), torch.randn(400, 512)
    call(torch.randn(800, 512))
    with pytest.warns(SlipstreamWarning, match="16 calls run as written"):
        call(other)
    for _ in range(15):
        torch.testing.assert_close(call(other), model(other))
    first, second = backend.pieces
    assert first.choice is not None
    assert second.choice is None
    call(other)
    assert second.choice is not None


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether torch.compile was tracing at each call of a stand-in for inductor."""
    tracing: list[bool] = []

    def compile_as_written(module: GraphModule, inputs: Any) -> Any:
        tracing.append(TracingContext.try_get() is not None)
        return module

    monkeypatch.setattr(backend, "inductor", compile_as_written)
    return tracing


def _fastest(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let every region's kernel be faster than its operators, and `name` be the fastest."""

    def gains(steps: dict[str, Any], *ignored: Any) -> dict[str, float]:
        for step in steps.values():
            step()
        return {candidate: 1.0 + (candidate == name) for candidate in steps}

    monkeypatch.setattr(autotune, "_time_ratios", gains)
    monkeypatch.setattr(autotune.TracedPass, "faster", lambda self: [True] * self.regions)


@pytest.mark.parametrize("name", [autotune.WRITTEN, autotune.INDUCTOR])
def test_the_fastest_candidate_is_what_calls_run(
    name: str, monkeypatch: pytest.MonkeyPatch, traced: list[bool]
) -> None:
    _fastest(monkeypatch, name)
    model, x = Gate(), torch.randn(800, 512, requires_grad=True)
    use_fused(model)
    torch.testing.assert_close(model(x), Gate()(x))
    assert traced == [False]
    assert (model._compiled_call_impl is None) is (name == autotune.WRITTEN)
    assert any(line.startswith(f"runs {name}") for line in explain())


def test_inductor_compiles_symbolic_sizes_while_their_guards_are_made(
    monkeypatch: pytest.MonkeyPatch, traced: list[bool]
) -> None:
    _fastest(monkeypatch, autotune.INDUCTOR)
    call = torch.compile(Gate(), backend="slipstream_fusion", dynamic=True)
    for rows in (800, 400):
        x = torch.randn(rows, 512, requires_grad=True)
        torch.testing.assert_close(call(x), Gate()(x))
    assert traced == [True]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_failing_inductor_leaves_the_other_candidates(
    dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*ignored: Any) -> Any:
        raise RuntimeError("No working C++ compiler found\nin any folder")

    monkeypatch.setattr(backend, "inductor", fail)
    _fastest(monkeypatch, autotune.FUSED)
    call = torch.compile(Gate(), backend="slipstream_fusion", dynamic=dynamic)
    x = torch.randn(800, 512)
    torch.testing.assert_close(call(x), Gate()(x))
    (line,) = [line for line in explain() if "RuntimeError: No working C++ compiler found" in line]
    assert line.startswith(f"runs {autotune.WRITTEN if dynamic else autotune.FUSED}")


@pytest.mark.usefixtures("traced")
def test_candidates_that_cannot_be_timed_leave_the_model_as_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*ignored: Any) -> Any:
        raise RuntimeError("no clock")

    monkeypatch.setattr(autotune, "_time_ratios", fail)
    call = torch.compile(Gate(), backend="slipstream_fusion", dynamic=False)
    x = torch.randn(800, 512, requires_grad=True)
    torch.testing.assert_close(call(x), Gate()(x))
    (line,) = [line for line in explain() if "cannot be timed: no clock" in line]
    assert line.startswith(f"runs {autotune.WRITTEN}")
