"""Cells of the accuracy grid: one model and one technique, predicted and then measured.

A family is profiled once, eagerly. Its techniques are predicted from that recording, then applied
and measured alternately with the original, a few at a time.

The memory that glibc's heap releases between steps differs between launches of one program, by up
to a seventh of a step (see `slipstream.graph.page_faults`), so a launch cannot judge a prediction
from another launch to a few percent. Therefore both sides keep their pages, as `allocator` makes
them; families with an unchanged heap are a separate group.
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

# A measured interval wider than this (half-width) cannot show errors of the targets' size.
_WIDEST = 0.06
_TARGET = 0.03
# More arms at a time would leave too little budget and memory for each.
_ARMS = 4
_WORST = 12.0
AS_IT_IS = "(heap-as-it-is)"


@dataclass(frozen=True)
class Cell:
    """Predicted and measured speed-up per sample of a technique.

    Attributes:
        predicted, predicted_low, predicted_high: estimate with the printed 90 % interval.
        measured, measured_low, measured_high: NaN if the measurement is not judged.
        memory_error: relative error of the predicted peak tensor memory of a step; NaN if it was
            not measured.
        note: why the measurement is not judged.
        applies: whether the technique applies to the model.
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
        """Whether the measurement is precise enough to judge a prediction."""
        return math.isfinite(self.measured)

    @property
    def error(self) -> float:
        """Relative error of the predicted speed-up."""
        return self.predicted / self.measured - 1

    @property
    def inside(self) -> bool:
        """Whether the printed and the measured interval overlap."""
        return self.predicted_low <= self.measured_high and self.measured_low <= self.predicted_high

    @property
    def name(self) -> str:
        """The row's key."""
        return f"{self.model} {self.technique}"

    def to_row(self) -> Bar:
        """Return the row of the cell; `from_row` restores the cell from its data."""
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
        """Return the cell of a recorded row."""
        values: dict[str, Any] = {k: math.nan if v is None else v for k, v in row.data.items()}
        return cls(**values)


def workload_of(family: str) -> Workload:
    """Return a family of this bench, whose heap keeps its pages unless its name ends otherwise.

    Args:
        family: a function of `slipstream_bench.models`; followed by `AS_IT_IS` to keep the
            default heap.
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
    """Yield the cells of one family.

    Args:
        family: prefix of the names of its cells.
        budget: time to measure up to four techniques and the original.
        widest: half-width of a measured interval from which a cell is not judged.
        graph: the step, if it has been recorded.
    """
    if graph is None:
        report(f"{family}: profiling")
        # What techniques need to have recorded; compiling takes long, so only on request.
        needs = frozenset({"regions"} if any("compile" in name for name in techniques) else ())
        graph = profile(
            workload, threads=1, needs=needs, report=lambda line: report(f"{family}: {line}")
        )
    predictions = predict(graph, techniques, report=lambda line: report(f"{family}: {line}"))
    unknown = (math.nan,) * 3
    for p in predictions:
        if p.why_not is not None:
            yield Cell(family, p.technique, *unknown, note=f"does not apply: {p.why_not}",
                       applies=False)  # fmt: skip
    usable = [p for p in predictions if p.why_not is None]
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


# Few blocks give an interval from zero to infinity.
def _memory_error(p: Prediction, result: Comparison) -> float:
    watched = tensor_memory(result.experiment).get(p.technique)
    if watched is None or not p.memory[1]:
        return math.nan
    return p.memory[1] / watched.measured - 1
