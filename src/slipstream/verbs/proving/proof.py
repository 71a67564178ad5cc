"""A comparison of workloads: speed, quality and ranks, next to the predictions."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from slipstream.measure.comparison import Comparison
from slipstream.measure.render import comparison_rows, rows_payload
from slipstream.tables import Table
from slipstream.verbs.proving.exposed import Exposed, exposed_sides, exposed_table, link_table
from slipstream.verbs.proving.replicas import RanksSide, ranks_sides, ranks_table, workers_of
from slipstream.verbs.proving.summary import (
    TensorMemory,
    prediction_notes,
    summary_table,
    tensor_memory,
)


@dataclass(frozen=True)
class Proof:
    """A comparison as it is shown."""

    comparison: Comparison

    @cached_property
    def ranks(self) -> list[RanksSide]:
        """The sides that several processes took together."""
        return ranks_sides(self.comparison, workers_of(self.comparison.experiment))

    @cached_property
    def exposed(self) -> list[Exposed]:
        """What their steps stand still for, and what their links carry."""
        return exposed_sides(self.comparison)

    @cached_property
    def tensors(self) -> dict[str, TensorMemory]:
        """By technique: the most that tensors of a step take, measured beside predicted."""
        return tensor_memory(self.comparison.experiment)

    def summary(self) -> Table:
        """A line a technique."""
        return summary_table(self.comparison)

    def tables(self) -> list[Table]:
        """The comparison in full, and those of real ranks."""
        table = self.comparison.table()
        notes = (
            *table.notes,
            *prediction_notes(self.comparison.experiment),
            *self._memory_notes(),
        )
        tables = [replace(table, notes=notes)]
        if self.ranks:
            tables.append(ranks_table(self.ranks))
        if self.ranks and self.exposed:
            tables += [exposed_table(self.exposed), link_table(self.exposed)]
        return tables

    def _memory_notes(self) -> list[str]:
        if not self.tensors:
            return []
        return [
            "peak_memory is of the whole process, without what it had before the workload (on a "
            "CUDA device, of tensors there); predictions of memory are of the step's tensors "
            "alone.",
            *(one.sentence for one in self.tensors.values()),
        ]

    def to_json(self) -> dict[str, Any]:
        """Everything, as results are printed."""
        experiment, claims = self.comparison.experiment, self.comparison.claims
        payload = rows_payload(experiment, comparison_rows(experiment, claims), claims)
        if self.tensors:
            payload["tensors"] = [
                asdict(one) | {"ratio": one.ratio, "error": one.error}
                for one in self.tensors.values()
            ]
        if self.ranks:
            payload |= {"ranks": self.ranks, "exposed": self.exposed}
        return payload
