"""What ran where, as a Perfetto trace: one row a device, one slice a trial on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.engines.trials.simulator import Interval


def perfetto(
    intervals: Sequence[Interval], names: Mapping[int, int] | None, process: str
) -> dict[str, Any]:
    """A trace in the JSON form that Perfetto opens; microseconds.

    Args:
        names: trial numbers by row.
        process: what the group of rows is called.
    """
    devices = sorted({device for one in intervals for device in one.devices})
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": process}}
    ]
    # Trials that share a device need a row each, or their slices would seem nested.
    lanes: dict[int, list[float]] = {device: [] for device in devices}
    for one in sorted(intervals, key=lambda interval: interval.start_s):
        number = (names or {}).get(one.trial, one.trial)
        width = "packed" if one.packed else f"width {len(one.devices)}"
        for device in one.devices:
            ends = lanes[device]
            lane = next((k for k, end in enumerate(ends) if end <= one.start_s + 1e-9), len(ends))
            ends[lane : lane + 1] = [one.end_s]
            events.append({
                "ph": "X", "pid": 1, "tid": device * 16 + lane,
                "name": f"trial {number} ({width})", "cat": "packed" if one.packed else "wide",
                "ts": one.start_s * 1e6, "dur": (one.end_s - one.start_s) * 1e6,
                "args": {"trial": number, "devices": list(one.devices)},
            })  # fmt: skip
    events += [
        {"ph": "M", "pid": 1, "tid": device * 16 + lane, "name": "thread_name",
         "args": {"name": f"device {device}" + (f" ({lane + 1})" if lane else "")}}
        for device, ends in lanes.items() for lane in range(len(ends))
    ]  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}
