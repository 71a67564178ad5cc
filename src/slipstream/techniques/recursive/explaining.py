"""Levels, launches, barriers and bytes of a request, and the gain of each optimisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.measure import time_function
from slipstream.techniques.recursive.structures import Int64s

if TYPE_CHECKING:
    from slipstream.techniques.recursive.net import RecursiveNet

_REPEATS = 9


@dataclass(frozen=True)
class Explanation:
    """A request of a compiled recursive model.

    Attributes:
        nodes: number of nodes.
        widths: int64 [levels], number of nodes of each level, leaves first.
        launches: number of calls of the kernel.
        barriers: number of times that all workers meet.
        weight_bytes: weights that groups of equal nodes read, once per group, in bytes.
        table_bytes: size of the tables by word, in bytes.
        flops: floating-point operations of matmuls.
        gains: by optimisation, the time without it over the time with it; empty if not measured.
    """

    nodes: int
    widths: Int64s
    launches: int
    barriers: int
    weight_bytes: int
    table_bytes: int
    flops: int
    gains: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        gains = "".join(f"; {name} {gain:.2f}x" for name, gain in self.gains.items())
        return (
            f"{self.nodes} nodes in {len(self.widths)} levels; {self.launches} launches, "
            f"{self.barriers} barriers; {self.weight_bytes / 1e6:.3g} MB of weights, "
            f"{self.table_bytes / 1e6:.3g} MB of tables, {self.flops / 1e6:.4g} Mflop{gains}"
        )


def explain(net: RecursiveNet, structures: Sequence[Any], *, gains: bool = False) -> Explanation:
    """Describe a request, see `RecursiveNet.explain`."""
    order = net.linearize(structures)
    compiled, packed = net.inference_kernel(net.weights.current())
    kernel = compiled.kernel
    parts = net.launch_groups(order)
    masks = 1 << net.mask_slots
    barriers = weight_bytes = flops = 0
    for groups in parts:
        variants = groups[:, 1] * masks + groups[:, 2]
        stages = np.array([kernel.stages[variant] for variant in variants.tolist()])
        starts = np.flatnonzero(np.diff(groups[:, 0], prepend=-1))
        barriers += int(np.maximum.reduceat(stages, starts).sum()) - 1 if len(groups) else 0
        for variant, count in zip(variants.tolist(), groups[:, 4].tolist(), strict=True):
            weight_bytes += kernel.weight_bytes[variant]
            flops += count * kernel.flops[variant]
    tables = [*packed.tables.values(), *packed.leaf_tables]
    result = Explanation(
        order.nodes, order.widths, len(parts) if order.nodes else 0, barriers, weight_bytes,
        sum(table.nbytes for table in tables), flops,
    )  # fmt: skip
    return replace(result, gains=_gains(net, structures)) if gains else result


def _gains(net: RecursiveNet, structures: Sequence[Any]) -> dict[str, float]:
    """Return the median time without each optimisation over the time with all that `net` uses."""
    names = [item.name for item in fields(net.passes) if getattr(net.passes, item.name)]
    nets = {"": net} | {name: net.with_passes(**{name: False}) for name in names}
    times: dict[str, list[float]] = {name: [] for name in nets}
    for repeat in range(_REPEATS + 1):
        for name, other in nets.items():
            elapsed_ns = time_function(lambda other=other: other(structures))["cpu"]  # type: ignore[misc]
            if repeat:  # the first call compiles
                times[name].append(elapsed_ns)
    base = float(np.median(times.pop("")))
    return {name: float(np.median(values)) / base for name, values in times.items()}
