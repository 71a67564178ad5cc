"""``slipstream bench devices``: steps predicted for a device on which they were not recorded.

This processor with an older instruction set serves as another device: each model is recorded on
every level, predicted on the others, and measured there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from slipstream import technique
from slipstream.durations.levels import Level, levels_here
from slipstream.errors import SlipstreamError
from slipstream.verbs.batch.samples import Sampler
from slipstream.verbs.children import DEFAULT_TIMEOUT_S, room_bytes
from slipstream.verbs.devices.elsewhere import predict_device
from slipstream.verbs.profiling import profile
from slipstream.workload import Workload
from slipstream_bench import models
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged

_FULL = ("conv_net", "vision_transformer", "language_model", "recurrent_network", "perceptron")
_QUICK = ("perceptron", "tiny_language_model")
_AVERAGE, _WORST = 8.0, 25.0
_STEPS, _BUDGET_S = 16, 6.0
# Steps are timed on each level, then again on each, so that a machine that becomes busy in between
# does not look like a slow level.
_PASSES = 2
# Devices with at least this difference are ordered.
_DIFFERS = 0.05


@dataclass(frozen=True)
class _Cell:
    """A model recorded on one level: its speed-up on another."""

    model: str
    here: str
    there: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def to_row(self) -> Bar:
        detail = f"predicted {self.predicted:.4f}x, measured {self.measured:.4f}x"
        error = 100 * self.error
        holds = abs(error) <= _WORST
        name = f"{self.model} {self.here} to {self.there}"
        return Bar(name, error, "%", f"|error| <= {_WORST:g}", holds, 1, detail, data=asdict(self))


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield a row per model and pair of levels, then the summary rows."""
    levels = levels_here()
    if len(levels) < 2:
        yield not_judged(
            "cross-device error, average", "%", f"<= {_AVERAGE:g}",
            "this processor has one instruction set to choose from",
        )  # fmt: skip
        return
    cells: list[_Cell] = []
    for model in _FULL if options.full else _QUICK:
        known_rows = options.done if options.only in model else options.recorded
        recorded = [
            _Cell(**row.data) for row in known_rows.values() if row.data.get("model") == model
        ]
        if recorded:
            cells += recorded
        elif options.only in model:
            for cell in _measure(model, levels, options):
                cells.append(cell)
                yield cell.to_row()
    if cells and (options.full or not options.only):
        yield from _judged(cells)


def _measure(model: str, levels: Sequence[Level], options: BenchOptions) -> Iterator[_Cell]:
    workload = Workload.parse(f"{Path(models.__file__)}:{model}")
    # The cost of a heap's page faults differs between launches, and does not depend on the device.
    workload = workload.with_technique(*technique.parse("allocator"))
    graphs = {}
    try:
        for level in levels if options.full else levels[:1]:
            options.progress(f"{model}: recording with {level.name}")
            with _at(level):
                graphs[level.name] = profile(workload, threads=1, steps=_STEPS)
        measured = _step_times(workload, levels, options)
    except SlipstreamError as error:
        options.progress(f"{model}: {error.what}")
        return
    for here, target in itertools.product(graphs, [level.name for level in levels]):
        if here != target:
            options.progress(f"{model}: {here} to {target}")
            prediction = predict_device(graphs[here], target, report=options.progress)
            speedup = measured[here] / measured[target]
            yield _Cell(model, here, target, prediction.prediction.speedup, speedup)


def _step_times(
    workload: Workload, levels: Sequence[Level], options: BenchOptions
) -> dict[str, float]:
    """Return the minimum step time in ns, by level."""
    found: dict[str, list[float]] = {level.name: [] for level in levels}
    for _, level in itertools.product(range(_PASSES), levels):
        options.progress(f"{workload.name}: timing with {level.name}")
        sampler = Sampler(
            workload, threads=1, limit_bytes=room_bytes(), timeout_s=DEFAULT_TIMEOUT_S
        )
        with _at(level), sampler:
            found[level.name].append(sampler.alone(0, _BUDGET_S).step_ns)
    return {name: min(times) for name, times in found.items()}


@contextlib.contextmanager
def _at(level: Level) -> Iterator[None]:
    """Limit processes started within to this instruction set."""
    before = {name: os.environ.get(name) for name in level.environment}
    os.environ.update(level.environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _judged(cells: Sequence[_Cell]) -> Iterator[Bar]:
    errors = [100 * abs(cell.error) for cell in cells]
    models = len({cell.model for cell in cells})
    worst = max(cells, key=lambda cell: abs(cell.error))
    detail = (
        f"{models} models; worst {max(errors):.1f} %: {worst.model} {worst.here} to {worst.there}"
    )
    yield at_most(
        "cross-device error, average", sum(errors) / len(errors), _AVERAGE, "%", n=len(errors),
        detail=detail,
    )  # fmt: skip
    right = total = 0
    wrong = []
    for (model, here), group in _by_origin(cells).items():
        # The device of the recording is one of those ordered.
        ranked = [(1.0, 1.0), *((cell.predicted, cell.measured) for cell in group)]
        for first, second in itertools.combinations(ranked, 2):
            if max(first[1], second[1]) / min(first[1], second[1]) < 1 + _DIFFERS:
                continue
            total += 1
            if (first[0] > second[0]) == (first[1] > second[1]):
                right += 1
            else:
                wrong.append(f"{model} from {here}")
    detail = f"of {total} pairs that differ by 5 %" + (
        f"; wrong: {', '.join(wrong)}" if wrong else ""
    )
    yield at_least(
        "devices ordered rightly", 100 * right / max(total, 1), 100, "%", n=total, detail=detail
    )


def _by_origin(cells: Sequence[_Cell]) -> dict[tuple[str, str], list[_Cell]]:
    found: dict[tuple[str, str], list[_Cell]] = {}
    for cell in cells:
        found.setdefault((cell.model, cell.here), []).append(cell)
    return found
