"""plan: how to pre-train an encoder on a cluster, for how long and how much money.

Source: Lin, Li and Pekhimenko, "Multi-node Bert-pretraining: Cost-efficient Approach", 2020. With K
micro-batches per update only the last one's backward pass overlaps with communication: an update
takes the time of a distributed step of one micro-batch plus K - 1 forward and backward passes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.cluster import Cluster
from slipstream.durations import Durations
from slipstream.errors import SlipstreamError
from slipstream.graph import Graph, StepPhase, replay
from slipstream.tables import Column, Table
from slipstream.techniques.pretraining.training import PretrainingConfig
from slipstream.units import format_bytes, format_duration, format_percent, parse_duration_ns
from slipstream.verbs.predicting import predict
from slipstream.verbs.results import Predicted

RUNGS = ("masked_head", "sdpa", "unpad", "fused_lamb", "fused_optimizer", "amp:bf16")
"""Techniques that a plan tries, in order; each stays if it is predicted to be faster."""
_WIRES = ("", "+cast:bf16")
_HOUR_NS = 3600e9


@dataclass(frozen=True)
class PretrainingRun:
    """One way to run all phases.

    Attributes:
        techniques: the combination of a device, without the distributed ones.
        wire: technique of the exchanged gradients; empty for float32.
        workers: devices.
        micro_batch: sequences of a forward pass.
        accumulation: micro-batches per update and device, by phase.
        hours, low, high: time of all phases, with a 90 % interval.
        dollars: cost; None without a price.
        peak_bytes: peak tensor memory of a device.
        efficiency: throughput per device over that of one device that does not communicate.
        rests_on: weakest provenance of the durations.
    """

    techniques: str
    wire: str
    workers: int
    micro_batch: int
    accumulation: tuple[int, ...]
    hours: float
    low: float
    high: float
    dollars: float | None
    peak_bytes: int
    efficiency: float
    rests_on: str


@dataclass(frozen=True)
class PretrainingPlan:
    """The chosen run among those of a cluster.

    Attributes:
        chosen: None if no run meets the limits.
        runs: all runs that were predicted.
        ladder: speed-up of each technique over the rungs before it, as predicted on one device.
        binding: the limit that no run meets, and the cheapest relaxation; empty if one does.
        cluster: name.
    """

    chosen: PretrainingRun | None
    runs: tuple[PretrainingRun, ...]
    ladder: dict[str, float]
    binding: str
    cluster: str

    def table(self) -> Table:
        """Return the run's settings, each with its effect and evidence."""
        columns = [Column("setting"), Column("value", "right"), Column("why")]
        rows = [
            [name, f"{gain:.2f}x", "predicted on the recorded step"]
            if gain >= 1 or name in self.runs[0].techniques.split("+")
            else [name, "no", f"predicted {gain:.2f}x"]
            for name, gain in self.ladder.items()
        ]
        run = self.chosen
        if run is None:
            return Table(columns, rows, title=f"no plan on {self.cluster}", notes=[self.binding])
        cost = "unknown" if run.dollars is None else f"${run.dollars:,.2f}"
        low, high = (format_duration(hours * _HOUR_NS) for hours in (run.low, run.high))
        rows += [
            ["micro-batch", str(run.micro_batch), "that of the workload"],
            ["accumulation", ", ".join(map(str, run.accumulation)), "per phase: global batch / "
             f"({run.workers} x {run.micro_batch})"],
            ["devices", str(run.workers), f"{format_percent(run.efficiency)} weak-scaling "
             "efficiency, simulated"],
            ["gradients", run.wire or "float32", "on the wire; the faster one"],
            ["memory", format_bytes(run.peak_bytes), "peak tensor memory of a device, simulated"],
            ["time", format_duration(run.hours * _HOUR_NS), f"90 % interval {low} to {high}; rests "
             f"on {run.rests_on}"],
            ["cost", cost, "time x devices x price"],
        ]  # fmt: skip
        return Table(columns, rows, title=f"plan for {self.cluster}")

    def to_json(self) -> dict[str, Any]:
        """Return JSON."""
        return asdict(self)


def plan_pretraining(
    config: PretrainingConfig,
    graph: Graph,
    report: Callable[[str], None] = lambda line: None,
    durations: Durations | None = None,
) -> PretrainingPlan:
    """Return the cheapest plan within the deadline, or the fastest one within the budget.

    Args:
        graph: the recorded step of ``config.workload``.
        durations: source of durations; this machine's cache by default.

    Raises:
        SlipstreamError: the step has no samples, a technique of the configuration does not apply,
            or no number of devices fits the global batches.
    """
    cluster = Cluster.load(config.cluster) if config.cluster else None
    if not graph.samples:
        raise SlipstreamError(
            "the recorded step has no known number of sequences", where=config.workload,
            remedy="return (model, batch, loss, optimizer)",
        )  # fmt: skip
    predictor = functools.partial(predict, durations=durations, report=report)
    local, ladder = _ladder(config, graph, predictor)
    runs = tuple(_runs(config, graph, local, cluster, predictor))
    if not runs:
        raise SlipstreamError(
            f"every global batch is smaller than the recorded batch of {graph.samples}",
            where=config.workload,
            remedy="raise global_batch, or record a smaller batch",
        )
    chosen, binding = _choose(config, runs, cluster)
    name = cluster.name if cluster is not None else "this machine"
    return PretrainingPlan(chosen, runs, ladder, binding, name)


def _ladder(
    config: PretrainingConfig, graph: Graph, predictor: Callable[..., Sequence[Any]]
) -> tuple[Predicted | None, dict[str, float]]:
    """Return the prediction of the techniques of one device, and the gain of each."""
    best: Predicted | None = None
    gains: dict[str, float] = {}
    for rung in config.techniques.split("+") if config.techniques else RUNGS:
        text = rung if best is None else f"{best.technique}+{rung}"
        if best is not None and rung == "fused_optimizer" and "fused_lamb" in best.technique:
            continue
        (prediction,) = predictor(graph, [text])
        if not isinstance(prediction, Predicted):
            if config.techniques:
                raise SlipstreamError(
                    f"techniques: {rung} cannot be predicted: {prediction.why_not}",
                    where=config.workload, remedy="leave it out, or techniques empty",
                )  # fmt: skip
            continue
        gains[rung] = prediction.speedup / (1.0 if best is None else best.speedup)
        if gains[rung] >= 1.0 or config.techniques:
            best = prediction
    return best, gains


def _runs(
    config: PretrainingConfig,
    graph: Graph,
    local: Predicted | None,
    cluster: Cluster | None,
    predictor: Callable[..., Sequence[Any]],
) -> list[PretrainingRun]:
    techniques = "" if local is None else local.technique
    after = graph if local is None or local.graph is None else local.graph
    update = after.tasks.phase == StepPhase.OPTIMIZER
    update_ns = float((after.tasks.duration_ns + after.tasks.gap_ns)[update].sum())
    alone = replay(graph)
    step_ns = alone.step_ns if local is None else local.step_ns
    passes_ns = step_ns - update_ns
    devices = 1 if cluster is None else cluster.devices
    most = min(phase.global_batch for phase in config.phases) // graph.samples
    powers = [1 << k for k in range(devices.bit_length())]
    counts = [n for n in dict.fromkeys([*powers, devices]) if n <= most]
    head = f"{techniques}+" if techniques else ""
    texts = [(n, wire, f"{head}ddp:{n}{wire}") for n in counts if n > 1 for wire in _WIRES]
    predictions = predictor(graph, [text for *_, text in texts], cluster=cluster)
    ways: list[tuple[int, str, Predicted | None]] = [(1, "", local)] if 1 in counts else []
    ways += [
        (n, wire.lstrip("+"), prediction)
        for (n, wire, _), prediction in zip(texts, predictions, strict=True)
        if isinstance(prediction, Predicted)
    ]
    price = config.price_per_hour or None
    if price is None and cluster is not None and cluster.price_per_hour is not None:
        price = cluster.price_per_hour / cluster.devices
    runs = []
    for n, wire, p in ways:
        time_ns = step_ns if p is None else p.step_ns
        low, high = (1.0, 1.0) if p is None else (p.low / p.ratio, p.high / p.ratio)
        passes = [math.ceil(phase.global_batch / (n * graph.samples)) for phase in config.phases]
        # Another length takes a time in proportion to its tokens.
        total_ns = sum(
            phase.steps * (time_ns + (count - 1) * passes_ns) * phase.length
            for phase, count in zip(config.phases, passes, strict=True)
        )
        hours = total_ns / config.phases[0].length / _HOUR_NS
        others_ns = (passes[0] - 1) * passes_ns
        efficiency = (step_ns + others_ns) / (time_ns + others_ns)
        runs.append(
            PretrainingRun(
                techniques, wire, n, graph.samples, tuple(passes), hours, hours * low,
                hours * high, None if price is None else hours * n * price,
                alone.peak_bytes if p is None else p.memory[1], min(efficiency, 1.0),
                "measured" if p is None else str(p.provenance),
            )
        )  # fmt: skip
    return runs


def _choose(
    config: PretrainingConfig, runs: Sequence[PretrainingRun], cluster: Cluster | None
) -> tuple[PretrainingRun | None, str]:
    """Return the best run within memory, budget and deadline, or the binding constraint."""
    device = None if cluster is None else cluster.device
    room = None if device is None or device.memory_bytes is None else device.memory_bytes.value
    fitting = [run for run in runs if room is None or run.peak_bytes <= room]
    if not fitting:
        needed = min(run.peak_bytes for run in runs)
        return None, (
            f"memory binds: a device has {format_bytes(room or 0)}, a step needs "
            f"{format_bytes(needed)}; cheapest relaxation: record a smaller batch, or add "
            "checkpointing to techniques"
        )
    hours = parse_duration_ns(config.deadline) / _HOUR_NS if config.deadline else math.inf
    budget = config.budget or math.inf
    if math.isfinite(budget) and all(run.dollars is None for run in fitting):
        return None, "the budget cannot be judged: set price_per_hour"
    costs = {run: run.dollars or 0.0 for run in fitting}
    allowed = [run for run in fitting if run.hours <= hours and costs[run] <= budget]
    if allowed and math.isfinite(hours):
        return min(allowed, key=lambda run: (costs[run], run.hours)), ""
    if allowed:
        return min(allowed, key=lambda run: (run.hours, costs[run])), ""
    reasons = []
    in_time = [run for run in fitting if run.hours <= hours]
    if in_time:
        best = min(in_time, key=lambda run: costs[run])
        reasons.append(f"a budget of ${costs[best]:,.2f} ({best.workers} devices)")
    affordable = [run for run in fitting if costs[run] <= budget]
    if affordable:
        best = min(affordable, key=lambda run: run.hours)
        reasons.append(f"a deadline of {format_duration(best.hours * _HOUR_NS)}")
    if not reasons:
        best = min(fitting, key=lambda run: (costs[run], run.hours))
        reasons.append(
            f"a budget of ${costs[best]:,.2f} with a deadline of "
            f"{format_duration(best.hours * _HOUR_NS)}"
        )
    binding = "the budget" if in_time else "the deadline" if affordable else "budget and deadline"
    return None, f"{binding} cannot be met; cheapest relaxation: {' or '.join(reasons)}"
