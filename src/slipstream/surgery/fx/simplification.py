"""Reduce the Python overhead of a traced graph.

A traced linear layer is a view, a transposition, a matmul and another view, where eager mode makes
a single call. Calling an operator overload takes two to three times as long as torch's function
for it, since its arguments are matched to a schema. Both cost up to 1 % of a step of 50 ms.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

_aten = torch.ops.aten
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    _aten.add.Tensor: torch.add,
    _aten.addmm.default: torch.addmm,
    _aten.bmm.default: torch.bmm,
    _aten.cat.default: torch.cat,
    _aten.clone.default: torch.clone,
    _aten.div.Tensor: torch.div,
    _aten.expand.default: torch.Tensor.expand,
    _aten.mm.default: torch.mm,
    _aten.mul.Tensor: torch.mul,
    _aten.neg.default: torch.neg,
    _aten.permute.default: torch.permute,
    _aten.pow.Tensor_Scalar: torch.pow,
    _aten.rsqrt.default: torch.rsqrt,
    _aten.select.int: torch.select,
    _aten.stack.default: torch.stack,
    _aten.sub.Tensor: torch.sub,
    _aten.sum.dim_IntList: torch.sum,
    _aten.t.default: torch.t,
    _aten.transpose.int: torch.transpose,
    _aten.view.default: torch.Tensor.view,
    _aten._unsafe_view.default: torch.Tensor.view,
}
"""Functions with the arguments and results of an operator."""
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)
_REMOVABLE = (*_VIEWS, _aten.t.default, _aten.detach.default)


def simplify(module: GraphModule) -> GraphModule:
    """Return an equivalent copy of a traced graph with fewer and cheaper calls.

    Returned tensors are still made by the same operators: autograd tracks which of them are views,
    and rejects in-place writes to some.
    """
    simplified = GraphModule(module, copy.deepcopy(module.graph))
    for node in simplified.graph.nodes:
        if (source := _same(node)) is not None:
            node.replace_all_uses_with(source)
        elif node.target in _VIEWS and _target(node.args[0]) in _VIEWS:
            node.args = (node.args[0].args[0], *node.args[1:])
    for node in reversed(simplified.graph.nodes):
        if node.target in _REMOVABLE and not node.users:
            simplified.graph.erase_node(node)
    for node in simplified.graph.nodes:
        if not _returned(node):
            node.target = _FUNCTIONS.get(node.target, node.target)
    simplified.recompile()
    return simplified


def _same(node: Node) -> Node | None:
    """Return the node whose tensor `node` returns unchanged, if any."""
    if _returned(node):
        return None
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    if node.target is _aten.detach.default:
        return source
    if node.target is _aten.t.default and _target(source) is _aten.t.default:
        twice = source.args[0]
        return twice if isinstance(twice, Node) else None
    if node.target in _VIEWS and _shape(source) == _shape(node) is not None:
        return source
    return None


def _returned(node: Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _shape(node: Node) -> torch.Size | None:
    value = node.meta.get("val")
    return value.shape if isinstance(value, torch.Tensor) else None


def _target(value: Any) -> Any:
    return value.target if isinstance(value, Node) else None
