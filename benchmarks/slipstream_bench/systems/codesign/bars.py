"""``slipstream bench codesign``: a network searched together with its hardware.

Times are CPU time of one thread. The chip is the shipped ``edge``; the task is Fashion-MNIST at
14 x 14. ZigZag's latencies are in `peer`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from scipy.stats import kendalltau, spearmanr

from slipstream.hardware import Accelerator, Chips, LayerShape, Pass
from slipstream.hardware.mapping import best_cost
from slipstream.nas import Supernet, calibrate
from slipstream.nas.codesign import ChipSpace, NetworkLayer, Pair, ProcessorSpace, search
from slipstream_bench.harness import one_thread, times_s
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most
from slipstream_bench.systems.accelerator.networks import mobilenet_v2
from slipstream_bench.systems.codesign import fashion, oracle, peer

_SMALL = {
    "tiles": (1, 2, 8), "rows": (1, 4), "columns": (4, 8), "lanes": (8, 16),
    "onchip_bytes": (16384.0, 262144.0), "dram_bytes_per_s": (1e9, 4e9, 16e9),
}  # fmt: skip


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: fewer layers, seeds and pairs."""
    edge = Accelerator.load("edge")
    with one_thread():
        yield from _oracle_row(options, edge)
        yield from _speed_rows(options, edge)
        yield from _peer_rows(options, edge)
        yield from _ranking_row(options, edge)
        untrained = fashion.supernet(0)
        yield from _nested_row(options, edge, untrained)
        yield from _processor_rows(options, untrained)
        net = functools.cache(lambda: fashion.supernet(12 if options.full else 4))
        yield from _joint_rows(options, edge, net)
        yield from _energy_rows(options, edge, net)
        yield from _one_shot_row(options, net)


def _oracle_row(options: BenchOptions, edge: Accelerator) -> Iterator[Bar]:
    bar = "random layers whose cycles or bytes differ from counted jobs"
    if not options.wants(bar, 20):
        return
    options.progress(bar)
    count = 500 if options.full else 100
    unlike = [
        predicted != counted
        for seed in range(count)
        for predicted, counted in oracle.comparisons(seed, edge)
    ]
    yield at_most(
        bar, sum(unlike), 0, f"of {len(unlike)}", n=count, detail="2 passes, 2 mappings each"
    )


def _layers(shapes: dict[LayerShape, int]) -> list[NetworkLayer]:
    return [
        NetworkLayer("", (s, Pass.FORWARD)) for s, times in shapes.items() for _ in range(times)
    ]


def _speed_rows(options: BenchOptions, edge: Accelerator) -> Iterator[Bar]:
    rate, cached, ratio = (
        "MobileNetV2 on 50,000 chips, from shapes",
        "networks on 50,000 chips each, layers' costs cached",
        "chips per second, over ZigZag's",
    )
    if not (options.wants(rate, 10) or options.wants(cached, 10) or options.wants(ratio, 10)):
        return
    options.progress(rate)
    layers = _layers({shape: times for (shape, _, _), times in mobilenet_v2().items()})
    space = ChipSpace(edge)

    def fresh() -> None:
        space._costs.clear()
        space.costs_of(layers)

    elapsed_s = float(np.median(times_s(fresh, 5)))
    per_s = len(space) / elapsed_s
    if options.wants(rate):
        yield at_least(rate, per_s / 1e3, 50, "k pairs/s", n=5, detail=f"{len(layers)} layers")
    if options.wants(cached):
        again_s = float(np.median(times_s(lambda: space.costs_of(layers), 9)))
        yield at_least(cached, 1 / again_s, 200, "networks/s", n=9)
    if options.wants(ratio):
        theirs_s = peer.SECONDS["mobilenetv2"]
        yield at_least(
            ratio, per_s * theirs_s, 1e5, "x", n=5,
            detail=f"MobileNetV2; ZigZag: {theirs_s:.0f} s of wall time per chip, measured once",
        )  # fmt: skip


def _peer_rows(options: BenchOptions, edge: Accelerator) -> Iterator[Bar]:
    ranking, total = "latency of layers: Spearman with ZigZag", "latency of networks: over ZigZag's"
    if not (options.wants(ranking) or options.wants(total)):
        return
    chip = Chips.of(
        edge, tiles=1, rows=16, columns=8, lanes=8, clock_hz=1e9, onchip_bytes=2 << 20,
        dram_bytes_per_s=8e9,
    )  # fmt: skip
    ours, theirs, ratios = [], [], {}
    for network in peer.SECONDS:
        found = list(peer.layers(network))
        own = [
            float(best_cost(shape, Pass.FORWARD, chip, chip.arrays(), 1)[0][0])
            for shape, _ in found
        ]
        cycles = [cycles for _, cycles in found]
        ratios[network] = sum(own) / sum(cycles)
        ours += own
        theirs += cycles
    if options.wants(ranking):
        yield at_least(ranking, float(spearmanr(ours, theirs)[0]), 0.9, "", n=len(ours))
    if options.wants(total):
        worst = max(max(ratio, 1 / ratio) for ratio in ratios.values())
        detail = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        yield at_most(total, worst, 1.5, "x", n=len(ratios), detail=detail, data=ratios)


def _ranking_row(options: BenchOptions, edge: Accelerator) -> Iterator[Bar]:
    """Rank networks of inverted bottlenecks, depthwise or fused, by operations and by latency."""
    bar = "networks ranked by operations and by latency: Kendall tau"
    if not options.wants(bar, 10):
        return
    rng = np.random.default_rng(0)
    base = ChipSpace(edge, {"tiles": (edge.array.tiles,)})
    macs, times = [], []
    fused: Counter[int] = Counter()
    for _ in range(1000):
        shapes, inputs, size = [LayerShape(1, 3, 32, 224, 224, 3, 3, (2, 2), (1, 1))], 32, 112
        for width, stride in ((16, 1), (24, 2), (32, 2), (64, 2), (96, 1), (160, 2), (320, 1)):
            kernel, hidden = int(rng.choice([3, 5])), inputs * int(rng.choice([3, 6]))
            shapes += _block(inputs, hidden, width, size, kernel, stride, bool(rng.integers(2)))
            inputs, size = width, size // stride
        layers = _layers(Counter(shapes))
        macs.append(sum(shape.macs for shape in shapes))
        times.append(float(base.costs_of(layers)["time"][0]))
    inputs, size = 32, 112
    for stage, (width, stride) in enumerate(((24, 2), (32, 2), (64, 2), (160, 2), (320, 1))):
        pair = [
            base.costs_of(_layers(Counter(_block(inputs, 6 * inputs, width, size, 3, stride, f))))
            for f in (False, True)
        ]
        fused[stage] = int(pair[1]["time"][0] < pair[0]["time"][0])
        inputs, size = width, size // stride
    tau = float(kendalltau(macs, times)[0])
    detail = "fused is faster by stage: " + ", ".join("yes" if f else "no" for f in fused.values())
    yield at_most(bar, tau, 0.8, "", n=len(macs), detail=detail)


def _block(
    inputs: int, hidden: int, outputs: int, size: int, kernel: int, stride: int, fused: bool
) -> list[LayerShape]:
    pad, steps = (kernel // 2, kernel // 2), (stride, stride)
    last = LayerShape(1, hidden, outputs, size // stride, size // stride)
    if fused:
        return [LayerShape(1, inputs, hidden, size, size, kernel, kernel, steps, pad), last]
    depthwise = LayerShape(1, hidden, hidden, size, size, kernel, kernel, steps, pad, groups=hidden)
    return [LayerShape(1, inputs, hidden, size, size), depthwise, last]


def _nested_row(options: BenchOptions, edge: Accelerator, net: Supernet) -> Iterator[Bar]:
    bar = "networks whose chip differs from that of a loop over all chips"
    if not options.wants(bar, 60):
        return
    options.progress(bar)
    space, unlike, count = ChipSpace(edge, _SMALL), 0, 20 if options.full else 5
    found = search(net, lambda module: 0.0, space, constraints={"time": "<= 8x", "area": "<= 2"})
    limits = {limit.metric: limit.value for limit in found.limits}
    rng = np.random.default_rng(0)
    for _ in range(count):
        config = net.space.sample(rng)
        alone = [
            ChipSpace(space.chip(point), {"tiles": (space.at(point)["tiles"],)}).baseline(
                net, config
            )
            for point in range(len(space))
        ]
        allowed = [c for c in alone if all(c[m] <= limit for m, limit in limits.items())]
        best = found.pair(config, found.best_point(config), 0.0)
        least = min((c["energy"] for c in allowed), default=np.inf)
        unlike += not np.isclose(best.costs["energy"], least, rtol=1e-12)
    yield at_most(bar, unlike, 0, f"of {count}", n=count, detail=f"{len(space)} chips")


def _processor_rows(options: BenchOptions, net: Supernet) -> Iterator[Bar]:
    error, chosen = (
        "this processor: predicted time of networks and settings, mean error",
        "this processor: time of the predicted best pair, over the measured best",
    )
    requested = [bar for bar in (error, chosen) if options.wants(bar, 60)]
    if not requested:
        return
    options.progress("pairs of network and settings")
    space = ProcessorSpace((1, 2) if options.full else (1,))
    rng = np.random.default_rng(0)
    pairs, configs = [], [net.space.sample(rng) for _ in range(25 if options.full else 4)]
    for config in configs:
        costs = space.costs(net, config)
        for point in rng.permutation(len(space))[:4].tolist():
            values = space.at(point)
            dtype, batch = getattr(torch, values["dtype"]), values["batch"]
            module = net.export(config).to(dtype)
            x = fashion.images("train")[0][:batch].to(dtype)
            torch.set_num_threads(values["threads"])
            with torch.inference_mode():
                taken = times_s(lambda m=module, x=x: m(x), 40, clock="wall", settle=5)  # type: ignore[misc]
            torch.set_num_threads(1)
            pairs.append((costs["time"][point], 1e3 * float(taken.min()) / batch))
    predicted, measured = np.array(pairs).T
    errors = np.abs(predicted / measured - 1)
    if error in requested:
        detail = (
            f"median {100 * np.median(errors):.0f} %, bias {np.mean(predicted / measured):.2f}x"
        )
        yield at_most(error, 100 * float(errors.mean()), 15, "%", n=len(pairs), detail=detail)
    if chosen in requested:
        ratio = measured[predicted.argmin()] / measured.min()
        yield at_most(chosen, float(ratio), 1.05, "x", n=len(pairs))


class _Scores:
    """Accuracies of sub-networks with shared weights, evaluated once each."""

    def __init__(self) -> None:
        self._scores: dict[tuple[torch.Size, ...], float] = {}

    def __call__(self, module: torch.nn.Module) -> float:
        # The shapes of the parameters determine the configuration.
        key = tuple(parameter.shape for parameter in module.parameters())
        if key not in self._scores:
            calibrate(module, fashion.calibration())
            self._scores[key] = fashion.accuracy(module)
        return self._scores[key]


def _joint_rows(options: BenchOptions, edge: Accelerator, make: Any) -> Iterator[Bar]:
    """Compare a nested search with sequential ones at twice its trainings, and at as many."""
    better = "accuracy of joint search, over the best sequential order at twice the trainings"
    equal = "accuracy of joint search, over the best sequential order at as many trainings"
    misses = "limits missed by joint search"
    requested = [bar for bar in (better, equal, misses) if options.wants(bar, 60)]
    if not requested:
        return
    net, trainings = make(), 40
    scores, space = _Scores(), ChipSpace(edge)
    base = space.baseline(net, net.space.full)
    limits = {"time": 0.25 * base["time"], "energy": 0.35 * base["energy"], "area": base["area"]}
    found: dict[str, list[float]] = {}
    missed: Counter[str] = Counter()
    seeds = 20 if options.full else 3
    for seed in range(seeds):
        options.progress(f"joint and sequential searches, seed {seed}")
        for name, pair in _orders(net, scores, space, limits, trainings, seed).items():
            within = pair is not None and all(pair.costs[m] <= limits[m] for m in limits)
            missed[name] += not within
            found.setdefault(name, []).append(pair.score if pair and within else 0.0)
    medians = {name: float(np.median(values)) for name, values in found.items()}
    ours = {better: medians.pop("joint"), equal: medians.pop("joint, all trainings")}
    for bar, number in ((better, trainings // 2), (equal, trainings)):
        detail = f"joint, {number} trainings: {ours[bar]:.4f}; " + ", ".join(
            f"{name}, {trainings}: {median:.4f}" for name, median in medians.items()
        )
        if bar in requested:
            ratio = ours[bar] / max(medians.values())
            yield at_least(bar, ratio, 1.0, "x", n=seeds, detail=detail, data=found)
    if misses in requested:
        detail = ", ".join(f"{name}: {missed[name]}" for name in found)
        yield at_most(misses, missed["joint"], 0, f"of {seeds}", n=seeds, detail=detail)


def _orders(
    net: Supernet, scores: _Scores, space: ChipSpace, limits: dict[str, float], trainings: int,
    seed: int,
) -> dict[str, Pair | None]:  # fmt: skip
    """Return the pair that each order finds; its objective is the accuracy within limits."""
    words = {metric: f"<= {limit!r}" for metric, limit in limits.items()}

    def run(hardware: ChipSpace, *numbers: int) -> list[Pair | None]:
        found = search(
            net, scores, hardware, constraints=words, exponents={"energy": -1e-6}, seed=seed
        )
        return [found.run(number).best() for number in numbers]

    joint, longer = run(space, trainings // 2, trainings)
    (fixed,) = run(_alone(space.base), trainings)
    chosen = search(net, scores, space, constraints={"area": words["area"]})
    later = None
    if fixed is not None:
        later = chosen.pair(fixed.config, chosen.best_point(fixed.config), fixed.score)
    first = space.chip(chosen.best_point(net.space.full))
    return {
        "joint": joint, "joint, all trainings": longer, "network on the base chip": fixed,
        "network, then chip": later, "chip, then network": run(_alone(first), trainings)[0],
    }  # fmt: skip


def _alone(chip: Accelerator) -> ChipSpace:
    return ChipSpace(chip, {"tiles": (chip.array.tiles,)})


def _energy_rows(options: BenchOptions, edge: Accelerator, make: Any) -> Iterator[Bar]:
    """Train the found network and the whole one with the same schedule, and compare energies."""
    saved, lost = (
        "energy saved over the whole network on the base chip, within 0.3 points of its accuracy",
        "accuracy lost on test images",
    )
    requested = [bar for bar in (saved, lost) if options.wants(bar, 60)]
    if not requested:
        return
    net, epochs = make(), 12 if options.full else 4
    space = ChipSpace(edge)
    base = space.baseline(net, net.space.full)
    options.progress("search for the least energy")
    found = search(
        net, _Scores(), space, constraints={"time": "<= 1x", "area": "<= 1x"}
    ).run(100 if options.full else 40)  # fmt: skip
    options.progress("training the whole network again")
    whole = fashion.trained(net.export(net.space.full), epochs)
    valid, test = fashion.accuracy(whole), fashion.accuracy(whole, "test")
    front = found.pareto()
    # From the least energy upwards, the first that is as accurate after training.
    near = [pair for pair in front if pair.score >= front[0].score - 0.03]
    for pair in reversed(near[: 8 if options.full else 4]):
        options.progress(f"training a network of {pair.costs['energy'] / base['energy']:.2f}x")
        module = fashion.trained(found.export(pair), epochs)
        if fashion.accuracy(module) >= valid - 0.003 or pair is near[0]:
            break
    own = fashion.accuracy(module, "test")
    gain = base["energy"] / pair.costs["energy"]
    chip_alone = base["energy"] / found.pair(
        net.space.full, found.best_point(net.space.full), 0.0
    ).costs["energy"]  # fmt: skip
    detail = (
        f"the chip alone {chip_alone:.2f}x; time {pair.costs['time'] / base['time']:.2f}x, area "
        f"{pair.costs['area'] / base['area']:.2f}x of the base's; accuracy on validation images, "
        "a margin that the first version of this row did not have"
    )
    if saved in requested:
        yield at_least(saved, gain, 1.8, "x", detail=detail)
    if lost in requested:
        detail = f"{100 * own:.2f} % after {100 * test:.2f} %, 8,000 images"
        yield at_most(lost, 100 * (test - own), 0.3, "points", detail=detail)


def _one_shot_row(options: BenchOptions, make: Any) -> Iterator[Bar]:
    bar = "accuracies with shared weights and trained alone: Kendall tau"
    if not options.full or not options.wants(bar, 300):
        return
    net, rng, scores = make(), np.random.default_rng(0), _Scores()
    shared, alone = [], []
    for number in range(20):
        options.progress(f"training network {number} alone")
        module = net.export(net.space.sample(rng))
        shared.append(scores(module))
        for layer in module.modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
        alone.append(fashion.accuracy(fashion.trained(module, 6)))
    yield at_least(bar, float(kendalltau(shared, alone)[0]), 0.5, "", n=20)
