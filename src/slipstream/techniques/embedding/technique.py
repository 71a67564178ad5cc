"""robe_embedding: all large embedding tables as hashed blocks of one small array.

Source: Desai, Chou and Shrivastava, "Random Offset Block Embedding (ROBE) for compressed embedding
tables in deep learning recommendation systems", MLSys 2022.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import Call, Editor, Graph, StepPhase
from slipstream.surgery import exchange_parameters, place
from slipstream.technique import CodeChange, Context, Quality, QualityKind, Settings, Stage, Traits
from slipstream.techniques.embedding.exchange import (
    by_hand,
    check_built,
    chosen,
    exchangeable,
    weights_of,
    why_none,
)
from slipstream.techniques.embedding.groups import Group, asked, exchanged, hashed_pass
from slipstream.techniques.embedding.tables import Lookup
from slipstream.units import format_bytes

if TYPE_CHECKING:
    from slipstream.workload import Built, Workload

_BY_HAND = """\
import slipstream.nn
pool = slipstream.nn.SharedArray.compressing([(rows, dim)], ratio=100, block=32, sign=False)
self.item = slipstream.nn.ROBEEmbedding(rows, dim, pool)"""


@dataclass(frozen=True)
class RobeEmbedding(Settings):
    """Tables of at least `rows` rows in one array with `ratio` times fewer numbers.

    Attributes:
        ratio: numbers of the tables over numbers of the array.
        block: numbers read in one run.
        sign: whether rows have hashed signs, which make inner products of rows unbiased.
        rows: smaller tables stay as they are: they cost nothing and would only collide.
    """

    ratio: float = 100.0
    block: int = 32
    # As a plan's (`ways.robe.SIGN`): trained rows with signs can have no direction in common.
    sign: bool = False
    rows: int = 2000

    name: ClassVar[str] = "robe_embedding"
    traits: ClassVar[Traits] = Traits(
        stage=Stage.MODEL, variants=("robe_embedding:10.0", "robe_embedding:100.0")
    )

    def __post_init__(self) -> None:
        if not (self.ratio > 0 and math.isfinite(self.ratio)):
            raise InvalidArgumentError("robe_embedding:ratio", f"{self.ratio} is not positive")
        if self.block < 1:
            raise InvalidArgumentError("robe_embedding:block", f"{self.block} is less than 1")

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """None, or why no table is worth it."""
        if (reason := why_none(graph, self.rows)) is not None:
            return reason
        found = chosen(graph, self.rows)
        if self._numbers(found) < self.block:
            return f"{self.ratio:g} times fewer numbers are less than a block of {self.block}"
        dense = sum(spec.nbytes for spec in weights_of(found).values())
        cache = _cache_bytes()
        trains = bool((graph.tasks.phase == StepPhase.BACKWARD).any())
        if not trains and dense <= cache:
            return (
                f"the tables ({format_bytes(dense)}) fit this processor's second-level cache "
                f"({format_bytes(cache)}) as they are"
            )
        return None

    def questions(self, graph: Graph) -> Sequence[Call]:
        """The modules' passes, and updates as they are and as they would be."""
        return asked(graph, self._groups(graph))

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Other look-ups and gradients, one update in place of all tables', less memory."""
        edit = Editor(graph, str(self))
        groups = self._groups(graph)
        if not groups:
            return edit.apply("nothing to exchange")
        exchanged(edit, graph, groups, context)
        (group,) = groups
        dense = sum(spec.nbytes for spec in group.tables.values())
        return edit.apply(
            f"{len(group.tables)} tables of {format_bytes(dense)} in {group.numbers} numbers"
        )

    def apply(self, built: Built) -> None:
        """Exchange the modules, and let the optimizer train the array in the tables' place.

        The array begins with normal numbers as far from zero as the tables' are.

        Raises:
            WorkloadError: the step hides its model, no table can be exchanged, or the optimizer
                takes sparse gradients only.
        """
        check_built(self.name, built, "the shared array's is")
        modules = exchangeable(built.model, self.rows)
        if not modules:
            raise WorkloadError(
                f"the model has no nn.Embedding or nn.EmbeddingBag of {self.rows} rows and more "
                "that can be exchanged",
                remedy="robe_embedding:rows=N changes the limit",
            )
        self._exchange(built, modules)

    def quality(self, graph: Graph | None = None) -> Quality:
        """Rows share numbers: another model."""
        return Quality(
            QualityKind.NEEDS_TRAINING,
            "rows share numbers: the model is another one and has to be trained as such; good in "
            "click models with a network on top, poor in matrix factorisation",
        )

    def code(self, workload: Workload) -> CodeChange | None:
        """Tables are made in too many ways to place the edit; the lines to write."""
        return by_hand(workload, _BY_HAND)

    def _numbers(self, found: Sequence[Lookup]) -> int:
        total = sum(spec.numel for spec in weights_of(found).values())
        return max(1, round(total / self.ratio))

    def _groups(self, graph: Graph) -> list[Group]:
        """All tables together, in one array; none where no table is large enough."""
        found = chosen(graph, self.rows)
        if not found:
            return []
        numbers = self._numbers(found)
        a_pass = partial(hashed_pass, numbers, self.block, self.sign)
        return [Group(tuple(found), numbers, 4 * numbers, a_pass)]

    def _exchange(self, built: Built, modules: Sequence[tuple[str, Any]]) -> None:
        from torch import nn

        from slipstream.techniques.embedding.robe import ROBEEmbedding, ROBEEmbeddingBag
        from slipstream.techniques.embedding.shared_array import SharedArray

        weights = [module.weight for _, module in modules]
        total = sum(weight.numel() for weight in weights)
        square = sum(float(w.detach().double().square().sum()) for w in weights) / total
        pool = SharedArray.compressing(
            [tuple(weight.shape) for weight in weights], self.ratio, block=self.block,
            sign=self.sign, init_std=math.sqrt(square), device=weights[0].device,
            dtype=weights[0].dtype,
        )  # fmt: skip
        for name, module in modules:
            made: Any
            if type(module) is nn.Embedding:
                made = ROBEEmbedding(
                    module.num_embeddings, module.embedding_dim, pool,
                    padding_idx=module.padding_idx,
                )  # fmt: skip
            else:
                made = ROBEEmbeddingBag(
                    module.num_embeddings, module.embedding_dim, pool, mode=module.mode,
                    padding_idx=module.padding_idx, include_last_offset=module.include_last_offset,
                )  # fmt: skip
            place(built.model, name, made.train(module.training))
        if built.optimizer is not None:
            exchange_parameters(built.optimizer, weights, pool.array)


def _cache_bytes() -> int:
    """Of the second-level cache; 1 MiB where the system does not say."""
    try:
        return max(os.sysconf("SC_LEVEL2_CACHE_SIZE"), 1 << 20)
    except (AttributeError, ValueError, OSError):
        return 1 << 20
