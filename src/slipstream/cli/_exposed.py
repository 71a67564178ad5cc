"""What `prove` says of the network: which layers a step stands still for, and the link's use."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slipstream.tables import Column, Table, sparkline

if TYPE_CHECKING:
    from slipstream.measure.comparison import Comparison

# Rows of a table, and the share of the longest standstill that is worth one.
_MOST, _LEAST = 12, 0.01
# The share of a step by which computing has to differ from what was told, to be named.
_NOTABLE = 0.1


def exposed_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """One row a side that real ranks took: how long its step stands still, layer by layer.

    Layers are in the order of the forward pass; what is none of them comes last.
    """
    from slipstream.measure.records import AFTERWARDS

    experiment = comparison.experiment
    rows: list[dict[str, Any]] = []
    for event in experiment.events:
        if event.kind != AFTERWARDS or "layers_s" not in event.detail:
            continue
        found, name = event.detail, str(event.detail["arm"])
        prediction = experiment.predictions.get(name)
        known = {} if prediction is None else prediction.detail
        predicted = known.get("exposed_by_layer")
        measured = found["layers_s"]
        order = dict.fromkeys([*found["order"], *(predicted or {}), *(measured or {})])
        layers = [
            {
                "layer": layer,
                "predicted_ns": None if predicted is None else predicted.get(layer, 0.0),
                "measured_ns": None if measured is None else 1e9 * measured.get(layer, 0.0),
            }
            for layer in order
        ]
        rows.append(
            {
                "technique": name,
                "how": found["how"],
                "layers": layers,
                "predicted_ns": None if predicted is None else sum(predicted.values()),
                "measured_ns": None if measured is None else 1e9 * sum(measured.values()),
                "step_ns": 1e9 * found["step_s"],
                "predicted_step_ns": known.get("step_ns"),
                "steps": found["steps"],
                "link": {
                    "line_bytes_per_s": found["line_bytes_per_s"] or None,
                    "ranks_counted": found["sharing"],
                    "sent_bytes_per_s": found["link"]["sent"],
                    "received_bytes_per_s": found["link"]["received"],
                },
                "drawn": found["drawn"],
            }
        )
    return rows


def exposed_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Layers as rows, sides as columns."""
    from slipstream.verbs.sharing import no_longer_exposed

    of = [_by_layer(row) for row in rows]
    layers = list(dict.fromkeys(one["layer"] for row in rows for one in row["layers"]))
    longest = {layer: max(_longest(one[layer]) for one in of) for layer in layers}
    least = _LEAST * max((_longest(row) for row in rows), default=0.0)
    most = sorted(layers, key=lambda layer: -longest[layer])[:_MOST]
    shown = [layer for layer in layers if layer in most and longest[layer] > least]
    rest = [layer for layer in layers if layer not in shown]
    cells = [(layer, *(_beside(one[layer]) for one in of)) for layer in shown]
    if rest:
        name = f"{len(rest)} other{'s' * (len(rest) > 1)}" if shown else "no layer"
        cells.append((name, *(_beside(_sum(one, rest)) for one in of)))
    cells.append(("the step", *(_beside(row) for row in rows)))
    notes = [
        "how long a step stands still until a layer's gradients are there: while it computes, "
        "nothing is exposed; layers that arrive together share by size; measured in "
        f"{', '.join(str(row['steps']) for row in rows)} steps more, beside no other side"
    ]
    notes += [f"{row['technique']} trains as {row['how']}" for row in rows if row["how"]]
    notes += filter(None, map(_slower_computing, rows))
    if any(row["measured_ns"] is None for row in rows):
        notes.append("where a side has no measured time, its technique does not tell what it waits")
    if len(rows) > 1:
        first, *others = rows
        for which in ("predicted", "measured"):
            before = _times(first, which)
            notes += [
                f"{which}: {gone}" for row in others
                if row[f"{which}_ns"] is not None and (gone := no_longer_exposed(
                    first["technique"], before, row["technique"], _times(row, which)
                ))
            ]  # fmt: skip
    columns = [Column(f"{row['technique']}: predicted, measured", "right") for row in rows]
    return Table([Column("waits for"), *columns], cells, "exposed communication", notes)


def _slower_computing(row: Mapping[str, Any]) -> str:
    """Whether ranks compute so much longer than was told that the step shows it; empty if not."""
    from slipstream.units import format_duration

    known = [row[name] for name in ("predicted_step_ns", "predicted_ns", "measured_ns")]
    if None in known:
        return ""
    told, found = known[0] - known[1], row["step_ns"] - known[2]
    if found - told < _NOTABLE * row["step_ns"]:
        return ""
    return (
        f"{row['technique']} computes for {format_duration(found)} a step, told were "
        f"{format_duration(told)}, of a worker on a machine of its own: the ranks share the cores "
        "of this one"
    )


def link_table(rows: Sequence[dict[str, Any]]) -> Table:
    """What the interface of rank 0 carries while a step passes, each way."""
    cells, alone = [], True
    for row in rows:
        link = row["link"]
        line = link["line_bytes_per_s"]
        ways = [("sent", link["sent_bytes_per_s"]), ("received", link["received_bytes_per_s"])]
        if link["ranks_counted"] > 1:
            # Whatever leaves a loopback interface also comes in.
            ways, alone = [("by all ranks", ways[0][1])], False
        for way, rates in ways:
            mean = statistics.fmean(rates)
            cells.append(
                (
                    row["technique"], way, f"{8 * mean / 1e6:.3g} Mbit/s",
                    f"{100 * mean / line:.0f} %" if line else "-", sparkline(rates, line),
                )
            )  # fmt: skip
    notes = [
        "bytes at the interface with their headers, from where a step begins to where the next one "
        "does, a mean of the steps that were watched; a full block is "
        + ("the cable's rate" if rows[0]["link"]["line_bytes_per_s"] else "the side's most")
    ]
    if not alone:
        notes.append("a loopback interface: what others send through it is among it")
    columns = [
        Column("link"), Column("direction"), Column("mean", "right"),
        Column("of the cable", "right"), Column("over a step"),
    ]  # fmt: skip
    return Table(columns, cells, "use of the link", notes)


def _times(row: Mapping[str, Any], which: str) -> dict[str, float]:
    return {one["layer"]: one[f"{which}_ns"] or 0.0 for one in row["layers"]}


def _by_layer(row: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Of each layer what `row` says; of one that it does not have no time, where it tells any."""
    none = {name: None if row[name] is None else 0.0 for name in ("predicted_ns", "measured_ns")}
    return defaultdict(lambda: none, {one["layer"]: one for one in row["layers"]})


def _longest(one: Mapping[str, Any]) -> float:
    return max(one["predicted_ns"] or 0.0, one["measured_ns"] or 0.0)


def _sum(one: Mapping[str, Mapping[str, Any]], layers: Sequence[str]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for which in ("predicted_ns", "measured_ns"):
        values = [one[layer][which] for layer in layers]
        found[which] = None if None in values else sum(values)
    return found


def _beside(one: Mapping[str, Any]) -> str:
    from slipstream.units import format_duration

    both = (one["predicted_ns"], one["measured_ns"])
    return ", ".join("-" if ns is None else format_duration(ns) if ns else "0" for ns in both)
