"""Predict what aggregating switches would change: times of jobs, and of everybody's short flows.

Jobs and short flows are simulated as packets in queues with marks. A ring sends one flow per rank
to its neighbour; a tree one flow per cable, since switches send sums on while they arrive.
Iterations begin at fixed times, so that both ways do the same training while short flows arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.cluster import Aggregator, Cluster, Queues
from slipstream.cluster.aggregation import aggregation_tree
from slipstream.cluster.topology import Topology
from slipstream.errors import InvalidArgumentError
from slipstream.native import Edges, Flows, Policy, Program, simulate
from slipstream.provenance import Provenance
from slipstream.tables import Column, Table
from slipstream.units import format_bytes, format_duration

WAYS = ("ring", "aggregated")
QUEUES = Queues(nbytes=4e6, mark_bytes=100e3, payload_bytes=4096.0, timeout_ns=4e6)
"""Default queues: data-centre switches that mark from 100 kB on, and jumbo frames."""
_AMPLE = Aggregator(1 << 20, 4096.0, 1e15)
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class FabricLoad:
    """Jobs and other traffic on a shared network.

    Attributes:
        jobs, workers: number of jobs, and of the hosts of each, placed at random.
        nbytes: gradients that a job all-reduces per iteration.
        compute_ns: time of an iteration before its all-reduce.
        iterations: number of iterations per job.
        period_ns: time between the starts of iterations; None for the ring's on an idle network.
        load: mean share of hosts' links that short flows take, 0 to 1.
        flow_bytes: mean size of a short flow; sizes are lognormal with a sigma of 1.
    """

    jobs: int = 8
    workers: int = 16
    nbytes: float = 25e6
    compute_ns: float = 10e6
    iterations: int = 3
    period_ns: float | None = None
    load: float = 0.1
    flow_bytes: float = 20e3

    def __post_init__(self) -> None:
        for name, least in (("jobs", 1), ("workers", 2), ("iterations", 1)):
            if getattr(self, name) < least:
                raise InvalidArgumentError(name, f"{getattr(self, name)} is less than {least}")
        for name in ("nbytes", "flow_bytes"):
            if not 0.0 < getattr(self, name) < 1e15:
                raise InvalidArgumentError(name, f"{getattr(self, name)} is not a size")
        for name in ("compute_ns", "period_ns"):
            if not 0.0 <= (getattr(self, name) or 0.0) < 1e15:
                raise InvalidArgumentError(name, f"{getattr(self, name)} is not a time")
        if not 0.0 <= self.load < 1.0:
            raise InvalidArgumentError("load", f"{self.load} is not from 0 to below 1")


@dataclass(frozen=True, eq=False)
class FabricOutcome:
    """One simulation of a load.

    Attributes:
        job_ns: float64 [jobs]; mean time of an iteration.
        flow_ns: float64 [flows]; completion times of short flows.
        link_bytes: float64 [links]; bytes of jobs over each link.
        dropped: number of packets that queues dropped.
    """

    job_ns: _Floats
    flow_ns: _Floats
    link_bytes: _Floats
    dropped: int


@dataclass(frozen=True)
class FabricPrediction:
    """A load with rings and with trees, for several seeds.

    Attributes:
        load, trees: what was simulated.
        outcomes: outcome per seed, by way.
    """

    cluster: str
    load: FabricLoad
    trees: int
    outcomes: dict[str, list[FabricOutcome]] = field(repr=False)

    def gains(self, measure: Callable[[FabricOutcome], float]) -> _Floats:
        """Return the ring's value over the tree's, float64 [seeds]."""
        ring, tree = ([measure(one) for one in self.outcomes[way]] for way in WAYS)
        return np.asarray(np.array(ring) / np.maximum(np.array(tree), 1e-9), np.float64)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON payload; times in nanoseconds, one value per seed."""
        return {
            "cluster": self.cluster, "trees": self.trees, "load": vars(self.load),
            "provenance": Provenance.SIMULATED.value,
            **{
                way: {name: [measure(x) for x in outcomes] for name, measure in _MEASURES.items()}
                for way, outcomes in self.outcomes.items()
            },
        }  # fmt: skip

    def table(self) -> Table:
        """Return a row per measure."""
        rows = []
        for name, measure in _MEASURES.items():
            ring, tree = (float(np.mean([measure(x) for x in self.outcomes[way]])) for way in WAYS)
            gains = self.gains(measure)
            shown = format_bytes if "bytes" in name else format_duration
            spread = f"{gains.mean():.2f}x ({gains.min():.2f} to {gains.max():.2f})"
            rows.append(
                (name.replace("_ns", "").replace("_", " "), shown(ring), shown(tree), spread)
            )
        load = self.load
        title = (
            f"{load.jobs} jobs of {load.workers} hosts on {self.cluster}, "
            f"{format_bytes(load.nbytes)} per all-reduce"
        )
        columns = [Column(""), *(Column(name, "right") for name in (*WAYS, "gain"))]
        seeds = len(self.outcomes[WAYS[0]])
        notes = [f"simulated packets; mean and range of {seeds} seeds; {self.trees} trees per job"]
        return Table(columns, rows, title, notes)


def _quantile(values: _Floats, share: float) -> float:
    return float(np.quantile(values, share)) if values.size else 0.0


_MEASURES: dict[str, Callable[[FabricOutcome], float]] = {
    "job_iteration_ns": lambda x: float(x.job_ns.mean()),
    "slowest_job_ns": lambda x: float(x.job_ns.max()),
    "short_flow_mean_ns": lambda x: float(x.flow_ns.mean()) if x.flow_ns.size else 0.0,
    "short_flow_p99_ns": lambda x: _quantile(x.flow_ns, 0.99),
    "busiest_link_bytes": lambda x: float(x.link_bytes.max()),
}


def predict_aggregation(
    cluster: Cluster,
    load: FabricLoad,
    *,
    trees: int = 1,
    seeds: int = 3,
    queues: Queues = QUEUES,
    progress: Callable[[str], None] = lambda line: None,
) -> FabricPrediction:
    """Simulate a load on a cluster's network, with rings and with trees of switches.

    Args:
        cluster: every device is a host; its switches need not aggregate.
        trees: number of trees per job, each with a share of the bytes.
        seeds: number of random placements and arrivals, the same for both ways.
        queues: queues of all links.

    Raises:
        InvalidArgumentError: jobs have more workers than the cluster hosts, or a number is not
            allowed.
        ClusterError: the network has no switches that connect all hosts of a job.
    """
    if load.workers > cluster.devices:
        raise InvalidArgumentError(
            "workers", f"{load.workers} do not fit on the {cluster.devices} hosts of {cluster.name}"
        )
    for name, value in (("trees", trees), ("seeds", seeds)):
        if value < 1:
            raise InvalidArgumentError(name, f"{value} is less than 1")
    topology = cluster.topology
    if topology.aggregator is None:
        topology = topology.with_aggregators(_AMPLE)
    rate = float(topology.capacity[: topology.links].min()) if topology.links else 0.0
    if load.period_ns is None:
        ring_ns = 2.0 * load.nbytes * 1e9 / rate
        load = replace(load, period_ns=load.compute_ns + ring_ns)
    outcomes: dict[str, list[FabricOutcome]] = {way: [] for way in WAYS}
    for seed in range(seeds):
        for way in WAYS:
            progress(f"seed {seed}, {way}")
            outcomes[way].append(_simulated(topology, load, trees * (way != "ring"), seed, queues))
    return FabricPrediction(cluster.name, load, trees, outcomes)


class _Tasks:
    """Columns of the engine's tasks."""

    def __init__(self) -> None:
        self.duration: list[float] = []
        self.nbytes: list[float] = []
        self.hops: list[npt.NDArray[np.int32]] = []
        self.edges: list[tuple[int, int]] = []

    def add(self, duration: float, after: tuple[int, ...] = (), nbytes: float = 0.0,
            hops: Any = ()) -> int:  # fmt: skip
        number = len(self.duration)
        self.duration.append(duration)
        self.nbytes.append(nbytes)
        self.hops.append(np.asarray(hops, np.int32))
        self.edges += [(before, number) for before in after]
        return number


def _simulated(
    topology: Topology, load: FabricLoad, trees: int, seed: int, queues: Queues
) -> FabricOutcome:
    """Simulate one seed; 0 trees are a ring."""
    generator = np.random.default_rng(seed)
    tasks, period = _Tasks(), load.period_ns or 0.0
    spans: list[list[tuple[int, int]]] = []
    link_bytes = np.zeros(topology.links)
    order = generator.permutation(topology.devices)
    for job in range(load.jobs):
        first = job * load.workers % topology.devices
        hosts = np.sort(np.roll(order, -first)[: load.workers])
        flows = (
            _tree_flows(topology, hosts, load, trees)
            if trees
            else _ring_flows(topology, hosts, load)
        )
        for nbytes, hops in flows:
            link_bytes[hops] += nbytes * load.iterations
        ended: tuple[int, ...] = ()
        offset, own = float(generator.uniform(0.0, period)), []
        for iteration in range(load.iterations):
            begin = tasks.add(0.0, (tasks.add(offset + iteration * period), *ended))
            computed = tasks.add(load.compute_ns, (begin,))
            sent = [tasks.add(0.0, (computed,), nbytes, hops) for nbytes, hops in flows]
            ended = (tasks.add(0.0, tuple(sent)),)
            own.append((begin, ended[0]))
        spans.append(own)
    short = _short_flows(tasks, topology, load, (load.iterations + 1) * period, generator)
    src, dst = np.array(tasks.edges, np.int32).T
    schedule = simulate(Program(
        lane=np.zeros(len(tasks.duration), np.int32), duration_ns=np.array(tasks.duration),
        policies=np.array([Policy.CONCURRENT], np.uint8), edges=Edges(src, dst),
        flows=Flows(
            capacity=topology.capacity / 1e9,
            path_offset=np.concatenate([[0], np.cumsum([len(hops) for hops in tasks.hops])]),
            path_link=np.concatenate(tasks.hops), nbytes=np.array(tasks.nbytes),
            packets=queues.on(topology),
        ),
    ))  # fmt: skip
    start, end = schedule.start_ns[0], schedule.end_ns[0]
    job_ns = [np.mean([end[last] - start[first] for first, last in own]) for own in spans]
    flow_ns = end[short] - np.array(tasks.duration)[short]
    dropped = int(schedule.queues.dropped.sum()) if schedule.queues is not None else 0
    return FabricOutcome(np.array(job_ns), flow_ns, link_bytes, dropped)


_FlowList = list[tuple[float, npt.NDArray[np.int32]]]


def _ring_flows(topology: Topology, hosts: npt.NDArray[np.int64], load: FabricLoad) -> _FlowList:
    counts, links = topology.paths(hosts, np.roll(hosts, -1), np.arange(hosts.size))
    nbytes = 2.0 * (hosts.size - 1) / hosts.size * load.nbytes
    return [(nbytes, hops) for hops in np.split(links, np.cumsum(counts)[:-1])]


def _tree_flows(
    topology: Topology, hosts: npt.NDArray[np.int64], load: FabricLoad, trees: int
) -> _FlowList:
    # A window is of the job, not of a tree: trees that share a cable are one flow on it.
    nbytes = np.zeros(topology.links)
    for number in range(trees):
        tree = aggregation_tree(topology, hosts.tolist(), number)
        nbytes[tree.links] += load.nbytes / trees * tree.streams
    nbytes[topology.link_src == topology.link_dst] = 0.0  # switches add at line rate
    links = np.flatnonzero(nbytes).astype(np.int32)
    return [(float(nbytes[link]), links[at : at + 1]) for at, link in enumerate(links)]


def _short_flows(
    tasks: _Tasks, topology: Topology, load: FabricLoad, until_ns: float,
    generator: np.random.Generator,
) -> npt.NDArray[np.int64]:  # fmt: skip
    """Add short flows that arrive at random; return their tasks."""
    hosts = topology.devices
    links = topology.capacity[np.isin(topology.link_src, topology.node_of_device)]
    per_ns = load.load * float(links.sum()) / 1e9 / load.flow_bytes
    count = int(generator.poisson(per_ns * until_ns))
    arrival = generator.uniform(0.0, until_ns, count)
    size = np.ceil(generator.lognormal(np.log(load.flow_bytes) - 0.5, 1.0, count))
    src = generator.integers(hosts, size=count)
    dst = (src + 1 + generator.integers(hosts - 1, size=count)) % hosts
    if not count:
        return np.empty(0, np.int64)
    counts, hops = topology.paths(src, dst, np.arange(count))
    paths = np.split(hops, np.cumsum(counts)[:-1])
    return np.array([
        tasks.add(float(at), (), float(nbytes), path)
        for at, nbytes, path in zip(arrival, size, paths, strict=True)
    ])  # fmt: skip
