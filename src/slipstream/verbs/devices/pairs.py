"""Which kernels of a recorded step could run side by side on a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.durations.roofline import datasheet_limits
from slipstream.errors import InvalidArgumentError
from slipstream.graph import Graph
from slipstream.tables import Field, Table
from slipstream.techniques.side_by_side.matching import MOST_KERNELS, kernels_of, match
from slipstream.units import format_duration, format_percent
from slipstream.verbs.devices.elsewhere import kind_named


@dataclass(frozen=True)
class Pairs:
    """Pairs of the same two operators.

    Attributes:
        first, second: their names.
        count: how many pairs.
        alone_ns: of all of them one after the other.
        gain_ns: less than that, at most.
    """

    first: str
    second: str
    count: int
    alone_ns: float
    gain_ns: float


_FIELDS: tuple[Field[Pairs], ...] = (
    Field.of("kernel", lambda row: row.first),
    Field.of("beside", lambda row: row.second),
    Field.number("pairs", lambda row: str(row.count)),
    Field.number("one after the other", lambda row: format_duration(row.alone_ns)),
    Field.number("at most less", lambda row: format_duration(row.gain_ns)),
)


@dataclass(frozen=True)
class StepPairs:
    """Kernels of a step that do not wait for each other and use different parts of a device.

    Attributes:
        device: its kind.
        rows: what gains most first.
        step_ns: of all kernels, one after the other.
    """

    device: str
    rows: tuple[Pairs, ...]
    step_ns: float

    @classmethod
    def of(cls, graph: Graph, device: str) -> StepPairs:
        """The pairs of a recorded step on a kind of device, at its data sheet's limits.

        Raises:
            UnknownNameError: no such kind of device.
            InvalidArgumentError: the data sheet tells no bandwidth.
        """
        kind = kind_named(device)
        limits = datasheet_limits(kind)
        if limits is None or not limits.flops_per_s:
            raise InvalidArgumentError(
                "--device", f"the data sheet of {kind.kind} here has no rates to go by"
            )
        kernels, needs = kernels_of(graph, limits)
        rows: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for one in match(kernels, needs):
            a, b = kernels[one.first], kernels[one.second]
            names = (a.name, b.name) if a.computes else (b.name, a.name)
            rows.setdefault(names, []).append((a.alone_ns + b.alone_ns, one.gain_ns))
        grouped = [
            Pairs(*names, len(each), sum(a for a, _ in each), sum(g for _, g in each))
            for names, each in rows.items()
        ]
        grouped.sort(key=lambda row: -row.gain_ns)
        return cls(kind.kind, tuple(grouped), sum(one.alone_ns for one in kernels))

    @property
    def gain(self) -> float:
        """Of all pairs, as a share of the step's kernels, at most."""
        return sum(row.gain_ns for row in self.rows) / self.step_ns if self.step_ns else 0.0

    def __str__(self) -> str:
        if not self.rows:
            return (
                f"no two kernels of this step would gain by running side by side on {self.device}"
            )
        count = sum(row.count for row in self.rows)
        return (
            f"{count} pairs of kernels could run side by side on {self.device}: at most "
            f"{format_percent(self.gain)} of the step's kernels"
        )

    def table(self, top: int = 20) -> Table:
        """What gains most first."""
        notes = (
            f"by the limits of its data sheet, of the {MOST_KERNELS} longest kernels, were they at "
            "them; launches and registers are not in it",
            "slipstream hfuse a.cu:k1 b.cu:k2 -o fused.cu fuses their sources: time both",
        )
        left = len(self.rows) - top
        more = f"and {left} more kinds of pairs" if left > 0 else ""
        return Table.of(self.rows[:top], _FIELDS, str(self), (more, *notes))

    def to_json(self) -> Mapping[str, Any]:
        """As a payload carries it."""
        return {
            "device": self.device, "gain": self.gain, "step_ns": self.step_ns,
            "provenance": "datasheet", "pairs": [asdict(row) for row in self.rows],
        }  # fmt: skip
