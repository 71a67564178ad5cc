"""Render comparisons, with prediction and measurement always on one line.

`comparison_rows` converts an experiment and its claims to rows; the terminal table, Markdown, JSON
and HTML are views of these rows.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from slipstream.errors import InvalidArgumentError, MeasurementError
from slipstream.measure.checks import QualityCheck, checks_of, format_share
from slipstream.measure.claims import base_metric, failures, quantile_of
from slipstream.measure.environment import differences
from slipstream.measure.gate import Level
from slipstream.measure.launches import LAUNCH, launch_spreads, spread_sentence
from slipstream.measure.quality import QualityRow
from slipstream.measure.records import (
    AFTERWARDS,
    DIAGNOSTICS,
    Claim,
    Experiment,
    Metric,
    Phase,
    PredictionRecord,
    Verdict,
    arm_label,
    guard_name,
)
from slipstream.measure.statistics import Interval, median_interval
from slipstream.tables import Column, Table
from slipstream.units import (
    format_bytes,
    format_detectable,
    format_duration,
    format_percent,
    format_reach,
    format_speedup,
    inverse_interval,
)

Predictions = Mapping[str, PredictionRecord | Sequence[PredictionRecord]]
"""Predictions by arm: one, or several for several metrics."""

_TIMES = ("wall", "cpu")
_DURATIONS = (*_TIMES, "run_delay", "cold_start", "latency", "time_to_quality")
_SIZES = ("memory", "bytes", "wire", "size")
_THROUGHPUT = "throughput"
# A wider A/A interval would contain 1 even on a disturbed machine.
_MAX_GUARD_REACH = 0.2
_TOO_WIDE = "too wide to tell"
_NOISY = "too noisy to tell"
_OF_SIZE = {Verdict.FASTER.value: "less", Verdict.SLOWER.value: "more"}
_OF_SIZE |= {
    verdict.value: verdict.value.replace(Verdict.FASTER, "less")
    for verdict in (Verdict.UNBACKED, Verdict.QUALITY_LOST)
}


@dataclass(frozen=True)
class ComparisonRow:
    """One candidate's ratio to the baseline in one metric, with its prediction.

    Attributes:
        unit: Unit of the two values: ``"ns"``, ``"bytes"``, ``"calls/s"`` or ``""``.
        baseline_value, value: Medians over the measured samples; None without samples.
        ratio, low, high: Measured candidate / baseline and its interval; below 1 is cheaper.
        detectable: Smallest relative difference that the run could have detected; None if
            unknown (unpaired).
        predicted: Prediction in the ledger, or None.
        prediction_error: measured / predicted - 1, of the speed-up if the metric is a time.
        inside: Whether the measured ratio is inside the predicted interval; None without a
            prediction, or if the measurement is too noisy to tell.
        carries: Whether this metric carries the claim; others are diagnostics.
        reason: Why it carries the claim, or the reason for the verdict.
        launches: Number of consecutive processes per side.
        gate: Number of blocks at each state of the machine.
        mark: Limitation of an unpaired measurement; empty for a paired one.
        doubt: Reason to doubt the verdict; empty if the baseline, measured against itself, was
            equal within a narrow interval.
    """

    arm: str
    baseline: str
    metric: Metric
    unit: str
    baseline_value: float | None
    value: float | None
    ratio: float
    low: float
    high: float
    level: float
    verdict: str
    detectable: float | None
    further_blocks: int | None
    blocks: int
    carries: bool
    gate: Mapping[str, int]
    env_id: str
    reason: str = ""
    launches: int = 1
    predicted: PredictionRecord | None = None
    prediction_error: float | None = None
    inside: bool | None = None
    mark: str = ""
    doubt: str = ""


Result = Claim | PredictionRecord | ComparisonRow
"""A ratio to the baseline, with its interval, in some metric."""


def comparison_rows(
    experiment: Experiment, claims: Sequence[Claim], predictions: Predictions | None = None
) -> tuple[ComparisonRow, ...]:
    """Return one row per claim, in the order of the claims.

    Args:
        predictions: Predictions in addition to those that the experiment started with.
    """
    gate = gate_states(experiment)
    rows = []
    for claim in claims:
        of_claim = asdict(claim)
        del of_claim["estimator"]
        row = ComparisonRow(
            **{**of_claim, "verdict": claim.verdict.value},
            unit=unit_of(claim.metric),
            baseline_value=_value(experiment, claim.baseline, claim.metric),
            value=_value(experiment, claim.arm, claim.metric),
            gate=gate,
            env_id=experiment.environment.env_id,
        )
        predicted = _prediction(claim, experiment.predictions, predictions or {})
        if predicted is not None:
            row = _with_prediction(row, predicted, predicted.holds(claim))
        rows.append(row)
    guards = {row.metric: row for row in rows if is_guard(row)}
    return tuple(replace(row, doubt=_doubt(row, guards.get(row.metric))) for row in rows)


def _doubt(row: ComparisonRow, guard: ComparisonRow | None) -> str:
    """Return why a verdict is doubtful if the guard's interval is too wide, else ""."""
    undecided = row.verdict in (Verdict.INCONCLUSIVE, Verdict.UNTRUSTWORTHY)
    if guard is None or undecided or is_guard(row) or _guard_result(guard) != _TOO_WIDE:
        return ""
    if on_busy_machine(row):
        return "the machine was too busy to check the measurement against itself"
    return "there are too few blocks to check the measurement against itself"


def on_busy_machine(row: ComparisonRow) -> bool:
    """Whether the gate was red for most blocks."""
    return 2 * row.gate.get(Level.RED, 0) > sum(row.gate.values())


def comparison_table(
    experiment: Experiment, claims: Sequence[Claim], predictions: Predictions | None = None
) -> Table:
    """Return the table of an experiment: one row per arm and metric, the A/A guard in its notes."""
    shown, notes = rows_and_notes(experiment, claims, predictions)
    quality = quality_rows(experiment)
    table = rows_table(shown, title=experiment.title, notes=notes, quality=quality)
    return replace(table, rows=[*table.rows, *_failed_rows(experiment, shown, len(table.columns))])


def rows_and_notes(
    experiment: Experiment, claims: Sequence[Claim], predictions: Predictions | None = None
) -> tuple[list[ComparisonRow], list[str]]:
    """Return the candidates' rows and the notes below them, which include the guard."""
    rows = comparison_rows(experiment, claims, predictions)
    shown = [row for row in rows if not is_guard(row)]
    return shown, _notes(experiment, shown, [row for row in rows if is_guard(row)])


def _failed_rows(
    experiment: Experiment, shown: Sequence[ComparisonRow], width: int
) -> list[list[object]]:
    """Return a row of `width` cells with the error of each arm that failed without samples."""
    measured = {row.arm for row in shown}
    return [
        [f"{arm}: not measured", "-", "-", "-", f"failed: {what}", *["-"] * (width - 5)]
        for arm, what in failures(experiment).items()
        if arm not in measured
    ]


def quality_rows(experiment: Experiment) -> tuple[QualityCheck | QualityRow, ...]:
    """Return the candidates' quality: checks of their first steps, outcomes on items."""
    outcomes = [
        QualityRow.from_detail(event.detail)
        for event in experiment.events
        if event.kind == "quality" and "status" not in event.detail
    ]
    return (*checks_of(experiment.events).values(), *outcomes)


def is_guard(row: ComparisonRow) -> bool:
    """Whether the row compares the baseline with itself."""
    return row.arm == guard_name(row.baseline)


def rows_table(
    rows: Sequence[ComparisonRow],
    *,
    title: str = "",
    notes: Sequence[str] = (),
    quality: Sequence[QualityCheck | QualityRow] = (),
) -> Table:
    """Format rows as a table, each arm's `quality` below its rows; see `rows_payload` for JSON."""
    level = format_percent(rows[0].level).replace(".0 %", "%") if rows else "95%"
    marked = any(row.mark for row in rows)
    columns = [
        Column("what"),
        Column("A", "right", optional=True),
        Column("B", "right", optional=True),
        Column(f"change [{level} CI]", "right"),
        Column("verdict"),
        Column("predicted [90%]", "right"),
        Column("error", "right"),
        Column("detectable", "right"),
        Column("blocks", "right", optional=True),
        Column("gate", optional=True),
        Column("clock", optional=True),
        Column("env", optional=True),
        *([Column("mark")] if marked else []),
    ]
    cells = []
    for number, row in enumerate(rows):
        cells.append(_cells(row, marked))
        if all(later.arm != row.arm for later in rows[number + 1 :]):
            for finding in (finding for finding in quality if finding.arm == row.arm):
                cells.append(_quality_cells(finding, marked))
                if isinstance(finding, QualityCheck) and finding.instability is not None:
                    cells.append(_instability_cells(finding, finding.instability, marked))
    return Table(columns, cells, title, tuple(notes))


def rows_payload(
    experiment: Experiment, rows: Sequence[ComparisonRow], claims: Sequence[Claim]
) -> dict[str, Any]:
    """Convert rows to JSON values, all numbers with full precision."""
    return {
        "experiment": experiment.experiment_id,
        "title": experiment.title,
        "created": experiment.created,
        "status": experiment.status,
        "environment": {"env_id": experiment.environment.env_id}
        | {"facts": dict(experiment.environment.facts)},
        "settings": asdict(experiment.settings),
        "arms": [asdict(arm) for arm in experiment.arms],
        "rows": [row_json(row) for row in rows],
        "claims": [_with_change(claim) for claim in claims],
        "numerics": [
            asdict(finding) | {"says": finding.sentence} for finding in quality_rows(experiment)
        ],
        "notes": list(event_notes(experiment)),
        "warnings": [
            asdict(event)
            for event in experiment.events
            if event.kind not in ("gate", "quality", "note", LAUNCH, AFTERWARDS)
        ],
        "launches": [
            asdict(spread)
            for metric in dict.fromkeys(row.metric for row in rows if row.carries)
            for spread in launch_spreads(experiment, metric)
        ],
    }


def speedup(result: Result) -> tuple[float, float, float] | None:
    """Return the speed-up and its interval; None if the metric is not a time or a throughput."""
    if unit_of(result.metric) == "ns":
        return inverse_interval(result.ratio, result.low, result.high)
    is_speed = result.metric == _THROUGHPUT
    return (result.ratio, result.low, result.high) if is_speed else None


def change_json(result: Result, prefix: str = "") -> dict[str, Any]:
    """Return ``speedup`` and ``speedup_interval``, or ``ratio`` and ``ratio_interval``."""
    faster = speedup(result)
    name = f"{prefix}{'ratio' if faster is None else 'speedup'}"
    middle, low, high = faster or (result.ratio, result.low, result.high)
    return {name: middle, f"{name}_interval": [low, high]}


def format_change(result: Result, digits: int = 3) -> str:
    """Format a speed-up, a signed percentage of a size, or a plain ratio, with its interval."""
    faster = speedup(result)
    if faster is not None:
        return format_speedup(faster, digits)
    if unit_of(result.metric) != "bytes":
        return format_interval(result.ratio, result.low, result.high)
    middle = format_percent(result.ratio - 1, signed=True)
    ends = (result.ratio, result.low, result.high)
    return f"{middle} {format_reach(*ends, lambda end: f'{100 * (end - 1):+.1f}')}"


def row_json(row: ComparisonRow) -> dict[str, Any]:
    """Convert a row to JSON: its change in one direction, next to the predicted one."""
    values = _with_change(row)
    predicted = values["predicted"] = None if row.predicted is None else _with_change(row.predicted)
    change = {"speedup": None, "speedup_interval": None}
    if predicted is not None:
        change = {name: predicted.pop(name) for name in change_json(row)}
    return values | {f"predicted_{name}": value for name, value in change.items()}


def _with_change(result: Result) -> dict[str, Any]:
    values = asdict(result)
    for name in ("ratio", "low", "high"):
        del values[name]
    return values | change_json(result)


def compare_experiments(
    a: Experiment, b: Experiment, *, unpaired: bool = False
) -> tuple[ComparisonRow, ...]:
    """Compare medians of the arms and metrics that two experiments share; `b` / `a`.

    The experiments were not measured side by side, so each verdict is "unpaired". The interval
    combines the intervals of both medians, each at the square root of the level, and is therefore
    wider than a paired one.

    Raises:
        MeasurementError: The environments differ and `unpaired` is False; names the facts.
        InvalidArgumentError: The experiments share no arm and metric.
    """
    differing = differences(a.environment, b.environment)
    if differing and not unpaired:
        raise MeasurementError(
            "the two experiments were made in different environments: " + ", ".join(differing),
            where=f"{a.experiment_id or a.title} and {b.experiment_id or b.title}",
            remedy="measure both side by side in one experiment, or compare anyway with --unpaired",
        )
    mark = "unpaired, " + (
        f"environment differs in: {', '.join(differing)}" if differing else "same environment"
    )
    shared = [
        (arm, metric)
        for arm, metric, phase in a.series
        if phase == Phase.MEASURE
        and metric not in DIAGNOSTICS
        and (arm, metric, phase) in b.series
        and arm != guard_name(a.settings.baseline)
    ]
    if not shared:
        raise InvalidArgumentError(
            "experiments",
            "the experiments have no arm and metric in common",
            remedy="compare experiments with the same arm names (slipstream results ls)",
        )
    return tuple(_unpaired_row(a, b, arm, metric, mark) for arm, metric in shared)


def _unpaired_row(
    a: Experiment, b: Experiment, arm: str, metric: Metric, mark: str
) -> ComparisonRow:
    level = a.settings.level
    columns = [e.series[arm, metric, Phase.MEASURE] for e in (a, b)]
    first, second = (median_interval(column.values, math.sqrt(level)) for column in columns)
    return ComparisonRow(
        arm=arm,
        baseline=arm,
        metric=metric,
        unit=unit_of(metric),
        baseline_value=first.estimate,
        value=second.estimate,
        ratio=_divide(second.estimate, first.estimate),
        low=_divide(max(second.low, 0.0), first.high),
        high=_divide(second.high, max(first.low, 0.0)),
        level=level,
        verdict="unpaired",
        detectable=None,
        further_blocks=None,
        blocks=min(len(np.unique(column.blocks)) for column in columns),
        carries=metric == a.settings.primary,
        gate=dict(Counter(gate_states(a)) + Counter(gate_states(b))),
        env_id=f"{a.environment.env_id} / {b.environment.env_id}",
        mark=mark,
    )


def unit_of(metric: Metric) -> str:
    """Return ``"ns"``, ``"bytes"``, ``"calls/s"``, or ``""`` for a plain number."""
    if metric == _THROUGHPUT:
        return "calls/s"
    metric = base_metric(metric)
    if metric in _DURATIONS or metric.endswith("_ns"):
        return "ns"
    if any(part in metric.split("_") for part in _SIZES):
        return "bytes"
    return ""


def format_value(value: float | None, unit: str) -> str:
    """Format a median with its unit; "-" if it is missing."""
    if value is None or not math.isfinite(value):
        return "-"
    if unit == "ns":
        return format_duration(value)
    if unit == "bytes":
        return format_bytes(value)
    return f"{value:.4g} {unit}".strip()


def gate_states(experiment: Experiment) -> dict[str, int]:
    """Count the measured blocks in each state of the machine: green, amber, red.

    A reading applies from its block until the next, since readings are recorded on change.
    """
    readings = sorted(
        ((e.block, str(e.detail.get("state"))) for e in experiment.events if e.kind == "gate"),
        key=lambda reading: reading[0],
    )
    if not readings:
        return {}
    blocks = {
        int(block)
        for (_, _, phase), series in experiment.series.items()
        if phase == Phase.MEASURE
        for block in series.blocks
    }
    starts = [block for block, _ in readings]
    return dict(Counter(readings[max(bisect_right(starts, b) - 1, 0)][1] for b in sorted(blocks)))


def _prediction(claim: Claim, *sources: Predictions) -> PredictionRecord | None:
    for source in sources:
        of_arm = source.get(claim.arm, ())
        for prediction in [of_arm] if isinstance(of_arm, PredictionRecord) else of_arm:
            if prediction.metric == claim.metric:
                return prediction
    return None


def _with_prediction(
    row: ComparisonRow, predicted: PredictionRecord, inside: bool | None
) -> ComparisonRow:
    error = _divide(row.ratio, predicted.ratio)
    if unit_of(row.metric) == "ns":
        error = _divide(predicted.ratio, row.ratio)
    return replace(row, predicted=predicted, prediction_error=error - 1, inside=inside)


def describe_inside(inside: bool | None) -> str:
    """Format `ComparisonRow.inside` of a row with a prediction."""
    return _NOISY if inside is None else "inside" if inside else "outside"


def _divide(above: float, below: float) -> float:
    """Divide non-negative values; infinite or NaN where Python would raise."""
    if math.isinf(above) and math.isinf(below):
        return math.nan
    if below == 0:
        return math.inf if above > 0 else math.nan
    return above / below


def _value(experiment: Experiment, arm: str, metric: Metric) -> float | None:
    """Return the median sample, or the statistic that `metric` names."""
    series = experiment.series.get((arm, base_metric(metric), Phase.MEASURE))
    if series is None or not series.values.size:
        return None
    if metric == _THROUGHPUT:
        return 1e9 / float(np.mean(series.values))
    return float(np.quantile(series.values, quantile_of(metric) or 0.5))


def _cells(row: ComparisonRow, marked: bool) -> list[object]:
    predicted = row.predicted
    error = "-"
    if row.prediction_error is not None:
        error = format_percent(row.prediction_error, signed=True)
        error += "" if row.inside else f" ({describe_inside(row.inside)})"
    return [
        f"{row.arm}: {row.metric}",
        format_value(row.baseline_value, row.unit),
        format_value(row.value, row.unit),
        format_change(row),
        _verdict(row),
        "-" if predicted is None else format_change(predicted),
        error,
        "-" if row.detectable is None else format_detectable(row.detectable),
        row.blocks,
        _gate(row.gate),
        _clock(row),
        row.env_id,
        *([row.mark] if marked else []),
    ]


def _quality_cells(finding: QualityCheck | QualityRow, marked: bool) -> list[object]:
    spread = "-"
    if isinstance(finding, QualityRow):
        measure, count, verdict = finding.metric, f"{finding.items} items", finding.verdict
        a, b = (f"{side.estimate:.4g}" for side in (finding.baseline, finding.candidate))
        ratio = _fine(_divide(finding.candidate.estimate, finding.baseline.estimate))
    else:
        measure, verdict = "quality", finding.verdict
        count = f"{len(finding.seeds)} seeds" if len(finding.seeds) != 1 else "1 seed"
        count = "one run" if finding.one_run else count
        a, b = (
            f"{float(np.mean(side)):.4g}" if side else "-"
            for side in (finding.baseline, finding.candidate)
        )
        ratio = _quality_ratio(finding)
        if finding.spread and finding.scale:
            spread = f"±{format_percent(finding.spread / finding.scale)} seeds"
    cells = [f"{finding.arm}: {measure}", a, b, ratio, verdict]
    return [*cells, "-", "-", spread, count, *["-"] * (4 if marked else 3)]


def _instability_cells(check: QualityCheck, share: Interval, marked: bool) -> list[object]:
    what = "divergence" if check.unstable is None else "instability"
    ends = f"[{format_percent(share.low)}, {format_percent(share.high)}]"
    cells = [f"{check.arm}: {what}", "-", format_percent(share.estimate), "-", ends]
    return [*cells, "-", "-", "-", f"{check.items} items", *["-"] * (4 if marked else 3)]


def _quality_ratio(check: QualityCheck) -> str:
    """Format candidate / baseline with more digits than a speed, since 1 % of a loss is a lot."""
    if check.difference is None or check.scale is None:
        return "-"
    if not check.baseline:
        return f"±{format_share(check.difference)}"
    sign = math.copysign(1.0, float(np.mean(check.baseline)))
    ends = [check.difference, *(() if check.one_run else (check.low, check.high))]
    middle, *interval = [
        _fine(1 + sign * end / check.scale) if number == 0 or check.is_informative(end) else "–"
        for number, end in enumerate(ends)
        if end is not None
    ]
    if sign < 0:
        interval.reverse()
    return middle + (f" [{', '.join(interval)}]" if interval else "")


def _fine(ratio: float) -> str:
    return f"{ratio:.4f}" if 0.001 < abs(ratio) < 10 else _number(ratio)


def format_interval(middle: float, low: float, high: float) -> str:
    """Format a ratio with its interval: ``0.884 [0.876, 0.892]``."""
    return f"{_number(middle)} {format_reach(middle, low, high, _number)}"


def _number(ratio: float) -> str:
    if math.isnan(ratio):
        return "-"
    if math.isinf(ratio):
        return "∞" if ratio > 0 else "-∞"
    return f"{ratio:.3f}" if abs(ratio) < 10 else f"{ratio:.3g}"


def _verdict(row: ComparisonRow) -> str:
    if row.verdict == Verdict.INCONCLUSIVE and row.further_blocks:
        more = row.further_blocks
        return f"{row.verdict} (about {more} more block{'s' * (more > 1)})"
    # Memory and traffic are less or more, not faster or slower.
    verdict = _OF_SIZE.get(row.verdict, row.verdict) if row.unit == "bytes" else row.verdict
    return f"{verdict}, but {row.doubt}" if row.doubt else verdict


def _gate(states: Mapping[str, int]) -> str:
    total = sum(states.values())
    if not total:
        return "-"
    if len(states) == 1:
        return next(iter(states))
    return ", ".join(f"{state} {count}/{total}" for state, count in states.items())


def event_notes(experiment: Experiment) -> tuple[str, ...]:
    """Return the distinct notes of the arms and the runner."""
    return tuple(dict.fromkeys(e.detail["what"] for e in experiment.events if e.kind == "note"))


def _guard_result(row: ComparisonRow) -> str:
    if not row.low <= 1 <= row.high:
        return "does not include 1"
    if row.low < 1 - _MAX_GUARD_REACH or row.high > 1 + _MAX_GUARD_REACH:
        return _TOO_WIDE
    return "includes 1"


def guard_sentence(row: ComparisonRow) -> str:
    """Describe the result of the baseline against itself, a row for which `is_guard` is True."""
    return (
        f"{arm_label(row.baseline)} against itself, {row.metric}: "
        f"{format_change(row)} at {format_percent(row.level)}, {row.blocks} blocks: "
        f"{_guard_result(row)}"
    )


def _clock(row: ComparisonRow) -> str:
    if row.metric not in _TIMES or row.mark:
        return "-"
    return "carries the claim" if row.carries else "diagnostic"


def _notes(
    experiment: Experiment, rows: Sequence[ComparisonRow], guards: Sequence[ComparisonRow]
) -> list[str]:
    settings = experiment.settings
    notes = [
        f"A = {arm_label(settings.baseline)}; changes are over paired blocks: speed-up A / B for "
        "times, percent for sizes, else B / A; intervals hold at "
        f"{format_percent(settings.level)} over all looks together; error: measured against "
        "predicted; "
        "detectable: the smallest difference that this run could have detected; "
        "\u2013: undetermined."
    ]
    if (launches := max((row.launches for row in rows), default=1)) > 1:
        notes.append(
            f"Every side ran in {launches} consecutive processes; intervals include the variation "
            "between processes."
        )
    notes += [f"{line}." for line in event_notes(experiment)]
    metrics = dict.fromkeys(row.metric for row in rows if row.carries)
    notes += filter(None, (spread_sentence(experiment, metric) for metric in metrics))
    notes += dict.fromkeys(
        f"{row.arm}: {row.metric} carries the claim ({row.reason})."
        if row.carries
        else f"{row.arm}, {row.metric}: {row.reason}."
        for row in rows
        if row.reason
    )
    notes += [finding.sentence for finding in quality_rows(experiment)]
    notes += [f"A/A guard: {guard_sentence(row)}." for row in guards]
    gate = gate_states(experiment)
    if gate.keys() - {"green"}:
        notes.append(f"The machine was not idle; its gate, by block: {_gate(gate)}.")
    provenance = sorted({row.predicted.provenance for row in rows if row.predicted})
    if provenance:
        notes.append(f"Predictions are based on: {', '.join(provenance)}.")
    if experiment.status not in ("complete", "ended early"):
        samples = sum(len(s.values) for s in experiment.series.values())
        state = "failed" if experiment.status == "failed" else f"is {experiment.status}"
        notes.append(f"This experiment {state}: {samples} samples so far.")
    return notes
