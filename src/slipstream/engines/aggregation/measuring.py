"""All-reduces of real ranks, through an aggregator and with gloo."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.arguments import as_integer
from slipstream.child import Child
from slipstream.engines.aggregation.member import WINDOW, JobMember
from slipstream.errors import MeasurementError
from slipstream.measure import Arm, ExperimentSettings, RunPlan, claims, run
from slipstream.measure.arms import Sample
from slipstream.measure.records import Phase
from slipstream.provenance import Provenance
from slipstream.ranks.launch import Call, Host, joined
from slipstream.ranks.netlab import Netlab
from slipstream.tables import Column, Table
from slipstream.units import format_bytes, format_duration

_HERE = __name__
ARMS = ("gloo", "aggregator")
_CALL_S = 120.0


@dataclass(frozen=True)
class AllReduceComparison:
    """Times of all-reduces of the same tensor, measured alternately.

    Attributes:
        ranks, nbytes: number of ranks, and size of the tensor.
        where: links of the ranks.
        wall_ns: median time of the slowest rank, by arm.
        sent_bytes: mean bytes that a rank's interface sent, with headers, by arm; empty on the
            loopback interface, which all ranks share.
        speedup, low, high: gloo's time over the aggregator's, with its 95 % interval.
    """

    ranks: int
    nbytes: int
    where: str
    wall_ns: dict[str, float]
    sent_bytes: dict[str, float]
    speedup: float
    low: float
    high: float

    def table(self) -> Table:
        """Return a row per arm."""
        rows = [
            (name, format_duration(ns), f"{8 * self.nbytes / ns:.3g} Gbit/s",
             f"{self.sent_bytes[name] / self.nbytes:.3f} S" if self.sent_bytes else "-")
            for name, ns in self.wall_ns.items()
        ]  # fmt: skip
        numbers = ("time", "goodput per rank", "sent per rank")
        columns = [Column("all-reduce"), *(Column(name, "right") for name in numbers)]
        ratio = f"{self.speedup:.2f} times as fast as gloo ({self.low:.2f} to {self.high:.2f})"
        title = f"S = {format_bytes(self.nbytes)}, {self.ranks} ranks, {self.where}"
        return Table(columns, rows, title, notes=[f"{ratio}; medians of the slowest rank"])

    def to_json(self) -> dict[str, Any]:
        """Return the JSON payload; times in nanoseconds, sizes in bytes."""
        return {
            "ranks": self.ranks, "bytes": self.nbytes, "where": self.where,
            "wall_ns": self.wall_ns, "sent_bytes": self.sent_bytes, "speedup": self.speedup,
            "low": self.low, "high": self.high, "provenance": Provenance.MEASURED.value,
        }  # fmt: skip


@contextlib.contextmanager
def serving(host: Host, listen: str = "127.0.0.1:0", **settings: Any) -> Iterator[tuple[str, str]]:
    """Run an aggregator in a process on `host`; yield its address and token."""
    with Child("the aggregator", prefix=host.prefix) as child:
        address, token = child.call(
            f"{_HERE}:serve", listen=listen, settings=settings, timeout_s=60.0
        )
        yield address, token


def compare_all_reduce(
    ranks: int,
    nbytes: int,
    *,
    lab_bytes_per_s: float | None = None,
    window: int = WINDOW,
    blocks: int = 9,
    progress: Callable[[str], None] = lambda line: None,
) -> AllReduceComparison:
    """Time all-reduces of float32 through an aggregator and with gloo, alternately.

    Args:
        ranks: number of processes.
        nbytes: size of the tensor.
        lab_bytes_per_s: rate of cables in a network lab, with the aggregator at the switch (needs
            root); None for the loopback interface, which shows CPU time instead of links.
        window: largest number of a rank's datagrams without a result.
        blocks: number of measurements of each arm.

    Raises:
        InvalidArgumentError: a number is not an integer, or too small.
        ClusterError: the lab cannot be created, or a rank failed.
    """
    for name, value, least in (("ranks", ranks, 2), ("nbytes", nbytes, 4), ("blocks", blocks, 1)):
        as_integer(name, value, least)
    with contextlib.ExitStack() as stack:
        hosts, at_switch, listen = [Host()] * ranks, Host(), "127.0.0.1:0"
        where = "loopback interface of this machine"
        if lab_bytes_per_s is not None:
            lab = stack.enter_context(Netlab(ranks, lab_bytes_per_s))
            address, at_switch = lab.switch_host()
            hosts, listen = lab.ranks(), f"{address}:0"
            where = f"network lab, cables of {lab_bytes_per_s * 8 / 1e6:g} Mbit/s"
        progress(f"{ranks} ranks, {where}")
        address, token = stack.enter_context(serving(at_switch, listen))
        call = stack.enter_context(joined(hosts, name="the comparison", limit_s=_CALL_S))
        call(f"{_HERE}:prepare", {
            "nbytes": nbytes, "address": address, "token": token, "window": window,
        })  # fmt: skip
        arms = [_RanksArm(name, call) for name in ARMS]
        plan = RunPlan(
            minimum_warmup_s=0.0, maximum_warmup_s=0.0, maximum_blocks=blocks, red_factor=1.0
        )
        settings = ExperimentSettings(ARMS[1], primary="wall", budget_s=_CALL_S, looks=())
        experiment = run(arms, settings, plan=plan)
    for event in experiment.events:
        if event.kind == "failed":
            raise MeasurementError(str(event.detail["what"]), arm=str(event.detail["arm"]))
    ratio = claims.ratio_between(experiment, "wall", *ARMS)
    values = {
        (name, metric): experiment.series[name, metric, Phase.MEASURE].values
        for name in ARMS for metric in ("wall", "sent")
    }  # fmt: skip
    return AllReduceComparison(
        ranks, nbytes, where, {name: float(np.median(values[name, "wall"])) for name in ARMS},
        {name: float(values[name, "sent"].mean()) for name in ARMS if lab_bytes_per_s},
        ratio.estimate, ratio.low, ratio.high,
    )  # fmt: skip


class _RanksArm(Arm):
    """An all-reduce that all ranks call together."""

    def __init__(self, name: str, call: Call) -> None:
        super().__init__(name)
        self._call = call

    def sample(self, inner: int, timeout_s: float | None) -> Sample:
        """Make one call, whatever `inner` is."""
        results = self._call(f"{_HERE}:turn", {"arm": self.name})
        sent = sum(result[1] for result in results) / len(results)
        return {"wall": max(result[0] for result in results), "sent": sent}


# The code below runs in other processes: the aggregator's, and those of ranks.

_running: list[Any] = []


def serve(listen: str, settings: dict[str, Any]) -> tuple[str, str]:
    """Start an aggregator that lives as long as this process; return its address and token."""
    from slipstream.engines.aggregation.server import AggregationServer

    aggregator = AggregationServer(listen, **settings).__enter__()
    _running.append(aggregator)
    return aggregator.address, aggregator.token


def prepare(nbytes: int, address: str, token: str, window: int, **settings: Any) -> None:
    """Join the job with a tensor of this size."""
    import torch
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    member = JobMember([address], "comparison", rank, world, token, window=window, **settings)
    tensor = torch.randn(nbytes // 4)
    _running[:] = [member, tensor, torch.empty_like(tensor)]


def turn(arm: str) -> tuple[int, int]:
    """Return nanoseconds of one all-reduce on this rank, and the bytes that it sent."""
    import os

    import torch.distributed as dist

    from slipstream.measure.wire import Interface

    member, tensor, out = _running
    wire = Interface(os.environ["GLOO_SOCKET_IFNAME"])
    dist.barrier()
    began = time.perf_counter_ns()
    if arm == "gloo":
        dist.all_reduce(out)
    else:
        member.sum(tensor, out)
    wall_ns = time.perf_counter_ns() - began
    dist.barrier()
    return wall_ns, wire.sent_bytes
