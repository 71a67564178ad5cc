"""Sources of numbers. Every number shown to a user has one."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Provenance(StrEnum):
    """Source of a number, from observed to declared; see `weakest`."""

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
    """Return the least certain provenance, which a combination of numbers inherits.

    Raises:
        ValueError: `provenances` is empty.
    """
    return max(provenances, key=_ORDER.__getitem__)
