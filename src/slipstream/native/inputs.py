"""Parts of a program: dependencies, resources, transfers and tensors, with their checks."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from slipstream.errors import GraphError, InvalidArgumentError

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
# Accepted in any integer dtype that holds the values, stored in the documented one.
Integers = npt.NDArray[np.integer[Any]]
Float64s = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Element = str | Callable[[int], str]

# 36 years. With this bound, no sum of 2^31 times overflows, and no time is infinite.
MAX_TIME_NS = float(2**60)
MAX_INDEX = 2**31 - 1
MAX_BYTES = 2**62
_MAX_PACKETS = 2**28
# Default of an array that is created if it is missing.
DEFAULT: Any = None


class Names(Protocol):
    """Names by number, created when a message needs one, for example a list."""

    def __getitem__(self, number: int, /) -> str: ...

    def __len__(self) -> int: ...


class Policy(enum.IntEnum):
    """Order in which a lane runs its ready tasks. A lane runs one task at a time."""

    FIXED = 0
    """In order of task ids, step after step; a task that is not ready blocks the lane."""
    FIFO = 1
    """In order of (ready time, instance); instance = step * tasks + task id."""
    PRIORITY = 2
    """When free, the smallest (priority, ready time, instance), without preemption."""
    PREEMPTIVE = 3
    """As PRIORITY, but a task with a strictly smaller priority number interrupts the running one,
    which resumes later. With a quantum, only after whole quanta of work since the task was started
    or resumed."""
    CONCURRENT = 4
    """Any number of tasks simultaneously, each as soon as it is ready: a network, a delay. Such
    tasks have no gap and hold no resources."""


@dataclass(frozen=True, eq=False)
class Edges:
    """Dependencies between tasks.

    Attributes:
        src, dst: int32 [edges], task ids.
        delay_ns: float64 [edges]; minimum time from the end of `src` to the start of `dst`.
            Default 0.
        lag: uint8 [edges]; 0 within a step, 1 if `src` of one step gates `dst` of the next.
    """

    src: Integers
    dst: Integers
    delay_ns: Float64s = DEFAULT
    lag: Integers = DEFAULT

    def __post_init__(self) -> None:
        src = put_integers(self, "edges.src", np.int32)
        put_integers(self, "edges.dst", np.int32, src.size)
        put_times(self, "edges.delay_ns", src.size, "edge")
        put_integers(self, "edges.lag", np.uint8, src.size)
        wrong = np.flatnonzero(self.lag > 1)
        if wrong.size:
            e = int(wrong[0])
            raise InvalidArgumentError("edges.lag", f"edge {e} has lag {self.lag[e]}, not 0 or 1")


@dataclass(frozen=True, eq=False)
class Resources:
    """Counting resources, held by a task from its start to its end.

    A preempted task retains its resources. All amounts of a task are acquired together. The head of
    a lane waits in the queue of every resource it needs, ordered by (ready time, instance), and
    starts once it is first in each and every amount is free. So there is no overtaking and no
    starvation, and since no task waits while holding resources, no deadlock. On a preemptive lane a
    suspended task resumes while the head waits, because it may hold what the head waits for.

    Attributes:
        capacity: int64 [resources].
        task, resource: int32 [needs]; `task` needs `amount` of `resource`. Repeated pairs add up.
        amount: int64 [needs], not negative.
    """

    capacity: Integers
    task: Integers
    resource: Integers
    amount: Integers

    def __post_init__(self) -> None:
        put_integers(self, "resources.capacity", np.int64)
        task = put_integers(self, "resources.task", np.int32)
        put_integers(self, "resources.resource", np.int32, task.size)
        put_integers(self, "resources.amount", np.int64, task.size, high=MAX_BYTES)
        check_index("resources.resource", self.resource, self.capacity.size, "need", "resource")


@dataclass(frozen=True, eq=False)
class Packets:
    """Transfers as packets: the behaviour of queues and senders.

    A packet waits on every link for earlier ones, then takes its bytes over the capacity, then the
    latency. Senders have a window of packets in transit, which grows with acknowledgements, halves
    with a loss, and shrinks by half of the share of marked packets. Acknowledgements take the
    latency of the path and no bandwidth. More urgent transfers go first at every link.

    Attributes:
        latency_ns: float64 [links]; time from the end of sending to arrival.
        queue_bytes: float64 [links]; room for waiting packets, including headers; others are
            dropped. May be infinite.
        mark_bytes: float64 [links]; waiting bytes beyond which packets are marked (ECN); infinite:
            never.
        payload_bytes, header_bytes: sizes of a packet's parts.
        first_window, max_window: initial and maximum number of packets in transit.
        timeout_ns: time without an acknowledgement after which all in transit count as lost;
            doubles with every repetition.

    Raises:
        InvalidArgumentError: a shape or value is not allowed.
    """

    latency_ns: Float64s
    queue_bytes: Float64s
    mark_bytes: Float64s
    payload_bytes: float = 1448.0
    header_bytes: float = 90.0
    first_window: int = 10
    max_window: int = 1024
    timeout_ns: float = 10e6

    def __post_init__(self) -> None:
        links = np.size(self.latency_ns)
        put_times(self, "packets.latency_ns", links, "link")
        for name in ("queue_bytes", "mark_bytes"):
            values = np.ascontiguousarray(getattr(self, name), np.float64)
            if values.shape != (links,) or not bool(np.all(values >= 0.0)):
                raise InvalidArgumentError(
                    f"packets.{name}", f"must be {links} numbers that are not negative"
                )
            put(self, name, values)
        for name, low in (("payload_bytes", 1.0), ("header_bytes", 0.0), ("first_window", 1),
                          ("max_window", 1), ("timeout_ns", 1.0)):  # fmt: skip
            value = getattr(self, name)
            if not low <= value < 2.0**31:
                raise InvalidArgumentError(f"packets.{name}", f"{value} is not from {low} to 2^31")


@dataclass(frozen=True, eq=False)
class Flows:
    """Transfers of tasks, and the links they use.

    A task with bytes first takes its duration (latency), then moves its bytes along its path. All
    simultaneous transfers share the links max-min fairly, by weight; a transfer with a smaller
    `Program.priority` is served first, strictly. A rate of 1 byte per nanosecond is 1 GB/s.

    Attributes:
        capacity: float64 [links], bytes per nanosecond, one direction.
        path_offset, path_link: int64 [tasks + 1], int32 [hops]; task t uses the links
            ``path_link[path_offset[t]:path_offset[t + 1]]``, each at most once.
        nbytes: float64 [tasks]; 0 for a task that transfers nothing.
        weight: float64 [tasks]; share when transfers compete, for instance the number of
            connections. Default 1.
        link_names: [links], only for messages.
        packets: model of packets, if queues matter; None for fluids.
        tree_parent: int32 [hops], only for packets. A transfer over a tree of switches that sum has
            the tree's links towards the root, then those back in the same order. For the first half
            this is the place of the next link towards the root, which comes later, or -1 for the
            last; -2 for the second half and for other transfers. Default -2.

    Raises:
        InvalidArgumentError: a shape or value is not allowed; the error names the element.
        GraphError: a link on the path of a transfer has no capacity.
    """

    capacity: Float64s
    path_offset: Integers
    path_link: Integers
    nbytes: Float64s
    weight: Float64s = DEFAULT
    link_names: Names | None = None
    packets: Packets | None = None
    tree_parent: Integers = DEFAULT

    def __post_init__(self) -> None:
        links = np.size(self.capacity)
        put_amounts(self, "flows.capacity", links, self.link_name)
        tasks = np.size(self.nbytes)
        put_amounts(self, "flows.nbytes", tasks, "task")
        weight: Any = self.weight
        put(self, "weight", np.ones(tasks) if weight is None else weight)
        put_amounts(self, "flows.weight", tasks, "task")
        hops = put_integers(self, "flows.path_link", np.int32)
        put_offsets(self, "flows.path_offset", tasks, hops.size, "hops")
        check_index("flows.path_link", hops, links, "hop", "link")
        self._check_transfers()
        if self.packets is not None:
            self._check_packets(self.packets)
        parent: Any = self.tree_parent
        put(self, "tree_parent", np.full(hops.size, -2, np.int32) if parent is None else parent)
        parents = put_integers(self, "flows.tree_parent", np.int32, hops.size, -2)
        self._check_trees(parents)

    def is_tree(self, task: int) -> bool:
        """Whether the task's transfer is over a tree of switches that sum."""
        first, last = self.path_offset[task : task + 2]
        return bool(last > first and self.tree_parent[first] > -2)

    def _check_trees(self, parents: Int32s) -> None:
        for task in np.unique(
            np.searchsorted(self.path_offset, np.flatnonzero(parents > -2), "right")
        ):
            first, last = self.path_offset[task - 1 : task + 1]
            half = int(last - first) // 2
            up, place = parents[first : first + half], np.arange(half)
            wrong = (up != -1) & ~((up > place) & (up < half))
            if (
                2 * half != last - first
                or wrong.any()
                or (parents[first + half : last] != -2).any()
            ):
                raise InvalidArgumentError(
                    "flows.tree_parent", f"task {task - 1} needs a later link or -1 for the first "
                    "half of its links, and -2 for the second",
                )  # fmt: skip
            if self.packets is None:
                raise InvalidArgumentError(
                    "flows.tree_parent", f"task {task - 1} is a tree, which needs packets"
                )

    def link_name(self, link: int) -> str:
        """Return ``link 17 (leaf3->spine7)``."""
        return f"link {link} ({self.link_names[link]})" if self.link_names else f"link {link}"

    def _check_packets(self, packets: Packets) -> None:
        if packets.latency_ns.size != self.capacity.size:
            raise InvalidArgumentError(
                "packets",
                f"has {packets.latency_ns.size} links, but there are {self.capacity.size}",
            )
        heavy = np.flatnonzero((self.nbytes > 0.0) & (self.weight != 1.0))
        if heavy.size:
            raise InvalidArgumentError(
                "flows.weight",
                f"task {heavy[0]} has {self.weight[heavy[0]]}, but packets have no weights",
                remedy="use weight 1, or several transfers instead of a heavy one",
            )
        count = float(np.ceil(self.nbytes / packets.payload_bytes).sum())
        if count > _MAX_PACKETS:
            raise InvalidArgumentError(
                "flows.nbytes", f"are {count:.3g} packets, at most {_MAX_PACKETS:.3g} are allowed",
                remedy="use fluids, or fewer bytes",
            )  # fmt: skip

    def _check_transfers(self) -> None:
        moves = self.nbytes > 0.0
        count = np.diff(self.path_offset)
        for wrong, what in (
            (moves & (count == 0), "has bytes to transfer but no path"),
            (moves & (self.weight == 0.0), "has weight 0, but it must be positive"),
        ):
            if wrong.any():
                raise InvalidArgumentError("flows", f"task {int(np.flatnonzero(wrong)[0])} {what}")
        task = np.repeat(np.arange(count.size), count)
        closed = np.flatnonzero((self.capacity[self.path_link] == 0.0) & moves[task])
        if closed.size:
            hop = int(closed[0])
            raise GraphError(
                f"{self.link_name(int(self.path_link[hop]))} has no capacity, "
                f"and task {task[hop]} transfers over it",
                where="flows.capacity",
                remedy="give the link a capacity, or route around it",
            )
        pair = np.sort(task * max(self.capacity.size, 1) + self.path_link)
        twice = np.flatnonzero(pair[1:] == pair[:-1])
        if twice.size:
            at, link = divmod(int(pair[twice[0]]), self.capacity.size)
            raise InvalidArgumentError(
                "flows.path_link", f"task {at} uses a link twice: {self.link_name(link)}"
            )


@dataclass(frozen=True, eq=False)
class Tensors:
    """Storage that tasks create and use; see `slipstream.native.memory_timeline`.

    Attributes:
        nbytes: int64 [tensors].
        producer: int32 [tensors]; the task whose start allocates it, -1 if it exists from the
            beginning of every step.
        consumer_offset, consumer_task: int64 [tensors + 1], int32 [uses]; tensor i is used by
            ``consumer_task[consumer_offset[i]:consumer_offset[i + 1]]``, the last of which frees
            it.
        persistent: bool [tensors]; allocated once, never freed. Default False.
        pool: int32 [tensors]; the memory that holds it (a device). Default 0.
    """

    nbytes: Integers
    producer: Integers
    consumer_offset: Integers
    consumer_task: Integers
    persistent: Bools = DEFAULT
    pool: Integers = DEFAULT

    def __post_init__(self) -> None:
        count = put_integers(self, "tensors.nbytes", np.int64, high=MAX_BYTES).size
        put_integers(self, "tensors.producer", np.int32, count, -1)
        put_integers(self, "tensors.pool", np.int32, count)
        uses = put_integers(self, "tensors.consumer_task", np.int32)
        put_offsets(self, "tensors.consumer_offset", count, uses.size, "consumer_task entries")
        persistent = np.zeros(count, np.bool_) if self.persistent is None else self.persistent
        persistent = np.ascontiguousarray(persistent, np.bool_)
        if persistent.shape != (count,):
            raise InvalidArgumentError("tensors.persistent", f"must have shape ({count},)")
        put(self, "persistent", persistent)


def put(owner: object, name: str, value: object) -> None:
    """Set a field of a frozen dataclass during its construction."""
    object.__setattr__(owner, name, value)


def put_integers(
    owner: object,
    name: str,
    dtype: type[np.integer[Any]],
    size: int | None = None,
    low: int = 0,
    high: int | None = None,
) -> npt.NDArray[Any]:
    """Convert the field that `name` ends with by `as_integers`."""
    field = name.rpartition(".")[2]
    array = as_integers(name, getattr(owner, field), dtype, size, low, high)
    put(owner, field, array)
    return array


def put_offsets(owner: object, name: str, rows: int, entries: int, what: str) -> None:
    """Convert a field to int64 [rows + 1], which must rise from 0 to the number of entries."""
    offset = put_integers(owner, name, np.int64, rows + 1)
    if offset[0] != 0 or offset[-1] != entries or np.any(np.diff(offset) < 0):
        raise InvalidArgumentError(name, f"must rise from 0 to {entries}, the number of {what}")


def put_times(owner: object, name: str, size: int, element: Element) -> None:
    """Convert the field that `name` ends with by `as_times`."""
    field = name.rpartition(".")[2]
    put(owner, field, as_times(name, getattr(owner, field), size, element))


def put_amounts(owner: object, name: str, size: int, element: Element) -> None:
    """Convert the field that `name` ends with to float64 [size], each finite and at least 0."""
    field, top = name.rpartition(".")[2], float(np.finfo(np.float64).max)
    values = getattr(owner, field)
    put(owner, field, _bounded(name, values, size, element, top, "", "finite and at least 0"))


def as_integers(
    name: str,
    values: Any,
    dtype: type[np.integer[Any]],
    size: int | None = None,
    low: int = 0,
    high: int | None = None,
) -> npt.NDArray[Any]:
    """Return `values` as a one-dimensional array of `dtype`; zeros for None.

    Raises:
        InvalidArgumentError: they are not integers, or have another size or values outside
            [low, high].
    """
    if values is None:
        return np.zeros(size or 0, dtype)
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(dtype).reshape(-1)
    if array.ndim != 1 or (size is not None and array.size != size):
        expected = "one-dimensional" if size is None else f"({size},)"
        raise InvalidArgumentError(name, f"has shape {array.shape}, must be {expected}")
    if array.dtype.kind not in "iub":
        raise InvalidArgumentError(name, f"has dtype {array.dtype}, must be integers")
    if array.size > MAX_INDEX:
        raise InvalidArgumentError(name, f"has {array.size} entries, more than 2^31 - 1")
    top = int(np.iinfo(dtype).max) if high is None else int(high)
    if array.size and (int(array.min()) < low or int(array.max()) > top):
        i = int(np.flatnonzero((array < low) | (array > top))[0])
        raise InvalidArgumentError(
            name, f"entry {i} is {array[i]}, must be from {low} to {top}", where=f"{name}[{i}]"
        )
    return frozen(array, dtype)


def as_times(name: str, values: Any, size: int, element: Element) -> Float64s:
    """Return `values` as float64 [size] nanoseconds; zeros for None.

    Raises:
        InvalidArgumentError: the shape differs, or a value is negative, infinite, not a number
            or above `MAX_TIME_NS`.
    """
    if values is None:
        return np.zeros(size, np.float64)
    return _bounded(name, values, size, element, MAX_TIME_NS, " ns", "a finite time of at least 0")


def _bounded(
    name: str,
    values: Any,
    size: int,
    element: Element,
    top: float,
    unit: str,
    demand: str,
) -> Float64s:
    try:
        array: Float64s = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(name, f"is not an array of numbers: {error}") from error
    if array.size == 0:
        array = array.reshape(-1)
    if array.shape != (size,):
        raise InvalidArgumentError(name, f"has shape {array.shape}, must be ({size},)")
    # A NaN fails every comparison, so it is caught as well.
    if size and not (array.min() >= 0.0 and array.max() <= top):
        i = int(np.flatnonzero(~((array >= 0.0) & (array <= top)))[0])
        place = element(i) if callable(element) else f"{element} {i}"
        raise InvalidArgumentError(
            name, f"{place} has {array[i]}{unit}, must be {demand}", where=f"{name}[{i}]"
        )
    return frozen(array, np.float64)


def check_index(
    name: str,
    values: npt.NDArray[Any],
    size: int,
    element: Element,
    target: str,
) -> None:
    """Raise InvalidArgumentError for the first of `values` outside [0, size)."""
    if values.size == 0 or (int(values.min()) >= 0 and int(values.max()) < size):
        return
    i = int(np.flatnonzero((values < 0) | (values >= size))[0])
    place = element(i) if callable(element) else f"{element} {i}"
    raise InvalidArgumentError(
        name, f"{place} names {target} {values[i]}, of {size}", where=f"{name}[{i}]"
    )


def frozen(array: npt.NDArray[Any], dtype: Any) -> npt.NDArray[Any]:
    """Return a contiguous read-only view of `array` as `dtype`, copied only if necessary."""
    view = np.ascontiguousarray(array, dtype).view()
    view.flags.writeable = False
    return view
