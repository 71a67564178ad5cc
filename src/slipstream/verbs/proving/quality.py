"""Quality beside the speed: the first steps of both sides, from the same seeds."""

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
# Two give an interval and a size of chance; below that there is nothing to read.
_FEWEST_SEEDS = 2


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
    """One check a candidate; those that are exact by construction are not run.

    The baseline decides how many steps fit; every candidate takes as many from the same seeds.

    Args:
        candidates: by name: the transformed workload, and what its techniques do.
        budget_s: about how long each side runs, two seeds of two steps at least; None to check
            nothing.
        elsewhere: by name: (seeds, steps, timeout_s) -> trials, of candidates that do not run in a
            child of their own.

    Raises:
        WorkloadError: the baseline's own code failed; a candidate that fails is not checked, and
            the measurement says so.
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
                _of(report, "quality as it is"),
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
                    _of(report, f"quality of {name}"),
                )  # fmt: skip
        except SlipstreamError as error:
            checks[name] = QualityCheck(name, kind, QualityStatus.UNCHECKED, basis, error.what)
            continue
        checks[name] = judge(name, kind, basis, reference, trials)
    return list(checks.values())


def _of(report: Callable[[str], None], what: str) -> Callable[[str], None]:
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
    """One trial a seed, while the budget lasts.

    A child takes as many seeds as it can: a plain script has it to itself, and some modules
    cannot be imported twice.
    """
    began = time.monotonic()
    done: list[Trial] = []
    while len(done) < len(seeds):
        left = seeds[len(done) :]
        try:
            outcomes = call_in_child(
                workload,
                "slipstream.verbs.proving.quality:trials_in_child",
                threads=threads,
                timeout_s=timeout_s,
                report=report,
                seeds=list(left),
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
        done += [trial_of(seed, one) for seed, one in zip(left, outcomes, strict=False)]
        steps = steps or done[0].steps
        passed = time.monotonic() - began
        another = passed / len(done)
        # A workload that sets its own seed says nothing new with one more.
        seedless = len(done) > 1 and done[0].same_as(done[1])
        if len(done) >= _FEWEST_SEEDS and (passed + another > budget_s or seedless):
            break
    return done


# What follows runs in the child.


def trials_in_child(
    workload: dict[str, Any],
    keep_in: str,
    seeds: list[int],
    steps: int | None,
    budget_s: float,
    seconds_left: float,
    seeds_before: int,
) -> Any:
    """One trial a seed until the time is up; of a plain script only the first.

    Infinities cross the pipe as text.

    Args:
        steps: how many; None for as many as fit, which then holds for all seeds.
        budget_s, seconds_left: for all seeds, and what is left of it.
        seeds_before: how many other children did.
    """
    import torch  # noqa: F401 - before the clock starts

    began = time.monotonic()
    done: list[dict[str, Any]] = []
    for seed in seeds:
        program = functools.partial(one_trial, steps=steps, limit_s=budget_s / _SEEDS)
        at = seeds_before + len(done) + 1
        report_progress(f"seed {at} of at most {seeds_before + len(seeds)}")
        try:
            done += run_program(workload, keep_in, program, seed)
        except SlipstreamError:
            if not done:
                raise
            break
        steps = done[0]["steps"]
        gc.collect()
        passed = time.monotonic() - began
        another = passed / len(done)
        seedless = len(done) > 1 and done[0] == done[1]
        if at >= _FEWEST_SEEDS and (passed + another > seconds_left or seedless):
            break
    return done


def one_trial(
    built: BuiltWorkload, steps: int | None, limit_s: float
) -> Generator[None, Any, list[dict[str, Any]]]:
    """Run `steps` steps, or as many as fit in `limit_s`, and then the metric."""
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
            remedy="mend it, or prove without it: --no-quality",
        ) from error
