"""``slipstream bench burst``: plans against the published planner, and bursts on real ranks."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import nn

from slipstream import data
from slipstream.data import MissingDataError
from slipstream.ranks import Netlab, calibrate, why_no_netlab
from slipstream.techniques.burst import Burst, BurstLayer, BurstPlan, background, plan
from slipstream.techniques.distributed.ddp import DDP
from slipstream.verbs.predicting import predict
from slipstream.verbs.profiling import profile
from slipstream.verbs.results import Predicted
from slipstream.workload import Workload
from slipstream.workload.built import build_from
from slipstream_bench.harness import paired
from slipstream_bench.lab import MBIT, Turn, arms_on_ranks, first_served, on_ranks
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged

# Bytes per microsecond and microseconds of the published planner's network.
_RATE, _LATENCY = 2.66e5, 40.0
# Global batch, devices, amplification limit: microseconds and device microseconds.
_REFERENCE = {
    (32, 8, 1.5): (13061, 62963), (32, 8, 2.0): (11284, 67252), (32, 8, 3.0): (10871, 70022),
    (32, 8, math.inf): (10871, 70022), (64, 64, 1.5): (10986, 145472),
    (64, 64, 2.0): (8915, 152632), (64, 64, 3.0): (7338, 180817),
    (64, 64, math.inf): (6272, 244696),
}  # fmt: skip
_SIZES = ((32, 8), (32, 32), (64, 16), (64, 64))
_RATES = (3e3, 1.25e4, 5e4, _RATE)
_LIMITS = (1.2, 1.5, 2.0, 3.0, 5.0)
# Layers that the published planner exempts from its limit take at most this long, in microseconds.
_EXEMPT = 300.0
_LINK = 200 * MBIT
_BATCH, _LOSS_STEPS = 128, 20
_ROUND_S = 2.0


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: fewer blocks."""
    yield from _plans(options)
    yield from _speeds(options)
    bar = "losses of bursts differ from one process by"
    if options.wants(bar, 20.0):
        options.progress(bar)
        yield _losses(bar)
    yield from _background(options)
    bars_of_ranks = ("burst against DDP, 2 hosts, 200 Mbit/s", "predicted steps, 2 hosts, error")
    if any(options.wants(bar, 60.0) for bar in bars_of_ranks):
        if (reason := why_no_netlab()) is not None:
            yield not_judged(bars_of_ranks[0], "x", ">= 1.25", reason)
            yield not_judged(bars_of_ranks[1], "%", "<= 12", reason)
            return
        options.progress(bars_of_ranks[0])
        yield from _on_ranks(*bars_of_ranks, blocks=25 if options.full else 7)


def _plans(options: BenchOptions) -> Iterator[Bar]:
    bar = "plans of VGG-16 differ from the reference by"
    published = "the published planner's plans of VGG-16 take longer, or more device time, by up to"
    headline = "VGG-16 on 64 devices against data parallelism, predicted"
    if not any(map(options.wants, (bar, published, headline))):
        return
    try:
        vgg16(32, 8, _RATE)
    except MissingDataError as error:
        yield not_judged(bar, "%", "<= 0.5", error.what)
        return
    errors = []
    for (batch, most, limit), expected in _REFERENCE.items():
        layers, devices = vgg16(batch, most, _RATE)
        found = plan(layers, devices, amplification=limit)
        got = found.time_ns / 1e3, found.device_ns / 1e3
        errors += [100 * abs(a / b - 1) for a, b in zip(got, expected, strict=True)]
    yield at_most(bar, max(errors), 0.5, "%", n=len(errors), detail="8 plans on up to 64 devices")
    layers, devices = vgg16(64, 64, _RATE)
    everywhere = sum(float(layer.work_ns[-1]) for layer in layers)
    yield at_least(
        headline, everywhere / plan(layers, devices).time_ns, 1.4, "x", detail="batch of 64"
    )
    times, costs = [], []
    for (batch, most), rate, limit in itertools.product(_SIZES, _RATES, _LIMITS):
        layers, devices = vgg16(batch, most, rate)
        theirs = published_plan(layers, devices, limit)
        same_cost = plan(layers, devices, device_ns=theirs.device_ns * (1 + 1e-9))
        same_time = plan(layers, devices, deadline_ns=theirs.time_ns * (1 + 1e-9))
        times.append(theirs.time_ns / same_cost.time_ns)
        costs.append(theirs.device_ns / same_time.device_ns)
    yield at_least(
        published, max(*times, *costs), 1.2, "x", n=len(times),
        detail=f"median time {statistics.median(times):.3f}x at equal device time, device time "
        f"{statistics.median(costs):.3f}x at equal time; largest {max(times):.2f}x and "
        f"{max(costs):.2f}x; batches, devices {_SIZES}, {len(_RATES)} networks, "
        f"{len(_LIMITS)} amplification limits",
    )  # fmt: skip


def _speeds(options: BenchOptions) -> Iterator[Bar]:
    rng = np.random.default_rng(0)
    for bar, count, k, branches, target in (
        ("plan of 1,000 layers on 1,024 devices", 1000, 11, (), 1.0),
        ("plan of 11 blocks with 4 branches on 256 devices", 11, 9, (1, 2, 3, 2), 5.0),
    ):
        if not options.wants(bar):
            continue
        layers = [random_layer(rng, k)]
        for _ in range(count):
            chains = tuple(tuple(random_layer(rng, k) for _ in range(n)) for n in branches)
            layers.append(random_layer(rng, k, chains))
        began = time.process_time()
        plan(layers, [2**n for n in range(k)])
        yield at_most(bar, time.process_time() - began, target, "s", detail="CPU time")


def random_layer(
    rng: np.random.Generator, options: int, branches: tuple[tuple[BurstLayer, ...], ...] = ()
) -> BurstLayer:
    """Return a layer with random times."""
    square = options, options
    return BurstLayer(
        "layer", rng.uniform(5, 50, options), rng.uniform(0, 4, square), rng.uniform(0, 9, square),
        branches,
    )  # fmt: skip


def vgg16(batch: int, most: int, rate: float) -> tuple[list[BurstLayer], list[int]]:
    """Return layers from a profile of VGG-16, and powers of two as numbers of devices.

    Args:
        batch: of all devices together.
        most: largest number of devices.
        rate: of the network, in bytes per microsecond.

    Raises:
        MissingDataError: the profile is absent.
    """
    devices = [2**n for n in range(7) if 2**n <= min(most, batch)]
    by_batch: dict[int, list[list[float]]] = {}
    for layer in data.get("profiles").layers:
        # The profile counts the backward pass of a layer as that of the activation behind it.
        units = by_batch.setdefault(layer.batch, [])
        if layer.layer.startswith("ReLU"):
            units[-1][0] += layer.total_ms * 1e6
            continue
        size = layer.settings
        weights = {"conv2d": ("in_channels", "out_channels"),
                   "linear": ("in_features", "out_features")}.get(layer.layer, ())  # fmt: skip
        count = np.prod([float(size[name]) for name in weights]) if weights else 0.0
        count *= float(size["kernel_size"]) ** 2 if layer.layer == "conv2d" else 1.0
        units.append([layer.total_ms * 1e6, float(4 * count), 4 * float(np.prod(layer.shape))])
    g = np.array(devices, np.float64)
    layers = []
    for number, (_, nbytes, _) in enumerate(by_batch[batch]):
        times = [by_batch[batch // count][number][0] for count in devices]
        following = by_batch[batch][number + 1 : number + 2]
        moved = batch * following[0][2] if following else 0.0
        share = np.abs(1 / g[:, None] - 1 / g)
        move = 2 * (moved * share / rate + _LATENCY) * (share > 0) * 1e3
        sync = 2 * (g - 1) / g * nbytes / rate * 1e3
        layers.append(BurstLayer(f"layer {number}", np.array(times) + sync, move))
    return layers, devices


def published_plan(layers: Sequence[BurstLayer], devices: Sequence[int], limit: float) -> BurstPlan:
    """Return the plan of the published implementation for a chain.

    It scans the options of the layer before, and takes one that is faster if its amplification is
    below the limit or below that of the last one taken: `searchLinear` of DeepPoolML/DeepPool.
    """
    # By option: time, time of the last layer, device time, devices.
    states: dict[int, tuple[float, float, float, tuple[int, ...]]] = {}
    for number, layer in enumerate(layers):
        following: dict[int, tuple[float, float, float, tuple[int, ...]]] = {}
        for option, g in enumerate(devices):
            work = float(layer.work_ns[option])
            if not number:
                following[option] = (work, work, work * g, (g,))
                continue
            before = layers[number - 1]
            alone = float(before.work_ns[0])
            least = taken = np.inf
            for source, (total, last, cost, counts) in states.items():
                spent = float(before.move_ns[source, option]) + work
                amplification = last * devices[source] / alone if alone > _EXEMPT * 1e3 else 1.0
                if total + spent < least and (amplification < limit or amplification < taken):
                    least, taken = total + spent, amplification
                    following[option] = (least, spent, cost + spent * g, (*counts, g))
        states = following
    time_ns, _, device_ns, counts = min(states.values())
    return BurstPlan(
        tuple(layer.name for layer in layers), counts, (0,) * len(layers), time_ns, device_ns
    )


def _parts(rows: int, width: int = 64, hidden: int = 1024) -> tuple[object, ...]:
    """Return convolutions, which compute, and a head, which has most of the parameters."""
    torch.manual_seed(0)
    channels = (3, width, 2 * width, 4 * width)
    blocks = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        for a, b in itertools.pairwise(channels)
    ]
    head = nn.Sequential(
        nn.Linear(16 * channels[-1], hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
        nn.Linear(hidden, 10),
    )  # fmt: skip
    model = nn.Sequential(nn.Sequential(*blocks, nn.Flatten()), head)
    batch = torch.randn(rows, 3, 32, 32), torch.randint(0, 10, (rows,))
    return model, batch, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), 0.01, 0.9)


def _losses(bar: str) -> Bar:
    built = build_from(_parts(24, 4, 32), (), 0, "bench")
    alone = np.array([float(built.step()) for _ in range(_LOSS_STEPS)])
    errors = [
        float(np.abs(np.array(losses) - alone).max())
        for text in ("4/2@0.2/1@1", "4", "1/4@0.1/2@1.2")
        for losses in on_ranks(4, burst_losses, plan=text)
    ]
    return at_most(
        bar, max(errors), 1e-5, "", n=len(errors),
        detail=f"{_LOSS_STEPS} steps, 4 processes, three plans",
    )  # fmt: skip


def _on_ranks(speed: str, error: str, blocks: int) -> Iterator[Bar]:
    torch.set_num_threads(1)
    graph = profile(Workload.of(*_parts(_BATCH)), steps=8, threads=1)
    cluster = calibrate(2, lab_bytes_per_s=_LINK, repeats=5)
    burst, ddp = predict(graph, ["burst:2", "batch_size:x0.5+ddp:2"], cluster=cluster)
    assert isinstance(burst, Predicted)
    assert isinstance(ddp, Predicted)
    chosen = burst.edits[0].removeprefix("plan=")
    with Netlab(2, _LINK) as network, arms_on_ranks(network, turns, plan=chosen) as arms:
        runs = paired(arms, clock="wall", blocks=blocks, budget_s=90.0)
    yield runs.ratio("ddp", "burst").at_least(
        speed, 1.25, detail=f"plan {chosen}, batch of {_BATCH}"
    )
    errors, notes = [], []
    for name, prediction in (("burst", burst), ("ddp", ddp)):
        measured = runs.ratio("alone", name).value
        predicted = 1 / prediction.ratio
        errors.append(100 * abs(predicted / measured - 1.0))
        notes.append(f"{name}: {predicted:.2f}x, measured {measured:.2f}x")
    yield at_most(
        error, max(errors), 12.0, "%", n=len(errors),
        detail=f"speed-ups over one process: {'; '.join(notes)}",
    )  # fmt: skip


def _background(options: BenchOptions) -> Iterator[Bar]:
    """Measure steps that wait half of the time, alone and with work in these waits, on one core."""
    middle, slowest, rate = (
        "step with background work, median", "step with background work, 99th percentile",
        "background work in waits of half of a step",
    )  # fmt: skip
    if not options.wants(slowest, 40.0):
        return
    options.progress(slowest)
    rounds = 12 if options.full else 4
    alone: list[float] = []
    joined: list[float] = []
    calls = elapsed_s = 0.0
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        with first_served():
            step = build_from(_mlp(), (), 0, "bench").step
            for _ in range(rounds):
                alone += _waiting_steps(step)
                with background(f"{__name__}:train") as work:
                    joined += _waiting_steps(step)
                calls, elapsed_s = calls + work.calls, elapsed_s + work.elapsed_s
            with background(f"{__name__}:train") as own:
                time.sleep(_ROUND_S)
    finally:
        os.sched_setaffinity(0, before)
    note = f"{len(joined)} steps with and {len(alone)} without, alternately, on one core"
    for bar, share, target in ((middle, 50, 1.05), (slowest, 99, 1.15)):
        ratio = float(np.percentile(joined, share) / np.percentile(alone, share))
        yield at_most(bar, ratio, target, "x", n=len(joined), detail=note)
    gained = 2 * (calls / elapsed_s) / (max(own.calls, 1) / own.elapsed_s)
    yield at_least(rate, gained, 0.7, "of the waits", n=rounds, detail=f"{calls:.0f} calls")


def _mlp() -> tuple[object, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])
    batch = torch.randn(64, 512), torch.randn(64, 512)
    return model, batch, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 1e-4)


def _waiting_steps(step: Callable[[], object]) -> list[float]:
    """Return the seconds of steps, each of which is followed by an equally long wait."""
    times, until = [], time.perf_counter() + _ROUND_S
    while time.perf_counter() < until:
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
        time.sleep(times[-1])
    return times[1:]


_built: dict[str, Callable[[], object]] = {}


def train() -> None:
    """Train a step in the background process."""
    if not _built:
        torch.set_num_threads(1)
        _built["step"] = build_from(_mlp(), (), 0, "bench").step
    _built["step"]()


# The functions below run in the process of a rank.


def burst_losses(plan: str) -> list[float]:
    """Return the losses of a burst of 4 ranks."""
    built = build_from(_parts(24, 4, 32), (Burst(4, plan=plan),), 0, "bench")
    return [float(built.step()) for _ in range(_LOSS_STEPS)]


def turns(plan: str) -> dict[str, Turn]:
    """Return turns of a step of one process on each rank, of DDP, and of a burst."""
    return {
        "alone": Turn(build_from(_parts(_BATCH), (), 0, "bench").step),
        "ddp": Turn(build_from(_parts(_BATCH // 2), (DDP(2),), 0, "bench").step),
        "burst": Turn(build_from(_parts(_BATCH), (Burst(2, plan=plan),), 0, "bench").step),
    }
