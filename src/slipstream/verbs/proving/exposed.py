"""The network in a proof: which layers a step stands still for, and the link's use."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.measure.comparison import Comparison
from slipstream.measure.records import AFTERWARDS, PredictionRecord
from slipstream.tables import Column, Field, Table, sparkline
from slipstream.units import format_duration
from slipstream.verbs.sharing import no_longer_exposed

# Rows of a table, and the share of the longest standstill that is worth one.
_MOST, _LEAST = 12, 0.01
# The share of a step by which computing has to differ from what was told, to be named.
_NOTABLE = 0.1


@dataclass(frozen=True)
class Wait:
    """How long a step stands still for a layer's gradients; None where it is not told."""

    layer: str
    predicted_ns: float | None
    measured_ns: float | None

    @property
    def longest_ns(self) -> float:
        """The longer of the two."""
        return max(self.predicted_ns or 0.0, self.measured_ns or 0.0)

    def __str__(self) -> str:
        both = (self.predicted_ns, self.measured_ns)
        return ", ".join("-" if ns is None else format_duration(ns) if ns else "0" for ns in both)


@dataclass(frozen=True)
class LinkUse:
    """What an interface carries while a step passes.

    Attributes:
        line_bytes_per_s: the cable's rate; None where it has none.
        ranks_counted: whose bytes pass it.
        sent_bytes_per_s, received_bytes_per_s: from where a step begins to where the next does.
    """

    line_bytes_per_s: float | None
    ranks_counted: int
    sent_bytes_per_s: Sequence[float]
    received_bytes_per_s: Sequence[float]


@dataclass(frozen=True)
class Exposed:
    """One side that real ranks took: how long its step stands still, layer by layer.

    Attributes:
        how: what its model trains by, where it chooses; else empty.
        layers: in the order of the forward pass; what is none of them comes last.
        predicted_ns, measured_ns: of all layers; None where it is not told.
        step_ns, predicted_step_ns: the whole step.
        steps: how many were watched.
        drawn: the first of them from moment to moment.
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
        """Its wait for `layer`; of one that it does not have no time, where it tells any."""
        known = {one.layer: one for one in self.layers}
        return known.get(layer) or Wait(layer, _none(self.predicted_ns), _none(self.measured_ns))

    def among(self, layers: Sequence[str]) -> Wait:
        """Its wait for all of `layers`."""
        waits = [self.of(layer) for layer in layers]
        predicted = _sum([one.predicted_ns for one in waits])
        return Wait("", predicted, _sum([one.measured_ns for one in waits]))

    @property
    def whole(self) -> Wait:
        """Its wait for all layers there are."""
        return Wait("", self.predicted_ns, self.measured_ns)


def exposed_sides(comparison: Comparison) -> list[Exposed]:
    """What the events of a comparison tell of the sides that real ranks took."""
    experiment = comparison.experiment
    return [
        _exposed(event.detail, experiment.predictions.get(str(event.detail["arm"])))
        for event in experiment.events
        if event.kind == AFTERWARDS and "layers_s" in event.detail
    ]


def _exposed(detail: Mapping[str, Any], prediction: PredictionRecord | None) -> Exposed:
    known = {} if prediction is None else prediction.detail
    predicted, link = known.get("exposed_by_layer"), detail["link"]
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
        known.get("step_ns"),
        detail["steps"],
        LinkUse(
            detail["line_bytes_per_s"] or None, detail["sharing"], link["sent"], link["received"]
        ),
        detail["drawn"],
    )


def exposed_table(sides: Sequence[Exposed]) -> Table:
    """Layers as rows, sides as columns."""
    layers = list(dict.fromkeys(one.layer for side in sides for one in side.layers))
    longest = {layer: max(side.of(layer).longest_ns for side in sides) for layer in layers}
    least = _LEAST * max((side.whole.longest_ns for side in sides), default=0.0)
    most = sorted(layers, key=lambda layer: -longest[layer])[:_MOST]
    shown = [layer for layer in layers if layer in most and longest[layer] > least]
    rest = [layer for layer in layers if layer not in shown]
    cells = [(layer, *(str(side.of(layer)) for side in sides)) for layer in shown]
    if rest:
        name = f"{len(rest)} other{'s' * (len(rest) > 1)}" if shown else "no layer"
        cells.append((name, *(str(side.among(rest)) for side in sides)))
    cells.append(("the step", *(str(side.whole) for side in sides)))
    notes = [
        "how long a step stands still until a layer's gradients are there: while it computes, "
        "nothing is exposed; layers that arrive together share by size; measured in "
        f"{', '.join(str(side.steps) for side in sides)} steps more, beside no other side"
    ]
    notes += [f"{side.technique} trains as {side.how}" for side in sides if side.how]
    notes += filter(None, map(_slower_computing, sides))
    if any(side.measured_ns is None for side in sides):
        notes.append("where a side has no measured time, its technique does not tell what it waits")
    first, *others = sides
    for which in ("predicted", "measured"):
        before = _times(first, which)
        notes += [
            f"{which}: {gone}"
            for side in others
            if (after := _times(side, which)) is not None
            and (gone := no_longer_exposed(first.technique, before or {}, side.technique, after))
        ]
    columns = [Column(f"{side.technique}: predicted, measured", "right") for side in sides]
    return Table([Column("waits for"), *columns], cells, "exposed communication", notes)


def _slower_computing(side: Exposed) -> str:
    """Whether ranks compute so much longer than was told that the step shows it; empty if not."""
    if side.predicted_step_ns is None or side.predicted_ns is None or side.measured_ns is None:
        return ""
    told = side.predicted_step_ns - side.predicted_ns
    spent = side.step_ns - side.measured_ns
    if spent - told < _NOTABLE * side.step_ns:
        return ""
    return (
        f"{side.technique} computes for {format_duration(spent)} a step, told were "
        f"{format_duration(told)}, of a worker on a machine of its own: the ranks share the cores "
        "of this one"
    )


_LINK_FIELDS: tuple[Field[tuple[Exposed, str, Sequence[float]]], ...] = (
    Field.of("link", lambda row: row[0].technique),
    Field.of("direction", lambda row: row[1]),
    Field.number("mean", lambda row: f"{8 * statistics.fmean(row[2]) / 1e6:.3g} Mbit/s"),
    Field.number("of the cable", lambda row: _share(row[0], row[2])),
    Field.of("over a step", lambda row: sparkline(row[2], row[0].link.line_bytes_per_s)),
)


def link_table(sides: Sequence[Exposed]) -> Table:
    """What the interface of rank 0 carries while a step passes, each way."""
    rows, alone = [], True
    for side in sides:
        link = side.link
        if link.ranks_counted > 1:
            # Whatever leaves a loopback interface also comes in.
            rows.append((side, "by all ranks", link.sent_bytes_per_s))
            alone = False
        else:
            rows += [
                (side, "sent", link.sent_bytes_per_s),
                (side, "received", link.received_bytes_per_s),
            ]
    notes = [
        "bytes at the interface with their headers, from where a step begins to where the next one "
        "does, a mean of the steps that were watched; a full block is "
        + ("the cable's rate" if sides[0].link.line_bytes_per_s else "the side's most"),
        "" if alone else "a loopback interface: what others send through it is among it",
    ]
    return Table.of(rows, _LINK_FIELDS, "use of the link", notes)


def _share(side: Exposed, rates: Sequence[float]) -> str:
    line = side.link.line_bytes_per_s
    return f"{100 * statistics.fmean(rates) / line:.0f} %" if line else "-"


def _times(side: Exposed, which: str) -> dict[str, float] | None:
    """Nanoseconds by layer, predicted or measured; None where it is not told."""
    if which == "predicted":
        told, waits = side.predicted_ns, {one.layer: one.predicted_ns for one in side.layers}
    else:
        told, waits = side.measured_ns, {one.layer: one.measured_ns for one in side.layers}
    return None if told is None else {layer: spent or 0.0 for layer, spent in waits.items()}


def _none(told: float | None) -> float | None:
    """No time, where any is told."""
    return None if told is None else 0.0


def _sum(values: Sequence[float | None]) -> float | None:
    told = [value for value in values if value is not None]
    return sum(told) if len(told) == len(values) else None
