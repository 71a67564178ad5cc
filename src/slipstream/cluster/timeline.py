"""Simulation of jobs on a cluster: times, link loads and bottlenecks."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from slipstream.cluster.cluster import Cluster
from slipstream.cluster.lower import Layout, Lowered, Queues, lower
from slipstream.cluster.routing import Int64s
from slipstream.cluster.tasks import Job
from slipstream.cluster.topology import Float64s
from slipstream.errors import InvalidArgumentError
from slipstream.files import replacing
from slipstream.native import QueueCounts, Schedule
from slipstream.provenance import Provenance


@dataclass(frozen=True)
class Bottleneck:
    """A link, and its share of the time for which transfers were limited by links."""

    link: int
    name: str
    share: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """The result of `simulate`. Times are nanoseconds.

    Fluid transfers have no queues: their durations do not show the tail of latencies.

    Attributes:
        cluster, jobs: the simulated cluster and jobs.
        schedule: schedule of the engine, with every transfer.
        makespan_ns: end of the last task.
    """

    cluster: Cluster
    jobs: tuple[Job, ...]
    schedule: Schedule
    _lowered: Lowered
    provenance: ClassVar[Provenance] = Provenance.SIMULATED

    @property
    def makespan_ns(self) -> float:
        return self.schedule.makespan_ns

    def job(self, number: int) -> JobTimeline:
        """Return the timeline of one job.

        Raises:
            InvalidArgumentError: there is no such job.
        """
        if not 0 <= number < len(self.jobs):
            raise InvalidArgumentError("job", f"{number} is not a job; there are {len(self.jobs)}")
        return JobTimeline(self, number, self._lowered.layouts[number])

    @functools.cached_property
    def link_bytes(self) -> Float64s:
        """Bytes that each link carried, float64 [links]."""
        flows = self.schedule.program.flows
        assert flows is not None
        carried = np.repeat(self._lowered.nbytes, np.diff(flows.path_offset))
        once: Any = np.bincount(flows.path_link, carried, flows.capacity.size)
        return np.asarray(once, np.float64) * self.schedule.program.steps

    @property
    def queues(self) -> QueueCounts | None:
        """Counts of packets: per link the maximum waiting bytes, drops and marks; per transfer of
        the engine, retransmissions. None for fluids."""
        return self.schedule.queues

    def link_utilisation(self) -> Float64s:
        """Return the used share of each link's capacity until the end, float64 [links]."""
        able = self.cluster.topology.capacity * (self.makespan_ns / 1e9)
        return np.divide(self.link_bytes, able, out=np.zeros(able.size), where=able > 0.0)

    @functools.cached_property
    def device_busy_ns(self) -> Float64s:
        """Time that each device computed, float64 [devices]."""
        busy = np.zeros(self.cluster.devices)
        busy[self._lowered.lane_device] = self.schedule.lane_busy_ns[1:]
        return busy

    def bottlenecks(self, job: int | None = None) -> list[Bottleneck]:
        """Return the links that limited the transfers (of one job), the worst first.

        Raises:
            InvalidArgumentError: the simulation ran without ``explain=True``.
        """
        held = self._held_up(None if job is None else self.job(job).layout)
        total = float(held.sum())
        order = np.argsort(-held, kind="stable")
        name = self.cluster.topology.link_name
        return [
            Bottleneck(int(link), name(int(link)), float(held[link]) / total)
            for link in order if held[link] > 0.0
        ]  # fmt: skip

    def _held_up(self, layout: Layout | None) -> Float64s:
        changes = self.schedule.rate_changes
        if changes is None:
            raise InvalidArgumentError(
                "explain", "was False in the simulation", remedy="pass explain=True"
            )
        order = np.argsort(changes.instance, kind="stable")
        instance, since = changes.instance[order], changes.time_ns[order]
        until = np.append(since[1:], 0.0)
        last = np.append(instance[1:] != instance[:-1], True)
        until[last] = self.schedule.end_ns.reshape(-1)[instance[last]]
        spent = until - since
        if layout is not None:
            task = instance % self.schedule.program.tasks
            first = layout.first
            spent = spent * ((task >= first) & (task < first + layout.size * layout.copies))
        held: Any = np.bincount(changes.link[order], spent, self.cluster.topology.links)
        return np.asarray(held, np.float64)

    def to_bytes(self) -> bytes:
        """Return every start and end as bytes, equal for equal simulations."""
        return self.schedule.start_ns.tobytes() + self.schedule.end_ns.tobytes()

    def to_perfetto(self, path: str | Path, *, links: int = 20) -> None:
        """Write a trace for ui.perfetto.dev: devices and communications, and the busiest links.

        Args:
            links: number of links whose rate is drawn, if the simulation had `explain`.
        """
        events = [*self._task_events(), *self._link_events(links)]
        target = Path(path)
        with replacing(target) as temporary:
            temporary.write_text(json.dumps({"displayTimeUnit": "ns", "traceEvents": events}))

    def _task_events(self) -> Iterator[dict[str, Any]]:
        yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "devices"}}
        for number, job in enumerate(self.jobs):
            pid = number + 1
            yield {"ph": "M", "pid": pid, "name": "process_name",
                   "args": {"name": f"{job.name} {number}: communication"}}  # fmt: skip
            timeline = self.job(number)
            devices = None if job.placement is None else job.placement.members.reshape(-1)
            for t, task in enumerate(job.tasks.tasks):
                start, end = timeline.task_ns(t)
                device = task.rank
                if task.rank is not None and devices is not None:
                    device = int(devices[task.rank])
                for k in range(job.iterations):
                    yield {
                        "ph": "X", "name": task.name, "ts": start[k] / 1e3,
                        "dur": (end[k] - start[k]) / 1e3,
                        "pid": 0 if device is not None else pid,
                        "tid": device if device is not None else t,
                        "args": {"job": number, "iteration": k},
                    }  # fmt: skip

    def _link_events(self, links: int) -> Iterator[dict[str, Any]]:
        changes, flows = self.schedule.rate_changes, self.schedule.program.flows
        if changes is None or flows is None:
            return
        busiest = np.argsort(-self.link_utilisation(), kind="stable")[:links].tolist()
        drawn = {link: 0.0 for link in busiest if self.link_bytes[link] > 0.0}
        ends = self.schedule.end_ns.reshape(-1)
        instances = np.unique(changes.instance)
        # At equal times, ends come first, since they free capacity.
        time = np.concatenate([ends[instances], changes.time_ns])
        rate = np.concatenate([np.zeros(instances.size), changes.rate])
        who = np.concatenate([instances, changes.instance])
        rates: dict[int, float] = {}
        for n in np.argsort(time, kind="stable").tolist():
            task = int(who[n]) % self.schedule.program.tasks
            step = float(rate[n]) - rates.get(int(who[n]), 0.0)
            rates[int(who[n])] = float(rate[n])
            for link in flows.path_link[flows.path_offset[task] : flows.path_offset[task + 1]]:
                if int(link) not in drawn:
                    continue
                drawn[int(link)] += step
                name = self.cluster.topology.link_name(int(link))
                yield {
                    "ph": "C", "pid": 10**6, "name": f"{name} (GB/s)", "ts": time[n] / 1e3,
                    "args": {"rate": max(0.0, round(drawn[int(link)], 9))},
                }  # fmt: skip


class JobTimeline:
    """Times of one job.

    Attributes:
        iteration_start_ns, iteration_end_ns: float64 [iterations].
    """

    def __init__(self, timeline: Timeline, number: int, layout: Layout) -> None:
        self._timeline = timeline
        self.number = number
        self.layout = layout
        self.iteration_start_ns = self._times(layout.start)[1]
        self.iteration_end_ns = self._times(layout.finish)[1]

    @property
    def iteration_ns(self) -> Float64s:
        """Duration of each iteration, float64 [iterations]."""
        return self.iteration_end_ns - self.iteration_start_ns

    def task_ns(self, task: int) -> tuple[Float64s, Float64s]:
        """Return start and end of a task in every iteration; both float64 [iterations]."""
        begin, end = int(self.layout.begin[task]), int(self.layout.end[task])
        # A communication begins and ends with tasks that take no time.
        return self._times(begin)[0], self._times(end)[1]

    def exposed_ns(self, task: int) -> Float64s:
        """Return the time of a communication in which no device of the job computes, float64
        [iterations]."""
        job = self._timeline.jobs[self.number]
        start, end = self.task_ns(task)
        computed = [
            self.task_ns(t) for t, task_ in enumerate(job.tasks.tasks) if task_.rank is not None
        ]
        exposed = np.zeros(start.size)
        for k in range(start.size):
            spans = sorted((float(a[k]), float(b[k])) for a, b in computed)
            at = float(start[k])
            for low, high in spans:
                exposed[k] += max(0.0, min(low, float(end[k])) - at)
                at = max(at, min(high, float(end[k])))
            exposed[k] += max(0.0, float(end[k]) - at)
        return exposed

    def _times(self, local: int) -> tuple[Float64s, Float64s]:
        layout, schedule = self.layout, self._timeline.schedule
        task: Int64s = layout.first + local + layout.size * np.arange(layout.copies)
        return schedule.start_ns[:, task].reshape(-1), schedule.end_ns[:, task].reshape(-1)


def simulate(
    cluster: Cluster,
    jobs: Job | Sequence[Job],
    *,
    fidelity: Literal["fluid", "packet"] = "fluid",
    queues: Queues | None = None,
    explain: bool = False,
) -> Timeline:
    """Simulate jobs that share the cluster.

    A collective is its algorithm's transfers with a barrier per phase. Every transfer is a fluid:
    all in progress share the links max-min fairly, by weight, the more urgent first. With
    ``fidelity="packet"`` it travels as packets that wait in queues, are dropped or marked there,
    and are sent by windows. This models incast, congestion and the tail of short transfers, which
    fluids lack, on small clusters (a packet costs about 0.15 microseconds per link).

    Args:
        fidelity: model of transfers.
        queues: queues for packets; by default `Queues()`.
        explain: whether to record what limited every transfer, for `Timeline.bottlenecks` and the
            rates of links in `Timeline.to_perfetto`. Only for fluids.

    Raises:
        InvalidArgumentError: a rank, group, dependency or number is not allowed; or weights or
            `explain` are used with packets.
        ClusterError: devices are not connected, or only by a link without capacity.
        GraphError: tasks wait for each other.
    """
    if fidelity not in ("fluid", "packet"):
        raise InvalidArgumentError("fidelity", f"'{fidelity}' is not fluid or packet")
    packets = fidelity == "packet"
    if packets and explain:
        raise InvalidArgumentError(
            "explain", "is not available for packets, which no single link limits",
            remedy="use fidelity='fluid', or Timeline.queues",
        )  # fmt: skip
    if queues is not None and not packets:
        raise InvalidArgumentError(
            "queues", "have no effect on fluids", remedy="pass fidelity='packet'"
        )
    job_list = [jobs] if isinstance(jobs, Job) else list(jobs)
    lowered = lower(cluster, job_list, (queues or Queues()) if packets else None)
    schedule = lowered.program.compile().simulate(rate_changes=explain)
    return Timeline(cluster, tuple(job_list), schedule, lowered)
