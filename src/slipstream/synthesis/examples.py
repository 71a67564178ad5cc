"""Examples of a function: inputs and outputs, from Python or a file of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.files import read_bytes
from slipstream.synthesis.kernels import MAX_INPUTS
from slipstream.synthesis.language import HIGH, LOW, MAX_LIST, Value, why_outside

Inputs = tuple[Value, ...]
_REMEDY = f"use integers from {LOW} to {HIGH} and lists of at most {MAX_LIST} of them"
_FORMAT = 'write one object per line: {"input": [3, 1, 2], "output": [1, 2, 3]}'
_SEVERAL = (
    'write several arguments as "inputs": [2, [5, 6, 7]], in Python as a tuple: (2, [5, 6, 7])'
)


@dataclass(frozen=True)
class Examples:
    """Checked examples: the arguments and the result of calls, and the places to name in errors."""

    inputs: tuple[Inputs, ...]
    outputs: tuple[Value, ...]
    places: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.inputs:
            raise InvalidArgumentError("examples", "there are none", remedy=_FORMAT)
        if len(self.inputs) > MAX_INPUTS:
            what = f"{len(self.inputs)} examples, at most {MAX_INPUTS} are supported"
            raise InvalidArgumentError("examples", what, remedy="pass the most varied ones")
        seen: dict[str, int] = {}
        for at, (inputs, output) in enumerate(zip(self.inputs, self.outputs, strict=True)):
            numbers = [f"input {n}" for n in range(1, len(inputs) + 1)]
            fields = [*(numbers if len(inputs) > 1 else ["input"]), "output"]
            for field, value in zip(fields, (*inputs, output), strict=True):
                if why := why_outside(value):
                    is_nested = isinstance(value, list) and any(isinstance(v, list) for v in value)
                    remedy = _SEVERAL if is_nested and field == "input" else _REMEDY
                    raise self._error(at, f"the {field} {why}", remedy)
            kinds, first = (self._kinds(row) for row in (at, 0))
            if kinds != first:
                what = f"the example is {kinds}, but {self.places[0]} is {first}"
                raise self._error(at, what, "give all examples the same types")
            other = seen.setdefault(repr(inputs), at)
            if self.outputs[other] != output:
                what = f"the output is {output}, but {self.places[other]} has the same input and "
                what += f"the output {self.outputs[other]}"
                raise self._error(at, what, "remove one of the two")

    def _error(self, row: int, what: str, remedy: str) -> InvalidArgumentError:
        return InvalidArgumentError("examples", what, where=self.places[row], remedy=remedy)

    def _kinds(self, row: int) -> str:
        names = ["list" if isinstance(value, list) else "integer"
                 for value in (*self.inputs[row], self.outputs[row])]  # fmt: skip
        return f"({', '.join(names[:-1])}) -> {names[-1]}"

    @property
    def lists(self) -> tuple[bool, ...]:
        """Whether each argument is a list."""
        return tuple(isinstance(value, list) for value in self.inputs[0])

    @classmethod
    def of(cls, pairs: Iterable[tuple[Any, Any]]) -> Examples:
        """Check pairs of an input and an output; a tuple of inputs is several arguments.

        Raises:
            InvalidArgumentError: an example is not in the list language or contradicts another.
        """
        rows: list[Any] = list(pairs)
        places = tuple(f"example {number}" for number in range(1, len(rows) + 1))
        for place, pair in zip(places, rows, strict=True):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                what, remedy = f"{pair!r} is not a pair", "for example [([3, 1, 2], [1, 2, 3])]"
                raise InvalidArgumentError("examples", what, where=place, remedy=remedy)
        inputs = tuple(row[0] if isinstance(row[0], tuple) else (row[0],) for row in rows)
        return cls(inputs, tuple(row[1] for row in rows), places)

    @classmethod
    def load(cls, path: Path) -> Examples:
        """Read JSON lines with ``input``, or a list ``inputs`` of arguments, and ``output``.

        Raises:
            SlipstreamError: the file cannot be read, a line is not an example, or see `of`.
        """
        rows: dict[str, tuple[Any, Any]] = {}
        for number, line in enumerate(read_bytes(path).splitlines(), 1):
            place = f"{path}:{number}"
            if line.strip():
                try:
                    rows[place] = _example(json.loads(line))
                except (ValueError, RecursionError):
                    raise SlipstreamError("not JSON", where=place, remedy=_FORMAT) from None
                except LookupError:
                    what = "not an object with the fields 'input' (or 'inputs') and 'output'"
                    raise SlipstreamError(what, where=place, remedy=_FORMAT) from None
        inputs, outputs = (tuple(row[n] for row in rows.values()) for n in (0, 1))
        return cls(inputs, outputs, tuple(rows))

    def probes(self, count: int, generator: np.random.Generator) -> list[Inputs]:
        """Return random inputs in the range of the examples', every other with few values."""
        columns = list(zip(*self.inputs, strict=True))
        return [
            tuple(_like(column, generator, few=row % 2 == 1) for column in columns)
            for row in range(count)
        ]


def _example(row: Any) -> tuple[Any, Any]:
    if not isinstance(row, dict):
        raise LookupError
    inputs = row.get("inputs")
    if isinstance(inputs, list) and inputs:
        return tuple(inputs), row["output"]
    return (row["input"],), row["output"]


def _like(values: Sequence[Value], generator: np.random.Generator, *, few: bool) -> Value:
    lists = [value for value in values if isinstance(value, list)]
    numbers = [value for value in values if not isinstance(value, list)]
    if numbers:
        return int(generator.integers(min(numbers), max(numbers) + 1))
    lengths = [len(value) for value in lists]
    elements = [element for value in lists for element in value] or [0]
    low, high = min(elements), max(elements)
    if not few:
        size = generator.integers(min(lengths), max(lengths) + 1)
        return [int(v) for v in generator.integers(low, high + 1, size)]
    # Zeros, ones, equal and opposite elements, and short lists, which random ones seldom have.
    some = generator.choice(elements, 3)
    pool = np.clip([0, 1, some[0], some[1], -some[2]], low, high)
    size = generator.integers(min(1, *lengths), max(lengths) + 1)
    return [int(v) for v in generator.choice(pool, size)]
