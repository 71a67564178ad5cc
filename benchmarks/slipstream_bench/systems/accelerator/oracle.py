"""A slow model of the accelerator, written from the definition: loops over values, no streams."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.hardware.kernels import Streams
from slipstream.hardware.layers import LayerShape, Operand, Pass

OPTIONS = [(0, 0), (1, 0), (2, 0), (1, -1), (1, 1), (2, -2), (2, 2), (1, -3)]
# Lanes in the order in which TensorDash's six levels serve them.
ORDER = [lane for level in range(5) for lane in range(level, 15, 5)] + [15]

CURVE = {
    (1, 0.0): 1.0, (1, 0.1): 1.10, (1, 0.3): 1.36, (1, 0.5): 1.73, (1, 0.7): 2.32, (1, 0.9): 2.98,
    (1, 1.0): 3.0, (4, 0.1): 1.084, (4, 0.3): 1.295, (4, 0.5): 1.592, (4, 0.7): 2.038,
    (4, 0.9): 2.935, (16, 0.5): 1.52,
}  # fmt: skip
"""Speed-ups by rows that advance together and share of zeros: the paper's figure, reproduced with
an independent simulator."""


def lane_cycles(streams: list[list[list[int]]]) -> int:
    """Return the cycles of streams [rows][16] that advance together."""
    length, at, cycles = len(streams[0]), 0, 0
    buffers = [[list(row) for row in rows] + [[0] * 16] * 3 for rows in streams]
    while at < length:
        cycles, advances = cycles + 1, []
        for buffer in buffers:
            for lane in ORDER:
                for row, distance in OPTIONS:
                    if buffer[at + row][(lane + distance) % 16]:
                        buffer[at + row][(lane + distance) % 16] = 0
                        break
            empty = [any(buffer[at + row]) for row in range(3)]
            advances.append(empty.index(True) if True in empty else 3)
        at += min(advances)
    return cycles


def _rows(values: list[Any]) -> list[list[Any]]:
    padded = values + [0] * (-len(values) % 16)
    return [padded[first : first + 16] for first in range(0, len(padded), 16)]


def pass_streams(
    s: LayerShape, which: Pass, operand: Operand, bits: NDArray[Any]
) -> Iterator[tuple[list[list[list[list[Any]]]], int]]:
    """Yield (groups of streams that do not mix, results per stream) for each part of a pass."""
    cg, kg = s.c // s.groups, s.k // s.groups
    blocks: list[list[list[list[Any]]]]
    rows: list[list[Any]]
    kernel = list(itertools.product(range(s.kh), range(s.kw)))

    def at(n: int, channel: int, y: int, x: int) -> Any:
        inside = 0 <= y < bits.shape[2] and 0 <= x < bits.shape[3]
        return bits[n, channel, y, x] if inside else 0

    if which is Pass.WEIGHT:
        positions = list(itertools.product(range(s.oh), range(s.ow)))
        blocks = []
        for g in range(s.groups):
            streams = []
            if operand is Operand.GRADIENT:
                for k in range(g * kg, (g + 1) * kg):
                    rows = []
                    for n in range(s.n):
                        rows += _rows([at(n, k, y, x) for y, x in positions])
                    streams.append(rows)
            else:
                for c, (i, j) in itertools.product(range(g * cg, (g + 1) * cg), kernel):
                    rows = []
                    for n in range(s.n):
                        rows += _rows([_tap(s, at, n, c, y, x, i, j) for y, x in positions])
                    streams.append(rows)
            blocks.append(streams)
        yield blocks, cg * s.kh * s.kw if operand is Operand.GRADIENT else kg
        return
    if which is Pass.FORWARD:
        parts = [(list(itertools.product(range(s.oh), range(s.ow))), kernel)]
    else:
        parts = list(phases(s, kernel))
    for positions, taps in parts:
        blocks = []
        reduced = cg if which is Pass.FORWARD else kg
        results = kg if which is Pass.FORWARD else cg
        samples = 1 if operand is Operand.WEIGHT else s.n
        for n, g in itertools.product(range(samples), range(s.groups)):
            streams = []
            # A result channel for weights, a position otherwise.
            indices: Iterable[Any] = range(results) if operand is Operand.WEIGHT else positions
            for index in indices:
                rows = []
                for i, j in taps:
                    channels = range(g * reduced, (g + 1) * reduced)
                    if operand is Operand.ACTIVATION:
                        values = [_tap(s, at, n, c, index[0], index[1], i, j) for c in channels]
                    elif operand is Operand.GRADIENT:
                        y = (index[0] + s.padding[0] - i * s.dilation[0]) // s.stride[0]
                        x = (index[1] + s.padding[1] - j * s.dilation[1]) // s.stride[1]
                        values = [at(n, k, y, x) for k in channels]
                    elif which is Pass.FORWARD:
                        values = [bits[g * kg + index, c, i, j] for c in range(cg)]
                    else:
                        values = [bits[k, index, i, j] for k in channels]
                    rows += _rows(values)
                streams.append(rows)
            blocks.append(streams)
        yield blocks, s.n * len(positions) if operand is Operand.WEIGHT else results


def _tap(
    s: LayerShape, at: Callable[..., Any], n: int, c: int, y: int, x: int, i: int, j: int
) -> Any:
    return at(
        n, c, y * s.stride[0] - s.padding[0] + i * s.dilation[0],
        x * s.stride[1] - s.padding[1] + j * s.dilation[1],
    )  # fmt: skip


def phases(s: LayerShape, kernel: list[tuple[int, int]]) -> Iterator[tuple[list[Any], list[Any]]]:
    """Yield the input positions and taps of each phase of the stride."""
    (sh, sw), (ph, pw), (dh, dw) = s.stride, s.padding, s.dilation
    inputs = list(itertools.product(range(s.h), range(s.w)))
    for a, b in itertools.product(range(sh), range(sw)):
        positions = [(y, x) for y, x in inputs if (y + ph) % sh == a and (x + pw) % sw == b]
        taps = [(i, j) for i, j in reversed(kernel) if i * dh % sh == a and j * dw % sw == b]
        if positions and taps:
            yield positions, taps


def pass_cycles(
    s: LayerShape, which: Pass, operand: Operand, bits: NDArray[Any], rows: int, columns: int,
    tiles: int,
) -> int:  # fmt: skip
    """Return the cycles of a pass: jobs in order, job j on tile j modulo `tiles`."""
    total = 0
    for blocks, results in pass_streams(s, which, operand, bits):
        busy, job = [0] * tiles, 0
        for streams in blocks:
            for first in range(0, len(streams), rows):
                cycles = lane_cycles(streams[first : first + rows])
                for _ in range(-(-results // columns)):
                    busy[job % tiles] += cycles
                    job += 1
        total += max(busy)
    return total


def random_layer(rng: np.random.Generator) -> LayerShape:
    """Return a layer with odd sizes: strides, dilation, groups, or linear."""

    def draw(low: int, high: int) -> int:
        return int(rng.integers(low, high))

    if rng.random() < 0.15:
        return LayerShape(1, draw(1, 40), draw(1, 40), 1, draw(1, 20))
    groups = int(rng.choice([1, 1, 2, 3]))
    kh, kw, dilation = draw(1, 4), draw(1, 4), (draw(1, 3), draw(1, 3))
    return LayerShape(
        draw(1, 3), groups * draw(1, 20), groups * draw(1, 20),
        draw(0, 4) + dilation[0] * (kh - 1) + 1, draw(0, 4) + dilation[1] * (kw - 1) + 1, kh, kw,
        (draw(1, 4), draw(1, 4)), (draw(0, 3), draw(0, 3)), dilation, groups,
    )  # fmt: skip


def bernoulli(zeros: float, groups: int, together: int, length: int = 2048) -> Streams:
    """Return groups of streams whose values are zero with a probability of `zeros`."""
    rng = np.random.default_rng(0)
    bits = rng.random((groups * together * length, 16)) >= zeros
    words = np.packbits(bits, axis=1, bitorder="little").view(np.uint16).ravel()
    base = np.arange(groups * together).reshape(groups, together) * length
    return Streams(words, base, np.arange(length), 1)
