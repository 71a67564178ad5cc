"""Links over time as an SVG: what goes out and comes in, and where training stands still."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from slipstream.report.curve import STYLE
from slipstream.units import format_duration

_SENT, _RECEIVED, _STILL = "#4a90d9", "#7fb069", "#e0a030"
_LEFT, _WIDTH, _RIGHT = 96, 640, 32
_TOP, _HALF, _HEAD, _BELOW = 30, 52, 22, 26
# Between the middles of two times below a panel, so that they can be told apart.
_APART = 52
_LEGEND = (
    (_SENT, 1.0, "sent"), (_RECEIVED, 1.0, "received"), (_STILL, 0.3, "training stands still"),
)  # fmt: skip


def network_svg(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A panel a side, all on one scale: bytes out above the line, bytes in below it.

    Args:
        rows: sides, as ``prove --json`` has them under ``exposed``.
    """
    long_s = max((row["drawn"]["stamps_s"][-1] for row in rows), default=0.0) or 1.0
    most = max(map(_most, rows), default=0.0) or 1.0
    panel = _HEAD + 2 * _HALF + _BELOW
    width, height = _LEFT + _WIDTH + _RIGHT, _TOP + len(rows) * panel + 24
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" role="img" aria-label="{escape(title)}"><style>{STYLE}</style>',
        f'<text x="{_LEFT}" y="18" font-weight="bold">{escape(title)}</text>',
    ]
    for number, row in enumerate(rows):
        out += _panel(row, _TOP + number * panel + _HEAD, _WIDTH / long_s, _HALF / most)
    for number, (colour, opacity, what) in enumerate(_LEGEND):
        x, y = _LEFT + 110 * number, height - 20
        out.append(
            f'<rect x="{x}" y="{y}" width="10" height="10" fill="{colour}" opacity="{opacity}"/>'
            f'<text x="{x + 14}" y="{y + 9}">{what}</text>'
        )
    return "".join([*out, "</svg>\n"])


def _panel(row: Mapping[str, Any], top: float, x_scale: float, y_scale: float) -> list[str]:
    drawn, link = row["drawn"], row["link"]
    stamps, middle = drawn["stamps_s"], top + _HALF
    line = link["line_bytes_per_s"]
    shared = link["ranks_counted"] > 1

    def x(seconds: float) -> float:
        place: float = _LEFT + min(max(seconds, 0.0), stamps[-1]) * x_scale
        return place

    name = row["technique"] + (f" ({row['how']})" if row["how"] else "")
    counted = "; loopback, all ranks" if shared else ""
    out = [
        f'<text x="{_LEFT}" y="{top - 7}">{escape(name)}: {format_duration(row["step_ns"])} a step'
        f"{counted}</text>"
    ]
    out += [
        f'<rect x="{x(began):.1f}" y="{top}" width="{max(x(ended) - x(began), 0.0):.1f}" '
        f'height="{2 * _HALF}" fill="{_STILL}" opacity="0.3"/>'
        for began, ended in drawn["waits_s"]
    ]
    ways = [("sent", _SENT, -1)] if shared else [("sent", _SENT, -1), ("received", _RECEIVED, 1)]
    for way, colour, sign in ways:
        path = f"M{x(drawn['times_s'][0]):.1f} {middle}"
        readings = zip(drawn["times_s"], drawn[way], strict=True)
        for (before, had), (now, has) in pairwise(readings):
            if now > before:
                y = middle + sign * min((has - had) / (now - before) * y_scale, _HALF)
                path += f"L{x(before):.1f} {y:.1f}L{x(now):.1f} {y:.1f}"
        out.append(f'<path d="{path}L{x(drawn["times_s"][-1]):.1f} {middle}Z" fill="{colour}"/>')
    end = x(stamps[-1])
    for rate in (line, -line) if line and not shared else ():
        y = middle - rate * y_scale
        out.append(
            f'<line x1="{_LEFT}" x2="{end:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke-dasharray="4 3"/>'
        )
    label = _megabits(line) if line else _megabits(_HALF / y_scale)
    y = middle - (line * y_scale if line else _HALF)
    out.append(
        f'<text class="faint" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        f'<line x1="{_LEFT}" x2="{end:.1f}" y1="{middle}" y2="{middle}"/>'
    )
    told = -float(_APART)
    for number, stamp in enumerate(stamps):
        out.append(
            f'<line x1="{x(stamp):.1f}" x2="{x(stamp):.1f}" y1="{top}" y2="{top + 2 * _HALF}"/>'
        )
        if x(stamp) - told < _APART:
            continue
        told = x(stamp)
        out.append(
            f'<text class="faint" x="{x(stamp):.1f}" y="{top + 2 * _HALF + 14}" '
            f'text-anchor="middle" font-size="10">'
            f"{format_duration(1e9 * stamp) if number else '0'}</text>"
        )
    return out


def _most(row: Mapping[str, Any]) -> float:
    """The highest rate that is drawn of a side: of its cable, where it has one."""
    line: float | None = row["link"]["line_bytes_per_s"]
    if line:
        # What a bucket lets pass at once may be above it for a moment.
        return 1.15 * line
    times, sent = row["drawn"]["times_s"], row["drawn"]["sent"]
    rates = [
        (has - had) / (now - before)
        for (before, had), (now, has) in pairwise(zip(times, sent, strict=True))
        if now > before
    ]
    return max(rates, default=0.0)


def _megabits(rate: float) -> str:
    return f"{8 * rate / 1e6:.3g} Mbit/s"
