"""Execution traces: arguments, storages, and damaged files."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from slipstream.capture.trace import AUTOGRAD, PARAMETERS, Node, read_trace, take_parameters
from slipstream.capture.trace import recorded as trace_of_step
from slipstream.errors import GraphError
from slipstream.graph import Call, TensorSpec


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of a few calls with all kinds of arguments."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    x = torch.arange(12.0).reshape(3, 4)
    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(path))
    observer.start()
    with torch.profiler.record_function(PARAMETERS):
        x.detach()
    with torch.profiler.record_function("mine"):
        torch.cat([x, x.t().contiguous().t()], dim=1)
    x.masked_fill(x > 3, float("-inf")).sum(dim=(0,), keepdim=True, dtype=torch.float64)
    torch.nn.functional.gelu(x, approximate="tanh")
    torch.zeros(2, 3, dtype=torch.bfloat16)
    observer.stop()
    observer.unregister_callback()
    return path


def calls(nodes: list[Node], name: str) -> list[Call]:
    return [node.call for node in nodes if node.call is not None and node.name == name]


def test_a_list_of_tensors_with_their_strides(recorded: Path) -> None:
    (cat,) = calls(read_trace(recorded), "aten::cat")
    assert cat.arguments == (
        (TensorSpec("float32", (3, 4), (4, 1)), TensorSpec("float32", (3, 4), (1, 3))), 1,
    )  # fmt: skip
    assert cat.outputs == (TensorSpec("float32", (3, 8), (8, 1)),)


def test_scalars_lists_types_and_infinity(recorded: Path) -> None:
    nodes = read_trace(recorded)
    (fill,) = calls(nodes, "aten::masked_fill")
    assert fill.arguments[2] == float("-inf")
    (total,) = [call for call in calls(nodes, "aten::sum") if call.outputs[0].numel == 4]
    assert total.arguments[1:] == ((0,), True, 7)
    (gelu,) = calls(nodes, "aten::gelu")
    assert gelu.arguments[1] == "tanh"
    assert calls(nodes, "aten::zeros")[0].outputs[0].dtype == "bfloat16"


def test_storages_link_what_made_a_tensor_to_what_used_it(recorded: Path) -> None:
    nodes = read_trace(recorded)
    makes = next(node for node in nodes if node.name == "aten::clone")
    uses = next(node for node in nodes if node.name == "aten::cat")
    assert makes.storages[-1] == uses.storages[1]


def test_parents_enclose_their_children(recorded: Path) -> None:
    nodes = read_trace(recorded)
    for i, node in enumerate(nodes):
        assert -1 <= node.parent < i
    cat = next(node for node in nodes if node.name == "aten::cat")
    assert nodes[cat.parent].name == "mine"


def test_parameters_are_taken_out_of_the_step(recorded: Path) -> None:
    nodes = read_trace(recorded)
    storages, rest = take_parameters(nodes)
    used = next(node for node in nodes if node.name == "aten::cat")
    assert storages == [used.storages[0]]
    assert not any("detach" in node.name or node.name == PARAMETERS for node in rest)
    by_name = {id(node.call): nodes[node.parent].name for node in nodes if node.parent >= 0}
    for node in rest:
        if node.call is not None and node.parent >= 0:
            assert rest[node.parent].name == by_name[id(node.call)]


def test_without_parameters_the_step_is_unchanged(recorded: Path) -> None:
    _, rest = take_parameters(read_trace(recorded))
    assert take_parameters(rest) == ([], rest)


def test_parts_of_a_failed_call_belong_to_its_caller(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    x = torch.ones(2, 2)
    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(path))

    def stop(saved: torch.Tensor) -> torch.Tensor:
        raise InterruptedError

    weight = torch.ones(2, 2, requires_grad=True)
    observer.start()
    with (
        torch.profiler.record_function("outer"),
        contextlib.suppress(InterruptedError),
        torch.autograd.graph.saved_tensors_hooks(stop, stop),
    ):
        x.relu()
        torch.nn.functional.linear(x, weight, torch.ones(2))
    observer.stop()
    observer.unregister_callback()
    nodes = read_trace(path)
    names = [node.name for node in nodes]
    assert "aten::linear" not in names
    transposed = nodes[names.index("aten::t")]
    assert nodes[transposed.parent].name == "outer"


def test_recomputation_that_stops_early_does_not_enclose_the_rest(tmp_path: Path) -> None:
    blocks = [nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)) for _ in range(3)]
    first, second, last = blocks
    parameters = list(nn.ModuleList(blocks).parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    path = tmp_path / "trace.json"
    with trace_of_step(path):
        hidden = checkpoint(first, torch.randn(2, 3), use_reentrant=False)
        last(checkpoint(second, hidden, use_reentrant=False)).sum().backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    nodes = read_trace(path)
    evaluated = [node for node in nodes if node.name.startswith(AUTOGRAD)]
    assert sum("AccumulateGrad" in node.name for node in evaluated) == 12
    (update,) = (node for node in nodes if node.name.startswith("Optimizer.step"))
    assert {node.parent for node in (*evaluated, update)} == {-1}
    (norm,) = (node for node in nodes if node.name == "aten::_foreach_norm")
    assert norm.parent == -1
    # Before that, forward passes are repeated inside the engine's nodes.
    assert sum(node.name == "aten::linear" for node in nodes) >= 6 + 2


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="not written"):
        read_trace(tmp_path / "none.json")


@given(share=st.floats(0, 1, exclude_max=True))
@settings(deadline=None, max_examples=30)
def test_a_truncated_file_is_an_error(
    recorded: Path, share: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = recorded.read_bytes().rstrip()
    cut = tmp_path_factory.mktemp("cut") / "trace.json"
    cut.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(GraphError, match=r"\bcomplete execution trace\b"):
        read_trace(cut)


json_values = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(data=st.data())
@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])
def test_a_foreign_value_anywhere_is_an_error_or_a_trace(
    recorded: Path, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content: Any = json.loads(recorded.read_bytes())
    node = data.draw(st.sampled_from(content["nodes"]))
    key = data.draw(st.sampled_from(sorted(node)))
    if isinstance(node[key], dict):
        node = node[key]
        key = data.draw(st.sampled_from(sorted(node)))
    node[key] = data.draw(json_values)
    path = tmp_path_factory.mktemp("foreign") / "trace.json"
    path.write_text(json.dumps(content))
    # Anything but a `GraphError` fails the test.
    with contextlib.suppress(GraphError):
        read_trace(path)
