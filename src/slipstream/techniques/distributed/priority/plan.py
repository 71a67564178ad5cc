"""How a model's gradients are to travel: measure the link, simulate every way, take the best.

Rank 0 chooses and tells the others.
"""

from __future__ import annotations

import contextlib
import itertools
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
from slipstream.ranks.group import ProcessGroup
from slipstream.techniques.distributed.gradients import DEFAULT_MIB, Gradient, ddp_buckets
from slipstream.techniques.distributed.priority.channel import (
    Agreed,
    Channel,
    Decoupled,
    Leader,
    Static,
)
from slipstream.techniques.distributed.priority.free import Free
from slipstream.techniques.distributed.priority.layout import Unit, cut, units_of
from slipstream.techniques.distributed.priority.simulate import (
    AHEAD,
    DDP,
    ORDERS,
    Link,
    Shares,
    StepCosts,
    barrier,
    gated,
)

PAPERS = 50_000
"""Elements of a slice that the paper found best."""
DEEP = 8
"""The same where all cores compute: threads that pass slices on wait for one of them."""
_AHEADS = (AHEAD, DEEP)
TRIED = (12_500, 25_000, PAPERS, 100_000, 200_000)
_BUCKETS_MB = (DEFAULT_MIB, 4.0, 1.0, 0.25)
CLEAR = 0.98
"""Of DistributedDataParallel's time; what takes more is no reason to leave it."""
_ALIKE = 1.01
# What is predicted to be so near to the best is tried, but no more than so many.
_CLOSE, _MOST = 1.05, 4
_LARGE, _SMALL, _MANY = (PAPERS, 6), (2_000, 12), (PAPERS, 12)
# The least of several is asked for: of many short ones, for a hiccup there tips the choice.
_REPEATS, _SHORT_REPEATS = 2, 6
# How often it is tried beside computation, for how many times what it takes alone and how long.
_BESIDE, _LONGEST, _LONGEST_S = 3, 3.0, 0.4
_LEAST_LEFT = 0.01
BUSY = 0.1
"""Share of a step in which computation needs a core, below which it is in nobody's way."""


@dataclass(frozen=True)
class SlicePlan:
    """What was chosen.

    Attributes:
        order: one of `ORDERS`, or ``ddp``.
        slice_elems: elements of a slice.
        ahead: so many slices may be on their way at once.
        credit_bytes: the same in bytes.
        bucket_mb: of ``ddp``.
        static: slices in order, where it is fixed.
        predicted_s: seconds of a step by `name`.
        measured_s: the same, of the plans that were tried.
    """

    order: str
    slice_elems: int = PAPERS
    ahead: int = AHEAD
    credit_bytes: int = 0
    bucket_mb: float = DEFAULT_MIB
    static: tuple[int, ...] = ()
    predicted_s: dict[str, float] = field(default_factory=dict)
    measured_s: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """``order:slice_elems``, with how many are ahead where that is unusual; or ``ddp:MiB``."""
        if self.order == DDP:
            return f"{DDP}:{self.bucket_mb:g}"
        ahead = "" if self.ahead == AHEAD else f"x{self.ahead}"
        return f"{self.order}:{self.slice_elems}{ahead}"

    @property
    def words(self) -> str:
        """The same for people, who may take ``ddp:25`` for 25 workers."""
        if self.order == DDP:
            return f"DDP, buckets of {self.bucket_mb:g} MiB"
        return f"{self.order}, slices of {self.slice_elems:,} numbers, {self.ahead} ahead"


@dataclass(frozen=True)
class Asked:
    """What the user has fixed; None: to be chosen."""

    order: str | None
    slice_elems: int | None
    credit_bytes: int | None


def channel(
    ranks: ProcessGroup, units: Sequence[Unit], plan: SlicePlan, released: Sequence[int]
) -> Channel:
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


def choose(asked: Asked, step: StepCosts, link: Link, units: Sequence[Unit]) -> list[SlicePlan]:
    """Ways to try, the one that takes least by simulation first.

    Where the order is the user's, the best of these alone. Else what is nearly as good, too, and
    last DistributedDataParallel in the buckets that suit it and as it comes; only this where it is
    not slower.
    """
    orders = [asked.order] if asked.order else list(ORDERS)
    sizes = [asked.slice_elems] if asked.slice_elems else list(TRIED)
    largest = max(unit.flat.numel() for unit in units)
    # Larger slices than the largest unit are all the same.
    sizes = [s for n, s in enumerate(sizes) if n == 0 or sizes[n - 1] < largest]
    item = units[0].flat.element_size()
    plans: list[SlicePlan] = []
    seconds: dict[str, float] = {}
    for order, size, ahead in itertools.product(orders, sizes, _aheads(asked, step.busy)):
        ahead = ahead or max(1, round((asked.credit_bytes or 0) / (size * item)))
        taken = gated(step, link, order, size, ahead)
        credit = asked.credit_bytes or ahead * size * item
        static = taken.order if order == "static" else ()
        plans.append(SlicePlan(order, size, ahead, credit, static=static))
        seconds[plans[-1].name] = taken.step_s
    least = min(seconds.values())

    def rank(plan: SlicePlan) -> tuple[Any, ...]:
        """Of what is as good: an order that adapts, and slices as the paper found them best."""
        taken = seconds[plan.name]
        preferred = orders.index(plan.order), abs(math.log(plan.slice_elems / PAPERS)), plan.ahead
        return (0.0, *preferred) if taken <= _ALIKE * least else (taken, *preferred)

    plans = sorted((one for one in plans if seconds[one.name] <= _CLOSE * least), key=rank)
    theirs: list[SlicePlan] = []
    if asked.order is None:
        caps = {mb: barrier(step, link, _buckets(units, step, mb)) for mb in _BUCKETS_MB}
        seconds.update({f"{DDP}:{mb:g}": s for mb, s in caps.items()})
        # The largest bucket of those that are as good.
        cap = max(mb for mb, s in caps.items() if s <= _ALIKE * min(caps.values()))
        theirs = [SlicePlan(DDP, bucket_mb=mb) for mb in dict.fromkeys((cap, DEFAULT_MIB))]
        plans = [] if least > CLEAR * min(caps.values()) else plans[:_MOST]
    else:
        plans = plans[:1]
    return [replace(one, predicted_s=seconds) for one in (*plans, *theirs)]


def _aheads(asked: Asked, busy: float) -> list[int]:
    """Numbers of slices ahead to simulate; 0: as many as the user's credit has room for."""
    if asked.credit_bytes is not None:
        return [0]
    return list(_AHEADS) if busy >= BUSY else [AHEAD]


def _buckets(
    units: Sequence[Unit], step: StepCosts, cap_mb: float
) -> list[list[tuple[int, float]]]:
    """Parameters, as (unit, bytes), in the buckets of DistributedDataParallel."""
    gradients = []
    for unit in step.released:
        for one in units[unit].parameters:
            dtype = str(one.dtype).removeprefix("torch.")
            gradients.append(Gradient(unit, TensorSpec(dtype, tuple(one.shape), one.stride()), ""))
    return [
        [(one.task, float(one.spec.nbytes)) for one in bucket]
        for bucket in ddp_buckets(gradients, cap_mb)
    ]


def measure_link(ranks: ProcessGroup, orders: Sequence[str], busy: bool) -> Link:
    """What slices cost in a stream, by order, and an all-reduce; all ranks call it together.

    Args:
        busy: computation needs a core, for which transfers may have to wait.
    """
    costs: dict[str, tuple[float, float]] = {}
    beside: dict[tuple[str, int], Shares] = {}
    for order in orders:
        if order == "rs_ag" and "static" in costs:
            costs[order] = costs["static"]
            beside.update({(order, of): beside["static", of] for of in _AHEADS if busy})
            continue
        small, large = (_stream(ranks, order, *size) for size in (_SMALL, _LARGE))
        costs[order] = _measured(ranks, small, large)
        for ahead in _AHEADS if busy else ():
            beside[order, ahead] = _beside(ranks, _stream(ranks, order, *_MANY, ahead))
    small, large = (_reduction(ranks, size) for size in (_SMALL[0], _LARGE[0] * _LARGE[1]))
    reduce_message_s, reduce_byte_s = _measured(ranks, small, large)
    if busy:
        beside[DDP, 1] = _beside(ranks, _reduction(ranks, _LARGE[0] * _LARGE[1]))
    return Link(
        {order: row[0] for order, row in costs.items()},
        {order: row[1] for order, row in costs.items()},
        reduce_message_s,
        reduce_byte_s,
        beside,
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
def _stream(
    ranks: ProcessGroup, order: str, elements: int, count: int, ahead: int = AHEAD
) -> Iterator[_Transfer]:
    parameter = torch.nn.Parameter(torch.zeros(elements * count - 1))
    units = units_of([[parameter]], parameter)
    slices = cut(units, elements)
    credit = ahead * slices[0].nbytes
    plan = SlicePlan(order, elements, ahead, credit, static=tuple(range(count)))
    stream = channel(ranks, units, plan, [0])

    def start() -> None:
        stream.begin()
        stream.hand_over(units[0])

    try:
        yield _Transfer(
            count, units[0].nbytes, start, lambda: not units[0].left, lambda: stream.wait_for(units)
        )
    finally:
        stream.close()


@contextlib.contextmanager
def _reduction(ranks: ProcessGroup, elements: int) -> Iterator[_Transfer]:
    flat = torch.zeros(elements)
    works: list[Any] = []

    def start() -> None:
        works[:] = [dist.all_reduce(flat, group=ranks.group, async_op=True)]

    yield _Transfer(
        1, 4 * elements, start, lambda: works[0].is_completed(), lambda: works[0].wait()
    )


def _measured(
    ranks: ProcessGroup,
    small: AbstractContextManager[_Transfer],
    large: AbstractContextManager[_Transfer],
) -> tuple[float, float]:
    """Seconds a message and a byte."""
    with small as one:
        few = one.messages, one.nbytes, _least(ranks, one, _SHORT_REPEATS)
    with large as one:
        many = one.messages, one.nbytes, _least(ranks, one, _REPEATS)
    return _line([few, many])


def _beside(ranks: ProcessGroup, transfer: AbstractContextManager[_Transfer]) -> Shares:
    """What it and computation leave each other; medians."""
    with transfer as one:
        alone_s = _least(ranks, one, _REPEATS)
        tried = [_left(ranks, one, alone_s) for _ in range(_BESIDE)]
    return Shares(*(statistics.median(each) for each in zip(*tried, strict=True)))


def _least(ranks: ProcessGroup, one: _Transfer, repeats: int) -> float:
    """The least of a few times, after one that opens connections."""
    taken = []
    for _ in range(repeats + 1):
        dist.barrier(group=ranks.group)
        began = time.perf_counter()
        one.start()
        one.wait()
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def _left(ranks: ProcessGroup, one: _Transfer, alone_s: float) -> Shares:
    """The share of its rate that a transfer has while all ranks compute, for a while; and they."""
    longest_s = min(_LONGEST * alone_s, max(_LONGEST_S, alone_s))
    dist.barrier(group=ranks.group)
    alone = _products(longest_s / _LONGEST, lambda: False)
    dist.barrier(group=ranks.group)
    began = time.perf_counter()
    one.start()
    count, computed_s = _products(longest_s, one.arrived)
    one.wait()
    link = share_left(alone_s, computed_s, time.perf_counter() - began)
    return Shares(link, core_left(alone, (count, computed_s)))


def _products(longest_s: float, over: Callable[[], bool]) -> tuple[int, float]:
    """How many products of matrices are done before it is over, at least one; and seconds."""
    matrix = torch.ones(256, 256)
    began, count, passed = time.perf_counter(), 0, 0.0
    while not count or (passed < longest_s and not over()):
        torch.mm(matrix, matrix)
        count += 1
        passed = time.perf_counter() - began
    return count, passed


def core_left(alone: tuple[int, float], beside: tuple[int, float]) -> float:
    """Of its rate alone, what computation has beside a transfer; (products, seconds) of each."""
    return min(1.0, max(_LEAST_LEFT, beside[0] / beside[1] * alone[1] / alone[0]))


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
