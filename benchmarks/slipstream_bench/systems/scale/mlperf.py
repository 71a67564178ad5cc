"""Training runs of MLPerf v0.7, predicted from one step of another run each, against their logs.

A predicted run consists of steps, evaluations and the first block's surplus. The computing time of
a step comes from one logged run of the model, its all-reduce from the cluster. The hosts' time in
an evaluation is that run's too: a metric computed on chips is divided among more of them, one
computed on hosts (BLEU, COCO's precision) takes the same time anywhere. The number of steps depends
on convergence, and the time to compile on the compiler: both are inputs.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.cluster import Cluster
from slipstream.errors import SlipstreamError
from slipstream_bench import datasets
from slipstream_bench.datasets import TrainingRuns, TrainingSteps, TrainingTimes
from slipstream_bench.rows import Bar, BenchOptions, at_most, not_judged
from slipstream_bench.systems.scale.training_run import Pace, RunTime

_MEDIAN, _WORST, _FOUR = 15.0, 30.0, 15.0


@dataclass(frozen=True)
class _Model:
    """Properties of a benchmark's model for the network and the hosts.

    Attributes:
        gradient_bytes: bytes all-reduced per step, from the number of parameters and its job's
            settings.
        counts_steps: whether its logs count optimizer steps per block instead of epochs.
        host_metric: whether hosts compute the metric of an evaluation, not chips.
        chips_per_sample: number of chips that share a replica of the model.
    """

    gradient_bytes: float
    counts_steps: bool = False
    host_metric: bool = False
    chips_per_sample: int = 1


_MODELS = {
    "resnet": _Model(25.6e6 * 4),
    # BERT-large, summed in bfloat16, as its TPU job sets.
    "bert": _Model(334e6 * 2, counts_steps=True),
    "gnmt": _Model(160e6 * 4, host_metric=True),
    # 300 pixels, ResNet-34.
    "ssd": _Model(20e6 * 4, host_metric=True),
    # The large variant; the four chips of a replica sum a quarter each.
    "transformer": _Model(210e6 * 4 / 4, host_metric=True, chips_per_sample=4),
}
_V4_DIMS = {16: (2, 2, 4), 128: (4, 4, 8), 512: (8, 8, 8)}
_V3_DIMS = {16: (4, 4), 2048: (64, 32), 4096: (128, 32)}


@dataclass(frozen=True)
class Target:
    """A run to predict, and the run whose step determines the pace."""

    benchmark: str
    paced_by: str
    system: str

    @property
    def name(self) -> str:
        return f"{self.benchmark} {self.system}"


TARGETS = (
    Target("resnet", "tpu-v4-16-TF", "tpu-v4-128-TF"),
    Target("resnet", "tpu-v4-16-TF", "tpu-v4-512-TF"),
    Target("bert", "tpu-v4-16-TF", "tpu-v4-128-TF"),
    Target("bert", "tpu-v4-16-TF", "tpu-v4-512-TF"),
    Target("gnmt", "tpu-v4-16-TF", "tpu-v4-128-TF"),
    Target("gnmt", "tpu-v4-16-TF", "tpu-v4-512-TF"),
    Target("resnet", "tpu-v3-32-TF2.0", "tpu-v3-8192-TF"),
    Target("resnet", "tpu-v3-32-TF2.0", "tpu-v3-8192-JAX"),
    Target("bert", "tpu-v3-32-TF2.0", "tpu-v3-8192-TF"),
    Target("bert", "tpu-v3-32-TF2.0", "tpu-v3-8192-JAX"),
    # No smaller TPU v3 run of these exists: another program's, on half as many and as many chips.
    Target("ssd", "tpu-v3-4096-JAX", "tpu-v3-8192-TF"),
    Target("transformer", "tpu-v3-8192-TF", "tpu-v3-8192-JAX"),
)
_GIVEN = "given: steps to converge, what the first block takes longer; "
_LARGE = "v3-8192"


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows on logged runs; see `slipstream_bench.systems.scale.bars`."""
    median = "MLPerf v0.7 run times: median error"
    worst = "MLPerf v0.7 run times: worst error"
    alone = "MLPerf v0.7 run times: median error without any host's time"
    wall = "evaluation tail named as the wall of JAX BERT"
    four = "four models on 4096 chips, within 15 % of the olympic means"
    selected = [name for name in (median, worst, alone, wall, four) if options.wants(name)]
    if not selected:
        return
    options.progress("MLPerf v0.7 run times")
    try:
        times = datasets.mlperf_v07()
    except SlipstreamError as error:
        for name in selected:
            yield not_judged(name, "%", f"<= {_MEDIAN:g}", str(error))
        return
    errors = {t.name: _error(times, t, hosts=True) for t in TARGETS}
    size, n = [abs(error) for error in errors.values()], len(TARGETS)
    if median in selected:
        yield at_most(
            median, statistics.median(size), _MEDIAN, "%", n=n, detail=_GIVEN + _said(errors)
        )
    if worst in selected:
        yield at_most(worst, max(size), _WORST, "%", n=n, detail=_GIVEN + _said(errors))
    if alone in selected:
        without = {t.name: _error(times, t, hosts=False) for t in TARGETS}
        middle = statistics.median(abs(error) for error in without.values())
        note = f"given: steps to converge alone; {_said(without)}"
        yield at_most(alone, middle, _MEDIAN, "%", n=n, detail=note)
    if four in selected:
        large = [t for t in TARGETS if _LARGE in t.system]
        within = sum(
            all(abs(errors[t.name]) <= _FOUR for t in large if t.benchmark == benchmark)
            for benchmark in {t.benchmark for t in large}
        )
        note = _said({t.name: errors[t.name] for t in large})
        yield Bar(four, within, "of 4", "= 4", within == 4, len(large), note)
    if wall in selected:
        run = logged(steps_of(times, "bert", "tpu-v3-8192-JAX"))
        shares = ", ".join(f"{k} {v / run.total_ns:.0%}" for k, v in run.parts.items())
        found = run.wall == "evaluation tail"
        yield Bar(wall, float(found), "", "= 1", found, detail=f"logged: {shares}")


def _said(errors: dict[str, float]) -> str:
    return "; ".join(f"{name} {error:+.1f}" for name, error in errors.items())


def logged(run: TrainingSteps) -> RunTime:
    """Split a logged run into its steps, the first block's surplus, and the time after."""
    if run.step_ms is None:
        raise SlipstreamError(f"the log of {run.system} does not report steps")
    steps_s = run.blocks * run.block_ms / 1e3
    first_s = max(run.first_block_ms - run.block_ms, 0.0) / 1e3
    rest_s = max(run.run_s - steps_s - first_s, 0.0)
    return RunTime.of({"steps": steps_s * 1e9}, 1, first_block=first_s * 1e9,
                  evaluation_tail=rest_s * 1e9)  # fmt: skip


def _error(times: TrainingTimes, target: Target, *, hosts: bool) -> float:
    """Return the error of the predicted run against the olympic mean of the logged ones, in %."""
    predicted = predicted_run(times, target, hosts=hosts).total_ns / 1e9
    return 100 * (predicted / runs_of(times, target.benchmark, target.system).olympic_mean_s - 1)


def predicted_run(times: TrainingTimes, target: Target, *, hosts: bool) -> RunTime:
    """Predict a run from one logged run of the same model.

    Args:
        hosts: whether to include evaluations on hosts and the first block's surplus, as logged.
    """
    model = _MODELS[target.benchmark]
    reference = steps_of(times, target.benchmark, target.paced_by)
    target_run = steps_of(times, target.benchmark, target.system)
    if reference.step_ms is None:
        raise SlipstreamError(f"the log of {reference.system} does not report steps")
    before, after = _cluster(reference.system), _cluster(target_run.system)
    pace = Pace.of(before, reference.step_ms * 1e6, reference.global_batch, model.gradient_bytes)
    step = pace.step(after, target_run.global_batch, model.chips_per_sample)
    in_block = target_run.epochs_per_block
    if not model.counts_steps:
        in_block *= target_run.samples / target_run.global_batch
    evaluations = _olympic(runs_of(times, target.benchmark, target.system).evaluations)
    blocks = float(target_run.blocks)
    if target_run.blocks in runs_of(times, target.benchmark, target.system).evaluations:
        # One evaluation per block: as many blocks as the mean run took, not the analysed one.
        blocks = evaluations
    host = {}
    if hosts:
        tail_ns = logged(reference).parts["evaluation tail"]
        each = tail_ns / _olympic(runs_of(times, target.benchmark, target.paced_by).evaluations)
        if not model.host_metric:
            each *= before.devices / after.devices
        host = {
            "evaluation": each * evaluations,
            "first_block": logged(target_run).parts["first block"],
        }
    return RunTime.of(step, blocks * in_block, **host)


def _olympic(values: tuple[int, ...]) -> float:
    """Return the mean without minimum and maximum, unless too few values remain."""
    return statistics.fmean(sorted(values)[1:-1] or values)


def steps_of(times: TrainingTimes, benchmark: str, system: str) -> TrainingSteps:
    """Return the analysed run of that benchmark on that system."""
    (found,) = (s for s in times.steps if (s.system, s.benchmark) == (system, benchmark))
    return found


def runs_of(times: TrainingTimes, benchmark: str, system: str) -> TrainingRuns:
    """Return all runs of that benchmark on that system."""
    (found,) = (r for r in times.runs if (r.system, r.benchmark) == (system, benchmark))
    return found


def _cluster(system: str) -> Cluster:
    _, generation, number, *_ = system.split("-")
    if generation == "v4":
        return Cluster.load("tpu-v4-pod", dims=list(_V4_DIMS[int(number)]))
    # The logs count cores, two per chip.
    return Cluster.load("tpu-v3-multipod", dims=list(_V3_DIMS[int(number) // 2]))
