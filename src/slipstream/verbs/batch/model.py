"""Predict time, memory, throughput and the largest batch that fits from a few measured sizes."""

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

# Share of a limit to use: two runs of one step differ by about the remainder.
_USABLE_SHARE = 0.99
_TIME_TOLERANCE, _MEMORY_TOLERANCE = 0.02, 0.005
_MIN_NS = 1e3
# Lines that deviate more from a measured time are not used for prediction.
_MAX_DEVIATION = 0.06
# Share of the highest throughput beyond which a larger batch is not worth its memory.
_WORTHWHILE_SHARE = 0.97
_MIN_SPREAD = 0.005
# Relative rounding error of an integer computed in floating point.
_ROUNDING = 1e-9
_MEMORY_SPREAD = 0.002


@dataclass(frozen=True)
class BatchModel:
    """A step's time and memory as a function of its batch size.

    Attributes:
        workload: its name.
        samples: current batch size.
        quantum: sizes are multiples of it.
        measured: measurements by size.
        too_large: sizes that could not be measured because they did not fit.
        tried: sizes that were run under `limit_bytes`, in order: the largest one with measured
            memory, then the predicted one, then corrections. Empty if none was run.
        limit_bytes: memory limit of the process.
        clock: "cpu" for CPU time of one thread, else "wall".
        device: "cpu" or "cuda".
        why_not: None, or why times are not predicted; then only measured times are available.
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
        """Return a step's time in ns, with a 90 % interval that widens outside measured sizes.

        Raises:
            InvalidArgumentError: less than one sample.
            MeasurementError: times are not predicted (`why_not`), and this size was not measured.
        """
        predicted = self._time.at(samples)
        if self.why_not is None:
            return predicted
        for sample in self.measured:
            if sample.samples == samples:
                half = max(sample.spread, _MIN_SPREAD) * sample.step_ns
                low, high = sample.step_ns - half, sample.step_ns + half
                return Interval(sample.step_ns, low, high, 0.9, "measured")
        raise MeasurementError(
            f"the time of {samples:g} samples is not predicted: {self.why_not}",
            remedy="choose a measured size: "
            + ", ".join(str(sample.samples) for sample in self.measured),
        )

    def memory(self, samples: float) -> Interval:
        """Return the peak bytes of all tensors.

        Raises:
            InvalidArgumentError: less than one sample.
            MeasurementError: the allocator's events were not recorded.
        """
        if self._memory is None:
            raise MeasurementError(
                "the memory of this step's tensors was not recorded",
                remedy="process() returns the memory of the whole process",
            )
        passes = self._memory.at(samples)
        update = self._update.at(samples) if self._update is not None else passes
        return max(passes, update, key=lambda interval: interval.estimate)

    def process(self, samples: float) -> Interval:
        """Return the private memory of the whole process in bytes, which a limit counts.

        Raises:
            InvalidArgumentError: less than one sample.
        """
        return self._process.at(samples)

    def throughput(self, samples: float) -> Interval:
        """Return samples per second."""
        step_time = self.time(samples)
        low, middle, high = (
            samples / max(ns, 1.0) * 1e9
            for ns in (step_time.high, step_time.estimate, step_time.low)
        )
        return Interval(middle, low, high, step_time.level, step_time.estimator)

    @property
    def needs_more(self) -> bool:
        """Whether one line misses a measured time by more than the tolerance, as with a knee."""
        line = fit(_times(self.measured), math.inf)
        misses = [abs(line.at(s.samples).estimate / s.step_ns - 1) for s in self.measured]
        return max(misses) > _TIME_TOLERANCE

    @property
    def max_throughput(self) -> float:
        """Samples per second that no batch exceeds."""
        if self.why_not is not None:
            return max(sample.samples / sample.step_ns * 1e9 for sample in self.measured)
        endless = 1e9 / self._time.last_slope
        if self._time.knee is None:
            return endless
        return max(endless, self.throughput(self._time.knee).estimate)

    @property
    def knee(self) -> int | None:
        """Number of samples beyond which each costs a different time; None if there is none."""
        return None if self._time.knee is None else round(self._time.knee)

    @property
    def dearer_beyond_knee(self) -> float:
        """Cost of a sample beyond the knee relative to one below it; 1 without a knee."""
        return self._time.last_slope / self._time.slope if self._time.slope > 0 else math.inf

    def max_batch(self, limit: int | str | None = None) -> int:
        """Return the largest batch that fits; 0 if not even the smallest does.

        For `limit_bytes` it is the largest that ran, if any was tried; for another limit it is
        predicted.

        Args:
            limit: private memory of the process in bytes, or as text ("8GiB"); None for
                `limit_bytes`.

        Raises:
            InvalidArgumentError: an invalid size.
        """
        limit_bytes = self.limit_bytes if limit is None else limit_of(limit)
        own_limit = limit_bytes == self.limit_bytes
        if own_limit and self.largest_tried is not None:
            return self.largest_tried
        largest = self._process.largest_within(limit_bytes * _USABLE_SHARE)
        # A measured size that fitted fits.
        measured = [s.samples for s in self.measured if s.process_bytes <= limit_bytes]
        largest = max([largest, *measured])
        failed = [*self.too_large, *(try_.samples for try_ in self.tried if not try_.ran)]
        if failed and own_limit:
            largest = min(largest, min(failed) - self.quantum)
        if math.isinf(largest):
            return max(sample.samples for sample in self.measured)
        return int(largest * (1 + _ROUNDING)) // self.quantum * self.quantum

    @property
    def largest_tried(self) -> int | None:
        """The largest batch that ran under `limit_bytes`; None if none was tried."""
        return max((try_.samples for try_ in self.tried if try_.ran), default=None)

    def for_throughput(self, throughput: float) -> int | None:
        """Return the smallest batch with this many samples per second; None if no batch has.

        Raises:
            InvalidArgumentError: not a positive number.
            MeasurementError: times are not predicted.
        """
        if not throughput > 0 or not math.isfinite(throughput):
            raise InvalidArgumentError(
                "throughput", f"{throughput} is not a positive number of samples per second"
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
            remainder = 1 - rate * slope
            needed = rate * bias / remainder if remainder > 0 else math.inf
            needed = max(needed, first)
            if math.isfinite(needed) and needed <= last:
                return math.ceil(needed / self.quantum * (1 - _ROUNDING)) * self.quantum
        return None

    def best(self, limit: int | str | None = None) -> int:
        """Return the smallest batch with 97 % of the throughput of the fastest one that fits.

        0 if none fits.
        """
        largest = self.max_batch(limit)
        if largest < 1:
            return 0
        if self.why_not is not None:
            fits = [s for s in self.measured if s.samples <= largest] or [self.measured[0]]
            fastest = max(s.samples / s.step_ns for s in fits)
            enough = _WORTHWHILE_SHARE * fastest
            return next(s.samples for s in fits if s.samples / s.step_ns >= enough)
        candidates = [largest] if self._time.knee is None or self._time.knee > largest else [
            largest, max(int(self._time.knee) // self.quantum, 1) * self.quantum
        ]  # fmt: skip
        fastest = max(self.throughput(size).estimate for size in candidates)
        smallest = self.for_throughput(_WORTHWHILE_SHARE * fastest)
        return largest if smallest is None else min(smallest, largest)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON payload: measurements, fitted lines and derived values."""
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
            "measured": [vars(sample) for sample in self.measured],
            "too_large": list(self.too_large),
            "tried": [vars(try_) for try_ in self.tried],
            "limit_bytes": self.limit_bytes,
            "reason": self.why_not,
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
    """Fit lines to the measurements.

    Args:
        far, tried: larger sizes of which only the process's memory is used.
    """
    times = fit(_times(found), _TIME_TOLERANCE)
    passes = [s for s in found if s.tensor_bytes > s.update_bytes] or found
    ran: list[BatchSample | Try] = [*found, *far, *tried]
    process_sizes = [(run.samples, run.process_bytes) for run in ran if run.process_bytes]
    # The peak of a small batch may be that of its update, which shows nothing of the passes.
    fitted = passes if len({sample.samples for sample in passes}) > 1 else found
    return BatchModel(
        name, facts.samples, facts.quantum, tuple(found), too_large, limit_bytes, facts.clock,
        facts.device, _why_not(times, found), times,
        _bytes_curve([(sample.samples, sample.tensor_bytes) for sample in fitted]),
        _bytes_curve([(sample.samples, sample.update_bytes) for sample in found]),
        memory_curve(process_sizes), tuple(tried),
    )  # fmt: skip


def _bytes_curve(sizes: Sequence[tuple[int, int]]) -> Curve | None:
    return memory_curve(sizes) if all(nbytes for _, nbytes in sizes) else None


def memory_curve(sizes: Sequence[tuple[int, int]]) -> Curve:
    return fit([Point(b, nbytes, _MEMORY_SPREAD) for b, nbytes in sizes], _MEMORY_TOLERANCE)


def _why_not(curve: Curve, found: Sequence[BatchSample]) -> str | None:
    """Return why the lines cannot be used for prediction (Skyline's rules), or None."""
    smallest, largest = found[0].samples, found[-1].samples
    if curve.slope * (largest - smallest) < _MIN_NS or curve.last_slope <= 0:
        return (
            f"steps of {smallest} and of {largest} samples take "
            f"{format_duration(found[0].step_ns)} and {format_duration(found[-1].step_ns)}: "
            "their time hardly depends on the batch"
        )
    if curve.worst > _MAX_DEVIATION:
        miss = max(found, key=lambda s: abs(curve.at(s.samples).estimate / s.step_ns - 1))
        twice = largest / smallest < found[-1].step_ns / found[0].step_ns
        return (
            "a step of twice as many samples takes more than twice as long, and too few sizes were "
            "measured to find where that begins"
            if twice
            else f"the lines deviate from the {miss.samples} samples that were measured by "
            f"{100 * curve.worst:.1f} %"
        )
    endless = 1e9 / min(curve.slope, curve.last_slope)
    fastest = max(found, key=lambda sample: sample.samples / sample.step_ns)
    rate = fastest.samples / fastest.step_ns * 1e9
    if rate > endless * (1 + _TIME_TOLERANCE):
        return (
            f"{fastest.samples} samples were measured at {rate:.4g} samples/s, above the maximum "
            "of the lines"
        )
    return None


def _times(found: Sequence[BatchSample]) -> list[Point]:
    return [Point(s.samples, s.step_ns, max(s.spread, _MIN_SPREAD)) for s in found]


def limit_of(limit: int | str) -> int:
    """Return a memory limit in bytes, from a number or text.

    Raises:
        InvalidArgumentError: not a positive size.
    """
    if isinstance(limit, str):
        return parse_bytes(limit, "limit")
    if limit <= 0:
        raise InvalidArgumentError("limit", f"{format_bytes(limit)} is not a positive size")
    return limit
