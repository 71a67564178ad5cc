"""Run arms in paired blocks and record everything: warm-up, calibrate, measure, stop.

A block runs every arm once, back to back, in a random order; each order is followed by its
reverse (for two arms ABBA or BAAB), so that a drifting machine favours nobody. In a tenth of the
blocks the baseline runs a second time as the A/A guard. Whether to stop is asked only at the
looks of `ExperimentSettings.looks`, and at the end of the budget.

Where `ExperimentSettings.launches` allows, and opening costs little enough, arms in separate
processes are closed and opened again after a share of the time (see `launches.py`). Each launch
then has the looks to itself, and the run ends with its last launch.
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
    FEWEST_LAUNCHES,
    IN_THIS_PROCESS,
    LAUNCH,
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

# Guard blocks: the first eight (fewer cannot give a 99 % interval of the median), then a tenth.
_GUARD_FIRST = 8
_GUARD_EVERY = 10
# Warm-up is over when the medians of the last two windows of this many samples agree ...
_WINDOW = 5
# ... within this fraction.
_STATIONARY = 0.02
# Seconds between two readings of the gate: pressure is updated every two.
_GATE_EVERY_S = 1.0
# A block may take at most this fraction of the budget, or there would be too few of them.
_LONGEST_BLOCK = 1 / 40
# In-process peak memory is taken this often: eight give a 99 % interval, as with the guard.
_MEMORY_ROUNDS = 8
# Timer resolution times this is the shortest sample.
_TIMER_MULTIPLE = 1000


@dataclass(frozen=True)
class RunPlan:
    """How to run, beyond what is stored in `ExperimentSettings`.

    Attributes:
        timeout_s: an arm that takes longer for one sample, or to get ready, is stopped.
        minimum_warmup_s: warm-up an arm gets even when it is stationary at once.
        maximum_warmup_s: after which an arm counts as warm, stationary or not; by default a
            tenth of the budget.
        maximum_blocks: stop here even if there is budget left.
        guard: whether the baseline runs against itself in a tenth of the blocks.
        red_factor: by how much a machine that is red at the start widens the budget.
        peak_memory: also take the peak memory of in-process arms, after the timed blocks.
        until: of `time.monotonic`: no block begins after it, whatever the budget, and arms show
            nothing after the run.
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
    """How far a run is, for a person: the claims are those of the last look.

    Attributes:
        seconds_left: at most; more than the budget has where `widened`.
        claims: of the newest launch alone.
        widened: why the run may take longer than its budget; empty where it may not.
        launch, launches: which of how many; both 1 where there are no launches.
    """

    phase: str
    block: int
    seconds_left: float
    claims: tuple[Claim, ...] = ()
    widened: str = ""
    launch: int = 1
    launches: int = 1


class ArmFailedError(MeasurementError):
    """The baseline failed, or no candidate is left; `experiment` holds what was measured."""

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

    A candidate that fails leaves the run, which goes on with the others. Ctrl-C keeps what was
    measured: it is stored, and travels with the exception as ``error.experiment``. Once everything
    is measured, while arms show what else they have, the run counts as complete.

    Args:
        sink: told of every block, so that a killed run loses at most the running one.
        resume: what an interrupted run of the same arms recorded; see `resume`.
        events: what happened before (quality outcomes), stored with the run.

    Raises:
        InvalidArgumentError: one arm only, names used twice, no such baseline, no budget.
        ArmFailedError: the baseline failed, no candidate is left, or an arm ended (`ArmEndedError`)
            before there were blocks enough for an interval; with enough, the run just stops.
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
    """Go on with an experiment whose process was killed, after its last whole block.

    Its settings hold; the budget begins anew, the arms warm up again.

    Raises:
        InvalidArgumentError: other arms, or an environment that differs; it names the fields.
        StoreError: it is complete, or still running.
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
            "arms", "there is nothing to compare with", remedy="give a baseline and a candidate"
        )
    if settings.baseline not in names:
        raise InvalidArgumentError("baseline", f"no arm is called '{settings.baseline}'")
    if (guard := guard_name(settings.baseline)) in names:
        raise InvalidArgumentError("arms", f"'{guard}' is the name of the A/A guard")
    if not settings.budget_s > 0:
        raise InvalidArgumentError(
            "budget", "no time to measure in", remedy="for example 60s; a few seconds at least"
        )
    if settings.launches != 1 and settings.launches < FEWEST_LAUNCHES:
        raise InvalidArgumentError(
            "launches",
            f"{settings.launches} cannot show how far processes of one side lie apart",
            remedy=f"{FEWEST_LAUNCHES} or more; 1 for a single process a side",
        )
    if not settings.target_rel_width > 0:
        raise InvalidArgumentError("target", "the interval cannot be narrower than nothing")


def _check_same(before: Experiment, arms: Sequence[Arm], environment: Environment) -> None:
    if [arm.name for arm in before.arms] != [arm.name for arm in arms]:
        raise InvalidArgumentError("arms", "they are not those of the interrupted experiment")
    if before.environment.env_id == environment.env_id:
        return
    fields = ", ".join(str(one) for one in differences(before.environment, environment))
    raise InvalidArgumentError(
        "resume",
        f"the environment is another now; it differs in: {fields}",
        remedy="start a new experiment; old and new stay side by side",
    )


@dataclass
class _Run:
    """One experiment while it runs."""

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
        """Take over what an interrupted run of the same arms recorded, and go on after it."""
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
                self._take_memory()
            self.measured = True
            if self.plan.until == math.inf:
                self._look_afterwards()
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            if interrupted and self.measured:
                # The measurement is whole: only what else the arms show was cut short.
                self._event("note", {"what": "interrupted after the run, which is complete"})
            else:
                self._event("stop", {"reason": "interrupted" if interrupted else "failed"})
            # The record travels with the error: ArmFailedError declares the attribute, Ctrl-C
            # gets it.
            error.experiment = self._finish()  # type: ignore[attr-defined]
            raise
        finally:
            for arm in self.arms.values():
                arm.close()
        return self._finish()

    def experiment(self) -> Experiment:
        """Everything recorded so far."""
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
        # What looks need is loaded now, not between two blocks.
        import scipy.special  # noqa: F401

        began = time.monotonic()
        noted = {str(event.detail.get("what")) for event in self.events if event.kind == "note"}
        names = list(self.living)
        if self.launch > 1:
            self.random.shuffle(names)
        for name in names:
            self._say("setup")
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
        self.opening_s = time.monotonic() - began

    def _warm_up(self) -> None:
        """Rounds over the arms that are not yet stationary, until all are or time is up.

        One at least: a machine may stand still for longer than a small budget.
        """
        began = time.monotonic()
        longest = self._longest_warmup_s() / self.launches
        spent = dict.fromkeys(self.living, 0.0)
        history: dict[str, list[Sample]] = {name: [] for name in self.living}
        inner = dict.fromkeys(self.living, 1)
        cold = list(self.living)
        while cold:
            self._say("warmup")
            values: dict[tuple[str, Metric], float] = {}
            for name in cold:
                turn = time.monotonic()
                sample = self._sample(name, inner[name], Phase.WARMUP)
                passed = time.monotonic() - turn
                spent[name] += passed
                if sample is None:
                    continue
                history[name].append(sample)
                values |= {(name, metric): value for metric, value in sample.items()}
                if self.arms[name].repeatable and passed * 1e9 < MINIMUM_SAMPLE_NS / 4:
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
        self.warming_s = time.monotonic() - began

    def _longest_warmup_s(self) -> float:
        longest = self.plan.maximum_warmup_s
        return self.settings.budget_s / 10 if longest is None else longest

    def _calibrate(self) -> None:
        """Choose one inner repeat for all arms: long samples, and still many blocks."""
        if not all(self.arms[name].repeatable for name in self.living):
            return
        resolution_ns = time.get_clock_info("perf_counter").resolution * 1e9
        shortest = max(MINIMUM_SAMPLE_NS, _TIMER_MULTIPLE * resolution_ns)
        repeated = max(REPEATED_SAMPLE_NS, _TIMER_MULTIPLE * resolution_ns)
        costs = {name: max(cost, 1.0) for name, cost in self._estimates.items()}
        least = min(costs.values())
        needed = 1 if least >= shortest else math.ceil(repeated / least)
        longest = self.settings.budget_s * 1e9 * _LONGEST_BLOCK
        affordable = max(1, int(longest / sum(costs.values())))
        self.inner = min(needed, affordable)
        self._event("calibrated", {"inner": self.inner})
        if self.inner < needed:
            self._event("short_samples", {"inner": self.inner, "wanted": needed})
        for name in list(self.living):
            self._check_growth(name, costs[name])
        self._require_arms()

    def _check_growth(self, name: str, cost: float) -> None:
        """Four times the calls must take more than twice the time, or something is cached."""
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
                remedy="does the function keep its first result? give each call work to do",
            ),
            "calibrate",
        )

    # The blocks.

    def _measure_launches(self) -> str:
        """One launch after the other; the reason to stop.

        Raises:
            ArmEndedError: an arm came to its end, in the only launch or in one of several.
        """
        earlier = len(launch_starts(self.events))
        self.launches = self._count_launches()
        if self.launches == 1:
            return self._measure(self.deadline, self.plan.maximum_blocks)
        ended: ArmEndedError | None = None
        reason = "launches"
        for number in range(1, self.launches + 1):
            self.launch = number
            fewest = FEWEST_LAUNCHES if self.plan.until == math.inf else 1
            if number > fewest and time.monotonic() >= self.deadline:
                reason = "budget"
                break
            if number > 1:
                # The first few are made even where opening took longer than before: fewer would
                # have told nothing.
                self._open_anew()
            self._event(LAUNCH, {"launch": earlier + number, "of": earlier + self.launches})
            try:
                self._measure(*self._share())
            except ArmEndedError as end:
                ended = end  # anew it begins at its beginning
        if ended is not None:
            raise ended
        return reason

    def _count_launches(self) -> int:
        """How many launches to make; says why where it is one and more were wanted."""
        wanted, homes = self.settings.launches, {self.arms[name].process for name in self.living}
        if wanted == 1:
            return 1
        if "own" not in homes:
            # What takes every sample in a fresh process has seen many.
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
        count = launches_that_fit(wanted, cost, self.plan.maximum_blocks)
        if count == 1:
            self._event("note", {"what": why_one_process(cost)})
        return count

    def _open_anew(self) -> None:
        """Close all arms and open them, which for most is a process with another heap."""
        for name in self.living:
            self.arms[name].close()
        self._open()
        self._warm_up()

    def _share(self) -> tuple[float, int | None]:
        """Until when this launch is measured, and up to which block: an equal share of the rest."""
        left, now = self.launches - self.launch, time.monotonic()
        rest_s = self.deadline - now - left * (self.opening_s + self.warming_s)
        most = self.plan.maximum_blocks
        blocks = None if most is None else self.block + (most - self.block) // (left + 1)
        return now + rest_s / (left + 1), blocks

    def _measure(self, deadline: float, maximum_blocks: int | None) -> str:
        """Blocks, one at least, until something says stop; the reason."""
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
            self._say("measure")

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
        """Whether the primary intervals of all candidates allow to stop, and why.

        A launch is asked by itself, and n of them are together narrower by the root of n.
        """
        # Derived statistics take a second of resampling and do not decide: left for the end.
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
        """An arm has nothing more to measure: the reason to stop, if what there is suffices.

        Raises:
            ArmFailedError: there are too few blocks for an interval.
        """
        stop = Event(self.block, "stop", {"reason": "ended"})
        settings = replace(self.settings, derived=())
        now = replace(self.experiment(), settings=settings, events=(*self.events, stop))
        carrying = [c for c in headline(claims(now)) if c.arm in self.living]
        blocks = min((c.blocks for c in carrying), default=0)
        known = {c.arm for c in carrying if c.low > 0 and c.high < math.inf}
        if known != set(self.living) - {self.settings.baseline}:
            raise ArmFailedError(
                f"{end.what}: too few blocks for an interval ({blocks})"
                if blocks
                else f"{end.what}, before anything was measured",
                where=end.where,
                remedy=end.remedy,
            ) from end
        what = f"{end.what}: {blocks} blocks"
        self._event("note", {"what": f"{what}; to narrow the interval, {end.remedy}"})
        return "ended"

    def _take_memory(self) -> None:
        """Peak memory of the in-process arms, in rounds of their own after the timed blocks."""
        living = [self.arms[name] for name in self.living]
        callables = [arm for arm in living if isinstance(arm, CallableArm)]
        for _ in range(_MEMORY_ROUNDS):
            values: dict[tuple[str, Metric], float] = {}
            for arm in callables:
                with users_code(self.plan.timeout_s):
                    # One page at least: a function that needs nothing has a ratio too.
                    peak = max(peak_of_call(arm.function).increase, 4096)
                values[arm.name, "peak_memory"] = float(peak)
            self._commit(Phase.MEASURE, self.block, values)
            self.block += 1

    def _look_afterwards(self) -> None:
        """What else the arms have to show, which timing it would have disturbed."""
        for name in self.living:
            arm = self.arms[name]
            if type(arm).afterwards is Arm.afterwards:
                continue
            self._say("afterwards")
            try:
                details = arm.afterwards(self.plan.timeout_s)
            except SlipstreamError as error:
                self._event("note", {"arm": name, "what": f"{name}, after the run: {error.what}"})
                continue
            if details:
                self._event(AFTERWARDS, {"arm": name, **details})

    # One sample, and what becomes of it.

    def _sample(self, name: str, inner: int, phase: Phase) -> Sample | None:
        """A sample, or None when the arm failed and has left the run."""
        try:
            sample = self.arms[name].sample(inner, self.plan.timeout_s)
            metrics = self.shapes.setdefault(name, set(sample))
            if metrics != set(sample):
                differ = ", ".join(sorted(metrics ^ set(sample)))
                raise MeasurementError(
                    f"its samples differ in shape: {differ} only in some",
                    remedy="return the same metrics every time",
                )
        except ArmEndedError:
            raise
        except SlipstreamError as error:
            self._failed(name, error, phase)
            return None
        return sample

    def _failed(self, name: str, error: SlipstreamError, phase: str) -> None:
        """Take the arm out of the run; its samples so far stay."""
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
        """Raise when there is nothing left to compare, after keeping the others' `values`."""
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
        """Record the gate whenever its colour changes: so every block has one."""
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

    def _say(self, phase: str) -> None:
        if self.progress is None:
            return
        left = max(0.0, self.deadline - time.monotonic()) if self.deadline else 0.0
        self.progress(
            Progress(
                phase, self.block, left, self.last_claims, self.widened, self.launch, self.launches
            )
        )


def _orders(names: Sequence[str], rng: random.Random) -> Iterator[list[str]]:
    """Random orders of the arms, each followed by its reverse."""
    while True:
        order = list(names)
        rng.shuffle(order)
        yield order
        yield order[::-1]


def _undisturbed(sample: Sample) -> float:
    """Wall time less what was spent in the queue for a core, but never below CPU time."""
    cpu = min(sample.get("cpu", 0.0), sample["wall"])
    return max(sample["wall"] - sample.get(RUN_DELAY, 0.0), cpu, 1.0)


def _stationary(history: Sequence[Sample]) -> bool:
    """Whether wall or CPU time has stopped falling: under contention only CPU time can."""
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
