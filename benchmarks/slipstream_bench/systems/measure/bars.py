"""``slipstream bench measure``: validity, power, cost and safety of measurements.

Every row is a promise of `slipstream.measure`. Quick runs take smaller counts, judged for their
size; counts such as "95 of 100" hold unless they are significantly below (one-sided 95 %).
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.child import Child
from slipstream.errors import MeasurementError, SlipstreamError
from slipstream.measure import memory
from slipstream.measure.arms import Arm, CallableArm, Sample, WorkerArm, time_calls
from slipstream.measure.claims import claims, headline
from slipstream.measure.comparison import Comparison, compare
from slipstream.measure.launches import MAX_LAUNCHES, first_launch
from slipstream.measure.records import Environment, ExperimentSettings, Phase, Verdict
from slipstream.measure.runner import ArmFailedError, RunPlan, resume, run
from slipstream.measure.statistics import median_interval
from slipstream.ranks import Netlab, why_no_netlab
from slipstream_bench.lab import MBIT, on_ranks
from slipstream_bench.rows import Bar, BenchOptions, at_most, not_judged
from slipstream_bench.systems.measure import streams as bench_streams
from slipstream_bench.systems.measure import tasks

_ENVIRONMENT = Environment({}, "bench")
_TASKS = "slipstream_bench.systems.measure.tasks"
_CALLED = (Verdict.FASTER, Verdict.SLOWER)
# Matmuls per call of the baseline; the candidate's additional ones are the injected slow-down.
_PRODUCTS = 50
_MEGABYTE = 1e6
_DEFAULT_BUDGET_S = 60.0
# Processes of one side differ by this standard deviation, by design.
_LUCK = 0.1


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows, the cheap ones first."""
    for row in (
        _coverage,
        _overhead,
        _reproducible,
        _crash,
        _bad_input,
        _growth,
        _environment,
        _memory,
        _wire,
        _peers,
        _level,
        _luck,
        _power,
    ):
        yield from row(options)


# Intervals on streams with a known ratio.


def _coverage(options: BenchOptions) -> Iterator[Bar]:
    streams, blocks = 2000, 160
    for kind in bench_streams.KINDS:
        name = f"coverage of 95 % intervals, {kind} stream"
        if not options.wants(name):
            continue
        options.progress(name)
        share = _covered(kind, blocks, streams)
        detail = f"{blocks} blocks; with 40 blocks {100 * _covered(kind, 40, streams):.1f} %"
        good = 0.93 <= share <= 0.97
        yield Bar(name, 100 * share, "%", "93-97", good, streams, detail)


def _covered(kind: str, blocks: int, streams: int) -> float:
    found, truth = bench_streams.log_ratios(kind, blocks, streams, seed=blocks)
    return sum(not median_interval(ratios, 0.95).excludes(truth) for ratios in found) / streams


# Cost of measurements.


def _overhead(options: BenchOptions) -> Iterator[Bar]:
    name = "time added to a sample, empty arm"
    if not options.wants(name):
        return
    options.progress(name)
    samples = 20_000

    def empty() -> None:
        pass

    arm = CallableArm("empty", empty)
    arm.open(None)
    samples_ns = [arm.sample(1, None) for _ in range(samples)]
    arm.close()
    bare = min(timeit.repeat(empty, number=10_000, repeat=20)) / 10_000 * 1e9
    wall = statistics.median(sample["wall"] for sample in samples_ns) - bare
    cpu = statistics.median(sample["cpu"] for sample in samples_ns) - bare
    same = time_calls.__code__.co_name  # one function for all arms, without our code in its loop
    detail = f"CPU clock {cpu:+.0f} ns after subtraction of its own cost; one loop ({same})"
    yield at_most(name, max(wall, cpu), 300, "ns", n=samples, detail=detail)


def _growth(options: BenchOptions) -> Iterator[Bar]:
    name = "coordinator CPU, 2 to 32 arms"
    size_name = "store, bytes per sample, 2 to 32 arms"
    if not (options.wants(name) or options.wants(size_name)):
        return
    options.progress(name)
    if options.wants(name):
        found = {arms: _share(arms, full=options.full) for arms in (2, 32)}
        shares = ", ".join(f"{arms} arms {100 * cpu:.2f} %" for arms, cpu in found.items())
        how = "measured" if options.full else "extrapolated from runs of 2 and 6 s"
        detail = f"{shares}; of a run of {_DEFAULT_BUDGET_S:.0f} s, {how}"
        yield at_most(name, 100 * max(found.values()), 2, "%", n=len(found), detail=detail)
    if options.wants(size_name):
        few, many = 200, 2000
        sizes = {
            arms: (_stored_bytes(arms, many) - _stored_bytes(arms, few)) / (many - few) / arms
            for arms in (2, 32)
        }
        detail = ", ".join(f"{arms} arms {size:.1f} B" for arms, size in sizes.items())
        detail += "; a sample is wall, CPU and queue delay; growth from 200 to 2,000 blocks"
        yield at_most(size_name, max(sizes.values()), 16, "B", n=many, detail=detail)


def _share(arms: int, *, full: bool) -> float:
    """Return the share of a run of the default length that is our CPU time."""
    if full:
        return _cost(arms, _DEFAULT_BUDGET_S) / _DEFAULT_BUDGET_S
    # A fixed part (opening, closing, claims) and one proportional to the run.
    short, long = _cost(arms, 2.0), _cost(arms, 6.0)
    growth = max(long - short, 0.0) / 4.0
    return max(short - 2.0 * growth, 0.0) / _DEFAULT_BUDGET_S + growth


def _cost(arms: int, seconds: float) -> float:
    """Return CPU seconds of a recorded run that are ours, not the arms'; samples of 10 ms."""
    from slipstream.measure.store import Store

    listed = [_Accounted(f"arm {i}", _counting(10_000)) for i in range(arms)]
    settings = ExperimentSettings("arm 0", budget_s=seconds, target_rel_width=1e-9)
    claims(_tiny_experiment())  # imports
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "r.db")
        cpu = time.process_time()
        with Store(path) as store:
            run(
                listed,
                settings,
                environment=_ENVIRONMENT,
                plan=RunPlan(maximum_warmup_s=0.1, red_factor=1),
                sink=store.sink(),
            )
        cpu = time.process_time() - cpu
    return max(cpu - sum(arm.own_ns for arm in listed) / 1e9, 0.0)


class _Accounted(CallableArm):
    """An arm that sums the CPU time of its function, including warm-up and calibration."""

    own_ns = 0.0

    def sample(self, inner: int, timeout_s: float | None) -> Sample:
        found = super().sample(inner, timeout_s)
        self.own_ns += found["cpu"] * inner
        return found


def _stored_bytes(arms: int, blocks: int) -> int:
    """Return the size of a store with an experiment of noisy wall, CPU and queue times."""
    from slipstream.measure.arms import per_call
    from slipstream.measure.records import ArmRecord, Experiment, Series
    from slipstream.measure.store import Store

    rng = np.random.default_rng(0)
    numbers = np.arange(blocks, dtype=np.int32)
    series = {}
    for arm in range(arms):
        for metric, scale in (("wall", 1e7), ("cpu", 8e6), ("run_delay", 2e6)):
            times = np.round(scale * rng.lognormal(0, 0.02, blocks))
            values = np.array([per_call(time, 3) for time in times])
            series[f"arm {arm}", metric, Phase.MEASURE] = Series(values, numbers)
    records = tuple(ArmRecord(f"arm {arm}") for arm in range(arms))
    experiment = Experiment("", "", _ENVIRONMENT, ExperimentSettings("arm 0"), records, series)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "r.db")
        with Store(path) as store:
            store.save(experiment, ())
        return path.stat().st_size


def _tiny_experiment() -> Any:
    arms = [CallableArm(name, lambda: None) for name in ("a", "b")]
    plan = RunPlan(maximum_warmup_s=0.01, maximum_blocks=10)
    return run(arms, ExperimentSettings("a", budget_s=2.0), environment=_ENVIRONMENT, plan=plan)


# Stored data.


def _reproducible(options: BenchOptions) -> Iterator[Bar]:
    name = "stored claims recomputed, differing digits"
    if not options.wants(name):
        return
    options.progress(name)
    from slipstream.measure.store import Store

    arms = [CallableArm(str(n), _counting(n)) for n in (20_000, 20_400, 30_000)]
    derived = ("throughput", "wall_p90")
    settings = ExperimentSettings("20000", budget_s=2.0, derived=derived)
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder, "r.db")) as store:
        run(arms, settings, environment=_ENVIRONMENT, sink=store.sink())
        stored = store.claims("last")
        again = claims(store.load("last"))
    differing = sum(repr(a) != repr(b) for a, b in zip(stored, again, strict=True))
    yield at_most(name, differing, 0, "claims", n=len(stored))


def _counting(n: int) -> Callable[[], object]:
    return lambda: sum(range(n))


def _crash(options: BenchOptions) -> Iterator[Bar]:
    name = "blocks lost by kill -9"
    if not options.wants(name):
        return
    options.progress(name)
    kills = 10 if options.full else 2
    lost = [_killed(5 + 7 * kill) for kill in range(kills)]
    yield at_most(name, max(lost), 1, "blocks", n=kills, detail="database opened, run resumed")


def _killed(after: int) -> int:
    """Kill a recording run after some blocks; return the finished blocks that the store lacks."""
    from slipstream.measure.store import Store
    from slipstream_bench.systems.measure.tasks import rest

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "r.db")
        process = subprocess.Popen(
            [sys.executable, "-m", _TASKS, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        done = 0
        while done < after:
            done = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        done = max([done, *(int(word) for word in process.stdout.read().split())])
        process.wait()
        with Store(path) as store:
            stored = store.load("last")
            blocks = len(stored.series["a", "wall", Phase.MEASURE].values)
            arms = [CallableArm(arm, rest) for arm in ("a", "b")]
            plan = RunPlan(maximum_warmup_s=0, maximum_blocks=blocks + 3)
            resume(arms, store, stored.experiment_id, environment=_ENVIRONMENT, plan=plan)
            whole = store.load(stored.experiment_id).series["a", "wall", Phase.MEASURE]
            if whole.blocks.tolist() != list(range(blocks + 3)):
                raise MeasurementError("a resumed run lacks blocks")
    return max(0, done - blocks)


# Failures.


class _CachedArm(Arm):
    """An arm whose fifty calls take no longer than one."""

    repeatable = True

    def sample(self, inner: int, timeout_s: float | None) -> Sample:
        return {"wall": 1e5 / inner, "cpu": 1e5 / inner}


def _bad_input(options: BenchOptions) -> Iterator[Bar]:
    name = "bad arms named with block and phase, others' data kept"
    if not options.wants(name):
        return
    options.progress(name)
    good, wrong = 0, []
    faults = ("raises", "hangs", "ends", "another shape")
    for fault in faults:
        arms = [
            WorkerArm("good", None, f"{_TASKS}:sample"),
            WorkerArm("bad", None, f"{_TASKS}:sample", sample_arguments={"fault": fault, "at": 12}),
        ]
        if _is_named(arms, "measure"):
            good += 1
        else:
            wrong.append(fault)
    cached = [_CachedArm("good"), _CachedArm("bad")]
    if _is_named(cached, "calibrate"):
        good += 1
    else:
        wrong.append("cached")
    total = len(faults) + 1
    detail = ", ".join([*faults, "non-monotonic inner count"]) + (
        f"; not so: {wrong}" if wrong else ""
    )
    yield Bar(name, good, f"of {total}", f"= {total}", good == total, total, detail)


def _is_named(arms: list[Any], phase: str) -> bool:
    settings = ExperimentSettings("good", target_rel_width=1e-9, budget_s=20.0, primary="wall")
    plan = RunPlan(timeout_s=1.0, maximum_warmup_s=0, minimum_warmup_s=0, red_factor=1)
    try:
        run(arms, settings, environment=_ENVIRONMENT, plan=plan)
    except ArmFailedError as error:
        experiment = error.experiment
        if error.arm != "bad" or error.phase != phase or error.block is None or experiment is None:
            return False
        if phase == "calibrate":
            return True
        return len(experiment.series["good", "wall", Phase.MEASURE].values) == error.block + 1
    return False


# Captured environment.


def _environment(options: BenchOptions) -> Iterator[Bar]:
    name = "environment changes that change env_id"
    if not options.wants(name):
        return
    options.progress(name)
    with tempfile.TemporaryDirectory() as folder:
        for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
            who = ["-c", "user.name=b", "-c", "user.email=b@b", "-c", "commit.gpgsign=false"]
            subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)
        Path(folder, "file").write_text("one")
        subprocess.run(["git", "add", "file"], cwd=folder, check=True)
        here = Path(folder)
        reference = _captured(here)
        again = _captured(here)
        changed = {
            "threads": _captured(here, OMP_NUM_THREADS="3"),
            "torch flag": _captured(here, torch_flag=True),
            "instruction set": _captured(here, ATEN_CPU_CAPABILITY="default"),
        }
        Path(folder, "file").write_text("two")
        changed["uncommitted change"] = _captured(here)
    differ = [
        what
        for what, environment in changed.items()
        if environment["env_id"] != reference["env_id"]
    ]
    stable = again["env_id"] == reference["env_id"]
    missed = sorted(set(changed) - set(differ))
    detail = ("" if stable else "not stable; ") + (f"missed: {missed}" if missed else "")
    detail += _refusal(reference, changed["threads"])
    good = len(differ) == len(changed) and stable and "refused" in detail
    target = f"= {len(changed)}, refused by name"
    yield Bar(name, len(differ), f"of {len(changed)}", target, good, len(changed), detail)


def _captured(directory: Path, *, torch_flag: bool = False, **variables: str) -> dict[str, Any]:
    with Child("the environment probe", directory=directory, environment=variables) as child:
        found: dict[str, Any] = child.call(
            f"{_TASKS}:environment_id", timeout_s=120, torch_flag=torch_flag
        )
    return found


def _refusal(a: dict[str, Any], b: dict[str, Any]) -> str:
    """Return the error from comparing two experiments across these environments."""
    from dataclasses import replace

    from slipstream.measure.render import compare_experiments

    tiny = _tiny_experiment()
    first, second = (
        replace(tiny, environment=Environment(environment["facts"], environment["env_id"]))
        for environment in (a, b)
    )
    try:
        compare_experiments(first, second)
    except SlipstreamError as error:
        named = [field for field in ("threads", "OMP_NUM_THREADS") if field in str(error)]
        return f"a comparison is refused, naming {named[0]}" if named else "no field named"
    return "a comparison is not refused"


# Memory and network.


def _memory(options: BenchOptions) -> Iterator[Bar]:
    sizes = [200, 30, 100, 10, 50]
    for library in ("numpy", "torch"):
        name = f"peak memory by phase, {library}"
        if not options.wants(name):
            continue
        if not memory.resettable():
            yield not_judged(name, "of allowance", "<= 1", "no resettable peak on this system")
            continue
        options.progress(name)
        found = memory.peak_memory(
            f"{_TASKS}:allocate_in_phases",
            {"library": library, "megabytes": sizes},
            prepare=f"{_TASKS}:warm_allocator",
            prepare_arguments={"library": library},
        )
        errors = [
            abs(found.phases[f"P{i}"].increase - size * _MEGABYTE) for i, size in enumerate(sizes)
        ]
        allowed = [max(0.02 * size, 1.0) * _MEGABYTE for size in sizes]
        worst = max(error / limit for error, limit in zip(errors, allowed, strict=True))
        detail = f"phases of {sizes} MB; worst error {max(errors) / _MEGABYTE:.2f} MB"
        yield at_most(name, worst, 1, "of 2 % or 1 MB", n=len(sizes), detail=detail)


def _wire(options: BenchOptions) -> Iterator[Bar]:
    elements = 1_000_000
    name = "all-reduce payload off 2(p-1)/p n"
    if options.wants(name):
        options.progress(name)
        worst = 0.0
        for ranks in (2, 4) if options.full else (3,):
            expected = 2 * (ranks - 1) / ranks * 4 * elements
            found = on_ranks(ranks, tasks.all_reduce, elements=elements)
            worst = max(worst, *(abs(rank_bytes["payload"] / expected - 1) for rank_bytes in found))
        yield at_most(name, 100 * worst, 1, "%", detail="gloo, 4 MB, 2 to 4 ranks")
    name = "veth bytes above payload, all-reduce"
    if options.wants(name):
        options.progress(name)
        yield _veth(name, elements)


def _veth(name: str, elements: int) -> Bar:
    target = "0-10"
    if (reason := why_no_netlab()) is not None:
        return not_judged(name, "%", target, reason)
    with Netlab(2, 1000 * MBIT) as lab, lab.unshaped():
        found = on_ranks(lab, tasks.all_reduce, elements=elements)
    above = [100 * (rank_bytes["wire"] / rank_bytes["payload"] - 1) for rank_bytes in found]
    detail = "both ranks in separate namespaces: " + ", ".join(f"{a:.2f} %" for a in above)
    return Bar(name, max(above), "%", target, min(above) >= 0 and max(above) <= 10, 2, detail)


# Experiments on a busy core.


def _products(count: int) -> Callable[[], object]:
    import torch

    a = torch.randn(192, 192)

    def work() -> None:
        for _ in range(count):
            a @ a

    return work


@contextlib.contextmanager
def _one_core(*, hog: bool) -> Iterator[None]:
    """Pin this process, with torch on one thread, to one core; with `hog` a busy process too."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pinned = hasattr(os, "sched_setaffinity")
    before = os.sched_getaffinity(0) if pinned else set()
    if pinned:
        os.sched_setaffinity(0, {max(before)})
    # The busy process inherits the core.
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if hog else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()
        if pinned:
            os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)


def _experiment(extra: float, *, budget: float, seed: int) -> Comparison:
    """Compare the baseline with `extra` more work; stop at the first look that decides."""
    base = _products(_PRODUCTS)
    head = _products(round(_PRODUCTS * (1 + extra)))
    return compare(
        {"base": base, "head": head},
        budget=budget,
        seed=seed,
        environment=_ENVIRONMENT,
        stop_when_decided=True,
        plan=RunPlan(maximum_warmup_s=min(1.0, budget / 10), red_factor=1),
    )


def _level(options: BenchOptions) -> Iterator[Bar]:
    count = 100 if options.full else 8
    budget = 5.0 if options.full else 2.0
    name = "A/A experiments called faster or slower"
    if not options.wants(name):
        return
    called, distrusted, found = 0, 0, []
    for hog in (False, True):
        with _one_core(hog=hog):
            for i in range(count):
                options.progress(f"A/A, hog {hog}, {i + 1} of {count}")
                result = _experiment(0.0, budget=budget, seed=i)
                called += result.verdict in _CALLED
                distrusted += result.verdict is Verdict.UNTRUSTWORTHY
                found.append(result.ratio("head").metric)
    total = 2 * count
    allowed = 16 if options.full else _at_most_by_chance(total, 0.05)
    detail = (
        f"half under a hog on the same core, stopping when decided, budget {budget:g} s; "
        f"{distrusted} not trusted; CPU time carried {found.count('cpu')}"
    )
    yield at_most(name, called, allowed, f"of {total}", n=total, detail=detail)


def _luck(options: BenchOptions) -> Iterator[Bar]:
    name = "A/A experiments called faster, processes of unlike cost"
    if not options.wants(name):
        return
    count = 100 if options.full else 8
    called, called_of_one, distrusted, launches = 0, 0, 0, []
    for i in range(count):
        options.progress(f"A/A, processes of unlike cost, {i + 1} of {count}")
        arms = [
            WorkerArm(side, f"{_TASKS}:draw_luck", f"{_TASKS}:lucky_sample",
                      arguments={"spread": _LUCK})
            for side in ("base", "head")
        ]  # fmt: skip
        result = compare(
            # Blocks end it, so that all launches have time on a busy machine too.
            arms, budget=600.0, seed=i, environment=_ENVIRONMENT,
            plan=RunPlan(maximum_warmup_s=0.1, red_factor=1, maximum_blocks=10 * MAX_LAUNCHES),
        )  # fmt: skip
        claim = result.ratio("head")
        launches.append(claim.launches)
        called += claim.verdict is Verdict.FASTER
        distrusted += claim.verdict is Verdict.UNTRUSTWORTHY
        (alone,) = headline(claims(first_launch(result.experiment)))
        called_of_one += alone.verdict is Verdict.FASTER
    detail = (
        f"steps of a process cost {100 * _LUCK:.0f} % (standard deviation) more or less than of "
        f"another; {min(launches)} to {max(launches)} launches; the first alone would have called "
        f"{called_of_one}; {distrusted} not trusted"
    )
    allowed = 5 if options.full else _at_most_by_chance(count, 0.05)
    yield at_most(name, called, allowed, f"of {count}", n=count, detail=detail)


def _power(options: BenchOptions) -> Iterator[Bar]:
    cases = ((0.05, 0.05, 20.0, 95, 100, 6), (0.02, 0.02, 60.0, 80, 100, 3))
    for extra, said, budget, needed, full, quick in cases:
        name = f"+{100 * said:.0f} % found within {budget:.0f} s under a hog"
        if not options.wants(name):
            continue
        count = full if options.full else quick
        correct, seconds, verdicts = 0, [], []
        with _one_core(hog=True):
            for i in range(count):
                options.progress(f"{name}, {i + 1} of {count}")
                began = time.monotonic()
                result = _experiment(extra, budget=budget, seed=1000 + i)
                seconds.append(time.monotonic() - began)
                correct += result.verdict is Verdict.SLOWER
                verdicts.append(str(result.verdict))
        good = not _significantly_below(correct, count, needed / 100)
        wrong = sorted({verdict for verdict in verdicts if verdict != "slower"})
        detail = f"median {statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s"
        detail += f"; otherwise {wrong}" if wrong else ""
        target = f">= {needed} of 100"
        yield Bar(name, correct, f"of {count}", target, good, count, detail)


def _peers(options: BenchOptions) -> Iterator[Bar]:
    name = "interval width against two sequential arms, same budget"
    if not options.wants(name):
        return
    rounds, budget = (10, 10.0) if options.full else (3, 3.0)
    ratios, found = [], []
    base, head = _products(_PRODUCTS), _products(round(_PRODUCTS * 1.06))
    with _one_core(hog=True):
        for i in range(rounds):
            options.progress(f"{name}, {i + 1} of {rounds}")
            result = compare(
                {"base": base, "head": head},
                budget=budget,
                target=1e-9,
                seed=i,
                environment=_ENVIRONMENT,
                plan=RunPlan(maximum_warmup_s=budget / 20, red_factor=1),
            )
            claim = result.ratio("head")
            peer = _sequential_width(base, head, budget, seed=i)
            ratios.append((claim.high - claim.low) / peer)
            found.append(f"{claim.high - claim.low:.4f} / {peer:.4f}")
    detail = "under a hog; widths, ours / peer's: " + ", ".join(found)
    yield at_most(name, statistics.median(ratios), 0.5, "x", n=rounds, detail=detail)


def _sequential_width(
    base: Callable[[], object], head: Callable[[], object], budget: float, *, seed: int
) -> float:
    """Return the 95 % interval's width with pyperf's method: sequential arms, wall time.

    The bootstrap of the ratio of medians favours the peer, which compares means.
    """
    pools = []
    for work in (base, head):
        work()
        ends, values = time.monotonic() + budget / 2, []
        while time.monotonic() < ends:
            start = time.perf_counter_ns()
            work()
            values.append(time.perf_counter_ns() - start)
        pools.append(np.asarray(values, np.float64))
    rng = np.random.default_rng(seed)
    medians = [
        np.median(pool[rng.integers(0, len(pool), (4000, len(pool)))], axis=1) for pool in pools
    ]
    low, high = np.quantile(medians[1] / medians[0], [0.025, 0.975])
    return float(high - low)


def _at_most_by_chance(count: int, rate: float) -> int:
    """Return the number that a true `rate` exceeds in at most 3 % of runs (16 of 200)."""
    from scipy.stats import binom

    return int(binom.ppf(0.97, count, rate))


def _significantly_below(right: int, count: int, rate: float) -> bool:
    """Return whether `right` of `count` contradicts a true `rate` (one-sided 95 %)."""
    from scipy.stats import binom

    return bool(binom.cdf(right, count, rate) < 0.05) and not math.isclose(right / count, rate)
