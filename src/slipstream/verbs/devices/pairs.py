"""Find kernels of a recorded step that could run side by side on a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.durations.roofline import datasheet_limits
from slipstream.errors import InvalidArgumentError
from slipstream.graph import Graph
from slipstream.tables import Field, Table
from slipstream.techniques.side_by_side.matching import MAX_KERNELS, kernels_of, match
from slipstream.units import format_duration, format_percent
from slipstream.verbs.devices.elsewhere import kind_named


@dataclass(frozen=True)
class Pairs:
    """Pairs of the same two operators.

    Attributes:
        first, second: their names.
        count: number of pairs.
        alone_ns: time of all of them sequentially.
        gain_ns: maximum reduction of that time.
    """

    first: str
    second: str
    count: int
    alone_ns: float
    gain_ns: float


_FIELDS: tuple[Field[Pairs], ...] = (
    Field.of("kernel", lambda row: row.first),
    Field.of("paired with", lambda row: row.second),
    Field.number("pairs", lambda row: str(row.count)),
    Field.number("sequential", lambda row: format_duration(row.alone_ns)),
    Field.number("saves at most", lambda row: format_duration(row.gain_ns)),
)


@dataclass(frozen=True)
class StepPairs:
    """Kernels of a step that are independent and use different parts of a device.

    Attributes:
        device: its kind.
        rows: the largest gain first.
        step_ns: time of all kernels sequentially.
    """

    device: str
    rows: tuple[Pairs, ...]
    step_ns: float

    @classmethod
    def of(cls, graph: Graph, device: str) -> StepPairs:
        """Find the pairs of a recorded step on a kind of device, by its data sheet's limits."""
        kind = kind_named(device)
        limits = datasheet_limits(kind)
        if limits is None or not limits.flops_per_s:
            raise InvalidArgumentError(
                "--device", f"the data sheet of {kind.kind} has no arithmetic rates or bandwidth"
            )
        kernels, needs = kernels_of(graph, limits)
        rows: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for pair in match(kernels, needs):
            a, b = kernels[pair.first], kernels[pair.second]
            names = (a.name, b.name) if a.computes else (b.name, a.name)
            rows.setdefault(names, []).append((a.alone_ns + b.alone_ns, pair.gain_ns))
        grouped = [
            Pairs(*names, len(gains), sum(a for a, _ in gains), sum(g for _, g in gains))
            for names, gains in rows.items()
        ]
        grouped.sort(key=lambda row: -row.gain_ns)
        return cls(kind.kind, tuple(grouped), sum(kernel.alone_ns for kernel in kernels))

    @property
    def gain(self) -> float:
        """Maximum gain of all pairs, as a share of the step's kernel time."""
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
        notes = (
            f"for the {MAX_KERNELS} longest kernels at their data-sheet limits; excludes launches "
            "and registers",
            "slipstream hfuse a.cu:k1 b.cu:k2 -o fused.cu fuses their sources: time both",
        )
        omitted = len(self.rows) - top
        more = f"and {omitted} more kinds of pairs" if omitted > 0 else ""
        return Table.of(self.rows[:top], _FIELDS, str(self), (more, *notes))

    def to_json(self) -> Mapping[str, Any]:
        return {
            "device": self.device, "gain": self.gain, "step_ns": self.step_ns,
            "provenance": "datasheet", "pairs": [asdict(row) for row in self.rows],
        }  # fmt: skip
