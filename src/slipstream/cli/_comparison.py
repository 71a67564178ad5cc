"""A running and a finished comparison as a person sees it: the same for `measure` and `prove`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slipstream.cli._exposed import exposed_table, link_table
from slipstream.cli._output import Say, emit
from slipstream.cli._ranks import ranks_table
from slipstream.units import format_reach

if TYPE_CHECKING:
    from slipstream.measure.comparison import Comparison
    from slipstream.measure.ledger import Score
    from slipstream.measure.records import Claim
    from slipstream.measure.runner import Progress
    from slipstream.tables import Table

_EVERY_S = 1.0
# In a log every line stays.
_EVERY_IN_A_LOG_S = 5.0
_SHOWN_ARMS = 3


def show_progress(say: Say) -> Callable[[Progress], None]:
    """Tell how far a run is, now and then and at every change of phase."""
    every_s = _EVERY_S if sys.stderr.isatty() else _EVERY_IN_A_LOG_S
    shown, due = "", 0.0

    def show(now: Progress) -> None:
        nonlocal shown, due
        if now.phase == shown and time.monotonic() < due:
            return
        shown, due = now.phase, time.monotonic() + every_s
        line = now.phase
        if now.phase == "measure":
            line = f"block {now.block}, at most {now.seconds_left:.0f} s left"
            line += f" ({now.widened})" if now.widened else ""
        say("; ".join([line, *_ratios([claim for claim in now.claims if claim.carries])]))

    return show


def _ratios(claims: Sequence[Claim]) -> list[str]:
    """The cheapest arms' ratios; the others only counted, so that a line stays one."""
    best = sorted(claims, key=lambda claim: claim.ratio)
    found = [
        f"{c.arm} {c.ratio:.2f} {format_reach(c.ratio, c.low, c.high)}" for c in best[:_SHOWN_ARMS]
    ]
    left = len(best) - _SHOWN_ARMS
    return found + ([f"{left} more"] if left > 0 else [])


def emit_comparison(
    comparison: Comparison,
    *,
    as_json: bool,
    before: Sequence[Score] = (),
    ranks: Sequence[dict[str, Any]] = (),
    exposed: Sequence[dict[str, Any]] = (),
) -> None:
    """Print the result: a table, or everything as JSON.

    Args:
        before: scores of what a person was shown before the measurement, by another prediction
            than the one in the table.
        ranks: rows of sides that several processes took together.
        exposed: what their steps stand still for, and what their links carry.
    """
    from slipstream.measure.render import comparison_rows, rows_payload

    rows = comparison_rows(comparison.experiment, comparison.claims)
    payload = rows_payload(comparison.experiment, rows, comparison.claims)
    payload["shown_before"] = [
        {
            "technique": score.prediction.technique,
            "metric": score.prediction.metric,
            "created": score.prediction.created,
            "ratio": score.prediction.ratio,
            "interval": [score.prediction.low, score.prediction.high],
            "within": score.within,
        }
        for score in before
    ]
    table = comparison.table()
    told = replace(table, notes=(*table.notes, *map(shown_before, before)))
    more, of_ranks = tables_of_ranks(ranks, exposed)
    emit([told, *more], payload | of_ranks, as_json=as_json)


def tables_of_ranks(
    ranks: Sequence[dict[str, Any]], exposed: Sequence[dict[str, Any]]
) -> tuple[list[Table], dict[str, Any]]:
    """What is told besides of sides that several processes took together, and as JSON.

    Args:
        ranks, exposed: as of `emit_comparison`.
    """
    if not ranks:
        return [], {}
    waits = [exposed_table(exposed), link_table(exposed)] if exposed else []
    return [ranks_table(ranks), *waits], {"ranks": list(ranks), "exposed": list(exposed)}


def shown_before(score: Score) -> str:
    """What was predicted before a measurement, when, and whether it came true; one sentence."""
    one, found = score.prediction, score.claim
    if score.within:
        lies = "inside what was shown then"
    else:
        lies = "outside what was shown then, whatever the newer prediction above says"
    speedup = f"{1 / one.ratio:.2f}x {format_reach(1 / one.ratio, 1 / one.high, 1 / one.low)}"
    return (
        f"{one.technique}, {one.metric}: {one.created[:10]} {one.created[11:16]} UTC you were "
        f"shown {one.ratio:.3f} {format_reach(one.ratio, one.low, one.high, '{:.3f}'.format)} "
        f"({speedup}); the measured {found.ratio:.3f} ({1 / found.ratio:.2f}x) lies {lies}."
    )
