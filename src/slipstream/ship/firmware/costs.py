"""Predict the cost of a step on a processor from the iteration counts of its loops.

Counts follow from the kernels' loops and a step's numbers; their weights in ``costs.json`` are
fitted per kernel and processor to steps of random shapes on the emulated processor
(`slipstream_bench` has the program). Data changes the count little: saturation takes a few
instructions more or less.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from slipstream.ship.firmware.plan import struct_bytes
from slipstream.ship.firmware.program import KernelCall, Program
from slipstream.ship.firmware.targets import Target

# Bytes of the softmax table.
_SOFTMAX_TABLE = 28
# Counts that deepen the stack: calls of `slip_gather` and in it memcpy and memset, of
# `slip_write_any`, and a loop that spills registers.
_CALLS = (
    "inner", "read taps", "padded taps", "zeros", "slow outputs", "single outputs", "pixels",
    "rest taps",
)  # fmt: skip
Counts = dict[str, float]


@cache
def _weights() -> dict[str, Any]:
    resource = files("slipstream.ship.firmware") / "costs.json"
    weights: dict[str, Any] = json.loads(resource.read_text("utf-8"))
    return weights


def fitted(target: Target) -> bool:
    """Return whether there are weights for a processor."""
    return target.name in _weights()


def instructions(step: KernelCall, target: Target) -> int:
    """Predict the instructions of one call; 0 for kernels in `unmeasured`."""
    weights: Mapping[str, float] = _weights()[target.name]["instructions"].get(step.kernel, {})
    step_counts = counts(step, target)
    return round(sum(weights.get(name, 0.0) * count for name, count in step_counts.items()))


def unmeasured(program: Program, target: Target) -> list[str]:
    """Return the kernels of a program without measured code size and instructions."""
    measured = _weights()[target.name]["instructions"]
    return sorted({step.kernel for step in program.steps} - set(measured))


def constant_bytes(program: Program) -> int:
    """Return bytes of weights, biases, multipliers and step descriptions in flash."""
    tables = sum(table.nbytes for step in program.steps for table in step.tables.values())
    structs = sum(struct_bytes(step.struct) for step in program.steps)
    softmax = any(step.struct == "slip_softmax" for step in program.steps)
    return int(tables + structs + (_SOFTMAX_TABLE if softmax else 0))


def code_bytes(program: Program, target: Target) -> int:
    """Return bytes of the functions of kernels, the model and the C library."""
    costs = _weights()[target.name]
    kernels = {step.kernel for step in program.steps}
    kernel_bytes = sum(int(costs["code"].get(kernel, 0)) for kernel in kernels)
    return kernel_bytes + int(costs["step_code"]) * len(program.steps) + int(costs["library"])


def stack_bytes(program: Program, target: Target) -> int:
    """Return bytes of stack of the deepest call, which follows from the steps' numbers."""
    stacks: Mapping[str, int] = _weights()[target.name]["stack"]
    return max(stacks.get(path, 0) for step in program.steps for path in stack_paths(step, target))


def stack_paths(step: KernelCall, target: Target) -> list[str]:
    """Return the keys of measured stacks: the kernel, and its loops that call functions."""
    return [
        step.kernel,
        *(f"{step.kernel}: {name}" for name in counts(step, target) if name in _CALLS),
    ]


def counts(step: KernelCall, target: Target) -> Counts:
    """Return iteration counts of the parts of a step's loops."""
    count = _COUNTS.get(step.kernel)
    tally: Counts = {} if count is None else count(step)
    if "pixel taps" in tally:
        tally |= _of_pixels(step, 16 if target.vectors else 4)
    return {"call": 1.0} | {name: float(n) for name, n in tally.items() if n}


def _gathered(n: Mapping[str, int]) -> Counts:
    """Return counts of `slip_gather`, over all pixels."""
    rows, columns = _inside(n, "h"), _inside(n, "w")
    full = sum(r == n["kernel_h"] for r in rows) * sum(c == n["kernel_w"] for c in columns)
    inner = full if max(n["dilation_h"], n["dilation_w"]) == 1 else 0
    pixels, depth = n["out_h"] * n["out_w"], n["in_c"]
    taps, run = n["kernel_h"] * n["kernel_w"], n["kernel_w"] * depth
    border, lines = pixels - inner, inner * n["kernel_h"]
    read = sum(rows) * sum(columns) - inner * taps
    padded = border * taps - read
    return {
        "inner": inner, "inner rows": lines, "inner words": lines * (run // 4),
        "inner bytes": lines * (run % 4) if run != 3 else 0, "border": border,
        "border rows": border * n["kernel_h"], "read taps": read,
        "read words": read * (depth // 4), "read bytes": read * (depth % 4),
        "padded taps": padded, "padded words": padded * (depth // 4),
        "padded bytes": padded * (depth % 4), "zeros": pixels * (n["depth"] - taps * depth),
    }  # fmt: skip


def _direct(n: Mapping[str, int]) -> bool:
    window = n["kernel_h"] * n["kernel_w"] * n["stride_h"] * n["stride_w"]
    return window == 1 and n["depth"] == n["in_c"]


def _wide(step: KernelCall) -> int:
    """Return the number of channels that cannot take the short form."""
    seconds = step.tables["rescale"][1::2]
    channels = step.numbers.get("out_c", step.numbers.get("channels", 0))
    return int((seconds[: channels * step.numbers.get("multiplier", 1)] <= 0).sum())


def _conv(step: KernelCall) -> Counts:
    n = step.numbers
    pixels, channels = n["out_h"] * n["out_w"], n["out_c"]
    pairs, single, quads, groups = pixels // 2, pixels % 2, n["depth"] // 4, -(-channels // 4)
    fast = channels // 4 if n["narrow"] else 0
    wide = _wide(step)
    tally: Counts = {
        "blocks": pairs, "words": pairs * quads, "groups": pairs * groups,
        "products": pairs * groups * quads, "fast groups": pairs * fast,
        "slow outputs": pairs * 2 * (channels - 4 * fast), "slow groups": pairs * (groups - fast),
        "wide outputs": pixels * wide, "single": single, "single groups": single * groups,
        "single products": single * groups * quads, "single outputs": single * channels,
    }  # fmt: skip
    return tally if _direct(n) else tally | _gathered(n)


def _conv_plain(step: KernelCall) -> Counts:
    """Return counts for Helium: sixteen depths at a time."""
    n = step.numbers
    pixels, groups, depths = n["out_h"] * n["out_w"], -(-n["out_c"] // 4), -(-n["depth"] // 16)
    pairs, single = pixels // 2, pixels % 2
    tally: Counts = {
        "blocks": pairs, "words": pairs * depths, "groups": pairs * groups,
        "products": pairs * groups * depths, "single": single, "single groups": single * groups,
        "single products": single * groups * depths,
        "last groups": (pairs + single) * (n["out_c"] % 4 > 0),
        "slow groups": 0 if n["narrow"] else pairs * groups,
    }  # fmt: skip
    return tally if _direct(n) else tally | _gathered(n)


def _depthwise(step: KernelCall) -> Counts:
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


def _depthwise_any(step: KernelCall) -> Counts:
    n = step.numbers
    pixels, taps = n["out_h"] * n["out_w"], n["kernel_h"] * n["kernel_w"]
    if not step.scratch:
        outputs = pixels * n["channels"] * n["multiplier"]
        read = sum(_inside(n, "h")) * sum(_inside(n, "w")) * n["channels"] * n["multiplier"]
        return {
            "outputs": outputs, "rows": outputs * n["kernel_h"], "wide": _wide(step) * pixels,
            "taps": read, "padded taps": outputs * taps - read,
        }  # fmt: skip
    rows, columns = _inside(n, "h"), _inside(n, "w")
    inner = sum(r == n["kernel_h"] for r in rows) * max(
        0, sum(c == n["kernel_w"] for c in columns) - 1
    )
    return {
        "pixels": pixels, "pixel taps": inner * taps, "border": pixels - inner,
        "border taps": (pixels - inner) * taps, "out rows": n["out_h"],
    }  # fmt: skip


def _of_pixels(step: KernelCall, width: int) -> Counts:
    """Return counts of depthwise kernels that take `width` channels of a pixel at a time."""
    n = step.numbers
    pixels, taps = n["out_h"] * n["out_w"], n["kernel_h"] * n["kernel_w"]
    full, remainder = pixels * (n["channels"] // width), n["channels"] % width
    slow = 0 if n["narrow"] else full
    if width == 4:
        return {
            "fours": full, "threes of taps": full * (taps // 3), "rest taps": full * (taps % 3),
            "slow outputs": 4 * slow, "single outputs": pixels * remainder,
            "single taps": pixels * remainder * taps, "wide outputs": pixels * _wide(step),
        }  # fmt: skip
    partial = pixels * (remainder > 0)
    return {
        "vectors": full, "vector taps": full * taps, "slow vectors": slow, "last": partial,
        "last taps": partial * taps, "slow last": 0 if n["narrow"] else partial,
    }  # fmt: skip


def _inside(n: Mapping[str, int], side: str) -> list[int]:
    """Return the taps inside the input for each row or column of the output."""
    kernel, dilation = n[f"kernel_{side}"], n.get(f"dilation_{side}", 1)
    before = n["pad_top" if side == "h" else "pad_left"]
    starts = [place * n[f"stride_{side}"] - before for place in range(n[f"out_{side}"])]
    return [
        sum(0 <= start + tap * dilation < n[f"in_{side}"] for tap in range(kernel))
        for start in starts
    ]


def _pool(step: KernelCall) -> Counts:
    n = step.numbers
    rows, columns = _inside(n, "h"), _inside(n, "w")
    return {
        "pixels": n["out_h"] * n["out_w"], "outputs": n["out_h"] * n["out_w"] * n["channels"],
        "lines": sum(rows) * n["out_w"] * n["channels"],
        "elements": sum(rows) * sum(columns) * n["channels"],
    }  # fmt: skip


def _add(step: KernelCall) -> Counts:
    return {"outputs": step.numbers["count"]}


def _softmax(step: KernelCall) -> Counts:
    return {
        "rows": step.numbers["rows"], "outputs": step.numbers["rows"] * step.numbers["columns"],
    }  # fmt: skip


_COUNTS = {
    "slip_conv_2d": _conv,
    "slip_conv_plain": _conv_plain,
    "slip_depthwise_2d": _depthwise,
    "slip_depthwise_any": _depthwise_any,
    "slip_average_pool": _pool,
    "slip_max_pool": _pool,
    "slip_add_int8": _add,
    "slip_softmax_int8": _softmax,
}
KERNELS: Iterable[str] = tuple(_COUNTS)
"""Kernels with counts."""
