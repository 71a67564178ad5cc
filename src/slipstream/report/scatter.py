"""Scatter plot of two quantities with a front, as an SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from slipstream.report._svg import Drawing

_WIDTH, _HEIGHT, _LEFT, _TOP, _BELOW = 640, 260, 78, 44, 44
_ALL, _FRONT, _LIMIT = "#4a90d9", "#c46a10", "#c4502f"


def scatter_svg(
    title: str, axes: tuple[str, str], dots: Sequence[tuple[float, float, str]],
    line: Sequence[tuple[float, float]], *,
    limits: tuple[float | None, float | None] = (None, None),
    as_text: Callable[[float], str] = "{:.4g}".format, empty: str = "",
) -> str:  # fmt: skip
    """Draw dots, and a line through some of them, which are highlighted.

    Args:
        axes: names, across and up.
        dots: x, y and tooltip.
        line: x and y.
        limits: upper limits, across and up; None for no limit.
        empty: text without dots.
    """
    drawing = Drawing(title, _WIDTH, _TOP + _HEIGHT + _BELOW, _LEFT)
    if not dots:
        drawing.text(_LEFT, _TOP + 20, empty, faint=True)
        return str(drawing)
    across, up = limits
    xs = [dot[0] for dot in dots] + ([] if across is None else [across])
    ys = [dot[1] for dot in dots] + ([] if up is None else [up])
    low, high = min(ys), max(ys)
    floor, right = _TOP + _HEIGHT, _WIDTH - 8

    def place(x: float, y: float) -> tuple[float, float]:
        return _share(x, xs) * (_WIDTH - _LEFT - 24) + _LEFT, _TOP + _HEIGHT * (1 - _share(y, ys))

    ticks = [low + (high - low) * tick / 4 for tick in range(5)]
    drawing.scale(_LEFT, right, [(place(xs[0], y)[1], as_text(y)) for y in ticks])
    drawing.text(_LEFT, _TOP - 10, axes[1], faint=True)
    for x in (min(xs), max(xs)):
        drawing.text(place(x, low)[0], floor + 18, as_text(x), anchor="middle", faint=True)
    drawing.text(_WIDTH / 2, floor + 34, axes[0], anchor="middle", faint=True)
    if across is not None:
        at = place(across, low)[0]
        drawing.line(at, _TOP, at, floor, dashes="4 3", colour=_LIMIT)
        drawing.text(at - 4, _TOP + 12, f"limit {as_text(across)}", anchor="end", faint=True)
    if up is not None:
        at = place(xs[0], up)[1]
        drawing.line(_LEFT, at, right, at, dashes="4 3", colour=_LIMIT)
        drawing.text(_LEFT + 4, at + 14, f"limit {as_text(up)}", faint=True)
    if len(line) > 1:
        joined = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in line)
        drawing.shape(f'<polyline points="{joined}" fill="none" stroke="{_FRONT}"/>')
    for x, y, tip in dots:
        cx, cy = place(x, y)
        chosen = (x, y) in line
        drawing.shape(
            f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="{4 if chosen else 3}" '
            f'fill="{_FRONT if chosen else _ALL}" opacity="0.7">'
            f"<title>{escape(tip)}</title></circle>"
        )
    return str(drawing)


def _share(value: float, values: Sequence[float]) -> float:
    low, high = min(values), max(values)
    return 0.5 if low == high else (value - low) / (high - low)
