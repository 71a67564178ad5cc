"""``slipstream bench ensembles``: networks without redundant units, and ensembles of peers.

Fashion-MNIST, 20,000 images to train with, 10,000 to test; a perceptron of two hidden layers, and
with ``--full`` a small convolutional network. Times are CPU time of one thread.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.functional import cross_entropy, interpolate

from slipstream.heap import keep_pages
from slipstream.measure import time_function
from slipstream.measure.memory import peak_of_call
from slipstream.techniques.ensembles import (
    Ensemble,
    Quality,
    StackedEnsemble,
    build,
    compact,
    compare,
    detection,
    evaluate,
)
from slipstream.techniques.ensembles.training import Method
from slipstream_bench.harness import one_thread, paired
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.systems.accuracy.cells import measure_cells, workload_of
from slipstream_bench.systems.adasum.study import Samples
from slipstream_bench.systems.adasum.tasks import MISSING, fashion

_EPOCHS, _SAMPLE, _MEMBERS = 10, 5_000, 8
_THRESHOLDS = {0.95: 0.1, 0.9: 0.3, 0.8: 0.8}
_TIME, _ACCURACY = "CPU time over independent", "points of accuracy lost"
_NLL, _SIZE = "negative log-likelihood added", "parameters over independent"
_DISAGREE, _ECE = "disagreement over independent", "calibration error added"
_AUROC = "area under the ROC lost, digits among clothes"
_TARGETS = {
    _TIME: 0.4, _ACCURACY: 0.15, _NLL: 0.005, _SIZE: 0.75, _DISAGREE: 0.6, _ECE: 0.01, _AUROC: 0.01,
}  # fmt: skip
_STEPS = ((4, 784, 256, 128), (4, 64, 32, 32), (32, 64, 32, 32), (32, 16, 64, 8), (128, 64, 32, 32))
"""Members, inputs, width and rows of training steps."""


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick takes three minutes: one seed, the perceptron alone."""
    keep_pages()
    blocks = 15 if options.full else 7
    with one_thread():
        yield from _planted_rows(options)
        yield from _execution_rows(options, blocks)
        yield from _wide_row(options)
        for name in ("MLP", "CNN") if options.full else ("MLP",):
            study = fashion(name)
            if study is None:
                yield not_judged(f"8 {name}s of peers: {_TIME}", "x", "<= 0.4", MISSING)
                break
            if name == "MLP":
                yield from _compaction_rows(options, study.train, study.held)
            yield from _ensemble_rows(options, name, study.train, study.held)
            yield from _equal_budget_rows(options, name, study.train, study.held)
            if name == "MLP":
                yield from _trunk_rows(options, study.train, study.held)
                if options.full:
                    yield from _budget_rows(options, study.train, study.held)
        yield from _predicted_rows(options)


def _perceptron(width: int = 256, inputs: int = 784) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, 10),
    )  # fmt: skip


def _convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 49, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def _trainer(train: Samples, epochs: int) -> Callable[[nn.Module, float, int], None]:
    def run(model: nn.Module, share: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        rounds = max(1, round(share * epochs))
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, rounds)
        model.train()
        for _ in range(rounds):
            for rows in torch.randperm(len(train.y), generator=generator).split(128):
                optimizer.zero_grad()
                cross_entropy(model(train.x[rows]), train.y[rows]).backward()
                optimizer.step()
            schedule.step()
        model.eval()

    return run


def _planted_rows(options: BenchOptions) -> Iterator[Bar]:
    bar, count = "planted redundancy: outputs differ", "planted redundancy: units found and gone"
    if not (options.wants(bar) or options.wants(count)):
        return
    options.progress(bar)
    worst, found, planted, wrong = 0.0, 0, 0, 0
    encoder = nn.TransformerEncoderLayer(32, 4, 64, activation="relu", batch_first=True)
    cases: list[tuple[nn.Module, Any, tuple[int, ...]]] = []
    for seed in range(5):
        torch.manual_seed(seed)
        perceptron, images = _perceptron(64, 32), _convolutional()
        block = copy.deepcopy(encoder)
        cases += [
            (perceptron, perceptron[0], (32,)), (images, images[4], (1, 28, 28)),
            (block, block.linear1, (6, 32)),
        ]  # fmt: skip
    for model, layer, shape in cases:
        model.eval()
        with torch.no_grad():
            for module in model.modules():  # so that few other units are dead on these inputs
                if module is layer or type(module) is nn.Linear:
                    module.bias += 1.0
            layer.weight[3:5], layer.bias[3:5] = layer.weight[0], layer.bias[0]
            layer.weight[5], layer.bias[5] = 2 * layer.weight[1], 2 * layer.bias[1]
            layer.weight[6], layer.bias[6] = 0.0, -1.0
        compacted = compact(model, list(torch.randn(8, 256, *shape)))
        names = {module: name for name, module in model.named_modules()}
        for report in compacted.layers:
            removed = report.dead + report.dependent
            if report.name == names[layer]:
                found, planted = found + removed, planted + 4
            else:
                wrong += removed
        x = torch.randn(64, *shape)  # not the inputs it was compacted with
        with torch.no_grad():
            before = model(x)
            worst = max(
                worst, float((compacted.model(x) - before).abs().max() / before.abs().max())
            )
    kinds = "perceptron, convolutions with norm, Transformer layer; duplicates, a scaled copy, a "
    detail = f"{kinds}dead unit; {wrong} other units were dead or dependent"
    if options.wants(bar):
        yield at_most(bar, worst, 1e-5, "", n=len(cases), detail=detail)
    if options.wants(count):
        holds = found == planted
        yield Bar(count, found, f"of {planted}", f"= {planted}", holds, len(cases), detail)


def _compaction_rows(options: BenchOptions, train: Samples, held: Samples) -> Iterator[Bar]:
    names = {
        correlation: f"compaction at {correlation}: points of accuracy lost"
        for correlation in _THRESHOLDS
    }
    cost = "compaction: time over that of an epoch"
    selected = [correlation for correlation, bar in names.items() if options.wants(bar)]
    if not (selected or options.wants(cost)):
        return
    options.progress("a network to compact")
    torch.manual_seed(0)
    model, epochs = _perceptron(512), 8 if options.full else 4
    epoch_ns = time_function(lambda: _trainer(train, epochs)(model, 1.0, 0))["cpu"] / epochs
    sample = list(train.x[:_SAMPLE].split(1000))
    before = evaluate(Ensemble([model]), held.x, held.y)
    if options.wants(cost):
        duration_ns = time_function(functools.partial(compact, model, sample, 0.9))["cpu"]
        detail = f"{duration_ns / 1e6:.0f} ms; two layers of 512 units, {_SAMPLE} images"
        yield at_most(cost, duration_ns / epoch_ns, 0.25, "x", n=1, detail=detail)
    for correlation in selected:
        options.progress(names[correlation])
        compacted = compact(model, sample, correlation)
        after = evaluate(Ensemble([compacted.model]), held.x, held.y)
        lost = 100 * (before.accuracy - after.accuracy)
        removed = ", ".join(
            f"{layer.dead} + {layer.dependent} of {layer.units}" for layer in compacted.layers
        )
        shares = f"{100 * before.accuracy:.2f} to {100 * after.accuracy:.2f} %"
        detail = (
            f"{shares}, {compacted.parameters:.2f} of the parameters, not trained again; "
            f"dead + dependent: {removed}"
        )
        target = _THRESHOLDS[correlation]
        yield at_most(names[correlation], lost, target, "points", n=1, detail=detail)


def _wide_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "compaction of two layers of 4,096 units: peak beyond what was there"
    if not options.wants(bar, 40):
        return
    options.progress(bar)
    torch.manual_seed(0)
    model, sample = _perceptron(4096), list(torch.randn(_SAMPLE, 784).split(500))
    peak = peak_of_call(lambda: compact(model, sample, 0.9))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    detail = f"{_SAMPLE} samples, streamed; the model is {size / 1e6:.0f} MB"
    yield at_most(bar, peak.increase / (1 << 30), 1.0, "GiB", detail=detail)


def _ensemble_rows(
    options: BenchOptions, name: str, train: Samples, held: Samples
) -> Iterator[Bar]:
    names = {what: f"{_MEMBERS} {name}s of peers: {what}" for what in _TARGETS}
    if not any(options.wants(bar) for bar in names.values()):
        return
    make = _perceptron if name == "MLP" else _convolutional
    outside = _digits(held.x.shape[1:])
    found: dict[str, list[float]] = {what: [] for what in names}
    gains, notes = [], []
    for seed in range(3 if options.full else 1):
        made: dict[str, Ensemble] = {}
        cpu: dict[str, float] = {}
        for method in ("independent", "peers"):
            options.progress(f"{_MEMBERS} {name}s, {method}, seed {seed}")
            torch.manual_seed(seed)
            run = functools.partial(
                build, make(), _trainer(train, _EPOCHS), members=_MEMBERS, method=method,
                sample=list(train.x[:_SAMPLE].split(1000)), seed=100 * seed,
            )  # fmt: skip
            cpu[method] = time_function(functools.partial(_keep, made, method, run))["cpu"]
        pair = [made[method].eval() for method in ("peers", "independent")]
        peers, independent = (evaluate(each, held.x, held.y) for each in pair)
        with torch.no_grad():
            right = [(each(held.x).argmax(-1) == held.y).double() for each in pair]
        gains.append((right[1] - right[0]).numpy())
        sizes = [sum(p.numel() for p in each.parameters()) for each in pair]
        areas = [detection(each, held.x, outside) for each in pair]
        values = {
            _TIME: cpu["peers"] / cpu["independent"], _NLL: peers.nll - independent.nll,
            _ACCURACY: 100 * (independent.accuracy - peers.accuracy), _SIZE: sizes[0] / sizes[1],
            _DISAGREE: peers.disagreement / independent.disagreement,
            _ECE: peers.ece - independent.ece, _AUROC: areas[1] - areas[0],
        }  # fmt: skip
        for what, value in values.items():
            found[what].append(value)
        notes.append(f"{100 * peers.accuracy:.2f} and {100 * independent.accuracy:.2f} %")
    lost = np.concatenate(gains)
    noise = 196 * float(lost.std()) / np.sqrt(len(lost))
    for what, bar in names.items():
        each = np.array(found[what])
        mean, unit = float(each.mean()), "x" if " over " in what else ""
        detail = f"peers and independent: {', '.join(notes)}; each seed {np.round(each, 4)}"
        judge = at_least if what == _DISAGREE else at_most
        if what == _ACCURACY:
            unit = "points"
            detail += f"; {mean - noise:.2f} to {mean + noise:.2f} by the images drawn, 95 %"
        row = judge(bar, mean, _TARGETS[what], unit, n=len(each), detail=detail)
        yield replace(row, low=mean - noise, high=mean + noise) if what == _ACCURACY else row


def _equal_budget_rows(
    options: BenchOptions, name: str, train: Samples, held: Samples
) -> Iterator[Bar]:
    """Compare peers with independent members, and with snapshots, at equal training budgets.

    A budget of B trainings makes B independent members, or twice as many peers: one fully trained,
    and the others share the rest. Below two trainings, the better of one and two independent
    members counts.
    """
    wins = f"{name}s of peers at 1.5, 2 and 4 trainings: less NLL than independent"
    gain = f"{name}s of peers at 1.5 trainings: accuracy over snapshots"
    if not (options.wants(wins) or options.wants(gain)):
        return
    make = _perceptron if name == "MLP" else _convolutional
    epochs, seeds = (_EPOCHS, 3 if name == "MLP" else 1) if options.full else (4, 1)
    losses: list[tuple[float, float, float]] = []
    gains: list[float] = []

    def made(method: Method, members: int, budget: float, seed: int, share: float = 0.3) -> Quality:
        options.progress(f"{members} {name}s, {method}, {budget:g} trainings, seed {seed}")
        torch.manual_seed(seed)
        trainer = _trainer(train, epochs)
        whole = 1.0 if method == "peers" else budget if method == "snapshot" else budget / members

        def run(model: nn.Module, part: float, number: int) -> None:
            trainer(model, whole * part, number)

        sample = list(train.x[:_SAMPLE].split(1000))
        ensemble = build(
            make(), run, members=members, method=method, share=share, sample=sample,
            seed=100 * seed,
        )  # fmt: skip
        return evaluate(ensemble.eval(), held.x, held.y)

    for seed in range(seeds):
        for budget in (1.5, 2.0, 4.0):
            members = round(2 * budget)
            peers = made("peers", members, budget, seed, (budget - 1) / (members - 1))
            counts = {1, 2} if budget < 2 else {round(budget)}
            others = [made("independent", count, budget, seed) for count in sorted(counts)]
            losses.append((budget, peers.nll, min(quality.nll for quality in others)))
            if budget < 2:
                gains.append(
                    100 * (peers.accuracy - made("snapshot", members, budget, seed).accuracy)
                )
    won = sum(ours < theirs for _, ours, theirs in losses)
    losses_by_budget = ", ".join(
        f"{ours:.4f} and {theirs:.4f} at {b:g}" for b, ours, theirs in losses
    )
    least = math.ceil(len(losses) * 5 / 6)
    yield at_least(wins, won, least, f"of {len(losses)}", n=len(losses), detail=losses_by_budget)
    detail = f"each seed {np.round(gains, 2)}"
    yield at_least(gain, float(np.mean(gains)), 0.3, "points", n=seeds, detail=detail)


def _trunk_rows(options: BenchOptions, train: Samples, held: Samples) -> Iterator[Bar]:
    size = f"{_MEMBERS} MLPs of a shared trunk: {_SIZE}"
    lost = f"{_MEMBERS} MLPs of a shared trunk: {_ACCURACY}"
    if not (options.wants(size) or options.wants(lost)):
        return
    sizes, points = [], []
    for seed in range(3 if options.full else 1):
        made = {}
        for method in ("trunk", "independent"):
            options.progress(f"{_MEMBERS} MLPs, {method}, seed {seed}")
            torch.manual_seed(seed)
            made[method] = build(
                _perceptron(), _trainer(train, _EPOCHS if options.full else 4), members=_MEMBERS,
                method=method, trunk=2, seed=100 * seed,
            ).eval()  # fmt: skip
        ours, theirs = (evaluate(ensemble, held.x, held.y) for ensemble in made.values())
        count = {
            name: sum(p.numel() for p in ensemble.parameters()) for name, ensemble in made.items()
        }
        sizes.append(count["trunk"] / count["independent"])
        points.append(100 * (theirs.accuracy - ours.accuracy))
    yield at_most(size, float(np.mean(sizes)), 0.5, "x", n=len(sizes))
    detail = f"against independent members; each seed {np.round(points, 2)}"
    yield at_most(lost, float(np.mean(points)), 0.3, "points", n=len(points), detail=detail)


def _predicted_rows(options: BenchOptions) -> Iterator[Bar]:
    """Predict the step that trains members together from one model's step, and measure it."""
    families = ("perceptron", "conv_net", "tiny_language_model") if options.full else ("conv_net",)
    members = (2, 4, 8) if options.full else (2,)
    time, memory = "predicted step of members", "predicted memory of members"
    for family in families:
        selected = [bar for bar in (time, memory) if options.wants(f"{bar}: {family}")]
        if not selected:
            continue
        cells = list(measure_cells(
            family, workload_of(family), [f"ensemble:{count}" for count in members],
            "40s" if options.full else "10s", options.progress, widest=0.15,
        ))  # fmt: skip
        for bar in selected:
            errors = {
                cell.technique: 100 * abs(cell.error if bar is time else cell.memory_error)
                for cell in cells
                if cell.judged
            }
            errors = {name: value for name, value in errors.items() if np.isfinite(value)}
            shown = ", ".join(f"{value:.1f} with {name}" for name, value in errors.items())
            if errors:
                yield at_most(
                    f"{bar}: {family}", max(errors.values()), 15.0, "%", n=len(errors), detail=shown
                )
            else:
                note = "; ".join(cell.note for cell in cells if cell.note)
                yield not_judged(f"{bar}: {family}", "%", "<= 15", note or "nothing was measured")


def _keep(made: dict[str, Ensemble], name: str, run: Callable[[], Ensemble]) -> None:
    made[name] = run()


def _digits(shape: torch.Size) -> torch.Tensor:
    """Return handwritten digits in the size of the images, with mean 0 and deviation 1."""
    from sklearn.datasets import load_digits

    images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1)
    large = interpolate(images, (28, 28), mode="bilinear")
    return ((large - large.mean()) / large.std()).reshape(-1, *shape)


def _budget_rows(options: BenchOptions, train: Samples, held: Samples) -> Iterator[Bar]:
    names = {
        method: f"4 MLPs, {method}: accuracy"
        for method in ("independent", "peers", "trunk", "batch", "snapshot")
    }
    if not any(options.wants(bar) for bar in names.values()):
        return
    options.progress("five ways to make four members")
    torch.manual_seed(0)
    comparison = compare(
        _perceptron(), _trainer(train, _EPOCHS), held.x, held.y, members=4, trunk=2,
        sample=list(train.x[:_SAMPLE].split(1000)),
    )  # fmt: skip
    single = comparison.rows[0].quality
    for row in comparison.rows[1:]:
        detail = (
            f"no bar; one model {100 * single.accuracy:.2f} %, NLL {single.nll:.4f}; NLL "
            f"{row.quality.nll:.4f}, CPU time {row.time:.2f} and parameters {row.parameters:.2f} "
            f"of one, members differ on {100 * row.quality.disagreement:.1f} %"
        )
        value = 100 * row.quality.accuracy
        yield Bar(names[row.method], value, "%", "reported", None, 1, detail)


def _execution_rows(options: BenchOptions, blocks: int) -> Iterator[Bar]:
    for rows in (1, 64):
        bar = f"inference of {_MEMBERS}, loop over stacked, {rows} rows"
        again = f"inference of {_MEMBERS}, loop over a shared trunk, {rows} rows"
        torch.manual_seed(0)
        members = [_perceptron().eval() for _ in range(_MEMBERS)]
        loop, x = Ensemble(members).eval(), torch.randn(rows, 784)
        others = {
            bar: (loop, loop.stacked()),
            again: (
                Ensemble([nn.Sequential(members[0][:2], member[2:]) for member in members]).eval(),
                Ensemble([member[2:] for member in members], members[0][:2]).eval().stacked(),
            ),
        }
        for name, (slow, fast) in others.items():
            if options.wants(name):
                options.progress(name)
                with torch.no_grad():
                    distance = float((slow(x) - fast(x)).abs().max())
                arms = {"ours": _without(fast, x), "loop": _without(slow, x)}
                taken = paired(arms, blocks=blocks, budget_s=6.0)
                detail = f"outputs differ by {distance:.1g}; {taken}"
                yield taken.ratio("loop", "ours").at_least(name, 1.5, detail=detail)
    for count, inputs, width, rows in _STEPS if options.full else _STEPS[:3]:
        name = f"training {count} of {inputs}-{width}-{width}-10, {rows} rows: over the best"
        if not options.wants(name):
            continue
        options.progress(name)
        members = [_perceptron(width, inputs) for _ in range(count)]
        x, y = torch.randn(rows, inputs), torch.randint(0, 10, (rows,))
        arms = {
            "ours": _stacked_step(members, x, y), "loop": _loop_step(members, x, y),
            "vmap": _vmap_step(members, x, y),
        }  # fmt: skip
        taken = paired(arms, blocks=blocks, budget_s=8.0)
        best = min(("loop", "vmap"), key=taken.median_s)
        yield taken.ratio("ours", best).at_most(name, 1.1, detail=f"best: {best}; {taken}")


def _without(model: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return model(x)

    return run


def _stacked_step(members: list[nn.Sequential], x: Any, y: Any) -> Callable[[], object]:
    model = StackedEnsemble(members).train()
    rows, labels = x.repeat(len(members), 1), y.repeat(len(members))
    sources = list(model.parameters())
    return lambda: torch.autograd.grad(cross_entropy(model(rows), labels), sources)


def _loop_step(members: list[nn.Sequential], x: Any, y: Any) -> Callable[[], object]:
    return lambda: [
        torch.autograd.grad(cross_entropy(member(x), y), list(member.parameters()))
        for member in members
    ]


def _vmap_step(members: list[nn.Sequential], x: Any, y: Any) -> Callable[[], object]:
    weights = stack_module_state(list(members))[0]
    base = copy.deepcopy(members[0])

    def loss(weight: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(functional_call(base, weight, (x,)), y)

    gradients = vmap(grad(loss), in_dims=(0, None, None))
    return lambda: gradients(weights, x, y)
