"""Regressions: what got worse from one experiment to the next of the same title and arms.

The ratio of an arm to its baseline was measured in pairs within each experiment, so that two of
them can be held against each other although weeks lie between: both sides of the ratio moved to
the new circumstances together. A step counts when the two intervals do not overlap, which at 95 %
intervals happens by chance in fewer than one of 100 comparisons.
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
    """A change of one arm's ratio between two experiments that follow each other.

    Attributes:
        before, after: their ids.
        worse: whether the ratio got worse rather than better.
        latest: whether nothing newer of this kind was measured.
        differing: facts of the environment that differ, the code's own revision aside. With any,
            the step may come from there.
        revisions: the code's revision (with a mark if it had changes), before and after.
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
    """All steps in `history`.

    Args:
        history: experiments (their samples are not needed) with their claims, the oldest first.
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
