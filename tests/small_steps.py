"""Small recorded steps, and constant durations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from known_durations import KnownDurations
from slipstream.cluster import Cluster
from slipstream.durations import Timing
from slipstream.graph import Graph, StepPhase, replace_tasks
from slipstream.provenance import Provenance
from slipstream.technique import Context, combine, parse
from slipstream.workload import build_from
from tiny_models import parts, record

COPY_NS = 1000.0
FAST = Cluster.load("workers=8,link=10000gbit")
SLOW = Cluster.load("workers=8,link=1mbit,latency=1ms")


class Copies(KnownDurations):
    """Every copy takes a microsecond."""

    def lookup(self, call: Any) -> Timing | None:
        return Timing(COPY_NS, 0.0, Provenance.MICROBENCHMARK)

    def measure(self, calls: Any, report: Any = None, until: Any = None) -> None:
        """There is nothing to measure."""


def context(cluster: Cluster | None) -> Context:
    return Context(Copies(), cluster)  # type: ignore[arg-type]


@functools.cache
def graph_of(name: str) -> Graph:
    """Return one recorded step of a tiny model."""
    return still(record(build_from(parts(name), (), 0, name)))


def still(graph: Graph) -> Graph:
    """Return `graph` with fixed times, independent of other programs on the machine."""
    update = graph.tasks.phase == StepPhase.OPTIMIZER
    n = len(graph)
    return replace_tasks(
        graph, duration_ns=np.where(update, 1e3, 2e4), gap_ns=np.zeros(n), spread=np.zeros(n)
    )


@functools.cache
def tail_heavy(loss: Callable[..., Any] = nn.functional.cross_entropy) -> Graph:
    """Six equal layers and a last one with as many parameters as all of them."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(48, 48), nn.ReLU()) for _ in range(6)]
    model = nn.Sequential(*layers, nn.Linear(48, 300))
    batch = torch.randn(256, 48), torch.randint(0, 300, (256,))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    return still(record(build_from((model, batch, loss, optimizer), (), 0, "tail")))


def shared(graph: Graph, cluster: Cluster, text: str = "ddp:4") -> Graph:
    return combine(graph, parse(text), context(cluster))
