"""What can be wrong with a model on its way to a device."""

from __future__ import annotations

from slipstream.errors import SlipstreamError


class ModelFileError(SlipstreamError):
    """A model file is damaged, or not what its name says."""


class UnsupportedModelError(SlipstreamError):
    """A model uses what no kernel of ours computes. `operators` names all of it at once."""

    def __init__(
        self, what: str, *, operators: tuple[str, ...] = (), where: str | None = None,
        remedy: str | None = None,
    ) -> None:  # fmt: skip
        self.operators = operators
        super().__init__(what, where=where, remedy=remedy)


class DoesNotFitError(SlipstreamError):
    """A model needs more memory than the device has. `missing_bytes` says how much more."""

    def __init__(
        self, what: str, *, missing_bytes: int = 0, where: str | None = None,
        remedy: str | None = None,
    ) -> None:  # fmt: skip
        self.missing_bytes = missing_bytes
        super().__init__(what, where=where, remedy=remedy)


class ToolchainError(SlipstreamError):
    """A compiler or emulator is missing, or failed."""
