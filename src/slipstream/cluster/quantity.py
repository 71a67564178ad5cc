"""A number with where it comes from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import InvalidArgumentError
from slipstream.provenance import Provenance


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

    def to_toml(self) -> dict[str, Any]:
        return {
            "value": self.value, "provenance": self.provenance.value, "source": self.source
        }  # fmt: skip

    @classmethod
    def read(cls, name: str, given: object) -> Quantity:
        """From a TOML table ``{value, provenance, source}``, or a bare number of the user's.

        Raises:
            InvalidArgumentError: neither, or a provenance that is not known.
        """
        if isinstance(given, Quantity):
            return given
        if isinstance(given, (int, float)) and not isinstance(given, bool):
            table: Mapping[str, Any] = {"value": given}
        elif isinstance(given, Mapping) and isinstance(given.get("value"), (int, float)):
            table = given
        else:
            raise InvalidArgumentError(
                name, f"{given!r} is not a number", remedy="a number, or { value = 1.5e9, ... }"
            )
        known = {p.value for p in Provenance}
        provenance = table.get("provenance", Provenance.USER.value)
        if provenance not in known:
            raise InvalidArgumentError(
                name,
                f"'{provenance}' is not a provenance",
                remedy="one of " + ", ".join(sorted(known)),
            )
        try:
            return cls(float(table["value"]), Provenance(provenance), str(table.get("source", "")))
        except InvalidArgumentError as error:
            raise InvalidArgumentError(
                name, f"{table['value']} is not a finite number of at least 0"
            ) from error


NOT_GIVEN = Quantity(0.0, Provenance.ASSUMED, "not given")
