"""``slipstream bench pipeline``: schedules, stable learning rates, and stages on two processes."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import nn

import slipstream as ss
from slipstream import native
from slipstream.cluster.orders import ORDERS, Action, Order
from slipstream.ranks import calibrate
from slipstream.techniques.pipeline.technique import Pipeline, Schedule
from slipstream.verbs.predicting import predict
from slipstream.verbs.profiling import profile
from slipstream.workload import Workload
from slipstream.workload.built import build_from
from slipstream_bench.harness import paired
from slipstream_bench.lab import Turn, arms_on_ranks, on_ranks
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most

_STAGES = (4, 8, 16, 32, 64, 128)
_MICRO_BATCHES = (1, 2, 7, 16, 64)
_SPEEDS = {1: 1.75, 2: 1.35, 4: 1.15}
_WIDTH, _LAYERS, _ROWS, _STEPS = 512, 8, 64, 12
# Discrepancy, and the gain of the correction that the source reports.
_GAINS = {1.0: 2.2, 5.0: 5.5, 20.0: 10.0}
_DELAYS = (0, 1, 2, 4, 8, 16, 32, 64)
_LOSS_STEPS = 100
_BATCH = 512
_PREDICTED: tuple[Schedule, ...] = ("gpipe", "1f1b", "zero_bubble", "async")
_MESSAGES = (1 << 13, 1 << 15, 1 << 17, 1 << 19)


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: fewer blocks."""
    for name, expected in (
        ("gpipe", lambda stages, n: n / (n + stages - 1)),
        ("async", lambda stages, n: 1.0),
    ):
        bar = f"{name}: utilisation differs from theory by"
        if options.wants(bar):
            errors = [
                abs(utilisation(ORDERS[name](stages, n)) - expected(stages, n))
                for stages in _STAGES
                for n in _MICRO_BATCHES
            ]
            yield at_most(bar, max(errors), 1e-9, "", n=len(errors), detail="4 to 128 stages")
    bar = "largest stable rate: differs from simulated training by"
    if options.wants(bar):
        yield _stability(bar)
    for discrepancy, target in _GAINS.items():
        bar = f"stable rate with correction, discrepancy {discrepancy:g}"
        if options.wants(bar):
            plain, corrected = (
                ss.pipeline.largest_stable_rate(10, 1.0, discrepancy, correction)
                for correction in (0.0, math.exp(-2))
            )
            yield at_least(bar, corrected / plain, target, "x", detail="delay of 10 updates")
    bar = "losses of stages differ from one process by"
    if options.wants(bar, 30.0):
        options.progress(bar)
        yield _losses(bar)
    for micro_batches, target in _SPEEDS.items():
        bar = f"async against gpipe, 2 processes, {micro_batches} micro-batches"
        if options.wants(bar, 20.0):
            options.progress(bar)
            with arms_on_ranks(2, turns, micro_batches=micro_batches) as arms:
                runs = paired(
                    arms, clock="wall", blocks=25 if options.full else 9,
                    budget_s=60.0 if options.full else 15.0,
                )  # fmt: skip
            yield runs.ratio("gpipe", "async").at_least(
                bar, target, detail=f"limit {1 + 1 / micro_batches:g}, {_LAYERS} layers"
            )
    bar = "predicted step, 2 processes, median error"
    if options.wants(bar, 60.0):
        options.progress(bar)
        yield _predicted(bar, (2, 4, 8) if options.full else (4,), 25 if options.full else 7)


def _predicted(bar: str, sizes: Sequence[int], blocks: int) -> Bar:
    """Compare predicted and measured speed-ups over one process, in steps of equal batches."""
    torch.set_num_threads(1)
    graph = profile(Workload.of(*_parts(_BATCH)), steps=8, threads=1)
    cluster = calibrate(2, sizes=_MESSAGES, repeats=5)
    errors, notes = [], []
    for size in sizes:
        names = [f"pipeline:2,micro_batches={size},schedule={name}" for name in _PREDICTED]
        predictions = predict(graph, names, cluster=cluster)
        with arms_on_ranks(2, predicted_turns, micro_batches=size) as arms:
            runs = paired(arms, clock="wall", blocks=blocks, budget_s=60.0)
        for name, prediction in zip(_PREDICTED, predictions, strict=True):
            measured = runs.ratio("alone", name).value
            predicted = prediction.baseline_ns / prediction.step_ns
            errors.append(100 * abs(measured / predicted - 1.0))
            notes.append(f"{name}, {size}: {predicted:.2f}x, measured {measured:.2f}x")
    return at_most(
        bar, statistics.median(errors), 10.0, "%", n=len(errors),
        detail=f"largest {max(errors):.0f} %; speed-ups over one process: {'; '.join(notes)}",
    )  # fmt: skip


def utilisation(order: Order) -> float:
    """Return the busy share of equal stages whose passes take equally long."""
    index: dict[tuple[int, Action, int], int] = {}
    for stage, row in enumerate(order.slots):
        for slot in row:
            index[stage, slot.action, slot.micro_batch] = len(index)
    edges = []
    for (stage, action, m), task in index.items():
        other = stage + 1 if action is Action.BACKWARD else stage - 1
        if action is not Action.UPDATE and (other, action, m) in index:
            lag = order.shift(stage, action, m) - order.shift(other, action, m)
            edges.append((index[other, action, m], task, lag))
    source, target, lags = np.array(edges, np.int32).T
    duration = np.array([float(action is not Action.UPDATE) for _, action, _ in index])
    program = native.Program(
        lane=np.array([stage for stage, _, _ in index], np.int32), duration_ns=duration,
        edges=native.Edges(source, target, lag=lags.astype(np.uint8)), steps=2 + order.max_shift,
    )  # fmt: skip
    ends = native.simulate(program).step_end_ns
    return float(duration.sum() / order.stages / (ends[-1] - ends[-2]))


def _stability(bar: str) -> Bar:
    errors = []
    for delay in _DELAYS:
        low, high = 0.0, 2.5
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (low, middle) if _diverges(middle, delay) else (middle, high)
        errors.append(100 * abs(low / ss.pipeline.largest_stable_rate(delay) - 1.0))
    return at_most(
        bar, max(errors), 1.0, "%", n=len(errors), detail="quadratic, delays of 0 to 64 updates"
    )


def _diverges(rate: float, delay: int) -> bool:
    weights = [1.0] * (delay + 1)
    middle = 0.0
    steps = 1000 * (delay + 1)
    for step in range(steps):
        weights.append(weights[-1] - rate * weights[-1 - delay])
        if step == steps // 2:
            middle = max(map(abs, weights[-4 * delay - 8 :]))
        if abs(weights[-1]) > 1e6:
            return True
    return max(map(abs, weights[-4 * delay - 8 :])) > middle


def _parts(rows: int, width: int = _WIDTH) -> tuple[object, ...]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(_LAYERS)]
    model = nn.Sequential(*layers)
    batch = torch.randn(rows, width), torch.randn(rows, width)
    return model, batch, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 1e-3, 0.9)


def _losses(bar: str) -> Bar:
    built = build_from(_parts(24, 64), (), 0, "bench")
    alone = np.array([float(built.step()) for _ in range(_LOSS_STEPS)])
    errors = [
        float(np.abs(np.array(losses) / alone - 1.0).max())
        for stages, schedule in ((2, "gpipe"), (3, "1f1b"), (3, "zero_bubble"))
        for losses in on_ranks(stages, stage_losses, stages=stages, schedule=schedule)
    ]
    return at_most(
        bar, max(errors), 1e-5, "", n=len(errors),
        detail=f"{_LOSS_STEPS} steps, 2 and 3 processes, three schedules",
    )  # fmt: skip


# The functions below run in the process of a rank.


def stage_losses(stages: int, schedule: Schedule) -> list[float]:
    """Return the losses of a pipeline of 4 micro-batches."""
    built = build_from(_parts(24, 64), (Pipeline(stages, 4, schedule),), 0, "bench")
    losses = [float(built.step()) for _ in range(_LOSS_STEPS)]
    built.settle()
    return losses


def predicted_turns(micro_batches: int) -> dict[str, Turn]:
    """Return turns of a step of one process on each rank, and of all predicted schedules."""
    alone = build_from(_parts(_BATCH), (), 0, "bench")
    made = {"alone": Turn(alone.step)}
    for name in _PREDICTED:
        technique = Pipeline(2, micro_batches, name)
        made[name] = Turn(build_from(_parts(_BATCH), (technique,), 0, "bench").step)
    return made


def turns(micro_batches: int) -> dict[str, Turn]:
    """Return turns of equally many micro-batches of 64 rows with both schedules."""
    calls: dict[str, Turn] = {}
    schedules: tuple[Schedule, ...] = ("async", "gpipe")
    for schedule in schedules:
        technique = Pipeline(2, micro_batches, schedule)
        built = build_from(_parts(_ROWS * micro_batches), (technique,), 0, "bench")

        def call(step: Callable[[], object]) -> None:
            for _ in range(max(1, _STEPS // micro_batches)):
                step()

        calls[schedule] = Turn(functools.partial(call, built.step))
    return calls
