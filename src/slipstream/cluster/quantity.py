"""A number with where it comes from, and where those of a fitted cluster do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.errors import InvalidArgumentError
from slipstream.provenance import Provenance
from slipstream.schema import read


@dataclass(frozen=True)
class Quantity:
    """A value, how we know it, and from whom.

    Attributes:
        value: in the unit that the name of whatever holds it says.
        provenance: measured, datasheet, assumed, ...
        source: a document, a date and machine, or why it is assumed.
    """

    value: float
    provenance: Provenance = Provenance.USER
    source: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", float(self.value))
        if not (math.isfinite(self.value) and self.value >= 0.0):
            raise InvalidArgumentError(
                "value", f"{self.value} is not a finite number of at least 0", where=self.source
            )

    @classmethod
    def read(cls, place: str, given: object) -> Quantity:
        """From a TOML table ``{value, provenance, source}``, or a bare number of the user's.

        Raises:
            InvalidArgumentError: neither, or a provenance that is not known.
        """
        if isinstance(given, Quantity):
            return given
        table = given if isinstance(given, Mapping) else {"value": given}
        value = read(float, table.get("value"), place, {})
        if value < 0.0:
            raise InvalidArgumentError(
                place, f"{table['value']} is not a finite number of at least 0",
                remedy="a number, or { value = 1.5e9, ... }",
            )  # fmt: skip
        provenance = read(Provenance, table.get("provenance", Provenance.USER), place, {})
        return cls(value, provenance, read(str, table.get("source", ""), f"{place}.source", {}))


NOT_GIVEN = Quantity(0.0, Provenance.ASSUMED, "not given")


@dataclass(frozen=True)
class Calibration:
    """What a fit to measurements left unexplained, and where it was made.

    Attributes:
        date: ISO 8601.
        fingerprint: of the machine; see `slipstream.measure`.
        libraries: name and version of what was measured.
        residual: median of the relative errors of the fit.
        residual_p90: nine of ten are below.
        oversubscription: ranks per processor core; above 1 the scheduler was measured too.
        detail: what else the file keeps: samples, intervals.
    """

    date: str
    fingerprint: str
    libraries: str
    residual: float
    residual_p90: float
    oversubscription: float
    detail: Mapping[str, Any] = field(default_factory=dict)
