"""Links over time as an SVG: bytes sent and received, and when training waits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from slipstream.report._svg import Drawing
from slipstream.units import format_duration
from slipstream.verbs.proving.exposed import Exposed

_SENT, _RECEIVED, _WAITING = "#4a90d9", "#7fb069", "#e0a030"
_LEFT, _WIDTH, _RIGHT = 96, 640, 32
_TOP, _HALF, _HEAD, _BELOW = 30, 52, 22, 26
# Minimum distance of labels of the time axis.
_LABEL_DISTANCE = 52
_LEGEND = (
    (_SENT, 1.0, "sent"), (_RECEIVED, 1.0, "received"), (_WAITING, 0.3, "training waits"),
)  # fmt: skip


def network_svg(title: str, sides: Sequence[Exposed]) -> str:
    """Draw a panel per side on one scale, with sent bytes above and received bytes below the line.

    Args:
        sides: measured with real ranks.
    """
    long_s = max((side.drawn["stamps_s"][-1] for side in sides), default=0.0) or 1.0
    most = max(map(_max_rate, sides), default=0.0) or 1.0
    panel = _HEAD + 2 * _HALF + _BELOW
    width, height = _LEFT + _WIDTH + _RIGHT, _TOP + len(sides) * panel + 24
    drawing = Drawing(title, width, height, _LEFT)
    for number, side in enumerate(sides):
        top = _TOP + number * panel + _HEAD
        _draw_panel(drawing, side, top, _WIDTH / long_s, _HALF / most)
    drawing.legend(_LEFT, height - 20, 110, _LEGEND)
    return str(drawing)


def _draw_panel(
    drawing: Drawing, side: Exposed, top: float, x_scale: float, y_scale: float
) -> None:
    drawn, link = side.drawn, side.link
    stamps, middle, bottom = drawn["stamps_s"], top + _HALF, top + 2 * _HALF
    line = link.line_bytes_per_s
    shared = link.ranks_counted > 1

    def x(seconds: float) -> float:
        place: float = _LEFT + min(max(seconds, 0.0), stamps[-1]) * x_scale
        return place

    name = side.technique + (f" ({side.how})" if side.how else "")
    counted = "; loopback, all ranks" if shared else ""
    drawing.text(_LEFT, top - 7, f"{name}: {format_duration(side.step_ns)} per step{counted}")
    for began, ended in drawn["waits_s"]:
        width = max(x(ended) - x(began), 0.0)
        drawing.rect(x(began), top, width, 2 * _HALF, _WAITING, opacity=0.3)
    directions = (
        [("sent", _SENT, -1)] if shared else [("sent", _SENT, -1), ("received", _RECEIVED, 1)]
    )
    for direction, colour, sign in directions:
        path = f"M{x(drawn['times_s'][0]):.1f} {middle}"
        readings = zip(drawn["times_s"], drawn[direction], strict=True)
        for (before, had), (now, has) in pairwise(readings):
            if now > before:
                y = middle + sign * min((has - had) / (now - before) * y_scale, _HALF)
                path += f"L{x(before):.1f} {y:.1f}L{x(now):.1f} {y:.1f}"
        path += f"L{x(drawn['times_s'][-1]):.1f} {middle}Z"
        drawing.shape(f'<path d="{path}" fill="{colour}"/>')
    end = x(stamps[-1])
    for rate in (line, -line) if line and not shared else ():
        y = middle - rate * y_scale
        drawing.line(_LEFT, y, end, y, dashes="4 3")
    y = middle - (line * y_scale if line else _HALF)
    label = f"{8 * (line or _HALF / y_scale) / 1e6:.3g} Mbit/s"
    drawing.text(_LEFT - 6, y + 4, label, anchor="end", faint=True)
    drawing.line(_LEFT, middle, end, middle)
    labelled = -float(_LABEL_DISTANCE)
    for number, stamp in enumerate(stamps):
        drawing.line(x(stamp), top, x(stamp), bottom)
        if x(stamp) - labelled >= _LABEL_DISTANCE:
            labelled = x(stamp)
            words = format_duration(1e9 * stamp) if number else "0"
            drawing.text(x(stamp), bottom + 14, words, anchor="middle", faint=True, size=10)


def _max_rate(side: Exposed) -> float:
    """Return the maximum rate drawn for a side: that of its cable, if it has one."""
    line = side.link.line_bytes_per_s
    if line:
        # A token bucket may exceed the rate for a moment.
        return 1.15 * line
    times, sent = side.drawn["times_s"], side.drawn["sent"]
    rates = [
        (has - had) / (now - before)
        for (before, had), (now, has) in pairwise(zip(times, sent, strict=True))
        if now > before
    ]
    return max(rates, default=0.0)
