"""Numbers with their provenance, and the calibration of a fitted cluster."""

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
    """A value with its provenance and source.

    Attributes:
        value: value in the unit that the attribute's name has.
        provenance: measured, datasheet, assumed, ...
        source: a document, a date and machine, or the reason for an assumption.
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
    def read(cls, place: str, raw: object) -> Quantity:
        """Read a TOML table ``{value, provenance, source}``, or a user's bare number.

        Raises:
            InvalidArgumentError: it is neither, or the provenance is unknown.
        """
        if isinstance(raw, Quantity):
            return raw
        table = raw if isinstance(raw, Mapping) else {"value": raw}
        value = read(float, table.get("value"), place, {})
        if value < 0.0:
            raise InvalidArgumentError(
                place, f"{table['value']} is not a finite number of at least 0",
                remedy="write a number, or { value = 1.5e9, ... }",
            )  # fmt: skip
        provenance = read(Provenance, table.get("provenance", Provenance.USER), place, {})
        return cls(value, provenance, read(str, table.get("source", ""), f"{place}.source", {}))


NOT_GIVEN = Quantity(0.0, Provenance.ASSUMED, "not given")


@dataclass(frozen=True)
class Calibration:
    """Residual error of a fit to measurements, and where it was made.

    Attributes:
        date: ISO 8601.
        fingerprint: fingerprint of the machine; see `slipstream.measure`.
        libraries: name and version of the measured library.
        residual: median of the relative errors of the fit.
        residual_p90: their 90th percentile.
        oversubscription: ranks per CPU core; above 1 the measurement includes the scheduler.
        detail: further entries of the file: samples, intervals.
    """

    date: str
    fingerprint: str
    libraries: str
    residual: float
    residual_p90: float
    oversubscription: float
    detail: Mapping[str, Any] = field(default_factory=dict)
