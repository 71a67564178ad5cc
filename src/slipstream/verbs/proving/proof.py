"""What a comparison of workloads proves: speed, quality, ranks, and what was shown before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from slipstream.measure.comparison import Comparison
from slipstream.measure.ledger import Score
from slipstream.measure.render import comparison_rows, rows_payload
from slipstream.tables import Table
from slipstream.units import format_reach
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
    """A comparison as it is shown.

    Attributes:
        comparison: what was measured.
        before: scores of what a person was shown before the measurement, by another prediction
            than the one beside it; None where nobody asked.
    """

    comparison: Comparison
    before: Sequence[Score] | None = None

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
        return summary_table(self.comparison, self.before or ())

    def tables(self) -> list[Table]:
        """The comparison in full, and those of real ranks."""
        table = self.comparison.table()
        notes = (
            *table.notes,
            *prediction_notes(self.comparison.experiment),
            *self._memory_notes(),
            *map(shown_before, self.before or ()),
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
        if self.before is not None:
            payload["shown_before"] = [
                {
                    "technique": score.prediction.technique,
                    "metric": score.prediction.metric,
                    "created": score.prediction.created,
                    "ratio": score.prediction.ratio,
                    "interval": [score.prediction.low, score.prediction.high],
                    "within": score.within,
                }
                for score in self.before
            ]
        if self.tensors:
            payload["tensors"] = [
                asdict(one) | {"ratio": one.ratio, "error": one.error}
                for one in self.tensors.values()
            ]
        if self.ranks:
            payload |= {"ranks": self.ranks, "exposed": self.exposed}
        return payload


def shown_before(score: Score) -> str:
    """What was predicted before a measurement, when, and whether it came true; one sentence."""
    one, claim = score.prediction, score.claim
    if score.within:
        lies = "inside what was shown then"
    else:
        lies = "outside what was shown then, whatever the newer prediction above says"
    speedup = f"{1 / one.ratio:.2f}x {format_reach(1 / one.ratio, 1 / one.high, 1 / one.low)}"
    return (
        f"{one.technique}, {one.metric}: {one.created[:10]} {one.created[11:16]} UTC you were "
        f"shown {one.ratio:.3f} {format_reach(one.ratio, one.low, one.high, '{:.3f}'.format)} "
        f"({speedup}); the measured {claim.ratio:.3f} ({1 / claim.ratio:.2f}x) lies {lies}."
    )
