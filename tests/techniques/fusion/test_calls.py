"""Fewer and cheaper calls: the same tensors, and what is returned stays what it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, symbolic_trace

from slipstream.surgery.fx import simplify
from slipstream.techniques.fusion.backend import FusionBackend

aten = torch.ops.aten


def _traced(*targets: tuple[Any, ...]) -> GraphModule:
    """A chain of operators, each of the one before it, with the tensors it makes."""
    graph = Graph()
    node = graph.placeholder("x")
    node.meta["val"] = value = torch.arange(24.0).view(4, 6)
    for target, *rest in targets:
        node = graph.call_function(target, (node, *rest))
        node.meta["val"] = value = target(value, *rest)
    graph.output((node,))
    return GraphModule({}, graph)


CHAINS = {
    "views of views": (((aten.view.default, [24]), (aten.view.default, [2, 12])), 1),
    "what is turned twice": (
        ((aten.neg.default,), (aten.t.default,), (aten.t.default,), (aten.mul.Tensor, 2.0)),
        2,
    ),
    "the same shape": (((aten._unsafe_view.default, [4, 6]), (aten.neg.default,)), 1),
    "a detached tensor": (((aten.neg.default,), (aten.detach.default,), (aten.neg.default,)), 2),
    "a returned tensor is unchanged": (((aten.neg.default,), (aten.detach.default,)), 2),
    "a sum over rows": (((aten.sum.dim_IntList, [0], True), (aten.expand.default, [4, 6])), 2),
}


@pytest.mark.parametrize("chain", list(CHAINS))
def test_fewer_calls_return_the_same(chain: str) -> None:
    steps, left = CHAINS[chain]
    module = _traced(*steps)
    leaner = simplify(module)
    x = torch.randn(4, 6)
    (ours,), (theirs,) = leaner(x), module(x)
    assert torch.equal(ours, theirs)
    assert ours.stride() == theirs.stride()
    assert sum(node.op == "call_function" for node in leaner.graph.nodes) == left
    assert len(module.graph.nodes) == len(steps) + 2, "the traced graph was changed"


def _noted() -> None:
    _seen.append(1)


_seen: list[int] = []


def test_what_nobody_reads_is_called() -> None:
    module = symbolic_trace(lambda x: x + 1)
    first = next(node for node in module.graph.nodes if node.op == "call_function")
    with module.graph.inserting_before(first):
        module.graph.call_function(_noted)
    simplify(module)(torch.ones(2))
    assert _seen == [1]


def test_what_is_returned_can_be_written_to() -> None:
    """A view that was made within a pass could not."""
    model = nn.Linear(8, 8, bias=False)
    call = torch.compile(model, backend=FusionBackend(tuned=False), dynamic=False)
    x = torch.randn(2, 3, 8, requires_grad=True)
    y = call(x)
    y += 1
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, model.weight.detach().sum(0).expand(2, 3, 8))
