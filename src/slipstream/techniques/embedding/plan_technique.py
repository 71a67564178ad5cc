"""embedding_plan: each large embedding table in the format that loses least within a budget."""

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
    """Tables of at least `rows` rows in `ratio` times fewer bytes together.

    Attributes:
        ratio: bytes of the tables over bytes of the plan.
        methods: table formats to choose from, joined by ``/``: ``lowdim/robe``; all when empty.
        file: a plan that was saved (`slipstream.embedding.Plan.save`); then the others say nothing.
        rows: smaller tables stay as they are.
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
            raise InvalidArgumentError("embedding_plan:ratio", f"{self.ratio} is not from 1 up")
        if self.methods:
            from slipstream.techniques.embedding.formats import formats_of

            formats_of(self.methods.split("/"))

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """None, or why no table is worth it."""
        if (reason := self.why_no_table(graph)) is not None:
            return reason
        try:
            plan = self._plan(self._facts(graph), _trains(graph))
        except InvalidArgumentError as error:
            return error.what
        if not plan.exchanged:
            return "every table is best left as it is"
        return None

    def groups(self, graph: Graph) -> list[Group]:
        """Tables in one array together, each other table by itself."""
        from slipstream.techniques.embedding.formats import FORMATS

        by_name: dict[str, list[Lookup]] = {}
        for one in self.chosen_lookups(graph):
            by_name.setdefault(one.module, []).append(one)
        if not by_name:
            return []
        plan = self._plan(self._facts(graph), _trains(graph))
        facts = {one.name: one for one in plan.facts}
        groups = []
        for names in plan.together():
            known = [name for name in names if name in by_name]
            if not known:
                continue
            choice = plan.tables[known[0]]
            settings, nbytes = plan.settings_of(choice), choice.nbytes
            if "numbers" in settings:
                settings, nbytes = {**settings, "numbers": plan.numbers}, 4 * plan.numbers
            trained = FORMATS[choice.format].trained(facts[known[0]], settings, nbytes)
            lookups = tuple(one for name in known for one in by_name[name])
            groups.append(Group(lookups, choice.format, settings, nbytes, trained))
        return groups

    def summary(self, groups: Sequence[Group]) -> str:
        """Bytes before and after, and the formats."""
        formats = ", ".join(sorted({group.format for group in groups}))
        now, then = dense_bytes(groups), sum(group.nbytes for group in groups)
        return f"tables of {format_bytes(now)} in {format_bytes(then)}: {formats}"

    def plans(self, built: BuiltWorkload, tables: Sequence[TableFacts]) -> list[TablePlan]:
        """One plan; of trained tables where the step has no optimizer."""
        trains = built.optimizer is not None
        plan = self._plan(tables, trains)
        return [plan if trains else plan.converting(built.model)]

    def quality(self, graph: Graph | None = None) -> Quality:
        """Another model, or the trained one rounded."""
        if graph is not None and not _trains(graph):
            return Quality(
                QualityKind.ROUNDING,
                "trained tables are approximated; ss.embedding.plan(model, trained=True) measures "
                "what is lost of each",
            )
        return Quality(
            QualityKind.NEEDS_TRAINING,
            "the tables are other ones and have to be trained as such; what they lose is assumed, "
            "and measured by ss.embedding.plan(model, evaluate=...)",
        )

    def _facts(self, graph: Graph) -> list[TableFacts]:
        """Tables by the names of their modules, in the order of the names."""
        from slipstream.techniques.embedding.formats.format import TableFacts

        sizes = {one.module: one.weight.shape for one in self.chosen_lookups(graph)}
        return [TableFacts(name, rows, dim) for name, (rows, dim) in sorted(sizes.items())]

    def _plan(self, facts: Sequence[TableFacts], trains: bool) -> TablePlan:
        """The same from a graph as from a model: sizes alone are known of both."""
        from slipstream.techniques.embedding.planning import TablePlan, plan_tables

        if self.file:
            return dataclasses.replace(TablePlan.load(self.file), facts=tuple(facts))
        ordered = sorted(facts, key=lambda one: one.name)
        methods = self.methods.split("/") if self.methods else None
        return plan_tables(ordered, ratio=self.ratio, methods=methods, codes=not trains).best


def _trains(graph: Graph) -> bool:
    return bool((graph.tasks.phase == StepPhase.BACKWARD).any())
