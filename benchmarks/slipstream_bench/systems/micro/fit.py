"""Fit `slipstream.ship.firmware.costs`: ``python -m slipstream_bench.systems.micro.fit FILE``.

Steps of random shapes run on each emulated processor; the weights are non-negative and minimise the
relative error. The networks of the prediction rows are not among them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from slipstream.ship.export import write_network
from slipstream.ship.firmware import (
    Firmware,
    FirmwareRun,
    KernelCall,
    Network,
    Operator,
    Quantization,
    Target,
    Tensor,
    export_firmware,
    random_inputs,
    run_emulated,
    targets,
)
from slipstream.ship.firmware.costs import counts, stack_paths

_NETWORKS = 16


class Shapes:
    """Networks of single operators with sizes that are typical for microcontrollers.

    Args:
        size: height and width of every image; None to draw them.
    """

    def __init__(self, seed: int, size: int | None = None) -> None:
        self._dice = np.random.default_rng(seed)
        self._size = size
        self._tensors: list[Tensor] = []
        self._operators: list[Operator] = []
        self._inputs: list[int] = []
        self._outputs: list[int] = []

    def network(self, kinds: list[str]) -> Network:
        """Return a network of all operators so far and one more of each kind."""
        for kind in kinds:
            getattr(self, f"_{kind}")()
        return Network(
            "fit", tuple(self._tensors), tuple(self._operators), tuple(self._inputs),
            tuple(self._outputs),
        )  # fmt: skip

    def _of(self, *values: int) -> int:
        return int(self._dice.choice(values))

    def _tensor(self, shape: tuple[int, ...], scale: float = 0.05, zero: int = -3) -> int:
        grid = Quantization(np.array([scale], np.float32), np.array([zero], np.int64))
        self._tensors.append(Tensor(f"t{len(self._tensors)}", shape, "int8", grid))
        return len(self._tensors) - 1

    def _step(self, kind: str, inputs: tuple[int, ...], output: int, **options: Any) -> None:
        self._operators.append(Operator(kind, inputs, (output,), options))
        self._outputs.append(output)
        made = [index for index in inputs if self._tensors[index].data is None]
        self._inputs += made

    def _weights(self, shape: tuple[int, ...], axis: int) -> tuple[int, int]:
        channels = shape[axis]
        # If sizes are drawn, some channels have shifts that are too small for the short form.
        odd = self._dice.random() < 0.2 and self._size is None
        scales = np.full(channels, 0.002, np.float32)
        if odd:
            scales[self._dice.random(channels) < 0.3] = 4.0
        zeros = np.zeros(channels, np.int64)
        data = self._dice.integers(-127, 128, shape).astype(np.int8)
        grid = Quantization(scales, zeros, axis)
        self._tensors.append(Tensor(f"w{len(self._tensors)}", shape, "int8", grid, data))
        bias = self._dice.integers(-900, 900, channels).astype(np.int32)
        of_bias = Quantization((np.float32(0.05) * scales).astype(np.float32), zeros)
        self._tensors.append(Tensor(f"b{len(self._tensors)}", (channels,), "int32", of_bias, bias))
        return len(self._tensors) - 2, len(self._tensors) - 1

    def _image(self, depth: int) -> tuple[int, int, int, int]:
        if self._size:
            return 1, self._size, self._size, depth
        high, wide = self._of(1, 3, 5, 6, 9, 12, 24), self._of(1, 3, 5, 6, 10, 12, 24)
        while high * wide * depth > 12_000:
            high, wide = max(1, high // 2), max(1, wide // 2)
        return 1, high, wide, depth

    def convolution(
        self, kernel: tuple[int, int], stride: int, depth: int, padding: str = "same",
        channels: int = 0,
    ) -> None:  # fmt: skip
        """Add CONV_2D; `channels` of the output are drawn if they are 0."""
        shape = self._image(depth)
        if padding == "valid":
            shape = 1, shape[1] + kernel[0], shape[2] + kernel[1], depth
            out = (shape[1] - kernel[0]) // stride + 1, (shape[2] - kernel[1]) // stride + 1
        else:
            out = -(-shape[1] // stride), -(-shape[2] // stride)
        channels = channels or self._of(2, 4, 8, 10, 16, 32, 64)
        x = self._tensor(shape)
        w, b = self._weights((channels, *kernel, depth), 0)
        self._step(
            "conv_2d", (x, w, b), self._tensor((1, *out, channels), 0.3), padding=padding,
            stride_h=stride, stride_w=stride, activation="none",
        )  # fmt: skip

    def _point(self) -> None:
        self.convolution((1, 1), 1, self._of(4, 8, 16, 20, 32, 64, 128))

    def _conv(self) -> None:
        kernel = (3, 3) if self._of(0, 1) else (self._of(1, 3, 5, 10), self._of(1, 2, 3, 4, 8))
        self.convolution(kernel, self._of(1, 2), self._of(1, 3, 8, 16, 40))

    def _valid(self) -> None:
        """Add a convolution without padding, so no function pads or copies."""
        self.convolution((3, 3), self._of(1, 2), self._of(4, 8), "valid")

    def _first_layer(self) -> None:
        """Add large kernels on a single-channel image, mostly border."""
        self.convolution((self._of(5, 8, 10), self._of(4, 5, 8)), self._of(1, 2), 1)

    def depthwise(
        self, kernel: tuple[int, int], stride: int, multiplier: int, depth: int = 0
    ) -> None:
        """DEPTHWISE_CONV_2D; `depth` of the input is drawn if it is 0."""
        shape = self._image(depth or self._of(4, 8, 13, 32, 64))
        channels = shape[3] * multiplier
        out = -(-shape[1] // stride), -(-shape[2] // stride)
        x = self._tensor(shape)
        w, b = self._weights((1, *kernel, channels), 3)
        self._step(
            "depthwise_conv_2d", (x, w, b), self._tensor((1, *out, channels), 0.3), padding="same",
            stride_h=stride, stride_w=stride, activation="none", multiplier=multiplier,
        )  # fmt: skip

    def _depthwise(self) -> None:
        self.depthwise((3, 3), self._of(1, 1, 2), 1)

    def _other_depthwise(self) -> None:
        self.depthwise((self._of(1, 3, 5), self._of(1, 2, 4)), self._of(1, 2), self._of(1, 2))

    def _tall_depthwise(self) -> None:
        self.depthwise((self._of(3, 5, 10, 20), 1), 1, 1)

    def _connected(self) -> None:
        depth, channels = self._of(20, 64, 128, 300, 2000), self._of(4, 10, 12, 64, 128)
        x = self._tensor((1, depth))
        w, b = self._weights((channels, depth), 0)
        self._step(
            "fully_connected", (x, w, b), self._tensor((1, channels), 0.3), activation="none",
            weights_format=0,
        )  # fmt: skip

    def _pool_of(self, kind: str) -> None:
        shape = self._image(self._of(8, 16, 64))
        size = min(shape[1], shape[2], self._of(2, 3, 8))
        out = (shape[1] - size) // size + 1, (shape[2] - size) // size + 1
        self._step(
            kind, (self._tensor(shape),), self._tensor((1, *out, shape[3])), padding="valid",
            stride_h=size, stride_w=size, filter_h=size, filter_w=size, activation="none",
        )  # fmt: skip

    def _average(self) -> None:
        self._pool_of("average_pool_2d")

    def _maximum(self) -> None:
        self._pool_of("max_pool_2d")

    def _add(self) -> None:
        shape = self._image(self._of(8, 16))
        a, b = self._tensor(shape), self._tensor(shape, 0.04, 5)
        self._step("add", (a, b), self._tensor(shape, 0.08), activation="none")

    def _softmax(self) -> None:
        shape = (1, self._of(2, 3, 10, 12, 40))
        x = self._tensor(shape, self._of(1, 2, 8) / 64)
        self._step("softmax", (x,), self._tensor(shape, 1 / 256, -128), beta=1.0)


_KINDS = [
    "point", "conv", "depthwise", "point", "conv", "depthwise", "other_depthwise", "connected",
    "average", "maximum", "add", "softmax", "point", "depthwise", "first_layer", "tall_depthwise",
    "valid",
]  # fmt: skip


def _ran(device: str, kinds: list[str], seed: int) -> tuple[Firmware, FirmwareRun]:
    made = export_firmware(write_network(Shapes(seed).network(kinds)), device=device)
    # Several, since softmax takes less stack on some.
    inputs = random_inputs(made.interface, 4)
    with tempfile.TemporaryDirectory() as folder:
        ran = run_emulated(made.sources, made.interface, inputs, Path(folder), made.target)
    return made, ran


def _samples(device: str) -> Iterator[tuple[KernelCall, int, int]]:
    """Yield (step, instructions, bytes of stack)."""
    for seed in range(_NETWORKS):
        made, ran = _ran(device, _KINDS, seed)
        yield from zip(made.program.steps, ran.steps[0], ran.stacks, strict=True)


def _stacks(samples: list[tuple[KernelCall, int, int]], target: Target) -> dict[str, int]:
    """Return each kernel's stack, such that no step has more than one with its deepest call."""
    found: dict[str, int] = {}
    for step, _, used in samples:
        for path in stack_paths(step, target):
            found[path] = min(used, found.get(path, used))
    return dict(sorted(found.items()))


def _fit(samples: list[tuple[KernelCall, int, int]], target: Target) -> dict[str, dict[str, float]]:
    found = {}
    for kernel in sorted({step.kernel for step, _, _ in samples}):
        own = [(counts(step, target), cost) for step, cost, _ in samples if step.kernel == kernel]
        names = sorted({name for features, _ in own for name in features})
        rows = np.array(
            [[features.get(name, 0.0) / cost for name in names] for features, cost in own]
        )
        weights, _ = nnls(rows, np.ones(len(own)))
        found[kernel] = {
            name: round(float(w), 3) for name, w in zip(names, weights, strict=True) if w
        }
    return found


def _sizes(device: str) -> dict[str, Any]:
    """Return the code size of each kernel, from images without other kernels."""
    code: dict[str, int] = {}
    found: dict[str, Any] = {"code": code}
    for kind in dict.fromkeys(_KINDS):
        for seed in range(2):
            made, ran = _ran(device, [kind], seed)
            kernel = made.program.steps[0].kernel
            assert ran.size is not None
            if kernel not in code:
                twice, again = _ran(device, [kind, kind], seed)
                assert again.size is not None
                if {step.kernel for step in twice.program.steps} == {kernel}:
                    found["step_code"] = again.size.code - ran.size.code
                code[kernel] = ran.size.code - found["step_code"]
                found["library"] = max(ran.size.library, found.get("library", 0))
    return found


def main() -> None:
    """Fit all emulated processors, and write the file."""
    made = {}
    for target in targets():
        if target.board:
            print(f"fitting {target.name}", file=sys.stderr, flush=True)
            samples = list(_samples(target.name))
            made[target.name] = {
                "instructions": _fit(samples, target), "stack": _stacks(samples, target),
                **_sizes(target.name),
            }  # fmt: skip
            # After each processor, so that an interrupted run keeps its results.
            Path(sys.argv[1]).write_text(json.dumps(made, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
