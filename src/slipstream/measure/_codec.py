"""Our records as JSON and columns of samples as bytes, both exact in both directions."""

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
_LARGEST_EVENTS = 64 << 20


def to_json(record: Any) -> str:
    """A dataclass (or plain value) as one line of JSON; floats by their shortest exact digits."""
    is_record = dataclasses.is_dataclass(record) and not isinstance(record, type)
    plain = dataclasses.asdict(record) if is_record else record
    return json.dumps(plain, separators=(",", ":"), default=_plain)


def to_plain(record: Any) -> Any:
    """A dataclass as JSON values: dictionaries, lists, text, numbers."""
    return json.loads(to_json(record))


def from_json(kind: type[Record], text: str) -> Record:
    """The record of class `kind` that `to_json` wrote.

    Raises:
        StoreError: it has fields this version does not know, or lacks one it needs.
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
    """Infinite ends of intervals and what was never measured are kept as well."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise StoreError(f"{place}: {value!r} is no number")
    return value


_READERS: Readers = {float: _any_float}


def _plain(value: Any) -> Any:
    # NumPy's scalars are numbers, and other Mappings dictionaries, whatever json thinks of them.
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)


def pack_series(series: Series) -> tuple[int, bytes, bytes]:
    """Number of samples, values, blocks.

    Values are little-endian float64, blocks little-endian int32 steps from one sample to the
    next (nearly always 0 or 1, so that they cost next to nothing), both compressed with zlib.
    """
    values = np.ascontiguousarray(series.values, dtype="<f8")
    steps = np.diff(series.blocks.astype(np.int64), prepend=0).astype("<i4")
    return values.size, zlib.compress(values.tobytes()), zlib.compress(steps.tobytes())


def unpack_series(n: int, values: bytes, blocks: bytes) -> Series:
    """What `pack_series` packed.

    Raises:
        StoreError: the bytes are damaged.
    """
    try:
        column = np.frombuffer(expanded(values, 8 * n), dtype="<f8").astype(np.float64)
        steps = np.frombuffer(expanded(blocks, 4 * n), dtype="<i4")
    except (TypeError, ValueError) as error:
        raise StoreError(f"stored samples are damaged: {error}") from error
    if not column.size == steps.size == n:
        raise StoreError(f"stored samples are damaged: {n} expected, {column.size} found")
    return Series(column, np.cumsum(steps, dtype=np.int64).astype(np.int32))


def pack_events(events: Sequence[Event]) -> bytes:
    """Compressed JSON; gate readings repeat themselves, block after block."""
    rows = [[event.block, event.kind, event.detail] for event in events]
    return zlib.compress(to_json(rows).encode())


def unpack_events(packed: bytes) -> list[Event]:
    """What `pack_events` packed.

    Raises:
        StoreError: the bytes are damaged.
    """
    try:
        rows = json.loads(expanded(packed, _LARGEST_EVENTS))
        events = [Event(block, kind, detail) for block, kind, detail in rows]
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"stored events are damaged: {error}") from error
    if not all(isinstance(one.kind, str) and isinstance(one.detail, dict) for one in events):
        raise StoreError("stored events are damaged: they have no kind, or no details")
    return events
