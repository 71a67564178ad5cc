"""``slipstream bench accuracy``: predictions from one eager profile against real measurements.

Every cell is one model and one technique: the step is profiled once, the technique predicted,
then applied for real and measured against the original in turns. Nothing is judged on cells whose
own measurement is not trustworthy or wider than the error it should show.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from slipstream import technique
from slipstream.bars import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream.errors import SlipstreamError
from slipstream.measure.records import Verdict
from slipstream.verbs import _models
from slipstream.verbs._predict import Prediction, predict
from slipstream.verbs._profile import profile
from slipstream.verbs._prove import prove
from slipstream.workload import Workload

_QUICK_FAMILIES = ("perceptron", "conv_net", "tiny_language_model")
_QUICK_TECHNIQUES = ("amp:bf16", "fused_optimizer:fused", "channels_last")
# A slow-down is one that matters from here on.
_MATTERS = 0.03
# A measured interval wider than this cannot show the errors the bars speak of.
_WIDEST = 0.06
# Fewer cells than this say nothing about a distribution of errors.
_FEWEST_JUDGED = 5


@dataclass(frozen=True)
class Cell:
    """One model and technique: predicted and measured time ratios per sample.

    Attributes:
        measured: candidate / baseline; NaN when the measurement is not judged.
    """

    model: str
    technique: str
    prediction: Prediction
    measured: float
    low: float
    high: float
    note: str = ""

    @property
    def error(self) -> float:
        """Predicted speed-up against the measured one, relative."""
        return self.measured / self.prediction.ratio - 1

    @property
    def inside(self) -> bool:
        """Whether the predicted interval and the measured one have a ratio in common."""
        return self.prediction.low <= self.high and self.low <= self.prediction.high


def bars(options: BenchOptions) -> Iterator[Bar]:
    """A row a cell, then the rows that decide."""
    families = [f.__name__ for f in _models.FAMILIES]
    names = list(_techniques())
    if not options.full:
        families = [name for name in families if name in _QUICK_FAMILIES]
        names = [name for name in names if name in _QUICK_TECHNIQUES]
    cells: list[Cell] = []
    for family in families:
        for cell in _cells(family, names, options):
            cells.append(cell)
            yield _row(cell)
    judged = [cell for cell in cells if math.isfinite(cell.measured)]
    if len(judged) < max(_FEWEST_JUDGED, len(cells) / 2):
        reason = f"only {len(judged)} of {len(cells)} cells were measured narrowly enough"
        yield not_judged("error of predicted speed-up", "%", "median <= 4, max <= 12", reason)
        return
    errors = sorted(abs(cell.error) * 100 for cell in judged)
    n = len(errors)
    worst = max(judged, key=lambda cell: abs(cell.error))
    yield at_most("error of predicted speed-up, median", median(errors), 4, "%", n=n)
    yield at_most(
        "error of predicted speed-up, 90th percentile", errors[math.ceil(0.9 * n) - 1], 8, "%", n=n
    )
    detail = f"{worst.model} {worst.technique}"
    yield at_most("error of predicted speed-up, maximum", errors[-1], 12, "%", n=n, detail=detail)
    slow = [cell for cell in judged if cell.low > 1 + _MATTERS]
    missed = [f"{c.model} {c.technique}" for c in slow if c.prediction.ratio <= 1]
    yield at_most(
        "slow-downs beyond 3 % not predicted as one", len(missed), 0, f"of {len(slow)}",
        n=len(slow), detail=", ".join(missed),
    )  # fmt: skip
    covered = 100 * sum(cell.inside for cell in judged) / n
    yield at_least("printed 90 % intervals that hold", covered, 85, "%", n=n)


def _techniques() -> dict[str, technique.Technique]:
    """What one eager profile is asked about, by name."""
    wanted = (
        "amp:bf16", "channels_last", "fused_optimizer:fused", "fused_optimizer:foreach",
        "accumulation:4",
    )  # fmt: skip
    return {name: technique.parse(name)[0] for name in wanted}


def _cells(family: str, names: list[str], options: BenchOptions) -> Iterator[Cell]:
    options.progress(f"{family}: profiling")
    workload = Workload.parse(f"{Path(_models.__file__)}:{family}")
    graph = profile(workload, threads=1)
    found = predict(graph, names, say=lambda line: options.progress(f"{family}: {line}"))
    usable = [p for p in found if p.why_not is None]
    for p in usable:
        options.progress(f"{family}: measuring {p.technique}")
        try:
            result = prove(
                workload,
                [p.technique],
                threads=1,
                target=0.03,
                budget="60s" if options.full else "12s",
                quality_budget=None,
            )
            claim = result.ratio(p.technique, metric="cpu")
        except SlipstreamError as error:
            yield Cell(family, p.technique, p, math.nan, math.nan, math.nan, error.what)
            continue
        per_sample = p.samples[0] / p.samples[1] if all(p.samples) else 1.0
        note = ""
        if claim.verdict is Verdict.UNTRUSTWORTHY:
            note = claim.reason or "the baseline differs from itself"
        elif claim.high / claim.low - 1 > 2 * _WIDEST:
            note = f"measured too widely: [{claim.low:.3f}, {claim.high:.3f}]"
        measured = math.nan if note else claim.ratio * per_sample
        yield Cell(
            family, p.technique, p, measured, claim.low * per_sample, claim.high * per_sample, note
        )


def _row(cell: Cell) -> Bar:
    name = f"{cell.model} {cell.technique}"
    p = cell.prediction
    if not math.isfinite(cell.measured):
        return not_judged(name, "%", "|error| <= 12", cell.note)
    detail = (
        f"predicted {p.speedup:.3f}x [{1 / p.high:.3f}, {1 / p.low:.3f}], "
        f"measured {1 / cell.measured:.3f}x [{1 / cell.high:.3f}, {1 / cell.low:.3f}]"
    )
    error = 100 * cell.error
    return Bar(name, error, "%", "|error| <= 12", abs(error) <= 12, 1, detail)
