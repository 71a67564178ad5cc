"""Loop programs and schedules as a user writes them: sums, texts and files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from slipstream.codegen import legality
from slipstream.codegen.legality import IllegalScheduleError, check
from slipstream.codegen.program import (
    Apply,
    Axis,
    Buffer,
    Const,
    Expr,
    Index,
    Load,
    Program,
    ProgramError,
    Statement,
    apply,
)  # fmt: skip
from slipstream.codegen.schedule import (
    Fuse,
    Interchange,
    Parallel,
    Reverse,
    Schedule,
    ScheduleError,
    Shift,
    Skew,
    Step,
    Tile,
    Tree,
    Unroll,
    Vectorise,
)  # fmt: skip
from slipstream.codegen.walker import source
from slipstream.errors import SlipstreamError, UsageError
from slipstream.files import read_bytes
from slipstream.search.estimators import load_target

_STEPS = "tile(i,j,32,64) interchange(i,j) vectorise(j) unroll(k,4) fuse(0,1,2) reverse(i) " \
    "shift(i,1) skew(t,i,1) parallel(i)"  # fmt: skip
_STEP = re.compile(r"\s*(\w+)\(([^()]*)\)(?:@(\d+))?\s*")


def einsum(spec: str, dtype: str = "float32", **extents: int) -> Program:
    """Return the program of a sum of products, such as ``einsum("ik,kj->ij", i=512, j=512, k=64)``.

    Inputs are the buffers ``in0``, ``in1``, ...; the output is ``out``. Loops are in the order of
    the output's axes, then of the summed ones.

    Raises:
        ProgramError: the spec is malformed, or an axis has no extent.
    """
    operands, arrow, result = spec.replace(" ", "").partition("->")
    inputs = operands.split(",")
    names = list(dict.fromkeys(result + "".join(inputs)))
    if not arrow or not all(inputs) or not all(map(str.isalpha, inputs)):
        raise ProgramError(f"'{spec}' is not a sum of products", remedy='for example "ik,kj->ij"')
    if len(set(result)) < len(result) or not set(result) <= set("".join(inputs)):
        raise ProgramError(
            f"the output '{result}' of '{spec}' repeats an axis, or has one that no input has",
            remedy="name each axis of the output once, and in an input",
        )
    if missing := [name for name in names if name not in extents]:
        raise ProgramError(f"axis '{missing[0]}' has no extent", remedy=f"pass {missing[0]}=64")
    buffers = [
        Buffer(f"in{n}", tuple(extents[a] for a in axes), dtype) for n, axes in enumerate(inputs)
    ]
    out = Buffer("out", tuple(extents[a] for a in result) or (1,), dtype, "out")
    value: Expr = Load("in0", buffers[0].at(*inputs[0]))
    for buffer, axes in zip(buffers[1:], inputs[1:], strict=True):
        value = apply("mul", value, Load(buffer.name, buffer.at(*axes)))
    summed = [name for name in names if name not in result]
    statement = Statement(
        "out", out.at(*(result or [0])), value, tuple(names), "sum" if summed else None
    )
    axes_ = tuple(Axis(n, extents[n], "reduce" if n in summed else "free") for n in names)
    return Program((*buffers, out), axes_, (statement,))


def schedule(program: Program, text: str) -> Schedule:
    """Return the schedule that a text such as ``tile(i,j,32,64)+vectorise(j)`` describes.

    A step is for the first statement with its axis, or statement N with ``@N`` at the end.

    Raises:
        ScheduleError: the text has another form, or names an unknown step or axis.
    """
    return Schedule(tuple(_step(program, part) for part in text.split("+")))


def _step(program: Program, text: str) -> Step:
    match = _STEP.fullmatch(text)
    words = [word.strip() for word in match[2].split(",")] if match else []
    numbers = [int(word) for word in words if re.fullmatch(r"-?\d+", word)]
    axes = tuple(word for word in words if not re.fullmatch(r"-?\d+", word))
    for axis in axes:
        if axis not in program.axis:
            raise ScheduleError(
                f"there is no axis '{axis}'", where=text, remedy=f"one of {sorted(program.axis)}"
            )
    owners = [n for n, s in enumerate(program.statements) if set(axes) <= set(s.axes)]
    number = int(match[3]) if match and match[3] else owners[0] if owners else 0
    steps: dict[str, Callable[..., Step]] = {
        "interchange": Interchange, "reverse": Reverse, "shift": Shift, "skew": Skew,
        "unroll": Unroll, "vectorise": Vectorise, "vectorize": Vectorise, "parallel": Parallel,
    }  # fmt: skip
    name = match[1] if match else ""
    try:
        if name == "fuse" and not axes:
            return Fuse(*numbers)
        if name == "tile" and len(axes) == len(numbers) > 0:
            return Tile(number, axes, tuple(numbers))
        step = steps[name](number, *axes, *numbers)
        if any(type(getattr(step, f.name)).__name__ != f.type for f in fields(step)):
            raise TypeError(step)
        return step
    except (KeyError, TypeError):
        raise ScheduleError(f"'{text}' is not a step", remedy=f"one of {_STEPS}") from None


def is_legal(program: Program, schedule: Schedule) -> bool:
    """Whether a schedule preserves the order of dependent iterations.

    Raises:
        ScheduleError: a step does not fit the program's loops.
    """
    return legality.is_legal(Tree(program, schedule))


def emit(program: Program, schedule: Schedule | None = None) -> str:
    """Return C++ of a scheduled program, without dependences on other files.

    ``extern "C" void loops_0(void* const* buffers, const int64_t* symbols, int threads)`` takes the
    program's buffers in order.

    Raises:
        IllegalScheduleError: the schedule reverses a dependence.
        ScheduleError: a step does not fit the program's loops.
    """
    tree = Tree(program, schedule)
    check(tree)
    return source([tree])


def read_program(target: str) -> Program:
    """Read a program from a ``.json`` file, or ``file.py:name`` of a program or its function.

    Raises:
        SlipstreamError: there is no such file or name, or it is not a program.
    """
    if target.endswith(".json"):
        try:
            value: Any = json.loads(read_bytes(Path(target)))
        except ValueError as error:
            raise ProgramError(f"this is not JSON ({error})", where=target) from error
        return Program.from_json(value)
    if ".py:" not in target:
        raise UsageError(
            f"'{target}' does not name a loop program", remedy="pass file.py:name or a .json file"
        )
    program = load_target(target)
    if callable(program):
        try:
            program = program()
        except SlipstreamError:
            raise
        except Exception as error:
            raise UsageError(
                f"'{target}' raises {type(error).__name__}: {error}",
                remedy="name a function without arguments that returns a Program",
            ) from error
    if not isinstance(program, Program):
        raise UsageError(
            f"'{target}' is a {type(program).__name__}, not a Program",
            remedy="name a slipstream.loops.Program, or a function without arguments returning one",
        )
    return program


__all__ = [
    "Apply", "Axis", "Buffer", "Const", "Fuse", "IllegalScheduleError", "Index", "Interchange",
    "Load", "Parallel", "Program", "ProgramError", "Reverse", "Schedule", "ScheduleError", "Shift",
    "Skew", "Statement", "Tile", "Unroll", "Vectorise", "apply", "einsum", "emit", "is_legal",
    "read_program", "schedule",
]  # fmt: skip
