"""A prediction in a notebook: the same row that the command line prints, its interval drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.tables import Column, Drawing, Table
from slipstream.units import format_bytes, format_duration, format_percent

if TYPE_CHECKING:
    from slipstream.verbs._predict import Prediction


def prediction_html(p: Prediction) -> str:
    """A table of one row."""
    if p.why_not is not None:
        columns = [Column("technique"), Column("does not apply")]
        return Table(columns, [(p.technique, p.why_not)]).to_html()
    low, high = 1 / p.high, 1 / p.low
    said = f"[{low:.2f}, {high:.2f}]"
    ends = (min(low, 0.9), max(high, 1.1))
    before, after = p.memory
    row = (
        p.technique,
        f"{p.speedup:.2f}x",
        Drawing.interval(low, p.speedup, high, ends, said),
        said,
        f"{format_duration(p.baseline_ns)} to {format_duration(p.step_ns)}",
        f"{format_bytes(before)} to {format_bytes(after)}" if before and after else "-",
        p.quality.kind.value if p.quality else "-",
        ", ".join(f"{format_percent(share)} {name}" for name, share in p.shares.items()),
        p.verdict,
    )
    columns = [
        Column("technique"), Column("speed-up", "right"), Column(""),
        Column("90 % interval", "right"), Column("step"), Column("memory"), Column("numbers"),
        Column("rests on"), Column("verdict"),
    ]  # fmt: skip
    return Table(columns, [row], notes=p.edits).to_html()
