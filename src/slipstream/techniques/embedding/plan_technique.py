"""embedding_plan: each large embedding table in the format of least error within a budget."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from slipstream.errors import InvalidArgumentError
from slipstream.graph import Graph, StepPhase
from slipstream.technique import Quality, QualityKind, Stage, Traits
from slipstream.techniques.embedding.exchange import TableExchange, dense_bytes
from slipstream.techniques.embedding.groups import Group
from slipstream.techniques.embedding.tables import Lookup
from slipstream.units import format_bytes

if TYPE_CHECKING:
    from slipstream.techniques.embedding.formats.format import TableFacts
    from slipstream.techniques.embedding.planning import TablePlan
    from slipstream.workload import BuiltWorkload, Workload

_BY_HAND = """\
import slipstream as ss
plan = ss.embedding.plan(model, graph, ratio=10)  # graph: ss.profile(..., needs=("ids",))
print(plan)
plan.apply(model, optimizer)"""


@dataclass(frozen=True)
class EmbeddingPlan(TableExchange):
    """Compression of tables of at least `rows` rows to `ratio` times fewer bytes in total.

    Attributes:
        ratio: bytes of the tables over bytes of the plan.
        methods: table formats to choose from, joined by ``/``: ``lowdim/robe``; all if empty.
        file: a plan saved by `slipstream.embedding.TablePlan.save`, which overrides the others.
        rows: smaller tables stay unchanged.
        only, except_: patterns of modules' qualified names.
    """

    ratio: float = 10.0
    methods: str = ""
    file: str = ""
    rows: int = 2000
    only: str = "*"
    except_: str = ""

    name: ClassVar[str] = "embedding_plan"
    traits: ClassVar[Traits] = Traits(
        stage=Stage.MODEL, conflicts=frozenset({"robe_embedding", "tt_embedding"})
    )
    by_hand: ClassVar[str] = _BY_HAND

    def __post_init__(self) -> None:
        if not (self.ratio >= 1 and math.isfinite(self.ratio)):
            raise InvalidArgumentError(
                "embedding_plan:ratio", f"{self.ratio} is not a finite number of at least 1"
            )
        if self.methods:
            from slipstream.techniques.embedding.formats import formats_of

            formats_of(self.methods.split("/"))

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why no table is exchanged; None if one is."""
        if (reason := self.why_no_table(graph)) is not None:
            return reason
        try:
            plan = self._plan(self._facts(graph), _trains(graph))
        except InvalidArgumentError as error:
            return error.what
        if not plan.exchanged:
            return "no table format is better than the dense table"
        return None

    def groups(self, graph: Graph) -> list[Group]:
        """Return one group for the tables in a shared array, and one per other table."""
        from slipstream.techniques.embedding.formats import FORMATS

        by_name: dict[str, list[Lookup]] = {}
        for lookup in self.chosen_lookups(graph):
            by_name.setdefault(lookup.module, []).append(lookup)
        if not by_name:
            return []
        plan = self._plan(self._facts(graph), _trains(graph))
        facts = {table.name: table for table in plan.facts}
        groups = []
        for names in plan.together():
            present = [name for name in names if name in by_name]
            if not present:
                continue
            choice = plan.tables[present[0]]
            settings, nbytes = plan.settings_of(choice), choice.nbytes
            if "numbers" in settings:
                settings, nbytes = {**settings, "numbers": plan.numbers}, 4 * plan.numbers
            trained = FORMATS[choice.format].trained(facts[present[0]], settings, nbytes)
            lookups = tuple(lookup for name in present for lookup in by_name[name])
            groups.append(Group(lookups, choice.format, settings, nbytes, trained))
        return groups

    def summary(self, groups: Sequence[Group]) -> str:
        """Return the bytes before and after, and the formats."""
        formats = ", ".join(sorted({group.format for group in groups}))
        now, then = dense_bytes(groups), sum(group.nbytes for group in groups)
        return f"tables of {format_bytes(now)} in {format_bytes(then)}: {formats}"

    def plans(self, built: BuiltWorkload, tables: Sequence[TableFacts]) -> list[TablePlan]:
        """Return one plan, for trained tables if the step has no optimizer."""
        trains = built.optimizer is not None
        plan = self._plan(tables, trains)
        return [plan if trains else plan.converting(built.model)]

    def quality(self, graph: Graph | None = None) -> Quality:
        """Require training, or report rounding of trained tables if the step is inference."""
        if graph is not None and not _trains(graph):
            return Quality(
                QualityKind.ROUNDING,
                "trained tables are approximated; ss.embedding.plan(model, trained=True) measures "
                "the error of each",
            )
        return Quality(
            QualityKind.NEEDS_TRAINING,
            "the new tables must be trained from scratch; their error is assumed, "
            "and ss.embedding.plan(model, evaluate=...) measures it",
        )

    def _facts(self, graph: Graph) -> list[TableFacts]:
        """Return the tables, sorted by the names of their modules."""
        from slipstream.techniques.embedding.formats.format import TableFacts

        sizes = {lookup.module: lookup.weight.shape for lookup in self.chosen_lookups(graph)}
        return [TableFacts(name, rows, dim) for name, (rows, dim) in sorted(sizes.items())]

    def _plan(self, facts: Sequence[TableFacts], trains: bool) -> TablePlan:
        """Return the plan, which depends on sizes only and so is the same for graph and model."""
        from slipstream.techniques.embedding.planning import TablePlan, plan_tables

        if self.file:
            return dataclasses.replace(TablePlan.load(self.file), facts=tuple(facts))
        ordered = sorted(facts, key=lambda table: table.name)
        methods = self.methods.split("/") if self.methods else None
        return plan_tables(ordered, ratio=self.ratio, methods=methods, codes=not trains).best


def _trains(graph: Graph) -> bool:
    return bool((graph.tasks.phase == StepPhase.BACKWARD).any())
