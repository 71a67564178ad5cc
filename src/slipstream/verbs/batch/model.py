"""What a few measured sizes tell of any other: time, memory, throughput, the largest that fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import InvalidArgumentError, MeasurementError
from slipstream.measure.statistics import Interval
from slipstream.units import format_bytes, format_duration, parse_bytes
from slipstream.verbs.batch.curve import Curve, Point, fit
from slipstream.verbs.batch.samples import BatchSample, Facts
from slipstream.verbs.batch.tries import Try

# Of a limit: two runs of one step differ by about what is left of it.
_NEARLY_ALL = 0.99
_TIME_TOLERANCE, _MEMORY_TOLERANCE = 0.02, 0.005
_LEAST_NS = 1e3
# Lines that miss a measured time by more are not believed where nothing was measured.
_MOST_MISSED = 0.06
# Of the highest throughput: what a larger batch than this adds is not worth the memory.
_ENOUGH = 0.97
_LEAST_SPREAD = 0.005
# What arithmetic may make of a whole number.
_EXACT = 1e-9
_MEMORY_SPREAD = 0.002


@dataclass(frozen=True)
class BatchModel:
    """How a step's time and memory depend on how many samples it takes.

    Attributes:
        workload: its name.
        samples: per step, as it is.
        quantum: sizes are multiples of it.
        measured: what was measured, by size.
        too_large: sizes that were to be measured and did not fit.
        tried: sizes that were run under `limit_bytes`, in order: the largest of those whose memory
            was measured, then what the lines predicted, then what that taught. Empty: none was.
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
    tried: tuple[Try, ...] = ()

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

        Under `limit_bytes` it is the largest that ran, where `largest_tried` has one; under another
        limit it is predicted.

        Args:
            limit: private memory of the process in bytes, or as text ("8GiB"); None for
                `limit_bytes`.

        Raises:
            InvalidArgumentError: no size.
        """
        room = self.limit_bytes if limit is None else limit_of(limit)
        here = room == self.limit_bytes
        if here and self.largest_tried is not None:
            return self.largest_tried
        most = self._process.largest_within(room * _NEARLY_ALL)
        # What was seen to fit does.
        seen = [one.samples for one in self.measured if one.process_bytes <= room]
        most = max([most, *seen])
        failed = [*self.too_large, *(one.samples for one in self.tried if not one.ran)]
        if failed and here:
            most = min(most, min(failed) - self.quantum)
        if math.isinf(most):
            return max(one.samples for one in self.measured)
        return int(most * (1 + _EXACT)) // self.quantum * self.quantum

    @property
    def largest_tried(self) -> int | None:
        """The most samples whose step ran under `limit_bytes` when it was tried; None: none did."""
        return max((one.samples for one in self.tried if one.ran), default=None)

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
        smallest = self.for_throughput(_ENOUGH * fastest)
        return most if smallest is None else min(smallest, most)

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
            "tried": [vars(one) for one in self.tried],
            "limit_bytes": self.limit_bytes,
            "why_not": self.why_not,
            "step_ns": line(self._time),
            "tensor_bytes": line(self._memory),
            "update_bytes": line(self._update),
            "process_bytes": line(self._process),
            "knee": self.knee,
            "max_throughput": self.max_throughput,
            "max_batch": self.max_batch(),
            "max_batch_from": "predicted" if self.largest_tried is None else "tried",
            "best": best,
        }


def model_of(
    name: str,
    facts: Facts,
    found: Sequence[BatchSample],
    *,
    limit_bytes: int,
    too_large: tuple[int, ...] = (),
    far: Sequence[BatchSample] = (),
    tried: Sequence[Try] = (),
) -> BatchModel:
    """The lines through what was measured, by size.

    Args:
        far, tried: larger sizes of which the process's memory alone is taken.
    """
    times = fit(_times(found), _TIME_TOLERANCE)
    passes = [one for one in found if one.tensor_bytes > one.update_bytes] or found
    ran: list[BatchSample | Try] = [*found, *far, *tried]
    held = [(one.samples, one.process_bytes) for one in ran if one.process_bytes]
    # The most of a small batch may be that of its update: it says nothing of what passes take.
    told = passes if len({one.samples for one in passes}) > 1 else found
    return BatchModel(
        name, facts.samples, facts.quantum, tuple(found), too_large, limit_bytes, facts.clock,
        facts.device, _why_not(times, found), times,
        _bytes_curve([(one.samples, one.tensor_bytes) for one in told]),
        _bytes_curve([(one.samples, one.update_bytes) for one in found]),
        memory_curve(held), tuple(tried),
    )  # fmt: skip


def _bytes_curve(sizes: Sequence[tuple[int, int]]) -> Curve | None:
    """None where one of them was not seen."""
    return memory_curve(sizes) if all(nbytes for _, nbytes in sizes) else None


def memory_curve(sizes: Sequence[tuple[int, int]]) -> Curve:
    """Through bytes by size."""
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
    if curve.worst > _MOST_MISSED:
        miss = max(found, key=lambda one: abs(curve.at(one.samples).estimate / one.step_ns - 1))
        twice = most / least < found[-1].step_ns / found[0].step_ns
        return (
            "a step of twice as many samples takes more than twice as long, and too few sizes were "
            "measured to say from where on"
            if twice
            else f"the lines miss the {miss.samples} samples that were measured by "
            f"{100 * curve.worst:.1f} %"
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


def limit_of(limit: int | str) -> int:
    """Bytes of a limit, as a number or as text.

    Raises:
        InvalidArgumentError: no size.
    """
    if isinstance(limit, str):
        return parse_bytes(limit, "limit")
    if limit <= 0:
        raise InvalidArgumentError("limit", f"{format_bytes(limit)} is no memory")
    return limit
