"""What a step costs on a processor, without building it: how often its loops run, times weights.

The counts follow from the kernels' loops and a step's numbers; the weights are fitted, per kernel
and processor, on steps of random shapes run on the emulated processor (`slipstream_bench` keeps the
program that fits them), and stand in ``costs.json``. Instructions hardly depend on data: what
saturates or is clamped takes a few more or less.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from slipstream.ship.firmware.lowering import Program, Step
from slipstream.ship.firmware.targets import Target

# Bytes of the structs that describe steps (see kernels/slip_micro.h) and of softmax's table.
STRUCT_BYTES = {
    "slip_conv": 40, "slip_depthwise": 36, "slip_pool": 18, "slip_add": 48, "slip_softmax": 20,
}  # fmt: skip
_SOFTMAX_TABLE = 28
# What a model of many steps may save more than one of a single step.
_FRAME = 24
Counts = dict[str, float]


@cache
def _weights() -> dict[str, Any]:
    found = files("slipstream.ship.firmware") / "costs.json"
    return json.loads(found.read_text("utf-8"))  # type: ignore[no-any-return]


def fitted(target: Target) -> bool:
    """Whether there are weights for a processor."""
    return target.name in _weights()


def instructions(step: Step, target: Target) -> int:
    """Of one call, predicted."""
    weights: Mapping[str, float] = _weights()[target.name]["instructions"][step.kernel]
    found = counts(step)
    return round(sum(weights.get(name, 0.0) * count for name, count in found.items()))


def constant_bytes(program: Program) -> int:
    """Weights, biases, multipliers and descriptions of steps, in flash."""
    tables = sum(table.nbytes for step in program.steps for table in step.tables.values())
    structs = sum(STRUCT_BYTES[step.struct] for step in program.steps)
    softmax = any(step.struct == "slip_softmax" for step in program.steps)
    return int(tables + structs + (_SOFTMAX_TABLE if softmax else 0))


def code_bytes(program: Program, target: Target) -> int:
    """Functions of kernels, of the model, and of the C library."""
    found = _weights()[target.name]
    kernels = {step.kernel for step in program.steps}
    own = sum(int(found["code"][kernel]) for kernel in kernels)
    return own + int(found["step_code"]) * len(program.steps) + int(found["library"])


def stack_bytes(program: Program, target: Target) -> int:
    """Of the deepest call, at most."""
    stacks: Mapping[str, int] = _weights()[target.name]["stack"]
    return _FRAME + max(stacks[step.kernel] for step in program.steps)


def counts(step: Step) -> Counts:
    """How often the parts of a step's loops run, by name."""
    return {"call": 1.0} | {name: float(n) for name, n in _COUNTS[step.kernel](step).items() if n}


def _gathered(n: Mapping[str, int]) -> Counts:
    """Of `slip_gather`, over all pixels."""
    inner = 1
    for side in ("h", "w"):
        size, kernel, stride = n[f"in_{side}"], n[f"kernel_{side}"], n[f"stride_{side}"]
        before = n["pad_top" if side == "h" else "pad_left"]
        starts = (place * stride - before for place in range(n[f"out_{side}"]))
        inner *= sum(0 <= start <= size - kernel for start in starts)
    pixels = n["out_h"] * n["out_w"]
    if max(n["dilation_h"], n["dilation_w"]) > 1:
        inner = 0
    taps, run = n["kernel_h"] * n["kernel_w"], n["kernel_w"] * n["in_c"]
    border = pixels - inner
    rows = inner * n["kernel_h"]
    return {
        "inner": inner, "inner rows": rows, "inner words": rows * (run // 4),
        "inner bytes": rows * (run % 4) if run != 3 else 0, "border": border,
        "border taps": border * taps, "border words": border * taps * (n["in_c"] // 4),
        "border bytes": border * taps * (n["in_c"] % 4),
        "zeros": pixels * (n["depth"] - taps * n["in_c"]),
    }  # fmt: skip


def _direct(n: Mapping[str, int]) -> bool:
    window = n["kernel_h"] * n["kernel_w"] * n["stride_h"] * n["stride_w"]
    return window == 1 and n["depth"] == n["in_c"]


def _wide(step: Step) -> int:
    """Channels that cannot take the short form."""
    seconds = step.tables["rescale"][1::2]
    return int((seconds[: step.numbers.get("out_c", len(seconds))] <= 0).sum())


def _conv(step: Step) -> Counts:
    n = step.numbers
    pixels, channels = n["out_h"] * n["out_w"], n["out_c"]
    two, one, quads, groups = pixels // 2, pixels % 2, n["depth"] // 4, -(-channels // 4)
    fast = channels // 4 if n["narrow"] else 0
    wide = _wide(step)
    found: Counts = {
        "blocks": two, "words": two * quads, "groups": two * groups,
        "products": two * groups * quads, "fast groups": two * fast,
        "slow outputs": two * 2 * (channels - 4 * fast), "slow groups": two * (groups - fast),
        "wide outputs": pixels * wide, "single": one, "single groups": one * groups,
        "single products": one * groups * quads, "single outputs": one * channels,
    }  # fmt: skip
    return found if _direct(n) else found | _gathered(n)


def _conv_rows(step: Step) -> Counts:
    n = step.numbers
    pixels = n["out_h"] * n["out_w"]
    two, one, groups = pixels // 2, pixels % 2, -(-n["out_c"] // 4)
    found: Counts = {
        "blocks": two, "groups": two * groups, "single": one, "single groups": one * groups,
        "products": (two + one) * groups * (n["depth"] // 16),
        "tails": (two + one) * groups * bool(n["depth"] % 16),
    }  # fmt: skip
    if _direct(n):
        return found | {"copies": pixels, "copied words": pixels * n["depth"] // 4}
    return found | _gathered(n)


def _depthwise(step: Step) -> Counts:
    n = step.numbers
    channels, rows, stride = n["channels"], n["out_h"], n["stride_w"]
    pairs = -(-n["out_w"] // 2)
    pitch = ((2 * pairs - 1) * stride + 4) // 2 * 2
    copied = min(n["in_h"], (rows - 1) * stride + 3 - n["pad_top"])
    width = min(n["in_w"], pitch - n["pad_left"])
    wide = _wide(step)
    outputs = rows * n["out_w"]
    return {
        "channels": channels, "rows": channels * rows, f"pairs {stride}": channels * rows * pairs,
        "narrow": (channels - wide) * outputs, "wide": wide * outputs, "wide rows": wide * rows,
        "copied rows": channels * copied, "copied quads": channels * copied * (width // 4),
        "copied": channels * copied * (width % 4), "padding": 4 * pitch,
    }  # fmt: skip


def _depthwise_any(step: Step) -> Counts:
    n = step.numbers
    outputs = n["out_h"] * n["out_w"] * n["channels"] * n["multiplier"]
    wide = _wide(step) * n["out_h"] * n["out_w"]
    return {
        "outputs": outputs, "rows": outputs * n["kernel_h"], "wide": wide,
        "taps": outputs * n["kernel_h"] * n["kernel_w"],
    }  # fmt: skip


def _inside(n: Mapping[str, int], side: str) -> list[int]:
    """Taps inside of the input for each row or column of the output."""
    kernel, dilation = n[f"kernel_{side}"], n.get(f"dilation_{side}", 1)
    before = n["pad_top" if side == "h" else "pad_left"]
    starts = [place * n[f"stride_{side}"] - before for place in range(n[f"out_{side}"])]
    return [
        sum(0 <= start + tap * dilation < n[f"in_{side}"] for tap in range(kernel))
        for start in starts
    ]


def _depthwise_rows(step: Step) -> Counts:
    n = step.numbers
    blocks, rest = n["channels"] // 4, n["channels"] % 4
    rows, columns = _inside(n, "h"), _inside(n, "w")
    unrolled = n["kernel_w"] == 3 and n["dilation_w"] == 1
    inner = [c for c in columns if unrolled and c == 3]
    other = [c for c in columns if not (unrolled and c == 3)]
    lines = sum(rows)
    return {
        "rows": n["out_h"], "row blocks": n["out_h"] * blocks,
        "pixels": n["out_h"] * len(inner) * blocks, "lines": lines * len(inner) * blocks,
        "border": n["out_h"] * len(other) * blocks, "border lines": lines * len(other) * blocks,
        "border taps": lines * sum(other) * blocks, "rest": n["out_h"] * n["out_w"] * rest,
        "rest lines": lines * n["out_w"] * rest, "rest taps": lines * sum(columns) * rest,
    }  # fmt: skip


def _pool(step: Step) -> Counts:
    n = step.numbers
    rows, columns = _inside(n, "h"), _inside(n, "w")
    return {
        "pixels": n["out_h"] * n["out_w"], "outputs": n["out_h"] * n["out_w"] * n["channels"],
        "lines": sum(rows) * n["out_w"] * n["channels"],
        "elements": sum(rows) * sum(columns) * n["channels"],
    }  # fmt: skip


def _add(step: Step) -> Counts:
    return {"outputs": step.numbers["count"]}


def _softmax(step: Step) -> Counts:
    return {
        "rows": step.numbers["rows"], "outputs": step.numbers["rows"] * step.numbers["columns"],
    }  # fmt: skip


_COUNTS = {
    "slip_conv_2d": _conv,
    "slip_conv_rows": _conv_rows,
    "slip_depthwise_2d": _depthwise,
    "slip_depthwise_any": _depthwise_any,
    "slip_depthwise_rows": _depthwise_rows,
    "slip_average_pool": _pool,
    "slip_max_pool": _pool,
    "slip_add_int8": _add,
    "slip_softmax_int8": _softmax,
}
KERNELS: Iterable[str] = tuple(_COUNTS)
"""All kernels."""
