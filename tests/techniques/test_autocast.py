"""The plan of autocast: its lists against the dispatcher, its casts against real autocast."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from slipstream.capture.modules import ModuleNames
from slipstream.capture.trace import Node, read_trace
from slipstream.capture.units import find_units
from slipstream.graph import Call, Graph, StepPhase
from slipstream.techniques._autocast_operators import FLOAT32, LOWER, WIDEST, category
from slipstream.techniques.autocast import plan
from slipstream.techniques.precision import Amp
from slipstream.workload import Workload
from tiny_models import captured, record, workload

KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
# CUDA's autocast raises an error for it instead of casting.
REFUSED = {"cpu": set(), "cuda": {"binary_cross_entropy"}}
# Kernels of CUDA's autocast that builds of torch without CUDA lack.
NOT_BUILT = set() if torch.version.cuda else {"_cudnn_rnn"}


def listed(device: str) -> set[str]:
    return set(LOWER[device] | FLOAT32[device] | WIDEST[device])


@pytest.mark.parametrize("device", KEYS)
def test_the_lists_equal_the_dispatchers(device: str) -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    registered = {
        name.removeprefix("aten::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and has_kernel(name, KEYS[device])
    }
    assert listed(device) - NOT_BUILT == registered - REFUSED[device]


@pytest.mark.parametrize("device", KEYS)
def test_no_operator_is_in_two_lists(device: str) -> None:
    assert len(listed(device)) == sum(len(lists[device]) for lists in (LOWER, FLOAT32, WIDEST))


def low(*shape: int) -> torch.Tensor:
    return torch.rand(shape).bfloat16()


def full(*shape: int) -> torch.Tensor:
    return torch.rand(shape)


LABELS = torch.tensor([0, 1])
SAMPLE: dict[str, Callable[..., torch.Tensor]] = {
    "lower: linear": lambda x: functional.linear(x(2, 4), x(3, 4), x(3)),
    "lower: matmul": lambda x: x(2, 4) @ x(4, 3),
    "lower: mm": lambda x: torch.mm(x(2, 4), x(4, 3)),
    "lower: addmm": lambda x: torch.addmm(x(3), x(2, 4), x(4, 3)),
    "lower: bmm": lambda x: torch.bmm(x(2, 3, 4), x(2, 4, 3)),
    "lower: baddbmm": lambda x: torch.baddbmm(x(2, 3, 3), x(2, 3, 4), x(2, 4, 3)),
    "lower: addbmm": lambda x: torch.addbmm(x(3, 3), x(2, 3, 4), x(2, 4, 3)),
    "lower: conv1d": lambda x: functional.conv1d(x(1, 2, 8), x(3, 2, 3)),
    "lower: conv2d": lambda x: functional.conv2d(x(1, 2, 8, 8), x(3, 2, 3, 3)),
    "lower: conv3d": lambda x: functional.conv3d(x(1, 2, 4, 4, 4), x(3, 2, 3, 3, 3)),
    "lower: conv_transpose2d": lambda x: functional.conv_transpose2d(x(1, 2, 8, 8), x(2, 3, 3, 3)),
    "lower: prelu": lambda x: functional.prelu(x(2, 3), x(3)),
    "lower: scaled_dot_product_attention": lambda x: functional.scaled_dot_product_attention(
        x(1, 2, 4, 8), x(1, 2, 4, 8), x(1, 2, 4, 8)
    ),
    "lower: linalg_vecdot": lambda x: torch.linalg.vecdot(x(2, 4), x(2, 4)),
    "float32: mse_loss": lambda x: functional.mse_loss(x(2, 4), x(2, 4)),
    "float32: l1_loss": lambda x: functional.l1_loss(x(2, 4), x(2, 4)),
    "float32: smooth_l1_loss": lambda x: functional.smooth_l1_loss(x(2, 4), x(2, 4)),
    "float32: huber_loss": lambda x: functional.huber_loss(x(2, 4), x(2, 4)),
    "float32: nll_loss": lambda x: functional.nll_loss(x(2, 4), LABELS),
    "float32: cross_entropy_loss": lambda x: functional.cross_entropy(x(2, 4), LABELS),
    "float32: binary_cross_entropy": lambda x: functional.binary_cross_entropy(x(4), x(4)),
    "float32: poisson_nll_loss": lambda x: functional.poisson_nll_loss(x(4), x(4)),
    "float32: kl_div": lambda x: functional.kl_div(x(2, 4), x(2, 4), reduction="sum"),
    "float32: avg_pool3d": lambda x: functional.avg_pool3d(x(1, 1, 4, 4, 4), 2),
    "float32: grid_sampler_2d": lambda x: functional.grid_sample(
        x(1, 1, 4, 4), x(1, 2, 2, 2), align_corners=False
    ),
    "float32: prod": lambda x: x(2, 4).prod(),
    "float32: trace": lambda x: x(4, 4).trace(),
    "float32: cdist": lambda x: torch.cdist(x(2, 4), x(3, 4)),
    "float32: quantile": lambda x: torch.quantile(x(4), 0.5),
    "float32: linalg_inv": lambda x: torch.linalg.inv(x(3, 3) + 3 * torch.eye(3)),
    "float32: fft_rfft": lambda x: torch.fft.rfft(x(8)).real,
    "float32: reflection_pad1d": lambda x: functional.pad(x(1, 1, 8), (2, 2), mode="reflect"),
    "follows: relu": lambda x: x(2, 4).relu(),
    "follows: gelu": lambda x: functional.gelu(x(2, 4)),
    "follows: softmax": lambda x: x(2, 4).softmax(-1),
    "follows: layer_norm": lambda x: functional.layer_norm(x(2, 4), (4,), full(4), full(4)),
    "follows: batch_norm": lambda x: functional.batch_norm(
        x(2, 4, 3, 3), full(4), full(4), full(4), full(4), training=True
    ),
    "follows: group_norm": lambda x: functional.group_norm(x(2, 4, 3), 2, full(4), full(4)),
    "follows: max_pool2d": lambda x: functional.max_pool2d(x(1, 2, 4, 4), 2),
    "follows: mean": lambda x: x(2, 4).mean(),
    "follows: add": lambda x: x(2, 4) + 1.5,
}


@pytest.mark.parametrize("name", SAMPLE)
def test_categories_of_operators_match_real_autocast(name: str) -> None:
    kind, _, operator = name.partition(": ")
    assert category([f"aten::{operator}"], "cpu") == (None if kind == "follows" else kind)
    with torch.autocast("cpu", torch.bfloat16):
        of_full, of_low = SAMPLE[name](full), SAMPLE[name](low)
    expected = {
        "lower": (torch.bfloat16, torch.bfloat16),
        "float32": (torch.float32, torch.float32),
        "follows": (torch.float32, torch.bfloat16),
    }
    assert (of_full.dtype, of_low.dtype) == expected[kind]


@pytest.mark.parametrize("operator", ["cat", "stack"])
def test_the_widest_of_mixed_inputs_wins(operator: str) -> None:
    assert category([f"aten::{operator}"], "cpu") == "widest"
    join = getattr(torch, operator)
    with torch.autocast("cpu", torch.bfloat16):
        assert join([low(2), full(2)]).dtype == torch.float32
        assert join([low(2), low(2)]).dtype == torch.bfloat16


def test_the_outermost_operator_decides() -> None:
    assert category(["aten::linear", "aten::cross_entropy_loss"], "cpu") == "lower"
    assert category(["aten::cross_entropy_loss", "aten::mm"], "cpu") == "float32"
    assert category(["autograd::engine", "aten::relu"], "cpu") is None


def test_attention_without_a_fused_kernel_computes_in_float32() -> None:
    inside = ["aten::scaled_dot_product_attention", "aten::_scaled_dot_product_attention_math"]
    assert category(inside, "cpu") == "float32"
    query = low(1, 2, 4, 8)
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.profiler.profile(record_shapes=True) as profiler,
    ):
        functional.scaled_dot_product_attention(query, query, query, dropout_p=0.1)
    softmax = [event for event in profiler.events() if "softmax" in event.name]
    copies = [event for event in profiler.events() if event.name == "aten::_to_copy"]
    assert softmax
    assert len(copies) >= 3


# Calls of a plan whose dtypes must be right: they take most of the time.
COMPUTE = (
    "aten::mm", "aten::addmm", "aten::bmm", "aten::convolution", "aten::convolution_backward",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "aten::native_layer_norm", "aten::native_layer_norm_backward", "aten::native_batch_norm",
    "aten::native_batch_norm_backward", "aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward",
    "aten::gelu", "aten::gelu_backward", "aten::silu", "aten::silu_backward", "aten::relu",
    "aten::relu_", "aten::threshold_backward", "aten::_softmax", "aten::_softmax_backward_data",
    "aten::_log_softmax", "aten::embedding_dense_backward", "aten::mean", "aten::clone",
    "aten::sum", "aten::stack", "aten::cat",
)  # fmt: skip
FLOATS = ("float32", "bfloat16")


def is_cast(call: Call) -> bool:
    """Whether a call casts between floating-point precisions."""
    if call.name != "aten::_to_copy":
        return False
    pair = (call.inputs[0].dtype, call.outputs[0].dtype)
    return pair in (FLOATS, FLOATS[::-1])


def recorded(recipe: Workload) -> list[Node]:
    """Return the execution trace of one step under the real technique."""
    built = recipe.with_technique(Amp()).build()
    built.step()
    with tempfile.TemporaryDirectory() as folder, ModuleNames(built.model):
        path = Path(folder) / "trace.json"
        observer = torch.profiler.ExecutionTraceObserver().register_callback(str(path))
        observer.start()
        built.step()
        observer.stop()
        observer.unregister_callback()
        return read_trace(path)


def truth(recipe: Workload) -> tuple[list[Call], list[Call]]:
    """Return (calls of units, casts) under real autocast.

    Autocast catches an operator, casts, and calls the same operator again inside of the first:
    the inner one counts, with the casts next to it.
    """
    nodes = recorded(recipe)
    units = set(find_units(nodes).nodes.tolist())
    unit_of: list[int] = []
    caught: set[int] = set()
    inner: dict[int, Call] = {}
    for i, node in enumerate(nodes):
        unit_of.append(i if i in units else unit_of[node.parent] if node.parent >= 0 else -1)
        unit = unit_of[i]
        if node.call is not None and unit >= 0 and node.name == nodes[unit].name:
            inner[unit] = node.call
            if i != unit:
                caught.add(unit)
    casts = [
        node.call
        for i, node in enumerate(nodes)
        if node.call is not None and is_cast(node.call) and (i in units or unit_of[i] in caught)
    ]
    return [call for call in inner.values() if not is_cast(call)], casts


def planned(graph: Graph) -> tuple[list[Call], list[Call]]:
    found = plan(graph, "bfloat16")
    tasks = [t for t in range(len(graph)) if graph.tasks.call[t] >= 0]
    calls = [found.changed.get(t, graph.calls[graph.tasks.call[t]]) for t in tasks]
    return calls, [cast.call for cast in found.casts]


def compute(calls: list[Call]) -> Counter[Any]:
    return Counter(
        (call.name, tuple(spec.dtype for spec in call.inputs))
        for call in calls
        if call.name in COMPUTE
    )


def directions(casts: list[Call]) -> Counter[Any]:
    """Return a cast's direction and size; autocast may cast before or after a view."""
    return Counter((c.inputs[0].dtype, c.outputs[0].dtype, c.inputs[0].numel) for c in casts)


@pytest.mark.parametrize(
    "name",
    [
        "mlp", "transformer", "transformer, separate projections", "transformer, norm after",
        "conv", "embedding", "lstm", "dropout", "mlp inference", "conv inference",
        "transformer inference",
    ],
)  # fmt: skip
def test_the_plan_equals_real_autocast(name: str, bf16_lstm: Callable[[str], None]) -> None:
    bf16_lstm(name)
    real_calls, real_casts = truth(workload(name))
    calls, casts = planned(captured(name))
    assert compute(calls) == compute(real_calls)
    assert directions(casts) == directions(real_casts)


class HalfTable(nn.Module):
    """A table stored in the lower precision and computed with in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 16).bfloat16())
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.table.relu().float()
        out: torch.Tensor = self.second(self.first(x) + rows.relu())
        return out


def trained(model: nn.Module) -> Workload:
    batch = torch.randn(8, 8), torch.randint(0, 4, (8,))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Workload.of(model, batch, functional.cross_entropy, optimizer)


def test_explicit_casts_of_the_model_to_float32_stay() -> None:
    real_calls, real_casts = truth(trained(HalfTable()))
    calls, casts = planned(record(trained(HalfTable()).build()))
    assert compute(calls) == compute(real_calls)
    own = [call for call in calls if is_cast(call)]
    assert directions([*casts, *own]) == directions(real_casts)


class Again(nn.Module):
    """One layer, used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.layer(self.layer(self.layer(x).relu()).relu()))
        return out


def test_a_reused_layer_is_not_cast_again() -> None:
    real_calls, real_casts = truth(trained(Again()))
    calls, casts = planned(record(trained(Again()).build()))
    assert compute(calls) == compute(real_calls)
    to_lower, really = (
        directions([call for call in some if call.inputs[0].dtype == "float32"])
        for some in (casts, real_casts)
    )
    assert to_lower == really


def test_every_gradient_reaches_the_optimizer_in_float32() -> None:
    for name in ("mlp", "transformer", "conv", "lstm", "dropout"):
        graph = captured(name)
        found = plan(graph, "bfloat16")
        update = {t for t, phase in enumerate(graph.tasks.phase) if phase == StepPhase.OPTIMIZER}
        assert not update.intersection(found.changed)
        assert not update.intersection(cast.task for cast in found.casts)


def test_a_parameter_is_cast_once_even_if_used_repeatedly() -> None:
    graph = captured("dropout")
    found = plan(graph, "bfloat16")
    shapes = Counter(
        cast.call.inputs[0].shape
        for cast in found.casts
        if cast.before and graph.tasks.phase[cast.task] == StepPhase.FORWARD
    )
    # Two square weights, two biases of their width, the shared table once.
    assert (shapes[(24, 24)], shapes[(24,)], shapes[(24, 53)] + shapes[(53, 24)]) == (2, 2, 1)


def test_planning_does_not_change_the_graph() -> None:
    graph = captured("mlp")
    before = [call.key for call in graph.calls]
    plan(graph, "bfloat16")
    assert [call.key for call in graph.calls] == before


def test_a_changed_call_differs_in_dtypes_only() -> None:
    graph = captured("transformer")
    for t, call in plan(graph, "bfloat16").changed.items():
        old = graph.calls[graph.tasks.call[t]]
        assert call.op == old.op
        assert [spec.shape for spec in call.inputs] == [spec.shape for spec in old.inputs]
        assert any(spec.dtype == "bfloat16" for spec in call.inputs)
