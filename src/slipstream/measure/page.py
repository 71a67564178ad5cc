"""Render a comparison as a self-contained HTML file without scripts, light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from slipstream.measure.records import Claim, Experiment, PredictionRecord
from slipstream.measure.render import (
    ComparisonRow,
    Predictions,
    quality_rows,
    rows_and_notes,
    rows_table,
    speedup,
)

# For notebooks, with their text colour.
_COLOURS = """
.slipstream svg { --faint: #808088; --measured: #2b82d9; --predicted: #c46a10; max-width: 900px; }
.slipstream svg text { fill: currentColor; font: 12px system-ui, sans-serif; }
"""
_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1e; --paper: #fff; --faint: #6b6b70;
  --line: #d9d9de; --measured: #0b6bcb; --predicted: #b25e00; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececf0; --paper: #17171a; --faint: #9a9aa2;
  --line: #3a3a40; --measured: #62b0ff; --predicted: #ffb454; } }
body { color: var(--ink); background: var(--paper); max-width: 75rem; margin: 2rem auto;
  padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--line); text-align: left;
  white-space: nowrap; }
th { color: var(--faint); font-weight: 600; }
.right { text-align: right; }
.notes, dt { color: var(--faint); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem;
  font-size: .85rem; overflow-wrap: anywhere; }
dd { margin: 0; }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--ink); }
"""
# Sizes of the drawing, in pixels.
_WIDTH, _LABELS, _ROW, _TOP = 900, 260, 34, 26


def comparison_fragment(experiment: Experiment, claims: Sequence[Claim]) -> str:
    """Return the drawing and table of a comparison as an HTML fragment."""
    shown, notes = rows_and_notes(experiment, claims)
    table = rows_table(shown, title=experiment.title, notes=notes, quality=quality_rows(experiment))
    content = f"{_drawing(shown)}{table.to_html()}"
    return f'<div class="slipstream"><style>{_COLOURS}</style>{content}</div>'


def comparison_html(
    experiment: Experiment, claims: Sequence[Claim], predictions: Predictions | None = None
) -> str:
    """Return a self-contained HTML file: drawn intervals, table, environment."""
    shown, notes = rows_and_notes(experiment, claims, predictions)
    title = escape(experiment.title)
    facts = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>"
        for name, value in experiment.environment.facts.items()
    )
    table = rows_table(shown, quality=quality_rows(experiment))
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{title}</h1>",
            f"<p>{escape(experiment.created)}, experiment {escape(experiment.experiment_id)}, "
            f"{escape(experiment.status)}</p>",
            _drawing(shown),
            f'<div class="wide">{table.to_html()}</div>',
            *(f'<p class="notes">{escape(note)}</p>' for note in notes),
            f"<details><summary>Environment {escape(experiment.environment.env_id)}</summary>",
            f"<dl>{facts}</dl></details>",
            "</body></html>\n",
        ]
    )


def _drawing(rows: Sequence[ComparisonRow]) -> str:
    """Draw each change with its interval, and the prediction below, on a logarithmic axis."""
    reaches = [_reach(reach) for row in rows for reach in (row, row.predicted) if reach is not None]
    ends = [end for _, *both in reaches for end in both if 0 < end < math.inf]
    if not ends:
        return ""
    low, high = math.log(min(*ends, 0.98)), math.log(max(*ends, 1.02))
    height = _TOP + _ROW * len(rows) + 8

    def x(ratio: float) -> float:
        inside = min(max(math.log(ratio) if ratio > 0 else low, low), high)
        return _LABELS + 20 + (inside - low) / (high - low) * (_WIDTH - _LABELS - 60)

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="Changes with intervals">',
        f'<line x1="{x(1):.1f}" x2="{x(1):.1f}" y1="{_TOP - 6}" y2="{height}"'
        ' stroke="var(--faint)" stroke-dasharray="3 3"/>',
        f'<text x="{x(1):.1f}" y="14" text-anchor="middle">same cost</text>',
        '<text x="0" y="14"><tspan style="fill:var(--measured)">measured</tspan>'
        ' <tspan style="fill:var(--predicted)">predicted</tspan></text>',
    ]
    for number, row in enumerate(rows):
        y = _TOP + _ROW * number + 12
        parts.append(f'<text x="0" y="{y + 6}">{escape(f"{row.arm}: {row.metric}")}</text>')
        if math.isfinite(row.ratio):
            parts.append(_bar([x(end) for end in _reach(row)], y, "measured"))
        if row.predicted is not None:
            parts.append(_bar([x(end) for end in _reach(row.predicted)], y + 11, "predicted"))
    return "".join([*parts, "</svg>"])


def _reach(result: ComparisonRow | PredictionRecord) -> tuple[float, float, float]:
    """Return the estimate and interval to draw: the speed-up of a time, else the ratio."""
    return speedup(result) or (result.ratio, result.low, result.high)


def _bar(reach: Sequence[float], y: int, name: str) -> str:
    middle, low, high = reach
    return (
        f'<g stroke="var(--{name})" fill="var(--{name})" stroke-width="3">'
        f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}"/>'
        f'<circle cx="{middle:.1f}" cy="{y}" r="3"/></g>'
    )
