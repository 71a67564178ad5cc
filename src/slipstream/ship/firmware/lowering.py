"""Operators as calls of our kernels: every number that can be known before the device runs is."""

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
from slipstream.ship.firmware.network import Network
from slipstream.ship.firmware.program import Program, Step

_MOST_CLASSES = 511


def lower(network: Network, *, packed: bool = True, vectors: bool = False) -> Program:
    """The steps of a network.

    Args:
        packed: weights of convolutions are in the order for instructions that multiply two 16-bit
            numbers, which is the fastest there; else they are as the model has them.
        vectors: the processor multiplies vectors of bytes, from weights that are not packed.

    Raises:
        UnsupportedModelError: operators, types or shapes no kernel of ours computes; all at once.
    """
    pads = _pads(network)
    problems: dict[str, list[int]] = {}
    steps: list[Step] = []
    views: dict[int, int] = {}
    for number, operator in enumerate(network.operators):
        if operator.outputs[0] in pads:
            continue
        try:
            lowered = _lower_one(Call(network, number, operator, packed, vectors, pads))
        except UnsupportedModelError as error:
            problems.setdefault(error.what, []).append(number)
            continue
        if isinstance(lowered, Step):
            steps.append(lowered)
        else:
            views[operator.outputs[0]] = lowered
    if problems:
        raise _all_problems(network, problems)
    _check_ports(network)
    return Program(network, tuple(steps), views)


def _check_ports(network: Network) -> None:
    """Inputs and outputs are int8 with one scale, given or computed."""
    computed = {index for operator in network.operators for index in operator.outputs}
    for index in (*network.inputs, *network.outputs):
        one = network.tensors[index]
        whole = one.quantization is not None and len(one.quantization.scales) == 1
        known = one.data is None and (index in computed or index in network.inputs)
        if one.dtype != "int8" or not whole or not known:
            raise UnsupportedModelError(
                f"'{one.name}', which goes in or out, is a constant, or not int8 with one scale",
                where=f"model '{network.name}'",
            )


def _pads(network: Network) -> dict[int, Pad]:
    """By tensor: padding with zeros that only a convolution reads, which takes it upon itself."""
    pads = {}
    readers: dict[int, list[str]] = {}
    for operator in network.operators:
        for index in set(operator.inputs):
            readers.setdefault(index, []).append(operator.kind)
    for operator in network.operators:
        if operator.kind != "pad" or len(operator.inputs) != 2:
            continue
        given, output = network.tensors[operator.inputs[0]], operator.outputs[0]
        sides = network.tensors[operator.inputs[1]].data
        alone = readers.get(output) in (["conv_2d"], ["depthwise_conv_2d"])
        to = network.tensors[output].quantization
        if sides is None or sides.shape != (4, 2) or not alone or output in network.outputs:
            continue
        same = given.quantization is not None and to is not None
        same = same and (given.quantization.scale, given.quantization.zero_point) == (  # type: ignore[union-attr]
            to.scale, to.zero_point,  # type: ignore[union-attr]
        )  # fmt: skip
        if same and not sides[[0, 3]].any() and (sides >= 0).all():
            (top, bottom), (left, right) = sides[1].tolist(), sides[2].tolist()
            pads[output] = Pad(operator.inputs[0], (top, left), (bottom, right))
    return pads


def _all_problems(network: Network, problems: Mapping[str, list[int]]) -> UnsupportedModelError:
    told = [
        f"{what} (operator {', '.join(map(str, numbers))})" for what, numbers in problems.items()
    ]
    kinds = {network.operators[number].kind for numbers in problems.values() for number in numbers}
    return UnsupportedModelError(
        "no kernel of ours computes " + "; ".join(told),
        operators=tuple(sorted(kinds)),
        where=f"model '{network.name}'",
        remedy="kernels take int8 in and out, and are: " + ", ".join(sorted(_LOWERINGS)).upper(),
    )


def _lower_one(call: Call) -> Step | int:
    kind = call.operator.kind
    if kind not in _LOWERINGS:
        raise UnsupportedModelError(kind.upper())
    return _LOWERINGS[kind](call)


def _pool(call: Call) -> Step:
    image, (out_h, out_w, channels) = call.image(call.activation(0)), call.image(call.output)
    if channels != image[2] or call.activation(0).quantization != call.output.quantization:
        given, to = quantization(call.activation(0)), quantization(call.output)
        if channels != image[2] or (given.scale, given.zero_point) != (to.scale, to.zero_point):
            raise call.refuse("to another scale")
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


def _add(call: Call) -> Step:
    a, b, to = call.activation(0), call.activation(1), call.output
    if not a.shape == b.shape == to.shape:
        raise call.refuse(f"of the shapes {list(a.shape)} and {list(b.shape)}")
    first, second, out = quantization(a), quantization(b), quantization(to)
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


def _softmax(call: Call) -> Step:
    given, to = call.activation(0), call.output
    out = quantization(to)
    if out.scale != np.float32(1 / 256) or out.zero_point != -128:
        raise call.refuse("to another scale than 1/256")
    beta = float(call.operator.options["beta"])
    multiplier, shift, least = softmax_scaling(beta, float(quantization(given).scale))
    columns = given.shape[-1]
    if columns > _MOST_CLASSES:
        raise call.refuse(f"over {columns} numbers; over {_MOST_CLASSES} its shifts have an end")
    return call.step(
        kernel="slip_softmax_int8", sources=("softmax.c",), struct="slip_softmax",
        numbers={
            "rows": given.size // columns, "columns": columns, "multiplier": multiplier,
            "left_shift": shift, "least_difference": least,
        },
        tables={}, distances=(0,),
    )  # fmt: skip


def _lookup(call: Call) -> Step:
    """A function of one number, as a table."""
    given, to, kind = call.activation(0), call.output, call.operator.kind
    grid, out = quantization(given), quantization(to)
    if given.shape != to.shape:
        raise call.refuse(f"of the shapes {list(given.shape)} and {list(to.shape)}")
    if kind == "logistic":
        if out.scale != np.float32(1 / 256) or out.zero_point != -128:
            raise call.refuse("to another scale than 1/256")
        values = functions.logistic(grid)
    elif kind == "hard_swish":
        values = functions.hard_swish(grid, out)
    else:
        values = functions.leaky_relu(grid, out, float(call.operator.options["alpha"]))
    return call.step(
        kernel="slip_lookup_int8", sources=("lookup.c",), struct="slip_lookup",
        numbers={"count": given.size}, tables={"table": values}, distances=(0,),
    )  # fmt: skip


def _mul(call: Call) -> Step:
    """A product of two tensors of one shape, or of an image with one number a channel."""
    places = (0, 1)
    if call.activation(0).size < call.activation(1).size:
        places = (1, 0)
    a, b, to = call.activation(places[0]), call.activation(places[1]), call.output
    by_channel = b.size == b.shape[-1] == a.shape[-1]
    if a.shape != to.shape or not (a.shape == b.shape or by_channel):
        raise call.refuse(f"of the shapes {list(a.shape)} and {list(b.shape)}")
    first, second, out = quantization(a), quantization(b), quantization(to)
    real = float(first.scale) * float(second.scale) / float(out.scale)
    multiplier, shift = fixed_multiplier(real)
    if shift > 14:
        raise call.refuse("whose products could overflow 32 bits")
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


def _concatenation(call: Call) -> Step:
    """Two tensors along one dimension."""
    if len(call.operator.inputs) != 2:
        raise call.refuse(f"of {len(call.operator.inputs)} tensors; two are joined")
    if call.limits() != (-128, 127):
        raise call.refuse("with an activation")
    a, b, to = call.activation(0), call.activation(1), call.output
    axis = call.option("axis") % max(len(to.shape), 1)
    grids = [(quantization(one).scale, quantization(one).zero_point) for one in (a, b, to)]
    if len(set(grids)) > 1:
        raise call.refuse("of different scales")
    if a.size + b.size != to.size or a.shape[:axis] != b.shape[:axis]:
        raise call.refuse(f"of the shapes {list(a.shape)} and {list(b.shape)}")
    rows = math.prod(to.shape[:axis])
    return call.step(
        kernel="slip_concat_int8", sources=("concat.c",), struct="slip_concat",
        numbers={"rows": rows, "first": a.size // rows, "second": b.size // rows}, tables={},
        inputs=(call.index(0), call.index(1)), distances=(None, None),
    )  # fmt: skip


def _mean(call: Call) -> Step:
    """A mean over height and width."""
    given, to = call.activation(0), call.output
    height, width, channels = call.image(given)
    axes = call.network.tensors[call.index(1)].data
    if axes is None or sorted(int(axis) % 4 for axis in axes.reshape(-1)) != [1, 2]:
        raise call.refuse("over other dimensions than height and width")
    pixels = height * width
    if to.size != channels or pixels >= 2**22:
        raise call.refuse(f"of {pixels} pixels to the shape {list(to.shape)}")
    grid, out = quantization(given), quantization(to)
    multiplier, shift = fixed_multiplier(float(grid.scale) / float(out.scale))
    # The division is part of the multiplier, with as many of its bits as there are.
    more = min(pixels.bit_length() - 1, 32, 31 + shift)
    multiplier, shift = (multiplier << more) // pixels, shift - more
    return call.step(
        kernel="slip_mean_int8", sources=("mean.c",), struct="slip_mean",
        numbers={
            "pixels": pixels, "channels": channels, "in_zero": grid.zero_point,
            "multiplier": multiplier, "shift": shift, "out_zero": out.zero_point,
        },
        tables={}, distances=(None,),
    )  # fmt: skip


def _resize(call: Call) -> Step:
    """Nearest neighbours, by whole factors."""
    given, to = call.activation(0), call.output
    (height, width, channels), out = call.image(given), call.image(to)
    factors = out[0] // height, out[1] // width
    whole = (height * factors[0], width * factors[1], channels) == out
    if not whole or call.option("align_corners"):
        raise call.refuse("by other than whole factors")
    grid, other = quantization(given), quantization(to)
    if (grid.scale, grid.zero_point) != (other.scale, other.zero_point):
        raise call.refuse("to another scale")
    return call.step(
        kernel="slip_repeat_int8", sources=("repeat.c",), struct="slip_repeat",
        numbers={
            "in_h": height, "in_w": width, "channels": channels, "factor_h": factors[0],
            "factor_w": factors[1],
        },
        tables={}, distances=(None,),
    )  # fmt: skip


def _reshape(call: Call) -> int:
    given, to = call.activation(0), call.output
    if given.size != to.size:
        raise call.refuse(f"of {given.size} elements to {to.size}")
    return call.index(0)


_LOWERINGS: dict[str, Callable[[Call], Step | int]] = {
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
