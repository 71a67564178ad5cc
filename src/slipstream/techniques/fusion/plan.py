"""The regions of a traced graph that become kernels.

Operators stay as they are unless replacing them is known to be safe: unknown operators, draws from
the generator, in-place writes, lone copies, and everything if no compiler works.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.fx import GraphModule

from slipstream.surgery.fx import Replacement, TracedGraph, trace_of
from slipstream.techniques.fusion.lowering import Region, RegionOp
from slipstream.techniques.fusion.regions import Found, find


@dataclass(frozen=True)
class FusionPlan:
    """The regions of a traced graph."""

    traced: TracedGraph
    found: Found

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions that can be lowered to loops."""
        return self.found.regions

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """Per region, the indices of its operations."""
        return self.found.members

    def only(self, chosen: Sequence[bool]) -> FusionPlan:
        """Return the plan of the `chosen` regions, bool [regions]."""
        pairs = zip(self.regions, self.members, chosen, strict=True)
        retained = [(region, members) for region, members, is_chosen in pairs if is_chosen]
        regions, members = tuple(r for r, _ in retained), tuple(m for _, m in retained)
        return FusionPlan(self.traced, Found(regions, members, self.found.rejected))

    def replacements(self, kernels: Sequence[nn.Module]) -> list[Replacement]:
        """Return a replacement for each region by its kernel."""
        return [
            Replacement(kernel, members, region.reads, region.makes)
            for kernel, members, region in zip(kernels, self.members, self.regions, strict=True)
        ]


def plan(module: GraphModule) -> FusionPlan:
    """Find the regions of `module` that can be lowered to loops."""
    traced = trace_of(module)
    steps = [
        RegionOp(operation.call, traced.inputs[n], traced.outputs[n], traced.sources[n])
        for n, operation in enumerate(traced.operations)
    ]
    # Nodes that are not torch operators need their inputs in memory.
    operators, leaving = set(traced.nodes), set(traced.leaving)
    for node, value in traced.value.items():
        for user in node.users:
            plain = user.op == "call_function" and user not in operators
            if plain and traced.value.get(user) != value:
                leaving.add(value)
    return FusionPlan(traced, find(traced.operations, steps, leaving))
