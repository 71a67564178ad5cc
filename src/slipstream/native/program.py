"""The input of the event engine: tasks, lanes, edges, resources, transfers, tensors."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from slipstream.errors import GraphError, InvalidArgumentError

if TYPE_CHECKING:
    from slipstream.native.engine import Compiled

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
# Given in any integer dtype that holds the values, kept in the one the docstring names.
Integers = npt.NDArray[np.integer[Any]]
Float64s = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

# 36 years. With it, no sum of 2^31 such times can overflow, and no time is ever infinite.
MAX_TIME_NS = float(2**60)
# Below what any clock resolves; counting smaller quanta would overflow.
MIN_QUANTUM_NS = 2.0**-10
_MAX_INDEX = 2**31 - 1
_MAX_BYTES = 2**62
_CYCLE_SHOWN = 12
_MOST_PACKETS = 2**28


class Names(Protocol):
    """Names by number, made when a message needs one. A list of them will do."""

    def __getitem__(self, number: int, /) -> str: ...

    def __len__(self) -> int: ...


class Policy(enum.IntEnum):
    """Which of its ready tasks a lane runs next. No lane runs two tasks at once."""

    FIXED = 0
    """In order of task ids, step after step; a task that is not ready holds up the lane."""
    FIFO = 1
    """In order of (ready time, instance); instance = step * tasks + task id."""
    PRIORITY = 2
    """When free, the least (priority, ready time, instance); a started task is never disturbed."""
    PREEMPTIVE = 3
    """As PRIORITY, but a task with a strictly smaller priority number interrupts the running one,
    which resumes later where it stopped. With a quantum, only after whole quanta of work since
    the task was started or resumed."""
    CONCURRENT = 4
    """Any number of tasks at once, each as soon as it is ready: a network, a delay. Such tasks
    have no gap and hold no resources."""


def _none() -> Any:
    return None


@dataclass(frozen=True, eq=False)
class Edges:
    """Dependencies between tasks.

    Attributes:
        src, dst: int32 [edges], task ids.
        delay_ns: float64 [edges]; `dst` may start this long after `src` ended. Default 0.
        lag: uint8 [edges]; 0 within a step, 1 when `src` of one step gates `dst` of the next.
    """

    src: Integers
    dst: Integers
    delay_ns: Float64s = field(default_factory=_none)
    lag: Integers = field(default_factory=_none)

    def __post_init__(self) -> None:
        src = as_integers("edges.src", self.src, np.int32)
        put(self, "src", src)
        put(self, "dst", as_integers("edges.dst", self.dst, np.int32, size=src.size))
        put(self, "delay_ns", as_times("edges.delay_ns", self.delay_ns, src.size, "edge"))
        put(self, "lag", as_integers("edges.lag", self.lag, np.uint8, size=src.size))
        wrong = np.flatnonzero(self.lag > 1)
        if wrong.size:
            e = int(wrong[0])
            raise InvalidArgumentError("edges.lag", f"edge {e} has lag {self.lag[e]}, not 0 or 1")


@dataclass(frozen=True, eq=False)
class Resources:
    """Counting resources, held by a task from its start to its end.

    A preempted task keeps what it holds. All amounts of a task are taken at once. The head of a
    lane waits in the queue of every resource it needs, ordered by (ready time, instance), and
    starts once it is first in each and every amount is free: nobody overtakes, nobody starves,
    and since nobody waits while holding, nothing deadlocks. On a preemptive lane, a suspended
    task resumes while the head waits, for it may hold what the head waits for.

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
        put(self, "capacity", as_integers("resources.capacity", self.capacity, np.int64, low=0))
        task = as_integers("resources.task", self.task, np.int32)
        put(self, "task", task)
        put(self, "resource", as_integers("resources.resource", self.resource, np.int32, task.size))
        put(
            self,
            "amount",
            as_integers("resources.amount", self.amount, np.int64, task.size, 0, _MAX_BYTES),
        )
        check_index("resources.resource", self.resource, self.capacity.size, "need", "resource")


@dataclass(frozen=True, eq=False)
class Packets:
    """How transfers travel as packets: what queues do, and how senders answer.

    A packet waits on every link for those before it, takes its bytes over the capacity, then the
    latency. Senders keep a window of packets under way, which grows with acknowledgements, halves
    with a loss, and shrinks by half of the share of packets that were marked. Acknowledgements take
    the latency of the path and no bandwidth. More urgent transfers go first at every link.

    Attributes:
        latency_ns: float64 [links]; from the end of sending to arrival.
        queue_bytes: float64 [links]; room for packets that wait, headers included; what finds none
            is dropped. May be infinite.
        mark_bytes: float64 [links]; packets that wait beyond this are marked (ECN); infinite: none.
        payload_bytes, header_bytes: of a packet.
        first_window, max_window: packets under way, at the beginning and at most.
        timeout_ns: without an acknowledgement for so long, all under way count as lost; doubles
            with every repetition.

    Raises:
        InvalidArgumentError: a shape or value outside what is allowed.
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
        put(self, "latency_ns", as_times("packets.latency_ns", self.latency_ns, links, "link"))
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
    """What tasks transfer, and over which links.

    A task with bytes takes its duration first (latency), then moves its bytes along its path. All
    transfers of one instant share the links max-min fairly, by weight; a transfer with a smaller
    `Program.priority` is served first, strictly. A rate of 1 byte per nanosecond is 1 GB/s.

    Attributes:
        capacity: float64 [links], bytes per nanosecond, one direction.
        path_offset, path_link: int64 [tasks + 1], int32 [hops]; task t uses the links
            ``path_link[path_offset[t]:path_offset[t + 1]]``, each at most once.
        nbytes: float64 [tasks]; 0 for a task that transfers nothing.
        weight: float64 [tasks]; its share where it competes, for instance how many connections
            it opens. Default 1.
        link_names: [links], for messages only.
        packets: how they travel where queues matter; None: as fluids.

    Raises:
        InvalidArgumentError: a shape or value outside what is allowed; names the element.
        GraphError: a link without capacity on the path of a transfer.
    """

    capacity: Float64s
    path_offset: Integers
    path_link: Integers
    nbytes: Float64s
    weight: Float64s = field(default_factory=_none)
    link_names: Names | None = None
    packets: Packets | None = None

    def __post_init__(self) -> None:
        links = np.size(self.capacity)
        put(self, "capacity", as_amounts("flows.capacity", self.capacity, links, self.link_name))
        tasks = np.size(self.nbytes)
        put(self, "nbytes", as_amounts("flows.nbytes", self.nbytes, tasks, "task"))
        weight: Any = np.ones(tasks) if self.weight is None else self.weight
        weight = as_amounts("flows.weight", weight, tasks, "task")
        put(self, "weight", weight)
        hops = as_integers("flows.path_link", self.path_link, np.int32)
        put(self, "path_link", hops)
        offset = as_integers("flows.path_offset", self.path_offset, np.int64, tasks + 1)
        put(self, "path_offset", offset)
        if offset[0] != 0 or offset[-1] != hops.size or np.any(np.diff(offset) < 0):
            raise InvalidArgumentError(
                "flows.path_offset", f"must rise from 0 to {hops.size}, the number of hops"
            )
        check_index("flows.path_link", hops, links, "hop", "link")
        self._check_transfers(weight)
        if self.packets is not None:
            self._check_packets(self.packets)

    def link_name(self, link: int) -> str:
        """``link 17 (leaf3->spine7)``."""
        return f"link {link} ({self.link_names[link]})" if self.link_names else f"link {link}"

    def _check_packets(self, packets: Packets) -> None:
        if packets.latency_ns.size != self.capacity.size:
            raise InvalidArgumentError(
                "packets", f"is of {packets.latency_ns.size} links, there are {self.capacity.size}"
            )
        heavy = np.flatnonzero((self.nbytes > 0.0) & (self.weight != 1.0))
        if heavy.size:
            raise InvalidArgumentError(
                "flows.weight",
                f"task {heavy[0]} has {self.weight[heavy[0]]}, and packets know no weights",
                remedy="weight 1, or several transfers in place of a heavy one",
            )
        count = float(np.ceil(self.nbytes / packets.payload_bytes).sum())
        if count > _MOST_PACKETS:
            raise InvalidArgumentError(
                "flows.nbytes", f"are {count:.3g} packets, at most {_MOST_PACKETS:.3g} are allowed",
                remedy="fluids, or fewer bytes",
            )  # fmt: skip

    def _check_transfers(self, weight: Float64s) -> None:
        moves = self.nbytes > 0.0
        count = np.diff(self.path_offset)
        for wrong, what in (
            (moves & (count == 0), "has bytes to transfer and no path"),
            (moves & (weight == 0.0), "has weight 0, must be positive"),
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
                "flows.path_link", f"task {at} goes twice over {self.link_name(link)}"
            )


@dataclass(frozen=True, eq=False)
class Tensors:
    """Storage that tasks create and use; see `slipstream.native.memory_timeline`.

    Attributes:
        nbytes: int64 [tensors].
        producer: int32 [tensors]; the task whose start allocates it, -1 when it exists from the
            beginning of every step.
        consumer_offset, consumer_task: int64 [tensors + 1], int32 [uses]; tensor i is used by
            ``consumer_task[consumer_offset[i]:consumer_offset[i + 1]]``, the last of which frees
            it.
        persistent: bool [tensors]; allocated once, never freed. Default False.
        pool: int32 [tensors]; memory it lies in (a device). Default 0.
    """

    nbytes: Integers
    producer: Integers
    consumer_offset: Integers
    consumer_task: Integers
    persistent: Bools = field(default_factory=_none)
    pool: Integers = field(default_factory=_none)

    def __post_init__(self) -> None:
        nbytes = as_integers("tensors.nbytes", self.nbytes, np.int64, low=0, high=_MAX_BYTES)
        put(self, "nbytes", nbytes)
        count = nbytes.size
        put(self, "producer", as_integers("tensors.producer", self.producer, np.int32, count, -1))
        put(self, "pool", as_integers("tensors.pool", self.pool, np.int32, count, low=0))
        uses = as_integers("tensors.consumer_task", self.consumer_task, np.int32)
        put(self, "consumer_task", uses)
        offset = as_integers("tensors.consumer_offset", self.consumer_offset, np.int64, count + 1)
        put(self, "consumer_offset", offset)
        if offset[0] != 0 or offset[-1] != uses.size or np.any(np.diff(offset) < 0):
            raise InvalidArgumentError(
                "tensors.consumer_offset",
                f"must rise from 0 to {uses.size}, the number of consumer_task entries",
            )
        persistent = np.zeros(count, np.bool_) if self.persistent is None else self.persistent
        persistent = np.ascontiguousarray(persistent, np.bool_)
        if persistent.shape != (count,):
            raise InvalidArgumentError("tensors.persistent", f"must have shape ({count},)")
        put(self, "persistent", persistent)


@dataclass(frozen=True, eq=False)
class Program:
    """What the engine simulates. Checked when made; do not change its arrays afterwards.

    Attributes:
        lane: int32 [tasks]; the lane each task runs on.
        duration_ns: float64 [tasks].
        gap_ns: float64 [tasks]; after a task its lane stays blocked this long, while successors
            may already start. Default 0.
        priority: int32 [tasks]; **smaller is more urgent**. Default 0.
        policies: uint8 [lanes] of `Policy`; by default every lane that occurs is FIXED.
        quantum_ns: float64 [lanes]; granularity of preemption, 0 (default) = at once, else at
            least `MIN_QUANTUM_NS`.
        edges: dependencies.
        steps: how often the tasks are repeated; instance (k, t) is task t of step k.
        resources: what tasks hold while they run.
        flows: what tasks transfer over links. Not on PREEMPTIVE lanes.
        tensors: what lives in memory.
        names: [tasks], for messages only.

    Raises:
        InvalidArgumentError: a shape, dtype, index or value outside what is allowed; names the
            element.
        GraphError: a task that needs more of a resource than there is.
    """

    lane: Integers
    duration_ns: Float64s
    gap_ns: Float64s = field(default_factory=_none)
    priority: Integers = field(default_factory=_none)
    policies: Integers = field(default_factory=_none)
    quantum_ns: Float64s = field(default_factory=_none)
    edges: Edges = field(
        default_factory=lambda: Edges(np.empty(0, np.int32), np.empty(0, np.int32))
    )
    steps: int = 1
    resources: Resources | None = None
    flows: Flows | None = None
    tensors: Tensors | None = None
    names: Names | None = None

    def __post_init__(self) -> None:
        lane = as_integers("lane", self.lane, np.int32, low=0)
        put(self, "lane", lane)
        tasks = lane.size
        put(self, "duration_ns", as_times("duration_ns", self.duration_ns, tasks, self.task_name))
        put(self, "gap_ns", as_times("gap_ns", self.gap_ns, tasks, self.task_name))
        low = -(2**31)
        put(self, "priority", as_integers("priority", self.priority, np.int32, tasks, low))
        policies: Any = self.policies
        if policies is None:
            policies = np.zeros(int(lane.max()) + 1 if tasks else 0, np.uint8)
        put(self, "policies", as_integers("policies", policies, np.uint8, high=max(Policy)))
        put(self, "quantum_ns", as_times("quantum_ns", self.quantum_ns, self.lanes, "lane"))
        tiny = np.flatnonzero((self.quantum_ns > 0.0) & (self.quantum_ns < MIN_QUANTUM_NS))
        if tiny.size:
            raise InvalidArgumentError(
                "quantum_ns",
                f"lane {tiny[0]} has {self.quantum_ns[tiny[0]]} ns",
                remedy=f"0 for preemption at once, or at least {MIN_QUANTUM_NS} ns",
            )
        if self.names is not None and len(self.names) != tasks:
            raise InvalidArgumentError("names", f"has {len(self.names)} entries for {tasks} tasks")
        check_index("lane", lane, self.lanes, self.task_name, "lane")
        check_index("edges.src", self.edges.src, tasks, "edge", "task")
        check_index("edges.dst", self.edges.dst, tasks, "edge", "task")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise InvalidArgumentError("steps", f"{self.steps!r} is not a whole number from 1 up")
        if self.steps * max(tasks, 1) > _MAX_INDEX:
            raise InvalidArgumentError(
                "steps", f"{self.steps} steps of {tasks} tasks are more than 2^31 - 1 instances"
            )
        if self.edges.src.size > _MAX_INDEX:
            raise InvalidArgumentError("edges", "more than 2^31 - 1 edges")
        if self.resources is not None:
            check_index("resources.task", self.resources.task, tasks, "need", "task")
            put(self, "_needs", self._sum_needs(self.resources))
        self._check_concurrent()
        if self.flows is not None:
            self._check_flows(self.flows)
        if self.tensors is not None:
            self._check_tensors(self.tensors)

    @property
    def tasks(self) -> int:
        """Tasks in one step."""
        return self.lane.size

    @property
    def lanes(self) -> int:
        return self.policies.size

    @property
    def needs(self) -> tuple[Int64s, Int32s, Int64s] | None:
        """Resources by task: offset [tasks + 1], resource and positive amount; None when none."""
        needs: tuple[Int64s, Int32s, Int64s] | None = getattr(self, "_needs", None)
        return needs if needs is not None and needs[1].size else None

    def task_name(self, task: int) -> str:
        """``task 17 (aten::mm)``."""
        return f"task {task} ({self.names[task]})" if self.names else f"task {task}"

    def compile(self, backend: Literal["auto", "native", "python"] = "auto") -> Compiled:
        """What does not depend on durations, built once per program and kept with it.

        Raises:
            GraphError: dependencies form a cycle; names its tasks.
        """
        from slipstream.native.engine import compile_program

        return compile_program(self, backend)

    def __getstate__(self) -> dict[str, Any]:
        # A compiled program is a pointer: it stays in its process.
        return {key: value for key, value in self.__dict__.items() if key != "_compiled"}

    def _sum_needs(self, given: Resources) -> tuple[Int64s, Int32s, Int64s]:
        wanted = given.amount > 0
        pair = given.task[wanted].astype(np.int64) * given.capacity.size + given.resource[wanted]
        pairs, inverse = np.unique(pair, return_inverse=True)
        amount = np.zeros(pairs.size, np.int64)
        np.add.at(amount, inverse, given.amount[wanted])
        # Where the exact sum may have wrapped round, say the largest amount there can be.
        rounded = np.bincount(inverse, given.amount[wanted], minlength=pairs.size)
        amount[rounded > _MAX_BYTES] = np.iinfo(np.int64).max
        task = pairs // max(given.capacity.size, 1)
        resource = (pairs % max(given.capacity.size, 1)).astype(np.int32)
        over = np.flatnonzero(amount > given.capacity[resource])
        if over.size:
            i = int(over[0])
            raise GraphError(
                f"{self.task_name(int(task[i]))} needs {amount[i]} of resource {resource[i]}, "
                f"which has {given.capacity[resource[i]]}",
                where="resources.amount",
                remedy="raise the capacity or lower the amount; as it is, it can never start",
            )
        offset = np.zeros(self.tasks + 1, np.int64)
        np.cumsum(np.bincount(task, minlength=self.tasks), out=offset[1:])
        return offset, resource, amount

    def _check_concurrent(self) -> None:
        if not (self.policies == Policy.CONCURRENT).any():
            return
        beside = self.policies[self.lane] == Policy.CONCURRENT
        needy = np.zeros(self.tasks, np.bool_)
        if self.needs is not None:
            needy = np.diff(self.needs[0]) > 0
        for wrong, what in ((self.gap_ns > 0.0, "a gap"), (needy, "a resource")):
            found = np.flatnonzero(beside & wrong)
            if found.size:
                raise InvalidArgumentError(
                    "policies",
                    f"{self.task_name(int(found[0]))} has {what}, and its lane is CONCURRENT",
                    remedy="a lane that runs one task at a time",
                )

    def _check_flows(self, flows: Flows) -> None:
        if flows.nbytes.size != self.tasks:
            raise InvalidArgumentError(
                "flows.nbytes", f"has {flows.nbytes.size} entries for {self.tasks} tasks"
            )
        preemptive = self.policies[self.lane] == Policy.PREEMPTIVE
        found = np.flatnonzero(preemptive & (flows.nbytes > 0.0))
        if found.size:
            raise InvalidArgumentError(
                "flows",
                f"{self.task_name(int(found[0]))} transfers on a PREEMPTIVE lane",
                remedy="a CONCURRENT lane: transfers of smaller priority are held up anyway",
            )

    def _check_tensors(self, tensors: Tensors) -> None:
        produced = np.where(tensors.producer < 0, 0, tensors.producer)
        if self.tasks or np.any(tensors.producer >= 0):
            check_index("tensors.producer", produced, self.tasks, "tensor", "task")
        check_index("tensors.consumer_task", tensors.consumer_task, self.tasks, "use", "task")
        if float(tensors.nbytes.sum(dtype=np.float64)) * self.steps > _MAX_BYTES:
            raise InvalidArgumentError("tensors.nbytes", "add up to more than 2^62 bytes")


@dataclass(frozen=True, eq=False)
class RateChanges:
    """When a transfer's rate or bottleneck changed, in order. The end of a transfer, which is that
    of its task, is not listed again.

    Attributes:
        time_ns: float64 [changes].
        rate: float64 [changes], bytes per nanosecond from then on.
        instance: int32 [changes], step * tasks + task.
        link: int32 [changes]; its bottleneck from then on: a link of its path that is full, and
            on which no transfer of its priority has more for its weight.
    """

    time_ns: Float64s
    rate: Float64s
    instance: Int32s
    link: Int32s

    @classmethod
    def room_for(cls, count: int) -> RateChanges:
        return cls(
            np.empty(count), np.empty(count), np.empty(count, np.int32), np.empty(count, np.int32)
        )

    def first(self, count: int) -> RateChanges:
        """The first `count` of them."""
        return RateChanges(
            self.time_ns[:count].copy(),
            self.rate[:count].copy(),
            self.instance[:count].copy(),
            self.link[:count].copy(),
        )


@dataclass(frozen=True, eq=False)
class QueueCounts:
    """What became of packets. Arrays are added to while a simulation runs.

    Attributes:
        peak_bytes: float64 [links]; the most that waited.
        dropped, marked: int64 [links].
        sent_again: int64 [steps * tasks]; packets that a transfer sent more than once.
    """

    peak_bytes: Float64s
    dropped: Int64s
    marked: Int64s
    sent_again: Int64s

    @classmethod
    def zeros(cls, links: int, instances: int) -> QueueCounts:
        """Before anything happened."""
        return cls(
            np.zeros(links), np.zeros(links, np.int64), np.zeros(links, np.int64),
            np.zeros(instances, np.int64),
        )  # fmt: skip


class CycleError(GraphError):
    """Tasks that wait for each other.

    Attributes:
        tasks: ids in order; each gates the next, the last gates the first. A task of a FIXED lane
            also gates the task after it in that lane.
    """

    def __init__(self, program: Program, tasks: Sequence[int]) -> None:
        self.tasks = tuple(tasks)
        shown = [program.task_name(task) for task in self.tasks[:_CYCLE_SHOWN]]
        shown.append(shown[0] if len(shown) == len(self.tasks) else "...")
        super().__init__(
            "dependencies form a cycle: " + " -> ".join(shown),
            where=f"{len(self.tasks)} tasks",
            remedy="drop one of these dependencies; tasks of a FIXED lane also wait for the task "
            "before them in that lane",
        )


def put(owner: object, name: str, value: object) -> None:
    """Sets a field of a frozen dataclass while it is being made."""
    object.__setattr__(owner, name, value)


def as_integers(
    name: str,
    values: Any,
    dtype: type[np.integer[Any]],
    size: int | None = None,
    low: int = 0,
    high: int | None = None,
) -> npt.NDArray[Any]:
    """`values` as a one-dimensional array of `dtype`; None gives zeros.

    Raises:
        InvalidArgumentError: not integers, another size, or a value outside [low, high].
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
    if array.size > _MAX_INDEX:
        raise InvalidArgumentError(name, f"has {array.size} entries, more than 2^31 - 1")
    top = int(np.iinfo(dtype).max) if high is None else int(high)
    if array.size and (int(array.min()) < low or int(array.max()) > top):
        i = int(np.flatnonzero((array < low) | (array > top))[0])
        raise InvalidArgumentError(
            name, f"entry {i} is {array[i]}, must be from {low} to {top}", where=f"{name}[{i}]"
        )
    return frozen(array, dtype)


def as_times(name: str, values: Any, size: int, element: str | Callable[[int], str]) -> Float64s:
    """`values` as float64 [size] nanoseconds; None gives zeros.

    Raises:
        InvalidArgumentError: another shape, or a value that is negative, infinite, not a number
            or beyond `MAX_TIME_NS`.
    """
    if values is None:
        return np.zeros(size, np.float64)
    return _bounded(name, values, size, element, MAX_TIME_NS, " ns", "a finite time of at least 0")


def as_amounts(name: str, values: Any, size: int, element: str | Callable[[int], str]) -> Float64s:
    """`values` as float64 [size], each finite and at least 0.

    Raises:
        InvalidArgumentError: another shape, or a value that is negative, infinite or not a number.
    """
    top = float(np.finfo(np.float64).max)
    return _bounded(name, values, size, element, top, "", "finite and at least 0")


def _bounded(
    name: str,
    values: Any,
    size: int,
    element: str | Callable[[int], str],
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
    element: str | Callable[[int], str],
    target: str,
) -> None:
    """Raises InvalidArgumentError for the first of `values` outside [0, size)."""
    if values.size == 0 or (int(values.min()) >= 0 and int(values.max()) < size):
        return
    i = int(np.flatnonzero((values < 0) | (values >= size))[0])
    place = element(i) if callable(element) else f"{element} {i}"
    raise InvalidArgumentError(
        name, f"{place} names {target} {values[i]}, of {size}", where=f"{name}[{i}]"
    )


def frozen(array: npt.NDArray[Any], dtype: Any) -> npt.NDArray[Any]:
    """A contiguous read-only view of `array` as `dtype`; a copy only where one is needed."""
    view = np.ascontiguousarray(array, dtype).view()
    view.flags.writeable = False
    return view
