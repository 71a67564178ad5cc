"""Validation of untrusted tables against the types of a dataclass or a function."""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
import reprlib
import types
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

from slipstream.errors import InvalidArgumentError, UnknownNameError

_T = TypeVar("_T")
Readers = Mapping[Any, Callable[[Any, str], Any]]
"""Functions from (value in the file, place) to a value, by type."""
_IN_WORDS = {
    bool: ("true or false", "without quotes"),
    int: ("an integer", "such as 8"),
    float: ("a finite number", "such as 1.5e9"),
    str: ("a text", 'in quotes, such as "star"'),
    Mapping: ("a table", "lines key = value, or { key = value, ... }"),
    Sequence: ("an array", "such as [4, 4]"),
}


def build(
    make: Callable[..., _T], table: Any, place: str, title: str, readers: Readers, **defaults: Any
) -> _T:
    """Call `make` with the entries of a table, each read as the type of its parameter.

    Args:
        make: a dataclass, or a function with annotated parameters.
        place: path of the table in the file, such as ``links.nic``; "" for the whole file.
        title: what the table describes, in errors.
        defaults: arguments that the table must not set.

    Raises:
        UnknownNameError: an entry is not a parameter.
        InvalidArgumentError: an entry is missing or has another type; it names the place.
    """
    table = read(Mapping[str, Any], table, place or title, readers)
    parameters = {
        key: parameter
        for key, parameter in inspect.signature(make).parameters.items()
        if key not in defaults
    }
    for key in table:
        if key not in parameters:
            raise UnknownNameError(f"{title} setting", key, parameters, where=place or None)
    places = {key: f"{place}.{key}" if place else key for key in parameters}
    missing = [key for key, p in parameters.items() if p.default is p.empty and key not in table]
    if missing:
        raise InvalidArgumentError(
            places[missing[0]], f"is missing; {title} needs {', '.join(missing)}",
            remedy=f"add a line {missing[0]} = ...",
        )  # fmt: skip
    kinds = get_type_hints(make)
    values = {key: read(kinds[key], entry, places[key], readers) for key, entry in table.items()}
    return make(**defaults, **values)


def read(kind: Any, value: Any, place: str, readers: Readers) -> Any:
    """Return `value`, found at `place` of the file, converted to the type `kind`.

    Entries that a `TypedDict` does not declare are dropped.

    Raises:
        SlipstreamError: `value` has another type; names the place and the accepted values.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in readers:
        return readers[kind](value, place)
    if origin in (Union, types.UnionType):
        if value is None and types.NoneType in arguments:
            return None
        (kind,) = (argument for argument in arguments if argument is not types.NoneType)
        return read(kind, value, place, readers)
    if origin is Mapping:
        _check(isinstance(value, Mapping), Mapping, value, place)
        return {key: read(arguments[1], v, f"{place}.{key}", readers) for key, v in value.items()}
    if origin in (Sequence, tuple):
        fixed = origin is tuple and Ellipsis not in arguments
        _check(isinstance(value, (list, tuple)), Sequence, value, place)
        if fixed and len(value) != len(arguments):
            raise InvalidArgumentError(
                place, f"{reprlib.repr(value)} has {len(value)} entries",
                remedy=f"an array of {len(arguments)}",
            )  # fmt: skip
        kinds = arguments if fixed else arguments[:1] * len(value)
        return tuple(
            read(kind, entry, f"{place}[{n}]", readers)
            for n, (kind, entry) in enumerate(zip(kinds, value, strict=True))
        )
    if is_typeddict(kind):
        _check(isinstance(value, Mapping), Mapping, value, place)
        for key in sorted(kind.__required_keys__ - value.keys()):
            raise InvalidArgumentError(f"{place}.{key}", "is missing")
        hints = get_type_hints(kind)
        return {
            key: read(hints[key], entry, f"{place}.{key}", readers)
            for key, entry in value.items()
            if key in hints
        }
    if origin is Literal:
        if value not in arguments:
            raise InvalidArgumentError(
                place, f"{reprlib.repr(value)} is not one of its values",
                remedy="one of " + ", ".join(map(str, arguments)),
            )  # fmt: skip
        return value
    if isinstance(kind, type) and issubclass(kind, Enum):
        names = [member.value for member in kind]
        if value not in names:
            raise InvalidArgumentError(
                place, f"{reprlib.repr(value)} is not a {kind.__name__.lower()}",
                remedy="one of " + ", ".join(sorted(names)),
            )  # fmt: skip
        return kind(value)
    if kind is str:
        # Dates and numbers without quotes are names as well.
        _check(not isinstance(value, (Mapping, list, bool)), kind, value, place)
        return str(value)
    if kind is bool:
        _check(isinstance(value, bool), kind, value, place)
    elif kind in (int, float):
        number = _number(kind, value)
        _check(number is not None, kind, value, place)
        return number
    elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return build(kind, value, place, kind.__name__.lower(), readers)
    return value


def _number(kind: Callable[[Any], float], value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = kind(value)
        fits = number == value if kind is int else math.isfinite(number)
    except (OverflowError, ValueError):
        return None
    return number if fits else None


def _check(fits: bool, kind: Any, value: Any, place: str) -> None:
    if not fits:
        words, example = _IN_WORDS[kind]
        raise InvalidArgumentError(place, f"{reprlib.repr(value)} is not {words}", remedy=example)
