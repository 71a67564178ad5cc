"""Effect of Adasum on training: simulated workers, compared with tuned averages and sums.

Two uses are judged: `AdasumOptimizer`, where each worker has its own momentum, and `adasum_hook`
before one SGD with momentum; with constant learning rates, and with rates that decay to zero, as in
most trainings. Rates are chosen on samples that are not reported.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from scipy.stats import spearmanr

from slipstream.techniques.distributed.adasum.rule import benefit
from slipstream_bench.rows import Bar, BenchOptions, at_least, not_judged
from slipstream_bench.systems.adasum.study import Study
from slipstream_bench.systems.adasum.tasks import MISSING, fashion, of_equal_steps
from slipstream_bench.systems.adasum.tasks_other import of_other_data

# Candidates for the best learning rate of one worker.
_RATES = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08)
# Candidates for averages and for sums.
_TUNED = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
_WAYS = {"adasum": "AdasumOptimizer", "adasum_hook": "adasum_hook"}
_SCHEDULES = {False: "", True: ", falling rate"}
_SEEDS = 5
# Seeds to choose rates by; the rates are a factor of two apart.
_CHOOSING = 3
# Shares of a training that averages after which a step is profiled; the last is the single step.
_PROFILED_AT = (0.65, 0.8, 0.95)
_ONE, _SEVERAL = "one step's", "several steps'"


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: one seed."""
    yield from _headline(options)
    yield from _window(options)
    yield from _benefit(options)


def _headline(options: BenchOptions) -> Iterator[Bar]:
    for name in ("MLP", "CNN"):
        for falling, schedule in _SCHEDULES.items():
            yield from _against_tuned(options, name, falling, schedule)


def _against_tuned(options: BenchOptions, name: str, falling: bool, schedule: str) -> Iterator[Bar]:
    of = {
        rule: (
            f"16 workers, {name}, {way}{schedule}: over averaging at one worker's learning rate",
            f"16 workers, {name}, {way}{schedule}: over the best tuned average or sum",
        )
        for rule, way in _WAYS.items()
    }
    if not any(options.wants(bar) for bars in of.values() for bar in bars):
        return
    study = fashion(name)
    if study is None:
        yield not_judged(of["adasum"][0], "points", ">= 3", MISSING)
        return
    options.progress(of["adasum"][0])
    study = replace(study, falling=falling)
    seeds = range(_SEEDS if options.full else 1)
    few = seeds[:_CHOOSING]
    lr = _best_rate(replace(study, workers=1), _RATES, few)
    # Sums are averages at the rate multiplied by the number of workers.
    candidates = sorted({rate * times for rate in _TUNED for times in (1, study.workers)})
    tuned = _best_rate(study, candidates, few)
    mean, best = (_reached(study, "average", rate, seeds) for rate in (lr, tuned))
    for way, (gain, margin) in of.items():
        ours = _reached(study, way, lr, seeds)
        note = f"lr {lr:g}; momentum 0.9, 32 samples a worker"
        yield _over(gain, ours, mean, 3.0, note)
        yield _over(margin, ours, best, -0.5, f"lr {lr:g}, averages best at {tuned:g}")


def _over(bar: str, ours: list[float], theirs: list[float], least: float, note: str) -> Bar:
    """Return a row of the mean difference in points, over the same seeds."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    return at_least(
        bar, statistics.mean(differences), least, "points", n=len(differences),
        detail=f"{statistics.mean(ours):.1f} against {statistics.mean(theirs):.1f} %, seeds "
        f"{min(differences):+.1f} to {max(differences):+.1f}; {note}",
    )  # fmt: skip


def _best_rate(study: Study, rates: Iterable[float], seeds: Iterable[int]) -> float:
    """Return the learning rate of averages that is best on the samples to choose by."""
    seeds = list(seeds)

    def right(rate: float) -> float:
        return statistics.mean(study.reached("average", rate, seed).chosen for seed in seeds)

    return max(rates, key=right)


def _reached(study: Study, rule: str, lr: float, seeds: Iterable[int]) -> list[float]:
    """Return accuracy on the reported samples by seed, in percent."""
    return [study.reached(rule, lr, seed).held for seed in seeds]


def _window(options: BenchOptions) -> Iterator[Bar]:
    for epochs, falling in ((3, False), (12, True)):
        of = {
            rule: f"64 workers, {way}{_SCHEDULES[falling]}, {epochs} epochs: learning rates within "
            "95 % of the best, largest over smallest"
            for rule, way in _WAYS.items()
        }
        if not any(map(options.wants, of.values())):
            continue
        study = fashion("MLP", 64, epochs)
        if study is None:
            yield not_judged(of["adasum"], "x", ">= 8", MISSING)
            continue
        options.progress(of["adasum"])
        study = replace(study, falling=falling)
        rates = [0.001 * 2**k for k in range(9)]
        seeds = range(4 if options.full else 1)
        # For sums, given as rates of averages.
        width, said = _window_of(study, "average", [16 * rate for rate in rates], seeds)
        for rule, bar in of.items():
            ours, detail = _window_of(study, rule, rates, seeds)
            yield Bar(
                bar, ours, "x", ">= 8, and >= 4 times that of sums", ours >= max(8.0, 4.0 * width),
                len(seeds), f"{detail}; {study.steps} steps; sums, as averages at 64 times the "
                f"rate, {width:g}x, {said}",
            )  # fmt: skip


def _window_of(
    study: Study, rule: str, rates: Sequence[float], seeds: Iterable[int]
) -> tuple[float, str]:
    """Return the largest over the smallest rate around the best that is within 95 % of it."""
    seeds = list(seeds)
    found = [statistics.mean(_reached(study, rule, rate, seeds)) for rate in rates]
    best = max(range(len(rates)), key=found.__getitem__)
    good = [accuracy >= 0.95 * found[best] for accuracy in found]
    first = last = best
    while first > 0 and good[first - 1]:
        first -= 1
    while last + 1 < len(rates) and good[last + 1]:
        last += 1
    said = f"{found[best]:.1f} % at {rates[best]:g}, from {rates[first]:g} to {rates[last]:g}"
    return rates[last] / rates[first], said


def _benefit(options: BenchOptions) -> Iterator[Bar]:
    """Predict the gain for tasks of equal length: those that the rule was found on, and others."""
    for which, make in (("6 tasks", of_equal_steps), ("4 tasks of other data", of_other_data)):
        of = {
            many: f"benefit told from {many} gradients, rank correlation with the gain of {which}"
            for many in (_ONE, _SEVERAL)
        }
        if not any(map(options.wants, of.values())):
            continue
        tasks = make()
        if tasks is None:
            yield not_judged(of[_ONE], "", ">= 0.8", MISSING)
            continue
        options.progress(of[_ONE])
        yield from _predicted(tasks, of, range(3 if options.full else 1))


def _predicted(tasks: dict[str, Study], of: dict[str, str], seeds: Sequence[int]) -> Iterator[Bar]:
    predicted: dict[str, list[float]] = {many: [] for many in of}
    alone: dict[str, list[float]] = {"orthogonality": [], "loss": []}
    gains, said = [], []
    for name, study in tasks.items():
        study = replace(study, falling=True)
        lr = _best_rate(replace(study, workers=1), _RATES, seeds[:1])
        profiles = [
            (benefit(products), loss)
            for seed in seeds
            for products, loss in study.profiles(lr, seed, _PROFILED_AT)
        ]
        worth = [estimate.worth(loss) for estimate, loss in profiles]
        predicted[_ONE].append(worth[len(_PROFILED_AT) - 1])
        predicted[_SEVERAL].append(statistics.mean(worth))
        alone["orthogonality"].append(
            statistics.mean(estimate.orthogonality for estimate, _ in profiles)
        )
        alone["loss"].append(statistics.mean(loss for _, loss in profiles))
        ours, mean = (_reached(study, rule, lr, seeds) for rule in ("adasum_hook", "average"))
        differences = [a - b for a, b in zip(ours, mean, strict=True)]
        gains.append(statistics.mean(differences))
        said.append(
            f"{name}: {alone['orthogonality'][-1]:.2f} x {alone['loss'][-1]:.2f}, "
            f"{gains[-1]:+.1f} points ({min(differences):+.1f} to {max(differences):+.1f})"
        )
    separate = {what: float(spearmanr(values, gains).statistic) for what, values in alone.items()}
    parts = ", ".join(f"{what} alone {value:.2f}" for what, value in separate.items())
    for many, bar in of.items():
        yield at_least(
            bar, float(spearmanr(predicted[many], gains).statistic), 0.8, "", n=len(tasks),
            detail="16 workers, hook, falling rate, rate of one worker; predicted by orthogonality "
            f"times loss late in a training that averages ({parts}); means of "
            f"{len(_PROFILED_AT) * len(seeds)} steps, gain over averaging: {'; '.join(said)}",
        )  # fmt: skip
