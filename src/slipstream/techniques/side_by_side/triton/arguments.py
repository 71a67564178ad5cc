"""Arguments of a Triton kernel for a check or compilation, from its launch."""

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
_SYNTAX = "n=1000 for a number, x=4096xfp32 for a pointer, idx=4096xi32<64 for integers below 64"


@dataclass(frozen=True)
class Argument:
    """An argument of a kernel.

    Attributes:
        kind: ``array``, ``number``, ``constexpr``, or ``dtype``, a constexpr that is a type.
        value: a number or constant; the number of elements of an array.
        type: type of a number or an array's elements, in Triton's short form.
        below: upper bound of an array's integers, exclusive.
    """

    kind: str
    value: int | float | bool | str | None
    type: str = ""
    below: int = _BELOW


def arguments_of(part: ProgramPart) -> list[Argument]:
    """Return the arguments of a kernel, in the order of its parameters.

    Raises:
        EmulatorError: an argument is missing, invalid or unknown.
    """
    names = [parameter.name for parameter in part.parameters]
    values = part.launch.values
    unknown = set(values) - set(names) - set(_WARPS)
    if unknown:
        raise EmulatorError(
            f"{part.name} has no argument '{min(unknown)}'", remedy=f"it has {', '.join(names)}"
        )
    return [
        _argument(part, parameter, values.get(parameter.name, parameter.default))
        for parameter in part.parameters
    ]


def _argument(part: ProgramPart, parameter: Parameter, text: str) -> Argument:
    name = parameter.name
    if not text:
        tuned = f" (chosen by @{part.tuned[0]})" if parameter.constexpr and part.tuned else ""
        syntax = f"{name}=64" if parameter.constexpr else _SYNTAX
        raise EmulatorError(
            f"{part.name} has no value of '{name}'{tuned}", where=str(part.launch.path),
            remedy=f"pass it: {part.name}:{name}=...; for example {syntax}",
        )  # fmt: skip
    array = _ARRAY.fullmatch(text)
    if array is not None and not parameter.constexpr:
        if array[2] not in TYPES or not int(array[1]):
            raise EmulatorError(
                f"{name}={text} of {part.name} is not an array", remedy=f"types: {', '.join(TYPES)}"
            )
        return Argument("array", int(array[1]), array[2], int(array[3] or _BELOW))
    if parameter.constexpr and (dtype := _DTYPE.fullmatch(text)) is not None:
        return Argument("dtype", dtype[1])
    value = _literal(text)
    if value is None or parameter.constexpr:
        return Argument("constexpr", value)
    if isinstance(value, str):
        raise EmulatorError(
            f"{name}={text} of {part.name} is neither a number nor an array",
            remedy=f"for example {_SYNTAX}",
        )
    if isinstance(value, float):
        return Argument("number", value, parameter.type or "fp32")
    wide = "i32" if -(2**31) <= value < 2**31 else "i64"
    return Argument("number", value, parameter.type or ("u1" if isinstance(value, bool) else wide))


def _literal(text: str) -> int | float | bool | str | None:
    """Parse a constant; a word without quotes is a string."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, int | float | str | None) else text
