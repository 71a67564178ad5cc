"""Detect speed changes between consecutive experiments with the same title and arms.

Ratios of an arm to its baseline are measured in pairs within each experiment, and so are comparable
across weeks: changed conditions affect both sides of a ratio. A change counts if the two intervals
do not overlap, which for 95 % intervals happens by chance in fewer than 1 of 100 comparisons.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from slipstream.measure.claims import MORE_IS_BETTER
from slipstream.measure.environment import differences
from slipstream.measure.records import Claim, Experiment, Metric, Verdict, guard_name

_CODE = ("git.",)


@dataclass(frozen=True)
class SpeedChange:
    """A change of one arm's ratio between two consecutive experiments.

    Attributes:
        before, after: Ids of the experiments.
        worse: Whether the ratio got worse.
        latest: Whether `after` is the newest such experiment.
        differing: Differing facts of the environment, except the code's revision; they may
            explain the change.
        revisions: Revisions of the code before and after, with "+" for uncommitted changes.
    """

    title: str
    arm: str
    metric: Metric
    before: str
    after: str
    old: Claim
    new: Claim
    worse: bool
    latest: bool
    differing: tuple[str, ...]
    revisions: tuple[str, str]


def steps(history: Iterable[tuple[Experiment, Sequence[Claim]]]) -> tuple[SpeedChange, ...]:
    """Return all speed changes in `history`.

    Args:
        history: Experiments (samples are not needed) with their claims, oldest first.
    """
    lines: dict[tuple[str, frozenset[str], str, Metric], list[tuple[Experiment, Claim]]] = {}
    for experiment, claims in history:
        arms = frozenset(arm.name for arm in experiment.arms)
        for claim in claims:
            if claim.verdict is Verdict.UNTRUSTWORTHY or claim.arm == guard_name(claim.baseline):
                continue
            key = (experiment.title, arms, claim.arm, claim.metric)
            lines.setdefault(key, []).append((experiment, claim))
    return tuple(
        _step(*before, *after, latest=after is line[-1])
        for line in lines.values()
        for before, after in pairwise(line)
        if after[1].low > before[1].high or after[1].high < before[1].low
    )


def _step(
    before: Experiment, old: Claim, after: Experiment, new: Claim, *, latest: bool
) -> SpeedChange:
    differing = differences(before.environment, after.environment)
    return SpeedChange(
        title=after.title,
        arm=new.arm,
        metric=new.metric,
        before=before.experiment_id,
        after=after.experiment_id,
        old=old,
        new=new,
        worse=(new.low > old.high) != (new.metric in MORE_IS_BETTER),
        latest=latest,
        differing=tuple(name for name in differing if not name.startswith(_CODE)),
        revisions=(_revision(before), _revision(after)),
    )


def _revision(experiment: Experiment) -> str:
    facts = experiment.environment.facts
    revision = facts.get("git.revision")
    if revision is None:
        return "no revision"
    return str(revision)[:10] + ("+" if facts.get("git.dirty") else "")
