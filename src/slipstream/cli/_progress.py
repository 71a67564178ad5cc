"""A running comparison as a person sees it: the same for `measure` and `prove`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from slipstream.cli._output import Say
from slipstream.units import format_reach

if TYPE_CHECKING:
    from slipstream.measure.records import Claim
    from slipstream.measure.runner import Progress

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
