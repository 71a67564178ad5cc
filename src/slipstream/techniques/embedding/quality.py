"""Train every way on a task at the same bytes, and rank them, a small dimension and codes too."""

from __future__ import annotations

import contextlib
import copy
import functools
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.errors import InvalidArgumentError
from slipstream.techniques.embedding.facts import facts_of
from slipstream.techniques.embedding.planning import MIXED, Plan, plan, plan_tables
from slipstream.techniques.embedding.quality_tasks import Task
from slipstream.techniques.embedding.ways import WAYS

DENSE = "dense"
CODES = ("int8", "int4")
CONVERTED = "converted after training"


@dataclass(frozen=True)
class Scored:
    """A way on a task.

    Attributes:
        method: ``dense``, a name of `WAYS`, ``mixed``, or codes of the trained dense tables.
        asked: times smaller, as asked; 1 for dense, and for codes.
        nbytes, ratio: of the tables; what was reached.
        epochs: of training.
        scores: one a seed.
    """

    method: str
    asked: float
    nbytes: int
    ratio: float
    epochs: int
    scores: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Of the seeds' scores."""
        return statistics.fmean(self.scores)

    @property
    def spread(self) -> float:
        """Standard deviation between seeds; 0 for one."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else 0.0


def compare(
    task: Task,
    ratios: Sequence[float],
    methods: Sequence[str],
    *,
    seeds: int = 3,
    epochs: Callable[[str, float], int] | None = None,
    convert: bool = True,
    least_rows: int = 500,
    workers: int = 1,
    progress: Callable[[str], None] = lambda line: None,
) -> Iterator[Scored]:
    """Dense, its codes, and every method at every ratio that it can reach.

    Args:
        methods: names of `WAYS`, and ``mixed``.
        epochs: of a method at a ratio; the task's own by default.
        convert: also compress the trained dense tables by the best plan for each ratio.
        workers: processes that train at the same time, a seed each; 1 trains in this one. Scores
            are the same.
    """
    chosen: dict[tuple[str, float], int] = {
        (method, ratio): task.epochs if epochs is None else epochs(method, ratio)
        for ratio in ratios
        for method in methods
    }
    with _runner(workers) as run:
        dense = [
            run(_dense, task, ratios if convert else (), seed, least_rows) for seed in range(seeds)
        ]
        own = {
            key: [run(_trained, task, *key, seed, count, least_rows) for seed in range(seeds)]
            for key, count in chosen.items()
        }
        progress(f"{task.name}: dense")
        found = [one() for one in dense]
        for (method, asked), (nbytes, ratio, _) in found[0].items():
            scores = tuple(one[method, asked][2] for one in found)
            yield Scored(method, asked, nbytes, ratio, task.epochs, scores)
        for (method, asked), trained in own.items():
            progress(f"{task.name}: {method} at {asked:g}x")
            made = [one() for one in trained]
            if any(one is None for one in made):
                continue
            nbytes, ratio, _ = made[-1]
            scores = tuple(one[2] for one in made)
            yield Scored(method, asked, nbytes, ratio, chosen[method, asked], scores)


@contextlib.contextmanager
def _runner(workers: int) -> Iterator[Callable[..., Callable[[], Any]]]:
    """What takes a function with its arguments and gives a function that waits for its result."""
    if workers == 1:
        yield functools.partial
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:

        def run(function: Callable[..., Any], *given: Any) -> Callable[[], Any]:
            return pool.submit(function, *given).result

        yield run


def ranked(scored: Sequence[Scored], ratio: float) -> list[Scored]:
    """Those at `ratio`, and codes that are as small, the best first."""
    own = [
        one for one in scored if one.asked == ratio or (one.method in CODES and one.ratio >= ratio)
    ]
    return sorted(own, key=lambda one: -one.mean)


_Outcome = tuple[int, float, float]
"""Bytes of the tables, how many times smaller they are, and the score."""


def _dense(
    task: Task, ratios: Sequence[float], seed: int, least_rows: int
) -> dict[tuple[str, float], _Outcome]:
    """The dense model, and what its trained tables are worth in other forms."""
    torch.manual_seed(seed)
    model = task.model()
    task.train(model, task.epochs)
    plans = {(method, 1.0): _codes(task, model, method, least_rows) for method in CODES}
    for ratio in ratios:
        plans[CONVERTED, ratio] = plan(
            model, task.counts(), ratio=ratio, trained=True, least_rows=least_rows
        )
    dense_bytes = plans[CODES[0], 1.0].dense_bytes
    found = {(DENSE, 1.0): (dense_bytes, 1.0, task.score(model))}
    for key, made in plans.items():
        score = task.score(made.apply(copy.deepcopy(model)))
        found[key] = (made.nbytes, made.ratio, score)
    return found


def _codes(task: Task, model: torch.nn.Module, method: str, least_rows: int) -> Plan:
    """All tables of a trained model as codes."""
    facts = facts_of(model, task.counts(), trained=True, least_rows=least_rows)
    least = sum(
        min([one.nbytes, *(choice.nbytes for choice in WAYS[method].choices(one))]) for one in facts
    )
    return plan_tables(facts, budget=least, methods=[method]).best


def _trained(
    task: Task, method: str, ratio: float, seed: int, epochs: int, least_rows: int
) -> _Outcome | None:
    """A method trained from scratch; None where it cannot be so small."""
    torch.manual_seed(seed)
    model = task.model()
    try:
        chosen = plan(
            model, task.counts(), ratio=ratio, least_rows=least_rows,
            methods=None if method == MIXED else [method],
        )  # fmt: skip
    except InvalidArgumentError:
        return None
    chosen.apply(model)
    task.train(model, epochs)
    return chosen.nbytes, chosen.ratio, task.score(model)
