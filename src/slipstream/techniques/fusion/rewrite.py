"""A traced graph with its regions as kernels in place.

Whatever cannot be told to be safe stays as torch has it: operators that are not known, that draw
from the generator, that write in place; regions of a single copy; everything where no compiler
works.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node

from slipstream.techniques.fusion.kernels import Kernel
from slipstream.techniques.fusion.loops import UnsupportedError
from slipstream.techniques.fusion.lowering import Region, RegionOp
from slipstream.techniques.fusion.regions import Found, find
from slipstream.techniques.fusion.traced import Traced, trace_of


@dataclass(frozen=True)
class FusionPlan:
    """The regions of a traced graph."""

    traced: Traced
    found: Found

    @property
    def regions(self) -> tuple[Region, ...]:
        """Those with loops."""
        return self.found.regions

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """For each, the numbers of its operations."""
        return self.found.members

    def only(self, chosen: Sequence[bool]) -> FusionPlan:
        """Those of the regions that are `chosen`."""
        pairs = zip(self.regions, self.members, chosen, strict=True)
        kept = [(region, members) for region, members, wanted in pairs if wanted]
        regions, members = tuple(r for r, _ in kept), tuple(m for _, m in kept)
        return FusionPlan(self.traced, Found(regions, members, self.found.left))


def plan(module: GraphModule) -> FusionPlan:
    """The regions of `module` that have loops."""
    traced = trace_of(module)
    steps = [
        RegionOp(one.call, traced.inputs[n], traced.outputs[n], traced.sources[n])
        for n, one in enumerate(traced.operations)
    ]
    # What is no operator of torch's needs what it reads in memory, whatever it is.
    known, leaving = set(traced.nodes), set(traced.leaving)
    for node, value in traced.value.items():
        for user in node.users:
            plain = user.op == "call_function" and user not in known
            if plain and traced.value.get(user) != value:
                leaving.add(value)
    return FusionPlan(traced, find(traced.operations, steps, leaving))


def rewritten(module: GraphModule, found: FusionPlan, kernels: Sequence[Kernel]) -> GraphModule:
    """`module` with a kernel in the place of each region, where it has all that it reads.

    Raises:
        UnsupportedError: there is none.
    """
    nodes = list(module.graph.nodes)
    place = {node: n for n, node in enumerate(nodes)}
    traced = found.traced
    group_of = {
        traced.nodes[n]: number for number, members in enumerate(found.members) for n in members
    }
    # A unit is a node, or a region under the number of its last operation.
    unit = {
        node: len(nodes) + group_of[node] if node in group_of else n for node, n in place.items()
    }
    rank = {unit[node]: place[node] for node in nodes}
    needs: dict[int, set[int]] = {number: set() for number in rank}
    barrier = -1
    for node in nodes:
        # Of what a region reads, views of what it makes itself are no part.
        number = group_of.get(node)
        sources = node.all_input_nodes if number is None else found.regions[number].reads
        needs[unit[node]] |= {unit[one] for one in sources} - {unit[node]}
        if barrier >= 0 and barrier != unit[node]:
            needs[unit[node]].add(barrier)
        schema = getattr(node.target, "_schema", None)
        if node.op == "output" or (schema is not None and schema.is_mutable):
            needs[unit[node]] |= {unit[one] for one in nodes[: place[node]]} - {unit[node]}
            barrier = unit[node]
    order = _ordered(needs, rank)
    graph = Graph()
    copies: dict[Node, Node] = {}
    makers = {v: (number, k) for number, r in enumerate(found.regions)
              for k, v in enumerate(r.makes)}  # fmt: skip
    for number in order:
        if number < len(nodes):
            node = nodes[number]
            if (
                node.op == "call_function"
                and all(one not in copies for one in node.all_input_nodes)
                and node.all_input_nodes
            ):
                continue  # a view of what never leaves a region
            if any(one not in copies for one in node.all_input_nodes):
                continue
            copies[node] = graph.node_copy(node, lambda one: copies[one])
            continue
        region = found.regions[number - len(nodes)]
        called = graph.call_module(
            f"region_{number - len(nodes)}", tuple(copies[one] for one in region.reads)
        )
        for n in found.members[number - len(nodes)]:
            node = traced.nodes[n]
            parts = traced.outputs[n]
            several = isinstance(node.meta.get("val"), (list, tuple))
            if not several:
                if parts and parts[0] in makers:
                    copies[node] = _part(graph, called, makers[parts[0]][1])
                continue
            for user in node.users:
                value = traced.value.get(user)
                if value in makers:
                    copies[user] = _part(graph, called, makers[value][1])
    attributes: dict[str, Any] = {f"region_{n}": kernel for n, kernel in enumerate(kernels)}
    for node in nodes:
        if node.op == "get_attr":
            attributes[str(node.target)] = getattr(module, str(node.target))
    rebuilt = GraphModule(attributes, graph)
    rebuilt.graph.eliminate_dead_code()
    rebuilt.recompile()
    return rebuilt


def _part(graph: Graph, called: Node, place: int) -> Node:
    import operator

    return graph.call_function(operator.getitem, (called, place))


def _ordered(needs: dict[int, set[int]], rank: dict[int, int]) -> list[int]:
    """Units in an order in which each comes after what it needs, as near to `rank` as can be.

    Raises:
        UnsupportedError: there is none.
    """
    waiting = {number: len(before) for number, before in needs.items()}
    after: dict[int, list[int]] = {number: [] for number in needs}
    for number, before in needs.items():
        for one in before:
            after[one].append(number)
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
        raise UnsupportedError("regions that wait for each other")
    return order
