"""Training runs of MLPerf v0.7, predicted from one step of another run each, beside their logs.

A predicted run is steps, evaluations and the first block's surplus. The step's computing is paced
by one logged run of the model, its all-reduce is the cluster's. What an evaluation keeps hosts busy
with is that run's too: a metric that chips compute shares out among more of them, one that hosts
compute (BLEU, COCO's precision) takes as long anywhere. How many steps a run needs is a matter of
convergence, how long compiling takes one of compilers: both are given.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from slipstream import data
from slipstream.cluster import Cluster
from slipstream.data.kinds import TrainingRuns, TrainingSteps, TrainingTimes
from slipstream.errors import SlipstreamError
from slipstream_bench.rows import Bar, BenchOptions, at_most, not_judged
from slipstream_bench.systems.scale.training_run import Pace, Run

_MEDIAN, _WORST, _FOUR = 15.0, 30.0, 15.0


@dataclass(frozen=True)
class _Model:
    """What a benchmark's model is to the network and to the hosts.

    Attributes:
        gradient_bytes: all-reduced in a step, from the number of parameters and what its job sets.
        counts_steps: whether its logs count optimizer steps in a block, not epochs.
        host_metric: whether hosts compute what an evaluation tells, not chips.
        chips_per_sample: how many share a replica of the model.
    """

    gradient_bytes: float
    counts_steps: bool = False
    host_metric: bool = False
    chips_per_sample: int = 1


_MODELS = {
    "resnet": _Model(25.6e6 * 4),
    # BERT-large, summed in bfloat16, as its job for TPUs sets.
    "bert": _Model(334e6 * 2, counts_steps=True),
    "gnmt": _Model(160e6 * 4, host_metric=True),
    # 300 pixels, ResNet-34.
    "ssd": _Model(20e6 * 4, host_metric=True),
    # The large one; the four chips of a replica sum up a quarter each.
    "transformer": _Model(210e6 * 4 / 4, host_metric=True, chips_per_sample=4),
}
_V4_DIMS = {16: (2, 2, 4), 128: (4, 4, 8), 512: (8, 8, 8)}
_V3_DIMS = {16: (4, 4), 2048: (64, 32), 4096: (128, 32)}


@dataclass(frozen=True)
class Target:
    """A run to predict, and the run whose step sets the pace."""

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
    # No smaller run of these on TPU v3: another program's, on half of the chips and on as many.
    Target("ssd", "tpu-v3-4096-JAX", "tpu-v3-8192-TF"),
    Target("transformer", "tpu-v3-8192-TF", "tpu-v3-8192-JAX"),
)
_GIVEN = "given: steps to converge, what the first block takes longer; "
_LARGE = "v3-8192"


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Rows on logged runs; see `slipstream_bench.systems.scale.bars`."""
    median = "MLPerf v0.7 run times: median error"
    worst = "MLPerf v0.7 run times: worst error"
    alone = "MLPerf v0.7 run times: median error without any host's time"
    wall = "evaluation tail named as the wall of JAX BERT"
    four = "four models on 4096 chips, within 15 % of the olympic means"
    wanted = [name for name in (median, worst, alone, wall, four) if options.wants(name)]
    if not wanted:
        return
    options.progress("MLPerf v0.7 run times")
    try:
        times = data.get("mlperf_v07")
    except SlipstreamError as error:
        for name in wanted:
            yield not_judged(name, "%", f"<= {_MEDIAN:g}", str(error))
        return
    errors = {t.name: _error(times, t, hosts=True) for t in TARGETS}
    size, n = [abs(error) for error in errors.values()], len(TARGETS)
    if median in wanted:
        yield at_most(
            median, statistics.median(size), _MEDIAN, "%", n=n, detail=_GIVEN + _said(errors)
        )
    if worst in wanted:
        yield at_most(worst, max(size), _WORST, "%", n=n, detail=_GIVEN + _said(errors))
    if alone in wanted:
        without = {t.name: _error(times, t, hosts=False) for t in TARGETS}
        middle = statistics.median(abs(error) for error in without.values())
        said = f"given: steps to converge alone; {_said(without)}"
        yield at_most(alone, middle, _MEDIAN, "%", n=n, detail=said)
    if four in wanted:
        large = [t for t in TARGETS if _LARGE in t.system]
        within = sum(
            all(abs(errors[t.name]) <= _FOUR for t in large if t.benchmark == benchmark)
            for benchmark in {t.benchmark for t in large}
        )
        said = _said({t.name: errors[t.name] for t in large})
        yield Bar(four, within, "of 4", "= 4", within == 4, len(large), said)
    if wall in wanted:
        run = logged(steps_of(times, "bert", "tpu-v3-8192-JAX"))
        shares = ", ".join(f"{k} {v / run.total_ns:.0%}" for k, v in run.parts.items())
        found = run.wall == "evaluation tail"
        yield Bar(wall, float(found), "", "= 1", found, detail=f"as logged: {shares}")


def _said(errors: dict[str, float]) -> str:
    return "; ".join(f"{name} {error:+.1f}" for name, error in errors.items())


def logged(one: TrainingSteps) -> Run:
    """What a logged run went to: its steps, what its first block took longer, what came after."""
    if one.step_ms is None:
        raise SlipstreamError(f"the log of {one.system} says nothing of steps")
    steps_s = one.blocks * one.block_ms / 1e3
    first_s = max(one.first_block_ms - one.block_ms, 0.0) / 1e3
    rest_s = max(one.run_s - steps_s - first_s, 0.0)
    return Run.of({"steps": steps_s * 1e9}, 1, first_block=first_s * 1e9,
                  evaluation_tail=rest_s * 1e9)  # fmt: skip


def _error(times: TrainingTimes, target: Target, *, hosts: bool) -> float:
    """Percent by which the predicted run misses the olympic mean of the logged ones."""
    predicted = predicted_run(times, target, hosts=hosts).total_ns / 1e9
    return 100 * (predicted / runs_of(times, target.benchmark, target.system).olympic_mean_s - 1)


def predicted_run(times: TrainingTimes, target: Target, *, hosts: bool) -> Run:
    """The run as predicted from one logged run of the same model.

    Args:
        hosts: with evaluations on hosts, and what the first block took longer, as logged.
    """
    model = _MODELS[target.benchmark]
    known = steps_of(times, target.benchmark, target.paced_by)
    wanted = steps_of(times, target.benchmark, target.system)
    if known.step_ms is None:
        raise SlipstreamError(f"the log of {known.system} says nothing of steps")
    before, after = _cluster(known.system), _cluster(wanted.system)
    pace = Pace.of(before, known.step_ms * 1e6, known.global_batch, model.gradient_bytes)
    step = pace.step(after, wanted.global_batch, model.chips_per_sample)
    in_block = wanted.epochs_per_block
    if not model.counts_steps:
        in_block *= wanted.samples / wanted.global_batch
    evaluations = _olympic(runs_of(times, target.benchmark, target.system).evaluations)
    blocks = float(wanted.blocks)
    if wanted.blocks in runs_of(times, target.benchmark, target.system).evaluations:
        # An evaluation a block: as many blocks as the mean run took, not the one that was taken
        # apart.
        blocks = evaluations
    host = {}
    if hosts:
        rest = logged(known).parts["evaluation tail"]
        each = rest / _olympic(runs_of(times, target.benchmark, target.paced_by).evaluations)
        if not model.host_metric:
            each *= before.devices / after.devices
        host = {
            "evaluation": each * evaluations,
            "first_block": logged(wanted).parts["first block"],
        }
    return Run.of(step, blocks * in_block, **host)


def _olympic(values: tuple[int, ...]) -> float:
    """The mean without the least and the largest, where that leaves any."""
    return statistics.fmean(sorted(values)[1:-1] or values)


def steps_of(times: TrainingTimes, benchmark: str, system: str) -> TrainingSteps:
    """The run of that benchmark on that system that was taken apart."""
    (found,) = (s for s in times.steps if (s.system, s.benchmark) == (system, benchmark))
    return found


def runs_of(times: TrainingTimes, benchmark: str, system: str) -> TrainingRuns:
    """All runs of that benchmark on that system."""
    (found,) = (r for r in times.runs if (r.system, r.benchmark) == (system, benchmark))
    return found


def _cluster(system: str) -> Cluster:
    _, generation, number, *_ = system.split("-")
    if generation == "v4":
        return Cluster.load("tpu-v4-pod", dims=list(_V4_DIMS[int(number)]))
    # The logs count cores, two on a chip.
    return Cluster.load("tpu-v3-multipod", dims=list(_V3_DIMS[int(number) // 2]))
