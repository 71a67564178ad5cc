"""Records of measurements: the vocabulary, and the schema of the results store.

Environment 1-n Experiment 1-n Arm 1-n Block 1-n Sample. A *claim* is a statement about paired
blocks of one experiment. Samples are stored as columns: one `Series` per arm, metric and phase.
All records are immutable; claims are a pure function of an `Experiment` (see `claims.py`), so
that a stored claim can be recomputed exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Metric = str
"""``"wall"`` and ``"cpu"`` (ns), ``"peak_memory"`` (bytes), ``"wire_payload"`` (bytes), ...

All values are per call: a sample of `ArmRecord.inner` calls is divided by it.
"""

AUTO: Metric = "auto"
"""Value of `ExperimentSettings.primary` that lets the data choose wall or CPU time."""

UNCHANGED = "as it is"
"""Stored name of the arm without techniques."""

AFTERWARDS = "afterwards"
"""Kind of the event with an arm's observations after all timing."""
RUN_DELAY: Metric = "run_delay"
"""Time for which an arm was ready to run but had no core, in ns."""

DIAGNOSTICS = frozenset({RUN_DELAY})
"""Metrics that only explain others and carry no claims."""


class Verdict(StrEnum):
    """Verdict on a candidate against the baseline.

    `FASTER` is a win. A faster candidate does not win if results may have changed and were not
    checked (`UNBACKED`), or were checked and are worse (`QUALITY_LOST`).
    """

    FASTER = "faster"
    UNBACKED = "faster (quality not checked)"
    QUALITY_LOST = "faster (quality lost)"
    SLOWER = "slower"
    EQUIVALENT = "equivalent"
    INCONCLUSIVE = "inconclusive"
    UNTRUSTWORTHY = "not trustworthy"


class Phase(StrEnum):
    """Phase of a sample; all are stored, claims use `MEASURE`."""

    WARMUP = "warmup"
    MEASURE = "measure"


@dataclass(frozen=True)
class ExperimentSettings:
    """Settings of an experiment's run and evaluation, stored with it.

    Attributes:
        baseline: Name of the arm that the others are compared with.
        primary: Metric whose ratio stops the run; its claim is the headline. `AUTO` lets the
            data choose between wall and CPU time.
        primary_because: Reason for `primary`, for the report; may be empty.
        target_rel_width: Relative width of the primary interval below which the run stops.
        budget_s: Wall time in seconds after which no further block begins.
        level: Confidence of every printed interval, over all looks together.
        equivalence: `Verdict.EQUIVALENT` requires the interval to be within 1 +- this.
        looks: Block counts at which the run may stop.
        seed: Seed of the arm order and of resampling.
        derived: Derived metrics with claims: ``"wall_p99"``, ``"throughput"``.
        stop_when_decided: Whether to stop at a look that settles the verdict, whatever the width.
        launches: Maximum number of launches of arms in separate processes; looks then end a
            launch, and the last launch the run. See `launches.py`.
    """

    baseline: str
    primary: Metric = "wall"
    primary_because: str = ""
    target_rel_width: float = 0.02
    budget_s: float = 60.0
    level: float = 0.95
    equivalence: float = 0.02
    looks: tuple[int, ...] = (10, 20, 40, 80, 160, 320, 640, 1280)
    seed: int = 0
    derived: tuple[Metric, ...] = ()
    stop_when_decided: bool = False
    launches: int = 1


@dataclass(frozen=True)
class Series:
    """Samples of one arm, metric and phase.

    Attributes:
        values: float64 [n], in the metric's unit.
        blocks: int32 [n], the block of each value, ascending.
    """

    values: NDArray[np.float64]
    blocks: NDArray[np.int32]


@dataclass(frozen=True)
class ArmRecord:
    """One side of a comparison.

    Attributes:
        name: Name in tables; the A/A guard's second run of the baseline is ``BASELINE'``.
        description: Command, technique or function.
        inner: Calls per sample; equal for all arms of an experiment.
        workload, technique: Names in the prediction ledger, which scores a prediction against
            claims of the same workload and technique; may be empty.
    """

    name: str
    description: str = ""
    inner: int = 1
    workload: str = ""
    technique: str = ""


@dataclass(frozen=True)
class Event:
    """An event during a run: a gate reading, a warning, a failed arm."""

    block: int
    kind: str
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Environment:
    """All facts that may affect a measurement, without names of users, hosts or paths.

    Attributes:
        facts: Field name -> value (JSON); groups are dotted: ``"cpu.model"``, ``"torch.version"``.
        env_id: Hash of `facts`, without the group ``"now."`` (see `environment.py`).
    """

    facts: Mapping[str, Any]
    env_id: str


@dataclass(frozen=True)
class Claim:
    """A statement about one candidate: its ratio to the baseline, with interval and verdict.

    Attributes:
        metric: Name of the metric.
        arm, baseline: Names of the two arms.
        estimator: Name of the function in `statistics.py` that made it.
        ratio: candidate / baseline; below 1 is cheaper.
        low, high: Interval of `ratio` at `level`.
        detectable: Smallest relative difference that this run could have detected.
        blocks: Number of paired blocks.
        launches: Number of consecutive processes per side.
        further_blocks: Expected further blocks to settle an inconclusive verdict, or None.
        carries: Whether the verdict on `arm` rests on this metric.
        reason: Why the metric carries the claim, or the reason for the verdict.
    """

    metric: Metric
    arm: str
    baseline: str
    estimator: str
    ratio: float
    low: float
    high: float
    level: float
    verdict: Verdict
    detectable: float
    blocks: int
    further_blocks: int | None = None
    carries: bool = False
    reason: str = ""
    launches: int = 1

    @property
    def ci(self) -> tuple[float, float]:
        """The interval of `ratio`."""
        return self.low, self.high


def arm_label(name: str) -> str:
    """Return the name of an arm in text: ``baseline`` for the one without techniques."""
    return "baseline" if name == UNCHANGED else name


def guard_name(baseline: str) -> str:
    """Return the name of the baseline's second run, the A/A guard."""
    return f"{baseline}'"


@dataclass(frozen=True)
class Experiment:
    """Full record of one measurement.

    Attributes:
        title: Title, one line.
        created: UTC, ISO 8601.
        series: Samples by (arm, metric, phase).
        predictions: Earlier predictions by arm, as in the ledger.
        experiment_id: Name in the store; empty until it is stored.
        status: ``"complete"``; ``"ended early"`` if an arm had no more samples; ``"failed"`` or
            ``"interrupted"``, with the samples until then; ``"running"``.
    """

    title: str
    created: str
    environment: Environment
    settings: ExperimentSettings
    arms: tuple[ArmRecord, ...]
    series: Mapping[tuple[str, Metric, Phase], Series]
    events: tuple[Event, ...] = ()
    predictions: Mapping[str, PredictionRecord] = field(default_factory=dict)
    experiment_id: str = ""
    status: str = "complete"


def final_status(events: Sequence[Event]) -> str:
    """Return `Experiment.status` of a finished run from its last stop event."""
    reasons = [str(event.detail.get("reason")) for event in events if event.kind == "stop"]
    named = {"ended": "ended early", "failed": "failed", "interrupted": "interrupted"}
    return named.get(reasons[-1], "complete") if reasons else "complete"


@dataclass(frozen=True)
class PredictionRecord:
    """A prediction as stored in the ledger, scored later against a claim.

    Attributes:
        workload: Name of the workload (no absolute paths).
        technique: Technique spec.
        metric: Name of the metric.
        ratio, low, high: Predicted candidate / baseline and its 90 % interval.
        provenance: Weakest provenance of its inputs.
        detail: Further values (JSON).
    """

    workload: str
    technique: str
    metric: Metric
    ratio: float
    low: float
    high: float
    provenance: str
    created: str
    env_id: str
    detail: Mapping[str, Any] = field(default_factory=dict)

    def holds(self, claim: Claim) -> bool | None:
        """Whether the measured ratio is inside the predicted interval.

        None if the measurement is too noisy to tell: it is inconclusive and its interval contains
        the predicted one.
        """
        contains = claim.low <= self.low and self.high <= claim.high
        if claim.verdict == Verdict.INCONCLUSIVE and contains:
            return None
        return self.low <= claim.ratio <= self.high


@dataclass(frozen=True)
class BlockRows:
    """Samples and events that one block adds to a running experiment.

    Attributes:
        phase: `Phase.WARMUP` rows come first, one per warm-up round, counted separately.
        values: Values by (arm, metric); arms that did not run in this block are absent.
        events: Events during the block.
    """

    phase: Phase
    block: int
    values: Mapping[tuple[str, Metric], float]
    events: tuple[Event, ...] = ()


class Sink(Protocol):
    """Receiver of a running experiment, so that a killed process loses at most one block."""

    def begin(self, experiment: Experiment) -> None:
        """Store title, environment, settings and arms; called once, before the first sample."""

    def block(self, rows: BlockRows) -> None:
        """Store one round; called after each round of warm-up and each block."""

    def finish(self, experiment: Experiment) -> None:
        """Store the full record; called once at the end, also when interrupted."""
