"""`plan`: the format of each table of a model, within a budget of bytes."""

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

LEAST_ROWS = 2000
"""Smaller tables stay as they are: they cost nothing and would only collide."""

MIXED = "mixed"
PLAIN = "lowdim"
"""The format that goes first where nothing was measured."""

_BLOCK = 32
_LARGEST_BYTES = 64 << 20
_VERSION = 1


@dataclass(frozen=True)
class Alternative:
    """What a single format would do in the plan's place, or the mixture of all.

    Attributes:
        method: its name, or ``mixed``.
        nbytes: of all tables.
        error: one minus the geometric mean of what tables keep, weighted by their look-ups; None
            where it does not fit the budget.
        score: as measured by the user's `evaluate`; None without it.
        why_not: why it was left out; empty where it was not.
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
        budget: bytes that all of them may have.
        dense_bytes: that they had.
        method: ``mixed``, or the single format that is better.
        alternatives: all that were compared, the best first.
        basis: where errors come from: measured on trained tables, or assumed.
        block, sign: of the array that tables of the format ``robe`` share.
        facts: what is known of the tables; not saved.
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
        """The plan of these choices, whatever they need.

        Args:
            settings: further attributes.
        """
        budget = sum(choice.nbytes for choice in tables.values())
        dense = sum(one.nbytes for one in facts)
        return cls(tables, budget, dense, facts=tuple(facts), **settings)

    @property
    def exchanged(self) -> dict[str, Choice]:
        """The choices of tables that do not stay dense."""
        return {n: choice for n, choice in self.tables.items() if choice.format != Dense.name}

    @property
    def nbytes(self) -> int:
        """Bytes of all tables in their new form."""
        return sum(choice.nbytes for choice in self.tables.values())

    @property
    def ratio(self) -> float:
        """How many times smaller the tables become."""
        return self.dense_bytes / self.nbytes

    @property
    def numbers(self) -> int:
        """Of the array that hashed tables share; 0 for none."""
        return sum(
            number
            for choice in self.tables.values()
            if isinstance(number := choice.settings.get("numbers", 0), int)
        )

    def together(self) -> list[list[str]]:
        """Exchanged tables by name: those with one set of parameters, others by themselves."""
        shared: dict[str, list[str]] = {}
        together: list[list[str]] = []
        for name, choice in self.exchanged.items():
            names = shared.setdefault(choice.format, []) if FORMATS[choice.format].shared else []
            if not names:
                together.append(names)
            names.append(name)
        return together

    def settings_of(self, choice: Choice) -> Settings:
        """What a table's module is made with; of a shared array also what all its tables have."""
        if not FORMATS[choice.format].shared:
            return choice.settings
        return {**choice.settings, "block": min(self.block, self.numbers), "sign": self.sign}

    def apply(self, model: torch.nn.Module, optimizer: Any = None) -> torch.nn.Module:
        """Exchange the tables of `model`, in place; `optimizer` trains the new parameters.

        Returns:
            `model`.

        Raises:
            InvalidArgumentError: the model lacks a table of the plan, or it has another size.
            WorkloadError: the optimizer has different settings for tables that become one.
        """
        facts = {one.name: one for one in self.facts}
        modules = dict(model.named_modules())
        for name, choice in self.tables.items():
            _check(name, modules.get(name), choice, facts.get(name))
        if not self.exchanged:
            return model
        start = Start.like([modules[name].weight for name in self.exchanged])
        for names in self.together():
            old = [modules[name] for name in names]
            every = []
            for name, module in zip(names, old, strict=True):
                table = facts.get(name)
                if table is None:
                    table = TableFacts(name, module.num_embeddings, module.embedding_dim)
                elif table.weight is not None:
                    table = dataclasses.replace(table, weight=module.weight.detach())
                every.append(Exchange(module, table, self.settings_of(self.tables[name])))
            new = FORMATS[self.tables[names[0]].format].modules(every, start)
            for name, module in zip(names, new, strict=True):
                place(model, name, module.train(modules[name].training))
            if optimizer is not None:
                weights = [module.weight for module in old]
                exchange_parameters(optimizer, weights, *new[0].parameters())
        return model

    def converting(self, model: torch.nn.Module) -> TablePlan:
        """The same plan for tables that are trained: their numbers are kept as well as can be."""
        weights = {
            name: module.weight.detach()
            for name, module in model.named_modules()
            if name in self.tables
            and isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)
        }
        known = {one.name: one for one in self.facts}
        facts = [
            dataclasses.replace(known.get(name) or TableFacts(name, *weight.shape), weight=weight)
            for name, weight in weights.items()
        ]
        return dataclasses.replace(self, facts=tuple(facts))

    def table(self) -> Table:
        """The format of each table, and what else was compared."""
        rows = [
            (name, _described(choice), format_bytes(choice.nbytes), f"{choice.error:.1%}")
            for name, choice in self.tables.items()
        ]
        columns = (
            Column("table"), Column("kept as"), Column("bytes", "right"), Column("lost", "right"),
        )  # fmt: skip
        method = self.method if self.exchanged else Dense.name
        title = (
            f"{format_bytes(self.dense_bytes)} of tables in {format_bytes(self.nbytes)} "
            f"({self.ratio:.1f}x less): {method}, errors {self.basis.value}"
        )
        return Table(columns, rows, title=title, notes=tuple(map(_said, self.alternatives)))

    def __str__(self) -> str:
        return self.table().to_markdown()

    def save(self, path: str | Path) -> None:
        """Write it as JSON, whole or not at all.

        Raises:
            SlipstreamError: the file cannot be written.
        """
        kept = {
            "version": _VERSION, "budget": self.budget, "dense_bytes": self.dense_bytes,
            "method": self.method, "basis": self.basis.value, "block": self.block,
            "sign": self.sign,
            "tables": {name: _written(choice) for name, choice in self.tables.items()},
            "alternatives": [dataclasses.asdict(one) for one in self.alternatives],
        }  # fmt: skip
        try:
            with replacing(Path(path)) as beside:
                beside.write_text(json.dumps(kept, indent=1), encoding="utf-8")
        except OSError as error:
            raise SlipstreamError(
                f"cannot be written: {error.strerror}", where=str(path)
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> TablePlan:
        """What `save` wrote. Trained numbers are not in it: codes cannot be made from it.

        Raises:
            InvalidArgumentError: the file cannot be read, or is no plan.
        """
        try:
            saved = json.loads(read_bytes(Path(path), most=_LARGEST_BYTES))
            if saved["version"] != _VERSION:
                raise ValueError(f"version {saved['version']} is not {_VERSION}")
            tables = {str(name): _choice(one) for name, one in saved["tables"].items()}
            alternatives = tuple(Alternative(**one) for one in saved["alternatives"])
            return cls(
                tables, int(saved["budget"]), int(saved["dense_bytes"]), str(saved["method"]),
                alternatives, Provenance(saved["basis"]), int(saved["block"]),
                # Plans that do not say were made when rows had signs.
                bool(saved.get("sign", True)),
            )  # fmt: skip
        except (
            SlipstreamError, ValueError, KeyError, TypeError, AttributeError, OverflowError,
            RecursionError,
        ) as error:  # fmt: skip
            raise InvalidArgumentError(
                "path", f"is no plan of embedding tables: {error}", where=str(path)
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
    least_rows: int = LEAST_ROWS,
) -> TablePlan:
    """Choose for each table of `model` the format, so that all fit the budget.

    The mixture that loses least is compared with each format alone: where one of them is no worse,
    it is taken, since it is simpler. What is lost of a trained table is measured on its numbers,
    weighted by how often rows are read. For a table that is yet to be trained it is an assumption,
    on which nothing is risked: a plain smaller dimension goes first wherever it fits, since no
    other format was above it on real data by more than seeds differ. `evaluate` tells the truth: it
    trains or scores a compressed copy of the model, one for each alternative, and the best score
    wins. A smaller dimension is among them whatever `methods` are.

    Args:
        id_stats: how often rows are looked up: a recorded graph with the statistic "ids", or
            counts [rows] by the name of the table's module. All alike if None.
        budget: bytes of all tables together: a number or ``"512MiB"``; those of tables with fewer
            than `least_rows` rows, which stay as they are, not counted. Or
        ratio: how many times smaller they shall be.
        methods: names of `FORMATS` to choose from; all if None. ``dense`` is always possible.
        trained: the tables hold trained numbers: errors are measured, rows are converted, and
            codes of eight and four bits are possible.
        evaluate: a copy of the model with compressed tables to a score, the higher the better.

    Raises:
        InvalidArgumentError: neither or both of budget and ratio; no table; nothing fits; trained
            numbers that are not finite; `evaluate` gives no scores.
        UnknownNameError: no such method, or counts of a table that the model lacks.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError("model", f"is a {type(model).__name__}, not a torch.nn.Module")
    least_rows = as_integer("least_rows", least_rows)
    facts = facts_of(model, id_stats, trained=trained, least_rows=least_rows)
    compared = plan_tables(facts, budget=budget, ratio=ratio, methods=methods)
    plain = _plain(facts, compared, budget, ratio)
    if evaluate is None:
        beside = tuple(
            dataclasses.replace(_alternative(one), why_not="not among the methods asked for")
            for one in plain
        )
        best = compared.best
        return dataclasses.replace(best, alternatives=(*best.alternatives, *beside))
    compared = dataclasses.replace(compared, plans=(*compared.plans, *plain))
    scored = [(_score(evaluate(one.apply(copy.deepcopy(model)))), one) for one in compared.plans]
    if all(score == -math.inf for score, _ in scored):
        raise InvalidArgumentError("evaluate", "gave no alternative a score: all are NaN")
    return compared.judged(scored)


@dataclass(frozen=True)
class Compared:
    """Plans for the same tables and budget: the mixture, and each format alone.

    Attributes:
        plans: those that fit, the one with the least error first; where errors are assumed, the
            plain smaller dimension before all.
        left_out: formats that cannot reach the budget, or need trained tables.
    """

    plans: tuple[TablePlan, ...]
    left_out: tuple[Alternative, ...]

    @property
    def best(self) -> TablePlan:
        """The plan with the least error; a single format where a mixture is no better."""
        alternatives = [_alternative(one) for one in self.plans]
        return dataclasses.replace(self.plans[0], alternatives=(*alternatives, *self.left_out))

    def judged(self, scored: Sequence[tuple[float, TablePlan]]) -> TablePlan:
        """The plan with the best measured score."""
        order = sorted(scored, key=lambda pair: -pair[0])
        alternatives = [dataclasses.replace(_alternative(one), score=score) for score, one in order]
        return dataclasses.replace(order[0][1], alternatives=(*alternatives, *self.left_out))


def plan_tables(
    facts: Sequence[TableFacts],
    *,
    budget: int | str | None = None,
    ratio: float | None = None,
    methods: Iterable[str] | None = None,
    codes: bool | None = None,
) -> Compared:
    """`plan` for tables of which only facts are known: see there.

    Args:
        codes: whether formats are possible that cannot be trained; where all tables are trained by
            default.
    """
    dense = sum(one.nbytes for one in facts)
    room = _budget(dense, budget, ratio)
    total = sum(one.lookups for one in facts) or 1.0
    weights = [one.lookups / total for one in facts]
    trained = all(one.weight is not None for one in facts)
    every = {
        name: [list(one_format.choices(one)) for one in facts]
        for name, one_format in formats_of(methods).items()
        if name != Dense.name
    }
    stay = [list(Dense().choices(one)) for one in facts]
    fixed = trained if codes is None else codes
    basis = Provenance.MEASURED if trained else Provenance.ASSUMED

    def planned(method: str, choices: list[list[Choice]]) -> TablePlan | None:
        taken = allocate(choices, weights, room)
        if taken is None:
            return None
        tables = {one.name: choice for one, choice in zip(facts, taken, strict=True)}
        return TablePlan(tables, room, dense, method, (), basis, facts=tuple(facts))

    plans: list[TablePlan] = []
    left_out: list[Alternative] = []
    for name, of_format in every.items():
        single = [[*of_table, *stays] for of_table, stays in zip(of_format, stay, strict=True)]
        least = sum(min(choice.nbytes for choice in of_table) for of_table in single)
        possible = fixed or FORMATS[name].trains
        single_plan = planned(name, single) if possible else None
        if single_plan is not None:
            plans.append(single_plan)
            continue
        why = f"at least {format_bytes(least)}"
        if not possible:
            why += ", and for tables that are trained already"
        left_out.append(Alternative(name, least, None, None, why))
    open_to = [of_format for name, of_format in every.items() if fixed or FORMATS[name].trains]
    columns = zip(*open_to, stay, strict=True)
    mixture = planned(MIXED, [[c for of_format in column for c in of_format] for column in columns])
    if mixture is None:
        least = min((one.nbytes for one in left_out), default=dense)
        raise InvalidArgumentError(
            "budget", f"{format_bytes(room)} are too few for these tables and methods; "
            f"the least is about {format_bytes(least)}",
        )  # fmt: skip
    # The mixture last: of equals the simpler is taken.
    order: list[TablePlan] = sorted([*plans, mixture], key=_error)
    if not fixed and basis is Provenance.ASSUMED:
        # Stable: others stay in the order of what they are assumed to lose.
        order.sort(key=lambda one: one.method != PLAIN)
    return Compared(tuple(order), tuple(left_out))


def _plain(
    facts: Sequence[TableFacts], compared: Compared, budget: int | str | None, ratio: float | None
) -> tuple[TablePlan, ...]:
    """The plan of a smaller dimension, which others have to beat, where it is not compared yet."""
    known = {one.method for one in compared.plans} | {one.method for one in compared.left_out}
    if PLAIN in known:
        return ()
    try:
        plans = plan_tables(facts, budget=budget, ratio=ratio, methods=[PLAIN]).plans
    except InvalidArgumentError:  # it cannot be so small
        return ()
    return tuple(one for one in plans if one.method == PLAIN)


def _check(name: str, module: Any, choice: Choice, known: TableFacts | None) -> None:
    """Raise InvalidArgumentError unless `module` is the planned table, trained if it must be."""
    if type(module) not in (torch.nn.Embedding, torch.nn.EmbeddingBag):
        raise InvalidArgumentError("model", f"'{name}' is no embedding table")
    shape = (module.num_embeddings, module.embedding_dim)
    if known is not None and shape != (known.rows, known.dim):
        raise InvalidArgumentError(
            "model", f"'{name}' is {shape[0]} x {shape[1]}, not {known.rows} x {known.dim}"
        )
    if not FORMATS[choice.format].trains and (known is None or known.weight is None):
        raise InvalidArgumentError(
            "model", f"'{name}' is to become {choice.format}, which is made from trained tables",
            remedy="plan.converting(model), once they are trained",
        )  # fmt: skip


def _budget(dense: int, budget: int | str | None, ratio: float | None) -> int:
    if (budget is None) == (ratio is None):
        raise InvalidArgumentError("budget", "give either a budget or a ratio")
    if ratio is not None:
        if not (isinstance(ratio, int | float) and ratio >= 1 and math.isfinite(ratio)):
            raise InvalidArgumentError("ratio", f"{ratio!r} is not a number from 1 up")
        return int(dense / ratio)
    room = parse_bytes(budget, "budget") if isinstance(budget, str) else budget
    if room is None or room < 1:
        raise InvalidArgumentError("budget", f"{budget} is no number of bytes")
    return room


def _score(given: Any) -> float:
    """What `evaluate` returned, NaN as the worst; InvalidArgumentError if it is no number."""
    try:
        score = float(given)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            "evaluate", f"returned a {type(given).__name__}, not a score",
            remedy="one number, the higher the better",
        ) from error  # fmt: skip
    return -math.inf if math.isnan(score) else score


def _error(one: TablePlan) -> float:
    """Of all tables, by look-ups: one minus the geometric mean of what is kept."""
    total = sum(fact.lookups for fact in one.facts) or 1.0
    lost = sum(fact.lookups * one.tables[fact.name].loss for fact in one.facts)
    # Differences in the last digits do not make a mixture better.
    return round(-math.expm1(-lost / total), 9)


def _alternative(one: TablePlan) -> Alternative:
    return Alternative(one.method, one.nbytes, _error(one))


def _written(choice: Choice) -> dict[str, Any]:
    """As `_choice` reads it: files call the format a way."""
    written = dataclasses.asdict(choice)
    return {"way": written.pop("format"), **written}


def _choice(saved: Mapping[str, Any]) -> Choice:
    settings = {
        str(key): tuple(map(int, value)) if isinstance(value, list) else int(value)
        for key, value in saved["settings"].items()
    }
    if saved["way"] not in FORMATS:
        raise ValueError(f"there is no table format '{saved['way']}'")
    return Choice(saved["way"], settings, int(saved["nbytes"]), float(saved["error"]))


def _described(choice: Choice) -> str:
    parts = [
        f"{key}={len(value) if isinstance(value, tuple) else value}"
        for key, value in choice.settings.items()
    ]
    return " ".join([choice.format, *parts])


def _said(one: Alternative) -> str:
    if one.error is None:
        return f"{one.method}: {one.why_not}"
    score = "" if one.score is None else f", score {one.score:.4g}"
    score += f" ({one.why_not})" if one.why_not else ""
    return f"{one.method}: {format_bytes(one.nbytes)}, {one.error:.1%} lost{score}"
