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


@dataclass(frozen=True)
class Examples:
    """Checked examples of one function.

    Attributes:
        inputs: the arguments of each call.
        outputs: the result of each call.
        places: where each example comes from, for messages.
    """

    inputs: tuple[Inputs, ...]
    outputs: tuple[Value, ...]
    places: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.inputs:
            raise InvalidArgumentError("examples", "there are none", remedy=_FORMAT)
        if len(self.inputs) > MAX_INPUTS:
            raise InvalidArgumentError(
                "examples", f"{len(self.inputs)} examples, at most {MAX_INPUTS} are supported",
                remedy="pass the most varied ones",
            )  # fmt: skip
        seen: dict[str, int] = {}
        for at, (inputs, output, place) in enumerate(
            zip(self.inputs, self.outputs, self.places, strict=True)
        ):
            fields = [(f"input {n + 1}" if len(inputs) > 1 else "input", value)
                      for n, value in enumerate(inputs)]  # fmt: skip
            for field, value in [*fields, ("output", output)]:
                if why := why_outside(value):
                    raise InvalidArgumentError(
                        "examples", f"the {field} {why}", where=place, remedy=_REMEDY
                    )
            kinds, first = (self._kinds(row) for row in (at, 0))
            if kinds != first:
                raise InvalidArgumentError(
                    "examples", f"the example is {kinds}, but {self.places[0]} is {first}",
                    where=place, remedy="give all examples the same types",
                )  # fmt: skip
            other = seen.setdefault(repr(inputs), at)
            if self.outputs[other] != output:
                raise InvalidArgumentError(
                    "examples",
                    f"the output is {output}, but {self.places[other]} has the same input and the "
                    f"output {self.outputs[other]}",
                    where=place, remedy="remove one of the two",
                )  # fmt: skip

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
        rows = list(pairs)
        for number, pair in enumerate(rows, 1):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise InvalidArgumentError(
                    "examples", f"{pair!r} is not a pair of input and output",
                    where=f"example {number}", remedy="for example [([3, 1, 2], [1, 2, 3])]",
                )  # fmt: skip
        places = tuple(f"example {number}" for number in range(1, len(rows) + 1))
        inputs = tuple(row[0] if isinstance(row[0], tuple) else (row[0],) for row in rows)
        return cls(inputs, tuple(row[1] for row in rows), places)

    @classmethod
    def load(cls, path: Path) -> Examples:
        """Read JSON lines with ``input``, or a list ``inputs`` of arguments, and ``output``.

        Raises:
            SlipstreamError: the file cannot be read, or a line is not an example.
            InvalidArgumentError: see `of`.
        """
        inputs: list[Inputs] = []
        outputs: list[Value] = []
        places: list[str] = []
        for number, line in enumerate(_lines(path), 1):
            place = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                raise SlipstreamError("not JSON", where=place, remedy=_FORMAT) from None
            is_row = isinstance(row, dict)
            if is_row and "output" in row and isinstance(row.get("inputs"), list) and row["inputs"]:
                inputs.append(tuple(row["inputs"]))
            elif is_row and "output" in row and "input" in row:
                inputs.append((row["input"],))
            else:
                what = "not an object with the fields 'input' (or 'inputs') and 'output'"
                raise SlipstreamError(what, where=place, remedy=_FORMAT)
            outputs.append(row["output"])
            places.append(place)
        return cls(tuple(inputs), tuple(outputs), tuple(places))

    def probes(self, count: int, generator: np.random.Generator) -> list[Inputs]:
        """Return random inputs with lengths and values in the range of the examples'."""
        columns = list(zip(*self.inputs, strict=True))
        return [tuple(_like(column, generator) for column in columns) for _ in range(count)]


def _lines(path: Path) -> list[str]:
    try:
        return read_bytes(path).decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise SlipstreamError("not UTF-8 text", where=str(path), remedy=_FORMAT) from None


def _like(values: Sequence[Value], generator: np.random.Generator) -> Value:
    lists = [value for value in values if isinstance(value, list)]
    if not lists:
        numbers = [value for value in values if not isinstance(value, list)]
        return int(generator.integers(min(numbers), max(numbers) + 1))
    lengths = [len(value) for value in lists]
    elements = [element for value in lists for element in value] or [0]
    size = generator.integers(min(lengths), max(lengths) + 1)
    return [int(v) for v in generator.integers(min(elements), max(elements) + 1, size)]
