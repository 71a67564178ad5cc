"""Whether a region is faster as a kernel, as micro-benchmarks measure it on this machine, once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.durations import Durations, Question
from slipstream.techniques.fusion.lowering import Region
from slipstream.techniques.fusion.recorded import fused_call

MOST = 0.98
"""A kernel replaces its operators only where it takes at most this share of their time."""


def measured_faster(regions: Sequence[Region]) -> list[bool]:
    """Of each region, whether its kernel takes less time than its operators, as measured here."""
    durations = Durations(torch.get_num_threads())
    fused = [fused_call(region) for region in regions]
    parts = [[Question(step.call, warm=True) for step in region.steps] for region in regions]
    durations.measure([*fused, *(call for calls in parts for call in calls)])
    faster = []
    for kernel, calls in zip(fused, parts, strict=True):
        ours = durations.lookup(kernel)
        theirs = [durations.lookup(call) for call in calls]
        if ours is None:
            faster.append(False)
            continue
        # What cannot be run alone counts as what its kernel takes.
        known = [ours.nanoseconds if one is None else one.nanoseconds for one in theirs]
        faster.append(ours.nanoseconds <= MOST * sum(known))
    return faster
