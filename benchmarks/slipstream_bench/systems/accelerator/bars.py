"""``slipstream bench accelerator``: lanes that skip zeros, exact and fast.

Times are CPU time of one thread. The networks are trained on digits; ResNet-50 runs one step on
random images.
"""

from __future__ import annotations

import copy
import itertools
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from slipstream.hardware import Accelerator, Array, Chips, FrontEnd, MaskRecorder, Pass
from slipstream.hardware.kernels import FAMILY, stream_cycles
from slipstream.hardware.layers import OPERANDS
from slipstream.hardware.mapping import sweep
from slipstream.hardware.rtl import cosimulate
from slipstream.hardware.simulate import simulate_pass
from slipstream.hardware.space import SPACE
from slipstream.measure.memory import peak_of_call
from slipstream.native import InstructionSet
from slipstream_bench.harness import one_thread, times_s
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.systems.accelerator import networks, oracle

_WIDTHS = (32, 64, 64, 128)
_EVERY = 50


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick takes about two minutes: fewer vectors, layers and epochs."""
    chip = Accelerator.load("tensordash")
    torch.manual_seed(0)
    yield from _verilog_rows(options, chip)
    with one_thread():
        yield from _oracle_rows(options, chip)
        yield from _curve_rows(options)
        yield from _speed_rows(options)
        yield from _sweep_rows(options, chip)
        yield from _network_rows(options, chip)
        yield from _capture_rows(options)
        yield from _resnet_rows(options, chip)


def _verilog_rows(options: BenchOptions, chip: Accelerator) -> Iterator[Bar]:
    bar = "scheduler: Verilog against the model"
    if not options.wants(bar, 30):
        return
    options.progress(bar)
    vectors = 1_000_000 if options.full else 100_000
    if shutil.which("verilator") is None:
        yield not_judged(bar, "mismatches", "<= 0", "verilator is not installed")
        return
    mismatches = cosimulate(chip.frontend, chip.array.lanes, vectors)
    yield at_most(bar, mismatches, 0, "mismatches", n=vectors, detail="Verilator")


def _oracle_rows(options: BenchOptions, chip: Accelerator) -> Iterator[Bar]:
    bar = "cycles: random layers unlike the slow model, all passes and operands"
    if not options.wants(bar, 30):
        return
    options.progress(bar)
    count, unlike = 200 if options.full else 50, 0
    chip = replace(chip, array=Array(tiles=3, rows=4, columns=2))
    for seed in range(count):
        rng = np.random.default_rng(seed)
        shape = oracle.random_layer(rng)
        for which in Pass:
            for operand in OPERANDS[which]:
                bits = rng.random(shape.shapes[operand]) < rng.random()
                found = simulate_pass(shape, which, {operand: bits}, chip)
                unlike += found.cycles != oracle.pass_cycles(shape, which, operand, bits, 4, 2, 3)
    yield at_most(bar, unlike, 0, f"of {6 * count}", n=count)


def _curve_rows(options: BenchOptions) -> Iterator[Bar]:
    bar = "random zeros: largest difference from the known speed-ups"
    if not options.wants(bar, 10):
        return
    options.progress(bar)
    found = {}
    for (rows, zeros), expected in oracle.CURVE.items():
        part = oracle.bernoulli(zeros, 16, rows)
        cycles = stream_cycles(FrontEnd(), 16, part)[:, 0]
        found[rows, zeros] = 2048 * len(cycles) / cycles.sum() - expected
    worst = max(abs(value) for value in found.values())
    detail = "rows, zeros: " + ", ".join(f"{r}, {z:g}: {v:+.3f}" for (r, z), v in found.items())
    yield at_most(bar, worst, 0.02, "x", n=len(found), detail=detail)


def _speed_rows(options: BenchOptions) -> Iterator[Bar]:
    part = oracle.bernoulli(0.5, 128, 4)
    for level, target in ((InstructionSet.AVX512BW, 100.0), (InstructionSet.SCALAR, 20.0)):
        bar = f"rows of processing elements simulated, {level}"
        if not options.wants(bar, 5):
            continue
        if level not in FAMILY.kernels:
            yield not_judged(bar, "M cycles/s", f">= {target:g}", "this kernel does not run here")
            continue
        kernel = FAMILY.kernels[level]
        total = 4 * stream_cycles(FrontEnd(), 16, part, kernel=kernel)[:, 0].sum()
        taken = times_s(lambda k=kernel: stream_cycles(FrontEnd(), 16, part, kernel=k), 9)  # type: ignore[misc]
        yield at_least(
            bar, float(total / np.median(taken) / 1e6), target, "M cycles/s", n=len(taken),
            detail="4 rows advance together, 50 % zeros, with the gathering of streams",
        )  # fmt: skip


def _sweep_rows(options: BenchOptions, chip: Accelerator) -> Iterator[Bar]:
    bar = "MobileNetV2 on 50,000 chips"
    if not options.wants(bar, 10):
        return
    points = np.array(list(itertools.product(*SPACE.values())), np.float64).T
    chips = Chips.of(chip, **dict(zip(SPACE, points, strict=True)))
    step = networks.mobilenet_v2()
    taken = times_s(lambda: sweep(step, chips), 5)
    detail = f"{sum(step.values())} layers, {len(step)} distinct"
    yield at_most(bar, float(np.median(taken)), 1.0, "s", n=len(taken), detail=detail)


def _network_rows(options: BenchOptions, chip: Accelerator) -> Iterator[Bar]:
    plain, smooth, norm = (
        "plain ReLU convolutional networks: speed-up of the array, geometric mean",
        "GELU networks: speed-up of the array, largest",
        "batch norm before ReLU: zeros in the gradients of outputs, largest",
    )
    if not (options.wants(plain, 60) or options.wants(smooth, 60) or options.wants(norm, 60)):
        return
    options.progress("training on digits")
    epochs = 6 if options.full else 3
    speedups = {
        name: networks.speedup(networks.simulated(networks.trained_masks(make(), epochs), chip))
        for name, make in networks.PLAIN.items()
    }
    mean = math.exp(float(np.mean([math.log(value) for value in speedups.values()])))
    detail = ", ".join(f"{name} {value:.2f}" for name, value in speedups.items())
    holds = 1.7 <= mean <= 2.2
    yield Bar(plain, mean, "x", "1.7 to 2.2", holds, len(speedups), detail, data=speedups)
    gelu = {
        name: networks.speedup(networks.simulated(networks.trained_masks(model, epochs), chip))
        for name, model in (
            ("average pooling", networks.plain(_WIDTHS, nn.GELU, pool=nn.AvgPool2d)),
            ("perceptron", networks.perceptron(nn.GELU)),
            ("max pooling", networks.plain(_WIDTHS, nn.GELU)),
        )
    }
    pooled = gelu.pop("max pooling")
    detail = ", ".join(f"{name} {value:.3f}" for name, value in gelu.items())
    detail += f"; not judged: {pooled:.3f} with max pooling, whose gradient has zeros"
    yield at_most(smooth, max(gelu.values()), 1.05, "x", n=len(gelu), detail=detail, data=gelu)
    layers = networks.trained_masks(networks.plain(_WIDTHS, norm=True), epochs)
    convolutions = list(layers.values())[:-1]
    zeros = [1 - float(masks[OPERANDS[Pass.INPUT][0]].mean()) for _, masks in convolutions]
    passes = networks.simulated(layers, chip).values()
    fastest = max(c.speedup for layer in passes for c in layer if c.which is Pass.INPUT)
    yield at_most(norm, max(zeros), 0.0, "", n=len(zeros), detail=f"GO * W at most {fastest:.3f}x")


def _capture_rows(options: BenchOptions) -> Iterator[Bar]:
    bar = f"masks of one step in {_EVERY}: time added to training"
    if not options.wants(bar, 60):
        return
    options.progress(bar)
    model = networks.plain(_WIDTHS)
    x, y = torch.randn(64, 1, 8, 8), torch.randint(0, 10, (64,))
    with MaskRecorder(model) as masks:

        def step(active: bool) -> None:
            masks.active = active
            cross_entropy(model(x), y).backward()
            masks.take()

        taken = [
            times_s(lambda a=active: step(a), 15)  # type: ignore[misc]
            for active in (False, True)
        ]
    plain, recorded = (float(np.median(times)) for times in taken)
    added = (recorded - plain) / plain / _EVERY
    yield at_most(
        bar, added * 100, 2.0, "%", n=15,
        detail=f"a recorded step takes {recorded / plain:.2f}x a plain one",
    )  # fmt: skip


def _resnet_rows(options: BenchOptions, chip: Accelerator) -> Iterator[Bar]:
    time, memory = "ResNet-50, 4 images of 224: three passes", "ResNet-50: memory added"
    if not (options.wants(time, 120) or options.wants(memory, 120)):
        return
    options.progress(time)
    model = networks.resnet50()
    layers = networks.step_masks(model, torch.randn(4, 3, 224, 224), torch.randint(0, 1000, (4,)))
    del model
    taken = times_s(lambda: networks.simulated(layers, chip), 1, settle=0)
    costs = networks.simulated(layers, chip)
    detail = f"{len(layers)} layers, speed-up {networks.speedup(costs):.2f}; untrained"
    yield at_most(time, float(taken[0]), 20.0, "s", detail=detail)
    peak = peak_of_call(lambda: networks.simulated(copy.copy(layers), chip))
    yield at_most(memory, peak.increase / 2**30, 2.0, "GiB")
