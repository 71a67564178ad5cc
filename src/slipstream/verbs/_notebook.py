"""Predictions and advice in a notebook: the rows that the command line prints, intervals drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.tables import Column, Drawing, Table
from slipstream.units import format_bytes, format_duration, format_percent, format_reach

if TYPE_CHECKING:
    from slipstream.verbs.advising import Advice
    from slipstream.verbs.predicting import Prediction


def prediction_html(p: Prediction) -> str:
    """A table of one row."""
    if p.why_not is not None:
        columns = [Column("technique"), Column("does not apply")]
        return Table(columns, [(p.technique, p.why_not)]).to_html()
    row = (
        *_row(p),
        ", ".join(f"{format_percent(share)} {name}" for name, share in p.shares.items()),
    )
    return Table([*_columns(), Column("rests on")], [row], notes=p.edits).to_html()


def advice_html(advice: Advice) -> str:
    """A table of what applies, starred where nothing else beats it; below it what does not."""
    apply = [p for p in advice.predictions if p.why_not is None]
    rows = [(p.technique + " *" * (p.technique in advice.front), *_row(p)[1:]) for p in apply]
    notes = ["* nothing else is better in time, memory and numbers at once"] if rows else []
    notes += [f"to try first: {advice.best.technique}"] if advice.best else []
    notes += [f"{p.technique} {p.verdict}: {p.why_not}" for p in advice.predictions if p.why_not]
    return Table(_columns(), rows, notes=notes).to_html()


def _columns() -> list[Column]:
    return [
        Column("technique"), Column("speed-up", "right"), Column(""),
        Column("90 % interval", "right"), Column("step"), Column("memory"), Column("numbers"),
        Column("verdict"),
    ]  # fmt: skip


def _row(p: Prediction) -> tuple[object, ...]:
    low, high = 1 / p.high, 1 / p.low
    said = format_reach(p.speedup, low, high)
    before, after = p.memory
    return (
        p.technique,
        f"{p.speedup:.2f}x",
        Drawing.interval(low, p.speedup, high, (min(low, 0.9), max(high, 1.1)), said),
        said,
        f"{format_duration(p.baseline_ns)} to {format_duration(p.step_ns)}",
        f"{format_bytes(before)} to {format_bytes(after)}" if before and after else "-",
        p.quality.kind.value if p.quality else "-",
        p.verdict,
    )
