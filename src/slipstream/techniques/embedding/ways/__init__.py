"""The ways to keep a table that a plan may mix; one file each."""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.techniques.embedding.ways.codes import Int4, Int8
from slipstream.techniques.embedding.ways.dense import Dense
from slipstream.techniques.embedding.ways.hashed import Hash, HotHash
from slipstream.techniques.embedding.ways.lowdim import LowDim, LowDimCodes
from slipstream.techniques.embedding.ways.robe import Robe
from slipstream.techniques.embedding.ways.tt import TT, HotTT
from slipstream.techniques.embedding.ways.way import Way

WAYS: dict[str, Way] = {
    way.name: way
    for way in (
        Dense(),
        LowDim(),
        LowDimCodes(),
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


def ways_of(names: Iterable[str] | None) -> dict[str, Way]:
    """Those with these names, all for None, in the order of `WAYS`.

    Raises:
        UnknownNameError: no such way.
        InvalidArgumentError: one string in place of several.
    """
    if names is None:
        return dict(WAYS)
    if isinstance(names, str):
        raise InvalidArgumentError("methods", f"'{names}' is one string", remedy=f"['{names}']")
    wanted = list(names)
    for name in wanted:
        if name not in WAYS:
            raise UnknownNameError("method", name, WAYS)
    return {name: way for name, way in WAYS.items() if name in wanted}
