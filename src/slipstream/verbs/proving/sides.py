"""prove: measure the workload with and without techniques, the predictions beside it."""

from __future__ import annotations

import contextlib
import math
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
from slipstream.measure.launches import MOST_LAUNCHES
from slipstream.measure.memory import read_status_bytes, reset_peak, resettable
from slipstream.measure.records import RUN_DELAY, PredictionRecord
from slipstream.measure.runner import Plan
from slipstream.technique import QualityKind, Technique
from slipstream.verbs.children import (
    DEFAULT_TIMEOUT_S,
    calls,
    memory_limit_bytes,
    run_program,
)
from slipstream.verbs.proving.quality import check_quality
from slipstream.verbs.proving.ranks import RanksArm, rank_hosts
from slipstream.verbs.proving.summary import TENSOR_PEAK
from slipstream.workload import BuiltWorkload, Workload, file_backups, restore_files
from slipstream.workload.script import ScriptEndedError, ScriptRestarted

if TYPE_CHECKING:
    from slipstream.cluster import Cluster

BASELINE = "as it is"
# Of the budget for the speed, the share that each side's quality may take by default, and no more
# than these seconds: a short look is not to wait for a long check.
_QUALITY_SHARE = 0.1
_QUALITY_S = 3.0
_SHORT_S = 0.1
# Steps longer than this are not run twice more to learn how much memory their tensors take.
_WATCHED_S = 20.0
_ONE_STEP = "slipstream.verbs.proving.sides:one_step"


class WorkloadArm(WorkerArm):
    """One side: a child in which the workload is built once and steps when it is its turn."""

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
        """Build the workload, among files as they were before the other arms ran."""
        self._over = False
        restore_files(self._keep_in, leave_folders=True)
        with _ends():
            super().open(timeout_s)
        samples, before = self.built["samples"], self.built["samples_before"]
        notes = []
        if samples != before:
            notes.append(
                f"{self.name} makes {samples} samples a step; its times are of {before}, as a step "
                f"has {BASELINE}"
            )
        if self.built["on_device"] and self.name == BASELINE:
            notes.append(
                "steps run on a CUDA device: time is the wall clock's until the device is done, "
                "peak_memory the most that tensors there take"
            )
        self.notes = tuple(notes)

    def sample(self, inner: int, timeout_s: float | None) -> Sample:
        """One step; a script that came to its end has no more."""
        try:
            with _ends():
                return super().sample(inner, timeout_s)
        except ArmEndedError:
            self._over = True
            raise

    def afterwards(self, timeout_s: float | None) -> dict[str, Any]:
        """The most that tensors of a step take, as predictions mean it; none of a script's end."""
        if self._child is None or self._over:
            return {}
        with contextlib.suppress(ScriptEndedError):
            return dict(self._child.call(_ONE_STEP, timeout_s=timeout_s, tensors=True))
        return {}


@contextmanager
def _ends() -> Iterator[None]:
    try:
        yield
    except ScriptEndedError as end:
        remedy = "let it run longer (more epochs or more data)"
        raise ArmEndedError(end.ended, remedy=remedy) from end


def prove(
    workload: Workload | str,
    techniques: Sequence[str | Technique],
    *,
    predictions: Mapping[str, PredictionRecord] | None = None,
    cluster: Cluster | None = None,
    budget: str | float = "60s",
    target: float = 0.02,
    launches: int = MOST_LAUNCHES,
    quality_budget: str | float | None = "auto",
    threads: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    until: float = math.inf,
    store: Any = None,
    progress: Callable[[Any], None] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Measure `workload` as it is and with each of `techniques`, in paired interleaved steps.

    Times are of as many samples as a step has before any technique: a step of twice as many
    counts half, as in predictions. A script that ends before the budget is spent ends the
    measurement; one of fewer than 500 steps runs again instead.

    Every side is started several times, where that is cheap beside the budget: what a process has
    drawn at its start, above all where its heap lies, is a part of every interval.

    First the quality: techniques that change the numbers run the same first steps as the baseline
    from several seeds; what that shows stands beside the speed (`Comparison.quality`).

    Techniques that spread the step run in as many processes, on links like those of `cluster`
    where this machine can make them (see `slipstream.ranks.hosts`), each rank on one thread
    unless `threads` says otherwise, with a seed of its own. Once everything is timed, they take
    some steps more and tell what these wait for, and what the link carries: events of the kind
    `slipstream.measure.records.AFTERWARDS`.

    Args:
        techniques: alternatives: names in the grammar, or techniques.
        predictions: by arm (the technique's name): what was predicted.
        budget, target: stop after this time, or when the interval is narrower than this.
        launches: how often each side is started at most; 1 for once.
        quality_budget: about how long each side runs for the sake of its quality; "auto" for
            `default_quality_budget`; None for not at all, and then nothing that changes the
            numbers is called faster.
        until: of `time.monotonic`: no step begins after it, whatever the budget.
        store: a `slipstream.measure.store.Store` that keeps the run while it goes on.

    Raises:
        WorkloadError: the user's code failed, or it is a script whose loop a technique changes.
        UsageError: ranks without a cluster, of a script, or of nothing that makes replicas.
        InvalidArgumentError: more workers than the cluster has devices; a budget that is no time;
            `techniques` is one text.
        ArmFailedError: the baseline or every candidate failed while measuring, or the script ended
            before there was enough for an interval.
    """
    if not isinstance(workload, Workload):
        workload = Workload.parse(workload)
    technique.need_alternatives(techniques)
    if quality_budget == "auto":
        quality_budget = default_quality_budget(budget)
    budget_s = None if quality_budget is None else seconds(quality_budget, "quality_budget")
    changed = {}
    combinations = {}
    for one in techniques:
        chosen = technique.parse(one) if isinstance(one, str) else (one,)
        name = technique.combination_name(chosen)
        check_script(workload, chosen)
        combinations[name] = chosen
        changed[name] = workload.with_technique(*chosen), technique.quality_of(chosen)
    moving = [name for name, chosen in combinations.items() if technique.clock(chosen) == "wall"]
    with (
        rank_hosts(workload, combinations, cluster) as (hosts, spread),
        # One folder for all arms: whichever writes first keeps what was there before any of them.
        file_backups() as keep_in,
        contextlib.ExitStack() as ended,
    ):
        arms: list[Arm] = [WorkloadArm(BASELINE, workload, threads, keep_in)]
        elsewhere = {}
        for name, (recipe, _) in changed.items():
            if hosts is None or name not in spread:
                arms.append(WorkloadArm(name, recipe, threads, keep_in))
                continue
            arm = RanksArm(name, recipe, spread[name], hosts, threads, keep_in)
            ended.callback(arm.close)
            arms.append(arm)
            elsewhere[name] = arm.trials
        checks = check_quality(
            workload, changed, budget_s=budget_s, threads=threads, timeout_s=timeout_s,
            report=report, elsewhere=elsewhere,
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
            plan=Plan(until=until),
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
    """Seconds each side runs for the sake of its quality: a tenth of `budget`, 3 at most."""
    return min(_QUALITY_S, _QUALITY_SHARE * seconds(budget, "budget"))


def check_script(workload: Workload, techniques: Sequence[Technique]) -> None:
    """Refuse to measure what would not be applied.

    Raises:
        WorkloadError: one of `techniques` cannot be put on a plain script.
    """
    if (reason := technique.not_in_script(techniques, workload)) is not None:
        name, path = technique.combination_name(techniques), workload.path.name
        raise WorkloadError(
            f"{reason}: there is nothing to measure",
            remedy="name a function that returns (model, batch, loss, optimizer), as "
            f"{path}:FUNCTION; or write it by hand: slipstream apply {path} --technique {name} "
            "shows the lines",
        )


# What follows runs in the child.


def serve_steps(workload: dict[str, Any], keep_in: str, threads: int) -> Any:
    """Build the workload and answer every later call with one step; never returns.

    A plain script holds the thread for good, so the calls that the coordinator sends while this
    one runs are answered from within its steps.
    """
    import torch

    if threads:
        torch.set_num_threads(threads)
    # What techniques load is no part of the workload, and the arm as it is would not load it: every
    # arm has it before its memory at rest is read.
    technique.registry()
    can_reset = resettable()
    resting = read_status_bytes("VmRSS") if can_reset else 0

    def program(built: BuiltWorkload) -> Generator[None, Any, None]:
        place = find_device(built)
        delay = RunDelay()
        delay.open()
        share = built.samples_before / built.samples if built.samples else 1.0
        yield
        talk = channel()
        talk.send(
            {
                "result": {
                    "samples": built.samples or built.samples_before,
                    "samples_before": built.samples_before,
                    "memory": can_reset,
                    "on_device": place is not None,
                }
            }
        )
        step_s = math.inf

        def one_sample() -> Generator[None, Any, dict[str, float]]:
            nonlocal step_s
            if step_s < _SHORT_S:
                # Since our last turn another arm filled the caches; in a real run the step before
                # this one would have. It is cheap for short steps, and does not matter for long.
                yield
            if place is not None:
                place.synchronise()
                place.forget_peak()
            elif can_reset:
                reset_peak()
            queued = delay.read()
            wall, cpu = time.perf_counter_ns(), time.process_time_ns()
            yield
            if place is not None:
                place.synchronise()
            cpu_ns, wall_ns = time.process_time_ns() - cpu, time.perf_counter_ns() - wall
            step_s = wall_ns / 1e9
            if place is not None:
                # What the host computes is no measure of a step on its device.
                return {"wall": wall_ns * share, "peak_memory": max(1, place.peak_bytes())}
            sample = {"wall": wall_ns * share, "cpu": cpu_ns * share}
            waited_ns = delay_between(queued, delay.read())
            if waited_ns is not None:
                sample[RUN_DELAY] = waited_ns * share
            if can_reset:
                sample["peak_memory"] = max(1, read_status_bytes("VmHWM") - resting)
            return sample

        for message in calls():
            while True:
                try:
                    if message["arguments"].get("tensors"):
                        result = yield from _tensors(built, place, step_s)
                    else:
                        result = yield from one_sample()
                except ScriptRestarted:
                    continue
                talk.send({"result": result})
                break

    return run_program(workload, keep_in, program, repeats=True)


def _tensors(
    built: BuiltWorkload, place: Place | None, step_s: float
) -> Generator[None, Any, dict[str, float]]:
    """What `WorkloadArm.afterwards` tells."""
    if step_s > _WATCHED_S:
        return {}
    if place is not None:
        place.forget_peak()
        yield
        place.synchronise()
        return {TENSOR_PEAK: place.peak_bytes()}
    _, memory = yield from record_memory(built)
    return {} if memory is None else {TENSOR_PEAK: peak_bytes(memory)}


def one_step() -> Any:
    """Named by the coordinator for a sample; answered inside `serve_steps`, never called."""
    raise ChildError("a step was asked for before the workload was built")
