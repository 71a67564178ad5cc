"""robe_embedding: all large embedding tables as hashed blocks of one small array.

Source: Desai, Chou and Shrivastava, "Random Offset Block Embedding (ROBE) for compressed embedding
tables in deep learning recommendation systems", MLSys 2022.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, ClassVar

from slipstream.errors import InvalidArgumentError
from slipstream.graph import Graph, StepPhase
from slipstream.technique import Quality, QualityKind, Stage, Traits
from slipstream.techniques.embedding.exchange import TableExchange, dense_bytes, why_no_kernels
from slipstream.techniques.embedding.groups import Group
from slipstream.units import format_bytes

if TYPE_CHECKING:
    from slipstream.techniques.embedding.formats.format import TableFacts
    from slipstream.techniques.embedding.planning import TablePlan
    from slipstream.workload import BuiltWorkload, Workload

_BY_HAND = """\
import slipstream.nn
pool = slipstream.nn.SharedArray.compressing([(rows, dim)], ratio=100, block=32, sign=False)
self.item = slipstream.nn.ROBEEmbedding(rows, dim, pool)"""


@dataclass(frozen=True)
class RobeEmbedding(TableExchange):
    """Replacement of tables of at least `rows` rows by one array of `ratio` times fewer numbers.

    Attributes:
        ratio: numbers of the tables over numbers of the array.
        block: consecutive numbers of a row that share one hash.
        sign: whether rows have hashed signs, which make inner products of rows unbiased.
        rows: smaller tables stay unchanged: they take little memory, and compression only loses
            accuracy.
        only, except_: patterns of modules' qualified names.
    """

    ratio: float = 100.0
    block: int = 32
    # The default of plans (`formats.robe.SIGN`): rows with signs cannot share a direction.
    sign: bool = False
    rows: int = 10_000
    only: str = "*"
    except_: str = ""

    name: ClassVar[str] = "robe_embedding"
    traits: ClassVar[Traits] = Traits(
        stage=Stage.MODEL, variants=("robe_embedding:10.0", "robe_embedding:100.0")
    )
    by_hand: ClassVar[str] = _BY_HAND

    def __post_init__(self) -> None:
        if not (self.ratio > 0 and math.isfinite(self.ratio)):
            raise InvalidArgumentError("robe_embedding:ratio", f"{self.ratio} is not positive")
        if self.block < 1:
            raise InvalidArgumentError("robe_embedding:block", f"{self.block} is less than 1")

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why no table is exchanged; None if one is."""
        if (reason := self.why_no_table(graph) or why_no_kernels()) is not None:
            return reason
        groups = self.groups(graph)
        if sum(groups[0].trained) < self.block:
            return self._too_short
        dense, cache = dense_bytes(groups), _cache_bytes()
        trains = bool((graph.tasks.phase == StepPhase.BACKWARD).any())
        if not trains and dense <= cache:
            return (
                f"the uncompressed tables ({format_bytes(dense)}) fit the second-level cache "
                f"({format_bytes(cache)})"
            )
        return None

    def groups(self, graph: Graph) -> list[Group]:
        """Return one group of all tables; empty without tables."""
        lookups = self.chosen_lookups(graph)
        if not lookups:
            return []
        total = sum(
            spec.numel for spec in {lookup.table: lookup.weight for lookup in lookups}.values()
        )
        numbers = self._numbers(total)
        settings = {"numbers": numbers, "block": self.block, "sign": self.sign}
        return [Group(tuple(lookups), "robe", settings, 4 * numbers, (numbers,))]

    def summary(self, groups: Sequence[Group]) -> str:
        """Return the number of tables, their bytes and the numbers in the array."""
        (group,) = groups
        return (
            f"{len(group.tables)} tables of {format_bytes(dense_bytes(groups))} in "
            f"{sum(group.trained)} numbers"
        )

    def plans(self, built: BuiltWorkload, tables: Sequence[TableFacts]) -> list[TablePlan]:
        """Return one plan, with all tables in one array."""
        from slipstream.techniques.embedding.formats.format import Choice
        from slipstream.techniques.embedding.planning import TablePlan

        # Shares of the array by table, which add up to its numbers.
        ends = [
            0,
            *(self._numbers(n) for n in accumulate(table.rows * table.dim for table in tables)),
        ]
        if ends[-1] < self.block:
            raise InvalidArgumentError("robe_embedding:block", self._too_short)
        choices = {
            table.name: Choice(
                "robe", {"numbers": end - begin}, (end - begin) * table.item_bytes, 0.0
            )
            for table, (begin, end) in zip(tables, pairwise(ends), strict=True)
        }
        return [TablePlan.of(tables, choices, block=self.block, sign=self.sign)]

    def quality(self, graph: Graph | None = None) -> Quality:
        """Require training, since rows share numbers."""
        return Quality(
            QualityKind.NEEDS_TRAINING,
            "rows share numbers, so the model must be trained from scratch; accurate in click "
            "models with a network on top, inaccurate in matrix factorisation",
        )

    @property
    def _too_short(self) -> str:
        return f"{self.ratio:g} times fewer numbers are less than one block of {self.block}"

    def _numbers(self, dense: int) -> int:
        """Return the size of the array that replaces tables of `dense` numbers."""
        return max(1, round(dense / self.ratio))


def _cache_bytes() -> int:
    """Return the size of the second-level cache, and 1 MiB if it is unknown."""
    try:
        return max(os.sysconf("SC_LEVEL2_CACHE_SIZE"), 1 << 20)
    except (AttributeError, ValueError, OSError):
        return 1 << 20
