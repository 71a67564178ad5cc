"""Random functions of one list, with examples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slipstream.synthesis import Program
from slipstream.synthesis.kernels import MAX_INPUTS, Task, find_programs, run
from slipstream.synthesis.language import FUNCTIONS, NUMBERS, Value

Pair = tuple[list[int], Value]
_SHORTER = 4
"""Tasks that a program of at most this length solves on 32 inputs are left out."""


@dataclass(frozen=True)
class RandomTask:
    """A function and five examples of it.

    Attributes:
        truth: the program that generated the examples.
        pairs: five inputs with outputs.
    """

    truth: Program
    pairs: list[Pair]


def random_inputs(count: int, generator: np.random.Generator) -> list[list[int]]:
    """Return lists of 5 to 10 integers from -64 to 64."""
    lengths = generator.integers(5, 11, count)
    return [generator.integers(-64, 65, length).tolist() for length in lengths]


def random_task(
    length: int, generator: np.random.Generator, *, is_list: bool, irreducible: bool = False
) -> RandomTask:
    """Return a task whose program has no dead code and whose outputs are not all equal.

    Args:
        irreducible: whether no program of at most 4 functions, or `length` - 1, may do the same.
    """
    while True:
        functions = generator.integers(len(FUNCTIONS), size=length, dtype=np.uint8)
        program = Program(tuple(functions.tolist()))
        if (functions[-1] >= NUMBERS) != is_list or len(program.live_steps) < length:
            continue
        inputs = random_inputs(MAX_INPUTS, generator)
        results = run(Task([(values,) for values in inputs]), functions[None])
        outputs = [results.value(0, row) for row in range(MAX_INPUTS)]
        pairs = [(i, o) for i, o in zip(inputs, outputs, strict=True) if o is not None]
        size = sum(len(o) if isinstance(o, list) else 1 for _, o in pairs[:5])
        if len(pairs) < 16 or size < 5 or all(o == pairs[0][1] for _, o in pairs[:5]):
            continue
        if irreducible:
            task = Task([(values,) for values, _ in pairs], [output for _, output in pairs])
            shorter = min(_SHORTER, length - 1)
            if find_programs(
                task, shorter, max_candidates=1 << 40, max_seconds=60, capacity=1
            ).programs:
                continue
        return RandomTask(program, pairs[:5])
