"""``slipstream bench train``: verdicts on trainings, compared with the rules and real runs."""

from __future__ import annotations

import io
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from slipstream.mlperf.training import SUITE, Reference, time_to_quality
from slipstream.mlperf.training.compare import Factor, detectable
from slipstream.mlperf.training.curve import BatchCurve
from slipstream.mlperf.training.log import Log
from slipstream.mlperf.training.rcp import Point
from slipstream.mlperf.training.tasks import load, recorded
from slipstream.verbs.history import history
from slipstream.verbs.training import predict_training
from slipstream_bench.harness import times_s
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged

_PAIRS, _COMPARISONS, _SETS = 10, 300, 100
_SEEDS = 20
_FORESEEN = {
    "digits": ["lowrank:0.25", "quadratic", "fused_optimizer"],
    "fashion_cnn": ["amp:bf16", "channels_last", "lowrank:0.25"],
    "char_lm": ["fused_optimizer", "lowrank:0.25"],
    "ncf": ["fused_optimizer"],
}
# Techniques that make the step faster and the training slower.
_TURNED = ("digits", (24, 96, 384, 1024))
_ALIKE = ("fashion_cnn", "allocator:keep")
_EXAMPLE = {128: [16, 14, 16, 17, 16, 16, 15, 16, 15, 16], 256: [20, 21, 21, 20, 22, 22, 21, 21, 20,
            20]}  # fmt: skip


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: everything on recorded runs, and one new run of the smallest task."""
    yield from _example(options)
    yield from _official(options)
    yield from _nothing_found(options)
    yield from _power(options)
    yield from _predicted(options)
    yield from _headline(options)
    yield from _same_numbers(options)
    yield from _batch_curve(options)
    yield from _ranks(options)
    yield from _logging(options)
    yield from _suite(options)


def _example(options: BenchOptions) -> Iterator[Bar]:
    bar = "reference points of the rules' example, largest error"
    if not options.wants(bar):
        return
    published = {(128, False): 15.21, (256, False): 19.93, (128, True): 14.78, (256, True): 19.82}
    off = [
        abs(Point.of(batch, _EXAMPLE[batch], as_checker=checker).smallest(5) - value)
        for (batch, checker), value in published.items()
    ]
    yield at_most(bar, max(off), 6e-3, "epochs", n=len(off))


def _official(options: BenchOptions) -> Iterator[Bar]:
    bar = f"verdicts as of the official checker of {_SETS} results"
    if not options.wants(bar):
        return
    try:
        from mlperf_logging.rcp_checker import rcp_checker
    except ImportError:
        yield not_judged(bar, "results", f">= {_SETS}", "pip install 'slipstream[mlperf]'")
        return
    rcp_checker.submission_runs["training"]["task"] = 5
    generator = np.random.default_rng(0)
    equal = 0
    for _ in range(_SETS):
        means = np.sort(generator.uniform(8, 20, 3))
        runs = {
            batch: generator.normal(middle, 0.05 * middle, 10).round(3).tolist()
            for batch, middle in zip((64, 128, 256), means, strict=True)
        }
        file = io.StringIO(json.dumps(official_json("task", runs)))
        official = rcp_checker.RCP_Checker("training", "6.0.0", "task", False, file)
        batch = int(generator.choice([64, 128, 256]))
        middle = float(np.mean(runs[batch])) * generator.uniform(0.85, 1.05)
        epochs = generator.normal(middle, 0.3, 5).round(3).tolist()
        record = official._find_rcp(batch, "full_rcps")
        theirs, _ = official._eval_submission_record(record, sorted(epochs), "")
        reference = Reference.of(runs, as_checker=True, pruned=False)
        equal += reference.check(batch, epochs).passed == bool(theirs)
    yield at_least(bar, equal, _SETS, f"of {_SETS}", n=_SETS)


def _nothing_found(options: BenchOptions) -> Iterator[Bar]:
    bar = "a task against itself, share called significant"
    if not options.wants(bar):
        return
    generator = np.random.default_rng(0)
    shares = {}
    for name in SUITE:
        if (record := recorded(name)) is None:
            continue
        (samples,) = record["samples"].values()
        found = sum(
            Factor.of(*generator.choice(samples, (2, _PAIRS)).tolist()).significant
            for _ in range(_COMPARISONS)
        )
        shares[name] = 100 * found / _COMPARISONS
    middle = float(np.mean(list(shares.values())))
    yield at_most(
        bar, abs(middle - 5), 2.5, "% from 5 %", n=_COMPARISONS * len(shares),
        detail=", ".join(f"{name} {share:.1f} %" for name, share in shares.items()), data=shares,
    )  # fmt: skip


def _power(options: BenchOptions) -> Iterator[Bar]:
    bar = "power announced, largest error"
    if not options.wants(bar):
        return
    drawn = np.random.default_rng(1)
    off = []
    for pairs, spread in ((5, 0.1), (10, 0.15), (40, 0.2)):
        effect = float(np.log1p(detectable(spread, pairs)))
        a = np.exp(drawn.normal(0, spread, (2000, pairs)))
        b = np.exp(drawn.normal(effect, spread, (2000, pairs)))
        found = np.mean(
            [Factor.of(x.tolist(), y.tolist()).significant for x, y in zip(a, b, strict=True)]
        )
        off.append(100 * abs(float(found) - 0.8))
    yield at_most(bar, max(off), 5, "points", n=len(off))


def _predicted(options: BenchOptions) -> Iterator[Bar]:
    """Predict, then measure, as `slipstream mlperf train` does."""
    chosen = _FORESEEN if options.full else {"digits": _FORESEEN["digits"][:1]}
    runs = 5 if options.full else 2
    count = sum(map(len, chosen.values()))
    bar = f"predicted time to quality of {count} techniques, median error"
    if not options.wants(bar, 400 if options.full else 40):
        return
    off: dict[str, dict[str, float]] = {}
    inside = 0
    for name, combinations in chosen.items():
        with tempfile.TemporaryDirectory() as folder, history(Path(folder) / "results.db") as past:
            options.progress(f"{name}: predicting")
            predictions = predict_training(name, combinations, past, runs=runs)
            judged = time_to_quality(
                name, combinations, runs=runs, folder=Path(folder) / "out",
                predictions=predictions, report=options.progress,
            )  # fmt: skip
        for verdict in judged.verdicts:
            prediction = predictions[verdict.name]
            off[f"{name} {verdict.name}"] = {
                factor: 100
                * abs(getattr(prediction, factor).ratio / getattr(verdict, factor).ratio - 1)
                for factor in ("sample", "samples", "time")
            }
            inside += prediction.time.low <= verdict.steps.ratio <= prediction.time.high
    middle = {key: median(errors[key] for errors in off.values()) for key in ("sample", "samples")}
    by_technique = ", ".join(f"{name} {errors['time']:.1f} %" for name, errors in off.items())
    yield at_most(
        bar, median(errors["time"] for errors in off.values()), 10, "%", n=count,
        detail=f"{runs} runs per side; time of a sample {middle['sample']:.1f} %, samples "
        f"{middle['samples']:.1f} %; {inside} of {count} inside; {by_technique}", data=off,
    )  # fmt: skip


def _headline(options: BenchOptions) -> Iterator[Bar]:
    """Judge large batches, which users try first and which shorten the time per sample."""
    task, sizes = _TURNED
    bar = (
        f"{task}, batches of {sizes[-1]} beside the fastest: time of a sample less, training longer"
    )
    if not options.wants(bar, 60):
        return
    with tempfile.TemporaryDirectory() as folder:
        measured = BatchCurve.measure(
            task, sizes, runs=8 if options.full else 4, folder=Path(folder), report=options.progress
        )
    larger = measured.larger
    if larger is None:
        yield not_judged(bar, "%", ">= 15", "the largest batch is the fastest")
        return
    row = at_least(
        bar, 100 * (1 - larger.sample.ratio), 15, "%", n=larger.time.n,
        detail=f"{measured.sentence}; time to the target {larger.time.ratio:.2f} "
        f"[{larger.time.low:.2f}, {larger.time.high:.2f}]", data=measured.to_json(),
    )  # fmt: skip
    yield replace(row, holds=bool(row.holds) and larger.time.low > 1)


def _same_numbers(options: BenchOptions) -> Iterator[Bar]:
    task, technique = _ALIKE
    bar = f"{task} {technique}: the same losses, width of the interval of 3 pairs"
    if not options.wants(bar, 60):
        return
    with tempfile.TemporaryDirectory() as folder:
        judged = time_to_quality(
            task, [technique], runs=3, folder=Path(folder) / "out", report=options.progress
        )
    (verdict,) = judged.verdicts
    width = 100 * (verdict.time.high - verdict.time.low) / verdict.time.ratio
    row = at_most(bar, width, 3, "%", n=3, detail=verdict.sentence, data=verdict.to_json())
    yield replace(row, holds=bool(row.holds) and verdict.same)


def _batch_curve(options: BenchOptions) -> Iterator[Bar]:
    sizes = tuple(64 << n for n in range(6)) if options.full else (128, 1024)
    bar = f"fashion_cnn, batches of {sizes[0]} to {sizes[-1]}: convex reference points"
    if not options.wants(bar, 240 if options.full else 60):
        return
    with tempfile.TemporaryDirectory() as folder:
        measured = BatchCurve.measure(
            "fashion_cnn", sizes, runs=4 if options.full else 3, folder=Path(folder),
            report=options.progress,
        )  # fmt: skip
    left = measured.reference.points
    slopes = [(b.mean - a.mean) / (b.batch - a.batch) for a, b in pairwise(left)]
    row = at_least(
        bar, len(left), 2, "points", n=sum(map(len, measured.epochs.values())),
        detail=f"critical batch size {measured.reference.critical_batch:,.0f}; "
        + ", ".join(f"{point.batch}: {point.mean:.2f} epochs" for point in measured.points)
        + f"; {len(measured.points) - len(left)} pruned", data=measured.to_json(),
    )  # fmt: skip
    convex = all(a <= b for a, b in pairwise(slopes))
    whole = len(measured.points) == len(sizes) and math.isfinite(measured.reference.critical_batch)
    yield replace(row, holds=bool(row.holds) and convex and whole)


def _ranks(options: BenchOptions) -> Iterator[Bar]:
    runs = _SEEDS if options.full else 3
    bar = f"digits, 2 ranks as 1 at the same batch, {runs} seeds"
    if not options.wants(bar, 12 * runs):
        return
    from scipy.stats import ks_2samp

    samples = []
    with tempfile.TemporaryDirectory() as folder:
        # Separate seeds, since with the same ones the two distributions would not be independent.
        for number, techniques in enumerate(([], ["ddp:workers=2"])):
            judged = time_to_quality(
                "digits", against="".join(techniques), runs=runs,
                folder=Path(folder) / str(number), report=options.progress,
            )  # fmt: skip
            samples.append([run.to_target for run in judged.arms[0].runs])
    test = ks_2samp(*samples)
    yield at_least(
        bar, float(test.pvalue), 0.05, "p", n=runs,
        detail=f"median samples {median(samples[0]):,.0f} and {median(samples[1]):,.0f}",
        data={"one": samples[0], "two": samples[1]},
    )  # fmt: skip


def _logging(options: BenchOptions) -> Iterator[Bar]:
    bar = "fashion_cnn: logging, share of a run's time"
    if not options.wants(bar, 15):
        return
    with tempfile.TemporaryDirectory() as folder:
        judged = time_to_quality("fashion_cnn", runs=1, folder=Path(folder) / "out")
        (run,) = judged.arms[0].runs
        written = Path(run.log).read_bytes()
        log = Log(Path(folder) / "more.txt", judged.task.place)
        line_s = median(
            times_s(
                lambda: log.event("eval_accuracy", 0.5, epoch_num=0.25, samples_count=1000),
                repeats=501,
            )
        )
        log.close()
    lines = written.count(b"\n")
    row = at_most(
        bar, 100 * lines * line_s / run.seconds, 0.5, "%",
        detail=f"{lines} lines of {1e6 * line_s:.0f} us in {run.seconds:.1f} s, "
        f"{len(written) / 1e3:.0f} kB (at most 200)",
    )  # fmt: skip
    yield replace(row, holds=bool(row.holds) and len(written) < 200_000)


def _suite(options: BenchOptions) -> Iterator[Bar]:
    """Full: run every task from 20 new seeds; quick: run the first once."""
    for name in SUITE if options.full else SUITE[:1]:
        runs = _SEEDS if options.full else 1
        bar = f"{name}: runs that reach the target"
        if not options.wants(bar, 30):
            continue
        options.progress(bar)
        with tempfile.TemporaryDirectory() as folder:
            try:
                judged = time_to_quality(name, runs=runs, folder=Path(folder) / "out")
            except Exception as error:
                yield not_judged(bar, "runs", f">= {runs - 1}", str(error))
                continue
        done = judged.arms[0].runs
        reached = sum(run.converged for run in done)
        cpu_s = median(run.cpu_s for run in done)
        yield at_least(
            bar, reached, runs - (runs > 1), f"of {runs}", n=runs,
            detail=f"{load(name).metric} {load(name).target:g}; {cpu_s:.1f} s of CPU time each",
            data={"samples": [run.samples for run in done], "cpu_s": [run.cpu_s for run in done]},
        )  # fmt: skip


def official_json(task: str, runs: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    """Return the points in the JSON format of the official package."""
    return {
        f"{task}_{batch}": {
            "Benchmark": task, "BS": batch, "Hyperparams": {}, "Epochs to converge": list(epochs),
        }
        for batch, epochs in runs.items()
    }  # fmt: skip
