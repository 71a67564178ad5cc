"""The list language: 41 functions on integers and lists of integers.

A program is a sequence of functions without arguments: each reads the most recent number, the most
recent list and the list before it, from earlier functions, then the inputs, or else 0 and [].

Source: Mandal et al., "Learning Fitness Functions for Machine Programming", MLSys 2021, arXiv
1908.08783, after DeepCoder (Balog et al., 2017, arXiv 1611.01989).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul, sub
from typing import Any

from slipstream.errors import InvalidArgumentError, SlipstreamError

Value = int | list[int]

LOW, HIGH, MAX_LIST = -256, 255, 20
NUMBERS = 11  # functions below this id return a number, the others a list

_PREDICATES = {">0": "v > 0", "<0": "v < 0", "odd": "v % 2 != 0", "even": "v % 2 == 0"}
_MAPS = {
    "+1": "v + 1", "-1": "v - 1", "*2": "v * 2", "*3": "v * 3", "*4": "v * 4", "/2": "int(v / 2)",
    "/3": "int(v / 3)", "/4": "int(v / 4)", "*-1": "-v", "**2": "v**2",
}  # fmt: skip
_SCANS = {"+": "x", "-": "x, sub", "*": "x, mul", "min": "x, min", "max": "x, max"}
_ZIPS = {"+": "a + b", "-": "a - b", "*": "a * b", "min": "min(a, b)", "max": "max(a, b)"}
FUNCTIONS: Mapping[str, str] = {
    "HEAD": "x[0] if x else 0", "LAST": "x[-1] if x else 0", "MINIMUM": "min(x, default=0)",
    "MAXIMUM": "max(x, default=0)", "SUM": "sum(x)",
    **{f"COUNT {name}": f"sum({test} for v in x)" for name, test in _PREDICATES.items()},
    "ACCESS": "x[n] if 0 <= n < len(x) else 0", "SEARCH": "x.index(n) if n in x else -1",
    "REVERSE": "x[::-1]", "SORT": "sorted(x)",
    **{f"MAP {name}": f"[{of} for v in x]" for name, of in _MAPS.items()},
    **{f"FILTER {name}": f"[v for v in x if {test}]" for name, test in _PREDICATES.items()},
    **{f"SCANL1 {name}": f"list(accumulate({of}))" for name, of in _SCANS.items()},
    **{f"ZIPWITH {name}": f"[{of} for a, b in zip(y, x)]" for name, of in _ZIPS.items()},
    "TAKE": "x[:max(n, 0)]", "DROP": "x[max(n, 0):]", "DELETE": "[v for v in x if v != n]",
    "INSERT": "[*x, n]",
}  # fmt: skip
"""Python expressions by name, in the order of ids; x: last list, y: list before, n: number."""

NAMES = tuple(FUNCTIONS)
_GLOBALS = {"accumulate": accumulate, "mul": mul, "sub": sub}
_CALLS: list[Callable[[int, list[int], list[int]], Value]] = [
    eval(f"lambda n, x, y: {expression}", _GLOBALS) for expression in FUNCTIONS.values()
]
_READS = [sorted(set(re.findall(r"\b[nxy]\b", expression))) for expression in FUNCTIONS.values()]


@dataclass(frozen=True)
class Program:
    """A program of the list language; called with its inputs, it returns an int or a list.

    Attributes:
        functions: ids, the positions in `FUNCTIONS`.
        lists: whether each input is a list.
    """

    functions: tuple[int, ...]
    lists: tuple[bool, ...] = (True,)

    def __call__(self, *inputs: Value) -> Value:
        """Run the program.

        Raises:
            SlipstreamError: inputs of other types, a result outside -256..255 or longer than 20.
        """
        if tuple(isinstance(value, list) for value in inputs) != self.lists:
            kinds = ", ".join("a list" if is_list else "a number" for is_list in self.lists)
            raise InvalidArgumentError("inputs", f"the program takes {kinds}")
        number, last, before = last_values(inputs)
        result: Value = 0
        for step, function in enumerate(self.functions, 1):
            result = _CALLS[function](number, last, before)
            if why := why_outside(result):
                what = f"step {step}, {NAMES[function]}: the result {why}"
                raise SlipstreamError(what, remedy="pass smaller numbers or shorter lists")
            if isinstance(result, list):
                last, before = result, last
            else:
                number = result
        return result

    def __str__(self) -> str:
        return ", ".join(NAMES[function] for function in self.functions)

    @property
    def live_steps(self) -> dict[int, tuple[int | None, ...]]:
        """Steps that contribute to the result, and the steps they read; negative for inputs."""
        numbers = [-1 - at for at, is_list in enumerate(self.lists) if not is_list]
        lists = [-1 - at for at, is_list in enumerate(self.lists) if is_list]
        reads: list[tuple[int | None, ...]] = []
        for step, function in enumerate(self.functions):
            latest = {"n": numbers[-1:], "x": lists[-1:], "y": lists[-2:-1]}
            reads.append(tuple(next(iter(latest[name]), None) for name in _READS[function]))
            (numbers if function < NUMBERS else lists).append(step)
        live: dict[int, tuple[int | None, ...]] = {}
        needed = [len(self.functions) - 1]
        while needed:
            step = needed.pop()
            if step not in live:
                live[step] = reads[step]
                needed += [at for at in reads[step] if at is not None and at >= 0]
        return dict(sorted(live.items()))

    @property
    def python_source(self) -> str:
        """The program as a Python function, without the check of the range."""
        names = {-1 - at: f"{'xs' if is_list else 'n'}{at or ''}"
                 for at, is_list in enumerate(self.lists)}  # fmt: skip
        names |= {step: f"v{step + 1}" for step in range(len(self.functions))}
        lines = []
        for step, reads in self.live_steps.items():
            text = FUNCTIONS[NAMES[self.functions[step]]]
            for name, at in zip(_READS[self.functions[step]], reads, strict=True):
                value = names[at] if at is not None else "0" if name == "n" else "[]"
                text = re.sub(rf"\b{name}\b", value, text)
            target = "return" if step == len(self.functions) - 1 else f"{names[step]} ="
            lines.append(f"    {target} {text}\n")
        inputs = ", ".join(names[-1 - at] for at in range(len(self.lists)))
        text = f"def program({inputs}):\n{''.join(lines)}"
        used = [f"from {_GLOBALS[name].__module__.strip('_')} import {name}\n"
                for name in _GLOBALS if f"{name}(" in text or f", {name})" in text]  # fmt: skip
        return "".join(used) + ("\n\n" if used else "") + text


def last_values(inputs: Sequence[Value]) -> tuple[int, list[int], list[int]]:
    """Return the last number, the last list and the list before it of inputs."""
    number = next((value for value in reversed(inputs) if not isinstance(value, list)), 0)
    lists = [value for value in reversed(inputs) if isinstance(value, list)]
    lists += [[], []]
    return number, lists[0], lists[1]


def why_outside(value: Any) -> str:
    """Return why `value` is not a value of the language; empty if it is."""
    if isinstance(value, list):
        if len(value) > MAX_LIST:
            return f"has {len(value)} elements; {MAX_LIST} are allowed"
        if any(isinstance(element, list) for element in value):
            return "contains a list"
        return next((f"contains {why[3:]}" for why in map(why_outside, value) if why), "")
    if isinstance(value, bool) or not isinstance(value, int):
        return f"is {value!r}, neither an integer nor a list of integers"
    return "" if LOW <= value <= HIGH else f"is {value}, outside {LOW}..{HIGH}"
