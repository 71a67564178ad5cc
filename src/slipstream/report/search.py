"""Plot of a study as an SVG: two objectives, or one objective over trials."""

from __future__ import annotations

from slipstream.report.scatter import scatter_svg
from slipstream.search.listing import Listing


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
    labelled = [(x, y, f"trial {n}: {across} {x:.4g}, {up} {y:.4g}") for x, y, n in dots]
    return scatter_svg(
        f"study {listing.name}", (across, up), labelled, line, empty="no trial is complete yet"
    )
