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
    comparison: Comparison

    @cached_property
    def ranks(self) -> list[RanksSide]:
        return ranks_sides(self.comparison, workers_of(self.comparison.experiment))

    @cached_property
    def exposed(self) -> list[Exposed]:
        return exposed_sides(self.comparison)

    @cached_property
    def tensors(self) -> dict[str, TensorMemory]:
        """Measured and predicted peak tensor memory, by technique."""
        return tensor_memory(self.comparison.experiment)

    def summary(self) -> Table:
        return summary_table(self.comparison)

    def tables(self) -> list[Table]:
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
            "peak_memory is of the whole process, above its use before the workload (on a CUDA "
            "device, of tensors there); predictions of memory are of the step's tensors alone.",
            *(memory.sentence for memory in self.tensors.values()),
        ]

    def to_json(self) -> dict[str, Any]:
        experiment, claims = self.comparison.experiment, self.comparison.claims
        payload = rows_payload(experiment, comparison_rows(experiment, claims), claims)
        if self.tensors:
            payload["tensors"] = [
                asdict(memory) | {"ratio": memory.ratio, "error": memory.error}
                for memory in self.tensors.values()
            ]
        if self.ranks:
            payload |= {"ranks": self.ranks, "exposed": self.exposed}
        return payload
