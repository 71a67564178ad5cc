"""Operators as calls of our kernels: every number that can be known before the device runs is.

A step is one call. What it needs in memory, what it may share with its input, and the constants it
reads are part of it; back ends only print or run steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from slipstream.ship.errors import UnsupportedModelError
from slipstream.ship.firmware.arithmetic import fixed_multiplier, softmax_scaling
from slipstream.ship.firmware.network import Array, Network, Operator, Quantization, Tensor

# What the short form of rescaling can hold, and how the long one is told from it: see
# `slip_narrow` and `slip_to_int8` in kernels/slip_micro.h.
_MOST_SUM = 2**30
_NARROW_SHIFTS = (2, 31)
_WIDE = 64
_MOST_CLASSES = 511


@dataclass(frozen=True)
class Step:
    """One call of a kernel.

    Attributes:
        kernel: the C function.
        sources: the files of `kernels/` that it needs.
        struct: type of its first argument.
        numbers: the struct's fields that are numbers.
        tables: its fields that point at constants: int8 or int32, one dimension.
        inputs: indices of the tensors it reads, in the order of its arguments.
        output: index of the tensor it writes.
        scratch: bytes it needs while it runs.
        distances: by input, how many bytes above the output's start the input may begin: the
            kernel reads it in the order in which it writes. None: they have to be disjoint.
        in_place: the output may begin where the input does.
        macs: multiplications that are added up, padding included.
        operator: index of the operator it is made from.
    """

    kernel: str
    sources: tuple[str, ...]
    struct: str
    numbers: Mapping[str, int]
    tables: Mapping[str, Array]
    inputs: tuple[int, ...]
    output: int
    scratch: int = 0
    distances: tuple[int | None, ...] = ()
    in_place: bool = False
    macs: int = 0
    operator: int = 0


@dataclass(frozen=True)
class Program:
    """Steps in the order they run in.

    Attributes:
        views: by tensor, the tensor in whose bytes it lies (reshapes).
    """

    network: Network
    steps: tuple[Step, ...]
    views: Mapping[int, int] = field(default_factory=dict)

    def root(self, index: int) -> int:
        """The tensor in whose bytes a tensor lies: itself, unless it is a view."""
        while index in self.views:
            index = self.views[index]
        return index

    @property
    def macs(self) -> int:
        """Multiplications that are added up, of all steps."""
        return sum(step.macs for step in self.steps)


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
            made = _lower_one(_Call(network, number, operator, packed, vectors, pads))
        except UnsupportedModelError as error:
            problems.setdefault(error.what, []).append(number)
            continue
        if isinstance(made, Step):
            steps.append(made)
        else:
            views[operator.outputs[0]] = made
    if problems:
        raise _all_problems(network, problems)
    return Program(network, tuple(steps), views)


def _pads(network: Network) -> dict[int, _Pad]:
    """By tensor: padding with zeros that only a convolution reads, which takes it upon itself."""
    found = {}
    for operator in network.operators:
        if operator.kind != "pad" or len(operator.inputs) != 2:
            continue
        given, output = network.tensors[operator.inputs[0]], operator.outputs[0]
        sides = network.tensors[operator.inputs[1]].data
        readers = [one.kind for one in network.operators if output in one.inputs]
        alone = len(readers) == 1 and readers[0] in ("conv_2d", "depthwise_conv_2d")
        to = network.tensors[output].quantization
        if sides is None or sides.shape != (4, 2) or not alone or output in network.outputs:
            continue
        same = given.quantization is not None and to is not None
        same = same and (given.quantization.scale, given.quantization.zero_point) == (  # type: ignore[union-attr]
            to.scale, to.zero_point,  # type: ignore[union-attr]
        )  # fmt: skip
        if same and not sides[[0, 3]].any() and (sides >= 0).all():
            (top, bottom), (left, right) = sides[1].tolist(), sides[2].tolist()
            found[output] = _Pad(operator.inputs[0], (top, left), (bottom, right))
    return found


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


def _lower_one(call: _Call) -> Step | int:
    kind = call.operator.kind
    if kind not in _LOWERINGS:
        raise UnsupportedModelError(kind.upper())
    return _LOWERINGS[kind](call)


@dataclass(frozen=True)
class _Pad:
    """Padding of `tensor` before and behind, each (height, width)."""

    tensor: int
    before: tuple[int, int] = (0, 0)
    behind: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class _Call:
    """An operator with what it reads and writes at hand."""

    network: Network
    number: int
    operator: Operator
    packed: bool
    vectors: bool
    pads: Mapping[int, _Pad]

    def refuse(self, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.operator.kind.upper()} {why}")

    def option(self, name: str) -> int:
        return int(self.operator.options[name])

    def index(self, place: int) -> int:
        inputs = self.operator.inputs
        if place >= len(inputs) or inputs[place] < 0:
            raise self.refuse(f"without input {place}")
        pad = self.pads.get(inputs[place])
        return inputs[place] if pad is None else pad.tensor

    @property
    def pad(self) -> _Pad:
        """Explicit padding of the first input."""
        return self.pads.get(self.operator.inputs[0], _Pad(self.operator.inputs[0]))

    def activation(self, place: int) -> Tensor:
        """An int8 tensor that is computed, with one scale."""
        return self._int8(self.network.tensors[self.index(place)])

    @property
    def output(self) -> Tensor:
        return self._int8(self.network.tensors[self.operator.outputs[0]])

    def _int8(self, tensor: Tensor) -> Tensor:
        if tensor.dtype != "int8":
            raise self.refuse(f"of {tensor.dtype}")
        if tensor.quantization is None or len(tensor.quantization.scales) != 1:
            raise self.refuse("without a scale for its activations")
        if tensor.data is not None:
            raise self.refuse("of a constant in the place of an activation")
        return tensor

    def image(self, tensor: Tensor) -> tuple[int, int, int]:
        if len(tensor.shape) != 4 or tensor.shape[0] != 1:
            raise self.refuse(f"of the shape {list(tensor.shape)}; a batch of 1 in NHWC is needed")
        return tensor.shape[1], tensor.shape[2], tensor.shape[3]

    def weights(self, place: int, axis: int) -> tuple[Array, Array]:
        """int8 weights, and a scale for each index along `axis`."""
        tensor = self.network.tensors[self.index(place)]
        if tensor.dtype != "int8" or tensor.data is None or tensor.quantization is None:
            raise self.refuse(f"with weights of {tensor.dtype}, or none that are constant")
        found = tensor.quantization
        if found.zero_points.any():
            raise self.refuse("with weights that have a zero point")
        if len(found.scales) not in (1, tensor.shape[axis]):
            raise self.refuse("with another number of scales than channels")
        return tensor.data, np.broadcast_to(found.scales, tensor.shape[axis])

    def bias(self, place: int, channels: int) -> Array:
        if place >= len(self.operator.inputs) or self.operator.inputs[place] < 0:
            return np.zeros(channels, np.int64)
        tensor = self.network.tensors[self.operator.inputs[place]]
        if tensor.dtype != "int32" or tensor.data is None or tensor.size != channels:
            raise self.refuse(f"with a bias of {tensor.dtype}{list(tensor.shape)}")
        return tensor.data.reshape(-1).astype(np.int64)

    def limits(self) -> tuple[int, int]:
        """Codes that the activation function leaves."""
        to = _quantization(self.output)
        kind = self.operator.options["activation"]
        if kind == "none":
            return -128, 127
        if kind not in ("relu", "relu6", "relu_n1_to_1"):
            raise self.refuse(f"with the activation {kind}")

        def code(value: float) -> int:
            # In float32, as the format's own runtimes: half away from zero.
            scaled = np.float32(value) / to.scale
            return to.zero_point + int(
                np.copysign(np.floor(np.abs(scaled) + np.float32(0.5)), scaled)
            )

        low = code(-1.0) if kind == "relu_n1_to_1" else code(0.0)
        high = {"relu": 127, "relu6": code(6.0), "relu_n1_to_1": code(1.0)}[kind]
        return max(-128, low), min(127, high)

    def step(self, **parts: object) -> Step:
        made: dict[str, object] = {
            "output": self.operator.outputs[0], "operator": self.number,
            "inputs": (self.index(0),),
        }  # fmt: skip
        return Step(**(made | parts))  # type: ignore[arg-type]


def _quantization(tensor: Tensor) -> Quantization:
    assert tensor.quantization is not None  # checked where the tensor was taken
    return tensor.quantization


def _window(
    call: _Call, in_size: int, kernel: int, stride: int, dilation: int, out_size: int
) -> int:
    """Padding before the first element, as the format has it: what is odd goes to the end."""
    if stride < 1 or dilation < 1:
        raise call.refuse(f"with stride {stride} and dilation {dilation}")
    reach = (kernel - 1) * dilation + 1
    if call.operator.options["padding"] == "valid":
        expected, padding = (in_size - reach) // stride + 1, 0
    else:
        expected = -(-in_size // stride)
        padding = max((expected - 1) * stride + reach - in_size, 0) // 2
    if expected != out_size or expected < 1:
        raise call.refuse(f"whose output has {out_size} rows or columns, not {expected}")
    return padding


def _rescales(
    call: _Call, factors: Array, bias: Array, most: Array, limits: tuple[int, int]
) -> tuple[Array, bool]:
    """`rescale`, two numbers a channel; whether all channels may take the short form.

    Args:
        factors: float64 [channels].
        bias, most: int64 [channels]: with the zero point folded in; what products add up to.
    """
    pairs = np.array([fixed_multiplier(float(factor)) for factor in factors], np.int64)
    multipliers, shifts = pairs[:, 0], -pairs[:, 1]
    sums = abs(bias) + most
    if (sums << np.maximum(-shifts, 0) >= 2**31).any():
        raise call.refuse("whose sums could overflow 32 bits")
    low, high = _NARROW_SHIFTS
    short = (low <= shifts) & (shifts <= high) & (sums < _MOST_SUM) & (limits == (-128, 127))
    seconds = np.where(short, 1 << np.clip(32 - shifts, 0, 32), shifts - _WIDE)
    narrow = bool(short.all())
    if call.vectors and not narrow:
        seconds = shifts - _WIDE
    return np.stack([multipliers, seconds], 1).astype(np.int32).reshape(-1), narrow


def _checked_bias(call: _Call, bias: Array, products: Array) -> Array:
    if (abs(bias) + products >= 2**31).any():
        raise call.refuse("whose sums could overflow 32 bits")
    return bias


def pack_pairs(weights: Array) -> Array:
    """Weights [channels, depth] as `slip_conv_2d` reads them: int8, one dimension.

    Both sizes are multiples of four. Four channels follow four channels; within them, depths come
    as the widening of bytes gives them (0 and 2, then 1 and 3), and a word holds two depths of two
    channels, the first channel's in its even bytes.
    """
    channels, depth = weights.shape
    # [group, pair of channels, which of them, quad, which depth (low bit: pair), half]
    parts = weights.reshape(channels // 4, 2, 2, depth // 4, 2, 2)
    # depth within a quad is half * 2 + pair: to [group, quad, pair, pair of channels, half, which].
    return np.ascontiguousarray(parts.transpose(0, 3, 5, 1, 4, 2)).reshape(-1)


def _convolution(
    call: _Call, weights: Array, scales: Array, *, bias: Array, image: tuple[int, int, int],
    out: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int] = (1, 1),
    dilation: tuple[int, int] = (1, 1), padding: tuple[int, int] = (0, 0),
    float_product: bool = False,
) -> Step:  # fmt: skip
    """A step of a convolution; weights are [channels, depth]."""
    given, to = _quantization(call.activation(0)), _quantization(call.output)
    channels, depth = weights.shape
    products = abs(weights.astype(np.int64)).sum(1) * 255
    folded = _checked_bias(
        call, bias - given.zero_point * weights.astype(np.int64).sum(1), products
    )
    limits = call.limits()
    factors = _factors(given.scale, scales, to.scale, float_product)
    rescale, narrow = _rescales(call, factors, folded, products, limits)
    padded = -(-channels // 4) * 4
    deep = -(-depth // 4) * 4
    height, width, in_channels = image
    direct = kernel == (1, 1) and stride == (1, 1) and deep == in_channels
    if direct:
        # Blocks of two pixels are read before they are written, a single last one is not.
        pixels = out[0] * out[1]
        distance = max(0, pixels * (channels - in_channels))
        if pixels % 2:
            distance = max(distance, pixels * channels - (pixels - 1) * in_channels)
    else:
        distance = _row_distance(image, out, channels, stride[0], padding[0])
    kind = "conv_2d" if call.packed else "conv_plain"
    whole = np.zeros((padded, deep), np.int8)
    whole[:channels, :depth] = weights
    return call.step(
        kernel=f"slip_{kind}", struct="slip_conv",
        sources=("conv.c" if call.packed else "conv_plain.c", "conv.h", "gather.c"),
        numbers={
            "in_h": height, "in_w": width, "in_c": in_channels, "out_h": out[0], "out_w": out[1],
            "out_c": channels, "depth": deep, "kernel_h": kernel[0], "kernel_w": kernel[1],
            "stride_h": stride[0], "stride_w": stride[1], "dilation_h": dilation[0],
            "dilation_w": dilation[1], "pad_top": padding[0], "pad_left": padding[1],
            "in_zero": given.zero_point, "out_zero": to.zero_point, "low": limits[0],
            "high": limits[1], "narrow": int(narrow),
        },
        tables={
            "weights": pack_pairs(whole) if call.packed else whole.reshape(-1),
            "bias": _padded(folded, padded), "rescale": _padded(rescale, 2 * padded),
        },
        scratch=_columns(out[0] * out[1], deep, direct, call.vectors), distances=(distance,),
        macs=out[0] * out[1] * channels * depth,
    )  # fmt: skip


def _columns(pixels: int, depth: int, direct: bool, vectors: bool) -> int:
    """Scratch of convolutions: two pixels as they are multiplied, and of 8 bits where they are
    gathered: 16 bits wide, or for vectors 16 depths of one and the other in turn."""
    of_two = 2 * (-(-depth // 16) * 16) if vectors else 4 * depth
    return (of_two if pixels > 1 else 0) + (0 if direct else min(pixels, 2) * depth)


def _factors(given: np.float32, weights: Array, to: np.float32, float_product: bool) -> Array:
    """Scales of products over the output's: float64 [channels].

    Args:
        float_product: scales are multiplied in float32, as fully connected layers have it.
    """
    if float_product:
        return (given * weights.astype(np.float32)).astype(np.float64) / float(to)
    return float(given) * weights.astype(np.float64) / float(to)


def _padded(values: Array, size: int) -> Array:
    found = np.zeros(size, np.int32)
    found[: len(values)] = values
    return found


def _row_distance(
    image: tuple[int, int, int], out: tuple[int, int], channels: int, stride: int, padding: int
) -> int:
    """Bytes that an output written row by row may be ahead of an input read row by row."""
    height, width, depth = image
    most = 0
    for row in range(out[0]):
        still_read = min(max(0, row * stride - padding), height) * width * depth
        most = max(most, (row + 1) * out[1] * channels - still_read)
    return most


def _conv_2d(call: _Call) -> Step:
    image, (out_h, out_w, channels) = call.image(call.activation(0)), call.image(call.output)
    weights, scales = call.weights(1, 0)
    if weights.ndim != 4 or weights.shape[0] != channels or weights.shape[3] != image[2]:
        raise call.refuse(f"with weights of the shape {list(weights.shape)} on {image[2]} channels")
    kernel, stride, dilation, padding = _windows(call, image, (out_h, out_w), weights.shape[1:3])
    return _convolution(
        call, weights.reshape(channels, -1), scales, bias=call.bias(2, channels), image=image,
        out=(out_h, out_w), kernel=kernel, stride=stride, dilation=dilation, padding=padding,
    )  # fmt: skip


Pair = tuple[int, int]


def _windows(
    call: _Call, image: tuple[int, int, int], out: Pair, kernel: tuple[int, ...]
) -> tuple[Pair, Pair, Pair, Pair]:
    """(kernel, stride, dilation, padding), each (height, width)."""
    stride = call.option("stride_h"), call.option("stride_w")
    given = call.operator.options
    dilation = int(given.get("dilation_h", 1)), int(given.get("dilation_w", 1))
    pad = call.pad
    top, left = (
        pad.before[side]
        + _window(
            call, image[side] + pad.before[side] + pad.behind[side], kernel[side], stride[side],
            dilation[side], out[side],
        )
        for side in (0, 1)
    )  # fmt: skip
    if max(*kernel, *stride, *dilation, top, left) > 255 or max(*image, *out) > 65535:
        raise call.refuse("of a size that needs more than 16 bits")
    return (kernel[0], kernel[1]), stride, dilation, (top, left)


def _depthwise(call: _Call) -> Step:
    image, (out_h, out_w, channels) = call.image(call.activation(0)), call.image(call.output)
    weights, scales = call.weights(1, 3)
    if weights.ndim != 4 or weights.shape[0] != 1 or weights.shape[3] != channels:
        raise call.refuse(f"with weights of the shape {list(weights.shape)}")
    if channels % image[2]:
        raise call.refuse(f"from {image[2]} to {channels} channels")
    out = (out_h, out_w)
    kernel, stride, dilation, padding = _windows(call, image, out, weights.shape[1:3])
    flat = weights.reshape(-1, channels)
    if image[2] == 1:
        # With one channel to read it is a convolution, and that shares what it reads.
        return _convolution(
            call, flat.T, scales, bias=call.bias(2, channels), image=image, out=out, kernel=kernel,
            stride=stride, dilation=dilation, padding=padding,
        )  # fmt: skip
    given, to = _quantization(call.activation(0)), _quantization(call.output)
    products = abs(flat.astype(np.int64)).sum(0) * 255
    bias = call.bias(2, channels) - given.zero_point * flat.astype(np.int64).sum(0)
    _checked_bias(call, bias, products)
    limits = call.limits()
    factors = _factors(given.scale, scales, to.scale, False)
    rescale, narrow = _rescales(call, factors, bias, products, limits)
    fast = kernel == (3, 3) and stride in ((1, 1), (2, 2)) and dilation == (1, 1)
    fast = fast and channels == image[2] and not call.vectors
    if fast:
        # Four rows of 16-bit numbers and one of sums: see kernels/depthwise.c.
        pitch = ((-(-out_w // 2) * 2 - 1) * stride[1] + 4) // 2 * 2
        scratch = 8 * pitch + 4 * (-(-out_w // 2) * 2)
    else:
        # An address a tap and a row of zero points, of the vectors of kernels/depthwise_any.c.
        scratch = 4 * len(flat) + channels if call.vectors and channels == image[2] else 0
    distance = None if fast else _row_distance(image, out, channels, stride[0], padding[0])
    padded = -(-channels // 16) * 16 if call.vectors else channels
    return call.step(
        kernel="slip_depthwise_2d" if fast else "slip_depthwise_any", struct="slip_depthwise",
        sources=("depthwise.c",) if fast else ("depthwise_any.c",),
        numbers={
            "in_h": image[0], "in_w": image[1], "channels": image[2], "out_h": out_h,
            "out_w": out_w, "multiplier": channels // image[2], "kernel_h": kernel[0],
            "kernel_w": kernel[1], "stride_h": stride[0], "stride_w": stride[1],
            "dilation_h": dilation[0], "dilation_w": dilation[1], "pad_top": padding[0],
            "pad_left": padding[1], "in_zero": given.zero_point, "out_zero": to.zero_point,
            "low": limits[0], "high": limits[1], "narrow": int(narrow),
        },
        tables={
            "weights": weights.reshape(-1), "bias": _padded(bias, padded),
            "rescale": _padded(rescale, 2 * padded),
        },
        scratch=scratch, distances=(distance,), in_place=fast,
        macs=out_h * out_w * channels * len(flat),
    )  # fmt: skip


def _fully_connected(call: _Call) -> Step:
    weights, scales = call.weights(1, 0)
    given, to = call.activation(0), call.output
    if call.option("weights_format") or weights.ndim != 2 or given.size % weights.shape[1]:
        raise call.refuse("with weights in another order")
    channels, depth = weights.shape
    rows = given.size // depth
    if to.size != rows * channels or max(rows, channels, depth) > 65535:
        raise call.refuse(f"of the shape {list(to.shape)}")
    return _convolution(
        call, weights, scales, bias=call.bias(2, channels), image=(rows, 1, depth), out=(rows, 1),
        kernel=(1, 1), float_product=True,
    )  # fmt: skip


def _pool(call: _Call) -> Step:
    image, (out_h, out_w, channels) = call.image(call.activation(0)), call.image(call.output)
    if channels != image[2] or call.activation(0).quantization != call.output.quantization:
        given, to = _quantization(call.activation(0)), _quantization(call.output)
        if channels != image[2] or (given.scale, given.zero_point) != (to.scale, to.zero_point):
            raise call.refuse("to another scale")
    size = call.option("filter_h"), call.option("filter_w")
    kernel, stride, _, padding = _windows(call, image, (out_h, out_w), size)
    low, high = call.limits()
    return call.step(
        kernel="slip_" + call.operator.kind.removesuffix("_2d"), sources=("pool.c",),
        struct="slip_pool",
        numbers={
            "in_h": image[0], "in_w": image[1], "channels": channels, "out_h": out_h,
            "out_w": out_w, "kernel_h": kernel[0], "kernel_w": kernel[1], "stride_h": stride[0],
            "stride_w": stride[1], "pad_top": padding[0], "pad_left": padding[1], "low": low,
            "high": high,
        },
        tables={},
        distances=(_row_distance(image, (out_h, out_w), channels, stride[0], padding[0]),),
    )  # fmt: skip


def _add(call: _Call) -> Step:
    a, b, to = call.activation(0), call.activation(1), call.output
    if not a.shape == b.shape == to.shape:
        raise call.refuse(f"of the shapes {list(a.shape)} and {list(b.shape)}")
    first, second, out = _quantization(a), _quantization(b), _quantization(to)
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


def _softmax(call: _Call) -> Step:
    given, to = call.activation(0), call.output
    out = _quantization(to)
    if out.scale != np.float32(1 / 256) or out.zero_point != -128:
        raise call.refuse("to another scale than 1/256")
    beta = float(call.operator.options["beta"])
    multiplier, shift, least = softmax_scaling(beta, float(_quantization(given).scale))
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


def _reshape(call: _Call) -> int:
    given, to = call.activation(0), call.output
    if given.size != to.size:
        raise call.refuse(f"of {given.size} elements to {to.size}")
    return call.index(0)


_LOWERINGS: dict[str, Callable[[_Call], Step | int]] = {
    "add": _add,
    "average_pool_2d": _pool,
    "conv_2d": _conv_2d,
    "depthwise_conv_2d": _depthwise,
    "fully_connected": _fully_connected,
    "max_pool_2d": _pool,
    "reshape": _reshape,
    "softmax": _softmax,
}
