"""Choice of a plan for the exchange of gradients: measure the link, simulate candidates.

Rank 0 chooses, and broadcasts its choice.
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

PAPER_ELEMS = 50_000
"""Elements per slice that the paper found best."""
# Slices in transit to simulate; more help if channel threads wait for a core.
_AHEADS = (AHEAD, 8)
TRIED = (12_500, 25_000, PAPER_ELEMS, 100_000, 200_000)
_BUCKETS_MB = (DEFAULT_MIB, 4.0, 1.0, 0.25)
CLEAR = 0.98
"""A plan must take less than this share of DistributedDataParallel's time to replace it."""
# Plans within this factor of the best predicted time count as equal.
_TIE = 1.01
# Plans within this factor of the best predicted time are timed, up to a maximum number.
_CLOSE, _MAX_PLANS = 1.05, 4
# Streams to measure, as (elements per slice, slices).
_LARGE, _SMALL, _MANY = (PAPER_ELEMS, 6), (2_000, 12), (PAPER_ELEMS, 12)
# The minimum of several runs counts; short runs need more, because a disturbance weighs more.
_REPEATS, _SHORT_REPEATS = 2, 6
# Runs with concurrent computation, and their maximum duration: relative to the transfer alone, and
# in seconds.
_CONTENTION_RUNS, _MAX_SLOWDOWN, _MAX_RUN_S = 3, 3.0, 0.4
_MIN_SHARE = 0.01
BUSY = 0.1
"""Minimum share of a step in which computation occupies a core for it to slow communication."""


@dataclass(frozen=True)
class SlicePlan:
    """A plan for the exchange of gradients.

    Attributes:
        order: one of `ORDERS`, or ``ddp``.
        slice_elems: elements per slice.
        ahead: maximum number of slices in transit.
        credit_bytes: maximum bytes in transit.
        bucket_mb: bucket size of ``ddp``, in MiB.
        static: slices in order, for the order ``static``.
        predicted_s: predicted seconds per step of all candidates, by `name`.
        measured_s: measured seconds per step of the plans that were timed, by `name`.
    """

    order: str
    slice_elems: int = PAPER_ELEMS
    ahead: int = AHEAD
    credit_bytes: int = 0
    bucket_mb: float = DEFAULT_MIB
    static: tuple[int, ...] = ()
    predicted_s: dict[str, float] = field(default_factory=dict)
    measured_s: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """``order:slice_elems``, with ``xN`` for N slices in transit unless 2; or ``ddp:MiB``."""
        if self.order == DDP:
            return f"{DDP}:{self.bucket_mb:g}"
        ahead = "" if self.ahead == AHEAD else f"x{self.ahead}"
        return f"{self.order}:{self.slice_elems}{ahead}"

    @property
    def words(self) -> str:
        """Readable description of the plan."""
        if self.order == DDP:
            return f"DDP, buckets of {self.bucket_mb:g} MiB"
        return f"{self.order}, slices of {self.slice_elems:,} elements, {self.ahead} in transit"


@dataclass(frozen=True)
class PlanRequest:
    """Settings fixed by the user; None where the plan is to be chosen."""

    order: str | None
    slice_elems: int | None
    credit_bytes: int | None


def channel(
    ranks: ProcessGroup, units: Sequence[Unit], plan: SlicePlan, released: Sequence[int]
) -> Channel:
    """Cut the units, and create the channel of a plan.

    Args:
        released: units in the order in which their gradients become complete.
    """
    cut(units, plan.slice_elems)
    if plan.order == "p2p":
        return Free(ranks, units, plan.credit_bytes)
    if plan.order == "leader":
        return Agreed(ranks, units, plan.credit_bytes, Leader())
    if plan.order == "rs_ag":
        order = [slice_.number for unit in released for slice_ in units[unit].slices]
        return Agreed(ranks, units, plan.credit_bytes, Decoupled(order))
    return Agreed(ranks, units, plan.credit_bytes, Static(plan.static))


def choose(
    request: PlanRequest, step: StepCosts, link: Link, units: Sequence[Unit]
) -> list[SlicePlan]:
    """Return the plans to time, the fastest by simulation first.

    If the user fixed the order, this is its best plan only. Otherwise plans of similar time follow,
    and last DistributedDataParallel with its best and its default bucket size; only these if no
    plan is faster.
    """
    orders = [request.order] if request.order else list(ORDERS)
    sizes = [request.slice_elems] if request.slice_elems else list(TRIED)
    largest = max(unit.flat.numel() for unit in units)
    # All sizes above the largest unit are equivalent.
    sizes = [s for n, s in enumerate(sizes) if n == 0 or sizes[n - 1] < largest]
    item = units[0].flat.element_size()
    plans: list[SlicePlan] = []
    seconds: dict[str, float] = {}
    for order, size, ahead in itertools.product(orders, sizes, _aheads(request, step.busy)):
        ahead = ahead or max(1, round((request.credit_bytes or 0) / (size * item)))
        simulated = gated(step, link, order, size, ahead)
        credit = request.credit_bytes or ahead * size * item
        static = simulated.order if order == "static" else ()
        plans.append(SlicePlan(order, size, ahead, credit, static=static))
        seconds[plans[-1].name] = simulated.step_s
    best_s = min(seconds.values())

    def rank(plan: SlicePlan) -> tuple[Any, ...]:
        """Among ties, prefer adaptive orders, and slices of the paper's size."""
        simulated = seconds[plan.name]
        preferred = (
            orders.index(plan.order),
            abs(math.log(plan.slice_elems / PAPER_ELEMS)),
            plan.ahead,
        )
        return (0.0, *preferred) if simulated <= _TIE * best_s else (simulated, *preferred)

    plans = sorted((plan for plan in plans if seconds[plan.name] <= _CLOSE * best_s), key=rank)
    ddp_plans: list[SlicePlan] = []
    if request.order is None:
        caps = {mb: barrier(step, link, _buckets(units, step, mb)) for mb in _BUCKETS_MB}
        seconds.update({f"{DDP}:{mb:g}": s for mb, s in caps.items()})
        # The largest bucket among ties.
        cap = max(mb for mb, s in caps.items() if s <= _TIE * min(caps.values()))
        ddp_plans = [SlicePlan(DDP, bucket_mb=mb) for mb in dict.fromkeys((cap, DEFAULT_MIB))]
        plans = [] if best_s > CLEAR * min(caps.values()) else plans[:_MAX_PLANS]
    else:
        plans = plans[:1]
    return [replace(plan, predicted_s=seconds) for plan in (*plans, *ddp_plans)]


def _aheads(request: PlanRequest, busy: float) -> list[int]:
    """Return numbers of slices in transit to simulate; 0 for what the user's credit allows."""
    if request.credit_bytes is not None:
        return [0]
    return list(_AHEADS) if busy >= BUSY else [AHEAD]


def _buckets(
    units: Sequence[Unit], step: StepCosts, cap_mb: float
) -> list[list[tuple[int, float]]]:
    """Return the buckets of DistributedDataParallel, with parameters as (unit, bytes)."""
    gradients = []
    for unit in step.released:
        for parameter in units[unit].parameters:
            dtype = str(parameter.dtype).removeprefix("torch.")
            gradients.append(
                Gradient(unit, TensorSpec(dtype, tuple(parameter.shape), parameter.stride()), "")
            )
    return [
        [(gradient.task, float(gradient.spec.nbytes)) for gradient in bucket]
        for bucket in ddp_buckets(gradients, cap_mb)
    ]


def measure_link(ranks: ProcessGroup, orders: Sequence[str], busy: bool) -> Link:
    """Measure slices in a stream, by order, and an all-reduce; all ranks call it together.

    Args:
        busy: whether computation occupies a core, for which transfers may have to wait.
    """
    costs: dict[str, tuple[float, float]] = {}
    contention: dict[tuple[str, int], Shares] = {}
    for order in orders:
        if order == "rs_ag" and "static" in costs:
            costs[order] = costs["static"]
            contention.update(
                {(order, ahead): contention["static", ahead] for ahead in _AHEADS if busy}
            )
            continue
        small, large = (_stream(ranks, order, *size) for size in (_SMALL, _LARGE))
        costs[order] = _measured(ranks, small, large)
        for ahead in _AHEADS if busy else ():
            contention[order, ahead] = _contention(ranks, _stream(ranks, order, *_MANY, ahead))
    small, large = (_reduction(ranks, size) for size in (_SMALL[0], _LARGE[0] * _LARGE[1]))
    reduce_message_s, reduce_byte_s = _measured(ranks, small, large)
    if busy:
        contention[DDP, 1] = _contention(ranks, _reduction(ranks, _LARGE[0] * _LARGE[1]))
    return Link(
        {order: row[0] for order, row in costs.items()},
        {order: row[1] for order, row in costs.items()},
        reduce_message_s,
        reduce_byte_s,
        contention,
    )


@dataclass(frozen=True)
class _Transfer:
    """A repeatable transfer."""

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
            count,
            units[0].nbytes,
            start,
            lambda: not units[0].missing,
            lambda: stream.wait_for(units),
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
    """Return the seconds per message and per byte."""
    with small as transfer:
        small_run = transfer.messages, transfer.nbytes, _min_time(ranks, transfer, _SHORT_REPEATS)
    with large as transfer:
        large_run = transfer.messages, transfer.nbytes, _min_time(ranks, transfer, _REPEATS)
    return _costs_of([small_run, large_run])


def _contention(ranks: ProcessGroup, transfer: AbstractContextManager[_Transfer]) -> Shares:
    """Return the rates that a transfer and computation retain together, as medians."""
    with transfer as opened:
        alone_s = _min_time(ranks, opened, _REPEATS)
        runs = [_contended_run(ranks, opened, alone_s) for _ in range(_CONTENTION_RUNS)]
    return Shares(*(statistics.median(each) for each in zip(*runs, strict=True)))


def _min_time(ranks: ProcessGroup, transfer: _Transfer, repeats: int) -> float:
    """Return the minimum time of some runs, after one that opens connections."""
    times = []
    for _ in range(repeats + 1):
        dist.barrier(group=ranks.group)
        began = time.perf_counter()
        transfer.start()
        transfer.wait()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _contended_run(ranks: ProcessGroup, transfer: _Transfer, alone_s: float) -> Shares:
    """Run a transfer while all ranks compute; return the rates that both retain."""
    limit_s = min(_MAX_SLOWDOWN * alone_s, max(_MAX_RUN_S, alone_s))
    dist.barrier(group=ranks.group)
    alone_compute = _multiply_until(limit_s / _MAX_SLOWDOWN, lambda: False)
    dist.barrier(group=ranks.group)
    began = time.perf_counter()
    transfer.start()
    count, computed_s = _multiply_until(limit_s, transfer.arrived)
    transfer.wait()
    link = link_share(alone_s, computed_s, time.perf_counter() - began)
    return Shares(link, core_share(alone_compute, (count, computed_s)))


def _multiply_until(limit_s: float, done: Callable[[], bool]) -> tuple[int, float]:
    """Multiply matrices until done or the limit, at least once; return the count and seconds."""
    matrix = torch.ones(256, 256)
    began, count, elapsed_s = time.perf_counter(), 0, 0.0
    while not count or (elapsed_s < limit_s and not done()):
        torch.mm(matrix, matrix)
        count += 1
        elapsed_s = time.perf_counter() - began
    return count, elapsed_s


def core_share(alone: tuple[int, float], together: tuple[int, float]) -> float:
    """Return the share of its rate that computation retains next to a transfer.

    Args:
        alone, together: numbers of matmuls and seconds, without and with the transfer.
    """
    return min(1.0, max(_MIN_SHARE, together[0] / together[1] * alone[1] / alone[0]))


def link_share(alone_s: float, computed_s: float, elapsed_s: float) -> float:
    """Return the share of its rate that a transfer retains next to computation.

    Args:
        alone_s: duration of the transfer alone.
        computed_s: how long the ranks computed during the transfer.
        elapsed_s: duration of the transfer with computation; it has its full rate afterwards.
    """
    transferred = 1.0 - (elapsed_s - computed_s) / alone_s
    return min(1.0, max(_MIN_SHARE, transferred * alone_s / max(computed_s, alone_s)))


def _costs_of(points: Sequence[tuple[int, int, float]]) -> tuple[float, float]:
    """Return seconds per message and per byte, both >= 0, that fit two measurements."""
    (n1, b1, t1), (n2, b2, t2) = points
    determinant = n1 * b2 - n2 * b1
    message = max(0.0, (t1 * b2 - t2 * b1) / determinant)
    return message, max(0.0, (t2 - n2 * message) / b2)
