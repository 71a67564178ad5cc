"""``slipstream bench lowrank``: low-rank layers, their step time and accuracy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import mean, median, stdev
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from slipstream.cluster import Cluster
from slipstream.data import MissingDataError
from slipstream.measure.claims import ratio_between
from slipstream.technique import combination_name, parse
from slipstream.techniques.distributed.compression.bucket import Layout
from slipstream.techniques.distributed.compression.powersgd import PowerSGD
from slipstream.techniques.lowrank import Start, factorize, plan
from slipstream.verbs.proving.sides import prove
from slipstream.workload import build_from
from slipstream_bench.harness import one_thread, paired
from slipstream_bench.models import perceptron
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.systems.accuracy.cells import measure_cells, workload_of
from slipstream_bench.systems.lowrank.accuracy import MODELS, percent
from slipstream_bench.systems.lowrank.models import PUBLISHED, ResNet18, resnet18_ranks, trained

_BATCH, _RATIO = 16, 0.25
_EPOCH = 50_000
_STEP = "step, dense over r = 1/4, ResNet-18 on 32 x 32"
_COLLAPSE_AT, _COLLAPSE_SEEDS = (1 / 16, 1 / 40), 10
_ACCURACY_SEEDS = 5
_ABOVE = 80.0


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: sizes, identity, the step and the switch; accuracy of one seed."""
    yield from _sizes(options)
    yield from _identity(options)
    with one_thread():
        yield from _steps(options)
        yield from _switch(options)
        yield from _collapse(options)
        yield from _accuracy(options)
    yield from _predicted(options)
    yield from _against_powersgd(options)


def _sizes(options: BenchOptions) -> Iterator[Bar]:
    bar = "published parameter counts"
    if not options.wants(bar):
        return
    right = 0
    for make, ranks, before, after, *_ in PUBLISHED.values():
        with torch.device("meta"):
            model = make()
        report = plan(model, ranks(model))
        saved = report.parameters_before - report.parameters
        right += (trained(model) == before) + (before - saved == after)
    yield at_least(bar, right, 12, "of 12", n=12, detail=", ".join(PUBLISHED))


def _identity(options: BenchOptions) -> Iterator[Bar]:
    bar = "full rank against dense, float32, largest relative error"
    if not options.wants(bar):
        return
    torch.manual_seed(0)
    cases: list[tuple[Any, tuple[int, ...]]] = [
        (nn.Linear(300, 200), (16, 300)), (nn.Conv1d(32, 48, 5, padding=2), (4, 32, 50)),
        (nn.Conv2d(32, 64, 3, 2, 1), (4, 32, 16, 16)), (nn.LSTM(64, 96, 2), (12, 4, 64)),
    ]  # fmt: skip
    errors = []
    for dense, shape in cases:
        x, model = torch.randn(shape), nn.Sequential(dense)
        with torch.no_grad():
            before = _first(dense(x))
            factorize(model, 1.0, keep="none", must_shrink=False)
            errors.append(float((_first(model[0](x)) - before).norm() / before.norm()))
    yield at_most(bar, max(errors), 1e-5, "", n=len(errors))


def _first(made: Any) -> torch.Tensor:
    found: torch.Tensor = made[0] if isinstance(made, tuple) else made
    return found


def _step(ratio: float, channels_last: bool = False) -> Callable[[], object]:
    """Return a training step of ResNet-18, dense at a ratio of 0."""
    torch.manual_seed(0)
    model: nn.Module = ResNet18()
    if ratio:
        factorize(model, resnet18_ranks(model, ratio), start=Start(keep_norm=True))
    x, y = torch.randn(_BATCH, 3, 32, 32), torch.randint(0, 10, (_BATCH,))
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = x.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def _steps(options: BenchOptions) -> Iterator[Bar]:
    both = f"{_STEP}, both channels last"
    if not (options.wants(_STEP) or options.wants(both)):
        return
    options.progress(_STEP)
    arms = {
        "dense": _step(0), "thin": _step(_RATIO), "dense NHWC": _step(0, True),
        "thin NHWC": _step(_RATIO, True),
    }  # fmt: skip
    taken = paired(arms, blocks=20 if options.full else 8)
    detail = f"batch {_BATCH}, SGD with momentum; FLOPs 2.57"
    yield taken.ratio("dense", "thin").at_least(_STEP, 2.4, detail=detail)
    yield taken.ratio("dense NHWC", "thin NHWC").reported(both, detail=detail)


def _switch(options: BenchOptions) -> Iterator[Bar]:
    for randomised, most in ((False, 5.0), (True, 1.0)):
        how = "randomised" if randomised else "exact"
        bar = f"switch of ResNet-18 over an epoch, {how}"
        if not options.wants(bar, 20):
            continue
        options.progress(bar)
        model = ResNet18()
        step = _step(0)
        step()
        began = time.process_time()
        step()
        epoch = (time.process_time() - began) * _EPOCH / _BATCH
        began = time.process_time()
        factorize(model, resnet18_ranks(model), start=Start(randomised=randomised))
        duration_s = time.process_time() - began
        yield at_most(
            bar, 100 * duration_s / epoch, most, "%", detail=f"{duration_s:.1f} s of {epoch:.0f} s"
        )


def _collapse(options: BenchOptions) -> Iterator[Bar]:
    bar = "no collapse of products from the first step, rank 1/16 and 1/40"
    seeds = _COLLAPSE_SEEDS if options.full else 1
    target = len(_COLLAPSE_AT) * seeds
    if not options.wants(bar, 60):
        return
    options.progress(bar)
    try:
        found = [percent("MLP", "spectral", r, s) for r in _COLLAPSE_AT for s in range(seeds)]
    except MissingDataError as error:
        yield not_judged(bar, f"of {target} above {_ABOVE:.0f} %", f">= {target}", error.what)
        return
    above = sum(accuracy > _ABOVE for accuracy in found)
    yield at_least(
        bar, above, target, f"of {target} above {_ABOVE:.0f} %", n=target,
        detail=f"lowest {min(found):.1f} %; Fashion-MNIST, 20,000 images, 6 epochs",
        data={"percent": found},
    )  # fmt: skip


def _accuracy(options: BenchOptions) -> Iterator[Bar]:
    seeds = _ACCURACY_SEEDS if options.full else 1
    for model in MODELS:
        for ratio in (1 / 4, 1 / 16):
            bar = f"accuracy of {model} at r = 1/{1 / ratio:.0f}, hybrid less dense"
            if not options.wants(bar, 90):
                continue
            options.progress(bar)
            try:
                pairs = [
                    (percent(model, "dense", 1.0, s), percent(model, "hybrid", ratio, s))
                    for s in range(seeds)
                ]
            except MissingDataError as error:
                yield not_judged(bar, "points", ">= -0.3", error.what)
                continue
            less = [b - a for a, b in pairs]
            spread = f" +- {2.78 * stdev(less) / seeds**0.5:.2f}" if seeds > 1 else ""
            yield at_least(
                bar, mean(less), -0.3, "points", n=seeds,
                detail=f"dense {mean(a for a, _ in pairs):.2f} %{spread}", data={"pairs": pairs},
            )  # fmt: skip


_PREDICTED = (
    "perceptron", "conv_net", "vision_transformer", "language_model", "tiny_language_model",
    "recommender",
)  # fmt: skip
_RATIOS = (0.25, 0.125, 0.0625)


def _predicted(options: BenchOptions) -> Iterator[Bar]:
    """Compare steps of low-rank models, predicted from the dense one's, with real ones."""
    near, sign = "predicted step of thin models, median error", "gains promised where none is"
    if not (options.wants(near, 60) or options.wants(sign, 60)):
        return
    cells = [
        cell
        for family in (_PREDICTED if options.full else _PREDICTED[:1])
        for cell in measure_cells(
            family, workload_of(family), [f"lowrank:{ratio:g}" for ratio in _RATIOS],
            "30s" if options.full else "10s", options.progress, widest=0.15,
        )
    ]  # fmt: skip
    judged = {cell.name: cell for cell in cells if cell.judged}
    if not judged:
        yield not_judged(near, "%", "<= 10 (worst <= 20)", "; ".join(c.note for c in cells))
        return
    errors = {name: 100 * abs(cell.error) for name, cell in judged.items()}
    middle, worst = median(errors.values()), max(errors.values())
    listed = ", ".join(f"{name} {error:.1f}" for name, error in errors.items())
    yield Bar(
        near, middle, "%", "<= 10 (worst <= 20)", middle <= 10 and worst <= 20, len(errors),
        listed, 10.0, data={"errors": errors},
    )  # fmt: skip
    wrong = [n for n, cell in judged.items() if cell.predicted > 1 and cell.measured < 0.95]
    yield at_most(sign, len(wrong), 0, f"of {len(judged)}", n=len(judged), detail=", ".join(wrong))


# Two ranks on this machine; the link is fast, so that the comparison is of computation.
_LINK = "workers=2,link=10gbit,latency=50us"
# PowerSGD compresses matrices whose factors have less than half of their elements: here two at rank
# 64, one from 223, none from 256. Low-rank layers for the same ones, at the same rank, have equal
# sizes.
_EQUAL = (("rank=64,ends=yes,except=5", 64), ("rank=255", 255))


def _against_powersgd(options: BenchOptions) -> Iterator[Bar]:
    """Compare two replicas: uncompressed low-rank gradients, and PowerSGD at the same bytes."""
    for settings, rank in _EQUAL if options.full else _EQUAL[:1]:
        bar = f"step over PowerSGD's at equal bytes, perceptron, rank {rank}"
        if not options.wants(bar, 40):
            continue
        options.progress(bar)
        sent, as_thin = _sent(rank), _thin_numbers(settings)
        if sent != as_thin:
            yield not_judged(bar, "x", "<= 0.6", f"{as_thin:,} numbers against {sent:,}")
            continue
        low, middle, high = _over(f"+lowrank:{settings}", f"+powersgd:{rank}", options)
        yield at_most(
            bar, middle, 0.6, "x",
            detail=f"2 ranks on this machine, {sent:,} numbers per step, {low:.3f} to {high:.3f}",
        )  # fmt: skip
    bar = "step over that of dense replicas, perceptron, r = 0.25, beside PowerSGD's rows"
    if options.full and options.wants(bar, 40):
        options.progress(bar)
        low, middle, high = _over("+lowrank:0.25", "", options)
        note = f"no bar; operations 0.67, numbers sent 0.72; {low:.3f} to {high:.3f}"
        yield Bar(bar, middle, "x", "reported", None, detail=note)


def _over(thin: str, other: str, options: BenchOptions) -> tuple[float, float, float]:
    """Return the ratio of two replicas' steps: lower end, estimate and upper end."""
    names = [f"ddp:workers=2{technique}" for technique in (thin, other)]
    result = prove(
        workload_of("perceptron"), names, cluster=Cluster.load(_LINK), threads=1, target=0.03,
        budget="60s" if options.full else "20s", quality_budget=None,
    )  # fmt: skip
    first, second = (combination_name(parse(name)) for name in names)
    claim = ratio_between(result.experiment, "wall", second, first)
    return 1 / claim.high, 1 / claim.estimate, 1 / claim.low


def _sent(rank: int) -> int:
    """Return the numbers that PowerSGD sends per step of the perceptron."""
    model, *_ = perceptron()
    layout = Layout.of({name: tuple(p.shape) for name, p in model.named_parameters()})
    return sum(message.nbytes for message in PowerSGD(rank).messages(layout)) // 4


def _thin_numbers(settings: str) -> int:
    """Return the numbers that replicas of the low-rank perceptron send per step: its parameters."""
    model = build_from(perceptron(), parse(f"lowrank:{settings}"), 0, "perceptron").model
    return trained(model)
