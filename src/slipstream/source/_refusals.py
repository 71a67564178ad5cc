"""Why an edit is not made: it cannot be placed with certainty, or it is there already."""

from __future__ import annotations

from slipstream.errors import SlipstreamError


class NotPlacedError(SlipstreamError):
    """Where the edit belongs cannot be told with certainty; says what was looked for."""


class AlreadyThereError(SlipstreamError):
    """The source does what the edit would make it do."""
