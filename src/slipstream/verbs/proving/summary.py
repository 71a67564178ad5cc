"""A proof on one screen: a line a technique, and at most five sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slipstream.measure.checks import QualityCheck, QualityStatus
from slipstream.measure.claims import candidates, failures
from slipstream.measure.comparison import Comparison
from slipstream.measure.launches import spread_sentence
from slipstream.measure.ledger import Score
from slipstream.measure.records import AFTERWARDS, Experiment
from slipstream.measure.render import (
    ComparisonRow,
    comparison_rows,
    event_notes,
    format_interval,
    format_value,
    gate_states,
    guard_sentence,
    is_guard,
    quality_rows,
)
from slipstream.tables import Field, Table
from slipstream.units import format_bytes, format_percent
from slipstream.verbs.results import noted

_SENTENCES = 5
_UNSTABLE = "unstable"
TENSOR_PEAK = "tensor_peak_bytes"
"""What a side tells of its memory after it was timed: see `TensorMemory`."""


@dataclass(frozen=True)
class TensorMemory:
    """The most that tensors of a step take at once, as predictions mean it; bytes.

    Attributes:
        baseline, measured: without and with the technique; from a step of each that was watched.
        predicted: with it, as told before; None where nothing was.
    """

    technique: str
    baseline: int
    measured: int
    predicted: int | None

    @property
    def ratio(self) -> float:
        """Measured: with / without; below 1 is less."""
        return self.measured / self.baseline

    @property
    def error(self) -> float | None:
        """Measured / predicted - 1; None where nothing was predicted."""
        return self.measured / self.predicted - 1 if self.predicted else None

    @property
    def sentence(self) -> str:
        """Both sides, and what was told."""
        told = f", predicted {format_bytes(self.predicted)}" if self.predicted else ""
        return (
            f"{self.technique}, tensors: {format_bytes(self.measured)} at most in a step{told}; "
            f"{format_bytes(self.baseline)} without."
        )


def tensor_memory(experiment: Experiment) -> dict[str, TensorMemory]:
    """By technique, of those that were watched beside the baseline."""
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
    """What is known of one technique.

    Attributes:
        row: in the metric that carries the claim; None where it was not measured.
        told: in the metric that was predicted; None where none was.
    """

    name: str
    row: ComparisonRow | None
    told: ComparisonRow | None
    memory: TensorMemory | None
    quality: QualityCheck | None
    failed: str


_FIELDS: tuple[Field[_Line], ...] = (
    Field.of("technique", lambda line: line.name),
    Field.number("time [95%]", lambda line: _measured(line.row)),
    Field.number("predicted [90%]", lambda line: _predicted(line)),
    Field.of("", lambda line: _hit(line.told)),
    Field.number("memory", lambda line: _memory(line.memory)),
    Field.of("numbers", lambda line: line.quality.verdict if line.quality else "-"),
    Field.number(_UNSTABLE, lambda line: _unstable(line.quality), optional=True),
    Field.of("verdict", lambda line: _verdict(line)),
)


def summary_table(comparison: Comparison, before: Sequence[Score] = ()) -> Table:
    """One line a technique: time and memory beside what was predicted, numbers, verdict.

    Args:
        before: scores of what a person was shown before.
    """
    experiment = comparison.experiment
    rows = comparison_rows(experiment, comparison.claims)
    carrying = {row.arm: row for row in rows if row.carries}
    told = {row.arm: row for row in rows if row.predicted is not None}
    memory, failed = tensor_memory(experiment), failures(experiment)
    checks = {one.arm: one for one in quality_rows(experiment) if isinstance(one, QualityCheck)}
    lines = [
        _Line(
            name,
            carrying.get(name),
            told.get(name),
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
        _before_sentence(before),
        *(f"{note}." for note in event_notes(experiment)),
    ]
    shown = [sentence for sentence in sentences if sentence][:_SENTENCES]
    more = "(--details: every clock, side and rank; later: slipstream results show)"
    # Only of what classifies is it known; elsewhere the column would be empty.
    classifies = any(one.instability for one in checks.values())
    fields = [one for one in _FIELDS if classifies or one.name != _UNSTABLE]
    return Table.of(lines, fields, experiment.title, [*shown, more])


def prediction_notes(experiment: Experiment) -> list[str]:
    """What predictions say to know of techniques, as a cheaper choice."""
    return noted(one.detail.get("notes", {}) for one in experiment.predictions.values())


def _measured(row: ComparisonRow | None) -> str:
    return "-" if row is None else format_interval(row.ratio, row.low, row.high)


def _predicted(line: _Line) -> str:
    if line.told is None or line.told.predicted is None:
        return "-"
    one = line.told.predicted
    clock = "" if line.row is None or line.row.metric == one.metric else f" {one.metric}"
    return format_interval(one.ratio, one.low, one.high) + clock


def _hit(row: ComparisonRow | None) -> str:
    if row is None or row.within is None:
        return ""
    return "inside" if row.within else "outside"


def _memory(memory: TensorMemory | None) -> str:
    if memory is None:
        return "-"
    change = format_percent(memory.ratio - 1, signed=True)
    if memory.predicted is None:
        return change
    told = format_percent(memory.predicted / memory.baseline - 1, signed=True)
    return f"{change} (told {told})"


def _unstable(check: QualityCheck | None) -> str:
    """Share of a classifier's items that one side has right and the other wrong (see `checks`)."""
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
    held = f" and its tensors {format_bytes(tensors.baseline)}" if tensors else ""
    launches = f" in {first.launches} processes a side" if first.launches > 1 else ""
    return (
        f"A step {experiment.settings.baseline} takes {step}{held}; ratios are to that, below 1 "
        f"is cheaper; time is {clocks} of {first.blocks} paired blocks{launches}."
    )


def _quality_sentence(checks: Sequence[QualityCheck]) -> str:
    """Of numbers that changed more than chance would: which, and by how much."""
    told = [one for one in checks if one.lost or one.status is QualityStatus.BETTER]
    if told:
        return told[0].sentence
    unchecked = [one.arm for one in checks if one.status is QualityStatus.UNCHECKED]
    if not unchecked:
        return ""
    return f"Nobody looked at the numbers of {', '.join(unchecked)}: no gain is backed."


def _machine_sentence(experiment: Experiment, rows: Sequence[ComparisonRow]) -> str:
    """Whether the measurement may be believed: its guard, and what the machine did meanwhile."""
    carried = {row.metric for row in rows if row.carries}
    clauses = [guard_sentence(row) for row in rows if is_guard(row) and row.metric in carried][:1]
    clauses += dict.fromkeys(row.doubt for row in rows if row.carries and row.doubt)
    if len(clauses) < 2 and gate_states(experiment).keys() - {"green"}:
        clauses.append("the machine was not idle")
    if experiment.status not in ("complete", "ended early"):
        clauses.append(f"this experiment is {experiment.status}")
    return "; ".join(clauses) + "." if clauses else ""


def _launch_sentence(experiment: Experiment, rows: Sequence[ComparisonRow]) -> str:
    """Whether processes of one side differed by more than blocks in one of them."""
    carrying = next((row.metric for row in rows if row.carries), None)
    return "" if carrying is None else spread_sentence(experiment, carrying)


def _before_sentence(before: Sequence[Score]) -> str:
    if not before:
        return ""
    missed = [score.prediction.technique for score in before if not score.within]
    if not missed:
        return f"What you were shown before came true: {len(before)} of {len(before)} inside."
    return (
        f"Of {len(before)} that you were shown before, {len(missed)} lie outside: "
        f"{', '.join(missed)}."
    )
