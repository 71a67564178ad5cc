"""Scaling curve as an SVG: parts of a step over the number of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipstream.report._svg import Drawing
from slipstream.units import format_duration

_COLOURS = ("#4a90d9", "#7fb069", "#9b7fb0", "#e0a030", "#c4502f", "#5f6f7f", "#d98cb3",
            "#8a6d3b")  # fmt: skip
_LEFT, _TOP, _HEIGHT, _BAR, _GAP, _BELOW = 70, 54, 240, 44, 26, 58


def curve_svg(
    title: str, columns: Sequence[tuple[str, Mapping[str, float], str]], parts: Sequence[str]
) -> str:
    """Draw stacked bars.

    Args:
        columns: label, nanoseconds by part, and the bottleneck shown above the bar.
        parts: names, from bottom to top.
    """
    most = max((sum(column.values()) for _, column, _ in columns), default=0.0) or 1.0
    width = max(_LEFT + len(columns) * (_BAR + _GAP) + _GAP, _LEFT + 106 * len(parts))
    floor = _TOP + _HEIGHT
    drawing = Drawing(title, width, floor + _BELOW, _LEFT)
    ticks = [(floor - _HEIGHT * tick / 4, most * tick / 4) for tick in range(5)]
    drawing.scale(_LEFT, width - 8, [(y, format_duration(ns) if ns else "0") for y, ns in ticks])
    colours = list(zip(parts, _COLOURS, strict=False))
    for number, (label, column, wall) in enumerate(columns):
        x, y = _LEFT + _GAP + number * (_BAR + _GAP), float(floor)
        for part, colour in colours:
            ns = column.get(part, 0.0)
            height = _HEIGHT * ns / most
            y -= height
            drawing.rect(x, y, _BAR, height, colour, tip=f"{part}: {format_duration(ns)}")
        middle = x + _BAR / 2
        drawing.text(middle, y - 5, wall, anchor="middle", faint=True, size=10)
        drawing.text(middle, floor + 16, label, anchor="middle")
    drawing.legend(_LEFT, floor + 34, 104, [(colour, 1.0, part) for part, colour in colours])
    return str(drawing)
