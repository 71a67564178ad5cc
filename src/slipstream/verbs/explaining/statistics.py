"""What a profile recorded of a step's values: a table a statistic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import GraphError
from slipstream.graph import GradientNoise, Graph, ModuleZeros, Spectrum, TableIds
from slipstream.tables import Column, Field, Table
from slipstream.units import format_bytes, format_percent

_HOT = 0.01
_MOST, _NEARLY_ALL = 0.9, 0.99


@dataclass(frozen=True)
class _Shown:
    """How a statistic is shown.

    Attributes:
        title: before the number of steps.
        size: what its parts are sorted by, the largest first.
        note: what is to be known of it.
    """

    title: str
    size: Callable[[Any], int]
    fields: Sequence[Field[Any]]
    note: str = ""


def statistics_report(graph: Graph, path: str, top: int) -> tuple[list[Table], dict[str, Any]]:
    """A table for every statistic that was recorded, and all of it as JSON.

    Raises:
        GraphError: none was recorded.
    """
    statistics = graph.statistics
    if not statistics.recorded:
        raise GraphError(
            "no statistics were recorded",
            where=path,
            remedy="slipstream profile WORKLOAD --record ids,spectra,grads,sparsity",
        )
    tables = []
    for name in statistics.recorded:
        shown = _STATISTICS[name]
        parts = sorted(getattr(statistics, name), key=shown.size, reverse=True)
        left = len(parts) - top
        same = statistics.same_batch and name in ("ids", "grads") and parts
        same_note = "every step had the same batch: other data would add to this" if same else ""
        title = f"{shown.title} {statistics.steps} steps"
        if name in statistics.reasons:
            notes = [one for one in (statistics.reasons[name], same_note) if one]
            tables.append(Table([Column("nothing")], [], title, notes))
        else:
            smaller = f"{left} smaller ones are left out" if left > 0 else ""
            notes = [shown.note, smaller, same_note]
            tables.append(Table.of(parts[:top], shown.fields, title, notes))
    return tables, statistics.to_json()


_IDS: tuple[Field[TableIds], ...] = (
    Field.of("table", lambda one: one.table),
    Field.number("rows x dim", lambda one: f"{one.rows} x {one.dimension}"),
    Field.number("size", lambda one: format_bytes(one.nbytes)),
    Field.number("look-ups", lambda one: one.lookups),
    Field.number("distinct", lambda one: one.distinct),
    Field.number("distinct per step", lambda one: f"{one.blocks[0]:.4g}"),
    Field.number("hottest id", lambda one: format_percent(one.share(1))),
    Field.number(
        "hottest 1 %", lambda one: format_percent(one.share(max(round(_HOT * one.rows), 1)))
    ),
    Field.number("ids per bag", lambda one: f"{one.bag_ids / one.bags:.3g}" if one.bags else "-"),
)


def _rank(one: Spectrum, energy: float) -> str:
    rank = one.rank(energy)
    return f"> {len(one.values)}" if rank is None else str(rank)


def _quarter(one: Spectrum) -> str:
    wanted = max(min(one.rows, one.columns) // 4, 1)
    text = format_percent(one.energy(wanted))
    return text if wanted <= len(one.values) else f"> {text}"


_SPECTRA: tuple[Field[Spectrum], ...] = (
    Field.of("parameter", lambda one: one.parameter),
    Field.number("of", lambda one: one.of),
    Field.number("matrix", lambda one: f"{one.rows} x {one.columns}"),
    Field.number("norm", lambda one: f"{one.norm:.3g}"),
    Field.number("largest", lambda one: f"{one.values[0]:.3g}"),
    Field.number("rank for 90 %", lambda one: _rank(one, _MOST)),
    Field.number("rank for 99 %", lambda one: _rank(one, _NEARLY_ALL)),
    Field.number("quarter rank keeps", _quarter),
    Field.number(
        "values", lambda one: "all" if one.exact else f"{len(one.values)} largest, randomised"
    ),
)


def _noise(one: GradientNoise) -> str:
    scale = one.noise_scale
    if scale is None:
        return "-"
    return "infinite" if math.isinf(scale) else f"{scale:.3g}"


_GRADS: tuple[Field[GradientNoise], ...] = (
    Field.of("parameter", lambda one: one.parameter),
    Field.number("elements", lambda one: one.elements),
    Field.number("norm", lambda one: f"{one.norm:.3g}"),
    Field.number("root mean square", lambda one: f"{math.sqrt(one.mean_square):.3g}"),
    Field.number("noise scale (steps)", _noise),
    Field.number("zeros", lambda one: format_percent(one.zeros)),
    Field.number("energy in largest 1 %", lambda one: format_percent(one.top_energy)),
)


def _share(value: float | None) -> str:
    return "-" if value is None else format_percent(value)


_SPARSITY: tuple[Field[ModuleZeros], ...] = (
    Field.of("module", lambda one: one.module),
    Field.number("class", lambda one: one.kind),
    Field.number("numbers out per step", lambda one: one.elements),
    Field.number("input", lambda one: _share(one.inputs)),
    Field.number("output", lambda one: _share(one.outputs)),
    Field.number("output's gradient", lambda one: _share(one.gradients)),
    Field.number("weights", lambda one: _share(one.weights)),
)

_STATISTICS = {
    "ids": _Shown(
        "look-ups of embedding tables, over",
        lambda one: one.nbytes,
        _IDS,
        "hottest: shares of the look-ups that go to one id, and to 1 % of the rows",
    ),
    "spectra": _Shown(
        "singular values, after",
        lambda one: one.rows * one.columns,
        _SPECTRA,
        "rank: singular values that hold so much of the squared norm, of weight or gradient",
    ),
    "grads": _Shown(
        "gradients before the optimizer uses them, over",
        lambda one: one.elements,
        _GRADS,
        "noise scale: variance between steps over the squared mean; times the samples of a step, "
        "the batch that is half noise",
    ),
    "sparsity": _Shown(
        "exact zeros, as shares of all numbers, over", lambda one: one.elements, _SPARSITY
    ),
}
