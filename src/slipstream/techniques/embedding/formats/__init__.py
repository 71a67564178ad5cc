"""Formats of tables that a plan can mix."""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.techniques.embedding.formats.codes import Int4, Int8
from slipstream.techniques.embedding.formats.format import Dense, TableFormat
from slipstream.techniques.embedding.formats.hashed import Hash, HotHash
from slipstream.techniques.embedding.formats.lowdim import LowDim, LowDimInt4, LowDimInt8
from slipstream.techniques.embedding.formats.robe import Robe
from slipstream.techniques.embedding.formats.tt import TT, HotTT

FORMATS: dict[str, TableFormat] = {
    table_format.name: table_format
    for table_format in (
        Dense(),
        LowDim(),
        LowDimInt8(),
        LowDimInt4(),
        Int8(),
        Int4(),
        TT(),
        Robe(),
        HotTT(),
        HotHash(),
        Hash(),
    )
}
"""Formats by name; of two with equal cost and loss, the earlier one is preferred."""


def formats_of(names: Iterable[str] | None) -> dict[str, TableFormat]:
    """Return the formats of these names, all for None, in the order of `FORMATS`.

    Raises:
        UnknownNameError: a format is unknown.
        InvalidArgumentError: `names` is a string.
    """
    if names is None:
        return dict(FORMATS)
    if isinstance(names, str):
        raise InvalidArgumentError(
            "methods", f"'{names}' is a string, not a list", remedy=f"pass ['{names}']"
        )
    requested = list(names)
    for name in requested:
        if name not in FORMATS:
            raise UnknownNameError("method", name, FORMATS)
    return {name: item for name, item in FORMATS.items() if name in requested}
