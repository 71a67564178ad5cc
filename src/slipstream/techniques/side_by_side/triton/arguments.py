"""What a Triton kernel is given where it is checked or compiled, from its launch."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from slipstream.techniques.side_by_side.hfuse import EmulatorError
from slipstream.techniques.side_by_side.triton.fuse import Parameter, ProgramPart

TYPES = (
    "fp16", "bf16", "fp32", "fp64", "i1", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64"
)  # fmt: skip
_ARRAY = re.compile(r"(\d+)x([a-z]+\d+)(?:<(\d+))?")
_DTYPE = re.compile(r"(?:tl\.)?(u?int\d+|b?float\d+|int1)")
_BELOW = 64
_WARPS = ("num_warps", "num_stages")
_SHAPE = "n=1000 for a number, x=4096xfp32 for a pointer, idx=4096xi32<64 for integers below 64"


@dataclass(frozen=True)
class Argument:
    """One of a kernel's.

    Attributes:
        kind: ``array``, ``number``, ``constexpr``, or ``dtype``, a constexpr that is a type.
        value: a number or constant; how many elements of an array.
        type: of an array's elements or a number, in Triton's short words.
        below: what an array's integers stay below.
    """

    kind: str
    value: int | float | bool | str | None
    type: str = ""
    below: int = _BELOW


def arguments_of(part: ProgramPart) -> list[Argument]:
    """What a kernel is given, in the order of its parameters.

    Raises:
        EmulatorError: something is not told, or told of what is not there.
    """
    names = [one.name for one in part.parameters]
    values = part.launch.values
    unknown = set(values) - set(names) - set(_WARPS)
    if unknown:
        raise EmulatorError(
            f"{part.name} has no argument '{min(unknown)}'", remedy=f"it has {', '.join(names)}"
        )
    return [_argument(part, one, values.get(one.name, one.default)) for one in part.parameters]


def _argument(part: ProgramPart, parameter: Parameter, text: str) -> Argument:
    name = parameter.name
    if not text:
        tuned = f" (a value of @{part.tuned[0]}'s)" if parameter.constexpr and part.tuned else ""
        shape = f"{name}=64" if parameter.constexpr else _SHAPE
        raise EmulatorError(
            f"{part.name} is not told '{name}'{tuned}", where=str(part.launch.path),
            remedy=f"say it: {part.name}:{name}=...; as {shape}",
        )  # fmt: skip
    array = _ARRAY.fullmatch(text)
    if array is not None and not parameter.constexpr:
        if array[2] not in TYPES or not int(array[1]):
            raise EmulatorError(
                f"{name}={text} of {part.name} is no array", remedy=f"types: {', '.join(TYPES)}"
            )
        return Argument("array", int(array[1]), array[2], int(array[3] or _BELOW))
    if parameter.constexpr and (dtype := _DTYPE.fullmatch(text)) is not None:
        return Argument("dtype", dtype[1])
    value = _literal(text)
    if value is None or parameter.constexpr:
        return Argument("constexpr", value)
    if isinstance(value, str):
        raise EmulatorError(f"{name}={text} of {part.name} is none", remedy=f"for example {_SHAPE}")
    if isinstance(value, float):
        return Argument("number", value, parameter.type or "fp32")
    wide = "i32" if -(2**31) <= value < 2**31 else "i64"
    return Argument("number", value, parameter.type or ("u1" if isinstance(value, bool) else wide))


def _literal(text: str) -> int | float | bool | str | None:
    """A constant; a word without quotes is text."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, int | float | str | None) else text
