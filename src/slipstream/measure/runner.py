"""Run arms in paired blocks and record everything: warm-up, calibrate, measure, stop.

A block runs every arm once, back to back, in a random order; each order is followed by its
reverse (for two arms ABBA or BAAB), so that drift of the machine favours no arm. In a tenth of the
blocks the baseline runs a second time as the A/A guard. A run stops only at the looks of
`ExperimentSettings.looks` or at the end of the budget.

If `ExperimentSettings.launches` allows and opening is cheap enough, arms in separate processes are
closed and reopened after a share of the time (see `launches.py`). The looks then apply to each
launch, and the run ends with its last launch.
"""

from __future__ import annotations

import math
import random
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.errors import InvalidArgumentError, MeasurementError, SlipstreamError
from slipstream.measure.arms import (
    MINIMUM_SAMPLE_NS,
    REPEATED_SAMPLE_NS,
    Arm,
    ArmEndedError,
    CallableArm,
    Sample,
    users_code,
)
from slipstream.measure.claims import claims, headline
from slipstream.measure.environment import capture, differences
from slipstream.measure.gate import Gate, Level
from slipstream.measure.launches import (
    IN_THIS_PROCESS,
    LAUNCH,
    MIN_LAUNCHES,
    LaunchCost,
    last_launch,
    launch_starts,
    launches_that_fit,
    why_one_process,
)
from slipstream.measure.memory import peak_of_call
from slipstream.measure.records import (
    AFTERWARDS,
    RUN_DELAY,
    ArmRecord,
    BlockRows,
    Claim,
    Environment,
    Event,
    Experiment,
    ExperimentSettings,
    Metric,
    Phase,
    PredictionRecord,
    Series,
    Sink,
    Verdict,
    final_status,
    guard_name,
)

if TYPE_CHECKING:
    from slipstream.measure.store import Store

# Guard blocks: the first eight, the minimum for a 99 % interval of the median, then every tenth.
_GUARD_FIRST = 8
_GUARD_EVERY = 10
# Warm-up ends when the medians of the last two windows of this many samples agree ...
_WINDOW = 5
# ... within this fraction.
_STATIONARY = 0.02
# Seconds between gate readings; the kernel updates pressure every two seconds.
_GATE_EVERY_S = 1.0
# Maximum share of the budget for one block, so that there are enough blocks.
_MAX_BLOCK_SHARE = 1 / 40
# Rounds of in-process peak memory: eight give a 99 % interval, as for the guard.
_MEMORY_ROUNDS = 8
# Minimum sample time, in multiples of the timer resolution.
_TIMER_MULTIPLE = 1000


@dataclass(frozen=True)
class RunPlan:
    """Settings of a run that are not stored in `ExperimentSettings`.

    Attributes:
        timeout_s: Time limit for one sample and for opening, after which an arm is stopped.
        minimum_warmup_s: Minimum warm-up of an arm, even if it is stationary immediately.
        maximum_warmup_s: Time after which an arm counts as warm even if not stationary; default
            a tenth of the budget.
        maximum_blocks: Maximum number of blocks.
        guard: Whether the baseline runs against itself in a tenth of the blocks.
        red_factor: Factor for the budget if the machine is red at the start.
        peak_memory: Whether to measure the peak memory of in-process arms after the timed blocks.
        until: Time by `time.monotonic` after which no block begins, whatever the budget; if
            finite, `Arm.afterwards` is skipped.
    """

    timeout_s: float = 600.0
    minimum_warmup_s: float = 0.05
    maximum_warmup_s: float | None = None
    maximum_blocks: int | None = None
    guard: bool = True
    red_factor: float = 1.5
    peak_memory: bool = False
    until: float = math.inf


@dataclass(frozen=True)
class Progress:
    """Progress of a run.

    Attributes:
        seconds_left: Maximum remaining time; may exceed the budget if `widened` is not empty.
        claims: Claims of the last look, from the newest launch alone.
        widened: Why the run may take longer than its budget; empty if it may not.
        launch, launches: Number of the launch and of all; both 1 without launches.
    """

    phase: str
    block: int
    seconds_left: float
    claims: tuple[Claim, ...] = ()
    widened: str = ""
    launch: int = 1
    launches: int = 1


class ArmFailedError(MeasurementError):
    """The baseline or all candidates failed; `experiment` has the samples until then."""

    experiment: Experiment | None = None


def run(
    arms: Sequence[Arm],
    settings: ExperimentSettings,
    *,
    title: str = "",
    environment: Environment | None = None,
    plan: RunPlan | None = None,
    sink: Sink | None = None,
    resume: Experiment | None = None,
    progress: Callable[[Progress], None] | None = None,
    events: Sequence[Event] = (),
    predictions: Mapping[str, PredictionRecord] | None = None,
) -> Experiment:
    """Measure `arms` against each other.

    A failing candidate leaves the run, which continues with the others. On Ctrl-C the samples are
    stored and attached to the exception as ``error.experiment``. During `Arm.afterwards`, after all
    measurements, the run already counts as complete.

    Args:
        sink: Receiver of every block, so that a killed run loses at most one.
        resume: Record of an interrupted run of the same arms; see `resume`.
        events: Events before the run (quality outcomes), stored with it.

    Raises:
        InvalidArgumentError: There is only one arm, a duplicate name, no such baseline, or no
            budget.
        ArmFailedError: The baseline or all candidates failed, or an arm ended (`ArmEndedError`)
            before there were enough blocks for an interval; with enough, the run stops.
    """
    plan = plan or RunPlan()
    _check(arms, settings)
    environment = environment or capture()
    running = _Run(
        {arm.name: arm for arm in arms},
        settings,
        title or " vs ".join(arm.name for arm in arms),
        environment,
        plan,
        sink,
        progress,
        list(events),
        predictions or {},
    )
    if resume is not None:
        running.resume(resume)
    elif sink is not None:
        sink.begin(running.experiment())
    return running.run()


def resume(
    arms: Sequence[Arm],
    store: Store,
    experiment_id: str,
    *,
    environment: Environment | None = None,
    plan: RunPlan | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Experiment:
    """Resume an experiment whose process was killed, after its last complete block.

    The settings are those of the experiment; the budget starts again, and the arms warm up again.

    Raises:
        InvalidArgumentError: The arms or the environment differ; names the differing facts.
        StoreError: The experiment is complete or still running.
    """
    before = store.load(experiment_id)
    environment = environment or capture()
    _check_same(before, arms, environment)
    sink = store.sink()
    sink.recording = store.resume(experiment_id)
    return run(
        arms,
        before.settings,
        title=before.title,
        environment=environment,
        plan=plan,
        sink=sink,
        progress=progress,
        predictions=before.predictions,
        resume=before,
    )


def _check(arms: Sequence[Arm], settings: ExperimentSettings) -> None:
    names = [arm.name for arm in arms]
    for name in sorted(set(names)):
        if names.count(name) > 1:
            raise InvalidArgumentError("arms", f"'{name}' names two arms")
    if len(arms) < 2:
        raise InvalidArgumentError(
            "arms", "a comparison needs two arms", remedy="pass a baseline and a candidate"
        )
    if settings.baseline not in names:
        raise InvalidArgumentError("baseline", f"no arm is called '{settings.baseline}'")
    if (guard := guard_name(settings.baseline)) in names:
        raise InvalidArgumentError("arms", f"'{guard}' is the name of the A/A guard")
    if not settings.budget_s > 0:
        raise InvalidArgumentError(
            "budget", "the budget is not positive", remedy="pass a few seconds or more, such as 60s"
        )
    if settings.launches != 1 and settings.launches < MIN_LAUNCHES:
        raise InvalidArgumentError(
            "launches",
            f"{settings.launches} launches cannot show launch-to-launch variation",
            remedy=f"pass at least {MIN_LAUNCHES}, or 1 for a single launch",
        )
    if not settings.target_rel_width > 0:
        raise InvalidArgumentError("target", "the relative width is not positive")


def _check_same(before: Experiment, arms: Sequence[Arm], environment: Environment) -> None:
    if [arm.name for arm in before.arms] != [arm.name for arm in arms]:
        raise InvalidArgumentError(
            "arms", "the arms differ from those of the interrupted experiment"
        )
    if before.environment.env_id == environment.env_id:
        return
    fields = ", ".join(differences(before.environment, environment))
    raise InvalidArgumentError(
        "resume",
        f"the environment has changed since; it differs in: {fields}",
        remedy="start a new experiment; the store keeps both",
    )


@dataclass
class _Run:
    """State of a running experiment."""

    arms: Mapping[str, Arm]
    settings: ExperimentSettings
    title: str
    environment: Environment
    plan: RunPlan
    sink: Sink | None
    progress: Callable[[Progress], None] | None
    events: list[Event]
    predictions: Mapping[str, PredictionRecord]

    def __post_init__(self) -> None:
        self.created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.columns: dict[tuple[str, Metric, Phase], tuple[array[float], array[int]]] = {}
        self.living = list(self.arms)
        self.shapes: dict[str, set[Metric]] = {}
        self.inner = 1
        self.block = 0
        self.warmup_round = 0
        self.random = random.Random(self.settings.seed)
        self.gate = Gate()
        self.gate_level: Level | None = None
        self.gate_read_at = -1e9
        self.fresh_events = list(self.events)
        self.last_claims: tuple[Claim, ...] = ()
        self.deadline = 0.0
        self.widened = ""
        self.measured = False
        self.launch = self.launches = 1
        self.opening_s = self.warming_s = self.block_s = 0.0

    def resume(self, before: Experiment) -> None:
        """Restore the record of an interrupted run of the same arms, to continue after it."""
        self.created = before.created
        for key, series in before.series.items():
            self.columns[key] = (array("d", series.values), array("i", series.blocks))
            after = int(series.blocks[-1]) + 1
            if key[2] is Phase.MEASURE:
                self.block = max(self.block, after)
            else:
                self.warmup_round = max(self.warmup_round, after)
        self.events = list(before.events)
        self.fresh_events = []
        self._event("resumed", {})

    def run(self) -> Experiment:
        try:
            try:
                self._open()
                self.deadline = time.monotonic() + self.settings.budget_s
                self._read_gate()
                if self.gate_level is Level.RED:
                    self.deadline += self.settings.budget_s * (self.plan.red_factor - 1)
                    self.widened = f"{self.plan.red_factor:g} times the budget: the machine is busy"
                self.deadline = min(self.deadline, self.plan.until)
                self._warm_up()
                self._calibrate()
                reason = self._measure_launches()
            except ArmEndedError as end:
                reason = self._ended(end)
            self._event("stop", {"reason": reason})
            if self.plan.peak_memory:
                self._measure_memory()
            self.measured = True
            if self.plan.until == math.inf:
                self._observe_afterwards()
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            if interrupted and self.measured:
                # The measurement is complete; only `Arm.afterwards` was interrupted.
                self._event("note", {"what": "interrupted after the run, which is complete"})
            else:
                self._event("stop", {"reason": "interrupted" if interrupted else "failed"})
            # Attach the record to the error; only ArmFailedError declares the attribute.
            error.experiment = self._finish()  # type: ignore[attr-defined]
            raise
        finally:
            for arm in self.arms.values():
                arm.close()
        return self._finish()

    def experiment(self) -> Experiment:
        """Build the record of the run so far."""
        return Experiment(
            title=self.title,
            created=self.created,
            environment=self.environment,
            settings=self.settings,
            arms=tuple(
                ArmRecord(arm.name, arm.description, self.inner) for arm in self.arms.values()
            ),
            series={
                key: Series(np.array(values, np.float64), np.array(blocks, np.int32))
                for key, (values, blocks) in self.columns.items()
            },
            events=tuple(self.events),
            predictions=self.predictions,
        )

    def _finish(self) -> Experiment:
        experiment = replace(self.experiment(), status=final_status(self.events))
        if self.sink is not None:
            self.sink.finish(experiment)
        return experiment

    # Before the first block.

    def _open(self) -> None:
        # Import now what looks need, not between blocks.
        import scipy.special  # noqa: F401

        start = time.monotonic()
        noted = {str(event.detail.get("what")) for event in self.events if event.kind == "note"}
        names = list(self.living)
        if self.launch > 1:
            self.random.shuffle(names)
        for name in names:
            self._report("setup")
            try:
                self.arms[name].open(self.plan.timeout_s)
            except ArmEndedError:
                raise
            except SlipstreamError as error:
                self._failed(name, error, "setup")
            for line in self.arms[name].notes:
                if line not in noted:
                    self._event("note", {"arm": name, "what": line})
        self._require_arms()
        self.opening_s = time.monotonic() - start

    def _warm_up(self) -> None:
        """Run rounds over the arms that are not yet stationary, until all are or time is up.

        There is at least one round, since a machine may stall for longer than a small budget.
        """
        start = time.monotonic()
        longest = self._longest_warmup_s() / self.launches
        spent = dict.fromkeys(self.living, 0.0)
        history: dict[str, list[Sample]] = {name: [] for name in self.living}
        inner = dict.fromkeys(self.living, 1)
        cold = list(self.living)
        while cold:
            self._report("warmup")
            values: dict[tuple[str, Metric], float] = {}
            for name in cold:
                sample_start = time.monotonic()
                sample = self._sample(name, inner[name], Phase.WARMUP)
                elapsed_s = time.monotonic() - sample_start
                spent[name] += elapsed_s
                if sample is None:
                    continue
                history[name].append(sample)
                values |= {(name, metric): value for metric, value in sample.items()}
                if self.arms[name].repeatable and elapsed_s * 1e9 < MINIMUM_SAMPLE_NS / 4:
                    inner[name] *= 4
            self._commit_warmup(values)
            cold = [
                name
                for name in cold
                if name in self.living
                and spent[name] < longest
                and not (spent[name] >= self.plan.minimum_warmup_s and _stationary(history[name]))
            ]
            if time.monotonic() >= self.deadline:
                break
        self._require_arms()
        self._estimates = {
            name: min(min(_undisturbed(sample) for sample in history[name][-_WINDOW:]), 1e18)
            for name in self.living
        }
        self.block_s = sum(spent[name] / len(history[name]) for name in self.living)
        self.warming_s = time.monotonic() - start

    def _longest_warmup_s(self) -> float:
        longest = self.plan.maximum_warmup_s
        return self.settings.budget_s / 10 if longest is None else longest

    def _calibrate(self) -> None:
        """Choose the number of calls per sample for all arms: long samples, but many blocks."""
        if not all(self.arms[name].repeatable for name in self.living):
            return
        resolution_ns = time.get_clock_info("perf_counter").resolution * 1e9
        shortest = max(MINIMUM_SAMPLE_NS, _TIMER_MULTIPLE * resolution_ns)
        repeated = max(REPEATED_SAMPLE_NS, _TIMER_MULTIPLE * resolution_ns)
        costs = {name: max(cost, 1.0) for name, cost in self._estimates.items()}
        cheapest = min(costs.values())
        needed = 1 if cheapest >= shortest else math.ceil(repeated / cheapest)
        longest = self.settings.budget_s * 1e9 * _MAX_BLOCK_SHARE
        affordable = max(1, int(longest / sum(costs.values())))
        self.inner = min(needed, affordable)
        self._event("calibrated", {"inner": self.inner})
        if self.inner < needed:
            self._event("short_samples", {"inner": self.inner, "wanted": needed})
        for name in list(self.living):
            self._check_growth(name, costs[name])
        self._require_arms()

    def _check_growth(self, name: str, cost: float) -> None:
        """Drop the arm unless four times the calls take more than twice the time."""
        if self.inner < 8 or cost * self.inner < MINIMUM_SAMPLE_NS / 10:
            return
        for _ in range(3):
            few = self._sample(name, self.inner // 4, Phase.WARMUP)
            many = self._sample(name, self.inner, Phase.WARMUP) if few else None
            if few is None or many is None:
                return
            for sample in (few, many):
                self._commit_warmup({(name, metric): v for metric, v in sample.items()})
            if _undisturbed(many) * self.inner > 2 * _undisturbed(few) * (self.inner // 4):
                return
        self._failed(
            name,
            MeasurementError(
                f"{self.inner} calls take no longer than {self.inner // 4}",
                remedy="check whether the function caches its result; each call must do the work",
            ),
            "calibrate",
        )

    # The blocks.

    def _measure_launches(self) -> str:
        """Run all launches; return the reason to stop. Raise ArmEndedError if an arm ended."""
        earlier = len(launch_starts(self.events))
        self.launches = self._count_launches()
        if self.launches == 1:
            return self._measure(self.deadline, self.plan.maximum_blocks)
        ended: ArmEndedError | None = None
        reason = "launches"
        for number in range(1, self.launches + 1):
            self.launch = number
            fewest = MIN_LAUNCHES if self.plan.until == math.inf else 1
            if number > fewest and time.monotonic() >= self.deadline:
                reason = "budget"
                break
            if number > 1:
                # Make the first few even if opening took longer than before: fewer would be
                # useless.
                self._reopen()
            self._event(LAUNCH, {"launch": earlier + number, "of": earlier + self.launches})
            try:
                self._measure(*self._share())
            except ArmEndedError as end:
                ended = end  # reopened, it starts from its beginning
        if ended is not None:
            raise ended
        return reason

    def _count_launches(self) -> int:
        """Return the number of launches; add a note if it is 1 although more were requested."""
        requested = self.settings.launches
        homes = {self.arms[name].process for name in self.living}
        if requested == 1:
            return 1
        if "own" not in homes:
            # Arms with a fresh process per sample need no launches.
            if "this" in homes:
                self._event("note", {"what": IN_THIS_PROCESS})
            return 1
        cost = LaunchCost(
            self.deadline - time.monotonic(),
            self.opening_s,
            self.warming_s,
            self._longest_warmup_s() * len(self.living),
            self.block_s,
        )
        count = launches_that_fit(requested, cost, self.plan.maximum_blocks)
        if count == 1:
            self._event("note", {"what": why_one_process(cost)})
        return count

    def _reopen(self) -> None:
        """Close and open all arms, most of which then have a new process."""
        for name in self.living:
            self.arms[name].close()
        self._open()
        self._warm_up()

    def _share(self) -> tuple[float, int | None]:
        """Return the deadline and the end block of this launch: equal shares of what remains."""
        later, now = self.launches - self.launch, time.monotonic()
        remaining_s = self.deadline - now - later * (self.opening_s + self.warming_s)
        most = self.plan.maximum_blocks
        blocks = None if most is None else self.block + (most - self.block) // (later + 1)
        return now + remaining_s / (later + 1), blocks

    def _measure(self, deadline: float, maximum_blocks: int | None) -> str:
        """Run at least one block, until there is a reason to stop; return it."""
        orders, first = _orders(self.living, self.random), self.block
        while True:
            if maximum_blocks is not None and self.block >= maximum_blocks:
                return "blocks"
            if self.block > first and time.monotonic() >= deadline:
                return "budget"
            self._read_gate()
            self._one_block(next(orders))
            self.block += 1
            counted = self.block if self.launches == 1 else self.block - first
            if counted in self.settings.looks and (reason := self._look()):
                return reason
            self._report("measure")

    def _one_block(self, order: Sequence[str]) -> None:
        turns = [(name, name) for name in order if name in self.living]
        if self.plan.guard and (self.block < _GUARD_FIRST or self.block % _GUARD_EVERY == 0):
            baseline = self.settings.baseline
            turns.insert(self.random.randrange(len(turns) + 1), (guard_name(baseline), baseline))
        values: dict[tuple[str, Metric], float] = {}
        try:
            for name, runs in turns:
                sample = self._sample(runs, self.inner, Phase.MEASURE)
                if sample is not None:
                    values |= {(name, metric): value for metric, value in sample.items()}
        except ArmEndedError:
            if values:
                self._commit(Phase.MEASURE, self.block, values)
            raise
        self._require_arms(values)
        self._commit(Phase.MEASURE, self.block, values)

    def _look(self) -> str | None:
        """Return the reason to stop if the primary intervals of all candidates allow it.

        Each launch is judged alone; n launches together are narrower by the root of n.
        """
        # Derived statistics take a second of resampling and are not needed here.
        now = replace(self.experiment(), settings=replace(self.settings, derived=()))
        self.last_claims = claims(last_launch(now))
        target = self.settings.target_rel_width * math.sqrt(self.launches)
        carrying = [c for c in headline(self.last_claims) if c.arm in self.living]
        if not carrying:
            return None
        if all((c.high - c.low) / c.ratio < target for c in carrying):
            return "narrow"
        open_ = (Verdict.INCONCLUSIVE, Verdict.UNTRUSTWORTHY)
        settled = all(c.verdict not in open_ for c in carrying)
        return "decided" if settled and self.settings.stop_when_decided else None

    def _ended(self, end: ArmEndedError) -> str:
        """Return the reason to stop after an arm ended.

        Raises:
            ArmFailedError: There are too few blocks for an interval.
        """
        stop = Event(self.block, "stop", {"reason": "ended"})
        settings = replace(self.settings, derived=())
        now = replace(self.experiment(), settings=settings, events=(*self.events, stop))
        carrying = [c for c in headline(claims(now)) if c.arm in self.living]
        blocks = min((c.blocks for c in carrying), default=0)
        bounded = {c.arm for c in carrying if c.low > 0 and c.high < math.inf}
        if bounded != set(self.living) - {self.settings.baseline}:
            raise ArmFailedError(
                f"{end.what}: too few blocks for an interval ({blocks})"
                if blocks
                else f"{end.what}, before the first block",
                where=end.where,
                remedy=end.remedy,
            ) from end
        what = f"{end.what}: {blocks} blocks"
        self._event("note", {"what": f"{what}; to narrow the interval, {end.remedy}"})
        return "ended"

    def _measure_memory(self) -> None:
        """Measure the peak memory of in-process arms, in separate rounds after the timed blocks."""
        living = [self.arms[name] for name in self.living]
        callables = [arm for arm in living if isinstance(arm, CallableArm)]
        for _ in range(_MEMORY_ROUNDS):
            values: dict[tuple[str, Metric], float] = {}
            for arm in callables:
                with users_code(self.plan.timeout_s):
                    # At least one page, so that the ratio is defined.
                    peak = max(peak_of_call(arm.function).increase, 4096)
                values[arm.name, "peak_memory"] = float(peak)
            self._commit(Phase.MEASURE, self.block, values)
            self.block += 1

    def _observe_afterwards(self) -> None:
        """Store the results of `Arm.afterwards`, which would have disturbed the timing."""
        for name in self.living:
            arm = self.arms[name]
            if type(arm).afterwards is Arm.afterwards:
                continue
            self._report("afterwards")
            try:
                details = arm.afterwards(self.plan.timeout_s)
            except SlipstreamError as error:
                self._event("note", {"arm": name, "what": f"{name}, after the run: {error.what}"})
                continue
            if details:
                self._event(AFTERWARDS, {"arm": name, **details})

    # Samples.

    def _sample(self, name: str, inner: int, phase: Phase) -> Sample | None:
        """Return a sample, or None if the arm failed and left the run."""
        try:
            sample = self.arms[name].sample(inner, self.plan.timeout_s)
            metrics = self.shapes.setdefault(name, set(sample))
            if metrics != set(sample):
                differ = ", ".join(sorted(metrics ^ set(sample)))
                raise MeasurementError(
                    f"only some of its samples have {differ}",
                    remedy="return the same metrics in every sample",
                )
        except ArmEndedError:
            raise
        except SlipstreamError as error:
            self._failed(name, error, phase)
            return None
        return sample

    def _failed(self, name: str, error: SlipstreamError, phase: str) -> None:
        """Remove the arm from the run; its samples so far remain."""
        named = ArmFailedError(
            f"'{name}' failed: {error.what}",
            arm=name,
            block=self.block,
            phase=str(phase),
            where=error.where,
            remedy=error.remedy,
        )
        named.__cause__ = error
        self.failure = named
        self._event("failed", {"arm": name, "phase": str(phase), "what": error.what})
        self.living.remove(name)
        self.arms[name].close()

    def _require_arms(self, values: Mapping[tuple[str, Metric], float] | None = None) -> None:
        """Raise if no pair of arms remains, after recording the others' `values`."""
        if self.settings.baseline in self.living and len(self.living) > 1:
            return
        if values:
            self._commit(Phase.MEASURE, self.block, values)
        raise self.failure

    def _commit(self, phase: Phase, block: int, values: Mapping[tuple[str, Metric], float]) -> None:
        for (name, metric), value in values.items():
            key = (name, metric, phase)
            if key not in self.columns:
                self.columns[key] = (array("d"), array("i"))
            self.columns[key][0].append(value)
            self.columns[key][1].append(block)
        if self.sink is not None:
            self.sink.block(BlockRows(phase, block, values, tuple(self.fresh_events)))
        self.fresh_events.clear()

    def _commit_warmup(self, values: Mapping[tuple[str, Metric], float]) -> None:
        self._commit(Phase.WARMUP, self.warmup_round, values)
        self.warmup_round += 1

    def _read_gate(self) -> None:
        """Record the gate when its level changes."""
        now = time.monotonic()
        if now - self.gate_read_at < _GATE_EVERY_S:
            return
        self.gate_read_at = now
        reading = self.gate.read()
        if reading.level is self.gate_level:
            return
        self.gate_level = reading.level
        self._event(
            "gate",
            {
                "state": str(reading.level),
                "reasons": list(reading.reasons),
                "unreadable": list(reading.unreadable),
                "values": {name: round(value, 3) for name, value in reading.values.items()},
            },
        )

    def _event(self, kind: str, detail: Mapping[str, Any]) -> None:
        event = Event(self.block, kind, detail)
        self.events.append(event)
        self.fresh_events.append(event)

    def _report(self, phase: str) -> None:
        if self.progress is None:
            return
        remaining_s = max(0.0, self.deadline - time.monotonic()) if self.deadline else 0.0
        self.progress(
            Progress(
                phase,
                self.block,
                remaining_s,
                self.last_claims,
                self.widened,
                self.launch,
                self.launches,
            )
        )


def _orders(names: Sequence[str], rng: random.Random) -> Iterator[list[str]]:
    """Yield random orders of the arms, each followed by its reverse."""
    while True:
        order = list(names)
        rng.shuffle(order)
        yield order
        yield order[::-1]


def _undisturbed(sample: Sample) -> float:
    """Return wall time minus run-queue delay, at least CPU time."""
    cpu = min(sample.get("cpu", 0.0), sample["wall"])
    return max(sample["wall"] - sample.get(RUN_DELAY, 0.0), cpu, 1.0)


def _stationary(history: Sequence[Sample]) -> bool:
    """Whether wall or CPU time stopped falling; under contention only CPU time may."""
    if len(history) < 2 * _WINDOW:
        return False
    for metric in ("cpu", "wall"):
        if not all(metric in sample for sample in history[-2 * _WINDOW :]):
            continue
        last = median(sample[metric] for sample in history[-_WINDOW:])
        before = median(sample[metric] for sample in history[-2 * _WINDOW : -_WINDOW])
        if abs(last - before) <= _STATIONARY * before:
            return True
    return False
