"""Where a number comes from. Every number shown to a user carries one of these."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Provenance(StrEnum):
    """Ordered from what we saw to what we were told; see `weakest`."""

    MEASURED = "measured"
    MICROBENCHMARK = "microbenchmark"
    FITTED = "fitted"
    ROOFLINE = "roofline"
    SIMULATED = "simulated"
    DATASHEET = "datasheet"
    ASSUMED = "assumed"
    USER = "user"


_ORDER = {provenance: rank for rank, provenance in enumerate(Provenance)}


def weakest(provenances: Iterable[Provenance]) -> Provenance:
    """The provenance a combination of numbers inherits: that of its least certain part.

    Raises:
        ValueError: nothing was given.
    """
    return max(provenances, key=_ORDER.__getitem__)
