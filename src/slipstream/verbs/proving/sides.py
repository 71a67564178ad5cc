"""prove: measure the workload with and without techniques, next to the predictions."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import random
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream import technique
from slipstream.capture.memory import peak_bytes, record_memory
from slipstream.capture.place import Place, find_device
from slipstream.child import channel
from slipstream.durations.durations import one_pool
from slipstream.errors import ChildError, WorkloadError
from slipstream.measure.arms import Arm, ArmEndedError, RunDelay, Sample, WorkerArm, delay_between
from slipstream.measure.comparison import Comparison, compare, seconds
from slipstream.measure.launches import MAX_LAUNCHES
from slipstream.measure.memory import read_status_bytes, reset_peak, resettable
from slipstream.measure.records import RUN_DELAY, UNCHANGED, PredictionRecord
from slipstream.measure.runner import RunPlan
from slipstream.technique import QualityKind, Technique
from slipstream.verbs.children import DEFAULT_TIMEOUT_S, calls, memory_limit_bytes, run_program
from slipstream.verbs.predicting import combination_of
from slipstream.verbs.proving.quality import check_quality
from slipstream.verbs.proving.ranks import RanksArm, rank_hosts
from slipstream.verbs.proving.summary import TENSOR_PEAK
from slipstream.workload import BuiltWorkload, Workload, file_backups, restore_files
from slipstream.workload.script import ScriptEndedError, ScriptRestarted

if TYPE_CHECKING:
    from slipstream.cluster import Cluster

BASELINE = UNCHANGED
# Default share of the speed budget for each side's quality check, and its maximum in seconds.
_QUALITY_SHARE = 0.1
_QUALITY_S = 3.0
_SHORT_S = 0.1
# Longer steps are not run two more times to measure their tensor memory.
_MAX_WATCHED_S = 20.0
# Batches that a DataLoader prefetches per worker, by default.
_PREFETCHED = 2
_ONE_STEP = "slipstream.verbs.proving.sides:one_step"


class WorkloadArm(WorkerArm):
    """A side in a child, which builds the workload once and takes a step per turn."""

    def __init__(self, name: str, workload: Workload, threads: int, keep_in: Path) -> None:
        super().__init__(
            name,
            "slipstream.verbs.proving.sides:serve_steps",
            _ONE_STEP,
            arguments={
                "workload": workload.to_json(), "keep_in": str(keep_in), "threads": threads,
            },
            description=f"{workload.name} {name}",
            environment=one_pool(threads),
            memory_limit_bytes=memory_limit_bytes(),
        )  # fmt: skip
        self._keep_in, self._over = keep_in, False

    def open(self, timeout_s: float | None) -> None:
        """Build the workload with its files in their original state."""
        self._over = False
        restore_files(self._keep_in, leave_folders=True)
        with _script_end():
            super().open(timeout_s)
        samples, before = self.built["samples"], self.built["samples_before"]
        notes = []
        if samples != before:
            notes.append(
                f"{self.name} has {samples} samples per step; its times are scaled to the {before} "
                "of the baseline"
            )
        if self.built["on_device"] and self.name == BASELINE:
            notes.append(
                "steps run on a CUDA device: time is wall time until the device has finished, "
                "peak_memory is the peak of tensors there"
            )
        self.notes = tuple(notes)

    def sample(self, inner: int, timeout_s: float | None) -> Sample:
        try:
            with _script_end():
                return super().sample(inner, timeout_s)
        except ArmEndedError:
            self._over = True
            raise

    def afterwards(self, timeout_s: float | None) -> dict[str, Any]:
        """Return the peak tensor memory of a step; empty after the end of a script."""
        if self._child is None or self._over:
            return {}
        with contextlib.suppress(ScriptEndedError):
            return dict(self._child.call(_ONE_STEP, timeout_s=timeout_s, tensors=True))
        return {}


@contextmanager
def _script_end() -> Iterator[None]:
    try:
        yield
    except ScriptEndedError as end:
        remedy = "let it run longer (more epochs or more data)"
        raise ArmEndedError(end.ended, remedy=remedy) from end


def prove(
    workload: Workload | str,
    techniques: Sequence[str | Technique | Sequence[Technique]],
    *,
    predictions: Mapping[str, PredictionRecord] | None = None,
    cluster: Cluster | None = None,
    budget: str | float = "60s",
    target: float = 0.02,
    launches: int = MAX_LAUNCHES,
    quality_budget: str | float | None = "auto",
    threads: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    until: float = math.inf,
    store: Any = None,
    progress: Callable[[Any], None] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Measure `workload` unmodified and with each of `techniques`, in paired interleaved steps.

    Times are scaled to the samples of an unmodified step: a step of twice as many samples counts
    half, as in predictions. A script that ends before the budget is spent ends the measurement; one
    of fewer than 500 steps runs again instead.

    Each side is started several times if starting is cheap compared with the budget, so that every
    interval includes what varies between processes, above all the layout of the heap.

    Quality is checked first: techniques that change the numerics run the same first steps as the
    baseline from several seeds (`Comparison.quality`).

    Distributed techniques run in one process per rank, on links like those of `cluster` if this
    machine can emulate them (see `slipstream.ranks.hosts`), each rank with a separate seed and on
    one thread unless `threads` is set. After all timing, they take further steps to record waits
    and traffic, in events of the kind `slipstream.measure.records.AFTERWARDS`.

    Args:
        techniques: alternatives: technique specs, techniques, or combinations of techniques.
        predictions: by arm (the technique's name).
        budget, target: stop after this time, or when the interval is narrower than this.
        launches: maximum number of starts per side.
        quality_budget: approximate time per side of the quality check; "auto" for
            `default_quality_budget`; None for no check, which leaves techniques that change the
            numerics without a verdict of being faster.
        until: time of `time.monotonic` after which no step starts, whatever the budget.
        store: a `slipstream.measure.store.Store` that records the run as it proceeds.

    Raises:
        WorkloadError: the user's code failed, or it is a script whose loop a technique changes.
        UsageError: ranks without a cluster, of a script, or without a technique that makes them.
        InvalidArgumentError: more workers than the cluster has devices; an invalid budget;
            `techniques` is a single string.
        ArmFailedError: the baseline or every candidate failed while measuring, or the script ended
            before there were enough steps for an interval.
    """
    if not isinstance(workload, Workload):
        workload = Workload.parse(workload)
    technique.need_alternatives(techniques)
    if quality_budget == "auto":
        quality_budget = default_quality_budget(budget)
    budget_s = None if quality_budget is None else seconds(quality_budget, "quality_budget")
    parsed = [combination_of(alternative) for alternative in techniques]
    combinations = {technique.combination_name(parts): parts for parts in parsed}
    changed = {}
    for name, parts in combinations.items():
        check_script(workload, parts)
        changed[name] = workload.with_technique(*parts), technique.quality_of(parts)
    moving = [name for name, parts in combinations.items() if technique.clock(parts) == "wall"]
    with (
        rank_hosts(workload, combinations, cluster) as (hosts, distributed),
        # One folder for all arms, so the first backup is of the original files.
        file_backups() as keep_in,
        contextlib.ExitStack() as stack,
    ):
        arms: list[Arm] = [WorkloadArm(BASELINE, workload, threads, keep_in)]
        rank_trials = {}
        for name, (recipe, _) in changed.items():
            if hosts is None or name not in distributed:
                arms.append(WorkloadArm(name, recipe, threads, keep_in))
                continue
            arm = RanksArm(name, recipe, distributed[name], hosts, threads, keep_in)
            stack.callback(arm.close)
            arms.append(arm)
            rank_trials[name] = arm.trials
        checks = check_quality(
            workload, changed, budget_s=budget_s, threads=threads, timeout_s=timeout_s,
            report=report, elsewhere=rank_trials,
        )  # fmt: skip
        return compare(
            arms,
            metrics=("wall", "cpu", "peak_memory"),
            primary="wall" if moving else None,
            primary_because=f"{' and '.join(moving)} move{'s' * (len(moving) == 1)} work to other "
            "cores, which only wall time shows",
            target=target,
            budget=budget,
            launches=launches,
            timeout=timeout_s,
            plan=RunPlan(until=until),
            title=workload.name,
            changes_numerics=[
                name
                for name, (_, quality) in changed.items()
                if quality.kind is not QualityKind.EXACT
            ],
            checks=checks,
            predictions=predictions,
            store=store,
            progress=progress,
        )


def default_quality_budget(budget: str | float) -> float:
    """Return the seconds of each side's quality check: a tenth of `budget`, at most 3."""
    return min(_QUALITY_S, _QUALITY_SHARE * seconds(budget, "budget"))


def check_script(workload: Workload, techniques: Sequence[Technique]) -> None:
    """Raise a `WorkloadError` if one of `techniques` cannot be applied to a plain script."""
    if (reason := technique.not_in_script(techniques, workload)) is not None:
        name, path = technique.combination_name(techniques), workload.path.name
        raise WorkloadError(
            f"{reason}: there is nothing to measure",
            remedy="pass a function that returns (model, batch, loss, optimizer), for example "
            f"{path}:FUNCTION; or edit the script: slipstream apply {path} --technique {name} "
            "shows the lines",
        )


# The functions below run in the child.


def serve_steps(workload: dict[str, Any], keep_in: str, threads: int) -> Any:
    """Build the workload and answer every later call with one step; never returns.

    A plain script occupies the thread, so the coordinator's calls are answered from within its
    steps.
    """
    import torch

    if threads:
        torch.set_num_threads(threads)
    # Load all techniques in every arm, so that their memory is part of the memory at rest.
    technique.registry()
    can_reset = resettable()
    resting = read_status_bytes("VmRSS") if can_reset else 0

    def program(built: BuiltWorkload) -> Generator[None, Any, None]:
        place = find_device(built)
        delay = RunDelay()
        delay.open()
        share = built.samples_before / built.samples if built.samples else 1.0
        yield
        coordinator = channel()
        coordinator.send(
            {
                "result": {
                    "samples": built.samples or built.samples_before,
                    "samples_before": built.samples_before,
                    "memory": can_reset,
                    "on_device": place is not None,
                }
            }
        )
        quickest_s = math.inf
        # The same numbers in every arm, whose steps stay in phase.
        skips = random.Random(0)

        def one_sample() -> Generator[None, Any, dict[str, float]]:
            nonlocal quickest_s
            if quickest_s < _SHORT_S:
                # Another arm filled the caches since this arm's last turn, so warm them with a
                # step; long steps do not need it. If every second step also updates a policy, one
                # skipped step each time would measure only one kind of step.
                for _ in range(skips.randint(1, 2)):
                    yield
            workers = len(multiprocessing.active_children())
            for _ in range(_PREFETCHED * workers):
                # What a loader's workers fetched during other arms' turns must not be measured.
                yield
            if place is not None:
                place.synchronise()
                place.forget_peak()
            elif can_reset:
                reset_peak()
            delay_before = delay.read()
            wall, cpu = time.perf_counter_ns(), time.process_time_ns()
            # Workers deliver one batch each at about the same time.
            steps = max(2 * workers, 1)
            for _ in range(steps):
                yield
            if place is not None:
                place.synchronise()
            cpu_ns = (time.process_time_ns() - cpu) / steps
            wall_ns = (time.perf_counter_ns() - wall) / steps
            quickest_s = min(quickest_s, wall_ns / 1e9)
            if place is not None:
                # The host's CPU time does not measure a step on its device.
                return {"wall": wall_ns * share, "peak_memory": max(1, place.peak_bytes())}
            sample = {"wall": wall_ns * share, "cpu": cpu_ns * share}
            waited_ns = delay_between(delay_before, delay.read())
            if waited_ns is not None:
                sample[RUN_DELAY] = waited_ns / steps * share
            if can_reset:
                sample["peak_memory"] = max(1, read_status_bytes("VmHWM") - resting)
            return sample

        for message in calls():
            while True:
                try:
                    if message["arguments"].get("tensors"):
                        result = yield from _tensors(built, place, quickest_s)
                    else:
                        result = yield from one_sample()
                except ScriptRestarted:
                    continue
                coordinator.send({"result": result})
                break

    return run_program(workload, keep_in, program, repeats=True)


def _tensors(
    built: BuiltWorkload, place: Place | None, step_s: float
) -> Generator[None, Any, dict[str, float]]:
    if step_s > _MAX_WATCHED_S:
        return {}
    if place is not None:
        place.forget_peak()
        yield
        place.synchronise()
        return {TENSOR_PEAK: place.peak_bytes()}
    _, memory = yield from record_memory(built)
    return {} if memory is None else {TENSOR_PEAK: peak_bytes(memory)}


def one_step() -> Any:
    """Name of a call that `serve_steps` answers; never executed."""
    raise ChildError("a step was requested before the workload was built")
