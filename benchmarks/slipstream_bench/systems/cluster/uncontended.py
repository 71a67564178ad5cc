"""Collectives alone on the network: simulated, and by formulas without a topology."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from slipstream.cluster.closed_form import closed_form_ns
from slipstream.cluster.cluster import Cluster
from slipstream.cluster.collective import Collective
from slipstream.cluster.generators import fat_tree, gpu_hosts, leaf_spine, ring, star, torus
from slipstream.cluster.quantity import Quantity
from slipstream.cluster.tasks import Job, Tasks
from slipstream.cluster.timeline import simulate
from slipstream.cluster.topology import Aggregator, LinkKind, Topology


def uncontended_cases(full: bool) -> Iterator[tuple[str, float, float, float]]:
    """Yield name, simulated ns, closed form ns, and one latency in ns."""
    link = LinkKind.of("link", 10e9, 1000.0)
    sizes = (1.0, 1e3, 1e6, 1e9) if full else (1.0, 1e6, 1e9)
    ranks = (
        (2, 3, 4, 7, 8, 16, 61, 64, 256, 1000, 1024, 4096) if full else (2, 3, 8, 61, 1024, 4096)
    )

    def cluster_of(shape: Callable[[int, LinkKind], Topology], n: int) -> Cluster:
        return Cluster(
            shape.__name__, shape(n, link), alpha_ns=Quantity(3000.0),
            reduce_ns_per_byte=Quantity(0.01),
        )  # fmt: skip

    cases = [
        ("all_reduce", "ring", star, 5000.0), ("all_reduce", "ring", ring, 4000.0),
        ("all_reduce", "ring2", ring, 4000.0), ("all_reduce", "line", ring, 4000.0),
        ("all_reduce", "halving_doubling", star, 5000.0),
        ("all_reduce", "tree", star, 5000.0),
        ("reduce_scatter", "ring", star, 5000.0), ("all_gather", "ring2", ring, 4000.0),
        ("all_gather", "gloo", star, 5000.0),
        ("broadcast", "tree", star, 5000.0), ("broadcast", "chain", star, 5000.0),
        ("all_to_all", "pairwise", star, 5000.0),
    ]  # fmt: skip
    for (kind, algo, make, alpha), n in itertools.product(cases, ranks):
        if (kind == "all_to_all" and n > 100) or (algo == "chain" and n == 2):
            continue
        cluster = cluster_of(make, n)
        for size in sizes:
            collective = Collective(kind, size, algo=algo)
            tasks = Tasks()
            tasks.communicate(collective)
            expected = closed_form_ns(
                kind, algo, size, n, alpha_ns=alpha, bytes_per_s=10e9, reduce_ns_per_byte=0.01
            )
            yield (f"{kind} {algo} n={n} S={size:g}", simulate(cluster, Job(tasks)).makespan_ns,
                   float(expected), alpha)  # fmt: skip
    for x, y in ((4, 8), (32, 32), (128, 32)):
        cluster = Cluster("mesh", torus((x, y), link, (False, True)), alpha_ns=Quantity(3000.0))
        for size in sizes:
            tasks = Tasks()
            tasks.communicate(Collective("all_reduce", size, algo="line*ring2"))
            formula = 2 * ((y - 1) / y * size / 20.0 + y / 2 * 4000.0) + 2 * (
                (x - 1) / x * size / y / 10.0 + (x - 1) * 4000.0
            )
            yield f"2d {x}x{y} S={size:g}", simulate(cluster, Job(tasks)).makespan_ns, formula, 4e3
    yield from _in_network_cases(sizes, ranks)
    for hosts, gpus in ((2, 8), (16, 8), (128, 8)):
        inside = LinkKind.of("nvlink", 100e9, 500.0)
        cluster = Cluster(
            "hosts", gpu_hosts(hosts, gpus, inside, inside, link), alpha_ns=Quantity(3000.0),
            reduce_ns_per_byte=Quantity(0.01),
        )  # fmt: skip
        for size in sizes:
            tasks = Tasks()
            tasks.communicate(Collective("all_reduce", size, algo="ring*ring"))
            yield (f"hierarchical {hosts}x{gpus} S={size:g}",
                   simulate(cluster, Job(tasks)).makespan_ns,
                   _hierarchical_ns(size, hosts, gpus, near=cluster.topology.route(0, 1),
                                    far=cluster.topology.route(0, gpus), cluster=cluster),
                   4e3)  # fmt: skip


def _in_network_cases(
    sizes: tuple[float, ...], ranks: tuple[int, ...]
) -> Iterator[tuple[str, float, float, float]]:
    """Yield reductions in switches: one, leaves and a spine, three tiers; different bottlenecks.

    The whole latency of a hop is the link's, so that all hops have the same.
    """
    link = LinkKind.of("link", 10e9, 1000.0)
    tiers = [(1, n, star(n, link)) for n in ranks]
    tiers += [(2, n, leaf_spine(n, 8, 4, link)) for n in ranks if n > 8]
    tiers += [(3, k**3 // 4, fat_tree(k, link)) for k in (4, 8)]
    for aggregator in (
        Aggregator(1024, 1024.0, 40e9), Aggregator(1024, 1024.0, 5e9), Aggregator(8, 256.0, 40e9),
    ):  # fmt: skip
        for (depth, n, topology), size in itertools.product(tiers, sizes):
            cluster = Cluster("adds up", topology.with_aggregators(aggregator))
            tasks = Tasks()
            tasks.communicate(Collective("all_reduce", size, algo="in_network"))
            expected = closed_form_ns(
                "all_reduce", "in_network", size, n, alpha_ns=1000.0, bytes_per_s=10e9,
                depth=depth, aggregator=aggregator,
            )  # fmt: skip
            yield (f"in_network depth={depth} n={n} S={size:g} {aggregator}",
                   simulate(cluster, Job(tasks)).makespan_ns, float(expected), 1e3)  # fmt: skip


def _hierarchical_ns(
    size: float, hosts: int, gpus: int, near: list[int], far: list[int], cluster: Cluster
) -> float:
    """Return the time of reduce-scatter in each host, all-reduce between hosts, all-gather."""
    topology, alpha, add = cluster.topology, 3000.0, 0.01

    def part(kind: str, nbytes: float, ranks: int, path: list[int]) -> float:
        return float(
            closed_form_ns(
                kind, "ring", nbytes, ranks, reduce_ns_per_byte=0.0,
                alpha_ns=alpha + float(topology.latency_ns[path].sum()),
                bytes_per_s=float(topology.capacity[path].min()),
            )
        )  # fmt: skip

    # Every device adds what it receives: of S inside, of its own piece between hosts.
    added = (gpus - 1) / gpus * size + (hosts - 1) / hosts * size / gpus
    return (
        part("reduce_scatter", size, gpus, near) + part("all_reduce", size, hosts, far)
        + part("all_gather", size, gpus, near) + added * add
    )  # fmt: skip
