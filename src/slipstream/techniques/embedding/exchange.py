"""What techniques that put other modules in the place of embedding tables have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import Call, Editor, Graph
from slipstream.graph.flow import matches
from slipstream.native import library, why_no_library
from slipstream.source import NotPlacedError, Places, Source
from slipstream.technique import Choosing, CodeChange, Context
from slipstream.techniques._baseline import already_compiled
from slipstream.techniques.embedding.groups import Group, asked, exchanged
from slipstream.techniques.embedding.tables import Lookup, lookups

if TYPE_CHECKING:
    from slipstream.techniques.embedding.formats.format import TableFacts
    from slipstream.techniques.embedding.planning import TablePlan
    from slipstream.workload import BuiltWorkload, Workload


_SPARSE_ONLY = "SparseAdam"
_NO_SPARSE = "SparseAdam takes sparse gradients only, and those of smaller tables are dense"


class TableExchange(Choosing, ABC):
    """A technique that puts tables into other formats.

    Attributes:
        by_hand: lines that do the same in a user's source.
        rows: smaller tables stay as they are.
    """

    by_hand: ClassVar[str]
    rows: int

    @abstractmethod
    def groups(self, graph: Graph) -> list[Group]:
        """The tables it would exchange in a recorded step; none where none is worth it."""

    @abstractmethod
    def summary(self, groups: Sequence[Group]) -> str:
        """What becomes of the tables, for the list of edits."""

    @abstractmethod
    def plans(self, built: BuiltWorkload, tables: Sequence[TableFacts]) -> list[TablePlan]:
        """The formats of these tables of a model; each plan is applied by itself.

        Raises:
            WorkloadError: none of them can be exchanged.
            InvalidArgumentError: they cannot be so small.
        """

    def why_no_table(self, graph: Graph) -> str | None:
        """None, or why no table can be exchanged for a module that is timed on processors."""
        if (reason := already_compiled(graph)) is not None:
            return reason
        described: Any = graph.meta.get("optimizer") or {}
        if described.get("class") == _SPARSE_ONLY:
            return f"{_NO_SPARSE}; torch.optim.Adam or Adagrad trains both"
        every = matches(graph, lookups)
        if not every:
            return "no embedding table is looked up in this step"
        large = self._large(every)
        if not large:
            most = max(lookup.weight.shape[0] for lookup in every)
            return f"the largest table has {most} rows; below {self.rows} they are not worth it"
        if any(lookup.weight.device != "cpu" for lookup in large):
            return "the kernels are for processors, and the tables are on another device"
        return self.selection.why_none(lookup.module for lookup in large)

    def chosen_lookups(self, graph: Graph) -> list[Lookup]:
        """Look-ups of the tables that are large enough, and chosen by one of their modules."""
        large = self._large(matches(graph, lookups))
        tables = {lookup.table for lookup in self.chosen(large)}
        return [lookup for lookup in large if lookup.table in tables]

    def _large(self, every: Sequence[Lookup]) -> list[Lookup]:
        """Look-ups of float32 tables with at least `rows` rows, on the first one's device."""
        large = [
            one
            for one in every
            if one.weight.shape[0] >= self.rows and one.weight.dtype == "float32"
        ]
        return [one for one in large if one.weight.device == large[0].weight.device]

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """The modules' passes, and updates as they are and as they would be."""
        return asked(graph, self.groups(graph))

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Other look-ups, gradients, updates and memory."""
        edit = Editor(graph, str(self))
        groups = self.groups(graph)
        if not groups:
            return edit.apply("nothing to exchange")
        exchanged(edit, graph, groups, context)
        return edit.apply(self.summary(groups))

    def apply(self, built: BuiltWorkload) -> None:
        """Exchange the modules, and let the optimizer train the new parameters.

        Raises:
            WorkloadError: the step hides its model, no table can be exchanged, or the optimizer
                takes sparse gradients only.
            InvalidArgumentError: the tables cannot be so small, or a saved plan is for others.
        """
        from slipstream.techniques.embedding.facts import facts_of

        built.need_model(self.name)
        if type(built.optimizer).__name__ == _SPARSE_ONLY:
            raise WorkloadError(_NO_SPARSE, remedy="torch.optim.Adam or Adagrad")
        try:
            tables = facts_of(built.model, None, trained=False, least_rows=self.rows)
        except InvalidArgumentError as error:
            remedy = f"{self.name}:rows=N changes the limit"
            raise WorkloadError(error.what, remedy=remedy) from error
        self.need_some([one.name for one in tables])
        tables = [one for one in tables if one.name in self.selection]
        for plan in self.plans(built, tables):
            plan.apply(built.model, built.optimizer)

    def code(self, workload: Workload) -> CodeChange | None:
        """Tables are made in too many ways to place the edit; the lines to write."""
        return CodeChange.of(workload, _no_edit, by_hand=self.by_hand)


def dense_bytes(groups: Sequence[Group]) -> int:
    """Bytes of the tables in `groups` as they were recorded."""
    return sum(spec.nbytes for group in groups for spec in group.tables.values())


def why_no_kernels() -> str | None:
    """None, or why there are no kernels on this machine."""
    if library() is None:
        return f"it needs the compiled library: {why_no_library()}"
    return None


def _no_edit(where: Places) -> Source:
    raise NotPlacedError(
        "which tables to exchange is not in the source", where=str(where.source.path)
    )
