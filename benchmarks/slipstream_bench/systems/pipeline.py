"""``slipstream bench pipeline``: schedules, stable learning rates, and stages on two processes."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import slipstream as ss
from slipstream import data, native
from slipstream.cluster.orders import ORDERS, Action, Order, asynchronous_order
from slipstream.ranks import calibrate
from slipstream.technique import parse
from slipstream.techniques.distributed.chains import chain
from slipstream.techniques.pipeline.technique import Pipeline, Schedule
from slipstream.verbs.predicting import predict
from slipstream.verbs.profiling import profile
from slipstream.workload import Workload
from slipstream.workload.built import build_from
from slipstream_bench.harness import Ratio, paired
from slipstream_bench.lab import Turn, arms_on_ranks, on_ranks
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged

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
_SIMULATED = 12
_METHODS = {
    "synchronous": "schedule=1f1b",
    "naive": "schedule=async",
    "pipedream": "schedule=pipedream",
    "corrected": "schedule=async,rescheduling=125,correction=0.135",
}
# Stages, learning rate, epochs of 250 updates, and whether delays are twice as long.
_SETTINGS = (
    (2, 0.1, 2, False), (4, 0.1, 2, False), (4, 0.02, 2, False), (4, 0.005, 2, False),
    (12, 0.1, 3, True), (12, 0.02, 4, True), (24, 0.05, 3, True), (24, 0.05, 2, False),
    (9, 0.15, 3, True), (4, 0.02, 6, False),
)  # fmt: skip
_MESSAGES = (1 << 13, 1 << 15, 1 << 17, 1 << 19)


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: fewer blocks, seeds and cycles, and no check of the advice."""
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
    bar = "stable rates: wrong sides of the threshold in regression"
    if options.wants(bar, 5.0):
        yield _regression(bar)
    bar = "activations in flight differ from theory by"
    if options.wants(bar):
        errors = [abs(n - (2 * (_SIMULATED - stage) - 1)) for stage, n in enumerate(_held())]
        yield at_most(bar, max(errors), 0, "", n=len(errors), detail="12 stages in lockstep")
    yield from _headline(options)
    bar = "advice to stay synchronous, wrong settings"
    if options.full and options.wants(bar, 900.0):
        options.progress(bar)
        yield _advice(bar)
    bar = "asynchronous stages differ from simulated ones by"
    if options.wants(bar, 30.0):
        options.progress(bar)
        yield _asynchronous(bar)
    bar = "start and stop of 2 stages, failures"
    if options.wants(bar, 30.0):
        options.progress(bar)
        cycles = 200 if options.full else 2
        # A hang or a failure raises an error that names the rank.
        for _ in range(cycles):
            on_ranks(2, stage_losses, spec="pipeline:2,micro_batches=1,schedule=async", steps=3)
        yield at_most(bar, 0, 0, "", n=cycles)
    bar = "losses of stages differ from one process by"
    if options.wants(bar, 30.0):
        options.progress(bar)
        yield _losses(bar)
    for micro_batches, target in _SPEEDS.items():
        bar = f"async against gpipe, 2 processes, {micro_batches} micro-batches"
        if options.wants(bar, 20.0):
            ratio = _ratio(options, bar, turns, "gpipe", micro_batches)
            limit = f"limit {1 + 1 / micro_batches:g}, {_LAYERS} layers"
            yield ratio.at_least(bar, target, detail=limit)
    # Torch's schedule needs as many micro-batches as stages.
    for micro_batches in (2, 4):
        bar = f"async against torch's 1F1B, 2 processes, {micro_batches} micro-batches"
        if options.wants(bar, 20.0):
            ratio = _ratio(options, bar, torch_turns, "torch", micro_batches)
            yield ratio.at_least(bar, 1.3, detail=f"{_LAYERS} layers")
    bar = "predicted step, 2 processes, median error"
    if options.wants(bar, 60.0):
        options.progress(bar)
        yield _predicted(bar, (2, 4, 8) if options.full else (4,), 25 if options.full else 7)


def _ratio(
    options: BenchOptions, bar: str, run: Callable[..., Any], reference: str, micro_batches: int
) -> Ratio:
    """Return the time of a step of `reference` over that of async, on two processes."""
    options.progress(bar)
    blocks, budget_s = (25, 60.0) if options.full else (9, 15.0)
    with arms_on_ranks(2, run, micro_batches=micro_batches) as arms:
        runs = paired(arms, clock="wall", blocks=blocks, budget_s=budget_s)
    return runs.ratio(reference, "async")


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


def _parts(rows: int, width: int = _WIDTH) -> Any:
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
        for losses, _ in on_ranks(
            stages, stage_losses, spec=f"pipeline:{stages},micro_batches=4,schedule={schedule}"
        )
    ]
    return at_most(
        bar, max(errors), 1e-5, "", n=len(errors),
        detail=f"{_LOSS_STEPS} steps, 2 and 3 processes, three schedules",
    )  # fmt: skip


def _asynchronous(bar: str) -> Bar:
    """Compare losses of real asynchronous stages with simulated ones; versions must be equal."""
    errors = []
    for stages, settings in (
        (2, "micro_batches=1,schedule=async,correction=0.135,rescheduling=50,warmup=10"),
        (3, "micro_batches=2,schedule=async,correction=0.135"),
        (3, "micro_batches=1,schedule=pipedream"),
    ):
        spec = f"pipeline:{stages},{settings}"
        real = on_ranks(stages, stage_losses, spec=spec)
        # Rank 0 timed the layers.
        cut = [0, *itertools.accumulate(len(log["layers"]) for _, log in real)]
        model, batch, loss, optimizer = _parts(24, 64)
        layers = [layer for _, layer in chain(model, "bench")]
        parts = [nn.Sequential(*layers[a:b]) for a, b in itertools.pairwise(cut)]
        history = ss.pipeline.simulate(parts, [batch] * _LOSS_STEPS, loss, optimizer, spec)
        difference = np.abs(np.array(real[-1][0]) / np.array(history.losses) - 1.0).max()
        versions = all(
            [tuple(entry) for entry in log["log"]] == expected[: len(log["log"])]
            for (_, log), expected in zip(real, history.log, strict=True)
        )
        errors.append(float(difference) if versions else math.inf)
    return at_most(
        bar, max(errors), 1e-5, "", n=len(errors),
        detail=f"losses of {_LOSS_STEPS} steps on 2 and 3 processes; weight versions are equal",
    )  # fmt: skip


def _regression(bar: str) -> Bar:
    """Train linear regression by delayed gradients 1 % below and above the stable rate."""
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True)
    x, y = torch.tensor(x / x.std(0)), torch.tensor((y - y.mean()) / y.std())[:, None]
    best = torch.linalg.lstsq(x, y).solution.T
    top = torch.linalg.eigh(x.T @ x).eigenvectors[:, -1:]
    wrong, delays = 0, (0, 1, 4, 8)
    for delay in delays:
        order = asynchronous_order(1, 1, {0: delay}.__getitem__)
        model = nn.Linear(10, 1, bias=False).double()
        found = ss.pipeline.stable_rates(model, (x, y), nn.functional.mse_loss, order)
        for factor, grows in ((0.99, False), (1.01, True)):
            with torch.no_grad():
                model.weight.copy_(best + 0.01 * top.T)
            optimizer = torch.optim.SGD(model.parameters(), factor * found.rates[0])
            steps = 400 * (delay + 1)
            ss.pipeline.simulate(
                [model], [(x, y)] * steps, nn.functional.mse_loss, optimizer,
                "pipeline:2,micro_batches=1,schedule=async", order=order,
            )  # fmt: skip
            wrong += bool((model.weight.detach() - best).norm() > 0.01) != grows
    return at_most(
        bar, wrong, 0, f"of {2 * len(delays)}", n=2 * len(delays),
        detail="diabetes data, rates 1 % below and above, delays of 0 to 8 updates",
    )  # fmt: skip


def _stages(count: int) -> list[nn.Module]:
    """Return a residual network with a normalised layer of 96 units in each stage."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.RMSNorm(96), nn.Linear(96, 96)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.relu(self.linear(self.norm(x)))

    first = nn.Sequential(nn.Flatten(), nn.Linear(784, 96), nn.ReLU())
    last = nn.Sequential(nn.RMSNorm(96), nn.Linear(96, 10))
    return [first, *(Block() for _ in range(count - 2)), last]


def _lockstep(stages: int, micro_batches: int) -> Order:
    """Return the order of the source, whose delays are twice as long as those of `async`."""
    return asynchronous_order(stages, micro_batches, lambda stage: 2 * (stages - 1 - stage))


def _held() -> list[int]:
    batch = torch.randn(4, 1, 28, 28), torch.zeros(4, dtype=torch.int64)
    stages = _stages(_SIMULATED)
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.parameters()], 0.0)
    history = ss.pipeline.simulate(
        stages, [batch] * 40, nn.functional.cross_entropy, optimizer,
        f"pipeline:{_SIMULATED},micro_batches=1,schedule=async", order=_lockstep(_SIMULATED, 1),
    )  # fmt: skip
    return history.in_flight


def accuracy(
    stages: int, rate: float, settings: str, seed: int, *, epochs: int = 3, lockstep: bool = True,
) -> float:  # fmt: skip
    """Return test accuracy in percent after training on 16,000 images in simulated stages."""
    x, y, test_x, test_y = _fashion()
    torch.manual_seed(seed)
    parts = _stages(stages)
    model = nn.Sequential(*parts)
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for epoch in range(epochs):
            if epoch == epochs - 1:
                optimizer.param_groups[0]["lr"] = 0.1 * rate
            for rows in torch.randperm(len(x)).split(_ROWS):
                yield x[rows], y[rows]

    ss.pipeline.simulate(
        parts, batches(), nn.functional.cross_entropy, optimizer,
        f"pipeline:{stages},micro_batches=1,{settings}",
        order=_lockstep(stages, 1) if lockstep and "1f1b" not in settings else None,
    )  # fmt: skip
    with torch.no_grad():
        return 100.0 * float((model(test_x).argmax(1) == test_y).float().mean())


@functools.cache
def _fashion() -> tuple[torch.Tensor, ...]:
    parts: list[torch.Tensor] = []
    for split, limit in (("train", 16_000), ("test", 10_000)):
        found = data.get("fashion_mnist", split=split, limit=limit)
        parts += [(torch.tensor(found.images) / 255 - 0.286) / 0.353, torch.tensor(found.labels)]
    return tuple(parts)


def _headline(options: BenchOptions) -> Iterator[Bar]:
    seeds = range(5 if options.full else 2)
    for stages, rate in ((_SIMULATED, 0.1), (24, 0.05)) if options.full else ((_SIMULATED, 0.1),):
        names = (
            f"{stages} stages: corrected above naive",
            f"{stages} stages: corrected above pipedream",
            f"{stages} stages: corrected below synchronous",
        )
        if not any(options.wants(name, 150.0) for name in names):
            continue
        options.progress(names[0])
        try:
            means = {
                name: statistics.mean(accuracy(stages, rate, settings, seed) for seed in seeds)
                for name, settings in _METHODS.items()
            }
        except data.MissingDataError as error:
            for name in names:
                yield not_judged(name, "points", "", str(error.what))
            continue
        note = "Fashion-MNIST, lockstep delays; " + ", ".join(
            f"{name} {value:.1f} %" for name, value in means.items()
        )
        corrected = means["corrected"]
        count = len(seeds)
        yield at_least(names[0], corrected - means["naive"], 12, "points", n=count, detail=note)
        yield at_least(names[1], corrected - means["pipedream"], 1, "points", n=count, detail=note)
        yield at_most(names[2], means["synchronous"] - corrected, 3, "points", n=count, detail=note)


def _advice(bar: str) -> Bar:
    """Compare the advice with simulated runs: whether corrections end more than 3 points lower."""
    wrong, notes = 0, []
    for stages, rate, epochs, lockstep in _SETTINGS:
        run = functools.partial(accuracy, stages, rate, seed=0, epochs=epochs, lockstep=lockstep)
        lost = run(settings=_METHODS["synchronous"]) - max(
            run(settings=_METHODS[name]) for name in ("naive", "corrected")
        )
        delay = (stages - 1) * (1 + lockstep)
        rates = ss.pipeline.StableRates(1.0, (float(delay),), (1.0,))
        advised = rates.stay_synchronous(250 * epochs)
        wrong += advised != (lost > 3)
        notes.append(f"delay {delay}, rate {rate:g}, {250 * epochs} updates: {lost:.1f}")
    return at_most(
        bar, wrong, 1, f"of {len(_SETTINGS)}", n=len(_SETTINGS),
        detail=f"points lost by delays: {'; '.join(notes)}",
    )  # fmt: skip


# The functions below run in the process of a rank.


def stage_losses(spec: str, steps: int = _LOSS_STEPS) -> tuple[list[float], dict[str, Any]]:
    """Return the losses of a pipeline; the layers and the log of this stage."""
    torch.set_num_threads(1)
    built = build_from(_parts(24, 64), parse(spec), 0, "bench")
    losses, log = [], []
    for _ in range(steps):
        losses.append(float(built.step()))
        log += built.step.__self__.log  # type: ignore[attr-defined]
    built.settle()
    return losses, {"log": log, "layers": [name for name, _ in built.model.named_children()]}


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


def torch_turns(micro_batches: int) -> dict[str, Turn]:
    """Return turns of equally many micro-batches of 64 rows, here and with torch's 1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    steps = max(1, _STEPS // micro_batches)
    technique = Pipeline(2, micro_batches, "async")
    ours = build_from(_parts(_ROWS * micro_batches), (technique,), 0, "bench")
    model, (x, y), loss, _ = _parts(_ROWS * micro_batches)
    rank, half = dist.get_rank(), _LAYERS // 2
    part = model[:half] if rank == 0 else model[half:]
    optimizer = torch.optim.SGD(part.parameters(), 1e-3, 0.9)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=loss)

    def theirs() -> None:
        for _ in range(steps):
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=y, losses=[])
            optimizer.step()
            optimizer.zero_grad()

    def call() -> None:
        for _ in range(steps):
            ours.step()

    return {"async": Turn(call), "torch": Turn(theirs)}
