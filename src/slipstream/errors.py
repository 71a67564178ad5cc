"""Errors that state what was wrong, where, and what to do.

Every error a user can cause is a `SlipstreamError`. The command line prints its three parts and
exits with its exit code; a traceback is shown only with ``--debug``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Self

# Without a close match, up to _FEW known names are all listed, and of more only _SHOWN.
_FEW, _SHOWN = 40, 12


class SlipstreamWarning(UserWarning):
    """Something works, but worse than or differently from what was requested."""


class SlipstreamError(Exception):
    """Base class of errors that a user can cause.

    Args:
        what: what went wrong, in one sentence.
        where: place to look at, such as ``file:line``, an argument, or an arm and block.
        remedy: what to do about it.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        self.what = what
        self.where = where
        self.remedy = remedy
        super().__init__(what)

    @classmethod
    def revive(
        cls, what: str, where: str | None, remedy: str | None, attributes: Mapping[str, Any]
    ) -> Self:
        """Restore an error from its parts, for instance in another process."""
        error = cls.__new__(cls)
        # The subclass's own __init__ would add its prefix to `what` again.
        SlipstreamError.__init__(error, what, where=where, remedy=remedy)
        vars(error).update(attributes)
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        # By default, copying and pickling would call __init__ with one argument.
        return type(self).revive, (self.what, self.where, self.remedy, dict(vars(self)))

    def __str__(self) -> str:
        parts = [self.what]
        if self.where:
            parts.append(f"  where: {self.where}")
        if self.remedy:
            parts.append(f"  try: {self.remedy}")
        return "\n".join(parts)


class UsageError(SlipstreamError):
    """The request itself is malformed."""

    exit_code = 2


class InvalidArgumentError(UsageError, ValueError):
    """An argument has a value that the function does not accept; `argument` is its name."""

    def __init__(
        self, argument: str, what: str, *, where: str | None = None, remedy: str | None = None
    ) -> None:
        self.argument = argument
        super().__init__(f"{argument}: {what}", where=where, remedy=remedy)


class UnknownNameError(UsageError, LookupError):
    """A name is unknown; the closest known names are suggested."""

    def __init__(
        self, kind: str, name: str, known: Iterable[str], *, where: str | None = None
    ) -> None:
        self.kind = kind
        self.name = name
        self.known = sorted(known)
        near = difflib.get_close_matches(name, self.known, n=3, cutoff=0.5)
        if near:
            remedy = "did you mean " + " or ".join(near) + "?"
        elif self.known:
            shown = self.known[: _FEW if len(self.known) <= _FEW else _SHOWN]
            more = len(self.known) - len(shown)
            remedy = "known: " + ", ".join(shown) + (f" and {more} more" if more else "")
        else:
            remedy = None
        super().__init__(f"unknown {kind} '{name}'", where=where, remedy=remedy)


class MissingExtraError(SlipstreamError):
    """An optional dependency is required but not installed."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        self.extra = extra
        super().__init__(
            f"{feature} needs {package}, which is not installed",
            remedy=f"pip install 'slipstream[{extra}]'",
        )


class WorkloadError(SlipstreamError):
    """The user's function or script could not be built or run."""


class ChildError(SlipstreamError):
    """A child process died, hung or was killed."""


class ChildDiedError(ChildError):
    """A child process exited or was killed before it answered."""


class MeasurementError(SlipstreamError):
    """A measurement failed in the given arm, block and phase."""

    def __init__(
        self,
        what: str,
        *,
        arm: str | None = None,
        block: int | None = None,
        phase: str | None = None,
        where: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.arm = arm
        self.block = block
        self.phase = phase
        place = [
            f"{key} {value}"
            for key, value in (("arm", arm), ("block", block), ("phase", phase))
            if value is not None
        ]
        if where:
            place.append(where)
        super().__init__(what, where=", ".join(place) or None, remedy=remedy)


class StoreError(SlipstreamError):
    """One of our databases cannot be opened, read or written."""


class GraphError(SlipstreamError):
    """A graph or trace is malformed, such as a cycle, a dangling task or a foreign file."""


class CommunicationError(SlipstreamError):
    """A rank died, hung, or differs from the others.

    Attributes:
        ranks: their numbers in the process group; empty if they could not be identified.
    """

    def __init__(
        self, what: str, *, ranks: tuple[int, ...] = (), where: str | None = None,
        remedy: str | None = None,
    ) -> None:  # fmt: skip
        self.ranks = ranks
        super().__init__(what, where=where, remedy=remedy)
