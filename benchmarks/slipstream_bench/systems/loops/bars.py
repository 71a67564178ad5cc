"""``slipstream bench loops``: accuracy of the cost model, and schedules that the search finds.

Times are CPU time of one thread, the minimum of interleaved calls in a child process. Programs of
the accuracy rows are generated from seeds that the model was not trained on.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from slipstream.codegen import why_no_compiler
from slipstream.codegen.schedule import Tree
from slipstream.techniques import loops
from slipstream.techniques.loops import Program, Schedule
from slipstream.techniques.loops.dataset import distinct_schedules
from slipstream.techniques.loops.searching import execute_candidates
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.systems.loops.kernels import KERNELS, chain, matmul

_SEED = 90_000
_HALIDE = "SLIPSTREAM_HALIDE_PYTHON"
_TOLERANCE = 1e-3


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick takes three minutes: fewer programs, kernels and random schedules."""
    if (reason := why_no_compiler()) is not None:
        yield not_judged("wrong results of accepted schedules", "", "0", reason)
        return
    yield from _sound_rows(options)
    yield from _accuracy_rows(options)
    yield from _rate_rows(options)
    yield from _search_rows(options)


def _sound_rows(options: BenchOptions) -> Iterator[Bar]:
    count = 2000 if options.full else 200
    bar = f"wrong results among {count:,} accepted schedules"
    if not options.wants(bar, count / 15):
        return
    wrong, tested, greatest, seed = 0, 0, 0.0, _SEED
    with loops.Runner(0.0) as runner:
        while tested < count:
            rng = random.Random(seed)
            program = loops.random_program(rng)
            schedules = distinct_schedules(rng, program, min(24, count - tested))
            errors = [t.error for t in runner.time(program, schedules)[1:]]
            wrong += sum(error > _TOLERANCE for error in errors)
            greatest = max(greatest, *errors)
            tested, seed = tested + len(errors), seed + 1
            options.progress(f"{tested} schedules")
    yield at_most(
        bar, wrong, 0, "", detail=f"greatest difference {greatest:.1g} of the largest output"
    )


def _accuracy_rows(options: BenchOptions) -> Iterator[Bar]:
    count = 120 if options.full else 24
    names = ("mean error of predicted speed-ups", "rank correlation of predicted speed-ups",
             "speed-ups inside the 80 % interval")  # fmt: skip
    if not any(options.wants(name, count * 1.7) for name in names):
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.jsonl"
        loops.generate_samples(path, count, 24, _SEED, budget_s=0.3, report=options.progress)
        found = loops.evaluate(loops.CostModel.load(), loops.read_samples(path), part=None)
    data = {**vars(found)}
    detail = f"{found.programs} unseen programs, {found.schedules:,} schedules"
    yield at_most(
        names[0], 100 * found.mape, 20, "%", data=data,
        detail=f"{detail}; median {100 * found.median:.0f} %",
    )  # fmt: skip
    yield at_least(
        names[1], found.spearman, 0.92, "", data=data,
        detail=f"{detail}; mean over programs {found.spearman_per_program:.2f}",
    )  # fmt: skip
    yield at_most(
        names[2], abs(100 * found.coverage - 80), 5, "points from 80 %", data=data,
        detail=f"{detail}; {100 * found.coverage:.0f} % are inside",
    )  # fmt: skip


def _rate_rows(options: BenchOptions) -> Iterator[Bar]:
    bar = "schedules scored per second"
    if options.wants(bar, 5):
        program = matmul(512)
        schedules = distinct_schedules(random.Random(0), program, 1000)
        model = loops.CostModel.load()
        model.log_times([Tree(program)])
        begin = time.thread_time()
        model.log_times([Tree(program, schedule) for schedule in schedules])
        rate = len(schedules) / (time.thread_time() - begin)
        yield at_least(bar, rate, 5000, "/s", detail="CPU time, loop trees and features included")
    bar = "search of 4 loops and 3 statements, without executions"
    if options.wants(bar, 10):
        begin = time.thread_time()
        result = loops.autoschedule(chain(), beam=8, execute=0)
        elapsed = time.thread_time() - begin
        yield at_most(bar, elapsed, 5, "s", detail=f"{result.scored:,} schedules, beam 8")


def _search_rows(options: BenchOptions) -> Iterator[Bar]:
    count = 200 if options.full else 50
    names = (
        f"chosen schedule against the best of {count} random ones",
        "chosen schedule against gcc -O3", "chosen schedule against Halide's Adams2019",
    )  # fmt: skip
    if not any(options.wants(name, 60 if options.full else 30) for name in names):
        return
    kernels = KERNELS if options.full else dict(list(KERNELS.items())[:4])
    against_random, against_gcc, ours_ns = {}, {}, {}
    for name, build in kernels.items():
        options.progress(name)
        program = build()
        best = loops.autoschedule(program, beam=16).best.schedule
        sampled = _best_random(program, count)
        with loops.Runner(2.0) as runner:
            base, ours, theirs = runner.time(program, [Schedule(), best, sampled])
        against_random[name], against_gcc[name] = theirs.ns / ours.ns, base.ns / ours.ns
        ours_ns[name] = ours.ns
    yield at_least(
        names[0], _mean(against_random), 0.95, "of its speed", data=against_random,
        detail=f"geometric mean of {len(kernels)} kernels, 5 executions; "
        + ", ".join(f"{n} {x:.2f}" for n, x in against_random.items()),
    )  # fmt: skip
    yield at_least(
        names[1], _mean(against_gcc), 1.5, "x", data=against_gcc,
        detail=f"geometric mean of {len(kernels)} kernels as written; "
        + ", ".join(f"{n} {x:.1f}x" for n, x in against_gcc.items()),
    )  # fmt: skip
    theirs_ns = _halide_ns([name for name in kernels if name in _HALIDE_KERNELS])
    if theirs_ns is None:
        yield not_judged(names[2], "x", ">= 1.1", f"set {_HALIDE} to a Python with halide")
        return
    ratios = {name: ns / ours_ns[name] for name, ns in theirs_ns.items()}
    yield at_least(
        names[2], _mean(ratios), 1.1, "x", data=ratios,
        detail=", ".join(f"{n} {x:.2f}x" for n, x in ratios.items()),
    )  # fmt: skip


def _best_random(program: Program, count: int) -> Schedule:
    """Return the fastest of random legal schedules, all of which are executed."""
    schedules = distinct_schedules(random.Random(_SEED), program, count)[1:]
    unknown = loops.Estimate(1.0, 1.0, 1.0)
    candidates = [loops.Candidate(schedule, unknown) for schedule in schedules]
    found = execute_candidates(program, candidates, budget_s=0.3, timeout_s=400)
    return max(found, key=lambda candidate: candidate.measured or 0.0).schedule


def _mean(ratios: dict[str, float]) -> float:
    return float(math.exp(np.mean(np.log(list(ratios.values())))))


# Peers.

_HALIDE_KERNELS = ("matmul 512", "blur", "convolution")


def _halide_ns(names: Sequence[str]) -> dict[str, float] | None:
    """Return times of Halide's schedules; None if the environment variable is not set."""
    python = os.environ.get(_HALIDE)
    if python is None:
        return None
    script = Path(__file__).with_name("halide_schedules.py")
    completed = subprocess.run(
        [python, str(script), *names], capture_output=True, text=True, check=True, timeout=400,
    )  # fmt: skip
    found: dict[str, float] = json.loads(completed.stdout)
    return found
