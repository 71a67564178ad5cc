"""Train all methods on a task at the same bytes and rank them, with low dimension and codes."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from slipstream.errors import InvalidArgumentError
from slipstream.techniques.embedding.facts import facts_of
from slipstream.techniques.embedding.formats import FORMATS
from slipstream.techniques.embedding.planning import MIXED, TablePlan, plan, plan_tables
from slipstream_bench.systems.embedding.quality_tasks import Task

DENSE = "dense"
CODES = ("int8", "int4")
CONVERTED = "converted after training"
RATES = (1 / 3, 1.0, 3.0, 10.0)
"""Multiples of a task's rate: the best rate of compressed tables is not that of dense ones."""


@dataclass(frozen=True)
class Scored:
    """Scores of a method on a task.

    Attributes:
        method: ``dense``, a name of `FORMATS`, ``mixed``, or codes of the trained dense tables.
        requested: compression factor to reach; 1 for dense and for codes.
        nbytes, ratio: bytes of the tables, and their actual compression factor.
        rate: learning rate.
        scores: one score per seed.
    """

    method: str
    requested: float
    nbytes: int
    ratio: float
    rate: float
    scores: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean score over seeds."""
        return statistics.fmean(self.scores)

    @property
    def spread(self) -> float:
        """Standard deviation over seeds; 0 for one."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else 0.0


@dataclass(frozen=True)
class _Job:
    """A model to train: its tables compressed `requested` times by `method`."""

    task: Task
    method: str
    requested: float
    rate: float
    seed: int
    least_rows: int


_Outcome = tuple[int, float, float]
"""Bytes of the tables, their compression factor, and the score."""


def compare(
    task: Task,
    ratios: Sequence[float],
    methods: Sequence[str],
    *,
    seeds: int = 3,
    rates: Sequence[float] = RATES,
    convert: bool = True,
    least_rows: int = 500,
    workers: int = 1,
    progress: Callable[[str], None] = lambda line: None,
) -> Iterator[Scored]:
    """Yield scores of dense tables, their codes, and every method at every ratio it can reach.

    Args:
        methods: names of `FORMATS`, and ``mixed``.
        rates: multiples of the task's rate; if there are several, each method, and the dense
            tables, gets the best one on held-out training data, with one seed.
        convert: whether to also compress the trained dense tables by the best plan per ratio.
        workers: processes that train simultaneously, one seed each; 1 trains in this process.
            Scores do not depend on it.
    """
    keys = [(DENSE, 1.0), *((method, ratio) for ratio in ratios for method in methods)]
    with _runner(workers) as run:
        chosen = _rates(run, task, keys, rates, least_rows, progress)
        jobs = {
            key: [_Job(task, *key, chosen[key], seed, least_rows) for seed in range(seeds)]
            for key in keys
        }
        dense = [
            run(_dense, job, tuple(ratios) if convert else ()) for job in jobs.pop((DENSE, 1.0))
        ]
        own = {key: [run(_trained, job) for job in waiting] for key, waiting in jobs.items()}
        progress(f"{task.name}: dense")
        found = [outcome() for outcome in dense]
        rate = chosen[DENSE, 1.0]
        for (method, requested), (nbytes, ratio, _) in found[0].items():
            scores = tuple(outcomes[method, requested][2] for outcomes in found)
            yield Scored(method, requested, nbytes, ratio, rate, scores)
        for (method, requested), trained in own.items():
            progress(f"{task.name}: {method} at {requested:g}x")
            made = [outcome() for outcome in trained]
            if any(outcome is None for outcome in made):
                continue
            nbytes, ratio, _ = made[-1]
            scores = tuple(outcome[2] for outcome in made)
            yield Scored(method, requested, nbytes, ratio, chosen[method, requested], scores)


def epochs_to(
    task: Task,
    scored: Scored,
    target: float,
    most: int,
    *,
    least_rows: int = 500,
    workers: int = 1,
) -> list[int | None]:
    """Return the epochs in which `scored`'s method reaches `target`, by seed.

    An entry is None if `most` epochs are too few.
    """
    with _runner(workers) as run:
        waiting = [
            run(
                _epochs_to,
                _Job(task, scored.method, scored.requested, scored.rate, seed, least_rows),
                target,
                most,
            )
            for seed in range(len(scored.scores))
        ]
        return [result() for result in waiting]


def ranked(scored: Sequence[Scored], ratio: float) -> list[Scored]:
    """Return the methods at `ratio`, and codes that are as small, the best first."""
    own = [
        score
        for score in scored
        if score.requested == ratio or (score.method in CODES and score.ratio >= ratio)
    ]
    return sorted(own, key=lambda score: -score.mean)


@contextlib.contextmanager
def _runner(workers: int) -> Iterator[Callable[..., Callable[[], Any]]]:
    """Yield a function that starts a call and returns a function that waits for its result."""
    if workers == 1:
        yield functools.partial
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:

        def run(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
            return pool.submit(function, *arguments).result

        yield run


def _rates(
    run: Callable[..., Callable[[], Any]],
    task: Task,
    keys: Sequence[tuple[str, float]],
    rates: Sequence[float],
    least_rows: int,
    progress: Callable[[str], None],
) -> dict[tuple[str, float], float]:
    """Return the rate of each method at each ratio."""
    if len(rates) == 1:
        return dict.fromkeys(keys, task.rate * rates[0])
    held_out = task.validation()
    waiting = {
        key: {
            task.rate * rate: run(_trained, _Job(held_out, *key, task.rate * rate, 0, least_rows))
            for rate in rates
        }
        for key in keys
    }
    chosen = {}
    for (method, requested), tried in waiting.items():
        progress(f"{task.name}: rate of {method} at {requested:g}x")
        outcomes = {rate: result() for rate, result in tried.items()}
        # All are None if the method cannot be so small; a rate that is too high may give NaN.
        chosen[method, requested] = max(
            outcomes,
            key=lambda rate: _score(outcomes[rate]),
        )
    return chosen


def _score(outcome: _Outcome | None) -> float:
    return -1.0 if outcome is None or math.isnan(outcome[2]) else outcome[2]


def _dense(job: _Job, ratios: Sequence[float]) -> dict[tuple[str, float], _Outcome]:
    """Train the dense model, and score its tables in other forms."""
    torch.manual_seed(job.seed)
    task, model = job.task, job.task.model()
    _train(job, model)
    plans = {(method, 1.0): _codes(job, model, method) for method in CODES}
    for ratio in ratios:
        plans[CONVERTED, ratio] = plan(
            model, task.counts(), ratio=ratio, trained=True, least_rows=job.least_rows
        )
    dense_bytes = plans[CODES[0], 1.0].dense_bytes
    found = {(DENSE, 1.0): (dense_bytes, 1.0, task.score(model))}
    for key, made in plans.items():
        score = task.score(made.apply(copy.deepcopy(model)))
        found[key] = (made.nbytes, made.ratio, score)
    return found


def _codes(job: _Job, model: torch.nn.Module, method: str) -> TablePlan:
    """Compress all tables of a trained model as codes."""
    facts = facts_of(model, job.task.counts(), trained=True, least_rows=job.least_rows)
    least = sum(
        min([table.nbytes, *(choice.nbytes for choice in FORMATS[method].choices(table))])
        for table in facts
    )
    return plan_tables(facts, budget=least, methods=[method]).best


def _trained(job: _Job) -> _Outcome | None:
    """Train a method from scratch; None if it cannot be so small."""
    made = _made(job)
    if made is None:
        return None
    model, nbytes, ratio = made
    _train(job, model)
    return nbytes, ratio, job.task.score(model)


def _epochs_to(job: _Job, target: float, most: int) -> int | None:
    made = _made(job)
    if made is None:
        return None
    model = made[0]
    for epoch, _ in enumerate(islice(job.task.training(model, job.rate), most), start=1):
        if job.task.score(model) >= target:
            return epoch
    return None


def _made(job: _Job) -> tuple[torch.nn.Module, int, float] | None:
    """Return the initialised model, bytes of its tables, and their compression factor."""
    torch.manual_seed(job.seed)
    model = job.task.model()
    if job.method == DENSE:
        return model, 0, 1.0
    try:
        chosen = plan(
            model, job.task.counts(), ratio=job.requested, least_rows=job.least_rows,
            methods=None if job.method == MIXED else [job.method],
        )  # fmt: skip
    except InvalidArgumentError:
        return None
    return chosen.apply(model), chosen.nbytes, chosen.ratio


def _train(job: _Job, model: torch.nn.Module) -> None:
    for _ in islice(job.task.training(model, job.rate), job.task.epochs):
        pass
