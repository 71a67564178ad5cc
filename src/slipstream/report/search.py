"""Plot of a study as an SVG: two objectives, or one objective over trials."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.report._svg import Drawing
from slipstream.search.listing import Listing

_WIDTH, _HEIGHT, _LEFT, _TOP, _BELOW = 640, 260, 78, 44, 44
_ALL, _FRONT = "#4a90d9", "#c46a10"


def front_svg(listing: Listing) -> str:
    """Draw a dot per scored trial, and the Pareto front or the best value so far."""
    trials, objectives = listing.full_trials, listing.objectives
    if len(objectives) > 1:
        across, up = objectives[0].metric, objectives[1].metric
        dots = [(t.values[across], t.values[up], t.number) for t in trials]
        line = [(t.values[across], t.values[up]) for t in listing.front]
    else:
        across, up = "trial", objectives[0].metric
        by_number = sorted(trials, key=lambda trial: trial.number)
        dots = [(float(t.number), t.values[up], t.number) for t in by_number]
        line, best = [], None
        for trial in by_number:
            value = trial.values[up]
            if not trial.violation and (best is None or objectives[0].sign * (value - best) < 0):
                best = value
            if best is not None:
                line.append((float(trial.number), best))
    drawing = Drawing(f"study {listing.name}", _WIDTH, _TOP + _HEIGHT + _BELOW, _LEFT)
    if not dots:
        drawing.text(_LEFT, _TOP + 20, "no trial is complete yet", faint=True)
        return str(drawing)
    xs, ys = [dot[0] for dot in dots], [dot[1] for dot in dots]
    low, high = min(ys), max(ys)
    ticks = [low + (high - low) * tick / 4 for tick in range(5)]

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _share(x, xs) * (_WIDTH - _LEFT - 24) + _LEFT,
            _TOP + _HEIGHT * (1 - _share(y, ys)),
        )

    drawing.scale(_LEFT, _WIDTH - 8, [(place(xs[0], y)[1], f"{y:.4g}") for y in ticks])
    drawing.text(_LEFT, _TOP - 10, up, faint=True)
    for x in (min(xs), max(xs)):
        drawing.text(place(x, low)[0], _TOP + _HEIGHT + 18, f"{x:.4g}", anchor="middle", faint=True)
    drawing.text(_WIDTH / 2, _TOP + _HEIGHT + 34, across, anchor="middle", faint=True)
    if len(line) > 1:
        joined = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in line)
        drawing.shape(f'<polyline points="{joined}" fill="none" stroke="{_FRONT}"/>')
    for x, y, number in dots:
        cx, cy = place(x, y)
        chosen = (x, y) in line
        drawing.shape(
            f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="{4 if chosen else 3}" '
            f'fill="{_FRONT if chosen else _ALL}" opacity="0.7">'
            f"<title>trial {number}: {across} {x:.4g}, {up} {y:.4g}</title></circle>"
        )
    return str(drawing)


def _share(value: float, values: Sequence[float]) -> float:
    low, high = min(values), max(values)
    return 0.5 if low == high else (value - low) / (high - low)
