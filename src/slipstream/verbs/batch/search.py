"""batch_model: time, memory and throughput of a step against its batch size, from a few samples.

Source: Yu, Grossman and Pekhimenko, "Skyline: Interactive in-editor computational performance
profiling for deep neural network training", UIST 2020: two lines through three sizes. Here sizes
lie far apart, as neighbours say little of what is far away, and a line may have a knee.
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

# Of the batch as it is: far apart, and none of them a power of two, which libraries like best.
_FACTORS = (1.0, 2.5, 6.0)
_FEWEST, _MOST_SIZES = 3, 6
# Samples that kernels work on at once, or a multiple of it.
_BLOCK = 8
# Where fixed costs show.
_BELOW = 0.6
FACTORS = (_BELOW, *_FACTORS)
"""The sizes that are measured first, in batches as they are."""
# How many times the largest measured size the limit lies away for its own look to be worth it.
_FAR = 1.5
# Of the largest batch that a limit is expected to allow: memory is looked at there, too.
_NEAR_LIMIT = 0.8
# A size is tried where the memory it is expected to need leaves this much of what there is.
_SAFE_SHARE = 0.85
# The largest batch is looked for no longer than this, and a try takes about so many steps.
_TRYING_S, _STEPS_A_TRY, _MOST_TRIES = 180.0, 12, 12


def batch_model(
    workload: Workload | str,
    samples: str | Sequence[int] = "auto",
    *,
    limit: int | str | None = None,
    try_largest: bool = True,
    threads: int = 0,
    budget: str | float = "15s",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    report: Callable[[str], None] = lambda line: None,
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
        try_largest: whether the largest batch that is predicted to fit into `limit` is run, and
            corrected until it holds; at most for three minutes, only on a CPU, and only where
            `limit` is given and `samples` is "auto".
        threads: intra-op threads, 0 for what the workload sets.
        budget: about how long steps are timed for, each time the sizes are taken in turns.
        timeout_s: a process that is silent for so long is stopped.
        report: called with a short line whenever there is progress.

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
    wanted = None if limit is None else limit_of(limit)
    sampler = Sampler(
        workload, threads=threads, limit_bytes=_room(wanted), timeout_s=timeout_s, report=report
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
        if asked is None and limit is not None and try_largest:
            model = search.try_largest(model)
    return model


def _room(wanted: int | None, mapped_bytes: int = 0) -> int | None:
    """The least of what is asked for and what there is."""
    limits = [one for one in (wanted, room_bytes(mapped_bytes)) if one is not None]
    return min(limits, default=None)


class _Search:
    """Which sizes to try: memory, what fitted and what did not decide."""

    def __init__(self, sampler: Sampler, budget_s: float, wanted: int | None) -> None:
        self._sampler = sampler
        self._budget_s = budget_s
        self._wanted = wanted
        self.limit_bytes = 0  # memory that the workload may have
        self._far: list[BatchSample] = []
        self.samples: dict[int, BatchSample] = {}
        self.too_large: set[int] = set()

    @property
    def facts(self) -> Facts:
        assert self._sampler.facts is not None
        return self._sampler.facts

    def begin(self, asked: Sequence[int] | None) -> None:
        """The batch as it is; it tells what sizes there can be."""
        first = self._sampler.first()
        # A limit that is given is of the device's memory, where there is one.
        there = self.facts.device_bytes or _room(None, self.facts.mapped_bytes) or 0
        self.limit_bytes = min(there, self._wanted or there)
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
        base = self.facts.samples
        for factor in _FACTORS[1:]:
            size = min(self._whole(base * factor), self._affordable())
            while size > max(self.samples) * 1.1 and not self.try_size(size):
                # Half way, geometrically, between what fits and what does not.
                size = self._whole(math.sqrt(max(self.samples) * size))
        self.try_size(self._whole(base * _BELOW))
        for factor in _FACTORS[1:]:
            if len(self.samples) < _FEWEST:
                self.try_size(self._whole(min(self.samples) / factor))
        if len(self.samples) < 2:
            raise WorkloadError(
                f"a step of {base} samples fits, and no batch of another size does",
                remedy="give sizes to try: samples=[...]",
            )

    def look_ahead(self) -> None:
        """See what memory is needed near the limit: heaps are not as straight as lines."""
        points = [(size, one.process_bytes) for size, one in self.samples.items()]
        most = memory_curve(points).largest_within(_NEAR_LIMIT * self.limit_bytes)
        last = self.samples[max(self.samples)]
        affordable = last.samples * self._budget_s * 1e9 / 4 / max(last.step_ns, 1.0)
        size = self._whole(min(most, affordable))
        if size > _FAR * last.samples and not self.too_large:
            try:
                self._far.append(self._sampler.sample(size))
            except DoesNotFitError:
                self.too_large.add(size)

    def try_largest(self, model: BatchModel) -> BatchModel:
        """`model`, with the largest batch that it predicts run and corrected."""
        if self.facts.device != "cpu":
            return model  # what torch reserves there has no limit of ours
        # What was sampled ran under this limit already.
        known = {one.samples: one.process_bytes for one in [*self.samples.values(), *self._far]}
        tries = Tries(known, self.limit_bytes)
        last = model.measured[-1]
        ends = time.monotonic() + _TRYING_S
        size: int | None = max(model.max_batch(), max(known) + model.quantum)
        while size is not None and len(tries) < _MOST_TRIES - 1:
            step_s = last.step_ns / 1e9 * size / last.samples
            if time.monotonic() + _STEPS_A_TRY * step_s > ends:
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
        return [self.samples[one.samples].timed(one) for one in timings]

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
                held = [(one.samples, one.process_bytes) for one in known]
                most = min(most, memory_curve(held).largest_within(room))
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


def more_sizes(sizes: Sequence[int], quantum: int) -> list[int]:
    """Sizes to add where one line misses what was measured: in the middle of the widest gaps."""
    gaps = sorted(itertools.pairwise(sizes), key=lambda gap: gap[0] / gap[1])
    wanted = [whole(math.sqrt(low * high), quantum) for low, high in gaps]
    new = [size for size in dict.fromkeys(wanted) if size not in sizes]
    return sorted(new[: _MOST_SIZES - len(sizes)])


def _sizes(samples: str | Sequence[int]) -> list[int]:
    if isinstance(samples, str):
        raise InvalidArgumentError(
            "samples",
            f"'{samples}' is neither 'auto' nor a list of sizes",
            remedy="as [16, 40, 96]",
        )
    sizes = sorted(set(samples))
    if not all(type(size) is int and size > 0 for size in sizes):
        raise InvalidArgumentError(
            "samples", "sizes are whole numbers from 1 on", remedy="as 16,40,96"
        )
    if len(sizes) < 2:
        raise InvalidArgumentError(
            "samples", "two sizes at least tell how the batch matters", remedy="as 16,40,96"
        )
    return sizes
