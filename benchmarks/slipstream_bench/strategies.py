"""Rows of ``slipstream bench search`` about who proposes: that Optuna's samplers are Optuna's, that
asking costs no more with a long history, and what a cascade saves.
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
    hills = sum(math.cos(2 * math.pi * one) for one in x) / n
    return 20 + math.e - 20 * math.exp(-0.2 * math.hypot(*x) / math.sqrt(n)) - math.exp(hills)


def _griewank(x: Vector) -> float:
    waves = math.prod(math.cos(one / math.sqrt(i)) for i, one in enumerate(x, 1))
    return 1 + math.hypot(*x) ** 2 / 4000 - waves


def _levy(x: Vector) -> float:
    w = [1 + (one - 1) / 4 for one in x]
    middle = sum((a - 1) ** 2 * (1 + 10 * math.sin(math.pi * a + 1) ** 2) for a in w[:-1])
    end = (w[-1] - 1) ** 2 * (1 + math.sin(2 * math.pi * w[-1]) ** 2)
    return math.sin(math.pi * w[0]) ** 2 + middle + end


FUNCTIONS: dict[str, tuple[float, Callable[[Vector], float]]] = {
    "sphere": (5.12, lambda x: sum(one * one for one in x)),
    "rosenbrock": (2.048, _rosenbrock),
    "rastrigin": (5.12, lambda x: sum(
        10 + one * one - 10 * math.cos(2 * math.pi * one) for one in x)),
    "ackley": (32.768, _ackley),
    "griewank": (600.0, _griewank),
    "levy": (10.0, _levy),
    "schwefel": (500.0, lambda x: sum(
        418.9829 - one * math.sin(math.sqrt(abs(one))) for one in x)),
    "styblinski-tang": (5.0, lambda x: sum(one**4 - 16 * one**2 + 5 * one for one in x) / 2),
}  # fmt: skip
"""Half the width of its box, and the function: the usual ones, here of five numbers."""
_DIMENSIONS, _PARITY_TRIALS = 5, 50


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Quick: one seed, and nothing that trains."""
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
        detail=f"{len(FUNCTIONS)} functions of {_DIMENSIONS} numbers, {_PARITY_TRIALS} trials each",
    )  # fmt: skip


def _curve_of_ours(half: float, function: Callable[[Vector], float], seed: int) -> list[float]:
    space = Space({f"x{i}": Float(-half, half) for i in range(_DIMENSIONS)})

    def measure(config: Mapping[str, Any]) -> float:
        return function([config[f"x{i}"] for i in range(_DIMENSIONS)])

    run = study("s", space, "y", estimator=measure, strategy=OptunaSampler("tpe"), seed=seed)
    run.run(budget=Budget(trials=_PARITY_TRIALS))
    return [one.values["y"] for one in run.trials]


def _curve_of_theirs(half: float, function: Callable[[Vector], float], seed: int) -> list[float]:
    optuna = optuna_module()
    theirs = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    theirs.optimize(
        lambda trial: function(
            [trial.suggest_float(f"x{i}", -half, half) for i in range(_DIMENSIONS)]
        ),
        n_trials=_PARITY_TRIALS,
    )
    return [one.value for one in theirs.trials]


_SPACE = Space({f"x{i}": Float(-1.0, 1.0) for i in range(10)})
_SHORT, _LONG, _ASKED = 1_000, 10_000, 24


def _bowl(config: Mapping[str, Any]) -> float:
    return float(sum((config[f"x{i}"] - 0.3) ** 2 for i in range(10)))


def _history(count: int) -> list[Trial]:
    """Trials at random that have ended, as a study would tell of them."""
    rng = np.random.default_rng(0)
    trials = []
    for _ in range(count):
        candidate = _SPACE.sample(rng)
        value = _bowl(candidate.config)
        trials.append(Trial(-1, candidate, state=State.COMPLETE, values={"y": value}))
    return trials


def _begun(strategy: Strategy, history: Sequence[Trial], seed: int = 0) -> Strategy:
    strategy.begin(_SPACE, (Objective("y", "min"),), (), seed)
    for one in history:
        strategy.tell(one)
    return strategy


def _go_on(strategy: Strategy, count: int) -> list[float]:
    """So many proposals, each told before the next; the values."""
    values = []
    for number in range(count):
        candidate = strategy.propose(number)
        assert candidate is not None
        values.append(_bowl(candidate.config))
        strategy.tell(Trial(number, candidate, state=State.COMPLETE, values={"y": values[-1]}))
    return values


def _ask_rows(options: BenchOptions) -> Iterator[Bar]:
    """A proposal after a long history over one after a short one, CPU time of both in turns."""
    history = _history(_LONG)
    for name, new in (("tpe", lambda: OptunaSampler("tpe")), ("trees", BoostedTrees)):
        bar = f"asking after {_LONG} trials over asking after {_SHORT}: {name}"
        if not options.wants(bar, 30.0):
            continue
        options.progress(bar)
        sides = [_begun(new(), history[:count]) for count in (_SHORT, _LONG)]
        for side in sides:
            _go_on(side, 1)  # the first one summarises the history
        took: list[list[float]] = [[], []]
        for _ in range(_ASKED):
            for side, times in zip(sides, took, strict=True):
                began = time.process_time()
                _go_on(side, 1)
                times.append(time.process_time() - began)
        short, long = (statistics.fmean(times) for times in took)
        yield at_most(
            bar, long / short, 1.5, "x", n=_ASKED,
            detail=f"{1e3 * long:.1f} ms over {1e3 * short:.1f} ms a proposal, its answer told",
        )  # fmt: skip
    yield from _regret_row(options, history)


class _WholeHistory(OptunaSampler):
    """TPE that is shown all trials."""

    def _summarise(self) -> None:
        self._summarised = len(self._told)


def _regret_row(options: BenchOptions, history: Sequence[Trial]) -> Iterator[Bar]:
    """The best of proposals that go on from the same history: summarised, and as it is."""
    bar = "regret with a summary of the history over that with all of it"
    seeds, known = 10, 2_000
    if not options.full or not options.wants(bar, 120.0):
        return
    best: list[list[float]] = [[], []]
    for seed in range(seeds):
        options.progress(f"{bar}: seed {seed}")
        for kind, values in zip((OptunaSampler, _WholeHistory), best, strict=True):
            values.append(min(_go_on(_begun(kind("tpe"), history[:known], seed), 40)))
    ratios = [ours / theirs for ours, theirs in zip(*best, strict=True)]
    yield at_most(
        bar, statistics.median(ratios), 1.1, "x", n=seeds,
        detail=f"40 proposals of TPE after {known} trials; {min(ratios):.2f} to {max(ratios):.2f}",
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
"""Perceptrons for digits, of which every one is trained."""
_EPOCHS, _SHORT_EPOCHS, _BATCH, _TRAINED = 24, 2, 64, 800
_CASCADES = 20
# Of the least loss there is.
_REGRET = 0.01
# By candidate: loss after few epochs and after all, CPU seconds to each.
_Table = dict[bytes, tuple[float, float, float, float]]


def _cascade_rows(options: BenchOptions) -> Iterator[Bar]:
    """Every network is trained once; studies then look up its losses, and what each took."""
    saves = "device time to 1 % regret, one level over a cascade of two"
    chance = "candidates that a level of chance kept from the next"
    if not options.full or not (options.wants(saves, 400.0) or options.wants(chance, 400.0)):
        return
    table = _trained(lambda done: options.progress(f"{saves}: {done} networks trained"))
    if options.wants(saves):
        took: list[list[float]] = [[], []]
        for seed in range(_CASCADES):
            options.progress(f"{saves}: seed {seed}")
            for levels, times in zip(((), (_looked_up(table, 0),)), took, strict=True):
                times.append(_device_s(table, levels, seed))
        one, two = (statistics.median(times) for times in took)
        yield at_least(
            saves, one / two, 3.0, "x", n=_CASCADES,
            detail=f"{len(table)} perceptrons on digits; {_SHORT_EPOCHS} epochs below {_EPOCHS}; "
            f"validation loss; medians {one:.0f} s and {two:.0f} s",
        )  # fmt: skip
    if options.wants(chance):
        kept = 0
        for seed in range(_CASCADES):
            run = _study(table, (_by_chance,), seed, n=100)
            kept += sum(t.rung == 0 and t.state is State.COMPLETE for t in run.trials)
            kept -= sum(t.rung == 1 and t.state is not State.CACHED for t in run.trials)
        of = f"of {100 * _CASCADES}"
        yield at_most(chance, float(kept), 0.0, of, n=_CASCADES, detail="drawn by lot")


@functools.cache
def _digits() -> Any:
    import torch
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    inputs = torch.tensor(digits.data / 16, dtype=torch.float32)[order]
    return inputs, torch.tensor(digits.target)[order]


def _trained(report: Callable[[int], None]) -> _Table:
    """By candidate: validation loss after few epochs and after all, and CPU seconds to each."""
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
    told: list[float] = []
    for epoch in range(1, _EPOCHS + 1):
        for rows in torch.randperm(_TRAINED).split(_BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs[rows]), targets[rows]).backward()
            optimizer.step()
        if epoch in (_SHORT_EPOCHS, _EPOCHS):
            with torch.no_grad():
                logits = net(inputs[_TRAINED:])
            loss = float(nn.functional.cross_entropy(logits, targets[_TRAINED:]))
            told += [loss, time.process_time() - began]
    return told[0], told[2], told[1], told[3]


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
    """Device time until a network is known whose loss is within 1 % of the least there is."""
    goal = (1 + _REGRET) * min(one[1] for one in table.values() if math.isfinite(one[1]))
    spent = 0.0
    # Twice as many as there are: proposals come back.
    run = _study(table, levels, seed, 2 * len(table))
    for one in sorted(run.trials, key=lambda trial: trial.told):
        if one.state in (State.CACHED, State.RUNNING):
            continue
        last = one.rung == len(levels)
        spent += table[one.candidate.id][3 if last else 2]
        if last and one.state is State.COMPLETE and one.values["loss"] <= goal:
            return spent
    return math.inf
