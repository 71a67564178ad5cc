"""Argument checks shared by many functions."""

from __future__ import annotations

import operator
from typing import Any

from slipstream.errors import InvalidArgumentError


def as_integer(argument: str, value: Any, least: int | None = 1) -> int:
    """Return `value` as an int; accepts Python and NumPy integers and one-element integer tensors.

    Args:
        argument: name of the argument in errors.
        least: the minimum; None for no minimum.

    Raises:
        InvalidArgumentError: `value` is not an integer (floats such as 1e6 are not), or is below
            `least`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise InvalidArgumentError(argument, f"{value!r} is not an integer")
    if least is not None and number < least:
        raise InvalidArgumentError(argument, f"{number} is less than {least}")
    return number
