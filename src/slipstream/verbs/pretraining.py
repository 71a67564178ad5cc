"""plan: how to pre-train an encoder on a cluster, for how long and how much money.

Source: Lin, Li and Pekhimenko, "Multi-node Bert-pretraining: Cost-efficient Approach", 2020. With K
micro-batches per update only the last one's backward pass overlaps with communication: an update
takes the time of a distributed step of one micro-batch plus K - 1 forward and backward passes.
Times and memory are affine in the micro-batch; two sizes of it are predicted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from slipstream.cluster import Cluster
from slipstream.durations import Durations
from slipstream.errors import SlipstreamError
from slipstream.graph import PROVENANCES, Graph, StepPhase, replace_tasks
from slipstream.provenance import Provenance
from slipstream.tables import Column, Table
from slipstream.technique import parse
from slipstream.techniques.pretraining.training import PretrainingConfig
from slipstream.units import (
    format_bytes,
    format_duration,
    format_percent,
    parse_bytes,
    parse_duration_ns,
)
from slipstream.verbs.batch.curve import Curve, Point, fit
from slipstream.verbs.predicting import predict
from slipstream.verbs.results import Predicted, Refused

RUNGS = ("masked_head", "sdpa", "unpad", "fused_lamb", "fused_optimizer", "amp:bf16")
"""Techniques that a plan tries, in order; each stays if it is predicted to be faster."""
_WIRES = ("", "+cast:bf16")
_HOUR_NS = 3600e9
_CHECKPOINTING = "checkpointing"
# Largest micro-batch, as a multiple of the recorded one, to which times are extrapolated.
_MAX_GROWTH = 8
# Relative error of a predicted time or size.
_SPREAD = 0.02


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
        peak_bytes: peak tensor memory of a device, in the phase with the longest sequences.
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
        sizes: micro-batches that were compared.
        fixed: why no other micro-batch than the workload's can be predicted; empty if others can.
        refused: why a technique does not apply to the step, or cannot be predicted.
    """

    chosen: PretrainingRun | None
    runs: tuple[PretrainingRun, ...]
    ladder: dict[str, float]
    binding: str
    cluster: str
    sizes: tuple[int, ...] = ()
    fixed: str = ""
    refused: dict[str, str] = field(default_factory=dict)

    def table(self) -> Table:
        """Return the run's settings, each with its effect and evidence."""
        columns = [Column("setting"), Column("value", "right"), Column("why")]
        run = self.chosen
        parts = run.techniques.split("+") if run else [n for n, g in self.ladder.items() if g >= 1]
        rows = []
        for name, gain in self.ladder.items():
            why = f"predicted {gain:.2f}x" + ", but not with checkpointing" * (gain >= 1)
            value = f"{gain:.2f}x" if name in parts else "no"
            rows.append([name, value, "predicted on the recorded step" if name in parts else why])
        rows += [[name, "no", why] for name, why in self.refused.items()]
        if run is None:
            return Table(columns, rows, title=f"no plan on {self.cluster}", notes=[self.binding])
        saves = _CHECKPOINTING in parts
        cost = "unknown" if run.dollars is None else f"${run.dollars:,.2f}"
        low, high = (format_duration(hours * _HOUR_NS) for hours in (run.low, run.high))
        rows += [
            [_CHECKPOINTING, "yes" if saves else "no", "needed to fit the memory" if saves else
             "not needed to fit the memory"],
            ["micro-batch", str(run.micro_batch), "the fastest that fits" if len(self.sizes) > 1
             else "that of the workload; " + (self.fixed or "the global batch allows no other")],
            ["accumulation", ", ".join(map(str, run.accumulation)), "per phase: global batch / "
             f"({run.workers} x {run.micro_batch})"],
            ["devices", str(run.workers), f"{format_percent(run.efficiency)} weak-scaling "
             "efficiency, simulated"],
            ["gradients", run.wire or "float32", "on the wire" if run.workers > 1 else
             "a single device exchanges none"],
            ["memory", format_bytes(run.peak_bytes), "peak tensor memory of a device, simulated"],
            ["time", format_duration(run.hours * _HOUR_NS), f"90 % interval {low} to {high}; rests "
             f"on {run.rests_on}"],
            ["cost", cost, "time x devices x price"],
        ]  # fmt: skip
        settings = f'techniques = "{run.techniques}" and micro_batch = {run.micro_batch}'
        notes = [f"set {settings} to train so"]
        return Table(columns, rows, title=f"plan for {self.cluster}", notes=notes)

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
            or no micro-batch fits the global batches.
    """
    cluster = Cluster.load(config.cluster) if config.cluster else None
    if not graph.samples:
        raise SlipstreamError(
            "the recorded step has no known number of sequences", where=config.workload,
            remedy="return (model, batch, loss, optimizer)",
        )  # fmt: skip
    predictor = functools.partial(predict, durations=durations, report=report)
    local, ladder, refused = _ladder(config, graph, predictor)
    steps = _steps(config, graph, local, predictor)
    ways = list(_ways(config, steps, cluster))
    if not ways:
        raise SlipstreamError(
            f"micro_batch or a global_batch is smaller than the recorded batch of {graph.samples}, "
            f"and no other micro-batch can be predicted: {steps[0].fixed}", where=config.workload,
            remedy="raise it, or record a smaller batch",
        )  # fmt: skip
    device = None if cluster is None else cluster.device
    size = None if device is None else device.memory_bytes
    room: float = math.inf if size is None else size.value
    if config.memory:
        room = parse_bytes(config.memory, "memory")
    runs = tuple(_runs(config, ways, cluster, predictor, room))
    if runs:
        chosen, binding = _choose(config, runs)
        if chosen is None and room < math.inf:
            larger, _ = _choose(config, [*_runs(config, ways, cluster, predictor, math.inf)])
            if larger is not None:
                binding += f" or devices with {_memory(larger.peak_bytes)} of memory"
    else:
        needed = _smallest(config, ways, cluster, predictor)
        chosen = None
        binding = (
            f"memory binds: a device has {format_bytes(round(room))}; cheapest relaxation: "
            f"{_memory(needed.peak_bytes)}, for micro-batch {needed.micro_batch} with "
            f"{needed.techniques or 'no technique'}"
        )
    name = cluster.name if cluster is not None else "this machine"
    sizes = tuple(sorted({way.micro_batch for way in ways}))
    return PretrainingPlan(chosen, runs, ladder, binding, name, sizes, steps[0].fixed, refused)


def _ladder(
    config: PretrainingConfig, graph: Graph, predictor: Callable[..., Sequence[Any]]
) -> tuple[str, dict[str, float], dict[str, str]]:
    """Return the techniques of one device that are faster.

    Returns:
        Their combination, the gain of each technique, and why others cannot be predicted.
    """
    best: Predicted | None = None
    gains: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name in config.techniques.split("+") if config.techniques else RUNGS:
        (rung,) = map(str, parse(name))
        text = rung if best is None else f"{best.technique}+{rung}"
        if best is not None and name == "fused_optimizer" and "fused_lamb" in best.technique:
            continue
        (prediction,) = predictor(graph, [text])
        if not isinstance(prediction, Predicted):
            if config.techniques:
                raise SlipstreamError(
                    f"techniques: {rung} cannot be predicted: {prediction.why_not}",
                    where=config.workload, remedy="leave it out, or techniques empty",
                )  # fmt: skip
            refused[rung] = prediction.why_not.removeprefix(f"{rung}: ")
            continue
        gains[rung] = prediction.speedup / (1.0 if best is None else best.speedup)
        if gains[rung] >= 1.0 or config.techniques:
            best = prediction
    return "" if best is None else best.technique, gains, refused


@dataclass(frozen=True)
class _Step:
    """A device's step, as a function of its micro-batch.

    Attributes:
        techniques: combination.
        prediction: at the recorded micro-batch.
        update_ns: time of the optimizer's update.
        recorded: time of a step and of a further micro-batch in ns, peak bytes of a step of one and
            of several micro-batches, at the recorded size.
        curves: of the same values; empty if unknown.
        fixed: why they are unknown.
    """

    techniques: str
    prediction: Predicted
    update_ns: float
    recorded: tuple[float, float, float, float]
    curves: tuple[Curve, ...] = ()
    fixed: str = ""

    def at(self, value: int, micro_batch: float) -> float:
        """Return one of `recorded` at another size; unchanged if it is unknown."""
        if not self.curves or micro_batch == self.prediction.samples[1]:
            return self.recorded[value]
        return self.curves[value].at(micro_batch).estimate

    def resized(self, micro_batch: int) -> Graph:
        """Return the predicted graph with passes as long as those of the size."""
        graph = self.prediction.graph
        assert graph is not None
        if micro_batch == self.prediction.samples[1]:
            return graph
        passes = graph.tasks.phase != StepPhase.OPTIMIZER
        length_ns = self.at(0, micro_batch) - self.update_ns
        factor = np.where(passes, length_ns / (self.recorded[0] - self.update_ns), 1.0)
        fitted = PROVENANCES.index(Provenance.FITTED)
        provenance = np.where(passes, fitted, graph.tasks.provenance).astype(np.uint8)
        times = {name: getattr(graph.tasks, name) * factor for name in ("duration_ns", "gap_ns")}
        return replace_tasks(graph, provenance=provenance, **times)

    def error(self, micro_batch: int) -> float:
        """Return the half width of the time's interval, as a logarithm."""
        half = math.log(self.prediction.high / self.prediction.ratio)
        intervals = [curve.at(micro_batch) for curve in self.curves[:1]]
        return math.hypot(half, *(math.log(i.high / i.estimate) for i in intervals))


def _steps(
    config: PretrainingConfig, graph: Graph, local: str, predictor: Callable[..., Sequence[Any]]
) -> list[_Step]:
    """Return the step of a device with the techniques, and with checkpointing."""
    combinations = [local]
    if not config.techniques:
        # Packed attention cannot be recomputed.
        parts = [part for part in local.split("+") if part not in ("", "unpad")]
        combinations.append("+".join([*parts, _CHECKPOINTING]))
    half, odd = divmod(graph.samples, 2)
    other = 2 * graph.samples if odd else half
    found = []
    for text in combinations:
        texts = [
            "+".join(filter(None, (size, text, more)))
            for size in ("", f"batch_size:{other}")
            for more in ("", "accumulation:2")
        ]
        here, here_twice, resized, resized_twice = predictor(graph, [name or () for name in texts])
        if not isinstance(here, Predicted):
            continue
        recorded, update_ns = _values(here, here_twice)
        curves: tuple[Curve, ...] = ()
        if isinstance(resized, Predicted):
            curves = tuple(
                fit([Point(graph.samples, a, _SPREAD), Point(other, b, _SPREAD)], _SPREAD)
                for a, b in zip(recorded, _values(resized, resized_twice)[0], strict=True)
            )
        found.append(_Step(text, here, update_ns, recorded, curves, resized.why_not or ""))
    return found


def _values(single: Predicted, double: Any) -> tuple[tuple[float, float, float, float], float]:
    """Return `_Step.recorded` by steps of one and two micro-batches, and the update's time."""
    assert single.graph is not None
    tasks = single.graph.tasks
    times_ns = (tasks.duration_ns + tasks.gap_ns)[tasks.phase == StepPhase.OPTIMIZER]
    update_ns, peak = float(times_ns.sum()), single.memory[1]
    further_ns, twice = single.step_ns - update_ns, peak
    if isinstance(double, Predicted):
        further_ns, twice = double.step_ns - single.step_ns, double.memory[1]
    return (single.step_ns, further_ns, float(peak), float(twice)), update_ns


@dataclass(frozen=True)
class _Way:
    """A number of devices and a micro-batch.

    Attributes:
        passes: micro-batches per update and device, by phase.
        bound_ns: time of all phases without communication.
        peak_bytes: of a device.
    """

    step: _Step
    workers: int
    micro_batch: int
    passes: tuple[int, ...]
    bound_ns: float
    peak_bytes: int


def _ways(
    config: PretrainingConfig, steps: Sequence[_Step], cluster: Cluster | None
) -> Iterator[_Way]:
    devices = 1 if cluster is None else cluster.devices
    powers = [1 << k for k in range(devices.bit_length())]
    batches = [phase.global_batch for phase in config.phases]
    longest = max(phase.length for phase in config.phases) / config.phases[0].length
    for n in dict.fromkeys([*powers, devices]):
        for step in steps:
            recorded = step.prediction.samples[1]
            limit = min(config.micro_batch or math.inf, min(batches) // n, recorded * _MAX_GROWTH)
            sizes = {math.ceil(batches[0] / (n << k)) for k in range(batches[0].bit_length() + 1)}
            for size in sorted(sizes if step.curves else {recorded}):
                if not 0 < size <= limit:
                    continue
                passes = tuple(math.ceil(batch / (n * size)) for batch in batches)
                bound_ns = _total_ns(config, step.at(0, size), step.at(1, size), passes)
                peak = step.at(3 if max(passes) > 1 else 2, size * longest)
                if not step.curves:
                    peak *= longest  # an upper bound, since parameters do not grow
                yield _Way(step, n, size, passes, bound_ns, round(peak))


def _total_ns(
    config: PretrainingConfig, step_ns: float, further_ns: float, passes: Sequence[int]
) -> float:
    """Return the time of all phases; another length takes a time in proportion to its tokens."""
    total_ns = sum(
        phase.steps * (step_ns + (count - 1) * further_ns) * phase.length
        for phase, count in zip(config.phases, passes, strict=True)
    )
    return total_ns / config.phases[0].length


def _runs(
    config: PretrainingConfig,
    ways: Sequence[_Way],
    cluster: Cluster | None,
    predictor: Callable[..., Sequence[Any]],
    room: float,
) -> Iterator[PretrainingRun]:
    """Simulate the ways that fit, except those that cannot be the fastest on their devices."""
    price = config.price_per_hour or None
    if price is None and cluster is not None and cluster.price_per_hour is not None:
        price = cluster.price_per_hour / cluster.devices
    best: dict[int, float] = {}
    for way in sorted(ways, key=lambda way: way.bound_ns):
        n, step, size = way.workers, way.step, way.micro_batch
        if way.peak_bytes > room or way.bound_ns >= best.get(n, math.inf):
            continue
        predictions: Sequence[Any] = [None]
        if n > 1:
            texts = [f"ddp:{n}{wire}" for wire in _WIRES]
            predictions = predictor(step.resized(size), texts, cluster=cluster)
        for wire, p in zip(_WIRES, predictions, strict=False):
            step_ns, error, peak_bytes = step.at(0, size), step.error(size), way.peak_bytes
            if isinstance(p, Predicted):
                step_ns, error = p.step_ns, math.hypot(error, math.log(p.high / p.ratio))
                # Replicas also hold buckets of gradients.
                peak_bytes += p.memory[1] - p.memory[0]
            if peak_bytes > room or isinstance(p, Refused):
                continue
            total_ns = _total_ns(config, step_ns, step.at(1, size), way.passes)
            hours = total_ns / _HOUR_NS
            best[n] = min(best.get(n, math.inf), total_ns)
            yield PretrainingRun(
                step.techniques, wire.lstrip("+"), n, size, way.passes,
                hours, hours * math.exp(-error), hours * math.exp(error),
                None if price is None else hours * n * price, peak_bytes,
                min(way.bound_ns / total_ns, 1.0), str((p or step.prediction).provenance),
            )  # fmt: skip


def _smallest(
    config: PretrainingConfig,
    ways: Sequence[_Way],
    cluster: Cluster | None,
    predictor: Callable[..., Sequence[Any]],
) -> PretrainingRun:
    """Return the run that takes the least memory of a device."""
    found: list[PretrainingRun] = []
    for way in sorted(ways, key=lambda way: way.peak_bytes):
        if any(run.peak_bytes <= way.peak_bytes for run in found):
            break
        found += _runs(config, [way], cluster, predictor, math.inf)
    return min(found, key=lambda run: run.peak_bytes)


def _choose(
    config: PretrainingConfig, runs: Sequence[PretrainingRun]
) -> tuple[PretrainingRun | None, str]:
    """Return the best run within budget and deadline, or the binding constraint."""
    hours = parse_duration_ns(config.deadline) / _HOUR_NS if config.deadline else math.inf
    budget = config.budget or math.inf
    if math.isfinite(budget) and all(run.dollars is None for run in runs):
        return None, "the budget cannot be judged: set price_per_hour"
    costs = {run: run.dollars or 0.0 for run in runs}
    allowed = [run for run in runs if run.hours <= hours and costs[run] <= budget]
    if allowed:
        order = 1 if math.isfinite(hours) else -1
        return min(allowed, key=lambda run: (costs[run], run.hours)[::order]), ""
    reasons = []
    in_time = [run for run in runs if run.hours <= hours]
    if in_time:
        best = min(in_time, key=lambda run: costs[run])
        reasons.append(
            f"a budget of {_dollars(costs[best])} ({best.workers} device{'s' * (best.workers > 1)})"
        )
    affordable = [run for run in runs if costs[run] <= budget]
    if affordable:
        best = min(affordable, key=lambda run: run.hours)
        reasons.append(f"a deadline of {_deadline(best.hours)}")
    if not reasons:
        best = min(runs, key=lambda run: (costs[run], run.hours))
        reasons.append(
            f"a budget of {_dollars(costs[best])} with a deadline of {_deadline(best.hours)}"
        )
    binding = "the budget" if in_time else "the deadline" if affordable else "budget and deadline"
    return None, f"{binding} cannot be met; cheapest relaxation: {' or '.join(reasons)}"


# Relaxed limits are rounded up: with the value that is shown, the run is allowed.
_ROUNDING = 1.006


def _dollars(cost: float) -> str:
    return f"${math.ceil(100 * cost) / 100:,.2f}"


def _deadline(hours: float) -> str:
    text = format_duration(hours * _HOUR_NS)
    short = parse_duration_ns(text) < hours * _HOUR_NS
    return format_duration(hours * _HOUR_NS * _ROUNDING) if short else text


def _memory(nbytes: int) -> str:
    text = format_bytes(nbytes)
    return format_bytes(nbytes * _ROUNDING) if parse_bytes(text, "memory") < nbytes else text
