"""Throughput and memory against the batch size, as an SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from slipstream.report.curve import STYLE
from slipstream.units import format_bytes
from slipstream.verbs.batch.model import BatchModel

_THROUGHPUT, _MEMORY = "#4a90d9", "#7fb069"
_WIDTH, _LEFT, _RIGHT = 640, 78, 16
_TOP, _HEIGHT, _BETWEEN, _BELOW = 44, 170, 56, 40
_POINTS = 64


def batch_svg(model: BatchModel) -> str:
    """Two panels over one logarithmic axis of samples: samples per second with their interval,
    and the memory of the process under its limit. Dots were measured.
    """
    sizes = [one.samples for one in model.measured]
    low = max(min(min(sizes), model.samples) / 2, 1)
    # The limit itself, if it is not so far that the samples would be squeezed into a corner.
    high = max(max(sizes) * 2, min(model.max_batch(), max(sizes) * 16), low + 1)

    def x(samples: float) -> float:
        share = math.log(samples / low) / math.log(high / low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    across = [low * (high / low) ** (i / (_POINTS - 1)) for i in range(_POINTS)]
    bottom = _TOP + 2 * _HEIGHT + _BETWEEN
    title = f"{model.workload}: batch size"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + _BELOW}" '
        f'width="{_WIDTH}" role="img" aria-label="{escape(title)}"><style>{STYLE}</style>',
        f'<text x="{_LEFT}" y="18" font-weight="bold">{escape(title)}</text>',
    ]
    rates = [(one.samples, one.samples / one.step_ns * 1e9) for one in model.measured]
    drawn = across if model.why_not is None else []
    bands = [(b, model.throughput(b)) for b in drawn]
    most = max([rate for _, rate in rates] + [band.estimate for _, band in bands]) * 1.1
    out += _panel("samples per second", _TOP, most, lambda value: f"{value:.3g}")
    y = _scale(_TOP, most)
    if bands:
        upper = [f"{x(b):.1f},{y(min(band.high, most)):.1f}" for b, band in bands]
        lower = [f"{x(b):.1f},{y(band.low):.1f}" for b, band in reversed(bands)]
        shape = " ".join(upper + lower)
        out.append(f'<polygon points="{shape}" fill="{_THROUGHPUT}" opacity="0.2"/>')
        out.append(_line([(x(b), y(band.estimate)) for b, band in bands], _THROUGHPUT))
    out += [_dot(x(b), y(rate), _THROUGHPUT, f"{b}: {rate:.4g}/s") for b, rate in rates]
    begin = _TOP + _HEIGHT + _BETWEEN
    held = [(b, model.process(b).estimate) for b in across]
    most = max(value for _, value in held) * 1.1
    out += _panel("memory of the process", begin, most, format_bytes)
    y = _scale(begin, most)
    out.append(_line([(x(b), y(value)) for b, value in held], _MEMORY))
    out += [
        _dot(x(one.samples), y(one.process_bytes), _MEMORY, format_bytes(one.process_bytes))
        for one in model.measured
    ]
    if model.limit_bytes <= most:
        level = y(model.limit_bytes)
        out.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{level:.1f}" y2="{level:.1f}" '
            'style="stroke:#c4502f" stroke-dasharray="4 3"/>'
            f'<text class="faint" x="{_LEFT + 6}" y="{level - 5:.1f}">'
            f"limit {format_bytes(model.limit_bytes)}</text>"
        )
    marks = [(model.samples, "as it is"), (model.best(), "take this")]
    if model.knee is not None:
        marks.append((model.knee, "knee"))
    out += _marks([(x(b), b, word) for b, word in marks if low <= b <= high], bottom)
    return "".join([*out, "</svg>\n"])


def _scale(top: float, most: float) -> Callable[[float], float]:
    return lambda value: top + _HEIGHT * (1 - value / most)


def _panel(name: str, top: float, most: float, as_text: Callable[[float], str]) -> list[str]:
    out = [f'<text x="{_LEFT}" y="{top - 8}">{escape(name)}</text>']
    for tick in range(5):
        y = top + _HEIGHT * (1 - tick / 4)
        out.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        said = as_text(most * tick / 4) if tick else "0"
        out.append(
            f'<text class="faint" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{said}</text>'
        )
    return out


def _marks(marks: Sequence[tuple[float, int, str]], bottom: float) -> list[str]:
    """Vertical lines; words of neighbours that would touch go into one text."""
    out: list[str] = []
    words: list[tuple[float, str]] = []
    for at, samples, word in sorted(marks):
        out.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{bottom}" stroke-dasharray="2 3"/>'
        )
        text = f"{samples} ({word})"
        if words and at - words[-1][0] < 7 * (len(words[-1][1]) + len(text)) / 2:
            words[-1] = (words[-1][0], f"{words[-1][1]}, {text}")
        else:
            words.append((at, text))
    for at, text in words:
        half = 3.4 * len(text)
        centre = min(max(at, half + 4), _WIDTH - half - 4)
        out.append(
            f'<text x="{centre:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(text)}</text>'
        )
    return out


def _line(points: Sequence[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'


def _dot(x: float, y: float, colour: str, text: str) -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">'
        f"<title>{escape(text)}</title></circle>"
    )
