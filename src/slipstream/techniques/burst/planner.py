"""Choose how many devices run each layer of a step: an exact dynamic programme.

Layers form a chain whose layers may have branches before them, which may have branches themselves.
A layer on g devices runs 1/g of the batch on each, devices 0 to g-1. Branches run one after the
other on the devices of the chain, or simultaneously on disjoint devices: one group of branches on
those of the chain, each other group on devices that hold none of its input.

A state is the number of devices of the last layer. Its labels are the plans of all earlier layers
that no other one dominates in time, device time and, within branches, number of devices. L layers
with k options and at most F labels per state take O(L k^2 F log(k F)), where F is 1 for the fastest
plan of a chain; b branches combine O(3^b k^2 F^2) pairs of labels instead of k^2 F.

Source: Park et al., "Efficient Strong Scaling Through Burst Parallel Training", MLSys 2022,
arXiv 2112.10065, whose planner discards plans while it scans the layers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.arguments import as_integer
from slipstream.cluster import Mesh
from slipstream.cluster.orders import ORDERS
from slipstream.cluster.placement import Part, Placement
from slipstream.errors import InvalidArgumentError
from slipstream.units import format_duration

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# Labels per state, and in all states of a chain; with more, a plan may be slightly suboptimal.
_MAX_LABELS, _MAX_TOTAL_LABELS = 2048, 1 << 22
# Branches of one layer that are combined exactly.
_MAX_BRANCHES = 6


@dataclass(frozen=True, eq=False)
class BurstLayer:
    """Times of a layer in ns, for each option of a plan's numbers of devices.

    Attributes:
        name: for tables and errors.
        work_ns: float64 [options], forward and backward pass of a device's share of the batch, and
            the exchange of gradients.
        move_ns: float64 [options, options], to move its output from its devices to those of the
            next layer, and the gradient back; devices 0 to g-1 are nested.
        apart_ns: like `move_ns`, to or from devices that are disjoint; infinite by default.
        branches: chains between the previous layer and this one, which sums or joins their
            outputs; an empty chain is a skip connection. Without branches, layers are consecutive.
    """

    name: str
    work_ns: Floats
    move_ns: Floats
    apart_ns: Floats | None = None
    branches: tuple[tuple[BurstLayer, ...], ...] = ()


@dataclass(frozen=True)
class BurstPlan:
    """Numbers of devices by layer.

    Attributes:
        layers: names; the layers of branches come before the one that joins them.
        devices: number of devices of each layer.
        first: the first device of each; 0 except for simultaneous branches.
        time_ns: time of all layers and moves.
        device_ns: sum over layers of their devices' time, in moves to them as well.
        exact: whether no other plan can be better; False if too many plans had to be compared.
    """

    layers: tuple[str, ...]
    devices: tuple[int, ...]
    first: tuple[int, ...]
    time_ns: float
    device_ns: float
    exact: bool = True

    @property
    def bursts(self) -> tuple[tuple[int, int], ...]:
        """Number of devices of each run of layers with equally many, and its first layer."""
        starts = [n for n, g in enumerate(self.devices) if not n or g != self.devices[n - 1]]
        return tuple((self.devices[n], n) for n in starts)

    @property
    def spec(self) -> str:
        """The plan as the technique's setting ``plan``: ``8/1@classifier``."""
        return "/".join(
            f"{devices}@{self.layers[first]}" if first else str(devices)
            for devices, first in self.bursts
        )

    def placement(self, samples: int) -> Placement:
        """Return the plan of a chain as parts of nested devices, which share a batch.

        Args:
            samples: of the whole batch.

        Raises:
            InvalidArgumentError: branches run simultaneously, or the number of samples is not a
                positive multiple of the number of devices of a layer.
        """
        if any(self.first):
            raise InvalidArgumentError("plan", "it runs branches simultaneously, unlike a chain")
        as_integer("samples", samples)
        parts = [
            Part(
                f"layers from {self.layers[at]}", (self.layers[at],) if at else (),
                Mesh(np.arange(devices), ("layer",)), samples // devices,
            )
            for devices, at in self.bursts
        ]  # fmt: skip
        return Placement(tuple(parts), ORDERS["gpipe"](len(parts), 1))


def plan(
    layers: Sequence[BurstLayer],
    devices: Sequence[int],
    *,
    amplification: float = math.inf,
    deadline_ns: float = math.inf,
    device_ns: float = math.inf,
) -> BurstPlan:
    """Return the fastest plan, or the one with the least device time that meets a deadline.

    Args:
        layers: in order of the forward pass.
        devices: the options, ascending from 1.
        amplification: upper limit of a layer's device time relative to its time on one device.
        deadline_ns, device_ns: upper limits of time and device time.

    Raises:
        InvalidArgumentError: no plan is within the limits, an amplification below 1, a time is
            negative or NaN, or `layers` or `devices` are empty or do not match.
    """
    for name, limit in (("deadline_ns", deadline_ns), ("device_ns", device_ns)):
        if math.isnan(limit):
            raise InvalidArgumentError(name, "nan is not a time")
    limited = deadline_ns < math.inf or device_ns < math.inf
    found = _search(layers, devices, amplification, frontier=limited)
    within = [each for each in found if each.time_ns <= deadline_ns and each.device_ns <= device_ns]
    if not within:
        name, limit, least = "deadline_ns", deadline_ns, found[0].time_ns
        if least <= deadline_ns:
            name, limit = "device_ns", device_ns
            least = min(each.device_ns for each in found if each.time_ns <= deadline_ns)
        raise InvalidArgumentError(
            name, f"no plan of the layers is within {format_duration(max(limit, 0.0))}",
            remedy=f"the least is {format_duration(least)}",
        )  # fmt: skip
    # In order of time, so of decreasing device time.
    return within[0 if deadline_ns == math.inf else -1]


def pareto(
    layers: Sequence[BurstLayer], devices: Sequence[int], *, amplification: float = math.inf
) -> list[BurstPlan]:
    """Return the plans that no other plan dominates in time and device time, fastest first.

    Arguments and errors are those of `plan`.
    """
    return _search(layers, devices, amplification, frontier=True)


def spread(bursts: Sequence[tuple[int, str]], names: Sequence[str]) -> list[int]:
    """Return the number of devices of each layer.

    Args:
        bursts: devices, and the module that begins each but the first.
        names: of the layers.

    Raises:
        InvalidArgumentError: no layer begins such a module, or they are not in order.
    """
    counts: list[int] = []
    begun = -1
    for devices, module in bursts:
        begins = (n for n, name in enumerate(names) if f"{name}.".startswith(f"{module}."))
        at = next(begins, -1) if module else 0
        if at <= begun:
            raise InvalidArgumentError(
                "burst:plan", f"no later layer begins module '{module}'",
                remedy="pass some of " + ", ".join(filter(None, names)),
            )  # fmt: skip
        counts[at:] = [devices] * (len(names) - at)
        begun = at
    return counts


def _search(
    layers: Sequence[BurstLayer], devices: Sequence[int], amplification: float, *, frontier: bool
) -> list[BurstPlan]:
    options = np.array([as_integer("devices", each) for each in devices], np.int64)
    if not layers or not len(options) or options[0] != 1 or (np.diff(options) <= 0).any():
        raise InvalidArgumentError(
            "layers" if not layers else "devices", "there are none, or they do not ascend from 1",
            remedy="pass layers, and for example devices=[1, 2, 4]",
        )  # fmt: skip
    if not amplification >= 1:
        raise InvalidArgumentError(
            "amplification", f"{amplification} is below 1, that of a single device"
        )
    most = max(16, min(_MAX_LABELS, _MAX_TOTAL_LABELS // len(layers) // len(options)))
    search = _Search(options, amplification, frontier, most)
    labels = search.chain(layers, np.zeros((1, len(options))))
    found = search.undominated(np.zeros_like(labels.key), *labels[1:4], labels.trace.__getitem__)
    if not len(found.time):
        raise InvalidArgumentError("layers", "every plan takes infinitely long")
    plans = []
    for time_ns, device_ns, trace in zip(found.time, found.cost, found.trace, strict=True):
        names, counts, first = zip(*search.rows(trace, 0), strict=True)
        plans.append(
            BurstPlan(names, counts, first, float(time_ns), float(device_ns), search.exact)
        )
    return plans


class _Labels(NamedTuple):
    """Partial plans.

    Attributes:
        key: int64 [labels], the state: option before times number of options, plus last option.
        time, cost: float64 [labels], time and device time.
        peak: int64 [labels], the number of devices.
        trace: their choices.
    """

    key: Ints
    time: Floats
    cost: Floats
    peak: Ints
    trace: list[Any]

    def take(self, index: Ints) -> _Labels:
        """Return the columns of these labels, without traces."""
        return _Labels(self.key[index], self.time[index], self.cost[index], self.peak[index], [])


Branches = Sequence[tuple[BurstLayer, ...]]


class _Search:
    """States and labels of one search.

    The trace of a chain is (trace before, layer, option, groups before the layer), that of a group
    (first device, branches), with the number and trace of each branch.
    """

    def __init__(self, options: Ints, limit: float, frontier: bool, max_labels: int) -> None:
        self.options, self.limit, self.frontier = options, limit, frontier
        self.exact, self.max_labels = True, max_labels
        self.depth = 0
        """Number of forks around the present layers; within them, labels also differ in peak."""

    def chain(self, layers: Sequence[BurstLayer], enter: Floats) -> _Labels:
        """Return labels of all layers by option before them and option of the last one.

        Args:
            enter: [options before, options], to move the input to the first layer.
        """
        k, first = len(self.options), layers[0]
        if first.branches:
            raise InvalidArgumentError("layers", f"the first one, '{first.name}', has branches")
        labels = self.table(enter + self.work(first), lambda row: (None, first, row % k, ()))
        for before, layer in itertools.pairwise(layers):
            if layer.branches:
                between = self.forked(before, layer.branches)
            else:
                between = self.table(before.move_ns, lambda row: ())
            labels = self.extended(labels, between, layer)
        return labels

    def extended(self, labels: _Labels, between: _Labels, layer: BurstLayer) -> _Labels:
        """Return `labels`, followed by what is between two layers and the second one."""
        k, work = len(self.options), self.work(layer)
        a, b, at = _paired(labels, between, labels.key % k, between.key // k)
        option = b.key % k
        devices = self.options[option]
        return self.undominated(
            a.key // k * k + option, a.time + b.time + work[option],
            a.cost + b.cost + work[option] * devices,
            np.maximum(np.maximum(a.peak, b.peak), devices),
            lambda n: (labels.trace[at[0][n]], layer, int(option[n]), between.trace[at[1][n]]),
        )  # fmt: skip

    def work(self, layer: BurstLayer) -> Floats:
        """Return the times of a layer; infinite for options over the amplification limit."""
        work, k = np.asarray(layer.work_ns, np.float64), len(self.options)
        if work.shape != (k,) or np.shape(layer.move_ns) != (k, k):
            raise InvalidArgumentError(
                "layers", f"'{layer.name}' has times for other numbers of devices",
                remedy=f"pass work_ns of {k} and move_ns of {k} x {k} numbers",
            )  # fmt: skip
        times = [work, layer.move_ns, *([] if layer.apart_ns is None else [layer.apart_ns])]
        if not all((np.asarray(each) >= 0).all() for each in times):
            raise InvalidArgumentError("layers", f"'{layer.name}' has a negative time or NaN")
        most = math.inf if math.isinf(self.limit) else self.limit * work[0] * (1 + 1e-12)
        over = work * self.options > most
        over[0] = False
        return np.where(over, np.inf, work)

    def table(self, times: Floats, trace: Callable[[int], Any], busy: bool = True) -> _Labels:
        """Return a label for each option before and after, from times [before, after].

        Args:
            busy: whether it runs on the devices after it.
        """
        flat = np.asarray(times, np.float64).reshape(-1)
        devices = np.tile(self.options, len(flat) // len(self.options))
        return _Labels(
            np.arange(len(flat)), flat, flat * devices, devices * busy,
            list(map(trace, range(len(flat)))),
        )  # fmt: skip

    def undominated(
        self, key: Ints, time: Floats, cost: Floats, peak: Ints, trace: Callable[[int], Any]
    ) -> _Labels:
        """Return the labels that no other one of their key dominates, with their traces."""
        order = np.lexsort((peak, cost, time, key))
        order = order[np.isfinite(time[order])]
        rank = np.unique(cost, return_inverse=True)[1] if self.frontier else np.zeros_like(key)
        retained = []
        for limit in np.unique(peak[order]) if self.depth else peak[:1] * 0 + self.options[-1]:
            below = order[peak[order] <= limit] if self.depth else order
            # Ascending keys have descending ranges of values, so that each has its own minimum.
            least = np.minimum.accumulate(rank[below] - key[below] * (len(key) + 1))
            better = np.ones(len(below), bool)
            better[1:] = least[1:] < least[:-1]
            chosen = below[better]
            retained.append(chosen[peak[chosen] == limit] if self.depth else chosen)
        index = np.concatenate([order[:0], *retained])
        index = index[np.lexsort((time[index], key[index]))]
        count = np.bincount(key[index])[key[index]]
        if len(index) and count.max() > self.max_labels:
            self.exact = False
            at = np.arange(len(index)) - np.searchsorted(key[index], key[index])
            bucket = [n * self.max_labels // count for n in (at, at - 1)]
            index = index[(bucket[0] != bucket[1]) | (at == count - 1)]
        labels = _Labels(key, time, cost, peak, []).take(index)
        return labels._replace(trace=[trace(n) for n in index.tolist()])

    def rows(self, trace: Any, base: int) -> Iterator[tuple[str, int, int]]:
        """Yield name, number of devices and first device of the layers of a trace, in order."""
        steps = []
        while trace is not None:
            steps.append(trace[1:])
            trace = trace[0]
        for layer, option, groups in reversed(steps):
            placed = [(*branch, first) for first, branches in groups for branch in branches]
            for _, branch, first in sorted(placed, key=lambda row: row[0]):
                yield from self.rows(branch, base + first)
            yield layer.name, int(self.options[option]), base

    # ---- branches: labels by option of the layers before and after them ------------------------

    def forked(self, fork: BurstLayer, branches: Branches) -> _Labels:
        """Return the ways to run branches behind a layer."""
        if len(branches) > _MAX_BRANCHES:
            raise InvalidArgumentError(
                "branches", f"{len(branches)} behind '{fork.name}' are more than {_MAX_BRANCHES}"
            )
        self.depth += 1
        k, everything = len(self.options), (1 << len(branches)) - 1
        occupied = np.maximum(self.options[:, None], self.options).reshape(-1)
        nothing = self.table(np.zeros((k, k)), lambda row: (), busy=False)
        near, apart = (
            self.consecutive([self.branch(fork, branch, apart) for branch in branches], nothing)
            for apart in (False, True)
        )
        # By set of branches: all apart, in simultaneous groups of consecutive ones.
        groups = {0: nothing}
        for chosen in range(1, everything + 1):
            rest = chosen & (chosen - 1)
            parts = [part | (chosen ^ rest) for part in _subsets(rest)]
            groups[chosen] = self.best(
                [self.simultaneous(apart[part], groups[chosen ^ part]) for part in parts]
            )
        found = self.best(
            [
                self.simultaneous(near[part], groups[everything ^ part], occupied)
                for part in _subsets(everything)
            ]
        )
        self.depth -= 1
        return found

    def branch(self, fork: BurstLayer, branch: tuple[BurstLayer, ...], apart: bool) -> _Labels:
        """Return a branch on the devices of the layers around it, or on others."""
        if not branch:
            return self.table(fork.move_ns, lambda row: None, busy=False)
        enter, leave = _moves(fork, apart), _moves(branch[-1], apart)
        labels, after = self.chain(branch, enter), self.table(leave, lambda row: None, busy=False)
        k = len(self.options)
        a, b, at = _paired(labels, after, labels.key % k, after.key // k)
        return self.undominated(
            a.key // k * k + b.key % k, a.time + b.time, a.cost + b.cost, a.peak,
            lambda n: labels.trace[at[0][n]],
        )  # fmt: skip

    def consecutive(self, branches: Sequence[_Labels], nothing: _Labels) -> dict[int, _Labels]:
        """Return each set of branches one after the other; a trace lists (number, trace)."""
        groups = {0: nothing}
        for chosen in range(1, 1 << len(branches)):
            number = chosen.bit_length() - 1
            groups[chosen] = self.then(groups[chosen ^ (1 << number)], branches[number], number)
        return groups

    def then(self, group: _Labels, branch: _Labels, number: int) -> _Labels:
        a, b, at = _paired(group, branch, group.key, branch.key)
        return self.undominated(
            a.key, a.time + b.time, a.cost + b.cost, np.maximum(a.peak, b.peak),
            lambda n: (*group.trace[at[0][n]], (number, branch.trace[at[1][n]])),
        )  # fmt: skip

    def simultaneous(
        self, group: _Labels, others: _Labels, occupied: Ints | None = None
    ) -> _Labels:
        """Return a group on the first devices, simultaneously with groups on later ones.

        Args:
            occupied: by key, the number of devices that the later ones must not include.
        """
        a, b, at = _paired(group, others, group.key, others.key)
        first = a.peak
        if occupied is not None:
            first = np.where(b.peak > 0, np.maximum(first, occupied[a.key]), first)
        peak = first + b.peak

        def trace(n: int) -> Any:
            later = [(g + int(first[n]), branches) for g, branches in others.trace[at[1][n]]]
            return ((0, group.trace[at[0][n]]), *later)

        time = np.where(peak <= self.options[-1], np.maximum(a.time, b.time), np.inf)
        return self.undominated(a.key, time, a.cost + b.cost, peak, trace)

    def best(self, tables: Sequence[_Labels]) -> _Labels:
        """Return the undominated labels of several tables."""
        key, time, cost, peak = (
            np.concatenate(columns) for columns in zip(*(t[:4] for t in tables), strict=True)
        )
        traces = [trace for table in tables for trace in table.trace]
        return self.undominated(key, time, cost, peak, traces.__getitem__)


def _moves(layer: BurstLayer, apart: bool) -> Floats:
    if not apart:
        return layer.move_ns
    return np.full_like(layer.move_ns, np.inf) if layer.apart_ns is None else layer.apart_ns


def _subsets(chosen: int) -> Iterator[int]:
    """Yield the subsets of a bit set, the empty one last."""
    part = chosen
    while part:
        yield part
        part = (part - 1) & chosen
    yield 0


def _paired(
    left: _Labels, right: _Labels, a: Ints, b: Ints
) -> tuple[_Labels, _Labels, tuple[Ints, Ints]]:
    """Return all pairs of labels whose numbers `a` and `b` are equal, and their indices."""
    order = np.argsort(b, kind="stable")
    low, high = (np.searchsorted(b[order], a, side=side) for side in ("left", "right"))
    first = np.repeat(np.arange(len(a)), high - low)
    nth = np.arange(len(first)) - np.repeat(np.cumsum(high - low) - (high - low), high - low)
    second = order[low[first] + nth]
    return left.take(first), right.take(second), (first, second)
