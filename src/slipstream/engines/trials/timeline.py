"""Export placements of trials as a Perfetto trace, with a row per device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.engines.trials.simulator import Interval


def perfetto(
    intervals: Sequence[Interval], names: Mapping[int, int] | None, process: str
) -> dict[str, Any]:
    """Return a trace in Perfetto's JSON format, in microseconds.

    Args:
        names: trial numbers by row of the state.
        process: name of the group of rows.
    """
    devices = sorted({device for interval in intervals for device in interval.devices})
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": process}}
    ]
    # Trials that share a device need separate rows, or their slices would appear nested.
    lanes: dict[int, list[float]] = {device: [] for device in devices}
    for interval in sorted(intervals, key=lambda each: each.start_s):
        number = (names or {}).get(interval.trial, interval.trial)
        width = "packed" if interval.packed else f"width {len(interval.devices)}"
        for device in interval.devices:
            ends = lanes[device]
            lane = next(
                (k for k, end in enumerate(ends) if end <= interval.start_s + 1e-9), len(ends)
            )
            ends[lane : lane + 1] = [interval.end_s]
            events.append({
                "ph": "X", "pid": 1, "tid": device * 16 + lane,
                "name": f"trial {number} ({width})", "cat": "packed" if interval.packed else "wide",
                "ts": interval.start_s * 1e6, "dur": (interval.end_s - interval.start_s) * 1e6,
                "args": {"trial": number, "devices": list(interval.devices)},
            })  # fmt: skip
    events += [
        {"ph": "M", "pid": 1, "tid": device * 16 + lane, "name": "thread_name",
         "args": {"name": f"device {device}" + (f" ({lane + 1})" if lane else "")}}
        for device, ends in lanes.items() for lane in range(len(ends))
    ]  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}
