"""What a file from outside may say: the types of a dataclass, or of a function's parameters."""

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

_Made = TypeVar("_Made")
Readers = Mapping[Any, Callable[[Any, str], Any]]
"""By type, what makes a value of it from what the file says at a place."""
_IN_WORDS = {
    bool: ("true or false", "without quotes"),
    int: ("a whole number", "such as 8"),
    float: ("a finite number", "such as 1.5e9"),
    str: ("a text", 'in quotes, such as "star"'),
    Mapping: ("a table", "lines key = value, or { key = value, ... }"),
    Sequence: ("an array", "such as [4, 4]"),
}


def build(
    make: Callable[..., _Made], table: Any, place: str, title: str, readers: Readers, **given: Any
) -> _Made:
    """What `make` makes of a table, each of whose entries is read as its parameter's type.

    Args:
        make: a dataclass, or a function whose parameters have types.
        place: of the table in the file, ``links.nic``; "" for the whole file.
        title: what the table describes, in errors.
        given: parameters that the table does not hold.

    Raises:
        UnknownNameError: an entry that is no parameter.
        InvalidArgumentError: an entry is missing, or of another type; it names the place.
    """
    table = read(Mapping[str, Any], table, place or title, readers)
    known = {
        key: parameter
        for key, parameter in inspect.signature(make).parameters.items()
        if key not in given
    }
    for key in table:
        if key not in known:
            raise UnknownNameError(f"{title} setting", key, known, where=place or None)
    places = {key: f"{place}.{key}" if place else key for key in known}
    missing = [key for key, p in known.items() if p.default is p.empty and key not in table]
    if missing:
        raise InvalidArgumentError(
            places[missing[0]], f"is missing; {title} needs {', '.join(missing)}",
            remedy=f"a line {missing[0]} = ...",
        )  # fmt: skip
    kinds = get_type_hints(make)
    values = {key: read(kinds[key], one, places[key], readers) for key, one in table.items()}
    return make(**given, **values)


def read(kind: Any, value: Any, place: str, readers: Readers) -> Any:
    """`value`, which the file has at `place`, as one of type `kind`.

    Of a `TypedDict` its own entries are read; others are left out.

    Raises:
        SlipstreamError: it is of another type, with the place and what would do.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in readers:
        return readers[kind](value, place)
    if origin in (Union, types.UnionType):
        if value is None and types.NoneType in arguments:
            return None
        (kind,) = (one for one in arguments if one is not types.NoneType)
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
            read(kind, one, f"{place}[{n}]", readers)
            for n, (kind, one) in enumerate(zip(kinds, value, strict=True))
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
        names = [one.value for one in kind]
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
