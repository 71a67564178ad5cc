"""Cells of the accuracy grid: one model, one technique, predicted and then measured.

A family is profiled once, eagerly. Its techniques are predicted from that recording, then applied
for real and measured against the original in turns, a few of them at a time.

What glibc's heap gives back between steps differs from launch to launch of one program by up to a
seventh of a step (see `slipstream.graph.page_faults`): no prediction from one launch can be judged
by another to a few percent. So both sides keep their pages, as `allocator` makes them; families
with the heap as it is are a group of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream import technique
from slipstream.errors import SlipstreamError
from slipstream.graph import Graph
from slipstream.measure.comparison import Comparison
from slipstream.measure.records import Verdict
from slipstream.verbs.predicting import predict
from slipstream.verbs.profiling import profile
from slipstream.verbs.proving.sides import prove
from slipstream.verbs.proving.summary import tensor_memory
from slipstream.verbs.results import Prediction
from slipstream.workload import Workload
from slipstream_bench import models
from slipstream_bench.rows import Bar, not_judged

# A measured interval wider than this (half-width) cannot show the errors the bars speak of.
_WIDEST = 0.06
_TARGET = 0.03
# More arms at once would share the budget too thinly, and memory.
_ARMS = 4
_WORST = 12.0
AS_IT_IS = "(heap-as-it-is)"


@dataclass(frozen=True)
class Cell:
    """Speed-ups per sample: how many times faster, as predicted and as measured.

    Attributes:
        predicted, predicted_low, predicted_high: with the printed 90 % interval.
        measured, measured_low, measured_high: NaN when the measurement is not judged.
        memory_error: the most that tensors of a step take, predicted against measured, relative;
            NaN where nobody watched.
        note: why it is not.
        applies: whether the technique applies to the model at all.
    """

    model: str
    technique: str
    predicted: float
    predicted_low: float
    predicted_high: float
    measured: float = math.nan
    measured_low: float = math.nan
    measured_high: float = math.nan
    memory_error: float = math.nan
    note: str = ""
    applies: bool = True

    @property
    def judged(self) -> bool:
        """Whether the measurement is good enough to judge a prediction by."""
        return math.isfinite(self.measured)

    @property
    def error(self) -> float:
        """Predicted speed-up against the measured one, relative."""
        return self.predicted / self.measured - 1

    @property
    def inside(self) -> bool:
        """Whether the printed interval and the measured one have a value in common."""
        return self.predicted_low <= self.measured_high and self.measured_low <= self.predicted_high

    @property
    def name(self) -> str:
        """The row's key."""
        return f"{self.model} {self.technique}"

    def to_row(self) -> Bar:
        """The cell as a row of the bench, from whose data `from_row` makes it again."""
        # JSON has no NaN.
        data = {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in asdict(self).items()
        }
        if not self.judged:
            return not_judged(self.name, "%", f"|error| <= {_WORST:g}", self.note, data)
        detail = (
            f"predicted {self.predicted:.4f}x "
            f"[{self.predicted_low:.4f}, {self.predicted_high:.4f}], "
            f"measured {self.measured:.4f}x [{self.measured_low:.4f}, {self.measured_high:.4f}]"
        )
        error = 100 * self.error
        holds = abs(error) <= _WORST
        return Bar(self.name, error, "%", f"|error| <= {_WORST:g}", holds, 1, detail, data=data)

    @classmethod
    def from_row(cls, row: Bar) -> Cell:
        """The cell behind a recorded row."""
        values: dict[str, Any] = {k: math.nan if v is None else v for k, v in row.data.items()}
        return cls(**values)


def workload_of(family: str) -> Workload:
    """A family of this bench; as it is where its name ends so, else with a heap that keeps pages.

    Args:
        family: a function of `slipstream_bench.models`; followed by `AS_IT_IS` for one whose heap
            is left alone.
    """
    workload = Workload.parse(f"{Path(models.__file__)}:{family.removesuffix(AS_IT_IS)}")
    if family.endswith(AS_IT_IS):
        return workload
    return workload.with_technique(*technique.parse("allocator"))


def measure_cells(
    family: str,
    workload: Workload,
    techniques: Sequence[str],
    budget: str,
    report: Callable[[str], None],
    widest: float = _WIDEST,
    graph: Graph | None = None,
) -> Iterator[Cell]:
    """The cells of one family.

    Args:
        family: what its cells are named after.
        budget: of measuring up to four techniques beside the original.
        widest: half-width of a measured interval from which on a cell is not judged.
        graph: the step where it was recorded already.
    """
    if graph is None:
        report(f"{family}: profiling")
        # What a technique needs to have recorded besides; compiling takes long, so only if asked
        # for.
        needs = frozenset({"regions"} if any("compile" in name for name in techniques) else ())
        graph = profile(
            workload, threads=1, needs=needs, report=lambda line: report(f"{family}: {line}")
        )
    found = predict(graph, techniques, report=lambda line: report(f"{family}: {line}"))
    nothing = (math.nan,) * 3
    for p in found:
        if p.why_not is not None:
            yield Cell(family, p.technique, *nothing, note=f"does not apply: {p.why_not}",
                       applies=False)  # fmt: skip
    usable = [p for p in found if p.why_not is None]
    for begin in range(0, len(usable), _ARMS):
        some = usable[begin : begin + _ARMS]
        names = [p.technique for p in some]
        report(f"{family}: measuring {', '.join(names)}")
        try:
            result = prove(
                workload, names, threads=1, target=_TARGET, budget=budget, quality_budget=None
            )
        except SlipstreamError as error:
            yield from (_cell(family, p, None, widest, error.what) for p in some)
            continue
        yield from (_cell(family, p, result, widest) for p in some)


def _cell(
    family: str, p: Prediction, result: Comparison | None, widest: float, note: str = ""
) -> Cell:
    predicted = (p.speedup, 1 / p.high, 1 / p.low)
    if result is None:
        return Cell(family, p.technique, *predicted, note=note)
    try:
        claim = result.ratio(p.technique, metric=p.metric)
    except SlipstreamError as error:
        return Cell(family, p.technique, *predicted, note=error.what)
    if claim.verdict is Verdict.UNTRUSTWORTHY:
        return Cell(
            family, p.technique, *predicted,
            note=claim.reason or "the baseline differs from itself",
        )  # fmt: skip
    # Few blocks give an interval from nothing to infinity.
    if not claim.low or claim.high / claim.low - 1 > 2 * widest:
        wide = f"measured too widely: time ratio [{claim.low:.3f}, {claim.high:.3f}]"
        return Cell(family, p.technique, *predicted, note=wide)
    return Cell(
        family, p.technique, *predicted,
        1 / claim.ratio, 1 / claim.high, 1 / claim.low,
        memory_error=_memory_error(p, result),
    )  # fmt: skip


def _memory_error(p: Prediction, result: Comparison) -> float:
    watched = tensor_memory(result.experiment).get(p.technique)
    if watched is None or not p.memory[1]:
        return math.nan
    return p.memory[1] / watched.measured - 1
