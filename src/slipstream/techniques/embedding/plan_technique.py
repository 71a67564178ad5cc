"""embedding_plan: each large embedding table in the way that loses least within a budget."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import Call, Editor, Graph, StepPhase
from slipstream.technique import CodeChange, Context, Quality, QualityKind, Settings, Stage, Traits
from slipstream.techniques._baseline import already_compiled
from slipstream.techniques.embedding.exchange import by_hand, check_built
from slipstream.techniques.embedding.groups import ALONE, Group, asked, exchanged, hashed_pass
from slipstream.techniques.embedding.tables import Lookup, lookups
from slipstream.units import format_bytes

if TYPE_CHECKING:
    from slipstream.techniques.embedding.planning import Plan
    from slipstream.techniques.embedding.ways.way import Choice, TableFacts
    from slipstream.workload import Built, Workload

_ROOT = "model."
_BY_HAND = """\
import slipstream as ss
plan = ss.embedding.plan(model, graph, ratio=10)  # graph: ss.profile(..., needs=("ids",))
print(plan)
plan.apply(model, optimizer)"""


@dataclass(frozen=True)
class EmbeddingPlan(Settings):
    """Tables of at least `rows` rows in `ratio` times fewer bytes together.

    Attributes:
        ratio: bytes of the tables over bytes of the plan.
        methods: ways to choose from, joined by ``/`` as in ``lowdim/robe``; all when empty.
        file: a plan that was saved (`slipstream.embedding.Plan.save`); then the others say nothing.
        rows: smaller tables stay as they are.
    """

    ratio: float = 10.0
    methods: str = ""
    file: str = ""
    rows: int = 2000

    name: ClassVar[str] = "embedding_plan"
    traits: ClassVar[Traits] = Traits(
        stage=Stage.MODEL, conflicts=frozenset({"robe_embedding", "tt_embedding"})
    )

    def __post_init__(self) -> None:
        if not (self.ratio >= 1 and math.isfinite(self.ratio)):
            raise InvalidArgumentError("embedding_plan:ratio", f"{self.ratio} is not from 1 up")
        if self.methods:
            from slipstream.techniques.embedding.ways import ways_of

            ways_of(self.methods.split("/"))

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """None, or why no table is worth it."""
        if (reason := already_compiled(graph)) is not None:
            return reason
        every = lookups(graph)
        if not every:
            return "no embedding table is looked up in this step"
        if any(one.weight.device != "cpu" for one in every):
            return "its durations are measured on processors, and the tables are on another device"
        if not self._facts(graph):
            most = max(one.weight.shape[0] for one in every)
            return f"the largest table has {most} rows; below {self.rows} they are not worth it"
        try:
            plan = self._plan(self._facts(graph), _trains(graph))
        except InvalidArgumentError as error:
            return error.what
        if not _exchanged(plan):
            return "every table is best left as it is"
        return None

    def questions(self, graph: Graph) -> Sequence[Call]:
        """The modules' passes, and updates as they are and as they would be."""
        return asked(graph, self._groups(graph))

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Other look-ups, gradients, updates and memory."""
        edit = Editor(graph, str(self))
        groups = self._groups(graph)
        if not groups:
            return edit.apply("nothing to exchange")
        exchanged(edit, graph, groups, context)
        plan = self._plan(self._facts(graph), _trains(graph))
        ways = ", ".join(sorted({choice.way for choice in _exchanged(plan).values()}))
        return edit.apply(
            f"tables of {format_bytes(plan.dense_bytes)} in {format_bytes(plan.nbytes)}: {ways}"
        )

    def apply(self, built: Built) -> None:
        """Exchange the tables, and let the optimizer train the new parameters.

        Raises:
            WorkloadError: the step hides its model, no table can be exchanged, or the optimizer
                takes sparse gradients only.
            InvalidArgumentError: the tables cannot be so small, or a saved plan is for others.
        """
        check_built(self.name, built, "those of smaller tables are")
        from slipstream.techniques.embedding.facts import facts_of

        try:
            facts = facts_of(built.model, None, trained=False, least_rows=self.rows)
        except InvalidArgumentError as error:
            raise WorkloadError(
                error.what, remedy="embedding_plan:rows=N changes the limit"
            ) from error
        trains = built.optimizer is not None
        plan = self._plan(facts, trains)
        (plan if trains else plan.converting(built.model)).apply(built.model, built.optimizer)

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

    def code(self, workload: Workload) -> CodeChange | None:
        """Tables are made in too many ways to place the edit; the lines to write."""
        return by_hand(workload, _BY_HAND)

    def _facts(self, graph: Graph) -> list[TableFacts]:
        """Tables by the names of their modules, in the order of the names."""
        from slipstream.techniques.embedding.ways.way import TableFacts

        found: dict[str, TableFacts] = {}
        for one in lookups(graph):
            rows, dim = one.weight.shape
            if rows >= self.rows and one.weight.dtype == "float32":
                name = _name(graph, one)
                found[name] = TableFacts(name, rows, dim)
        return [found[name] for name in sorted(found)]

    def _plan(self, facts: Sequence[TableFacts], trains: bool) -> Plan:
        """The same from a graph as from a model: sizes alone are known of both."""
        from slipstream.techniques.embedding.planning import Plan, plan_tables

        if self.file:
            return dataclasses.replace(Plan.load(self.file), facts=tuple(facts))
        ordered = sorted(facts, key=lambda one: one.name)
        methods = self.methods.split("/") if self.methods else None
        return plan_tables(ordered, ratio=self.ratio, methods=methods, codes=not trains).best

    def _groups(self, graph: Graph) -> list[Group]:
        """Tables in one array are a group; each other table is one of its own."""
        facts = self._facts(graph)
        if not facts:
            return []
        plan = self._plan(facts, _trains(graph))
        by_name: dict[str, list[Lookup]] = {}
        for one in lookups(graph):
            by_name.setdefault(_name(graph, one), []).append(one)
        groups: list[Group] = []
        hashed: list[Lookup] = []
        for name, choice in _exchanged(plan).items():
            if name not in by_name:
                continue
            if choice.way == "robe":
                hashed += by_name[name]
                continue
            trained = 0 if choice.way in ("int8", "int4", "lowdim_int8") else choice.nbytes // 4
            groups.append(
                Group(tuple(by_name[name]), trained, choice.nbytes, partial(_pass, choice))
            )
        if hashed:
            block = min(plan.block, plan.numbers)
            a_pass = partial(hashed_pass, plan.numbers, block, plan.sign)
            groups.append(Group(tuple(hashed), plan.numbers, 4 * plan.numbers, a_pass))
        return groups


def _pass(choice: Choice, lookup: Lookup, backward: bool) -> Call:
    """A look-up or its backward pass, as the micro-benchmark times it."""
    rows, dim = lookup.weight.shape
    # Which ids are hot does not change the time; how many are does.
    settings = tuple(
        (key, len(value) if isinstance(value, tuple) else value)
        for key, value in choice.settings.items()
    )
    described: dict[str, Any] = {
        "num_embeddings": rows, "embedding_dim": dim, "way": choice.way, "settings": settings,
        "mode": "" if lookup.bags is None else lookup.mode,
    }  # fmt: skip
    arguments = (f"{ALONE}:Planned", tuple(described.items()), lookup.input, backward)
    return Call("slipstream::module_pass()", arguments, (lookup.made,))


def _exchanged(plan: Plan) -> dict[str, Choice]:
    return {name: choice for name, choice in plan.tables.items() if choice.way != "dense"}


def _trains(graph: Graph) -> bool:
    return bool((graph.tasks.phase == StepPhase.BACKWARD).any())


def _name(graph: Graph, lookup: Lookup) -> str:
    """Of the table's module in the model."""
    return graph.string(int(graph.tasks.module[lookup.task])).removeprefix(_ROOT)
