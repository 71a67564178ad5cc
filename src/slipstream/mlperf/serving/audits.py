"""Audits: is what was fast also what was right, and was it computed at all?

TEST01: the answers of a performance run, of which a random part is kept, are those of the accuracy
run, at the same speed. TEST04: one sample again and again is not faster than different ones, or
the system remembers. COLD, ours: TEST04 says nothing of a memory that was filled before both of its
runs; so new samples (each takes half of its elements from another, all in another order) are issued
once each, in a process that was just started, and must not take longer than when they are asked
again, nor than those of the data set.

Speeds are compared in rounds, each arm once a round, and a verdict takes what the interval of the
rounds' ratios says at its level over all looks together: a system is accused where all of it lies
beyond what is allowed, and passes where none does. In between there are more rounds; where even the
last leave both open, the audit says that time cannot tell, which is neither.

Source: MLPerf Inference compliance tests TEST01 and TEST04 (mlcommons/inference, compliance).
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from slipstream.errors import UnknownNameError
from slipstream.measure.sequential import nominal_error
from slipstream.measure.statistics import Floats, median_interval
from slipstream.mlperf.serving import logs, planning
from slipstream.mlperf.serving.rules import SCENARIOS, Scenario, Test
from slipstream.mlperf.serving.session import Run, Session
from slipstream.tables import Field, Table
from slipstream.units import format_duration, format_percent

AUDITS = ("TEST01", "TEST04", "COLD")
# Speeds of an audit may differ by this much from the run that is audited; fast systems by more.
_TOLERANCE, _FAST_TOLERANCE, _FAST_NS = 0.10, 0.20, 200e3
_LOGGED_ANSWERS = 4096
# Rounds of a comparison of speeds after which it is looked at: the fewest that can decide, then
# twice as many while they do not.
_LOOKS = (6, 12, 24)
# Of all looks together, two-sided: half of it is what accuses a system exactly at its tolerance.
_ERROR = 0.10
_COLD_SAMPLES = 256
# Batches of other sizes round differently, which may turn a class over now and then.
_DIFFERING = 0.001
_ANSWERS = {True: "yes", False: "NO", None: "cannot tell"}


@dataclass(frozen=True)
class Audit:
    """What one audit found.

    Attributes:
        name: of the audit.
        scenario: that it audits.
        passed: whether the system stands it; None where time could not tell.
        finding: what was seen, in words.
        ratio: the audited speed over the base's, as time, the median of the rounds; None where no
            speed was compared.
        wrong: answers that differ; of `answers`.
    """

    name: str
    scenario: str
    passed: bool | None
    finding: str
    ratio: float | None = None
    wrong: int = 0
    answers: int = 0


def audit_table(found: Sequence[Audit]) -> Table:
    """A row an audit."""
    fields: tuple[Field[Audit], ...] = (
        Field.of("audit", lambda one: one.name),
        Field.of("scenario", lambda one: one.scenario),
        Field.of("passed", lambda one: _ANSWERS[one.passed]),
        Field.of("finding", lambda one: one.finding),
    )
    return Table.of(found, fields, "audits")


def audit(
    names: Sequence[str],
    open_session: Callable[[], Session],
    session: Session,
    scenario: Scenario,
    wishes: planning.Wishes,
    folder: Path | None = None,
    earlier: Mapping[str, tuple[Audit, Path | None]] | None = None,
) -> list[Audit]:
    """These audits of a scenario.

    TEST04 and COLD ask the system one by one whatever the scenario: they are made once.

    Args:
        names: of `AUDITS`.
        open_session: makes a fresh process with the same system.
        session: that was measured.
        folder: where their logs are left, by name.
        earlier: those of another scenario, with their logs, by name.

    Raises:
        UnknownNameError: there is no such audit.
    """
    need_audits(names)
    audits = []
    for name in names:
        place = folder and folder / name
        if name == "TEST01":
            audits.append(_same_answers(session, scenario, wishes, place))
        elif earlier and name in earlier:
            one, left = earlier[name]
            if left is not None and place is not None:
                shutil.copytree(left, place, dirs_exist_ok=True)
            audits.append(one)
        elif name == "TEST04":
            audits.append(_same_sample(session, wishes, place))
        else:
            with open_session() as fresh:
                audits.append(_unseen(fresh, place))
    return audits


def need_audits(names: Sequence[str]) -> None:
    """Nothing, unless one of these is no audit.

    Raises:
        UnknownNameError: one is not.
    """
    for name in names:
        if name not in AUDITS:
            raise UnknownNameError("audit", name, AUDITS)


def _same_answers(
    session: Session, scenario: Scenario, wishes: planning.Wishes, folder: Path | None = None
) -> Audit:
    """Answers of a performance run, held against those of the accuracy run."""
    place = folder or session.scratch("TEST01")
    # One by one, where nothing can be dropped or mixed up.
    alone = SCENARIOS["single-stream"]
    reference = planning.accuracy(session, alone, place / "accuracy")
    test = replace(planning.plan(session, scenario, wishes), log_answers=_LOGGED_ANSWERS)
    run = session.run(test, place / "performance" / "run_1")
    right = dict(logs.read_answers(reference.folder / logs.ACCURACY))
    given = logs.read_answers(run.folder / logs.ACCURACY)
    wrong = sum(right.get(index) != answer for index, answer in given)
    passed = bool(given) and wrong <= _DIFFERING * len(given) and not run.refused
    finding = f"{wrong} of {len(given)} answers under load differ from the accuracy run's"
    if run.refused:
        finding += f"; {run.refused} queries were refused"
    return Audit("TEST01", scenario.name, passed, finding, None, wrong, len(given))


def _same_sample(session: Session, wishes: planning.Wishes, folder: Path | None = None) -> Audit:
    """One sample again and again, against drawn ones."""
    scenario = SCENARIOS["single-stream"]
    plain = replace(
        planning.plan(session, scenario, wishes), min_duration_s=wishes.duration_s / _LOOKS[0]
    )

    def one_round(_number: int) -> list[float]:
        return [
            _typical_ns(session.run(plain)),
            _typical_ns(session.run(replace(plain, issue="same"), folder)),
        ]

    return _compared("TEST04", one_round, ["one sample again and again"])


def _unseen(session: Session, folder: Path | None = None) -> Audit:
    """Samples that nobody has seen, each once, against the same samples again.

    `session` must be one that has answered nothing yet.
    """
    # One sample warms the code; the others stay unseen.
    session.touch_one()
    first = Test(
        "single-stream", min_duration_s=0.0, min_queries=1, max_queries=_COLD_SAMPLES,
        expected_ns=1e6, issue="unique", shuffle=1 + secrets.randbelow(2**32), percentile=0.5,
    )  # fmt: skip

    def one_round(number: int) -> list[float]:
        # Another order each round, so that the first look at it is one.
        fresh = replace(first, shuffle=first.shuffle + number)
        tests = (fresh, fresh, replace(fresh, shuffle=0))
        return [_typical_ns(session.run(test, folder)) for test in tests]

    return _compared("COLD", one_round, ["a sample seen before", "one of the data set"])


def _typical_ns(run: Run) -> float:
    return run.latencies_ns["p50"]


def _compared(name: str, one_round: Callable[[int], list[float]], suspects: Sequence[str]) -> Audit:
    """Rounds until every suspect is judged, or one accused; of the verdicts the gravest.

    Args:
        one_round: nanoseconds of the base and of each suspect, by the round's number.
        suspects: what they are, in words.
    """
    rounds: list[list[float]] = []
    for look in _LOOKS:
        rounds += [one_round(number) for number in range(len(rounds), look)]
        times_ns = np.array(rounds)
        verdicts = [
            _judged(name, times_ns[:, 0], times_ns[:, at], what)
            for at, what in enumerate(suspects, 1)
        ]
        gravest = min(
            verdicts, key=lambda one: ((False, None, True).index(one.passed), one.ratio or 0.0)
        )
        if gravest.passed is not None:
            break
    return gravest


def _judged(name: str, base_ns: Floats, suspect_ns: Floats, what: str) -> Audit:
    """Whether the suspect is quicker than the base by more than is allowed; float64 [rounds]."""
    plain, fast = float(np.median(base_ns)), float(np.median(suspect_ns))
    allowed = _FAST_TOLERANCE if plain <= _FAST_NS else _TOLERANCE
    error = nominal_error(len(base_ns), _LOOKS, _ERROR, at_planned_look=True)
    excess = median_interval(np.log(base_ns / suspect_ns), 1 - error).exp()
    passed = None
    if excess.excludes(1 + allowed):
        passed = excess.high < 1 + allowed
    low, high = (format_percent(one - 1, signed=True) for one in (excess.low, excess.high))
    finding = (
        f"{what} takes {format_duration(fast)}, others {format_duration(plain)}: "
        f"{format_percent(excess.estimate - 1, signed=True)} ({low} to {high}), "
        f"{format_percent(allowed)} allowed"
    )
    if passed is None:
        finding += (
            f"; {len(base_ns)} rounds differ too much for time to tell: audit again on a quiet "
            "machine"
        )
    return Audit(name, "single-stream", passed, finding, 1 / excess.estimate)
