"""A recorded step with its tables kept in other ways: other look-ups, updates and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.durations import questions, rescale
from slipstream.graph import Call, Editor, Graph, Role, TensorSpec
from slipstream.technique import Context
from slipstream.techniques.embedding.exchange import insert, retime
from slipstream.techniques.embedding.tables import (
    Lookup,
    list_updates,
    lookups,
    updates,
    with_arrays,
)

_ADD = "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"
ALONE = "slipstream.techniques.embedding.alone"
"""Where modules are that are timed by themselves."""

_TABLE_ROLES = (Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER, Role.TEMPORARY)


@dataclass(frozen=True)
class Group:
    """Tables that become one set of numbers.

    Attributes:
        lookups: of these tables.
        numbers: that are trained in their place; 0 for none.
        nbytes: that are kept in their place.
        a_pass: a look-up, or its backward pass, as the micro-benchmark times it.
    """

    lookups: tuple[Lookup, ...]
    numbers: int
    nbytes: int
    a_pass: Callable[[Lookup, bool], Call]

    @property
    def tables(self) -> dict[int, TensorSpec]:
        """By storage, in the order of their look-ups."""
        return {lookup.table: lookup.weight for lookup in self.lookups}


def module_pass(
    modules: str, kind: str, settings: dict[str, Any], lookup: Lookup, backward: bool
) -> Call:
    """A look-up by another module, or its backward pass, as the micro-benchmark times it.

    Args:
        modules: where its class is.
        kind: the class; where the look-up is of bags, the one that is called so with ``Bag``.
        settings: what it is made with besides the table's shape and the bags' mode.
    """
    rows, dim = lookup.weight.shape
    described = {"num_embeddings": rows, "embedding_dim": dim, **settings}
    if lookup.bags is not None:
        kind, described["mode"] = f"{kind}Bag", lookup.mode
    arguments = (f"{modules}:{kind}", tuple(described.items()), lookup.input, backward)
    return Call("slipstream::module_pass()", arguments, (lookup.made,))


def hashed_pass(numbers: int, block: int, sign: bool, lookup: Lookup, backward: bool) -> Call:
    """`module_pass` of a look-up in a shared array."""
    settings = {"size": numbers, "block": block, "sign": sign}
    return module_pass(ALONE, "Alone", settings, lookup, backward)


def asked(graph: Graph, groups: Sequence[Group]) -> list[Call]:
    """Calls whose durations `exchanged` looks up."""
    found = [
        group.a_pass(lookup, backward)
        for group in groups
        for lookup in group.lookups
        for _, backward in zip(lookup.tasks, (False, True), strict=False)
    ]
    kept, _ = _updates(graph, groups)
    return [*found, *questions(graph, kept), *(_sum(group) for group in groups if _joins(group))]


def exchanged(edit: Editor, graph: Graph, groups: Sequence[Group], context: Context) -> None:
    """Other look-ups and gradients, one update in place of a group's, other memory."""

    for group in groups:
        first = True
        for lookup in group.lookups:
            retime(edit, graph, context, lookup, group.a_pass)
            if lookup.backward is None:
                continue
            if not first and _joins(group):
                insert(edit, lookup.backward, _sum(group), context)
            first = False
    kept, removed = _updates(graph, groups)
    rescale(edit, graph, kept, context.durations)
    for task in removed:
        edit.remove(task)
    _resize(edit, graph, groups)


def _joins(group: Group) -> bool:
    """Whether gradients of several tables become one."""
    return len(group.tables) > 1


def _sum(group: Group) -> Call:
    array = TensorSpec("float32", (group.numbers,), (1,))
    return Call(_ADD, (array, array, 1), (array,))


def _places(
    graph: Graph, groups: Sequence[Group]
) -> dict[tuple[int, ...], list[tuple[int, int | None]]]:
    """By shape, of each table in the order of look-ups: its group, and what comes in its place.

    That is the number of trained numbers for a group's first table and None for the others; the
    group is -1 and the number the table's own where it stays as it is.
    """
    found: dict[tuple[int, ...], list[tuple[int, int | None]]] = {}
    group_of = {table: n for n, group in enumerate(groups) for table in group.tables}
    seen: set[int] = set()
    met: set[int] = set()
    for lookup in lookups(graph):
        if lookup.table in met:
            continue
        met.add(lookup.table)
        number = group_of.get(lookup.table, -1)
        trained: int | None = lookup.weight.numel
        if number >= 0:
            trained = groups[number].numbers if number not in seen else None
            seen.add(number)
        found.setdefault(lookup.weight.shape, []).append((number, trained or None))
    return {shape: own for shape, own in found.items() if any(number >= 0 for number, _ in own)}


def _updates(graph: Graph, groups: Sequence[Group]) -> tuple[dict[int, Call], list[int]]:
    """Of the optimizer's tasks on tables: those that stay, with other calls; those that go."""
    places = _places(graph, groups)
    if not places:
        return {}, []
    new: dict[tuple[int, ...], list[tuple[int, ...] | None]] = {
        shape: [
            shape if group < 0 else None if trained is None else (trained,)
            for group, trained in own
        ]
        for shape, own in places.items()
    }
    kept = {
        task: with_arrays(graph.calls[graph.tasks.call[task]], new)
        for task in list_updates(graph, list(places))
    }
    removed: list[int] = []
    for shape, tasks in updates(graph, list(places)).items():
        # Tables of one shape are updated one after the other, alike.
        own = len(tasks) // len(new[shape])
        for number, becomes in enumerate(new[shape]):
            mine = tasks[number * own : (number + 1) * own]
            if becomes is None:
                removed += mine
            elif becomes != shape:
                for task in mine:
                    call = graph.calls[graph.tasks.call[task]]
                    kept[task] = with_arrays(call, {shape: [becomes]})
    return kept, removed


def _resize(edit: Editor, graph: Graph, groups: Sequence[Group]) -> None:
    """Whatever is as large as a table becomes its share of what is kept for its group."""
    share_of: dict[int, float] = {}
    by_size: dict[int, list[float]] = {}
    sizes = {lookup.table: lookup.weight.nbytes for lookup in lookups(graph)}
    for group in groups:
        share = group.nbytes / sum(spec.nbytes for spec in group.tables.values())
        share_of.update(dict.fromkeys(group.tables, share))
    for table, nbytes in sizes.items():
        by_size.setdefault(nbytes, []).append(share_of.get(table, 1.0))
    memory = graph.memory
    parameters = set(graph.parameters.tolist())
    for one in range(len(memory)):
        nbytes, storage = int(memory.nbytes[one]), int(memory.storage[one])
        if nbytes not in by_size or int(memory.role[one]) not in _TABLE_ROLES:
            continue
        if storage in share_of:
            edit.resize(one, round(nbytes * share_of[storage]))
        elif storage not in parameters:
            # A gradient or an optimizer's state: of one of the tables of this size.
            edit.resize(one, round(nbytes * sum(by_size[nbytes]) / len(by_size[nbytes])))
