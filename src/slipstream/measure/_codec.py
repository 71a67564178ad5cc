"""Serialize records to JSON and sample columns to bytes; both round-trip exactly."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_type_hints

import numpy as np

from slipstream.errors import SlipstreamError, StoreError
from slipstream.files import expanded
from slipstream.measure.records import Event, Series
from slipstream.schema import Readers, build

Record = TypeVar("Record")
_MAX_EVENTS_BYTES = 64 << 20


def to_json(record: Any) -> str:
    """Return a dataclass or plain value as one line of JSON; floats with shortest exact digits."""
    is_record = dataclasses.is_dataclass(record) and not isinstance(record, type)
    plain = dataclasses.asdict(record) if is_record else record
    return json.dumps(plain, separators=(",", ":"), default=_plain)


def to_plain(record: Any) -> Any:
    """Return a dataclass as JSON values: dictionaries, lists, strings, numbers."""
    return json.loads(to_json(record))


def from_json(kind: type[Record], text: str) -> Record:
    """Read a record of class `kind` that `to_json` wrote.

    Raises:
        StoreError: The record has unknown fields, or lacks a required one.
    """
    try:
        values = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise StoreError(f"a {kind.__name__} in the store is damaged: {error}") from error
    unknown = values.keys() - get_type_hints(kind).keys() if isinstance(values, dict) else ()
    if unknown:
        raise StoreError(
            f"a {kind.__name__} has unknown fields: {', '.join(sorted(unknown))}",
            remedy="it was written by a newer slipstream: upgrade this one",
        )
    try:
        return build(kind, values, "", kind.__name__, _READERS)
    except SlipstreamError as error:
        raise StoreError(f"a {kind.__name__} in the store is damaged: {error.what}") from error


def _any_float(value: Any, place: str) -> Any:
    # Unlike the default reader, accept infinite interval ends and NaN for missing measurements.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise StoreError(f"{place}: {value!r} is not a number")
    return value


_READERS: Readers = {float: _any_float}


def _plain(value: Any) -> Any:
    # json does not serialize NumPy scalars and mappings other than dict.
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)


def pack_series(series: Series) -> tuple[int, bytes, bytes]:
    """Return the number of samples, the packed values and the packed blocks.

    Values are little-endian float64, blocks little-endian int32 steps from one sample to the
    next (nearly always 0 or 1, so that they cost next to nothing), both compressed with zlib.
    """
    values = np.ascontiguousarray(series.values, dtype="<f8")
    steps = np.diff(series.blocks.astype(np.int64), prepend=0).astype("<i4")
    return values.size, zlib.compress(values.tobytes()), zlib.compress(steps.tobytes())


def unpack_series(n: int, values: bytes, blocks: bytes) -> Series:
    """Unpack the result of `pack_series`; raise StoreError if the bytes are damaged."""
    try:
        column = np.frombuffer(expanded(values, 8 * n), dtype="<f8").astype(np.float64)
        steps = np.frombuffer(expanded(blocks, 4 * n), dtype="<i4")
    except (TypeError, ValueError) as error:
        raise StoreError(f"stored samples are damaged: {error}") from error
    if not column.size == steps.size == n:
        raise StoreError(f"stored samples are damaged: {n} expected, {column.size} found")
    return Series(column, np.cumsum(steps, dtype=np.int64).astype(np.int32))


def pack_events(events: Sequence[Event]) -> bytes:
    """Pack events as compressed JSON; gate readings repeat from block to block."""
    rows = [[event.block, event.kind, event.detail] for event in events]
    return zlib.compress(to_json(rows).encode())


def unpack_events(packed: bytes) -> list[Event]:
    """Unpack the result of `pack_events`; raise StoreError if the bytes are damaged."""
    try:
        rows = json.loads(expanded(packed, _MAX_EVENTS_BYTES))
        events = [Event(block, kind, detail) for block, kind, detail in rows]
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"stored events are damaged: {error}") from error
    if not all(isinstance(event.kind, str) and isinstance(event.detail, dict) for event in events):
        raise StoreError("stored events are damaged: an event has no kind or no details")
    return events
