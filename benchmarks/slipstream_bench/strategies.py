"""Rows of ``slipstream bench search`` about proposals: samplers through our loop match Optuna, a
proposal costs no more after a long history, and what a cascade saves.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from slipstream.search import (
    Bool,
    Budget,
    Cascade,
    Categorical,
    Float,
    Space,
    State,
    Strategy,
    Study,
    Trial,
    study,
)
from slipstream.search.metrics import Objective
from slipstream.search.optuna_samplers import OptunaSampler, optuna_module
from slipstream.search.space import every
from slipstream.search.strategies import BoostedTrees
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most

Vector = Sequence[float]


def _rosenbrock(x: Vector) -> float:
    pairs = itertools.pairwise(x)
    return sum(100 * (b - a * a) ** 2 + (1 - a) ** 2 for a, b in pairs)


def _ackley(x: Vector) -> float:
    n = len(x)
    hills = sum(math.cos(2 * math.pi * value) for value in x) / n
    return 20 + math.e - 20 * math.exp(-0.2 * math.hypot(*x) / math.sqrt(n)) - math.exp(hills)


def _griewank(x: Vector) -> float:
    waves = math.prod(math.cos(value / math.sqrt(i)) for i, value in enumerate(x, 1))
    return 1 + math.hypot(*x) ** 2 / 4000 - waves


def _levy(x: Vector) -> float:
    w = [1 + (value - 1) / 4 for value in x]
    middle = sum((a - 1) ** 2 * (1 + 10 * math.sin(math.pi * a + 1) ** 2) for a in w[:-1])
    end = (w[-1] - 1) ** 2 * (1 + math.sin(2 * math.pi * w[-1]) ** 2)
    return math.sin(math.pi * w[0]) ** 2 + middle + end


FUNCTIONS: dict[str, tuple[float, Callable[[Vector], float]]] = {
    "sphere": (5.12, lambda x: sum(value * value for value in x)),
    "rosenbrock": (2.048, _rosenbrock),
    "rastrigin": (5.12, lambda x: sum(
        10 + value * value - 10 * math.cos(2 * math.pi * value) for value in x)),
    "ackley": (32.768, _ackley),
    "griewank": (600.0, _griewank),
    "levy": (10.0, _levy),
    "schwefel": (500.0, lambda x: sum(
        418.9829 - value * math.sin(math.sqrt(abs(value))) for value in x)),
    "styblinski-tang": (
        5.0, lambda x: sum(value**4 - 16 * value**2 + 5 * value for value in x) / 2),
}  # fmt: skip
"""Common test functions, by name: half the width of the domain, and the function of a vector."""
_DIMENSIONS, _PARITY_TRIALS = 5, 50


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: one seed, and no training."""
    yield from _parity_row(options)
    yield from _ask_rows(options)
    yield from _cascade_rows(options)


def _parity_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "Optuna's TPE through our loop, proposals that differ"
    seeds = 20 if options.full else 1
    if not options.wants(bar, 10.0 * seeds):
        return
    differ = 0
    for seed, (name, (half, function)) in itertools.product(range(seeds), FUNCTIONS.items()):
        options.progress(f"{bar}: {name}, seed {seed}")
        differ += _curve_of_ours(half, function, seed) != _curve_of_theirs(half, function, seed)
    cases = seeds * len(FUNCTIONS)
    yield at_most(
        bar, float(differ), 0.0, f"of {cases} curves", n=cases,
        detail=f"{len(FUNCTIONS)} functions in {_DIMENSIONS} dimensions, {_PARITY_TRIALS} trials",
    )  # fmt: skip


def _curve_of_ours(half: float, function: Callable[[Vector], float], seed: int) -> list[float]:
    space = Space({f"x{i}": Float(-half, half) for i in range(_DIMENSIONS)})

    def measure(config: Mapping[str, Any]) -> float:
        return function([config[f"x{i}"] for i in range(_DIMENSIONS)])

    run = study("s", space, "y", estimator=measure, strategy=OptunaSampler("tpe"), seed=seed)
    run.run(budget=Budget(trials=_PARITY_TRIALS))
    return [trial.values["y"] for trial in run.trials]


def _curve_of_theirs(half: float, function: Callable[[Vector], float], seed: int) -> list[float]:
    optuna = optuna_module()
    theirs = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    theirs.optimize(
        lambda trial: function(
            [trial.suggest_float(f"x{i}", -half, half) for i in range(_DIMENSIONS)]
        ),
        n_trials=_PARITY_TRIALS,
    )
    return [trial.value for trial in theirs.trials]


_SPACE = Space({f"x{i}": Float(-1.0, 1.0) for i in range(10)})
_SHORT, _LONG, _ASKED = 1_000, 10_000, 24


def _bowl(config: Mapping[str, Any]) -> float:
    return float(sum((config[f"x{i}"] - 0.3) ** 2 for i in range(10)))


def _history(count: int) -> list[Trial]:
    """Generate completed trials with random configurations."""
    rng = np.random.default_rng(0)
    trials = []
    for _ in range(count):
        candidate = _SPACE.sample(rng)
        value = _bowl(candidate.config)
        trials.append(Trial(-1, candidate, state=State.COMPLETE, values={"y": value}))
    return trials


def _begun(strategy: Strategy, history: Sequence[Trial], seed: int = 0) -> Strategy:
    strategy.begin(_SPACE, (Objective("y", "min"),), (), seed)
    for trial in history:
        strategy.tell(trial)
    return strategy


def _propose(strategy: Strategy, count: int) -> list[float]:
    """Make `count` proposals, each with its result before the next; return the values."""
    values = []
    for number in range(count):
        candidate = strategy.propose(number)
        assert candidate is not None
        values.append(_bowl(candidate.config))
        strategy.tell(Trial(number, candidate, state=State.COMPLETE, values={"y": values[-1]}))
    return values


def _ask_rows(options: BenchOptions) -> Iterator[Bar]:
    """Time a proposal after a long history over one after a short one, alternately, in CPU time."""
    history = _history(_LONG)
    for name, new in (("tpe", lambda: OptunaSampler("tpe")), ("trees", BoostedTrees)):
        bar = f"asking after {_LONG} trials over asking after {_SHORT}: {name}"
        if not options.wants(bar, 30.0):
            continue
        options.progress(bar)
        sides = [_begun(new(), history[:count]) for count in (_SHORT, _LONG)]
        for side in sides:
            _propose(side, 1)  # the first proposal summarises the history
        times_of: list[list[float]] = [[], []]
        for _ in range(_ASKED):
            for side, times in zip(sides, times_of, strict=True):
                began = time.process_time()
                _propose(side, 1)
                times.append(time.process_time() - began)
        short, long = (statistics.fmean(times) for times in times_of)
        yield at_most(
            bar, long / short, 1.5, "x", n=_ASKED,
            detail=f"{1e3 * long:.1f} ms over {1e3 * short:.1f} ms per proposal and its result",
        )  # fmt: skip
    yield from _regret_row(options, history)


class _WholeHistory(OptunaSampler):
    """TPE that gets all trials instead of a summary."""

    def _summarise(self) -> None:
        self._summarised = len(self._finished)


def _regret_row(options: BenchOptions, history: Sequence[Trial]) -> Iterator[Bar]:
    """Compare the best of proposals after the same history, summarised and in full."""
    bar = "regret with a summary of the history over that with all of it"
    seeds, trials = 10, 2_000
    if not options.full or not options.wants(bar, 120.0):
        return
    best: list[list[float]] = [[], []]
    for seed in range(seeds):
        options.progress(f"{bar}: seed {seed}")
        for kind, values in zip((OptunaSampler, _WholeHistory), best, strict=True):
            values.append(min(_propose(_begun(kind("tpe"), history[:trials], seed), 40)))
    ratios = [ours / theirs for ours, theirs in zip(*best, strict=True)]
    yield at_most(
        bar, statistics.median(ratios), 1.1, "x", n=seeds,
        detail=f"40 proposals of TPE after {trials} trials; {min(ratios):.2f} to {max(ratios):.2f}",
    )  # fmt: skip


NETS = Space(
    {
        "depth": Categorical((1, 2, 3, 4), ordered=True),
        "width": Categorical((4, 8, 16, 32, 64, 128), ordered=True),
        "activation": Categorical(("ReLU", "Tanh", "Sigmoid")),
        "normed": Bool(),
        "lr": Categorical((0.003, 0.01, 0.03, 0.1, 0.3), ordered=True),
    }
)
"""Perceptrons for digits; the bench trains every one."""
_EPOCHS, _SHORT_EPOCHS, _BATCH, _TRAINED = 24, 2, 64, 800
_CASCADES = 20
# Relative to the minimum loss.
_REGRET = 0.01
# By candidate: loss after few epochs and after all, CPU seconds to each.
_Table = dict[bytes, tuple[float, float, float, float]]


def _cascade_rows(options: BenchOptions) -> Iterator[Bar]:
    """Train every network once; studies then look up its losses and times."""
    saves = "device time to 1 % regret, one level over a cascade of two"
    chance = "candidates that a level of chance kept from the next"
    if not options.full or not (options.wants(saves, 400.0) or options.wants(chance, 400.0)):
        return
    table = _trained(lambda done: options.progress(f"{saves}: {done} networks trained"))
    if options.wants(saves):
        device_times: list[list[float]] = [[], []]
        for seed in range(_CASCADES):
            options.progress(f"{saves}: seed {seed}")
            for levels, times in zip(((), (_looked_up(table, 0),)), device_times, strict=True):
                times.append(_device_s(table, levels, seed))
        single, cascade = (statistics.median(times) for times in device_times)
        yield at_least(
            saves, single / cascade, 3.0, "x", n=_CASCADES,
            detail=f"{len(table)} perceptrons on digits; {_SHORT_EPOCHS} epochs below {_EPOCHS}; "
            f"validation loss; medians {single:.0f} s and {cascade:.0f} s",
        )  # fmt: skip
    if options.wants(chance):
        rejected = 0
        for seed in range(_CASCADES):
            run = _study(table, (_by_chance,), seed, n=100)
            rejected += sum(t.rung == 0 and t.state is State.COMPLETE for t in run.trials)
            rejected -= sum(t.rung == 1 and t.state is not State.CACHED for t in run.trials)
        of = f"of {100 * _CASCADES}"
        yield at_most(chance, float(rejected), 0.0, of, n=_CASCADES, detail="drawn by lot")


@functools.cache
def _digits() -> Any:
    import torch
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    inputs = torch.tensor(digits.data / 16, dtype=torch.float32)[order]
    return inputs, torch.tensor(digits.target)[order]


def _trained(report: Callable[[int], None]) -> _Table:
    """Return by candidate: validation loss after few epochs and all, and CPU seconds to each."""
    table: _Table = {}
    for candidate in every(NETS):
        if len(table) % 20 == 0:
            report(len(table))
        table[candidate.id] = _losses(candidate.config)
    return table


def _losses(config: Mapping[str, Any]) -> tuple[float, float, float, float]:
    import torch
    from torch import nn

    began = time.process_time()
    torch.manual_seed(0)
    inputs, targets = _digits()
    width, before, layers = config["width"], inputs.shape[1], []
    for _ in range(config["depth"]):
        norm = [nn.LayerNorm(width)] if config["normed"] else []
        layers += [nn.Linear(before, width), *norm, getattr(nn, config["activation"])()]
        before = width
    net = nn.Sequential(*layers, nn.Linear(before, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"], momentum=0.9)
    results: list[float] = []
    for epoch in range(1, _EPOCHS + 1):
        for rows in torch.randperm(_TRAINED).split(_BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs[rows]), targets[rows]).backward()
            optimizer.step()
        if epoch in (_SHORT_EPOCHS, _EPOCHS):
            with torch.no_grad():
                logits = net(inputs[_TRAINED:])
            loss = float(nn.functional.cross_entropy(logits, targets[_TRAINED:]))
            results += [loss, time.process_time() - began]
    return results[0], results[2], results[1], results[3]


def _looked_up(table: _Table, at: int) -> Callable[[Mapping[str, Any]], float]:
    return lambda config: table[NETS.candidate(config).id][at]


def _by_chance(config: Mapping[str, Any], run: Any) -> float:
    return float(run.seed)


def _study(
    table: _Table, levels: Sequence[Any], seed: int, trials: int | None = None, n: int | None = None
) -> Study:
    run = study(
        "nets", NETS, "loss", estimator=_looked_up(table, 1), strategy="random", seed=seed,
        rungs=Cascade(*levels, eta=8.0, n=n) if levels else None,
    )  # fmt: skip
    return run.run(budget=Budget(trials=trials))


def _device_s(table: _Table, levels: Sequence[Any], seed: int) -> float:
    """Return device time until the study finds a network within 1 % of the minimum loss."""
    goal = (1 + _REGRET) * min(row[1] for row in table.values() if math.isfinite(row[1]))
    spent = 0.0
    # Twice as many as there are candidates, since proposals repeat.
    run = _study(table, levels, seed, 2 * len(table))
    for trial in sorted(run.trials, key=lambda trial: trial.tell_event):
        if trial.state in (State.CACHED, State.RUNNING):
            continue
        last = trial.rung == len(levels)
        spent += table[trial.candidate.id][3 if last else 2]
        if last and trial.state is State.COMPLETE and trial.values["loss"] <= goal:
            return spent
    return math.inf
