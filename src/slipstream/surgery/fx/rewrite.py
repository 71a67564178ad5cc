"""Replace groups of operations in a traced graph by modules."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from slipstream.surgery.fx.trace import TracedGraph


class CyclicReplacementError(Exception):
    """Replacements that need each other's results."""


@dataclass(frozen=True)
class Replacement:
    """A module that computes what a group of operations computes.

    Attributes:
        module: takes the tensors of `reads`, and returns a tuple of those of `makes`.
        members: indices of the operations in `TracedGraph.operations`.
        reads: nodes of the traced graph.
        makes: values of the traced graph.
    """

    module: nn.Module
    members: tuple[int, ...]
    reads: tuple[Node, ...]
    makes: tuple[int, ...]


def replace_regions(
    module: GraphModule, traced: TracedGraph, replacements: Sequence[Replacement]
) -> GraphModule:
    """Return `module` with replacement k called as submodule ``region_k``.

    Operators that write to their inputs stay in order with everything before and after them.

    Args:
        traced: the operations of `module`.

    Raises:
        CyclicReplacementError: no order of nodes and replacements exists.
    """
    nodes = list(module.graph.nodes)
    place = {node: n for n, node in enumerate(nodes)}
    group_of = {
        traced.nodes[n]: k for k, replaced in enumerate(replacements) for n in replaced.members
    }
    # A unit is a node or a replacement, which is ranked by its last operation.
    unit = {
        node: len(nodes) + group_of[node] if node in group_of else n for node, n in place.items()
    }
    rank = {unit[node]: place[node] for node in nodes}
    needs: dict[int, set[int]] = {number: set() for number in rank}
    barrier = -1
    for node in nodes:
        # A replacement may read views of its own results inside.
        number = group_of.get(node)
        sources = node.all_input_nodes if number is None else replacements[number].reads
        needs[unit[node]] |= {unit[source] for source in sources} - {unit[node]}
        if barrier >= 0 and barrier != unit[node]:
            needs[unit[node]].add(barrier)
        schema = getattr(node.target, "_schema", None)
        if node.op == "output" or (schema is not None and schema.is_mutable):
            needs[unit[node]] |= {unit[before] for before in nodes[: place[node]]} - {unit[node]}
            barrier = unit[node]
    order = _ordered(needs, rank)
    graph = Graph()
    copies: dict[Node, Node] = {}
    makers = {v: output for replaced in replacements for output, v in enumerate(replaced.makes)}
    for number in order:
        if number < len(nodes):
            node = nodes[number]
            # A view of a value that stays inside a replacement is not needed.
            if all(source in copies for source in node.all_input_nodes):
                copies[node] = graph.node_copy(node, lambda source: copies[source])
            continue
        k = number - len(nodes)
        reads = tuple(copies[source] for source in replacements[k].reads)
        called = graph.call_module(f"region_{k}", reads)
        for n in replacements[k].members:
            for result, value in _results(traced, n):
                if value in makers:
                    copies[result] = graph.call_function(operator.getitem, (called, makers[value]))
    attributes: dict[str, Any] = {f"region_{k}": r.module for k, r in enumerate(replacements)}
    for node in nodes:
        if node.op == "get_attr":
            attributes[str(node.target)] = getattr(module, str(node.target))
    rebuilt = GraphModule(attributes, graph)
    rebuilt.graph.eliminate_dead_code()
    rebuilt.recompile()
    return rebuilt


def _results(traced: TracedGraph, n: int) -> list[tuple[Node, int]]:
    """Return the nodes of an operation's results with their values."""
    node = traced.nodes[n]
    if not isinstance(node.meta.get("val"), (list, tuple)):
        return [(node, value) for value in traced.outputs[n][:1]]
    return [(user, traced.value[user]) for user in node.users if user in traced.value]


def _ordered(needs: Mapping[int, set[int]], rank: Mapping[int, int]) -> list[int]:
    """Sort units topologically, by `rank` where the order is free."""
    waiting = {number: len(before) for number, before in needs.items()}
    after: dict[int, list[int]] = {number: [] for number in needs}
    for number, before in needs.items():
        for earlier in before:
            after[earlier].append(number)
    ready = [(rank[number], number) for number, count in waiting.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, number = heapq.heappop(ready)
        order.append(number)
        for following in after[number]:
            waiting[following] -= 1
            if not waiting[following]:
                heapq.heappush(ready, (rank[following], following))
    if len(order) < len(needs):
        raise CyclicReplacementError("replacements need each other's results")
    return order


def stack_parts(module: GraphModule) -> int:
    """Stack the gradients of a tensor's parts instead of adding them padded with zeros.

    A model splits a packed projection by selecting its parts. In a traced graph the gradient of
    each part is a tensor of the full size, zero elsewhere, and these are added.

    Returns:
        The number of sums that were replaced.
    """
    aten = torch.ops.aten
    stacks = 0
    for node in list(module.graph.nodes):
        inner = [user.target is aten.add.Tensor for user in node.users]
        if node.target is not aten.add.Tensor or (len(inner) == 1 and inner[0]):
            continue
        parts = _summands(node)
        kinds = {(tuple(part.args[1]), part.args[2]) for part in parts}
        if len(kinds) != 1 or any(len(part.users) != 1 for part in parts):
            continue
        sizes, dim = kinds.pop()
        by_index = {part.args[3] % sizes[dim]: part.args[0] for part in parts}
        if len(parts) != sizes[dim] or len(by_index) != sizes[dim]:
            continue
        with module.graph.inserting_before(node):
            ordered = [by_index[n] for n in range(sizes[dim])]
            stacked = module.graph.call_function(aten.stack.default, (ordered, dim))
        stacked.meta = dict(node.meta)
        node.replace_all_uses_with(stacked)
        stacks += 1
    if stacks:
        module.graph.eliminate_dead_code()
        module.recompile()
    return stacks


def _summands(node: Node) -> list[Any]:
    """Return the nodes of the gradients of parts that `node` adds up; empty for other nodes."""
    if node.target is torch.ops.aten.select_backward.default:
        return [node]
    plain = node.target is torch.ops.aten.add.Tensor and not node.kwargs
    operands = [operand for operand in node.args if isinstance(operand, Node)]
    if not plain or len(operands) != 2:
        return []
    below = [_summands(operand) for operand in operands]
    return [*below[0], *below[1]] if all(below) else []
