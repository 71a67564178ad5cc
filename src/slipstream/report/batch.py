"""Plot of throughput and memory over the batch size, as an SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from slipstream.report._svg import Drawing
from slipstream.units import format_bytes
from slipstream.verbs.batch.model import BatchModel

_THROUGHPUT, _MEMORY = "#4a90d9", "#7fb069"
_WIDTH, _LEFT, _RIGHT = 640, 78, 16
_TOP, _HEIGHT, _BETWEEN, _BELOW = 44, 170, 56, 40
_POINTS = 64


def batch_svg(model: BatchModel) -> str:
    """Plot samples per second with interval, and memory with its limit, over samples (log scale).

    Dots are measurements.
    """
    sizes = [measured.samples for measured in model.measured]
    low = max(min(min(sizes), model.samples) / 2, 1)
    # Up to the limit, unless the measured samples would be squeezed into a corner.
    high = max(max(sizes) * 2, min(model.max_batch(), max(sizes) * 16), low + 1)

    def x(samples: float) -> float:
        share = math.log(samples / low) / math.log(high / low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    across = [low * (high / low) ** (i / (_POINTS - 1)) for i in range(_POINTS)]
    bottom = _TOP + 2 * _HEIGHT + _BETWEEN
    title = f"{model.workload}: batch size"
    drawing = Drawing(title, _WIDTH, bottom + _BELOW, _LEFT)
    rates = [(m.samples, m.samples / m.step_ns * 1e9) for m in model.measured]
    bands = [(b, model.throughput(b)) for b in (across if model.why_not is None else [])]
    most = max([rate for _, rate in rates] + [band.estimate for _, band in bands]) * 1.1
    _draw_panel(drawing, "samples per second", _TOP, most, lambda value: f"{value:.3g}")
    y = _scale(_TOP, most)
    if bands:
        upper = [f"{x(b):.1f},{y(min(band.high, most)):.1f}" for b, band in bands]
        lower = [f"{x(b):.1f},{y(band.low):.1f}" for b, band in reversed(bands)]
        shape = " ".join(upper + lower)
        drawing.shape(f'<polygon points="{shape}" fill="{_THROUGHPUT}" opacity="0.2"/>')
        drawing.shape(_line([(x(b), y(band.estimate)) for b, band in bands], _THROUGHPUT))
    for b, rate in rates:
        drawing.shape(_dot(x(b), y(rate), _THROUGHPUT, f"{b}: {rate:.4g}/s"))
    begin = _TOP + _HEIGHT + _BETWEEN
    held = [(b, model.process(b).estimate) for b in across]
    most = max(value for _, value in held) * 1.1
    _draw_panel(drawing, "memory of the process", begin, most, format_bytes)
    y = _scale(begin, most)
    drawing.shape(_line([(x(b), y(value)) for b, value in held], _MEMORY))
    for measured in model.measured:
        place = x(measured.samples), y(measured.process_bytes)
        drawing.shape(_dot(*place, _MEMORY, format_bytes(measured.process_bytes)))
    if model.limit_bytes <= most:
        level = y(model.limit_bytes)
        drawing.line(_LEFT, level, _WIDTH - _RIGHT, level, dashes="4 3", colour="#c4502f")
        limit = f"limit {format_bytes(model.limit_bytes)}"
        drawing.text(_LEFT + 6, level - 5, limit, faint=True)
    marks = [(model.samples, "baseline"), (model.best(), "recommended")]
    if model.knee is not None:
        marks.append((model.knee, "knee"))
    _draw_marks(drawing, [(x(b), b, word) for b, word in marks if low <= b <= high], bottom)
    return str(drawing)


def _scale(top: float, most: float) -> Callable[[float], float]:
    return lambda value: top + _HEIGHT * (1 - value / most)


def _draw_panel(
    drawing: Drawing, name: str, top: float, most: float, as_text: Callable[[float], str]
) -> None:
    drawing.text(_LEFT, top - 8, name)
    values, y = [most * tick / 4 for tick in range(5)], _scale(top, most)
    ticks = [(y(value), as_text(value) if value else "0") for value in values]
    drawing.scale(_LEFT, _WIDTH - _RIGHT, ticks)


def _draw_marks(drawing: Drawing, marks: Sequence[tuple[float, int, str]], bottom: float) -> None:
    """Draw vertical lines; labels of close neighbours are joined."""
    words: list[tuple[float, str]] = []
    for at, samples, word in sorted(marks):
        drawing.line(at, _TOP, at, bottom, dashes="2 3")
        text = f"{samples} ({word})"
        if words and at - words[-1][0] < 7 * (len(words[-1][1]) + len(text)) / 2:
            words[-1] = (words[-1][0], f"{words[-1][1]}, {text}")
        else:
            words.append((at, text))
    for at, text in words:
        half = 3.4 * len(text)
        centre = min(max(at, half + 4), _WIDTH - half - 4)
        drawing.text(centre, bottom + 18, text, anchor="middle")


def _line(points: Sequence[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'


def _dot(x: float, y: float, colour: str, text: str) -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">'
        f"<title>{escape(text)}</title></circle>"
    )
