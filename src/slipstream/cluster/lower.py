"""Lowering of jobs on a cluster to one program of the event engine.

A computation is a task on its device's lane. A collective is the transfers of its phases, with a
barrier after each: transfers of a phase are independent flows, like connections, so that a slow one
does not delay the others before the barrier.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.cluster.cluster import Cluster
from slipstream.cluster.collective import Collective
from slipstream.cluster.cost import placed
from slipstream.cluster.groups import Group
from slipstream.cluster.regimes import regime_of
from slipstream.cluster.routing import Int32s, Int64s
from slipstream.cluster.tasks import Job, Task
from slipstream.cluster.topology import Float64s, Topology
from slipstream.errors import InvalidArgumentError
from slipstream.native import Edges, Flows, Packets, Policy, Program

_Array = npt.NDArray[Any]
# Lane of all transfers, waits and barriers; after it, one lane per computing device.
_SHARED_LANE = 0


# Attributes of the engine's tasks, with defaults.
_COLUMNS: dict[str, float] = {
    "lane": _SHARED_LANE, "duration": 0.0, "priority": 0, "nbytes": 0.0, "slowdown": 1.0,
    "weight": 1.0, "hops": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Queues:
    """Queues at the head of every link for transfers as packets; see `native.Packets`.

    Attributes:
        nbytes: room for waiting packets, including headers.
        mark_bytes: waiting bytes beyond which packets are marked (ECN); infinite: never.
        payload_bytes, header_bytes: sizes of a packet's parts.
        first_window, max_window: initial and maximum number of a transfer's packets in transit.
        timeout_ns: time without an acknowledgement after which a sender restarts.
    """

    nbytes: float = 1e6
    mark_bytes: float = math.inf
    payload_bytes: float = 1448.0
    header_bytes: float = 90.0
    first_window: int = 10
    max_window: int = 1024
    timeout_ns: float = 10e6

    def __post_init__(self) -> None:
        for name in ("nbytes", "mark_bytes"):
            if not getattr(self, name) >= 0.0:
                raise InvalidArgumentError(name, f"{getattr(self, name)} is not a size")

    def on(self, topology: Topology) -> Packets:
        """Return the engine's model; capacities of links count both payload and headers."""
        settings = asdict(self)
        queue, mark = (
            np.full(topology.links, settings.pop(name)) for name in ("nbytes", "mark_bytes")
        )
        return Packets(topology.latency_ns, queue, mark, **settings)


@dataclass
class Block:
    """Tasks of the engine for one job, numbered from 0."""

    columns: dict[str, list[_Array]] = field(default_factory=lambda: {k: [] for k in _COLUMNS})
    links: list[_Array] = field(default_factory=lambda: [np.empty(0, np.int32)])
    src: list[Int64s] = field(default_factory=list)
    dst: list[Int64s] = field(default_factory=list)
    size: int = 0

    def add(self, count: int, *, links: Int32s | None = None, **columns: Any) -> Int64s:
        """Add tasks, with one value per column for all or one per task; return their numbers."""
        for name, default in _COLUMNS.items():
            self.columns[name].append(np.full(count, columns.get(name, default)))
        if links is not None:
            self.links.append(links)
        first, self.size = self.size, self.size + count
        return np.arange(first, self.size)

    def order(self, before: Int64s, after: Int64s) -> None:
        """Let all of `before` gate all of `after`; one of the two has one task."""
        src, dst = np.broadcast_arrays(before, after)
        self.src.append(src)
        self.dst.append(dst)


@dataclass(frozen=True, eq=False)
class Layout:
    """Position of a job in the program.

    Attributes:
        first: number of its first task in the program.
        size: tasks of one iteration.
        copies: number of copies in the program; 1 if the program has steps instead.
        begin, end: per task of the job, the tasks of the program that begin and end it.
        start, finish: tasks that begin and end the whole iteration.
    """

    first: int
    size: int
    copies: int
    begin: Int64s
    end: Int64s
    start: int
    finish: int


@dataclass(frozen=True, eq=False)
class Lowered:
    """A program of the engine, and the positions of the jobs in it.

    Attributes:
        lane_device: device of each lane from 1.
        nbytes: float64 [tasks]; bytes that each transfers. The program's flows have as many bytes
            as pass at the links' capacities in the transfer's time.
    """

    program: Program
    layouts: tuple[Layout, ...]
    lane_device: Int64s
    nbytes: Float64s


def lower(cluster: Cluster, jobs: Sequence[Job], queues: Queues | None = None) -> Lowered:
    """Lower jobs to a program, after checking everything: the program is valid.

    Args:
        queues: queues of links, for transfers as packets; None for fluids.

    Raises:
        InvalidArgumentError: a rank, group or dependency does not exist.
        ClusterError: devices are not connected, or only by a link without capacity.
    """
    if not jobs:
        raise InvalidArgumentError("jobs", "is empty")
    if queues is not None and cluster.regimes:
        raise InvalidArgumentError(
            "fidelity", f"packets of {cluster.name} would pass at its links' capacities, but "
            "its messages do not (regimes)", remedy="use fidelity='fluid'",
        )  # fmt: skip
    devices = [_devices(cluster, job, number) for number, job in enumerate(jobs)]
    computing = np.unique(
        np.concatenate([_computing(job, ranks) for job, ranks in zip(jobs, devices, strict=True)])
    )
    # If all jobs have equally many iterations, the engine repeats the program; otherwise copies do.
    repeats = {job.iterations for job in jobs}
    steps = repeats.pop() if len(repeats) == 1 else 1
    blocks, layouts, first = [], [], 0
    for number, (job, ranks) in enumerate(zip(jobs, devices, strict=True)):
        block, layout = _lower_job(cluster, job, number, ranks, computing, queues)
        copies = job.iterations // steps
        blocks.append(block)
        layouts.append(replace(layout, first=first, copies=copies))
        first += block.size * copies
    program, nbytes = _join(cluster, jobs, blocks, layouts, steps, computing.size, queues)
    return Lowered(program, tuple(layouts), computing, nbytes)


def _devices(cluster: Cluster, job: Job, number: int) -> Int64s:
    if job.placement is None:
        return np.arange(cluster.devices)
    devices = job.placement.members.reshape(-1)
    wrong = devices[(devices < 0) | (devices >= cluster.devices)]
    if wrong.size:
        raise InvalidArgumentError(
            "placement", f"of job {number} ({job.name}) contains device {wrong[0]}, but the "
            f"cluster has {cluster.devices}",
        )  # fmt: skip
    return devices


def _computing(job: Job, devices: Int64s) -> Int64s:
    ranks = [task.rank for task in job.tasks.tasks if task.rank is not None]
    return devices[[rank for rank in ranks if rank < devices.size]]


def _lower_job(
    cluster: Cluster,
    job: Job,
    number: int,
    devices: Int64s,
    computing: Int64s,
    queues: Queues | None,
) -> tuple[Block, Layout]:
    block = Block()
    tasks = job.tasks.tasks
    arrival = block.add(1, duration=job.arrival_ns)
    start = block.add(1)
    block.order(arrival, start)
    begin, end = np.zeros(len(tasks), np.int64), np.zeros(len(tasks), np.int64)
    for t, task in enumerate(tasks):
        where = f"task {t} ({task.name}) of job {number} ({job.name})"
        if task.collective is not None:
            begin[t], end[t] = _lower_collective(
                cluster, job, task.collective, devices, block, queues
            )
        elif task.rank is not None:
            if task.rank >= devices.size:
                raise InvalidArgumentError(
                    "rank", f"{where} has rank {task.rank}, but the job has {devices.size} devices"
                )
            lane = 1 + int(np.searchsorted(computing, devices[task.rank]))
            begin[t] = end[t] = block.add(
                1, lane=lane, duration=task.duration_ns, priority=task.priority + job.priority
            )[0]
        else:
            begin[t] = end[t] = block.add(1, duration=task.duration_ns)[0]
    finish = block.add(1)
    _order_tasks(block, tasks, begin, end, int(start[0]), int(finish[0]), f"job {number}")
    return block, Layout(0, block.size, 1, begin, end, int(start[0]), int(finish[0]))


def _order_tasks(
    block: Block, tasks: Sequence[Task], begin: Int64s, end: Int64s, start: int, finish: int,
    where: str,
) -> None:  # fmt: skip
    last = np.ones(len(tasks), np.bool_)
    pairs: list[tuple[int, int]] = []
    for t, task in enumerate(tasks):
        for on in task.after:
            if not 0 <= on < len(tasks):
                raise InvalidArgumentError(
                    "after", f"task {t} ({task.name}) of {where} waits for task {on}, which does "
                    f"not exist",
                )  # fmt: skip
            pairs.append((int(end[on]), int(begin[t])))
            last[on] = False
        if not task.after:
            pairs.append((start, int(begin[t])))
    pairs += [(int(end[t]), finish) for t in np.flatnonzero(last)]
    table = np.array(pairs, np.int64)
    block.order(table[:, 0], table[:, 1])


def _lower_collective(
    cluster: Cluster,
    job: Job,
    collective: Collective,
    devices: Int64s,
    block: Block,
    queues: Queues | None,
) -> tuple[int, int]:
    """Lower a collective; return the numbers of the tasks that begin and end it."""
    if collective.group is None:
        used = devices if job.placement is not None else cluster.all().members.reshape(-1)
        shape = job.placement.shape if job.placement is not None else cluster.all().shape
        rows = job.placement is not None and job.placement.rows > 1
        group = Group.of(used, () if rows else shape)
    else:
        ranks = collective.group.members
        if int(ranks.max()) >= devices.size or int(ranks.min()) < 0:
            raise InvalidArgumentError(
                "group", f"of {collective.kind} contains rank {int(ranks.max())}, but the job "
                f"{job.name} has {devices.size} devices",
            )  # fmt: skip
        group = Group(devices[ranks], collective.group.shape)
    servers = tuple(int(devices[s]) if s < devices.size else s for s in collective.servers)
    collective = replace(collective, group=group, servers=servers)
    chosen = collective.algo in ("auto", "2d")
    algo = cluster.cost(collective).algo if chosen else collective.algo
    begin = before = block.add(1)
    if queues is not None and algo == "in_network":
        raise InvalidArgumentError(
            "algo", "in_network needs aggregating switches, which packets do not have",
            remedy="use fidelity='fluid'",
        )  # fmt: skip
    regimes = cluster.message_regimes
    for phase in placed(cluster.topology, collective, group, algo, regimes[0].alpha_ns):
        regime = regime_of(regimes, collective.nbytes, phase.message)
        ahead = phase.latency_ns(regime) + collective.nbytes * phase.per_byte_ns(
            regime, cluster.reduce_ns_per_byte.value
        )
        if queues is not None:
            # Packets take the latency of their path themselves.
            ahead -= phase.delay_ns
        flows = block.add(
            phase.src.size,
            duration=ahead,
            priority=collective.priority + job.priority,
            nbytes=np.where(phase.counts > 0, phase.share * collective.nbytes, 0.0),
            slowdown=regime.slowdown,
            weight=collective.weight * job.weight,
            hops=phase.counts,
            links=phase.links,
        )
        block.order(before, flows)
        before = block.add(1)
        block.order(flows, before)
    return int(begin[0]), int(before[0])


def _join(
    cluster: Cluster,
    jobs: Sequence[Job],
    blocks: Sequence[Block],
    layouts: Sequence[Layout],
    steps: int,
    computing: int,
    queues: Queues | None,
) -> tuple[Program, Float64s]:
    src: list[Int64s] = []
    dst: list[Int64s] = []
    lag: list[npt.NDArray[np.uint8]] = []
    columns: dict[str, list[_Array]] = {name: [] for name in (*_COLUMNS, "links")}
    for block, layout in zip(blocks, layouts, strict=True):
        for name, parts in {**block.columns, "links": block.links}.items():
            columns[name].append(np.tile(np.concatenate(parts), layout.copies))
        shift = layout.first + layout.size * np.arange(layout.copies)[:, None]
        for ends, chunks in ((src, block.src), (dst, block.dst)):
            ends.append((np.concatenate(chunks)[None, :] + shift).reshape(-1))
        lag.append(np.zeros(src[-1].size, np.uint8))
        if steps > 1:
            src.append(np.array([layout.first + layout.finish]))
            dst.append(np.array([layout.first + layout.start]))
            lag.append(np.ones(1, np.uint8))
        else:
            src.append(shift[:-1, 0] + layout.finish)
            dst.append(shift[1:, 0] + layout.start)
            lag.append(np.zeros(layout.copies - 1, np.uint8))
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    topology = cluster.topology
    program = Program(
        lane=joined["lane"],
        duration_ns=joined["duration"],
        priority=joined["priority"],
        policies=np.array([Policy.CONCURRENT, *[Policy.PRIORITY] * computing], np.uint8),
        edges=Edges(np.concatenate(src), np.concatenate(dst), lag=np.concatenate(lag)),
        steps=steps,
        flows=Flows(
            capacity=topology.capacity / 1e9,
            path_offset=np.concatenate([[0], np.cumsum(joined["hops"])]),
            path_link=joined["links"].astype(np.int32),
            nbytes=joined["nbytes"] * joined["slowdown"],
            weight=joined["weight"],
            link_names=_Names(topology.links, topology.link_name),
            packets=None if queues is None else queues.on(topology),
        ),
        names=_Names(joined["lane"].size, functools.partial(_task_name, jobs, layouts)),
    )
    return program, joined["nbytes"]


@dataclass(frozen=True)
class _Names:
    """A sequence of `count` names, each created when a message needs it."""

    count: int
    name_of: Callable[[int], str]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int, /) -> str:
        return self.name_of(number)


def _task_name(jobs: Sequence[Job], layouts: Sequence[Layout], task: int) -> str:
    """Return a task's name: ``all_reduce of job 3 (job)``."""
    firsts = [layout.first for layout in layouts]
    number = int(np.searchsorted(firsts, task, side="right")) - 1
    layout, job = layouts[number], jobs[number]
    local = (task - layout.first) % layout.size
    inside = np.flatnonzero((layout.begin <= local) & (local <= layout.end))
    name = job.tasks.tasks[int(inside[0])].name if inside.size else "start or end"
    return f"{name} of job {number} ({job.name})"
