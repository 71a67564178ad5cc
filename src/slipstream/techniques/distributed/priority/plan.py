"""How a model's gradients are to travel: measure the link, simulate every way, take the best.

Rank 0 chooses and tells the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from slipstream.graph import TensorSpec
from slipstream.techniques.distributed.gradients import FIRST_BUCKET_BYTES, Gradient, buckets
from slipstream.techniques.distributed.priority.channel import Agreed, Channel
from slipstream.techniques.distributed.priority.free import Free
from slipstream.techniques.distributed.priority.layout import Unit, cut, units_of
from slipstream.techniques.distributed.priority.orders import Decoupled, Leader, Static
from slipstream.techniques.distributed.priority.simulate import (
    ORDERS,
    Link,
    Step,
    barrier,
    gated,
    static_order,
)
from slipstream.techniques.distributed.ranks import Ranks

DDP = "ddp"
PAPERS = 50_000
"""Elements of a slice that the paper found best."""
AHEAD = 2
"""Slices on their way together: while the sum of one is awaited, the next one uses the link."""
TRIED = (12_500, 25_000, PAPERS, 100_000, 200_000)
DEFAULT_MB = 25.0
_BUCKETS_MB = (DEFAULT_MB, 4.0, 1.0, 0.25)
CLEAR = 0.98
"""Of DistributedDataParallel's time; what takes more is no reason to leave it."""
_ALIKE = 1.01
_LARGE, _SMALL = (PAPERS, 6), (2_000, 12)
# The least of several is asked for: of many short ones, for a hiccup there tips the choice.
_REPEATS, _SHORT_REPEATS = 2, 6


@dataclass(frozen=True)
class Plan:
    """What was chosen.

    Attributes:
        order: one of `ORDERS`, or ``ddp``.
        slice_elems: elements of a slice.
        credit_bytes: so much may be on its way at once.
        bucket_mb: of ``ddp``; of another order, what ``ddp`` would best be.
        static: slices in order, where it is fixed.
        predicted_s: seconds of a step by ``order:slice_elems`` or ``ddp:bucket_mb``.
        measured_s: the same, of the plans that were tried.
    """

    order: str
    slice_elems: int = PAPERS
    credit_bytes: int = 0
    bucket_mb: float = DEFAULT_MB
    static: tuple[int, ...] = ()
    predicted_s: dict[str, float] = field(default_factory=dict)
    measured_s: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """``order:slice_elems`` or ``ddp:bucket_mb``."""
        return (
            f"{DDP}:{self.bucket_mb:g}" if self.order == DDP else f"{self.order}:{self.slice_elems}"
        )

    def rivals(self) -> list[Plan]:
        """This plan, and what it has to beat: DDP in the buckets that suit it, and as it comes."""
        caps = dict.fromkeys((self.bucket_mb, DEFAULT_MB))
        theirs = [replace(self, order=DDP, bucket_mb=cap, static=()) for cap in caps]
        return theirs if self.order == DDP else [self, *theirs]


@dataclass(frozen=True)
class Asked:
    """What the user has fixed; None: to be chosen."""

    order: str | None
    slice_elems: int | None
    credit_bytes: int | None


def channel(ranks: Ranks, units: Sequence[Unit], plan: Plan, released: Sequence[int]) -> Channel:
    """What moves slices as the plan says; cuts the units.

    Args:
        released: units in the order in which their gradients are complete.
    """
    cut(units, plan.slice_elems)
    if plan.order == "p2p":
        return Free(ranks, units, plan.credit_bytes)
    if plan.order == "leader":
        return Agreed(ranks, units, plan.credit_bytes, Leader())
    if plan.order == "rs_ag":
        order = [one.number for unit in released for one in units[unit].slices]
        return Agreed(ranks, units, plan.credit_bytes, Decoupled(order))
    return Agreed(ranks, units, plan.credit_bytes, Static(plan.static))


def choose(asked: Asked, step: Step, link: Link, units: Sequence[Unit]) -> Plan:
    """The way that takes least by simulation, among those the user leaves open."""
    orders = [asked.order] if asked.order else list(ORDERS)
    sizes = [asked.slice_elems] if asked.slice_elems else list(TRIED)
    largest = max(unit.flat.numel() for unit in units)
    # Larger slices than the largest unit are all the same.
    sizes = [s for n, s in enumerate(sizes) if n == 0 or sizes[n - 1] < largest]
    made = {
        (order, size): gated(step, link, order, size, _ahead(asked, units, size))
        for order in orders
        for size in sizes
    }
    found = {f"{order}:{size}": taken for (order, size), taken in made.items()}
    # Of what is as good: an order that adapts, and slices near those that the paper found best.
    least = min(made.values())
    alike = [key for key, taken in made.items() if taken <= _ALIKE * least]
    order, size = min(alike, key=lambda one: (orders.index(one[0]), abs(math.log(one[1] / PAPERS))))
    taken = made[order, size]
    cap = DEFAULT_MB
    if asked.order is None:
        caps = {mb: barrier(step, link, _buckets(units, step, mb)) for mb in _BUCKETS_MB}
        found.update({f"{DDP}:{mb:g}": s for mb, s in caps.items()})
        # The largest bucket of those that are as good.
        cap = max(mb for mb, s in caps.items() if s <= _ALIKE * min(caps.values()))
        if taken > CLEAR * min(caps.values()):
            return Plan(DDP, bucket_mb=cap, predicted_s=found)
    item = units[0].flat.element_size()
    credit = asked.credit_bytes or AHEAD * size * item
    slices = [(one.unit.number, float(one.nbytes)) for one in cut(units, size)]
    ahead = _ahead(asked, units, size)
    static = tuple(static_order(step, link, slices, ahead)) if order == "static" else ()
    return Plan(order, size, credit, cap, static, found)


def _ahead(asked: Asked, units: Sequence[Unit], size: int) -> int:
    if asked.credit_bytes is None:
        return AHEAD
    return max(1, round(asked.credit_bytes / (size * units[0].flat.element_size())))


def _buckets(units: Sequence[Unit], step: Step, cap_mb: float) -> list[list[tuple[int, float]]]:
    """Parameters, as (unit, bytes), in the buckets of DistributedDataParallel."""
    found = [
        Gradient(unit, _spec(parameter), "")
        for unit in step.released
        for parameter in units[unit].parameters
    ]
    most = int(cap_mb * 2**20)
    first = FIRST_BUCKET_BYTES if cap_mb == DEFAULT_MB else most
    return [
        [(one.task, float(one.spec.nbytes)) for one in bucket]
        for bucket in buckets(found, first, most)
    ]


def _spec(parameter: torch.Tensor) -> TensorSpec:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return TensorSpec(dtype, tuple(parameter.shape), parameter.stride())


def measure_link(ranks: Ranks, orders: Sequence[str]) -> Link:
    """What slices cost in a stream, by order, and an all-reduce; all ranks call it together."""
    message_s: dict[str, float] = {}
    byte_s: dict[str, float] = {}
    for order in orders:
        alike = "static" if order == "rs_ag" and "static" in message_s else order
        if alike != order:
            message_s[order], byte_s[order] = message_s[alike], byte_s[alike]
            continue
        points = [_stream(ranks, order, *size) for size in (_SMALL, _LARGE)]
        message_s[order], byte_s[order] = _line(points)
    points = [_reduction(ranks, count) for count in (_SMALL[0], _LARGE[0] * _LARGE[1])]
    return Link(message_s, byte_s, *_line(points))


def _stream(ranks: Ranks, order: str, elements: int, count: int) -> tuple[int, int, float]:
    """Messages, bytes and seconds of a round of slices."""
    parameter = torch.nn.Parameter(torch.zeros(elements * count - 1))
    units = units_of([[parameter]], parameter)
    slices = cut(units, elements)
    plan = Plan(order, elements, AHEAD * slices[0].nbytes, static=tuple(range(count)))
    made = channel(ranks, units, plan, [0])

    def run() -> None:
        made.begin()
        made.hand_over(units[0])
        made.wait_for(units)

    try:
        repeats = _SHORT_REPEATS if (elements, count) == _SMALL else _REPEATS
        return count, units[0].nbytes, _least(ranks, run, repeats)
    finally:
        made.close()


def _reduction(ranks: Ranks, elements: int) -> tuple[int, int, float]:
    flat = torch.zeros(elements)
    repeats = _SHORT_REPEATS if elements == _SMALL[0] else _REPEATS
    return 1, 4 * elements, _least(ranks, lambda: dist.all_reduce(flat, group=ranks.group), repeats)


def _least(ranks: Ranks, run: Callable[[], Any], repeats: int) -> float:
    """The least of a few times, after one that opens connections."""
    taken = []
    for _ in range(repeats + 1):
        dist.barrier(group=ranks.group)
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def _line(points: Sequence[tuple[int, int, float]]) -> tuple[float, float]:
    """Seconds a message and a byte that explain two measurements; neither is negative."""
    (n1, b1, t1), (n2, b2, t2) = points
    determinant = n1 * b2 - n2 * b1
    message = max(0.0, (t1 * b2 - t2 * b1) / determinant)
    return message, max(0.0, (t2 - n2 * message) / b2)
