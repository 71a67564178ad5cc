"""Goals: what a person wants of a step, ``memory<8GiB``, ``latency<10ms`` or ``cost``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.units import format_bytes, format_duration, parse_bytes, parse_duration_ns
from slipstream.verbs.results import Predicted

_LIMITED = ("memory", "latency")
_NAMES = (*_LIMITED, "cost")
_FORM = re.compile(r"\s*([A-Za-z_]+)\s*(?:(<=?)\s*(.+?))?\s*")


@dataclass(frozen=True)
class Goal:
    """One wish.

    Attributes:
        name: ``memory`` (peak bytes of a step), ``latency`` (time of a step) or ``cost`` (of a
            sample: time per sample, where no price is known).
        limit: bytes or nanoseconds that may not be exceeded; None for ``cost``, which is only
            to be small.
    """

    name: str
    limit: float | None = None

    def __str__(self) -> str:
        if self.limit is None:
            return self.name
        shown = format_bytes if self.name == "memory" else format_duration
        return f"{self.name} < {shown(self.limit)}"

    def met(self, step_ns: float, peak_bytes: float) -> bool:
        """Whether a step of this time and peak memory (0: not recorded) keeps the limit."""
        if self.limit is None:
            return True
        if self.name == "memory":
            return 0 < peak_bytes < self.limit
        return step_ns < self.limit

    def met_by(self, prediction: Predicted) -> bool:
        """Whether the step is predicted to keep the limit."""
        return self.met(prediction.step_ns, prediction.memory[1])


def parse_goal(text: str) -> Goal:
    """The goal that ``text`` writes.

    Raises:
        UnknownNameError: a goal there is not; InvalidArgumentError: no limit, or no quantity.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise InvalidArgumentError(
            "--goal", f"'{text}' is not a goal", remedy="as 'memory<8GiB', 'latency<10ms', cost"
        )
    name, sign, quantity = match[1].lower(), match[2], match[3]
    if name not in _NAMES:
        raise UnknownNameError("goal", name, _NAMES, where="--goal")
    if (sign is None) is (name in _LIMITED):
        example = "memory<8GiB" if name == "memory" else "latency<10ms"
        what = "needs a limit" if name in _LIMITED else "takes no limit"
        remedy = f"quoted, for the shell: --goal '{example}'" if sign is None else "--goal cost"
        raise InvalidArgumentError("--goal", f"'{name}' {what}", remedy=remedy)
    if sign is None:
        return Goal(name)
    parse = parse_bytes if name == "memory" else parse_duration_ns
    limit = float(parse(quantity, "--goal"))
    if not limit:
        raise InvalidArgumentError("--goal", f"nothing is less than '{quantity}'")
    return Goal(name, limit)
