"""Show the value statistics that a profile recorded, a table each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import GraphError
from slipstream.graph import GradientNoise, Graph, ModuleZeros, Spectrum, TableIds
from slipstream.tables import Column, Field, Table
from slipstream.units import format_bytes, format_percent

_HOT_SHARE = 0.01
_ENERGY_90, _ENERGY_99 = 0.9, 0.99


@dataclass(frozen=True)
class _Shown:
    """Presentation of a statistic.

    Attributes:
        title: text before the number of steps.
        size: sort key of its parts, the largest first.
        note: explanation below the table.
    """

    title: str
    size: Callable[[Any], int]
    fields: Sequence[Field[Any]]
    note: str = ""


def statistics_report(graph: Graph, path: str, top: int) -> tuple[list[Table], dict[str, Any]]:
    """Return a table for every recorded statistic, and all of them as JSON."""
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
        omitted = len(parts) - top
        same = statistics.same_batch and name in ("ids", "grads") and parts
        same_note = "every step used the same batch: other data would add to this" if same else ""
        title = f"{shown.title} {statistics.steps} steps"
        if name in statistics.reasons:
            notes = [note for note in (statistics.reasons[name], same_note) if note]
            tables.append(Table([Column("nothing")], [], title, notes))
        else:
            smaller = f"{omitted} smaller ones omitted" if omitted > 0 else ""
            notes = [shown.note, smaller, same_note]
            tables.append(Table.of(parts[:top], shown.fields, title, notes))
    return tables, statistics.to_json()


_IDS: tuple[Field[TableIds], ...] = (
    Field.of("table", lambda ids: ids.table),
    Field.number("rows x dim", lambda ids: f"{ids.rows} x {ids.dimension}"),
    Field.number("size", lambda ids: format_bytes(ids.nbytes)),
    Field.number("look-ups", lambda ids: ids.lookups),
    Field.number("distinct", lambda ids: ids.distinct),
    Field.number("distinct per step", lambda ids: f"{ids.blocks[0]:.4g}"),
    Field.number("hottest id", lambda ids: format_percent(ids.share(1))),
    Field.number(
        "hottest 1 %", lambda ids: format_percent(ids.share(max(round(_HOT_SHARE * ids.rows), 1)))
    ),
    Field.number("ids per bag", lambda ids: f"{ids.bag_ids / ids.bags:.3g}" if ids.bags else "-"),
)


def _rank(spectrum: Spectrum, energy: float) -> str:
    rank = spectrum.rank(energy)
    return f"> {len(spectrum.values)}" if rank is None else str(rank)


def _quarter(spectrum: Spectrum) -> str:
    quarter = max(min(spectrum.rows, spectrum.columns) // 4, 1)
    text = format_percent(spectrum.energy(quarter))
    return text if quarter <= len(spectrum.values) else f"> {text}"


_SPECTRA: tuple[Field[Spectrum], ...] = (
    Field.of("parameter", lambda spectrum: spectrum.parameter),
    Field.number("of", lambda spectrum: spectrum.of),
    Field.number("matrix", lambda spectrum: f"{spectrum.rows} x {spectrum.columns}"),
    Field.number("norm", lambda spectrum: f"{spectrum.norm:.3g}"),
    Field.number("largest", lambda spectrum: f"{spectrum.values[0]:.3g}"),
    Field.number("rank for 90 %", lambda spectrum: _rank(spectrum, _ENERGY_90)),
    Field.number("rank for 99 %", lambda spectrum: _rank(spectrum, _ENERGY_99)),
    Field.number("quarter rank keeps", _quarter),
    Field.number("values", lambda s: "all" if s.exact else f"{len(s.values)} largest, randomised"),
)


def _noise(noise: GradientNoise) -> str:
    scale = noise.noise_scale
    if scale is None:
        return "-"
    return "infinite" if math.isinf(scale) else f"{scale:.3g}"


_GRADS: tuple[Field[GradientNoise], ...] = (
    Field.of("parameter", lambda noise: noise.parameter),
    Field.number("elements", lambda noise: noise.elements),
    Field.number("norm", lambda noise: f"{noise.norm:.3g}"),
    Field.number("root mean square", lambda noise: f"{math.sqrt(noise.mean_square):.3g}"),
    Field.number("noise scale (steps)", _noise),
    Field.number("zeros", lambda noise: format_percent(noise.zeros)),
    Field.number("energy in largest 1 %", lambda noise: format_percent(noise.top_energy)),
)


def _share(value: float | None) -> str:
    return "-" if value is None else format_percent(value)


_SPARSITY: tuple[Field[ModuleZeros], ...] = (
    Field.of("module", lambda zeros: zeros.module),
    Field.number("class", lambda zeros: zeros.kind),
    Field.number("numbers out per step", lambda zeros: zeros.elements),
    Field.number("input", lambda zeros: _share(zeros.inputs)),
    Field.number("output", lambda zeros: _share(zeros.outputs)),
    Field.number("output's gradient", lambda zeros: _share(zeros.gradients)),
    Field.number("weights", lambda zeros: _share(zeros.weights)),
)

_STATISTICS = {
    "ids": _Shown(
        "look-ups of embedding tables, over",
        lambda ids: ids.nbytes,
        _IDS,
        "hottest: shares of the look-ups that go to one id, and to 1 % of the rows",
    ),
    "spectra": _Shown(
        "singular values, after",
        lambda spectrum: spectrum.rows * spectrum.columns,
        _SPECTRA,
        "rank: singular values that make up this share of the squared norm, of weight or gradient",
    ),
    "grads": _Shown(
        "gradients before the optimizer uses them, over",
        lambda noise: noise.elements,
        _GRADS,
        "noise scale: variance between steps over the squared mean; times the samples per step, "
        "it is the batch size at which half of the gradient is noise",
    ),
    "sparsity": _Shown(
        "exact zeros, as shares of all numbers, over", lambda zeros: zeros.elements, _SPARSITY
    ),
}
