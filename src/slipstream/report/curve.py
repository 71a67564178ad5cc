"""Scaling curve as an SVG: shares of a step by number of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipstream.report._svg import Drawing
from slipstream.units import format_duration

_COLOURS = ("#4a90d9", "#7fb069", "#9b7fb0", "#e0a030", "#c4502f", "#5f6f7f", "#d98cb3",
            "#8a6d3b")  # fmt: skip
_LEFT, _TOP, _HEIGHT, _BELOW = 70, 72, 240, 58
_BAR, _GAP, _ENTRY = 44, 26, 112


def curve_svg(
    title: str, columns: Sequence[tuple[str, Mapping[str, float], str]], parts: Sequence[str]
) -> str:
    """Draw each step as a bar of shares, with its time and bottleneck above.

    Args:
        columns: label, nanoseconds by part, and the bottleneck.
        parts: names, from bottom to top; those that take no time in any column are left out.
    """
    drawn = [
        (part, colour)
        for part, colour in zip(parts, _COLOURS, strict=False)
        if any(column.get(part, 0.0) > 0 for _, column, _ in columns)
    ]
    width = max(_LEFT + len(columns) * (_BAR + _GAP) + _GAP, _LEFT + _ENTRY * len(drawn))
    apart = (width - _LEFT - _GAP) / max(1, len(columns))
    floor = _TOP + _HEIGHT
    drawing = Drawing(title, width, floor + _BELOW, _LEFT)
    ticks = [(floor - _HEIGHT * tick / 4, f"{25 * tick} %") for tick in range(5)]
    drawing.scale(_LEFT, width - 8, ticks)
    for number, (label, column, wall) in enumerate(columns):
        total = sum(column.values()) or 1.0
        x, y = _LEFT + _GAP + number * apart, float(floor)
        for part, colour in drawn:
            ns = column.get(part, 0.0)
            height = _HEIGHT * ns / total
            y -= height
            tip = f"{part}: {format_duration(ns)}, {ns / total:.1%}"
            drawing.rect(x, y, apart - _GAP, height, colour, tip=tip)
        middle = x + (apart - _GAP) / 2
        drawing.text(middle, _TOP - 20, format_duration(total), anchor="middle")
        drawing.text(middle, _TOP - 6, wall, anchor="middle", faint=True, size=10)
        drawing.text(middle, floor + 16, label, anchor="middle")
    drawing.legend(_LEFT, floor + 34, _ENTRY, [(colour, 1.0, part) for part, colour in drawn])
    return str(drawing)
