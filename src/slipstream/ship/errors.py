"""Errors of exporting, planning and compiling models for devices."""

from __future__ import annotations

from slipstream.errors import SlipstreamError


class ModelFileError(SlipstreamError):
    """A model file is damaged or in another format than its name suggests."""


class UnsupportedModelError(SlipstreamError):
    """A model uses operators without a kernel; `operators` names all of them."""

    def __init__(
        self, what: str, *, operators: tuple[str, ...] = (), where: str | None = None,
        remedy: str | None = None,
    ) -> None:  # fmt: skip
        self.operators = operators
        super().__init__(what, where=where, remedy=remedy)


class DoesNotFitError(SlipstreamError):
    """A model needs `missing_bytes` more memory than the device has."""

    def __init__(
        self, what: str, *, missing_bytes: int = 0, where: str | None = None,
        remedy: str | None = None,
    ) -> None:  # fmt: skip
        self.missing_bytes = missing_bytes
        super().__init__(what, where=where, remedy=remedy)


class ToolchainError(SlipstreamError):
    """A compiler or emulator is missing or failed."""
