"""Checks of arguments that many functions have in common."""

from __future__ import annotations

import operator
from typing import Any

from slipstream.errors import InvalidArgumentError


def whole_number(argument: str, value: Any, least: int | None = 1) -> int:
    """`value` as an int: Python's, NumPy's, or a tensor of one integer.

    Args:
        argument: what to call it in errors.
        least: None for any.

    Raises:
        InvalidArgumentError: it is no whole number (floats like 1e6 are none), or below `least`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise InvalidArgumentError(argument, f"{value!r} is not a whole number")
    if least is not None and number < least:
        raise InvalidArgumentError(argument, f"{number} is less than {least}")
    return number
