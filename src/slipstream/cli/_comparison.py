"""A running and a finished comparison as a person sees it: the same for `measure` and `prove`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from slipstream.cli._output import Say, emit

if TYPE_CHECKING:
    from slipstream.measure.comparison import Comparison
    from slipstream.measure.runner import Progress

_EVERY_S = 1.0


def show_progress(say: Say) -> Callable[[Progress], None]:
    """Tell how far a run is, at most once a second and at every change of phase."""
    shown, due = "", 0.0

    def show(now: Progress) -> None:
        nonlocal shown, due
        if now.phase == shown and time.monotonic() < due:
            return
        shown, due = now.phase, time.monotonic() + _EVERY_S
        line = now.phase
        if now.phase == "measure":
            line = f"block {now.block}, at most {now.seconds_left:.0f} s left"
        for claim in now.claims:
            if claim.carries:
                interval = f"[{claim.low:.3f}, {claim.high:.3f}]"
                line += f", {claim.arm}: {claim.metric} ratio {claim.ratio:.3f} {interval}"
        say(line)

    return show


def emit_comparison(comparison: Comparison, *, as_json: bool) -> None:
    """Print the result: a table, or everything as JSON."""
    from slipstream.measure.render import comparison_rows, rows_payload

    rows = comparison_rows(comparison.experiment, comparison.claims)
    payload = rows_payload(comparison.experiment, rows, comparison.claims)
    emit(comparison.table(), payload, as_json=as_json)
