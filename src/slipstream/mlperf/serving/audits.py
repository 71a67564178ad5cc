"""Audits: were the answers of a performance run right, and were they computed?

TEST01: a random part of the answers of a performance run must equal those of the accuracy run.
TEST04: repeating one sample must not be faster than different samples; if it is, the system caches
answers. COLD, ours: TEST04 misses a cache that was filled before both of its runs. A new process
gets new samples (each takes half of its elements from another one, all in a new order) once each,
which must not take longer than repeating them, nor than samples of the data set.

Times are compared in rounds, each arm once per round. A system fails if the interval of the ratios,
at a level over all looks together, is above the tolerance, and passes if it is below. Otherwise
more rounds follow; if the last look is inconclusive, so is the audit.

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
from slipstream.mlperf.serving.session import LoadTestRun, Session
from slipstream.tables import Field, Table
from slipstream.units import format_duration, format_percent

AUDITS = ("TEST01", "TEST04", "COLD")
# Tolerated speed-up over the audited run; the larger one for systems faster than _FAST_NS.
_TOLERANCE, _FAST_TOLERANCE, _FAST_NS = 0.10, 0.20, 200e3
_LOGGED_ANSWERS = 4096
# Numbers of rounds after which times are compared, from the smallest that can decide.
_LOOKS = (6, 12, 24)
# Two-sided error of all looks together; half of it fails a system exactly at its tolerance.
_ERROR = 0.10
_COLD_SAMPLES = 256
# Batches of different sizes round differently, which occasionally changes a class.
_MAX_DIFFERING = 0.001
_PASSED_WORDS = {True: "yes", False: "NO", None: "inconclusive"}


@dataclass(frozen=True)
class Audit:
    """The result of one audit.

    Attributes:
        name: name of the audit.
        scenario: the audited scenario.
        passed: whether the system passed; None if the times were inconclusive.
        finding: the finding in words.
        ratio: audited time over the base's, median of the rounds; None if no times were compared.
        wrong: number of different answers.
        answers: number of compared answers.
    """

    name: str
    scenario: str
    passed: bool | None
    finding: str
    ratio: float | None = None
    wrong: int = 0
    answers: int = 0


def audit_table(audits: Sequence[Audit]) -> Table:
    """Return a table with a row per audit."""
    fields: tuple[Field[Audit], ...] = (
        Field.of("audit", lambda audit: audit.name),
        Field.of("scenario", lambda audit: audit.scenario),
        Field.of("passed", lambda audit: _PASSED_WORDS[audit.passed]),
        Field.of("finding", lambda audit: audit.finding),
    )
    return Table.of(audits, fields, "audits")


def audit(
    names: Sequence[str],
    open_session: Callable[[], Session],
    session: Session,
    scenario: Scenario,
    config: planning.LoadTestConfig,
    folder: Path | None = None,
    earlier: Mapping[str, tuple[Audit, Path | None]] | None = None,
) -> list[Audit]:
    """Run audits of a scenario.

    TEST04 and COLD send single queries in every scenario, so their results are reused.

    Args:
        names: names from `AUDITS`.
        open_session: starts a new process with the same system.
        session: the measured session.
        folder: folder for the logs, in a subfolder per audit.
        earlier: audits of another scenario with their log folders, by name.

    Raises:
        UnknownNameError: there is no such audit.
    """
    need_audits(names)
    audits = []
    for name in names:
        place = folder and folder / name
        if name == "TEST01":
            audits.append(_same_answers(session, scenario, config, place))
        elif earlier and name in earlier:
            previous, previous_logs = earlier[name]
            if previous_logs is not None and place is not None:
                shutil.copytree(previous_logs, place, dirs_exist_ok=True)
            audits.append(previous)
        elif name == "TEST04":
            audits.append(_same_sample(session, config, place))
        else:
            with open_session() as fresh:
                audits.append(_unseen(fresh, place))
    return audits


def need_audits(names: Sequence[str]) -> None:
    """Raise an `UnknownNameError` unless all names are in `AUDITS`."""
    for name in names:
        if name not in AUDITS:
            raise UnknownNameError("audit", name, AUDITS)


def _same_answers(
    session: Session,
    scenario: Scenario,
    config: planning.LoadTestConfig,
    folder: Path | None = None,
) -> Audit:
    """Compare answers of a performance run with those of the accuracy run (TEST01)."""
    place = folder or session.scratch("TEST01")
    # The reference uses single queries, among which no answer can be dropped or swapped.
    alone = SCENARIOS["single-stream"]
    reference = planning.accuracy(session, alone, place / "accuracy")
    test = replace(planning.plan(session, scenario, config), log_answers=_LOGGED_ANSWERS)
    run = session.run(test, place / "performance" / "run_1")
    expected = dict(logs.read_answers(reference.folder / logs.ACCURACY))
    answers = logs.read_answers(run.folder / logs.ACCURACY)
    wrong = sum(expected.get(index) != answer for index, answer in answers)
    passed = bool(answers) and wrong <= _MAX_DIFFERING * len(answers) and not run.refused
    finding = f"{wrong} of {len(answers)} answers under load differ from the accuracy run's"
    if run.refused:
        finding += f"; {run.refused} queries were refused"
    return Audit("TEST01", scenario.name, passed, finding, None, wrong, len(answers))


def _same_sample(
    session: Session, config: planning.LoadTestConfig, folder: Path | None = None
) -> Audit:
    """Compare repeating one sample with random samples (TEST04)."""
    scenario = SCENARIOS["single-stream"]
    plain = replace(
        planning.plan(session, scenario, config), min_duration_s=config.duration_s / _LOOKS[0]
    )

    def one_round(_number: int) -> list[float]:
        return [
            _typical_ns(session.run(plain)),
            _typical_ns(session.run(replace(plain, issue="same"), folder)),
        ]

    return _compared("TEST04", one_round, ["one repeated sample"])


def _unseen(session: Session, folder: Path | None = None) -> Audit:
    """Compare unseen samples with the same samples again (COLD), in a new `session`."""
    # One sample warms up the code; the others stay unseen.
    session.warm_up()
    first = Test(
        "single-stream", min_duration_s=0.0, min_queries=1, max_queries=_COLD_SAMPLES,
        expected_ns=1e6, issue="unique", shuffle=1 + secrets.randbelow(2**32), percentile=0.5,
    )  # fmt: skip

    def one_round(number: int) -> list[float]:
        # Every round permutes the elements differently, so its samples are unseen.
        fresh = replace(first, shuffle=first.shuffle + number)
        tests = (fresh, fresh, replace(fresh, shuffle=0))
        return [_typical_ns(session.run(test, folder)) for test in tests]

    return _compared("COLD", one_round, ["a sample seen before", "one of the data set"])


def _typical_ns(run: LoadTestRun) -> float:
    return run.latencies_ns["p50"]


def _compared(name: str, one_round: Callable[[int], list[float]], suspects: Sequence[str]) -> Audit:
    """Measure rounds until a suspect fails or all pass, and return the worst verdict.

    Args:
        one_round: returns ns of the base and of each suspect for a round number.
        suspects: descriptions of the suspects.
    """
    rounds: list[list[float]] = []
    for look in _LOOKS:
        rounds += [one_round(number) for number in range(len(rounds), look)]
        times_ns = np.array(rounds)
        verdicts = [
            _judged(name, times_ns[:, 0], times_ns[:, at], what)
            for at, what in enumerate(suspects, 1)
        ]
        worst = min(verdicts, key=lambda v: ((False, None, True).index(v.passed), v.ratio or 0.0))
        if worst.passed is not None:
            break
    return worst


def _judged(name: str, base_ns: Floats, suspect_ns: Floats, what: str) -> Audit:
    """Decide whether the suspect is faster than tolerated; times are float64 [rounds]."""
    plain, fast = float(np.median(base_ns)), float(np.median(suspect_ns))
    allowed = _FAST_TOLERANCE if plain <= _FAST_NS else _TOLERANCE
    error = nominal_error(len(base_ns), _LOOKS, _ERROR, at_planned_look=True)
    excess = median_interval(np.log(base_ns / suspect_ns), 1 - error).exp()
    passed = None
    if excess.excludes(1 + allowed):
        passed = excess.high < 1 + allowed
    low, high = (format_percent(bound - 1, signed=True) for bound in (excess.low, excess.high))
    finding = (
        f"{what} takes {format_duration(fast)}, others {format_duration(plain)}: "
        f"{format_percent(excess.estimate - 1, signed=True)} ({low} to {high}), "
        f"{format_percent(allowed)} allowed"
    )
    if passed is None:
        finding += (
            f"; the times of {len(base_ns)} rounds vary too much to decide: audit again on a quiet "
            "machine"
        )
    return Audit(name, "single-stream", passed, finding, 1 / excess.estimate)
