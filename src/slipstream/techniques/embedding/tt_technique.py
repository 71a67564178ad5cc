"""tt_embedding: each large embedding table as a tensor train of its own.

Source: Yin, Acun, Liu and Wu, "TT-Rec: Tensor Train Compression for Deep Learning Recommendation
Models", MLSys 2021.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from slipstream.durations import questions, rescale
from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import Call, Editor, Graph
from slipstream.surgery import exchange_parameters, place
from slipstream.technique import CodeChange, Context, Quality, QualityKind, Settings, Stage, Traits
from slipstream.techniques.embedding.exchange import (
    by_hand,
    check_built,
    chosen,
    exchangeable,
    insert,
    retime,
    shrink,
    weights_of,
    why_none,
)
from slipstream.techniques.embedding.groups import module_pass
from slipstream.techniques.embedding.tables import Lookup, list_updates, updates, with_arrays
from slipstream.techniques.embedding.tt_shape import LEAST_CORES, MOST_CORES, TTShape
from slipstream.units import format_bytes

if TYPE_CHECKING:
    from slipstream.workload import Built, Workload

_MODULES = "slipstream.techniques.embedding.tt"
_BY_HAND = """\
import slipstream.nn
self.item = slipstream.nn.TTEmbedding(rows, dim, tt_ranks=(32, 32))
self.seen = slipstream.nn.TTEmbeddingBag(rows, dim, tt_ranks=(32, 32), mode="mean")"""


@dataclass(frozen=True)
class TTEmbeddings(Settings):
    """Tables of at least `rows` rows as tensor trains, where those have fewer numbers.

    Attributes:
        rank: of every train.
        cores: of every train, 2 to 4; there are kernels for 2 and 3.
        rows: smaller tables stay as they are.
        svd: begin with the nearest train of each table; else with random numbers as wide as its.
    """

    rank: int = 32
    cores: int = 3
    rows: int = 10_000
    svd: bool = False

    name: ClassVar[str] = "tt_embedding"
    traits: ClassVar[Traits] = Traits(
        stage=Stage.MODEL,
        conflicts=frozenset({"embedding_plan", "robe_embedding"}),
        variants=("tt_embedding:8", "tt_embedding:32"),
    )

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InvalidArgumentError("tt_embedding:rank", f"{self.rank} is less than 1")
        if not LEAST_CORES <= self.cores <= MOST_CORES:
            raise InvalidArgumentError("tt_embedding:cores", f"{self.cores} is not 2, 3 or 4")

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """None, or why no table is worth it."""
        if (reason := why_none(graph, self.rows)) is not None:
            return reason
        if not self._chosen(graph):
            return (
                f"no table of {self.rows} rows and more has {self.cores} factors in its dimension "
                f"and fewer numbers as a tensor train of rank {self.rank}"
            )
        return None

    def questions(self, graph: Graph) -> Sequence[Call]:
        """The modules' passes, and updates as they are and as they would be."""
        found = self._chosen(graph)
        asked: list[Call] = []
        for lookup in found:
            for _, backward in zip(lookup.tasks, (False, True), strict=False):
                asked.append(self._pass(lookup, backward))
        kept, added = self._updates(graph, found)
        return [*asked, *questions(graph, kept), *(call for _, call in added)]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Other look-ups and gradients, updates of cores in place of tables', less memory."""
        found = self._chosen(graph)
        edit = Editor(graph, str(self))
        if not found:
            return edit.apply("nothing to exchange")
        for lookup in found:
            retime(edit, graph, context, lookup, self._pass)
        kept, added = self._updates(graph, found)
        rescale(edit, graph, kept, context.durations)
        for task, call in added:
            insert(edit, task, call, context)
        tables = weights_of(found)
        numbers = {spec.shape: self._shape(spec.shape).numbers for spec in tables.values()}
        shares = {spec.nbytes: numbers[spec.shape] / spec.numel for spec in tables.values()}
        shrink(edit, graph, found, shares)
        dense = sum(spec.nbytes for spec in tables.values())
        trains = sum(numbers[spec.shape] * 4 for spec in tables.values())
        return edit.apply(
            f"{len(tables)} tables of {format_bytes(dense)} as tensor trains of "
            f"{format_bytes(trains)}"
        )

    def apply(self, built: Built) -> None:
        """Exchange the modules, and let the optimizer train the cores in the tables' place.

        Raises:
            WorkloadError: the step hides its model, no table can be exchanged, or the optimizer
                takes sparse gradients only.
        """
        check_built(self.name, built, "those of the cores are")
        modules = [
            (name, module)
            for name, module in exchangeable(built.model, self.rows)
            if self._smaller(tuple(module.weight.shape))
        ]
        if not modules:
            raise WorkloadError(
                f"the model has no nn.Embedding or nn.EmbeddingBag of {self.rows} rows and more "
                "that is smaller as a tensor train",
                remedy="tt_embedding:rank=R and rows=N change the limits",
            )
        for name, module in modules:
            made = self._made(module)
            place(built.model, name, made.train(module.training))
            if built.optimizer is not None:
                exchange_parameters(built.optimizer, [module.weight], *made.cores)

    def quality(self, graph: Graph | None = None) -> Quality:
        """Another model."""
        return Quality(
            QualityKind.NEEDS_TRAINING,
            "tables have the structure of a product: the model is another one and has to be "
            "trained as such, or refined from the nearest train (svd=on)",
        )

    def code(self, workload: Workload) -> CodeChange | None:
        """Tables are made in too many ways to place the edit; the lines to write."""
        return by_hand(workload, _BY_HAND)

    def _shape(self, table: tuple[int, ...]) -> TTShape:
        return TTShape.of(table[0], table[1], (self.rank,) * (self.cores - 1))

    def _smaller(self, table: tuple[int, ...]) -> bool:
        """Whether a table can be a train, and has fewer numbers then."""
        try:
            return self._shape(table).numbers < math.prod(table)
        except InvalidArgumentError:
            return False

    def _chosen(self, graph: Graph) -> list[Lookup]:
        return [one for one in chosen(graph, self.rows) if self._smaller(one.weight.shape)]

    def _pass(self, lookup: Lookup, backward: bool) -> Call:
        """The module's pass, as the micro-benchmark times it."""
        settings = {"tt_ranks": (self.rank,) * (self.cores - 1)}
        return module_pass(_MODULES, "TTEmbedding", settings, lookup, backward)

    def _updates(
        self, graph: Graph, found: Sequence[Lookup]
    ) -> tuple[dict[int, Call], list[tuple[int, Call]]]:
        """Of the optimizer's tasks on tables: with the largest core, and those on other cores."""
        if not found:
            return {}, []
        shapes = [spec.shape for spec in weights_of(found).values()]
        together = (sum(self._shape(shape).numbers for shape in shapes),)
        # In a list of tensors all cores stand in the first table's place.
        places: dict[tuple[int, ...], list[tuple[int, ...] | None]] = {}
        for number, shape in enumerate(shapes):
            places.setdefault(shape, []).append(None if number else together)
        kept = {
            task: with_arrays(graph.calls[graph.tasks.call[task]], places)
            for task in list_updates(graph, shapes)
        }
        added: list[tuple[int, Call]] = []
        for shape, tasks in updates(graph, sorted(set(shapes))).items():
            *others, largest = sorted(math.prod(core) for core in self._shape(shape).cores)
            for task in tasks:
                call = graph.calls[graph.tasks.call[task]]
                kept[task] = with_arrays(call, {shape: [(largest,)]})
                added += [(task, with_arrays(call, {shape: [(numbers,)]})) for numbers in others]
        return kept, added

    def _made(self, module: Any) -> Any:
        """The tensor train in a module's place."""
        import torch
        from torch import nn

        from slipstream.techniques.embedding.tt import TTEmbedding, TTEmbeddingBag
        from slipstream.techniques.embedding.tt_init import LEAST_STD

        settings: dict[str, Any] = {
            "tt_ranks": (self.rank,) * (self.cores - 1), "padding_idx": module.padding_idx,
        }  # fmt: skip
        kind: Any = TTEmbedding
        if type(module) is nn.EmbeddingBag:
            kind = TTEmbeddingBag
            settings["mode"] = module.mode
            settings["include_last_offset"] = module.include_last_offset
        weight = module.weight.detach()
        if self.svd:
            return kind.from_dense(weight, **settings)
        wide = float(torch.linalg.vector_norm(weight.double())) / math.sqrt(weight.numel())
        return kind(
            module.num_embeddings, module.embedding_dim, **settings, init_std=max(wide, LEAST_STD),
            device=weight.device, dtype=weight.dtype,
        )  # fmt: skip
