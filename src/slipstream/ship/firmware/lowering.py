"""Lower operators to kernel calls with constants computed ahead of time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from slipstream.ship.errors import UnsupportedModelError
from slipstream.ship.firmware import functions
from slipstream.ship.firmware.arithmetic import fixed_multiplier, softmax_scaling
from slipstream.ship.firmware.call import Call, Pad, quantization, row_distance, window
from slipstream.ship.firmware.convolutions import (
    conv_2d,
    depthwise,
    fully_connected,
    transpose_conv,
)
from slipstream.ship.firmware.network import Network, Tensor
from slipstream.ship.firmware.program import KernelCall, Program

_MAX_CLASSES = 511


def lower(network: Network, *, packed: bool = True, vectors: bool = False) -> Program:
    """Return the steps of a network.

    Args:
        packed: whether weights of convolutions are packed for instructions that multiply pairs of
            16-bit numbers, the fastest order without vectors.
        vectors: whether the processor multiplies vectors of bytes, from unpacked weights.

    Raises:
        UnsupportedModelError: operators, types or shapes without a kernel; all are listed.
    """
    pads = _pads(network)
    problems: dict[str, list[int]] = {}
    steps: list[KernelCall] = []
    views: dict[int, int] = {}
    for number, operator in enumerate(network.operators):
        if operator.outputs[0] in pads:
            continue
        try:
            lowered = _lower_one(Call(network, number, operator, packed, vectors, pads))
        except UnsupportedModelError as error:
            problems.setdefault(error.what, []).append(number)
            continue
        if isinstance(lowered, KernelCall):
            steps.append(lowered)
        else:
            views[operator.outputs[0]] = lowered
    if problems:
        raise _all_problems(network, problems)
    _check_ports(network)
    return Program(network, tuple(steps), views)


def _check_ports(network: Network) -> None:
    """Refuse inputs and outputs that are constant, or not int8 with one scale."""
    computed = {index for operator in network.operators for index in operator.outputs}
    for index in (*network.inputs, *network.outputs):
        tensor = network.tensors[index]
        single = tensor.quantization is not None and len(tensor.quantization.scales) == 1
        variable = tensor.data is None and (index in computed or index in network.inputs)
        if tensor.dtype != "int8" or not single or not variable:
            raise UnsupportedModelError(
                f"the input or output '{tensor.name}' is constant, or not int8 with one scale",
                where=f"model '{network.name}'",
            )


def _pads(network: Network) -> dict[int, Pad]:
    """Return, by tensor, zero padding that only one convolution reads, which applies it itself."""
    pads = {}
    readers: dict[int, list[str]] = {}
    for operator in network.operators:
        for index in set(operator.inputs):
            readers.setdefault(index, []).append(operator.kind)
    for operator in network.operators:
        if operator.kind != "pad" or len(operator.inputs) != 2:
            continue
        source, output = network.tensors[operator.inputs[0]], operator.outputs[0]
        sides = network.tensors[operator.inputs[1]].data
        alone = readers.get(output) in (["conv_2d"], ["depthwise_conv_2d"])
        if sides is None or sides.shape != (4, 2) or not alone or output in network.outputs:
            continue
        same = _same_grid(source, network.tensors[output])
        if same and not sides[[0, 3]].any() and (sides >= 0).all():
            (top, bottom), (left, right) = sides[1].tolist(), sides[2].tolist()
            pads[output] = Pad(operator.inputs[0], (top, left), (bottom, right))
    return pads


def _all_problems(network: Network, problems: Mapping[str, list[int]]) -> UnsupportedModelError:
    listed = [
        f"{what} (operator {', '.join(map(str, numbers))})" for what, numbers in problems.items()
    ]
    kinds = {network.operators[number].kind for numbers in problems.values() for number in numbers}
    return UnsupportedModelError(
        "unsupported operators: " + "; ".join(listed),
        operators=tuple(sorted(kinds)),
        where=f"model '{network.name}'",
        remedy="use int8 inputs and outputs, and only " + ", ".join(sorted(_LOWERINGS)).upper(),
    )


def _same_grid(*tensors: Tensor) -> bool:
    """Return whether the tensors have one scale and zero point."""
    grids = {t.quantization and (t.quantization.scale, t.quantization.zero_point) for t in tensors}
    return len(grids) == 1 and None not in grids


def _lower_one(call: Call) -> KernelCall | int:
    kind = call.operator.kind
    if kind not in _LOWERINGS:
        raise UnsupportedModelError(kind.upper())
    return _LOWERINGS[kind](call)


def _pool(call: Call) -> KernelCall:
    image, (out_h, out_w, channels) = call.image(call.activation(0)), call.image(call.output)
    if channels != image[2] or not _same_grid(call.activation(0), call.output):
        raise call.refuse("with a different output scale")
    size = call.option("filter_h"), call.option("filter_w")
    over = window(call, image, (out_h, out_w), size)
    low, high = call.limits()
    return call.step(
        kernel="slip_" + call.operator.kind.removesuffix("_2d"), sources=("pool.c",),
        struct="slip_pool",
        numbers={
            "in_h": image[0], "in_w": image[1], "channels": channels, "out_h": out_h,
            "out_w": out_w, **over.numbers("kernel", "stride"), "low": low, "high": high,
        },
        tables={},
        distances=(row_distance(image, (out_h, out_w), channels, over.stride[0], over.padding[0]),),
    )  # fmt: skip


def _add(call: Call) -> KernelCall:
    a, b, target = call.activation(0), call.activation(1), call.output
    if not a.shape == b.shape == target.shape:
        raise call.refuse(f"with shapes {list(a.shape)} and {list(b.shape)}")
    first, second, out = quantization(a), quantization(b), quantization(target)
    twice = 2.0 * float(max(first.scale, second.scale))
    parts = {
        "_a": fixed_multiplier(float(first.scale) / twice),
        "_b": fixed_multiplier(float(second.scale) / twice),
        "": fixed_multiplier(twice / ((1 << 20) * float(out.scale))),
    }
    low, high = call.limits()
    numbers = {"count": a.size, "zero_a": first.zero_point, "zero_b": second.zero_point}
    for name, (multiplier, shift) in parts.items():
        numbers |= {f"multiplier{name}": multiplier, f"shift{name}": shift}
    numbers |= {"out_zero": out.zero_point, "low": low, "high": high}
    return call.step(
        kernel="slip_add_int8", sources=("add.c",), struct="slip_add", numbers=numbers, tables={},
        inputs=(call.index(0), call.index(1)), distances=(0, 0),
    )  # fmt: skip


def _softmax(call: Call) -> KernelCall:
    source, target = call.activation(0), call.output
    out = quantization(target)
    if out.scale != np.float32(1 / 256) or out.zero_point != -128:
        raise call.refuse("with an output scale other than 1/256")
    beta = float(call.operator.options["beta"])
    multiplier, shift, least = softmax_scaling(beta, float(quantization(source).scale))
    columns = source.shape[-1]
    if columns > _MAX_CLASSES:
        raise call.refuse(f"over {columns} classes; its shifts allow at most {_MAX_CLASSES}")
    return call.step(
        kernel="slip_softmax_int8", sources=("softmax.c",), struct="slip_softmax",
        numbers={
            "rows": source.size // columns, "columns": columns, "multiplier": multiplier,
            "left_shift": shift, "least_difference": least,
        },
        tables={}, distances=(0,),
    )  # fmt: skip


def _lookup(call: Call) -> KernelCall:
    """Lower a function of one number to a table."""
    source, target, kind = call.activation(0), call.output, call.operator.kind
    grid, out = quantization(source), quantization(target)
    if source.shape != target.shape:
        raise call.refuse(f"with shapes {list(source.shape)} and {list(target.shape)}")
    if kind == "logistic":
        if out.scale != np.float32(1 / 256) or out.zero_point != -128:
            raise call.refuse("with an output scale other than 1/256")
        values = functions.logistic(grid)
    elif kind == "hard_swish":
        values = functions.hard_swish(grid, out)
    else:
        values = functions.leaky_relu(grid, out, float(call.operator.options["alpha"]))
    return call.step(
        kernel="slip_lookup_int8", sources=("lookup.c",), struct="slip_lookup",
        numbers={"count": source.size}, tables={"table": values}, distances=(0,),
    )  # fmt: skip


def _mul(call: Call) -> KernelCall:
    """Lower a product of two equal shapes, or of an image and one number per channel."""
    places = (0, 1)
    if call.activation(0).size < call.activation(1).size:
        places = (1, 0)
    a, b, target = call.activation(places[0]), call.activation(places[1]), call.output
    by_channel = b.size == b.shape[-1] == a.shape[-1]
    if a.shape != target.shape or not (a.shape == b.shape or by_channel):
        raise call.refuse(f"with shapes {list(a.shape)} and {list(b.shape)}")
    first, second, out = quantization(a), quantization(b), quantization(target)
    real = float(first.scale) * float(second.scale) / float(out.scale)
    multiplier, shift = fixed_multiplier(real)
    if shift > 14:
        raise call.refuse("because its products could overflow 32 bits")
    low, high = call.limits()
    return call.step(
        kernel="slip_mul_int8", sources=("mul.c",), struct="slip_mul",
        numbers={
            "count": a.size, "period": b.size, "zero_a": first.zero_point,
            "zero_b": second.zero_point, "multiplier": multiplier, "shift": shift,
            "out_zero": out.zero_point, "low": low, "high": high,
        },
        tables={}, inputs=tuple(call.index(place) for place in places),
        distances=(0, 0 if a.size == b.size else None),
    )  # fmt: skip


def _concatenation(call: Call) -> KernelCall:
    if len(call.operator.inputs) != 2:
        raise call.refuse(f"of {len(call.operator.inputs)} tensors instead of two")
    if call.limits() != (-128, 127):
        raise call.refuse("with an activation")
    a, b, target = call.activation(0), call.activation(1), call.output
    axis = call.option("axis") % max(len(target.shape), 1)
    if not _same_grid(a, b, target):
        raise call.refuse("with different scales")
    if a.size + b.size != target.size or a.shape[:axis] != b.shape[:axis]:
        raise call.refuse(f"with shapes {list(a.shape)} and {list(b.shape)}")
    rows = math.prod(target.shape[:axis])
    return call.step(
        kernel="slip_concat_int8", sources=("concat.c",), struct="slip_concat",
        numbers={"rows": rows, "first": a.size // rows, "second": b.size // rows}, tables={},
        inputs=(call.index(0), call.index(1)), distances=(None, None),
    )  # fmt: skip


def _mean(call: Call) -> KernelCall:
    source, target = call.activation(0), call.output
    height, width, channels = call.image(source)
    axes = call.network.tensors[call.index(1)].data
    if axes is None or sorted(int(axis) % 4 for axis in axes.reshape(-1)) != [1, 2]:
        raise call.refuse("over dimensions other than height and width")
    pixels = height * width
    if target.size != channels or pixels >= 2**22:
        raise call.refuse(f"of {pixels} pixels to shape {list(target.shape)}")
    grid, out = quantization(source), quantization(target)
    multiplier, shift = fixed_multiplier(float(grid.scale) / float(out.scale))
    # The multiplier includes the division, at its full precision.
    extra = min(pixels.bit_length() - 1, 32, 31 + shift)
    multiplier, shift = (multiplier << extra) // pixels, shift - extra
    return call.step(
        kernel="slip_mean_int8", sources=("mean.c",), struct="slip_mean",
        numbers={
            "pixels": pixels, "channels": channels, "in_zero": grid.zero_point,
            "multiplier": multiplier, "shift": shift, "out_zero": out.zero_point,
        },
        tables={}, distances=(None,),
    )  # fmt: skip


def _resize(call: Call) -> KernelCall:
    """Lower nearest-neighbour upsampling by integer factors."""
    source, target = call.activation(0), call.output
    (height, width, channels), out = call.image(source), call.image(target)
    factors = out[0] // height, out[1] // width
    exact = (height * factors[0], width * factors[1], channels) == out
    if not exact or call.option("align_corners"):
        raise call.refuse("by factors that are not integers")
    if not _same_grid(source, target):
        raise call.refuse("with a different output scale")
    return call.step(
        kernel="slip_repeat_int8", sources=("repeat.c",), struct="slip_repeat",
        numbers={
            "in_h": height, "in_w": width, "channels": channels, "factor_h": factors[0],
            "factor_w": factors[1],
        },
        tables={}, distances=(None,),
    )  # fmt: skip


def _reshape(call: Call) -> int:
    source, target = call.activation(0), call.output
    if source.size != target.size:
        raise call.refuse(f"of {source.size} elements to {target.size}")
    return call.index(0)


_LOWERINGS: dict[str, Callable[[Call], KernelCall | int]] = {
    "add": _add,
    "average_pool_2d": _pool,
    "concatenation": _concatenation,
    "conv_2d": conv_2d,
    "depthwise_conv_2d": depthwise,
    "expand_dims": _reshape,
    "fully_connected": fully_connected,
    "hard_swish": _lookup,
    "leaky_relu": _lookup,
    "logistic": _lookup,
    "max_pool_2d": _pool,
    "mean": _mean,
    "mul": _mul,
    "reshape": _reshape,
    "resize_nearest_neighbor": _resize,
    "softmax": _softmax,
    "squeeze": _reshape,
    "transpose_conv": transpose_conv,
}
