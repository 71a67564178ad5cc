"""``slipstream bench train``: does the judge of trainings judge as the rules say, and honestly?"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np

from slipstream.mlperf.training import SUITE, Reference, time_to_quality
from slipstream.mlperf.training.compare import Factor, detectable
from slipstream.mlperf.training.rcp import Point, official_json
from slipstream.mlperf.training.tasks import load, recorded
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged

_PAIRS, _COMPARISONS, _SETS = 10, 300, 100
_SEEDS = 20
_EXAMPLE = {128: [16, 14, 16, 17, 16, 16, 15, 16, 15, 16], 256: [20, 21, 21, 20, 22, 22, 21, 21, 20,
            20]}  # fmt: skip


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Quick: everything on recorded runs, and one new run of the smallest task."""
    yield from _example(options)
    yield from _official(options)
    yield from _nothing_found(options)
    yield from _power(options)
    yield from _suite(options)


def _example(options: BenchOptions) -> Iterator[Bar]:
    bar = "reference points of the rules' example, largest error"
    if not options.wants(bar):
        return
    told = {(128, False): 15.21, (256, False): 19.93, (128, True): 14.78, (256, True): 19.82}
    off = [
        abs(Point.of(batch, _EXAMPLE[batch], as_checker=checker).smallest(5) - value)
        for (batch, checker), value in told.items()
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
    drawn = np.random.default_rng(0)
    alike = 0
    for _ in range(_SETS):
        means = np.sort(drawn.uniform(8, 20, 3))
        runs = {
            batch: drawn.normal(middle, 0.05 * middle, 10).round(3).tolist()
            for batch, middle in zip((64, 128, 256), means, strict=True)
        }
        file = io.StringIO(json.dumps(official_json("task", runs)))
        official = rcp_checker.RCP_Checker("training", "6.0.0", "task", False, file)
        batch = int(drawn.choice([64, 128, 256]))
        middle = float(np.mean(runs[batch])) * drawn.uniform(0.85, 1.05)
        epochs = drawn.normal(middle, 0.3, 5).round(3).tolist()
        record = official._find_rcp(batch, "full_rcps")
        theirs, _ = official._eval_submission_record(record, sorted(epochs), "")
        reference = Reference.of(runs, as_checker=True, pruned=False)
        alike += reference.check(batch, epochs).passed == bool(theirs)
    yield at_least(bar, alike, _SETS, f"of {_SETS}", n=_SETS)


def _nothing_found(options: BenchOptions) -> Iterator[Bar]:
    bar = "a task against itself, share called significant"
    if not options.wants(bar):
        return
    drawn = np.random.default_rng(0)
    shares = {}
    for name in SUITE:
        if (known := recorded(name)) is None:
            continue
        (samples,) = known["samples"].values()
        found = sum(
            Factor.of(*drawn.choice(samples, (2, _PAIRS)).tolist()).significant
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


def _suite(options: BenchOptions) -> Iterator[Bar]:
    """Full: every task from 20 new seeds; quick: one run of the first."""
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
        reached = sum(one.converged for one in done)
        took = median(one.cpu_s for one in done)
        yield at_least(
            bar, reached, runs - (runs > 1), f"of {runs}", n=runs,
            detail=f"{load(name).metric} {load(name).target:g}; {took:.1f} s of the processor each",
            data={"samples": [one.samples for one in done], "cpu_s": [one.cpu_s for one in done]},
        )  # fmt: skip
