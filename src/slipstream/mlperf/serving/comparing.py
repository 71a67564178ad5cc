"""Compare two systems under load: throughput or latency, and accuracy.

Each system is a worker process with LoadGen. Short runs alternate in random order, with the runner
of ``slipstream prove``, so that disturbances affect both systems equally. Server runs have the same
arrivals on both sides (common random numbers).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.measure import ExperimentSettings, RunPlan, WorkerArm, claims, run
from slipstream.measure.environment import capture
from slipstream.measure.records import Claim
from slipstream.mlperf.serving import planning
from slipstream.mlperf.serving.rules import NOT_A_RESULT, Scenario
from slipstream.mlperf.serving.session import Session
from slipstream.tables import Field, Table
from slipstream.units import format_percent, format_ratio, format_reach

_INSIDE = "slipstream.mlperf.serving.inside"
_BLOCKS = 10


@dataclass(frozen=True)
class Contrast:
    """The comparison of two systems in one scenario.

    Attributes:
        claim: time of the second system over the first's: per query (single-stream, multi-stream),
            from arrival to answer (server), or per sample (offline).
    """

    scenario: Scenario
    claim: Claim


@dataclass(frozen=True)
class ServingComparison:
    """The result of ``slipstream mlperf serve A --against B``.

    Attributes:
        names: names of the two systems, the baseline first.
        accuracies: shares of correct answers; None without labels.
    """

    names: tuple[str, str]
    contrasts: tuple[Contrast, ...]
    accuracies: tuple[float | None, float | None]

    def table(self) -> Table:
        """Return a table with a row per scenario."""
        fields: tuple[Field[Contrast], ...] = (
            Field.of("scenario", lambda row: row.scenario.name),
            Field.number("speed-up", lambda row: format_ratio(1 / row.claim.ratio)),
            Field.of("95 % interval", _reach),
            Field.of("verdict", lambda row: str(row.claim.verdict)),
            Field.number("runs of each", lambda row: str(row.claim.blocks), optional=True),
        )
        base, other = self.names
        shown = ["-" if share is None else format_percent(share) for share in self.accuracies]
        notes = [f"accuracy: {shown[0]} ({base}), {shown[1]} ({other})", NOT_A_RESULT]
        return Table.of(self.contrasts, fields, f"{other} compared with {base}", notes)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON; ratios are of times, below 1 if the second is faster."""
        return {
            "baseline": self.names[0], "candidate": self.names[1],
            "accuracy": list(self.accuracies), "label": NOT_A_RESULT,
            "scenarios": [
                {"scenario": row.scenario.name, "ratio": row.claim.ratio, "low": row.claim.low,
                 "high": row.claim.high, "verdict": str(row.claim.verdict),
                 "runs": row.claim.blocks}
                for row in self.contrasts
            ],
        }  # fmt: skip


def _reach(contrast: Contrast) -> str:
    claim = contrast.claim
    return format_reach(1 / claim.ratio, 1 / claim.high, 1 / claim.low)


def compare(
    base: Session,
    other: Session,
    chosen: Sequence[Scenario],
    config: planning.LoadTestConfig,
    *,
    blocks: int = _BLOCKS,
    report: Callable[[str], None] = lambda line: None,
) -> ServingComparison:
    """Measure two systems alternately.

    Args:
        base, other: open sessions; both get the same runs, planned for the slower one.
        blocks: runs of each system per scenario.

    Raises:
        ArmFailedError: a system failed.
    """
    contrasts = []
    for scenario in chosen:
        report(f"comparing: {scenario.name}")
        contrasts.append(Contrast(scenario, _claim(base, other, scenario, config, blocks)))
    correct = [
        planning.accuracy(session, chosen[0]).value if session.labelled else None
        for session in (base, other)
    ]
    return ServingComparison((base.title, other.title), tuple(contrasts), (correct[0], correct[1]))


def _claim(
    base: Session, other: Session, scenario: Scenario, config: planning.LoadTestConfig, blocks: int
) -> Claim:
    tests = [planning.plan(session, scenario, config) for session in (base, other)]
    # A rate that both sustain, and a hint with which neither runs out of queries.
    slower = min(tests, key=lambda test: test.rate)
    expected_ns = min(test.expected_ns for test in tests)
    arms = [
        _arm(name, session, {**slower.to_json(), "expected_ns": expected_ns})
        for name, session in (("base", base), ("other", other))
    ]
    settings = ExperimentSettings("base", primary="wall", budget_s=600.0, looks=())
    plan = RunPlan(
        minimum_warmup_s=0.0, maximum_warmup_s=0.0, maximum_blocks=blocks, red_factor=1.0,
        guard=False,
    )  # fmt: skip
    experiment = run(arms, settings, environment=capture(), plan=plan)
    found = claims.claims(experiment)
    return next(claim for claim in found if claim.arm == "other" and claim.metric == "wall")


def _arm(name: str, session: Session, test: Mapping[str, Any]) -> WorkerArm:
    return WorkerArm(
        name,
        f"{_INSIDE}:open_model",
        f"{_INSIDE}:sample",
        arguments=session.open_arguments,
        sample_arguments={
            "test": dict(test),
            "folder": str(session.scratch(name)),
            "batch": session.policy.maximum,
            "delay_ns": session.policy.delay_ns,
            "workers": session.workers,
        },
        description=session.title,
    )
