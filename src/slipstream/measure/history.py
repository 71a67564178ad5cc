"""Regressions: what got worse from one experiment to the next of the same title and arms.

The ratio of an arm to its baseline was measured in pairs within each experiment, so that two of
them can be held against each other although weeks lie between: both sides of the ratio moved to
the new circumstances together. A step counts when the two intervals do not overlap, which at 95 %
intervals happens by chance in fewer than one of 100 comparisons.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slipstream.measure.claims import MORE_IS_BETTER
from slipstream.measure.environment import differences
from slipstream.measure.records import Claim, Experiment, Metric, Verdict, guard_name

_CODE = ("git.",)


@dataclass(frozen=True)
class Step:
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


def steps(history: Iterable[tuple[Experiment, Sequence[Claim]]]) -> tuple[Step, ...]:
    """All steps in `history`.

    Args:
        history: experiments (their samples are not needed) with their claims, the oldest first.
    """
    lines: dict[tuple[str, frozenset[str], str, Metric], list[tuple[Experiment, Claim]]] = {}
    for experiment, claims in history:
        arms = frozenset(arm.name for arm in experiment.arms)
        for claim in claims:
            if claim.verdict is not Verdict.UNTRUSTWORTHY and claim.arm != guard_name(
                claim.baseline
            ):
                key = (experiment.title, arms, claim.arm, claim.metric)
                lines.setdefault(key, []).append((experiment, claim))
    found = []
    for line in lines.values():
        for number in range(1, len(line)):
            step = _step(line[number - 1], line[number], latest=number == len(line) - 1)
            if step is not None:
                found.append(step)
    return tuple(found)


def _step(
    before: tuple[Experiment, Claim], after: tuple[Experiment, Claim], *, latest: bool
) -> Step | None:
    old, new = before[1], after[1]
    if new.low <= old.high and old.low <= new.high:
        return None
    rose = new.low > old.high
    differing = differences(before[0].environment, after[0].environment)
    return Step(
        title=after[0].title,
        arm=new.arm,
        metric=new.metric,
        before=before[0].experiment_id,
        after=after[0].experiment_id,
        old=old,
        new=new,
        worse=rose != (new.metric in MORE_IS_BETTER),
        latest=latest,
        differing=tuple(name for name in differing if not name.startswith(_CODE)),
        revisions=(_revision(before[0]), _revision(after[0])),
    )


def _revision(experiment: Experiment) -> str:
    facts = experiment.environment.facts
    revision = facts.get("git.revision")
    if revision is None:
        return "no revision"
    return str(revision)[:10] + ("+" if facts.get("git.dirty") else "")
