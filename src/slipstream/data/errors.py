"""Errors of data sets."""

from __future__ import annotations

from slipstream.errors import SlipstreamError


class MissingDataError(SlipstreamError):
    """A known data set is not on this machine; `name` is the name of the set."""

    def __init__(self, name: str, what: str, *, where: str | None = None, remedy: str) -> None:
        self.name = name
        super().__init__(what, where=where, remedy=remedy)


class CorruptDataError(SlipstreamError):
    """A file of a data set violates its format or checksum."""

    def __init__(self, name: str, what: str, *, where: str | None = None) -> None:
        self.name = name
        super().__init__(
            f"{name}: {what}", where=where, remedy="fetch the file again: slipstream data verify"
        )
