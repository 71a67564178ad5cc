"""Audits: is what was fast also what was right, and was it computed at all?

TEST01: the answers of a performance run, of which a random part is kept, are those of the accuracy
run, at the same speed. TEST04: one sample again and again is not faster than different ones, or
the system remembers. COLD, ours: TEST04 says nothing of a memory that was filled before both of its
runs; so samples that nobody can have seen (each rotated by some elements) are issued once each, in
a process that was just started, and must not take longer than when they are asked again, nor than
those of the data set.

Source: MLPerf Inference compliance tests TEST01 and TEST04 (mlcommons/inference, compliance).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slipstream.errors import UnknownNameError
from slipstream.mlperf.serving import logs, planning
from slipstream.mlperf.serving.rules import SCENARIOS, Scenario, Test
from slipstream.mlperf.serving.session import Run, Session
from slipstream.tables import Field, Table
from slipstream.units import format_duration, format_percent

AUDITS = ("TEST01", "TEST04", "COLD")
# Speeds of an audit may differ by this much from the run that is audited; fast systems by more.
_TOLERANCE, _FAST_TOLERANCE, _FAST_NS = 0.10, 0.20, 200e3
_LOGGED_ANSWERS = 4096
# Blocks of a comparison of speeds, each arm once: what a busy machine does passes both alike.
_ROUNDS = 5
_COLD_SAMPLES = 256
# Batches of other sizes round differently, which may turn a class over now and then.
_DIFFERING = 0.001


@dataclass(frozen=True)
class Audit:
    """What one audit found.

    Attributes:
        name: of the audit.
        scenario: that it audits.
        passed: whether the system stands it.
        finding: what was seen, in words.
        ratio: the audited speed over the base's, as time; None where no speed was compared.
        wrong: answers that differ; of `answers`.
    """

    name: str
    scenario: str
    passed: bool
    finding: str
    ratio: float | None = None
    wrong: int = 0
    answers: int = 0


def audit_table(found: Sequence[Audit]) -> Table:
    """A row an audit."""
    fields: tuple[Field[Audit], ...] = (
        Field.of("audit", lambda one: one.name),
        Field.of("scenario", lambda one: one.scenario),
        Field.of("passed", lambda one: "yes" if one.passed else "NO"),
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
) -> list[Audit]:
    """These audits of a scenario.

    Args:
        names: of `AUDITS`.
        open_session: makes a fresh process with the same system.
        session: that was measured.
        folder: where their logs are left.

    Raises:
        UnknownNameError: there is no such audit.
    """
    need_audits(names)
    audits = []
    for name in names:
        if name == "TEST01":
            audits.append(_same_answers(session, scenario, wishes, folder and folder / name))
        elif name == "TEST04":
            audits.append(_same_sample(session, wishes, folder and folder / name))
        else:
            with open_session() as fresh:
                audits.append(_unseen(fresh, folder and folder / name))
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
        planning.plan(session, scenario, wishes), min_duration_s=wishes.duration_s / _ROUNDS
    )
    return _slower(
        "TEST04", session, replace(plain, issue="same"), plain, "one sample again and again", folder
    )


def _unseen(session: Session, folder: Path | None = None) -> Audit:
    """Samples that nobody has seen, each once, against the same samples again.

    `session` must be one that has answered nothing yet.
    """
    # One sample warms the code; the others stay unseen.
    session.touch_one()
    first = Test(
        "single-stream", min_duration_s=0.0, min_queries=1, max_queries=_COLD_SAMPLES,
        expected_ns=1e6, issue="unique", shift=1 + secrets.randbelow(251), percentile=0.5,
    )  # fmt: skip
    again, unseen, unshifted = [], [], []
    for _ in range(_ROUNDS):
        # Another rotation each round, so that the first look at it is one.
        fresh = replace(first, shift=first.shift + 1)
        first = fresh
        unseen.append(session.run(fresh, folder))
        again.append(session.run(fresh, folder))
        unshifted.append(session.run(replace(fresh, shift=0), folder))
    comparisons = [
        _judged("COLD", unseen, again, "a sample seen before"),
        _judged("COLD", unseen, unshifted, "one of the data set"),
    ]
    return max(comparisons, key=lambda one: not one.passed)


def _slower(
    name: str, session: Session, suspect: Test, base: Test, what: str, folder: Path | None
) -> Audit:
    fast, plain = [], []
    for _ in range(_ROUNDS):
        plain.append(session.run(base))
        fast.append(session.run(suspect, folder))
    return _judged(name, plain, fast, what)


def _judged(name: str, base: Sequence[Run], suspect: Sequence[Run], what: str) -> Audit:
    """Whether the suspect's median is shorter than the base's by more than is allowed."""
    plain = min(run.latencies_ns["p50"] for run in base)
    fast = min(run.latencies_ns["p50"] for run in suspect)
    allowed = _FAST_TOLERANCE if plain <= _FAST_NS else _TOLERANCE
    passed = plain <= fast * (1 + allowed)
    finding = (
        f"{what} takes {format_duration(fast)}, others {format_duration(plain)}: "
        f"{format_percent(plain / fast - 1, signed=True)}, {format_percent(allowed)} allowed"
    )
    return Audit(name, "single-stream", passed, finding, fast / plain)
