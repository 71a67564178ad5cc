"""What ``slipstream explain --statistics`` shows: what a profile recorded of a step's values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from slipstream.errors import GraphError

if TYPE_CHECKING:
    from slipstream.graph import GradientNoise, Graph, ModuleZeros, Spectrum, TableIds
    from slipstream.tables import Table

_HOT = 0.01
_MOST, _NEARLY_ALL = 0.9, 0.99
_TITLES = {
    "ids": "look-ups of embedding tables, over",
    "spectra": "singular values, after",
    "grads": "gradients before the optimizer uses them, over",
    "sparsity": "exact zeros, as shares of all numbers, over",
}


def statistics_report(graph: Graph, path: str, top: int) -> tuple[list[Table], dict[str, Any]]:
    """A table for every statistic that was recorded, and all of it as JSON.

    Raises:
        GraphError: none was recorded.
    """
    from slipstream.tables import Column, Table

    found = graph.statistics
    if not found.recorded:
        raise GraphError(
            "no statistics were recorded",
            where=path,
            remedy="slipstream profile WORKLOAD --record ids,spectra,grads,sparsity",
        )
    tables = []
    for name in found.recorded:
        make, size = _TABLES[name]
        parts: Sequence[Any] = getattr(found, name)
        columns, rows, notes = make(sorted(parts, key=size, reverse=True)[:top])
        title = f"{_TITLES[name]} {found.steps} steps"
        if name in found.reasons:
            columns, rows, notes = ["nothing"], [], [found.reasons[name]]
        elif len(parts) > top:
            notes = [*notes, f"{len(parts) - top} smaller ones are left out"]
        if found.same_batch and name in ("ids", "grads") and parts:
            notes = [*notes, "every step had the same batch: other data would add to this"]
        aligned = [Column(columns[0]), *(Column(one, "right") for one in columns[1:])]
        tables.append(Table(aligned, rows, title=title, notes=notes))
    return tables, found.to_json()


_Parts = tuple[list[str], list[tuple[object, ...]], list[str]]


def _ids(tables: Sequence[TableIds]) -> _Parts:
    from slipstream.units import format_bytes, format_percent

    rows: list[tuple[object, ...]] = [
        (
            one.table,
            f"{one.rows} x {one.dimension}",
            format_bytes(one.nbytes),
            one.lookups,
            one.distinct,
            f"{one.blocks[0]:.4g}",
            format_percent(one.share(1)),
            format_percent(one.share(max(round(_HOT * one.rows), 1))),
            f"{one.bag_ids / one.bags:.3g}" if one.bags else "-",
        )
        for one in tables
    ]
    columns = ["table", "rows x dim", "size", "look-ups", "distinct", "distinct per step"]
    notes = ["hottest: shares of the look-ups that go to one id, and to 1 % of the rows"]
    return [*columns, "hottest id", "hottest 1 %", "ids per bag"], rows, notes


def _spectra(spectra: Sequence[Spectrum]) -> _Parts:
    from slipstream.units import format_percent

    def rank(one: Spectrum, energy: float) -> str:
        found = one.rank(energy)
        return f"> {len(one.values)}" if found is None else str(found)

    def quarter(one: Spectrum) -> str:
        wanted = max(min(one.rows, one.columns) // 4, 1)
        text = format_percent(one.energy(wanted))
        return text if wanted <= len(one.values) else f"> {text}"

    rows: list[tuple[object, ...]] = [
        (
            one.parameter,
            one.of,
            f"{one.rows} x {one.columns}",
            f"{one.norm:.3g}",
            f"{one.values[0]:.3g}",
            rank(one, _MOST),
            rank(one, _NEARLY_ALL),
            quarter(one),
            "all" if one.exact else f"{len(one.values)} largest, randomised",
        )
        for one in spectra
    ]
    columns = ["parameter", "of", "matrix", "norm", "largest", "rank for 90 %", "rank for 99 %"]
    notes = ["rank: singular values that hold so much of the squared norm, of weight or gradient"]
    return [*columns, "quarter rank keeps", "values"], rows, notes


def _grads(gradients: Sequence[GradientNoise]) -> _Parts:
    from slipstream.units import format_percent

    def noise(one: GradientNoise) -> str:
        scale = one.noise_scale
        if scale is None:
            return "-"
        return "infinite" if math.isinf(scale) else f"{scale:.3g}"

    rows: list[tuple[object, ...]] = [
        (
            one.parameter,
            one.elements,
            f"{one.norm:.3g}",
            f"{math.sqrt(one.mean_square):.3g}",
            noise(one),
            format_percent(one.zeros),
            format_percent(one.top_energy),
        )
        for one in gradients
    ]
    columns = ["parameter", "elements", "norm", "root mean square", "noise scale (steps)", "zeros"]
    notes = [
        "noise scale: variance between steps over the squared mean; times the samples of a step, "
        "the batch that is half noise"
    ]
    return [*columns, "energy in largest 1 %"], rows, notes


def _sparsity(modules: Sequence[ModuleZeros]) -> _Parts:
    from slipstream.units import format_percent

    def share(value: float | None) -> str:
        return "-" if value is None else format_percent(value)

    rows: list[tuple[object, ...]] = [
        (
            one.module,
            one.kind,
            one.elements,
            share(one.inputs),
            share(one.outputs),
            share(one.gradients),
            share(one.weights),
        )
        for one in modules
    ]
    columns = ["module", "class", "numbers out per step", "input", "output", "output's gradient"]
    return [*columns, "weights"], rows, []


_TABLES: dict[str, tuple[Callable[[Sequence[Any]], _Parts], Callable[[Any], int]]] = {
    "ids": (_ids, lambda one: one.nbytes),
    "spectra": (_spectra, lambda one: one.rows * one.columns),
    "grads": (_grads, lambda one: one.elements),
    "sparsity": (_sparsity, lambda one: one.elements),
}
