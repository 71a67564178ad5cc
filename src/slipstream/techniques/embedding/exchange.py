"""Base class of techniques that replace embedding tables by other modules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import Call, Editor, Graph
from slipstream.graph.flow import matches
from slipstream.native import library, why_no_library
from slipstream.source import EditLocationError, Places, Source
from slipstream.technique import CodeChange, Context, ModuleTechnique
from slipstream.techniques._baseline import already_compiled
from slipstream.techniques.embedding.groups import Group, exchange_tables, required_calls
from slipstream.techniques.embedding.tables import Lookup, lookups

if TYPE_CHECKING:
    from slipstream.techniques.embedding.formats.format import TableFacts
    from slipstream.techniques.embedding.planning import TablePlan
    from slipstream.workload import BuiltWorkload, Workload


_SPARSE_ONLY = "SparseAdam"
_NO_SPARSE = "SparseAdam takes sparse gradients only, and compressed tables have dense gradients"


class TableExchange(ModuleTechnique, ABC):
    """A technique that converts tables to other formats.

    Attributes:
        by_hand: equivalent lines for the user's source.
        rows: smaller tables stay unchanged.
    """

    by_hand: ClassVar[str]
    rows: int

    @abstractmethod
    def groups(self, graph: Graph) -> list[Group]:
        """Return the tables to exchange in a recorded step; empty without any."""

    @abstractmethod
    def summary(self, groups: Sequence[Group]) -> str:
        """Return a description of the exchange, for the list of edits."""

    @abstractmethod
    def plans(self, built: BuiltWorkload, tables: Sequence[TableFacts]) -> list[TablePlan]:
        """Return plans for these tables of a model, which are applied independently.

        Raises:
            WorkloadError: no table can be exchanged.
            InvalidArgumentError: the tables cannot be compressed by the requested ratio.
        """

    def why_no_table(self, graph: Graph) -> str | None:
        """Return why no table can be exchanged for a module timed on CPUs; None if one can."""
        if (reason := already_compiled(graph)) is not None:
            return reason
        described: Any = graph.meta.get("optimizer") or {}
        if described.get("class") == _SPARSE_ONLY:
            return f"{_NO_SPARSE}; torch.optim.Adam or Adagrad trains both"
        found = matches(graph, lookups)
        if not found:
            return "this step looks up no embedding table"
        large = self._large(found)
        if not large:
            most = max(lookup.weight.shape[0] for lookup in found)
            return f"the largest table has {most} rows; below {self.rows}, tables are not exchanged"
        if any(lookup.weight.device != "cpu" for lookup in large):
            return "the kernels run on the CPU only, and the tables are on another device"
        return self.selection.no_match_reason(lookup.module for lookup in large)

    def chosen_lookups(self, graph: Graph) -> list[Lookup]:
        """Return look-ups of large tables of which a module is selected."""
        large = self._large(matches(graph, lookups))
        tables = {lookup.table for lookup in self.chosen(large)}
        return [lookup for lookup in large if lookup.table in tables]

    def _large(self, found: Sequence[Lookup]) -> list[Lookup]:
        """Return look-ups of float32 tables with at least `rows` rows, all on one device."""
        large = [
            lookup
            for lookup in found
            if lookup.weight.shape[0] >= self.rows and lookup.weight.dtype == "float32"
        ]
        return [lookup for lookup in large if lookup.weight.device == large[0].weight.device]

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Return the modules' passes, and the updates before and after."""
        return required_calls(graph, self.groups(graph))

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Replace look-ups, gradients, updates and memory."""
        edit = Editor(graph, str(self))
        groups = self.groups(graph)
        if not groups:
            return edit.apply("nothing to exchange")
        exchange_tables(edit, graph, groups, context)
        return edit.apply(self.summary(groups))

    def apply(self, built: BuiltWorkload) -> None:
        """Exchange the modules, and let the optimizer train the new parameters.

        Raises:
            WorkloadError: the step hides its model, no table can be exchanged, or the optimizer
                takes sparse gradients only.
            InvalidArgumentError: the tables cannot be compressed by the requested ratio, or a saved
                plan is for other tables.
        """
        from slipstream.techniques.embedding.facts import facts_of

        built.need_model(self.name)
        if type(built.optimizer).__name__ == _SPARSE_ONLY:
            raise WorkloadError(_NO_SPARSE, remedy="use torch.optim.Adam or Adagrad")
        try:
            tables = facts_of(built.model, None, trained=False, least_rows=self.rows)
        except InvalidArgumentError as error:
            remedy = f"pass {self.name}:rows=N to change the limit"
            raise WorkloadError(error.what, remedy=remedy) from error
        self.require_match([table.name for table in tables])
        tables = [table for table in tables if table.name in self.selection]
        for plan in self.plans(built, tables):
            plan.apply(built.model, built.optimizer)

    def code(self, workload: Workload) -> CodeChange | None:
        """Return lines to write by hand: the construction of tables cannot be located."""
        return CodeChange.of(workload, _no_edit, by_hand=self.by_hand)


def dense_bytes(groups: Sequence[Group]) -> int:
    """Return the recorded bytes of the tables in `groups`."""
    return sum(spec.nbytes for group in groups for spec in group.tables.values())


def why_no_kernels() -> str | None:
    """Return why the kernels are unavailable on this machine; None if they are available."""
    if library() is None:
        return f"it needs the compiled library: {why_no_library()}"
    return None


def _no_edit(where: Places) -> Source:
    raise EditLocationError(
        "the tables to exchange cannot be located in the source", where=str(where.source.path)
    )
