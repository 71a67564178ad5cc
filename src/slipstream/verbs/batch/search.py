"""batch_model: time, memory and throughput of a step against its batch size, from a few samples.

Source: Yu, Grossman and Pekhimenko, "Skyline: Interactive in-editor computational performance
profiling for deep neural network training", UIST 2020: two lines through three sizes. Here sizes
are far apart, since neighbours predict distant sizes badly, and a line may have a knee.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence

from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.measure.comparison import seconds
from slipstream.verbs.batch.model import BatchModel, limit_of, memory_curve, model_of
from slipstream.verbs.batch.samples import BatchSample, DoesNotFitError, Facts, Sampler
from slipstream.verbs.batch.tries import Tries
from slipstream.verbs.children import DEFAULT_TIMEOUT_S, room_bytes
from slipstream.workload import Workload

# Multiples of the current batch: far apart, and none a power of two, which libraries favour.
_FACTORS = (1.0, 2.5, 6.0)
_MIN_SIZES, _MAX_SIZES = 3, 6
# Block size of many kernels.
_BLOCK = 8
# A smaller size, which shows fixed costs.
_BELOW_FACTOR = 0.6
FACTORS = (_BELOW_FACTOR, *_FACTORS)
"""Multiples of the current batch that are measured first."""
# Minimum ratio of the expected largest batch to the largest sample to look at memory near a limit.
_MIN_EXTRAPOLATION = 1.5
# Share of a limit at whose expected batch memory is measured, too.
_NEAR_LIMIT = 0.8
# A size is tried if its expected memory is at most this share of the limit.
_SAFE_SHARE = 0.85
# Time limit of the search for the largest batch, steps per try, and maximum number of tries.
_MAX_TRYING_S, _STEPS_PER_TRY, _MAX_TRIES = 180.0, 12, 12


def batch_model(
    workload: Workload | str,
    samples: str | Sequence[int] = "auto",
    *,
    limit: int | str | None = None,
    verify_largest: bool = True,
    threads: int = 0,
    budget: str | float = "15s",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    report: Callable[[str], None] = lambda line: None,
) -> BatchModel:
    """Measure `workload` at a few batch sizes and predict others.

    Each size runs in a separate process under a memory limit; one that does not fit only narrows
    the range. The batch is cut or repeated; if the step hides its batch, the argument
    ``batch_size`` of the workload's function sets it.

    Args:
        workload: a `Workload`, or a target as for `Workload.parse`.
        samples: at least two sizes to measure, or "auto": the current batch, two larger ones far
            apart (or smaller, if memory is short) and one below; two more if a line misses them.
        limit: private memory of the process in bytes or as text ("8GiB"): larger sizes are not
            tried, and it is the default of `BatchModel.max_batch`. None: the available memory.
        verify_largest: whether to run the largest batch that is predicted to fit into `limit`, and
            correct it until it does; for at most three minutes, on a CPU only, and only if `limit`
            is given and `samples` is "auto".
        threads: intra-op threads, 0 for the workload's setting.
        budget: approximate duration of timing steps, per round of all sizes.
        timeout_s: a process is stopped after this many seconds of silence.
        report: called with a short line of progress.

    Raises:
        InvalidArgumentError: invalid or fewer than two sizes; an invalid limit or budget.
        WorkloadError: the user's code failed, or its batch cannot be set.
        DoesNotFitError: neither the current batch nor a sixth of it fits.
        ChildError: a process hung.
    """
    if not isinstance(workload, Workload):
        workload = Workload.parse(workload)
    requested = None if samples == "auto" else _sizes(samples)
    budget_s = seconds(budget, "budget")
    wanted_bytes = None if limit is None else limit_of(limit)
    sampler = Sampler(
        workload,
        threads=threads,
        limit_bytes=_room(wanted_bytes),
        timeout_s=timeout_s,
        report=report,
    )
    with sampler:
        search = _Search(sampler, budget_s, wanted_bytes)
        search.begin(requested)
        if requested is not None:
            for size in requested:
                search.try_size(size)
        else:
            search.spread_out()
            if limit is not None:
                search.look_ahead()
        model = search.model(workload.name)
        if requested is None and model.needs_more:
            for size in more_sizes([s.samples for s in model.measured], model.quantum):
                search.try_size(size)
            model = search.model(workload.name)
        if requested is None and limit is not None and verify_largest:
            model = search.try_largest(model)
    return model


def _room(limit_bytes: int | None, mapped_bytes: int = 0) -> int | None:
    """Return the requested or the available memory, whichever is less; None if neither is known."""
    limits = [nbytes for nbytes in (limit_bytes, room_bytes(mapped_bytes)) if nbytes is not None]
    return min(limits, default=None)


class _Search:
    def __init__(self, sampler: Sampler, budget_s: float, requested_bytes: int | None) -> None:
        self._sampler = sampler
        self._budget_s = budget_s
        self._requested_bytes = requested_bytes
        self.limit_bytes = 0  # memory that the workload may have
        self._far: list[BatchSample] = []
        self.samples: dict[int, BatchSample] = {}
        self.too_large: set[int] = set()

    @property
    def facts(self) -> Facts:
        assert self._sampler.facts is not None
        return self._sampler.facts

    def begin(self, requested: Sequence[int] | None) -> None:
        first = self._sampler.first()
        # On a device, a given limit is for its memory.
        available = self.facts.device_bytes or _room(None, self.facts.mapped_bytes) or 0
        self.limit_bytes = min(available, self._requested_bytes or available)
        quantum = self.facts.quantum
        for size in requested or ():
            if size % quantum:
                raise InvalidArgumentError(
                    "samples",
                    f"{size} samples are not a whole batch: sizes are multiples of {quantum}",
                )
        if requested is None or first.samples in requested:
            self.samples[first.samples] = first

    def try_size(self, size: int) -> bool:
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
        """Sample sizes far apart: above the current batch within memory and time, and one below."""
        base = self.facts.samples
        for factor in _FACTORS[1:]:
            size = min(self._whole(base * factor), self._affordable())
            while size > max(self.samples) * 1.1 and not self.try_size(size):
                # Geometric mean of a size that fits and one that does not.
                size = self._whole(math.sqrt(max(self.samples) * size))
        self.try_size(self._whole(base * _BELOW_FACTOR))
        for factor in _FACTORS[1:]:
            if len(self.samples) < _MIN_SIZES:
                self.try_size(self._whole(min(self.samples) / factor))
        if len(self.samples) < 2:
            raise WorkloadError(
                f"a step of {base} samples fits, but no batch of another size does",
                remedy="pass sizes to try: samples=[...]",
            )

    def look_ahead(self) -> None:
        """Measure memory near the limit, where the allocator's overhead deviates from a line."""
        points = [(size, sample.process_bytes) for size, sample in self.samples.items()]
        expected = memory_curve(points).largest_within(_NEAR_LIMIT * self.limit_bytes)
        last = self.samples[max(self.samples)]
        affordable = last.samples * self._budget_s * 1e9 / 4 / max(last.step_ns, 1.0)
        size = self._whole(min(expected, affordable))
        if size > _MIN_EXTRAPOLATION * last.samples and not self.too_large:
            try:
                self._far.append(self._sampler.sample(size))
            except DoesNotFitError:
                self.too_large.add(size)

    def try_largest(self, model: BatchModel) -> BatchModel:
        if self.facts.device != "cpu":
            return model  # no limit applies to memory that torch reserves on a device
        # Samples ran under this limit already.
        process_bytes = {
            sample.samples: sample.process_bytes for sample in [*self.samples.values(), *self._far]
        }
        tries = Tries(process_bytes, self.limit_bytes)
        last = model.measured[-1]
        deadline = time.monotonic() + _MAX_TRYING_S
        size: int | None = max(model.max_batch(), max(process_bytes) + model.quantum)
        while size is not None and len(tries) < _MAX_TRIES - 1:
            step_s = last.step_ns / 1e9 * size / last.samples
            if time.monotonic() + _STEPS_PER_TRY * step_s > deadline:
                break
            tries.add(size, self._sampler.needs(size))
            size = tries.next_size(model.quantum)
        if not len(tries):
            return model
        return model_of(
            model.workload, self.facts, model.measured, limit_bytes=self.limit_bytes,
            too_large=model.too_large, far=self._far, tried=tries.judged(),
        )  # fmt: skip

    def model(self, name: str) -> BatchModel:
        return model_of(
            name, self.facts, self.times(), limit_bytes=self.limit_bytes,
            too_large=tuple(sorted(self.too_large)), far=self._far,
        )  # fmt: skip

    def times(self) -> list[BatchSample]:
        """Time all sizes, alternately if one process can run them."""
        sizes = sorted(self.samples)
        timings = None
        while self.facts.resizes and timings is None and len(sizes) > 1:
            try:
                timings = self._sampler.timings(sizes, self._budget_s)
            except DoesNotFitError:
                # It fitted alone, but not next to memory that other sizes left allocated.
                self.too_large.add(sizes.pop())
        if timings is None:
            timings = [self._sampler.alone(size, self._budget_s / len(sizes)) for size in sizes]
        return [self.samples[timing.samples].timed(timing) for timing in timings]

    def _whole(self, samples: float) -> int:
        return round_size(samples, self.facts.quantum)

    def _affordable(self) -> int:
        """Return the largest size that memory and time are expected to allow."""
        samples = [self.samples[size] for size in sorted(self.samples)]
        last = samples[-1]
        # An upper bound that attributes all of a step's time and memory to its samples.
        largest = last.samples * self._budget_s * 1e9 / 10 / max(last.step_ns, 1.0)
        if self.limit_bytes:
            budget_bytes = _SAFE_SHARE * self.limit_bytes
            if len(samples) > 1:
                process_sizes = [(sample.samples, sample.process_bytes) for sample in samples]
                largest = min(largest, memory_curve(process_sizes).largest_within(budget_bytes))
            else:
                largest = min(largest, last.samples * budget_bytes / last.process_bytes)
        return int(largest) // self.facts.quantum * self.facts.quantum


def round_size(samples: float, quantum: int) -> int:
    """Round to the nearest possible size, to a multiple of eight if it is large.

    Kernels work on blocks, so a partial block takes longer than its size suggests, and such sizes
    are rare in practice.
    """
    grain = quantum * (_BLOCK if samples >= 2 * _BLOCK * quantum else 1)
    return max(math.floor(samples / grain + 0.5), 1) * grain


def more_sizes(sizes: Sequence[int], quantum: int) -> list[int]:
    """Return sizes to add if one line misses measurements: in the middle of the widest gaps."""
    gaps = sorted(itertools.pairwise(sizes), key=lambda gap: gap[0] / gap[1])
    middles = [round_size(math.sqrt(low * high), quantum) for low, high in gaps]
    new = [size for size in dict.fromkeys(middles) if size not in sizes]
    return sorted(new[: _MAX_SIZES - len(sizes)])


def _sizes(samples: str | Sequence[int]) -> list[int]:
    if isinstance(samples, str):
        raise InvalidArgumentError(
            "samples",
            f"'{samples}' is neither 'auto' nor a list of sizes",
            remedy="for example [16, 40, 96]",
        )
    sizes = sorted(set(samples))
    if not all(type(size) is int and size > 0 for size in sizes):
        raise InvalidArgumentError(
            "samples", "sizes must be integers from 1", remedy="for example 16,40,96"
        )
    if len(sizes) < 2:
        raise InvalidArgumentError(
            "samples", "at least two sizes are needed", remedy="for example 16,40,96"
        )
    return sizes
