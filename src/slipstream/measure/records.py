"""What a measurement is made of: the vocabulary, and the schema of the results store.

Environment 1-n Experiment 1-n Arm 1-n Block 1-n Sample. A *claim* is a statement about paired
blocks of one experiment. Samples are kept as columns: one `Series` per arm, metric and phase.
Everything here is a value; claims are a pure function of an `Experiment` (see `claims.py`), so
that a stored claim can be recomputed to the digit.
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
"""As `ExperimentSettings.primary`: wall or CPU, whichever the data show to be the honest one."""

AFTERWARDS = "afterwards"
"""The kind of the event that holds what an arm had to show once nothing was timed any more."""
RUN_DELAY: Metric = "run_delay"
"""Nanoseconds an arm was ready to run and had no core: what contention added to its wall time."""

DIAGNOSTICS = frozenset({RUN_DELAY})
"""Metrics that explain others; no claim is made about them and no table needs to show them."""


class Verdict(StrEnum):
    """What may be said about a candidate against the baseline.

    `FASTER` is a win. It is none where the numbers may have changed and nobody looked
    (`UNBACKED`), or where somebody looked and they are worse (`QUALITY_LOST`).
    """

    FASTER = "faster"
    UNBACKED = "faster (quality not checked)"
    QUALITY_LOST = "faster (quality lost)"
    SLOWER = "slower"
    EQUIVALENT = "equivalent"
    INCONCLUSIVE = "inconclusive"
    UNTRUSTWORTHY = "not trustworthy"


class Phase(StrEnum):
    """When a sample was taken; only `MEASURE` carries claims, none is dropped."""

    WARMUP = "warmup"
    MEASURE = "measure"


@dataclass(frozen=True)
class ExperimentSettings:
    """How an experiment was run and is judged; stored with it.

    Attributes:
        baseline: name of the arm all others are compared with.
        primary: the metric whose ratio stops the run; its claim is the headline. `AUTO` lets the
            data choose between wall and CPU time.
        primary_because: why it is that metric, as the report says it; empty where nobody said.
        target_rel_width: stop when the primary interval is narrower than this fraction.
        budget_s: wall seconds after which no further block is begun.
        level: confidence of every printed interval, over all looks together.
        equivalence: `Verdict.EQUIVALENT` when the whole interval is inside 1 +- this.
        looks: block counts at which stopping is considered.
        seed: of the arm order and of resampling.
        derived: statistics of other metrics that are claimed too: ``"wall_p99"``,
            ``"throughput"``.
        stop_when_decided: stop at a look that settles the verdict, however wide the interval.
        launches: how often, at most, arms that live in processes of their own are started; looks
            then end a launch, and the last launch the run. See `launches.py`.
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
        blocks: int32 [n], the block each value was taken in, ascending.
    """

    values: NDArray[np.float64]
    blocks: NDArray[np.int32]


@dataclass(frozen=True)
class ArmRecord:
    """One side of a comparison.

    Attributes:
        name: as shown; the A/A guard's second run of the baseline is ``BASELINE'``.
        description: command, technique or function, in words.
        inner: calls per sample; equal for all arms of an experiment.
        workload, technique: in the words of the prediction ledger, which scores a prediction
            against claims of the same workload and technique; empty where that means nothing.
    """

    name: str
    description: str = ""
    inner: int = 1
    workload: str = ""
    technique: str = ""


@dataclass(frozen=True)
class Event:
    """Something that happened during a run: a gate reading, a warning, a failed arm."""

    block: int
    kind: str
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Environment:
    """Everything that may change a measurement, without names of users, hosts or paths.

    Attributes:
        facts: field name -> value (JSON); groups are dotted: ``"cpu.model"``, ``"torch.version"``.
        env_id: hash of `facts`, without the group ``"now."`` (see `environment.py`).
    """

    facts: Mapping[str, Any]
    env_id: str


@dataclass(frozen=True)
class Claim:
    """A statement about one candidate: its ratio to the baseline, and how sure we are.

    Attributes:
        metric: which metric.
        arm, baseline: names of the two arms.
        estimator: name of the function in `statistics.py` that made it.
        ratio: candidate / baseline; below 1 is cheaper.
        low, high: interval of `ratio` at `level`.
        detectable: the smallest relative difference this run could have told from none.
        blocks: paired blocks it rests on.
        launches: in how many processes of every side, one after the other.
        further_blocks: expected further blocks to settle an inconclusive verdict, or None.
        carries: whether this is the metric the verdict on `arm` rests on.
        reason: why the metric carries the claim, or why the verdict is what it is.
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


def guard_name(baseline: str) -> str:
    """The name under which the baseline runs a second time: the A/A guard."""
    return f"{baseline}'"


@dataclass(frozen=True)
class Experiment:
    """Everything one measurement recorded.

    Attributes:
        title: one line for people.
        created: UTC, ISO 8601.
        series: samples by (arm, metric, phase).
        predictions: by arm: what was predicted for it before, as in the ledger.
        experiment_id: its name in the store; empty until it is stored.
        status: ``"complete"``; ``"ended early"``: an arm had nothing more to measure;
            ``"failed"``, ``"interrupted"``: cut off, samples kept; ``"running"``.
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
    """The `Experiment.status` of a run that is over, by how it stopped last."""
    reasons = [str(event.detail.get("reason")) for event in events if event.kind == "stop"]
    named = {"ended": "ended early", "failed": "failed", "interrupted": "interrupted"}
    return named.get(reasons[-1], "complete") if reasons else "complete"


@dataclass(frozen=True)
class PredictionRecord:
    """A prediction as the ledger keeps it, scored later against a claim.

    Attributes:
        workload: what was predicted for (no absolute paths).
        technique: the grammar's name for it.
        metric: which metric.
        ratio, low, high: predicted candidate / baseline and its 90 % interval.
        provenance: weakest provenance among what it rests on.
        detail: anything else (JSON).
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
    """What one block added to a running experiment.

    Attributes:
        phase: `Phase.WARMUP` rows come first, one a warm-up round, all with their own count.
        values: by (arm, metric); an arm that did not run in this block is absent.
        events: what happened during it.
    """

    phase: Phase
    block: int
    values: Mapping[tuple[str, Metric], float]
    events: tuple[Event, ...] = ()


class Sink(Protocol):
    """Keeps a running experiment, so that a killed coordinator loses at most the running block."""

    def begin(self, experiment: Experiment) -> None:
        """Called once before the first sample: title, environment, settings and arms."""

    def block(self, rows: BlockRows) -> None:
        """Called after each round of warm-up and each block."""

    def finish(self, experiment: Experiment) -> None:
        """Called once at the end, also when interrupted, with everything."""
