"""How a model's gradients are to travel: measure the link, simulate every way, take the best.

Rank 0 chooses and tells the others.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
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
    DDP,
    ORDERS,
    Link,
    Step,
    barrier,
    gated,
    static_order,
)
from slipstream.techniques.distributed.ranks import Ranks

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
# How often it is tried beside computation, and for how many times what it takes alone.
_BESIDE, _LONGEST = 3, 3.0
_LEAST_LEFT = 0.01
BUSY = 0.1
"""Share of a step in which computation needs a core, below which it is in nobody's way."""


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


def measure_link(ranks: Ranks, orders: Sequence[str], busy: bool) -> Link:
    """What slices cost in a stream, by order, and an all-reduce; all ranks call it together.

    Args:
        busy: computation needs a core, for which transfers may have to wait.
    """
    found: dict[str, tuple[float, float, float]] = {}
    for order in orders:
        if order == "rs_ag" and "static" in found:
            found[order] = found["static"]
            continue
        streams = _stream(ranks, order, *_SMALL), _stream(ranks, order, *_LARGE)
        found[order] = _measured(ranks, *streams, busy)
    small, large = (_reduction(ranks, size) for size in (_SMALL[0], _LARGE[0] * _LARGE[1]))
    reduce_message_s, reduce_byte_s, left = _measured(ranks, small, large, busy)
    return Link(
        {order: row[0] for order, row in found.items()},
        {order: row[1] for order, row in found.items()},
        reduce_message_s,
        reduce_byte_s,
        {DDP: left, **{order: row[2] for order, row in found.items()}},
    )


@dataclass(frozen=True)
class _Transfer:
    """Something to send, as often as one likes: begun, asked whether it is there, waited for."""

    messages: int
    nbytes: int
    start: Callable[[], None]
    arrived: Callable[[], bool]
    wait: Callable[[], None]


@contextlib.contextmanager
def _stream(ranks: Ranks, order: str, elements: int, count: int) -> Iterator[_Transfer]:
    """A round of slices."""
    parameter = torch.nn.Parameter(torch.zeros(elements * count - 1))
    units = units_of([[parameter]], parameter)
    slices = cut(units, elements)
    plan = Plan(order, elements, AHEAD * slices[0].nbytes, static=tuple(range(count)))
    made = channel(ranks, units, plan, [0])

    def start() -> None:
        made.begin()
        made.hand_over(units[0])

    try:
        yield _Transfer(
            count, units[0].nbytes, start, lambda: not units[0].left, lambda: made.wait_for(units)
        )
    finally:
        made.close()


@contextlib.contextmanager
def _reduction(ranks: Ranks, elements: int) -> Iterator[_Transfer]:
    """An all-reduce of gloo."""
    flat = torch.zeros(elements)
    works: list[Any] = []

    def start() -> None:
        works[:] = [dist.all_reduce(flat, group=ranks.group, async_op=True)]

    yield _Transfer(
        1, 4 * elements, start, lambda: works[0].is_completed(), lambda: works[0].wait()
    )


def _measured(
    ranks: Ranks, small: AbstractContextManager[_Transfer],
    large: AbstractContextManager[_Transfer], busy: bool,
) -> tuple[float, float, float]:  # fmt: skip
    """Seconds a message and a byte, and the share of the rate that computation leaves."""
    with small as one:
        few = one.messages, one.nbytes, _least(ranks, one, _SHORT_REPEATS)
    with large as one:
        many = one.messages, one.nbytes, _least(ranks, one, _REPEATS)
        tried = [_left(ranks, one, many[-1]) for _ in range(_BESIDE if busy else 0)]
    return *_line([few, many]), statistics.median(tried or [1.0])


def _least(ranks: Ranks, one: _Transfer, repeats: int) -> float:
    """The least of a few times, after one that opens connections."""
    taken = []
    for _ in range(repeats + 1):
        dist.barrier(group=ranks.group)
        began = time.perf_counter()
        one.start()
        one.wait()
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def _left(ranks: Ranks, one: _Transfer, alone_s: float) -> float:
    """The share of its rate that a transfer has while all ranks compute, for a while."""
    matrix = torch.ones(256, 256)
    dist.barrier(group=ranks.group)
    began = time.perf_counter()
    one.start()
    computed_s = 0.0
    while computed_s < _LONGEST * alone_s and not one.arrived():
        torch.mm(matrix, matrix)
        computed_s = time.perf_counter() - began
    one.wait()
    return share_left(alone_s, computed_s, time.perf_counter() - began)


def share_left(alone_s: float, computed_s: float, taken_s: float) -> float:
    """Of its rate alone, what a transfer has beside computation.

    Args:
        alone_s: what the transfer takes.
        computed_s: of its time, how long the ranks computed beside it.
        taken_s: what it took then; after the computation it had its whole rate.
    """
    moved = 1.0 - (taken_s - computed_s) / alone_s
    return min(1.0, max(_LEAST_LEFT, moved * alone_s / max(computed_s, alone_s)))


def _line(points: Sequence[tuple[int, int, float]]) -> tuple[float, float]:
    """Seconds a message and a byte that explain two measurements; neither is negative."""
    (n1, b1, t1), (n2, b2, t2) = points
    determinant = n1 * b2 - n2 * b1
    message = max(0.0, (t1 * b2 - t2 * b1) / determinant)
    return message, max(0.0, (t2 - n2 * message) / b2)
