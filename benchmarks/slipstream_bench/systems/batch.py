"""``slipstream bench batch``: time and memory at unmeasured batch sizes, and the largest batch.

Every model is measured at all sizes alternately in one process. The model of its batch gets the
sizes that `batch_model` would choose, and predicts half, two, four and eight times the original
batch.
"""

from __future__ import annotations

import contextlib
import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from slipstream.errors import SlipstreamError
from slipstream.verbs.batch.model import model_of
from slipstream.verbs.batch.samples import BatchSample, DoesNotFitError, Sampler
from slipstream.verbs.batch.search import FACTORS, batch_model, more_sizes, round_size
from slipstream.verbs.children import DEFAULT_TIMEOUT_S, room_bytes
from slipstream.workload import Workload
from slipstream_bench import models
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged

# A batch so small that eight times it takes seconds at most.
_FULL = {
    "conv_net": 16, "vision_transformer": 8, "language_model": 2, "tiny_language_model": 2,
    "recurrent_network": 8, "recommender": 128, "perceptron": 64,
}  # fmt: skip
_QUICK = ("perceptron", "tiny_language_model")
_ASKED = (0.5, 2.0, 4.0, 8.0)
_MEDIAN, _MOST, _MEMORY, _LIMIT = 4.0, 8.0, 2.0, 5.0
_QUICK_S, _FULL_S = 20.0, 45.0
# Duration of the search for a largest batch and its proof: quick runs omit them, unless `only`
# selects them alone.
_LARGEST_S = 150.0
_TRIALS_QUICK, _TRIALS_FULL = 3, 100
_TIGHT_BYTES, _TOO_LARGE = 1 << 29, 20_000
_SAFE = "sizes that do not fit, told and survived"
_FITS = "largest batch under a memory limit"


@dataclass(frozen=True)
class _Cell:
    """A model at `times` its batch: predicted over measured, less 1, in percent.

    A time that is not predicted counts as 100, with the reason in `refused`.
    """

    model: str
    times: float
    time: float
    memory: float
    refused: str = ""


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield a row per model, then the summary rows."""
    cells: list[_Cell] = []
    for model in _FULL if options.full else _QUICK:
        name = f"{model}: other batch sizes"
        known_rows = options.done if options.only in name else options.recorded
        if name in known_rows:
            cells += [_Cell(**cell) for cell in known_rows[name].data.get("cells", ())]
        elif options.wants(name):
            try:
                measured = _measure(model, options)
            except SlipstreamError as error:
                yield not_judged(name, "%", f"|time| <= {_MOST:g}", error.what)
                continue
            cells += measured
            yield _row(name, measured)
    if cells and (options.full or not options.only):
        yield from _judged(cells)
    if options.wants(_SAFE):
        yield _safety(options)
    for model in _FULL if options.full else _QUICK[:1]:
        if options.wants(name := f"{_FITS}: {model}", _LARGEST_S):
            options.progress(name)
            yield _largest(name, model)


def _workload(model: str) -> Workload:
    return Workload.parse(f"{Path(models.__file__)}:{model}", batch_size=_FULL[model])


def _sampler(
    model: str,
    *,
    limit_bytes: int | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Sampler:
    return Sampler(
        _workload(model), threads=1, limit_bytes=limit_bytes or room_bytes(),
        timeout_s=DEFAULT_TIMEOUT_S, report=report,
    )  # fmt: skip


def _measure(model: str, options: BenchOptions) -> list[_Cell]:
    with _sampler(model, report=lambda line: options.progress(f"{model}: {line}")) as sampler:
        first = sampler.first()
        facts = sampler.facts
        assert facts is not None
        own = facts.samples
        fitted = sorted({round_size(own * factor, facts.quantum) for factor in FACTORS})
        spare = more_sizes(fitted, facts.quantum)
        targets = {times: round(own * times) for times in _ASKED}
        sizes = sorted({*fitted, *spare, *targets.values()})
        budget_s = _FULL_S if options.full else _QUICK_S
        times = {timing.samples: timing for timing in sampler.timings(sizes, budget_s)}
        memory = {own: first} | {n: sampler.sample(n) for n in sizes if n != own}

    def seen(sizes: Sequence[int]) -> list[BatchSample]:
        return [memory[n].timed(times[n]) for n in sizes]

    batch = model_of(model, facts, seen(fitted), limit_bytes=0)
    if batch.needs_more:
        batch = model_of(model, facts, seen(sorted({*fitted, *spare})), limit_bytes=0)
    refused = batch.why_not or ""
    return [
        _Cell(
            model, factor,
            100 * (batch.time(n).estimate / times[n].step_ns - 1) if batch.why_not is None else 100,
            100 * (batch.memory(n).estimate / memory[n].tensor_bytes - 1), refused,
        )
        for factor, n in targets.items()
    ]  # fmt: skip


def _row(name: str, cells: Sequence[_Cell]) -> Bar:
    detail = "; ".join(
        f"{cell.times:g}x: {cell.time:.2f} % time, {cell.memory:.2f} % memory" for cell in cells
    )
    if cells[0].refused:
        detail += f"; times are not predicted, which counts as 100 %: {cells[0].refused}"
    worst = max(abs(cell.time) for cell in cells)
    return at_most(
        name, worst, _MOST, "%", n=len(cells), detail=detail,
        data={"cells": [asdict(cell) for cell in cells]},
    )  # fmt: skip


def _judged(cells: Sequence[_Cell]) -> Iterator[Bar]:
    n = len(cells)
    worst = max(cells, key=lambda cell: abs(cell.time))
    yield at_most(
        "error of predicted time, median",
        median(abs(cell.time) for cell in cells),
        _MEDIAN,
        "%",
        n=n,
    )
    yield at_most(
        "error of predicted time, maximum", abs(worst.time), _MOST, "%", n=n,
        detail=f"{worst.model} at {worst.times:g}x",
    )  # fmt: skip
    yield at_most(
        "error of predicted memory, maximum", max(abs(cell.memory) for cell in cells), _MEMORY, "%",
        n=n,
    )  # fmt: skip


def _largest(name: str, model: str) -> Bar:
    """Check that the reported largest batch runs, and that one a tenth larger does not.

    The search happens in a process whose address space is limited. Other processes, which know
    nothing of the search, judge it: a size runs if it runs in three of three processes.
    """
    target = f"runs, 1.1x fails; within {_LIMIT:g} %"
    try:
        with _sampler(model) as sampler:
            first, facts = sampler.first(), sampler.facts
            assert facts is not None
        # Half of it for what does not depend on the batch, as in many real programs.
        limit = 2 * first.process_bytes
        with _address_space(limit + facts.mapped_bytes), _sampler(model) as sampler:
            began = time.monotonic()
            search = batch_model(_workload(model), limit=limit, threads=1, budget=4.0)
            elapsed_s = time.monotonic() - began
            reported, larger = search.max_batch(), math.ceil(1.1 * search.max_batch())
            sampler.facts = facts
            runs, fails = bool(sampler.needs(reported)), not sampler.needs(larger)
            low, high = (
                (reported, larger)
                if runs and fails
                else (round(reported / 1.5), round(reported * 1.5))
            )
            most = _most_that_runs(sampler, low, high)
    except SlipstreamError as error:
        return not_judged(name, "%", target, error.what)
    off = 100 * (reported / most - 1)
    lines = search.tried[1].samples if len(search.tried) > 1 else reported
    detail = (
        f"{reported} samples in {limit / 2**20:.0f} MiB (RLIMIT_AS less libraries): "
        f"{'runs' if runs else 'fails'}; {larger} {'fails' if fails else 'runs'}; "
        f"lines alone: {lines} ({100 * (lines / most - 1):+.1f} %), then {len(search.tried) - 1} "
        f"tries; {elapsed_s:.0f} s with what was measured"
    )
    return Bar(name, off, "%", target, runs and fails and abs(off) <= _LIMIT, 1, detail)


def _most_that_runs(sampler: Sampler, low: int, high: int) -> int:
    """Return the largest batch that runs, by bisection, to about a hundredth."""
    while high - low > max(low // 100, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if sampler.needs(middle) else (low, middle)
    return low


@contextlib.contextmanager
def _address_space(limit: int) -> Iterator[None]:
    """Limit the address space of processes started within; this one already has less."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _safety(options: BenchOptions) -> Bar:
    """Run steps far too large for a limit: each is reported, and the caller survives."""
    trials = _TRIALS_FULL if options.full else _TRIALS_QUICK
    reported = 0
    with _sampler("perceptron", limit_bytes=_TIGHT_BYTES) as sampler:
        sampler.first()
        for trial in range(trials):
            options.progress(f"{_SAFE}: {trial + 1} of {trials}")
            try:
                # From slightly to a hundred times too large.
                sampler.sample(round(_TOO_LARGE * 100 ** (trial / max(trials - 1, 1))))
            except DoesNotFitError:
                reported += 1
    return at_least(_SAFE, reported, trials, f"of {trials}", n=trials)
