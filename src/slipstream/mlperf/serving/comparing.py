"""Two systems under load, in turns: which serves more, by how much, and is it as accurate?

Each system is a worker process with LoadGen in it; the comparison asks one after the other for a
short run, in random order, by the runner that ``slipstream prove`` uses, so that what the machine
does meanwhile passes both alike. Server runs have the same arrivals on both sides (the schedule's
seed): common random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.measure import Plan, Settings, WorkerArm, claims, run
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
    """One scenario of the two.

    Attributes:
        claim: how many times as long the second takes as the first: a query (single-stream,
            multi-stream), a query's wait and answer (server), a sample (offline).
    """

    scenario: Scenario
    claim: Claim


@dataclass(frozen=True)
class Compared:
    """The result of ``slipstream mlperf serve A --against B``.

    Attributes:
        names: of the two; the first is the baseline.
        accuracies: shares of right answers; None without labels.
    """

    names: tuple[str, str]
    contrasts: tuple[Contrast, ...]
    accuracies: tuple[float | None, float | None]

    def table(self) -> Table:
        """A row a scenario."""
        fields: tuple[Field[Contrast], ...] = (
            Field.of("scenario", lambda one: one.scenario.name),
            Field.number("faster", lambda one: format_ratio(1 / one.claim.ratio)),
            Field.of(
                "95 % interval",
                lambda one: format_reach(
                    1 / one.claim.ratio, 1 / one.claim.high, 1 / one.claim.low
                ),
            ),
            Field.of("verdict", lambda one: str(one.claim.verdict)),
            Field.number("runs of each", lambda one: str(one.claim.blocks), optional=True),
        )
        base, other = self.names
        shown = ["-" if one is None else format_percent(one) for one in self.accuracies]
        notes = [f"accuracy: {shown[0]} ({base}), {shown[1]} ({other})", NOT_A_RESULT]
        return Table.of(self.contrasts, fields, f"{other} against {base}, in turns", notes)

    def to_json(self) -> dict[str, Any]:
        """The result for programs; ratios are of times, below 1 where the second is faster."""
        return {
            "baseline": self.names[0], "candidate": self.names[1],
            "accuracy": list(self.accuracies), "label": NOT_A_RESULT,
            "scenarios": [
                {"scenario": one.scenario.name, "ratio": one.claim.ratio, "low": one.claim.low,
                 "high": one.claim.high, "verdict": str(one.claim.verdict),
                 "runs": one.claim.blocks}
                for one in self.contrasts
            ],
        }  # fmt: skip


def _reach(one: Contrast) -> str:
    claim = one.claim
    return format_reach(1 / claim.ratio, 1 / claim.high, 1 / claim.low)


def compare(
    base: Session,
    other: Session,
    chosen: Sequence[Scenario],
    wishes: planning.Wishes,
    *,
    blocks: int = _BLOCKS,
    report: Callable[[str], None] = lambda line: None,
) -> Compared:
    """Measure two systems in turns.

    Args:
        base, other: opened; both are asked the same runs, those that suit the slower one.
        blocks: runs of each, for each scenario.

    Raises:
        ArmFailedError: one of them failed.
    """
    contrasts = []
    for scenario in chosen:
        report(f"comparing: {scenario.name}")
        contrasts.append(Contrast(scenario, _claim(base, other, scenario, wishes, blocks)))
    right = tuple(
        planning.accuracy(one, chosen[0]).value if one.labelled else None for one in (base, other)
    )
    return Compared((base.title, other.title), tuple(contrasts), (right[0], right[1]))


def _claim(
    base: Session, other: Session, scenario: Scenario, wishes: planning.Wishes, blocks: int
) -> Claim:
    tests = [planning.plan(one, scenario, wishes) for one in (base, other)]
    # A rate that both sustain, and hints by which neither runs out of queries.
    test = min(tests, key=lambda one: one.rate)
    hints = min(one.expected_ns for one in tests)
    arms = [
        _arm(name, one, {**test.to_json(), "expected_ns": hints})
        for name, one in (("base", base), ("other", other))
    ]
    settings = Settings("base", primary="wall", budget_s=600.0, looks=())
    plan = Plan(
        minimum_warmup_s=0.0, maximum_warmup_s=0.0, maximum_blocks=blocks, red_factor=1.0,
        guard=False,
    )  # fmt: skip
    experiment = run(arms, settings, environment=capture(), plan=plan)
    judged = claims.claims(experiment)
    return next(one for one in judged if one.arm == "other" and one.metric == "wall")


def _arm(name: str, session: Session, test: Mapping[str, Any]) -> WorkerArm:
    return WorkerArm(
        name,
        f"{_INSIDE}:open_model",
        f"{_INSIDE}:sample",
        arguments=session.asked,
        sample_arguments={
            "test": dict(test),
            "folder": str(session.scratch(name)),
            "batch": session.policy.maximum,
            "delay_ns": session.policy.delay_ns,
            "workers": session.workers,
        },
        description=session.title,
    )
