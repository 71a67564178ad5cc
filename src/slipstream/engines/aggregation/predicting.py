"""Predict what aggregating switches would change: times of jobs, and of everybody's short flows.

Jobs and short flows are simulated as packets in queues with marks. A ring sends one flow per rank
to its neighbour; a tree has one window for all of its hosts, and sends each byte once over a cable.
Iterations begin at fixed times, so that both ways do the same training while short flows arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.arguments import as_integer
from slipstream.cluster import Aggregator, Cluster, ClusterError, Queues
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
            as_integer(name, getattr(self, name), least)
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
    """

    job_ns: _Floats
    flow_ns: _Floats
    link_bytes: _Floats


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
        ring, tree = ([measure(outcome) for outcome in self.outcomes[way]] for way in WAYS)
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
            if not ring or not tree:  # no short flows
                continue
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


_MEASURES: dict[str, Callable[[FabricOutcome], float]] = {
    "job_iteration_ns": lambda x: float(x.job_ns.mean()),
    "slowest_job_ns": lambda x: float(x.job_ns.max()),
    "short_flow_mean_ns": lambda x: float(x.flow_ns.mean()) if x.flow_ns.size else 0.0,
    "short_flow_p99_ns": lambda x: float(np.quantile(x.flow_ns, 0.99)) if x.flow_ns.size else 0.0,
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
        ClusterError: the network has no switches that connect all hosts of a job, or only some
            of them aggregate.
    """
    if load.workers > cluster.devices:
        raise InvalidArgumentError(
            "workers", f"{load.workers} do not fit on the {cluster.devices} hosts of {cluster.name}"
        )
    trees, seeds = as_integer("trees", trees), as_integer("seeds", seeds)
    topology = cluster.topology
    if topology.aggregator is None:
        topology = topology.with_aggregators(_AMPLE)
    rate = float(topology.capacity[topology.capacity > 0.0].min())
    if load.period_ns is None:
        ring_ns = 2.0 * load.nbytes * 1e9 / rate
        load = replace(load, period_ns=load.compute_ns + ring_ns)
    outcomes: dict[str, list[FabricOutcome]] = {way: [] for way in WAYS}
    for seed in range(seeds):
        for way in WAYS:
            progress(f"seed {seed}, {way}")
            outcomes[way].append(_simulated(topology, load, trees * (way != "ring"), seed, queues))
    return FabricPrediction(cluster.name, load, trees, outcomes)


class _Flow(NamedTuple):
    nbytes: float
    hops: npt.NDArray[np.int32]
    parent: npt.NDArray[np.int32]


_NO_FLOW = _Flow(0.0, np.empty(0, np.int32), np.empty(0, np.int32))


class _Tasks:
    """Columns of the engine's tasks."""

    def __init__(self) -> None:
        self.duration: list[float] = []
        self.flows: list[_Flow] = []
        self.edges: list[tuple[int, int]] = []

    def add(self, duration: float, after: tuple[int, ...] = (), flow: _Flow = _NO_FLOW) -> int:
        number = len(self.duration)
        self.duration.append(duration)
        self.flows.append(flow)
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
        for flow in flows:
            link_bytes[flow.hops] += flow.nbytes * load.iterations
        ended: tuple[int, ...] = ()
        offset, own = float(generator.uniform(0.0, period)), []
        for iteration in range(load.iterations):
            begin = tasks.add(0.0, (tasks.add(offset + iteration * period), *ended))
            computed = tasks.add(load.compute_ns, (begin,))
            sent = [tasks.add(0.0, (computed,), flow) for flow in flows]
            ended = (tasks.add(0.0, tuple(sent)),)
            own.append((begin, ended[0]))
        spans.append(own)
    short = _short_flows(tasks, topology, load, load.iterations * period, generator)
    src, dst = np.array(tasks.edges, np.int32).T
    schedule = simulate(Program(
        lane=np.zeros(len(tasks.duration), np.int32), duration_ns=np.array(tasks.duration),
        policies=np.array([Policy.CONCURRENT], np.uint8), edges=Edges(src, dst),
        flows=Flows(
            capacity=topology.capacity / 1e9,
            path_offset=np.concatenate([[0], np.cumsum([len(f.hops) for f in tasks.flows])]),
            path_link=np.concatenate([flow.hops for flow in tasks.flows]),
            nbytes=np.array([flow.nbytes for flow in tasks.flows]),
            packets=queues.on(topology),
            tree_parent=np.concatenate([flow.parent for flow in tasks.flows]),
        ),
    ))  # fmt: skip
    start, end = schedule.start_ns[0], schedule.end_ns[0]
    job_ns = [np.mean([end[last] - start[first] for first, last in own]) for own in spans]
    flow_ns = end[short] - np.array(tasks.duration)[short]
    return FabricOutcome(np.array(job_ns), flow_ns, link_bytes)


def _ring_flows(topology: Topology, hosts: npt.NDArray[np.int64], load: FabricLoad) -> list[_Flow]:
    counts, links = topology.paths(hosts, np.roll(hosts, -1), np.arange(hosts.size))
    nbytes = 2.0 * (hosts.size - 1) / hosts.size * load.nbytes
    return [
        _Flow(nbytes, hops, np.full(hops.size, -2, np.int32))
        for hops in np.split(links, np.cumsum(counts)[:-1])
    ]


def _tree_flows(
    topology: Topology, hosts: npt.NDArray[np.int64], load: FabricLoad, trees: int
) -> list[_Flow]:
    """Return a transfer per tree: its links towards the root, then those back."""
    src, dst = topology.link_src, topology.link_dst
    flows = []
    for number in range(trees):
        tree = aggregation_tree(topology, hosts.tolist(), number)
        links = tree.links
        if (tree.streams > 1.0).any():
            raise ClusterError(
                "a switch between the hosts of a job does not aggregate",
                remedy="let all switches aggregate; a cluster without aggregators is assumed to",
            )
        back = {(int(src[link]), int(dst[link])): int(link) for link in links}
        # The tree lists the cables of the farthest nodes first, each as the links up and down.
        up = links[src[links] != dst[links]].tolist()[::2]
        place = {int(src[link]): at for at, link in enumerate(up)}
        parent = [place.get(int(dst[link]), -1) for link in up]
        down = [back[int(dst[link]), int(src[link])] for link in up]
        hops = np.array(up + down, np.int32)
        flows.append(_Flow(load.nbytes / trees, hops, np.array(parent + [-2] * len(up), np.int32)))
    return flows


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
        tasks.add(float(at), (), _Flow(float(nbytes), path, np.full(path.size, -2, np.int32)))
        for at, nbytes, path in zip(arrival, size, paths, strict=True)
    ])  # fmt: skip
