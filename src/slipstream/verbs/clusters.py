"""Report what clusters consist of, what a collective costs and how jobs share a cluster."""

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

# Rows of a table of links, and bottlenecks per job.
_MAX_LINKS = 10


_Row = tuple[str, object, str, str]
_FACTS: tuple[Field[_Row], ...] = (
    Field.number("", lambda row: row[1]),
    Field.of("provenance", lambda row: row[2]),
    Field.of("source", lambda row: row[3], optional=True),
)
_LINKS: tuple[Field[tuple[LinkKind, int]], ...] = (
    Field.of("links", lambda row: row[0].name),
    Field.number("count", lambda row: row[1]),
    Field.number("per direction", lambda row: f"{row[0].bytes_per_s.value / 1e9:.4g} GB/s"),
    Field.number("latency", lambda row: format_duration(row[0].latency_ns.value)),
    Field.of("provenance", lambda row: row[0].bytes_per_s.provenance.value),
    Field.of("source", lambda row: row[0].bytes_per_s.source, optional=True),
)


@dataclass(frozen=True)
class Description:
    """A cluster's devices, links and prices, with the source of each number."""

    cluster: Cluster

    def tables(self) -> list[Table]:
        name: Field[_Row] = Field.of(self.cluster.name, lambda row: row[0])
        note = "a cable counts as two links, one per direction; GB = 10^9 bytes"
        return [
            Table.of(self._facts(), (name, *_FACTS), self.cluster.about),
            Table.of(self._links(), _LINKS, notes=[note]),
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON payload; times in nanoseconds, rates in bytes per second."""
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
            _fact("start-up per message", cluster.alpha_ns, format_duration),
            _fact("reduction per byte", cluster.reduce_ns_per_byte, format_duration),
            _fact("slowdown during messages", cluster.overlap_penalty, format_percent),
        ]
        for regime in cluster.regimes:
            name = f"messages from {format_bytes(regime.from_bytes)}"
            value = f"{format_duration(regime.alpha_ns)}, {regime.slowdown:.3g} times per byte"
            rows.append((name, value, "", "times the links' time per byte"))
        if device is None:
            return rows
        if (price := device.price_per_hour) is not None:
            rows.append(_fact("price", price, lambda rate: f"{rate * topology.devices:,.2f} $/h"))
        for dtype, rate in device.flops.items():
            rows.append(_fact(f"peak {dtype}", rate, lambda rate: f"{rate / 1e12:.4g} TFLOP/s"))
        if device.memory_bytes is not None:
            rows.append(_fact("memory", device.memory_bytes, format_bytes))
        if (bandwidth := device.memory_bytes_per_s) is not None:
            rows.append(
                _fact("memory bandwidth", bandwidth, lambda rate: f"{format_bytes(rate)}/s")
            )
        return rows


def _fact(name: str, number: Quantity, shown: Callable[[float], str]) -> _Row:
    return name, shown(number.value), number.provenance.value, number.source


_COSTS: tuple[Field[Cost], ...] = (
    Field.of("algorithm", lambda cost: cost.algo),
    Field.number("time", lambda cost: format_duration(cost.duration_ns)),
    Field.number("of which latency", lambda cost: format_duration(cost.latency_ns)),
    Field.number("sent per rank", lambda cost: format_bytes(cost.bytes_per_rank)),
    Field.of("slowest link", lambda cost: cost.bottleneck),
)


@dataclass(frozen=True)
class Costs:
    """Cost of a collective over `group` alone on the cluster, by every algorithm that fits."""

    cluster: Cluster
    collective: Collective
    group: Group
    costs: tuple[Cost, ...]

    @classmethod
    def of(cls, cluster: Cluster, kind: str, nbytes: int, group: Group, algo: str) -> Costs:
        """Return the costs of the algorithms that `algo` names."""
        collective = Collective(kind, nbytes, group, algo)
        names = cluster.algorithms(collective, group)
        costs = (cluster.cost(Collective(kind, nbytes, group, name)) for name in names)
        return cls(cluster, collective, group, tuple(sorted(costs, key=lambda c: c.duration_ns)))

    def table(self) -> Table:
        collective, group, interval = self.collective, self.group, self.costs[0].interval
        title = (
            f"{collective.kind} of {format_bytes(collective.nbytes)} over {group.ranks} ranks"
            + (f", {group.rows} groups at the same time" if group.rows > 1 else "")
        )
        notes = [_basis(self.cluster)]
        if interval is not None:
            low, high = format_duration(interval.low_ns), format_duration(interval.high_ns)
            notes.append(f"9 of 10 measurements fall within {low} to {high} of such a time")
        return Table.of(self.costs, _COSTS, title, notes)

    def to_json(self) -> dict[str, Any]:
        keys = ("algo", "duration_ns", "latency_ns", "bytes_per_rank", "bottleneck", "interval")
        return {
            "kind": self.collective.kind, "nbytes": self.collective.nbytes,
            "ranks": self.group.ranks, "groups": self.group.rows,
            "provenance": self.cluster.provenance,
            "costs": [{key: getattr(cost, key) for key in keys} for cost in self.costs],
        }  # fmt: skip


@dataclass(frozen=True)
class JobRun:
    """Iterations, exposed communication and bottlenecks of a job on a shared cluster."""

    number: int
    job: Job
    run: JobTimeline
    exposed_ns: float
    bottlenecks: list[Bottleneck]

    @property
    def held_up(self) -> str:
        if not self.bottlenecks:
            return "-"
        return f"{self.bottlenecks[0].name} ({format_percent(self.bottlenecks[0].share)})"


_JOBS: tuple[Field[JobRun], ...] = (
    Field.of("job", lambda run: f"{run.number} {run.job.name}"),
    Field.number("iterations", lambda run: run.job.iterations),
    Field.number(
        "iteration, median", lambda run: format_duration(float(np.median(run.run.iteration_ns)))
    ),
    Field.number("longest", lambda run: format_duration(float(run.run.iteration_ns.max()))),
    Field.number("exposed", lambda run: format_duration(run.exposed_ns)),
    Field.number("end", lambda run: format_duration(float(run.run.iteration_end_ns[-1]))),
    Field.of(
        "main bottleneck (share of transfer time)", lambda run: run.held_up, optional=True
    ),
)  # fmt: skip


@dataclass(frozen=True)
class SharedRun:
    """Jobs that ran on a cluster at the same time."""

    cluster: Cluster
    timeline: Timeline

    def jobs(self) -> list[JobRun]:
        return [self._job(number, job) for number, job in enumerate(self.timeline.jobs)]

    def _job(self, number: int, job: Job) -> JobRun:
        run = self.timeline.job(number)
        talks = [t for t, task in enumerate(job.tasks.tasks) if task.collective is not None]
        exposed_ns = sum(float(np.median(run.exposed_ns(t))) for t in talks)
        held = [] if self.timeline.queues else list(self.timeline.bottlenecks(number))
        return JobRun(number, job, run, exposed_ns, held)

    def tables(self) -> list[Table]:
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
        timeline, used = self.timeline, self.timeline.link_utilisation()
        payload = {
            "makespan_ns": timeline.makespan_ns,
            "provenance": timeline.provenance,
            "jobs": [
                {
                    "name": run.job.name, "iteration_ns": run.run.iteration_ns,
                    "end_ns": run.run.iteration_end_ns[-1], "exposed_ns": run.exposed_ns,
                    "bottlenecks": run.bottlenecks[:_MAX_LINKS],
                }
                for run in self.jobs()
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
        return [int(link) for link in order[:_MAX_LINKS]]

    def _transfers(self) -> str:
        queues = self.timeline.queues
        if queues is None:
            return "fluid transfers: queues and tail latencies are not modelled"
        return (
            f"packets: {queues.dropped.sum()} dropped, {queues.marked.sum()} marked, "
            f"{queues.sent_again.sum()} retransmitted; up to "
            f"{format_bytes(float(queues.peak_bytes.max()))} queued"
        )


def _basis(cluster: Cluster) -> str:
    if cluster.calibration is not None:
        return f"links: measured {cluster.calibration.date}"
    return f"links: {cluster.provenance.value} (slipstream cluster show lists every source)"
