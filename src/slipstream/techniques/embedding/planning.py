"""`plan`: choose the format of each table of a model, within a budget of bytes."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.arguments import as_integer
from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.files import read_bytes, replacing
from slipstream.provenance import Provenance
from slipstream.surgery import exchange_parameters, place
from slipstream.tables import Column, Table
from slipstream.techniques.embedding.allocate import allocate
from slipstream.techniques.embedding.facts import IdStatistics, facts_of
from slipstream.techniques.embedding.formats import FORMATS, formats_of
from slipstream.techniques.embedding.formats.format import (
    Choice,
    Dense,
    Exchange,
    Settings,
    Start,
    TableFacts,
)
from slipstream.techniques.embedding.formats.robe import SIGN
from slipstream.units import format_bytes, parse_bytes

MIN_ROWS = 2000
"""Smaller tables stay unchanged: they take little memory, and compression only loses accuracy."""

MIXED = "mixed"
PLAIN = "lowdim"
"""The preferred format if errors are assumed, not measured."""

_BLOCK = 32
_LARGEST_BYTES = 64 << 20
_VERSION = 1


@dataclass(frozen=True)
class Alternative:
    """A compared plan: a single format for all tables, or the mixture of formats.

    Attributes:
        method: the name of the format, or ``mixed``.
        nbytes: bytes of all tables.
        error: one minus the geometric mean of the tables' retained shares, weighted by look-ups;
            None if the tables do not fit the budget.
        score: the score that `evaluate` returned; None without it.
        why_not: why it was excluded; empty if it was not.
    """

    method: str
    nbytes: int
    error: float | None
    score: float | None = None
    why_not: str = ""


@dataclass(frozen=True)
class TablePlan:
    """The format of each table.

    Attributes:
        tables: the choice by table.
        budget: the maximum bytes of all tables.
        dense_bytes: bytes of the uncompressed tables.
        method: ``mixed``, or the name of the single format.
        alternatives: all compared plans, the best first.
        basis: whether errors are measured on trained tables or assumed.
        block, sign: settings of the array that tables of the format ``robe`` share.
        facts: sizes, look-ups and weights of the tables; not saved.
    """

    tables: Mapping[str, Choice]
    budget: int
    dense_bytes: int
    method: str = MIXED
    alternatives: tuple[Alternative, ...] = ()
    basis: Provenance = Provenance.ASSUMED
    block: int = _BLOCK
    sign: bool = SIGN
    facts: tuple[TableFacts, ...] = dataclasses.field(default=(), repr=False, compare=False)

    @classmethod
    def of(
        cls, facts: Sequence[TableFacts], tables: Mapping[str, Choice], **settings: Any
    ) -> TablePlan:
        """Return the plan of these choices, with their bytes as the budget.

        Args:
            settings: further attributes.
        """
        budget = sum(choice.nbytes for choice in tables.values())
        dense = sum(table.nbytes for table in facts)
        return cls(tables, budget, dense, facts=tuple(facts), **settings)

    @property
    def exchanged(self) -> dict[str, Choice]:
        """Choices of the tables that do not stay dense."""
        return {n: choice for n, choice in self.tables.items() if choice.format != Dense.name}

    @property
    def nbytes(self) -> int:
        """Bytes of all tables in their new formats."""
        return sum(choice.nbytes for choice in self.tables.values())

    @property
    def ratio(self) -> float:
        """Bytes of the uncompressed tables over bytes of the plan."""
        return self.dense_bytes / self.nbytes

    @property
    def numbers(self) -> int:
        """Numbers in the array that hashed tables share; 0 without one."""
        return sum(
            number
            for choice in self.tables.values()
            if isinstance(number := choice.settings.get("numbers", 0), int)
        )

    def together(self) -> list[list[str]]:
        """Return names of exchanged tables, grouped by shared parameters."""
        shared: dict[str, list[str]] = {}
        together: list[list[str]] = []
        for name, choice in self.exchanged.items():
            names = shared.setdefault(choice.format, []) if FORMATS[choice.format].shared else []
            if not names:
                together.append(names)
            names.append(name)
        return together

    def settings_of(self, choice: Choice) -> Settings:
        """Return the settings of a table's module, with those of the array if it is shared."""
        if not FORMATS[choice.format].shared:
            return choice.settings
        return {**choice.settings, "block": min(self.block, self.numbers), "sign": self.sign}

    def apply(self, model: torch.nn.Module, optimizer: Any = None) -> torch.nn.Module:
        """Exchange the tables of `model` in place; `optimizer` then trains the new parameters.

        Returns:
            `model`.

        Raises:
            InvalidArgumentError: a table of the plan is missing in the model or has another size.
            WorkloadError: the optimizer has different settings for tables that share parameters.
        """
        facts = {table.name: table for table in self.facts}
        modules = dict(model.named_modules())
        for name, choice in self.tables.items():
            _check(name, modules.get(name), choice, facts.get(name))
        if not self.exchanged:
            return model
        start = Start.like([modules[name].weight for name in self.exchanged])
        for names in self.together():
            old = [modules[name] for name in names]
            exchanges = []
            for name, module in zip(names, old, strict=True):
                table = facts.get(name)
                if table is None:
                    table = TableFacts(name, module.num_embeddings, module.embedding_dim)
                elif table.weight is not None:
                    table = dataclasses.replace(table, weight=module.weight.detach())
                exchanges.append(Exchange(module, table, self.settings_of(self.tables[name])))
            new = FORMATS[self.tables[names[0]].format].modules(exchanges, start)
            for name, module in zip(names, new, strict=True):
                place(model, name, module.train(modules[name].training))
            if optimizer is not None:
                weights = [module.weight for module in old]
                exchange_parameters(optimizer, weights, *new[0].parameters())
        return model

    def converting(self, model: torch.nn.Module) -> TablePlan:
        """Return this plan for the trained tables of `model`, whose rows it then approximates."""
        weights = {
            name: module.weight.detach()
            for name, module in model.named_modules()
            if name in self.tables
            and isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)
        }
        planned = {table.name: table for table in self.facts}
        facts = [
            dataclasses.replace(planned.get(name) or TableFacts(name, *weight.shape), weight=weight)
            for name, weight in weights.items()
        ]
        return dataclasses.replace(self, facts=tuple(facts))

    def table(self) -> Table:
        """Return the format of each table, with the compared plans as notes."""
        rows = [
            (name, _described(choice), format_bytes(choice.nbytes), f"{choice.error:.1%}")
            for name, choice in self.tables.items()
        ]
        columns = (
            Column("table"), Column("format"), Column("bytes", "right"), Column("lost", "right"),
        )  # fmt: skip
        method = self.method if self.exchanged else Dense.name
        title = (
            f"{format_bytes(self.dense_bytes)} of tables in {format_bytes(self.nbytes)} "
            f"({self.ratio:.1f}x less): {method}, errors {self.basis.value}"
        )
        return Table(columns, rows, title=title, notes=tuple(map(_note, self.alternatives)))

    def __str__(self) -> str:
        return self.table().to_markdown()

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, atomically.

        Raises:
            SlipstreamError: the file cannot be written.
        """
        document = {
            "version": _VERSION, "budget": self.budget, "dense_bytes": self.dense_bytes,
            "method": self.method, "basis": self.basis.value, "block": self.block,
            "sign": self.sign,
            "tables": {name: _written(choice) for name, choice in self.tables.items()},
            "alternatives": [dataclasses.asdict(plan) for plan in self.alternatives],
        }  # fmt: skip
        try:
            with replacing(Path(path)) as draft:
                draft.write_text(json.dumps(document, indent=1), encoding="utf-8")
        except OSError as error:
            raise SlipstreamError(
                f"cannot be written: {error.strerror}", where=str(path)
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> TablePlan:
        """Read a plan that `save` wrote.

        The file holds no weights: call `converting` before you apply formats of trained tables.

        Raises:
            InvalidArgumentError: the file cannot be read, or is not a plan.
        """
        try:
            saved = json.loads(read_bytes(Path(path), most=_LARGEST_BYTES))
            if saved["version"] != _VERSION:
                raise ValueError(f"version {saved['version']} is not {_VERSION}")
            tables = {str(name): _choice(choice) for name, choice in saved["tables"].items()}
            alternatives = tuple(Alternative(**item) for item in saved["alternatives"])
            return cls(
                tables, int(saved["budget"]), int(saved["dense_bytes"]), str(saved["method"]),
                alternatives, Provenance(saved["basis"]), int(saved["block"]),
                # Files without this key were written when rows had signs.
                bool(saved.get("sign", True)),
            )  # fmt: skip
        except (
            SlipstreamError, ValueError, KeyError, TypeError, AttributeError, OverflowError,
            RecursionError,
        ) as error:  # fmt: skip
            raise InvalidArgumentError(
                "path", f"is not a plan of embedding tables: {error}", where=str(path)
            ) from error


def plan(
    model: torch.nn.Module,
    id_stats: IdStatistics | None = None,
    *,
    budget: int | str | None = None,
    ratio: float | None = None,
    methods: Iterable[str] | None = None,
    trained: bool = False,
    evaluate: Callable[[torch.nn.Module], float] | None = None,
    least_rows: int = MIN_ROWS,
) -> TablePlan:
    """Choose the format of each table of `model`, so that all tables fit the budget.

    The mixture of formats with the least error is compared with each format alone; a single format
    that is no worse is preferred, since it is simpler. The error of a trained table is measured on
    its rows, weighted by their look-ups. The error of an untrained table is assumed; then a smaller
    dimension is preferred if it fits, since on real data no other format was better by more than
    the variation between seeds. With `evaluate`, which trains or scores a compressed copy of the
    model per alternative, the best score decides; a smaller dimension is always one of the
    alternatives.

    Args:
        id_stats: how often rows are looked up: a recorded graph with the statistic "ids", or
            counts [rows] by the name of the table's module. Uniform if None.
        budget: maximum bytes of all tables, an integer or a text such as ``"512MiB"``; tables with
            fewer than `least_rows` rows stay unchanged and do not count. Pass this or `ratio`.
        ratio: bytes of the tables over bytes of the plan.
        methods: names of `FORMATS` to choose from; all if None. ``dense`` is always possible.
        trained: whether the tables are trained: errors are measured, rows are converted, and
            codes of eight and four bits are possible.
        evaluate: function from a copy of the model with compressed tables to a score; higher is
            better.
        least_rows: minimum number of rows of a table to compress.

    Raises:
        InvalidArgumentError: both or neither of budget and ratio; no table; no plan fits; trained
            weights that are not finite; `evaluate` returns no scores.
        UnknownNameError: an unknown method, or counts of a table that is not in the model.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError("model", f"is a {type(model).__name__}, not a torch.nn.Module")
    least_rows = as_integer("least_rows", least_rows)
    facts = facts_of(model, id_stats, trained=trained, least_rows=least_rows)
    compared = plan_tables(facts, budget=budget, ratio=ratio, methods=methods)
    plain = _plain(facts, compared, budget, ratio)
    if evaluate is None:
        unrequested = tuple(
            dataclasses.replace(_alternative(other), why_not="not in the requested methods")
            for other in plain
        )
        best = compared.best
        return dataclasses.replace(best, alternatives=(*best.alternatives, *unrequested))
    compared = dataclasses.replace(compared, plans=(*compared.plans, *plain))
    scored = [
        (_score(evaluate(candidate.apply(copy.deepcopy(model)))), candidate)
        for candidate in compared.plans
    ]
    if all(score == -math.inf for score, _ in scored):
        raise InvalidArgumentError("evaluate", "returned NaN for every alternative")
    return compared.judged(scored)


@dataclass(frozen=True)
class PlanComparison:
    """Plans for the same tables and budget: the mixture, and each format alone.

    Attributes:
        plans: those that fit, sorted by error; if errors are assumed, the smaller dimension first.
        left_out: formats that cannot reach the budget, or need trained tables.
    """

    plans: tuple[TablePlan, ...]
    left_out: tuple[Alternative, ...]

    @property
    def best(self) -> TablePlan:
        """The plan with the least error; a single format if a mixture is no better."""
        alternatives = [_alternative(compared) for compared in self.plans]
        return dataclasses.replace(self.plans[0], alternatives=(*alternatives, *self.left_out))

    def judged(self, scored: Sequence[tuple[float, TablePlan]]) -> TablePlan:
        """Return the plan with the highest score."""
        order = sorted(scored, key=lambda pair: -pair[0])
        alternatives = [
            dataclasses.replace(_alternative(plan), score=score) for score, plan in order
        ]
        return dataclasses.replace(order[0][1], alternatives=(*alternatives, *self.left_out))


def plan_tables(
    facts: Sequence[TableFacts],
    *,
    budget: int | str | None = None,
    ratio: float | None = None,
    methods: Iterable[str] | None = None,
    codes: bool | None = None,
) -> PlanComparison:
    """Compare plans for tables, as `plan` does for a model.

    Args:
        codes: whether to allow formats that cannot be trained; by default if all tables are
            trained.
    """
    dense = sum(table.nbytes for table in facts)
    limit = _budget(dense, budget, ratio)
    total = sum(table.lookups for table in facts) or 1.0
    weights = [table.lookups / total for table in facts]
    trained = all(table.weight is not None for table in facts)
    by_format = {
        name: [list(table_format.choices(table)) for table in facts]
        for name, table_format in formats_of(methods).items()
        if name != Dense.name
    }
    stay = [list(Dense().choices(table)) for table in facts]
    fixed = trained if codes is None else codes
    basis = Provenance.MEASURED if trained else Provenance.ASSUMED

    def planned(method: str, choices: list[list[Choice]]) -> TablePlan | None:
        taken = allocate(choices, weights, limit)
        if taken is None:
            return None
        tables = {table.name: choice for table, choice in zip(facts, taken, strict=True)}
        return TablePlan(tables, limit, dense, method, (), basis, facts=tuple(facts))

    plans: list[TablePlan] = []
    left_out: list[Alternative] = []
    for name, of_format in by_format.items():
        single = [[*of_table, *stays] for of_table, stays in zip(of_format, stay, strict=True)]
        least = sum(min(choice.nbytes for choice in of_table) for of_table in single)
        possible = fixed or FORMATS[name].trains
        single_plan = planned(name, single) if possible else None
        if single_plan is not None:
            plans.append(single_plan)
            continue
        why = f"at least {format_bytes(least)}"
        if not possible:
            why += ", and only for trained tables"
        left_out.append(Alternative(name, least, None, None, why))
    open_to = [of_format for name, of_format in by_format.items() if fixed or FORMATS[name].trains]
    columns = zip(*open_to, stay, strict=True)
    mixture = planned(MIXED, [[c for of_format in column for c in of_format] for column in columns])
    if mixture is None:
        least = min((other.nbytes for other in left_out), default=dense)
        raise InvalidArgumentError(
            "budget", f"{format_bytes(limit)} is too small for these tables and methods; "
            f"the minimum is about {format_bytes(least)}",
        )  # fmt: skip
    # The mixture last: the sort is stable, so an equal but simpler plan comes first.
    order: list[TablePlan] = sorted([*plans, mixture], key=_error)
    if not fixed and basis is Provenance.ASSUMED:
        order.sort(key=lambda plan: plan.method != PLAIN)
    return PlanComparison(tuple(order), tuple(left_out))


def _plain(
    facts: Sequence[TableFacts],
    compared: PlanComparison,
    budget: int | str | None,
    ratio: float | None,
) -> tuple[TablePlan, ...]:
    """Return the plan of a smaller dimension, as a baseline, unless `compared` has it."""
    methods = {plan.method for plan in compared.plans} | {plan.method for plan in compared.left_out}
    if PLAIN in methods:
        return ()
    try:
        plans = plan_tables(facts, budget=budget, ratio=ratio, methods=[PLAIN]).plans
    except InvalidArgumentError:  # a smaller dimension does not reach the budget
        return ()
    return tuple(plan for plan in plans if plan.method == PLAIN)


def _check(name: str, module: Any, choice: Choice, facts: TableFacts | None) -> None:
    """Raise InvalidArgumentError unless `module` is the planned table, trained if it must be."""
    if type(module) not in (torch.nn.Embedding, torch.nn.EmbeddingBag):
        raise InvalidArgumentError("model", f"'{name}' is not an embedding table")
    shape = (module.num_embeddings, module.embedding_dim)
    if facts is not None and shape != (facts.rows, facts.dim):
        raise InvalidArgumentError(
            "model", f"'{name}' is {shape[0]} x {shape[1]}, not {facts.rows} x {facts.dim}"
        )
    if not FORMATS[choice.format].trains and (facts is None or facts.weight is None):
        raise InvalidArgumentError(
            "model", f"'{name}' is to become {choice.format}, which is made from trained tables",
            remedy="call plan.converting(model) after training",
        )  # fmt: skip


def _budget(dense: int, budget: int | str | None, ratio: float | None) -> int:
    if (budget is None) == (ratio is None):
        raise InvalidArgumentError("budget", "pass either budget or ratio")
    if ratio is not None:
        if not (isinstance(ratio, int | float) and ratio >= 1 and math.isfinite(ratio)):
            raise InvalidArgumentError("ratio", f"{ratio!r} is not a finite number of at least 1")
        return int(dense / ratio)
    limit = parse_bytes(budget, "budget") if isinstance(budget, str) else budget
    if limit is None or limit < 1:
        raise InvalidArgumentError("budget", f"{budget} is not a number of bytes")
    return limit


def _score(value: Any) -> float:
    """Return the score as a float, -inf for NaN; raise InvalidArgumentError for other types."""
    try:
        score = float(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            "evaluate", f"returned a {type(value).__name__}, not a score",
            remedy="return one number; higher is better",
        ) from error  # fmt: skip
    return -math.inf if math.isnan(score) else score


def _error(plan: TablePlan) -> float:
    """Return one minus the geometric mean of the retained shares, weighted by look-ups."""
    total = sum(table.lookups for table in plan.facts) or 1.0
    lost = sum(table.lookups * plan.tables[table.name].loss for table in plan.facts)
    # Rounded, so that a mixture does not win by its last digits.
    return round(-math.expm1(-lost / total), 9)


def _alternative(plan: TablePlan) -> Alternative:
    return Alternative(plan.method, plan.nbytes, _error(plan))


def _written(choice: Choice) -> dict[str, Any]:
    """Return the document that `_choice` reads, in which the key of the format is ``way``."""
    written = dataclasses.asdict(choice)
    return {"way": written.pop("format"), **written}


def _choice(saved: Mapping[str, Any]) -> Choice:
    settings = {
        str(key): tuple(map(int, value)) if isinstance(value, list) else int(value)
        for key, value in saved["settings"].items()
    }
    if saved["way"] not in FORMATS:
        raise ValueError(f"'{saved['way']}' is not a table format")
    return Choice(saved["way"], settings, int(saved["nbytes"]), float(saved["error"]))


def _described(choice: Choice) -> str:
    parts = [
        f"{key}={len(value) if isinstance(value, tuple) else value}"
        for key, value in choice.settings.items()
    ]
    return " ".join([choice.format, *parts])


def _note(plan: Alternative) -> str:
    if plan.error is None:
        return f"{plan.method}: {plan.why_not}"
    score = "" if plan.score is None else f", score {plan.score:.4g}"
    score += f" ({plan.why_not})" if plan.why_not else ""
    return f"{plan.method}: {format_bytes(plan.nbytes)}, {plan.error:.1%} lost{score}"
