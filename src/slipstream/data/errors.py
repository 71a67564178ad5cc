"""What can go wrong between a name and its arrays."""

from __future__ import annotations

from slipstream.errors import SlipstreamError


class MissingDataError(SlipstreamError):
    """A known data set that is not on this machine. `name` is the data set."""

    def __init__(self, name: str, what: str, *, where: str | None = None, remedy: str) -> None:
        self.name = name
        super().__init__(what, where=where, remedy=remedy)


class CorruptDataError(SlipstreamError):
    """A file of a data set that does not hold what its format or checksum promises."""

    def __init__(self, name: str, what: str, *, where: str | None = None) -> None:
        self.name = name
        super().__init__(
            f"{name}: {what}", where=where, remedy="fetch the file again: slipstream data verify"
        )
