"""Networks of independent random operators: odd shapes, zero points, scales, paddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from slipstream.ship.firmware import Network, Operator, Quantization, Tensor


class RandomNetwork:
    """Builder of operators with separate inputs and outputs, which share only the arena."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.tensors: list[Tensor] = []
        self.operators: list[Operator] = []
        self.inputs: list[int] = []
        self.outputs: list[int] = []

    def network(self, count: int, names: Sequence[str] = ()) -> Network:
        """Return `count` operators, cycling through `names` or all kinds of both back ends."""
        kinds: list[Callable[[], None]] = [
            self.convolution, self.depthwise, self.connected, self.pool, self.add, self.softmax,
            self.convolution, self.depthwise,
        ]  # fmt: skip
        if names:
            kinds = [getattr(self, name) for name in names]
        for number in range(count):
            kinds[number % len(kinds)]()
        return Network(
            "random", tuple(self.tensors), tuple(self.operators), tuple(self.inputs),
            tuple(self.outputs),
        )  # fmt: skip

    def pick(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def grid(self, scale: float | None = None, zero: int | None = None) -> Quantization:
        scale = float(self.rng.uniform(0.001, 0.5)) if scale is None else scale
        zero = self.pick(-128, 127) if zero is None else zero
        return Quantization(np.array([scale], np.float32), np.array([zero], np.int64))

    def tensor(self, shape: tuple[int, ...], grid: Quantization) -> int:
        self.tensors.append(Tensor(f"t{len(self.tensors)}", shape, "int8", grid))
        return len(self.tensors) - 1

    def input(self, shape: tuple[int, ...], grid: Quantization | None = None) -> int:
        index = self.tensor(shape, grid or self.grid())
        self.inputs.append(index)
        return index

    def step(self, kind: str, inputs: tuple[int, ...], shape: tuple[int, ...], grid: Quantization,
             **options: object) -> None:  # fmt: skip
        output = self.tensor(shape, grid)
        self.outputs.append(output)
        self.operators.append(Operator(kind, inputs, (output,), options))

    def weights(self, shape: tuple[int, ...], axis: int, source: int, *, channels: bool = True,
                depth: int) -> tuple[int, int, Quantization]:  # fmt: skip
        """Return indices of weights and bias, and an output grid that the sums exhaust."""
        count = shape[axis]
        scales = self.rng.uniform(0.001, 0.02, count if channels else 1).astype(np.float32)
        zeros = np.zeros(len(scales), np.int64)
        codes = self.rng.integers(-127, 128, shape).astype(np.int8)
        self.tensors.append(
            Tensor(f"w{len(self.tensors)}", shape, "int8", Quantization(scales, zeros, axis), codes)
        )
        bias_grid = Quantization((self.scale(source) * scales).astype(np.float32), zeros, 0)
        bias = self.rng.integers(-3000, 3000, count).astype(np.int32)
        self.tensors.append(Tensor(f"b{len(self.tensors)}", (count,), "int32", bias_grid, bias))
        # From far too small, where most codes saturate, to far too large.
        reach = float(self.scale(source) * scales.max()) * 70 * 70 * np.sqrt(depth)
        out = self.grid(reach / 128 * float(np.exp(self.rng.uniform(-3, 2))))
        return len(self.tensors) - 2, len(self.tensors) - 1, out

    def scale(self, index: int) -> np.float32:
        found = self.tensors[index].quantization
        assert found is not None
        return found.scale

    def window(self, largest: int = 9) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int],
                                              str, tuple[int, int]]:  # fmt: skip
        """Return (image, kernel, stride, padding, output), each (height, width)."""
        kernel = (self.pick(1, 5), self.pick(1, 5)) if self.pick(0, 2) else (3, 3)
        stride = (
            (self.pick(1, 3), self.pick(1, 3)) if not self.pick(0, 2) else (self.pick(1, 2),) * 2
        )
        image = (self.pick(kernel[0], largest), self.pick(kernel[1], largest))
        padding = "same" if self.pick(0, 1) else "valid"
        out = tuple(
            -(-size // step) if padding == "same" else (size - reach) // step + 1
            for size, reach, step in zip(image, kernel, stride, strict=True)
        )
        return image, kernel, stride, padding, (out[0], out[1])

    def activation(self) -> str:
        return ("none", "relu", "relu6")[self.pick(0, 2)]

    def convolution(self) -> None:
        image, kernel, stride, padding, out = self.window()
        if not self.pick(0, 2):
            kernel, stride, out = (1, 1), (1, 1), image
        depth, channels = self.pick(1, 9), self.pick(1, 11)
        x = self.input((1, *image, depth))
        w, b, grid = self.weights((channels, *kernel, depth), 0, x, depth=depth * kernel[0])
        self.step(
            "conv_2d", (x, w, b), (1, *out, channels), grid, padding=padding, stride_h=stride[0],
            stride_w=stride[1], activation=self.activation(),
        )  # fmt: skip

    def depthwise(self) -> None:
        image, kernel, stride, padding, out = self.window()
        depth, multiplier = self.pick(1, 9), self.pick(1, 2)
        x = self.input((1, *image, depth))
        w, b, grid = self.weights((1, *kernel, depth * multiplier), 3, x, depth=kernel[0])
        self.step(
            "depthwise_conv_2d", (x, w, b), (1, *out, depth * multiplier), grid, padding=padding,
            stride_h=stride[0], stride_w=stride[1], multiplier=multiplier,
            activation=self.activation(),
        )  # fmt: skip

    def connected(self) -> None:
        rows, depth, channels = self.pick(1, 3), self.pick(1, 40), self.pick(1, 13)
        x = self.input((rows, depth))
        w, b, grid = self.weights(
            (channels, depth), 0, x, channels=bool(self.pick(0, 1)), depth=depth
        )
        self.step(
            "fully_connected", (x, w, b), (rows, channels), grid, activation=self.activation(),
            weights_format=0,
        )  # fmt: skip

    def pool(self) -> None:
        image, kernel, stride, padding, out = self.window()
        depth = self.pick(1, 7)
        x = self.input((1, *image, depth))
        grid = self.tensors[x].quantization
        assert grid is not None
        kind = ("average_pool_2d", "max_pool_2d")[self.pick(0, 1)]
        self.step(
            kind, (x,), (1, *out, depth), grid, padding=padding, stride_h=stride[0],
            stride_w=stride[1], filter_h=kernel[0], filter_w=kernel[1],
            activation=self.activation(),
        )  # fmt: skip

    def add(self) -> None:
        shape = (1, self.pick(1, 6), self.pick(1, 6), self.pick(1, 6))
        a, b = self.input(shape), self.input(shape)
        both = float(self.scale(a) + self.scale(b))
        self.step("add", (a, b), shape, self.grid(both * 0.7), activation=self.activation())

    def softmax(self) -> None:
        shape = (self.pick(1, 3), self.pick(2, 20))
        grid = self.grid(float(np.exp(self.rng.uniform(-7, 0.5))))
        self.step("softmax", (self.input(shape, grid),), shape, self.grid(1 / 256, -128), beta=1.0)

    def lookup(self) -> None:
        """Add a function of one number, on all codes."""
        kind = ("logistic", "hard_swish", "leaky_relu")[self.pick(0, 2)]
        x = self.input((1, 16, 16), self.grid(float(np.exp(self.rng.uniform(-6, 0)))))
        if kind == "logistic":
            self.step(kind, (x,), (1, 16, 16), self.grid(1 / 256, -128))
        elif kind == "hard_swish":
            self.step(kind, (x,), (1, 16, 16), self.grid())
        else:
            alpha = float(self.rng.uniform(0.01, 0.5))
            self.step(kind, (x,), (1, 16, 16), self.grid(), alpha=alpha)

    def mul(self) -> None:
        shape = (1, self.pick(1, 6), self.pick(1, 6), self.pick(1, 6))
        a = self.input(shape)
        b = self.input(shape if self.pick(0, 1) else (1, 1, 1, shape[3]))
        pair = (a, b) if self.pick(0, 1) else (b, a)
        grid = self.grid(float(self.scale(a) * self.scale(b)) * self.pick(20, 120))
        self.step("mul", pair, shape, grid, activation=self.activation())

    def concatenation(self) -> None:
        shape, axis = [1, self.pick(1, 4), self.pick(1, 4), self.pick(1, 4)], self.pick(1, 3)
        other, grid = list(shape), self.grid()
        other[axis] = self.pick(1, 4)
        a, b = self.input(tuple(shape), grid), self.input(tuple(other), grid)
        shape[axis] += other[axis]
        self.step(
            "concatenation", (a, b), tuple(shape), grid, axis=axis - 4 * self.pick(0, 1),
            activation="none",
        )  # fmt: skip

    def mean(self) -> None:
        image = (self.pick(1, 9), self.pick(1, 9))
        channels, same = self.pick(1, 7), self.pick(0, 1)
        x = self.input((1, *image, channels))
        grid = self.tensors[x].quantization if same else self.grid(float(self.scale(x)) * 0.6)
        assert grid is not None
        self.tensors.append(Tensor(f"axes{x}", (2,), "int32", None, np.array([1, 2], np.int32)))
        axes = len(self.tensors) - 1
        keep = self.pick(0, 1)
        shape = (1, 1, 1, channels) if keep else (1, channels)
        self.step("mean", (x, axes), shape, grid, keep_dims=keep)

    def transpose(self) -> None:
        _, kernel, stride, padding, _ = self.window()
        image = (self.pick(1, 5), self.pick(1, 5))
        # The smallest size that a convolution with this window reduces to the image.
        out = tuple(
            (size - 1) * step + 1 if padding == "same" else (size - 1) * step + reach
            for size, reach, step in zip(image, kernel, stride, strict=True)
        )
        depth, channels = self.pick(1, 9), self.pick(1, 7)
        x = self.input((1, *image, depth))
        w, b, grid = self.weights((channels, *kernel, depth), 0, x, depth=depth * kernel[0])
        shape = (1, out[0], out[1], channels)
        self.tensors.append(Tensor(f"s{x}", (4,), "int32", None, np.array(shape, np.int32)))
        self.step(
            "transpose_conv", (len(self.tensors) - 1, w, x, b), shape, grid, padding=padding,
            stride_h=stride[0], stride_w=stride[1], activation="none",
        )  # fmt: skip

    def resize(self) -> None:
        image, factors = (self.pick(1, 5), self.pick(1, 5)), (self.pick(1, 3), self.pick(1, 3))
        out, channels = (image[0] * factors[0], image[1] * factors[1]), self.pick(1, 7)
        x = self.input((1, *image, channels))
        grid = self.tensors[x].quantization
        assert grid is not None
        self.tensors.append(Tensor(f"s{x}", (2,), "int32", None, np.array(out, np.int32)))
        self.step(
            "resize_nearest_neighbor", (x, len(self.tensors) - 1), (1, *out, channels), grid,
            align_corners=0, half_pixel_centers=self.pick(0, 1),
        )  # fmt: skip
