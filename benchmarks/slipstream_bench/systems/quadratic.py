"""``slipstream bench quadratic``: memory, time and accuracy of quadratic layers.

Times are CPU time of one thread. Accuracies of one layer are on scikit-learn's digits and on
Fashion-MNIST (20,000 images to train with, 10,000 to test), over seeds; the builder's are on fewer
images of half the width and height.
"""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import avg_pool2d, cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint

from slipstream.errors import SlipstreamWarning
from slipstream.heap import keep_pages
from slipstream.measure import time_function
from slipstream.surgery import saved_bytes
from slipstream.techniques.quadratic import (
    Conv2d,
    FusedQuadratic,
    Linear,
    ShorteningResult,
    convert,
    shorten,
)
from slipstream_bench.harness import one_thread, paired
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.systems.accuracy.cells import Cell, measure_cells, workload_of
from slipstream_bench.systems.adasum.study import Samples, Study
from slipstream_bench.systems.adasum.tasks import MISSING, fashion

_SHAPES = ((64, 64, 16, 32), (16, 32, 16, 32), (128, 128, 4, 16), (32, 32, 32, 8))
"""Input and output channels, images, height and width."""
_EPOCHS = 60
_HELD = "the worst seed, on samples it was not trained with"
_PREDICTED = (
    "conv_net", "perceptron", "recommender", "vision_transformer", "language_model",
    "tiny_language_model",
)  # fmt: skip


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick takes three minutes: two seeds."""
    keep_pages()
    blocks = 15 if options.full else 7
    with one_thread():
        yield from _memory_rows(options)
        yield from _conversion_rows(options)
        yield from _learning_row(options)
        yield from _time_rows(options, blocks)
        yield from _inference_rows(options, blocks)
        yield from _expressive_rows(options)
        yield from _stability_rows(options)
        yield from _accuracy_rows(options)
        yield from _builder_rows(options)
        yield from _predicted_rows(options)


def _memory_rows(options: BenchOptions) -> Iterator[Bar]:
    x = torch.randn(32, 64, 32, 32, requires_grad=True)
    first = nn.Conv2d(64, 64, 3, padding=1)
    cases: dict[str, tuple[nn.Module, nn.Module, float]] = {
        "saved bytes over a first-order convolution": (Conv2d(64, 64, 3, padding=1), first, 1.05),
        "saved bytes with branch norm over convolution and norm": (
            Conv2d(64, 64, 3, padding=1, branch_norm=True),
            nn.Sequential(first, nn.BatchNorm2d(64)),
            1.1,
        ),
    }
    for bar, (ours, theirs, target) in cases.items():
        if options.wants(bar):
            options.progress(bar)
            saved = [
                saved_bytes(functools.partial(layer, x), layer.parameters())
                for layer in (ours, theirs)
            ]
            detail = (
                f"{saved[0] / 1e6:.2f} MB, first order {saved[1] / 1e6:.2f} MB; 64 to 64, 3 x 3"
            )
            yield at_most(bar, saved[0] / saved[1], target, "x", n=1, detail=detail)
    bar = "saved bytes of 7 convolutions, hybrid over naive"
    if options.wants(bar):
        options.progress(bar)
        saved = []
        for memory in ("hybrid", "naive"):
            widths = (1, 16, 16, 32, 32, 32, 64, 64)
            layers = [
                Conv2d(a, b, 3, padding=1, branch_norm=True, memory=memory)
                for a, b in itertools.pairwise(widths)
            ]
            model = nn.Sequential(*layers)
            images = torch.randn(16, 1, 28, 28)
            saved.append(saved_bytes(functools.partial(model, images), model.parameters()))
        detail = f"{saved[0] / 1e6:.1f} of {saved[1] / 1e6:.1f} MB, with branch norm"
        yield at_most(bar, saved[0] / saved[1], 0.5, "x", n=1, detail=detail)


def _conversion_rows(options: BenchOptions) -> Iterator[Bar]:
    bar = "conversion: largest difference of outputs at step 0"
    if not options.wants(bar):
        return
    options.progress(bar)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2),
        nn.ReLU(), nn.Flatten(), nn.Linear(32 * 49, 10),
    )  # fmt: skip
    x = torch.randn(8, 3, 16, 16)
    before = model(x).detach()
    convert(model)
    worst = float((model(x) - before).abs().max() / before.abs().max())
    yield at_most(bar, worst, 1e-6, "", n=1, detail="three layers, a norm between")


def _learning_row(options: BenchOptions) -> Iterator[Bar]:
    """Compare a converted network with the original, from the same weights on the same batches."""
    bar = "conversion: loss behind step 100 over the original's"
    if not options.wants(bar):
        return
    options.progress(bar)
    ratios = []
    for seed in range(5):
        task = _digits(seed)
        torch.manual_seed(seed)
        first = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        converted = copy.deepcopy(first)
        convert(converted)
        losses = []
        for model in (converted, first):
            torch.manual_seed(seed)
            optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
            step_losses = []
            for _ in range(200):
                rows = torch.randint(len(task.train.x), (64,))
                optimizer.zero_grad()
                loss = cross_entropy(model(task.train.x[rows]), task.train.y[rows])
                loss.backward()
                optimizer.step()
                step_losses.append(loss.item())
            losses.append(float(np.mean(step_losses[100:])))
        ratios.append(losses[0] / losses[1])
    detail = f"digits, two layers, means of steps 100 to 200; each seed {np.round(ratios, 3)}"
    yield at_most(bar, max(ratios), 1.0, "x", n=len(ratios), detail=detail)


def _time_rows(options: BenchOptions, blocks: int) -> Iterator[Bar]:
    for inputs, outputs, images, size in _SHAPES:
        shape = f"{inputs} to {outputs}, {images} images of {size} x {size}"
        step, again = f"step over naive: {shape}", f"step over checkpointing: {shape}"
        if not (options.wants(step) or options.wants(again)):
            continue
        options.progress(step)
        x = torch.randn(images, inputs, size, size, requires_grad=True)
        arms = {
            "hybrid": _step(Conv2d(inputs, outputs, 3, padding=1), x),
            "naive": _step(_Separate(inputs, outputs), x),
            "checkpoint": _step(_Separate(inputs, outputs), x, checkpointed=True),
        }
        taken = paired(arms, blocks=blocks, budget_s=8.0)
        if options.wants(step):
            yield taken.ratio("hybrid", "naive").at_most(step, 1.0, detail=f"{taken}")
        if options.wants(again):
            yield taken.ratio("hybrid", "checkpoint").at_most(again, 0.85, detail=f"{taken}")


class _Separate(nn.Module):
    """The same neuron in its usual form: three convolutions, a product, a sum."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(inputs, outputs, 3, padding=1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.a(x) * self.b(x) + self.c(x)
        return output


def _step(layer: nn.Module, x: torch.Tensor, *, checkpointed: bool = False) -> Callable[[], object]:
    sources = [x, *layer.parameters()]
    gradient = torch.ones_like(layer(x))

    def step() -> object:
        y = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        return torch.autograd.grad(y, sources, gradient)

    return step


@dataclass(frozen=True)
class _Task:
    """Images that one layer classifies.

    Attributes:
        train, held: features and labels, [samples, features] and [samples].
        hidden: units of a ReLU perceptron with as many parameters as a layer of `ours`.
        gain: required advantage of `ours` over that, in points.
        rate, rows: learning rate, and samples per step.
    """

    train: Samples
    held: Samples
    hidden: int
    epochs: int
    gain: float
    rate: float = 0.1
    rows: int = 64

    def in_few_steps(self, rate: float) -> _Task:
        """Return the task with half as many steps and a lower rate, too few for a perceptron."""
        return replace(self, rate=rate, rows=128)

    def sizes(self) -> str:
        inputs = self.train.x.shape[1]
        perceptron = self.hidden * (inputs + 11) + 10
        ours = 30 * inputs + 10
        recipe = f"{self.epochs} epochs, batches of {self.rows}, rate {self.rate}"
        return f"{recipe}; ours has {ours:,} parameters, the MLP {perceptron:,}"


def _digits(seed: int) -> _Task:
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.data))
    x = torch.tensor(digits.data[order] / 16 - 0.3, dtype=torch.float32)
    y = torch.tensor(digits.target[order])
    return _Task(Samples(x[:1347], y[:1347]), Samples(x[1347:], y[1347:]), 26, _EPOCHS, 0.2)


@functools.cache
def _fashion() -> Study | None:
    return fashion("MLP")


def _clothes(seed: int) -> _Task | None:
    study = _fashion()
    return None if study is None else _Task(study.train, study.held, 30, 5, 1.0)


def _dim_clothes(seed: int) -> _Task | None:
    """Return pixels between -0.3 and 0.7, as the digits have, and few steps."""
    task = _clothes(seed)
    if task is None:
        return None
    low, high = task.train.x.min(), task.train.x.max()
    train, held = (
        Samples((samples.x - low) / (high - low) - 0.3, samples.y)
        for samples in (task.train, task.held)
    )
    return replace(task, train=train, held=held).in_few_steps(0.05)


def _accuracy_rows(options: BenchOptions) -> Iterator[Bar]:
    for title, make in (
        ("digits", _digits), ("digits in few steps", lambda seed: _digits(seed).in_few_steps(0.02)),
        ("Fashion-MNIST", _clothes), ("Fashion-MNIST in few steps", _dim_clothes),
    ):  # fmt: skip
        others = {"an equal ReLU MLP": "mlp", "t4": "t4", "t3": "t3", "t2": "t2"}
        names = {f"{title}: ours over {text}": name for text, name in others.items()}
        selected = {bar: name for bar, name in names.items() if options.wants(bar)}
        if not selected:
            continue
        tasks = [make(seed) for seed in range(5 if options.full else 2)]
        percents: dict[str, list[float]] = {}
        for name in ("ours", *selected.values()):
            options.progress(f"{title}: {name}")
            percents[name] = [
                _accuracy(name, task, seed) for seed, task in enumerate(tasks) if task is not None
            ]
        for bar, other in selected.items():
            task = tasks[0]
            if task is None:
                yield not_judged(bar, "points", ">= 0", MISSING)
                continue
            means = ", ".join(f"{name} {np.mean(values):.2f}" for name, values in percents.items())
            gains = np.array(percents["ours"]) - np.array(percents[other])
            detail = f"{means} %; {task.sizes()}; each seed {np.round(gains, 2)}"
            yield at_least(
                bar, float(gains.mean()), task.gain if other == "mlp" else 0.0, "points",
                n=len(gains), detail=detail,
            )  # fmt: skip


def _accuracy(name: str, task: _Task, seed: int) -> float:
    torch.manual_seed(seed)
    inputs = task.train.x.shape[1]
    model: nn.Module
    if name == "mlp":
        model = nn.Sequential(nn.Linear(inputs, task.hidden), nn.ReLU(), nn.Linear(task.hidden, 10))
    else:
        model = Linear(inputs, 10, neuron=name)
    _train(model, task.train, task.epochs, task.rate, task.rows)
    return _percent(model, task.held)


def _train(
    model: nn.Module, samples: Samples, epochs: int, rate: float = 0.1, batch: int = 64
) -> None:
    """Train by the paper's recipe: SGD with momentum, cosine, gradients clipped at 0.5."""
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for rows in torch.randperm(len(samples.x)).split(batch):
            optimizer.zero_grad()
            cross_entropy(model(samples.x[rows]), samples.y[rows]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        schedule.step()


def _percent(model: nn.Module, samples: Samples) -> float:
    with torch.no_grad():
        return 100 * float((model(samples.x).argmax(1) == samples.y).float().mean())


def _expressive_rows(options: BenchOptions) -> Iterator[Bar]:
    """Test one layer, without activation, on tasks beyond linear layers; report the worst seed."""
    seeds = range(5 if options.full else 2)
    bar = "circles told apart by one layer"
    if options.wants(bar):
        options.progress(bar)
        yield at_least(bar, min(map(_circles, seeds)), 98.5, "%", n=len(seeds), detail=_HELD)
    bar = "XOR by one layer"
    if options.wants(bar):
        options.progress(bar)
        x = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
        samples = Samples(x, (x[:, 0] != x[:, 1]).long())
        percents = [_percent(_fitted(samples, 2, seed), samples) for seed in seeds]
        yield at_least(bar, min(percents), 100, "%", n=len(seeds), detail="four points")
    bar = "quadratic regression by one layer: share of variance explained"
    if options.wants(bar):
        options.progress(bar)
        yield at_least(bar, min(map(_regression, seeds)), 0.999, "", n=len(seeds), detail=_HELD)


def _circles(seed: int) -> float:
    from sklearn.datasets import make_circles

    x, y = make_circles(1000, noise=0.08, factor=0.5, random_state=seed)
    samples = Samples(torch.tensor(x, dtype=torch.float32), torch.tensor(y))
    train, held = (Samples(samples.x[i::2], samples.y[i::2]) for i in (0, 1))
    return _percent(_fitted(train, 2, seed), held)


def _regression(seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1000, 2, generator=generator)
    y = 2 * x[:, 0] * x[:, 1] - x[:, 1] ** 2 + x[:, 0] + 0.5
    model = _fitted(Samples(x[::2], y[::2]), 1, seed)
    with torch.no_grad():
        rest = model(x[1::2])[:, 0] - y[1::2]
    return 1 - float(rest.var(correction=0) / y[1::2].var(correction=0))


def _fitted(samples: Samples, outputs: int, seed: int) -> nn.Module:
    """Fit one layer; with one output to numbers, with several to labels."""
    torch.manual_seed(seed)
    model = Linear(samples.x.shape[1], outputs)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(400):
        optimizer.zero_grad()
        y = model(samples.x)
        loss = mse_loss(y[:, 0], samples.y) if outputs == 1 else cross_entropy(y, samples.y)
        loss.backward()
        optimizer.step()
    return model


def _inference_rows(options: BenchOptions, blocks: int) -> Iterator[Bar]:
    for inputs, outputs, images, size in _SHAPES:
        shape = f"{inputs} to {outputs}, {images} images of {size} x {size}"
        equal = f"fused, largest difference from three convolutions: {shape}"
        fast, first = f"inference over three convolutions: {shape}", f"over first order: {shape}"
        if not any(map(options.wants, (equal, fast, first))):
            continue
        options.progress(fast)
        x = torch.randn(images, inputs, size, size)
        separate, layer = _Separate(inputs, outputs), Conv2d(inputs, outputs, 3, padding=1)
        with torch.no_grad():
            convolutions = separate.a, separate.b, separate.c
            layer.weight.copy_(torch.cat([convolution.weight for convolution in convolutions]))
            for convolution in convolutions[:2]:
                convolution.bias.zero_()  # type: ignore[union-attr]
            layer.bias.copy_(separate.c.bias)  # type: ignore[union-attr, arg-type]
            models = {
                "three": separate, "fused": FusedQuadratic(layer),
                "first order": nn.Conv2d(inputs, outputs, 3, padding=1),
            }  # fmt: skip
            y = separate(x)
            worst = float((models["fused"](x) - y).abs().max() / y.abs().max())
            arms = {name: functools.partial(model, x) for name, model in models.items()}
            taken = paired(arms, blocks=blocks, budget_s=8.0)
        if options.wants(equal):
            yield at_most(equal, worst, 1e-5, "", n=1)
        if options.wants(fast):
            yield taken.ratio("three", "fused").at_least(fast, 1.3, detail=f"{taken}")
        if options.wants(first):
            yield taken.ratio("fused", "first order").at_most(first, 3.1, detail=f"{taken}")


def _stability_rows(options: BenchOptions) -> Iterator[Bar]:
    bars = {
        "3 to 24 layers with branch norm: trainings that stay finite": True,
        "without branch norm: trainings that blow up and are told": False,
    }
    cases = list(itertools.product((3, 6, 12, 24), range(5 if options.full else 1)))
    epochs = 3 if options.full else 1
    for bar, branch_norm in bars.items():
        if not options.wants(bar):
            continue
        ends = []
        for depth, seed in cases:
            options.progress(f"{bar}: {depth} layers")
            ends.append(_deep(depth, seed, branch_norm=branch_norm, epochs=epochs))
        broken = [end for end in ends if not end[0]]
        detail = (
            f"digits, {22 * epochs} steps at 0.1, gradients clipped at 0.5; {len(ends)} trainings"
        )
        if branch_norm:
            yield at_least(
                bar, len(ends) - len(broken), len(ends), f"of {len(ends)}", n=len(ends),
                detail=detail,
            )  # fmt: skip
        else:
            warned = sum(end[1] for end in broken)
            yield at_least(
                bar, warned, len(broken), f"of {len(broken)}", n=len(ends), detail=detail
            )


def _deep(depth: int, seed: int, *, branch_norm: bool, epochs: int) -> tuple[bool, bool]:
    """Return whether a stack of quadratic convolutions stays finite, and whether it warned."""
    task = _digits(seed)
    torch.manual_seed(seed)
    layers = [
        Conv2d(1 if at == 0 else 8, 8, 3, padding=1, branch_norm=branch_norm) for at in range(depth)
    ]
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SlipstreamWarning)
        _train(model, task.train, epochs)
    finite = all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
    return finite, any(issubclass(warning.category, SlipstreamWarning) for warning in caught)


@dataclass(frozen=True)
class _Building:
    """Networks of one seed: six first-order convolutions, six quadratic ones, and the built one.

    Attributes:
        result: result of the builder.
        budget: budget of the builder.
        search: its CPU time, including the final training, over training the quadratic network.
        time: time to train the built network over training the first-order network.
        parameters: parameters of the built network over the first-order network's.
        percents: accuracy on held-out images: first order, built.
    """

    result: ShorteningResult
    budget: float
    search: float
    time: float
    parameters: float
    percents: tuple[float, float]


def _builder_rows(options: BenchOptions) -> Iterator[Bar]:
    near, time = "builder: distance from the budget", "builder: search over one training"
    better = "built network over six first-order convolutions"
    if not any(map(options.wants, (near, time, better))):
        return
    study = _fashion()
    if study is None:
        yield not_judged(near, "%", "<= 5", MISSING)
        return
    images, epochs, seeds = (2000, 10, 5) if options.full else (500, 4, 1)
    built = []
    for seed in range(seeds):
        options.progress(f"{near}: seed {seed}")
        built.append(_build(study, images, epochs, seed))
    n, detail = len(built), f"Fashion-MNIST, {images} images of 14 x 14, {epochs} epochs; "
    fates = "; ".join(
        f"{len(network.result.removed)} of 6 removed, {len(network.result.narrowed)} narrowed"
        for network in built
    )
    far = [100 * abs(1 - network.result.share / network.budget) for network in built]
    if options.wants(near):
        yield at_most(near, max(far), 5.0, "%", n=n, detail=detail + fates)
    if options.wants(time):
        ratios = [network.search for network in built]
        note = f"CPU time, including the final training; each seed {np.round(ratios, 2)}"
        yield at_most(time, float(np.median(ratios)), 1.2, "x", n=n, detail=detail + note)
    if options.wants(better):
        gains = [network.percents[1] - network.percents[0] for network in built]
        note = (
            f"{np.mean([network.percents for network in built], axis=0).round(2)} %, six quadratic "
            f"layers {np.mean([network.result.before for network in built]):.2f} on the samples to "
            f"choose by; each seed {np.round(gains, 2)}; training takes "
            f"{np.median([network.time for network in built]):.2f}x, parameters "
            f"{np.median([network.parameters for network in built]):.2f}x; {fates}"
        )
        yield at_least(better, float(np.mean(gains)), -0.3, "points", n=n, detail=detail + note)


def _networks(seed: int) -> tuple[nn.Module, nn.Module, float]:
    """Return a first-order network, a quadratic one, and 0.85 of the former's relative size."""
    torch.manual_seed(seed)
    widths = (1, 16, 16, 32, 32, 32, 32)
    layers: list[nn.Module] = []
    for at, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] * (at in (1, 3))
    first = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    quadratic = copy.deepcopy(first)
    # From random branches six such layers learn nothing in this many steps.
    convert(quadratic, except_=str(len(first) - 1))
    sizes = [sum(p.numel() for p in network.parameters()) for network in (first, quadratic)]
    return first, quadratic, 0.85 * sizes[0] / sizes[1]


def _build(study: Study, images: int, epochs: int, seed: int) -> _Building:
    first, quadratic, budget = _networks(seed)
    train, chosen, held = (
        Samples(avg_pool2d(samples.x[:count].view(-1, 1, 28, 28), 2), samples.y[:count])
        for samples, count in (
            (study.train, images),
            (study.choice, images // 4),
            (study.held, 4000),
        )
    )
    cpu_ns: dict[str, float] = {}
    results: list[ShorteningResult] = []

    def learn(model: nn.Module, name: str = "built") -> None:
        cpu_ns[name] = time_function(lambda: _train(model.train(), train, epochs))["cpu"]

    def search() -> None:
        results.append(shorten(
            quadratic, learn, lambda model: _percent(model, chosen), train.x[:8], budget=budget
        ))  # fmt: skip

    learn(first, "first order")
    learn(quadratic, "quadratic")
    whole = time_function(search)["cpu"]
    (result,) = results
    models = first.eval(), result.model.eval()
    sizes = [sum(p.numel() for p in model.parameters()) for model in models]
    return _Building(
        result, budget, whole / cpu_ns["quadratic"], cpu_ns["built"] / cpu_ns["first order"],
        sizes[1] / sizes[0], (_percent(models[0], held), _percent(models[1], held)),
    )  # fmt: skip


def _predicted_rows(options: BenchOptions) -> Iterator[Bar]:
    families = _PREDICTED if options.full else _PREDICTED[1:2]
    for family in families:
        step, memory = f"predicted step of {family}", f"predicted memory of {family}"
        if not any(map(options.wants, (step, memory))):
            continue
        budget = "30s" if options.full else "10s"
        cells = measure_cells(
            family, workload_of(family), ["quadratic:ours"], budget, options.progress, widest=0.15
        )
        for cell in cells:
            yield from _prediction_rows(cell, {step: 15.0, memory: 5.0}, options)


def _prediction_rows(cell: Cell, targets: dict[str, float], options: BenchOptions) -> Iterator[Bar]:
    values: dict[str, Any] = dict(zip(targets, (cell.error, cell.memory_error), strict=True))
    detail = f"{cell.predicted:.3f}x predicted, {cell.measured:.3f}x measured, of the original step"
    for bar, target in targets.items():
        if not options.wants(bar):
            continue
        if cell.judged and np.isfinite(values[bar]):
            yield at_most(bar, 100 * abs(values[bar]), target, "%", n=1, detail=detail)
        else:
            yield not_judged(bar, "%", f"<= {target:g}", cell.note or "memory was not measured")
