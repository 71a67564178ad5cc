"""Check quality next to speed: the first steps of both sides, from the same seeds."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from slipstream.child import describe_error
from slipstream.errors import SlipstreamError, WorkloadError
from slipstream.measure.checks import QualityCheck, QualityStatus, Trial, judge
from slipstream.technique import Quality, QualityKind
from slipstream.verbs.children import DEFAULT_TIMEOUT_S, call_in_child, report_progress, run_program
from slipstream.verbs.first_steps import answers, first_steps, trial_of
from slipstream.workload import BuiltWorkload, Workload
from slipstream.workload.script import ScriptEndedError

_SEEDS = 5
# Two seeds give an interval and an estimate of chance.
_MIN_SEEDS = 2


def check_quality(
    baseline: Workload,
    candidates: Mapping[str, tuple[Workload, Quality]],
    *,
    budget_s: float | None,
    threads: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    report: Callable[[str], None] = lambda line: None,
    elsewhere: Mapping[str, Callable[[Sequence[int], int, float], list[Trial]]] | None = None,
) -> list[QualityCheck]:
    """Return a check per candidate; those that are exact by construction are not run.

    The baseline determines how many steps fit; every candidate runs as many from the same seeds.

    Args:
        candidates: transformed workload and quality of its techniques, by name.
        budget_s: approximate time per side, for at least two seeds of two steps; None for no check.
        elsewhere: (seeds, steps, timeout_s) -> trials, by name, for candidates that do not run in
            their own child.

    Raises:
        WorkloadError: the baseline's own code failed; a candidate that fails is reported as
            unchecked.
    """
    checks: dict[str, QualityCheck] = {}
    reference: list[Trial] = []
    for name, (workload, quality) in candidates.items():
        kind, basis = str(quality.kind), quality.basis
        if quality.kind is QualityKind.EXACT:
            checks[name] = QualityCheck(name, kind, QualityStatus.EXACT, basis)
            continue
        if budget_s is None:
            checks[name] = QualityCheck(
                name, kind, QualityStatus.UNCHECKED, basis, "it was switched off"
            )
            continue
        if not reference:
            reference = _trials(
                baseline, range(_SEEDS), None, budget_s, threads, timeout_s,
                _prefixed(report, "quality of the baseline"),
            )  # fmt: skip
        seeds = [trial.seed for trial in reference]
        steps = reference[0].steps
        try:
            if name in (elsewhere or {}):
                report(f"quality of {name}: {len(seeds)} seeds")
                trials = (elsewhere or {})[name](seeds, steps, timeout_s)
            else:
                trials = _trials(
                    workload, seeds, steps, budget_s, threads, timeout_s,
                    _prefixed(report, f"quality of {name}"),
                )  # fmt: skip
        except SlipstreamError as error:
            checks[name] = QualityCheck(name, kind, QualityStatus.UNCHECKED, basis, error.what)
            continue
        checks[name] = judge(name, kind, basis, reference, trials)
    return list(checks.values())


def _prefixed(report: Callable[[str], None], what: str) -> Callable[[str], None]:
    return lambda line: report(f"{what}: {line}")


def _trials(
    workload: Workload,
    seeds: Sequence[int],
    steps: int | None,
    budget_s: float,
    threads: int,
    timeout_s: float,
    report: Callable[[str], None],
) -> list[Trial]:
    """Run one trial per seed within the budget.

    A child runs as many seeds as it can; a plain script needs a process for each, and some modules
    cannot be imported twice.
    """
    began = time.monotonic()
    done: list[Trial] = []
    while len(done) < len(seeds):
        remaining = seeds[len(done) :]
        try:
            outcomes = call_in_child(
                workload,
                "slipstream.verbs.proving.quality:trials_in_child",
                threads=threads,
                timeout_s=timeout_s,
                report=report,
                seeds=list(remaining),
                steps=steps,
                budget_s=budget_s,
                seconds_left=budget_s - (time.monotonic() - began),
                seeds_before=len(done),
            )
        except ScriptEndedError as end:
            if steps is not None or not end.available:
                raise
            steps = end.available
            continue
        done += [trial_of(seed, found) for seed, found in zip(remaining, outcomes, strict=False)]
        steps = steps or done[0].steps
        elapsed_s = time.monotonic() - began
        next_s = elapsed_s / len(done)
        # Further seeds are useless if the workload sets its own.
        identical = len(done) > 1 and done[0].same_as(done[1])
        if len(done) >= _MIN_SEEDS and (elapsed_s + next_s > budget_s or identical):
            break
    return done


# The functions below run in the child.


def trials_in_child(
    workload: dict[str, Any],
    keep_in: str,
    seeds: list[int],
    steps: int | None,
    budget_s: float,
    seconds_left: float,
    seeds_before: int,
) -> Any:
    """Run one trial per seed until the time is up; a plain script only runs the first."""
    import torch  # noqa: F401 - imported before the clock starts

    began = time.monotonic()
    done: list[dict[str, Any]] = []
    for seed in seeds:
        program = functools.partial(one_trial, steps=steps, limit_s=budget_s / _SEEDS)
        number = seeds_before + len(done) + 1
        report_progress(f"seed {number} of at most {seeds_before + len(seeds)}")
        try:
            done += run_program(workload, keep_in, program, seed)
        except SlipstreamError:
            if not done:
                raise
            break
        steps = done[0]["steps"]
        gc.collect()
        elapsed_s = time.monotonic() - began
        next_s = elapsed_s / len(done)
        identical = len(done) > 1 and done[0] == done[1]
        if number >= _MIN_SEEDS and (elapsed_s + next_s > seconds_left or identical):
            break
    return done


def one_trial(
    built: BuiltWorkload, steps: int | None, limit_s: float
) -> Generator[None, Any, list[dict[str, Any]]]:
    """Run `steps` steps, or as many as fit in `limit_s`, then the metric."""
    outcome = yield from first_steps(built, steps, limit_s)
    return [{**outcome, "metric": _metric(built), **answers(built)}]


def _metric(built: BuiltWorkload) -> str | None:
    if built.metric is None:
        return None
    try:
        return repr(float(built.metric()))
    except Exception as error:
        raise WorkloadError(
            f"the workload's metric fails: {type(error).__name__}: {error}",
            where=describe_error(error)["where"],
            remedy="fix it, or prove without it: --no-quality",
        ) from error
