"""The formats of tables that a plan may mix; one file each."""

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
    one.name: one
    for one in (
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
"""By name; of two that cost and lose the same, the earlier one is taken."""


def formats_of(names: Iterable[str] | None) -> dict[str, TableFormat]:
    """Those with these names, all for None, in the order of `FORMATS`.

    Raises:
        UnknownNameError: no such format.
        InvalidArgumentError: one string in place of several.
    """
    if names is None:
        return dict(FORMATS)
    if isinstance(names, str):
        raise InvalidArgumentError("methods", f"'{names}' is one string", remedy=f"['{names}']")
    wanted = list(names)
    for name in wanted:
        if name not in FORMATS:
            raise UnknownNameError("method", name, FORMATS)
    return {name: one for name, one in FORMATS.items() if name in wanted}
