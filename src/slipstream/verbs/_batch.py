"""batch_model: time, memory and throughput of a step against its batch size, from a few samples.

Source: Yu, Grossman and Pekhimenko, "Skyline: Interactive in-editor computational performance
profiling for deep neural network training", UIST 2020: two lines through three sizes. Here sizes
lie far apart, as neighbours say little of what is far away, and a line may have a knee.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import InvalidArgumentError, MeasurementError, WorkloadError
from slipstream.measure.comparison import seconds
from slipstream.measure.statistics import Interval
from slipstream.units import format_bytes, format_duration, parse_bytes
from slipstream.verbs._batch_curve import Curve, Point, fit
from slipstream.verbs._batch_samples import DoesNotFitError, Facts, Sample, Sampler
from slipstream.verbs._children import DEFAULT_TIMEOUT_S, room_bytes
from slipstream.workload import Workload

# Of the batch as it is: far apart, and none of them a power of two, which libraries like best.
_FACTORS = (1.0, 2.5, 6.0)
_FEWEST, _MOST_SIZES = 3, 6
# Samples that kernels work on at once, or a multiple of it.
_BLOCK = 8
# Where fixed costs show.
_BELOW = 0.6
# How many times the largest measured size the limit lies away for its own look to be worth it.
_FAR = 1.5
# Of a limit: two runs of one step differ by about what is left of it.
_NEARLY_ALL = 0.99
# Of the largest batch that a limit is expected to allow: memory is looked at there, too.
_NEAR_LIMIT = 0.8
# A size is tried where the memory it is expected to need leaves this much of what there is.
_SAFE_SHARE = 0.85
_TIME_TOLERANCE, _MEMORY_TOLERANCE = 0.02, 0.005
_LEAST_NS = 1e3
# Of the highest throughput: what a larger batch than this adds is not worth the memory.
_ENOUGH = 0.97
_LEAST_SPREAD = 0.005
# What arithmetic may make of a whole number.
_EXACT = 1e-9
_MEMORY_SPREAD = 0.002


@dataclass(frozen=True)
class BatchSample:
    """What was measured at one size.

    Attributes:
        samples: per step.
        step_ns: the least time of a step; NaN where only its memory was measured.
        spread: of that time, what measuring again may change, relative.
        tensor_bytes: the most that tensors take at once.
        update_bytes: the same while the optimizer updates; 0 where that is not told apart.
        process_bytes: the most private memory of the process (of a GPU: what torch keeps there).
    """

    samples: int
    step_ns: float
    spread: float
    tensor_bytes: int
    update_bytes: int
    process_bytes: int


@dataclass(frozen=True)
class BatchModel:
    """How a step's time and memory depend on how many samples it takes.

    Attributes:
        workload: its name.
        samples: per step, as it is.
        quantum: sizes are multiples of it.
        measured: what was measured, by size.
        too_large: sizes that were tried and did not fit.
        limit_bytes: memory that the process may have here.
        clock: "cpu" for CPU time of one thread, else "wall".
        device: "cpu" or "cuda".
        why_not: None, or why times are not predicted (then those measured are all there is).
    """

    workload: str
    samples: int
    quantum: int
    measured: tuple[BatchSample, ...]
    too_large: tuple[int, ...]
    limit_bytes: int
    clock: str
    device: str
    why_not: str | None
    _time: Curve
    _memory: Curve | None
    _update: Curve | None
    _process: Curve

    def time(self, samples: float) -> Interval:
        """Nanoseconds of a step, with a 90 % interval that is wider outside the measured sizes.

        Raises:
            InvalidArgumentError: less than one sample.
            MeasurementError: `why_not` has a reason, and this size was not measured.
        """
        predicted = self._time.at(samples)
        if self.why_not is None:
            return predicted
        for one in self.measured:
            if one.samples == samples:
                half = max(one.spread, _LEAST_SPREAD) * one.step_ns
                return Interval(
                    one.step_ns, one.step_ns - half, one.step_ns + half, 0.9, "measured"
                )
        raise MeasurementError(
            f"the time of {samples:g} samples is not predicted: {self.why_not}",
            remedy="the measured sizes are there: "
            + ", ".join(str(one.samples) for one in self.measured),
        )

    def memory(self, samples: float) -> Interval:
        """Bytes that tensors take at most at once.

        Raises:
            InvalidArgumentError: less than one sample.
            MeasurementError: the allocator's events could not be seen.
        """
        if self._memory is None:
            raise MeasurementError(
                "the memory of this step's tensors could not be seen",
                remedy="process() tells the memory of the whole process",
            )
        passes = self._memory.at(samples)
        update = self._update.at(samples) if self._update is not None else passes
        return max(passes, update, key=lambda one: one.estimate)

    def process(self, samples: float) -> Interval:
        """Bytes of private memory the whole process needs, which a limit counts.

        Raises:
            InvalidArgumentError: less than one sample.
        """
        return self._process.at(samples)

    def throughput(self, samples: float) -> Interval:
        """Samples per second.

        Raises:
            InvalidArgumentError, MeasurementError: as `time`.
        """
        took = self.time(samples)
        low, middle, high = (
            samples / max(ns, 1.0) * 1e9 for ns in (took.high, took.estimate, took.low)
        )
        return Interval(middle, low, high, took.level, took.estimator)

    @property
    def needs_more(self) -> bool:
        """Whether one line misses a measured time by more than measuring does: a knee, perhaps."""
        line = fit(_times(self.measured), math.inf)
        misses = [abs(line.at(one.samples).estimate / one.step_ns - 1) for one in self.measured]
        return max(misses) > _TIME_TOLERANCE

    @property
    def max_throughput(self) -> float:
        """Samples per second that no batch exceeds."""
        if self.why_not is not None:
            return max(one.samples / one.step_ns * 1e9 for one in self.measured)
        endless = 1e9 / self._time.last_slope
        if self._time.knee is None:
            return endless
        return max(endless, self.throughput(self._time.knee).estimate)

    @property
    def knee(self) -> int | None:
        """From how many samples on each further one costs another time; None: always the same."""
        return None if self._time.knee is None else round(self._time.knee)

    @property
    def dearer_beyond_knee(self) -> float:
        """What a sample beyond the knee costs in times of one before it; 1 without a knee."""
        return self._time.last_slope / self._time.slope if self._time.slope > 0 else math.inf

    def max_batch(self, limit: int | str | None = None) -> int:
        """The most samples whose step fits; 0 where not even the smallest batch does.

        Args:
            limit: private memory of the process in bytes, or as text ("8GiB"); None for what there
                is here.

        Raises:
            InvalidArgumentError: no size.
        """
        room = self.limit_bytes if limit is None else _bytes(limit)
        found = self._process.largest_within(room * _NEARLY_ALL)
        # What was seen to fit does.
        seen = [one.samples for one in self.measured if one.process_bytes <= room]
        found = max([found, *seen])
        if self.too_large and limit is None:
            found = min(found, min(self.too_large) - self.quantum)
        if math.isinf(found):
            return max(one.samples for one in self.measured)
        return int(found * (1 + _EXACT)) // self.quantum * self.quantum

    def for_throughput(self, throughput: float) -> int | None:
        """The fewest samples a step needs for so many samples per second; None: no batch does.

        Raises:
            InvalidArgumentError: not a positive number.
            MeasurementError: times are not predicted.
        """
        if not throughput > 0 or not math.isfinite(throughput):
            raise InvalidArgumentError(
                "throughput", f"{throughput} is no number of samples a second"
            )
        if self.why_not is not None:
            raise MeasurementError(f"throughput is not predicted: {self.why_not}")
        rate = throughput / 1e9
        curve = self._time
        knee = math.inf if curve.knee is None else curve.knee
        before = (curve.bias, curve.slope, 1.0, knee)
        behind = (curve.last_bias, curve.last_slope, knee, math.inf)
        for bias, slope, first, last in (before, behind):
            # b / (bias + slope b) = rate, where throughput still grows with b.
            if bias <= 0 and first > 1:
                continue
            left = 1 - rate * slope
            wanted = rate * bias / left if left > 0 else math.inf
            wanted = max(wanted, first)
            if math.isfinite(wanted) and wanted <= last:
                return math.ceil(wanted / self.quantum * (1 - _EXACT)) * self.quantum
        return None

    def best(self, limit: int | str | None = None) -> int:
        """The smallest batch that fits and has 97 % of the throughput of the fastest that does.

        0 where none fits.
        """
        most = self.max_batch(limit)
        if most < 1:
            return 0
        if self.why_not is not None:
            fits = [one for one in self.measured if one.samples <= most] or [self.measured[0]]
            fastest = max(one.samples / one.step_ns for one in fits)
            return next(
                one.samples for one in fits if one.samples / one.step_ns >= _ENOUGH * fastest
            )
        candidates = [most] if self._time.knee is None or self._time.knee > most else [
            most, max(int(self._time.knee) // self.quantum, 1) * self.quantum
        ]  # fmt: skip
        fastest = max(self.throughput(one).estimate for one in candidates)
        found = self.for_throughput(_ENOUGH * fastest)
        return most if found is None else min(found, most)

    def to_json(self) -> dict[str, Any]:
        """Plain values: what was measured, the lines, and what follows from them."""
        best = self.best()

        def line(curve: Curve | None) -> dict[str, Any] | None:
            if curve is None:
                return None
            return {
                "bias": curve.bias, "slope": curve.slope, "knee": curve.knee, "bend": curve.bend,
                "error": curve.error,
            }  # fmt: skip

        return {
            "workload": self.workload,
            "samples": self.samples,
            "quantum": self.quantum,
            "device": self.device,
            "clock": self.clock,
            "measured": [vars(one) for one in self.measured],
            "too_large": list(self.too_large),
            "limit_bytes": self.limit_bytes,
            "why_not": self.why_not,
            "step_ns": line(self._time),
            "tensor_bytes": line(self._memory),
            "update_bytes": line(self._update),
            "process_bytes": line(self._process),
            "knee": self.knee,
            "max_throughput": self.max_throughput,
            "max_batch": self.max_batch(),
            "best": best,
        }


def batch_model(
    workload: Workload | str,
    samples: str | Sequence[int] = "auto",
    *,
    limit: int | str | None = None,
    threads: int = 0,
    budget: str | float = "15s",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    say: Callable[[str], None] = lambda line: None,
) -> BatchModel:
    """Measure `workload` at a few batch sizes, and tell what any other would take.

    Every size runs in a process of its own under a memory limit: one that does not fit makes the
    range smaller and nothing else. The batch is cut or repeated; a step that hides its batch is
    asked for another by the argument ``batch_size`` of its function.

    Args:
        workload: a `Workload`, or what `Workload.parse` takes.
        samples: sizes to measure (two at least), or "auto": the batch as it is, two larger ones far
            apart (or smaller, where memory ends) and one below; two more where a line misses them.
        limit: private memory of the process in bytes or as text ("8GiB"); larger sizes are not
            tried, and `BatchModel.max_batch` takes it where it is given none. None: what there is.
        threads: intra-op threads, 0 for what the workload sets.
        budget: about how long steps are timed for, each time the sizes are taken in turns.
        timeout_s: a process that is silent for so long is stopped.
        say: called with a short line whenever there is progress.

    Raises:
        InvalidArgumentError: sizes that are none, or fewer than two; no limit or budget.
        WorkloadError: the user's code failed, or its batch can be set nowhere.
        DoesNotFitError: not even the batch as it is (nor one of a sixth of it) fits.
        ChildError: a process hung.
    """
    if not isinstance(workload, Workload):
        workload = Workload.parse(workload)
    asked = None if samples == "auto" else _sizes(samples)
    budget_s = seconds(budget, "budget")
    wanted = None if limit is None else _bytes(limit)
    sampler = Sampler(
        workload, threads=threads, limit_bytes=_room(wanted), timeout_s=timeout_s, say=say
    )
    with sampler:
        search = _Search(sampler, budget_s, wanted)
        search.begin(asked)
        if asked is not None:
            for size in asked:
                search.try_size(size)
        else:
            search.spread_out()
            if limit is not None:
                search.look_ahead()
        model = search.model(workload.name)
        if asked is None and model.needs_more:
            for size in more_sizes([one.samples for one in model.measured], model.quantum):
                search.try_size(size)
            model = search.model(workload.name)
    return model


def _room(wanted: int | None, mapped_bytes: int = 0) -> int | None:
    """The least of what is asked for and what there is."""
    found = [one for one in (wanted, room_bytes(mapped_bytes)) if one is not None]
    return min(found, default=None)


class _Search:
    """Which sizes to try: memory, what fitted and what did not decide."""

    def __init__(self, sampler: Sampler, budget_s: float, wanted: int | None) -> None:
        self._sampler = sampler
        self._budget_s = budget_s
        self._wanted = wanted
        self._limit_bytes = 0
        self._far: list[Sample] = []
        self.samples: dict[int, Sample] = {}
        self.too_large: set[int] = set()

    @property
    def facts(self) -> Facts:
        assert self._sampler.facts is not None
        return self._sampler.facts

    @property
    def limit_bytes(self) -> int:
        """Memory that the workload may have."""
        return self._limit_bytes

    def begin(self, asked: Sequence[int] | None) -> None:
        """The batch as it is; it tells what sizes there can be."""
        first = self._sampler.first()
        # A limit that is given is of the device's memory, where there is one.
        there = self.facts.device_bytes or _room(None, first.mapped_bytes) or 0
        self._limit_bytes = min(there, self._wanted or there)
        quantum = self.facts.quantum
        for size in asked or ():
            if size % quantum:
                raise InvalidArgumentError(
                    "samples",
                    f"{size} samples are no whole batch: sizes are multiples of {quantum}",
                )
        if asked is None or first.samples in asked:
            self.samples[first.samples] = first

    def try_size(self, size: int) -> bool:
        """Whether a step of `size` fits; it is sampled if it does."""
        if size in self.samples:
            return True
        if size in self.too_large:
            return False
        try:
            self.samples[size] = self._sampler.sample(size)
        except DoesNotFitError:
            self.too_large.add(size)
            return False
        return True

    def spread_out(self) -> None:
        """Sizes far apart: above the batch as it is while memory and time allow, one below."""
        own = self.facts.samples
        for factor in _FACTORS[1:]:
            size = min(self._whole(own * factor), self._affordable())
            while size > max(self.samples) * 1.1 and not self.try_size(size):
                # Half way, geometrically, between what fits and what does not.
                size = self._whole(math.sqrt(max(self.samples) * size))
        self.try_size(self._whole(own * _BELOW))
        for factor in _FACTORS[1:]:
            if len(self.samples) < _FEWEST:
                self.try_size(self._whole(min(self.samples) / factor))
        if len(self.samples) < 2:
            raise WorkloadError(
                f"a step of {own} samples fits, and no batch of another size does",
                remedy="give sizes to try: samples=[...]",
            )

    def look_ahead(self) -> None:
        """See what memory is needed near the limit: heaps are not as straight as lines."""
        own = [Point(b, one.process_bytes, _MEMORY_SPREAD) for b, one in self.samples.items()]
        most = fit(own, _MEMORY_TOLERANCE).largest_within(_NEAR_LIMIT * self.limit_bytes)
        last = self.samples[max(self.samples)]
        affordable = last.samples * self._budget_s * 1e9 / 4 / max(last.step_ns, 1.0)
        size = self._whole(min(most, affordable))
        if size > _FAR * last.samples and not self.too_large:
            try:
                self._far.append(self._sampler.sample(size))
            except DoesNotFitError:
                self.too_large.add(size)

    def model(self, name: str) -> BatchModel:
        """Through all sizes that were sampled, timed now."""
        return model_of(
            name, self.facts, self.times(), limit_bytes=self.limit_bytes,
            too_large=tuple(sorted(self.too_large)), far=self._far,
        )  # fmt: skip

    def times(self) -> list[BatchSample]:
        """All sizes timed: in turns where one process can run them."""
        sizes = sorted(self.samples)
        timings = None
        while self.facts.resizes and timings is None and len(sizes) > 1:
            try:
                timings = self._sampler.timings(sizes, self._budget_s)
            except DoesNotFitError:
                # Alone it fitted; beside what other sizes left behind it does not.
                self.too_large.add(sizes.pop())
        if timings is None:
            timings = [self._sampler.alone(size, self._budget_s / len(sizes)) for size in sizes]
        return [
            BatchSample(
                one.samples, one.step_ns, one.spread,
                self.samples[one.samples].tensor_bytes, self.samples[one.samples].update_bytes,
                self.samples[one.samples].process_bytes,
            )
            for one in timings
        ]  # fmt: skip

    def _whole(self, samples: float) -> int:
        return whole(samples, self.facts.quantum)

    def _affordable(self) -> int:
        """The largest size that memory and time allow, as far as is known by now."""
        known = [self.samples[size] for size in sorted(self.samples)]
        last = known[-1]
        # All of a step's time and memory taken to be its samples': at most so many.
        most = last.samples * self._budget_s * 1e9 / 10 / max(last.step_ns, 1.0)
        if self.limit_bytes:
            room = _SAFE_SHARE * self.limit_bytes
            if len(known) > 1:
                points = [Point(one.samples, one.process_bytes, _MEMORY_SPREAD) for one in known]
                most = min(most, fit(points, math.inf).largest_within(room))
            else:
                most = min(most, last.samples * room / last.process_bytes)
        return int(most) // self.facts.quantum * self.facts.quantum


def whole(samples: float, quantum: int) -> int:
    """The size nearest to `samples` that a step can have, in whole eights where it is large.

    Kernels work on blocks: a batch that leaves a rest takes longer than its size says, and hardly
    anybody trains with one.
    """
    grain = quantum * (_BLOCK if samples >= 2 * _BLOCK * quantum else 1)
    return max(math.floor(samples / grain + 0.5), 1) * grain


def factors() -> tuple[float, ...]:
    """The sizes that are measured first, in batches as they are."""
    return (_BELOW, *_FACTORS)


def more_sizes(sizes: Sequence[int], quantum: int) -> list[int]:
    """Sizes to add where one line misses what was measured: in the middle of the widest gaps."""
    gaps = sorted(itertools.pairwise(sizes), key=lambda gap: gap[0] / gap[1])
    wanted = [whole(math.sqrt(low * high), quantum) for low, high in gaps]
    new = [size for size in dict.fromkeys(wanted) if size not in sizes]
    return sorted(new[: _MOST_SIZES - len(sizes)])


def model_of(
    name: str,
    facts: Facts,
    found: Sequence[BatchSample],
    *,
    limit_bytes: int,
    too_large: tuple[int, ...] = (),
    far: Sequence[Sample] = (),
) -> BatchModel:
    """The lines through what was measured, by size.

    Args:
        far: larger sizes of which the process's memory alone is taken.
    """
    times = fit(_times(found), _TIME_TOLERANCE)
    if -_TIME_TOLERANCE * found[0].step_ns <= times.bias < 0 and times.knee is None:
        times = times.through_zero()
    passes = [one for one in found if one.tensor_bytes > one.update_bytes] or found
    held = [(one.samples, one.process_bytes) for one in found]
    held += [(one.samples, one.process_bytes) for one in far]
    # The most of a small batch may be that of its update: it says nothing of what passes take.
    told = passes if len({one.samples for one in passes}) > 1 else found
    return BatchModel(
        name, facts.samples, facts.quantum, tuple(found), too_large, limit_bytes, facts.clock,
        facts.device, _why_not(times, found), times,
        _bytes_curve([(one.samples, one.tensor_bytes) for one in told]),
        _bytes_curve([(one.samples, one.update_bytes) for one in found]),
        fit([Point(b, n, _MEMORY_SPREAD) for b, n in held], _MEMORY_TOLERANCE),
    )  # fmt: skip


def _bytes_curve(sizes: Sequence[tuple[int, int]]) -> Curve | None:
    """None where one of them was not seen."""
    if not all(nbytes for _, nbytes in sizes):
        return None
    return fit([Point(b, nbytes, _MEMORY_SPREAD) for b, nbytes in sizes], _MEMORY_TOLERANCE)


def _why_not(curve: Curve, found: Sequence[BatchSample]) -> str | None:
    """Why the lines cannot be believed, after Skyline's rules; None where they can."""
    least, most = found[0].samples, found[-1].samples
    if curve.slope * (most - least) < _LEAST_NS or curve.last_slope <= 0:
        return (
            f"steps of {least} and of {most} samples take "
            f"{format_duration(found[0].step_ns)} and {format_duration(found[-1].step_ns)}: "
            "their time hardly depends on the batch"
        )
    if curve.bias < 0:
        return (
            "a step of twice as many samples takes more than twice as long, and too few sizes were "
            "measured to say from where on"
        )
    endless = 1e9 / min(curve.slope, curve.last_slope)
    fastest = max(found, key=lambda one: one.samples / one.step_ns)
    rate = fastest.samples / fastest.step_ns * 1e9
    if rate > endless * (1 + _TIME_TOLERANCE):
        return (
            f"{fastest.samples} samples were measured at {rate:.4g} samples/s, more than the lines "
            "allow any batch"
        )
    return None


def _times(found: Sequence[BatchSample]) -> list[Point]:
    return [Point(one.samples, one.step_ns, max(one.spread, _LEAST_SPREAD)) for one in found]


def _sizes(samples: str | Sequence[int]) -> list[int]:
    if isinstance(samples, str):
        raise InvalidArgumentError(
            "samples",
            f"'{samples}' is neither 'auto' nor a list of sizes",
            remedy="as [16, 40, 96]",
        )
    found = sorted(set(samples))
    if not all(type(size) is int and size > 0 for size in found):
        raise InvalidArgumentError("samples", "sizes are whole numbers from 1 on")
    if len(found) < 2:
        raise InvalidArgumentError("samples", "two sizes at least tell how the batch matters")
    return found


def _bytes(limit: int | str) -> int:
    if isinstance(limit, str):
        return parse_bytes(limit, "limit")
    if limit <= 0:
        raise InvalidArgumentError("limit", f"{format_bytes(limit)} is no memory")
    return limit
