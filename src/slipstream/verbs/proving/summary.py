"""Summarise a proof on one screen: a line per technique, and at most five sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slipstream.measure.checks import QualityCheck, QualityStatus
from slipstream.measure.claims import candidates, failures
from slipstream.measure.comparison import Comparison
from slipstream.measure.launches import spread_sentence
from slipstream.measure.records import AFTERWARDS, Experiment
from slipstream.measure.render import (
    ComparisonRow,
    comparison_rows,
    describe_inside,
    event_notes,
    format_change,
    format_value,
    gate_states,
    guard_sentence,
    is_guard,
    quality_rows,
)
from slipstream.tables import Field, Table
from slipstream.units import format_bytes, format_percent
from slipstream.verbs.results import noted

_MAX_SENTENCES = 5
_UNSTABLE = "unstable"
TENSOR_PEAK = "tensor_peak_bytes"
"""Key of a side's peak tensor memory in its events: see `TensorMemory`."""


@dataclass(frozen=True)
class TensorMemory:
    """Peak memory of a step's tensors in bytes, measured and predicted.

    Attributes:
        baseline, measured: without and with the technique, each from one watched step.
        predicted: with the technique; None without a prediction.
    """

    technique: str
    baseline: int
    measured: int
    predicted: int | None

    @property
    def ratio(self) -> float:
        """Measured peak with the technique over without; below 1 is less."""
        return self.measured / self.baseline

    @property
    def error(self) -> float | None:
        """Measured / predicted - 1; None without a prediction."""
        return self.measured / self.predicted - 1 if self.predicted else None

    @property
    def sentence(self) -> str:
        predicted = f", predicted {format_bytes(self.predicted)}" if self.predicted else ""
        return (
            f"{self.technique}, tensors: {format_bytes(self.measured)} peak in a step"
            f"{predicted}; {format_bytes(self.baseline)} without."
        )


def tensor_memory(experiment: Experiment) -> dict[str, TensorMemory]:
    peaks = {
        str(event.detail["arm"]): int(event.detail[TENSOR_PEAK])
        for event in experiment.events
        if event.kind == AFTERWARDS and TENSOR_PEAK in event.detail
    }
    baseline = peaks.pop(experiment.settings.baseline, 0)
    if not baseline:
        return {}
    return {
        name: TensorMemory(name, baseline, peak, _predicted_peak(experiment, name))
        for name, peak in peaks.items()
    }


def _predicted_peak(experiment: Experiment, name: str) -> int | None:
    predicted = experiment.predictions.get(name)
    _, after = (predicted.detail.get("peak_bytes") if predicted else None) or (0, 0)
    return int(after) or None


@dataclass(frozen=True)
class _Line:
    """Results of one technique.

    Attributes:
        row: in the metric that carries the claim; None if it was not measured.
        predicted: in the predicted metric; None without a prediction.
    """

    name: str
    row: ComparisonRow | None
    predicted: ComparisonRow | None
    memory: TensorMemory | None
    quality: QualityCheck | None
    failed: str


_FIELDS: tuple[Field[_Line], ...] = (
    Field.of("technique", lambda line: line.name),
    Field.number("predicted [90%]", lambda line: _predicted(line)),
    Field.number("measured [95%]", lambda line: _measured(line.row)),
    Field.of("", lambda line: _agreement(line)),
    Field.number("memory", lambda line: _memory(line.memory)),
    Field.of("numerics", lambda line: line.quality.verdict if line.quality else "-"),
    Field.number(_UNSTABLE, lambda line: _unstable(line.quality), optional=True),
    Field.of("verdict", lambda line: _verdict(line)),
)


def summary_table(comparison: Comparison) -> Table:
    experiment = comparison.experiment
    rows = comparison_rows(experiment, comparison.claims)
    carrying = {row.arm: row for row in rows if row.carries}
    predicted = {row.arm: row for row in rows if row.predicted is not None}
    memory, failed = tensor_memory(experiment), failures(experiment)
    checks = {row.arm: row for row in quality_rows(experiment) if isinstance(row, QualityCheck)}
    lines = [
        _Line(
            name,
            carrying.get(name),
            predicted.get(name),
            memory.get(name),
            checks.get(name),
            failed.get(name, ""),
        )
        for name in candidates(experiment)
    ]
    sentences = [
        _step_sentence(experiment, [line.row for line in lines if line.row], memory),
        *(f"{note}." for note in prediction_notes(experiment)),
        _quality_sentence([line.quality for line in lines if line.quality]),
        _machine_sentence(experiment, rows),
        _launch_sentence(experiment, rows),
        _prediction_sentence(experiment),
        *(f"{note}." for note in event_notes(experiment)),
    ]
    shown = [sentence for sentence in sentences if sentence][:_MAX_SENTENCES]
    more = "(--details: every clock, side and rank; later: slipstream results show)"
    # Only classifiers have it; for others the column would be empty.
    classifies = any(check.instability for check in checks.values())
    fields = [field for field in _FIELDS if classifies or field.name != _UNSTABLE]
    return Table.of(lines, fields, experiment.title, [*shown, more])


def prediction_notes(experiment: Experiment) -> list[str]:
    """Return the notes of predictions, such as a cheaper alternative."""
    return noted(record.detail.get("notes", {}) for record in experiment.predictions.values())


def _measured(row: ComparisonRow | None) -> str:
    return "-" if row is None else format_change(row, 2)


def _predicted(line: _Line) -> str:
    if line.predicted is None or line.predicted.predicted is None:
        return "-"
    predicted = line.predicted.predicted
    same_clock = line.row is None or line.row.metric == predicted.metric
    return format_change(predicted, 2) + ("" if same_clock else f" {predicted.metric}")


def _agreement(line: _Line) -> str:
    row = line.predicted
    if row is None:
        return ""
    # The claim may use another clock than the prediction.
    clock = "" if row.carries else f", {row.metric} {format_change(row, 2)}"
    return describe_inside(row.inside) + clock


def _memory(memory: TensorMemory | None) -> str:
    if memory is None:
        return "-"
    change = format_percent(memory.ratio - 1, signed=True)
    if memory.predicted is None:
        return change
    predicted = format_percent(memory.predicted / memory.baseline - 1, signed=True)
    return f"{change} (predicted {predicted})"


def _unstable(check: QualityCheck | None) -> str:
    """Format the share of a classifier's items that only one side has right."""
    share = check.instability if check else None
    return "-" if share is None else format_percent(share.estimate)


def _verdict(line: _Line) -> str:
    if line.row is None:
        return f"failed: {line.failed}" if line.failed else "not measured"
    return f"{line.row.verdict}, in doubt" if line.row.doubt else line.row.verdict


def _step_sentence(
    experiment: Experiment, rows: Sequence[ComparisonRow], memory: Mapping[str, TensorMemory]
) -> str:
    if not rows:
        return ""
    first = rows[0]
    step = format_value(first.baseline_value, first.unit)
    clocks = " and ".join(sorted({row.metric for row in rows}))
    tensors = next(iter(memory.values()), None)
    tensor_part = f" and its tensors {format_bytes(tensors.baseline)}" if tensors else ""
    launches = f" in {first.launches} processes a side" if first.launches > 1 else ""
    return (
        f"A baseline step takes {step}{tensor_part}; speed-ups are relative to it, in "
        f"{clocks} time of {first.blocks} paired blocks{launches}."
    )


def _quality_sentence(checks: Sequence[QualityCheck]) -> str:
    """Describe the first quality change that exceeds chance, or checks that are missing."""
    changed = [check for check in checks if check.lost or check.status is QualityStatus.BETTER]
    if changed:
        return changed[0].sentence
    unchecked = [check.arm for check in checks if check.status is QualityStatus.UNCHECKED]
    if not unchecked:
        return ""
    return f"The numerics of {', '.join(unchecked)} were not checked: no gain is confirmed."


def _machine_sentence(experiment: Experiment, rows: Sequence[ComparisonRow]) -> str:
    carried = {row.metric for row in rows if row.carries}
    clauses = [guard_sentence(row) for row in rows if is_guard(row) and row.metric in carried][:1]
    clauses += dict.fromkeys(row.doubt for row in rows if row.carries and row.doubt)
    if len(clauses) < 2 and gate_states(experiment).keys() - {"green"}:
        clauses.append("the machine was not idle")
    if experiment.status not in ("complete", "ended early"):
        clauses.append(f"this experiment is {experiment.status}")
    return "; ".join(clauses) + "." if clauses else ""


def _launch_sentence(experiment: Experiment, rows: Sequence[ComparisonRow]) -> str:
    carrying = next((row.metric for row in rows if row.carries), None)
    return "" if carrying is None else spread_sentence(experiment, carrying)


def _prediction_sentence(experiment: Experiment) -> str:
    dates = sorted({record.created for record in experiment.predictions.values()})
    if not dates or not dates[0]:
        return ""
    return f"Predicted {' and '.join(f'{date[:10]} {date[11:16]} UTC' for date in dates)}."
