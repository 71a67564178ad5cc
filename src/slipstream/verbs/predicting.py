"""predict: edit the graph as a technique would, simulate it, say how sure that is."""

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
from slipstream.workload import in_order

if TYPE_CHECKING:
    from slipstream.cluster import Cluster

# Half-width, relative to the step, that no prediction here is better than: what re-measuring the
# same unmodified step differs by.
_FLOOR = 0.015
# Micro-benchmarks miss what an operator's surroundings do to it (caches, clock frequency); the
# error of one operator's ratio, as a standard deviation.
_IN_PLACE = 0.06
# The machine's pace differs between the profile and the micro-benchmarks, by this much as a
# standard deviation: what amp's predictions missed by in common on five models.
_PACE = 0.05
_Z90 = 1.645
# Standard deviation, relative to the step, from which on a number would say nothing: its 90 %
# interval would reach from less than half to more than double.
_NO_PREDICTION = 0.6
_BUSY = "the cores here were busy while this was measured"
_WHEN_BUSY = "record and ask again when the machine is idle, or let `slipstream prove` measure it"
_ONE_THREAD = "--threads 1 is disturbed less; or "
_NO_CLUSTER = (
    "it needs a cluster to run on: --cluster and a preset, a file of `slipstream cluster measure`, "
    "or --cluster workers=4,link=10gbit,latency=50us"
)


@dataclass(frozen=True)
class Obstacle:
    """Why a part of a combination cannot follow on those before it."""

    part: str
    reason: str

    def among(self, combination: Sequence[Technique]) -> str:
        """The reason, with the part's name where there are several."""
        return self.reason if len(combination) == 1 else f"{self.part}: {self.reason}"


# By combination, what it makes of one graph.
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
    say: Callable[[str], None] = lambda line: None,
) -> list[Prediction]:
    """What each of `techniques` would make of `graph`, in their order.

    Operators whose durations are not known yet on this machine are micro-benchmarked first, in a
    child process; the user's code is not run.

    Args:
        techniques: alternatives: names in the grammar, techniques, or combinations of them.
        durations: where durations come from; this machine's cache by default.
        cluster: where techniques that spread the step over workers would run; its devices are
            taken to compute as the recorded one did.
        widen: (ratio, low, high) -> (low, high): this machine's history of errors, see
            `slipstream.measure.ledger`.
        baseline: `graph` simulated, if that is at hand.
        measuring_s: how long operators that are not known yet are micro-benchmarked, in seconds;
            what is left is estimated from neighbours and limits, and intervals are as wide as that.
        folded: what earlier calls made of `graph`, which is not edited again; added to.

    Raises:
        UsageError: a name or setting that is not in the grammar.
        InvalidArgumentError: `graph` is a path, or anything else that is no graph; `techniques` is
            one text; more workers than the cluster has devices.
        ClusterError: devices of the cluster that are not joined.
        ChildError: the micro-benchmark died.
    """
    need_graph(graph)
    technique.need_alternatives(techniques)
    durations = durations or Durations(threads=int(graph.meta.get("threads", 1)))
    context = Context(durations, cluster)
    baseline = baseline or replay(graph)
    combinations = [_combination(one) for one in techniques]
    if cluster is not None:
        # Before anything is measured: whether they can be there at all.
        for combination in combinations:
            technique.need_devices(combination, cluster)
    predictions: list[Prediction] = []
    for combination, after in zip(
        combinations, _fold(graph, combinations, context, say, measuring_s, folded), strict=True
    ):
        name = technique.combination_name(combination)
        say(f"simulating {len(predictions) + 1} of {len(combinations)}: {name}")
        quality = technique.quality_of(combination, graph) if combination else None
        answer: Prediction
        if isinstance(after, Obstacle):
            answer = refusal(name, baseline, after.among(combination), quality)
        else:
            metric = "wall" if _by_wall(graph) else technique.clock(combination)
            answer = _prediction(name, metric, baseline, after, quality, cluster, widen)
        predictions.append(replace(answer, techniques=combination))
    return predictions


def _combination(one: str | Technique | Sequence[Technique]) -> tuple[Technique, ...]:
    if isinstance(one, str):
        return technique.parse(one)
    if isinstance(one, Technique):
        return (one,)
    return in_order(one)


def _fold(
    graph: Graph,
    combinations: Sequence[Sequence[Technique]],
    context: Context,
    say: Callable[[str], None],
    measuring_s: float,
    folded: Folded | None,
) -> list[Graph | Obstacle]:
    """For each combination its edited graph, or the part that does not apply.

    A technique is asked about, and asks its questions of, the step as the techniques before it
    would have made it. All combinations advance together, so that what they ask is measured in
    one go, where it is comparable; common beginnings are folded once.
    """
    folded = {} if folded is None else folded
    folded[()] = graph
    until = time.monotonic() + measuring_s
    for size in range(1, max(map(len, combinations), default=0) + 1):
        heads = dict.fromkeys(tuple(one[:size]) for one in combinations if len(one) >= size)
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
        asked = [call for head, before in possible for call in head[-1].required_timings(before)]
        context.durations.measure(asked, say, until)
        for number, (head, before) in enumerate(possible, start=1):
            say(f"predicting {number} of {len(possible)}: {technique.combination_name(head)}")
            folded[head] = _changed(head[-1], before, head[-1].predict(before, context))
    return [folded[tuple(one)] for one in combinations]


def _changed(part: Technique, before: Graph, after: Graph) -> Graph | Obstacle:
    """`after`, or that it changes nothing: no ratio of 1 that asks for a proof."""
    edits = after.edits[len(before.edits) :]
    if after is not before and (not edits or any(edit.tasks for edit in edits)):
        return after
    reasons = "; ".join(edit.what for edit in edits if edit.what)
    return Obstacle(part.name, f"it would change nothing here{': ' * bool(reasons)}{reasons}")


def _by_wall(graph: Graph) -> bool:
    """Whether the step was recorded by the wall clock: on a device, or on several threads."""
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
    if error > _NO_PREDICTION and _timed_apart(after):
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
    """What the step was edited to, with its interval: for edits that no technique makes."""
    return _prediction(name, metric, baseline, after, None, None, None)


def refusal(
    name: str,
    baseline: Timeline,
    reason: str,
    quality: Quality | None = None,
    *,
    busy: bool = False,
) -> Refused:
    """Nothing is predicted of the simulated step, and why."""
    return Refused(name, baseline.step_ns, reason, quality, baseline.peak_bytes, busy)


def _timed_apart(graph: Graph) -> bool:
    """Whether repetitions of a task that was changed differ so much that its time is not known.

    What is merely assumed was not disturbed by anything.
    """
    tasks = graph.tasks
    others = [PROVENANCES.index(one) for one in (Provenance.MEASURED, Provenance.ASSUMED)]
    timed = ~np.isin(tasks.provenance, others) & (tasks.kind != Kind.COMMUNICATION)
    return bool((tasks.spread[timed] > _NO_PREDICTION).any())


def _relative_error(baseline: Timeline, after: Graph, step_ns: float) -> float:
    """Standard deviation of the predicted step, relative to it.

    Errors of one operator signature repeat wherever it occurs, so they add up; those of
    different signatures are independent, so their squares do. What all micro-benchmarks have in
    common (the machine's pace while they ran) moves every changed task alike. Page faults differ
    between any two launches, so those of both sides count.
    """
    tasks = after.tasks
    chosen = tasks.provenance != PROVENANCES.index(Provenance.MEASURED)
    chosen &= tasks.kind != Kind.COMMUNICATION
    chosen[page_fault_tasks(after)] = False
    changed = np.flatnonzero(chosen)
    lasts_ns = tasks.duration_ns[changed]
    errors = np.bincount(
        _alike(after, changed), lasts_ns * np.hypot(_IN_PLACE, tasks.spread[changed])
    )
    variance = float(errors @ errors) + (_PACE * float(lasts_ns.sum())) ** 2
    # Where the steps differ, the recorded one stands for the others only so far.
    differing = float(after.meta.get("unaligned_share", 0.0))
    faults = [
        page_fault_error_ns(graph) / max(length, 1.0)
        for graph, length in ((baseline.graph, baseline.step_ns), (after, step_ns))
    ]
    network = network_error_ns(after) / max(step_ns, 1.0)
    return math.hypot(_FLOOR, differing, network, *faults, math.sqrt(variance) / max(step_ns, 1.0))


def _alike(graph: Graph, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [chosen], a number for each of these tasks: the same for those that are off alike."""
    tasks = graph.tasks
    call = tasks.call[chosen]
    numbers: dict[str, int] = {}
    signature = np.array([numbers.setdefault(one.key, len(numbers)) for one in graph.calls] or [0])
    # Of what calls no operator, copies are off alike.
    copies = np.stack([tasks.name[chosen], tasks.duration_ns[chosen]], axis=1)[call < 0]
    alike = signature[call]
    alike[call < 0] = len(numbers) + np.unique(copies, axis=0, return_inverse=True)[1].ravel()
    return alike


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
