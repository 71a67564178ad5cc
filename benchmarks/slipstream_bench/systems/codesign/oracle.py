"""A slow cost model, written from the definition: loops over jobs and bytes, no formulas."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from slipstream.hardware import Accelerator, Chips, LayerShape, Operand, Pass
from slipstream.hardware.layers import OPERANDS, result_of
from slipstream.hardware.mapping import cost
from slipstream_bench.systems.accelerator.oracle import phases, random_layer

Array = tuple[int, int, int, int]
"""Tiles, rows, columns, lanes."""


def cycles(s: LayerShape, which: Pass, operand: Operand, array: Array) -> tuple[int, int]:
    """Return the cycles of the busiest tile, and of all tiles together.

    Jobs are counted one by one: up to `rows` streams and `columns` results, on tile after tile.
    """
    tiles, rows, columns, lanes = array
    taps = list(itertools.product(range(s.kh), range(s.kw)))
    inputs, outputs = range(s.c // s.groups), range(s.k // s.groups)
    reduced, results = (inputs, outputs) if which is Pass.FORWARD else (outputs, inputs)
    if which is Pass.FORWARD:
        parts = [(list(itertools.product(range(s.oh), range(s.ow))), taps)]
    else:
        parts = list(phases(s, taps))
    busiest = total = 0
    for positions, kernel in parts:
        busy, job = [0] * tiles, 0
        samples = [range(s.n)] if operand is Operand.WEIGHT else [[n] for n in range(s.n)]
        for together, _ in itertools.product(samples, range(s.groups)):
            places = [(n, position) for n in together for position in positions]
            streams: Any = results if operand is Operand.WEIGHT else places
            others: Any = places if operand is Operand.WEIGHT else results
            for _ in range(0, len(streams), rows):
                for _ in range(0, len(others), columns):
                    for _ in kernel:
                        for _ in range(0, len(reduced), lanes):
                            busy[job % tiles] += 1
                            total += 1
                    job += 1
        busiest += max(busy)
    return busiest, total


def dram_bytes(s: LayerShape, which: Pass, onchip_bytes: int, item_bytes: int) -> int:
    """Return the bytes that pass the interface when half of the memory holds a part."""
    sizes = {operand: np.ones(shape, bool).size for operand, shape in s.shapes.items()}
    small, large = sorted(sizes[operand] * item_bytes for operand in OPERANDS[which])
    moved, remaining = 0, small
    while remaining > 0:
        part = min(remaining, onchip_bytes // 2)
        moved += part + large
        remaining -= part
    return moved + sizes[result_of(which)] * item_bytes


Counts = tuple[float, float, float]
"""Cycles of the busiest tile, cycles of all tiles, bytes of DRAM."""


def comparisons(seed: int, base: Accelerator) -> Iterator[tuple[Counts, Counts]]:
    """Yield the predicted and counted costs of a random layer on a random chip, by mapping."""
    rng = np.random.default_rng(seed)
    shape = random_layer(rng)
    options = ((1, 3, 4), (1, 2, 8), (1, 3), (4, 16))
    tiles, rows, columns, lanes = (int(rng.choice(values)) for values in options)
    onchip, item = int(rng.choice([64, 1024, 65536])), int(rng.choice([1, 4]))
    chip = Chips.of(base, tiles=tiles, rows=rows, columns=columns, lanes=lanes, onchip_bytes=onchip)
    for which in (Pass.FORWARD, Pass.INPUT):
        for operand in OPERANDS[which]:
            found = cost(shape, which, chip, item_bytes=item, operand=operand)
            predicted = found.cycles[0], found.job_cycles[0], found.dram_bytes[0]
            counted = cycles(shape, which, operand, (tiles, rows, columns, lanes))
            yield predicted, (*counted, dram_bytes(shape, which, onchip, item))
