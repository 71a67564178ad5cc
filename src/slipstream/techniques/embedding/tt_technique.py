"""tt_embedding: each large embedding table as a tensor train.

Source: Yin, Acun, Liu and Wu, "TT-Rec: Tensor Train Compression for Deep Learning Recommendation
Models", MLSys 2021.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import Graph
from slipstream.technique import Quality, QualityKind, Stage, Traits
from slipstream.techniques.embedding.exchange import TableExchange, dense_bytes, why_no_kernels
from slipstream.techniques.embedding.groups import Group
from slipstream.techniques.embedding.tables import Lookup
from slipstream.techniques.embedding.tt_shape import MAX_CORES, MIN_CORES, TTShape
from slipstream.units import format_bytes

if TYPE_CHECKING:
    from slipstream.techniques.embedding.formats.format import TableFacts
    from slipstream.techniques.embedding.planning import TablePlan
    from slipstream.workload import BuiltWorkload, Workload

_BY_HAND = """\
import slipstream.nn
self.item = slipstream.nn.TTEmbedding(rows, dim, tt_ranks=(32, 32))
self.seen = slipstream.nn.TTEmbeddingBag(rows, dim, tt_ranks=(32, 32), mode="mean")"""


@dataclass(frozen=True)
class TTEmbeddings(TableExchange):
    """Replacement of tables of at least `rows` rows by tensor trains, if those are smaller.

    Attributes:
        rank: rank of every train.
        cores: cores of every train, 2 to 4; only 2 and 3 have native kernels.
        rows: smaller tables stay unchanged.
        svd: whether to start from the nearest train of each table; otherwise from random numbers
            of the same standard deviation.
        only, except_: patterns of modules' qualified names.
    """

    rank: int = 32
    cores: int = 3
    rows: int = 10_000
    svd: bool = False
    only: str = "*"
    except_: str = ""

    name: ClassVar[str] = "tt_embedding"
    traits: ClassVar[Traits] = Traits(
        stage=Stage.MODEL,
        conflicts=frozenset({"embedding_plan", "robe_embedding"}),
        variants=("tt_embedding:8", "tt_embedding:32"),
    )
    by_hand: ClassVar[str] = _BY_HAND

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InvalidArgumentError("tt_embedding:rank", f"{self.rank} is less than 1")
        if not MIN_CORES <= self.cores <= MAX_CORES:
            raise InvalidArgumentError("tt_embedding:cores", f"{self.cores} is not 2, 3 or 4")

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why no table is exchanged; None if one is."""
        if (reason := self.why_no_table(graph) or why_no_kernels()) is not None:
            return reason
        if not self.groups(graph):
            return (
                f"no table of at least {self.rows} rows has a dimension of {self.cores} factors "
                f"and is smaller as a tensor train of rank {self.rank}"
            )
        return None

    def groups(self, graph: Graph) -> list[Group]:
        """Return one group per table."""
        by_table: dict[int, list[Lookup]] = {}
        for lookup in self.chosen_lookups(graph):
            by_table.setdefault(lookup.table, []).append(lookup)
        groups = []
        for lookups in by_table.values():
            rows, dim = lookups[0].weight.shape
            if (shape := self._smaller(rows, dim)) is not None:
                cores = tuple(map(math.prod, shape.cores))
                groups.append(Group(tuple(lookups), "tt", self._settings, 4 * shape.numbers, cores))
        return groups

    def summary(self, groups: Sequence[Group]) -> str:
        """Return the bytes of the tables and of the trains."""
        return (
            f"{len(groups)} tables of {format_bytes(dense_bytes(groups))} as tensor trains of "
            f"{format_bytes(sum(group.nbytes for group in groups))}"
        )

    def plans(self, built: BuiltWorkload, tables: Sequence[TableFacts]) -> list[TablePlan]:
        """Return one plan per table, so that each train starts with its table's deviation."""
        from slipstream.techniques.embedding.formats.format import Choice
        from slipstream.techniques.embedding.planning import TablePlan

        plans = []
        for table in tables:
            if (shape := self._smaller(table.rows, table.dim)) is not None:
                choice = Choice("tt", self._settings, shape.numbers * table.item_bytes, 0.0)
                plan = TablePlan.of([table], {table.name: choice})
                plans.append(plan.converting(built.model) if self.svd else plan)
        if not plans:
            raise WorkloadError(
                f"the model has no nn.Embedding or nn.EmbeddingBag of at least {self.rows} "
                "rows that is smaller as a tensor train",
                remedy="pass tt_embedding:rank=R or rows=N to change the limits",
            )
        return plans

    def quality(self, graph: Graph | None = None) -> Quality:
        """Require training, since tables are low-rank products."""
        return Quality(
            QualityKind.NEEDS_TRAINING,
            "tables become products of small cores, so the model must be trained from scratch, or "
            "fine-tuned from the nearest train (svd=on)",
        )

    @property
    def _settings(self) -> dict[str, int]:
        """Settings of the table format."""
        return {"rank": self.rank, "cores": self.cores}

    def _smaller(self, rows: int, dim: int) -> TTShape | None:
        """Return the train of a table; None if it has no factors or is not smaller."""
        try:
            shape = TTShape.of(rows, dim, (self.rank,) * (self.cores - 1))
        except InvalidArgumentError:
            return None
        return shape if shape.numbers < rows * dim else None
