"""Kernels generated for a model's regions compute what torch computes, forward and backward."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from recorded import graph_of
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.fx import GraphModule
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from known_durations import KnownDurations, timed_by_bytes
from slipstream.capture import put_compiled
from slipstream.codegen import why_no_compiler
from slipstream.durations import Timing
from slipstream.graph import Call, Graph, StepPhase
from slipstream.provenance import Provenance
from slipstream.surgery.fx import stack_parts
from slipstream.technique import Context, parse
from slipstream.techniques.dropout import kernels as door
from slipstream.techniques.fusion.backend import FusionBackend
from slipstream.techniques.fusion.recorded import recorded_regions, region_of
from slipstream.techniques.fusion.technique import _OVERHEAD_NS, Fusion
from tiny_models import captured


class Untimed(KnownDurations):
    """Durations of a step of which no call was timed."""

    def lookup(self, call: object) -> None:
        """Return None for every call."""


class Kernels(KnownDurations):
    """Every region's kernel takes this share of its operators' time."""

    def __init__(self, graph: Graph, share: float) -> None:
        self._known = {
            region.call.key: share * float(graph.tasks.duration_ns[list(region.tasks)].sum())
            for region in recorded_regions(graph)
        }

    def lookup(self, call: Call) -> Timing | None:
        """Return the duration of a kernel; None for other calls."""
        taken = self._known.get(getattr(call, "key", ""))
        return None if taken is None else Timing(taken, 0.0, Provenance.MICROBENCHMARK)


pytestmark = pytest.mark.skipif(why_no_compiler() is not None, reason=str(why_no_compiler()))


class Layer(nn.Module):
    def __init__(self, dropped: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.norm, self.drop = nn.LayerNorm(64), nn.Dropout(dropped)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax(x @ x.transpose(-1, -2) / 8.0, -1)
        x = self.norm(x + self.drop(scores @ x))
        return x + self.drop(self.down(self.drop(functional.gelu(self.up(x)))))


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def both(
    model: nn.Module, x: torch.Tensor, backend: FusionBackend
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Output and gradients, plain and fused."""
    twin = copy.deepcopy(model)
    found = []
    for call, owner in (
        (model, model),
        (torch.compile(twin, backend=backend, dynamic=False), twin),
    ):
        leaf = x.detach().clone().requires_grad_()
        made = call(leaf)
        drawn = torch.linspace(-1, 1, made.numel(), dtype=made.dtype, device=made.device)
        made.backward(drawn.view_as(made))
        found.append([made, leaf.grad, *(p.grad for p in owner.parameters())])
    return found[0], found[1]


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_outputs_and_gradients_are_those_of_autograd(dtype: torch.dtype, close: float) -> None:
    backend = FusionBackend(tuned=False)
    plain, fused = both(Layer().to(dtype), torch.randn(4, 64, 64, dtype=dtype), backend)
    assert sum(traced.regions for traced in backend.passes) >= 5
    for ours, theirs in zip(fused, plain, strict=True):
        assert (ours - theirs).abs().max() <= close * theirs.abs().max()


MAPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": lambda x: torch.tanh(x * 3) + 1,
    "sigmoid": lambda x: torch.sigmoid(x) * x,
    "silu": lambda x: functional.silu(x) - 0.5,
    "gelu tanh": lambda x: functional.gelu(x, approximate="tanh") * 2,
    "relu": lambda x: torch.relu(x - 0.1) / 3,
    "where": lambda x: torch.where(x > 0, x, x * 0.1) + x,
    "exp": lambda x: torch.exp(-x.abs()) * x,
    "log_softmax": lambda x: functional.log_softmax(x * 2, -1),
    "mean": lambda x: x - x.mean(-1, keepdim=True) * x.amax(-1, keepdim=True),
    "rsqrt": lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6),
    "masked": lambda x: x.masked_fill(x < 0, -1e9).softmax(-1),
}


@pytest.mark.parametrize("name", MAPS)
def test_functions_equal_torchs(name: str) -> None:
    class Mapped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return MAPS[name](x)

    plain, fused = both(Mapped(), torch.randn(8, 20, 50), FusionBackend(tuned=False))
    for ours, theirs in zip(fused, plain, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=3e-6)


def test_what_is_no_number_stays_none_in_a_maximum() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.amax(-1, keepdim=True) + x * 0.5

    x = torch.randn(160, 50)
    x[3, 5], x[4, 6], x[5, :] = math.nan, math.inf, -math.inf
    x.requires_grad_()
    backend = FusionBackend(tuned=False)
    made = torch.compile(Scaled(), backend=backend, dynamic=False)(x)
    assert sum(traced.regions for traced in backend.passes) >= 1
    assert torch.equal(made.nan_to_num(7), Scaled()(x).nan_to_num(7))


def test_what_is_made_in_one_order_and_read_in_another_is_right() -> None:
    class Across(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = torch.relu(x) * 2
            return made + made.transpose(0, 1)

    plain, fused = both(Across(), torch.randn(64, 64), FusionBackend(tuned=False))
    for ours, theirs in zip(fused, plain, strict=True):
        assert torch.equal(ours, theirs)


def test_whole_numbers_as_results_are_torchs() -> None:
    class Whole(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((x * 10).abs() + 1).to(torch.uint8)

    x = torch.randn(64, 128)
    made = torch.compile(Whole(), backend=FusionBackend(tuned=False), dynamic=False)(x)
    assert torch.equal(made, Whole()(x))


def test_a_mask_is_the_operators_own_and_drawn_again_in_the_backward() -> None:
    class Dropped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.dropout(x * 2.0, 0.25) + 0.0

    x = torch.randn(40, 50, 3, requires_grad=True)
    torch.manual_seed(5)
    made = torch.compile(Dropped(), backend=FusionBackend(tuned=False), dynamic=False)(x)
    made.backward(torch.ones_like(made))
    torch.manual_seed(5)
    expected = door.dropout(x.detach() * 2.0, door.draw_seed(), 0.25)
    assert torch.equal(made, expected)
    assert torch.equal(x.grad != 0, expected != 0)


def test_what_is_infinite_and_masked_stays_what_it_is_in_torch() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x * 2, -1)

    x = torch.randn(64, 128)
    x[:, 5] = float("-inf")
    x[3] = float("nan")
    with torch.no_grad():
        ours = torch.compile(Masked(), backend=FusionBackend(tuned=False), dynamic=False)(x)
    assert torch.allclose(ours, torch.softmax(x * 2, -1), atol=1e-6, equal_nan=True)


def test_what_is_not_known_stays_torchs_with_the_right_numbers() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.cumsum(x * 2 + 1, -1)
            z = torch.view_as_real(torch.complex(y, x * x)).sum(-1)
            return torch.special.bessel_j0(z) + torch.tanh(z) * 2

    plain, fused = both(Odd(), torch.randn(80, 64), FusionBackend(tuned=False))
    for ours, theirs in zip(fused, plain, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_model_that_writes_its_buffer_writes_it() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(x) * 2
            self.total.add_(y.detach().mean(0))
            return y + self.total

    model = Counting()
    plain, fused = both(model, torch.randn(80, 64), FusionBackend(tuned=False))
    assert torch.allclose(plain[0], fused[0], atol=1e-5)
    compiled = torch.compile(model, backend=FusionBackend(tuned=False), dynamic=False)
    before = model.total.clone()
    compiled(torch.randn(80, 64))
    assert not torch.equal(before, model.total)


class Rotated(nn.Module):
    """Positions as Llama turns them: [batch, length, heads of 64]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angle = torch.linspace(0, 3, 40)[:, None] * torch.linspace(1, 0.1, 64)
        y = x.view(4, 40, 2, 64).transpose(1, 2)
        a, b = y.chunk(2, -1)
        return y * angle.cos() + torch.cat((-b, a), -1) * angle.sin()


class Gated(nn.Module):
    """A packed gate: its gradient is put together of two that are computed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (x * 2).chunk(2, -1)
        return functional.silu(gate) * up


class Joined(nn.Module):
    """Parts that cannot share loops with what follows: rows are reduced over all of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        joined = torch.cat((torch.tanh(b) * 2, a * 3, a - b), -1)
        return torch.softmax(joined, -1) + torch.cat((a, joined), -1)[..., 64:]


PARTS: list[type[nn.Module]] = [Rotated, Gated, Joined]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("model", PARTS)
def test_parts_of_rows_are_taken_and_put_together_as_by_torch(
    model: type[nn.Module], dtype: torch.dtype
) -> None:
    backend, close = FusionBackend(tuned=False), 1e-12 if dtype is torch.float64 else 1e-5
    plain, fused = both(model(), torch.randn(4, 40, 128, dtype=dtype), backend)
    for ours, theirs in zip(fused, plain, strict=True):
        assert torch.allclose(ours, theirs, rtol=close, atol=close)
    names = [node.name for traced in backend.passes for node in traced.fused.graph.nodes]
    assert any("cat" in name for name in names) is (model is Joined)


def test_a_norm_of_the_root_mean_square_is_one_kernel_forward_and_one_backward() -> None:
    backend = FusionBackend(tuned=False)
    plain, fused = both(nn.RMSNorm(96), torch.randn(4, 32, 96), backend)
    for ours, theirs in zip(fused, plain, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=3e-6)
    assert [traced.regions for traced in backend.passes] == [1, 1]
    nodes = [node for traced in backend.passes for node in traced.fused.graph.nodes]
    called = {node.name.partition("_")[0] for node in nodes if node.op == "call_function"}
    assert called <= {"getitem", "view"}


class Packed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x * 2).transpose(0, 1)
        return torch.tanh(q) * k + v * q


def test_gradients_of_a_packed_projections_parts_are_stacked_as_in_eager_mode() -> None:
    graphs: list[GraphModule] = []
    backend = FusionBackend(tuned=False)
    plain, fused = both(Packed(), torch.randn(20, 3, 256), backend)
    for ours, theirs in zip(fused, plain, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=3e-6)

    def keep(module: GraphModule, inputs: object) -> Any:
        graphs.append(module)
        return make_boxed_func(module.forward)

    x = torch.randn(20, 3, 256, requires_grad=True)
    torch._dynamo.reset()
    traced = torch.compile(Packed(), backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    traced(x).sum().backward()
    expected, x.grad = x.grad, None
    assert stack_parts(graphs[1]) == 1
    names = {str(node.target) for node in graphs[1].graph.nodes}
    assert "aten.stack.default" in names
    assert "aten.select_backward.default" not in names
    traced(x).sum().backward()
    assert torch.equal(x.grad, expected)


def test_parts_that_are_missing_stay_zeros() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, _, v = (x * 2).transpose(0, 1)
            return torch.tanh(q) * v

    plain, fused = both(Two(), torch.randn(20, 3, 256), FusionBackend(tuned=False))
    for ours, theirs in zip(fused, plain, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=3e-6)


def test_another_batch_size_is_compiled_anew() -> None:
    model = Layer()
    compiled = torch.compile(model, backend=FusionBackend(tuned=False), dynamic=False)
    for size in (4, 2, 3):
        x = torch.randn(size, 64, 64)
        assert torch.allclose(compiled(x), model(x), atol=1e-5)


def test_bfloat16_under_autocast_is_as_close_to_float32_as_torchs_own() -> None:
    model, x = Layer(), torch.randn(4, 64, 64)
    compiled = torch.compile(
        copy.deepcopy(model), backend=FusionBackend(tuned=False), dynamic=False
    )
    exact = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours = model(x), compiled(x)
    assert (ours - exact).abs().mean() <= 1.2 * (theirs - exact).abs().mean()


def test_regions_of_a_recorded_step_can_be_generated_from_their_question() -> None:
    from slipstream.verbs.profiling import profile
    from slipstream.workload import Workload

    model = Layer(0.1)
    batch = torch.randn(4, 64, 64), torch.randn(4, 64, 64)
    workload = Workload.of(model, batch, functional.mse_loss, torch.optim.SGD(model.parameters()))
    graph = profile(workload, warmup=1, steps=3, threads=1)
    regions = recorded_regions(graph)
    assert len(regions) >= 5
    assert any(
        "aten::bernoulli_" in [graph.task(t).name for t in region.tasks] for region in regions
    )
    for region in regions:
        again = region_of(region.call).nest
        assert (tuple(again.inputs), tuple(again.outputs)) == (
            region.call.arguments[1],
            region.call.outputs,
        )
    tasks = [task for region in regions for task in region.tasks]
    assert len(tasks) == len(set(tasks))
    # A fusion that the step would reject is not predicted either.
    for share, is_fused in ((0.0, True), (0.97, False)):
        durations = Kernels(graph, share)
        after = Fusion().predict(graph, Context(durations))  # type: ignore[arg-type]
        assert (len(after) < len(graph)) is is_fused
        assert ("too little" in str(after.edits)) is not is_fused
        overheads = [t for t in range(len(after)) if after.task(t).name == "guards and calls"]
        assert len(overheads) == is_fused
        assert all(after.tasks.duration_ns[t] > _OVERHEAD_NS for t in overheads)


def gated() -> Any:
    """Two kernels: a gate and its gradient."""

    class Gate(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(x) * torch.tanh(x) + x

    model = nn.Sequential(nn.Linear(64, 64), Gate(), nn.Linear(64, 4))
    batch = (torch.randn(512, 64), torch.randint(0, 4, (512,)))
    return model, batch, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=1e-2)


def test_every_operator_of_the_traced_passes_costs_a_call() -> None:
    graph = timed_by_bytes(graph_of(gated))
    after = Fusion().predict(graph, Context(Kernels(graph, 0.0)))  # type: ignore[arg-type]
    tasks = map(after.task, range(len(after)))
    (calls,) = [task for task in tasks if task.name == "guards and calls"]
    traced = np.isin(graph.tasks.phase, [StepPhase.FORWARD, StepPhase.BACKWARD])
    operators = int((traced & (graph.tasks.call >= 0)).sum())
    assert operators > 10
    assert calls.duration_ns == 60e3 + 3e3 * operators
    assert "also compiles with inductor, about 1" in after.edits[-1].what


def test_a_step_that_another_technique_has_edited_can_be_looked_at() -> None:
    """Copies that amp puts in tell no operands; nothing is fused across them."""
    (amp,), graph = parse("amp:bf16"), captured("transformer")
    edited = amp.predict(graph, Context(Untimed()))  # type: ignore[arg-type]
    assert {t for region in recorded_regions(edited) for t in region.tasks} < set(
        range(len(edited))
    )


def test_a_step_of_small_operators_says_why_not() -> None:
    (technique,) = parse("fusion")
    assert isinstance(technique, Fusion)
    assert "small" in str(technique.why_not(captured("mlp")))


def test_an_applied_model_keeps_its_names_and_can_be_copied_loaded_and_trained() -> None:
    model = Layer()
    names = list(model.state_dict())
    put_compiled(model, backend=FusionBackend(tuned=False), dynamic=False)
    x, optimizer = torch.randn(4, 64, 64), torch.optim.SGD(model.parameters(), 0.1)
    before = model(x).detach()
    model(x).square().mean().backward()
    optimizer.step()
    assert list(model.state_dict()) == names
    assert not torch.equal(model(x), before)
    plain = Layer()
    plain.load_state_dict(model.state_dict())
    assert torch.allclose(plain(x), model(x), atol=1e-5)
    assert torch.allclose(copy.deepcopy(model)(x), model(x), atol=1e-5)
    checkpointed = checkpoint(model, x, use_reentrant=False)
    assert torch.allclose(checkpointed, model(x), atol=1e-5)
