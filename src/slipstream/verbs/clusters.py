"""What is told of clusters: what they consist of, what a collective costs, how jobs share one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.cluster import (
    Bottleneck,
    Cluster,
    Collective,
    Cost,
    Group,
    Job,
    JobTimeline,
    LinkKind,
    Quantity,
    Timeline,
)
from slipstream.tables import Field, Table
from slipstream.units import format_bytes, format_duration, format_percent

# Rows of a table of links.
_MOST_LINKS = 10


_Row = tuple[str, object, str, str]
_FACTS: tuple[Field[_Row], ...] = (
    Field.number("", lambda row: row[1]),
    Field.of("known by", lambda row: row[2]),
    Field.of("source", lambda row: row[3], optional=True),
)
_LINKS: tuple[Field[tuple[LinkKind, int]], ...] = (
    Field.of("links", lambda row: row[0].name),
    Field.number("how many", lambda row: row[1]),
    Field.number("each way", lambda row: f"{row[0].bytes_per_s.value / 1e9:.4g} GB/s"),
    Field.number("latency", lambda row: format_duration(row[0].latency_ns.value)),
    Field.of("known by", lambda row: row[0].bytes_per_s.provenance.value),
    Field.of("source", lambda row: row[0].bytes_per_s.source, optional=True),
)


@dataclass(frozen=True)
class Description:
    """A cluster: devices, links, prices, and where each number is from."""

    cluster: Cluster

    def tables(self) -> list[Table]:
        """The cluster, and its links."""
        name: Field[_Row] = Field.of(self.cluster.name, lambda row: row[0])
        note = "a cable is two links, one each way; GB = 10^9 bytes"
        return [
            Table.of(self._facts(), (name, *_FACTS), self.cluster.about),
            Table.of(self._links(), _LINKS, notes=[note]),
        ]

    def to_json(self) -> dict[str, Any]:
        """As results are printed; times in nanoseconds, rates in bytes a second."""
        cluster, topology = self.cluster, self.cluster.topology
        return {
            "name": cluster.name,
            "about": cluster.about,
            "generator": topology.generator,
            "devices": topology.devices,
            "hosts": topology.hosts,
            "device": cluster.device,
            "price_per_hour": cluster.price_per_hour,
            "alpha_ns": cluster.alpha_ns,
            "reduce_ns_per_byte": cluster.reduce_ns_per_byte,
            "regimes": cluster.regimes,
            "links": [
                {
                    "kind": kind.name, "count": count, "bytes_per_s": kind.bytes_per_s,
                    "latency_ns": kind.latency_ns,
                }
                for kind, count in self._links()
            ],
            "calibration": cluster.calibration,
        }  # fmt: skip

    def _links(self) -> list[tuple[LinkKind, int]]:
        topology = self.cluster.topology
        counts = np.bincount(topology.link_kind, minlength=len(topology.link_kinds))
        return list(zip(topology.link_kinds, counts.tolist(), strict=True))

    def _facts(self) -> list[_Row]:
        cluster, topology, device = self.cluster, self.cluster.topology, self.cluster.device
        rows: list[_Row] = [
            ("network", topology.generator, "", ""),
            ("devices", topology.devices, "", device.about if device else ""),
            ("hosts", topology.hosts, "", ""),
            _fact("start-up of a message", cluster.alpha_ns, format_duration),
            _fact("to add up a byte", cluster.reduce_ns_per_byte, format_duration),
            _fact("slowdown beside messages", cluster.overlap_penalty, format_percent),
        ]
        for one in cluster.regimes:
            slowdown = f"a byte: {one.slowdown:.3g} times the links' time"
            name = f"messages from {format_bytes(one.from_bytes)} on"
            rows.append((name, format_duration(one.alpha_ns), "", slowdown))
        if device is None:
            return rows
        if (each := device.price_per_hour) is not None:
            rows.append(_fact("price", each, lambda one: f"{one * topology.devices:,.2f} $/h"))
        for dtype, rate in device.flops.items():
            rows.append(_fact(f"peak {dtype}", rate, lambda one: f"{one / 1e12:.4g} TFLOP/s"))
        if device.memory_bytes is not None:
            rows.append(_fact("memory", device.memory_bytes, format_bytes))
        if (rate_of := device.memory_bytes_per_s) is not None:
            rows.append(_fact("memory rate", rate_of, lambda one: f"{format_bytes(one)}/s"))
        return rows


def _fact(name: str, number: Quantity, shown: Callable[[float], str]) -> _Row:
    return name, shown(number.value), number.provenance.value, number.source


_COSTS: tuple[Field[Cost], ...] = (
    Field.of("algorithm", lambda one: one.algo),
    Field.number("time", lambda one: format_duration(one.duration_ns)),
    Field.number("of it latency", lambda one: format_duration(one.latency_ns)),
    Field.number("sent per rank", lambda one: format_bytes(one.bytes_per_rank)),
    Field.of("slowest link", lambda one: one.bottleneck),
)


@dataclass(frozen=True)
class Costs:
    """What a collective over `group` costs by itself, by every algorithm that fits."""

    cluster: Cluster
    collective: Collective
    group: Group
    costs: tuple[Cost, ...]

    @classmethod
    def of(cls, cluster: Cluster, kind: str, nbytes: int, group: Group, algo: str) -> Costs:
        """The costs of the algorithms that `algo` names.

        Raises:
            InvalidArgumentError, ClusterError: as `Cluster.cost`.
        """
        wanted = Collective(kind, nbytes, group, algo)
        names = cluster.algorithms(wanted, group)
        costs = (cluster.cost(Collective(kind, nbytes, group, name)) for name in names)
        return cls(cluster, wanted, group, tuple(sorted(costs, key=lambda one: one.duration_ns)))

    def table(self) -> Table:
        """One row an algorithm."""
        wanted, group, interval = self.collective, self.group, self.costs[0].interval
        title = f"{wanted.kind} of {format_bytes(wanted.nbytes)} over {group.ranks} ranks" + (
            f", {group.rows} groups at the same time" if group.rows > 1 else ""
        )
        notes = [_basis(self.cluster)]
        if interval is not None:
            low, high = format_duration(interval.low_ns), format_duration(interval.high_ns)
            notes.append(f"nine of ten measurements lay within {low} to {high} of such a figure")
        return Table.of(self.costs, _COSTS, title, notes)

    def to_json(self) -> dict[str, Any]:
        """As results are printed."""
        keys = ("algo", "duration_ns", "latency_ns", "bytes_per_rank", "bottleneck", "interval")
        return {
            "kind": self.collective.kind, "nbytes": self.collective.nbytes,
            "ranks": self.group.ranks, "groups": self.group.rows,
            "provenance": self.cluster.provenance,
            "costs": [{key: getattr(one, key) for key in keys} for one in self.costs],
        }  # fmt: skip


@dataclass(frozen=True)
class JobRun:
    """A job of a shared cluster: its iterations, what shows of communication, what holds it up."""

    number: int
    job: Job
    run: JobTimeline
    exposed_ns: float
    bottlenecks: list[Bottleneck]

    @property
    def held_up(self) -> str:
        """What holds its transfers up most."""
        if not self.bottlenecks:
            return "-"
        return f"{self.bottlenecks[0].name} ({format_percent(self.bottlenecks[0].share)})"


_JOBS: tuple[Field[JobRun], ...] = (
    Field.of("job", lambda one: f"{one.number} {one.job.name}"),
    Field.number("iterations", lambda one: one.job.iterations),
    Field.number(
        "iteration, median", lambda one: format_duration(float(np.median(one.run.iteration_ns)))
    ),
    Field.number("longest", lambda one: format_duration(float(one.run.iteration_ns.max()))),
    Field.number("exposed", lambda one: format_duration(one.exposed_ns)),
    Field.number("end", lambda one: format_duration(float(one.run.iteration_end_ns[-1]))),
    Field.of(
        "held up most by (of its transfers' time)", lambda one: one.held_up, optional=True
    ),
)  # fmt: skip


@dataclass(frozen=True)
class SharedRun:
    """Jobs that ran on a cluster at the same time."""

    cluster: Cluster
    timeline: Timeline

    def jobs(self) -> list[JobRun]:
        """Each job."""
        return [self._job(number, job) for number, job in enumerate(self.timeline.jobs)]

    def _job(self, number: int, job: Job) -> JobRun:
        run = self.timeline.job(number)
        talks = [t for t, task in enumerate(job.tasks.tasks) if task.collective is not None]
        exposed_ns = sum(float(np.median(run.exposed_ns(t))) for t in talks)
        held = [] if self.timeline.queues else list(self.timeline.bottlenecks(number))
        return JobRun(number, job, run, exposed_ns, held)

    def tables(self) -> list[Table]:
        """The jobs, and the links that were used most."""
        used, name = self.timeline.link_utilisation(), self.cluster.topology.link_name
        fields: tuple[Field[int], ...] = (
            Field.of("busiest links", name),
            Field.number("used", lambda link: format_percent(float(used[link]))),
            Field.number("GB", lambda link: f"{self.timeline.link_bytes[link] / 1e9:.4g}"),
        )
        return [
            Table.of(self.jobs(), _JOBS, notes=[_basis(self.cluster), self._transfers()]),
            Table.of([link for link in self._busiest() if used[link] > 0.0], fields),
        ]

    def to_json(self) -> Mapping[str, Any]:
        """As results are printed."""
        timeline, used = self.timeline, self.timeline.link_utilisation()
        payload = {
            "makespan_ns": timeline.makespan_ns,
            "provenance": timeline.provenance,
            "jobs": [
                {
                    "name": one.job.name, "iteration_ns": one.run.iteration_ns,
                    "end_ns": one.run.iteration_end_ns[-1], "exposed_ns": one.exposed_ns,
                    "bottlenecks": one.bottlenecks[:_MOST_LINKS],
                }
                for one in self.jobs()
            ],
            "links": [
                {
                    "name": self.cluster.topology.link_name(link), "utilisation": used[link],
                    "bytes": timeline.link_bytes[link],
                }
                for link in self._busiest()
            ],
        }  # fmt: skip
        if (queues := timeline.queues) is not None:
            payload["queues"] = {
                "peak_bytes": queues.peak_bytes.max(), "dropped": queues.dropped.sum(),
                "marked": queues.marked.sum(), "sent_again": queues.sent_again.sum(),
            }  # fmt: skip
        return payload

    def _busiest(self) -> list[int]:
        order = np.argsort(-self.timeline.link_utilisation(), kind="stable")
        return [int(link) for link in order[:_MOST_LINKS]]

    def _transfers(self) -> str:
        queues = self.timeline.queues
        if queues is None:
            return "fluid transfers: says nothing about queues and tail latencies"
        return (
            f"packets: {queues.dropped.sum()} dropped, {queues.marked.sum()} marked, "
            f"{queues.sent_again.sum()} sent again; up to "
            f"{format_bytes(float(queues.peak_bytes.max()))} waited"
        )


def _basis(cluster: Cluster) -> str:
    if cluster.calibration is not None:
        return f"links: measured {cluster.calibration.date}"
    return f"links: {cluster.provenance.value} (slipstream cluster show has every number's source)"
