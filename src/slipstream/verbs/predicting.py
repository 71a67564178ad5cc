"""predict: edit the graph as a technique would, simulate it, estimate the error."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slipstream import technique
from slipstream.durations import Durations
from slipstream.graph import PROVENANCES, Graph, Kind, Timeline, need_graph, replay, with_overlap
from slipstream.graph.page_faults import (
    page_fault_error_ns,
    page_fault_tasks,
    with_page_faults,
)
from slipstream.provenance import Provenance
from slipstream.technique import Context, Quality, Technique
from slipstream.verbs.results import Predicted, Prediction, Refused
from slipstream.verbs.sharing import network_error_ns, shared_step
from slipstream.workload import sort_by_stage

if TYPE_CHECKING:
    from slipstream.cluster import Cluster

# Relative standard deviation of re-measuring the same unmodified step; no prediction is better.
_MIN_ERROR = 0.015
# A micro-benchmark misses the effects of an operator's surroundings (caches, clock frequency):
# the error of one operator's ratio, as a standard deviation.
_CONTEXT_ERROR = 0.06
# The machine's pace differs between the profile and the micro-benchmarks, by this standard
# deviation: the common error of amp's predictions on five models.
_PACE_ERROR = 0.05
_Z90 = 1.645
# Relative standard deviation beyond which a prediction is refused: its 90 % interval would reach
# from less than half to more than double.
_MAX_ERROR = 0.6
_BUSY = "the CPU cores were busy while this was measured"
_WHEN_BUSY = "record and predict again on an idle machine, or measure it with `slipstream prove`"
_ONE_THREAD = "--threads 1 is disturbed less; or "
_NO_CLUSTER = (
    "it needs a cluster: --cluster and a preset, a file of `slipstream cluster measure`, "
    "or --cluster workers=4,link=10gbit,latency=50us"
)


@dataclass(frozen=True)
class Obstacle:
    """The reason why a part of a combination cannot follow the parts before it."""

    part: str
    reason: str

    def among(self, combination: Sequence[Technique]) -> str:
        """Return the reason, with the part's name in a combination of several."""
        return self.reason if len(combination) == 1 else f"{self.part}: {self.reason}"


# Edited graph, or obstacle, by combination.
Folded = dict[tuple[Technique, ...], Graph | Obstacle]


def predict(
    graph: Graph,
    techniques: Sequence[str | Technique | Sequence[Technique]],
    *,
    durations: Durations | None = None,
    cluster: Cluster | None = None,
    widen: Callable[[float, float, float], tuple[float, float]] | None = None,
    baseline: Timeline | None = None,
    measuring_s: float = math.inf,
    folded: Folded | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> list[Prediction]:
    """Predict what each of `techniques` would make of `graph`, in their order.

    Operators without a cached duration on this machine are micro-benchmarked first, in a child
    process; the user's code is not run.

    Args:
        techniques: alternatives: technique specs, techniques, or combinations of techniques.
        durations: source of durations; this machine's cache by default.
        cluster: where distributed techniques would run; its devices are assumed to compute as the
            recorded one did.
        widen: (ratio, low, high) -> (low, high), from this machine's past errors, see
            `slipstream.measure.ledger`.
        baseline: `graph` simulated, if available.
        measuring_s: time limit of micro-benchmarks in seconds; remaining operators are estimated
            from similar ones and the machine's limits, with wider intervals.
        folded: edited graphs of earlier calls for the same `graph`; extended.

    Raises:
        UsageError: an invalid technique spec.
        InvalidArgumentError: `graph` is not a graph; `techniques` is a single string; more workers
            than the cluster has devices.
        ClusterError: devices of the cluster that are not connected.
        ChildError: the micro-benchmark died.
    """
    need_graph(graph)
    technique.need_alternatives(techniques)
    durations = durations or Durations(threads=int(graph.meta.get("threads", 1)))
    context = Context(durations, cluster)
    baseline = baseline or replay(graph)
    combinations = [combination_of(alternative) for alternative in techniques]
    if cluster is not None:
        # Fail before anything is measured.
        for combination in combinations:
            technique.need_devices(combination, cluster)
    predictions: list[Prediction] = []
    for combination, after in zip(
        combinations, _fold(graph, combinations, context, report, measuring_s, folded), strict=True
    ):
        name = technique.combination_name(combination)
        report(f"simulating {len(predictions) + 1} of {len(combinations)}: {name}")
        quality = technique.quality_of(combination, graph) if combination else None
        prediction: Prediction
        if isinstance(after, Obstacle):
            prediction = refusal(name, baseline, after.among(combination), quality)
        else:
            metric = "wall" if _by_wall(graph) else technique.clock(combination)
            prediction = _prediction(name, metric, baseline, after, quality, cluster, widen)
        predictions.append(replace(prediction, techniques=combination))
    return predictions


def combination_of(alternative: str | Technique | Sequence[Technique]) -> tuple[Technique, ...]:
    """Parse an alternative of `predict` or `prove`."""
    if isinstance(alternative, str):
        return technique.parse(alternative)
    if isinstance(alternative, Technique):
        return (alternative,)
    return sort_by_stage(alternative)


def _fold(
    graph: Graph,
    combinations: Sequence[Sequence[Technique]],
    context: Context,
    report: Callable[[str], None],
    measuring_s: float,
    folded: Folded | None,
) -> list[Graph | Obstacle]:
    """Return for each combination its edited graph, or the part that does not apply.

    A technique sees the step as edited by the techniques before it. All combinations advance
    together, so that their calls are timed in one comparable batch; common prefixes are edited
    once.
    """
    folded = {} if folded is None else folded
    folded[()] = graph
    until = time.monotonic() + measuring_s
    for size in range(1, max(map(len, combinations), default=0) + 1):
        heads = dict.fromkeys(tuple(parts[:size]) for parts in combinations if len(parts) >= size)
        heads = {head: None for head in heads if head not in folded}
        possible = []
        for head in heads:
            before, last = folded[head[:-1]], head[-1]
            if isinstance(before, Obstacle):
                folded[head] = before
            elif context.cluster is None and last.traits.is_distributed:
                folded[head] = Obstacle(last.name, _NO_CLUSTER)
            elif (reason := technique.refusal(last, before)) is not None:
                folded[head] = Obstacle(last.name, reason)
            else:
                possible.append((head, before))
        calls = [call for head, before in possible for call in head[-1].required_timings(before)]
        context.durations.measure(calls, report, until)
        for number, (head, before) in enumerate(possible, start=1):
            report(f"predicting {number} of {len(possible)}: {technique.combination_name(head)}")
            folded[head] = _changed(head[-1], before, head[-1].predict(before, context))
    return [folded[tuple(parts)] for parts in combinations]


def _changed(part: Technique, before: Graph, after: Graph) -> Graph | Obstacle:
    edits = after.edits[len(before.edits) :]
    if after is not before and (not edits or any(edit.tasks for edit in edits)):
        return after
    reasons = "; ".join(edit.what for edit in edits if edit.what)
    return Obstacle(part.name, f"it would change nothing here{': ' * bool(reasons)}{reasons}")


def _by_wall(graph: Graph) -> bool:
    """Whether the step was timed by the wall clock: on a device, or on several threads."""
    return "lanes_of" in graph.meta or graph.meta.get("device") == "cuda"


def _prediction(
    name: str,
    metric: str,
    baseline: Timeline,
    after: Graph,
    quality: Quality | None,
    cluster: Cluster | None,
    widen: Callable[[float, float, float], tuple[float, float]] | None,
) -> Prediction:
    before = baseline.graph
    timeline = with_page_faults(baseline, replay(after))
    if cluster is not None:
        timeline = replay(with_overlap(timeline.graph, cluster))
    after = timeline.graph
    baseline_ns, step_ns = baseline.step_ns, timeline.step_ns
    per_sample = before.workers / after.workers
    if before.samples and after.samples:
        per_sample = before.samples / after.samples
    ratio = step_ns / baseline_ns * per_sample
    error = _relative_error(baseline, after, step_ns)
    if error > _MAX_ERROR and _has_unstable_timings(after):
        fewer = _ONE_THREAD if int(before.meta.get("threads", 1)) > 1 else ""
        return refusal(name, baseline, f"{_BUSY}; {fewer}{_WHEN_BUSY}", quality, busy=True)
    half = _Z90 * error
    low, high = ratio * math.exp(-half), ratio * math.exp(half)
    if widen is not None:
        low, high = widen(ratio, low, high)
    return Predicted(
        name,
        baseline_ns,
        step_ns,
        ratio,
        low,
        high,
        (before.samples, after.samples),
        _shares(after),
        quality,
        edits=tuple(edit.what for edit in after.edits[len(before.edits) :]),
        notes={edit.technique: edit.note for edit in after.edits[len(before.edits) :] if edit.note},
        memory=(baseline.peak_bytes, timeline.peak_bytes),
        metric=metric,
        graph=after,
        shared=shared_step(timeline, cluster)
        if cluster is not None and after.workers > 1
        else None,
    )


def prediction_of(name: str, metric: str, baseline: Timeline, after: Graph) -> Prediction:
    """Return the prediction, with its interval, of an edit that no technique makes."""
    return _prediction(name, metric, baseline, after, None, None, None)


def refusal(
    name: str,
    baseline: Timeline,
    reason: str,
    quality: Quality | None = None,
    *,
    busy: bool = False,
) -> Refused:
    return Refused(name, baseline.step_ns, reason, quality, baseline.peak_bytes, busy)


def _has_unstable_timings(graph: Graph) -> bool:
    """Whether repeated timings of a changed task differ too much to predict from."""
    tasks = graph.tasks
    untimed = [PROVENANCES.index(p) for p in (Provenance.MEASURED, Provenance.ASSUMED)]
    timed = ~np.isin(tasks.provenance, untimed) & (tasks.kind != Kind.COMMUNICATION)
    return bool((tasks.spread[timed] > _MAX_ERROR).any())


def _relative_error(baseline: Timeline, after: Graph, step_ns: float) -> float:
    """Return the standard deviation of the predicted step, relative to it.

    Errors of one operator signature repeat wherever it occurs, so they add up; those of different
    signatures are independent, so their squares add up. The machine's pace shifts all
    micro-benchmarks together. Page faults vary between launches, so both sides' count.
    """
    tasks = after.tasks
    edited = tasks.provenance != PROVENANCES.index(Provenance.MEASURED)
    edited &= tasks.kind != Kind.COMMUNICATION
    edited[page_fault_tasks(after)] = False
    changed = np.flatnonzero(edited)
    times_ns = tasks.duration_ns[changed]
    errors = np.bincount(
        _error_groups(after, changed), times_ns * np.hypot(_CONTEXT_ERROR, tasks.spread[changed])
    )
    variance = float(errors @ errors) + (_PACE_ERROR * float(times_ns.sum())) ** 2
    # The recorded step is only partly representative of steps that differ.
    differing = float(after.meta.get("unaligned_share", 0.0))
    faults = [
        page_fault_error_ns(graph) / max(length, 1.0)
        for graph, length in ((baseline.graph, baseline.step_ns), (after, step_ns))
    ]
    network = network_error_ns(after) / max(step_ns, 1.0)
    return math.hypot(
        _MIN_ERROR, differing, network, *faults, math.sqrt(variance) / max(step_ns, 1.0)
    )


def _error_groups(graph: Graph, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return int64 [chosen] error groups: tasks of one group share their timing error.

    All rooflines are one group, since they rest on the same limits of the machine.
    """
    tasks = graph.tasks
    calls = tasks.call[chosen]
    numbers: dict[str, int] = {}
    signature = np.array(
        [numbers.setdefault(call.key, len(numbers)) for call in graph.calls] or [0]
    )
    # Tasks without a call, such as copies, share an error if name and duration are equal.
    uncalled = np.stack([tasks.name[chosen], tasks.duration_ns[chosen]], axis=1)[calls < 0]
    groups = signature[calls]
    groups[calls < 0] = len(numbers) + np.unique(uncalled, axis=0, return_inverse=True)[1].ravel()
    limited = tasks.provenance[chosen] == PROVENANCES.index(Provenance.ROOFLINE)
    groups[limited] = len(numbers) + len(groups)
    return groups


def _shares(graph: Graph) -> dict[Provenance, float]:
    tasks = graph.tasks
    total = float(tasks.duration_ns.sum() + tasks.gap_ns.sum())
    measured = PROVENANCES.index(Provenance.MEASURED)
    shares = {Provenance.MEASURED: float(tasks.gap_ns.sum()) / total}
    for code, nanoseconds in enumerate(np.bincount(tasks.provenance, tasks.duration_ns)):
        share = float(nanoseconds) / total
        key = PROVENANCES[code]
        shares[key] = share + (shares[key] if code == measured else 0.0)
    return {key: share for key, share in shares.items() if share > 0}
