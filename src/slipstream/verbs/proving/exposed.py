"""Report the network in a proof: which layers a step waits for, and the use of the link."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.measure.comparison import Comparison
from slipstream.measure.records import AFTERWARDS, PredictionRecord, arm_label
from slipstream.tables import Column, Field, Table, sparkline
from slipstream.units import format_duration
from slipstream.verbs.sharing import no_longer_exposed

# Maximum rows of a table, and the minimum wait for a row, as a share of the longest.
_MAX_ROWS, _MIN_SHARE = 12, 0.01
# Minimum difference of computing time from the prediction to report, as a share of a step.
_MIN_DIFFERENCE = 0.1


@dataclass(frozen=True)
class Wait:
    """Time that a step waits for a layer's gradients; None if unknown."""

    layer: str
    predicted_ns: float | None
    measured_ns: float | None

    @property
    def longest_ns(self) -> float:
        return max(self.predicted_ns or 0.0, self.measured_ns or 0.0)

    def __str__(self) -> str:
        both = (self.predicted_ns, self.measured_ns)
        return ", ".join("-" if ns is None else format_duration(ns) if ns else "0" for ns in both)


@dataclass(frozen=True)
class LinkUse:
    """Traffic of an interface during a step.

    Attributes:
        line_bytes_per_s: the link's rate; None for a loopback interface.
        ranks_counted: number of ranks whose bytes the interface counts.
        sent_bytes_per_s, received_bytes_per_s: from the start of a step to the start of the next.
    """

    line_bytes_per_s: float | None
    ranks_counted: int
    sent_bytes_per_s: Sequence[float]
    received_bytes_per_s: Sequence[float]


@dataclass(frozen=True)
class Exposed:
    """Exposed communication of one side with real ranks, by layer.

    Attributes:
        how: the plan that its model chose to train by; empty if it has no choice.
        layers: in the order of the forward pass, then waits for other parts.
        predicted_ns, measured_ns: of all layers; None if unknown.
        step_ns, predicted_step_ns: of the whole step.
        steps: number of watched steps.
        drawn: time lines of the first steps.
    """

    technique: str
    how: str
    layers: tuple[Wait, ...]
    predicted_ns: float | None
    measured_ns: float | None
    step_ns: float
    predicted_step_ns: float | None
    steps: int
    link: LinkUse
    drawn: Mapping[str, Any]

    def of(self, layer: str) -> Wait:
        """Return its wait for `layer`; zero for a layer that the side does not have."""
        waits = {wait.layer: wait for wait in self.layers}
        zeros = _zero_if_known(self.predicted_ns), _zero_if_known(self.measured_ns)
        return waits.get(layer) or Wait(layer, *zeros)

    def among(self, layers: Sequence[str]) -> Wait:
        waits = [self.of(layer) for layer in layers]
        predicted = _sum([wait.predicted_ns for wait in waits])
        return Wait("", predicted, _sum([wait.measured_ns for wait in waits]))

    @property
    def total(self) -> Wait:
        return Wait("", self.predicted_ns, self.measured_ns)


def exposed_sides(comparison: Comparison) -> list[Exposed]:
    """Return the exposed communication of sides with real ranks, from a comparison's events."""
    experiment = comparison.experiment
    return [
        _exposed(event.detail, experiment.predictions.get(str(event.detail["arm"])))
        for event in experiment.events
        if event.kind == AFTERWARDS and "layers_s" in event.detail
    ]


def _exposed(detail: Mapping[str, Any], prediction: PredictionRecord | None) -> Exposed:
    predicted_detail = {} if prediction is None else prediction.detail
    predicted, link = predicted_detail.get("exposed_by_layer"), detail["link"]
    measured = detail["layers_s"]
    if measured is not None:
        measured = {layer: 1e9 * spent for layer, spent in measured.items()}
    order = dict.fromkeys([*detail["order"], *(predicted or {}), *(measured or {})])
    return Exposed(
        str(detail["arm"]),
        detail["how"],
        tuple(
            Wait(
                layer,
                None if predicted is None else predicted.get(layer, 0.0),
                None if measured is None else measured.get(layer, 0.0),
            )
            for layer in order
        ),
        None if predicted is None else sum(predicted.values()),
        None if measured is None else sum(measured.values()),
        1e9 * detail["step_s"],
        predicted_detail.get("step_ns"),
        detail["steps"],
        LinkUse(
            detail["line_bytes_per_s"] or None, detail["sharing"], link["sent"], link["received"]
        ),
        detail["drawn"],
    )


def exposed_table(sides: Sequence[Exposed]) -> Table:
    layers = list(dict.fromkeys(wait.layer for side in sides for wait in side.layers))
    longest = {layer: max(side.of(layer).longest_ns for side in sides) for layer in layers}
    min_ns = _MIN_SHARE * max((side.total.longest_ns for side in sides), default=0.0)
    longest_layers = sorted(layers, key=lambda layer: -longest[layer])[:_MAX_ROWS]
    shown = [layer for layer in layers if layer in longest_layers and longest[layer] > min_ns]
    others = [layer for layer in layers if layer not in shown]
    cells = [(layer, *(str(side.of(layer)) for side in sides)) for layer in shown]
    if others:
        name = f"{len(others)} other{'s' * (len(others) > 1)}" if shown else "no layer"
        cells.append((name, *(str(side.among(others)) for side in sides)))
    cells.append(("the step", *(str(side.total) for side in sides)))
    notes = [
        "how long a step waits for a layer's gradients: nothing is exposed while it computes; "
        "layers that arrive together share the time by size; measured in "
        f"{', '.join(str(side.steps) for side in sides)} additional steps, without other sides"
    ]
    notes += [f"{arm_label(side.technique)} trains as {side.how}" for side in sides if side.how]
    notes += filter(None, map(_slower_computing, sides))
    if any(side.measured_ns is None for side in sides):
        notes.append("sides without a measured time have techniques that do not report waits")
    first, *other_sides = sides
    for which in ("predicted", "measured"):
        before = _times(first, which)
        notes += [
            f"{which}: {gone}"
            for side in other_sides
            if (after := _times(side, which)) is not None
            and (
                gone := no_longer_exposed(
                    arm_label(first.technique), before or {}, arm_label(side.technique), after
                )
            )
        ]
    columns = [
        Column(f"{arm_label(side.technique)}: predicted, measured", "right") for side in sides
    ]
    return Table([Column("waits for"), *columns], cells, "exposed communication", notes)


def _slower_computing(side: Exposed) -> str:
    """Describe a side whose ranks compute notably longer than predicted; empty otherwise."""
    if side.predicted_step_ns is None or side.predicted_ns is None or side.measured_ns is None:
        return ""
    predicted_ns = side.predicted_step_ns - side.predicted_ns
    computing_ns = side.step_ns - side.measured_ns
    if computing_ns - predicted_ns < _MIN_DIFFERENCE * side.step_ns:
        return ""
    return (
        f"{arm_label(side.technique)} computes for {format_duration(computing_ns)} per step, "
        f"predicted {format_duration(predicted_ns)} for a worker on its own machine: "
        "these ranks share the cores of one"
    )


_LINK_FIELDS: tuple[Field[tuple[Exposed, str, Sequence[float]]], ...] = (
    Field.of("link", lambda row: arm_label(row[0].technique)),
    Field.of("direction", lambda row: row[1]),
    Field.number("mean", lambda row: f"{8 * statistics.fmean(row[2]) / 1e6:.3g} Mbit/s"),
    Field.number("of capacity", lambda row: _share(row[0], row[2])),
    Field.of("over a step", lambda row: sparkline(row[2], row[0].link.line_bytes_per_s)),
)


def link_table(sides: Sequence[Exposed]) -> Table:
    """Return a table of rank 0's interface traffic during a step, by direction."""
    rows, alone = [], True
    for side in sides:
        link = side.link
        if link.ranks_counted > 1:
            # A loopback interface receives whatever it sends.
            rows.append((side, "by all ranks", link.sent_bytes_per_s))
            alone = False
        else:
            rows += [
                (side, "sent", link.sent_bytes_per_s),
                (side, "received", link.received_bytes_per_s),
            ]
    notes = [
        "bytes at the interface including headers, from the start of a step to the start of the "
        "next, averaged over the watched steps; a full block is "
        + ("the link's rate" if sides[0].link.line_bytes_per_s else "the side's maximum"),
        "" if alone else "a loopback interface: traffic of other processes is included",
    ]
    return Table.of(rows, _LINK_FIELDS, "use of the link", notes)


def _share(side: Exposed, rates: Sequence[float]) -> str:
    line = side.link.line_bytes_per_s
    return f"{100 * statistics.fmean(rates) / line:.0f} %" if line else "-"


def _times(side: Exposed, which: str) -> dict[str, float] | None:
    if which == "predicted":
        total, waits = side.predicted_ns, {wait.layer: wait.predicted_ns for wait in side.layers}
    else:
        total, waits = side.measured_ns, {wait.layer: wait.measured_ns for wait in side.layers}
    return None if total is None else {layer: spent or 0.0 for layer, spent in waits.items()}


def _zero_if_known(total: float | None) -> float | None:
    return None if total is None else 0.0


def _sum(values: Sequence[float | None]) -> float | None:
    known_values = [value for value in values if value is not None]
    return sum(known_values) if len(known_values) == len(values) else None
