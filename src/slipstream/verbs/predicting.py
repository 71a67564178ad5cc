"""predict: edit the graph as a technique would, simulate it, say how sure that is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

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
from slipstream.measure.records import PredictionRecord
from slipstream.provenance import Provenance, weakest
from slipstream.technique import Context, Quality, Technique
from slipstream.units import format_duration
from slipstream.verbs.sharing import Shared, network_error_ns, shared_step
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
WORTH_IT = 1.02
"""Below this speed-up a technique is not worth a line of code."""


@dataclass(frozen=True)
class Prediction:
    """What a technique, or a combination, would make of a step.

    Attributes:
        technique: its name in the grammar.
        baseline_ns, step_ns: the step's time as recorded and as predicted.
        ratio: step_ns / baseline_ns; below 1 is cheaper.
        low, high: 90 % interval of `ratio`.
        samples: samples per step before and after; 0 if unknown.
        shares: share of the predicted step by the provenance of its durations.
        why_not: why it does not apply, or cannot be predicted; then nothing else is predicted.
        quality: what it does to the model's numbers.
        edits: what was changed, in words.
        memory: peak bytes of the step before and after; 0 if not recorded or not predicted.
        metric: which clock shows it: ``cpu``, or ``wall`` where work moves to other cores.
        graph: the step as it would be.
        shared: what is to be said of it where several workers take it together.
        techniques: what is combined; empty for edits that no technique makes.
    """

    technique: str
    baseline_ns: float
    step_ns: float
    ratio: float
    low: float
    high: float
    samples: tuple[int, int] = (0, 0)
    shares: dict[Provenance, float] = field(default_factory=dict)
    why_not: str | None = None
    quality: Quality | None = None
    edits: tuple[str, ...] = ()
    memory: tuple[int, int] = (0, 0)
    metric: str = "cpu"
    graph: Graph | None = field(default=None, repr=False, compare=False)
    shared: Shared | None = None
    techniques: tuple[Technique, ...] = field(default=(), repr=False, compare=False)

    def __repr__(self) -> str:
        if self.why_not is not None:
            return f"<Prediction {self.technique} {self.verdict}: {self.why_not}>"
        return (
            f"<Prediction {self.technique}: {self.speedup:.2f}x "
            f"[{1 / self.high:.2f}, {1 / self.low:.2f}], {format_duration(self.step_ns)} per step, "
            f"{self.verdict}>"
        )

    def _repr_html_(self) -> str:
        from slipstream.verbs._notebook import prediction_html

        return prediction_html(self)

    @property
    def speedup(self) -> float:
        """How many times faster a sample is processed."""
        return 1.0 / self.ratio

    @property
    def provenance(self) -> Provenance:
        """The weakest provenance the prediction rests on."""
        return weakest(self.shares) if self.shares else Provenance.ASSUMED

    @property
    def verdict(self) -> str:
        """In words: does it pay here?"""
        if self.why_not is not None:
            return "cannot be told here" if self.why_not.startswith(_BUSY) else "does not apply"
        if 1 / self.high >= WORTH_IT:
            return "worth it"
        if self.low > 1:
            return "not worth it here: slower"
        if 1 / self.low < WORTH_IT:
            return "not worth it here"
        return "undecided: prove it"

    def to_json(self) -> dict[str, Any]:
        """As results are printed and shown; times in nanoseconds, sizes in bytes."""
        return {
            "technique": self.technique,
            "metric": self.metric,
            "baseline_ns": self.baseline_ns,
            "step_ns": self.step_ns,
            "ratio": self.ratio,
            "interval": [self.low, self.high],
            "interval_level": 0.9,
            "speedup": self.speedup,
            "samples_per_step": list(self.samples),
            "peak_bytes": list(self.memory),
            "provenance": {str(key): share for key, share in self.shares.items()},
            "quality": self.quality.kind.value if self.quality else None,
            "quality_basis": self.quality.basis if self.quality else None,
            "advice": self.quality.advice if self.quality else None,
            "why_not": self.why_not,
            "verdict": self.verdict,
            "edits": list(self.edits),
            "shared": None if self.shared is None else self.shared.to_json(self.step_ns),
        }

    def to_record(self, workload: str, env_id: str) -> PredictionRecord:
        """As the ledger keeps it."""
        return PredictionRecord(
            workload=workload,
            technique=self.technique,
            metric=self.metric,
            ratio=self.ratio,
            low=self.low,
            high=self.high,
            provenance=str(self.provenance),
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            env_id=env_id,
            detail={
                "baseline_ns": self.baseline_ns,
                "step_ns": self.step_ns,
                "peak_bytes": list(self.memory),
                "shares": {str(key): share for key, share in self.shares.items()},
                "edits": list(self.edits),
                **({} if self.shared is None else self.shared.to_detail()),
                **({} if self.graph is None else {"threads": self.graph.meta.get("threads")}),
            },
        )


def predict(
    graph: Graph,
    techniques: Sequence[str | Technique | Sequence[Technique]],
    *,
    durations: Durations | None = None,
    cluster: Cluster | None = None,
    widen: Callable[[float, float, float], tuple[float, float]] | None = None,
    baseline: Timeline | None = None,
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
    found: list[Prediction] = []
    for combination, (edited, reason) in zip(
        combinations, _fold(graph, combinations, context, say), strict=True
    ):
        name = technique.combination_name(combination)
        say(f"simulating {len(found) + 1} of {len(combinations)}: {name}")
        quality = technique.quality_of(combination, graph) if combination else None
        if reason is not None:
            one = refused(name, baseline, quality, reason)
        else:
            metric = technique.clock(combination)
            one = _prediction(name, metric, baseline, edited, quality, cluster, widen)
        found.append(replace(one, techniques=combination))
    return found


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
) -> list[tuple[Graph, str | None]]:
    """For each combination its edited graph, and the reason where a part does not apply.

    A technique is asked about, and asks its questions of, the step as the techniques before it
    would have made it. All combinations advance together, so that what they ask is measured in
    one go, where it is comparable; common beginnings are folded once.
    """
    made: dict[tuple[Technique, ...], Graph] = {(): graph}
    reasons: dict[tuple[Technique, ...], str] = {}
    for size in range(1, max(map(len, combinations), default=0) + 1):
        heads = dict.fromkeys(tuple(one[:size]) for one in combinations if len(one) >= size)
        possible = []
        for head in heads:
            before = made.get(head[:-1])
            if before is None:
                reasons[head] = reasons[head[:-1]]
            elif context.cluster is None and head[-1].traits.spreads:
                reasons[head] = f"{head[-1].name}: {_NO_CLUSTER}"
            elif (reason := technique.refusal(head[-1], before)) is not None:
                reasons[head] = f"{head[-1].name}: {reason}"
            else:
                possible.append((head, before))
        questions = [call for head, before in possible for call in head[-1].questions(before)]
        context.durations.measure(questions, say)
        for number, (head, before) in enumerate(possible, start=1):
            say(f"predicting {number} of {len(possible)}: {technique.combination_name(head)}")
            made[head] = head[-1].predict(before, context)
    folded = []
    for one in map(tuple, combinations):
        reason = reasons.get(one)
        if reason is not None and len(one) == 1:
            reason = reason.removeprefix(f"{one[0].name}: ")
        folded.append((made.get(one, graph), reason))
    return folded


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
        return refused(name, baseline, quality, f"{_BUSY}; {fewer}{_WHEN_BUSY}")
    half = _Z90 * error
    low, high = ratio * math.exp(-half), ratio * math.exp(half)
    if widen is not None:
        low, high = widen(ratio, low, high)
    return Prediction(
        name,
        baseline_ns,
        step_ns,
        ratio,
        low,
        high,
        (before.samples, after.samples),
        _shares(after),
        quality=quality,
        edits=tuple(edit.what for edit in after.edits[len(before.edits) :]),
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


def refused(name: str, baseline: Timeline, quality: Quality | None, reason: str) -> Prediction:
    """Nothing is predicted, and why."""
    nothing = math.nan
    return Prediction(
        name, baseline.step_ns, nothing, nothing, nothing, nothing,
        why_not=reason, quality=quality, memory=(baseline.peak_bytes, 0),
    )  # fmt: skip


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
